"""A port with TLS that something only looks at: load balancers and probes connect, and close without a byte."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simm.config.parsers import TlsOptions
from simm.net.listeners import listen_tcp
from simm.net.loop import Loop
from simm.net.peer import Peer, Service
from simm.net.tls_peer import ServerTls, accepting
from simm.rpc import Frame
from tests.support.certificates import Authority, needs_openssl
from tests.support.waiting import wait_until

pytestmark = needs_openssl
HOST = "127.0.0.1"


class Silent(Service):
    """Keeps why its peers were closed."""

    hello_first = True

    def __init__(self) -> None:
        self.closed: list[str] = []

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        raise AssertionError("nobody sends a frame")

    def on_close(self, peer: Peer, reason: str) -> None:
        self.closed.append(reason)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Loop, Silent, int]]:
    loop, service = Loop(), Silent()
    listener = listen_tcp(HOST, 0)
    tls = ServerTls(TlsOptions(cert=str(Authority(tmp_path).issue("server"))))
    loop.listen(listener, service, peers=accepting(tls))
    yield loop, service, listener.getsockname()[1]
    loop.close()


def closing(_sock: socket.socket) -> None:
    """As a probe of Kubernetes."""


def resetting(sock: socket.socket) -> None:
    """As a probe of HAProxy."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_closing(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def probed(served: tuple[Loop, Silent, int], before_close: Callable[[socket.socket], None], first: bytes = b"") -> None:
    """Connect, say this, and close; turn the loop until the server has closed its end."""
    loop, service, port = served
    count = len(service.closed)
    with socket.create_connection((HOST, port)) as sock:
        sock.sendall(first)
        before_close(sock)
    wait_until(lambda: loop.run_once(0.01) >= 0 and len(service.closed) > count, "the server has closed it")


@pytest.mark.parametrize("before_close", [closing, resetting, half_closing])
@pytest.mark.parametrize("accepted", [False, True], ids=["gone before it is accepted", "gone later"])
def test_a_probe_is_no_mistake(
    served: tuple[Loop, Silent, int], caplog: pytest.LogCaptureFixture, accepted: bool,
    before_close: Callable[[socket.socket], None],
) -> None:  # fmt: skip
    loop, service, _ = served

    def end(sock: socket.socket) -> None:
        if accepted:
            wait_until(lambda: loop.run_once(0.01) >= 0 and loop.peers, "it is accepted")
        before_close(sock)

    with caplog.at_level(logging.INFO):
        for _ in range(3):
            probed(served, end)
    assert service.closed == ["the peer closed without a byte"] * 3
    assert not loop.protocol_errors and not caplog.records


def test_one_byte_is_a_beginning(served: tuple[Loop, Silent, int], caplog: pytest.LogCaptureFixture) -> None:
    """Positive control: who has begun a handshake and goes is counted, and logged."""
    loop, _, _ = served
    probed(served, closing, b"\x16")
    assert loop.protocol_errors == 1 and "middle of the TLS handshake" in caplog.text
