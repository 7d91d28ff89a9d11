"""The bytes that engines hash, made here without the libraries that the engines use.

A prompt has thousands of tokens, so a whole array of them is encoded by numpy at once, and each block takes its slice.

``pickled`` writes what CPython's pickle protocol 5 does for the few types that block hashes contain, and reads nothing.
vLLM's default algorithm hashes such bytes. Pickle stores equal objects once if they are the *same* object, which no
other process can know. So two equal texts in one block are refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..constants import KEY_BYTES_MAX
from ..errors import UsageError

#: Tokens of a block: above, pickle would split it into frames.
BLOCK_TOKENS_MAX: Final = 8192

_Int64 = NDArray[np.int64]


def short_key(key: str) -> str:
    """Return the key, or a digest of it if it is longer than a key may be. O(bytes)."""
    raw = key.encode()
    return key if len(raw) <= KEY_BYTES_MAX else f"sha256:{hashlib.sha256(raw).hexdigest()}"


def token_array(tokens: Sequence[int] | NDArray[Any]) -> _Int64:
    """Return token ids as an array of signed 64-bit integers. Raises UsageError for what is no list of token ids."""
    try:
        found = np.asarray(tokens)
        if found.ndim == 1 and found.dtype.kind in "iu" and found.dtype.itemsize <= 8:
            ids = found.astype(np.int64, copy=False)
        elif found.ndim == 1 and not found.size:
            ids = found.astype(np.int64)
        else:
            raise TypeError(f"an array of {found.dtype} with {found.ndim} dimensions")
    except (TypeError, ValueError, OverflowError) as exc:
        raise UsageError(f"token ids are a list of integers below 2**63: {exc}") from None
    if ids.size and ids.min() < 0:
        raise UsageError(f"token ids are 0 at least and below 2**63, unlike {ids.min()}")
    return ids


def check_block(size: int) -> None:
    """Raise UsageError unless a page or block can have so many tokens."""
    if not isinstance(size, int) or not 0 < size <= BLOCK_TOKENS_MAX:
        raise UsageError(f"a page has 1 to {BLOCK_TOKENS_MAX} tokens, not {size!r}")


class Encoded:
    """Token ids, each encoded, one after the other."""

    def __init__(self, data: bytes, starts: _Int64) -> None:
        self._data = data
        self._starts = starts.tolist()

    def slice(self, start: int, stop: int) -> bytes:
        """Return the bytes of the tokens from ``start`` to before ``stop``."""
        return self._data[self._starts[start] : self._starts[stop]]


def _encoded(ids: _Int64, sizes: _Int64, heads: NDArray[np.uint8], order: str) -> Encoded:
    """Put each id behind its head byte, in ``sizes - 1`` bytes of this order: none for size 1."""
    starts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    out = np.empty(int(starts[-1]), np.uint8)
    out[starts[:-1]] = heads
    raw = ids.astype(f"{order}u8").view(np.uint8).reshape(-1, 8)
    for size in np.unique(sizes[sizes > 1]).tolist():
        where = np.flatnonzero(sizes == size)
        width = size - 1
        columns = slice(0, width) if order == "<" else slice(8 - width, 8)
        out[starts[where][:, None] + np.arange(1, size)] = raw[where, columns]
    return Encoded(out.tobytes(), starts)


# -- CBOR, canonical (RFC 8949, 4.2) -------------------------------------------------------------------


def cbor_tokens(ids: _Int64) -> Encoded:
    """Encode token ids as CBOR integers."""
    least = (24, 1 << 8, 1 << 16, 1 << 32)
    kind = np.searchsorted(np.array(least), ids, side="right")
    sizes = np.array([1, 2, 3, 5, 9]).take(kind)
    heads = np.where(kind == 0, ids, kind + 23).astype(np.uint8)
    return _encoded(ids, sizes, heads, ">")


def cbor_head(major: int, value: int) -> bytes:
    """Return the first bytes of a CBOR item: its major type and a number of up to 64 bits."""
    for size, code, form in ((24, 0, ""), (1 << 8, 24, ">B"), (1 << 16, 25, ">H"), (1 << 32, 26, ">I")):
        if value < size:
            return bytes((major << 5 | (code or value),)) + (struct.pack(form, value) if form else b"")
    return bytes((major << 5 | 27,)) + struct.pack(">Q", value)


def cbor(value: Any) -> bytes:
    """Encode None, a bool, an integer, bytes, a text, or a list or tuple of these. Raises UsageError for others."""
    if value is None:
        return b"\xf6"
    if isinstance(value, bool):
        return b"\xf5" if value else b"\xf4"
    if isinstance(value, int) and -(1 << 64) <= value < 1 << 64:
        return cbor_head(0, value) if value >= 0 else cbor_head(1, -1 - value)
    if isinstance(value, bytes):
        return cbor_head(2, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return cbor_head(3, len(raw)) + raw
    if isinstance(value, (tuple, list)):
        return cbor_head(4, len(value)) + b"".join(map(cbor, value))
    raise UsageError(f"{value!r} cannot be part of a block hash")


# -- pickle, protocol 5 --------------------------------------------------------------------------------


def pickled_tokens(ids: _Int64) -> Encoded:
    """Encode token ids as pickle's integers. Raises UsageError for ids of 2**31 and more."""
    if ids.size and ids.max() >= 1 << 31:
        raise UsageError(f"token id {ids.max()}: this algorithm takes ids below 2**31")
    kind = np.searchsorted(np.array((1 << 8, 1 << 16)), ids, side="right")
    sizes = np.array([2, 3, 5]).take(kind)
    heads = np.frombuffer(b"KMJ", np.uint8).take(kind)
    return _encoded(ids, sizes, heads, "<")


def pickled(*items: bytes) -> bytes:
    """Return the pickle of a tuple of these items, or with one item of that item alone."""
    body = items[0] if len(items) == 1 else b"".join(items) + _TUPLES[len(items)] + _MEMO
    return b"\x80\x05\x95" + struct.pack("<Q", len(body) + 1) + body + b"."


def pickled_tuple(tokens: bytes, count: int) -> bytes:
    """Return the item of a tuple with ``count`` integers, which are encoded in ``tokens``."""
    if count == 0:
        return b")"
    return (tokens + _TUPLES[count] if count < 4 else b"(" + tokens + b"t") + _MEMO


def pickled_item(value: Any, texts: set[str] | None = None) -> bytes:
    """Return the item of None, an integer, bytes, a text, or a tuple of these. Raises UsageError for others."""
    texts = set() if texts is None else texts
    if value is None:
        return b"N"
    if isinstance(value, int) and not isinstance(value, bool):
        return _pickled_int(value)
    if isinstance(value, bytes):
        head = b"C" + bytes((len(value),)) if len(value) < 256 else b"B" + struct.pack("<I", len(value))
        return head + value + _MEMO
    if isinstance(value, str):
        if value in texts:
            raise UsageError(f"{value!r} occurs twice in the hash of a block: this algorithm cannot be followed then")
        texts.add(value)
        raw = value.encode("utf-8", "surrogatepass")
        head = b"\x8c" + bytes((len(raw),)) if len(raw) < 256 else b"X" + struct.pack("<I", len(raw))
        return head + raw + _MEMO
    if isinstance(value, tuple):
        return pickled_tuple(b"".join(pickled_item(each, texts) for each in value), len(value))
    raise UsageError(f"{value!r} cannot be part of a block hash")


def _pickled_int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((size,)) + value.to_bytes(size, "little", signed=True)


_MEMO: Final = b"\x94"
_TUPLES: Final = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


# -- MessagePack ---------------------------------------------------------------------------------------


def packed(value: Any) -> bytes:
    """Encode a bool, an integer of up to 32 bits, a short text, or a mapping of these. Raises UsageError for others."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int) and 0 <= value < 1 << 32:
        if value < 1 << 7:
            return bytes((value,))
        for code, form, size in ((0xCC, ">B", 1 << 8), (0xCD, ">H", 1 << 16), (0xCE, ">I", 1 << 32)):
            if value < size:
                return bytes((code,)) + struct.pack(form, value)
    if isinstance(value, str) and len(raw := value.encode()) < 1 << 16:
        if len(raw) < 32:
            return bytes((0xA0 | len(raw),)) + raw
        if len(raw) < 1 << 8:
            return bytes((0xD9, len(raw))) + raw
        return b"\xda" + struct.pack(">H", len(raw)) + raw
    if isinstance(value, dict) and len(value) < 16:
        return bytes((0x80 | len(value),)) + b"".join(packed(part) for item in value.items() for part in item)
    raise UsageError(f"{value!r} cannot be part of a key")
