"""Whose an entry may be, in an arena whose header says that there may be bound clients' ones (``Word.BOUND``).

``pack_into`` clears all bytes before it stores them, and a slot may change between any two looks. So its flags say
something only under the seqlock: while the digest is there, and the seq is even and the same before and after. Of all
other entries nobody can say yet that a get would believe them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..layout import ENTRY_BOUND, FLAGS_WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BOUND: Final = np.uint64(ENTRY_BOUND << 48)
_EVEN: Final = np.uint64(~1 & (1 << 64) - 1)
#: A slot's seq, digest and flags, loaded in this order: in half the time of four words.
_unpack_seen = struct.Struct(f"@Q16s{FLAGS_WORD * 8 + 6 - 24}xH").unpack_from


def is_unbound(meta: memoryview, words: memoryview, at: int, digest: bytes) -> bool:
    """Return True if the slot at a byte has the digest's entry, and surely no bound client has stored it. O(1).

    ``meta`` and ``words``: the same bytes, and as words.
    """
    seq, found, flags = _unpack_seen(meta, at)
    return found == digest and not (flags & ENTRY_BOUND or seq & 1) and words[at >> 3] == seq


def doubtful(
    hits: NDArray[np.bool_], words: NDArray[np.uint64], at: NDArray[np.intp], low: NDArray[np.uint64],
    high: NDArray[np.uint64],
) -> list[Any]:  # fmt: skip
    """Return the positions of hits of which :func:`is_unbound` is not sure. O(hits), by numpy.

    ``at``: the word at which each one's slot begins. ``low`` and ``high``: the words of its digest.
    """
    seqs = words.take(at)
    sure = words.take(at + 1) == low
    sure &= words.take(at + 2) == high
    sure &= words.take(at + FLAGS_WORD) & _BOUND == 0
    sure &= words.take(at) == seqs & _EVEN  # an odd seq less one was there before it, and is never there again
    return np.flatnonzero(hits & ~sure).tolist()  # type: ignore[no-any-return]
