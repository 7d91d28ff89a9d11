"""Remembers where in the table the leading blocks of prompts lay, so that they are looked up and not searched again.

Most questions begin as one before did. The slots of its leading blocks are remembered, for each owner. The next one
reads these slots, and compares what is in them: key, owner and count of each. Such a slot says what a search would
say. Nothing counts that is not in the table at that moment. The block behind each owner's prefix is looked for, too.
If it is there now, the search goes on behind it.

If anything else is in one of the slots, all is searched as without memory: a block has gone, or its tiers have changed,
or the table has grown and all lies elsewhere.

A *run* is found by a key of the prompt, at a place that is a multiple of ``STRIDE`` blocks: the last one in its longest
prefix. So it is found by questions that have that prefix, whatever follows. Keys are compared as a whole, as callers
may send any.

A unit of several owners, as a store with its hosts, is always searched: most owners have not most of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from .prefixes import Counts, Part, alike, leading, run_of
from .table import Keys, Slots, Table

#: Bytes of all that is remembered, and slots of one prompt.
REMEMBERED_BYTES_MAX: Final = 32 << 20
SLOTS_MAX: Final = 1 << 17
STRIDE: Final = 16
#: So many owners' next blocks are looked for one by one: a search for many costs as much as for so many.
_ONE_BY_ONE: Final = 32
#: If more owners have more than they had, all is searched.
_MORE: Final = 4
#: Of a run, beside its arrays, and of each owner in it.
_COST: Final = 1024
_OWNER_COST: Final = 128

#: An owner's counts of its leading blocks, and the tiers that all of them are in (``alike``).
Found = tuple[Counts, int | None]


class _Run(NamedTuple):
    """Where the leading blocks of a prompt lay.

    Attributes:
        ids: of the owners.
        prompt: the keys up to the end of the longest prefix.
        lengths: of each owner's prefix.
        slots: of all these blocks, and what was in them: keys, owners and counts, as bytes.
        same: of each owner (``alike``).
    """

    ids: list[int]
    prompt: Keys
    lengths: list[int]
    slots: Slots
    keys: bytes
    owners: bytes
    counts: bytes
    same: list[int | None]

    @property
    def nbytes(self) -> int:
        """Bytes, about."""
        arrays = self.prompt.nbytes + self.slots.nbytes + len(self.keys) + len(self.owners) + len(self.counts)
        return arrays + _OWNER_COST * len(self.ids) + _COST


class Places:
    """See the module. Not thread-safe.

    Args:
        bytes_max: of what is remembered; 0: nothing.
    """

    def __init__(self, bytes_max: int = REMEMBERED_BYTES_MAX) -> None:
        self._max = bytes_max
        #: By a key and the first owner, which is of one space alone. The one that was used longest ago is the first.
        self._runs: dict[tuple[int, int], _Run] = {}
        self.nbytes = 0
        #: Questions of which a run told the prefixes.
        self.hits = 0

    def leading(self, held: Table, units: Sequence[Sequence[int]], keys: Keys) -> list[list[Found]]:
        """Do :func:`leading`, and return also which tiers all blocks of an owner are in. See both."""
        alone = [unit[0] for unit in units if len(unit) == 1]
        mine = self._alone(held, alone, keys) if alone else []
        if len(alone) == len(units):
            return [[each] for each in mine]
        parts = leading(held, [unit for unit in units if len(unit) > 1], keys)
        others: Iterator[list[Found]] = iter([[(counts, None) for counts, _ in unit] for unit in parts])
        first = iter(mine)
        return [[next(first)] if len(unit) == 1 else next(others) for unit in units]

    def _alone(self, held: Table, ids: list[int], keys: Keys) -> list[Found]:
        """Return what each of these owners has."""
        name, run = self._find(ids[0], keys)
        if run is not None:
            again = _again(held, run, ids, keys)
            if again is not None:
                self.hits += 1
                parts, same, grown = again
                if grown:
                    self._remember(ids, keys, parts, same, name, grown)
                return [(counts, tiers) for (counts, _), tiers in zip(parts, same)]
            self._drop(name)
        parts = [each for (each,) in leading(held, [[each] for each in ids], keys)]
        same = alike([counts for counts, _ in parts])
        self._remember(ids, keys, parts, same)
        return [(counts, tiers) for (counts, _), tiers in zip(parts, same)]

    def _find(self, first: int, keys: Keys) -> tuple[tuple[int, int], _Run | None]:
        """Return the run of the longest part of this prompt, and its name."""
        runs = self._runs
        for key in keys[STRIDE - 1 :: STRIDE].tolist()[::-1] if runs else ():
            name = key, first
            run = runs.pop(name, None)
            if run is not None:
                runs[name] = run
                return name, run
        return (0, 0), None

    def _drop(self, name: tuple[int, int]) -> None:
        self.nbytes -= self._runs.pop(name).nbytes

    def _remember(
        self, ids: list[int], keys: Keys, parts: Sequence[Part], same: list[int | None],
        known: tuple[int, int] | None = None, more: int = 0,
    ) -> None:  # fmt: skip
        """Remember where these parts are; not if a run has nearly all: ``known``, but for so many blocks."""
        lengths = [len(counts) for counts, _ in parts]
        longest = max(lengths)
        place = longest - longest % STRIDE
        if not place or sum(lengths) > SLOTS_MAX or not self._max:
            return
        name = int(keys[place - 1]), ids[0]
        if name == known and more < STRIDE:
            return
        if name in self._runs:
            self._drop(name)
        owners = np.array(ids, np.uint32).repeat(lengths)
        run = _Run(
            ids, keys[:longest].copy(), lengths, np.concatenate([slots for _, slots in parts]),
            b"".join([keys[:length].tobytes() for length in lengths]), owners.tobytes(),
            b"".join([counts.tobytes() for counts, _ in parts]), same,
        )  # fmt: skip
        self._runs[name] = run
        self.nbytes += run.nbytes
        while self.nbytes > self._max:
            self._drop(next(iter(self._runs)))


def _again(held: Table, run: _Run, ids: list[int], keys: Keys) -> tuple[list[Part], list[int | None], int] | None:
    """Return what each owner has, by a run, and how many blocks these have more; None if it is not as it was."""
    if run.ids != ids:
        return None
    slots = run.slots
    if held.keys.take(slots, mode="clip").tobytes() != run.keys:
        return None
    if held.owners.take(slots, mode="clip").tobytes() != run.owners:
        return None
    counts: Counts = held.columns["counts"].take(slots, mode="clip")
    if counts.tobytes() != run.counts:
        return None
    most = min(len(keys), len(run.prompt))
    common = run_of(keys[:most] == run.prompt[:most])
    ends = [length if length < common else common for length in run.lengths]
    grown = _grown(held, ids, ends, keys)
    if len(grown) > _MORE:
        return None
    parts, place = [], 0
    for length, end in zip(run.lengths, ends):
        parts.append((counts[place : place + end], slots[place : place + end]))
        place += length
    same, more = run.same, 0
    if grown:
        same = same.copy()
        for at in grown:
            (part,) = leading(held, [[ids[at]]], keys[ends[at] :])[0]
            both = parts[at] = np.concatenate((parts[at][0], part[0])), np.concatenate((parts[at][1], part[1]))
            (same[at],) = alike([both[0]])
            more += len(part[0])
    return parts, same, more


def _grown(held: Table, ids: list[int], ends: list[int], keys: Keys) -> list[int]:
    """Return which of the owners have the block at their end."""
    if len(ids) <= _ONE_BY_ONE:
        nexts = {end: int(keys[end]) for end in set(ends) if end < len(keys)}
        asked = [(at, owner, nexts[end]) for at, (owner, end) in enumerate(zip(ids, ends)) if end in nexts]
        return [at for at, owner, key in asked if held.find_one(key, owner) >= 0]
    owners, places = np.array(ids, np.uint32), np.array(ends)
    there = held.find(keys.take(places, mode="clip"), owners) >= 0
    found: list[int] = (there & (places < len(keys))).nonzero()[0].tolist()
    return found


__all__ = ["REMEMBERED_BYTES_MAX", "STRIDE", "Found", "Places"]
