"""Clients whose addresses nobody answers for yet: who is asked for, who waits, and what faults there cost."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from simm.errors import CorruptionError
from simm.net.loop import Loop
from simm.rdma.api import FabricError
from simm.server import rdma_lease
from simm.server.rdma_lease import ASKED_MAX, LOOK_S, SILENT_MAX, SILENT_S, Connects, Neighbours, RdmaLease
from simm.wire.messages import Status
from simm.wire.rdma_messages import RdmaConnect
from tests.support.waiting import wait_until


def gid(number: int) -> bytes:
    return bytes(10) + b"\xff\xff\x0a" + number.to_bytes(3, "big")


def lease() -> RdmaLease:
    return RdmaLease(SimpleNamespace())  # type: ignore[arg-type]


class Rail:
    """A rail whose neighbours answer as the test says."""

    name = "r0"

    def __init__(self) -> None:
        self.answering: set[bytes] = set()
        #: Those behind a router, of which the table says nothing.
        self.routed: set[bytes] = set()
        #: Who was asked for, and how often and with what was looked.
        self.asked: list[bytes] = []
        self.looks: list[Any] = []
        self.fault: Exception | None = None

    def reaches(self, gid: bytes, *, neighbours: Any = None) -> bool:
        (self.asked if neighbours is None else self.looks).append(gid if neighbours is None else neighbours)
        if self.fault is not None:
            raise self.fault
        return gid in self.answering or (neighbours is None and gid in self.routed)

    def queue_pair(self) -> Any:
        raise self.fault or FabricError("none")


class Clock:
    """A loop's timers, and the time, which the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, Any]] = []
        self.handler_errors = 0

    def clock(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any) -> None:
        self.timers.append((self.now + delay, callback))

    def go_on(self, seconds: float = LOOK_S) -> None:
        """Let time pass, and carry out what is due by then, in order; also what that adds."""
        self.now += seconds
        while due := [timer for timer in self.timers if timer[0] <= self.now]:
            for timer in due:
                self.timers.remove(timer)
                timer[1]()


@pytest.fixture
def clock() -> Any:
    return Clock()


@pytest.fixture
def rail() -> Any:
    return Rail()


def test_all_addresses_are_looked_at_by_one_reading_of_the_table(
    clock: Any, rail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = rdma_lease.ArpTable

    def make() -> Any:
        made.append(real())
        return made[-1]

    monkeypatch.setattr(rdma_lease, "ArpTable", make)
    neighbours = Neighbours(clock)
    found: list[bool] = []
    for number in range(ASKED_MAX):
        neighbours.reach(lease(), rail, gid(number), found.append)
    assert not found and len(rail.asked) == ASKED_MAX and not made
    clock.go_on()
    assert len(made) == 1 and rail.looks == made * ASKED_MAX
    rail.answering = {gid(number) for number in range(ASKED_MAX)}
    clock.go_on()
    assert found == [True] * ASKED_MAX and len(made) == 2 and not clock.timers


def test_so_many_are_asked_for_at_once_and_the_others_have_their_turn(clock: Any, rail: Any) -> None:
    neighbours = Neighbours(clock)
    found: dict[int, bool] = {}

    def into(number: int) -> Callable[[bool], None]:
        return partial(found.__setitem__, number)

    count = 2 * ASKED_MAX + 5
    for number in range(count):
        neighbours.reach(lease(), rail, gid(number), into(number))
    assert len(rail.asked) == ASKED_MAX
    rail.answering = {gid(count)}
    neighbours.reach(lease(), rail, gid(count), into(count))
    assert found == {count: True}, "one that is known waits for nobody"
    neighbours.reach(lease(), rail, gid(0), into(-1))
    assert len(rail.asked) == ASKED_MAX, "nor does one that is asked for already need room"
    most = 0
    while clock.timers:
        clock.go_on()
        most = max(most, len(neighbours._asked))
    assert most == ASKED_MAX and not neighbours._later
    assert found == {**dict.fromkeys(range(-1, count), False), count: True}
    assert len(rail.asked) == count
    del found[0]
    neighbours.reach(lease(), rail, gid(0), into(0))
    assert found[0] is False, "it has been waited for"
    assert not clock.timers


def test_a_queue_of_addresses_that_need_no_answer_is_not_stalled(clock: Any, rail: Any) -> None:
    """Each brings the next one of its lease, which goes behind the others."""
    neighbours = Neighbours(clock)
    found: list[bytes] = []

    def reach(number: int, left: int) -> None:
        def then(_: bool) -> None:
            found.append(gid(number))
            if left:
                reach(number + 1000, left - 1)

        neighbours.reach(mine, rail, gid(number), then)

    mine = lease()
    silent = lease()
    for number in range(ASKED_MAX):
        neighbours.reach(silent, rail, gid(10**6 + number), lambda _: None)
    for number in range(5):
        reach(number, 3)
    silent.closed = True
    rail.routed = {gid(number + more) for number in range(5) for more in (0, 1000, 2000, 3000)}
    while clock.timers:
        clock.go_on()
    assert set(found) == rail.routed and not neighbours._asked and not neighbours._later


def test_nobody_is_asked_for_on_behalf_of_a_lease_that_has_closed(clock: Any, rail: Any) -> None:
    neighbours = Neighbours(clock)
    gone, stays = lease(), lease()
    found: list[bool] = []
    for number in range(ASKED_MAX):
        neighbours.reach(gone, rail, gid(number), found.append)
    neighbours.reach(stays, rail, gid(0), found.append)
    neighbours.reach(gone, rail, gid(ASKED_MAX), found.append)
    neighbours.reach(stays, rail, gid(ASKED_MAX + 1), found.append)
    gone.closed = True
    clock.go_on()
    assert {key[1] for key in neighbours._asked} == {gid(0), gid(ASKED_MAX + 1)} and not neighbours._later
    assert gid(ASKED_MAX) not in rail.asked and not neighbours._silent
    stays.closed = True
    clock.go_on()
    assert not neighbours._asked and not clock.timers and not found and not neighbours._silent


def test_those_that_were_silent_long_ago_are_forgotten_first(clock: Any, rail: Any) -> None:
    neighbours = Neighbours(clock)
    for number in range(SILENT_MAX):
        neighbours._silent[rail.name, gid(number)] = clock.now + SILENT_S
    neighbours.reach(lease(), rail, gid(SILENT_MAX), lambda _: None)
    while clock.timers:
        clock.go_on()
    known = [key[1] for key in neighbours._silent]
    assert known == [gid(number) for number in range(1, SILENT_MAX + 1)]


def message(number: int) -> RdmaConnect:
    return RdmaConnect(0, 0, gid(number), 1, 1, 4096, 1)


class Peer:
    """Takes answers."""

    address = "a client"

    def __init__(self) -> None:
        #: Request and status.
        self.answers: list[tuple[int, int]] = []
        self.closed = ""

    def send_message(self, answer: Any, request_id: int) -> None:
        self.answers.append((request_id, Status.OK))

    def send_error(self, request_id: int, status: int, text: str) -> None:
        self.answers.append((request_id, status))

    def close(self, reason: str) -> None:
        self.closed = reason


@pytest.mark.parametrize("when", ["asking", "looking", "asking later"])
def test_the_endpoint_outlives_that_it_cannot_ask(monkeypatch: pytest.MonkeyPatch, rail: Any, when: str) -> None:
    """As where no descriptor is left. Its loop ends by what a timer raises."""
    monkeypatch.setattr(rdma_lease, "ARP_ANSWER_S", 0.03)
    loop = Loop()
    connects = Connects(loop, SimpleNamespace(suspect=None))  # type: ignore[arg-type]
    mine, peer = lease(), Peer()
    fault = OSError(24, "Too many open files")
    rail.fault = fault if when == "asking" else None
    connects.add(peer, mine, rail, 0, message(0))  # type: ignore[arg-type]
    if when == "asking later":
        asked = rail.reaches

        def reaches(which: bytes, *, neighbours: Any = None) -> bool:
            rail.fault = fault if neighbours is None and which == gid(1) else None
            return bool(asked(which, neighbours=neighbours))

        rail.reaches = reaches
    else:
        rail.fault = fault
    for number in (1, 2):
        connects.add(peer, mine, rail, number, message(number))  # type: ignore[arg-type]

    def answered() -> bool:
        loop.run_once(0.01)
        return len(peer.answers) == 3

    wait_until(answered, "all are answered")
    assert peer.answers == [(number, Status.UNAVAILABLE) for number in range(3)]
    assert not mine.connects and not peer.closed
    rail.fault = None
    assert not connects._neighbours._asked and not connects._neighbours._later
    rail.answering = {gid(7)}
    connects.add(peer, mine, rail, 7, message(7))  # type: ignore[arg-type]
    assert peer.answers[-1] == (7, Status.UNAVAILABLE), "no queue pair, at once"
    loop.close()


def test_what_fails_in_a_timer_costs_one_connection(clock: Any, rail: Any) -> None:
    connects = Connects(clock, SimpleNamespace(suspect=None))  # type: ignore[arg-type]
    mine, peer = lease(), Peer()
    connects.add(peer, mine, rail, 1, message(1))  # type: ignore[arg-type]
    connects.add(peer, mine, rail, 2, message(2))  # type: ignore[arg-type]
    rail.answering = {gid(1), gid(2)}
    rail.queue_pair = lambda: 1 // 0
    clock.go_on()
    assert peer.closed == "internal error" and clock.handler_errors == 1

    other, whole = lease(), Peer()
    rail.queue_pair = Rail().queue_pair
    connects.add(whole, other, rail, 3, message(1))  # type: ignore[arg-type]
    assert whole.answers == [(3, Status.UNAVAILABLE)] and not whole.closed

    def corrupt() -> None:
        raise CorruptionError("found in a check")

    rail.queue_pair = corrupt
    with pytest.raises(CorruptionError):
        connects.add(whole, other, rail, 4, message(1))  # type: ignore[arg-type]


def test_addresses_of_the_tests_are_ipv4() -> None:
    assert str(ipaddress.IPv6Address(gid(1)).ipv4_mapped) == "10.0.0.1"
