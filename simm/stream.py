"""A stream process: the bulk path by TCP for clients on other hosts.

It is itself a local client of its worker's arena: it reads by the seqlock and writes into grants.
It has a process of its own so that a 64 MiB transfer never delays a 100-byte commit.

GET    FETCH names digests; the answer is a FETCHED frame with lengths, then the values' bytes
       bare, then a VERDICT frame. Bytes go from the arena into the socket without a copy in
       between. After the last byte of a value has been handed to the kernel its slot's seq is
       read again: an entry overwritten meanwhile gets the verdict TORN, and the client, which
       waits for the verdict, asks again. So nothing is pinned, and a client that reads one byte
       a second costs one socket buffer and holds up no eviction.
PUT    STORE names digests and lengths, bytes follow bare and are received straight into granted
       chunks, then committed together. Where no grant is to be had the bytes are read
       and dropped, and that key's status says so.

Nothing a client sends blocks the loop. Exchanges with the worker do, for microseconds; a worker
that does not answer costs ``WORKER_DEADLINE_S`` once, then the session counts as down and is
retried in the background while reads go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import threading
import time
from typing import Any, Final

from . import messages as M
from .channel import Refused
from .constants import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from .errors import RemoteProtocolError, SegmentError, TransportError
from .greeting import agreed_protocol, token_fits
from .loop import Loop, Peer, Service
from .messages import Status
from .process import stop_on_signals
from .reader import ArenaReader, Located, Unsettled
from .rpc import Frame, decode, reply
from .session import GrantTuple, WorkerSession, ahead
from .shmput import collect
from .slab import chunk_bytes_for

log = logging.getLogger("simm.stream")

WORKER_DEADLINE_S: Final = 0.5
RETRY_S: Final = (0.05, 1.0)
#: Answers up to this size leave in one piece, verdict included.
SMALL_ANSWER_BYTES: Final = 128 << 10
COMMIT_KEYS: Final = 16
#: A STORE of many values asks for so many bytes of grants at once.
ASK_BYTES: Final = 32 << 20
LOW_WATER_BYTES: Final = 256 << 10
#: Bytes received of one client before the others' turn.
TURN_BYTES: Final = 8 << 20
_SCRATCH: Final = memoryview(bytearray(256 << 10))

_OK: Final = int(Status.OK)


class Sending:
    """A FETCHED under way: values still to send, verdicts so far."""

    __slots__ = ("current", "digests", "request_id", "todo", "verdicts")

    def __init__(self, request_id: int, todo: list[tuple[int, bytes, Located, memoryview]], keys: int) -> None:
        self.request_id = request_id
        self.todo = todo
        self.verdicts = [_OK] * keys
        self.current: tuple[int, bytes, Located, memoryview] | None = None


class Receiving:
    """A STORE under way."""

    __slots__ = ("at", "copying", "entries", "flying", "grant", "ready", "request_id", "session", "statuses", "target")

    def __init__(self, request_id: int, entries: list[tuple[bytes, int, int, int, int]]) -> None:
        self.request_id = request_id
        self.entries = entries
        self.statuses: list[int] = []
        self.at = 0  # bytes of the current value received
        self.grant: GrantTuple | None = None
        self.session: WorkerSession | None = None
        self.target: memoryview | None = None
        #: The session whose chunk ``target`` is.
        self.copying: WorkerSession | None = None
        #: (position, commit entry) of values that lie whole in their chunks.
        self.ready: list[tuple[int, tuple[bytes, int, int, int, int, int]]] = []
        #: Commits sent and not yet answered: (ticket, positions).
        self.flying: list[tuple[int, list[int]]] = []


class Link:
    """Per-connection state."""

    __slots__ = ("greeted", "receiving", "sending")

    def __init__(self) -> None:
        self.greeted = False
        self.sending: Sending | None = None
        self.receiving: Receiving | None = None


class Stream(Service):
    """Serves FETCH, STORE, EXISTS and DELETE for one worker."""

    read_bytes = 4096

    def __init__(self, loop: Loop, uds: str, tokens: tuple[str, ...] = ()) -> None:
        self.loop = loop
        self.uds = uds
        self.tokens = tokens
        self.session: WorkerSession | None = None
        self._retry_at = 0.0
        self._retry_s = RETRY_S[0]
        self.fetched_bytes = 0
        self.stored_bytes = 0
        self.torn = 0
        loop.call_every(0.1, self._tend)

    # -- the worker ---------------------------------------------------------------------------

    def worker(self) -> WorkerSession | None:
        """The session with the worker, or None while it is down."""
        session = self.session
        if session is not None and not session.broken:
            return session
        if session is not None:
            self._bury(session)
        now = time.monotonic()
        if now < self._retry_at:
            return None
        try:
            # Without a ring: a worker that polls for us would take a core from the transfers it waits for.
            self.session = WorkerSession(self.uds, "default", WORKER_DEADLINE_S, role=M.Role.STREAM, ring=False)
        except (TransportError, SegmentError) as exc:
            self._retry_at = now + self._retry_s * random.uniform(0.5, 1.0)
            self._retry_s = min(RETRY_S[1], self._retry_s * 2)
            log.warning("worker at %s: %s", self.uds, exc)
            return None
        # Page faults in the middle of transfers cost half their speed; they are taken ahead, with the GIL released.
        threading.Thread(target=_populate, args=(self.session.reader,), name="simm-populate", daemon=True).start()
        self._retry_s = RETRY_S[0]
        return self.session

    def _bury(self, session: WorkerSession) -> None:
        session.close(clean=False)
        self.session = None

    def _tend(self) -> None:
        session = self.worker()
        if session is not None:
            with contextlib.suppress(TransportError):
                session.tend()

    # -- connections ----------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = Link()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                peer.sock.setsockopt(socket.SOL_SOCKET, option, 4 << 20)

    def on_close(self, peer: Peer, reason: str) -> None:
        receiving = peer.context.receiving
        if receiving is not None:
            self._abandon(receiving)
            peer.context.receiving = None
        if peer.context.sending is not None:
            peer.context.sending = None

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        link: Link = peer.context
        msg = decode(frame)
        if not link.greeted and not isinstance(msg, M.Hello | M.Ping):
            raise RemoteProtocolError("the first message must be HELLO")
        if isinstance(msg, M.Fetch):
            self._fetch(peer, link, frame.request_id, msg)
        elif isinstance(msg, M.Store):
            self._store(peer, link, frame.request_id, msg)
        elif isinstance(msg, M.Exists):
            peer.send_message(M.Statuses(self._exists(msg.digests)), frame.request_id)
        elif isinstance(msg, M.Delete):
            peer.send_message(M.Statuses(self._delete(msg.digests)), frame.request_id)
        elif isinstance(msg, M.Hello):
            self._hello(peer, link, frame.request_id, msg)
        elif isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), frame.request_id)
        elif isinstance(msg, M.Stats):
            peer.send_message(M.StatsReply(json.dumps(self.stats()).encode()), frame.request_id)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for a stream")

    def _hello(self, peer: Peer, link: Link, request_id: int, msg: M.Hello) -> None:
        proto, text = agreed_protocol(msg, "server")
        if not proto:
            peer.send_error(request_id, Status.VERSION, text)
            return
        if self.tokens and not token_fits((token.encode() for token in self.tokens), msg.token.encode()):
            peer.send_error(request_id, Status.UNAUTHORIZED, "wrong or missing token: see --token-file")
            peer.close("unauthorized")
            return
        link.greeted = True
        peer.send_message(M.Welcome(proto, 0, M.PathBit.TCP, 0, 0, 0, 0, ""), request_id)

    # -- get --------------------------------------------------------------------------------------

    def _fetch(self, peer: Peer, link: Link, request_id: int, msg: M.Fetch) -> None:
        if len(msg.keys) > BATCH_KEYS_MAX:
            raise RemoteProtocolError(f"{len(msg.keys)} keys in a FETCH, at most {BATCH_KEYS_MAX}")
        session = self.session
        if session is None:
            session = self.worker()
        entries: list[tuple[int, int, int, int]] = []
        todo: list[tuple[int, bytes, Located, memoryview]] = []
        total = 0
        for position, (digest, most) in enumerate(msg.keys):
            if session is None:
                entries.append((int(Status.UNAVAILABLE), 0, 0, 0))
                continue
            status, found = self._locate(session, digest)
            if found is None:
                entries.append((status, 0, 0, 0))
            elif found.length > most:
                entries.append((int(Status.TOO_LARGE), found.flags, found.length, found.crc))
            else:
                entries.append((_OK, found.flags, found.length, found.crc))
                todo.append((position, digest, found, session.reader.value(found)))
                total += found.length
        head = reply(M.Fetched(entries), request_id)
        sending = Sending(request_id, todo, len(entries))
        self.fetched_bytes += total
        if total <= SMALL_ANSWER_BYTES:
            parts = [head]
            for position, digest, found, value in todo:
                parts.append(bytes(value))
                self._judge(sending, position, digest, found)
            parts.append(reply(M.Verdict(sending.verdicts), request_id))
            peer.send(b"".join(parts))
            return
        peer.bulk = True  # nothing more is parsed until the verdict is out
        link.sending = sending
        sending.todo.reverse()
        peer.send(head)
        if not peer.out:
            self._pump(peer, link, sending)

    def _locate(self, session: WorkerSession, digest: bytes) -> tuple[int, Located | None]:
        reader = session.reader
        for _ in range(4):
            try:
                found = reader.locate(digest)
            except Unsettled:
                time.sleep(0.0005)
                continue
            if found is None:
                return int(Status.NOT_FOUND if reader.owns(digest) else Status.WRONG_OWNER), None
            reader.touch(found.slot)
            return _OK, found
        return int(Status.BUSY), None

    def _judge(self, sending: Sending, position: int, digest: bytes, found: Located) -> None:
        session = self.session
        if session is None or not session.reader.confirm(digest, found.slot, found.seq):
            sending.verdicts[position] = int(Status.TORN)
            self.torn += 1

    def _pump(self, peer: Peer, link: Link, sending: Sending) -> None:
        """Hand values to the kernel until it takes no more, then go on at on_drain."""
        while not peer.closed:
            current = sending.current
            if current is not None:
                self._judge(sending, *current[:3])
                sending.current = None
            if not sending.todo:
                link.sending = None
                peer.bulk = False
                peer.send_message(M.Verdict(sending.verdicts), sending.request_id)
                if peer.paused:
                    peer.pause(False)
                return
            sending.current = sending.todo.pop()
            peer.send(sending.current[3])
            if peer.out:
                peer.pause(True)  # requests wait until the verdict is out
                return

    def on_drain(self, peer: Peer) -> None:
        link: Link = peer.context
        if link.sending is not None:
            self._pump(peer, link, link.sending)

    # -- put --------------------------------------------------------------------------------------

    def _store(self, peer: Peer, link: Link, request_id: int, msg: M.Store) -> None:
        if not 0 < len(msg.entries) <= BATCH_KEYS_MAX:
            raise RemoteProtocolError(f"{len(msg.entries)} keys in a STORE, 1 to {BATCH_KEYS_MAX} are allowed")
        for _, length, _, _, _ in msg.entries:
            if not 0 < length <= VALUE_BYTES_MAX:
                raise RemoteProtocolError(f"a value of {length} bytes in a STORE")
        if self.session is not None:
            self.session.wake()
        receiving = Receiving(request_id, msg.entries)
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
        session = self.worker()
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

    def on_bulk(self, peer: Peer, size: int) -> None:
        link: Link = peer.context
        receiving = link.receiving
        if receiving is None:  # sending: the peer closed or talks out of turn; either shows later
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
            receiving.statuses.append(int(Status.NO_SPACE if self.session is not None else Status.UNAVAILABLE))
        else:
            receiving.statuses.append(int(Status.UNAVAILABLE))  # until the commit says otherwise
            receiving.ready.append((position, (digest, receiving.grant[0], length, crc, flags, 0)))
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
        """Send what lies whole in its chunks to the worker; the answers are met in :meth:`_collect`."""
        session, ready = receiving.session, receiving.ready
        receiving.ready = []
        if session is None or not ready:
            return
        entries = [entry for _, entry in ready]
        positions = [position for position, _ in ready]
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

    def _abandon(self, receiving: Receiving) -> None:
        """The client went away in the middle: whole values are committed, the chunk of the cut one goes back."""
        self._close_target(receiving)
        if receiving.session is not None and not receiving.session.broken:
            if receiving.grant is not None:
                receiving.session.untake(receiving.grant)
            self._commit(receiving)
            self._collect(receiving)

    # -- the rest -----------------------------------------------------------------------------------

    def _exists(self, digests: list[bytes]) -> list[int]:
        session = self.session or self.worker()
        if session is None:
            return [int(Status.UNAVAILABLE)] * len(digests)
        return [_OK if hit else int(Status.NOT_FOUND) for hit in session.reader.contains_many(digests)]

    def _delete(self, digests: list[bytes]) -> list[int]:
        session = self.worker()
        if session is None:
            return [int(Status.UNAVAILABLE)] * len(digests)
        try:
            statuses: list[int] = session.exchange(M.Delete(digests)).statuses
        except (TransportError, Refused) as exc:
            log.warning("delete: %s", exc)
            return [int(Status.UNAVAILABLE)] * len(digests)
        return statuses

    def stats(self) -> dict[str, Any]:
        """Counters of this process."""
        return {
            "pid": os.getpid(),
            "connections": len(self.loop.peers),
            "fetched_bytes": self.fetched_bytes,
            "stored_bytes": self.stored_bytes,
            "torn": self.torn,
            "protocol_errors": self.loop.protocol_errors,
            "handler_errors": self.loop.handler_errors,
        }


def _populate(reader: ArenaReader) -> None:
    while reader.populate_some():
        pass


def _low_water(sock: socket.socket, size: int) -> None:
    """How many bytes must be there before the selector reports the socket (SO_RCVLOWAT)."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def run_stream(listener: socket.socket, uds: str, supervisor: socket.socket, tokens: tuple[str, ...] = ()) -> None:
    """Body of a stream process, after the fork: serve until SIGTERM or until the supervisor has gone."""
    loop = Loop()
    stream = Stream(loop, uds, tokens)
    stop_on_signals(loop)
    loop.watch(supervisor, lambda _mask: loop.stop())
    loop.listen(listener, stream)
    loop.run()
    loop.close()
    if stream.session is not None:
        stream.session.close()
