"""Values above 64 MiB on real servers, and values in parts beside what happens to servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.constants import VALUE_BYTES_MAX
from simm.errors import Code
from simm.kv import Block, BlockView, Store, register_mr
from tests.support.client_values import pattern
from tests.support.kv_sizes import forget_clients
from tests.support.small_limits import PART, small_limits

#: Four whole parts, and one of an odd length.
SIZE = VALUE_BYTES_MAX + 100_001


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_value_above_64_mib(cluster: Any, path: str) -> None:
    value = np.frombuffer(np.random.default_rng(1).bytes(SIZE), np.uint8)
    with Client(cluster.manager, namespace=path, path=path, deadline_s=30.0) as client:
        assert client.wait_ready(60.0)
        assert client.put("k", value) is True, client.stats()["last_put_failure"]
        assert client.exists("k")
        room = np.zeros(SIZE, np.uint8)
        assert client.get_into("k", room) == SIZE and np.array_equal(room, value)
        tail = bytearray(20)
        assert client.get_ranges("k", [(SIZE - 10, 10, memoryview(tail)[10:]), (10, 10, memoryview(tail)[:10])]) == SIZE
        assert tail == bytes(value[10:20]) + bytes(value[-10:])
        assert client.delete("k") and client.get_into("k", room) is None
        assert client.stats()["workers"][0]["path"] == path


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("size", [VALUE_BYTES_MAX, 64 << 20], ids=["largest", "64 MiB"])
def test_issue_a_value_of_exactly_64_mib(cluster: Any, namespace: str, path: str, size: int) -> None:
    """It is a little more than one part holds. The largest value that fits is stored whole."""
    value = np.frombuffer(np.random.default_rng(2).bytes(size), np.uint8)
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=30.0) as client:
        assert client.wait_ready(60.0)
        assert client.put("k", value) is True, client.stats()["last_put_failure"]
        assert client.stats()["large"] == (size > VALUE_BYTES_MAX), "of one part, or of several"
        room = np.zeros(size, np.uint8)
        assert client.get_into("k", room) == size and np.array_equal(room, value)
        with client.view("k") as view:
            assert len(view) == size and np.array_equal(np.frombuffer(view.data, np.uint8), value)
        assert client.delete("k") and not client.exists("k")


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_without_a_look_at_the_flag_a_manifest_is_a_value(
    cluster: Any, path: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control, by each path."""
    with small_limits(), Client(cluster.manager, namespace=namespace, path=path, deadline_s=30.0) as client:
        assert client.wait_ready(60.0) and client.put("k", pattern(2000)) and client.get("k") == pattern(2000)
        monkeypatch.setattr("simm.ipc.get.ShmGet.differs", lambda *_: False)
        for module in ("simm.sdk.remote_reads", "simm.sdk.tcp"):
            monkeypatch.setattr(f"{module}.ENTRY_LARGE", 0)
        got = client._gets.read_many([client.digest("k")], [None])[0]
        assert type(got) is bytes and len(got) == 64
        monkeypatch.undo()
        assert client.get("k") == pattern(2000)


@pytest.fixture
def store(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", cluster.manager)
    monkeypatch.setenv("SIMM_NAMESPACE", namespace)
    forget_clients()
    with small_limits(), Store() as made:
        yield made
    forget_clients()


def test_values_in_parts_by_the_engines_api(store: Store) -> None:
    value = pattern(2000)
    pool = np.zeros(4000, np.uint8)
    pool[:2000] = np.frombuffer(value, np.uint8)
    mr = register_mr(pool)
    source, sink = (BlockView.from_buffer(pool.ctypes.data + at, 2000, mr) for at in (0, 2000))
    assert store.put("k", source) == 0 and store.exists("k")
    assert store.get("k", sink) == 2000 and bytes(pool[2000:]) == value
    assert store.mput(["a", "b"], [source, BlockView.from_buffer(pool.ctypes.data, 9, mr)]) == [0, 0]
    pool[2000:] = 0
    nine = Block(9).view()
    assert store.mget(["b", "a", "no"], [nine, sink, Block(5000).view()]) == [9, 2000, Code.GET_FAILED]
    assert bytes(pool[2000:]) == value
    assert store.put_gather("g", [source, nine]) == 0
    tail = Block(12).view()
    assert store.get_ranges("g", [(1997, 12, tail)]) == 2009
    assert bytes(tail.as_ref()) == value[-3:] + value[:9]
    assert store.get_ranges("g", [(1998, 12, tail)]) == Code.GET_FAILED
    with store.mpin(["k", "b"]) as pins:
        assert pins.lengths == [2000, 9]
        assert pins.get_ranges("b", [(1500, 1, tail)]) == Code.GET_FAILED
        assert pins.get_ranges("k", [(1988, 12, tail)]) == 2000 and bytes(tail.as_ref()) == value[-12:]
    assert store.delete("g") == 0 and store.delete("g") == Code.KEY_NOT_FOUND


def test_a_view_of_another_size_drops_the_value_in_parts(store: Store) -> None:
    """As an ordinary one: it is another model's."""
    pool = np.zeros(3000, np.uint8)
    mr = register_mr(pool)
    right, other = (BlockView.from_buffer(pool.ctypes.data, size, mr) for size in (2000, 3000))
    assert store.put("k", right) == 0
    assert store.get("k", other) == Code.GET_FAILED
    assert not store.exists("k") and store.unfit == 1
    assert store.put("k", right) == 0
    assert store.get("k", BlockView.from_buffer(pool.ctypes.data, 64, mr)) == Code.GET_FAILED, "a manifest's size"
    assert not store.exists("k") and not pool.any()


def test_values_in_parts_end_with_their_epoch(make_cluster: Any, namespace: str) -> None:
    cluster = make_cluster(memory="64M", heartbeat_ms=200)
    value = pattern(20 * PART)
    with small_limits(), Client(cluster.manager, namespace=namespace, path="shm") as client:
        assert client.wait_ready(60.0)
        client.advance()
        assert client.put("k", value) and client.get("k") == value
        digest = client.digest("k")
        manifest = client._large.manifest(digest)
        assert manifest is not None
        client.advance()
        assert client.get("k") is None and not client.exists("k")
        assert client._gets.read_many(manifest.digests(digest), [None] * 20) == [0] * 20, "nor the parts"
        assert client._large.manifest(digest) is None
        assert client.put("k", value) and client.get("k") == value


