"""Key -> digest -> shard and candidate sets, and the slots of a batch's digests there.

The digest is BLAKE2b with 16 bytes of output, personalised with the namespace's own 16-byte BLAKE2b: a raw name would
be padded with zeros, or too long. Two different keys, or equal keys of two namespaces, share a digest with probability
2^-128 (2^-96 in a namespace with epochs), so SiMM treats digests as names. ``hash()`` is unusable: it differs between
processes.

    digest bits   0..13    shard (of 16,384): the key's own, or that of its hash tag
                 14..63    first candidate set
                 64..127   second candidate set (the next one if it equals the first)
                 96..127   the namespace's epoch if it has one (cluster/epochs.py): the hash is 12 bytes then

A key may name its shard by a *hash tag*, as in Redis Cluster: the text between its first "{" and the first "}" after
it, if there is any. Its shard is then that of the tag, taken as a key; all other bits are of the whole key. So keys
with one tag are on one worker, as the members of a group must be (docs/groups.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..constants import (
    DIGEST_BYTES,
    KEY_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    OTHERS_NAMESPACE,
    OTHERS_REFUSED,
    SET_BYTES,
    SHARD_COUNT,
    SLOT_BYTES,
    WAYS,
)
from ..errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORDS: Final = struct.Struct("<QQ")
split: Final = _WORDS.unpack
SHARD_MASK: Final = SHARD_COUNT - 1
SHARD_BITS: Final = SHARD_MASK.bit_length()
#: The shard's bits in the second byte of a digest.
_HIGH_MASK: Final = SHARD_MASK >> 8

_SLOT_WORDS: Final = SLOT_BYTES // 8
_SET_WORDS: Final = SET_BYTES // 8
#: Positions in a set of the low words of its slots' digests.
_LOW_WORDS: Final = np.arange(1, _SET_WORDS, _SLOT_WORDS, dtype=np.intp)

#: From this many keys on, numpy puts the shards of their tags into their digests faster than a loop.
TAG_KEYS: Final = 16

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
        return digest if "{" not in key else self._tagged(key, digest)

    def _tagged(self, key: str, digest: bytes) -> bytes:
        """Return the digest with the shard of the key's hash tag, if it has one."""
        tag = hash_tag(key)
        if not tag:
            return digest
        state = self._copy()
        state.update(tag.encode())
        own: bytes = state.digest()
        return bytes((own[0], own[1] & _HIGH_MASK | digest[1] & ~_HIGH_MASK)) + digest[2:]

    def many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the digests of many keys, in less time than one by one. Raise UsageError as for one key.

        Raise it for a single text, too: its characters are hardly the keys that the caller means.
        """
        if isinstance(keys, str):
            raise UsageError(f"keys is a list of keys, not the one text {keys[:40]!r}")
        if not hasattr(keys, "__len__"):  # an iterator: the tags are a second look at them
            keys = list(keys)
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
        if "{" in "".join(keys):  # less than looking at each
            if len(keys) >= TAG_KEYS:
                return self._tag_all(keys, digests)
            return [digest if "{" not in key else self._tagged(key, digest) for key, digest in zip(keys, digests)]
        return digests

    def _tag_all(self, keys: Sequence[str], digests: list[bytes]) -> list[bytes]:
        """Do :meth:`_tagged` for many keys, and hash each tag once: the keys of a group have the same."""
        copy = self._copy
        known: dict[str, bytes] = {}
        owners = []
        for digest, (_, _, rest) in zip(digests, map(str.partition, keys, repeat("{"))):
            tag, brace, _ = rest.partition("}")
            if not (tag and brace):
                owners.append(digest)
                continue
            own = known.get(tag)
            if own is None:
                state = copy()
                state.update(tag.encode())
                own = known[tag] = state.digest()
            owners.append(own)
        words = words_of(digests).copy()
        low = words[:, 0]
        low ^= (low ^ words_of(owners)[:, 0]) & np.uint64(SHARD_MASK)
        raw = words.tobytes()
        return [raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES)]


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


def hash_tag(key: str) -> str:
    """Return the text between the key's first "{" and the first "}" after it; empty if there is none."""
    begin = key.find("{") + 1
    return key[begin : max(begin, key.find("}", begin))] if begin else ""


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
    """Return the name's UTF-8. Raise UsageError if it is empty, too long, or reserved."""
    if not isinstance(namespace, str):
        raise UsageError(f"a namespace is a str, not {type(namespace).__name__}")
    try:
        raw = namespace.encode()
    except UnicodeEncodeError:
        raise UsageError("a namespace must be encodable as UTF-8; this one has a lone surrogate") from None
    if not 0 < len(raw) <= NAMESPACE_BYTES_MAX:
        raise UsageError(f"a namespace has 1 to {NAMESPACE_BYTES_MAX} bytes of UTF-8, this one {len(raw)}")
    if namespace == OTHERS_NAMESPACE:
        raise UsageError(OTHERS_REFUSED)
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


def words_of(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the words of digests, two each."""
    return np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)


def sets_of_words(
    low: NDArray[np.uint64], high: NDArray[np.uint64], sets: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Do :func:`sets_of` for digests given as columns of their two little-endian words."""
    first = (low >> np.uint64(SHARD_BITS)) % np.uint64(sets)
    second = high % np.uint64(sets)
    second = np.where(first == second, (second + np.uint64(1)) % np.uint64(sets), second)
    return first, second


def find_slots(
    words: NDArray[np.uint64], base: Any, sets: Any, low: NDArray[np.uint64], high: NDArray[np.uint64],
    lows: NDArray[np.uint64] | None = None,
) -> NDArray[np.intp]:  # fmt: skip
    """Return the slots of digests given as columns of their two words, -1 for misses.

    ``base``: where the slots begin in ``words``. ``sets``: their number. Both are for all digests, or have an item for
    each. ``lows``: the :func:`low_words` of ``words`` if these are one table, which takes less time.

    Of a digest's sixteen possible slots, one word each is gathered and compared, then both words of the one that fits.
    Gathering both words of all slots takes more than twice as long. It is done for the digests that were not found
    where a low word fits: no two hashes share one, but a client can make up such a digest, which would hide the other.
    """
    first = (low >> np.uint64(SHARD_BITS)) % sets
    at, fits, hits = _find_in(words, base, first, low, high, lows)
    missing = np.flatnonzero(~hits)
    if missing.size:
        low, high, first = low[missing], high[missing], first[missing]
        if base.ndim:
            base, sets = base[missing], sets[missing]
        second = high % sets
        twice = np.flatnonzero(second == first)
        if twice.size:
            second[twice] = (second[twice] + np.uint64(1)) % (sets[twice] if sets.ndim else sets)
        at[missing], more, hits[missing] = _find_in(words, base, second, low, high, lows)
        if fits.tobytes().count(1) + more.tobytes().count(1) != hits.tobytes().count(1):  # faster than numpy's count
            for which in (first, second):
                _find_hidden(words, base, which, low, high, missing, at, hits)
    return np.where(hits, at // _SLOT_WORDS, -1)


def low_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the low words of the digests in a table's slots, a row for each set, in place."""
    return words.reshape(-1, WAYS, _SLOT_WORDS)[:, :, 1]


def _find_in(
    words: NDArray[np.uint64], base: Any, which: NDArray[np.uint64], low: NDArray[np.uint64], high: NDArray[np.uint64],
    lows: NDArray[np.uint64] | None,
) -> tuple[NDArray[np.intp], NDArray[np.bool_], NDArray[np.bool_]]:  # fmt: skip
    """Return, per digest, the first word of the first slot in its set whose low word fits, if it does, and if both do.

    The word counts from ``base``.
    """
    take = words.take
    sets = which.astype(np.intp)
    at = sets * _SET_WORDS + base
    # Eight words of each set by its row take half as long as by eight indexes.
    seen = take(at[:, None] + _LOW_WORDS) if lows is None else lows[sets]
    at += (seen == low[:, None]).argmax(axis=1) * _SLOT_WORDS
    fits = take(at + 1) == low
    return at - base, fits, fits & (take(at + 2) == high)


def _find_hidden(
    words: NDArray[np.uint64], base: Any, which: NDArray[np.uint64], low: NDArray[np.uint64], high: NDArray[np.uint64],
    missing: NDArray[np.intp], at: NDArray[np.intp], hits: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Do :func:`_find_in` by both words for what ``missing`` names and has no hit; put it into ``at`` and ``hits``."""
    rest = np.flatnonzero(~hits[missing])
    begins = which[rest].astype(np.intp) * _SET_WORDS
    slots = (begins + (base[rest] if base.ndim else base))[:, None] + _LOW_WORDS
    both = (words.take(slots) == low[rest][:, None]) & (words.take(slots + 1) == high[rest][:, None])
    at[missing[rest]] = begins + both.argmax(axis=1) * _SLOT_WORDS
    hits[missing[rest]] = both.any(axis=1)
