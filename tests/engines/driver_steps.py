"""What drivers do that are told steps."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

#: Bounds what never ends, seconds.
REGISTER_S = 120.0


def registered() -> None:
    """Wait until connectors have registered their keys' schemes: this process ends sooner than an engine's would."""
    for each in threading.enumerate():
        if each.name == "simm-scheme":
            each.join(REGISTER_S)


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


def results_of(steps: Sequence[Any], result: Callable[[Any], Any]) -> list[Any]:
    """Return the result of each step, or its exception as a text: one that fails leaves the others alone."""
    results = []
    for step in steps:
        try:
            results.append(result(step))
        except Exception:
            results.append({"error": traceback.format_exc()})
    return results
