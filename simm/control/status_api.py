"""The cluster's state as JSON for programs, and for the manager's page: version 1 of ``/api/v1/status``.

docs/status-api.md describes every key, and a test holds it to this module. Keys may be added within a version; none is
removed, renamed or given another meaning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from ..errors import printable
from .activity import Activity
from .events import EventLog

VERSION: Final = 1
#: Of a worker, as the cluster's status has it.
_LOADS: Final = ("shards", "moving_in", "moving_out", "used_bytes", "capacity_bytes", "entries", "puts", "evictions")
_MANAGER: Final = (
    "version", "uptime_s", "leading", "leader", "term", "state_stored", "insecure", "connections", "subscribers",
)  # fmt: skip
_CLUSTER: Final = (
    "epoch", "rebuilding", "shards", "shards_without_owner", "shards_moving", "shards_waiting", "shards_moved",
)  # fmt: skip


def version_1(
    status: Mapping[str, Any], activity: Activity, events: EventLog, trouble: str, now: float
) -> dict[str, Any]:
    """Return the state of the cluster, of what its manager's status says and what its servers report. O(workers)."""
    nodes = [_node(node, activity, now) for node in status["nodes"]]
    serving = [node for node in nodes if node["state"] not in ("dead", "left")]
    namespaces, namespaces_left = activity.namespaces(status["namespace_epochs"], now)
    clients, clients_left = activity.clients(now)
    return {
        "version": VERSION,
        "time": round(time.time(), 3),
        "manager": {**{key: status["manager"][key] for key in _MANAGER}, "trouble": printable(trouble)},
        "cluster": {
            "id": status["cluster"], **{key: status[key] for key in _CLUSTER},
            "move_bytes_per_s": status["move_rate"], "move_eta_s": status["eta_s"],
            **{key: sum(node[key] for node in serving) for key in ("used_bytes", "capacity_bytes", "entries")},
        },
        "rates": activity.rates(now),
        "latency": activity.latency(now),
        "since_start": activity.since_start(),
        "nodes": nodes,
        "nodes_left_out": status["nodes_left_out"],
        "namespaces": namespaces,
        "namespaces_left_out": namespaces_left,
        "clients": clients,
        "clients_left_out": clients_left,
        "events": events.newest(),
        "history": activity.history(),
    }  # fmt: skip


def _node(node: Mapping[str, Any], activity: Activity, now: float) -> dict[str, Any]:
    """Return a data server, with its workers."""
    workers = node["workers"]
    return {
        "name": printable(node["name"]), "state": node["state"], "draining": node["draining"],
        "drained": node["drained"], "silent_s": node["silent_s"], "in_state_s": node["in_state_s"],
        **{key: sum(worker[key] for worker in workers) for key in _LOADS},
        **activity.server(node["name"], now),
        "workers": [
            {"worker": worker["worker"], "numa_node": worker["numa_node"], "address": printable(worker["address"]),
             **{key: worker[key] for key in _LOADS}, "move_eta_s": worker["eta_s"]}
            for worker in workers
        ],
    }  # fmt: skip
