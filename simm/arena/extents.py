"""Extents of a region: chunks of large values, and the free room between them and the slabs.

Extents have a granularity of 4 KiB. A large chunk is cut from the low end of the smallest free extent that fits (best
fit); slabs are cut from the high end of one. That keeps the two kinds apart for longer. A freed extent is joined with
its free neighbours.

An operation costs O(log f) comparisons and one memory move of 8 f bytes, for f free extents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..constants import NO_SLOT, PAGE_BYTES, SLAB_BYTES
from ..errors import CorruptionError

_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1
_SLAB_SHIFT: Final = SLAB_BYTES.bit_length() - 1
_SLAB_MASK: Final = SLAB_BYTES - 1
#: A free extent's key is pages << 32 | first page, a large chunk's word pages << 32 | owner: regions up to 16 TiB.
_SHIFT: Final = 32
_MASK: Final = (1 << _SHIFT) - 1
_SLAB_KEY: Final = SLAB_BYTES >> _PAGE_SHIFT << _SHIFT
REGION_BYTES_MAX: Final = PAGE_BYTES << _SHIFT
#: From a slab for so many free extents on it takes less time to sort them than to place each slab.
MANY: Final = 32


class Extents:
    """Large chunks and free extents of one region. Offsets are in bytes from its start.

    A method raises `CorruptionError` if no large chunk begins at the given offset, and has then changed nothing.
    """

    __slots__ = ("_by_size", "_words", "ends", "free", "large_bytes", "slab_hint")

    def __init__(self) -> None:
        #: Large chunks: offset -> pages << 32 | owner.
        self._words: dict[int, int] = {}
        self.large_bytes = 0
        #: Free extents: offset -> bytes, and their keys sorted by size, then offset.
        self.free: dict[int, int] = {}
        self._by_size: list[int] = []
        #: End -> offset, of large chunks and free extents.
        self.ends: dict[int, int] = {}
        #: False after a search found no aligned slab in any free extent, until one of a slab's size appears.
        self.slab_hint = True

    # ---- large chunks

    def __len__(self) -> int:
        """Return the number of large chunks."""
        return len(self._words)

    def allocate(self, size: int) -> int:
        """Return the offset of a chunk of ``size`` bytes (whole pages) without an owner, -1 if none fits."""
        position = bisect_left(self._by_size, size >> _PAGE_SHIFT << _SHIFT)
        if position == len(self._by_size):
            return -1
        start = (self._by_size[position] & _MASK) << _PAGE_SHIFT
        left = self.free[start] - size
        self._remove(start)
        if left:
            self._put(start + size, left)
        self.reserve(start, size)
        return start

    def reserve(self, offset: int, size: int) -> None:
        """Note a large chunk without an owner. The caller has made sure that its room is free."""
        self._words[offset] = size >> _PAGE_SHIFT << _SHIFT | NO_SLOT
        self.ends[offset + size] = offset
        self.large_bytes += size

    def release(self, offset: int) -> int:
        """Free a large chunk, and return its owner."""
        word = self._word(offset)
        size = word >> _SHIFT << _PAGE_SHIFT
        del self._words[offset]
        del self.ends[offset + size]
        self.large_bytes -= size
        self.add(offset, size)
        return word & _MASK

    def size_of(self, offset: int) -> int:
        """Return the bytes of the large chunk at ``offset``."""
        return (self._words.get(offset) or self._word(offset)) >> _SHIFT << _PAGE_SHIFT

    def owner(self, offset: int) -> int:
        """Return the slot that owns the large chunk at ``offset``, NO_SLOT without one."""
        return self._word(offset) & _MASK

    def set_owner(self, offset: int, slot: int) -> None:
        """Set the owner of a large chunk. `CorruptionError` if it passes from one slot to another directly."""
        word = self._word(offset)
        if slot != NO_SLOT and word & _MASK != NO_SLOT:
            raise CorruptionError(f"chunk at {offset} is owned by {word & _MASK}, not free for {slot}")
        self._words[offset] = word >> _SHIFT << _SHIFT | slot

    def is_large(self, offset: int) -> bool:
        """Return True if a large chunk begins at ``offset``."""
        return offset in self._words

    def large(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of all large chunks. O(chunks)."""
        return [(offset, word >> _SHIFT << _PAGE_SHIFT) for offset, word in self._words.items()]

    def _word(self, offset: int) -> int:
        word = self._words.get(offset)
        if word is None:
            raise CorruptionError(f"no chunk is allocated at offset {offset}")
        return word

    # ---- free extents

    def add(self, start: int, size: int) -> None:
        """Add a free extent, joined with its free neighbours."""
        before = self.ends.get(start, -1)
        if before in self.free:
            size += self.free[before]
            self._remove(before)
            start = before
        behind = self.free.get(start + size)
        if behind is not None:
            self._remove(start + size)
            size += behind
        self._put(start, size)
        if size >= SLAB_BYTES:
            self.slab_hint = True

    def take_slab(self) -> int:
        """Take an aligned 2 MiB out of the smallest free extent that contains one; return its offset or -1."""
        by_size = self._by_size
        for position in range(bisect_left(by_size, _SLAB_KEY), len(by_size)):
            start = (by_size[position] & _MASK) << _PAGE_SHIFT
            end = start + self.free[start]
            base = (end & ~_SLAB_MASK) - SLAB_BYTES
            if base >= start:
                self._remove(start)
                if start < base:
                    self._put(start, base - start)
                if base + SLAB_BYTES < end:
                    self._put(base + SLAB_BYTES, end - base - SLAB_BYTES)
                return base
        self.slab_hint = False
        return -1

    def add_slabs(self, bases: Sequence[int]) -> None:
        """Add the room of slabs at these offsets, each as `add` does.

        O(n log n) for n slabs. Where they are many beside the free extents, the list by size is sorted once for all of
        them: a memory move for each slab takes a quarter of a second after a mass delete.
        """
        free, ends = self.free, self.ends
        if len(bases) < len(free) // MANY:
            for start in bases:
                self.add(start, SLAB_BYTES)
            return
        for start in bases:
            size = SLAB_BYTES
            before = ends.get(start, -1)
            if before in free:
                size += free.pop(before)
                del ends[start]
                start = before
            size += free.pop(start + size, 0)  # whose end is the joined one's
            free[start] = size
            ends[start + size] = start
        self._by_size = sorted([size >> _PAGE_SHIFT << _SHIFT | start >> _PAGE_SHIFT for start, size in free.items()])
        self.slab_hint = True

    def largest(self, most: int) -> list[int]:
        """Return the offsets of the largest free extents, at most ``most``, the largest first."""
        return [(key & _MASK) << _PAGE_SHIFT for key in self._by_size[: -most - 1 : -1]]

    def drop_free(self) -> None:
        """Forget all free extents. O(extents)."""
        for start, size in self.free.items():
            del self.ends[start + size]
        self.free.clear()
        self._by_size.clear()

    def rebuild_free(self, slabs: Iterable[int], region: int) -> None:
        """Make all of ``region`` bytes free that no large chunk takes and no slab at these offsets. O(n log n)."""
        taken = [(base, base + SLAB_BYTES) for base in slabs]
        taken.extend((start, end) for end, start in self.ends.items())
        taken.sort()
        taken.append((region, region))
        position = 0
        for start, end in taken:
            if start > position:
                self.free[position] = start - position
                self.ends[start] = position
                self._by_size.append(_key(position, start - position))
            position = end
        self._by_size.sort()
        self.slab_hint = True

    def _put(self, start: int, size: int) -> None:
        self.free[start] = size
        self.ends[start + size] = start
        insort(self._by_size, _key(start, size))

    def _remove(self, start: int) -> None:
        size = self.free.pop(start)
        del self.ends[start + size]
        key = _key(start, size)
        position = bisect_left(self._by_size, key)
        if position == len(self._by_size) or self._by_size[position] != key:
            raise CorruptionError(f"free extent of {size} bytes at {start} is missing from the list by size")
        del self._by_size[position]


def _key(start: int, size: int) -> int:
    """Return the key of a free extent in the list by size."""
    return size >> _PAGE_SHIFT << _SHIFT | start >> _PAGE_SHIFT


def cell_masks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (cell, mask of its pages) for every 2 MiB cell that the bytes from ``start`` to ``end`` touch."""
    for cell in range(start >> _SLAB_SHIFT, (end - 1 >> _SLAB_SHIFT) + 1):
        base = cell << _SLAB_SHIFT
        low = max(start - base, 0) >> _PAGE_SHIFT
        high = min(end - base, SLAB_BYTES) >> _PAGE_SHIFT
        yield cell, (1 << high) - (1 << low)
