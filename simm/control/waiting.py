"""Requests that are answered when the map may be sent: those for the map, and orders that must be stored first.

A map may have to wait for hours, as where etcd has no room. Servers ask again with each heartbeat, and clients give up
and connect again. So each connection has a bounded number of requests here, and one that closes has none. When the map
may be sent, after minutes perhaps, thousands of connections wait. They are answered a part in each turn of the loop, so
that heartbeats are read in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Final

from ..cluster.nodes import Answer
from ..net.loop import Loop
from ..net.peer import Peer
from ..wire.messages import Status

#: Requests of one connection that may wait.
OF_PEER_MAX: Final = 8
#: Connections that get the map in one turn, by answers or by pushes.
MAPS_PER_TURN: Final = 128


class Waiting:
    """The requests that wait, by their connections. O(1) for each."""

    def __init__(self) -> None:
        self._of: dict[Peer, list[tuple[int, Answer | None]]] = {}
        #: The rest is taken in the next turn.
        self._going_on = False

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __bool__(self) -> bool:
        """Whether some wait and may be taken in this turn."""
        return bool(self._of) and not self._going_on

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

    def for_map(self, peer: Peer) -> bool:
        """Return True if this connection waits for the map, and so gets the newest one as an answer."""
        return any(said is None for _, said in self._of.get(peer, ()))

    def drop(self, peer: Peer) -> None:
        """Forget the requests of a connection that has closed."""
        self._of.pop(peer, None)

    def take(self, loop: Loop, answer: Callable[[], None]) -> list[tuple[Peer, int, Answer | None]]:
        """Return the requests of the connections that have waited longest; they wait no more. O(MAPS_PER_TURN).

        If others wait, ``answer`` is called in the next turn of the loop, and takes the next ones.
        """
        found = list(itertools.islice(self._of, MAPS_PER_TURN))
        taken = [(peer, number, said) for peer in found for number, said in self._of.pop(peer)]
        if self._of and not self._going_on:
            self._going_on = True
            loop.call_later(0.0, partial(self._go_on, answer))
        return taken

    def _go_on(self, answer: Callable[[], None]) -> None:
        self._going_on = False
        answer()

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
