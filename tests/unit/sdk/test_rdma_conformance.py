"""What clients promise, by RDMA on a network in software: each operation, and its asyncio form."""

from __future__ import annotations

from typing import Any

import pytest

from simm.client import Client
from tests.support.conformance import groups, if_absent, keep, keys, large, parts, pins, values
from tests.support.conformance.world import PROMISES, World, ordered
from tests.support.fake_rdma_cluster import FakeRdmaCluster, until_rdma

MIB = 1 << 20
#: The modules whose promises are about values. Importing them fills PROMISES.
MODULES = (values, keys, parts, pins, if_absent, keep, groups, large)

#: It is about what ``Client`` is made with.
NO_PATH = ("bad_arguments_are_refused",)


@pytest.mark.full
@pytest.mark.usefixtures("nothing_retired")
@pytest.mark.parametrize("name", [name for name in ordered(PROMISES, *MODULES) if name not in NO_PATH])
def test_a_client_keeps_its_promises_by_rdma(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with FakeRdmaCluster(monkeypatch, size=256 * MIB) as cluster:

        def connect(**arguments: Any) -> Client:
            client = cluster.client(**{"path": "rdma,tcp", **arguments})
            if "path" not in arguments:
                until_rdma(client)
            return client

        with World(connect, "conformance", lambda: None, lambda: None) as world:
            PROMISES[name](world)
