"""What was evicted to make room: how many entries, why, of which size, and how long they had been stored.

Nearly all evictions hand a chunk on to the next value of its size, many at a time, so what is noted here must cost
little: counts are exact, and the age is that of one entry in AGE_SAMPLE, or of the first of those that go together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...constants import GHOST_STEP, SLAB_CHUNK_BYTES_MAX
from ..queues import KEY_SHIFT, KeyWords

#: Reasons: keys of :attr:`Victims.by_reason`.
OWN, REASSIGNED, WINDOW, LAST_RESORT, NEAR = "own", "reassigned", "window", "last_resort", "near"
AGE_SAMPLE: Final = 8
#: Bits of the number of evicted keys that are remembered, two bytes each.
GHOST_BITS_MIN, GHOST_BITS_MAX = 10, 22
#: Bucket b has ages of at most 2^b seconds, the last one all others: up to 12 days, and beyond.
AGE_BUCKETS: Final = 22
#: In place of a size: any above those of slabs.
LARGE: Final = "large"


def evicted_in(stats: Mapping[str, Any]) -> int:
    """Return how many entries have left to make room, of what a store's counters say: groups' other members too.

    A worker of an earlier version tells no number of these.
    """
    return int(sum(stats["evictions"].values()) + stats["set_evictions"] + stats.get("evicted_with_groups", 0))


def age_bound_s(bucket: int) -> float:
    """Return the greatest age in a bucket, seconds; infinity for the last one."""
    return float(1 << bucket) if bucket < AGE_BUCKETS - 1 else float("inf")


class Ghosts:
    """Remembers about as many evicted keys as there are slots: 16 bits of each, at a place by its hash; the last wins.

    Of many that are evicted together it notes each GHOST_STEP'th: all would cost 1.6 % of a batch of puts. A key that
    was never there is taken for a noted one once in 65,536 times. One that was stored again and then deleted is still
    remembered. In each epoch of its namespace it is the same key. ``keys``: where 64 bits of each slot's key are.
    """

    def __init__(self, slots: int, keys: KeyWords) -> None:
        words, stride, at = keys
        wide = np.asarray(words, np.uint64).data.cast("B")  # of shared memory: no copy
        # Bits 16 to 47 and 48 to 63 of each slot's key: numbers of kinds that are read fast, without a shift.
        middle = wide[8 * at + KEY_SHIFT // 8 : len(wide) - 4 + KEY_SHIFT // 8].cast("I")
        self._middle, self._high = middle[:: 2 * stride], wide.cast("H")[4 * at + 3 :: 4 * stride]
        bits = min(max(GHOST_BITS_MIN, slots.bit_length()), GHOST_BITS_MAX)
        self._mask = (1 << bits) - 1
        # The kernel gives its pages one by one, as they are used.
        self._tags = np.zeros(1 << bits, np.uint16).data
        self._first = 0

    def note(self, slots: Sequence[int]) -> None:
        """Remember the keys of every GHOST_STEP'th of these slots, in the long run. O(slots)."""
        tags, middle, high, mask = self._tags, self._middle, self._high, self._mask
        for slot in slots[self._first :: GHOST_STEP]:
            tags[middle[slot] & mask] = high[slot]
        self._first = (self._first - len(slots)) % GHOST_STEP

    def has(self, key: int) -> bool:
        """Return True for these 64 bits of a key that is remembered. O(1)."""
        return self._tags[key >> KEY_SHIFT & self._mask] == key >> 48


class Victims:
    """Counts what one arena has evicted. ``age_ms(slot)`` of an entry that is still there: how long it is stored.

    ``ghosts`` remember the keys.
    """

    def __init__(self, ghosts: Ghosts | None = None) -> None:
        #: Remembers the keys of these slots as evicted, without counting them.
        self.note: Callable[[Sequence[int]], None] = ghosts.note if ghosts is not None else lambda _slots: None
        #: Returns True for one of GHOST_STEP keys that were evicted lately, by these 64 bits.
        self.evicted: Callable[[int], bool] = ghosts.has if ghosts is not None else lambda _key: False
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
        self.note((slot,))
        self._turn += 1
        if not self._turn % AGE_SAMPLE:
            self._note_age(slot)

    def many(self, slots: Sequence[int], chunk: int, reason: str = OWN) -> None:
        """Note entries of one size of slabs' chunks that are about to be evicted together. O(slots)."""
        self.by_reason[reason] += len(slots)
        self.by_chunk[chunk] = self.by_chunk.get(chunk, 0) + len(slots)
        self._note_age(slots[0])
        self.note(slots)

    def _note_age(self, slot: int) -> None:
        age = max(0, self.age_ms(slot))
        self.ages[0] += age
        whole = -(-age // 1000)  # seconds, rounded up
        self.ages[1 + min(max(0, whole - 1).bit_length(), AGE_BUCKETS - 1)] += 1

    def stats(self) -> dict[str, Any]:
        """Return what STATS shows."""
        chunks = {str(size) if size else LARGE: count for size, count in sorted(self.by_chunk.items())}
        return {"evictions": dict(self.by_reason), "evictions_by_chunk": chunks, "eviction_ages": list(self.ages)}
