"""The same-host GET, once an entry is found: copy its value, and check what must be checked of it.

``arena/reader.py`` finds entries and confirms copies. ``sdk/reads.py`` decides what to do about those that are not
there or that change.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..arena.layout import ENTRY_CRC, ENTRY_LARGE
from ..arena.reader import ArenaReader, Located
from ..host.buffers import RELEASE_BYTES, Copier, DeviceBuffer, DeviceCopy, Ranges, Span, address_of, fits, memmove
from ..host.company import COMPANY
from ..host.parts import on_device, scatter
from .counts import Word

log = logging.getLogger("simm.client")

#: A batch waits for the device after so many bytes or copies. The longer the time between finding a value and
#: confirming it, the more often it has changed meanwhile (``benchmarks/gpu.py`` measures what a wait costs).
DEVICE_BYTES: Final = 64 << 20
DEVICE_KEYS: Final = 256
#: A batch into host memory is confirmed after so many bytes for each thread: a millisecond or two of copying.
GROUP_BYTES: Final = 8 << 20


#: A batch of few values is copied by several threads if they are as large as this.
SPREAD_BYTES_EACH: Final = 256 << 10


class ShmGet:
    """Copies out of arenas on this host, for one client. Any thread may call it."""

    #: What it reads: 0 for values, ENTRY_LARGE for manifests. Neither is ever taken for the other.
    kind: int = 0

    def __init__(self, copier: Copier, checksum: bool, counters: dict[str, int]) -> None:
        self._copier = copier
        self.checksum = checksum
        #: Flags of entries whose values are delivered as they are; the others' are looked at.
        self.plain = frozenset(() if checksum else (0, ENTRY_CRC))
        self.counters = counters

    def spreads(self, positions: Sequence[int], sinks: Sequence[Any]) -> bool:
        """Return whether a small batch is worth several threads, as far as its first sink tells."""
        copier = self._copier
        return copier.threads > 1 and len(positions) > 1 and len(sinks[positions[0]] or ()) >= SPREAD_BYTES_EACH

    def copy_out(self, reader: ArenaReader, found: Located, sink: memoryview | Span) -> None:
        """Copy a located value, which ``fits``, to its sink. It counts once it is confirmed. Raises DeviceError."""
        start = found.offset - reader.data_offset
        length = found.length
        if type(sink) is Span:
            self._copier.copy(sink.address, reader.data_address + start, length, reader.node)
        elif length < COMPANY.held_bytes:
            try:
                sink[:length] = reader.data[start : start + length]  # type: ignore[index]
            except TypeError:  # ranges or a device buffer: plain memory does not pay for a test
                self._copy_apart(reader, start, length, sink)
        elif type(sink) is memoryview:
            self._copier.copy(address_of(sink), reader.data_address + start, length, reader.node)
        else:
            self._copy_apart(reader, start, length, sink)

    def copy_from(self, data: memoryview, sink: memoryview | Span) -> None:
        """Copy the bytes of a value that is held, and ``fits``, to its sink. Raises DeviceError."""
        if isinstance(sink, Ranges):
            scatter(sink, data, address_of(data), 0, self._copier)
        elif on_device(sink):
            sink.copy_from(data)
        else:
            target = address_of(sink) if type(sink) is memoryview else sink.address
            self._copier.copy(target, address_of(data), len(data))

    def copy_many(
        self, reader: ArenaReader, positions: Sequence[int], keys: NDArray[np.uint64], slots: NDArray[np.intp],
        sinks: Sequence[Any], results: list[Any],
    ) -> list[int]:  # fmt: skip
        """Read values of one arena into host memory, and fill in the lengths of plain hits. Return the others' numbers.

        ``keys`` and ``slots`` are of ``reader.candidates``, for these positions. All values of a group are located,
        then copied, then confirmed, each in one pass over columns. A value that changes meanwhile is left.
        """
        rest: list[int] = []
        done, total = 0, len(positions)
        while done < total:
            group = positions[done:]
            found = reader.locate_many(keys[done:], slots[done:])
            ends = found.lengths.cumsum()
            most = GROUP_BYTES * self._copier.threads
            if ends[-1] > most:
                count = max(1, int(ends.searchsorted(most, "right")))
                found = found.head(count)
                group = group[:count]
            starts = np.where(found.settled, found.starts, -1).tolist()
            lengths = found.lengths.tolist()
            self._copy_group(reader, group, starts, lengths, sinks, found.settled)
            kept = reader.confirm_many(found)
            if kept.all():
                for position, length in zip(group, lengths):
                    results[position] = length
            else:
                for number, (position, length, hit) in enumerate(zip(group, lengths, kept.tolist()), done):
                    if hit:
                        results[position] = length
                    else:
                        rest.append(number)
            done += len(group)
        return rest

    def _copy_group(
        self, reader: ArenaReader, positions: Sequence[int], starts: list[int], lengths: list[int],
        sinks: Sequence[Any], settled: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Copy the values at these starts (-1: none) to their sinks. Those that it does not copy are unsettled then."""
        base, data = reader.data_address, reader.data
        copier, held = self._copier, COMPANY.held_bytes
        large: list[tuple[int, int, int]] = []
        copy = copier.copy if copier.threads == 1 else lambda *piece: large.append(piece)
        for number, (position, start, length) in enumerate(zip(positions, starts, lengths)):
            if start < 0:
                continue
            sink = sinks[position]
            kind = type(sink)
            if kind is Span:
                if length != sink.size and not fits(length, sink):
                    settled[number] = False
                elif length < RELEASE_BYTES:
                    memmove(sink.address, base + start, length)
                else:
                    copy(sink.address, base + start, length)
            elif kind is memoryview and length <= len(sink):
                if length < held:
                    sink[:length] = data[start : start + length]
                elif length < RELEASE_BYTES:
                    memmove(address_of(sink), base + start, length)
                else:
                    copy(address_of(sink), base + start, length)
            else:
                settled[number] = False
        if large:
            copier.copy_all(large, reader.node)

    def _copy_apart(self, reader: ArenaReader, start: int, length: int, sink: Any) -> None:
        """Copy to what is no single piece of host memory."""
        if isinstance(sink, Ranges):
            scatter(sink, reader.data, reader.data_address, start, self._copier, reader)
        else:
            sink.copy_from_mapping(reader, start, length)

    def copy_to_device(
        self, reader: ArenaReader, positions: Sequence[int], digests: Sequence[bytes], sinks: Sequence[Any],
        results: list[Any],
    ) -> list[int]:  # fmt: skip
        """Read values into GPU memory, and fill in the lengths of plain hits. Return all other positions.

        The first position's sink is on a device. Raises DeviceError.
        """
        if self.checksum:  # which the CPU compares, of host memory
            return list(positions)
        rest: list[int] = []
        base = reader.data_address
        device: DeviceBuffer = sinks[positions[0]]
        pinned = device.pinned(reader)
        keys, slots = reader.candidates([digests[position] for position in positions])
        done = 0
        while done < len(positions):
            found = reader.locate_many(keys[done : done + DEVICE_KEYS], slots[done : done + DEVICE_KEYS])
            count = max(1, int(found.lengths.cumsum().searchsorted(DEVICE_BYTES, "right")))
            found = found.head(count)
            group = positions[done : done + count]
            done += len(group)
            settled = found.settled.tolist()
            copies: list[DeviceCopy] = []
            for number, (position, start, length) in enumerate(
                zip(group, found.starts.tolist(), found.lengths.tolist())
            ):
                if settled[number]:
                    sink = sinks[position]
                    if on_device(sink) and fits(length, sink):
                        copies.append((sink, base + start, length, pinned))
                    else:
                        found.settled[number] = False
            if copies:
                copies[0][0].copy_to_device(copies)
            for position, length, hit in zip(group, found.lengths.tolist(), reader.confirm_many(found).tolist()):
                if hit:
                    results[position] = length
                else:
                    rest.append(position)
        return rest

    def owns(self, reader: ArenaReader, found: Located) -> bool:
        """Return whether a confirmed entry is of this client's namespace, and count one that is not.

        To be asked before anything is said of an entry: another one's kind and length are none of the reader's.
        """
        own = reader.is_own(found)
        reader.counts[Word.UNSOUND] += not own
        return own

    def sound(self, reader: ArenaReader, found: Located, got: Any, sink: memoryview | Span | None) -> bool:
        """Return whether a value is of this client's namespace, and still has the checksum it was stored with."""
        if not reader.is_own(found):
            return False
        if not self.checksum:
            return True
        return self.check(found.flags, found.crc, got if sink is None else head_bytes(sink, found.length))

    def differs(self, flags: int) -> bool:
        """Return whether an entry is a manifest, and values are wanted, or the other way round."""
        return bool((flags ^ self.kind) & ENTRY_LARGE)

    def check(self, flags: int, crc: int, data: Any, before: int = 0) -> bool:
        """Return whether a value has the checksum in its entry. Without a checksum that field is 0.

        So an entry that lost its flag to a stray store is not taken for one that never had a checksum. ``before``: the
        checksum of what is before the data, if they are a part of what ``crc`` is of.
        """
        if (zlib.crc32(data, before) == crc and len(data) > 0) if flags & ENTRY_CRC else not crc:
            return True
        self.counters["crc_errors"] += 1
        log.error("a value does not match its checksum: counted as a miss")
        return False


def head_bytes(sink: memoryview | Span, length: int) -> memoryview:
    """Return the first bytes of what was read, to check them."""
    return sink[:length] if type(sink) is memoryview else sink.host_view(length)
