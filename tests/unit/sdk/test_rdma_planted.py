"""What no get returns does not exist, by each path: an engine that asks before it puts would never put that key."""

from __future__ import annotations

import contextlib

import pytest

from simm.client import Client
from simm.cluster.epochs import FOR_EVER
from simm.config.client_options import ClientOptions
from simm.config.tokens import Token, TokenRole
from simm.ipc.steps import finish
from simm.rdma.remote_arena import RemoteArena
from simm.sdk.path import ClientContext
from simm.sdk.tcp import TcpPath
from simm.wire.messages import Status
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S

RED = Token("the-token-of-team-red", TokenRole.CLIENT, "team-red", {"red": None})
KEYS = [f"key {number}" for number in range(50)]

pytestmark = pytest.mark.usefixtures("nothing_retired")


def plant(cluster: FakeRdmaCluster, client: Client, keys: list[str]) -> None:
    """Store values under the digests of a client's keys, as one that is bound to the namespace ``red``.

    From now on the stream asks for a token, but those who are connected.
    """
    cluster.node.stream.stream.tokens = (RED,)
    options = ClientOptions(deadline_s=WAIT_S, token=RED.secret, namespace="red")
    with contextlib.closing(TcpPath(ClientContext(options), "127.0.0.1", cluster.node.stream.port)) as path:
        path.connect()
        entries = [(client.digest(key), [memoryview(b"planted")], 0, 0) for key in keys]
        assert finish(path.store(entries)) == [Status.OK] * len(keys)


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
        plant(cluster, client, KEYS)
        for count in (1, 5, 20, len(KEYS)):
            assert client.get_many(KEYS[:count]) == [None] * count
            assert client.exists_many(KEYS[:count]) == [False] * count
        assert not client.exists(KEYS[0]) and client.prefix(KEYS).keys == 0
        assert client.put_many(KEYS, [b"right"] * len(KEYS)) == [True] * len(KEYS)
        assert client.exists_many(KEYS) == [True] * len(KEYS)
        assert client.exists(KEYS[0]) and client.get(KEYS[0]) == b"right"


def test_what_a_bound_client_has_stored_exists_for_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        clients = [opened(cluster, path, "red") for path in ("rdma,tcp", "shm", "tcp")]
        plant(cluster, clients[0], KEYS)
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
