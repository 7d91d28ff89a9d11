"""Clients in one of two cabled machines, servers in the other: no shared memory, no shared kernel, one wire.

The servers are :class:`faults.fleet.Fleet`'s, with the other machine as their place.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simm.client import Client
from tests.rdma_vm import devices, world
from tests.rdma_vm.load import GRACE_S, under_load
from tests.rdma_vm.remote import Far
from tests.rdma_vm.world import all_by_rdma, connected, data
from tests.support.child import Child
from tests.support.fleet import Fleet
from tests.support.pace import Pace

pytestmark = pytest.mark.two_hosts

KIB, MIB = 1 << 10, 1 << 20
#: A card on each NUMA node, in both machines.
DEVICES = "rxe0,rxe1"


@pytest.fixture(scope="module")
def far() -> Far:
    """The other machine."""
    return Far()


@pytest.fixture(scope="module")
def fleet(nothing_is_left: Path, far: Far) -> Iterator[Fleet]:
    """A manager and two data servers with two NUMA nodes each, over there."""
    arguments = ("--numa", "0,1")
    places = [far] * 3
    with world.start(nothing_is_left, 2, devices=DEVICES, memory="160M", more=arguments, places=places) as fleet:
        yield fleet


def test_the_other_machine_is_another_one(far: Far) -> None:
    assert far.run("hostname") == "vm1\n"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        far.run("sh", "-c", "exit 5")
    assert failed.value.returncode == 5
    # What a killed stand-in stood for is killed.
    with Child(["sh", "-c", "echo on; exec sleep 1000"], place=far) as stand_in:
        stand_in.expect("on\n")
    far.run("sh", "-c", "for i in $(seq 100); do pgrep -f 'sleep 1000$' >/dev/null || exit 0; sleep 0.1; done; exit 1")


def test_all_goes_by_rdma(fleet: Fleet) -> None:
    """With nothing said about paths: there is no shared memory to choose."""
    with connected(fleet, DEVICES, path="auto") as client:
        assert len(world.targets(client)) == 4
        before = [devices.carried(device) for device in DEVICES.split(",")]
        for size in (1, 64, 513, 4097, 64 * KIB, 300_001, MIB + 1, 3 * MIB):
            value = data(size)
            buffer = np.zeros(size, np.uint8)
            with all_by_rdma(client):
                assert client.put(f"far {size}", value) and client.exists(f"far {size}")
                assert client.get(f"far {size}") == value
                assert client.get_into(f"far {size}", client.register(buffer)) == size
            assert buffer.tobytes() == value
        keys = [f"far {number}" for number in range(100)]
        values = [data(1 + 397 * number, number) for number in range(100)]
        with all_by_rdma(client):
            assert client.put_many(keys, values) == [True] * 100, client.stats()
            assert client.get_many(keys) == values
            assert client.exists_many([*keys, "nowhere"]) == [True] * 100 + [False]
            assert client.get("nowhere") is None
        assert client.delete(keys[0]) and client.get(keys[0]) is None
        with client.view(keys[50]) as view:
            assert bytes(view.data) == values[50]
        after = [devices.carried(device) for device in DEVICES.split(",")]
        assert all(now - then > 100 for now, then in zip(after, before)), "both rails are used"


def test_two_clients_and_tcp_see_the_same(fleet: Fleet) -> None:
    with connected(fleet, DEVICES) as one, connected(fleet, "rxe1") as two, \
            Client(fleet.manager.address, path="tcp", deadline_s=20.0) as third:  # fmt: skip
        assert third.wait_ready(60)
        for number, writer in enumerate((one, two, third)):
            value = data(200_000, number)
            assert writer.put("same", value)
            assert [reader.get("same") for reader in (one, two, third)] == [value] * 3


@pytest.mark.slow
def test_a_server_over_there_is_killed(fleet: Fleet) -> None:
    with connected(fleet, DEVICES, deadline_s=6.0) as client:
        with under_load(client, "far server killed", keys=16) as thread:
            thread.wait_calls()
            fleet.servers[1].kill()
            thread.wait_calls(30)
            fleet.servers[1].start()
            print(f"by RDMA again after {world.wait_rdma(client, 4):.1f} s")
            thread.wait_calls()


def test_the_cable_is_pulled(fleet: Fleet) -> None:
    """Of one rail of two, and then of both, with TCP: misses in time, and all comes back."""
    with connected(fleet, DEVICES, deadline_s=6.0) as client:
        assert client.put("pulled", data(100_000))
        with devices.unplugged("rxe0"), devices.unplugged("rxe1"):
            with Pace() as pace:
                began = time.monotonic()
                assert client.get("pulled") is None
                took = time.monotonic() - began
            pace.check("a get without any path ends", took, client.deadline_s + GRACE_S)
        world.until(lambda: client.get("pulled") == data(100_000), lambda: str(client.stats()))
        print(f"by RDMA again after {world.wait_rdma(client, 4):.1f} s")
        with all_by_rdma(client):
            assert client.get("pulled") == data(100_000)


@pytest.mark.slow
def test_a_large_value(nothing_is_left: Path, far: Far) -> None:
    value = np.frombuffer(data(60 * MIB), np.uint8)
    with world.start(nothing_is_left, devices=DEVICES, memory="128M", places=[far] * 2) as fleet:
        with connected(fleet, DEVICES, deadline_s=60.0) as client, all_by_rdma(client):
            assert client.put("large", client.register(value))
            buffer = np.empty(len(value), np.uint8)
            assert client.get_into("large", client.register(buffer)) == len(value)
            assert np.array_equal(buffer, value)
