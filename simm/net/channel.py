"""A blocking client connection with one deadline per exchange, and the pauses between attempts to connect.

Pushes that arrive between replies go to a callback. A deadline that passes in the middle of an exchange leaves the
stream of replies out of step. The channel is then broken for good, and its owner makes a new one. A channel is not
thread-safe; its owner holds a lock.

The deadline covers an exchange as a whole, from the first byte sent to the last byte of its reply. A peer that sends or
takes one byte at a time does not extend it. :meth:`Channel.bound` limits several exchanges to one deadline. What a
call that makes several exchanges may still wait is its thread's ``ALLOWANCE`` (``allowance.py``).
"""

from __future__ import annotations

import contextlib
import errno
import math
import random
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Container
from typing import Any, Final, NoReturn

from ..config.parsers import TlsOptions
from ..errors import DeadlineError, NotSentError, RemoteProtocolError, TransportError, printable
from ..host import fork
from ..rpc import Connection, Flag, Frame, decode, encode
from ..wire import messages as M
from .addresses import connect, resolve
from .allowance import ALLOWANCE, LOOK_S
from .peer_uid import foreign_server

#: Pause between two attempts to connect: the first and the longest, seconds.
BACKOFF_S: Final = (0.05, 1.0)
_TIMEVAL: Final = struct.Struct("@ll")
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_RECV_BYTES: Final = 64 << 10
#: A socket's timeout has passed.
_LATE: Final = frozenset((errno.EAGAIN, errno.EWOULDBLOCK, errno.ETIMEDOUT))
#: The channel sets the kernel's timeouts again when they are off by more than this.
_SLACK_S: Final = 0.01
#: Pieces handled in one poll for pushes, or after a deadline, so that a peer that never stops sending delays no caller.
_PUSH_PIECES: Final = 64


def timeval(seconds: float) -> bytes:
    """Return a struct timeval for SO_RCVTIMEO, at least a millisecond, as 0 means no timeout."""
    micros = max(1000, int(seconds * 1e6))
    return _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)


class Refused(TransportError):
    """The peer replied with ERROR and this ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(printable(text))
        self.status = status


def weakly(on_push: Callable[..., object]) -> Callable[..., None]:
    """Return a callback that calls a bound method without keeping its object alive.

    An owner and a channel that refer to each other would live until the cycle collector runs. A session would keep a
    whole arena mapped until then.
    """
    method = weakref.WeakMethod(on_push)

    def call(*arguments: Any) -> None:
        found = method()
        if found is not None:
            found(*arguments)

    return call


class Backoff:
    """The time of the next attempt: after a jittered pause that doubles with each failure in a row.

    ``pauses``: the first and the longest, seconds.
    """

    __slots__ = ("_pause_s", "_pauses", "_uniform", "failures", "retry_at")

    def __init__(
        self, uniform: Callable[[float, float], float] = random.uniform, pauses: tuple[float, float] = BACKOFF_S
    ) -> None:
        self._uniform = uniform
        self._pauses = pauses
        self._pause_s = pauses[0]
        #: Monotonic seconds.
        self.retry_at = 0.0
        #: In a row.
        self.failures = 0

    def failed(self, now: float) -> None:
        """Record a failure at ``now``, monotonic seconds."""
        self.failures += 1
        self.retry_at = now + self._pause_s * self._uniform(0.5, 1.0)
        self._pause_s = min(self._pauses[1], self._pause_s * 2)

    def worked(self) -> None:
        """Record a success, so that the next failure counts as the first."""
        self.failures = 0
        self._pause_s = self._pauses[0]

    def due(self, now: float) -> bool:
        """Return whether it is time to try again."""
        return now >= self.retry_at


class Channel:
    """Requests over a connected socket.

    The channel calls ``on_push`` with each push. An owner passes its own method through :func:`weakly`.

    The kernel's timeouts bound the common case, a reply in one piece, without a poll per call: one ``send`` and one
    ``recv`` per request.
    """

    def __init__(self, sock: socket.socket, deadline_s: float, on_push: Callable[[Any], None] | None = None) -> None:
        self.sock = sock
        self.deadline_s = deadline_s
        self.broken = ""
        #: The server has shown a certificate, which TLS has checked.
        self.certified = False
        self._conn = Connection()
        self._on_push = on_push
        self._last_id = 0
        self._early: dict[int, Frame] = {}
        #: Takes the replies that nobody waits for any more.
        self.on_late: Callable[[Frame], None] | None = None
        #: A wait whose deadline passes does not break the channel: frames come whole, and each reply names its request.
        #: Requests that the socket has no room for are not begun.
        self.outlives = False
        #: Requests whose reply nobody waits for; :meth:`disown`.
        self._disowned: set[int] = set()
        #: Requests whose reply is late, and whether somebody comes back for it; when the first one's wait began.
        self.late: dict[int, bool] = {}
        self.late_at = 0.0
        #: Number of waits whose polls all found nothing.
        self.slept = 0
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        #: Of a TLS socket: returns how many bytes are decrypted and not read.
        self._decrypted: Callable[[], int] = getattr(sock, "pending", int)
        #: When the exchange in progress must end, monotonic seconds; each request sets it.
        self.until = math.inf
        self._bound = math.inf
        sock.settimeout(None)
        raw = timeval(deadline_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, raw)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, raw)
        #: The kernel's timeouts, seconds.
        self._receives_s = self._sends_s = deadline_s

    @classmethod
    def unix(cls, path: str, deadline_s: float, on_push: Callable[[Any], None] | None = None) -> Channel:
        """Connect to a UNIX socket. Raises TransportError."""
        sock = _socket(socket.AF_UNIX)
        connect(sock, path, path, deadline_s)
        return cls(sock, deadline_s, on_push)

    @classmethod
    def tcp(
        cls, host: str, port: int, deadline_s: float, on_push: Callable[[Any], None] | None = None,
        tls: TlsOptions | None = None,
    ) -> Channel:  # fmt: skip
        """Connect by TCP, and with ``tls`` by TLS (:func:`check_tls`). Raises TransportError.

        A forked child closes its copy of the socket, also while this connects in another thread, and in the middle of
        an exchange. While a child has a copy, the peer does not see that its client hung up. It would execute a request
        that the client gave up long ago.
        """
        until = time.monotonic() + deadline_s
        family, address = resolve(host, deadline_s)
        sock = _socket(family)
        fork.in_child(sock.close)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connect(sock, (address, port), f"{host}:{port}", max(0.001, until - time.monotonic()))
        if tls is not None:
            from .tls import connected  # most clients have no TLS

            sock = connected(sock, tls, host, until)
        made = cls(sock, deadline_s, on_push)
        made.certified = tls is not None
        return made

    def foreign_server(self, trusted: Container[int]) -> str:
        """Return why a server that has answered is not believed without a token; empty if it is."""
        return "" if self.certified else foreign_server(self.sock, trusted)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.sock.fileno()

    # -- exchange -----------------------------------------------------------------------------

    def call(self, msg: Any, *, fds: tuple[int, ...] = ()) -> Any:
        """Send a request and return the decoded reply. Raises Refused for ERROR, TransportError otherwise."""
        number = self.submit(msg, fds=fds)
        return self.result(self.wait(number))

    def submit(self, msg: Any, *, fds: tuple[int, ...] = ()) -> int:
        """Send a request and return its id for :meth:`wait`. Raises TransportError; NotSentError breaks nothing."""
        if self.outlives and not self.has_room():
            raise NotSentError("the peer takes nothing more just now")
        number = self.next_id()
        self.send_raw(encode(msg, number), fds)
        return number

    @property
    def late_s(self) -> float:
        """For how long an answer has been late, seconds; 0.0 if none is."""
        return time.monotonic() - self.late_at if self.late else 0.0

    def next_id(self) -> int:
        """Allocate a request id, for a caller that sends the frame itself."""
        self._last_id = number = self._last_id + 1
        return number

    def bound(self, until: float = math.inf) -> None:
        """End all later exchanges by ``until`` (monotonic seconds), until the next call."""
        self._bound = until

    def extend(self, until: float) -> None:
        """Let the present exchange last until then (monotonic seconds), and what :meth:`bound` has bounded."""
        self.until, self._bound = max(self.until, until), max(self._bound, until)

    def begin(self) -> None:
        """Start an exchange's deadline, for a caller that sends the frame itself."""
        until = time.monotonic() + min(self.deadline_s, ALLOWANCE.seconds)
        self.until = min(until, self._bound, ALLOWANCE.until)

    def arm(self, doing: str, *, sending: bool = False) -> None:
        """Set the kernel's timeout to the time left. Raises TransportError when the deadline has passed."""
        left = self.until - time.monotonic()
        if left <= 0:
            self.fail(f"deadline passed while {doing}", DeadlineError)
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
        """Fill ``target`` with bulk bytes, first those that arrived with a frame. Raises TransportError."""
        at, size = 0, len(target)
        if self._conn.pending_bytes:
            data = self._conn.take(size)
            at = len(data)
            target[:at] = data
        sock = self.sock
        while at < size:
            self.arm("receiving a value")
            try:
                # One call per value: the kernel wakes the thread when all bytes are there, or at the deadline.
                got = sock.recv_into(target[at:] if at else target, 0, socket.MSG_WAITALL)
            except OSError as exc:
                self.lose(exc, "receiving a value")
            if not got:
                self.fail("the server closed the connection in the middle of a value")
            at += got

    def send_raw(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send all of ``data``. Raises TransportError and breaks the channel on failure."""
        if self.broken:
            raise TransportError(self.broken)
        self.begin()
        try:
            sent = socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)
            while sent < len(data):  # rare: the peer does not read
                self.arm("sending", sending=True)
                data = data[sent:]
                sent = self.sock.send(data)
        except OSError as exc:
            self.lose(exc, "sending")
        except BaseException:  # interrupted: part of it may be sent, or all of it, and nobody waits for the reply
            self.broken = self.broken or "interrupted"
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            raise

    def wait(self, number: int, polls: int = 0, look: Callable[[], object] | None = None) -> Frame:
        """Return the reply to request ``number``. Raises TransportError and breaks the channel on failure.

        ``polls``: how often to poll for it before the thread sleeps, for peers that poll as well. ``look``: called
        every LOOK_S; the wait ends when it no longer wants the reply.
        """
        frame = self._early.pop(number, None)
        if frame is not None:
            return frame
        conn = self._conn
        late, waits_s = 0, -1.0
        try:
            while True:
                frame = conn.next_frame()
                if frame is None:
                    if polls:
                        self._poll(polls)
                        polls = 0
                    left = self.until - time.monotonic()
                    if waits_s < 0:
                        waits_s = max(0.0, left)
                    if left > 0:
                        if look is not None and not self._poller.poll(min(left, LOOK_S) * 1e3):
                            look()
                            if self.late.get(number) is False:
                                raise DeadlineError("the request was withdrawn meanwhile")
                            continue
                        self._arm(left, False)
                        data = self.sock.recv(_RECV_BYTES)
                    elif late < _PUSH_PIECES:
                        # Replies that have arrived count: the caller may have sent the request long ago.
                        late += 1
                        data = self.sock.recv(_RECV_BYTES, socket.MSG_DONTWAIT)
                    elif self.outlives:
                        self._leave(number, waits_s)
                    else:
                        self.fail("deadline passed in the middle of a reply", DeadlineError)
                    if not data:
                        self.fail("the peer closed the connection")
                    conn.receive_data(data)
                    continue
                if frame.flags & Flag.PUSH:
                    self._push(frame)
                    continue
                if frame.request_id == number:
                    self.late.pop(number, None)
                    return frame
                if frame.opcode == M.OP_ERROR and frame.request_id == 0:
                    self.fail(str(self._error_text(frame)))
                if frame.request_id > self._last_id:
                    raise RemoteProtocolError(f"reply to request {frame.request_id}, which was never sent")
                self._keep(frame)
        except OSError as exc:
            if self.outlives and _is_late(exc):
                self._leave(number, waits_s)
            self.lose(exc, "waiting for a reply")
        except RemoteProtocolError as exc:
            self.fail(str(exc))

    def _keep(self, frame: Frame) -> None:
        """Take a reply that is not waited for now: for later, or for nobody."""
        number = frame.request_id
        self._early[number] = frame  # before the second look, as disown() is called without the lock
        if not self.late.pop(number, True) or number in self._disowned:
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        """Give a reply that nobody waits for to ``on_late``, once."""
        self._disowned.discard(number)
        frame = self._early.pop(number, None)
        if frame is not None and self.on_late is not None:
            self.on_late(frame)

    def _leave(self, number: int, waited_s: float) -> NoReturn:
        """End a wait without breaking the channel. Raises DeadlineError.

        ``waited_s``: how long it was to last. It may have been longer: this process may have been stopped, and so may
        the peer.
        """
        if not self.late:
            self.late_at = time.monotonic() - waited_s
        self.late[number] = False
        raise DeadlineError("deadline passed while waiting for a reply")

    def expect(self, number: int, wanted: bool = True) -> None:
        """Say whether somebody comes back for a reply that has not come yet. One that has, and is not wanted, goes."""
        if number in self._early:
            if not wanted:
                self._hand_over(number)
        else:
            if not self.late:
                self.late_at = time.monotonic()
            self.late[number] = wanted

    def disown(self, number: int) -> None:
        """Say that nobody waits for a reply that has not been taken: ``on_late`` takes it. Needs no lock."""
        self._disowned.add(number)
        if number in self._early:
            self._hand_over(number)

    def received(self, number: int) -> bool:
        """Return whether the reply to a request has been taken in, or the channel is broken."""
        return bool(self.broken) or number in self._early

    def has_input(self, number: int) -> bool:
        """Return whether the reply to request ``number`` has come, or anything that is not read. Needs no lock."""
        return bool(
            number in self._early or self._conn.pending_bytes or self._polls(select.POLLIN) or self._decrypted()
        )

    def has_room(self) -> bool:
        """Return whether the socket takes more to send, or is closed. Needs no lock."""
        return self._polls(select.POLLOUT)

    def _polls(self, events: int) -> bool:
        """Poll for these events by a poller of its own: one that two threads poll at a time raises RuntimeError."""
        poller = select.poll()
        try:
            poller.register(self.sock, events)
        except ValueError:  # another thread has closed it
            return True
        return bool(poller.poll(0))

    def _poll(self, polls: int) -> None:
        """Poll for input up to ``polls`` times, so that a fast reply costs no wake-up."""
        poll = self._poller.poll
        for _ in range(polls):
            if poll(0):
                return
        self.slept += 1

    def result(self, frame: Frame) -> Any:
        """Return the message of a reply. Raises Refused for ERROR."""
        try:
            msg = decode(frame)
        except RemoteProtocolError as exc:
            self.fail(str(exc))
        if isinstance(msg, M.Error):
            raise Refused(frame.status, msg.text)
        return msg

    def poll_pushes(self) -> None:
        """Handle input that has arrived, without waiting. Raises TransportError when the peer is gone."""
        if self.broken:
            raise TransportError(self.broken)
        try:
            for _ in range(_PUSH_PIECES):
                # First those that came in one piece with a reply that was waited for.
                while (frame := self._conn.next_frame()) is not None:
                    if frame.flags & Flag.PUSH:
                        self._push(frame)
                    elif frame.request_id > self._last_id:
                        raise RemoteProtocolError(f"reply to request {frame.request_id}, which was never sent")
                    else:
                        self._keep(frame)
                data = self.sock.recv(_RECV_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    self.fail("the peer closed the connection")
                self._conn.receive_data(data)
        except BlockingIOError:
            return
        except OSError as exc:
            self.lose(exc, "reading")
        except RemoteProtocolError as exc:
            self.fail(str(exc))

    def _push(self, frame: Frame) -> None:
        if self._on_push is not None:
            self._on_push(decode(frame))

    @staticmethod
    def _error_text(frame: Frame) -> str:
        with contextlib.suppress(RemoteProtocolError):
            return printable(decode(frame).text)
        return "the peer reported an error"

    def fail(self, reason: str, error: type[TransportError] = TransportError) -> NoReturn:
        """Mark the channel broken and raise ``error``."""
        self.broken = self.broken or reason
        raise error(reason)

    def lose(self, exc: OSError, doing: str) -> NoReturn:
        """Mark the channel broken by its socket's error. Raises DeadlineError for a timeout, else TransportError."""
        if _is_late(exc):
            self.fail(f"deadline passed while {doing}", DeadlineError)
        self.fail(f"connection lost while {doing}: {exc.strerror or exc}")

    def close(self) -> None:
        """Close the socket. A second call does nothing.

        A broken connection is reset. Otherwise the kernel would go on sending its buffer for minutes. A put that was
        reported as failed, and that the caller has repeated, would then arrive after the repetition.
        """
        if self.broken and self.sock.family != socket.AF_UNIX:
            reset_on_close(self.sock)
        self.broken = self.broken or "closed"
        with contextlib.suppress(OSError):
            self.sock.close()


def _is_late(exc: OSError) -> bool:
    return exc.errno in _LATE or isinstance(exc, TimeoutError)


class ChannelWait:
    """The wait for input on a channel that is one caller's alone, or for room to send; for ``ipc/steps.py``.

    ``number``: of the request whose reply is waited for. ``last``: nothing else is left to be done.
    """

    __slots__ = ("_channel", "_number", "events", "last", "until")

    def __init__(self, channel: Channel, number: int, *, sending: bool = False, last: bool = False) -> None:
        self._channel = channel
        self._number = number
        self.events = select.POLLOUT if sending else select.POLLIN
        self.last = last
        self.until = channel.until

    def ready(self) -> bool:
        """Return True if something has arrived, or there is room."""
        if self.events == select.POLLIN:
            return self._channel.has_input(self._number)
        return self._channel.has_room()

    def descriptor(self) -> int:
        """Return the socket's descriptor."""
        return self._channel.fileno()

    def receive(self) -> None:
        """Leave it to the one who waits."""

    def extend(self, until: float) -> None:
        """Let the exchange last until then, monotonic seconds, and those that follow it."""
        self._channel.extend(until)


def check_tls(options: TlsOptions | None) -> None:
    """Read the files for TLS. Raises ConfigError if they are of no use. Later faults of theirs cost a connection."""
    if options is not None:
        from .tls import for_channels

        for_channels(options)


def greet(
    channel: Channel, service: int, hello: M.Hello, token: str, server: str = "", trusted: Container[int] = ()
) -> M.Welcome:
    """Say HELLO to a server of this kind; with a token, after both sides have proven that they know it.

    ``server``: which one (``wire/auth.py``). ``trusted``: users besides this process's own and root whose server on
    this host is believed without a token.

    Raises Refused, with UNAUTHORIZED if the server has not proven it or is another user's, and TransportError
    otherwise. That is also what a push gets: the owner would believe it of a peer that has proven nothing.
    """
    on_push, channel._on_push = channel._on_push, _too_early
    welcome = _greet(channel, service, hello, token, server)
    if not token:
        fault = channel.foreign_server(trusted)
        if fault:
            channel.broken = channel.broken or fault
            raise Refused(M.Status.UNAUTHORIZED, fault)
    channel._on_push = on_push
    return welcome


def _too_early(_msg: Any) -> NoReturn:
    raise RemoteProtocolError("the peer sent a push before it had answered HELLO")


def _greet(channel: Channel, service: int, hello: M.Hello, token: str, server: str) -> M.Welcome:
    numbers = []
    if token:
        from ..wire.auth import Asker  # a client without a token has no need of it

        asker = Asker(token, service, hello.role, server)
        prove = asker.prove(channel.call(asker.auth))
        if isinstance(prove, str):
            channel.broken = channel.broken or prove
            raise Refused(M.Status.UNAUTHORIZED, prove)
        numbers.append(channel.submit(prove))
    numbers.append(channel.submit(hello))
    answers = [channel.result(channel.wait(number)) for number in numbers]
    if not isinstance(answers[-1], M.Welcome):
        channel.fail("the peer answered HELLO with something else")
    welcome: M.Welcome = answers[-1]
    return welcome


def reset_on_close(sock: socket.socket) -> None:
    """Make the next close reset the connection."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def _socket(family: socket.AddressFamily) -> socket.socket:
    """Return a new socket. Raises TransportError, so an engine that is out of descriptors sees misses, not errors."""
    try:
        return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as exc:
        raise TransportError(f"cannot create a socket: {exc.strerror or exc}") from exc
