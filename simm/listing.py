"""Which values of frozen shards lie in an arena: what a previous owner's stream tells the new owner's mover.

It reads the arena as any reader does, from maps of its own that it cannot write, so a listing takes none of the
worker's time. A page of slots is looked at in one piece by numpy: the seqs, then whole slots, then the seqs
again (x86 keeps that order). A slot whose seq was even and the same both times was at rest in between, and is listed as
it was; one that was not is left out, as it was just being given up: nothing is stored in a frozen shard.

An entry may be gone as soon as it is listed. Whoever fetches it finds out.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .constants import SHARD_COUNT, SLOT_BYTES
from .hashing import SHARD_MASK
from .layout import HEADER_BYTES, NAMESPACE_LINE_BYTES, NAMESPACES, SLOT_FIELDS, UNDO_BYTES
from .messages import Listed, NamespaceName
from .reader import ArenaReader
from .shards import FROZEN, shards_in
from .shm import AttachedSegment

#: Slots looked at for one answer: 4 MiB of them, 2 ms of the stream's time.
PAGE_SLOTS: Final = 1 << 16
#: Most entries in one answer: half a frame.
ENTRIES_MAX: Final = 16_384

_LENGTH: Final = struct.Struct("@Q")


class Lister:
    """Lists what one arena holds of given shards. Raises SegmentError when the arena is gone."""

    def __init__(self, reader: ArenaReader) -> None:
        self.reader = reader
        geometry = reader.geometry
        with AttachedSegment.open(reader.name) as segment:
            size = UNDO_BYTES + NAMESPACES * NAMESPACE_LINE_BYTES
            self._ledger = memoryview(segment.map(geometry.ledger_offset, size, writable=False))
        self._names: dict[int, str] = {}

    def page(self, shards: bytes, cursor: int, most: int) -> Listed:
        """LIST: the values in slots from ``cursor`` on, at most ``most``, of those of the shards that are frozen.

        O(PAGE_SLOTS). The answer's cursor is where to go on, 0 when that was all. Raises UsageError when ``shards`` is
        no bitmap.
        """
        reader = self.reader
        slots = reader.geometry.slots
        stop = min(cursor + PAGE_SLOTS, slots)
        if cursor >= stop:
            return Listed(0, [], [])
        most = max(1, min(most, ENTRIES_MAX))
        asked = np.zeros(SHARD_COUNT, np.bool_)
        asked[shards_in(shards)] = True
        asked &= np.frombuffer(reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES) >= np.uint64(FROZEN)
        rows = self._at_rest(cursor, stop)
        found = np.flatnonzero((rows["offset"] != 0) & asked[(rows["low"] & np.uint64(SHARD_MASK)).astype(np.intp)])
        if len(found) > most:
            stop = cursor + int(found[most])
            found = found[:most]
        rows = rows[found]
        digests = np.stack((rows["low"], rows["high"]), axis=1).tobytes()
        names = self.names(np.unique(rows["namespace"]).tolist())
        entries = [
            (digests[at * 16 : at * 16 + 16], length, flags, namespace)
            for at, (length, flags, namespace) in enumerate(
                zip(rows["length"].tolist(), rows["flags"].tolist(), rows["namespace"].tolist())
            )
            if namespace in names
        ]
        return Listed(stop if stop < slots else 0, entries, [NamespaceName(*item) for item in names.items()])

    def _at_rest(self, start: int, stop: int) -> NDArray[np.void]:
        """Copies of the slots from ``start`` to before ``stop``; those that were being written are all zeros."""
        reader = self.reader
        live = np.frombuffer(
            reader.words, SLOT_FIELDS, stop - start, reader.geometry.slots_offset + start * SLOT_BYTES
        )
        before = live["seq"].copy()
        rows: NDArray[np.void] = live.copy()
        after = live["seq"].copy()
        rows[(before != after) | (before & np.uint64(1) != 0)] = np.zeros(1, SLOT_FIELDS)
        return rows

    def names(self, numbers: list[int]) -> Mapping[int, str]:
        """What these namespace ids mean; unknown ones are left out."""
        for number in numbers:
            if number in self._names or number >= NAMESPACES:
                continue
            at = UNDO_BYTES + number * NAMESPACE_LINE_BYTES
            (size,) = _LENGTH.unpack_from(self._ledger, at)
            if 0 < size <= NAMESPACE_LINE_BYTES - _LENGTH.size:
                start = at + _LENGTH.size
                self._names[number] = bytes(self._ledger[start : start + size]).decode(errors="replace")
        return {number: self._names[number] for number in numbers if number in self._names}
