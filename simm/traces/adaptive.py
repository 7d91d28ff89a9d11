"""Simulated policies with a memory of what they evicted, ARC and LRU-2; and Belady's MIN, which knows the future."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Final

from .cache import Cache
from .formats import Trace

_NEVER: Final = 1 << 62


class _List(OrderedDict[int, int]):
    """Blocks with their units, oldest first, and the units of all."""

    def __init__(self) -> None:
        super().__init__()
        self.used = 0

    def add(self, block: int, units: int) -> None:
        self[block] = units
        self.used += units

    def take(self, block: int) -> int:
        """Remove a block and return its units."""
        units = self.pop(block)
        self.used -= units
        return units

    def take_oldest(self) -> tuple[int, int]:
        """Remove the oldest block, and return it with its units."""
        block, units = self.popitem(last=False)
        self.used -= units
        return block, units


class Arc(Cache):
    """ARC (Megiddo and Modha, FAST 2003): blocks seen once and seen again, with ghosts of both, and a moving border.

    With blocks of several units, each list is measured in units, and a found ghost moves the border by its own.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._once, self._again = _List(), _List()
        self._once_ghosts, self._again_ghosts = _List(), _List()
        #: Units that the list of blocks seen once should have.
        self._target = 0.0

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again

    def hit(self, block: int) -> None:
        units = (self._once if block in self._once else self._again).take(block)
        self._again.add(block, units)

    def put(self, block: int, units: int) -> None:
        if block in self:
            self.hit(block)
            return
        room = self.room
        if units > room:
            return
        once, again, once_ghosts, again_ghosts = self._once, self._again, self._once_ghosts, self._again_ghosts
        if block in once_ghosts:
            step = max(1.0, again_ghosts.used / once_ghosts.used) * units
            self._target = min(float(room), self._target + step)
            once_ghosts.take(block)
            self._make_room(units, again_ghost=False)
            again.add(block, units)
        elif block in again_ghosts:
            step = max(1.0, once_ghosts.used / again_ghosts.used) * units
            self._target = max(0.0, self._target - step)
            again_ghosts.take(block)
            self._make_room(units, again_ghost=True)
            again.add(block, units)
        else:
            # The first directory, blocks seen once and their ghosts, has the room's size at most; both have twice it.
            while once_ghosts and once.used + once_ghosts.used + units > room:
                once_ghosts.take_oldest()
            while once and once.used + units > room:
                once.take_oldest()
            while again_ghosts and self._directory() + units > 2 * room:
                again_ghosts.take_oldest()
            self._make_room(units, again_ghost=False)
            once.add(block, units)

    def _directory(self) -> int:
        return self._once.used + self._again.used + self._once_ghosts.used + self._again_ghosts.used

    def _make_room(self, units: int, again_ghost: bool) -> None:
        """Evict until ``units`` are free: from the blocks seen once if they have more than their target."""
        once, again = self._once, self._again
        while once.used + again.used + units > self.room:
            over = once.used > self._target or (again_ghost and once.used == self._target)
            if once and (over or not again):
                self._once_ghosts.add(*once.take_oldest())
            else:
                self._again_ghosts.add(*again.take_oldest())


class Lru2(Cache):
    """LRU-2 (O'Neil et al., SIGMOD 1993): evict the block whose last use but one is longest ago.

    Of blocks that were used once, the least recent goes first, before all others. The last uses of evicted blocks are
    kept: of all, or of the most recently evicted ones up to ``memory`` times the room.
    """

    def __init__(self, room: int, memory: int | None = None) -> None:
        super().__init__(room)
        self._ghost_room = _NEVER if memory is None else memory * room
        self._clock = 0
        self._free = room
        self._units: dict[int, int] = {}
        self._uses: dict[int, tuple[int, int]] = {}
        #: (last use but one, last use, block): the current entry of each stored block, and outdated ones.
        self._order: list[tuple[int, int, int]] = []
        self._ghosts = _List()
        self._ghost_use: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._units

    def hit(self, block: int) -> None:
        self._use(block, self._uses[block][1])

    def put(self, block: int, units: int) -> None:
        if block in self._units:
            self.hit(block)
            return
        if units > self.room:
            return
        before = -1
        if block in self._ghosts:
            self._ghosts.take(block)
            before = self._ghost_use.pop(block)
        while self._free < units:
            self._evict()
        self._units[block] = units
        self._free -= units
        self._use(block, before)

    def _use(self, block: int, before: int) -> None:
        self._clock += 1
        self._uses[block] = before, self._clock
        heapq.heappush(self._order, (before, self._clock, block))

    def _evict(self) -> None:
        while True:
            before, last, block = heapq.heappop(self._order)
            if self._uses.get(block) == (before, last):
                break
        del self._uses[block]
        units = self._units.pop(block)
        self._free += units
        self._ghosts.add(block, units)
        self._ghost_use[block] = last
        while self._ghosts.used > self._ghost_room:
            del self._ghost_use[self._ghosts.take_oldest()[0]]


class Min(Cache):
    """MIN (Belady 1966): evict the block whose next use is farthest in the future.

    The victim may be the block that is put. Of a prompt's blocks, which all come back in one request, the last is used
    last and goes first. So no block is stored without those before it, and with blocks of one size no policy finds
    more. With several sizes it is a reference and no bound: the optimum is then hard to compute.
    """

    def __init__(self, room: int, trace: Trace) -> None:
        super().__init__(room)
        self._free = room
        self._units: dict[int, int] = {}
        self._next: dict[int, int] = {}
        #: (minus the next use, block): the current entry of each stored block, and outdated ones.
        self._order: list[tuple[int, int]] = []
        # Each hit and each put is the next use of this list: replay makes one of them for each block, in order.
        uses = [block for request in trace.requests for block in request.blocks]
        following: dict[int, int] = {}
        self._after = [_NEVER] * len(uses)
        for position in range(len(uses) - 1, -1, -1):
            self._after[position] = following.get(uses[position], _NEVER)
            following[uses[position]] = position
        self._uses = uses
        self._position = 0

    def __contains__(self, block: int) -> bool:
        return block in self._units

    def hit(self, block: int) -> None:
        self._use(block)

    def put(self, block: int, units: int) -> None:
        if units > self.room:
            self._position += 1
            return
        if block not in self._units:
            self._units[block] = units
            self._free -= units
        self._use(block)
        while self._free < 0:
            self._evict()

    def _use(self, block: int) -> None:
        assert self._uses[self._position] == block, "MIN replays the trace that it was made for"
        following = self._after[self._position]
        self._position += 1
        self._next[block] = following
        heapq.heappush(self._order, (-following, block))

    def _evict(self) -> None:
        while True:
            following, block = heapq.heappop(self._order)
            if self._next.get(block) == -following:
                break
        del self._next[block]
        self._free += self._units.pop(block)
