"""The models of RDMA: the real rules are clean, and each injected bug is found with a trace."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import rdma_get, rdma_grants
from tests.models.explorer import Batch, Fields, Found, Model, explore, explore_states
from tests.models.rdma_searches import GETS, GRANTS, MORE_GETS, MORE_GRANTS
from tests.support.dose import dose


def search(title: str, model: Model) -> Found[Fields]:
    found = explore(model, 1 << 28)
    print(title)
    print("\n".join(found.lines(rdma_get.describe)))
    return found


def successors(model: Model, state: dict[str, int]) -> dict[str, list[dict[str, int]]]:
    """Return step -> the states that follow a state."""
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


@pytest.mark.parametrize(
    ("options", "states"), [pytest.param(GETS[1], 5_894_370, marks=pytest.mark.full), (GETS[2], 488_018)]
)
def test_gets(options: dict[str, int], states: int) -> None:
    found = search(f"get, {options}", rdma_get.GetModel(**options).model())
    assert found.complete and not found.trace
    assert found.states == states


@pytest.mark.parametrize("name", dose(rdma_get.BUGS, quick=5))
def test_a_bug_injected_into_a_get_is_found(name: str) -> None:
    model = rdma_get.with_bug(name)
    found = search(f"{name}: {rdma_get.BUGS[name][0]}", model)
    assert found.trace
    # The trace is a run: it starts at the start, ends in the fault, and each state follows from the one before.
    assert found.trace[0][1] == model.layout.unpack(model.initial)
    assert found.trace[-1][1][model.bad] and not found.trace[-2][1][model.bad]
    for (_, before), (step, after) in zip(found.trace, found.trace[1:]):
        assert after in successors(model, before)[step]


def play(model: Model, steps: list[str]) -> dict[str, int]:
    """Return the state after a run."""
    state = model.layout.unpack(model.initial)
    for step in steps:
        (state,) = successors(model, state)[step]
    return state


def test_the_hole_that_one_image_leaves() -> None:
    """Two images of a slot may be equal mixtures, and the value torn, unless a third image is read between them.

    The first image has A's offset because it was read before the overwrite, the last because it was read after the next
    one. While the reader read A, a writer was writing into it.
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

    one = rdma_get.GetModel("one_image", cache=0, shard=0).model()
    end = ["reader: fenced: f_key", "reader: fenced: f_offset"]
    state = play(one, [*start, *put("A", *data, "reader: fenced: f_seq"), *store, *end])
    assert rdma_get.FAULTS[state["bad"]] == "a hit whose words are of two values"

    real = rdma_get.GetModel(cache=0, shard=0).model()
    image = ["reader: chain: m_seq", "reader: chain: m_key", "reader: chain: m_offset"]
    state = play(real, [*start, *put("A", *data, *image, "reader: fenced: f_seq"), *store])
    # M shows chunk B, where that entry really lies: no hit.
    assert not state["bad"] and state["r"] == rdma_get.R.IDLE


@pytest.mark.slow
@pytest.mark.parametrize("options", [GETS[0], *MORE_GETS])
def test_more_gets(options: dict[str, int]) -> None:
    found = search(f"get, {options}", rdma_get.GetModel(**options).model())
    assert found.complete and not found.trace


# --- grants -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "states"), dose([*zip(GRANTS, (2_126, 2_126, 35_330))], quick=2))
def test_grants(options: dict[str, int], states: int) -> None:
    model = rdma_grants.GrantModel(**options)
    found = explore_states(model)
    print("\n".join(found.lines(model.describe)))
    assert found.complete and not found.trace
    assert found.states == states


@pytest.mark.parametrize("name", rdma_grants.BUGS)
def test_a_bug_injected_into_the_fencing_is_found(name: str) -> None:
    model = rdma_grants.with_bug(name)
    found = explore_states(model)
    print(rdma_grants.BUGS[name][0], *found.lines(model.describe), sep="\n")
    assert found.trace and found.fault
    for (_, before), (event, after) in zip(found.trace, found.trace[1:]):
        assert (event, after) in [(name, state) for name, state, _ in model.successors(before)]


@pytest.mark.slow
@pytest.mark.parametrize("options", MORE_GRANTS)
def test_more_grants(options: dict[str, int]) -> None:
    found = explore_states(rdma_grants.GrantModel(**options))
    assert found.complete and not found.trace
