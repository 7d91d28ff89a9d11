"""No example of Hypothesis's fails because the machine is busy, and each run has the same ones."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@given(st.integers())
def plain(_number: int) -> None:
    """A test without settings of its own."""


@settings(max_examples=7)
@given(st.integers())
def changed(_number: int) -> None:
    """A test that changes one setting."""


def test_all_tests_start_from_the_profile() -> None:
    of_tests = [each._hypothesis_internal_use_settings for each in (plain, changed)]  # type: ignore[attr-defined]
    for made in (settings(), *of_tests):
        assert made.deadline is None and made.derandomize and made.database is None
        assert HealthCheck.too_slow in made.suppress_health_check
    assert of_tests[1].max_examples == 7
