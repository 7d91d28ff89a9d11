"""What an arena has, by numpy, beside its worker: copies of slots, and the entries that anybody can read."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...constants import SHARD_COUNT, SLOT_BYTES
from ...wire.shard_set import FROZEN
from ..hashing import SHARD_MASK
from ..layout import ENTRY_EPOCH, EPOCH_WORD, HEADER_BYTES, NAMESPACE_LINE_BYTES, NAMESPACES, SLOT_FIELDS, Geometry

#: Slots that are copied at a time: 4 MiB.
PAGE_SLOTS: Final = 1 << 16

#: An entry: its digest as two words, the bytes of its value, its slot, the number of its namespace.
ENTRY_FIELDS: Final = np.dtype([("low", "<u8"), ("high", "<u8"), ("size", "u4"), ("slot", "u4"), ("namespace", "u2")])


class Mapped(Protocol):
    """What is mapped of an arena, from its start: all words up to the names of namespaces."""

    geometry: Geometry
    words: memoryview


def at_rest(reader: Mapped, start: int, stop: int, chosen: NDArray[np.int64] | None = None) -> NDArray[np.void]:
    """Return copies of the slots from ``start`` to before ``stop``. A slot in a write is all zeros.

    The seqs, whole slots, the seqs again: x86 keeps that order. A slot whose seq was even and the same both times was
    copied as it was. ``chosen``: only these, counted from ``start``.
    """
    live = np.frombuffer(reader.words, SLOT_FIELDS, stop - start, reader.geometry.slots_offset + start * SLOT_BYTES)
    every = slice(None) if chosen is None else chosen
    before = live["seq"][every].copy()
    rows: NDArray[np.void] = live[every].copy()
    after = live["seq"][every].copy()
    rows[(before != after) | (before & np.uint64(1) != 0)] = np.zeros(1, SLOT_FIELDS)
    return rows


def entries_between(reader: Mapped, start: int, stop: int) -> NDArray[np.void]:
    """Return the entries in the slots from ``start`` to before ``stop``, as ``ENTRY_FIELDS``. O(slots).

    They are those that this worker answers for and that can be read, and not of one moment: each was there at some time
    during the call. A lease that has ended (``cluster/epochs.py``) hides values for a time, so it is not looked at.
    """
    words = np.frombuffer(reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES)
    lines = np.frombuffer(
        reader.words, np.uint64, NAMESPACES * NAMESPACE_LINE_BYTES // 8, reader.geometry.names_offset
    ).reshape(NAMESPACES, -1)
    live = np.frombuffer(reader.words, SLOT_FIELDS, stop - start, reader.geometry.slots_offset + start * SLOT_BYTES)
    # Most slots of a store of large values have nothing, and are not copied.
    there = np.flatnonzero(live["offset"] != 0)
    rows = at_rest(reader, start, stop, there)
    # 0 < word < FROZEN in one comparison, as 0 - 1 wraps to the greatest word.
    mine = words[(rows["low"] & np.uint64(SHARD_MASK)).astype(np.intp)] - np.uint64(1) < np.uint64(FROZEN - 1)
    epochs = lines[rows["namespace"] % NAMESPACES, EPOCH_WORD]
    tagged = (rows["flags"] & ENTRY_EPOCH) != 0
    now = rows["high"] >> np.uint64(32) == epochs & np.uint64(0xFFFF_FFFF)
    readable = (rows["offset"] != 0) & mine & np.where(epochs != 0, tagged & now, ~tagged)
    return _as_entries(rows[readable], there[readable] + start)


def entries_in(reader: Mapped, slots: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the entries in these slots, those that lie there and are not in a write. O(slots that are given).

    Whether this worker answers for them is not looked at: of what it has no more, its ring has told.
    """
    rows = at_rest(reader, 0, reader.geometry.slots, slots)
    there = np.flatnonzero(rows["offset"])
    return _as_entries(rows[there], slots[there])


def _as_entries(rows: NDArray[np.void], slots: NDArray[np.int64]) -> NDArray[np.void]:
    found = np.empty(len(rows), ENTRY_FIELDS)
    found["slot"] = slots
    for name, column in (("low", "low"), ("high", "high"), ("size", "length"), ("namespace", "namespace")):
        found[name] = rows[column]
    return found
