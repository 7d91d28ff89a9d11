"""Requests that wait for the map are answered some in each turn of the loop, each once, in their order."""

from __future__ import annotations

import random
from typing import Any

from simm.control import waiting as waiting_module
from simm.control.waiting import MAPS_PER_TURN, OF_PEER_MAX, Waiting


class Peer:
    """A connection that keeps what it is refused."""

    closed = False

    def __init__(self) -> None:
        self.refused: list[int] = []

    def send_error(self, number: int, _status: int, _text: str) -> None:
        self.refused.append(number)


class Turns:
    """A loop whose turns the test makes."""

    def __init__(self) -> None:
        self.due: list[Any] = []

    def call_later(self, _delay_s: float, callback: Any) -> None:
        self.due.append(callback)

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


class World:
    """Answers whatever may be answered, as a manager does."""

    def __init__(self) -> None:
        self.waiting, self.turns = Waiting(), Turns()
        self.answered: list[tuple[Any, int]] = []
        self.allowed = True
        self.until = 1 << 62

    def answer(self) -> None:
        loop: Any = self.turns
        if self.waiting and self.allowed:
            self.answered += [(peer, number) for peer, number, _ in self.waiting.take(loop, self.answer, self.until)]

    def ask(self, peer: Any, number: int) -> None:
        self.waiting.add(peer, number)
        self.answer()


def test_a_turn_answers_a_bounded_number_of_connections() -> None:
    world = World()
    world.allowed = False
    peers = [Peer() for _ in range(3 * MAPS_PER_TURN + 5)]
    for peer in peers:
        world.ask(peer, 1)
    world.allowed = True
    world.answer()
    assert len(world.answered) == MAPS_PER_TURN
    late = [Peer() for _ in range(4)]
    for peer in late:
        world.ask(peer, 1)
    assert len(world.answered) == MAPS_PER_TURN, "who asks now waits for its turn"
    sizes = []
    while world.turns.due:
        before = len(world.answered)
        world.turns.turn()
        sizes.append(len(world.answered) - before)
    assert max(sizes) <= MAPS_PER_TURN
    assert [peer for peer, _ in world.answered] == peers + late and len(world.waiting) == 0


def test_each_request_is_answered_once_against_a_naive_model(monkeypatch: Any) -> None:
    monkeypatch.setattr(waiting_module, "MAPS_PER_TURN", 3)
    for seed in range(100):
        rng, world = random.Random(seed), World()
        peers: list[Any] = [Peer() for _ in range(12)]
        asked: list[tuple[Any, int]] = []
        for number in range(200):
            what = rng.random()
            peer = rng.choice(peers)
            if what < 0.6 and not peer.closed:
                asked.append((peer, number))
                world.ask(peer, number)
            elif what < 0.8:
                world.turns.turn()
            elif what < 0.9:
                world.allowed = rng.random() < 0.5
                world.answer()
            elif what < 0.92:
                peer.closed = True
                world.waiting.drop(peer)
        world.allowed = True
        world.answer()
        while world.turns.due:
            world.turns.turn()
        assert len(world.answered) == len(set(world.answered))
        lost = set(asked) - set(world.answered)
        assert all(peer.closed or number in peer.refused for peer, number in lost)
        for peer in peers:
            numbers = [number for other, number in world.answered if other is peer]
            assert numbers == sorted(numbers)


def test_a_map_answers_only_what_was_asked_before_it() -> None:
    """Some of these wait for their turn when others come."""
    world = World()
    world.until = 0
    early, late = [Peer() for _ in range(2 * MAPS_PER_TURN)], Peer()
    for peer in early:
        world.ask(peer, 1)
    assert not world.answered
    world.until = world.waiting.asked
    world.ask(early[0], 2)
    world.ask(late, 1)
    while world.turns.due:
        world.turns.turn()
    assert world.answered == [(peer, 1) for peer in early] and len(world.waiting) == 2
    world.until = world.waiting.asked
    world.answer()
    assert world.answered[-2:] == [(early[0], 2), (late, 1)] and not world.waiting._of


def test_a_manager_that_steps_down_forgets_them() -> None:
    world = World()
    world.allowed = False
    peers = [Peer() for _ in range(2 * MAPS_PER_TURN)]
    for peer in peers:
        world.ask(peer, 1)
    world.allowed = True
    world.answer()
    world.waiting.clear()
    world.turns.turn()
    assert len(world.answered) == MAPS_PER_TURN and not world.turns.due
    world.ask(peers[0], 2)
    assert world.answered[-1] == (peers[0], 2)


def test_a_connection_has_a_bounded_number() -> None:
    world = World()
    world.allowed = False
    peer = Peer()
    for number in range(OF_PEER_MAX + 1):
        world.ask(peer, number)
    assert peer.refused == [OF_PEER_MAX]


def test_who_waits_for_the_map_is_told_apart() -> None:
    """Such a connection needs no push of the same map."""
    world, peer, other = World(), Peer(), Peer()
    world.allowed = False
    one: Any = peer
    two: Any = other
    said: Any = object()
    world.waiting.add(one, 1, said)
    world.waiting.add(two, 1, said)
    world.waiting.add(two, 2)
    assert not world.waiting.for_map(one) and world.waiting.for_map(two)
