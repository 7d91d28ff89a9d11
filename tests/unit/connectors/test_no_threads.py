"""Connectors in a process that can start no more threads: a job that they report as failed is not run later.

Each test keeps the first thread of a pool busy, and lets none be started for the second job. The first thread is free
again before the pool ends, and takes whatever is queued.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.connectors import vllm_scheduler
from simm.connectors.keyspace import Keyspace
from simm.connectors.vllm_plan import Block, Load, Plan
from simm.connectors.vllm_scheduler import SchedulerSide
from simm.host.threads import Pool
from simm.testing import FakeClient, FakeStore
from tests.support import fake_lmcache, fake_vllm_tier
from tests.support.ended import ended
from tests.support.fake_lmcache import ObjectKey
from tests.support.fake_vllm_tier import Context, Job, Key
from tests.support.scarce_threads import ERRORS, Gate, lose_jobs, no_threads
from tests.support.toy_vllm import FULL, Engine
from tests.support.waiting import WAIT_S, wait_until

GENERATION = "0" * 16


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


# -- vLLM's connector --------------------------------------------------------------------------------------------


def block(number: int) -> Block:
    return Block(0, number, bytes([number]) * 32)


class Worker:
    """A worker's half, and the store as it sees it."""

    def __init__(self, store: FakeStore, **form: Any) -> None:
        self.client = FakeClient(store=store, deadline_s=WAIT_S)
        self.engine = Engine(self.client, **form)
        self.side = self.engine.worker
        self.rows = sorted(self.side._free)

    def begin(self, *numbers: int) -> None:
        """Begin a step that fills these blocks, each with bytes of its own."""
        for number in numbers:
            self.fill(number, number)
        self.side.begin(Plan(saves={GENERATION: [block(each) for each in numbers]}))

    def fill(self, number: int, value: int) -> None:
        for memory in self.engine.memory.values():
            memory[number] = value

    def holds(self, number: int, value: int) -> bool:
        return all((memory[number] == value).all() for memory in self.engine.memory.values())

    def stored(self, *numbers: int) -> list[bool]:
        keys = self.side._keys([block(each) for each in numbers])
        return self.client.exists_digests(self.side._keyspace.digests(GENERATION, keys))


@pytest.fixture
def worker(store: FakeStore) -> Iterator[Worker]:
    made = Worker(store)
    yield made
    made.engine.close()


def test_blocks_whose_save_has_no_thread_are_not_stored_from_rows_of_others(worker: Worker, store: FakeStore) -> None:
    """Their rows are free at once, and the next step's blocks are staged there."""
    store.latency = gate = Gate("simm-vllm-save")
    worker.begin(1)
    worker.side.end()
    assert gate.reached()
    with no_threads("simm-vllm-save"):
        worker.begin(2)
        worker.side.end()
    worker.begin(3)
    for name in FULL.layers:
        worker.side.save_layer(name)
    worker.side._await_copies()
    gate.open()
    last = worker.side._savers.hand_over(int)
    assert last is not None and last.result(WAIT_S) == 0, "it comes after what is queued"
    worker.side.end()
    worker.side.close()
    assert worker.stored(1, 2, 3) == [True, False, True]
    assert sorted(worker.side._free) == worker.rows, "each row once"
    assert worker.side.wait_saved(0)
    assert worker.side.take_counts()["blocks_not_stored"] == 1


def test_blocks_whose_copy_has_no_thread_are_not_stored(worker: Worker, store: FakeStore) -> None:
    store.latency = gate = Gate("simm-vllm-copy")
    plain, copied = worker.side._copy, []

    def copy(name: str, staged: Any) -> None:
        copied.append(name)
        gate("copy", 1)
        plain(name, staged)

    worker.side._copy = copy  # type: ignore[method-assign]
    worker.begin(1)
    worker.side.save_layer(FULL.layers[0])
    assert gate.reached()
    with no_threads("simm-vllm-copy"):
        worker.side.save_layer(FULL.layers[1])
    gate.open()
    worker.side.end()
    worker.side.close()
    assert FULL.layers[1] not in copied
    assert worker.stored(1) == [False] and sorted(worker.side._free) == worker.rows


def test_issue_a_copy_whose_thread_has_no_memory_holds_up_no_step(worker: Worker) -> None:
    lose_jobs(worker.side._copiers, 1)
    worker.begin(1)
    for name in FULL.layers:
        worker.side.save_layer(name)
    assert ended(worker.side.end), "it hangs"
    worker.side.close()
    assert worker.stored(1) == [False] and sorted(worker.side._free) == worker.rows


@pytest.mark.parametrize("layerwise", [False, True])
def test_issue_a_load_whose_thread_has_no_memory_has_failed(store: FakeStore, layerwise: bool) -> None:
    worker = Worker(store, layerwise=layerwise)
    try:
        lose_jobs(worker.side._loaders, 1)
        worker.side.begin(Plan())
        worker.side.load(Plan([Load("r", GENERATION, [block(1)])]))
        for name in FULL.layers:
            assert ended(lambda name=name: worker.side.wait_layer(name)), "it hangs"
        assert ended(worker.side.end)
        if not layerwise:
            wait_until(lambda: worker.side.finished() == ({"r"}, {"r"}), "it is not told")
        assert worker.side.bad_blocks() == {1}
    finally:
        worker.engine.close()


def test_issue_a_save_whose_thread_has_no_memory_costs_no_rows(worker: Worker) -> None:
    lose_jobs(worker.side._savers, 1)
    worker.begin(1)
    worker.side.end()
    assert worker.side.wait_saved(WAIT_S)
    worker.begin()
    assert worker.stored(1) == [False] and sorted(worker.side._free) == worker.rows


@pytest.mark.parametrize("layerwise", [False, True])
def test_blocks_whose_load_has_no_thread_are_not_written(store: FakeStore, layerwise: bool) -> None:
    """They are named as failed, and the engine computes them."""
    worker = Worker(store, layerwise=layerwise)
    try:
        worker.begin(1, 2)
        worker.side.end()
        assert worker.side.wait_saved(WAIT_S) and worker.stored(1, 2) == [True, True]
        worker.fill(1, 0)
        store.latency = gate = Gate("simm-vllm-load")
        worker.side.begin(Plan())
        worker.side.load(Plan([Load("first", GENERATION, [block(1)])]))
        assert gate.reached()
        with no_threads("simm-vllm-load"):
            worker.side.load(Plan([Load("second", GENERATION, [block(2)])]))
        worker.side.wait_layer(FULL.layers[-1])
        assert worker.side.bad_blocks() == {2}
        report = worker.side.take_report()
        assert report is not None and report.failed == {"second"}
        assert worker.side.finished() == (({"second"}, {"second"}) if not layerwise else (set(), set()))
        worker.fill(2, 0xEE)
        gate.open()
        worker.side._loaders.shutdown(wait=True)
        assert worker.holds(1, 1) and worker.holds(2, 0xEE)
        assert worker.side.finished() == (({"first"}, set()) if not layerwise else (set(), set()))
        assert not worker.side.bad_blocks() and worker.side.take_report() is None
    finally:
        worker.engine.close()


def test_a_lookup_without_a_thread_is_a_miss_that_asks_nothing(store: FakeStore) -> None:
    client = FakeClient(store=store, deadline_s=WAIT_S)
    side = SchedulerSide(client, Keyspace(client, "toy"), [FULL], FULL.block_tokens, FULL.block_tokens)
    side.identities = ["rank"]
    assert side._keyspace.generation()
    store.latency = gate = Gate("simm-vllm-lookup")

    def request(number: str) -> Any:
        return SimpleNamespace(request_id=number, num_tokens=9, block_hashes=[bytes(32)] * 2)

    assert side.matched(request("first"), 0) == (None, False) and gate.reached()
    with no_threads("simm-vllm-lookup"):
        assert side.matched(request("second"), 0) == (0, False)
    gate.open()
    side._threads.shutdown(wait=True)
    assert gate.operations == ["get", "exists"], "the first one's generation, and its blocks"
    side.close()


class Producer:
    """A scheduler's half that only stores, in an engine whose steps each begin a request with two blocks."""

    def __init__(self, store: FakeStore) -> None:
        self.client = FakeClient(store=store, deadline_s=WAIT_S)
        self.keyspace = Keyspace(self.client, "toy")
        self.side = SchedulerSide(
            self.client, self.keyspace, [FULL], FULL.block_tokens, FULL.block_tokens, loads=False
        )  # fmt: skip
        self.steps = 0

    def step(self) -> Plan:
        self.steps += 1
        number = str(self.steps)
        tokens = 2 * FULL.block_tokens
        request = SimpleNamespace(request_id=number, num_tokens=tokens + 1, block_hashes=[bytes(32), bytes(32)])
        self.side.added(request)
        assert self.side.matched(request, 0) == (0, False)
        return self.side.plan(SimpleNamespace(
            num_scheduled_tokens={number: tokens},
            scheduled_new_reqs=[SimpleNamespace(req_id=number, num_computed_tokens=0)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: [[1, 2]]),
        ))  # fmt: skip

    def saves(self) -> bool:
        return bool(self.step().saves)


@pytest.fixture
def producer(store: FakeStore) -> Iterator[Producer]:
    made = Producer(store)
    yield made
    made.side.close()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["use", "reset"])
def test_a_producer_that_had_no_thread_stores_later(producer: Producer, call: str, error: type[Exception]) -> None:
    """It looks for nothing, so no lookup reads the generation either."""
    if call == "reset":
        producer.side.use(["rank"])
        wait_until(producer.saves, "nothing is stored")
    with no_threads("simm-vllm-lookup", error):
        if call == "reset":
            producer.side._threads = Pool(1, "simm-vllm-lookup")  # none is idle
            producer.side.reset()
        else:
            producer.side.use(["rank"])
        assert not producer.saves()
    wait_until(producer.saves, "nothing is stored")


def test_a_producer_whose_servers_come_later_stores_then(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has the generation read, one at a time."""
    monkeypatch.setattr(vllm_scheduler, "_READ_AGAIN_S", 0.0)
    known, reads = producer.keyspace.generation, threading.Semaphore(0)
    go, asked = threading.Event(), [0]

    def none_yet() -> None:
        asked[0] += 1
        reads.release()
        if asked[0] > 1:
            assert go.wait(WAIT_S)

    monkeypatch.setattr(producer.keyspace, "generation", none_yet)
    producer.side.use(["rank"])
    assert reads.acquire(timeout=WAIT_S)
    wait_until(lambda: not producer.saves() and reads.acquire(blocking=False), "no second read")
    for _ in range(5):
        assert not producer.saves()
    assert asked == [2], "one in flight"
    monkeypatch.setattr(producer.keyspace, "generation", known)
    go.set()
    wait_until(producer.saves, "nothing is stored")


def test_a_generation_that_cannot_be_read_is_not_read_at_each_step(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_scheduler, "_READ_AGAIN_S", 1e9)
    asked: list[None] = []
    monkeypatch.setattr(producer.keyspace, "generation", lambda: asked.append(None))
    producer.side.use(["rank"])
    for _ in range(5):
        assert not producer.saves()
        reading = producer.side._reading
        assert reading is not None
        wait_until(reading.done, "it is not read")
    assert asked == [None]


def test_issue_lookups_whose_threads_have_no_memory_make_no_other_late(store: FakeStore) -> None:
    client = FakeClient(store=store, deadline_s=WAIT_S)
    side = SchedulerSide(client, Keyspace(client, "toy"), [FULL], FULL.block_tokens, FULL.block_tokens)
    side.identities = ["rank"]
    assert side._keyspace.generation()

    def found(number: str) -> tuple[int | None, bool]:
        return side.matched(SimpleNamespace(request_id=number, num_tokens=9, block_hashes=[bytes(32)] * 2), 0)

    try:
        lose_jobs(side._threads, 2)
        assert found("first") == found("second") == (None, False)
        wait_until(lambda: all(call.job is not None and call.job.done() for call in side._calls), "they end")
        assert len(side._calls) == 2, "the control"
        last = SimpleNamespace(request_id="last", num_tokens=9, block_hashes=[bytes(32)] * 2)
        wait_until(lambda: side.matched(last, 0) == (0, False), "it is answered")
        assert "lookups_late" not in side.counts
    finally:
        side.close()


def test_issue_a_generation_whose_reader_has_no_memory_is_read_again(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_scheduler, "_READ_AGAIN_S", 0.0)
    lose_jobs(producer.side._threads, 1)
    producer.side.use(["rank"])
    wait_until(producer.saves, "nothing is stored")


# -- vLLM's tier -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [False, True])
def test_a_job_of_the_tier_without_a_thread_has_one_result(store: FakeStore, load: bool) -> None:
    keys = [Key(bytes([number]) * 32) for number in range(2)]
    rows, context = fake_vllm_tier.memory(), Context("r")
    with fake_vllm_tier.install() as module, FakeClient(store=store) as client:
        tier = module.SimmTier(fake_vllm_tier.spec(), memoryview(rows), "SimmTier", client=client, threads=2)
        store.latency = gate = Gate("simm-vllm_")
        tier.submit_store(Job(1, keys[:1], [0], False, context))
        assert gate.reached()
        with no_threads("simm-vllm_"):
            if load:
                tier.submit_load(Job(2, keys[:1], [1], True, context))
            else:
                tier.submit_store(Job(2, keys[1:], [1], False, context))
        (failed,) = tier.get_finished_jobs()
        assert (failed.job_id, failed.success) == (2, False)
        rows[1] = 0xEE
        gate.open()
        tier._threads.shutdown(wait=True)
        assert [(each.job_id, each.success) for each in tier.get_finished_jobs()] == [(1, True)]
        assert not tier.has_pending_work() and not tier._running
        assert tier.stored(keys) == [True, False] and (rows[1] == 0xEE).all()
        tier.drain_jobs()
        tier.shutdown()


@pytest.mark.parametrize("how", ["lost", "without a result"])
def test_issue_a_job_of_the_tier_whose_thread_has_no_memory_has_failed(store: FakeStore, how: str) -> None:
    """A reset, which waits for all jobs, hung."""
    rows = fake_vllm_tier.memory()
    with fake_vllm_tier.install() as module, FakeClient(store=store) as client:
        tier = module.SimmTier(fake_vllm_tier.spec(), memoryview(rows), "SimmTier", client=client, threads=1)
        finish = tier._finish

        def lacking(*arguments: Any) -> None:
            tier._finish = finish
            raise MemoryError

        if how == "lost":
            lose_jobs(tier._threads, 1)
        else:
            tier._finish = lacking
        tier.submit_store(Job(1, [Key(bytes(32))], [0], False, Context("r")))
        assert ended(tier.drain_jobs), "it hangs"
        assert [(each.job_id, each.success) for each in tier.get_finished_jobs()] == [(1, False)]
        assert not tier.has_pending_work()
        tier.shutdown()


# -- LMCache's server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["store", "load", "lookup"])
def test_a_task_of_the_server_without_a_thread_ends_once(store: FakeStore, what: str) -> None:
    """Its end is signalled, and it touches nothing later."""
    first, second = ObjectKey(b"first"), ObjectKey(b"second")
    data, room = fake_lmcache.object_of(b"1" * 64), fake_lmcache.object_of(b"2" * 64)
    with fake_lmcache.server() as module, FakeClient(store=store) as client:
        adapter = module.SimmL2Adapter({"threads": 2}, client=client)
        store.latency = gate = Gate("simm-lmcache")
        adapter.submit_store_task([first], [data])
        assert gate.reached()
        with no_threads("simm-lmcache"):
            if what == "store":
                task, descriptor = adapter.submit_store_task([second], [room]), adapter.get_store_event_fd()
            elif what == "load":
                task, descriptor = adapter.submit_load_task([first], [room]), adapter.get_load_event_fd()
            else:
                task = adapter.submit_lookup_and_lock_task([first], {})
                descriptor = adapter.get_lookup_and_lock_event_fd()
        assert select.select([descriptor], [], [], 0)[0] == [descriptor]
        if what == "store":
            assert adapter.pop_completed_store_tasks() == {task: -1}
        else:
            query = adapter.query_load_result if what == "load" else adapter.query_lookup_and_lock_result
            assert query(task).places() == [] and query(task) is None
        gate.open()
        adapter._threads.shutdown(wait=True)
        assert bytes(room.byte_array) == b"2" * 64
        assert client.exists_digests(adapter._digests([first, second])) == [True, False]
        assert adapter.report_status()["locked"] == 0
        assert task not in adapter.pop_completed_store_tasks()
        assert not adapter._found and not adapter._loaded
        adapter.close()


@pytest.mark.parametrize("how", ["no memory", "cancelled"])
@pytest.mark.parametrize("what", ["store", "load", "lookup"])
def test_issue_a_task_of_the_server_whose_job_ends_without_its_call_has_a_result(
    store: FakeStore, what: str, how: str
) -> None:
    """It had none, and LMCache waited for it."""
    key, room = ObjectKey(b"first"), fake_lmcache.object_of(b"2" * 64)
    with fake_lmcache.server() as module, FakeClient(store=store) as client:
        adapter = module.SimmL2Adapter({"threads": 1}, client=client)
        if how == "cancelled":
            store.latency = gate = Gate("simm-lmcache")
            adapter.submit_lookup_and_lock_task([ObjectKey(b"second")], {})
            assert gate.reached()
        else:
            lose_jobs(adapter._threads, 1)
        if what == "store":
            task, descriptor = adapter.submit_store_task([key], [room]), adapter.get_store_event_fd()
        elif what == "load":
            task, descriptor = adapter.submit_load_task([key], [room]), adapter.get_load_event_fd()
        else:
            task = adapter.submit_lookup_and_lock_task([key], {})
            descriptor = adapter.get_lookup_and_lock_event_fd()
        if how == "cancelled":
            adapter._threads.shutdown(wait=False, cancel_futures=True)
            gate.open()
        assert select.select([descriptor], [], [], WAIT_S)[0] == [descriptor]
        adapter._threads.shutdown(wait=True)
        if what == "store":
            assert adapter.pop_completed_store_tasks() == {task: -1}
        else:
            query = adapter.query_load_result if what == "load" else adapter.query_lookup_and_lock_result
            assert query(task).places() == [] and query(task) is None
        adapter.close()


def test_issue_a_lock_whose_job_ends_without_its_call_is_released(store: FakeStore) -> None:
    """Its values stayed pinned."""
    key = ObjectKey(b"first")
    with fake_lmcache.server() as module, FakeClient(store=store) as client:
        adapter = module.SimmL2Adapter({"threads": 2}, client=client)
        (name,) = adapter._names([key])
        assert client.put(name, b"value")
        held = module._Held(client.pin([name]))
        held.users = 1
        adapter._locked[name] = deque([(held, 0)])
        lose_jobs(adapter._threads, 1)
        adapter.submit_unlock([key])
        adapter._threads.shutdown(wait=True)
        assert "released" in repr(held.pins)
        adapter.close()


def test_a_lock_that_is_given_up_without_a_thread_is_released_once(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ObjectKey(b"first")
    with fake_lmcache.server() as module, FakeClient(store=store) as client:
        adapter = module.SimmL2Adapter({"threads": 2}, client=client)
        (name,) = adapter._names([key])
        assert client.put(name, b"value")
        held = module._Held(client.pin([name]))
        held.users = 1
        adapter._locked[name] = deque([(held, 0)])
        released: list[Any] = []
        release = adapter._release

        def note(each: Any) -> None:
            released.append(each)
            release(each)

        monkeypatch.setattr(adapter, "_release", note)
        store.latency = gate = Gate("simm-lmcache")
        adapter.submit_store_task([ObjectKey(b"second")], [fake_lmcache.object_of(b"2" * 64)])
        assert gate.reached()
        with no_threads("simm-lmcache"):
            adapter.submit_unlock([key])
        gate.open()
        adapter._threads.shutdown(wait=True)
        assert released == [held] and "released" in repr(held.pins)
        adapter.close()
