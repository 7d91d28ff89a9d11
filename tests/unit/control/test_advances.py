"""How many advances may wait, and for how long: one connection must not keep all others from advancing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from simm.cluster.epochs import NamespaceEpochs
from simm.control.epochs import (
    ADVANCES_A_SECOND,
    ADVANCES_AT_ONCE,
    WAIT_S_MAX,
    WAITING_MAX,
    WAITING_OF_PEER_MAX,
    Advances,
)
from simm.wire.epoch_messages import Advance, Advanced

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
