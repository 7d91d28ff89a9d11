"""The coldest slab: the order in which size classes give room to each other.

Room moves between size classes in whole slabs, so a class gives up a slab, not its oldest entry. The worth of a slab is
the age of what would be lost with it: `typical` of its entries. At *every* eviction the coldest slab of all other
classes is compared with the own next victim, so that comparison must cost nearly nothing. docs/architecture.md states
the rule and its limits.

All ages grow with the clock, so a slab is described by its *since*: the clock reading at which its age was 0. A use or
a new entry moves it forwards; only a loss of entries moves it backwards. So a since found once is a lower bound from
then on. A heap per class orders the slabs by these bounds, and the caller remembers the lowest bound of all other
classes. If its victim is younger than that, the slab is examined: it gets a new bound and sinks in the heap, or it is
really colder and is evicted. Examining takes a sample of the entries and notes their visits (`Policy.look`), so a class
that is not written to any more does not keep its room forever because its entries were once read.

The remembered bound treats other slabs as a sixteenth younger than they may be (`coarse`): otherwise two classes of
nearly equal ages would examine each other's slabs at every put.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from simm.arena.eviction import Policy
from simm.constants import SLAB_BYTES
from simm.slab import CHUNKS_PER_SLAB, Allocator

#: Entries of a slab that are sampled; all of them if it has fewer than twice as many.
SAMPLES: Final = 32
#: See `coarse`.
COARSE: Final = 16
#: Of a slab's entries, or a window's bytes, 1 / YOUNG may be younger than the alternative.
YOUNG: Final = 16
#: A slab is examined again after it lost 1 / LOSS of its entries to deletes and overwrites.
LOSS: Final = 8
#: Slabs that one call examines.
LOOKS_MAX: Final = 64
#: Later than all clocks.
NEVER: Final = 1 << 63


def typical(ages: list[int]) -> int:
    """Return the age of a non-empty set of entries that are evicted together. Sort the list.

    Fifteen sixteenths are older. So nearly all that is lost is older than the alternative, and one or two entries in
    use do not keep all others. A larger share lost hits of a recorded trace with three sizes; a smaller one keeps a
    slab for a single hot entry.
    """
    ages.sort()
    return ages[len(ages) // YOUNG]


def coarse(since: int, clock: int) -> int:
    """Return ``since`` for an age that is a sixteenth younger: the error bound of the comparison."""
    return since + (clock - since) // COARSE


class Coldest:
    """The slabs of an allocator by the age of their entries. Examining one is O(log slabs)."""

    def __init__(self, allocator: Allocator, policy: Policy, evictable: Callable[[int], bool]) -> None:
        self._allocator = allocator
        self._policy = policy
        #: Returns True if everything in the slab at a base may be evicted.
        self._evictable = evictable
        #: By class: (lower bound of its since, base of the slab).
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        #: The bound of each slab; a heap entry with another one is outdated.
        self._bounds: dict[int, int] = {}
        #: Entries that a slab lost without eviction since it was last examined.
        self._lost: dict[int, int] = {}
        #: The clock when new slabs were last taken in; entries of newer ones are younger.
        self._taken_in = 0
        #: Bounds set since the heaps were last cleaned up.
        self._pushed = 0

    def lost(self, base: int) -> bool:
        """Note an entry lost without eviction in the slab at ``base``. Return True if earlier bounds are void."""
        count = self._lost.get(base, 0) + 1
        group = self._allocator.class_of_slab(base)
        if group < 0 or count * LOSS < CHUNKS_PER_SLAB[group]:
            self._lost[base] = count
            return False
        self._lost[base] = 0
        if base in self._bounds:
            self._set(group, base, 0)
        return True

    def bound(self, group: int) -> int:
        """Return a lower bound of the since of all slabs of other classes, at most the clock. O(classes)."""
        self._take_in()
        bounds = (heap[0][0] for other, heap in self._heaps.items() if other != group and heap)
        return min(bounds, default=self._policy.clock)

    def find(self, group: int, limit: int) -> tuple[int, int]:
        """Return (since, base) of the coldest evictable slab of other classes, or (limit, -1)."""
        self._take_in()
        best = -1
        looks = LOOKS_MAX
        for other in list(self._heaps):
            if other != group:
                since, base, looks = self._coldest_of(other, limit, looks)
                if base >= 0:
                    limit, best = since, base
        return limit, best

    def each(self, group: int, limit: int) -> list[tuple[int, int]]:
        """Return (since, base) of each other class's coldest slab before ``limit``, the coldest first."""
        self._take_in()
        found: list[tuple[int, int]] = []
        looks = LOOKS_MAX
        for other in list(self._heaps):
            if other != group:
                since, base, looks = self._coldest_of(other, limit, looks)
                if base >= 0:
                    found.append((since, base))
        return sorted(found)

    def ages_of(self, base: int) -> list[int]:
        """Return the ages of a sample of the slab's entries. O(`SAMPLES`)."""
        clock, look = self._policy.clock, self._policy.look
        return [clock - look(slot) for slot in self._allocator.sample_of_slab(base, SAMPLES)]

    def _coldest_of(self, group: int, limit: int, looks: int) -> tuple[int, int, int]:
        """Return (since, base, looks left) of the group's coldest evictable slab, or (limit, -1, looks left)."""
        heap, bounds, allocator = self._heaps[group], self._bounds, self._allocator
        best = limit, -1
        seen: list[tuple[int, int]] = []
        while heap and heap[0][0] < limit and looks > 0:
            bound, base = heappop(heap)
            if bounds.get(base) != bound or allocator.class_of_slab(base) != group:
                continue
            looks -= 1
            self._lost.pop(base, None)
            ages = self.ages_of(base)
            clock = self._policy.clock
            age = typical(ages) if ages else 0
            since = clock - age
            found = since < limit
            if found and not (ages and self._evictable(base)):
                found = False
                since = clock - age // 2
            bounds[base] = since
            seen.append((since, base))
            if found:  # and the next one must be colder than this one
                limit = since
                best = since, base
        for entry in seen:
            heappush(heap, entry)
        return *best, looks

    def _take_in(self) -> None:
        """Take in the new slabs. Their entries were inserted since the last time."""
        grown = self._allocator.grown
        if grown:
            for base in grown:
                group = self._allocator.class_of_slab(base)
                self._lost.pop(base, None)
                if group >= 0:
                    self._set(group, base, self._taken_in)
            grown.clear()
        self._taken_in = self._policy.clock

    def _set(self, group: int, base: int, bound: int) -> None:
        """Give a slab a bound, which makes its older heap entries outdated."""
        self._bounds[base] = bound
        heappush(self._heaps.setdefault(group, []), (bound, base))
        self._pushed += 1
        if self._pushed > 64 + self._allocator.size // SLAB_BYTES:
            self._clean_up()

    def _clean_up(self) -> None:
        """Drop outdated entries of all heaps. O(slabs), once for as many new bounds."""
        self._pushed = 0
        for group, heap in list(self._heaps.items()):
            kept = {e for e in heap if self._bounds[e[1]] == e[0] and self._allocator.class_of_slab(e[1]) == group}
            heap[:] = sorted(kept)
            if not heap:
                del self._heaps[group]
