"""A stream's STOREs: bare bytes from sockets straight into granted chunks, committed together.

Without a grant the bytes are read and dropped, and that key's status says so. For each client one chunk at a time is
written. The loop closes a client that stops sending in the middle of a value, and the grant is released: the bytes come
by this process's ``recv``, so nothing can still write there.

A worker that is late
---------------------
The loop waits for an answer for ``PATIENCE_S``. After that the STORE is *parked*: its connection is not read, other
clients are served, and it goes on with the answer. How long that may take, its client decides, which closes the
connection at its deadline. Nothing more is committed for it then; ``worker_session.py`` says what becomes of what the
worker has of it already. A STORE that comes while the worker is late is parked before its first byte is read.

A server that comes to another cluster
--------------------------------------
Its worker ends all sessions, and drops all values. By the next session a STORE would put what a client of the first
cluster sends where those of the second one read. So a STORE ends with its connection once the arena has left the
cluster in which it began, also while the arena has no other one yet. The session is taken before the look at the
arena's cluster: one that is older than a change does not outlive it.

But a session outlives the arena's first map, and the worker may take that before a COMMIT that is on its way. So while
the arena has no cluster, nothing is committed for a client that has come by a map. It gets WRONG_OWNER, which is what
the worker says as long as it has no shard.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Final

from ..arena.marks.near import COMMIT_NEAR
from ..arena.reader import ArenaReader
from ..constants import VALUE_BYTES_MAX
from ..errors import DeadlineError, NotSentError, PeerError, RemoteProtocolError, TransportError
from ..ipc.answer_wait import collect
from ..ipc.grant_pool import GrantTuple, obtain, request_count, target_count
from ..ipc.session import WorkerSession
from ..net.allowance import at_most
from ..net.channel import Refused
from ..net.peer import Peer
from ..slab import chunk_bytes_for
from ..wire import messages as M
from ..wire.messages import Status
from .worker_session import WorkerSessionKeeper

log = logging.getLogger("simm.server.stream")

#: Keys of one COMMIT: a frame has its price, and longer ones would keep other clients of the worker waiting.
COMMIT_KEYS: Final = 32
#: Values of a STORE that are compared to ask for the grants of one length together.
ALIKE_MAX: Final = 64
LOW_WATER_BYTES: Final = 256 << 10
#: Bytes received of one client before the next client's turn.
TURN_BYTES: Final = 8 << 20
#: Longest wait for the worker in the loop, seconds.
PATIENCE_S: Final = 0.2
_SCRATCH: Final = memoryview(bytearray(256 << 10))


class Receiving:
    """A STORE in flight, by the session of a keeper. :meth:`start` it; ``on_end`` precedes its answer.

    ``on_end`` does not refer to it: in a cycle it would keep the session, and the arena mapped, after its end.
    ``cluster``: of the map that led its client here, 0 for any.
    """

    __slots__ = (
        "_options_of", "at", "cluster", "copying", "ending", "entries", "found", "grant", "in_flight", "keeper",
        "numbered", "on_answered", "on_end", "options", "parked", "peer", "ready", "refused", "request_id", "session",
        "statuses", "target",
    )  # fmt: skip

    def __init__(
        self, keeper: WorkerSessionKeeper, peer: Peer, request_id: int, msg: M.Store,
        on_end: Callable[[Receiving], None], options_of: Callable[[], int], cluster: int = 0,
    ) -> None:  # fmt: skip
        self.keeper = keeper
        self.cluster = cluster
        #: The arena's cluster when it began, or the first one since; 0 before the first map.
        self.found = 0
        #: COMMIT's for each value, as ``options_of`` says when the worker is there; or the status that all values get.
        self.options: int | None = None
        #: The arena of that answer: another one has other numbers for namespaces.
        self.numbered: ArenaReader | None = None
        self.refused = 0
        self._options_of = options_of
        self.peer = peer
        self.request_id = request_id
        self.entries = msg.entries
        self.on_end = on_end
        #: Called when the answer is on its way, before anything that follows the STORE is parsed. ``on_end`` sets it.
        self.on_answered: Callable[[], None] | None = None
        self.statuses: list[int] = []
        #: Bytes received of the current value, its grant, and the part of its chunk that gets them.
        self.at = 0
        self.grant: GrantTuple | None = None
        self.target: memoryview | None = None
        #: The session of all grants and commits in flight; the one that ``target`` is a chunk of.
        self.session: WorkerSession | None = None
        self.copying: WorkerSession | None = None
        #: (position, commit entry, its grant) of values that are complete in their chunks.
        self.ready: list[tuple[int, tuple[bytes, int, int, int, int, int], GrantTuple]] = []
        #: Commits sent and not yet answered: (ticket, positions).
        self.in_flight: list[tuple[int, list[int]]] = []
        #: It waits for the worker: with the next value, or ``ending``, with the answers to its last commit.
        self.parked = self.ending = False

    def start(self) -> None:
        """Begin with the first value. Raises RemoteProtocolError if the STORE is not allowed."""
        if not self.entries:
            raise RemoteProtocolError("a STORE of no key")
        for _, length, _, _, _ in self.entries:
            if not 0 < length <= VALUE_BYTES_MAX:
                raise RemoteProtocolError(f"a value of {length} bytes in a STORE")
        if self.keeper.session is not None:
            self.keeper.session.wake()
        self.keeper.arena()  # the very first session is waited for, and longer than PATIENCE_S
        self._look_at_cluster()
        self.peer.bulk = True
        self._open_target()
        self._take_pending()

    def _take_pending(self) -> None:
        """Take bytes that have come in one piece with the STORE frame."""
        conn = self.peer.conn
        while self.peer.bulk and conn.pending_bytes and not self.peer.closed and not self.parked:
            length = self.entries[len(self.statuses)][1]
            data = conn.take(length - self.at)
            if self.target is not None:
                self.target[self.at : self.at + len(data)] = data
            self.at += len(data)
            if self.at == length:
                self._value_done()

    # -- a server that comes to another cluster -----------------------------------------------------

    def _look_at_cluster(self) -> int:
        """Return the arena's cluster, 0 for none yet, and remember the first one."""
        reader = self.keeper.reader
        now = self.found if reader is None else reader.cluster
        self.found = self.found or now
        return now

    def _is_foreign(self) -> bool:
        """Return whether the arena is of another cluster by now than its client's, or than the first that it had."""
        now = self._look_at_cluster()
        return now != self.found or (self.cluster != 0 and now not in (0, self.cluster))

    def _refuse(self) -> None:
        """Close the connection, of which nothing more is stored."""
        text = f"this server is not of cluster {self.found or self.cluster:016x} any more"
        self.peer.send_error(self.request_id, Status.OTHER_CLUSTER, text)
        self.peer.close("it came by a map of another cluster")

    # -- a worker that is late --------------------------------------------------------------------

    def _park(self) -> None:
        self.parked = True
        if not self.peer.closed:
            self.peer.pause(True)
        self.keeper.park(self, self.peer.loop)

    def look(self) -> None:
        """See ``worker_session.Storing``."""
        if self.in_flight and (self.peer.closed or self.peer.hung_up()):
            self._withdraw()

    def is_answered(self) -> bool:
        """See ``worker_session.Storing``."""
        session, in_flight = self.session, self.in_flight
        if not self.ending or self.ready or not in_flight or session is None:
            return False
        return all(session.channel.received(-1 - ticket) for ticket, _ in in_flight)

    def _withdraw(self) -> None:
        """Let the worker store nothing of what it has not answered."""
        tickets = [ticket for ticket, _ in self.in_flight]
        self._settled()
        if tickets and self.session is not None:
            self.keeper.withdraw(self.session, tickets, time.monotonic())

    def _settled(self) -> None:
        """Note that the worker has nothing of it in hand."""
        self.in_flight.clear()
        self.keeper.storing.discard(self)

    def resume(self) -> None:
        """See ``worker_session.Storing``."""
        self.parked = False
        if not self.peer.closed:
            self.peer.attempt(self._go_on)

    def _go_on(self) -> None:
        peer = self.peer
        if peer.hung_up():
            peer.close("the peer gave up while the worker was late")
            return
        peer.progress_at = peer.loop.now
        if self.ending:
            self._end()
        else:
            self._open_target()
            self._take_pending()
        if not self.parked and peer.bulk and not peer.closed:
            peer.pause(False)

    def _open_target(self) -> None:
        """Get a grant for the next value; without one its bytes will be dropped."""
        position = len(self.statuses)
        length = self.entries[position][1]
        self.at = 0
        self.target = None
        self.grant = None
        if self.refused:
            return
        if self.keeper.is_late():
            self._park()
            return
        if self.options is None:
            try:
                with at_most(PATIENCE_S):  # the first value of a namespace costs an exchange
                    self.options = self._options_of()
                    self.numbered = self.keeper.reader
            except Refused as exc:
                if isinstance(exc.__cause__, DeadlineError) and self.keeper.session is not None:
                    self._park()  # also if the answer has come by now
                else:
                    self.refused = exc.status
                return
        session = self.keeper.worker()
        if self._is_foreign():
            self._refuse()
            return
        if session is None:
            return
        if self.numbered is not session.reader:
            self.options = None
            self._open_target()
            return
        if self.session is not session:
            self._commit()
            self._collect()
            self.session = session
        try:
            grant = session.pool.take(length)
            if grant is None:
                self._commit()  # never wait for a grant while holding an uncommitted one
                if not self._collect() or self.ready:
                    self._park()
                    return
                alike = sum(entry[1] == length for entry in self.entries[position : position + ALIKE_MAX])
                with at_most(PATIENCE_S):
                    grant = obtain(session, length, request_count(chunk_bytes_for(length), alike))
        except TransportError as exc:
            if isinstance(exc, DeadlineError) and not session.broken:
                self._park()  # also if the answer has come by now: it is in the pool
            else:
                log.warning("no grant: %s", exc)
            return
        if grant is None:
            return
        start = grant[1] - session.reader.data_offset
        session.begin_copy()  # a later session must not release this one while bytes arrive
        self.grant = grant
        self.copying = session
        self.target = session.reader.data[start : start + length]

    def _close_target(self) -> None:
        self.target = None
        if self.copying is not None:
            self.copying.end_copy()
            self.copying = None

    def on_readable(self) -> None:
        """Receive bytes of values from the socket, TURN_BYTES at most."""
        peer = self.peer
        budget = TURN_BYTES
        while budget > 0 and peer.bulk and not peer.closed and not self.parked:
            length = self.entries[len(self.statuses)][1]
            left = length - self.at
            target = self.target
            into = _SCRATCH[: min(left, len(_SCRATCH))] if target is None else target[self.at :]
            try:
                got = peer.sock.recv_into(into)
            except (BlockingIOError, InterruptedError):
                # Wake up for a large piece only: a wake-up for each arriving segment halves the speed.
                _low_water(peer.sock, min(left, LOW_WATER_BYTES))
                return
            except OSError as exc:
                peer.close(f"connection lost: {exc}")
                return
            if not got:
                peer.close("the peer closed in the middle of a value")
                return
            self.at += got
            budget -= got
            peer.in_bytes += got
            if self.at == length:
                _low_water(peer.sock, 1)
                self._value_done()
            elif budget <= 0:
                _low_water(peer.sock, min(length - self.at, LOW_WATER_BYTES))

    def _value_done(self) -> None:
        position = len(self.statuses)
        digest, length, crc, flags, _ = self.entries[position]
        if self.grant is None:
            session = self.keeper.session
            there = session is not None and not session.broken
            self.statuses.append(self.refused or (Status.NO_SPACE if there else Status.UNAVAILABLE))
        else:
            self.statuses.append(Status.UNAVAILABLE)  # until the commit says otherwise
            # A near copy is what a client on this host makes of another host's value: nothing that comes by TCP is one.
            entry = (digest, self.grant[0], length, crc, flags & ~COMMIT_NEAR, self.options or 0)
            self.ready.append((position, entry, self.grant))
            self.grant = None
        self._close_target()
        if len(self.statuses) < len(self.entries):
            if len(self.ready) >= COMMIT_KEYS:
                self._commit()
            self._open_target()
            return
        self._end()

    def _end(self) -> None:
        """Commit the last values, and answer if the worker has."""
        self.ending = True
        if self._is_foreign():
            self._refuse()
            return
        self._commit()
        if not self._collect() or self.ready:
            self._park()
            return
        self.peer.bulk = False
        self.on_end(self)
        self.peer.send_message(M.Statuses(self.statuses), self.request_id)
        if self.on_answered is not None:
            self.on_answered()
        # Whatever followed in the same piece is parsed in the loop's next turn.
        self.peer.pause(False)

    def _commit(self) -> None:
        """Commit the complete values; :meth:`_collect` takes the answers. They stay where the worker takes nothing.

        Commit nothing for a client that has gone: it may have put newer values elsewhere since. The look costs 1.4 us.
        Nor for one of another cluster, whose connection the caller closes, nor for one that may yet be (the module).
        """
        session, ready = self.session, self.ready
        if session is None or not ready:
            return
        if self.peer.closed or self.peer.hung_up() or self._is_foreign():
            self._release_ready()
            return
        if self.cluster and not self._look_at_cluster():
            for position, _, _ in ready:
                self.statuses[position] = Status.WRONG_OWNER
            self._release_ready()
            return
        entries = [entry for _, entry, _ in ready]
        length = entries[-1][2]
        keep = target_count(chunk_bytes_for(length))
        wants = [(length, min(len(entries), keep))] if keep else []
        try:
            ticket = session.submit(M.Commit(entries, wants))
        except NotSentError:
            return
        except TransportError as exc:
            log.warning("commit of %d values: %s", len(entries), exc)
            self.ready = []
            self.keeper.give_up(session, session.broken)  # before anybody hears of it
            return
        self.ready = []
        self.in_flight.append((ticket, [position for position, _, _ in ready]))
        self.keeper.storing.add(self)

    def _collect(self) -> bool:
        """Take the answers of all commits in flight. Return False if the worker is late with one."""
        session, in_flight = self.session, self.in_flight
        while in_flight and session is not None:
            ticket = in_flight[0][0]
            channel = session.channel
            # All waits for one silence are one.
            channel.until = time.monotonic() + max(0.0, PATIENCE_S - channel.late_s)
            try:
                collect(session, in_flight[:1], self.statuses)
            except Refused as exc:
                log.warning("answer to a commit: %s", exc)
            except PeerError as exc:
                if not in_flight:
                    break  # withdrawn meanwhile: its client has gone
                if isinstance(exc, DeadlineError) and not session.broken:
                    channel.expect(-1 - ticket)
                    return False
                log.warning("answers to %d commits: %s", len(in_flight), exc)
                self.keeper.give_up(session, session.broken or str(exc))  # before anybody hears of it
                break
            del in_flight[:1]
        self._settled()
        return True

    def abandon(self) -> None:
        """End a STORE whose client has gone: commit nothing more, and release the grants."""
        self._close_target()
        session = self.session
        if session is not None and not session.broken:
            if self.grant is not None:
                session.pool.release(self.grant)
                self.grant = None
            self._release_ready()
        self._withdraw()

    def _release_ready(self) -> None:
        """Release the grants of values that will not be committed."""
        ready, self.ready = self.ready, []
        if self.session is not None and not self.session.broken:
            self.session.pool.add([grant for _, _, grant in ready])


def _low_water(sock: socket.socket, size: int) -> None:
    """Set how many bytes must have arrived before the selector reports the socket (SO_RCVLOWAT).

    Not with TLS. OpenSSL holds what it has read of a record, so fewer bytes may be still to come.
    """
    if type(sock) is not socket.socket:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
