"""A data server's session with the manager: join, heartbeats, maps, reports of what has moved in, LEAVE.

The session tries several manager addresses in turn and never blocks the supervisor's loop. Only one manager leads; the
others answer NOT_LEADER. Losing the manager changes nothing for clients: the server serves on with the map it has.

* *No manager at the start.* After ``join_timeout_s`` without a first JOINED the server ends and says why. Time in which
  a manager is there and this server's own workers are not up does not count.
* *Something else listens where the manager is down*, and refuses this server. Only a manager that has proven our token
  is believed at once; another refusal counts as a lost connection.
* *A manager that accepts and does not answer* (stopped, or cut off behind its kernel). After ``SILENT_BEATS``
  heartbeats, at least ``SILENT_S``, without any answer the server closes the connection and tries the next address.
  Before the first JOINED it waits longer each time, as a slow manager has to begin anew with each connection.
* *The manager does not know this server* (declared it dead, or lost its state). The workers are fenced at once, then
  the server joins again; the next map ends the fence. Maps that come in between are ignored.
* *The manager has lost its state and asks for the newest map.* It gets this server's map, before anything else.
* *A warm start.* The arenas know the highest epoch they acted on. JOIN names it although there is no map in memory, so
  that no later epoch equals one that a shard's word remembers.
* *A worker was frozen by a map that never comes*, of a manager that has lost it, or a false one. Only a later map ends
  that. So MAP_GET names that epoch, and the manager goes beyond it.
* *The manager belongs to another cluster.* JOIN names the server's cluster. If the manager refuses it, the workers drop
  all entries, and then the server joins. A server that starts and finds a suspended arena asks first, by MAP_GET
  (:meth:`Membership.find_cluster`). The request names the arena's epoch. A manager that has lost its state then waits
  for a server with a map, and does not answer at once with an id that it may replace by that of the map.
* *MOVED is lost, or its map late.* The server repeats it with each heartbeat until the map agrees.
* *A resolver hangs.* A child resolves names.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, Final

from ..cluster.assignment import Member
from ..cluster.epochs import Lease
from ..cluster.shard_map import ShardMap
from ..errors import RemoteProtocolError, printable
from ..host.processes import boottime_ns
from ..net.addresses import dial, is_numeric
from ..net.loop import Loop
from ..net.peer import Peer, Service
from ..net.peer_uid import foreign_server
from ..net.tls_peer import ServerTls, connecting
from ..rpc import Frame, decode, encode
from ..wire import admin_messages as A
from ..wire import epoch_messages as E
from ..wire import messages as M
from ..wire import report_messages as R
from ..wire.auth import Asker
from ..wire.hello import client_hello
from ..wire.messages import Status
from .slots.delegate import MembershipDelegate

log = logging.getLogger("simm.server.membership")

JOIN_TIMEOUT_S: Final = 30.0
RECONNECT_S: Final = 0.5
#: Before another address is tried, also after NOT_LEADER.
NEXT_S: Final = 0.05
CONNECT_S: Final = 1.0
SILENT_S: Final = 3.0
SILENT_BEATS: Final = 3
#: Number of JOINs, a second apart, that the manager may refuse with NAME_TAKEN before this server gives up.
NAME_TRIES: Final = 5
#: Between two reports of what has moved in.
MOVED_S: Final = 0.25

_REFUSED: Final = "the manager refused us"
_SUBSCRIBE: Final = E.SUBSCRIBE_MAPS | E.SUBSCRIBE_EPOCHS | E.SUBSCRIBE_LEASES
_SERVES: Final = _SUBSCRIBE | R.SUBSCRIBE_REPORTS | A.SUBSCRIBE_ORDERS

Callback = Callable[[Any, int], None]


class Membership(Service):
    """The session. ``member`` takes the maps; ``managers`` are (host, port) each.

    ``secret``: what the member's instance was made of, for JOIN. ``warm``: all arenas are as the predecessor left them.
    ``warm_epoch`` is then the highest epoch that they acted on, and ``warm_cluster`` the cluster of their entries; 0
    for new arenas. ``tls``: connect by it. ``trusted``: users besides this process's own and root whose manager on this
    host is believed without a token.
    """

    def __init__(
        self, loop: Loop, member: Member, delegate: MembershipDelegate, managers: Sequence[tuple[str, int]], *,
        secret: bytes = b"", token: str = "", warm: bool = False, warm_epoch: int = 0, warm_cluster: int = 0,
        join_timeout_s: float = JOIN_TIMEOUT_S, tls: ServerTls | None = None, trusted: Container[int] = (),
    ) -> None:  # fmt: skip
        self.loop = loop
        self.member = member
        self.delegate = delegate
        self.managers = list(managers)
        self.secret = secret
        self.token = token
        self.tls = tls
        self.trusted = trusted
        self.warm = warm
        self.warm_epoch = warm_epoch
        self.warm_cluster = warm_cluster
        #: The manager's cluster, as :meth:`find_cluster` finds it, and the epoch that the request names meanwhile.
        self.found_cluster = 0
        self._asks = 0
        self.join_timeout_s = join_timeout_s
        self.joined = False
        #: A JOIN has been sent at some time.
        self.offered = False
        #: When the last JOINED came; 0 before the first.
        self.joined_at = 0.0
        self.heartbeat_s = 1.0
        self.peer: Peer | None = None
        #: The manager wants a report so often, ms, by the present connection.
        self.on_report_every: Callable[[int], None] = lambda interval_ms: None
        #: Carries an admin's order out.
        self.on_order: Callable[[A.OrderSettings], A.SettingsDone] = lambda msg: A.SettingsDone(msg.order, 1, b"no")
        #: Gets why a JOIN was refused for good. Returns True if another one will do: it has taken workers back.
        self.on_refusal: Callable[[str], bool] = lambda text: False
        #: Until when values of namespaces with epochs may be read here.
        self.lease = Lease()
        self._pending: dict[int, Callback] = {}
        self._last_id = 0
        self._at = 0
        self._where = ""
        self._last_seen = 0.0
        #: Addresses of managers that have refused the versions of this build.
        self._other_versions: set[str] = set()
        #: The last trouble with each address, so that it is logged once.
        self._complained: dict[str, str] = {}
        self._refusals = 0
        #: The last JOIN was refused with BUSY.
        self._waiting = False
        self._connecting: socket.socket | None = None
        #: HELLO has been sent by the present connection (without a token, and answered by a user who is trusted); its
        #: other end has proven that it knows our token.
        self._greeted = self._proven = False
        self._beating = self._leaving = False
        self._patience = 1
        self._started, self._moved_at = loop.clock(), 0.0
        #: When the last heartbeat was sent and the epoch that it acknowledged.
        self._last_sent_at, self._acked_epoch = 0.0, 0
        #: An early heartbeat, or a JOIN (see _join_later), is scheduled.
        self._ack_due = self._join_due = False

    def __repr__(self) -> str:
        state = "joined" if self.joined else "linked" if self.peer is not None else "alone"
        return f"<Membership {state} {self._where}>"

    # -- link -------------------------------------------------------------------------------------

    def find_cluster(self, epoch: int) -> None:
        """Begin to look for a manager and ask for its cluster, for ``found_cluster``. Do not join.

        ``epoch``: of the newest map that one of the arenas has acted on. Gives up after ``join_timeout_s``, but not
        before a manager has been there for ``SILENT_S``.
        """
        self._asks = max(1, epoch)
        self._started = self.loop.clock()
        self.loop.call_later(max(0.0, self.join_timeout_s - SILENT_S), self._asked_in_vain)
        self._connect()

    def _asked_in_vain(self, seen: Peer | None = None) -> None:
        """Give up if the manager has been there since the last look, by the link ``seen``. Else look again."""
        if not self._asks or self._leaving:
            return
        if self.peer is None or self.peer is not seen:  # a lost link ends the wait once time is up, see _lost
            pause_s = RECONNECT_S if self.peer is None else SILENT_S
            self.loop.call_later(pause_s, partial(self._asked_in_vain, self.peer))
        else:
            self.delegate.give_up(
                f"manager {self._where} has not said within {self.join_timeout_s:.0f} s which cluster it is of, and "
                "there is a suspended arena: start again when it is reachable and has its map"
            )

    def start(self) -> None:
        """Begin to look for a manager, and join it."""
        self._asks = 0
        self._started = self.loop.clock()
        if self.peer is None:
            self._connect()
        else:
            self.join()

    def request(self, msg: Any, callback: Callback) -> None:
        """Send a request. ``callback(reply, status)`` follows, but not if the connection breaks first."""
        if self.peer is None:
            return
        data = encode(msg, self._last_id + 1)  # first: nobody waits for an answer to what cannot be packed
        if not self._pending:
            self._last_seen = self.loop.clock()
        self._last_id += 1
        self._pending[self._last_id] = callback
        self.peer.send(data)

    def _connect(self) -> None:
        if self._leaving or self.peer is not None or self._connecting is not None:
            return
        host, port = self.managers[self._at % len(self.managers)]
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if is_numeric(host):
            self._connect_to(host, port)
        else:
            self.delegate.resolve(host, lambda address: self._resolved(host, address, port))

    def _resolved(self, host: str, address: str, port: int) -> None:
        if address:
            self._connect_to(address, port)
        else:
            self._lost(f"there is no address for {host}")

    def _connect_to(self, address: str, port: int) -> None:
        """Connect without blocking: the selector reports the end, a timer that it takes too long."""
        if self._leaving or self.peer is not None or self._connecting is not None:
            return
        sock: socket.socket | None = None
        try:
            sock = dial(address, port)
            self.loop.selector.register(sock, selectors.EVENT_WRITE, partial(self._connected, sock))
        except (OSError, MemoryError) as exc:
            self._cannot_connect(exc, sock)
            return
        self._connecting = sock
        self.loop.call_later(CONNECT_S, partial(self._connected, sock, late=True))

    def _cannot_connect(self, exc: OSError | MemoryError, sock: socket.socket | None) -> None:
        """Try the next address. Without that a supervisor's loop would go on, and never connect again."""
        if sock is not None:
            sock.close()
        why = exc.strerror if isinstance(exc, OSError) else ""
        self._lost(f"cannot connect: {why or str(exc) or 'no memory'}")

    def _connected(self, sock: socket.socket, _mask: int = 0, *, late: bool = False) -> None:
        if self._connecting is not sock:
            return
        self._connecting = None
        self.loop.unwatch(sock)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        trouble = os.strerror(number) if number else "no answer" if late else ""
        if trouble or self._leaving:
            sock.close()
            if not self._leaving:
                self._lost(f"cannot connect: {trouble}")
            return
        self.joined = False
        self._last_seen = self.loop.clock()
        host = self.managers[self._at % len(self.managers)][0]  # as it was given: a certificate names that
        peers = connecting(self.tls.manager if self.tls else None, host)
        self._greeted = self._proven = False
        try:
            self.loop.adopt(sock, self, f"manager {self._where}", peers=peers)
        except (OSError, MemoryError) as exc:
            self._cannot_connect(exc, sock)
            return
        self._watch(self.peer)
        if self.token:
            asker = Asker(self.token, M.Service.MANAGER, M.Role.SUPERVISOR)
            self.request(asker.auth, lambda msg, status: self._on_challenge(asker, msg, status))
        else:
            self._greet()

    def _on_challenge(self, asker: Asker, msg: Any, status: int) -> None:
        """Show the manager our proof, if it has shown its own."""
        proof = msg.text if isinstance(msg, M.Error) else asker.prove(msg)
        if isinstance(proof, M.Prove):
            self._proven = True
            self.request(proof, self._on_greeted)
            self._greet()
        else:
            self._on_greeted(M.Error(proof), status)

    def _greet(self) -> None:
        self.request(client_hello(M.Role.SUPERVISOR, pid=os.getpid()), self._on_greeted)
        if self.token:
            self._greeted = True
            self.join()

    def _watch(self, peer: Peer | None) -> None:
        """Close a connection on which the manager does not answer."""
        if peer is None or self.peer is not peer:
            return
        patience = max(SILENT_S, SILENT_BEATS * self.heartbeat_s) * (1 if self.joined_at else self._patience)
        if not self._pending or self.loop.now - self._last_seen <= patience:  # what came until then has been read
            self.loop.call_later(patience / 4, lambda: self._watch(peer))
            return
        self._patience = min(4, 2 * self._patience)
        peer.close(f"silent for {patience:.1f} s")

    def on_connect(self, peer: Peer) -> None:
        self.peer = peer

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        msg = decode(frame)
        if self._greeted or frame.request_id in self._pending:  # whoever else listens there keeps us with what it likes
            self._last_seen = self.loop.clock()
        if frame.request_id == 0:
            if isinstance(msg, M.Error):  # it is about to close the connection
                peer.close(printable(msg.text))
            elif not self._greeted:  # any other process may listen where the manager is down
                peer.close("it gives orders, and has not shown who it is")
            elif isinstance(msg, M.MapReply):
                self._on_map(msg)
            elif isinstance(msg, E.Epochs):
                self.member.take_epochs(msg)
            elif isinstance(msg, R.ReportEvery):
                self.on_report_every(msg.interval_ms)
            elif isinstance(msg, A.OrderSettings):
                self.request(self.on_order(msg), _ignore)
            return
        if (callback := self._pending.pop(frame.request_id, None)) is None:
            return
        if isinstance(msg, M.Error) and frame.status == Status.NOT_LEADER:
            peer.close("it does not lead")
            return
        callback(msg, frame.status)

    def on_close(self, peer: Peer, reason: str) -> None:
        self.peer = None
        self._pending.clear()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        """Try the next address. Before the first JOINED, give up after a while."""
        self.joined = False
        if self._leaving:
            return
        self._at += 1
        round_over = self._at % len(self.managers) == 0
        if reason != self._complained.get(self._where):
            self._complained[self._where] = reason
            log.warning("manager %s: %s; trying again", self._where, reason)
        if not self.joined_at and self.loop.clock() - self._started > self.join_timeout_s:
            self.delegate.give_up(
                f"{self._where}: {reason}, for {self.join_timeout_s:.0f} s" if reason.startswith(_REFUSED) else
                f"manager {self._where} not reachable for {self.join_timeout_s:.0f} s ({reason}): start it "
                f"(simm manager --listen {self._where}), or name another with --manager"
            )
            return
        self.loop.call_later((RECONNECT_S if round_over else NEXT_S) * random.uniform(0.7, 1.3), self._connect)

    # -- joining ----------------------------------------------------------------------------------

    def _on_greeted(self, msg: Any, status: int) -> None:
        if isinstance(msg, M.Error):
            why = f"{_REFUSED}: {printable(msg.text)}"
            if not self.joined_at and (self._proven or (status == Status.VERSION and self._is_last_of_versions())):
                self.delegate.give_up(why)
            elif self.peer is not None:
                self.peer.close(why)
        elif self.peer is not None and not self._greeted:
            # JOIN shows this server's secret, so it waits until it is known who is asked to keep it.
            if fault := self._foreign(self.peer):
                self.peer.close(fault)
            else:
                self._greeted = True
                self.join()

    def _foreign(self, peer: Peer) -> str:
        """Return why a manager that has not proven to know a token is not believed; empty if it is."""
        certified = self.tls is not None and self.tls.manager is not None
        return "" if certified else foreign_server(peer.sock, self.trusted)

    def _is_last_of_versions(self) -> bool:
        """Note that a manager speaks other versions. Return True if all do: waiting for another answer is in vain."""
        if self.peer is not None and not self.token and not self._foreign(self.peer):
            self._other_versions.add(self._where)
        return len(self._other_versions) == len(set(self.managers))

    def join(self) -> None:
        """Send JOIN if there is a connection, all workers are up, and the manager does not know this server yet."""
        if self.peer is None or not self._greeted or self.joined or self._leaving:
            return
        if self._asks:
            self.request(M.MapGet(self._asks, 0), self._on_cluster)
            self._ping(self.peer)
            return
        infos = self.delegate.infos()
        if infos is None:
            self._started = self.loop.clock()  # there is a manager
            self._join_later()  # when a worker serves, at once
            return
        member, self.offered = self.member, True
        warm = int(self.warm and member.map is None)  # a manager that has died may not have stored the last one
        epoch = max(member.epoch, self.warm_epoch)
        cluster = member.cluster or self.warm_cluster
        join = M.Join(member.instance, warm, member.name, infos, epoch, cluster, self.secret)
        self.request(join, self._on_joined)

    def rejoin(self) -> None:
        """Join again as the same instance: it has other workers. Nothing while one is down: heartbeats must go on."""
        self.joined = self.joined and self.delegate.infos() is None
        self.join()

    def _on_cluster(self, msg: Any, _status: int) -> None:
        if not self._asks:
            return
        if isinstance(msg, M.MapReply):
            self.found_cluster, self._asks = msg.cluster, 0
        elif self.peer is not None:
            self.peer.close(msg.text if isinstance(msg, M.Error) else "it sent no map")

    def _ping(self, peer: Peer) -> None:
        """Ping a manager that collects a map: it answers nothing else meanwhile."""
        if self.peer is peer and self._asks:
            self.request(M.Ping(0), _ignore)
            self.loop.call_later(SILENT_S / 3, lambda: self._ping(peer))

    def _join_later(self) -> None:
        """Join again in a second. One such attempt is due at any time, however often the connection is lost."""
        if not self._join_due:
            self._join_due = True
            self.loop.call_later(1.0, self.join_once)

    def join_once(self) -> None:
        """Do :meth:`join`, unless the manager has one to answer."""
        self._join_due = False
        if self._on_joined in self._pending.values():  # one has been sent meanwhile
            return
        try:
            self.join()
        except (OSError, MemoryError):
            self._join_later()
            raise

    def _on_joined(self, msg: Any, status: int) -> None:
        if isinstance(msg, M.Error):
            if status == Status.NAME_TAKEN and not self.joined_at:
                self._refusals += 1
                if self._refusals < NAME_TRIES:
                    # A restarted manager takes a dead server for alive until enough heartbeats are missed.
                    log.warning("%s; trying again", msg.text)
                    self._join_later()
                else:
                    self.delegate.give_up(f"{_REFUSED}: {printable(msg.text)}")
                return
            if status == Status.BUSY:
                # It waits for our predecessor, which is dead or refused. That ends, whatever the manager's timing.
                if not self._waiting:
                    log.warning("%s; waiting", msg.text)
                self._waiting, self._refusals = True, 0
                self._started = self.loop.clock()  # there is a manager
                self._join_later()
                return
            if status == Status.OTHER_CLUSTER:
                log.warning("%s", msg.text)
                self.warm, self.warm_epoch, self.warm_cluster = False, 0, 0
                self.member.abandon()
                self.lease.end()
                self.delegate.on_abandoned()
                self.join()
                return
            log.error("join refused: %s", msg.text)
            if self.joined_at and self.on_refusal(printable(msg.text)):
                self.join()
                return
            why = f"{_REFUSED}: {printable(msg.text)}"
            if status == Status.NAME_TAKEN:
                self.request(M.MapGet(self.member.epoch, 0), lambda reply, _status: self._on_namesake(why, reply))
                return
            if status == Status.UNAUTHORIZED and self._proven and not self.joined_at:
                self.delegate.give_up(why)
            elif self.peer is not None:
                self.peer.close(why)
            return
        if not isinstance(msg, M.Joined) or self.joined:
            return
        self.joined, self._waiting = True, False
        self.joined_at = self.loop.clock()
        self._complained.clear()
        self.heartbeat_s = max(0.05, msg.heartbeat_ms / 1000)
        log.info("joined the cluster of manager %s at epoch %d", self._where, msg.epoch)
        cluster = self.member.cluster or self.warm_cluster
        if known := self.delegate.epochs(cluster):
            self.request(E.Epochs(self.member.epoch, cluster, 0, known), _ignore)
        if msg.wants_map and (offer := self.member.offer()) is not None:
            log.warning("the manager has lost its state: it gets our map of epoch %d", offer.epoch)
            self.request(offer, _ignore)
        self._ask_map()
        if not self._beating:
            self._beating = True
            self._beat()

    def _on_namesake(self, why: str, msg: Any) -> None:
        """Drop all values if another instance has this server's name by now; connect again in any case."""
        if isinstance(msg, M.MapReply) and self.member.take_if_displaced(ShardMap(msg)):
            log.error("another instance of %s has its place: all values are dropped", self.member.name)
            self.delegate.on_map()
        if self.peer is not None:
            self.peer.close(why)

    # -- life -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat and schedule the next, with jitter so that many servers do not send at once."""
        self.loop.call_later(self.heartbeat_s * random.uniform(0.8, 1.0), self._beat)
        self._send_heartbeat()

    def acknowledge(self) -> None:
        """Acknowledge a map that all workers have taken, before the next heartbeat but at most every MOVED_S.

        Only then does the manager move shards on that have just changed hands.
        """
        if not self._ack_due:
            self._ack_due = True
            wait = max(0.0, self._last_sent_at + MOVED_S - self.loop.clock())
            self.loop.call_later(wait * random.uniform(1.0, 1.2), self._send_ack)

    def _send_ack(self) -> None:
        self._ack_due = False
        if self.delegate.taken() != self._acked_epoch:
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        if self.joined and not self._leaving:
            self._last_sent_at = self.loop.clock()
            member = self.member
            self._acked_epoch = self.delegate.taken()
            beat = M.Heartbeat(member.instance, self._acked_epoch, member.name, self.delegate.loads())
            number = self.lease.sent(boottime_ns(), max(self._acked_epoch, self.delegate.stored()))
            self.request(beat, partial(self._on_beat_ack, number))
            self.report()
            frozen = self.delegate.frozen()
            if frozen > member.epoch:
                self._ask_map(frozen)

    def report(self) -> None:
        """Report what has moved in, at most every MOVED_S."""
        now = self.loop.clock()
        if self.joined and now - self._moved_at >= MOVED_S:
            self._moved_at = now
            for moved in self.delegate.moved():
                self.request(moved, self._on_ack)

    def _on_beat_ack(self, number: int, msg: Any, status: int) -> None:
        older = isinstance(msg, M.HeartbeatAck)
        if isinstance(msg, M.HeartbeatAck | E.LeaseAck):
            since = msg.epoch if isinstance(msg, M.HeartbeatAck) else msg.advanced
            if self.lease.answered(number, since, exactly=older):
                self.delegate.on_lease()
        self._on_ack(msg, status)

    def _on_ack(self, msg: Any, status: int) -> None:
        if status in (Status.UNKNOWN_NODE, Status.NAME_TAKEN):
            if not self.joined or self._leaving:
                return
            log.warning("the manager does not know us (any more): no mutation until the next map; joining again")
            self.joined = False
            self.member.fence()
            self.delegate.on_map()
            self.join()
        elif isinstance(msg, M.HeartbeatAck | E.LeaseAck) and msg.epoch > self.member.epoch:
            self._ask_map()

    def _ask_map(self, known: int = 0) -> None:
        """Ask for the map, once at a time, and name the newest epoch ``known`` here: the manager goes beyond it."""
        if self._on_map not in self._pending.values():
            self.request(M.MapGet(max(self.member.epoch, known), _SERVES), self._on_map)

    def _on_map(self, msg: Any, _status: int = 0) -> None:
        if not isinstance(msg, M.MapReply) or not self.joined:
            return
        if msg.epoch == self.member.epoch and not self.member.fenced:
            return  # an answer and a push of the same map
        try:
            taken = self.member.take_map(ShardMap(msg))
        except RemoteProtocolError as exc:
            log.error("a map that cannot be: %s", exc)
            if self.peer is not None:
                self.peer.close("it sent a map that cannot be")
            return
        if taken is not None:
            self.delegate.on_map()

    def leave(self, *, warm: bool) -> bool:
        """Send LEAVE and return True if a manager is connected, which stays so for the answer and the next map."""
        joined, self._leaving = self.joined, True
        if joined:
            self.request(M.Leave(self.member.instance, self.member.name, int(warm)), _ignore)
        return joined and self.peer is not None

    @property
    def all_answered(self) -> bool:
        """Return True if no request waits for an answer, or none can come."""
        return self.peer is None or not self._pending


def _ignore(_msg: Any, _status: int) -> None:
    pass
