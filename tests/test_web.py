"""The small HTTP server when all its places are taken. What it answers is tested with the manager's pages."""

from __future__ import annotations

import contextlib
import socket

import pytest

from simm.loop import Loop
from simm.web import CONNECTIONS_MAX, Page, Web


def test_a_newcomer_gets_the_place_of_the_oldest() -> None:
    """Idle connections in all places do not keep a probe out, and what they held is closed."""
    loop = Loop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        web = Web(loop, listener, {"/healthz": lambda: Page("ok")})
        stack.callback(web.close)
        idle = [
            stack.enter_context(contextlib.closing(socket.create_connection(listener.getsockname())))
            for _ in range(CONNECTIONS_MAX)
        ]
        while web.connections < CONNECTIONS_MAX:
            loop.run_once(0.1)
        assert web.displaced == 0
        with contextlib.closing(socket.create_connection(listener.getsockname())) as probe:
            probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            probe.setblocking(False)
            answer = b""
            for _ in range(100):
                loop.run_once(0.1)
                with contextlib.suppress(BlockingIOError):
                    answer += probe.recv(4096)
                if answer.endswith(b"ok"):
                    break
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok")
        assert web.displaced == 1 and web.connections == CONNECTIONS_MAX - 1
        with pytest.raises(ConnectionResetError):  # the oldest had to go, at once
            idle[0].recv(1)
        idle[1].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert idle[1].recv(1), "the others stay"
