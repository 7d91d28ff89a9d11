"""An end to a run of tests that fails none: those not begun in time are skipped, and the summary says how many.

``SIMM_TEST_SECONDS=1200 scripts/test --full``: for CI, whose time is limited on machines of any speed.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import pytest

VARIABLE: Final = "SIMM_TEST_SECONDS"
#: What skips for this reason begin with. ``.ci/run`` counts them by it.
REASON: Final = "not begun within"


class TimeLimit:
    """Skips every test that begins after the limit, counted from when this is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skip the test before any of its fixtures is made."""
        if time.monotonic() > self._until:
            pytest.skip(f"{REASON} {self._seconds:.0f} s ({VARIABLE}): scripts/test --full has no limit")


def from_environment() -> TimeLimit | None:
    """Return the limit that the environment sets, if any. Raise UsageError for what is no number of seconds."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"{VARIABLE} wants a number of seconds above 0, not {text!r}")
    return TimeLimit(seconds)


def register(config: Any) -> None:
    """Set the limit for the tests of this process."""
    if (limit := from_environment()) is not None:
        config.pluginmanager.register(limit, "simm-time-limit")
