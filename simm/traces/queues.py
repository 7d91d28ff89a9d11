"""Simulated policies that keep queues of what is stored: FIFO, LRU, SIEVE and S3-FIFO; and a cache without bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from .cache import Cache


class Fifo(Cache):
    """First in, first out."""

    #: Whether a use moves a block to the new end.
    MOVES = False

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._units: OrderedDict[int, int] = OrderedDict()
        self._free = room

    def __contains__(self, block: int) -> bool:
        return block in self._units

    def hit(self, block: int) -> None:
        if self.MOVES:
            self._units.move_to_end(block)

    def put(self, block: int, units: int) -> None:
        if block in self._units:
            self.hit(block)
        elif units <= self.room:
            self._units[block] = units
            self._free -= units
            while self._free < 0:
                self._free += self._units.popitem(last=False)[1]


class Lru(Fifo):
    """Least recently used."""

    MOVES = True


class Unbounded(Cache):
    """A cache that never evicts: the most that any cache can find."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._stored: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._stored

    def hit(self, block: int) -> None:
        pass

    def put(self, block: int, units: int) -> None:
        self._stored.add(block)


class Sieve(Cache):
    """SIEVE (Zhang et al., NSDI 2024): a FIFO queue, and a hand that evicts the next unvisited block from old to new.

    The hand spares visited blocks and clears their mark. They stay where they are.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._units: dict[int, int] = {}
        self._visited: set[int] = set()
        # A ring of links: _END is older than the newest block and newer than the oldest one.
        self._newer: dict[int, int] = {_END: _END}
        self._older: dict[int, int] = {_END: _END}
        self._hand = _END
        self._free = room

    def __contains__(self, block: int) -> bool:
        return block in self._units

    def hit(self, block: int) -> None:
        self._visited.add(block)

    def put(self, block: int, units: int) -> None:
        if block in self._units:
            self.hit(block)
            return
        if units > self.room:
            return
        while self._free < units:
            self._evict()
        newest = self._older[_END]
        self._older[block], self._newer[block] = newest, _END
        self._newer[newest] = self._older[_END] = block
        self._units[block] = units
        self._free -= units

    def _evict(self) -> None:
        newer, visited = self._newer, self._visited
        block = self._hand
        while block == _END or block in visited:
            visited.discard(block)
            block = newer[block]
        older = self._older.pop(block)
        self._hand = newer.pop(block)
        newer[older], self._older[self._hand] = self._hand, older
        self._free += self._units.pop(block)


_END: Final = -1


class S3Fifo(Cache):
    """S3-FIFO (Yang et al., SOSP 2023): a small FIFO of a tenth, a main FIFO, and a memory of what the small one lost.

    A block used in the small queue moves to the main one, whose used blocks get another round for each use, three at
    most. A block that the memory has goes to the main queue at once. The memory has as many units as the cache.
    """

    SMALL_SHARE: Final = 10
    USES_MAX: Final = 3

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._units: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._small = _Queue(max(1, room // self.SMALL_SHARE))
        self._main = _Queue(room - self._small.room)
        self._ghosts = _Queue(room)

    def __contains__(self, block: int) -> bool:
        return block in self._units

    def hit(self, block: int) -> None:
        self._uses[block] = min(self.USES_MAX, self._uses[block] + 1)

    def put(self, block: int, units: int) -> None:
        if block in self._units:
            self.hit(block)
            return
        if units > self.room:
            return
        while self._small.used + self._main.used + units > self.room:
            if self._small.used >= self._small.room or not self._main.used:
                self._evict_small()
            else:
                self._evict_main()
        self._units[block] = units
        self._uses[block] = 0
        if self._ghosts.remove(block):
            self._main.add(block, units)
        else:
            self._small.add(block, units)

    def _evict_small(self) -> None:
        """Evict a block from the small queue, after moving the used ones before it to the main queue."""
        while self._small.used:
            block, units = self._small.oldest()
            if not self._uses[block]:
                del self._units[block], self._uses[block]
                self._ghosts.add(block, units)
                while self._ghosts.used > self._ghosts.room:
                    self._ghosts.oldest()
                return
            self._uses[block] = 0
            self._main.add(block, units)
            while self._main.used > self._main.room:
                self._evict_main()

    def _evict_main(self) -> None:
        while True:
            block, units = self._main.oldest()
            if not self._uses[block]:
                del self._units[block], self._uses[block]
                return
            self._uses[block] -= 1
            self._main.add(block, units)


class _Queue:
    """Blocks in order of their arrival, and the units of all."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.used = 0
        self._units: OrderedDict[int, int] = OrderedDict()

    def add(self, block: int, units: int) -> None:
        """Add a block as the newest."""
        self._units[block] = units
        self.used += units

    def remove(self, block: int) -> bool:
        """Remove a block; return False if it is not there."""
        units = self._units.pop(block, 0)
        self.used -= units
        return units > 0

    def oldest(self) -> tuple[int, int]:
        """Remove the oldest block, and return it with its units."""
        block, units = self._units.popitem(last=False)
        self.used -= units
        return block, units
