"""Both halves of SiMM's connector for vLLM in an engine without vLLM. tests/engines runs it in the released engine."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.connectors import vllm_worker
from simm.connectors.keyspace import Keyspace, replace
from simm.connectors.vllm_plan import Block, Group, Load, Plan, Report
from simm.connectors.vllm_scheduler import SchedulerSide
from simm.connectors.vllm_worker import WorkerSide
from simm.schemes.vllm import merged
from simm.sdk.ops.pins import Pins
from simm.testing import FakeClient, FakeStore
from tests.support.scarce_threads import Gate
from tests.support.toy_vllm import FULL, NEW_TOKENS, WINDOWED, Engine
from tests.support.waiting import WAIT_S, wait_until

#: 37 tokens: nine blocks of 4, four of 8.
PROMPT = list(range(100, 137))
#: As long as whole blocks, and with the same head.
OTHER = PROMPT[:24] + list(range(200, 216))
BOTH = (FULL, WINDOWED)
FORMS: list[Any] = [
    pytest.param({}, id="between the steps"), pytest.param({"layerwise": True}, id="layer by layer"),
    pytest.param({"groups": BOTH}, id="two groups"),
]  # fmt: skip


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def engine(store: FakeStore) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(groups: Any = (FULL,), client: Any = None, **options: Any) -> Engine:
        # A lookup of a busy machine is not late.
        made.append(Engine(client or FakeClient(store=store, deadline_s=WAIT_S), groups, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def right(one: Engine, prompt: list[int]) -> bool:
    """Run a prompt; return whether it is as without a cache."""
    return one.run(prompt) == one.expected(one.whole(prompt))


# -- blocks go in and come back ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_the_next_engine_finds_what_one_has_computed(engine: Any, store: FakeStore, form: dict[str, Any]) -> None:
    one, other = engine(**form), engine(**form)
    assert right(one, PROMPT) and one.external == [0]
    assert right(other, PROMPT) and right(other, OTHER) and other.external == [32 if "groups" in form else 36, 24]
    counts = other.worker.take_counts()
    loaded = 8 + 6 + 1 + 1 if "groups" in form else 9 + 6  # of a window one each
    assert counts["blocks_loaded"] == loaded and counts["bytes_loaded"] > 0 and "blocks_failed" not in counts
    assert one.worker.take_counts()["blocks_stored"] == 10 + 5 * ("groups" in form)


@pytest.mark.parametrize("checksum", [False, True])
def test_issue_a_client_with_checksums_reads_all_layers_together(
    engine: Any, store: FakeStore, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a layer fetched or checked the whole value, and loads of many layers were given up as too slow."""
    made = [FakeClient(store=store, deadline_s=WAIT_S, checksum=checksum) for _ in range(2)]
    one, other = (engine(client=client, layerwise=True) for client in made)
    assert right(one, PROMPT)
    reads: list[int] = []
    real = Pins.read_wants

    def counted(pins: Pins, wants: Any) -> Any:
        reads.append(len(wants))
        return real(pins, wants)

    monkeypatch.setattr(Pins, "read_wants", counted)
    assert right(other, PROMPT) and other.external == [36]
    assert reads == [9] if checksum else reads == [9] * len(FULL.layers)
    loses(other, store)
    assert right(other, OTHER), "what is lost is computed"


def test_blocks_that_decoding_fills_are_stored(engine: Any) -> None:
    one, other = engine(), engine()
    one.run(PROMPT)
    assert right(other, one.whole(PROMPT)) and other.external == [40], "37 tokens, and those that followed"


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_makes_old_blocks_a_miss_for_all(engine: Any, form: dict[str, Any]) -> None:
    one, other = engine(**form), engine(**form)
    assert right(one, PROMPT) and right(other, PROMPT) and other.external[0] > 0
    other.scheduler.reset()
    assert right(one, PROMPT) and one.external == [0, 0]
    assert right(other, PROMPT) and other.external[1] > 0, "what was stored after it"


def test_what_runs_at_a_reset_is_stored_before_it(engine: Any, store: FakeStore) -> None:
    """A request keeps the generation that it began with: its blocks are of the old weights."""
    one, other = engine(), engine()
    plan, reset = one.scheduler.plan, []

    def with_reset(output: Any) -> Plan:
        if output.num_scheduled_tokens and not reset:
            reset.append(True)
            one.scheduler.reset()
            wait_until(lambda: one.scheduler._generation, "the new generation")
        made: Plan = plan(output)
        return made

    one.scheduler.plan = with_reset
    one.run(PROMPT)
    assert reset == [True] and len(store) > 9
    assert right(other, PROMPT) and other.external == [0]


@pytest.mark.parametrize("form", FORMS)
def test_requests_whose_loads_failed_are_forgotten(engine: Any, form: dict[str, Any]) -> None:
    one, other = engine(**form), engine(**form)
    one.run(PROMPT)

    def fails(*_: Any) -> Any:
        raise OSError("injected")

    other.worker._client.get_digests = other.worker._client.pin = fails
    assert right(other, PROMPT) and other.external[0] > 0 and other.worker.take_counts()["blocks_failed"] > 0
    assert not other.worker._failed


def test_after_a_reset_that_fails_nothing_is_read_until_one_does_not(engine: Any) -> None:
    """vLLM's engine would end if it were told of the failure."""
    one, other = engine(), engine()
    one.run(PROMPT)

    def fails() -> bool:
        raise OSError("injected")

    flush, one.scheduler._keyspace.flush = one.scheduler._keyspace.flush, fails
    one.scheduler.reset()
    assert right(one, PROMPT) and right(other, PROMPT) and (one.external, other.external) == ([0, 0], [36])
    one.scheduler._keyspace.flush = flush
    one.scheduler.reset()
    assert right(one, PROMPT) and right(one, PROMPT) and one.external[2:] == [0, 36]


def test_a_load_that_a_reset_overtakes_is_none(engine: Any) -> None:
    one = engine()
    one.run(PROMPT)
    allocated = one.scheduler.allocated

    def late(request: Any, blocks: Any, external: int) -> None:
        one.scheduler._resets += external > 0
        allocated(request, blocks, external)

    one.scheduler.allocated = late
    assert right(one, PROMPT) and one.external[1] == 36, "it was found, and computed"
    assert one.worker.take_counts()["blocks_failed"] == 9


# -- what does not come back ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("victims", [(0,), (3,), (2, 5), tuple(range(9))], ids=str)
def test_blocks_that_go_before_their_load_are_computed(
    engine: Any, store: FakeStore, form: dict[str, Any], victims: tuple[int, ...]
) -> None:
    one, other = engine(**form), engine(**form)
    one.run(PROMPT)
    side = other.worker
    for name in ("_load", "_load_layers"):
        original = getattr(side, name)

        def late(load: Load, layers: Any, original: Any = original) -> None:
            keys = side._keyspace.digests(load.generation, side._keys(load.blocks))
            side._client.delete_digests([keys[at] for at in victims if at < len(keys)])
            original(load, layers)

        setattr(side, name, late)
    assert right(other, PROMPT)
    assert other.worker.take_counts()["blocks_failed"] >= min(len(victims), 8)
    assert right(engine(**form), PROMPT), "and nothing wrong was stored"


def loses(one: Engine, store: FakeStore) -> None:
    """Delete two blocks of the next load when it begins."""
    side, original = one.worker, one.worker._load_layers

    def late(load: Load, layers: Any) -> None:
        side._client.delete_digests(side._keyspace.digests(load.generation or "", side._keys(load.blocks[6:])))
        original(load, layers)

    side._load_layers = late  # type: ignore[method-assign]


@pytest.mark.parametrize("careless", [False, True], ids=["", "control"])
def test_nothing_is_stored_of_a_step_whose_load_failed(
    engine: Any, store: FakeStore, careless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the control: without the check, what was computed on missing blocks is stored, and read by others."""
    one, other, third = (engine(layerwise=True) for _ in range(3))
    one.run(PROMPT[:33])
    if careless:
        monkeypatch.setattr(WorkerSide, "_step_failed", property(lambda _: False, lambda *_: None), raising=False)
    loses(other, store)
    assert right(other, PROMPT) and other.external == [32]
    monkeypatch.undo()
    assert right(third, PROMPT) is not careless


def test_nothing_is_stored_until_the_scheduler_knows_of_the_failure(engine: Any) -> None:
    one = engine(layerwise=True)
    one.run(PROMPT)
    one.worker._failures = 3
    blocks = [Block(0, 1, b"x" * 32)]
    for known, staged in ((2, 0), (3, 1)):
        one.worker.begin(Plan(saves={"g": blocks}, failures=known))
        assert len(one.worker._saves) == staged
        one.worker.end()
    one.worker._step_failed = True
    one.worker.end()
    one.scheduler.heard(one.worker.take_report())
    assert one.scheduler.plan(one.output()).failures == 4


def test_layers_that_vllm_does_not_wait_for_end_in_no_store(engine: Any, store: FakeStore) -> None:
    one, other = engine(layerwise=True), engine(layerwise=True)
    one.run(PROMPT[:33])
    other.worker.wait_layer = lambda name: None
    before = len(store)
    other.run(PROMPT)
    assert len(store) <= before + 2, "what was computed after that step alone"
    assert right(engine(), PROMPT)


def test_values_of_another_size_are_dropped(engine: Any, store: FakeStore) -> None:
    one, other, third = engine(), engine(), engine()
    one.run(PROMPT)
    client = FakeClient(store=store)
    mine = [digest for digest, entry in store._entries.items() if len(entry.value) > 8]
    values = [memoryview(b"v" * size) for size in (7, 4000, 192 + 1)]
    replace(client, mine[:3], values)
    assert right(other, PROMPT) and right(third, PROMPT)
    assert third.worker.take_counts().get("blocks_failed", 0) == 0, "they were stored again"


def test_control_a_value_that_was_stored_wrong_is_seen(engine: Any, store: FakeStore) -> None:
    one, other = engine(), engine()
    one.run(PROMPT)
    for entry in store._entries.values():
        if len(entry.value) > 8:
            entry.value = bytes(each ^ 1 for each in entry.value)
    assert not right(other, PROMPT) and other.external == [36]


def test_a_late_lookup_is_a_miss(engine: Any, store: FakeStore) -> None:
    go: list[bool] = []

    def slow(operation: str, _: int) -> None:
        if operation == "exists":
            wait_until(lambda: go, "what is late may end")

    one, other = engine(), engine(client=FakeClient(store=store, deadline_s=0.05))
    begin = other.begin

    def begun(*given: Any) -> tuple[int, bool]:
        found: tuple[int, bool] = begin(*given)
        go.append(True)
        return found

    other.begin = begun
    one.run(PROMPT)
    store.latency = slow
    assert right(other, PROMPT) and other.external == [0]
    assert other.scheduler.take_counts() == {"lookups": 1, "lookups_late": 1}


def test_an_idle_step_leaves_the_interpreter_to_its_loads(
    engine: Any, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for one. An engine that asks again at once kept the interpreter from the threads that load."""
    monkeypatch.setattr(vllm_worker, "IDLE_S", WAIT_S)
    one, other = engine(), engine()
    one.run(PROMPT)
    go = threading.Event()
    begin, finished = other.begin, other.worker.finished
    answers: list[tuple[set[str], set[str]]] = []

    def begun(*given: Any) -> tuple[int, bool]:
        found: tuple[int, bool] = begin(*given)
        store.latency = lambda operation, _: go.wait(WAIT_S)
        return found

    def asked() -> tuple[set[str], set[str]]:
        threading.Timer(0.2, go.set).start()  # the load ends while the step waits
        answers.append(finished())
        return answers[-1]

    other.begin, other.worker.finished = begun, asked
    assert right(other, PROMPT) and other.external == [36]
    assert answers == [({"request-1"}, set())]


# -- steps that fail ------------------------------------------------------------------------------------------


class Steps:
    """A rank in vLLM's hands: it ends a step in a ``finally``, whether the model has raised or not."""

    def __init__(self, one: Engine) -> None:
        self.side, self.client = one.worker, one.worker._client
        self.generation = self.side._keyspace.generation() or ""
        self.rows = sorted(self.side._free)

    def run(self, number: int, error: BaseException | None = None) -> bool:
        """Run a step in which the model computes one layer, and then raises; return whether its block is stored."""
        block = Block(0, number, bytes([number] * 32))
        self.side.begin(Plan(saves={self.generation: [block]}))
        with contextlib.suppress(*((type(error),) if error is not None else ())):
            try:
                self.side.save_layer(FULL.layers[0])
                if error is not None:
                    raise error
            finally:
                self.side.end()
        assert self.side.wait_saved(WAIT_S) and sorted(self.side._free) == self.rows
        return self.client.exists_digests(self.side._keyspace.digests(self.generation, self.side._keys([block]))) == [1]


@pytest.mark.parametrize("error", [ValueError("of the model"), SystemExit(), KeyboardInterrupt()], ids=repr)
def test_issue_a_step_that_fails_is_not_stored(engine: Any, error: BaseException) -> None:
    """Nor is any after it: vLLM takes its blocks for computed, and may compute further ones on them."""
    steps = Steps(engine())
    assert steps.run(1), "the control"
    assert not steps.run(2, error)
    assert not steps.run(3)


def test_issue_a_step_that_does_not_end_is_not_stored(engine: Any) -> None:
    one = engine()
    steps = Steps(one)
    assert steps.run(1), "the control"
    one.worker.begin(Plan())
    assert not steps.run(2)


def test_what_vllms_callers_handle_stops_no_store(engine: Any) -> None:
    steps = Steps(engine())
    try:
        raise ValueError("of something else")
    except ValueError:
        assert steps.run(1)
        assert not steps.run(2, RuntimeError("of the model"))


# -- staging ----------------------------------------------------------------------------------------------


def test_blocks_without_room_in_the_staging_memory_are_not_stored(engine: Any, store: FakeStore) -> None:
    one = engine(staging_bytes=1)
    end = one.worker.end

    def ended() -> None:
        """The thread that stores has its turn before the next step."""
        end()
        assert one.worker.wait_saved(WAIT_S)

    one.worker.end = ended
    assert right(one, PROMPT)
    counts = one.worker.take_counts()
    assert counts["blocks_dropped"] == 8 and counts["blocks_stored"] == 1 + (len(PROMPT) + NEW_TOKENS) // 4 - 9
    assert one.worker._free == [0], "the room is free again"


def test_a_put_that_hangs_holds_up_no_step(engine: Any, store: FakeStore) -> None:
    one, other = engine(), engine()
    go: list[bool] = []

    def stuck(operation: str, _: int) -> None:
        if operation == "put":
            wait_until(lambda: go, "the end of the outage")

    for each in (one, other):  # else the generation is among the puts that hang
        wait_until(lambda scheduler=each.scheduler: scheduler._generation, "a generation")  # type: ignore[misc]
    store.latency = stuck
    one.worker.wait_saved = lambda timeout_s: True
    assert right(one, PROMPT) and len(store) == 1, "the generation alone"
    go.append(True)
    assert WorkerSide.wait_saved(one.worker, WAIT_S)
    assert right(other, PROMPT) and other.external == [36]


# -- ranks, events -----------------------------------------------------------------------------------------


def test_what_one_rank_has_not_stored_is_a_miss(engine: Any) -> None:
    one, other = engine(identity="rank 0"), engine(identity="rank 1")
    both = engine(identity="rank 0")
    both.scheduler.use(["rank 0", "rank 1"])
    one.run(PROMPT)
    assert right(both, PROMPT) and both.external == [0]
    other.run(PROMPT)
    assert right(both, PROMPT) and both.external == [0, 36]


def test_ranks_with_the_same_blocks_store_a_part_each(engine: Any, store: FakeStore) -> None:
    """As those of a model with latent attention."""
    ranks = [engine(share=(rank, 2)) for rank in range(2)]
    stored = []
    for each in ranks:
        each.scheduler.matched = lambda *_: (0, False)
        wait_until(lambda scheduler=each.scheduler: scheduler._generation, "a generation")  # type: ignore[misc]
        each.run(PROMPT)
        stored.append(each.worker.take_counts()["blocks_stored"])
    assert sum(stored) == 10 and min(stored) > 0
    whole = engine()
    assert right(whole, PROMPT) and whole.external == [36]


def test_events_name_what_all_ranks_have_stored_and_what_is_gone(engine: Any, store: FakeStore) -> None:
    one = engine(events=True)
    one.scheduler.use(["rank", "other"])
    one.scheduler.matched = lambda *_: (0, False)
    wait_until(lambda: one.scheduler._generation, "a generation")
    one.run(PROMPT)
    report = one.worker.take_report() or Report()
    one.scheduler.heard(report)
    assert one.scheduler.take_events() == ([], [])
    one.scheduler.heard(Report(stored=[(0, each.hash) for each in expected(one)]))
    stored, gone = one.scheduler.take_events()
    assert [each.tokens for each in stored] == [one.whole(PROMPT)[at : at + 4] for at in range(0, 40, 4)]
    assert [each.parent for each in stored] == [None, *(each.hash for each in stored[:-1])]
    assert not gone and one.scheduler.take_events() == ([], [])
    one.scheduler.heard(Report(gone=[(0, stored[0].hash)]))
    assert one.scheduler.take_events() == ([], [(0, stored[0].hash)])


def expected(one: Engine) -> list[Any]:
    return [each[0] for each in (one.scheduler._expected or {}).values()]


# -- the scheduler never waits -------------------------------------------------------------------------------


def test_the_scheduler_is_told_to_ask_later_and_waits_for_nothing(engine: Any, store: FakeStore) -> None:
    go: list[bool] = []
    store.latency = lambda operation, keys: wait_until(lambda: go, "the answer")
    one = engine()
    request = SimpleNamespace(
        request_id="r", num_tokens=len(PROMPT), block_hashes=[bytes(32)] * 9, all_token_ids=PROMPT, lora_request=None
    )
    assert one.scheduler.matched(request, 0) == (None, False)
    assert one.scheduler.matched(request, 0) == (None, False)
    go.append(True)
    wait_until(lambda: one.scheduler.matched(request, 0) == (0, False), "a miss")
    assert one.scheduler.take_counts()["lookups"] == 1


@pytest.mark.parametrize("how", ["late", "finished", "allocated", "begun anew", "reset"])
def test_issue_lookups_that_nobody_waits_for_are_not_made(store: FakeStore, how: str) -> None:
    """Those of a time in which a server was slow stayed queued for ever, and each later lookup came after them."""
    client = FakeClient(store=store, deadline_s=WAIT_S)
    side = SchedulerSide(client, Keyspace(client, "toy"), [FULL], FULL.block_tokens, FULL.block_tokens)
    side.identities = ["rank"]
    assert side._keyspace.generation()
    store.latency = gate = Gate("simm-vllm-lookup")

    def request(number: str) -> Any:
        return SimpleNamespace(request_id=number, num_tokens=9, block_hashes=[bytes(32)] * 2)

    try:
        asked = [request(str(number)) for number in range(50)]
        for each in asked:
            side.matched(each, 0)
        assert gate.reached()
        assert len(side._calls) <= 2, "what is queued is bounded"
        for each in asked:
            if how == "late":
                lookup = side._requests[each.request_id].lookup
                assert lookup is not None
                lookup.until = 0.0
                assert side.matched(each, 0) == (0, False)
            elif how == "finished":
                side.finished(each)
            elif how == "allocated":
                side.allocated(each, [[]], 0)
            elif how == "begun anew":
                side.added(request(each.request_id))
        if how == "reset":
            side.reset()
        assert not side._waiting
        last = request("last")
        assert side.matched(last, 0) == (None, False)
        gate.open()
        wait_until(lambda: side.matched(last, 0) == (0, False), "it is answered")
    finally:
        gate.open()
        side.close()
    assert gate.operations.count("exists") <= 3, "of those that had begun, and of the last one"


def test_a_lookup_that_fails_is_a_miss_each_time(engine: Any) -> None:
    one = engine()
    request = SimpleNamespace(request_id="r", num_tokens=9, block_hashes=[bytes(32)] * 2)

    def fails(_: Any) -> Any:
        raise OSError("injected")

    one.scheduler._look = fails
    wait_until(lambda: one.scheduler.matched(request, 0) == (0, False), "a miss")
    assert one.scheduler.matched(request, 0) == (0, False)
    assert one.scheduler.take_counts() == {"lookups": 1}


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_said_to_be_here_if_their_values_are(
    engine: Any, store: FakeStore, form: dict[str, Any], path: str
) -> None:
    """And nothing is said of a request that is not known, or of one for which nothing was found."""
    assert right(engine(**form), PROMPT)
    one = engine(client=FakeClient(store=store, deadline_s=WAIT_S, path=path), **form)
    said: list[tuple[int, int]] = []
    allocated = one.scheduler.allocated

    def note(request: Any, block_ids: Any, external: int) -> None:
        allocated(request, block_ids, external)
        said.append((external, one.scheduler.found_here(request, external)))

    one.scheduler.allocated = note
    assert right(one, PROMPT)
    ((external, here),) = said
    assert external >= 32 and here == (external if path == "shm" else 0)
    assert one.scheduler.found_here(SimpleNamespace(request_id="unknown"), 8) == 0


def test_short_prompts_ask_nothing(engine: Any) -> None:
    one = engine()
    assert right(one, PROMPT[:4]) and "lookups" not in one.scheduler.take_counts()
    assert right(one, PROMPT[:5]) and one.scheduler.take_counts()["lookups"] == 1


def test_issue_a_lookup_that_was_answered_is_looked_for_among_none(engine: Any) -> None:
    """Each request that was scheduled, or ended, was compared with all lookups that waited."""

    class Waiting(deque[Any]):
        searched = 0

        def remove(self, value: Any) -> None:
            self.searched += 1
            super().remove(value)

    side = engine().scheduler
    side._waiting = waiting = Waiting()
    request = SimpleNamespace(request_id="r", num_tokens=9, block_hashes=[bytes(32)] * 2)
    wait_until(lambda: side.matched(request, 0) == (0, False), "a miss")
    side.allocated(request, [[]], 0)
    side.finished(request)
    assert waiting.searched == 0


def test_issue_a_lookup_that_failed_is_a_miss_from_then_on(engine: Any) -> None:
    """The exception was raised at each step, and held more frames each time."""
    side = engine().scheduler
    told: list[BaseException] = []

    def failing(_: Any) -> Any:
        raise ValueError("of the store")

    def complain(kind: str, text: str, *arguments: Any, trace: bool = False) -> None:
        told.append(sys.exc_info()[1])  # type: ignore[arg-type]

    side._look, side._complain = failing, complain
    request = SimpleNamespace(request_id="r", num_tokens=9, block_hashes=[bytes(32)] * 2)
    wait_until(lambda: side.matched(request, 0) == (0, False), "a miss")
    assert side.matched(request, 0) == (0, False) and len(told) == 1
    assert side._requests["r"].lookup.error is None


def test_what_ends_early_leaves_nothing_behind(engine: Any) -> None:
    one = engine()
    one.run(PROMPT)
    assert not one.scheduler._requests and len(one.worker._free) == (1 << 16) // one.worker._row_bytes
    one.close()
    load = Load("r", "g", [Block(0, 1, bytes(32))])
    one.worker.begin(Plan([load], {"g": [Block(0, 1, bytes(32))]}))
    one.worker.load(Plan([load]))
    one.worker.end()
    assert one.worker.finished() == ({"r"}, {"r"}) and one.worker.bad_blocks() == {1}
    assert one.scheduler.matched(SimpleNamespace(request_id="x", num_tokens=9, block_hashes=[bytes(32)] * 2), 0) == (
        0, False,
    )  # fmt: skip
    assert one.worker.wait_saved(0) and not one.worker._saves


@pytest.mark.parametrize("seed", range(5))
def test_hashes_are_those_of_the_request_as_it_is(engine: Any, seed: int) -> None:
    """Which grows, and of which a session's next prompt takes the end away, or puts another one in its place."""
    dice = random.Random(seed)
    side = engine((Group(("full.0",), 4), Group(("window.0",), 8), Group(("other.0",), 12))).scheduler
    request = SimpleNamespace(request_id="r", block_hashes=[])
    tracked, own = side._track(request), request.block_hashes
    for _ in range(300):
        if dice.random() < 0.2:
            del own[dice.randrange(len(own) + 1) :]
        own += [dice.randbytes(32) for _ in range(dice.randrange(4))]
        if dice.random() < 0.7:  # else it changes once more before anybody looks
            for at, factor in enumerate((1, 2, 3)):
                assert side._hashes(tracked, at) == merged(own, factor)


def test_issue_a_block_that_fills_costs_nothing_by_the_length_of_the_prompt(engine: Any) -> None:
    """All hashes of a request were made anew, in vLLM's scheduler."""
    made: list[int] = []

    class Hash(bytes):
        def __bytes__(self) -> bytes:
            made.append(1)
            return bytes.__getitem__(self, slice(None))

    side = engine().scheduler
    request = SimpleNamespace(request_id="r", block_hashes=[])
    tracked = side._track(request)
    for number in range(1000):
        request.block_hashes.append(Hash(number.to_bytes(32, "big")))
        assert len(side._hashes(tracked, 0)) == number + 1
    assert len(made) == 1000


def test_groups_of_different_blocks(engine: Any) -> None:
    """A block of 8 tokens has the hash of its second half; a prefix ends where both groups have a block."""
    groups = (Group(("full.0",), 4), Group(("window.0",), 8))
    one, other = engine(groups), engine(groups)
    assert right(one, PROMPT) and right(other, PROMPT) and other.external == [32]
