"""LMCache: the hashes of chunks, and the keys made of them. As of LMCache 0.5.6.

In the engine's process a chunk's hash is a number. With vLLM's algorithms it is the first 64 bits of the digest, and
the chain goes on with these. The default is Python's own hash of a tuple of integers, which is the same in every
CPython from 3.8 to 3.13. Its first parent is 0 where vLLM is not installed. With vLLM it is the hash of a text, which
PYTHONHASHSEED decides: ``hash(seed)`` in a process with the same PYTHONHASHSEED tells it.

The server (``lmcache server``) keeps whole digests. Its default is BLAKE3, which is in no standard library: pass
``blake3``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from ..errors import UsageError
from . import vllm
from .encodings import check_block, token_array

CHUNK_TOKENS: Final = 256
_SALT_REFUSED: Final = frozenset("@/\\\0")
_SALT_MAX: Final = 128


def chunk_hashes(
    tokens: Sequence[int] | NDArray[Any], chunk_size: int = CHUNK_TOKENS, *, algorithm: str = "builtin",
    seed: str | None = None, root: int = 0,
) -> list[int]:  # fmt: skip
    """Return the hash of each full chunk, as an engine's process makes them. O(tokens).

    Args:
        algorithm: the setting ``pre_caching_hash_algorithm``: ``builtin``, or one of vLLM's.
        seed: PYTHONHASHSEED of an engine with vLLM; None: the default. For vLLM's algorithms.
        root: the first parent, for ``builtin``.

    Raises UsageError for wrong arguments.
    """
    if algorithm != "builtin":
        parts = vllm.codec(algorithm)
        first = _first_bits(vllm.none_hash(algorithm, vllm.DEFAULT_SEED if seed is None else seed))
        return vllm.chain(tokens, chunk_size, parts, first, None, _first_bits, plain=())
    check_block(chunk_size)
    ids = token_array(tokens).tolist()
    hashes = []
    for start in range(0, len(ids) - chunk_size + 1, chunk_size):
        root = hash((root, tuple(ids[start : start + chunk_size]), ()))
        hashes.append(root)
    return hashes


def _first_bits(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def engine_keys(
    hashes: Sequence[int], model: str, dtype: str, *, world_size: int = 1, worker_id: int = 0,
    tags: Mapping[str, str] | None = None, layers: int = 0,
) -> list[str]:  # fmt: skip
    """Return the keys of a worker of an engine, one for each chunk, or with ``layers`` one for each layer of it.

    ``dtype`` as LMCache calls it: ``bfloat16``, ``half``, ``fp8_e4m3fn``. ``world_size`` is 1 where only the first rank
    stores (MLA).
    """
    tail = "".join(f"@{name}%{value}" for name, value in (tags or {}).items())
    head = f"{model}@{world_size}@{worker_id}@"
    parts = [f"@{layer}" for layer in range(layers)] or [""]
    return [f"{head}{each:x}@{dtype}{part}{tail}" for each in hashes for part in parts]


def server_chunk_hashes(
    tokens: Sequence[int] | NDArray[Any], chunk_size: int = CHUNK_TOKENS, *,
    blake3: Callable[[bytes], bytes] | None = None, algorithm: str = "sha256_cbor", seed: str = vllm.DEFAULT_SEED,
) -> list[bytes]:  # fmt: skip
    """Return the hash of each full chunk, as ``lmcache server`` makes them.

    Args:
        blake3: returns the BLAKE3 digest of bytes; the hashes are those of the default algorithm then.
        algorithm: one of vLLM's, without ``blake3``, for a server that finds vLLM.
        seed: PYTHONHASHSEED of that server.

    Raises UsageError for wrong arguments.
    """
    if blake3 is None:
        parts = vllm.codec(algorithm)
        root = vllm.none_hash(algorithm, seed)
        return vllm.chain(tokens, chunk_size, parts, root, None, bytes)
    check_block(chunk_size)
    raw = token_array(tokens)
    if raw.size and raw.max() > 0xFFFF_FFFF:
        raise UsageError("LMCache's server takes token ids below 2**32")
    words = raw.astype(">u4").tobytes()
    parent = blake3(struct.pack(">qI", 0, 0))
    hashes = []
    for at in range(len(raw) // chunk_size):
        parent = blake3(parent + words[at * chunk_size * 4 : (at + 1) * chunk_size * 4])
        hashes.append(parent)
    return hashes


def kv_rank(world_size: int, rank: int) -> int:
    """Return how ``lmcache server`` calls a rank in its keys. It takes all ranks to be on one host."""
    return world_size << 24 | rank << 16 | world_size << 8 | rank


def object_keys(
    hashes: Sequence[bytes], model: str, *, kv_rank: int = 0, group: int = 0, cache_salt: str = ""
) -> list[str]:
    """Return the keys of an object group of ``lmcache server``, one for each chunk.

    Raises UsageError for a model or salt that LMCache refuses.
    """
    if "@" in model or len(cache_salt) > _SALT_MAX or _SALT_REFUSED & set(cache_salt):
        raise UsageError(f"model {model!r} or salt {cache_salt[:40]!r} contains what separates the parts of a key")
    tail = f"@{cache_salt}" if cache_salt else ""
    return [f"{model}@{kv_rank:08x}@{group:x}@{each.hex()}{tail}" for each in hashes]
