"""Simulate a worker and its arena, and name what the parts of a simulation need of each other.

The worker runs the real ``ShardWords`` and restates what a mutation asks of them (``arena/store.py``). The arena is a
dict of digests with version numbers. A new worker on the same arena finds them again, and so does a warm start; a cold
start makes a new arena.

The classes of a simulation use each other. The protocols here keep their modules free of cycles; the classes that
implement them say what each method does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import shard_of
from ..arena.shard_words import ShardWords
from ..cluster.assignment import Member
from ..constants import SHARD_COUNT
from ..wire.messages import MapReply, ShardRole, Shards, Status
from ..wire.shard_set import FROZEN
from .manager import ManagerHost
from .net import Net, Process


class Oracle(Protocol):
    """Judges what happens; see ``sim/oracle.py``."""

    def accepting(self, worker: Worker) -> None: ...
    def gives_up(self, worker: Worker, before: NDArray[np.uint64]) -> None: ...
    def stored(self, worker: Worker, digest: bytes, version: int, /) -> None: ...
    def told(self, reply: MapReply) -> None: ...
    def observed(self, name: str, cluster: int, epoch: int) -> None: ...


@dataclass
class Options:
    """The settings of a run. ``faults``: kinds, see faults.py. ``fault_s``: mean time between two."""

    nodes: int = 4
    clients: int = 5
    seconds: float = 40.0
    seed: int = 7
    faults: Sequence[str] = ()
    fault_s: float = 4.0
    fault_lasts_s: tuple[float, float] = (0.1, 12.0)
    keys: int = 60
    #: A client's mean time between two operations.
    op_s: float = 0.15
    deadline_s: float = 1.0
    heartbeat_s: float = 1.0
    entries: int = 400
    value_bytes: int = 1 << 20
    move_bytes_s: float = 200 << 20
    #: Number of values that one simulated value stands for when bytes are counted.
    sampling: int = 1
    latency_s: float = 0.0004
    moves_at_once: int = 2048
    plants: frozenset[str] = frozenset()
    verbose: bool = False


class World(Protocol):
    """The simulation, as servers and clients see it."""

    options: Options
    net: Net
    manager: ManagerHost
    plants: frozenset[str]
    arena_numbers: dict[tuple[str, int, int], int]
    moved_bytes: int
    died: dict[str, float]

    @property
    def oracle(self) -> Oracle: ...
    @property
    def servers(self) -> Mapping[str, Server]: ...
    def number(self) -> int: ...
    def moving(self, member: Member) -> bool: ...
    def concerns(self, server: Server, epoch: int, reply: MapReply) -> bool: ...


class Server(Protocol):
    """A data server, as its workers and movers and all clients see it."""

    name: str
    host: str
    net: Net
    instance: int
    member: Member
    stream: Process
    leaving: bool

    @property
    def world(self) -> World: ...
    @property
    def up(self) -> bool: ...
    @property
    def workers(self) -> Sequence[Worker]: ...
    def ordered(self, number: int) -> None: ...
    def report(self) -> None: ...


class Arena:
    """A worker's segment: shard words and entries. Survives the worker."""

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
        """Return the version that a reader finds, or 0."""
        word = self.words[shard_of(digest)]
        if 0 < word < FROZEN or (word and frozen_too):
            return self.entries.get(digest, 0)
        return 0


class Worker:
    """One worker process; its methods restate those of ``arena/store.py``."""

    def __init__(self, server: Server, number: int, arena: Arena) -> None:
        self.server = server
        self.number = number
        self.arena = arena
        self.process = Process(server.net, server.host, f"{server.name}/{number}")
        self.shards = ShardWords(arena.words)
        self.most = server.world.options.entries

    def start(self, *, recover: bool) -> None:
        """Start on its arena."""
        self.process.start()
        self.shards = ShardWords(self.arena.words)
        if recover:
            self.shards.recover()
            self._drop_lost()
        self._accepting()

    def _accepting(self) -> None:
        self.server.world.oracle.accepting(self)

    def order(self, msg: Shards) -> None:
        """Take SHARDS from the supervisor."""
        if msg.epoch == 0:
            self.shards.fence()
            return
        roles, since = msg.roles, msg.since
        if "no_freeze" in self.server.world.plants:
            roles, since = self._unfrozen(roles, since)
        before = np.frombuffer(self.arena.words, np.uint64).copy()
        if self.shards.retire(msg.epoch, since, roles):
            self._drop_lost()
        self.shards.take()
        self.server.world.oracle.gives_up(self, before)
        self.arena.epoch = max(self.arena.epoch, msg.epoch)
        self._accepting()
        self.server.ordered(self.number)

    def _unfrozen(self, roles: bytes, since: bytes) -> tuple[bytes, bytes]:
        """An injected bug: shards that leave are kept."""
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
        entries[digest] = version

    def put(self, digest: bytes, version: int) -> int:
        """Take a COMMIT."""
        if not self.shards.accepts(shard_of(digest)):
            return Status.WRONG_OWNER
        self._store(digest, version)
        self.server.world.oracle.stored(self, digest, version)
        return Status.OK

    def delete(self, digest: bytes, version: int) -> int:
        """Take a DELETE."""
        if not self.shards.accepts(shard_of(digest)):
            return Status.WRONG_OWNER
        if digest in self.arena.entries:
            self._drop(digest)
        elif self.shards.moving and self.shards.status_of_miss(digest) == Status.PREVIOUS:
            self.shards.note_dropped(digest)
        self.server.world.oracle.stored(self, digest, version)
        return Status.OK

    def resolve(self, digest: bytes) -> tuple[int, int]:
        """Answer LOCATE: return the status, with the epoch of the move for PREVIOUS."""
        if self.arena.hit(digest):
            return Status.OK, 0
        status = self.shards.status_of_miss(digest)
        return status, self.shards.moved_since(digest) if status == Status.PREVIOUS else 0

    def freeze(self, epoch: int, shards: list[int]) -> list[int] | None:
        """Take FREEZE from a new owner's mover. Return the frozen shards; None: the mover's map is old."""
        if "no_freeze" in self.server.world.plants:
            return [shard for shard in shards if self.arena.words[shard]]
        return self.shards.freeze(epoch, shards)

    def adopt(self, epoch: int, shards: list[int], fallback: list[int]) -> None:
        """Take ADOPT from our mover."""
        self.shards.adopt(epoch, shards, fallback)
        self._accepting()

    def finish(self, epoch: int, shards: list[int]) -> None:
        """Take FINISH from our mover."""
        self.shards.finish(shards, epoch)

    def copy(self, epoch: int, values: list[tuple[bytes, int]]) -> int:
        """Take a put-if-absent COMMIT from our mover. Return the number of values stored."""
        stored = 0
        for digest, version in values:
            if digest not in self.arena.entries and self.shards.may_copy(digest, epoch):
                self._store(digest, version)
                stored += 1
        return stored
