"""What callers pass to operations on parts of values, checked and in the form that the paths take.

Everything is checked before anything is sent: a call with a wrong argument changes nothing.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise, repeat
from typing import Any, Final, NamedTuple, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from ...constants import LARGE_BYTES_MAX, RANGES_MAX, VALUE_BYTES_MAX
from ...errors import UsageError
from ...host.buffers import RELEASE_BYTES, SAMPLES_FROM, DeviceBuffer, Part, Pieces, Ranges, Span, address_of, array_at
from ...host.parts import HostRows, HostTable, TableRanges, TableRows
from ..batch import LargeValue, sink_of, source_of

OVERLAP_TEXT: Final = (
    "the buffers of two ranges overlap: what they would hold depends on the order of the copies"
)
_U8: Final = np.dtype(np.uint8)
_addressof: Final = ctypes.addressof
_from_buffer: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer


#: What callers pass: (offset, bytes, buffer) each; or the offsets, the bytes of each, and a buffer for all of them, one
#: after the other; or what :func:`prepared` made of it.
Wanted = Ranges | Iterable[tuple[int, int, Any]] | tuple[NDArray[Any], Any, Any]


def ranges_of(
    ranges: Wanted, *, apart: bool = True, most: int = 0
) -> Ranges:
    """Return ranges of a value, (offset, bytes, buffer) each, in the form that get takes. O(n log n) for n ranges.

    ``apart`` False: the caller calls :func:`check_apart`. Raises UsageError; LargeValue, with the ranges, for those
    that only a value in parts can have. ``most``: bytes of the largest value, if not one without
    parts.
    """
    if type(ranges) is list:
        if len(ranges) == 1 and not most:
            return _one_range(ranges[0])
    elif isinstance(ranges, Ranges):
        return _ready(ranges, most)
    elif type(ranges) is tuple and len(ranges) == 3 and type(ranges[0]) is np.ndarray:
        return _columns(*ranges)
    else:
        ranges = [*_items(ranges, "ranges")]
    most = most or VALUE_BYTES_MAX
    if len(ranges) >= SAMPLES_FROM and (made := _equal_ranges(ranges, apart, most)) is not None:
        return made
    parts: list[Part] = []
    least = total = 0
    ndarray, from_buffer, addressof = np.ndarray, _from_buffer, _addressof
    for each in ranges:
        try:
            offset, length, buffer = each
        except (TypeError, ValueError):
            offset, length, buffer = _triple(each)
        if type(offset) is not int or type(length) is not int:
            offset, length, buffer = _triple(each)
        end = offset + length
        if not 0 <= offset < end <= most:
            _refuse(offset, length, ranges, apart, most)
        if length >= RELEASE_BYTES and type(buffer) is ndarray and not buffer.dtype.hasobject:
            # What _part() does, in half the time, which is all that a gather of large parts costs beside the copies.
            try:
                address = addressof(from_buffer(buffer)) if length <= buffer.nbytes else 0
            except (TypeError, ValueError):  # read-only, or not contiguous
                address = 0
            parts.append((offset, length, address, buffer) if address else _part(offset, length, buffer))
        else:
            parts.append(_part(offset, length, buffer))
        total += length
        if end > least:
            least = end
    if not 0 < len(parts) <= RANGES_MAX:
        raise UsageError(f"a value is read in 1 to {RANGES_MAX} ranges, not in {len(parts)}")
    if total > most:
        text = f"the ranges of one value have at most {most} bytes together, not {total}"
        raise UsageError(text) if most == LARGE_BYTES_MAX else LargeValue(text, _wide(ranges, apart))
    made = Ranges(parts, least, total)
    if apart and len(parts) > 1:
        check_apart([made])
    return made


def _ready(ranges: Ranges, most: int) -> Ranges:
    """Return ranges that were prepared. Raises LargeValue for those that only a value in parts can have."""
    if not most and (ranges.least > VALUE_BYTES_MAX or ranges.total > VALUE_BYTES_MAX):
        raise LargeValue(f"a value in one part has no {ranges.total} bytes up to {ranges.least}", ranges)
    return ranges


def _equal_ranges(ranges: Sequence[Any], apart: bool, most: int) -> Ranges | None:
    """Do :func:`ranges_of` for many of one size, each with a plain array of that size; None: some are not of that kind.

    Each property of all of them is looked at in one pass. Raises UsageError for buffers that overlap.
    """
    try:
        offsets, lengths, buffers = zip(*ranges, strict=True)
        size, count = lengths[0], len(lengths)
        if {*map(type, offsets), *map(type, lengths)} != {int} or {*map(type, buffers)} != {np.ndarray}:
            return None
        if size < RELEASE_BYTES or lengths.count(size) < count or {*map(len, buffers)} != {size}:
            return None
        for buffer in buffers:
            if buffer.dtype is not _U8 or buffer.ndim != 1:
                return None
        addresses = [_addressof(_from_buffer(buffer)) for buffer in buffers]
    except (TypeError, ValueError):  # ranges of another form, buffers that are read-only or not contiguous
        return None
    least, total = max(offsets) + size, count * size
    if min(offsets) < 0 or least > most or total > most or count > RANGES_MAX:
        return None
    low = addresses[0]
    if addresses == [*range(low, low + total, size)]:  # which do not overlap
        table = _rows_at(offsets, size)
        if table is not None:
            return TableRanges(HostTable(table, low, buffers), least, total)
    if apart:
        starts = sorted(addresses)
        if not all(map(operator.le, map(operator.add, starts, repeat(size)), islice(starts, 1, None))):
            raise UsageError(OVERLAP_TEXT)
    ends = [offset + size for offset in offsets]
    parts = [*zip(offsets, lengths, addresses, buffers)]
    return Ranges(parts, least, total, HostRows(offsets, ends, buffers))


@functools.lru_cache(maxsize=16)
def _rows_at(offsets: tuple[int, ...], size: int) -> TableRows | None:
    """Return ranges as rows of a table. Engines read the same ranges of one page after the other."""
    return TableRows.of(np.array(offsets, np.int64), size)


def _columns(offsets: NDArray[Any], lengths: Any, out: Any) -> Ranges:
    """Do :func:`ranges_of` for an array of offsets, and a buffer that the ranges go to one after the other.

    ``lengths``: an array of as many, or an int for all. Raises UsageError; LargeValue with the ranges for those that
    only a value in parts can have.
    """
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise UsageError("offsets are an array of integers with one dimension")
    if type(lengths) is int:
        made = _equal_columns(offsets.tobytes(), offsets.dtype.str, lengths)
    else:
        made = _checked_columns(offsets, lengths)
    total = made.total
    if type(out) is np.ndarray and not out.dtype.hasobject and out.nbytes >= total:
        try:
            address = _addressof(_from_buffer(out))
        except (TypeError, ValueError):  # read-only, or not contiguous: sink_of() says so
            address = 0
    else:
        address = 0
    if address and made.table is not None:
        ranges: Ranges = TableRanges(HostTable(made.table, address, repeat(out)), made.least, total)
    else:
        ranges = _in_one(made, sink_of(out))
    if made.least > VALUE_BYTES_MAX or total > VALUE_BYTES_MAX:
        raise LargeValue(f"a value in one part has no {total} bytes up to {made.least}", ranges)
    return ranges


class _Columns(NamedTuple):
    """Offsets and lengths that have been checked."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    least: int
    total: int
    table: TableRows | None


@functools.lru_cache(maxsize=16)
def _equal_columns(offsets: bytes, kind: str, size: int) -> _Columns:
    """Do :func:`_checked_columns` for ranges of one size. The same offsets in a buffer of another call are the same."""
    return _checked_columns(np.frombuffer(offsets, kind), size)


def _checked_columns(offsets: NDArray[Any], lengths: Any) -> _Columns:
    """Check offsets and lengths of ranges. O(n). Raises UsageError."""
    count = len(offsets)
    if not 0 < count <= RANGES_MAX:
        raise UsageError(f"a value is read in 1 to {RANGES_MAX} ranges, not in {count}")
    if not isinstance(lengths, np.ndarray) or not lengths.ndim:
        size = _integer(lengths)
        if not 0 < size <= LARGE_BYTES_MAX:
            raise UsageError(_wrong_range(int(offsets[0]), size))
        lengths = np.full(count, size)
    elif lengths.shape != offsets.shape or lengths.dtype.kind not in "iu":
        raise UsageError(f"lengths are an int, or an array of {count} integers as the offsets are")
    lengths = np.asarray(lengths)  # a masked array leaves items out of its sums
    wrong = (offsets < 0) | (offsets > LARGE_BYTES_MAX) | (lengths < 1) | (lengths > LARGE_BYTES_MAX)
    starts, sizes = offsets.astype(np.int64), lengths.astype(np.int64)
    ends = starts + sizes
    wrong |= ends > LARGE_BYTES_MAX
    if wrong.any():
        first = int(wrong.argmax())
        raise UsageError(_wrong_range(int(offsets[first]), int(lengths[first])))
    total = int(sizes.sum())
    if total > LARGE_BYTES_MAX:
        raise UsageError(f"the ranges of one value have at most {LARGE_BYTES_MAX} bytes together, not {total}")
    table = TableRows.of(starts, int(sizes[0])) if (sizes == sizes[0]).all() else None
    return _Columns(starts, sizes, int(ends.max()), total, table)


def _in_one(columns: _Columns, sink: memoryview | Span) -> Ranges:
    """Return ranges whose bytes go to one buffer, one after the other. Raises UsageError."""
    offsets, lengths, least, total, table = columns
    if total > len(sink):
        raise UsageError(f"ranges of {total} bytes together do not fit a buffer of {len(sink)} bytes")
    on_host = not isinstance(sink, DeviceBuffer)
    address = address_of(sink) if type(sink) is memoryview else sink.address
    if table is not None and on_host:
        return TableRanges(HostTable(table, address, repeat(sink)), least, total)
    parts: list[Part] = []
    at = 0
    for offset, length in zip(offsets.tolist(), lengths.tolist()):
        part = (address + at, sink) if on_host else (0, cast(Span, sink).part(at, length))
        parts.append((offset, length, *part))
        at += length
    return Ranges(parts, least, total)


def prepared(ranges: Wanted) -> Ranges:
    """Return ranges that have been checked, for calls that read them again and again. Raises UsageError."""
    made = wide_ranges_of(ranges)
    if made.rows is None or not made.rows.high:
        made.rows = HostTable.of_parts(made) or HostRows.of(made)
    return made


def wide_ranges_of(ranges: Wanted, *, apart: bool = True) -> Ranges:
    """Do :func:`ranges_of` for a value that may be in parts. Raises UsageError."""
    try:
        return ranges_of(ranges, apart=apart)
    except LargeValue as exc:
        made: Ranges = exc.memory
        return made


def _one_range(range_: Any) -> Ranges:
    """Do :func:`ranges_of` for the most frequent case."""
    offset, length, buffer = _triple(range_)
    end = offset + length
    if not 0 <= offset < end <= VALUE_BYTES_MAX:
        _refuse(offset, length, [range_], True, VALUE_BYTES_MAX)
    if type(buffer) is bytearray and length == len(buffer) < RELEASE_BYTES:
        return Ranges([(offset, length, 0, memoryview(buffer))], end, length)
    return Ranges([_part(offset, length, buffer)], end, length)


def _triple(range_: Any) -> tuple[int, int, Any]:
    """Return offset, bytes and buffer of a range. Raises UsageError."""
    try:
        offset, length, buffer = range_
    except (TypeError, ValueError):
        raise UsageError(f"a range is (offset, length, buffer), not {_short(range_)}") from None
    if type(offset) is int and type(length) is int:
        return offset, length, buffer
    return _integer(offset), _integer(length), buffer


def _part(offset: int, length: int, buffer: Any) -> Part:
    """Return a part of :class:`Ranges`. Raises UsageError."""
    sink = sink_of(buffer)
    if length > len(sink):
        raise UsageError(f"a range of {length} bytes does not fit a buffer of {len(sink)} bytes")
    if type(sink) is memoryview:
        if length >= RELEASE_BYTES:
            return offset, length, address_of(sink), sink
        return offset, length, 0, sink if len(sink) == length else sink[:length]
    return offset, length, sink.address if type(sink) is Span else 0, sink


def overlapping(sinks: Sequence[Ranges]) -> set[int]:
    """Return positions without which no two ranges share memory; of two keys it is the later one's.

    O(n log n) for n ranges; O(k log k) for k keys if all are prepared, and no two keys' memory is in one area.
    """
    if all(sink.rows is not None and sink.rows.high for sink in sinks):
        areas = sorted((sink.rows.low, sink.rows.high) for sink in sinks)
        if all(high <= low for (_, high), (low, _) in pairwise(areas)):
            return set()
    heads = [
        (address or (address_of(keeper) if type(keeper) is memoryview else keeper.address), length, position)
        for position, sink in enumerate(sinks) for _, length, address, keeper in sink.parts
    ]  # fmt: skip
    heads.sort()
    refused: set[int] = set()
    end = 0
    last = -1
    for address, length, position in heads:
        if address >= end:
            end, last = address + length, position
        elif position >= last:
            refused.add(position)
        else:
            refused.add(last)
            end, last = address + length, position
    return refused


def check_apart(sinks: Sequence[Ranges]) -> None:
    """Raise UsageError if the memory of two ranges overlaps."""
    if overlapping(sinks):
        raise UsageError(OVERLAP_TEXT)


def ranges_of_many(keys: Sequence[str], ranges: Sequence[Wanted]) -> list[Ranges]:
    """Do :func:`ranges_of` for each key; no two buffers of the whole call overlap. Raises UsageError, LargeValue."""
    if len(keys) != len(ranges):
        raise UsageError(f"{len(keys)} keys and {len(ranges)} lists of ranges")
    sinks: list[Ranges] = []
    wide: LargeValue | None = None
    for each in ranges:
        try:
            sinks.append(ranges_of(each, apart=False))
        except LargeValue as exc:
            sinks.append(exc.memory)
            wide = exc
    check_apart(sinks)
    if wide is not None:
        raise LargeValue(str(wide), sinks)
    return sinks


def pieces_of(pieces: Iterable[Any]) -> Pieces:
    """Return the pieces of a value in the form that put takes. Raises UsageError, LargeValue with them. O(n)."""
    parts: list[memoryview | Span] = []
    for each in _items(pieces, "pieces"):
        try:
            parts.append(source_of(each, "a piece of a value"))
        except LargeValue as exc:
            parts.append(exc.memory)
    if not 0 < len(parts) <= RANGES_MAX:
        raise UsageError(f"a value is put in 1 to {RANGES_MAX} pieces, not in {len(parts)}")
    made = Pieces(parts)
    if made.size > LARGE_BYTES_MAX:
        raise UsageError(f"a value has 1 to {LARGE_BYTES_MAX} bytes, these pieces {made.size}")
    if made.size > VALUE_BYTES_MAX:
        raise LargeValue(f"a value has 1 to {VALUE_BYTES_MAX} bytes here, these pieces {made.size}", made)
    return made


def _items(items: Any, what: str) -> Iterable[Any]:
    """Return the list that a caller passed. Raises UsageError for what is none, and for one piece of memory."""
    if isinstance(items, (str, bytes, bytearray, memoryview, Span)):
        raise UsageError(f"{what} are a list, not {type(items).__name__}")
    try:
        made: Iterable[Any] = iter(items)
    except TypeError:
        raise UsageError(f"{what} are a list, not {type(items).__name__}") from None
    return made


def _integer(value: Any) -> int:
    """Return an offset or a length as an int: numpy's count too, truth values do not. Raises UsageError."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise UsageError(f"an offset and a length are ints, not {type(value).__name__}")


def is_wide(sink: memoryview | Span) -> bool:
    """Return whether a sink is ranges that only a value in parts can have."""
    return isinstance(sink, Ranges) and (sink.least > VALUE_BYTES_MAX or sink.total > VALUE_BYTES_MAX)


def _wide(ranges: Iterable[tuple[int, int, Any]], apart: bool) -> Ranges:
    return ranges_of(ranges, apart=apart, most=LARGE_BYTES_MAX)


def _refuse(
    offset: int, length: int, ranges: Iterable[tuple[int, int, Any]], apart: bool, most: int
) -> NoReturn:
    """Raise UsageError for a range that no value of ``most`` bytes has, LargeValue if one in parts may have it."""
    text = _wrong_range(offset, length)
    if most == LARGE_BYTES_MAX or not 0 <= offset < offset + length <= LARGE_BYTES_MAX:
        raise UsageError(text)
    raise LargeValue(text, _wide(ranges, apart))


def _wrong_range(offset: int, length: int) -> str:
    if length < 1:
        return f"a range has at least 1 byte, not {length}"
    return f"no value has {length} bytes at {offset}: a value has 1 to {LARGE_BYTES_MAX} bytes"


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 60 else text[:57] + "..."


class Rows:
    """The same range of many values, and the memory that it goes to for each."""

    __slots__ = ("_parts", "addresses", "devices", "keep", "length", "offset")

    def __init__(
        self, offset: int, length: int, addresses: Sequence[int] | None, parts: Sequence[Part] | None, keep: Any
    ) -> None:
        self.offset = offset
        self.length = length
        #: Where each buffer is in host memory; None if some are not.
        self.addresses = addresses
        self._parts = parts
        #: The buffers, if all of them are on devices.
        self.devices: list[DeviceBuffer] | None = None
        #: Keeps the memory in its place.
        self.keep = keep

    def part(self, number: int) -> Part:
        """Return the range of one value, as :class:`Ranges` has it."""
        if self._parts is not None:
            return self._parts[number]
        assert self.addresses is not None
        return self.offset, self.length, self.addresses[number], self.keep

    def memory(self) -> NDArray[np.uint8] | None:
        """Return the buffers as the rows of an array, if they are at regular places."""
        places = self.addresses
        if type(places) is not range or not places or places.step < self.length:
            return None
        flat = array_at(places.start, places[-1] + self.length - places.start)
        return np.lib.stride_tricks.as_strided(flat, (len(places), self.length), (places.step, 1))

    def store(self, numbers: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Copy the rows of ``data`` to the buffers of these values. All of them are in host memory."""
        memory = self.memory()
        if memory is not None:
            memory[numbers] = data
            return
        assert self.addresses is not None
        for number, row in zip(numbers, data):
            array_at(self.addresses[number], self.length)[:] = row


def rows_of(range_: Any, count: int) -> Rows:
    """Return a range of ``count`` values, (offset, bytes, buffers), in the form that reads take. Raises UsageError."""
    offset, length, buffers = _triple(range_)
    if not 0 <= offset < offset + length <= LARGE_BYTES_MAX:
        raise UsageError(_wrong_range(offset, length))
    if type(buffers) is np.ndarray and buffers.ndim and not buffers.dtype.hasobject:
        if len(buffers) != count:
            raise UsageError(f"{count} keys and an array of {len(buffers)} rows")
        if not buffers.flags.writeable:
            raise UsageError("the buffer is read-only: pass a bytearray, a writable array or a tensor")
        if not count:
            return Rows(offset, length, [], None, buffers)
        row = buffers[0]
        if row.nbytes < length:
            raise UsageError(f"a range of {length} bytes does not fit a buffer of {row.nbytes} bytes")
        if buffers.ndim > 1 and row.flags.c_contiguous:
            start, step = buffers.__array_interface__["data"][0], buffers.strides[0]
            return Rows(offset, length, range(start, start + count * step, step) if step else [start] * count, None,
                        buffers)  # fmt: skip
    if type(buffers) is list and len(buffers) == count and (places := _array_addresses(buffers, length)) is not None:
        return Rows(offset, length, places, None, buffers)
    parts = [_part(offset, length, buffer) for buffer in _items(buffers, "buffers")]
    if len(parts) != count:
        raise UsageError(f"{count} keys and {len(parts)} buffers")
    addresses = [
        address or (address_of(keeper) if type(keeper) is memoryview else 0) for _, _, address, keeper in parts
    ]
    made = Rows(offset, length, addresses if all(addresses) else None, parts, parts)
    if not any(addresses):
        made.devices = [cast(DeviceBuffer, keeper) for _, _, _, keeper in parts]
    return made


def runs_of(rows: Sequence[Rows]) -> Iterator[Sequence[Rows]]:
    """Yield the ranges of a call in their order, as many at once as an exchange may have of a value. O(ranges)."""
    run: list[Rows] = []
    size = 0
    for each in rows if len(rows) > RANGES_MAX else ():
        if run and (len(run) == RANGES_MAX or size + each.length > VALUE_BYTES_MAX):
            yield run
            run, size = [], 0
        run.append(each)
        size += each.length
    yield run or rows


def row_of(rows: Sequence[Rows], number: int) -> Ranges:
    """Return what these read of one value. O(ranges)."""
    parts = [each.part(number) for each in rows]
    return Ranges(parts, max(each.offset + each.length for each in rows), sum(each.length for each in rows))


def rounds_of(wants: Sequence[tuple[int, tuple[int, Ranges]]]) -> Iterator[dict[int, tuple[int, Ranges]]]:
    """Yield what is read, by number with its place in the call: a number that comes up again goes to another round.

    O(wants) for each round.
    """
    left = list(wants)
    while left:
        now: dict[int, tuple[int, Ranges]] = {}
        later: list[tuple[int, tuple[int, Ranges]]] = []
        for place, (number, ranges) in left:
            if number in now:
                later.append((place, (number, ranges)))
            else:
                now[number] = place, ranges
        yield now
        left = later


def _array_addresses(buffers: list[Any], length: int) -> Sequence[int] | None:
    """Return where plain arrays with room for ``length`` bytes are; None if some buffers are no such. O(buffers)."""
    try:
        if {*map(type, buffers)} != {np.ndarray} or any(kind.hasobject for kind in {array.dtype for array in buffers}):
            return None
        if min(array.nbytes for array in buffers) < length:
            return None
        addresses = [_addressof(_from_buffer(array)) for array in buffers]
    except (TypeError, ValueError):  # read-only, or not contiguous
        return None
    count, first = len(addresses), addresses[0]
    step = addresses[1] - first if count > 1 else length
    evenly = range(first, first + count * step, step) if step > 0 else None
    return evenly if evenly is not None and addresses == [*evenly] else addresses


def check_rows_apart(rows: Sequence[Rows]) -> None:
    """Raise UsageError if the memory of two ranges overlaps. O(n log n)."""
    if any(each.addresses is None for each in rows):
        count = max(len(each._parts or each.addresses or ()) for each in rows)
        check_apart([Ranges([each.part(number)], 0, 0) for each in rows for number in range(count)])
        return
    starts = np.concatenate([_column(each.addresses or ()) for each in rows])
    ends = np.concatenate([np.full(len(each.addresses or ()), each.length, np.uint64) for each in rows]) + starts
    order = np.argsort(starts, kind="stable")
    if (ends[order][:-1] > starts[order][1:]).any():
        raise UsageError(OVERLAP_TEXT)


def _column(numbers: Sequence[int]) -> NDArray[np.uint64]:
    """Return addresses as an array."""
    if type(numbers) is range:
        return np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.uint64)
    return np.fromiter(numbers, np.uint64, len(numbers))
