"""TLS by the standard library: contexts that follow their files, and sockets that behave as plain ones do.

Only what uses TLS imports this module, as ``ssl`` takes 10 ms.

* :class:`Context` has an ``ssl.SSLContext`` and makes it anew when one of its files changes. A new connection uses the
  newest that could be made; those that are open keep theirs.
* :class:`LoopSocket` is for event loops: where a plain non-blocking socket raises BlockingIOError, it does so too.
* :class:`ChannelSocket` is for blocking callers: it knows the kernel's time-outs and the flags that ``net/channel.py``
  uses, which ``ssl.SSLSocket`` does not.
* :class:`ServerHandshake` and :class:`ClientHandshake` make a LoopSocket in steps, none of which blocks.

What can go wrong
-----------------
* *A peer sends a ClientHello bit by bit, or claims a huge one.* Until it is whole it stays in the kernel's buffer, and
  nothing is allocated for it. One of more than ``HELLO_BYTES_MAX``, or in several records, is refused.
* *A peer stalls later.* It costs one object of OpenSSL, 44 KiB, and 100 KiB more if clients may show certificates. Its
  owner bounds the time and the number: ``net/admission.py``, or ``net/http.py``.
* *A peer speaks plain text to a port with TLS.* :class:`PlainText` has its first bytes, so that it can be told.
* *A file is replaced by something that is no certificate, or only half of a pair has been replaced.* The context made
  before stays in use. The next change of a file is tried again; its mode and its owner count.
* *A file cannot be read at the moment* (no descriptor is left, its server does not answer). Each look tries it again.
* *Renegotiation* is off. So after the handshake OpenSSL never wants to write in order to read, or the reverse. If it
  does nevertheless, the connection ends.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import selectors
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from ..config.parsers import TlsOptions
from ..errors import ConfigError, DeadlineError, TransportError
from ..host import fork
from .admission import HELLO_BYTES_MAX

log = logging.getLogger("simm.net.tls")

#: Most bytes of one record. OpenSSL decrypts one record at a time, and keeps what its caller had no room for.
RECORD_BYTES: Final = 16 << 10
#: What a LoopSocket sends in one turn of its loop: encrypting takes a millisecond per MiB.
TURN_BYTES: Final = 1 << 20
#: Between two looks at the files of a context.
LOOK_S: Final = 1.0
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
#: Headers of the record and of the message in it.
_HEADERS_BYTES: Final = 9
_TIMEVAL: Final = struct.Struct("@ll")
#: How OpenSSL says that what arrived is no TLS.
_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"))
#: Errors of verification (X509_V_ERR_*): no authority of ours has signed it; it is for another name.
_UNKNOWN_AUTHORITY: Final = frozenset((2, 18, 19, 20, 21))
_OTHER_NAME: Final = frozenset((62, 64))
#: Without --tls-key nobody has named a key.
_BOTH: Final = ("the certificate and key", "--tls-cert, SIMM_TLS_CERT")


# --- contexts ---------------------------------------------------------------------------------


class Context:
    """An SSL context by these options. Raises ConfigError if it cannot be made. Any thread may use it.

    ``make`` is one of the functions below.
    """

    def __init__(
        self, options: TlsOptions, make: Callable[[TlsOptions], ssl.SSLContext],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.options = options
        self._make = make
        self._clock = clock
        self._look_at = clock() + LOOK_S
        self._stamp = _stamp(options)
        self._context = make(options)
        self._ends = _ends(options)
        #: What the last attempt failed by, so that its repetition is not logged; empty if it did not.
        self._trouble = ""

    def get(self) -> ssl.SSLContext:
        """Return the newest context. Looks at the files once a second at most; keeps the old one if they are bad."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            stamp = _stamp(self.options)  # before they are read: a change meanwhile is found the next time
            if stamp != self._stamp:
                self._renew(stamp)
            else:
                self._trouble = ""
        return self._context

    def _renew(self, stamp: tuple[object, ...]) -> None:
        """Make the context anew from files with this stamp."""
        try:
            self._context = self._make(self.options)
        except ConfigError as exc:
            passing = isinstance(exc.__cause__, OSError) and not isinstance(exc.__cause__, ssl.SSLError)
            if not passing:
                self._stamp = stamp  # its next change is tried; what the system failed by may pass without one
            if not passing or str(exc) != self._trouble:
                log.warning("%s: what was read before stays in use", exc)
            self._trouble = str(exc)
            return
        self._stamp, self._trouble = stamp, ""
        self._ends = _ends(self.options)
        log.info("read %s again", ", ".join(self.options.files))

    def ends(self) -> float | None:
        """Return when the newest certificate ends, seconds since 1970; None without one, or one of an odd form."""
        self.get()
        return self._ends


def _stamp(options: TlsOptions) -> tuple[object, ...]:
    """Return what differs when a file has changed. Follows links, as Kubernetes replaces those."""
    found: list[object] = []
    for path in options.files:
        try:
            about = os.stat(path)
        except OSError as exc:
            found.append(exc.errno)
        else:
            # A key that others may read is of no use until its mode is set, which changes ctime only.
            found.append((
                about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_mode
            ))  # fmt: skip
    return tuple(found)


def _ends(options: TlsOptions) -> float | None:
    if not options.cert:
        return None
    from pathlib import Path

    from ..config.certificates import validity

    try:
        return validity(Path(options.cert).read_text("latin-1"))[1]
    except (OSError, ValueError) as exc:  # OpenSSL has read it
        log.warning("%s: its end cannot be told: %s", options.cert, exc)
        return None


def for_ports(options: TlsOptions) -> ssl.SSLContext:
    """Make a server's context. With ``options.clients`` a client may show a certificate that one of them has signed."""
    context = for_pages(options)
    if options.clients:
        _trust(context, options.clients, "--tls-client-ca, SIMM_TLS_CLIENT_CA")
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def for_pages(options: TlsOptions) -> ssl.SSLContext:
    """Make a server's context for HTTP pages. Browsers would ask their user for a certificate, so it does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # SiMM's connections are long: resuming one saves nothing
    _set_up(context, LoopSocket)
    _prove(context, options)
    return context


def _for_clients(options: TlsOptions, kind: type[ssl.SSLSocket]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks chain and name
    _set_up(context, kind)
    _trust(context, options.ca, "--tls-ca, SIMM_TLS_CA")
    if options.cert:
        _prove(context, options)
    return context


@functools.lru_cache(maxsize=64)
def for_channels(options: TlsOptions) -> Context:
    """Return the process's context for clients that block. Raises ConfigError."""
    return Context(options, lambda options: _for_clients(options, ChannelSocket))


def for_loops(options: TlsOptions) -> Context:
    """Return a context for what connects from an event loop. Raises ConfigError."""
    return Context(options, lambda options: _for_clients(options, LoopSocket))


def _set_up(context: ssl.SSLContext, kind: type[ssl.SSLSocket]) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.sslsocket_class = kind


def _trust(context: ssl.SSLContext, authorities: str, setting: str) -> None:
    try:
        context.load_verify_locations(cafile=authorities)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot use {authorities} ({setting}): {_said(exc)}") from exc


def _prove(context: ssl.SSLContext, options: TlsOptions) -> None:
    from pathlib import Path

    from ..config.startup import read_secret  # few clients have a certificate

    key = options.key or options.cert
    what, setting = ("the key", "--tls-key, SIMM_TLS_KEY") if options.key else _BOTH
    text = read_secret(Path(key), f"{what} {key} ({setting})")
    if "ENCRYPTED" in text:
        raise ConfigError(f"the key in {key} has a passphrase, which nobody could type: store it without one")
    try:
        context.load_cert_chain(options.cert, key, no_passphrase)
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", None)
        said = "the key does not belong to the certificate" if reason == "KEY_VALUES_MISMATCH" else _said(exc)
        other = f" with the key {options.key}" if options.key else ""
        text = f"cannot use the certificate {options.cert}{other} (--tls-cert, SIMM_TLS_CERT): {said}"
        raise ConfigError(text) from exc


def no_passphrase() -> str:
    """Refuse to ask for the passphrase of a key, as OpenSSL would at the terminal. Raises ValueError."""
    raise ValueError("its key has a passphrase, which nobody could type: store it without one")


def _said(exc: Exception) -> str:
    """Return what is wrong in the words of the system, or of OpenSSL without its source's lines."""
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or "").replace("_", " ").lower() or "it holds no PEM of the kind"
    return getattr(exc, "strerror", None) or str(exc)


# --- sockets ----------------------------------------------------------------------------------


class LoopSocket(ssl.SSLSocket):
    """The socket of an event loop's connection. Reads and writes raise BlockingIOError where a plain one does."""

    #: Bytes that may still be sent in this turn of the loop. No limit without :meth:`new_turn`.
    _budget: int = sys.maxsize

    def new_turn(self) -> None:
        """Allow TURN_BYTES to be sent until the next call."""
        self._budget = TURN_BYTES

    def send(self, data: Any, flags: int = 0) -> int:
        """Send records until the kernel takes no more. The next call begins with the same bytes, as OpenSSL demands."""
        view = memoryview(data)
        if not len(view):
            return 0
        sent, size = 0, min(len(view), self._budget)
        try:
            while sent < size:
                sent += super().send(view[sent : sent + RECORD_BYTES])
        except ssl.SSLWantWriteError:
            pass
        self._budget = max(0, self._budget - sent)
        if not sent:
            raise BlockingIOError(errno.EAGAIN, "the peer does not read")
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Read what is left of a record, or the next one."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except ssl.SSLWantReadError:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived") from None

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        """Read what is left of a record, or the next one."""
        try:
            return super().recv(buflen, flags)
        except ssl.SSLWantReadError:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived") from None

    def shutdown(self, how: int) -> None:
        """Say that nothing follows, to OpenSSL's other end too."""
        with contextlib.suppress(OSError, ValueError):
            self.unwrap()
        socket.socket.shutdown(self, how)


class ChannelSocket(ssl.SSLSocket):
    """The socket of a :class:`~simm.net.channel.Channel`: blocking, with SO_RCVTIMEO, SO_SNDTIMEO and their flags.

    Underneath it does not block: OpenSSL would take a time-out of the kernel for a reason to try again.
    """

    _receive_s: float = 0.0
    _send_s: float = 0.0

    def settimeout(self, value: float | None) -> None:
        """Stay non-blocking: this class waits itself."""
        super().settimeout(0.0)

    def setsockopt(self, level: int, optname: int, value: Any, *more: Any) -> None:
        """Set an option. The kernel's time-outs are kept here, as the kernel never waits."""
        if level == socket.SOL_SOCKET and optname in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, micros = _TIMEVAL.unpack(value)
            if optname == socket.SO_RCVTIMEO:
                self._receive_s = seconds + micros / 1e6
            else:
                self._send_s = seconds + micros / 1e6
        else:
            super().setsockopt(level, optname, value, *more)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send all of it, or as much as goes before the time is up, and return how many bytes that is.

        Raises BlockingIOError when nothing has gone by then, as the kernel does. Knows MSG_DONTWAIT: no time. The next
        call begins with the bytes that follow, as OpenSSL keeps a record of them that is not sent yet.
        """
        view = memoryview(data)
        until = time.monotonic() + self._send_s
        at = 0
        while at < len(view):
            try:
                at += super().send(view[at : at + RECORD_BYTES])
            except ssl.SSLWantWriteError:
                if not flags & socket.MSG_DONTWAIT and self._is_ready(select.POLLOUT, until):
                    continue
                if not at:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
                break  # bytes that have gone are never reported as unsent: the caller would send them again
            except OSError:
                # The peer may have said why: with TLS 1.3 it refuses our certificate after our handshake.
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLEOFError, ConnectionError):
                    super().recv(1)
                raise
        return at

    def sendmsg(self, buffers: Any, _ancillary: Any = (), flags: int = 0, *_more: Any) -> int:  # type: ignore[override]
        """Send the first of the buffers, or as many small ones as fit a record, together, as :meth:`send` does."""
        first = buffers[0]
        if len(first) >= RECORD_BYTES or len(buffers) == 1:
            return self.send(first, flags)
        parts: list[Any] = []
        size = 0
        for part in buffers:
            if size + len(part) > RECORD_BYTES and parts:
                break
            parts.append(part)
            size += len(part)
        return self.send(b"".join(parts), flags)

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        """Return what is left of a record, or the next one; nothing at the end. Knows MSG_DONTWAIT."""
        until = time.monotonic() + self._receive_s
        while True:
            if not flags & socket.MSG_DONTWAIT and not self.pending():
                self._wait(select.POLLIN, until)  # first, as an answer takes longer than this call
            try:
                return super().recv(buflen)
            except ssl.SSLWantReadError:
                if flags & socket.MSG_DONTWAIT:
                    raise BlockingIOError(errno.EAGAIN, "nothing has arrived") from None

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fill the buffer, or a part of it if the peer closes, as with MSG_WAITALL; without it return what there is."""
        view = memoryview(buffer)[: nbytes or None]
        until = time.monotonic() + self._receive_s
        at = 0
        while at < len(view):
            try:
                got = super().recv_into(view[at:])
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, until)
                continue
            at += got
            if not got or not flags & socket.MSG_WAITALL:
                break
        return at

    def shutdown(self, how: int) -> None:
        """Shut the connection down, also while another thread reads: it finds the end."""
        socket.socket.shutdown(self, how)

    def _wait(self, event: int, until: float) -> None:
        if not self._is_ready(event, until):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def _is_ready(self, event: int, until: float) -> bool:
        """Wait for an event of the socket; return False if it has not come in time."""
        poller = select.poll()
        poller.register(self, event)
        left = until - time.monotonic()
        return left > 0 and bool(poller.poll(left * 1000 + 1))


# --- handshakes -------------------------------------------------------------------------------


class PlainText(OSError):
    """The peer does not begin with a TLS handshake. ``head`` is what it said first; it is still to be read."""

    def __init__(self, head: bytes) -> None:
        super().__init__("the peer does not speak TLS, and this port takes nothing else")
        self.head = head


class SaidNothing(OSError):
    """The peer closed, or reset, its connection before its first byte, as what only looks whether a port answers."""

    def __init__(self) -> None:
        super().__init__("the peer closed without a byte")


class Handshake:
    """A handshake in progress: its socket, which steps replace by a :class:`LoopSocket`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def step(self) -> int:
        """Do what can be done now. Return the selector's event to wait for, 0 if it is done. Raises OSError."""
        assert isinstance(self.sock, LoopSocket)
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        return 0


class ServerHandshake(Handshake):
    """A server's, of a socket that was accepted and does not block."""

    def __init__(self, sock: socket.socket, context: Context) -> None:
        super().__init__(sock)
        self._context = context
        self._begun = False

    def step(self) -> int:
        """As above. Raises PlainText for a peer that has begun with something else, SaidNothing for one that has not.
        """
        if not self._begun:
            if not self._hello():
                return selectors.EVENT_READ
            self._begun = True
            self.sock = self._context.get().wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        try:
            return super().step()
        except ssl.SSLError as exc:
            raise OSError(f"the TLS handshake failed: {_said(exc)}") from exc

    def _hello(self) -> bool:
        """Return whether the whole ClientHello has arrived. It stays in the kernel's buffer."""
        try:
            head = self.sock.recv(HELLO_BYTES_MAX, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionResetError:  # the kernel gives what has arrived first
            raise SaidNothing from None
        if not head:
            raise SaidNothing
        if head[0] != _HANDSHAKE:
            raise PlainText(head)
        need = _HEADERS_BYTES
        if len(head) >= need:
            need = 5 + int.from_bytes(head[3:5], "big")
            if head[1] != 3 or head[5] != _CLIENT_HELLO:
                raise OSError("the peer does not begin with a ClientHello")
            if need > HELLO_BYTES_MAX or _HEADERS_BYTES + int.from_bytes(head[6:9], "big") > need:
                raise OSError(f"its ClientHello is larger than {HELLO_BYTES_MAX} bytes, or in pieces")
        whole = len(head) >= need
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 if whole else need)
        if not whole:
            poller = select.poll()
            poller.register(self.sock, select.POLLRDHUP)
            if poller.poll(0):  # else the selector would report the end for ever
                raise OSError("the peer closed in the middle of the TLS handshake")
        return whole


class ClientHandshake(Handshake):
    """A client's, of a connected socket that does not block. ``host``: as the address names the server."""

    def __init__(self, sock: socket.socket, context: Context, host: str) -> None:
        super().__init__(sock)
        self._context = context
        self._host = host

    def step(self) -> int:
        """As above. The text of the error says what to do."""
        try:
            if not isinstance(self.sock, LoopSocket):
                self.sock = _wrap(self.sock, self._context, self._host)
            return super().step()
        except OSError as exc:
            raise OSError(explained(exc, self._host, self._context.options.name)) from exc


def _wrap(sock: socket.socket, context: Context, host: str) -> ssl.SSLSocket:
    """Return the client's side of a connected socket, before its handshake. Raises OSError."""
    sock.settimeout(0.0)
    name = context.options.name or host.partition("%")[0]
    try:
        return context.get().wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
    except ValueError as exc:  # an empty label, a character that no name has
        raise OSError(f"no certificate can name this host: {exc}") from exc


def connected(sock: socket.socket, options: TlsOptions, host: str, until: float) -> ChannelSocket:
    """Make a connected socket a channel's with TLS, by ``until`` (monotonic seconds). Raises TransportError.

    A forked child closes its copy, also during the handshake.
    """
    try:
        made = _wrap(sock, for_channels(options), host)
    except (OSError, ConfigError) as exc:
        sock.close()
        raise TransportError(f"the TLS handshake with {host} failed: {_said(exc)}") from exc
    assert isinstance(made, ChannelSocket)
    fork.in_child(made.close)  # in place of ``sock``, which has none any more
    try:
        while True:
            try:
                made.do_handshake()
                return made
            except ssl.SSLWantReadError:
                made._wait(select.POLLIN, until)
            except ssl.SSLWantWriteError:
                made._wait(select.POLLOUT, until)
    except BlockingIOError as exc:
        made.close()
        raise DeadlineError(f"deadline passed during the TLS handshake with {host}") from exc
    except OSError as exc:
        made.close()
        raise TransportError(explained(exc, host, options.name)) from exc
    except BaseException:
        made.close()
        raise


def explained(exc: OSError, host: str, name: str = "") -> str:
    """Return what went wrong in a client's handshake with ``host``, and the remedy. ``name``: as in the options."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        said = exc.verify_message.rstrip(".")
        if exc.verify_code in _UNKNOWN_AUTHORITY:
            remedy = "no authority in --tls-ca (SIMM_TLS_CA) has signed it"
        elif exc.verify_code in _OTHER_NAME:
            other = "another" if name else "a"
            remedy = f"its subjectAltName must have {name or host}; or give {other} --tls-name (SIMM_TLS_NAME)"
        else:
            remedy = "give the server another one (--tls-cert), or set the clock of this host"
        return f"the certificate of {host} is not accepted: {said}: {remedy}"
    if isinstance(exc, ssl.SSLError) and exc.reason in _NO_TLS:
        return f"{host} does not speak TLS at this port: start it with --tls-cert, or use no --tls-ca (SIMM_TLS_CA)"
    if isinstance(exc, ssl.SSLEOFError) or exc.errno in (errno.ECONNRESET, errno.EPIPE):
        return f"{host} closed the connection during the TLS handshake"
    return f"the TLS handshake with {host} failed: {_said(exc)}"
