"""One connection of a server: parser, output queue and flow control, and the service that gets its frames.

Services subclass :class:`Service` and receive whole frames. The event loop (``net/loop.py``) has the peers, and calls
them when their sockets are ready.

Failures and their mitigation
-----------------------------
* *A peer does not read.* Replies queue up in its :class:`Peer`. Above ``OUT_PAUSE_BYTES`` its requests are not read any
  more (back-pressure). Above ``OUT_CLOSE_BYTES``, which only pushes reach, the connection is closed. So is one that in
  ``STALL_S`` seconds has taken neither its whole queue nor ``OUT_LEAST_BYTES`` of it. Input from the peer does not
  count as progress, and neither do a few bytes now and then.
* *A thousand peers do not read.* While all queues together hold more than ``OUT_TOTAL_BYTES``, no peer is read that has
  a queue. One reply is always accepted for each, so memory is bounded by that sum and one reply per connection.
* *A peer never finishes a frame or a value.* Input that is not complete obeys the same rule as output: in ``STALL_S``
  seconds ``OUT_LEAST_BYTES`` of it must arrive, or the rest.
* *A peer sends without pause.* One turn reads at most ``READ_BYTES`` of each peer and handles at most
  ``FRAMES_PER_TURN`` of its frames, for at most ``TURN_S``, before others are served.
"""

from __future__ import annotations

import contextlib
import logging
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from ..constants import FRAME_BYTES_MAX
from ..errors import CorruptionError, RemoteProtocolError, line_about
from ..host.threads import CLOSER
from ..rpc import HEADER_BYTES, Connection, Flag, Frame, encode, reply
from ..wire import messages as M
from .admission import LogLimit, Strangers
from .channel import reset_on_close

log = logging.getLogger("simm.net.loop")

READ_BYTES: Final = 256 << 10
FRAMES_PER_TURN: Final = 64
#: A peer's further frames wait for the next turn once those of this one have taken so long, seconds.
TURN_S: Final = 0.005
OUT_PAUSE_BYTES: Final = 1 << 20
OUT_CLOSE_BYTES: Final = 8 << 20
OUT_TOTAL_BYTES: Final = 64 << 20
STALL_S: Final = 30.0
OUT_LEAST_BYTES: Final = 32 << 10
#: A loop that is late by more than this, in seconds, was stopped, or is very busy.
LAG_S: Final = 0.1
#: A request that waited longer than this, in seconds, may come from a peer that has given up since.
WAITED_S: Final = 0.02
_FDS_MAX: Final = 4
#: Room for as many as a message can have (SCM_MAX_FD): the kernel closes at once those that find none.
_FD_SPACE: Final = socket.CMSG_SPACE(4 * 253)


class PeerLoop(Protocol):
    """What a peer needs of the loop that it is on; ``net/loop.py`` explains the fields."""

    clock: Callable[[], float]
    now: float
    selector: selectors.BaseSelector
    protocol_errors: int
    unauthorized: int
    handler_errors: int
    lag_s: float
    queued_bytes: int
    strangers: Strangers[Peer]
    noise: LogLimit
    more: deque[Peer]
    input: memoryview

    def update(self, peer: Peer) -> None:
        """Watch for what the peer wants now."""

    def unregister(self, peer: Peer) -> None:
        """Forget a peer that is closed."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, ``delay`` seconds from now."""


class Service:
    """The handler of a listener's connections. The loop calls all methods in its own thread."""

    #: Most bytes of one read while frames are parsed. A service with bulk transfers sets it low: bulk that arrives
    #: together with a frame is copied twice more than bulk that ``on_bulk`` reads.
    read_bytes: int = READ_BYTES
    #: Most unsent bytes that the kernel buffers for a TCP connection (TCP_NOTSENT_LOWAT). 0 allows megabytes. Fast
    #: transfers need that, but a peer that does not read then holds memory that no limit accounts for.
    unsent_bytes: int = 128 << 10
    #: Whoever connects is a stranger (``net/admission.py``) until the service calls :meth:`Peer.admit`.
    hello_first: bool = False

    def on_connect(self, peer: Peer) -> None:
        """Handle a new connection, accepted or adopted."""

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """Handle a whole frame. Raise RemoteProtocolError to refuse the peer."""
        raise NotImplementedError

    def on_bulk(self, peer: Peer, size: int) -> None:
        """Read bulk bytes from the socket, which is readable. Called while ``peer.bulk`` is set."""
        raise NotImplementedError

    def on_drain(self, peer: Peer) -> None:
        """Handle an output queue that has become empty."""

    def on_close(self, peer: Peer, reason: str) -> None:
        """Handle the end of the connection. Called exactly once; nothing can be sent any more."""


class Peer:
    """One connection of a server: parser, output queue and flow control."""

    __slots__ = (
        "address", "bulk", "closed", "conn", "context", "distrusted", "fds", "in_bytes", "in_mark", "loop", "mark_at",
        "mark_bytes", "out", "out_bytes", "parse_more", "patient", "paused", "progress_at", "queued", "sent_bytes",
        "service", "session", "sock", "take_fds", "wants",
    )  # fmt: skip

    def __init__(self, loop: PeerLoop, sock: socket.socket, service: Service, address: str) -> None:
        self.loop = loop
        self.sock = sock
        self.service = service
        self.address = address
        self.conn = Connection()
        #: The service's state of this connection.
        self.context: Any = None
        #: The number of a client's session with a worker, for log lines; 0 for none.
        self.session = 0
        #: Input is bulk, which ``on_bulk`` reads.
        self.bulk = False
        #: Receive descriptors (SCM_RIGHTS) into ``fds``. Off by default, as it needs recvmsg.
        self.take_fds = False
        #: Of another user by a UNIX socket: what it sends, and the socket itself, may take hours to close.
        self.distrusted = False
        #: The peer may stand still for as long as it likes: a process of the same server, which others watch.
        self.patient = False
        self.fds: list[int] = []
        self.out: deque[bytes | memoryview] = deque()
        self.out_bytes = 0
        #: Bytes of the queue that count in ``loop.queued_bytes``. Bulk does not count, as it is memory of the arena.
        self.queued = 0
        #: Bytes that have left the queue so far; their number and the time when the stall timer last restarted.
        self.sent_bytes = 0
        self.mark_bytes = 0
        self.mark_at = 0.0
        self.closed = self.paused = False
        #: It is in ``loop.more``: its input is parsed in this turn or the next one, and nothing is read before.
        self.parse_more = False
        #: Bytes received; their number and the time when the stall timer of incomplete input last restarted.
        self.in_bytes = 0
        self.in_mark = 0
        self.progress_at = loop.now
        self.wants = selectors.EVENT_READ

    def __repr__(self) -> str:
        state = "closed" if self.closed else "paused" if self.paused else "open"
        return f"<Peer {self.address} {state} out={self.out_bytes}>"

    def admit(self) -> None:
        """Note that the peer has said who it is, so the limits on strangers end."""
        self.conn.body_max = FRAME_BYTES_MAX
        self.loop.strangers.discard(self)

    def send(self, data: bytes | memoryview) -> None:
        """Send as much as the socket accepts and queue the rest."""
        if self.closed:
            return
        size = len(data)
        if not self.out:
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as exc:
                self.close(f"send failed: {exc}")
                return
            if sent == size:
                return
            data = memoryview(data)[sent:]
            size -= sent
            self.mark_at = self.loop.now
            self.mark_bytes = self.sent_bytes
        self.out.append(data)
        self.out_bytes += size
        if not self.bulk:
            self.queued += size
            self.loop.queued_bytes += size
        if self.out_bytes > OUT_CLOSE_BYTES and not self.bulk:
            self.abort(f"{self.out_bytes} bytes of replies not read")
            return
        self.loop.update(self)

    def send_message(self, msg: Any, request_id: int = 0, *, status: int = 0) -> None:
        """Reply to a request."""
        self.send(reply(msg, request_id, status))

    def send_verdict(self, msg: Any, status: int, request_id: int) -> None:
        """Reply to AUTH or PROVE."""
        if isinstance(msg, M.Error):
            self.refuse(request_id, msg.text, status)
        else:
            self.send_message(msg, request_id, status=status)

    def refuse(self, request_id: int, text: str, status: int = M.Status.UNAUTHORIZED) -> None:
        """Reply to a request with an error. UNAUTHORIZED is logged, and closes the connection."""
        if status != M.Status.UNAUTHORIZED:
            self.send_error(request_id, status, text)
            return
        self.loop.unauthorized += 1
        self.loop.noise(logging.WARNING, "refusing %s: %s", self.address, text)
        self.send_error(request_id, status, text)
        self.close("unauthorized")

    def push(self, msg: Any) -> None:
        """Send a message that is no reply."""
        self.send(encode(msg, 0, flags=Flag.PUSH))

    def send_error(self, request_id: int, status: int, text: str) -> None:
        """Reply to a request with an error."""
        self.send(reply(M.Error(text[: M.TEXT_MAX]), request_id, status))

    def close(self, reason: str = "closed") -> None:
        """Close now and discard queued output. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self.loop.unregister(self)
        CLOSER.close(self.fds)
        self.fds.clear()
        self.out.clear()
        self.out_bytes = 0
        self.loop.queued_bytes -= self.queued
        self.queued = 0
        if self.distrusted:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            CLOSER.close([self.sock.detach()])
        else:
            with contextlib.suppress(OSError):
                self.sock.close()
        try:
            self.service.on_close(self, reason)
        except CorruptionError:
            raise
        except Exception:
            log.exception("on_close of %s", self.address, extra=line_about(self.session))

    def abort(self, reason: str) -> None:
        """Close and discard what the kernel has buffered for the peer.

        Otherwise up to a socket buffer (megabytes that no limit accounts for) stays until the peer ends.
        """
        if not self.closed:
            reset_on_close(self.sock)
            self.close(reason)

    def gave_up(self, since: float) -> bool:
        """Return whether the peer hung up while its request waited here. ``since``: ``loop.now`` when it could arrive.

        A caller that times out closes its connection and tries again elsewhere. The server must not execute the old
        request late, on top of the new one. The check is a system call, so it is made only after a wait.
        """
        return (self.loop.lag_s > WAITED_S or self.loop.clock() - since > WAITED_S) and self.hung_up()

    def hung_up(self) -> bool:
        """Return whether the peer has closed its end. A system call."""
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def attempt(self, step: Callable[[], object]) -> None:
        """Serve this peer out of its turn, as a timer does. As in the loop, a fault of it closes this peer alone.

        Raises CorruptionError.
        """
        try:
            step()
        except CorruptionError:
            raise
        except Exception:
            log.exception("serving %s failed", self.address, extra=line_about(self.session))
            self.loop.handler_errors += 1
            self.close("internal error")

    def held_back(self) -> bool:
        """Return whether too much output waits to read more requests. The queues of other peers count too."""
        return self.out_bytes > (OUT_PAUSE_BYTES if self.loop.queued_bytes <= OUT_TOTAL_BYTES else 0)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading this peer, for a service with its own back-pressure."""
        self.paused = paused
        if not paused:
            self._parse_later()
        self.loop.update(self)

    # -- loop side --------------------------------------------------------------------------

    def stalled(self, now: float) -> bool:
        """Return True if the peer neither reads its replies nor finishes its frame. The loop asks every few seconds."""
        if self.patient:
            return False
        if self.out:
            if self.sent_bytes - self.mark_bytes >= OUT_LEAST_BYTES:
                self.mark_bytes = self.sent_bytes
                self.mark_at = now
            return now - self.mark_at > STALL_S
        if self.bulk or (self.conn.pending_bytes and not self.paused):
            if self.in_bytes - self.in_mark >= OUT_LEAST_BYTES:
                self.in_mark = self.in_bytes
                self.progress_at = now
            return now - self.progress_at > STALL_S
        return False

    def _flush(self) -> None:
        out = self.out
        while out:
            chunk = out[0]
            try:
                sent = self.sock.send(chunk)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                self.close(f"send failed: {exc}")
                return
            self.sent_bytes += sent
            self.out_bytes -= sent
            if sent < len(chunk):
                out[0] = memoryview(chunk)[sent:]
            else:
                out.popleft()
        if not out:
            self.loop.queued_bytes -= self.queued
            self.queued = 0
            self.progress_at = self.loop.now  # pending input had to wait for this
        self.loop.update(self)
        if not out:
            self.service.on_drain(self)
            if self.conn.pending_bytes and not self.closed and not self.bulk:
                self._parse()

    def _readable(self) -> None:
        if self.bulk:
            self.service.on_bulk(self, 0)
            return
        if self.parse_more:
            return  # what is here comes first, or a peer that sends faster than it is served fills the memory
        if self.out and self.held_back():  # by the queues of others, as of now
            self.loop.update(self)
            return
        try:
            if self.take_fds or self.distrusted:
                buffer = self.loop.input[: self._read_most(READ_BYTES)]
                size, anc, *_ = self.sock.recvmsg_into([buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
                for level, kind, raw in anc:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self.fds.extend(struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4]))
                if len(self.fds) > (_FDS_MAX if self.take_fds else 0):
                    self.close("the peer sent descriptors without being asked")
                    return
            else:
                size = self.sock.recv_into(self.loop.input, self._read_most(self.service.read_bytes))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self.close(f"connection lost: {exc}")
            return
        if not size:
            try:
                self.conn.at_eof()
            except RemoteProtocolError as exc:
                self.close(str(exc))
            else:
                self.close("peer closed")
            return
        if not self.conn.pending_bytes:
            self.progress_at = self.loop.now
            self.in_mark = self.in_bytes
        self.in_bytes += size
        try:
            self.conn.receive_data(self.loop.input[:size])
        except RemoteProtocolError as exc:
            self.close(str(exc))
            return
        self._parse()

    def _read_most(self, size: int) -> int:
        """Return how many bytes one read may take: of a stranger's those of one frame."""
        return min(size, self.conn.body_max + HEADER_BYTES)

    def _parse_later(self) -> None:
        """Parse what is left in the next turn, once, however often this is asked for."""
        if self.conn.pending_bytes and not self.parse_more:
            self.parse_more = True
            self.loop.more.append(self)

    def _parse(self) -> None:
        """Handle up to FRAMES_PER_TURN frames for up to TURN_S; the next turn handles the rest."""
        clock, until = self.loop.clock, self.loop.now + TURN_S
        try:
            for handled in range(FRAMES_PER_TURN):
                if self.closed or self.bulk or self.paused or (self.out and self.held_back()):
                    return
                if handled and clock() >= until:
                    break
                frame = self.conn.next_frame()
                if frame is None:
                    return
                self.progress_at = self.loop.now
                self.in_mark = self.in_bytes
                self.service.on_frame(self, frame)
        except RemoteProtocolError as exc:
            self.loop.noise(logging.WARNING, "closing %s: %s", self.address, exc, session=self.session)
            self.loop.protocol_errors += 1
            self.send_error(0, M.Status.BAD_REQUEST, str(exc))
            self.close(str(exc))
            return
        except CorruptionError:
            raise
        except Exception:
            self.loop.noise(
                logging.ERROR, "a request of %s failed", self.address, exc_info=True, session=self.session
            )
            self.loop.handler_errors += 1
            self.close("internal error")
            return
        self._parse_later()
