"""Publishers as they were registered, and what is known of each: its spaces, holders, and what waits."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .events import Stored, Where
from .table import Owners

#: Tiers by their numbers. Media that nobody knows are the last one.
TIERS: Final = ("gpu", "cpu", "disk", "storage", "unknown")
GPU, CPU, DISK, STORAGE, UNKNOWN = range(5)
MEDIA: Final = {
    "gpu": GPU, "cpu": CPU, "cpu_pinned": CPU, "host": CPU, "disk": DISK, "ssd": DISK,
    "storage": STORAGE, "external": STORAGE, "shared": STORAGE,
}  # fmt: skip
#: What engines call a medium of which they tell no removals. vLLM's MooncakeStoreConnector and LMCache in an engine's
#: process say ``cpu``, whatever their store evicts later. Those that tell removals say ``CPU`` or ``CPU_PINNED``.
_ADDED_TO_ONLY: Final = frozenset(("cpu",))
#: Names of media that have no tier, of each source.
MEDIA_MAX: Final = 64
#: Types of sources; the last two are stores, which name blocks by RFC 1527's hashes.
ENGINES: Final = ("vllm", "sglang", "lmcache")
STORES: Final = ("mooncake", "simm")
#: What LMCache's multi-process servers tell over HTTP: of themselves, and of what they share. Nobody registers these.
LMCACHE_SERVER: Final = "lmcache-server"
LMCACHE_SHARED: Final = "lmcache-shared"
#: How scores name pools and their hosts: no instance has such a name.
NO_INSTANCES: Final = ("pool:", "node:")
#: A publisher's wrong messages that are logged, by their number: the 1st, the 10th, the 100th...
LOGGED: Final = frozenset(10**power for power in range(18))
#: What a group of a hybrid model's cache must keep for a prefix to be restorable from it.
DENSE: Final = frozenset((None, "", "full_attention", "mla_attention", "sink_full_attention"))

#: Of each source: blocks that wait for a parent, and bytes of their tokens and of what else they depend on.
PARKED_MAX: Final = 1 << 16
PARKED_BYTES_MAX: Final = 64 << 20
#: Prompts that are expected of a source, and blocks of all of them.
EXPECTED_MAX: Final = 256
EXPECTED_BLOCKS_MAX: Final = 1 << 18
#: So many holders a source has before those without blocks are looked for.
HOLDERS_MIN: Final = 1024

#: Parts of blocks that are remembered of each source.
PARTS_MAX: Final = 1024
#: Groups of a source that are told apart where a space lacks one, and sizes of blocks of one.
GROUPS_MAX: Final = 64
#: Why an event does not count that tells of a part of a block.
_PART: Final = "a part of a block"

U64 = NDArray[np.uint64]


class Ignored(Exception):
    """Why an event is not counted."""


class Missed(Ignored):
    """The same of an event that should count: not all is known any more that the publisher has."""


class Space(NamedTuple):
    """Where blocks can be equal. Empty texts: none."""

    model: str
    lora: str
    tenant: str
    salt: str
    block_size: int

    def agrees(self, where: Where) -> bool:
        """Return True if what an event says of its blocks is so here. It may say less."""
        return (
            where.model in (None, self.model) and where.lora in (None, self.lora)
            and where.tenant in (None, self.tenant) and where.salt in (None, self.salt)
        )  # fmt: skip


@dataclass(frozen=True)
class Registration:
    """A publisher, as it was registered. Raises UsageError for what cannot be.

    Attributes:
        instance: the endpoint that a router sends requests to.
        type: one of ``ENGINES`` or ``STORES``, or of those that LMCache's servers have.
        model: "" for LMCache's servers, whose events name it.
        node, pool: the host it runs on, and the pool whose blocks it tells; scores have both.
        rank: None if messages name theirs.
        lease_s: seconds after which it is forgotten unless it is registered again; 0: never.
        storage_removals: the engine also tells what its storage evicts.
    """

    instance: str
    model: str
    type: str = "vllm"
    block_size: int | None = None
    lora: str = ""
    tenant: str = "default"
    salt: str = ""
    rank: int | None = 0
    endpoint: str = ""
    replay: str = ""
    node: str = ""
    pool: str = ""
    lease_s: float = 0.0
    storage_removals: bool = False

    def __post_init__(self) -> None:
        if self.type not in ENGINES + STORES and not self.hashed:
            raise UsageError(f"type {self.type!r}: there are {', '.join(ENGINES + STORES)}")
        if not self.instance or not (self.model or self.hashed):
            raise UsageError("a publisher has an instance_id and a modelname")
        if self.instance.startswith(NO_INSTANCES):
            raise UsageError(f"instance_id {self.instance!r:.80}: names of pools and nodes begin so")

    @property
    def name(self) -> tuple[str, str, int | None]:
        """What makes two registrations those of one publisher."""
        return self.instance, self.tenant, self.rank

    @cached_property
    def store(self) -> bool:
        """True for a store, whose blocks no engine has in its own memory."""
        return self.type in STORES or self.type == LMCACHE_SHARED

    @cached_property
    def hashed(self) -> bool:
        """True where blocks have the hashes of LMCache's chunks: questions with tokens need that hash."""
        return self.type in (LMCACHE_SERVER, LMCACHE_SHARED)


@dataclass(eq=False)
class Holder:
    """See the module."""

    id: int
    source: Source
    space: Space
    rank: int
    group: int
    node: str
    blocks: int = 0

    @cached_property
    def unit(self) -> str | int:
        """What has a prefix together: hosts of one pool do, an engine's ranks and groups do not."""
        told = self.source.registration
        return (told.pool or told.instance) if told.store else self.id

    @property
    def name(self) -> _HolderName:
        """What makes it another one than all others of its source."""
        return self.space, self.rank, self.group, self.node


_HolderName = tuple[Space, int, int, str]


class Holders(OrderedDict[_HolderName, Holder]):
    """The holders of a source by their names. The one that was added to longest ago is the first."""

    def __init__(self) -> None:
        super().__init__()
        #: At so many, those without blocks are looked for.
        self.room = HOLDERS_MIN
        #: By tenant, salt and node, as most removals name them.
        self._tree: dict[str, Any] = {}

    def add(self, holder: Holder) -> None:
        """Add a holder. O(1)."""
        space = holder.space
        here = self._tree.setdefault(space.tenant, {}).setdefault(space.salt, {}).setdefault(holder.node, {})
        here[holder.name] = self[holder.name] = holder

    def remove(self, holder: Holder) -> None:
        """Remove a holder. O(1)."""
        del self[holder.name]
        names = holder.space.tenant, holder.space.salt, holder.node
        trees: list[dict[Any, Any]] = [self._tree]
        for name in names:
            trees.append(trees[-1][name])
        del trees[-1][holder.name]
        for tree, name in zip(trees[-2::-1], names[::-1]):
            if not tree[name]:
                del tree[name]

    def idle(self) -> list[Holder]:
        """Return those without blocks, to be removed. They are looked for again at twice as many others. O(holders)."""
        found = [each for each in self.values() if not each.blocks]
        self.room = max(HOLDERS_MIN, 2 * (len(self) - len(found)))
        return found

    def meant(self, where: Where, rank: int) -> tuple[list[Holder], int]:
        """Return those that an event may mean, and at how much this looked.

        O(those of the tenant, salt and owner that it names).
        """
        trees, looks = [self._tree], 0
        for said in (where.tenant, where.salt, where.owner):
            looks += len(trees)
            if said is None:
                trees = [below for tree in trees for below in tree.values()]
            else:
                trees = [tree[said] for tree in trees if said in tree]
        found: list[Holder] = [
            each for tree in trees for each in tree.values()
            if rank == each.rank and where.group == each.group and each.space.agrees(where)
        ]  # fmt: skip
        return found, looks + sum(map(len, trees))

    def parts(self, meant: Sequence[Holder], most: int) -> Iterator[Owners]:
        """Yield the identifiers of those of ``meant`` with blocks, so many at a time.

        Those that are removed between two parts are left out.
        """
        meant = [each for each in meant if each.blocks]
        for at in range(0, len(meant), most):
            yield np.array([each.id for each in meant[at : at + most] if self.get(each.name) is each], np.uint32)


class Spaces(dict[Space, dict[int, Holder]]):
    """The holders of each space, by their identifiers."""

    def __init__(self) -> None:
        super().__init__()
        #: Spaces by model, tenant and size of blocks: with many salts these are far fewer.
        self._sizes: Counter[tuple[str, str, int]] = Counter()

    def add(self, holder: Holder) -> None:
        """Add a holder. O(1)."""
        space = holder.space
        there = self.setdefault(space, {})
        self._sizes[space.model, space.tenant, space.block_size] += not there
        there[holder.id] = holder

    def remove(self, holder: Holder) -> None:
        """Remove a holder. O(1)."""
        space = holder.space
        there = self[space]
        del there[holder.id]
        if not there:
            del self[space]
            size = space.model, space.tenant, space.block_size
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def sizes(self, model: str, tenant: str) -> set[int]:
        """Return the sizes of blocks of a model, with any adapter and salt. O(models x tenants x sizes)."""
        return {size for *of, size in self._sizes if of == [model, tenant]}


@dataclass(eq=False)
class Parked:
    """An event that waits for its parent, and which of its blocks were removed meanwhile.

    ``rest``: the further parts of one that was cut, in their order.
    """

    event: Stored
    rank: int
    gone: set[int]
    rest: tuple[Stored, ...] = ()

    @property
    def parts(self) -> tuple[Stored, ...]:
        """All its parts: it waits as a whole, and is added as a whole."""
        return (self.event, *self.rest)

    @property
    def names(self) -> list[int]:
        """What the engine calls its blocks. O(blocks)."""
        return [name for part in self.parts for name in part.hashes]

    @property
    def nbytes(self) -> int:
        """See ``Stored``."""
        return sum([each.nbytes for each in self.parts])


class Expected(NamedTuple):
    """A prompt that a router has just sent there. ``rank``: None if the router has not said to which one."""

    until: float
    space: Space
    keys: U64
    rank: int | None = None


@dataclass(eq=False)
class Source:
    """A registered publisher, and what is known of it."""

    registration: Registration
    #: (group, rank) -> the owner of its aliases.
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)
    #: Of each group with full attention the sizes of blocks that it told of, counted or not.
    dense: dict[int, frozenset[int]] = field(default_factory=dict)
    holders: Holders = field(default_factory=Holders)
    #: Not counted now: what is known of it may be wrong.
    stale: bool = False
    #: Messages were lost, and all that was known with them: what is known since is true, but not all.
    lost: bool = False
    #: By parent's alias and lane, the oldest first; and the number of blocks of all.
    parked: OrderedDict[tuple[int, int], list[Parked]] = field(default_factory=OrderedDict)
    #: By a block's own alias and lane: those of them that have it, and have not heard that it is gone.
    naming: dict[tuple[int, int], Parked | dict[Parked, None]] = field(default_factory=dict)
    waiting: int = 0
    waiting_bytes: int = 0
    #: The last event that was cut and waits: its further parts come next.
    cut: Parked | None = None
    expected: deque[Expected] = field(default_factory=lambda: deque(maxlen=EXPECTED_MAX))
    #: By group, of blocks that are smaller than registered: the size of events with several of them.
    smaller: dict[int, int] = field(default_factory=dict)
    #: By group, size and name: what was taken for a part of a block, and tokens with those parts before that it names.
    parts: dict[tuple[int, int, int], int] = field(default_factory=dict)
    #: Names of media that have no tier, and what was not counted, by reason.
    media: set[str] = field(default_factory=set)
    #: Models that events named, of a source that is registered without one.
    models: set[str] = field(default_factory=set)
    ignored: Counter[str] = field(default_factory=Counter)
    #: Events since which not all is known that it has.
    missed: int = 0
    #: Ranks that its process has told of; and those that have cleared their caches, and of which all is known since.
    ranks: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    #: It has told of blocks of pairs of tokens: questions with tokens need those keys, too.
    pairs: bool = False
    #: Blocks of all holders.
    blocks: int = 0

    def tier(self, where: Where, *, removed: bool = False) -> int:
        """Return the tier of an event's blocks. Raises Ignored for blocks whose removal nobody tells.

        ``removed``: they are gone, so that this is told after all.
        """
        medium, told = where.medium or "gpu", self.registration
        name = medium.lower()
        tier = MEDIA.get(name, UNKNOWN)
        if tier == UNKNOWN and len(self.media) < MEDIA_MAX:
            self.media.add(name)
        if not told.store and not told.storage_removals:
            if tier == STORAGE:
                raise Ignored("storage of an engine, which tells no removals")
            if medium in _ADDED_TO_ONLY and not removed:
                raise Ignored(f"{medium} of a store's connector, which tells no removals")
        return tier

    def tier_of_stored(self, event: Stored) -> int:
        """Return the tier of blocks that were stored. Raises Ignored for those that do not count.

        Of hybrid models vLLM also tells of the part of a prompt's last block that has tokens yet: it has the size of a
        hash or some, one hash of its own, and no engine restores it alone. An event with several hashes has whole
        blocks, and so has one that makes a whole block with others of its size behind each other: then the publisher
        was registered with too large a size. Those count that come from then on.
        """
        told, where, size = self.registration, event.where, event.block_size
        if where.kind not in DENSE:
            raise Ignored("a group that keeps no whole prefix")
        whole = self.smaller.get(where.group, told.block_size or 0)
        if told.type == "vllm" and size and size < whole:
            if len(event.hashes) == 1:
                tokens = size
                if event.parent is not None:
                    tokens += self.parts.get((where.group, size, event.parent), 0)
                if tokens < whole:
                    part = where.group, size, event.hashes[0]
                    self.parts.pop(part, None)  # the one told last is the last one to go
                    self.parts[part] = tokens
                    if len(self.parts) > PARTS_MAX:
                        del self.parts[next(iter(self.parts))]
                    raise Ignored(_PART)
            if self.ignored[_PART]:
                self.miss()  # whole ones may have been among them
            self.smaller[where.group] = size
        return self.tier(where)

    def space(self, where: Where, block_size: int | None) -> Space:
        """Return the space of an event's blocks. Raises Ignored without a block size."""
        told = self.registration
        size = block_size or told.block_size
        if size is None:
            raise Missed("no block size")
        return Space(
            where.model or told.model, where.lora or told.lora, where.tenant or told.tenant, where.salt or told.salt,
            size,
        )  # fmt: skip

    def said(self, where: Where) -> Where:
        """Return what an event says: where a text is empty, what the publisher was registered with, as in a space."""
        if "" not in where:
            return where
        told = self.registration
        return where._replace(
            model=told.model if where.model == "" else where.model, lora=told.lora if where.lora == "" else where.lora,
            tenant=told.tenant if where.tenant == "" else where.tenant,
            salt=told.salt if where.salt == "" else where.salt, owner=told.node if where.owner == "" else where.owner,
        )  # fmt: skip

    def note_group(self, group: int, size: int | None) -> None:
        """Note that a group with full attention has blocks of a size, whether they count or not. O(1)."""
        sizes = self.dense.get(group, frozenset())
        if size is not None and size not in sizes and len(self.dense) <= GROUPS_MAX and len(sizes) < GROUPS_MAX:
            self.dense[group] = sizes | {size}

    def groups(self, block_size: int) -> int:
        """Return how many groups with full attention have blocks of this size. O(groups)."""
        return sum(block_size in sizes for sizes in self.dense.values())

    def expect(self, space: Space, keys: U64, until: float, rank: int | None) -> None:
        """Count a prompt as held until a time. Of too many blocks the oldest prompts are forgotten. O(prompts)."""
        left = EXPECTED_BLOCKS_MAX - len(keys)
        for place, each in enumerate(reversed(self.expected)):
            left -= len(each.keys)
            if left < 0:
                for _ in range(len(self.expected) - place):
                    self.expected.popleft()
                break
        self.expected.append(Expected(until, space, keys, rank))

    def ignore(self, why: Ignored) -> None:
        """Count an event that does not count."""
        self.ignored[str(why)] += 1
        if isinstance(why, Missed):
            self.miss()

    def miss(self) -> None:
        """Note that blocks are not counted that should be: not all is known that any rank has."""
        self.missed += 1
        self.known.clear()

    def emptied(self, rank: int) -> None:
        """Note that a rank has nothing any more. What others have is forgotten with it, and they may have it still."""
        others = {each.rank for each in self.holders.values()} | {each for _, each in self.lanes}
        others.discard(rank)
        self.missed += bool(others)
        self.known -= others
        self.known.add(rank)

    def unwait(self, lane: int, names: Sequence[int]) -> None:
        """Note that blocks are gone, some of which may still wait. O(names), as each event hears it once of a block."""
        for name in names:
            for each in _each(self.naming.pop((name, lane), None)):
                each.gone.add(name)

    def park(self, parked: Parked, lane: int) -> None:
        """Let an event wait for its parent, in place of the oldest if need be. O(blocks). Raises Missed.

        An event that was cut waits as a whole or not at all: the first part makes room for all, and :meth:`join` adds
        the others to it.
        """
        event = parked.event
        assert event.parent is not None
        if event.rest:  # the part before it was refused, and has been counted
            self.miss()
            return
        blocks, room = event.whole or (len(event.hashes), event.nbytes)
        if blocks > PARKED_MAX or room > PARKED_BYTES_MAX:
            raise Missed("too many blocks to wait for a parent")
        while self.parked and (self.waiting + blocks > PARKED_MAX or self.waiting_bytes + room > PARKED_BYTES_MAX):
            self.ignored["its parent did not come"] += len(self.unpark(*next(iter(self.parked))))
            self.miss()
        self.parked.setdefault((event.parent, lane), []).append(parked)
        for part in parked.parts:
            self._wait(parked, part, lane)
        if event.whole is not None:
            self.cut = parked

    def join(self, part: Stored, lane: int) -> bool:
        """Let a further part of an event wait with the first one. Return False if that does not wait. O(blocks)."""
        parked = self.cut
        if parked is None or parked.event.whole is not part.whole or parked.parts[-1].hashes[-1] != part.parent:
            return False
        parked.rest += (part,)
        self._wait(parked, part, lane)
        return True

    def _wait(self, parked: Parked, part: Stored, lane: int) -> None:
        """Count the blocks of a part that waits."""
        names = part.hashes
        self.waiting += len(names)
        self.waiting_bytes += part.nbytes
        for name in names if not parked.gone else set(names) - parked.gone:
            there = self.naming.setdefault((name, lane), parked)
            if isinstance(there, dict):
                there[parked] = None
            elif there is not parked:
                self.naming[name, lane] = {there: None, parked: None}

    def unpark(self, parent: int, lane: int) -> list[Parked]:
        """Return the events that wait for a parent, the oldest first, and let them wait no more. O(their blocks)."""
        found = self.parked.pop((parent, lane), [])
        for each in found:
            if each is self.cut:
                self.cut = None
            names = each.names
            self.waiting -= len(names)
            self.waiting_bytes -= each.nbytes
            for name in names:
                there = self.naming.get((name, lane))
                if isinstance(there, dict):
                    there.pop(each, None)
                if not there or there is each:
                    self.naming.pop((name, lane), None)
        return found

    def unpark_all(self) -> None:
        """Forget all that waits."""
        self.parked.clear()
        self.naming.clear()
        self.cut = None
        self.waiting = self.waiting_bytes = 0


def _each(parked: Parked | dict[Parked, None] | None) -> Iterable[Parked]:
    return (parked,) if isinstance(parked, Parked) else parked or ()


@dataclass(eq=False)
class Late:
    """Blocks that are not in the tables yet: what the engine calls them, and their keys."""

    source: Source
    holder: Holder
    lane: int
    tier: int
    copies: bool
    names: dict[int, int]
    #: The first of their events, and its rank: others that say the same are collected without a look at all else.
    like: Stored
    rank: int
    count: int = 0
