"""How many leading blocks of a prompt each owner has, and in which tiers: a count for each tier, a word a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .sources import TIERS
from .table import Keys, Slots, Table

#: A count for each tier: 4 bits. More are not counted, so that the block is forgotten early rather than late.
BITS: Final = 4
MOST: Final = 15
#: The lowest bit of each tier's count.
_FLAGS: Final = sum(1 << BITS * tier for tier in range(len(TIERS)))
#: Blocks of all owners that are looked for at once, at most.
_PROBES: Final = 1 << 17
#: So many are looked for without a first search: that costs as much.
_FEW_PROBES: Final = 512
#: In a question's first search: blocks of all owners, and of each at least and at most.
_MARKS: Final = 128
_MARKS_EACH: Final = (2, 16)

Counts = NDArray[np.uint32]
_Numbers = NDArray[np.int64]
#: An owner's counts of leading blocks, and where these are in the table; -1 for one that it has not.
Part = tuple[Counts, Slots]
_NOTHING: Final[Part] = (np.zeros(0, np.uint32), np.zeros(0, np.int64))


def leading(held: Table, units: Sequence[Sequence[int]], keys: Keys) -> list[list[Part]]:
    """Return for each owner of each unit its counts of the blocks before the first one that no owner of the unit has.

    First some blocks all over the prompt are looked for. A unit's prefix ends before the first of these that it has
    not. So the second search is for little more than the prefixes. It looks at every block that counts.

    Args:
        held: with a column ``counts``; 0 is a block that is not there.

    O(blocks of the prefixes + owners).
    """
    found: list[list[list[Part]]] = [[[] for _ in unit] for unit in units]
    mixed = held.mixed(keys)
    limits = _limits(held, units, mixed, keys)
    active = [number for number, limit in enumerate(limits) if limit]
    start = 0
    while active:
        step = max(1, _PROBES // sum(len(units[number]) for number in active))
        told = [min(limits[number] - start, step) for number in active for _ in units[number]]
        owners = np.array([owner for number in active for owner in units[number]], np.uint32)
        if min(told) == max(told):
            stop = start + told[0]
            slots = held.find_all(mixed[start:stop], keys[start:stop], owners).reshape(-1)
            begins = np.arange(0, len(slots), told[0])
        else:
            lengths = np.array(told)
            ends = lengths.cumsum()
            begins = ends - lengths
            at = np.arange(start, start + int(ends[-1])) - begins.repeat(lengths)
            slots = held.find_mixed(mixed.take(at), keys.take(at), owners.repeat(lengths))
        counts = held.columns["counts"].take(slots, mode="clip")
        counts[slots < 0] = 0
        holes = np.concatenate(((counts == 0).nonzero()[0], (len(counts),)))
        hole = holes.take(holes.searchsorted(begins)).tolist()
        left, place, row = [], 0, 0
        for number in active:
            length, members = told[row], found[number]
            whole = len(members) * length
            if len(members) == 1:
                run = min(hole[row] - place, length)
            else:
                run = run_of(np.asarray(counts[place : place + whole].reshape(-1, length).any(axis=0)))
            for member, begin in enumerate(range(place, place + whole, length)):
                members[member].append((counts[begin : begin + run], slots[begin : begin + run]))
            if run == length and start + length < limits[number]:
                left.append(number)
            place += whole
            row += len(members)
        active = left
        start += step
    return [[_joined(parts) for parts in unit] for unit in found]


def _limits(held: Table, units: Sequence[Sequence[int]], mixed: Keys, keys: Keys) -> list[int]:
    """Return for each unit a number of blocks that its prefix is not longer than."""
    sizes = [len(unit) for unit in units]
    count, length = sum(sizes), len(keys)
    if count * length <= _FEW_PROBES:
        return [length] * len(units)
    least, most = _MARKS_EACH
    step = -(-length // min(most, max(least, _MARKS // count)))
    found = []
    for first in range(0, len(units), _PROBES // most):
        some = units[first : first + _PROBES // most]
        owners = np.array([owner for unit in some for owner in unit], np.uint32)
        there = held.find_all(mixed[::step], keys[::step], owners) >= 0
        if len(some) < len(there):
            starts = np.cumsum([0, *map(len, some[:-1])])
            there = np.logical_or.reduceat(there, starts, axis=0)
        whole = there.all(axis=1)
        found += np.where(whole, length, step * there.argmin(axis=1)).tolist()
    return found


def _joined(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return _NOTHING
    return np.concatenate([counts for counts, _ in parts]), np.concatenate([slots for _, slots in parts])


def run_of(flags: NDArray[np.bool_]) -> int:
    """Return how many are True before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def tiers_of(counts: Counts) -> NDArray[np.bool_]:
    """Return for each block and tier whether the block is there: blocks x tiers."""
    shifts = np.arange(len(TIERS), dtype=np.uint32) * np.uint32(BITS)
    found: NDArray[np.bool_] = (counts[:, None] >> shifts & np.uint32(MOST)) > 0
    return found


def alike(found: Sequence[Counts]) -> list[int | None]:
    """Return for each array of counts the tiers that all its blocks are in, a bit each; None where blocks differ.

    O(blocks), by few calls for all arrays: most prompts are in the same tiers as a whole.
    """
    answer: list[int | None] = [0] * len(found)
    at = [number for number, counts in enumerate(found) if len(counts)]
    if not at:
        return answer
    flags = np.concatenate([found[number] for number in at])
    if not (flags ^ flags[0]).any():  # as nearly always
        same = int(flags[0])
        tiers = sum((same >> BITS * tier & MOST > 0) << tier for tier in range(len(TIERS)))
        return [tiers if len(counts) else 0 for counts in found]
    flags |= flags >> np.uint32(1)
    flags |= flags >> np.uint32(2)
    flags &= np.uint32(_FLAGS)
    starts = np.cumsum([0, *(len(found[number]) for number in at[:-1])])
    least = np.bitwise_and.reduceat(flags, starts).tolist()
    most = np.bitwise_or.reduceat(flags, starts).tolist()
    for number, low, high in zip(at, least, most):
        answer[number] = sum((low >> BITS * tier & 1) << tier for tier in range(len(TIERS))) if low == high else None
    return answer
