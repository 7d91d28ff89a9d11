"""The machine's RDMA devices: which end is the servers', what is in use on them, what they carry, their cables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DEVICES: Final = os.environ.get("SIMM_TEST_VM_DEVICES", "").split()
PAIRS: Final = int(os.environ.get("SIMM_TEST_VM_PAIRS", "0"))
#: Ends of the first cable and of the second; cards (node 0, node 1) of a server and of a client.
SERVER, CLIENT = "rxe0", "rxe1"
SERVER_2, CLIENT_2 = "rxe2", "rxe3"
SERVER_NODES, CLIENT_NODES = ("rxe4", "rxe5"), ("rxe6", "rxe7")
_IB: Final = Path("/sys/class/infiniband")
#: For the kernel to let go of what a process has left, and for pools that shrink, seconds. A bound for leaks.
_GONE_S: Final = 20.0

#: device -> kind (qp, mr, pd, ...) -> how many, the kernel's own included.
Resources = dict[str, dict[str, int]]


def resources() -> Resources:
    """What ``rdma resource show`` counts now."""
    shown = subprocess.run(["rdma", "resource"], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in shown.splitlines():
        words = line.split()
        found[words[1].rstrip(":")] = {kind: int(count) for kind, count in zip(words[2::2], words[3::2])}
    return found


def owners(kind: str) -> list[str]:
    """Who has what of a kind: for a failure's text."""
    shown = subprocess.run(["rdma", "-j", "resource", "show", kind], capture_output=True, text=True).stdout
    return [
        f"{kind} on {each.get('ifname')}: {each.get('comm')} {each.get('pid')}"
        for each in json.loads(shown or "[]")
        if "pid" in each
    ]


def devices_of(pid: int) -> set[str]:
    """The devices on which a process has queue pairs."""
    shown = subprocess.run(["rdma", "-j", "resource", "show", "qp"], capture_output=True, text=True, check=True).stdout
    return {each["ifname"] for each in json.loads(shown) if each.get("pid") == pid}


def count(kind: str) -> int:
    """Of all devices."""
    return sum(counts[kind] for counts in resources().values())


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """What is in use afterwards must be what was before: AssertionError with its owners else."""
    before = resources()
    yield
    until = time.monotonic() + _GONE_S
    while (after := resources()) != before:
        if time.monotonic() > until:
            said = [line for kind in ("qp", "mr", "pd", "cq") for line in owners(kind)]
            raise AssertionError(f"left behind: before {before}, after {after}; {said}")
        time.sleep(0.1)


#: The lifespan of hw_counters, seconds.
_COUNTERS_S: Final = 0.01


def carried(device: str) -> int:
    """Packets that it has sent and received, by now: the kernel counts anew when its last answer is 10 ms old."""
    time.sleep(2 * _COUNTERS_S)
    counters = _IB / device / "ports/1/hw_counters"
    return sum(int((counters / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


def netdev(device: str) -> str:
    """The network device below it."""
    return (_IB / device / "parent").read_text().strip()


def address(device: str) -> str:
    """Its IPv4 address."""
    shown = subprocess.run(
        ["ip", "-j", "-4", "addr", "show", "dev", netdev(device)], capture_output=True, text=True, check=True
    ).stdout
    found: str = json.loads(shown)[0]["addr_info"][0]["local"]
    return found


def node(device: str) -> int:
    """Its NUMA node, -1 for none."""
    place = Path("/sys/class/net", netdev(device), "device/../numa_node")
    return int(place.read_text()) if place.exists() else -1


def gid_index(device: str) -> int:
    """Of its IPv4-mapped address, for programs that want to be told."""
    for path in (_IB / device / "ports/1/gids").iterdir():
        if re.match("0000:0000:0000:0000:0000:ffff:", path.read_text()):
            return int(path.name)
    raise AssertionError(f"{device} has no IPv4 address")


def wait_active(device: str, timeout_s: float = 30.0) -> None:
    """Until its port is up and has its address."""
    until = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(AssertionError, OSError):
            if (_IB / device / "ports/1/state").read_text().startswith("4:") and gid_index(device) >= 0:
                return
        assert time.monotonic() < until, f"{device} does not come up"
        time.sleep(0.05)


@contextlib.contextmanager
def unplugged(device: str) -> Iterator[None]:
    """Its link is down; it comes up again at the end, with its address."""
    card = netdev(device)
    subprocess.run(["ip", "link", "set", card, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", card, "up"], check=True)
        wait_active(device)
