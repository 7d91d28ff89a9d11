"""What was evicted to make room: how many entries, why, of which size, and how long they had been stored.

Nearly all evictions hand a chunk on to the next value of its size, many at a time, so what is noted here must cost
little: counts are exact, and the age is that of one entry in AGE_SAMPLE, or of the first of those that go together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ...constants import SLAB_CHUNK_BYTES_MAX

#: Reasons: keys of :attr:`Victims.by_reason`.
OWN, REASSIGNED, WINDOW, LAST_RESORT, NEAR = "own", "reassigned", "window", "last_resort", "near"
AGE_SAMPLE: Final = 8
#: Bucket b has ages of at most 2^b seconds, the last one all others: up to 12 days, and beyond.
AGE_BUCKETS: Final = 22
#: In place of a size: any above those of slabs.
LARGE: Final = "large"


def age_bound_s(bucket: int) -> float:
    """Return the greatest age in a bucket, seconds; infinity for the last one."""
    return float(1 << bucket) if bucket < AGE_BUCKETS - 1 else float("inf")


class Victims:
    """Counts what one arena has evicted. ``age_ms(slot)`` of an entry that is still there: how long it is stored."""

    def __init__(self) -> None:
        self.by_reason = dict.fromkeys((OWN, REASSIGNED, WINDOW, LAST_RESORT, NEAR), 0)
        #: By size of chunk, bytes; 0 for all large values.
        self.by_chunk: dict[int, int] = {}
        #: A sum of sampled ages in ms, then AGE_BUCKETS numbers of them.
        self.ages = [0] * (1 + AGE_BUCKETS)
        self.age_ms: Callable[[int], int] = lambda _slot: 0
        self._turn = 0

    def one(self, slot: int, reason: str, chunk: int) -> None:
        """Note an entry that is about to be evicted. O(1)."""
        self.by_reason[reason] += 1
        size = chunk if chunk <= SLAB_CHUNK_BYTES_MAX else 0
        self.by_chunk[size] = self.by_chunk.get(size, 0) + 1
        self._turn += 1
        if not self._turn % AGE_SAMPLE:
            self._note_age(slot)

    def many(self, slots: Sequence[int], chunk: int) -> None:
        """Note entries that are about to be evicted for others of their size. O(1)."""
        self.by_reason[OWN] += len(slots)
        self.by_chunk[chunk] = self.by_chunk.get(chunk, 0) + len(slots)
        self._note_age(slots[0])

    def _note_age(self, slot: int) -> None:
        age = max(0, self.age_ms(slot))
        self.ages[0] += age
        whole = -(-age // 1000)  # seconds, rounded up
        self.ages[1 + min(max(0, whole - 1).bit_length(), AGE_BUCKETS - 1)] += 1

    def stats(self) -> dict[str, Any]:
        """Return what STATS shows."""
        chunks = {str(size) if size else LARGE: count for size, count in sorted(self.by_chunk.items())}
        return {"evictions": dict(self.by_reason), "evictions_by_chunk": chunks, "eviction_ages": list(self.ages)}
