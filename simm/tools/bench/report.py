"""Operations, figures and bars of ``simm bench``, and their report for people and programs."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TextIO

from ... import __version__
from ...host import memory, numa

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30


class Operation(NamedTuple):
    """An operation that the benchmark measures.

    ``kind`` is put, get, ask or view; ``many`` means a batch of keys per call; ``method`` is the Client's.
    """

    kind: str
    many: bool
    method: str


OPERATIONS: Final = {
    "put": Operation("put", False, "put"),
    "get": Operation("get", False, "get_into"),
    "exists": Operation("ask", False, "exists"),
    "mput": Operation("put", True, "put_many"),
    "mget": Operation("get", True, "get_into_many"),
    "mexists": Operation("ask", True, "exists_many"),
    "view": Operation("view", False, "view"),
}
#: Smallest batches to which the bars for batches apply.
BAR_BATCH: Final = 32
BAR_ASKING_BATCH: Final = 128


@dataclass
class Figures:
    """Figures of an operation or of its floor. Latencies in microseconds."""

    calls: int = 0
    keys: int = 0
    p50: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    us_per_key: float = 0.0
    keys_per_s: float = 0.0
    gib_per_s: float = 0.0

    def as_json(self, size: int) -> dict[str, Any]:
        """Return the figures for --json, rounded to their precision."""
        return {
            "calls": self.calls, "keys": self.keys, "p50_us": round(self.p50, 3), "p99_us": round(self.p99, 3),
            "p99.9_us": round(self.p999, 3), "us_per_key": round(self.us_per_key, 4),
            "keys_per_s": round(self.keys_per_s, 1), "gib_per_s": round(self.gib_per_s, 4) if size else None,
        }  # fmt: skip


@dataclass
class Cell:
    """An operation at one size."""

    op: str
    size: int
    batch: int
    path: str
    rounds: list[tuple[float, float]] = field(default_factory=list)  # keys per second: SiMM, floor
    own: Figures = field(default_factory=Figures)
    floor: Figures = field(default_factory=Figures)
    #: Keys that were not served, and values that differ from the stored ones.
    bad: int = 0
    wrong: int = 0
    why_wrong: str = ""

    @property
    def asks(self) -> bool:
        """Whether the operation asks for keys and moves no values."""
        return OPERATIONS[self.op].kind == "ask"

    @property
    def ratio(self) -> float:
        """The operation's rate over the floor's, median of the rounds."""
        return statistics.median(ours / floors for ours, floors in self.rounds)

    @property
    def floor_name(self) -> str:
        """The name of the floor."""
        return "raw socket" if self.path == "tcp" else "memcpy"


@dataclass(frozen=True)
class Bar:
    """A performance target: ``limit`` is in microseconds (per key in batches), or the least ratio."""

    limit: float
    is_ratio: bool

    def held_by(self, cell: Cell) -> bool:
        """Return whether the cell meets the target."""
        return cell.ratio >= self.limit if self.is_ratio else cell.own.us_per_key <= self.limit

    def __str__(self) -> str:
        return f"ratio >= {self.limit:g}" if self.is_ratio else f"<= {self.limit:g} us"


def bar_for(cell: Cell, *, ring: bool, single: bool) -> Bar | None:
    """Return the bar that applies to a cell, None if there is none. Bars apply to a single caller."""
    op, size, tcp = cell.op, cell.size, cell.path == "tcp"
    if not single:
        return None
    if tcp:
        return Bar(0.85, True) if size >= MIB and op in ("get", "put", "mget", "mput") else None
    if op == "exists":
        return Bar(3.0, False)
    if op == "mexists":
        return Bar(1.5, False) if cell.batch >= BAR_ASKING_BATCH else None
    if size >= MIB:
        limits = {"get": 0.85, "mget": 0.85, "put": 0.75, "mput": 0.75}
        return Bar(limits[op], True) if op in limits else None
    if size != 4 * KIB:
        return None
    if op == "mput":
        return Bar(5.0, False) if cell.batch >= BAR_BATCH else None
    return {"get": Bar(5.0, False), "put": Bar(10.0 if ring else 25.0, False)}.get(op)


def percentiles(parts: Sequence[tuple[int, bytes]], points: Sequence[float]) -> list[float]:
    """Return nearest-rank percentiles of all threads' latencies together, in microseconds.

    ``parts`` has (calls measured, int64 nanoseconds kept) for each thread. If a thread kept only a sample, each value
    counts for several calls.
    """
    import numpy as np  # not before: load processes are forked from a process without numpy's threads

    kept = [np.frombuffer(values, np.int64) for _, values in parts]
    values = np.concatenate(kept)
    if not len(values):
        return [0.0] * len(points)
    weights = np.concatenate([np.full(len(v), count / len(v) if len(v) else 0.0) for (count, _), v in zip(parts, kept)])
    order = np.argsort(values, kind="stable")
    reach = np.cumsum(weights[order])
    # Slightly below the rank, as rounding must not move an exact rank to its neighbour.
    ranks = [int(np.searchsorted(reach, point * reach[-1] * (1 - 1e-12))) for point in points]
    return [float(values[order[min(rank, len(values) - 1)]]) / 1000 for rank in ranks]


# --- text ---------------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Return a size as ``4K``, ``1M`` or ``1000``."""
    for unit, scale in (("M", MIB), ("K", KIB)):
        if size >= scale and size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


def us_text(value: float) -> str:
    """Return microseconds with three or four digits: ``2.31``, ``204.5``, ``15,884``."""
    return f"{value:,.2f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def machine() -> dict[str, Any]:
    """Return the properties of the machine that its figures depend on."""
    model = platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    huge = "unknown"
    with contextlib.suppress(OSError, IndexError):
        with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled", encoding="ascii") as text:
            huge = text.read().split("[")[1].split("]")[0]
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(numa.nodes()),
        "memory_gib": round((memory.meminfo_bytes("MemTotal") or 0) / GIB, 1),
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "shm_huge_pages": huge,
        "load": round(os.getloadavg()[0], 2),
        "simm": __version__,
    }


def machine_line() -> str:
    """Return :func:`machine` as one line."""
    about = machine()
    nodes = f", {about['numa_nodes']} NUMA nodes" if about["numa_nodes"] > 1 else ""
    return (
        f"{about['cpu']}, {about['cores']} cores{nodes}, {about['memory_gib']:g} GiB, Linux {about['kernel']}, "
        f"{about['python']}, shm huge pages: {about['shm_huge_pages']}, load {about['load']}, SiMM {about['simm']}"
    )


_COLUMNS: Final = (
    ("op", 12), ("value", 7), ("keys", 5), ("p50 us", 10), ("p99 us", 10), ("p99.9 us", 10), ("us/key", 9),
    ("keys/s", 12), ("GiB/s", 8), ("ratio", 9),
)  # fmt: skip


def header() -> str:
    """Return the table's first line."""
    first, *rest = _COLUMNS
    return first[0].ljust(first[1]) + "".join(name.rjust(width) for name, width in rest) + "  bar"


def rows(cell: Cell, bar: Bar | None) -> list[str]:
    """Return a cell's lines: the operation, its floor below it, and its errors."""
    asks = cell.asks
    value = "-" if asks else size_text(cell.size)
    versus = f"{cell.own.us_per_key - cell.floor.us_per_key:+.2f}us" if asks else f"{cell.ratio:.2f}"
    verdict = "" if bar is None else f"{'ok' if bar.held_by(cell) else 'MISSED'} ({bar})"
    lines = []
    for name, figures, tail in ((cell.op, cell.own, versus), (f"  {cell.floor_name}", cell.floor, "")):
        own = figures is cell.own
        texts = [
            value if own else "", str(cell.batch) if own else "", us_text(figures.p50), us_text(figures.p99),
            us_text(figures.p999), us_text(figures.us_per_key), f"{figures.keys_per_s:,.0f}",
            "-" if asks else f"{figures.gib_per_s:.2f}", tail,
        ]  # fmt: skip
        line = name.ljust(_COLUMNS[0][1])
        line += "".join(text.rjust(width) for text, (_, width) in zip(texts, _COLUMNS[1:]))
        lines.append(f"{line}  {verdict}".rstrip() if own else line.rstrip())
    if cell.bad:
        what = "were not stored" if OPERATIONS[cell.op].kind == "put" else "were not found"
        lines.append(f"  ! {cell.bad:,} keys {what}")
    if cell.wrong:
        lines.append(f"  ! {cell.wrong:,} WRONG VALUES, the last: {cell.why_wrong}")
    return lines


def as_json(cell: Cell, bar: Bar | None) -> dict[str, Any]:
    """Return a cell for --json."""
    size = 0 if cell.asks else cell.size
    ratios = [ours / floors for ours, floors in cell.rounds]
    return {
        "op": cell.op, "value_bytes": cell.size, "keys_per_call": cell.batch, "path": cell.path,
        **cell.own.as_json(size),
        "floor": {"name": cell.floor_name, **cell.floor.as_json(size)},
        "ratio": None if not size else round(cell.ratio, 4),
        "ratio_rounds": [] if not size else [round(ratio, 4) for ratio in ratios],
        "p50_above_floor_us": round(cell.own.p50 - cell.floor.p50, 3),
        "bar": None if bar is None else {"bar": str(bar), "ok": bar.held_by(cell)},
        "keys_not_served": cell.bad, "wrong_values": cell.wrong,
    }  # fmt: skip


class Progress:
    """A line that overwrites itself, on a terminal only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show ``text``, or clear the line if it is empty."""
        if self._stream is None:
            return
        if text:
            text = f"{time.monotonic() - self._began:4.0f} s  {text}"
            text = text[: max(20, shutil.get_terminal_size().columns - 1)]
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
