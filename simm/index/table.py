"""An open-addressing hash table in numpy arrays: (key, owner) -> columns, with operations on whole batches.

Keys are 64-bit hashes that strangers may choose, so where a key goes depends on random numbers of this table. A key's
home is a bucket of 8 slots. Where that is full it lies in one of the next buckets. A search ends at the first bucket
that has a slot that was never used. A slot that is given up becomes such a slot again only if its bucket has another
one already: so no search ends early.

The table grows by a fifth when three quarters of its slots are in use. So a slot of B bytes costs between 1.33 and 1.6
times B for each entry, and 2.9 times in the moment when it grows. Entries of owners that are gone are dropped then.
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
#: By how much the table of blocks grows while they are stores' above all.
STORES_GROWTH: Final = 1.6
#: So few searches are done one by one, and so many in the order of their buckets, as a processor's cache likes it.
_FEW: Final = 5
_SORTED: Final = 1 << 14
#: Buckets behind a home that are looked at together.
_NEXT: Final = np.arange(4)
BUCKETS_MIN: Final = 8

Keys = NDArray[np.uint64]
#: Slots that are looked at at once, and pairs of keys and owners that are searched for at once, with 200 bytes each.
_PASS: Final = 1 << 18
_PAIRS: Final = 1 << 16
Owners = NDArray[np.uint32]
Slots = NDArray[np.int64]

_MASK: Final = (1 << 64) - 1
_HALF: Final = np.uint64(32)


#: The lowest bit of a byte.
_FIRST: Final = np.array([0, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))], np.int64)


def _bits(lanes: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return each bucket's lanes, rows of eight, as a byte: what follows is much faster so."""
    return np.packbits(lanes.reshape(-1), bitorder="little")


def all_different(keys: Keys) -> bool:
    """Return whether no key comes twice. O(keys log keys)."""
    inorder = np.sort(keys)
    return bool((inorder[1:] != inorder[:-1]).all())


class Identifiers:
    """Numbers of owners, and which of them count. Not thread-safe."""

    def __init__(self) -> None:
        self._live = np.zeros(64, np.bool_)
        self._free = list(range(len(self._live) - 1, 0, -1))
        self._ended: list[int] = []

    @property
    def ended(self) -> int:
        """Those that count no more, and are not given again yet."""
        return len(self._ended)

    def alive(self, owners: Owners) -> NDArray[np.bool_]:
        """Return which of them count."""
        return self._live[owners]

    def new(self) -> int:
        """Return one that is no other owner's. O(1) amortized."""
        if not self._free:
            size = len(self._live)
            self._live = np.r_[self._live, np.zeros(size, np.bool_)]
            self._free = list(range(2 * size - 1, size - 1, -1))
        number = self._free.pop()
        self._live[number] = True
        return number

    def end(self, number: int) -> None:
        """Let one count no more. O(1)."""
        self._live[number] = False
        self._ended.append(number)

    def free(self) -> None:
        """Give those again that count no more: no table has entries of theirs."""
        self._free += self._ended
        self._ended = []


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
        numbers = self._seed, self._first, self._second, self._third = [secrets.randbits(64) | 1 for _ in range(4)]
        #: The same for numpy, made once: it takes as long as a hundred multiplications.
        self._of_seed, self._of_first, self._of_second, self._of_third = map(np.uint64, numbers)
        self._allocate(buckets)

    def _allocate(self, buckets: int) -> None:
        slots = buckets * BUCKET
        self._buckets = buckets
        self.keys: Keys = np.zeros(slots, np.uint64)
        self.owners: Owners = np.zeros(slots, np.uint32)
        #: The same by buckets.
        self._rows_of_keys, self._rows_of_owners = self.keys.reshape(-1, BUCKET), self.owners.reshape(-1, BUCKET)
        self._of_buckets = np.uint64(buckets)
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
        return self._placed(self.mixed(keys), owners)

    def mixed(self, keys: Keys) -> Keys:
        """Return what keys have in their homes' numbers, whoever is their owner."""
        mixed: Keys = (keys ^ self._of_seed) * self._of_first
        mixed ^= mixed >> _HALF
        return mixed

    def _placed(self, mixed: Keys, owners: Owners) -> Slots:
        mixed = mixed + owners.astype(np.uint64) * self._of_second
        mixed ^= mixed >> _HALF  # else a key's homes of consecutive owners have one distance, which may be next to 0
        mixed *= self._of_third
        mixed >>= _HALF
        mixed *= self._of_buckets
        mixed >>= _HALF
        homes: Slots = mixed.view(np.int64)  # below 2**32
        return homes

    def _home(self, key: int, owner: int) -> int:
        """Do :meth:`_homes` for one."""
        mixed = (key ^ self._seed) * self._first & _MASK
        mixed ^= mixed >> 32
        mixed = mixed + owner * self._second & _MASK
        mixed = (mixed ^ mixed >> 32) * self._third & _MASK
        return (mixed >> 32) * self._buckets >> 32

    # -- one entry ---------------------------------------------------------------------------------------

    def find_one(self, key: int, owner: int) -> int:
        """Return the slot of an entry, or -1. O(1) expected."""
        start = BUCKET * self._home(key, owner)
        for _ in range(self._buckets):
            owners = self.owners[start : start + BUCKET].tolist()
            if owner in owners:
                keys = self.keys[start : start + BUCKET].tolist()
                for lane in range(BUCKET):
                    if keys[lane] == key and owners[lane] == owner:
                        return start + lane
            if EMPTY in owners:
                return -1
            start += BUCKET
            if start == len(self.keys):
                start = 0
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
        buckets = self._homes(keys, owners)
        if len(keys) < _SORTED:
            return self._search(buckets, keys, owners)
        order = np.argsort(buckets)
        found = np.empty(len(keys), np.int64)
        found[order] = self._search(buckets[order], keys[order], owners[order])
        return found

    def find_all(self, mixed: Keys, keys: Keys, owners: Owners) -> Slots:
        """Return for each owner the slot of each key, or -1: owners x keys. ``mixed``: :meth:`mixed` of the keys."""
        count, most = len(keys), len(owners)
        buckets = self._placed(mixed, owners[:, None]).reshape(-1)
        found = self._search(buckets, np.concatenate([keys] * most), owners.repeat(count))
        return found.reshape(most, count)

    def find_each(self, keys: Keys, owners: Owners) -> Slots:
        """Return the slots of all entries that have one of the keys and one of the owners. O(keys x owners)."""
        mixed, step = self.mixed(keys), max(1, _PAIRS // max(1, len(keys)))
        found = [np.zeros(0, np.int64)]
        for at in range(0, len(owners), step):
            slots = self.find_all(mixed, keys, owners[at : at + step])
            found.append(slots[slots >= 0])
        return np.concatenate(found)

    def find_mixed(self, mixed: Keys, keys: Keys, owners: Owners) -> Slots:
        """Do :meth:`find` for keys of which :meth:`mixed` is known."""
        return self._search(self._placed(mixed, owners), keys, owners)

    def _search(self, buckets: Slots, keys: Keys, owners: Owners) -> Slots:
        """Do :meth:`find` for what has these homes: by few calls of numpy, as each costs as much as a hundred keys."""
        rows_of_keys, rows_of_owners = self._rows_of_keys, self._rows_of_owners
        there = rows_of_owners.take(buckets, axis=0)
        here = _bits((rows_of_keys.take(buckets, axis=0) == keys[:, None]) & (there == owners[:, None]))
        hit = here > 0
        found = buckets * BUCKET
        found += _FIRST[here]
        pending = np.flatnonzero(~hit)
        if not pending.size:
            return found
        found[pending] = -1
        pending = pending[_bits(there[pending] == EMPTY) == 0]
        # One key in ten is not in its home, and then nearly always in one of the next few buckets.
        distance = 1
        while pending.size:
            if len(pending) <= _FEW:
                for at, key, owner in zip(pending.tolist(), keys[pending].tolist(), owners[pending].tolist()):
                    found[at] = self.find_one(key, owner)
                break
            near = (buckets[pending][:, None] + _NEXT + distance) % self._buckets
            there = rows_of_owners.take(near, axis=0).reshape(len(pending), -1)
            alike = rows_of_keys.take(near, axis=0).reshape(len(pending), -1) == keys[pending][:, None]
            alike &= there == owners[pending][:, None]
            lanes = alike.argmax(axis=1)
            rows = np.arange(len(pending))
            hit = alike[rows, lanes]
            slots = near[rows, lanes // BUCKET] * BUCKET + lanes % BUCKET
            found[pending[hit]] = slots[hit]
            distance += len(_NEXT)
            if distance > self._buckets:
                break
            pending = pending[~hit & (there != EMPTY).all(axis=1)]
        return found

    def find_or_add(self, keys: Keys, owners: Owners, growth: float = GROWTH) -> tuple[Slots, NDArray[np.bool_]]:
        """Return the slot of each entry, and whether it is new, with columns of 0. All are different. O(keys).

        Each turn looks at one bucket a key: the key is there, or it goes to a free slot if its search ends there, or to
        the next bucket. One that would have a free slot but for others of this call waits for them, and looks again.
        """
        self.reserve(len(keys), growth)
        found = np.empty(len(keys), np.int64)
        new = np.zeros(len(keys), np.bool_)
        buckets = self._homes(keys, owners)
        order = np.argsort(buckets)
        pending, buckets = order, buckets[order]
        rows_of_keys, rows_of_owners = self._rows_of_keys, self._rows_of_owners
        while len(pending) > _FEW:
            mine, owned = keys[pending], owners[pending]
            there = rows_of_owners.take(buckets, axis=0)
            here = _bits((rows_of_keys.take(buckets, axis=0) == mine[:, None]) & (there == owned[:, None]))
            empty = _bits(there == EMPTY)
            hit = here > 0
            ends = (empty > 0) & ~hit
            free = empty | _bits(there == GONE)
            # The first of each bucket takes the slot. The others look again in the next turn.
            first = np.ones(len(pending), np.bool_)
            at = np.flatnonzero(ends)
            first[at[1:]] = buckets[at[1:]] != buckets[at[:-1]]
            takes = ends & first
            slots = buckets * BUCKET + _FIRST[np.where(hit, here, free)]
            done = hit | takes
            found[pending[done]] = slots[done]
            new[pending[takes]] = True
            taken = slots[takes]
            self.used += int((self.owners[taken] == EMPTY).sum())
            self.entries += len(taken)
            self.keys[taken], self.owners[taken] = mine[takes], owned[takes]
            left = ~done
            pending, buckets = pending[left], (buckets + ~ends)[left]
            if len(buckets) and buckets[-1] == self._buckets:  # those of one bucket stay side by side
                buckets[buckets == self._buckets] = 0
                order = np.argsort(buckets)
                pending, buckets = pending[order], buckets[order]
        for number in pending.tolist():
            key, owner = int(keys[number]), int(owners[number])
            slot = self.find_one(key, owner)
            if slot < 0:
                slot, new[number] = self.add_one(key, owner), True
            found[number] = slot
        return found, new

    def some(self, most: int) -> Slots:
        """Return the slots of entries whose owners count, at most so many. O(slots), or until they are found."""
        found, left = [np.zeros(0, np.int64)], max(0, most)
        for start in range(0, self.slots, _PASS):
            if not left:
                break
            mine = self._held(self.owners, start)[:left]
            found.append(mine)
            left -= len(mine)
        return np.concatenate(found)

    def remove(self, slots: Slots | Sequence[int]) -> None:
        """Give up entries, all different. O(slots)."""
        where = np.asarray(slots, np.int64)
        if not where.size:
            return
        ends = (self._rows_of_owners[where // BUCKET] == EMPTY).any(axis=1)
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

    def reserve(self, more: int, growth: float = GROWTH) -> None:
        """Make room for so many new entries. O(entries) if it has to be rebuilt, and then rarely again."""
        if self.used + more <= FILL * self.slots:
            return
        self.rebuild(more, growth)

    def rebuild(self, more: int = 0, growth: float = GROWTH) -> None:
        """Drop what was given up and entries of owners that are gone. O(slots), and little memory but the arrays'.

        Without that memory the table stays as it was, and MemoryError is raised.
        """
        before = vars(self).copy()
        try:
            self._rebuild(more, growth)
        except BaseException:
            vars(self).update(before)
            raise

    def _rebuild(self, more: int, growth: float) -> None:
        """Do :meth:`rebuild`.

        A larger or smaller table has the same entries in the same order, but for those that lie behind their homes. So
        one pass of slots after the other is taken over. In the order of their homes each entry goes to its home's
        first slot, or behind the one before it. So all slots from an entry's home to the entry are in use. What that
        leaves is placed one by one: what had overflowed into the next pass, or from the last bucket to the first.
        """
        keys, owners, columns, buckets = self.keys, self.owners, self.columns, self._buckets
        starts = range(0, len(keys), _PASS)
        count = sum(len(self._held(owners, start)) for start in starts)
        self._allocate(max(BUCKETS_MIN, int((count + more) * growth / (FILL * BUCKET)) + 1))
        late = [np.zeros(0, np.int64)]
        home = free = 0  # the last home, and the slot behind the last entry
        for start in starts:
            held = self._held(owners, start)
            homes = self._homes(keys[held], owners[held])
            order = np.argsort(homes)
            held, homes = held[order], homes[order]
            most = (start + _PASS) // BUCKET * self._buckets // buckets + 1
            first, last = np.searchsorted(homes, home), np.searchsorted(homes, most, "right")
            numbers = np.arange(last - first)
            slots = BUCKET * homes[first:last] - numbers
            slots[:1] = np.maximum(slots[:1], free)
            slots = numbers + np.maximum.accumulate(slots)
            inside = int(np.searchsorted(slots, self.slots))
            slots, placed = slots[:inside], held[first : first + inside]
            late += [held[:first], held[first + inside :]]
            self.keys[slots], self.owners[slots] = keys[placed], owners[placed]
            for name, column in columns.items():
                self.columns[name][slots] = column[placed]
            self.entries += inside
            if inside:
                home, free = int(homes[first + inside - 1]), int(slots[-1]) + 1
        self.used = self.entries
        for at in np.concatenate(late).tolist():
            self.entries += 1
            slot = self._place(int(keys[at]), int(owners[at]))
            for name, column in columns.items():
                self.columns[name][slot] = column[at]

    def _held(self, owners: Owners, start: int) -> Slots:
        """Return the slots of a pass that hold an entry whose owner counts."""
        some = owners[start : start + _PASS]
        held = start + np.flatnonzero((some != EMPTY) & (some != GONE))
        return held[self._alive(owners[held])]


__all__ = [
    "BUCKET", "EMPTY", "GONE", "GROWTH", "STORES_GROWTH", "Identifiers", "Keys", "Owners", "Slots", "Table",
    "all_different",
]  # fmt: skip
