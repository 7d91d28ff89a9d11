"""The machine itself: what the other tests here stand on."""

from __future__ import annotations

import ipaddress
import subprocess
import time
from pathlib import Path

import pytest

from simm.rdma import ports
from tests.rdma_vm import devices
from tests.rdma_vm.devices import DEVICES, PAIRS


def test_devices_are_active() -> None:
    for device in DEVICES:
        assert Path(f"/sys/class/infiniband/{device}/ports/1/state").read_text().strip() == "4: ACTIVE"


def test_resources_are_counted() -> None:
    """One queue pair of each device is the kernel's."""
    found = devices.resources()
    assert set(found) == set(DEVICES) and all(kinds["qp"] == 1 for kinds in found.values()), devices.owners("qp")


@pytest.mark.parametrize("pair", range(PAIRS or 1))
def test_verbs_across_a_cable(pair: int) -> None:
    """The programs of ibverbs-utils, which know nothing of SiMM, exchange messages and check them."""
    one, two = DEVICES[2 * pair : 2 * pair + 2]
    words = ["ibv_rc_pingpong", "-c", "-n", "50", "-s", "4096", "-p", str(18515 + pair)]
    listening = [*words, "-d", one, "-g", str(devices.gid_index(one))]
    asking = [*words, "-d", two, "-g", str(devices.gid_index(two)), "127.0.0.1"]
    before = devices.carried(one), devices.carried(two)
    server = subprocess.Popen(listening, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 30
        while True:
            client = subprocess.run(asking, capture_output=True, text=True, timeout=60)
            if client.returncode == 0 or time.monotonic() > until or "connect" not in client.stderr:
                break
            time.sleep(0.1)
        assert client.returncode == 0, client.stderr
        out, _ = server.communicate(timeout=60)
        assert server.returncode == 0 and "50 iters" in out
    finally:
        server.kill()
        server.communicate()
    assert all(after - had >= 100 for after, had in zip((devices.carried(one), devices.carried(two)), before))


def test_cards_are_on_numa_nodes() -> None:
    nodes = [devices.node(device) for device in DEVICES]
    assert nodes[: 2 * PAIRS] == [-1] * (2 * PAIRS)
    assert nodes[2 * PAIRS :] == [0, 1] * (len(nodes) // 2 - PAIRS) and len(nodes) > 2 * PAIRS


def test_a_cable_can_be_pulled() -> None:
    with devices.unplugged(DEVICES[0]):
        assert "DOWN" in Path(f"/sys/class/infiniband/{DEVICES[0]}/ports/1/state").read_text()
    devices.wait_active(DEVICES[0])
    test_verbs_across_a_cable(0)


def test_a_neighbour_that_failed_once_is_asked_again() -> None:
    """Both ends of the cable are this machine's: only by the end's own device does the question come to the other."""
    one, two = DEVICES[:2]
    peer, card = devices.address(two), devices.netdev(one)
    gid, own = (ipaddress.IPv6Address(f"::ffff:{address}").packed for address in (peer, devices.address(one)))

    def fail() -> None:
        subprocess.run(["ip", "neigh", "replace", peer, "dev", card, "nud", "failed"], check=True)

    fail()
    assert ports.arp_resolves(gid, own, card, timeout_s=30.0)
    fail()
    assert not ports.arp_resolves(gid, own), "by the routing table it stays at home"
    with devices.unplugged(two):
        fail()
        assert not ports.arp_resolves(gid, own, card)
    assert ports.arp_resolves(gid, own, card, timeout_s=30.0)
