"""Advances of namespaces that the manager has not confirmed yet, and EPOCHS. ``cluster/epochs.py`` argues the matter.

An advance is a change of the map, so it is stored and pushed as any other. Its client waits here, until all servers
have acknowledged it or their leases have ended. Peers that follow the map get EPOCHS before each map if they have asked
for it, and if a namespace has epochs: others never meet the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ..cluster.machine import Cluster
from ..cluster.nodes import Action, Answer
from ..net.peer import Peer
from ..rpc import Flag, encode
from ..wire.epoch_messages import Advance, Advanced, Epochs, LeaseAck
from ..wire.messages import HeartbeatAck, Status

#: Advances that wait at a time, in all.
WAITING_MAX: Final = 1024
#: Of one connection, so that no tenant keeps others from advancing; and the longest wait, seconds.
WAITING_OF_PEER_MAX: Final = 8
WAIT_S_MAX: Final = 3600.0
#: Each advance is a map for all servers and clients. All together may make so many a second, after so many at once.
ADVANCES_A_SECOND: Final = 16
ADVANCES_AT_ONCE: Final = 256


class _Waiting(NamedTuple):
    peer: Peer
    number: int
    name: str
    epoch: int
    since: float
    until: float


class Advances:
    """Answers ADVANCE. ``cluster`` returns the present one; ``lease_s``: how long a lease lasts, 0 for ever."""

    def __init__(self, cluster: Callable[[], Cluster], lease_s: float) -> None:
        self._cluster = cluster
        self.lease_s = lease_s
        self._waiting: list[_Waiting] = []
        self._frame: tuple[int, bytes] = (-1, b"")
        #: Advances that were confirmed; that were not, in time.
        self.confirmed = self.unconfirmed = 0
        #: How many may be made, as of a time.
        self._left = float(ADVANCES_AT_ONCE)
        self._left_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def frame(self) -> bytes:
        """Return the EPOCHS push that comes before a map; empty if no namespace has epochs. O(1) until that changes."""
        cluster = self._cluster()
        if not cluster.namespaces:
            return b""
        if self._frame[0] != cluster.epoch:
            self._frame = cluster.epoch, encode(self.epochs(), 0, flags=Flag.PUSH)
        return self._frame[1]

    def epochs(self) -> Epochs:
        """Return all epochs, as of the present map."""
        cluster = self._cluster()
        return Epochs(cluster.epoch, cluster.cluster, round(self.lease_s * 1000), cluster.namespaces.table())

    def fault(self, peer: Peer, now: float) -> str:
        """Return why no further advance is made, empty if one may. Ask before the epoch changes. O(waiting)."""
        self._left = min(ADVANCES_AT_ONCE, self._left + max(0.0, now - self._left_at) * ADVANCES_A_SECOND)
        self._left_at = now
        if self._left < 1:
            return f"{ADVANCES_A_SECOND} advances a second are made"
        if len(self._waiting) >= WAITING_MAX:
            return f"{WAITING_MAX} advances wait already"
        if sum(each.peer is peer for each in self._waiting) >= WAITING_OF_PEER_MAX:
            return f"{WAITING_OF_PEER_MAX} advances of this connection wait already"
        return ""

    def wait(self, peer: Peer, number: int, msg: Advance, epoch: int, now: float) -> None:
        """Answer the request when the advance to ``epoch`` is confirmed, or when its time is up."""
        self._left -= 1
        wait_s = min(msg.timeout_ms / 1000, WAIT_S_MAX)
        self._waiting.append(_Waiting(peer, number, msg.namespace, epoch, now, now + wait_s))

    def asked(self, names: Iterable[str], follows: bool | None) -> None:
        """Note that these servers are about to get a map, with EPOCHS or without."""
        for name in names:
            if follows is not None and (node := self._cluster().nodes.get(name)) is not None:
                node.follows = follows

    def leased(self, actions: list[Action]) -> list[Action]:
        """Return what answers a heartbeat, with LEASE_ACK for HEARTBEAT_ACK."""
        answer, *others = actions
        if not (isinstance(answer, Answer) and isinstance(answer.message, HeartbeatAck)):
            return actions
        return [Answer(LeaseAck(answer.message.epoch, self._cluster().first_epoch())), *others]

    def maintain(self, now: float, stored: int) -> bool:
        """Answer those that are confirmed, or whose time is up. Return True if something is to be stored.

        ``stored``: the newest epoch that a successor of this manager knows.
        """
        if not self._waiting:
            return False
        cluster = self._cluster()
        settled = cluster.namespaces.settled
        left = []
        for each in self._waiting:
            if each.peer.closed:
                continue
            nodes = cluster.nodes.values()
            epoch = cluster.first_epoch(each.epoch)
            why = cluster.namespaces.awaited(each.name, epoch, nodes, now, each.since, cluster.unsure, self.lease_s)
            if not why and stored < each.epoch:
                why = "the manager has not stored it"
            if not why:
                self.confirmed += 1
                each.peer.send_message(Advanced(each.epoch), each.number)
            elif now >= each.until:
                self.unconfirmed += 1
                text = f"namespace {each.name!r} has a new epoch, but old values may still be read somewhere: {why}"
                each.peer.send_error(each.number, Status.UNAVAILABLE, text)
            else:
                left.append(each)
        self._waiting = left
        return cluster.namespaces.settled != settled

    def forget(self) -> None:
        """Drop all: another manager leads."""
        self._waiting.clear()
        self._frame = (-1, b"")
