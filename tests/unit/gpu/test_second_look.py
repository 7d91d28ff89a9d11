"""A GPU that fails while values are read where they have moved from, or to: misses, and no exception in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from simm.client import Client
from simm.constants import SHARD_COUNT
from simm.errors import Code
from simm.gpu import copy
from simm.ipc import session
from simm.kv import BlockView, Store
from tests.support.cluster_clients import KEYS, full, published, value_of
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import Array, Tensor

SIZE = len(value_of(KEYS[0]))
#: All values of these have SIZE bytes. So many that an arena on this host is read by column, too.
SOME = KEYS[:10] * 2
HALVES = {1: range(SHARD_COUNT // 2), 2: range(SHARD_COUNT // 2, SHARD_COUNT)}

#: Reads these keys into GPU memory at these addresses, and returns a length for each, or what is no length.
Read = Callable[[Client, Sequence[str], Sequence[int]], list[Any]]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session.RETIRED.clear()
    with FakeCluster(3) as running:
        yield running
    copy.staging.close()
    session.RETIRED.clear()


def into_tensors(client: Client, keys: Sequence[str], rooms: Sequence[int]) -> list[Any]:
    return client.get_into_many(keys, [Tensor(room, SIZE) for room in rooms])


def ranges(client: Client, keys: Sequence[str], rooms: Sequence[int]) -> list[Any]:
    wanted = [[(0, 8, bytearray(8)), (8, SIZE - 8, Array(room + 8, SIZE - 8))] for room in rooms]
    return client.get_ranges_many(keys, wanted)


def by_kv(client: Client, keys: Sequence[str], rooms: Sequence[int]) -> list[Any]:
    store: Any = Store.__new__(Store)
    store._client, store.rejected = client, 0
    got = store.mget(keys, [BlockView.from_tensor(Tensor(room, SIZE)) for room in rooms])
    return [None if each == int(Code.UNAVAILABLE) else each for each in got]


def look(fake: FakeCuda, client: Client, read: Read, *, fails: bool) -> None:
    """Read some keys, and one that was never stored, with a driver that fails or does not."""
    rooms = [fake.alloc(0, SIZE) for _ in range(len(SOME) + 1)]
    outages = client.counters["outages"]
    if fails:
        fake.fail_next("cuMemcpyHtoDAsync_v2", [1] * 100)
    got = read(client, [*SOME, "never"], rooms)
    fake.failing.clear()
    if fails:
        assert got[:-1] == [None] * len(SOME), "the values are not there"
        assert client.counters["outages"] >= outages + len(SOME)
        return
    assert got[:-1] == [SIZE] * len(SOME)
    for key, room in zip(SOME, rooms):
        assert fake.peek(room + 8, SIZE - 8) == value_of(key)[8:]


@pytest.mark.parametrize("read", [into_tensors, ranges, by_kv])
@pytest.mark.parametrize("owners", [{1: ALL}, HALVES], ids=["one owner", "two owners"])
@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_at_previous_owners(
    fake: FakeCuda, cluster: FakeCluster, path: str, owners: dict[int, Iterable[int]], read: Read
) -> None:
    client = full(cluster, path)
    cluster.own(owners, previous=0)
    cluster.instruct()
    published(cluster, client)
    for fails in (True, False, True):
        look(fake, client, read, fails=fails)
    client.close()


@pytest.mark.parametrize("read", [into_tensors, ranges, by_kv])
def test_at_a_new_owner(fake: FakeCuda, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    """The map changes after the keys were grouped: the owner that was says WRONG_OWNER."""
    client = full(cluster, "tcp")
    group = client._routes.group
    old = {target for target, _ in group([client.digest(key) for key in KEYS])}
    assert len(old) == 1
    (before,) = old
    cluster.own({1: ALL}, previous=0)
    cluster.instruct()
    published(cluster, client)
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    assert client.put_many(SOME, [value_of(key) for key in SOME]) == [True] * len(SOME)
    cluster.nodes[1].finish(cluster.epoch, ALL)
    monkeypatch.setattr(client._routes, "group", lambda digests, *_: [(before, range(len(digests)))])
    for fails in (True, False, True):
        look(fake, client, read, fails=fails)
    client.close()
