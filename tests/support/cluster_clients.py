"""Clients of a cluster in this process: connected, of its latest map, and what they put."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simm.client import Client
from simm.ipc.patience import Patience, Server
from simm.ipc.steps import Steps, finish
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import WAIT_S, wait_until

#: A bound for things that hang, seconds.
KEYS = [f"k{number}" for number in range(60)]


def value_of(key: str, version: int = 0) -> bytes:
    return f"{key}/{version};".encode() * 40


def full(cluster: FakeCluster, path: str, **more: Any) -> Client:
    """Return a client of a fake cluster in which node 0 has everything and all keys are stored."""
    cluster.settled({0: ALL})
    # A test's short deadline is for its own calls. These, and the first connection, take as long as they take.
    filler = cluster.client(path, **{**more, "deadline_s": WAIT_S})
    assert filler.put_many(KEYS, [value_of(key) for key in KEYS]) == [True] * len(KEYS)
    if "deadline_s" not in more:
        return filler
    client = cluster.client(path, **more)
    assert client.wait_ready(WAIT_S)
    return client


def one_after_the_other(self: Patience, visits: Iterable[tuple[Server, Steps[None]]], meanwhile: Any = None) -> None:
    """Visit servers one after the other: what ``Patience.together`` must not be, for controls."""
    for server, steps in visits:
        if self.has_time_for(server):
            finish(steps)


def published(cluster: FakeCluster, client: Client) -> None:
    cluster.publish()
    wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the client has the map")
