"""Which source holds which blocks: what events add, move and take away.

A *space* is where blocks can be equal at all: model, adapter, tenant, salt, block size. A *source* is a publisher that
was registered. A *holder* is what of a source is counted by itself: a space, a rank, a group of a hybrid model's cache,
and for a store the host that has the blocks. Two tables hold everything, with 40 bytes for a block, 64 at the worst:
what an engine calls a block -> its key and holder, and (key, holder) -> how often, by tier.

Only what can be restored counts. So of a hybrid model only groups with full attention do, and a prompt's block only if
all of these groups have it; and an event must have the tokens of all its blocks. An event of a parent that is unknown
waits for it. STORAGE events of engines do not count, as engines tell nobody what their storage evicts, nor do those of
connectors to stores (see ``Source.tier``); a source can be registered with ``storage_removals`` if its engine does.

Where two ways are possible, the one is taken that forgets: a block that is missed costs time, one that is not there
costs more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .events import Event, Removed, Stored
from .keys import SEED, chain, key_of
from .places import Found, Places
from .prefixes import BITS, MOST
from .sources import GPU, U64, Holder, Ignored, Late, Missed, Parked, Registration, Source, Space, Spaces
from .table import GROWTH, STORES_GROWTH, Identifiers, Slots, Table, all_different

SOURCES_MAX: Final = 4096
#: Of each source: ranks and groups, and holders, as there is one for each salt. Room for a sixteenth is for new ones.
LANES_MAX: Final = 1024
HOLDERS_MAX: Final = 1 << 15
#: Blocks of a source, and identifiers of holders that are gone before both tables are swept.
BLOCKS_MAX: Final = 1 << 24
DEAD_MAX: Final = 4096

#: From so many blocks on, an event is applied by numpy.
_VECTOR: Final = 24
#: Searches for what removals may mean, and holders looked at, before others may ask: up to 50 milliseconds.
_SEARCHES: Final = 1 << 14
#: Blocks that wait for more, at most about.
_GATHERED: Final = 4096


class Blocks:
    """The index. Every public method takes ``lock``, so any thread may call them.

    Args:
        seed: of the keys' hash.
    """

    def __init__(self, seed: int = SEED) -> None:
        self.seed = seed
        self.lock = threading.RLock()
        self.sources: dict[tuple[str, str, int | None], Source] = {}
        self.spaces = Spaces()
        self.added = 0
        self.removed = 0
        self._ids = Identifiers()
        self._holders: dict[int, Holder] = {}
        self._aliases = Table({"key": np.uint64, "holder": np.uint32}, self._ids.alive)
        self._held = Table({"counts": np.uint32}, self._ids.alive)
        self._searches = 0  # of removals, since others had a turn
        self._late: Late | None = None
        self._places = Places()

    # -- sources -----------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> Source:
        """Return the source of a publisher, a new one if it is unknown or differs. Raises UsageError if too many."""
        with self.lock:
            known = self.sources.get(registration.name)
            if known is not None and known.registration == registration:
                return known
            if known is not None:
                self.unregister(registration.name)
            if len(self.sources) >= SOURCES_MAX:
                raise UsageError(f"{SOURCES_MAX} publishers at most")
            source = self.sources[registration.name] = Source(registration)
            return source

    def unregister(self, name: tuple[str, str, int | None]) -> bool:
        """Forget a publisher and all that it holds. Return False if it is unknown."""
        with self.lock:
            source = self.sources.pop(name, None)
            if source is not None:
                self.clear(source)
            return source is not None

    def clear(self, source: Source, tenant: str | None = None) -> None:
        """Forget what a source holds, of one tenant or of all. O(holders)."""
        with self.lock:
            if self._late is not None and self._late.source is source:
                self._late = None  # it has an alias: all is forgotten
            if source.lanes:
                tenant = None  # aliases are of all tenants
            for holder in list(source.holders.values()):
                if tenant is None or holder.space.tenant == tenant:
                    self._forget(holder)
            if tenant is None:
                source.expected.clear()
            # An alias whose holder is gone is none, and so is a parent that may never come again.
            for lane in source.lanes.values():
                self._ids.end(lane)
            source.lanes.clear()
            source.unpark_all()
            if self._ids.ended > DEAD_MAX:
                self.sweep()

    def sweep(self) -> None:
        """Free the memory of holders that are gone, and their identifiers; later if there is none for it. O(blocks)."""
        with self.lock, contextlib.suppress(MemoryError):
            aliases = self._aliases
            named = aliases.columns["key"].nonzero()[0]
            aliases.remove(named[~self._ids.alive(aliases.columns["holder"][named])])
            self._held.rebuild()
            self._aliases.rebuild()
            self._ids.free()

    def expect(
        self, source: Source, space: Space, keys: Sequence[int] | U64, until: float, rank: int | None = None
    ) -> None:  # fmt: skip
        """Count a prompt as held until a time, as a router has just sent it there, to a rank if it said so."""
        with self.lock:
            source.expect(space, np.array(keys, np.uint64), until, rank)

    @property
    def entries(self) -> int:
        """Blocks of all sources."""
        return sum(source.blocks for source in list(self.sources.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of both tables."""
        return self._aliases.nbytes + self._held.nbytes

    def _forget(self, holder: Holder) -> None:
        self._ids.end(holder.id)
        self._holders.pop(holder.id, None)
        holder.source.blocks -= holder.blocks
        holder.source.holders.remove(holder)
        self.spaces.remove(holder)

    def _lane(self, source: Source, group: int, rank: int) -> int:
        lane = source.lanes.get((group, rank))
        if lane is None:
            if len(source.lanes) >= LANES_MAX:
                raise Missed("too many ranks and groups")
            lane = source.lanes[group, rank] = self._ids.new()
        return lane

    def _holder(self, source: Source, space: Space, rank: int, group: int, node: str) -> Holder:
        key = space, rank, group, node
        holder = source.holders.get(key)
        if holder is not None:
            source.holders.move_to_end(key)  # it is the last one to go, and never out: this needs no memory
            return holder
        if len(source.holders) >= min(source.holders.room, HOLDERS_MAX):
            self._make_room(source)
        holder = Holder(self._ids.new(), source, space, rank, group, node)
        self.spaces.add(holder)
        self._holders[holder.id] = holder
        source.holders.add(holder)  # the last step: what is there is whole, and can be forgotten
        return holder

    def _make_room(self, source: Source) -> None:
        """Forget holders without blocks, else those that were added to longest ago. O(holders), and rarely again."""
        self._flush()
        for holder in source.holders.idle():
            self._forget(holder)
        surplus = len(source.holders) + (HOLDERS_MAX // 16 or 1) - HOLDERS_MAX  # else the next one would look again
        for holder in list(source.holders.values())[: max(0, surplus)]:
            self._forget(holder)
            source.ignore(Missed("too many spaces"))
        if self._ids.ended > DEAD_MAX:
            self.sweep()

    # -- events ------------------------------------------------------------------------------------------

    def apply(self, source: Source, events: Sequence[Event], rank: int | None = None, *, more: bool = False) -> None:
        """Apply the events of a message. O(blocks).

        ``more``: others follow at once, and what is stored may go into the tables with theirs, at :meth:`flush`. Who
        asks before that sees no difference, but in counts of blocks.
        """
        with self.lock:
            if self._late is not None and self._late.source is not source:
                self._flush()  # else it would be dropped with what fails here
            try:
                self._apply(source, events, rank)
            except BaseException:
                self._late = None
                raise
            if not more or (self._late is not None and self._late.count >= _GATHERED):
                self._flush()

    def flush(self) -> None:
        """Put into the tables what waits for more."""
        with self.lock:
            self._flush()

    def _apply(self, source: Source, events: Sequence[Event], rank: int | None) -> None:
        of = source.registration.rank
        for event in events:
            late = self._late
            if late is not None and event.where is late.like.where and self._again(late, source, event, rank):
                continue
            if not isinstance(event, Stored) or event.tokens is None:
                self._flush()
            told = event.where.rank if event.where.rank is not None else rank
            mine = of if of is not None else told or 0
            source.ranks.add(mine)
            try:
                if isinstance(event, Stored):
                    self._stored(source, event, mine)
                elif isinstance(event, Removed):
                    self._removed(source, event, mine)
                else:
                    source.emptied(mine)
                    self.clear(source, source.said(event.where).tenant if source.registration.store else None)
                    self._give_way(len(source.holders))
            except Ignored as why:
                source.ignore(why)

    def _again(self, late: Late, source: Source, event: Event, told: int | None) -> bool:
        """Collect an event that is as the first one of those collected. Return False if it is not, and nothing is done.

        So what :meth:`_stored` finds out for each event is found out for the first of many alone.
        """
        if (
            not isinstance(event, Stored) or late.source is not source or event.block_size != late.like.block_size
            or event.tokens is None or event.pairs != late.like.pairs or source.waiting
            or (late.tier != GPU and source.registration.type == "vllm")  # see _told
        ):  # fmt: skip
            return False
        of, mine = source.registration.rank, event.where.rank
        names, known = event.hashes, late.names
        count, size = len(names), late.holder.space.block_size
        if (
            (of if of is not None else (mine if mine is not None else told) or 0) != late.rank
            or len(event.tokens) != 4 * size * count or source.blocks + late.count + count > BLOCKS_MAX
        ):  # fmt: skip
            return False
        key: int | None = None
        if event.parent is None:
            if late.copies or late.like.parent is not None:
                return False
        else:
            key, holder = self._parent(event.parent, late.lane)
            if holder is not late.holder or late.copies != (source.registration.type == "vllm" and not event.rooted):
                return False
        if count == 1:  # as of an engine that decodes
            if (name := names[0]) in known:
                return False
            tokens = bytes(event.tokens) + event.extras[0] if event.extras else event.tokens
            known[name] = key_of(tokens, key, self.seed)
            late.count += 1
            return True
        if not known.keys().isdisjoint(names) or len(set(names)) < count:
            return False
        known.update(zip(names, chain(event.tokens, size, parent=key, extras=event.extras, seed=self.seed)))
        late.count += count
        return True

    def _stored(self, source: Source, event: Stored, rank: int) -> None:
        where, tier = event.where, source.tier_of_stored(event)
        if event.tokens is not None:  # without, it may be of any kind: offloads of a hybrid model name none
            source.note_group(where.group, event.block_size or source.registration.block_size)
        if source.blocks + len(event.hashes) > BLOCKS_MAX:
            raise Missed("too many blocks")
        if event.tokens is None and (event.standard or source.registration.store):
            space = source.space(where, event.block_size)
            holder = self._holder(source, space, rank, where.group, where.owner or source.registration.node)
            self._hold(source, holder, event.hashes, tier, False)
            return
        lane = self._lane(source, where.group, rank)
        if event.tokens is None:
            self._known(source, event.hashes, lane, tier, source.registration.type == "vllm" and not event.rooted)
            return
        size = event.block_size or source.registration.block_size
        if size is None or len(event.tokens) != 4 * size * len(event.hashes):
            raise Missed("not the tokens of all blocks")
        source.pairs |= event.pairs
        todo = [] if event.rest and source.join(event, lane) else [Parked(event, rank, set())]
        while todo:
            parked = todo.pop()
            try:
                added = self._stored_behind(source, parked, lane)
            except Ignored as why:  # of this one alone
                source.ignore(why)
                continue
            if added and source.waiting:
                for name in parked.names:
                    todo += source.unpark(name, lane)

    def _stored_behind(self, source: Source, parked: Parked, lane: int) -> bool:
        """Add blocks behind their parent. Return False if it is unknown, and they wait for it."""
        event = parked.event
        size = event.block_size or source.registration.block_size  # its own: its parent's event may name another one
        key: int | None = None
        if event.parent is None:
            space = source.space(event.where, size)
        else:
            key, holder = self._parent(event.parent, lane)
            if holder is None:
                source.park(parked, lane)
                return False
            if holder.space.block_size != size:
                raise Missed("blocks of another size than their parent")
            space = holder.space
        for part in parked.parts:
            key = self._add_part(source, parked, part, lane, key, space)
        return True

    def _add_part(self, source: Source, parked: Parked, event: Stored, lane: int, key: int | None, space: Space) -> int:
        """Add a part's blocks behind that key. Return its last one's, as the next part may find that block gone."""
        assert event.tokens is not None
        rank, step = parked.rank, space.block_size
        tier = source.tier(event.where)
        holder = None
        if tier != GPU and source.registration.type == "vllm" and not event.extras:
            holder, keys = self._told(event, lane, key, step)
        if holder is None:
            keys = chain(event.tokens, step, parent=key, extras=event.extras, seed=self.seed)
            node = event.where.owner if source.registration.store else None
            holder = self._holder(source, space, rank, event.where.group, node or source.registration.node)
        last = keys[-1]
        names: Sequence[int] = event.hashes
        if parked.gone:
            kept = [at for at, name in enumerate(names) if name not in parked.gone]
            names, keys = [names[at] for at in kept], [keys[at] for at in kept]
        if names:
            # vLLM tells of each copy. But without a parent it may only report once more what it has.
            copies = source.registration.type == "vllm" and event.parent is not None and not event.rooted
            self._collect(Late(source, holder, lane, tier, copies, {}, event, rank), names, keys)
        return last

    def _told(self, event: Stored, lane: int, key: int | None, step: int) -> tuple[Holder | None, list[int]]:
        """Return the holder and the keys of blocks of which the engine has told more before; no holder if it has not.

        vLLM's names of blocks say all that they depend on. But its offloading leaves salts and images away when it
        tells of them once more. Believed as they are, they would be those of the tokens alone.
        """
        found, keys = None, []
        assert event.tokens is not None
        for at, name in enumerate(event.hashes):
            known, holder = self._parent(name, lane)
            if (
                known is not None and holder and holder.space.block_size == step
                and holder.space.agrees(holder.source.said(event.where))
            ):  # fmt: skip
                found, key = holder, known
            else:
                key = key_of(event.tokens[4 * step * at : 4 * step * (at + 1)], key, self.seed)
            keys.append(key)
        return found, keys

    def _parent(self, name: int, lane: int) -> tuple[int | None, Holder | None]:
        """Return the key and the holder of what an engine calls a block; None for an unknown one."""
        late = self._late
        if late is not None and late.lane == lane and name in late.names:
            return late.names[name], late.holder
        slot = self._aliases.find_one(name, lane)
        if slot < 0:
            return None, None
        columns = self._aliases.columns
        return int(columns["key"][slot]), self._holders.get(int(columns["holder"][slot]))

    def _collect(self, mine: Late, names: Sequence[int], keys: Sequence[int]) -> None:
        """Add blocks, together with those of other events that are alike: numpy wants many at once."""
        late = self._late
        if late is not None and (
            (late.holder, late.lane, late.tier, late.copies) != (mine.holder, mine.lane, mine.tier, mine.copies)
            # A name that is given again means two things, one after the other; a copy is counted too.
            or not late.names.keys().isdisjoint(names)
        ):
            self._flush()
            late = None
        if late is None:
            late = self._late = mine
        late.names.update(zip(names, keys))
        if len(late.names) != late.count + len(names):  # within one event
            for name in names:
                late.names.pop(name, None)
            self._flush()
            for name, key in zip(names, keys):
                self._alias([name], mine.lane, [key], mine.holder)
                self._hold(mine.source, mine.holder, [key], mine.tier, mine.copies)
            return
        late.count += len(names)

    def _flush(self) -> None:
        """Put into the tables what was collected."""
        late, self._late = self._late, None
        if late is not None and late.names:
            keys = list(late.names.values())
            self._alias(list(late.names), late.lane, keys, late.holder)
            self._hold(late.source, late.holder, keys, late.tier, late.copies)

    def _removed(self, source: Source, event: Removed, rank: int) -> None:
        where = event.where
        tier = source.tier(where, removed=True)
        lane = source.lanes.get((where.group, rank))
        names = event.hashes
        if source.waiting and lane is not None:
            source.unwait(lane, names)
        if lane is not None and len(names) >= _VECTOR and len(set(names)) == len(names):
            self._unhold_many(source, np.array(names, np.uint64), lane, tier)
        elif lane is not None:
            for name in names:
                self._unhold_one(source, name, lane, tier)
        if source.registration.store or source.registration.hashed:
            self._removed_from_store(source, event, rank, tier)

    def _removed_from_store(self, source: Source, event: Removed, rank: int, tier: int) -> None:
        """Take blocks away that have no alias: of every space that the event may mean. Others may ask in between."""
        keys = np.unique(np.array(event.hashes, np.uint64))
        meant, looks = source.holders.meant(source.said(event.where), rank)
        self._give_way(looks)  # whatever was found
        for ids in source.holders.parts(meant, max(1, _SEARCHES // max(1, len(keys)))):
            self._lower(source, self._held.find_each(keys, ids), tier)
            self._give_way(len(keys) * len(ids))

    def _give_way(self, searches: int) -> None:
        """Let go of the lock for a moment after so many searches, unless a caller has it too."""
        self._searches += searches
        if self._searches >= _SEARCHES:
            self._searches = 0
            self.lock.release()
            try:
                time.sleep(0)  # whoever waits for the index has a turn
            finally:
                self.lock.acquire()

    # -- the tables --------------------------------------------------------------------------------------

    def _alias(self, names: Sequence[int], lane: int, keys: Sequence[int], holder: Holder) -> None:
        table = self._aliases
        table.reserve(len(names))
        mine, whole = np.array(names, np.uint64), np.array(keys, np.uint64)
        if len(names) < _VECTOR or not all_different(mine):
            for name, key in zip(names, keys):
                slot = table.find_one(name, lane)
                if slot < 0:
                    slot = table.add_one(name, lane)
                else:
                    self._renamed(np.array([slot]), np.array([key], np.uint64), holder)
                table.columns["key"][slot], table.columns["holder"][slot] = key, holder.id
            return
        slots, new = table.find_or_add(mine, np.full(len(mine), lane, np.uint32))
        if not new.all():
            self._renamed(slots[~new], whole[~new], holder)
        table.columns["key"][slots], table.columns["holder"][slots] = whole, holder.id

    def _renamed(self, slots: Slots, keys: U64, holder: Holder) -> None:
        """Forget what aliases meant that mean something else from now on: another block, or one of another space."""
        columns = self._aliases.columns
        differs = columns["key"][slots] != keys
        if not holder.source.registration.store:  # of which several hosts can have a block
            differs |= columns["holder"][slots] != holder.id
        other = slots[differs]
        if other.size:
            held = self._held.find(columns["key"][other], columns["holder"][other])
            self._drop(np.unique(held[held >= 0]))

    def _hold(self, source: Source, holder: Holder, keys: Sequence[int], tier: int, copies: bool) -> None:
        """Count blocks. ``copies``: one that is there already has another copy now; otherwise it is told once more."""
        table, shift = self._held, BITS * tier
        most = MOST if copies else 1
        self.added += len(keys)
        # A store's snapshot has all its blocks, and nothing in the other table: this one may grow in larger steps.
        table.reserve(len(keys), STORES_GROWTH if 4 * self._aliases.entries < table.entries else GROWTH)
        counts = table.columns["counts"]
        mine = np.array(keys, np.uint64)
        if len(keys) < _VECTOR or not all_different(mine):
            for key in keys:
                slot = table.find_one(key, holder.id)
                if slot < 0:
                    slot = table.add_one(key, holder.id)
                    holder.blocks += 1
                    source.blocks += 1
                now = int(counts[slot])
                if (now >> shift & MOST) < most:
                    counts[slot] = now + (1 << shift)
            return
        slots, new = table.find_or_add(mine, np.full(len(mine), holder.id, np.uint32))
        added = int(new.sum())
        holder.blocks += added
        source.blocks += added
        before = counts[slots]
        more = (before >> np.uint32(shift) & np.uint32(MOST)) < most
        counts[slots] = before + (more.astype(np.uint32) << np.uint32(shift))

    def _known(self, source: Source, names: Sequence[int], lane: int, tier: int, copies: bool) -> None:
        """Count blocks that an event names without tokens: another tier of those known. ``copies`` as in _hold."""
        mine = np.unique(np.array(names, np.uint64))
        slots = self._aliases.find(mine, np.full(len(mine), lane, np.uint32))
        slots = slots[slots >= 0]
        if len(slots) < len(mine):
            source.ignored["unknown blocks without tokens"] += len(mine) - len(slots)
            source.miss()
        holders = self._aliases.columns["holder"][slots]
        for number in np.unique(holders).tolist():
            holder = self._holders.get(number)
            if holder is not None:
                keys = self._aliases.columns["key"][slots[holders == number]].tolist()
                self._hold(source, holder, keys, tier, copies)

    def _unhold_one(self, source: Source, name: int, lane: int, tier: int) -> None:
        slot = self._aliases.find_one(name, lane)
        if slot < 0:
            return
        columns = self._aliases.columns
        number = int(columns["holder"][slot])
        held = self._held.find_one(int(columns["key"][slot]), number)
        if held >= 0:
            self.removed += 1
            counts, shift = self._held.columns["counts"], BITS * tier
            now = int(counts[held])
            if now >> shift & MOST:
                now -= 1 << shift
                counts[held] = now
            if now:
                return
            self._held.remove_one(held)
            holder = self._holders.get(number)
            if holder is not None:
                holder.blocks -= 1
                source.blocks -= 1
        self._aliases.remove_one(slot)

    def _unhold_many(self, source: Source, names: U64, lane: int, tier: int) -> None:
        slots = self._aliases.find(names, np.full(len(names), lane, np.uint32))
        slots = slots[slots >= 0]
        columns = self._aliases.columns
        held = self._held.find(columns["key"][slots], columns["holder"][slots])
        if len(np.unique(held[held >= 0])) < int((held >= 0).sum()):  # two names of one block
            for name in self._aliases.keys[slots].tolist():
                self._unhold_one(source, name, lane, tier)
            return
        gone = self._lower(source, held[held >= 0], tier)
        self._aliases.remove(slots[(held < 0) | np.isin(held, gone)])

    def _lower(self, source: Source, slots: Slots, tier: int) -> Slots:
        """Take one copy away of each block, all different. Return the slots of those that have none left, now empty."""
        counts, shift = self._held.columns["counts"], np.uint32(BITS * tier)
        self.removed += len(slots)
        now = counts[slots]
        now -= ((now >> shift & np.uint32(MOST)) > 0).astype(np.uint32) << shift
        counts[slots] = now
        gone: Slots = slots[now == 0]
        self._drop(gone)
        return gone

    def _drop(self, slots: Slots) -> None:
        for number, count in zip(*(each.tolist() for each in np.unique(self._held.owners[slots], return_counts=True))):
            holder = self._holders.get(number)
            if holder is not None:
                holder.blocks -= count
                holder.source.blocks -= count
        self._held.remove(slots)

    # -- questions ---------------------------------------------------------------------------------------

    def held(self, most: int) -> list[tuple[Holder, U64, NDArray[np.uint32]]]:
        """Return keys and counts of all holders' blocks, so many in all at the most, whichever. O(slots + holders)."""
        with self.lock:
            self._flush()
            owners, found = self._held.owners, self._held.some(most)
            found = found[owners[found].argsort(kind="stable")]
            names, firsts = np.unique(owners[found], return_index=True)
            of = dict(zip(names.tolist(), np.split(found, firsts[1:])))
            holders = [each for source in self.sources.values() for each in source.holders.values()]
            mine = [(each, of.get(each.id, found[:0])) for each in holders]
            return [(each, self._held.keys[slots], self._held.columns["counts"][slots]) for each, slots in mine]

    def match(self, space: Space, keys: Sequence[int] | U64) -> list[tuple[Holder, Found]]:
        """Return for each holder of a space, but for stale sources, its counts of the prompt's leading blocks.

        They end where the prefix does: of an engine's rank and group at the first block that it has not, of a store at
        the first that none of its hosts has. 0 is a block that the holder has not; for others see ``prefixes``.

        O(blocks of the prefixes x holders). A holder without the first block costs one search.
        """
        with self.lock:
            self._flush()
            units: dict[str | int, list[Holder]] = {}
            for holder in self.spaces.get(space, {}).values():
                if not holder.source.stale:
                    units.setdefault(holder.unit, []).append(holder)
            ids = [[each.id for each in unit] for unit in units.values()]
            found = self._places.leading(self._held, ids, np.asarray(keys, np.uint64))
            return [pair for unit, parts in zip(units.values(), found) for pair in zip(unit, parts)]
