"""One worker as a client reaches it: what a dead, a stopped or a slow one costs, and what is read from it meanwhile."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_routing import KEYS, WAIT_S, full, published, until, value_of
from town import ALL, Town

from simm import session as session_module
from simm import target
from simm.errors import TransportError
from simm.target import BACKOFF_S, STALE_S, Breaker, Reach, Target
from simm.tcppath import TcpPath


@pytest.fixture
def town() -> Iterator[Town]:
    session_module._BURIED.clear()
    with Town(2) as running:
        yield running
    session_module._BURIED.clear()


def test_pauses_double_with_jitter_and_start_over() -> None:
    for jitter in (0.5, 1.0):
        breaker = Breaker(lambda low, high, jitter=jitter: low + (high - low) * (jitter - 0.5) * 2)
        now, pauses = 1000.0, []
        for _ in range(8):
            assert breaker.due(now)
            breaker.failed(now)
            pauses.append(breaker.retry_at - now)
            assert not breaker.due(now)
            assert not breaker.due(breaker.retry_at - 1e-6)
            now = breaker.retry_at
        wanted = [min(BACKOFF_S[1], BACKOFF_S[0] * 2**step) * jitter for step in range(8)]
        assert pauses == pytest.approx(wanted)
        breaker.worked()
        assert breaker.failures == 0
        breaker.failed(now)
        assert breaker.retry_at - now == pytest.approx(BACKOFF_S[0] * jitter)


def refused(*_: Any, **__: Any) -> Any:
    raise TransportError("nobody there")


def test_a_dead_server_is_tried_at_the_breakers_pace_and_by_no_operation(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    clock = [1000.0]

    def connecting(*_: Any, **__: Any) -> Any:
        tries.append(clock[0])
        refused()

    monkeypatch.setattr(target, "WorkerSession", connecting)
    monkeypatch.setattr(TcpPath, "connect", refused)
    reach = Reach("n", "auto", WAIT_S, clock=lambda: clock[0])
    there = Target(town.nodes[0].info, reach)
    assert not there.ready()
    assert len(tries) == 1
    for _ in range(1000):
        assert not there.ready()  # operations
    assert len(tries) == 1
    assert there.path == "down"
    for _ in range(60 * 20):  # a minute of ticks
        clock[0] += 0.05
        if there.wants_connection(clock[0]):
            there.connect_soon()
            until(lambda: not there.connecting, "that try ends")
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert 60 <= len(tries) <= 130
    assert gaps[0] <= 0.15
    assert all(0.4 <= gap <= 1.1 for gap in gaps[6:])
    monkeypatch.undo()
    there.connect_soon()
    until(lambda: there.path == "shm", "it is back")
    assert there.ready()
    assert there.breaker.failures == 0
    there.close()
    there.connect_soon()
    assert not there.connecting


def test_the_first_connection_costs_a_deadline_at_most_and_only_once(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that hangs, say: it goes on in the background, and all threads have waited together."""
    go_on = threading.Event()
    tries: list[int] = []

    def hanging(*_: Any, **__: Any) -> Any:
        tries.append(1)
        go_on.wait(WAIT_S)
        refused()

    monkeypatch.setattr(target, "WorkerSession", hanging)
    monkeypatch.setattr(TcpPath, "connect", refused)
    there = Target(town.nodes[0].info, Reach("n", "auto", 0.3))
    began = time.monotonic()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(there.ready())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(there.ready() for _ in range(1000))
    assert answers == [False] * 4
    assert tries == [1]
    assert time.monotonic() - began < 10.0
    assert not there.wants_connection(time.monotonic() + 100)  # that one is still under way
    go_on.set()
    until(lambda: not there.connecting, "it ends")
    assert there.wants_connection(time.monotonic() + 100)


def test_a_stopped_worker_is_read_from_and_costs_one_deadline(town: Town) -> None:
    client = full(town, "shm", deadline_s=0.3)
    with town.nodes[0].worker.frozen():
        failures = client.stats()["outages"]
        assert client.put("k0", b"v") is False
        assert [client.put("k0", b"v") for _ in range(200)] == [False] * 200
        assert client.stats()["outages"] - failures <= 1
        there = client._routes.target(client.digest("k1"))
        assert there is not None
        # Long after: its heart has stood still, the manager still says that these shards are its own.
        there.tend(time.monotonic() + 100 * STALE_S)
        assert client.get("k1") == value_of("k1")
        assert client.exists_many(KEYS) == [True] * len(KEYS)
        # Without a manager nobody would tell us if they were another's by now.
        town.manager.stop()
        until(lambda: client.stats()["manager"] != "connected", "the client notices")
        there.tend(time.monotonic() + 100 * STALE_S)
        assert client.get("k1") is None
    until(lambda: client.put("k0", b"w"), "it is back")
    assert client.get("k1") == value_of("k1")


def test_a_dead_servers_arena_is_let_go_before_the_manager_knows(town: Town) -> None:
    client = full(town, "shm", deadline_s=2.0)
    assert client.get("k0") == value_of("k0")
    began = time.monotonic()
    town.nodes[0].die()
    until(lambda: client.get("k0") is None, "its keys are misses")
    print(f"misses after {time.monotonic() - began:.2f} s")
    assert client.exists("k0") is False
    assert client.view("k0") is None
    assert client.stats()["workers"][0]["path"] == "down"
    town.own({1: ALL})
    town.instruct()
    published(town, client)
    assert client.put("k0", b"v")
    assert client.get("k0") == b"v"


def test_what_went_by_tcp_for_want_of_an_answer_goes_by_shm_later(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    town.settled({0: ALL})
    with monkeypatch.context() as first:
        first.setattr(target, "WorkerSession", refused)
        client = town.client("auto")
        assert client.put("k", b"v")
        assert client.stats()["workers"][0]["path"] == "tcp"
    there = client._routes.target(client.digest("k"))
    assert there is not None
    assert not there.wants_connection(time.monotonic())
    assert there.wants_connection(time.monotonic() + 100)
    there.connect_soon()
    until(lambda: there.path == "shm", "it does")
    assert client.get("k") == b"v"
    assert there.tcp is None


def test_pooled_connections_to_a_server_that_was_restarted_are_replaced_together(town: Town) -> None:
    client = full(town, "tcp")
    there = client._routes.target(client.digest("k0"))
    assert there is not None
    assert there.tcp is not None
    channels = [there.tcp._take(time.monotonic() + WAIT_S) for _ in range(5)]
    for channel in channels:
        there.tcp._give(channel)
        channel.sock.shutdown(socket.SHUT_RDWR)
    assert client.get("k0") == value_of("k0")
    assert client.put("k0", b"v")
    assert client.stats()["outages"] == 0
