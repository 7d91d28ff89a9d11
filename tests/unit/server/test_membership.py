"""A data server's session with managers that lead, stand by, forget, say nothing, or are not there."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from simm.cluster.assignment import DROP_ALL, FENCE
from simm.cluster.shard_map import ShardMap
from simm.rpc import reply
from simm.server import membership as membership_module
from simm.wire import admin_messages as A
from simm.wire import epoch_messages as E
from simm.wire import messages as M
from simm.wire import report_messages as R
from simm.wire.epoch_messages import NamespaceEpoch
from simm.wire.messages import Status
from tests.support.fake_manager import INFO, House, Manager, make_map
from tests.support.waiting import wait_until


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
    manager.token = "a token of ours"
    house = make_house(manager, token="a token of ours")
    house.until(lambda: house.orders and manager.of(M.Heartbeat), "map and heartbeat")
    assert manager.of(M.Prove) and manager.of(M.Hello)[0].token == ""
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


def test_epochs_and_leases(manager: Manager, make_house: Callable[..., House]) -> None:
    manager.answers[E.Epochs] = (M.Done(0), 0)
    house = make_house(manager)
    house.known = [NamespaceEpoch("n", 2)]
    house.until(lambda: manager.of(E.Epochs) and manager.of(M.MapGet), "what it knows")
    assert manager.of(E.Epochs) == [E.Epochs(0, 0, 0, house.known)] and manager.of(M.MapGet)[0].subscribe == 31
    house.until(lambda: house.member.epoch == 3, "a map")
    manager.answers[M.Heartbeat] = (M.HeartbeatAck(3), 0)
    house.until(lambda: house.leases, "a lease: the manager has the same map")
    manager.answers[M.Heartbeat] = (M.HeartbeatAck(2), 0)
    house.until(lambda: len(manager.of(M.Heartbeat)) > 3, "heartbeats")
    house.leases.clear()
    seen = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > seen + 2, "answers with another map")
    assert not house.leases
    manager.answers[M.Heartbeat] = (E.LeaseAck(9, 3), 0)
    house.until(lambda: house.leases, "a lease: no namespace has advanced since the map that is here")
    manager.answers[M.Heartbeat] = (E.LeaseAck(9, 4), 0)
    house.until(lambda: manager.of(M.MapGet)[1:], "a newer epoch in the ack is asked for")
    seen = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > seen + 2, "an answer after the last that extended it")
    house.leases.clear()
    seen = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > seen + 2, "answers that a namespace has advanced")
    assert not house.leases
    house.stored_epoch = 4
    house.until(lambda: house.leases, "a lease: its workers have the epochs, though they have not taken the map over")
    assert manager.of(M.Heartbeat)[-1].epoch == 3, "which acknowledges nothing"
    for epoch, cluster in ((5, 1), (4, 1), (2, 9)):
        manager.push(E.Epochs(epoch, cluster, 1000, []))
    house.until(lambda: house.member.epochs is not None and house.member.epochs.cluster == 9, "epochs")
    house.member.abandon()
    assert house.member.epochs is None


def test_many_servers_do_not_beat_or_come_back_at_the_same_moment(
    manager: Manager, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = make_house(manager)
    house.until(lambda: house.membership.joined, "JOINED")
    delays: list[float] = []
    monkeypatch.setattr(house.loop, "call_later", lambda delay, _callback: delays.append(delay))
    for _ in range(100):
        house.membership._beat()
    beat = house.membership.heartbeat_s
    assert 0.8 * beat <= min(delays) < 0.9 * beat < max(delays) <= beat
    delays.clear()
    for _ in range(100):
        house.membership._lost("its manager has gone")
    assert min(delays) < 0.9 * membership_module.RECONNECT_S and max(delays) > 1.1 * membership_module.RECONNECT_S


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
    manager.answers[M.Heartbeat] = (M.Error("who?"), Status.UNKNOWN_NODE)
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


def test_a_warm_server_says_so_until_it_has_a_map(manager: Manager, make_house: Callable[..., House]) -> None:
    """A manager that dies may not have stored its JOIN: to the next one the arenas are as they were at the start."""
    manager.answers[M.MapGet] = None
    house = make_house(manager, warm=True, warm_epoch=41)
    house.until(lambda: manager.of(M.MapGet), "it has joined")
    manager.hang_up()
    house.until(lambda: len(manager.of(M.Join)) == 2, "a second JOIN")
    assert (manager.of(M.Join)[1].warm, manager.of(M.Join)[1].epoch) == (1, 41)


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
        not_leader = (M.Error("the other one leads"), Status.NOT_LEADER)
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
    mute = Manager()
    try:
        house = make_house(mute, manager)
        house.until(lambda: mute.of(M.Heartbeat), "it is our manager")
        monkeypatch.setattr(membership_module, "SILENT_S", 0.2)
        mute.answers = dict.fromkeys(mute.answers)
        house.until(lambda: manager.of(M.Heartbeat), "the other one")
    finally:
        mute.close()


def test_what_nobody_asked_for_is_no_sign_of_life(
    manager: Manager, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may listen at the address of a manager that is gone, and say anything but what it was asked for."""
    monkeypatch.setattr(membership_module, "SILENT_S", 0.2)
    monkeypatch.setattr(membership_module, "SILENT_BEATS", 0)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as taken:
        house = make_house(listener.getsockname()[:2], manager)
        listener.setblocking(False)
        talkers: list[socket.socket] = []

        def joined() -> bool:
            with contextlib.suppress(BlockingIOError):
                talkers.append(taken.enter_context(listener.accept()[0]))
            for talker in talkers:
                with contextlib.suppress(OSError):
                    talker.send(reply(M.Pong(1), 1 << 30))
            return bool(manager.of(M.Heartbeat))

        house.until(joined, "the other one")
        assert talkers, "it had listened to that one first"


def complained(house: House, reason: str) -> bool:
    """Return whether this was the last trouble with a manager."""
    return reason in house.membership._complained.values()


def test_a_slow_manager_gets_more_time_with_each_connection(
    make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection begins anew: with the same time for all of them the server never joined."""
    monkeypatch.setattr(membership_module, "SILENT_S", 0.1)
    monkeypatch.setattr(membership_module, "SILENT_BEATS", 0)
    mute = Manager()
    try:
        answers, mute.answers = mute.answers, dict.fromkeys(mute.answers)
        house = make_house(mute, join_timeout_s=1000.0)
        for said in ("0.1", "0.2", "0.4"):
            house.until(partial(complained, house, f"silent for {said} s"), said)
        mute.answers = answers
        house.until(lambda: house.membership.joined, "JOIN")
    finally:
        mute.close()


def test_an_answer_that_came_while_the_loop_was_held_up_counts(
    manager: Manager, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the socket when the time is up."""
    house = make_house(manager)
    house.until(lambda: house.membership.joined and not house.membership._pending, "JOINED, and all answered")
    monkeypatch.setattr(membership_module, "SILENT_S", 0.5)
    monkeypatch.setattr(membership_module, "SILENT_BEATS", 0)
    peer = house.membership.peer
    assert peer is not None
    said: list[object] = []

    house.membership.request(M.Ping(0), lambda msg, _: said.append(msg))
    wait_until(lambda: select.select([peer.sock], [], [], 0)[0], "the answer is there")
    monkeypatch.setattr(house.loop, "clock", lambda: time.monotonic() + 60.0)
    house.membership._watch(peer)  # in the same turn of the loop
    wait_until(lambda: (house.loop.run_once(0.02), said)[1], "the answer")
    assert house.membership.peer is peer


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


@pytest.mark.parametrize("back", [True, False])
def test_a_manager_is_missed_from_when_it_was_last_there(
    manager: Manager, make_house: Callable[..., House], back: bool
) -> None:
    """Workers recover their arenas for minutes before the first JOIN. Then the manager's connection closes once."""
    house = make_house(manager, join_timeout_s=1000.0)
    house.up = False
    house.until(lambda: house.membership._greeted, "there is a manager")
    house.membership._started -= 2000.0
    house.until(lambda: house.membership._started > house.loop.clock() - 1000.0, "it is still there")
    if back:
        manager.hang_up()
        house.until(lambda: house.membership.peer is None, "the loss")
        house.up = True
    else:
        manager.close()
        house.membership.join_timeout_s = 0.3
    house.until(lambda: house.membership.joined or house.gave_up, "an end")
    assert bool(house.gave_up) is not back


def test_a_refusal_of_a_manager_that_has_proven_itself_is_final(
    manager: Manager, make_house: Callable[..., House]
) -> None:
    manager.token = "a token of ours"
    manager.answers[M.Hello] = (M.Error("not with this role"), Status.UNAUTHORIZED)
    manager.answers[M.Join] = None
    house = make_house(manager, token="a token of ours")
    house.until(lambda: house.gave_up, "giving up")
    assert "not with this role" in house.gave_up and len(manager.of(M.Hello)) == 1


@pytest.mark.parametrize("token", ["", "a token of ours"])
def test_a_refusal_of_anybody_else_ends_nothing(
    manager: Manager, make_house: Callable[..., House], token: str
) -> None:
    """A process that has taken the port of a manager that is down, until that comes back."""
    normal = dict(manager.answers)
    manager.token = token and "another one"
    manager.answers[M.Hello] = (M.Error("go away"), Status.UNAUTHORIZED)
    manager.answers[M.Join] = None
    house = make_house(manager, token=token)
    house.until(lambda: len(manager.of(M.Auth if token else M.Hello)) >= 3, "it tries again")
    assert not house.gave_up
    manager.token = token
    manager.answers = normal
    house.until(lambda: house.membership.joined, "the manager is back")


@pytest.mark.parametrize("token", ["", "a token of ours"])
def test_a_join_that_is_refused_for_its_rights_says_so(
    manager: Manager, make_house: Callable[..., House], token: str
) -> None:
    """At once if the manager has proven itself; else it is tried again, and the reason is told at the end."""
    manager.token = token
    manager.answers[M.Join] = (M.Error("the token 'rack' may not join as 'n'"), Status.UNAUTHORIZED)
    house = make_house(manager, token=token, join_timeout_s=1000.0)
    if not token:
        house.until(lambda: len(manager.of(M.Join)) > 1, "it tries again")
        house.membership.join_timeout_s = 0.3
    house.until(lambda: house.gave_up, "giving up")
    assert "refused us: the token 'rack' may not join" in house.gave_up
    assert (len(manager.of(M.Join)) == 1) == bool(token)


def test_a_refusal_that_lasts_is_the_reason(manager: Manager, make_house: Callable[..., House]) -> None:
    manager.answers[M.Hello] = (M.Error("wrong token"), Status.UNAUTHORIZED)
    manager.answers[M.Join] = None
    house = make_house(manager, join_timeout_s=1000.0)
    house.until(lambda: len(manager.of(M.Hello)) > 1, "it tries again")
    house.membership.join_timeout_s = 0.3
    house.until(lambda: house.gave_up, "giving up")
    assert "refused us: wrong token" in house.gave_up


def of_another_version(manager: Manager) -> None:
    manager.answers[M.Hello] = (M.Error("peer speaks protocol 2 to 2, this manager 9 to 9"), Status.VERSION)


@pytest.mark.parametrize("token", ["", "a token of ours"])
def test_a_manager_of_another_version_ends_the_start_at_once(
    manager: Manager, make_house: Callable[..., House], token: str
) -> None:
    """It was tried for 30 s before the server said why it does not start."""
    manager.token = token
    of_another_version(manager)
    house = make_house(manager, token=token, join_timeout_s=1000.0)
    house.until(lambda: house.gave_up, "giving up")
    assert "refused us: peer speaks protocol" in house.gave_up and len(manager.of(M.Hello)) == 1


def test_another_manager_may_speak_our_version(manager: Manager, make_house: Callable[..., House]) -> None:
    """While managers are upgraded one by one. It ends when all have said that they do not."""
    other = Manager()
    for each in (manager, other):
        of_another_version(each)
    manager.answers[M.Hello] = (M.Error("go away"), Status.UNAUTHORIZED)
    house = make_house(manager, other, join_timeout_s=1000.0)
    house.until(lambda: len(manager.of(M.Hello)) >= 2 and len(other.of(M.Hello)) >= 2, "it tries both again")
    assert not house.gave_up
    of_another_version(manager)
    house.until(lambda: house.gave_up, "giving up")
    other.close()


def test_a_manager_of_another_user_is_not_believed_about_versions(
    manager: Manager, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever squats the port of a manager that is down ends no data server."""
    monkeypatch.setattr(membership_module, "foreign_server", lambda sock, trusted: "the server is of uid 99")
    of_another_version(manager)
    house = make_house(manager, join_timeout_s=1000.0)
    house.until(lambda: len(manager.of(M.Hello)) >= 3, "it tries again")
    assert not house.gave_up


def test_a_server_that_has_joined_waits_for_the_upgrade(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.membership.joined, "joining")
    normal = dict(manager.answers)
    of_another_version(manager)
    manager.hang_up()
    house.until(lambda: len(manager.of(M.Hello)) >= 3, "it tries again")
    assert not house.gave_up
    manager.answers = normal
    house.until(lambda: house.membership.joined, "the manager is upgraded")


@pytest.mark.parametrize("squatter", ["", "another token than ours"])
def test_a_manager_that_does_not_know_our_token_is_told_nothing(
    manager: Manager, make_house: Callable[..., House], squatter: str
) -> None:
    manager.token = squatter
    house = make_house(manager, token="a token of ours", join_timeout_s=0.3)
    house.until(lambda: house.gave_up, "giving up")
    assert "--token-file" in house.gave_up and {type(msg) for msg in manager.heard} == {M.Auth}


@pytest.mark.parametrize("warm", [False, True])
def test_leave(manager: Manager, make_house: Callable[..., House], warm: bool) -> None:
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    assert house.membership.leave(warm=warm)
    house.until(lambda: house.membership.all_answered, "its answer")
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


# -- which cluster is it? ------------------------------------------------------------------------------


def asking(*managers: tuple[str, int], **arguments: Any) -> House:
    """A server that has found an arena of epoch 41, and has no worker yet."""
    house = House(list(managers), start=False, **arguments)
    house.up = False
    house.membership.find_cluster(41)
    return house


def test_asks_for_the_cluster_and_joins_nothing(manager: Manager) -> None:
    manager.token = "a token of ours"
    house = asking(manager.address, token="a token of ours")
    house.until(lambda: house.membership.found_cluster, "the cluster")
    assert house.membership.found_cluster == 5 and manager.of(M.Prove)
    assert manager.of(M.MapGet) == [M.MapGet(41, 0)], "it names the epoch, and wants no later map"
    assert not manager.of(M.Join) and not house.orders and not house.membership.offered
    house.up = True
    house.membership.warm_cluster = 5
    house.membership.start()
    house.until(lambda: house.orders, "a map")
    assert manager.of(M.Join) == [M.Join(7, 0, "n", [INFO], 0, 5)] and len(manager.of(M.Hello)) == 1
    house.loop.close()


def test_asks_the_one_that_leads(manager: Manager) -> None:
    standby = Manager()
    standby.answers[M.MapGet] = (M.Error("the other one leads"), Status.NOT_LEADER)
    house = asking(nobody(), standby.address, manager.address)
    house.until(lambda: house.membership.found_cluster, "the cluster")
    assert standby.of(M.MapGet) and manager.of(M.MapGet)
    house.loop.close()
    standby.close()


@pytest.mark.full
def test_waits_for_a_manager_that_collects_its_map(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers no MAP_GET until it is done, but PING; a link on which nothing comes is closed."""
    monkeypatch.setattr(membership_module, "SILENT_S", 1.0)
    manager.answers[M.MapGet] = None
    manager.answers[M.Ping] = (M.Pong(0), 0)
    house = asking(manager.address)
    house.until(lambda: manager.of(M.Ping), "a first PING")
    until = house.loop.clock() + 1.5
    house.until(lambda: house.loop.clock() > until, "PINGs beyond its patience")
    assert len(manager.of(M.Hello)) == 1 and house.membership.found_cluster == 0
    manager.push(make_map(3))
    for _ in range(5):
        house.loop.run_once(0.02)
    assert house.membership.found_cluster == 0, "nobody asked for that one"
    manager.answers[M.Ping] = None
    manager.answers[M.MapGet] = (make_map(3), 0)
    house.until(lambda: house.membership.found_cluster, "another link")
    assert len(manager.of(M.Hello)) == 2
    house.loop.close()


@pytest.mark.parametrize("there", [True, False])
def test_gives_up_asking(manager: Manager, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "SILENT_S", 0.1)
    manager.answers[M.MapGet] = None
    manager.answers[M.Ping] = (M.Pong(0), 0)
    house = asking(manager.address if there else nobody(), join_timeout_s=0.3)
    house.until(lambda: house.gave_up, "giving up")
    assert ("which cluster" if there else "not reachable") in house.gave_up
    house.loop.close()


def test_a_manager_of_another_cluster(manager: Manager, make_house: Callable[..., House]) -> None:
    """JOIN names whose values we hold; refused, it is said again without any once the workers have dropped them."""
    house = make_house(manager, warm=True, warm_epoch=41, warm_cluster=4)
    manager.answers[M.Join] = (M.Error("this is cluster 5"), Status.OTHER_CLUSTER)
    lease = house.membership.lease
    assert lease.answered(lease.sent(9, 0), 0) and lease.until(1000)
    house.until(lambda: house.orders, "an order")
    assert not lease.until(1000), "that of the other cluster has ended"
    assert manager.of(M.Join) == [M.Join(7, 1, "n", [INFO], 41, 4)] and house.orders == [DROP_ALL]
    for _ in range(5):
        house.loop.run_once(0.02)
    assert len(manager.of(M.Join)) == 1, "not before they have"
    manager.answers[M.Join] = (M.Joined(3, 50, 0), 0)
    house.up = True
    house.membership.join()
    house.until(lambda: house.member.epoch == 3, "its map")
    assert manager.of(M.Join)[1] == M.Join(7, 0, "n", [INFO], 0, 0)
    assert house.orders[-1].cluster == house.member.cluster == 5
    manager.hang_up()
    house.until(lambda: len(manager.of(M.Join)) == 3, "a third JOIN")
    assert manager.of(M.Join)[2].cluster == 5


def test_an_epoch_that_freezes_a_shard_reaches_the_manager(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.member.epoch == 3, "its map")
    assert {msg.known_epoch for msg in manager.of(M.MapGet)} <= {0, 3}
    house.frozen_by = 900
    house.until(lambda: manager.of(M.MapGet)[-1] == M.MapGet(900, 31), "it says so")
    manager.answers[M.MapGet] = (make_map(901), 0)
    house.until(lambda: house.member.epoch == 901, "a newer map")
    asked = len(manager.of(M.MapGet))
    beats = len(manager.of(M.Heartbeat))
    house.until(lambda: len(manager.of(M.Heartbeat)) > beats + 2, "heartbeats")
    assert len(manager.of(M.MapGet)) <= asked + 1, "it has no more to say"


def test_reconnects_of_a_server_that_waits_add_no_joins(manager: Manager, make_house: Callable[..., House]) -> None:
    """Each of them hears BUSY, and one JOIN a second is enough."""
    manager.answers[M.Join] = (M.Error("its predecessor may be dead"), Status.BUSY)
    house = make_house(manager)
    for number in range(1, 6):
        house.until(lambda n=number: len(manager.of(M.Join)) >= n and house.membership._join_due, "BUSY")  # type: ignore[misc]
        due = [callback for _, _, callback in house.loop._timers if callback == house.membership.join_once]
        assert len(due) == 1
        manager.hang_up()
        house.until(lambda: house.membership.peer is None, "it is disconnected")
    manager.answers[M.Join] = (M.Joined(3, 50, 0), 0)
    house.until(lambda: house.membership.joined, "it joins in the end")


def test_a_server_that_waits_longer_than_for_a_manager_does_not_give_up(
    manager: Manager, make_house: Callable[..., House]
) -> None:
    """Its predecessor is waited for, and then the manager is restarted: it is looked for from then on."""
    manager.answers[M.Join] = (M.Error("its predecessor may be dead"), Status.BUSY)
    house = make_house(manager, join_timeout_s=1000.0)
    house.until(lambda: house.membership._join_due, "BUSY")
    house.membership._started -= 2000.0
    joins = len(manager.of(M.Join))
    house.until(lambda: len(manager.of(M.Join)) > joins and house.membership._join_due, "BUSY again")
    manager.answers[M.Join] = (M.Joined(3, 50, 0), 0)
    manager.hang_up()
    house.until(lambda: house.membership.joined or house.gave_up, "it joins in the end")
    assert not house.gave_up


def test_a_manager_asks_for_reports_by_its_own_connection(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.member.epoch == 3, "its map")
    asked: list[int] = []
    manager.push(R.ReportEvery(2000))  # nobody listens yet
    house.membership.on_report_every = asked.append
    manager.push(R.ReportEvery(500))
    house.until(lambda: 500 in asked, "the manager's wish")
    assert house.membership.joined


def test_an_admins_order_is_answered(manager: Manager, make_house: Callable[..., House]) -> None:
    house = make_house(manager)
    house.until(lambda: house.member.epoch == 3, "its map")
    manager.answers[A.SettingsDone] = (M.Done(1), 0)
    manager.push(A.OrderSettings(5, "poll_us", "9"))
    house.until(lambda: manager.of(A.SettingsDone), "an answer")
    assert manager.of(A.SettingsDone) == [A.SettingsDone(5, 1, b"no")], "nobody carries orders out yet"
    house.membership.on_order = lambda msg: A.SettingsDone(msg.order, 0, msg.value.encode())
    manager.push(A.OrderSettings(6, "poll_us", "9"))
    house.until(lambda: manager.of(A.SettingsDone)[-1] == A.SettingsDone(6, 0, b"9"), "the answer")


@pytest.mark.parametrize("taken_back", [None, True, False])
def test_other_workers(manager: Manager, make_house: Callable[..., House], taken_back: bool | None) -> None:
    """By the same connection, also if they are refused and the server takes them back; if it does not, by another."""
    house = make_house(manager)
    house.until(lambda: house.orders, "a map")
    refusals: list[str] = []

    def on_refusal(text: str) -> bool:
        refusals.append(text)
        manager.answers[M.Join] = (M.Joined(3, 50, 0), 0)
        return bool(taken_back)

    house.membership.on_refusal = on_refusal
    if taken_back is not None:
        manager.answers[M.Join] = (M.Error("full\x1b"), Status.NO_SPACE)
    house.membership.rejoin()
    house.until(lambda: house.membership.joined, "joined again")
    assert refusals == ([] if taken_back is None else ["full\\x1b"]) and FENCE not in house.orders
    assert (len(manager.links) == 1) == (taken_back is not False) and not house.gave_up
