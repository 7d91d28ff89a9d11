"""The lines of slow operations: what is in them, and how many there are."""

from __future__ import annotations

import logging

import pytest

from simm.tracing.slow import LINES_MAX, NAMES_MAX, WINDOW_S, SlowLog
from simm.tracing.spans import Operation
from tests.support.client_values import forked
from tests.support.ended import ended


def operation(*, kept: bool = True) -> Operation:
    one = Operation("get", bytes(range(16)), b"", kept=kept)
    one.began, one.ended = 0, 31_204_000
    one.segment("locate", 0, 4000)
    one.segment("copy", 4000, 20_000_000)
    one.segment("copy", 20_000_000, 31_000_000)
    one.about.update(keys=1, key="1f3a77c0", path="shm")
    return one


def test_a_line_has_the_segments_of_one_name_together(caplog: pytest.LogCaptureFixture) -> None:
    SlowLog().write(operation())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "slow: get of 1 key by shm took 31.204 ms: locate 0.004, copy 30.996; trace 000102030405060708090a0b0c0d0e0f, "
        "key 1f3a77c0"
    )


def test_a_trace_that_nobody_recorded_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    SlowLog().write(operation(kept=False))
    assert caplog.records[0].getMessage().endswith("copy 30.996; key 1f3a77c0")


def test_lines_are_limited_and_those_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    slow = SlowLog(lambda: now[0])
    for _ in range(LINES_MAX + 5):
        slow.line("a thing", 1_000_000, ())
    assert len(caplog.records) == LINES_MAX
    now[0] += WINDOW_S + 1
    slow.line("a thing", 1_000_000, ())
    assert caplog.records[-1].getMessage() == "slow: a thing took 1.000 ms; 5 more were left out"
    slow.line("a thing", 1_000_000, ())
    assert caplog.records[-1].getMessage() == "slow: a thing took 1.000 ms"


def test_a_line_has_so_many_names(caplog: pytest.LogCaptureFixture) -> None:
    SlowLog().line("a thing", 1, [(f"part {at}", 1) for at in range(NAMES_MAX + 5)])
    assert caplog.records[0].getMessage().count("part ") == NAMES_MAX


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_writes_lines_although_a_thread_of_its_parent_was_at_one() -> None:
    slow = SlowLog()
    with slow._lock:  # of that thread, which the child does not have
        assert forked(lambda: slow.allow() == (True, 0)) == 0
    assert slow.allow() == (True, 0)


def test_issue_a_slow_call_within_the_count_of_another_is_counted() -> None:
    """A signal's handler, or a finalizer, that made one there waited for ever."""
    within: list[tuple[bool, int]] = []

    def clock() -> float:
        if not within:
            within.append((False, 0))
            within.append(slow.allow())
        return 100.0

    slow = SlowLog(clock)
    assert ended(slow.allow), "it hangs"
    assert within[1] == (True, 0) and slow._lines == 2
