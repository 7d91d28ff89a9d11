"""Write the cluster out as plain data: its state for the manager's next life, its status for people and programs.

No I/O. The state has format 2. Format 1, from before shards moved with their values, still loads: every owner has its
shards since the stored epoch, and no shard moves. Times are not stored: they mean nothing to the next process.
In the state, preferred owners are called ``homes``, as they were when the format was made.
"""

from __future__ import annotations

import base64
import binascii
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..constants import NO_OWNER, SHARD_COUNT
from ..errors import CorruptionError, RemoteProtocolError
from ..wire.messages import Join, WorkerInfo, WorkerLoad
from .epochs import NamespaceEpochs
from .nodes import SERVING, Key, Node, NodeState, join_fault
from .shard_map import Tables, WorkerIndexes, index_bytes, packed_since, unpack_since

STATE_FORMAT: Final = 2
_FORMATS: Final = (1, STATE_FORMAT)
#: What format 1 called a running node.
_OLD_RUNNING: Final = "up"
_NO_LOAD: Final = WorkerLoad(0, 0, 0, 0)
#: A status has so many of the nodes that are not in the map any more: those that an operator wants empty, then those
#: that went last. Thousands may be remembered, and all who ask would wait for them.
GONE_SHOWN: Final = 256


class Stored(NamedTuple):
    """A cluster as it was stored. Nodes that were alive are JOINING."""

    cluster: int
    epoch: int
    nodes: dict[str, Node]
    keys: list[Key]
    tables: Tables
    namespaces: NamespaceEpochs


def dump(
    cluster: int, epoch: int, nodes: Iterable[Node], keys: Sequence[Key], tables: Tables, namespaces: NamespaceEpochs
) -> dict[str, Any]:
    """Return the state, JSON-able."""
    return {
        "format": STATE_FORMAT,
        "cluster": cluster,
        "epoch": epoch,
        "nodes": [
            {
                "name": node.name,
                "instance": node.instance,
                "state": node.state.value,
                "released": node.released,
                "cold": node.cold,
                "draining": node.draining,
                "follows": node.follows,
                "workers": [list(info) for info in node.workers],
            }
            for node in nodes
        ],
        "keys": [list(key) for key in keys],
        "owners": _text(index_bytes(tables.owners)),
        "homes": _text(index_bytes(tables.preferred)),
        "previous": _text(index_bytes(tables.previous)),
        "since": _text(packed_since(tables)),
        **({"namespaces": namespaces.to_state()} if namespaces else {}),
    }


def load(state: Any) -> Stored:
    """Undo :func:`dump`. Raises CorruptionError for what it cannot have made, as far as single fields show."""
    if not isinstance(state, Mapping):
        raise CorruptionError("a cluster's state must be an object")
    version = state.get("format")
    if version not in _FORMATS or isinstance(version, bool):
        raise CorruptionError(f"the state has format {version!r}, this build reads {_FORMATS[0]} to {_FORMATS[-1]}")
    try:
        cluster, epoch = _whole(state["cluster"], 1 << 64), _whole(state["epoch"], 1 << 62)
        nodes: dict[str, Node] = {}
        for row in state["nodes"]:
            node = _node(row, version)
            if node.name in nodes:
                raise ValueError(f"node {node.name!r} twice")
            nodes[node.name] = node
        keys = [(str(name), _whole(number, 1 << 16)) for name, number in state["keys"]]
        tables = Tables()
        tables.owners = _indexes(state["owners"])
        tables.preferred = _indexes(state["homes"])
        if version == 1:
            tables.since[:] = epoch
        else:
            tables.previous = _indexes(state["previous"])
            tables.since = np.frombuffer(unpack_since(_raw(state["since"])), np.uint64).copy()
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, RemoteProtocolError) as exc:
        raise CorruptionError(f"the cluster's state is malformed: {exc}") from exc
    namespaces = NamespaceEpochs.from_state(state.get("namespaces", {}))
    if any(each.epoch > epoch for each in namespaces.table()):
        raise CorruptionError("a namespace has an epoch that no map has had")
    return Stored(cluster, epoch, nodes, keys, tables, namespaces)


def _node(row: Any, version: int) -> Node:
    name, instance = row["name"], _whole(row["instance"], 1 << 64)
    workers = [WorkerInfo(*values) for values in row["workers"]]
    fault = join_fault(Join(instance, 0, name, workers))
    if not fault and any(info.node != name for info in workers):
        fault = "it has workers of another node"
    if fault:
        raise ValueError(f"node {name!r}: {fault}")
    old = version == 1 and row["state"] == _OLD_RUNNING
    state = NodeState.RUNNING if old else NodeState(row["state"])
    node = Node(name, instance, workers, NodeState.JOINING if state in SERVING else state, 0.0)
    node.released, node.cold = row["released"] is True, row.get("cold", True) is True
    node.draining = version > 1 and row["draining"] is True
    follows = row.get("follows")
    node.follows = follows if isinstance(follows, bool) else None
    return node


def _indexes(text: Any) -> WorkerIndexes:
    raw = _raw(text)
    if len(raw) != 2 * SHARD_COUNT:
        raise ValueError(f"a shard table of {len(raw)} bytes instead of {2 * SHARD_COUNT}")
    return np.frombuffer(raw, "<u2").astype(np.uint16)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _whole(value: Any, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError(f"{value!r} is not a number from 0 to {limit - 1}")
    return value


def report(
    nodes: Mapping[str, Node], indexes: Mapping[Key, int], tables: Tables, observed: float
) -> dict[str, Any]:
    """Return the part of ``Cluster.status`` about nodes and shards, JSON-able. O(shards + workers in it + nodes).

    ``states`` counts all nodes. ``nodes`` has those in the map and ``GONE_SHOWN`` others, ``nodes_left_out`` the number
    of the rest.
    ``eta_s`` of a worker: the bytes that move to it, less those already copied, at the current rate; None if nothing is
    being copied. It assumes that a source's bytes are spread evenly over its shards.
    ``moved_bytes`` and ``move_rate``: of servers that serve. The last heartbeat of another one says what it did once.
    ``shards_without_owner`` includes shards of overdue owners.
    """
    count = len(indexes)
    listed = [node for node in nodes.values() if not node.released]
    gone = [node for node in nodes.values() if node.released]
    listed += heapq.nlargest(GONE_SHOWN, gone, key=lambda node: (node.draining, node.changed))
    moving = tables.previous != NO_OWNER
    owned = np.bincount(tables.owners[tables.owners != NO_OWNER], minlength=count)
    coming = np.bincount(tables.owners[moving], minlength=count)
    going = np.bincount(tables.previous[moving], minlength=count)
    loads = {(node.name, info.worker): load for node in listed for info, load in zip(node.workers, node.loads)}
    used = np.zeros(count)
    for key, load in loads.items():
        if key in indexes:
            used[indexes[key]] = load.used_bytes
    each = used / np.maximum(owned + going, 1)
    expected = np.bincount(tables.owners[moving], each[tables.previous[moving]], count)

    # An overdue worker that no other could replace stays the owner, but does not answer.
    overdue = [(node.name, info.worker) for node in listed if node.overdue for info in node.workers]
    unserved = int((tables.owners == NO_OWNER).sum())
    unserved += sum(int(owned[indexes[key]]) for key in overdue if key in indexes)

    rows: list[dict[str, Any]] = []
    times: list[float] = []
    totals = dict.fromkeys(("moved_bytes", "move_rate"), 0)
    for node in sorted(listed, key=lambda node: node.name):
        name = node.name
        workers: list[dict[str, Any]] = []
        for info in node.workers:
            load = loads.get((name, info.worker), _NO_LOAD)
            index = indexes.get((name, info.worker))
            worker: dict[str, Any] = {
                "worker": info.worker,
                "numa_node": info.numa_node,
                "address": f"{info.host}:{info.port}",
                "capacity_bytes": info.capacity,
                "shards": 0 if index is None else int(owned[index]),
                "moving_in": 0 if index is None else int(coming[index]),
                "moving_out": 0 if index is None else int(going[index]),
                **load._asdict(),
                "eta_s": None,
            }
            rate = load.move_rate if node.serving and load.moves_left else 0
            if index is not None and coming[index] and rate:
                eta = round(max(0.0, float(expected[index]) - load.moved_bytes) / rate, 1)
                worker["eta_s"] = eta
                times.append(eta)
            totals["move_rate"] += rate
            totals["moved_bytes"] += load.moved_bytes if node.serving else 0
            workers.append(worker)
        rows.append(
            {
                "name": name,
                "state": node.state.value,
                "draining": node.draining,
                "drained": node.draining and not any(each["shards"] or each["moving_out"] for each in workers),
                "instance": f"{node.instance:016x}",
                "silent_s": max(0.0, round(observed - node.last_seen, 3)),
                "in_state_s": round(observed - node.changed, 3),
                "map_epoch": node.acked_epoch,
                "workers": workers,
            }
        )
    return {
        "shards": SHARD_COUNT,
        "shards_without_owner": unserved,
        "shards_moving": int(moving.sum()),
        **totals,
        "eta_s": max(times, default=None),
        "states": dict(Counter(node.state.value for node in nodes.values())),
        "nodes": rows,
        "nodes_left_out": len(nodes) - len(rows),
    }
