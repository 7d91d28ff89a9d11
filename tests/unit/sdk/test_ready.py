"""``wait_ready`` and ``begin``: what they wait for, how long, and in a forked child, whose router they make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simm.client import Client
from simm.sdk import routing
from tests.support.client_values import forked
from tests.support.waiting import WAIT_S, wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Target:
    """A worker whose first attempt goes on until the test ends it."""

    def __init__(self) -> None:
        self.fresh, self.path, self.asked = True, "down", 0

    @property
    def settled(self) -> bool:
        return not self.fresh

    def connect_soon(self) -> None:
        self.asked += 1


def routes_to(*targets: Target) -> routing.Routes:
    router = SimpleNamespace(route=list(targets), targets=dict(enumerate(targets)), deadline_s=WAIT_S)
    return routing.Routes(lambda _timeout_s: router, deadline_s=WAIT_S)  # type: ignore[arg-type,return-value]


def test_the_first_attempts_go_on_beside_a_short_wait() -> None:
    """Each was waited for by itself, for a deadline, whatever the caller's time was."""
    targets = [Target(), Target(), Target()]
    routes = routes_to(*targets)
    assert routes.wait_ready(0.0) is False
    assert [target.asked for target in targets] == [1, 1, 1]
    for target in targets:
        target.fresh, target.path = False, "tcp"
    assert routes.wait_ready(0.0) is True
    targets[1].path = "down"
    assert routes.wait_ready(0.0) is False
    routes.router = None


def test_a_child_is_ready_as_its_parent_was(client: Client) -> None:
    """It made no router, and the time went by."""
    assert client.wait_ready(WAIT_S)
    assert forked(lambda: client.wait_ready(WAIT_S / 4)) == 0


def test_a_child_of_a_closed_client_is_not_ready(client: Client) -> None:
    client.close()
    assert forked(lambda: client.wait_ready(0.0) is False) == 0


def test_a_child_connects_ahead_as_its_parent_did(client: Client) -> None:
    client.begin()

    def connects() -> bool:
        client.begin()
        router: Any = client._router
        wait_until(lambda: router.targets and not any(each.fresh for each in router.targets.values()), "it connects")
        return True

    assert forked(connects) == 0


def test_a_client_that_has_connected_has_tried_its_managers(client: Client) -> None:
    """``begin`` waited a deadline for each of them."""
    router: Any = client._router
    assert router.subscription._tried


def test_the_first_call_of_a_child_has_the_deadline_of_its_client(client: Client) -> None:
    """Made of others, it asked no server: they were left too little of the default."""
    assert client.deadline_s > 6
    assert forked(lambda: client.keep(["k"], 60) == [True]) == 0


def test_a_child_without_a_router_yet_has_its_client_s_patience() -> None:
    routes = routes_to()
    routes._after_fork()
    assert routes.patience()._whole_s == WAIT_S
