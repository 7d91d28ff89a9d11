"""Eviction policies: the order in which entries of a size class are evicted.

`simm.arena.queues` has what they share: queues, visited bytes, the clock, and what is fresh.

`Lru`, the default, is second chance with re-insertion. A conversation's KV blocks are read again when its user answers,
minutes later, so the time since the last use predicts the next use best.

`Reuse` is LRU with a memory. The last block of a prompt comes back once, if at all; a system prompt comes back all day.
So entries are classed by the number of their uses. How much longer one of class c may stay than one that was never read
is learned: as many times longer as it is used more often while it stays, and so the hits for each byte and second are
about equal in all classes (Beckmann et al., NSDI 2018, call that hit density). Where uses in the past say nothing about
the next one, that is LRU. Uses before an eviction count: the policy remembers tags of the keys that it has seen, like
the ghosts of ARC (Megiddo and Modha, FAST 2003) and LRU-2 (O'Neil et al., SIGMOD 1993), in four bytes a slot. It finds
more than LRU as long as that memory holds the keys of about ten times what the arena holds: docs/eviction.md.

`SieveProbation` suits long scans of values that are never read again. SIEVE (Zhang et al., NSDI 2024) is a FIFO queue
with a hand that moves from the oldest entry to the newest. It spares a visited entry and clears its byte; an unvisited
one is the victim. Its weakness is a scan, which it admits entry by entry. S3-FIFO (Yang et al., SOSP 2023) puts a small
FIFO in front, about a tenth of the entries: an entry without a hit in it never reaches the main queue.

S3-FIFO also remembers the keys that left its small queue. Without that memory there is a trap: a new working set, too
large to be hit within the small queue, would be thrown out of it forever, while the main queue keeps entries unused for
days. Hence *tenure*: an entry of the main queue is evicted first if it has been unused `TENURE` times as long as the
oldest entry has been in probation. The small queue then grows, and with it the time in probation; once hits come, it
shrinks again. Ages are divided by TENURE in the main queue, as `victim` weighs the two queues.

All operations are O(1); `victim` amortised, as a reader stored each byte that it clears. One call clears at most
`CLEARED_MAX` bytes, so that a group of a million hot entries does not stop the worker for a tenth of a second. And it
passes over as many fresh entries; after that, for a quarter of a period, over `FRESH_AGAIN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import numpy as np

from simm.errors import UsageError

from ..constants import POLICY_NAMES
from .queues import _NOWHERE, CLEARED_MAX, KEY_SHIFT, REJECTED_MAX, KeyWords, Policy, Rejected

#: The probation queue's share of a group's entries is 1 / PROBATION_SHARE.
PROBATION_SHARE: Final = 10
#: Factor by which an unused entry of the main queue may stay longer than one in probation.
TENURE: Final = 8
#: Events by which `Reuse` compares its classes: more than so many are halved. And bounds of what it learns.
LEARNED_MAX: Final = 1 << 15
WORTH_MAX: Final = 64.0
#: The least number of keys that `Reuse` remembers, as a power of two: 2 MiB.
MEMORY_BITS_MIN: Final = 20


class Fifo(Policy):
    """First in, first out. Hits have no effect; a new value makes an entry new."""

    name = "fifo"
    HEEDS_USES = False

    def victim(self, group: int, rejected: Rejected) -> int:
        queue = group * self.QUEUES
        oldest = self._prev[self._slots + queue]
        if self.sparing and oldest < self._slots and self.is_fresh(oldest):
            return -1  # as are all others, which were put later
        return self._sweep(queue, rejected, REJECTED_MAX, 0)


class Lru(Policy):
    """Least recently used, as far as visited bytes tell: second chance, with re-insertion at the new end.

    A visited entry at the oldest position moves to the newest one. So entries are in the order in which their uses were
    discovered. A rejected entry is in use, and moves as well.
    """

    name = "lru"

    def victim(self, group: int, rejected: Rejected) -> int:
        queue = group * self.QUEUES
        oldest = self._slots + queue
        budget = min(REJECTED_MAX, self._sizes[queue])
        clearings, fresh = CLEARED_MAX, self._fresh_most(group)
        while budget > 0:
            slot = self._prev[oldest]
            if clearings > 0 and self._visited[slot]:
                clearings -= 1
                self._visited[slot] = 0
                if self.on_use is not None:
                    self.on_use(slot)
                self._stamp[slot] = self.clock
            elif self.sparing and self.clock - self._stamp[slot] < self._fresh_span and self.is_fresh(slot):
                if fresh == 0:
                    self._give_up(group)
                    return -1
                fresh -= 1
                self._stamp[slot] = self.clock
            elif rejected(slot):
                budget -= 1
                self._stamp[slot] = self.clock
            else:
                return slot
            self._to_head(slot, queue)
        return -1

    def take_victims(self, group: int, rejected: Rejected, most: int, latest: int) -> list[int]:
        slots, newer, older, visited, stamps = self._slots, self._prev, self._next, self._visited, self._stamp
        queues, queue = self._queue, group * self.QUEUES
        oldest = slots + queue
        surely = min(latest, self.clock - self._fresh_span) if self.sparing else latest
        taken: list[int] = []
        while True:
            # The oldest ones that nobody has used go as a run, without a link of theirs being touched.
            before = len(taken)
            slot = newer[oldest]
            for _ in range(most - before):
                if slot >= slots or visited[slot] or stamps[slot] > surely or rejected(slot):
                    break
                queues[slot] = _NOWHERE
                taken.append(slot)
                slot = newer[slot]
            newer[oldest] = slot
            older[slot] = oldest
            self._sizes[queue] -= len(taken) - before
            if len(taken) == most:
                return taken
            slot = self.victim(group, rejected)
            if slot < 0 or self.since(slot) > latest:
                return taken
            self.remove(slot)
            taken.append(slot)

    def since(self, slot: int) -> int:
        return self.clock if self._visited[slot] else self._stamp[slot]

    def look(self, slot: int) -> int:
        if self._visited[slot]:
            self._visited[slot] = 0
            if self.on_use is not None:
                self.on_use(slot)
            self._stamp[slot] = self.clock
            self._to_head(slot, self._queue[slot])
        return self._stamp[slot]


class SieveProbation(Policy):
    """SIEVE behind a probation queue of a tenth of the group's entries: see the module's docstring."""

    name = "sieve"
    USED = 2

    def replaced(self, slot: int, weight: int = 1) -> None:
        self._restamp(slot, weight)
        self._visited[slot] = 1

    def victim(self, group: int, rejected: Rejected) -> int:
        probation = group * self.QUEUES
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
                if self.on_use is not None:
                    self.on_use(slot)
                self._stamp[slot] = self.clock
                self._hands[probation] = slot
                self._to_head(slot, main)
                continue
            if self.sparing and self.is_fresh(slot):
                break  # all others of the queue are younger, or were rejected
            if sizes[main]:
                overdue = self._overdue(main, TENURE * (self.clock - self._stamp[slot]))
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
            if self.on_use is not None:
                self.on_use(node)
            self._stamp[node] = self.clock
            self._hands[main] = self._prev[node]
            return -1
        self._hands[main] = node
        if self.clock - self._stamp[node] <= age or (self.sparing and self.is_fresh(node)):
            return -1
        return node

    def since(self, slot: int) -> int:
        if self._visited[slot]:
            return self.clock
        stamp = self._stamp[slot]
        return self.clock - (self.clock - stamp) // TENURE if self._queue[slot] & 1 else stamp

    def look(self, slot: int) -> int:
        if self._visited[slot]:
            self._visited[slot] = 0
            if self.on_use is not None:
                self.on_use(slot)
            self._stamp[slot] = self.clock
            self._to_head(slot, self._queue[slot] | 1)
        return self.since(slot)


class Reuse(Policy):
    """Least recently used in classes by the number of uses: see the module's docstring.

    Queue c of a group has the entries that were used c times, 7 or more in the last one, in order of their last known
    use. The victim is the oldest entry of one queue, for which age divided by `_worth` is greatest. That choice is made
    anew when the clock has advanced by half a period, or when the queue has nothing to give. Ages that other groups see
    are halved for what was ever used; they must not depend on what is learned, as they may only grow with the clock.
    """

    name = "reuse"
    USED = 8

    def _begin(self) -> None:
        super()._begin()
        groups = self._groups
        self._pause = max(1, self.period // 2)
        #: The queue whose turn it is, by group, and until when.
        self._turns = [0] * groups
        self._until = [0] * groups
        #: By class: twice the uses of entries that were stored, plus the puts of those that had been evicted; and
        #: twice the entries that were offered as victims. Both are halved when there are enough of them.
        self._hits = [2] * self.QUEUES
        self._gone = [2] * self.QUEUES
        #: By class: how many times longer than in the first one an entry may stay. Learned anew every period.
        self._worth = [1.0] * self.QUEUES
        self._learns_at = 0
        self._offered = -1
        #: 12 bits of a key, and how often it was used: 1 for the put alone. By a hash of the key; the last key wins.
        if self._keys is not None:
            # The kernel gives its pages one by one, as they are used: an array would be filled at once.
            self._memory = np.zeros(1 << max(MEMORY_BITS_MIN, self._slots.bit_length()), np.uint16).data

    def _past_uses(self, slot: int) -> int:
        memory, keys = self._memory, self._keys
        if memory is None or keys is None:
            return 0
        word = keys.words[slot * keys.stride + keys.at]
        place = word >> KEY_SHIFT & len(memory) - 1
        tag = word >> 48 & 0xFFF0
        known = memory[place]
        if known & 0xFFF0 != tag or not known:
            memory[place] = tag | 1
            return 0
        uses = known & 0xF
        if uses < self.QUEUES:
            memory[place] = known + 1
        else:
            uses -= 1
        self._hits[uses - 1] += 1
        return uses

    def _past_uses_of(self, slots: Sequence[int], memory: memoryview, keys: KeyWords) -> list[int]:
        """Do `_past_uses` for many: most keys are new, and not looked at twice."""
        words, stride, at = keys
        mask = len(memory) - 1
        past = []
        for slot in slots:
            word = words[slot * stride + at]
            known = memory[word >> KEY_SHIFT & mask]
            if known and not (word >> 48 ^ known) & 0xFFF0:
                past.append(self._past_uses(slot))
            else:
                memory[word >> KEY_SHIFT & mask] = (word >> 48 & 0xFFF0) | 1
                past.append(0)
        return past

    def insert_many(self, slots: Sequence[int], group: int, weight: int = 1) -> None:
        memory, keys = self._memory, self._keys
        if memory is None or keys is None or not slots or min(slots) < 0 or max(slots) >= self._slots:
            super().insert_many(slots, group, weight)
            return
        if not 0 <= group < self._groups:
            raise UsageError(f"no group {group}")
        past = self._past_uses_of(slots, memory, keys)
        queue = group * self.QUEUES
        if not any(past):
            self._insert_run(slots, queue, weight)
            return
        at = 0
        for uses, run in groupby(past):
            end = at + sum(1 for _ in run)
            self._insert_run(slots[at:end], queue + uses, weight)
            at = end

    def _used(self, slot: int) -> None:
        """Note a use of an entry: it becomes the newest one of its group's next queue."""
        self._visited[slot] = 0
        if self.on_use is not None:
            self.on_use(slot)
        self._stamp[slot] = self.clock
        queue = self._queue[slot]
        self._hits[queue % self.QUEUES] += 2
        if (queue + 1) % self.QUEUES:
            queue += 1
            memory, keys = self._memory, self._keys
            if memory is not None and keys is not None:
                word = keys.words[slot * keys.stride + keys.at]
                memory[word >> KEY_SHIFT & len(memory) - 1] = (word >> 48 & 0xFFF0) | queue % self.QUEUES + 1
        self._to_head(slot, queue)

    def replaced(self, slot: int, weight: int = 1) -> None:
        self._restamp(slot, weight)
        self._used(slot)

    def victim(self, group: int, rejected: Rejected) -> int:
        slots, oldest, visited, stamps = self._slots, self._prev, self._visited, self._stamp
        budget, clearings, fresh = REJECTED_MAX, CLEARED_MAX, self._fresh_most(group)
        clock, sparing = self.clock, self.sparing
        while budget > 0:
            queue = self._turns[group]
            slot = oldest[slots + queue]
            if clock >= self._until[group] or slot >= slots:
                queue = self._coldest(group)
                if queue < 0:
                    break
                self._turns[group], self._until[group] = queue, clock + self._pause
                slot = oldest[slots + queue]
            if clearings > 0 and visited[slot]:
                clearings -= 1
                self._used(slot)
            elif sparing and clock - stamps[slot] < self._fresh_span and self.is_fresh(slot):
                if fresh == 0:
                    self._give_up(group)
                    break
                fresh -= 1
                if queue % self.QUEUES == 0:
                    self._until[group] = 0  # all others in it are fresh as well
                else:
                    stamps[slot] = clock
                    self._to_head(slot, queue)
            elif rejected(slot):
                budget -= 1
                stamps[slot] = clock
                self._to_head(slot, queue)
            else:
                if slot != self._offered:
                    self._offered = slot
                    self._gone[queue % self.QUEUES] += 2
                return slot
        return -1

    def _learn(self) -> None:
        """Compare the classes by the share of entries that are used before they go."""
        self._learns_at = self.clock + max(1, self.period)
        shares = []
        for uses, (hits, gone) in enumerate(zip(self._hits, self._gone)):
            if hits + gone > LEARNED_MAX:
                self._hits[uses], self._gone[uses] = (hits + 1) // 2, (gone + 1) // 2
            shares.append(hits / (hits + gone))
        self._worth = [max(1.0, min(share / shares[0], WORTH_MAX)) for share in shares]

    def _coldest(self, group: int) -> int:
        """Return the queue of the group whose oldest entry is coldest, -1 without one. A fresh one counts only if used.

        (The first queue is in order of the puts: if its oldest entry is fresh, all are.)
        """
        slots, clock = self._slots, self.clock
        if clock >= self._learns_at:
            self._learn()
        best, coldest = -1, -1.0
        for uses in range(self.QUEUES):
            queue = group * self.QUEUES + uses
            slot = self._prev[slots + queue]
            if slot < slots:
                age = (clock - self._stamp[slot]) / self._worth[uses]
                if age > coldest and (uses or not (self.sparing and self.is_fresh(slot))):
                    best, coldest = queue, age
        return best

    def since(self, slot: int) -> int:
        if self._visited[slot]:
            return self.clock
        stamp = self._stamp[slot]
        return self.clock - (self.clock - stamp) // 2 if self._queue[slot] % self.QUEUES else stamp

    def look(self, slot: int) -> int:
        if self._visited[slot]:
            self._used(slot)
        return self.since(slot)


class _Settling(Policy):
    """Before a policy that has taken over from one with more queues: it finds what is left in those.

    What is there was used again since its put. It counts as used when it is moved, oldest first, so it goes after what
    was not used again.
    """

    #: The policy alone, for the time when nothing is left.
    SETTLED: type[Policy]

    def settle(self, most: int) -> bool:
        for queue, size in enumerate(self._sizes):
            if size and queue % self.QUEUES >= self.USED:
                most -= self._move_some(queue, most)
                if most <= 0:
                    return True
        self.__class__ = self.SETTLED  # type: ignore[assignment]
        return False

    def _move_some(self, queue: int, most: int) -> int:
        """Move up to ``most`` entries to their group's first queue. Return how many."""
        sentinel, first = self._slots + queue, queue - queue % self.QUEUES
        count = min(most, self._sizes[queue])
        for _ in range(count):
            slot = self._prev[sentinel]
            self._stamp[slot] = self.clock
            self._to_head(slot, first)
        return count

    def victim(self, group: int, rejected: Rejected) -> int:
        slot = super().victim(group, rejected)  # type: ignore[safe-super]
        if slot >= 0:
            return slot
        begin = group * self.QUEUES
        left = sum(self._move_some(queue, REJECTED_MAX) for queue in range(begin + self.USED, begin + self.QUEUES))
        return super().victim(group, rejected) if left else -1  # type: ignore[safe-super]

    def take_victims(self, group: int, rejected: Rejected, most: int, latest: int) -> list[int]:
        return Policy.take_victims(self, group, rejected, most, latest)


class _SettlingLru(_Settling, Lru):
    SETTLED = Lru


class _SettlingFifo(_Settling, Fifo):
    SETTLED = Fifo


class _SettlingSieve(_Settling, SieveProbation):
    SETTLED = SieveProbation


_POLICIES: Final[dict[str, type[Policy]]] = {kind.name: kind for kind in (Lru, Reuse, Fifo, SieveProbation)}
#: What a policy becomes at first. `Reuse` has a use for all queues.
_CHANGED: Final[dict[str, type[Policy]]] = {
    **_POLICIES, "lru": _SettlingLru, "fifo": _SettlingFifo, "sieve": _SettlingSieve,
}  # fmt: skip
assert tuple(_POLICIES) == POLICY_NAMES


def make_policy(
    name: str, slots: int, groups: int, visited: memoryview, period: int = 0, keys: KeyWords | None = None
) -> Policy:
    """Return a policy by name (`POLICY_NAMES`) over ``slots`` slots, with a byte of ``visited`` each.

    ``period``: how far the clock advances in a 64th of the region; 0: nothing is ever fresh. Without ``keys`` no key of
    an evicted entry is remembered. `UsageError` for an unknown name or impossible sizes.
    """
    return _kind(name, _POLICIES)(slots, groups, visited, period, keys)


def change(policy: Policy, name: str) -> None:
    """Let a policy go on as another one, in place. Call its `settle` until that returns False. O(queues).

    Everything may be called meanwhile. The first queue of each group stays in the order that it has: what is evicted
    first by the new policy is what was to go first by the old one. `UsageError` for an unknown name.
    """
    policy.become(_kind(name, _CHANGED))


def _kind(name: str, kinds: dict[str, type[Policy]]) -> type[Policy]:
    if name not in kinds:
        raise UsageError(f"no eviction policy {name!r}; there are {', '.join(POLICY_NAMES)}")
    return kinds[name]
