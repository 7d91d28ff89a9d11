"""The models of the slot and of a move: the real rules are clean, and each injected bug is found with a trace."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import shard_move
from tests.models.explorer import Batch, Collision, Fields, Found, Layout, Model, Step, _hash, explore, explore_states
from tests.models.slot import BUGS, SlotModel, with_bug
from tests.support.dose import dose


def search(title: str, model: Model) -> Found[Fields]:
    found = explore(model)
    print(title)
    print("\n".join(found.lines(model.describe)))
    return found


# --- the slot ---------------------------------------------------------------------------------


@pytest.mark.fault("F22", ci="all interleavings", whole="all interleavings")
@pytest.mark.full
def test_two_readers_two_writers_two_chunks() -> None:
    """Search the real rules in full: 4.6 million states, where states that behave alike count as one."""
    found = search("2 readers, 2 writers", SlotModel(closes=False, shard=False, reduced=True).model())
    assert found.complete and not found.trace
    assert found.states == 4_575_963


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "states"),
    [
        ({"closes": True, "shard": True}, 1_873_878),
        ({"deaths": True, "closes": False, "shard": False}, 2_779_117),
    ],
)
def test_lost_connections_lost_shards_and_deaths(options: dict[str, bool], states: int) -> None:
    found = search(f"1 reader, {options}", SlotModel(readers=1, reduced=True, **options).model())
    assert found.complete and not found.trace
    assert found.states == states


@pytest.mark.fault("F22", ci="14 injected bugs", whole="14 injected bugs")
@pytest.mark.parametrize("name", dose(BUGS, quick=5))
def test_an_injected_bug_is_found(name: str) -> None:
    model = with_bug(name)
    found = search(f"{name}: {BUGS[name][0]}", model)
    assert found.trace
    # The trace is a run: it starts at the start, ends in the fault, and each state follows from the one before.
    assert found.trace[0][1] == model.layout.unpack(model.initial)
    assert found.trace[-1][1][model.bad] and not found.trace[-2][1][model.bad]
    for (_, before), (step, after) in zip(found.trace, found.trace[1:]):
        assert after in successors(model, before)[step]


@pytest.mark.full
@pytest.mark.parametrize("name", ["lasting", "no_step_6", "free_early", "word_last", "no_fence"])
def test_what_is_alike_hides_nothing(name: str) -> None:
    """Reduced models find the injected bugs too, with traces of the same length."""
    options = {"deaths": False, "closes": False, "shard": False, "bounds": False} | BUGS[name][1]
    whole = explore(with_bug(name))
    reduced = explore(SlotModel([name], readers=1, reduced=True, **options).model())
    assert reduced.trace and reduced.states < whole.states
    assert len(reduced.trace) == len(whole.trace)


@pytest.mark.full
def test_without_what_is_alike() -> None:
    """Search one reader without reductions: the same answer from 577,586 states as from 154,538."""
    found = search("1 reader, unreduced", SlotModel(readers=1, closes=False, shard=False).model())
    assert found.complete and not found.trace and found.states == 577_586


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"readers": 1, "deaths": True},
        {"readers": 1},
        {"readers": 1, "deaths": True, "reduced": True},
        {"readers": 2, "shard": False, "reduced": True},
    ],
)
def test_more_at_once(options: dict[str, bool]) -> None:
    model = SlotModel(**options).model()  # type: ignore[arg-type]
    found = explore(model, limit=60_000_000)
    print(options, "\n".join(found.lines(model.describe)))
    assert not found.trace


def successors(model: Model, fields: dict[str, int]) -> dict[str, list[dict[str, int]]]:
    """Return step -> states for one state: the plain reading of a model."""
    found: dict[str, list[dict[str, int]]] = {}
    state = [np.array([word], np.uint64) for word in model.layout.pack(fields)]
    for place, program in model.programs.items():
        for name, step in program.get(fields[place], []):
            after = step(Batch(model.layout, list(state)))
            for row in range(len(after)):
                found.setdefault(name, []).append(model.layout.unpack([int(column[row]) for column in after.words]))
    return found


# --- a moving shard ---------------------------------------------------------------------------


def search_moves(title: str, model: shard_move.MoveModel) -> Found[shard_move.State]:
    found = explore_states(model)
    print(title)
    print("\n".join(found.lines(model.describe)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"epochs": 3}, marks=pytest.mark.full),
        pytest.param({"epochs": 4, "losses": False}, marks=pytest.mark.full),
        pytest.param({"epochs": 4, "puts": 0}, marks=pytest.mark.full),
        {"epochs": 3, "losses": False},
    ],
)
def test_a_shard_moves(options: dict[str, int]) -> None:
    """Search the real shard words under every order of events."""
    found = search_moves(str(options), shard_move.MoveModel(**options))  # type: ignore[arg-type]
    assert found.complete and not found.trace
    assert found.states > 9_000


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "not_heard")) for name in shard_move.BUGS]
)
def test_a_bug_injected_into_a_move_is_found(name: str) -> None:
    model = shard_move.MoveModel((name,), **shard_move.SMALLEST[name])
    found = search_moves(f"{name}: {shard_move.BUGS[name]}", model)
    assert found.trace and found.fault
    assert found.trace[0][1] == model.initial()
    for (_, before), (event, after) in zip(found.trace, found.trace[1:]):
        assert (event, after) in [(name, state) for name, state, _ in model.successors(before)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"epochs": 4, "puts": 1}, {"epochs": 5, "losses": False}, {"workers": 3, "epochs": 3}]
)
def test_longer_moves(options: dict[str, int]) -> None:
    found = search_moves(str(options), shard_move.MoveModel(**options))  # type: ignore[arg-type]
    assert found.complete and not found.trace


# --- the search itself --------------------------------------------------------------------------


def counter(limit: int) -> Model:
    """Return a counter that goes up by 1 or 2 and must not reach ``limit``."""
    layout = Layout({"at": 20, "zero": 1}, {"bad": 1})

    def plus(number: int) -> Step:
        def step(s: Batch) -> Batch:
            s = s.where(s["at"] < 1000)
            s["at"] = s["at"] + np.uint64(number)
            s["bad"] = (s["at"] == limit).astype(np.uint64)
            return s

        return step

    steps = [("one", plus(1)), ("two", plus(2))]
    return Model(layout, layout.pack({"at": 0}), {"zero": {0: steps}}, "bad", {1: "there"}, str)


def test_the_search_visits_all_and_finds_the_shortest_way() -> None:
    found = explore(counter(5000))
    assert (found.states, found.complete, found.trace) == (1002, True, [])
    found = explore(counter(7))
    assert [state["at"] for _, state in found.trace][-1] == 7 and len(found.trace) == 5
    assert not explore(counter(5000), limit=100).complete


@pytest.mark.full
def test_two_states_with_one_hash_stop_the_search() -> None:
    layout = Layout({"a": 64}, {"b": 64})
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 1 << 63, 4, np.uint64) for _ in range(2)]
    assert len(set(_hash(words).tolist())) == 4
    from tests.models import explorer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explorer, "_hash", lambda columns: columns[0] & np.uint64(0))
        with pytest.raises(Collision):
            explorer._Visited(layout).add_new(words)
