"""A stream's STOREs: bare bytes from sockets straight into granted chunks, committed together.

Where no grant is to be had the bytes are read and dropped, and that key's status says so. One chunk a client is
being written at a time; a client that stops sending in the middle of a value is closed by the loop's sweep, and its
chunk goes back to the pool: the bytes come from our own ``recv``, so nobody else can be writing there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Final

from . import messages as M
from .constants import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from .errors import RemoteProtocolError, TransportError
from .loop import Peer
from .messages import Status
from .session import GrantTuple, WorkerSession, ahead
from .shmput import collect
from .sizes import chunk_bytes_for
from .upstream import Upstream

log = logging.getLogger("simm.stream")

COMMIT_KEYS: Final = 16
#: A STORE of many values asks for so many bytes of grants at once.
ASK_BYTES: Final = 32 << 20
LOW_WATER_BYTES: Final = 256 << 10
#: Bytes received of one client before the others' turn.
TURN_BYTES: Final = 8 << 20
_SCRATCH: Final = memoryview(bytearray(256 << 10))


class Receiving:
    """A STORE under way."""

    __slots__ = (
        "at", "copying", "entries", "flying", "grant", "peer", "ready", "request_id", "session", "since", "statuses",
        "target",
    )  # fmt: skip

    def __init__(self, peer: Peer, request_id: int, entries: list[tuple[bytes, int, int, int, int]]) -> None:
        self.peer = peer
        self.since = peer.loop.now
        self.request_id = request_id
        self.entries = entries
        self.statuses: list[int] = []
        self.at = 0  # bytes of the current value received
        self.grant: GrantTuple | None = None
        self.session: WorkerSession | None = None
        self.target: memoryview | None = None
        #: The session whose chunk ``target`` is.
        self.copying: WorkerSession | None = None
        #: (position, commit entry, its grant) of values that lie whole in their chunks.
        self.ready: list[tuple[int, tuple[bytes, int, int, int, int, int], GrantTuple]] = []
        #: Commits sent and not yet answered: (ticket, positions).
        self.flying: list[tuple[int, list[int]]] = []


class Link:
    """What a connection that may STORE has: the STORE under way."""

    __slots__ = ("receiving",)

    def __init__(self) -> None:
        self.receiving: Receiving | None = None


class Receiver:
    """Carries STOREs out, by the session of ``upstream``."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.stored_bytes = 0

    def store(self, peer: Peer, link: Link, request_id: int, msg: M.Store) -> None:
        """A STORE: its bytes follow. Raises RemoteProtocolError for one that is not allowed."""
        if not 0 < len(msg.entries) <= BATCH_KEYS_MAX:
            raise RemoteProtocolError(f"{len(msg.entries)} keys in a STORE, 1 to {BATCH_KEYS_MAX} are allowed")
        for _, length, _, _, _ in msg.entries:
            if not 0 < length <= VALUE_BYTES_MAX:
                raise RemoteProtocolError(f"a value of {length} bytes in a STORE")
        if self.upstream.session is not None:
            self.upstream.session.wake()
        receiving = Receiving(peer, request_id, msg.entries)
        link.receiving = receiving
        peer.bulk = True
        self._open_target(receiving)
        self._receive_buffered(peer, link, receiving)

    def _open_target(self, receiving: Receiving) -> None:
        """Get a chunk for the next value; without one its bytes will be dropped."""
        position = len(receiving.statuses)
        length = receiving.entries[position][1]
        receiving.at = 0
        receiving.target = None
        receiving.grant = None
        session = self.upstream.worker()
        if session is None:
            return
        if receiving.session is not session:
            self._commit(receiving)
            self._collect(receiving)
            receiving.session = session
        try:
            grant = session.take(length)
            if grant is None:
                self._commit(receiving)  # nobody waits for a grant while holding an uncommitted one
                self._collect(receiving)
                alike = sum(entry[1] == length for entry in receiving.entries[position : position + 64])
                session.ask([(length, max(1, min(alike, ASK_BYTES // length)))])
                grant = session.take(length)
            if grant is None and session.return_idle():
                session.ask([(length, 1)])
                grant = session.take(length)
        except TransportError as exc:
            log.warning("no grant: %s", exc)
            return
        if grant is None:
            return
        start = grant[1] - session.reader.data_offset
        session.begin_copy()  # so that a successor session does not release this one under our bytes
        receiving.grant = grant
        receiving.copying = session
        receiving.target = session.reader.data[start : start + length]

    @staticmethod
    def _close_target(receiving: Receiving) -> None:
        receiving.target = None
        if receiving.copying is not None:
            receiving.copying.end_copy()
            receiving.copying = None

    def on_bulk(self, peer: Peer, link: Link) -> None:
        """Bare bytes can be read."""
        receiving = link.receiving
        if receiving is None:  # a FETCHED goes out: the peer closed or talks out of turn; either shows later
            peer.pause(True)
            return
        budget = TURN_BYTES
        while budget > 0 and link.receiving is receiving and not peer.closed:
            length = receiving.entries[len(receiving.statuses)][1]
            left = length - receiving.at
            target = receiving.target
            into = _SCRATCH[: min(left, len(_SCRATCH))] if target is None else target[receiving.at :]
            try:
                got = peer.sock.recv_into(into)
            except (BlockingIOError, InterruptedError):
                # Wake us for a good piece only: a wake-up for each arriving segment halves the speed.
                _low_water(peer.sock, min(left, LOW_WATER_BYTES))
                return
            except OSError as exc:
                peer.close(f"connection lost: {exc}")
                return
            if not got:
                peer.close("the peer closed in the middle of a value")
                return
            receiving.at += got
            budget -= got
            if receiving.at == length:
                _low_water(peer.sock, 1)
                self._value_done(peer, link, receiving)
            elif budget <= 0:
                _low_water(peer.sock, min(length - receiving.at, LOW_WATER_BYTES))

    def _receive_buffered(self, peer: Peer, link: Link, receiving: Receiving) -> None:
        """Bytes of values that came in one piece with the STORE frame."""
        while link.receiving is receiving and peer.conn.pending_bytes:
            length = receiving.entries[len(receiving.statuses)][1]
            data = peer.conn.take(length - receiving.at)
            if receiving.target is not None:
                receiving.target[receiving.at : receiving.at + len(data)] = data
            receiving.at += len(data)
            if receiving.at == length:
                self._value_done(peer, link, receiving)

    def _value_done(self, peer: Peer, link: Link, receiving: Receiving) -> None:
        position = len(receiving.statuses)
        digest, length, crc, flags, _ = receiving.entries[position]
        self.stored_bytes += length
        if receiving.grant is None:
            receiving.statuses.append(int(Status.NO_SPACE if self.upstream.session is not None else Status.UNAVAILABLE))
        else:
            receiving.statuses.append(int(Status.UNAVAILABLE))  # until the commit says otherwise
            entry = (digest, receiving.grant[0], length, crc, flags, 0)
            receiving.ready.append((position, entry, receiving.grant))
            receiving.grant = None
        self._close_target(receiving)
        if len(receiving.statuses) < len(receiving.entries):
            if len(receiving.ready) >= COMMIT_KEYS:
                self._commit(receiving)
            self._open_target(receiving)
            return
        self._commit(receiving)
        self._collect(receiving)
        link.receiving = None
        peer.bulk = False
        peer.send_message(M.Statuses(receiving.statuses), receiving.request_id)
        # Whatever followed in the same piece is parsed in the loop's next turn.
        peer.pause(False)

    def _commit(self, receiving: Receiving) -> None:
        """Send what lies whole in its chunks to the worker; the answers are met in :meth:`_collect`.

        Not of a client that gave up while it was kept waiting: it may have put newer values elsewhere since.
        """
        session, ready = receiving.session, receiving.ready
        if session is None or not ready:
            return
        if receiving.peer.gave_up(receiving.since):
            self._give_back(receiving)
            return
        receiving.ready = []
        entries = [entry for _, entry, _ in ready]
        positions = [position for position, _, _ in ready]
        length = entries[-1][2]
        keep = ahead(chunk_bytes_for(length))
        wants = [(length, min(len(entries), keep))] if keep else []
        try:
            session.acquire()
            try:
                receiving.flying.append((session.submit_locked(M.Commit(entries, wants)), positions))
            finally:
                session.lock.release()
        except TransportError as exc:
            log.warning("commit of %d values: %s", len(entries), exc)

    def _collect(self, receiving: Receiving) -> None:
        """Take the answers of all commits sent."""
        session, flying = receiving.session, receiving.flying
        receiving.flying = []
        if session is None:
            return
        try:
            collect(session, flying, receiving.statuses)
        except TransportError as exc:
            log.warning("answers to %d commits: %s", len(flying), exc)

    def abandon(self, receiving: Receiving) -> None:
        """The client went away in the middle, perhaps long ago: nothing more is committed, the chunks go back."""
        self._close_target(receiving)
        if receiving.session is not None and not receiving.session.broken:
            if receiving.grant is not None:
                receiving.session.untake(receiving.grant)
                receiving.grant = None
            self._give_back(receiving)
            self._collect(receiving)

    @staticmethod
    def _give_back(receiving: Receiving) -> None:
        """The chunks of values that are not to be committed."""
        session, ready = receiving.session, receiving.ready
        receiving.ready = []
        if session is not None and not session.broken:
            for _, _, grant in ready:
                session.untake(grant)


def _low_water(sock: socket.socket, size: int) -> None:
    """How many bytes must be there before the selector reports the socket (SO_RCVLOWAT)."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
