"""RDMA devices of this host, and which of their ports a worker should use: its *rails*.

Read from sysfs alone, so that it works without pyverbs and on a fake tree (``sys_root``, as in topology.py).

What one has to know
--------------------
* A port is a rail when its state is ACTIVE and it has a GID that peers can reach. On Ethernet a port has many GIDs,
  one for each address and RoCE version; an unused entry of the table cannot be read at all (EINVAL). RoCE v2
  travels as UDP and is routed by IP; v1 is not routed and its peers must speak v1 too. So the choice is, in
  this order: v2 with an IPv4 address, v2 with a global IPv6 address, v1 likewise, and a link-local address only
  where there is nothing else (it is good within one segment only).
* On InfiniBand, GID 0 is the port's own, made of the subnet's prefix and its GUID.
* Software devices (rxe, siw) have no ``device`` link; the network device named in ``parent`` has. Their NUMA node is
  that one's, and -1 where that is software too: near to all nodes.
* A worker uses all rails of its node. One with none of its own takes those that are near to none, then everyone
  else's: a crossing of the sockets is slower than a rail beside it and faster than TCP.
* A rail with less than a quarter of the fastest one's rate (a management port beside the fabric) would slow down what
  is striped or spread over both. It is left out, unless it was named.
* How much one memory region may cover (``max_mr_size``) is known to the device and not to sysfs: verbs ask it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import ConfigError

#: The variable by which engines restrict the devices (KV API), and the one of our own setting.
DEVICES_ENV: Final = "SICL_NET_DEVICES"
OWN_ENV: Final = "SIMM_RDMA_DEVICES"
#: A slower rail than the fastest by more than this factor is left out.
RATE_SPREAD: Final = 4
#: GIDs looked at per port; drivers have up to 256.
_GIDS_MAX: Final = 1024
#: How the kernel writes an unused entry.
_NO_GID: Final = b":".join([b"0000"] * 8)
_NO_GID_BYTES: Final = len(_NO_GID)


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table. ``kind`` is "IB", "RoCE v1" or "RoCE v2"."""

    index: int
    gid: str
    kind: str
    netdev: str = ""

    @property
    def address(self) -> ipaddress.IPv6Address:
        return ipaddress.IPv6Address(self.gid)

    @property
    def scope(self) -> str:
        """``ipv4``, ``global`` or ``link-local``."""
        if self.address.ipv4_mapped is not None:
            return "ipv4"
        return "link-local" if self.address.is_link_local else "global"

    @property
    def text(self) -> str:
        """As people write it: an IPv4-mapped one as IPv4."""
        mapped = self.address.ipv4_mapped
        return str(mapped) if mapped is not None else str(self.address)


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. ``gbit`` is its rate in Gbit/s, ``numa`` -1 when it is near to no node."""

    device: str
    number: int
    state: str
    link_layer: str
    gbit: float
    numa: int
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def gid(self) -> Gid | None:
        """The one to use; None when there is none that a peer could reach."""
        return min(self.gids, key=_preference, default=None)

    @property
    def trouble(self) -> str:
        """Why the port cannot be used; empty when it can."""
        if self.state != "ACTIVE":
            return f"its state is {self.state or 'unknown'}"
        if self.gid is None:
            return "it has no GID (no address on its network device?)"
        return ""


@dataclass(frozen=True)
class Verdict:
    """One port, for one NUMA node: used or not, and why."""

    port: Port
    used: bool
    why: str


_SCOPES: Final = {"ipv4": 0, "global": 1, "link-local": 3}


def _preference(gid: Gid) -> tuple[int, int, int]:
    scope = _SCOPES[gid.scope]
    if gid.kind == "IB":
        return (0, 0, gid.index)
    version = 0 if gid.kind == "RoCE v2" else 1
    # Link-local addresses of either version come after all others, version 2 first among them.
    return (2 * (scope == 3) + version, scope, gid.index)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _entries(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def _numa_of(root: Path, device: str) -> int:
    """A device's node: its own PCI function's, or its network device's; -1 when neither says."""
    base = root / "sys/class/infiniband" / device
    places = [base / "device/numa_node"]
    parent = _text(base / "parent")
    if parent and re.fullmatch(r"[^/\s]+", parent):
        netdev = root / "sys/class/net" / parent / "device"
        # A virtio card is a device on a PCI function, which is the one that has a node.
        places += [netdev / "numa_node", netdev / "../numa_node"]
    for place in places:
        found = _text(place)
        if re.fullmatch(r"-?[0-9]{1,6}", found) and int(found) >= 0:
            return int(found)
    return -1


def _gids_in_use(folder: Path) -> list[tuple[int, str]]:
    """(index, text) of the entries that are not zero.

    Up to 1024 files a port, nearly all of them unused: by bare system calls, which take a tenth of pathlib's time.
    """
    found = []
    try:
        names = [name for name in os.listdir(folder) if name.isdigit()]
        base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        for index in sorted(map(int, names))[:_GIDS_MAX]:
            try:
                file = os.open(str(index), os.O_RDONLY, dir_fd=base)
            except OSError:
                continue
            try:
                raw = os.read(file, 64)
            except OSError:
                continue  # an entry that cannot be read is not in use
            finally:
                os.close(file)
            if raw[:_NO_GID_BYTES] != _NO_GID:
                found.append((index, raw.decode(errors="replace").strip()))
    finally:
        os.close(base)
    return found


def _gids_of(port: Path, link_layer: str) -> tuple[Gid, ...]:
    found = []
    for index, raw in _gids_in_use(port / "gids"):
        try:
            address = ipaddress.IPv6Address(raw)
        except ValueError:
            continue
        if int(address) == 0:
            continue
        kind = _text(port / "gid_attrs/types" / str(index))
        if link_layer == "InfiniBand":
            kind = "IB"
            if int(address) & ((1 << 64) - 1) == 0:
                continue  # a prefix without a GUID: the port has never had one
        elif kind == "IB/RoCE v1":
            kind = "RoCE v1"
        elif kind != "RoCE v2":
            continue
        found.append(Gid(index, str(address), kind, _text(port / "gid_attrs/ndevs" / str(index))))
    return tuple(found)


def ports(sys_root: str = "/") -> list[Port]:
    """All ports of all RDMA devices, by name; empty without any."""
    root = Path(sys_root)
    base = root / "sys/class/infiniband"
    found = []
    for device in _entries(base):
        numa = _numa_of(root, device)
        for number in _entries(base / device / "ports"):
            if not number.isdigit():
                continue
            place = base / device / "ports" / number
            link_layer = _text(place / "link_layer")
            rate = re.match(r"([0-9.]+)", _text(place / "rate"))
            found.append(
                Port(
                    device=device,
                    number=int(number),
                    state=_text(place / "state").partition(": ")[2] or _text(place / "state"),
                    link_layer=link_layer,
                    gbit=float(rate.group(1)) if rate else 0.0,
                    numa=numa,
                    gids=_gids_of(place, link_layer),
                )
            )
    return found


def parse_devices(spec: str, known: Sequence[Port]) -> list[Port]:
    """The ports that ``"mlx5_0,mlx5_1:2"`` names, a device standing for all of its own.

    Raises ConfigError for an unknown one, naming those there are.
    """
    there = ", ".join(port.name for port in known) or "none"
    chosen: list[Port] = []
    for part in (part.strip() for part in spec.split(",")):
        if not part:
            continue
        device, colon, number = part.partition(":")
        fitting = [port for port in known if port.device == device and (not colon or str(port.number) == number)]
        if not fitting:
            raise ConfigError(f"there is no RDMA device {part!r} on this host; ports here: {there}")
        chosen += [port for port in fitting if port not in chosen]
    if not chosen:
        raise ConfigError(f"{spec!r} names no RDMA device; ports here: {there}")
    return chosen


def restriction(option: str | None, env: Mapping[str, str]) -> tuple[str, str]:
    """What restricts the devices, and where that came from; two empty texts where nothing does.

    The option goes before our own variable, and that one before the engine's.
    """
    if option:
        return option, "--rdma-devices"
    for name in (OWN_ENV, DEVICES_ENV):
        given = env.get(name, "").strip()
        if given:
            return given, name
    return "", ""


def choose(node: int, known: Sequence[Port], *, named: Sequence[Port] | None = None) -> list[Verdict]:
    """Every port's verdict for a process on ``node`` (-1: on several); ``named``: the only ones allowed.

    O(ports). The order is that of ``known``.
    """
    usable = [port for port in known if not port.trouble and (named is None or port in named)]
    near = [port for port in usable if port.numa == node]
    unbound = [port for port in usable if port.numa < 0]
    pool, relation = next(
        (
            (ports_, text)
            for ports_, text in (
                (near, f"on node {node}"),
                (unbound, "near to no node in particular"),
                (usable, f"node {node} has no rail of its own" if node >= 0 else "of all nodes"),
            )
            if ports_
        ),
        ([], ""),
    )
    fastest = max((port.gbit for port in pool), default=0.0)
    verdicts = []
    for port in known:
        if port.trouble:
            verdict = Verdict(port, False, port.trouble)
        elif named is not None and port not in named:
            verdict = Verdict(port, False, "not among the devices that were named")
        elif port not in pool:
            why = f"on node {port.numa}" if port.numa >= 0 else f"node {node} has rails of its own"
            verdict = Verdict(port, False, why)
        elif named is None and port.gbit * RATE_SPREAD < fastest:
            why = f"{port.gbit:g} Gbit/s beside {fastest:g}: it would slow the others down; name it to use it"
            verdict = Verdict(port, False, why)
        else:
            gid = port.gid
            assert gid is not None
            why = f"{relation}, {gid.kind} GID {gid.index} {gid.text}"
            if gid.scope == "link-local" and gid.kind != "IB":
                why += ", link-local: good within one segment only"
            verdict = Verdict(port, True, why)
        verdicts.append(verdict)
    return verdicts


def memlock_bytes() -> int | None:
    """Bytes that this process may pin; None for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft
