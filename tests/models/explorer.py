"""The searches over states and over seeds that the models and the random tests share.

:func:`explore` searches the states of a :class:`Model` exhaustively, many states at a time. A state is a fixed number
of 64-bit words; a :class:`Layout` says which bits are which field. A :class:`Batch` holds many states as columns, so
one numpy call does one step of the model in all of them: 1 to 2 us a successor instead of 20 in a Python loop.

:func:`explore_states` does the same for a :class:`StateModel`, whose states are Python objects, one state at a time.

Both searches are breadth-first, so a counterexample is a shortest one, and both return a :class:`Found`, with the trace
of the counterexample. ``explore`` keeps visited states whole, sorted by a 64-bit hash, and compares them whole: two
states with one hash stop the search (:class:`Collision`), so it never takes a new state for a visited one. It finds
the trace backwards: which state of the level before has a step into this one?

Where states cannot be enumerated, a seed generates a history: :func:`walk` runs its steps, and :func:`first_failure`
looks for a seed that fails. :func:`schedules` enumerates the points at which one process can be interrupted by another.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
    """The position of each field. Fields never straddle words."""

    def __init__(self, *groups: dict[str, int]) -> None:
        """Take a group of fields (name -> bits) for each word."""
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
        """Return the state with these values; other fields are 0."""
        words = [0] * self.words
        for name, value in values.items():
            word, shift, mask = self.fields[name]
            if value & ~mask:
                raise ValueError(f"{name} = {value}")
            words[word] |= value << shift
        return tuple(words)

    def unpack(self, state: Sequence[int]) -> dict[str, int]:
        """Return the value of each field of a state."""
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
        """Return the column of a field of at most 8 bits as bytes, which are eight times as quick to compare."""
        return self[name].astype(np.uint8)

    def where(self, mask: Mask) -> Batch:
        """Return a copy of the states that the mask selects."""
        return Batch(self.layout, [column[mask] for column in self.words])

    def copy(self) -> Batch:
        """Return an independent batch. Columns are replaced and never changed, so both may share them."""
        return Batch(self.layout, list(self.words))


S = TypeVar("S")
#: The fields of a packed state.
Fields = dict[str, int]
#: A step: takes the states at its place in its process (it may keep and change them), returns the states after it.
Step = Callable[[Batch], Batch]


class Model(NamedTuple):
    """A transition system whose states are packed into words.

    ``programs``: for each process the field of its place, and place -> (name, step). ``bad``: the field that is not 0
    in a state that must not occur; ``faults`` says what its values mean. ``describe``: one line for people.
    """

    layout: Layout
    initial: tuple[int, ...]
    programs: dict[str, dict[int, list[tuple[str, Step]]]]
    bad: str
    faults: dict[int, str]
    describe: Callable[[dict[str, int]], str]


class StateModel(Protocol[S]):
    """A transition system whose states are hashable objects."""

    def initial(self) -> S:
        """Return the first state."""

    def successors(self, state: S) -> Iterator[tuple[str, S, str]]:
        """Yield (event, state after it, fault of the event or "") for everything that can happen next."""

    def fault(self, state: S) -> str:
        """Return what is wrong with a state, or "". The search calls it once for each new state."""

    def describe(self, state: S) -> str:
        """Return one line for people."""


@dataclass(frozen=True)
class Found(Generic[S]):
    """The result of a search.

    ``trace``: (step, state) from the initial state to the bad one; empty when the search found nothing.
    """

    states: int
    steps: int
    depth: int
    complete: bool
    fault: str
    trace: list[tuple[str, S]]

    def lines(self, describe: Callable[[S], str]) -> list[str]:
        """Return the result as lines of text."""
        size = f"{self.states:,} states, {self.steps:,} steps, {self.depth} deep"
        if not self.trace:
            return [f"nothing found; {size}" + ("" if self.complete else " (not all: the limit was reached)")]
        return [f"FOUND: {self.fault} ({size})"] + [
            f"  {number:3}  {step:48} {describe(state)}" for number, (step, state) in enumerate(self.trace)
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
        """Add states; return those that are new, once each."""
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
    """Yield (step, states) for everything that can happen next."""
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


def explore(model: Model, limit: int = 1 << 26) -> Found[Fields]:
    """Search all reachable states, until a bad one is found or ``limit`` states are known."""
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


def _trace(model: Model, levels: list[list[Words]], target: tuple[int, ...]) -> list[tuple[str, Fields]]:
    """Return the way from the initial state to ``target``, which is in the last level."""
    way: list[tuple[str, Fields]] = []
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
    """Return a step, and the state among ``words`` from which the step leads to ``target``."""
    for block in _blocks(model, words):
        for name, after in _successors(model, block):
            if _is(after, target).any():
                return name, _origin(model, block, name, target)
    raise AssertionError("a state that was reached from nowhere")


def _origin(model: Model, block: Batch, step: str, target: tuple[int, ...]) -> tuple[int, ...]:
    """Return the state of a block from which a step leads to a target.

    Steps drop states on the way, so the function bisects the block.
    """
    while len(block) > 1:
        half = len(block) // 2
        first = Batch(model.layout, [column[:half] for column in block.words])
        there = any(name == step and _is(after, target).any() for name, after in _successors(model, first))
        block = first if there else Batch(model.layout, [column[half:] for column in block.words])
    return tuple(int(column[0]) for column in block.words)


# -- states that are objects -----------------------------------------------------------------------


def explore_states(model: StateModel[S], limit: int = 10_000_000) -> Found[S]:
    """Search all reachable states, until something is wrong or ``limit`` states are known."""
    first = model.initial()
    came: dict[S, tuple[S, str] | None] = {first: None}
    queue = deque([(first, 0)])
    steps = depth = 0
    while queue and len(came) < limit:
        state, depth = queue.popleft()
        for event, after, fault in model.successors(state):
            steps += 1
            if after not in came:
                came[after] = (state, event)
                queue.append((after, depth + 1))
                fault = fault or model.fault(after)
            if fault:
                trace = [*_way(came, state), (event, after)]
                return Found(len(came), steps, len(trace) - 1, False, fault, trace)
    return Found(len(came), steps, depth, not queue, "", [])


def _way(came: dict[S, tuple[S, str] | None], state: S) -> list[tuple[str, S]]:
    """Return the (event, state) pairs from the initial state to ``state``."""
    way: list[tuple[str, S]] = []
    before = came[state]
    while before is not None:
        way.append((before[1], state))
        state = before[0]
        before = came[state]
    return [("", state), *reversed(way)]


# -- histories and schedules that seeds generate -----------------------------------------------------


def walk(steps: int, step: Callable[[], Any], check: Callable[[], Any] | None = None, *, every: int = 1) -> None:
    """Run a history of ``steps`` random steps, and ``check`` after the first of each ``every`` of them.

    A failure prints the number of its step, which the same seed reaches again.
    """
    for number in range(steps):
        try:
            step()
            if check is not None and number % every == 0:
                check()
        except BaseException as exc:
            print(f"step {number} of {steps}: {type(exc).__name__}: {exc}")
            raise


def first_failure(
    seeds: Iterable[int], run: Callable[[int], Any], *errors: type[BaseException], wanted: Sequence[str] = ("",)
) -> tuple[int, str]:
    """Run one seed after another until one fails as wanted; return the seed and the error's text.

    Args:
        seeds: the dose.
        run: a history; it raises when something is wrong.
        errors: the types of errors that count. Others pass through.
        wanted: texts of which the error's text must contain one.

    Raises:
        AssertionError: no seed fails as wanted; the text names the other failures.
    """
    others = []
    count = 0
    for seed in seeds:
        count += 1
        try:
            run(seed)
        except errors as exc:
            text = str(exc)
            if any(each in text for each in wanted):
                print(f"seed {seed}: {text}")
                return seed, text
            others.append(text)
    raise AssertionError(f"none of {count} seeds fails as wanted; other failures: {others}")


def schedules(frames: int, ticks: int, samples: int, seed: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (first frame, jump at each tick): every single jump at any tick, and a sample of the other schedules."""
    for start, end in itertools.combinations(range(frames), 2):
        for at in range(ticks):
            yield start, (0,) * at + (end - start,)
    rng = random.Random(seed)
    for _ in range(samples):
        points = sorted(rng.randrange(frames) for _ in range(ticks + 1))
        yield points[0], tuple(later - earlier for earlier, later in itertools.pairwise(points))
