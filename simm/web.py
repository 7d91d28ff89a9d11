"""A very small HTTP server on the event loop: /metrics, /healthz and a status page.

It answers GET and HEAD, one request a connection, from functions that return at once. It is no web
server for anything else: requests are capped at ``REQUEST_BYTES_MAX``, connections at
``CONNECTIONS_MAX`` and ``DEADLINE_S``, bodies of requests are not read.

When all places are taken a newcomer gets the oldest one's. A probe sends its request at once and is answered in the
same turn; whoever has held a place longest is one that does not read, or has nothing to ask. Refusing
the newcomer instead would let 64 idle connections make a healthy server look dead to its probes.

With tokens, every page but /healthz and /leader wants ``Authorization: Bearer TOKEN`` (Prometheus can send it).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from .greeting import token_fits
from .loop import Loop, forget_at_close

log = logging.getLogger("simm.web")

REQUEST_BYTES_MAX: Final = 8 << 10
CONNECTIONS_MAX: Final = 64
DEADLINE_S: Final = 10.0
#: Pages that need no token: probes cannot send one, and they say nothing but "alive".
OPEN_PAGES: Final = frozenset({"/healthz", "/leader"})

TEXT: Final = "text/plain; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"


class Page(NamedTuple):
    """What a route returns."""

    body: str
    content_type: str = TEXT
    status: int = 200


_REASONS: Final = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
                   431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable"}


class _Client:
    """One connection: the request so far, then the answer still to send."""

    __slots__ = ("deadline", "incoming", "outgoing", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.incoming = bytearray()
        self.outgoing = memoryview(b"")


class Web:
    """Serves ``routes`` (path -> function) on a listening socket, in the loop's thread."""

    def __init__(
        self, loop: Loop, listener: socket.socket, routes: Mapping[str, Callable[[], Page]], tokens: Iterable[str] = ()
    ) -> None:
        self.loop = loop
        self.routes = routes
        self.requests = 0
        self._tokens = [token.encode() for token in tokens]
        self._listener = listener
        #: In the order of their arrival, so the first is the oldest.
        self._clients: dict[_Client, None] = {}
        self.displaced = 0
        listener.setblocking(False)
        loop.watch(listener, self._accept)
        loop.call_every(1.0, self._sweep)

    @property
    def connections(self) -> int:
        """Connections open now."""
        return len(self._clients)

    def close(self) -> None:
        """Close the listener and all connections."""
        self.loop.unwatch(self._listener)
        self._listener.close()
        for client in list(self._clients):
            self._drop(client)

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:
            # No descriptors left, mostly: the listener would stay readable and spin.
            log.error("cannot accept: %s; trying again in 1 s", exc)
            self.loop.unwatch(self._listener)
            self.loop.call_later(1.0, self._listen_again)
            return
        sock.setblocking(False)
        if len(self._clients) >= CONNECTIONS_MAX:
            self.displaced += 1
            self._drop(next(iter(self._clients)), abort=True)
        client = _Client(sock, self.loop.now + DEADLINE_S)
        self._clients[client] = None
        self.loop.watch(sock, lambda _mask: self._readable(client))

    def _listen_again(self) -> None:
        if self._listener.fileno() >= 0:
            self.loop.watch(self._listener, self._accept)

    def _readable(self, client: _Client) -> None:
        try:
            data = client.sock.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.incoming += data
        end = client.incoming.find(b"\r\n\r\n")
        if end < 0:
            if len(client.incoming) > REQUEST_BYTES_MAX:
                self._answer(client, Page("request too large\n", TEXT, 431), False)
            return
        self.requests += 1
        method, page = self._page(bytes(client.incoming[:end]))
        self._answer(client, page, method == "HEAD")

    def _page(self, head: bytes) -> tuple[str, Page]:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "", Page("not HTTP\n", TEXT, 400)
        method, target = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return method, Page("only GET and HEAD\n", TEXT, 405)
        route = self.routes.get(target)
        if route is None:
            return method, Page("there are: " + " ".join(sorted(self.routes)) + "\n", TEXT, 404)
        if self._tokens and target not in OPEN_PAGES and not self._allowed(lines[1:]):
            return method, Page("Authorization: Bearer TOKEN is required\n", TEXT, 401)
        try:
            return method, route()
        except Exception:
            log.exception("page %s failed", target)
            return method, Page("internal error\n", TEXT, 500)

    def _allowed(self, headers: list[str]) -> bool:
        for line in headers:
            name, _, value = line.partition(":")
            scheme, _, given = value.strip().partition(" ")
            if name.lower() == "authorization" and scheme.lower() == "bearer":
                return token_fits(self._tokens, given.strip().encode("latin-1"))
        return False

    def _answer(self, client: _Client, page: Page, head_only: bool) -> None:
        body = page.body.encode()
        extra = "WWW-Authenticate: Bearer\r\n" if page.status == 401 else ""
        head = (
            f"HTTP/1.1 {page.status} {_REASONS.get(page.status, 'Status')}\r\n"
            f"Content-Type: {page.content_type}\r\nContent-Length: {len(body)}\r\n"
            f"Cache-Control: no-store\r\n{extra}Connection: close\r\n\r\n"
        ).encode()
        client.outgoing = memoryview(head if head_only else head + body)
        self.loop.unwatch(client.sock)
        # Not loop.watch(): that one looks for input, and we only have output left.
        self.loop.selector.register(client.sock, selectors.EVENT_WRITE, lambda _mask: self._writable(client))
        self._writable(client)

    def _writable(self, client: _Client) -> None:
        try:
            while client.outgoing:
                client.outgoing = client.outgoing[client.sock.send(client.outgoing) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self._drop(client)

    def _drop(self, client: _Client, *, abort: bool = False) -> None:
        if client not in self._clients:
            return
        del self._clients[client]
        self.loop.unwatch(client.sock)
        if abort:
            forget_at_close(client.sock)
        else:
            with contextlib.suppress(OSError):
                # What the client still sends would otherwise turn our answer into a reset.
                client.sock.shutdown(socket.SHUT_WR)
                client.sock.recv(4096)
        client.sock.close()

    def _sweep(self) -> None:
        for client in list(self._clients):
            if self.loop.now > client.deadline:
                self._drop(client, abort=True)


def prometheus(samples: Iterable[tuple[str, str, str, Mapping[str, Any], float]]) -> str:
    """Prometheus text of (name, type, help, labels, value); samples of one name must stand together."""
    lines: list[str] = []
    last = ""
    for name, kind, about, labels, value in samples:
        if name != last:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            last = name
        inner = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
        lines.append(f"{name}{{{inner}}} {value}" if inner else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
