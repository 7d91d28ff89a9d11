"""Room for values: allocator and eviction policy joined, and the rules by which one makes way for the other.

Four things can be said of an allocated chunk. It is *published*: it belongs to a slot of the table and may be
evicted. It is *granted*: it belongs to no slot, because a client is still writing into it. It is *held*:
somebody reads it without a seqlock (a view, bytes on their way into a socket), or a dead client may still
write into it. It is an *orphan*: its slot is gone, but it is held; it becomes free at the last unhold. Only
a published chunk that is not held is ever evicted.

Making room
-----------
`Space.allocate` asks the allocator first. When that has no room, entries go, right here and now, through the
owner's callback:

1. *Balance.* From time to time the group's own next victim is compared with those of the other groups; where
   another's is more than `COLDER` times as old, that group gives up room: a whole slab, evicted and
   reassigned. "As old" is `Policy.age`; the factor is hysteresis, without which two groups of equal heat
   would pass slabs to and fro. The neighbours of the victim in its slab must be as cold, by their median: one
   cold entry in a hot slab is no reason to evict the rest. The comparison costs microseconds, so it comes
   once per quarter of a slab evicted, which still lets a class that has become hot take over the region as
   fast as it is written.
2. *The group's own victim.* For a slab class any chunk is as good as any other, so that is the common case
   and ends here. A large value needs neighbours that are free together, so there the victim is an *anchor*.
3. *A window around an anchor.* A window is an address range of the bytes needed (for a new slab: an aligned
   2 MiB) in which everything can be evicted. Of those in reach of the anchor's span, the one is taken in
   which least is lost, in bytes per age. A slab in it goes as a whole. The anchors are the victims of all
   groups, oldest first.
4. *Any window.* Where pins and grants fence all those windows in, all of the group's entries, and then all of
   the region in address order, are searched. Only if there is nothing the answer is -1: so a PUT fails only
   if its value is larger than the region, or what it needs is held or granted. That search costs
   O(region's chunks); that it ended in vain is remembered until something is published, released or unheld.

Worst cases: evicting a slab takes one callback per entry in it, 512 for 4 KiB; the callback costs a few
microseconds, so one PUT in many waits for a millisecond or two. A value of 64 MiB that displaces slabs of
4 KiB entries evicts 16,384 of them.

All of it is private to the worker and has no locks. The callback re-enters `release`, and nothing else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Final

from simm.constants import NO_SLOT, SLAB_BYTES
from simm.constants import SLAB_CHUNK_BYTES_MAX as _SMALL_MAX
from simm.errors import CorruptionError, UsageError
from simm.evict import Policy, make_policy
from simm.sizes import CHUNK_SIZES, CHUNKS_PER_SLAB, GROUPS, LARGE_GROUP, chunk_bytes_for, class_of
from simm.slab import FREE, LARGE, SLAB, SLOTS_MAX, Allocator, ClassStats, Span

#: How many times as old another group's victim must be for that group to give up room.
COLDER: Final = 2
#: Victims of one group that are tried as anchors of a window.
ANCHORS_MAX: Final = 4
#: Entries of a slab whose ages stand for the whole slab's.
SAMPLES: Final = 8
#: Own evictions between two comparisons with the other groups, at most.
PERIOD_MAX: Final = 64

#: Why an entry was evicted: the keys of Space.evictions.
OWN, REASSIGNED, WINDOW, LAST_RESORT = "own", "reassigned", "window", "last_resort"

# Adjoining spans that can all be evicted: their starts, the end of the last, the sums of the costs before each.
_Run = tuple[list[int], int, list[float]]


class Space:
    """The data region of one arena: ``size`` bytes of chunks for the entries of a table of ``slots`` slots.

    ``visited`` has a byte per slot (see `simm.evict`). ``evict(slot)`` must take the entry out of the table
    and call `release` for its chunk before it returns. Offsets are bytes from the region's start.
    `CorruptionError` where a call contradicts what the space knows; nothing has changed then.
    """

    def __init__(
        self, size: int, slots: int, visited: memoryview, policy_name: str, evict: Callable[[int], None]
    ) -> None:
        if slots > SLOTS_MAX:
            raise UsageError(f"{slots} slots are more than {SLOTS_MAX}")
        self._allocator = Allocator(size)
        self._policy: Policy = make_policy(policy_name, slots, GROUPS, visited)
        self._evict = evict
        #: Offset of each slot's chunk, or -1.
        self._offsets = array("q", [-1]) * slots
        #: Held chunks: offset -> number of holds.
        self._holds: dict[int, int] = {}
        #: Held chunks that go free at their last unhold.
        self._orphans: set[int] = set()
        #: Own evictions of each group until its next comparison with the others.
        self._due = [0] * GROUPS
        #: Chunk sizes for which the last search found nothing, until something changes for the better.
        self._hopeless: set[int] = set()
        #: Entries evicted so far, by reason.
        self.evictions = {OWN: 0, REASSIGNED: 0, WINDOW: 0, LAST_RESORT: 0}

    # ---- a chunk's life

    def allocate(self, n: int) -> int:
        """Offset of a fresh chunk for ``n`` bytes, granted to the caller; evicts as needed.

        -1 only where the value is larger than the region, or all room that could be its is held or granted.
        `UsageError` below 1 byte. Amortised O(1) for a slab class; see the module's text.
        """
        offset = self._allocator.alloc(n)
        if offset >= 0:
            return offset
        # A full region's usual case, spelt out: the class's own victim, and its chunk is the new one.
        if n <= _SMALL_MAX:
            group = class_of(n)
            if self._due[group] > 0:
                slot = self._policy.victim(group, self._is_held)
                if slot >= 0:
                    self._due[group] -= 1
                    self._evict_slot(slot, OWN)
                    offset = self._allocator.alloc(n)
                    if offset >= 0:
                        return offset
        return self._make_room(n)

    def allocate_many(self, n: int, count: int) -> list[int]:
        """Up to ``count`` chunks, as `allocate` gives them; fewer where it would say -1."""
        if count < 2:
            offset = self.allocate(n) if count == 1 else -1
            return [offset] if offset >= 0 else []
        offsets = self._allocator.alloc_many(n, count)
        while len(offsets) < count:
            offset = self.allocate(n)
            if offset < 0:
                break
            offsets.append(offset)
        return offsets

    def publish(self, offset: int, slot: int) -> None:
        """The granted chunk at ``offset`` now belongs to ``slot``, which has none. O(1)."""
        if not (0 <= slot < len(self._offsets) and self._offsets[slot] < 0):
            raise CorruptionError(f"slot {slot} is unknown or has a chunk already")
        if offset in self._orphans:
            raise CorruptionError(f"chunk at {offset} is an orphan")
        group = self._allocator.set_owner(offset, slot)
        self._offsets[slot] = offset
        self._policy.insert(slot, group)
        if self._hopeless:
            self._hopeless.clear()

    def publish_many(self, chunks: Iterable[tuple[int, int]]) -> None:
        """`publish` for many: (offset, slot) each, in that order. Where one is refused, those before it are published.

        1.0 us each in batches of 16, where `publish` takes 1.3 (CPython 3.11, EPYC 2.6 GHz).
        """
        offsets, orphans, set_owner = self._offsets, self._orphans, self._allocator.set_owner
        most = len(offsets)
        fresh: list[int] = []
        last = -1
        try:
            for offset, slot in chunks:
                if not (0 <= slot < most and offsets[slot] < 0):
                    raise CorruptionError(f"slot {slot} is unknown or has a chunk already")
                if offset in orphans:
                    raise CorruptionError(f"chunk at {offset} is an orphan")
                group = set_owner(offset, slot)
                offsets[slot] = offset
                if group != last:
                    if fresh:
                        self._policy.insert_many(fresh, last)
                        fresh = []
                    last = group
                fresh.append(slot)
        finally:
            if fresh:
                self._policy.insert_many(fresh, last)
            if self._hopeless:
                self._hopeless.clear()

    def replace(self, old: int, new: int, slot: int) -> None:
        """``slot`` passes from its chunk ``old`` to the granted chunk ``new``; ``old`` is released. O(1)."""
        allocator = self._allocator
        if not (0 <= slot < len(self._offsets) and self._offsets[slot] == old >= 0):
            raise CorruptionError(f"slot {slot} does not have the chunk at {old}")
        if old == new or new in self._orphans:
            raise CorruptionError(f"chunk at {new} is the slot's own already, or an orphan")
        policy = self._policy
        group = allocator.set_owner(new, slot)
        self._offsets[slot] = new
        if policy.group_of(slot) == group:
            policy.replaced(slot)
        else:
            policy.remove(slot)
            policy.insert(slot, group)
        if old in self._holds:
            self._let_go(old)
            return
        allocator.free(old)
        if self._hopeless:
            self._hopeless.clear()

    def release(self, offset: int) -> None:
        """The chunk at ``offset`` is no longer any entry's: it goes free, or is an orphan while held. O(1)."""
        if offset in self._holds:
            if offset in self._orphans:
                raise CorruptionError(f"chunk at {offset} is released twice")
            slot = self._let_go(offset)
        else:
            slot = self._allocator.free(offset)
            if self._hopeless:
                self._hopeless.clear()
        if slot != NO_SLOT:
            self._offsets[slot] = -1
            self._policy.remove(slot)

    def drop(self, offset: int) -> None:
        """The granted chunk at ``offset`` goes back unused: free, or an orphan while held. O(1)."""
        owner = self._allocator.owner(offset)
        if owner != NO_SLOT or offset in self._orphans:
            raise CorruptionError(f"chunk at {offset} is not granted: it is an orphan or belongs to slot {owner}")
        self._let_go(offset)

    def hold(self, offset: int) -> None:
        """Keep the chunk at ``offset`` allocated, and its entry from eviction, until as many `unhold`. O(1)."""
        holds = self._holds
        if offset in holds:
            holds[offset] += 1
        else:
            self._allocator.owner(offset)  # raises if no chunk is allocated there
            holds[offset] = 1

    def unhold(self, offset: int) -> None:
        """Undo one `hold`; the last one frees an orphan. O(1)."""
        count = self._holds.get(offset)
        if count is None:
            raise CorruptionError(f"chunk at {offset} is not held")
        if count > 1:
            self._holds[offset] = count - 1
            return
        del self._holds[offset]
        self._hopeless.clear()
        if offset in self._orphans:
            self._orphans.remove(offset)
            self._allocator.free(offset)

    def reserve(self, offset: int, chunk_bytes: int) -> None:
        """Recovery: the chunk at ``offset`` is allocated, as if granted; then publish or hold it.

        `CorruptionError`, and nothing changed, where it contradicts another. Reserve all before anything is
        freed or allocated: see `Allocator.reserve`.
        """
        self._allocator.reserve(offset, chunk_bytes)

    def _let_go(self, offset: int) -> int:
        """Free a chunk, or make it an orphan if it is held; returns who owned it."""
        self._hopeless.clear()
        if offset not in self._holds:
            return self._allocator.free(offset)
        slot = self._allocator.owner(offset)
        self._allocator.set_owner(offset, NO_SLOT)
        self._orphans.add(offset)
        return slot

    # ---- questions

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self._allocator.size

    @property
    def free_bytes(self) -> int:
        """Bytes that are free without an eviction (not necessarily in one piece or for every class)."""
        return self._allocator.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated chunks: published, granted, held."""
        return self._allocator.used_bytes

    def chunk_bytes(self, offset: int) -> int:
        """Bytes of the allocated chunk at ``offset``. O(1)."""
        return self._allocator.chunk_bytes(offset)

    def owner(self, offset: int) -> int:
        """Slot that the allocated chunk at ``offset`` is published in, or NO_SLOT. O(1)."""
        return self._allocator.owner(offset)

    def offset_of(self, slot: int) -> int:
        """Offset of the chunk of ``slot``, or -1. O(1)."""
        return self._offsets[slot]

    def is_held(self, offset: int) -> bool:
        """Whether the chunk at ``offset`` is held. O(1)."""
        return offset in self._holds

    def age(self, slot: int) -> int:
        """How long the entry in ``slot`` has not been used, in insertions: see `Policy.age`. O(1)."""
        return self._policy.age(slot)

    def stats(self) -> list[ClassStats]:
        """One line per group that has a chunk or a slab. O(classes)."""
        return self._allocator.stats()

    # ---- making room

    def _make_room(self, n: int) -> int:
        """Evict for a value of ``n`` bytes, and allocate it; -1 if there is nothing that may be evicted."""
        need = chunk_bytes_for(n)
        if need > self.size or need in self._hopeless:
            return -1
        group = class_of(n)
        if (
            self._balance(group, need)
            or self._evict_own(group, need)
            or self._evict_around_any(need)
            or self._evict_anywhere(group, need)
        ):
            offset = self._allocator.alloc(n)
            if offset < 0:
                raise CorruptionError(f"evicted for {n} bytes, but they have no room")
            return offset
        self._hopeless.add(need)
        return -1

    def _is_held(self, slot: int) -> bool:
        return self._offsets[slot] in self._holds

    def _evict_slot(self, slot: int, reason: str) -> None:
        self.evictions[reason] += 1
        self._evict(slot)
        if self._offsets[slot] >= 0:
            raise CorruptionError(f"slot {slot} was evicted, but its chunk not released")

    def _balance(self, group: int, need: int) -> bool:
        """Every so often: take room from a group that is much colder than ``group``."""
        if self._due[group] > 0:
            self._due[group] -= 1
            return False
        self._due[group] = min(PERIOD_MAX, SLAB_BYTES // 4 // need)
        policy = self._policy
        own = policy.victim(group, self._is_held)
        limit = COLDER * policy.age(own) if own >= 0 else -1
        ages = [(age, other) for age, other in self._ages() if other != group and age > limit]
        return any(self._evict_around(other, need, REASSIGNED, limit) for _, other in sorted(ages, reverse=True))

    def _ages(self) -> list[tuple[int, int]]:
        """(age of its next victim, group) for every group that has one."""
        policy = self._policy
        victims = [(policy.victim(group, self._is_held), group) for group in policy.groups()]
        return [(policy.age(slot), group) for slot, group in victims if slot >= 0]

    def _evict_own(self, group: int, need: int) -> bool:
        """Evict the group's next victim, and for a large value as many neighbours as it takes."""
        if group == LARGE_GROUP:
            return self._evict_around(group, need, OWN)
        slot = self._policy.victim(group, self._is_held)
        if slot < 0:
            return False
        self._evict_slot(slot, OWN)
        return True

    def _evict_around_any(self, need: int) -> bool:
        """Evict the cheapest window around a victim of any group, the oldest victim's first."""
        return any(self._evict_around(group, need, WINDOW) for _, group in sorted(self._ages(), reverse=True))

    def _evict_around(self, group: int, need: int, reason: str, limit: int = -1) -> bool:
        """Evict the cheapest window around one of the group's next victims, if it is older than ``limit`` by and large.

        An anchor that does not lead to a window is passed over, so that the next call looks further.
        """
        allocator = self._allocator
        offsets = self._offsets
        policy = self._policy
        tried: set[int] = set()

        def rejected(slot: int) -> bool:
            offset = offsets[slot]
            return offset in self._holds or (bool(tried) and allocator.span_of(offset).offset in tried)

        for _ in range(ANCHORS_MAX):
            slot = policy.victim(group, rejected)
            if slot < 0:
                return False
            span = allocator.span_of(offsets[slot])
            if span.kind == LARGE and span.size >= need > _SMALL_MAX and policy.age(slot) > limit:
                self._evict_slot(slot, reason)
                return True
            run = self._run_around(span, need)
            start, cost = self._cheapest(run, need)
            if start >= 0 and cost * (1 + limit) <= _window_bytes(need):
                self._evict_window(run[0][0], start, need, reason)
                return True
            tried.add(span.offset)
        return False

    def _evict_anywhere(self, group: int, need: int) -> bool:
        """The last resort: any entry of the same slab class, or else the first window in the region."""
        if group != LARGE_GROUP:
            for slot in self._policy.slots(group):
                if not self._is_held(slot):
                    self._evict_slot(slot, LAST_RESORT)
                    return True
        begin = 0
        for span in self._allocator.walk():
            end = span.offset + span.size
            if not self._evictable(span):
                begin = end
                continue
            start = begin if need > _SMALL_MAX else -(-begin // SLAB_BYTES) * SLAB_BYTES
            if start + _window_bytes(need) <= end:
                self._evict_window(begin, start, need, LAST_RESORT)
                return True
        return False

    # ---- windows

    def _evictable(self, span: Span) -> bool:
        """Whether everything in ``span`` is free, or published and not held."""
        if span.kind == FREE:
            return True
        holds = self._holds
        if span.kind == LARGE:
            return span.detail != NO_SLOT and span.offset not in holds
        if self._allocator.unowned_of_slab(span.offset):
            return False
        if len(holds) < CHUNKS_PER_SLAB[span.detail]:
            return not any(span.offset <= offset < span.offset + SLAB_BYTES for offset in holds)
        return not any(offset in holds for offset, _ in self._allocator.chunks_of_slab(span.offset))

    def _cost(self, span: Span) -> float:
        """What evicting ``span`` loses: its bytes in use, by their age; a slab's is the median of a sample."""
        if span.kind == FREE:
            return 0.0
        age = self._policy.age
        if span.kind == LARGE:
            return span.size / (1 + age(span.detail))
        owners = [owner for _, owner in self._allocator.chunks_of_slab(span.offset)]
        if not owners:
            return 0.0
        ages = sorted(map(age, owners[:: max(1, len(owners) // SAMPLES)]))
        return len(owners) * CHUNK_SIZES[span.detail] / (1 + ages[len(ages) // 2])

    def _run_around(self, anchor: Span, need: int) -> _Run:
        """The evictable spans around ``anchor``, to either side as far as a window of ``need`` bytes can reach."""
        allocator = self._allocator
        reach = _window_bytes(need)
        if not self._evictable(anchor):
            return [], 0, []
        left: list[Span] = []
        start = anchor.offset
        while start > 0 and start > anchor.offset - reach:
            span = allocator.span_before(start)
            if not self._evictable(span):
                break
            left.append(span)
            start = span.offset
        spans = [*reversed(left), anchor]
        end = anchor.offset + anchor.size
        while end < allocator.size and end < anchor.offset + anchor.size + reach:
            span = allocator.span_at(end)
            if not self._evictable(span):
                break
            spans.append(span)
            end += span.size
        sums = [0.0]
        for span in spans:
            sums.append(sums[-1] + self._cost(span))
        return [span.offset for span in spans], end, sums

    @staticmethod
    def _cheapest(run: _Run, need: int) -> tuple[int, float]:
        """(start, cost) of the window in ``run`` whose spans cost least together; start -1 if there is none."""
        starts, end, sums = run
        if not starts:
            return -1, 0.0
        size = _window_bytes(need)
        windows: list[int] | range = starts  # as good as any: a window from within a span costs that span too
        if need <= _SMALL_MAX:
            windows = range(-(-starts[0] // SLAB_BYTES) * SLAB_BYTES, end, SLAB_BYTES)
        best, best_cost = -1, 0.0
        for start in windows:
            if start + size > end:
                break
            cost = sums[bisect_left(starts, start + size)] - sums[bisect_right(starts, start) - 1]
            if best < 0 or cost < best_cost:
                best, best_cost = start, cost
        return best, best_cost

    def _evict_window(self, boundary: int, start: int, need: int, reason: str) -> None:
        """Evict every span that overlaps the window at ``start``; ``boundary`` is one of a span before it."""
        slots: list[int] = []
        end = start + _window_bytes(need)
        for span in self._allocator.walk(boundary):
            if span.offset >= end:
                break
            if span.offset + span.size <= start:
                continue
            if span.kind == LARGE:
                slots.append(span.detail)
            elif span.kind == SLAB:
                slots.extend(owner for _, owner in self._allocator.chunks_of_slab(span.offset))
        for slot in slots:
            self._evict_slot(slot, reason)

    # ---- self-examination

    def check(self) -> None:
        """Raise `CorruptionError` on the first contradiction within or between the parts. O(chunks + slots)."""
        allocator, policy, offsets = self._allocator, self._policy, self._offsets
        allocator.check()
        policy.check()
        published = 0
        chunks: list[tuple[int, int, int]] = []
        for span in allocator.walk():
            if span.kind == LARGE:
                chunks.append((span.offset, span.detail, LARGE_GROUP))
            elif span.kind == SLAB:
                chunks.extend((offset, slot, span.detail) for offset, slot in allocator.chunks_of_slab(span.offset))
        for offset, slot, group in chunks:
            if slot != NO_SLOT:
                published += 1
                agreed = slot < len(offsets) and offsets[slot] == offset
                _demand(agreed, f"chunk at {offset} and slot {slot} disagree")
                _demand(policy.group_of(slot) == group, f"slot {slot} is in the wrong group")
        known = len(offsets) - offsets.count(-1)
        _demand(published == known, f"{known} slots have a chunk, but {published} chunks a slot")
        queued = sum(policy.count(group) for group in range(GROUPS))
        _demand(published == queued, f"{published} chunks are published, but {queued} slots queued")
        allocated = {offset: slot for offset, slot, _ in chunks}
        for offset, count in self._holds.items():
            _demand(offset in allocated, f"held chunk at {offset} is not allocated")
            _demand(count > 0, f"chunk at {offset} is held {count} times")
        for offset in self._orphans:
            _demand(offset in self._holds, f"orphan at {offset} is not held")
            _demand(allocated[offset] == NO_SLOT, f"orphan at {offset} belongs to a slot")


def _window_bytes(need: int) -> int:
    """Bytes to clear for a chunk of ``need`` bytes: its own, or those of a slab."""
    return need if need > _SMALL_MAX else SLAB_BYTES


def _demand(true: bool, text: str) -> None:
    if not true:
        raise CorruptionError(text)
