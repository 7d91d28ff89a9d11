"""Simulate a worker and its arena, and name what the parts of a simulation need of each other.

The worker runs the real ``ShardWords``, ``Told``, ``Groups`` and ``NamespaceTable``, and restates what a mutation asks
of them (``arena/store.py``), and when it answers a map (``server/requests/shards.py``). A new worker on the same arena
finds the entries again, and so does a warm start; a cold start makes a new arena.

The classes of a simulation use each other. The protocols here keep their modules free of cycles; the classes that
implement them say what each method does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import TAG_AT, shard_of
from ..arena.layout import ENTRY_EPOCH, SHARDS_BYTES
from ..arena.marks.awaited import Awaited, AwaitedMarks
from ..arena.marks.groups import Groups
from ..arena.marks.kept import HARD
from ..arena.marks.told import Told
from ..arena.namespaces import NamespaceTable, StaleEntries
from ..arena.shard_words import ShardWords
from ..cluster.assignment import Member
from ..constants import DEFAULT_NAMESPACE, SHARD_COUNT
from ..wire.epoch_messages import Epochs
from ..wire.messages import MapReply, ShardRole, Shards, Status
from ..wire.shard_set import EPOCH_MASK, FROZEN, MOVING
from .arena import Arena
from .manager import ManagerHost
from .net import Net, Process

#: Between two turns in which entries of old epochs are dropped.
DROP_S: Final = 0.05


class Oracle(Protocol):
    """Judges what happens; see ``sim/oracle.py``."""

    def accepting(self, worker: Worker) -> None: ...
    def gives_up(self, worker: Worker, before: NDArray[np.uint64]) -> None: ...
    def stored(self, worker: Worker, digest: bytes, version: int, /) -> None: ...
    def told(self, reply: MapReply) -> None: ...
    def observed(self, name: str, cluster: int, epoch: int) -> None: ...
    def kept(self, worker: Worker, digest: bytes, until: float, /) -> None: ...
    def gone(self, worker: Worker, digest: bytes, /) -> None: ...
    def evicted(self, worker: Worker, digest: bytes, /) -> None: ...
    def moved(self, worker: Worker, source: Arena, shards: Sequence[int], /) -> None: ...
    def grouped(self, worker: Worker, digests: Sequence[bytes], /) -> None: ...
    def groups_of(self, worker: Worker, /) -> None: ...
    def exists(self, worker: Worker, digests: Sequence[bytes], statuses: Sequence[int], /) -> None: ...


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
    #: Of a client's operations on keys of its own so many keep one from eviction, or end that, and for how long.
    keeps: float = 0.0
    keep_s: float = 15.0
    #: So many of a client's operations are on groups, and on values in parts, of its own.
    groups: float = 0.0
    large: float = 0.0
    #: So many are sessions with pinned values, and ranges of values.
    pins: float = 0.0
    #: So many are on keys of a namespace that advances, and how long a server may show them without a manager.
    advances: float = 0.0
    lease_s: float = 3.0
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
    #: The bytes of each manifest that was put; an entry has -1 - its index here in place of a version.
    manifests: list[bytes]
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


class Chunks:
    """What ``arena/marks/groups.py`` asks of the room for values. No member is pinned, and uses do not count."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def kept(self) -> Chunks:
        """Return what says how entries are kept."""
        return self

    def how(self, slot: int) -> int:
        """Return how the entry in a slot is kept."""
        worker = self._worker
        return HARD if worker.is_kept(worker.arena.slots.entry(slot).digest) else 0

    def offset(self, slot: int) -> int:
        """Return the offset of a slot's chunk."""
        return slot

    def is_held(self, _offset: int) -> bool:
        """Return whether a chunk is held."""
        return False

    def heed(self, is_used: Callable[[int], bool], on_use: Callable[[int], None]) -> None:
        """Ignore uses: the simulated eviction is first in, first out."""

    #: Nothing here asks how many orphans wait.
    waiting: Callable[[], int] | None = None


class Worker:
    """One worker process; its methods restate those of ``arena/store.py``."""

    def __init__(self, server: Server, number: int, arena: Arena) -> None:
        self.server = server
        self.number = number
        self.arena = arena
        self.process = Process(server.net, server.host, f"{server.name}/{number}")
        self.shards = ShardWords(arena.words)
        self.told = Told(self.shards)
        self.awaited = AwaitedMarks(self.shards, self.told)
        self.groups = self._groups()
        self._take_namespaces()
        self.most = server.world.options.entries

    def start(self, *, recover: bool) -> None:
        """Start on its arena."""
        self.process.start()
        self.shards = ShardWords(self.arena.words)
        self.told = Told(self.shards)
        self.awaited = AwaitedMarks(self.shards, self.told)
        self.groups = self._groups()
        self._take_namespaces()
        if recover:
            if "forgets_pins" in self.server.world.plants:
                for number in list(self.arena.room.pins):
                    self.arena.room.unpin(number)
            self.namespaces.recover()
            self.shards.recover()
            self._drop_lost()
            self.groups.restore()
        self._accepting()

    def _groups(self) -> Groups:
        def drop(slot: int) -> None:
            self._drop(self.arena.slots.entry(slot).digest)

        def drop_many(slots: list[int], _offsets: list[int]) -> None:
            for slot in slots:
                drop(slot)

        no_uses = memoryview(bytearray(self.arena.slots.slots))
        chunks = Chunks(self)
        return Groups(self.arena.slots, chunks, no_uses, self.shards, lambda *_: True, drop, drop_many, lambda: None)

    def _settle(self) -> None:
        """Drop what is left of groups, as the real worker does before its next request."""
        if self.groups.orphans:
            self.groups.drop_orphans()
        if self.server.world.options.groups:
            self.server.world.oracle.groups_of(self)

    def _take_namespaces(self) -> None:
        self.namespaces = NamespaceTable(memoryview(self.arena.lines))
        self.namespaces.clock = self.arena.clock
        space: Any = SimpleNamespace(spare=lambda: False)
        self._space = space
        slots: Any = self.arena.slots
        self.stale = StaleEntries(self.namespaces, slots, space, lambda slot: self._drop(slots.entry(slot).digest))
        self._epochs: Epochs | None = None
        #: The epoch of the map whose epochs this process has stored.
        self.stored = 0
        self._drop_due = False
        #: What to call once all that can be read without an epoch is dropped.
        self._ordered: list[Callable[[], None]] = []

    def _accepting(self) -> None:
        self.server.world.oracle.accepting(self)

    def order(self, msg: Shards, epochs: Epochs | None, done: Callable[[], None]) -> None:
        """Take EPOCHS and SHARDS from the supervisor; ``done`` is the answer."""
        self._epochs = self._epochs if epochs is None else epochs
        if msg.epoch == 0:
            self.shards.fence()
            done()
            return
        if self.arena.cluster != msg.cluster:
            if self.shards.retire(EPOCH_MASK, bytes(SHARDS_BYTES), bytes(SHARD_COUNT)):
                self._drop_lost()
            self.arena.cluster, self.arena.epoch = msg.cluster, 0
            self.namespaces.forget_epochs()
            self.stale.end()
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
        if self._epochs is not None and self._epochs.cluster == msg.cluster:
            self.stale.take({each.name: each.epoch for each in self._epochs.namespaces})
        self.stored = msg.epoch
        self._ordered.append(done)
        self._drop_stale()
        self.server.ordered(self.number)

    def _drop_stale(self) -> None:
        """Drop old entries in turns. Answer the maps that waited for those without an epoch."""
        if not self.stale.first:
            ordered, self._ordered = self._ordered, []
            for done in ordered:
                done()
        if self.stale.due and not self._drop_due:
            self._drop_due = True
            self.process.later(DROP_S, self._drop_some)

    def _drop_some(self) -> None:
        self._drop_due = False
        if self.stale.due:
            self.stale.step()
            self._settle()
        self._drop_stale()

    def extend_lease(self, until_ns: int) -> None:
        """Take EPOCH_LEASE from the supervisor."""
        self.namespaces.extend_lease(until_ns)

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
            self._remove(digest)
        self._settle()

    def _drop(self, digest: bytes) -> None:
        if self.shards.moving:
            self.shards.note_dropped(digest)
        self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        slot = self.arena.slots.lookup(digest)
        if self.groups.used:
            self.groups.leave(slot)
        del self.arena.entries[digest]
        self.arena.room.remove(digest)
        self.arena.slots.release(slot)
        self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        if self.arena.kept.pop(digest, 0.0):
            self.server.world.oracle.gone(self, digest)

    def _flags(self, digest: bytes, number: int) -> int | None:
        """Return the flags of an entry, None for one that nobody could read."""
        tag = self.namespaces.tags.get(number)
        return 0 if tag is None else ENTRY_EPOCH if digest[TAG_AT:] == tag else None

    def _store(self, digest: bytes, version: int, number: int = 0, flags: int = 0) -> None:
        entries, room = self.arena.entries, self.arena.room
        entries.pop(digest, None)
        if room.pins:
            room.end_leases(self.server.stream.life if self.server.stream.running else 0)
        if len(entries) >= self.most and not self._space.spare():
            # Never empty: see keep() and pin().
            free = [each for each in entries if not self.is_kept(each) and not room.is_held(each)]
            victim = next((each for each in free if self.arena.words[shard_of(each)] < FROZEN), None)
            victim = victim if victim is not None else free[0]
            self.server.world.oracle.evicted(self, victim)
            self._drop(victim)
            self.groups.drop_orphans()
        entries[digest] = version
        room.place(digest, version)
        self.arena.slots.take(digest, number, flags)
        if self.awaited.marks:
            mark = self.awaited.take(digest)
            if mark is not None:
                kept = self._keep(digest, mark.until)
                self.server.world.oracle.kept(self, digest, mark.until if kept else 0.0)

    def is_kept(self, digest: bytes) -> bool:
        kept = self.arena.kept
        return bool(kept) and kept.get(digest, 0.0) > self.server.net.now

    def _keep(self, digest: bytes, until: float) -> bool:
        """Keep an entry; return False if too many are kept."""
        kept = self.arena.kept
        for each in [each for each in kept if not self.is_kept(each)]:
            del kept[each]
        if digest not in kept and len(kept) >= self.most // 2:
            return False
        kept[digest] = until
        return True

    def keep(self, digest: bytes, seconds: int) -> int:
        """Take a KEEP from a client, hard, 0 seconds to end it."""
        if not self.shards.accepts(shard_of(digest)):
            return Status.WRONG_OWNER
        if digest not in self.arena.entries:
            behind = self.shards.moving and self.shards.status_of_miss(digest) == Status.PREVIOUS
            return Status.WRONG_OWNER if behind else Status.NOT_FOUND  # as sdk/writes.py takes PREVIOUS
        until = self.server.net.now + seconds if seconds else 0.0
        if not self._keep(digest, until):
            return Status.OVER_QUOTA
        self.told.note(digest)
        self.server.world.oracle.kept(self, digest, until)
        return Status.OK

    def carry(self, epoch: int, marks: list[tuple[bytes, float]]) -> bool:
        """Take the marks that our mover carries; those of values that are not there yet wait for them."""
        for digest, seconds in marks:
            until = self.server.net.now + seconds
            if not self.told.takes_mark(digest, epoch):
                continue
            if digest not in self.arena.entries:
                self.awaited.add(digest, Awaited(HARD, until, epoch))
            elif not self._keep(digest, until):
                self.server.world.oracle.kept(self, digest, 0.0)
        return True

    def put(self, digest: bytes, version: int, namespace: str = DEFAULT_NAMESPACE) -> int:
        """Take a COMMIT."""
        if not self.shards.accepts(shard_of(digest)):
            return Status.WRONG_OWNER
        number = self.namespaces.number(namespace)
        if (flags := self._flags(digest, number)) is None:
            return Status.OLD_EPOCH
        self._store(digest, version, number, flags)
        self._settle()
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
        self._settle()
        self.server.world.oracle.stored(self, digest, version)
        return Status.OK

    def group(self, digests: Sequence[bytes]) -> int:
        """Take a GROUP of a client."""
        (status,) = self.groups.mark_many([digests])
        if status == Status.OK:
            self.server.world.oracle.grouped(self, digests)
        self._settle()
        return status

    def exists(self, digests: Sequence[bytes]) -> list[int]:
        """Answer EXISTS."""
        statuses = [Status.OK if self.arena.hit(each) else self.shards.status_of_miss(each) for each in digests]
        self.server.world.oracle.exists(self, digests, statuses)
        return statuses

    def pin(self, digest: bytes, life: int) -> int:
        """Pin an entry that is there for a process of this host, or for a life of the stream; return the pin's number.

        0 if a quarter of what the arena holds is pinned.
        """
        room = self.arena.room
        return room.pin(digest, life) if len(room.pins) < self.most // 4 else 0

    def resolve(self, digest: bytes) -> tuple[int, int]:
        """Answer LOCATE: return the status, with the epoch of the move for PREVIOUS."""
        word, slot = self.arena.words[shard_of(digest)], self.arena.slots.lookup(digest)
        if 0 < word < FROZEN and slot >= 0:
            entry = self.arena.slots.entry(slot)
            readable = self.namespaces.readable(entry.namespace, digest, entry.flags)
            return Status.OK if readable else Status.NOT_FOUND, 0
        status = self.shards.status_of_miss(digest)
        return status, self.shards.moved_since(digest) if status == Status.PREVIOUS else 0

    def freeze(self, epoch: int, shards: list[int]) -> list[int] | None:
        """Take FREEZE from a new owner's mover. Return the frozen shards; None: the mover's map is old."""
        if "no_freeze" in self.server.world.plants:
            return [shard for shard in shards if self.arena.words[shard]]
        return self.shards.freeze(epoch, shards, self.arena.epoch)

    def adopt(self, epoch: int, shards: list[int], fallback: list[int]) -> None:
        """Take ADOPT from our mover."""
        self.shards.adopt(epoch, shards, fallback)
        self._accepting()

    def finish(self, epoch: int, shards: Sequence[int], source: Arena | None) -> None:
        """Take FINISH from our mover. ``source``: an arena of which it has brought all."""
        words = self.arena.words
        moving = [shard for shard in shards if words[shard] & MOVING and words[shard] & EPOCH_MASK <= epoch]
        if source is not None:
            self.server.world.oracle.moved(self, source, moving)
        self.shards.finish(shards, epoch)

    def copy(self, epoch: int, values: list[tuple[bytes, int, str]]) -> int:
        """Take a put-if-absent COMMIT from our mover. Return the number of values stored."""
        stored = 0
        for digest, version, namespace in values:
            number = self.namespaces.number(namespace)
            flags = self._flags(digest, number)
            if flags is not None and digest not in self.arena.entries and self.shards.may_copy(digest, epoch):
                self._store(digest, version, number, flags)
                stored += 1
        self._settle()
        return stored

    def carry_groups(self, epoch: int, groups: list[list[bytes]]) -> bool:
        """Take the groups that our mover carries."""
        self.groups.mark_many(groups, epoch)
        self._settle()
        return True
