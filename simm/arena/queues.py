"""Queues of entries over a table's slots, in groups: what all eviction policies are made of.

A policy (`simm.arena.eviction`) keeps, for each group (a size class, or all large values together), an order over the
table's slots. It never learns of a hit. Readers, some on other machines, store 0x01 into ``visited[slot]`` and nothing
else; the policy clears the byte when it passes the entry. Such a store may be lost, or hit the slot's next entry: both
cost a little of the hit ratio and nothing else. All state is private memory of the worker. Insertions rebuild it after
a crash.

The clock counts what is inserted in all groups, by its size. An entry's stamp is the clock at its insertion, or when
the policy last found it used. `Policy.age` is comparable between groups, so that room can move to the group that uses
it best. It is 0 for an entry visited since its stamp.

What was just put is *fresh*, and no victim as long as anything else can go: a prompt without its first pages is worth
nothing. The unit is a period, a 64th of the region. An entry is fresh in the period of its put and the 32 after it, so
about half of the region can be, and a prompt of less than that is whole right after its put. The period takes a byte
an entry. As 255 numbers come round again, each new period forgets the old ones of a 32nd of the slots.

Cost: 19 bytes per slot, allocated once, and no Python object per entry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simm.errors import CorruptionError, UsageError

#: Rejected entries that one victim() call examines before it gives up.
REJECTED_MAX: Final = 64
#: Visited entries that one victim() call spares before it takes the next one anyway.
CLEARED_MAX: Final = 512
#: Fresh entries that one victim() call passes over after another one has found little else in that group.
FRESH_AGAIN: Final = 8
#: An entry is fresh in the period of its put and in so many after it. A region has twice as many.
FRESH_PERIODS: Final = 32

_NOWHERE: Final = 0xFFFF
_LINKS_MAX: Final = 1 << 32

Rejected = Callable[[int], bool]


#: Bits of a key's word from here on are evenly distributed. Those below are its shard, which keys may share.
KEY_SHIFT: Final = 16


class KeyWords(NamedTuple):
    """Where 64 bits of each slot's key are: ``words[slot * stride + at]``. Memories of keys use those from 16 on."""

    words: Sequence[int] | memoryview
    stride: int
    at: int


class Policy(ABC):
    """An eviction order over slots, in groups. `CorruptionError` for a slot inserted twice or not at all.

    It keeps doubly linked queues in flat arrays; queue q's sentinel is node ``slots + q``. ``next`` of a sentinel is
    the newest entry, ``prev`` the oldest. A hand moves by ``prev``, from old to new. A hand on the sentinel starts at
    the oldest entry.
    """

    #: Queues of each group. All policies have as many, so that one becomes another in place (`become`).
    QUEUES: Final = 8
    #: The first so many of them are in use.
    USED = 1
    #: As in settings.
    name = ""
    #: False if a use of an entry means nothing to it.
    HEEDS_USES = True

    def __init__(
        self, slots: int, groups: int, visited: memoryview, period: int = 0, keys: KeyWords | None = None
    ) -> None:
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
        self._hands = array("I", range(slots, slots + queues))
        #: The weights of all insertions so far, in all groups.
        self.clock = 0
        self._keys = keys
        #: Told of each entry whose visited byte a search has found and cleared; None: nobody asks.
        self.on_use: Callable[[int], None] | None = None
        #: By group: until then the fresh entries in front are many, as a search has found.
        self._crowded = [0] * groups
        #: How far the clock advances in a period; 0: nothing is ever fresh.
        self.period = period
        #: What was put longer ago on the clock is surely not fresh.
        self._fresh_span = (FRESH_PERIODS + 1) * period
        #: Spare what is fresh. The owner may lift that for a while.
        self.sparing = period > 0
        #: The period of each entry's put, 1 to 255, and 0 for one that is surely not fresh; and the current one.
        self._put_in = bytearray(slots)
        self._now = 1
        self._periods = 0
        self._period_ends = period if period else 1 << 63
        self._begin()

    def insert(self, slot: int, group: int, weight: int = 1) -> None:
        """Add an entry in ``slot``, and clear its visited byte. The clock advances by ``weight``. O(1)."""
        if not (0 <= slot < self._slots and 0 <= group < self._groups):
            raise UsageError(f"no slot {slot} or no group {group}")
        if self._queue[slot] != _NOWHERE:
            raise CorruptionError(f"slot {slot} is inserted twice")
        self._visited[slot] = 0
        self.clock = clock = self.clock + weight
        self._stamp[slot] = clock
        if clock >= self._period_ends:
            self._begin_period()
        self._put_in[slot] = self._now
        queue = group * self.QUEUES + self._past_uses(slot)
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

    def become(self, kind: type[Policy]) -> None:
        """Go on as another policy, with all entries and their order. O(queues).

        Entries in queues that it does not use stay there: `simm.arena.eviction.change` has what moves them.
        """
        self._hands = array("I", range(self._slots, self._slots + len(self._sizes)))  # some policies do not mind them
        self.__class__ = kind
        self._begin()

    def _begin(self) -> None:
        """Make what only this policy has, and drop what only another one had."""
        #: What it remembers of keys.
        self._memory: memoryview | None = None

    def settle(self, most: int) -> bool:
        """Move up to ``most`` entries to queues that are in use. Return whether there may be more. O(most + queues)."""
        return False

    def _past_uses(self, slot: int) -> int:
        """Return the queue of its group in which a new entry begins. O(1)."""
        return 0

    def insert_many(self, slots: Sequence[int], group: int, weight: int = 1) -> None:
        """Do `insert` for many, in order. If one is refused, those before it are in. O(1) each."""
        if not 0 <= group < self._groups:
            raise UsageError(f"no group {group}")
        self._insert_run(slots, group * self.QUEUES, weight)

    def _insert_run(self, slots: Sequence[int], queue: int, weight: int) -> None:
        """Do `insert_many` into one queue."""
        queues, visited, stamps, older, newer = self._queue, self._visited, self._stamp, self._next, self._prev
        put_in, now = self._put_in, self._now
        most, clock = self._slots, self.clock
        done = 0
        sentinel = most + queue
        head = older[sentinel]
        try:
            for slot in slots:
                if not 0 <= slot < most:
                    raise UsageError(f"no slot {slot}")
                if queues[slot] != _NOWHERE:
                    raise CorruptionError(f"slot {slot} is inserted twice")
                visited[slot] = 0
                clock += weight
                stamps[slot] = clock
                put_in[slot] = now
                queues[slot] = queue
                older[slot] = head
                newer[head] = slot
                head = slot
                done += 1
        finally:
            older[sentinel] = head
            newer[head] = sentinel
            self._sizes[queue] += done
            self.clock = clock
            if clock >= self._period_ends:
                self._begin_period()

    def insert_all(
        self, slots: NDArray[np.int64], groups: NDArray[np.int64], weights: NDArray[np.int64] | None = None
    ) -> None:
        """Do `insert` for each slot with its group, in order, but leave the visited bytes as they are.

        For recovery: what was read before counts as read. All or none are inserted. O(n log n), by numpy.
        """
        queues = np.frombuffer(self._queue, np.uint16)
        fresh = np.zeros(self._slots, bool)
        fresh[slots] = True
        if np.count_nonzero(fresh) < len(slots) or bool((queues[slots] != _NOWHERE).any()):
            raise CorruptionError("a slot is inserted twice")
        stamps = self.clock + np.cumsum(np.ones(len(slots), np.int64) if weights is None else weights)
        np.frombuffer(self._stamp, np.uint64)[slots] = stamps
        self.clock = int(stamps[-1]) if len(slots) else self.clock
        if self.period:
            self._begin_period()
            put_in = stamps // self.period
            recent = put_in > self._periods - FRESH_PERIODS - 1
            np.frombuffer(self._put_in, np.uint8)[slots] = np.where(recent, 1 + put_in % 255, 0)
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

    def _begin_period(self) -> None:
        """Begin the clock's period. Forget old periods of a part of the slots. O(slots / 32), a nanosecond each.

        A period is short where values are large: two of 16 MiB in 2 GiB.
        """
        periods = self.clock // self.period
        rounds = min(FRESH_PERIODS, periods - self._periods)
        self._periods, self._period_ends = periods, (periods + 1) * self.period
        self._now = 1 + periods % 255
        part = -(-self._slots // FRESH_PERIODS)
        recent = bytearray(256)  # a period's number for itself, and 0 for one that is long over
        for age in range(FRESH_PERIODS + 1):
            number = 1 + (periods - age) % 255
            recent[number] = number
        for number in range(periods - rounds + 1, periods + 1):
            some = slice(number % FRESH_PERIODS * part, (number % FRESH_PERIODS + 1) * part)
            self._put_in[some] = self._put_in[some].translate(recent)

    def is_fresh(self, slot: int) -> bool:
        """Return True if the entry was just put. Unchecked. O(1)."""
        put_in = self._put_in[slot]
        return put_in > 0 and (self._now - put_in) % 255 <= FRESH_PERIODS

    def _fresh_most(self, group: int) -> int:
        """Return how many fresh entries a search of a group passes over before it gives up.

        Else a group that has little but fresh ones, as when all values have just changed to its size, would be searched
        in vain for each value that needs room: up to a second for 512 values.
        """
        return CLEARED_MAX if self.clock >= self._crowded[group] else FRESH_AGAIN

    def _give_up(self, group: int) -> None:
        """Note that a search has passed over as many fresh entries as it may."""
        if self.clock >= self._crowded[group]:
            self._crowded[group] = self.clock + self.period // 4

    def fresh_until(self, slots: NDArray[np.int64]) -> int:
        """Return the clock from which on none of these entries is fresh, 0 for now. Unchecked. O(n), by numpy."""
        put_in = np.frombuffer(self._put_in, np.uint8)[slots].astype(np.int16)
        passed = int(((self._now - put_in[put_in > 0]) % 255).min(initial=255))
        return (self._periods + FRESH_PERIODS - passed + 1) * self.period if passed <= FRESH_PERIODS else 0

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

    def remove_many(self, slots: Sequence[int]) -> None:
        """Do `remove` for many. If one is refused, those before it are out. O(1) each."""
        queues, sizes, hands, prev, following = self._queue, self._sizes, self._hands, self._prev, self._next
        most = self._slots
        for slot in slots:
            queue = queues[slot] if 0 <= slot < most else _NOWHERE
            if queue == _NOWHERE:
                raise CorruptionError(f"slot {slot} is removed, but was not inserted")
            queues[slot] = _NOWHERE
            sizes[queue] -= 1
            newer = prev[slot]
            older = following[slot]
            following[newer] = older
            prev[older] = newer
            if hands[queue] == slot:
                hands[queue] = newer

    def replaced(self, slot: int, weight: int = 1) -> None:
        """Note a new value of the same group in ``slot``, which counts as its newest use. O(1)."""
        self._restamp(slot, weight)
        self._to_head(slot, self._queue[slot])

    def move(self, slot: int, group: int) -> None:
        """Move an entry to another group, as if it had just been used. `CorruptionError` if it is in none. O(1)."""
        queue = self._queue[slot]
        self._to_head(slot, group * self.QUEUES + queue % self.QUEUES)
        self._stamp[slot] = self.clock

    def spare_no_more(self, slot: int) -> None:
        """Let an entry count as put long ago. Unchecked. O(1)."""
        self._put_in[slot] = 0

    def _to_head(self, slot: int, queue: int) -> None:
        """Move an entry to the new end of ``queue``, which may be another queue."""
        before, prev, following = self._queue[slot], self._prev, self._next
        if before != queue:
            if before == _NOWHERE:
                raise CorruptionError(f"slot {slot} is moved, but was not inserted")
            self._queue[slot] = queue
            self._sizes[before] -= 1
            self._sizes[queue] += 1
        newer, older = prev[slot], following[slot]
        following[newer] = older
        prev[older] = newer
        if self._hands[before] == slot:
            self._hands[before] = newer
        sentinel = self._slots + queue
        head = following[sentinel]
        following[slot] = head
        following[sentinel] = slot
        prev[slot] = sentinel
        prev[head] = slot

    def _restamp(self, slot: int, weight: int) -> None:
        if not 0 <= slot < self._slots or self._queue[slot] == _NOWHERE:
            raise CorruptionError(f"slot {slot} is replaced, but was not inserted")
        self.clock += weight
        self._stamp[slot] = self.clock
        if self.clock >= self._period_ends:
            self._begin_period()
        self._put_in[slot] = self._now

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
                if self.on_use is not None:
                    self.on_use(node)
                self._stamp[node] = self.clock
            elif (self.sparing and self.is_fresh(node)) or rejected(node):
                budget -= 1
            else:
                self._hands[queue] = node
                return node
            node = prev[node]
        self._hands[queue] = node
        return -1

    @abstractmethod
    def victim(self, group: int, rejected: Rejected) -> int:
        """Return the slot to evict next in ``group``, -1 without one, or if all examined ones are rejected or fresh.

        The call offers at most `REJECTED_MAX` entries to ``rejected`` in vain; the next call examines others first. The
        slot stays in place until `remove`. The next call returns it again unless it is visited or rejected by then.
        Amortised O(1).
        """

    def take_victims(self, group: int, rejected: Rejected, most: int, latest: int) -> list[int]:
        """Remove up to ``most`` victims, as `victim` and `remove` do in turns. Return them.

        It ends before a victim whose `since` is later than ``latest``. Amortised O(1) each.
        """
        taken: list[int] = []
        while len(taken) < most:
            slot = self.victim(group, rejected)
            if slot < 0 or self.since(slot) > latest:
                break
            self.remove(slot)
            taken.append(slot)
        return taken

    def age(self, slot: int) -> int:
        """Return how far the clock has advanced since the entry was last known used. O(1)."""
        if self.group_of(slot) < 0:
            raise CorruptionError(f"slot {slot} has no age: it was not inserted")
        return self.clock - self.since(slot)

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
