"""What ``simm ctl`` shows of the whole cluster, or of this host where no manager answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...arena.events.victims import evicted_in
from ...arena.layout import HEADER_BYTES
from ...cluster.nodes import GONE
from ...cluster.shard_map import ShardMap
from ...config.settings import Settings
from ...constants import NO_OWNER, SHARD_COUNT
from ...errors import TransportError, UsageError, printable
from ...wire.messages import MapGet, MapReply
from ...wire.shard_set import FROZEN, MOVING
from .. import nodes
from ..connect import manager_client
from .tables import Row
from .workers import Asked


def node_rows(settings: Settings, asked: Callable[[], Sequence[Asked]]) -> tuple[list[Row], str]:
    """Return a row for each data server, and why the manager does not tell of them, "" if it does.

    Without a manager the servers of this host are shown.
    """
    try:
        found = status(settings)
    except TransportError as exc:
        return local_nodes(asked(), str(exc)), str(exc)
    return rows_of(found), ""


def status(settings: Settings) -> dict[str, Any]:
    """Return what the manager knows of the cluster. Raises TransportError."""
    with manager_client(settings) as link:
        found: dict[str, Any] = link.status()
    return found


def rows_of(found: Mapping[str, Any]) -> list[Row]:
    """Return a row for each data server in a manager's status."""
    rows = []
    for node in found["nodes"]:
        sums = {key: sum(worker[key] for worker in node["workers"]) for key in _SUMS}
        rows.append({
            "node": node["name"], "state": nodes.state_text(node), "workers": len(node["workers"]), **sums,
            "silent_s": node["silent_s"], "address": node["workers"][0]["address"] if node["workers"] else "",
        })  # fmt: skip
    return rows


def server_rows(
    settings: Settings, server: str, asked: Callable[[], Sequence[Asked]]
) -> tuple[list[Row], str]:  # fmt: skip
    """Return a row for each worker of the data servers, or of one, and why the manager does not tell of them.

    Without a manager those of this host are shown. Raises UsageError if there is no such server.
    """
    try:
        found, trouble = status(settings)["nodes"], ""
    except TransportError as exc:
        rows, trouble = local_workers(asked(), str(exc)), str(exc)
    else:
        rows = [
            {"server": node["name"], "worker": worker["worker"], "state": nodes.state_text(node),
             "numa_node": worker["numa_node"], "silent_s": node["silent_s"],
             **{key: worker[key] for key in _SUMS}, "address": worker["address"]}
            for node in found for worker in node["workers"]
        ]  # fmt: skip
    rows = [row for row in rows if server in ("", row["server"])]
    if server and not rows:
        raise UsageError(f"there is no data server {printable(repr(server))}: see `simm ctl node list`")
    return rows, trouble


def local_workers(asked: Sequence[Asked], why: str) -> list[Row]:
    """Return a row for each worker that was asked, as it says itself. ``why``: the manager does not tell."""
    rows = []
    for each in asked:
        (row,) = local_nodes([each], why)
        rows.append({**row, "server": each.server, "worker": each.worker, "numa_node": None})
    return rows


#: What the map says of a worker, also while it is away.
_OF_SHARDS: Final = ("shards", "moving_in", "moving_out")
_SUMS: Final = (*_OF_SHARDS, "used_bytes", "capacity_bytes", "entries", "puts", "evictions")


def local_nodes(asked: Sequence[Asked], why: str) -> list[Row]:
    """Return a row for each data server of this host, as its workers say. Raises TransportError if there is none."""
    rows: dict[str, Row] = {}
    for each in asked:
        row = rows.setdefault(each.server, {
            "node": each.server, "state": "silent", "workers": 0, **dict.fromkeys(_SUMS, 0), "silent_s": None,
            "address": each.path,
        })  # fmt: skip
        row["workers"] += 1
        stats = each.stats
        if not stats:
            continue
        row["state"] = "fenced" if stats["fenced"] else "serving"
        row["shards"] += stats["shards"]
        row["used_bytes"] += stats["data_bytes"] - stats["free_bytes"]
        row["capacity_bytes"] += stats["data_bytes"]
        row["entries"] += stats["entries"]
        row["puts"] += stats["puts"]
        row["evictions"] += evicted_in(stats)
    if not rows:
        raise TransportError(f"{why}; and no data server of this host is in --runtime-dir")
    return list(rows.values())


def summary(rows: Sequence[Row]) -> Row:
    """Return one row of all data servers together. Those that are gone count, and their shards, but hold nothing."""
    states: dict[str, int] = {}
    for row in rows:
        states[row["state"]] = states.get(row["state"], 0) + 1
    there = [row for row in rows if not row["state"].startswith(GONE)]  # "dead, drained" too
    sums = {key: sum(row[key] for row in (rows if key in _OF_SHARDS else there)) for key in _SUMS}
    return {"nodes": len(rows), "states": states, **sums}


def shard_rows(settings: Settings, asked: Callable[[], Sequence[Asked]]) -> tuple[list[Row], str]:
    """Return a row for each worker with its shards as runs, and why the manager does not tell of them."""
    try:
        with manager_client(settings) as link:
            shards = ShardMap(link.call(MapGet(0, 0), MapReply))
    except TransportError as exc:
        return _local_shards(asked()), str(exc)
    owners = np.array(shards.owners)
    coming = np.zeros(SHARD_COUNT, np.bool_)
    coming[list(shards.previous)] = True
    rows = [
        _shard_row(f"{info.node}/{info.worker}", owners == at, coming) for at, info in enumerate(shards.workers)
    ]
    if (owners == NO_OWNER).any():
        rows.append(_shard_row("nobody", owners == NO_OWNER, np.zeros(SHARD_COUNT, np.bool_)))
    return rows, ""


def _local_shards(asked: Sequence[Asked]) -> list[Row]:
    """Return the shards of this host's workers, as their arenas have them."""
    rows = []
    for each in asked:
        reader = each.reader
        if reader is not None:
            words = np.frombuffer(reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES).copy()
            owned = (words != 0) & (words < np.uint64(FROZEN))
            rows.append(_shard_row(each.name, owned, words >= np.uint64(MOVING)))
    return rows


def _shard_row(worker: str, owned: Any, moving: Any) -> Row:
    places = np.flatnonzero(owned)
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    runs = [[int(run[0]), int(run[-1])] for run in np.split(places, breaks) if len(run)]
    return {"worker": worker, "shards": len(places), "moving_in": int((owned & moving).sum()), "runs": runs}


def one_word(words: Sequence[str], what: str) -> str:
    """Return the only word. Raises UsageError."""
    if len(words) != 1:
        raise UsageError(f"{what} takes one name")
    return words[0]
