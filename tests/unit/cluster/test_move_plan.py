"""How long the copies wait for a previous owner that fails: the tries of ``simm/cluster/move_plan.py``, by a clock."""

from __future__ import annotations

import pytest

from simm.cluster.move_plan import GIVE_UP_S, TRIES_MIN, CopyTries, ProgressTimeout
from simm.wire.messages import Status

#: Longer than a previous owner may be silent.
LONG_S = 3 * GIVE_UP_S


@pytest.fixture
def timeout() -> ProgressTimeout:
    """Of a previous owner that has brought something on at time 0."""
    made = ProgressTimeout()
    made.progress(0.0)
    return made


def test_issue_our_own_waiting_is_not_its_silence(timeout: ProgressTimeout) -> None:
    """The first failure after a long wait for the token bucket gave 256 shards up."""
    tries = CopyTries(timeout)
    assert not tries.failed(None, LONG_S)
    timeout.progress(LONG_S + 1)
    assert not tries.failed(None, 2 * LONG_S + 1) and not timeout.given_up


def test_issue_a_failure_that_others_have_seen_begins_no_silence_of_ours(timeout: ProgressTimeout) -> None:
    """One lost stream breaks all connections: some now, others when their wait is over. Nothing came in between."""
    one, other = CopyTries(timeout), CopyTries(timeout)
    assert not one.failed(None, 1.0)
    assert not other.failed(None, 1.0 + LONG_S)
    assert not one.failed(None, 1.5 + LONG_S), "nor is a second failure, after a wait of its own"


def test_a_job_that_ended_while_it_failed_leaves_no_silence_behind(timeout: ProgressTimeout) -> None:
    CopyTries(timeout).failed(None, 1.0)  # and then a map takes its shards away
    later = CopyTries(timeout)
    assert not later.failed(None, 1.0 + LONG_S)
    assert not later.failed(None, 2.0 + LONG_S)


def test_what_only_fails_is_given_up_and_all_others_at_their_next_failure(timeout: ProgressTimeout) -> None:
    tries, now, failures = CopyTries(timeout), LONG_S, 0
    while not tries.failed(None, now):
        now += 0.1
        failures += 1
    assert GIVE_UP_S < now - LONG_S < GIVE_UP_S + 0.3 and failures > TRIES_MIN
    assert CopyTries(timeout).failed(None, now), "its next group"
    timeout.progress(now)
    assert not CopyTries(timeout).failed(None, now + 1)


def test_few_failures_that_take_long_are_enough(timeout: ProgressTimeout) -> None:
    """A source that lists pages, and sends no values: we wait between two tries, but not for ever."""
    tries = CopyTries(timeout)
    assert [tries.failed(None, LONG_S * at) for at in range(1, TRIES_MIN + 1)] == [False] * (TRIES_MIN - 1) + [True]


@pytest.mark.parametrize("ours", [True, False], ids=["this group", "another one"])
def test_who_fails_and_brings_on_by_turns_is_not_given_up(timeout: ProgressTimeout, ours: bool) -> None:
    """Each progress ends the silence, whichever group it brought on. The next one is counted from its own failure."""
    tries = CopyTries(timeout)
    now = 1.0
    for _ in range(50):
        for _ in range(1 if ours else 5):
            assert not tries.failed(None, now)
            now += GIVE_UP_S / 6
        timeout.progress(now)
        now += GIVE_UP_S
    while not tries.failed(None, now):
        now += 1
    assert now > timeout.progress_at + 2 * GIVE_UP_S


@pytest.mark.parametrize("status", [Status.UNAUTHORIZED, Status.VERSION, Status.BAD_REQUEST])
def test_a_refusal_that_is_final_gives_up_at_once(timeout: ProgressTimeout, status: int) -> None:
    assert CopyTries(timeout).failed(status, 0.5) and timeout.given_up


def test_a_refusal_that_is_not_final_does_not(timeout: ProgressTimeout) -> None:
    assert not CopyTries(timeout).failed(Status.UNAVAILABLE, LONG_S)
