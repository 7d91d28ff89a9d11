"""``simm topo``: show NUMA nodes, RDMA ports, and which ports a worker on each node would use, and why.

The size limit of a memory region and the number of memory windows need pyverbs and access to the device. Without them
the command prints the reason. Everything else comes from sysfs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.settings import load
from ..errors import ConfigError
from ..host import numa
from ..rdma import ports as rdma_ports
from ..rdma.api import Absence, Limits
from ..rdma.ports import Gid, Port
from .nodes import bytes_text, columns


def restriction(option: str | None = None) -> tuple[str, str]:
    """Return the restriction of the devices that a data server here has, and its origin; two empty strings without one.

    ``option`` precedes the environment and the settings file. A file that cannot be read names none: ``simm doctor``
    reports it.
    """
    if not option:
        try:
            settings = load("dataserver")
        except ConfigError:
            return rdma_ports.restriction(None, os.environ)
        if spec := settings.rdma_devices.strip():
            return spec, settings.origin("rdma_devices").removeprefix("environment ")
    return rdma_ports.restriction(option, os.environ)


def collect(
    named: Sequence[Port] | None, sys_root: str = "/", limits: Mapping[str, Limits] | Absence | None = None
) -> dict[str, Any]:
    """Return the host's topology as JSON values.

    ``named`` lists the only RDMA ports allowed, or is None. ``limits`` has each port's limits by its name, if devices
    were queried.
    """
    known = rdma_ports.ports(sys_root)
    memlock = rdma_ports.memlock_bytes()
    nodes = [
        {"node": node.id, "cpus": list(node.cpus), "memory_bytes": node.memory_bytes, **_choice(node.id, known, named)}
        for node in numa.nodes(sys_root)
    ]
    own = numa.own_node(sys_root)
    asked: Mapping[str, Limits] = limits if isinstance(limits, Mapping) else {}
    ports = []
    for port in known:
        limit = asked.get(port.name)
        ports.append(
            {
                "port": port.name,
                "state": port.state,
                "link_layer": port.link_layer,
                "gbit_s": port.gbit,
                "numa": port.numa,
                "gid": None if port.gid is None else _gid(port.gid),
                "gids": [_gid(gid) for gid in port.gids],
                "max_mr_bytes": None if limit is None else limit.region_bytes,
                "memory_windows": None if limit is None else limit.windows,
            }
        )
    return {
        "nodes": nodes,
        #: The ports of a client that starts under the same conditions as this process.
        "client": {"node": own, **_choice(own, known, named)},
        "ports": ports,
        "memlock_bytes": memlock,
        "verbs": str(limits) if isinstance(limits, Absence) else "",
    }


def _choice(node: int, known: Sequence[Port], named: Sequence[Port] | None) -> dict[str, Any]:
    verdicts = rdma_ports.choose(node, known, named=named)
    return {
        "rails": [verdict.port.name for verdict in verdicts if verdict.used],
        "verdicts": [{"port": verdict.port.name, "used": verdict.used, "reason": verdict.why} for verdict in verdicts],
    }


def ask_devices(known: Sequence[Port]) -> dict[str, Limits] | Absence | None:
    """Return the limits of each usable port by name, or why no device could be queried. Opens each device briefly."""
    from .. import verbs

    found: dict[str, Limits] = {}
    absence: Absence | None = None
    for port in known:
        if port.trouble:
            continue
        fabric = verbs.open_fabric(port.name)  # one at a time, so that no port is omitted as remote or slow
        if isinstance(fabric, Absence):
            absence = fabric
            continue
        try:
            found.update((rail.name, rail.limits) for rail in fabric.rails)
        finally:
            fabric.close()
    return found or absence


def _gid(gid: Gid) -> dict[str, Any]:
    return {"index": gid.index, "gid": gid.gid, "kind": gid.kind, "netdev": gid.netdev}


def _ranges(cpus: Sequence[int]) -> str:
    """Return CPU numbers as the kernel's lists have them: ``0-3,8``."""
    parts: list[str] = []
    at = 0
    while at < len(cpus):
        end = at
        while end + 1 < len(cpus) and cpus[end + 1] == cpus[end] + 1:
            end += 1
        parts.append(str(cpus[at]) if end == at else f"{cpus[at]}-{cpus[end]}")
        at = end + 1
    return ",".join(parts) or "none"


def table(found: dict[str, Any], restricted_by: str = "", *, gids: bool = False) -> str:
    """Return the topology as text. ``gids``: add each port's whole GID table, with the GID in use marked."""
    lines = [
        f"node {node['node']}: CPUs {_ranges(node['cpus'])}, {bytes_text(node['memory_bytes'])} of memory"
        for node in found["nodes"]
    ]
    memlock = found["memlock_bytes"]
    lines.append(f"memory that may be pinned: {'no limit' if memlock is None else bytes_text(memlock)}")
    if not found["ports"]:
        return "\n".join([*lines, "no RDMA device: other hosts are reached by TCP"])
    if found["verbs"]:
        lines.append(f"the devices were not asked for their limits: {found['verbs']}")
    if restricted_by:
        lines.append(f"RDMA devices restricted by {restricted_by}")
    rows = [("PORT", "STATE", "LINK", "GBIT/S", "NODE", "REGION", "WINDOWS", "GID", "OF")]
    for port in found["ports"]:
        region, windows = port["max_mr_bytes"], port["memory_windows"]
        rows.append(
            (
                port["port"], port["state"], port["link_layer"], f"{port['gbit_s']:g}",
                "any" if port["numa"] < 0 else str(port["numa"]), "?" if region is None else bytes_text(region),
                "?" if windows is None else str(windows), _gid_text(port["gid"]), str(len(port["gids"])),
            )
        )  # fmt: skip
    lines += ["", *columns(rows, left=range(len(rows[0])))]
    if gids:
        for port in found["ports"]:
            lines += ["", f"GIDs of {port['port']}"]
            for gid in port["gids"]:
                mark = "+" if gid == port["gid"] else " "
                lines.append(f"  {mark} {_gid_text(gid)} {gid['netdev']}".rstrip())
            if not port["gids"]:
                lines.append("    none")
    for node in found["nodes"]:
        lines += ["", f"a worker on node {node['node']} uses {', '.join(node['rails']) or 'TCP'}"]
        lines += [
            f"  {'+' if each['used'] else '-'} {each['port']}: {each['reason']}" for each in node["verdicts"]
        ]
    client = found["client"]
    bound = f"on node {client['node']}" if client["node"] >= 0 else "bound to no single node"
    return "\n".join([*lines, "", f"a client started here ({bound}) uses {', '.join(client['rails']) or 'TCP'}"])


def _gid_text(gid: Mapping[str, Any] | None) -> str:
    return "none" if gid is None else f"{gid['index']}: {Gid(**gid).text} ({gid['kind']})"
