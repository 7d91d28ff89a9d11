"""Serve the manager's pages over HTTP: status, metrics for Prometheus, health, and whether it is ready."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ..cluster.nodes import GONE, NodeState
from ..net.http import JSON, Page, Route
from ..net.metrics import OF_PROCESSES, Metric, Samples
from ..net.tls_peer import ServerTls
from . import status_api, status_page
from .activity import Activity
from .events import EventLog

#: The API's answer is that old at most, seconds: however many watch, a large cluster is described once a second.
API_S: Final = 1.0
#: By key of the status, about the whole cluster.
_CLUSTER: Final = {
    "epoch": Metric("simm_manager_epoch", "gauge", "Epoch of the shard map."),
    "shards_without_owner": Metric(
        "simm_manager_shards_without_owner", "gauge",
        "Shards without an owner: their keys are misses, and puts fail. A server that is absent beyond its grace "
        "period owns none.",
    ),
    "shards_moved": Metric("simm_manager_shards_moved_total", "counter", "Shards that changed owner."),
    "shards_moving": Metric(
        "simm_manager_shards_moving", "gauge", "Shards whose values are being copied to a new owner."
    ),
    "shards_waiting": Metric(
        "simm_manager_shards_waiting", "gauge", "Shards that must move and wait for others to arrive."
    ),
    "move_rate": Metric("simm_manager_move_bytes_per_second", "gauge", "Bytes a second copied to new owners."),
}  # fmt: skip
_NODES: Final = Metric(
    "simm_manager_nodes", "gauge", "Data servers by state: joining, running, suspect, dead, draining or left.",
    ("state",),
)  # fmt: skip
_DRAINED: Final = Metric("simm_manager_nodes_drained", "gauge", "Data servers that are empty and may be stopped.")
#: By key of the manager's own status.
_OWN: Final = {
    "leading": Metric("simm_manager_leading", "gauge", "1 at the manager that leads, 0 at a standby."),
    "state_stored": Metric(
        "simm_manager_state_stored", "gauge", "1 while the stored state is that of now, or none is stored."
    ),
    "connections": Metric("simm_manager_connections", "gauge", "Connections of data servers, clients and commands."),
    "subscribers": Metric("simm_manager_subscribers", "gauge", "Connections that get each new map."),
    "insecure": Metric("simm_manager_insecure", "gauge", "1 where it listens beyond loopback without a token."),
    "uptime_s": Metric("simm_manager_uptime_seconds", "gauge", "Time since its start."),
}
#: By key of the manager's counters.
_COUNTERS: Final = {
    key: Metric(f"simm_manager_{key}_total", "counter", about)
    for key, about in (
        ("joins", "JOINs of data servers."),
        ("joins_refused", "JOINs refused: the name is in use, or the token does not allow it."),
        ("heartbeats", "Heartbeats of data servers."),
        ("maps_sent", "Maps sent on request."),
        ("pushes", "Maps pushed to subscribers."),
        ("moves_reported", "Reports of data servers that shards have moved in."),
        ("maps_offered", "Maps offered by data servers to a manager that has lost its own."),
        ("advances", "Advances of namespaces after which nobody could read an old value."),
        ("advances_unconfirmed", "Advances that were not certain in time, as a server did not answer."),
        ("unauthorized", "Connections refused: with another token, without one, or of a user who may not."),
        ("protocol_errors", "Connections closed for malformed input."),
        ("handler_errors", "Requests that failed by an error in SiMM."),
        ("state_writes", "Writes of the state."),
        ("state_write_failures", "Writes of the state that failed: is the disk full, does etcd take writes?"),
    )
}  # fmt: skip
#: By key of a worker's status.
_WORKER: Final = {
    key: Metric(f"simm_worker_{key}", "gauge", about, ("server", "worker"))
    for key, about in (
        ("shards", "Shards owned."),
        ("shards_moving_in", "Shards owned whose values are still coming."),
        ("shards_moving_out", "Shards given away whose values are still being copied."),
        (
            "moved_bytes",
            "Bytes copied from previous owners since the move began, of servers that are neither dead nor gone.",
        ),
        ("capacity_bytes", "Bytes for values, of servers that are neither dead nor gone."),
        ("used_bytes", "Bytes in use, by the last heartbeat, of servers that are neither dead nor gone."),
        ("entries", "Values stored, by the last heartbeat, of servers that are neither dead nor gone."),
    )
}  # fmt: skip
#: Of those, what a server that is dead or has left neither holds nor does. The manager remembers it for a day.
_HELD: Final = ("moved_bytes", "capacity_bytes", "used_bytes", "entries")
#: All metrics of a manager, in their order.
METRICS: Final = (
    _NODES, _DRAINED, *_CLUSTER.values(), *_OWN.values(), *_COUNTERS.values(), *_WORKER.values(), *OF_PROCESSES,
)  # fmt: skip


class Standing(NamedTuple):
    """What load balancers and probes ask: whether a manager leads, who leads, and whether it collects a lost map."""

    leading: bool
    #: The leader's address; empty without a leader or a coordinator.
    leader: str
    rebuilding: bool


class ManagerPages:
    """The pages of a manager, for a :class:`~simm.net.http.Web`.

    Args:
        status: the manager's status, with its own counters under ``manager``. It takes milliseconds for a large
            cluster, so no page that needs no token asks for it.
        standing: O(1).
        trouble: returns what is wrong short of an outage; empty if nothing is.
        activity: what clients do.
        events: what has happened.
    """

    def __init__(
        self, status: Callable[[], dict[str, Any]], standing: Callable[[], Standing], trouble: Callable[[], str],
        activity: Activity, events: EventLog, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._status = status
        self._standing = standing
        self._trouble = trouble
        self._activity = activity
        self._events = events
        self._clock = clock
        #: The last answer of the API, and when it was made.
        self._made: tuple[float, str] | None = None
        #: Of the manager's port, if it has TLS.
        self.tls: ServerTls | None = None
        self.routes: dict[str, Route] = {
            "/": self.page, "/api/v1/status": self.api, "/metrics": self.metrics, "/healthz": self.healthz,
            "/readyz": self.readyz, "/leader": self.leader,
        }  # fmt: skip

    def healthz(self) -> Page:
        """Return 200 while the manager serves; the text says what is wrong nevertheless."""
        trouble = self._trouble()
        return Page(f"ok; {trouble}\n" if trouble else "ok\n")

    def readyz(self) -> Page:
        """Return 200 where clients and data servers get answers: it leads and has a map, or knows who leads."""
        found = self._standing()
        if found.leading:
            return Page(f"{self._trouble()}\n", status=503) if found.rebuilding else Page("ready, leads\n")
        return Page(f"ready, {self._trouble()}\n") if found.leader else Page(f"{self._trouble()}\n", status=503)

    def leader(self) -> Page:
        """Return 200 if this manager leads, else 503: for a load balancer in front of several managers."""
        leading = self._standing().leading
        return Page("leads\n" if leading else f"{self._trouble()}\n", status=200 if leading else 503)

    def line(self) -> str:
        """Return a line for the service manager: whether this manager leads, and the cluster's state."""
        status = self._status()
        if not status["manager"]["leading"]:
            return self._trouble()
        states = ", ".join(f"{count} {state}" for state, count in sorted(status["states"].items()))
        missing = status["shards_without_owner"]
        parts = (
            f"epoch {status['epoch']}", f"data servers: {states or 'none'}",
            f"{missing:,} shards without an owner" if missing else "", self._trouble(),
        )  # fmt: skip
        return "; ".join(filter(None, parts))

    def metrics(self) -> Samples:
        """Return the metrics."""
        samples = Samples(METRICS)
        status = self._status()
        own: Mapping[str, Any] = status["manager"]
        for state in NodeState:
            samples.add(_NODES, status["states"].get(state.value, 0), state.value)
        samples.add(_DRAINED, sum(node["drained"] and node["state"] not in GONE for node in status["nodes"]))
        for values, metrics in ((status, _CLUSTER), (own, _OWN), (own["counters"], _COUNTERS)):
            for key, metric in metrics.items():
                samples.add(metric, values[key])
        for node in status["nodes"]:
            gone = node["state"] in GONE
            for worker in node["workers"]:
                for key, metric in _WORKER.items():
                    if gone and key in _HELD:
                        continue
                    samples.add(metric, worker[key.removeprefix("shards_")], node["name"], worker["worker"])
        samples.add_process(self.tls.certificate_ends() if self.tls else None)
        return samples

    def page(self) -> Page:
        """Return the status page, a file that asks :meth:`api` for all that it shows."""
        return status_page.page()

    def api(self) -> Page:
        """Return the cluster's state for programs, see docs/status-api.md. It is made once in ``API_S`` at most."""
        now = self._clock()
        if self._made is None or not 0 <= now - self._made[0] < API_S:
            found = status_api.version_1(self._status(), self._activity, self._events, self._trouble(), now)
            self._made = now, json.dumps(found, allow_nan=False, separators=(",", ":")) + "\n"
        return Page(self._made[1], JSON)
