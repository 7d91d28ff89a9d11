"""The cluster for people and programs: nodes, workers, what moves and how long it will take. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .constants import NO_OWNER, SHARD_COUNT
from .deal import Tables
from .members import Node
from .messages import WorkerLoad

_NO_LOAD = WorkerLoad(0, 0, 0, 0)


def report(
    nodes: Mapping[str, Node], places: Mapping[tuple[str, int], int], tables: Tables, observed: float
) -> dict[str, Any]:
    """What ``Cluster.status`` says of nodes and shards, JSON-able. O(shards + workers).

    ``eta_s`` of a worker: what its sources hold of the shards on their way to it, if their bytes are spread evenly over
    their shards, less what has been copied, at the rate of late. None where nothing is being copied.
    """
    count = len(places)
    moving = tables.previous != NO_OWNER
    owned = np.bincount(tables.owners[tables.owners != NO_OWNER], minlength=count)
    coming = np.bincount(tables.owners[moving], minlength=count)
    going = np.bincount(tables.previous[moving], minlength=count)
    loads = {(node.name, info.worker): load for node in nodes.values() for info, load in zip(node.workers, node.loads)}
    used = np.zeros(count)
    for key, load in loads.items():
        if key in places:
            used[places[key]] = load.used_bytes
    each = used / np.maximum(owned + going, 1)
    expected = np.bincount(tables.owners[moving], each[tables.previous[moving]], count)

    rows: list[dict[str, Any]] = []
    times: list[float] = []
    totals = dict.fromkeys(("moved_bytes", "move_rate"), 0)
    for name in sorted(nodes):
        node = nodes[name]
        workers: list[dict[str, Any]] = []
        for info in node.workers:
            load = loads.get((name, info.worker), _NO_LOAD)
            place = places.get((name, info.worker))
            worker: dict[str, Any] = {
                "worker": info.worker,
                "numa_node": info.numa_node,
                "address": f"{info.host}:{info.port}",
                "capacity_bytes": info.capacity,
                "shards": 0 if place is None else int(owned[place]),
                "moving_in": 0 if place is None else int(coming[place]),
                "moving_out": 0 if place is None else int(going[place]),
                **load._asdict(),
                "eta_s": None,
            }
            if place is not None and coming[place] and load.move_rate:
                eta = round(max(0.0, float(expected[place]) - load.moved_bytes) / load.move_rate, 1)
                worker["eta_s"] = eta
                times.append(eta)
            for total in totals:
                totals[total] += worker[total]
            workers.append(worker)
        rows.append(
            {
                "name": name,
                "state": node.state.value,
                "draining": node.draining,
                "drained": node.draining and not any(each["shards"] or each["moving_out"] for each in workers),
                "instance": f"{node.instance:016x}",
                "silent_s": max(0.0, round(observed - node.heard, 3)),
                "in_state_s": round(observed - node.changed, 3),
                "map_epoch": node.map_epoch,
                "workers": workers,
            }
        )
    return {
        "shards": SHARD_COUNT,
        "shards_without_owner": int((tables.owners == NO_OWNER).sum()),
        "shards_moving": int(moving.sum()),
        **totals,
        "eta_s": max(times, default=None),
        "nodes": rows,
    }
