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
       FETCH_RANGES asks for ranges of values. All of one value come out of one entry, and its seq is read after each.
       PIN and FETCH_PINNED do the same for versions that stay (``stream_get.py``), bounded in bytes and time.
PUT    STORE names digests and lengths. Bare bytes follow and are received straight into granted chunks, then
       committed together (server/stream_put.py).
MOVE   A new owner's mover sends FREEZE, which is passed to the worker, then LIST (arena/reader.py) and
       FETCH_PREVIOUS: a FETCH in which the values of frozen shards count too.

``cluster/lookup.py`` decides what a miss means. Only digests for which it says so cost a LOCATE to the worker.

Nothing that a client sends blocks the loop. Exchanges with the worker do, for microseconds (``worker_session.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Final

from ..arena.hashing import check_namespace
from ..arena.layout import ENTRY_BOUND, ENTRY_EPOCH, Word
from ..arena.reader import ArenaReader, Located
from ..cluster.lookup import ASK_OWNER
from ..config.tokens import Token
from ..errors import RemoteProtocolError, SegmentError, UsageError
from ..host.parts import pieces
from ..ipc.tally import Served
from ..net.channel import Refused
from ..net.local_users import LocalUsers
from ..net.loop import Loop
from ..net.peer import TURN_S, Peer, Service
from ..net.process import stop_on_signals
from ..net.tls_peer import ServerTls, accepting
from ..net.token_watch import watch_tokens
from ..rpc import Frame, decode, reply
from ..wire import messages as M
from ..wire.auth import Gate
from ..wire.group_messages import Group, groups_in
from ..wire.hello import FOR_MANAGERS, NOT_A_MANAGER, Refusal, accept, check_opening
from ..wire.keep_messages import Keep, Marks
from ..wire.messages import Status
from ..wire.ranges import ranges_by_key
from ..wire.shard_set import EPOCH_MASK, shards_in
from .requests.tracing import Traced, serve
from .stream_get import LEASE_S, Lease, Leased, Leases, Part, Sending, exist, hide, locate_many, look_up
from .stream_put import Receiving
from .worker_session import WorkerSessionKeeper

log = logging.getLogger("simm.server.stream")

Mutation = M.Delete | M.DeleteSized | Keep | Group

_OK: Final = int(Status.OK)
#: How a worker refuses an id for a name that has none.
_NO_NUMBER: Final = (Status.NO_SPACE, Status.OVER_QUOTA, Status.BAD_REQUEST)
#: Answers up to this size leave in one piece, verdict included.
SMALL_ANSWER_BYTES: Final = 128 << 10
#: Values and ranges below this size are copied to be sent with those of other values: a copy takes less than a send.
TOGETHER_BYTES: Final = 32 << 10
#: Socket buffers of a connection; the send buffer of those that connect when there are more than MANY_PEERS.
BUFFER_BYTES: Final = 4 << 20
BUFFER_BYTES_MANY: Final = 256 << 10
MANY_PEERS: Final = 32


class ConnectionState:
    """The state of one connection. ``role`` is None before HELLO."""

    __slots__ = ("began", "cluster", "counted", "gate", "lease", "namespace", "receiving", "role", "sending", "told")

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.role: int | None = None
        #: The cluster of the map that led the client here; 0 for any.
        self.cluster = 0
        #: What HELLO has named.
        self.namespace = ""
        self.sending: Sending | None = None
        self.receiving: Receiving | None = None
        self.lease: Lease | None = None
        #: Where its requests are counted, from HELLO on; when the present one was taken, perf_counter ns.
        self.counted = Served()
        self.began = 0
        #: What follows the answer to a STORE that has just been counted.
        self.told: Callable[[], None] | None = None


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
        self.keeper = WorkerSessionKeeper(uds, parks=True)
        self.leases = Leases(self.keeper)
        self.fetched_bytes = 0
        self.stored_bytes = 0
        self.torn = 0
        self.listed = 0
        self.counted = Served(self.keeper.names)
        self._supervisor: Peer | None = None
        loop.call_every(0.1, self.keeper.maintain)
        loop.call_every(1.0, self._lapse)

    # -- connections ----------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = ConnectionState(Gate(M.Service.STREAM, self.tokens, self.server))
        # The kernel takes twice that for unread bytes, outside of any limit. So many peers get little.
        out = BUFFER_BYTES if len(self.loop.peers) <= MANY_PEERS else BUFFER_BYTES_MANY
        for option, size in ((socket.SO_SNDBUF, out), (socket.SO_RCVBUF, BUFFER_BYTES)):
            with contextlib.suppress(OSError):
                peer.sock.setsockopt(socket.SOL_SOCKET, option, size)
        if self.users is not None:
            self.users.check(peer)

    def adopt_supervisor(self, sock: socket.socket) -> None:
        """Answer the supervisor on a socket pair; the stream ends when it closes."""
        self._supervisor = self.loop.adopt(sock, self, "supervisor")
        self._supervisor.patient = True
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
        lease, state.lease = state.lease, None
        if lease is not None:
            self.leases.release(lease, list(lease.values))

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
            peer.refuse(frame.request_id, fault)
            return
        msg = decode(frame)
        state.began = time.perf_counter_ns()
        wanted = msg.cluster if isinstance(msg, M.Hello) else state.cluster
        if wanted and not self.keeper.is_of(wanted):
            peer.send_error(frame.request_id, Status.OTHER_CLUSTER, f"this server is not of cluster {wanted:016x}")
            peer.close("it came by a map of another cluster")
            return
        if isinstance(msg, M.Fetch | M.FetchPrevious):
            self._fetch(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.FetchRanges):
            self._fetch_ranges(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.FetchPinned):
            self._fetch_pinned(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Pin):
            self._pin(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Unpin):
            known = self.leases.release(state.lease, msg.pins) if state.lease is not None else 0
            peer.send_message(M.Done(known), frame.request_id)
        elif isinstance(msg, M.Store):
            self._store(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Exists):
            statuses = self._exists(state, msg.digests)
            peer.send_message(M.Statuses(statuses), frame.request_id)
            state.counted.looked(state.namespace, statuses, state.began)
        elif isinstance(msg, M.Delete | M.DeleteSized | Keep | Group):
            statuses = self._mutate(peer, msg)
            peer.send_message(M.Statuses(statuses), frame.request_id)
            if isinstance(msg, M.Delete | M.DeleteSized):
                state.counted.deleted(state.namespace, statuses, state.began)
        elif isinstance(msg, M.Freeze | M.List | Marks) and state.role == M.Role.MOVER:
            self._move(peer, frame.request_id, msg)
        elif isinstance(msg, M.Hello):
            self._hello(peer, state, frame.request_id, msg)
        elif isinstance(msg, M.Auth | M.Prove):
            peer.send_verdict(*state.gate.take(msg), frame.request_id)
        elif isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), frame.request_id)
        elif isinstance(msg, M.Stats):
            found = {**self.stats(), "counted": self.counted.as_json()} if peer is self._supervisor else self.stats()
            peer.send_message(M.StatsReply(json.dumps(found).encode()), frame.request_id)
        elif isinstance(msg, Traced):
            serve(self, peer, frame.request_id, msg)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for a stream")

    def _hello(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Hello) -> None:
        proto = accept(msg, "server", state.gate)
        if isinstance(proto, Refusal):
            peer.refuse(request_id, proto.text, proto.status)
            return
        try:
            if msg.namespace:  # without one nothing can be stored
                check_namespace(msg.namespace)
        except UsageError as exc:
            peer.refuse(request_id, str(exc), Status.BAD_REQUEST)
            return
        state.role, state.cluster, state.namespace = msg.role, msg.cluster, msg.namespace
        if msg.role == M.Role.CLIENT:
            state.counted = self.counted
        peer.admit()
        # An RDMA client reads the whole arena, so one that is bound to namespaces has none.
        port = self.rdma_port if msg.role == M.Role.CLIENT and not state.gate.bound else 0
        paths = M.PathBit.TCP | M.PathBit.TRACE | (M.PathBit.RDMA if port else 0)
        peer.send_message(M.Welcome(proto, 0, paths, port, 0, 0, 0, ""), request_id)

    def _store(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Store) -> None:
        def end(receiving: Receiving) -> None:
            state.receiving = None
            self.stored_bytes += sum(entry[1] for entry in msg.entries)
            state.counted.stored(state.namespace, receiving.statuses, [entry[1] for entry in msg.entries], state.began)
            receiving.on_answered, state.told = state.told, None

        options = partial(self.keeper.options_of, state.namespace, bound=state.gate.bound)
        receiving = Receiving(self.keeper, peer, request_id, msg, end, options, state.cluster)
        state.receiving = receiving
        receiving.start()

    # -- get --------------------------------------------------------------------------------------

    def _fetch(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Fetch | M.FetchPrevious) -> None:
        previous = isinstance(msg, M.FetchPrevious)
        reader = self.keeper.arena()
        entries: list[tuple[int, int, int, int]] = []
        todo: list[Part] = []
        total = 0
        # 0: it asks for sizes, and gets no value. 1: it has got none by RDMA, and asks why.
        room = max((most for _, most in msg.keys), default=0)
        looked = self._find(state, reader, [digest for digest, _ in msg.keys], previous, touch=room > 1)
        for position, ((digest, most), (status, since, found)) in enumerate(zip(msg.keys, looked)):
            if found is None or reader is None:
                entries.append((status, 0, since & 0xFFFF_FFFF, since >> 32))
            elif found.length > most:
                entries.append((Status.TOO_LARGE, found.flags, found.length, found.crc))
            else:
                entries.append((Status.OK, found.flags, found.length, found.crc))
                todo.append((position, digest, found, reader.value(found)))
                total += found.length
        self._answer(peer, state, request_id, entries, todo, total, previous, room=room)

    def _fetch_ranges(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.FetchRanges) -> None:
        by_key = ranges_by_key(msg)
        reader = self.keeper.arena()
        digests = [digest for digest, _ in msg.keys]
        looked = self._find(state, reader, digests, bool(msg.previous))
        values = [None if found is None or reader is None else reader.value(found) for _, _, found in looked]
        self._send_ranges(peer, state, request_id, digests, looked, values, by_key, previous=bool(msg.previous))

    def _fetch_pinned(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.FetchPinned) -> None:
        by_key = ranges_by_key(msg)
        lease = state.lease
        leased, looked, values = self.leases.held(lease, [number for number, _ in msg.keys], self.loop.now)
        digests = [b"" if each is None else each.digest for each in leased]
        self._send_ranges(peer, state, request_id, digests, looked, values, by_key, leased=leased)

    def _send_ranges(
        self, peer: Peer, state: ConnectionState, request_id: int, digests: Sequence[bytes],
        looked: Sequence[tuple[int, int, Located | None]], values: Sequence[memoryview | None],
        by_key: Sequence[Sequence[tuple[int, int]]], *, previous: bool = False,
        leased: Sequence[Leased | None] | None = None,
    ) -> None:  # fmt: skip
        """Answer with ranges of values that have been looked for."""
        entries: list[tuple[int, int, int, int]] = []
        todo: list[tuple[int, bytes, Located, memoryview]] = []
        total = least = size = 0
        last: Sequence[tuple[int, int]] = ()
        for position, (digest, (status, since, found), value) in enumerate(zip(digests, looked, values)):
            ranges = by_key[position]
            if ranges is not last:  # many keys have the same ones
                last, least = ranges, max([offset + length for offset, length in ranges])
                size = sum([length for _, length in ranges])
            if found is None or value is None:
                entries.append((status, 0, since & 0xFFFF_FFFF, since >> 32))
                continue
            _, _, _, length, crc, flags = found
            if least > length:
                entries.append((Status.OUT_OF_RANGE, flags, length, crc))
            else:
                entries.append((_OK, flags, length, crc))
                todo.append((position, digest, found, value))
                total += size
        parts = (
            (position, digest, found, piece) for position, digest, found, value in todo
            for piece in pieces(value, by_key[position], SMALL_ANSWER_BYTES)
        )  # fmt: skip
        self._answer(peer, state, request_id, entries, parts, total, previous, leased)

    def _pin(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Pin) -> None:
        if msg.previous > 1:
            raise RemoteProtocolError(f"PIN with previous={msg.previous}")
        previous = bool(msg.previous)
        reader = self.keeper.arena()
        looked = self._find(state, reader, msg.digests, previous)
        if state.lease is None:
            state.lease = Lease()
        entries = self.leases.take(state.lease, reader, msg.digests, looked, previous=previous)
        generation = 0 if reader is None else reader.words[Word.GENERATION]
        peer.send_message(M.Pinned(generation, entries), request_id)

    def _lapse(self) -> None:
        """Unpin what clients have not asked for in a long time: they may be stopped."""
        for peer in self.loop.peers:
            state = peer.context
            lease = state.lease if isinstance(state, ConnectionState) else None
            if lease is not None and state.sending is None and self.loop.now - lease.used_at > LEASE_S:
                self.leases.lapse(lease)

    def _find(
        self, state: ConnectionState, reader: ArenaReader | None, digests: Sequence[bytes], previous: bool,
        *, touch: bool = True,
    ) -> list[tuple[int, int, Located | None]]:  # fmt: skip
        """Do :func:`look_up`, and find none of another namespace's values where that matters."""
        looked = look_up(self.keeper, reader, digests, previous, touch=touch)
        bound = state.gate.bound
        special = ENTRY_BOUND | ENTRY_EPOCH
        if reader is not None and any(at is not None and (bound or at.flags & special) for _, _, at in looked):
            own = cache(partial(self._own_number, state))
            hidden: list[tuple[int, int]] = []
            for position, (_, _, at) in enumerate(looked):
                if at is not None and (why := self._judge_owner(state, reader, at, own)) != _OK:
                    looked[position] = (Status.NOT_FOUND, 0, None)
                    hidden.append((position, why))
            if hidden and bound and not previous:
                told = hide(self.keeper, reader, [(digests[position], why) for position, why in hidden])
                for (position, _), (status, since) in zip(hidden, told):
                    looked[position] = (status, since, None)
        return looked

    def _answer(
        self, peer: Peer, state: ConnectionState, request_id: int, entries: list[tuple[int, int, int, int]],
        todo: Iterable[Part], total: int, previous: bool, leased: Sequence[Leased | None] | None = None,
        *, room: int = 2,
    ) -> None:  # fmt: skip
        """Send FETCHED, the bytes of ``todo``, ``total`` in all, and the verdict. ``room``: as in :meth:`_fetch`."""
        head = reply(M.Fetched(entries), request_id)
        bound, moving = state.gate.bound, state.role == M.Role.MOVER
        sending = Sending(
            request_id, todo, entries, total, previous=previous, bound=bound, leased=leased, moving=moving
        )
        self.fetched_bytes += total
        if total <= SMALL_ANSWER_BYTES:
            parts = [head]
            parts += [self._copied(sending, each, each[3]) for each in todo]
            parts.append(reply(M.Verdict(sending.verdicts), request_id))
            peer.send(b"".join(parts))
            self._count_get(state, sending, room)
            return
        peer.bulk = True  # nothing more is parsed until the verdict is out
        state.sending = sending
        peer.send(head)
        if not peer.out:
            self._pump(peer, state, sending)

    def _copied(self, sending: Sending, each: Part, piece: memoryview | bytes) -> bytes:
        """Return a copy of a piece of a part, after its verdict; zeros for a bound client if that is TORN."""
        position, digest, found, _ = each
        data = bytes(piece)
        if sending.verdicts[position] == Status.OK:
            self._judge(sending, position, digest, found)
        return bytes(len(data)) if sending.bound and sending.verdicts[position] != Status.OK else data

    def _own_number(self, state: ConnectionState) -> int | None:
        """Return the id of the client's namespace, -1 if it has none, None if the worker does not say.

        It may cost an exchange.
        """
        try:
            return self.keeper.namespace(state.namespace)
        except Refused as exc:
            return -1 if exc.status in _NO_NUMBER else None

    @staticmethod
    def _judge_owner(
        state: ConnectionState, reader: ArenaReader, found: Located, own: Callable[[], int | None]
    ) -> int:
        """Return OK if the client may see an entry, or why it may not: a status that :func:`hide` takes.

        ASK_OWNER: it is of another namespace, as far as that must be known. It must be for a client that is bound to
        its own, and of an entry that such a client has stored: a digest is what its sender says, and any namespace's.
        UNAVAILABLE: nobody tells whose it is. NOT_FOUND: it has changed, or is of an old epoch, and may be the
        client's. ``own``: returns :meth:`_own_number`, and asks once for all keys of a request.
        """
        if state.role == M.Role.MOVER:  # the new owner knows what to do with an old one
            return _OK
        if state.gate.bound or found.flags & ENTRY_BOUND:
            number, namespace = own(), reader.namespace_of(found.slot)
            if not reader.holds(found):
                return Status.NOT_FOUND
            if namespace != number:
                return Status.UNAVAILABLE if number is None else ASK_OWNER
        return _OK if reader.is_current(found) else Status.NOT_FOUND

    def _judge_owners(self, state: ConnectionState, digests: Sequence[bytes]) -> list[int]:
        """Do :meth:`_judge_owner` for what is stored under these digests. NOT_FOUND where nothing is."""
        if (reader := self.keeper.arena()) is None:
            return [Status.UNAVAILABLE] * len(digests)
        own = cache(partial(self._own_number, state))
        return [
            Status.NOT_FOUND if found is None else self._judge_owner(state, reader, found, own)
            for _, _, found in locate_many(reader, digests, True, touch=False)
        ]

    def _exists(self, state: ConnectionState, digests: list[bytes]) -> list[int]:
        return exist(self.keeper, digests, partial(self._judge_owners, state), bound=state.gate.bound)

    def _mutate(self, peer: Peer, msg: Mutation) -> list[int]:
        """Delete, keep or group entries, of a bound client only those of its namespace: the worker judges that."""
        state: ConnectionState = peer.context
        if isinstance(msg, Group):
            groups_in(msg)  # for a malformed one the worker would close this process's session
        return self.keeper.statuses(msg, peer, state.cluster, state.namespace if state.gate.bound else None)

    def _judge(self, sending: Sending, position: int, digest: bytes, found: Located) -> None:
        leased = sending.leased[position] if sending.leased is not None else None
        if leased is not None:
            if leased.is_whole():
                return
        elif (reader := self.keeper.reader) is not None:
            confirm = reader.confirm_previous if sending.previous else reader.confirm
            # A mover's values are judged where they come to.
            current = sending.moving or reader.is_current(found)
            if confirm(digest, found.slot, found.seq) and current:
                return
        sending.verdicts[position] = Status.TORN
        self.torn += 1

    def _pump(self, peer: Peer, state: ConnectionState, sending: Sending) -> None:
        """Hand values to the kernel until it takes no more, then go on at on_drain; or until the turn is over."""
        until = self.loop.clock() + TURN_S
        while not peer.closed:
            current = sending.current
            if current is None or sending.at == len(current[3]):
                if current is not None and not sending.bound:
                    self._judge(sending, *current[:3])
                current, sending.at = next(sending.todo, None), 0
                sending.current = current
                if current is None:
                    state.sending = None
                    peer.bulk = False
                    peer.send_message(M.Verdict(sending.verdicts), sending.request_id)
                    self._count_get(state, sending)
                    if peer.paused:
                        peer.pause(False)
                    return
            value = current[3]
            if sending.bound:
                piece = value[sending.at : sending.at + SMALL_ANSWER_BYTES]
                sending.at += len(piece)
                peer.send(self._copied(sending, current, piece))
            elif len(value) < TOGETHER_BYTES:
                peer.send(self._together(sending, current))
            else:
                sending.at = len(value)
                peer.send(value)
            if peer.out or self.loop.clock() >= until:
                peer.pause(True)  # requests wait until the verdict is out
                if not peer.out:
                    self.loop.call_later(0.0, partial(self._pump_on, peer, state, sending))
                return

    def _together(self, sending: Sending, part: Part) -> bytes:
        """Return a copy of a small part and of those that follow, after their verdicts: a send for each costs more."""
        parts = [part]
        size = len(part[3])
        following = next(sending.todo, None)
        while following is not None and size < SMALL_ANSWER_BYTES and len(following[3]) < TOGETHER_BYTES:
            parts.append(following)
            size += len(following[3])
            following = next(sending.todo, None)
        sending.current = following
        data = b"".join([each[3] for each in parts])
        for position, digest, found, _ in parts:
            self._judge(sending, position, digest, found)
        return data

    def _pump_on(self, peer: Peer, state: ConnectionState, sending: Sending) -> None:
        """Go on in another turn with a peer that takes all that it is sent."""
        if state.sending is sending:
            peer.progress_at = self.loop.now
            self._pump(peer, state, sending)

    def on_drain(self, peer: Peer) -> None:
        state: ConnectionState = peer.context
        if state.sending is not None:
            self._pump(peer, state, state.sending)

    def _count_get(self, state: ConnectionState, sending: Sending, room: int = 2) -> None:
        statuses = [each[0] for each in sending.entries if room > 1 or (room and each[0] != Status.TOO_LARGE)]
        torn = sending.verdicts.count(Status.TORN)
        state.counted.fetched(state.namespace, statuses, torn, sending.size, state.began, sending.previous)

    # -- the rest -----------------------------------------------------------------------------------

    def _move(self, peer: Peer, request_id: int, msg: M.Freeze | M.List | Marks) -> None:
        """Answer a new owner's mover. This server is the previous owner."""
        try:
            if isinstance(msg, M.Freeze):
                shards_in(msg.shards)  # for a malformed bitmap the worker would close this process's session
                if not 0 < msg.epoch <= EPOCH_MASK:
                    raise UsageError(f"no map has epoch {msg.epoch}")
                answer = self.keeper.exchange(msg, peer)  # it does not outlive its mover
            elif isinstance(msg, Marks):
                answer = self.keeper.lister().marks(msg.digests)
            else:
                answer = self.keeper.lister().page(msg.shards, msg.cursor, msg.most)
                self.listed += len(answer.entries)
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        except (Refused, SegmentError) as exc:
            peer.send_error(request_id, exc.status if isinstance(exc, Refused) else Status.UNAVAILABLE, str(exc))
        else:
            peer.send_message(answer, request_id)

    def stats(self) -> dict[str, Any]:
        """Return the counters of this process, without those by namespace: whose they are, not all clients may know."""
        loop, leases = self.loop, self.leases
        return {
            "pid": os.getpid(), "worker_down_s": self.keeper.down_s, "connections": len(loop.peers),
            "fetched_bytes": self.fetched_bytes, "stored_bytes": self.stored_bytes, "torn": self.torn,
            "listed": self.listed, "leased": leases.keys, "leased_bytes": leases.bytes, "stalled": loop.stalled,
            "protocol_errors": loop.protocol_errors, "handler_errors": loop.handler_errors,
            "unauthorized": loop.unauthorized,
        }  # fmt: skip


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
