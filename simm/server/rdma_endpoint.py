"""An endpoint process: RDMA clients on other hosts connect to it to use one worker's arena.

It registers the arena, connects queue pairs, grants chunks and passes commits on. Values never pass through it: clients
read and write them one-sidedly. It is a separate process for three reasons. Registering holds the interpreter for
seconds. A fault inside a verbs library must end neither the worker nor the stream. And registered memory outlives the
worker, so reads continue during its restart.

A client's connection starts with HELLO, RDMA_OPEN, and RDMA_CONNECT for each pair of rails. GRANT, COMMIT and
RETURN_GRANTS follow as at a worker. The server's end is a *lease* (``server/rdma_lease.py``), which ends with its TCP
connection.

Who may still write where
-------------------------
A WRITE arrives without involving any program here. Its client may have been declared dead minutes ago, or have a bug.
So a chunk changes hands only after the device itself refuses late WRITEs. docs/architecture.md ("Fencing") lists the
cases, ``server/rdma_lease.py`` has the order of the steps. This file adds three rules:

* If windows cannot be invalidated, the endpoint closes the lease, and commits nothing.
* When the worker dies, queue pairs and leased grants stay. In the next session these grants count as copies in flight
  (``ipc/session.py``) until the leases release them, so the new worker does not reuse their chunks. A commit of such a
  grant gets STALE_GRANT, as nothing was done, and the client asks again.
* TCP keepalive finds a client that vanished within 90 s (``loop.tune``). The grants that it holds until then are
  bounded.

Limits
------
A client names grants by id. Only ids of its own lease count, each once. Grants are bounded per lease and in total, at
three quarters of what all sessions may hold. Idle leases are asked to return theirs, and so are all leases when the
worker recalls grants. A device that is missing or breaks only costs leases: RDMA_OPEN is answered with the reason.

A commit costs one blocking exchange with the worker, by a ring. A grant costs one bind and one invalidation per queue
pair. The bind happens after the answer has left, as new grants come with the next answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..arena.marks.near import COMMIT_NEAR
from ..arena.sessions import RECALL_AGAIN_MS, check_wants, power_below
from ..config.tokens import Token
from ..constants import OTHERS_NAMESPACE, OTHERS_REFUSED, VALUE_BYTES_MAX
from ..errors import NotSentError, RemoteProtocolError, SimmError, TransportError
from ..ipc.answer_wait import HungUp, committed
from ..ipc.grant_pool import obtain_many, return_all, return_idle
from ..ipc.session import WorkerSession
from ..ipc.tally import Served
from ..net.channel import Refused
from ..net.local_users import LocalUsers
from ..net.loop import Loop
from ..net.peer import Peer, Service
from ..net.process import stop_on_signals
from ..net.tls_peer import ServerTls, accepting
from ..net.token_watch import watch_tokens
from ..rdma.api import Absence, Fabric, FabricError
from ..rpc import Frame, decode
from ..slab import chunk_bytes_for
from ..wire import messages as M
from ..wire import rdma_messages as R
from ..wire.auth import Gate
from ..wire.hello import FOR_MANAGERS, NOT_A_MANAGER, Refusal, accept, check_opening
from ..wire.messages import Status
from .rdma_devices import PIECE_BYTES, ArenaRegions, Devices
from .rdma_lease import Connects, LeasedGrant, NoWindows, RdmaLease
from .requests.tracing import Traced, opened
from .worker_session import WorkerSessionKeeper

log = logging.getLogger("simm.server.rdma_endpoint")

MAINTAIN_S: Final = 0.1
CONNECTIONS_MAX: Final = 4096
#: Percentage of all sessions' grants that all leases together may hold, and the fraction of it for a single lease.
GRANTED_PERCENT: Final = 75
LEASE_SHARE: Final = 4
LEASE_BYTES_MAX: Final = 128 << 20
#: A lease that is idle for this long is asked for its grants; without any client request the pool is returned.
IDLE_S: Final = 5.0
#: What clients still hold of a session that has ended is taken back after this, seconds. The worker frees nothing of it
#: before.
FORMER_S: Final = 2.0
#: Grants in one answer: with a key for each of a lease's queue pairs they fill a quarter of a frame.
ANSWER_GRANTS_MAX: Final = 1024

_COUNTS: Final = (
    "connections_opened", "connections_broken", "commits", "commit_failures", "stale_commits", "recalls",
)  # fmt: skip


class Endpoint(Service):
    """Serves leases to the arena of the worker at ``uds``. See :class:`Devices` for the other arguments."""

    read_bytes = 64 << 10
    hello_first = True

    def __init__(
        self, loop: Loop, uds: str, open_fabric: Callable[[], Fabric | Absence], tokens: Sequence[Token] = (), *,
        windows: bool = True, piece_bytes: int = PIECE_BYTES, server: str = "", users: LocalUsers | None = None,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.keeper = WorkerSessionKeeper(uds, ring=True)
        self.tokens = tokens
        self.users = users
        #: Whom clients want to speak with: see wire/auth.py.
        self.server = server
        self.devices = Devices(
            loop, self.keeper, open_fabric, windows=windows, piece_bytes=piece_bytes, on_lost=self._on_lost
        )
        self.connects = Connects(loop, self.devices)
        #: Why the process has to end; None as long as it has not.
        self.failed: str | None = None
        self.leases: set[Peer] = set()
        self.granted_bytes = 0
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.counted = Served(self.keeper.names)
        #: When a client last sent a frame, and whether the session's idle grants were returned since.
        self._last_seen = 0.0
        self._returned = True
        #: The session that was seen last, and when grants of those before it are taken back; 0 when that is done.
        self._session: WorkerSession | None = None
        self._former_at = 0.0
        loop.call_later(0.0, self._maintain)
        loop.call_every(MAINTAIN_S, self._maintain)

    # -- the devices ------------------------------------------------------------------------------

    def _on_lost(self, why: str) -> None:
        for peer in list(self.leases):
            peer.close(why)

    def _end(self, why: str) -> None:
        """End this process, as only that ensures that nothing is written any more."""
        log.error("the endpoint ends: %s", why)
        self.failed = self.failed or why
        self.loop.stop()

    # -- connections ------------------------------------------------------------------------------

    def on_connect(self, peer: Peer) -> None:
        peer.context = lease = RdmaLease(Gate(M.Service.ENDPOINT, self.tokens, self.server))
        lease.last_seen = self.loop.now
        if self.users is not None:
            self.users.check(peer)

    def adopt_supervisor(self, sock: socket.socket) -> None:
        """Answer the supervisor on a socket pair; the endpoint ends when it closes."""
        peer = self.loop.adopt(sock, self, "supervisor")
        peer.patient = True
        peer.context = lease = RdmaLease(Gate(M.Service.ENDPOINT, ()))
        lease.role = M.Role.SUPERVISOR

    def on_close(self, peer: Peer, reason: str) -> None:
        lease: RdmaLease = peer.context
        self.leases.discard(peer)
        if lease.role == M.Role.SUPERVISOR:
            self.loop.stop()
        granted = lease.granted_bytes
        try:
            leased_grants = lease.close()
        except Exception as exc:  # of any kind: no chunk is reused while a queue pair may exist
            self._end(f"a queue pair cannot be destroyed: {exc!r}")
            return
        self.granted_bytes -= granted
        self._return_leased(leased_grants)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        lease: RdmaLease = peer.context
        lease.last_seen = self.loop.now
        if lease.role != M.Role.SUPERVISOR:  # the supervisor polls, and is no client
            self._last_seen = self.loop.now
            self._returned = False
        lease.recalled = False
        if frame.opcode in FOR_MANAGERS:
            peer.send_error(frame.request_id, M.Status.BAD_REQUEST, NOT_A_MANAGER)
            peer.close(NOT_A_MANAGER)
            return
        if lease.role is None:
            check_opening(frame)
        elif fault := lease.gate.refusal(frame.opcode):
            peer.refuse(frame.request_id, fault)
            return
        msg = decode(frame)
        try:
            if isinstance(msg, Traced):
                msg, peer = opened(peer, frame.request_id, msg)
            if isinstance(msg, M.Commit):
                self._commit(peer, lease, frame.request_id, msg)
            elif isinstance(msg, M.Grant):
                self._grant(peer, lease, frame.request_id, msg)
            elif isinstance(msg, M.ReturnGrants):
                self._return(peer, lease, frame.request_id, msg)
            elif isinstance(msg, R.RdmaOpen):
                self._open_lease(peer, lease, frame.request_id)
            elif isinstance(msg, R.RdmaConnect):
                self._connect(peer, lease, frame.request_id, msg)
            elif isinstance(msg, R.RdmaDisconnect):
                peer.send_message(M.Done(int(lease.disconnect(msg.link))), frame.request_id)
            elif isinstance(msg, M.Hello):
                self._hello(peer, lease, frame.request_id, msg)
            elif isinstance(msg, M.Auth | M.Prove):
                peer.send_verdict(*lease.gate.take(msg), frame.request_id)
            elif isinstance(msg, M.Ping):
                peer.send_message(M.Pong(msg.cookie), frame.request_id)
            elif isinstance(msg, M.Stats):
                found = self.stats() if lease.role != M.Role.SUPERVISOR else self.stats_for_supervisor()
                peer.send_message(M.StatsReply(json.dumps(found).encode()), frame.request_id)
            else:
                raise RemoteProtocolError(f"{type(msg).__name__} is not for an endpoint")
        except FabricError as exc:
            self._broken(peer, str(exc))

    def _broken(self, peer: Peer, why: str) -> None:
        self.counts["connections_broken"] += 1
        log.warning("closing the lease of %s: %s", peer.address, why)
        peer.close(f"a queue pair broke: {why}")

    def _hello(self, peer: Peer, lease: RdmaLease, request_id: int, msg: M.Hello) -> None:
        if lease.role is not None:
            raise RemoteProtocolError("a second HELLO on one connection")
        proto = accept(msg, "server", lease.gate)
        if isinstance(proto, Refusal):
            peer.refuse(request_id, proto.text, proto.status)
            return
        if msg.namespace == OTHERS_NAMESPACE:
            peer.refuse(request_id, OTHERS_REFUSED, Status.BAD_REQUEST)
            return
        if lease.gate.bound:
            text = f"{lease.gate.token} is bound to namespaces, and RDMA reads the whole arena: use TCP"
            peer.refuse(request_id, text)
            return
        reader = self.keeper.arena()
        # Exactly, as one-sided reads see no header: before its first map an arena may yet become another cluster's.
        if msg.cluster and (reader is None or reader.cluster != msg.cluster):
            text = f"this server is not of cluster {msg.cluster:016x}, or not yet"
            peer.send_error(request_id, Status.OTHER_CLUSTER, text)
            return
        lease.role, lease.namespace = M.Role.CLIENT, msg.namespace
        peer.admit()
        peer.send_message(M.Welcome(proto, 0, M.PathBit.RDMA | M.PathBit.TRACE, 0, 0, 0, 0, ""), request_id)

    def _open_lease(self, peer: Peer, lease: RdmaLease, request_id: int) -> None:
        devices = self.devices
        registration = devices.registration
        if (reason := devices.reason) or registration is None:
            peer.send_error(request_id, Status.UNAVAILABLE, reason)
            return
        if not lease.opened:
            lease.opened = True
            lease.windows = devices.windows
            self.leases.add(peer)
            self.counts["connections_opened"] += 1
        rails = [R.RdmaRail(rail.gid, rail.lid, rail.mtu, rail.limits.reads, rail.name) for rail in registration.rails]
        arena = registration.arena
        flags = R.RDMA_WINDOWS if registration.windows else 0
        peer.send_message(
            R.RdmaOpened(arena.geometry.size, arena.incarnation, flags, rails, registration.regions), request_id
        )

    def _opened(self, lease: RdmaLease, msg: Any) -> ArenaRegions:
        registration = self.devices.registration
        if not lease.opened or registration is None:
            raise RemoteProtocolError(f"{type(msg).__name__} before RDMA_OPEN")
        return registration

    def _connect(self, peer: Peer, lease: RdmaLease, request_id: int, msg: R.RdmaConnect) -> None:
        rails = self._opened(lease, msg).rails
        if msg.rail >= len(rails):
            raise RemoteProtocolError(f"RDMA_CONNECT to rail {msg.rail} of {len(rails)}")
        self.connects.add(peer, lease, rails[msg.rail], request_id, msg)

    # -- grants -----------------------------------------------------------------------------------

    def _obtain(self, lease: RdmaLease, wants: Sequence[tuple[int, int]]) -> bool:
        """Put grants into ``lease.prepared``; return whether there are as many as wanted.

        Raises FabricError: close the lease then.
        """
        session = self.keeper.worker()
        if session is None or not self.devices.has(session.reader):  # the lease ends with the next upkeep
            return False
        enough = True
        old = len(lease.prepared)
        short_of = VALUE_BYTES_MAX + 1  # no want of so many bytes is tried: see SessionTable.grant_each()
        for size, count in wants:
            if size >= short_of:
                continue
            chunk = chunk_bytes_for(size)
            allowed = min(count, self._room(lease, session, chunk))
            try:
                grants = obtain_many(session, size, allowed)
                if not grants and (allowed or old) and self._free_unused(lease, session, old, chunk):
                    old = 0
                    if self._room(lease, session, chunk):
                        grants = obtain_many(session, size, 1)
            except FabricError:
                raise
            except TransportError as exc:
                log.warning("no grants: %s", exc)
                return False
            if grants:
                before = lease.granted_bytes
                try:
                    lease.hold(session, grants)
                except NoWindows as exc:
                    log.warning("%s", exc)
                    self.keeper.return_grants(session, grants)
                    return False
                finally:
                    self.granted_bytes += lease.granted_bytes - before
            if len(grants) < count:
                enough, short_of = False, power_below(size)
                log.debug(
                    "%d of %d chunks of %d bytes: %d allowed, the lease has %d bytes, all have %d",
                    len(grants), count, chunk, allowed, lease.granted_bytes, self.granted_bytes,
                )  # fmt: skip
                if not grants or allowed < count:
                    self._recall(chunk * (count - len(grants)), lease)
        return enough

    def _free_unused(self, lease: RdmaLease, session: WorkerSession, old: int, chunk: int) -> bool:
        """Free unused grants of other sizes so that their slabs can be reassigned; return True if there were any.

        Revokes the first ``old`` prepared grants and returns the session's idle ones, unless a prepared grant already
        has the requested size. Raises FabricError: close the lease then.
        """
        prepared = lease.prepared[:old]
        if any(leased.chunk == chunk for leased in prepared):
            return False
        self._revoke(lease, prepared)
        return return_idle(session) > 0 or bool(prepared)

    def _room(self, lease: RdmaLease, session: WorkerSession, chunk: int) -> int:
        """Return how many more such chunks the lease may hold; at least one if it has none."""
        total = session.welcome.grant_bytes_max * GRANTED_PERCENT // 100
        mine = min(total // LEASE_SHARE, LEASE_BYTES_MAX) - lease.granted_bytes
        room = min(mine, total - self.granted_bytes) // chunk
        return max(room, 0 if lease.granted_bytes else 1)

    def _answer(self, peer: Peer, lease: RdmaLease, request_id: int, statuses: list[int], status: int = 0) -> None:
        taken = lease.take_prepared(ANSWER_GRANTS_MAX)
        granted = R.RdmaGranted(statuses, [leased.grant for leased in taken], lease.keys(taken))
        peer.send_message(granted, request_id, status=status)

    def _grant(self, peer: Peer, lease: RdmaLease, request_id: int, msg: M.Grant) -> None:
        self._opened(lease, msg)
        check_wants(msg.wants)
        enough = self._obtain(lease, msg.wants)
        if not enough and not lease.prepared and self.keeper.worker() is None:
            peer.send_error(request_id, Status.UNAVAILABLE, "the worker is down")
            return
        self._answer(peer, lease, request_id, [], 0 if enough else Status.NO_SPACE)

    def _commit(self, peer: Peer, lease: RdmaLease, request_id: int, msg: M.Commit) -> None:
        self._opened(lease, msg)
        check_wants(msg.wants)
        if any(entry[5] for entry in msg.entries):
            raise RemoteProtocolError("COMMIT with an option, which only movers have")
        if peer.gave_up(self.loop.now):  # the client may have put newer values elsewhere since
            peer.close("the client gave up")
            return
        try:
            session = self.keeper.worker_for(peer)
        except HungUp as exc:
            peer.close(str(exc))
            return
        options = refused = 0
        try:
            options = self.keeper.options_of(lease.namespace, bound=False)
        except Refused as exc:  # whatever it is, no other namespace may have the values
            refused = exc.status
        statuses = [Status.STALE_GRANT] * len(msg.entries)
        #: By id, so that an id that is named twice is spent by the first.
        spent: dict[int, LeasedGrant] = {}
        entries, positions = [], []
        for position, entry in enumerate(msg.entries):
            leased = lease.grants.get(entry[1])
            if leased is None or leased.number in spent:
                continue
            spent[leased.number] = leased
            if leased.session is session:
                entries.append((*entry[:4], entry[4] & ~COMMIT_NEAR, options))  # near copies come by no network
                positions.append(position)
        leased_grants = list(spent.values())
        lease.fence(leased_grants)
        if peer.hung_up():  # once more: a device may take its time
            peer.close("the client gave up")
            return
        self._remove(lease, leased_grants)
        if entries and session is not None and refused:
            session.pool.add([leased.grant for leased in leased_grants if leased.session is session])
            for position in positions:
                statuses[position] = refused
        elif entries and session is not None:
            for position in positions:
                statuses[position] = Status.UNAVAILABLE
            asked = M.Commit(entries, self._ahead(lease, session, msg.wants))
            try:
                committed(session, self.keeper.mutate(session, asked, peer), positions, statuses)
            except TransportError as exc:
                log.warning("commit of %d values: %s", len(entries), exc)
                if isinstance(exc, NotSentError):
                    session.pool.add([leased.grant for leased in leased_grants if leased.session is session])
                if isinstance(exc, HungUp):  # before its chunks come back: without windows it might still write there
                    peer.close(str(exc))
        good = statuses.count(0)
        self.counts["commits"] += good
        self.counts["stale_commits"] += statuses.count(Status.STALE_GRANT)
        self.counts["commit_failures"] += len(statuses) - good
        self.counted.stored(lease.namespace, statuses, [entry[2] for entry in msg.entries])
        if lease.closed:
            return
        self._answer(peer, lease, request_id, statuses)
        if msg.wants and not lease.closed:
            self._obtain(lease, msg.wants)

    def _ahead(self, lease: RdmaLease, session: WorkerSession, wants: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the grants to prefetch: enough to serve the same request again after this one.

        The worker prepares them after this answer, and they arrive with the next one. So a client that sends batch
        after batch never waits for grants.
        """
        found = []
        for size, count in wants:
            chunk = chunk_bytes_for(size)
            allowed = min(count, self._room(lease, session, chunk))
            lacking = session.pool.prefetch_count(chunk, allowed)
            if lacking:
                found.append((size, lacking))
        return found

    def _return(self, peer: Peer, lease: RdmaLease, request_id: int, msg: M.ReturnGrants) -> None:
        self._opened(lease, msg)
        leased_grants = [lease.grants[number] for number in dict.fromkeys(msg.grants) if number in lease.grants]
        self._revoke(lease, leased_grants)
        peer.send_message(M.Done(len(leased_grants)), request_id)

    def _revoke(self, lease: RdmaLease, leased_grants: list[LeasedGrant]) -> None:
        """Revoke grants of a lease. Raises FabricError: close the lease then."""
        lease.fence(leased_grants)
        self._remove(lease, leased_grants, spent=False)

    def _remove(self, lease: RdmaLease, leased_grants: list[LeasedGrant], *, spent: bool = True) -> None:
        """Remove fenced grants from a lease."""
        before = lease.granted_bytes
        lease.forget(leased_grants)
        self.granted_bytes += lease.granted_bytes - before
        if spent:
            for leased in leased_grants:
                leased.session.end_copy()
        else:
            self._return_leased(leased_grants)

    def _return_leased(self, leased_grants: list[LeasedGrant]) -> None:
        """Return grants that no client can write into to the worker. Those of ended sessions are only uncounted."""
        session = self.keeper.session
        if session is not None and not session.broken:
            self.keeper.return_grants(session, [each.grant for each in leased_grants if each.session is session])
        for leased in leased_grants:
            leased.session.end_copy()

    # -- upkeep -----------------------------------------------------------------------------------

    def _maintain(self) -> None:
        recalled = self.keeper.maintain()
        try:
            self.devices.maintain(bool(self.leases))
        except FabricError as exc:
            self._end(f"devices cannot be closed: {exc}")
            return
        now = self.loop.now
        for peer in list(self.leases):
            lease: RdmaLease = peer.context
            if lease.broken:
                self._broken(peer, lease.broken)
            elif lease.granted_bytes and not lease.recalled and now - lease.last_seen > IDLE_S:
                lease.recalled = True
                self._ask_for_grants(peer, lease, lease.granted_bytes)
        session = self.keeper.session
        if session is None or session.broken:
            return
        self._take_back(session)
        if recalled:
            self._recall(recalled)
        if not self._returned and now - self._last_seen > IDLE_S:
            self._returned = True
            with contextlib.suppress(TransportError):
                return_all(session)

    def _take_back(self, session: WorkerSession) -> None:
        """Ask clients for their grants when there is another session, and take those of former ones back later.

        The former sessions are released when nobody holds anything of them.
        """
        if self._session is not session:
            self._session, self._former_at = session, self.loop.now + FORMER_S
            for peer in list(self.leases):
                if peer.context.granted_bytes:
                    self._ask_for_grants(peer, peer.context, peer.context.granted_bytes)
        elif self._former_at and self.loop.now >= self._former_at:
            self._former_at = 0.0
            for peer in list(self.leases):
                lease: RdmaLease = peer.context
                former = [leased for leased in lease.leased_grants() if leased.session is not session]
                if former and lease.windows is None:
                    peer.close("it holds grants of a session that has ended")  # only that keeps it from writing there
                elif former:
                    try:
                        self._revoke(lease, former)
                    except FabricError as exc:
                        self._broken(peer, str(exc))

    def _recall(self, wanted: int, asking: RdmaLease | None = None) -> None:
        """Ask leases for about this many bytes of grants, the greatest holders first, none again at once."""
        others = [peer for peer in self.leases if peer.context is not asking and peer.context.granted_bytes]
        for peer in sorted(others, key=lambda peer: -int(peer.context.granted_bytes)):
            if wanted <= 0:
                return
            lease: RdmaLease = peer.context
            if self.loop.now - lease.recalled_at < RECALL_AGAIN_MS / 1000:
                continue
            asked = min(wanted, lease.granted_bytes)
            wanted -= asked
            self._ask_for_grants(peer, lease, asked)

    def _ask_for_grants(self, peer: Peer, lease: RdmaLease, wanted: int) -> None:
        """Revoke the grants that the client does not know of yet, and ask it for the rest."""
        lease.recalled_at = self.loop.now
        before = lease.granted_bytes
        try:
            self._revoke(lease, list(lease.prepared))
        except FabricError as exc:
            self._broken(peer, str(exc))
            return
        wanted = min(wanted - (before - lease.granted_bytes), lease.granted_bytes)
        if wanted > 0:
            self.counts["recalls"] += 1
            peer.push(M.Recall(wanted))

    def stats(self) -> dict[str, Any]:
        """Return the counters of this process."""
        registration, windows = self.devices.registration, self.devices.windows
        return {
            "pid": os.getpid(),
            "ready": self.devices.down_reason is None,
            "reason": self.devices.down_reason or "",
            "rdma_connections": len(self.leases),
            "queue_pairs": sum(peer.context.queue_pair_count for peer in self.leases),
            "connections": len(self.loop.peers),
            "granted_bytes": self.granted_bytes,
            "registered_bytes": registration.done_bytes if registration is not None else 0,
            "to_register_bytes": registration.total_bytes if registration is not None else 0,
            "rails": [rail.name for rail in registration.rails] if registration is not None else [],
            "windows": windows.made if windows is not None else 0,
            "protected": windows is not None,
            "opens_failed": self.devices.opens_failed,
            "protocol_errors": self.loop.protocol_errors,
            "handler_errors": self.loop.handler_errors,
            "unauthorized": self.loop.unauthorized,
            **self.counts,
        }

    def stats_for_supervisor(self) -> dict[str, Any]:
        """Return :meth:`stats` with the counters by namespace: whose they are, not all clients may know."""
        return {**self.stats(), "counted": self.counted.as_json()}

    def close(self) -> None:
        """Return all grants and close the devices. The loop, and with it all leases, has been closed."""
        self.keeper.close()
        self.devices.close()


def run_endpoint(
    listener: socket.socket, uds: str, supervisor: socket.socket, open_fabric: Callable[[], Fabric | Absence],
    tokens: Sequence[Token] = (), *, windows: bool = True, server: str = "", tls: ServerTls | None = None,
    users: LocalUsers | None = None,
) -> None:  # fmt: skip
    """Run an endpoint process, after the fork, until SIGTERM or until the supervisor has gone.

    Raises SimmError when the process must end at once, because a queue pair cannot be destroyed.
    """
    loop = Loop()
    endpoint = Endpoint(loop, uds, open_fabric, tokens, windows=windows, server=server, users=users)
    stop_on_signals(loop)
    endpoint.adopt_supervisor(supervisor)
    loop.listen(listener, endpoint, connections_max=CONNECTIONS_MAX, peers=accepting(tls))
    watch_tokens(loop, tokens, endpoint)
    loop.run()
    if not endpoint.failed:
        loop.close()
    if endpoint.failed:
        raise SimmError(endpoint.failed)
    endpoint.close()
