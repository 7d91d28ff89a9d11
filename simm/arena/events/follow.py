"""Follow a worker's ring of events: first the table, a page at a time, then what changes, and the table after a gap.

Whoever adds up the steps of a :class:`Follower` has, after each of them, entries that could all be read at the moment
of its end; and all entries that the worker has told, once it has told everything and the follower is not ``due``. (With
a ring of more than 32 MiB a step may be behind by what does not fit ``STEP_READS`` reads: 4 million records. What went
then is claimed until the next step. After a gap, or a worker's death, what was claimed before stays so until the first
pass of the look comes to its slot.)

No step is long: each takes the records that are new, and one page of the table while a look lasts. So a look needs the
memory of a page, and who follows does other things between two steps. Where few slots are in use a page has more slots.

A page at a sequence number
---------------------------
The worker writes on while a page is copied. So the copy is of no single moment, and the records put it right:

    1  all records before S have been applied, and B = HEAD
    2  copy the page
    3  leave out what the records from B - LOOKBACK to S, applied in order, say is gone
    4  leave out the slots of which a record from S on tells, up to HEAD as it is by now
    5  claim the rest, and apply the records from S on

Each record says what is true of one slot (or of a shard, or of a namespace) from then on, whatever was before. What
went after (1) has a record that (5) applies. What was told before (1), and went only after it was copied, is within
``LOOKBACK`` records before B: a worker tells no more than that in advance. An entry that comes during (2) is copied, or
told later. So a commit or an eviction between two pages is a record like any other: it is applied to its slot, whether
the look has been there or not. By (4) a slot's copy never undoes what a later record has said of it.

After a death the records before ANEW are of a worker that told what it did not do any more. So a look begins behind the
last ANEW of the last LOOKBACK records, and (3) goes no further back. With an ANEW at S or later, a gap, or a ring that
is another one by now, the page is not claimed, and the look begins again.

Two passes
----------
After a gap an entry that is claimed of a slot may lie in another one. To claim it there, and to say afterwards that it
went from the first, would lose it. So the first pass only says what is not in its slot any more. It claims nothing, of
records neither. Behind it all claims are true again, so no digest is claimed of two slots. The second pass claims what
it finds. Who claims nothing, as at the start, needs no first pass.

A gap, or an ANEW, in a look begins it anew, with the first pass. So as long as they come more often than a look lasts,
what has come since the first one is not claimed.

What a slot has
---------------
A record names a slot. A follower keeps the digest that it has claimed of each slot (``claimed``). So it can say which
entry goes with a removal, and claims of a stored one what it reads there then. That may be a later entry than the one
that was told. It is there, and a record of its own follows. But what was read may go at the same moment. So the ring is
read again behind the copy of the slots, and what has been told by then as going is not claimed: a worker tells that
before it does it.

Of one slot, only its last record counts. Removals of several slots come before what came in others, as no digest is
in two slots, and one that moved was removed first.

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
from .claimed import CLAIM_FIELDS, CLAIM_NAMES, BySlot, Claimed
from .listing import Mapped, entries_between, entries_in
from .ring import ANEW, CLOSED, LOOKBACK, NAMESPACE, RECORD_FIELDS, REMOVED, SHARD, STORED, RingReader

#: Records of one read, and reads of one step, at most. What came meanwhile has rarely more than one.
READ_RECORDS: Final = 1 << 16
STEP_READS: Final = 64
#: Slots of one page of a look: some 20 ms for who adds their entries up. So many times more where few are in use.
LOOK_SLOTS: Final = 1 << 14
LOOK_WIDER: Final = 16
#: What has happened: to the entry with a digest, of two words, and its namespace; or to a shard or a namespace, whose
#: number is ``size``.
CHANGE_FIELDS: Final = np.dtype(
    [("low", "<u8"), ("high", "<u8"), ("size", "u4"), ("namespace", "u2"), ("operation", "u1")]
)


class Step(NamedTuple):
    """What a follower has learned.

    Attributes:
        records: what has happened, in order, as ``CHANGE_FIELDS``. Of a run of single entries, one that is among
            those that came is there, though it may be among those that went. One that moved to a page which was copied
            may go in a later run of the same step, and comes again when the worker tells that it is there.
    """

    records: NDArray[np.void]

    @property
    def empty(self) -> bool:
        """True if nothing has happened."""
        return not len(self.records)


_BEGIN: Final = -1
_NOTHING: Final[NDArray[np.void]] = np.zeros(0, CHANGE_FIELDS)
_NO_RECORDS: Final[NDArray[np.void]] = np.zeros(0, RECORD_FIELDS)


class Tables(Protocol):
    """What a follower sees of an arena."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    def page(self, start: int, stop: int) -> NDArray[np.void]:
        """Return the entries in these slots that can be read (``listing.entries_between``)."""

    def some(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """Return what is in these slots (``listing.entries_in``)."""


class MappedTable(NamedTuple):
    """An arena that is mapped here."""

    reader: Mapped

    @property
    def slots(self) -> int:
        return self.reader.geometry.slots

    def page(self, start: int, stop: int) -> NDArray[np.void]:
        return entries_between(self.reader, start, stop)

    def some(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        return entries_in(self.reader, slots)


class Follower:
    """Follows one ring.

    Args:
        ring: the ring.
        table: what is copied.
        claimed: keeps what is claimed, nothing yet; None: ``BySlot``.
    """

    def __init__(self, ring: RingReader, table: Tables, claimed: Claimed | None = None) -> None:
        self._ring = ring
        self._table = table
        self._slots = table.slots
        self._claimed = BySlot(table.slots) if claimed is None else claimed
        #: Sequence number of the next record, and of the first that a look believes.
        self.at = self._first = 0
        #: The first slot of the next page, of two passes; _BEGIN where a look is to begin. It ends at twice the slots.
        self._page = _BEGIN
        #: Slots of the next page.
        self._width = LOOK_SLOTS
        #: Times that a look at the table began, and gaps in the ring.
        self.looks = 0
        self.gaps = 0

    @property
    def due(self) -> bool:
        """True until the look at the table has come to its end."""
        return self._page < 2 * self._slots

    @property
    def _sorting(self) -> bool:
        """True in the first pass."""
        return self._page < self._slots

    def step(self) -> Step:
        """Return what has happened since the last step. O(records), and O(slots of a page) until it is not due."""
        if self._page == _BEGIN and not self._begin():
            return Step(_NOTHING)
        if not self.due:
            return Step(self._changes(self._read_on()))
        page, slots = self._page, self._slots
        start = page % slots
        stop = min(start + self._width, slots)
        # What the worker may not have carried out when the page is copied. A ring that is read late has none of it.
        before = self._between(max(self._first, self._ring.head - LOOKBACK), self.at)
        if self._page == _BEGIN:
            return Step(_NOTHING)
        rows = self._table.page(start, stop)
        copied = len(rows)
        records = self._read_on()
        # With a gap, or an ANEW, what was copied cannot be put right.
        if self._page == _BEGIN:
            return Step(self._changes(records))
        chosen = np.ones(stop - start, np.bool_)
        chosen[_told_of(records, start, stop)] = False
        rows = _left_by(before, rows, start, stop)
        gone, come = self._put(start + np.flatnonzero(chosen), rows[chosen[rows["slot"] - start]])
        parts = [gone, *([] if self._sorting else [come]), self._changes(records)]
        self._page = page + stop - start
        if max(copied, len(gone)) > LOOK_SLOTS or self._page == slots:  # the second pass begins where the first began
            self._width = LOOK_SLOTS
        elif max(copied, len(gone)) < LOOK_SLOTS // 4:
            self._width = min(2 * self._width, LOOK_WIDER * LOOK_SLOTS)
        return Step(np.concatenate(parts))

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
        inside = slots < self._slots
        slots, told = slots[inside].astype(np.int64), told[inside]
        return self._put(slots, self._still(self._table.some(slots[told == STORED])))

    def _put(self, slots: NDArray[np.int64], rows: NDArray[np.void]) -> list[NDArray[np.void]]:
        """Note that these slots, in order, have these entries and no others. Return which went, and which came."""
        some = self._claimed.among(slots)
        some[np.searchsorted(slots, rows["slot"])] = True
        slots = slots[some]  # of the others nothing is claimed, before and after
        before, now = self._claimed.of(slots), np.zeros(len(slots), CLAIM_FIELDS)
        at = np.searchsorted(slots, rows["slot"])
        if self._sorting:  # what is claimed of its slot already, and nothing else
            same = (before["low"][at] == rows["low"]) & (before["high"][at] == rows["high"])
            rows, at = rows[same], at[same]
        for name in CLAIM_NAMES:
            now[name][at] = rows[name]
        another = (before["low"] != now["low"]) | (before["high"] != now["high"])
        went = before[another & ((before["low"] | before["high"]) != 0)]
        changed = another | (before["namespace"] != now["namespace"])
        self._claimed.put(slots[changed], now[changed])
        gone, come = np.zeros(len(went), CHANGE_FIELDS), np.zeros(len(rows), CHANGE_FIELDS)
        for name in CLAIM_NAMES:
            gone[name], come[name] = went[name], rows[name]
        come["size"] = rows["size"]
        gone["operation"], come["operation"] = REMOVED, STORED
        return [gone, come]

    def _advanced(self, numbers: NDArray[np.uint32]) -> None:
        """Forget what is claimed of the slots of these namespaces. As long as ``Claimed.forget``."""
        lost = np.zeros(1 << 16, np.bool_)
        lost[numbers[numbers < len(lost)]] = True  # others may have written any number
        self._claimed.forget(lost)

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

    def _begin(self) -> bool:
        """Begin a look: behind the last ANEW of the last records. Return False if the ring cannot be read now."""
        self.looks += 1
        end = self._ring.head
        self._first = self.at = max(0, end - LOOKBACK)
        self._page, self._width = 0 if self._claimed.entries else self._slots, LOOK_SLOTS
        told = np.flatnonzero(self._between(self.at, end)["operation"] == ANEW)
        if told.size:
            self._first = self.at = self.at + int(told[-1]) + 1
        return self._page != _BEGIN

    def _between(self, at: int, end: int) -> NDArray[np.void]:
        """Return these records; none, and a gap is noted, if they are not all there."""
        parts = [_NO_RECORDS]
        while at < end:
            got = self._ring.read(at, end - at)
            if got.gap or got.next == at:  # without a record: others have set the ring's end back
                self._gap()
                return _NO_RECORDS
            at = got.next
            parts.append(got.records)
        return np.concatenate(parts)

    def _read_on(self) -> NDArray[np.void]:
        """Do :meth:`_read` up to where the ring ends now: a large table takes a while to copy."""
        end = self._ring.head
        parts = [self._read()]
        for _ in range(STEP_READS - 1):
            if self._page == _BEGIN or not len(parts[-1]) or self.at >= end:
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
            self._page = _BEGIN
            return got.records[: told[0]]
        return got.records

    def _gap(self) -> None:
        self.gaps += 1
        self._page = _BEGIN


def _told_of(records: NDArray[np.void], start: int, stop: int) -> NDArray[np.int64]:
    """Return the slots from ``start`` to before ``stop`` of which these records tell, counted from ``start``."""
    slots = records["argument"][records["operation"] <= REMOVED].astype(np.int64)
    return slots[(slots >= start) & (slots < stop)] - start


def _left_by(records: NDArray[np.void], rows: NDArray[np.void], start: int, stop: int) -> NDArray[np.void]:
    """Return those entries of a page's slots of which these records, applied in order, do not say that they go."""
    if not len(rows) or not len(records):
        return rows
    places, operations = np.arange(1, len(records) + 1), records["operation"]

    def last(operation: int, numbers: NDArray[np.int64], most: int) -> NDArray[np.int64]:
        """Return for each number the place of the last such record of it, 0 for none."""
        found = np.zeros(most, np.int64)
        chosen = (operations == operation) & (numbers >= 0) & (numbers < most)
        found[numbers[chosen]] = places[chosen]  # of several for one number the last one stays
        return found

    numbers, slots = records["argument"].astype(np.int64), rows["slot"] - start
    gone = last(REMOVED, numbers - start, stop - start)[slots]
    for operation, of in ((SHARD, rows["low"] & np.uint64(SHARD_MASK)), (NAMESPACE, rows["namespace"])):
        gone = np.maximum(gone, last(operation, numbers, 1 << 16)[of.astype(np.intp)])
    gone = np.maximum(gone, np.max(places[operations == CLOSED], initial=0))
    left: NDArray[np.void] = rows[last(STORED, numbers - start, stop - start)[slots] >= gone]
    return left
