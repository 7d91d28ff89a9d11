"""Search several arenas for the keys of one batch, in one pass.

numpy costs about as much for a few keys as for a hundred. So a batch that is spread over four arenas would cost four
times as much as one in a single arena. A pass over several arenas gathers by address instead, from the arrays below,
which are all of this process's memory. Each address is that of an arena that the caller's readers keep mapped, and each
index is within its tables, as in a search of one arena.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import SHARD_MASK, find_slots
from ..arena.layout import NONE_BOUND, SLOT_WORDS, Word
from ..arena.lookups.bound import doubtful
from ..arena.reader import ArenaReader
from ..wire.shard_set import FROZEN

#: No process has anything in its first page, and numpy takes address 0 for none.
_ORIGIN: Final = 4096
_ALL: Final[Any] = (ctypes.c_ubyte * (1 << 47)).from_address(_ORIGIN)
_WORDS: Final[NDArray[np.uint64]] = np.frombuffer(_ALL, np.uint64)
_BYTES: Final[NDArray[np.uint8]] = np.frombuffer(_ALL, np.uint8)


class Columns:
    """The digests of a batch: the low and the high words, and the shards."""

    __slots__ = ("high", "low", "shards")

    def __init__(self, digests: Sequence[bytes]) -> None:
        words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        self.low: NDArray[np.uint64] = words[:, 0]
        self.high: NDArray[np.uint64] = words[:, 1]
        self.shards: NDArray[np.intp] = (self.low & np.uint64(SHARD_MASK)).astype(np.intp)


class Arenas:
    """Several arenas. For one call, as it keeps them mapped. ``which``: of ``readers`` is each key's, by number."""

    __slots__ = ("_base", "_readers", "_sets", "_shards", "_visited", "_which")

    def __init__(self, readers: Sequence[ArenaReader], which: NDArray[np.intp]) -> None:
        self._readers = readers
        self._which = which
        places = np.array([reader.place for reader in readers], np.uint64)
        places[:, 1:] -= np.uint64(_ORIGIN)
        each = places[which]
        self._sets = each[:, 0]
        self._base = (each[:, 1] >> np.uint64(3)).astype(np.intp)
        self._shards = (each[:, 2] >> np.uint64(3)).astype(np.intp)
        self._visited = each[:, 3].astype(np.intp)

    def slots_of(self, keys: Columns) -> NDArray[np.intp]:
        """Do :meth:`ArenaReader.slots_of_many`: return unchecked candidates, each in its key's arena."""
        return find_slots(_WORDS, self._base, self._sets, keys.low, keys.high)

    def contain(self, keys: Columns) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """Do :meth:`ArenaReader.contains_many`; return the shard words too."""
        slots = self.slots_of(keys)
        words = _WORDS.take(self._shards + keys.shards)
        # 0 < word < FROZEN in one comparison, as 0 - 1 wraps to the greatest word.
        hits = (slots >= 0) & (words - np.uint64(1) < np.uint64(FROZEN - 1))
        own = [reader.of_cluster for reader in self._readers]  # after the entries were found
        if not all(own):
            hits &= np.array(own)[self._which]
        if any(reader.words[Word.BOUND] != NONE_BOUND for reader in self._readers):
            # Of a miss it is a word before its arena's slots, of the same mapping.
            for at in doubtful(hits, _WORDS, self._base + slots * SLOT_WORDS, keys.low, keys.high):
                digest = int(keys.low[at]).to_bytes(8, "little") + int(keys.high[at]).to_bytes(8, "little")
                hits[at] = self._readers[self._which[at]].has_own(digest)
        _BYTES[(self._visited + slots)[hits]] = 1
        return hits, words
