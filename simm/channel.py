"""A blocking client connection: one request, one reply, one deadline.

Pushes that arrive between replies go to a callback. A deadline that passes in the middle of
an exchange leaves the stream of replies out of step, so the channel is then broken for good: its owner
makes a new one. Not thread-safe; the owner has a lock.

The deadline holds for an exchange as a whole, from the first byte sent to the last byte of its reply: a peer that
dribbles a byte at a time, or takes one at a time, gains nothing by it. :meth:`Channel.bound` holds several
exchanges to one deadline together.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, NoReturn

from . import messages as M
from .errors import RemoteProtocolError, TransportError
from .rpc import Connection, Flag, Frame, decode, encode

_TIMEVAL: Final = struct.Struct("@ll")
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_RECV_BYTES: Final = 64 << 10
#: The kernel's timeouts are set anew where they are off by more than this.
_SLACK_S: Final = 0.01
#: Pieces handled in one look for pushes, or after a deadline, so that a peer that never stops talking holds up nobody.
_PUSH_PIECES: Final = 64


def timeval(seconds: float) -> bytes:
    """A struct timeval for SO_RCVTIMEO; at least a millisecond, as 0 means for ever."""
    micros = max(1000, int(seconds * 1e6))
    return _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)


class Refused(TransportError):
    """The peer answered with ERROR: ``status`` says which."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Channel:
    """Requests over a connected socket.

    The kernel's own timeouts bound the common case (a reply in one piece) without a poll per call: one ``send``
    and one ``recv`` a request.
    """

    def __init__(self, sock: socket.socket, deadline_s: float, on_push: Callable[[Any], None] | None = None) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.broken = ""
        self._conn = Connection()
        self._on_push = on_push
        self._last_id = 0
        self._early: dict[int, Frame] = {}
        #: How often all looks of a wait() were in vain.
        self.slept = 0
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        #: When the exchange under way must be over, monotonic seconds; drawn by each request.
        self.until = math.inf
        self._bound = math.inf
        sock.settimeout(None)
        raw = timeval(deadline_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, raw)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, raw)
        #: What the kernel's timeouts are, seconds.
        self._receives_s = self._sends_s = deadline_s

    @classmethod
    def unix(cls, path: str, deadline_s: float, on_push: Callable[[Any], None] | None = None) -> Channel:
        """Connect to a UNIX socket. Raises TransportError."""
        sock = _socket(socket.AF_UNIX)
        return cls._connected(sock, path, path, deadline_s, on_push)

    @classmethod
    def tcp(cls, host: str, port: int, deadline_s: float, on_push: Callable[[Any], None] | None = None) -> Channel:
        """Connect by TCP. Raises TransportError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = _socket(family)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made = cls._connected(sock, (host, port), f"{host}:{port}", deadline_s, on_push)
        _TCP.add(made)
        return made

    @classmethod
    def _connected(
        cls, sock: socket.socket, address: Any, name: str, deadline_s: float, on_push: Callable[[Any], None] | None
    ) -> Channel:
        try:
            sock.settimeout(deadline_s)
            sock.connect(address)
        except OSError as exc:
            sock.close()
            raise TransportError(f"cannot connect to {name}: {exc.strerror or exc}") from exc
        return cls(sock, deadline_s, on_push)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    # -- exchange -----------------------------------------------------------------------------

    def call(self, msg: Any, *, fds: tuple[int, ...] = ()) -> Any:
        """Send a request and return the decoded reply. Raises Refused for ERROR, TransportError otherwise."""
        number = self.submit(msg, fds=fds)
        return self.result(self.wait(number))

    def submit(self, msg: Any, *, fds: tuple[int, ...] = ()) -> int:
        """Send a request; its id for :meth:`wait`."""
        number = self.next_id()
        self.send_raw(encode(msg, number), fds)
        return number

    def next_id(self) -> int:
        """Draw a request id, for a caller that sends by itself."""
        self._last_id = number = self._last_id + 1
        return number

    def bound(self, until: float = math.inf) -> None:
        """No exchange from now on lasts beyond ``until`` (monotonic seconds), until this is called again."""
        self._bound = until

    def begin(self) -> None:
        """An exchange starts now; for a caller that sends by itself."""
        until = time.monotonic() + self.deadline_s
        self.until = until if until < self._bound else self._bound

    def arm(self, doing: str, *, sending: bool = False) -> None:
        """Make the kernel's timeout what is left of the deadline. Raises TransportError when nothing is."""
        left = self.until - time.monotonic()
        if left <= 0:
            self.fail(f"deadline passed while {doing}")
        self._arm(left, sending)

    def _arm(self, left: float, sending: bool) -> None:
        if sending:
            if not -_SLACK_S < left - self._sends_s < _SLACK_S:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(left))
                self._sends_s = left
        elif not -_SLACK_S < left - self._receives_s < _SLACK_S:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(left))
            self._receives_s = left

    def receive_bulk(self, target: memoryview) -> None:
        """Fill ``target`` with bare bytes, first those that came along with a frame. Raises TransportError."""
        at, size = 0, len(target)
        if self._conn.pending_bytes:
            data = self._conn.take(size)
            at = len(data)
            target[:at] = data
        sock = self.sock
        while at < size:
            self.arm("receiving a value")
            try:
                # One call a value where the kernel can: it wakes us when all of it is there, or when the time is up.
                got = sock.recv_into(target[at:] if at else target, 0, socket.MSG_WAITALL)
            except OSError as exc:
                self.fail(f"connection lost while receiving a value, or deadline passed: {exc.strerror or exc}")
            if not got:
                self.fail("the server closed the connection in the middle of a value")
            at += got

    def send_raw(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send whole bytes. Raises TransportError, and the channel is broken then."""
        if self.broken:
            raise TransportError(self.broken)
        self.begin()
        try:
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
            while sent < len(data):  # rare: the peer does not take what we send
                self.arm("sending", sending=True)
                data = data[sent:]
                sent = self.sock.send(data)
        except OSError as exc:
            self.fail(_why(exc, "sending"))

    def wait(self, number: int, looks: int = 0) -> Frame:
        """The reply to request ``number``. Raises TransportError, and the channel is broken then.

        ``looks``: how often to look for it, 0.5 us each, before the thread sleeps; for peers that poll as well.
        """
        frame = self._early.pop(number, None)
        if frame is not None:
            return frame
        conn = self._conn
        late = 0
        try:
            while True:
                frame = conn.next_frame()
                if frame is None:
                    if looks:
                        self._look(looks)
                        looks = 0
                    left = self.until - time.monotonic()
                    if left > 0:
                        self._arm(left, False)
                        data = self.sock.recv(_RECV_BYTES)
                    elif late < _PUSH_PIECES:
                        # What has come counts: the request may have been sent long before anyone waited for it.
                        late += 1
                        data = self.sock.recv(_RECV_BYTES, socket.MSG_DONTWAIT)
                    else:
                        self.fail("deadline passed in the middle of a reply")
                    if not data:
                        self.fail("the peer closed the connection")
                    conn.receive_data(data)
                    continue
                if frame.flags & Flag.PUSH:
                    self._push(frame)
                    continue
                if frame.request_id == number:
                    return frame
                if frame.opcode == M.OP_ERROR and frame.request_id == 0:
                    self.fail(str(self._error_text(frame)))
                if frame.request_id > self._last_id:
                    raise RemoteProtocolError(f"reply to request {frame.request_id}, which was never sent")
                self._early[frame.request_id] = frame
        except OSError as exc:
            self.fail(_why(exc, "waiting for a reply"))
        except RemoteProtocolError as exc:
            self.fail(str(exc))

    def _look(self, looks: int) -> None:
        """Poll for input, for a while: an answer that comes soon costs no wake-up."""
        poll = self._poller.poll
        for _ in range(looks):
            if poll(0):
                return
        self.slept += 1

    def result(self, frame: Frame) -> Any:
        """The message of a reply. Raises Refused for ERROR."""
        try:
            msg = decode(frame)
        except RemoteProtocolError as exc:
            self.fail(str(exc))
        if isinstance(msg, M.Error):
            raise Refused(frame.status, msg.text)
        return msg

    def poll_pushes(self) -> None:
        """Handle what has arrived, without waiting. Raises TransportError when the peer has gone."""
        if self.broken:
            raise TransportError(self.broken)
        try:
            for _ in range(_PUSH_PIECES):
                data = self.sock.recv(_RECV_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    self.fail("the peer closed the connection")
                self._conn.receive_data(data)
                while (frame := self._conn.next_frame()) is not None:
                    if frame.flags & Flag.PUSH:
                        self._push(frame)
                    elif frame.request_id > self._last_id:
                        raise RemoteProtocolError(f"reply to request {frame.request_id}, which was never sent")
                    else:
                        self._early[frame.request_id] = frame
        except BlockingIOError:
            return
        except OSError as exc:
            self.fail(_why(exc, "reading"))
        except RemoteProtocolError as exc:
            self.fail(str(exc))

    def _push(self, frame: Frame) -> None:
        if self._on_push is not None:
            self._on_push(decode(frame))

    @staticmethod
    def _error_text(frame: Frame) -> str:
        with contextlib.suppress(RemoteProtocolError):
            text: str = decode(frame).text
            return text
        return "the peer reported an error"

    def fail(self, reason: str) -> NoReturn:
        """Mark the channel broken and raise TransportError."""
        self.broken = self.broken or reason
        raise TransportError(reason)

    def close(self) -> None:
        """Close the socket. Twice is harmless.

        One that is broken is reset: what it has not sent yet, or sent in vain, the kernel would go on sending, for
        minutes. A put that the caller was told has failed, and has put again, would arrive after that one.
        """
        if self.broken and self.sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.broken = self.broken or "closed"
        with contextlib.suppress(OSError):
            self.sock.close()


#: Connections to other hosts. A forked child closes its copies, those in the middle of an exchange too: as long as it
#: had one, the peer would not see that we hang up, and would carry out a request that was given up long ago.
_TCP: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for channel in list(_TCP):
        with contextlib.suppress(OSError):
            channel.sock.close()
    _TCP.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _socket(family: socket.AddressFamily) -> socket.socket:
    """A new socket. Raises TransportError: an engine that is out of descriptors shall see misses, and no error."""
    try:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as exc:
        raise TransportError(f"cannot make a socket: {exc.strerror or exc}") from exc


def _why(exc: OSError, doing: str) -> str:
    if exc.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.ETIMEDOUT) or isinstance(exc, TimeoutError):
        return f"deadline passed while {doing}"
    return f"connection lost while {doing}: {exc.strerror or exc}"
