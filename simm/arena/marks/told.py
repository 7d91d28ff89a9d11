"""Which digests clients have spoken of at their new owner, while the shard moves in: older marks do not count for them.

The previous owner is frozen before the new one takes its first request, so what was said here is newer than every mark
that a mover carries. No clock is compared and no message is needed: whoever says something at the new owner is
remembered, and a mover's mark of that digest is refused. So is one of a digest that has left the table here.

What is remembered is private to the worker. A successor of it ends all moves (``shard_words.py``), and takes no mark of
a mover either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...wire.shard_set import FROZEN, MOVING
from ..hashing import shard_of

if TYPE_CHECKING:
    from ..shard_words import ShardWords

#: Digests that are remembered. Beyond that all marks of movers are refused until nothing moves in.
TOLD_MAX: Final = 1 << 18


class Told:
    """The digests of which something was said, each with its shard's word of then. All methods are O(1)."""

    def __init__(self, words: ShardWords) -> None:
        self._words = words
        self._told: dict[bytes, int] = {}
        self._full = False
        #: How many times all moves had ended when that was remembered.
        self._moves = words.moves

    def _forget_ended(self) -> None:
        """Forget what was remembered if all moves have ended since, whether others have begun or not."""
        if self._moves != self._words.moves:
            self._moves = self._words.moves
            self._told.clear()
            self._full = False

    def note(self, digest: bytes) -> None:
        """Remember a digest if its shard is moving in."""
        words = self._words
        self._forget_ended()
        if not words.moving:
            return
        word = words.words[shard_of(digest)]
        if MOVING < word < FROZEN:
            if len(self._told) < TOLD_MAX:
                self._told[digest] = word
            else:
                self._full = True

    def takes_mark(self, digest: bytes, epoch: int) -> bool:
        """Return True if the mark of a mover with a map of ``epoch`` counts: it is the newest thing said of a digest.

        It counts as long as that mover's copies do, unless the digest has left the table here meanwhile.
        """
        self._forget_ended()
        if self._full or not self._words.may_copy(digest, epoch):
            return False
        return self._told.get(digest) != self._words.words[shard_of(digest)]

    def __len__(self) -> int:
        return len(self._told)
