"""Marks that a mover has sent ahead of their values, so that no value is here without its mark.

A value that is copied first, and marked later, could be evicted in between, whatever the previous owner had promised.
So a mover sends the mark first. It waits here until the value comes, by the mover's copy or a client's put, and counts
from the same turn of the worker on in which that is published: no eviction comes in between.

It counts as any mark of a mover does (``told.py``): not if a client has said something else meanwhile, or the digest
has left the table here, or the move of its shard has ended. What waits is private to the
worker, with which a move ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from ..shard_words import ShardWords
    from .told import Told

#: Marks that wait. A mover copies a few thousand values at a time; of more, the oldest are forgotten.
AWAITED_MAX: Final = 1 << 18


class Awaited(NamedTuple):
    """A mark: the class, until when in seconds of CLOCK_BOOTTIME, and the epoch of its mover's map."""

    how: int
    until: float
    epoch: int


class AwaitedMarks:
    """The marks by digest. All methods are O(1)."""

    def __init__(self, words: ShardWords, told: Told) -> None:
        self._words = words
        self._told = told
        #: Empty unless values are on their way. The same dict for good.
        self.marks: dict[bytes, Awaited] = {}
        #: How many times all moves had ended when they came.
        self._moves = words.moves

    def _forget_ended(self) -> None:
        """Forget the marks if all moves have ended since, whether others have begun or not, as of another cluster."""
        if self._moves != self._words.moves:
            self._moves = self._words.moves
            self.marks.clear()

    def add(self, digest: bytes, mark: Awaited) -> None:
        """Let a mark wait for its value."""
        self._forget_ended()
        self.marks[digest] = mark
        if len(self.marks) > AWAITED_MAX:
            del self.marks[next(iter(self.marks))]

    def take(self, digest: bytes) -> Awaited | None:
        """Return the mark of a value that has come, if it counts. It waits no longer."""
        self._forget_ended()
        mark = self.marks.pop(digest, None)
        return mark if mark is not None and self._told.takes_mark(digest, mark.epoch) else None
