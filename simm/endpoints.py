"""The supervisor's side of the endpoint processes, one a worker: whether there are any, their listeners, their lives.

The supervisor itself loads no verbs library: it looks whether the kernel knows a device. All the rest, a missing
library or a port that is down included, is found by the children, who look again later. A listener outlives the
processes that accept on it, so that a client which comes while one is being replaced waits in the backlog.

An endpoint that cannot open its devices stays, says why, and tries again; one that dies is replaced, at growing
intervals when it dies soon; one that says nothing for SILENT_S is killed: the grants of its lanes would be lost for
good else. With ``--rdma on`` the data server is ready when all endpoints are, and ends when one fails before that.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from . import messages as M
from . import rails, topology
from .children import Children
from .endpoint import run_endpoint
from .errors import ConfigError
from .loop import Loop, Peer, Service, listen_tcp
from .process import Child
from .rpc import Frame, decode, encode
from .server_options import DataServerOptions
from .worker_slot import STATS_ID, WorkerSlot

log = logging.getLogger("simm.dataserver")

POLL_S: Final = 0.25
#: Between an endpoint's death and its successor: doubled each time that it lived less than STEADY_S.
AGAIN_S: Final = (0.2, 30.0)
STEADY_S: Final = 60.0
#: Registering a piece of an arena holds an endpoint up for seconds.
SILENT_S: Final = 60.0


def absence() -> str:
    """Why there can be no RDMA on this host; empty when there may be."""
    return "" if rails.ports() else "this host has no RDMA device"


class EndpointSlot:
    """One endpoint's place: what outlives the process."""

    def __init__(self, slot: WorkerSlot, listener: socket.socket) -> None:
        self.slot = slot
        self.listener = listener
        self.child: Child | None = None
        self.stats: dict[str, Any] = {}
        self.started = self.heard = 0.0
        self.pause_s = AGAIN_S[0]
        self.restarts = 0
        #: It has been ready, ever.
        self.was_ready = False

    @property
    def port(self) -> int:
        """Where clients find it."""
        port: int = self.listener.getsockname()[1]
        return port


class Endpoints(Service):
    """All endpoints of a data server. None where RDMA is off or impossible: ``why`` says so."""

    def __init__(
        self, options: DataServerOptions, loop: Loop, children: Children, *,
        on_ready: Callable[[], None], give_up: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.options = options
        self.loop = loop
        self.children = children
        self.why = ""
        self.places: dict[int, EndpointSlot] = {}
        self._on_ready = on_ready
        self._give_up = give_up

    def look(self) -> None:
        """Decide whether there are endpoints. Raises ConfigError where there must be and cannot."""
        if self.options.rdma == "off":
            self.why = "off"
            return
        self.why = absence()
        if not self.why:
            self.loop.call_every(POLL_S, self._poll)
        elif self.options.rdma == "on":
            raise ConfigError(f"--rdma on, but {self.why}: load its driver, pass it into the container, or say auto")
        else:
            log.info("no RDMA: %s", self.why)

    def listen(self, slot: WorkerSlot) -> int:
        """Open the listener of a worker's endpoint, if it is to have one; its port, or 0. Raises OSError."""
        if self.why:
            return 0
        options = self.options
        port = options.listen_port + len(options.nodes) + slot.number if options.listen_port else 0
        place = self.places[slot.number] = EndpointSlot(slot, listen_tcp(options.listen_host, port))
        return place.port

    def start(self) -> None:
        """Start the processes."""
        for place in self.places.values():
            self.children.or_later(partial(self._start, place))

    def _start(self, place: EndpointSlot) -> None:
        options, slot, listener = self.options, place.slot, place.listener

        def body(supervisor: socket.socket) -> None:
            topology.pin(slot.node)
            from .verbs import open_fabric  # not in the supervisor

            run_endpoint(
                listener, slot.uds, supervisor, partial(open_fabric, options.rdma_devices or None, numa=slot.node),
                options.tokens, windows=options.rdma_windows,
            )  # fmt: skip

        place.child = child = self.children.fork(body, [listener.fileno()])
        child.peer = self.loop.adopt(child.sock, self, f"endpoint of worker {slot.number}")
        child.peer.context = place
        place.started = place.heard = self.loop.clock()
        log.info("endpoint of worker %d is process %d", slot.number, child.pid)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        msg = decode(frame)
        place: EndpointSlot = peer.context
        if not isinstance(msg, M.StatsReply):
            return
        place.stats = json.loads(msg.json)
        place.heard = self.loop.clock()
        if place.stats["ready"]:
            place.was_ready = True
            self._on_ready()
        elif self.options.rdma == "on" and not place.was_ready and place.stats["opens_failed"]:
            self._give_up(f"--rdma on, but worker {place.slot.number} has no RDMA: {place.stats['why']}")

    def _poll(self) -> None:
        for place in self.places.values():
            child = place.child
            if child is None or child.peer is None or child.peer.closed:
                continue
            if self.loop.clock() - place.heard > SILENT_S:
                log.error("endpoint of worker %d (process %d) says nothing: ending it", place.slot.number, child.pid)
                place.heard = self.loop.clock()
                os.kill(child.pid, signal.SIGKILL)
                continue
            child.peer.send(encode(M.Stats(0), STATS_ID))

    def reap(self) -> None:
        """Replace those that died."""
        for place in self.places.values():
            child = place.child
            if child is None or not child.ended():
                continue
            child.lost()
            place.child = None
            place.stats = {}
            if self.children.stopping:
                continue
            if self.options.rdma == "on" and not place.was_ready:
                self._give_up(f"--rdma on, but the endpoint of worker {place.slot.number} died before it was ready")
            place.restarts += 1
            if self.loop.clock() - place.started > STEADY_S:
                place.pause_s = AGAIN_S[0]
            log.error(
                "endpoint of worker %d (process %d) died: another one in %.1f s", place.slot.number, child.pid,
                place.pause_s,
            )  # fmt: skip
            self.loop.call_later(place.pause_s, partial(self.children.or_later, partial(self._start, place)))
            place.pause_s = min(AGAIN_S[1], place.pause_s * 2)

    @property
    def awaited(self) -> bool:
        """``--rdma on``, and one has not been ready yet?"""
        return self.options.rdma == "on" and not all(place.was_ready for place in self.places.values())

    def port(self, number: int) -> int:
        """Where clients of a worker find its endpoint; 0 where there is none."""
        place = self.places.get(number)
        return place.port if place is not None else 0

    def row(self, number: int) -> dict[str, Any]:
        """For /metrics: what is known of a worker's endpoint; ``why`` it is not ready."""
        place = self.places.get(number)
        if place is None:
            return {"ready": False, "why": self.why}
        if not place.stats:
            return {"ready": False, "why": "starting", "restarts": place.restarts}
        return {**place.stats, "restarts": place.restarts}

    def processes(self) -> list[Child]:
        """Those that run."""
        return [place.child for place in self.places.values() if place.child is not None]

    def close(self) -> None:
        """Close the listeners, after the processes have ended."""
        for place in self.places.values():
            place.listener.close()
