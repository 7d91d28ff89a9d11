"""Chunks of the data region: slabs of equal chunks for small values, extents for large ones.

A *chunk* is the room of one value: ``chunk_bytes`` bytes from ``offset``, both relative to the data region. A chunk is
free or allocated. An allocated chunk belongs to a table slot, its *owner*, or to none (``NO_SLOT``): it is then
granted to a client, or quarantined. This module does not know which. All of its state lies in the worker's private
memory; a restarted worker rebuilds it from the slots (`Allocator.reserve`).

    0        2 MiB     4 MiB                          8 MiB           size
    +--------+---------+-----------------------+------+----------------+
    | slab   | slab    | large value           | free | large    | free |
    | 4 KiB  | 100 KiB |                       |      |          |      |
    +--------+---------+-----------------------+------+----------------+

Slabs lie at multiples of ``SLAB_BYTES``. A slab holds chunks of one size class from its start on, so an offset alone
gives the slab and the chunk's index, and recovery needs no other record. A larger value gets an extent
(``arena/extents.py``), and slabs come out of free extents. An empty slab is given up only when its room is needed,
because the next request is usually for the same class.

Size classes are multiples of 64 bytes up to 1 KiB, then 16 steps per doubling up to ``SLAB_CHUNK_BYTES_MAX`` (128 KiB):
128 classes. Above 1 KiB a value leaves less than 1/17 of its chunk unused, and a slab of at least 16 chunks has a tail
of less than 1/17. A uniform workload thus wastes less than 1 - (16/17)^2 = 11.4 %, and 8.6 % at the worst size. Every
multiple of 4 KiB is a class, and its chunks lie at multiples of 4 KiB. A size between two of them gets its closer
class, aligned to that class's step only: rounding 4,100 bytes up to 8 KiB would waste half.

Cost: four bytes per chunk of a slab, about 200 per slab, and about 300 per large value (0.2 % of it at most).

The worst caller's mistake is a double free: two values would share a chunk, and readers would get bytes of one for the
other. Each call therefore checks the owner word first, and raises `CorruptionError` before it has changed anything.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arena.extents import REGION_BYTES_MAX, Extents, cell_masks
from .constants import CHUNK_ALIGN_BYTES, NO_SLOT, PAGE_BYTES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from .errors import CorruptionError, UsageError

# ---- size classes

ALIGN_SHIFT: Final = CHUNK_ALIGN_BYTES.bit_length() - 1

_BASES = [16 * CHUNK_ALIGN_BYTES << doublings for doublings in range(7)]
#: Chunk size of each slab class, in bytes, ascending.
CHUNK_SIZES: Final[tuple[int, ...]] = (
    *range(CHUNK_ALIGN_BYTES, _BASES[0] + 1, CHUNK_ALIGN_BYTES),
    *(base + step * (base // 16) for base in _BASES for step in range(1, 17)),
)
#: The group of all values too large for a slab. Slab classes are groups 0 to LARGE_GROUP - 1.
LARGE_GROUP: Final = len(CHUNK_SIZES)
GROUPS: Final = LARGE_GROUP + 1
#: Chunks in a slab of each class.
CHUNKS_PER_SLAB: Final[tuple[int, ...]] = tuple(SLAB_BYTES // size for size in CHUNK_SIZES)
#: Class by the value's size in units of CHUNK_ALIGN_BYTES, rounded up.
CLASS_TABLE: Final = bytes(
    bisect_left(CHUNK_SIZES, unit * CHUNK_ALIGN_BYTES) for unit in range(1 + SLAB_CHUNK_BYTES_MAX // CHUNK_ALIGN_BYTES)
)

assert CHUNK_SIZES[-1] == SLAB_CHUNK_BYTES_MAX and LARGE_GROUP <= 256
assert all(size % CHUNK_ALIGN_BYTES == 0 for size in CHUNK_SIZES)
assert CHUNKS_PER_SLAB[-1] >= 16


def class_of(n: int) -> int:
    """Return the group of a value of ``n`` bytes: a slab class or LARGE_GROUP. `UsageError` below 1 byte. O(1)."""
    if n > SLAB_CHUNK_BYTES_MAX:
        return LARGE_GROUP
    if n < 1:
        raise UsageError(f"a chunk has at least one byte, not {n}")
    return CLASS_TABLE[(n + CHUNK_ALIGN_BYTES - 1) >> ALIGN_SHIFT]


def chunk_bytes_for(n: int) -> int:
    """Return the bytes of the chunk that a value of ``n`` bytes gets. `UsageError` below 1 byte. O(1)."""
    if n > SLAB_CHUNK_BYTES_MAX:
        return (n + PAGE_BYTES - 1) & -PAGE_BYTES
    return CHUNK_SIZES[class_of(n)]


# ---- slabs

_SLAB_SHIFT: Final = SLAB_BYTES.bit_length() - 1
_SLAB_MASK: Final = SLAB_BYTES - 1
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1
_CELL_MASK: Final = (1 << (SLAB_BYTES >> _PAGE_SHIFT)) - 1

#: Owner words: below _FREE a slot, NO_SLOT allocated without owner, between them free with the next index.
_FREE: Final = 0xFFFF_0000
_NIL: Final = 0xFFFE
#: Slots that an owner word can name.
SLOTS_MAX: Final = _FREE

#: The kinds of a `Span`.
FREE: Final = 0
SLAB: Final = 1
LARGE: Final = 2

assert CHUNKS_PER_SLAB[0] <= _NIL
assert _FREE + _NIL < NO_SLOT and NO_SLOT & _NIL == _NIL


class Span(NamedTuple):
    """A part of the region between two boundaries: a free extent, a slab, or a large chunk."""

    offset: int
    size: int
    kind: int
    #: Owner of a LARGE span, size class of a SLAB, 0 for FREE.
    detail: int


class _Slab:
    """One slab: its owner words, with the list of its free chunks threaded through them."""

    __slots__ = ("base", "chunk", "count", "group", "head", "owners", "position", "used")

    def __init__(self, base: int, group: int) -> None:
        self.base = base
        self.group = group
        self.chunk = CHUNK_SIZES[group]
        self.count = count = CHUNKS_PER_SLAB[group]
        self.used = 0
        #: First free chunk's index, or _NIL.
        self.head = 0
        #: Index in its class's list of slabs with free chunks, or -1.
        self.position = -1
        self.owners = array("I", range(_FREE + 1, _FREE + 1 + count))
        self.owners[count - 1] = _FREE + _NIL

    def no_chunk(self, offset: int) -> CorruptionError:
        """Return the error for an offset in this slab at which no chunk begins."""
        return CorruptionError(f"offset {offset} is no chunk of the slab of {self.chunk}-byte ones at {self.base}")

    def relink(self) -> None:
        """Rebuild the free list from all free words, in address order. O(chunks), by numpy."""
        self.head = _NIL
        if self.used < self.count:
            words = np.frombuffer(self.owners, np.uint32)
            free = np.flatnonzero((words >= _FREE) & (words < NO_SLOT))
            words[free[:-1]] = free[1:] + _FREE
            words[free[-1]] = _FREE + _NIL
            self.head = int(free[0])


class Allocator:
    """Chunks over a region of ``size`` bytes, a multiple of 4 KiB and at least one slab.

    Offsets are bytes from the region's start. A method raises `CorruptionError` if no allocated chunk begins at the
    given offset, and has then changed nothing.
    """

    def __init__(self, size: int) -> None:
        if size % PAGE_BYTES or not SLAB_BYTES <= size <= REGION_BYTES_MAX:
            raise UsageError(
                f"a region has {SLAB_BYTES} to {REGION_BYTES_MAX} bytes in pages of {PAGE_BYTES}, not {size}"
            )
        self.size: Final = size
        self._slabs: list[_Slab | None] = [None] * ((size + _SLAB_MASK) >> _SLAB_SHIFT)
        #: Slabs with a free chunk, by class. The last one is used first.
        self._partial: list[list[_Slab]] = [[] for _ in CHUNK_SIZES]
        #: Bases of slabs made since the reader of this set last emptied it.
        self.grown: set[int] = set()
        #: Slabs without an allocated chunk, by base; in _partial as well.
        self._empty: dict[int, _Slab] = {}
        #: Allocated chunks by slab class.
        self._used = [0] * LARGE_GROUP
        #: Unused ends of the slabs that are not empty, in bytes.
        self._tail_bytes = 0
        self._extents = Extents()
        #: During recovery: a bit mask of the pages taken, per 2 MiB cell. None otherwise. See reserve().
        self._masks: dict[int, int] | None = None
        self._extents.add(0, size)

    # ---- allocation

    def alloc(self, n: int) -> int:
        """Return the offset of a fresh chunk for ``n`` bytes without an owner, -1 if only evicting makes room.

        Tries a free chunk of the class, then a new slab out of free extents, then an empty slab of another class. O(1)
        for a slab chunk, amortised over its slab; a large one costs what ``arena/extents.py`` says.
        """
        if n > SLAB_CHUNK_BYTES_MAX:
            return self._alloc_large((n + PAGE_BYTES - 1) & -PAGE_BYTES)
        if n < 1:
            raise UsageError(f"a chunk has at least one byte, not {n}")
        group = CLASS_TABLE[(n + CHUNK_ALIGN_BYTES - 1) >> ALIGN_SHIFT]
        partial = self._partial[group]
        if not partial and not self._grow(group):
            return -1
        slab = partial[-1]
        owners = slab.owners
        index = slab.head
        slab.head = head = owners[index] & 0xFFFF
        owners[index] = NO_SLOT
        if head == _NIL:
            partial.pop()
            slab.position = -1
        if not slab.used:
            del self._empty[slab.base]
            self._tail_bytes += SLAB_BYTES - slab.count * slab.chunk
        slab.used += 1
        self._used[group] += 1
        return slab.base + index * slab.chunk

    def alloc_many(self, n: int, count: int) -> list[int]:
        """Return up to ``count`` chunks for ``n`` bytes each, as `alloc` finds them.

        Fewer if only evicting makes room. O(1) per chunk.
        """
        offsets: list[int] = []
        while len(offsets) < count:
            offset = self.alloc(n)
            if offset < 0:
                break
            offsets.append(offset)
            slab = self._slabs[offset >> _SLAB_SHIFT]
            if slab is None:
                continue
            # Take the rest from the same slab: `alloc` has removed it from the list of empty ones.
            owners, base, chunk, head = slab.owners, slab.base, slab.chunk, slab.head
            taken = 0
            wanted = count - len(offsets)
            while taken < wanted and head != _NIL:
                offsets.append(base + head * chunk)
                following = owners[head] & 0xFFFF
                owners[head] = NO_SLOT
                head = following
                taken += 1
            if taken:
                slab.head = head
                slab.used += taken
                self._used[slab.group] += taken
                if head == _NIL:
                    self._partial[slab.group].pop()
                    slab.position = -1
        return offsets

    def free(self, offset: int) -> int:
        """Free an allocated chunk, and return its owner (a slot or NO_SLOT). O(1) for a slab chunk."""
        if self._masks is not None:
            self.end_recovery()
        slab = self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None
        if slab is None:
            return self._extents.release(offset)
        chunk = slab.chunk
        index = (offset - slab.base) // chunk
        if slab.base + index * chunk != offset or index >= slab.count:
            raise slab.no_chunk(offset)
        owners = slab.owners
        slot = owners[index]
        if _FREE <= slot < NO_SLOT:
            raise CorruptionError(f"chunk at {offset} is free already")
        head = slab.head
        owners[index] = _FREE + head
        slab.head = index
        if head == _NIL:
            partial = self._partial[slab.group]
            slab.position = len(partial)
            partial.append(slab)
        slab.used -= 1
        self._used[slab.group] -= 1
        if not slab.used:
            self._empty[slab.base] = slab
            self._tail_bytes -= SLAB_BYTES - slab.count * chunk
        return slot

    def free_slab(self, base: int) -> None:
        """Free all chunks of the slab at ``base``, and its room for all classes, as `free` does for each. O(1)."""
        slab = self._slab_based(base)
        if slab.used:
            self._used[slab.group] -= slab.used
            self._tail_bytes -= SLAB_BYTES - slab.count * slab.chunk
            self._empty[base] = slab
        self._dissolve(slab)
        self._extents.add(base, SLAB_BYTES)

    def set_owner(self, offset: int, slot: int) -> int:
        """Set the owner of an allocated chunk (NO_SLOT: none), and return the chunk's group. O(1).

        An owned chunk passes to another slot only through NO_SLOT; otherwise `CorruptionError`, as two entries would
        share one chunk.
        """
        slab = self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None
        if not 0 <= slot < SLOTS_MAX and slot != NO_SLOT:
            raise UsageError(f"{slot} is no slot number")
        if slab is None:
            self._extents.set_owner(offset, slot)
            return LARGE_GROUP
        index = (offset - slab.base) // slab.chunk
        if slab.base + index * slab.chunk != offset or index >= slab.count:
            raise slab.no_chunk(offset)
        owner = slab.owners[index]
        if owner != NO_SLOT:
            if owner >= _FREE:
                raise CorruptionError(f"chunk at {offset} is free")
            if slot != NO_SLOT:
                raise CorruptionError(f"chunk at {offset} is owned by {owner}, not free for {slot}")
        slab.owners[index] = slot
        return slab.group

    def disown(self, offsets: Sequence[int], slots: Sequence[int]) -> None:
        """Take chunks of slabs from their owners. Each is granted again without having been free. O(1) each."""
        for offset, slot in zip(offsets, slots):
            slab = self._slabs[offset >> _SLAB_SHIFT]
            index = -1 if slab is None else (offset - slab.base) // slab.chunk
            if slab is None or slab.base + index * slab.chunk != offset or slab.owners[index] != slot:
                raise CorruptionError(f"chunk at {offset} is not owned by {slot}")
            slab.owners[index] = NO_SLOT

    # ---- one chunk

    def owner(self, offset: int) -> int:
        """Return the owner of the allocated chunk at ``offset``: a slot, or NO_SLOT. O(1)."""
        slab = self._slab_at(offset)
        return self._extents.owner(offset) if slab is None else self._word(slab, offset)

    def chunk_bytes(self, offset: int) -> int:
        """Return the bytes of the allocated chunk at ``offset``. O(1)."""
        slab = self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None
        if slab is None:
            return self._extents.size_of(offset)
        self._word(slab, offset)
        return slab.chunk

    # ---- spans: the region in address order

    def span_of(self, offset: int) -> Span:
        """Return the span of an allocated chunk: its slab, or itself if it is large. O(1)."""
        slab = self._slab_at(offset)
        if slab is None:
            self._extents.size_of(offset)  # raises if there is none
            return self.span_at(offset)
        self._word(slab, offset)
        return self.span_at(slab.base)

    def span_at(self, boundary: int) -> Span:
        """Return the span that begins at ``boundary``. O(1). `CorruptionError` if none does."""
        if self._masks is not None:
            self.end_recovery()
        slab = self._slab_at(boundary)
        if slab is not None and slab.base == boundary:
            return Span(boundary, SLAB_BYTES, SLAB, slab.group)
        extents = self._extents
        if extents.is_large(boundary):
            return Span(boundary, extents.size_of(boundary), LARGE, extents.owner(boundary))
        if (size := extents.free.get(boundary)) is not None:
            return Span(boundary, size, FREE, 0)
        raise CorruptionError(f"no span begins at offset {boundary}")

    def span_before(self, boundary: int) -> Span:
        """Return the span that ends at ``boundary``, which is not 0. O(1). `CorruptionError` if none does."""
        self.end_recovery()
        return self.span_at(self._extents.ends.get(boundary, boundary - SLAB_BYTES))

    def boundary_before(self, at: int) -> int:
        """Return the last boundary at or before ``at``, whole pages below the size. O(pages between)."""
        if (slab := self._slab_at(at)) is not None:
            return slab.base
        while at and at not in self._extents.ends and self._slabs[(at - 1) >> _SLAB_SHIFT] is None:
            at -= PAGE_BYTES
        return at

    def walk(self, boundary: int = 0) -> Iterator[Span]:
        """Yield all spans in address order from ``boundary`` on. The caller changes nothing meanwhile. O(1) each."""
        while boundary < self.size:
            span = self.span_at(boundary)
            yield span
            boundary += span.size

    def largest_free(self, most: int) -> list[Span]:
        """Return the largest free extents, at most ``most``. O(``most``)."""
        self.end_recovery()
        return [self.span_at(offset) for offset in self._extents.largest(most)]

    # ---- one slab

    def chunks_of_slab(self, base: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, owner) of the slab's allocated chunks. The caller changes nothing meanwhile. O(chunks)."""
        slab = self._slab_based(base)
        for index, word in enumerate(slab.owners):
            if word < _FREE or word == NO_SLOT:
                yield base + index * slab.chunk, word

    def used_of_slab(self, base: int) -> int:
        """Return the number of allocated chunks of the slab at ``base``. O(1)."""
        return self._slab_based(base).used

    def class_of_slab(self, base: int) -> int:
        """Return the size class of the slab at ``base``, -1 if there is none. O(1)."""
        slab = self._slabs[base >> _SLAB_SHIFT]
        return -1 if slab is None else slab.group

    def sample_of_slab(self, base: int, most: int) -> list[int]:
        """Return owners of chunks of the slab at ``base``, evenly spread over ``most`` to ``2 * most`` of them.

        If no sampled chunk has an owner, return all owners. O(``most``), O(chunks) in that case.
        """
        owners = self._slab_based(base).owners
        found = [word for word in owners[:: max(1, len(owners) // most)] if word < _FREE]
        return found or [word for word in owners if word < _FREE]

    def unowned_of_slab(self, base: int) -> int:
        """Return the number of allocated chunks without owner in the slab at ``base``. O(chunks), at C speed."""
        return self._slab_based(base).owners.count(NO_SLOT)

    def owners_of_slab(self, base: int) -> NDArray[np.int64]:
        """Return the slots that own a chunk of the slab at ``base``. O(chunks), by numpy."""
        words = np.frombuffer(self._slab_based(base).owners, np.uint32)
        return words[words < _FREE].astype(np.int64)

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield (base, size class) of all slabs in address order. O(1) each."""
        for slab in self._slabs:
            if slab is not None:
                yield slab.base, slab.group

    # ---- recovery

    def reserve(self, offset: int, chunk_bytes: int) -> None:
        """Mark the chunk at ``offset`` allocated without owner: the first step of recovery, in any order.

        ``chunk_bytes`` is what `chunk_bytes` returned for it before. `CorruptionError`, with nothing changed, if that
        is no chunk size, the place is impossible, or the chunk overlaps one reserved before. Amortised O(1); a large
        one O(bytes / 2 MiB).

        Recovery keeps no free lists, only a mask of the pages taken in each 2 MiB cell: slots come in random order, and
        a sorted list of extents would cost quadratic time. `end_recovery` builds the lists, which the first alloc, free
        or walk does else, and a later reserve drops them again. Reserve all chunks first.
        """
        masks = self._masks
        if masks is None:
            masks = self._drop_free_lists()
        if chunk_bytes < 1 or chunk_bytes_for(chunk_bytes) != chunk_bytes:
            raise CorruptionError(f"{chunk_bytes} bytes are no chunk size")
        if not 0 <= offset <= self.size - chunk_bytes:
            raise CorruptionError(f"chunk of {chunk_bytes} bytes at {offset} leaves the region")
        group = class_of(chunk_bytes)
        if group == LARGE_GROUP:
            self._reserve_large(offset, chunk_bytes, masks)
            return
        cell = offset >> _SLAB_SHIFT
        base = cell << _SLAB_SHIFT
        index = (offset - base) // chunk_bytes
        if base + index * chunk_bytes != offset or index >= CHUNKS_PER_SLAB[group] or base + SLAB_BYTES > self.size:
            raise CorruptionError(f"no slab has a chunk of {chunk_bytes} bytes at {offset}")
        slab = self._slabs[cell]
        if slab is None:
            if cell in masks:
                raise CorruptionError(f"chunk of {chunk_bytes} bytes at {offset} lies in a larger chunk")
            masks[cell] = _CELL_MASK
            slab = self._slabs[cell] = _Slab(base, group)
            self.grown.add(base)
            self._tail_bytes += SLAB_BYTES - slab.count * slab.chunk
        elif slab.group != group or not _FREE <= slab.owners[index] < NO_SLOT:
            raise CorruptionError(f"chunk of {chunk_bytes} bytes at {offset} overlaps another one")
        slab.owners[index] = NO_SLOT
        slab.used += 1
        self._used[group] += 1

    def reserve_slab(self, base: int, group: int, indices: NDArray[np.int64], owners: NDArray[np.int64]) -> bool:
        """Do `reserve` and `set_owner` for all chunks of a slab. Return False, with nothing changed, if it is in use.

        The caller guarantees that ``base``, the distinct ``indices`` and the slot numbers are possible. O(chunks).
        """
        masks = self._masks
        if masks is None:
            masks = self._drop_free_lists()
        cell = base >> _SLAB_SHIFT
        if cell in masks:
            return False
        masks[cell] = _CELL_MASK
        slab = self._slabs[cell] = _Slab(base, group)
        self.grown.add(base)
        self._tail_bytes += SLAB_BYTES - slab.count * slab.chunk
        np.frombuffer(slab.owners, np.uint32)[indices] = owners
        slab.used = len(indices)
        self._used[group] += len(indices)
        return True

    def _reserve_large(self, offset: int, size: int, masks: dict[int, int]) -> None:
        if offset % PAGE_BYTES:
            raise CorruptionError(f"large chunk at {offset} is not aligned to {PAGE_BYTES}")
        parts = list(cell_masks(offset, offset + size))
        if any(masks.get(cell, 0) & part for cell, part in parts):
            raise CorruptionError(f"chunk of {size} bytes at {offset} overlaps another one")
        masks |= {cell: masks.get(cell, 0) | part for cell, part in parts}
        self._extents.reserve(offset, size)

    def _drop_free_lists(self) -> dict[int, int]:
        """Begin a recovery: replace all free lists and empty slabs by masks of the pages in use. O(n)."""
        for slab in list(self._empty.values()):
            self._dissolve(slab)
        for partial in self._partial:
            for slab in partial:
                slab.position = -1
            partial.clear()
        self._extents.drop_free()
        masks = {cell: _CELL_MASK for cell, slab in enumerate(self._slabs) if slab is not None}
        for offset, size in self._extents.large():
            for cell, part in cell_masks(offset, offset + size):
                masks[cell] = masks.get(cell, 0) | part
        self._masks = masks
        return masks

    def end_recovery(self) -> None:
        """Build the free lists from the reserved chunks, if a recovery is under way. O(n log n), else O(1)."""
        if self._masks is None:
            return
        self._masks = None
        for slab in self._slabs:
            if slab is not None:
                slab.relink()
                if slab.head != _NIL:
                    partial = self._partial[slab.group]
                    slab.position = len(partial)
                    partial.append(slab)
        self._extents.rebuild_free((base for base, _ in self.slabs()), self.size)

    # ---- totals

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated chunks. O(classes)."""
        return self._extents.large_bytes + sum(map(int.__mul__, self._used, CHUNK_SIZES))

    @property
    def free_bytes(self) -> int:
        """Bytes of the region without allocated chunks and the unused ends of their slabs. O(classes)."""
        return self.size - self.used_bytes - self._tail_bytes

    # ---- slabs, inside

    def _slab_at(self, offset: int) -> _Slab | None:
        return self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None

    def _slab_based(self, base: int) -> _Slab:
        slab = self._slab_at(base)
        if slab is None or slab.base != base:
            raise CorruptionError(f"no slab begins at offset {base}")
        return slab

    def _word(self, slab: _Slab, offset: int) -> int:
        """Return the owner word of an allocated chunk in ``slab``."""
        index = (offset - slab.base) // slab.chunk
        if slab.base + index * slab.chunk != offset or index >= slab.count:
            raise slab.no_chunk(offset)
        word = slab.owners[index]
        if _FREE <= word < NO_SLOT:
            raise CorruptionError(f"chunk at {offset} is free")
        return word

    def _grow(self, group: int) -> bool:
        """Put a slab with a free chunk on the class's list. Return False if there is no room for one."""
        if self._masks is not None:
            self.end_recovery()
            if self._partial[group]:
                return True
        extents = self._extents
        base = extents.take_slab() if extents.slab_hint else -1
        if base < 0:
            if not self._empty:
                return False
            base, empty = next(iter(self._empty.items()))
            self._dissolve(empty)
        slab = self._slabs[base >> _SLAB_SHIFT] = _Slab(base, group)
        self.grown.add(base)
        self._empty[base] = slab
        partial = self._partial[group]
        slab.position = len(partial)
        partial.append(slab)
        return True

    def _dissolve(self, slab: _Slab) -> None:
        """Forget an empty slab. The caller places its 2 MiB."""
        if slab.position >= 0:
            partial = self._partial[slab.group]
            if (last := partial.pop()) is not slab:
                partial[slab.position] = last
                last.position = slab.position
        self._slabs[slab.base >> _SLAB_SHIFT] = None
        del self._empty[slab.base]

    def _alloc_large(self, size: int) -> int:
        self.end_recovery()
        start = self._extents.allocate(size)
        if start < 0 and self._empty:
            # All if one is too small: they may join, and evicting looks for room beside free extents, not empty slabs.
            slabs = list(islice(self._empty.values(), 1 if size <= SLAB_BYTES else None))
            for slab in slabs:
                self._dissolve(slab)
            self._extents.add_slabs([slab.base for slab in slabs])
            start = self._extents.allocate(size)
        return start
