"""Copy between a value's bytes and the many pieces of callers' memory that its parts go to, or come from.

The value's bytes lie in one piece of host memory: an arena's data, or a staging buffer. Parts in a GPU's memory are
copied last, in one chain, so that the device works while nothing else is left to do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..constants import RANGES_MAX
from .buffers import (
    BLOCK_BYTES,
    PART_BYTES,
    RELEASE_BYTES,
    SAMPLES_FROM,
    Copier,
    DeviceBuffer,
    DeviceCopy,
    HostMapping,
    Part,
    Pieces,
    Ranges,
    Span,
    address_of,
    array_at,
    host_view,
)
from .company import COMPANY

#: A copy in host memory: target, source, bytes.
Copy = tuple[int, int, int]

#: From this many ranges on it is worth a look whether all have one size.
_EQUAL_FROM: Final = 8
#: Ranges of a value below this size are sent together.
JOIN_BYTES: Final = 16 << 10


class HostRows:
    """Ranges of a value whose memory is arrays of just their bytes: what is copied with the fewest steps of Python.

    A copy between slices takes 0.4 us less than one between addresses. As slices it also checks itself: what does not
    fit raises ValueError.
    """

    __slots__ = ("_arrays", "_places", "_size", "_total", "_views", "high", "low")

    def __init__(
        self, offsets: Iterable[int], ends: Iterable[int], arrays: Sequence[NDArray[np.uint8]],
        views: list[memoryview] | None = None, low: int = 0, high: int = 0,
    ) -> None:  # fmt: skip
        #: Where each array's bytes are in the value.
        self._places = [*map(slice, offsets, ends)]
        self._arrays = arrays
        #: The same memory, for copies that keep the GIL. It takes a quarter of a microsecond each to make them.
        self._views = views
        lengths = [len(array) for array in arrays] if views is not None else [len(arrays[0])] * len(arrays)
        self._total = sum(lengths)
        #: Bytes of each, if they are many of one size that both ways of copying are worth trying with.
        self._size = lengths[0]
        if len(lengths) < SAMPLES_FROM or not BLOCK_BYTES <= self._size <= PART_BYTES or len(set(lengths)) > 1:
            self._size = 0 if max(lengths) < RELEASE_BYTES else -1
        #: All of the memory lies from ``low`` to ``high``; 0 and 0: not known.
        self.low, self.high = low, high

    @classmethod
    def of(cls, ranges: Ranges) -> HostRows | None:
        """Return the rows of ranges that are read again and again; None if some are on a device. O(ranges)."""
        arrays: list[NDArray[np.uint8]] = []
        low, high = 1 << 63, 0
        for _, length, address, keeper in ranges.parts:
            if address:
                keeper = Span(address, length).view()
            elif type(keeper) is not memoryview:
                return None
            arrays.append(np.frombuffer(keeper, np.uint8))
            address = address or address_of(keeper)
            low, high = min(low, address), max(high, address + length)
        offsets = [part[0] for part in ranges.parts]
        ends = [part[0] + part[1] for part in ranges.parts]
        return cls(offsets, ends, arrays, [array.data for array in arrays], low, high)

    def copy(self, data: memoryview, start: int, copier: Copier, node: int) -> bool:
        """Copy a value that begins at byte ``start`` of ``data``; False: not done, as addresses are no slower.

        Raises ValueError if the value ends before a range does.
        """
        size = self._size
        if size < 0:
            return False
        # What keeps the GIL keeps other threads from it for one of the interpreter's turns at most.
        held = self._views is not None and COMPANY.held_bytes
        if not size:
            if held:
                self._hold(data[start:])
            return bool(held)
        # Large copies have driven all that Python needs out of the caches. So the most frequent cases take few steps.
        shares = copier.shares(self._total)
        by_block = None if shares else copier.next_way(size)
        if by_block is False and held:
            self._hold(data[start:])
            return True
        value = np.frombuffer(data, np.uint8)[start:]
        if by_block is None:
            move = partial(self._hold, data[start:]) if held and not shares else partial(self._move, value)
            copier.copy_some(len(self._arrays), size, move, partial(self._block, value), node)
        elif by_block:
            self._block(value)
        else:
            self._move(value)
        return True

    def _hold(self, value: memoryview, first: int = 0, last: int = RANGES_MAX) -> None:
        assert self._views is not None
        for view, place in zip(self._views[first:last], self._places[first:last]):
            view[:] = value[place]

    def _move(self, value: NDArray[np.uint8], first: int = 0, last: int = RANGES_MAX) -> None:
        for array, place in zip(self._arrays[first:last], self._places[first:last]):
            array[:] = value[place]

    def _block(self, value: NDArray[np.uint8], first: int = 0, last: int = RANGES_MAX) -> None:
        positive = np.positive
        for array, place in zip(self._arrays[first:last], self._places[first:last]):
            positive(value[place], array)


class TableRanges(Ranges):
    """Ranges that a HostTable describes. Their parts are listed at the first use, which may never come."""

    __slots__ = ()

    def __init__(self, table: Any, least: int, total: int) -> None:
        self.least = least
        self.total = total
        self.rows = table

    if not TYPE_CHECKING:  # a property would make each use of other ranges' parts slower

        def __getattr__(self, name: str) -> Any:
            """Return what is not set: the parts."""
            if name != "parts":
                raise AttributeError(name)
            self.parts = parts = self.rows.parts()
            return parts


#: Types of a value's memory that the CPU addresses; None stands for new bytes. All else is a :class:`DeviceBuffer`.
#: Looking a type up here costs no more than comparing it with one class, so host memory pays nothing for GPUs. Some
#: parts of the last three may be a device's: code that copies these looks at each.
HOST_TYPES: Final[frozenset[type]] = frozenset((memoryview, Span, type(None), Ranges, TableRanges, Pieces))


def on_device(memory: object) -> TypeGuard[DeviceBuffer]:
    """Return True if a value's memory, or a sink, is a :class:`DeviceBuffer`."""
    return type(memory) not in HOST_TYPES


class TableRows(NamedTuple):
    """Ranges of one size that are rows of a table in the value."""

    offsets: NDArray[np.int64]
    size: int
    #: Where the table is in the value, and the numbers of its rows that are wanted.
    place: slice
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, offsets: NDArray[np.int64], size: int) -> TableRows | None:
        """Return ranges of ``size`` bytes at these offsets; None if they are no rows of a table."""
        first = int(offsets.min())
        rows, odd = np.divmod(offsets - first, size)
        return None if odd.any() else cls(offsets, size, slice(first, int(offsets.max()) + size), rows)


class HostTable:
    """Ranges of a value that are rows of a table there, and whose memory is one array, one row after the other.

    One ``take`` copies all of them, which takes the fewest steps. Such ranges are cheap to make: their parts are listed
    only for a path that needs them.
    """

    __slots__ = ("_keepers", "_memory", "_wanted", "high", "low")

    def __init__(self, wanted: TableRows, low: int, keepers: Iterable[Any]) -> None:
        """``low``: where the memory begins. ``keepers``: what keeps it, for each range."""
        count, size = len(wanted.rows), wanted.size
        self._wanted = wanted
        self._memory = array_at(low, count * size).reshape(count, size)
        self._keepers = keepers
        #: All of the memory lies from ``low`` to ``high``.
        self.low, self.high = low, low + count * size

    @classmethod
    def of_parts(cls, ranges: Ranges) -> HostTable | None:
        """Return the table of ranges that are read again and again; None if they are none. O(ranges)."""
        offsets, lengths, addresses, keepers = zip(*ranges.parts)
        size = lengths[0]
        if not addresses[0] or lengths.count(size) < len(lengths):
            return None
        if addresses != (*range(addresses[0], addresses[0] + len(lengths) * size, size),):
            return None
        wanted = TableRows.of(np.array(offsets), size)
        return None if wanted is None else cls(wanted, addresses[0], keepers)

    def parts(self) -> list[Part]:
        """Return what :class:`Ranges` lists. O(ranges)."""
        offsets, size, _, _ = self._wanted
        return [*zip(offsets.tolist(), repeat(size), range(self.low, self.high, size), self._keepers)]

    def copy(self, data: memoryview, start: int, copier: Copier, node: int) -> bool:
        """Do :meth:`HostRows.copy`. The caller has checked that the value is long enough."""
        _, size, place, rows = self._wanted
        count = len(rows)
        shares = copier.shares(count * size)
        tried = count >= SAMPLES_FROM and BLOCK_BYTES <= size <= PART_BYTES
        if shares and not tried:
            return False
        table = np.frombuffer(data, np.uint8)[start:][place].reshape(-1, size)
        by_block = False if not tried else None if shares else copier.next_way(size)
        if by_block is None:
            copier.copy_some(count, size, partial(self._take, table), partial(self._block, table), node)
        elif by_block:
            self._block(table)
        else:
            table.take(rows, 0, self._memory, "clip")  # other modes copy twice
        return True

    def _take(self, table: NDArray[np.uint8], first: int, last: int) -> None:
        table.take(self._wanted.rows[first:last], 0, self._memory[first:last], "clip")

    def _block(self, table: NDArray[np.uint8], first: int = 0, last: int = RANGES_MAX) -> None:
        positive = np.positive
        for row, array in zip(self._wanted.rows[first:last].tolist(), self._memory[first:last]):
            positive(table[row], array)


def pieces(value: memoryview, ranges: Sequence[tuple[int, int]], most: int) -> Iterator[memoryview | bytes]:
    """Yield ranges of a value, (offset, length) each, in their order.

    Small ones in a row are copied together, about ``most`` bytes at a time: to send each costs more.
    """
    if len(ranges) == 1:
        ((offset, length),) = ranges
        yield value[offset : offset + length]
        return
    small: list[memoryview] = []
    size = 0
    for offset, length in ranges:
        piece = value[offset : offset + length]
        if length < JOIN_BYTES and size < most:
            small.append(piece)
            size += length
            continue
        if small:
            yield b"".join(small)
            small, size = [], 0
        yield piece
    if small:
        yield b"".join(small)


def scatter(
    ranges: Ranges, data: memoryview, address: int, start: int, copier: Copier, mapping: HostMapping | None = None,
    later: list[DeviceCopy] | None = None, shared: list[Copy] | None = None,
) -> None:  # fmt: skip
    """Copy ranges of a value to their memory. The value begins at byte ``start`` of ``data``, which is at ``address``.

    The caller has checked that it has ``ranges.least`` bytes. ``mapping``: what a device knows that data by, or None.
    ``later``: gets the copies to devices, which the caller then carries out. ``shared``: gets those that threads may
    share, likewise. Large ranges are copied without the GIL, and by several threads if they are much together, on the
    NUMA node that the mapping names. O(ranges). Raises DeviceError.
    """
    rows: HostRows | HostTable | None = ranges.rows if shared is None else None
    if rows is not None and rows.copy(data, start, copier, getattr(mapping, "node", -1)):
        return
    if shared is None and len(ranges.parts) >= _EQUAL_FROM:
        offsets, lengths, targets, _ = zip(*ranges.parts)
        if 0 not in targets and lengths.count(lengths[0]) == len(lengths):
            address += start
            sources = [address + offset for offset in offsets]
            copier.copy_equal(targets, sources, lengths[0], getattr(mapping, "node", -1))
            return
    devices: list[DeviceCopy] = [] if later is None else later
    divided: list[Copy] | None = shared
    if divided is None and copier.shares(ranges.total):
        divided = []
    size = -1
    copy: Any = None
    address += start
    for offset, length, target, keeper in ranges.parts:
        if target:
            if divided is not None:
                divided.append((target, address + offset, length))
                continue
            if length != size:
                size, copy = length, copier.way(length)
            copy(target, address + offset, length)
        elif type(keeper) is memoryview:
            at = start + offset
            keeper[:] = data[at : at + length]
        else:
            devices.append((keeper, address + offset, length, None if mapping is None else keeper.pinned(mapping)))
    if divided and shared is None:
        copier.copy_all(divided, getattr(mapping, "node", -1))
    if devices and later is None:
        devices[0][0].copy_to_device(devices)


def extents(ranges: Ranges, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset in the value, bytes) of what is at ``start`` to ``start + size`` of the ranges, one after another.

    O(ranges).
    """
    for offset, length, _, _ in section(ranges, start, size, moved=False).parts:
        yield offset, length


def section(ranges: Ranges, start: int, size: int, *, moved: bool = True) -> Ranges:
    """Return what is at ``start`` to ``start + size`` of the ranges, one after another. O(ranges).

    Offsets count from ``start``; if not ``moved``, they are those in the value.
    """
    end = start + size
    at = 0
    parts: list[Part] = []
    for offset, length, address, keeper in ranges.parts:
        first, last = max(start - at, 0), min(end - at, length)
        if first < last:
            if address:
                address += first
            elif last - first < length:
                keeper = keeper[first:last] if type(keeper) is memoryview else keeper.part(first, last - first)
            parts.append((at + first - start if moved else offset + first, last - first, address, keeper))
        at += length
    return Ranges(parts, 0, size)


def gather(
    pieces: Iterable[memoryview | Span], data: memoryview, address: int, start: int, copier: Copier,
    mapping: HostMapping | None = None,
) -> None:  # fmt: skip
    """Copy pieces, one after the other, to byte ``start`` of ``data`` and on; ``data`` is at ``address``.

    ``mapping``: whose data that is. The caller has checked that there is room. O(pieces). Raises DeviceError,
    UnfinishedCopy.
    """
    devices: list[DeviceCopy] = []
    size = -1
    copy: Any = None
    at = start
    for piece in pieces:
        length = len(piece)
        if length != size:
            size, copy = length, copier.way(length)
        if type(piece) is memoryview:
            if length < RELEASE_BYTES:
                data[at : at + length] = piece
            else:
                copy(address + at, address_of(piece), length)
        elif type(piece) is Span:
            copy(address + at, piece.address, length)
        else:
            assert on_device(piece)
            devices.append((piece, address + at, length, None if mapping is None else piece.pinned(mapping)))
        at += length
    if devices:
        devices[0][0].copy_to_host(devices)


def cut(pieces: Sequence[memoryview | Span], start: int, size: int) -> Iterator[memoryview | Span]:
    """Yield the parts of pieces that are bytes ``start`` to ``start + size`` of what they make up. O(pieces)."""
    end = start + size
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(end - at, len(piece))
        at += len(piece)
        if first >= last:
            continue
        yield piece.part(first, last - first) if isinstance(piece, Span) else piece[first:last]


def host_pieces(source: memoryview | Span) -> list[memoryview]:
    """Return the bytes of a put's source in host memory, piece by piece: in place, or copied there from a device."""
    return [host_view(part) for part in source.parts] if type(source) is Pieces else [host_view(source)]


def checksum(pieces: Iterable[memoryview]) -> int:
    """Return the CRC-32 of what the pieces make up."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def checksum_of(source: Any, data: memoryview, start: int) -> int:
    """Return the CRC-32 of a value that was copied to ``start`` in the data.

    Not of the copy, which others may have overwritten by now, but where the value is in a device's memory.
    """
    parts = source.parts if type(source) is Pieces else [source]
    if any(map(on_device, parts)):
        return zlib.crc32(data[start : start + len(source)])
    return checksum(map(host_view, parts))


def views_of(ranges: Ranges) -> list[memoryview]:
    """Return the memory of ranges, none of which is on a device, in their order."""
    return [Span(address, length).view() if address else keeper for _, length, address, keeper in ranges.parts]


def has_device(parts: Iterable[Any]) -> bool:
    """Return whether some of these pieces, or keepers of ranges, are a device's memory."""
    return any(isinstance(part, DeviceBuffer) for part in parts)


def in_host_memory(ranges: Ranges) -> tuple[Ranges, list[DeviceCopy]]:
    """Return ranges with new host memory in place of a device's, and the copies that then take it there."""
    parts: list[Part] = []
    copies: list[DeviceCopy] = []
    for offset, length, address, keeper in ranges.parts:
        if isinstance(keeper, DeviceBuffer):
            view = memoryview(bytearray(length))
            parts.append((offset, length, 0, view))
            copies.append((keeper, address_of(view), length, None))
        else:
            parts.append((offset, length, address, keeper))
    return Ranges(parts, ranges.least, ranges.total), copies
