"""Kept values and groups through moves, evictions and deaths: the real stores, and bugs that the search must find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.explorer import Found, explore_states
from tests.models.marks import BUGS, MarksModel, State, broken


def search(title: str, model: MarksModel) -> Found[State]:
    found = explore_states(model)
    print(title, f"{len(model.worker.seen)} states of a worker")
    print("\n".join(found.lines(model.describe)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"keeps": 0},
        {"keeps": 0, "puts": 1, "evictions": 0, "deaths": 0},
        # The longest by far; the others have its deaths, its puts and its keeping one by one.
        pytest.param({"keeps": 1, "groups": 0, "deletes": 0, "puts": 1, "evictions": 0}, marks=pytest.mark.full),
        pytest.param({"keeps": 1, "deletes": 0, "deaths": 0, "ticks": 0}, marks=pytest.mark.full),
        {"keeps": 1, "groups": 0, "deletes": 0, "deaths": 0, "ticks": 0},
        pytest.param({"keeps": 2, "groups": 0, "deletes": 0, "evictions": 0}, marks=pytest.mark.full),
        pytest.param({"keeps": 1, "groups": 0, "puts": 1, "deaths": 0}, marks=pytest.mark.full),
        pytest.param({"keeps": 1, "groups": 0, "puts": 1}, marks=pytest.mark.slow),
        pytest.param({"keeps": 1, "puts": 1}, marks=pytest.mark.slow),
    ],
)
def test_what_is_kept_and_what_is_a_group_stays_so(options: dict[str, Any]) -> None:
    found = search(str(options), MarksModel(**options))
    assert found.complete and not found.trace
    assert found.states > 500


#: Found among 20 to 50 states. The others take some hundreds, or a thousand.
SOON = ("unheld", "private", "replaced", "half_marked", "orphans_stay", "early_finish")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.quick if name in SOON else pytest.mark.full) for name in BUGS]
)
def test_an_injected_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = broken(name, monkeypatch)
    found = search(f"{name}: {BUGS[name]}", model)
    assert found.trace and found.fault
    assert found.trace[0][1] == model.initial()
