"""Follow a worker's ring of events: the whole table once, then what changes, and the table again after a gap.

Whoever adds up the steps of a :class:`Follower` has, after each of them, entries that could all be read at the moment
of its end; and all entries that the worker has told, once it has told everything. (With a ring of more than 32 MiB a
step may be behind by what does not fit ``STEP_READS`` reads: 4 million records in the time of a copy. What went then is
claimed until the next step.)

The table at a sequence number
------------------------------
The worker writes on while the table is copied. So the copy is of no single moment, and the records put it right:

    1  S = HEAD
    2  copy the table
    3  apply, in order, all records from S - LOOKBACK on, up to HEAD as it is by now

Each record says what is true of one slot (or of a shard, or of a namespace) from then on, whatever was before. So it
does no harm to apply one whose effect the copy has. What went after (1) has a record that (3) applies. What was told
before (1), and went only after it was copied, is within ``LOOKBACK`` records before S: a worker tells no more than that
in advance. An entry that comes during (2) is copied, or told later.

What a slot has
---------------
A record names a slot. A follower keeps the digest that it has claimed of each slot. So it can say which entry goes with
a removal, and claims of a stored one what it reads there then. That may be a later entry than the one that was told. It
is there, and a record of its own follows. But what was read may go at the same moment. So the ring is read again behind
the copy of the slots, and what has been told by then as going is not claimed: a worker tells that before it does it.

Of one slot, only its last record counts. Removals of several slots come before what came in others, as no digest is
in two slots, and one that moved was removed first.

After a death the records before ANEW are of a worker that told what it did not do any more. So (3) begins behind the
last ANEW before S. An ANEW at S or later, a gap, or a ring that is another one by now: all over again.

An advance
----------
A namespace's old entries lie in their slots for a while after it has advanced, and are told as going when they are
dropped. But NAMESPACE has taken their claims already. A key that was stored again meanwhile has another digest in
another slot, whose first half is the same, as only its end is the epoch. So a follower forgets what it has claimed of
the namespace's slots at once. Else it would say of the old digest that it goes, and who knows entries by the first half
(``simm.index.publish``) would take that for the new one.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..hashing import SHARD_MASK
from .listing import PAGE_SLOTS, Mapped, entries, entries_in
from .ring import ANEW, CLOSED, LOOKBACK, NAMESPACE, RECORD_FIELDS, REMOVED, SHARD, STORED, RingReader

#: Records of one read, and reads of one step, at most. What came meanwhile has rarely more than one.
READ_RECORDS: Final = 1 << 16
STEP_READS: Final = 64
#: What has happened: to the entry with a digest, of two words, and its namespace; or to a shard or a namespace, whose
#: number is ``size``.
CHANGE_FIELDS: Final = np.dtype(
    [("low", "<u8"), ("high", "<u8"), ("size", "u4"), ("namespace", "u2"), ("operation", "u1")]
)


class Step(NamedTuple):
    """What a follower has learned.

    Attributes:
        whole: all entries, in place of those that were known; None if what was known is still true.
        records: what has happened since, in order, as ``CHANGE_FIELDS``. Of a run of single entries, those that went
            are before those that came.
    """

    whole: NDArray[np.void] | None
    records: NDArray[np.void]

    @property
    def empty(self) -> bool:
        """True if nothing has happened."""
        return self.whole is None and not len(self.records)


_NOTHING: Final[NDArray[np.void]] = np.zeros(0, CHANGE_FIELDS)
_NO_RECORDS: Final[NDArray[np.void]] = np.zeros(0, RECORD_FIELDS)


class Tables(Protocol):
    """What a follower sees of an arena."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    def whole(self) -> NDArray[np.void]:
        """Return all entries (``listing.entries``)."""

    def some(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """Return what is in these slots (``listing.entries_in``)."""


class MappedTable(NamedTuple):
    """An arena that is mapped here."""

    reader: Mapped

    @property
    def slots(self) -> int:
        return self.reader.geometry.slots

    def whole(self) -> NDArray[np.void]:
        return entries(self.reader)

    def some(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        return entries_in(self.reader, slots)


class Follower:
    """Follows one ring.

    Args:
        ring: the ring.
        table: what is copied.
    """

    def __init__(self, ring: RingReader, table: Tables) -> None:
        self._ring = ring
        self._table = table
        #: The digest that is claimed of each slot, as two words, 0 for none; and the number of its namespace.
        self._low, self._high = np.zeros(table.slots, np.uint64), np.zeros(table.slots, np.uint64)
        self._namespace = np.zeros(table.slots, np.uint16)
        #: Sequence number of the next record.
        self.at = 0
        self._due = True
        #: Times that the table was copied, and gaps in the ring.
        self.looks = 0
        self.gaps = 0

    @property
    def due(self) -> bool:
        """True if the next step copies the table."""
        return self._due

    def step(self) -> Step:
        """Return what has happened since the last step. O(records), and O(slots) where the table is copied."""
        records = _NO_RECORDS if self._due else self._read_on()
        if len(records) or not self._due:
            return Step(None, self._changes(records))
        begin = self._ring.head
        self.looks += 1
        self._due = False
        whole = self._table.whole()
        self.at = max(0, begin - LOOKBACK)
        parts = [self._early(begin)]
        if not self._due:
            parts.append(self._read_on())
        # With a gap, or an ANEW, what was copied cannot be put right: the next step does it all again.
        if self._due:
            return Step(None, _NOTHING)
        slots = len(self._low)
        self._low, self._high = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)  # pages of it are used as needed
        self._namespace = np.zeros(slots, np.uint16)
        self._low[whole["slot"]], self._high[whole["slot"]] = whole["low"], whole["high"]
        self._namespace[whole["slot"]] = whole["namespace"]
        return Step(whole, self._changes(np.concatenate(parts)))

    def _changes(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """Return what records say, and note it."""
        if not len(records):
            return _NOTHING
        # Runs of one kind: all that is of slots together, and each other operation with its like.
        operations = records["operation"]
        kinds = np.where(operations <= REMOVED, STORED, operations)
        starts = np.flatnonzero(np.r_[True, kinds[1:] != kinds[:-1]])
        found = []
        for run in np.split(records, starts[1:]):
            if run["operation"][0] <= REMOVED:
                found += self._of_slots(run)
            else:
                made = np.zeros(len(run), CHANGE_FIELDS)
                made["size"], made["operation"] = run["argument"], run["operation"]
                if run["operation"][0] == NAMESPACE:
                    self._advanced(run["argument"])
                found.append(made)
        return np.concatenate(found)

    def _of_slots(self, run: NDArray[np.void]) -> list[NDArray[np.void]]:
        """Return which entries went, and which came."""
        slots, back = np.unique(run["argument"][::-1], return_index=True)
        told = run["operation"][::-1][back]
        inside = slots < len(self._low)
        slots, told = slots[inside].astype(np.int64), told[inside]
        rows = self._still(self._table.some(slots[told == STORED]))
        low, high = np.zeros(len(slots), np.uint64), np.zeros(len(slots), np.uint64)
        namespace = np.zeros(len(slots), np.uint16)
        at = np.searchsorted(slots, rows["slot"])
        low[at], high[at], namespace[at] = rows["low"], rows["high"], rows["namespace"]
        before_low, before_high, before_namespace = self._low[slots], self._high[slots], self._namespace[slots]
        went = ((before_low | before_high) != 0) & ((before_low != low) | (before_high != high))
        self._low[slots], self._high[slots], self._namespace[slots] = low, high, namespace
        gone, come = np.zeros(np.count_nonzero(went), CHANGE_FIELDS), np.zeros(len(rows), CHANGE_FIELDS)
        gone["low"], gone["high"], gone["operation"] = before_low[went], before_high[went], REMOVED
        gone["namespace"] = before_namespace[went]
        for name in ("low", "high", "size", "namespace"):
            come[name] = rows[name]
        come["operation"] = STORED
        return [gone, come]

    def _advanced(self, numbers: NDArray[np.uint32]) -> None:
        """Forget what is claimed of the slots of these namespaces. O(slots), by pages, so that copies stay small."""
        lost = np.zeros(1 << 16, np.bool_)
        lost[numbers[numbers < len(lost)]] = True  # others may have written any number
        for start in range(0, len(self._low), PAGE_SLOTS):
            page = slice(start, start + PAGE_SLOTS)
            low, high = self._low[page], self._high[page]
            gone = np.flatnonzero(lost[self._namespace[page]])
            # Slots of which nothing is claimed have no memory yet, and get none by a store of 0.
            gone = gone[(low[gone] | high[gone]) != 0]
            low[gone] = high[gone] = 0

    def _still(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Return those of these entries of which nobody has told by now that they go."""
        at = self.at
        while len(rows) and at < self._ring.head:
            got = self._ring.read(at, READ_RECORDS)
            if got.gap or got.next == at:
                return rows[:0]  # the next step sees that, too
            at = got.next
            operations, arguments = got.records["operation"], got.records["argument"]
            if (operations >= CLOSED).any():
                return rows[:0]
            lost = np.isin(rows["slot"], arguments[operations == REMOVED])
            lost |= np.isin(rows["low"] & np.uint64(SHARD_MASK), arguments[operations == SHARD])
            lost |= np.isin(rows["namespace"], arguments[operations == NAMESPACE])
            rows = rows[~lost]
        return rows

    def _early(self, begin: int) -> NDArray[np.void]:
        """Return the records up to ``begin``, without those before the last ANEW."""
        parts = []
        while self.at < begin:
            got = self._ring.read(self.at, begin - self.at)
            if got.gap or got.next == self.at:  # without a record: others have set the ring's end back
                self._gap()
                return _NO_RECORDS
            self.at = got.next
            parts.append(got.records)
        records = np.concatenate(parts) if parts else _NO_RECORDS
        told = np.flatnonzero(records["operation"] == ANEW)
        return records[told[-1] + 1 :] if told.size else records

    def _read_on(self) -> NDArray[np.void]:
        """Do :meth:`_read` up to where the ring ends now: a large table takes a while to copy."""
        end = self._ring.head
        parts = [self._read()]
        for _ in range(STEP_READS - 1):
            if self._due or not len(parts[-1]) or self.at >= end:
                break
            parts.append(self._read())
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self) -> NDArray[np.void]:
        """Return the next records, up to an ANEW; note that the table is to be copied if there is one, or a gap."""
        got = self._ring.read(self.at, READ_RECORDS)
        if got.gap:
            self._gap()
            return _NO_RECORDS
        self.at = got.next
        told = np.flatnonzero(got.records["operation"] == ANEW)
        if told.size:
            self._due = True
            return got.records[: told[0]]
        return got.records

    def _gap(self) -> None:
        self.gaps += 1
        self._due = True
