"""What drivers do that are told steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any


def carry_out(run: Any, steps: Sequence[Any], commands: Collection[str]) -> tuple[list[Any], list[float]]:
    """Call the methods of ``run`` that the steps name, with their arguments. Return results, and seconds of each."""
    results, took = [], []
    for step in steps:
        name, *arguments = step if isinstance(step, list) else [step]
        assert name in commands
        began = time.monotonic()
        results.append(getattr(run, name)(*arguments))
        took.append(time.monotonic() - began)
    return results, took
