"""Serve the manager's pages over HTTP: status, metrics for Prometheus, and health."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ..cluster.nodes import NodeState
from ..net.http import HTML, METRICS, Page, process_samples, prometheus

_STYLE: Final = (
    "body{font:15px system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ccc}"
)
_HEADS: Final = (
    "node", "state", "last heard", "worker", "address", "shards", "moving in", "moving out", "copied", "left",
    "memory used", "entries",
)  # fmt: skip
#: Key of the status, kind, name and help of a metric about the whole cluster.
_CLUSTER: Final = (
    ("epoch", "gauge", "epoch", "Epoch of the shard map."),
    ("shards_without_owner", "gauge", "shards_without_owner", "Shards without an owner."),
    ("shards_moved", "counter", "shards_moved_total", "Shards that changed owner."),
    ("shards_moving", "gauge", "shards_moving", "Shards whose values are being copied to a new owner."),
    ("shards_waiting", "gauge", "shards_waiting", "Shards that must move and wait for others to arrive."),
    ("move_rate", "gauge", "move_bytes_per_second", "Bytes a second that are copied to new owners."),
)
_WORKER: Final = (
    ("shards", "shards", "Shards owned."),
    ("moving_in", "shards_moving_in", "Shards owned whose values are still coming."),
    ("moving_out", "shards_moving_out", "Shards given away whose values are still being copied."),
    ("moved_bytes", "moved_bytes", "Bytes copied from previous owners since the move began."),
    ("capacity_bytes", "capacity_bytes", "Bytes for values."),
    ("used_bytes", "used_bytes", "Bytes in use."),
    ("entries", "entries", "Values stored."),
)


class ManagerPages:
    """Routes for a :class:`~simm.net.http.Web`.

    Args:
        status: the manager's status, with its own counters under ``manager``.
        trouble: returns what is wrong short of an outage; empty if nothing is.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], trouble: Callable[[], str]) -> None:
        self._status = status
        self._trouble = trouble

    def healthz(self) -> Page:
        """Return 200 while the manager serves; the text says what is wrong nevertheless."""
        trouble = self._trouble()
        return Page(f"ok; {trouble}\n" if trouble else "ok\n")

    def leader(self) -> Page:
        """Return 200 if this manager leads, else 503: for a load balancer in front of several managers."""
        own = self._status()["manager"]
        return Page("leads\n" if own["leading"] else f"{self._trouble()}\n", status=200 if own["leading"] else 503)

    def metrics(self) -> Page:
        """Return the metrics as Prometheus text."""
        return Page(prometheus([*self._samples(), *process_samples()]), METRICS)

    def _samples(self) -> Iterator[tuple[str, str, str, Mapping[str, Any], float]]:
        status = self._status()
        own: Mapping[str, Any] = status["manager"]
        states = [node["state"] for node in status["nodes"]]
        for state in NodeState:
            labels = {"state": state.value}
            yield "simm_manager_nodes", "gauge", "Data servers by state.", labels, states.count(state.value)
        drained = sum(node["drained"] for node in status["nodes"])
        yield "simm_manager_nodes_drained", "gauge", "Data servers that are empty and may be stopped.", {}, drained
        for key, kind, name, about in _CLUSTER:
            yield f"simm_manager_{name}", kind, about, {}, status[key]
        for key in ("connections", "subscribers", "uptime_s", "insecure", "leading"):
            name = "uptime_seconds" if key == "uptime_s" else key
            yield f"simm_manager_{name}", "gauge", f"{name.replace('_', ' ').capitalize()}.", {}, float(own[key])
        for key, count in own["counters"].items():
            yield f"simm_manager_{key}_total", "counter", f"{key.replace('_', ' ').capitalize()}.", {}, count
        for key, name, about in _WORKER:
            for node in status["nodes"]:
                for worker in node["workers"]:
                    labels = {"node": node["name"], "worker": worker["worker"]}
                    yield f"simm_worker_{name}", "gauge", about, labels, worker[key]

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
            "<p><a href=/metrics>metrics</a> <a href=/healthz>healthz</a></p></body></html>\n"
        )
        return Page(body, HTML)
