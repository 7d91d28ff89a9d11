"""The pace of a machine: bounds grow with what wants to run on it."""

from __future__ import annotations

import os

import pytest

from tests.support import pace as module
from tests.support.pace import Pace, running
from tests.support.waiting import wait_until


def measured(pace: Pace) -> Pace:
    """Let it make some rounds."""
    with pace:
        wait_until(lambda: pace._rounds > 3, "some rounds")
    return pace


def test_bounds_grow_with_those_that_want_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "running", lambda: 1000 * len(os.sched_getaffinity(0)))
    monkeypatch.setattr(module, "measured", lambda *_, **__: None)  # nothing that people want to read
    pace = measured(Pace())
    assert pace.slowness >= 1000 and pace.limit(1.0) >= 1000
    pace.check("what takes that long here", 999.0, 1.0)
    with pytest.raises(AssertionError, match="at most 1 s"):
        pace.check("what takes longer", 2 * pace.limit(1.0), 1.0)


def test_no_machine_is_faster_than_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "running", lambda: 0)
    assert measured(Pace()).slowness >= 1.0
    assert Pace().slowness == 1.0, "nothing was measured"


def test_whoever_asks_runs() -> None:
    assert running() >= 1
