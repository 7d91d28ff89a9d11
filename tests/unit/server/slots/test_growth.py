"""Growing step by step, with everything around it replaced: what is undone when, and what is said."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from simm.cluster.assignment import Member
from simm.cluster.nodes import NODE_WORKERS_MAX, WORKERS_MAX, NodeState
from simm.cluster.shard_map import ShardMap, pack_since
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.errors import SegmentError, SimmError
from simm.server.options import DataServerOptions
from simm.server.slots import growth as growth_module
from simm.server.slots.growth import ASK_S, REJOIN_S, SILENT_S, Growth
from simm.wire import messages as M
from simm.wire.messages import MapReply, WorkerInfo

MIB = 1 << 20
NAME, INSTANCE = "gpu", 77


class FakeLoop:
    now = 100.0

    def clock(self) -> float:
        return self.now


class FakeArena:
    beats = 0

    def __init__(self, log: list[str], size: int) -> None:
        self.name, self.size, self.fds, self._log = "simm-0-gpu-1-0000000000000001", size, (), log

    def heartbeat(self) -> int:
        return self.beats

    def unlink(self) -> None:
        self._log.append("unlink")

    def close(self) -> None:
        self._log.append("close")


class FakeProcess:
    """In place of ``Supervised``."""

    def __init__(self, children: Any = None, name: str = "", *_: Any, **__: Any) -> None:
        self.child: Any = None
        self.name, self.log = name, children.log if children is not None else []
        self.retired = False
        self.dead: Any = None
        self.killed = False
        #: When it said something, and what the clock shows.
        self.last_seen = self.now = 0.0

    def start(self, about: str = "") -> None:
        self.child = self
        if self.name.startswith("freeing"):
            self.log.append("hold")

    def retire(self) -> None:
        self.retired = True
        self.ended()

    def start_or_retry(self) -> None:
        self.start()

    def kill(self) -> None:
        self.killed, self.dead = True, self
        if self.name.startswith("freeing"):
            self.log.append("let go")

    def kill_if_silent(self, seconds: float) -> None:
        if self.now - self.last_seen > seconds:
            self.kill()

    def ended(self) -> Any:
        found, self.dead = self.dead, None
        self.child = None if found is not None else self.child
        return found

    def die(self) -> None:
        self.dead = self

    cause = " by SIGKILL"


class FakeSlot:
    def __init__(self, number: int, node: int, segment: Any) -> None:
        self.number, self.node, self.segment = number, node, segment
        self.ready = self.current = False
        self.worker, self.mover, self.streams = FakeProcess(), FakeProcess(), [FakeProcess()]
        self.unix, self.tcp = FakeSocket(), FakeSocket()


class FakeSocket:
    closed = False

    def close(self) -> None:
        self.closed = True


class World:
    """A data server with one worker; it is all that growing knows of one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.loop = FakeLoop()
        self.slots: list[Any] = [FakeSlot(0, 0, FakeArena(self.log, 64 * MIB))]
        self.member = Member(NAME, INSTANCE, [0])
        self.why = ""
        self.asked: list[Callable[[Any, int], None]] = []
        self.joined, self.rejoins = True, 0
        self.stopping = False
        self.endpoint = FakeProcess()
        self.room: SimmError | None = None
        self.fails_to_open: OSError | None = None
        self.membership = self.children = self.endpoints = self.stock = self.opener = self
        self.options = DataServerOptions(NAME, "/run/simm", [0])
        self.nodes: dict[int, int] = {0: 0}
        self.opened: list[FakeSlot] = []
        self.growth = Growth(self)  # type: ignore[arg-type]
        self.take_map([0])

    # what Growth asks of its server and of the server's parts

    def unready(self) -> str:
        return self.why

    def request(self, msg: Any, answer: Callable[[Any, int], None]) -> None:
        assert isinstance(msg, M.ClusterStatus)
        self.asked.append(answer)

    def rejoin(self) -> None:
        self.rejoins += 1

    def require_room(self, size: int, node: int) -> None:
        if self.room is not None:
            raise self.room

    def create(self, number: int, size: int) -> FakeArena:
        self.log.append(f"create {number}")
        return FakeArena(self.log, size)

    def open(self, slot: Any) -> list[Any]:
        if self.fails_to_open is not None:
            raise self.fails_to_open
        self.opened.append(slot)
        return [slot.unix, slot.tcp]

    def start_worker(self, slot: Any) -> None:
        slot.worker.start()

    def send_shards(self, slot: Any) -> None:
        self.log.append(f"shards {slot.number}")

    def share_out(self, shared: list[Any]) -> None:
        self.log.append(f"share {len(shared)}")

    def start_of(self, number: int, *, later: bool = False) -> None:
        assert later

    def remove(self, number: int) -> list[FakeProcess]:
        self.log.append(f"no endpoint {number}")
        self.endpoint.start()
        return [self.endpoint]

    # the course of things

    def take_map(self, numbers: list[int]) -> None:
        """Take a map that lists these workers of ours."""
        epoch = self.member.epoch + 1
        workers = [WorkerInfo(number, 0, 1, INSTANCE, 1, NAME, "", "h", 1) for number in numbers]
        since = pack_since(array("Q", [1] * SHARD_COUNT))
        owners = [0 if workers else NO_OWNER] * SHARD_COUNT
        reply = MapReply(epoch, 1, workers, array("H", owners).tobytes(), (), since)
        assert self.member.take_map(ShardMap(reply)) is not None

    def manager_says(self, **changes: Any) -> None:
        status = {"rebuilding": False, "nodes": [{"name": NAME, "draining": False, "workers": [{}]}], **changes}
        self.asked.pop()(M.StatsReply(json.dumps(status).encode()), 0)

    def populated(self, **said: Any) -> None:
        self.growth._on_populated(M.StatsReply(json.dumps(said).encode()), 0)

    def to(self, state: str) -> World:
        """Go on until this state."""
        steps: dict[str, Callable[[], object]] = {
            "asking": lambda: self.growth.order(str(32 * MIB)), "populating": self.manager_says,
            "starting": lambda: self.populated(end=""), "joining": self._up, "done": self._listed,
        }  # fmt: skip
        for name, step in steps.items():
            step()
            assert self.growth.state == name, self.growth.text()
            if name == state:
                return self
        raise AssertionError(state)

    def _up(self) -> None:
        self.opened[-1].ready = self.opened[-1].current = True
        self.growth.tick()

    def _listed(self) -> None:
        self.take_map(list(self.member.workers))
        self.growth.tick()

    def assert_undone(self, why: str) -> None:
        assert self.growth.state == "failed" and why in self.growth.text(), self.growth.text()
        assert "nothing else has changed" in self.growth.text()
        assert [slot.number for slot in self.slots] == [0] and self.member.workers == (0,)
        assert self.log.count("create 1") == self.log.count("unlink") == self.log.count("close")
        assert not self.growth.arenas and not self.growth.busy
        for slot in self.opened:
            processes = [slot.worker, slot.mover, *slot.streams]
            assert not any(process.child for process in processes) and slot.unix.closed and slot.tcp.closed
            assert all(process.retired for process in processes), "none is tried again"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    def end(children: list[Any], _seconds: float) -> None:
        for child in children:
            child.kill()

    monkeypatch.setattr(growth_module, "Supervised", FakeProcess)
    monkeypatch.setattr(growth_module, "WorkerSlot", FakeSlot)
    monkeypatch.setattr(growth_module, "end_children", end)
    monkeypatch.setattr(growth_module.segments, "store_closed", lambda _name: None)
    return World()


def test_from_the_order_to_the_map_that_names_the_worker(world: World) -> None:
    growth = world.growth
    assert growth.order("")["state"] == "none" and "not been asked" in growth.order("")["text"]
    said = growth.order(f"{32 * MIB} 0")
    assert said["state"] == "asking" and "worker 1 with 32.0 MiB on node 0 is to be added" in said["text"]
    world.manager_says()
    world.populated(done=8 * MIB)
    assert "8.0 MiB of its memory" in growth.order("")["text"] and len(growth.arenas) == 1
    world.populated(end="")
    assert growth.state == "starting" and world.member.workers == (0, 1)
    assert [slot.number for slot in world.slots] == [0], "nothing that serves knows of it yet"
    growth.tick()
    assert growth.state == "starting" and not world.rejoins, "not before it has answered, and taken the map"
    slot = world.opened[0]
    slot.ready = slot.current = True
    growth.tick()
    assert [each.number for each in world.slots] == [0, 1] and world.rejoins == 1 and not growth.arenas
    assert "shards 1" in world.log and "share 2" in world.log and slot.streams[0].child
    growth.tick()
    assert growth.state == "joining"
    world.take_map([0, 1])
    growth.tick()
    assert growth.report()["workers"] == 2 and growth.report()["memory_bytes"] == 96 * MIB
    assert growth.state == "done" and "2 workers and 96.0 MiB" in growth.text()
    growth.stop()
    assert "unlink" not in world.log and growth.state == "done"
    assert growth.order(str(16 * MIB))["worker"] == 2, "it can grow again"


@pytest.mark.parametrize(
    ("text", "why"),
    [("0", "name the memory to add"), ("1K", "name the memory to add"), ("x", "no size"), ("64M 99", "no node 99"),
     ("64M x", "not a list of nodes")],
)  # fmt: skip
def test_an_order_that_makes_no_sense(world: World, text: str, why: str) -> None:
    with pytest.raises(SimmError, match=why):
        world.growth.order(text)
    assert world.growth.state == "" and not world.log and not world.asked


def test_when_it_cannot_grow(world: World) -> None:
    world.why = "stopping"
    with pytest.raises(SimmError, match="cannot grow now: stopping"):
        world.growth.order("64M")
    world.why, world.joined = "", False
    with pytest.raises(SimmError, match="no manager answers"):
        world.growth.order("64M")
    world.joined, world.room = True, SegmentError("only 1 MiB is free")
    with pytest.raises(SimmError, match="only 1 MiB"):
        world.growth.order("64M")
    world.room, world.slots[0].number = None, NODE_WORKERS_MAX - 1
    with pytest.raises(SimmError, match="at most 64 workers"):
        world.growth.order("64M")
    world.slots[0].number = 0
    assert not world.log
    for state in ("asking", "populating", "starting", "joining"):
        with pytest.raises(SimmError, match="grows already: worker 1"):
            World.to(other := World(), state).growth.order("64M")
        assert other.growth.state == state


@pytest.mark.parametrize(
    ("status", "why"),
    [({"rebuilding": True}, "collecting the map"),
     ({"nodes": [{"name": NAME, "draining": True, "workers": []}]}, "simm node resume gpu"),
     ({"nodes": [{"name": "x", "draining": True, "workers": [{}] * WORKERS_MAX}]}, "at most 1500 workers"),
     ({"nodes": None}, "cannot be read")],
)  # fmt: skip
def test_a_manager_that_would_not_take_it(world: World, status: dict[str, Any], why: str) -> None:
    world.to("asking").manager_says(**status)
    world.assert_undone(why)
    assert not world.log, "no memory was touched"


def test_issue_servers_that_have_gone_take_no_room(world: World) -> None:
    """A manager remembers them for a day. It refused every one of a cluster of 8 workers, for 187 clean stops."""
    own = {"name": NAME, "state": "running", "draining": False, "workers": [{}]}
    other = {"name": "x", "draining": False, "workers": [{}] * (WORKERS_MAX - 1)}
    gone = [{**other, "state": state.value} for state in (NodeState.LEFT, NodeState.DEAD)]
    world.to("asking").manager_says(nodes=[own, *gone])
    assert world.growth.state == "populating", world.growth.text()
    world.growth.stop()
    for state in NodeState:
        if state not in (NodeState.LEFT, NodeState.DEAD):
            world.to("asking").manager_says(nodes=[own, {**other, "state": state.value}])
            assert "at most 1500 workers" in world.growth.text(), state


def test_a_manager_that_says_no_or_nothing(world: World) -> None:
    world.to("asking").asked.pop()(M.Error("not \x1b[31mnow"), 4)
    world.assert_undone("not")
    assert "\x1b" not in world.growth.text()
    world.to("asking")
    world.loop.now += ASK_S + 1
    world.growth.tick()
    world.assert_undone("does not answer")
    world.manager_says()
    world.assert_undone("does not answer")


def test_no_room_once_the_manager_has_answered(world: World) -> None:
    world.to("asking").room = SegmentError("only 1 MiB is free")
    world.manager_says()
    world.assert_undone("only 1 MiB is free")


def test_faulting_in_that_fails(world: World) -> None:
    world.to("populating").populated(end="no memory on node 0")
    world.assert_undone("no memory on node 0")
    process = world.to("populating").growth._populate
    assert isinstance(process, FakeProcess)
    process.die()
    world.growth.tick()
    world.assert_undone("died by SIGKILL")
    world.populated(end="")
    world.assert_undone("died by SIGKILL")


def test_a_worker_that_does_not_start(world: World) -> None:
    world.to("populating").fails_to_open = OSError(98, "Address already in use")
    world.populated(end="")
    world.assert_undone("Address already in use")
    world.fails_to_open = None
    world.to("starting").opened[-1].worker.die()
    world.growth.tick()
    world.assert_undone("its worker died by SIGKILL")
    assert "no endpoint 1" in world.log


def test_issue_a_process_that_hangs_while_its_memory_is_faulted_in_is_ended(world: World) -> None:
    """Nothing ended it, and every later order was refused: it grows already."""
    process = world.to("populating").growth._populate
    assert isinstance(process, FakeProcess)
    process.now = SILENT_S
    world.growth.tick()
    assert world.growth.state == "populating" and not process.killed
    process.now += 1.0
    world.growth.tick()
    world.assert_undone("died by SIGKILL")
    world.to("done")


@pytest.mark.parametrize("answered", [False, True])
def test_issue_a_new_worker_that_hangs_is_ended(world: World, answered: bool) -> None:
    slot = world.to("starting").opened[-1]
    slot.ready = answered
    for _ in range(5):
        world.loop.now += SILENT_S
        slot.worker.now, slot.segment.beats = world.loop.now, slot.segment.beats + 1
        world.growth.tick()
    assert world.growth.state == "starting" and not slot.worker.killed, "it lays a large arena out"
    slot.worker.now += SILENT_S + 1
    world.growth.tick()
    world.assert_undone("its worker died by SIGKILL")
    world.to("done")


def test_issue_what_the_kernel_takes_apart_is_reaped_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor waited for it, without heartbeats. The endpoint ends with the others."""
    world.to("joining")
    asked: list[Any] = []
    monkeypatch.setattr(growth_module, "end_children", lambda children, _seconds: asked.extend(children))
    assert world.growth.refused("full") and world.growth.state == "failed"
    slot = world.opened[-1]
    started = [world.endpoint, slot.worker, *slot.streams]
    assert asked == started and all(process.child and process.retired for process in started)
    world.growth.tick()
    for process in started:
        process.die()
    world.growth.tick()
    world.assert_undone("full")
    assert world.endpoint.child is None


def test_a_join_that_is_refused(world: World) -> None:
    assert not world.growth.refused("full"), "it is no worker that was added"
    assert world.to("joining").growth.refused("full")
    world.assert_undone("the manager has refused it: full")
    assert world.log[-1] == "share 0", "the others' parts of quotas are as before"
    assert world.to("done").slots[-1].number == 1 and not world.growth.refused("full"), "it is one of all by now"


def test_it_waits_for_a_map_that_lists_it(world: World) -> None:
    """A map without this server at all does not list the worker either: the JOIN may still be refused."""
    world.to("starting").take_map([])
    world._up()
    for _ in range(2):
        world.growth.tick()
    assert world.growth.state == "joining"
    assert world.growth.refused("full")
    world.assert_undone("full")


@pytest.mark.parametrize("stopping", [False, True])
def test_another_process_gives_the_pages_back(world: World, stopping: bool) -> None:
    """Whoever closes a TiB last is busy for minutes: not the supervisor, unless it ends."""
    world.to("starting").stopping = stopping
    world.growth.stop()
    order = [each for each in world.log if each in ("hold", "unlink", "close", "let go")]
    assert order == ["unlink", "close", "let go"] if stopping else ["hold", "unlink", "close", "let go"]


@pytest.mark.parametrize("state", ["asking", "populating", "starting", "joining"])
def test_a_server_that_stops(world: World, state: str) -> None:
    """What its slots do not have yet is gone; the rest is the server's."""
    world.to(state).growth.stop()
    kept = state == "joining"
    assert len(world.slots) == 1 + kept and ("unlink" in world.log) == ("create 1" in world.log and not kept)
    assert not world.growth.busy


def test_a_map_that_lacks_a_worker(world: World) -> None:
    """The manager has an older state: the server joins again, now and then, until the map has it."""
    world.to("done")
    for _ in range(3):
        world.growth.tick()
    assert world.rejoins == 1, "the positive control: the map has both"
    world.loop.now += REJOIN_S + 1
    world.take_map([0])
    for _ in range(3):
        world.growth.tick()
    assert world.rejoins == 2
    world.loop.now += REJOIN_S + 1
    world.joined = False
    world.growth.tick()
    assert world.rejoins == 2, "it joins anyway"
    world.joined = True
    world.growth.tick()
    assert world.rejoins == 3
    world.loop.now += REJOIN_S + 1
    world.take_map([0, 1])
    world.growth.tick()
    assert world.rejoins == 3
