"""What ``simm bench`` makes of its measurements: percentiles, bars, rows."""

from __future__ import annotations

import io
import random
from array import array

import pytest

from simm.tools.bench import contents
from simm.tools.bench import report as bench_report
from simm.tools.bench.contents import Samples
from simm.tools.bench.report import Bar, Cell, Figures, Progress, Setup, Share, bars_for, percentiles

# --- percentiles and samples ----------------------------------------------------------------------


def nearest_rank(values: list[int], point: float) -> float:
    """The naive twin: the smallest value that at least ``point`` of all are not above."""
    ordered = sorted(values)
    return next(value for at, value in enumerate(ordered, 1) if at >= point * len(ordered) - 1e-9) / 1000


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_are_those_of_a_naive_twin(seed: int) -> None:
    draw = random.Random(seed)
    lanes = [[draw.randrange(1, 5000) for _ in range(draw.randrange(1, 300))] for _ in range(draw.randrange(1, 4))]
    points = (0.5, 0.99, 0.999, 0.25, 1.0)
    found = percentiles([(len(lane), array("q", lane).tobytes()) for lane in lanes], points)
    together = [value for lane in lanes for value in lane]
    assert found == [nearest_rank(together, point) for point in points]


def test_a_sampled_thread_counts_for_all_its_calls() -> None:
    # 9,000 calls of 1 us of which ten were kept, and 1,000 of 5 us that were all kept: the median is 1 us.
    parts = [(9000, array("q", [1000] * 10).tobytes()), (1000, array("q", [5000] * 1000).tobytes())]
    assert percentiles(parts, (0.5, 0.89, 0.91)) == [1.0, 1.0, 5.0]


def test_no_samples_at_all_are_zeros() -> None:
    assert percentiles([(0, b""), (0, b"")], (0.5, 0.99)) == [0.0, 0.0]


def test_beyond_its_room_a_sample_keeps_each_value_with_the_same_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SAMPLES_MAX", 50)
    random.seed(7)
    kept: list[int] = []
    for _ in range(40):
        samples = Samples()
        for value in range(500):
            samples.add(value)
        count, raw = samples.take()
        values = array("q")
        values.frombytes(raw)
        assert count == 500 and len(values) == 50 and len(set(values)) == 50
        kept += values
    # 2,000 draws; a tenth of them comes from each tenth of the stream, by about 200 +- 13.
    for tenth in range(10):
        assert 140 < sum(value // 50 == tenth for value in kept) < 260


# --- bars and the report --------------------------------------------------------------------------


def cell_of(
    op: str, size: int, batch: int = 1, path: str = "shm", p50: float = 1.0, ratio: float = 1.0, worker: float = 1.0
) -> Cell:
    figures = Figures(10, 10 * batch, p50, p50, p50, p50, p50 / batch, 1e6, 1.0)
    return Cell(op, size, batch, path, rounds=[(ratio * 100, 100.0)], own=figures, floor=Figures(10, 10, p50=0.5),
                worker_us=worker)  # fmt: skip


KV_FULL = Setup("full", "kv")
MIXED = Setup("full", "kv", True)


@pytest.mark.parametrize(
    ("cell", "setup", "texts"),
    [
        (cell_of("get", 4096), Setup(), "<= 5 us"),
        (cell_of("put", 4096), Setup(), "<= 10 us"),
        (cell_of("put", 4096), Setup(ring=False), "<= 25 us"),
        (cell_of("mput", 4096, 32), Setup(), "<= 3.5 us"),
        (cell_of("mput", 4096, 1024), Setup(), "<= 2 us"),
        (cell_of("exists", 4096), Setup(), "<= 3 us"),
        (cell_of("mexists", 4096, 128), Setup(), "<= 1.5 us"),
        (cell_of("get", 1 << 20), Setup(), "ratio >= 0.85"),
        (cell_of("mget", 16 << 20, 8), Setup(), "ratio >= 0.85"),
        (cell_of("put", 1 << 20), Setup(), "ratio >= 0.75"),
        (cell_of("mput", 4 << 20, 8), Setup("full", "kv"), "ratio >= 0.75"),
        (cell_of("put", 1 << 20, path="tcp"), Setup(), "ratio >= 0.85"),
        (cell_of("mget", 1 << 20, 8, "tcp"), Setup(), "ratio >= 0.85"),
        (cell_of("get", 4096), Setup("full"), "<= 4 us"),
        (cell_of("put", 4096), Setup("full"), "<= 8 us"),
        (cell_of("exists", 4096), Setup("full"), "<= 2.5 us"),
        (cell_of("mput", 4096, 32), Setup("full"), "<= 5 us, <= 4 us of the worker"),
        (cell_of("mput", 4096, 128), Setup("full"), "<= 3 us, <= 4 us of the worker"),
        (cell_of("mget", 4096, 64), Setup("full"), "<= 3 us"),
        (cell_of("mget", 4096, 128), Setup("full"), "<= 1.5 us"),
        (cell_of("get", 4096), KV_FULL, "<= 4.7 us"),
        (cell_of("put", 4096), KV_FULL, "<= 8.7 us"),
        (cell_of("exists", 4096), KV_FULL, "<= 3.2 us"),
        (cell_of("put", 4096), MIXED, "<= 12 us"),
        (cell_of("get", 4096), MIXED, "<= 5.5 us"),
        (cell_of("exists", 4096), MIXED, "<= 3.2 us"),
        (cell_of("mput", 4096, 32), MIXED, "<= 7 us"),
        (cell_of("mget", 4096, 32), MIXED, "<= 3.5 us"),
    ],
)
def test_the_bars_are_those_of_the_design(cell: Cell, setup: Setup, texts: str) -> None:
    if setup.mixed:
        cell.worker_us = None  # nobody can tell it apart
    assert ", ".join(map(str, bars_for(cell, setup))) == texts
    assert bars_for(cell, setup._replace(single=False)) == []


@pytest.mark.parametrize("bar", [Bar(5.0), Bar(5.0, bench_report.WORKER_US), Bar(0.85, bench_report.RATIO)])
def test_misses_hold_no_bar(bar: Bar) -> None:
    cell = cell_of("get", 4096)
    assert bar.held_by(cell)
    cell.own.keys = 1000
    cell.bad = 50
    assert bar.held_by(cell), "a twentieth"
    cell.bad = 51
    assert not bar.held_by(cell)


@pytest.mark.parametrize(
    ("cell", "setup"),
    [
        (cell_of("get", 64 << 10), Setup()), (cell_of("mexists", 4096, 32), Setup()),
        (cell_of("mput", 4096, 8), Setup()), (cell_of("view", 1 << 20), Setup()),
        (cell_of("get", 4096, path="tcp"), Setup()), (cell_of("exists", 4096, path="tcp"), Setup()),
        (cell_of("put", 4096), Setup("full", ring=False)), (cell_of("put", 1 << 20), MIXED),
        (cell_of("get", 4096), Setup("room", "kv")), (cell_of("get", 4096), Setup("room", "client", True)),
    ],
)  # fmt: skip
def test_no_bar_where_the_design_has_none(cell: Cell, setup: Setup) -> None:
    assert bars_for(cell, setup) == []


def test_a_missed_bar_is_told() -> None:
    slow, bar = cell_of("get", 4096, p50=5.01, worker=4.5), Bar(5.0)
    assert not bar.held_by(slow) and bar.held_by(cell_of("get", 4096, p50=4.99))
    worker = Bar(4.0, "us of the worker")
    assert not worker.held_by(slow) and worker.held_by(cell_of("get", 4096, worker=3.9))
    line = bench_report.rows(slow, [bar, worker])[0]
    assert line.endswith("MISSED (<= 5 us), MISSED (<= 4 us of the worker)")
    assert not Bar(0.85, "ratio").held_by(cell_of("get", 1 << 20, ratio=0.84))
    assert bench_report.as_json(slow, [bar])["bars"] == [{"bar": "<= 5 us", "ok": False}]


def test_what_went_wrong_stands_below_its_row() -> None:
    cell = cell_of("put", 4096)
    assert len(bench_report.rows(cell, [])) == 2
    cell.bad, cell.wrong, cell.why_wrong = 3, 2, "key k: torn"
    assert bench_report.rows(cell, [])[2:] == [
        "  ! 3 keys were not stored", "  ! 2 WRONG VALUES, the last: key k: torn",
    ]  # fmt: skip


def test_a_miss_in_a_full_arena_is_told_as_an_eviction() -> None:
    cell = cell_of("get", 4096)
    cell.bad = 3
    assert bench_report.rows(cell, [])[-1] == "  ! 3 keys were not found"
    assert bench_report.rows(cell, [], full=True)[-1] == "  ! 3 keys were evicted meanwhile"


def test_processes_are_told_one_by_one_and_together() -> None:
    cell = cell_of("put", 4096)
    cell.shares = [Share(2000.0, 9.0, 12.0, 90.0), Share(1000.0, 8.0, 11.0, 300.0)]
    assert bench_report.rows(cell, [])[2] == (
        "  of 2 processes each 1,000 to 2,000 keys/s, p10 8.00 to 9.00, p50 11.00 to 12.00, p99 90.00 to 300.0 us"
    )
    first = bench_report.as_json(cell, [])["processes"][0]
    assert first == {"keys_per_s": 2000.0, "p10_us": 9.0, "p50_us": 12.0, "p99_us": 90.0}


def test_columns_do_not_touch() -> None:
    cell = cell_of("mexists", 4096, 4096, p50=4_000_000.0)
    cell.own.keys_per_s, cell.own.p999, cell.caller_us = 9_999_999.0, 999_999.0, 500.0
    assert len(bench_report.rows(cell, [])[0].split()) == len(bench_report.header().split("  bar")[0].split()) - 4


def test_the_ratio_is_the_median_over_the_rounds() -> None:
    cell = cell_of("get", 1 << 20)
    cell.rounds = [(90.0, 100.0), (1.0, 100.0), (95.0, 100.0)]
    assert cell.ratio == 0.9


def test_progress_is_for_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    quiet, terminal = io.StringIO(), Terminal()
    Progress(quiet)("round 1")
    Progress(terminal)("round 1 " + "x" * 500)
    assert quiet.getvalue() == ""
    assert "round 1" in terminal.getvalue() and "\n" not in terminal.getvalue() and len(terminal.getvalue()) < 500
