"""A client that is closed under tasks of asyncio: their calls fail as a closed client's, and no task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from simm import client as client_module
from simm import kv
from simm.client import Client
from simm.config import engine_flags
from simm.errors import Code, TransportError, UsageError
from simm.host.threads import Pool
from simm.sdk.calls import closing as closing_module
from simm.testing import FakeClient, FakeStore
from tests.support.kv_values import filled
from tests.support.scarce_threads import ERRORS, no_threads
from tests.support.waiting import wait_until

WAIT_S = 120.0
THREADS = client_module._ASYNC_THREADS
INVALID = int(Code.INVALID_ARGUMENT)


class Busy:
    """A client all of whose threads are in a call until :meth:`go_on`, or the end of the block."""

    def __init__(self) -> None:
        self._go_on, self._entered = threading.Event(), threading.Semaphore(0)
        self.client = FakeClient(store=FakeStore(latency=self._wait))
        self.begun = 0

    def __enter__(self) -> Busy:
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def _wait(self, operation: str, keys: int) -> None:
        if operation == "get":
            self.begun += 1
            self._entered.release()
            assert self._go_on.wait(WAIT_S)

    def go_on(self) -> None:
        self._go_on.set()

    async def fill(self) -> list[asyncio.Task[Any]]:
        running = [asyncio.ensure_future(self.client.get_async("k")) for _ in range(THREADS)]
        for _ in running:
            assert await asyncio.to_thread(self._entered.acquire, timeout=WAIT_S)
        return running


@contextlib.asynccontextmanager
async def closing(busy: Busy, close: Callable[[], None]) -> AsyncIterator[None]:
    """Close the client while the block runs; at its end the threads go on."""
    closer = threading.Thread(target=close)
    closer.start()
    try:
        yield
    finally:
        busy.go_on()
        await asyncio.to_thread(closer.join, WAIT_S)
        assert not closer.is_alive()


async def begun(*calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Return tasks that wait for a thread."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    return tasks


def test_a_call_that_waits_for_a_thread_is_refused_when_the_client_is_closed() -> None:
    async def body() -> None:
        with Busy() as busy:
            client = busy.client
            client.put("k", b"v")
            running = await busy.fill()
            queued, other = await begun(client.get_async("k"), client.put_async("l", b"w"))
            async with closing(busy, client.close):
                await asyncio.wait((queued, other), timeout=WAIT_S)
                for each in (queued, other):
                    assert each.done() and not each.cancelled(), "nobody cancelled it"
                    assert isinstance(each.exception(), UsageError) and "closed" in str(each.exception())
            assert await asyncio.gather(*running) == [b"v"] * THREADS, "those that had begun"
            assert busy.begun == THREADS
            with pytest.raises(UsageError, match="closed"):
                await client.get_async("k")

    asyncio.run(body())


@pytest.mark.parametrize("closed", [False, True])
def test_control_a_task_that_is_cancelled_is_cancelled(closed: bool) -> None:
    """Also one whose call close() stops in the same moment."""

    async def body() -> None:
        with Busy() as busy:
            running = await busy.fill()
            (queued,) = await begun(busy.client.get_async("k"))
            if closed:
                executor = busy.client._executor
                assert executor is not None
                executor.shutdown(wait=False, cancel_futures=True)  # as close() does, first of all
            queued.cancel()
            running[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            assert queued.cancelled() and not running[0].done(), "a call that has begun still uses its buffers"
            busy.go_on()
            with pytest.raises(asyncio.CancelledError):
                await running[0]
            await asyncio.gather(*running[1:])
            busy.client.close()

    asyncio.run(body())


def test_a_close_just_before_a_call_gets_its_thread_is_a_closed_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused or carried out, and never left to nobody."""
    client = FakeClient()
    client.put("k", b"v")
    closer = threading.Thread(target=client.close)
    hand_over = Pool.hand_over

    def close_first(pool: Pool, *given: Any) -> Future[Any] | None:
        guarded = client._start_lock.locked()
        if not closer.ident:
            closer.start()
            if not guarded:  # otherwise it waits for this call
                closer.join(WAIT_S)
        return hand_over(pool, *given)

    monkeypatch.setattr(Pool, "hand_over", close_first)

    async def body() -> None:
        got = await asyncio.gather(client.get_async("k"), client.get_async("k"), return_exceptions=True)
        assert all(each == b"v" or isinstance(each, UsageError) for each in got), got
        await asyncio.get_running_loop().run_in_executor(None, closer.join, WAIT_S)
        with pytest.raises(UsageError, match="closed"):
            await client.get_async("k")

    asyncio.run(body())


def test_a_store_answers_with_its_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        with Busy() as busy:
            monkeypatch.setattr(kv, "_client_for", lambda store: (busy.client, None))
            monkeypatch.setattr(kv, "_leave", lambda *_: busy.client.close())
            store, view = kv.Store(), filled(b"value")
            assert store.put("k", view) == 0
            running = await busy.fill()
            tasks = await begun(
                store.get_async("k", view), store.mget_async(["k", "l"], [view, view]), store.put_async("l", view),
                store.exists_async("k"), store.delete_async("k"), store.mpin_async(["k"]),
            )  # fmt: skip
            async with closing(busy, store.close):
                await asyncio.wait(tasks, timeout=WAIT_S)
            *codes, pins = [task.result() for task in tasks]
            assert codes == [INVALID, [INVALID, INVALID], INVALID, False, INVALID] and pins.lengths == [INVALID]
            await asyncio.gather(*running)

    asyncio.run(body())


# --- a process that can start no thread --------------------------------------------------------------


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_a_call_runs_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        client = FakeClient()
        room = bytearray(1)
        assert client.put("k", b"v")
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert await client.get_into_async("k", room) == 1 and room == b"v"
        with pytest.raises(UsageError, match="does not fit"):
            await client.get_into_async("k", bytearray())
        await client.close_async()

    asyncio.run(body())


@pytest.mark.parametrize("error", ERRORS)
def test_a_call_that_ran_without_a_thread_runs_once(error: type[Exception]) -> None:
    """An executor has queued it before it finds that it cannot start a thread, and a thread of before takes it later.

    The buffer is the caller's again by then.
    """

    async def body() -> None:
        with Busy() as busy:
            (first,) = await begun(busy.client.get_async("k"))
            assert await asyncio.to_thread(busy._entered.acquire, timeout=WAIT_S)
            calls: list[int] = []
            with no_threads(error=error):
                for number in range(3):
                    await busy.client.in_thread(calls.append, number)
            assert calls == [0, 1, 2]
            busy.go_on()
            await first
            await asyncio.gather(*(busy.client.in_thread(int) for _ in range(2 * THREADS)))
            assert calls == [0, 1, 2]
            busy.client.close()

    asyncio.run(body())


@pytest.mark.parametrize("error", ERRORS)
def test_after_a_lack_of_threads_a_client_has_all_of_them(error: type[Exception]) -> None:
    """What an executor has queued then counts as idle threads, and one would run all calls for good."""

    async def body() -> None:
        with Busy() as busy:
            (first,) = await begun(busy.client.get_async("k"))
            assert await asyncio.to_thread(busy._entered.acquire, timeout=WAIT_S)
            with no_threads("simm-async", error):
                for _ in range(2 * THREADS):
                    assert await busy.client.in_thread(int) == 0
            busy.go_on()
            met = threading.Barrier(THREADS)
            got = await asyncio.gather(*(busy.client.in_thread(met.wait, WAIT_S) for _ in range(THREADS)), first)
            assert sorted(got[:THREADS]) == list(range(THREADS))
            busy.client.close()

    asyncio.run(body())


def test_calls_without_a_thread_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        client = FakeClient()
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        for _ in range(3):
            assert await Client.in_thread(client, client.get, "k") is None  # not by the fake's, which drops it too
            assert client._executor is not None and not client._executor._jobs and not client._executor._threads
        client.close()

    asyncio.run(body())


def test_a_failed_call_leaves_no_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer:
        pass

    def fail(_buffer: Buffer) -> None:
        raise UsageError("no")

    async def body(client: FakeClient) -> weakref.ref[Buffer]:
        buffer = Buffer()
        with contextlib.suppress(UsageError):
            await client.in_thread(fail, buffer)
        return weakref.ref(buffer)

    client = FakeClient()
    gc.collect()
    gc.disable()
    try:
        left = asyncio.run(body(client))
        wait_until(lambda: left() is None, "a cycle holds it")  # the thread may still be about to drop it
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        assert asyncio.run(body(client))() is None
    finally:
        gc.enable()
    client.close()


@pytest.mark.parametrize("step", ["executor", "tracing", "pinner", "routes", "copier"])
def test_a_close_that_is_interrupted_closes_the_rest_and_a_second_one_ends_it(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    asyncio.run(Client.in_thread(client, client.get, "k"))  # not by the fake's, which has no threads
    assert client._executor is not None
    done: list[str] = []
    steps = {
        "executor": (client._executor, "shutdown"), "tracing": (client, "_end_tracing"),
        "pinner": (client._pinner, "release_all"), "routes": (client._routes, "close"),
        "copier": (client._copier, "close"),
    }  # fmt: skip
    for name, (owner, method) in steps.items():
        real = getattr(owner, method)

        def noted(*_: Any, name: str = name, real: Any = real, **arguments: Any) -> None:
            if name == step and step not in done:
                done.append(step)
                raise KeyboardInterrupt
            real(**arguments)
            done.append(name)

        monkeypatch.setattr(owner, method, noted)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert done == list(steps)
    done[:] = [step]
    client.close()
    assert done[1:] == list(steps), "what was interrupted, too"
    client.close()
    assert len(done) == 1 + len(steps), "it has ended"
    with pytest.raises(UsageError, match="closed"):
        client.get("k")


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Return what sets the handler of the signal of these tests."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle(call: Callable[[], None]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: call())

    yield handle
    signal.signal(signal.SIGUSR1, before)


OnSignal = Callable[[Callable[[], None]], None]


def test_issue_a_handler_closes_the_client_of_the_call_that_it_interrupts(
    on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call holds the lock that close() takes first. What waits for it ends when the call has."""
    monkeypatch.setattr(closing_module, "ASIDE_S", 0.05)
    client = FakeClient(store=FakeStore())
    start = Pool._start_one
    held: list[tuple[bool, bool]] = []

    def interrupted(pool: Pool, crew: Any) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        held.append((client._start_lock.locked(), client._closed))
        return start(pool, crew)

    on_signal(client.close)
    monkeypatch.setattr(Pool, "_start_one", interrupted)

    async def body() -> None:
        with contextlib.suppress(UsageError):  # close() may be before the call
            assert await Client.in_thread(client, client.get, "k") is None

    asyncio.run(body())
    monkeypatch.undo()
    assert held == [(True, False)]
    client.close()
    assert client._routes.closed and client._closer is not None and not client._closer.is_alive()


def test_issue_a_handler_that_interrupts_a_close(on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(store=FakeStore())
    ended: list[str] = []
    monkeypatch.setattr(client._copier, "close", lambda: ended.append("copier"))
    lock = client._start_lock

    class Lock:
        def __enter__(self) -> None:
            lock.acquire()
            if not ended:
                ended.append("signal")
                signal.raise_signal(signal.SIGUSR1)

        def __exit__(self, *_: object) -> None:
            lock.release()

    given: Any = Lock()
    client._start_lock = given
    monkeypatch.setattr(closing_module, "ASIDE_S", 0.05)
    on_signal(client.close)
    client.close()
    assert client._routes.closed and ended == ["signal", "copier"]


def test_a_close_within_a_call_without_a_conflict_is_complete(
    on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread does it. Outside of calls no thread is asked for."""
    clients = [FakeClient(store=FakeStore(latency=lambda *_: signal.raise_signal(signal.SIGUSR1))) for _ in range(2)]
    closed: list[bool] = []

    def close() -> None:
        clients[0].close()
        closed.append(clients[0]._routes.closed)

    on_signal(close)
    with contextlib.suppress(UsageError):
        clients[0].get("k")
    assert closed == [True] and clients[0]._closer is not None
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    clients[1].close()
    assert clients[1]._routes.closed and clients[1]._closer is None


def test_issue_a_handler_closes_a_store_while_another_is_made(
    on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock guards the shared clients."""
    monkeypatch.setattr(closing_module, "ASIDE_S", 0.05)
    monkeypatch.setattr(kv, "Client", lambda **_: FakeClient())
    monkeypatch.setattr(kv, "_clients", {})
    monkeypatch.setattr(kv, "_users", {})
    first = kv.Store()
    client, locked = first._client, []
    assert client is not None
    on_signal(first.close)

    def load(*_: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        locked.append(kv._lock.locked())
        return settings

    settings = engine_flags.load(1)
    monkeypatch.setattr(engine_flags, "load", load)
    second = kv.Store()
    assert locked == [True]
    first.close()
    second.close()
    wait_until(lambda: not kv._users and not kv._clients, "both are closed")
    wait_until(lambda: client._routes.closed, "its client")


def test_nobody_waits_to_close_a_store_while_another_waits_for_its_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "_clients", {})
    monkeypatch.setattr(kv, "_users", {})
    locked: list[bool] = []

    class Waits(FakeClient):
        def begin(self) -> None:
            locked.append(kv._lock.locked())
            raise TransportError("refused")

    monkeypatch.setattr(kv, "Client", lambda **_: Waits())
    with pytest.raises(RuntimeError, match="SiMM: refused; an engine names it by"):
        kv.Store()
    assert locked == [False] and not kv._clients and not kv._users and not kv._leaving


def test_issue_a_close_of_a_store_that_is_interrupted_is_ended_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close() did nothing, and the client stayed until the process ended."""
    monkeypatch.setattr(kv, "Client", lambda **_: FakeClient())
    monkeypatch.setattr(kv, "_clients", {})
    monkeypatch.setattr(kv, "_users", {})
    store = kv.Store()
    client = store._client
    assert client is not None
    with monkeypatch.context() as patch:
        patch.setattr(client, "_close_now", interrupt)
        with pytest.raises(Interrupted):
            store.close()
    assert store.get("k", filled(b"value")) == INVALID
    store.close()
    assert client._routes.closed and not kv._leaving


class Interrupted(BaseException):
    """What a signal's handler raises."""


def interrupt() -> None:
    raise Interrupted


def test_a_close_that_is_interrupted_as_it_releases_its_lock_is_done_by_the_next() -> None:
    client = FakeClient(store=FakeStore())
    lock = client._start_lock

    class Lock:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            raise Interrupted

    given: Any = Lock()
    client._start_lock = given
    with pytest.raises(Interrupted):
        client.close()
    client._start_lock = lock
    assert not client._routes.closed, "the control"
    client.close()
    assert client._routes.closed


def test_a_close_during_another_one_leaves_that_alone() -> None:
    """Also if it is interrupted itself."""
    client = FakeClient(store=FakeStore())
    client._ending = True
    lock = client._start_lock

    class Lock:
        def __enter__(self) -> None:
            raise Interrupted

        def __exit__(self, *_: object) -> None: ...

    given: Any = Lock()
    client._start_lock = given
    with pytest.raises(Interrupted):
        client.close()
    assert client._ending, "another thread is at it"
    client._start_lock, client._ending = lock, False
    client.close()
