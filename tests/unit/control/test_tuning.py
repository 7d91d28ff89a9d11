"""The manager's settings at run time: who may change them, and that the cluster follows."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.tokens import TokenRole
from simm.control import tuning as module
from simm.control.state_file import StateFile
from simm.control.tuning import Tuning
from simm.manager import Manager
from simm.net.loop import Loop
from simm.rpc import OPCODES
from simm.wire import messages as M
from simm.wire.access import fault_of_role
from simm.wire.admin_messages import AskNodeSettings, AskSettings, OrderSettings, SettingsDone
from simm.wire.messages import Status
from simm.wire.trace_messages import AskTrace, OrderTrace


@pytest.fixture
def manager() -> Iterator[Manager]:
    level = logging.getLogger("simm").level
    made = Manager(Loop())
    yield made
    made.loop.close()
    logging.getLogger("simm").setLevel(level)


def test_the_cluster_takes_a_new_value(manager: Manager) -> None:
    tuning = manager._tuning
    for name, value in (("moves_at_once", "7"), ("grace_ms", "2s"), ("restart_grace_ms", "60000")):
        answer, status = tuning.ask(AskSettings(name, value))
        assert status == Status.OK and isinstance(answer, M.StatsReply)
    timing = manager.cluster.timing
    assert (timing.moves_at_once, timing.grace_s, timing.restart_grace_s) == (7, 2.0, 60.0)
    assert manager.timing is timing, "also for the next term"
    tuning.ask(AskSettings("log_level", "error"))
    assert logging.getLogger("simm").level == logging.ERROR and manager.cluster.timing.moves_at_once == 7
    rows = {row["name"]: row for row in json.loads(tuning.ask(AskSettings("", ""))[0].json)}
    assert rows["moves_at_once"]["value"] == "7" and rows["moves_at_once"]["started_with"] == "2048"
    answer, status = tuning.ask(AskSettings("moves_at_once", "0"))
    assert status == Status.BAD_REQUEST and "moves_at_once" in answer.text and manager.cluster.timing.moves_at_once == 7


@pytest.mark.parametrize("kind", [AskSettings, AskNodeSettings])
def test_it_takes_an_admin(kind: type) -> None:
    assert all(fault_of_role(OPCODES[kind], role, "x") for role in (TokenRole.CLIENT, TokenRole.SERVER))
    assert not fault_of_role(OPCODES[kind], TokenRole.ADMIN, "x")


class FakePeer:
    """What a peer is told."""

    def __init__(self, orders: bool = True) -> None:
        self.context = SimpleNamespace(orders=orders)
        self.closed = False
        self.told: list[Any] = []

    def push(self, msg: Any) -> None:
        self.told.append(msg)

    def send_message(self, msg: Any, number: int) -> None:
        self.told.append((number, msg))

    def send_error(self, number: int, status: int, text: str) -> None:
        self.told.append((number, status, text))


class Relay:
    def __init__(self, manager: Manager) -> None:
        self.timers: list[Callable[[], None]] = []
        self.servers = {"a": FakePeer(), "old": FakePeer(orders=False)}
        loop: Any = SimpleNamespace(call_later=lambda _seconds, call: self.timers.append(call))
        self.tuning = Tuning(manager, loop, self.servers.get, set())  # type: ignore[arg-type]
        self.tool: Any = FakePeer()

    def ask(self, node: str = "a", number: int = 9) -> None:
        self.tuning.on_message(self.tool, number, AskNodeSettings(node, "poll_us", "7"))

    def answer(self, peer: Any, order: int, status: int = 0, json: bytes = b"[]") -> None:
        self.tuning.on_message(peer, 1, SettingsDone(order, status, json))


def test_an_order_reaches_the_data_server_and_its_answer_the_admin(manager: Manager) -> None:
    relay = Relay(manager)
    server = relay.servers["a"]
    relay.ask()
    assert server.told == [OrderSettings(1, "poll_us", "7")] and not relay.tool.told
    relay.answer(server, 1, json=b"[1]")
    assert relay.tool.told == [(9, M.StatsReply(b"[1]"))] and server.told[-1] == (1, M.Done(1))
    relay.answer(server, 1)
    relay.timers.pop(0)()
    assert len(relay.tool.told) == 1, "one answer, whatever comes later"
    relay.ask(number=10)
    relay.answer(server, 2, 5, b"no\x1b[31m\xff")
    assert relay.tool.told[-1][:2] == (10, Status.BAD_REQUEST) and relay.tool.told[-1][2].isprintable()


def test_no_other_server_answers_an_order(manager: Manager) -> None:
    relay = Relay(manager)
    relay.ask()
    relay.answer(FakePeer(), 1)
    assert not relay.tool.told
    relay.timers.pop()()
    assert relay.tool.told[-1][:2] == (9, Status.UNAVAILABLE)


def test_orders_that_cannot_be_are_refused(manager: Manager) -> None:
    relay = Relay(manager)
    relay.ask("none\x1b")
    assert relay.tool.told[-1][:2] == (9, Status.UNKNOWN_NODE) and relay.tool.told[-1][2].isprintable()
    relay.ask("old")
    assert relay.tool.told[-1][1] == Status.UNAVAILABLE and not relay.servers["old"].told, "it would close the line"
    for _ in range(module.ORDERS_MAX):
        relay.ask()
    told = len(relay.tool.told)
    relay.ask()
    assert len(relay.tool.told) == told + 1, "bounded"
    relay.tool.closed = True
    for timer in relay.timers:
        timer()
    assert len(relay.tool.told) == told + 1 and not relay.tuning._orders


def test_the_next_manager_knows_what_all_clients_trace(tmp_path: Path) -> None:
    tool: Any = FakePeer()
    tool.send_verdict = lambda *said: tool.told.append(said)
    follower: Any = FakePeer()
    follower.context.traces = True
    with contextlib.closing(StateFile(tmp_path, "manager")) as store, contextlib.closing(Loop()) as loop:
        manager = Manager(loop, store=store)
        manager._tuning.on_message(tool, 3, AskTrace(7, 0, 60))
        assert tool.told == [(M.Done(0), Status.OK, 3)]
        following = Manager(loop, store=store)
        following._tuning.traces.greet(follower)
        assert [type(each) for each in follower.told] == [OrderTrace] and follower.told[0].ratio == 7
        following._tuning.on_message(tool, 4, AskTrace(0, 0, 0))
        Manager(loop, store=store)._tuning.traces.greet(follower)
        assert follower.told[1:] == [OrderTrace(0, 0, 0)], "its end, too"
