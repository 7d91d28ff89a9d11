"""The event loop of every SiMM server: a selector, non-blocking sockets, bounded work per turn.

One thread runs :meth:`Loop.run`. Services subclass :class:`Service` and receive whole frames.

Failures and their mitigation
-----------------------------
* *A peer does not read.* Replies queue up in its :class:`Peer`. Above ``OUT_PAUSE_BYTES`` the loop stops reading its
  requests (back-pressure). Above ``OUT_CLOSE_BYTES``, which only pushes reach, the loop closes the connection. It also
  closes one that in ``STALL_S`` seconds has taken neither its whole queue nor ``OUT_LEAST_BYTES`` of it. Input from
  the peer does not count as progress, and neither do a few bytes now and then.
* *A thousand peers do not read.* While all queues together hold more than ``OUT_TOTAL_BYTES``, the loop reads no peer
  that has a queue. It always accepts one reply for each, so memory is bounded by that sum and one reply per connection.
* *A peer never finishes a frame or a value.* Input that is not complete obeys the same rule as output: in ``STALL_S``
  seconds ``OUT_LEAST_BYTES`` of it must arrive, or the rest.
* *A peer does not say who it is.* See ``net/admission.py``.
* *A peer's host or network is gone.* The kernel gives up after ``STALL_S`` without an acknowledgement, and probes an
  idle connection as often. No connection outlives its peer by hours.
* *A peer sends without pause.* One turn reads at most ``READ_BYTES`` of each peer and handles at most
  ``FRAMES_PER_TURN`` of its frames, for at most ``TURN_S``, before it serves the others.
* *No descriptors are left.* ``accept`` would fail with EMFILE in every turn, so the listener pauses for a moment.
* *A handler raises.* The loop logs the traceback and closes that connection only. But a CorruptionError ends the loop.

Cost per request without contention: one ``epoll_wait``, one ``recv`` and one ``send``.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ..constants import FRAME_BYTES_MAX
from ..errors import CorruptionError, RemoteProtocolError
from ..rpc import Connection, Flag, Frame, encode, reply
from ..wire import messages as M
from .admission import HELLO_BYTES_MAX, HELLO_S, LogLimit, Strangers, descriptor_limit, origin_of
from .channel import reset_on_close
from .listeners import OutOfDescriptors, accepted, tune

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
MAINTENANCE_S: Final = 5.0
#: The pause of a listener without descriptors, seconds.
ACCEPT_AGAIN_S: Final = 0.1
#: A request that waited longer than this, in seconds, may come from a peer that has given up since.
LAG_S: Final = 0.1
_FDS_MAX: Final = 4
_FD_SPACE: Final = socket.CMSG_SPACE(4 * _FDS_MAX)


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
        "address", "bulk", "closed", "conn", "context", "fds", "in_bytes", "in_mark", "loop", "mark_at", "mark_bytes",
        "out", "out_bytes", "parse_more", "paused", "progress_at", "queued", "sent_bytes", "service", "sock",
        "take_fds", "wants",
    )  # fmt: skip

    def __init__(self, loop: Loop, sock: socket.socket, service: Service, address: str) -> None:
        self.loop = loop
        self.sock = sock
        self.service = service
        self.address = address
        self.conn = Connection()
        #: The service's state of this connection.
        self.context: Any = None
        #: Input is bulk, which ``on_bulk`` reads.
        self.bulk = False
        #: Receive descriptors (SCM_RIGHTS) into ``fds``. Off by default, as it needs recvmsg.
        self.take_fds = False
        self.fds: list[int] = []
        self.out: deque[bytes | memoryview] = deque()
        self.out_bytes = 0
        #: Bytes of the queue that count in ``loop.queued_bytes``. Bulk does not count, as it is memory of the arena.
        self.queued = 0
        #: Bytes that have left the queue so far; their number and the time when the stall timer last restarted.
        self.sent_bytes = 0
        self.mark_bytes = 0
        self.mark_at = 0.0
        self.closed = self.paused = self.parse_more = False
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
        self.loop._update(self)

    def send_message(self, msg: Any, request_id: int = 0, *, status: int = 0) -> None:
        """Reply to a request."""
        self.send(reply(msg, request_id, status))

    def send_verdict(self, msg: Any, status: int, request_id: int) -> None:
        """Reply to AUTH or PROVE, and close if the reply is a refusal."""
        self.send_message(msg, request_id, status=status)
        if status == M.Status.UNAUTHORIZED:
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
        self.loop._unregister(self)
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.out.clear()
        self.out_bytes = 0
        self.loop.queued_bytes -= self.queued
        self.queued = 0
        with contextlib.suppress(OSError):
            self.sock.close()
        try:
            self.service.on_close(self, reason)
        except CorruptionError:
            raise
        except Exception:
            log.exception("on_close of %s", self.address)

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
        if not self.loop.lagged and self.loop.clock() - since <= LAG_S:
            return False
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def held_back(self) -> bool:
        """Return whether too much output waits to read more requests. The queues of other peers count too."""
        return self.out_bytes > (OUT_PAUSE_BYTES if self.loop.queued_bytes <= OUT_TOTAL_BYTES else 0)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading this peer, for a service with its own back-pressure."""
        self.paused = paused
        if not paused and self.conn.pending_bytes:
            self.parse_more = True
            self.loop._more.append(self)
        self.loop._update(self)

    # -- loop side --------------------------------------------------------------------------

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
        self.loop._update(self)
        if not out:
            self.service.on_drain(self)
            if self.conn.pending_bytes and not self.closed and not self.bulk:
                self._parse()

    def _readable(self) -> None:
        if self.bulk:
            self.service.on_bulk(self, 0)
            return
        try:
            if self.take_fds:
                buffer = self.loop._buffer
                size, anc, *_ = self.sock.recvmsg_into([buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
                for level, kind, raw in anc:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self.fds.extend(struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4]))
                if len(self.fds) > _FDS_MAX:
                    self.close("the peer sent descriptors without being asked")
                    return
            else:
                size = self.sock.recv_into(self.loop._buffer, self.service.read_bytes)
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
            self.conn.receive_data(self.loop._buffer[:size])
        except RemoteProtocolError as exc:
            self.close(str(exc))
            return
        self._parse()

    def _parse(self) -> None:
        """Handle up to FRAMES_PER_TURN frames for up to TURN_S; the next turn handles the rest."""
        self.parse_more = False
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
            self.loop.noise(logging.WARNING, "closing %s: %s", self.address, exc)
            self.loop.protocol_errors += 1
            self.send_error(0, M.Status.BAD_REQUEST, str(exc))
            self.close(str(exc))
            return
        except CorruptionError:
            raise
        except Exception:
            self.loop.noise(logging.ERROR, "a request of %s failed", self.address, exc_info=True)
            self.loop.handler_errors += 1
            self.close("internal error")
            return
        if self.conn.pending_bytes and not self.parse_more:
            self.parse_more = True
            self.loop._more.append(self)


PeerMaker = Callable[["Loop", socket.socket, Service, str], Peer]  # a Peer, or see net/tls_peer.py


class Loop:
    """A selector loop with listeners, peers, timers and watched descriptors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.now = clock()
        self.selector = selectors.DefaultSelector()
        self.peers: set[Peer] = set()
        self.protocol_errors = 0
        self.handler_errors = 0
        #: Input of this turn may have waited longer than LAG_S: the process was stopped, or busy.
        self.lagged = False
        self._turned_at = self.now
        #: Bytes of replies and pushes in all peers' queues.
        self.queued_bytes = 0
        #: Peers closed for lack of progress.
        self.stalled = 0
        #: Connections that have not said who they are.
        self.strangers: Strangers[Peer] = Strangers()
        #: Log lines that peers cause go through it.
        self.noise = LogLimit(log, clock)
        self._descriptor_limit = 0
        #: False once stopped, even before run().
        self.running = True
        self._listeners: list[socket.socket] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._more: deque[Peer] = deque()
        #: All input passes through here. A new buffer for each read would be mapped and unmapped each time.
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.call_every(MAINTENANCE_S, self._maintain)
        self.call_every(1.0, self._expire)

    # -- set-up -----------------------------------------------------------------------------

    def listen(
        self, sock: socket.socket, service: Service, *, connections_max: int = 20_000, peers: PeerMaker = Peer
    ) -> None:
        """Accept connections on a listening socket for ``service``. ``peers``: what makes a peer of one."""
        self._listeners.append(sock)
        self._descriptor_limit = descriptor_limit()
        self.strangers.most = self._descriptor_limit // 4
        self.accept(sock, lambda taken, address: self._take(taken, address, service, connections_max, peers))

    def accept(self, listener: socket.socket, take: Callable[[socket.socket, Any], None], per_turn: int = 64) -> None:
        """Call ``take`` with each connection to a listening socket and its address, ``per_turn`` at most in a turn."""
        listener.setblocking(False)
        self.watch(listener, lambda _mask: self._accept(listener, take, per_turn))

    def adopt(
        self, sock: socket.socket, service: Service, address: str, origin: bytes = b"", peers: PeerMaker = Peer
    ) -> Peer:
        """Serve a connected socket and return its peer. ``origin``: it is a stranger from there."""
        sock.setblocking(False)
        peer = peers(self, sock, service, address)
        self.peers.add(peer)
        if origin:
            peer.conn.body_max = HELLO_BYTES_MAX
            if (replaced := self.strangers.add(peer, origin, self.now)) is not None:
                replaced.abort("it said nothing, and others came")
        self.selector.register(peer.sock, selectors.EVENT_READ, peer)
        try:
            service.on_connect(peer)
        except BaseException:
            self._unregister(peer)  # without on_close, as the service has not accepted it
            raise
        return peer

    def watch(self, fileobj: Any, callback: Callable[[int], None]) -> None:
        """Call ``callback`` with the event mask whenever ``fileobj`` is readable."""
        self.selector.register(fileobj, selectors.EVENT_READ, callback)

    def unwatch(self, fileobj: Any) -> None:
        """Stop watching. Ignores unknown objects."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(fileobj)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, ``delay`` seconds from now."""
        heapq.heappush(self._timers, (self.clock() + delay, next(self._order), callback))

    def call_every(self, period: float, callback: Callable[[], object]) -> None:
        """Call ``callback`` every ``period`` seconds, once after a delay that spans several periods."""

        def again() -> None:
            self.call_later(period, again)
            callback()

        self.call_later(period, again)

    # -- running ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run until :meth:`stop`."""
        while self.running:
            self.run_once(None)

    def stop(self) -> None:
        """End :meth:`run` after the current turn."""
        self.running = False

    def run_once(self, timeout: float | None) -> int:
        """Handle one turn and return the number of events.

        Waits for at most ``timeout`` seconds, or until the next timer if it is None.
        """
        self.now = now = self.clock()
        if self._more:
            timeout = 0.0
        elif self._timers:
            until = max(0.0, self._timers[0][0] - now)
            timeout = until if timeout is None or until < timeout else timeout
        events = self.selector.select(timeout)
        lag = now - self._turned_at
        if timeout:
            self.now = self.clock()
            lag = max(lag, self.now - now - timeout)
        self.lagged = lag > LAG_S
        self._turned_at = self.now
        for key, mask in events:
            target = key.data
            if isinstance(target, Peer):
                if target.closed:
                    continue
                try:
                    if mask & selectors.EVENT_WRITE:
                        target._flush()
                    if mask & selectors.EVENT_READ and not target.closed:
                        target._readable()
                except CorruptionError:
                    raise
                except Exception:
                    log.exception("serving %s failed", target.address)
                    self.handler_errors += 1
                    target.close("internal error")
            else:
                target(mask)
        for _ in range(len(self._more)):
            peer = self._more.popleft()
            if not peer.closed:
                peer._parse()
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            heapq.heappop(timers)[2]()
        return len(events)

    def stop_listening(self) -> None:
        """Close all listeners, so that whoever connects is refused at once and goes elsewhere."""
        for sock in self._listeners:
            self.unwatch(sock)
            sock.close()
        self._listeners.clear()

    def close(self) -> None:
        """Close all peers, all listeners and the selector."""
        for peer in list(self.peers):
            peer.close("the server is stopping")
        self.stop_listening()
        self.selector.close()

    # -- internals --------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket, Any], None], per_turn: int) -> None:
        try:
            for sock, address in accepted(listener, per_turn):
                take(sock, address)
        except OutOfDescriptors as exc:
            self.noise(logging.ERROR, "cannot accept: %s; trying again soon (raise LimitNOFILE)", exc)
            self.unwatch(listener)
            self.call_later(ACCEPT_AGAIN_S, lambda: self._accept_again(listener, take, per_turn))

    def _accept_again(self, listener: socket.socket, take: Callable[[socket.socket, Any], None], per_turn: int) -> None:
        if listener.fileno() >= 0:
            self.accept(listener, take, per_turn)

    def _take(self, sock: socket.socket, address: Any, service: Service, most: int, peers: PeerMaker) -> None:
        if len(self.peers) >= most or sock.fileno() >= self._descriptor_limit:
            text = "%d connections are open, the most there may be (or LimitNOFILE is too low): refusing another"
            self.noise(logging.ERROR, text, len(self.peers))
            sock.close()
            return
        name = f"unix#{sock.fileno()}"
        try:
            if sock.family != socket.AF_UNIX:
                tune(sock, service.unsent_bytes, STALL_S)
                name = f"{address[0]}:{address[1]}"
            self.adopt(sock, service, name, origin_of(sock, address) if service.hello_first else b"", peers)
        except Exception:  # ends this connection, not the server
            log.exception("adopting %s failed", name)
            self.handler_errors += 1
            sock.close()

    def _update(self, peer: Peer) -> None:
        """Register for writing while output waits, and for reading unless the peer is held back."""
        if peer.closed:
            return
        wants = 0
        if peer.out:
            wants |= selectors.EVENT_WRITE
        if not peer.paused and (peer.bulk or not peer.out or not peer.held_back()):
            wants |= selectors.EVENT_READ
        if wants == peer.wants:
            return
        if not wants:
            self.selector.unregister(peer.sock)
        elif not peer.wants:
            self.selector.register(peer.sock, wants, peer)
        else:
            self.selector.modify(peer.sock, wants, peer)
        peer.wants = wants

    def _unregister(self, peer: Peer) -> None:
        self.peers.discard(peer)
        self.strangers.discard(peer)
        if peer.wants:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.sock)
            peer.wants = 0

    def _maintain(self) -> None:
        """Close peers that neither read their replies nor finish their frame."""
        now = self.now
        for peer in list(self.peers):
            if peer.out:
                if peer.sent_bytes - peer.mark_bytes >= OUT_LEAST_BYTES:
                    peer.mark_bytes = peer.sent_bytes
                    peer.mark_at = now
                stalled = now - peer.mark_at > STALL_S
            elif peer.bulk or (peer.conn.pending_bytes and not peer.paused):
                if peer.in_bytes - peer.in_mark >= OUT_LEAST_BYTES:
                    peer.in_mark = peer.in_bytes
                    peer.progress_at = now
                stalled = now - peer.progress_at > STALL_S
            else:
                continue
            if stalled:
                self.stalled += 1
                text = "closing %s: no progress for %.0f s, %d bytes queued"
                self.noise(logging.INFO, text, peer.address, STALL_S, peer.out_bytes)
                peer.abort(f"no progress for {STALL_S:.0f} s")

    def _expire(self) -> None:
        """Close strangers whose time is up. If this process was late itself, their HELLO may wait in its sockets."""
        for peer in [] if self.lagged else self.strangers.overdue(self.now):
            self.noise(logging.INFO, "closing %s: no HELLO within %.0f s", peer.address, HELLO_S)
            peer.abort(f"no HELLO within {HELLO_S:.0f} s")
