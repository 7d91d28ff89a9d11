"""The supervisor's side of the endpoint processes, one per worker: whether there are any, their listeners, their lives.

The supervisor loads no verbs library; it only checks whether the kernel knows a device. The children find everything
else, such as a missing library or an inactive port, and look again later. A listener outlives the processes that accept
on it, so a client that connects during a replacement waits in the backlog.

An endpoint that cannot open its devices stays, reports why, and tries again. One that dies is replaced, after growing
pauses if it dies soon. One that is silent for SILENT_S is killed, as the grants of its leases would otherwise be lost.
With ``--rdma on`` the data server is ready when all endpoints are, and ends if one fails before that.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ..config.parsers import Address
from ..errors import AbsentError
from ..host import numa
from ..ipc.tally import Continued, Totals
from ..net.listeners import open_listener
from ..net.loop import Loop
from ..net.process import Child, end_children
from ..rdma import ports
from ..wire import messages as M
from .children import OOM_WORKER, STATS_ID, Children, Supervised, WorkerSlot
from .options import DataServerOptions
from .rdma_endpoint import run_endpoint
from .slots.failures import Failures

log = logging.getLogger("simm.dataserver")

POLL_S: Final = 0.25
#: Between an endpoint's death and its successor: doubled each time that it lived less than STEADY_S.
AGAIN_S: Final = (0.2, 30.0)
STEADY_S: Final = 60.0
#: The kernel takes some seconds to give hundreds of GiB back that were registered.
DEAD_S: Final = 30.0
#: Registering a piece of an arena holds an endpoint up for seconds.
SILENT_S: Final = 60.0


def absence() -> str | None:
    """Return why there can be no RDMA on this host; None if there may be."""
    return None if ports.ports() else "this host has no RDMA device"


class EndpointState:
    """One worker's endpoint: what outlives its process."""

    process: Supervised

    def __init__(self, number: int, listener: socket.socket) -> None:
        self.number = number
        self.listener = listener
        self.stats: dict[str, Any] = {}
        self.failures = Failures()
        self.counted = Continued()
        self.pause_s = AGAIN_S[0]
        self.restarts = 0
        #: The endpoint was ready at some time.
        self.was_ready = False

    @property
    def port(self) -> int:
        """Return the TCP port at which clients connect."""
        port: int = self.listener.getsockname()[1]
        return port


class Endpoints:
    """All endpoints of a data server; none if RDMA is off or impossible, as ``down_reason`` says."""

    def __init__(
        self, options: DataServerOptions, loop: Loop, children: Children, *,
        on_ready: Callable[[], None], give_up: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.options = options
        self.loop = loop
        self.children = children
        #: Why there are none; None if there are.
        self.down_reason: str | None = None
        self.by_worker: dict[int, EndpointState] = {}
        self._on_ready = on_ready
        self._give_up = give_up

    def detect(self) -> None:
        """Decide whether there are endpoints. Raises AbsentError if there must be and is no device."""
        if self.options.rdma == "off":
            self.down_reason = "off"
            return
        self.down_reason = absence()
        if self.down_reason is None:
            self.loop.call_every(POLL_S, self._poll)
        elif self.options.rdma == "on":
            remedy = "load its driver, pass it into the container, or say auto"
            raise AbsentError(f"--rdma on, but {self.down_reason}: {remedy}")
        else:
            log.info("no RDMA: %s", self.down_reason)

    def listen(self, slot: WorkerSlot, server: str = "") -> int:
        """Open the listener of a worker's endpoint and return its port; 0 if it has none. Raises SimmError.

        ``server``: what clients with a token ask for.
        """
        if self.down_reason is not None:
            return 0
        options = self.options
        address = Address(options.listen_host, options.port_of(slot.number, rdma=True))
        endpoint = self.by_worker[slot.number] = EndpointState(slot.number, open_listener(address, "--listen"))

        def body(supervisor: socket.socket) -> None:
            numa.pin(slot.node)
            from ..verbs import open_fabric  # not in the supervisor

            run_endpoint(
                endpoint.listener, slot.unix.direct_path, supervisor,
                partial(open_fabric, options.rdma_devices or None, numa=slot.node), options.tokens,
                windows=options.rdma_windows, server=server, tls=options.tls, users=options.users,
            )  # fmt: skip

        endpoint.process = Supervised(
            self.children, f"endpoint of worker {slot.number}", body, [endpoint.listener.fileno(), *slot.unix.fds],
            partial(self._on_message, endpoint), oom=OOM_WORKER,
        )  # fmt: skip
        return endpoint.port

    def start(self) -> None:
        """Start the processes."""
        for number in self.by_worker:
            self.start_of(number)

    def start_of(self, number: int, *, later: bool = False) -> None:
        """Start the process of a worker's endpoint, if it has one. ``later``: the server serves on if it fails."""
        if (endpoint := self.by_worker.get(number)) is not None:
            endpoint.was_ready = endpoint.was_ready or later
            endpoint.process.start_or_retry()

    def remove(self, number: int) -> list[Supervised]:
        """Forget a worker's endpoint, if it has one, and return its process, which the caller ends and retires."""
        if (endpoint := self.by_worker.pop(number, None)) is None:
            return []
        endpoint.listener.close()
        return [endpoint.process]

    def end(self) -> bool:
        """Kill all processes, and wait until none is left: so long their clients read the arenas, and write to them.

        Gives the server up and returns False if one does not end within ``DEAD_S``.
        """
        left = end_children(self.processes(), 0.0, DEAD_S)
        if left:
            self._give_up(f"the endpoint process {left[0].pid} was killed and does not end: its clients use the arena")
        return not left

    def _on_message(self, endpoint: EndpointState, msg: Any, _request_id: int) -> None:
        if not isinstance(msg, M.StatsReply):
            return
        endpoint.stats = json.loads(msg.json)
        endpoint.failures.take(endpoint.stats)
        endpoint.counted.take(endpoint.stats["pid"], endpoint.stats["counted"])
        if endpoint.stats["ready"]:
            endpoint.was_ready = True
            self._on_ready()
        elif self.options.rdma == "on" and not endpoint.was_ready and endpoint.stats["opens_failed"]:
            self._give_up(f"--rdma on, but worker {endpoint.number} has no RDMA: {endpoint.stats['reason']}")

    def _poll(self) -> None:
        for endpoint in self.by_worker.values():
            endpoint.process.kill_if_silent(SILENT_S)
            endpoint.process.send_unless_behind(M.Stats(0), STATS_ID)

    def reap(self) -> None:
        """Replace endpoints that died."""
        for endpoint in self.by_worker.values():
            process = endpoint.process
            child = process.ended()
            if child is None:
                process.start_if_missing()
                continue
            endpoint.stats = {}
            if self.children.stopping:
                continue
            if self.options.rdma == "on" and not endpoint.was_ready:
                self._give_up(f"--rdma on, but the {process.name} died before it was ready")
            endpoint.restarts += 1
            if self.loop.clock() - process.started_at > STEADY_S:
                endpoint.pause_s = AGAIN_S[0]
            then = f"another one in {endpoint.pause_s:.1f} s"
            log.error("%s (process %d) died%s: %s", process.name, child.pid, child.cause, then)
            process.start_or_retry(pause_s=endpoint.pause_s)
            endpoint.pause_s = min(AGAIN_S[1], endpoint.pause_s * 2)

    @property
    def awaited(self) -> bool:
        """Return whether ``--rdma on`` waits for an endpoint that was never ready."""
        return self.options.rdma == "on" and not all(endpoint.was_ready for endpoint in self.by_worker.values())

    def row(self, number: int) -> dict[str, Any]:
        """Return what /metrics reports of a worker's endpoint; ``reason`` if it is not ready."""
        endpoint = self.by_worker.get(number)
        if endpoint is None:
            return {"ready": False, "reason": self.down_reason}
        if not endpoint.stats:
            return {"ready": False, "reason": "starting"}
        return endpoint.stats

    def counted(self, number: int) -> Totals | None:
        """Return what has been counted at a worker's endpoint and its predecessors; None if it has none."""
        endpoint = self.by_worker.get(number)
        return endpoint.counted.totals() if endpoint is not None else None

    def failures(self, number: int) -> dict[str, int]:
        """Return what a worker's endpoint has refused or failed at, with its predecessors; nothing without one."""
        endpoint = self.by_worker.get(number)
        return endpoint.failures.totals() if endpoint is not None else {}

    def deaths(self, number: int) -> dict[str, int]:
        """Return how many endpoint processes of a worker died, by what they did; nothing if there is none."""
        return {"endpoint": endpoint.restarts} if (endpoint := self.by_worker.get(number)) is not None else {}

    def processes(self) -> list[Child]:
        """Return the running endpoint processes."""
        return [each.process.child for each in self.by_worker.values() if each.process.child is not None]

    def close(self) -> None:
        """Close the listeners, after the processes have ended."""
        for endpoint in self.by_worker.values():
            endpoint.listener.close()
