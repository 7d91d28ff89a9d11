"""How long a load is expected to take: the fit, what is observed by each path, and what counts for an estimate."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.host import buffers
from simm.ipc import session as session_module
from simm.sdk import reads
from simm.sdk.ops.load_time import FIRST, Share, Speed, Speeds
from simm.wire.shard_set import MOVING
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.fake_rdma_cluster import FakeRdmaCluster

MIB = 1 << 20

# -- the fit ---------------------------------------------------------------------------------------------


def shapes(rng: random.Random) -> tuple[int, int]:
    """Return keys and bytes of a get as engines make them."""
    keys = rng.choice((1, 1, 16, 64, 512))
    return keys, keys * rng.choice((4096, 65_536, MIB))


def shown(speed: Speed, rng: random.Random, call: float, key: float, byte: float, count: int) -> None:
    for _ in range(count):
        keys, size = shapes(rng)
        speed.observe(keys, size, (call + keys * key + size * byte) * rng.uniform(0.9, 1.1))


@pytest.mark.parametrize("path", FIRST)
@pytest.mark.parametrize("truth", [(30e-6, 2e-6, 0.8e-10), (400e-6, 40e-6, 20e-10), (1e-6, 1e-6, 0.5e-10)])
def test_it_finds_what_gets_take(path: str, truth: tuple[float, float, float]) -> None:
    rng = random.Random(1)
    speed = Speed(FIRST[path])
    shown(speed, rng, *truth, 100)
    for keys, size in ((1, 4096), (64, 64 * 65_536), (512, 512 * MIB)):
        right = truth[0] + keys * truth[1] + size * truth[2]
        assert 0.8 * right < speed.expected(keys, size) < 1.25 * right
    slower = tuple(10 * each for each in truth)
    shown(speed, rng, *slower, 150)
    assert 8 * right < speed.expected(keys, size) < 12.5 * right, "it follows"


def test_gets_of_one_kind_are_enough_for_that_kind() -> None:
    speed = Speed(FIRST["tcp"])
    speed.observe(64, 64 * 65_536, 0.05)
    assert 0.045 < speed.expected(64, 64 * 65_536) < 0.055
    assert 0 < speed.expected(1, 4096) < 0.01


def test_a_stall_changes_little() -> None:
    speed = Speed(FIRST["shm"])
    for number in range(100):
        speed.observe(16, MIB, 0.001 if number % 10 else 60.0)
    assert speed.expected(16, MIB) < 0.0016


def test_nonsense_is_not_observed() -> None:
    speed = Speed(FIRST["shm"])
    before = speed.expected(7, 7000)
    for keys, size, seconds in ((1, 100, 0.0), (1, 100, -1.0), (1, 100, math.nan), (1, 0, 1.0), (0, -5, 1.0)):
        speed.observe(keys, size, seconds)
    assert speed.expected(7, 7000) == before
    Speeds().observe("down", 1, 1, 1.0)


def test_estimates_are_never_negative_and_grow_with_what_is_loaded() -> None:
    rng = random.Random(2)
    for _ in range(30):
        speed = Speed(FIRST["rdma"])
        for _ in range(rng.randrange(20)):
            speed.observe(*shapes(rng), 10 ** rng.uniform(-6, 0))
        expected = [speed.expected(keys, keys * 5000) for keys in (0, 1, 10, 100)]
        assert expected == sorted(expected) and expected[0] >= 0.0


def test_hosts_send_at_the_same_time_and_this_one_copies_beside() -> None:
    speeds = Speeds()
    here, near, far = Share("shm", 10, 1000), Share("tcp", 10, 1000), Share("tcp", 20, 1000)
    one = {share: speeds.expected_s([share]) for share in (here, near, far)}
    assert speeds.expected_s([here, near, far]) == pytest.approx(one[here] + one[far])
    assert speeds.expected_s([here, here]) < 2 * one[here], "it is one call"
    assert speeds.expected_s([]) == speeds.expected_s([Share("tcp", 0, 0), Share("down", 5, 5)]) == 0.0


# -- what is observed, and what counts -----------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(2) as running:
        running.settled({0: ALL[::2], 1: ALL[1::2]})
        yield running
    session_module.RETIRED.clear()


def observed(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return the list of what the client observes from now on: path, keys, bytes."""
    seen: list[tuple[str, int, int]] = []
    real = Speed.observe
    paths = {id(speed): path for path, speed in client._load_times.speeds.paths.items()}

    def observe(speed: Speed, keys: int, size: int, seconds: float, calls: int = 1) -> None:
        assert seconds > 0.0
        seen.append((paths[id(speed)], keys, size))
        real(speed, keys, size, seconds, calls)

    monkeypatch.setattr(Speed, "observe", observe)
    return seen


def test_large_batches_and_copies_on_this_host(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "SAMPLE_BATCHES", 3)
    client = cluster.client("shm")
    keys = [f"k{number}" for number in range(200)]
    assert client.put_many(keys, [bytes(1000)] * 200) == [True] * 200
    assert client.put("large", bytes(buffers.OBSERVED_BYTES))
    seen = observed(client, monkeypatch)
    room, rooms = bytearray(1000), [bytearray(1000) for _ in keys]
    for key in keys:
        client.get_into(key, room)
        client.get(key)
        client.exists(key)
    client.get_into_many(keys[:3], rooms[:3])
    assert seen == [], "single gets, and small batches, are not"
    for _ in range(3):
        client.get_into_many([*keys, "missing"], [*rooms, room])
    assert len(seen) == 2 and sum(count for _, count, _ in seen) == 200, "each third part, one of each worker's"
    assert all(size == 1000 * count for _, count, size in seen)
    seen.clear()
    client.get_into("large", bytearray(buffers.OBSERVED_BYTES))
    assert seen == [("shm", 0, buffers.OBSERVED_BYTES)]


@pytest.mark.parametrize("path", ["tcp", "rdma"])
def test_all_gets_from_other_hosts(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    session_module.RETIRED.clear()
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma() if path == "rdma" else cluster.client("tcp")
        assert client.put_many(["a", "b"], [bytes(1000), bytes(50)]) == [True] * 2
        seen = observed(client, monkeypatch)
        assert client.get("a") and client.get_into("b", bytearray(50)) and client.get_many(["a", "no", "b"])
        assert client.get_ranges("a", [(0, 5, bytearray(5)), (900, 10, bytearray(10))]) == 1000
        assert client.get("no") is None and client.exists("a")
        assert seen == [(path, 1, 1000), (path, 1, 50), (path, 2, 1050), (path, 1, 15)]
    session_module.RETIRED.clear()


@pytest.mark.parametrize("more", [{"path": "shm"}, {"path": "tcp"}, {"path": "tcp", "replicas": 2}])
def test_what_counts_for_an_estimate(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    client = cluster.client(**more)
    sizes = {f"k{number}": number % 7 + 1 for number in range(40)}
    assert client.put_many(list(sizes), [bytes(size) for size in sizes.values()]) == [True] * 40
    counted: list[Share] = []
    monkeypatch.setattr(Speeds, "expected_s", lambda _, shares: (counted.extend(shares), 0.5)[1])
    before = client.stats()
    for keys in (list(sizes), [*sizes, "no", "other"], ["k3"], ["k3", "k4", "no"]):
        counted.clear()
        assert client.load_ms(keys) == 500.0
        assert sum(share.keys for share in counted) == len(sizes.keys() & set(keys))
        assert sum(share.bytes for share in counted) == sum(sizes.get(key, 0) for key in keys)
        assert {share.path for share in counted if share.keys} == {more["path"]}
        assert client.stats() == before, "no hit, no miss"
    counted.clear()
    assert client.load_ms([]) == 0.0 and not counted


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_looks_for_manifests_count_nothing(cluster: FakeCluster, path: str) -> None:
    """A client that has met a value in parts looks for manifests in each estimate and delete: of all keys."""
    client = cluster.client(path)
    keys = [f"k{number}" for number in range(8)]
    assert client.put_many(keys, [bytes(100)] * 8) == [True] * 8
    client._counters["large"] = 1

    def gets() -> list[int]:
        stats = client.stats()
        served = [node.stream.stream.counted.as_json() for node in cluster.nodes]
        return [stats["hits"], stats["misses"], hash(str(served)) if path == "tcp" else 0]

    client.load_ms(["absent"])  # which makes what looks
    before = gets()
    client.load_ms([*keys, "absent"])
    assert gets() == before
    assert client._large.manifest(client.digest("absent")) is None and gets() != before, "control: a get's look counts"


def test_a_key_that_is_moving_counts_as_the_others(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is not known at the new owner."""
    client = cluster.client("shm")
    keys = [f"k{number}" for number in range(40)]
    assert client.put_many(keys, [bytes(100)] * 40) == [True] * 40
    counted: list[Share] = []
    monkeypatch.setattr(Speeds, "expected_s", lambda _, shares: (counted.extend(shares), 0.0)[1])
    monkeypatch.setattr("simm.arena.reader.ArenaReader.shard_word", lambda *_: MOVING | 5)
    client.load_ms([*keys, "moving"])
    assert sum(share.keys for share in counted) == 41 and sum(share.bytes for share in counted) == 4100


def test_an_outage_takes_no_time(cluster: FakeCluster) -> None:
    client = cluster.client("tcp", deadline_s=1.0)
    assert client.put_many(["a", "b", "c"], [b"x"] * 3) == [True] * 3
    assert client.load_ms(["a", "b", "c"]) > 0.0
    for node in cluster.nodes:
        node.die()
    assert client.load_ms(["a", "b", "c"]) == 0.0
    assert client.stats()["outages"] > 0
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.load_ms(["a"])
