"""The storm in a bounded dose, its long form behind ``slow``, and single scenes of it with real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from storm.storm import BACK_S, Figures, Server, count_in, start_client, storm, value_of

from simm.client import Client
from simm.local import LocalCluster
from simm.messages import Status

MIB = 1 << 20


def assert_well(figures: Figures, kills: int) -> None:
    assert not (figures.wrong or figures.back or figures.lost), figures.said
    assert figures.kills == kills and figures.hits > 100 and figures.stored > 100, figures.lines()


def test_storm() -> None:
    figures = storm(kills=5, seconds=7, seed=3, writers=3, readers=4, memory="64M")
    assert_well(figures, 5)


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


def test_the_storms_eye_is_sharp() -> None:
    """What it looks with sees every single byte, and tells versions, keys and lengths apart."""
    old, new = value_of("k", 1, 1, 5000), value_of("k", 1, 2, 5000)
    assert (count_in("k", old), count_in("k", new)) == (1, 2)
    assert count_in("other", old) == -1
    assert count_in("k", old[:-1]) == count_in("k", old[:10]) == count_in("k", b"") == -1
    for at in (8, 40, 64, 2500, 4999):
        assert count_in("k", old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]) == -1
        if at > 16:
            assert count_in("k", old[:at] + new[at:]) == count_in("k", new[:at] + old[at:]) == -1


@pytest.fixture
def server() -> Iterator[tuple[LocalCluster, Server]]:
    with LocalCluster(memory="32M") as cluster:
        yield cluster, Server(cluster)


def until_nothing_is_held(server: Server) -> dict[str, Any]:
    until = time.monotonic() + BACK_S
    while True:
        stats = server.stats()
        if not stats["grants"] and not stats["pins"]:
            return stats
        assert time.monotonic() < until, stats
        time.sleep(0.02)


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
    late = start_client("come-late", worker.uds, 0, writers=0, seed=0, seconds=0)
    assert late.stdout is not None and late.stdout.readline() == "stopped\n"
    os.waitid(os.P_PID, late.pid, os.WSTOPPED | os.WNOWAIT)
    worker.kill()
    with Client(cluster.manager) as client:
        assert client.wait_ready(BACK_S)
        stored = fill(client, 3)
        assert_right(client, stored)
        held = worker.stats()["granted_bytes"]
        late.send_signal(signal.SIGCONT)
        said, _ = late.communicate(timeout=BACK_S)
        assert late.returncode == 0
        assert json.loads(said) == {"first": "broken", "second": Status.STALE_GRANT}
        assert_right(client, stored)
        assert client.get("late") is None
        assert held >= MIB
    stats = until_nothing_is_held(worker)
    worker.check_copy()
    assert stats["granted_bytes"] == 0


def test_clients_killed_in_the_middle_of_a_put_leave_nothing(server: tuple[LocalCluster, Server]) -> None:
    cluster, worker = server
    before = worker.stats()
    assert before["free_bytes"] == before["data_bytes"]
    for number in range(4):
        victim = start_client("be-killed", cluster.manager, number, writers=0, seed=0, seconds=60)
        puts = worker.stats()["puts"]
        until = time.monotonic() + BACK_S
        while worker.stats()["puts"] < puts + 3:
            assert time.monotonic() < until
        victim.kill()
        victim.communicate()
    until_nothing_is_held(worker)
    with Client(cluster.manager) as client:
        client.delete_many([f"victim/{number}" for number in range(4)])
    stats = until_nothing_is_held(worker)
    assert stats["entries"] == 0 and stats["free_bytes"] == before["free_bytes"] and stats["sessions"] <= 1


def test_views_survive_the_workers_death(server: tuple[LocalCluster, Server]) -> None:
    """A view is held over a kill -9; the client connects anew, and all room is used: its bytes stay."""
    cluster, worker = server
    with Client(cluster.manager) as client:
        value = value_of("seen", 1, 1, 2 * MIB)
        assert client.put("seen", value)
        view = client.view("seen")
        assert view is not None
        worker.kill()
        until = time.monotonic() + BACK_S
        while not client.put("again", b"x" * 100):
            assert time.monotonic() < until
        assert client.delete("seen")
        fill(client, 3)
        assert bytes(view.data) == value
        view.close()
    stats = until_nothing_is_held(worker)
    assert stats["pins"] == 0
    worker.check_copy()
