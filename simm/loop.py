"""The event loop under every SiMM server: selectors, non-blocking sockets, bounded work.

One thread runs :meth:`Loop.run`; services subclass :class:`Service` and get whole frames.

What can go wrong, and what stands against it:

* *A peer that does not read.* Answers queue up in :class:`Peer`. Above ``OUT_PAUSE_BYTES`` we
  stop reading its requests (back-pressure); above ``OUT_CLOSE_BYTES`` (pushes only get there)
  it is closed; and so is one that in ``STALL_S`` seconds has taken neither all that waits for it nor
  ``OUT_LEAST_BYTES`` of it. Whatever it sends meanwhile does not count, nor do a few bytes now and then.
* *A thousand that do not read.* While all queues together hold more than ``OUT_TOTAL_BYTES``, a peer
  that has anything waiting is not read. One answer of each is always taken on, so the
  bound is that sum and one answer a connection.
* *A peer that sends half a frame for ever.* A second clock runs while input is pending.
* *A peer whose host or network has gone.* The kernel gives up after ``STALL_S`` without an
  acknowledgement, and asks an idle one as often whether it is there: no connection outlives its other
  end by hours.
* *A peer that sends without pause.* One wake-up reads at most ``READ_BYTES`` of each peer and
  handles at most ``FRAMES_PER_TURN`` frames of it before the others' turn.
* *No descriptors left.* ``accept`` failing with EMFILE would spin: the listener rests a second.
* *A handler that raises.* A bug of ours closes that one connection, with the traceback logged,
  and not the server.

Costs: one ``epoll_wait``, one ``recv`` and one ``send`` a request in the quiet case.
"""

from __future__ import annotations

import contextlib
import errno
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

from . import messages as M
from .errors import RemoteProtocolError
from .rpc import Connection, Flag, Frame, encode, reply

log = logging.getLogger("simm.loop")

READ_BYTES: Final = 256 << 10
FRAMES_PER_TURN: Final = 64
OUT_PAUSE_BYTES: Final = 1 << 20
OUT_CLOSE_BYTES: Final = 8 << 20
OUT_TOTAL_BYTES: Final = 64 << 20
STALL_S: Final = 30.0
OUT_LEAST_BYTES: Final = 32 << 10
SWEEP_S: Final = 5.0
#: What is served so much later than it came may be from a peer that has given up meanwhile.
LAG_S: Final = 0.1
_FDS_MAX: Final = 4
_FD_SPACE: Final = socket.CMSG_SPACE(4 * _FDS_MAX)
_UCRED: Final = struct.Struct("3i")
_TCP_NOTSENT_LOWAT: Final = 25
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_ACCEPT_PASSING: Final = frozenset(
    (
        errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH,
        errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.ENONET,
    )
)  # fmt: skip


class Service:
    """What a listener's connections talk to. All methods are called in the loop's thread."""

    #: Most bytes of one read while frames are parsed. Where bulk follows a frame, little: what comes along with
    #: the frame is copied twice more than what ``on_bulk`` reads.
    read_bytes: int = READ_BYTES
    #: Most bytes of a TCP connection that the kernel takes from us ahead of what it can send (TCP_NOTSENT_LOWAT); 0
    #: leaves it megabytes, which fast transfers need, and which a peer that does not read holds on nobody's account.
    unsent_bytes: int = 128 << 10

    def on_connect(self, peer: Peer) -> None:
        """A connection was accepted or adopted."""

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """A whole frame arrived. Raise RemoteProtocolError to refuse the peer."""
        raise NotImplementedError

    def on_bulk(self, peer: Peer, size: int) -> None:
        """Bare bytes are ready while ``peer.bulk`` is set: the service reads them itself."""
        raise NotImplementedError

    def on_drain(self, peer: Peer) -> None:
        """The output queue has run empty."""

    def on_close(self, peer: Peer, reason: str) -> None:
        """The connection is gone; nothing can be sent any more. Called exactly once."""


class Peer:
    """One connection of a server: parser, output queue and flow control."""

    __slots__ = (
        "address", "bulk", "closed", "conn", "context", "fds", "loop", "mark_at", "mark_bytes", "out", "out_bytes",
        "owed", "parse_more", "paused", "progress_at", "sent_bytes", "service", "sock", "take_fds", "wants",
    )  # fmt: skip

    def __init__(self, loop: Loop, sock: socket.socket, service: Service, address: str) -> None:
        self.loop = loop
        self.sock = sock
        self.service = service
        self.address = address
        self.conn = Connection()
        #: For the service: its session or state of this connection.
        self.context: Any = None
        #: While True, readable bytes are bulk and go to ``on_bulk``.
        self.bulk = False
        #: Receive descriptors (SCM_RIGHTS) into ``fds``; off by default, costs a recvmsg.
        self.take_fds = False
        self.fds: list[int] = []
        self.out: deque[bytes | memoryview] = deque()
        self.out_bytes = 0
        #: What of the queue counts in ``loop.owed_bytes``. Bulk does not: it is memory of the arena, not ours.
        self.owed = 0
        #: Bytes that have left the queue so far; how many they were, and when, as the stall clock last began anew.
        self.sent_bytes = 0
        self.mark_bytes = 0
        self.mark_at = 0.0
        self.closed = False
        self.paused = False
        self.parse_more = False
        self.progress_at = loop.now
        self.wants = selectors.EVENT_READ

    def __repr__(self) -> str:
        state = "closed" if self.closed else "paused" if self.paused else "open"
        return f"<Peer {self.address} {state} out={self.out_bytes}>"

    def credentials(self) -> tuple[int, int, int]:
        """(pid, uid, gid) of a UNIX socket's other end, as the kernel knows them; (0, -1, -1) for TCP."""
        if self.sock.family != socket.AF_UNIX:
            return 0, -1, -1
        raw = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, gid = _UCRED.unpack(raw)
        return pid, uid, gid

    def send(self, data: bytes | memoryview) -> None:
        """Send now what the socket takes and queue the rest."""
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
            self.owed += size
            self.loop.owed_bytes += size
        if self.out_bytes > OUT_CLOSE_BYTES and not self.bulk:
            self.abort(f"{self.out_bytes} bytes of answers not read")
            return
        self.loop._update(self)

    def send_message(self, msg: Any, request_id: int = 0, *, status: int = 0) -> None:
        """Answer a request."""
        self.send(reply(msg, request_id, status))

    def push(self, msg: Any) -> None:
        """Send a message that nobody asked for."""
        self.send(encode(msg, 0, flags=Flag.PUSH))

    def send_error(self, request_id: int, status: int, text: str) -> None:
        """Answer a request with what is wrong with it."""
        self.send(reply(M.Error(text[:2000]), request_id, status))

    def close(self, reason: str = "closed") -> None:
        """Close now; queued output is lost. Twice is harmless."""
        if self.closed:
            return
        self.closed = True
        self.loop._forget(self)
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.out.clear()
        self.out_bytes = 0
        self.loop.owed_bytes -= self.owed
        self.owed = 0
        with contextlib.suppress(OSError):
            self.sock.close()
        try:
            self.service.on_close(self, reason)
        except Exception:
            log.exception("on_close of %s", self.address)

    def abort(self, reason: str) -> None:
        """Close, and let the kernel forget what it still holds for the peer, which would not take it anyway.

        Else up to a socket buffer for each (megabytes, of nobody's account) stays until the peer ends.
        """
        if not self.closed:
            forget_at_close(self.sock)
            self.close(reason)

    def gave_up(self, since: float) -> bool:
        """Has the peer hung up on a request that came after ``since`` (``loop.now``) and was kept waiting by us?

        A caller that times out closes its connection, and then tries again elsewhere. What it sent before must not be
        carried out late, on top of that. Looked at only where there was a wait at all: a system call.
        """
        if not self.loop.lagged and self.loop.clock() - since <= LAG_S:
            return False
        poller = select.poll()
        poller.register(self.sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def held_back(self) -> bool:
        """Does so much output wait that we take no more requests? Those of others count for it too."""
        return self.out_bytes > (OUT_PAUSE_BYTES if self.loop.owed_bytes <= OUT_TOTAL_BYTES else 0)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading this peer (for services with back-pressure of their own)."""
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
            self.loop.owed_bytes -= self.owed
            self.owed = 0
            self.progress_at = self.loop.now  # what is pending had to wait for this
        self.loop._update(self)
        if not out:
            self.service.on_drain(self)
            if self.conn.pending_bytes and not self.closed and not self.bulk:
                self._parse()

    def _readable(self) -> None:
        if self.bulk:
            self.progress_at = self.loop.now
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
                    self.close("descriptors that nobody asked for")
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
        self.progress_at = self.loop.now
        try:
            self.conn.receive_data(self.loop._buffer[:size])
        except RemoteProtocolError as exc:
            self.close(str(exc))
            return
        self._parse()

    def _parse(self) -> None:
        """Handle up to FRAMES_PER_TURN frames; the rest in the loop's next turn."""
        self.parse_more = False
        try:
            for _ in range(FRAMES_PER_TURN):
                if self.closed or self.bulk or self.paused or (self.out and self.held_back()):
                    return
                frame = self.conn.next_frame()
                if frame is None:
                    return
                self.service.on_frame(self, frame)
        except RemoteProtocolError as exc:
            log.warning("closing %s: %s", self.address, exc)
            self.loop.protocol_errors += 1
            self.send_error(0, M.Status.BAD_REQUEST, str(exc))
            self.close(str(exc))
            return
        except Exception:
            log.exception("a request of %s failed", self.address)
            self.loop.handler_errors += 1
            self.close("internal error")
            return
        if self.conn.pending_bytes and not self.parse_more:
            self.parse_more = True
            self.loop._more.append(self)


class Loop:
    """A selectors loop with listeners, peers, timers and watched descriptors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.now = clock()
        self.selector = selectors.DefaultSelector()
        self.peers: set[Peer] = set()
        self.protocol_errors = 0
        self.handler_errors = 0
        #: What is handled in this turn may have waited for longer than LAG_S: we were stopped, or busy.
        self.lagged = False
        self._turned_at = self.now
        #: Bytes of answers and pushes in all peers' queues.
        self.owed_bytes = 0
        #: Peers closed because they stood still.
        self.stalled = 0
        #: False once stopped, also when that was before run().
        self.running = True
        self._listeners: list[socket.socket] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._more: deque[Peer] = deque()
        #: All peers' bytes pass through here: a fresh buffer for each read would be mapped and unmapped each time.
        self._buffer = memoryview(bytearray(READ_BYTES))
        self.call_every(SWEEP_S, self._sweep)

    # -- set-up -----------------------------------------------------------------------------

    def listen(self, sock: socket.socket, service: Service, *, connections_max: int = 20_000) -> None:
        """Accept on a bound, listening socket and give its connections to ``service``."""
        sock.setblocking(False)
        self._listeners.append(sock)
        self.watch(sock, self._acceptor(sock, service, connections_max))

    def adopt(self, sock: socket.socket, service: Service, address: str) -> Peer:
        """Make a connected socket a peer."""
        sock.setblocking(False)
        peer = Peer(self, sock, service, address)
        self.peers.add(peer)
        self.selector.register(sock, selectors.EVENT_READ, peer)
        try:
            service.on_connect(peer)
        except BaseException:
            self._forget(peer)  # without on_close: the service has not taken it on
            raise
        return peer

    def watch(self, fileobj: Any, callback: Callable[[int], None]) -> None:
        """Call back with the event mask whenever ``fileobj`` is readable."""
        self.selector.register(fileobj, selectors.EVENT_READ, callback)

    def unwatch(self, fileobj: Any) -> None:
        """Stop watching. Unknown ones are ignored."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(fileobj)

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call once, ``delay`` seconds from now."""
        heapq.heappush(self._timers, (self.clock() + delay, next(self._order), callback))

    def call_every(self, period: float, callback: Callable[[], None]) -> None:
        """Call every ``period`` seconds, never twice for a turn that came late."""

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
        """Wait for at most ``timeout`` seconds (None: until the next timer), handle what is ready; how much was."""
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
            if type(target) is Peer:
                if target.closed:
                    continue
                try:
                    if mask & selectors.EVENT_WRITE:
                        target._flush()
                    if mask & selectors.EVENT_READ and not target.closed:
                        target._readable()
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

    def close(self) -> None:
        """Close every peer and listener and the selector."""
        for peer in list(self.peers):
            peer.close("server stops")
        for sock in self._listeners:
            self.unwatch(sock)
            sock.close()
        self._listeners.clear()
        self.selector.close()

    # -- internals --------------------------------------------------------------------------

    def _watch_later(self, listener: socket.socket, callback: Callable[[int], None]) -> None:
        self.call_later(1.0, lambda: self.watch(listener, callback))

    def _acceptor(self, listener: socket.socket, service: Service, most: int) -> Callable[[int], None]:
        return lambda _mask: self._accept(listener, service, most)

    def _accept(self, listener: socket.socket, service: Service, connections_max: int) -> None:
        for _ in range(64):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    log.error("cannot accept: %s; trying again in 1 s (raise LimitNOFILE)", exc)
                    self.selector.unregister(listener)
                    self._watch_later(listener, self._acceptor(listener, service, connections_max))
                    return
                if exc.errno in _ACCEPT_PASSING:  # of the one connection that was waiting: see accept(2)
                    continue
                raise
            if len(self.peers) >= connections_max:
                log.error("%d connections: refusing another", len(self.peers))
                sock.close()
                continue
            if sock.family != socket.AF_UNIX:
                tune(sock, service.unsent_bytes)
                name = f"{address[0]}:{address[1]}"
            else:
                name = f"unix#{sock.fileno()}"
            try:
                self.adopt(sock, service, name)
            except Exception:  # one connection's, not the server's end
                log.exception("adopting %s failed", name)
                self.handler_errors += 1
                sock.close()

    def _update(self, peer: Peer) -> None:
        """Register for what the peer can do next: write while output waits, read unless held back."""
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

    def _forget(self, peer: Peer) -> None:
        self.peers.discard(peer)
        if peer.wants:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.sock)
            peer.wants = 0

    def _sweep(self) -> None:
        """Close peers that neither read their answers nor finish their frame."""
        now = self.now
        for peer in list(self.peers):
            if peer.out:
                if peer.sent_bytes - peer.mark_bytes >= OUT_LEAST_BYTES:
                    peer.mark_bytes = peer.sent_bytes
                    peer.mark_at = now
                stalled = now - peer.mark_at > STALL_S
            elif peer.bulk or (peer.conn.pending_bytes and not peer.paused):
                stalled = now - peer.progress_at > STALL_S
            else:
                continue
            if stalled:
                self.stalled += 1
                log.info("closing %s: it stands still, %d bytes wait for it", peer.address, peer.out_bytes)
                peer.abort(f"no progress for {STALL_S:.0f} s")


def forget_at_close(sock: socket.socket) -> None:
    """The next close resets the connection."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def tune(sock: socket.socket, unsent_bytes: int) -> None:
    """Options of a server's TCP connection: no delay, few bytes ahead, and an end when its other end has gone."""
    seconds = max(1, int(STALL_S))
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000),
        *([(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_bytes)] if unsent_bytes else ()),
    ):
        sock.setsockopt(level, option, value)


def listen_tcp(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """A listening TCP socket; OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return sock


def listen_unix(path: str, *, mode: int = 0o600, backlog: int = 1024) -> socket.socket:
    """A listening UNIX socket at ``path`` (which must not exist), with its mode set before anyone can connect."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(path)
        os.chmod(path, mode)
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"cannot listen on {path}: {exc.strerror or exc}") from exc
    return sock
