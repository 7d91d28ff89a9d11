"""The figures of ``peers.py``: a cell for each operation, size, state and store, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
ROOM, FULL = "room", "full"
STATES = {ROOM: "with room for all values", FULL: "full: every put evicts"}
#: What is measured, in the order of the tables. The parts of a mix are called in random order.
TITLES = {
    "get": "GET, one key",
    "put": "PUT, one new key",
    "mget": "GET, a batch",
    "mput": "PUT, a batch of new keys",
    "exists": "exists, one key (half of them are there)",
    "mexists": "exists, a batch (half of them are there)",
    "mixed get": "GET, one key, in random order with PUT and exists",
    "mixed put": "PUT, one new key, in random order with GET and exists",
    "mixed exists": "exists, one key, in random order with GET and PUT",
    "mixed mget": "GET, a batch, in random order with PUT and exists",
    "mixed mput": "PUT, a batch of new keys, in random order with GET and exists",
    "mixed mexists": "exists, a batch, in random order with GET and PUT",
}
#: A cell is marked when its rounds differ by more than this factor.
UNSTEADY = 1.5
#: A smaller share of keys served is told.
SERVED = 0.995
FLOOR = "memcpy"


@dataclass
class Timed:
    """The calls of one operation in a burst: nanoseconds of each, and how many of its keys were asked and served.

    A key that was never stored counts as neither.
    """

    ns: list[int] = field(default_factory=list)
    asked: int = 0
    served: int = 0


@dataclass
class Cell:
    """One operation at one size on one store in one state. Times are microseconds per key."""

    op: str
    size: int
    batch: int
    peer: str
    state: str = ROOM
    p50: float = 0.0
    p99: float = 0.0
    samples: int = 0
    #: Share of the stored keys that were found, or of the new ones that were stored.
    served: float = 1.0
    round_p50: list[float] = field(default_factory=list)
    to_simm: float | None = None
    to_memcpy: float | None = None
    failed: str | None = None


def summary(cell: Cell, rounds: Sequence[Timed]) -> Cell:
    """Fill in a cell's figures from its rounds. Without any it stays as it is."""
    rounds = [each for each in rounds if each.ns]
    if cell.failed is None and rounds:
        pooled = sorted(spent for each in rounds for spent in each.ns)
        cell.round_p50 = [round(statistics.median(each.ns) / cell.batch / 1e3, 3) for each in rounds]
        cell.p50 = statistics.median(cell.round_p50)
        cell.p99 = pooled[min(len(pooled) - 1, len(pooled) * 99 // 100)] / cell.batch / 1e3
        cell.samples = len(pooled)
        asked = sum(each.asked for each in rounds)
        cell.served = round(sum(each.served for each in rounds) / asked, 4) if asked else 1.0
    return cell


def compare(cells: Sequence[Cell]) -> None:
    """Set the ratios of times: medians over the rounds of the ratio within a round."""
    by_name = {cell.peer: cell for cell in cells if cell.round_p50}
    for cell in by_name.values():
        for name, attribute in (("simm", "to_simm"), (FLOOR, "to_memcpy")):
            if (other := by_name.get(name)) is not None:
                ratios = [mine / max(theirs, 1e-3) for mine, theirs in zip(cell.round_p50, other.round_p50)]
                setattr(cell, attribute, round(statistics.median(ratios), 3))


def size_text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def time_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell_text(cell: Cell | None) -> str:
    if cell is None or (cell.failed is None and not cell.round_p50):
        return "-"
    if cell.failed is not None:
        return "failed"
    text = f"{time_text(cell.p50)} / {time_text(cell.p99)}"
    text = f"~{text}" if max(cell.round_p50) > UNSTEADY * min(cell.round_p50) else text
    notes = [f"x{time_text(cell.to_simm)}"] if cell.to_simm is not None and cell.peer != "simm" else []
    notes += [f"{cell.served:.0%} served"] if cell.served < SERVED else []
    return f"{text} ({', '.join(notes)})" if notes else text


def markdown(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Return a table for each state and operation: microseconds per key (p50 / p99), p50 as a multiple of SiMM's."""
    lines = []
    for state, about in STATES.items():
        if any(cell.state == state for cell in cells):
            lines += ["", f"## Stores {about}"]
        for op, title in TITLES.items():
            lines += _table(title, [cell for cell in cells if (cell.state, cell.op) == (state, op)], names)
    return "\n".join(lines)


def _table(title: str, cells: Sequence[Cell], names: Sequence[str]) -> list[str]:
    mine = {(cell.size, cell.peer): cell for cell in cells}
    if not mine:
        return []
    columns = [name for name in names if any(peer == name for _, peer in mine)]
    share = "simm" in columns and FLOOR in columns
    head = ["size x keys", *columns, *(["memcpy/simm"] if share else [])]
    lines = ["", f"### {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for size in sorted({size for size, _ in mine}):
        many = next(cell.batch for (each, _), cell in mine.items() if each == size)
        row = [f"{size_text(size)} x {many}", *(cell_text(mine.get((size, name))) for name in columns)]
        if share:
            simm = mine.get((size, "simm"))
            row.append(f"{1 / simm.to_memcpy:.2f}" if simm is not None and simm.to_memcpy else "-")
        lines.append("| " + " | ".join(row) + " |")
    return lines
