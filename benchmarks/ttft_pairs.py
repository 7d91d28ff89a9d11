"""The paired form of ``ttft.py``: SiMM and one other cache answer the same prompt in turn, many times.

A first token takes seconds on a processor, a load a few per cent of that, and the machine changes by more from minute
to minute. Medians of many samples therefore cannot tell which of two caches is ahead. The differences of two first
tokens that follow each other can, if there are enough of them: each round has one of both caches, and the next round
begins with the other one.

The history's keys and values are drawn, as the time does not depend on them, and computing those of 8K tokens takes
minutes. What the model says over them in place is what it must say over those that were loaded, bit by bit.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from conversations import FRESH, Turn
from ttft_report import IN_PROCESS, SIMM, Sample, seconds

#: Of the bootstrap: how often it draws, and the share of its medians that the interval has.
DRAWS, SURE = 4000, 0.95
#: As few new tokens as a turn may have: the load is the largest part of the first token then.
NEW = FRESH[0]


@dataclass(frozen=True)
class Pair:
    """One round: the times of SiMM and of another cache, in seconds, to the first token and of the load in it."""

    tokens: int
    round: int
    cache: str
    simm: float
    simm_load: float
    other: float
    other_load: float
    moved: int
    #: Whether both had all blocks, and logits that are those over the history in place.
    good: bool


@dataclass(frozen=True)
class Difference:
    """How much later the other cache's first token comes: seconds, the median and its interval, and a sign test."""

    median: float
    low: float
    high: float
    #: How likely signs as uneven as these are, or more so, if neither cache were ahead.
    chance: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Difference:
        """The interval is a percentile bootstrap's, of the same draws for the same number of figures."""
        values = np.asarray(figures, dtype=np.float64)
        drawn = np.random.default_rng(1).integers(0, len(values), (DRAWS, len(values)))
        low, high = np.quantile(np.median(values[drawn], axis=1), [(1 - SURE) / 2, (1 + SURE) / 2])
        return cls(float(np.median(values)), float(low), float(high), sign_test(figures))

    @property
    def verdict(self) -> str:
        if self.low <= 0 <= self.high:
            return "not told apart"
        return "SiMM is ahead" if self.low > 0 else "SiMM is BEHIND"


def sign_test(figures: Sequence[float]) -> float:
    """Return the probability of so uneven a number of positive and negative figures by tosses of a coin, two-sided."""
    signs = [each > 0 for each in figures if each]
    fewer = min(signs.count(True), signs.count(False))
    tail = sum(math.comb(len(signs), k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2 ** len(signs))


def measure(
    ask: Callable[[Any, Turn, int, Any], tuple[Any, Sample]], caches: Sequence[Any], turns: Sequence[Turn],
    source: Any, rounds: int, begin: int = 0,
) -> Iterable[Pair]:  # fmt: skip
    """Yield the pairs at each turn of a conversation. ``ask``: (cache, turn, round, expected) -> logits and a sample.

    ``source``: a pool that has the history's keys and values. ``begin``: the number of the first round.
    """
    from ttft_caches import InProcess

    by_name = {cache.name: cache for cache in caches}
    simm, others = by_name[SIMM], [cache for cache in caches if cache.name != SIMM]
    for cache in caches:
        cache.clear()
    place = InProcess(source, source.block)
    saved = 0
    for turn in (Turn(each.prompt, len(each.prompt) - NEW) for each in turns):
        history = turn.history // source.block
        for cache in caches:
            cache.pool.copy_from(source, saved, history)
            cache.save(turn.prompt, saved, history)
        place.save(turn.prompt, saved, history)
        saved = history
        expected = ask(place, turn, 0, None)[0]
        for other in others:
            for number in range(begin - 1, begin + rounds):
                order = (simm, other) if number % 2 else (other, simm)
                found = {cache.name: ask(cache, turn, number, expected)[1] for cache in order}
                mine, theirs = found[SIMM], found[other.name]
                good = all(each.equal and each.blocks == history for each in (mine, theirs))
                if number >= begin or not good:  # the first round touches memory for the first time
                    yield Pair(
                        len(turn.prompt), number, other.name, mine.ttft, mine.load, theirs.ttft, theirs.load,
                        mine.moved, good,
                    )  # fmt: skip


def kept(file: Path, settings: dict[str, Any]) -> list[Pair]:
    """Return the pairs that a run before wrote to a file. Raises ValueError if it measured something else."""
    if not file.exists():
        return []
    before = json.loads(file.read_text(encoding="utf-8"))
    if before.get("settings") != settings:
        raise ValueError(f"{file} is of a run with other settings: {before.get('settings')}")
    return [Pair(**each) for each in before["pairs"]]


def written(file: Path, about: str, notes: dict[str, str], settings: dict[str, Any], pairs: Sequence[Pair]) -> None:
    result = {"about": about, "caches": notes, "settings": settings, "pairs": [asdict(each) for each in pairs]}
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def pair_table(pairs: Sequence[Pair], labels: dict[str, str]) -> str:
    """Return a table in Markdown: a row for each size and other cache, with the differences of its rounds."""
    head = ["prompt", "moved", "beside", "rounds", "SiMM, first token", "of it, load", "the other's load"]
    head += ["first token later by", "95 %", "signs by chance", "load later by", "95 %", ""]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for tokens, name in dict.fromkeys((each.tokens, each.cache) for each in pairs):
        mine = [each for each in pairs if (each.tokens, each.cache) == (tokens, name)]
        whole = Difference.of([each.other - each.simm for each in mine])
        load = Difference.of([each.other_load - each.simm_load for each in mine])
        share = statistics.median(each.simm_load / each.simm for each in mine)
        theirs = statistics.median(each.other_load / each.other for each in mine)
        cells = [f"{tokens:,}", f"{mine[0].moved / (1 << 20):,.0f} MiB", labels.get(name, name), f"{len(mine)}"]
        cells += [seconds(statistics.median(each.simm for each in mine)), f"{share:.1%}", f"{theirs:.1%}"]
        cells += [signed(whole.median), interval(whole), f"{whole.chance:.1g}"]
        cells += [signed(load.median), interval(load), whole.verdict if name != IN_PROCESS else of_in_process(mine)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def of_in_process(pairs: Sequence[Pair]) -> str:
    """What counts beside the in-process cache, which copies nothing: the ratio."""
    return f"{statistics.median(each.simm / each.other for each in pairs):.3f} of it"


def signed(value: float) -> str:
    return f"{value * 1e3:+,.1f} ms"


def interval(found: Difference) -> str:
    return f"{signed(found.low)} to {signed(found.high)}"


def bad(pairs: Sequence[Pair], labels: dict[str, str]) -> list[str]:
    """Return a line for each round in which a block was lost, or logits were others."""
    return [
        f"{labels.get(each.cache, each.cache)} and SiMM, round {each.round} at {each.tokens:,} tokens: lost blocks, or "
        "logits that are not those over the history in place"
        for each in pairs
        if not each.good
    ]
