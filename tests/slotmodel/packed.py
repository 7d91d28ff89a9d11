"""Exhaustive search over states of a few dozen bits, many states at a time.

A state is a fixed number of 64-bit words; a :class:`Layout` says which bits of them are which field. A
:class:`Batch` holds many states as columns, so that one numpy call does one step of the model in all of
them: 1 to 2 us a successor instead of 20 in a loop of Python.

The search is breadth-first, so a counterexample is a shortest one. Visited states are kept whole, sorted
by a 64-bit hash, and compared whole: two states with one hash stop the search (:class:`Collision`), so
nothing is ever taken for visited that was not. The trace of a counterexample is found backwards:
in the level before, which state has a step into this one?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]

_U64 = np.uint64
#: Odd multipliers of the hash, one a word (digits of pi and of the golden ratio).
_MIX = (_U64(0x9E3779B97F4A7C15), _U64(0x243F6A8885A308D3 | 1), _U64(0x13198A2E03707345))
#: States expanded together: bounds the memory that successors need.
_BLOCK = 1 << 18


class Collision(RuntimeError):
    """Two different states with one hash: change ``_MIX``. Never seen."""


class Layout:
    """Where each field lies. Fields never straddle words."""

    def __init__(self, *groups: dict[str, int]) -> None:
        """A group of fields (name -> bits) for each word."""
        if len(groups) > len(_MIX):
            raise ValueError(f"at most {len(_MIX)} words")
        self.words = len(groups)
        self.fields: dict[str, tuple[int, int, int]] = {}
        for word, group in enumerate(groups):
            shift = 0
            for name, bits in group.items():
                self.fields[name] = (word, shift, (1 << bits) - 1)
                shift += bits
            if shift > 64:
                raise ValueError(f"word {word} has {shift} bits")

    def pack(self, values: dict[str, int]) -> tuple[int, ...]:
        """One state."""
        words = [0] * self.words
        for name, value in values.items():
            word, shift, mask = self.fields[name]
            if value & ~mask:
                raise ValueError(f"{name} = {value}")
            words[word] |= value << shift
        return tuple(words)

    def unpack(self, state: Sequence[int]) -> dict[str, int]:
        """The opposite."""
        return {name: state[word] >> shift & mask for name, (word, shift, mask) in self.fields.items()}


class Batch:
    """States as columns. ``batch["field"]`` reads a column, ``batch["field"] = column or number`` writes it."""

    __slots__ = ("layout", "words")

    def __init__(self, layout: Layout, words: list[Words]) -> None:
        self.layout = layout
        self.words = words

    def __len__(self) -> int:
        return len(self.words[0])

    def __getitem__(self, name: str) -> Words:
        word, shift, mask = self.layout.fields[name]
        return (self.words[word] >> _U64(shift)) & _U64(mask)

    def __setitem__(self, name: str, value: Words | int) -> None:
        word, shift, mask = self.layout.fields[name]
        kept = self.words[word] & _U64(~(mask << shift) & 0xFFFF_FFFF_FFFF_FFFF)
        bits = _U64(value << shift) if isinstance(value, int) else value << _U64(shift)
        self.words[word] = kept | bits

    def small(self, name: str) -> NDArray[np.uint8]:
        """A column of a field of at most 8 bits, as bytes: eight times as quick to compare."""
        return self[name].astype(np.uint8)

    def where(self, mask: Mask) -> Batch:
        """A copy of some."""
        return Batch(self.layout, [column[mask] for column in self.words])

    def copy(self) -> Batch:
        """An independent one; columns are replaced and never changed, so they may be shared."""
        return Batch(self.layout, list(self.words))


#: A step: given states at its place in its process (it may keep and change them), those that it leads to.
Step = Callable[[Batch], Batch]


class Model(NamedTuple):
    """A transition system.

    ``programs``: for each process the field of its place, and place -> (name, step). ``bad``: field that is not 0 in
    a state that must not be; ``faults`` says what its values mean. ``describe``: a state for people.
    """

    layout: Layout
    initial: tuple[int, ...]
    programs: dict[str, dict[int, list[tuple[str, Step]]]]
    bad: str
    faults: dict[int, str]
    describe: Callable[[dict[str, int]], str]


class Found(NamedTuple):
    """What a search came to. ``trace``: (step, state) from the start to the bad state; empty when there is none."""

    states: int
    steps: int
    depth: int
    complete: bool
    fault: str
    trace: list[tuple[str, dict[str, int]]]

    def lines(self, describe: Callable[[dict[str, int]], str]) -> list[str]:
        """For people."""
        size = f"{self.states:,} states, {self.steps:,} steps, {self.depth} deep"
        if not self.trace:
            return [f"nothing found; {size}" + ("" if self.complete else " (not all: the limit was reached)")]
        return [f"FOUND: {self.fault} ({size})"] + [
            f"  {number:3}  {step:44} {describe(state)}" for number, (step, state) in enumerate(self.trace)
        ]


def _hash(words: Sequence[Words]) -> Words:
    mixed = words[0] * _MIX[0]
    for column, factor in zip(words[1:], _MIX[1:]):
        mixed ^= mixed >> _U64(29)
        mixed = (mixed + column) * factor
    mixed ^= mixed >> _U64(32)
    return mixed


class _Visited:
    """A set of states: runs sorted by hash, merged when two have about the same size."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.runs: list[tuple[Words, list[Words]]] = []

    def add_new(self, words: list[Words]) -> list[Words]:
        """Those of the states that are new, once each; they are members now."""
        hashes = _hash(words)
        order = np.argsort(hashes)
        hashes, words = hashes[order], [column[order] for column in words]
        if len(hashes) > 1:
            twin = hashes[1:] == hashes[:-1]
            for column in words:
                if bool((twin & (column[1:] != column[:-1])).any()):
                    raise Collision
            first = np.concatenate(([True], ~twin))
            hashes, words = hashes[first], [column[first] for column in words]
        for known, columns in self.runs:
            at = np.searchsorted(known, hashes)
            at[at == len(known)] = 0
            there = known[at] == hashes
            for column, mine in zip(columns, words):
                if bool((there & (column[at] != mine)).any()):
                    raise Collision
            hashes, words = hashes[~there], [column[~there] for column in words]
        if len(hashes):
            self.runs.append((hashes, words))
        while len(self.runs) > 1 and len(self.runs[-1][0]) * 2 > len(self.runs[-2][0]):
            (late, mine), (early, theirs) = self.runs.pop(), self.runs.pop()
            merged = np.concatenate((early, late))
            order = np.argsort(merged, kind="stable")  # two sorted runs: a merge
            columns = [np.concatenate(pair)[order] for pair in zip(theirs, mine)]
            self.runs.append((merged[order], columns))
        return words


def _successors(model: Model, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """(step, states) of everything that can happen next."""
    for place, program in model.programs.items():
        at = batch.small(place)
        for pc, steps in program.items():
            here = at == pc
            if here.any():
                states = batch.where(here)
                for name, step in steps:
                    after = step(states.copy())
                    if len(after):
                        yield name, after


def _blocks(model: Model, words: list[Words]) -> Iterator[Batch]:
    for start in range(0, len(words[0]), _BLOCK):
        yield Batch(model.layout, [column[start : start + _BLOCK] for column in words])


def explore(model: Model, limit: int = 1 << 26) -> Found:
    """Search all reachable states, or until a bad one is found or ``limit`` states are known."""
    visited = _Visited(model.layout)
    frontier = visited.add_new([np.array([word], _U64) for word in model.initial])
    levels = [frontier]
    states, steps = 1, 0
    while len(frontier[0]) and states < limit:
        fresh: list[list[Words]] = []
        for block in _blocks(model, frontier):
            found = [after.words for _, after in _successors(model, block)]
            if found:
                steps += sum(len(words[0]) for words in found)
                fresh.append(visited.add_new([np.concatenate(columns) for columns in zip(*found)]))
        if not fresh:
            break
        frontier = [np.concatenate(columns) for columns in zip(*fresh)]
        states += len(frontier[0])
        levels.append(frontier)
        bad = Batch(model.layout, frontier)[model.bad]
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            target = tuple(int(column[at]) for column in frontier)
            return Found(
                states, steps, len(levels) - 1, False, model.faults[int(bad[at])], _trace(model, levels, target)
            )
    return Found(states, steps, len(levels) - 1, not len(frontier[0]) or states < limit, "", [])


def _trace(model: Model, levels: list[list[Words]], target: tuple[int, ...]) -> list[tuple[str, dict[str, int]]]:
    """The way from the start to ``target``, which is in the last level."""
    way: list[tuple[str, dict[str, int]]] = []
    for words in reversed(levels[:-1]):
        name, before = _into(model, words, target)
        way.append((name, model.layout.unpack(target)))
        target = before
    way.append(("", model.layout.unpack(target)))
    way.reverse()
    return way


def _is(batch: Batch, state: tuple[int, ...]) -> Mask:
    hit: Mask = np.logical_and.reduce([column == _U64(word) for column, word in zip(batch.words, state)])
    return hit


def _into(model: Model, words: list[Words], target: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """A step, and the state of these from which it leads to ``target``."""
    for block in _blocks(model, words):
        for name, after in _successors(model, block):
            if _is(after, target).any():
                return name, _origin(model, block, name, target)
    raise AssertionError("a state that was reached from nowhere")


def _origin(model: Model, block: Batch, step: str, target: tuple[int, ...]) -> tuple[int, ...]:
    """The state of a block from which a step leads to a target: by halves, as steps drop states on the way."""
    while len(block) > 1:
        half = len(block) // 2
        first = Batch(model.layout, [column[:half] for column in block.words])
        there = any(name == step and _is(after, target).any() for name, after in _successors(model, first))
        block = first if there else Batch(model.layout, [column[half:] for column in block.words])
    return tuple(int(column[0]) for column in block.words)
