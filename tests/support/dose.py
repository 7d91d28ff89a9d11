"""Doses: how much of a parametrised test the quick run has."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Final

import pytest

#: Sets of parameters of one test in the quick run at most. More of them find little that these do not.
QUICK_SETS: Final = 6


def dose(values: Iterable[Any], quick: int) -> list[Any]:
    """Return parameters of which ``quick``, evenly spread, are in the quick run; ``--full`` has them all."""
    listed = list(values)
    chosen = {number * len(listed) // quick for number in range(quick)}
    return [each if at in chosen else _full(each) for at, each in enumerate(listed)]


def _full(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.full], id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.full)


def left_out(tests: Iterable[str]) -> set[str]:
    """Return which of these unit tests and models, given by their ids, the quick run leaves out.

    They are what is beyond ``QUICK_SETS`` sets of parameters of a function. Those that stay are drawn by its name: each
    run has the same, and they are spread over all parameters of a test that has several.
    """
    sets: dict[str, list[str]] = {}
    for test in tests:
        sets.setdefault(test.partition("[")[0], []).append(test)
    out: set[str] = set()
    for name, each in sets.items():
        out.update(random.Random(name).sample(each, max(0, len(each) - QUICK_SETS)))
    return out
