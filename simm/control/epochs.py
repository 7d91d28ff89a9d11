"""Advances of namespaces that the manager has not confirmed yet, and EPOCHS. ``cluster/epochs.py`` argues the matter.

An advance is a change of the map, so it is stored and pushed as any other. Its client waits here, until all servers
have acknowledged it or their leases have ended. Peers that follow the map get EPOCHS before each map if they have asked
for it, and if a namespace has epochs: others never meet the message. Who is bound to namespaces is told of these alone,
as a namespace's name is what keeps others from asking for its keys (SECURITY.md).

Any tenant has advances wait, for an hour, and servers send hundreds of heartbeats a second. So all advances that wait
are judged by one look at the servers. A heartbeat brings about a look only if it is of the server that was most behind:
until that speaks, no advance is acknowledged by all. What time brings about waits for the next maintenance.

A manager may be started with a shorter lease than the one before had. Servers that have not heard of it go on with the
old length, so the longest one is stored with the state. Advances wait for that one until the last of the old leases has
ended. This manager extends a lease only if the server has one of its maps, and EPOCHS with the new length came before
that. So old leases end in their time from when it began to lead. Those without an end, and those of namespaces whose
EPOCHS this manager did not know, last until all servers have acknowledged an advance.

With a longer lease than the one before had, a manager goes on with the old length until its own one is stored: the next
manager would not wait for leases that it does not know of. Then it pushes EPOCHS again to all who have its map. A state
of an older version does not tell how long the leases were, so that they are of the default length at most until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from ..cluster.epochs import DRIFT, LATE_S, Acknowledged
from ..cluster.machine import Cluster
from ..cluster.nodes import Action, Answer
from ..net.peer import Peer
from ..rpc import Flag, encode
from ..wire.auth import Gate
from ..wire.epoch_messages import Advance, Advanced, Epochs, LeaseAck, NamespaceEpoch
from ..wire.messages import HeartbeatAck, Status

#: How long leases are by default, seconds.
DEFAULT_LEASE_S: Final = 30.0
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
    """Answers ADVANCE. ``cluster`` returns the present one; ``lease_s``: how long a lease lasts, 0 for ever.

    ``is_stored``: returns whether what :meth:`to_state` returns has been stored by this manager.
    """

    def __init__(
        self, cluster: Callable[[], Cluster], lease_s: float, is_stored: Callable[[], bool] = lambda: True
    ) -> None:
        self._cluster = cluster
        self.lease_s = lease_s
        self._is_stored = is_stored
        #: The longest lease that the stored state knows, seconds, if ours are longer and not stored yet.
        self._stored_s = math.inf
        #: EPOCHS with shorter leases than ours have been made.
        self._shortened = False
        self._waiting: list[_Waiting] = []
        #: The server that must speak before all have acknowledged what waits for them; empty: any may be the one. None:
        #: nothing waits for a server.
        self._behind: str | None = ""
        #: EPOCHS of a map's epoch and a length of leases, by what is in it; None: everything.
        self._frames: dict[tuple[NamespaceEpoch, ...] | None, bytes] = {}
        self._frames_of: tuple[int, int] = -1, 0
        #: Advances that were confirmed; that were not, in time.
        self.confirmed = self.unconfirmed = 0
        #: The longest lease that an earlier manager has given and that may still run, seconds; 0: none is longer than
        #: ours. Since when none is given any more; None: since this manager began to lead.
        self._before_s = 0.0
        self._given_until: float | None = math.inf
        #: How many may be made, as of a time.
        self._left = float(ADVANCES_AT_ONCE)
        self._left_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def tell(self, peer: Peer, epochs: Epochs) -> None:
        """Push the EPOCHS that come before a map, if the peer has asked for them and one of its namespaces has epochs.

        ``epochs``: all, as of that map, which the present one may have followed. Peers that may know of the same ones
        share a frame. O(namespaces) for one that is bound, else O(1).
        """
        state = peer.context
        if not (state.epochs and epochs.namespaces):
            return
        if self._frames_of != (now := (epochs.epoch, self._granted_ms())):
            self._frames_of = now
            self._frames.clear()
        shown = tuple(visible(epochs.namespaces, state.gate)) if state.gate.bound else None
        if shown == ():
            return
        if shown not in self._frames:
            names = epochs.namespaces if shown is None else list(shown)
            msg = epochs._replace(lease_ms=self._granted_ms(), namespaces=names)
            self._frames[shown] = encode(msg, 0, flags=Flag.PUSH)
        peer.send(self._frames[shown])

    def tell_longer(self, peers: Iterable[Peer], epochs: Epochs) -> None:
        """Push EPOCHS again to those with their map once our leases are given: no map may follow for hours.

        Those whose map is older get EPOCHS with the next one. O(1) but for that once, O(peers) then.
        """
        if not self._shortened or self._granted_ms() != round(self.lease_s * 1000):
            return
        self._shortened = False
        for peer in list(peers):  # sending may close a peer, which leaves the set of them then
            if peer.context.epoch == epochs.epoch and not peer.context.stale:
                self.tell(peer, epochs)

    def epochs(self) -> Epochs:
        """Return all epochs as of the present map."""
        cluster = self._cluster()
        return Epochs(cluster.epoch, cluster.cluster, self._granted_ms(), cluster.namespaces.table())

    def _granted_ms(self) -> int:
        """Return how long the leases are that are given now, ms; 0 for ever."""
        if self._stored_s < math.inf and self._is_stored():
            self._stored_s = math.inf
        granted_s = min(self.lease_s or math.inf, self._stored_s)
        self._shortened |= granted_s < (self.lease_s or math.inf)
        return 0 if granted_s == math.inf else round(granted_s * 1000)

    def fault(self, peer: Peer, now: float, refuses: str = "") -> str:
        """Return why no further advance is made, empty if one may. Ask before the epoch changes. O(waiting).

        ``refuses``: what :attr:`StateKeeper.refuses` says.
        """
        if refuses:
            return refuses
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
        self._behind = ""

    def awaits(self, server: str = "") -> bool:
        """Return True if :meth:`maintain` is due now that time has passed, or that this server has sent a heartbeat."""
        return bool(self._waiting) and (not server or self._behind in ("", server))

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

        ``stored``: the newest epoch that a successor of this manager knows. O(nodes log nodes + waiting log nodes).
        """
        if not self._waiting:
            return False
        cluster = self._cluster()
        settled = cluster.namespaces.settled
        forgot = self._forget_earlier(now)
        nodes = Acknowledged(cluster.nodes.values())
        lease_s = self.lease_s if self._before_s == math.inf else max(self.lease_s, self._before_s)
        left = []
        self._behind = None
        for each in self._waiting:
            if each.peer.closed:
                continue
            epoch = cluster.first_epoch(each.epoch)
            why = cluster.namespaces.awaited(each.name, epoch, nodes, now, each.since, cluster.unsure, lease_s)
            if not why and self._before_s == math.inf and (missing := nodes.missing(epoch)):
                why = f"{missing} must answer, as the leases of an earlier manager do not end"
            if not why and stored < each.epoch:
                why = "the manager has not stored it"
            if not why:
                self.confirmed += 1
                if not nodes.missing(epoch):
                    self._all_heard(now)
                each.peer.send_message(Advanced(each.epoch), each.number)
            elif now >= each.until:
                self.unconfirmed += 1
                text = f"namespace {each.name!r} has a new epoch, but old values may still be read somewhere: {why}"
                each.peer.send_error(each.number, Status.UNAVAILABLE, text)
            else:
                left.append(each)
                self._behind = self._behind or nodes.behind(epoch)
        self._waiting = left
        return cluster.namespaces.settled != settled or forgot

    # -- leases of earlier managers ------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return what the next manager must know of the leases that servers have: the longest, ms; 0 for ever."""
        longest_s = max(self.lease_s or math.inf, self._before_s)
        return {"lease_ms": 0 if longest_s == math.inf else round(longest_s * 1000)}

    def take_state(self, state: Any) -> None:
        """Take what an earlier manager has stored, None for nothing. The cluster is the one of that state.

        A state that is lost, or of an older version, says nothing of leases.
        """
        longest_ms = state.get("lease_ms") if isinstance(state, Mapping) else None
        known = longest_ms if type(longest_ms) is int and longest_ms >= 0 else None
        self._before_s = 0.0 if known is None else (known / 1000 or math.inf)
        self._stored_s = self._before_s or (math.inf if state is None else DEFAULT_LEASE_S)
        self._shortened = False
        if self._before_s <= (self.lease_s or math.inf):
            self._before_s = 0.0  # ours are as long
        ends = self._before_s < math.inf and bool(self._cluster().namespaces)
        self._given_until = None if ends else math.inf

    def _all_heard(self, now: float) -> None:
        """Note that all servers give leases of our length from now on."""
        if self._given_until is not None:
            self._given_until = min(self._given_until, now)

    def _forget_earlier(self, now: float) -> bool:
        """Forget the leases of earlier managers once all have ended. Return True if that is to be stored."""
        longest_s = self.lease_s if self._before_s == math.inf else self._before_s
        until = self._cluster().unsure if self._given_until is None else self._given_until
        over = self._before_s > 0.0 and now > until + longest_s * (1 + DRIFT) + LATE_S
        if over:
            self._before_s = 0.0
        return over

    def forget(self) -> None:
        """Drop all: another manager leads."""
        self._waiting.clear()
        self._behind, self._frames_of = "", (-1, 0)


def visible(table: Iterable[NamespaceEpoch], gate: Gate) -> list[NamespaceEpoch]:
    """Return the epochs of the namespaces that the peer of this gate may use. O(namespaces)."""
    return [each for each in table if gate.admits(each.name)]
