"""Keeping values by a client that reaches its servers by RDMA: the request goes by its connection to the stream."""

from __future__ import annotations

import pytest

from tests.support.fake_rdma_cluster import FakeRdmaCluster

pytestmark = pytest.mark.usefixtures("nothing_retired")


def test_keep_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, rails=["r0"], mine=["r0"], size=64 << 20) as cluster:
        client = cluster.rdma()
        assert client.put("a", b"1", ttl=60, keep="hard") and client.keep(["a", "no"], 60) == [True, False]
        store = cluster.node.worker.store
        assert [entry.how for _, entry in store.space.kept.items()] == [1]
        assert client.unkeep(["a"]) == [True] and not store.space.kept
