"""What the workers of a host claim to have, in one numpy table, and how that changes.

Everything that is published is a change of this table. So after a gap in a ring, a worker's death or a new map nobody
downstream needs to know of it: a follower says again what the worker has, and only the difference is published.

An entry's name is the first half of its digest, as in the events. Two entries with one name are one here; of honest
keys no two have one that are claimed of one namespace at a time: those of its epochs have the same names, but an
advance takes the older ones first (``arena.events.follow``). An entry that two workers have of one namespace, while its
shard moves, is published once, and as removed when the last one has it no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arena.events.follow import Step
from ...arena.events.ring import CLOSED, NAMESPACE, REMOVED, SHARD, STORED
from ...arena.hashing import SHARD_MASK
from ...constants import SHARD_COUNT
from ..table import Keys, Slots, Table, all_different

_NAMESPACE_SHIFT: Final = np.uint64(32)
#: Slots of the table that are looked at at a time, where all are. So what is made of them on the way stays small.
PASS_SLOTS: Final = 1 << 18


class Delta(NamedTuple):
    """Entries of one namespace that came, or went."""

    stored: bool
    namespace: str
    names: Keys


class Claims:
    """See above. Owners are numbers of workers, from 1 on.

    ``name_of``: returns the name of an owner's namespace by its number.
    """

    def __init__(self, name_of: Callable[[int, int], str]) -> None:
        self._table = Table({"info": np.uint64}, lambda owners: np.ones(len(owners), np.bool_))
        self._name_of = name_of
        self._owners: set[int] = set()
        self._out: list[Delta] = []
        #: Names of namespaces, by their numbers here; and those, by worker and its number.
        self._spaces: list[str] = []
        self._space_of: dict[tuple[int, int], int] = {}

    @property
    def entries(self) -> int:
        """Entries of all workers."""
        return self._table.entries

    def take(self, owner: int, step: Step) -> list[Delta]:
        """Add a step of a worker up. Return what changed, in order. O(records), and O(entries) for some of them."""
        self._owners.add(owner)
        records = step.records
        operations = records["operation"]
        # Runs of one kind: all that is of single entries together, and each other operation with its like.
        kinds = np.where(operations <= REMOVED, STORED, operations)
        starts = np.flatnonzero(np.r_[True, kinds[1:] != kinds[:-1]]) if len(kinds) else np.zeros(0, np.int64)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(records)]):
            run = records[start:stop]
            if kinds[start] == STORED:
                self._entries(owner, run)
            else:
                self._many(owner, int(kinds[start]), run["size"])
        return self._taken()

    def drop(self, owner: int) -> list[Delta]:
        """Forget a worker. Return what changed. O(entries)."""
        for slots in self._slots_of(owner):
            self._remove(slots, owner)
        self._owners.discard(owner)
        self._space_of = {key: space for key, space in self._space_of.items() if key[0] != owner}
        return self._taken()

    def all(self) -> Iterator[Delta]:
        """Yield everything, as if it came now. O(entries), and the memory of a part of them."""
        #: Shards of which earlier owners have entries: else none of them has one of these.
        known = np.zeros(SHARD_COUNT, np.bool_)
        for owner in sorted(self._owners):
            mine = np.zeros(SHARD_COUNT, np.bool_)
            for slots in self._slots_of(owner):
                names, info = self._table.keys[slots], self._table.columns["info"][slots]
                shards = _shards(names)
                mine[shards] = True
                shown = ~known[shards]
                twice = np.flatnonzero(known[shards])
                if twice.size:
                    earlier = [each for each in self._owners if each < owner]
                    shown[twice] = self._lacked_by(earlier, names[twice], info[twice])
                yield from self._deltas(True, names[shown], info[shown])
            known |= mine

    # -- one worker's changes -----------------------------------------------------------------------------

    def _taken(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _slots_of(self, owner: int) -> Iterator[Slots]:
        """Yield the slots of a worker's entries, some at a time. What was yielded may be removed meanwhile."""
        for start in range(0, self._table.slots, PASS_SLOTS):
            yield start + np.flatnonzero(self._table.owners[start : start + PASS_SLOTS] == owner)

    def _entries(self, owner: int, run: NDArray[np.void]) -> None:
        removed = run["operation"] == REMOVED
        came, gone = run[~removed], run[removed]
        if not all_different(run["low"]):
            _, back = np.unique(came["low"][::-1], return_index=True)
            came = came[len(came) - 1 - back]
            gone = gone[~np.isin(gone["low"], came["low"])]
        self._gone(owner, gone)
        self._store(owner, came["low"].copy(), self._info(owner, came))

    def _gone(self, owner: int, rows: NDArray[np.void]) -> None:
        """Remove these entries, but those whose names have come since to another namespace: they are still there."""
        slots = self._table.find(rows["low"].copy(), np.full(len(rows), owner, np.uint32))
        there = np.flatnonzero(slots >= 0)
        slots = slots[there]
        spaces = self._table.columns["info"][slots] >> _NAMESPACE_SHIFT
        same = spaces == self._info(owner, rows[there]) >> _NAMESPACE_SHIFT
        self._remove(np.unique(slots[same]), owner)

    def _many(self, owner: int, operation: int, numbers: NDArray[np.uint32]) -> None:
        """Remove what shards or namespaces with these numbers had; of CLOSED everything."""
        if operation not in (SHARD, NAMESPACE, CLOSED):
            return  # of a later version: what it removes is told singly too
        lost = np.zeros(SHARD_COUNT, np.bool_)
        lost[numbers % SHARD_COUNT] = True
        # A number that no entry had is looked up for nobody: others may have written any to the ring.
        known = [self._space_of.get((owner, each)) for each in np.unique(numbers).tolist()]
        spaces = np.array([each for each in known if each is not None], np.uint64)
        for slots in self._slots_of(owner):
            if operation == SHARD:
                slots = slots[lost[_shards(self._table.keys[slots])]]
            elif operation == NAMESPACE:
                slots = slots[np.isin(self._table.columns["info"][slots] >> _NAMESPACE_SHIFT, spaces)]
            self._remove(slots, owner)

    def _remove(self, slots: Slots, owner: int) -> None:
        if not slots.size:
            return
        names, info = self._table.keys[slots], self._table.columns["info"][slots]
        self._table.remove(slots)
        self._tell(False, owner, names, info)

    def _store(self, owner: int, names: Keys, info: NDArray[np.uint64]) -> None:
        if not names.size:
            return
        owners = np.full(len(names), owner, np.uint32)
        slots, new = self._table.find_or_add(names, owners)
        column = self._table.columns["info"]
        before = column[slots]
        # To another namespace: a client that names keys for itself.
        moved = ~new & (before >> _NAMESPACE_SHIFT != info >> _NAMESPACE_SHIFT)
        if moved.any():
            self._tell(False, owner, names[moved], before[moved])
        column[slots] = info
        new |= moved
        if new.any():
            self._tell(True, owner, names[new], info[new])

    def _tell(self, stored: bool, owner: int, names: Keys, info: NDArray[np.uint64]) -> None:
        """Note what came or went, but for what other workers have."""
        shown = self._lacked_by(self._owners - {owner}, names, info)
        self._out += self._deltas(stored, names[shown], info[shown])

    def _lacked_by(self, others: Iterable[int], names: Keys, info: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of these entries none of the other workers has."""
        lacked = np.ones(len(names), np.bool_)
        for other in others:
            slots = self._table.find(names, np.full(len(names), other, np.uint32))
            theirs = self._table.columns["info"][slots] >> _NAMESPACE_SHIFT
            lacked &= (slots < 0) | (theirs != info >> _NAMESPACE_SHIFT)
        return lacked

    def _deltas(self, stored: bool, names: Keys, info: NDArray[np.uint64]) -> list[Delta]:
        return [Delta(stored, name, names[chosen]) for name, chosen in self._by_namespace(info)]

    def _by_namespace(self, info: NDArray[np.uint64]) -> list[tuple[str, NDArray[np.bool_]]]:
        spaces = (info >> _NAMESPACE_SHIFT).astype(np.intp)
        return [(self._spaces[each], spaces == each) for each in np.flatnonzero(np.bincount(spaces)).tolist()]

    def _space(self, owner: int, number: int) -> int:
        """Return the number here of a worker's namespace."""
        space = self._space_of.get((owner, number))
        if space is None:
            name = self._name_of(owner, number)
            if name not in self._spaces:
                self._spaces.append(name)
            space = self._space_of[owner, number] = self._spaces.index(name)
        return space

    def _info(self, owner: int, rows: NDArray[np.void]) -> NDArray[np.uint64]:
        """Return the bytes and the namespace of each row as one word."""
        numbers = rows["namespace"].astype(np.intp)
        known = np.flatnonzero(np.bincount(numbers))
        spaces = np.zeros(known.max(initial=0) + 1, np.uint64)
        spaces[known] = [self._space(owner, each) for each in known.tolist()]
        info: NDArray[np.uint64] = rows["size"].astype(np.uint64)
        info |= spaces[numbers] << _NAMESPACE_SHIFT
        return info


def _shards(names: Keys) -> Slots:
    """Return the shards of these names."""
    shards: Slots = (names & np.uint64(SHARD_MASK)).astype(np.int64)
    return shards
