"""Calls of an engine that a signal's handler interrupts: no thread hangs for them, and neither does the engine's end.

vLLM ends by what its handler of SIGTERM raises in the engine's thread. ``threading.Condition`` and futures take locks
in Python functions, which stayed taken then.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.client import sink_of
from simm.connectors.complaints import Complaints
from simm.connectors.registration.registrar import NotYet, Registrar
from simm.connectors.vllm_plan import Block, Load, Plan
from simm.connectors.vllm_rank.jobs import Store
from simm.schemes.scheme import Scheme
from simm.testing import FakeClient
from tests.support import fake_vllm_tier
from tests.support.ended import ended
from tests.support.fake_vllm_tier import Context, Job, Key
from tests.support.interrupts import everywhere
from tests.support.toy_vllm import FULL, Engine
from tests.support.waiting import WAIT_S, wait_until

GENERATION = "0" * 16
MODULES = ("simm.connectors", "simm.host.threads", "threading", "concurrent")


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with FakeClient(deadline_s=WAIT_S) as made:
        yield made


@pytest.fixture
def engine(client: FakeClient) -> Iterator[Engine]:
    made = Engine(client)
    yield made
    assert ended(made.close)


def test_issue_an_interrupted_idle_step_holds_up_no_load(engine: Engine) -> None:
    side = engine.worker
    side.begin(Plan(idle=True))

    def check() -> None:
        assert ended(lambda: side._release(Store([]), ended=True)), "as the thread of a save calls it"
        assert ended(lambda: side.wait_saved(0.0))

    assert everywhere(side.finished, check, MODULES) > 5


def test_issue_an_interrupted_load_holds_up_no_step(client: FakeClient) -> None:
    """Nor does the wait for its layers."""
    made = Engine(client, layerwise=True)
    side, numbers = made.worker, itertools.count()

    def load() -> None:
        side.begin(Plan())
        side.load(Plan([Load(str(next(numbers)), GENERATION, [Block(0, 1, bytes(32))])]))
        for name in FULL.layers:
            side.wait_layer(name)

    def check() -> None:
        assert ended(side.end), "it hangs"
        assert not side._loading

    load()
    check()
    assert everywhere(load, check, MODULES) > 10
    assert ended(made.close)


@pytest.mark.parametrize("call", ["begin", "begin anew", "end"])
def test_issue_an_interrupted_step_holds_up_no_other_and_costs_no_rows(engine: Engine, call: str) -> None:
    """Nor does it give a row of the staging memory to two blocks."""
    side = engine.worker
    rows = sorted(side._free)
    plan = Plan(saves={GENERATION: [Block(0, 1, bytes(32))]})

    def begin() -> None:
        side._open = side._broken = False  # it stores on, although a step has failed
        side.begin(plan)
        assert len(side._saves) == 1
        for name in FULL.layers:
            side.save_layer(name)

    def check() -> None:
        assert ended(lambda: side.begin(Plan())), "it hangs"
        assert side.wait_saved(WAIT_S)
        assert sorted(side._free) == rows, "each row once"
        begin()

    def step() -> None:
        side._open = side._broken = False
        side.begin(plan if call == "begin anew" else Plan())

    begin()
    assert everywhere(side.end if call == "end" else step, check, MODULES) > 5
    side.end()
    assert side.wait_saved(WAIT_S)


def test_issue_a_layer_whose_copy_was_interrupted_is_not_stored_as_it_was_before(
    client: FakeClient, engine: Engine
) -> None:
    """Even if the model goes on: its block is stored whole, or not at all."""
    side = engine.worker
    assert side._staging is not None
    staging = np.frombuffer((ctypes.c_char * side._staging.size).from_address(side._staging.address), np.uint8)
    for memory in engine.memory.values():
        memory[1] = 7
    stored = []

    def begin() -> None:
        side.begin(Plan(saves={GENERATION: [Block(0, 1, len(stored).to_bytes(32, "big"))]}))
        staging[:] = 0xEE

    def check() -> None:
        block = Block(0, 1, len(stored).to_bytes(32, "big"))
        for name in FULL.layers:
            side.save_layer(name)
        assert ended(side.end), "it hangs"
        assert side.wait_saved(WAIT_S)
        found = bytearray(side._values[0].size)
        digests = side._keyspace.digests(GENERATION, side._keys([block]))
        stored.append(client.exists_digests(digests) == [True])
        if stored[-1]:
            assert client.get_digests(digests, [sink_of(found)]) == [len(found)] and set(found) == {7}
        begin()

    begin()
    assert everywhere(lambda: side.save_layer(FULL.layers[0]), check, MODULES) > 5
    assert stored[-1], "the control: without an interrupt it is"
    side.end()


def test_issue_an_interrupted_look_at_an_answer_holds_up_no_lookup(engine: Engine) -> None:
    side = engine.scheduler
    requests: list[Any] = []

    def begin() -> None:
        number = str(len(requests))
        requests.append(SimpleNamespace(request_id=number, num_tokens=9, block_hashes=[bytes(32)] * 2))
        side.matched(requests[-1], 0)

    def check() -> None:
        def answered() -> None:
            wait_until(lambda: side.matched(requests[-1], 0) == (0, False), "it is answered")

        assert ended(answered), "it hangs"
        side.finished(requests[-1])
        begin()

    begin()
    assert everywhere(lambda: side.matched(requests[-1], 0), check, MODULES) > 5


@pytest.mark.parametrize("call", ["has_pending_work", "get_finished_jobs"])
def test_issue_an_interrupted_look_at_jobs_holds_up_none(client: FakeClient, call: str) -> None:
    rows = fake_vllm_tier.memory()
    numbers: list[int] = []
    with fake_vllm_tier.install() as module:
        tier = module.SimmTier(fake_vllm_tier.spec(), memoryview(rows), "SimmTier", client=client, threads=1)

        def store() -> None:
            numbers.append(len(numbers))
            tier.submit_store(Job(numbers[-1], [Key(bytes(32))], [0], False, Context("r")))

        def check() -> None:
            assert ended(store)
            wait_until(lambda: not tier._running, "the job ends")

        store()
        assert everywhere(getattr(tier, call), check, MODULES) > 1
        assert ended(tier.shutdown), "it hangs"


def test_issue_an_interrupted_job_holds_up_no_reset(client: FakeClient) -> None:
    rows = fake_vllm_tier.memory()
    number = itertools.count()
    with fake_vllm_tier.install() as module:
        tier = module.SimmTier(fake_vllm_tier.spec(), memoryview(rows), "SimmTier", client=client, threads=1)

        def check() -> None:
            wait_until(lambda: all(job.over() for job in tier._running), "those that run end")
            assert ended(tier.drain_jobs), "it hangs"
            tier.get_finished_jobs()
            assert not tier.has_pending_work()

        def store() -> None:
            tier.submit_store(Job(next(number), [Key(bytes(32))], [0], False, Context("r")))

        store()
        check()
        assert everywhere(store, check, MODULES) > 5
        assert ended(tier.shutdown), "it hangs"


def test_issue_an_interrupted_look_at_results_loses_none(client: FakeClient) -> None:
    rows = fake_vllm_tier.memory()
    number = itertools.count()
    results: list[Any] = []
    with fake_vllm_tier.install() as module:
        tier = module.SimmTier(
            fake_vllm_tier.spec(), memoryview(rows), "SimmTier", client=client, threads=1, enable_kv_events=True
        )  # fmt: skip

        def store() -> None:
            tier.submit_store(Job(next(number), [Key(bytes(32))], [0], False, Context("r")))
            tier.drain_jobs()

        def check() -> None:
            results.extend(tier.get_finished_jobs())
            assert len(results) == len(list(tier.take_events())) == 1
            results.clear()
            store()

        store()
        assert everywhere(lambda: results.extend(tier.get_finished_jobs()), check, MODULES) > 1
        assert ended(tier.shutdown), "it hangs"


def test_issue_an_interrupted_end_of_a_registrar_stops_no_thread(client: FakeClient) -> None:
    made: list[Registrar] = []

    def begin() -> None:
        asked: list[None] = []

        def not_yet() -> Iterable[Scheme]:
            asked.append(None)
            raise NotYet

        registrar = Registrar(client, Complaints(logging.getLogger("simm.connectors.test")))
        registrar.tell("a", not_yet)
        wait_until(lambda: asked, "it waits to ask again")
        made.append(registrar)

    def check() -> None:
        registrar = made.pop()
        assert ended(registrar.close), "it hangs"
        wait_until(lambda: registrar._thread is None and not registrar._lock.locked(), "its thread has ended")
        begin()

    begin()
    assert everywhere(lambda: made[-1].close(), check, MODULES) > 3
    made.pop().close()


def test_issue_an_interrupted_wait_for_a_registrar_leaves_its_thread_a_thread_that_runs() -> None:
    """Before Python 3.13 an interrupt of ``join`` makes a thread count as ended, and a second one is started."""
    arrived, go = threading.Event(), threading.Event()

    def waits() -> Iterable[Scheme]:
        arrived.set()
        assert go.wait(WAIT_S)
        return ()

    with FakeClient(deadline_s=0.01) as client:
        registrar = Registrar(client, Complaints(logging.getLogger("simm.connectors.test")))
        registrar._thread = threading.Thread()  # as an interrupted start leaves it
        assert registrar.settled(0.0)
        registrar.tell("a", waits)
        assert arrived.wait(WAIT_S)
        thread = registrar._thread

        def check() -> None:
            assert registrar._thread is thread and thread.is_alive()

        try:
            assert everywhere(lambda: registrar.settled(0.01), check, MODULES) > 3
            assert not registrar.settled(0.0)
        finally:
            go.set()
        assert registrar.settled(WAIT_S)
        registrar.close()
