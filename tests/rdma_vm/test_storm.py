"""Not one wrong byte over RDMA while everything changes under the readers; and what sees to that is really needed.

SIMM_TEST_STORM_SECONDS makes the long form (``scripts/test-rdma`` without ``--quick``) longer than its three minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.rdma.api import WRITE, FabricError
from tests.rdma_vm import world
from tests.rdma_vm.devices import CLIENT, CLIENT_2, SERVER, SERVER_2
from tests.rdma_vm.load import right, storm
from tests.rdma_vm.world import connected, data, path_of
from tests.support.fleet import Fleet

#: Room for a third of the storm's values.
MEMORY = "12M"


@pytest.fixture(scope="module")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """One data server with one rail."""
    with world.start(nothing_is_left, memory=MEMORY) as fleet:
        yield fleet


@pytest.fixture
def wide_town(nothing_is_left: Path) -> Iterator[Fleet]:
    """One with two rails: large values are striped."""
    with world.start(nothing_is_left, devices=f"{SERVER},{SERVER_2}", memory="24M") as fleet:
        yield fleet


def told(result: dict[str, Any], fleet: Fleet) -> str:
    """For people."""
    stats = fleet.servers[0].worker_stats()
    evicted = sum(stats["evictions"].values()) + stats["set_evictions"]
    return ", ".join(f"{name} {value}" for name, value in {**result, "evicted": evicted}.items() if name != "said")


def well(result: dict[str, Any], fleet: Fleet) -> bool:
    """Assert that nothing was wrong. Return True if so much was done by RDMA that it says something."""
    print(told(result, fleet))
    assert right(result), result["said"]
    return result["hits"] > 20 and result["stored"] > 10 and result["rdma_gets"] > 20 and result["rdma_puts"] > 5


@pytest.mark.timeout(900)
def test_storm(fleet: Fleet) -> None:
    """On a machine of its own one is some thousands of calls; on one that does other things too the emulator creeps."""
    for _ in range(20):
        if well(storm(fleet.manager.address, CLIENT, seconds=12, seed=1, writers=1, readers=2), fleet):
            return
    pytest.fail("it was to go by RDMA")


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_storm_long(wide_town: Fleet, seed: int) -> None:
    seconds = float(os.environ.get("SIMM_TEST_STORM_SECONDS", "180")) / 3
    rails = f"{CLIENT},{CLIENT_2}"
    result = storm(wide_town.manager.address, rails, seconds=seconds, seed=seed, writers=2, readers=4)
    assert well(result, wide_town), "it was to go by RDMA"


@pytest.mark.timeout(900)
def test_without_the_second_look_it_is_noticed(fleet: Fleet) -> None:
    """Control: readers that believe the first image of a slot return what is no value of the key, or an older one."""
    for seed in range(40):
        patches = ["call=tests.rdma_vm.fault_injection:no_reread"]
        address = fleet.manager.address
        result = storm(address, CLIENT, seconds=6, seed=100 + seed, writers=1, readers=1, reader_patches=patches)
        if result["wrong"] or result["back"]:
            return
    pytest.fail("the storm does not see readers that check nothing")


def late_write(fleet: Fleet) -> tuple[bool, bool]:
    """Commit a value, and write into its chunk once more: was it refused; does a reader see a wrong byte?"""
    value, late = data(100_000, "early"), b"\xdd" * 100_000
    with connected(fleet, CLIENT) as client:
        # What the storm's clients had been granted may not be back yet, and the arena is small.
        world.until(lambda: client.put("late", value), lambda: f"room for it: {fleet.servers[0].worker_stats()}")
        path = path_of(client)
        connection = path.acquire(time.monotonic() + 20)
        try:
            source = client.register(bytearray(late))
            # Its next grant, used for the key, and then used again.
            connection.ask([(len(value), 1)])
            grant = connection.pool.take(len(value))
            assert grant is not None
            number, offset, _, keys = grant
            link = connection.links[0]
            (remote, rkey, length), *more = link.region_map.split(offset, len(value))
            assert not more, "one piece"
            key = keys[link.number] if keys else rkey
            early = client.register(bytearray(value))
            lkeys = [span.registration.lkey(link.rail) for span in (early, source)]
            flush = (0, connection.flushed, link.lkey, 8, *_readable(link, offset))
            link.qp.wait(
                link.qp.post([(WRITE, early.address, lkeys[0], length, remote, key), flush]), time.monotonic() + 20
            )
            from simm.wire import messages as M

            entry = (client.digest("late"), number, len(value), 0, 0, 0)
            answer = connection.channel.call(M.Commit([entry], []))
            assert connection.granted(answer, 1) == [0]
            assert client.get("late") == value
            refused = False
            try:
                link.qp.wait(
                    link.qp.post([(WRITE, source.address, lkeys[1], length, remote, key), flush]),
                    time.monotonic() + 20,
                )
            except FabricError:
                refused = True
        finally:
            path.lost(connection, "done with")
            for span in (early, source):
                client.deregister(span)
        world.wait_rdma(client)
        return refused, client.get("late") != value


def _readable(link: Any, offset: int) -> tuple[int, int]:
    """Address and key of the data there, for READs."""
    remote, rkey, _ = link.region_map.split(offset, 8)[0]
    return remote, rkey


def test_a_committed_value_cannot_be_written_any_more(fleet: Fleet) -> None:
    assert late_write(fleet) == (True, False)


@pytest.mark.slow
def test_without_the_fence_it_can(nothing_is_left: Path) -> None:
    """Control: a server that does not invalidate windows lets a late WRITE into what is published."""
    with world.start(nothing_is_left, memory=MEMORY, patches=("call=tests.rdma_vm.fault_injection:no_fence",)) as fleet:
        assert late_write(fleet) == (False, True)
