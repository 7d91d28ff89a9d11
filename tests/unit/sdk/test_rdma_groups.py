"""Groups by RDMA: values by WRITEs, and the request for the group by the stream."""

from __future__ import annotations

import pytest

from tests.support.fake_rdma_cluster import FakeRdmaCluster

pytestmark = pytest.mark.usefixtures("nothing_retired")


def test_a_group_is_stored_by_rdma_and_leaves_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, rails=("r",), mine=("m",), size=64 << 20) as cluster:
        client = cluster.rdma()
        groups = [[f"page{{{number}}}/k", f"page{{{number}}}/v"] for number in range(30)]
        values = [[b"k" * 70_000, b"v" * 4096]] * 30
        assert client.put_groups(groups, values) == [True] * 30
        assert client.stats()["rdma_puts"] == 60
        assert client.exists_groups(groups) == [True] * 30
        assert client.get_many(groups[7]) == values[7]
        assert client.delete(groups[7][1])
        assert client.exists_groups(groups) == [number != 7 for number in range(30)]
        assert client.get_many(groups[7]) == [None, None], "nor is one found by where it was"
