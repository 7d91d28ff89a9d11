"""Pinned values while workers, streams and clients are killed and shards move: the pinned version, or a miss."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.errors import PeerError
from simm.sdk.ops.pins import Pins
from simm.wire import messages as M
from tests.support.child import Child
from tests.support.client_values import PATHS
from tests.support.fleet import Fleet, Server
from tests.support.values import value_of
from tests.support.waiting import wait_until

MIB = 1 << 20
KEYS = [f"pinned/{number}" for number in range(12)]
LENGTH = 200_000
VALUES = [value_of(key, 1, 1, LENGTH) for key in KEYS]


def connect(fleet: Fleet, path: str = "auto") -> Client:
    return Client(fleet.manager.address, path=path, deadline_s=20.0)


def put_all(client: Client, version: int = 1) -> None:
    for key in KEYS:
        wait_until(lambda: client.put(key, value_of(key, version, version, LENGTH)), f"{key} is stored")  # noqa: B023


def fill(client: Client, count: int = 150) -> None:
    """Store other values, more than an arena of 64 MiB holds."""
    for number in range(count):
        client.put(f"fill/{number}", bytes(MIB))


def hits(pins: Pins) -> int:
    """Return how many values are there; a wrong byte fails the test."""
    rows = np.zeros((len(KEYS), 5000), np.uint8)
    found = 0
    for offset in (0, LENGTH // 2, LENGTH - 5000):
        got = pins.read([(offset, 5000, rows)])
        for number, length in enumerate(got):
            if length is not None:
                assert rows[number].tobytes() == VALUES[number][offset : offset + 5000], (number, offset)
        found = sum(length is not None for length in got)
    return found


def pinned_all(client: Client) -> Pins:
    """Pin all keys. The previous owner has what has not been copied yet.

    While a new map is not at the shard's new owner, or not at the client, a key may be a miss.
    """

    def pinned() -> Pins | None:
        pins = client.pin(KEYS)
        if None not in pins.lengths:
            return pins
        pins.release()
        return None

    found: Pins = wait_until(pinned, "all values can be pinned")
    return found


def has_another(server: Server, worker: int) -> bool:
    """Return whether a server has another worker than this."""
    try:
        return server.worker_pid() != worker
    except PeerError:
        return False


@pytest.mark.parametrize("path", PATHS)
def test_the_worker_is_killed(make_fleet: Callable[..., Fleet], path: str) -> None:
    fleet = make_fleet(1, memory="64M")
    (server,) = fleet.servers
    with connect(fleet, path) as client, connect(fleet, "tcp") as other:
        put_all(client)
        with client.pin(KEYS) as pins:
            assert hits(pins) == len(KEYS)
            worker = server.worker_pid()
            os.kill(worker, signal.SIGKILL)
            assert hits(pins) == len(KEYS), "they need no worker"
            wait_until(lambda: has_another(server, worker), "another worker")
            put_all(other, 2)
            fill(other)  # what is not pinned goes
            assert hits(pins) == len(KEYS)
            with client.pin(KEYS) as later:
                assert later.lengths.count(LENGTH) + later.lengths.count(None) == len(KEYS)
        wait_until(lambda: server.worker_stats()["pins"] == 0, "all pins end")


@pytest.mark.parametrize("path", PATHS)
def test_the_worker_is_stopped(make_fleet: Callable[..., Fleet], path: str) -> None:
    fleet = make_fleet(1, memory="64M")
    (server,) = fleet.servers
    with Client(fleet.manager.address, path=path, deadline_s=3.0) as client:
        put_all(client)
        with client.pin(KEYS) as pins:
            worker = server.worker_pid()
            os.kill(worker, signal.SIGSTOP)
            try:
                assert hits(pins) == len(KEYS)
                with client.pin(KEYS) as more:  # by their versions
                    assert hits(more) == len(KEYS)
            finally:
                os.kill(worker, signal.SIGCONT)
        wait_until(lambda: server.worker_stats()["pins"] == 0, "all pins end")


@pytest.mark.parametrize("path", PATHS)
def test_the_shards_move_away_and_values_are_pinned_in_the_middle(make_fleet: Callable[..., Fleet], path: str) -> None:
    """What is pinned stays at its first server, also what is pinned while its shard is moving."""
    fleet = make_fleet(2, memory="64M", server_arguments=("--move-mib-s", "1"))
    away = fleet.servers[1]
    with connect(fleet, path) as client, connect(fleet) as other:
        put_all(other)
        with client.pin(KEYS) as before:
            assert hits(before) == len(KEYS)
            fleet.ask_manager(M.Drain(1, away.name))
            wait_until(lambda: fleet.shards_of(away) == 0, "its shards are others'")
            with pinned_all(client) as during:
                wait_until(lambda: fleet.node(away).get("drained"), "it is drained")
                put_all(other, 2)
                fill(other)
                assert hits(before) == hits(during) == len(KEYS)
        for server in fleet.servers:
            wait_until(lambda: server.worker_stats()["pins"] == 0, "all pins end")  # noqa: B023


@pytest.mark.parametrize("path", PATHS)
def test_the_data_server_is_killed(make_fleet: Callable[..., Fleet], path: str) -> None:
    """On its host they stay, as their memory is mapped. Elsewhere they are misses, and nothing hangs."""
    fleet = make_fleet(1, memory="64M")
    (server,) = fleet.servers
    with Client(fleet.manager.address, path=path, deadline_s=3.0) as client:
        put_all(client)
        pins = client.pin(KEYS)
        server.kill()
        wait_until(lambda: hits(pins) == (len(KEYS) if path == "shm" else 0), "hits, or misses")
        assert hits(pins) == (len(KEYS) if path == "shm" else 0)
        assert client.pin(KEYS).lengths in ([None] * len(KEYS), [LENGTH] * len(KEYS))
        pins.release()


CLIENT = """
import json, sys
from simm.client import Client
manager, path, keys = json.loads(sys.stdin.readline())
client = Client(manager, path=path)
pins = client.pin(keys)
print(json.dumps(pins.lengths), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("path", PATHS)
def test_the_client_is_killed(make_fleet: Callable[..., Fleet], path: str) -> None:
    """Its pins end with it. While it is stopped it keeps its share, which is bounded."""
    fleet = make_fleet(1, memory="64M")
    (server,) = fleet.servers
    keys = [f"large/{number}" for number in range(50)]
    with connect(fleet) as client:
        assert all(client.put(key, bytes([number + 1]) * MIB) for number, key in enumerate(keys))
        with Child([sys.executable, "-c", CLIENT], talks=True) as child:
            lengths: list[Any] = child.ask([fleet.manager.address, path, keys])
            assert lengths.count(MIB) >= 40
            os.kill(child.pid, signal.SIGSTOP)
            stats = server.worker_stats()
            assert 10 * MIB < stats["pinned_bytes"] <= stats["data_bytes"] * (0.4 if path == "shm" else 0.25)
            for number in range(100):
                assert client.put(f"more/{number}", bytes(MIB)), "there is always something to evict"
            assert server.worker_stats()["pinned_bytes"] == stats["pinned_bytes"]
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: server.worker_stats()["pins"] == 0, "its pins end with it")
