"""A minimal HTTP server on the event loop, for /metrics, /healthz, /readyz and a status page.

It answers GET and HEAD, one request per connection, from functions that return at once. Requests are limited to
``REQUEST_BYTES_MAX``, connections to ``CONNECTIONS_MAX`` and ``DEADLINE_S``. The server reads no request bodies, but
for those of POST where it has ``posts``. It reads one only when all checks of its head have passed, at most
``body_max`` bytes, and it must be declared to be JSON: a browser sends that to another origin only if it may.

When ``CONNECTIONS_MAX`` connections are open, a new one replaces the oldest. A probe sends its request at once and gets
its answer in the same turn, so the oldest connection belongs to a client that does not read or does not ask. If the
server refused the new one instead, 64 idle connections would make it look dead to its probes.

Answers that clients have not read take ``UNSENT_BYTES_MAX`` together: a page with many namespaces has megabytes. Beyond
that the server drops the oldest of them.

On a loopback address every page except those requires a ``Host`` of this host: an address, ``localhost``, or the host's
name. A web page from elsewhere whose name was made to lead here (DNS rebinding) names another, and learns nothing.

With TLS the handshake is part of the time that a connection has. Who asks by plain HTTP is told so.

With tokens, every page except / (a file), /healthz, /readyz and /leader requires
``Authorization: Bearer TOKEN``. Prometheus can send it. A server with ``basic`` also takes the token as the password of
``Basic``, for clients that have nothing but an address: ``http://any:TOKEN@HOST:PORT``.

With ``users``, for a server on loopback whose requests are not for every user of the host, a token is one way, and a
process of one of these users the other (``net/local_users.py``). Pages above and /metrics are for all.

``verbs`` answer methods that change something and have no body, as PUT and DELETE. A browser asks before it sends one
of them to another origin, and gets no answer to that.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
import logging
import re
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..config.tokens import Token
from ..wire.hello import token_fits
from . import metrics
from .channel import reset_on_close
from .listeners import received
from .local_users import LocalUsers
from .loop import Loop
from .peer_uid import HasClosed

if TYPE_CHECKING:
    from .tls import Context, ServerHandshake

log = logging.getLogger("simm.net.http")

REQUEST_BYTES_MAX: Final = 8 << 10
#: A whole record of TLS: what OpenSSL would keep, no selector reports.
_READ_BYTES: Final = 16 << 10
CONNECTIONS_MAX: Final = 64
UNSENT_BYTES_MAX: Final = 16 << 20
#: What the kernel keeps of an answer, in no limit of this process.
_SEND_BYTES: Final = 256 << 10
DEADLINE_S: Final = 10.0
#: Pages that reveal only whether the server is alive. Probes send no token, and name it as they like.
PROBES: Final = frozenset({"/healthz", "/readyz", "/leader"})
#: Pages that need no token. A browser has none when it loads the page that asks for it, which is a file.
OPEN_PAGES: Final = PROBES | {"/"}

_HOST: Final = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^\[\]:\s]+))(?::\d*)?")

TEXT: Final = "text/plain; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"
JSON: Final = "application/json; charset=utf-8"
_JSON: Final = "application/json"


class Page(NamedTuple):
    """A route's result."""

    body: str
    content_type: str = TEXT
    status: int = 200
    #: Further headers: names and values.
    headers: tuple[tuple[str, str], ...] = ()


#: What makes a page.
Route = Callable[[], Page | metrics.Samples]
#: What makes a page of a request's body.
Post = Callable[[bytes], Page]
#: What answers another method for a path; None: there is no such page.
Verb = Callable[[str], Page | None]


class _Client:
    """A connection: the request so far, then the part of the answer that is not sent yet.

    ``body``: where the body of a POST begins, how long it is, and who takes it.
    """

    __slots__ = ("body", "deadline", "incoming", "outgoing", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.incoming = bytearray()
        self.outgoing = memoryview(b"")
        self.body: tuple[int, int, Post] | None = None


class Web:
    """A server for ``routes`` (path -> function) on a listening socket, in the loop's thread."""

    def __init__(
        self, loop: Loop, listener: socket.socket, routes: Mapping[str, Route],
        tokens: Sequence[Token] = (), tls: Context | None = None, *,
        posts: Mapping[str, Post] | None = None, body_max: int = 0, verbs: Mapping[str, Verb] | None = None,
        basic: bool = False, users: LocalUsers | None = None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.routes = routes
        self._posts: Mapping[str, Post] = {} if posts is None else posts
        self._body_max = body_max
        self._verbs: Mapping[str, Verb] = {} if verbs is None else verbs
        self._basic = basic
        self._users = users
        self._tokens = tokens
        self._tls = tls
        self._listener = listener
        self._loopback = _is_loopback(listener.getsockname()[0])
        #: In order of arrival, oldest first.
        self._clients: dict[_Client, None] = {}
        self.displaced = 0
        # One a turn: the loop reads it before so many others have come that it is the oldest.
        loop.accept(listener, self._take, per_turn=1)
        loop.call_every(1.0, self._maintain)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._clients)

    def close(self) -> None:
        """Close the listener and all connections."""
        self.loop.unwatch(self._listener)
        self._listener.close()
        for client in list(self._clients):
            self._drop(client)

    def _take(self, sock: socket.socket, _address: Any) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        if len(self._clients) >= CONNECTIONS_MAX:
            self.displaced += 1
            self._drop(next(iter(self._clients)), abort=True)
        client = _Client(sock, self.loop.now + DEADLINE_S)
        self._clients[client] = None
        if self._tls is None:
            self.loop.watch(sock, lambda _mask: self._readable(client))
            return
        from .tls import ServerHandshake

        handshake = ServerHandshake(sock, self._tls)
        self.loop.watch(sock, lambda _mask: self._shake(client, handshake))

    def _shake(self, client: _Client, handshake: ServerHandshake) -> None:
        """Go on with the handshake, and read when it is done."""
        from .tls import PlainText

        try:
            wants = handshake.step()
        except PlainText:
            self._answer(client, Page("this page takes https only\n", TEXT, 400), False)
            return
        except OSError as exc:
            client.sock = handshake.sock
            log.debug("a page was not asked for: %s", exc)
            self._drop(client)
            return
        client.sock = handshake.sock
        self.loop.unwatch(client.sock)
        if wants:
            self.loop.selector.register(client.sock, wants, lambda _mask: self._shake(client, handshake))
        else:
            self.loop.watch(client.sock, lambda _mask: self._readable(client))

    def _readable(self, client: _Client) -> None:
        data = received(client.sock, _READ_BYTES)
        if data is None:
            return
        if not data:
            self._drop(client)
            return
        client.incoming += data
        if client.body is not None:
            self._read_body(client)
            return
        end = client.incoming.find(b"\r\n\r\n")
        if end < 0:
            if len(client.incoming) > REQUEST_BYTES_MAX:
                self._answer(client, Page("request too large\n", TEXT, 431), False)
            return
        head = bytes(client.incoming[:end])
        if self._posts and head.startswith(b"POST "):
            self._begin_body(client, head, end + 4)
            return
        method, page = self._page(client, head)
        self._answer(client, page, method == "HEAD")

    def _begin_body(self, client: _Client, head: bytes, start: int) -> None:
        """Check the head of a POST, and read its body."""
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._answer(client, Page("not HTTP\n", TEXT, 400), False)
            return
        target = words[1].partition("?")[0]
        post = self._posts.get(target)
        length = _header(lines[1:], "content-length")
        refused = self._refused(client, target, lines[1:])
        if post is None:
            refused = Page("POST goes to: " + " ".join(sorted(self._posts)) + "\n", TEXT, 404)
        elif refused is None and _header(lines[1:], "content-type").partition(";")[0].strip().lower() != _JSON:
            refused = Page(f"Content-Type: {_JSON} is required\n", TEXT, 415)
        elif refused is None and (_header(lines[1:], "transfer-encoding") or not re.fullmatch(r"[0-9]{1,12}", length)):
            refused = Page("one Content-Length is required\n", TEXT, 411)
        elif refused is None and int(length) > self._body_max:
            refused = Page(f"a body has at most {self._body_max} bytes\n", TEXT, 413)
        if refused is not None or post is None:
            self._answer(client, refused or Page("", TEXT, 404), False)
            return
        client.body = start, int(length), post
        if _header(lines[1:], "expect").lower() == "100-continue" and len(client.incoming) == start:
            with contextlib.suppress(OSError):
                client.sock.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._read_body(client)

    def _read_body(self, client: _Client) -> None:
        """Answer when the whole body is there. Of too many that are not, the oldest are dropped."""
        assert client.body is not None
        start, length, post = client.body
        if len(client.incoming) < start + length:
            unread = sum(len(each.incoming) for each in self._clients)
            for each in list(self._clients):
                if unread <= UNSENT_BYTES_MAX:
                    break
                if each.body is not None and each is not client:
                    self.displaced += 1
                    unread -= len(each.incoming)
                    self._drop(each, abort=True)
            return
        body = bytes(client.incoming[start : start + length])
        client.incoming = bytearray()
        try:
            page = post(body)
        except Exception:
            log.exception("a POST failed")
            page = Page("internal error\n", TEXT, 500)
        self._answer(client, page, False)

    def _refused(self, client: _Client, target: str, headers: list[str]) -> Page | None:
        """Return the page for who may not ask for ``target``; None for others."""
        if self._loopback and target not in PROBES and not _names_this_host(headers):
            return Page("open this page as localhost, or by its address\n", TEXT, 403)
        if target in OPEN_PAGES or (self._tokens and self._allowed(headers)):
            return None
        if self._users is not None and target != "/metrics":
            try:
                fault = self._users.fault(client.sock)
            except HasClosed as exc:
                fault = str(exc)
            return Page(fault + "\n", TEXT, 403) if fault else None
        if self._tokens and self._users is None:
            return Page("Authorization: Bearer TOKEN is required\n", TEXT, 401)
        return None

    def _page(self, client: _Client, head: bytes) -> tuple[str, Page]:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "", Page("not HTTP\n", TEXT, 400)
        method, target = words[0], words[1].partition("?")[0]
        if method in self._verbs:
            return method, self._done(client, self._verbs[method], target, lines[1:])
        if method not in ("GET", "HEAD"):
            return method, Page("only GET and HEAD\n", TEXT, 405)
        route = self.routes.get(target)
        if route is None:
            return method, Page("pages: " + " ".join(sorted(self.routes)) + "\n", TEXT, 404)
        refused = self._refused(client, target, lines[1:])
        if refused is not None:
            return method, refused
        try:
            found = route()
            if isinstance(found, metrics.Samples):
                openmetrics = metrics.wants_openmetrics(_header(lines[1:], "accept"))
                kind = metrics.OPENMETRICS if openmetrics else metrics.TEXT
                found = Page(found.text(openmetrics=openmetrics), kind)
            return method, found
        except Exception:
            log.exception("page %s failed", target)
            return method, Page("internal error\n", TEXT, 500)

    def _done(self, client: _Client, verb: Verb, target: str, headers: list[str]) -> Page:
        """Return the answer to a method that changes something."""
        refused = self._refused(client, target, headers)
        if refused is not None:
            return refused
        try:
            return verb(target) or Page("no such page\n", TEXT, 404)
        except Exception:
            log.exception("%s failed", target)
            return Page("internal error\n", TEXT, 500)

    def _allowed(self, headers: list[str]) -> bool:
        for line in headers:
            name, _, value = line.partition(":")
            scheme, _, given = value.strip().partition(" ")
            if name.lower() != "authorization":
                continue
            secret = given.strip().encode("latin-1")
            if scheme.lower() == "basic" and self._basic:
                try:
                    secret = base64.b64decode(secret, validate=True).partition(b":")[2]
                except binascii.Error:
                    return False
            elif scheme.lower() != "bearer":
                continue
            return token_fits([token.secret.encode() for token in self._tokens], secret)
        return False

    def _answer(self, client: _Client, page: Page, head_only: bool) -> None:
        body = page.body.encode()
        extra = "".join(f"{name}: {value}\r\n" for name, value in page.headers)
        extra += "WWW-Authenticate: Bearer\r\n" if page.status == 401 else ""
        head = (
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\n"
            f"Content-Type: {page.content_type}\r\nContent-Length: {len(body)}\r\n"
            f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{extra}Connection: close\r\n\r\n"
        ).encode()
        client.outgoing = memoryview(head if head_only else head + body)
        self.loop.unwatch(client.sock)
        # Not loop.watch(), which waits for input: only output is left.
        self.loop.selector.register(client.sock, selectors.EVENT_WRITE, lambda _mask: self._writable(client))
        self._writable(client)
        unsent = sum(len(each.outgoing) for each in self._clients)
        for each in list(self._clients):
            if unsent <= UNSENT_BYTES_MAX:
                break
            if each.outgoing and each is not client:
                self.displaced += 1
                unsent -= len(each.outgoing)
                self._drop(each, abort=True)

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
            reset_on_close(client.sock)
        else:
            with contextlib.suppress(OSError):
                # Unread input would turn the answer into a reset.
                client.sock.shutdown(socket.SHUT_WR)
                client.sock.recv(4096)
        client.sock.close()

    def _maintain(self) -> None:
        for client in list(self._clients):
            if self.loop.now > client.deadline:
                self._drop(client, abort=True)


def _header(headers: list[str], wanted: str) -> str:
    """Return the values of a header, separated by commas; "" if there is none."""
    found = (line.partition(":") for line in headers)
    return ",".join(value.strip() for name, _, value in found if name.strip().lower() == wanted)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _names_this_host(headers: list[str]) -> bool:
    """Return False if a Host header names what may be another host's page. HTTP/1.0 needs none."""
    for line in headers:
        name, _, value = line.partition(":")
        if name.strip().lower() != "host":
            continue
        found = _HOST.fullmatch(value.strip())
        if found is None:
            return False
        host = (found["six"] or found["host"]).lower().rstrip(".")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if host not in ("localhost", socket.gethostname().lower()) and not host.endswith(".localhost"):
                return False
    return True
