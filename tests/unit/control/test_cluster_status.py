"""CLUSTER_STATUS: it fits its frame whatever the cluster holds, and a large one is not described for each who asks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from simm.cluster.machine import Cluster
from simm.cluster.nodes import HOST_BYTES_MAX, NAME_BYTES_MAX, WORKERS_MAX, Node, NodeState
from simm.cluster.snapshot import GONE_SHOWN
from simm.constants import FRAME_BYTES_MAX
from simm.control.pages import API_S
from simm.manager import Manager
from simm.net.loop import Loop
from simm.rpc import HEADER_BYTES, reply
from simm.tools import nodes
from simm.wire import messages as M
from simm.wire.auth import Gate
from simm.wire.epoch_messages import EPOCH_NAMESPACES_MAX
from tests.support.machine import join

HUGE = (1 << 64) - 1
ANYBODY = Gate(M.Service.MANAGER, ())


class World:
    """A manager whose clock a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop = Loop(lambda: self.now)
        self.manager = Manager(self.loop)

    def add(
        self, name: str, state: NodeState, *, host: str = "10.0.0.1", changed: float = 0.0, size: int = HUGE
    ) -> None:
        """Let the cluster know a server, whose numbers are all ``size``; one that is away has nothing any more."""
        info = M.WorkerInfo(0, 0, 1, 1, size, name, "/w", host, 65535)
        node = self.manager.cluster.nodes[name] = Node(name, 1, [info], state, changed)
        node.released = not node.serving
        node.loads = [M.WorkerLoad(*[size] * len(M.WorkerLoad._fields))]

    def ask(self) -> Any:
        """What the manager answers. Raises LocalProtocolError if that fits no frame."""
        frame = reply(self.manager._answers.answer(ANYBODY), 1)
        assert len(frame) <= HEADER_BYTES + FRAME_BYTES_MAX
        return json.loads(frame[HEADER_BYTES + 4 :])

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which no server falls silent."""
        self.now += seconds
        self.loop.now = self.now


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with contextlib.closing(made.loop):
        yield made


def long_name(number: int, first: str = "n") -> str:
    return f"{first}{number:05}".ljust(NAME_BYTES_MAX, "-")


def test_issue_servers_that_have_gone_do_not_keep_the_status_from_being_sent(world: World) -> None:
    """With 1,800 of them every `simm status` got an internal error."""
    for number in range(600):
        world.add(long_name(number), NodeState.RUNNING)
    for number in range(2500):
        state = NodeState.DEAD if number % 2 else NodeState.LEFT
        world.add(long_name(number, "x"), state, changed=float(number))
    world.manager.cluster._remap([], changed=True)
    found = world.ask()
    assert len(found["nodes"]) == 600 + GONE_SHOWN
    assert found["nodes_left_out"] == len(world.manager.cluster.nodes) - 600 - GONE_SHOWN > 2000
    assert found["states"]["running"] == 600 and sum(found["states"].values()) == len(world.manager.cluster.nodes)
    names = {node["name"] for node in found["nodes"]}
    assert {long_name(2499, "x"), long_name(0)} <= names and long_name(1000, "x") not in names
    for node in found["nodes"]:
        for worker in node["workers"]:
            worker.update(path="tcp", reason="")
    said = f"{found['nodes_left_out']:,} more data servers are known and not shown"
    assert said in nodes.cluster_table(found) and said in nodes.node_table(found)
    del found["nodes_left_out"]  # of an older manager
    assert "not shown" not in nodes.cluster_table(found)


@pytest.mark.parametrize("letter", ["n", "ñ", "\\", "😀"])
def test_the_largest_cluster_fits(world: World, letter: str) -> None:
    """Longest names, longest hosts, largest numbers, and the longest names of namespaces."""
    size = len(letter.encode())
    host = ("h" * 63 + ".") * 4
    for number in range(WORKERS_MAX):
        name = f"{number:04}" + letter * ((NAME_BYTES_MAX - 4) // size)
        world.add(name, NodeState.RUNNING, host=host[:HOST_BYTES_MAX])
    for number in range(GONE_SHOWN):
        world.add(f"x{number:04}" + letter * ((NAME_BYTES_MAX - 5) // size), NodeState.DEAD, host=host[:HOST_BYTES_MAX])
    for number in range(EPOCH_NAMESPACES_MAX):
        world.manager.cluster.namespaces.advance(f"{number:02}" + "\x01" * 62, 1 << 61)
    world.manager.cluster._remap([], changed=True)
    found = world.ask()
    left_out = found["nodes_left_out"]
    assert 0 < left_out == WORKERS_MAX + GONE_SHOWN - len(found["nodes"]) and len(found["namespace_epochs"]) == 64
    assert found["nodes"] and all(node["state"] == "running" for node in found["nodes"]), "these matter most"
    assert found["nodes"] == sorted(found["nodes"], key=lambda node: node["name"])


def test_those_that_own_nothing_are_left_out_first(world: World) -> None:
    """A cluster of the largest size, with the longest names and usual numbers, fits."""
    for number in range(WORKERS_MAX):
        world.add(long_name(number), NodeState.RUNNING, host="h" * 40, size=1 << 30)
    for number in range(GONE_SHOWN):
        changed = world.now - GONE_SHOWN + number
        world.add(long_name(number, "x"), NodeState.DEAD, host="h" * 40, changed=changed, size=1 << 60)
    world.manager.cluster.nodes[long_name(0, "x")].draining = True
    world.manager.cluster._remap([], changed=True)
    found = world.ask()
    assert any(node["draining"] for node in found["nodes"]), "whoever has ordered it looks for it"
    found["nodes"] = [node for node in found["nodes"] if not node["draining"]]
    gone = [node["name"] for node in found["nodes"] if node["state"] == "dead"]
    assert len(found["nodes"]) == WORKERS_MAX + len(gone) and 0 < len(gone) < GONE_SHOWN
    assert gone == [long_name(number, "x") for number in range(GONE_SHOWN)][-len(gone) :], "the last to go are shown"


def test_issue_a_client_that_asks_again_and_again_costs_little(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[float] = []
    status = Cluster.status

    def counted(cluster: Cluster, now: float) -> dict[str, Any]:
        described.append(now)
        return status(cluster, now)

    monkeypatch.setattr(Cluster, "status", counted)
    manager = world.manager
    for number in range(20):
        manager.counts["heartbeats"] = number
        assert world.ask()["manager"]["heartbeats"] == number, "what costs nothing is of now"
    assert len(described) == 1
    manager._apply(manager.cluster.join(world.now, join("a", 1)))
    found = world.ask()
    assert [node["name"] for node in found["nodes"]] == ["a"] and found["epoch"] == manager.cluster.epoch
    assert len(described) == 2, "the cluster has changed"
    manager._apply(manager.cluster.heartbeat(world.now, "a", 1, 0, [M.WorkerLoad(1, 7, 0, 0)]))
    world.ask()
    manager._apply(manager.cluster.heartbeat(world.now, "a", 1, 0, [M.WorkerLoad(1, 8, 0, 0)]))
    before = len(described)
    assert world.ask()["nodes"][0]["workers"][0]["entries"] == 7 and len(described) == before
    world.pass_time(API_S)
    assert world.ask()["nodes"][0]["workers"][0]["entries"] == 8 and len(described) == before + 1


def test_who_orders_a_drain_sees_it_in_the_next_status(world: World) -> None:
    """`simm node drain` looks at the status before the order, and takes the one after it for an answer."""
    cluster = world.manager.cluster
    for name in "ab":
        world.manager._apply(cluster.join(world.now, join(name, 1)))
        world.manager._apply(cluster.heartbeat(world.now, name, 1))
    for on in (True, False):
        assert [node["draining"] for node in world.ask()["nodes"]] == [False, not on]
        world.manager._apply(cluster.drain(world.now, "b", on))
        assert [node["draining"] for node in world.ask()["nodes"]] == [False, on]


def test_a_manager_that_stops_leading_describes_its_old_cluster_no_more(world: World) -> None:
    world.manager._apply(world.manager.cluster.join(world.now, join("a", 1)))
    assert world.ask()["nodes"]
    world.manager.step_down("a test")
    assert not world.ask()["nodes"]
