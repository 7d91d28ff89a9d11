"""Windows: ranges of the region in which everything can be evicted, for values that need free neighbours.

A window is an address range of the bytes needed; for a new slab it is an aligned 2 MiB. It consists of whole spans
(`simm.slab.Span`), as a slab in it goes as a whole, and so does a large value that it touches. The cost of a window is
its bytes in use by their age; its age is `simm.arena.coldest.typical` of all its entries. The caller tells which spans
may be evicted. Nothing is changed here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from simm.arena.coldest import NEVER, SAMPLES, Coldest, typical
from simm.arena.eviction import Policy
from simm.constants import SLAB_BYTES
from simm.constants import SLAB_CHUNK_BYTES_MAX as _SMALL_MAX
from simm.slab import CHUNK_SIZES, FREE, LARGE, Allocator, Span


class Windows:
    """Windows in the region of an allocator. Reading an entry's age notes its visit (`Policy.look`)."""

    def __init__(
        self, allocator: Allocator, policy: Policy, coldest: Coldest, evictable: Callable[[Span], bool]
    ) -> None:
        self._allocator = allocator
        self._policy = policy
        self._coldest = coldest
        self._evictable = evictable

    def cost(self, span: Span) -> float:
        """Return the cost of evicting ``span``: its bytes in use by their age; for a slab, the age of a sample."""
        if span.kind == FREE:
            return 0.0
        if span.kind == LARGE:
            return span.size / (1 + self._policy.age(span.detail))
        ages = self._coldest.ages_of(span.offset)
        if not ages:
            return 0.0
        return self._allocator.used_of_slab(span.offset) * CHUNK_SIZES[span.detail] / (1 + typical(ages))

    def around(self, anchor: Span, need: int) -> list[Span]:
        """Return the spans in use of a window of ``need`` bytes around ``anchor``, none if it is fenced in.

        For a slab that is the coldest aligned 2 MiB that the anchor touches. For a large value it is the cheapest
        window in reach.
        """
        run = self._run_around(anchor, need)
        if need > _SMALL_MAX:
            start = self._cheapest(run, need)
            return self.spans(run[0].offset, start, need) if start >= 0 else []
        best: list[Span] = []
        coldest = NEVER
        first, last = anchor.offset & -SLAB_BYTES, (anchor.offset + anchor.size - 1) & -SLAB_BYTES
        for base in sorted({first, min(first + SLAB_BYTES, last), last}):  # those between equal the second
            if run and run[0].offset <= base and base + SLAB_BYTES <= run[-1].offset + run[-1].size:
                window = self.spans(max(span.offset for span in run if span.offset <= base), base, need)
                since = self.since(window)
                if since < coldest:
                    best, coldest = window, since
        return best

    def _run_around(self, anchor: Span, need: int) -> list[Span]:
        """Return the evictable spans around ``anchor``, on both sides as far as a window of ``need`` bytes reaches."""
        allocator = self._allocator
        reach = window_bytes(need)
        if not self._evictable(anchor):
            return []
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
        return spans

    def _cheapest(self, run: list[Span], need: int) -> int:
        """Return the start of the cheapest window in ``run``, -1 if there is none.

        It is a span's start, as a window from within a span costs that span too.
        """
        starts = [span.offset for span in run]
        sums = [0.0, *accumulate(map(self.cost, run))]
        end = run[-1].offset + run[-1].size if run else 0
        costs = [
            (sums[bisect_left(starts, start + need)] - sums[place], start)
            for place, start in enumerate(starts)
            if start + need <= end
        ]
        return min(costs)[1] if costs else -1

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


def window_bytes(need: int) -> int:
    """Return the bytes to clear for a chunk of ``need`` bytes: its own, or those of a slab."""
    return need if need > _SMALL_MAX else SLAB_BYTES
