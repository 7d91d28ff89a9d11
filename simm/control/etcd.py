"""A small client of etcd v3, by its HTTP/JSON gateway and the standard library.

    etcd = Etcd([("10.0.0.7", 2379), ("10.0.0.8", 2379)])
    lease, ttl_s = etcd.grant(5)
    done = etcd.txn([created(b"/simm/leader", 0)], [put(b"/simm/leader", b"me", lease)], [get(b"/simm/leader")])

The gateway (``/v3/...`` from etcd 3.4 on) takes a POST with a JSON object and answers with one. Keys and values are
base64, 64-bit numbers are text, and zeros are left out.

What can go wrong, and what we chose
------------------------------------
* *A server answers a byte a second.* Every call has one deadline for all of it: connecting, TLS, sending, waiting and
  reading, over all endpoints. Each endpoint gets an equal part of the time left; the one that answered last is asked
  first. Only the system's name resolution has a time-out of its own: give addresses where that matters.
* *It is unknown whether a request was carried out*, as its answer did not come. Reads, grants, keepalives and
  revocations are repeated at another endpoint. A transaction is not: the error says ``maybe``, and the caller finds
  out. A grant without an answer leaves a lease that ends by its time.
* *An answer is malformed* (a proxy's page, truncated JSON, a number that is none, 100 MiB): EtcdError with the
  server and the reason. Nothing is guessed.
* *Another user listens at etcd's port*, on loopback, where anybody can while etcd is down. Without TLS nothing is sent
  before the kernel has said whose process has accepted the connection.
* *A kept connection* can be dead, or half-read, or another thread's. So each request, about one a second, has its own.
* *keepalive is a stream.* The client sends one request and reads one line; it does not wait for the rest.

Not thread-safe: each thread has its own client. Its only state is the endpoint that answered last, and the login's
token, which is renewed when etcd no longer takes it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..config.parsers import Address, TlsOptions
from ..errors import ConfigError, TransportError, UsageError, printable
from ..host.users import NOT_TRUSTED, trusts
from ..net.peer_uid import HasClosed, NotHere, UnknownUser, is_loopback, tcp_uid
from ..net.tls import Context, no_passphrase

#: Largest answer that is read. A key of SiMM has at most a few hundred KiB.
ANSWER_BYTES_MAX: Final = 16 << 20
#: etcd's default limit of one request: --max-request-bytes.
REQUEST_BYTES_MAX: Final = 3 << 19

# The gRPC codes that are told apart.
_INVALID_ARGUMENT: Final = 3
_NOT_FOUND: Final = 5
_UNAUTHENTICATED: Final = 16
#: The request was understood and refused; another endpoint would say the same.
_REFUSALS: Final = frozenset({3, 5, 6, 7, 8, 9, 10, 11, 12, 16})


class EtcdError(TransportError):
    """No useful answer. ``code``: etcd's gRPC status, or None. ``maybe``: the request may have been carried out."""

    def __init__(self, text: str, *, code: int | None = None, maybe: bool = False) -> None:
        super().__init__(printable(text))  # pages and answers to peers show it
        self.code = code
        self.maybe = maybe


class KeyValue(NamedTuple):
    """A key as etcd has it. ``lease`` is 0 without one."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int


class TxnResult(NamedTuple):
    """``revision``: etcd's after the transaction, and that of the keys it put. ``found``: the results of each
    :func:`get` of the branch taken, in order."""

    succeeded: bool
    revision: int
    found: list[KeyValue | None]


# --- parts of transactions --------------------------------------------------------------------


def created(key: bytes, revision: int) -> dict[str, Any]:
    """Condition: the key was created in that revision; 0: it does not exist."""
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def modified(key: bytes, revision: int) -> dict[str, Any]:
    """Condition: the key was last written in that revision; 0: it does not exist."""
    return {"key": _b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: bytes, value: bytes, lease: int = 0) -> dict[str, Any]:
    """Write a key, bound to a lease if there is one."""
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": str(lease)}}


def get(key: bytes) -> dict[str, Any]:
    """Read a key."""
    return {"request_range": {"key": _b64(key)}}


def delete(key: bytes, end: bytes = b"") -> dict[str, Any]:
    """Delete a key, or all keys from it up to ``end``, exclusive."""
    return {"request_delete_range": {"key": _b64(key), "range_end": _b64(end)}}


# --- the client -------------------------------------------------------------------------------


class Etcd:
    """One user of an etcd cluster.

    Args:
        endpoints: (host, port) of each member.
        tls: returns the context of a new connection, as :func:`followed_tls` makes one. None for http.
        login: (user, password) where etcd's authentication is on. Without TLS only for loopback endpoints.
        deadline_s: for each call that gives none of its own, in seconds.
        trusted: users besides this process's own and root whose etcd is believed at a loopback address without TLS.

    Raises UsageError without an endpoint, and ConfigError for a login that would leave this host unencrypted.
    """

    def __init__(
        self, endpoints: Sequence[tuple[str, int]], *, tls: Callable[[], ssl.SSLContext] | None = None,
        login: tuple[str, str] | None = None, deadline_s: float = 2.0, trusted: Container[int] = (),
    ) -> None:  # fmt: skip
        if not endpoints:
            raise UsageError("no endpoint of etcd given")
        if login is not None and tls is None:
            refuse_plain_login(endpoints)
        self.endpoints = list(endpoints)
        self.deadline_s = deadline_s
        self._tls = tls
        self._login = login
        self._trusted = trusted
        self._at = 0
        self._token = ""

    def __repr__(self) -> str:
        return f"<Etcd {','.join(_name(each) for each in self.endpoints)}>"

    def get(self, key: bytes, deadline_s: float | None = None) -> KeyValue | None:
        """Return the key as a majority has it (linearizable), or None."""
        found = self._call("kv/range", {"key": _b64(key)}, deadline_s).range()
        return found[0] if found else None

    def txn(
        self, compare: Sequence[dict[str, Any]], success: Sequence[dict[str, Any]],
        failure: Sequence[dict[str, Any]] = (), deadline_s: float | None = None,
    ) -> TxnResult:  # fmt: skip
        """If all conditions hold, do ``success``, else ``failure``; at once and as a whole.

        The error's ``maybe`` says that it may have been done.
        """
        body = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        answer = self._call("kv/txn", body, deadline_s, again=False)
        succeeded = answer.flag("succeeded")
        asked = success if succeeded else failure
        parts = answer.objects("responses")
        if len(parts) != len(asked):
            raise answer.malformed(f"{len(parts)} responses to {len(asked)} requests")
        found = []
        for question, part in zip(asked, parts):
            if "request_range" in question:
                values = part.object("response_range").range()
                found.append(values[0] if values else None)
        return TxnResult(succeeded, answer.revision(), found)

    def grant(self, ttl_s: int, deadline_s: float | None = None) -> tuple[int, int]:
        """Return a new lease and its time to live in seconds, which may be longer than asked."""
        answer = self._call("lease/grant", {"TTL": str(ttl_s)}, deadline_s)
        lease, granted = answer.number("ID"), answer.number("TTL")
        if not lease or granted < 1:
            raise answer.malformed(f"a lease {lease} of {granted} s")
        return lease, granted

    def keepalive(self, lease: int, deadline_s: float | None = None) -> int:
        """Renew a lease; return its time in seconds, or 0 if it has ended."""
        try:
            answer = self._call("lease/keepalive", {"ID": str(lease)}, deadline_s, stream=True)
        except EtcdError as exc:
            if exc.code == _NOT_FOUND:
                return 0
            raise
        result = answer.object("result")
        if result.number("ID") != lease:
            raise answer.malformed("about another lease")
        return max(0, result.number("TTL"))

    def revoke(self, lease: int, deadline_s: float | None = None) -> None:
        """End a lease and delete its keys. One that has ended already is no error."""
        try:
            self._call("lease/revoke", {"ID": str(lease)}, deadline_s)
        except EtcdError as exc:
            if exc.code != _NOT_FOUND:
                raise

    # -- asking --------------------------------------------------------------------------------

    def _call(
        self, what: str, body: dict[str, Any], deadline_s: float | None, *, again: bool = True, stream: bool = False
    ) -> _Answer:
        """Ask each endpoint until one answers. ``again``: even if another may have carried it out."""
        until = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        why: list[str] = []
        maybe = False
        for left in range(len(self.endpoints), 0, -1):
            remaining = until - time.monotonic()
            if remaining <= 0:
                break
            endpoint = self.endpoints[self._at % len(self.endpoints)]
            try:
                return self._authorized(endpoint, what, body, time.monotonic() + remaining / left, stream)
            except EtcdError as exc:
                if exc.code in _REFUSALS:
                    raise
                self._at += 1
                maybe = maybe or exc.maybe
                why.append(str(exc))
                if maybe and not again:
                    break
        raise EtcdError(f"no etcd answers {what}: {'; '.join(why) or 'no time left'}", maybe=maybe)

    def _authorized(
        self, endpoint: tuple[str, int], what: str, body: dict[str, Any], until: float, stream: bool
    ) -> _Answer:
        """Ask one endpoint; log in first if necessary, and again if the token has expired."""
        if self._login is None:
            return self._ask(endpoint, what, body, until, stream)
        fresh = not self._token
        if fresh:
            self._log_in(endpoint, until)
        try:
            return self._ask(endpoint, what, body, until, stream)
        except EtcdError as exc:
            old = exc.code == _UNAUTHENTICATED or (exc.code == _INVALID_ARGUMENT and "auth" in str(exc))
            if fresh or not old:
                raise
        self._log_in(endpoint, until)
        return self._ask(endpoint, what, body, until, stream)

    def _log_in(self, endpoint: tuple[str, int], until: float) -> None:
        assert self._login is not None
        self._token = ""
        name, password = self._login
        try:
            answer = self._ask(endpoint, "auth/authenticate", {"name": name, "password": password}, until, False)
        except EtcdError as exc:
            exc.maybe = False  # the request that needed it was not sent
            raise
        self._token = answer.text("token")

    def _ask(
        self, endpoint: tuple[str, int], what: str, body: dict[str, Any], until: float, stream: bool
    ) -> _Answer:
        """Make one request to one endpoint, complete by ``until``."""
        name = _name(endpoint)
        sent = False
        sock: socket.socket | None = None
        try:
            sock = self._connect(endpoint, until)
            connection = http.client.HTTPConnection(*endpoint)
            connection.sock = _Timed(sock, until)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            if self._token:
                headers["Authorization"] = self._token
            sent = True
            connection.request("POST", f"/v3/{what}", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            raw = response.readline(ANSWER_BYTES_MAX + 1) if stream else response.read(ANSWER_BYTES_MAX + 1)
        except TimeoutError as exc:
            why = f": {exc.strerror}" if exc.strerror else ""
            raise EtcdError(f"{name}: no whole answer in time{why}", maybe=sent) from None
        except (OSError, http.client.HTTPException, ValueError) as exc:
            text = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            raise EtcdError(f"{name}: {text}", maybe=sent) from exc
        finally:
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.close()
        return _parse(name, what, response.status, raw)

    def _connect(self, endpoint: tuple[str, int], until: float) -> socket.socket:
        """Return a connected socket, with TLS if configured, else of a trusted user on loopback. Raises OSError."""
        failure: OSError = OSError("the name has no address")
        for family, kind, protocol, _canonical, address in socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(until))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    sock.settimeout(_left(until))
                    sock = self._tls().wrap_socket(sock, server_hostname=endpoint[0])
                elif is_loopback(sock):
                    self._require_trusted(sock, until)
                return sock
            except OSError as exc:
                sock.close()
                failure = exc
                if isinstance(exc, TimeoutError):
                    break
        try:
            raise failure
        finally:
            del failure  # else the exception and this frame hold each other

    def _require_trusted(self, sock: socket.socket, until: float) -> None:
        """Raise OSError unless the other end is a trusted user's. A connection is nobody's until it is accepted."""
        wait_s = 0.001
        while True:
            try:
                uid = tcp_uid(sock)
                break
            except NotHere:
                return  # only root can have redirected it
            except UnknownUser as exc:
                left = until - time.monotonic()
                if left <= 0:
                    accepted = not isinstance(exc, HasClosed)
                    why = f"its user cannot be told ({exc}); use TLS" if accepted else "it accepts no connection"
                    raise TimeoutError(errno.ETIMEDOUT, why) from None
                sock.settimeout(min(wait_s, left))
                wait_s *= 2
                with contextlib.suppress(TimeoutError):
                    sock.recv(1, socket.MSG_PEEK)
                    raise ConnectionResetError(errno.ECONNRESET, "it has closed, or speaks first") from None
        if not trusts(uid, self._trusted):
            raise PermissionError(errno.EPERM, f"it is of uid {uid}, {NOT_TRUSTED}")


def refuse_plain_login(endpoints: Sequence[tuple[str, int]]) -> None:
    """Raise ConfigError if a password sent to one of the endpoints without TLS leaves this host.

    One such endpoint is enough: any of them may be asked.
    """
    for endpoint in endpoints:
        if not Address(*endpoint).loopback:
            raise ConfigError(
                f"--coordinator-login sends its password to {_name(endpoint)}, by plain http for all on the way to "
                "read; write --coordinator etcds://..., or an address of this host as 127.0.0.1"
            )


def tls_context(ca: Path | None = None, certificate: Path | None = None) -> ssl.SSLContext:
    """TLS that checks the server: against ``ca`` (PEM) or the system's authorities.

    ``certificate``: PEM file with our own certificate and its key, for an etcd that wants one. Raises ConfigError.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(certificate, password=no_passphrase)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot use {certificate if ca is None else ca} for TLS to etcd: {exc}") from exc
    return context


def followed_tls(ca: Path | None = None, certificate: Path | None = None) -> Callable[[], ssl.SSLContext]:
    """Return what returns :func:`tls_context` of the newest files that could be used. Raises ConfigError.

    etcd's certificates are renewed while a manager runs, as its own are.
    """
    files = TlsOptions(*(str(path.absolute()) if path is not None else "" for path in (ca, certificate)))
    return Context(files, lambda _files: tls_context(ca, certificate)).get


# --- time-outs ---------------------------------------------------------------------------------


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time left")
    return left


class _Timed:
    """What http.client needs of a socket, with one deadline for everything instead of one for each read.

    It does not close the socket: http.client does that while the answer is still to be read.
    """

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left(self._until))
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._until))

    def close(self) -> None:
        """Do nothing: its opener closes it."""


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._until))
        return self._sock.recv_into(buffer)


# --- answers ----------------------------------------------------------------------------------


class _Answer:
    """A JSON object from an endpoint. Each getter raises EtcdError for a value of the wrong kind."""

    def __init__(self, name: str, what: str, top: dict[str, Any]) -> None:
        self._name = name
        self._what = what
        self._top = top

    def malformed(self, why: str) -> EtcdError:
        """Return an error that says ``maybe``: as the answer came, the request may have been carried out."""
        return EtcdError(f"{self._name}: malformed answer to {self._what}: {why}", maybe=True)

    def _of(self, key: str, kinds: type | tuple[type, ...], default: Any) -> Any:
        value = self._top.get(key, default)
        if not isinstance(value, kinds):
            raise self.malformed(f"{key} is {str(value)[:80]!r}")
        return value

    def number(self, key: str) -> int:
        """Return a 64-bit number, given as text or bare; 0 if it is left out."""
        value = self._of(key, (str, int), 0)
        try:
            number = int(value)
        except ValueError:
            raise self.malformed(f"{key} is {str(value)[:80]!r}") from None
        if not -(1 << 63) <= number < 1 << 64:
            raise self.malformed(f"{key} has more than 64 bits")
        return number

    def flag(self, key: str) -> bool:
        """Return a bool; False if it is left out."""
        return bool(self._of(key, bool, False))

    def text(self, key: str) -> str:
        """Return required text, as one line of ASCII."""
        value: str = self._of(key, str, "")
        if not value or not value.isascii() or not value.isprintable():
            raise self.malformed(f"no {key}")
        return value

    def data(self, key: str) -> bytes:
        """Decode base64; b"" if it is left out."""
        try:
            return base64.b64decode(self._of(key, str, ""), validate=True)
        except (binascii.Error, ValueError) as exc:
            raise self.malformed(f"{key}: {exc}") from None

    def object(self, key: str) -> _Answer:
        """Return a required object."""
        return _Answer(self._name, self._what, self._of(key, dict, None))

    def objects(self, key: str) -> list[_Answer]:
        """Return objects; none if they are left out."""
        items = self._of(key, list, [])
        if not all(isinstance(item, dict) for item in items):
            raise self.malformed(f"{key} has something else than objects")
        return [_Answer(self._name, self._what, item) for item in items]

    def revision(self) -> int:
        """Return etcd's revision at the time of the answer."""
        revision = self.object("header").number("revision")
        if revision < 1:
            raise self.malformed("no revision")
        return revision

    def range(self) -> list[KeyValue]:
        """Return the keys of a range's answer."""
        found = [
            KeyValue(
                item.data("key"), item.data("value"), item.number("create_revision"), item.number("mod_revision"),
                item.number("lease"),
            )
            for item in self.objects("kvs")
        ]  # fmt: skip
        if any(each.create_revision < 1 or each.mod_revision < each.create_revision for each in found):
            raise self.malformed("a key without revisions")
        return found


def _parse(name: str, what: str, status: int, raw: bytes) -> _Answer:
    """Return the answer, or raise the error that it is."""
    problem = _Answer(name, what, {})
    if len(raw) > ANSWER_BYTES_MAX:
        raise problem.malformed(f"more than {ANSWER_BYTES_MAX >> 20} MiB")
    try:
        top = json.loads(raw)
    except (ValueError, RecursionError):
        top = None
    if not isinstance(top, dict):
        shown = raw[:80].decode("utf-8", "replace").strip()
        hint = "; is it etcd 3.4 or newer?" if status == http.client.NOT_FOUND else ""
        raise problem.malformed(f"HTTP {status}, {shown!r}{hint}")
    inner = top.get("error")
    if isinstance(inner, dict):  # a stream's
        code, text = inner.get("grpc_code", inner.get("code")), inner.get("message")
    else:
        code, text = top.get("code"), top.get("message", inner)
    if status != http.client.OK or inner is not None:
        code = code if isinstance(code, int) else None
        raise EtcdError(
            f"{name}: {what}: {str(text)[:200] if text else f'HTTP {status}'}", code=code, maybe=code not in _REFUSALS
        )
    return _Answer(name, what, top)


def _name(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
