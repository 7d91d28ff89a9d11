"""F30 at the connector for vLLM: whatever a call of SiMM's client does, vLLM gets misses, and computes the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from simm.client import Client
from simm.connectors.vllm_plan import Block, Load, Plan
from simm.testing import FakeClient, FakeStore
from tests.support.dose import dose
from tests.support.faulty_client import FAULTS, Faulty
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


def patient(store: FakeStore) -> FakeClient:
    return FakeClient(store=store, deadline_s=PATIENT_S)


def outputs(client: Any, armed: Callable[[], None], form: dict[str, Any]) -> bool:
    """Run the prompts; return whether all are as without a cache."""
    engine = Engine(client, **form)
    try:
        armed()
        outputs = [engine.run(prompt) == engine.expected(engine.whole(prompt)) for prompt in PROMPTS]
        return all(outputs)
    finally:
        engine.close()


@pytest.mark.fault("F30", ci="each call of the client", whole="each call of the client")
@pytest.mark.parametrize(
    ("form", "how"),
    dose([(form, how) for form in FORMS for how in (FAULTS if form is not FORMS[2] else FAULTS[:1])], quick=3),
    ids=lambda each: each if isinstance(each, str) else IDS[FORMS.index(each)],
)
def test_each_call_may_fail(form: dict[str, Any], how: str) -> None:
    """The output is that of a run without a cache, also of the engine that comes next."""
    for at in range(80):
        store = FakeStore()
        client = Faulty(store, how, at)
        client.deadline_s = PATIENT_S
        assert outputs(client, lambda client=client: setattr(client, "armed", True), form), (at, how)
        assert outputs(patient(store), lambda: None, form), f"what the fault has left: {at}"
        if not client.hit:
            break
    assert 10 < at < 79, "each call has failed once"
    assert len(store) > 6, "the control: values were stored"


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
