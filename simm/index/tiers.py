"""In which tiers blocks are: a count for each of them, packed into a word a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .sources import TIERS

#: A count for each tier: 4 bits. More are not counted, so that the block is forgotten early rather than late.
BITS: Final = 4
MOST: Final = 15
#: The lowest bit of each tier's count.
_FLAGS: Final = sum(1 << BITS * tier for tier in range(len(TIERS)))


def tiers_of(counts: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return for each block and tier whether the block is there: blocks x tiers."""
    shifts = np.arange(len(TIERS), dtype=np.uint32) * np.uint32(BITS)
    found: NDArray[np.bool_] = (counts[:, None] >> shifts & np.uint32(MOST)) > 0
    return found


def alike(found: Sequence[NDArray[np.uint32]]) -> list[int | None]:
    """Return for each array of counts the tiers that all its blocks are in, a bit each; None where blocks differ.

    O(blocks), by few calls for all arrays: most prompts are in the same tiers as a whole.
    """
    answer: list[int | None] = [0] * len(found)
    at = [number for number, counts in enumerate(found) if len(counts)]
    if not at:
        return answer
    flags = np.concatenate([found[number] for number in at])
    flags |= flags >> np.uint32(1)
    flags |= flags >> np.uint32(2)
    flags &= np.uint32(_FLAGS)
    starts = np.cumsum([0, *(len(found[number]) for number in at[:-1])])
    least = np.bitwise_and.reduceat(flags, starts).tolist()
    most = np.bitwise_or.reduceat(flags, starts).tolist()
    for number, low, high in zip(at, least, most):
        answer[number] = sum((low >> BITS * tier & 1) << tier for tier in range(len(TIERS))) if low == high else None
    return answer
