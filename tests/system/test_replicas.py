"""Two copies on two nodes: one is killed and every key is still a hit. Real managers and data servers."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simm import kv
from simm.arena.hashing import Hasher, shard_of
from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.errors import ConfigError, UsageError
from simm.sdk.ops.replicas import CANDIDATES, Replicas, candidates, second
from tests.support.manager_client import ManagerClient
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until

digest_of = Hasher("replicas")
KEYS = [f"k{number}" for number in range(200)]


def value_of(key: str) -> bytes:
    return f"{key};".encode() * 100


# --- where copies lie -----------------------------------------------------------------------------


def test_candidates_are_other_digests_and_always_the_same() -> None:
    digest = digest_of("k")
    four = candidates(digest)
    assert four == candidates(digest)
    assert len({digest, *four}) == CANDIDATES + 1
    assert {len(each) for each in four} == {16}
    # A fixed point of the format: what is stored today must be found tomorrow.
    assert [each.hex()[:8] for each in candidates(bytes(16))] == ["b0619d18", "6b4f08f2", "a29aef64", "2c191d18"]
    everything = {each for number in range(1000) for each in candidates(digest_of(f"k{number}"))}
    assert len(everything) == 1000 * CANDIDATES


def test_the_second_copy_is_on_another_node_by_a_reference_model() -> None:
    rng = random.Random(3)
    for nodes in (["a"], ["a", "b"], ["a", "b", "c", None], [None]):
        owner = [rng.choice(nodes) for _ in range(64)]

        def node_of(digest: bytes, owner: list[Any] = owner) -> Any:
            return owner[shard_of(digest) % 64]

        for number in range(300):
            digest = digest_of(f"k{number}")
            others = [each for each in candidates(digest) if node_of(each) not in (None, node_of(digest))]
            assert second(digest, node_of) == (others[0] if others else None)


def test_either_copy_comes_first_by_chance_and_the_other_candidates_follow() -> None:
    class OneMap:
        nodes: tuple[str | None, ...] = ("a", "b")

        router = None

        def target(self, digest: bytes) -> None: ...

    replicas = Replicas(OneMap(), None, None, {}, random.Random(1))  # type: ignore[arg-type]
    replicas._node_of = lambda digest: OneMap.nodes[shard_of(digest) % 2]  # type: ignore[method-assign]
    firsts = set()
    for number in range(100):
        digest = digest_of(f"k{number}")
        order = replicas.order(digest)
        assert set(order) == {digest, *candidates(digest)}
        other = replicas.second(digest)
        rest = [each for each in candidates(digest) if each != other]
        if other is None:
            assert order == [digest, *rest]
        else:
            assert set(order[:2]) == {digest, other}
            assert order[2:] == rest
            firsts.add(order[0] == digest)
    assert firsts == {True, False}
    OneMap.nodes = ("a", "a")
    assert replicas.order(digest_of("k"))[0] == digest_of("k")


# --- two nodes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(nothing_is_left: Path) -> Iterator[tuple[Cluster, Cluster]]:
    """A manager with a data server, and a second data server."""
    with Cluster(new_folder(), memory="64M") as first:
        second_one = Cluster(new_folder(), memory="64M")
        second_one.manager = first.manager
        try:
            second_one.start_server()
            settle(first)
            yield first, second_one
        finally:
            second_one.stop()


def settle(first: Cluster) -> None:
    """Until both servers own half of the shards and no more shards move."""
    host, port = first.manager.rsplit(":", 1)
    with ManagerClient([(host, int(port))], deadline_s=60.0) as manager:

        def settled() -> bool:
            status = manager.status()
            held = [worker["shards"] for node in status["nodes"] for worker in node["workers"]]
            return held == [SHARD_COUNT // 2] * 2 and not status["shards_moving"] and not status["shards_waiting"]

        wait_until(settled, lambda: f"both servers have their shards: {manager.status()}", 60.0)


def nodes_of(client: Client) -> int:
    route = client._routes.route
    return len({target.info.node for target in route if target is not None}) if None not in route else 0


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return f"r{zlib.crc32(request.node.nodeid.encode()):08x}"


@pytest.fixture(params=["shm", "tcp"])
def both(request: pytest.FixtureRequest, pair: tuple[Cluster, Cluster], namespace: str) -> Iterator[Client]:
    with Client(pair[0].manager, namespace=namespace, path=request.param, deadline_s=30.0, replicas=2) as client:
        assert client.wait_ready(60.0)
        yield client


def plain(client: Client, call: Callable[[Client], Any]) -> Any:
    """The same by a client of the same namespace that knows of no copies."""
    with Client(**{**asdict(client._options), "replicas": 1}) as other:
        return call(other)


def test_a_put_stores_two_copies_and_every_read_finds_one(both: Client) -> None:
    assert both.put_many(KEYS, [value_of(key) for key in KEYS]) == [True] * len(KEYS)
    assert both.put("one", b"1")
    assert both.counters["puts"] == len(KEYS) + 1
    replicas = both._replicas
    assert replicas is not None
    copies = 0
    for key in KEYS:
        other = replicas.second(both.digest(key))
        if other is not None:
            copies += 1
            assert both._gets.read_many([both.digest(key), other], [None, None]) == [value_of(key)] * 2
    assert copies > len(KEYS) // 2  # 15 of 16 keys on two nodes with half of the shards each
    assert both.counters["single_copies"] == 0
    for _ in range(4):
        assert both.get("one") == b"1"
        buffer = bytearray(8)
        assert both.get_into("one", buffer) == 1
        assert both.exists("one")
        with both.view("one") as view:
            assert view.data == b"1"
    assert both.get_many(KEYS) == [value_of(key) for key in KEYS]
    buffers = [bytearray(1000) for _ in KEYS]
    assert both.get_into_many(KEYS, buffers) == [len(value_of(key)) for key in KEYS]
    assert [bytes(buffer[: len(value_of(key))]) for key, buffer in zip(KEYS, buffers)] == [*map(value_of, KEYS)]
    assert both.exists_many([*KEYS, "never"]) == [True] * len(KEYS) + [False]


def test_a_miss_is_counted_once(both: Client) -> None:
    before = dict(both.counters)
    assert both.get("never") is None
    assert both.get_into("never", bytearray(8)) is None
    assert not both.view("never")
    assert both.get_into_many(["never"] * 20, [bytearray(8)] * 20) == [None] * 20
    assert both.counters["misses"] - before["misses"] == 23
    assert both.counters["hits"] == before["hits"]


def test_a_buffer_too_small_is_still_a_mistake(both: Client) -> None:
    assert both.put("k", b"v" * 100)
    with pytest.raises(UsageError, match="does not fit"):
        both.get_into("k", bytearray(99))


def test_a_key_that_exists_is_not_overwritten(both: Client) -> None:
    assert both.put("k", b"first")
    assert both.put("k", b"second")
    assert both.put_many(["k", "new", "new"], [b"third", b"a", b"b"]) == [True, True, True]
    for _ in range(6):
        assert both.get("k") == b"first"
        assert both.get("new") == b"b"


def test_delete_drops_all_copies(both: Client) -> None:
    assert both.put_many(KEYS[:20], [b"v"] * 20) == [True] * 20
    assert both.delete_many([*KEYS[:20], "never"]) == [True] * 20 + [False]
    assert both.exists_many(KEYS[:20]) == [False] * 20
    assert not plain(both, lambda other: any(other.exists_many(KEYS[:20])))
    assert both.put("k0", b"w")
    assert both.get("k0") == b"w"


def test_a_copy_under_another_candidate_is_found(both: Client) -> None:
    """As a map change leaves it behind."""
    for number, copy in enumerate([both.digest("k"), *candidates(both.digest("k"))]):
        assert both._puts.store([copy], [memoryview(b"%d" % number)]) == [0]
        assert both.get("k") == b"%d" % number
        assert both.exists("k")
        assert both.view("k")
        assert both.put("k", b"other")  # it exists
        assert both.get("k") == b"%d" % number
        assert both.delete("k")
        assert both.get("k") is None


def test_engines_get_it_by_a_setting(
    pair: tuple[Cluster, Cluster], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", pair[0].manager)
    monkeypatch.setenv("SIMM_NAMESPACE", namespace)
    monkeypatch.setenv("SIMM_REPLICAS", "2")
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")
    with kv.Store() as store:
        assert store._client is not None
        assert store._client._replicas is not None
        source, sink = store.allocate(4096), store.allocate(4096)
        memory = np.asarray(source.as_ref())
        memory[:] = 7
        assert store.mput(["a", "b"], [source.view()] * 2) == [0, 0]
        assert store.mget(["a", "b"], [sink.view()] * 2) == [4096, 4096]
        assert np.asarray(sink.as_ref()).tolist() == memory.tolist()
        assert store.mexists(["a", "c"]) == [True, False]
        assert store.mdelete(["a", "c"]) == [0, kv.Code.KEY_NOT_FOUND]
    monkeypatch.setenv("SIMM_REPLICAS", "3")
    with pytest.raises(RuntimeError):
        kv.Store()


@pytest.mark.parametrize("replicas", [0, 3, "2", True])
def test_other_numbers_are_refused(pair: tuple[Cluster, Cluster], replicas: Any) -> None:
    with pytest.raises((UsageError, ConfigError)):
        Client(pair[0].manager, replicas=replicas)


@pytest.mark.quick
def test_one_server_is_killed_and_every_key_is_still_a_hit(make_cluster: Any) -> None:
    first = make_cluster(memory="64M")
    other = Cluster(new_folder(), memory="64M")
    other.manager = first.manager
    try:
        other.start_server()
        settle(first)
        with (
            Client(first.manager, deadline_s=30.0, replicas=2) as client,
            Client(first.manager, deadline_s=30.0) as single,
        ):
            assert client.put_many(KEYS, [value_of(key) for key in KEYS]) == [True] * len(KEYS)
            replicas = client._replicas
            assert replicas is not None
            twice = [key for key in KEYS if replicas.second(client.digest(key)) is not None]
            assert len(twice) > len(KEYS) // 2
            other.kill("dataserver")
            wait_until(lambda: None in single.get_many(KEYS), "without copies some are misses")  # the control
            began = time.monotonic()
            for _ in range(3):
                assert client.get_many(twice) == [value_of(key) for key in twice]
                assert client.exists_many(twice) == [True] * len(twice)
            print(f"{len(twice)} keys read three times in {time.monotonic() - began:.3f} s while a server is dead")
            # With the survivor alone, too: the copies are where the map of then wanted them.
            wait_until(lambda: nodes_of(client) == 1, "the survivor owns everything")
            assert client.get_many(twice) == [value_of(key) for key in twice]
            assert client.put("new", b"v")
            assert client.get("new") == b"v"
    finally:
        other.stop()


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_registered_view_takes_exactly_its_size_from_any_copy(
    pair: tuple[Cluster, Cluster], namespace: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies of a value of another size go, and none of the right one's, wherever they lie."""
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", pair[0].manager)
    monkeypatch.setenv("SIMM_NAMESPACE", namespace)
    monkeypatch.setenv("SIMM_REPLICAS", "2")
    monkeypatch.setenv("SIMM_PATH", path)
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")
    pool = np.full(40 * 1000, 0xEE, np.uint8)
    mr = kv.register_mr(pool)
    views = [kv.BlockView.from_tensor(pool[at * 1000 : at * 1000 + 1000], mr) for at in range(40)]
    failed = int(kv.Code.GET_FAILED)
    with kv.Store() as store:
        client = store._client
        assert client is not None and client.wait_ready(60.0)
        keys = KEYS[:40]
        sizes = [(1000, 999, 1001, 1000)[at % 4] for at in range(40)]
        values = [random.Random(key).randbytes(size) for key, size in zip(keys, sizes)]
        assert client.put_many(keys, values) == [True] * 40
        got = [length for at in range(0, 40, 8) for length in store.mget(keys[at : at + 8], views[at : at + 8])]
        assert got == [1000 if size == 1000 else failed for size in sizes]
        hole = b"\xee" * 1000
        assert pool.tobytes() == b"".join(value if len(value) == 1000 else hole for value in values)
        assert store.mexists(keys) == [size == 1000 for size in sizes]
        everywhere = [copy for key in keys for copy in (client.digest(key), *candidates(client.digest(key)))]
        stored = client._gets.stored_many(everywhere)
        for at, size in enumerate(sizes):
            assert any(stored[5 * at : 5 * at + 5]) == (size == 1000)
        wrong = [at for at in range(40) if sizes[at] != 1000]
        right = [random.Random(f"right {keys[at]}").randbytes(1000) for at in wrong]
        assert client.put_many([keys[at] for at in wrong], right) == [True] * len(wrong)
        assert store.mget(keys, views) == [1000] * 40
        for at, value in zip(wrong, right):
            assert pool[at * 1000 : at * 1000 + 1000].tobytes() == value
        # Of copies that differ, as two clients may leave them, the right one stays.
        digest = client.digest("differ")
        other = client._replicas.second(digest) or candidates(digest)[0]  # type: ignore[union-attr]
        assert client._puts.store([digest, other], [memoryview(b"short"), memoryview(right[0])]) == [0, 0]
        got = [store.get("differ", views[0]) for _ in range(20)]
        assert got.count(failed) <= 1, "dropped where it is met, and where it lies"
        assert got[-1] == 1000
        assert pool[:1000].tobytes() == right[0]
