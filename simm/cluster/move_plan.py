"""Plan how the shards that a map moves into one worker N come from their previous owners. No I/O, no clock.

``arena/shard_words.py`` argues the protocol; this file decides N's side of it, step by step:

    FREEZE  at P      all shards that one previous owner P has for N, in one exchange; every P at the same time
    ADOPT   at N      at once, with or without P's answer, so that writers wait for milliseconds
    copy              the values of one group of shards after the other, put-if-absent
    FINISH  at N      P has nothing more of the group; N no longer sends readers there
    MOVED             ``Member.moved`` reads off N's words what is finished

Two drivers do what the plan says and report the outcome to it: ``server/migration.py`` with sockets and threads,
``sim/mover.py`` on a simulated network.

What can go wrong, and what we chose
====================================

**P does not answer FREEZE.** It is retried for ``FREEZE_S``, unless the refusal is one that a retry cannot change
(:class:`Freeze`). Then N adopts the shards without P's values: readers get misses, and writers wait no longer.

**P stops in the middle of the copy.** It has ``GIVE_UP_S`` from the first failure since its last progress, and
``TRIES_MIN`` tries. Then N finishes the group without the rest, and P's other groups at their next failure
(:class:`ProgressTimeout`, :class:`CopyTries`). If P dies, the manager's next map says so.

**N itself waits**, for its share of the rate or for other copies: longer than ``GIVE_UP_S`` where the rate is low. That
is not P's silence. So it begins with a failure, not with the last progress, and each group counts its own: another
group's failure may be one that P recovered from while this group waited. Nor is it silence if N waits between two
failures, which is why one or two of them never suffice.

**N's map is old.** P refuses FREEZE for a shard that it knows by a newer map. The plan adopts nothing and waits for
that map; it tries again after ``REPLAN_S`` if none comes.

**A newer map comes during the copy.** It may take a shard away from N and bring it back from another P. So every step
asks :meth:`MovePlan.wanted_of` which of its shards the newest map still gives N since the same epoch. The driver makes
that check and the order that follows it (ADOPT, COMMIT, FINISH) one step, which no new map divides. The worker
checks the same by the epoch in the order.

**N's worker is fenced or has a newer map.** Then ADOPT does not set the word. What was not adopted is released and
planned again.

**The mover dies.** Nothing is remembered but in N's arena: words say which shards are finished, the table says which
values are here. The next mover plans from those.

Cost: O(shards that move) for each plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..wire.messages import Status, WorkerInfo
from ..wire.shard_set import EPOCH_MASK
from .assignment import Member, Words

#: How long FREEZE is retried.
FREEZE_S: Final = 2.0
#: Failing for so long, without progress, a previous owner is given up with what it still has.
GIVE_UP_S: Final = 10.0
#: So many tries in a row fail before that. One stream that was replaced can break a connection twice: a lent one, and
#: the next one while the stream is still starting.
TRIES_MIN: Final = 3
#: Shortest and longest pause before a retry; the driver chooses at random.
RETRY_S: Final = (0.02, 0.2)
#: Between two plans by the same map.
REPLAN_S: Final = 1.0
#: Shards whose values are listed and copied together.
GROUP_SHARDS: Final = 256

#: Refusals that a retry does not change.
_FINAL: Final = frozenset((Status.UNAUTHORIZED, Status.VERSION, Status.BAD_REQUEST))


class Job(NamedTuple):
    """Shards of one previous owner, each with the epoch since which it is N's, by the map of ``epoch``."""

    source: WorkerInfo
    epoch: int
    since: dict[int, int]


class Adopted(NamedTuple):
    """What follows an ADOPT: shards to FINISH at once, and groups to copy first."""

    finish: set[int]
    copy: list[Job]


class Freeze:
    """The tries of one FREEZE. Times are seconds of any clock that does not go back."""

    #: Try again after a pause.
    RETRY: Final = "retry"
    #: Adopt without the previous owner's values.
    GIVE_UP: Final = "give up"
    #: The map is old: adopt nothing.
    AWAIT_MAP: Final = "await map"

    def __init__(self, now: float) -> None:
        self._until = now + FREEZE_S

    def failed(self, status: int | None, now: float) -> str:
        """Return what to do after a refusal with ``status``, or after no answer (None)."""
        if status == Status.WRONG_OWNER:
            return self.AWAIT_MAP
        return self.GIVE_UP if status in _FINAL or now > self._until else self.RETRY


class ProgressTimeout:
    """What all copies from one previous owner know of it."""

    def __init__(self) -> None:
        #: When it last brought a copy on.
        self.progress_at = -math.inf
        #: Its time is up; progress resets that.
        self.given_up = False

    def progress(self, now: float) -> None:
        """Take note of a page or a value that came."""
        self.progress_at = now
        self.given_up = False


class CopyTries:
    """The tries of one group's copy, from a previous owner that others copy from too."""

    def __init__(self, timeout: ProgressTimeout) -> None:
        self._timeout = timeout
        #: The first failure of this group since the previous owner brought any copy on, and how many there were.
        self._failing_since = -math.inf
        self._failures = 0

    def failed(self, status: int | None, now: float) -> bool:
        """Return True if the group is given up after a refusal or no answer (None)."""
        timeout = self._timeout
        if not self._failures or timeout.progress_at >= self._failing_since:
            self._failing_since, self._failures = now, 0
        self._failures += 1
        silent = self._failures >= TRIES_MIN and now > self._failing_since + GIVE_UP_S
        if silent or status in _FINAL:
            timeout.given_up = True
        return timeout.given_up


class MovePlan:
    """What moves into one worker. Not thread-safe, except for :meth:`wanted_of`.

    Args:
        member: takes the maps.
        worker: the worker's number.
        group_shards: most shards of a group; by default ``GROUP_SHARDS``.
    """

    def __init__(self, member: Member, worker: int, group_shards: int = 0) -> None:
        self.member = member
        self.worker = worker
        self._group_shards = group_shards
        #: Epoch of the map that is planned for.
        self.epoch = 0
        self._wanted: Mapping[int, int] = {}
        #: Shards that a job has, or had until it ended, with their epochs.
        self._taken: dict[int, int] = {}

    def lacking(self, words: Words) -> dict[int, int]:
        """Return the shards that still move in by the newest map and N's words, with their epochs."""
        found = self.member.map
        if found is None:
            return {}
        since = found.since
        return {shard: since[shard] for shard in self.member.moving(self.worker, words)}

    def update(self, lacking: Mapping[int, int]) -> None:
        """Plan for the newest map from now on; ``lacking`` as :meth:`lacking` returned it."""
        self.epoch, self._wanted = self.member.epoch, lacking

    def new_jobs(self) -> list[Job]:
        """Return a job for each previous owner that has shards which no job has yet."""
        jobs = []
        wanted, taken = self._wanted, self._taken
        for source, shards in self.member.tasks(self.worker):
            since = {shard: wanted[shard] for shard in shards if shard in wanted and taken.get(shard) != wanted[shard]}
            if since:
                taken.update(since)
                jobs.append(Job(source, self.epoch, since))
        return jobs

    def wanted_of(self, job: Job) -> list[int]:
        """Return those of a job's shards that the newest map still gives N since the same epoch."""
        wanted = self._wanted
        return [shard for shard, since in job.since.items() if wanted.get(shard) == since]

    def release(self, job: Job, keep: Collection[int] = ()) -> None:
        """End a job for all its shards but ``keep``: the next plan may take them up again."""
        for shard, since in job.since.items():
            if shard not in keep and self._taken.get(shard) == since:
                del self._taken[shard]

    def adopted(
        self, job: Job, ordered: Collection[int], frozen: Sequence[int], words: memoryview | NDArray[np.uint64]
    ) -> Adopted:
        """Return what follows an ADOPT of ``ordered``, by N's words after it. Releases what was not adopted.

        ``frozen``: the shards whose values the previous owner keeps for N.
        """
        since = job.since
        here = {shard for shard in ordered if int(words[shard]) & EPOCH_MASK == since[shard]}
        self.release(job, here)
        copied = [shard for shard in frozen if shard in here]
        size = self._group_shards or GROUP_SHARDS
        groups = [
            Job(job.source, job.epoch, {shard: since[shard] for shard in copied[start : start + size]})
            for start in range(0, len(copied), size)
        ]
        return Adopted(here.difference(frozen), groups)
