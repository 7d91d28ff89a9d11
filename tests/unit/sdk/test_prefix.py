"""How many leading keys are stored, by shared memory and TCP, against a plain count over all of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.sdk.ops.prefix import Prefix, Prefixes
from tests.support.dose import dosed
from tests.support.fake_cluster import ALL, FakeCluster

WAYS = [{"path": "shm"}, {"path": "tcp"}, {"path": "tcp", "replicas": 2}]
KEYS = 90


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def cluster(request: pytest.FixtureRequest, nothing_retired: None) -> Iterator[FakeCluster]:
    with FakeCluster(request.param) as running:
        running.settled({node: [shard for shard in ALL if shard % request.param == node]
                         for node in range(request.param)})  # fmt: skip
        yield running


@pytest.fixture
def pair(nothing_retired: None) -> Iterator[FakeCluster]:
    with FakeCluster(2) as running:
        running.settled({0: ALL})
        yield running


def keys_of(name: str, count: int = KEYS) -> list[str]:
    return [f"{name}.{number}" for number in range(count)]


def leading(stored: Sequence[bool], group: int) -> int:
    """Count them, one by one."""
    count = 0
    while count < len(stored) and stored[count]:
        count += 1
    return count // group * group


def put(client: Client, keys: Sequence[str], size: int = 100) -> None:
    assert client.put_many(keys, [bytes(size)] * len(keys)) == [True] * len(keys)


def ready(client: Client) -> Client:
    assert client.wait_ready(60.0)
    return client


@pytest.mark.parametrize("more", WAYS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_prefix_is_what_a_count_finds(cluster: FakeCluster, more: dict[str, Any], seed: int) -> None:
    client = ready(cluster.client(**more))
    dice = random.Random(f"{seed} {more}")
    for number in range(12):
        keys = keys_of(f"{seed}.{number}", dice.choice([1, 2, 5, 33, KEYS]))
        end = dice.randrange(len(keys) + 1)
        holes = dice.random() < 0.5
        stored = [at < end and not (holes and dice.random() < 0.1) for at in range(len(keys))]
        if any(stored):
            put(client, [key for key, there in zip(keys, stored) if there], dice.randrange(1, 3000))
        before, seen = client.stats(), [bytes(node.worker.worker.store.visited) for node in cluster.nodes]
        for group in (1, 2, 7, len(keys) + 1):
            found = client.prefix(keys, group=group)
            assert found.keys == leading(stored, group) and found.exact
            assert (found.load_ms > 0.0) == (found.keys > 0)
            if "replicas" not in more:
                assert sum(found.by_host.values()) == found.keys
                assert found.by_host.keys() <= {node.name for node in cluster.nodes}
                assert found.here == (found.keys if more["path"] == "shm" else 0)
        assert client.stats() == before, "no hit, no miss"
        if more["path"] == "shm":
            assert [bytes(node.worker.worker.store.visited) for node in cluster.nodes] == seen, "and nothing is used"


def test_without_the_check_of_each_key(cluster: FakeCluster) -> None:
    """Its last page is stored, the page behind is not; and without holes it is the prefix."""
    client = ready(cluster.client("shm"))
    dice = random.Random(7)
    for number in range(30):
        keys = keys_of(f"quick.{number}", 64)
        end = dice.randrange(65)
        stored = [at < end and not (number % 2 and dice.random() < 0.2) for at in range(64)]
        if any(stored):
            put(client, [key for key, there in zip(keys, stored) if there])
        for group in (1, 4):
            found = client.prefix(keys, group=group, exact=False).keys
            assert found % group == 0 and all(stored[max(0, found - group) : found])
            assert found == 64 or not all(stored[found : found + group])
            if not number % 2:
                assert found == leading(stored, group)


def test_positive_control_bisection_alone_overlooks_holes(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ready(cluster.client("shm"))
    keys = keys_of("hole")
    put(client, keys)
    assert client.delete(keys[3])
    assert client.prefix(keys).keys == 3
    monkeypatch.setattr(Prefixes, "_check", lambda _, keys, group, pages: Prefix(pages * group, {}, 0, 0.0, True))
    assert client.prefix(keys).keys == KEYS


def test_how_little_is_looked_at(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 keys: two probes where nothing is stored, one where all is, and twelve in between."""
    client = ready(cluster.client("shm"))
    keys = keys_of("long", 4096)
    put(client, keys[:100])
    probed: list[str] = []
    real = Prefixes._probe
    monkeypatch.setattr(Prefixes, "_probe", lambda self, key: (probed.append(key), real(self, key))[1])
    assert client.prefix(keys).keys == 100 and len(probed) <= 14
    probed.clear()
    assert client.prefix(keys[100:]).keys == 0 and len(probed) == 2
    probed.clear()
    assert client.prefix(keys[:100]).keys == 100 and len(probed) == 1


def test_values_that_are_moving(pair: FakeCluster) -> None:
    """Node 1 gets the shards, and has a part of the values by now. The others are read where they were."""
    client = ready(pair.client("shm"))
    keys = keys_of("moving", 60)
    put(client, keys)
    router, epoch = client._router, pair.epoch
    pair.own({1: ALL}, previous=0)
    pair.instruct()
    pair.nodes[0].freeze(pair.epoch, ALL)
    pair.nodes[1].adopt(pair.epoch, ALL)
    pair.publish()
    assert router is not None and router.await_map(epoch, time.monotonic() + 60.0) and router.epoch == pair.epoch
    ready(client)
    assert client.prefix(keys).keys == 60
    put(client, keys[:20])
    assert client.delete(keys[40])
    found = client.prefix(keys)
    assert found.keys == 40 and found.load_ms > 0.0
    assert client.prefix(keys[41:]).keys == 19 and client.prefix([*keys[:40], "no"]).keys == 40


def test_a_dead_worker_has_its_values_and_a_dead_server_none(pair: FakeCluster) -> None:
    local, remote = ready(pair.client("shm")), ready(pair.client("tcp", deadline_s=1.0))
    keys = keys_of("death", 30)
    put(local, keys)
    assert local.prefix(keys).keys == remote.prefix(keys).keys == 30
    pair.nodes[0].die()
    assert local.prefix(keys).keys == 30, "its arena is mapped, and the values are read out of it"
    assert remote.prefix(keys) == (0, {}, 0, 0.0, True) and remote.stats()["outages"] > 0
    local.close()
    with pytest.raises(UsageError, match="closed"):
        local.prefix(keys)
    with pytest.raises(UsageError, match="closed"):
        local.prefix([])


@pytest.mark.parametrize("wrong", [{"keys": "abc"}, {"keys": ["a", None]}, {"keys": ["a"], "group": 0},
                                   {"keys": ["a"], "group": True}, {"keys": [""]}], ids=str)  # fmt: skip
def test_mistakes(pair: FakeCluster, wrong: dict[str, Any]) -> None:
    client = ready(pair.client("shm"))
    with pytest.raises(UsageError):
        client.prefix(**wrong)


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_no_claim_is_false_while_keys_come_and_go(pair: FakeCluster, path: str) -> None:
    """A key that was deleted before the call, and that nobody began to put before its end, is not in the prefix."""
    pair.settled({node: [shard for shard in ALL if shard % 2 == node] for node in range(2)})
    asker, changer = ready(pair.client(path)), ready(pair.client("shm"))
    keys = keys_of("storm", 48)
    put(changer, keys)
    #: Even: stored, or in between. Odd: surely absent.
    versions = np.zeros(48, np.int64)
    done = threading.Event()

    def change() -> None:
        dice = random.Random(3)
        while not done.is_set():
            at = dice.randrange(48)
            if versions[at] & 1:
                versions[at] += 1
                assert changer.put(keys[at], bytes(200))
            elif changer.delete(keys[at]):
                versions[at] += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        claimed = 0
        for number in range(dosed(1500, quick=300)):
            before = versions.copy()
            found = asker.prefix(keys[number % 40 :], group=1 + number % 2)
            after = versions.copy()
            absent = (before == after) & (before & 1 == 1)
            assert not absent[number % 40 : number % 40 + found.keys].any()
            claimed += found.keys
        assert claimed
    finally:
        done.set()
        thread.join()
