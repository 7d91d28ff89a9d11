"""Values in parts: the real code under every order of its exchanges, and bugs that the search must find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.explorer import Found, explore_states
from tests.models.large import BUGS, LargeModel, State, broken
from tests.support.dose import dose


def search(title: str, model: LargeModel) -> Found[State]:
    found = explore_states(model)
    print(title)
    print("\n".join(found.lines(model.describe)))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"writers": 2, "reads": True, "evictions": 1, "full": 1},
        {"keeps": True, "reads": True, "evictions": 2},
        {"keeps": True, "writers": 2},
        pytest.param({"keeps": True, "writers": 1, "evictions": 2, "full": 1, "reads": True}, marks=pytest.mark.full),
    ],
)
def test_a_value_in_parts_is_of_one_put_or_a_miss(options: dict[str, Any]) -> None:
    found = search(str(options), LargeModel(**options))
    assert found.complete and not found.trace
    assert found.states > 100


@pytest.mark.parametrize("name", dose(list(BUGS), quick=4))
def test_an_injected_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = broken(name, monkeypatch)
    found = search(f"{name}: {BUGS[name]}", model)
    assert found.trace and found.fault
    assert found.trace[0][1] == model.initial()
