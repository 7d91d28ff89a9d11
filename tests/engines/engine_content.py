"""What a KV page must contain, computed from a seed alone, and the comparison that trusts nobody else.

The process that reads pages back has never seen the bytes that the writer stored: it computes them anew
from (seed, prompt, rank, page, part). So a store that mixes up two keys, two halves, two ranks or two
prompts, or that returns stale or shifted bytes, is caught, which comparing against a copy handed over by
the writer would not prove.

Three traps a page comparison can fall into, and what is done here:

- The destination already held the right bytes (a page of an earlier run, or the same memory). Every pool
  is filled with ``CANARY`` first, and a page that is still canary is a difference like any other.
- A read that writes more than it should goes unseen, because only the wanted pages are looked at.
  ``strayed`` looks at all the others.
- The comparison itself cannot fail. ``flip`` damages one bit, and the tests demand that exactly this page
  is named.

No torch here: the pytest process imports this module, and it has none.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

#: What a pool is filled with before anything is written to it or read into it.
CANARY = 0xA5

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Wrong:
    """One part of one page that does not hold what it should. ``first`` is its first bad byte."""

    page: int
    part: int
    first: int
    count: int


@dataclass(frozen=True)
class Comparison:
    """Result of ``compare``: how many bytes were looked at, and every part that differs."""

    bytes_compared: int
    wrong: tuple[Wrong, ...]

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes_compared, "wrong": [asdict(w) for w in self.wrong]}


def page_part(seed: int, prompt: str, rank: int, page: int, part: int, size: int) -> Bytes:
    """The ``size`` bytes of one part (0 = k, 1 = v) of one page, by SHAKE-128. O(size)."""
    name = f"{prompt}/{rank}".encode() + struct.pack("<qqq", seed, page, part)
    return np.frombuffer(hashlib.shake_128(name).digest(size), dtype=np.uint8)


def tokens(seed: int, prompt: str, count: int) -> list[int]:
    """``count`` token ids for one prompt; a longer prompt begins with the shorter one."""
    dice = random.Random(f"{seed}/{prompt}")
    return [dice.randrange(128_000) for _ in range(count)]


def fill(raw: Bytes, rows: Sequence[int], seed: int, prompt: str, rank: int, first_page: int = 0) -> None:
    """Write page ``first_page + i`` of the prompt into row ``rows[i]`` of ``raw`` (part, row, byte)."""
    for i, row in enumerate(rows):
        for part in range(raw.shape[0]):
            raw[part, row] = page_part(seed, prompt, rank, first_page + i, part, raw.shape[2])


def compare(raw: Bytes, rows: Sequence[int], seed: int, prompt: str, rank: int, first_page: int = 0) -> Comparison:
    """Hold rows of ``raw`` (part, row, byte) against what the seed says. O(bytes)."""
    wrong: list[Wrong] = []
    for i, row in enumerate(rows):
        for part in range(raw.shape[0]):
            want = page_part(seed, prompt, rank, first_page + i, part, raw.shape[2])
            bad = np.flatnonzero(raw[part, row] != want)
            if bad.size:
                wrong.append(Wrong(first_page + i, part, int(bad[0]), int(bad.size)))
    return Comparison(len(rows) * raw.shape[0] * raw.shape[2], tuple(wrong))


def strayed(raw: Bytes, rows: Sequence[int]) -> list[int]:
    """Rows of ``raw`` outside ``rows`` that no longer hold only ``CANARY``. O(bytes)."""
    others = np.ones(raw.shape[1], dtype=bool)
    others[list(rows)] = False
    return [int(row) for row in np.flatnonzero(others) if (raw[:, row] != CANARY).any()]


def flip(raw: Bytes, row: int, part: int, byte: int) -> None:
    """Damage one bit, so that a comparison can show that it sees one."""
    raw[part, row, byte] ^= 1
