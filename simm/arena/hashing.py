"""Key -> digest -> shard and candidate sets.

The digest is BLAKE2b with 16 bytes of output, personalised with the namespace's own 16-byte BLAKE2b: a raw name would
be padded with zeros, or too long. Two different keys, or equal keys of two namespaces, share a digest with probability
2^-128 (2^-96 in a namespace with epochs), so SiMM treats digests as names. ``hash()`` is unusable: it differs between
processes.

    digest bits   0..13    shard (of 16,384)
                 14..63    first candidate set
                 64..127   second candidate set (the next one if it equals the first)
                 96..127   the namespace's epoch if it has one (cluster/epochs.py): the hash is 12 bytes then
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..constants import DIGEST_BYTES, KEY_BYTES_MAX, NAMESPACE_BYTES_MAX, SHARD_COUNT
from ..errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORDS: Final = struct.Struct("<QQ")
split: Final = _WORDS.unpack
SHARD_MASK: Final = SHARD_COUNT - 1
SHARD_BITS: Final = SHARD_MASK.bit_length()


#: Where the epoch begins in a digest that has one.
TAG_AT: Final = 12


def tag_of(epoch: int) -> bytes:
    """Return the end of the digests of an epoch: its lower half."""
    return (epoch & 0xFFFF_FFFF).to_bytes(4, "little")


class Hasher:
    """Digests of one namespace's keys. Copying a prepared hash object takes half the time of a new one."""

    __slots__ = ("_copy",)

    def __init__(self, namespace: str) -> None:
        raw = check_namespace(namespace)
        person = blake2b(raw, digest_size=DIGEST_BYTES).digest()
        self._copy: Callable[[], Any] = blake2b(digest_size=DIGEST_BYTES, person=person).copy

    def __call__(self, key: str) -> bytes:
        """Return the digest of one key. Raise UsageError for anything but 1 to 256 bytes of UTF-8."""
        try:
            raw = key.encode()
        except (AttributeError, UnicodeEncodeError):
            raise bad_key(key) from None
        if not 0 < len(raw) <= KEY_BYTES_MAX:
            raise bad_key(key)
        state = self._copy()
        state.update(raw)
        digest: bytes = state.digest()
        return digest

    def many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the digests of many keys, in less time than one by one. Raise UsageError as for one key.

        Raise it for a single text, too: its characters are hardly the keys that the caller means.
        """
        if isinstance(keys, str):
            raise UsageError(f"keys is a list of keys, not the one text {keys[:40]!r}")
        copy = self._copy
        digests: list[bytes] = []
        for key in keys:
            try:
                raw = key.encode()
            except (AttributeError, UnicodeEncodeError):
                raise bad_key(key) from None
            if not 0 < len(raw) <= KEY_BYTES_MAX:
                raise bad_key(key)
            state = copy()
            state.update(raw)
            digests.append(state.digest())
        return digests


class EpochHasher(Hasher):
    """Digests of a namespace's keys that end with its epoch."""

    __slots__ = ("_tag", "epoch")

    def __init__(self, namespace: str, epoch: int) -> None:
        super().__init__(namespace)
        self.epoch = epoch
        self._tag = tag_of(epoch)

    def __call__(self, key: str) -> bytes:
        return super().__call__(key)[:TAG_AT] + self._tag

    def many(self, keys: Sequence[str]) -> list[bytes]:
        tag = self._tag
        return [digest[:TAG_AT] + tag for digest in super().many(keys)]


def bad_key(key: object) -> UsageError:
    """Return the UsageError that describes a bad key."""
    if not isinstance(key, str):
        return UsageError(f"a key is a str, not {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return UsageError("a key must be encodable as UTF-8; this one has a lone surrogate")
    if size == 0:
        return UsageError("a key has at least 1 byte; this one is empty")
    return UsageError(f"a key has at most {KEY_BYTES_MAX} bytes of UTF-8; this one has {size}")


def check_namespace(namespace: str) -> bytes:
    """Return the name's UTF-8. Raise UsageError if it is empty or too long."""
    if not isinstance(namespace, str):
        raise UsageError(f"a namespace is a str, not {type(namespace).__name__}")
    raw = namespace.encode()
    if not 0 < len(raw) <= NAMESPACE_BYTES_MAX:
        raise UsageError(f"a namespace has 1 to {NAMESPACE_BYTES_MAX} bytes of UTF-8, this one {len(raw)}")
    return raw


def shard_of(digest: bytes) -> int:
    """Return the shard of a digest."""
    return (digest[0] | digest[1] << 8) & SHARD_MASK


def sets_of(digest: bytes, sets: int) -> tuple[int, int]:
    """Return the digest's two candidate sets, which always differ (``sets`` >= 2)."""
    low, high = split(digest)
    first = (low >> SHARD_BITS) % sets
    second = high % sets
    return (first, second) if first != second else (first, (second + 1) % sets)


def sets_of_words(
    low: NDArray[np.uint64], high: NDArray[np.uint64], sets: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Do :func:`sets_of` for digests given as columns of their two little-endian words."""
    first = (low >> np.uint64(SHARD_BITS)) % np.uint64(sets)
    second = high % np.uint64(sets)
    second = np.where(first == second, (second + np.uint64(1)) % np.uint64(sets), second)
    return first, second
