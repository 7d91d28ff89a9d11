"""The machine itself: what the other tests here stand on."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

DEVICES = os.environ.get("SIMM_TEST_VM_DEVICES", "").split()
PAIRS = int(os.environ.get("SIMM_TEST_VM_PAIRS", "0"))


def gid_index(device: str) -> int:
    """Of the IPv4-mapped address."""
    for path in Path(f"/sys/class/infiniband/{device}/ports/1/gids").iterdir():
        if path.read_text().startswith("0000:0000:0000:0000:0000:ffff:"):
            return int(path.name)
    raise AssertionError(f"{device} has no IPv4 address")


def test_devices_are_active() -> None:
    for device in DEVICES:
        assert Path(f"/sys/class/infiniband/{device}/ports/1/state").read_text().strip() == "4: ACTIVE"


def test_nothing_is_left_of_an_earlier_test() -> None:
    shown = subprocess.run(["rdma", "resource", "show", "qp"], capture_output=True, text=True, check=True).stdout
    assert not re.findall(r"lqpn (?!1 )", shown), shown


@pytest.mark.parametrize("pair", range(PAIRS or 1))
def test_verbs_across_a_cable(pair: int) -> None:
    """The programs of ibverbs-utils, which know nothing of SiMM, exchange messages and check them."""
    one, two = DEVICES[2 * pair : 2 * pair + 2]
    words = ["ibv_rc_pingpong", "-c", "-n", "50", "-s", "4096", "-p", str(18515 + pair)]
    server = subprocess.Popen([*words, "-d", one, "-g", str(gid_index(one))], stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 30
        while True:
            client = subprocess.run(
                [*words, "-d", two, "-g", str(gid_index(two)), "127.0.0.1"], capture_output=True, text=True, timeout=60
            )
            if client.returncode == 0 or time.monotonic() > until or "connect" not in client.stderr:
                break
        assert client.returncode == 0, client.stderr
        out, _ = server.communicate(timeout=60)
        assert server.returncode == 0 and "50 iters" in out
    finally:
        server.kill()
        server.communicate()


def test_cards_are_on_numa_nodes() -> None:
    nodes = [
        int(path.read_text())
        for device in DEVICES[2 * PAIRS :]
        for path in [Path(f"/sys/class/net/r{device.replace('rxe', 'nic')}/device/../numa_node")]
    ]
    assert nodes == [0, 1] * (len(nodes) // 2) and nodes
