"""A client that is dropped without ``close``: nothing of it waits for the cycle collector, which engines switch off."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "near": {"near_copies": True}, "replicas": {"replicas": 2}, "absent": {"put_if_absent": True},
    "checksum": {"checksum": True}, "traced": {"trace": 1.0}, "traced near": {"trace": 1.0, "near_copies": True},
}  # fmt: skip


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_dropped_client_keeps_no_router(settings: dict[str, Any], tmp_path: Any) -> None:
    """With near copies or checksums it stayed, with its sessions, their grants, and the map of each arena."""
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        address = "{}:{}".format(*cluster.manager.address)
        client = Client(address, path="shm", deadline_s=30.0, trace_dir=str(tmp_path), **settings)
        client.put("k", b"v")
        client.get_many(["k", "l"])
        assert not client.exists("never") and not client.delete("never")
        router = weakref.ref(client._router)
        del client
        wait_until(lambda: router() is None, "its threads may be at work with it")
