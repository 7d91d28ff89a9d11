"""Bits of a shard word, and sets of shards as bitmaps, for the arena, the messages and the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from ..constants import PLAIN_BELOW, SHARD_COUNT
from ..errors import UsageError

FROZEN: Final = 1 << 63
MOVING: Final = PLAIN_BELOW
EPOCH_MASK: Final = MOVING - 1
BITMAP_BYTES: Final = SHARD_COUNT // 8

#: A peer's claim of an epoch so far beyond what is known here is not believed: at ten changes a second it would be that
#: of a map 13 years younger. A worker freezes, and a manager skips, so far at most. So a manager can go beyond every
#: epoch that a worker has frozen by.
EPOCHS_AHEAD: Final = 1 << 32
#: Beyond this epoch, which millions of such claims reach, claims are believed by much less. So none exhausts the 62
#: bits of an epoch, and peers that know of later maps are believed all the same.
_HIGH: Final = 1 << 60
_HIGH_AHEAD: Final = 1 << 16


def epoch_limit(known: int) -> int:
    """Return the highest epoch that is believed of a peer where ``known`` is the highest known."""
    return min(known + (EPOCHS_AHEAD if known < _HIGH else _HIGH_AHEAD), EPOCH_MASK)


def bitmap_of(shards: Iterable[int]) -> bytes:
    """Return shard numbers as a bitmap, one bit each, LSB first."""
    bits = bytearray(BITMAP_BYTES)
    for shard in shards:
        bits[shard >> 3] |= 1 << (shard & 7)
    return bytes(bits)


def shards_in(bitmap: bytes) -> list[int]:
    """Return the shard numbers of a bitmap, ascending. Raise UsageError if it has another size."""
    if len(bitmap) != BITMAP_BYTES:
        raise UsageError(f"a shard bitmap has {BITMAP_BYTES} bytes, not {len(bitmap)}")
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
