"""A socket of ZMQ for many peers that nobody trusts: what is kept of each is bounded, and so is their number.

A ZMQ library keeps a queue of messages for each peer, without a bound of their bytes or of the peers. Here a peer has
no queue: it has what its last call of ``more`` returned, which is called again when all of that has gone. So a peer
that reads slowly costs a few hundred KiB, and what it misses is its own affair.

Of too many connections those go that have said nothing, or are of the host that has the most; none for a host that has
more. So a host that connects
without end takes the room of others as long as they are fewer.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import selectors
import socket
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ...errors import SimmError, UsageError
from ...ipc.segments import SOCKET_PATH_BYTES_MAX
from ...net.admission import origin_of
from ...net.listeners import bound_address, listen_tcp, listen_unix, received, tune
from ...net.loop import Loop
from . import zmtp

log = logging.getLogger("simm.index.publish")

_PORT_MAX: Final = 65535
#: Peers of one socket.
PEERS_MAX: Final = 256
#: Topics of one subscriber, and questions of one peer that wait for the answers before them.
TOPICS_MAX: Final = 64
QUESTIONS_MAX: Final = 4
#: What a peer is sent before the others have their turn, and what the kernel keeps of it.
TURN_BYTES: Final = 256 << 10
_SEND_BYTES: Final = 256 << 10
#: Read of a peer in a turn: who says much at once takes no more time of the others.
_READ_BYTES: Final = 1 << 10
#: Frames that are handed to the kernel at a time.
_BUFFERS: Final = 64
#: Seconds for the handshake, and without progress of what a peer should read.
HANDSHAKE_S: Final = 10.0
STALL_S: Final = 60.0


class Peer:
    """A connection, and what its socket's owner knows of it.

    Attributes:
        out: what it is to be sent, of whole messages; ``writing``: it takes no more at the moment.
        pong: the answer to its last sign of life.
        topics: what a subscriber wants.
        cursor: number of the message that it gets next.
        questions: from which numbers on it wants replays.
        feed: the answer that it is being sent; ``fed``: when that has begun; ``snapshot``: what it has of one.
    """

    __slots__ = (
        "began", "cursor", "decoder", "fed", "feed", "moved", "origin", "out", "pong", "questions", "snapshot", "sock",
        "topics", "writing",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, origin: bytes, kind: str, now: float) -> None:
        self.sock = sock
        self.origin = origin
        self.decoder = zmtp.Decoder(kind)
        self.began = self.moved = self.fed = now
        self.out: deque[memoryview] = deque([memoryview(zmtp.GREETING + zmtp.ready(kind))])
        self.writing = False
        self.pong = b""
        self.topics: list[bytes] = []
        self.cursor = 0
        self.questions: deque[int] = deque()
        self.feed: Iterator[Any] | None = None
        self.snapshot: tuple[int, list[bytes]] | None = None


class Door:
    """Listens at one address, for peers of one kind. One thread, the loop's.

    Args:
        kind: of the socket, PUB or ROUTER.
        said: takes what a peer says that is no part of the protocol. May raise zmtp.BadPeer.
        more: returns what a peer is to be sent next, nothing if there is nothing now.

    Raises UsageError for what is no address, or one that this user may not have. Raises SimmError for what the next
    start may find mended: an address that is taken or not this host's yet, a name that is not known, no descriptor.
    """

    def __init__(
        self, loop: Loop, address: str, kind: str, said: Callable[[Peer, list[bytes] | zmtp.Subscription], None],
        more: Callable[[Peer], Sequence[bytes]],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._kind = kind
        self._said = said
        self._more = more
        self._path = ""
        #: In order of arrival.
        self.peers: dict[Peer, None] = {}
        #: Connections that were refused, or gave way to others; and that spoke wrong, or read nothing.
        self.refused = self.dropped = 0
        self._logged: set[str] = set()
        self._closed = False
        self._listener = self._bound(address)
        loop.accept(self._listener, self._take, per_turn=8)
        loop.call_every(1.0, self._maintain)

    def _bound(self, address: str) -> socket.socket:
        scheme, _, rest = address.partition("://")
        try:
            if scheme == "ipc":
                if len(os.fsencode(rest)) > SOCKET_PATH_BYTES_MAX:
                    raise UsageError(f"the path has more than {SOCKET_PATH_BYTES_MAX} bytes")
                _remove_left(rest)
                made = listen_unix(rest)
                self._path = rest
                return made
            host, _, port = rest.rpartition(":")
            if scheme != "tcp" or not host or not (port == "*" or port.isdecimal()):
                raise UsageError("use tcp://HOST:PORT or ipc:///PATH")
            if port != "*" and (len(port) > 5 or int(port) > _PORT_MAX):
                raise UsageError(f"there is no port {port[:20]}")
            host.encode("idna")  # a socket would raise TypeError for what is no name
            return listen_tcp("0.0.0.0" if host == "*" else host.strip("[]"), 0 if port == "*" else int(port))
        except (OSError, UsageError, UnicodeError) as exc:
            # Of what the system says, only a missing right is the same at the next start, for the same user.
            mistake = not isinstance(exc, OSError) or exc.errno == errno.EACCES
            reason = getattr(exc, "strerror", None) or exc
            raise (UsageError if mistake else SimmError)(f"cannot publish at {address}: {reason}") from None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"ipc://{self._path}" if self._path else f"tcp://{bound_address(self._listener)}"

    def once(self, what: str, text: str, *details: Any) -> None:
        """Log a line that is never logged again for this socket."""
        if what not in self._logged:
            self._logged.add(what)
            log.warning(f"{text} (%s; said once)", *details, self.address)

    def close(self) -> None:
        """Close the listener and all connections."""
        self._closed = True
        self._loop.unwatch(self._listener)
        self._listener.close()
        for peer in list(self.peers):
            self.drop(peer)
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    # -- connections -------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket, address: Any) -> None:
        try:
            sock.setblocking(False)
            origin = origin_of(sock, address)
            if sock.family != socket.AF_UNIX:
                tune(sock, 0, STALL_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        except OSError:  # it is gone
            sock.close()
            return
        if len(self.peers) >= PEERS_MAX:
            self.refused += 1
            self.once("full", "more than %d peers: refusing some", PEERS_MAX)
            if (least := self._least(origin)) is None:
                sock.close()
                return
            self.drop(least)
        peer = Peer(sock, origin, self._kind, self._loop.now)
        self.peers[peer] = None
        self._loop.watch(sock, lambda mask: self._ready(peer, mask))
        self.pump(peer)

    def _least(self, origin: bytes) -> Peer | None:
        """Return the peer that gives way to one of this origin; None if none does."""
        counts = Counter(each.origin for each in self.peers)
        crowd, most = counts.most_common(1)[0]
        silent = [each for each in self.peers if not each.decoder.open]
        for each in silent:
            if each.origin == crowd:
                return each
        if most > counts[origin] + 1:
            return next(each for each in reversed(self.peers) if each.origin == crowd)
        # Not to a host that has more than theirs: it would keep others out, by coming again and again.
        return next((each for each in silent if counts[each.origin] >= counts[origin]), None)

    def _ready(self, peer: Peer, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._read(peer)
        if mask & selectors.EVENT_WRITE:
            self.pump(peer)

    def _read(self, peer: Peer) -> None:
        data = received(peer.sock, _READ_BYTES)
        if data is None:
            return
        if not data:
            self.drop(peer)
            return
        try:
            for said in peer.decoder.feed(data):
                if isinstance(said, zmtp.Pong):
                    peer.pong = said.frame  # one at a time: who asks again and reads nothing gets no more
                else:
                    self._said(peer, said)
        except zmtp.BadPeer as exc:
            self.dropped += 1
            self.once("wrong", "closing the connection of a peer: %s", exc)
            self.drop(peer)
            return
        self.pump(peer)

    def pump(self, peer: Peer) -> None:
        """Send what there is for a peer, as far as it takes it, and not much at a time. Never waits, never raises."""
        left = TURN_BYTES
        if peer not in self.peers:
            return
        try:
            while left > 0:
                if not peer.out:
                    if peer.pong:
                        peer.out.append(memoryview(peer.pong))
                        peer.pong = b""
                    elif peer.decoder.open:
                        peer.out.extend(memoryview(each) for each in self._more(peer))
                    if not peer.out:
                        break
                    peer.moved = self._loop.now
                sent = peer.sock.sendmsg(list(itertools.islice(peer.out, _BUFFERS)))
                left -= sent
                peer.moved = self._loop.now
                while peer.out and sent >= len(peer.out[0]):
                    sent -= len(peer.out.popleft())
                if sent:
                    peer.out[0] = peer.out[0][sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.drop(peer)
            return
        except Exception:
            # One peer must not end the publisher for the others.
            self.dropped += 1
            log.exception("closing the connection of a peer that cannot be served")
            self.drop(peer)
            return
        if peer not in self.peers:
            return
        writing = bool(peer.out) or left <= 0
        if writing != peer.writing:
            peer.writing = writing
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._loop.selector.modify(peer.sock, wanted, lambda mask: self._ready(peer, mask))

    def pump_all(self) -> None:
        """Send what there is to all that take it."""
        for peer in list(self.peers):
            if not peer.writing:  # else the loop says when it takes more
                self.pump(peer)

    def drop(self, peer: Peer) -> None:
        """Close a connection, and let go of what its peer was to be sent."""
        if peer in self.peers:
            del self.peers[peer]
            self._loop.unwatch(peer.sock)
            peer.sock.close()
            # A feed's frame has its peer: the two would keep a snapshot until the cycle collector runs.
            peer.feed = peer.snapshot = None
            peer.out.clear()

    def _maintain(self) -> None:
        now = self._loop.now
        for peer in list(self.peers) if not self._closed else ():
            if not peer.decoder.open and now - peer.began > HANDSHAKE_S:
                self.drop(peer)
            elif peer.writing and now - peer.moved > STALL_S:
                self.dropped += 1
                self.once("stalled", "closing the connection of a peer that reads nothing")
                self.drop(peer)


def _remove_left(path: str) -> None:
    """Remove the socket of a process that has ended. Raises OSError if one listens, UsageError if it is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError("there is a file of this name, which is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog: somebody listens
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(errno.EADDRINUSE, "another process listens there")
