"""A data server's session with managers that lead, stand by, forget, say nothing, or are not there."""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm import membership as membership_module
from simm import messages as M
from simm.constants import SHARD_COUNT
from simm.loop import Loop
from simm.member import FENCE, Member
from simm.membership import Membership
from simm.messages import MapReply, Status, WorkerInfo
from simm.rpc import Connection, Flag, decode, encode, reply
from simm.shardmap import ShardMap, pack_since

INFO = WorkerInfo(0, 0, 1, 7, 1 << 30, "n", "", "127.0.0.1", 1)


def make_map(epoch: int, since: int = 1) -> MapReply:
    owners = array("H", [0] * SHARD_COUNT)
    return MapReply(epoch, 5, [INFO], owners.tobytes(), (), pack_since(array("Q", [since] * SHARD_COUNT)))


class Manager:
    """Answers as told: ``answers`` maps a message's type to (answer, status), None for silence."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.heard: list[Any] = []
        self.answers: dict[type, Any] = {
            M.Hello: (M.Welcome(1, 0, 0, 0, 0, 0, 0, ""), 0),
            M.Join: (M.Joined(3, 50, 0), 0),
            M.Heartbeat: (M.HeartbeatAck(3), 0),
            M.MapGet: (make_map(3), 0),
            M.MapOffer: (M.Done(1), 0),
            M.Moved: (M.Done(1), 0),
            M.Leave: (M.Done(1), 0),
        }
        self.links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock = self.listener.accept()[0]
                self.links.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        conn = Connection()
        with contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                conn.receive_data(data)
                while (frame := conn.next_frame()) is not None:
                    msg = decode(frame)
                    self.heard.append(msg)
                    said = self.answers[type(msg)]
                    if said is not None:
                        sock.sendall(reply(said[0], frame.request_id, said[1]))

    def push(self, msg: Any) -> None:
        self.links[-1].sendall(encode(msg, 0, flags=Flag.PUSH))

    def of(self, kind: type) -> list[Any]:
        return [msg for msg in self.heard if isinstance(msg, kind)]

    def hang_up(self) -> None:
        for sock in self.links:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.links.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.hang_up()


class House:
    """A data server without anything in it; drives the loop."""

    def __init__(self, managers: list[tuple[str, int]], **arguments: Any) -> None:
        self.loop = Loop()
        self.member = Member("n", 7, [0])
        self.up = True
        self.orders: list[M.Shards] = []
        self.gave_up = ""
        self.reports: list[M.Moved] = []
        self.resolved: dict[str, str] = {}
        self.membership = Membership(self.loop, self.member, self, managers, **arguments)
        self.membership.start()

    def infos(self) -> list[WorkerInfo] | None:
        return [INFO] if self.up else None

    def taken(self) -> int:
        return self.member.epoch

    def loads(self) -> list[M.WorkerLoad]:
        return [M.WorkerLoad(1, 2, 3, 4)]

    def moved(self) -> list[M.Moved]:
        return self.reports

    def on_map(self) -> None:
        self.orders.append(self.member.order(0))

    def on_joined(self) -> None:
        pass

    def give_up(self, why: str) -> None:
        self.gave_up = why

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        self.loop.call_later(0.0, lambda: callback(self.resolved.get(host, "")))

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> None:
        end = self.loop.clock() + timeout_s
        while not condition():
            assert self.loop.clock() < end, f"not in time: {what}; {self.membership!r}"
            self.loop.run_once(0.02)


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    yield made
    made.close()


@pytest.fixture
def make_house() -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(*managers: Manager | tuple[str, int], **arguments: Any) -> House:
        house = House([each.address if isinstance(each, Manager) else each for each in managers], **arguments)
        made.append(house)
        return house

    yield make
    for house in made:
        house.loop.close()


def nobody() -> tuple[str, int]:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        found: tuple[str, int] = server.getsockname()[:2]
        return found


def test_joins_beats_and_takes_maps(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager, token="a token of ours")
    house.until(lambda: house.orders and manager.of(M.Heartbeat), "map and heartbeat")
    assert manager.of(M.Hello)[0].token == "a token of ours"
    assert manager.of(M.Join) == [M.Join(7, 0, "n", [INFO], 0)]
    assert manager.of(M.Heartbeat)[-1].loads == house.loads()
    assert house.member.epoch == 3 and len(house.orders) == 1
    manager.push(make_map(4))
    house.until(lambda: house.member.epoch == 4, "a pushed map")
    manager.push(make_map(3))
    manager.push(make_map(5))
    house.until(lambda: house.member.epoch == 5, "an old map is passed over")
    assert [order.epoch for order in house.orders] == [3, 4, 5]
    manager.answers[M.MapGet] = (make_map(9), 0)
    manager.answers[M.Heartbeat] = (M.HeartbeatAck(9), 0)
    house.until(lambda: house.member.epoch == 9, "a newer epoch in the ack is asked for")


def test_waits_for_its_workers(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.up = False
    house.until(lambda: manager.of(M.Hello), "HELLO")
    for _ in range(5):
        house.loop.run_once(0.02)
    assert not manager.of(M.Join)
    house.up = True
    house.membership.join()
    house.until(lambda: house.membership.joined, "JOIN")


def test_fenced_at_once_and_until_the_next_map(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    manager.answers[M.Join] = None
    manager.answers[M.Heartbeat] = (M.Error("who?"), int(Status.UNKNOWN_NODE))
    house.until(lambda: house.orders[-1] == FENCE, "the fence")
    house.until(lambda: len(manager.of(M.Join)) == 2, "a second JOIN")
    assert manager.of(M.Join)[1].epoch == 3, "it says which map it has"
    manager.push(make_map(4))
    for _ in range(5):
        house.loop.run_once(0.02)
    assert house.orders[-1] == FENCE, "no map counts before JOINED"
    manager.answers[M.Join] = (M.Joined(3, 50, 0), 0)
    manager.answers[M.Heartbeat] = (M.HeartbeatAck(3), 0)
    manager.hang_up()
    house.until(lambda: house.orders[-1].epoch == 3, "the same map ends the fence")


def test_losing_the_manager_fences_nothing(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    manager.hang_up()
    house.until(lambda: not house.membership.joined, "the loss")
    house.until(lambda: house.membership.joined, "back")
    assert all(order != FENCE for order in house.orders) and len(house.orders) == 1


def test_offers_its_map_to_who_lost_theirs(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    manager.answers[M.Join] = (M.Joined(0, 50, 1), 0)
    manager.answers[M.MapGet] = None
    manager.hang_up()
    house.until(lambda: manager.of(M.MapOffer), "MAP_OFFER")
    offer = ShardMap(manager.of(M.MapOffer)[0])
    assert house.member.map is not None
    assert (offer.epoch, offer.owners, offer.since) == (3, house.member.map.owners, house.member.map.since)

    def asked_behind_it() -> bool:
        kinds = [type(msg) for msg in manager.heard]
        return M.MapGet in kinds[kinds.index(M.MapOffer) :]

    house.until(asked_behind_it, "MAP_GET")
    kinds = [type(msg) for msg in manager.heard]
    second = kinds.index(M.Join, kinds.index(M.Join) + 1)
    assert M.MapGet not in kinds[second : kinds.index(M.MapOffer)], "before it asks for one"


def test_without_a_map_there_is_nothing_to_offer(manager: Manager, make_house: Callable[..., House]) -> None:
    manager.answers[M.Join] = (M.Joined(0, 50, 1), 0)
    house = make_house(manager, warm=True, warm_epoch=41)
    house.until(lambda: house.orders, "a map")
    assert not manager.of(M.MapOffer)
    assert manager.of(M.Join)[0] == M.Join(7, 1, "n", [INFO], 41), "warm, and the arenas' epoch"
    manager.hang_up()
    house.until(lambda: len(manager.of(M.Join)) == 2, "a second JOIN")
    assert (manager.of(M.Join)[1].warm, manager.of(M.Join)[1].epoch) == (0, 41), "warm is how it started, once"


def test_reports_what_moved_with_each_heartbeat(
    manager: Manager, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "MOVED_S", 0.02)
    house = make_house(manager)
    house.reports = [M.Moved(7, 3, "n", 0, b"\1" + bytes(2047))]
    house.until(lambda: len(manager.of(M.Moved)) >= 3, "MOVED again and again")
    house.reports = []
    count = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > count + 1, "heartbeats")
    said = len(manager.of(M.Moved))
    house.until(lambda: len(manager.of(M.Heartbeat)) > count + 3, "heartbeats")
    assert len(manager.of(M.Moved)) == said


def test_tries_the_next_manager(manager: Manager, make_house: Callable[..., House]) -> None:
    """One is not there, one stands by, one leads; and when that changes, it follows."""
    standby = Manager()
    try:
        not_leader = (M.Error("the other one leads"), int(Status.NOT_LEADER))
        standby.answers.update(dict.fromkeys((M.Join, M.Heartbeat, M.MapGet), not_leader))
        house = make_house(nobody(), standby, manager)
        house.until(lambda: house.membership.joined, "the leader")
        assert standby.of(M.Join) and manager.of(M.Join)
        standby.answers[M.Join] = (M.Joined(3, 50, 0), 0)
        standby.answers[M.Heartbeat] = (M.HeartbeatAck(3), 0)
        standby.answers[M.MapGet] = (make_map(3), 0)
        for kind in (M.Join, M.Heartbeat, M.MapGet):
            manager.answers[kind] = not_leader
        house.until(lambda: standby.of(M.Heartbeat), "the new leader")
        assert all(order != FENCE for order in house.orders)
    finally:
        standby.close()


def test_a_manager_that_says_nothing(
    manager: Manager, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "SILENT_S", 0.2)
    mute = Manager()
    try:
        house = make_house(mute, manager)
        house.until(lambda: mute.of(M.Heartbeat), "it is our manager")
        mute.answers = dict.fromkeys(mute.answers)
        house.until(lambda: manager.of(M.Heartbeat), "the other one")
    finally:
        mute.close()


def test_connecting_does_not_hold_the_loop_up(make_house: Callable[..., House]) -> None:
    """A host that answers nothing at all: the loop turns meanwhile."""
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # the backlog is full: further SYNs are dropped
        filler.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            filler.connect(full.getsockname())
    house = make_house(full.getsockname()[:2])
    turns = 0
    for _ in range(20):
        house.loop.run_once(0.005)
        turns += 1
    assert turns == 20 and not house.membership.joined
    for sock in (full, *fillers):
        sock.close()


def test_names_are_resolved(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(("manager.example", manager.address[1]))
    house.until(lambda: house.membership._complained, "a complaint")
    house.resolved["manager.example"] = "127.0.0.1"
    house.until(lambda: house.membership.joined, "JOIN")


def test_gives_up_before_the_first_join_only(make_house: Callable[..., House]) -> None:
    house = make_house(nobody(), join_timeout_s=0.3)
    house.until(lambda: house.gave_up, "giving up")
    assert "not reachable" in house.gave_up and "--manager" in house.gave_up


def test_a_wrong_token_is_final(manager: Manager, make_house: Callable[..., House]) -> None:
    manager.answers[M.Hello] = (M.Error("wrong token"), int(Status.UNAUTHORIZED))
    manager.answers[M.Join] = None
    house = make_house(manager)
    house.until(lambda: house.gave_up, "giving up")
    assert "wrong token" in house.gave_up


@pytest.mark.parametrize("warm", [False, True])
def test_leave(manager: Manager, make_house: Callable[..., House], warm: bool) -> None:
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    assert house.membership.leave(warm=warm)
    house.until(lambda: house.membership.said_all, "its answer")
    assert manager.of(M.Leave) == [M.Leave(7, "n", int(warm))]
    manager.push(make_map(8))
    house.until(lambda: house.member.epoch == 8, "maps still count")
    beats = len(manager.of(M.Heartbeat))
    for _ in range(10):
        house.loop.run_once(0.02)
    assert len(manager.of(M.Heartbeat)) <= beats + 1
    manager.hang_up()
    house.until(lambda: house.membership.peer is None, "the end")
    for _ in range(10):
        house.loop.run_once(0.02)
    assert len(manager.of(M.Join)) == 1, "who has left does not come back"


def test_leave_without_a_manager(make_house: Callable[..., House]) -> None:
    assert not make_house(nobody()).membership.leave(warm=False)


def test_a_map_that_cannot_be(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    manager.push(make_map(6, since=0))
    house.until(lambda: house.membership.peer is None, "the link is closed")
    house.until(lambda: house.membership.joined, "and made again")
    assert house.member.epoch == 3
