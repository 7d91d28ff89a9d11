"""The storm in a bounded dose, its long form behind ``slow``, and single scenes of it with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.sdk.local_cluster import LocalCluster
from simm.wire.messages import Status
from tests.support.child import READY_S
from tests.support.dose import dosed
from tests.support.pace import Pace
from tests.support.values import value_of
from tests.support.waiting import wait_until
from tests.system.stress.stress import BACK_S, Figures, Server, late_client, storm, victim, victim_key

MIB = 1 << 20


def assert_well(figures: Figures, kills: int) -> None:
    figures.assert_right()
    assert figures.kills == kills and figures.hits > 100 and figures.stored > 100, figures.lines()


@pytest.mark.fault("F01", ci=5)
@pytest.mark.quick
def test_storm(amount: int) -> None:
    kills, seconds = dosed((amount, 7), quick=(1, 2))
    figures = in_time(kills, seconds=seconds, seed=3, writers=3, readers=4, memory="64M")
    assert_well(figures, kills)


#: After a worker's death: another one is there, and serves; how long a call may take, by its deadline. Seconds.
RESTARTED_S, SERVES_S, CALL_S = 2.0, 5.0, 2.0


def in_time(kills: int, **more: Any) -> Figures:
    """Run a storm, and check the times of its kills."""
    with Pace() as pace:
        figures = storm(kills=kills, **more)
    pace.check("worker killed in a storm: another one is there after", max(figures.restarts), RESTARTED_S, kills=kills)
    pace.check("worker killed in a storm: it serves after", max(figures.recoveries), SERVES_S, kills=kills)
    pace.check("worker killed in a storm: longest get or put of a client", figures.longest, CALL_S)
    return figures


@pytest.mark.fault("F01", whole=200)
@pytest.mark.slow
def test_storm_of_kills(amount: int | None) -> None:
    """A server that restarts its worker 60 times within a minute gives up, so the kills are 1.5 s apart."""
    kills = amount or 20
    figures = in_time(kills, seconds=1.5 * kills, seed=8)
    print(figures.lines())
    assert_well(figures, kills)


def test_storm_in_which_nothing_may_get_lost() -> None:
    figures = storm(kills=4, seconds=4, seed=4, writers=2, readers=2, memory="64M", fits=True)
    assert_well(figures, 4)
    assert figures.evictions == 0


@pytest.mark.slow
@pytest.mark.parametrize("fits", [False, True])
def test_storm_long(fits: bool) -> None:
    figures = storm(kills=50, seconds=120, seed=7, fits=fits)
    print(figures.lines())
    assert_well(figures, 50)


@pytest.fixture
def server() -> Iterator[tuple[LocalCluster, Server]]:
    with LocalCluster(memory="32M") as cluster:
        yield cluster, Server(cluster)


def fill(client: Client, rounds: int) -> dict[str, bytes]:
    """All the room there is, several times over; what was stored last."""
    stored = {}
    for number in range(rounds * 32):
        value = value_of(f"f{number % 40}", 9, number, MIB)
        if client.put(f"f{number % 40}", value):
            stored[f"f{number % 40}"] = value
    return stored


def assert_right(client: Client, stored: dict[str, bytes]) -> None:
    hits = 0
    for key, value in stored.items():
        data = client.get(key)
        if data is not None:
            assert data == value
            hits += 1
    assert hits > 5


def test_a_stopped_clients_late_write_hurts_nobody(server: tuple[LocalCluster, Server]) -> None:
    """It holds a grant, is stopped in its copy, the worker dies and comes back, all room is used; then it goes on."""
    cluster, worker = server
    with contextlib.ExitStack() as stack:
        late = stack.enter_context(late_client(worker.uds))
        late.expect("stopped\n")
        os.waitid(os.P_PID, late.pid, os.WSTOPPED | os.WNOWAIT)
        worker.kill()
        client = stack.enter_context(Client(cluster.manager, deadline_s=20.0))
        assert client.wait_ready(BACK_S)
        stored = fill(client, 3)
        assert_right(client, stored)
        held = worker.stats()["granted_bytes"]
        late.send_signal(signal.SIGCONT)
        assert late.answer() == {"first": "broken", "second": Status.STALE_GRANT}
        assert late.wait() == 0
        assert_right(client, stored)
        assert client.get("late") is None
        assert held >= MIB
    stats = worker.wait_at_rest()
    worker.check_copy()
    assert stats["granted_bytes"] == 0


def test_clients_killed_in_the_middle_of_a_put_leave_nothing(server: tuple[LocalCluster, Server]) -> None:
    cluster, worker = server
    before = worker.stats()
    assert before["free_bytes"] == before["data_bytes"]
    for number in range(4):
        with victim(cluster.manager, number):
            puts = worker.stats()["puts"]
            wait_until(lambda puts=puts: worker.stats()["puts"] >= puts + 3, "it puts", READY_S)  # type: ignore[misc]
    worker.wait_at_rest()
    with Client(cluster.manager, deadline_s=20.0) as client:
        client.delete_many([victim_key(number) for number in range(4)])
    stats = worker.wait_at_rest()
    assert stats["entries"] == 0 and stats["free_bytes"] == before["free_bytes"]


def test_views_survive_the_workers_death(server: tuple[LocalCluster, Server]) -> None:
    """A view is held over a kill -9; the client connects anew, and all room is used: its bytes stay."""
    cluster, worker = server
    with Client(cluster.manager, deadline_s=20.0) as client:
        value = value_of("seen", 1, 1, 2 * MIB)
        assert client.put("seen", value)
        view = client.view("seen")
        assert view
        worker.kill()
        wait_until(lambda: client.put("again", b"x" * 100), "the client is connected again")
        assert client.delete("seen")
        fill(client, 3)
        assert bytes(view.data) == value
        view.close()
    worker.wait_at_rest()
    worker.check_copy()
