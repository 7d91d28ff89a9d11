"""Values that SiMM's adapters change: a client with near copies reads them at their owner, and copies none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from simm.connectors.keyspace import Keyspace
from simm.errors import UsageError
from simm.schemes import registry
from simm.schemes.registry import generation_key
from simm.schemes.scheme import Scheme
from simm.sdk.batch import NoValue
from simm.sdk.reads import Gets
from simm.sdk.tracing.parts import TracedGets, TracedRemoteReads
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.several_hosts import HostClient, separate
from tests.support.waiting import wait_until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    separate(monkeypatch)
    with FakeCluster(2) as made:
        made.settled({0: ALL[::2], 1: ALL[1::2]})
        yield made


def on_host(cluster: FakeCluster, home: int) -> HostClient:
    """A client with near copies on the host of a node. It reaches the other one by TCP."""
    address = "{}:{}".format(*cluster.manager.address)
    client = HostClient(cluster.nodes[home].info.node, address, path="shm,tcp", near_copies=True, deadline_s=30.0)
    cluster.clients.append(client)
    assert client.wait_ready(60)
    return client


def is_far(client: HostClient, key: str) -> bool:
    target = client._routes.target(client.digest(key))
    return target is not None and target.info.node != client._home


def copied(client: HostClient, key: str) -> None:
    """Make a near copy of a value, as ``prefetch`` does for anybody."""
    made = client.counters["near_copies"]
    assert client.prefetch([key]) == 1
    wait_until(lambda: client.counters["near_copies"] > made, lambda: f"{client.counters}")


def copies_nothing(client: HostClient) -> bool:
    near: Any = client._near
    return not len(near._promotion) and client.counters["near_copies"] == 0


def test_a_flush_reaches_other_hosts_at_once(cluster: FakeCluster) -> None:
    """They had a near copy of the generation after two operations, and read that for five minutes."""
    here, there = on_host(cluster, 0), on_host(cluster, 1)
    scope = next(scope for number in range(1000) if is_far(here, generation_key(scope := f"scope {number}")))
    one, other = Keyspace(here, scope), Keyspace(there, scope)
    generation = other.generation()
    for _ in range(5):
        assert one.generation() == generation
    assert copies_nothing(here)
    copied(here, generation_key(scope))
    assert other.flush()
    flushed = other.generation()
    assert registry.GENERATION.pack(int(generation or "", 16)) == here.get(generation_key(scope)), "the control: a copy"
    assert one.generation() == flushed != generation
    assert Keyspace(here, scope).generation() == flushed == registry.generation_of(here, scope)


def test_a_registration_is_read_at_its_owner(cluster: FakeCluster) -> None:
    here, there = on_host(cluster, 0), on_host(cluster, 1)
    key = registry.value_key
    model = next(name for number in range(1000) if is_far(here, key(name := f"m{number}", "lmcache")))
    first, second = Scheme(model, "lmcache", 64), Scheme(model, "lmcache", 128)
    assert registry.register(there, first)
    for _ in range(5):
        assert registry.registered(here, model) == [first]
    assert copies_nothing(here)
    copied(here, key(model, "lmcache"))
    assert registry.register(there, second)
    assert registry.parse(here.get(key(model, "lmcache")) or b"")[-1].scheme == first, "the control: a copy"
    assert registry.registered(here, model) == [first, second]
    third = Scheme(model, "lmcache", 256)
    assert registry.register(here, third)
    assert registry.registered(there, model) == [first, second, third], "it had not written the copy back"


def test_reads_at_the_owner_are_as_others(cluster: FakeCluster) -> None:
    client = on_host(cluster, 0)
    keys = [f"key {number}" for number in range(40)]
    assert client.put_many(keys, [key.encode() for key in keys]) == [True] * len(keys)
    assert len({is_far(client, key) for key in keys}) == 2
    before = dict(client.counters)
    rooms = [bytearray(10) for _ in range(len(keys) + 1)]
    got = client.get_into_many_at_owner([*keys, "never"], rooms)
    assert got == [*map(len, keys), None]
    assert [room[: length or 0] for room, length in zip(rooms, got)] == [*(key.encode() for key in keys), b""]
    for key in keys:
        room = memoryview(bytearray(10))
        assert client.get_digest_at_owner(client.digest(key), room) == len(key) and room[: len(key)] == key.encode()
        assert client.get_digest_at_owner(client.digest(key), memoryview(bytearray(1))) == NoValue.TOO_SMALL
    assert client.get_digest_at_owner(client.digest("never"), memoryview(bytearray(1))) == NoValue.MISS
    after = client.counters
    assert after["hits"] - before["hits"] == 2 * len(keys) and after["misses"] - before["misses"] == 2, "counted"
    with pytest.raises(UsageError, match="does not fit"):
        client.get_into_many_at_owner(keys, [bytearray(1) for _ in keys])
    with pytest.raises(UsageError, match="1 keys and 0 buffers"):
        client.get_into_many_at_owner(["k"], [])
    assert copies_nothing(client)
    client.close()
    with pytest.raises(UsageError):
        client.get_digest_at_owner(bytes(16), memoryview(bytearray(1)))


def test_reads_at_the_owner_have_their_segments(cluster: FakeCluster) -> None:
    client = on_host(cluster, 0)
    originals = client._near.originals  # type: ignore[union-attr]
    remote = type(originals._remote)
    client.trace(1.0)
    assert (type(originals), type(originals._remote)) == (TracedGets, TracedRemoteReads)
    client.trace(None)
    assert (type(originals), type(originals._remote)) == (Gets, remote)
