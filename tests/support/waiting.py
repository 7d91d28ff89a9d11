"""Waiting for a state. Tests wait for states, never for times: the bounds are for what hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

#: A bound for things that hang, seconds; no speed limit.
WAIT_S: Final = 120.0


def wait_until(
    condition: Callable[[], Any], what: Callable[[], str] | str, timeout_s: float = WAIT_S, pause_s: float = 0.01
) -> Any:
    """Return the condition's first true value. Raises AssertionError with ``what`` when the time is up."""
    until = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(pause_s)
