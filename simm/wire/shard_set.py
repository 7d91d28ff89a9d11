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
#: A manager that knows nothing believes servers up to here. Each loss of its state raises the epochs by up to 2^30.
BLANK_LIMIT: Final = 1 << 42


def epoch_limit(known: int) -> int:
    """Return the highest epoch that is believed of a peer where ``known`` is the highest known."""
    return min(known + (EPOCHS_AHEAD if known < _HIGH else _HIGH_AHEAD), EPOCH_MASK)


def lost_limit(known: int) -> int:
    """Return the highest epoch that maps can have which a manager has sent and lost, and nobody but clients knows."""
    return known + (epoch_limit(known) - known) // 4


def beyond_lost(known: int, chance: int) -> int:
    """Return an epoch to go on from where ``known`` is the highest known, and later maps may have been lost.

    It is from an eighth to a quarter of the way to :func:`epoch_limit`. ``chance``: random bits, so that managers that
    go on from the same epoch, one after the other, do not give the same epochs.
    """
    least = (epoch_limit(known) - known) // 8
    return known + least + chance % max(1, least)


def beyond_stored(known: int, chance: int) -> int:
    """Return an epoch to go on from with a stored state, by which no map has had an epoch above ``known``.

    It is from a 4096th to a 2048th of the way to :func:`epoch_limit`, 2^20 to 2^21 epochs. ``chance``: random bits, so
    that two managers that go on from one state, or from a copy of it, do not give the same epochs. The way is so short
    that servers with maps of two thousand starts after the one from a copy are still believed.
    """
    least = (epoch_limit(known) - known) // 4096
    return known + least + chance % max(1, least)


def stored_limit(known: int) -> int:
    """Return the highest epoch that is believed of a client by a manager that has begun with a stored state."""
    return known + (epoch_limit(known) - known) // 256


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
