"""The course of a benchmark: fill the arena, alternate operations with their floors, and gather the figures.

A group of operations is measured in rounds of about ten milliseconds, in which the operations and their floor
alternate. Without ``--mixed`` a group is one operation.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...errors import SimmError
from .plan import Plan
from .processes import LoadProcesses
from .report import FULL, GIB, POINTS, Cell, Figures, Share, percentiles, size_text
from .worker import LocalWorker

ROUNDS: Final = 10
#: From the order to the common start of all threads, seconds.
LEAD_S: Final = 0.002
#: A worker that polls sleeps by then after its last request, seconds, and the kernel has accounted its time.
REST_S: Final = 0.002
#: A full arena evicts so many entries a put. It evicts more while entries of another size make room.
STEADY: Final = (0.9, 1.1)
#: Share of the arena that is filled between two looks, and how often it may be filled before the bench gives up.
_FILL_STEPS: Final = 8
_FILLS_MAX: Final = 4


class Bench:
    """A run of a plan. ``progress`` receives the current step, ``done`` each finished cell, ``warn`` what stays.

    ``worker``: that of the command's own cluster, else None.
    """

    def __init__(
        self, plan: Plan, load: LoadProcesses, worker: LocalWorker | None, progress: Callable[[str], None],
        done: Callable[[Cell], None], warn: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.load = load
        self.worker = worker
        self.progress = progress
        self.done = done
        self.warn = warn
        self.cells: list[Cell] = []
        self.path = "+".join(load.paths)

    def run(self) -> list[Cell]:
        """Measure and return all cells. Raises SimmError if the cluster fails.

        Whatever ends it, the values are deleted from a cluster that is not this command's own, whose values go with it.
        The load processes end by that, if they are not done. A second interrupt ends it at once.
        """
        try:
            for size in self.plan.sizes:
                self._run_size(size)
        except BaseException:
            if self.worker is None:
                with contextlib.suppress(OSError):  # whoever read what this command says may have gone
                    self.progress("deleting what was stored")
                if not self.load.withdraw():
                    with contextlib.suppress(OSError):
                        self.warn("a load process died, or did not end in time: its values may be left in the cluster")
            raise
        return self.cells

    def _run_size(self, size: int) -> None:
        self.progress(f"storing values of {size_text(size)}")
        rows = self.load.ask("prepare", size=size)[0]["rows"]
        groups = self.plan.groups(size, rows)
        if groups and self.plan.state == FULL:
            self._fill(size)
        if groups:
            self.load.ask("store", again=False)
        for number, (ops, batch) in enumerate(groups, 1):
            mixed = self.plan.mix is not None
            cells = [Cell(op, size, batch, self.path, mixed) for op in ops]
            self._measure(cells, f"[{size_text(size)}, {number}/{len(groups)}]")
            self.cells += cells
            for cell in cells:
                self.done(cell)
        self.load.ask("discard")

    def _fill(self, size: int) -> None:
        """Fill the arena until each put of a new key evicts an old one. Raises SimmError if that never comes."""
        assert self.worker is not None
        room = min(self.worker.slots, self.worker.data_bytes // size)
        step = max(1, room // _FILL_STEPS // self.plan.processes)
        evicted = self.worker.evicted()
        for number in range(_FILLS_MAX * _FILL_STEPS):
            self.progress(f"filling the arena with values of {size_text(size)}: {number / _FILL_STEPS:.0%}")
            refused = sum(answer["refused"] for answer in self.load.ask("fill", count=step))
            before, evicted = evicted, self.worker.evicted()
            if refused:
                raise SimmError(f"{refused} of {step * self.plan.processes} values of {size_text(size)} were refused")
            each = (evicted - before) / (step * self.plan.processes)
            if number >= _FILL_STEPS and STEADY[0] <= each <= STEADY[1]:
                return
        raise SimmError(f"puts of {size_text(size)} do not come to evict one value each: give it more --memory")

    def _measure(self, cells: Sequence[Cell], where: str) -> None:
        ops, batch = tuple(cell.op for cell in cells), cells[0].batch
        if self.plan.state == FULL and any(cell.kind != "put" for cell in cells):
            self.load.ask("store", again=True)
        seconds = self.plan.seconds / ROUNDS / 2
        counts = [{floor: _Counts() for floor in (False, True)} for _ in cells]
        caller_us: list[float] = []
        worker_ns = _Spent(self.worker)
        for number in range(ROUNDS + 1):
            rates = counts[0][False].rates
            pace = f", {rates[-1]:,.0f} keys/s" if rates else ""
            self.progress(f"{where} {'+'.join(ops)} x{batch}, round {number}/{ROUNDS}{pace}")
            # They alternate in who goes first.
            for floor in (False, True) if number % 2 else (True, False):
                if not floor and number:
                    worker_ns.begin()
                answers = self._burst(ops, batch, floor, seconds, counted=number > 0)
                if not floor:
                    self._note(cells, answers)
                if not number:
                    continue
                if not floor:
                    worker_ns.end()
                    caller_us += _caller_us(answers)
                for position, counted in enumerate(counts):
                    counted[floor].add([[part["ops"][position] for part in each["threads"]] for each in answers])
        for position, (cell, counted) in enumerate(zip(cells, counts)):
            ours, floors = counted[False], counted[True]
            cell.rounds = [
                (served, bare)
                for served, rate, bare in zip(ours.served_rates, ours.rates, floors.rates)
                if rate and bare
            ]
            for floor, figures in ((False, cell.own), (True, cell.floor)):
                self._summarise(figures, cell, position, counted[floor], floor)
        self._account(cells, caller_us, worker_ns.total)

    def _burst(
        self, ops: Sequence[str], batch: int, floor: bool, seconds: float, counted: bool
    ) -> list[dict[str, Any]]:
        at = time.monotonic_ns() + int(LEAD_S * 1e9)
        return self.load.ask("burst", ops=ops, batch=batch, floor=floor, seconds=seconds, counted=counted, at=at)

    def _note(self, cells: Sequence[Cell], answers: Sequence[dict[str, Any]]) -> None:
        """Add up what went wrong."""
        for position, cell in enumerate(cells):
            parts = [thread["ops"][position] for answer in answers for thread in answer["threads"]]
            cell.bad += sum(part["bad"] for part in parts)
            cell.absent += sum(part["absent"] for part in parts)
            cell.wrong += sum(answer["wrong"] for answer in answers)
            cell.why_wrong = next((answer["error"] for answer in answers if answer["error"]), cell.why_wrong)

    def _summarise(self, figures: Figures, cell: Cell, position: int, counts: _Counts, floor: bool) -> None:
        figures.calls, figures.keys = counts.calls, counts.keys
        answers = [answer["threads"] for answer in self.load.ask("latencies", position=position, floor=floor)]
        parts = [part for threads in answers for part in threads]
        figures.p10, figures.p50, figures.p99, figures.p999 = percentiles(parts, POINTS)
        figures.us_per_key = figures.p50 / cell.batch
        figures.keys_per_s = statistics.median(counts.rates)
        figures.gib_per_s = statistics.median(counts.moved_rates) * cell.size / GIB
        if len(answers) > 1 and not floor:
            for threads, rates in zip(answers, counts.by_process):
                cell.shares.append(Share(statistics.median(rates), *percentiles(threads, POINTS[:3])))

    def _account(self, cells: Sequence[Cell], caller_us: Sequence[float], worker_ns: int | None) -> None:
        """Set the processor time a key. Of a mix it cannot be told apart, and the worker polls while keys are read."""
        if self.plan.mix is not None:
            return
        (cell,) = cells
        cell.caller_us = statistics.median(caller_us) if caller_us else None
        if worker_ns is not None and self.path == "shm":
            cell.worker_us = worker_ns / 1000 / max(1, cell.own.keys)


def _caller_us(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Return the processor time of a key in each thread's burst, microseconds, of those where it can be told."""
    threads = [thread for answer in answers for thread in answer["threads"] if thread["cpu_ns"] is not None]
    keys = [sum(part["keys"] for part in thread["ops"]) for thread in threads]
    return [thread["cpu_ns"] / 1000 / count for thread, count in zip(threads, keys) if count]


class _Spent:
    """The worker's processor time in bursts without what it polled in vain, nanoseconds; None if it cannot be told."""

    def __init__(self, worker: LocalWorker | None) -> None:
        self._worker = worker
        self._begun: int | None = None
        self.total: int | None = None if worker is None else 0

    def begin(self) -> None:
        if self._worker is not None:
            polled = self._worker.polled_ns()
            time.sleep(REST_S)  # so that the answer is not billed
            cpu = self._worker.cpu_ns()
            self._begun = None if cpu is None else cpu - polled

    def end(self) -> None:
        if self.total is None or self._worker is None:
            return
        time.sleep(REST_S)
        cpu = self._worker.cpu_ns()
        if cpu is None or self._begun is None:
            self.total = None
        else:
            self.total += max(0, cpu - self._worker.polled_ns() - self._begun)


class _Counts:
    """What an operation, or its floor, did in the rounds that count."""

    def __init__(self) -> None:
        self.calls = self.keys = 0
        #: Keys a second in each round, of all processes and of each.
        self.rates: list[float] = []
        #: The same without keys that were not served: a miss is faster than any copy.
        self.served_rates: list[float] = []
        #: Values that were moved a second, in each round, of all processes: misses move none.
        self.moved_rates: list[float] = []
        self.by_process: list[list[float]] = []

    def add(self, parts: Sequence[Sequence[dict[str, int]]]) -> None:
        """Add a round: the counts of each process's threads."""
        self.calls += sum(part["calls"] for threads in parts for part in threads)
        self.keys += sum(part["keys"] for threads in parts for part in threads)
        rates = [sum(_rate(part) for part in threads) for threads in parts]
        self.by_process = self.by_process or [[] for _ in rates]
        for process, rate in zip(self.by_process, rates):
            process.append(rate)
        self.rates.append(sum(rates))
        self.served_rates.append(sum(rates) - sum(_rate(part, "bad") for threads in parts for part in threads))
        self.moved_rates.append(sum(_rate(part, "moved") for threads in parts for part in threads))


def _rate(part: dict[str, int], of: str = "keys") -> float:
    """Return the keys, or the values moved or missed, a second in calls; 0 without a call."""
    return part[of] * 1e9 / part["busy_ns"] if part["busy_ns"] else 0.0
