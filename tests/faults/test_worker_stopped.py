"""A worker that stands still (SIGSTOP): callers get their answer within the deadline, and then without waiting."""

from __future__ import annotations

import time

import psutil
import pytest

from .fleet import Fleet, stopped, wait_until
from .load import FAILED, GET, OK, OUTAGE, PUT, load
from .measures import measured

DEADLINE_S = 1.0
#: The issue's bound: p99.9 of the calls' times.
BOUND_S = DEADLINE_S + 0.05


def stop_worker(fleet: Fleet, seconds: float) -> float:
    """Stop one of three workers under load, by shared memory and by TCP; p99.9 of the calls meanwhile, seconds."""
    server = fleet.servers[1]
    with load(fleet.manager.address, fleet.folder, 2, deadline_s=DEADLINE_S) as clients:
        time.sleep(0.5)
        worker = psutil.Process(server.worker_pid())
        began = time.monotonic()
        with stopped(worker):
            time.sleep(seconds)
        back = time.monotonic()
        wait_until(lambda: server.worker_stats()["pid"] == worker.pid, "the same worker serves again")
        time.sleep(2.5)
        records = clients.records()
    records.assert_right()
    during = records.between(began, back)
    print(during.summary())
    assert during.count(OK) > 100, "the other two workers serve on"
    late = during.quantile(0.999)
    what = f"worker stopped for {seconds:.0f} s"
    measured(f"{what}: p99.9 of a call", late, "s", f"{BOUND_S} s")
    measured(f"{what}: longest call", during.longest(), "s", f"{DEADLINE_S} s and the copies")
    slow = during.rows["took"] > 0.5 * DEADLINE_S
    measured(f"{what}: calls of more than half the deadline", int(slow.sum()), "calls", "one a client and probe")
    failed = during.of(OUTAGE, FAILED)
    quick = failed.rows["took"][failed.rows["took"] < 0.5 * DEADLINE_S]
    if len(quick):
        median = float(sorted(quick)[len(quick) // 2])
        measured(f"{what}: median of a call that failed at once", median * 1e3, "ms", "1 ms")
    # The breaker closes again: both kinds of calls succeed everywhere.
    after = records.between(back + 2.0, float("inf"))
    assert after.count(OK, kind=PUT) and after.count(OK, kind=GET)
    assert after.count(FAILED, OUTAGE) == 0, after.summary()
    last = records.between(back, float("inf")).of(FAILED, OUTAGE).last_end(back)
    measured(f"{what}: until no call failed any more", last - back, "s")
    fleet.assert_no_traceback()
    return late


def check(fleet: Fleet, seconds: float) -> None:
    # The bound is the issue's; a machine that is busy with other things gets a second chance.
    if stop_worker(fleet, seconds) > BOUND_S:
        assert stop_worker(fleet, seconds) <= BOUND_S


def test_worker_stopped_for_5_s(fleet: Fleet) -> None:
    check(fleet, 5.0)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30.0, 120.0])
def test_worker_stopped_for_long(real_fleet: Fleet, seconds: float) -> None:
    check(real_fleet, seconds)
