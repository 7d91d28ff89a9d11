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
#: States that an arena is measured in: with room for every put, and full, where every put is of a new key and evicts.
ROOM: Final = "room"
FULL: Final = "full"
#: What the calls go through: simm.client, and simm.kv, which engines call.
CLIENT: Final = "client"
KV: Final = "kv"
#: The percentiles of a latency: p10, p50, p99, p99.9.
POINTS: Final = (0.1, 0.5, 0.99, 0.999)


class Setup(NamedTuple):
    """What a run measures, besides operations and sizes. Bars depend on it.

    ``mixed``: the operations are called in random order. ``single``: by one thread in all.
    """

    state: str = ROOM
    api: str = CLIENT
    mixed: bool = False
    ring: bool = True
    single: bool = True


@dataclass
class Figures:
    """Figures of an operation or of its floor. Latencies in microseconds."""

    calls: int = 0
    keys: int = 0
    p10: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    us_per_key: float = 0.0
    keys_per_s: float = 0.0
    gib_per_s: float = 0.0

    def as_json(self, size: int) -> dict[str, Any]:
        """Return the figures for --json, rounded to their precision."""
        return {
            "calls": self.calls, "keys": self.keys, "p10_us": round(self.p10, 3), "p50_us": round(self.p50, 3),
            "p99_us": round(self.p99, 3), "p99.9_us": round(self.p999, 3), "us_per_key": round(self.us_per_key, 4),
            "keys_per_s": round(self.keys_per_s, 1), "gib_per_s": round(self.gib_per_s, 4) if size else None,
        }  # fmt: skip


class Share(NamedTuple):
    """What one load process of several did. Latencies in microseconds."""

    keys_per_s: float
    p10: float
    p50: float
    p99: float


@dataclass
class Cell:
    """An operation at one size, in calls of ``batch`` keys. ``mixed``: in random order with others."""

    op: str
    size: int
    batch: int
    path: str
    mixed: bool = False
    #: Keys per second: those that SiMM has served, the floor.
    rounds: list[tuple[float, float]] = field(default_factory=list)
    own: Figures = field(default_factory=Figures)
    floor: Figures = field(default_factory=Figures)
    #: Of each load process, where there are several.
    shares: list[Share] = field(default_factory=list)
    #: Processor time a key, microseconds, of the caller in its calls and of the worker; None where it is not known.
    caller_us: float | None = None
    worker_us: float | None = None
    #: Keys asked for that were never stored; stored keys that were not served; values that differ from the stored ones.
    absent: int = 0
    bad: int = 0
    wrong: int = 0
    why_wrong: str = ""

    @property
    def kind(self) -> str:
        """The operation's kind: put, get, ask or view."""
        return OPERATIONS[self.op].kind

    @property
    def asks(self) -> bool:
        """Whether the operation asks for keys and moves no values."""
        return self.kind == "ask"

    @property
    def ratio(self) -> float:
        """The operation's rate over the floor's, median of the rounds; 0 if it was in none of them."""
        return statistics.median([ours / floors for ours, floors in self.rounds] or [0.0])

    @property
    def floor_name(self) -> str:
        """The name of the floor. A raw socket is a stream, so it has nothing to set against a mix."""
        return "raw socket" if self.path == "tcp" and not self.mixed else "memcpy"


#: What a bar limits: microseconds a key of the median call, or of the worker's processor, or the ratio to the floor.
KEY_US, WORKER_US, RATIO = "us", "us of the worker", "ratio"
#: The share of the keys that may go unserved: some are evicted between two rounds, or in a round of others' puts.
UNSERVED_MAX: Final = 0.05


@dataclass(frozen=True)
class Bar:
    """A performance target. ``of`` is KEY_US or WORKER_US, of which ``limit`` is the most, or RATIO, its least."""

    limit: float
    of: str = KEY_US

    def held_by(self, cell: Cell) -> bool:
        """Return whether the cell meets the target. None is met by calls that find nothing, however fast they are."""
        if cell.bad > UNSERVED_MAX * cell.own.keys:
            return False
        if self.of == RATIO:
            return cell.ratio >= self.limit
        return (cell.own.us_per_key if self.of == KEY_US else cell.worker_us or 0.0) <= self.limit

    def __str__(self) -> str:
        return f"ratio >= {self.limit:g}" if self.of == RATIO else f"<= {self.limit:g} {self.of}"


#: Bars of 4 KiB values by (state, api, mixed, operation): (least keys in a call, microseconds a key), longest first.
_SMALL: Final[dict[tuple[str, str, bool, str], tuple[tuple[int, float], ...]]] = {
    (ROOM, CLIENT, False, "get"): ((1, 5.0),),
    (ROOM, CLIENT, False, "put"): ((1, 10.0),),
    (ROOM, CLIENT, False, "exists"): ((1, 3.0),),
    (ROOM, CLIENT, False, "mput"): ((128, 2.0), (32, 3.5)),
    (ROOM, CLIENT, False, "mexists"): ((128, 1.5),),
    (FULL, CLIENT, False, "get"): ((1, 4.0),),
    (FULL, CLIENT, False, "put"): ((1, 8.0),),
    (FULL, CLIENT, False, "exists"): ((1, 2.5),),
    (FULL, CLIENT, False, "mput"): ((128, 3.0), (32, 5.0)),
    (FULL, CLIENT, False, "mget"): ((128, 1.5), (32, 3.0)),
    (FULL, CLIENT, False, "mexists"): ((128, 1.5),),
    (FULL, KV, False, "get"): ((1, 4.7),),
    (FULL, KV, False, "put"): ((1, 8.7),),
    (FULL, KV, False, "exists"): ((1, 3.2),),
    (FULL, KV, True, "get"): ((1, 5.5),),
    (FULL, KV, True, "put"): ((1, 12.0),),
    (FULL, KV, True, "exists"): ((1, 3.2),),
    (FULL, KV, True, "mput"): ((32, 7.0),),
    (FULL, KV, True, "mget"): ((32, 3.5),),
}
#: By socket instead of by ring.
_PUT_BY_SOCKET_US: Final = 25.0
#: The worker's processor time a put, in frames of this many keys, with a full arena.
_WORKER_BATCH: Final = 32
_WORKER_PUT_US: Final = 4.0
_LARGE: Final = {"get": 0.85, "mget": 0.85, "put": 0.75, "mput": 0.75}
_LARGE_BY_TCP: Final = 0.85


def bars_for(cell: Cell, setup: Setup) -> list[Bar]:
    """Return the bars that apply to a cell. They apply to a single caller, and the small values' to shared memory."""
    op, size, tcp = cell.op, cell.size, cell.path == "tcp"
    if not setup.single:
        return []
    if size >= MIB and op in _LARGE and not setup.mixed:
        return [Bar(_LARGE_BY_TCP if tcp else _LARGE[op], RATIO)]
    if tcp or (size != 4 * KIB and not cell.asks):
        return []
    if op == "put" and not setup.ring:
        return [Bar(_PUT_BY_SOCKET_US)] if setup[:3] == Setup()[:3] else []
    bars = []
    for least, limit in _SMALL.get((setup.state, setup.api, setup.mixed, op), ()):
        if cell.batch >= least:
            bars.append(Bar(limit))
            break
    if op == "mput" and setup.state == FULL and cell.batch >= _WORKER_BATCH and cell.worker_us is not None:
        bars.append(Bar(_WORKER_PUT_US, WORKER_US))
    return bars


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
    ("op", 12), ("value", 7), ("keys", 6), ("p10 us", 10), ("p50 us", 10), ("p99 us", 10), ("p99.9 us", 10),
    ("us/key", 8), ("caller", 8), ("worker", 8), ("keys/s", 12), ("GiB/s", 8), ("ratio", 10),
)  # fmt: skip


def header() -> str:
    """Return the table's first line. ``caller`` and ``worker`` are processor time a key, in microseconds."""
    first, *rest = _COLUMNS
    return first[0].ljust(first[1]) + "".join(name.rjust(width) for name, width in rest) + "  bar"


def rows(cell: Cell, bars: Sequence[Bar], *, full: bool = False) -> list[str]:
    """Return a cell's lines: the operation, its floor below it, its processes, and its errors. ``full``: the arena."""
    asks = cell.asks
    value = "-" if asks else size_text(cell.size)
    versus = f"{cell.own.us_per_key - cell.floor.us_per_key:+.2f}us" if asks else f"{cell.ratio:.2f}"
    verdict = ", ".join(f"{'ok' if bar.held_by(cell) else 'MISSED'} ({bar})" for bar in bars)
    lines = []
    for name, figures, tail in ((cell.op, cell.own, versus), (f"  {cell.floor_name}", cell.floor, "")):
        own = figures is cell.own
        texts = [
            value if own else "", str(cell.batch) if own else "", us_text(figures.p10), us_text(figures.p50),
            us_text(figures.p99), us_text(figures.p999), us_text(figures.us_per_key),
            _cpu_text(cell.caller_us) if own else "", _cpu_text(cell.worker_us) if own else "",
            f"{figures.keys_per_s:,.0f}", "-" if asks else f"{figures.gib_per_s:.2f}", tail,
        ]  # fmt: skip
        line = name.ljust(_COLUMNS[0][1])
        line += "".join(text.rjust(width) for text, (_, width) in zip(texts, _COLUMNS[1:]))
        lines.append(f"{line}  {verdict}".rstrip() if own else line.rstrip())
    if cell.shares:
        rates, p10, p50, p99 = (sorted(column) for column in zip(*cell.shares))
        lines.append(
            f"  of {len(cell.shares)} processes each {rates[0]:,.0f} to {rates[-1]:,.0f} keys/s, "
            f"p10 {_range_text(p10)}, p50 {_range_text(p50)}, p99 {_range_text(p99)} us"
        )
    if cell.bad:
        what = "were not stored" if cell.kind == "put" else "were evicted meanwhile" if full else "were not found"
        lines.append(f"  ! {cell.bad:,} keys {what}")
    if cell.wrong:
        lines.append(f"  ! {cell.wrong:,} WRONG VALUES, the last: {cell.why_wrong}")
    return lines


def _cpu_text(value: float | None) -> str:
    return "-" if value is None else us_text(value)


def _range_text(values: Sequence[float]) -> str:
    return f"{us_text(values[0])} to {us_text(values[-1])}"


def as_json(cell: Cell, bars: Sequence[Bar]) -> dict[str, Any]:
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
        "caller_cpu_us_per_key": None if cell.caller_us is None else round(cell.caller_us, 4),
        "worker_cpu_us_per_key": None if cell.worker_us is None else round(cell.worker_us, 4),
        "processes": [
            {"keys_per_s": round(share.keys_per_s, 1), "p10_us": round(share.p10, 3), "p50_us": round(share.p50, 3),
             "p99_us": round(share.p99, 3)}
            for share in cell.shares
        ],
        "bars": [{"bar": str(bar), "ok": bar.held_by(cell)} for bar in bars],
        "keys_absent": cell.absent, "keys_not_served": cell.bad, "wrong_values": cell.wrong,
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
