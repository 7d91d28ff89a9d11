"""Follow a worker's ring of events: the whole table once, then what changes, and the table again after a gap.

Whoever adds up the steps of a :class:`Follower` has, after each of them, entries that could all be read at the moment
of its end; and all entries that the worker has told, once it has told everything.

The table at a sequence number
------------------------------
The worker writes on while the table is copied. So the copy is of no single moment, and the records put it right:

    1  S = HEAD
    2  copy the table
    3  apply, in order, all records from S - LOOKBACK on, up to HEAD as it is by now

Each record says what is true of one digest (or of a shard, or of a namespace) from then on, whatever was before. So it
does no harm to apply one whose effect the copy has. What went after (1) has a record that (3) applies. What was told
before (1), and went only after it was copied, is within ``LOOKBACK`` records before S: a worker tells no more than that
in advance. An entry that comes during (2) is copied, or told later.

After a death the records before ANEW are of a worker that told what it did not do any more. So (3) begins behind the
last ANEW before S. An ANEW at S or later, a gap, or a ring that is another one by now: all over again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .ring import ANEW, LOOKBACK, RECORD_FIELDS, RingReader

#: Records of one step, at most.
STEP_RECORDS: Final = 1 << 16


class Step(NamedTuple):
    """What a follower has learned.

    Attributes:
        whole: all entries, in place of those that were known; None if what was known is still true.
        records: what has happened since, in order.
    """

    whole: NDArray[np.void] | None
    records: NDArray[np.void]

    @property
    def empty(self) -> bool:
        """True if nothing has happened."""
        return self.whole is None and not len(self.records)


_NOTHING: Final[NDArray[np.void]] = np.zeros(0, RECORD_FIELDS)


class Follower:
    """Follows one ring.

    Args:
        ring: the ring.
        look: copies the table (``listing.entries``).
    """

    def __init__(self, ring: RingReader, look: Callable[[], NDArray[np.void]]) -> None:
        self._ring = ring
        self._look = look
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
        records = _NOTHING if self._due else self._read()
        if len(records) or not self._due:
            return Step(None, records)
        begin = self._ring.head
        self.looks += 1
        self._due = False
        whole = self._look()
        self.at = max(0, begin - LOOKBACK)
        parts = [self._early(begin)]
        if not self._due:
            parts.append(self._read())
        # With a gap, or an ANEW, what was copied cannot be put right: the next step does it all again.
        return Step(None, _NOTHING) if self._due else Step(whole, np.concatenate(parts))

    def _early(self, begin: int) -> NDArray[np.void]:
        """Return the records up to ``begin``, without those before the last ANEW."""
        parts = []
        while self.at < begin:
            got = self._ring.read(self.at, begin - self.at)
            if got.gap or got.next == self.at:  # without a record: others have set the ring's end back
                self._gap()
                return _NOTHING
            self.at = got.next
            parts.append(got.records)
        records = np.concatenate(parts) if parts else _NOTHING
        told = np.flatnonzero(records["operation"] == ANEW)
        return records[told[-1] + 1 :] if told.size else records

    def _read(self) -> NDArray[np.void]:
        """Return the next records, up to an ANEW; note that the table is to be copied if there is one, or a gap."""
        got = self._ring.read(self.at, STEP_RECORDS)
        if got.gap:
            self._gap()
            return _NOTHING
        self.at = got.next
        told = np.flatnonzero(got.records["operation"] == ANEW)
        if told.size:
            self._due = True
            return got.records[: told[0]]
        return got.records

    def _gap(self) -> None:
        self.gaps += 1
        self._due = True
