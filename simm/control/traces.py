"""Traces of a whole cluster: an admin asks the manager, which tells the clients that follow its map.

Those that come later hear of it with their first map, as long as it lasts. A client ends by itself after the seconds
that it was told, so a manager that goes away leaves nobody tracing. What is asked for is stored with the manager's
state, by the clock of the day. So the next manager knows it, and can end it. A client that has missed the end of a
trace hears of that when it follows the map again, as long as it might go on. Without a store the next manager does not
know, and says nothing: the clients that trace end at their time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
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


_NOTHING: Final = OrderTrace(0, 0, 0)


class ClusterTraces:
    """What clients trace. ``followers``: the connections that follow the map. ``wall``: returns the time of day."""

    def __init__(self, loop: Loop, followers: Collection[Peer], wall: Callable[[], float] = time.time) -> None:
        self._loop = loop
        self._followers = followers
        self._wall = wall
        self._asked = _NOTHING
        #: When that ends, and when the last client ends that was told of anything, by the loop's clock.
        self._until = self._told_until = -math.inf
        #: Who is to be told.
        self._to_tell: deque[Peer] = deque()

    def ask(self, msg: AskTrace) -> tuple[Any, int]:
        """Return the answer to an admin, and its status."""
        if fault := fault_of(msg, TRACE_S_MAX):
            return M.Error(fault), Status.BAD_REQUEST
        self._asked, self._until = OrderTrace(*msg), self._loop.clock() + msg.seconds
        self._told_until = max(self._told_until, self._until)
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
        """Tell a connection that has asked for the map what is asked for, if it may trace or is to."""
        if peer.context.traces and self._loop.clock() < self._told_until:
            peer.push(self._now())

    def _now(self) -> OrderTrace:
        """Return what is asked for now: for the seconds that are left, rounded up."""
        left = self._until - self._loop.clock()
        return self._asked._replace(seconds=math.ceil(left)) if left > 0 else _NOTHING

    # -- storing -------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, Any]:
        """Return what the next manager must know, JSON-able; nothing once no client can trace any more."""
        now, wall = self._loop.clock(), self._wall()
        if now >= self._told_until:
            return {}
        ends = [wall + max(0.0, until - now) for until in (self._until, self._told_until)]
        return {"trace": [self._asked.ratio, self._asked.slow_ms, *ends]}

    def take_state(self, state: Any) -> None:
        """Go on from what an earlier manager has stored, None for nothing. What cannot be is left out."""
        self._asked, self._until, self._told_until = _NOTHING, -math.inf, -math.inf
        row = state.get("trace") if isinstance(state, Mapping) else None
        if row is None:
            return
        if not (isinstance(row, list) and [type(each) for each in row] == [int, int, float, float]):
            log.warning("the stored state names a trace that cannot be: left out")
            return
        ratio, slow_ms, *ends = row
        # A clock that has been set must not make it longer than any can be.
        left, told = (max(0.0, min(end - self._wall(), TRACE_S_MAX)) for end in ends)
        asked = OrderTrace(ratio, slow_ms, math.ceil(left)) if left else _NOTHING
        if min(ratio, slow_ms) < 0 or fault_of(asked, TRACE_S_MAX):
            log.warning("the stored state names a trace that cannot be: left out")
            return
        now = self._loop.clock()
        self._asked, self._until, self._told_until = asked, now + left, now + max(left, told)
        if left:
            log.warning("the trace of an earlier manager goes on for %.0f s", left)

    def _tell_some(self) -> None:
        order = self._now()
        for _ in range(min(TOLD_PER_TURN, len(self._to_tell))):
            peer = self._to_tell.popleft()
            if not peer.closed:
                peer.push(order)
        if self._to_tell:
            self._loop.call_later(0.0, self._tell_some)
