"""A worker that stands still (SIGSTOP): callers get their answer within the deadline, and then without waiting."""

from __future__ import annotations

import time

import psutil
import pytest

from simm.server.slots.hang_watch import HANG_S
from tests.support.child import stopped
from tests.support.fleet import Fleet
from tests.support.load import FAILED, OK, OUTAGE, load
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.waiting import WAIT_S, wait_until

DEADLINE_S = 1.0
#: The 99.9th percentile of the calls' times may exceed the deadline by so many times the 99th percentile on the same
#: machine with nothing stopped.
LATE = 5.0
#: So many keys in a row without a failure are of all three servers.
STREAK = 60


def stop_worker(fleet: Fleet, seconds: float) -> bool:
    """Stop one of three workers under load, by shared memory and by TCP; return whether calls kept their deadline."""
    server = fleet.servers[1]
    with load(fleet.manager.address, fleet.folder, 2, deadline_s=DEADLINE_S) as clients, Pace() as pace:
        before = time.monotonic()
        time.sleep(2.0)
        worker = psutil.Process(server.worker_pid())
        began = time.monotonic()
        with stopped(worker):
            time.sleep(seconds)
        back = time.monotonic()
        wait_until(lambda: server.succeeded(0), "a worker serves again")
        assert seconds >= HANG_S or server.worker_stats()["pid"] == worker.pid, "the same one"
        # The breaker closes again: calls of both kinds succeed everywhere.
        for client in clients.clients:
            client.wait_streak(STREAK, "calls succeed again", WAIT_S)
        records = clients.records()
    records.assert_right()
    during = records.between(began, back)
    print(during.summary())
    assert during.count(OK) > 100, "the other two workers serve on"
    late = during.quantile(0.999)
    what = f"worker stopped for {seconds:.0f} s"
    bound = pace.limit(DEADLINE_S + LATE * max(0.01, records.between(before, began).quantile(0.99)))
    measured(f"{what}: p99.9 of a call", late, "s", f"{bound:.2f} s")
    measured(f"{what}: longest call", during.longest(), "s", f"{DEADLINE_S} s and the copies")
    slow = during.rows["took"] > 0.5 * DEADLINE_S
    measured(f"{what}: calls of more than half the deadline", int(slow.sum()), "calls", "one a client and probe")
    failed = during.of(OUTAGE, FAILED)
    quick = failed.rows["took"][failed.rows["took"] < 0.5 * DEADLINE_S]
    if len(quick):
        median = float(sorted(quick)[len(quick) // 2])
        measured(f"{what}: median of a call that failed at once", median * 1e3, "ms", "1 ms")
    last = records.between(back, float("inf")).of(FAILED, OUTAGE).last_end(back)
    measured(f"{what}: until no call failed any more", last - back, "s")
    fleet.assert_no_traceback()
    return late <= bound


def check(fleet: Fleet, seconds: float) -> None:
    # What else the machine does may come and go meanwhile.
    assert stop_worker(fleet, seconds) or stop_worker(fleet, seconds)


@pytest.mark.fault("F06", ci="1 stop of 5 s")
def test_worker_stopped_for_5_s(fleet: Fleet) -> None:
    check(fleet, 5.0)


@pytest.mark.fault("F06", whole=17)
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5.0, 30.0, 120.0])
def test_worker_stopped_for_long(real_fleet: Fleet, seconds: float, amount: int | None) -> None:
    for _ in range(amount or 1):
        check(real_fleet, seconds)
