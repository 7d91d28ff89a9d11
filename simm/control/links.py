"""What the manager knows of connections. A data server speaks by the one by which it has joined last, and no other."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

from ..cluster.nodes import Action, Answer, refusal
from ..config.tokens import Token
from ..net.peer import Peer
from ..wire.admin_messages import SUBSCRIBE_ORDERS
from ..wire.auth import Gate
from ..wire.epoch_messages import SUBSCRIBE_EPOCHS, SUBSCRIBE_LEASES, SUBSCRIBE_MAPS
from ..wire.identity import is_instance
from ..wire.messages import Join, Joined, Status
from ..wire.trace_messages import SUBSCRIBE_TRACES

#: Hosts of listeners that accept on every address.
WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})

#: Least number of links at which those of forgotten servers are looked for.
PRUNE_AT_LEAST: Final = 1024

#: A data server: its name and its instance.
Server = tuple[str, int]


class ConnectionState:
    """What the manager knows of one connection."""

    __slots__ = (
        "asked", "epoch", "epochs", "follows", "gate", "greeted", "leases", "orders", "stale", "supervisor", "traces",
    )  # fmt: skip

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        #: It wants EPOCHS before maps; LEASE_ACK; takes ORDER_SETTINGS; ORDER_TRACE.
        self.greeted = self.epochs = self.leases = self.orders = self.traces = False
        #: It says that it is a data server's, by a token that allows this if there are any.
        self.supervisor = False
        #: A server that has joined by it was asked for its map, and has sent none since.
        self.asked = False
        #: Epoch of the last map sent.
        self.epoch = 0
        #: A newer map waits to be sent.
        self.stale = False
        #: Whether it asks for EPOCHS with the maps that are pushed to it; None if it has asked for none.
        self.follows: bool | None = None

    def asks(self, subscribe: int) -> None:
        """Take what MAP_GET asks for, in place of what one before has; 0 is a mere question, and changes nothing."""
        if not subscribe:
            return
        self.epochs = bool(subscribe & SUBSCRIBE_EPOCHS)
        self.leases = bool(subscribe & SUBSCRIBE_LEASES)
        self.orders = bool(subscribe & SUBSCRIBE_ORDERS)
        self.traces = bool(subscribe & SUBSCRIBE_TRACES)
        if subscribe & SUBSCRIBE_MAPS:
            self.follows = self.epochs
        else:
            self.follows, self.stale = None, False  # no map is pushed any more


class ServerLinks:
    """The connection of each data server that has joined and is connected. A connection may have several of them.

    A name has one, that of the instance that has joined last: nobody makes this grow by joining and leaving. Who joins
    by name after name and lets each die has twice as many links at most as the cluster knows servers.

    Args:
        known: returns the names that the cluster knows.
    """

    def __init__(self, known: Callable[[], Container[str]]) -> None:
        self._known = known
        self._links: dict[str, tuple[Peer, int]] = {}
        self._names: dict[Peer, set[str]] = {}
        self._prune_at = PRUNE_AT_LEAST

    def bind(self, peer: Peer, server: Server) -> None:
        """Take ``peer`` for the server's connection. An earlier one, which the server has lost, no longer counts."""
        name, instance = server
        self.unbind(name)
        if len(self._links) >= self._prune_at:
            self._prune()
        self._links[name] = peer, instance
        self._names.setdefault(peer, set()).add(name)

    def _prune(self) -> None:
        """Forget the servers that the cluster has forgotten. The next time is when there are twice as many."""
        known = self._known()
        for name in [name for name in self._links if name not in known]:
            self.unbind(name)
        self._prune_at = max(PRUNE_AT_LEAST, 2 * len(self._links))

    def speaks_for(self, peer: Peer, server: Server) -> bool:
        """Return True if ``peer`` is the server's connection."""
        name, instance = server
        return self._links.get(name) == (peer, instance)

    def peer_of(self, name: str) -> Peer | None:
        """Return a server's connection; None if it has none."""
        link = self._links.get(name)
        return link[0] if link is not None else None

    def has_joined(self, peer: Peer) -> bool:
        """Return True if ``peer`` is any server's connection."""
        return peer in self._names

    def names(self, peer: Peer) -> frozenset[str]:
        """Return the names of the servers whose connection this is."""
        return frozenset(self._names.get(peer, ()))

    def closed(self, peer: Peer) -> list[Server]:
        """Forget a closed connection. Return the servers whose connection it was."""
        return [(name, self._links.pop(name)[1]) for name in sorted(self._names.pop(peer, ()))]

    def unbind(self, name: str) -> None:
        """Forget the connection of a server that has left."""
        link = self._links.pop(name, None)
        if link is not None:
            names = self._names[link[0]]
            names.discard(name)
            if not names:
                del self._names[link[0]]


def secret_fault(msg: Join) -> list[Action]:
    """Return the refusal of a JOIN that does not show the secret of its instance; nothing if it does."""
    if is_instance(msg.name, msg.instance, msg.secret):
        return []
    text = f"that is not the secret of this instance of {msg.name!r}: what a map says proves nothing"
    return [refusal(Status.UNAUTHORIZED, text)]


def rights_fault(msg: Join, token: Token | None) -> list[Action]:
    """Return the refusal of a JOIN by a name, or with room, that a token does not allow; nothing if it does."""
    if token is None or token.nodes is None:
        return []
    if msg.name not in token.nodes and "*" not in token.nodes:
        return [refusal(Status.UNAUTHORIZED, f"{token} may not join as {msg.name!r}: see its line in the token file")]
    most = token.nodes.get(msg.name, token.nodes.get("*"))
    room = sum(info.capacity for info in msg.workers)
    if most is None or room <= most:
        return []
    text = f"{msg.name!r} has {room} bytes for values, and {token} allows {most}: see its line in the token file"
    return [refusal(Status.UNAUTHORIZED, text)]


def is_refusal(actions: list[Action]) -> bool:
    """Return True if the answer among ``actions``, the first of them, is an error."""
    answer = actions[0]
    return isinstance(answer, Answer) and answer.status != Status.OK


def asks_for_map(actions: list[Action]) -> bool:
    """Return True if the answer among ``actions``, the first of them, asks the server for its map."""
    answer = actions[0]
    return isinstance(answer, Answer) and isinstance(answer.message, Joined) and bool(answer.message.wants_map)


def peer_host(peer: Peer, host: str) -> str:
    """Return a worker's host as others reach it: the peer's own if the server names none, or a wildcard."""
    return peer.address.rpartition(":")[0] if host in WILDCARDS else host
