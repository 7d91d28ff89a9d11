"""List the values of frozen shards for a new owner's mover.

A :class:`Lister` reads from maps that it cannot write, so it costs the worker no time. It copies a page of slots in one
piece: the seqs, whole slots, the seqs again (x86 keeps that order). A slot whose seq was even and the same both times
is listed as copied. Any other is left out: nothing is stored in a frozen shard, so its entry was being dropped. A
listed entry may be gone at once; its fetch then misses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import SHARD_MASK
from ..arena.layout import HEADER_BYTES, SLOT_FIELDS
from ..arena.reader import ArenaReader
from ..constants import SHARD_COUNT, SLOT_BYTES
from ..wire.messages import Listed, NamespaceName
from ..wire.shard_set import FROZEN, shards_in

#: Slots in one page of a listing: 4 MiB.
PAGE_SLOTS: Final = 1 << 16
#: Most entries in one answer: half a frame.
ENTRIES_MAX: Final = 16_384


class Lister:
    """Lists the values of given shards in one arena."""

    def __init__(self, reader: ArenaReader) -> None:
        self.reader = reader
        #: A number never gets another name.
        self._names: dict[int, str] = {}

    def page(self, shards: bytes, cursor: int, most: int) -> Listed:
        """Return at most ``most`` values of the frozen ones among ``shards``, in slots from ``cursor`` on.

        The answer's cursor is where to continue, 0 at the end. Raise UsageError if ``shards`` is no bitmap.
        O(PAGE_SLOTS).
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
        rows = self.at_rest(cursor, stop)
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

    def at_rest(self, start: int, stop: int) -> NDArray[np.void]:
        """Return copies of the slots from ``start`` to before ``stop``. A slot in a write is all zeros."""
        reader = self.reader
        live = np.frombuffer(reader.words, SLOT_FIELDS, stop - start, reader.geometry.slots_offset + start * SLOT_BYTES)
        before = live["seq"].copy()
        rows: NDArray[np.void] = live.copy()
        after = live["seq"].copy()
        rows[(before != after) | (before & np.uint64(1) != 0)] = np.zeros(1, SLOT_FIELDS)
        return rows

    def names(self, numbers: list[int]) -> Mapping[int, str]:
        """Return the names of these namespace ids, without unknown ones."""
        for number in numbers:
            if number not in self._names and (name := self.reader.namespace_name(number)) is not None:
                self._names[number] = name
        return {number: self._names[number] for number in numbers if number in self._names}
