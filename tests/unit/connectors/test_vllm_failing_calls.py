"""F30 at the connector for vLLM: whatever a call of SiMM's client does, vLLM gets misses, and computes the rest."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.client import Client, source_of
from simm.connectors.vllm_plan import Block, Load, Plan
from simm.connectors.vllm_scheduler import SchedulerSide
from simm.connectors.vllm_worker import WorkerSide
from simm.schemes.vllm import block_hashes
from simm.testing import FakeClient, FakeStore
from tests.support import fake_vllm, fault_sites
from tests.support.dose import dose
from tests.support.fake_vllm import Role, World
from tests.support.faulty_client import EVERY, FAULTS, NONE, Faulty
from tests.support.pace import Pace
from tests.support.silent_servers import Silent
from tests.support.toy_vllm import FULL, WINDOWED, Engine

HEAD = list(range(100, 117))
#: The first ones fill the store.
PROMPTS = [HEAD, HEAD + list(range(300, 310)), HEAD[:9]]
FORMS: list[dict[str, Any]] = [{}, {"layerwise": True}, {"groups": (FULL, WINDOWED)}]
IDS = ["between the steps", "layer by layer", "two groups"]
#: For lookups: on a busy machine these threads are late.
PATIENT_S = 120.0
SILENT_DEADLINE_S = 0.3
PLANNED = [Block(0, at + 1, bytes([at] * 32)) for at in range(4)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the log: of thousands of failures, each with its trace, it takes most of the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def patient(store: FakeStore) -> FakeClient:
    return FakeClient(store=store, deadline_s=PATIENT_S)


def outputs(client: Any, armed: Callable[[], None], form: dict[str, Any]) -> bool:
    """Run the prompts, one over a value of another size, and one after a reset; return if all are as without a cache.

    A client that is armed is so from the engine's beginning.
    """
    armed()
    engine = Engine(client, **form)
    try:
        outputs = [engine.run(prompt) == engine.expected(engine.whole(prompt)) for prompt in PROMPTS]
        shorten(engine, client.store, block_hashes(HEAD, FULL.block_tokens)[1])
        outputs.append(engine.run(HEAD) == engine.expected(engine.whole(HEAD)))
        engine.scheduler.reset()
        outputs.append(engine.run(HEAD) == engine.expected(engine.whole(HEAD)))
        return all(outputs)
    finally:
        engine.close()


def shorten(engine: Engine, store: FakeStore, block: bytes) -> None:
    """Put a shorter value in place of a block's, if it is stored."""
    with FakeClient(store=store) as other:
        generation = engine.scheduler._generation
        if generation is not None:
            digests = engine.scheduler._keyspace.digests(generation, engine.worker._keys([Block(0, 0, block)]))
            if other.delete_digests(digests) == [0]:
                assert other.put_digests(digests, [source_of(b"short")]) == [0]


@pytest.mark.fault("F30", ci="each call of the client", whole="each call of the client")
@pytest.mark.parametrize(
    ("form", "how"),
    dose([(form, how) for form in FORMS for how in (FAULTS if form is not FORMS[2] else FAULTS[:1])], quick=3),
    ids=lambda each: each if isinstance(each, str) else IDS[FORMS.index(each)],
)
def test_each_call_may_fail(form: dict[str, Any], how: str) -> None:
    """The output is that of a run without a cache, also of the engine that comes next."""
    for at in itertools.count():
        store = FakeStore()
        client = Faulty(store, how, at)
        client.deadline_s = PATIENT_S
        assert outputs(client, lambda client=client: setattr(client, "armed", True), form), (at, how)
        assert outputs(patient(store), lambda: None, form), f"what the fault has left: {at}"
        if not client.hit:
            break
    assert at > 20, "each call has failed once"
    assert len(store) > 6, "the control: values were stored"


def test_these_are_all_calls() -> None:
    """vLLM's calls of both halves, and their calls of the client: one that is added is missing here."""
    reached = set()
    with fault_sites.watched(SchedulerSide) as asked, fault_sites.watched(WorkerSide) as worked:
        for form, replicas in zip(FORMS, (1, 2, 1)):
            store = FakeStore()
            client = Faulty(store, "late", NONE, replicas=replicas)
            client.deadline_s = PATIENT_S
            assert outputs(client, lambda client=client: setattr(client, "armed", True), form)
            reached |= client.reached
    assert fault_sites.unreached(fault_sites.sites("vllm_scheduler", "vllm_worker", "keyspace"), reached) == []
    # What these do touches no client: what happened is told, and a request is forgotten.
    assert fault_sites.methods(SchedulerSide) - asked <= {"running", "take_counts", "take_events"}
    assert fault_sites.methods(WorkerSide) - worked <= {"take_counts"}


def nothing_scheduled() -> Any:
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={})


@pytest.mark.parametrize("how", ["raises", "breaks", "outage"])
def test_no_method_of_the_connector_raises(how: str) -> None:
    """vLLM calls each that there is, of a scheduler's connector and of a worker's, and each call of a client fails."""
    world, store = World(), FakeStore()
    with fake_vllm.install(world) as module, fault_sites.watched(module.SimmConnector) as called:
        made = []
        for role in (Role.WORKER, Role.SCHEDULER):
            client = Faulty(store, how, EVERY)
            client.armed = True
            one = module.SimmConnector(world.config(), role, world.cache(), client=client)
            one._owns = True
            made.append((one, client))
        (worker, of_worker), (scheduler, of_scheduler) = made
        worker.register_kv_caches(world.tensors())
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        request: Any = SimpleNamespace(
            request_id="r", num_tokens=17, block_hashes=[bytes([at] * 32) for at in range(4)], all_token_ids=[0] * 17,
        )  # fmt: skip
        scheduler.on_new_request(request)
        until = time.monotonic() + PATIENT_S
        while (found := scheduler.get_num_new_matched_tokens(request, 0))[0] is None and time.monotonic() < until:
            time.sleep(0.001)
        assert found == (0, False)
        assert scheduler.get_external_cache_hit_sources(request, 4) == {"external": 4}
        scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],)), 0)
        scheduler.build_connector_meta(nothing_scheduled())
        worker.bind_connector_metadata(module._Metadata(Plan([Load("r", "0" * 16, PLANNED)], {"0" * 16: PLANNED})))
        worker.start_load_kv(None)
        for layer in ("0.0", "0.1"):
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, None, None)
        worker.wait_for_save()
        while not worker._worker._loaded and time.monotonic() < until:
            time.sleep(0.001)
        assert worker.get_finished(set())[1] == {"r"}
        assert worker.get_block_ids_with_load_errors() == {each.number for each in PLANNED}
        told = worker.build_connector_worker_meta()
        scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=told, invalid_block_ids={1}))
        assert worker.get_kv_connector_stats() and scheduler.reset_cache() is True
        assert list(scheduler.take_events()) == []
        assert scheduler.request_finished_all_groups(request, ([],)) == (False, None)
        for one, client in made:
            one.shutdown()
            assert client.hit
        reached = of_worker.reached | of_scheduler.reached
        assert fault_sites.methods(module.SimmConnector) - called == set()
    assert fault_sites.unreached(fault_sites.sites("vllm_connector"), reached) == []


@pytest.mark.parametrize("how", ["raises", "misses"])
def test_each_read_of_a_layer_may_fail(how: str) -> None:
    """A layer of a block is missing: the block is computed, and all behind it."""
    for at in range(60):
        store = FakeStore()
        assert outputs(patient(store), lambda: None, {"layerwise": True})
        client = patient(store)
        left, pin, hit = [at], client.pin, []

        def pinned(
            keys: Any, left: list[int] = left, pin: Callable[..., Any] = pin, hit: list[int] = hit
        ) -> Any:  # fmt: skip
            pins = pin(keys)
            read = pins.read_wants

            def reads(wants: Any) -> Any:
                left[0] -= 1
                if left[0] != -1:
                    return read(wants)
                hit.append(1)
                if how == "raises":
                    raise OSError("a fault of the test")
                return [None, *read(wants)[1:]]

            pins.read_wants = reads  # type: ignore[method-assign]
            return pins

        client.pin = pinned  # type: ignore[method-assign]
        assert outputs(client, lambda: None, {"layerwise": True}), at
        assert outputs(patient(store), lambda: None, {"layerwise": True}), f"what the fault has left: {at}"
        if not hit:
            break
    assert 5 < at < 59, "each read has failed once"


def test_control_a_value_of_another_block_is_seen() -> None:
    class Mixed(FakeClient):
        def get_digests(self, digests: Any, sinks: Any) -> Any:
            return super().get_digests(list(reversed(digests)), sinks)

    store = FakeStore()
    assert outputs(patient(store), lambda: None, {})
    assert not outputs(Mixed(store=store, deadline_s=PATIENT_S), lambda: None, {})


# -- servers that never answer --------------------------------------------------------------------------------


def looks(engine: Engine) -> bool:
    """Ask for a prompt until there is an answer."""
    request: Any = type("Request", (), {})()
    request.request_id, request.num_tokens, request.block_hashes = "r", 17, [bytes([at] * 32) for at in range(4)]
    found, _ = engine.begin(request, [[1, 2, 3, 4, 5]])
    return found == 0


def loads(engine: Engine) -> bool:
    """Load blocks that a lookup has found, until vLLM is told what failed."""
    engine.worker.begin(Plan())
    engine.worker.load(Plan([Load("r", "0" * 16, PLANNED)]))
    engine.worker.end()
    until = time.monotonic() + PATIENT_S
    loaded: set[str] = set()
    while not engine.layerwise and "r" not in loaded:
        assert time.monotonic() < until
        loaded = engine.worker.finished()[0]
        time.sleep(0.001)
    return engine.worker.bad_blocks() == {each.number for each in PLANNED}


def saves(engine: Engine) -> bool:
    """End a step that stores blocks: it waits for no server."""
    plan = Plan(saves={"0" * 16: PLANNED})
    engine.worker.begin(plan)
    engine.worker.load(plan)
    engine.worker.end()
    return True


@pytest.mark.parametrize("layerwise", [False, True], ids=["between the steps", "layer by layer"])
@pytest.mark.parametrize(("call", "deadlines"), [(looks, 1.5), (loads, 1.5), (saves, 0.5)])
def test_servers_that_never_answer_cost_one_deadline(
    call: Callable[[Engine], bool], deadlines: float, layerwise: bool
) -> None:
    with Silent(3) as silent, Pace() as pace:
        with Client("{}:{}".format(*silent.manager.address), deadline_s=SILENT_DEADLINE_S, path="tcp") as client:
            engine = Engine(client, layerwise=layerwise)
            engine.scheduler._keyspace._known = time.time_ns()
            try:
                began = time.monotonic()
                assert call(engine)
                took = time.monotonic() - began
            finally:
                engine.close()
        pace.check(f"{call.__name__} at servers that never answer", took, deadlines * SILENT_DEADLINE_S)
