"""What is sent when the map may be: pushes of it, and answers to who asked for it or gave an order to be stored first.

A map may have to wait for hours, as where etcd has no room. Servers ask again with each heartbeat, and clients give up
and connect again. So each connection has a bounded number of requests here, and one that closes has none. When the map
may be sent, after minutes perhaps, thousands of connections wait. They are answered a part in each turn of the loop, so
that heartbeats are read in between.

What may be sent is at times older than the present: the map that the last save has stored, while changes come without a
pause. It answers only what was asked before it was the present one. Else a server that has just joined would get a map
without itself, and an order would be confirmed by a save that does not contain it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

from ..cluster.nodes import Answer
from ..net.loop import Loop
from ..net.peer import Peer
from ..rpc import Encoded, Flag
from ..wire.epoch_messages import Epochs
from ..wire.messages import Status

#: Requests of one connection that may wait.
OF_PEER_MAX: Final = 8
#: Requests that are answered, and connections to which the map is pushed, in one turn.
MAPS_PER_TURN: Final = 128


class Told(NamedTuple):
    """A map, the epochs of namespaces that come before it, and :attr:`Waiting.asked` when both were the present."""

    map: Encoded
    epochs: Epochs
    asked: int = 0


class Waiting:
    """The requests that wait, by their connections. O(1) for each."""

    def __init__(self) -> None:
        #: Of each connection, by their numbers here, in their order; and all in theirs.
        self._of: dict[Peer, dict[int, Answer | None]] = {}
        self._all: dict[int, tuple[Peer, int]] = {}
        #: How many have come so far.
        self.asked = 0
        #: The rest is taken in the next turn.
        self._going_on = False

    def __len__(self) -> int:
        return len(self._all)

    def __bool__(self) -> bool:
        """Whether some wait and may be taken in this turn."""
        return bool(self._of) and not self._going_on

    def add(self, peer: Peer, number: int, said: Answer | None = None) -> None:
        """Have request ``number`` wait for the map, or for its answer ``said``. Refuse it if too many wait already."""
        if peer.closed:
            return
        waiting = self._of.setdefault(peer, {})
        if len(waiting) >= OF_PEER_MAX:
            text = f"{OF_PEER_MAX} requests of this connection wait for a map that is not stored yet"
            peer.send_error(number, Status.BUSY, text)
        else:
            waiting[self.asked] = said
            self._all[self.asked] = peer, number
            self.asked += 1

    def for_map(self, peer: Peer) -> bool:
        """Return True if this connection waits for the map, and so gets the newest one as an answer."""
        return None in self._of.get(peer, {}).values()

    def drop(self, peer: Peer) -> None:
        """Forget the requests of a connection that has closed."""
        for at in self._of.pop(peer, ()):
            del self._all[at]

    def take(self, loop: Loop, answer: Callable[[], None], asked: int) -> list[tuple[Peer, int, Answer | None]]:
        """Return the requests that have waited longest, of the first ``asked`` that came; they wait no more.

        If others of these wait, ``answer`` is called in the next turn of the loop, and takes the next ones.
        O(MAPS_PER_TURN).
        """
        taken: list[tuple[Peer, int, Answer | None]] = []
        for at in list(itertools.islice(self._all, MAPS_PER_TURN)):
            if at >= asked:
                return taken
            peer, number = self._all.pop(at)
            waiting = self._of[peer]
            taken.append((peer, number, waiting.pop(at)))
            if not waiting:
                del self._of[peer]
        if next(iter(self._all), asked) < asked and not self._going_on:
            self._going_on = True
            loop.call_later(0.0, partial(self._go_on, answer))
        return taken

    def _go_on(self, answer: Callable[[], None]) -> None:
        self._going_on = False
        answer()

    def clear(self) -> None:
        """Forget all."""
        self._of.clear()
        self._all.clear()


class Pushes:
    """Pushes of the map to those who follow it, ``MAPS_PER_TURN`` a turn.

    The present map may be a newer one meanwhile, which is not stored yet. So what is pushed, EPOCHS too, is kept.

    Args:
        leads: returns whether this manager leads; else it has closed the connections.
        tell: pushes the EPOCHS that come before a map.
    """

    def __init__(self, loop: Loop, leads: Callable[[], bool], tell: Callable[[Peer, Epochs], None]) -> None:
        self._loop, self._leads, self._tell = loop, leads, tell
        self._due: deque[Peer] = deque()
        self._told: Told | None = None
        self._frame = b""
        #: The epoch of the map that was pushed last, or was the present one when this manager began to lead.
        self.epoch = 0
        #: Maps pushed so far.
        self.made = 0

    def begin(self, told: Told, subscribers: Iterable[Peer], waiting: Waiting) -> None:
        """Push a map to those who have another one and do not wait for an answer with it. O(subscribers)."""
        self.epoch, self._told = told.map.msg.epoch, told
        self._frame = told.map.header(flags=Flag.PUSH) + told.map.body
        fresh = not self._due
        for peer in subscribers:
            state = peer.context
            if not state.stale and state.epoch != self.epoch and not waiting.for_map(peer):
                state.stale = True
                self._due.append(peer)
        if fresh:
            self._some()

    def _some(self) -> None:
        self._leads()  # if not, the connections are closed
        for _ in range(min(MAPS_PER_TURN, len(self._due))):
            peer = self._due.popleft()
            if not peer.closed and peer.context.stale and not peer.out:
                self.push(peer)
        if self._due:
            self._loop.call_later(0.0, self._some)

    def push(self, peer: Peer) -> None:
        """Push the map to one that lacks it and takes data again. O(1)."""
        if self._told is not None:
            peer.context.stale = False
            peer.context.epoch = self.epoch
            self.made += 1
            self._tell(peer, self._told.epochs)
            peer.send(self._frame)
