"""The worker process: one arena, one event loop, RPC only.

It alone changes its arena's metadata. Everything it does is one request at a time out of its loop,
from a socket or from a session's commit ring; both go through :meth:`Worker.handle`.

Who may still touch what
------------------------
A session belongs to a process, named by the kernel (``SO_PEERCRED``), never by the peer itself, and
held by a pidfd from HELLO on, so that a reused pid is never mistaken for it. The pidfd becomes
readable when the process has ended: only then, or when the process itself says that its copies have
ended (RETURN_GRANTS, UNPIN, RELEASE_SESSIONS), are its chunks reused. A closed connection alone
proves nothing: its holds stay quarantined. Where the peer's pid is not visible (another pid namespace),
no shm path is offered and the client goes by TCP.

After a worker's death its successor finds the old sessions in the ledger. Those whose process has gone
are freed at once; for the others a pidfd is opened, and checked by the process's start time.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from . import messages as M
from .codec import OPCODES
from .constants import BATCH_KEYS_MAX
from .errors import CapacityError, RemoteProtocolError, UsageError
from .grants import Session
from .greeting import agreed_protocol
from .hashing import check_namespace
from .layout import Word
from .loop import Loop, Peer, Service
from .messages import Status
from .process import stop_on_signals
from .ring import COMING, COMING_MAX_NS, RING_BYTES, SLEEPING, SLOTS, TAIL, Ring
from .rpc import CommitOne, Frame, commit_one_of, decode, reply, reply_committed_one
from .shards import bitmap_of, shards_in
from .store import Store
from .topology import step_aside

log = logging.getLogger("simm.worker")

HEARTBEAT_S: Final = 0.1
#: A ring without work for so long is polled no more until it is kicked.
RING_IDLE_S: Final = 0.01
#: Most that the polling window grows to, times --poll-us.
POLL_GROWTH: Final = 8
#: How long after a WAKE its commit may come: the copy of the value's last MiB, on a slow machine.
WAKE_POLL_S: Final = 400e-6
#: Looks at the rings between two looks at the sockets.
_LOOKS: Final = 60

_LOCATE_BITS: Final = M.LOCATE_PIN | M.LOCATE_PREVIOUS


@dataclass
class WorkerSettings:
    """What a worker needs to know besides its arena."""

    segment: str
    poll_us: int = 50
    tokens: tuple[str, ...] = ()
    #: Uids allowed on the UNIX socket besides our own (a group's members when the segment has a group).
    any_uid: bool = False


#: Who may say so. A role is what a peer says of itself: the UNIX socket has let in none but our own uid.
_MAY_FREEZE: Final = frozenset((M.Role.STREAM, M.Role.MOVER, M.Role.SUPERVISOR))
_MAY_ADOPT: Final = frozenset((M.Role.MOVER, M.Role.SUPERVISOR))


class Link:
    """Per-connection state: its session, ring and who is at the other end."""

    __slots__ = ("pid", "ring", "ring_used", "role", "session", "uid")

    def __init__(self, pid: int, uid: int, role: int) -> None:
        self.pid = pid
        self.uid = uid
        self.role = role
        self.session: Session | None = None
        self.ring: Ring | None = None
        self.ring_used = 0.0


def process_start(pid: int) -> int:
    """The process's start time in clock ticks since boot (proc(5), stat field 22); 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


class Worker(Service):
    """Serves one store. ``listener`` and ``supervisor`` are sockets that outlive the process."""

    def __init__(self, store: Store, settings: WorkerSettings, loop: Loop) -> None:
        self.store = store
        self.settings = settings
        self.loop = loop
        self.requests = 0
        self.ring_requests = 0
        self.epoch = store.header[Word.EPOCH]
        self._links: dict[int, Peer] = {}  # by session id
        self._pidfds: dict[int, int] = {}  # pid -> pidfd
        #: The epoch of the map by which a mover copies, by its pid.
        self._movers: dict[int, int] = {}
        self._active: list[tuple[Ring, Peer]] = []
        self._poll_s = settings.poll_us / 1e6 if len(os.sched_getaffinity(0)) > 1 else 0.0
        #: A client has said that it will commit before about this time.
        self._poll_until = 0.0
        #: Ring requests whose bookkeeping is not done yet.
        self._owing = 0
        #: Until then the sockets are polled too.
        self._look_until = 0.0
        store.recall = self._recall
        self._handlers: dict[int, Callable[[Peer, Session, Any], tuple[Any, int]]] = {
            OPCODES[M.Commit]: self._commit,
            OPCODES[M.Grant]: self._grant,
            OPCODES[M.ReturnGrants]: self._return_grants,
            OPCODES[M.Delete]: self._delete,
            OPCODES[M.Locate]: self._locate,
            OPCODES[M.Unpin]: self._unpin,
            OPCODES[M.Exists]: self._exists,
            OPCODES[M.ReleaseSessions]: self._release_sessions,
        }
        loop.call_every(HEARTBEAT_S, self._beat)

    # -- life -----------------------------------------------------------------------------------

    def start(self, listener: socket.socket) -> None:
        """Begin to serve: quarantined sessions get their pidfds first."""
        for session in list(self.store.sessions.values()):
            # The pidfd first: if it is opened and the start time is right after that, it is of this very process.
            if not self._hold_pid(session.pid) or process_start(session.pid) != session.started:
                self.store.end_session(session)
                self._forget_pid(session.pid)
        self._beat()
        self.loop.listen(listener, self)
        self.store.open()

    def run(self) -> None:
        """Serve until the loop is stopped: selector and ring polling in turn.

        The polling window starts at ``--poll-us`` and adapts as halt polling in a hypervisor does: work that
        comes soon after we stopped looking doubles it, up to POLL_GROWTH times, and a long pause resets it. So
        a client that puts values of a MiB (a copy of 60 us between two commits) meets a worker that looks.
        """
        loop = self.loop
        clock = time.monotonic
        shortest = self._poll_s
        longest = shortest * POLL_GROWTH
        window = shortest
        last_work = clock()
        while loop.running:
            if not self._active:
                if self._look_until:  # a client without a ring has just put something
                    if clock() < self._look_until:
                        loop.run_once(0.0)
                        continue
                    self._look_until = 0.0
                served = self.ring_requests
                if loop.run_once(None) and (self._active or self.ring_requests != served):
                    now = clock()
                    window = min(longest, window * 2) if now - last_work < longest else shortest
                    last_work = now
                continue
            if loop.run_once(0.0):
                last_work = clock()
            for _ in range(_LOOKS):
                busy = False
                for ring, peer in self._active:
                    if ring.words[TAIL] != ring.done:
                        self._serve_ring(ring, peer)
                        busy = True
                        break  # _active may have changed
                if busy:
                    last_work = clock()
            now = clock()
            if now - last_work > window and now > self._poll_until and not self._expected(now):
                self._sleep_rings()
            elif len(self._active) > 1:
                self._retire_rings(now)

    def _expected(self, now: float) -> bool:
        """Has a client whose ring we look at said that its next commit comes about now?"""
        moment = int(now * 1e9)
        return any(0 < ring.words[COMING] - moment <= COMING_MAX_NS for ring, _ in self._active)

    def _beat(self) -> None:
        self.store.header[Word.HEARTBEAT] = (self.store.header[Word.HEARTBEAT] + 1) & 0xFFFF_FFFF

    # -- connections ------------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        pid, uid, _gid = peer.credentials()
        peer.context = Link(pid, uid, -1)
        if peer.sock.family == socket.AF_UNIX:
            peer.take_fds = True

    def adopt_supervisor(self, sock: socket.socket) -> None:
        """Serve the supervisor on a socket pair; the worker ends when it closes."""
        peer = self.loop.adopt(sock, self, "supervisor")
        peer.context.role = M.Role.SUPERVISOR

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        if frame.opcode in (M.OP_KICK, M.OP_WAKE):
            self._kick(peer, frame)
            return
        commit = commit_one_of(frame)
        session = peer.context.session
        if commit is not None and session is not None:
            self.requests += 1
            peer.send(self._commit_one(session, commit))
        else:
            peer.send(self.handle(peer, frame))
        self.store.settle()
        if frame.opcode == M.OP_COMMIT and peer.context.role == M.Role.CLIENT:
            self._look_until = time.monotonic() + self._poll_s

    def on_close(self, peer: Peer, reason: str) -> None:
        link: Link = peer.context
        if link.ring is not None:
            self._drop_ring(link.ring)
            link.ring = None
        if link.role == M.Role.SUPERVISOR:
            if self.loop.running:
                log.warning("the supervisor has gone: the worker ends")
            self.loop.stop()
        session = link.session
        if session is None:
            return
        link.session = None
        self._links.pop(session.session, None)
        log.debug("session %#x closed: %s", session.session, reason)
        self.store.close_session(session)
        self._forget_pid(session.pid)

    def handle(self, peer: Peer, frame: Frame) -> bytes:
        """The reply to one request. Raises RemoteProtocolError for what a sane peer does not send."""
        self.requests += 1
        link: Link = peer.context
        handler = self._handlers.get(frame.opcode)
        if handler is not None:
            session = link.session
            if session is None:
                raise RemoteProtocolError("the first message must be HELLO")
            self.store.now_ms = time.time_ns() // 1_000_000
            answer, status = handler(peer, session, decode(frame))
            return reply(answer, frame.request_id, status)
        msg = decode(frame)
        if isinstance(msg, M.Hello):
            return self._hello(peer, link, frame.request_id, msg)
        if isinstance(msg, M.Ping):
            return reply(M.Pong(msg.cookie), frame.request_id)
        if isinstance(msg, M.RingAttach):
            return self._ring_attach(peer, link, frame.request_id, msg)
        if isinstance(msg, M.Stats):
            return reply(M.StatsReply(json.dumps(self.stats()).encode()), frame.request_id)
        if isinstance(msg, M.Shards) and link.role == M.Role.SUPERVISOR:
            return self._shards(frame.request_id, msg)
        if isinstance(msg, M.Freeze) and link.role in _MAY_FREEZE:
            return self._freeze(frame.request_id, msg)
        if isinstance(msg, M.Adopt | M.Finish) and link.role in _MAY_ADOPT:
            return self._adopt(link, frame.request_id, msg)
        raise RemoteProtocolError(f"{type(msg).__name__} is not for a worker")

    # -- sessions -----------------------------------------------------------------------------------

    def _hello(self, peer: Peer, link: Link, request_id: int, msg: M.Hello) -> bytes:
        def refuse(status: Status, text: str) -> bytes:
            return reply(M.Error(text), request_id, status)

        if link.session is not None:
            raise RemoteProtocolError("a second HELLO on one connection")
        proto, text = agreed_protocol(msg, "worker")
        if not proto:
            return refuse(Status.VERSION, text)
        if link.uid not in (os.geteuid(), 0) and not self.settings.any_uid:
            return refuse(Status.UNAUTHORIZED, f"uid {link.uid} may not use this worker (started by {os.geteuid()})")
        try:
            check_namespace(msg.namespace)
            if not link.pid or not self._hold_pid(link.pid):
                return refuse(
                    Status.UNAVAILABLE, "your process is not visible here (another pid namespace): use the TCP path"
                )
            session = self.store.open_session(link.pid, process_start(link.pid), msg.namespace)
        except (CapacityError, UsageError) as exc:
            return refuse(Status.NO_SPACE if isinstance(exc, CapacityError) else Status.BAD_REQUEST, str(exc))
        link.session = session
        link.role = M.Role.CLIENT if msg.role == M.Role.SUPERVISOR else msg.role
        if link.role == M.Role.MOVER:
            session.copies = self._movers.get(link.pid, 0)
        self._links[session.session] = peer
        welcome = M.Welcome(
            proto, session.namespace, M.PathBit.SHM | M.PathBit.TCP, 0, session.session, self.store.incarnation,
            self.store.granted_bytes_max, self.settings.segment,
        )  # fmt: skip
        return reply(welcome, request_id)

    def _hold_pid(self, pid: int) -> bool:
        """Open a pidfd for a process, once; False when it is gone."""
        if pid in self._pidfds:
            return True
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._pidfds[pid] = fd
        self.loop.watch(fd, lambda _mask: self._process_ended(pid))
        return True

    def _process_ended(self, pid: int) -> None:
        """The kernel says so: nobody writes into this process's grants any more."""
        for session in [s for s in self.store.sessions.values() if s.pid == pid]:
            peer = self._links.get(session.session)
            if peer is not None:
                peer.close("process ended")  # a forked child may still hold the socket
            self.store.end_session(session)
        self._forget_pid(pid)

    def _forget_pid(self, pid: int) -> None:
        if any(s.pid == pid for s in self.store.sessions.values()):
            return
        self._movers.pop(pid, None)
        fd = self._pidfds.pop(pid, -1)
        if fd >= 0:
            self.loop.unwatch(fd)
            os.close(fd)

    def _release_of(self, session: Session, numbers: list[int]) -> int:
        """End old sessions of the same process; how many. It says that nothing of its touches their chunks."""
        ended = 0
        for number in numbers:
            old = self.store.sessions.get(number)
            if old is None or old is session or old.pid != session.pid or old.started != session.started:
                continue
            peer = self._links.get(number)
            if peer is not None:
                peer.close("released by its successor")  # its end has not reached us, or a forked child holds it open
            self.store.end_session(old)
            ended += 1
        return ended

    def _recall(self, session: Session, wanted: int) -> None:
        peer = self._links.get(session.session)
        if peer is not None:
            peer.push(M.Recall(wanted))

    # -- requests -------------------------------------------------------------------------------------

    def _commit_one(self, session: Session, commit: CommitOne) -> bytes:
        """The reply to a COMMIT of one entry and one want, by ring or socket."""
        store = self.store
        entry, want, count, request_id = commit
        if count > BATCH_KEYS_MAX:
            _check_wants([(want, count)])
        store.now_ms = time.time_ns() // 1_000_000
        (status,) = store.commit(session, (entry,))
        if count:
            store.want(session, want, count)
        return reply_committed_one(status, request_id, store.take_prepared(session))

    def _commit(self, _peer: Peer, session: Session, msg: M.Commit) -> tuple[Any, int]:
        store = self.store
        _check_wants(msg.wants)
        statuses = store.commit(session, msg.entries)
        for size, count in msg.wants:
            store.want(session, size, count)
        return M.Committed(statuses, store.take_prepared(session)), 0

    def _grant(self, _peer: Peer, session: Session, msg: M.Grant) -> tuple[Any, int]:
        _check_wants(msg.wants)
        self.store.settle()
        grants = self.store.take_prepared(session)
        for size, count in msg.wants:
            got = self.store.grant(session, size, count)
            grants += got
            if len(got) < count:
                return M.Granted(grants), int(Status.NO_SPACE)
        return M.Granted(grants), 0

    def _return_grants(self, _peer: Peer, session: Session, msg: M.ReturnGrants) -> tuple[Any, int]:
        return M.Done(self.store.return_grants(session, msg.grants)), 0

    def _delete(self, _peer: Peer, _session: Session, msg: M.Delete) -> tuple[Any, int]:
        return M.Statuses(self.store.delete(msg.digests)), 0

    def _locate(self, _peer: Peer, session: Session, msg: M.Locate) -> tuple[Any, int]:
        if msg.pin & ~_LOCATE_BITS:
            raise RemoteProtocolError(f"LOCATE with bits {msg.pin:#x}")
        return M.Located(self.store.locate(session if msg.pin & M.LOCATE_PIN else None, msg.digests, msg.pin)), 0

    def _unpin(self, _peer: Peer, session: Session, msg: M.Unpin) -> tuple[Any, int]:
        return M.Done(self.store.unpin(session, msg.pins)), 0

    def _exists(self, _peer: Peer, _session: Session, msg: M.Exists) -> tuple[Any, int]:
        return M.Statuses(self.store.exists(msg.digests)), 0

    def _release_sessions(self, _peer: Peer, session: Session, msg: M.ReleaseSessions) -> tuple[Any, int]:
        return M.Done(self._release_of(session, msg.sessions)), 0

    def _shards(self, request_id: int, msg: M.Shards) -> bytes:
        if not msg.since and not msg.roles:
            self.store.fence()
            log.warning("the manager does not know us: no mutation is accepted until the next map")
            return reply(M.Done(0), request_id)
        try:
            count = self.store.set_shards(msg.epoch, msg.since, msg.roles)
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        self.epoch = msg.epoch
        log.info("epoch %d: %d shards are mine", msg.epoch, count)
        return reply(M.Done(count), request_id)

    # -- moving shards --------------------------------------------------------------------------------

    def _freeze(self, request_id: int, msg: M.Freeze) -> bytes:
        try:
            frozen = self.store.freeze(msg.epoch, shards_in(msg.shards))
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        if frozen is None:
            return reply(
                M.Error(f"a shard is mine by a newer map than that of epoch {msg.epoch}"),
                request_id, Status.WRONG_OWNER,
            )  # fmt: skip
        log.info("epoch %d: %d shards frozen for their new owner", msg.epoch, len(frozen))
        return reply(M.Frozen(bitmap_of(frozen)), request_id)

    def _adopt(self, link: Link, request_id: int, msg: M.Adopt | M.Finish) -> bytes:
        """ADOPT and FINISH. A mover may say by several sessions; what it is told holds for all of them."""
        store = self.store
        try:
            shards = shards_in(msg.shards)
            if isinstance(msg, M.Finish):
                return reply(M.Done(store.finish(msg.epoch, shards)), request_id)
            count = store.adopt(msg.epoch, shards, shards_in(msg.fallback))
        except UsageError as exc:
            raise RemoteProtocolError(str(exc)) from None
        if link.role == M.Role.MOVER:
            self._movers[link.pid] = msg.epoch
            for session in store.sessions.values():
                if session.pid == link.pid and not session.closed:
                    session.copies = msg.epoch
        log.info("epoch %d: %d of %d shards adopted", msg.epoch, count, len(shards))
        return reply(M.Done(count), request_id)

    def stats(self) -> dict[str, Any]:
        """The store's counters and the process's own."""
        stats = self.store.stats()
        stats.update(
            pid=os.getpid(),
            epoch=self.epoch,
            requests=self.requests,
            ring_requests=self.ring_requests,
            connections=len(self.loop.peers),
            protocol_errors=self.loop.protocol_errors,
            handler_errors=self.loop.handler_errors,
        )
        return stats

    # -- rings ------------------------------------------------------------------------------------------

    def _ring_attach(self, peer: Peer, link: Link, request_id: int, msg: M.RingAttach) -> bytes:
        if link.session is None or link.ring is not None or msg.bytes != RING_BYTES or len(peer.fds) != 1:
            raise RemoteProtocolError("RING_ATTACH needs a session without a ring, the right size and one descriptor")
        fd = peer.fds.pop()
        try:
            ring = Ring.attach(fd)
        finally:
            os.close(fd)
        peer.take_fds = False
        link.ring = ring
        ring.words[SLEEPING] = 1
        return reply(M.Done(1), request_id)

    def _kick(self, peer: Peer, frame: Frame) -> None:
        link: Link = peer.context
        msg = decode(frame)
        if isinstance(msg, M.Wake) and self._poll_s:
            step_aside(msg.cpu)
            self._poll_until = time.monotonic() + WAKE_POLL_S
        ring = link.ring
        if ring is None:
            if frame.opcode == M.OP_WAKE:
                return
            raise RemoteProtocolError("KICK without a ring")
        if self._poll_s and all(ring is not other for other, _ in self._active):
            ring.words[SLEEPING] = 0  # at once: or who posts while we serve what is there wakes us once more
            self._active.append((ring, peer))
        for _ in range(SLOTS):  # all that was there when the kick was sent; who posts on and on has to wait
            if ring.words[TAIL] == ring.done:
                break
            self._serve_ring(ring, peer)
            if peer.closed:
                return
        if frame.opcode == M.OP_KICK:
            peer.send_message(M.Done(ring.done & 0xFFFF_FFFF), frame.request_id)

    def _serve_ring(self, ring: Ring, peer: Peer) -> None:
        """Serve the ring's next request; its bookkeeping comes after its answer."""
        link: Link = peer.context
        try:
            commit = ring.next_commit()
            if commit is not None and (session := link.session) is not None:
                ring.answer(self._commit_one(session, commit))
            elif (frame := ring.next_request()) is not None:
                ring.answer(self.handle(peer, frame))
            else:
                return
            self.ring_requests += 1
            link.ring_used = self.loop.now
            # A batch's next frame is not kept waiting by the bookkeeping of the one before (32 keys: 150 us instead
            # of 178), but by no more than that.
            self._owing += 1
            if ring.words[TAIL] == ring.done or self._owing >= SLOTS:
                self._owing = 0
                self.store.settle()
        except RemoteProtocolError as exc:
            log.warning("closing %s: %s", peer.address, exc)
            self.loop.protocol_errors += 1
            peer.close(str(exc))
        except Exception:
            log.exception("a ring request of %s failed", peer.address)
            self.loop.handler_errors += 1
            peer.close("internal error")

    def _sleep_rings(self) -> None:
        """Stop polling: raise the flags, look once more, and serve what came in between."""
        active, self._active = self._active, []
        for ring, _ in active:
            ring.words[SLEEPING] = 1
        for ring, peer in active:
            if not peer.closed and ring.words[TAIL] != ring.done:
                self._serve_ring(ring, peer)
                if not peer.closed:
                    ring.words[SLEEPING] = 0
                    self._active.append((ring, peer))

    def _retire_rings(self, now: float) -> None:
        """Of many rings, poll only those in use."""
        for ring, peer in list(self._active):
            if now - peer.context.ring_used > RING_IDLE_S:
                ring.words[SLEEPING] = 1
                if ring.words[TAIL] == ring.done:
                    self._drop_ring(ring, close=False)

    def _drop_ring(self, ring: Ring, *, close: bool = True) -> None:
        self._active = [(other, peer) for other, peer in self._active if other is not ring]
        if close:
            ring.close()


def _check_wants(wants: list[tuple[int, int]]) -> None:
    """A request's work and its answer's size are bounded. Raises RemoteProtocolError."""
    count = sum(count for _, count in wants)
    if count > BATCH_KEYS_MAX or len(wants) > BATCH_KEYS_MAX:
        raise RemoteProtocolError(f"{count} grants in one request, {BATCH_KEYS_MAX} are allowed")


def run_worker(store: Store, settings: WorkerSettings, listener: socket.socket, supervisor: socket.socket) -> None:
    """Body of a worker process, after the fork: serve until SIGTERM or until the supervisor has gone."""
    loop = Loop()
    worker = Worker(store, settings, loop)
    stop_on_signals(loop)
    for note in store.notes:
        log.warning("recovery: %s", note)
    worker.adopt_supervisor(supervisor)
    worker.start(listener)
    worker.run()
    loop.close()
