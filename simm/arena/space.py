"""Room for values: allocate chunks, and evict entries to make room.

An allocated chunk is in one of four states. *Published*: it belongs to a slot of the table, and may be evicted.
*Granted*: it belongs to no slot, as a client is still writing into it. *Held*: a reader without a seqlock uses it (a
view, or bytes on their way into a socket), or a dead client may still write into it. *Detached*: its slot is gone while
it is held; the last unhold frees it. Only a published chunk that is not held is ever evicted.

`Space.allocate` asks the allocator first. If that has no room, it evicts through the owner's callback, without locks:
near copies of the size class (`simm.arena.marks`), and else

1. *The coldest*: the group's own next victim or what another group can give, whichever is older
   (`simm.arena.coldest`). Another group gives a whole slab or, for a large value, a window.
2. *A window*: an address range of the bytes needed (for a new slab: an aligned 2 MiB) in which everything can be
   evicted, as a large value needs neighbours that are free together. It is sought around *anchors*: the oldest large
   values, and the coldest slab of each class. Of the windows older than the own victim, the one that loses least goes,
   in bytes per age. A slab in it goes as a whole.
3. *A window around any victim*, if the group has nothing to give and the coldest slabs are fenced. What is examined
   around these anchors for one call is bounded, and what was fenced in is remembered for a 256th of the region.
4. *Any window.* If pins and grants fence all those, the group's entries are searched, then the region, a part at a
   time: each search goes on where the last one ended (`Windows.search`). So a PUT fails only if its value is larger
   than the region, or what it needs is held, granted or hard kept in all that one search examines. If that is so in
   all of the region, it is remembered until something is published, released or unheld. What is soft kept goes only
   here (`simm.arena.marks`).

The first three spare what was just put (`simm.arena.queues`), so that a prompt just put is whole. Where they end early,
a part of the region is searched for what spares it too. If all that is older is fenced in, by pins, grants or by what
is fresh, they are done again without sparing anything, and for a 256th of the region at once: else in vain each time.

The own victims of a batch go together, and their chunks are granted again without having been free. The entries of a
slab go together too, and its chunks are freed as one. Any other entry takes a callback, which re-enters only `release`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simm.arena.coldest import NEVER, USED_MAX, Coldest, Windows, coarse, may_go
from simm.arena.events.victims import LAST_RESORT, NEAR, OWN, REASSIGNED, WINDOW, Ghosts, Victims
from simm.arena.eviction import change, make_policy
from simm.arena.marks.kept import KEPT_GROUPS, KeptEntries, Shares
from simm.arena.queues import FRESH_PERIODS, KeyWords, Policy
from simm.arena.rebuild import Begun, evict_slab, free_all, groups_of, reserve_all
from simm.constants import BATCH_KEYS_MAX, KEEP_SHARES, NO_SLOT, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.errors import CorruptionError, UsageError
from simm.slab import (
    ALIGN_SHIFT,
    CHUNK_SIZES,
    GROUPS,
    LARGE_GROUP,
    SLAB,
    SLOTS_MAX,
    Allocator,
    Span,
    chunk_bytes_for,
    class_of,
)

#: By group: the size of its chunks on the policy's clock; 0 for large values, which have any.
_WEIGHTS: Final = (*(size >> ALIGN_SHIFT for size in CHUNK_SIZES), 0)
_NOTHING_HELD: Final = frozenset[int]().__contains__
#: Steps of `Space.spare` for one batch, as long as each makes room for it: some milliseconds.
SPARE_STEPS: Final = 16
#: A request evicts no more once so many entries wait, or were dropped, with what it has: a quarter of a second's work.
#: Each evicted one adds 63 at most. So there are parts of so many while there are groups.
ORPHANS_MAX: Final = 1 << 16
PART_WITH_GROUPS: Final = 512


class Space:
    """The data region of one arena: ``size`` bytes of chunks for the entries of a table of ``slots`` slots.

    ``visited`` has a byte per slot (see `simm.arena.eviction`). ``evict(slot)`` must remove the entry from the table,
    and call `release` for its chunk, before it returns. ``evict_many(slots, offsets)`` must remove many entries, and
    leave their chunks, which are granted or freed next; without it they are evicted one by one. Offsets are bytes from
    the region's start. A call that contradicts the state raises `CorruptionError` and changes nothing.
    """

    def __init__(
        self, size: int, slots: int, visited: memoryview, policy_name: str, evict: Callable[[int], None],
        keys: KeyWords | None = None, evict_many: Callable[[list[int], list[int]], None] | None = None,
        shares: Shares = KEEP_SHARES,
    ) -> None:  # fmt: skip
        if slots > SLOTS_MAX:
            raise UsageError(f"{slots} slots are more than {SLOTS_MAX}")
        self._allocator = Allocator(size)
        #: Returns the bytes of the allocated chunk at an offset. O(1). `CorruptionError` if there is none.
        self.chunk_bytes = self._allocator.chunk_bytes
        #: Marks the chunk at an offset, of so many bytes, allocated as if granted: recovery publishes or holds it then.
        self.reserve = self._allocator.reserve
        #: A 64th of the region, on the policy's clock, which counts what is put in units of 64 bytes.
        self._period: Final = size // (2 * FRESH_PERIODS) >> ALIGN_SHIFT
        self._policy: Policy = make_policy(policy_name, slots, KEPT_GROUPS, visited, self._period, keys)
        self.policy_name = policy_name
        #: Until this clock no search spares what is fresh, as one found nothing.
        self._crowded_until = 0
        self._evict, self._evict_many = evict, evict_many
        #: Offset of each slot's chunk, or -1.
        self._offsets = array("q", [-1]) * slots
        #: Held chunks: offset -> number of holds.
        self._holds: dict[int, int] = {}
        #: Held chunks without a slot, freed at their last unhold.
        self._detached: set[int] = set()
        self._coldest = Coldest(self._allocator, self._policy, lambda at: self._evictable(self._allocator.span_at(at)))
        evictable = lambda span: self._evictable(span)  # noqa: E731
        self._windows = Windows(
            self._allocator, self._policy, self._coldest, evictable, self._offsets, lambda slot: self._is_held(slot)
        )
        #: Per slab class: an own victim with this since, or an earlier one, is no younger than what other groups give.
        self._bounds = [-1] * GROUPS
        #: The same for large values, by the bits of their size.
        self._large_bounds: dict[int, int] = {}
        #: The clock from which on the bounds are not true, as something is no longer fresh: a slab, or any of these
        #: and what may fence in a window of large values.
        self._wakes = NEVER
        self._look_again = NEVER
        #: No window of large values for a slab class has an earlier since than this.
        self._large_bound = 0
        #: True while the `evict` callback runs.
        self.evicting = False
        #: Bytes of the region searched in vain, by chunk size; cleared when there may be room.
        self._known_full: dict[int, int] = {}
        room = self._known_full.clear
        self.kept = KeptEntries(self._allocator, self._policy, self._offsets, self._is_held, room, shares)
        #: Drops some entries that are of no use, and returns whether there may be more; None if there are none.
        self.spare: Callable[[], bool] | None = None
        #: Tells whether an entry is used by way of others, and is passed over; None: none is.
        self._is_used: Callable[[int], bool] | None = None
        self._heeded: tuple[Callable[[int], bool], Callable[[int], None]] | None = None
        #: Returns how many entries wait to be dropped with what was evicted; None: evictions make none wait.
        self.waiting: Callable[[], int] | None = None
        #: How many of them the request under way has had dropped before this allocation.
        self.gone = 0
        #: Whether the last allocation ended early as those are too many. The next request goes on.
        self.cut_short = False
        self._begun = Begun(self._allocator, self._policy, self._holds)
        #: Entries evicted so far, by reason.
        self.victims = Victims(Ghosts(slots, keys) if keys is not None else None)
        self.evictions = self.victims.by_reason
        #: Returns the bytes of the largest free piece that is in no slab.
        self.largest_free: Callable[[], int] = lambda: sum(span.size for span in self._allocator.largest_free(1))

    # ---- a chunk's life

    def allocate(self, n: int) -> int:
        """Return the offset of a fresh chunk for ``n`` bytes, granted to the caller. Evict as needed.

        Return -1 only if it was `cut_short`, the value is larger than the region, or all room that was searched is
        held, granted or hard kept; then later calls go on. `UsageError` below 1 byte. Amortised O(1) for a slab class.
        """
        self.cut_short = False
        offset = self._allocator.alloc(n)
        if offset >= 0:
            return offset
        if self.waiting is not None and self._is_cut():
            return -1
        if self.spare is not None:
            self.spare = self.spare if self.spare() else None  # a step: it may lie in slabs of all classes
            if (offset := self._allocator.alloc(n)) >= 0:
                return offset
        return self._allocate_evicting(n)

    def _allocate_evicting(self, n: int) -> int:
        """Do `allocate` for what finds no free room."""
        if self.kept.near and (offset := self.kept.instead_of_near(n, self._evict_slot)) >= 0:
            return offset
        # The usual case in a full region: evict the class's own victim, and reuse its chunk.
        if n <= SLAB_CHUNK_BYTES_MAX:
            group = class_of(n)
            slot = self._policy.victim(group, self._is_held)
            if slot >= 0 and self._policy.since(slot) <= self._bounds[group] and self._policy.clock < self._wakes:
                self._evict_slot(slot, OWN)
                offset = self._allocator.alloc(n)
                if offset >= 0:
                    return offset
        return self._make_room(n)

    def allocate_many(self, n: int, count: int) -> list[int]:
        """Return up to ``count`` chunks, as `allocate` does; fewer where it would return -1, or if `cut_short`."""
        self.cut_short = False
        if count < 2:
            return [offset for _ in range(count) if (offset := self.allocate(n)) >= 0]
        offsets = self._allocator.alloc_many(n, count)
        steps = SPARE_STEPS
        while len(offsets) < count and self.spare is not None and steps and not self._is_cut():
            self.spare = self.spare if self.spare() else None
            made = self._allocator.alloc_many(n, count - len(offsets))
            offsets += made
            steps = steps - 1 if made else 0
        while len(offsets) < count and not self._is_cut():
            if n <= SLAB_CHUNK_BYTES_MAX and class_of(n) not in self.kept.near:
                self._reuse_own(n, offsets, count)
            if len(offsets) == count or (offset := self._allocate_evicting(n)) < 0:
                break
            offsets.append(offset)
            offsets += self._allocator.alloc_many(n, count - len(offsets))
        return offsets

    def _reuse_own(self, n: int, offsets: list[int], count: int) -> None:
        """Evict own victims and hand their chunks on, until there are ``count``, or other groups must be looked at."""
        group, policy, chunks = class_of(n), self._policy, self._offsets
        if self._evict_many is None or policy.clock >= self._wakes:
            return
        rejected = self._is_held if self._holds or self._is_used else _NOTHING_HELD
        most = count - len(offsets) if self.waiting is None else min(count - len(offsets), PART_WITH_GROUPS)
        slots = policy.take_victims(group, rejected, most, self._bounds[group])
        if not slots:
            return
        found = [chunks[slot] for slot in slots]
        self.victims.many(slots, CHUNK_SIZES[group])
        self._evict_many(slots, found)
        self._allocator.disown(found, slots)
        for slot in slots:
            chunks[slot] = -1
        offsets += found

    def publish(self, offset: int, slot: int) -> None:
        """Assign the granted chunk at ``offset`` to ``slot``, which has none. O(1)."""
        if not (0 <= slot < len(self._offsets) and self._offsets[slot] < 0):
            raise CorruptionError(f"slot {slot} is unknown or has a chunk already")
        if offset in self._detached:
            raise CorruptionError(f"chunk at {offset} is detached")
        group = self._allocator.set_owner(offset, slot)
        self._offsets[slot] = offset
        self._policy.insert(slot, group, _WEIGHTS[group] or self._weight(slot))
        if self._known_full:
            self._known_full.clear()

    def publish_many(self, chunks: Iterable[tuple[int, int]]) -> None:
        """Do `publish` for many: (offset, slot) each, in order. If one is refused, those before it are published."""
        offsets, detached, set_owner = self._offsets, self._detached, self._allocator.set_owner
        most = len(offsets)
        fresh: list[int] = []
        last = -1
        weight = 0
        try:
            for offset, slot in chunks:
                if not (0 <= slot < most and offsets[slot] < 0):
                    raise CorruptionError(f"slot {slot} is unknown or has a chunk already")
                if offset in detached:
                    raise CorruptionError(f"chunk at {offset} is detached")
                group = set_owner(offset, slot)
                offsets[slot] = offset
                if group != last or not weight:
                    if fresh:
                        self._policy.insert_many(fresh, last, weight or self._weight(fresh[0]))
                        fresh = []
                    last, weight = group, _WEIGHTS[group]
                fresh.append(slot)
        finally:
            if fresh:
                self._policy.insert_many(fresh, last, weight or self._weight(fresh[0]))
            self._known_full.clear()

    def replace(self, old: int, new: int, slot: int) -> None:
        """Move ``slot`` from its chunk ``old`` to the granted chunk ``new``, and release ``old``. O(1)."""
        allocator = self._allocator
        if not (0 <= slot < len(self._offsets) and self._offsets[slot] == old >= 0):
            raise CorruptionError(f"slot {slot} does not have the chunk at {old}")
        if old == new or new in self._detached:
            raise CorruptionError(f"chunk at {new} is the slot's own already, or detached")
        policy = self._policy
        group = allocator.set_owner(new, slot)
        self._offsets[slot] = new
        weight = _WEIGHTS[group] or self._weight(slot)
        if policy.group_of(slot) == group:
            policy.replaced(slot, weight)
        else:
            policy.remove(slot)
            policy.insert(slot, group, weight)
        if slot in self.kept.entries:
            self.kept.replaced(slot)
        if old in self._holds:
            self._free_or_detach(old)
            return
        allocator.free(old)
        self._note_removed(old)
        if self._known_full:
            self._known_full.clear()

    def release(self, offset: int) -> None:
        """Free an entry's chunk, or detach it while it is held. O(1)."""
        if offset in self._holds:
            if offset in self._detached:
                raise CorruptionError(f"chunk at {offset} is released twice")
            slot = self._free_or_detach(offset)
        else:
            slot = self._allocator.free(offset)
            if not self.evicting:
                self._note_removed(offset)
            if self._known_full:
                self._known_full.clear()
        if slot != NO_SLOT:
            if slot in self.kept.entries:
                self.kept.gone(slot)
            self._offsets[slot] = -1
            self._policy.remove(slot)

    def release_many(self, slots: list[int], offsets: list[int]) -> None:
        """Do `release` for many entries, none of them held. O(1) each."""
        for base, count in free_all(self._allocator, self._offsets, slots, offsets).items():
            self._note_removed(base, count)
        self.kept.gone_many(slots)

    def drop(self, offset: int) -> None:
        """Free an unused granted chunk, or detach it while it is held. O(1)."""
        owner = self._allocator.owner(offset)
        if owner != NO_SLOT or offset in self._detached:
            raise CorruptionError(f"chunk at {offset} is not granted: it is detached or belongs to slot {owner}")
        self._free_or_detach(offset)

    def hold(self, *offsets: int, known: bool = False) -> None:
        """Keep chunks allocated (now they are, if ``known``), and their entries from eviction, until the `unhold`."""
        holds = self._holds
        for offset in () if known else offsets:
            if offset not in holds:
                self._allocator.owner(offset)  # raises if no chunk is allocated there
        for offset in offsets:
            holds[offset] = holds.get(offset, 0) + 1

    def unhold(self, *offsets: int) -> None:
        """Undo one `hold` of each. The last one frees a detached chunk. O(offsets)."""
        holds = self._holds
        for offset in offsets:
            count = holds.pop(offset, 0)
            if not count:
                raise CorruptionError(f"chunk at {offset} is not held")
            if count > 1:
                holds[offset] = count - 1
            elif offset in self._detached:
                self._detached.remove(offset)
                self._allocator.free(offset)
        self._known_full.clear()

    def restore(
        self, slots: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> list[tuple[int, str]]:
        """Do `reserve` and `publish` for recovered entries, the oldest first. Return (slot, reason) of those refused.

        The slots are distinct and without a chunk. O(n log n), by numpy but for large values.
        """
        done, refused = reserve_all(self._allocator, slots, offsets, sizes)
        np.frombuffer(self._offsets, np.int64)[slots[done]] = offsets[done]
        self._policy.insert_all(slots[done], groups_of(sizes[done]), sizes[done] >> ALIGN_SHIFT)
        self._known_full.clear()
        return refused

    def end_recovery(self) -> None:
        """Do what the first request would have to do else: free lists, and an order of the slabs. O(n log n)."""
        self._allocator.end_recovery()
        self._coldest.take_in()

    def _free_or_detach(self, offset: int) -> int:
        """Free a chunk, or detach it if it is held. Return its owner."""
        self._known_full.clear()
        if offset not in self._holds:
            return self._allocator.free(offset)
        slot = self._allocator.owner(offset)
        self._allocator.set_owner(offset, NO_SLOT)
        self._detached.add(offset)
        return slot

    def _note_removed(self, offset: int, count: int = 1) -> None:
        """Note entries removed without eviction in a slab: the rest of its slab may be colder than the bounds say."""
        if self._allocator.class_of_slab(offset) < 0:
            self._large_bound = 0
        elif not self._coldest.lost(offset & -SLAB_BYTES, count):
            return
        self._forget_bounds()

    def _forget_bounds(self) -> None:
        """Let each group look at the others again when it evicts next."""
        self._bounds = [-1] * GROUPS
        self._large_bounds.clear()
        self._wakes = self._look_again = NEVER

    # ---- inspection

    @property
    def free_bytes(self) -> int:
        """Return the bytes free without an eviction (not necessarily in one piece, or for every class)."""
        return self._allocator.free_bytes

    def offset(self, slot: int) -> int:
        """Return the offset of the slot's chunk, -1 without one. O(1)."""
        return self._offsets[slot]

    def offsets(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return a copy of the offsets of these slots' chunks, -1 without one. O(``stop - start``), by numpy."""
        found: NDArray[np.int64] = np.frombuffer(self._offsets, np.int64, stop - start, 8 * start).copy()
        return found

    def offsets_of(self, slots: NDArray[np.intp]) -> NDArray[np.int64]:
        """Do `offset` for many."""
        return np.frombuffer(self._offsets, np.int64).take(slots)

    def is_held(self, offset: int) -> bool:
        """Return True if the chunk at ``offset`` is held. O(1)."""
        return offset in self._holds

    # ---- making room

    def _make_room(self, n: int) -> int:
        """Evict for a value of ``n`` bytes, and allocate it. Return -1 if nothing may be evicted."""
        need, size = chunk_bytes_for(n), self._allocator.size
        if need > size or self._known_full.get(need, 0) >= size or not self._evict_for(class_of(n), need):
            return -1
        offset = self._allocator.alloc(n)
        if offset < 0 and not self.cut_short:
            raise CorruptionError(f"evicted for {n} bytes, but there is no room for them")
        return offset

    def _evict_for(self, group: int, need: int) -> bool:
        """Evict what is not fresh; if all of that is fenced in, anything. Return False if nothing may be evicted."""
        policy = self._policy
        if (rest := self._begun.take(group, need, self.kept.fences)) is not None:
            self._evict_spans((rest,), REASSIGNED)
            return True
        self._windows.begin()
        if policy.clock >= self._crowded_until:
            if self._evict_coldest(group, need) or self._evict_around_any(need):
                return True
            if not self._windows.exhausted:
                self._crowded_until = policy.clock + self._period // 4
            elif window := self._windows.search(need)[0]:  # if there is none, the next call goes on with both
                self._evict_spans(window, WINDOW)
                return True
        self._windows.begin()  # else fresh values would evict each other where what spares them has examined much
        policy.sparing = False
        self._bounds[group] = -1
        self._large_bounds.clear()
        try:
            return self._evict_coldest(group, need) or self._evict_around_any(need) or self._evict_anywhere(group, need)
        finally:
            policy.sparing = True

    def heed(self, is_used: Callable[[int], bool], on_use: Callable[[int], None]) -> None:
        """Pass over entries that are used by way of others, if uses mean something to the policy; tell ``on_use``."""
        self._heeded = is_used, on_use
        self._is_used, self._policy.on_use = self._heeded if self._policy.HEEDS_USES else (None, None)

    def change_policy(self, name: str) -> Callable[[int], bool]:
        """Evict by another policy from now on. Return its `settle`, to be called until it returns False. O(groups)."""
        change(self._policy, name)
        self.policy_name = name
        if self._heeded is not None:
            self.heed(*self._heeded)
        self._large_bound = 0
        self._forget_bounds()
        return self._policy.settle

    def _weight(self, slot: int) -> int:
        """Return the size of the slot's chunk, on the policy's clock."""
        return self._allocator.chunk_bytes(self._offsets[slot]) >> ALIGN_SHIFT

    def _is_held(self, slot: int) -> bool:
        return self._offsets[slot] in self._holds or (self._is_used is not None and self._is_used(slot))

    def _evict_slot(self, slot: int, reason: str = NEAR) -> None:
        self.victims.one(slot, reason, self._allocator.chunk_bytes(self._offsets[slot]))
        self.evicting = True
        self._evict(slot)
        self.evicting = False
        if self._offsets[slot] >= 0:
            raise CorruptionError(f"slot {slot} was evicted, but its chunk not released")

    def _is_cut(self) -> bool:
        """Return True, and forget what was found out, if too many entries wait to be dropped with what is evicted."""
        if self.waiting is not None and self.waiting() + self.gone >= ORPHANS_MAX:
            self.cut_short, self._large_bound = True, 0
            self._forget_bounds()
            return True
        return False

    def _evict_spans(self, spans: Iterable[Span], reason: str) -> None:
        """Evict all entries in evictable spans, those of a slab together, and free the slabs. O(entries)."""
        for span in spans:
            if self._is_cut():
                return
            if span.kind == SLAB and self._evict_many is not None:
                self._evict_slab(span, reason, self._evict_many)
                continue
            for slot in self._windows.slots((span,)):
                self._evict_slot(slot, reason)

    def _evict_slab(self, slab: Span, reason: str, evict_many: Callable[[list[int], list[int]], None]) -> None:
        """Evict a slab's entries in parts, as one request may: the ring of events takes no more, and readers wait."""

        def evict(slots: list[int], offsets: list[int]) -> None:
            self.victims.many(slots, CHUNK_SIZES[slab.detail], reason)
            evict_many(slots, offsets)
            self.kept.gone_many(slots)

        most = BATCH_KEYS_MAX if self.waiting is None else PART_WITH_GROUPS
        evict_slab(self._allocator, self._offsets, slab.offset, evict, most, self._is_cut)
        self._begun.evicted(slab, self._period if self.cut_short else 0)

    def _evict_coldest(self, group: int, need: int) -> bool:
        """Evict the group's next victim, or what another group can give if that is older."""
        policy = self._policy
        if policy.clock >= self._wakes:
            self._forget_bounds()
        own = policy.victim(group, self._is_held)
        if group == LARGE_GROUP:
            return self._evict_for_large(own, need)
        limit = policy.since(own) if own >= 0 else NEVER
        if limit > self._bounds[group]:
            limit, base = self._coldest.find(group, limit)
            window = self._large_offer(need, limit)
            if not window and base >= 0:
                window = [self._allocator.span_at(base)]
            if window:
                self._evict_spans(window, REASSIGNED if own >= 0 else WINDOW)
                return True
            self._bounds[group] = coarse(min(self._coldest.bound(group), self._large_bound), policy.clock)
            self._wakes = min(self._look_again, self._coldest.wakes)
        if own >= 0:
            self._evict_slot(own, OWN)
        return own >= 0

    def _large_offer(self, need: int, limit: int) -> list[Span]:
        """Return what to evict for the coldest 2 MiB around the oldest large values, if colder than ``limit``."""
        if self._large_bound >= limit:
            return []
        _, window, self._large_bound = self._coldest_window(LARGE_GROUP, need, limit)
        return window

    def _evict_for_large(self, own: int, need: int) -> bool:
        """Do `_evict_coldest` for a large value, which may need several neighbours."""
        policy, allocator, size = self._policy, self._allocator, need.bit_length()
        if own >= 0 and allocator.chunk_bytes(self._offsets[own]) >= need:
            limit, window = policy.since(own), [allocator.span_at(self._offsets[own])]
            if limit <= self._large_bounds.get(size, -1):
                self._evict_slot(own, OWN)
                return True
        else:
            limit, window, _ = self._coldest_window(LARGE_GROUP, need, NEVER)
        reason = OWN
        offers = [allocator.span_at(base) for _, base in self._coldest.each(LARGE_GROUP, limit)]
        if other := self._windows.around_coldest(offers, need, limit):
            window, reason = other, REASSIGNED if own >= 0 else WINDOW
        else:
            bound = limit if offers else self._coldest.bound(LARGE_GROUP)
            self._wakes = min(self._look_again, self._coldest.wakes)
            self._large_bounds[size] = coarse(min(bound, policy.clock), policy.clock)
        self._evict_spans(window, reason)
        return bool(window)

    def _evict_around_any(self, need: int) -> bool:
        """Evict the cheapest window around a victim of any group, the oldest victim first."""
        policy, windows = self._policy, self._windows
        if not windows.may_have(need):
            return False
        victims = [(policy.victim(group, self._is_held), group) for group in policy.groups() if group < GROUPS]
        for _, group in sorted((policy.since(slot), group) for slot, group in victims if slot >= 0):
            _, window, _ = self._coldest_window(group, need, NEVER)
            if window:
                self._evict_spans(window, WINDOW)
                return True
            if windows.exhausted:
                break
        windows.note_none(need)
        return False

    def _coldest_window(self, group: int, need: int, limit: int) -> tuple[int, list[Span], int]:
        """Return the coldest window around the group's oldest entries: (its since, its spans, a bound for all others).

        See `Windows.around_oldest`. What is fenced in now is looked at again later.
        """
        first = self._policy.victim(group, self._is_held)
        since, window, bound, again = self._windows.around_oldest(first, group, need, limit)
        self._look_again = min(self._look_again, again)
        return since, window, bound

    def _evict_anywhere(self, group: int, need: int) -> bool:
        """Evict any entry of the same slab class, or else the first window in the region: the last resort."""
        if group != LARGE_GROUP:
            some = islice(self._policy.slots(group), len(self._holds) + USED_MAX)
            slot = next((slot for slot in some if not self._is_held(slot)), -1)
            if slot >= 0 or (slot := self.kept.victim(group, self._is_held)) >= 0:
                self._evict_slot(slot, LAST_RESORT)
                return True
        window, examined = self._windows.search(need)
        if window is None:
            with self.kept.soft_too() as any_more:
                window, examined = self._windows.search(need, soft=True) if any_more else (None, examined)
        if window is None:
            self._known_full[need] = self._known_full.get(need, 0) + examined
        self._evict_spans(window or (), LAST_RESORT)
        return window is not None

    def _evictable(self, span: Span) -> bool:
        """Return True if everything in ``span`` is free, or published, neither held nor fresh."""
        return not self.kept.fences(span) and may_go(span, self._allocator, self._policy, self._holds)
