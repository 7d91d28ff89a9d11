"""Doses: how much of a parametrised test the quick run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
