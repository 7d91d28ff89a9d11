"""The server's end of an RDMA connection: its queue pairs, its grants, and the order in which they end.

All fencing is here. It rests on two promises of ``rdma/api.py``. After ``QueuePair.invalidate`` no WRITE by those keys
is in flight, and none begins. After ``QueuePair.close`` nothing that the peer sends arrives. Hence:

* :meth:`RdmaLease.fence` precedes publishing or returning a chunk. It suffices while the client lives and its queue
  pairs work. Without windows it does nothing. A client that commits while it still writes then spoils its own value or,
  after the chunk's next change of hands, another one: as any process could that has mapped the arena.
* :meth:`RdmaLease.close` destroys all queue pairs, then frees the windows, and then returns the grants that may be
  released. If a queue pair cannot be destroyed, it raises and the grants stay. The process must then end, and the
  kernel destroys its queue pairs before the worker learns of that.

A leased grant counts as a copy in flight (``WorkerSession.begin_copy``) of its session until it is spent or returned.
So a session that ended because its worker died is not released before every lease has released its grants, and the
worker's successor does not reuse their chunks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from ..errors import CorruptionError, RemoteProtocolError
from ..ipc.grant_pool import GrantTuple
from ..ipc.session import WorkerSession
from ..net.loop import Loop
from ..net.peer import Peer
from ..rdma.api import FabricError, QueuePair, QueuePairAddress, Rail
from ..rdma.ports import ARP_ANSWER_S, ArpTable, gid_text
from ..wire.auth import Gate
from ..wire.messages import Status
from ..wire.rdma_messages import RdmaConnect, RdmaConnected
from .rdma_devices import BoundWindow, Devices, WindowPool

log = logging.getLogger("simm.server.rdma_endpoint")

#: Queue pairs that a lease may ask for in its life: rail pairs, and pairs that were tried in vain.
QUEUE_PAIRS_MAX: Final = 64
#: Looks at whether somebody answers for clients' addresses: seconds between two, and addresses that are asked for at a
#: time. A lease asks for one at a time; others wait for their turn.
LOOK_S: Final = 0.01
ASKED_MAX: Final = 64
#: An address that nobody answered for is not waited for again so soon, seconds; and how many of them are remembered.
SILENT_S: Final = 5.0
SILENT_MAX: Final = 4096
MTUS: Final = frozenset((256, 512, 1024, 2048, 4096))


class LeasedGrant:
    """A grant of a lease, with its bound windows by the number of the queue pair."""

    __slots__ = ("bound_windows", "chunk", "number", "offset", "session")

    def __init__(self, session: WorkerSession, grant: GrantTuple) -> None:
        self.session = session
        self.number, self.offset, self.chunk = grant
        self.bound_windows: dict[int, BoundWindow] = {}

    @property
    def grant(self) -> GrantTuple:
        """The grant as client and session know it."""
        return self.number, self.offset, self.chunk


class _Asked:
    """Who waits for an answer for one address, and until when."""

    __slots__ = ("rail", "thens", "until")

    def __init__(self, rail: Rail, until: float) -> None:
        self.rail = rail
        self.until = until
        self.thens: list[tuple[RdmaLease, Callable[[bool], None]]] = []


class Neighbours:
    """Finds out whether anybody answers for clients' addresses. For the loop's thread, which goes on meanwhile.

    Connecting a queue pair would wait for that, and all other clients with it. A fault while looking counts as no
    answer: nothing is raised here, as the endpoint would end.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        #: By the rail's name and the GID.
        self._asked: dict[tuple[str, bytes], _Asked] = {}
        #: Those for which there is no room in these yet.
        self._later: deque[tuple[RdmaLease, Rail, bytes, Callable[[bool], None]]] = deque()
        #: Until when nobody waits again for these; the oldest first.
        self._silent: dict[tuple[str, bytes], float] = {}
        #: Whether a look is due.
        self._looking = False

    def reach(self, lease: RdmaLease, rail: Rail, gid: bytes, then: Callable[[bool], None]) -> None:
        """Call ``then`` with whether somebody answers for this GID: at once if that is known, else soon.

        If the lease is closed by then, it is not called.
        """
        key = rail.name, gid
        if key in self._asked:
            self._asked[key].thens.append((lease, then))
            return
        if self._later or len(self._asked) >= ASKED_MAX:
            if self._reaches(rail, gid, ArpTable()):  # which has to wait for nobody
                then(True)
            elif self._loop.clock() < self._silent.get(key, 0.0):
                then(False)
            else:
                self._later.append((lease, rail, gid, then))
            return
        self._ask(lease, rail, gid, then)

    def _ask(self, lease: RdmaLease, rail: Rail, gid: bytes, then: Callable[[bool], None]) -> None:
        key = rail.name, gid
        found = self._reaches(rail, gid)
        if found:
            self._silent.pop(key, None)
            then(True)
            return
        now = self._loop.clock()
        if found is None or now < self._silent.get(key, 0.0):
            then(False)
            return
        asked = self._asked.setdefault(key, _Asked(rail, now + ARP_ANSWER_S))
        asked.thens.append((lease, then))
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_later(LOOK_S, self._look)

    def _reaches(self, rail: Rail, gid: bytes, table: ArpTable | None = None) -> bool | None:
        """Return whether somebody answers; None after a fault."""
        try:
            return rail.reaches(gid, neighbours=table)
        except Exception:
            log.exception("asking for %s", gid_text(gid))
            return None

    def _look(self) -> None:
        self._looking = False
        now = self._loop.clock()
        table: ArpTable | None = None
        for key, asked in list(self._asked.items()):
            asked.thens = [(lease, then) for lease, then in asked.thens if not lease.closed]
            if not asked.thens:
                del self._asked[key]
                continue
            if table is None:
                table = ArpTable()
            found = self._reaches(asked.rail, key[1], table)
            if found is False and now < asked.until:
                continue
            del self._asked[key]
            if found is False:
                self._silent.pop(key, None)
                if len(self._silent) >= SILENT_MAX:
                    del self._silent[next(iter(self._silent))]
                self._silent[key] = now + SILENT_S
            for _, then in asked.thens:
                self._loop.call_later(0.0, partial(then, bool(found)))
        # Each of these may call what adds more, so no more are taken in one turn than there are now.
        for _ in range(len(self._later)):
            if len(self._asked) >= ASKED_MAX:
                break
            lease, rail, gid, then = self._later.popleft()
            if not lease.closed:
                self._ask(lease, rail, gid, then)
        if self._asked or self._later:
            self._look_soon()


class Connects:
    """Handles the RDMA_CONNECTs of all leases, each lease's one after the other. For the loop's thread."""

    def __init__(self, loop: Loop, devices: Devices) -> None:
        self._loop = loop
        self._devices = devices
        self._neighbours = Neighbours(loop)

    def add(self, peer: Peer, lease: RdmaLease, rail: Rail, request_id: int, msg: RdmaConnect) -> None:
        """Answer a message as soon as it is known whether its end can be reached.

        Raises RemoteProtocolError if the client has sent too many, in vain or not, or names an MTU that there is not.
        """
        if msg.mtu not in MTUS:
            raise RemoteProtocolError(f"no queue pair has an MTU of {msg.mtu} bytes")
        lease.tried += 1
        if lease.tried > QUEUE_PAIRS_MAX:
            raise RemoteProtocolError(f"more than {QUEUE_PAIRS_MAX} queue pairs in one lease")
        lease.connects.append((peer, rail, request_id, msg))
        if len(lease.connects) == 1:
            self._next(lease)

    def _next(self, lease: RdmaLease) -> None:
        if lease.connects and not lease.closed:
            _, rail, _, msg = lease.connects[0]
            self._neighbours.reach(lease, rail, msg.gid, partial(self._reached, lease))

    def _reached(self, lease: RdmaLease, found: bool) -> None:
        """Answer the first of a lease's messages. In a timer of a loop that its faults would end: see on_frame()."""
        if lease.closed:
            return
        peer, rail, request_id, msg = lease.connects.popleft()
        try:
            try:
                if not found:
                    raise FabricError(f"{rail.name}: nobody answers for {gid_text(msg.gid)}")
                peer.send_message(self._link(lease, rail, msg), request_id)
            except FabricError as exc:
                log.warning("%s: no queue pair on %s: %s", peer.address, rail.name, exc)
                peer.send_error(request_id, Status.UNAVAILABLE, str(exc))
            self._next(lease)
        except CorruptionError:
            raise
        except Exception:
            log.exception("serving %s failed", peer.address)
            self._loop.handler_errors += 1
            peer.close("internal error")

    def _link(self, lease: RdmaLease, rail: Rail, msg: RdmaConnect) -> RdmaConnected:
        """Make a queue pair and connect it. Raises FabricError."""
        try:
            qp = rail.queue_pair()
        except FabricError as exc:  # the client's message cannot be the cause
            self._devices.suspect = str(exc)
            raise
        theirs = QueuePairAddress(msg.gid, msg.lid, msg.qpn, msg.psn, msg.mtu, msg.reads)
        number, ours = lease.connect(qp, msg.rail, theirs)
        return RdmaConnected(number, ours.lid, ours.gid, ours.qpn, ours.psn, ours.mtu, ours.reads)


class NoWindows(FabricError):
    """There are too few windows now. Nothing else is wrong."""


class RdmaLease:
    """The server's end of one RDMA connection. For the loop's thread."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        #: The role in HELLO; None before it.
        self.role: int | None = None
        #: What HELLO has named.
        self.namespace = ""
        #: Set by RDMA_OPEN. ``windows`` is None if chunks are written without windows.
        self.opened = False
        self.windows: WindowPool | None = None
        #: By number; None once disconnected.
        self.queue_pairs: list[QueuePair | None] = []
        self.rails: list[int] = []
        #: How many it has asked for, and what is not answered yet, with the request's id.
        self.tried = 0
        self.connects: deque[tuple[Peer, Rail, int, RdmaConnect]] = deque()
        #: By id: grants that the client knows and may write into.
        self.grants: dict[int, LeasedGrant] = {}
        #: Grants that go to the client with the next answer.
        self.prepared: list[LeasedGrant] = []
        self.granted_bytes = 0
        #: When the client last sent a frame, and whether it was asked for its grants, as an idle one, since.
        self.last_seen = 0.0
        self.recalled = False
        #: When grants were last recalled from it.
        self.recalled_at = float("-inf")
        self.closed = False

    def __repr__(self) -> str:
        return f"<RdmaLease queue_pairs={self.queue_pair_count} grants={len(self.grants)}+{len(self.prepared)}>"

    @property
    def queue_pair_count(self) -> int:
        """The number of connected queue pairs."""
        return sum(qp is not None for qp in self.queue_pairs)

    @property
    def broken(self) -> str:
        """Why one of the queue pairs failed; empty while all work."""
        return next((qp.broken for qp in self.queue_pairs if qp is not None and qp.broken), "")

    # -- queue pairs ------------------------------------------------------------------------------------

    def connect(self, qp: QueuePair, rail: int, peer: QueuePairAddress) -> tuple[int, QueuePairAddress]:
        """Connect a new queue pair, on rail number ``rail``, to the client's end; return its number and address.

        On FabricError the queue pair is closed.
        """
        try:
            address = qp.address()
            qp.connect(peer)
        except FabricError:
            qp.close()
            raise
        self.queue_pairs.append(qp)
        self.rails.append(rail)
        return len(self.queue_pairs) - 1, address

    def disconnect(self, number: int) -> bool:
        """Destroy one queue pair, after which nothing arrives by it; return False if there is none."""
        qp = self.queue_pairs[number] if number < len(self.queue_pairs) else None
        if qp is None:
            return False
        qp.close()
        self.queue_pairs[number] = None
        bound_windows = [
            leased.bound_windows.pop(number) for leased in self.leased_grants() if number in leased.bound_windows
        ]
        if self.windows is not None:
            self.windows.free(bound_windows)
            self.windows.close_idle(self.rails[number], qp)
        return True

    # -- grants -----------------------------------------------------------------------------------

    def leased_grants(self) -> Iterable[LeasedGrant]:
        """Yield all grants, including those that the client does not know yet."""
        yield from self.grants.values()
        yield from self.prepared

    def hold(self, session: WorkerSession, grants: Sequence[GrantTuple]) -> None:
        """Add grants to ``prepared``, with bound windows if there are windows.

        Raises NoWindows, and adds none then. On FabricError a queue pair broke: close the lease.
        """
        fresh = [LeasedGrant(session, grant) for grant in grants]
        chunks = [(leased.offset, leased.chunk) for leased in fresh]
        bound_windows: list[tuple[int, QueuePair, list[BoundWindow]]] = []
        if self.windows is not None:
            try:
                for number, qp in enumerate(self.queue_pairs):
                    if qp is not None:
                        bound_windows.append((number, qp, self.windows.prepare(self.rails[number], qp, chunks)))
            except FabricError as exc:
                for _, _, taken in bound_windows:
                    self.windows.release(taken)
                raise NoWindows(str(exc)) from exc
        for leased in fresh:
            session.begin_copy()
            self.prepared.append(leased)
            self.granted_bytes += leased.chunk
        for number, _, taken in bound_windows:
            for leased, bound_window in zip(fresh, taken):
                leased.bound_windows[number] = bound_window  # before the first is bound: close() must find all of them
        for _, qp, taken in bound_windows:
            assert self.windows is not None
            self.windows.bind(qp, taken)

    def take_prepared(self, most: int) -> list[LeasedGrant]:
        """Return at most ``most`` prepared grants, which the client may write into from now on."""
        taken, self.prepared = self.prepared[:most], self.prepared[most:]
        for leased in taken:
            self.grants[leased.number] = leased
        return taken

    def keys(self, leased_grants: Sequence[LeasedGrant]) -> list[int]:
        """Return the keys of grants, one per queue pair; none without windows."""
        if self.windows is None:
            return []
        numbers = range(len(self.queue_pairs))
        return [
            leased.bound_windows[number].key if number in leased.bound_windows else 0
            for leased in leased_grants
            for number in numbers
        ]

    def fence(self, leased_grants: Sequence[LeasedGrant]) -> None:
        """Invalidate the windows of these grants. Raises FabricError: close the lease then."""
        if self.windows is None:
            return
        for number, qp in enumerate(self.queue_pairs):
            if qp is None:
                continue
            bound_windows = [leased.bound_windows[number] for leased in leased_grants if number in leased.bound_windows]
            if bound_windows:
                self.windows.unbind(qp, bound_windows)
                for leased in leased_grants:
                    leased.bound_windows.pop(number, None)
                self.windows.release(bound_windows)

    def forget(self, leased_grants: Iterable[LeasedGrant]) -> None:
        """Remove fenced grants from the lease."""
        for leased in leased_grants:
            if self.grants.pop(leased.number, None) is None:
                self.prepared.remove(leased)
            self.granted_bytes -= leased.chunk

    def close(self) -> list[LeasedGrant]:
        """Destroy all queue pairs, free the windows, and return the lease's grants, which no client can write any more.

        Raises whatever a queue pair raises that cannot be destroyed; the grants must stay then.
        """
        self.closed = True
        self.connects.clear()
        for qp in self.queue_pairs:
            if qp is not None:
                qp.close()
        queue_pairs, self.queue_pairs = self.queue_pairs, []
        leased = list(self.leased_grants())
        self.grants, self.prepared, self.granted_bytes = {}, [], 0
        if self.windows is not None:
            try:
                for each in leased:
                    self.windows.free(each.bound_windows.values())
                for rail, qp in zip(self.rails, queue_pairs):
                    if qp is not None:
                        self.windows.close_idle(rail, qp)
            except FabricError as exc:  # no client can write through such a window: its queue pair has gone
                log.error("freeing memory windows: %s", exc)
        return leased
