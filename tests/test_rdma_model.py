"""The models of RDMA: nothing with the real rules, and every planted fault with a trace to read."""

from __future__ import annotations

import numpy as np
import pytest
from rdmamodel import get, grants
from rdmamodel.__main__ import GETS, GRANTS, MORE_GETS, MORE_GRANTS
from slotmodel.packed import Batch, Found, Model, explore


def search(title: str, model: Model) -> Found:
    found = explore(model, 1 << 28)
    print(title)
    print("\n".join(found.lines(get.describe)))
    return found


def successors(model: Model, state: dict[str, int]) -> dict[str, list[dict[str, int]]]:
    """What follows a state, by step."""
    words = [np.array([word], np.uint64) for word in model.layout.pack(state)]
    found: dict[str, list[dict[str, int]]] = {}
    for process, program in model.programs.items():
        for name, step in program.get(state[process], ()):
            after = step(Batch(model.layout, list(words)))
            for number in range(len(after)):
                packed = tuple(int(column[number]) for column in after.words)
                found.setdefault(name, []).append(model.layout.unpack(packed))
    return found


# --- a value that is read ---------------------------------------------------------------------


@pytest.mark.parametrize(("options", "states"), [(GETS[1], 5_894_370), (GETS[2], 488_018)])
def test_gets(options: dict[str, int], states: int) -> None:
    found = search(f"get, {options}", get.GetModel(**options).model())
    assert found.complete and not found.trace
    assert found.states == states


@pytest.mark.parametrize("name", get.PLANTS)
def test_a_fault_planted_in_a_get_is_found(name: str) -> None:
    model = get.planted(name)
    found = search(f"{name}: {get.PLANTS[name][0]}", model)
    assert found.trace
    # The trace is a run: it starts at the start, ends in the fault, and each state follows from the one before.
    assert found.trace[0][1] == model.layout.unpack(model.initial)
    assert found.trace[-1][1][model.bad] and not found.trace[-2][1][model.bad]
    for (_, before), (step, after) in zip(found.trace, found.trace[1:]):
        assert after in successors(model, before)[step]


def play(model: Model, steps: list[str]) -> dict[str, int]:
    """The state after a run."""
    state = model.layout.unpack(model.initial)
    for step in steps:
        (state,) = successors(model, state)[step]
    return state


def test_the_hole_that_one_image_leaves() -> None:
    """Two images of a slot that are the same, and mixed both: a torn value, unless there is a third between them.

    The offset is A's in the first image because that was read before the overwrite, and in the last because that was
    read after the next one. While A was read, somebody was writing into it.
    """

    def put(chunk: str, *between: str) -> list[str]:
        words = ["writer: word 0 lands", "writer: word 1 lands"]
        if between:
            words = [words[0], *between, words[1]]
        return [f"worker: chunk {chunk} granted for K", *words, "writer: sends its commit", "worker: takes the commit"]

    store = ["worker: seq odd", "worker: key", "worker: offset", "worker: seq even, the old chunk is free"]
    data = ["reader: chain: w", "reader: chain: d0", "reader: chain: d1"]
    start = [
        "reader: a call",
        "reader: find: s_offset",
        *put("B"),
        *store,
        "reader: find: s_key",
        "reader: find: s_seq",
    ]

    one = get.GetModel("one_image", cache=0, shard=0).model()
    end = ["reader: fenced: f_key", "reader: fenced: f_offset"]
    state = play(one, [*start, *put("A", *data, "reader: fenced: f_seq"), *store, *end])
    assert get.FAULTS[state["bad"]] == "a hit whose words are of two values"

    real = get.GetModel(cache=0, shard=0).model()
    image = ["reader: chain: m_seq", "reader: chain: m_key", "reader: chain: m_offset"]
    state = play(real, [*start, *put("A", *data, *image, "reader: fenced: f_seq"), *store])
    # M shows chunk B, where that entry really lies: no hit.
    assert not state["bad"] and state["r"] == get.R.IDLE


@pytest.mark.slow
@pytest.mark.parametrize("options", [GETS[0], *MORE_GETS])
def test_more_gets(options: dict[str, int]) -> None:
    found = search(f"get, {options}", get.GetModel(**options).model())
    assert found.complete and not found.trace


# --- grants -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "states"), [*zip(GRANTS, (2_126, 2_126, 35_330))])
def test_grants(options: dict[str, int], states: int) -> None:
    found = grants.explore(grants.GrantModel(**options))
    print("\n".join(found.lines()))
    assert found.complete and not found.trace
    assert found.states == states


@pytest.mark.parametrize("name", grants.PLANTS)
def test_a_fault_planted_in_the_fencing_is_found(name: str) -> None:
    model = grants.planted(name)
    found = grants.explore(model)
    print(grants.PLANTS[name][0], *found.lines(), sep="\n")
    assert found.trace and found.fault
    for (_, before), (event, after) in zip(found.trace, found.trace[1:]):
        assert (event, after) in [(name, state) for name, state, _ in model.successors(before)]


@pytest.mark.slow
@pytest.mark.parametrize("options", MORE_GRANTS)
def test_more_grants(options: dict[str, int]) -> None:
    found = grants.explore(grants.GrantModel(**options))
    assert found.complete and not found.trace
