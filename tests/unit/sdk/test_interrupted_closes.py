"""Closes that a signal interrupts, and closes in its handler: of clients, and of stores that share one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import simm.testing
from simm import kv
from simm.config import engine_flags
from simm.errors import Code, TransportError, UsageError
from simm.host.threads import Pool
from simm.sdk import local_cluster
from simm.sdk.calls import closing
from simm.testing import FakeClient, FakeStore
from tests.support.interrupts import Interrupted, everywhere
from tests.support.kv_values import filled
from tests.support.waiting import wait_until

WAIT_S = 120.0
INVALID = int(Code.INVALID_ARGUMENT)
OnSignal = Callable[[Callable[[], None]], None]


@pytest.fixture
def on_signal() -> Iterator[OnSignal]:
    """Return what sets the handler of the signal of these tests."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle(call: Callable[[], None]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: call())

    yield handle
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeClient]]:
    """Let stores have clients without a cluster; return those that were made."""
    clients: list[FakeClient] = []

    def make(**_: Any) -> FakeClient:
        clients.append(FakeClient(store=FakeStore()))
        return clients[-1]

    for name, value in (("Client", make), ("_clients", {}), ("_users", {}), ("_leaving", []), ("_put_off", [])):
        monkeypatch.setattr(kv, name, value)
    yield clients
    for client in clients:
        client.close()


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def signalling() -> FakeStore:
    """A store of values whose operations are interrupted by the signal of these tests."""
    return FakeStore(latency=lambda *_: signal.raise_signal(signal.SIGUSR1))


# --- stores --------------------------------------------------------------------------------------------


def test_issue_no_interrupted_close_of_a_store_leaves_the_next_one_without_a_client(made: list[FakeClient]) -> None:
    """A new store took the client that was being closed: the old store's second close() closed it under the new one."""
    stores = [kv.Store()]
    value = filled(b"value")

    def check() -> None:
        old, new = stores.pop(), kv.Store()
        assert new.put("k", value) == 0
        old.close()
        assert new.put("k", value) == 0 and new.exists("k"), "the old store's end is not the new one's"
        new.close()
        assert not kv._leaving and not kv._clients and not kv._users
        assert all(client._over and client._routes.closed for client in made)
        made.clear()
        stores.append(kv.Store())

    assert everywhere(lambda: stores[-1].close(), check, ("simm.kv", "simm.sdk.calls.closing")) > 10


def test_issue_another_stores_close_does_not_take_over_what_is_interrupted_later(
    made: list[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the client off the list, so that the second close() of its own store did nothing."""
    store = kv.Store()
    client = made[0]
    release_all = client._pinner.release_all

    def another_closes() -> None:
        another = threading.Thread(target=lambda: kv.Store().close())
        another.start()
        another.join(WAIT_S)
        raise Interrupted

    monkeypatch.setattr(client._pinner, "release_all", another_closes)
    with pytest.raises(Interrupted):
        store.close()
    assert len(made) == 2 and made[1]._over and kv._leaving == [client]
    monkeypatch.setattr(client._pinner, "release_all", release_all)
    store.close()
    assert client._over and not kv._leaving


def test_what_was_interrupted_is_ended_as_another_store_closes(
    made: list[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own store may be dropped."""

    def interrupt() -> None:
        raise Interrupted

    store = kv.Store()
    with monkeypatch.context() as patch:
        patch.setattr(made[0]._pinner, "release_all", interrupt)
        with pytest.raises(Interrupted):
            store.close()
    assert not made[0]._over
    del store
    kv.Store().close()
    assert made[0]._over and not kv._leaving


def test_issue_the_thread_that_closes_a_store_for_a_handler_closes_its_client(
    made: list[FakeClient], on_signal: OnSignal
) -> None:
    """It started another one for that, did not wait for it, and forgot the client."""
    store = kv.Store()
    on_signal(store.close)
    with FakeClient(store=signalling()) as other:
        other.get("k")
    wait_until(lambda: store._held is None, "the store is closed")
    assert made[0]._over and made[0]._closer is None and not kv._leaving


def test_issue_a_handler_closes_a_store_without_a_thread_to_spare(
    made: list[FakeClient], on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung for ever: the handler itself closed, and waited for the lock of the call that it had interrupted."""
    store = kv.Store()
    on_signal(store.close)
    load, locked = engine_flags.load, []

    def interrupted(threads: int) -> Any:
        if not kv._lock.locked():  # it would hang: the control
            raise AssertionError("nothing is held")
        locked.append(True)
        signal.raise_signal(signal.SIGUSR1)
        return load(threads)

    with monkeypatch.context() as patch:
        patch.setattr(closing, "ASIDE_S", 0.05)
        patch.setattr(engine_flags, "load", interrupted)
        patch.setattr(threading.Thread, "start", no_thread)
        second = kv.Store()
    assert locked and store.put("k", filled(b"v")) == INVALID and second.put("k", filled(b"v")) == 0
    assert not made[0]._over
    store.close()
    second.close()
    assert made[0]._over and not kv._leaving and not kv._clients


def test_issue_a_store_whose_close_was_put_off_is_closed_with_another_one(
    made: list[FakeClient], on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as a user of the client, which stayed until the process ended."""
    monkeypatch.setattr(closing, "ASIDE_S", 0.05)
    store, second = kv.Store(), kv.Store()
    on_signal(store.close)
    with FakeClient(store=signalling()) as other, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        other.get("k")
    assert kv._put_off == [store] and store.put("k", filled(b"v")) == INVALID
    assert second.put("k", filled(b"v")) == 0 and not made[0]._over
    second.close()
    assert made[0]._over and not kv._leaving and not kv._clients and not kv._users and not kv._put_off
    store.close()
    assert store._held is None and len(made) == 1


def test_a_store_without_a_thread_for_its_client_gets_no_advice_about_managers(
    made: list[FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(**_: Any) -> FakeClient:
        raise TransportError("cannot follow the manager: can't start new thread")

    monkeypatch.setattr(kv, "Client", none_left)
    with pytest.raises(RuntimeError) as raised:
        kv.Store()
    assert str(raised.value) == "SiMM: cannot follow the manager: can't start new thread"
    assert not made and not kv._clients and not kv._users


# --- clients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["itself", "by another thread"])
def test_issue_a_call_in_a_clients_thread_closes_it_as_the_thread_of_a_handler_waits_for_that_call(
    asks: str, on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for the other, for ever."""
    monkeypatch.setattr(closing, "ASIDE_S", 0.05)
    client = FakeClient(store=signalling())
    client.deadline_s = 0.05 if asks != "itself" else 100 * WAIT_S
    client._executor = Pool(1, "simm-async")
    begun, go_on = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        assert go_on.wait(WAIT_S)
        if asks == "itself":
            client.close()
        else:
            another = threading.Thread(target=client.close)
            another.start()
            another.join(WAIT_S)
            assert not another.is_alive()
        return client._over

    job = client._executor.hand_over(call)
    assert job is not None and begun.wait(WAIT_S)
    on_signal(client.close)
    with contextlib.suppress(UsageError):
        client.get("k")
    assert client._closer is not None and client._closer.is_alive(), "it waits for the call"
    go_on.set()
    assert job.result(WAIT_S) is False
    wait_until(lambda: client._over, "the handler's thread has closed it")


def test_issue_a_handler_closes_a_client_without_a_thread_to_spare(
    on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operations are refused at once, and the next close() ends it."""
    client = FakeClient(store=signalling())
    on_signal(client.close)
    with monkeypatch.context() as patch:
        patch.setattr(closing, "ASIDE_S", 0.05)
        patch.setattr(threading.Thread, "start", no_thread)
        with contextlib.suppress(UsageError):
            client.get("k")
    assert not client._over
    with pytest.raises(UsageError, match="closed"):
        client.get("k")
    client.close()
    assert client._over


def test_a_thread_that_can_be_started_a_little_later_closes_the_client(
    on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "ASIDE_S", WAIT_S)
    client = FakeClient(store=signalling())
    on_signal(client.close)
    start, tries = threading.Thread.start, []

    def at_the_third(thread: threading.Thread) -> None:
        tries.append(thread)
        if len(tries) < 3:
            no_thread(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", at_the_third)
        with contextlib.suppress(UsageError):
            client.get("k")
    assert len(tries) == 3 and client._over


def test_issue_the_next_close_waits_for_a_thread_that_its_handler_no_longer_waits_for(
    on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the handler while it waited made the client forget the thread."""
    client = FakeClient(store=signalling())
    on_signal(client.close)
    go_on = threading.Event()
    release_all = client._pinner.release_all

    def slowly() -> None:
        assert go_on.wait(WAIT_S)
        release_all()

    def join(_thread: threading.Thread, *_: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(client._pinner, "release_all", slowly)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", join)
        with pytest.raises(Interrupted):
            client.get("k")
    wait_until(lambda: client._ending, "the thread is at it")
    assert client._closer is not None
    go_on.set()
    client.close()
    assert client._over


def test_issue_the_end_of_a_local_cluster_closes_its_client_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread did, as in a handler: what it raised was lost, and the block was left while it went on."""

    class Ready(FakeClient):
        def wait_ready(self, timeout_s: float = 0.0) -> bool:
            return True

    class Cluster:
        manager, token = "m", ""

        def __init__(self, _memory: Any) -> None: ...

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(local_cluster, "LocalCluster", Cluster)
    monkeypatch.setattr(simm.testing, "Client", lambda *_, **__: Ready())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with simm.testing.local_cluster() as (_, client):
        pass
    assert client._over and client._closer is None
