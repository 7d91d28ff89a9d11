"""A client that is told nothing finds its cluster in the environment, and one without a manager waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.client import Client
from simm.errors import TransportError
from simm.sdk import manager_link
from tests.support.client_values import forked
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

TOKEN, OTHER = "the-token-of-the-cluster", "a-token-of-another-cluster"


def token_file(folder: Path, token: str) -> Path:
    path = folder / token
    path.write_text(f"{token}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def guarded(make_cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A cluster that wants a token, which its servers know by the environment."""
    file = token_file(tmp_path, TOKEN)
    monkeypatch.setenv("SIMM_TOKEN_FILE", str(file))
    yield make_cluster(memory="64M", environment={"SIMM_TOKEN_FILE": str(file)})


@pytest.mark.quick
@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_the_environment_names_cluster_token_namespace_and_path(
    guarded: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("SIMM_MANAGER", guarded.manager)
    monkeypatch.setenv("SIMM_NAMESPACE", "model-a")
    monkeypatch.setenv("SIMM_PATH", path)
    with Client() as client:
        assert client.wait_ready(60.0)
        assert client.namespace == "model-a"
        assert client.put("k", b"v") and client.get("k") == b"v"
        assert [worker["path"] for worker in client.stats()["workers"]] == [path]
    with Client(namespace="other") as client:
        assert client.wait_ready(60.0)
        assert client.get("k") is None


@pytest.mark.parametrize("token", ["", OTHER])
def test_a_wrong_token_is_called_one(guarded: Any, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(_: float) -> None:
        raise AssertionError("it waits for a manager that has answered")

    # This module's sleep only: threads of the tests sleep as well.
    monkeypatch.setattr(manager_link, "time", SimpleNamespace(monotonic=time.monotonic, sleep=again))
    with pytest.raises(TransportError, match=r"refuses this client.*token.*token= or SIMM_TOKEN_FILE"):
        Client(guarded.manager, token=token)


def test_a_lazy_client_with_a_wrong_token_says_so(guarded: Any, tmp_path: Path) -> None:
    with Client(guarded.manager, token=OTHER, lazy=True) as client:
        wait_until(lambda: "token" in client.stats()["manager"], "the client knows why it has no manager")
        assert client.get("k") is None


@pytest.fixture
def before_its_manager(make_cluster: Any) -> Iterator[tuple[Client, Any]]:
    """A lazy client, and a cluster whose manager is not up."""
    cluster = make_cluster(memory="64M")
    cluster.kill("manager")
    with Client(cluster.manager, lazy=True, deadline_s=30.0) as client:
        yield client, cluster


def test_a_lazy_client_misses_until_its_cluster_is_there(before_its_manager: tuple[Client, Any]) -> None:
    client, cluster = before_its_manager
    buffer = bytearray(10)
    assert not client.put("k", b"v") and client.put_many(["a", "b"], [b"1", b"2"]) == [False, False]
    assert client.get("k") is None and client.get_many(["a", "b"]) == [None, None]
    assert client.get_into("k", buffer) is None and client.get_into_many(["k"], [buffer]) == [None]
    assert not client.exists("k") and client.exists_many(["a", "b"]) == [False, False]
    assert not client.delete("k") and not client.delete_many(["k"])[0]
    assert not client.view("k")
    assert not client.wait_ready(0.0)
    stats = client.stats()
    assert stats["workers"] == [] and stats["epoch"] == 0 and stats["outages"] > 0
    cluster.start_manager()
    assert client.wait_ready(60.0)
    assert client.put("k", b"v") and client.get("k") == b"v"
    assert client.stats()["manager"] == "connected"


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_of_a_lazy_client_is_lazy_too(before_its_manager: tuple[Client, Any]) -> None:
    client, cluster = before_its_manager
    assert forked(lambda: client.get("k") is None and client._router is not None) == 0
    cluster.start_manager()

    def child() -> bool:
        assert client.get("k") is None  # nothing is stored yet, and there may be no map yet
        return bool(wait_until(lambda: client.put("k", b"v"), "the child finds its cluster"))

    assert forked(child) == 0
    assert client.wait_ready(60.0)
    assert client.get("k") == b"v"


def test_a_lazy_client_without_a_manager_closes() -> None:
    client = Client(f"127.0.0.1:{reserve_port()}", lazy=True)
    router = client._router
    assert router is not None and client.get("k") is None
    client.close()
    wait_until(lambda: not router._thread.is_alive(), "its threads end")
    wait_until(lambda: not (router.subscription._thread or router._thread).is_alive(), "its threads end")
