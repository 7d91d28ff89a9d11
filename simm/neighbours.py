"""Is the host behind an address there? Asked before verbs are, as they ask with the interpreter held.

Connecting a queue pair on Ethernet needs the peer's hardware address. Where the kernel does not know it, it asks
for it within the call, for about a second when nobody answers, and no call of pyverbs gives the GIL up: an engine
would stand still for that second, and again at each try while the peer is away. So we have the kernel ask first: a
datagram to the address does, and its table of neighbours says what came of it, while other threads run.

The datagram is bound to the port's network device, as the device's own question is. By the routing table alone it might
leave by another card of the same subnet, or, where the peer's port is one of this very host, not at all: an entry that
once failed would be refreshed by nobody, and a link that came back would never be used again.

Only an IPv4 address on a link of ours can be looked up that way. Of one that is routed, or an IPv6 one, nothing is
known, and connecting goes ahead: there the kernel knows the router.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from pathlib import Path
from typing import Final

#: A neighbour on the same network answers within a millisecond; the kernel repeats its question after a second.
ANSWER_S: Final = 0.3
_LOOK_S: Final = 0.002
#: RoCE v2's port: nothing listens there, as the device takes what comes before the kernel sees it.
_PORT: Final = 4791
#: Flag of a complete entry (if_arp.h).
_COMPLETE: Final = 2


def answers(
    gid: bytes, own: bytes = b"", netdev: str = "", *, timeout_s: float = ANSWER_S, sys_root: str = "/"
) -> bool:  # fmt: skip
    """False when nobody on our network answers for the GID's address; True when somebody does, or it cannot be told.

    ``gid`` is the peer's, ``own`` that of the port that it is to be reached from: 16 bytes each. ``netdev`` is that
    port's network device, the only one whose neighbours count; empty for any. Waits for ``timeout_s`` at most, the GIL
    free.
    """
    address = ipaddress.IPv6Address(gid).ipv4_mapped
    if address is None:
        return True
    table = Path(sys_root) / "proc/net/arp"
    text = str(address)
    until = time.monotonic() + timeout_s
    if _known(table, text, netdev):
        return True
    _call(text, own, netdev)
    while _known(table, text, netdev) is False:
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_S)
    return True


def _call(address: str, own: bytes, netdev: str) -> None:
    """Send the datagram that makes the kernel ask."""
    source = ipaddress.IPv6Address(own).ipv4_mapped if own else None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if netdev:
            with contextlib.suppress(OSError):  # kernels before 5.7 want CAP_NET_RAW for it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, netdev.encode())
        try:
            if source is not None:
                sock.bind((str(source), 0))
            sock.sendto(b"", socket.MSG_DONTWAIT, (address, _PORT))
        except OSError:
            pass  # no route: the device says so better than we could


def _known(table: Path, address: str, netdev: str) -> bool | None:
    """Is the neighbour's hardware address known? None where the kernel has no entry: it is not on a link of ours."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return None
    found: bool | None = None
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[0] == address and netdev in ("", fields[5]):
            found = bool(found) or bool(int(fields[2], 16) & _COMPLETE)
    return found
