"""Connections that stay open for the next request: who keeps one, who does not, and what that must not cost others."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from simm.net.http import DEADLINE_S, Page, Web
from simm.net.loop import Loop
from tests.support.manager_process import WAIT_S
from tests.support.tokens import old_tokens

KEEP_S = 60.0
GET = b"GET /a HTTP/1.1\r\n\r\n"


class Town:
    """A server in this thread, whose clock stands still, and its clients."""

    def __init__(
        self, keep_s: float = KEEP_S, most: int = 4, tokens: tuple[str, ...] = (), users: Any = None
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.loop = Loop(lambda: self.now)
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address: Any = listener.getsockname()
        self.bodies: list[bytes] = []
        self.web = Web(
            self.loop, listener, {"/a": lambda: Page("one"), "/big": lambda: Page("x" * 3_000_000)},
            old_tokens(*tokens), posts={"/p": self._post}, body_max=1 << 20, verbs={"PUT": lambda path: Page("put")},
            keep_s=keep_s, connections_max=most, users=users,
        )  # fmt: skip
        self.stack = contextlib.ExitStack()

    def _post(self, body: bytes) -> Page:
        self.bodies.append(body)
        if body == b"fail":
            raise ZeroDivisionError
        return Page("got", status=400 if body == b"wrong" else 200)

    def connect(self) -> socket.socket:
        sock = self.stack.enter_context(socket.create_connection(self.address, WAIT_S))
        sock.setblocking(False)
        count = self.web.connections
        self._until(lambda: self.web.connections != count or count == 4)
        return sock

    def _until(self, what: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what() and time.monotonic() < deadline:
            self.loop.run_once(0.002)

    def turn(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            self.loop.run_once(0.002)

    def answers(self, sock: socket.socket, count: int) -> tuple[list[tuple[int, bytes]], bool]:
        """Return the next answers, as status and body, and whether the connection is at its end behind them."""
        data, ended, closes = b"", False, False
        found: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and (len(found) < count or data):
            self.loop.run_once(0.002)
            with contextlib.suppress(BlockingIOError):
                more = sock.recv(1 << 20)
                ended = ended or not more
                data += more
            head, gap, rest = data.partition(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            if gap and len(rest) >= size:
                found.append((int(head.split(b" ")[1]), rest[:size]))
                closes = b"\r\nConnection: close" in head
                data = rest[size:]
        self.turn()
        with contextlib.suppress(BlockingIOError):
            ended = ended or not sock.recv(1)
        assert closes == ended or not found, "the answer says whether it is the last"
        return found, ended


@pytest.fixture
def town() -> Iterator[Any]:
    made: list[Town] = []

    def make(*args: Any, **named: Any) -> Town:
        made.append(Town(*args, **named))
        return made[-1]

    yield make
    for each in made:
        each.stack.close()
        each.web.close()
        each.loop.close()


def _post(body: bytes, more: bytes = b"") -> bytes:
    return b"POST /p HTTP/1.1\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s" % (
        more, len(body), body,
    )  # fmt: skip


def test_many_requests_by_one_connection(town: Any) -> None:
    here = town()
    sock = here.connect()
    for number in range(5):
        sock.send(_post(b"%d" % number))
        assert here.answers(sock, 1) == ([(200, b"got")], False)
        sock.send(GET)
        assert here.answers(sock, 1) == ([(200, b"one")], False)
        sock.send(_post(b"wrong"))
        assert here.answers(sock, 1) == ([(400, b"got")], False), "the caller's mistake, and its body was read"
    assert here.web.connections == 1 and here.bodies[::2] == [b"0", b"1", b"2", b"3", b"4"]


def test_each_request_names_this_host(town: Any) -> None:
    """The name is looked at once where requests have the same one. One with another name is another page's."""
    here = town()
    for first in (_post(b"1", b"Host: 127.0.0.1:80\r\n"), GET.replace(b"\r\n\r\n", b"\r\nHost: localhost\r\n\r\n")):
        sock = here.connect()
        for _ in range(3):
            sock.send(first)
            (answer,), ended = here.answers(sock, 1)
            assert answer[0] == 200 and not ended
        sock.send(_post(b"2", b"Host: rebound.example\r\n"))
        (answer,), ended = here.answers(sock, 1)
        assert answer[0] == 403 and ended
    assert b"2" not in here.bodies


def test_a_server_that_keeps_none_and_a_client_that_wants_none(town: Any) -> None:
    here = town(0.0)
    sock = here.connect()
    sock.send(GET)
    assert here.answers(sock, 1) == ([(200, b"one")], True)
    here = town()
    for request in (
        GET.replace(b"1.1", b"1.0"), GET.replace(b"\r\n\r\n", b"\r\nConnection: x, Close\r\n\r\n"),
        _post(b"1", b"Connection: close\r\n"),
    ):  # fmt: skip
        sock = here.connect()
        sock.send(request)
        (answer,), ended = here.answers(sock, 1)
        assert answer[0] == 200 and ended, request
    assert here.web.connections == 0


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /a HTTP/1.1\r\nContent-Length: 24\r\n\r\n", b"GET /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT /a HTTP/1.1\r\nContent-Length: 24\r\n\r\n", b"GET /none HTTP/1.1\r\n\r\n", b"no HTTP\r\n\r\n",
        b"POST /none HTTP/1.1\r\nContent-Length: 24\r\n\r\n", _post(b"fail"),
        b"POST /p HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1\r\nContent-Length: 24\r\n\r\n",
        b"POST /p HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /p HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: 24\r\n\r\n",
        b"GET /a HTTP/1.1\r\nContent-Length : 24\r\n\r\n", b"GET /a HTTP/1.1\r\nX: 1\r\n Content-Length: 24\r\n\r\n",
    ],
)  # fmt: skip
def test_what_may_be_a_body_is_never_a_request(request_: bytes, town: Any) -> None:
    """Else a client that is let ask through a proxy could ask with another's rights. All of it in one packet."""
    here = town()
    sock = here.connect()
    sock.send(GET)
    assert here.answers(sock, 1) == ([(200, b"one")], False)
    sock.send(request_ + _post(b"smuggled"))
    found, ended = here.answers(sock, 1)
    assert len(found) == 1 and ended and b"smuggled" not in here.bodies
    assert here.web.connections == 0


def test_a_refused_connection_ends(town: Any) -> None:
    here = town(tokens=("good-token",))
    sock = here.connect()
    sock.send(GET.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer good-token\r\n\r\n") + GET)
    assert here.answers(sock, 2) == ([(200, b"one"), (401, b"Authorization: Bearer TOKEN is required\n")], True)


class _Users:
    """In the place of LocalUsers: what it says of each connection that it looks at, and how often it looks."""

    def __init__(self) -> None:
        self.says, self.looks = "", 0

    def fault(self, _sock: socket.socket, *, tokens: bool) -> str:
        self.looks += 1
        return self.says


def test_a_connections_user_is_looked_up_once(town: Any) -> None:
    """Who may ask may go on; each connection is looked at, and one that may not is told so, and ends."""
    users = _Users()
    server = town(users=users)
    sock = server.connect()
    for _ in range(3):
        sock.sendall(GET + _post(b"{}"))
        assert server.answers(sock, 2) == ([(200, b"one"), (200, b"got")], False)
    assert users.looks == 1
    users.says = "of another user"
    other = server.connect()
    other.sendall(GET + GET)
    assert server.answers(other, 1) == ([(403, b"of another user\n")], True) and users.looks == 2
    sock.sendall(GET)
    assert server.answers(sock, 1) == ([(200, b"one")], False) and users.looks == 2


def test_requests_that_come_together_are_answered_in_order_one_a_turn(town: Any) -> None:
    here = town()
    sock, other = here.connect(), here.connect()
    sock.send(b"".join(_post(b"%d" % number) for number in range(50)) + GET[:9])
    other.send(_post(b"other"))
    assert here.answers(other, 1) == ([(200, b"got")], False)
    assert here.bodies.index(b"other") < 10, "between them"
    found, ended = here.answers(sock, 50)
    assert found == [(200, b"got")] * 50 and not ended
    here.bodies.remove(b"other")
    assert here.bodies == [b"%d" % number for number in range(50)]
    sock.send(GET[9:])
    assert here.answers(sock, 1) == ([(200, b"one")], False)


def test_a_flood_of_requests_waits_in_the_kernel(town: Any) -> None:
    """What has come and is not answered is bounded, though answers go out all the time."""
    here = town()
    sock = here.connect()
    for _ in range(200):
        with contextlib.suppress(BlockingIOError):
            sock.send(GET * 1000)
        here.loop.run_once(0.0)
        assert sum(len(client.incoming) for client in here.web._clients) < 100_000


def test_an_answer_larger_than_the_kernel_takes_and_then_the_next(town: Any) -> None:
    here = town()
    sock = here.connect()
    sock.send(GET.replace(b"/a", b"/big") + GET)
    found, ended = here.answers(sock, 2)
    assert [len(body) for _, body in found] == [3_000_000, 3] and not ended


def test_times_of_idle_and_of_slow_connections(town: Any) -> None:
    here = town()
    idle, slow = here.connect(), here.connect()
    for sock in (idle, slow):
        sock.send(GET)
        assert here.answers(sock, 1) == ([(200, b"one")], False)
    here.now = KEEP_S - 5
    here.turn()
    assert here.web.connections == 2, "idle, but not for too long"
    slow.send(GET[:9])
    here.turn()
    here.now = KEEP_S + 2
    here.turn()
    assert here.web.connections == 1 and here.answers(idle, 0)[1], "the idle one has ended"
    here.now = KEEP_S - 5 + DEADLINE_S + 2
    here.turn()
    assert here.web.connections == 0, "a request has its time, as ever"


def test_the_connection_whose_last_request_is_oldest_makes_room(town: Any) -> None:
    here = town()
    socks = [here.connect() for _ in range(4)]
    for sock in (*socks, socks[0]):
        sock.send(GET)
        assert here.answers(sock, 1) == ([(200, b"one")], False)
    here.connect()
    here.turn()
    assert here.web.displaced == 1 and here.web.connections == 4
    assert [here.answers(sock, 0)[1] for sock in socks] == [False, True, False, False]
