"""Traces of a whole cluster: who may ask, whom the manager tells, and what a client does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.tokens import TokenRole
from simm.constants import TRACE_S_MAX
from simm.control import traces as module
from simm.control.traces import ClusterTraces
from simm.errors import RemoteProtocolError
from simm.rpc import OPCODES
from simm.sdk import manager_link
from simm.sdk.manager_link import Subscription
from simm.wire import messages as M
from simm.wire.access import fault_of_role
from simm.wire.messages import Status
from simm.wire.trace_messages import AskTrace, OrderTrace, fault_of


class FakePeer:
    def __init__(self, traces: bool = True) -> None:
        self.context = SimpleNamespace(traces=traces)
        self.closed = False
        self.told: list[Any] = []

    def push(self, msg: Any) -> None:
        self.told.append(msg)


class World:
    """The traces of a cluster whose clock stands still."""

    def __init__(self, state: Any = None, day: float = 1e9) -> None:
        self.now = 100.0
        self.day = day
        self.timers: list[Callable[[], None]] = []
        loop: Any = SimpleNamespace(
            clock=lambda: self.now, call_later=lambda _seconds, callback: self.timers.append(callback)
        )
        self.peers: Any = set()
        self.traces = ClusterTraces(loop, self.peers, lambda: self.day + self.now)
        self.traces.take_state(state)

    def join(self, traces: bool = True) -> FakePeer:
        peer = FakePeer(traces)
        self.peers.add(peer)
        self.traces.greet(peer)  # type: ignore[arg-type]
        return peer


def test_an_admin_only() -> None:
    opcode = OPCODES[AskTrace]
    assert all(fault_of_role(opcode, role, "x") for role in (TokenRole.CLIENT, TokenRole.SERVER))
    assert not fault_of_role(opcode, TokenRole.ADMIN, "x")


def test_clients_hear_of_it_those_that_come_later_too_until_it_is_over() -> None:
    world = World()
    first, old = world.join(), world.join(traces=False)
    assert not first.told
    assert world.traces.ask(AskTrace(10_000, 20, 60)) == (M.Done(1), Status.OK)
    assert first.told == [OrderTrace(10_000, 20, 60)] and not old.told, "older versions would close the line"
    world.now += 30.5
    assert world.join().told == [OrderTrace(10_000, 20, 30)] and not world.join(traces=False).told
    world.now += 30
    assert not world.join().told, "it has ended by itself"
    world.traces.ask(AskTrace(10_000, 20, 60))
    assert world.traces.ask(AskTrace(0, 0, 0))[0].items == 3
    assert first.told[-1] == OrderTrace(0, 0, 0)
    assert world.join().told == [OrderTrace(0, 0, 0)], "it may have been told of the trace, and not of its end"
    world.now += 60
    assert not world.join().told, "no client can trace any more"


def stored(world: World) -> Any:
    """Return the state that another manager loads."""
    return json.loads(json.dumps({**world.traces.to_state(), "cluster": {}}))


def test_the_next_manager_goes_on_with_a_trace_until_its_time() -> None:
    world = World()
    assert not world.traces.to_state(), "nothing was asked for"
    world.traces.ask(AskTrace(10_000, 20, 60))
    state = stored(world)
    following = World(state, day=1e9 + 30)  # another host's clocks, half a minute later
    assert following.join().told == [OrderTrace(10_000, 20, 30)]
    assert following.traces.to_state()["trace"] == state["trace"], "its end is what it was"
    following.now += 30
    assert not following.join().told and not following.traces.to_state()
    assert not World(state, day=1e9 + 60).join().told and not World(None).join().told


def test_the_next_manager_ends_a_trace_also_where_the_end_was_not_heard() -> None:
    world = World()
    world.traces.ask(AskTrace(10_000, 20, 60))
    following = World(stored(world))
    peer = following.join()
    assert following.traces.ask(AskTrace(0, 0, 0))[0].items == 1 and peer.told[-1] == OrderTrace(0, 0, 0)
    third = World(stored(following), day=1e9 + 59)
    assert third.join().told == [OrderTrace(0, 0, 0)]
    third.now += 1
    assert not third.join().told


@pytest.mark.parametrize("row", [
    7, [], [1, 2, 3], [1, 2, "3", 4.0], [True, 2, 3.0, 4.0], [-1, 0, 1e9 + 110, 1e9 + 110], [1, -1, 2e9, 2e9],
    [1_000_001, 0, 2e9, 2e9], [1, 3_600_001, 2e9, 2e9], [1, 1, float("nan"), 2e9], [1, 1, 2e9, float("inf")],
])  # fmt: skip
def test_a_stored_trace_that_cannot_be_is_left_out(row: Any) -> None:
    world = World({"trace": row})
    told = world.join().told
    assert all(not fault_of(order, TRACE_S_MAX) for order in told)
    assert not told or row[:2] == [1, 1], "control: what can be is not left out"


def test_a_clock_that_was_set_makes_no_trace_longer_than_any_can_be() -> None:
    assert World({"trace": [1, 0, 5e9, 5e9]}).join().told == [OrderTrace(1, 0, TRACE_S_MAX)]


def test_many_are_told_in_turns_and_the_last_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLD_PER_TURN", 2)
    world = World()
    peers = [world.join() for _ in range(5)]
    world.traces.ask(AskTrace(1, 0, 60))
    assert sum(len(peer.told) for peer in peers) == 2
    next(peer for peer in peers if not peer.told).closed = True
    world.traces.ask(AskTrace(0, 0, 0))
    while world.timers:
        assert len(world.timers) == 1, "one row of turns"
        world.timers.pop()()
    assert all(peer.told[-1] == OrderTrace(0, 0, 0) for peer in peers if not peer.closed)
    assert not any(peer.told for peer in peers if peer.closed)


@pytest.mark.parametrize("wrong", [(1_000_001, 0, 1), (0, 3_600_001, 1), (0, 0, TRACE_S_MAX + 1)])
def test_what_cannot_be_is_refused_by_both(wrong: tuple[int, int, int], subscription: Subscription) -> None:
    world = World()
    peer = world.join()
    answer, status = world.traces.ask(AskTrace(*wrong))
    assert status == Status.BAD_REQUEST and str(TRACE_S_MAX) in answer.text and not peer.told
    with pytest.raises(RemoteProtocolError, match="what cannot be"):
        subscription._pushed(OrderTrace(*wrong))
    assert subscription.traces is None
    world.traces.ask(AskTrace(1_000_000, 3_600_000, TRACE_S_MAX))
    subscription._pushed(peer.told.pop())
    assert subscription.traces is not None, "control: the most that can be is taken by both"


@pytest.fixture
def subscription() -> Iterator[Subscription]:
    made = Subscription([("127.0.0.1", 1)], 1.0, "", lambda _msg: False)
    yield made
    made.close()


def test_a_subscription_keeps_what_is_asked_for_and_until_when(
    subscription: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_link, "time", SimpleNamespace(monotonic=lambda: 50.0))
    subscription._pushed(OrderTrace(7, 0, 60))
    assert subscription.traces == (OrderTrace(7, 0, 60), 110.0)
    subscription._pushed(OrderTrace(0, 0, 0))
    assert subscription.traces == (OrderTrace(0, 0, 0), 50.0)
