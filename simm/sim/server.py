"""A data server: supervisor, worker and stream, with the real ``Member`` and ``ShardWords``.

Restated here, from the files named: the session with the manager (``membership.py``), what a mutation asks of the
shard words (``store.py``). The arena is a dict of digests with version numbers, which
a new worker on the same arena finds again, and a warm start too; a cold one begins a new arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..constants import SHARD_COUNT
from ..hashing import shard_of
from ..member import FENCE, Member
from ..messages import (
    Error,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    Leave,
    MapGet,
    MapReply,
    ShardRole,
    Shards,
    Status,
    WorkerInfo,
    WorkerLoad,
)
from ..shards import FROZEN, ShardWords
from .manager import decoded
from .mover import Mover
from .net import Process

if TYPE_CHECKING:
    from .world import World

#: membership.py.
RECONNECT_S: Final = 0.5
CONNECT_S: Final = 1.0
SILENT_S: Final = 3.0
MOVED_S: Final = 0.25
#: From a worker's death to its successor's first look at the arena.
REFORK_S: Final = 0.3

Answer = Callable[..., None]


class Arena:
    """What lies in a worker's segment: shard words and entries. Survives the worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.memory = bytearray(8 * SHARD_COUNT)
        self.words = memoryview(self.memory).cast("Q")
        #: digest -> version, oldest first.
        self.entries: dict[bytes, int] = {}
        #: Highest epoch acted on.
        self.epoch = 0
        self.closed = False

    def hit(self, digest: bytes, *, frozen_too: bool = False) -> int:
        """What a reader finds: the version, or 0."""
        word = self.words[shard_of(digest)]
        if 0 < word < FROZEN or (word and frozen_too):
            return self.entries.get(digest, 0)
        return 0


class Worker:
    """One worker process; see ``store.py`` for what each method restates."""

    def __init__(self, server: Server, number: int, arena: Arena) -> None:
        self.server = server
        self.number = number
        self.arena = arena
        self.process = Process(server.net, server.host, f"{server.name}/{number}")
        self.shards = ShardWords(arena.words)
        self.most = server.world.options.entries
        self.evictions = 0

    def start(self, *, recover: bool) -> None:
        """On its arena."""
        self.process.start()
        self.shards = ShardWords(self.arena.words)
        if recover:
            self.shards.recover()
            self._drop_lost()
        self._accepting()

    def _accepting(self) -> None:
        self.server.world.oracle.accepting(self)

    def order(self, msg: Shards) -> None:
        """SHARDS from the supervisor."""
        if msg.epoch == 0:
            self.shards.fence()
            return
        roles, since = msg.roles, msg.since
        if "no_freeze" in self.server.world.plants:
            roles, since = self._unfrozen(roles, since)
        if self.shards.retire(msg.epoch, since, roles):
            self._drop_lost()
        self.shards.take()
        self.arena.epoch = max(self.arena.epoch, msg.epoch)
        self._accepting()
        self.server.ordered(self.number)

    def _unfrozen(self, roles: bytes, since: bytes) -> tuple[bytes, bytes]:
        """A planted fault: what leaves is kept as if it did not."""
        parts = np.frombuffer(roles, np.uint8).copy()
        epochs = np.frombuffer(since, np.uint64).copy()
        words = np.frombuffer(self.arena.words, np.uint64)
        keeps = (parts == ShardRole.OUTGOING) & (words != 0)
        parts[keeps], epochs[keeps] = ShardRole.OWNER, words[keeps]
        return parts.tobytes(), epochs.tobytes()

    def _drop_lost(self) -> None:
        words, entries = self.arena.words, self.arena.entries
        for digest in [digest for digest in entries if not words[shard_of(digest)]]:
            del entries[digest]

    def _drop(self, digest: bytes) -> None:
        if self.shards.moving:
            self.shards.note_dropped(digest)
        del self.arena.entries[digest]

    def _store(self, digest: bytes, version: int) -> None:
        entries = self.arena.entries
        entries.pop(digest, None)
        if len(entries) >= self.most:
            victim = next((each for each in entries if self.arena.words[shard_of(each)] < FROZEN), None)
            victim = victim if victim is not None else next(iter(entries))
            self._drop(victim)
            self.evictions += 1
        entries[digest] = version

    def put(self, digest: bytes, version: int) -> Status:
        """A COMMIT."""
        if not self.shards.accepts(shard_of(digest)):
            return Status.WRONG_OWNER
        self._store(digest, version)
        self.server.world.oracle.stored(self, digest, version)
        return Status.OK

    def delete(self, digest: bytes, version: int) -> Status:
        """A DELETE."""
        if not self.shards.accepts(shard_of(digest)):
            return Status.WRONG_OWNER
        if digest in self.arena.entries:
            self._drop(digest)
        elif self.shards.moving and self.shards.status_of_miss(digest) == Status.PREVIOUS:
            self.shards.note_dropped(digest)
        self.server.world.oracle.stored(self, digest, version)
        return Status.OK

    def exists(self, digest: bytes) -> Status:
        """What the stream or a client asks where the word is not plain."""
        return Status.OK if self.arena.hit(digest) else self.shards.status_of_miss(digest)

    def freeze(self, epoch: int, shards: list[int]) -> list[int] | None:
        """FREEZE from a new owner's mover."""
        if "no_freeze" in self.server.world.plants:
            return [shard for shard in shards if self.arena.words[shard]]
        return self.shards.freeze(epoch, shards)

    def adopt(self, epoch: int, shards: list[int], fallback: list[int]) -> None:
        """ADOPT from our mover."""
        self.shards.adopt(epoch, shards, fallback)
        self._accepting()

    def finish(self, epoch: int, shards: list[int]) -> None:
        """FINISH from our mover."""
        self.shards.finish(shards, epoch)

    def copy(self, epoch: int, values: list[tuple[bytes, int]]) -> int:
        """COMMIT with ABSENT from our mover; how many were stored."""
        stored = 0
        for digest, version in values:
            if digest not in self.arena.entries and self.shards.may_copy(digest, epoch):
                self._store(digest, version)
                stored += 1
        return stored


class Server:
    """One logical node: its host, its processes, what survives them."""

    def __init__(self, world: World, name: str, workers: int = 1, capacity: int = 1 << 30) -> None:
        self.world = world
        self.net = world.net
        self.name = name
        self.host = name
        self.capacity = capacity
        self.count = workers
        self.supervisor = Process(self.net, self.host, name)
        self.supervisor.on_push = self._on_map
        self.stream = Process(self.net, self.host, f"{name}/stream")
        self.instance = 0
        self.member = Member(name, 0, range(workers))
        self.workers: list[Worker] = []
        self.movers: dict[int, Mover] = {}
        #: Number of the connection with the manager, or 0.
        self.linked = 0
        self.joined = False
        #: Has this life ever joined?
        self.was_joined = False
        self.warm = False
        self.leaving = False
        self.heartbeat_s = world.options.heartbeat_s
        self._asked_at = 0.0
        self._waits = 0
        self._moved_at = 0.0
        self._chain = 0

    # -- life ---------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self.supervisor.running

    def start(self, *, warm: bool = False) -> None:
        """Supervisor, workers and stream; ``warm``: on the arenas that are there."""
        self.net.say(f"{self.name} starts{' warm' if warm else ''}")
        self.instance = self.net.random.getrandbits(60) | 1
        self.member = Member(self.name, self.instance, range(self.count))
        self.linked = 0
        self.joined = self.was_joined = self.leaving = False
        self.warm = warm and bool(self.workers)
        self.supervisor.start()
        self.stream.start()
        if not self.warm:
            for worker in self.workers:
                worker.arena.closed = True
            self.workers = [Worker(self, number, Arena(self.world.number())) for number in range(self.count)]
        for worker in self.workers:
            worker.start(recover=self.warm)
        self.movers = {}
        self.supervisor.later(0.05, self._connect)
        self._beat()

    def crash(self) -> None:
        """kill -9 of all, or the power."""
        self.net.say(f"{self.name} dies")
        self.world.died.setdefault(self.name, self.net.now)
        self._end()

    def _end(self) -> None:
        linked, self.linked, self.joined = self.linked, 0, False
        for process in self.processes():
            process.die()
        self.movers = {}
        if linked:
            manager = self.world.manager
            if manager.process.running and self.net.reaches(self.host, manager.HOST):
                delay = self.net.delay(self.host, manager.HOST)
                details = (linked, self.name, self.instance)
                self.net.at(self.net.now + delay, manager.process.take, manager.process.life, manager.closed, details)

    def processes(self) -> list[Process]:
        """All that run here."""
        movers = [mover.process for mover in self.movers.values()]
        return [self.supervisor, self.stream, *(worker.process for worker in self.workers), *movers]

    def stop(self, *, warm: bool) -> None:
        """A clean stop: the workers end first if they are to be found again as they are, else when others have taken
        over, or half a second later."""
        if not self.up or self.supervisor.paused:
            return
        self.net.say(f"{self.name} stops{' warm' if warm else ''}")
        self.leaving = True
        if warm:
            for worker in self.workers:
                worker.process.die()
            self.stream.die()
        if self.joined:
            self._request(Leave(self.instance, self.name, int(warm)), _ignore)
        self.supervisor.later(0.2 if warm else 0.8, self._end)

    def worker_dies(self, number: int) -> None:
        """kill -9 of a worker; its supervisor forks another."""
        worker = self.workers[number]
        if not self.up or not worker.process.running or self.leaving:
            return
        self.net.say(f"{worker.process.name} dies")
        worker.process.die()
        self._end_mover(number)
        self.supervisor.later(REFORK_S, self._refork, worker)

    def _refork(self, worker: Worker) -> None:
        if self.leaving:
            return
        worker.start(recover=True)
        self.net.say(f"{worker.process.name} is back")
        self._order(worker)

    # -- the manager --------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.linked or self.leaving:
            return
        self.linked = self.world.manager.connect(self.supervisor, self._broken)
        if self.linked:
            self._asked_at = self.net.now
            self._waits = 0
            self._join()
            self._watch(self.linked)
        else:
            self._lost()

    def _broken(self) -> None:
        """The manager's kernel has closed a connection of ours."""
        if self.linked:
            self._lost()

    def _lost(self) -> None:
        """The link is gone: serve on, try again."""
        self.linked, self.joined = 0, False
        self._waits = 0
        if not self.leaving:
            self.supervisor.later(RECONNECT_S * self.net.random.uniform(0.7, 1.3), self._connect)

    def _watch(self, link: int) -> None:
        patience = max(SILENT_S, 3 * self.heartbeat_s)
        if self.linked != link:
            return
        if self._waits and self.net.now - self._asked_at > patience:
            manager = self.world.manager
            self.net.send(self.supervisor, manager.process, manager.closed, link, self.name, self.instance)
            self._lost()
            return
        self.supervisor.later(patience / 4, self._watch, link)

    def _request(self, msg: Any, answer: Answer) -> None:
        if not self.linked:
            return
        if not self._waits:
            self._asked_at = self.net.now
        self._waits += 1
        manager, link = self.world.manager, self.linked

        def answered(message: Any, status: Status) -> None:
            if self.linked != link:
                return
            self._waits = max(0, self._waits - 1)
            self._asked_at = self.net.now
            answer(message, status)

        self.net.send(self.supervisor, manager.process, manager.request, link, msg, answered)

    def infos(self) -> list[WorkerInfo]:
        """As the map names us."""
        return [
            WorkerInfo(worker.number, 0, 1, self.instance, self.capacity, self.name, "", self.host, 1)
            for worker in self.workers
        ]

    def _join(self) -> None:
        if not self.linked or self.joined or self.leaving:
            return
        warm = int(self.warm and not self.was_joined)
        known = max(self.member.epoch, max((worker.arena.epoch for worker in self.workers), default=0))
        self._request(Join(self.instance, warm, self.name, self.infos(), known), self._on_joined)

    def _on_joined(self, msg: Any, status: Status) -> None:
        if isinstance(msg, Error):
            # A name that is taken is tried again; another refusal breaks the link.
            self.supervisor.later(1.0, self._join)
            return
        if not isinstance(msg, Joined) or self.joined:
            return
        self.joined = self.was_joined = True
        if msg.wants_map and (offer := self.member.offer()) is not None:
            self.net.say(f"{self.name} offers its map of epoch {offer.epoch}")
            self._request(offer, _ignore)
        self._ask_map()

    def _beat(self) -> None:
        self.supervisor.later(self.heartbeat_s * self.net.random.uniform(0.8, 1.0), self._beat)
        if self.joined and not self.leaving:
            loads = [WorkerLoad(0, 0, 0, 0)] * self.count
            self._request(Heartbeat(self.instance, self.member.epoch, self.name, loads), self._on_ack)
            self.report()

    def report(self) -> None:
        """MOVED, for what stands finished in the words."""
        if self.joined and self.net.now - self._moved_at >= MOVED_S and self.member.map is not None:
            self._moved_at = self.net.now
            for worker in self.workers:
                if worker.number in self.movers or self.world.moving(self.member):
                    moved = self.member.moved(worker.number, worker.arena.words)
                    if moved is not None:
                        self._request(moved, self._on_ack)

    def _on_ack(self, msg: Any, status: Status) -> None:
        if status in (Status.UNKNOWN_NODE, Status.NAME_TAKEN):
            if not self.joined or self.leaving:
                return
            self.net.say(f"{self.name} is not known (any more): fenced, joins again")
            self.joined = False
            self.member.fence()
            self._order_all()
            self._join()
        elif isinstance(msg, HeartbeatAck) and msg.epoch > self.member.epoch:
            self._ask_map()

    def _ask_map(self) -> None:
        self._request(MapGet(self.member.epoch, 1), self._on_map)

    def _on_map(self, msg: Any, _status: Status) -> None:
        if not isinstance(msg, MapReply) or not self.joined:
            return
        member = self.member
        if msg.epoch == member.epoch and not member.fenced:
            return
        self.world.oracle.told(msg)
        shard_map = decoded(msg)
        in_order = member.map is not None and not member.fenced and msg.epoch > member.epoch
        if in_order and not self.world.concerns(self, member.epoch, msg):
            # Not a word about us: taking it would change nothing but the epoch.
            member.map = shard_map
            return
        if member.take_map(shard_map) is not None:
            self._order_all()

    # -- workers --------------------------------------------------------------------------------------

    def _order_all(self) -> None:
        for worker in self.workers:
            self._order(worker)

    def _order(self, worker: Worker) -> None:
        order = self.member.order(worker.number)
        if order is FENCE and self.member.map is None:
            return
        self.net.send(self.supervisor, worker.process, worker.order, order)

    def ordered(self, number: int) -> None:
        """A worker has taken a map: is there something to move in?"""
        mover = self.movers.get(number)
        if mover is None:
            if not self.member.moving(number, self.workers[number].arena.words):
                return
            mover = self.movers[number] = Mover(self, self.workers[number])
        mover.replan()

    def _end_mover(self, number: int) -> None:
        mover = self.movers.pop(number, None)
        if mover is not None:
            mover.process.die()

    def mover_dies(self, number: int) -> None:
        """kill -9 of a mover; its supervisor forks another."""
        if number in self.movers:
            self.net.say(f"{self.name}: mover {number} dies")
            self._end_mover(number)
            self.supervisor.later(REFORK_S, self.ordered, number)


def _ignore(*_details: Any) -> None:
    pass
