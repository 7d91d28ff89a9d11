"""What is read together, and what became of it: the words that all ways of reading have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .buffers import Span
from .messages import Status
from .shards import FROZEN, MOVING

#: Results of reads that are no length.
MISS: Final = 0
DOWN: Final = -1
SMALL: Final = -2

_WRONG_OWNER: Final = int(Status.WRONG_OWNER)
_PREVIOUS: Final = int(Status.PREVIOUS)
_MOVING: Final = MOVING
_FROZEN: Final = FROZEN

#: Where a value goes: None asks for new bytes.
Sink = memoryview | Span | None


class Batch:
    """What is read, and what came of it: a length, the bytes themselves where the sink is None, MISS, DOWN, SMALL.

    Without ``sinks`` the question is only whether the keys are stored: 1 or MISS or DOWN.
    """

    __slots__ = ("digests", "results", "sinks")

    def __init__(self, digests: Sequence[bytes], sinks: Sequence[Sink] | None) -> None:
        self.digests = digests
        self.sinks = sinks
        self.results: list[Any] = [MISS] * len(digests)


class Astray:
    """Positions of a batch that their owner has not, though it does not say that they are misses.

    With whether the owner has surely taken the shard over, and those behind with the epoch since which it is its own.
    """

    __slots__ = ("asking", "behind", "wrong")

    def __init__(self) -> None:
        #: Moving in, or not here (yet): the owner must be asked.
        self.asking: list[tuple[int, bool]] = []
        #: The owner says that it may be at the previous one.
        self.behind: list[tuple[int, int, bool]] = []
        #: Not its own.
        self.wrong: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.asking or self.behind or self.wrong)

    def positions(self) -> list[int]:
        """All of them."""
        return [each[0] for each in (*self.asking, *self.behind)] + self.wrong

    def by_word(self, position: int, word: int) -> bool:
        """Note a key whose shard's word is not plain; False if it is, and the key a miss."""
        if 0 < word < _MOVING:
            return False
        if word < _FROZEN:
            self.asking.append((position, word > 0))
        else:
            self.wrong.append(position)
        return True

    def by_status(self, position: int, status: int, since: int, *, taken: bool = False) -> bool:
        """The same by what a server answered; ``since`` goes with PREVIOUS."""
        if status == _PREVIOUS:
            self.behind.append((position, since, taken))
        elif status == _WRONG_OWNER:
            self.wrong.append(position)
        else:
            return False
        return True
