"""The web server that shows a server's pages: requests, tokens, slow and broken readers, and all places taken."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.parsers import parse_address
from simm.net import http, local_users
from simm.net.http import CONNECTIONS_MAX, REQUEST_BYTES_MAX, UNSENT_BYTES_MAX, Page, Route, Web
from simm.net.local_users import LocalUsers
from simm.net.loop import Loop
from simm.net.metrics import Metric, Samples
from tests.support.child import ROOT
from tests.support.manager_process import WAIT_S
from tests.support.tokens import old_tokens


@pytest.fixture
def web() -> Iterator[Callable[..., tuple[Loop, Web, str]]]:
    """A Web on a loop of this thread."""
    opened: list[tuple[Loop, Web]] = []

    def make(
        tokens: tuple[str, ...] = (), clock: Callable[[], float] = time.monotonic, users: LocalUsers | None = None
    ) -> tuple[Loop, Web, str]:
        loop = Loop(clock)
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()

        def broken() -> Page:
            raise ZeroDivisionError

        def metrics() -> Samples:
            metric = Metric("m", "gauge", "About.")
            samples = Samples([metric])
            samples.add(metric, 1)
            return samples

        routes: dict[str, Route] = {
            "/": lambda: Page("x" * 2_000_000), "/healthz": lambda: Page("ok"), "/broken": broken, "/metrics": metrics,
        }  # fmt: skip
        opened.append((loop, Web(loop, listener, routes, old_tokens(*tokens), users=users)))
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
        assert ask(loop, address, b"GET /metrics HTTP/1.1\r\n" + header + b"\r\n").split(b" ")[1] == status
    assert ask(loop, address, b"GET / HTTP/1.1\r\n\r\n").split(b" ")[1] == b"200", "the page asks for the token"
    assert ask(loop, address, b"GET /healthz HTTP/1.1\r\n\r\n").split(b" ")[1] == b"200"
    assert ask(loop, address, b"GET /readyz HTTP/1.1\r\n\r\n").split(b" ")[1] == b"404", "it needs no token either"


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


def test_issue_answers_that_nobody_reads_are_bounded(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    """Each may have megabytes: 64 of them would be a server's memory."""
    loop, server, address = web()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            sock = stack.enter_context(contextlib.closing(socket.create_connection(parse_address(address), WAIT_S)))
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while loop.run_once(0.01):
                unsent = [len(client.outgoing) for client in server._clients]
                assert sum(unsent) <= UNSENT_BYTES_MAX
        assert max(unsent) > 1_000_000 and len(unsent) > 5 and server.displaced > 20
        assert len(ask(loop, address, b"GET / HTTP/1.1\r\n\r\n")) > 2_000_000, "who reads gets it"


def test_metrics_come_in_the_form_that_is_asked_for(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    loop, _, address = web()
    plain = ask(loop, address, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert b"text/plain; version=0.0.4" in plain and plain.endswith(b"\r\n\r\n# HELP m About.\n# TYPE m gauge\nm 1\n")
    other = ask(loop, address, b"GET /metrics HTTP/1.1\r\nACCEPT: application/openmetrics-text\r\n\r\n")
    assert b"application/openmetrics-text; version=1.0.0" in other and other.endswith(b"m 1\n# EOF\n")


def test_issue_a_page_may_have_text_that_is_no_utf8(
    web: Callable[..., tuple[Loop, Web, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the process: the name of a file, or what a peer has said."""
    loop, server, address = web()
    monkeypatch.setitem(server.routes, "/odd", lambda: Page("no \udcff \u00e4"))
    answer = ask(loop, address, b"GET /odd HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\nno \\udcff \xc3\xa4")
    assert b"Content-Length: 12\r\n" in answer


def test_a_handshake_ends_with_its_connection(web: Callable[..., tuple[Loop, Web, str]]) -> None:
    """The selector may have reported it in the turn in which it was dropped."""
    loop, server, address = web()
    steps: list[str] = []
    with contextlib.closing(socket.create_connection(parse_address(address), WAIT_S)):
        while not server.connections:
            loop.run_once(0.1)
        (client,) = server._clients
        server._drop(client)
        handshake: Any = SimpleNamespace(sock=client.sock, step=lambda: steps.append("step"))
        server._shake(client, handshake)
    assert not steps


def test_a_new_connection_gets_the_place_of_the_oldest() -> None:
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


def test_what_there_is_after_the_first_scrape_is_not_looked_at_again(
    web: Callable[..., tuple[Loop, Web, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection of a server's modules and classes takes longer than a page, which waits for it."""
    steps: list[str] = []
    monkeypatch.setattr(http.gc, "collect", lambda: steps.append("collect"))
    monkeypatch.setattr(http.gc, "freeze", lambda: steps.append("freeze"))
    loop, page, address = web()
    page._settles = True  # as a server's that has the process for itself
    ask(loop, address, b"GET /healthz HTTP/1.1\r\n\r\n")
    loop.run_once(0.0)
    assert not steps, "what a scrape needs is not there yet"
    for _ in range(3):
        assert ask(loop, address, b"GET /metrics HTTP/1.1\r\n\r\n")
        loop.run_once(0.0)
    assert steps == ["collect", "freeze"]


@pytest.mark.parametrize("tokens", [(), ("the-token-of-this-server",)])
def test_issue_a_refusal_by_user_says_what_this_server_has(
    web: Callable[..., tuple[Loop, Web, str]], monkeypatch: pytest.MonkeyPatch, tokens: tuple[str, ...]
) -> None:
    """A server with tokens told its callers that it had none."""
    monkeypatch.setattr(local_users, "tcp_uid", lambda _sock: 4711)
    loop, _, address = web(tokens, users=LocalUsers())
    answer = ask(loop, address, b"GET /broken HTTP/1.1\r\nAuthorization: Bearer another\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403") and b"this one is of uid 4711: " in answer
    if tokens:
        assert b": show a token of its --token-file, or start it with --allow-uid 4711" in answer
        assert b"a server without" not in answer
    else:
        assert b"start it with --allow-uid 4711, or give both sides a --token-file" in answer


def test_a_server_with_metrics_has_loaded_what_they_need() -> None:
    """The first scrape does not wait for it."""
    code = (
        "import sys, socket\nfrom simm.net.http import Web\nfrom simm.net.loop import Loop\n"
        "assert 'psutil' not in sys.modules\n"
        "Web(Loop(), socket.create_server(('127.0.0.1', 0)), {sys.argv[1]: None})\nprint('psutil' in sys.modules)"
    )
    for route, wanted in (("/metrics", "True"), ("/workers", "False")):
        done = subprocess.run([sys.executable, "-c", code, route], capture_output=True, text=True, check=True, cwd=ROOT)
        assert done.stdout.strip() == wanted
