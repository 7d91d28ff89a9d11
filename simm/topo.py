"""``simm topo``: NUMA nodes, RDMA ports, which rails a worker on each node would use, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import rails, topology
from .rails import Port
from .status import bytes_text


def collect(named: Sequence[Port] | None, sys_root: str = "/") -> dict[str, Any]:
    """The host as SiMM sees it, JSON-able. ``named``: the only RDMA ports allowed, or None."""
    known = rails.ports(sys_root)
    memlock = rails.memlock_bytes()
    nodes = []
    for node in topology.nodes(sys_root):
        verdicts = rails.choose(node.id, known, named=named)
        nodes.append(
            {
                "node": node.id,
                "cpus": list(node.cpus),
                "memory_bytes": node.memory_bytes,
                "rails": [verdict.port.name for verdict in verdicts if verdict.used],
                "verdicts": [
                    {"port": verdict.port.name, "used": verdict.used, "why": verdict.why} for verdict in verdicts
                ],
            }
        )
    ports = [
        {
            "port": port.name,
            "state": port.state,
            "link_layer": port.link_layer,
            "gbit_s": port.gbit,
            "numa": port.numa,
            "gid": None if port.gid is None else {"index": port.gid.index, "gid": port.gid.gid, "kind": port.gid.kind},
            "gids": len(port.gids),
        }
        for port in known
    ]
    return {"nodes": nodes, "ports": ports, "memlock_bytes": memlock}


def _ranges(cpus: Sequence[int]) -> str:
    """``0-3,8``"""
    parts: list[str] = []
    at = 0
    while at < len(cpus):
        end = at
        while end + 1 < len(cpus) and cpus[end + 1] == cpus[end] + 1:
            end += 1
        parts.append(str(cpus[at]) if end == at else f"{cpus[at]}-{cpus[end]}")
        at = end + 1
    return ",".join(parts) or "none"


def table(found: dict[str, Any], restricted_by: str = "") -> str:
    """For people."""
    lines = [
        f"node {node['node']}: CPUs {_ranges(node['cpus'])}, {bytes_text(node['memory_bytes'])} of memory"
        for node in found["nodes"]
    ]
    memlock = found["memlock_bytes"]
    lines.append(f"memory that may be pinned: {'no limit' if memlock is None else bytes_text(memlock)}")
    if not found["ports"]:
        return "\n".join([*lines, "no RDMA device: other hosts are reached by TCP"])
    if restricted_by:
        lines.append(f"RDMA devices restricted by {restricted_by}")
    rows = [("PORT", "STATE", "LINK", "GBIT/S", "NODE", "GID", "OF")]
    for port in found["ports"]:
        gid = port["gid"]
        shown = "none" if gid is None else f"{gid['index']}: {rails.Gid(**gid).text} ({gid['kind']})"
        rows.append(
            (
                port["port"], port["state"], port["link_layer"], f"{port['gbit_s']:g}",
                "any" if port["numa"] < 0 else str(port["numa"]), shown, str(port["gids"]),
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines.append("")
    lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    for node in found["nodes"]:
        lines += ["", f"a worker on node {node['node']} uses {', '.join(node['rails']) or 'TCP'}"]
        lines += [
            f"  {'+' if verdict['used'] else '-'} {verdict['port']}: {verdict['why']}" for verdict in node["verdicts"]
        ]
    return "\n".join(lines)
