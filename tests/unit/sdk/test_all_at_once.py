"""A batch for several workers is with all of them before it waits for any. So none holds up the others."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from simm.arena.hashing import shard_of
from simm.client import Client
from simm.cluster.lookup import Unresolved
from simm.ipc import session as session_module
from simm.ipc.patience import Patience, Server
from simm.ipc.steps import Steps
from simm.rpc import OPCODES
from simm.sdk.ops.owners import Owners
from simm.wire import messages as M
from tests.support.cluster_clients import WAIT_S, one_after_the_other, published, value_of
from tests.support.fake_cluster import ALL, FakeCluster, Node
from tests.support.waiting import wait_until

COUNT = 4
KEYS = [f"k{number}" for number in range(120)]
VALUES = [value_of(key) for key in KEYS]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(COUNT) as running:
        running.settled({number: ALL[number::COUNT] for number in range(COUNT)})
        yield running
    session_module.RETIRED.clear()


def owner_of(client: Client, key: str) -> int:
    return shard_of(client.digest(key)) % COUNT


def connected(cluster: FakeCluster, path: str, **more: Any) -> Client:
    """Return a client that has a path to every worker, and grants of each."""
    client = cluster.client(path, **more)
    assert client.wait_ready(WAIT_S)
    assert client.put_many(KEYS, VALUES) == [True] * len(KEYS)
    return client


def get_all(client: Client) -> list[bool]:
    return [got == value for got, value in zip(client.get_many(KEYS), VALUES)]


CALLS: dict[str, Callable[[Client], list[bool]]] = {
    "put": lambda client: client.put_many(KEYS, VALUES),
    "get": get_all,
    "exists": lambda client: client.exists_many(KEYS),
    "delete": lambda client: client.delete_many(KEYS),
}
#: The calls that need each worker, or its stream.
CASES = [("shm", "put"), ("shm", "delete"), *(("tcp", call) for call in CALLS)]


def hold(node: Node, at_call: Callable[[int], None], after: Callable[[int], None] = lambda _: None) -> None:
    """Let worker and stream of a node call these about so many keys, before and after they carry out a request."""

    def held(real: Callable[..., Any], number: int = 0) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            last = arguments[-1]
            keys = last if isinstance(last, list) else last[0]  # a message's first field is its keys
            if isinstance(last, M.Fetch):
                keys = [key for key, most in keys if most]  # where sizes are asked for, the values follow
            count = number or len(keys)
            at_call(count)
            answer = real(*arguments)
            after(count)
            return answer

        return call

    worker = node.worker.worker
    handlers = worker._handlers
    for kind in (M.Commit, M.Delete):
        handlers[OPCODES[kind]] = held(handlers[OPCODES[kind]])
    worker._commit_one = worker.rings._commit_one = held(worker._commit_one, 1)  # type: ignore[method-assign]
    stream = node.stream.stream
    stream._fetch = held(stream._fetch)  # type: ignore[method-assign]
    stream._exists = held(stream._exists)  # type: ignore[method-assign]


def meet(cluster: FakeCluster, timeout_s: float) -> threading.Barrier:
    """Let each worker give its first answer once all of them have been asked, or after ``timeout_s``."""
    barrier = threading.Barrier(COUNT)

    def wait(came: list[None], _count: int) -> None:
        if not came:
            came.append(None)
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(timeout_s)

    for node in cluster.nodes:
        hold(node, functools.partial(wait, []))
    return barrier


@pytest.mark.parametrize(("path", "call"), CASES)
def test_all_are_asked_before_one_is_waited_for(cluster: FakeCluster, path: str, call: str) -> None:
    client = connected(cluster, path)
    barrier = meet(cluster, WAIT_S)
    assert CALLS[call](client) == [True] * len(KEYS)
    assert not barrier.broken


@pytest.mark.parametrize(("path", "call"), [("shm", "put"), ("tcp", "get")])
def test_control_one_after_the_other_they_never_meet(
    cluster: FakeCluster, path: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected(cluster, path)
    barrier = meet(cluster, 0.05)
    monkeypatch.setattr(Patience, "together", one_after_the_other)
    CALLS[call](client)
    assert barrier.broken


@pytest.mark.parametrize("silent", [0, COUNT - 1])
@pytest.mark.parametrize(("path", "call"), CASES)
def test_a_silent_worker_holds_up_nobody(
    cluster: FakeCluster, path: str, call: str, silent: int
) -> None:
    """It is silent until all others have done their part, and then its connection breaks."""
    client = connected(cluster, path)
    others = [owner_of(client, key) != silent for key in KEYS]
    done: list[int] = []
    broken: list[None] = []

    def at_call(_count: int) -> None:
        if not broken:
            wait_until(lambda: sum(done) == others.count(True), "all others are done")
            broken.append(None)
            raise RuntimeError("it dies")

    for number, node in enumerate(cluster.nodes):
        if number == silent:
            hold(node, at_call)
        else:
            hold(node, lambda _count: None, done.append)
    results = CALLS[call](client)
    assert broken and [result for result, other in zip(results, others) if other] == [True] * others.count(True)
    assert path == "tcp" or results == others  # a stream that has closed a connection is asked once more
    wait_until(lambda: client.put_many(KEYS, VALUES) == [True] * len(KEYS), "it is used again")
    assert get_all(client) == [True] * len(KEYS)


@pytest.mark.parametrize("call", ["put", "delete"])
@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_shards_that_have_moved_away_are_followed(cluster: FakeCluster, path: str, call: str) -> None:
    """The client learns of it in the middle: one of four workers refuses its keys."""
    client = connected(cluster, path)
    moving = ALL[1::COUNT]
    cluster.own({3: moving}, previous=1)
    cluster.instruct()
    cluster.nodes[3].adopt(cluster.epoch, moving)
    cluster.manager.map = cluster.map()  # for those that ask
    assert CALLS[call](client) == [True] * len(KEYS)
    assert client.stats()["redirects"]
    published(cluster, client)
    assert get_all(client) == [call == "put"] * len(KEYS)


@pytest.mark.parametrize("call", ["get", "exists"])
def test_an_arena_that_is_mapped_in_the_middle_is_read_once(
    cluster: FakeCluster, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not when the call listed which workers it has to wait for."""
    connected(cluster, "shm")
    client = cluster.client("shm")
    together = Patience.together

    def mapped_meanwhile(self: Patience, visits: Iterable[tuple[Server, Steps[None]]], meanwhile: Any = None) -> None:
        visits = list(visits)

        def connected_by_now() -> None:
            assert visits and all([server.ready() for server, _ in visits])  # noqa: C419 -- each of them connects
            meanwhile()

        together(self, visits, connected_by_now)

    monkeypatch.setattr(Patience, "together", mapped_meanwhile)
    assert CALLS[call](client) == [True] * len(KEYS)
    assert client.stats()["hits"] == (len(KEYS) if call == "get" else 0)


class _Interrupt(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_an_interrupted_batch_ends_what_it_has_in_flight(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected(cluster, path)
    began: list[object] = []
    step = Patience._step

    def interrupted(self: Patience, *arguments: Any, **named: Any) -> None:
        if len(began) == COUNT - 1:
            raise _Interrupt
        began.append(None)
        step(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Patience, "_step", interrupted)
        with pytest.raises(_Interrupt):
            client.put_many(KEYS, [value_of(key, 2) for key in KEYS])
    router = client._router
    assert router is not None
    for target in router.targets.values():
        session = target.session
        if session is not None:
            assert not session.copying and not session.frames and not session._kicked
            node = next(each for each in cluster.nodes if each.name == target.info.node)
            with node.worker.frozen() as store:
                held = store.sessions.by_id[session.session].grants
                known = {grant[0] for stock in session.pool.stocks.values() for grant in stock}
                prepared = {number for number in held if number not in known}
                assert len(prepared) <= 64, "what the worker has made ahead, and nothing else"
    got = client.get_many(KEYS)
    assert all(value in (value_of(key), value_of(key, 2)) for key, value in zip(KEYS, got))
    assert client.put_many(KEYS, VALUES) == [True] * len(KEYS)


def test_the_last_of_equal_keys_counts_and_results_are_in_order(cluster: FakeCluster) -> None:
    client = connected(cluster, "shm")
    keys = [*KEYS, *reversed(KEYS)]
    values = [b"first", *VALUES[1:], *(value_of(key, 7) for key in reversed(KEYS))]
    assert client.put_many(keys, values) == [True] * len(keys)
    assert client.get_many(keys) == [value_of(key, 7) for key in keys]
    some = [key for pair in zip(KEYS, (f"absent {key}" for key in KEYS)) for key in pair]
    assert client.exists_many(some) == [True, False] * len(KEYS)
    assert client.delete_many(some) == [True, False] * len(KEYS)


@pytest.mark.parametrize("call", ["get", "exists"])
def test_arenas_are_read_while_a_server_elsewhere_answers(
    cluster: FakeCluster, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = cluster.nodes[0]
    cluster.nodes = [_Far(far), *cluster.nodes[1:]]  # type: ignore[list-item]
    cluster.publish()
    client = connected(cluster, "shm,tcp")
    assert sorted(each["path"] for each in client.stats()["workers"]) == ["shm"] * (COUNT - 1) + ["tcp"]
    read: list[None] = []
    visit_arena = Owners._visit_arena

    def noted(self: Owners, *arguments: Any) -> Unresolved:
        left = visit_arena(self, *arguments)
        read.append(None)
        return left

    monkeypatch.setattr(Owners, "_visit_arena", noted)
    hold(far, lambda _count: wait_until(lambda: len(read) >= COUNT - 1, "all arenas are read"))
    assert CALLS[call](client) == [True] * len(KEYS)
    misses = client.counters["misses"]
    some = [key for pair in zip(KEYS, (f"absent {key}" for key in KEYS)) for key in pair]
    assert client.exists_many(some) == [True, False] * len(KEYS)
    assert client.get_many(some)[1::2] == [None] * len(KEYS)
    assert client.counters["misses"] == misses + len(KEYS)


class _Far:
    """A node that the client does not find on its host."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    @property
    def info(self) -> M.WorkerInfo:
        return self._node.info._replace(uds="/nowhere")


def test_a_batch_is_one_frame_for_each_worker(cluster: FakeCluster) -> None:
    client = connected(cluster, "shm")
    pages = [bytes(4096)] * len(KEYS)
    for _ in range(3):  # until each session has grants of that size
        assert client.put_many(KEYS, pages) == [True] * len(KEYS)
    before = [node.worker.worker.rings.requests for node in cluster.nodes]
    assert client.put_many(KEYS, pages) == [True] * len(KEYS)
    after = [node.worker.worker.rings.requests for node in cluster.nodes]
    assert [now - then for now, then in zip(after, before)] == [1] * COUNT
