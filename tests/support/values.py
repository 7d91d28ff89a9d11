"""Values of verified load: each states what it is, at every byte.

A value names its key, writer, count and length in its first 32 bytes, and repeats 16 bytes derived from these up to its
end. So no torn value, no value of another key, and no mixture of two versions is taken for right. Each key has one
writer, which numbers what it puts: a reader that sees a lower count than before has seen a value come back.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

_HEAD = struct.Struct("<QQQQ")


def value_of(key: str, writer: int, count: int, length: int) -> bytes:
    """Return the value with this count, of ``length`` bytes. Below 32 bytes it is cut, and has no readable count."""
    token = blake2b(f"{key} {writer} {count} {length}".encode(), digest_size=16).digest()
    name = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")
    head = _HEAD.pack(name, writer, count, length)
    return (head + token * (length // 16 + 1))[:length]


def count_in(key: str, data: bytes | memoryview) -> int:
    """Return the count of a complete value of this key, or -1 for any other bytes. Reads all of it."""
    if len(data) < _HEAD.size:
        return -1
    _, writer, count, length = _HEAD.unpack_from(data)
    if length != len(data):
        return -1
    right = np.frombuffer(value_of(key, writer, count, length), np.uint8)
    return count if np.array_equal(np.frombuffer(data, np.uint8), right) else -1
