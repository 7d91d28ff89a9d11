"""Advances of a namespace: the real rules under every order of events, and the bugs that the search must find."""

from __future__ import annotations

import pytest

from tests.models.epochs import BUGS, SMALLEST, EpochModel, State
from tests.models.explorer import Found, explore_states
from tests.support.dose import dose


def search(title: str, model: EpochModel) -> Found[State]:
    found = explore_states(model)
    print(title)
    print("\n".join(found.lines(model.describe)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"ticks": 2},
        pytest.param({"ticks": 2, "losses": 1, "deaths": 0, "settled": 1}, marks=pytest.mark.full),
        {"ticks": 3, "losses": 1, "deaths": 0, "settled": 1, "puts": 0},
        {"ticks": 2, "restarts": 1, "deaths": 0, "settled": 1, "puts": 0},
        {"ticks": 2, "deaths": 0, "settled": 1, "puts": 0, "maps": 2},
        pytest.param({"ticks": 2, "deaths": 0, "maps": 1, "old": 1}, marks=pytest.mark.full),
        pytest.param(
            {"ticks": 3, "restarts": 1, "deaths": 0, "settled": 1, "puts": 0, "maps": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"ticks": 2, "losses": 1, "deaths": 0, "settled": 1, "servers": 2, "puts": 0}, marks=pytest.mark.slow
        ),
        pytest.param({"ticks": 4, "advances": 3}, marks=pytest.mark.slow),
    ],
)
def test_no_old_value_after_an_advance_has_returned(options: dict[str, int]) -> None:
    found = search(str(options), EpochModel(**options))  # type: ignore[arg-type]
    assert found.complete and not found.trace
    assert found.states > 5_000


@pytest.mark.parametrize("name", dose(list(BUGS), quick=5))
def test_an_injected_bug_is_found(name: str) -> None:
    model = EpochModel((name,), **SMALLEST[name])  # type: ignore[arg-type]
    found = search(f"{name}: {BUGS[name]}", model)
    assert found.trace and found.fault
    assert found.trace[0][1] == model.initial()
