"""List the values of frozen shards for a new owner's mover.

A :class:`Lister` reads from maps that it cannot write, so it costs the worker no time. It copies a page of slots in one
piece (``arena/events/listing.py``). A slot that was in a write is left out: nothing is stored in a frozen shard, so its
entry was being dropped. A listed entry may be gone at once; its fetch then misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..arena.events.listing import PAGE_SLOTS, at_rest
from ..arena.hashing import SHARD_MASK, split
from ..arena.layout import HEADER_BYTES
from ..arena.marks.kept import NEAR, UNTIL_BITS, unpack
from ..arena.reader import ArenaReader
from ..constants import BATCH_KEYS_MAX, KEEP_S_MAX, SHARD_COUNT
from ..host.processes import boottime_ns
from ..wire.keep_messages import LISTED_MARKED, Marked
from ..wire.messages import Listed, NamespaceName
from ..wire.shard_set import FROZEN, shards_in


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
        most = max(1, min(most, BATCH_KEYS_MAX))
        asked = np.zeros(SHARD_COUNT, np.bool_)
        asked[shards_in(shards)] = True
        asked &= np.frombuffer(reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES) >= np.uint64(FROZEN)
        rows = self.at_rest(cursor, stop)
        found = np.flatnonzero(
            (rows["offset"] != 0) & asked[(rows["low"] & np.uint64(SHARD_MASK)).astype(np.intp)]
            & (rows["kept"] >> np.uint32(UNTIL_BITS) != NEAR)  # a copy is of use on this host only
        )  # fmt: skip
        if len(found) > most:
            stop = cursor + int(found[most])
            found = found[:most]
        rows = rows[found]
        flags_of = rows["flags"] & np.uint16(LISTED_MARKED - 1)
        flags_of[(rows["kept"] | rows["group"]) != 0] |= np.uint16(LISTED_MARKED)
        digests = np.stack((rows["low"], rows["high"]), axis=1).tobytes()
        names = self.names(np.unique(rows["namespace"]).tolist())
        entries = [
            (digests[at * 16 : at * 16 + 16], length, flags, namespace)
            for at, (length, flags, namespace) in enumerate(
                zip(rows["length"].tolist(), flags_of.tolist(), rows["namespace"].tolist())
            )
            if namespace in names
        ]
        return Listed(stop if stop < slots else 0, entries, [NamespaceName(*item) for item in names.items()])

    def marks(self, digests: Sequence[bytes]) -> Marked:
        """Return the marks of these values, zeros for one that is not there. O(digests)."""
        reader = self.reader
        now = boottime_ns() // 1_000_000_000
        entries = [(0, 0, 0)] * len(digests)
        slots = np.array(reader.slots_of_many(digests) if digests else (), np.int64)
        found = np.flatnonzero(slots >= 0)
        # All in one call: one for each would hold up the other clients of a stream for long.
        rows = at_rest(reader, 0, reader.geometry.slots, slots[found])
        columns = [rows[name].tolist() for name in ("low", "high", "kept", "group")]
        for at, low, high, kept, group in zip(found.tolist(), *columns):
            if (low, high) == split(digests[at]):
                how, until = unpack(kept)
                left = min(until - now, KEEP_S_MAX)
                entries[at] = (how, left, group) if how and left > 0 else (0, 0, group)
        return Marked(entries)

    def at_rest(self, start: int, stop: int) -> NDArray[np.void]:
        """Return copies of the slots from ``start`` to before ``stop``. A slot in a write is all zeros."""
        return at_rest(self.reader, start, stop)

    def names(self, numbers: list[int]) -> Mapping[int, str]:
        """Return the names of these namespace ids, without unknown ones."""
        for number in numbers:
            if number not in self._names and (name := self.reader.namespace_name(number)) is not None:
                self._names[number] = name
        return {number: self._names[number] for number in numbers if number in self._names}
