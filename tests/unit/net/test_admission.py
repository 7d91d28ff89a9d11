"""Connections before HELLO: what they may cost, and what they cost others."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from simm.errors import RemoteProtocolError
from simm.net import admission
from simm.net import loop as loop_module
from simm.net.admission import HELLO_BYTES_MAX, HELLO_S, LINES_MAX, LINES_S, LogLimit, Strangers, origin_of
from simm.net.http import Page, Web
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.net.peer import LAG_S, OUT_LEAST_BYTES, STALL_S, Peer, Service
from simm.rpc import HEADER_BYTES, Connection, Frame, decode, encode
from simm.wire import messages as M
from simm.wire.hello import check_opening, client_hello

from ...support.waiting import wait_until

HELLO = encode(client_hello(M.Role.CLIENT), 1)
WAIT_S = 20.0


class Greeted(Service):
    """Wants a HELLO, and answers it; takes bulk in ``takes`` bytes at a time after that."""

    hello_first = True

    def on_connect(self, peer: Peer) -> None:
        peer.context = False

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        if not peer.context:
            check_opening(frame)
        msg = decode(frame)
        if isinstance(msg, M.Hello):
            peer.context = True
            peer.admit()
        elif not isinstance(msg, M.Ping | M.Shards):
            raise RemoteProtocolError(f"{type(msg).__name__} is not for this test")
        peer.send_message(M.Done(len(self.__dict__)), frame.request_id)


class Bench:
    """A loop with a listener and a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop = Loop(lambda: self.now)
        self.listener = listen_tcp("127.0.0.1", 0)
        self.loop.listen(self.listener, Greeted())
        self.ends: list[socket.socket] = []

    def connect(self, data: bytes = b"") -> socket.socket:
        end = socket.create_connection(self.listener.getsockname(), WAIT_S)
        # The clock here runs much faster than TCP's timers, by which small pieces would wait for one another.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ends.append(end)
        if data:
            end.sendall(data)
        for _ in range(2 if data else 1):  # the connection and its data are there once the kernel comes to it
            self.loop.run_once(1.0)
        self.turn()
        return end

    def close(self) -> None:
        self.loop.close()
        for end in self.ends:
            end.close()

    def turn(self, count: int = 5) -> None:
        for _ in range(count):
            self.loop.run_once(0.0)

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds * 20):
            self.now += 0.05  # less than what counts as a stop of this process
            self.turn(1)

    def answer(self, end: socket.socket) -> M.Error | M.Done | None:
        """The next message, None at the connection's end."""
        conn = Connection()
        ended = False

        def heard() -> bool:
            nonlocal ended
            self.turn(2)
            try:
                data = end.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                data = b""
            conn.receive_data(data)
            ended = not data
            return True

        while (frame := conn.next_frame()) is None:
            wait_until(heard, "an answer, or the end", pause_s=0.001)
            if ended:
                return None
        msg: M.Error | M.Done = decode(frame)
        return msg


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def large(size: int) -> bytes:
    """A frame with so many bytes of body."""
    return encode(M.Shards(1, bytes(size - 24), b"", 0), 2)


def test_a_stranger_s_frame_is_small(bench: Bench) -> None:
    """It is refused by its header: the body never comes."""
    end = bench.connect(large(HELLO_BYTES_MAX + 1)[:HEADER_BYTES])
    said = bench.answer(end)
    assert isinstance(said, M.Error) and "HELLO" in said.text and bench.answer(end) is None
    end = bench.connect(HELLO + large(HELLO_BYTES_MAX * 8))
    assert isinstance(bench.answer(end), M.Done) and not bench.loop.strangers


def test_a_stranger_has_some_seconds(bench: Bench) -> None:
    """PING and single bytes are no HELLO."""
    silent, pinging, slow = bench.connect(), bench.connect(encode(M.Ping(1), 1)), bench.connect(HELLO[:20])
    known = bench.connect(HELLO)
    bench.pass_time(int(HELLO_S) - 1)
    slow.sendall(HELLO[20:21])
    pinging.sendall(encode(M.Ping(1), 2))
    bench.turn()
    assert len(bench.loop.peers) == 4
    bench.pass_time(3)
    assert len(bench.loop.peers) == 1 and bench.answer(silent) is None
    known.sendall(encode(M.Ping(1), 2))
    assert isinstance(bench.answer(known), M.Done)


def test_those_who_were_kept_waiting_are_not_blamed(bench: Bench) -> None:
    """This process was stopped: their HELLO may wait in the sockets."""
    end = bench.connect()
    bench.now += 60.0
    bench.turn(1)
    assert len(bench.loop.peers) == 1
    end.sendall(HELLO)
    bench.turn()
    assert not bench.loop.strangers and isinstance(bench.answer(end), M.Done)


def test_a_crowd_that_keeps_the_process_late_has_no_more_time_for_it(bench: Bench) -> None:
    for first in (encode(M.Ping(1), 1), b"", HELLO[:20], HELLO):
        bench.connect(first)
    for _ in range(30):
        assert bench.loop.lag_s < HELLO_S
        bench.now += 3 * LAG_S
        bench.turn(1)
    assert len(bench.loop.peers) == 1 and not bench.loop.strangers


def test_one_read_of_a_stranger_is_one_frame(bench: Bench) -> None:
    end = bench.connect()
    end.sendall(encode(M.Ping(1), 1) * (4 * HELLO_BYTES_MAX // HEADER_BYTES))
    bench.loop.run_once(1.0)
    (peer,) = bench.loop.peers
    assert 0 < peer.in_bytes <= HELLO_BYTES_MAX + HEADER_BYTES and len(bench.loop.strangers) == 1


def test_strangers_replace_strangers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent ones of one address, the oldest first; nobody else."""
    monkeypatch.setattr(admission, "STRANGERS_PER_ADDRESS", 5)
    known = bench.connect(HELLO)
    silent = [bench.connect() for _ in range(20)]
    assert len(bench.loop.strangers) == 5 and len(bench.loop.peers) == 6
    assert isinstance(bench.answer(bench.connect(HELLO)), M.Done) and isinstance(bench.answer(known), M.Done)
    assert bench.answer(silent[0]) is None
    silent[-1].sendall(HELLO)
    assert isinstance(bench.answer(silent[-1]), M.Done), "the newest are still there"


def test_the_address_with_most_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STRANGERS_MAX", 10)
    strangers: Strangers[str] = Strangers()
    assert strangers.add("b0", b"b", 0.0) is None
    for number in range(9):
        assert strangers.add(f"a{number}", b"a", 1.0) is None
    for number in range(3):
        assert strangers.add(f"c{number}", b"c", 2.0) == f"a{number}"
        strangers.discard(f"a{number}")
    assert len(strangers) == 10 and "b0" in strangers and strangers.overdue(HELLO_S + 0.5) == ["b0"]
    for name in ("b0", "b0", "unknown"):
        strangers.discard(name)
    assert len(strangers) == 9 and not strangers.overdue(HELLO_S + 0.5)


def test_what_one_address_is() -> None:
    with socket.socket(socket.AF_INET6) as six, socket.socket() as four, socket.socket(socket.AF_UNIX) as near:
        assert origin_of(four, ("10.0.0.1", 5)) == origin_of(six, ("::ffff:10.0.0.1", 7, 0, 0))
        assert origin_of(four, ("10.0.0.1", 5)) != origin_of(four, ("10.0.0.2", 5))
        assert origin_of(six, ("2001:db8::1", 1, 0, 0)) == origin_of(six, ("2001:db8::ffff:2", 1, 0, 0))
        assert origin_of(six, ("2001:db8::1", 1, 0, 0)) != origin_of(six, ("2001:db8:0:1::1", 1, 0, 0))
        assert origin_of(six, ("fe80::1%lo", 1, 0, 1)) == origin_of(six, ("fe80::2", 1, 0, 0))
        assert origin_of(near, "") == origin_of(near, b"")


def test_what_strangers_cause_is_logged_so_often(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> int:
        return sum("closing" in record.message for record in caplog.records)

    for _ in range(LINES_MAX * 3):
        bench.connect(b"nonsense")
    assert lines() == LINES_MAX and bench.loop.protocol_errors == LINES_MAX * 3
    bench.pass_time(int(LINES_S) + 1)
    bench.connect(b"nonsense")
    assert lines() == LINES_MAX + 1
    assert any(f"{LINES_MAX * 2} more lines" in record.message for record in caplog.records)


def test_each_level_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Peers that cause warnings without end must not hide that a request failed."""
    now = [0.0]
    limit = LogLimit(logging.getLogger("simm.net.loop"), lambda: now[0])
    for number in range(3 * LINES_MAX):
        limit(logging.WARNING, "nonsense %d", number)
    limit(logging.ERROR, "a request failed")
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == ["a request failed"]
    assert len(caplog.records) == LINES_MAX + 1
    now[0] += LINES_S
    limit(logging.ERROR, "another")
    assert len(caplog.records) == LINES_MAX + 2, "no line was left out of this level"
    limit(logging.WARNING, "and on")
    assert f"{2 * LINES_MAX} more lines" in caplog.records[-2].message and caplog.records[-1].message == "and on"


def test_a_line_with_its_exception(caplog: pytest.LogCaptureFixture) -> None:
    limit = LogLimit(logging.getLogger("simm.net.loop"))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        limit(logging.ERROR, "it was %s", "bad", exc_info=True)
    assert caplog.records[0].message == "it was bad" and caplog.records[0].exc_info


@pytest.mark.parametrize("each", [1, 200, OUT_LEAST_BYTES // 20])
def test_a_few_bytes_of_input_are_no_progress(bench: Bench, each: int) -> None:
    """The rule of output: so many bytes in so many seconds, or the rest of it."""
    end = bench.connect(HELLO + large(1 << 20)[:100])
    (peer,) = bench.loop.peers
    sent = peer.in_bytes

    def arrived() -> bool:
        bench.turn(1)
        return peer.in_bytes == sent

    for _ in range(int(STALL_S) + 7):
        if not peer.closed:
            end.sendall(bytes(each))
            sent += each
            wait_until(arrived, "the bytes have not arrived", pause_s=0.001)
        bench.pass_time(1)
    assert bool(bench.loop.peers) == (each * STALL_S > OUT_LEAST_BYTES)


def test_descriptors_are_kept_for_the_pages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connect, a probe is answered."""
    pages = listen_tcp("127.0.0.1", 0)
    web = Web(bench.loop, pages, {"/healthz": lambda: Page("ok\n")})
    highest = max(end.fileno() for end in (bench.connect(), pages))
    monkeypatch.setattr(bench.loop, "_descriptor_limit", highest + 20)
    for _ in range(50):
        bench.connect()
    assert len(bench.loop.peers) < 30 and bench.answer(bench.ends[-1]) is None
    with socket.create_connection(pages.getsockname(), WAIT_S) as probe:
        probe.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")

        def answered() -> bytes:
            bench.turn(2)
            with contextlib.suppress(BlockingIOError):
                return probe.recv(1 << 16, socket.MSG_DONTWAIT)
            return b""

        assert wait_until(answered, "the probe is answered").startswith(b"HTTP/1.1 200")
    web.close()


def test_strangers_of_many_addresses_leave_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A low limit of open files: those who say nothing must not keep out who says HELLO."""
    limit = 2 * max(map(int, os.listdir("/proc/self/fd"))) + 80  # room for both ends of a quarter of it, and 20 more
    monkeypatch.setattr(loop_module, "descriptor_limit", lambda: limit)
    bench = Bench()
    try:
        for number in range(limit // 4 + 20):
            near = (f"127.0.0.{2 + number // 3}", 0)
            bench.ends.append(socket.create_connection(bench.listener.getsockname(), WAIT_S, near))
            bench.turn()
        assert len(bench.loop.strangers) == limit // 4
        assert isinstance(bench.answer(bench.connect(HELLO)), M.Done)
    finally:
        bench.close()


def test_the_reserve_is_left_of_any_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, least in ((64, 56), (1024, 944), (1 << 20, (1 << 20) - 80)):
        limit: Callable[[int], tuple[int, int]] = lambda _, soft=soft: (soft, soft)  # type: ignore[misc]  # noqa: E731
        monkeypatch.setattr(admission.resource, "getrlimit", limit)
        assert admission.descriptor_limit() == least
