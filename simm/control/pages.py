"""Serve the manager's pages over HTTP: status, metrics for Prometheus, health, and whether it is ready."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..cluster.nodes import NodeState
from ..net.http import HTML, Page, Route
from ..net.metrics import OF_PROCESSES, Metric, Samples
from ..net.tls_peer import ServerTls

_STYLE: Final = (
    "body{font:15px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ccc}"
)
_HEADS: Final = (
    "node", "state", "last seen", "worker", "address", "shards", "moving in", "moving out", "copied", "left",
    "memory used", "entries",
)  # fmt: skip
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
        ("moved_bytes", "Bytes copied from previous owners since the move began."),
        ("capacity_bytes", "Bytes for values."),
        ("used_bytes", "Bytes in use, by the last heartbeat."),
        ("entries", "Values stored, by the last heartbeat."),
    )
}  # fmt: skip
#: All metrics of a manager, in their order.
METRICS: Final = (
    _NODES, _DRAINED, *_CLUSTER.values(), *_OWN.values(), *_COUNTERS.values(), *_WORKER.values(), *OF_PROCESSES,
)  # fmt: skip


class ManagerPages:
    """The pages of a manager, for a :class:`~simm.net.http.Web`.

    Args:
        status: the manager's status, with its own counters under ``manager``.
        trouble: returns what is wrong short of an outage; empty if nothing is.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], trouble: Callable[[], str]) -> None:
        self._status = status
        self._trouble = trouble
        #: Of the manager's port, if it has TLS.
        self.tls: ServerTls | None = None
        self.routes: dict[str, Route] = {
            "/": self.page, "/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz,
            "/leader": self.leader,
        }  # fmt: skip

    def healthz(self) -> Page:
        """Return 200 while the manager serves; the text says what is wrong nevertheless."""
        trouble = self._trouble()
        return Page(f"ok; {trouble}\n" if trouble else "ok\n")

    def readyz(self) -> Page:
        """Return 200 where clients and data servers get answers: it leads and has a map, or knows who leads."""
        status = self._status()
        own = status["manager"]
        if own["leading"]:
            return Page(f"{self._trouble()}\n", status=503) if status["rebuilding"] else Page("ready, leads\n")
        return Page(f"ready, {self._trouble()}\n") if own["leader"] else Page(f"{self._trouble()}\n", status=503)

    def leader(self) -> Page:
        """Return 200 if this manager leads, else 503: for a load balancer in front of several managers."""
        own = self._status()["manager"]
        return Page("leads\n" if own["leading"] else f"{self._trouble()}\n", status=200 if own["leading"] else 503)

    def line(self) -> str:
        """Return a line for the service manager: whether this manager leads, and the cluster's state."""
        status = self._status()
        if not status["manager"]["leading"]:
            return self._trouble()
        counts = Counter(node["state"] for node in status["nodes"])
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
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
        states = [node["state"] for node in status["nodes"]]
        for state in NodeState:
            samples.add(_NODES, states.count(state.value), state.value)
        samples.add(_DRAINED, sum(node["drained"] for node in status["nodes"]))
        for values, metrics in ((status, _CLUSTER), (own, _OWN), (own["counters"], _COUNTERS)):
            for key, metric in metrics.items():
                samples.add(metric, values[key])
        for node in status["nodes"]:
            for worker in node["workers"]:
                for key, metric in _WORKER.items():
                    samples.add(metric, worker[key.removeprefix("shards_")], node["name"], worker["worker"])
        samples.add_process(self.tls.certificate_ends() if self.tls else None)
        return samples

    def page(self) -> Page:
        """Return the status page."""
        status = self._status()
        own = status["manager"]
        rows = []
        for node in status["nodes"]:
            state = "drained" if node["drained"] else node["state"]
            for worker in node["workers"]:
                used, capacity = worker["used_bytes"] / (1 << 30), worker["capacity_bytes"] / (1 << 30)
                copied = f"{worker['moved_bytes'] / (1 << 30):.2f} GiB" if worker["moving_in"] else ""
                left = f"{worker['eta_s']:.0f} s" if worker["eta_s"] is not None else ""
                cells = (
                    node["name"], state, f"{node['silent_s']:.1f} s", worker["worker"], worker["address"],
                    worker["shards"], worker["moving_in"], worker["moving_out"], copied, left,
                    f"{used:.2f} / {capacity:.2f} GiB", worker["entries"],
                )  # fmt: skip
                rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        leads = "" if own["leading"] else f" This manager is {html.escape(self._trouble())}."
        body = (
            "<!doctype html><html lang=en><head><meta charset=utf-8><meta http-equiv=refresh content=5>"
            f"<title>SiMM cluster</title><style>{_STYLE}</style></head><body>"
            f"<h1>SiMM cluster {status['cluster']}</h1><p>epoch {status['epoch']}, {len(status['nodes'])} nodes, "
            f"{status['shards_without_owner']} of {status['shards']} shards without owner, "
            f"{status['shards_moving']} moving, {status['shards_waiting']} waiting to, "
            f"{own['connections']} connections, {own['subscribers']} subscribers, up {own['uptime_s']:.0f} s, "
            f"SiMM {own['version']}.{leads}</p>"
            f"<table><tr>{heads}</tr>{''.join(rows)}</table>"
            "<p><a href=/metrics>metrics</a> <a href=/healthz>healthz</a> <a href=/readyz>readyz</a></p>"
            "</body></html>\n"
        )
        return Page(body, HTML)
