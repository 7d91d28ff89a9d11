"""A client that is closed under tasks of asyncio: their calls fail as a closed client's, and no task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from simm import client as client_module
from simm import kv
from simm.client import Client
from simm.errors import Code, UsageError
from simm.sdk.ops.waiting import in_executor
from simm.testing import FakeClient, FakeStore
from tests.support.kv_values import filled

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
    """The executor refused the call with a RuntimeError of its own."""
    client = FakeClient()
    client.put("k", b"v")
    closer = threading.Thread(target=client.close)
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    def close_first(executor: ThreadPoolExecutor, *given: Any) -> Future[Any]:
        guarded = client._start_lock.locked()
        if not closer.ident:
            closer.start()
            if not guarded:  # otherwise it waits for this call
                closer.join(WAIT_S)
        return submit(executor, *given)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", close_first)

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
            monkeypatch.setattr(kv, "_leave", lambda store, key: busy.client.close())
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


def test_a_call_that_ran_without_a_thread_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor has queued it before it finds that it cannot start a thread, and a thread of before takes it later.

    The buffer is the caller's again by then.
    """

    async def body() -> None:
        with Busy() as busy:
            (first,) = await begun(busy.client.get_async("k"))
            assert await asyncio.to_thread(busy._entered.acquire, timeout=WAIT_S)
            calls: list[int] = []
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                for number in range(3):
                    await busy.client.in_thread(calls.append, number)
            assert calls == [0, 1, 2]
            busy.go_on()
            await first
            await asyncio.gather(*(busy.client.in_thread(int) for _ in range(2 * THREADS)))
            assert calls == [0, 1, 2]
            busy.client.close()

    asyncio.run(body())


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_of_before_may_take_the_call_at_once(fails: bool) -> None:
    """It does between the executor's queue and the error: its answer counts, and the call is not run again."""
    calls: list[str] = []

    def call(text: str) -> str:
        calls.append(text)
        if fails:
            raise UsageError(text)
        return text

    class Full(ThreadPoolExecutor):
        def submit(self, run: Callable[..., Any], /, *given: Any, **_: Any) -> Future[Any]:
            with contextlib.suppress(UsageError):
                run(*given)
            raise RuntimeError("can't start new thread")

    async def body() -> None:
        with Full() as executor:
            answers = await asyncio.gather(in_executor(executor, call, ("said",)), return_exceptions=True)
            assert calls == ["said"] and str(answers[0]) == "said" and isinstance(answers[0], UsageError) is fails

    asyncio.run(body())


def test_a_call_that_another_thread_has_taken_is_not_cancelled_under_it() -> None:
    """It is delivered when the call no longer uses its buffers, as always."""
    entered, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def call() -> None:
        entered.set()
        assert go_on.wait(WAIT_S)
        ended.append("call")

    class Full(ThreadPoolExecutor):
        def submit(self, run: Callable[..., Any], /, *given: Any, **_: Any) -> Future[Any]:
            super().submit(run, *given)
            assert entered.wait(WAIT_S)
            raise RuntimeError("can't start new thread")

    async def body() -> None:
        with Full(1) as executor:
            task = asyncio.ensure_future(in_executor(executor, call, ()))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended == ["call"]

    asyncio.run(body())


def test_calls_without_a_thread_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        client = FakeClient()
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        for _ in range(3):
            assert await Client.in_thread(client, client.get, "k") is None  # not by the fake's, which drops it too
            assert client._executor is None
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
        assert asyncio.run(body(client))() is None
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


class Interrupted(BaseException):
    """What a signal's handler raises."""


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
