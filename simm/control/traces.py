"""Traces of a whole cluster: an admin asks the manager, which tells the clients that follow its map.

Those that come later hear of it with their first map, as long as it lasts. A client ends by itself after the seconds
that it was told, so a manager that goes away leaves nobody tracing. The manager keeps what is asked for in memory only.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection
from typing import Any, Final

from ..constants import TRACE_S_MAX
from ..net.loop import Loop
from ..net.peer import Peer
from ..wire import messages as M
from ..wire.messages import Status
from ..wire.trace_messages import AskTrace, OrderTrace, fault_of

log = logging.getLogger("simm.manager")

#: Connections that are told in one turn of the loop.
TOLD_PER_TURN: Final = 128


class ClusterTraces:
    """What clients are asked to trace. ``followers``: the connections that follow the map."""

    def __init__(self, loop: Loop, followers: Collection[Peer]) -> None:
        self._loop = loop
        self._followers = followers
        self._asked = OrderTrace(0, 0, 0)
        self._until = 0.0
        #: Who is to be told.
        self._to_tell: deque[Peer] = deque()

    def ask(self, msg: AskTrace) -> tuple[Any, int]:
        """Return the answer to an admin, and its status."""
        if fault := fault_of(msg, TRACE_S_MAX):
            return M.Error(fault), Status.BAD_REQUEST
        self._asked, self._until = OrderTrace(*msg), self._loop.clock() + msg.seconds
        fresh = not self._to_tell
        told = [peer for peer in self._followers if peer.context.traces]
        self._to_tell = deque(told)
        if fresh:
            self._tell_some()
        if msg.seconds:
            log.warning("an admin lets %d clients, and those that come, trace for %d s", len(told), msg.seconds)
        else:
            log.warning("an admin lets %d clients trace no more", len(told))
        return M.Done(len(told)), Status.OK

    def greet(self, peer: Peer) -> None:
        """Tell a connection that has asked for the map what is asked for, if anything is."""
        if peer.context.traces and (order := self._now()).seconds:
            peer.push(order)

    def _now(self) -> OrderTrace:
        """Return what is asked for now: for the seconds that are left, rounded up."""
        left = self._until - self._loop.clock()
        return self._asked._replace(seconds=math.ceil(left)) if left > 0 else OrderTrace(0, 0, 0)

    def _tell_some(self) -> None:
        order = self._now()
        for _ in range(min(TOLD_PER_TURN, len(self._to_tell))):
            peer = self._to_tell.popleft()
            if not peer.closed:
                peer.push(order)
        if self._to_tell:
            self._loop.call_later(0.0, self._tell_some)
