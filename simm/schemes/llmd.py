"""llm-d's router: the keys of its own index, which are made of token ids alone.

A key is the FNV-1a hash of 64 bits over the canonical CBOR of ``[parent, tokens, extra]``. The chain begins with the
hash of the seed, or in newer routers with that of ``[seed's hash, null, model]``. It takes some 10 us for each block of
16 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from .encodings import cbor, cbor_head, cbor_tokens, check_block, token_array

_OFFSET: Final = 0xCBF29CE484222325
_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def fnv(data: bytes) -> int:
    """Return the FNV-1a hash of 64 bits."""
    value = _OFFSET
    for byte in data:
        value = (value ^ byte) * _PRIME & _MASK
    return value


def block_keys(
    tokens: Sequence[int] | NDArray[Any], block_size: int = 16, *, seed: str = "", model: str | None = None
) -> list[int]:
    """Return the key of each full block. ``model``: its name, where the router mixes it in. Raises UsageError."""
    check_block(block_size)
    ids = token_array(tokens)
    count = len(ids) // block_size
    encoded = cbor_tokens(ids[: count * block_size])
    parent = fnv(seed.encode())
    if model is not None:
        parent = fnv(cbor((parent, None, model)))
    head = cbor_head(4, block_size)
    keys = []
    for at in range(count):
        body = encoded.slice(at * block_size, (at + 1) * block_size)
        parent = fnv(b"\x83" + cbor(parent) + head + body + b"\xf6")
        keys.append(parent)
    return keys
