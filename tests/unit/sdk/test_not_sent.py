"""What a server that goes away was not sent: its next owner gets it, and what is not known is not done twice."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.ipc.commit_ring import HEAD, SLOTS, TAIL
from simm.ipc.session import WorkerSession
from simm.sdk.writes import Puts
from simm.wire import messages as M
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import WAIT_S, wait_until

KEYS = [f"k{number}" for number in range(300)]
VALUES = [key.encode() * 100 for key in KEYS]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(2) as made:
        made.settled({0: ALL})
        yield made


def leave(cluster: FakeCluster) -> None:
    """Give all shards to the other server, and tell it and the clients. The first one need not hear of it."""
    cluster.own({1: ALL})
    cluster.instruct(1)
    cluster.publish()


def left_by_the_first(cluster: FakeCluster, client: Client, call: Callable[[], Any], busy: Callable[[], bool]) -> Any:
    """Call, let the first server fall silent, give its shards away once it is ``busy``, and kill it."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(call()))
    worker = cluster.nodes[0].worker
    with worker.doomed():
        thread.start()
        wait_until(busy, "the call waits for the first server")
        leave(cluster)
        router = client._router
        assert router is not None
        wait_until(lambda: router.epoch == cluster.epoch, "the client has the map")
    thread.join(WAIT_S)
    assert done
    return done[0]


def sent_to(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Note each commit that is sent: the worker's socket, and its number of keys."""
    sent = []
    submit = WorkerSession.submit

    def noted(self: WorkerSession, msg: Any) -> int:
        ticket = submit(self, msg)
        if isinstance(msg, M.Commit):
            sent.append((self.path, len(msg.entries)))
        return ticket

    monkeypatch.setattr(WorkerSession, "submit", noted)
    return sent


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("grants", [True, False])
def test_what_was_not_sent_goes_to_the_next_owner(
    cluster: FakeCluster, grants: bool, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``grants``: the client has some, and commits; without, it waits for them. ``goes_on``: False is the control."""
    if not goes_on:
        monkeypatch.setattr(Puts, "_not_sent", lambda *_: None)
    client = cluster.client("shm")
    assert client.wait_ready(WAIT_S)
    if grants:
        assert all(client.put_many(KEYS, VALUES))
    session = client._routes.target(client.digest("k0")).session  # type: ignore[union-attr]
    assert session is not None and session.ring is not None
    words = session.ring.words
    sent = sent_to(cluster, monkeypatch)

    def waits() -> bool:
        return bool(words[TAIL] - words[HEAD] >= (SLOTS if grants else 1))

    done = left_by_the_first(cluster, client, lambda: client.put_many(KEYS, VALUES), waits)
    unknown = sum(keys for path, keys in sent if path == cluster.nodes[0].worker.path)
    assert bool(unknown) == grants and unknown < len(KEYS)
    assert done[unknown:] == [goes_on] * (len(KEYS) - unknown)
    assert client.counters["put_failures"] == done.count(False)
    for key, value in zip(KEYS[unknown:], VALUES[unknown:]):
        assert client.get(key) == (value if goes_on else None)
    at_next = sum(keys for path, keys in sent if path == cluster.nodes[1].worker.path)
    assert at_next == (len(KEYS) - unknown if goes_on else 0), "what may have been carried out is not sent again"


@pytest.mark.parametrize("operation", ["put", "put_many", "delete_many"])
def test_a_call_that_meets_a_server_that_has_left_goes_on(
    cluster: FakeCluster, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map comes between the choice of a server and the look whether it is there."""
    client = cluster.client("shm")
    assert client.wait_ready(WAIT_S)
    cluster.nodes[0].die()
    target = client._routes.target(client.digest("k0"))
    assert target is not None
    wait_until(lambda: target.path == "down", "the client has seen it")
    ready = type(target).ready
    came = threading.Event()

    def late(self: Any) -> bool:
        if self is target and not came.is_set():
            came.set()
            leave(cluster)
            router = client._router
            assert router is not None
            wait_until(lambda: router.epoch == cluster.epoch, "the client has the map")
        return ready(self)

    monkeypatch.setattr(type(target), "ready", late)
    if operation == "delete_many":
        with contextlib.closing(cluster.client("shm")) as other:
            assert client.delete_many(["k0", "k1"]) == [False, False]
            assert client.counters["outages"] == 0 and other.get("k0") is None
    elif operation == "put":
        assert client.put("k0", b"v") and client.get("k0") == b"v"
    else:
        assert client.put_many(["k0", "k1"], [b"v", b"w"]) == [True, True]
        assert client.get_many(["k0", "k1"]) == [b"v", b"w"]
    assert came.is_set()
