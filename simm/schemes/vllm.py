"""vLLM: the hashes of blocks, and the keys made of them. As of vLLM 0.32 and 0.33.

A block's hash covers the hash of the block before it, its token ids and its extra keys: the adapter, the images that it
has a part of, and in the first block the salt. The first block's parent is a hash of the seed, which is PYTHONHASHSEED
where that is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from ..errors import UsageError
from .encodings import (
    Encoded,
    cbor,
    cbor_head,
    cbor_tokens,
    check_block,
    pickled,
    pickled_item,
    pickled_tokens,
    pickled_tuple,
    token_array,
)

#: The seed of processes without PYTHONHASHSEED. Older ones than 0.32 have a random seed then.
DEFAULT_SEED: Final = "vllm-none-hash"
#: Algorithms that need nothing but the standard library.
ALGORITHMS: Final = ("sha256", "sha256_cbor")

#: What is hashed of a block: the encoded parent, tokens with their number, and extra keys.
_Message = Callable[[bytes, bytes, int, bytes], bytes]
Extra = tuple[Any, ...] | None


class Codec(NamedTuple):
    """How an algorithm encodes the three parts of a block, and what it hashes of them."""

    tokens: Callable[[Any], Encoded]
    item: Callable[[Any], bytes]
    message: _Message


def _cbor_message(parent: bytes, tokens: bytes, count: int, extra: bytes) -> bytes:
    return b"\x83" + parent + cbor_head(4, count) + tokens + extra


def _pickle_message(parent: bytes, tokens: bytes, count: int, extra: bytes) -> bytes:
    return pickled(parent, pickled_tuple(tokens, count), extra)


_CODECS: Final = {
    "sha256": Codec(pickled_tokens, pickled_item, _pickle_message),
    "sha256_cbor": Codec(cbor_tokens, cbor, _cbor_message),
}


def codec(algorithm: str) -> Codec:
    """Return the codec of an algorithm. Raises UsageError for those that need a library, and unknown ones."""
    if algorithm not in _CODECS:
        raise UsageError(f"{algorithm!r}: of vLLM's algorithms {' and '.join(ALGORITHMS)} are known here")
    return _CODECS[algorithm]


def none_hash(algorithm: str = "sha256", seed: str = DEFAULT_SEED) -> bytes:
    """Return the parent of a prompt's first block. Raises UsageError for an unknown algorithm."""
    item = codec(algorithm).item(seed)
    return hashlib.sha256(pickled(item) if algorithm == "sha256" else item).digest()


class Image(NamedTuple):
    """An item of another mode than text: its identifier, and the tokens that stand for it."""

    identifier: str
    start: int
    length: int


def extra_keys(
    blocks: int, block_size: int, *, lora: tuple[str, str] | None = None, cache_salt: str | None = None,
    images: Sequence[Image] = (),
) -> list[Extra]:  # fmt: skip
    """Return the extra keys of each block. ``lora``: the adapter's name and path. ``images`` by their starts."""
    every = [("lora", *lora)] if lora is not None else []
    found: list[Extra] = []
    for block in range(blocks):
        start = block * block_size
        keys: list[tuple[Any, ...]] = list(every)
        keys += [
            ("mm", image.identifier, image.start - start)
            for image in images if image.start < start + block_size and start < image.start + image.length
        ]  # fmt: skip
        if cache_salt and not block:
            keys.append(("cache_salt", cache_salt))
        found.append(tuple(keys) or None)
    return found


def block_hashes(
    tokens: Sequence[int] | NDArray[Any], block_size: int, *, algorithm: str = "sha256", seed: str = DEFAULT_SEED,
    extras: Sequence[Extra] | None = None,
) -> list[bytes]:  # fmt: skip
    """Return the 32-byte hash of each full block. O(tokens).

    ``seed``: PYTHONHASHSEED of the engine. ``extras``: see :func:`extra_keys`; None for a prompt without any.

    Raises UsageError for wrong arguments.
    """
    parts = codec(algorithm)
    return chain(tokens, block_size, parts, none_hash(algorithm, seed), extras, lambda digest: digest)


def chain(
    tokens: Sequence[int] | NDArray[Any], block_size: int, parts: Codec, parent: Any,
    extras: Sequence[Extra] | None, taken: Callable[[bytes], Any], plain: Extra = None,
) -> list[Any]:  # fmt: skip
    """Return the hashes of a prompt's full blocks.

    ``taken``: what of a digest is the hash. ``plain``: what stands for no extra keys.
    """
    check_block(block_size)
    ids = token_array(tokens)
    count = len(ids) // block_size
    if extras is not None and len(extras) < count:
        raise UsageError(f"extra keys of {len(extras)} blocks, and {count} blocks")
    encoded = parts.tokens(ids[: count * block_size])
    item, message, sha256 = parts.item, parts.message, hashlib.sha256
    without = item(plain)
    hashes = []
    for block in range(count):
        extra = without if extras is None or extras[block] is None else item(extras[block])
        body = encoded.slice(block * block_size, (block + 1) * block_size)
        parent = taken(sha256(message(item(parent), body, block_size, extra)).digest())
        hashes.append(parent)
    return hashes


def event_hash(block_hash: bytes) -> int:
    """Return the number that vLLM's events give for a block's hash: its last 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


def merged(hashes: Sequence[bytes], factor: int) -> list[bytes]:
    """Return the hashes of blocks that are ``factor`` times as large: each is that of its last part."""
    return list(hashes[factor - 1 :: factor])


def offload_key(block_hash: bytes, group: int = 0) -> bytes:
    """Return the key of a block in vLLM's offload tiers, of one KV cache group."""
    return block_hash + group.to_bytes(4, "big")


def mooncake_keys(
    hashes: Sequence[bytes], model: str, *, tp_rank: int = 0, pcp_rank: int = 0, dcp_rank: int = 0, pp_rank: int = 0,
    group: int = 0, prefix: str = "", store_namespace: str = "",
) -> list[str]:  # fmt: skip
    """Return the keys of vLLM's MooncakeStoreConnector, one for each block.

    ``prefix``: its setting ``cache_prefix``. ``store_namespace``: of the payload formats that are shared by TP widths.
    """
    head = f"{prefix}@" if prefix else ""
    head += f"{model}{store_namespace}@tp_rank:{tp_rank}@pcp{pcp_rank}@dcp{dcp_rank}@pp_rank:{pp_rank}@group:{group}@"
    return [head + each.hex() for each in hashes]


def connector_keys(hashes: Sequence[bytes], identity: str, *, group: int = 0) -> list[str]:
    """Return the keys of SiMM's connector for vLLM, one for each block of a KV cache group.

    ``identity``: that of a rank's memory, which the connector logs. They are behind the scope and its generation.
    """
    head = f"{identity}/{group}/"
    return [head + each.hex() for each in hashes]


def tier_keys(hashes: Sequence[bytes], *, group: int = 0) -> list[str]:
    """Return the keys of SiMM's offload tier for vLLM, one for each chunk of a KV cache group.

    They are behind the scope, which has the identity of what is offloaded, and its generation.
    """
    return [f"{group}/{each.hex()}" for each in hashes]
