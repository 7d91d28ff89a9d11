"""F31: an empty server joins a cluster that is full: it gets its share, and nobody's call fails."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from simm.client import Client
from tests.support.fleet import PATIENT_SERVERS, Fleet
from tests.support.load import FAILED, GET, OUTAGE, PATIENT_S, PUT, load
from tests.support.measures import measured
from tests.support.waiting import wait_until

FULL = 0.95
VALUE = bytes(64 << 10)


def fill(fleet: Fleet, servers: int) -> None:
    """Put until each server that runs is full: FULL, or so full that it evicts, as others hold the rest for puts."""
    with Client(fleet.manager.address, namespace="filling", deadline_s=PATIENT_S) as client:
        number = 0
        before = [evicted(fleet, each) for each in range(servers)]
        while any(used(fleet, each) < FULL and evicted(fleet, each) == before[each] for each in range(servers)):
            assert number < 1 << 14, [used(fleet, each) for each in range(servers)]
            assert all(client.put_many([f"{number + each}" for each in range(64)], [VALUE] * 64))
            number += 64


def used(fleet: Fleet, number: int) -> float:
    stats = fleet.servers[number].worker_stats()
    return 1.0 - float(stats["free_bytes"]) / float(stats["data_bytes"])


def evicted(fleet: Fleet, number: int) -> int:
    return sum(fleet.servers[number].worker_stats()["evictions"].values())


def join_when_full(fleet: Fleet, seconds: float) -> None:
    """Start the last server while two clients work on the others, which are full."""
    new = fleet.servers[-1]
    new.end()
    fleet.wait_settled("the others have its shards")
    fill(fleet, len(fleet.servers) - 1)
    with load(fleet.manager.address, fleet.folder, 2, deadline_s=PATIENT_S, keys=20) as clients:
        began = time.monotonic()
        time.sleep(seconds)
        joined = time.monotonic()
        new.start()
        fleet.wait_settled("it has its share")
        settled = time.monotonic()
        puts = new.worker_stats()["puts"]
        wait_until(lambda: new.worker_stats()["puts"] > puts, "writes go to it")
        time.sleep(seconds / 2)
        records = clients.records()
    records.assert_right()
    assert records.count(FAILED, OUTAGE) == 0, (
        f"{records.summary()}; it joined from {joined:.2f} to {settled:.2f}\n{fleet.last_words()}"
    )
    shares = [fleet.shards_of(server) for server in fleet.servers]
    assert shares[-1] > 0.5 * max(shares), shares
    for name, kind in (("GET", GET), ("PUT", PUT)):
        before = records.between(began, joined).of(*range(8), kind=kind)
        during = records.between(joined, settled).of(*range(8), kind=kind)
        for column, of in (("took", name), ("processor", f"{name}'s processor time")):
            what = f"an empty server joins a full cluster: p99 of {of}"
            then = before.quantile(0.99, column)
            measured(what, during.quantile(0.99, column) * 1e3, "ms", "20 % more", before=f"{then * 1e3:.2f} ms")
    fleet.assert_no_traceback()


@pytest.mark.fault("F31", ci=1)
def test_an_empty_server_joins_a_full_cluster(make_fleet: Callable[..., Fleet]) -> None:
    join_when_full(make_fleet(2, memory="32M", patches=PATIENT_SERVERS), 0.6)


@pytest.mark.fault("F31", whole=5)
@pytest.mark.slow
def test_empty_servers_join_a_full_cluster(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(3, memory="256M", patches=PATIENT_SERVERS)
    for _ in range(5):
        join_when_full(fleet, 5.0)
