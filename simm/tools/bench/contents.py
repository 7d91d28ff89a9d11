"""Keys and values of ``simm bench``, the check of a value, and the latencies of calls.

With verification, a value contains the digest of its key, its version, its length and a checksum of the rest. The
target row of a get changes in every rotation, so the check finds a read that wrote nothing as well as one that wrote
wrong bytes.
"""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from array import array
from typing import Final

#: Latencies kept for each thread; beyond that, a random sample of all (Vitter's algorithm R).
SAMPLES_MAX: Final = 1 << 20

#: Header of a value to verify: digest of its key, version, length, crc32 of the rest.
_STAMP: Final = struct.Struct("<16sQII")
_VERSION: Final = struct.Struct("<Q")
_VERSION_AT: Final = 16
#: The version after a put whose outcome is unknown.
UNKNOWN: Final = -1
#: Names that are made at a time.
_BLOCK: Final = 4096


def key_name(run: str, size: int, thread: int, number: int) -> str:
    """Return a key in the engines' format: a hash in hex with a rank."""
    return hashlib.sha256(f"{run}/{size}/{thread}/{number}".encode()).hexdigest() + "_0_k"


class FreshKeys:
    """Keys of the same format that were never given out before. They are made ahead, so that a caller never waits."""

    __slots__ = ("_at", "_made", "_number", "_prefix", "taken")

    def __init__(self, seed: str) -> None:
        self._prefix = hashlib.sha256(seed.encode()).hexdigest()[:48]
        self._number = 0
        self._made: list[str] = []
        self._at = 0
        #: Keys given out so far.
        self.taken = 0

    def make(self, count: int) -> None:
        """Have ``count`` keys ready. O(count)."""
        lacking = count - (len(self._made) - self._at)
        if lacking > 0:
            first, self._number = self._number, self._number + lacking
            self._made = self._made[self._at :] + [f"{self._prefix}{number:016x}_0_k" for number in
                                                   range(first, self._number)]  # fmt: skip
            self._at = 0

    def take(self, count: int) -> list[str]:
        """Return ``count`` keys."""
        if len(self._made) - self._at < count:
            self.make(max(_BLOCK, count))
        self._at += count
        self.taken += count
        return self._made[self._at - count : self._at]


class Samples:
    """Latencies in nanoseconds: all of them, or a uniform sample of SAMPLES_MAX."""

    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.values = array("q", bytes(8 * SAMPLES_MAX))
        self.count = 0

    def add(self, value: int) -> None:
        """Record a value. Beyond SAMPLES_MAX each one is kept with the same probability. O(1)."""
        position = self.count
        self.count += 1
        if position >= SAMPLES_MAX:
            position = random.randrange(self.count)
            if position >= SAMPLES_MAX:
                return
        self.values[position] = value

    def take(self) -> tuple[int, bytes]:
        """Return (number of values, the values kept) and start over."""
        count, self.count = self.count, 0
        return count, self.values[: min(count, SAMPLES_MAX)].tobytes()


def _mark_of(key: str) -> bytes:
    """Return the digest that identifies a value's key."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def stamp(row: memoryview, key: str) -> None:
    """Write the header into a value. A value that is too short gets a part of its key's digest."""
    if len(row) < _STAMP.size:
        row[:] = (_mark_of(key) * 2)[: len(row)]
        return
    _STAMP.pack_into(row, 0, _mark_of(key), 0, len(row), zlib.crc32(row[_STAMP.size :]))


def rename(row: memoryview, key: str) -> None:
    """Make a stamped value that of another key. The rest stays."""
    mark = _mark_of(key)
    row[: len(mark)] = mark if len(row) >= _STAMP.size else (mark * 2)[: len(row)]


def set_version(row: memoryview, version: int) -> None:
    """Store a version in a stamped value that has room for it."""
    if len(row) >= _STAMP.size:
        _VERSION.pack_into(row, _VERSION_AT, version)


def fault(data: memoryview, key: str, size: int, version: int) -> str:
    """Return what is wrong with a value, or an empty string. ``version`` UNKNOWN accepts any version."""
    if len(data) != size:
        return f"{len(data)} bytes instead of {size}"
    mark = _mark_of(key)
    if size < _STAMP.size:
        return "" if data == (mark * 2)[:size] else "another key's bytes"
    found, number, length, crc = _STAMP.unpack_from(data)
    if found != mark:
        return "another key's bytes"
    if length != size or zlib.crc32(data[_STAMP.size :]) != crc:
        return "torn: its checksum does not match its bytes"
    if version not in (number, UNKNOWN):
        return f"version {number} instead of {version}"
    return ""
