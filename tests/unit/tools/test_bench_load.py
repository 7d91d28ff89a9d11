"""The load of ``simm bench`` on a store in this process: what it calls, and whether it notices a store that lies."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from simm.tools.bench import load
from simm.tools.bench.apis import Api, ClientApi, KvApi
from simm.tools.bench.contents import FreshKeys, fault, key_name, stamp
from simm.tools.bench.floor import Area, stride_of
from simm.tools.bench.load import Load, LoadThread
from simm.tools.bench.plan import Mix


class Store:
    """A client that keeps values in a dict; ``fault`` says how it lies."""

    def __init__(self, fault: str = "") -> None:
        self.values: dict[str, bytes] = {}
        self.fault = fault

    def put(self, key: str, value: Any) -> bool:
        if self.fault == "put forgets all" or (self.fault == "put forgets" and key in self.values):
            return True
        self.values[key] = bytes(value)
        return True

    def put_many(self, keys: list[str], values: list[Any]) -> list[bool]:
        return [self.put(key, value) for key, value in zip(keys, values)]

    def get_into(self, key: str, buffer: Any) -> int | None:
        if self.fault == "get misses":
            return None
        if self.fault == "get of another key":
            key = next(iter(self.values))
        value = self.values.get(key)
        if value is None:
            return None
        if self.fault == "get writes nothing":
            return len(value)
        if self.fault == "get is short":
            value = value[:-1]
        buffer[: len(value)] = value
        if self.fault == "get is torn":
            buffer[len(value) - 1] ^= 1
        return len(value)

    def get_into_many(self, keys: list[str], buffers: list[Any]) -> list[int | None]:
        return [self.get_into(key, buffer) for key, buffer in zip(keys, buffers)]

    def exists(self, key: str) -> bool:
        return self.fault == "exists is always true" or key in self.values

    def exists_many(self, keys: list[str]) -> list[bool]:
        return [self.exists(key) for key in keys]

    def view(self, key: str) -> Any:
        buffer = memoryview(bytearray(1 << 16))
        length = self.get_into(key, buffer)
        return None if length is None else View(buffer[:length])


class KvStore:
    """The same as :class:`Store` by the codes of simm.kv, over views that it knows the memory of."""

    def __init__(self, store: Store, memory: Callable[[Any], memoryview]) -> None:
        self.store, self.memory = store, memory

    def put(self, key: str, block: Any) -> int:
        return 0 if self.store.put(key, self.memory(block)) else -2100

    def get(self, key: str, block: Any) -> int:
        return self.store.get_into(key, self.memory(block)) or -2101

    def exists(self, key: str) -> bool:
        return self.store.exists(key)

    def mput(self, keys: list[str], blocks: list[Any]) -> list[int]:
        return [self.put(key, block) for key, block in zip(keys, blocks)]

    def mget(self, keys: list[str], blocks: list[Any]) -> list[int]:
        return [self.get(key, block) for key, block in zip(keys, blocks)]

    def mexists(self, keys: list[str]) -> list[bool]:
        return self.store.exists_many(keys)

    def close(self) -> None:
        pass


class View:
    def __init__(self, data: memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def thread_on(
    store: Store, size: int = 200, rows: int = 12, *, api: str = "client", full: bool = False, mix: Mix | None = None
) -> LoadThread:
    room = rows * stride_of(size)
    source, target = Area(room), Area(room)
    source.fill()
    client: Any = store
    if api == "kv":
        called: Api = KvApi.__new__(KvApi)
        called.__dict__.update(_store=KvStore(store, lambda block: memoryview(block.as_ref())), _registered={})
    else:
        called = ClientApi(client)
    held: Any = SimpleNamespace(
        run="r", verify=True, full=full, mix=mix, api=called, source=source, target=target, shared=Area(room),
        raw=None, samples=[{}], client=client,
    )  # fmt: skip
    thread = LoadThread(held, 0, 0, rows, size)
    assert thread.store() == 0
    return thread


OPS = ("put", "get", "mput", "mget", "view", "exists", "mexists")
#: How many keys a call of an operation has here.
BATCHES = {"mput": 4, "mget": 4, "mexists": 4}
WAYS = [
    pytest.param({"api": api, "full": full}, id=f"{api}-{'full' if full else 'room'}")
    for api in ("client", "kv")
    for full in (False, True)
]  # fmt: skip
def burst(thread: LoadThread, op: str, counted: bool = False, floor: bool = False) -> dict[str, int]:
    (result,) = thread.burst((op,), BATCHES.get(op, 1), floor, 0.001, counted)["ops"]
    return cast("dict[str, int]", result)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [5, 32, 200, 4096])
def test_a_good_store_passes_verification(size: int, way: dict[str, Any]) -> None:
    thread = thread_on(Store(), size, **way)
    for op in OPS if way["api"] == "client" else [op for op in OPS if op != "view"]:
        for counted in (False, True):
            result = burst(thread, op, counted)
            assert result["bad"] == 0 and result["calls"] >= 2, op
            assert result["keys"] == result["calls"] * BATCHES.get(op, 1)
        assert burst(thread, op, floor=True)["bad"] == 0
    assert thread.wrong == 0, thread.last_error
    count, raw = thread._samples[0, False].take()
    assert count * 8 == len(raw) > 0


@pytest.mark.parametrize(
    ("lie", "op"),
    [
        ("put forgets", "put"), ("put forgets", "mput"), ("get of another key", "get"), ("get writes nothing", "get"),
        ("get is short", "mget"), ("get is torn", "get"), ("get is torn", "mget"), ("get is torn", "view"),
        ("exists is always true", "exists"), ("exists is always true", "mexists"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_lies_is_found_out(lie: str, op: str, way: dict[str, Any]) -> None:
    if way["api"] == "kv" and op == "view":
        op = "get"  # it has no views
    store = Store()
    thread = thread_on(store, **way)
    if lie == "put forgets" and way["full"]:
        # Each put is of a new key, and a miss is allowed: what is missing is seen when it is read.
        store.fault = "put forgets all"
        burst(thread, op)
        assert burst(thread, "mget")["bad"] > 0 and thread.wrong == 0
        return
    store.fault = lie
    burst(thread, op)
    assert thread.wrong > 0 and thread.last_error


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_mix_calls_what_it_was_asked_for(way: dict[str, Any], many: bool) -> None:
    mix = Mix({"put": 1.0, "get": 4.0, "ask": 1.0}, 0.75)
    thread = thread_on(Store(), rows=64, mix=mix, **way)
    ops, batch = (("mput", "mget", "mexists"), 4) if many else (("put", "get", "exists"), 1)
    for floor in (False, True):
        counts = thread.burst(ops, batch, floor, 0.01, True)["ops"]
        assert all(each["calls"] > 1 and each["bad"] == 0 for each in counts)
        assert counts[0]["absent"] == 0 and counts[1]["absent"] + counts[2]["absent"] > 0
    assert thread.wrong == 0, thread.last_error
    calls = list(itertools.islice(thread.supply(ops, batch, False), 600))
    put, get, question = (sum(call[0] == which for call in calls) for which in range(3))
    assert 300 < get < 500 and 50 < put < 150 and 50 < question < 150
    asked = [there for *_, present in calls for there in present or ()]
    assert 0.6 < sum(asked) / len(asked) < 0.9


@pytest.mark.parametrize("hits", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("floor", [False, True])
def test_misses_move_no_bytes(hits: float, floor: bool) -> None:
    """They counted as values that were read, for the operation and for its floor."""
    thread = thread_on(Store(), rows=64, mix=Mix({"put": 1.0, "get": 4.0, "ask": 1.0}, hits))
    put, get, _ = thread.burst(("mput", "mget", "mexists"), 4, floor, 0.01, True)["ops"]
    assert put["moved"] == put["keys"] and get["moved"] == get["keys"] - get["absent"]
    drawn = [there for which, *_, present in itertools.islice(thread.supply(("mput", "mget", "mexists"), 4, floor), 900)
             if which == 1 for there in present or ()]  # fmt: skip
    assert abs(sum(drawn) / len(drawn) - hits) < 0.1
    assert get["moved"] == 0 if hits == 0 else get["moved"] == get["keys"] if hits == 1 else get["moved"] > 0


@pytest.mark.parametrize("many", [False, True])
def test_a_mix_and_its_floor_are_the_same_calls(many: bool) -> None:
    """A floor in another order, or of other bytes, is no floor."""
    thread = thread_on(Store(), rows=64, mix=Mix(), full=True)
    ops, batch = (("mput", "mget", "mexists"), 4) if many else (("put", "get", "exists"), 1)
    own, floor = (itertools.islice(thread.supply(ops, batch, which), 500) for which in (False, True))
    for (op, number, arguments, present), (other, row, copied, _) in zip(own, floor):
        assert (op, number) == (other, row)
        sizes = copied[2] if many else [copied[2]]
        wanted = [200] * batch if present is None else [200 if ops[op].endswith("get") and p else 64 for p in present]
        assert sizes == wanted and len(arguments) == (1 if ops[op].endswith("exists") else 2)


@pytest.mark.parametrize(
    ("lie", "ops"),
    [("put forgets", ("put", "get")), ("get is torn", ("put", "get")), ("exists is always true", ("exists",)),
     ("get of another key", ("mput", "mget"))],
)  # fmt: skip
def test_a_store_that_lies_is_found_out_in_a_mix(lie: str, ops: tuple[str, ...]) -> None:
    store = Store()
    thread = thread_on(store, rows=64, mix=Mix(hits=0.5))
    store.fault = lie
    thread.burst(ops, BATCHES.get(ops[0], 1), False, 0.01, False)
    assert thread.wrong > 0 and thread.last_error


def test_puts_into_a_full_arena_are_of_new_keys() -> None:
    store = Store()
    thread = thread_on(store, full=True)
    for op in ("put", "mput"):
        before, keys = len(store.values), set(thread.keys)
        assert not thread.stale
        result = burst(thread, op)
        assert len(store.values) == before + result["keys"] and thread.stale
        assert all(key in store.values for key in thread.keys) and not keys & set(thread.keys)
        assert thread.store() == 0
    before = len(store.values)
    assert thread.fill(1000) == 0 and len(store.values) == before + 1000 and not thread.stale


def load_of(*threads: LoadThread) -> Load:
    made = Load.__new__(Load)
    made.threads, made.members = len(threads), list(threads)
    return made


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_issue_threads_share_what_fills_the_arena(threads: int) -> None:
    """Each took the share that was rounded up, so no arena of large values was ever found to be full."""
    stores = [Store() for _ in range(threads)]
    filling = load_of(*(thread_on(store, full=True) for store in stores))
    before = sum(len(store.values) for store in stores)
    for count in (7, 1):
        assert filling.fill(count) == {"refused": 0}
        before, stored = sum(len(store.values) for store in stores), before
        assert before == stored + count


def test_issue_wrong_values_are_those_of_one_burst() -> None:
    """Threads counted on, so each later operation was said to have read them too."""
    store = Store()
    asking = load_of(thread_on(store))
    store.fault = "get is torn"
    bad = asking.burst(("get",), 1, False, 0.001, True, 0)
    assert bad["wrong"] > 0 and "torn" in bad["error"]
    store.fault = ""
    good = asking.burst(("get",), 1, False, 0.001, True, 0)
    assert (good["wrong"], good["error"]) == (0, "")


def test_fresh_keys_never_come_twice() -> None:
    fresh = FreshKeys("seed")
    fresh.make(10)
    taken = [key for count in (1, 8, 3, 5000, 1) for key in fresh.take(count)]
    assert len(set(taken)) == len(taken) == fresh.taken == 5013
    assert {len(key) for key in taken} == {len(key_name("r", 1, 0, 0))}
    assert not set(taken) & set(FreshKeys("another").take(5013))


@pytest.mark.parametrize("hidden", [False, True])
def test_processor_time_that_is_hidden_is_not_told(hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that lost the processor between its calls ran for less time than passed there."""
    thread = thread_on(Store())
    ran = (lambda: 0) if hidden else time.perf_counter_ns
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter_ns=time.perf_counter_ns, thread_time_ns=ran))
    told = thread.burst(("get",), 1, False, 0.001, True)["cpu_ns"]
    assert told is None if hidden else told > 0


def test_a_miss_is_counted_and_is_no_wrong_value() -> None:
    store = Store()
    thread = thread_on(store)
    store.fault = "get misses"
    result = burst(thread, "mget", True)
    assert result["bad"] == result["keys"] and thread.wrong == 0 and result["moved"] == 0
    store.fault = ""
    assert (served := burst(thread, "mget", True))["moved"] == served["keys"]


@pytest.mark.parametrize("size", [36, 100])
def test_a_stamp_says_whose_it_is(size: int) -> None:
    row = memoryview(bytearray(os.urandom(size)))
    stamp(row, "mine")
    assert fault(row, "mine", size, 0) == ""
    assert fault(row, "mine", size, -1) == ""
    assert fault(row, "mine", size, 1) == "version 0 instead of 1"
    assert fault(row, "yours", size, 0) == "another key's bytes"
    assert fault(row[:-1], "mine", size, 0) == f"{size - 1} bytes instead of {size}"
    row[-1] ^= 1
    assert "torn" in fault(row, "mine", size, 0)
