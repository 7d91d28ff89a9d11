"""Servers that may open few files, and more connections than that: who is in is served, and others get in later."""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from simm.client import Client
from simm.rpc import encode
from simm.wire import messages as M
from simm.wire.hello import client_hello
from tests.support.fleet import Fleet
from tests.support.measures import measured
from tests.support.pace import Pace
from tests.support.standing import descriptors
from tests.support.waiting import WAIT_S, wait_until

HELLO = encode(client_hello(M.Role.CLIENT, namespace="many"), 1)
#: A new client gets in so soon after the others have gone, seconds.
RECOVERS_S = 1.0


def connect(address: Any, stack: contextlib.ExitStack) -> bool:
    """Open a connection that stays; return whether the server let it in."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    stack.callback(sock.close)
    sock.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.connect(address)
        sock.sendall(HELLO)
        return sock.recv(1 << 16) != b""
    return False


def all_well(client: Client, count: int) -> None:
    """Values go in and out, without a failure."""
    for number in range(count):
        value = b"%d " % number * 1000
        assert client.put(f"k/{number % 20}", value) and client.get(f"k/{number % 20}") == value, number


@pytest.mark.fault("F13", ci=(1, 128), whole=(600, 64, 96, 128, 256))
def test_more_connections_than_descriptors(make_fleet: Callable[..., Fleet], amount: tuple[int, ...]) -> None:
    seconds, *limits = amount
    for limit in limits:
        exhaust(make_fleet(1, memory="32M", patches=[f"limit={limit}"]), limit, seconds / len(limits))


def exhaust(fleet: Fleet, limit: int, seconds: float) -> None:
    """Use up the descriptors of manager, worker and stream again and again, for so long."""
    server = fleet.servers[0]
    worker = fleet.ask_manager(M.MapGet(0, 0)).workers[0]
    host, _, port = fleet.manager.address.rpartition(":")
    targets: dict[str, Any] = {
        "manager": (host, int(port)), "worker": server.uds(), "stream": (worker.host, worker.port),
    }  # fmt: skip
    family = [fleet.manager.pid, *(each.pid for each in server.family())]
    until = time.monotonic() + seconds
    rounds, slowest = 0, 0.0
    with contextlib.ExitStack() as clients, Pace() as pace:
        known = [
            clients.enter_context(Client(fleet.manager.address, path=path, deadline_s=20.0)) for path in ("shm", "tcp")
        ]
        for client in known:
            all_well(client, 5)
        while not rounds or time.monotonic() < until:
            rounds += 1
            with contextlib.ExitStack() as many:
                for name, address in targets.items():
                    let_in = [connect(address, many) for _ in range(limit)]
                    # The positive control: there was no room for all, and there was for some.
                    assert True in let_in[: limit // 8] and False in let_in, (name, let_in)
                assert max(map(descriptors, family)) >= limit // 2, "they are in use"
                for client in known:
                    all_well(client, 20)
                with urllib.request.urlopen(f"http://{fleet.manager.http}/healthz", timeout=WAIT_S) as answer:
                    assert answer.status == 200
            gone = time.monotonic()
            for path in ("shm", "tcp"):
                wait_until(lambda path=path: gets_in(fleet, path), f"a new client by {path}")  # type: ignore[misc]
            slowest = max(slowest, time.monotonic() - gone)
        for client in known:
            assert client.delete_many([f"k/{number}" for number in range(20)]) and client.stats()["outages"] == 0
    measured(f"{limit} descriptors, and {3 * limit} connections: rounds", rounds, "", "10 minutes in the whole dose")
    pace.check("two new clients have stored a value, after the many had gone,", slowest, RECOVERS_S)
    assert [each.pid for each in server.family()] == family[1:], "a process has died"


def gets_in(fleet: Fleet, path: str) -> bool:
    """Connect a new client that may use this path alone, and store a value."""
    with contextlib.suppress(Exception), Client(fleet.manager.address, path=path, deadline_s=20.0) as client:
        return client.put("new", b"value") and client.delete("new")
    return False
