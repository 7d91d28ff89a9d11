"""Steps of vLLM that fail, or of which a call never comes: what is stored after them, and what becomes of loads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.connectors.keyspace import Keyspace
from simm.connectors.vllm_plan import Block, Load, Plan, Report
from simm.testing import FakeClient
from tests.support.toy_vllm import FULL, Engine
from tests.support.waiting import WAIT_S, wait_until


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with FakeClient(deadline_s=WAIT_S) as made:
        yield made


@pytest.fixture
def engine(client: FakeClient) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(client, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def block(number: int) -> Block:
    return Block(0, number, number.to_bytes(32, "big"))


class Rank:
    """A worker in the hands of vLLM's V1 runner."""

    def __init__(self, one: Engine) -> None:
        self.side = one.worker
        self.generation = self.side._keyspace.generation() or ""

    def run(self, plan: Plan, error: BaseException | None = None, *, ends: bool = True) -> set[str]:
        """Run a step, which may raise; return what it says of loads, if vLLM gets to hear it."""
        side = self.side
        side.begin(plan)
        if side._layerwise:
            side.load(plan)
        try:
            for name in FULL.layers:
                side.wait_layer(name)
                side.save_layer(name)
            if error is not None:
                raise error
        finally:
            if not side._layerwise:
                side.load(plan)
            if ends:
                side.end()
            loaded, _ = side.finished()
            side.bad_blocks()
            report = side.take_report()
        return loaded | (report.failed if report is not None else set())

    def saving(self, *numbers: int, **fields: Any) -> Plan:
        return Plan(saves={self.generation: [block(each) for each in numbers]}, **fields)

    def loading(self, *names: str, **fields: Any) -> Plan:
        """Return a plan with loads of what is not there."""
        return Plan([Load(each, self.generation, [block(40 + at)]) for at, each in enumerate(names)], **fields)

    def stored(self, number: int) -> bool:
        assert self.side.wait_saved(WAIT_S)
        digests = self.side._keyspace.digests(self.generation, self.side._keys([block(number)]))
        return self.side._client.exists_digests(digests) == [1]

    def told(self, names: set[str]) -> None:
        """Wait until the engine has heard of the end of these loads."""
        seen: set[str] = set()

        def all_told() -> bool:
            seen.update(self.run(Plan(idle=True)))
            return seen == names

        wait_until(all_told, "each load's end is told")


def test_issue_a_step_that_fails_before_it_begins_is_not_stored_nor_any_after_it(engine: Any) -> None:
    rank = Rank(engine())
    rank.run(rank.saving(1, number=1))
    assert rank.stored(1), "the control"
    rank.run(rank.saving(3, number=3))
    assert not rank.stored(3) and rank.side.take_report() is None
    rank.run(rank.saving(4, number=4))
    assert not rank.stored(4)


def test_issue_the_first_step_may_fail_before_it_begins(engine: Any) -> None:
    rank = Rank(engine())
    rank.run(rank.saving(2, number=2))
    assert not rank.stored(2)


def test_steps_that_do_nothing_may_be_left_out(engine: Any) -> None:
    """The scheduler numbers those whose loss loses something, and so do workers that begin some of the others."""
    one = engine()
    rank = Rank(one)
    request = SimpleNamespace(request_id="r", num_tokens=0, block_hashes=[], all_token_ids=[])
    busy, nothing = one.output(request, 0, 1, True, [[1]]), one.output()
    plans = [one.scheduler.plan(each) for each in (nothing, busy, nothing, nothing, busy, nothing)]
    assert [each.number for each in plans] == [0, 1, 1, 1, 2, 2]
    for at in (1, 3, 4):
        plans[at].saves = {rank.generation: [block(at + 1)]}
        rank.run(plans[at])
        assert rank.stored(at + 1)
    one.scheduler._due = [Load("r", None, [])]
    assert one.scheduler.plan(nothing).number == 3, "somebody waits for its load"


def test_issue_a_rank_that_stores_nothing_any_more_has_the_others_stop(engine: Any) -> None:
    """Those of a pipeline compute on what it has sent them."""
    one = engine()
    rank = Rank(one)
    with pytest.raises(ValueError):
        rank.run(rank.saving(1), ValueError("of the model"))
    rank.side.begin(Plan())
    rank.side.end()
    report = rank.side.take_report()
    assert report is not None and report.broken and rank.side.take_report() is None
    wait_until(lambda: one.scheduler._generation is not None, "the generation is known")
    prompt = SimpleNamespace(
        request_id="r", num_tokens=8, block_hashes=[b"a" * 32, b"b" * 32], all_token_ids=list(range(8)),
        lora_request=None,
    )  # fmt: skip
    one.scheduler.added(prompt)
    assert one.scheduler.plan(one.output(prompt, 0, 4, True, [[1, 2]])).saves, "the control"
    one.scheduler.heard(Report().add(report))
    assert not one.scheduler.plan(one.output(prompt, 4, 4, False, [[1, 2]])).saves


def test_issue_the_failure_of_a_step_whose_end_is_interrupted_is_not_lost(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``layerwise`` the step has computed on what was not loaded."""
    rank = Rank(engine(layerwise=True))

    def interrupted() -> None:
        raise KeyboardInterrupt

    plan = rank.loading("r", number=1)
    rank.side.begin(plan)
    rank.side.load(plan)
    for name in FULL.layers:
        rank.side.wait_layer(name)
    with monkeypatch.context() as patch:
        patch.setattr(rank.side, "_await_copies", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.side.end()
    rank.run(rank.saving(1, number=2))
    assert not rank.stored(1)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_issue_loads_behind_an_interrupt_end_too(
    engine: Any, monkeypatch: pytest.MonkeyPatch, which: int, layerwise: bool
) -> None:
    rank = Rank(engine(layerwise=layerwise))
    plan = rank.loading("first", "second", idle=True)
    hand_over, given = rank.side._loaders.hand_over, []

    def interrupted(*call: Any) -> Any:
        given.append(call)
        if len(given) > which:
            raise KeyboardInterrupt
        return hand_over(*call)

    rank.side.begin(plan)
    with monkeypatch.context() as patch:
        patch.setattr(rank.side._loaders, "hand_over", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.side.load(plan)
    rank.told({"first", "second"})


def test_issue_loads_that_a_failed_step_never_began_end_too(engine: Any) -> None:
    """vLLM's second runner begins none where the model has raised."""
    rank = Rank(engine())
    rank.side.begin(rank.loading("r"))
    rank.told({"r"})


def test_issue_a_step_that_raises_takes_no_loads_end_with_it(engine: Any) -> None:
    rank = Rank(engine())
    plan = rank.loading("r", idle=True)
    rank.side.begin(plan)
    rank.side.load(plan)
    rank.side.end()
    wait_until(lambda: "r" in rank.side._loaded, "it has ended")
    with pytest.raises(ValueError):
        rank.run(Plan(), ValueError("of the model"))
    assert (rank.side._loaded, rank.side._bad) == ({"r"}, {40}) and rank.side._counts
    rank.told({"r"})


def test_what_vllms_callers_handle_keeps_back_no_load(engine: Any) -> None:
    rank = Rank(engine())
    try:
        raise ValueError("of something else")
    except ValueError:
        seen = rank.run(rank.loading("r", idle=True))
        rank.side.begin(Plan(idle=True))
        rank.side.end()
        wait_until(lambda: seen or "r" in rank.side._loaded, "it has ended")
        assert seen | rank.side.finished()[0] == {"r"}


def test_issue_a_rank_whose_steps_vllm_does_not_end_stores(engine: Any) -> None:
    """As of a pipeline with speculative decoding: the last one's steps alone are ended."""
    rank = Rank(engine(ends=False))
    for number in (1, 2):
        rank.run(rank.saving(number, number=number), ends=False)
        assert rank.stored(number)
    with contextlib.suppress(ValueError):
        rank.run(rank.saving(3, number=3), ValueError("of the model"), ends=False)
    rank.run(rank.saving(4, number=4), ends=False)
    assert not rank.stored(3) and not rank.stored(4)


@pytest.mark.parametrize("what", ["failures", "broken"])
def test_issue_a_report_that_went_with_its_step_is_told_again(engine: Any, what: str) -> None:
    """vLLM drops what a step says if it raises behind the connector. Nothing was stored then, without a word."""
    one = engine(layerwise=True)
    rank = Rank(one)
    if what == "failures":
        rank.run(rank.loading("r", number=1))  # its report is lost
    else:
        with pytest.raises(ValueError):
            rank.run(rank.saving(1, number=1), ValueError())
        rank.side.begin(Plan(number=1, idle=True))
        rank.side.end()
        assert rank.side.take_report() is not None  # lost, too
    rank.side.begin(rank.saving(1, number=2))
    rank.side.end()
    report = rank.side.take_report()
    assert report is not None and (report.failures, report.broken) == ((1, False) if what == "failures" else (0, True))


def test_issue_an_engine_that_only_stores_follows_others_resets(engine: Any, client: FakeClient) -> None:
    """It read the generation once: all that it stored after another engine's reset was found by nobody."""
    one, other = engine(), engine()
    one.scheduler._loads = False
    one.run(list(range(40)))
    before = one.scheduler._generation
    other.scheduler.reset()
    wanted = Keyspace(client, "toy").generation()
    assert wanted is not None and wanted != before

    def follows() -> bool:
        one.scheduler._read_again = 0.0
        one.run([len(seen), *range(40)])
        seen.append(0)
        return one.scheduler._generation == wanted

    seen: list[int] = []
    wait_until(follows, "the engine stores under the generation that others read")


def test_issue_a_lookup_that_reads_its_generation_late_is_counted(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    side = engine().scheduler
    answer, answered = side._answer, []

    def late(lookup: Any) -> None:
        lookup.until = 0.0
        answer(lookup)
        answered.append(lookup)

    monkeypatch.setattr(side, "_answer", late)
    request = SimpleNamespace(request_id="r", num_tokens=9, block_hashes=[bytes(32)] * 2)
    side.matched(request, 0)
    wait_until(lambda: answered, "it is answered")
    assert side.matched(request, 0) == side.matched(request, 0) == (0, False)
    assert side.take_counts() == {"lookups": 1, "lookups_late": 1}
