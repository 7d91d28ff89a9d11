"""Connections to a worker's UNIX socket that never say HELLO, of its own user: few are kept, and not for long."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from simm.errors import TransportError
from simm.ipc.commit_ring import TAIL
from simm.net import admission
from simm.net.admission import HELLO_BYTES_MAX, LINES_MAX, LINES_S, STRANGERS_PER_ADDRESS
from simm.net.channel import Refused
from simm.net.peer import Peer
from simm.rpc import HEADER, HEADER_BYTES, encode
from simm.server.worker import Worker
from simm.wire import messages as M
from simm.wire.hello import client_hello
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

MANY = STRANGERS_PER_ADDRESS + 44
HELLO = encode(client_hello(M.Role.CLIENT), 1)

pytestmark = pytest.mark.quick


@contextlib.contextmanager
def silent(worker: WorkerThread, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that say no more than ``data``."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            sock.connect(worker.path)
            if data:
                sock.sendall(data)
            made.append(sock)
        yield made


def is_closed(sock: socket.socket) -> bool:
    """Return True if the worker has closed a connection."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_many_that_say_nothing_give_way_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HELLO_S", 600.0)  # none goes for its time
    with WorkerThread() as worker, contextlib.closing(worker.session()) as before, silent(worker, MANY) as socks:
        with contextlib.closing(worker.session()) as session:
            for each in (before, session):
                assert each.exchange(M.Exists([bytes(16)])).statuses
        wait_until(lambda: len(worker.loop.strangers) <= STRANGERS_PER_ADDRESS, "those who are too many are gone")
        assert sum(map(is_closed, socks)) >= MANY - STRANGERS_PER_ADDRESS and is_closed(socks[0])
        socks[-1].sendall(HELLO)
        assert socks[-1].recv(1 << 16), "the newest may still say HELLO"


def test_control_without_admission_all_of_them_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    connected = Worker.on_connect

    def admit(self: Worker, peer: Peer) -> None:
        connected(self, peer)
        peer.admit()

    monkeypatch.setattr(Worker, "on_connect", admit)
    with WorkerThread() as worker, silent(worker, MANY) as socks:
        worker.session().close()
        wait_until(lambda: len(worker.loop.peers) >= MANY, "all are there")
        assert not any(map(is_closed, socks)) and not worker.loop.strangers


def test_they_have_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """PING and the beginning of a HELLO are no HELLO. Sessions, and questions of this user, may be idle."""
    with WorkerThread() as worker, contextlib.ExitStack() as stack:
        session = stack.enter_context(contextlib.closing(worker.session()))
        channel = stack.enter_context(contextlib.closing(worker.channel()))
        channel.call(M.Stats(0))
        monkeypatch.setattr(admission, "HELLO_S", 600.0)  # until all of them are there
        socks = [
            sock for data in (b"", encode(M.Ping(7), 1), HELLO[:20])
            for sock in stack.enter_context(silent(worker, 3, data))
        ]  # fmt: skip
        for sock in socks[3:6]:
            sock.recv(1 << 10)  # PONG
        monkeypatch.setattr(admission, "HELLO_S", 0.3)
        wait_until(lambda: all(map(is_closed, socks)), "they are closed")
        assert channel.call(M.Stats(0)).json and session.exchange(M.Exists([bytes(16)])).statuses


def test_a_stranger_s_frame_is_small() -> None:
    with WorkerThread() as worker:
        magic, version, opcode, *_ = HEADER.unpack_from(HELLO)
        header = HEADER.pack(magic, version, opcode, 0, 0, 1, HELLO_BYTES_MAX + 1)
        with silent(worker, 1, header) as (sock,):
            said = b""
            while data := sock.recv(1 << 16):
                said += data
            assert len(said) > HEADER_BYTES and b"HELLO" in said


def test_a_stranger_s_descriptors_are_not_kept() -> None:
    """Each connection could hold four of the worker's, and 1,024 connections all that it may have."""

    def held() -> int:
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/self/fd/{name}") == "/dev/full"
        return count

    with WorkerThread() as worker, open("/dev/full", "rb") as file, silent(worker, 8) as socks:
        for sock in socks:
            socket.send_fds(sock, [HELLO[:20]], [file.fileno()] * 3)
        wait_until(lambda: sum(peer.in_bytes == 20 for peer in list(worker.loop.peers)) == 8, "all have been read")
        assert held() == 1


def test_issue_no_client_keeps_a_stream_from_the_worker() -> None:
    """By one session after the other, until the arena had no line left: all values by TCP were misses then."""
    with WorkerThread() as worker, contextlib.ExitStack() as stack:
        while True:
            channel = stack.enter_context(contextlib.closing(worker.channel()))
            try:
                channel.call(client_hello(M.Role.CLIENT, namespace="greedy"))
            except Refused as exc:
                assert exc.status == M.Status.NO_SPACE and "too many clients" in str(exc)
                break
        for role in (M.Role.STREAM, M.Role.MOVER):
            served, _ = worker.hello(role)
            stack.enter_context(contextlib.closing(served))


def test_issue_rings_that_make_no_sense_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with WorkerThread() as worker:
        for _ in range(3 * LINES_MAX):
            with contextlib.closing(worker.session()) as session:
                assert session.ring is not None
                session.ring.words[TAIL] = 1 << 40
                with pytest.raises(TransportError):
                    session.channel.call(M.Kick(0))
        assert worker.loop.protocol_errors == 3 * LINES_MAX
    lines = [record for record in caplog.records if "ring tail" in record.getMessage()]
    periods = 1 + int((time.monotonic() - began) / LINES_S)
    assert 0 < len(lines) <= periods * LINES_MAX
