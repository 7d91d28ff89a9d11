"""Run a mover: a process that brings the values of shards that moved to one worker from their previous owners.

The supervisor forks one for each worker while its map moves shards in, and sends it every map that the worker has
taken. ``cluster/move_plan.py`` decides what to do and argues it. This file does it: FREEZE and ADOPT by threads of
their own, then page by page LIST, MARKS, fetch and COMMIT, then FINISH. ``server/migration_peers.py`` has the two ends.

* *The previous owner lies*, by mistake or not. Anything wrong closes the connection and counts as a failure to answer.
* *A map comes between the check of a value's shard and its COMMIT.* The check, COMMIT, ADOPT and FINISH are done under
  one lock, the gate, and so is the change to another map.
* *The own worker dies.* Every session with it breaks, so this process ends, with its grants. The supervisor forks
  another when the worker is back.
* *No room.* GRANT evicts as it does for clients, and returns fewer chunks than asked for when all else is pinned or
  granted. The mover commits what it got and asks again. If nothing was granted, it asks after a pause, in which clients
  return idle grants, and while no other thread of this process holds a chunk; then the value is given up. No thread
  waits here while it holds a chunk: it takes its share of the token bucket and of the budget first.
* *Values are given up*: those without room, those for which the previous owner stays BUSY, and those of one that
  answers no more. The mover counts what it knows of: what the owner has listed, with a length that can be. What it did
  not list is unknown. A page that fails is tried again as a whole, so what is lost of it is counted at its end.
* *A slot of the previous owner is damaged.* BUSY is said of each value, and may stay for ever. If it is said of a whole
  batch before any other answer, it may also pass in a moment, so the page is begun again, ``VAIN_MOST`` times. After
  that each value counts by itself: a damaged one costs no other, however they lie on pages and in batches.
* *Copying slows down clients.* Bytes pass a token bucket (``--move-mib-s``), at most ``COPIERS`` pages are copied at
  once, and together they hold at most ``IN_FLIGHT_BYTES`` of chunks. The threads that copy leave the CPU to others
  (``COPIER_NICE``); FREEZE and ADOPT, for which writers wait, do not.

Cost: two round trips for each ``BATCH_BYTES`` or ``BATCH_KEYS`` values. The previous owner scans its table once for
each group of shards and page of LISTED: smaller groups make progress finer and scans more frequent.
"""

from __future__ import annotations

import contextlib
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
from typing import Final

from ..arena.hashing import shard_of
from ..arena.marks.arrivals import Arrivals
from ..cluster.assignment import Member
from ..cluster.move_plan import REPLAN_S, RETRY_S, TRIES_MIN, CopyTries, Freeze, Job, MovePlan
from ..cluster.shard_map import ShardMap
from ..config.live import LiveSettings
from ..config.logs import reopen_logs
from ..config.parsers import TlsOptions
from ..errors import TransportError
from ..ipc.grant_pool import MAKING_S
from ..ipc.session import WorkerSession
from ..net.channel import Channel, Refused
from ..rpc import Connection, Flag, decode, encode
from ..slab import chunk_bytes_for
from ..wire import messages as M
from ..wire.keep_messages import LISTED_MARKED
from ..wire.messages import Status
from ..wire.shard_set import bitmap_of
from .migration_peers import ByteBudget, SessionRefused, SourceWorker, TargetWorker, TokenBucket, WorkerLost

log = logging.getLogger("simm.server.migration")

FREEZERS: Final = 32
COPIERS: Final = 4
#: Niceness of the threads that copy.
COPIER_NICE: Final = 10
BATCH_BYTES: Final = 8 << 20
BATCH_KEYS: Final = 256
IN_FLIGHT_BYTES: Final = 32 << 20
#: Tries of a value for which there was no chunk, or that changed at its source during the copy.
ATTEMPTS: Final = 3
#: How often a group of shards begins a page again, as BUSY was said of a whole batch. Less often than a previous owner
#: that fails is given up (``cluster/move_plan.py``): BUSY alone must not cost what else it has.
VAIN_MOST: Final = TRIES_MIN - 1
#: Tries that do not count, as the worker was making room for so long, and as many more as the largest value has MiB. A
#: request for room ends after a quarter of a second's work, and the next one goes on (docs/groups.md).
MAKING_TRIES: Final = 8
#: Tries to get the marks of a page, before its values are moved without them.
MARK_TRIES: Final = 3
PROGRESS_S: Final = 0.25
#: The supervisor replaces a mover from which no progress report has come for so long.
SILENT_S = 10.0
TURN_S: Final = 0.02
#: With nothing left, the mover waits so long for the next map: a growing cluster moves shards in several steps.
IDLE_S: Final = 1.0

#: A value as LISTED names it: (digest, length).
_Item = tuple[bytes, int]


class Outcome:
    """What has become of a group's values: ``lost`` of the page at hand, by all tries of it, so far as is known.

    Entries with an impossible length are not among them: nobody knows whether there ever was a value.

    ``heard``: an answer to a batch was taken, and each later one is. ``vain``: how many were not before, as the
    previous owner was BUSY for the whole of them.
    """

    __slots__ = ("heard", "lost", "vain")

    def __init__(self) -> None:
        self.lost: set[bytes] = set()
        self.heard = False
        self.vain = 0


@dataclass
class MoverSettings:
    """Settings of a mover."""

    name: str
    instance: int
    worker: int
    #: The worker's UNIX socket.
    uds: str
    #: Shown to previous owners.
    token: str = ""
    #: Most bytes a second; 0 for no limit.
    bytes_per_s: int = 0
    #: Connects to previous owners by TLS.
    tls: TlsOptions | None = None
    #: Users besides this process's own and root whose servers on this host are believed without a token.
    trusted: tuple[int, ...] = ()
    #: Has move_mib_s, which replaces ``bytes_per_s``. None: it cannot change.
    live: LiveSettings | None = None


class Mover:
    """A mover. One thread reads maps and plans; FREEZE and copies have threads of their own."""

    def __init__(self, settings: MoverSettings, supervisor: socket.socket) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self.member = Member(settings.name, settings.instance, [settings.worker])
        self.target = TargetWorker(settings.uds)
        self.bucket = TokenBucket(settings.bytes_per_s)
        self.budget = ByteBudget(min(IN_FLIGHT_BYTES, max(1, self.target.grant_bytes_max // 4)))
        self._freezers = ThreadPoolExecutor(FREEZERS, "simm-freeze")
        self._copiers = ThreadPoolExecutor(COPIERS, "simm-copy", _yield_cpu)
        self._sources: dict[tuple[str, int, int, int], SourceWorker] = {}
        #: Updated under the gate; jobs are made and released under the lock.
        self.plan = MovePlan(self.member, settings.worker)
        self._replan_at = 0.0
        #: Guards what follows: jobs in progress and counters.
        self._lock = threading.Lock()
        self._running: set[Future[None]] = set()
        self.values = 0
        self.bytes = 0
        self.lost = 0
        self._reported = M.MoveProgress(0, 0, 0, 0, 0)
        self._reported_at = time.monotonic()
        self._conn = Connection()

    # -- planning -------------------------------------------------------------------------------

    def run(self) -> bool:
        """Work until everything is here; return False if the supervisor ends first. Raises WorkerLost."""
        poll = select.poll()
        poll.register(self.supervisor, select.POLLIN)
        done_at = 0.0
        while True:
            if poll.poll(int(TURN_S * 1000)) and not self._read():
                return False
            busy = self._reap()
            if time.monotonic() >= self._replan_at:
                busy = self._plan() or busy
            left = len(self.member.moving(self.settings.worker, self.target.words().data))
            if self.member.map is None or left or busy:
                self._report(left)
                done_at = 0.0
            elif not done_at:
                done_at = time.monotonic()
                self._report(0, at_once=True)
            elif time.monotonic() > done_at + IDLE_S:
                return True

    def _reap(self) -> bool:
        """Collect the jobs that ended; return True if others run. Raises what one of them raised."""
        with self._lock:
            ended = [future for future in self._running if future.done()]
            self._running.difference_update(ended)
            busy = bool(self._running)
        for future in ended:
            future.result()
        return busy

    def _read(self) -> bool:
        """Take maps from the supervisor; return False if it has ended."""
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
        """Start the jobs that no thread has yet; return True if there were any."""
        self._replan_at = time.monotonic() + REPLAN_S
        shard_map = self.member.map
        if shard_map is None:
            return False
        lacking = self.plan.lacking(self.target.words().data)
        with self.target.gate:
            self.plan.update(lacking)
        with self._lock:
            jobs = self.plan.new_jobs()
        for job in jobs:
            info = job.source
            key = (info.host, info.port, info.instance, info.worker)
            if key not in self._sources:
                self._sources[key] = SourceWorker(
                    info, self.settings.token, shard_map.cluster, self.settings.tls, self.settings.trusted
                )
            self._submit(self._freezers, self._take_over, self._sources[key], job)
        return bool(jobs)

    def _submit(
        self, pool: ThreadPoolExecutor, body: Callable[[SourceWorker, Job], None], source: SourceWorker, job: Job
    ) -> None:
        with self._lock:
            self._running.add(pool.submit(body, source, job))

    def _report(self, left: int, *, at_once: bool = False) -> None:
        """Report progress to the supervisor, a few times a second and at the end."""
        now = time.monotonic()
        passed = now - self._reported_at
        if passed < PROGRESS_S and not at_once:
            return
        rate = int((self.bytes - self._reported.bytes) / passed) if passed else 0
        self._reported, self._reported_at = M.MoveProgress(left, self.bytes, rate, self.values, self.lost), now
        self.supervisor.sendall(encode(self._reported, 0, flags=Flag.PUSH))

    # -- taking over ----------------------------------------------------------------------------

    def _take_over(self, source: SourceWorker, job: Job) -> None:
        """FREEZE there, ADOPT here, and start the copies."""
        frozen = self._freeze(source, job)
        if frozen is None:
            with self._lock:
                self.plan.release(job)
            return
        with self.target.gate:
            here = set(self.plan.wanted_of(job))
            self.target.adopt(self.plan.epoch, here, here.intersection(frozen))
        words = self.target.words()
        with self._lock:
            following = self.plan.adopted(job, here, frozen, words)
        self._finish(job, following.finish)
        for group in following.copy:
            self._submit(self._copiers, self._copy_group, source, group)

    def _freeze(self, source: SourceWorker, job: Job) -> list[int] | None:
        """Return the shards that are frozen at the previous owner, none if it does not answer. None: adopt nothing."""
        tries = Freeze(time.monotonic())
        while self.plan.wanted_of(job):
            try:
                return source.freeze(job.epoch, list(job.since))
            except TransportError as exc:
                reason = str(exc)  # the exception would hold this frame and its callers, as long as the frame holds it
                status = exc.status if isinstance(exc, Refused) else None
            following = tries.failed(status, time.monotonic())
            if following == Freeze.AWAIT_MAP:
                log.info("%s: %s; waiting for a newer map", source, reason)
                return None
            if following == Freeze.GIVE_UP:
                log.warning("%s: %s; adopting %d shards without their values", source, reason, len(job.since))
                return []
            time.sleep(random.uniform(*RETRY_S))
        return None

    def _finish(self, job: Job, shards: set[int]) -> None:
        """FINISH these shards, as far as the newest map still wants them."""
        with self.target.gate:
            ended = shards.intersection(self.plan.wanted_of(job))
            if ended:
                self.target.finish(self.plan.epoch, ended)

    # -- copying --------------------------------------------------------------------------------

    def _copy_group(self, source: SourceWorker, job: Job) -> None:
        """Copy all values that the previous owner has of a group of shards, page by page; then FINISH."""
        bitmap, asked = bitmap_of(job.since), frozenset(job.since)
        cursor = 0
        page: M.Listed | None = None
        arrivals = Arrivals()
        unmarked = 0  # times in a row that the marks of a page could not be had
        tries = CopyTries(source.timeout)
        outcome = Outcome()
        while self.plan.wanted_of(job):
            try:
                with source.channel() as channel:
                    page = source.list_page(channel, bitmap, cursor, asked)
                    groups: list[tuple[bytes, int]] = []
                    if unmarked < MARK_TRIES:
                        unmarked += 1
                        groups = self._carry_marks(channel, page)
                    else:
                        log.warning("%s does not tell how it keeps values: some are kept no longer", source)
                    unmarked = 0
                    self._copy_page(source, job, channel, page, outcome)
                    self.target.group(arrivals.add(groups))
            except TransportError as exc:
                source.drop_connections()  # the idle ones may be broken too
                status = exc.status if isinstance(exc, Refused) else None
                if tries.failed(status, time.monotonic()):
                    log.warning("%s: %s; the rest of %d shards is given up", source, exc, len(asked))
                    if page is not None:
                        outcome.lost.update(entry[0] for entry in self._missing(page))
                    self._count_lost(job, outcome)
                    break
                time.sleep(random.uniform(*RETRY_S))
                continue
            source.timeout.progress(time.monotonic())
            self._count_lost(job, outcome)
            cursor, page = page.cursor, None
            if not cursor:
                break
        self._finish(job, set(asked))

    def _copy_page(self, source: SourceWorker, job: Job, channel: Channel, page: M.Listed, outcome: Outcome) -> None:
        """Copy the values of a page that the own worker lacks."""
        names = {space.number: space.name for space in page.namespaces}
        missing: dict[str, dict[bytes, int]] = {}
        for digest, length, _flags, namespace in self._missing(page):
            missing.setdefault(names[namespace], {})[digest] = length
        most = min(BATCH_BYTES, self.budget.most)
        batches = [(name, batch) for name, values in missing.items() for batch in _batches(list(values.items()), most)]
        first = outcome.vain % max(1, len(batches))  # another one than failed: it may be that of a damaged slot
        for name, batch in batches[first:] + batches[:first]:
            self._copy_batch(source, job, channel, name, batch, outcome)

    def _carry_marks(self, channel: Channel, page: M.Listed) -> list[tuple[bytes, int]]:
        """Keep what the previous owner keeps of a page, for the time that is left; also what was put here meanwhile.

        The worker holds the marks of values that are not there until they are, so that none of them is evicted first.
        Return the digests of the page that are in groups, with the groups' numbers.
        """
        marked = [entry[0] for entry in page.entries if entry[2] & LISTED_MARKED]
        if not marked:
            return []
        wishes: dict[tuple[int, int], list[bytes]] = {}
        grouped: list[tuple[bytes, int]] = []
        for digest, (how, seconds, group) in zip(marked, SourceWorker.marks(channel, marked)):
            grouped.append((digest, group))
            if how:
                wishes.setdefault((how, seconds), []).append(digest)
        for (how, seconds), digests in wishes.items():
            self.target.keep(digests, how, seconds)
        return grouped

    def _missing(self, page: M.Listed) -> list[tuple[bytes, int, int, int]]:
        """Return the entries of a page that the own worker does not have."""
        slots = self.target.reader.slots_of_many([entry[0] for entry in page.entries]) if page.entries else []
        return [entry for slot, entry in zip(slots, page.entries) if slot < 0]

    def _count_lost(self, job: Job, outcome: Outcome) -> None:
        """Count what a page has lost. The next page begins.

        What another try or a client has brought since is not lost, nor what the newest map gives to another worker.
        """
        if outcome.lost:
            wanted = set(self.plan.wanted_of(job))
            lost = [digest for digest in outcome.lost if shard_of(digest) in wanted]
            self._add(lost=sum(slot < 0 for slot in self.target.reader.slots_of_many(lost)) if lost else 0)
            outcome.lost.clear()

    def _copy_batch(
        self, source: SourceWorker, job: Job, channel: Channel, namespace: str, items: list[_Item], outcome: Outcome
    ) -> None:  # fmt: skip
        left = items
        tries = making = 0
        while left and tries - making < ATTEMPTS:
            before = len(left)
            chunks = sum(chunk_bytes_for(length) for _, length in left)
            if tries:
                time.sleep(random.uniform(*RETRY_S))  # clients are asked for idle grants meanwhile
            # After a try without any grant, no other thread may hold a chunk.
            with self.budget.reserve(self.budget.most + 1 if tries else chunks):
                if tries:
                    self.target.return_idle()
                self.bucket.take(sum(length for _, length in left))
                began = time.monotonic()
                try:
                    with self.target.session(namespace) as session:
                        left = self._exchange(source, job, channel, session, left, outcome)
                except SessionRefused as exc:
                    self.bucket.take(-sum(length for _, length in left))
                    log.warning("%s; its values are not moved", exc)
                    break
                slow = time.monotonic() - began >= MAKING_S
            if len(left) < before:
                tries = making = 0
                continue
            tries += 1
            if slow and making < MAKING_TRIES + (max(length for _, length in left) >> 20):
                making += 1
        if len(left) < len(items):
            source.timeout.progress(time.monotonic())
        outcome.lost.update(digest for digest, _ in left)

    def _exchange(
        self, source: SourceWorker, job: Job, channel: Channel, session: WorkerSession, items: list[_Item],
        outcome: Outcome,
    ) -> list[_Item]:  # fmt: skip
        """Copy as many values as there is room for; return those that are worth another try."""
        reader = session.reader
        session.begin_copy()  # until its end no later session releases this one's grants
        grants = self.target.grants(session, [length for _, length in items])
        again = [item for item, grant in zip(items, grants) if grant is None]
        taken = [(item, grant) for item, grant in zip(items, grants) if grant is not None]
        unused = [grant for _, grant in taken]
        try:
            self.bucket.take(-sum(length for _, length in again))
            if not taken:
                return again
            wants = []
            for (digest, length), (_, offset, _chunk) in taken:
                start = offset - reader.data_offset
                wants.append((digest, reader.data[start : start + length]))
            answers = source.fetch(channel, wants)
            sent = (Status.OK, Status.TORN)
            self.bucket.take(-sum(item[1] for (item, _), answer in zip(taken, answers) if answer[0] not in sent))
            busy = all(status == Status.BUSY for status, *_ in answers)
            if busy and not outcome.heard and outcome.vain < VAIN_MOST:
                outcome.vain += 1
                channel.fail("the previous owner is busy")
            outcome.heard = True
            entries = []
            unused = []
            for ((digest, length), grant), (status, crc, flags) in zip(taken, answers):
                if status == Status.OK:
                    entries.append((digest, grant[0], length, crc, flags, M.ABSENT))
                    continue
                unused.append(grant)
                if status in (Status.TORN, Status.BUSY):
                    again.append((digest, length))
                else:
                    outcome.lost.add(digest)
            self._commit(job, session, entries, outcome)
        finally:
            for grant in unused:
                session.pool.release(grant)
            session.end_copy()
        return again

    def _commit(
        self, job: Job, session: WorkerSession, entries: list[tuple[bytes, int, int, int, int, int]], outcome: Outcome
    ) -> None:  # fmt: skip
        """COMMIT the values that the newest map still wants from this previous owner; return the other grants."""
        if not entries:
            return
        statuses: list[int] = []
        with self.target.gate:
            allowed = set(self.plan.wanted_of(job))
            wanted = [entry for entry in entries if shard_of(entry[0]) in allowed]
            if wanted:
                statuses = self.target.ask(session, M.Commit(wanted, []), M.Committed).statuses
        if len(wanted) < len(entries):
            kept = {entry[1] for entry in wanted}
            self.target.ask(session, M.ReturnGrants([entry[1] for entry in entries if entry[1] not in kept]), M.Done)
        if len(statuses) != len(wanted):
            raise WorkerLost("the worker answered COMMIT with something else")
        done = [entry[2] for entry, status in zip(wanted, statuses) if status == Status.OK]
        outcome.lost.update(
            entry[0] for entry, status in zip(wanted, statuses) if status not in (Status.OK, Status.PRESENT)
        )
        self._add(values=len(done), count=sum(done))

    def _add(self, *, values: int = 0, count: int = 0, lost: int = 0) -> None:
        with self._lock:
            self.values += values
            self.bytes += count
            self.lost += lost

    def close(self) -> None:
        """Release everything. All jobs must have ended."""
        for pool in (self._freezers, self._copiers):
            pool.shutdown()
        for source in self._sources.values():
            source.drop_connections()
        self.target.close()


def _yield_cpu() -> None:
    """Let this thread run when others of the host do not need the CPU."""
    with contextlib.suppress(OSError):  # a sandbox forbids it: it only takes longer for the others
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPIER_NICE)


def _batches(items: list[_Item], most: int) -> Iterator[list[_Item]]:
    """Yield runs of at most BATCH_KEYS values and ``most`` bytes of chunks, but of at least one value."""
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
    """Run a mover process, after the fork. Return when everything has moved.

    Raises WorkerLost, and RemoteProtocolError for a supervisor that sends no maps.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda *_: reopen_logs())
    mover = Mover(settings, supervisor)
    if settings.live is not None:
        settings.live.follow("move_mib_s", lambda mib: mover.bucket.set_rate(mib << 20))
    reopen_logs()  # a SIGHUP may have come before there was a handler, or anything to follow
    if not mover.run():
        os._exit(0)  # without waiting for jobs
    log.info(
        "worker %d: %d values (%d bytes) moved in, %d did not",
        settings.worker, mover.values, mover.bytes, mover.lost,
    )  # fmt: skip
    mover.close()
