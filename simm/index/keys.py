"""How the index names blocks: the rolling hash of Mooncake's RFC 1527 and of Dynamo's indexer.

A block's local hash is XXH3-64 over its token ids, each in 4 little-endian bytes. The key of a prompt's first block is
its local hash. Each other key is XXH3-64 over the key before it and the local hash, 8 little-endian bytes each. All of
them have one seed, which is 1337 in Dynamo.

What an engine calls a block is an alias only, so no hash seed of an engine must match. A block that also depends on
something else than tokens, as an image, has that in its local hash. So a question with tokens alone does not find it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..schemes.encodings import check_block, token_array
from .libraries import xxhash

SEED: Final = 1337

_PAIR: Final = Struct("<QQ")
assert array("I").itemsize == 4 and sys.byteorder == "little"
_xxh3 = xxhash.xxh3_64_intdigest


def token_bytes(tokens: Sequence[int] | NDArray[Any]) -> memoryview:
    """Return token ids as 4 little-endian bytes each. O(tokens). Raises UsageError for what is no list of token ids."""
    if isinstance(tokens, list):
        try:
            return memoryview(array("I", tokens)).cast("B")
        except (TypeError, OverflowError) as exc:
            raise UsageError(f"token ids are a list of integers below 2**32: {exc}") from None
    ids = token_array(tokens)
    if ids.size and ids.max() >= 1 << 32:
        raise UsageError(f"token ids are below 2**32, unlike {ids.max()}")
    return id_bytes(ids.astype("<u4"))


def id_bytes(ids: NDArray[np.uint32]) -> memoryview:
    """Return :func:`token_bytes` of an array that has the right type. O(1), or O(ids) for one with gaps."""
    return np.ascontiguousarray(ids).data.cast("B")


def chain(
    tokens: memoryview, block_size: int, *, parent: int | None = None, extras: Sequence[bytes] = (), seed: int = SEED
) -> list[int]:
    """Return the key of each full block of :func:`token_bytes`. O(tokens).

    Args:
        parent: the key of the block before them; None for the beginning of a prompt.
        extras: for each block what it depends on beside tokens; b"" for nothing. May be shorter.
    """
    step = 4 * block_size
    digest, pack = _xxh3, _PAIR.pack
    found: list[int] = []
    key = parent
    if not extras:  # the same, as fast as it goes: a question is made of this
        for at in range(0, len(tokens) - step + 1, step):
            local = digest(tokens[at : at + step], seed)
            key = local if key is None else digest(pack(key, local), seed)
            found.append(key)
        return found
    for number, at in enumerate(range(0, len(tokens) - step + 1, step)):
        extra = extras[number] if number < len(extras) else b""
        local = digest(bytes(tokens[at : at + step]) + extra if extra else tokens[at : at + step], seed)
        key = local if key is None else digest(pack(key, local), seed)
        found.append(key)
    return found


def pair_chain(tokens: memoryview, block_size: int, *, parent: int | None = None, seed: int = SEED) -> list[int]:
    """Return the key of each block of pairs of neighbouring tokens, as SGLang has with EAGLE. O(tokens).

    Such a block has ``block_size`` pairs, and so it depends on the token behind its own tokens, too: a prompt's last
    block is whole only with one token more. The two kinds of keys have nothing in common.

    Args:
        parent: the key of the block before them; None for the beginning of a prompt.
    """
    step = 4 * block_size
    found: list[int] = []
    key = parent
    for at in range(0, len(tokens) - step - 3, step):
        key = key_of(tokens[at : at + step + 4], key, seed)
        found.append(key)
    return found


def key_of(tokens: memoryview | bytes, parent: int | None, seed: int) -> int:
    """Return the key of one block: as :func:`chain`, of which this is the common case in events. O(tokens)."""
    local = _xxh3(tokens, seed)
    return local if parent is None else _xxh3(_PAIR.pack(parent, local), seed)


def request_keys(tokens: Sequence[int] | NDArray[Any], block_size: int, *, seed: int = SEED) -> list[int]:
    """Return the keys of a prompt's full blocks. O(tokens). Raises UsageError."""
    check_block(block_size)
    return chain(token_bytes(tokens), block_size, seed=seed)
