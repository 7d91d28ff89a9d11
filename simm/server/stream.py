"""A stream process: the bulk path by TCP for clients on other hosts.

The process is itself a local client of its worker's arena: it reads by the seqlock and writes into grants. It is a
process of its own so that a 64 MiB transfer never delays a 100-byte commit.

GET    FETCH names digests. The answer is a FETCHED frame with lengths, then the bare bytes of the values, then a
       VERDICT frame. Bytes go from the arena into the socket without a copy in between. When the last byte of a value
       has been handed to the kernel, its slot's seq is read again. An entry overwritten meanwhile gets the verdict
       TORN, and the client, which waits for the verdict, asks again. So nothing is pinned, and a client that reads one
       byte a second costs one socket buffer and holds up no eviction. Before the verdict bytes of whatever came into
       the chunk may have left. A client that is bound to namespaces gets none of them: for it, pieces are copied, and
       sent if the seq has not changed since.
PUT    STORE names digests and lengths. Bare bytes follow and are received straight into granted chunks, then
       committed together (server/stream_put.py).
MOVE   A new owner's mover sends FREEZE, which is passed to the worker, then LIST (arena/reader.py) and
       FETCH_PREVIOUS: a FETCH in which the values of frozen shards count too.

``cluster/lookup.py`` decides what a miss means. Only digests for which it says so cost a LOCATE to the worker.

Nothing that a client sends blocks the loop. Exchanges with the worker do, for microseconds
(``server/worker_session.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from ..arena.layout import ENTRY_BOUND
from ..arena.reader import ArenaReader, Located, Unsettled
from ..cluster.lookup import ASK_OWNER, miss_status, previous_status
from ..config.tokens import Token
from ..constants import BATCH_KEYS_MAX
from ..errors import RemoteProtocolError, SegmentError, UsageError
from ..net.channel import Refused
from ..net.local_users import LocalUsers
from ..net.loop import TURN_S, Loop, Peer, Service
from ..net.process import stop_on_signals
from ..net.tls_peer import ServerTls, accepting
from ..net.token_watch import watch_tokens
from ..rpc import Frame, decode, reply
from ..wire import messages as M
from ..wire.auth import Gate
from ..wire.hello import FOR_MANAGERS, NOT_A_MANAGER, Refusal, accept, check_opening
from ..wire.messages import Status
from ..wire.shard_set import EPOCH_MASK, FROZEN, shards_in
from .stream_put import Receiving
from .worker_session import WorkerSessionKeeper

log = logging.getLogger("simm.server.stream")

#: Answers up to this size leave in one piece, verdict included.
SMALL_ANSWER_BYTES: Final = 128 << 10
#: Socket buffers of a connection; the send buffer of those that connect when there are more than MANY_PEERS.
BUFFER_BYTES: Final = 4 << 20
BUFFER_BYTES_MANY: Final = 256 << 10
MANY_PEERS: Final = 32


class Sending:
    """A FETCHED in flight: values still to send, verdicts so far."""

    __slots__ = ("at", "bound", "current", "previous", "request_id", "todo", "verdicts")

    def __init__(
        self, request_id: int, todo: list[tuple[int, bytes, Located, memoryview]], keys: int, *,
        previous: bool, bound: bool,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.previous = previous
        #: The client may see no other namespace's bytes, whatever their verdict: they are copied and judged first.
        self.bound = bound
        #: Bytes of the current value that were handed to the kernel.
        self.at = 0
        self.todo = todo
        self.verdicts = [Status.OK] * keys
        self.current: tuple[int, bytes, Located, memoryview] | None = None


class ConnectionState:
    """The state of one connection. ``role`` is None before HELLO."""

    __slots__ = ("cluster", "gate", "namespace", "receiving", "role", "sending")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.role: int | None = None
        #: The cluster of the map that led the client here; 0 for any.
        self.cluster = 0
        #: What HELLO has named.
        self.namespace = ""
        self.sending: Sending | None = None
        self.receiving: Receiving | None = None


class Stream(Service):
    """Serves one worker's values by TCP."""

    read_bytes = 4096
    unsent_bytes = 0
    hello_first = True

    def __init__(
        self, loop: Loop, uds: str, tokens: Sequence[Token] = (), rdma_port: int = 0, server: str = "",
        users: LocalUsers | None = None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.tokens = tokens
        self.users = users
        #: Whom clients want to speak with: see wire/auth.py.
        self.server = server
        #: Where the worker's endpoint listens, 0 without one.
        self.rdma_port = rdma_port
        self.keeper = WorkerSessionKeeper(uds)
        self.fetched_bytes = 0
        self.stored_bytes = 0
        self.torn = 0
        self.listed = 0
        self._supervisor: Peer | None = None
        loop.call_every(0.1, self.keeper.maintain)

    # -- connections ----------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = ConnectionState(Gate(M.Service.STREAM, self.tokens, self.server))
        # The kernel takes twice that for what a peer does not read, outside of any limit. So many peers get little.
        out = BUFFER_BYTES if len(self.loop.peers) <= MANY_PEERS else BUFFER_BYTES_MANY
        for option, size in ((socket.SO_SNDBUF, out), (socket.SO_RCVBUF, BUFFER_BYTES)):
            with contextlib.suppress(OSError):
                peer.sock.setsockopt(socket.SOL_SOCKET, option, size)
        if self.users is not None:
            self.users.check(peer)

    def adopt_supervisor(self, sock: socket.socket) -> None:
        """Answer the supervisor on a socket pair; the stream ends when it closes."""
        self._supervisor = self.loop.adopt(sock, self, "supervisor")
        self._supervisor.context = state = ConnectionState(Gate(M.Service.STREAM, ()))
        state.role = M.Role.SUPERVISOR

    def on_close(self, peer: Peer, reason: str) -> None:
        state: ConnectionState = peer.context
        if peer is self._supervisor:
            self.loop.stop()
        if state.receiving is not None:
            state.receiving.abandon()
            state.receiving = None
        state.sending = None

    def on_bulk(self, peer: Peer, size: int) -> None:
        state: ConnectionState = peer.context
        if state.receiving is not None:
            state.receiving.on_readable()
        else:  # a FETCHED is being sent: the peer closed, or sends out of turn; either shows later
            peer.pause(True)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        state: ConnectionState = peer.context
        if frame.opcode in FOR_MANAGERS:
            peer.send_error(frame.request_id, Status.BAD_REQUEST, NOT_A_MANAGER)
            peer.close(NOT_A_MANAGER)
            return
        if state.role is None:
            check_opening(frame)
        elif fault := state.gate.refusal(frame.opcode):
            peer.send_error(frame.request_id, Status.UNAUTHORIZED, fault)
            peer.close("unauthorized")
            return
        msg = decode(frame)
        wanted = msg.cluster if isinstance(msg, M.Hello) else state.cluster
        if wanted and not self.keeper.is_of(wanted):
            peer.send_error(frame.request_id, Status.OTHER_CLUSTER, f"this server is not of cluster {wanted:016x}")
            peer.close("it came by a map of another cluster")
            return
        if isinstance(msg, M.Fetch | M.FetchPrevious):
            self._fetch(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Store):
            self._store(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Exists):
            statuses = self._exists(msg.digests)
            if state.gate.bound:
                statuses = [
                    Status.NOT_FOUND if status == Status.OK and not self._is_own(state, digest) else status
                    for status, digest in zip(statuses, msg.digests)
                ]
            peer.send_message(M.Statuses(statuses), frame.request_id)
        elif isinstance(msg, M.Delete | M.DeleteSized):
            peer.send_message(M.Statuses(self._delete(state, msg)), frame.request_id)
        elif isinstance(msg, M.Freeze | M.List) and state.role == M.Role.MOVER:
            self._move(peer, frame.request_id, msg)
        elif isinstance(msg, M.Hello):
            self._hello(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Auth | M.Prove):
            peer.send_verdict(*state.gate.take(msg), frame.request_id)
        elif isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), frame.request_id)
        elif isinstance(msg, M.Stats):
            peer.send_message(M.StatsReply(json.dumps(self.stats()).encode()), frame.request_id)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for a stream")

    def _hello(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Hello) -> None:
        proto = accept(msg, "server", state.gate)
        if isinstance(proto, Refusal):
            peer.send_error(request_id, proto.status, proto.text)
            if proto.status == Status.UNAUTHORIZED:
                peer.close("unauthorized")
            return
        state.role, state.cluster, state.namespace = msg.role, msg.cluster, msg.namespace
        peer.admit()
        # An RDMA client reads the whole arena, so one that is bound to namespaces has none.
        port = self.rdma_port if msg.role == M.Role.CLIENT and not state.gate.bound else 0
        paths = M.PathBit.TCP | (M.PathBit.RDMA if port else 0)
        peer.send_message(M.Welcome(proto, 0, paths, port, 0, 0, 0, ""), request_id)

    def _store(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Store) -> None:
        def end() -> None:
            state.receiving = None
            self.stored_bytes += sum(entry[1] for entry in msg.entries)

        options = refused = 0
        try:
            options = self.keeper.options_of(state.namespace, bound=state.gate.bound)
        except Refused as exc:
            refused = exc.status
        receiving = Receiving(self.keeper, peer, request_id, msg, end, options=options, refused=refused)
        state.receiving = receiving
        receiving.start()

    # -- get --------------------------------------------------------------------------------------

    def _fetch(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Fetch | M.FetchPrevious) -> None:
        if len(msg.keys) > BATCH_KEYS_MAX:
            raise RemoteProtocolError(f"{len(msg.keys)} keys in a FETCH, at most {BATCH_KEYS_MAX}")
        previous = isinstance(msg, M.FetchPrevious)
        reader = self.keeper.arena()
        looked = self._look(reader, [digest for digest, _ in msg.keys], previous)
        bound = state.gate.bound
        if reader is not None and any(at is not None and (bound or at.flags & ENTRY_BOUND) for _, _, at in looked):
            for position, (_, _, at) in enumerate(looked):
                if at is not None and self._is_foreign(state, reader, at):
                    looked[position] = (Status.NOT_FOUND, 0, None)
        entries: list[tuple[int, int, int, int]] = []
        todo: list[tuple[int, bytes, Located, memoryview]] = []
        total = 0
        for position, ((digest, most), (status, since, found)) in enumerate(zip(msg.keys, looked)):
            if found is None or reader is None:
                entries.append((status, 0, since & 0xFFFF_FFFF, since >> 32))
            elif found.length > most:
                entries.append((Status.TOO_LARGE, found.flags, found.length, found.crc))
            else:
                entries.append((Status.OK, found.flags, found.length, found.crc))
                todo.append((position, digest, found, reader.value(found)))
                total += found.length
        head = reply(M.Fetched(entries), request_id)
        sending = Sending(request_id, todo, len(entries), previous=previous, bound=state.gate.bound)
        self.fetched_bytes += total
        if total <= SMALL_ANSWER_BYTES:
            parts = [head]
            parts += [self._copied(sending, each, each[3]) for each in todo]
            parts.append(reply(M.Verdict(sending.verdicts), request_id))
            peer.send(b"".join(parts))
            return
        peer.bulk = True  # nothing more is parsed until the verdict is out
        state.sending = sending
        sending.todo.reverse()
        peer.send(head)
        if not peer.out:
            self._pump(peer, state, sending)

    def _look(
        self, reader: ArenaReader | None, digests: Sequence[bytes], previous: bool
    ) -> list[tuple[int, int, Located | None]]:
        """Return (status, epoch with PREVIOUS, location) for each digest.

        Asks the worker once, about all misses for which that is needed.
        """
        if reader is None:
            return [(Status.UNAVAILABLE, 0, None)] * len(digests)
        looked = [_locate(reader, digest, previous) for digest in digests]
        asked = [position for position, (status, _, _) in enumerate(looked) if status == ASK_OWNER]
        if asked:
            answers = self.keeper.resolve_misses([digests[position] for position in asked])
            for position, (status, since) in zip(asked, answers):
                looked[position] = (status, since, None)
                if status == Status.OK:  # copied in between the two looks
                    looked[position] = _locate(reader, digests[position], previous, asked=True)
        return looked

    def _copied(self, sending: Sending, each: tuple[int, bytes, Located, memoryview], piece: memoryview) -> bytes:
        """Return a copy of a piece of a value, after its verdict; zeros for a bound client if that is TORN."""
        position, digest, found, _ = each
        data = bytes(piece)
        if sending.verdicts[position] == Status.OK:
            self._judge(sending, position, digest, found)
        return bytes(len(data)) if sending.bound and sending.verdicts[position] != Status.OK else data

    def _is_foreign(self, state: ConnectionState, reader: ArenaReader, found: Located) -> bool:
        """Return True if an entry is none of the client's namespace, as far as that must be known.

        It must be for a client that is bound to it, and of an entry that such a client has stored: a digest is what
        its sender says, and any namespace's. The verdict tells if the slot was another's by then.
        """
        if state.role == M.Role.MOVER or not (state.gate.bound or found.flags & ENTRY_BOUND):
            return False
        try:
            return reader.namespace_of(found.slot) != self.keeper.namespace(state.namespace)
        except Refused:
            return True

    def _is_own(self, state: ConnectionState, digest: bytes) -> bool:
        """Return True if a digest is stored, and of the client's namespace."""
        reader = self.keeper.arena()
        if reader is None:
            return False
        found = _locate(reader, digest, True)[2]
        return found is not None and not self._is_foreign(state, reader, found)

    def _delete(self, state: ConnectionState, msg: M.Delete | M.DeleteSized) -> list[int]:
        """Delete keys. What is not of a bound client's namespace is not there for it.

        Nor does it delete what a previous owner may have: whose that is, nobody here knows.
        """
        if not state.gate.bound:
            return self.keeper.statuses(msg)
        items: list[Any] = msg.entries if isinstance(msg, M.DeleteSized) else msg.digests
        digests = [item[0] for item in items] if isinstance(msg, M.DeleteSized) else msg.digests
        reader = self.keeper.arena()
        if reader is None:
            return [Status.UNAVAILABLE] * len(digests)
        statuses, mine = [], []
        for at, digest in enumerate(digests):
            missing = miss_status(reader.shard_word(digest))
            statuses.append(Status.UNAVAILABLE if missing == ASK_OWNER else missing)
            if self._is_own(state, digest):
                mine.append(at)
        for at, status in zip(mine, self.keeper.statuses(type(msg)([items[at] for at in mine]))):
            statuses[at] = status
        return statuses

    def _judge(self, sending: Sending, position: int, digest: bytes, found: Located) -> None:
        reader = self.keeper.reader
        if reader is not None:
            confirm = reader.confirm_previous if sending.previous else reader.confirm
            if confirm(digest, found.slot, found.seq):
                return
        sending.verdicts[position] = Status.TORN
        self.torn += 1

    def _pump(self, peer: Peer, state: ConnectionState, sending: Sending) -> None:
        """Hand values to the kernel until it takes no more, then go on at on_drain; or until the turn is over."""
        until = self.loop.clock() + TURN_S
        while not peer.closed:
            current = sending.current
            if current is None or sending.at == current[2].length:
                if current is not None and not sending.bound:
                    self._judge(sending, *current[:3])
                sending.current, sending.at = None, 0
                if not sending.todo:
                    state.sending = None
                    peer.bulk = False
                    peer.send_message(M.Verdict(sending.verdicts), sending.request_id)
                    if peer.paused:
                        peer.pause(False)
                    return
                current = sending.current = sending.todo.pop()
            value = current[3]
            if sending.bound:
                piece = value[sending.at : sending.at + SMALL_ANSWER_BYTES]
                sending.at += len(piece)
                peer.send(self._copied(sending, current, piece))
            else:
                sending.at = len(value)
                peer.send(value)
            if peer.out or self.loop.clock() >= until:
                peer.pause(True)  # requests wait until the verdict is out
                if not peer.out:
                    self.loop.call_later(0.0, partial(self._pump_on, peer, state, sending))
                return

    def _pump_on(self, peer: Peer, state: ConnectionState, sending: Sending) -> None:
        """Go on in another turn with a peer that takes all that it is sent."""
        if state.sending is sending:
            peer.progress_at = self.loop.now
            self._pump(peer, state, sending)

    def on_drain(self, peer: Peer) -> None:
        state: ConnectionState = peer.context
        if state.sending is not None:
            self._pump(peer, state, state.sending)

    # -- the rest -----------------------------------------------------------------------------------

    def _exists(self, digests: list[bytes]) -> list[int]:
        reader = self.keeper.arena()
        if reader is None:
            return [Status.UNAVAILABLE] * len(digests)
        statuses = [
            Status.OK if hit else miss_status(reader.shard_word(digest))
            for digest, hit in zip(digests, reader.contains_many(digests))
        ]
        asked = [position for position, status in enumerate(statuses) if status == ASK_OWNER]
        if asked:
            answers = self.keeper.statuses(M.Exists([digests[position] for position in asked]))
            for position, status in zip(asked, answers):
                statuses[position] = status
        return statuses

    def _move(self, peer: Peer, request_id: int, msg: M.Freeze | M.List) -> None:
        """Answer a new owner's mover. This server is the previous owner."""
        try:
            if isinstance(msg, M.Freeze):
                shards_in(msg.shards)  # for a malformed bitmap the worker would close this process's session
                if not 0 < msg.epoch <= EPOCH_MASK:
                    raise UsageError(f"no map has epoch {msg.epoch}")
                answer = self.keeper.exchange(msg)
            else:
                answer = self.keeper.lister().page(msg.shards, msg.cursor, msg.most)
                self.listed += len(answer.entries)
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        except Refused as exc:
            peer.send_error(request_id, exc.status, str(exc))
        except SegmentError as exc:
            peer.send_error(request_id, Status.UNAVAILABLE, str(exc))
        else:
            peer.send_message(answer, request_id)

    def stats(self) -> dict[str, Any]:
        """Return the counters of this process."""
        return {
            "pid": os.getpid(),
            "worker_down_s": self.keeper.down_s,
            "connections": len(self.loop.peers),
            "fetched_bytes": self.fetched_bytes,
            "stored_bytes": self.stored_bytes,
            "torn": self.torn,
            "listed": self.listed,
            "stalled": self.loop.stalled,
            "protocol_errors": self.loop.protocol_errors,
            "handler_errors": self.loop.handler_errors,
        }


def _locate(
    reader: ArenaReader, digest: bytes, previous: bool, *, asked: bool = False
) -> tuple[int, int, Located | None]:
    """Return (status, 0, location); the status is ASK_OWNER if the worker must be asked, unless it was ``asked``."""
    for _ in range(4):
        try:
            found = reader.locate(digest)
        except Unsettled:
            time.sleep(0.0005)
            continue
        if found is not None and not found.length:
            break  # a stray store, as no value is empty: a client would end the connection for it
        word = reader.shard_word(digest)
        if previous:
            if found is None or not word:
                return previous_status(word), 0, None
        elif found is None or not 0 < word < FROZEN:
            return miss_status(word, asked=asked), 0, None
        reader.touch(found.slot)
        return Status.OK, 0, found
    return Status.BUSY, 0, None


def run_stream(
    listener: socket.socket, uds: str, supervisor: socket.socket, tokens: Sequence[Token] = (), rdma_port: int = 0,
    server: str = "", tls: ServerTls | None = None, users: LocalUsers | None = None,
) -> None:  # fmt: skip
    """Run a stream process, after the fork, until SIGTERM or until the supervisor has gone."""
    loop = Loop()
    stream = Stream(loop, uds, tokens, rdma_port, server, users)
    stop_on_signals(loop)
    stream.adopt_supervisor(supervisor)
    loop.listen(listener, stream, peers=accepting(tls))
    watch_tokens(loop, tokens, stream)
    loop.run()
    loop.close()
    stream.keeper.close()
