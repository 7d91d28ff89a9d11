"""The interface of a simulated cache of KV blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Cache(ABC):
    """A cache of KV blocks under one eviction policy, with room for ``room`` units.

    A block is a number; a block takes up ``units`` of the room, always as many. Replay calls, for each request in
    order: `begin`, `hit` for each block of the leading stored run, then `put` for each block after it. A block of the
    rest may be stored already; its `put` is then a use of it.
    """

    def __init__(self, room: int) -> None:
        self.room = room

    def begin(self, blocks: Sequence[int], units: int) -> None:  # noqa: B027 (most policies need no notice)
        """Note that a request begins: its prompt's blocks in order, and the units of each."""

    @abstractmethod
    def __contains__(self, block: int) -> bool:
        """Return True if the block is stored. This is no use of it. O(1)."""

    @abstractmethod
    def hit(self, block: int) -> None:
        """Note that a stored block is read."""

    @abstractmethod
    def put(self, block: int, units: int) -> None:
        """Store a block and evict others as needed. A block larger than the room is not stored."""
