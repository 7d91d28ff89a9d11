"""Misses whose server does not answer in time, told from those whose server is gone: in the client and at /metrics."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from simm.client import Client
from tests.support.fleet import Fleet, Server
from tests.support.http_page import page
from tests.support.processes import new_folder
from tests.support.several_hosts import HostClient, separate
from tests.support.waiting import wait_until

REASONS = ("absent", "timeout", "unreachable")


@pytest.fixture
def fleet(nothing_is_left: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    separate(monkeypatch)
    # A server that is silent for a minute has died, and its shards would move.
    with Fleet(new_folder(), 2, memory="64M", heartbeat_ms=12_000, server_arguments=("--http", "127.0.0.1:0")) as made:
        yield made


@pytest.fixture
def client(fleet: Fleet) -> Iterator[HostClient]:
    """On the host of the first server."""
    with HostClient(fleet.servers[0].name, fleet.manager.address, namespace="late", deadline_s=2.0) as made:
        assert made.wait_ready(60)
        yield made


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Stop all processes of a server for a while."""
    server.send_signal(signal.SIGSTOP, family=True)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT, family=True)


def keys_of(client: Client, server: Server, count: int) -> list[str]:
    """Return keys that a server owns."""
    found = (f"key {number}" for number in range(100_000))
    owner = client._routes.target
    own = (key for key in found if (at := owner(client.digest(key))) is not None and at.info.node == server.name)
    return list(itertools.islice(own, count))


def shown(server: Server, path: str) -> dict[str, float]:
    """Return the misses that a server's page has for a path, by reason."""
    text = page(server.http, "/metrics")[1]
    found = dict.fromkeys(REASONS, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            reason = sample.labels.get("reason", "")
            if sample.name == "simm_misses_total" and sample.labels["path"] == path and reason in found:
                found[reason] += sample.value
    return found


def counted(client: Client, path: str) -> dict[str, int]:
    misses = client.stats()["paths"][path]["misses"]
    return {reason: misses[reason] for reason in REASONS}


@pytest.mark.parametrize("single", [False, True])
def test_a_server_elsewhere_that_hangs_and_one_that_is_gone(fleet: Fleet, client: HostClient, single: bool) -> None:
    here, there = fleet.servers
    keys = keys_of(client, there, 5)
    # A value of the host's own: only a client that shares memory with a server can tell one of them.
    assert client.put_many(keys + keys_of(client, here, 1), [b"v"] * 6) == [True] * 6 and client.get_many(keys)
    asked = keys[:1] if single else keys
    with stopped(there):
        got = [client.get(keys[0])] if single else client.get_many(keys)
        assert got == [None] * len(asked)
        wanted = {"absent": 0, "timeout": len(asked), "unreachable": 0}
        assert counted(client, "tcp") == wanted
        wait_until(lambda: shown(here, "tcp") == wanted, lambda: f"the page of its host has them: {shown(here, 'tcp')}")
    wait_until(lambda: client.get(keys[0]) == b"v", "it goes on")
    late, gone = counted(client, "tcp")["timeout"], counted(client, "tcp")["unreachable"]
    there.kill()
    assert client.get_many(keys) == [None] * 5
    assert counted(client, "tcp") == {"absent": 0, "timeout": late, "unreachable": gone + 5}
    assert counted(client, "shm") == dict.fromkeys(REASONS, 0)
    wait_until(lambda: shown(here, "tcp") == counted(client, "tcp"), "the page has these too")


def test_a_worker_of_the_host_that_hangs(fleet: Fleet, client: HostClient) -> None:
    here = fleet.servers[0]
    (key,) = keys_of(client, here, 1)
    assert client.put(key, b"v") and client.get(key) == b"v"
    with stopped(here):
        with client.view(key) as view:  # a pin is the worker's to give
            assert not view
        assert counted(client, "shm") == {"absent": 0, "timeout": 1, "unreachable": 0}
        assert client.get(key) == b"v", "which asks nobody"
    wait_until(lambda: shown(here, "shm")["timeout"] == 1, "it sees it when it goes on")
    assert shown(here, "shm")["unreachable"] == 0 and shown(here, "tcp")["timeout"] == 0
