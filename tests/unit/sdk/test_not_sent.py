"""What a server that goes away was not sent: its next owner gets it, and what is not known is not done twice."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.ipc import put
from simm.ipc.commit_ring import HEAD, SLOTS, TAIL
from simm.ipc.session import WorkerSession
from simm.sdk import tcp
from simm.sdk.worker_path import Target
from simm.server.stream import Stream
from simm.wire import messages as M
from simm.wire.messages import Status
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


def committed(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bytes]]:
    """Return the keys of all COMMITs from now on, sent or not, by the worker's socket."""
    found: dict[str, set[bytes]] = defaultdict(set)
    submit = WorkerSession.submit

    def noted(self: WorkerSession, msg: Any, *where: Any) -> int:
        if isinstance(msg, M.Commit):
            found[self.path].update(entry[0] for entry in msg.entries)
        return submit(self, msg, *where)

    monkeypatch.setattr(WorkerSession, "submit", noted)
    return found


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("grants", [True, False])
def test_what_was_not_sent_goes_to_the_next_owner(
    cluster: FakeCluster, grants: bool, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``grants``: the client has some, and commits; without, it waits for them. ``goes_on``: False is the control."""
    if not goes_on:
        monkeypatch.setattr(put, "_not_sent", lambda *_: None)
    client = cluster.client("shm")
    assert client.wait_ready(WAIT_S)
    if grants:
        assert all(client.put_many(KEYS, VALUES))
    session = client._routes.target(client.digest("k0")).session  # type: ignore[union-attr]
    assert session is not None and session.ring is not None
    words = session.ring.words
    keys = committed(monkeypatch)

    def waits() -> bool:
        return bool(words[TAIL] - words[HEAD] >= (SLOTS if grants else 1))

    done = left_by_the_first(cluster, client, lambda: client.put_many(KEYS, VALUES), waits)
    unknown = len(keys[cluster.nodes[0].worker.path])
    assert bool(unknown) == grants and unknown < len(KEYS)
    assert done[unknown:] == [goes_on] * (len(KEYS) - unknown)
    stored_before = len(KEYS) if grants else 0
    counted = client.stats()["paths"]["shm"]
    assert client.counters["put_failures"] == done.count(False) == counted["put_failures"]
    assert client.counters["puts"] == done.count(True) + stored_before == counted["puts"]
    assert "node1" not in client.stats()["last_put_failure"], "it has not failed"
    for key, value in zip(KEYS[unknown:], VALUES[unknown:]):
        assert client.get(key) == (value if goes_on else None)
    at_next = keys[cluster.nodes[1].worker.path]
    assert at_next == ({*map(client.digest, KEYS[unknown:])} if goes_on else set()), "nothing is carried out twice"


def test_a_thread_that_has_waited_for_another_one(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one's call has the session's lock all the time, so this one's batch was not sent at all."""
    client = cluster.client("shm")
    assert client.wait_ready(WAIT_S)
    session = client._routes.target(client.digest("k0")).session  # type: ignore[union-attr]
    assert session is not None and session.ring is not None
    words = session.ring.words
    waits = threading.Event()
    acquire = WorkerSession.acquire

    def noted(self: WorkerSession) -> None:
        if threading.current_thread() is second:
            waits.set()
        acquire(self)

    monkeypatch.setattr(WorkerSession, "acquire", noted)
    others: list[Any] = []
    second = threading.Thread(target=lambda: others.append(client.put_many([f"2{key}" for key in KEYS], VALUES)))

    def busy() -> bool:
        if words[TAIL] == words[HEAD]:
            return False
        second.start()
        return waits.wait(WAIT_S)

    done = left_by_the_first(cluster, client, lambda: client.put_many(KEYS, VALUES), busy)
    second.join(WAIT_S)
    assert done == others[0] == [True] * len(KEYS)


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


@pytest.mark.parametrize("operation", ["store", "delete", "keep", "group"])
@pytest.mark.parametrize("owner", ["the same", "none"])
def test_without_another_owner_it_fails(
    cluster: FakeCluster, owner: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a server that has died, and only a Status gets out."""
    client = cluster.client("shm")
    assert client.wait_ready(WAIT_S)
    target = client._routes.target(client.digest("k0"))
    assert target is not None and target.session is not None
    cluster.nodes[0].die()
    wait_until(lambda: target.path == "down", "the client has seen it")
    if owner == "none":
        route = client._routes.route
        monkeypatch.setattr(type(target), "ready", lambda _: route.__setitem__(slice(None), [None] * len(ALL)))
    digests = [client.digest(key) for key in KEYS]
    calls: dict[str, Callable[[], list[int]]] = {
        "store": lambda: client._puts.store(digests, [memoryview(value) for value in VALUES]),
        "delete": lambda: client._puts.delete(digests),
        "keep": lambda: client._puts.keep(digests, 1, 60),
        "group": lambda: client._puts.group([[digest] for digest in digests]),
    }
    assert calls[operation]() == [Status.UNAVAILABLE] * len(KEYS)


def test_the_sole_server_changes_while_keys_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the map changes in between, the keys have an owner: the former one, or the new ones by their shards."""
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client("shm")
        router = client._router
        assert router is not None and router.sole is not None
        answers: Iterator[Target | None] = itertools.chain([router.sole], itertools.repeat(None))
        monkeypatch.setattr(type(router), "sole", property(lambda _: next(answers)), raising=False)
        digests = [client.digest(key) for key in KEYS]
        for _ in range(2):
            assert None not in dict(client._routes.group(digests))


# --- by TCP, whose client sends a request again after an idle connection broke -----------------------------


@pytest.fixture
def by_tcp(cluster: FakeCluster) -> Client:
    """A client with an idle connection to the first server, which has two of its keys."""
    client = cluster.client("tcp")
    assert client.wait_ready(WAIT_S) and client.put_many(["k0", "k1"], [b"v", b"w"]) == [True, True]
    return client


def delete(client: Client, kind: str, keys: list[str]) -> list[int]:
    digests = [client.digest(key) for key in keys]
    return client.delete_digests(digests) if kind == "DELETE" else client.delete_sized(digests, [1] * len(keys))


@contextlib.contextmanager
def dies_before_its_answer(
    monkeypatch: pytest.MonkeyPatch, *, carried_out: bool, then: Callable[[], None] = lambda: None
) -> Iterator[list[list[int]]]:
    """The stream ends the next connection on which it gets a mutation; yield what it was to answer to each."""
    answers: list[list[int]] = []
    real = Stream._mutate

    def mutate(self: Stream, peer: Any, msg: Any) -> list[int]:
        first = not answers
        answers.append(real(self, peer, msg) if carried_out or not first else [])
        if first:
            then()
            peer.sock.shutdown(socket.SHUT_RDWR)
        return answers[-1] or [Status.OK] * len(msg[0])

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "_mutate", mutate)
        yield answers


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("kind", ["DELETE", "DELETE_SIZED"])
def test_a_delete_that_was_sent_twice_finds_nothing_absent(
    by_tcp: Client, kind: str, carried_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request had dropped the keys, and the answer to the second said that they had not been stored."""
    with dies_before_its_answer(monkeypatch, carried_out=carried_out) as answers:
        got = delete(by_tcp, kind, ["k0", "absent", "k1"])
    assert len(answers) == 2
    assert got == ([Status.UNAVAILABLE] * 3 if carried_out else [Status.OK, Status.UNAVAILABLE, Status.OK])
    assert by_tcp.counters["outages"] == got.count(Status.UNAVAILABLE), "and of no path"
    assert by_tcp.exists_many(["k0", "k1"]) == [False, False]
    assert delete(by_tcp, kind, ["k0"]) == [Status.NOT_FOUND], "known again"


def test_a_batch_of_several_requests_is_in_doubt_where_one_was_sent_twice(
    by_tcp: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "EXCHANGE_KEYS", 2)
    with dies_before_its_answer(monkeypatch, carried_out=True) as answers:
        got = delete(by_tcp, "DELETE", ["absent", "k0", "gone", "k1", "none"])
    assert len(answers) == 4
    assert got == [Status.UNAVAILABLE] * 2 + [Status.NOT_FOUND, Status.OK, Status.NOT_FOUND]


def test_it_stays_in_doubt_at_the_next_owner(
    by_tcp: Client, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server has dropped the key, and has no shard any more when it is asked again."""

    def move() -> None:
        cluster.own({1: ALL})
        cluster.instruct()
        cluster.publish()

    with dies_before_its_answer(monkeypatch, carried_out=True, then=move) as answers:
        assert delete(by_tcp, "DELETE", ["k0"]) == [Status.UNAVAILABLE]
    assert answers[:2] == [[Status.OK], [Status.WRONG_OWNER]] and answers[-1] == [Status.NOT_FOUND]


@pytest.mark.parametrize("kind", ["DELETE", "DELETE_SIZED"])
def test_a_delete_after_the_stream_has_restarted_is_sent_once(by_tcp: Client, cluster: FakeCluster, kind: str) -> None:
    """The connection was closed while it was idle, so what is not there now was not there."""
    target = by_tcp._routes.target(by_tcp.digest("k0"))
    assert target is not None and target.tcp is not None
    (idle,) = target.tcp._idle
    for peer in list(cluster.nodes[0].stream.loop.peers):
        peer.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: idle.has_input(0), "the end has come")
    assert delete(by_tcp, kind, ["k0", "absent"]) == [Status.OK, Status.NOT_FOUND]
    assert by_tcp.counters["outages"] == 0


@contextlib.contextmanager
def stores(monkeypatch: pytest.MonkeyPatch, *, dies: bool) -> Iterator[list[Any]]:
    """Yield the STOREs that streams get. With ``dies`` the first ends its connection instead of an answer."""
    seen: list[Any] = []
    real = Stream._store

    def store(self: Stream, peer: Any, state: Any, number: int, msg: Any) -> None:
        seen.append(msg)
        if dies and len(seen) == 1:
            peer.sock.shutdown(socket.SHUT_RDWR)
        else:
            real(self, peer, state, number, msg)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "_store", store)
        yield seen


def test_a_put_that_was_sent_is_not_sent_again(by_tcp: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may have stored it, and meanwhile another client a newer value."""
    with stores(monkeypatch, dies=True) as seen:
        assert by_tcp.put("k0", b"older") is False
    assert len(seen) == 1
    assert by_tcp.stats()["put_failures"] == 1 and "did not answer" in by_tcp.stats()["last_put_failure"]
    assert by_tcp.wait_ready(WAIT_S)
    wait_until(lambda: by_tcp.put("k0", b"newer"), "the path is back")


def test_a_put_after_the_stream_has_restarted_is_sent_once(
    by_tcp: Client, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was closed while it was idle: nothing goes there, and nothing is lost."""
    target = by_tcp._routes.target(by_tcp.digest("k0"))
    assert target is not None and target.tcp is not None
    (idle,) = target.tcp._idle
    for peer in list(cluster.nodes[0].stream.loop.peers):
        peer.sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: idle.has_input(0), "the end has come")
    with stores(monkeypatch, dies=False) as seen:
        assert by_tcp.put_many(["k0", "k1"], [b"x", b"y"]) == [True, True]
    assert len(seen) == 1 and by_tcp.get_many(["k0", "k1"]) == [b"x", b"y"]
