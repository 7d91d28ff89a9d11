"""What a client promises about its end, threads, forks, tasks, outages and a full store."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from simm.errors import UsageError
from simm.sdk.batch import View
from simm.testing import FakeClient, FakeStore
from tests.support.client_values import JOIN_S, MIB, WAIT_S, forked, pattern
from tests.support.conformance.world import World, apart, breaks, promise
from tests.support.waiting import wait_until

# --- the end ----------------------------------------------------------------------------------


@promise
def a_closed_client_says_so(world: World) -> None:
    client = world.client()
    with client as entered:
        assert entered is client
        assert client.put("k", b"v")
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.put("k", b"v"), lambda: client.get("k"), lambda: client.get_into("k", bytearray(8)),
        lambda: client.exists("k"), lambda: client.delete("k"), lambda: client.view("k"),
        lambda: client.put_many(["a", "b"], [b"v", b"v"]), lambda: client.get_many(["a", "b"]),
        lambda: client.get_into_many(["a"], [bytearray(8)]), lambda: client.exists_many(["a", "b"]),
        lambda: client.delete_many(["a", "b"]), lambda: client.exists_many([]), lambda: client.put_many([], []),
        lambda: client.owned(client.digest("k")), lambda: asyncio.run(client.get_async("k")),
        lambda: client.get_ranges("k", [(0, 1, bytearray(8))]), lambda: client.put_gather("k", [b"v", b"v"]),
        lambda: client.get_ranges_many([], []), lambda: client.put_gather_many([], []),
        lambda: client.pin(["k"]), lambda: client.pin([]), lambda: client.advance(), lambda: client.prefix(["k"]),
        lambda: client.put("k", b"v", ttl=1), lambda: client.keep(["k"], 1), lambda: client.unkeep([]),
        lambda: client.put_group(["{k}"], [b"v"]), lambda: client.exists_groups([["k"]]),
        lambda: client.exists_groups([]), lambda: client.load_ms(["k"]), lambda: client.load_ms([]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
    with pytest.raises(UsageError, match="key"):
        client.get("")
    assert client.wait_ready(0.0) is False
    assert client.stats()["puts"] == 1
    assert "closed" in repr(client)
    assert client.register(bytearray(8)).size == 8
    assert world.client().get("k") == b"v"


@breaks(a_closed_client_says_so)
class NeverCloses(FakeClient):
    def close(self) -> None:
        pass


@promise
def an_exception_goes_through_the_context(world: World) -> None:
    client = world.client()
    with pytest.raises(KeyError):
        with client:
            raise KeyError
    with pytest.raises(UsageError, match="closed"):
        client.get("k")


@breaks(an_exception_goes_through_the_context)
class Swallows(FakeClient):
    def __exit__(self, *_: object) -> bool:  # type: ignore[override]
        self.close()
        return True


# --- threads, processes, tasks ------------------------------------------------------------------


@promise
def threads_find_whole_values(world: World) -> None:
    """Values carry key, version and a checksum, so that a torn or foreign one is seen."""
    client = world.client()
    shared = [f"shared{number}" for number in range(10)]
    wrong: list[str] = []

    def make(key: str, version: int, size: int) -> bytes:
        body = struct.pack("<I", version) + key.encode().ljust(16, b"\0") + pattern(size, version)
        return body + struct.pack("<I", zlib.crc32(body))

    def sound(key: str, value: bytes) -> bool:
        body, tail = value[:-4], value[-4:]
        return tail == struct.pack("<I", zlib.crc32(body)) and body[4:20] == key.encode().ljust(16, b"\0")

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            mine: dict[str, bytes] = {}
            buffer = bytearray(300_000)
            for step in range(120):
                own = f"own{seed}-{rng.randrange(5)}"
                other = rng.choice(shared)
                size = rng.choice([10, 4000, 40_000, 200_000])
                kind = rng.randrange(6)
                if kind == 0:
                    mine[own] = make(own, step, size)
                    assert client.put(own, mine[own])
                elif kind == 1:
                    assert client.get(own) == mine.get(own)
                elif kind == 2:
                    assert client.put(other, make(other, step, size))
                elif kind == 3:
                    length = client.get_into(other, buffer)
                    assert length is None or sound(other, bytes(buffer[:length]))
                elif kind == 4:
                    assert client.delete(own) is (mine.pop(own, None) is not None)
                else:
                    got = client.get_many(shared)
                    assert all(value is None or sound(key, value) for key, value in zip(shared, got))
        except BaseException as exc:
            wrong.append(f"thread {seed}: {exc!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not wrong
    assert client.stats()["outages"] == 0


@breaks(threads_find_whole_values)
class ForgetsAtTimes(FakeClient):
    def delete(self, key: str) -> bool:
        return bool(super().delete(key)) and len(key) < 0


@promise
def a_pickled_client_has_the_same_settings(world: World) -> None:
    client = world.client(deadline_s=77.0, checksum=True)
    client.put("k", b"v")
    with pickle.loads(pickle.dumps(client)) as other:
        assert type(other) is type(client)
        assert (other.namespace, other.deadline_s, other.checksum) == (client.namespace, 77.0, True)
        assert other.get("k") == b"v"
        paths = [worker["path"] for worker in client.stats()["workers"]]
        assert [worker["path"] for worker in other.stats()["workers"]] == paths
    assert client.get("k") == b"v"  # closing the other client does not close this one


@breaks(a_pickled_client_has_the_same_settings)
class PicklesItsStoreOnly(FakeClient):
    def __reduce__(self) -> tuple[Any, ...]:
        return pickled_without_settings, (self.store,)


def pickled_without_settings(store: FakeStore) -> FakeClient:
    return PicklesItsStoreOnly(store=store)


@promise
def a_forked_child_goes_on(world: World) -> None:
    """A child that is forked while another thread is in the middle of a call finds no lock of that call."""
    client = world.client()
    assert client.put("parent", b"v")
    stop = threading.Event()
    failed: list[str] = []

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            if not client.put("busy", b"v" * 5000) or client.get("busy") != b"v" * 5000:
                failed.append(f"at {number}")

    def child() -> bool:
        return (
            client.get("parent") == b"v" and client.put("child", b"v") and client.get("child") == b"v"
            and asyncio.run(client.get_async("child")) == b"v"
        )  # fmt: skip

    thread = threading.Thread(target=work)
    thread.start()
    try:
        codes = [forked(child) for _ in range(8)]
    finally:
        stop.set()
        thread.join(JOIN_S)
    assert codes == [0] * 8
    assert not failed
    assert client.get("parent") == b"v"
    assert client.put("parent", b"again") is True


@breaks(a_forked_child_goes_on)
class EndsWithAFork(FakeClient):
    def _after_fork(self) -> None:
        super()._after_fork()
        self._routes.closed = True


@promise
def the_asyncio_forms_answer_the_same(world: World) -> None:
    client = world.client()

    async def body() -> None:
        assert await client.put_async("k", b"value") is True
        assert await client.get_async("k") == b"value"
        buffer = bytearray(8)
        assert await client.get_into_async("k", buffer) == 5
        assert buffer == b"value\0\0\0"
        assert await client.exists_async("k") is True
        keys = [f"k{number}" for number in range(20)]
        assert all(await asyncio.gather(*(client.put_async(key, key.encode()) for key in keys)))
        assert await asyncio.gather(*(client.get_async(key) for key in keys)) == [key.encode() for key in keys]
        assert await client.put_many_async(["a", "b"], [b"1", b"2"]) == [True, True]
        assert await client.exists_many_async(["a", "b", "c"]) == [True, True, False]
        assert await client.get_into_many_async(["a", "c"], [buffer, bytearray(1)]) == [1, None]
        assert await client.delete_async("k") is True
        assert await client.get_async("k") is None
        with pytest.raises(UsageError):
            await client.get_into_async("a", b"read-only")

    asyncio.run(body())
    asyncio.run(body())  # it works in another loop too


@breaks(the_asyncio_forms_answer_the_same)
class AsyncPutsSayNothing(FakeClient):
    async def put_async(self, key: str, value: Any) -> bool:
        await super().put_async(key, value)
        return None  # type: ignore[return-value]


@promise
def a_block_of_asyncio_closes_the_client(world: World) -> None:
    """All batches have their forms there, and the block ends when no call is in flight any more."""
    opened = world.client()

    async def body() -> None:
        async with opened as client:
            assert client is opened
            assert await client.put_many_async(["a", "b"], [b"1", b"22"]) == [True, True]
            assert await client.get_many_async(["a", "no", "b"]) == [b"1", None, b"22"]
            view = await client.view_async("b")
            assert view and bytes(view.data) == b"22"
            view.close()
            assert await client.delete_many_async(["a", "no"]) == [True, False]
            running = asyncio.ensure_future(client.get_async("b"))
            await asyncio.sleep(0)
        assert running.done() or await running in (b"22", None)
        with pytest.raises(UsageError):
            await opened.get_async("b")
        await opened.close_async()  # twice is harmless

    asyncio.run(body())
    with pytest.raises(UsageError):
        opened.get("b")


@breaks(a_block_of_asyncio_closes_the_client)
class StaysOpen(FakeClient):
    async def __aexit__(self, *_: object) -> None:
        pass


@promise
def a_cancellation_waits_for_the_call_under_way(world: World) -> None:
    """After CancelledError no thread writes into the buffer any more."""
    client = world.client()
    buffer = bytearray(1)
    entered, go_on = threading.Event(), threading.Event()

    def call() -> int:
        entered.set()
        go_on.wait(WAIT_S)
        buffer[0] = 1
        return 1

    async def body() -> None:
        task = asyncio.ensure_future(client.in_thread(call))
        while not entered.is_set():
            await asyncio.sleep(0)
        for _ in range(2):  # a second cancellation must not raise earlier
            task.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
        early = task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not early
        assert buffer[0] == 1

    asyncio.run(body())


@breaks(a_cancellation_waits_for_the_call_under_way)
class CancelsAtOnce(FakeClient):
    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(call, *arguments)


@promise
def a_cancelled_call_that_waits_for_a_thread_never_runs(world: World) -> None:
    client = world.client()
    go_on = threading.Event()
    ran: list[int] = []

    async def body() -> None:
        blockers = [asyncio.ensure_future(client.in_thread(go_on.wait, WAIT_S)) for _ in range(32)]
        await asyncio.sleep(0)
        last = asyncio.ensure_future(client.in_thread(ran.append, 1))
        await asyncio.sleep(0)
        last.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await last
        assert last.cancelled()
        go_on.set()
        assert all(await asyncio.gather(*blockers))

    asyncio.run(body())
    assert ran == []


@breaks(a_cancelled_call_that_waits_for_a_thread_never_runs)
class RunsItAllTheSame(FakeClient):
    async def in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await super().in_thread(call, *arguments)
        except asyncio.CancelledError:
            call(*arguments)
            raise


# --- what takes a cluster of its own --------------------------------------------------------------


@apart
def an_outage_is_misses_and_never_raises(world: World) -> None:
    client = world.client()
    assert client.put("k", b"v")
    path = client.stats()["workers"][0]["path"]
    view = client.view("k")
    assert view
    world.down()
    # Nothing raises in the first moments either.
    assert client.get("k") in (b"v", None)
    assert client.put("new", b"v") is False
    assert client.delete("k") is False
    # The mapped arena may answer until its heartbeat has stopped for a while.
    wait_until(lambda: client.get("k") is None and not client.wait_ready(0.0), "gets miss", WAIT_S)
    failures, outages = client.stats()["put_failures"], client.stats()["outages"]
    buffer = bytearray(8)  # may hold anything after a miss
    assert client.put("new", b"v") is False
    assert client.put_many(["a", "b"], [b"v", b"v"]) == [False, False]
    assert client.get("k") is None
    assert client.get_into("k", buffer) is None
    assert client.get_many(["k"] * 3) == [None] * 3
    assert client.get_into_many(["k"] * 40, [buffer] * 40) == [None] * 40
    assert client.exists("k") is False
    assert client.exists_many(["k"] * 40) == [False] * 40
    assert client.delete("k") is False
    assert client.delete_many(["k", "l"]) == [False, False]
    assert not client.view("k")
    assert asyncio.run(client.get_async("k")) is None
    stats = client.stats()
    assert stats["put_failures"] - failures == 3
    assert stats["outages"] - outages >= 90
    assert stats["last_put_failure"] != "", "a put that failed can be asked why"
    assert {worker["path"] for worker in stats["workers"]} == {"down"}
    assert all(worker["reason"] for worker in stats["workers"])
    with pytest.raises(UsageError, match="key"):  # a caller's mistake still raises
        client.get("")
    assert bytes(view.data) == b"v"  # what was mapped stays mapped
    view.close()
    world.up()
    wait_until(lambda: client.put("k", b"w"), "puts are stored again", WAIT_S)
    assert client.get("k") == b"w"
    assert client.wait_ready()
    assert client.stats()["workers"][0]["path"] == path


@breaks(an_outage_is_misses_and_never_raises)
class StoresInAnOutage(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        super().put(key, value)
        return True


@breaks(an_outage_is_misses_and_never_raises)
class DoesNotSayWhy(FakeClient):
    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "last_put_failure": ""}


@breaks(an_outage_is_misses_and_never_raises)
class AnswersInAnOutage(FakeClient):
    def exists(self, key: str) -> bool:
        return self.store._has(self.digest(key))


@apart
def a_full_store_forgets_and_never_mixes_up(world: World) -> None:
    client = world.client()
    assert client.put("seen", pattern(MIB, 1000))
    view = client.view("seen")
    assert view
    keys = [f"k{number}" for number in range(150)]
    for number, key in enumerate(keys):
        assert client.put(key, pattern(MIB, number)) is True
    there = client.exists_many(keys)
    assert there[-1] is True
    assert 20 < sum(there) <= 64
    read = 0
    for number, (key, hit) in enumerate(zip(keys, there)):
        value = client.get(key)  # room for the next values may have been made meanwhile
        assert value is None or (hit and value == pattern(MIB, number))
        read += value is not None
    assert read > 20
    if client.stats()["workers"][0]["path"] != "tcp":  # by TCP a view is a copy, which pins nothing
        assert client.exists("seen") is True, "a pinned entry was evicted"
    assert view.data == pattern(MIB, 1000)
    view.close()


@breaks(a_full_store_forgets_and_never_mixes_up)
class Bottomless(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        self.store.capacity = None
        return super().put(key, value)


@breaks(a_full_store_forgets_and_never_mixes_up)
class PinsNothing(FakeClient):
    def view(self, key: str) -> View:
        return View(memoryview(self.get(key) or b""))
