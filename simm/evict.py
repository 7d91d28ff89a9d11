"""Eviction policies: which entry of a size class goes when its class needs room.

A policy keeps, for each group (a size class, or all large values together), an order over the table's slots.
It never learns of a hit: readers, some on other machines, store 0x01 into ``visited[slot]`` and nothing
else, and the policy clears the byte when it passes the entry. Such a store may be lost, or land on the
slot's next entry; both cost a little of the hit ratio and nothing else. All of this is private memory of the
worker, rebuilt by insertions after a crash.

The default: SIEVE behind a probation queue
-------------------------------------------
SIEVE (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024) is a FIFO queue with a hand that moves from the
oldest entry to the newest: an entry found visited is spared and its byte cleared, one that is not is the
victim. Entries stay where they are, so a hit needs no lock and no move. Its weakness is a scan, which is let
in entry by entry. S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023) puts a
small FIFO in front, about a tenth of the entries: what is not hit while in it never reaches the main queue.
`SieveProbation` does the same with SIEVE as main queue.

S3-FIFO also remembers the keys that fell out of its small queue, and lets them straight into the main one
when they come again. A policy over slots knows no keys, and a memory of them would cost more than it has.
Without it there is a trap: a new working set that is too large to be hit within the small queue is thrown
out of it forever, while the main queue keeps entries that nobody has asked for in days. Hence *tenure*: an
entry of the main queue goes first where it has not been used for `TENURE` times as long as the oldest
probationer has been there. The small queue then grows at the main one's expense, and with it the time a
probationer has; as soon as hits come, it shrinks again.

Ages
----
The clock counts insertions, in all groups. An entry's stamp is the clock at its insertion, or when the hand
last saw it used. `Policy.age` makes groups comparable, so that room can move to the group that uses it best:
0 for an entry visited since its stamp, and divided by TENURE in the main queue, as `victim` weighs the two
queues against each other.

What it costs
-------------
18 bytes per slot (two links of 4, a stamp of 8, a queue number of 2), sized once; no Python object per
entry. All operations are O(1); `victim` amortised, since each byte it clears was stored by a reader. One
call clears at most `CLEARED_MAX` bytes, so that a group of a million hot entries does not stop the worker
for a tenth of a second: after that many, each visited within one round of the hand, one is as good as
another.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from typing import Final, Protocol

from simm.errors import CorruptionError, UsageError

#: Rejected entries that one victim() call looks at before it gives up.
REJECTED_MAX: Final = 64
#: Visited entries that one victim() call spares before it takes the next one regardless.
CLEARED_MAX: Final = 512
#: The probation queue's share of a group's entries is 1 / PROBATION_SHARE.
PROBATION_SHARE: Final = 10
#: How many times as long as a probationer an unused entry of the main queue may stay.
TENURE: Final = 8

_NOWHERE: Final = 0xFFFF
_LINKS_MAX: Final = 1 << 32

Rejected = Callable[[int], bool]


class Policy(Protocol):
    """An eviction order over slots, in groups. `CorruptionError` for a slot inserted twice or not at all."""

    def insert(self, slot: int, group: int) -> None:
        """A new entry in ``slot``; its visited byte is cleared. O(1)."""

    def insert_many(self, slots: Sequence[int], group: int) -> None:
        """`insert` for many, in that order. Where one is refused, those before it are in. O(1) each."""

    def remove(self, slot: int) -> None:
        """The entry in ``slot`` is gone. O(1)."""

    def replaced(self, slot: int) -> None:
        """The entry in ``slot`` has a new value, of the same group: counts as its newest use. O(1)."""

    def victim(self, group: int, rejected: Rejected) -> int:
        """The slot to evict next in ``group``, or -1: no entry, or only rejected ones among those looked at.

        At most `REJECTED_MAX` entries are offered to ``rejected`` in vain; the next call looks at others
        first. The slot stays where it is until `remove`, and is the answer to the next call too unless it is
        visited or rejected by then. Amortised O(1).
        """

    def age(self, slot: int) -> int:
        """Insertions, in all groups, since the entry was last known used; comparable between groups. O(1)."""

    def group_of(self, slot: int) -> int:
        """The group of the entry in ``slot``, or -1 where there is none. O(1)."""

    def count(self, group: int) -> int:
        """Number of entries of ``group``. O(1)."""

    def groups(self) -> list[int]:
        """The groups that have an entry, ascending. O(groups)."""

    def slots(self, group: int) -> Iterator[int]:
        """All slots of ``group``, oldest first in each queue. No changes meanwhile. O(1) each."""

    def check(self) -> None:
        """Raise `CorruptionError` on the first contradiction. O(slots)."""


class _Queues:
    """Doubly linked queues over slots in flat arrays; queue q's sentinel is node ``slots + q``.

    ``next`` of a sentinel is the newest entry and ``prev`` the oldest; a hand walks by ``prev``, from old to
    new. A hand on the sentinel starts at the oldest entry.
    """

    #: Queues that each group has.
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
        # Made by repetition: an array made from bytes is a sixteenth too large.
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
        # 0.3 us each in batches of 16, where insert takes 0.45.
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

    def remove(self, slot: int) -> None:
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

    def _to_head(self, slot: int, queue: int) -> None:
        """Move an entry to the new end of ``queue``, which may be another one."""
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
        """Move the hand to the next entry that is neither visited nor rejected; -1 if there is none nearby.

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

    def age(self, slot: int) -> int:
        if self.group_of(slot) < 0:
            raise CorruptionError(f"slot {slot} has no age: it was not inserted")
        return self._clock - self._stamp[slot]

    def group_of(self, slot: int) -> int:
        if not 0 <= slot < self._slots or self._queue[slot] == _NOWHERE:
            return -1
        return self._queue[slot] // self.QUEUES

    def count(self, group: int) -> int:
        queue = group * self.QUEUES
        return sum(self._sizes[queue : queue + self.QUEUES])

    def groups(self) -> list[int]:
        return sorted({queue // self.QUEUES for queue in compress(count(), self._sizes)})

    def slots(self, group: int) -> Iterator[int]:
        for queue in range(group * self.QUEUES, (group + 1) * self.QUEUES):
            node = self._prev[self._slots + queue]
            while node < self._slots:
                yield node
                node = self._prev[node]

    @abstractmethod
    def replaced(self, slot: int) -> None: ...

    @abstractmethod
    def victim(self, group: int, rejected: Rejected) -> int: ...

    def check(self) -> None:
        slots = self._slots
        members = 0
        for queue, size in enumerate(self._sizes):
            sentinel = slots + queue
            node = sentinel
            found = 0
            while (behind := self._next[node]) != sentinel:
                mine = behind < slots and self._queue[behind] == queue
                _demand(mine, f"queue {queue} leads to node {behind}")
                _demand(self._prev[behind] == node, f"links around slot {behind} disagree")
                _demand(self._stamp[behind] <= self._clock, f"slot {behind} comes from the future")
                found += 1
                _demand(found <= size, f"queue {queue} has more than its {size} entries")
                node = behind
            _demand(self._prev[sentinel] == node, f"the oldest entry of queue {queue} is not its last")
            _demand(found == size, f"queue {queue} has {found} entries, not {size}")
            hand = self._hands[queue]
            mine = hand == sentinel or (hand < slots and self._queue[hand] == queue)
            _demand(mine, f"the hand of queue {queue} is elsewhere")
            members += found
        _demand(members == slots - self._queue.count(_NOWHERE), "slots that claim a queue and are in none")


class Fifo(_Queues):
    """First in, first out. Hits change nothing; a new value makes an entry new."""

    def replaced(self, slot: int) -> None:
        self._restamp(slot)
        self._to_head(slot, self._queue[slot])

    def victim(self, group: int, rejected: Rejected) -> int:
        return self._sweep(group, rejected, REJECTED_MAX, 0)


class Lru(_Queues):
    """Least recently used, as far as visited bytes tell: second chance, with re-insertion at the new end.

    An entry that the oldest place finds visited moves to the newest, as if it had been used just then; so
    the order between two uses is that of their discovery, not of the uses. A rejected entry is in use and
    moves likewise.
    """

    def replaced(self, slot: int) -> None:
        self._restamp(slot)
        self._to_head(slot, self._queue[slot])

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
            else:
                return slot
            self._to_head(slot, group)
        return -1

    def age(self, slot: int) -> int:
        age = super().age(slot)
        return 0 if self._visited[slot] else age


class SieveProbation(_Queues):
    """SIEVE behind a probation queue of a tenth of the group's entries: see the module's text."""

    QUEUES = 2

    def replaced(self, slot: int) -> None:
        if not 0 <= slot < self._slots or self._queue[slot] == _NOWHERE:
            raise CorruptionError(f"slot {slot} is replaced, but was not inserted")
        self._clock = self._stamp[slot] = self._clock + 1
        self._visited[slot] = 1

    def victim(self, group: int, rejected: Rejected) -> int:
        probation = group * 2
        main = probation + 1
        sizes = self._sizes
        total = sizes[probation] + sizes[main]
        budget = min(REJECTED_MAX // 2, sizes[probation])
        clearings = CLEARED_MAX
        sentinel = self._slots + probation
        # While probation has more than its share, its oldest entry either proves itself or goes.
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
        """The entry of the main queue at the hand if it was not used for longer than ``age``, else -1.

        A visited one is spared and the hand moved on, but by one entry only: the sweep goes on at most as
        fast as victims are asked for.
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

    def age(self, slot: int) -> int:
        age = super().age(slot)
        if self._visited[slot]:
            return 0
        return age // TENURE if self._queue[slot] & 1 else age


_POLICIES: Final[dict[str, type[Fifo] | type[Lru] | type[SieveProbation]]] = {
    "sieve": SieveProbation,
    "lru": Lru,
    "fifo": Fifo,
}
#: Names that make_policy knows; the first is the default.
POLICY_NAMES: Final = tuple(_POLICIES)


def make_policy(name: str, slots: int, groups: int, visited: memoryview) -> Policy:
    """A policy by name (`POLICY_NAMES`) over ``slots`` slots in ``groups`` groups; ``visited``: a byte each.

    `UsageError` for an unknown name or sizes that do not fit.
    """
    kind = _POLICIES.get(name)
    if kind is None:
        raise UsageError(f"no eviction policy {name!r}; there are {', '.join(POLICY_NAMES)}")
    return kind(slots, groups, visited)


def _demand(true: bool, text: str) -> None:
    if not true:
        raise CorruptionError(text)
