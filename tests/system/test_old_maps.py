"""Clients with a map of the cluster that a data server was of, after it has come to another one."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from simm.client import Client
from simm.errors import SimmError
from tests.support.left_arenas import KEYS, all_of, fill, found, named, stop_server, value_of
from tests.support.processes import HERE, Cluster, new_folder
from tests.support.waiting import wait_until


@contextlib.contextmanager
def manager_of(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster's manager, with its state, at another address. Its data server goes on asking at the old one."""
    cluster.kill("manager")
    elsewhere = Cluster(new_folder())
    shutil.copytree(cluster.folder / "state", elsewhere.folder / "state")
    try:
        elsewhere.start_manager()
        yield elsewhere
    finally:
        elsewhere.stop()


def replace_manager(cluster: Cluster, other: Cluster) -> None:
    """At the cluster's old address, the manager of another one."""
    stop_server(other)
    other.kill("manager")
    shutil.rmtree(cluster.folder / "state")
    shutil.copytree(other.folder / "state", cluster.folder / "state")
    cluster.start_manager()


def got(client: Client, number: int) -> bytes | None:
    with contextlib.suppress(SimmError):
        return client.get(f"key {number}")
    return None


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("how", ["while it runs", "at its restart"])
def test_a_server_comes_to_another_cluster(nothing_is_left: Path, how: str, path: str) -> None:
    """The first one's clients neither read there any more nor store; with its map they would have found the way."""
    with (
        named(f"{HERE}moved") as cluster, named(f"{HERE}native") as other, manager_of(cluster) as elsewhere,
        Client(elsewhere.manager, namespace="arenas", path=path, deadline_s=5.0) as client,
    ):  # fmt: skip
        wait_until(lambda: client.put("key 0", value_of(0, "old")), "a put within the deadline")
        assert client.get("key 0") == value_of(0, "old")
        assert fill(other, "other") == KEYS
        if how == "at its restart":
            stop_server(cluster)
        replace_manager(cluster, other)
        if how == "at its restart":
            cluster.start_server()

        def filled() -> bool:
            assert got(client, 0) in (None, value_of(0, "old"))
            with contextlib.suppress(SimmError, AssertionError):
                return found(cluster) == all_of("new") or fill(cluster, "new") == KEYS
            return False

        wait_until(filled, "it serves the other cluster", 60)
        until = time.monotonic() + 1.0  # for what connects again; nothing is expected to happen
        while time.monotonic() < until:
            for number in range(KEYS):
                assert got(client, number) in (None, value_of(0, "old")), "another cluster's value"
            with contextlib.suppress(SimmError):
                client.exists("key 1")
                client.put("key 1", b"of the first cluster")
        assert found(cluster) == all_of("new")
