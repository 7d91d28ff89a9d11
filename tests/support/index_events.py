"""Events of an engine's blocks as its publisher tells them, given to an index, and what the index then answers.

It needs the extra simm-store[index].
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from simm.index.blocks import Blocks
from simm.index.events import decode
from simm.index.keys import request_keys
from simm.index.scores import Scores, score
from simm.index.sources import Registration, Source, Space

SIZE = 4
MODEL = "org/model"
SPACE = Space(MODEL, "", "default", "", SIZE)


def message(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def stored(hashes: Sequence[Any], tokens: Sequence[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent,
            "token_ids": list(tokens), "block_size": SIZE, **more}  # fmt: skip


def removed(hashes: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def apply(index: Blocks, source: Source, *events: Any, more: bool = False) -> list[str]:
    batch = decode(message(*events))
    index.apply(source, batch.events, batch.rank, more=more)
    return batch.refused


def prompt(blocks: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(1 << 17) for at in range(blocks * SIZE)]


def asked(index: Blocks, tokens: Sequence[int], space: Space = SPACE, **more: Any) -> Scores:
    return score(index, space, request_keys(list(tokens), space.block_size), **more)


def engine(index: Blocks, name: str = "A", **more: Any) -> Source:
    return index.register(Registration(name, MODEL, block_size=SIZE, **more))
