"""How LMCache's servers name the chunks of a prompt, for questions that have its tokens.

A chunk's hash depends on all tokens before it, and on neither model nor rank. Events have the tokens of each chunk, but
not what came before it, so tokens are compared by the hash alone: one that is equal is of the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ...errors import UsageError
from ...schemes import lmcache, vllm

#: Of LMCache's ``--hash-algorithm``, its default first.
BLAKE3: Final = "blake3"
ALGORITHMS: Final = (BLAKE3, *vllm.ALGORITHMS)

#: Returns the names of a prompt's full chunks: of its tokens, and the tokens of a chunk.
Namer = Callable[[Sequence[int], int], list[int]]


def name_of(digest: bytes) -> int:
    """Return the name of a chunk, 64 bits: the last 8 bytes of its hash."""
    return int.from_bytes(digest[-8:], "big")


def namers(text: str | None) -> list[Namer]:
    """Return how chunks are named: by ``ALGORITHM[:SEED],...``, or by BLAKE3 if it is installed. Raises UsageError."""
    if text is None:
        try:
            return [_blake3()]
        except UsageError:
            return []
    found = []
    for part in text.split(","):
        algorithm, colon, seed = part.strip().partition(":")
        if algorithm not in ALGORITHMS or (algorithm == BLAKE3 and colon):
            raise UsageError(f"--lmcache-hash {part!r}: one of {', '.join(ALGORITHMS)}; behind vLLM's also :SEED")
        if algorithm == BLAKE3:
            found.append(_blake3())
        else:
            seed = seed if colon else vllm.DEFAULT_SEED
            found.append(partial(_names, None, algorithm, seed))
    return found


def _blake3() -> Namer:
    return partial(_names, _digest(), BLAKE3, "")


def _digest() -> Callable[[bytes], bytes]:
    """Return the digest of BLAKE3. Raises UsageError if it is not installed."""
    from .hash_library import blake3

    made: Any = blake3.blake3
    return lambda data: bytes(made(data).digest())


def libraries() -> dict[str, Callable[[bytes], bytes]]:
    """Return the digests that key schemes may need, of what is installed."""
    try:
        return {BLAKE3: _digest()}
    except UsageError:
        return {}


def _names(
    blake3: Callable[[bytes], bytes] | None, algorithm: str, seed: str, tokens: Sequence[int], size: int
) -> list[int]:
    try:
        hashes = lmcache.server_chunk_hashes(tokens, size, blake3=blake3, algorithm=algorithm, seed=seed)
    except UsageError:
        return []  # ids that this algorithm does not take: no server has such a chunk
    return [name_of(each) for each in hashes]
