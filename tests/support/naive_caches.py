"""Naive twins of the simulated policies: one list each, searched from end to end, written from the papers' rules.

They have blocks of one unit only, and the interface of `simm.traces.cache.Cache`.
"""

from __future__ import annotations

from collections.abc import Sequence


class NaiveFifo:
    def __init__(self, room: int) -> None:
        self.room = room
        self.stored: list[int] = []

    def begin(self, blocks: Sequence[int], units: int) -> None:
        pass

    def __contains__(self, block: int) -> bool:
        return block in self.stored

    def hit(self, block: int) -> None:
        pass

    def put(self, block: int, units: int) -> None:
        if block in self:
            self.hit(block)
            return
        if len(self.stored) == self.room:
            self.evict()
        self.stored.append(block)

    def evict(self) -> None:
        self.stored.pop(0)


class NaiveLru(NaiveFifo):
    def hit(self, block: int) -> None:
        self.stored.remove(block)
        self.stored.append(block)


class NaiveSieve(NaiveFifo):
    """The hand is an index: entries before it were passed in this round."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def hit(self, block: int) -> None:
        self.visited[block] = True

    def evict(self) -> None:
        while True:
            block = self.stored[self.hand]
            if not self.visited.get(block):
                break
            self.visited[block] = False
            self.hand = (self.hand + 1) % len(self.stored)
        del self.stored[self.hand]
        if self.hand == len(self.stored):  # before a new block comes: it is not the hand's
            self.hand = 0


class NaiveS3Fifo(NaiveFifo):
    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.uses: dict[int, int] = {}
        self.small_room = max(1, room // 10)

    def __contains__(self, block: int) -> bool:
        return block in self.small + self.main

    def hit(self, block: int) -> None:
        self.uses[block] = min(3, self.uses[block] + 1)

    def put(self, block: int, units: int) -> None:
        if block in self:
            self.hit(block)
            return
        while len(self.small + self.main) == self.room:
            if len(self.small) >= self.small_room or not self.main:
                self.evict_small()
            else:
                self.evict_main()
        self.uses[block] = 0
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)

    def evict_small(self) -> None:
        while self.small:
            block = self.small.pop(0)
            if self.uses[block] == 0:
                self.ghosts = [*self.ghosts, block][-self.room :]
                return
            self.uses[block] = 0
            self.main.append(block)
            if len(self.main) > self.room - self.small_room:
                self.evict_main()

    def evict_main(self) -> None:
        while self.uses[self.main[0]] > 0:
            block = self.main.pop(0)
            self.uses[block] -= 1
            self.main.append(block)
        self.main.pop(0)


class NaiveArc(NaiveFifo):
    """Figure 4 of the paper, with its names: T1, T2, B1, B2, p. Least recent first."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self.t1 + self.t2

    def hit(self, block: int) -> None:
        (self.t1 if block in self.t1 else self.t2).remove(block)
        self.t2.append(block)

    def put(self, block: int, units: int) -> None:
        c = self.room
        if block in self:
            self.hit(block)
        elif block in self.b1:
            self.p = min(c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.replace(False)
            self.b1.remove(block)
            self.t2.append(block)
        elif block in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.replace(True)
            self.b2.remove(block)
            self.t2.append(block)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if len(self.t1) + len(self.b1) == c:
                if len(self.t1) < c:
                    self.b1.pop(0)
                    self.replace(False)
                else:
                    self.t1.pop(0)
            elif total >= c:
                if total == 2 * c:
                    self.b2.pop(0)
                self.replace(False)
            self.t1.append(block)

    def replace(self, in_b2: bool) -> None:
        if len(self.t1) + len(self.t2) < self.room:
            return  # the paper's cache is full whenever it has ghosts
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p) or not self.t2):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


class NaiveLru2(NaiveFifo):
    """Keep all times of all uses; forget those of blocks evicted longer ago than the last ``memory`` ones."""

    def __init__(self, room: int, memory: int | None = None) -> None:
        super().__init__(room)
        self.memory = memory
        self.uses: dict[int, list[int]] = {}
        self.evicted: list[int] = []
        self.clock = 0

    def hit(self, block: int) -> None:
        self.clock += 1
        self.uses.setdefault(block, []).append(self.clock)

    def put(self, block: int, units: int) -> None:
        if block in self.evicted:
            self.evicted.remove(block)
        elif block not in self:
            self.uses[block] = []
        known = block in self
        super().put(block, units)
        if not known:
            self.hit(block)

    def evict(self) -> None:
        victim = min(self.stored, key=lambda block: ([-1, *self.uses[block]][-2], self.uses[block][-1]))
        self.stored.remove(victim)
        self.evicted.append(victim)
        if self.memory is not None and len(self.evicted) > self.memory * self.room:
            self.uses.pop(self.evicted.pop(0))


class NaiveMin(NaiveFifo):
    """Look for the next use of every stored block in the rest of the trace."""

    def __init__(self, room: int, uses: Sequence[int]) -> None:
        super().__init__(room)
        self.uses = list(uses)
        self.position = 0

    def hit(self, block: int) -> None:
        self.position += 1

    def put(self, block: int, units: int) -> None:
        self.position += 1
        if block not in self:
            self.stored.append(block)
        if len(self.stored) > self.room:
            rest = self.uses[self.position :]
            self.stored.remove(max(self.stored, key=lambda each: rest.index(each) if each in rest else len(rest)))
