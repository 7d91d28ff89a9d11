"""Near copies in a worker's arena: copies of values that other hosts own, made for readers on this one.

A copy is an ordinary entry: readers find and check it as any other, `advance` ends it, a dead namespace takes it along.
Three things are its own (`simm.sdk.near.promotion` says what copies are for):

* *Room.* All copies take a share of the arena's data at most (``--near-share``): a new one evicts the oldest of them,
  once it is published. One that is refused, as by an old epoch, takes the place of no other namespace's copy, unless
  some copies are pinned: if the room of all others does not suffice, they have gone by the time that shows, and so has
  what its own key had. A namespace at its quota makes a copy in place of its own ones, those that were made first.
  Clients read in the header how much the share is, and fetch nothing that finds no room. An allocation takes the place
  of a copy of its size class before it evicts anything else. What was just put is spared for a while; a copy never is.
  The chunk of a copy is granted like any other, before anybody knows what for. In a full arena it would be that of the
  copy before, and there would only ever be one. So a copy that is made while there are evictions lets one later
  allocation pass the copies by: each copy costs the arena one other value, and each value that is put one copy.
* *Time.* It is dropped after ``NEAR_S``, used or not. So a reader that was not told of a delete, or of a value that
  changed although that was ruled out, is wrong for no longer.
* *Place.* It does not move with its shard.

The mark in the slot's word says that an entry is a copy. A worker that dies between the publication and the mark leaves
an ordinary entry that nobody looks for once its shard has moved; until then it is found, and evicted in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ...wire.messages import Status
from ..layout import Word
from .kept import NEAR, Shares

if TYPE_CHECKING:
    from ...table import Table
    from ..quotas import Quotas
    from ..sessions import Session
    from .keeping import Keeping

#: Bit of a commit's flags: the value is a near copy. No slot has it, which has a mark instead.
COMMIT_NEAR: Final = 16
#: Copies that are looked at where a namespace at its quota gives some up for one: about a millisecond.
CEDED_MAX: Final = 128
#: An entry of a commit: digest, grant id, length, crc, flags, options.
Entry = tuple[bytes, int, int, int, int, int]
#: Offset, chunk bytes, hold line.
Grant = tuple[int, int, int]


class NearCopies:
    """The near copies of one store.

    Args:
        keeping, table: the store's.
        commit: publishes values. refuse: spends a grant whose value finds no room, and returns the status.
        settle: does the bookkeeping that commits and drops have deferred. drop: drops the entry of a slot.
        evictions: the space's, by reason. failures: the store's refused commits, by cause.
        headers: the words of the arena's headers, the one that is believed and the one that clients see.
    """

    def __init__(
        self, keeping: Keeping, table: Table, commit: Callable[[Session, Sequence[Entry]], list[int]],
        refuse: Callable[[Session, Grant], int], settle: Callable[[], None], drop: Callable[[int], None],
        evictions: Mapping[str, int], failures: dict[str, int], headers: Sequence[memoryview],
    ) -> None:  # fmt: skip
        self._keeping: Final = keeping
        self._table: Final = table
        self._commit: Final = commit
        self._refuse: Final = refuse
        self._settle: Final = settle
        self._drop: Final = drop
        self._evictions: Final = evictions
        self._failures: Final = failures
        self._headers: Final = headers
        self._evicted = 0
        #: A copy is being published.
        self._making = False
        #: What became of copies: made; refused, as there was no room; evicted for another copy, also for one that was
        #: refused then; and expired.
        self.counts = dict.fromkeys(("made", "refused", "replaced", "expired"), 0)
        keeping.drop_near = self._expire

    def say(self, share: int) -> None:
        """Tell clients what copies may take of the data, percent."""
        for words in self._headers:
            words[Word.NEAR_SHARE] = share + 1

    def bound_by(self, shares: Shares) -> None:
        """Take other bounds of what is kept, and of copies. Those beyond them go when there is need, or in time."""
        self._keeping.kept.bound_by(shares)
        self.say(shares[2])

    def commit(self, session: Session, entry: Entry, grant: Grant) -> int:
        """Publish a copy in the chunk of a grant, and spend it; return the status. O(log kept) for each evicted one."""
        self._settle()
        kept, chunk, full = self._keeping.kept, grant[1], sum(self._evictions.values()) != self._evicted
        replaced = self.counts["replaced"]
        if chunk > kept.near_max or (kept.near_bytes + chunk > kept.near_max and kept.oldest_near() < 0):
            self.counts["refused"] += 1
            return self._refuse(session, grant)
        before = self._table.lookup(entry[0])
        renewed = before >= 0 and kept.how(before) == NEAR
        session.grants[entry[1]] = grant
        self._making = True
        try:
            (status,) = self._commit(session, (entry,))
        finally:
            self._making = False
        if status != Status.OK:
            return status
        self._settle()
        while kept.near_bytes + chunk > kept.near_max:
            oldest = kept.oldest_near()
            if oldest < 0:  # all that are left are pinned
                break
            self._drop(oldest)
            self.counts["replaced"] += 1
        slot = self._table.lookup(entry[0])
        if slot >= 0 and kept.near_bytes + chunk > kept.near_max:
            self._drop(slot)
            self.counts["refused"] += 1
            self.counts["replaced"] += renewed
            self._failures["over_quota"] += 1
            return Status.OVER_QUOTA
        if slot >= 0:
            self._keeping.take_near(slot)
            self.counts["made"] += 1
            if full and self.counts["replaced"] == replaced:  # else the next allocation has a chunk of those
                kept.owe(chunk)
            self._evicted = sum(self._evictions.values())
        return status

    def cedes(self, quotas: Quotas, namespace: int, chunk: int) -> bool:
        """Drop copies of a namespace at its quota for one that is being made; return whether it is admitted now.

        Nothing goes for an ordinary value, nor where those that may go are too few. Else those go that were made first,
        and no other namespace's. O(CEDED_MAX), and O(log kept) for each that goes.
        """
        if not self._making:
            return False
        for slot in self._keeping.kept.near_for(namespace, quotas.lacking(namespace, chunk), CEDED_MAX):
            self._drop(slot)
            self.counts["replaced"] += 1
        self._settle()  # before the copy is published: it may be of a key that went with one of these
        return quotas.admits(namespace, chunk)

    def _expire(self, slot: int) -> None:
        self._settle()
        if self._keeping.kept.how(slot) == NEAR:  # else a value was put over it that nobody had counted yet
            self._drop(slot)
            self.counts["expired"] += 1
