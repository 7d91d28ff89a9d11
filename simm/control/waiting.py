"""Requests that are answered when the map may be sent: those for the map, and orders that must be stored first.

A map may have to wait for hours, as where etcd has no room. Servers ask again with each heartbeat, and clients give up
and connect again. So each connection has a bounded number of requests here, and one that closes has none.
"""

from __future__ import annotations

from typing import Final

from ..cluster.nodes import Answer
from ..net.peer import Peer
from ..wire.messages import Status

#: Requests of one connection that may wait.
OF_PEER_MAX: Final = 8


class Waiting:
    """The requests that wait, by their connections. O(1) for each."""

    def __init__(self) -> None:
        self._of: dict[Peer, list[tuple[int, Answer | None]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, peer: Peer, number: int, said: Answer | None = None) -> None:
        """Have request ``number`` wait for the map, or for its answer ``said``. Refuse it if too many wait already."""
        if peer.closed:
            return
        waiting = self._of.setdefault(peer, [])
        if len(waiting) >= OF_PEER_MAX:
            text = f"{OF_PEER_MAX} requests of this connection wait for a map that is not stored yet"
            peer.send_error(number, Status.BUSY, text)
        else:
            waiting.append((number, said))

    def drop(self, peer: Peer) -> None:
        """Forget the requests of a connection that has closed."""
        self._of.pop(peer, None)

    def take(self) -> list[tuple[Peer, int, Answer | None]]:
        """Return all, in the order of their connections and of their requests; none waits any more."""
        found, self._of = self._of, {}
        return [(peer, number, said) for peer, waiting in found.items() for number, said in waiting]
