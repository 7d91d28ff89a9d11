"""Pinned values in an arena that this process maps: how :class:`~.pins.Pins` holds and reads those of its own host.

A client with checksums delivers bytes that it has checked in a copy of its own: others may write into the arena.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...arena.reader import ArenaReader, Located
from ...host.buffers import Copier, DeviceCopy, Ranges, address_of
from ...host.parts import Copy, has_device, in_host_memory, scatter
from .checked import Check, Checked, Run, bytes_of, packed

if TYPE_CHECKING:
    from ...ipc.session import WorkerSession

#: A device gets checked copies after so many bytes, which are kept until then.
_DEVICE_BYTES: Final = 64 << 20


class ArenaPins:
    """Values in an arena that this process maps. Any thread may call it."""

    def __init__(self, reader: ArenaReader, copier: Copier, check: Check | None) -> None:
        self.reader = reader
        self._copier = copier
        self._check = check
        #: By position: where the value begins in the data, its digest, and what a read must confirm or check, if any.
        self.values: dict[int, tuple[int, bytes, Located | Checked | None]] = {}
        #: What was to be pinned, and the pin of each, 0 for none.
        self.positions: Sequence[int] = ()
        self._pins: list[int] = []
        self._session: WorkerSession | None = None
        self._finalizer: weakref.finalize[..., ArenaPins] | None = None

    def take_pins(self, session: WorkerSession, pins: list[int], ends: Iterator[Callable[[], None]]) -> None:
        """Own these pins of a session from now on, and the copy that the caller has begun at it.

        ``pins``: of each of ``positions``, 0 for none. ``ends``: how that copy ends, as for ``View.pinned``. If this
        raises, the caller does it, or this does.
        """
        self._session, self._pins = session, pins
        self._finalizer = weakref.finalize(self, _unpin, session, self.reader, pins, ends)
        self._finalizer.atexit = False

    def read(self, wants: Sequence[tuple[int, Ranges]], results: dict[int, Any]) -> None:
        """Read ranges of values. Fill in results by position: above 0 for a hit. Raises DeviceError."""
        reader, copier = self.reader, self._copier
        data, address = reader.data, reader.data_address
        devices: list[DeviceCopy] = []
        shared: list[Copy] | None = [] if copier.shares(sum(ranges.total for _, ranges in wants)) else None
        #: Room for one checked copy after the other; and what devices have yet to get of these.
        room = memoryview(b"")
        kept: list[Ranges] = []
        kept_bytes = 0
        for position, ranges in wants:
            held = self.values.get(position)
            if held is None:
                continue
            start, digest, found = held
            if found is None:
                scatter(ranges, data, address, start, copier, reader, devices, shared)
            elif isinstance(found, Checked):
                runs = found.runs(ranges)
                if len(room) < bytes_of(runs):
                    room = np.empty(bytes_of(runs), np.uint8).data
                if not self._copy_checked(start, digest, found, runs, room):
                    self.values.pop(position, None)
                    continue
                ranges = packed(ranges, runs)
                if ranges.rows is None and has_device(part[3] for part in ranges.parts):
                    ranges, copies = in_host_memory(ranges)
                    devices += copies
                    kept.append(ranges)
                    kept_bytes += ranges.total
                scatter(ranges, room, address_of(room), 0, copier)
                if kept_bytes >= _DEVICE_BYTES:
                    devices[0][0].copy_to_device(devices)
                    devices, kept, kept_bytes = [], [], 0
            else:
                scatter(ranges, data, address, start, copier, reader)
                if not self._confirm(digest, found):
                    self.values.pop(position, None)
                    continue
            results[position] = 1
        if shared:
            copier.copy_all(shared, reader.node)
        if devices:  # one chain for all: a layer of a thousand pages is one wait for the device
            devices[0][0].copy_to_device(devices)

    def _copy_checked(self, start: int, digest: bytes, value: Checked, runs: Sequence[Run], room: memoryview) -> bool:
        """Copy runs of a value to ``room``, one after the other; return whether they are of the value, and sound."""
        assert self._check is not None
        source, target = self.reader.data_address + start, address_of(room)
        for first, end in runs:
            self._copier.copy(target, source + first, end - first, self.reader.node)
            target += end - first
        if value.found is not None and not self._confirm(digest, value.found):
            return False
        return value.holds(room, runs, self._check)

    def _confirm(self, digest: bytes, found: Located) -> bool:
        """Return whether a value that no pin holds was whole until now."""
        self.reader.touch(found.slot)
        return self.reader.confirm_previous(digest, found.slot, found.seq)

    def drop(self, positions: Sequence[int]) -> None:
        """Release some values before the others. Nothing reads them."""
        some = set(positions)
        for at, (position, pin) in enumerate(zip(self.positions, self._pins)):
            if position in some:
                self.values.pop(position, None)
                if pin and self._session is not None:
                    self._session.unpin_later(pin)
                    self._pins[at] = 0

    def end(self) -> None:
        """Release the values. Nothing reads them any more."""
        if self._finalizer is not None:
            self._finalizer()
        self.values.clear()

    def note_addresses(self, addresses: list[int]) -> bool:
        """Note where the values are in this process, by position. Return False if reads must look at one of them."""
        base = self.reader.data_address
        for position, (start, _, found) in self.values.items():
            if found is not None:
                return False
            addresses[position] = base + start
        return True


def _unpin(
    session: WorkerSession, _reader: ArenaReader, pins: list[int], ends: Iterator[Callable[[], None]]
) -> None:  # fmt: skip
    """Release pins. A finalizer: no lock, no I/O. ``_reader`` kept the mapping until now."""
    for pin in pins:
        if pin:
            session.unpin_later(pin)
    for end in ends:
        end()
