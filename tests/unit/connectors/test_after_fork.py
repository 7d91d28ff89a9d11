"""Connectors in a forked child, whose parent's other threads held their locks: the calls go on all the same."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from simm.connectors.complaints import Complaints
from simm.connectors.hicache.weight_versions import WeightVersions
from simm.connectors.keyspace import Keyspace
from simm.connectors.mooncake import MooncakeDistributedStore
from simm.connectors.mooncake_sessions import Sessions
from simm.connectors.registration.registrar import Registrar
from simm.connectors.vllm_plan import Block, Load, Plan
from simm.connectors.vllm_rank.jobs import Copy, Store
from simm.testing import FakeClient
from tests.support import fake_lmcache, fake_vllm_tier
from tests.support.client_values import forked
from tests.support.fake_lmcache import ObjectKey
from tests.support.fake_vllm_tier import Context, Job, Key
from tests.support.scarce_threads import Gate
from tests.support.toy_vllm import FULL, Engine
from tests.support.waiting import WAIT_S, wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


#: A tier's. It does not keep it.
MEMORY = fake_vllm_tier.memory()


class Case(NamedTuple):
    """An object, the lock that is held, and a call that takes it; it returns whether it has done what it should."""

    make: Callable[[FakeClient], Any]
    lock: Callable[[Any], Any]
    call: Callable[[Any], bool]


def plain(client: FakeClient) -> Complaints:
    return Complaints(logging.getLogger(__name__))


def lock_of(made: Any) -> Any:
    return made._lock


def store_of(client: FakeClient) -> MooncakeDistributedStore:
    made = MooncakeDistributedStore()
    made.use(client)
    return made


def ended(sessions: Sessions) -> bool:
    sessions.end_idle()
    return not len(sessions)


def told(registrar: Registrar) -> bool:
    registrar.tell("of the child", tuple)
    return registrar._of == ("of the child", 0)


def adapter_of(client: FakeClient) -> Any:
    with fake_lmcache.server() as module:
        return module.SimmL2Adapter({"threads": 2}, client=client)


def stored(adapter: Any) -> bool:
    """Return whether a task of the server ends."""
    task = adapter.submit_store_task([ObjectKey(os.urandom(8))], [fake_lmcache.object_of(b"1" * 64)])
    return bool(wait_until(adapter.pop_completed_store_tasks, "the task has not ended").get(task))


def tier_of(client: FakeClient) -> Any:
    with fake_vllm_tier.install() as module:
        return module.SimmTier(
            fake_vllm_tier.spec(), memoryview(MEMORY), "SimmTier", client=client, threads=2
        )  # fmt: skip


def offloaded(tier: Any) -> bool:
    """Return whether a job of the tier ends."""
    tier.submit_store(Job(1, [Key(bytes(32))], [0], False, Context("r")))
    tier.drain_jobs()
    results = list(tier.get_finished_jobs())
    return [each.job_id for each in results] == [1] and not tier.has_pending_work()


def engine_of(client: FakeClient) -> Engine:
    made = Engine(client)
    wait_until(lambda: made.scheduler._generation, "the generation is not known")
    return made


def looked_up(engine: Engine) -> bool:
    request = SimpleNamespace(request_id=str(uuid.uuid4()), num_tokens=9, block_hashes=[bytes(32)] * 2)
    return wait_until(lambda: engine.scheduler.matched(request, 0) != (None, False), "no lookup") is True


def ran(engine: Engine) -> bool:
    """Return whether the steps of a rank end: with a save, a load, and idle."""
    plain, block = engine.worker, Block(0, 1, bytes(32))
    plain.begin(Plan(saves={"0" * 16: [block]}))
    for name in FULL.layers:
        plain.save_layer(name)
    plain.end()
    assert plain.wait_saved(WAIT_S)
    plain.begin(Plan())
    plain.load(Plan([Load("r", "0" * 16, [block])]))
    wait_until(lambda: plain.finished()[0], "the load has not ended")
    plain.end()
    return not plain.bad_blocks()


CASES: dict[str, Case] = {
    "keyspace": Case(lambda client: Keyspace(client, "scope"), lock_of, lambda made: bool(made.generation())),
    "mooncake": Case(store_of, lock_of, lambda made: made.unregister_buffer(4096) == -600),
    "sessions": Case(lambda client: Sessions(plain(client)), lock_of, ended),
    "weights": Case(lambda _: WeightVersions(lambda: "1"), lock_of, lambda made: made.of_caller() == "1"),
    "registrar": Case(lambda client: Registrar(client, plain(client)), lock_of, told),
    "adapter": Case(adapter_of, lock_of, stored),
    "tier": Case(tier_of, lock_of, offloaded),
    "rank": Case(engine_of, lambda made: made.worker._lock, ran),
    "lookups": Case(engine_of, lambda made: made.scheduler._threads._lock, looked_up),
}
#: Those that have threads.
THREADED = {name: CASES[name] for name in ("adapter", "tier", "rank", "lookups")}


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    """Have another thread hold a lock."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            assert done.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(WAIT_S)
    try:
        yield
    finally:
        done.set()
        thread.join(WAIT_S)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_lock_that_another_thread_held_at_the_fork_is_free_in_the_child(case: Case) -> None:
    with FakeClient() as client:
        made = case.make(client)
        with held(case.lock(made)):
            assert forked(lambda: case.call(made)) == 0
            assert case.lock(made).acquire(False) is False, "the parent's is the same"
        assert case.call(made), "the control"


@pytest.mark.parametrize("case", THREADED.values(), ids=THREADED)
def test_a_thread_that_was_idle_at_the_fork_is_not_waited_for_in_the_child(case: Case) -> None:
    with FakeClient() as client:
        made = case.make(client)
        assert case.call(made), "now it has idle threads"
        assert forked(lambda: case.call(made)) == 0


@pytest.mark.parametrize("case", THREADED.values(), ids=THREADED)
def test_what_a_thread_did_at_the_fork_is_not_waited_for_in_the_child(case: Case) -> None:
    """Another thread waits for it in the parent."""
    gate, threads = Gate("simm-"), []
    with FakeClient() as client:
        made = case.make(client)
        client.store.latency = gate
        threads.append(threading.Thread(target=case.call, args=(made,)))
        threads[0].start()
        try:
            assert gate.reached()

            def in_child() -> bool:
                client.store.latency = None
                return case.call(made)

            assert forked(in_child) == 0
        finally:
            gate.open()
            threads[0].join(WAIT_S)


def test_a_rank_in_a_child_forgets_the_step_of_its_parent() -> None:
    """Its layers, copies and saves are in threads that only the parent has."""
    with FakeClient() as client:
        worker = Engine(client, layerwise=True).worker
        rows = sorted(worker._free)
        worker.begin(Plan(saves={"0" * 16: [Block(0, 1, bytes(32))]}))
        gate = client.store.latency = Gate("simm-vllm-load")
        worker.load(Plan([Load("r", "0" * 16, [Block(0, 2, bytes(32))])]))
        assert gate.reached()
        worker._copies.append(Copy())
        worker._stores.append(Store([]))

        def in_child() -> bool:
            worker.end()
            worker.begin(Plan())
            return worker.wait_saved(0) and sorted(worker._free) == rows and worker.take_counts() == {}

        try:
            assert forked(in_child) == 0
        finally:
            gate.open()


def test_a_scheduler_in_a_child_asks_what_its_parent_was_asking() -> None:
    """Its threads were at the generation and at a lookup, which end in the parent only."""
    with FakeClient() as client:
        side = engine_of(client).scheduler
        gate = client.store.latency = Gate("simm-vllm-lookup")
        side.reset()
        request = SimpleNamespace(request_id="r", num_tokens=9, block_hashes=[bytes(32)] * 2)
        assert gate.reached() and side.matched(request, 0) == (None, False)

        def in_child() -> bool:
            client.store.latency = None
            side._read_again = 0.0
            side._read_soon()
            wait_until(lambda: side._generation, "the generation is not known")
            return side._requests["r"].lookup is None

        try:
            assert forked(in_child) == 0
        finally:
            gate.open()


def test_a_child_has_none_of_its_parents_locks() -> None:
    """The values are pinned by its parent. A load in the child reads them as anyone does."""
    key = ObjectKey(b"first")
    with FakeClient() as client:
        adapter = adapter_of(client)
        adapter.submit_store_task([key], [fake_lmcache.object_of(b"1" * 64)])
        wait_until(adapter.pop_completed_store_tasks, "not stored")
        task = adapter.submit_lookup_and_lock_task([key], {})
        wait_until(lambda: adapter.query_lookup_and_lock_result(task), "not looked up")
        assert adapter.report_status()["locked"] == 1

        def in_child() -> bool:
            room = fake_lmcache.object_of(bytes(64))
            load = adapter.submit_load_task([key], [room])
            got = wait_until(lambda: adapter.query_load_result(load), "not loaded")
            return got.places() == [0] and bytes(room.byte_array) == b"1" * 64

        assert forked(in_child) == 0
        assert adapter.report_status()["locked"] == 1
        adapter.close()


def test_a_child_keeps_what_a_registrar_was_told_of_its_end() -> None:
    with FakeClient() as client:
        registrar = Registrar(client, plain(client))
        registrar.close()
        assert forked(lambda: registrar._closed) == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_object_lives_on_for_its_lock(case: Case) -> None:
    with FakeClient() as client:
        made = weakref.ref(case.make(client))
        gc.collect()
        assert made() is None
