"""The mover: a process that brings the values of shards that moved to one worker from their previous owners.

Its supervisor forks one for each worker while the map says that something moves in there, and hands it every map that
the worker has taken. ``simm/shards.py`` tells the whole story of a moving shard; this is N's side of it:

    FREEZE  at P      all shards that P has for us, in one exchange; all previous owners at the same time
    ADOPT   at N      at once, so that writers wait for milliseconds
    LIST    at P      a group of shards after the other, page by page
    fetch             what our worker lacks, straight into its granted chunks
    COMMIT  at N      put-if-absent
    FINISH  at N      the group is here: readers are sent to P for it no more

What can go wrong, and what we chose
====================================

**P does not answer.** FREEZE is tried for ``FREEZE_S``, then the shards are adopted without fall-back: their values are
misses, and writers wait no longer. In the middle of the copy P has ``GIVE_UP_S`` from its last page on, then what it
still has is given up. A P that stops but does not die is noticed by the manager, whose next map says so.

**P lies**, by mistake or not: ``previous.py`` checks all that it says. Whatever is wrong closes the connection, which
costs patience as silence does.

**Our map is old.** P refuses FREEZE for shards that it has by a newer map: then we wait for that one. The other way
round, a map that comes while we copy may take a shard away and bring it back from somebody else. So what is copied is
checked against the newest map right before its COMMIT, under the lock under which ADOPT is said; the worker checks the
same by the epoch of the last ADOPT.

**Our worker dies.** Every session with it is broken then, so this process ends, with its grants, and the supervisor
forks another when the worker is back. There is nothing to be remembered: the words say what is finished, the table
what is here. That also holds when it is this process that dies.

**No room.** GRANT evicts as it does for clients, and yields fewer chunks than asked for when all is pinned or granted.
We commit what we got and ask again; with nothing granted, while no other thread of ours holds a chunk; then the value
is given up and counted. Nobody waits here while holding a chunk: the bucket and the budget come before the chunks.

**Copying hurts those who work.** Bytes pass a token bucket (``--move-mib-s``), at most ``COPIERS`` pages are
copied at once, and ``IN_FLIGHT_BYTES`` of chunks are held by all of them together.

Costs: two round trips for each ``BATCH_BYTES`` or ``BATCH_KEYS`` values. P scans its table once for each group of
``GROUP_SHARDS`` and page of ``LIST_MOST``: smaller groups make progress finer and scans more.
"""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from . import messages as M
from .channel import Channel, Refused
from .errors import TransportError
from .hashing import shard_of
from .member import Member
from .messages import Status
from .ownworker import OwnWorker, Unwelcome, WorkerLost
from .pace import Budget, Pace
from .previous import Previous
from .rpc import Connection, Flag, decode, encode
from .session import WorkerSession
from .shardmap import ShardMap
from .shards import EPOCH_MASK, bitmap_of
from .sizes import chunk_bytes_for

log = logging.getLogger("simm.mover")

#: How long FREEZE is tried.
FREEZE_S: Final = 2.0
#: Without any progress for so long, what a previous owner still has is given up.
GIVE_UP_S: Final = 10.0
#: Between two tries.
RETRY_S: Final = (0.02, 0.2)
#: After our map turned out to be old, if no newer one comes.
REPLAN_S: Final = 1.0

FREEZERS: Final = 32
COPIERS: Final = 4
GROUP_SHARDS: Final = 256
BATCH_BYTES: Final = 8 << 20
BATCH_KEYS: Final = 256
IN_FLIGHT_BYTES: Final = 32 << 20
#: Tries of a value that no chunk was to be had for, or that changed at P under way.
ATTEMPTS: Final = 3
PROGRESS_S: Final = 0.25
#: A mover that has said nothing for so long is of no use any more, its supervisor finds.
SILENT_S = 10.0
TURN_S: Final = 0.02
#: With nothing left, we wait so long for the next map: a cluster that grows moves shards in several steps.
LINGER_S: Final = 1.0

_OK: Final = int(Status.OK)
_TORN: Final = int(Status.TORN)
_PRESENT: Final = int(Status.PRESENT)
#: Refusals that another try will not change.
_FINAL: Final = frozenset((Status.UNAUTHORIZED, Status.VERSION, Status.BAD_REQUEST))

#: A value as LISTED names it: (digest, length).
_Item = tuple[bytes, int]


@dataclass
class MoverSettings:
    """What a mover is started with."""

    name: str
    instance: int
    worker: int
    #: The worker's UNIX socket.
    uds: str
    #: For previous owners.
    token: str = ""
    #: Cap in bytes a second; 0 for none.
    bytes_per_s: int = 0


class Job(NamedTuple):
    """Shards of one previous owner, each with the epoch since which it is ours, by the map of ``epoch``."""

    previous: Previous
    epoch: int
    since: dict[int, int]


class Mover:
    """See the module's docstring. One thread reads maps and plans; FREEZE and copies have threads of their own."""

    def __init__(self, settings: MoverSettings, supervisor: socket.socket) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self.member = Member(settings.name, settings.instance, [settings.worker])
        self.own = OwnWorker(settings.uds)
        self.pace = Pace(settings.bytes_per_s)
        self.budget = Budget(min(IN_FLIGHT_BYTES, max(1, self.own.grant_bytes_max // 4)))
        self._freezers = ThreadPoolExecutor(FREEZERS, "simm-freeze")
        self._copiers = ThreadPoolExecutor(COPIERS, "simm-copy")
        self._previous: dict[tuple[str, int, int, int], Previous] = {}
        #: By the map that is planned for: its epoch, and shard -> since. Replaced together, under the gate.
        self._epoch = 0
        self._wanted: dict[int, int] = {}
        self._replan_at = 0.0
        self._lock = threading.Lock()
        # Under the lock: jobs under way; what is being moved, or was, shard -> since; counters.
        self._running: set[Future[None]] = set()
        self._taken: dict[int, int] = {}
        self.values = 0
        self.bytes = 0
        self.lost = 0
        self._told = M.MoveProgress(0, 0, 0, 0, 0)
        self._told_at = time.monotonic()
        self._conn = Connection()

    # -- planning -------------------------------------------------------------------------------

    def run(self) -> bool:
        """Until everything is here; False when the supervisor has gone before that. Raises WorkerLost."""
        poll = select.poll()
        poll.register(self.supervisor, select.POLLIN)
        done_at = 0.0
        while True:
            if poll.poll(int(TURN_S * 1000)) and not self._read():
                return False
            busy = self._reap()
            if time.monotonic() >= self._replan_at:
                busy = self._plan() or busy
            left = len(self.member.moving(self.settings.worker, self.own.words().data))
            if self.member.map is None or left or busy:
                self._tell(left)
                done_at = 0.0
            elif not done_at:
                done_at = time.monotonic()
                self._tell(0, at_once=True)
            elif time.monotonic() > done_at + LINGER_S:
                return True

    def _reap(self) -> bool:
        """Take note of the jobs that ended; are there others? Raises what one of them raised."""
        with self._lock:
            ended = [future for future in self._running if future.done()]
            self._running.difference_update(ended)
            busy = bool(self._running)
        for future in ended:
            future.result()
        return busy

    def _read(self) -> bool:
        """Maps from the supervisor; False when it has gone."""
        data = self.supervisor.recv(1 << 20)
        if not data:
            return False
        self._conn.receive_data(data)
        newest = None
        while (frame := self._conn.next_frame()) is not None:
            msg = decode(frame)
            if isinstance(msg, M.MapReply):
                newest = msg
        if newest is not None and self.member.take_map(ShardMap(newest)) is not None:
            self._replan_at = 0.0
        return True

    def _plan(self) -> bool:
        """Start on what the map wants and nobody works on; is there any?"""
        self._replan_at = time.monotonic() + REPLAN_S
        shard_map, worker = self.member.map, self.settings.worker
        if shard_map is None:
            return False
        since = shard_map.since
        wanted = {shard: since[shard] for shard in self.member.moving(worker, self.own.words().data)}
        with self.own.gate:
            self._epoch, self._wanted = shard_map.epoch, wanted
        started = False
        for info, shards in self.member.tasks(worker):
            with self._lock:
                fresh = {
                    shard: wanted[shard]
                    for shard in shards
                    if shard in wanted and self._taken.get(shard) != wanted[shard]
                }
                self._taken.update(fresh)
            if fresh:
                key = (info.host, info.port, info.instance, info.worker)
                if key not in self._previous:
                    self._previous[key] = Previous(info, self.settings.token)
                self._submit(self._freezers, self._take_over, Job(self._previous[key], shard_map.epoch, fresh))
                started = True
        return started

    def _submit(self, pool: ThreadPoolExecutor, body: Callable[[Job], None], job: Job) -> None:
        with self._lock:
            self._running.add(pool.submit(body, job))

    def _still(self, job: Job) -> list[int]:
        """Those of a job's shards that the newest map still gives us by the same epoch."""
        wanted = self._wanted
        return [shard for shard, since in job.since.items() if wanted.get(shard) == since]

    def _tell(self, left: int, *, at_once: bool = False) -> None:
        """Progress, to the supervisor, a few times a second and at the end."""
        now = time.monotonic()
        passed = now - self._told_at
        if passed < PROGRESS_S and not at_once:
            return
        rate = int((self.bytes - self._told.bytes) / passed) if passed else 0
        self._told, self._told_at = M.MoveProgress(left, self.bytes, rate, self.values, self.lost), now
        self.supervisor.sendall(encode(self._told, 0, flags=Flag.PUSH))

    # -- taking over ----------------------------------------------------------------------------

    def _take_over(self, job: Job) -> None:
        """FREEZE there, ADOPT here, and then the copies."""
        frozen = self._freeze(job)
        if frozen is None:
            self._put_back(job, set())
            return
        with self.own.gate:
            here = set(self._still(job))
            self.own.adopt(self._epoch, here, here.intersection(frozen))
        words = self.own.words() & np.uint64(EPOCH_MASK)
        adopted = {shard for shard in here if words[shard] == job.since[shard]}
        # The rest: the worker is fenced, or has a newer map than we, and there will be another for us too.
        self._put_back(job, adopted)
        behind = [shard for shard in frozen if shard in adopted]
        self._finish(job, adopted.difference(frozen))
        for start in range(0, len(behind), GROUP_SHARDS):
            group = {shard: job.since[shard] for shard in behind[start : start + GROUP_SHARDS]}
            self._submit(self._copiers, self._copy_group, Job(job.previous, job.epoch, group))

    def _put_back(self, job: Job, keep: set[int]) -> None:
        """All but these wait for a newer map, or for the next plan."""
        with self._lock:
            for shard, since in job.since.items():
                if shard not in keep and self._taken.get(shard) == since:
                    del self._taken[shard]

    def _freeze(self, job: Job) -> list[int] | None:
        """Which shards are frozen at the previous owner; none if it is out of reach. None: our map is old."""
        previous, shards = job.previous, list(job.since)
        until = time.monotonic() + FREEZE_S
        while self._still(job):
            try:
                return previous.freeze(job.epoch, shards)
            except Refused as exc:
                if exc.status == Status.WRONG_OWNER:
                    log.info("%s: %s; waiting for a newer map", previous, exc)
                    return None
                why: TransportError = exc
                if exc.status in _FINAL:
                    until = 0.0
            except TransportError as exc:
                why = exc
            if time.monotonic() > until:
                log.warning("%s: %s; %d shards are taken over without their values", previous, why, len(shards))
                return []
            time.sleep(random.uniform(*RETRY_S))
        return []

    def _finish(self, job: Job, shards: set[int]) -> None:
        """What the previous owner had of these is here, or given up."""
        with self.own.gate:
            ended = shards.intersection(self._still(job))
            if ended:
                self.own.finish(self._epoch, ended)

    # -- copying --------------------------------------------------------------------------------

    def _copy_group(self, job: Job) -> None:
        """Copy all that the previous owner has of a group of shards, page by page; then FINISH."""
        previous = job.previous
        bitmap, asked = bitmap_of(job.since), frozenset(job.since)
        cursor = 0
        began = time.monotonic()
        while self._still(job):
            try:
                with previous.channel() as channel:
                    page = previous.list_page(channel, bitmap, cursor, asked)
                    self._copy_page(job, channel, page)
            except TransportError as exc:
                previous.drop_connections()  # those that wait may be broken as this one was
                final = isinstance(exc, Refused) and exc.status in _FINAL
                if final or previous.given_up or time.monotonic() > max(began, previous.progress_at) + GIVE_UP_S:
                    previous.given_up = True
                    log.warning("%s: %s; what is left of %d shards is given up", previous, exc, len(asked))
                    break
                time.sleep(random.uniform(*RETRY_S))
                continue
            previous.progress()
            cursor = page.cursor
            if not cursor:
                break
        self._finish(job, set(asked))

    def _copy_page(self, job: Job, channel: Channel, page: M.Listed) -> None:
        """Copy what a page names and our worker lacks."""
        digests = [entry[0] for entry in page.entries]
        if not digests:
            return
        names = {space.number: space.name for space in page.namespaces}
        missing: dict[str, dict[bytes, int]] = {}
        for slot, (digest, length, _flags, namespace) in zip(self.own.reader.slots_of_many(digests), page.entries):
            if slot < 0:
                missing.setdefault(names[namespace], {})[digest] = length
        for name, values in missing.items():
            for batch in _batches(list(values.items()), min(BATCH_BYTES, self.budget.most)):
                self._copy_batch(job, channel, name, batch)

    def _copy_batch(self, job: Job, channel: Channel, namespace: str, items: list[_Item]) -> None:
        left = items
        tries = 0
        while left and tries < ATTEMPTS:
            before = len(left)
            chunks = sum(chunk_bytes_for(length) for _, length in left)
            # After a try in vain nobody else of ours is to hold a chunk.
            with self.budget.hold(self.budget.most + 1 if tries else chunks):
                if tries:
                    self.own.return_idle()
                self.pace.take(sum(length for _, length in left))
                try:
                    with self.own.session(namespace) as session:
                        left = self._exchange(job, channel, session, left)
                except Unwelcome as exc:
                    log.warning("%s; its values are not moved", exc)
                    break
            tries = tries + 1 if len(left) == before else 0
        if len(left) < len(items):
            job.previous.progress()
        if left:
            self._add(lost=len(left))

    def _exchange(self, job: Job, channel: Channel, session: WorkerSession, items: list[_Item]) -> list[_Item]:
        """Chunks, bytes and COMMIT for as many as there is room for; those that are worth another try."""
        reader = session.reader
        session.begin_copy()  # so that no successor session releases this one under our bytes
        grants = self.own.grants(session, [length for _, length in items])
        again = [item for item, grant in zip(items, grants) if grant is None]
        taken = [(item, grant) for item, grant in zip(items, grants) if grant is not None]
        unused = [grant for _, grant in taken]
        try:
            self.pace.take(-sum(length for _, length in again))
            if not taken:
                return again
            wants = []
            for (digest, length), (_, offset, _chunk) in taken:
                start = offset - reader.data_offset
                wants.append((digest, reader.data[start : start + length]))
            answers = job.previous.fetch(channel, wants)
            entries = []
            unused = []
            gone = 0
            for ((digest, length), grant), (status, crc, flags) in zip(taken, answers):
                if status == _OK:
                    entries.append((digest, grant[0], length, crc, flags, M.ABSENT))
                    continue
                unused.append(grant)
                if status == _TORN:
                    again.append((digest, length))
                else:
                    gone += 1
            self._commit(job, session, entries)
            self._add(lost=gone)
        finally:
            for grant in unused:
                session.untake(grant)
            session.end_copy()
        return again

    def _commit(self, job: Job, session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]]) -> None:
        """COMMIT what the newest map still wants from this previous owner; the other chunks go back."""
        if not entries:
            return
        statuses: list[int] = []
        with self.own.gate:
            allowed = set(self._still(job))
            wanted = [entry for entry in entries if shard_of(entry[0]) in allowed]
            if wanted:
                answer = self.own.ask(session, M.Commit(wanted, []), M.Committed)
                session.add_grants_locked(answer.grants)
                statuses = answer.statuses
        if len(wanted) < len(entries):
            kept = {entry[1] for entry in wanted}
            self.own.ask(session, M.ReturnGrants([entry[1] for entry in entries if entry[1] not in kept]), M.Done)
        if len(statuses) != len(wanted):
            raise WorkerLost("the worker answered COMMIT with something else")
        done = [entry[2] for entry, status in zip(wanted, statuses) if status == _OK]
        lost = sum(status not in (_OK, _PRESENT) for status in statuses)
        self._add(values=len(done), count=sum(done), lost=lost)

    def _add(self, *, values: int = 0, count: int = 0, lost: int = 0) -> None:
        with self._lock:
            self.values += values
            self.bytes += count
            self.lost += lost

    def close(self) -> None:
        """Hand back what we hold. All jobs must have ended."""
        for pool in (self._freezers, self._copiers):
            pool.shutdown()
        for previous in self._previous.values():
            previous.drop_connections()
        self.own.close()


def _batches(items: list[_Item], most: int) -> Iterator[list[_Item]]:
    """Runs of at most BATCH_KEYS values and ``most`` bytes of chunks, but at least one value."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        size = chunk_bytes_for(item[1])
        if batch and (len(batch) >= BATCH_KEYS or total + size > most):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def run_mover(settings: MoverSettings, supervisor: socket.socket) -> None:
    """Body of a mover process, after the fork. Returns when all is moved or the supervisor has gone.

    Raises WorkerLost, and RemoteProtocolError for a supervisor that sends no maps.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mover = Mover(settings, supervisor)
    if not mover.run():
        os._exit(0)  # no job is waited for
    log.info(
        "worker %d: %d values (%d bytes) moved in, %d did not come along",
        settings.worker, mover.values, mover.bytes, mover.lost,
    )  # fmt: skip
    mover.close()
