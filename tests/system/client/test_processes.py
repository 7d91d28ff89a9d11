"""The client across forks, in threads and under asyncio, beyond what ``test_conformance.py`` has."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.ipc.session import WorkerSession
from simm.sdk.tcp import TcpPath
from tests.support.client_values import JOIN_S, MIB, WAIT_S, forked, pattern
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# --- processes and threads --------------------------------------------------------------------


def test_a_forked_child_uses_the_client_and_the_parent_does_not_notice(client: Client, cluster: Any) -> None:
    big = pattern(3 * MIB)
    assert client.put_many(["parent", "big"], [b"from the parent", big]) == [True, True]
    view = client.view("big")
    assert view

    def child() -> bool:
        found = client.get("parent") == b"from the parent" and client.get("big") == big
        stored = client.put("child", b"from the child")
        many = client.put_many([f"c{number}" for number in range(100)], [b"v"] * 100)
        return found and stored and all(many) and asyncio.run(client.get_async("child")) == b"from the child"

    for _ in range(3):
        assert forked(child) == 0
    assert client.get("child") == b"from the child"
    assert all(client.exists_many([f"c{number}" for number in range(100)]))
    assert view.data == big
    assert client.put("parent", b"again")
    assert client.get("parent") == b"again"
    assert client.stats()["outages"] == 0
    view.close()
    del view
    wait_until(lambda: cluster.worker_stats()["pins"] == 0, "the pin goes")


def test_a_grandchild_and_a_child_that_closes(client: Client) -> None:
    client.put("k", b"v")

    def child() -> bool:
        if client.get("k") != b"v":
            return False
        if forked(lambda: client.get("k") == b"v" and client.put("g", b"v")) != 0:
            return False
        client.close()
        with contextlib.suppress(UsageError):
            client.get("k")
            return False
        return True

    assert forked(child) == 0
    assert client.get("k") == b"v"
    assert client.get("g") == b"v"


def test_issue_a_client_that_is_dropped_leaves_no_grants(cluster: Any, namespace: str) -> None:
    """Without close(): its grants stayed with the process, and a few such clients took all that there are."""

    def calm() -> Any:
        """What the worker counts when those that tests before this one have forked are gone."""
        stats = cluster.worker_stats()
        return stats if stats["sessions_quarantined"] == stats["pins"] == 0 else None

    before = wait_until(calm, "nobody is in quarantine")
    kept = Client(cluster.manager, namespace=namespace, path="shm", deadline_s=30.0)
    assert kept.put("kept", b"value")
    view = kept.view("kept")
    assert view is not None
    holder: list[Client] = []

    def child_drops() -> bool:
        """A child that drops its copy does not end the parent's sessions."""
        holder.clear()
        gc.collect()
        return True

    gc.disable()  # as engines do: nothing here waits for the collector
    try:
        del kept
        for number in range(5):
            client = Client(cluster.manager, namespace=namespace, path="shm", deadline_s=30.0)
            sizes = (64, 4096, MIB)
            assert all(client.put_many([f"{number} {size}" for size in sizes], [bytes(size) for size in sizes]))
            assert cluster.worker_stats()["granted_bytes"] > before["granted_bytes"]
            holder.append(client)
            del client
            assert forked(child_drops) == 0 and holder[0].get(f"{number} 64") == bytes(64)
            holder.clear()
    finally:
        gc.enable()

    keys = ("granted_bytes", "pins", "sessions_quarantined")

    def left() -> list[int]:
        stats = cluster.worker_stats()
        return [stats[key] - before[key] for key in keys]

    wait_until(lambda: left()[0] <= 0 and left()[1:] == [1, 1], lambda: f"the view alone is left: {left()}")
    assert bytes(view.data) == b"value"
    view.close()


def _spawned(client: Client, answer: Any) -> None:
    answer.send((client.get("parent"), client.put("child", b"from the child")))
    client.close()


def test_a_spawned_process_gets_a_client_of_its_own(client: Client) -> None:
    client.put("parent", b"v")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_spawned, args=(client, theirs))
    process.start()
    theirs.close()
    assert mine.poll(JOIN_S)
    assert mine.recv() == (b"v", True)
    process.join(JOIN_S)
    assert process.exitcode == 0
    process.close()
    assert client.get("child") == b"from the child"


def test_a_thread_that_comes_during_the_first_connection_waits_for_it(
    cluster: Any, path: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a thread used to get the answer that the server is down."""
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=WAIT_S) as first:
        assert first.put("k", b"v")
    entered, go_on = threading.Event(), threading.Event()

    def held(connect: Any) -> Callable[..., Any]:
        def connecting(*arguments: Any, **more: Any) -> Any:
            entered.set()
            go_on.wait(WAIT_S)
            return connect(*arguments, **more)

        return connecting

    monkeypatch.setattr("simm.sdk.worker_path.WorkerSession", held(WorkerSession))
    monkeypatch.setattr(TcpPath, "connect", held(TcpPath.connect))
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=WAIT_S) as client:
        got: list[bytes | None] = []
        threads = [threading.Thread(target=lambda: got.append(client.get("k"))) for _ in range(4)]
        threads[0].start()
        assert entered.wait(WAIT_S)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(0.05)
        assert got == []
        go_on.set()
        for thread in threads:
            thread.join(JOIN_S)
        assert got == [b"v"] * 4
        assert client.stats()["outages"] == 0


# --- asyncio ----------------------------------------------------------------------------------


def test_a_cancelled_get_of_a_large_value_leaves_the_client_whole(client: Client) -> None:
    value = pattern(16 * MIB)
    assert client.put("big", value)

    async def body() -> None:
        for turns in range(6):
            buffer = bytearray(len(value))
            task = asyncio.ensure_future(client.get_into_async("big", buffer))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            before = zlib.crc32(buffer)
            assert await client.exists_async("big")
            assert zlib.crc32(buffer) == before

    asyncio.run(body())
    assert client.get("big") == value
