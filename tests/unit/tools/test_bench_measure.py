"""The course of ``simm bench``, with fake load processes and a fake worker: when an arena is full, who is billed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from simm.errors import SimmError
from simm.tools.bench import measure
from simm.tools.bench.measure import Bench
from simm.tools.bench.plan import Mix, Plan
from simm.tools.bench.report import Cell
from simm.tools.bench.worker import cpu_ns


class Arena:
    """A worker with room for ``room`` values, of which ``old`` are of a smaller size: 16 of them make room for one."""

    def __init__(self, room: int, old: int = 0) -> None:
        self.room, self.old = room, old
        self.stored = self.lost = 0
        self.slots, self.data_bytes = 1 << 20, room << 16
        self.cpu: int | None = 0
        self.polled = 0

    def put(self, count: int) -> None:
        for _ in range(count):
            if self.old:
                self.lost += 16
                self.old -= 1
            elif self.stored < self.room:
                self.stored += 1
            else:
                self.lost += 1

    def evicted(self) -> int:
        return self.lost

    def cpu_ns(self) -> int | None:
        return self.cpu

    def polled_ns(self) -> int:
        return self.polled


class Processes:
    """Load processes that put into an arena. Each burst is of ten calls, and costs the worker a microsecond a key.

    It polls in vain for three times as long.
    """

    def __init__(self, arena: Arena, count: int = 1, path: str = "shm") -> None:
        self.arena, self.count, self.paths = arena, count, [path]
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.refuse = 0

    def ask(self, what: str, **order: Any) -> list[dict[str, Any]]:
        self.orders.append((what, order))
        return [getattr(self, f"_{what}")(**order) for _ in range(self.count)]

    def _fill(self, count: int) -> dict[str, Any]:
        self.arena.put(count)
        return {"refused": self.refuse}

    def _prepare(self, size: int) -> dict[str, Any]:
        return {"rows": 1000}

    def _store(self, again: bool) -> dict[str, Any]:
        return {}

    def _discard(self) -> dict[str, Any]:
        return {}

    def _burst(self, ops: tuple[str, ...], batch: int, floor: bool, **_: Any) -> dict[str, Any]:
        keys = 10 * batch
        if not floor and self.arena.cpu is not None:
            self.arena.cpu += 4000 * keys * len(ops)
            self.arena.polled += 3000 * keys * len(ops)
        counts = [{"calls": 10, "keys": keys, "busy_ns": 2000 * keys, "bad": 0, "absent": 0, "moved": keys // 4}
                  for _ in ops]  # fmt: skip
        return {"threads": [{"ops": counts, "cpu_ns": 500 * keys * len(ops)}], "wrong": 0, "error": ""}

    def _latencies(self, position: int, floor: bool) -> dict[str, Any]:
        return {"threads": [(1, (2000).to_bytes(8, "little"))]}


def plan_of(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "ops": ("put",), "sizes": (65536,), "batches": {"put": (1,), "get": (1,)}, "threads": 1, "processes": 1,
        "seconds": 0.01, "verify": False, "ring": True, "working_set": 1 << 20, "memory": 1 << 30,
    }  # fmt: skip
    return Plan(**{**given, **changes})


def bench_of(plan: Plan, processes: Any, worker: Any) -> tuple[Bench, list[Cell]]:
    done: list[Cell] = []
    return Bench(plan, processes, worker, lambda _: None, done.append), done


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REST_S", 0.0)


@pytest.mark.parametrize(("old", "count"), [(0, 1), (150, 1), (0, 3)])
def test_an_arena_is_full_when_each_put_evicts_one(old: int, count: int) -> None:
    arena = Arena(100, old)
    processes = Processes(arena, count)
    bench, _ = bench_of(plan_of(state="full", processes=count), processes, arena)
    bench._fill(65536)
    assert arena.stored == arena.room and arena.old == 0
    before = arena.evicted()
    arena.put(10)
    assert arena.evicted() == before + 10


def test_an_arena_that_never_fills_or_refuses_is_an_error() -> None:
    arena = Arena(10_000)
    bench, _ = bench_of(plan_of(state="full"), Processes(arena), arena)
    arena.data_bytes = 100 << 16
    with pytest.raises(SimmError, match="do not come to evict"):
        bench._fill(65536)
    refusing = Processes(arena)
    refusing.refuse = 2
    with pytest.raises(SimmError, match="2 of 12 values of 64K were refused"):
        bench_of(plan_of(state="full"), refusing, arena)[0]._fill(65536)


def test_reads_in_a_full_arena_are_of_values_that_are_stored_again() -> None:
    arena = Arena(100)
    processes = Processes(arena)
    bench, done = bench_of(plan_of(state="full", ops=("put", "get")), processes, arena)
    bench.run()
    assert [cell.op for cell in done] == ["put", "get"]
    what = [(name, order.get("ops")) for name, order in processes.orders if name in ("store", "burst")]
    stores = [at for at, (name, _) in enumerate(what) if name == "store"]
    assert len(stores) == 2 and what[stores[1] - 1][1] == ("put",) and what[stores[1] + 1][1] == ("get",)


def test_the_worker_is_billed_for_the_rounds_that_count() -> None:
    arena = Arena(100)
    bench, done = bench_of(plan_of(), Processes(arena), arena)
    (cell,) = bench.run()
    assert cell.worker_us == 1.0 and cell.caller_us == 0.5 and cell.own.keys == 10 * measure.ROUNDS
    assert cell.own.p10 == cell.own.p50 == 2.0 and cell.shares == [] and done == [cell]


@pytest.mark.parametrize("every", [1, 2])
def test_a_burst_whose_processor_time_is_hidden_is_not_billed(every: int) -> None:
    """Another process had the processor between the calls. If that was so in all bursts, nothing is said."""

    class Preempted(Processes):
        bursts = 0

        def _burst(self, ops: tuple[str, ...], batch: int, floor: bool, **more: Any) -> dict[str, Any]:
            answer = super()._burst(ops, batch, floor, **more)
            self.bursts += not floor
            if not self.bursts % every:
                answer["threads"][0]["cpu_ns"] = None
            return answer

    arena = Arena(100)
    (cell,) = bench_of(plan_of(), Preempted(arena), arena)[0].run()
    assert cell.caller_us == (None if every == 1 else 0.5)


@pytest.mark.parametrize("what", ["mix", "tcp", "no worker", "dead"])
def test_what_cannot_be_told_apart_is_not_told(what: str) -> None:
    arena = Arena(100)
    plan = plan_of(ops=("put", "get"), mix=Mix()) if what == "mix" else plan_of()
    if what == "dead":
        arena.cpu = None
    processes = Processes(arena, path="tcp" if what == "tcp" else "shm")
    bench, done = bench_of(plan, processes, None if what == "no worker" else arena)
    bench.run()
    assert len(done) == len(plan.ops) and all(cell.worker_us is None for cell in done)


def test_issue_an_operation_has_its_own_wrong_values() -> None:
    """What one had read wrong was said of each later one of the same size."""

    class Lying(Processes):
        left = 3

        def _burst(self, ops: tuple[str, ...], batch: int, floor: bool, **more: Any) -> dict[str, Any]:
            answer = super()._burst(ops, batch, floor, **more)
            if ops == ("get",) and not floor and self.left:
                self.left -= 1
                answer |= {"wrong": 2, "error": f"torn {self.left}"}
            return answer

    arena = Arena(100)
    plan = plan_of(ops=("put", "get", "exists"), batches=dict.fromkeys(("put", "get", "exists"), (1,)))
    cells = bench_of(plan, Lying(arena), arena)[0].run()
    assert {cell.op: (cell.wrong, cell.why_wrong) for cell in cells} == {
        "put": (0, ""), "get": (6, "torn 0"), "exists": (0, ""),
    }  # fmt: skip


def test_each_process_has_its_share() -> None:
    arena = Arena(100)
    bench, done = bench_of(plan_of(processes=3), Processes(arena, 3), arena)
    (cell,) = bench.run()
    assert len(cell.shares) == 3 and done == [cell]
    assert all(share.keys_per_s == pytest.approx(500_000) and share.p50 == 2.0 for share in cell.shares)
    assert cell.own.keys_per_s == pytest.approx(1_500_000)


def test_bytes_are_of_values_that_moved() -> None:
    """A miss counted as if its value had been read."""
    arena = Arena(100)
    (cell,) = bench_of(plan_of(ops=("get",), batches={"get": (4,)}), Processes(arena), arena)[0].run()
    for figures in (cell.own, cell.floor):
        assert figures.keys_per_s == pytest.approx(500_000)
        assert figures.gib_per_s * measure.GIB == pytest.approx(500_000 / 4 * 65536)


@pytest.mark.parametrize(("bad", "share"), [(0, 1.0), (5, 0.5), (10, 0.0)])
def test_a_ratio_is_of_keys_that_were_served(bad: int, share: float) -> None:
    """A cluster that found nothing answered in no time, and so was faster than a copy."""

    class Missing(Processes):
        def _burst(self, ops: tuple[str, ...], batch: int, floor: bool, **more: Any) -> dict[str, Any]:
            answer = super()._burst(ops, batch, floor, **more)
            for thread in answer["threads"]:
                for part in thread["ops"]:
                    part["bad"] = 0 if floor else part["keys"] * bad // 10
            return answer

    arena = Arena(100)
    (cell,) = bench_of(plan_of(ops=("get",)), Missing(arena), arena)[0].run()
    assert len(cell.rounds) == measure.ROUNDS and cell.ratio == pytest.approx(share)


def test_the_processor_time_of_a_process() -> None:
    before = cpu_ns(os.getpid())
    assert before is not None and before > 0
    while (cpu_ns(os.getpid()) or 0) <= before:
        sum(range(100_000))
    assert cpu_ns((1 << 22) + 1) is None  # no such process
