"""Fixtures: no session of another test is left; a client by TCP, of a cluster that has a value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simm.client import Client
from simm.ipc import session
from tests.support.fake_cluster import ALL, FakeCluster


@pytest.fixture
def nothing_retired() -> Iterator[None]:
    """Forget the sessions that other tests, and the test itself, have closed while copies ran."""
    session.RETIRED.clear()
    yield
    session.RETIRED.clear()


@pytest.fixture
def client() -> Iterator[Client]:
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        made = cluster.client("tcp")
        assert made.put("k", b"v")
        yield made
