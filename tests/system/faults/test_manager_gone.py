"""The manager killed, stopped, and away for long, under load: no call fails, and epochs go on from where they were."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from simm.client import Client
from tests.support.child import stopped
from tests.support.fleet import Fleet
from tests.support.load import FAILED, OUTAGE, PATIENT_S, Clients, load
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.patched_children import SLOW
from tests.support.waiting import wait_until
from tests.support.watch import Watch

#: The issue's bound for being back in service, seconds.
BACK_S = 10.0


def joined(fleet: Fleet) -> bool:
    """Has the manager heard every server since it came up, and does it count them all as running?"""
    status = fleet.status()
    up = [node for node in status.get("nodes", ()) if node["state"] in ("up", "running")]
    return len(up) == len(fleet.servers) and fleet.settled()


def manager_gone(fleet: Fleet, *, stop_s: float, gone_s: float) -> None:
    """Kill it and start it at once; stop it; kill it and leave it away."""
    last = fleet.manager_epoch()
    for what, away_s in (("killed", 0.0), ("stopped", stop_s), ("gone", gone_s)):
        began = time.monotonic()
        if what == "stopped":
            with stopped(psutil.Process(fleet.manager.pid)):
                time.sleep(away_s)
        else:
            fleet.manager.kill()
            time.sleep(away_s)
            fleet.manager.start()
        up = time.monotonic()
        with Pace() as pace:
            # Only then: before, its own status could be of a moment ago.
            wait_until(lambda: joined(fleet), f"the manager, {what}, is back with all its servers", 6 * BACK_S)
            back = time.monotonic() - up
        pace.check(f"manager {what}: back in service", back, BACK_S, away=f"{up - began:.1f} s")
        epoch = fleet.manager_epoch()
        assert epoch >= last, "an epoch went back"
        last = epoch
        time.sleep(1.0)


def check(fleet: Fleet, clients: Clients) -> None:
    """Nothing failed, nothing was wrong."""
    records = clients.records()
    records.assert_right()
    print(records.summary())
    failed = records.of(FAILED, OUTAGE)
    measured("manager away: failed calls", len(failed), "calls", "0", of=len(records))
    assert len(failed) == 0, (failed.rows[:5], [report["stats"] for report in clients.reports], fleet.logs()[-3000:])
    measured("manager away: longest call of a client", records.longest() * 1e3, "ms")
    epochs = records.rows["epoch"]
    assert len(records) > 500 and epochs.min() > 0
    fleet.assert_no_traceback()


@pytest.mark.fault("F03", "F07", ci="1 kill, 1 stop of 3 s, 8 s away")
def test_manager_killed_stopped_and_gone(fleet: Fleet) -> None:
    with Watch(fleet) as watch, load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S) as clients:
        manager_gone(fleet, stop_s=3.0, gone_s=8.0)
        check(fleet, clients)
    watch.assert_right()


@pytest.mark.fault("F03", whole=50)
@pytest.mark.fault("F07", whole=50)
@pytest.mark.slow
def test_manager_killed_and_stopped_again_and_again(real_fleet: Fleet, amount: int | None) -> None:
    with Watch(real_fleet) as watch, load(real_fleet.manager.address, real_fleet.folder) as clients:
        for _ in range(amount or 3):
            manager_gone(real_fleet, stop_s=2.0, gone_s=1.0)
        check(real_fleet, clients)
    watch.assert_right()


@pytest.mark.fault("F03", "F07", whole="down for 10 minutes, a stop of 60 s")
@pytest.mark.slow
def test_manager_gone_for_ten_minutes(real_fleet: Fleet) -> None:
    with Watch(real_fleet) as watch, load(real_fleet.manager.address, real_fleet.folder) as clients:
        manager_gone(real_fleet, stop_s=60.0, gone_s=600.0)
        check(real_fleet, clients)
    watch.assert_right()


@pytest.mark.fault("F03", ci="1 kill with the state lost", whole="the same")
def test_manager_and_its_state_lost(fleet: Fleet) -> None:
    """kill -9 and an empty disk: the servers bring the map back, no call fails, and nothing is dropped."""
    with Watch(fleet) as watch, load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S) as clients:
        time.sleep(1.0)
        before = fleet.manager_epoch()
        fleet.manager.kill()
        for path in (fleet.folder / "state").iterdir():
            os.unlink(path)
        fleet.manager.start()
        up = time.monotonic()
        with Pace() as pace:
            wait_until(lambda: joined(fleet), "a manager without state is back with all its servers", 6 * BACK_S)
            back = time.monotonic() - up
        pace.check("manager killed and its state file lost: back in service", back, BACK_S)
        assert fleet.manager_epoch() > before
        time.sleep(1.0)
        check(fleet, clients)
    watch.assert_right()


@pytest.mark.fault("F03", ci="1 kill while a worker recovers", whole="the same")
def test_issue_a_manager_that_restarts_while_a_worker_recovers(make_fleet: Callable[..., Fleet]) -> None:
    """Its server could not join before the worker served. It was declared dead, and all its shards went to others."""
    slowly = ("call=tests.support.patched_children:slow",)
    fleet = make_fleet(2, memory="32M", heartbeat_ms=500, patches=slowly, manager_arguments=("--dead-after", "10"))
    server = fleet.servers[0]
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        keys = [(f"k/{number}", b"%d" % number) for number in range(50)]
        assert all(client.put(key, value) for key, value in keys)
        shards, before, slow = fleet.shards_of(server), server.worker_pid(), server.folder / SLOW
        slow.touch()
        os.kill(before, signal.SIGKILL)
        fleet.manager.kill()
        fleet.manager.start()
        wait_until(lambda: joined(fleet), "the manager hears all servers, while the worker recovers", 6 * BACK_S)
        assert fleet.settled() and fleet.shards_of(server) == shards, fleet.status()
        slow.unlink()
        wait_until(lambda: server.succeeded(before), "the worker serves again")
        assert [client.get(key) for key, _ in keys] == [value for _, value in keys]
