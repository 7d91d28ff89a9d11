"""The web server that shows a server's pages: requests, tokens, slow and broken readers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from simm.config.parsers import parse_address
from simm.config.tokens import old_tokens
from simm.net.http import REQUEST_BYTES_MAX, Page, Web, prometheus
from simm.net.loop import Loop
from tests.support.manager_process import WAIT_S


@pytest.fixture
def web() -> Iterator[Callable[..., tuple[Loop, Web, str]]]:
    """A Web on a loop of this thread."""
    opened: list[tuple[Loop, Web]] = []

    def make(tokens: tuple[str, ...] = (), clock: Callable[[], float] = time.monotonic) -> tuple[Loop, Web, str]:
        loop = Loop(clock)
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()

        def broken() -> Page:
            raise ZeroDivisionError

        routes = {"/": lambda: Page("x" * 2_000_000), "/healthz": lambda: Page("ok"), "/broken": broken}
        opened.append((loop, Web(loop, listener, routes, old_tokens(*tokens))))
        return loop, opened[-1][1], f"{host}:{port}"

    yield make
    for loop, server in opened:
        server.close()
        loop.close()


def ask(loop: Loop, address: str, request: bytes) -> bytes:
    """The whole answer to a request, with the loop run in between."""
    with contextlib.closing(socket.create_connection(parse_address(address), WAIT_S)) as sock:
        sock.sendall(request)
        sock.setblocking(False)
        answer = b""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            loop.run_once(0.005)
            try:
                data = sock.recv(1 << 20)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return answer
            if not data:
                return answer
            answer += data
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"200"), (b"HEAD / HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /?a=b HTTP/1.1\r\n\r\n", b"200"),
        (b"\r\n\r\n", b"400"), (b"GET /\r\n\r\n", b"400"), (b"GET / FTP/1\r\n\r\n", b"400"),
        (b"\xff\xfe\r\n\r\n", b"400"),
        (b"DELETE / HTTP/1.1\r\n\r\n", b"405"), (b"GET /../etc HTTP/1.1\r\n\r\n", b"404"),
        (b"GET / HTTP/1.1\r\n" + b"a" * REQUEST_BYTES_MAX, b"431"), (b"GET /broken HTTP/1.1\r\n\r\n", b"500"),
    ],
)  # fmt: skip
def test_web_answers(web: Callable[..., tuple[Loop, Web, str]], request_: bytes, status: bytes) -> None:
    loop, server, address = web()
    answer = ask(loop, address, request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == status
    if request_.startswith(b"HEAD"):
        assert body == b"" and b"Content-Length: 2000000" in head
    elif status == b"200":
        assert len(body) == 2_000_000
    assert server.connections == 0


def test_web_tokens(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    loop, _, address = web(("good-token",))
    for header, status in [
        (b"", b"401"), (b"Authorization: Bearer bad-token\r\n", b"401"),
        (b"Authorization: Basic good-token\r\n", b"401"),
        (b"authorization: bearer good-token\r\n", b"200"),
    ]:  # fmt: skip
        assert ask(loop, address, b"GET / HTTP/1.1\r\n" + header + b"\r\n").split(b" ")[1] == status
    assert ask(loop, address, b"GET /healthz HTTP/1.1\r\n\r\n").split(b" ")[1] == b"200"


def test_web_drops_the_slow(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    clock = [0.0]
    loop, server, address = web((), lambda: clock[0])
    with contextlib.closing(socket.create_connection(parse_address(address), WAIT_S)) as sock:
        sock.sendall(b"GET")
        while not server.connections:
            loop.run_once(0.0)
        for _ in range(12):
            clock[0] += 1.0
            loop.run_once(0.0)
        assert server.connections == 0
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_prometheus_escapes() -> None:
    text = prometheus([("m", "gauge", "About.", {"a": 'x"\\\n'}, 1), ("m", "gauge", "About.", {}, 2.5)])
    assert text == '# HELP m About.\n# TYPE m gauge\nm{a="x\\"\\\\\\n"} 1\nm 2.5\n'
