"""Chunks of the data region: slabs of equal chunks for small values, extents for large ones.

What a chunk is
---------------
A chunk is the room of one value: ``chunk_bytes`` bytes from ``offset``, both relative to the data region. It
is free, or allocated; an allocated chunk belongs to a table slot (its *owner*), or to nobody yet or any
more (``NO_SLOT``: it is granted to a client, or quarantined). This module knows no reason for either; it only
answers who owns what, and refuses what contradicts itself. All of it lies in the worker's private memory and
is rebuilt from the slots after a crash (`Allocator.reserve`), so it is never read by anybody else.

Layout::

    0        2 MiB     4 MiB                          8 MiB           size
    +--------+---------+-----------------------+------+----------------+
    | slab   | slab    | large value           | free | large    | free |
    | 4 KiB  | 100 KiB |                       |      |          |      |
    +--------+---------+-----------------------+------+----------------+

Slabs lie at multiples of ``SLAB_BYTES`` and each holds chunks of one size class from its start on, so the
slab of a chunk and the chunk's index in it follow from the offset alone: recovery needs no other record,
and every lookup is a shift, a subtraction and a division.

Chunks of small values come in size classes (``sizes.py``), 16 of them or more to a slab.

Larger values get an extent: 4 KiB granularity (waste below 3.1%), best fit, neighbours joined on free.
Slabs come out of the same extents, from their high end, while values are cut from the low end: it keeps
the two kinds apart for longer. An empty slab goes back only when somebody needs the room, because the
usual next request is for the same class again.

What it costs
-------------
Four bytes per chunk of a slab (the owner word, which in a free chunk is the link to the next free one), about
200 bytes per slab, and about 300 per large value (two dict entries), which is 0.2% of it at most. `alloc`
and `free` of a slab chunk are O(1), a few hundred nanoseconds. Extents cost O(log f) comparisons and a
memory move of 8 f bytes for f free extents.

What can go wrong is above all a caller's double free: two values in one chunk, and bytes of one served
for the other. So each call looks at the owner word first and raises `CorruptionError` before it has changed
anything.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Final, NamedTuple

from simm.constants import CHUNK_ALIGN_BYTES, NO_SLOT, PAGE_BYTES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.errors import CorruptionError, UsageError
from simm.sizes import (
    ALIGN_SHIFT,
    CHUNK_SIZES,
    CHUNKS_PER_SLAB,
    CLASS_TABLE,
    GROUPS,
    LARGE_GROUP,
    chunk_bytes_for,
    class_of,
)

_SLAB_SHIFT: Final = SLAB_BYTES.bit_length() - 1
_SLAB_MASK: Final = SLAB_BYTES - 1
_PAGE_SHIFT: Final = PAGE_BYTES.bit_length() - 1
_SLAB_PAGES: Final = SLAB_BYTES >> _PAGE_SHIFT
_CELL_MASK: Final = (1 << _SLAB_PAGES) - 1

#: Owner words: below _FREE a slot, NO_SLOT allocated without owner, between them free with the next index.
_FREE: Final = 0xFFFF_0000
_NIL: Final = 0xFFFE
#: Slots that an owner word can name.
SLOTS_MAX: Final = _FREE
#: In the sorted list of free extents a key is pages << 32 | first page: regions up to 16 TiB.
_KEY_SHIFT: Final = 32
_KEY_MASK: Final = (1 << _KEY_SHIFT) - 1
REGION_BYTES_MAX: Final = PAGE_BYTES << _KEY_SHIFT

#: The kinds of a `Span`.
FREE: Final = 0
SLAB: Final = 1
LARGE: Final = 2


assert CHUNKS_PER_SLAB[0] <= _NIL
assert _FREE + _NIL < NO_SLOT and NO_SLOT & _NIL == _NIL


class Span(NamedTuple):
    """A stretch of the region between two boundaries: a free extent, a slab, or a large chunk."""

    offset: int
    size: int
    kind: int
    #: Owner of a LARGE span, size class of a SLAB, 0 for FREE.
    detail: int


class ClassStats(NamedTuple):
    """Chunks of one group. For LARGE_GROUP chunk_bytes and slabs are 0."""

    group: int
    chunk_bytes: int
    slabs: int
    used_chunks: int
    free_chunks: int
    used_bytes: int


class _Slab:
    """One slab: its owner words and the list of its free chunks threaded through them."""

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
        """The error for an offset in this slab at which no chunk begins."""
        return CorruptionError(f"offset {offset} is no chunk of the slab of {self.chunk}-byte ones at {self.base}")

    def relink(self) -> None:
        """Thread the free list anew through all free words, in address order. O(chunks)."""
        owners = self.owners
        head = _NIL
        if self.used < self.count:
            for index in range(self.count - 1, -1, -1):
                if _FREE <= owners[index] < NO_SLOT:
                    owners[index] = _FREE + head
                    head = index
        self.head = head


class Allocator:
    """Chunks over a region of ``size`` bytes, a multiple of 4 KiB and at least one slab.

    Offsets are bytes from the region's start. Methods raise `CorruptionError` for an offset that is not that
    of an allocated chunk, and then have changed nothing.
    """

    def __init__(self, size: int) -> None:
        if size % PAGE_BYTES or not SLAB_BYTES <= size <= REGION_BYTES_MAX:
            raise UsageError(
                f"a region has {SLAB_BYTES} to {REGION_BYTES_MAX} bytes in pages of {PAGE_BYTES}, not {size}"
            )
        self.size: Final = size
        self._slabs: list[_Slab | None] = [None] * ((size + _SLAB_MASK) >> _SLAB_SHIFT)
        #: Per class the slabs with a free chunk; the last one is used first.
        self._partial: list[list[_Slab]] = [[] for _ in CHUNK_SIZES]
        #: Slabs without an allocated chunk, by base. Each is in its class's _partial as well.
        self._empty: dict[int, _Slab] = {}
        self._slab_count = [0] * LARGE_GROUP
        self._used = [0] * GROUPS
        #: Unused ends of the slabs that are not empty, in bytes.
        self._tail_bytes = 0
        #: Large chunks: offset -> pages << 32 | owner.
        self._large: dict[int, int] = {}
        self._large_bytes = 0
        #: Free extents: offset -> bytes, and their keys sorted by size, then offset.
        self._free: dict[int, int] = {}
        self._by_size: list[int] = []
        #: End -> offset, of large chunks and free extents (slabs need none).
        self._ends: dict[int, int] = {}
        #: False once a search found no aligned slab in any free extent, until one of a slab's size appears.
        self._slab_hint = True
        #: While recovering: pages taken, as a bit mask per 2 MiB cell; None otherwise. See reserve().
        self._masks: dict[int, int] | None = None
        self._insert_free(0, size)

    # ---- allocation

    def alloc(self, n: int) -> int:
        """Offset of a fresh chunk for ``n`` bytes, owned by nobody, or -1 where only evicting makes room.

        Looks in this order: a free chunk of the class, a new slab out of free extents, an empty slab of
        another class. O(1) for a slab chunk, amortised over its slab; for a large one see the module's text.
        """
        if n > SLAB_CHUNK_BYTES_MAX:
            return self._alloc_large((n + PAGE_BYTES - 1) >> _PAGE_SHIFT)
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
        """Up to ``count`` chunks for ``n`` bytes each, as `alloc` finds them; fewer where only evicting makes room.

        O(1) a chunk: 0.2 us each for a slab class out of one slab, where `alloc` takes 0.35 (CPython 3.11).
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
            # The rest from the same slab: the first one has taken it off the list of empty ones.
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
        """Give back an allocated chunk; returns who owned it (a slot or NO_SLOT). O(1) for a slab chunk."""
        if self._masks is not None:
            self._settle()
        slab = self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None
        if slab is None:
            return self._free_large(offset)
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

    def set_owner(self, offset: int, slot: int) -> int:
        """Name the owner of an allocated chunk (NO_SLOT: nobody any more); returns the chunk's group. O(1).

        An owned chunk passes to another slot only by way of NO_SLOT; else `CorruptionError`, as two entries
        would share one chunk.
        """
        slab = self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None
        if not 0 <= slot < SLOTS_MAX and slot != NO_SLOT:
            raise UsageError(f"{slot} is no slot number")
        if slab is None:
            word = self._large_word(offset)
            if slot != NO_SLOT and word & _KEY_MASK != NO_SLOT:
                raise CorruptionError(f"chunk at {offset} is owned by {word & _KEY_MASK}, not free for {slot}")
            self._large[offset] = word >> _KEY_SHIFT << _KEY_SHIFT | slot
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

    # ---- questions about one chunk

    def owner(self, offset: int) -> int:
        """Owner of the allocated chunk at ``offset``: a slot, or NO_SLOT. O(1)."""
        slab = self._slab_at(offset)
        if slab is None:
            return self._large_word(offset) & _KEY_MASK
        return self._word(slab, offset)

    def chunk_bytes(self, offset: int) -> int:
        """Bytes of the allocated chunk at ``offset``. O(1)."""
        slab = self._slab_at(offset)
        if slab is None:
            return self._large_word(offset) >> _KEY_SHIFT << _PAGE_SHIFT
        self._word(slab, offset)
        return slab.chunk

    def is_allocated(self, offset: int) -> bool:
        """Whether an allocated chunk begins at ``offset``. O(1)."""
        try:
            self.owner(offset)
        except CorruptionError:
            return False
        return True

    # ---- spans: the region in address order

    def span_of(self, offset: int) -> Span:
        """The span that an allocated chunk lies in: its slab, or itself if it is large. O(1)."""
        slab = self._slab_at(offset)
        if slab is None:
            self._large_word(offset)
            return self.span_at(offset)
        self._word(slab, offset)
        return self.span_at(slab.base)

    def span_at(self, boundary: int) -> Span:
        """The span that begins at ``boundary``. O(1). `CorruptionError` where no span begins."""
        if self._masks is not None:
            self._settle()
        slab = self._slab_at(boundary)
        if slab is not None and slab.base == boundary:
            return Span(boundary, SLAB_BYTES, SLAB, slab.group)
        word = self._large.get(boundary)
        if word is not None:
            return Span(boundary, word >> _KEY_SHIFT << _PAGE_SHIFT, LARGE, word & _KEY_MASK)
        size = self._free.get(boundary)
        if size is not None:
            return Span(boundary, size, FREE, 0)
        raise CorruptionError(f"no span begins at offset {boundary}")

    def span_before(self, boundary: int) -> Span:
        """The span that ends at ``boundary``, which is not 0. O(1). `CorruptionError` where no span ends."""
        if self._masks is not None:
            self._settle()
        start = self._ends.get(boundary)
        return self.span_at(boundary - SLAB_BYTES if start is None else start)

    def walk(self, boundary: int = 0) -> Iterator[Span]:
        """All spans in address order from ``boundary`` on. No changes meanwhile. O(1) a span."""
        while boundary < self.size:
            span = self.span_at(boundary)
            yield span
            boundary += span.size

    def chunks_of_slab(self, base: int) -> Iterator[tuple[int, int]]:
        """(offset, owner) of the allocated chunks of the slab at ``base``. No changes meanwhile. O(chunks)."""
        slab = self._slab_based(base)
        for index, word in enumerate(slab.owners):
            if word < _FREE or word == NO_SLOT:
                yield base + index * slab.chunk, word

    def used_of_slab(self, base: int) -> int:
        """Number of allocated chunks of the slab at ``base``. O(1)."""
        return self._slab_based(base).used

    def unowned_of_slab(self, base: int) -> int:
        """Number of allocated chunks without owner in the slab at ``base``. O(chunks), at C speed."""
        return self._slab_based(base).owners.count(NO_SLOT)

    def large_chunks(self) -> Iterator[tuple[int, int]]:
        """(offset, owner) of the large chunks in no order. No changes meanwhile. O(1) each."""
        for offset, word in self._large.items():
            yield offset, word & _KEY_MASK

    # ---- recovery

    def reserve(self, offset: int, chunk_bytes: int) -> None:
        """Mark the chunk at ``offset`` allocated and owned by nobody yet: recovery's first step, in any order.

        ``chunk_bytes`` is what `chunk_bytes` said of it before. `CorruptionError`, and nothing changed,
        where that is no chunk size, the place is impossible or the chunk contradicts one reserved before.
        Amortised O(1) (a large one: O(bytes / 2 MiB)).

        During recovery there are no free lists, only a mask of the taken pages of each 2 MiB cell: slots
        come in random order, and keeping a sorted list of extents through it is quadratic. The first alloc,
        free or walk builds the lists, in O(n log n), and a later reserve drops them again: reserve
        everything first.
        """
        masks = self._masks
        if masks is None:
            masks = self._unsettle()
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
            self._slab_count[group] += 1
            self._tail_bytes += SLAB_BYTES - slab.count * slab.chunk
        elif slab.group != group or not _FREE <= slab.owners[index] < NO_SLOT:
            raise CorruptionError(f"chunk of {chunk_bytes} bytes at {offset} contradicts another one")
        slab.owners[index] = NO_SLOT
        slab.used += 1
        self._used[group] += 1

    # ---- totals

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated chunks. O(classes)."""
        return self._large_bytes + sum(map(int.__mul__, self._used, CHUNK_SIZES))

    @property
    def free_bytes(self) -> int:
        """The region less all chunks in use and the unused ends of the slabs they lie in, in bytes. O(classes)."""
        return self.size - self.used_bytes - self._tail_bytes

    def group_bytes(self, group: int) -> int:
        """Bytes of the allocated chunks of one group. O(1)."""
        return self._large_bytes if group == LARGE_GROUP else self._used[group] * CHUNK_SIZES[group]

    def stats(self) -> list[ClassStats]:
        """One line per group that has a chunk or a slab. O(classes)."""
        lines = [
            ClassStats(group, size, slabs, used, slabs * CHUNKS_PER_SLAB[group] - used, used * size)
            for group, (size, slabs, used) in enumerate(zip(CHUNK_SIZES, self._slab_count, self._used))
            if slabs
        ]
        if self._large:
            lines.append(ClassStats(LARGE_GROUP, 0, 0, len(self._large), 0, self._large_bytes))
        return lines

    # ---- slabs

    def _slab_at(self, offset: int) -> _Slab | None:
        return self._slabs[offset >> _SLAB_SHIFT] if 0 <= offset < self.size else None

    def _slab_based(self, base: int) -> _Slab:
        slab = self._slab_at(base)
        if slab is None or slab.base != base:
            raise CorruptionError(f"no slab begins at offset {base}")
        return slab

    def _word(self, slab: _Slab, offset: int) -> int:
        """Owner word of an allocated chunk in ``slab``."""
        index = (offset - slab.base) // slab.chunk
        if slab.base + index * slab.chunk != offset or index >= slab.count:
            raise slab.no_chunk(offset)
        word = slab.owners[index]
        if _FREE <= word < NO_SLOT:
            raise CorruptionError(f"chunk at {offset} is free")
        return word

    def _grow(self, group: int) -> bool:
        """Put a slab with a free chunk on the class's list; False if there is no room for one."""
        if self._masks is not None:
            self._settle()
            if self._partial[group]:
                return True
        base = self._carve_slab() if self._slab_hint else -1
        if base < 0:
            if not self._empty:
                return False
            base, empty = next(iter(self._empty.items()))
            self._dissolve(empty)
        slab = self._slabs[base >> _SLAB_SHIFT] = _Slab(base, group)
        self._empty[base] = slab
        self._slab_count[group] += 1
        partial = self._partial[group]
        slab.position = len(partial)
        partial.append(slab)
        return True

    def _dissolve(self, slab: _Slab) -> None:
        """Forget an empty slab; its 2 MiB are then nobody's, and the caller's to place."""
        if slab.position >= 0:
            partial = self._partial[slab.group]
            last = partial.pop()
            if last is not slab:
                partial[slab.position] = last
                last.position = slab.position
        self._slab_count[slab.group] -= 1
        self._slabs[slab.base >> _SLAB_SHIFT] = None
        del self._empty[slab.base]

    def _carve_slab(self) -> int:
        """Take an aligned 2 MiB out of the smallest free extent that contains one; -1 if none does."""
        by_size = self._by_size
        for position in range(bisect_left(by_size, _SLAB_PAGES << _KEY_SHIFT), len(by_size)):
            start = (by_size[position] & _KEY_MASK) << _PAGE_SHIFT
            end = start + self._free[start]
            base = (end & ~_SLAB_MASK) - SLAB_BYTES
            if base >= start:
                self._remove_free(start)
                if start < base:
                    self._put_free(start, base - start)
                if base + SLAB_BYTES < end:
                    self._put_free(base + SLAB_BYTES, end - base - SLAB_BYTES)
                return base
        self._slab_hint = False
        return -1

    # ---- extents

    def _alloc_large(self, pages: int) -> int:
        if self._masks is not None:
            self._settle()
        by_size = self._by_size
        position = bisect_left(by_size, pages << _KEY_SHIFT)
        if position == len(by_size):
            if not self._empty:
                return -1
            for slab in list(self._empty.values()):
                self._dissolve(slab)
                self._insert_free(slab.base, SLAB_BYTES)
            position = bisect_left(by_size, pages << _KEY_SHIFT)
            if position == len(by_size):
                return -1
        start = (by_size[position] & _KEY_MASK) << _PAGE_SHIFT
        size = pages << _PAGE_SHIFT
        left = self._free[start] - size
        self._remove_free(start)
        if left:
            self._put_free(start + size, left)
        self._large[start] = pages << _KEY_SHIFT | NO_SLOT
        self._ends[start + size] = start
        self._large_bytes += size
        self._used[LARGE_GROUP] += 1
        return start

    def _large_word(self, offset: int) -> int:
        word = self._large.get(offset)
        if word is None:
            raise CorruptionError(f"no chunk is allocated at offset {offset}")
        return word

    def _free_large(self, offset: int) -> int:
        word = self._large_word(offset)
        size = word >> _KEY_SHIFT << _PAGE_SHIFT
        del self._large[offset]
        del self._ends[offset + size]
        self._large_bytes -= size
        self._used[LARGE_GROUP] -= 1
        self._insert_free(offset, size)
        return word & _KEY_MASK

    def _insert_free(self, start: int, size: int) -> None:
        """Add a free extent, joined with the free neighbours it has."""
        before = self._ends.get(start, -1)
        if before in self._free:
            size += self._free[before]
            self._remove_free(before)
            start = before
        behind = self._free.get(start + size)
        if behind is not None:
            self._remove_free(start + size)
            size += behind
        self._put_free(start, size)
        if size >= SLAB_BYTES:
            self._slab_hint = True

    def _put_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._ends[start + size] = start
        insort(self._by_size, _key(start, size))

    def _remove_free(self, start: int) -> None:
        size = self._free.pop(start)
        del self._ends[start + size]
        key = _key(start, size)
        position = bisect_left(self._by_size, key)
        if position == len(self._by_size) or self._by_size[position] != key:
            raise CorruptionError(f"free extent of {size} bytes at {start} is missing from the list by size")
        del self._by_size[position]

    # ---- recovery, inside

    def _reserve_large(self, offset: int, size: int, masks: dict[int, int]) -> None:
        if offset % PAGE_BYTES:
            raise CorruptionError(f"large chunk at {offset} is not aligned to {PAGE_BYTES}")
        parts = list(_cell_masks(offset, offset + size))
        if any(masks.get(cell, 0) & part for cell, part in parts):
            raise CorruptionError(f"chunk of {size} bytes at {offset} contradicts another one")
        for cell, part in parts:
            masks[cell] = masks.get(cell, 0) | part
        self._large[offset] = size >> _PAGE_SHIFT << _KEY_SHIFT | NO_SLOT
        self._ends[offset + size] = offset
        self._large_bytes += size
        self._used[LARGE_GROUP] += 1

    def _unsettle(self) -> dict[int, int]:
        """Drop all free lists and empty slabs, and mark the pages in use in masks instead. O(n)."""
        for slab in list(self._empty.values()):
            self._dissolve(slab)
        for partial in self._partial:
            for slab in partial:
                slab.position = -1
            partial.clear()
        for start, size in self._free.items():
            del self._ends[start + size]
        self._free.clear()
        self._by_size.clear()
        masks = {cell: _CELL_MASK for cell, slab in enumerate(self._slabs) if slab is not None}
        for offset, word in self._large.items():
            for cell, part in _cell_masks(offset, offset + (word >> _KEY_SHIFT << _PAGE_SHIFT)):
                masks[cell] = masks.get(cell, 0) | part
        self._masks = masks
        return masks

    def _settle(self) -> None:
        """End a recovery: build the free lists from what is reserved. O(n log n)."""
        self._masks = None
        for slab in self._slabs:
            if slab is not None:
                slab.relink()
                if slab.head != _NIL:
                    partial = self._partial[slab.group]
                    slab.position = len(partial)
                    partial.append(slab)
        taken = [(slab.base, slab.base + SLAB_BYTES) for slab in self._slabs if slab is not None]
        taken.extend((start, end) for end, start in self._ends.items())
        taken.sort()
        taken.append((self.size, self.size))
        position = 0
        for start, end in taken:
            if start > position:
                self._free[position] = start - position
                self._ends[start] = position
                self._by_size.append(_key(position, start - position))
            position = end
        self._by_size.sort()
        self._slab_hint = True

    # ---- self-examination

    def check(self) -> None:
        """Raise `CorruptionError` on the first contradiction in the structure. Ends a recovery. O(chunks)."""
        if self._masks is not None:
            self._settle()
        self._check_slabs()
        position = 0
        kinds = [0, 0, 0]
        previous = -1
        while position < self.size:
            start, size, kind, _ = self.span_at(position)
            position += size
            where = f"span at {start}"
            _demand(size > 0 and size % PAGE_BYTES == 0, f"{where} has an odd size")
            _demand(not kind == FREE == previous, f"{where} is not joined with the free one before it")
            if kind != SLAB:
                _demand(self._ends.get(position) == start, f"{where} has an unknown end")
                cells = range(start >> _SLAB_SHIFT, (position - 1 >> _SLAB_SHIFT) + 1)
                _demand(all(self._slabs[cell] is None for cell in cells), f"{where} overlaps a slab")
            kinds[kind] += 1
            previous = kind
        _demand(position == self.size, "the last span leaves the region")
        _demand(kinds[FREE] == len(self._free) == len(self._by_size), "free extents that no walk meets")
        _demand(kinds[LARGE] == len(self._large) == self._used[LARGE_GROUP], "large chunks no walk meets")
        _demand(len(self._ends) == kinds[FREE] + kinds[LARGE], "ends of spans that are no more")
        keys = sorted(_key(start, size) for start, size in self._free.items())
        _demand(keys == self._by_size, "the list of free extents by size is wrong")
        sizes = sum(word >> _KEY_SHIFT << _PAGE_SHIFT for word in self._large.values())
        _demand(sizes == self._large_bytes, "large chunks do not add up")

    def _check_slabs(self) -> None:
        used = [0] * LARGE_GROUP
        slabs = [0] * LARGE_GROUP
        tails = empty = 0
        for cell, slab in enumerate(self._slabs):
            if slab is None:
                continue
            where = f"slab at {slab.base}"
            in_region = slab.base == cell << _SLAB_SHIFT and slab.base + SLAB_BYTES <= self.size
            _demand(in_region, f"{where} is misplaced")
            _demand(slab.count == len(slab.owners) == CHUNKS_PER_SLAB[slab.group], f"{where} is miscounted")
            free = {index for index, word in enumerate(slab.owners) if _FREE <= word < NO_SLOT}
            index = slab.head
            while index != _NIL:
                _demand(index in free, f"free list of {where} is broken at chunk {index}")
                free.remove(index)
                index = slab.owners[index] & 0xFFFF
            _demand(not free, f"{where} has free chunks that are in no list")
            in_use = sum(1 for _ in self.chunks_of_slab(slab.base))
            _demand(slab.used == in_use, f"{where} counts {slab.used} chunks in use, not {in_use}")
            partial = self._partial[slab.group]
            listed = 0 <= slab.position < len(partial) and partial[slab.position] is slab
            _demand(listed == (in_use < slab.count), f"{where} is in the wrong list")
            _demand((slab.base in self._empty) == (not in_use), f"{where} is wrong about being empty")
            used[slab.group] += in_use
            slabs[slab.group] += 1
            if in_use:
                tails += SLAB_BYTES - slab.count * slab.chunk
            else:
                empty += 1
        listed_all = sum(map(len, self._partial))
        partial_all = sum(1 for slab in self._slabs if slab is not None and slab.used < slab.count)
        _demand(listed_all == partial_all, "lists of slabs with free chunks name others")
        _demand(empty == len(self._empty), "empty slabs that are no more")
        _demand(slabs == self._slab_count, "slabs per class do not add up")
        _demand(used == self._used[:LARGE_GROUP], "chunks per class do not add up")
        _demand(tails == self._tail_bytes, "slab tails do not add up")


def _key(start: int, size: int) -> int:
    """Key of a free extent in the list by size."""
    return size >> _PAGE_SHIFT << _KEY_SHIFT | start >> _PAGE_SHIFT


def _cell_masks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """(cell, mask of its pages) for every 2 MiB cell that the pages from ``start`` to ``end`` touch."""
    for cell in range(start >> _SLAB_SHIFT, (end - 1 >> _SLAB_SHIFT) + 1):
        base = cell << _SLAB_SHIFT
        low = max(start - base, 0) >> _PAGE_SHIFT
        high = min(end - base, SLAB_BYTES) >> _PAGE_SHIFT
        yield cell, (1 << high) - (1 << low)


def _demand(true: bool, text: str) -> None:
    if not true:
        raise CorruptionError(text)
