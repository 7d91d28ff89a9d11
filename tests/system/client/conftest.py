"""Clients of the session's cluster, by shared memory and by TCP, each in a namespace of its own."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from tests.support.client_values import PATHS


@pytest.fixture(autouse=True)
def without_haste(patient: None) -> None:
    """In tests of this folder a client that is given no deadline is patient."""


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """Return a namespace of the test's own, as the cluster is shared."""
    return f"c{zlib.crc32(request.node.nodeid.encode()):08x}"


@pytest.fixture
def client(cluster: Any, path: str, namespace: str) -> Iterator[Client]:
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=30.0) as connected:
        assert connected.wait_ready(60.0)
        yield connected
        assert [worker["path"] for worker in connected.stats()["workers"]] == [path]
