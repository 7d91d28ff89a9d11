"""``simm status``: the cluster as its manager sees it, and the way from here to each worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from .client import Client
from .config import Settings
from .connect import manager_client

#: Long enough to try every path once; a server that does not answer is shown as down.
REACH_S: Final = 3.0
_RUNNING: Final = ("running", "draining")
_UNITS: Final = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


def collect(settings: Settings, client: Client) -> dict[str, Any]:
    """The manager's status, with ``path`` and ``why`` of each worker as this host reaches it.

    Loads (bytes, entries, puts, evictions) are those of each server's last heartbeat. Raises TransportError.
    """
    with manager_client(settings) as manager:
        found = manager.status()
    if any(node["workers"] for node in found["nodes"]):
        client.wait_ready(min(REACH_S, settings.deadline_ms / 1000))
    paths = {(each["node"], each["worker"]): each for each in client.stats()["workers"]}
    for node in found["nodes"]:
        for worker in node["workers"]:
            seen = paths.get((node["name"], worker["worker"]))
            worker["path"] = seen["path"] if seen is not None else "down"
            worker["why"] = seen["why"] if seen is not None else "it is not in the shard map"
    return found


def healthy(found: dict[str, Any]) -> bool:
    """Every shard has an owner, and every worker of a running server is reached."""
    workers = [worker for node in found["nodes"] if node["state"] in _RUNNING for worker in node["workers"]]
    return bool(workers) and not found["shards_without_owner"] and all(each["path"] != "down" for each in workers)


def bytes_text(count: int) -> str:
    """``1.5G``, ``512K``, ``0``"""
    for unit, scale in _UNITS:
        if count >= scale:
            return f"{count / scale:.1f}".removesuffix(".0") + unit
    return str(count)


def columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows as lines of columns, those in ``left`` flush left and others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def moves_text(found: Mapping[str, Any]) -> str:
    """What moves between servers, in a sentence; empty when nothing does."""
    if not found["shards_moving"] and not found["shards_waiting"]:
        return ""
    parts = [f"{found['shards_moving']:,} shards are moving"]
    if found["shards_waiting"]:
        parts.append(f"{found['shards_waiting']:,} wait for their turn")
    parts.append(f"{bytes_text(found['moved_bytes'])} copied")
    if found["move_rate"]:
        parts.append(f"{bytes_text(found['move_rate'])}/s")
    if found["eta_s"] is not None:
        parts.append(f"about {found['eta_s']:.0f} s for those that move")
    return ", ".join(parts)


def table(found: dict[str, Any]) -> str:
    """For people."""
    moved = f", {found['shards_without_owner']:,} without an owner" if found["shards_without_owner"] else ""
    lines = [f"cluster {found['cluster']}, epoch {found['epoch']}, {found['shards']:,} shards{moved}"]
    own = found["manager"]
    if own.get("leader"):
        lines.append(f"led by the manager at {own['leader']}, term {own['term']}")
    if found["rebuilding"]:
        lines.append("the manager has lost its state and is collecting the map from the servers")
    moves = moves_text(found)
    lines += [moves, ""] if moves else [""]
    heads = ["SERVER", "STATE", "NUMA", "ADDRESS", "USED", "OF", "ENTRIES", "PUTS", "EVICTED", "SHARDS", "PATH"]
    rows = [heads[:-1] + (["IN", "OUT"] if moves else []) + heads[-1:]]
    notes = []
    for node in found["nodes"]:
        for each in node["workers"]:
            moving = [f"{each['moving_in']:,}", f"{each['moving_out']:,}"] if moves else []
            rows.append(
                [
                    f"{node['name']}/{each['worker']}", state_text(node), str(each["numa_node"]), each["address"],
                    bytes_text(each["used_bytes"]), bytes_text(each["capacity_bytes"]), f"{each['entries']:,}",
                    f"{each['puts']:,}", f"{each['evictions']:,}", f"{each['shards']:,}", *moving, each["path"],
                ]
            )  # fmt: skip
            if each["why"] and node["state"] in _RUNNING:
                notes.append(f"{node['name']}/{each['worker']} by {each['path']}: {each['why']}")
    if len(rows) == 1:
        return "\n".join([*lines, "no data server has joined: start one with `simm dataserver --manager HOST:PORT`"])
    lines += columns(rows, left=(0, 1, 3, len(rows[0]) - 1))
    return "\n".join([*lines, *([""] if notes else []), *notes])


def state_text(node: Mapping[str, Any]) -> str:
    """A node's state in a word; one that is away or suspect tells of its drain as well."""
    if node["drained"]:
        return "drained" if node["state"] == "draining" else f"{node['state']}, drained"
    if node["draining"] and node["state"] != "draining":
        return f"{node['state']}, to drain"
    return str(node["state"])
