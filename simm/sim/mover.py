"""Simulate a mover: it runs the real ``cluster/move_plan.py``, as ``server/migration.py`` does.

For each previous owner it makes one exchange after the other. A copy takes as long as its bytes take at
``move_bytes_s``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

from ..arena.hashing import shard_of
from ..arena.marks.arrivals import Arrivals
from ..arena.marks.groups import MARK_BITS
from ..cluster.move_plan import REPLAN_S, RETRY_S, CopyTries, Freeze, Job, MovePlan, ProgressTimeout
from ..constants import DEFAULT_NAMESPACE, SHARD_COUNT
from ..wire.messages import Status, WorkerInfo
from ..wire.shard_set import FROZEN
from .arena import Arena
from .net import Net, Process
from .worker import Server, Worker

BATCH_KEYS: Final = 64
#: A mover waits so long for an answer.
EXCHANGE_S: Final = 1.0


class Exchange(NamedTuple):
    """An exchange with a process, which there calls ``act(*details)``; its result is the answer."""

    target: Process
    act: Callable[..., Any]
    details: tuple[Any, ...]


#: Yields exchanges (None: the peer is away) and pauses in seconds; gets (answer, whether there was one).
Steps = Generator[Any, Any, Any]


class Mover:
    """Brings what moved to one worker."""

    def __init__(self, server: Server, worker: Worker) -> None:
        self.server = server
        self.worker = worker
        self.net = server.net
        self.process = Process(self.net, server.host, f"{server.name}/mover{worker.number}")
        self.process.start()
        self._plan = MovePlan(server.member, worker.number, SHARD_COUNT)
        #: By name and instance of a previous owner, and its worker.
        self._timeouts: dict[tuple[str, int, int], ProgressTimeout] = {}
        self._replanning = False

    def _wanted_of(self, job: Job) -> list[int]:
        """Return those of a job's shards that the newest map still gives us and that are not finished."""
        self._plan.update(self._plan.lacking(self.worker.arena.words))
        return self._plan.wanted_of(job)

    def replan(self) -> None:
        """Start the jobs that are not started yet."""
        member, plan = self.server.member, self._plan
        if member.map is None or not self.process.running:
            return
        lacking = plan.lacking(self.worker.arena.words)
        if not lacking:
            self.server.report()
            return
        plan.update(lacking)
        for job in plan.new_jobs():
            self._run(self._take_over(job))
        if not self._replanning:
            self._replanning = True
            self.process.later(REPLAN_S, self._again)

    def _again(self) -> None:
        self._replanning = False
        self.replan()

    # -- running steps ----------------------------------------------------------------------------

    def _run(self, steps: Steps, answer: Any = None) -> None:
        """Run steps until they end: make each exchange and each pause that they yield."""
        try:
            wish = steps.send(answer)
        except StopIteration:
            return
        if isinstance(wish, float):
            self.process.later(wish, self._run, steps)
        else:
            self._call(wish, steps)

    def _call(self, exchange: Exchange | None, steps: Steps) -> None:
        """Make an exchange and continue with (answer, True), or with (None, False) without an answer. None: no peer."""
        state = {"open": True}

        def finish(answer: Any, ok: bool) -> None:
            if state["open"]:
                state["open"] = False
                self._run(steps, (answer, ok))

        def there() -> None:
            assert exchange is not None
            self.net.send(exchange.target, self.process, finish, exchange.act(*exchange.details), True)

        if exchange is not None:
            self.net.send(self.process, exchange.target, there)
        refused = exchange is None or not exchange.target.running
        self.process.later(0.01 if refused else EXCHANGE_S, finish, None, False)

    def _source(self, info: WorkerInfo) -> Worker | None:
        """Return the worker that a map names, if its server is up and still that instance."""
        server = self.server.world.servers.get(info.node)
        return server.workers[info.worker] if server and server.instance == info.instance and server.up else None

    # -- a job ------------------------------------------------------------------------------------

    def _take_over(self, job: Job) -> Steps:
        """FREEZE at the previous owner, ADOPT here, then start the copies."""
        info, name = job.source, self.process.name
        tries = Freeze(self.net.now)
        frozen: Sequence[int] | None = None
        while frozen is None:
            if not self._wanted_of(job):
                self._plan.release(job)
                return
            source = self._source(info)
            frozen, ok = yield source and Exchange(source.process, source.freeze, (job.epoch, list(job.since)))
            if frozen is not None:
                break
            following = tries.failed(Status.WRONG_OWNER if ok else None, self.net.now)
            if following == Freeze.AWAIT_MAP:
                self.net.say(f"{name}: {info.node} has a newer map than {job.epoch}")
                self._plan.release(job)
                return
            if following == Freeze.GIVE_UP:
                self.net.say(f"{name}: {info.node} cannot be reached, {len(job.since)} shards without it")
                frozen = []
            else:
                yield self.net.random.uniform(*RETRY_S)
        here = self._wanted_of(job)
        kept = set(frozen)
        copied = [shard for shard in here if shard in kept]
        _, ok = yield Exchange(self.worker.process, self.worker.adopt, (self._plan.epoch, here, copied))
        if not ok:
            self._plan.release(job)
            return
        self.net.say(f"{name}: adopts {len(here)} shards of {info.node}, {len(copied)} to be copied")
        adopted = self._plan.adopted(job, here, copied, self.worker.arena.words)
        self._run(self._finish(list(adopted.finish)))
        for group in adopted.copy:
            self._run(self._copy(group))

    def _finish(self, shards: Sequence[int], source: Arena | None = None) -> Steps:
        """FINISH shards. ``source``: an arena of which all was copied."""
        yield Exchange(self.worker.process, self.worker.finish, (self._plan.epoch, shards, source))
        self.replan()

    def _timeout_of(self, info: WorkerInfo) -> ProgressTimeout:
        key = info.node, info.instance, info.worker
        found = self._timeouts.get(key)
        if found is None:
            found = self._timeouts[key] = ProgressTimeout()
        return found

    def _gives_up(self, job: Job, tries: CopyTries) -> Steps:
        """An exchange with the previous owner failed: wait and return False, or finish without the rest."""
        if tries.failed(None, self.net.now):
            self.net.say(f"{self.process.name}: what {job.source.node} still has is given up")
            yield from self._finish(self._wanted_of(job))
            return True
        yield self.net.random.uniform(*RETRY_S)
        return False

    def _copy(self, job: Job) -> Steps:
        """List what the previous owner has of a group, copy what is not here, batch after batch, then FINISH."""
        tries, options = CopyTries(self._timeout_of(job.source)), self.server.world.options
        left: list[bytes] | None = None
        while left is None:
            if not self._wanted_of(job):
                self._plan.release(job)
                return
            source = self._source(job.source)
            left, _ = yield source and Exchange(source.server.stream, _list, (source.arena, frozenset(job.since)))
            if left is None and (yield from self._gives_up(job, tries)):
                return
        self._timeout_of(job.source).progress(self.net.now)
        listed = left
        while True:
            wanted = self._wanted_of(job)
            still = set(wanted)
            left = [digest for digest in left if digest not in self.worker.arena.entries and shard_of(digest) in still]
            source = self._source(job.source)
            following = left[:BATCH_KEYS] if left else listed
            if source is not None and options.keeps and "no_marks" not in options.plants:
                marks, _ = yield Exchange(source.server.stream, _marks, (source.arena, following, self.net))
                if marks is None:
                    if (yield from self._gives_up(job, tries)):
                        return
                    continue
                _, done = yield Exchange(self.worker.process, self.worker.carry, (self._plan.epoch, marks))
                if not done:
                    return
            if not left and source is not None and options.groups and "no_groups" not in options.plants:
                numbers, _ = yield Exchange(source.server.stream, _numbers, (source.arena, listed))
                if numbers is None:
                    if (yield from self._gives_up(job, tries)):
                        return
                    continue
                whole = Arrivals().add(numbers)
                _, done = yield Exchange(self.worker.process, self.worker.carry_groups, (self._plan.epoch, whole))
                if not done:
                    return
            if not left:
                yield from self._finish(wanted, None if source is None else source.arena)
                return
            values, _ = yield source and Exchange(source.server.stream, _fetch, (source, left[:BATCH_KEYS]))
            if values is None:
                if (yield from self._gives_up(job, tries)):
                    return
                continue
            allowed = set(self._wanted_of(job))
            stored = [value for value in values if shard_of(value[0]) in allowed]
            count = len(values) * options.value_bytes * options.sampling
            self.server.world.moved_bytes += count
            _, done = yield Exchange(self.worker.process, self.worker.copy, (self._plan.epoch, stored))
            if not done:
                return
            self._timeout_of(job.source).progress(self.net.now)
            yield count / options.move_bytes_s
            left = left[BATCH_KEYS:]


def _list(arena: Arena, shards: frozenset[int]) -> list[bytes]:
    words = arena.words
    return [digest for digest in arena.entries if shard_of(digest) in shards and words[shard_of(digest)] >= FROZEN]


def _marks(arena: Arena, digests: list[bytes], net: Net) -> list[tuple[bytes, float]]:
    return [(digest, arena.kept[digest] - net.now) for digest in digests if arena.kept.get(digest, 0.0) > net.now]


def _numbers(arena: Arena, digests: list[bytes]) -> list[tuple[bytes, int]]:
    slots = arena.slots
    found = [(digest, slots.lookup(digest)) for digest in digests]
    return [(digest, slots.marks(slot) >> MARK_BITS) for digest, slot in found if slot >= 0]


def _fetch(source: Worker, digests: list[bytes]) -> list[tuple[bytes, int, str]]:
    """Return values with their namespaces, those of old epochs too: the new owner knows what to do with them."""
    arena, names = source.arena, source.namespaces.names
    found = [(digest, arena.hit(digest, frozen_too=True, any_epoch=True)) for digest in digests]
    return [
        (digest, version, names.get(arena.slots.entry(arena.slots.lookup(digest)).namespace, DEFAULT_NAMESPACE))
        for digest, version in found if version
    ]  # fmt: skip
