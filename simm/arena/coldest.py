"""The coldest slabs and windows: the order in which size classes give room to each other.

Room moves between size classes in whole slabs, so a class gives up a slab, not its oldest entry. The worth of a slab is
the age of what would be lost with it: `typical` of its entries. At *every* eviction the coldest slab of all other
classes is compared with the own next victim, so that comparison must cost nearly nothing. docs/architecture.md states
the rule and its limits.

All ages grow with the clock, so a slab is described by its *since*: the clock reading at which its age was 0. A use or
a new entry moves it forwards; only a loss of entries moves it backwards. So a since found once is a lower bound from
then on. (A change of the policy changes ages too, by a factor of `TENURE` at most. A bound that is too late then makes
that its slab is examined later, once.) A heap per class orders the slabs by these bounds, and the caller remembers the
lowest bound of all other classes. If its victim is younger than that, the slab is examined: it gets a new bound and
sinks in the heap, or it is really colder and is evicted. Examining takes a sample of the entries and notes their visits
(`Policy.look`), so a class that is not written to any more does not keep its room forever because its entries were once
read.

The remembered bound treats other slabs as a sixteenth younger than they may be (`coarse`): otherwise two classes of
nearly equal ages would examine each other's slabs at every put.

A slab with something fresh in it (`simm.arena.queues`) sleeps, outside of its heap, until the clock at which nothing in
it is fresh.

A large value, and a new slab among large values, need a window: an address range of the bytes needed (for a slab, an
aligned 2 MiB) in which everything can be evicted. A window consists of whole spans (`simm.slab.Span`), as a slab in it
goes as a whole, and so does a large value that it touches. Its cost is its bytes in use by their age; its age is
`typical` of all its entries. Of windows that cost the same the one with the fewest entries goes, as each takes the
worker time. The caller tells which spans may be evicted. Nothing is changed here.

Windows are sought around anchors, oldest entries first. One request examines no more than a bounded number of spans for
that, whatever the classes and the anchors are; but the coldest slabs and free extents it compares in any case
(`Windows.around_coldest`). What was found to be fenced in is remembered until the clock has moved by a 256th of the
region, so that the next request goes on where this one ended: where one has ended early, by four values of that size at
least.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import Final

from simm.arena.queues import Policy
from simm.constants import NO_SLOT, SLAB_BYTES
from simm.constants import SLAB_CHUNK_BYTES_MAX as _SMALL_MAX
from simm.slab import ALIGN_SHIFT, CHUNK_SIZES, CHUNKS_PER_SLAB, FREE, LARGE, SLAB, Allocator, Span

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
#: What one search of the region examines at most, and all searches around anchors of one request together, in chunks of
#: slabs; and for how many a span counts beside its own. So one in vain takes milliseconds in a region of any size.
SEARCH_CHUNKS_MAX: Final = 1 << 16
SPAN_CHUNKS: Final = 64
#: Victims of one group around which windows are compared, and how many are tried for that: some are fenced in.
ANCHORS_MAX: Final = 4
TRIED_MAX: Final = 64
#: What was fenced in is remembered for so many values of the size that is sought, where a search has ended early.
FENCED_PUTS: Final = 4
#: Costs are whole numbers, so that equal ones are equal however they were added up: bytes by age in units of 2 ** -32.
_COST_SHIFT: Final = 32
#: Entries of its own size class that the last resort passes by at most, beside held ones.
USED_MAX: Final = 4096
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
        #: Slabs with something fresh in them: (the clock until which, base, lower bound of the since).
        self._asleep: list[tuple[int, int, int]] = []
        #: Bounds set since the heaps were last cleaned up.
        self._pushed = 0

    @property
    def wakes(self) -> int:
        """Return the clock at which a slab can be evicted again that had something fresh in it, `NEVER` without one."""
        return self._asleep[0][0] if self._asleep else NEVER

    def lost(self, base: int, more: int = 1) -> bool:
        """Note entries lost without eviction in the slab at ``base``. Return True if earlier bounds are void."""
        count = self._lost.get(base, 0) + more
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
        self.take_in()
        bounds = (heap[0][0] for other, heap in self._heaps.items() if other != group and heap)
        return min(bounds, default=self._policy.clock)

    def find(self, group: int, limit: int) -> tuple[int, int]:
        """Return (since, base) of the coldest evictable slab of other classes, or (limit, -1)."""
        self.take_in()
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
        self.take_in()
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
            if found and (wakes := self._fresh_until(base)) > clock:
                bounds[base] = NEVER + wakes
                heappush(self._asleep, (wakes, base, since))
                continue
            if found and not (ages and self._evictable(base)):
                found = False
                # Fenced by a grant or a view, maybe for long: it must not be examined at each eviction. The class's
                # victims are about as old as this one for a while, so half of its age is a pause.
                since = clock - min(age, clock - limit if limit < clock else age) // 2
            bounds[base] = since
            seen.append((since, base))
            if found:  # and the next one must be colder than this one
                limit = since
                best = since, base
        for entry in seen:
            heappush(heap, entry)
        return *best, looks

    def _fresh_until(self, base: int) -> int:
        """Return the clock from which on nothing in the slab is fresh, 0 for now. O(chunks), by numpy."""
        policy = self._policy
        return policy.fresh_until(self._allocator.owners_of_slab(base)) if policy.sparing else 0

    def take_in(self) -> None:
        """Take in the new slabs, whose entries were inserted since the last time, and those that are fresh no more.

        O(log slabs) for each. Each comparison begins with it. A recovery calls it as well, as it brings many.
        """
        while self.wakes <= self._policy.clock:
            wakes, base, since = heappop(self._asleep)
            group = self._allocator.class_of_slab(base)
            if group >= 0 and self._bounds.get(base) == NEVER + wakes:
                self._set(group, base, since)
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


class Fenced:
    """Address ranges around which there is no window, as far as one remembers. O(log ranges), one memory move each."""

    def __init__(self, span: int) -> None:
        self._span = span
        self._since = 0
        #: By how much the clock moves at least until it is forgotten.
        self._least = 0
        self._starts: list[int] = []
        #: By start: the range's end, and the bytes of which it has no window.
        self._ranges: dict[int, tuple[int, int]] = {}
        #: No anchor at all has a window of so many bytes.
        self.least = NEVER

    def forget_at(self, clock: int) -> None:
        """Forget everything if the clock has moved by the span since the last time."""
        if clock > self._since + max(self._span, self._least):
            self._since, self._least = clock, 0
            self._starts.clear()
            self._ranges.clear()
            self.least = NEVER

    def keep_for(self, span: int) -> None:
        """Do not forget until the clock has moved by ``span``, too: a search has ended before all was examined.

        One for what is larger than the usual span would else begin anew each time, and never be done.
        """
        self._least = max(self._least, span)

    def note(self, start: int, end: int, need: int) -> None:
        """Note that nothing between ``start`` and ``end`` is part of a window of ``need`` bytes or more."""
        if start not in self._ranges:
            insort(self._starts, start)
        self._ranges[start] = end, need

    def has(self, offset: int, need: int) -> bool:
        """Return True if the place at ``offset`` is known to be part of no window of ``need`` bytes."""
        place = bisect_right(self._starts, offset)
        if not place:
            return False
        end, least = self._ranges[self._starts[place - 1]]
        return offset < end and need >= least


class Windows:
    """Windows in the region of an allocator. Reading an entry's age notes its visit (`Policy.look`).

    ``offsets``: of each slot's chunk. ``is_held(slot)`` tells which entries are no anchors, ``evictable(span)`` what
    may be part of a window.
    """

    def __init__(
        self, allocator: Allocator, policy: Policy, coldest: Coldest, evictable: Callable[[Span], bool],
        offsets: Sequence[int], is_held: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._allocator = allocator
        self._policy = policy
        self._coldest = coldest
        self._evictable = evictable
        self._offsets = offsets
        self._is_held = is_held
        #: Where the last search has ended, by the bytes of the window, 0 for a slab, and whether what is fresh is
        #: spared, and soft ones may go.
        self._ends: dict[tuple[int, bool, bool], int] = {}
        #: What searches around anchors may still examine for this request.
        self._left = 0
        #: By whether a slab is sought, and whether what is fresh is spared.
        self._fenced = {(slab, fresh): Fenced(policy.period // 4) for slab in (False, True) for fresh in (False, True)}

    def begin(self) -> None:
        """Begin a request, or a part of it: searches around anchors may examine `SEARCH_CHUNKS_MAX` from now on."""
        self._left = SEARCH_CHUNKS_MAX

    @property
    def exhausted(self) -> bool:
        """Return True if searches around anchors since `begin` have ended before all was examined."""
        return self._left <= 0

    def may_have(self, need: int) -> bool:
        """Return False if no anchor is known to have a window of ``need`` bytes, or none may be examined. O(1)."""
        return not self.exhausted and window_bytes(need) < self._fenced_for(need).least

    def note_none(self, need: int) -> None:
        """Note that no anchor has a window of ``need`` bytes, unless the request is exhausted. O(1)."""
        fenced = self._fenced_for(need)
        if not self.exhausted:
            fenced.least = window_bytes(need)

    def _fenced_for(self, need: int) -> Fenced:
        fenced = self._fenced[need <= _SMALL_MAX, self._policy.sparing]
        fenced.forget_at(self._policy.clock)
        if self.exhausted:
            fenced.keep_for(FENCED_PUTS * (window_bytes(need) >> ALIGN_SHIFT))
        return fenced

    def around_oldest(self, first: int, group: int, need: int, limit: int) -> tuple[int, list[Span], int, int]:
        """Return the coldest window around the group's oldest entries: its since, its spans, and two clocks.

        (``limit``, no spans) if none is colder than ``limit``. No later window of the group has an earlier since than
        the first clock, but for those that are fenced in now: they are to be looked at again at the second, when one is
        a sixteenth older. ``first``: the group's victim, which is tried first; -1 without one.
        """
        policy, offsets = self._policy, self._offsets
        clock = bound = policy.clock
        again = NEVER
        best: tuple[int, list[Span]] = limit, []
        tried: set[int] = set()
        anchors = [first, *(slot for slot in islice(policy.slots(group), TRIED_MAX) if slot != first)]
        found = 0
        for slot in anchors:
            if slot < 0 or self._is_held(slot):
                continue
            if found == ANCHORS_MAX:
                break
            since = policy.since(slot)
            if since >= best[0]:
                bound = min(bound, since)
                break
            self._left -= 1
            span = self._allocator.span_of(offsets[slot])
            if span.offset in tried:
                continue
            tried.add(span.offset)
            if window := self.around(span, need):
                found += 1
                since = self.since(window)
                if since < best[0]:
                    best = since, window
                bound = min(bound, since)
            else:
                again = min(again, clock + 1 + (clock - since) // 16)
        return *best, bound, again

    def around_coldest(self, slabs: list[Span], need: int, limit: int) -> list[Span]:
        """Return the cheapest window before ``limit`` around other classes' slabs, the coldest first; none without one.

        For more than a slab also around the largest free extents, as less is lost where a part is free already. Those
        and the first slabs are examined whatever the request has examined before: else large values would evict each
        other where that was much. O(spans in reach of those).
        """
        if need > SLAB_BYTES:
            windows = [self.around(slab, need, sure=place < ANCHORS_MAX) for place, slab in enumerate(slabs)]
            free = self._allocator.largest_free(ANCHORS_MAX) if slabs else []
            windows += [self.around(span, need, sure=True) for span in free]
        else:
            windows = [[slab] for slab in slabs]
        found = [window for window in windows if window and self.since(window) < limit]
        cost = lambda window: (sum(map(self._cost, window)), sum(map(self._entries, window)))  # noqa: E731
        return min(found, key=cost, default=[])

    def _cost(self, span: Span) -> int:
        """Return the cost of evicting ``span``: its bytes in use by their age; for a slab, the age of a sample."""
        if span.kind == FREE:
            return 0
        if span.kind == LARGE:
            return (span.size << _COST_SHIFT) // (1 + self._policy.age(span.detail))
        ages = self._coldest.ages_of(span.offset)
        if not ages:
            return 0
        used = self._allocator.used_of_slab(span.offset) * CHUNK_SIZES[span.detail]
        return (used << _COST_SHIFT) // (1 + typical(ages))

    def _entries(self, span: Span) -> int:
        return self._allocator.used_of_slab(span.offset) if span.kind == SLAB else int(span.kind == LARGE)

    def around(self, anchor: Span, need: int, *, sure: bool = False) -> list[Span]:
        """Return the spans in use of a window of ``need`` bytes around ``anchor``, none if it is fenced in.

        For a slab that is the coldest aligned 2 MiB that the anchor touches. For a large value it is the cheapest
        window in reach. None also if this request has examined all that it may, unless ``sure``, or the anchor was
        fenced in lately.
        """
        fenced, least = self._fenced_for(need), window_bytes(need)
        if (self._left <= 0 and not sure) or fenced.has(anchor.offset, least):
            return []
        if not self._examine(anchor):
            fenced.note(anchor.offset, anchor.offset + anchor.size, 0)
            return []
        if need > _SMALL_MAX:
            run = self._run_around(anchor, need)
            if (start := self._cheapest(run, need)) >= 0:
                return self.spans(run[0].offset, start, need)
            # It is too short for its other anchors too.
            fenced.note(run[0].offset, run[-1].offset + run[-1].size, need)
            return []
        if anchor.kind == SLAB:
            return [anchor]
        run = self._run_around(anchor, need)
        best: list[Span] = []
        coldest = NEVER
        first, last = anchor.offset & -SLAB_BYTES, (anchor.offset + anchor.size - 1) & -SLAB_BYTES
        for base in sorted({first, min(first + SLAB_BYTES, last), last}):  # those between equal the second
            if run[0].offset <= base and base + SLAB_BYTES <= run[-1].offset + run[-1].size:
                window = self.spans(max(span.offset for span in run if span.offset <= base), base, need)
                since = self.since(window)
                if since < coldest:
                    best, coldest = window, since
        if not best and self._left > 0:
            fenced.note(anchor.offset, anchor.offset + anchor.size, 0)
        return best

    def _examine(self, span: Span) -> bool:
        """Return whether ``span`` is evictable. It counts for what the request may examine."""
        self._left -= _chunks(span)
        return self._evictable(span)

    def _run_around(self, anchor: Span, need: int) -> list[Span]:
        """Return the evictable spans around ``anchor``, on both sides as far as a window of ``need`` bytes reaches.

        The anchor is one of them. If this request has examined all that it may, as far as is enough for one window.
        """
        allocator = self._allocator
        reach = window_bytes(need)
        left: list[Span] = []
        start = anchor.offset
        while start > 0 and start > anchor.offset - reach:
            span = allocator.span_before(start)
            if not self._examine(span):
                break
            left.append(span)
            start = span.offset
        spans = [*reversed(left), anchor]
        end = anchor.offset + anchor.size
        stop = min(anchor.offset + anchor.size + reach, allocator.size)
        while end < stop and (self._left > 0 or end - start < reach):
            span = allocator.span_at(end)
            if not self._examine(span):
                break
            spans.append(span)
            end += span.size
        return spans

    def _cheapest(self, run: list[Span], need: int) -> int:
        """Return the start of the cheapest window in ``run``, -1 if there is none.

        It is a span's start, as a window from within a span costs that span too.
        """
        starts = [span.offset for span in run]
        end = run[-1].offset + run[-1].size
        if end - starts[0] < need:
            return -1
        sums = [0, *accumulate(map(self._cost, run))]
        counts = [0, *accumulate(map(self._entries, run))]
        costs = []
        for place, start in enumerate(starts):
            if start + need <= end:
                stop = bisect_left(starts, start + need)
                costs.append((sums[stop] - sums[place], counts[stop] - counts[place], start))
        return min(costs)[2]

    def search(self, need: int, *, soft: bool = False) -> tuple[list[Span] | None, int]:
        """Return the spans in use of a window of ``need`` bytes, None if none was found, and the bytes examined.

        A search goes on where the last one of its kind has ended, in address order, and from the end to the beginning.
        It ends behind a span that fences, once it has examined `SEARCH_CHUNKS_MAX` or all. So its cost does not depend
        on the region's size, and the next ones find what it has not reached. ``soft``: which kind. While the policy
        spares what is fresh it is one of its own.
        """
        allocator, size = self._allocator, self._allocator.size
        kind = need if need > _SMALL_MAX else 0, self._policy.sparing, soft
        origin = begin = boundary = allocator.boundary_before(self._ends.pop(kind, 0))
        left, examined, wrapped = SEARCH_CHUNKS_MAX, 0, origin == 0
        while boundary < size or not wrapped:
            if boundary == size:
                begin = boundary = 0
                wrapped = True
            span = allocator.span_at(boundary)
            boundary = span.offset + span.size
            examined += span.size
            left -= _chunks(span)
            if self._evictable(span):
                start = begin if need > _SMALL_MAX else -(-begin // SLAB_BYTES) * SLAB_BYTES
                if start + window_bytes(need) <= boundary:
                    self._ends[kind] = begin
                    return self.spans(begin, start, need), examined
                continue
            begin = boundary
            if wrapped and boundary >= origin > 0:
                break
            if left <= 0 and boundary < size:
                self._ends[kind] = boundary
                return None, examined
        return None, size

    def spans(self, boundary: int, start: int, need: int) -> list[Span]:
        """Return every span in use that overlaps the window at ``start``. ``boundary`` is one of a span before it."""
        spans: list[Span] = []
        end = start + window_bytes(need)
        for span in self._allocator.walk(boundary):
            if span.offset >= end:
                break
            if span.offset + span.size > start and span.kind != FREE:
                spans.append(span)
        return spans

    def since(self, spans: Iterable[Span]) -> int:
        """Return the clock at which `typical` of all entries in ``spans``, weighted by their bytes, was 0."""
        policy = self._policy
        clock = policy.clock
        ages: list[int] = []
        for span in spans:
            if span.kind == LARGE:
                ages += [clock - policy.look(span.detail)] * max(1, span.size // (SLAB_BYTES // SAMPLES))
            else:
                ages += self._coldest.ages_of(span.offset)
        return clock - typical(ages) if ages else 0

    def slots(self, spans: Iterable[Span]) -> list[int]:
        """Return the slots of all entries in ``spans``."""
        slots: list[int] = []
        for span in spans:
            if span.kind == LARGE:
                slots.append(span.detail)
            else:
                slots += [owner for _, owner in self._allocator.chunks_of_slab(span.offset)]
        return slots


def may_go(span: Span, allocator: Allocator, policy: Policy, holds: Mapping[int, object]) -> bool:
    """Return True if everything in a span is free, or published, and neither held nor fresh while that is spared.

    ``holds``: by the offsets of held chunks. O(held chunks, or chunks of the span), and by numpy.
    """
    if span.kind == FREE:
        return True
    if span.kind == LARGE:
        if span.detail == NO_SLOT or span.offset in holds:
            return False
        return not (policy.sparing and policy.is_fresh(span.detail))
    if allocator.unowned_of_slab(span.offset):
        return False
    if policy.sparing and policy.fresh_until(allocator.owners_of_slab(span.offset)) > policy.clock:
        return False
    if len(holds) < CHUNKS_PER_SLAB[span.detail]:
        return not any(span.offset <= offset < span.offset + SLAB_BYTES for offset in holds)
    return holds.keys().isdisjoint(range(span.offset, span.offset + SLAB_BYTES, CHUNK_SIZES[span.detail]))


def _chunks(span: Span) -> int:
    """Return for how many chunks it counts to examine ``span``."""
    return SPAN_CHUNKS + (CHUNKS_PER_SLAB[span.detail] if span.kind == SLAB else 0)


def window_bytes(need: int) -> int:
    """Return the bytes to clear for a chunk of ``need`` bytes: its own, or those of a slab."""
    return need if need > _SMALL_MAX else SLAB_BYTES
