"""Near copies: the real code under every order of its exchanges, and bugs that the search must find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.explorer import Found, explore_states
from tests.models.near import BUGS, NearModel, State, broken


def search(title: str, model: NearModel) -> Found[State]:
    found = explore_states(model)
    print(title)
    print("\n".join(found.lines(model.describe)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": 2, "deletes": 2, "puts": 1},
        {"hosts": 1, "both": True, "deletes": 1, "puts": 1, "evictions": 1},
        {"hosts": 2, "deletes": 1, "deaths": 1, "evictions": 1},
        pytest.param(
            {"hosts": 2, "both": True, "deletes": 1, "puts": 1, "evictions": 1, "deaths": 1}, marks=pytest.mark.full
        ),
    ],
)
def test_no_copy_is_left_of_a_value_that_was_deleted(options: dict[str, Any]) -> None:
    found = search(str(options), NearModel(**options))
    assert found.complete and not found.trace
    assert found.states > 100


@pytest.mark.parametrize("name", list(BUGS))
def test_an_injected_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = broken(name, monkeypatch)
    found = search(f"{name}: {BUGS[name]}", model)
    assert found.trace and found.fault
    assert found.trace[0][1] == model.initial()


def test_a_process_that_dies_may_leave_a_copy() -> None:
    """Which ends with its time: what the model excepts does happen."""

    class Strict(NearModel):
        def fault(self, state: State) -> str:
            return super().fault(state._replace(dead=frozenset()))

    assert search("strict", Strict(hosts=1, deletes=1, deaths=1)).fault
