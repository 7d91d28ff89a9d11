"""What counts a key that its owner by the map does not have, and that is read at another one: its call, once."""

from __future__ import annotations

from typing import Any

import pytest

from simm.sdk.reads import Gets
from tests.support.cluster_clients import full, published, value_of
from tests.support.fake_cluster import ALL, FakeCluster


@pytest.mark.parametrize("keys", [["k0"], ["k0", "k1", "k2"]])
def test_a_key_that_is_read_at_its_new_owner_elsewhere_is_one_hit(
    monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """It was two by its path, with twice the bytes."""
    with FakeCluster(2) as cluster:
        client = full(cluster, "tcp")
        values = [value_of(key, 1) for key in keys]
        cluster.own({1: ALL})
        cluster.instruct()
        resolve = Gets._resolve
        looked: list[int] = []

        def held(self: Gets, *arguments: Any, **named: Any) -> None:
            if self is client._gets and not looked:
                looked.append(1)
                published(cluster, client)
                other = cluster.client("tcp")
                assert other.put_many(keys, values) == [True] * len(keys)
            resolve(self, *arguments, **named)

        monkeypatch.setattr(Gets, "_resolve", held)
        before = client.stats()
        assert (client.get_many(keys) if len(keys) > 1 else [client.get(keys[0])]) == values
        assert looked
        after = client.stats()
        assert after["hits"] - before["hits"] == len(keys)
        by_tcp = [each["paths"]["tcp"] for each in (before, after)]
        assert by_tcp[1]["hits"] - by_tcp[0]["hits"] == len(keys)
        assert by_tcp[1]["bytes_read"] - by_tcp[0]["bytes_read"] == sum(map(len, values))
