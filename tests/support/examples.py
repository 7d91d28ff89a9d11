"""Hypothesis's examples: the same in each run, and no time limit for one of them.

By default Hypothesis fails an example that takes 200 ms, and a test whose first examples take a second to draw. A busy
machine needs no fault for that. It also draws other examples in each run, so a test would fail in one run of many, and
the processes of pytest-xdist would write to one database.
"""

from __future__ import annotations

from typing import Final

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # environments of engines and of virtual machines, which run none of these tests
    settings = None  # type: ignore[assignment, misc]

NAME: Final = "simm"


def fix() -> None:
    """Load the profile that all tests of this run start from. Their own settings change it where they say so."""
    if settings is None:
        return
    settings.register_profile(
        NAME, deadline=None, derandomize=True, database=None, print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    settings.load_profile(NAME)
