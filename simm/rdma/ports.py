"""The RDMA ports of this host: which of them a worker uses as its *rails*, and whether a peer's address resolves.

Read from sysfs alone, so it works without pyverbs and on a fake tree (``sys_root``, as in host/numa.py).

* A port is usable if its state is ACTIVE and it has a GID that peers can reach. An Ethernet port has one GID for each
  address and RoCE version. RoCE v2 is routed by IP; v1 is not, and its peers must speak v1 too. So the order is: v2
  with an IPv4 address, v2 with a global IPv6 address, v1 likewise, and link-local addresses last, which are valid
  within one segment only. On InfiniBand, GID 0 consists of the subnet's prefix and the port's GUID.
* Software devices (rxe, siw) have the NUMA node of the network device named in ``parent``, or -1 (near to all nodes).
* A worker uses all rails of its node. Without one it uses those near to no node in particular, then all others:
  crossing the sockets is slower than a local rail and faster than TCP.
* A rail with less than a quarter of the fastest rail's rate, such as a management port, would slow down values that are
  striped over both. It is left out unless it is named.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .api import Absence, Neighbours

#: The variable by which engines restrict the devices (KV API), and that of SiMM's own setting.
DEVICES_ENV: Final = "SICL_NET_DEVICES"
OWN_ENV: Final = "SIMM_RDMA_DEVICES"
#: A rail that is slower than the fastest one by more than this factor is left out.
RATE_SPREAD: Final = 4
#: GIDs read per port; drivers have up to 256.
_GIDS_MAX: Final = 1024
#: How the kernel writes an unused entry.
_NO_GID: Final = b":".join([b"0000"] * 8)
_NO_GID_BYTES: Final = len(_NO_GID)

#: A host on the same network answers ARP within a millisecond; the kernel repeats its request after a second.
ARP_ANSWER_S: Final = 0.3
_ARP_POLL_S: Final = 0.002
#: RoCE v2's port. Nothing listens there: the device takes such packets before the kernel sees them.
_ROCE_PORT: Final = 4791
#: Flag of a complete ARP entry (if_arp.h).
_ARP_COMPLETE: Final = 2
#: The option by which sendto() reports a full table (linux/in.h), and the errors of that, and of no descriptor.
_IP_RECVERR: Final = 11
_NO_ROOM: Final = frozenset((errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN))


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
        """The usual notation: an IPv4-mapped address as IPv4."""
        return gid_text(self.address.packed)


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device. ``gbit`` is its rate in Gbit/s. ``numa`` is -1 if it is near to no node."""

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
        """The GID to use; None if a peer can reach none."""
        return min(self.gids, key=_preference, default=None)

    @property
    def trouble(self) -> str:
        """Why the port cannot be used; empty if it can."""
        if self.state != "ACTIVE":
            return f"its state is {self.state or 'unknown'}"
        if self.gid is None:
            return "it has no GID (no address on its network device?)"
        return ""


@dataclass(frozen=True)
class Verdict:
    """Whether a process on one NUMA node uses a port, and why."""

    port: Port
    used: bool
    why: str


_SCOPES: Final = {"ipv4": 0, "global": 1, "link-local": 3}


def _preference(gid: Gid) -> tuple[int, int, int]:
    scope = _SCOPES[gid.scope]
    if gid.kind == "IB":
        return (0, 0, gid.index)
    version = 0 if gid.kind == "RoCE v2" else 1
    # Link-local addresses of both versions come last, version 2 first.
    return (2 * (scope == 3) + version, scope, gid.index)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _entries(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _numa_of(root: Path, device: str) -> int:
    """Return the NUMA node of a device's PCI function or of its network device; -1 if neither has one."""
    base = root / "sys/class/infiniband" / device
    places = [base / "device/numa_node"]
    parent = _text(base / "parent")
    if parent and re.fullmatch(r"[^/\s]+", parent):
        netdev = root / "sys/class/net" / parent / "device"
        # A virtio card is a device on a PCI function; the function has the node.
        places += [netdev / "numa_node", netdev / "../numa_node"]
    for place in places:
        found = _text(place)
        if re.fullmatch(r"-?[0-9]{1,6}", found) and int(found) >= 0:
            return int(found)
    return -1


def _gids_in_use(folder: Path) -> list[tuple[int, str]]:
    """Return (index, text) of the entries that are not zero. A port has up to 1024 files, nearly all of them unused."""
    found = []
    for index in sorted(int(name) for name in _entries(folder) if name.isdigit())[:_GIDS_MAX]:
        try:
            file = os.open(f"{folder}/{index}", os.O_RDONLY)
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
                continue  # a prefix without a GUID: the port never had an address
        elif kind == "IB/RoCE v1":
            kind = "RoCE v1"
        elif kind != "RoCE v2":
            continue
        found.append(Gid(index, str(address), kind, _text(port / "gid_attrs/ndevs" / str(index))))
    return tuple(found)


def ports(sys_root: str = "/") -> list[Port]:
    """Return all ports of all RDMA devices, sorted by name."""
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
    """Return the ports that ``"mlx5_0,mlx5_1:2"`` names. A device without a number stands for all its ports.

    Raises ConfigError, with the existing ports, for an unknown one.
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
    """Return the restriction of the devices and its origin, or two empty strings.

    The option precedes SiMM's own variable, which precedes the engine's.
    """
    if option:
        return option, "--rdma-devices"
    for name in (OWN_ENV, DEVICES_ENV):
        given = env.get(name, "").strip()
        if given:
            return given, name
    return "", ""


def choose(node: int, known: Sequence[Port], *, named: Sequence[Port] | None = None) -> list[Verdict]:
    """Return a verdict on each port, in the order of ``known``, for a process on ``node`` (-1: on several nodes).

    ``named`` restricts the choice. O(ports).
    """
    usable = [port for port in known if not port.trouble and (named is None or port in named)]
    near = [port for port in usable if port.numa == node >= 0]
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


def usable(
    devices: str | None, numa: int, env: Mapping[str, str], sys_root: str
) -> tuple[list[Port], list[tuple[str, str]]] | Absence:
    """Return the ports to use and (name, reason) of the others, or why no port can be used."""
    known = ports(sys_root)
    if not known:
        return Absence("this host has no RDMA device", "load the card's driver; pass the devices into the container")
    spec, source = restriction(devices, env)
    try:
        named = parse_devices(spec, known) if spec else None
    except ConfigError as error:
        return Absence(f"{source}: {error}", "name one of those")
    verdicts = choose(numa, known, named=named)
    chosen = [verdict.port for verdict in verdicts if verdict.used]
    if not chosen:
        reasons = "; ".join(f"{verdict.port.name}: {verdict.why}" for verdict in verdicts)
        return Absence(f"no RDMA port can be used ({reasons})", "see simm topo; a port must be up and have an address")
    return chosen, [(verdict.port.name, verdict.why) for verdict in verdicts if not verdict.used]


def memlock_bytes() -> int | None:
    """Return the number of bytes that this process may pin; None for no limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def gid_text(gid: bytes) -> str:
    """Return the usual notation of a GID: an IPv4-mapped address as IPv4."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


# --- ARP -----------------------------------------------------------------------------------------


def arp_resolves(
    gid: bytes, own: bytes = b"", netdev: str = "", *, timeout_s: float = ARP_ANSWER_S, sys_root: str = "/"
) -> bool:  # fmt: skip
    """Return False if no host on our network answers ARP for the GID's address, True if one does or none can tell.

    Connecting a queue pair on Ethernet needs the peer's hardware address. If the kernel does not know it, the connect
    call sends an ARP request and waits about a second with the GIL held, on each attempt. So this function makes the
    kernel ask first, by an empty datagram, and polls its ARP table with the GIL free for up to ``timeout_s``.

    The datagram is bound to the port's network device, as the ARP request of ibverbs is. Routed normally, it could
    leave through another card of the same subnet, or through loopback if the peer's port is on this host. A FAILED
    entry would then never be refreshed, and a recovered link would stay unused.

    Only IPv4 addresses on a directly attached network can be checked. For routed and IPv6 addresses the result is True.

    Args:
        gid: the peer's, 16 bytes.
        own: that of the local port, 16 bytes.
        netdev: network device of the local port, the only one whose ARP entries count; empty for any.
    """
    until = time.monotonic() + timeout_s
    known = arp_asked(gid, own, netdev, sys_root=sys_root)
    while not known and time.monotonic() < until:
        time.sleep(_ARP_POLL_S)
        known = arp_answered(gid, ArpTable(sys_root), netdev)
    return known


def arp_asked(gid: bytes, own: bytes = b"", netdev: str = "", *, sys_root: str = "/") -> bool:
    """Return what :func:`arp_resolves` does, as far as is known now; let the kernel ask for an unknown address.

    It never waits; look again with :func:`arp_answered` after False. O(entries of the kernel's table).
    """
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    if address is None:
        return True
    text = str(address)
    if ArpTable(sys_root).known(text, netdev):
        return True
    # One that the kernel had no room to ask for has no entry either, and is not reached for that.
    return _send_probe(text, own, netdev) and ArpTable(sys_root).known(text, netdev) is not False


def arp_answered(gid: bytes, table: Neighbours, netdev: str) -> bool:
    """Return whether the address, for which :func:`arp_asked` has returned False, is known by now. O(1).

    It was to be asked for, so if the table has no entry, that was removed or never made.
    """
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    return address is None or table.known(str(address), netdev) is True


class ArpTable:
    """The kernel's ARP table as it is when this is made; empty if it cannot be read. O(entries), O(1) a look-up."""

    __slots__ = ("_known",)

    def __init__(self, sys_root: str = "/") -> None:
        #: By address and device, and by address alone.
        self._known: dict[tuple[str, str], bool] = {}
        try:
            lines = (Path(sys_root) / "proc/net/arp").read_text().splitlines()[1:]
        except OSError:
            return
        for line in lines:
            fields = line.split()
            if len(fields) >= 6:
                complete = bool(int(fields[2], 16) & _ARP_COMPLETE)
                for device in (fields[5], ""):
                    key = fields[0], device
                    self._known[key] = complete or self._known.get(key, False)

    def known(self, address: str, netdev: str) -> bool | None:
        """Return whether the hardware address is known; None if there is no entry, as for one not directly attached."""
        return self._known.get((address, netdev))


def _send_probe(address: str, own: bytes, netdev: str) -> bool:
    """Send the datagram that makes the kernel send an ARP request; return False if there is no room for that now."""
    source = ipaddress.IPv6Address(own).ipv4_mapped if own else None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            if netdev:
                with contextlib.suppress(OSError):  # kernels before 5.7 require CAP_NET_RAW
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, netdev.encode())
            with contextlib.suppress(OSError):  # else a full table of neighbours is no error
                sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            if source is not None:
                sock.bind((str(source), 0))
            sock.sendto(b"", socket.MSG_DONTWAIT, (address, _ROCE_PORT))
    except OSError as exc:
        return exc.errno not in _NO_ROOM  # no route: the device reports it better
    return True
