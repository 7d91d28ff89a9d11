"""Which ring is served when: no client keeps another one, the sockets or the timers waiting."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from simm.errors import CorruptionError
from simm.ipc.commit_ring import SLEEPING, TAIL, Ring
from simm.net.loop import Loop
from simm.net.peer import Peer
from simm.rpc import Connection, encode, reply
from simm.server import ring_poller
from simm.server.ring_poller import RingPoller
from simm.wire import messages as M

PING = encode(M.Ping(1), 1)
#: A poller that starves somebody is stopped after so many requests.
MOST = 20_000


def commit_of(keys: int) -> bytes:
    """Return a frame of COMMIT with so many keys."""
    return encode(M.Commit([(bytes(16), 1, 1, 0, 0, 0)] * keys, [(1, keys)]), 1)


class Bench:
    """A poller, and clients whose rings it polls. Each served request is noted, then ``react`` is called."""

    def __init__(self, count: int) -> None:
        self.loop = Loop()
        self.served: list[int] = []
        self.react: Callable[[int], None] = lambda number: None
        #: Requests served when the bookkeeping of what was answered was done.
        self.booked: list[int] = []
        book = lambda: self.booked.append(len(self.served))  # noqa: E731
        self.poller = RingPoller(self.loop, 50, self._no_commit, self._handle, book)
        self.poller.poll_s = 50e-6  # also on one CPU
        self.rings: list[tuple[Ring, Ring]] = []
        for number in range(count):
            client, fd = Ring.create()
            server = Ring.attach(fd)
            os.close(fd)
            self.rings.append((client, server))
            state = SimpleNamespace(session=None, ring=server, ring_used=0.0, number=number)
            peer = SimpleNamespace(context=state, closed=False, address=f"client {number}", close=lambda reason: None)
            self.poller.active.append((server, cast(Peer, peer)))

    def post(self, number: int, frame: bytes = PING) -> None:
        self.rings[number][0].post(frame)

    def _no_commit(self, *_: Any) -> bytes:
        raise AssertionError("nobody commits")

    def _handle(self, peer: Any, frame: Any) -> bytes:
        self.served.append(peer.context.number)
        if len(self.served) >= MOST:
            self.loop.stop()
        self.react(peer.context.number)
        return reply(M.Pong(0), frame.request_id)

    def close(self) -> None:
        self.loop.close()
        for client, server in self.rings:
            client.close()
            server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(3)
    yield made
    made.close()


def test_issue_a_ring_that_is_kept_full_does_not_starve_the_others(bench: Bench) -> None:
    """The first active ring was served for as long as it had requests."""
    bench.post(2)
    for number in (0, 1):
        bench.post(number)

    def react(number: int) -> None:
        if number == 2:
            bench.loop.stop()
        else:
            bench.post(number)

    bench.react = react
    bench.poller.run()
    assert bench.served[:3] == [0, 1, 2] and len(bench.served) < MOST


def test_every_ring_gets_as_many_turns(bench: Bench) -> None:
    for number in range(3):
        bench.post(number)
    bench.react = lambda number: bench.post(number) if len(bench.served) < 300 else bench.loop.stop()
    bench.poller.run()
    counts = [bench.served.count(number) for number in range(3)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("keys", "booked"), [((1, 1, 1, 1), [4]), ((16,) * 4, [4]), ((12, 24, 32, 28), [3, 4]), ((32, 32, 1), [2, 3])]
)
def test_bookkeeping_waits_for_some_frames_and_not_for_many_keys(
    bench: Bench, keys: tuple[int, ...], booked: list[int]
) -> None:
    """Another client's request waits for it: it is that of about 64 keys at most."""
    for each in keys:
        bench.post(0, commit_of(each))
    bench.react = lambda number: bench.loop.stop() if len(bench.served) == len(keys) else None
    bench.poller.run()
    assert bench.booked == booked


def test_a_timer_is_served_while_all_rings_are_full(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each request takes long: a turn ends by time, not only after so many passes."""
    monkeypatch.setattr(ring_poller, "_POLLS", 10 * MOST)
    bench.loop.call_later(0.02, bench.loop.stop)
    for number in range(3):
        bench.post(number)
    bench.react = bench.post
    clock = bench.loop.clock

    def slow(number: int) -> None:
        until = clock() + 1e-4
        while clock() < until:
            pass
        bench.post(number)

    bench.react = slow
    bench.poller.run()
    assert len(bench.served) < MOST


def test_a_request_that_ends_another_session_unmaps_no_ring_in_use(bench: Bench) -> None:
    for number in range(3):
        bench.post(number)

    def react(number: int) -> None:
        if number == 0:
            bench.poller.detach(bench.rings[1][1])
        elif number == 2:
            bench.loop.stop()

    bench.react = react
    bench.poller.run()
    assert bench.served == [0, 2]


def test_issue_a_request_that_ends_its_own_session_is_no_error_of_the_worker(bench: Bench) -> None:
    """Its ring is unmapped once the handler has closed the connection: an answer into it was an internal error."""
    ring, peer = bench.poller.active[0]

    def react(_number: int) -> None:
        peer.closed = True
        bench.poller.detach(ring)
        bench.loop.stop()

    bench.react = react
    bench.post(0)
    bench.poller.run()
    assert bench.served == [0] and bench.loop.handler_errors == 0


def test_corruption_ends_the_poller(bench: Bench) -> None:
    def react(_number: int) -> None:
        raise CorruptionError("two owners")

    bench.react = react
    bench.post(0)
    with pytest.raises(CorruptionError):
        bench.poller.run()
    assert bench.rings[0][0].words[TAIL] == 1


def test_issue_a_ring_that_is_woken_stays_active_beside_a_busy_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was retired in the same round, as it had brought nothing for long, and the commit needed a KICK."""
    monkeypatch.setattr(ring_poller, "avoid_cpu", lambda _: None)
    bench.poller.poll_s = 3600.0
    monkeypatch.setattr(ring_poller, "RING_IDLE_S", 3600.0)  # however long this process is kept from its processor
    for _, each in bench.poller.active:
        each.context.ring_used = -math.inf
    ring, peer = bench.poller.active.pop()
    ring.words[SLEEPING] = 1
    conn = Connection()
    conn.receive_data(encode(M.Wake(0)))
    wake = conn.next_frame()
    assert wake is not None
    real, actives = bench.loop.run_once, []

    def run_once(timeout: float | None) -> int:
        served = real(timeout)
        actives.append([each for each, _ in bench.poller.active])
        if len(actives) == 2:
            bench.poller.on_doorbell(peer, wake)
        elif len(actives) == 4:
            bench.loop.stop()
        return served

    monkeypatch.setattr(bench.loop, "run_once", run_once)
    bench.react = bench.post
    bench.post(0)
    bench.poller.run()
    busy, idle = bench.rings[0][1], bench.rings[1][1]
    assert actives == [[busy, idle], [busy], [busy, ring], [busy, ring]], "an idle one is retired"
    assert ring.words[SLEEPING] == 0


@pytest.mark.parametrize("polls", [True, False])
def test_issue_a_wake_without_a_ring_polls_the_sockets(polls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker slept again before the commit came. Nor may the commit of another client end that early."""
    monkeypatch.setattr(ring_poller, "avoid_cpu", lambda _: None)
    monkeypatch.setattr(ring_poller, "WAKE_POLL_S", 3600.0)
    conn = Connection()
    conn.receive_data(encode(M.Wake(0)))
    wake = conn.next_frame()
    assert wake is not None
    peer = cast(Peer, SimpleNamespace(context=SimpleNamespace(session=None, ring=None), closed=False))
    timeouts: list[float | None] = []
    with closing(Bench(0)) as bench:
        bench.poller.poll_s = 1e-9 if polls else 0.0

        def run_once(timeout: float | None) -> int:
            timeouts.append(timeout)
            if len(timeouts) == 1:
                bench.poller.on_doorbell(peer, wake)
            elif len(timeouts) == 2:
                bench.poller.poll_sockets()
            else:
                bench.loop.stop()
            return 1

        monkeypatch.setattr(bench.loop, "run_once", run_once)
        bench.poller.run()
    assert timeouts == ([None, 0.0, 0.0] if polls else [None, None, None])


def test_polling_in_vain_is_counted_and_work_is_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_poller, "_ROUND_MAX_S", 3600.0)  # however slow this machine is
    bench.poller.poll_s = 3600.0
    turns = 0
    real = bench.loop.run_once

    def counted(timeout: float | None) -> int:
        nonlocal turns
        turns += 1
        if turns == 50:
            bench.loop.stop()
        return real(timeout)

    monkeypatch.setattr(bench.loop, "run_once", counted)
    bench.react = lambda number: bench.post(number) if len(bench.served) < 500 else bench.loop.stop()
    for number in range(3):
        bench.post(number)
    bench.poller.run()
    assert len(bench.served) >= 500 and bench.poller.idle_s == 0.0  # no round without work: nothing says what one costs

    # A busy machine has ended that turn early, with requests that are still to be served.
    bench.react = lambda number: None
    turns, began, before = 0, bench.loop.clock(), bench.poller._idle_passes
    bench.loop.running = True
    bench.poller.run()
    # The passes in vain among the work count too, at the price of these.
    share = 1.0 - before / bench.poller._idle_passes
    assert 0.0 < share * bench.poller.idle_s <= bench.loop.clock() - began
