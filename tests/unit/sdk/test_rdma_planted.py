"""What no get returns does not exist, by each path: an engine that asks before it puts would never put that key."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from simm.arena.layout import ENTRY_LARGE
from simm.client import Client
from simm.cluster.epochs import FOR_EVER
from simm.config.client_options import ClientOptions
from simm.config.tokens import Token, TokenRole
from simm.ipc.steps import finish
from simm.rdma.remote_arena import RemoteArena
from simm.sdk.batch import NoValue, span_of
from simm.sdk.near.promotion import near_digest
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.wire.messages import Status
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma
from tests.support.several_hosts import HostClient, separate
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S

RED = Token("the-token-of-team-red", TokenRole.CLIENT, "team-red", {"red": None})
KEYS = [f"key {number}" for number in range(50)]

pytestmark = pytest.mark.usefixtures("nothing_retired")


def plant(cluster: FakeRdmaCluster, digests: list[bytes], flags: int = 0) -> None:
    """Store values under digests of another namespace, as a client that is bound to the namespace ``red``.

    From now on the stream asks for a token, but those who are connected.
    """
    cluster.node.stream.stream.tokens = (RED,)
    options = ClientOptions(deadline_s=WAIT_S, token=RED.secret, namespace="red")
    with contextlib.closing(TcpPath(ClientContext(options), "127.0.0.1", cluster.node.stream.port)) as path:
        path.connect()
        entries = [(digest, [memoryview(b"planted")], 0, flags) for digest in digests]
        assert finish(path.store(entries)) == [Status.OK] * len(digests)


def plant_keys(cluster: FakeRdmaCluster, client: Client, keys: list[str]) -> None:
    plant(cluster, [client.digest(key) for key in keys])


def opened(cluster: FakeRdmaCluster, path: str, namespace: str) -> Client:
    """Return a client that has its connections."""
    client = cluster.client(path, namespace=namespace)
    if path.startswith("rdma"):
        until_rdma(client)
    assert client.exists_many(["never"] * 20) == [False] * 20
    return client


@pytest.mark.parametrize("path", ["rdma,tcp", "shm", "tcp"])
def test_what_a_bound_client_has_planted_does_not_exist(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = opened(cluster, path, "blue")
        plant_keys(cluster, client, KEYS)
        for count in (1, 5, 20, len(KEYS)):
            assert client.get_many(KEYS[:count]) == [None] * count
            assert client.exists_many(KEYS[:count]) == [False] * count
        assert not client.exists(KEYS[0]) and client.prefix(KEYS).keys == 0
        assert client.put_many(KEYS, [b"right"] * len(KEYS)) == [True] * len(KEYS)
        assert client.exists_many(KEYS) == [True] * len(KEYS)
        assert client.exists(KEYS[0]) and client.get(KEYS[0]) == b"right"


@pytest.mark.parametrize("path", ["rdma,tcp", "shm", "tcp"])
def test_the_kind_and_the_length_of_what_was_planted_are_not_said(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """By shared memory each of these reads raised, or took the value for a manifest."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = opened(cluster, path, "blue")
        plant_keys(cluster, client, KEYS)
        room = span_of(bytearray(20))
        room.least = 20
        for count in (1, 5, len(KEYS)):
            small = [bytearray(3) for _ in range(count)]
            assert client.get_into_many(KEYS[:count], small) == [None] * count
            assert client.get_digests([client.digest(KEYS[0])] * count, [room] * count) == [NoValue.MISS] * count
            long = [[(0, 20, bytearray(20))] for _ in range(count)]
            assert client.get_ranges_many(KEYS[:count], long) == [None] * count
        assert client.get_into(KEYS[0], bytearray(3)) is None
        assert client.get_ranges(KEYS[0], [(0, 20, bytearray(20))]) is None
        plant(cluster, [client.digest("large")], ENTRY_LARGE)
        assert client.get("large") is None and client.get_many(["large"] * 20) == [None] * 20
        assert client.get_into("large", bytearray(20)) is None
        assert client.get_ranges("large", [(0, 3, bytearray(3))]) is None
        assert client.counters["large"] == 0, "no later call looks for manifests"


def test_what_is_planted_as_a_near_copy_hides_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that its owner has was a miss on that host, or its reads raised."""
    separate(monkeypatch)
    with FakeRdmaCluster(monkeypatch, 2) as cluster:
        client = HostClient(
            cluster.node.info.node, "{}:{}".format(*cluster.manager.address), namespace="blue", path="shm,tcp",
            near_copies=True, deadline_s=WAIT_S,
        )  # fmt: skip
        cluster.clients.append(client)
        assert client.wait_ready(WAIT_S)
        assert client.put_many(KEYS, [b"a longer value"] * len(KEYS)) == [True] * len(KEYS)
        routes: Any = client._routes
        one, two, three = [key for key in KEYS if routes.target(client.digest(key)).reader is None][:3]
        near: Any = client._near
        copies = {key: near_digest(client.digest(key), near._shards()) for key in (one, two, three)}
        plant(cluster, [copies[one], copies[two]])
        plant(cluster, [copies[three]], ENTRY_LARGE)
        assert client.get_ranges(one, [(7, 7, bytearray(7))]) == 14
        room = span_of(bytearray(14))
        room.least = 14
        assert client.get_digests([client.digest(two)], [room]) == [14]
        assert client.get_into(three, bytearray(14)) == 14 and client.counters["large"] == 0


def test_what_a_bound_client_has_stored_exists_for_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        clients = [opened(cluster, path, "red") for path in ("rdma,tcp", "shm", "tcp")]
        plant_keys(cluster, clients[0], KEYS)
        for client in clients:
            assert client.exists_many(KEYS) == [True] * len(KEYS) and client.exists_many(KEYS[:3]) == [True] * 3
            assert client.exists(KEYS[0]) and client.get(KEYS[0]) == b"planted"


@pytest.mark.parametrize("checked", [True, False], ids=["", "control"])
def test_what_has_an_epoch_does_not_exist_once_the_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        cluster.advance()
        cluster.publish()
        client = cluster.rdma()
        wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the client has the map")
        assert client.put_many(KEYS, [b"value"] * len(KEYS)) == [True] * len(KEYS)
        assert client.exists_many(KEYS) == [True] * len(KEYS) and client.exists(KEYS[0])
        cluster.extend_leases(1)
        if not checked:
            monkeypatch.setattr(RemoteArena, "is_for_stream", lambda *_: False)
        assert client.get_many(KEYS) == [None] * len(KEYS)
        assert client.exists_many(KEYS) == [not checked] * len(KEYS)
        assert client.exists(KEYS[0]) is not checked
        cluster.extend_leases(FOR_EVER)
        assert client.exists_many(KEYS) == [True] * len(KEYS) and client.get(KEYS[0]) == b"value"
