"""LMCache's two adapters when something ends under a call: the client, or the lock of another request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.errors import UsageError
from simm.sdk.ops import waiting
from simm.sdk.ops.pins import Pins
from simm.testing import FakeClient, FakeStore
from tests.support import fake_lmcache
from tests.support.fake_lmcache import CHUNK, WIDTH, CacheEngineKey, LayerCacheEngineKey, MemoryFormat, ObjectKey
from tests.support.scarce_threads import ERRORS, no_threads
from tests.support.waiting import WAIT_S, wait_until

# -- in an engine's process: the client is closed -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["get", "put", "exists", "prefix"])
def test_a_call_that_close_stops_is_a_miss(how: str) -> None:
    """It looked cancelled. LMCache's task was not, and ended with an error that no handler of Exception catches."""
    go_on, busy = threading.Event(), threading.Semaphore(0)

    def wait(operation: str, keys: int) -> None:
        if operation == "delete":
            busy.release()
            assert go_on.wait(WAIT_S)

    async def body(module: Any) -> None:
        client = FakeClient(store=FakeStore(latency=wait))
        connector = fake_lmcache.connector_of(module, client)
        key = LayerCacheEngineKey(1)
        chunk = fake_lmcache.MemoryObj([(CHUNK, 2, WIDTH)], [fake_lmcache.BFLOAT16], MemoryFormat.KV_T2D)
        await connector.put(key, chunk)
        calls = {
            "get": lambda: connector.batched_get([key, CacheEngineKey(1)]),
            "put": lambda: connector.put(key, chunk),
            "exists": lambda: connector.exists(key),
            "prefix": lambda: connector.batched_async_contains("lookup", [key]),
        }
        running = [asyncio.ensure_future(client.delete_async("k")) for _ in range(8)]
        for _ in running:
            assert await asyncio.to_thread(busy.acquire, timeout=WAIT_S)
        task = asyncio.ensure_future(calls[how]())
        await asyncio.sleep(0)
        closer = threading.Thread(target=client.close)
        closer.start()
        try:
            await asyncio.wait((task,), timeout=WAIT_S)
            assert task.done() and not task.cancelled()
            assert task.result() == {"get": [None, None], "put": None, "exists": False, "prefix": 0}[how]
            assert connector._backend.used() == 0
        finally:
            go_on.set()
            await asyncio.to_thread(closer.join, WAIT_S)
            await asyncio.gather(*running)
            await connector.close()

    with fake_lmcache.engine() as module:
        asyncio.run(body(module))


@pytest.mark.parametrize("lack", [None, *ERRORS])
def test_close_raises_nothing_without_threads_to_run_it(lack: type[Exception] | None) -> None:
    """At the interpreter's exit the loop's threads have ended. The client is closed all the same."""

    async def body(connector: Any) -> None:
        await asyncio.get_running_loop().shutdown_default_executor()
        with no_threads(error=lack) if lack is not None else contextlib.nullcontext():
            await connector.close()

    with fake_lmcache.engine() as module, FakeClient(store=FakeStore()) as client:
        connector = fake_lmcache.connector_of(module, client)
        connector._owns = True
        asyncio.run(body(connector))
        with pytest.raises(UsageError):
            client.get("k")


def test_what_close_raises_is_no_affair_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("injected")

    with fake_lmcache.engine() as module, FakeClient(store=FakeStore()) as client:
        connector = fake_lmcache.connector_of(module, client)
        monkeypatch.setattr(connector, "_end", fail)
        asyncio.run(connector.close())


def test_a_close_that_lacks_memory_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    with fake_lmcache.engine() as module, FakeClient(store=FakeStore()) as client:
        connector = fake_lmcache.connector_of(module, client)
        monkeypatch.setattr(waiting, "Pool", fail)
        asyncio.run(connector.close())


# -- in the server: a lock is given up ------------------------------------------------------------------------------

ABSENT = [ObjectKey(b"absent")]
KEYS = [ObjectKey(bytes([number]) * 8) for number in range(4)]
VALUES = [bytes([16 + number]) * 64 for number in range(4)]


class Server:
    """An adapter, by the calls that LMCache makes."""

    def __init__(self, module: Any, client: FakeClient) -> None:
        # While a load is held open, one other thread carries out what comes, in its order.
        self.adapter = module.SimmL2Adapter({"threads": 2}, client=client)

    def store(self, keys: list[ObjectKey], values: list[bytes]) -> None:
        self.adapter.submit_store_task(keys, [fake_lmcache.object_of(each) for each in values])
        fake_lmcache.ended(self.adapter.get_store_event_fd())

    def lookup(self, keys: list[ObjectKey]) -> list[int]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        fake_lmcache.ended(self.adapter.get_lookup_and_lock_event_fd())
        places: list[int] = self.adapter.query_lookup_and_lock_result(task).places()
        return places

    def load(self, keys: list[ObjectKey]) -> list[bytes | None]:
        """Return the objects' bytes, None for what was not loaded."""
        objects = [fake_lmcache.object_of(bytes(64)) for _ in keys]
        task = self.adapter.submit_load_task(keys, objects)
        fake_lmcache.ended(self.adapter.get_load_event_fd())
        good = self.adapter.query_load_result(task).places()
        return [bytes(each.byte_array) if at in good else None for at, each in enumerate(objects)]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Pins]:
    """What was pinned, in its order."""
    made: list[Pins] = []
    plain = FakeClient.pin

    def pin(client: FakeClient, keys: Any) -> Pins:
        made.append(plain(client, keys))
        return made[-1]

    monkeypatch.setattr(FakeClient, "pin", pin)
    return made


def held(pinned: list[Pins]) -> list[bool]:
    """Return for each whether its values are still pinned."""
    return ["released" not in repr(each) for each in pinned]


@pytest.fixture
def server(pinned: list[Pins]) -> Iterator[Server]:
    with fake_lmcache.server() as module, FakeClient(store=FakeStore()) as client:
        made = Server(module, client)
        made.store(KEYS, VALUES)
        yield made
        made.adapter.close()


@pytest.mark.parametrize("threads", ["4", 0, 65, 2.5, True])
def test_a_number_of_threads_that_is_none_is_a_sentence(threads: Any) -> None:
    with fake_lmcache.server() as module, FakeClient() as client:
        with pytest.raises(RuntimeError, match=r"^SiMM: threads is a number from 1 to 64, not "):
            module.SimmL2Adapter({"threads": threads}, client=client)


def meanwhile(pins: Pins, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something between the begin of a read of these pins and the read itself, once."""
    plain = pins.read_wants

    def read_wants(wants: Any) -> Any:
        monkeypatch.setattr(pins, "read_wants", plain)
        act()
        return plain(wants)

    monkeypatch.setattr(pins, "read_wants", read_wants)


def test_a_load_goes_on_when_another_requests_lock_is_given_up(
    server: Server, pinned: list[Pins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads by the oldest lock of a key, which is the other request's. It was to be empty, and all was computed."""
    assert server.lookup(KEYS[:2]) == [0, 1] and server.lookup(KEYS) == [0, 1, 2, 3]

    def unlock() -> None:
        server.adapter.submit_unlock(KEYS[:2])
        server.lookup(ABSENT)  # what gives it up is carried out before this

    meanwhile(pinned[0], unlock, monkeypatch)
    assert server.load(KEYS) == VALUES
    wait_until(lambda: held(pinned) == [False, True, False], "once it has read, the other request's is released")
    assert server.load(KEYS) == VALUES and held(pinned)[1]
    server.adapter.submit_unlock(KEYS)
    wait_until(lambda: not any(held(pinned)), "its own")
    assert server.adapter.report_status()["locked"] == 0


def test_what_is_locked_is_loaded_as_it_was_found(
    server: Server, pinned: list[Pins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is deleted and replaced while a load, whose lock it is not, reads it."""
    assert server.lookup(KEYS[:1]) == [0]

    def replace() -> None:
        server.adapter.submit_unlock(KEYS[:1])
        server.adapter.delete(KEYS[:1])
        server.store(KEYS[:1], [bytes(reversed(VALUES[0][:63] + b"!"))])

    meanwhile(pinned[0], replace, monkeypatch)
    assert server.load(KEYS) == VALUES
    wait_until(lambda: not any(held(pinned)), "it has read")
    assert server.load(KEYS[:1]) != VALUES[:1], "the control: that was another value"


def test_locks_that_are_given_up_without_a_load_are_released(server: Server, pinned: list[Pins]) -> None:
    assert server.lookup(KEYS) == server.lookup(KEYS) == [0, 1, 2, 3]
    server.adapter.submit_unlock(KEYS[:3])
    assert held(pinned) == [True, True] and server.load(KEYS) == VALUES and held(pinned) == [True, True]
    server.adapter.submit_unlock(KEYS[3:])
    wait_until(lambda: held(pinned) == [False, True], "the first one's last lock")
    server.adapter.close()
    assert not any(held(pinned))
