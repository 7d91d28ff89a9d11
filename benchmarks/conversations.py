"""Conversations of many turns, generated from a seed: what ``ttft.py`` and ``multi_turn.py`` ask their models.

A turn's prompt is the whole conversation up to there: the prompt of the turn before, its answer, and a new message.
Tokens are drawn at random, so no two conversations share a block. Answers are drawn, too, as only the time to the first
token is measured, and a model with random weights has nothing to say.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from typing import NamedTuple

#: Tokens that are new in a turn: the answer before it and the message.
FRESH = (96, 256)


class Turn(NamedTuple):
    """A measured turn: its prompt, and how many of its tokens were in the conversation before."""

    prompt: tuple[int, ...]
    history: int


def conversation(seed: int, number: int, sizes: Sequence[int], vocabulary: int) -> list[Turn]:
    """Return the turns of one conversation at which the prompt has these sizes, in tokens and ascending.

    The turns between them are not measured. Raises ValueError if a turn would have no history.
    """
    if list(sizes) != sorted(set(sizes)) or not sizes or sizes[0] <= FRESH[1]:
        raise ValueError(f"sizes must ascend, and each be above {FRESH[1]} tokens")
    draw = random.Random(f"conversation/{seed}/{number}")
    tokens = tuple(draw.randrange(vocabulary) for _ in range(sizes[-1]))
    return [Turn(tokens[:size], size - draw.randint(*FRESH)) for size in sizes]


def block_keys(prefix: str, prompt: Sequence[int], block: int) -> list[str]:
    """Return a key for each full block of the prompt: a chain of SHA-256 over all tokens up to there."""
    keys = []
    parent = b""
    for start in range(0, len(prompt) - block + 1, block):
        parent = hashlib.sha256(parent + array("I", prompt[start : start + block]).tobytes()).digest()
        keys.append(f"{prefix}/{parent.hex()}")
    return keys
