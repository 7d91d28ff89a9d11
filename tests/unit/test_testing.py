"""The fake client of simm.testing: what only the fake has. ``system/client/test_conformance.py`` has the rest."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import simm.testing
import simm.testing.store
from simm.constants import VALUE_BYTES_MAX
from simm.errors import ConfigError, UsageError
from simm.host.buffers import Span
from simm.sdk.batch import DROPPED, HERE
from simm.testing import FakeClient, FakeStore, paths
from simm.wire.status import Status
from tests.support.child import ROOT
from tests.support.client_values import JOIN_S, MIB, WAIT_S, forked
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_a_fake_with_near_copies_traces() -> None:
    """It looked for what only a real client's near copies have."""
    with FakeClient(near_copies=True) as client:
        client.trace(1.0)
        assert client.put("k", b"v") and client.get("k") == b"v" and client.prefetch(["k"]) == 0
        client.trace(None)
        assert type(client) is FakeClient
        client.trace(1.0)


def test_a_fake_keeps_no_thread_process_segment_or_descriptor() -> None:
    def held() -> Counter[Any]:
        maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
        return Counter([*threading.enumerate(), *os.listdir("/proc/self/fd"), *psutil.Process().children(), *maps])

    def more() -> Counter[Any]:
        """What is held now and was not before. What other tests have left may end meanwhile."""
        return held() - before

    before = held()
    client = FakeClient()
    client.put_many(["k", "big"], [b"v", bytes(32 * MIB)])
    client.get_into("big", bytearray(32 * MIB))
    client.view("k")
    client.register(bytearray(8))
    assert not more()
    assert asyncio.run(client.get_async("k")) == b"v"
    # The last call in flight has told its threads to end; the client is not closed.
    wait_until(lambda: not more(), "the threads of the asyncio forms end", WAIT_S)
    client.close()


def test_a_fake_alone_has_a_store_of_its_own() -> None:
    one, other = FakeClient(), FakeClient()
    one.put("k", b"v")
    assert other.get("k") is None
    assert one.store is not other.store
    empty = FakeStore()
    assert FakeClient(store=empty).store is empty  # though it has no values
    with pytest.raises(UsageError, match="store is a FakeStore, not dict"):
        FakeClient(store={})  # type: ignore[arg-type]


def test_issue_memory_above_the_value_limit_is_not_read() -> None:
    """Adapters name memory by address. This one is not mapped: to read it is a segmentation fault."""
    client = FakeClient()
    sources = [Span(4096, VALUE_BYTES_MAX + 1), memoryview(b"v")]
    digests = [client.digest("large"), client.digest("k")]
    assert client.put_digests(digests, sources) == [Status.NO_SPACE, Status.OK]
    assert client.get_many(["large", "k"]) == [None, b"v"]


def test_local_is_a_store_with_so_much_room() -> None:
    with FakeClient.local("1K", namespace="n") as client:
        assert (client.store.capacity, client.namespace) == (1024, "n")
        assert client.put("k", bytes(1025)) is False
        assert client.put("k", bytes(1024)) is True
    with pytest.raises(ConfigError, match="no size"):
        FakeStore("much")
    with pytest.raises(ConfigError, match="negative"):
        FakeStore(-1)


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = FakeStore(300)
    client = FakeClient(store=store)
    for key in "abc":
        client.put(key, bytes(100))
    assert (len(store), store.used_bytes, store.evictions) == (3, 300, 0)
    client.get("a")
    client.put("b", bytes(50))
    client.exists("c")  # does not count as a use
    assert client.put("d", bytes(100))
    assert client.exists_many(list("abcd")) == [True, True, False, True]
    assert (len(store), store.used_bytes, store.evictions) == (3, 250, 1)
    assert client.put("e", bytes(300))
    assert client.exists_many(list("abcde")) == [False] * 4 + [True]
    assert "1 values, 300 of 300 bytes" in repr(store)


def test_a_put_without_room_fails_and_changes_nothing() -> None:
    store = FakeStore(200)
    client = FakeClient(store=store)
    client.put_many(["a", "b"], [b"a" * 100, b"b" * 100])
    assert client.put("a", bytes(201)) is False
    assert client.put_many(["c", "b"], [bytes(201), b"B" * 100]) == [False, True]  # each key has its own result
    assert client.get_many(["a", "b"]) == [b"a" * 100, b"B" * 100]
    view = client.view("a")
    assert view
    part = view.data[:10]
    view.close()
    assert client.put("c", bytes(200)) is False
    assert client.get_many(["a", "b"]) == [b"a" * 100, b"B" * 100]
    assert client.put("a", bytes(200)) is True  # an overwrite frees the old value's room even if a view pins it
    assert bytes(part) == b"a" * 10
    assert client.put("c", bytes(200)) is True
    assert client.stats()["put_failures"] == 3
    assert store.used_bytes == 200


def test_a_pin_goes_with_the_last_that_looks() -> None:
    client = FakeClient(store=FakeStore(100))
    client.put("k", bytes(100))
    first, second = client.view("k"), client.view("k")
    assert first is not None and second is not None
    rows = np.frombuffer(second.data, np.uint8)
    first.close()
    second.close()
    assert client.put("l", b"v") is False
    del rows, second
    assert client.put("l", b"v") is True


def test_clear_is_a_restarted_server() -> None:
    client = FakeClient()
    client.put_many(["a", "b"], [b"1", b"2"])
    view = client.view("a")
    client.store.clear()
    assert client.get_many(["a", "b"]) == [None, None]
    assert (len(client.store), client.store.used_bytes) == (0, 0)
    assert view
    assert bytes(view.data) == b"1"
    assert client.put("a", b"3")
    assert client.get("a") == b"3"


def test_after_an_outage_the_values_are_there() -> None:
    store = FakeStore(unavailable=True)
    client = FakeClient(store=store)
    assert client.put("k", b"v") is False
    store.unavailable = False
    assert client.put("k", b"v") is True
    store.unavailable = True
    assert (client.get("k"), client.delete("k"), client.wait_ready()) == (None, False, False)
    assert "unavailable" in repr(client)
    store.unavailable = False
    assert (client.get("k"), client.wait_ready()) == (b"v", True)


def test_the_nth_call_fails() -> None:
    store = FakeStore()
    one, other = FakeClient(store=store), FakeClient(store=store)
    store.fail(2, 5)
    got = [one.put("k", b"v"), other.get("k"), one.get("k"), other.exists("k"), one.exists("k"), one.get("k")]
    assert got == [True, None, b"v", True, False, b"v"]
    assert (one.stats()["outages"], other.stats()["outages"]) == (1, 1)
    store.fail(1, operation="put")
    store.fail(2, operation="get")
    assert one.get("k") == b"v"
    assert one.put_many(["a", "b"], [b"v", b"v"]) == [False, False]  # one failure per call, not per key
    assert one.put("k", b"w") is True
    assert one.get_into("k", bytearray(1)) is None
    assert one.get_many(["k"]) == [b"w"]
    store.fail(1)
    assert not one.view("k")
    store.fail(1)
    assert one.delete("k") is False
    store.fail(1)
    assert one.get_into_many(["k", "k"], [bytearray(1), bytearray(1)]) == [None, None]
    assert asyncio.run(one.get_async("k")) == b"w"
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="counted from 1"):
            store.fail(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one of put, get"):
        store.fail(1, operation="pull")


def test_each_call_counts_once() -> None:
    """Each call of an embedder counts once, whatever the settings."""
    for arguments in ({}, {"replicas": 2}, {"checksum": True}):
        seen: list[tuple[str, int]] = []
        store = FakeStore(latency=lambda operation, keys, seen=seen: seen.append((operation, keys)))  # type: ignore[misc]
        client = FakeClient(store=store, **arguments)  # type: ignore[arg-type]
        client.put("k", b"v")
        client.get("k")
        client.get_into("k", bytearray(1))
        client.exists("k")
        client.view("k")
        client.delete("k")
        client.put_many(list("ab"), [b"v"] * 2)
        client.get_many(list("abc"))
        client.get_into_many(list("ab"), [bytearray(1), bytearray(1)])
        client.exists_many(list("abcd"))
        client.delete_many(list("ab"))
        asyncio.run(client.put_async("k", b"v"))
        assert client.put_many(list("ab"), [b"v"] * 2) == [True] * 2
        with client.pin(list("abc")) as pins:
            assert pins.read([(0, 1, [bytearray(1) for _ in range(3)])]) == [1, 1, None]
        assert client.keep(list("abc"), 5) == [True, True, False]
        with pytest.raises(UsageError):
            client.put("", b"v")  # the call is refused before it counts
        assert [operation for operation, _ in seen] == [
            "put", "get", "get", "exists", "view", "delete", "put", "get", "get", "exists", "delete", "put",
            "put", "pin", "get", "keep",
        ]  # fmt: skip
        assert [keys for _, keys in seen] == [1, 1, 1, 1, 1, 1, 2, 3, 2, 4, 2, 1, 2, 3, 2, 3]
        assert {operation for operation, _ in seen} | {"prefetch"} == set(simm.testing.OPERATIONS)


def test_every_call_of_a_fake_is_an_operation_that_can_be_named() -> None:
    """Each can be made an outage by its name."""
    named = {
        node.args[0].value
        for node in ast.walk(ast.parse(inspect.getsource(paths)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "_serves"
        and isinstance(node.args[0], ast.Constant)
    }  # fmt: skip
    assert named == set(simm.testing.OPERATIONS)
    store = FakeStore()
    client = FakeClient(store=store, near_copies=True)
    for operation in simm.testing.OPERATIONS:
        store.fail(1, operation=operation)
    assert client.prefetch_digests([client.digest("k")]) == [DROPPED]
    assert client.prefetch_digests([client.digest("k")]) == [HERE], "the outage is over"


def test_latency_holds_one_call_and_no_other() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def latency(operation: str, keys: int) -> None:
        if operation == "get":
            entered.set()
            go_on.wait(WAIT_S)

    store = FakeStore(latency=latency)
    client = FakeClient(store=store)
    client.put("k", b"v")
    got: list[bytes | None] = []
    thread = threading.Thread(target=lambda: got.append(client.get("k")))
    thread.start()
    assert entered.wait(WAIT_S)
    assert client.exists("k") is True  # although that call is still in flight
    assert forked(lambda: client.exists("k")) == 0
    assert got == []
    go_on.set()
    thread.join(JOIN_S)
    assert got == [b"v"]


def test_a_fork_waits_for_the_store() -> None:
    """A child that is forked while another thread changes the store would find its lock taken forever."""
    client = FakeClient()
    client.put("k", b"v")
    holding, has_forked = threading.Event(), threading.Event()

    def hold() -> None:
        with simm.testing.store.LOCK:
            holding.set()
            has_forked.wait(0.5)  # the fork waits for this lock

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(WAIT_S)
    assert forked(lambda: client.get("k") == b"v") == 0
    has_forked.set()
    holder.join(JOIN_S)
    assert client.get("k") == b"v"


def test_what_latency_raises_comes_out() -> None:
    def latency(operation: str, keys: int) -> None:
        raise TimeoutError(operation)

    client = FakeClient(store=FakeStore(latency=latency))
    with pytest.raises(TimeoutError, match="put"):
        client.put("k", b"v")
    client.store.latency = None
    assert client.put("k", b"v")


def test_a_slow_call_does_not_hold_the_loop() -> None:
    go_on = threading.Event()
    client = FakeClient(store=FakeStore(latency=lambda operation, keys: go_on.wait(WAIT_S)))

    async def body() -> None:
        task = asyncio.ensure_future(client.exists_async("k"))
        await asyncio.sleep(0)
        go_on.set()  # by the loop itself
        assert await task is False

    asyncio.run(body())


def test_a_store_pickles_as_itself_and_into_no_other_process() -> None:
    store = FakeStore()
    assert pickle.loads(pickle.dumps(store)) is store
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    ran = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(FakeClient()), capture_output=True, cwd=ROOT)
    assert ran.returncode == 1
    assert b"UsageError: this FakeStore is in another process" in ran.stderr
