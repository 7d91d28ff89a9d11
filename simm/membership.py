"""A data server's session with the manager: join, heartbeats, maps, reports of what has moved in, goodbye.

Several manager addresses are tried in turn, without ever blocking the supervisor's loop; only one of two managers
leads, and the other answers NOT_LEADER. Losing the manager changes nothing for clients: the server serves on
with the map it has, for as long as it takes.

What can go wrong, and what stands against it
---------------------------------------------
* *No manager at the start.* After ``join_timeout_s`` without a first JOINED the server gives up and says why.
* *A manager that accepts and says nothing* (stopped, or cut off behind its kernel): after ``SILENT_BEATS``
  heartbeats, at least ``SILENT_S``, without any answer the link is closed and the next address tried.
* *The manager does not know us* (declared dead, or it has lost its state): the workers are fenced at once, then
  we join again; the next map ends the fence. Maps that come in between on the old terms are not looked at.
* *The manager has lost its state and asks for the newest map*: it gets ours, before anything else.
* *A warm start.* Our arenas know the highest epoch they acted on. JOIN names it although there is no map in memory, so
  that no epoch of the future equals one that a shard's word remembers.
* *MOVED is lost, or its map late.* It is said with each heartbeat until the map agrees.
* *DNS.* Names are resolved by a child process: a resolver that hangs hangs there.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from . import messages as M
from .errors import RemoteProtocolError
from .loop import Loop, Peer, Service
from .member import Member
from .messages import Status
from .rpc import Frame, decode, encode
from .shardmap import ShardMap

log = logging.getLogger("simm.membership")

JOIN_TIMEOUT_S: Final = 30.0
RECONNECT_S: Final = 0.5
#: To another address than the last one; also when a manager says that it does not lead.
NEXT_S: Final = 0.05
CONNECT_S: Final = 1.0
SILENT_S: Final = 3.0
SILENT_BEATS: Final = 3
#: Times, a second apart, that a name which the manager says is taken is tried before we give up.
NAME_TRIES: Final = 5
#: Between two reports of what has moved in, as long as more is coming.
MOVED_S: Final = 0.25

Callback = Callable[[Any, int], None]


class Household(Protocol):
    """What the membership needs from its data server. ``Membership`` calls nothing else."""

    def infos(self) -> list[M.WorkerInfo] | None:
        """All workers, or None while one of them is not up."""

    def loads(self) -> list[M.WorkerLoad]:
        """Of all workers, for a heartbeat."""

    def moved(self) -> list[M.Moved]:
        """What has moved in and stands in the map as moving."""

    def taken(self) -> int:
        """Epoch of the newest map that all workers have taken over; 0 for none."""

    def on_map(self) -> None:
        """``member`` has taken a map, or has been fenced: tell the workers."""

    def on_joined(self) -> None:
        """The manager knows us."""

    def give_up(self, why: str) -> None:
        """There is no way to join: end."""

    def resolve(self, host: str, callback: Callable[[str], None]) -> None:
        """Find a host's address; the callback gets it, or nothing, from the loop."""


class Membership(Service):
    """See the module's docstring.

    Args:
        loop: everything happens in it.
        member: what the maps are for.
        household: the data server.
        managers: (host, port) each.
        token: for a manager that wants one.
        warm: all our arenas hold what they held when our predecessor said LEAVE.
        warm_epoch: the highest epoch that one of our arenas acted on before; 0 if all are new.
    """

    def __init__(
        self, loop: Loop, member: Member, household: Household, managers: Sequence[tuple[str, int]], *,
        token: str = "", warm: bool = False, warm_epoch: int = 0, join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.loop = loop
        self.member = member
        self.household = household
        self.managers = list(managers)
        self.token = token
        self.warm = warm
        self.warm_epoch = warm_epoch
        self.join_timeout_s = join_timeout_s
        self.joined = False
        #: Since a JOINED of ours: 0 before the first.
        self.joined_at = 0.0
        self.heartbeat_s = 1.0
        self.peer: Peer | None = None
        self._pending: dict[int, Callback] = {}
        self._last_id = 0
        self._at = 0
        self._where = ""
        self._heard_at = 0.0
        #: What was said of each address, so that it is said once.
        self._complained: dict[str, str] = {}
        self._refusals = 0
        self._connecting: socket.socket | None = None
        self._beating = False
        self._leaving = False
        self._started = loop.clock()
        self._moved_at = 0.0
        #: When the last heartbeat went out, what it said that all workers have taken, and is another due for that?
        self._spoke_at = 0.0
        self._told = 0
        self._catching_up = False

    def __repr__(self) -> str:
        state = "joined" if self.joined else "linked" if self.peer is not None else "alone"
        return f"<Membership {state} {self._where}>"

    # -- link -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for a manager."""
        self._started = self.loop.clock()
        self._connect()

    def request(self, msg: Any, callback: Callback) -> None:
        """Send; ``callback(reply, status)`` comes later, or never when the link breaks."""
        if self.peer is None:
            return
        if not self._pending:
            self._heard_at = self.loop.clock()
        self._last_id += 1
        self._pending[self._last_id] = callback
        self.peer.send(encode(msg, self._last_id))

    def _connect(self) -> None:
        if self._leaving or self.peer is not None or self._connecting is not None:
            return
        host, port = self.managers[self._at % len(self.managers)]
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if _numeric(host):
            self._connect_to(host, port)
        else:
            self.household.resolve(host, lambda address: self._resolved(host, address, port))

    def _resolved(self, host: str, address: str, port: int) -> None:
        if address:
            self._connect_to(address, port)
        else:
            self._lost(f"there is no address for {host}")

    def _connect_to(self, address: str, port: int) -> None:
        """Connect without waiting: the selector says when it is done, a timer when it takes too long."""
        if self._leaving or self.peer is not None or self._connecting is not None:
            return
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError as exc:
            self._lost(f"cannot connect: {exc.strerror or exc}")
            return
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.connect((address, port))
        except BlockingIOError:
            pass
        except OSError as exc:
            sock.close()
            self._lost(f"cannot connect: {exc.strerror or exc}")
            return
        self._connecting = sock
        self.loop.selector.register(sock, selectors.EVENT_WRITE, lambda _mask: self._connected(sock))
        self.loop.call_later(CONNECT_S, lambda: self._connected(sock, late=True))

    def _connected(self, sock: socket.socket, *, late: bool = False) -> None:
        if self._connecting is not sock:
            return
        self._connecting = None
        self.loop.unwatch(sock)
        trouble = "no answer" if late else ""
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            trouble = os.strerror(number)
        if trouble or self._leaving:
            sock.close()
            if not self._leaving:
                self._lost(f"cannot connect: {trouble}")
            return
        self.joined = False
        self._heard_at = self.loop.clock()
        self.loop.adopt(sock, self, f"manager {self._where}")
        hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.SUPERVISOR, 0, os.getpid(), "", self.token, [])
        self.request(hello, self._on_greeted)
        self.join()
        self._watch(self.peer)

    def _watch(self, peer: Peer | None) -> None:
        """Close a link on which nothing is answered."""
        if peer is None or self.peer is not peer:
            return
        patience = max(SILENT_S, SILENT_BEATS * self.heartbeat_s)
        if self._pending and self.loop.clock() - self._heard_at > patience:
            peer.close(f"silent for {patience:.1f} s")
            return
        self.loop.call_later(patience / 4, lambda: self._watch(peer))

    def on_connect(self, peer: Peer) -> None:
        self.peer = peer

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        msg = decode(frame)
        self._heard_at = self.loop.clock()
        if frame.request_id == 0:
            if isinstance(msg, M.MapReply):
                self._on_map(msg)
            return
        callback = self._pending.pop(frame.request_id, None)
        if callback is None:
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
        """Go on serving and try again, the next address first; before the first join, give up after a while."""
        self.joined = False
        if self._leaving:
            return
        self._at += 1
        round_over = self._at % len(self.managers) == 0
        if reason != self._complained.get(self._where):
            self._complained[self._where] = reason
            log.warning("manager %s: %s; trying again", self._where, reason)
        if not self.joined_at and self.loop.clock() - self._started > self.join_timeout_s:
            self.household.give_up(
                f"manager {self._where} not reachable for {self.join_timeout_s:.0f} s ({reason}): start it "
                f"(python -m simm.manager --listen {self._where}), or name another with --manager"
            )
            return
        self.loop.call_later((RECONNECT_S if round_over else NEXT_S) * random.uniform(0.7, 1.3), self._connect)

    # -- joining ----------------------------------------------------------------------------------

    def _on_greeted(self, msg: Any, _status: int) -> None:
        if isinstance(msg, M.Error) and not self.joined_at:
            self.household.give_up(f"the manager refused us: {msg.text}")

    def join(self) -> None:
        """Offer our workers, if there is a link, all of them are up, and we are no member yet."""
        if self.peer is None or self.joined or self._leaving:
            return
        infos = self.household.infos()
        if infos is None:
            return
        warm = int(self.warm and not self.joined_at)
        epoch = max(self.member.epoch, self.warm_epoch)
        self.request(M.Join(self.member.instance, warm, self.member.name, infos, epoch), self._on_joined)

    def _on_joined(self, msg: Any, status: int) -> None:
        if isinstance(msg, M.Error):
            if status == Status.NAME_TAKEN and not self.joined_at:
                self._refusals += 1
                if self._refusals < NAME_TRIES:
                    # A manager that restarted takes a server that died for alive until its heartbeats are missed.
                    log.warning("%s; trying again", msg.text)
                    self.loop.call_later(1.0, self.join)
                else:
                    self.household.give_up(f"the manager refused us: {msg.text}")
                return
            log.error("join refused: %s", msg.text)
            if self.peer is not None:
                self.peer.close("join refused")
            return
        if not isinstance(msg, M.Joined) or self.joined:
            return
        self.joined = True
        self.joined_at = self.loop.clock()
        self._complained.clear()
        self.heartbeat_s = max(0.05, msg.heartbeat_ms / 1000)
        log.info("joined the cluster of manager %s at epoch %d", self._where, msg.epoch)
        if msg.wants_map:
            offer = self.member.offer()
            if offer is not None:
                log.warning("the manager has lost its state: it gets our map of epoch %d", offer.epoch)
                self.request(offer, _ignore)
        self._ask_map()
        self.household.on_joined()
        if not self._beating:
            self._beating = True
            self._beat()

    # -- life -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """One heartbeat, with jitter so that a thousand servers do not speak at once."""
        self.loop.call_later(self.heartbeat_s * random.uniform(0.8, 1.0), self._beat)
        self._speak()

    def caught_up(self) -> None:
        """All workers have taken a newer map: said soon and not with the next heartbeat, as shards that have just
        changed hands go on only then. Not more often than every MOVED_S."""
        if not self._catching_up:
            self._catching_up = True
            wait = max(0.0, self._spoke_at + MOVED_S - self.loop.clock())
            self.loop.call_later(wait * random.uniform(1.0, 1.2), self._say_caught_up)

    def _say_caught_up(self) -> None:
        self._catching_up = False
        if self.household.taken() != self._told:
            self._speak()

    def _speak(self) -> None:
        if self.joined and not self._leaving:
            self._spoke_at = self.loop.clock()
            member = self.member
            self._told = self.household.taken()
            beat = M.Heartbeat(member.instance, self._told, member.name, self.household.loads())
            self.request(beat, self._on_ack)
            self.report()

    def report(self) -> None:
        """Tell what has moved in; not more often than every MOVED_S."""
        now = self.loop.clock()
        if self.joined and now - self._moved_at >= MOVED_S:
            self._moved_at = now
            for moved in self.household.moved():
                self.request(moved, self._on_ack)

    def _on_ack(self, msg: Any, status: int) -> None:
        if status in (Status.UNKNOWN_NODE, Status.NAME_TAKEN):
            if not self.joined or self._leaving:
                return
            log.warning("the manager does not know us (any more): no mutation until the next map; joining again")
            self.joined = False
            self.member.fence()
            self.household.on_map()
            self.join()
        elif isinstance(msg, M.HeartbeatAck) and msg.epoch > self.member.epoch:
            self._ask_map()

    def _ask_map(self) -> None:
        self.request(M.MapGet(self.member.epoch, 1), lambda reply, _status: self._on_map(reply))

    def _on_map(self, msg: Any) -> None:
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
            self.household.on_map()

    def leave(self, *, warm: bool) -> bool:
        """Say goodbye; whether anybody is there to hear it. The link stays open for the answer and the next map."""
        joined, self._leaving = self.joined, True
        if joined:
            self.request(M.Leave(self.member.instance, self.member.name, int(warm)), _ignore)
        return joined and self.peer is not None

    @property
    def said_all(self) -> bool:
        """Nothing of what we said waits for an answer, or nobody will give one."""
        return self.peer is None or not self._pending


def _ignore(_msg: Any, _status: int) -> None:
    pass


def _numeric(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except OSError:
            continue
        return True
    return False
