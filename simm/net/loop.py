"""The event loop of every SiMM server: a selector, non-blocking sockets, bounded work per turn.

One thread runs :meth:`Loop.run`. It accepts connections, makes a peer of each (``net/peer.py``), and lets peers, timers
and watched descriptors have their turns.

Failures and their mitigation
-----------------------------
* *Peers do not read, do not finish what they send, or send without pause.* See ``net/peer.py``.
* *A peer does not say who it is.* See ``net/admission.py``.
* *A peer's host or network is gone.* The kernel gives up after ``STALL_S`` without an acknowledgement, and probes an
  idle connection as often. No connection outlives its peer by hours.
* *No descriptors are left.* ``accept`` would fail with EMFILE in every turn, so the listener pauses for a moment.
* *A service raises.* The loop logs the traceback and closes that connection only. But a CorruptionError ends the loop.
* *A timer raises, or the handler of a watched descriptor.* That ends the loop, as it does not know what was left half
  done: a worker's successor recovers its arena, a stream has none, and a manager begins again with the state that it
  has stored. With a supervisor all its arenas would go. So its loop is ``lasting``: it logs the traceback and goes on.

Cost per request without contention: one ``epoll_wait``, one ``recv`` and one ``send``.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ..errors import CorruptionError, LocalProtocolError, SimmError, line_about
from .admission import HELLO_BYTES_MAX, HELLO_S, LogLimit, Strangers, descriptor_limit, origin_of
from .listeners import OutOfDescriptors, accepted, tune
from .peer import LAG_S, READ_BYTES, STALL_S, Peer, Service

log = logging.getLogger("simm.net.loop")

MAINTENANCE_S: Final = 5.0
#: The pause of a listener without descriptors, seconds.
ACCEPT_AGAIN_S: Final = 0.1

PeerMaker = Callable[["Loop", socket.socket, Service, str], Peer]  # a Peer, or see net/tls_peer.py


class Loop:
    """A selector loop with listeners, peers, timers and watched descriptors.

    ``lasting``: a timer or handler that fails by a mistake in SiMM is counted and logged, and does not end it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, lasting: bool = False) -> None:
        self.clock = clock
        self._lasting = lasting
        self.now = clock()
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.peers: set[Peer] = set()
        self.protocol_errors = 0
        #: Requests refused as their peer has not proven a token, or may not.
        self.unauthorized = 0
        self.handler_errors = 0
        #: For how long the input of this turn may have waited, seconds: the process was stopped, or busy.
        self.lag_s = 0.0
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
        #: Peers with frames that the next turn handles.
        self.more: deque[Peer] = deque()
        #: All input passes through here. A new buffer for each read would be mapped and unmapped each time.
        self.input = memoryview(bytearray(READ_BYTES))
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
        try:
            self.selector.register(peer.sock, selectors.EVENT_READ, peer)
            service.on_connect(peer)
        except BaseException:
            self.unregister(peer)  # without on_close, as the service has not accepted it
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
        if self.more:
            timeout = 0.0
        elif self._timers:
            until = max(0.0, self._timers[0][0] - now)
            timeout = until if timeout is None or until < timeout else timeout
        events = self.selector.select(timeout)
        lag = now - self._turned_at
        if timeout:
            self.now = self.clock()
            lag = max(lag, self.now - now - timeout)
        self.lag_s = lag
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
                    log.exception("serving %s failed", target.address, extra=line_about(target.session))
                    self.handler_errors += 1
                    target.close("internal error")
            else:
                try:
                    target(mask)
                except Exception as exc:
                    self._outlive(exc, "the handler of a watched descriptor")
        for _ in range(len(self.more)):
            peer = self.more.popleft()
            peer.parse_more = False
            if not peer.closed:
                peer._parse()
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            due = heapq.heappop(timers)[2]
            try:
                due()
            except Exception as exc:
                self._outlive(exc, "a timer")
        return len(events)

    def stop_listening(self) -> None:
        """Close all listeners, so that a client that connects is refused at once and goes elsewhere."""
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

    def update(self, peer: Peer) -> None:
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

    def unregister(self, peer: Peer) -> None:
        """Forget a peer that is closed."""
        self.peers.discard(peer)
        self.strangers.discard(peer)
        if peer.wants:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(peer.sock)
            peer.wants = 0

    def _outlive(self, exc: Exception, what: str) -> None:
        """Count and log what has failed by a mistake in SiMM, if this loop is to outlive that. Else raise it again.

        What is raised on purpose is for whoever runs the loop, but for a message that cannot be packed.
        """
        if not self._lasting or (isinstance(exc, SimmError) and not isinstance(exc, LocalProtocolError)):
            raise exc
        self.handler_errors += 1
        self.noise(logging.ERROR, "%s failed", what, exc_info=True)

    def _maintain(self) -> None:
        """Close peers that neither read their replies nor finish their frame."""
        for peer in list(self.peers):
            if peer.stalled(self.now):
                self.stalled += 1
                text = "closing %s: no progress for %.0f s, %d bytes queued"
                self.noise(logging.INFO, text, peer.address, STALL_S, peer.out_bytes, session=peer.session)
                peer.abort(f"no progress for {STALL_S:.0f} s")

    def _expire(self) -> None:
        """Close strangers whose time is up.

        If this process was late itself, their HELLO may wait in its sockets: by how much it was late does not count. A
        crowd of strangers that keeps the loop late by what it sends gains no more than that.
        """
        late = self.lag_s if self.lag_s > LAG_S else 0.0
        for peer in self.strangers.overdue(self.now - late):
            self.noise(logging.INFO, "closing %s: no HELLO within %.0f s", peer.address, HELLO_S)
            peer.abort(f"no HELLO within {HELLO_S:.0f} s")
