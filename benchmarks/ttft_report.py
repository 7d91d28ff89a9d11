"""The figures of ``ttft.py``: a sample for each first token, a table and a chart of them, and which targets they meet.

Other work on the machine changes from minute to minute. Ratios are therefore of two samples of one round, which follow
each other, and a table has their median and quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from svg import Line, chart

NONE, IN_PROCESS, SIMM = "none", "in-process", "simm"
#: From this many tokens on, SiMM is to need at most these shares of no cache's time and of an in-process cache's.
TARGET_TOKENS = 4096
TARGET_OF_NONE, TARGET_OF_IN_PROCESS = 1 / 3, 1.15

STYLES = {
    "none": ("#000000", "", 1.5),
    "in-process": ("#5e5c64", "6 4", 2.0),
    "simm": ("#c01c28", "", 3.0),
    "simm-layers": ("#c01c28", "3 3", 2.0),
    "simm-tcp": ("#e66100", "", 2.0),
    "redis": ("#1a5fb4", "", 1.5),
    "mooncake-shm": ("#26a269", "", 1.5),
    "lmcache": ("#813d9c", "", 1.5),
    "": ("#b0347e", "8 3 2 3", 1.5),
}


@dataclass(frozen=True)
class Sample:
    """One first token. Times are seconds. ``stored``: the bytes of blocks that were loaded, 0 if they were in place."""

    conversation: int
    tokens: int
    round: int
    cache: str
    ttft: float
    #: Lookup and load, part of ``ttft``.
    load: float
    #: Processor time of this process alone, in ``ttft``.
    processor: float
    blocks: int
    expected: int
    moved: int
    #: Whether the logits are those of no cache, bit by bit.
    equal: bool


@dataclass(frozen=True)
class Load:
    """One lookup and load, without a model behind it. ``good``: whether all blocks came, with the bytes stored."""

    tokens: int
    round: int
    cache: str
    seconds: float
    moved: int
    good: bool


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread | None:
        if not figures:
            return None
        if len(figures) == 1:
            return cls(figures[0], figures[0], figures[0])
        low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
        return cls(middle, low, high)


def ratios(samples: Sequence[Sample], tokens: int, cache: str, other: str) -> list[float]:
    """Return a cache's times as multiples of another's, within each round. No cache has one time for all rounds."""

    def place(sample: Sample) -> tuple[int, int]:
        return sample.conversation, 0 if NONE in (cache, other) else sample.round

    theirs = {place(each): each.ttft for each in samples if (each.tokens, each.cache) == (tokens, other)}
    mine = [each for each in samples if (each.tokens, each.cache) == (tokens, cache) and place(each) in theirs]
    return [each.ttft / theirs[place(each)] for each in mine]


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Return the caches that have samples, in the order of STYLES."""
    names = {each.cache for each in samples}
    return [name for name in STYLES if name in names] + sorted(names - set(STYLES))


def table(samples: Sequence[Sample], labels: dict[str, str]) -> str:
    """Return a table in Markdown: medians for each size and cache, ratios with their quartiles."""
    head = ["prompt", "cache", "time to first token", "of it, lookup and load", "processor time", "of no cache"]
    head += ["of in-process", "moved"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for tokens in sorted({each.tokens for each in samples}):
        for name in names_of(samples):
            mine = [each for each in samples if (each.tokens, each.cache) == (tokens, name)]
            if not mine:
                continue
            cells = [f"{tokens:,}", labels.get(name, name), seconds(statistics.median(each.ttft for each in mine))]
            cells.append("-" if name == NONE else seconds(statistics.median(each.load for each in mine)))
            cells.append(seconds(statistics.median(each.processor for each in mine)))
            for other in (NONE, IN_PROCESS):
                spread = None if name in (NONE, other) else Spread.of(ratios(samples, tokens, name, other))
                cells.append(
                    "-" if spread is None else f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"
                )
            cells.append(f"{statistics.median(each.moved for each in mine) / (1 << 20):,.0f} MiB")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def load_table(loads: Sequence[Load], labels: dict[str, str]) -> str:
    """Return a table in Markdown: the median time of a load, and of its ratios to SiMM's of the same round."""
    lines = ["| prompt | moved | cache | lookup and load | GiB/s | of SiMM's |", "|---|---|---|---|---|---|"]
    mine = {(each.tokens, each.round): each.seconds for each in loads if each.cache == SIMM}
    names = {each.cache for each in loads}
    for tokens in sorted({each.tokens for each in loads}):
        for name in [name for name in STYLES if name in names]:
            here = [each for each in loads if (each.tokens, each.cache) == (tokens, name)]
            spread = Spread.of([each.seconds for each in here])
            if spread is None:
                continue
            share = Spread.of(
                [each.seconds / mine[tokens, each.round] for each in here if (tokens, each.round) in mine]
            )
            moved = here[0].moved
            text = "-" if name == SIMM or share is None else f"{share.median:.2f} ({share.low:.2f} to {share.high:.2f})"
            time = f"{seconds(spread.median)} ({seconds(spread.low)} to {seconds(spread.high)})"
            cells = [f"{tokens:,}", f"{moved / (1 << 20):,.0f} MiB", labels.get(name, name), time]
            lines.append("| " + " | ".join([*cells, f"{moved / (1 << 30) / spread.median:.1f}", text]) + " |")
    return "\n".join(lines)


def seconds(value: float) -> str:
    return f"{value * 1e3:,.1f} ms" if value < 0.1 else f"{value:,.2f} s"


def targets(samples: Sequence[Sample], labels: dict[str, str]) -> list[str]:
    """Return a line for each target at each size from TARGET_TOKENS on: held or MISSED, and the figure."""
    lines = []
    for tokens in sorted({each.tokens for each in samples if each.tokens >= TARGET_TOKENS}):
        for other, most in [(NONE, TARGET_OF_NONE), (IN_PROCESS, TARGET_OF_IN_PROCESS)]:
            if (spread := Spread.of(ratios(samples, tokens, SIMM, other))) is not None:
                word = "held" if spread.median <= most else "MISSED"
                share = f"{spread.median:.3f} of {labels[other]}, {most:.2f} at most"
                lines.append(f"{tokens:,} tokens: SiMM takes {share}: {word}")
        for name in names_of(samples):
            if name in (NONE, IN_PROCESS, SIMM, "simm-layers", "simm-tcp"):
                continue
            if (spread := Spread.of(ratios(samples, tokens, SIMM, name))) is not None:
                word = "held" if spread.median < 1 else "MISSED"
                lines.append(f"{tokens:,} tokens: SiMM takes {spread.median:.3f} of {labels.get(name, name)}: {word}")
    return lines


def wrong(samples: Sequence[Sample], labels: dict[str, str]) -> list[str]:
    """Return a line for each first token whose logits are not those of no cache, or whose cache had lost blocks."""
    lines = []
    for each in samples:
        where = f"{labels.get(each.cache, each.cache)}, conversation {each.conversation}, {each.tokens:,} tokens"
        if not each.equal:
            lines.append(f"{where}: the logits differ from those of no cache")
        if each.blocks < each.expected:
            lines.append(f"{where}: {each.blocks} of {each.expected} blocks were found")
    return lines


def drawn(samples: Sequence[Sample], labels: dict[str, str], title: str) -> str:
    """Return the chart of the medians."""
    sizes = sorted({each.tokens for each in samples})
    lines = []
    for name in names_of(samples):
        points = []
        for tokens in sizes:
            times = [each.ttft for each in samples if (each.tokens, each.cache) == (tokens, name)]
            points += [(float(tokens), statistics.median(times))] if times else []
        label = labels.get(name, name).replace("shared memory", "shm")  # there is room for 16 letters
        lines.append(Line(label, *STYLES.get(name, STYLES[""]), points))
    return chart(title, "tokens of the prompt", "seconds to the first token", lines, log_y=True)
