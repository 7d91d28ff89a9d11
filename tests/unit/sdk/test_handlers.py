"""Calls in a signal's handler whose thread has a lock: they go on without it, and do not wait for their own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.ipc import tally
from simm.ipc.counts import Word
from simm.ipc.tally import Tallies
from simm.net.allowance import free_within
from simm.sdk.manager_link import Subscription
from simm.sdk.path import ClientContext
from simm.sdk.routing import Router
from simm.sdk.worker_path import Target
from simm.wire import messages as M
from tests.support.ended import ended

#: Nobody listens there.
NOBODY = ("127.0.0.1", 1)
OPTIONS = ClientOptions("{}:{}".format(*NOBODY), "n", "shm", 0.05)


@pytest.fixture
def router() -> Iterator[Router]:
    made = Router(OPTIONS, None)
    yield made
    assert ended(made.close)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target(M.WorkerInfo(0, 0, 1, 0, 1 << 30, "n", "", "127.0.0.1", 1), ClientContext(OPTIONS))
    yield made
    made.close()


def in_handler(lock: Any, call: Callable[[], object]) -> bool:
    """Make a call as a handler does that has interrupted its thread with the lock; return whether it ended."""
    with lock:
        return ended(call)


def test_counters_are_told_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that logs ``client.stats()`` hung, if it came as its thread was counting."""
    monkeypatch.setattr(tally, "LOCK_S", 0.01)
    tallies = Tallies()
    tallies.unanswered(tallies.tcp, 1, 0)
    seen: list[dict[str, Any]] = []
    assert in_handler(tallies._lock, lambda: seen.append(tallies.totals()))
    assert set(seen[0]) == {"shm", "rdma", "tcp"}
    assert in_handler(tallies._lock, lambda: tallies.unanswered(tallies.tcp, 1, 0))
    assert tallies.tcp[Word.UNREACHABLE] == 1, "not counted"


def test_a_wait_for_a_map_ends(router: Router) -> None:
    got: list[bool] = []
    assert in_handler(router._map_lock, lambda: got.append(router.await_map(router.epoch, time.monotonic() + 0.01)))
    assert got == [False]


def test_a_map_is_asked_for_by_the_next_call(router: Router) -> None:
    subscription: Subscription = router.subscription
    subscription._asked = False
    assert in_handler(subscription._lock, subscription.refresh)
    assert not subscription._asked


@pytest.mark.parametrize("how", ["lost", "tcp_lost"])
def test_a_failed_exchange_is_left_for_later(target: Target, how: str) -> None:
    class Broken:
        broken, closed = True, False

        def close(self, *, clean: bool = True) -> bool:
            self.closed = True
            return True

    part: Any = Broken()
    if how == "lost":
        target.session = part
    else:
        target.tcp = part

    def call() -> None:
        if how == "lost":
            target.lost("broken")
        else:
            target.tcp_lost(part, "broken")

    assert in_handler(target._lock, call) and not part.closed
    call()
    assert part.closed


def test_a_lock_that_is_free_stays_so(target: Target) -> None:
    assert free_within(target._lock, 0.0) and not target._lock.locked()
    with target._lock:
        assert not free_within(target._lock, -1.0)
    assert not target._lock.locked()
