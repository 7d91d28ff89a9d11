"""A data server of three killed, stopped cleanly, and back again; all of them restarted in turn. All under load."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import pytest

from tests.support.fleet import Fleet, Server
from tests.support.load import FAILED, GET, MISS, OK, OUTAGE, PATIENT_S, PUT, Clients, Records, load
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.waiting import WAIT_S, wait_until
from tests.support.watch import Watch

#: The issue's bounds, seconds.
MISSES_S, OWNED_S, BACK_S, STOP_S = 1.0, 10.0, 30.0, 5.0
#: A call that takes so long has waited for somebody.
WAITED_S = 0.5
#: So many keys in a row without a failure are of all servers.
STREAK = 60


def owned_by_others(fleet: Fleet, gone: Server) -> bool:
    """Has every shard an owner, and none of them the server that has gone?"""
    status = fleet.status()
    if not status or status["shards_without_owner"]:
        return False
    nodes = [node for node in status["nodes"] if node["name"] == gone.name]
    return not any(worker["shards"] for node in nodes for worker in node["workers"])


def failed_puts_end(records: Records, begin: float, end: float) -> float:
    """How long after ``begin`` the last put or delete failed."""
    return records.between(begin, end).of(FAILED, kind=PUT).last_end(begin) - begin


def patient(fleet: Fleet, **settings: Any) -> AbstractContextManager[Clients]:
    """Two clients whose calls do not fail because the machine is busy."""
    return load(fleet.manager.address, fleet.folder, deadline_s=PATIENT_S, **settings)


def served(clients: Clients, least: int) -> None:
    """Wait until each client has so many successes in a row."""
    for client in clients.clients:
        client.wait_streak(least, "calls succeed", WAIT_S)


def killed_and_back(fleet: Fleet) -> None:
    """kill -9, gone until others own its shards, and back."""
    server = fleet.servers[1]
    with Pace() as pace, Watch(fleet) as watch, patient(fleet) as clients:
        time.sleep(1.0)
        share = fleet.shards_of(server)
        killed = time.monotonic()
        server.kill()
        gone_at = time.monotonic()
        wait_until(lambda: owned_by_others(fleet, server), "survivors own all shards", 6 * OWNED_S)
        owned = time.monotonic() - gone_at
        served(clients, 300)
        start = time.monotonic()
        server.start()
        ready = time.monotonic() - start
        wait_until(lambda: fleet.shards_of(server) >= share * 0.9 and fleet.settled(), "it has its share", 3 * BACK_S)
        back = time.monotonic() - start
        time.sleep(1.0)
        over = time.monotonic()
        records = clients.records()
    watch.assert_right()
    records.assert_right()
    print(records.summary())
    gone = records.between(killed, start)
    print("away:", gone.summary())
    # Not those that were under way when it was killed.
    assert records.within(clients.ready_at, killed).count(FAILED, OUTAGE) == 0
    # Its keys are misses from then on. Only calls without success have waited for it: others were answered.
    without = gone.of(MISS, FAILED, OUTAGE).rows
    waited = without[without["took"] > pace.limit(WAITED_S)]
    last = float(waited["began"].max()) - killed if len(waited) else 0.0
    pace.check("data server killed: last call that had to wait for it began after", last, MISSES_S,
               waited=len(waited), longest=f"{gone.longest() * 1e3:.0f} ms")  # fmt: skip
    pace.check("data server killed: owned by survivors after", owned, OWNED_S)
    failing = failed_puts_end(records, killed, start)
    pace.check("data server killed: puts to its keys failed for", failing, OWNED_S + 1.0)
    measured("data server back: READY after", ready, "s")
    pace.check("data server back: serves its share again after", back, BACK_S, shards=fleet.shards_of(server))
    returned = records.between(start, over)
    measured("data server back: failed calls while its shards move back", returned.count(FAILED, OUTAGE), "calls", "0",
             of=len(returned))  # fmt: skip
    assert returned.count(FAILED, OUTAGE) == 0, returned.summary()
    assert gone.count(OK, kind=GET) > 100 and gone.count(OK, kind=PUT) > 100, "the others serve on"
    fleet.assert_no_traceback()


def test_data_server_killed_and_back(fleet: Fleet) -> None:
    killed_and_back(fleet)


@pytest.mark.slow
def test_data_server_killed_and_back_with_default_heartbeats(real_fleet: Fleet) -> None:
    killed_and_back(real_fleet)


def test_data_server_stopped_cleanly_comes_back_warm(fleet: Fleet) -> None:
    """With --warm its shards wait for it, and all its values are there again."""
    server = fleet.servers[2]
    with Watch(fleet) as watch:
        server.end()  # the one without --warm; its shards go to the others and come back
        server.start("--warm")
        fleet.wait_settled()
        share = fleet.shards_of(server)
        with Pace() as pace, patient(fleet, deletes=False) as clients:
            time.sleep(1.0)
            entries = server.worker_stats()["entries"]
            stop = time.monotonic()
            server.end()
            server.start("--warm")
            wait_until(lambda: fleet.shards_of(server) == share and fleet.settled(), "it has its shards", 3 * BACK_S)
            back = time.monotonic()
            kept = server.worker_stats()["entries"]
            served(clients, STREAK)  # they have connected to it again
            connected = time.monotonic()
            time.sleep(0.5)
            records = clients.records()
        server.end()
        server.start()  # as it was
        fleet.wait_settled()
    watch.assert_right()
    records.assert_right()
    print(records.summary())
    pace.check("data server restarted with --warm: stopped until it serves again", back - stop, BACK_S)
    assert entries and kept >= entries, f"{entries} values before, {kept} after"
    after = records.between(connected, float("inf"))
    assert after.count(FAILED, OUTAGE, MISS) == 0, after.summary()
    measured("data server restarted with --warm: values there again", kept / entries * 100, "%", "100 %", of=entries)
    away = records.between(stop, back)
    measured("data server restarted with --warm: failed calls meanwhile", away.count(FAILED, OUTAGE), "calls", "",
             of=len(away))  # fmt: skip
    fleet.assert_no_traceback()


def rolling_restart(fleet: Fleet, rounds: int) -> None:
    """Every server in turn, ``rounds`` times: stopped with SIGTERM and started when it has ended."""
    with Pace() as pace, Watch(fleet) as watch, patient(fleet) as clients:
        time.sleep(1.0)
        began = time.monotonic()
        stops = []
        for _ in range(rounds):
            for server in fleet.servers:
                stops.append(server.end())
                server.start()
                fleet.wait_settled()
        over = time.monotonic()
        time.sleep(0.5)
        records = clients.records()
    watch.assert_right()
    records.assert_right()
    during = records.between(began, over)
    print(during.summary())
    failed = during.count(FAILED, OUTAGE)
    measured(f"rolling restart, {rounds} rounds of {len(fleet.servers)}: failed calls", 100 * failed / len(during), "%",
             "0.1 %", calls=len(during), misses=during.count(MISS), seconds=round(over - began, 1))  # fmt: skip
    pace.check("a data server's clean stop", max(stops), STOP_S)
    measured("rolling restart: longest call", during.longest() * 1e3, "ms")
    assert failed < 0.001 * len(during), during.summary()
    fleet.assert_no_traceback()


@pytest.mark.fault("F19", ci="1 round of 3")
def test_rolling_restart(fleet: Fleet) -> None:
    rolling_restart(fleet, 1)


@pytest.mark.fault("F19", whole=20)
@pytest.mark.slow
def test_rolling_restart_again_and_again(real_fleet: Fleet, amount: int | None) -> None:
    rolling_restart(real_fleet, amount or 5)
