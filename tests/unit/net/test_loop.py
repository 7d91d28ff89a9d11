"""The event loop against peers that do not read, do not finish, send too fast, or are too many; and its own bugs."""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.errors import CorruptionError, RemoteProtocolError
from simm.net.listeners import listen_tcp
from simm.net.loop import MAINTENANCE_S, Loop
from simm.net.peer import (
    FRAMES_PER_TURN,
    OUT_CLOSE_BYTES,
    OUT_LEAST_BYTES,
    OUT_PAUSE_BYTES,
    READ_BYTES,
    STALL_S,
    TURN_S,
    WAITED_S,
    Peer,
    Service,
)
from simm.rpc import Connection, Frame, decode, encode
from simm.wire import messages as M
from tests.support.clock import Clock
from tests.support.waiting import wait_until

MIB = 1 << 20



class Echo(Service):
    """Answers PING with PONG; what else it does the test sets."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.closed: list[str] = []
        self.drained = 0
        self.on: Callable[[Peer, Frame], None] | None = None
        self.on_drained: Callable[[Peer], None] | None = None
        self.peers: list[Peer] = []

    def on_connect(self, peer: Peer) -> None:
        self.peers.append(peer)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        self.frames.append(frame)
        if self.on is not None:
            self.on(peer, frame)
            return
        msg = decode(frame)
        if not isinstance(msg, M.Ping):
            raise RemoteProtocolError("only PING here")
        peer.send_message(M.Pong(msg.cookie), frame.request_id)

    def on_drain(self, peer: Peer) -> None:
        self.drained += 1
        if self.on_drained is not None:
            self.on_drained(peer)

    def on_close(self, peer: Peer, reason: str) -> None:
        self.closed.append(reason)


class Bench:
    """A loop with an echo service and a fake clock, and clients' ends of its connections."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.service = Echo()
        self.ends: list[socket.socket] = []

    def connect(self, *, kind: int = socket.AF_UNIX) -> tuple[socket.socket, Peer]:
        near, far = socket.socketpair(kind)
        near.setblocking(False)
        self.ends.append(near)
        return near, self.loop.adopt(far, self.service, f"test {len(self.ends)}")

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.run_once(0.0)

    def until(self, condition: Callable[[], object]) -> None:
        """Run the loop until this is so: by TCP the kernel delivers when it comes to it."""

        def turned() -> bool:
            self.turn()
            return bool(condition())

        wait_until(turned, "the loop does it")

    def close(self) -> None:
        self.loop.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def receive(sock: socket.socket) -> list[Any]:
    """All messages that have arrived; [None] at the end of a closed connection."""
    conn = Connection()
    found: list[Any] = []
    while True:
        try:
            data = sock.recv(1 << 20)
        except BlockingIOError:
            break
        except ConnectionResetError:
            data = b""
        if not data:
            found.append(None)
            break
        conn.receive_data(data)
    while (frame := conn.next_frame()) is not None:
        found.insert(-1 if found and found[-1] is None else len(found), decode(frame))
    return found


def test_frames_in_pieces_and_together(bench: Bench) -> None:
    end, _ = bench.connect()
    stream = b"".join(encode(M.Ping(number), number) for number in range(10))
    for at in range(len(stream)):
        end.send(stream[at : at + 1])
        bench.turn()
    assert receive(end) == [M.Pong(number) for number in range(10)]
    end.send(stream)
    bench.turn()
    assert receive(end) == [M.Pong(number) for number in range(10)]
    assert bench.service.closed == []


def test_one_peer_gets_so_many_frames_a_turn(bench: Bench) -> None:
    """Another one that came later is not kept waiting for all of the first one's."""
    many, _ = bench.connect()
    few, _ = bench.connect()
    many.send(b"".join(encode(M.Ping(number), 1) for number in range(3 * FRAMES_PER_TURN)))
    few.send(encode(M.Ping(7), 2))
    bench.turn()
    assert len([frame for frame in bench.service.frames if frame.request_id == 1]) <= 2 * FRAMES_PER_TURN
    assert receive(few) == [M.Pong(7)]
    bench.turn(3)  # no new bytes arrive: the rest must not wait for any
    assert len(receive(many)) == 3 * FRAMES_PER_TURN


def test_a_peer_that_sends_faster_than_it_is_served_waits(bench: Bench) -> None:
    """Its bytes stay in the kernel, whose limit holds, and not in this process, which has none."""
    end, peer = bench.connect()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
    frames = b"".join(encode(M.Ping(number), 1) for number in range(10_000))
    sent, most, heard = 0, 0, Connection()
    answers = 0
    while answers < 10_000:
        with contextlib.suppress(BlockingIOError):
            sent += end.send(memoryview(frames)[sent:])
        bench.turn()
        most = max(most, peer.conn.pending_bytes)
        with contextlib.suppress(BlockingIOError):
            heard.receive_data(end.recv(MIB))
        while heard.next_frame() is not None:
            answers += 1
    assert READ_BYTES // 2 < most <= READ_BYTES, "of one read, and the control: there was more to read"
    assert peer.in_bytes == len(frames) and not bench.service.closed


def test_a_peer_that_others_hold_back_is_not_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues of others count, and change without any event of its own."""
    end, peer = bench.connect()
    peer.send(bytes(512 << 10))
    assert peer.out and not peer.held_back() and peer.wants & selectors.EVENT_READ
    monkeypatch.setattr("simm.net.peer.OUT_TOTAL_BYTES", bench.loop.queued_bytes - 1)
    frames = encode(M.Ping(1), 1) * 1000
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            end.send(frames)
        bench.turn()
    assert peer.in_bytes == 0 and not peer.wants & selectors.EVENT_READ
    while peer.out:
        end.recv(MIB)
        bench.turn()
    bench.turn(40)
    assert bench.service.frames, "and is read again when it has read its own"


def test_a_peer_has_one_share_of_a_turn_however_it_comes_to_it(bench: Bench) -> None:
    """By new input, by a resumption, by an output queue that has become empty: each gave it one more, for good."""
    end, peer = bench.connect()
    end.send(b"".join(encode(M.Ping(number), 1) for number in range(20 * FRAMES_PER_TURN)))
    bench.turn()
    for _ in range(5):
        peer.pause(True)
        peer.pause(False)
    assert list(bench.loop.more) == [peer]
    bench.service.on_drained = lambda drained: drained.pause(False)
    for _ in range(5):
        peer.send(bytes(256 << 10))
        while peer.out:
            with contextlib.suppress(BlockingIOError):
                end.recv(MIB)
            before = len(bench.service.frames)
            bench.turn()
            assert len(bench.service.frames) - before <= 2 * FRAMES_PER_TURN
            assert list(bench.loop.more) in ([peer], [])
    bench.service.on_drained = None


def test_requests_that_take_long_share_the_turn(bench: Bench) -> None:
    """A peer's frames are counted in time too, or 64 of the most expensive ones would keep all others waiting."""
    asked: list[tuple[int, float]] = []

    def on(peer: Peer, frame: Frame) -> None:
        asked.append((frame.request_id, bench.clock.now - began))
        bench.clock.now += TURN_S / 4 if frame.request_id == 1 else 0.0

    bench.service.on = on
    many, _ = bench.connect()
    few, _ = bench.connect()
    many.send(b"".join(encode(M.Ping(number), 1) for number in range(FRAMES_PER_TURN)))
    few.send(encode(M.Ping(7), 2))
    began = bench.clock.now
    bench.turn()
    assert next(waited for number, waited in asked if number == 2) <= 1.25 * TURN_S
    assert 1 < len(asked) < 10
    bench.turn(FRAMES_PER_TURN)
    assert len(asked) == FRAMES_PER_TURN + 1, "the rest follows, though no new bytes arrive"


def fill_pipe(bench: Bench, peer: Peer, size: int) -> None:
    """Answers that the peer does not read, until so many bytes are queued."""
    while peer.out_bytes < size and not peer.closed:
        peer.send(bytes(256 << 10))


def test_a_peer_that_does_not_read_is_not_read_either(bench: Bench) -> None:
    end, peer = bench.connect()
    fill_pipe(bench, peer, OUT_PAUSE_BYTES + 1)
    end.send(encode(M.Ping(1), 1))
    bench.turn(3)
    assert not bench.service.frames, "back-pressure"
    got = 0
    while peer.out_bytes or not got:
        got += len(end.recv(4 * MIB))
        bench.turn()
    bench.turn(2)
    assert len(bench.service.frames) == 1 and bench.service.drained >= 1
    assert not peer.closed


def test_requests_parsed_before_the_pause_come_after_the_drain(bench: Bench) -> None:
    """They lie in our buffer, not in the socket: no event will ever announce them."""
    end, peer = bench.connect()

    def answer(peer: Peer, frame: Frame) -> None:
        if frame.request_id == 1:
            fill_pipe(bench, peer, OUT_PAUSE_BYTES + 1)

    bench.service.on = answer
    end.send(encode(M.Ping(1), 1) + encode(M.Ping(2), 2))
    bench.turn(2)
    assert [frame.request_id for frame in bench.service.frames] == [1]
    while peer.out_bytes:
        end.recv(4 * MIB)
        bench.turn()
    bench.turn()
    assert [frame.request_id for frame in bench.service.frames] == [1, 2]


def test_pushes_to_one_who_never_reads_end_the_connection(bench: Bench) -> None:
    _, peer = bench.connect()
    while not peer.closed:
        peer.push(M.StatsReply(bytes(256 << 10)))
        assert peer.out_bytes <= OUT_CLOSE_BYTES + MIB
    assert bench.service.closed and "not read" in bench.service.closed[0]
    assert peer.out_bytes == 0 and not bench.loop.peers


def test_a_peer_that_takes_nothing_is_closed_by_the_stall_clock(bench: Bench) -> None:
    end, peer = bench.connect()
    idle_end, idle = bench.connect()
    fill_pipe(bench, peer, OUT_PAUSE_BYTES)
    for _ in range(int(STALL_S) - 2):
        bench.clock.now += 1.0
        bench.turn()
    assert not peer.closed
    end.recv(MIB)  # progress, however slow, keeps it open
    bench.turn()
    bench.clock.now += STALL_S - 1
    bench.turn()
    assert not peer.closed
    for _ in range(7):
        bench.clock.now += 5.0
        bench.turn()
    assert peer.closed and bench.service.closed == [f"no progress for {STALL_S:.0f} s"]
    assert bench.loop.stalled == 1 and bench.loop.queued_bytes == 0
    assert not idle.closed, "idle is not stalled"
    idle_end.close()
    bench.turn()
    assert idle.closed


@pytest.mark.parametrize("taken", [0, 1, OUT_LEAST_BYTES // 8])
def test_little_bytes_and_new_requests_are_no_progress(bench: Bench, taken: int) -> None:
    """One that reads a byte a second, or goes on asking, is closed like one that does nothing."""
    end, peer = bench.connect()
    fill_pipe(bench, peer, OUT_PAUSE_BYTES // 2)
    for second in range(int(STALL_S) + 6):
        if peer.closed:
            break
        assert second <= STALL_S + MAINTENANCE_S
        bench.clock.now += 1.0
        end.send(encode(M.Ping(second), second))
        # The kernel's own buffer hides single bytes from us: what leaves our queue is played here.
        peer.sent_bytes += taken
        bench.turn()
    assert peer.closed == (taken * STALL_S < OUT_LEAST_BYTES)


def test_many_that_do_not_read_share_one_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each below its own bound, together above theirs: who has something waiting is not read, the others are."""
    monkeypatch.setattr("simm.net.peer.OUT_TOTAL_BYTES", 2 * MIB)
    slow = [bench.connect() for _ in range(8)]
    good, _ = bench.connect()
    bench.service.on = lambda peer, frame: peer.send_message(M.StatsReply(bytes(300 << 10)), frame.request_id)
    for _ in range(10):
        for end, _peer in slow:
            end.send(encode(M.Ping(1), 1))
        bench.turn(2)
    assert 2 * MIB < bench.loop.queued_bytes <= 2 * MIB + 8 * (301 << 10)
    assert bench.loop.queued_bytes == sum(peer.out_bytes for _, peer in slow)
    assert not any(peer.closed for _, peer in slow)
    bench.service.on = None
    good.send(encode(M.Ping(5), 5))
    bench.turn(2)
    assert receive(good) == [M.Pong(5)]
    # Once they read, all is answered and nothing is counted any more.
    while any(peer.out for _, peer in slow):
        for end, _peer in slow:
            with contextlib.suppress(BlockingIOError):
                end.recv(4 * MIB)
        bench.turn()
    bench.turn(5)
    assert bench.loop.queued_bytes == 0 and len(bench.service.frames) == 81


def test_bulk_does_not_count_for_the_bound(bench: Bench) -> None:
    """It lies in the arena and costs no memory of ours."""
    end, peer = bench.connect()
    peer.bulk = True
    peer.send(bytes(4 * MIB))
    assert peer.out_bytes and bench.loop.queued_bytes == 0
    while peer.out:
        end.recv(4 * MIB)
        bench.turn()
    assert bench.loop.queued_bytes == 0
    peer.bulk = False


def test_a_connection_ends_when_its_other_end_has_gone(bench: Bench) -> None:
    """The kernel is told to find out: idle for STALL_S it asks, and unacknowledged bytes end it as soon."""
    listener = listen_tcp("127.0.0.1", 0)
    bench.loop.listen(listener, bench.service)
    bench.ends.append(socket.create_connection(listener.getsockname()))
    bench.until(lambda: bench.service.peers)
    sock = bench.service.peers[0].sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for option, value in (
        (socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 30_000),
    ):  # fmt: skip
        assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
    assert sock.getsockopt(socket.IPPROTO_TCP, 25) == bench.service.unsent_bytes == 128 << 10


def test_the_kernel_holds_nothing_for_one_who_did_not_take_it(bench: Bench) -> None:
    """A plain close would leave megabytes in the socket's buffer, and the peer without word of it, for ever."""
    listener = listen_tcp("127.0.0.1", 0)
    bench.loop.listen(listener, bench.service)
    end = socket.create_connection(listener.getsockname())
    bench.ends.append(end)
    bench.until(lambda: bench.service.peers)
    (peer,) = bench.service.peers
    fill_pipe(bench, peer, MIB)
    for _ in range(8):
        bench.clock.now += MAINTENANCE_S
        bench.turn()
    assert peer.closed
    end.settimeout(10)
    with pytest.raises(ConnectionResetError):
        while end.recv(MIB):
            pass


def test_who_gave_up_while_we_kept_him_waiting(bench: Bench) -> None:
    """Looked at after a pause only: in a handler, between two turns, and while we waited for events."""
    end, _peer = bench.connect()
    asked: list[tuple[bool, bool]] = []

    def on(peer: Peer, frame: Frame) -> None:
        bench.clock.now += decode(frame).cookie / 1000
        asked.append((bench.loop.lag_s > WAITED_S, peer.gave_up(bench.loop.now)))

    bench.service.on = on
    end.send(encode(M.Ping(0), 1))
    bench.turn()
    assert asked.pop() == (False, False)
    end.send(encode(M.Ping(500), 1))
    bench.turn()
    assert asked.pop() == (False, False), "kept waiting, and still there"
    end.send(encode(M.Ping(0), 1))
    bench.turn()
    assert asked.pop() == (True, False), "the turn before was long"
    end.send(encode(M.Ping(0), 1))
    bench.turn()
    assert asked.pop() == (False, False)
    # Stopped (SIGSTOP) in the middle of a wait.
    real = bench.loop.selector.select

    def stopped(timeout: float | None = None) -> Any:
        bench.clock.now += 7.0
        return real(0)

    end.send(encode(M.Ping(0), 1))
    bench.loop.selector.select = stopped  # type: ignore[method-assign]
    bench.loop.run_once(1.0)
    bench.loop.selector.select = real  # type: ignore[method-assign]
    assert asked.pop() == (True, False)
    # The same, and the caller has hung up behind his request.
    for late in (0, 500):
        end, _ = bench.connect()
        end.send(encode(M.Ping(late), 1))
        end.close()
        bench.turn()
        assert asked.pop() == (False, late > 0), "unless kept waiting we do not look"


def test_half_a_frame_for_ever_is_closed_by_the_stall_clock(bench: Bench) -> None:
    end, peer = bench.connect()
    end.send(encode(M.Ping(1))[:20])
    bench.turn()
    for _ in range(10):
        bench.clock.now += 5.0
        bench.turn()
    assert peer.closed


def test_a_paused_peer_is_not_stalled(bench: Bench) -> None:
    """The service holds it back, not the peer."""
    end, peer = bench.connect()
    bench.service.on = lambda peer, frame: peer.pause(True)
    end.send(encode(M.Ping(1), 1) + encode(M.Ping(2), 2))
    bench.turn(2)
    for _ in range(10):
        bench.clock.now += 10.0
        bench.turn()
    assert not peer.closed and len(bench.service.frames) == 1
    bench.service.on = None
    peer.pause(False)
    bench.turn(2)
    assert receive(end) == [M.Pong(2)]


def test_a_handler_that_raises_costs_its_connection_only(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    end, peer = bench.connect()
    other, _ = bench.connect()

    def broken(peer: Peer, frame: Frame) -> None:
        if frame.request_id == 1:
            raise ZeroDivisionError("a bug of ours")
        peer.send_message(M.Pong(0))

    bench.service.on = broken
    with caplog.at_level(logging.ERROR):
        end.send(encode(M.Ping(1), 1))
        other.send(encode(M.Ping(2), 2))
        bench.turn()
    assert peer.closed and bench.loop.handler_errors == 1 and "a bug of ours" in caplog.text
    assert receive(other) == [M.Pong(0)] and receive(end) == [None]


def test_issue_a_drain_that_raises_costs_its_connection_only(bench: Bench) -> None:
    """on_drain ran outside of the guard: a bug in it ended the server."""
    end, peer = bench.connect()
    other, _ = bench.connect()
    fill_pipe(bench, peer, MIB)

    def broken(_peer: Peer) -> None:
        raise ZeroDivisionError("a bug of ours")

    bench.service.on_drained = broken
    while not peer.closed:
        end.recv(4 * MIB)
        bench.turn()
    assert bench.loop.handler_errors == 1
    other.send(encode(M.Ping(2), 2))
    bench.turn()
    assert receive(other) == [M.Pong(2)]


def test_issue_a_connect_that_raises_costs_its_connection_only(bench: Bench) -> None:
    listener = listen_tcp("127.0.0.1", 0)
    bench.loop.listen(listener, bench.service)
    real = bench.service.on_connect

    def broken(peer: Peer) -> None:
        bench.service.on_connect = real  # type: ignore[method-assign]
        raise ZeroDivisionError("a bug of ours")

    bench.service.on_connect = broken  # type: ignore[method-assign]
    first = socket.create_connection(listener.getsockname())
    second = socket.create_connection(listener.getsockname())
    bench.ends += [first, second]
    second.send(encode(M.Ping(3), 3))
    bench.until(lambda: bench.service.frames)
    second.settimeout(10)
    assert second.recv(100) and bench.loop.handler_errors == 1 and len(bench.loop.peers) == 1


def test_an_on_close_that_raises_does_not_stop_the_others(bench: Bench) -> None:
    end, peer = bench.connect()
    other, _ = bench.connect()

    def broken(peer: Peer, reason: str) -> None:
        raise ZeroDivisionError("a bug of ours")

    bench.service.on_close = broken  # type: ignore[method-assign]
    end.close()
    bench.turn()
    assert peer.closed
    other.send(encode(M.Ping(2), 2))
    bench.turn()
    assert receive(other) == [M.Pong(2)]


@pytest.mark.parametrize("place", ["on_frame", "on_drain", "on_close"])
def test_corruption_ends_the_loop(bench: Bench, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own state is inconsistent: the next request would meet it, and all later ones."""

    def broken(*_: object) -> None:
        raise CorruptionError("two owners")

    end, peer = bench.connect()
    if place == "on_drain":
        fill_pipe(bench, peer, MIB)
    monkeypatch.setattr(bench.service, place, broken)
    with pytest.raises(CorruptionError, match="two owners"):
        if place == "on_frame":
            end.send(encode(M.Ping(1), 1))
        elif place == "on_close":
            end.close()
        for _ in range(100):
            if place == "on_drain":
                end.recv(4 * MIB)
            bench.turn()


def test_garbage_is_answered_with_an_error_and_a_close(bench: Bench) -> None:
    end, peer = bench.connect()
    end.send(b"GET / HTTP/1.1\r\n\r\n")
    bench.turn()
    said = receive(end)
    assert isinstance(said[0], M.Error) and "SiMM" in said[0].text and said[1] is None
    assert peer.closed and bench.loop.protocol_errors == 1


def test_a_refused_frame_stops_what_came_behind_it(bench: Bench) -> None:
    end, _ = bench.connect()
    end.send(encode(M.Ping(1), 1) + encode(M.Pong(1), 2) + encode(M.Ping(3), 3))
    bench.turn(2)
    assert [frame.request_id for frame in bench.service.frames] == [1, 2]
    said = receive(end)
    assert said[0] == M.Pong(1) and isinstance(said[1], M.Error) and said[2] is None


def test_a_peer_that_ends_in_a_frame_is_told_apart(bench: Bench) -> None:
    end, _ = bench.connect()
    end.send(encode(M.Ping(1))[:10])
    end.shutdown(socket.SHUT_WR)
    bench.turn(2)
    assert bench.service.closed and "into a frame" in bench.service.closed[0]
    other, _ = bench.connect()
    other.close()
    bench.turn()
    assert bench.service.closed[1] == "peer closed"


class Refusing:
    """A listener whose accept fails."""

    def __init__(self, sock: socket.socket, number: int, times: int) -> None:
        self.sock, self.number, self.times = sock, number, times

    def accept(self) -> Any:
        if self.times:
            self.times -= 1
            raise OSError(self.number, "made up")
        return self.sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)


def test_without_descriptors_the_listener_rests_a_second(bench: Bench) -> None:
    listener: Any = Refusing(listen_tcp("127.0.0.1", 0), errno.EMFILE, 1)
    bench.loop.listen(listener, bench.service)
    bench.ends.append(socket.create_connection(listener.getsockname()))
    bench.until(lambda: not listener.times)
    bench.turn(5)
    assert bench.service.peers == [], "it does not spin"
    assert listener not in [key.fileobj for key in bench.loop.selector.get_map().values()]
    bench.clock.now += 1.1
    bench.until(lambda: len(bench.service.peers) == 1)


@pytest.mark.parametrize("number", [errno.EPROTO, errno.ECONNABORTED, errno.ENETDOWN])
def test_issue_a_connection_that_broke_in_the_queue_is_no_error(bench: Bench, number: int) -> None:
    listener: Any = Refusing(listen_tcp("127.0.0.1", 0), number, 1)
    bench.loop.listen(listener, bench.service)
    bench.ends.append(socket.create_connection(listener.getsockname()))
    bench.until(lambda: len(bench.service.peers) == 1)


def test_too_many_connections_are_refused(bench: Bench) -> None:
    listener = listen_tcp("127.0.0.1", 0)
    bench.loop.listen(listener, bench.service, connections_max=2)
    for _ in range(3):
        bench.ends.append(socket.create_connection(listener.getsockname()))
    bench.ends[-1].setblocking(False)
    bench.until(lambda: receive(bench.ends[-1]) == [None])
    assert len(bench.loop.peers) == 2


def test_timers_in_order_late_ones_once(bench: Bench) -> None:
    seen: list[str] = []
    bench.loop.call_later(2.0, lambda: seen.append("b"))
    bench.loop.call_later(1.0, lambda: seen.append("a"))
    bench.loop.call_every(10.0, lambda: seen.append("every"))
    bench.turn()
    assert seen == []
    bench.clock.now += 3
    bench.turn()
    assert seen == ["a", "b"]
    bench.clock.now += 1000
    bench.turn(3)
    assert seen == ["a", "b", "every"]


def test_a_peer_closed_by_another_ones_request_is_not_served(bench: Bench) -> None:
    """Both were ready in the same turn."""
    first, first_peer = bench.connect()
    second, second_peer = bench.connect()

    def close_the_other(peer: Peer, frame: Frame) -> None:
        (second_peer if peer is first_peer else first_peer).close("by the other")

    bench.service.on = close_the_other
    first.send(encode(M.Ping(1), 1))
    second.send(encode(M.Ping(2), 2))
    bench.turn(2)
    assert len(bench.service.frames) == 1 and bench.service.closed == ["by the other"]


def test_closing_twice_and_sending_after_it_is_harmless(bench: Bench) -> None:
    _, peer = bench.connect()
    peer.close("once")
    peer.close("twice")
    peer.send(b"late")
    peer.push(M.Pong(1))
    assert bench.service.closed == ["once"]
    assert not any(key.data is peer for key in bench.loop.selector.get_map().values())


def test_nothing_to_do_costs_no_events(bench: Bench) -> None:
    end, peer = bench.connect()
    assert bench.loop.run_once(0.0) == 0
    fill_pipe(bench, peer, OUT_PAUSE_BYTES + 1)
    assert bench.loop.selector.get_key(peer.sock).events == selectors.EVENT_WRITE
    peer.pause(True)
    while peer.out_bytes:
        end.recv(4 * MIB)
        bench.turn()
    with pytest.raises(KeyError):
        bench.loop.selector.get_key(peer.sock)  # neither to read nor to write
    peer.pause(False)
    assert bench.loop.selector.get_key(peer.sock).events == selectors.EVENT_READ
