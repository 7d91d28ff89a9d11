"""The first calls of a forked child, which make its router: out of descriptors or threads, and with silent managers."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.sdk import routing
from simm.sdk.calls import closing
from tests.support.client_values import forked
from tests.support.fake_cluster import ALL, FakeCluster, FakeManager
from tests.support.waiting import WAIT_S, wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

#: Managers that do not answer, and how long each is waited for: a round through all of them takes ten seconds.
SILENT, DEADLINE_S = 40, 0.25


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def all_miss(client: Client) -> bool:
    """Return whether each of some calls ended as with a cache that is down."""
    assert client.get("k") is None
    assert client.put("k", b"other") is False
    assert client.exists_many(["k", "l"]) == [False, False]
    assert client.delete("k") is False
    assert not client.view("k")
    return True


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_threads(*names: str) -> Iterator[None]:
    """Let no thread start, or none of these names."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if not names or self.name in names:
            raise RuntimeError("can't start new thread")
        real(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = real  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "lack", [no_descriptors, no_threads, lambda: no_threads("simm-client")], ids=["descriptors", "threads", "second"]
)
def test_a_child_that_lacks_something_misses_and_leaves_nothing_open(
    client: Client, lack: Callable[[], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError or RuntimeError went through to the engine, and each call cost a descriptor more.

    When the child has what it lacked, it has its router with the next call.
    """
    monkeypatch.setattr(routing, "RESTART_S", 0.0)

    def child() -> bool:
        before = descriptors()
        with lack():
            for _ in range(3):
                all_miss(client)
        wait_until(lambda: descriptors() <= before, "what was begun is closed")
        return client.get("k") == b"v"

    assert forked(child) == 0


def test_a_child_that_lacks_something_does_not_try_with_every_call(client: Client) -> None:
    def child() -> bool:
        tried: list[None] = []
        connect = client._routes._connect

        def counted(timeout_s: float | None) -> Any:
            tried.append(None)
            return connect(timeout_s)

        client._routes._connect = counted
        routing.RESTART_S = WAIT_S  # type: ignore[misc]
        with no_threads():
            all_miss(client)
        return len(tried) == 1

    assert forked(child) == 0


def test_managers_that_fall_silent_do_not_hold_up_a_child() -> None:
    """Its first call tried each of them in turn, with all other threads behind it, and again half a second later."""
    with contextlib.ExitStack() as stack:
        mute = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(SILENT)]
        manager = FakeManager()
        stack.callback(manager.stop)
        with FakeCluster(1) as cluster:
            cluster.settled({0: ALL})
            manager.publish(cluster.map())
            addresses = [manager.address, *(each.getsockname() for each in mute)]
            named = ",".join(f"{host}:{port}" for host, port in addresses)
            client = stack.enter_context(contextlib.closing(Client(named, path="tcp", deadline_s=DEADLINE_S)))
            manager.silent = True

            def child() -> bool:
                got: list[bytes | None] = []
                threads = [threading.Thread(target=lambda: got.append(client.get("k"))) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(WAIT_S)
                router = client._router
                assert router is not None and not router.subscription._tried, "it has waited for all of them"
                return got == [None] * 3

            assert forked(child) == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_all_threads_wait_for_the_first_map(interrupted: bool) -> None:
    """Whoever comes meanwhile would find no owner. An interrupted wait leaves the route for all later calls."""
    made = SimpleNamespace(route=[None], deadline_s=1.0, subscription=SimpleNamespace())
    routes = routing.Routes(lambda _timeout_s: made, lazy=True)  # type: ignore[arg-type,return-value]
    routes._after_fork()
    seen: list[list[Any]] = []

    def wait(_timeout_s: float) -> None:
        seen.append(list(routes.route))
        if interrupted:
            raise KeyboardInterrupt

    made.subscription.await_first_round = wait
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        routes.restart()
    assert seen == [[]] and routes.restart() is made.route


def test_issue_a_child_of_a_client_that_is_being_closed_has_a_closed_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its puts and gets worked, and close() did nothing: a thread that it does not have was at it."""
    entered, go_on = threading.Event(), threading.Event()
    release_all = client._pinner.release_all

    def slowly() -> None:
        entered.set()
        assert go_on.wait(WAIT_S)
        release_all()

    monkeypatch.setattr(client._pinner, "release_all", slowly)
    closer = threading.Thread(target=client.close)
    closer.start()

    def child() -> bool:
        go_on.set()
        with pytest.raises(UsageError, match="closed"):
            client.get("k")
        client.close()
        return client._ending

    try:
        assert entered.wait(WAIT_S)
        assert forked(child) == 0
        assert client.get("k") == b"v", "the control: in its parent that thread goes on"
    finally:
        go_on.set()
        closer.join(WAIT_S)
    assert not closer.is_alive()


def test_issue_a_signal_closes_the_client_of_a_child_as_it_connects(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler waited for the lock of the call that it had interrupted, for ever."""
    monkeypatch.setattr(closing, "ASIDE_S", 0.05)

    def child() -> bool:
        connect = client._routes._connect
        seen: list[bool] = []

        def interrupted(timeout_s: float | None) -> Any:
            router = connect(timeout_s)
            signal.raise_signal(signal.SIGTERM)
            seen.append(client._routes.closed)
            return router

        def handler(*_: object) -> None:
            client.close()

        client._routes._connect = interrupted
        signal.signal(signal.SIGTERM, handler)
        with contextlib.suppress(UsageError):  # it may be closed before the call has ended
            client.get("k")
        client.close()  # which waits for what the handler has begun
        with pytest.raises(UsageError, match="closed"):
            client.get("k")
        return seen == [False] and client._router is None

    assert forked(child) == 0


def test_issue_a_call_in_the_handler_of_a_signal_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own thread makes the router, under a lock, and goes on only after the handler."""
    made = SimpleNamespace(route=[None], deadline_s=1.0, subscription=SimpleNamespace())
    routes = routing.Routes(lambda _timeout_s: made, lazy=True, deadline_s=0.05)  # type: ignore[arg-type,return-value]
    routes._after_fork()
    seen: list[list[Any]] = []
    made.subscription.await_first_round = lambda _timeout_s: seen.append(routes.restart())  # as a handler does
    assert routes.restart() is made.route and seen == [[]]
    routes.router = None


def test_a_router_that_is_made_while_a_handler_closes_its_client_serves_no_call() -> None:
    """A handler that no thread carries out the close of: only the next close() ends the router."""
    made = SimpleNamespace(route=[None], deadline_s=1.0, subscription=SimpleNamespace())
    routes = routing.Routes(lambda _timeout_s: made, lazy=True, deadline_s=0.05)  # type: ignore[arg-type,return-value]
    routes._after_fork()

    def closes(_timeout_s: float) -> None:
        routes.closed, routes.route = True, []

    made.subscription.await_first_round = closes
    assert routes.restart() == []
    with pytest.raises(UsageError, match="closed"):
        routes.target(bytes(16))
    routes.router = None


def test_issue_a_prefetch_looks_into_no_arena_of_the_parent() -> None:
    """The child of a client with near copies died by a signal: it looked at what the arenas that it had lost take."""
    with FakeCluster(1) as cluster:
        cluster.settled({0: ALL})
        client = cluster.client("shm", near_copies=True)
        assert client.put("k", b"v") and client.prefetch(["k"]) == 0
        assert client._near is not None and client._near._hosts

        def goes_on() -> bool:
            with no_descriptors():
                return client.prefetch(["k"]) in (0, 1) and all_miss(client)

        assert forked(goes_on) == 0
        assert client.prefetch(["k"]) == 0 and client.get("k") == b"v"
