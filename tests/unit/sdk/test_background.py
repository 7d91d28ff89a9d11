"""A client's background thread with workers that are stopped: what it does for the others does not wait for each."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.net.allowance import ALLOWANCE, allowed
from simm.sdk.path import PathState
from simm.sdk.routing import Router

DEADLINE_S = 1.0


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic", lambda: made.now)
        yield made
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf, "nothing is left for what comes next"


class Worker:
    """A worker of this host whose session has something to exchange. A stopped one answers nothing."""

    fresh = connecting = False
    settled = True
    state = PathState.UP

    def __init__(self, name: str, clock: Clock, *, stopped: bool) -> None:
        self.name, self.clock, self.stopped = name, clock, stopped
        self.path, self.session = "shm", object()
        self.watched: list[float] = []
        self.closed = False

    def watch(self, _now: float) -> None:
        self.watched.append(self.clock.now)

    def maintain(self, _now: float) -> None:
        if allowed(math.inf) > 0 and self.stopped and self.session is not None:
            self.clock.now += allowed(DEADLINE_S)
            self.path, self.session = "down", None  # type: ignore[assignment]

    def close(self, *, clean: bool) -> None:
        self.clock.now += allowed(DEADLINE_S)
        self.closed = not clean

    def wants_connection(self, _now: float) -> bool:
        return False


def router_to(workers: list[Worker]) -> Router:
    router: Any = Router.__new__(Router)
    router._closed = router._ahead = False
    router._announce_by, router.deadline_s = None, DEADLINE_S
    router.targets = {each.name: each for each in workers}
    router._connections = SimpleNamespace(draining=[])
    nothing = SimpleNamespace(tidy=lambda: None, release_ended=lambda: None)
    router.context, router._tick = SimpleNamespace(rdma=nothing, tallies=nothing), lambda: None
    return router  # type: ignore[no-any-return]


def test_stopped_workers_cost_a_turn_one_deadline_together(clock: Clock) -> None:
    """Each cost one. Meanwhile nobody looked at the heartbeats of the others, or answered their recalls."""
    workers = [Worker(f"stopped {number}", clock, stopped=True) for number in range(6)]
    workers.append(Worker("healthy", clock, stopped=False))
    router = router_to(workers)
    began = clock.now
    assert router.maintain()
    assert clock.now - began <= DEADLINE_S
    assert [each.watched for each in workers] == [[began]] * 7, "before anything waits"
    for _ in range(6):
        assert router.maintain()
    assert [each.session is None for each in workers] == [True] * 6 + [False], "a later turn finds the others"


def test_what_the_map_names_no_more_is_closed_within_a_deadline(clock: Clock) -> None:
    """A call of another thread had each of the sessions, of a worker that was stopped."""
    router: Any = router_to([])
    over = [Worker(f"stopped {number}", clock, stopped=True) for number in range(6)]
    router._connections.draining = [(clock.now, each) for each in over]
    router._map_lock = threading.Lock()
    began = clock.now
    assert router.maintain()
    assert clock.now - began <= DEADLINE_S and all(each.closed for each in over)
