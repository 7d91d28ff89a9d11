"""The worker process: one arena, one event loop, RPC only.

The worker alone changes its arena's metadata. It carries out one request at a time, from a socket or from a session's
commit ring; both go through :meth:`Worker.handle`. ``server/ring_poller.py`` decides when the rings are polled.

Who may still touch what
------------------------
A session belongs to a process. The kernel names that process (``SO_PEERCRED``), never the peer itself, and a pidfd
holds it from HELLO on, so a reused pid is never mistaken for it. The pidfd becomes readable when the process has ended.
Only then, or when the process itself says that its copies have ended (RETURN_GRANTS, UNPIN, RELEASE_SESSIONS), are its
chunks reused. A closed connection alone proves nothing: its grants and pins stay quarantined. If the peer's pid is not
visible (another pid namespace), the worker offers no shm path and the client uses TCP.

After a worker's death its successor finds the old sessions in the ledger. It frees those whose process has ended. For
the others it opens a pidfd, and checks it by the process's start time.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..arena.hashing import check_namespace
from ..arena.namespaces import Sweeper
from ..arena.quotas import QuotaChanges
from ..arena.sessions import Session, check_wants
from ..arena.store import Store
from ..arena.vault import Mender
from ..config.logs import on_reload
from ..config.tokens import Token, namespaces_of, quotas_of
from ..constants import BATCH_KEYS_MAX, OTHERS_NAMESPACE, VALUE_BYTES_MAX
from ..errors import CapacityError, ConfigError, RemoteProtocolError, UsageError, line_about
from ..host.processes import boottime_ns, process_start
from ..host.threads import CLOSER, WAITING_MAX, beating
from ..ipc.commit_ring import Ring, Withdrawals
from ..ipc.tally import Tally, claims
from ..net.listeners import NamedSocket
from ..net.loop import Loop
from ..net.peer import Peer, Service
from ..net.peer_uid import credentials
from ..net.process import stop_on_signals
from ..net.token_watch import watch_tokens
from ..rpc import OPCODES, Frame, decode, reply
from ..wire import epoch_messages as E
from ..wire import keep_messages as K
from ..wire import messages as M
from ..wire.group_messages import Group
from ..wire.hello import Refusal, check_opening, negotiate, other_cluster
from ..wire.messages import Status
from ..wire.one_key import CommitOne, commit_one_of, pin_one_of, reply_committed_one, reply_located_one
from ..wire.trace_messages import Traced
from .requests import bound, tracing
from .requests.groups import group
from .requests.shards import DROP_S, ShardRequests
from .ring_poller import RingPoller

log = logging.getLogger("simm.server.worker")

HEARTBEAT_S: Final = 0.1
#: What a recovery has found is logged up to so many lines.
NOTES_MAX: Final = 20
#: Between two looks at the path of the UNIX socket.
PATH_S: Final = 1.0

#: What must not be carried out for somebody who has hung up.
_MUTATIONS: Final = frozenset(
    OPCODES[each] for each in (M.Commit, M.Delete, M.DeleteSized, M.Freeze, K.Keep, Group, Traced, E.ForNamespace)
)
#: What pidfd_open says of a pid that no process has: EINVAL and ENOENT if a thread has it.
_NO_PROCESS: Final = frozenset((errno.ESRCH, errno.EINVAL, errno.ENOENT))

_STILL_CLOSING: Final = "descriptors of other users are still being closed"
_PATHS: Final = M.PathBit.SHM | M.PathBit.TCP | M.PathBit.TRACE
_LOCATE_BITS: Final = M.LOCATE_PIN | M.LOCATE_PREVIOUS | M.LOCATE_HIDDEN


@dataclass
class WorkerSettings:
    """The settings of a worker."""

    segment: str
    data_fd: int  # the descriptor of the arena's data, which clients get
    poll_us: int = 50
    #: Accept any uid on the UNIX socket, not only the worker's own: the segment has a group.
    any_uid: bool = False
    #: What clients may prove. Their namespaces have numbers here, and quotas, which this worker shares with others: it
    #: gets the part that its memory is of all workers' now.
    tokens: Sequence[Token] = ()
    share: Callable[[], tuple[int, int]] = lambda: (1, 1)
    #: The data server's, by which clients know that it is the one that their map names; 0 for none.
    instance: int = 0


#: Roles that may send FREEZE, and ADOPT or FINISH. The peer itself names its role, but members of the segment's group
#: are clients, whatever they say.
_MAY_FREEZE: Final = frozenset((M.Role.STREAM, M.Role.MOVER, M.Role.SUPERVISOR))
_MAY_ADOPT: Final = frozenset((M.Role.MOVER, M.Role.SUPERVISOR))


class ConnectionState:
    """The state of one connection: its peer, its session, and its ring or its page of withdrawals."""

    __slots__ = ("cluster", "pid", "ring", "ring_used", "role", "session", "uid", "withdrawals")

    def __init__(self, pid: int, uid: int, role: int) -> None:
        self.pid = pid
        self.uid = uid
        self.role = role
        #: The cluster of the map that led the client here; 0 for any.
        self.cluster = 0
        self.session: Session | None = None
        self.ring: Ring | None = None
        self.withdrawals: Withdrawals | None = None
        self.ring_used = 0.0


class Worker(Service):
    """Serves one store."""

    hello_first = True

    def __init__(self, store: Store, settings: WorkerSettings, loop: Loop) -> None:
        self.store, self.settings, self.loop = store, settings, loop
        self.requests, self.epoch = 0, store.epoch
        self.orphaned = False  # the supervisor has ended without ending this process
        self.unreachable = ""  # why clients of this host cannot find the worker; empty if they can
        self._bound_again: socket.socket | None = None
        self.peers: dict[int, Peer] = {}  # by session id
        self._pidfds: dict[int, int] = {}  # pid -> pidfd
        self.movers: dict[int, int] = {}  # the epoch of the map by which a mover copies, by its pid
        told = partial(loop.noise, logging.ERROR, f"%d %s of {settings.segment} were overwritten by others: mended")
        self._mender = Mender(store, loop.call_later, told)
        self.tally = Tally(loop.clock, store.ledger.namespaces.names.values, store.space.victims.evicted)
        self.shards = ShardRequests(self)
        self._expiring = False  # turns of that are due
        store.ledger.namespaces.clock = boottime_ns
        self.rings = RingPoller(loop, settings.poll_us, self._commit_one, self.handle, store.apply_pending)
        store.sessions.recall = self._recall
        sessions = store.sessions
        #: By opcode: returns the answer to a request of a session, and its status.
        self._handlers: dict[int, Callable[[Session, Any], tuple[Any, int]]] = {
            OPCODES[M.Commit]: self._commit,
            OPCODES[M.Grant]: self._grant,
            OPCODES[M.ReturnGrants]: lambda session, msg: (M.Done(sessions.return_grants(session, msg.grants)), 0),
            OPCODES[M.Delete]: lambda _, msg: (M.Statuses(store.delete(msg.digests)), 0),
            OPCODES[M.DeleteSized]: self._delete_sized,
            OPCODES[K.Keep]: self._keep,
            OPCODES[Group]: lambda session, msg: (group(store, msg, session.copies), 0),
            OPCODES[M.Locate]: self._locate,
            OPCODES[M.Unpin]: lambda session, msg: (M.Done(sessions.unpin_for(session, msg.pins)), 0),
            OPCODES[M.Exists]: lambda _, msg: (M.Statuses(store.exists(msg.digests)), 0),
            OPCODES[M.ReleaseSessions]: lambda session, msg: (M.Done(self._release_of(session, msg.sessions)), 0),
        }
        self._handlers[OPCODES[Traced]] = tracing.handler(self._handlers)
        self._handlers[OPCODES[E.ForNamespace]] = bound.handler(store, self._handlers)
        self.sweeper = Sweeper(
            store.ledger.namespaces, store.table, lambda: [each.namespace for each in sessions.by_id.values()],
            loop.clock, loop.call_later, DROP_S,
        )  # fmt: skip
        loop.call_every(HEARTBEAT_S, self._beat)

    # -- life -----------------------------------------------------------------------------------

    def start(self, listener: socket.socket) -> None:
        """Begin to serve, once the quarantined sessions have their pidfds.

        Raises OSError if the kernel does not say which of their processes live: those may write into their grants.
        """
        with beating(self.store.beat):
            for session in list(self.store.sessions.by_id.values()):
                # The pidfd first: if the start time is right after it is opened, it is of this very process.
                if not self._hold_pid(session.pid) or process_start(session.pid) != session.started:
                    self.store.sessions.end(session)
                    self._forget_pid(session.pid)
            self.store.keeping.begin(_now_s())
        self._beat()
        self.loop.listen(listener, self)
        self.store.open()

    def keep_path(self, unix: NamedSocket) -> None:
        """Bind the worker's UNIX socket again whenever its path is lost, from now on."""
        self.loop.call_every(PATH_S, partial(self._keep_path, unix))
        self._keep_path(unix)

    def _keep_path(self, unix: NamedSocket) -> None:
        if not unix.lost():
            self.unreachable = ""
            return
        try:
            listener = unix.bind_again()
        except (OSError, ConfigError) as exc:
            if not self.unreachable:
                log.error("%s is lost and cannot be bound again: %s", unix.path, exc)
            self.unreachable = f"{unix.path} is lost: {exc}"
            return
        self.unreachable = ""
        log.warning("%s was lost, and is bound again", unix.path)
        if before := self._bound_again:
            self.loop.unwatch(before)
            before.close()
        self._bound_again = listener
        self.loop.listen(listener, self)

    def run(self) -> None:
        """Serve until SIGTERM, or until the supervisor has gone."""
        self.rings.run()
        self.loop.close()

    def _beat(self) -> None:
        self.store.beat()
        self.store.table.tell()
        self._mender.maintain()
        if not self._expiring:
            self._expire()
        self.tally.maintain()

    def _expire(self) -> None:
        """End for DROP_S the keeping of entries whose time has come, and go on later."""
        store, until = self.store, self.loop.clock() + DROP_S
        self._expiring = False
        while store.keeping.expire(_now_s()):
            if self.loop.clock() >= until:
                self._expiring = True
                self.loop.call_later(DROP_S, self._expire)
                break
        if store.groups.orphans:  # of near copies
            store.apply_pending()

    # -- connections ------------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        pid, uid, _gid = credentials(peer.sock)
        peer.context = ConnectionState(pid, uid, -1)
        peer.distrusted = peer.sock.family == socket.AF_UNIX and uid not in (os.geteuid(), 0)
        if peer.distrusted and CLOSER.waiting > WAITING_MAX:
            peer.close(_STILL_CLOSING)

    def adopt_supervisor(self, sock: socket.socket) -> None:
        """Serve the supervisor on a socket pair. The worker ends when it closes."""
        peer = self.loop.adopt(sock, self, "supervisor")
        peer.patient = True  # the supervisor may be stopped in the middle of a frame
        peer.context.role = M.Role.SUPERVISOR

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        # Whoever hung up while this process was stopped may have put a newer value by another way, which waits too.
        mutates = frame.opcode in _MUTATIONS
        if peer.hung_up() if mutates else peer.gave_up(self.loop.now):
            peer.close("the peer hung up while its request waited")
            return
        session = peer.context.session
        if mutates and (page := peer.context.withdrawals) is not None and page.has(frame.request_id):
            peer.send(self._withdrawn(session, frame))
            return
        if frame.opcode in (M.OP_KICK, M.OP_WAKE):
            self.rings.on_doorbell(peer, frame)
            return
        commit = commit_one_of(frame)
        if commit is not None and session is not None:
            self.requests += 1
            peer.send(self._commit_one(session, commit))
        elif answer := self.handle(peer, frame):
            peer.send(answer)
        self.store.apply_pending()
        if frame.opcode == M.OP_COMMIT and peer.context.role == M.Role.CLIENT:
            self.rings.poll_sockets()

    def on_close(self, peer: Peer, reason: str) -> None:
        state: ConnectionState = peer.context
        session = state.session
        if session is not None:
            self.tally.close(session.session)
        if ring := state.ring:
            state.ring = None
            self.rings.detach(ring)
        if page := state.withdrawals:
            state.withdrawals = None
            page.close()
        if state.role == M.Role.SUPERVISOR:
            if self.loop.running:
                self.orphaned = True
                log.warning("the supervisor has gone: the worker ends")
            self.loop.stop()
        if session is None:
            return
        state.session = None
        self.peers.pop(session.session, None)
        log.debug("session %#x closed: %s", session.session, reason, extra=line_about(session.session))
        self.store.sessions.close(session)
        self._forget_pid(session.pid)

    def handle(self, peer: Peer, frame: Frame) -> bytes:
        """Return the answer to one request, b"" for one that follows later.

        Raises RemoteProtocolError if the peer breaks the protocol.
        """
        self.requests += 1
        state: ConnectionState = peer.context
        handler = self._handlers.get(frame.opcode)
        if handler is not None:
            session = state.session
            if session is None:
                raise RemoteProtocolError("the first message must be HELLO")
            if frame.status:
                return self._withdrawn(session, frame)
            digest = pin_one_of(frame)
            if digest is not None:
                return reply_located_one(self.store.locate(session, (digest,), M.LOCATE_PIN)[0], frame.request_id)
            self.store.now_ms = time.time_ns() // 1_000_000
            answer, status = handler(session, decode(frame))
            return reply(answer, frame.request_id, status)
        if state.role == -1 and state.uid not in (os.geteuid(), 0):
            check_opening(frame)
        msg = decode(frame)
        if isinstance(msg, M.Hello):
            return self._hello(peer, state, frame.request_id, msg)
        if isinstance(msg, M.Ping):
            return reply(M.Pong(msg.cookie), frame.request_id)
        if state.role == -1:  # this user asks something without a session
            peer.admit()
        if isinstance(msg, M.DataAttach | M.RingAttach) and peer.distrusted and CLOSER.waiting > WAITING_MAX:
            peer.send_error(frame.request_id, Status.UNAVAILABLE, _STILL_CLOSING)
            peer.close(_STILL_CLOSING)  # else it may send one after the other
            return b""
        if isinstance(msg, M.DataAttach):
            self._pass_data(peer, state)
            return reply(M.Done(1), frame.request_id)
        if isinstance(msg, M.RingAttach):
            self.rings.attach(peer, state, msg.bytes)
            self._count_for(state)
            return reply(M.Done(1), frame.request_id)
        if isinstance(msg, M.Stats):
            stats = self.stats(detail=msg.detail if state.uid in (os.geteuid(), 0) else 0)
            return reply(M.StatsReply(json.dumps(stats).encode()), frame.request_id)
        if isinstance(msg, M.Shards) and state.role == M.Role.SUPERVISOR:
            return self.shards.take_map(peer, frame.request_id, msg)
        if isinstance(msg, E.Epochs | E.EpochLease) and state.role == M.Role.SUPERVISOR:
            return self.shards.take_epochs(frame.request_id, msg)
        if isinstance(msg, M.Freeze) and state.role in _MAY_FREEZE:
            return self.shards.freeze(frame.request_id, msg)
        if isinstance(msg, M.Namespace) and state.role == M.Role.STREAM:
            return self._namespace(frame.request_id, msg)
        if isinstance(msg, M.Adopt | M.Finish) and state.role in _MAY_ADOPT:
            return self.shards.adopt(state, frame.request_id, msg)
        raise RemoteProtocolError(f"{type(msg).__name__} is not for a worker")

    # -- sessions -----------------------------------------------------------------------------------

    def _hello(self, peer: Peer, state: ConnectionState, request_id: int, msg: M.Hello) -> bytes:
        def refuse(status: int, text: str) -> bytes:
            self.loop.unauthorized += status == Status.UNAUTHORIZED
            return reply(M.Error(text[: M.TEXT_MAX]), request_id, status)

        if state.session is not None:
            raise RemoteProtocolError("a second HELLO on one connection")
        proto = negotiate(msg, "worker")
        if isinstance(proto, Refusal):
            return refuse(*proto)
        if state.uid not in (os.geteuid(), 0) and not self.settings.any_uid:
            return refuse(Status.UNAUTHORIZED, f"uid {state.uid} may not use this worker (started by {os.geteuid()})")
        refusal = other_cluster(msg, "worker", self.store.cluster)
        if refusal is not None:
            return refuse(*refusal)
        self.sweeper.maintain()
        serves = state.uid in (os.geteuid(), 0) and msg.role not in (M.Role.CLIENT, M.Role.SUPERVISOR)
        try:
            if not (serves and msg.namespace == OTHERS_NAMESPACE):  # a mover brings such values
                check_namespace(msg.namespace)
            if not state.pid or not self._hold_pid(state.pid):
                return refuse(
                    Status.UNAVAILABLE, "your process is not visible here (another pid namespace): use the TCP path"
                )
            session = self.store.sessions.open(state.pid, process_start(state.pid), msg.namespace, serves)
        except OSError as exc:
            self._forget_pid(state.pid)
            return refuse(Status.UNAVAILABLE, f"cannot watch your process: {exc}: use the TCP path")
        except (CapacityError, UsageError) as exc:
            self._forget_pid(state.pid)
            return refuse(Status.NO_SPACE if isinstance(exc, CapacityError) else Status.BAD_REQUEST, str(exc))
        state.session, state.cluster = session, msg.cluster
        state.role = msg.role if serves else M.Role.CLIENT
        peer.admit()
        peer.take_fds = peer.sock.family == socket.AF_UNIX  # a stranger's descriptors are kept by nobody
        session.relays = state.role == M.Role.STREAM
        if state.role == M.Role.MOVER:
            session.copies = self.movers.get(state.pid, 0)
        self.peers[session.session] = peer
        peer.session = session.session
        welcome = M.Welcome(
            proto, session.namespace, _PATHS, 0, session.session, self.store.incarnation,
            self.store.sessions.granted_bytes_max, self.settings.segment, self.settings.instance,
        )  # fmt: skip
        return reply(welcome, request_id)

    def _count_for(self, state: ConnectionState) -> None:
        if (session := state.session) and (ring := state.ring) and state.role == M.Role.CLIENT:
            self.tally.open(session.session, self.store.ledger.namespaces.names.get(session.namespace, ""), ring.counts)

    def _pass_data(self, peer: Peer, state: ConnectionState) -> None:
        """Pass the data's descriptor by the socket that came with the message. Raises RemoteProtocolError."""
        if state.session is None or len(peer.fds) != 1:
            raise RemoteProtocolError("DATA_ATTACH needs a session and one descriptor")
        try:
            way = socket.socket(fileno=peer.fds[0])  # closed with the connection if it is no socket
        except OSError as exc:
            raise RemoteProtocolError(f"DATA_ATTACH with no socket: {exc}") from exc
        peer.fds.clear()
        try:
            if way.family != socket.AF_UNIX:
                raise OSError("it is of another family")
            # Without a wait, whatever the sender makes of the socket's mode meanwhile.
            socket.send_fds(way, [b"d"], [self.settings.data_fd], socket.MSG_DONTWAIT)
        except OSError as exc:
            raise RemoteProtocolError(f"DATA_ATTACH with no UNIX socket that takes a descriptor: {exc}") from exc
        finally:
            CLOSER.close([way.detach()])

    def _hold_pid(self, pid: int) -> bool:
        """Open a pidfd for a process, once. Return False if it has ended. Raises OSError if that cannot be told."""
        if pid in self._pidfds:
            return True
        try:
            fd = os.pidfd_open(pid)
        except OverflowError:
            return False
        except OSError as exc:
            if exc.errno in _NO_PROCESS:
                return False
            raise
        self._pidfds[pid] = fd
        self.loop.watch(fd, lambda _mask: self._process_ended(pid))
        return True

    def _process_ended(self, pid: int) -> None:
        """End the sessions of a process that has ended, as the kernel says: it writes into no grant any longer."""
        for session in [s for s in self.store.sessions.by_id.values() if s.pid == pid]:
            peer = self.peers.get(session.session)
            if peer is not None:
                peer.close("process ended")  # a forked child may still hold the socket
            self.store.sessions.end(session)
        self._forget_pid(pid)

    def _forget_pid(self, pid: int) -> None:
        if any(s.pid == pid for s in self.store.sessions.by_id.values()):
            return
        self.movers.pop(pid, None)
        fd = self._pidfds.pop(pid, -1)
        if fd >= 0:
            self.loop.unwatch(fd)
            os.close(fd)

    def _release_of(self, session: Session, numbers: list[int]) -> int:
        """End old sessions of the same process, which says that no copy of them runs. Return their number."""
        ended = 0
        for number in numbers:
            old = self.store.sessions.by_id.get(number)
            if old is None or old is session or old.pid != session.pid or old.started != session.started:
                continue
            peer = self.peers.get(number)
            if peer is not None:
                peer.close("released by its successor")  # its end has not arrived, or a forked child holds it open
            self.store.sessions.end(old)
            ended += 1
        return ended

    def _recall(self, session: Session, wanted: int) -> None:
        peer = self.peers.get(session.session)
        if peer is not None:
            peer.push(M.Recall(wanted))

    # -- requests -------------------------------------------------------------------------------------

    def _commit_one(self, session: Session, commit: CommitOne) -> bytes:
        """Return the answer to a COMMIT of one entry and one want, by ring or socket."""
        store = self.store
        entry, want, count, request_id = commit
        if count > BATCH_KEYS_MAX or want > VALUE_BYTES_MAX:
            check_wants([(want, count)])
        store.now_ms = time.time_ns() // 1_000_000
        (status,) = store.commit(session, (entry,))
        if count:
            store.sessions.want(session, want, count)
        return reply_committed_one(status, request_id, store.sessions.take_prepared(session))

    def _commit(self, session: Session, msg: M.Commit) -> tuple[Any, int]:
        store = self.store
        check_wants(msg.wants)
        statuses = store.commit(session, msg.entries)
        for size, count in msg.wants:
            store.sessions.want(session, size, count)
        return M.Committed(statuses, store.sessions.take_prepared(session)), 0

    @staticmethod
    def _withdrawn(session: Session, frame: Frame) -> bytes:
        """Return the answer to a request that its client has withdrawn: a COMMIT's grants are the client's again."""
        if frame.opcode == M.OP_COMMIT:
            entries, held = decode(frame).entries, session.grants
            numbers = [number for number in dict.fromkeys([entry[1] for entry in entries]) if number in held]
            grants = [(number, *held[number][:2]) for number in numbers]
            return reply(M.Committed([Status.UNAVAILABLE] * len(entries), grants), frame.request_id)
        return reply(M.Error("withdrawn"), frame.request_id, Status.UNAVAILABLE)

    def _grant(self, session: Session, msg: M.Grant) -> tuple[Any, int]:
        check_wants(msg.wants)
        self.store.apply_pending()
        grants = self.store.sessions.take_prepared(session)
        got, all_came = self.store.sessions.grant_each(session, msg.wants)
        return M.Granted(grants + got), Status.OK if all_came else Status.NO_SPACE

    def _namespace(self, request_id: int, msg: M.Namespace) -> bytes:
        """Return the id of a namespace for which a stream or an endpoint will commit."""
        self.sweeper.maintain()
        try:
            if msg.name != OTHERS_NAMESPACE:
                check_namespace(msg.name)
            return reply(M.Done(self.store.ledger.namespaces.number(msg.name)), request_id)
        except (CapacityError, UsageError) as exc:
            status = Status.NO_SPACE if isinstance(exc, CapacityError) else Status.BAD_REQUEST
            if self.store.quotas is not None and self.store.quotas.limits(msg.name):
                status = Status.OVER_QUOTA  # without a number its values are not counted
            return reply(M.Error(str(exc)), request_id, status)

    def _delete_sized(self, _session: Session, msg: M.DeleteSized) -> tuple[Any, int]:
        return M.Statuses(self.store.delete([each[0] for each in msg.entries], [each[1] for each in msg.entries])), 0

    def _keep(self, session: Session, msg: K.Keep) -> tuple[Any, int]:
        return M.Statuses(self.store.keep(msg.digests, msg.how, msg.seconds, _now_s(), session.copies)), 0

    def _locate(self, session: Session, msg: M.Locate) -> tuple[Any, int]:
        if msg.pin & ~_LOCATE_BITS:
            raise RemoteProtocolError(f"LOCATE with bits {msg.pin:#x}")
        return M.Located(self.store.locate(session if msg.pin & M.LOCATE_PIN else None, msg.digests, msg.pin)), 0

    def stats(self, *, detail: int = 0) -> dict[str, Any]:
        """Return the counters of the store and of the process; in ``detail`` also its clients."""
        store, loop, rings = self.store, self.loop, self.rings
        names = store.ledger.namespaces.names
        requests = self.requests + rings.requests - rings.frames  # handle() has counted the frames of rings
        more = claims(store.sessions.by_id.values(), names, self.tally, self.settings, detail) if detail else {}
        return store.stats() | more | {
            "pid": os.getpid(), "epoch": self.epoch, "stored_epoch": self.shards.stored, "requests": requests,
            "unreachable": self.unreachable, "mended": self._mender.mended, "ring_requests": rings.requests,
            "polled_idle_s": rings.idle_s, "namespaces": len(names), "namespaces_freed": self.sweeper.freed,
            "connections": len(loop.peers), "protocol_errors": loop.protocol_errors,
            "handler_errors": loop.handler_errors, "unauthorized": loop.unauthorized, "counted": self.tally.stats(),
        }  # fmt: skip


def _now_s() -> int:
    return boottime_ns() // 1_000_000_000


def start_worker(store: Store, settings: WorkerSettings, unix: NamedSocket, supervisor: socket.socket) -> Worker:
    """Begin to serve in a worker process, after the fork. What fails here may be due to the arena's contents."""
    worker = Worker(store, settings, Loop())
    stop_on_signals(worker.loop)
    namespaces, tokens, changes = store.ledger.namespaces, settings.tokens, QuotaChanges(store, worker.loop, DROP_S)

    def follow() -> None:
        for note in namespaces.keep(namespaces_of(tokens)):
            log.warning("%s", note)
        changes.change(quotas_of(tokens, *settings.share()))

    store.notes += namespaces.keep(namespaces_of(tokens))
    store.set_quotas(quotas_of(tokens, *settings.share()))
    for note in store.notes[:NOTES_MAX]:
        log.warning("recovery: %s", note)
    if len(store.notes) > NOTES_MAX:
        log.warning("recovery: and %d findings more", len(store.notes) - NOTES_MAX)
    worker.adopt_supervisor(supervisor)
    worker.start(unix.listener)
    worker.keep_path(unix)
    watch_tokens(worker.loop, tokens, changed=follow)
    on_reload(lambda: changes.change(quotas_of(tokens, *settings.share())))
    return worker
