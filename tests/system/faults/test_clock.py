"""The wall clock jumps by an hour and by ten years, in servers and clients: nothing dies, nothing is evicted."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable

import pytest

from tests.support.fleet import PATIENT_SERVERS, Fleet
from tests.support.load import FAILED, MISS, OUTAGE, PATIENT_S, load
from tests.support.measures import measured
from tests.support.waiting import wait_until
from tests.support.watch import Watch

HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
JUMPS_S = (HOUR_S, -HOUR_S, 10 * YEAR_S, -10 * YEAR_S, 0.0)
#: Heartbeats of each server that are waited for after a jump.
BEATS = 5
#: No machine is so busy that a server is silent for so many heartbeats, and an hour is longer.
PATIENCE = ("--suspect-after", "150", "--dead-after", "200")


def wait_heard(fleet: Fleet) -> None:
    """Wait until each server's heartbeat has come, and another one, and so on: timers go on."""
    for _ in range(BEATS):
        began = time.monotonic()

        def heard(began: float = began) -> bool:
            now = time.monotonic()
            nodes = fleet.status().get("nodes", ())
            return len(nodes) == len(fleet.servers) and all(node["silent_s"] < now - began for node in nodes)

        wait_until(heard, "a heartbeat of each server")


@pytest.mark.fault("F17", ci=5, whole=100)
def test_wall_clock_jumps(make_fleet: Callable[..., Fleet], nothing_is_left: object, amount: int) -> None:
    """A deadline on the wall clock would pass at once, and a timer on it would wait for an hour."""
    fd, path = tempfile.mkstemp()
    try:
        os.pwrite(fd, struct.pack("<d", 0.0), 0)
        patches = [f"clock={path}"]
        fleet = make_fleet(2, heartbeat_ms=200, manager_arguments=PATIENCE, patches=[*patches, *PATIENT_SERVERS])
        with Watch(fleet) as watch:
            with load(
                fleet.manager.address, fleet.folder, patches=patches, deletes=False, deadline_s=PATIENT_S
            ) as clients:
                before, epoch = fleet.status(), fleet.manager_epoch()
                for number in range(amount):
                    jump = JUMPS_S[number % len(JUMPS_S)]
                    os.pwrite(fd, struct.pack("<d", jump), 0)
                    time.sleep(0.0 if amount < 10 else 5.0)
                    wait_heard(fleet)
                assert fleet.manager_epoch() == epoch, "the map has changed"
                records = clients.records()
        watch.assert_right()
        records.assert_right()
        print(records.summary())
        assert records.between(clients.ready_at, float("inf")).count(FAILED, OUTAGE, MISS) == 0, records.summary()
        said = fleet.logs()
        assert "-> suspect" not in said and "-> dead" not in said
        evictions = [
            sum(server.worker_stats()["evictions"].values()) + server.worker_stats()["set_evictions"]
            for server in fleet.servers
        ]
        assert evictions == [0, 0]
        assert [node["state"] for node in before["nodes"]] == [node["state"] for node in fleet.status()["nodes"]]
        what = f"wall clock jumps {amount} times by an hour or ten years"
        measured(f"{what}: false deaths, evictions, failed calls", 0, "", "0", of=len(records))
    finally:
        os.close(fd)
        os.unlink(path)
