"""A minimal HTTP server on the event loop, for /metrics, /healthz, /readyz and a status page.

It answers GET and HEAD from functions that return at once, one request per connection unless it has ``keep_s``.
Requests are limited to
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
process of one of these users the other (``net/local_users.py``). Pages above and /metrics are for all. A connection's
other end is looked up once, with its first request.

With ``keep_s`` a connection stays open for that time after an answer, for the next request (HTTP/1.1, persistent
connections), unless the client says ``Connection: close``. It ends after a request that was refused, that has a body
which nobody reads, or of which two servers might not agree where it ends. Requests that come before the answer wait for
their turn. The oldest connection is then the one whose last request is the oldest.

``verbs`` answer methods that change something and have no body, as PUT and DELETE. A browser asks before it sends one
of them to another origin, and gets no answer to that.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import gc
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
#: At least a whole record of TLS, 16 KiB: what OpenSSL would keep, no selector reports.
_READ_BYTES: Final = 64 << 10
CONNECTIONS_MAX: Final = 64
UNSENT_BYTES_MAX: Final = 16 << 20
#: What the kernel keeps of an answer, in no limit of this process.
_SEND_BYTES: Final = 256 << 10
DEADLINE_S: Final = 10.0
#: Pages that reveal only whether the server is well, and what is wrong. Probes send no token, and name it as they like.
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

    ``body``: where the body of a POST begins, how long it is, and who takes it. ``keep``: it stays open after the
    answer. ``idle``: it waits for the next request. ``known``: its other end is of a user who may ask.
    ``host``: how its last request named this host, if it did.
    """

    __slots__ = ("body", "deadline", "host", "idle", "incoming", "keep", "known", "outgoing", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.incoming = bytearray()
        self.outgoing = memoryview(b"")
        self.body: tuple[int, int, Post] | None = None
        self.keep = False
        self.idle = False
        self.known = False
        self.host: str | None = None


def settle() -> None:
    """Exempt all that this process has made by now from garbage collection, once a scrape has loaded what that needs.

    A look at a server's modules and classes takes 15 ms, and a page waits for it. What is made later is looked at.
    """
    gc.collect()
    gc.freeze()


class Web:
    """A server for ``routes`` (path -> function) on a listening socket, in the loop's thread.

    ``settles``: the process is this server's alone, so the first scrape calls :func:`settle`.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, routes: Mapping[str, Route],
        tokens: Sequence[Token] = (), tls: Context | None = None, *,
        posts: Mapping[str, Post] | None = None, body_max: int = 0, verbs: Mapping[str, Verb] | None = None,
        basic: bool = False, users: LocalUsers | None = None, keep_s: float = 0.0,
        connections_max: int = CONNECTIONS_MAX, settles: bool = False,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.routes = routes
        self._posts: Mapping[str, Post] = {} if posts is None else posts
        self._body_max = body_max
        self._verbs: Mapping[str, Verb] = {} if verbs is None else verbs
        self._basic = basic
        self._users = users
        self._keep_s = keep_s
        self._connections_max = connections_max
        self._tokens = tokens
        self._tls = tls
        self._listener = listener
        self._loopback = _is_loopback(listener.getsockname()[0])
        #: In order of arrival, oldest first.
        self._clients: dict[_Client, None] = {}
        self.displaced = 0
        #: :func:`settle` is due, at the first scrape.
        self._settles = settles
        if "/metrics" in routes:
            metrics.load()
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
        if self._keep_s:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._clients) >= self._connections_max:
            self.displaced += 1
            oldest = next(iter(self._clients))
            self._drop(oldest, abort=not oldest.idle)
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
        if client not in self._clients:  # dropped in this turn
            return
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
        if client.idle:
            client.idle = False
            client.deadline = self.loop.now + DEADLINE_S
            self._clients[client] = self._clients.pop(client)
        if client.body is not None:
            self._read_body(client)
        else:
            self._parse(client)

    def _parse(self, client: _Client) -> None:
        """Answer what has come, if it is a whole request."""
        client.keep = False
        end = client.incoming.find(b"\r\n\r\n", 0, REQUEST_BYTES_MAX + 4)
        if end < 0:
            if len(client.incoming) > REQUEST_BYTES_MAX:
                self._answer(client, Page("request too large\n", TEXT, 431), False)
            return
        lines = client.incoming[:end].decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._answer(client, Page("not HTTP\n", TEXT, 400), False)
            return
        method, target = words[0], words[1].partition("?")[0]
        headers, clear = _headers(lines[1:])
        client.keep = (
            self._keep_s > 0 and clear and words[2] == "HTTP/1.1"
            and "close" not in [each.strip() for each in headers.get("connection", "").lower().split(",")]
        )  # fmt: skip
        if self._posts and method == "POST":
            self._begin_body(client, target, headers, end + 4)
            return
        del client.incoming[: end + 4]
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            client.keep = False
        page = self._page(client, method, target, headers)
        if page.status >= 400:
            client.keep = False
        self._answer(client, page, method == "HEAD")

    def _begin_body(self, client: _Client, target: str, headers: Mapping[str, str], start: int) -> None:
        """Check the head of a POST, and read its body."""
        post = self._posts.get(target)
        length = headers.get("content-length", "")
        refused = self._refused(client, target, headers)
        if post is None:
            refused = Page("POST goes to: " + " ".join(sorted(self._posts)) + "\n", TEXT, 404)
        elif refused is None and headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            refused = Page(f"Content-Type: {_JSON} is required\n", TEXT, 415)
        elif refused is None and ("transfer-encoding" in headers or not re.fullmatch(r"[0-9]{1,12}", length)):
            refused = Page("one Content-Length is required\n", TEXT, 411)
        elif refused is None and int(length) > self._body_max:
            refused = Page(f"a body has at most {self._body_max} bytes\n", TEXT, 413)
        if refused is not None or post is None:
            client.keep = False
            self._answer(client, refused or Page("", TEXT, 404), False)
            return
        client.body = start, int(length), post
        if headers.get("expect", "").lower() == "100-continue" and len(client.incoming) == start:
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
        with memoryview(client.incoming) as whole:
            body = bytes(whole[start : start + length])
        del client.incoming[: start + length]
        client.body = None
        try:
            page = post(body)
        except Exception:
            log.exception("a POST failed")
            page = Page("internal error\n", TEXT, 500)
            client.keep = False
        self._answer(client, page, False)

    def _refused(self, client: _Client, target: str, headers: Mapping[str, str]) -> Page | None:
        """Return the page for who may not ask for ``target``; None for others."""
        if self._loopback and target not in PROBES and (named := headers.get("host")) is not None:
            if named != client.host and not _is_this_host(named):
                return Page("open this page as localhost, or by its address\n", TEXT, 403)
            client.host = named
        if target in OPEN_PAGES or (self._tokens and self._allowed(headers)):
            return None
        if self._users is not None and target != "/metrics" and not client.known:
            try:
                fault = self._users.fault(client.sock, tokens=bool(self._tokens))
            except HasClosed as exc:
                fault = str(exc)
            client.known = not fault
            return Page(fault + "\n", TEXT, 403) if fault else None
        if self._tokens and self._users is None:
            return Page("Authorization: Bearer TOKEN is required\n", TEXT, 401)
        return None

    def _page(self, client: _Client, method: str, target: str, headers: Mapping[str, str]) -> Page:
        if method in self._verbs:
            return self._done(client, self._verbs[method], target, headers)
        if method not in ("GET", "HEAD"):
            return Page("only GET and HEAD\n", TEXT, 405)
        route = self.routes.get(target)
        if route is None:
            return Page("pages: " + " ".join(sorted(self.routes)) + "\n", TEXT, 404)
        refused = self._refused(client, target, headers)
        if refused is not None:
            return refused
        try:
            found = route()
            if isinstance(found, metrics.Samples):
                openmetrics = metrics.wants_openmetrics(headers.get("accept", ""))
                kind = metrics.OPENMETRICS if openmetrics else metrics.TEXT
                found = Page(found.text(openmetrics=openmetrics), kind)
                if self._settles:
                    self._settles = False
                    self.loop.call_later(0.0, settle)  # when the page is on its way
            return found
        except Exception:
            log.exception("page %s failed", target)
            return Page("internal error\n", TEXT, 500)

    def _done(self, client: _Client, verb: Verb, target: str, headers: Mapping[str, str]) -> Page:
        """Return the answer to a method that changes something."""
        refused = self._refused(client, target, headers)
        if refused is not None:
            return refused
        try:
            return verb(target) or Page("no such page\n", TEXT, 404)
        except Exception:
            log.exception("%s failed", target)
            return Page("internal error\n", TEXT, 500)

    def _allowed(self, headers: Mapping[str, str]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        secret = given.strip().encode("latin-1")
        if scheme.lower() == "basic" and self._basic:
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != "bearer":
            return False
        return token_fits([token.secret.encode() for token in self._tokens], secret)

    def _answer(self, client: _Client, page: Page, head_only: bool) -> None:
        body = page.body.encode(errors="backslashreplace")  # texts of files and peers may have lone surrogates
        extra = "".join(f"{name}: {value}\r\n" for name, value in page.headers)
        extra += "WWW-Authenticate: Bearer\r\n" if page.status == 401 else ""
        close = "" if client.keep else "Connection: close\r\n"
        head = (
            f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}\r\n"
            f"Content-Type: {page.content_type}\r\nContent-Length: {len(body)}\r\n"
            f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{extra}{close}\r\n"
        ).encode()
        client.outgoing = memoryview(head if head_only else head + body)
        if self._send(client):
            self._sent(client, watched=True)
            return
        self.loop.unwatch(client.sock)
        # Not loop.watch(), which waits for input: only output is left.
        self.loop.selector.register(client.sock, selectors.EVENT_WRITE, lambda _mask: self._writable(client))
        unsent = sum(len(each.outgoing) for each in self._clients)
        for each in list(self._clients):
            if unsent <= UNSENT_BYTES_MAX:
                break
            if each.outgoing and each is not client:
                self.displaced += 1
                unsent -= len(each.outgoing)
                self._drop(each, abort=True)

    def _writable(self, client: _Client) -> None:
        if self._send(client):
            self.loop.unwatch(client.sock)
            self._sent(client, watched=False)

    @staticmethod
    def _send(client: _Client) -> bool:
        """Send what the kernel takes. Return True if nothing is left."""
        try:
            while client.outgoing:
                client.outgoing = client.outgoing[client.sock.send(client.outgoing) :]
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            client.outgoing = memoryview(b"")
            client.keep = False
        return True

    def _sent(self, client: _Client, *, watched: bool) -> None:
        """Drop a connection that has its answer, or wait for its next request."""
        if not client.keep:
            self._drop(client)
            return
        self._clients[client] = self._clients.pop(client)
        if client.incoming:
            # A turn of its own, as others come between; until then no more is read.
            client.deadline = self.loop.now + DEADLINE_S
            if watched:
                self.loop.unwatch(client.sock)
            self.loop.call_later(0.0, lambda: self._next(client))
            return
        client.idle = True
        client.deadline = self.loop.now + self._keep_s
        if not watched:
            self.loop.watch(client.sock, lambda _mask: self._readable(client))

    def _next(self, client: _Client) -> None:
        """Answer a request that came with the one before it."""
        if client in self._clients:
            self.loop.watch(client.sock, lambda _mask: self._readable(client))
            self._parse(client)

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
                self._drop(client, abort=not client.idle)


def _headers(lines: Sequence[str]) -> tuple[dict[str, str], bool]:
    """Return the values by their names in lower case, those of one name separated by commas, and whether all is clear.

    It is not where a name has blanks around it, as a proxy may read such a line otherwise.
    """
    found: dict[str, str] = {}
    clear = True
    for line in lines:
        name, _, value = line.partition(":")
        plain = name.strip().lower()
        clear = clear and len(plain) == len(name)
        value = value.strip()
        found[plain] = f"{found[plain]},{value}" if plain in found else value
    return found, clear


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _is_this_host(named: str) -> bool:
    """Return False if a Host header names what may be another host's page. HTTP/1.0 needs none."""
    found = _HOST.fullmatch(named)
    if found is None:
        return False
    host = (found["six"] or found["host"]).lower().rstrip(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", socket.gethostname().lower()) or host.endswith(".localhost")
    return True
