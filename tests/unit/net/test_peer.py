"""How a server's connection refuses a request."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from simm.net.loop import Loop
from simm.net.peer import Peer, Service
from simm.rpc import Connection, Frame, decode
from simm.wire import messages as M
from simm.wire.messages import Status


class Deaf(Service):
    """Takes nothing; notes why connections end."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        raise AssertionError

    def on_close(self, peer: Peer, reason: str) -> None:
        self.closed.append(reason)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Peer, Deaf]]:
    """A client's end, the server's, and its service."""
    loop, service = Loop(), Deaf()
    near, far = socket.socketpair()
    with near:
        yield near, loop.adopt(far, service, "somebody"), service
        loop.close()


def said(sock: socket.socket) -> Frame:
    """The only message that has arrived."""
    conn = Connection()
    conn.receive_data(sock.recv(1 << 12))
    frame = conn.next_frame()
    assert frame is not None and conn.next_frame() is None
    return frame


@pytest.mark.parametrize("verdict", [False, True])
def test_unauthorized_is_said_logged_and_the_end(
    ends: tuple[socket.socket, Peer, Deaf], caplog: pytest.LogCaptureFixture, verdict: bool
) -> None:
    near, peer, service = ends
    if verdict:
        peer.send_verdict(M.Error("no token of ours"), Status.UNAUTHORIZED, 7)
    else:
        peer.refuse(7, "no token of ours")
    frame = said(near)
    assert decode(frame) == M.Error("no token of ours")
    assert (frame.request_id, frame.status) == (7, Status.UNAUTHORIZED)
    assert near.recv(1) == b"" and service.closed == ["unauthorized"]
    (line,) = caplog.records
    assert line.getMessage() == "refusing somebody: no token of ours" and line.levelno == logging.WARNING


def test_another_refusal_leaves_the_connection_open(
    ends: tuple[socket.socket, Peer, Deaf], caplog: pytest.LogCaptureFixture
) -> None:
    near, peer, service = ends
    peer.refuse(7, "try again", Status.BUSY)
    frame = said(near)
    assert decode(frame) == M.Error("try again") and (frame.request_id, frame.status) == (7, Status.BUSY)
    assert not peer.closed and not service.closed and not caplog.records


def test_a_verdict_that_is_no_refusal_goes_on(ends: tuple[socket.socket, Peer, Deaf]) -> None:
    near, peer, service = ends
    peer.send_verdict(M.Done(1), Status.OK, 8)
    assert decode(said(near)) == M.Done(1) and not service.closed


def test_a_long_reason_is_cut(ends: tuple[socket.socket, Peer, Deaf]) -> None:
    near, peer, _ = ends
    peer.refuse(7, "x" * 10 * M.TEXT_MAX)
    assert len(decode(said(near)).text) <= M.TEXT_MAX
