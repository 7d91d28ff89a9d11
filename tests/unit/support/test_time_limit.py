"""A run of tests with a time limit skips what it does not begin, and runs what it does."""

from __future__ import annotations

import pytest

from tests.support import time_limit


def test_tests_after_the_limit_are_skipped_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now)
    limit = time_limit.TimeLimit(30)
    limit.pytest_runtest_setup()
    now = 129.9
    limit.pytest_runtest_setup()
    now = 130.1
    with pytest.raises(pytest.skip.Exception, match="not begun within 30 s"):
        limit.pytest_runtest_setup()


def test_without_the_variable_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(time_limit.VARIABLE, raising=False)
    assert time_limit.from_environment() is None
    monkeypatch.setenv(time_limit.VARIABLE, "")
    assert time_limit.from_environment() is None


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "20m"])
def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(time_limit.VARIABLE, text)
    with pytest.raises(pytest.UsageError, match="SIMM_TEST_SECONDS wants a number of seconds"):
        time_limit.from_environment()
