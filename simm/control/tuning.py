"""Settings that an operator changes from afar, by an admin's token: the manager's own, and those of data servers.

The manager hands an order for a data server on by the connection by which that has joined, and its answer back. It
looks into neither. An order that is not answered in ``ANSWER_S`` is refused; a later answer is dropped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, Protocol

from ..cluster.machine import Cluster
from ..cluster.nodes import Timing
from ..config.live import LiveSettings, level_now, set_level
from ..config.settings import Settings
from ..errors import UsageError, printable
from ..net.loop import Loop
from ..net.peer import Peer
from ..wire import messages as M
from ..wire.admin_messages import AskNodeSettings, AskSettings, OrderSettings, SettingsDone
from ..wire.messages import Status
from ..wire.trace_messages import AskTrace
from .state_keeper import StateKeeper
from .traces import ClusterTraces

log = logging.getLogger("simm.manager")

#: A data server that does not answer an order so soon counts as silent, seconds. So many may wait.
ANSWER_S: Final = 2.0
ORDERS_MAX: Final = 64
#: Time for data servers to connect again: they take 3 s to give up a stopped manager, and as long for another one that
#: does not answer.
RETURN_S: Final = 8.0
#: What :meth:`Tuning.on_message` takes.
HANDLED: Final = AskSettings | AskNodeSettings | SettingsDone | AskTrace


def timing_of(settings: Settings) -> Timing:
    """Return the timing of the cluster that a manager with these settings begins with."""
    return Timing(
        settings.heartbeat_ms / 1000, settings.suspect_after, settings.dead_after, settings.grace_ms / 1000,
        settings.restart_grace_ms / 1000, settings.moves_at_once, return_s=RETURN_S,
    )  # fmt: skip


class Tuned(Protocol):
    """A manager, and its cluster, as far as settings change it."""

    timing: Timing
    cluster: Cluster
    state: StateKeeper


class Tuning:
    """The settings of one manager: its level of logging, and how its cluster waits and moves."""

    def __init__(
        self, manager: Tuned, loop: Loop, peer_of: Callable[[str], Peer | None], followers: Collection[Peer]
    ) -> None:
        self.traces = ClusterTraces(loop, followers)
        self._manager = manager
        self._loop = loop
        self._peer_of = peer_of
        #: By order: who asked, with which request, and who is to answer.
        self._orders: dict[int, tuple[Peer, int, Peer]] = {}
        self._last = 0
        timing = manager.timing
        self._live = LiveSettings({
            "log_level": level_now(), "moves_at_once": timing.moves_at_once, "grace_ms": round(timing.grace_s * 1000),
            "restart_grace_ms": round(timing.restart_grace_s * 1000),
        })  # fmt: skip

    def on_message(self, peer: Peer, number: int, msg: Any) -> None:
        """Handle a message of :data:`HANDLED`."""
        if isinstance(msg, AskSettings):
            peer.send_verdict(*self.ask(msg), number)
        elif isinstance(msg, AskTrace):
            peer.send_verdict(*self.traces.ask(msg), number)
            self._manager.state.changed()
            self._manager.state.save()
        elif isinstance(msg, SettingsDone):
            self._done(peer, msg)
            peer.send_message(M.Done(1), number)
        elif (server := self._peer_of(msg.node)) is None:
            text = f"no data server {msg.node!r} is connected; `simm node list` shows all"
            peer.send_error(number, Status.UNKNOWN_NODE, printable(text))
        elif not server.context.orders or len(self._orders) >= ORDERS_MAX:
            peer.send_error(number, Status.UNAVAILABLE, "it is of an older version, or others wait already")
        else:
            self._last += 1
            self._orders[self._last] = peer, number, server
            server.push(OrderSettings(self._last, msg.name, msg.value))
            self._loop.call_later(ANSWER_S, partial(self._expired, self._last))

    def _done(self, server: Peer, msg: SettingsDone) -> None:
        """Hand an answer on, if it is that of the server that has got the order."""
        order = self._orders.get(msg.order)
        if order is None or order[2] is not server:
            return
        peer, number, _ = self._orders.pop(msg.order)
        if peer.closed:
            return
        if msg.status == Status.OK:
            peer.send_message(M.StatsReply(msg.json), number)
        else:
            peer.send_error(number, Status.BAD_REQUEST, printable(msg.json.decode(errors="replace")))

    def _expired(self, order: int) -> None:
        peer, number, _ = self._orders.pop(order, (None, 0, None))
        if peer is not None and not peer.closed:
            peer.send_error(number, Status.UNAVAILABLE, f"it has not answered for {ANSWER_S:g} s; `simm status`")

    def ask(self, msg: AskSettings) -> tuple[Any, int]:
        """Return the answer to an operator, and its status."""
        live = self._live
        if msg.name:
            try:
                before = live.set(msg.name, msg.value)
            except UsageError as exc:
                return M.Error(printable(str(exc))), Status.BAD_REQUEST
            log.warning("an operator has set %s to %s, from %s", msg.name, live[msg.name], before)
            if msg.name == "log_level":
                set_level(live["log_level"])
            timing = self._manager.timing._replace(
                moves_at_once=live["moves_at_once"], grace_s=live["grace_ms"] / 1000,
                restart_grace_s=live["restart_grace_ms"] / 1000,
            )  # fmt: skip
            self._manager.timing = self._manager.cluster.timing = timing
        return M.StatsReply(json.dumps(live.rows()).encode()), Status.OK
