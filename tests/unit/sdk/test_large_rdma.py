"""Values in parts by RDMA: manifests go by TCP, parts as any value."""

from __future__ import annotations

from typing import Any

import pytest

from simm.client import View
from simm.sdk.batch import LARGE
from tests.support.client_values import pattern
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma
from tests.support.small_limits import PART, small_limits

MIB = 1 << 20


@pytest.mark.parametrize("path", ["rdma,tcp", "rdma"])
def test_parts_go_by_rdma(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Where values must not go by TCP, manifests still do."""
    value = pattern(40 * PART + 1)
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster, small_limits():
        client = cluster.client(path)
        until_rdma(client)
        source, sink = client.register(bytearray(value)), client.register(bytearray(len(value)))
        for key, given in (("k", value), ("r", source)):
            assert client.put(key, given) and client.exists(key)
        assert client.stats()["rdma_puts"] == 2 * 41
        before = client.stats()["rdma_gets"]
        assert client.get("k") == value
        assert client.get_into("r", sink) == len(value) and bytes(sink.view()) == value
        assert client.get_many(["k", "no", "r"]) == [value, None, value]
        assert client.stats()["rdma_gets"] - before == 4 * 41
        tail = bytearray(PART + 2)
        assert client.get_ranges("k", [(len(value) - PART - 2, PART + 2, tail)]) == len(value)
        assert tail == value[-PART - 2 :]
        with client.pin(["k", "no", "r"]) as pins:
            assert pins.lengths == [len(value), None, len(value)]
            assert client.delete("r")
            for key in ("k", "r"):
                tail = bytearray(PART + 2)
                got = pins.get_ranges(key, [(len(value) - PART - 2, PART + 2, tail)])
                gone = key == "r" and path == "rdma"  # what its slot has no more would come by TCP
                assert got is None if gone else (got == len(value) and tail == value[-PART - 2 :])
        assert client.put("r", source)
        assert client.put("small", b"s") and client.get("small") == b"s"
        for _ in range(2):  # by its sets, and by its place, if one remembered it
            for wanted in (None, memoryview(bytearray(64))):
                got: list[Any] = client._gets.read_many([client.digest("k")], [wanted])
                assert got == [LARGE]
        with client.view("k") as view:
            assert type(view) is View and bytes(view) == value
        assert client.delete("k") and client.get("k") is None
