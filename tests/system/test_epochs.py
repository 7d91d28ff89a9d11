"""Advances of a namespace on real servers: no old byte after `advance` has returned, whoever is stopped or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.client import Client, View
from simm.errors import TransportError, UsageError
from simm.sdk.ops.pins import Pins
from tests.support.client_values import PATHS
from tests.support.processes import Cluster
from tests.support.waiting import wait_until

LEASE_MS = 1500


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(
        tmp_path, "128M", heartbeat_ms=200, manager_arguments=("--epoch-lease-ms", str(LEASE_MS))
    ) as cluster:
        yield cluster


def connected(cluster: Cluster, path: str, namespace: str = "weights") -> Client:
    client = Client(cluster.manager, path=path, namespace=namespace, deadline_s=30.0)
    assert client.wait_ready(60.0)
    return client


def got(client: Client, key: str) -> bytes:
    """The value that is there. It is a miss until the client knows the epoch, and while the server's lease has ended:
    on a busy machine heartbeats may be late."""
    value: bytes = wait_until(lambda: client.get(key), f"a value of {key}")
    return value


def seen(client: Client, key: str) -> View:
    """A view of a value that is there, likewise."""
    view: View = wait_until(lambda: client.view(key), f"a view of {key}")
    return view


def pinned(client: Client, keys: list[str], length: int) -> Pins:
    """Pins of values that are there, likewise."""

    def pins() -> Pins | None:
        found = client.pin(keys)
        if found.lengths == [length] * len(keys):
            return found
        found.close()
        return None

    found: Pins = wait_until(pins, f"pins of {keys}")
    return found


@pytest.mark.parametrize("path", [pytest.param("shm", marks=pytest.mark.quick), "tcp"])
def test_old_values_are_gone_on_every_client(own: Cluster, path: str) -> None:
    keys = [f"key {number}" for number in range(100)]
    with connected(own, path) as one, connected(own, "tcp") as other, connected(own, path, "other") as apart:
        assert apart.put("kept", b"kept")
        for turn in range(3):
            assert all(one.put_many(keys, [b"%d %d" % (turn, number) for number in range(100)]))
            assert got(other, "key 1") == b"%d 1" % turn, "the other client knows the epoch"
            view, pins = seen(one, "key 2"), pinned(one, keys[:3], len(b"%d 0" % turn))
            epoch = one.advance()
            for client in (one, other):
                assert client.get_many(keys) == [None] * 100 and not client.exists("key 1")
                assert client.exists_many(keys) == [False] * 100 and not client.view("key 2")
            assert bytes(view.data) == b"%d 2" % turn, "a view pins its value, whatever comes"
            view.close()
            with pins, one.pin(keys[:3]) as later, other.pin(keys[:3]) as others:
                assert later.lengths == others.lengths == [None] * 3
                room = bytearray(len(b"%d 2" % turn))
                assert pins.get_ranges(2, [(0, len(room), room)]) == len(room) and room == b"%d 2" % turn, "so do pins"
            assert one.put("key 1", b"new") and got(one, "key 1") == b"new"
            wait_until(lambda: one.exists("key 1"), "it says so too")
            assert got(other, "key 1") == b"new", "the other client knows the epoch"
            assert one.delete("key 1") and not one.exists("key 1")
        assert one.advance() > epoch and apart.get("kept") == b"kept"
        wait_until(lambda: own.worker_stats()["entries"] == 1, "old entries are dropped")


def test_a_put_that_began_before_is_never_new(own: Cluster) -> None:
    with connected(own, "shm") as one, connected(own, "shm") as other:
        assert asyncio.run(one.advance_async()) > 0
        old = one.digest("key")
        other.advance()
        wait_until(lambda: one.digest("key") != old, "the client knows the epoch")
        assert one.put_digests([old], [memoryview(b"old")]) != [0]
        assert one.get("key") is None and one.get_digests([old], [memoryview(bytearray(3))]) != [3]
        assert "advanced" in one.stats()["last_put_failure"] or one.put_digest(old, memoryview(b"old"))
        assert own.worker_stats()["put_failures"]["old_epoch"]


def test_storm_of_advances(own: Cluster) -> None:
    """A value says when its put had begun; a get that begins after an advance returned finds none from before it."""
    ended = threading.Event()
    #: When the last advance that has returned was called, ns.
    called = [0]
    wrong: list[tuple[int, int]] = []
    found = dict.fromkeys(PATHS, 0)

    def reads(path: str) -> None:
        with connected(own, path) as client:
            while not ended.is_set():
                for number in range(8):
                    at_least = called[0]
                    got = client.get(f"key {number}")
                    if got is not None:
                        found[path] += 1
                        if int(got) < at_least:
                            wrong.append((int(got), at_least))

    def writes() -> None:
        with connected(own, "shm") as client:
            while not ended.is_set():
                for number in range(8):
                    digest = client.digest(f"key {number}")
                    client.put_digest(digest, memoryview(b"%d" % time.monotonic_ns()))

    threads = [threading.Thread(target=reads, args=(path,)) for path in PATHS] + [threading.Thread(target=writes)]
    for thread in threads:
        thread.start()
    try:
        with connected(own, "shm") as client:
            for turn in range(10):
                began, seen = time.monotonic_ns(), dict(found)
                client.advance()
                called[0] = began
                wait_until(lambda seen=seen: all(found[path] > seen[path] + 10 for path in PATHS), "reads find values")  # type: ignore[misc]
                if turn == 3:
                    os.kill(own.worker_stats()["pid"], signal.SIGKILL)
                if turn == 6:
                    own.kill("manager")
                    own.start_manager()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_the_first_advance_waits_for_a_server_that_is_stopped_and_later_ones_for_its_lease(own: Cluster) -> None:
    with connected(own, "shm") as client:
        assert client.put("key", b"first")
        worker = own.worker_stats()["pid"]
        os.kill(worker, signal.SIGSTOP)
        try:
            with pytest.raises(TransportError, match="first advance"):
                client.advance(timeout_s=1.0)
        finally:
            os.kill(worker, signal.SIGCONT)
        client.advance()
        assert client.put("key", b"second") and got(client, "key") == b"second"
        old = client.digest("key")
        os.kill(worker, signal.SIGSTOP)
        try:
            began = time.monotonic()
            client.advance()  # the lease of the stopped server ends
            assert time.monotonic() - began >= LEASE_MS / 1000
            sink = memoryview(bytearray(10))
            # Nobody could tell the arena anything, and a client that has not heard reads there: it misses.
            assert client._gets.read_many([old], [sink]) != [6]
        finally:
            os.kill(worker, signal.SIGCONT)
        wait_until(lambda: client.put("key", b"third") and client.get("key") == b"third", "the worker serves again")


def test_values_are_misses_while_no_manager_answers_for_a_lease_and_come_back(own: Cluster) -> None:
    with connected(own, "shm") as client, connected(own, "shm", "plain") as plain:
        client.advance()
        assert client.put("key", b"value") and plain.put("key", b"plain") and got(client, "key") == b"value"
        own.kill("manager")
        wait_until(lambda: client.get("key") is None, "the lease ends")
        assert plain.get("key") == b"plain" and not client.exists("key")
        own.start_manager()
        assert got(client, "key") == b"value", "a manager answers"


def test_what_cannot_be_advanced(own: Cluster) -> None:
    with connected(own, "shm") as client:
        for bad in ("", "x" * 65):
            with pytest.raises(UsageError):
                client.advance(bad)
        with pytest.raises(UsageError):
            client.advance(timeout_s=0)
    with pytest.raises(UsageError, match="closed"):
        client.advance()
