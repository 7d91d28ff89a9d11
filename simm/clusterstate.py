"""A cluster's state as JSON-able plain data: what must survive a restart of its manager. No I/O.

Format 2; format 1 (before shards moved with their values) still loads: every owner has its shards since the
stored epoch, and nothing moves. Times are not stored: they mean nothing to the next process.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .constants import SHARD_COUNT
from .deal import Places, Tables
from .errors import CorruptionError, RemoteProtocolError
from .members import SERVING, Node, NodeState, join_fault
from .messages import Join, WorkerInfo
from .shardmap import pack_since, unpack_since

STATE_FORMAT: Final = 2
_FORMATS: Final = (1, STATE_FORMAT)
#: What format 1 called a running node.
_OLD_RUNNING: Final = "up"

Key = tuple[str, int]


class Stored(NamedTuple):
    """A cluster as it was stored. Nodes that were alive are JOINING: they are given a fresh one's time to be heard."""

    cluster: int
    epoch: int
    nodes: dict[str, Node]
    keys: list[Key]
    tables: Tables


def dump(cluster: int, epoch: int, nodes: Iterable[Node], keys: Sequence[Key], tables: Tables) -> dict[str, Any]:
    """The state, JSON-able."""
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
                "draining": node.draining,
                "workers": [list(info) for info in node.workers],
            }
            for node in nodes
        ],
        "keys": [list(key) for key in keys],
        "owners": _text(places_bytes(tables.owners)),
        "homes": _text(places_bytes(tables.homes)),
        "previous": _text(places_bytes(tables.previous)),
        "since": _text(packed_since(tables)),
    }


def load(state: Any) -> Stored:
    """The opposite. Raises CorruptionError for what :func:`dump` could not have made, as far as one field shows it."""
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
        tables.owners = _places(state["owners"])
        tables.homes = _places(state["homes"])
        if version == 1:
            tables.since[:] = epoch
        else:
            tables.previous = _places(state["previous"])
            tables.since = np.frombuffer(unpack_since(_raw(state["since"])), np.uint64).copy()
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, RemoteProtocolError) as exc:
        raise CorruptionError(f"the cluster's state is malformed: {exc}") from exc
    return Stored(cluster, epoch, nodes, keys, tables)


def _node(row: Any, version: int) -> Node:
    name, instance = row["name"], _whole(row["instance"], 1 << 64)
    workers = [WorkerInfo(*values) for values in row["workers"]]
    fault = join_fault(Join(instance, 0, name, workers))
    if not fault and any(info.node != name for info in workers):
        fault = "it has workers of another"
    if fault:
        raise ValueError(f"node {name!r}: {fault}")
    old = version == 1 and row["state"] == _OLD_RUNNING
    state = NodeState.RUNNING if old else NodeState(row["state"])
    node = Node(name, instance, workers, NodeState.JOINING if state in SERVING else state, 0.0)
    node.released = row["released"] is True
    node.draining = version > 1 and row["draining"] is True
    return node


def places_bytes(places: Places) -> bytes:
    """A table of places as maps and states hold it: u16, little-endian."""
    return places.astype("<u2").tobytes()


def packed_since(tables: Tables) -> bytes:
    """Its epochs as maps and states hold them."""
    return pack_since(array("Q", tables.since.tobytes()))


def _places(text: Any) -> Places:
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
        raise ValueError(f"{value!r} is no number from 0 to {limit - 1}")
    return value
