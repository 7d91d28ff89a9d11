"""An open-addressing hash table in numpy arrays: (key, owner) -> columns, with operations on whole batches.

Keys are 64-bit hashes that strangers may choose, so where a key goes depends on random numbers of this table. A key's
home is a bucket of 8 slots. Where that is full it lies in one of the next buckets. A search ends at the first bucket
that has a slot that was never used. A slot that is given up becomes such a slot again only if its bucket has another
one already: so no search ends early.

The table grows by a fifth when three quarters of its slots are in use. So a slot of B bytes costs between 1.33 and 1.6
times B for each entry, and twice that in the moment when it grows. Entries of owners that are gone are dropped then.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

BUCKET: Final = 8
#: Owners of slots that were never used, and of slots that were given up.
EMPTY: Final = 0
GONE: Final = 0xFFFF_FFFF
FILL: Final = 0.75
GROWTH: Final = 1.19
#: So few searches are done one by one.
_FEW: Final = 5
BUCKETS_MIN: Final = 8

Keys = NDArray[np.uint64]
Owners = NDArray[np.uint32]
Slots = NDArray[np.int64]

_MASK: Final = (1 << 64) - 1
_HALF: Final = np.uint64(32)


class Table:
    """See above. Not thread-safe.

    Args:
        columns: name and type of what is kept for each entry.
        alive: tells for an array of owners which of them still count. Asked when the table is rebuilt.
    """

    def __init__(
        self, columns: Mapping[str, DTypeLike], alive: Callable[[Owners], NDArray[np.bool_]], buckets: int = BUCKETS_MIN
    ) -> None:  # fmt: skip
        self._alive = alive
        self._types = dict(columns)
        self._seed, self._first, self._second, self._third = (secrets.randbits(64) | 1 for _ in range(4))
        self._allocate(buckets)

    def _allocate(self, buckets: int) -> None:
        slots = buckets * BUCKET
        self._buckets = buckets
        self.keys: Keys = np.zeros(slots, np.uint64)
        self.owners: Owners = np.zeros(slots, np.uint32)
        self.columns: dict[str, NDArray[Any]] = {name: np.zeros(slots, kind) for name, kind in self._types.items()}
        #: Slots that are not EMPTY, and those of them that hold an entry, also of an owner that is gone.
        self.used = 0
        self.entries = 0

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return int(self.keys.nbytes + self.owners.nbytes + sum(each.nbytes for each in self.columns.values()))

    # -- where a key goes --------------------------------------------------------------------------------

    def _homes(self, keys: Keys, owners: Owners) -> Slots:
        """Return the home bucket of each. Multiplications wrap, as they should."""
        mixed = (keys ^ np.uint64(self._seed)) * np.uint64(self._first)
        mixed ^= mixed >> _HALF
        mixed = (mixed + owners.astype(np.uint64) * np.uint64(self._second)) * np.uint64(self._third)
        homes: Slots = ((mixed >> _HALF) * np.uint64(self._buckets) >> _HALF).astype(np.int64)
        return homes

    def _home(self, key: int, owner: int) -> int:
        """Do :meth:`_homes` for one."""
        mixed = (key ^ self._seed) * self._first & _MASK
        mixed ^= mixed >> 32
        mixed = (mixed + owner * self._second) * self._third & _MASK
        return (mixed >> 32) * self._buckets >> 32

    # -- one entry ---------------------------------------------------------------------------------------

    def find_one(self, key: int, owner: int) -> int:
        """Return the slot of an entry, or -1. O(1) expected."""
        bucket = self._home(key, owner)
        for _ in range(self._buckets):
            start = bucket * BUCKET
            owners = self.owners[start : start + BUCKET].tolist()
            if owner in owners:
                keys = self.keys[start : start + BUCKET].tolist()
                for lane in range(BUCKET):
                    if keys[lane] == key and owners[lane] == owner:
                        return start + lane
            if EMPTY in owners:
                return -1
            bucket = (bucket + 1) % self._buckets
        return -1

    def add_one(self, key: int, owner: int) -> int:
        """Return the slot of a new entry, whose columns are 0. The pair must not be there. O(1) amortized."""
        self.reserve(1)
        self.entries += 1
        return self._place(key, owner)

    def _place(self, key: int, owner: int) -> int:
        bucket = self._home(key, owner)
        while True:
            start = bucket * BUCKET
            owners = self.owners[start : start + BUCKET].tolist()
            for lane in range(BUCKET):
                if owners[lane] in (EMPTY, GONE):
                    slot = start + lane
                    self.used += owners[lane] == EMPTY
                    self.keys[slot], self.owners[slot] = key, owner
                    return slot
            bucket = (bucket + 1) % self._buckets

    # -- many entries ------------------------------------------------------------------------------------

    def find(self, keys: Keys, owners: Owners) -> Slots:
        """Return the slot of each entry, or -1. O(keys) expected."""
        found = np.full(len(keys), -1, np.int64)
        pending = np.arange(len(keys))
        buckets = self._homes(keys, owners)
        tables = self.keys.reshape(-1, BUCKET), self.owners.reshape(-1, BUCKET)
        for _ in range(self._buckets):
            slots = buckets * BUCKET + (tables[0][buckets] == keys[:, None]).argmax(axis=1)
            alike = self.keys[slots] == keys
            hit = alike & (self.owners[slots] == owners)
            found[pending] = np.where(hit, slots, -1)
            # Others of the key may be in the bucket beside one of another owner, or of none.
            for at in np.flatnonzero(alike & ~hit).tolist():
                found[pending[at]] = self.find_one(int(keys[at]), int(owners[at]))
            open_ = np.flatnonzero(~alike)
            open_ = open_[(tables[1][buckets[open_]] != EMPTY).all(axis=1)]
            if not open_.size:
                break
            pending, keys, owners = pending[open_], keys[open_], owners[open_]
            if len(pending) <= _FEW:
                for at, key, owner in zip(pending.tolist(), keys.tolist(), owners.tolist()):
                    found[at] = self.find_one(key, owner)
                break
            buckets = (buckets[open_] + 1) % self._buckets
        return found

    def add(self, keys: Keys, owners: Owners) -> Slots:
        """Return the slots of new entries, whose columns are 0. All are different and none is there. O(keys)."""
        self.reserve(len(keys))
        found = np.empty(len(keys), np.int64)
        pending = np.arange(len(keys))
        buckets = self._homes(keys, owners)
        by_bucket = self.owners.reshape(-1, BUCKET)
        while len(pending):
            if len(pending) <= _FEW:
                for at in pending.tolist():
                    found[at] = self._place(int(keys[at]), int(owners[at]))
                break
            order = np.argsort(buckets, kind="stable")
            pending, buckets = pending[order], buckets[order]
            numbers = np.arange(len(buckets))
            begins = np.where(buckets[1:] != buckets[:-1], numbers[1:], 0)
            rank = numbers.copy()
            rank[1:] -= np.maximum.accumulate(begins)
            there = by_bucket[buckets]
            order_of_free = ((there == EMPTY) | (there == GONE)).cumsum(axis=1)
            fits = order_of_free[:, -1] > rank
            lanes = (order_of_free[fits] == rank[fits, None] + 1).argmax(axis=1)
            slots = buckets[fits] * BUCKET + lanes
            mine = pending[fits]
            self.used += int((self.owners[slots] == EMPTY).sum())
            self.keys[slots], self.owners[slots] = keys[mine], owners[mine]
            found[mine] = slots
            pending, buckets = pending[~fits], (buckets[~fits] + 1) % self._buckets
        self.entries += len(keys)
        return found

    def remove(self, slots: Slots | Sequence[int]) -> None:
        """Give up entries, all different. O(slots)."""
        where = np.asarray(slots, np.int64)
        if not where.size:
            return
        ends = (self.owners.reshape(-1, BUCKET)[where // BUCKET] == EMPTY).any(axis=1)
        self.owners[where] = np.where(ends, EMPTY, GONE)
        for column in self.columns.values():
            column[where] = 0
        self.used -= int(ends.sum())
        self.entries -= len(where)

    def remove_one(self, slot: int) -> None:
        """Give up an entry. O(1)."""
        start = slot // BUCKET * BUCKET
        ends = EMPTY in self.owners[start : start + BUCKET].tolist()
        self.owners[slot] = EMPTY if ends else GONE
        for column in self.columns.values():
            column[slot] = 0
        self.used -= ends
        self.entries -= 1

    # -- its size ----------------------------------------------------------------------------------------

    def reserve(self, more: int) -> None:
        """Make room for so many new entries. O(entries) if it has to be rebuilt, and then rarely again."""
        if self.used + more <= FILL * self.slots:
            return
        self.rebuild(more)

    def rebuild(self, more: int = 0) -> None:
        """Drop what was given up and entries of owners that are gone. O(slots)."""
        held = np.flatnonzero((self.owners != EMPTY) & (self.owners != GONE))
        held = held[self._alive(self.owners[held])]
        keys, owners = self.keys[held], self.owners[held]
        columns = {name: column[held] for name, column in self.columns.items()}
        self._allocate(max(BUCKETS_MIN, int((len(held) + more) * GROWTH / (FILL * BUCKET)) + 1))
        # In the order of their homes each goes to its home's first slot, or behind the one before it. So all slots
        # from an entry's home to the entry are in use.
        homes = self._homes(keys, owners)
        order = np.argsort(homes)
        numbers = np.arange(len(held))
        slots = numbers + np.maximum.accumulate(BUCKET * homes[order] - numbers)
        inside = int(np.searchsorted(slots, self.slots))
        first, rest = order[:inside], order[inside:]  # what the last bucket has no room for goes on at the first
        self.keys[slots[:inside]], self.owners[slots[:inside]] = keys[first], owners[first]
        self.used = self.entries = inside
        for name, column in columns.items():
            self.columns[name][slots[:inside]] = column[first]
        for at in rest.tolist():
            self.entries += 1
            slot = self._place(int(keys[at]), int(owners[at]))
            for name, column in columns.items():
                self.columns[name][slot] = column[at]


__all__ = ["BUCKET", "EMPTY", "GONE", "Keys", "Owners", "Slots", "Table"]
