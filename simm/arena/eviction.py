"""Eviction policies: the order in which entries of a size class are evicted.

A policy keeps, for each group (a size class, or all large values together), an order over the table's slots. It never
learns of a hit. Readers, some on other machines, store 0x01 into ``visited[slot]`` and nothing else; the policy clears
the byte when it passes the entry. Such a store may be lost, or hit the slot's next entry: both cost a little of the hit
ratio and nothing else. All state is private memory of the worker. Insertions rebuild it after a crash.

`Lru`, the default, is second chance with re-insertion. A conversation's KV blocks are read again when its user answers,
minutes later, so the time since the last use predicts the next use best. docs/performance.md compares the policies on a
recorded trace (``benchmarks/eviction.py``).

`SieveProbation` suits long scans of values that are never read again. SIEVE (Zhang et al., NSDI 2024) is a FIFO queue
with a hand that moves from the oldest entry to the newest. It spares a visited entry and clears its byte; an unvisited
one is the victim. Its weakness is a scan, which it admits entry by entry. S3-FIFO (Yang et al., SOSP 2023) puts a small
FIFO in front, about a tenth of the entries: an entry without a hit in it never reaches the main queue.

S3-FIFO also remembers the keys that left its small queue. A policy over slots knows no keys. Without that memory there
is a trap: a new working set, too large to be hit within the small queue, would be thrown out of it forever, while the
main queue keeps entries unused for days. Hence *tenure*: an entry of the main queue is evicted first if it has been
unused `TENURE` times as long as the oldest entry has been in probation. The small queue then grows, and with it the
time in probation; once hits come, it shrinks again.

The clock counts insertions in all groups. An entry's stamp is the clock at its insertion, or when the hand last found
it used. `Policy.age` is comparable between groups, so that room can move to the group that uses it best. It is 0 for an
entry visited since its stamp, and divided by TENURE in the main queue, as `victim` weighs the two queues.

Cost: 18 bytes per slot, allocated once, and no Python object per entry. All operations are O(1); `victim` amortised, as
a reader stored each byte that it clears. One call clears at most `CLEARED_MAX` bytes, so that a group of a million hot
entries does not stop the worker for a tenth of a second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simm.errors import CorruptionError, UsageError

from ..constants import POLICY_NAMES

#: Rejected entries that one victim() call examines before it gives up.
REJECTED_MAX: Final = 64
#: Visited entries that one victim() call spares before it takes the next one anyway.
CLEARED_MAX: Final = 512
#: The probation queue's share of a group's entries is 1 / PROBATION_SHARE.
PROBATION_SHARE: Final = 10
#: Factor by which an unused entry of the main queue may stay longer than one in probation.
TENURE: Final = 8

_NOWHERE: Final = 0xFFFF
_LINKS_MAX: Final = 1 << 32

Rejected = Callable[[int], bool]


class Policy(ABC):
    """An eviction order over slots, in groups. `CorruptionError` for a slot inserted twice or not at all.

    It keeps doubly linked queues in flat arrays; queue q's sentinel is node ``slots + q``. ``next`` of a sentinel is
    the newest entry, ``prev`` the oldest. A hand moves by ``prev``, from old to new. A hand on the sentinel starts at
    the oldest entry.
    """

    #: Queues of each group.
    QUEUES = 1

    def __init__(self, slots: int, groups: int, visited: memoryview) -> None:
        queues = groups * self.QUEUES
        if slots < 1 or groups < 1 or queues >= _NOWHERE or slots + queues > _LINKS_MAX:
            raise UsageError(f"no policy has {slots} slots and {groups} groups")
        if visited.format != "B" or visited.ndim != 1 or visited.readonly or len(visited) < slots:
            raise UsageError(f"the visited bytes must be a writable view of {slots} bytes")
        self._slots: Final = slots
        self._groups: Final = groups
        self._visited = visited
        # By repetition, as an array made from bytes allocates a sixteenth more.
        self._prev = array("I", [0]) * (slots + queues)
        for sentinel in range(slots, slots + queues):
            self._prev[sentinel] = sentinel
        self._next = self._prev[:]
        self._stamp = array("Q", [0]) * slots
        self._queue = array("H", [_NOWHERE]) * slots
        self._sizes = [0] * queues
        self._hands = list(range(slots, slots + queues))
        self._clock = 0

    def insert(self, slot: int, group: int) -> None:
        """Add an entry in ``slot``, and clear its visited byte. O(1)."""
        if not (0 <= slot < self._slots and 0 <= group < self._groups):
            raise UsageError(f"no slot {slot} or no group {group}")
        if self._queue[slot] != _NOWHERE:
            raise CorruptionError(f"slot {slot} is inserted twice")
        self._visited[slot] = 0
        self._clock = clock = self._clock + 1
        self._stamp[slot] = clock
        queue = group * self.QUEUES
        self._queue[slot] = queue
        self._sizes[queue] += 1
        links = self._next
        sentinel = self._slots + queue
        head = links[sentinel]
        links[slot] = head
        links[sentinel] = slot
        links = self._prev
        links[slot] = sentinel
        links[head] = slot

    def insert_many(self, slots: Sequence[int], group: int) -> None:
        """Do `insert` for many, in order. If one is refused, those before it are in. O(1) each."""
        if not 0 <= group < self._groups:
            raise UsageError(f"no group {group}")
        queues, visited, stamps, older, newer = self._queue, self._visited, self._stamp, self._next, self._prev
        most, clock = self._slots, self._clock
        before = clock
        queue = group * self.QUEUES
        sentinel = most + queue
        head = older[sentinel]
        try:
            for slot in slots:
                if not 0 <= slot < most:
                    raise UsageError(f"no slot {slot}")
                if queues[slot] != _NOWHERE:
                    raise CorruptionError(f"slot {slot} is inserted twice")
                visited[slot] = 0
                clock += 1
                stamps[slot] = clock
                queues[slot] = queue
                older[slot] = head
                newer[head] = slot
                head = slot
        finally:
            older[sentinel] = head
            newer[head] = sentinel
            self._sizes[queue] += clock - before
            self._clock = clock

    def insert_all(self, slots: NDArray[np.int64], groups: NDArray[np.int64]) -> None:
        """Do `insert` for each slot with its group, in order. All or none are inserted. O(n log n), by numpy."""
        queues = np.frombuffer(self._queue, np.uint16)
        fresh = np.zeros(self._slots, bool)
        fresh[slots] = True
        if np.count_nonzero(fresh) < len(slots) or bool((queues[slots] != _NOWHERE).any()):
            raise CorruptionError("a slot is inserted twice")
        np.frombuffer(self._visited, np.uint8)[slots] = 0
        stamps = np.arange(self._clock + 1, self._clock + 1 + len(slots), dtype=np.uint64)
        np.frombuffer(self._stamp, np.uint64)[slots] = stamps
        self._clock += len(slots)
        queues[slots] = groups * self.QUEUES
        older, newer = np.frombuffer(self._next, np.uint32), np.frombuffer(self._prev, np.uint32)
        order = np.argsort(groups, kind="stable")
        ranked, grouped = slots[order], groups[order]
        for group in np.flatnonzero(np.bincount(grouped)).tolist():
            begin, end = np.searchsorted(grouped, [group, group + 1])
            row = ranked[begin:end]
            sentinel = self._slots + group * self.QUEUES
            head = older[sentinel]
            older[row[1:]], newer[row[:-1]] = row[:-1], row[1:]
            older[row[0]], newer[row[-1]] = head, sentinel
            newer[head], older[sentinel] = row[0], row[-1]
            self._sizes[group * self.QUEUES] += len(row)

    def remove(self, slot: int) -> None:
        """Remove the entry in ``slot``. O(1)."""
        queue = self._queue[slot] if 0 <= slot < self._slots else _NOWHERE
        if queue == _NOWHERE:
            raise CorruptionError(f"slot {slot} is removed, but was not inserted")
        self._queue[slot] = _NOWHERE
        self._sizes[queue] -= 1
        newer = self._prev[slot]
        older = self._next[slot]
        self._next[newer] = older
        self._prev[older] = newer
        if self._hands[queue] == slot:
            self._hands[queue] = newer

    def replaced(self, slot: int) -> None:
        """Note a new value of the same group in ``slot``, which counts as its newest use. O(1)."""
        self._restamp(slot)
        self._to_head(slot, self._queue[slot])

    def _to_head(self, slot: int, queue: int) -> None:
        """Move an entry to the new end of ``queue``, which may be another queue."""
        self.remove(slot)
        self._queue[slot] = queue
        self._sizes[queue] += 1
        sentinel = self._slots + queue
        head = self._next[sentinel]
        self._next[slot] = head
        self._next[sentinel] = slot
        self._prev[slot] = sentinel
        self._prev[head] = slot

    def _restamp(self, slot: int) -> None:
        if self.group_of(slot) < 0:
            raise CorruptionError(f"slot {slot} is replaced, but was not inserted")
        self._clock += 1
        self._stamp[slot] = self._clock

    def _sweep(self, queue: int, rejected: Rejected, budget: int, clearings: int) -> int:
        """Move the hand to the next entry that is neither visited nor rejected. Return it, or -1 if none is near.

        Up to ``clearings`` visited entries are spared and cleared, up to ``budget`` rejected ones passed
        over.
        """
        slots = self._slots
        prev = self._prev
        visited = self._visited
        sentinel = slots + queue
        node = self._hands[queue]
        budget = min(budget, self._sizes[queue])
        while budget > 0:
            if node == sentinel:
                node = prev[sentinel]
            if clearings > 0 and visited[node]:
                clearings -= 1
                visited[node] = 0
                self._stamp[node] = self._clock
            elif rejected(node):
                budget -= 1
            else:
                self._hands[queue] = node
                return node
            node = prev[node]
        self._hands[queue] = node
        return -1

    @abstractmethod
    def victim(self, group: int, rejected: Rejected) -> int:
        """Return the slot to evict next in ``group``, -1 without an entry, or if all examined ones are rejected.

        The call offers at most `REJECTED_MAX` entries to ``rejected`` in vain; the next call examines others first. The
        slot stays in place until `remove`. The next call returns it again unless it is visited or rejected by then.
        Amortised O(1).
        """

    @property
    def clock(self) -> int:
        """Return the number of insertions so far, in all groups. O(1)."""
        return self._clock

    def age(self, slot: int) -> int:
        """Return the insertions in all groups since the entry was last known used. O(1)."""
        if self.group_of(slot) < 0:
            raise CorruptionError(f"slot {slot} has no age: it was not inserted")
        return self._clock - self.since(slot)

    def since(self, slot: int) -> int:
        """Return the clock at which the entry's age was 0. It only grows during its life. Unchecked. O(1)."""
        return self._stamp[slot]

    def look(self, slot: int) -> int:
        """Note a visit as `victim` would, then return `since`. Unchecked. O(1)."""
        return self._stamp[slot]

    def group_of(self, slot: int) -> int:
        """Return the group of the entry in ``slot``, -1 without one. O(1)."""
        if not 0 <= slot < self._slots or self._queue[slot] == _NOWHERE:
            return -1
        return self._queue[slot] // self.QUEUES

    def groups(self) -> list[int]:
        """Return the groups that have an entry, ascending. O(groups)."""
        return sorted({queue // self.QUEUES for queue in compress(count(), self._sizes)})

    def slots(self, group: int) -> Iterator[int]:
        """Yield all slots of ``group``, oldest first in each queue. The caller changes nothing meanwhile. O(1) each."""
        for queue in range(group * self.QUEUES, (group + 1) * self.QUEUES):
            node = self._prev[self._slots + queue]
            while node < self._slots:
                yield node
                node = self._prev[node]


class Fifo(Policy):
    """First in, first out. Hits have no effect; a new value makes an entry new."""

    def victim(self, group: int, rejected: Rejected) -> int:
        return self._sweep(group, rejected, REJECTED_MAX, 0)


class Lru(Policy):
    """Least recently used, as far as visited bytes tell: second chance, with re-insertion at the new end.

    A visited entry at the oldest position moves to the newest one. So entries are in the order in which their uses were
    discovered. A rejected entry is in use, and moves as well.
    """

    def victim(self, group: int, rejected: Rejected) -> int:
        oldest = self._slots + group
        budget = min(REJECTED_MAX, self._sizes[group])
        clearings = CLEARED_MAX
        while budget > 0:
            slot = self._prev[oldest]
            if clearings > 0 and self._visited[slot]:
                clearings -= 1
                self._visited[slot] = 0
                self._stamp[slot] = self._clock
            elif rejected(slot):
                budget -= 1
                self._stamp[slot] = self._clock
            else:
                return slot
            self._to_head(slot, group)
        return -1

    def since(self, slot: int) -> int:
        return self._clock if self._visited[slot] else self._stamp[slot]

    def look(self, slot: int) -> int:
        if self._visited[slot]:
            self._visited[slot] = 0
            self._stamp[slot] = self._clock
            self._to_head(slot, self._queue[slot])
        return self._stamp[slot]


class SieveProbation(Policy):
    """SIEVE behind a probation queue of a tenth of the group's entries: see the module's docstring."""

    QUEUES = 2

    def replaced(self, slot: int) -> None:
        self._restamp(slot)
        self._visited[slot] = 1

    def victim(self, group: int, rejected: Rejected) -> int:
        probation = group * 2
        main = probation + 1
        sizes = self._sizes
        total = sizes[probation] + sizes[main]
        budget = min(REJECTED_MAX // 2, sizes[probation])
        clearings = CLEARED_MAX
        sentinel = self._slots + probation
        # While probation has more than its share, its oldest entry is promoted or evicted.
        while sizes[probation] * PROBATION_SHARE > total and budget > 0:
            slot = self._hands[probation]
            if slot == sentinel:
                slot = self._prev[sentinel]
            if clearings > 0 and self._visited[slot]:
                clearings -= 1
                self._visited[slot] = 0
                self._stamp[slot] = self._clock
                self._hands[probation] = slot
                self._to_head(slot, main)
                continue
            if sizes[main]:
                overdue = self._overdue(main, TENURE * (self._clock - self._stamp[slot]))
                if overdue >= 0:
                    if not rejected(overdue):
                        return overdue
                    self._hands[main] = self._prev[overdue]
            if not rejected(slot):
                self._hands[probation] = slot
                return slot
            budget -= 1
            self._hands[probation] = self._prev[slot]
        slot = self._sweep(main, rejected, REJECTED_MAX // 2, clearings)
        if slot < 0 and budget > 0:
            slot = self._sweep(probation, rejected, budget, 0)
        return slot

    def _overdue(self, main: int, age: int) -> int:
        """Return the main queue's entry at the hand if it was unused for longer than ``age``, else -1.

        A visited entry is spared and the hand moves by one entry, so it is at most as fast as victims are requested.
        """
        sentinel = self._slots + main
        node = self._hands[main]
        if node == sentinel:
            node = self._prev[sentinel]
        if self._visited[node]:
            self._visited[node] = 0
            self._stamp[node] = self._clock
            self._hands[main] = self._prev[node]
            return -1
        self._hands[main] = node
        return node if self._clock - self._stamp[node] > age else -1

    def since(self, slot: int) -> int:
        if self._visited[slot]:
            return self._clock
        stamp = self._stamp[slot]
        return self._clock - (self._clock - stamp) // TENURE if self._queue[slot] & 1 else stamp

    def look(self, slot: int) -> int:
        if self._visited[slot]:
            self._visited[slot] = 0
            self._stamp[slot] = self._clock
            self._to_head(slot, self._queue[slot] | 1)
        return self.since(slot)


_POLICIES: Final[dict[str, type[Policy]]] = {"lru": Lru, "fifo": Fifo, "sieve": SieveProbation}
assert tuple(_POLICIES) == POLICY_NAMES


def make_policy(name: str, slots: int, groups: int, visited: memoryview) -> Policy:
    """Return a policy by name (`POLICY_NAMES`) over ``slots`` slots, with a byte of ``visited`` each.

    `UsageError` for an unknown name or impossible sizes.
    """
    kind = _POLICIES.get(name)
    if kind is None:
        raise UsageError(f"no eviction policy {name!r}; there are {', '.join(POLICY_NAMES)}")
    return kind(slots, groups, visited)
