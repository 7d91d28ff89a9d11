"""The wall clock jumps by an hour and by ten years, in servers and clients: nothing dies, nothing is evicted."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable

import pytest

from tests.support.fleet import Fleet
from tests.support.load import FAILED, MISS, OUTAGE, PATIENT_S, load
from tests.support.measures import measured
from tests.support.watch import Watch

HOUR_S = 3600.0
YEAR_S = 365 * 24 * HOUR_S
JUMPS_S = (HOUR_S, -HOUR_S, 10 * YEAR_S, -10 * YEAR_S, 0.0)


@pytest.mark.fault("F17", ci=5, whole=100)
def test_wall_clock_jumps(make_fleet: Callable[..., Fleet], nothing_is_left: object, amount: int) -> None:
    """Heartbeats are short here: with a deadline on the wall clock a second would do to be declared dead."""
    fd, path = tempfile.mkstemp()
    try:
        os.pwrite(fd, struct.pack("<d", 0.0), 0)
        patches = [f"clock={path}"]
        fleet = make_fleet(2, heartbeat_ms=200, patches=patches)
        with Watch(fleet) as watch:
            with load(
                fleet.manager.address, fleet.folder, patches=patches, deletes=False, deadline_s=PATIENT_S
            ) as clients:
                before, epoch = fleet.status(), fleet.manager_epoch()
                for number in range(amount):
                    jump = JUMPS_S[number % len(JUMPS_S)]
                    os.pwrite(fd, struct.pack("<d", jump), 0)
                    time.sleep(0.8 if amount < 10 else 6.0)
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
