"""Groups whose shard moves, or whose worker dies, between the puts of their values and the request for the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from simm.client import Client
from tests.support.cluster_clients import WAIT_S, full, published
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

PAIR = ["page{1f3a}/k", "page{1f3a}/v"]
VALUES = [b"keys", b"values"]

pytestmark = pytest.mark.usefixtures("nothing_retired")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as running:
        yield running


def between(client: Client, happens: Callable[[], object]) -> None:
    """Let something happen when the values of a group are stored, once."""
    mark = client._puts.group

    def later(groups: Sequence[Sequence[bytes]]) -> list[int]:
        client._puts.group = mark  # type: ignore[method-assign]
        happens()
        return mark(groups)

    client._puts.group = later  # type: ignore[method-assign]


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_group_whose_values_are_still_at_the_previous_owner_is_deleted(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path)

    def move() -> None:
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()

    between(client, move)
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(client.put_group(PAIR, VALUES)))
    thread.start()
    wait_until(lambda: client.counters["redirects"] > 0 or done, "the request is tried again")
    assert not done
    cluster.publish()
    cluster.nodes[1].adopt(cluster.epoch, ALL)
    thread.join(WAIT_S)
    assert done == [False] and client.get_many(PAIR) == [None, None]
    published(cluster, client)
    assert client.put_group(PAIR, VALUES) is True
    assert client.delete(PAIR[0]) and client.get(PAIR[1]) is None


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_an_outage_is_a_failed_put(cluster: FakeCluster, path: str) -> None:
    client = full(cluster, path, deadline_s=0.5)
    between(client, cluster.nodes[0].die)
    assert client.put_group(PAIR, VALUES) is False
    assert client.exists_groups([PAIR]) == [path == "shm"], "what nobody could delete is still read on this host"
    assert client.stats()["outages"] > 0
