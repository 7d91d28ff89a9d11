"""Calls that wake a client's threads or wait for them, interrupted anywhere: nothing hangs then, and no thread ends.

A ``threading.Event`` takes its lock in Python functions: what a signal's handler raised there left it taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simm.config.client_options import ClientOptions
from simm.sdk.manager_link import Subscription
from simm.sdk.routing import Router
from tests.support.ended import ended
from tests.support.interrupts import everywhere
from tests.support.waiting import WAIT_S, wait_until

#: Nobody listens there.
NOBODY = ("127.0.0.1", 1)
MODULES = ("simm.sdk.routing", "simm.sdk.manager_link", "simm.host.threads", "threading")


class Routers:
    """Makes routers without a manager, and counts the turns of their background threads."""

    def __init__(self) -> None:
        self.turns = 0
        self.made: list[Router] = []

    def __call__(self) -> Router:
        self.made.append(Router(ClientOptions("{}:{}".format(*NOBODY), "n", "shm", 1.0), None, tick=self._turn))
        return self.made[-1]

    def _turn(self) -> None:
        self.turns += 1


@pytest.fixture
def routers() -> Iterator[Routers]:
    made = Routers()
    yield made
    for each in made.made:
        assert ended(each.close)


def alive(router: Router) -> list[str]:
    threads = [router._thread, router.subscription._thread]
    return [each.name for each in threads if each is not None and each.is_alive()]


@pytest.mark.parametrize("ahead", [False, True])
def test_issue_an_interrupted_wake_up_stops_no_thread(routers: Routers, ahead: bool) -> None:
    """It left a lock taken: the background thread did nothing any more, and the next operation that failed hung."""
    router = routers()

    def check() -> None:
        before = routers.turns
        assert ended(router.wake), "it hangs"
        wait_until(lambda: routers.turns > before, "the thread goes on")

    assert everywhere(router.connect_ahead if ahead else router.wake, check, MODULES) > 2


def test_issue_a_close_after_an_interrupted_one_ends(routers: Routers) -> None:
    routers()

    def check() -> None:
        router = routers.made.pop()
        assert ended(router.close), "it hangs"
        assert router._over
        wait_until(lambda: not alive(router), lambda: f"{alive(router)} go on")
        routers()

    assert everywhere(lambda: routers.made[-1].close(), check, MODULES) > 10


def test_issue_an_interrupted_wait_for_the_first_round_stops_no_thread() -> None:
    """The thread that follows the manager could not say that the round was over, and followed nothing."""
    made: list[Subscription] = []

    def begin() -> None:
        made.append(Subscription([NOBODY], 1.0, "", lambda _map: True))

    def check() -> None:
        subscription = made.pop()
        subscription.start()
        wait_until(lambda: subscription._tried, "its thread has ended the round")
        assert ended(subscription.close), "it hangs"
        subscription.join(WAIT_S)
        begin()

    begin()
    assert everywhere(lambda: made[-1].await_first_round(0.001), check, MODULES) > 3
    made.pop().close()
