"""How many advances may wait, and for how long: one connection must not keep all others from advancing."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from simm.cluster.epochs import NamespaceEpochs
from simm.config.settings import Settings
from simm.control.epochs import (
    ADVANCES_A_SECOND,
    ADVANCES_AT_ONCE,
    DEFAULT_LEASE_S,
    WAIT_S_MAX,
    WAITING_MAX,
    WAITING_OF_PEER_MAX,
    Advances,
)
from simm.control.links import ConnectionState
from simm.control.state_file import StateFile
from simm.manager import Manager
from simm.net.loop import Loop
from simm.rpc import Connection, decode
from simm.wire.auth import Gate
from simm.wire.epoch_messages import Advance, Advanced, Epochs
from simm.wire.messages import MapReply, Service

STORED = 1 << 64


class Peer:
    """A connection that keeps what is sent to it."""

    closed = False

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.answers: list[Any] = []

    def send_message(self, msg: Any, _number: int) -> None:
        self.answers.append(msg)

    def send_error(self, _number: int, _status: int, text: str) -> None:
        self.errors.append(text)


def made() -> Advances:
    """Return one whose cluster has a server that never answers."""
    silent = SimpleNamespace(name="silent", left=False, told_epoch=0, follows=True)
    namespaces = NamespaceEpochs()
    namespaces.advance("n", 7)
    cluster: Any = SimpleNamespace(
        nodes={"silent": silent}, namespaces=namespaces, unsure=-1e9, first_epoch=lambda epoch=0: epoch
    )
    return Advances(lambda: cluster, 30.0)


def test_a_connection_has_a_share_of_those_that_wait() -> None:
    advances, greedy, other = made(), Peer(), Peer()
    peers: list[Any] = [greedy, other]
    for number in range(WAITING_OF_PEER_MAX):
        assert not advances.fault(peers[0], 0.0)
        advances.wait(peers[0], number, Advance("n", 1000), 7, 0.0)
    assert "of this connection" in advances.fault(peers[0], 0.0)
    assert not advances.fault(peers[1], 0.0)


def test_all_together_are_bounded() -> None:
    advances = made()
    peers: list[Any] = [Peer() for _ in range(WAITING_MAX // WAITING_OF_PEER_MAX)]
    for peer in peers:
        for number in range(WAITING_OF_PEER_MAX):
            advances.wait(peer, number, Advance("n", 1000), 7, 0.0)
    late: Any = Peer()
    assert len(advances) == WAITING_MAX and "advances wait already" in advances.fault(late, 1e6)


def test_issue_nobody_makes_a_map_with_each_request() -> None:
    """Who waits for no answer could send one after the other, and all servers and clients would get a map for each."""
    advances = made()
    made_of = dict.fromkeys((0.0, 1.0, 1e6), 0)
    for now in made_of:
        for number in range(2 * ADVANCES_AT_ONCE):
            peer: Any = Peer()
            if not advances.fault(peer, now):
                advances.wait(peer, number, Advance("n", 0), 7, now)
                made_of[now] += 1
            advances.maintain(now, STORED)
    assert list(made_of.values()) == [ADVANCES_AT_ONCE, ADVANCES_A_SECOND, ADVANCES_AT_ONCE]
    assert "a second" in advances.fault(peer, 1e6)


def test_no_wait_is_for_ever() -> None:
    advances, peer = made(), Peer()
    waiting: Any = peer
    advances.wait(waiting, 1, Advance("n", (1 << 32) - 1), 7, 0.0)
    advances.maintain(WAIT_S_MAX - 1, STORED)
    assert not peer.errors
    advances.maintain(WAIT_S_MAX + 1, STORED)
    assert "old values may still be read" in peer.errors[0]


def test_no_advance_is_confirmed_before_a_successor_would_know_it() -> None:
    advances, peer = made(), Peer()
    waiting: Any = peer
    for node in advances._cluster().nodes.values():
        node.told_epoch = 7
    for number in range(2):
        advances.wait(waiting, number, Advance("n", 1000), 7, 0.0)
    assert advances.maintain(0.5, 6), "that all servers know of it is worth storing"
    assert not peer.answers and not advances.maintain(0.5, 7)
    assert peer.answers == [Advanced(7)] * 2
    advances.wait(waiting, 3, Advance("n", 1000), 7, 0.0)
    advances.maintain(9.0, 6)
    assert "has not stored it" in peer.errors[0]


class Watched:
    """A server that counts how often it is asked what it has acknowledged."""

    left, follows = False, True

    def __init__(self, name: str, looks: list[str]) -> None:
        self.name = name
        self.epoch = 0
        self._looks = looks

    @property
    def told_epoch(self) -> int:
        self._looks.append(self.name)
        return self.epoch


def watched(count: int) -> tuple[Advances, dict[str, Watched], list[str]]:
    """Return one whose cluster has servers that are watched, and the names of those that were looked at."""
    advances = made()
    looks: list[str] = []
    servers = {name: Watched(name, looks) for name in (f"s{number}" for number in range(count))}
    cluster: Any = advances._cluster()
    cluster.nodes = servers
    return advances, servers, looks


def beat(advances: Advances, server: Watched, epoch: int) -> None:
    """Do what a manager does with a heartbeat."""
    server.epoch = epoch
    if advances.awaits(server.name):
        advances.maintain(1.0, STORED)


def test_issue_advances_that_wait_cost_one_look_at_the_servers() -> None:
    """256 of one tenant took 21 ms of each heartbeat among 600 servers, 12 s of a processor in a second."""
    advances, servers, looks = watched(600)
    peer: Any = Peer()
    silent, *others = servers.values()
    for number in range(256):
        advances.wait(peer, number, Advance("n", 100_000), 7 + number, 0.0)
    advances.maintain(0.5, STORED)
    assert len(advances) == 256 and 600 <= len(looks) <= 3 * 600
    looks.clear()
    for _ in range(10):
        for server in others:
            beat(advances, server, 1000)
    assert not looks, "one is silent, and until it speaks none is acknowledged"
    beat(advances, silent, 6)
    assert len(advances) == 256 and 600 <= len(looks) <= 3 * 600, "it has spoken"


def test_the_last_server_that_acknowledges_ends_the_wait_at_once() -> None:
    """Whichever it is, and whatever the order in which the others do: nothing waits for the next maintenance."""
    for seed in range(50):
        advances, servers, _ = watched(7)
        rng, peer, order = random.Random(seed), Peer(), [*servers.values()] * 3
        waiting: Any = peer
        advances.wait(waiting, 1, Advance("n", 100_000), 7, 0.0)
        advances.wait(waiting, 2, Advance("n", 100_000), 9, 0.0)
        rng.shuffle(order)
        for server in order:
            if rng.random() < 0.2:
                advances.maintain(0.5, STORED)
            beat(advances, server, rng.choice([each for each in (0, 7, 8, 9, 10) if each >= server.epoch]))
            least = min(each.epoch for each in servers.values())
            assert peer.answers == [Advanced(epoch) for epoch in (7, 9) if least >= epoch]
            if rng.random() < 0.2 and least < 9:
                advances.wait(waiting, 3, Advance("n", 0), 1 << 70, 0.0)  # a later one changes nothing for these
        for server in servers.values():
            beat(advances, server, 10)
        assert peer.answers == [Advanced(7), Advanced(9)]
        advances.wait(waiting, 4, Advance("n", 100_000), 11, 0.0)
        for server in servers.values():
            assert len(peer.answers) == 2
            beat(advances, server, 11)
        assert peer.answers[2:] == [Advanced(11)], "the next one, too"


def test_what_waits_for_the_disk_alone_waits_for_maintenance() -> None:
    advances, servers, looks = watched(3)
    peer: Any = Peer()
    for server in servers.values():
        server.epoch = 7
    advances.wait(peer, 1, Advance("n", 100_000), 7, 0.0)
    advances.maintain(0.5, 6)
    looks.clear()
    for server in servers.values():
        beat(advances, server, 8)
    assert not looks and advances.awaits() and len(advances) == 1
    advances.maintain(0.7, 7)
    assert peer.answers == [Advanced(7)] and not advances.awaits()


# --- a manager with another lease than the one before ---------------------------------------------


def after(lease_s: float, state: Any) -> tuple[Advances, Any]:
    """Return one that goes on from a state, in a cluster with two servers that answer, and the other, silent one."""
    advances = made()
    cluster = advances._cluster()
    (silent,) = cluster.nodes.values()
    cluster.nodes["other"] = SimpleNamespace(name="other", left=False, told_epoch=1 << 62, follows=True)
    cluster.namespaces.advance("n", 7)
    cluster.namespaces._known["n"] = cluster.namespaces._known["n"]._replace(settled=True)
    cluster.unsure = 0.0  # it began to lead then
    advances.lease_s = lease_s
    advances.take_state(state)
    return advances, silent


def confirmed_at(advances: Advances, begun: float, until: float = 200.0) -> float:
    """Return when an advance that was asked for at ``begun`` is confirmed, in steps of 0.25 s."""
    peer = Peer()
    waiting: Any = peer
    advances.wait(waiting, 1, Advance("n", 3_000_000), 7, begun)
    now = begun
    while not peer.answers and now < until:
        now += 0.25
        advances.maintain(now, STORED)
    return now


def test_issue_an_advance_waits_for_the_longer_lease_of_the_manager_before() -> None:
    """It was restarted with 2 s in place of 30 s, and engines read old values for 28 s after the advance."""
    assert 3.0 < confirmed_at(after(2.0, None)[0], 1.0) < 3.5, "a state of an older version says nothing"
    assert 30.6 < confirmed_at(after(2.0, {"lease_ms": 30_000})[0], 1.0) < 33.0
    assert 31.0 < confirmed_at(after(30.0, {"lease_ms": 2_000})[0], 1.0) < 33.0


def test_leases_without_an_end_are_waited_for_after_a_restart_with_one() -> None:
    advances, silent = after(2.0, {"lease_ms": 0})
    assert confirmed_at(advances, 1.0) >= 200.0
    silent.told_epoch = 8
    assert confirmed_at(advances, 201.0, 300.0) < 202.0, "it knows the new length"


def test_old_leases_end_in_their_time_whoever_is_away() -> None:
    """One server has died for good. This manager extends no lease of a server that has no map of its own."""
    advances, _ = after(2.0, {"lease_ms": 30_000})
    assert advances.to_state() == {"lease_ms": 30_000}
    assert 30.6 < confirmed_at(advances, 1.0) < 33.0 and advances.to_state() == {"lease_ms": 2_000}
    assert 42.0 < confirmed_at(advances, 40.0) < 43.0


def test_leases_of_namespaces_that_the_state_did_not_know_end_when_all_have_answered() -> None:
    """Servers had no EPOCHS of this manager before its first maps."""
    advances, silent = after(2.0, None)
    known = advances._cluster().namespaces
    advances._cluster().namespaces = NamespaceEpochs()
    advances.take_state({"lease_ms": 30_000})
    advances._cluster().namespaces = known
    assert confirmed_at(advances, 40.0) > 70.0 and advances.to_state() == {"lease_ms": 30_000}
    silent.told_epoch = 8
    assert confirmed_at(advances, 80.0) < 81.0, "all have acknowledged it"
    confirmed_at(advances, 100.0)
    assert advances.to_state() == {"lease_ms": 30_000}, "one may have been given a moment before"
    confirmed_at(advances, 112.0)
    assert advances.to_state() == {"lease_ms": 2_000}
    assert after(0.0, {"lease_ms": 30_000})[0].to_state() == {"lease_ms": 0}


@pytest.mark.parametrize(("lease_s", "given"), [(600.0, 600_000), (0.0, 0)])
def test_a_longer_lease_is_given_only_once_it_is_stored(lease_s: float, given: int) -> None:
    """Else the next manager, with the old length, confirms an advance while leases run that no state has told of."""
    saved: list[bool] = []
    advances, _ = after(lease_s, None)
    advances._cluster().epoch = advances._cluster().cluster = 8
    advances._is_stored = lambda: bool(saved)
    assert advances.epochs().lease_ms == given, "the state says nothing"
    advances.take_state({"lease_ms": 30_000})
    assert advances.epochs().lease_ms == 30_000 and advances.to_state() == {"lease_ms": given}
    told: list[Any] = []
    peer: Any = SimpleNamespace(context=SimpleNamespace(epochs=True, gate=SimpleNamespace(bound=False)))
    peer.send = told.append
    advances.tell(peer, advances.epochs())
    saved.append(True)
    advances.tell(peer, advances.epochs())
    assert advances.epochs().lease_ms == given and told[0] != told[1]
    advances.take_state({"lease_ms": 700_000})
    saved.clear()
    assert advances.epochs().lease_ms == given or not given, "it is no longer than what is stored"


def test_a_manager_whose_disk_takes_nothing_gives_the_leases_that_its_state_knows(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state", "manager")
    assert managed(file, 30.0) == 30_000
    save, file.save = file.save, refuse  # type: ignore[method-assign]
    assert managed(file, 600.0) == 30_000
    file.save = save  # type: ignore[method-assign]
    assert managed(file, 600.0) == 600_000
    file.close()


@pytest.mark.parametrize("lease_s", [600.0, 0.0])
def test_a_longer_lease_reaches_servers_once_it_is_stored_though_the_map_stays(tmp_path: Path, lease_s: float) -> None:
    """The first save takes long, and service goes on. No map came for hours, and servers kept to the old length."""
    file = StateFile(tmp_path / "state", "manager")
    assert managed(file, 30.0) == 30_000
    save, file.save = file.save, refuse  # type: ignore[method-assign]
    manager = Manager(Loop(), store=file, lease_s=lease_s)
    manager.cluster.advance(0.0, "n")
    manager.state.changed()
    manager.state.save()
    peers = [Subscriber() for _ in range(3)]
    manager._subscribers.update(cast("list[Any]", peers))
    manager._publish()
    peers[1].context.epoch -= 1
    peers[2].context.stale = True
    assert [[*map(type, each.taken())] for each in peers] == [[Epochs, MapReply]] * 3
    assert peers[0].lease_ms == 30_000
    file.save = save  # type: ignore[method-assign]
    for _ in range(3):
        manager.state._retry()
        manager._publish()
    assert [[*map(type, each.taken())] for each in peers] == [[Epochs], [], []], "who lacks the map gets it with that"
    assert peers[0].lease_ms == lease_s * 1000
    manager.state.forget()
    manager.loop.close()
    file.close()


def test_issue_a_peer_that_is_lost_while_longer_leases_are_told(tmp_path: Path) -> None:
    """What is sent to it closes it, and the set of all peers was walked on meanwhile: the manager ended."""
    file = StateFile(tmp_path / "state", "manager")
    assert managed(file, 30.0) == 30_000
    save, file.save = file.save, refuse  # type: ignore[method-assign]
    manager = Manager(Loop(), store=file, lease_s=600.0)
    manager.cluster.advance(0.0, "n")
    manager.state.changed()
    manager.state.save()
    peers: list[Any] = [Subscriber() for _ in range(6)]
    manager._subscribers.update(peers)
    manager._publish()
    assert [each.taken()[0].lease_ms for each in peers] == [30_000] * 6
    for lost in peers[::2]:
        lost.send = lambda _frame, peer=lost: manager.on_close(peer, "send failed")
    file.save = save  # type: ignore[method-assign]
    manager.state._retry()
    assert [[*map(type, each.taken())] for each in peers[1::2]] == [[Epochs]] * 3
    assert manager._subscribers == {*peers[1::2]}
    manager.state.forget()
    manager.loop.close()
    file.close()


class Subscriber(Peer):
    """A server that follows the map and its EPOCHS."""

    out = b""

    def __init__(self) -> None:
        super().__init__()
        self.context = ConnectionState(Gate(Service.MANAGER, ()))
        self.context.epochs = True
        self.lease_ms = -1
        self._conn = Connection()

    def send(self, data: bytes) -> None:
        self._conn.receive_data(data)

    def taken(self) -> list[Any]:
        """Return what has come since the last call."""
        came = []
        while (frame := self._conn.next_frame()) is not None:
            came.append(decode(frame))
            self.lease_ms = getattr(came[-1], "lease_ms", self.lease_ms)
        return came


def test_a_state_of_an_older_version_is_taken_for_one_with_leases_of_the_default_length() -> None:
    """The manager before has given some of which it does not tell; nor would one after a crash wait for longer ones."""
    assert Settings.epoch_lease_ms == DEFAULT_LEASE_S * 1000
    for state, given in (({}, 30_000), ({"lease_ms": None}, 30_000), (None, 600_000)):
        advances, _ = after(600.0, None)
        advances._cluster().epoch = advances._cluster().cluster = 8
        advances._is_stored = lambda: False
        advances.take_state(state)
        assert advances.epochs().lease_ms == given and advances.to_state() == {"lease_ms": 600_000}
        advances._is_stored = lambda: True
        assert advances.epochs().lease_ms == 600_000
    advances = after(2.0, {})[0]
    advances._cluster().epoch = advances._cluster().cluster = 8
    advances._is_stored = lambda: False
    assert advances.epochs().lease_ms == 2_000


def managed(file: StateFile, lease_s: float) -> int:
    """Return how long the leases are, ms, that a manager gives once it has tried to store its state."""
    manager = Manager(Loop(), store=file, lease_s=lease_s)
    try:
        manager.state.changed()
        manager.state.save()
        return manager.advances.epochs().lease_ms
    finally:
        manager.state.forget()
        manager.loop.close()


def refuse(_document: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_is_no_lease_is_none() -> None:
    for state in ({}, [], {"lease_ms": -1}, {"lease_ms": "30"}, {"lease_ms": True}, {"lease_ms": 2.5}):
        assert after(2.0, state)[0].to_state() == {"lease_ms": 2_000}


def test_no_tenant_uses_up_the_epochs_while_nothing_can_be_stored() -> None:
    advances, peer = made(), Peer()
    waiting: Any = peer
    assert advances.fault(waiting, 0.0, "the state cannot be stored") == "the state cannot be stored"
    assert not advances.fault(waiting, 0.0, "")
