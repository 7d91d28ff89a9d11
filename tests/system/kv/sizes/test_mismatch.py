"""A registered view meets a value of another size: what is read, dropped, and logged."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simm.arena.reader import ArenaReader, Unsettled
from simm.client import Client
from simm.constants import VALUE_BYTES_MAX
from simm.errors import Code, UsageError
from simm.kv import BlockView, Store, register_mr, set_flag
from simm.sdk.batch import WrongSize
from simm.wire.messages import Status
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.kv_sizes import (
    CANARY,
    FAILED,
    KIB,
    Host,
    filled,
    point_at,
    store_by,
    value_of,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.quick


# --- the other ways in and out ------------------------------------------------------------------


@pytest.mark.parametrize("path", ["tcp", pytest.param("shm", marks=pytest.mark.full)])
def test_the_async_forms(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(store: Store) -> None:
        memory = Host("numpy", 4 * KIB)
        views = [memory.view(at * KIB, KIB) for at in range(4)]
        for other in (KIB - 1, KIB + 1):
            assert await store.put_async("k", filled(b"v" * other)) == 0
            assert await store.get_async("k", views[0]) == FAILED
            assert await store.exists_async("k") is False
            keys = ["a", "b", "c", "d"]
            sizes = [KIB, other, 5, KIB]
            assert await store.mput_async(keys, [filled(b"v" * size) for size in sizes]) == [0] * 4
            assert await store.mget_async(keys, views) == [KIB, FAILED, FAILED, KIB]
            page, hole = b"v" * KIB, bytes([CANARY]) * KIB
            assert memory.data() == page + hole + hole + page
            assert await store.mexists_async(keys) == [True, False, False, True]
            memory.reset()

    with store_by(path, request, monkeypatch) as store:
        asyncio.run(body(store))


def test_an_entry_that_only_the_worker_can_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot changes all the time, so the worker pins the value; its size is checked like any other."""
    memory = Host("numpy", KIB)
    view = memory.view(0, KIB)

    def unsettled(*_: Any) -> None:
        raise Unsettled

    for other in (KIB - 1, KIB + 1):
        assert store.put("k", filled(b"v" * other)) == 0
        with monkeypatch.context() as patch:
            patch.setattr(ArenaReader, "locate", unsettled)
            assert store.get("k", view) == FAILED
        assert memory.data() == bytes([CANARY]) * KIB
        assert store.exists("k") is False


@pytest.mark.parametrize("count", [1, 20])
def test_a_right_value_that_comes_while_a_wrong_one_is_looked_at(
    store: Store, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A wrong value is confirmed before it is refused: one that was replaced meanwhile is a hit."""
    memory = Host("numpy", count * KIB)
    views = [memory.view(at * KIB, KIB) for at in range(count)]
    keys = [f"k{at}" for at in range(count)]
    right = [value_of(key, KIB) for key in keys]
    assert store.mput(keys, [filled(b"v" * 99)] * count) == [0] * count
    confirm = ArenaReader.confirm
    putting: list[bool] = []

    def replaced(reader: ArenaReader, digest: bytes, slot: int, seq: int) -> bool:
        if not putting:
            putting.append(True)
            assert store.mput(keys, [filled(value) for value in right]) == [0] * count
        return confirm(reader, digest, slot, seq)

    monkeypatch.setattr(ArenaReader, "confirm", replaced)
    assert store.mget(keys, views) == [KIB] * count
    assert memory.data() == b"".join(right)
    assert store.mexists(keys) == [True] * count
    assert store.stats()["unfit"] == 0


def put_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch, drop: Callable[[Client], Any]) -> None:
    """Put a value of the right size between a wrong one's refusal and its drop."""
    memory = Host("numpy", KIB)
    client = store._client
    assert client is not None
    dropping = drop(client)
    right = value_of("right", KIB)

    def late(*arguments: Any) -> Any:
        assert store.put("k", filled(right)) == 0
        return dropping(*arguments)

    monkeypatch.setattr(client, "delete_sized", late)
    assert store.put("k", filled(b"v" * 99)) == 0
    assert store.get("k", memory.view(0, KIB)) == FAILED
    assert store.get("k", memory.view(0, KIB)) == KIB
    assert memory.data() == right


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_right_value_that_was_put_meanwhile_stays(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_by(path, request, monkeypatch) as store:
        put_meanwhile(store, monkeypatch, lambda client: client.delete_sized)


def test_mutation_a_plain_delete_takes_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        put_meanwhile(store, monkeypatch, lambda client: lambda digests, _sizes: client.delete_digests(digests))


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_what_is_deleted_by_size(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_by(path, request, monkeypatch) as store:
        client = store._client
        assert client is not None
        keys = [f"k{at}" for at in range(3000)]  # more than one exchange
        digests = [client.digest(key) for key in keys]
        assert store.mput(keys, [filled(b"v" * (1 + at % 3)) for at in range(3000)]) == [0] * 3000
        statuses = client.delete_sized([*digests, client.digest("absent")], [2] * 3001)
        right = [at % 3 == 1 for at in range(3000)]
        assert statuses == [int(Status.OK if hit else Status.NOT_FOUND) for hit in right] + [Status.NOT_FOUND]
        assert store.mexists(keys) == [not hit for hit in right]


def test_a_drop_that_fails_is_a_miss_all_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Host("numpy", KIB)
    assert store.put("k", filled(b"v" * 99)) == 0

    def fails(*_: Any) -> None:
        raise UsageError("this client is closed")

    with monkeypatch.context() as patch:
        patch.setattr(store._client, "delete_sized", fails)
        assert store.get("k", memory.view(0, KIB)) == FAILED
    assert store.exists("k")
    assert store.get("k", memory.view(0, KIB)) == FAILED
    assert not store.exists("k"), "the next one has dropped it"
    assert memory.data() == bytes([CANARY]) * KIB


@pytest.mark.full
def test_with_a_worker_that_is_stopped(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read and refused without the worker; the drop costs a deadline, and no caller sees its code."""
    cluster = make_cluster(memory="64M")
    host, port = cluster.manager.split(":")
    point_at(host, port)
    assert set_flag("clnt_sync_req_timeout_ms", "500")
    monkeypatch.setenv("SIMM_PATH", "shm")
    memory = Host("numpy", KIB)
    with Store() as store:
        wait_until(lambda: store.put("k", filled(b"v" * 99)) == 0, "a put within the deadline")
        worker = cluster.worker_stats()["pid"]
        os.kill(worker, signal.SIGSTOP)
        try:
            assert store.mget(["k", "l"], [memory.view(0, 512), memory.view(512, 512)])[0] == FAILED
        finally:
            os.kill(worker, signal.SIGCONT)
        assert memory.data() == bytes([CANARY]) * KIB


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_value_at_its_shards_previous_owner(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The value is refused there too, and dropped at the new owner."""
    with FakeCluster(2) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client(path)
        keys = [f"k{number}" for number in range(20)]
        digests = [client.digest(key) for key in keys]
        sizes = [(KIB, 99, KIB + 1)[number % 3] for number in range(20)]
        assert client.put_many(keys, [b"v" * size for size in sizes]) == [True] * 20
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.nodes[0].freeze(cluster.epoch, ALL)
        cluster.publish()
        cluster.nodes[1].adopt(cluster.epoch, ALL)
        memory = Host("numpy", 20 * KIB)
        spans = [memory.view(at * KIB, KIB)._piece for at in range(20)]
        got: list[Any] = []

        def found() -> bool:
            got[:] = client.get_digests(digests, spans)  # type: ignore[arg-type]
            return 0 not in got

        wait_until(found, "the client has the new map")
        assert got == [KIB if size == KIB else WrongSize.of(size) for size in sizes]
        hole = bytes([CANARY]) * KIB
        assert memory.data() == b"".join(b"v" * KIB if size == KIB else hole for size in sizes)
        wrong = [at for at in range(20) if sizes[at] != KIB]
        dropped = client.delete_sized([digests[at] for at in wrong], [sizes[at] for at in wrong])
        assert dropped == [Status.OK] * len(wrong)
        assert client.exists_many(keys) == [size == KIB for size in sizes]


def test_a_view_larger_than_any_value(store: Store) -> None:
    """No value has its size, so all are refused."""
    size = VALUE_BYTES_MAX + 1
    pool = np.zeros(size, np.uint8)
    mr = register_mr(pool)
    assert store.put("k", filled(b"v" * 99)) == 0
    assert store.get("k", BlockView.from_buffer(pool.ctypes.data, size, mr)) == FAILED
    assert not pool.any()
    assert not store.exists("k")


# --- what it says -------------------------------------------------------------------------------


def test_one_warning_says_the_cause_and_the_remedy(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    memory = Host("numpy", KIB)
    view = memory.view(0, KIB)
    assert store.put("", view) == Code.INVALID_ARGUMENT  # another complaint, just before
    for _ in range(50):
        assert store.put("k", filled(b"v" * 99)) == 0
        assert store.mget(["k", "k"], [view, view]) == [FAILED] * 2
    said = [record for record in caplog.records if "SIMM_NAMESPACE" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    text = said[0].getMessage()
    for part in ("this key has 99 bytes", "the view wants 1024", "models, layouts or TP widths", "for each model"):
        assert part in text
    assert store.stats()["unfit"] == 50
    assert store.stats()["misses"] >= 50
