"""A worker that reads nothing of what its supervisor sends, or that the supervisor cuts off: no value is lost."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil
import pytest

from simm.client import Client
from simm.errors import TransportError
from tests.support.child import stopped
from tests.support.fleet import Fleet, Server
from tests.support.load import PATIENT_S
from tests.support.patched_children import CUT
from tests.support.waiting import wait_until

KEYS = 50
#: How long a peer may stand still in these servers, seconds, and how often they look.
STALL_S = 0.5
#: On a busy machine the worker is stopped for longer than one that hangs is waited for.
IMPATIENT = (f"stall={STALL_S}", "maintenance=0.1", "hang=600")
CUTS = "call=tests.support.patched_children:cut"
BELIEVES = "call=tests.support.patched_children:believing"


def fill(client: Client) -> None:
    assert all(client.put(f"k/{number}", b"%d" % number) for number in range(KEYS))


def hits(client: Client) -> int:
    found = [(number, client.get(f"k/{number}")) for number in range(KEYS)]
    assert all(value in (None, b"%d" % number) for number, value in found)
    return sum(value is not None for _, value in found)


def worker_of(server: Server) -> psutil.Process:
    return psutil.Process(server.worker_pid())


def has_epoch(fleet: Fleet, least: int) -> bool:
    with contextlib.suppress(TransportError):
        return fleet.manager_epoch() >= least
    return False


def test_a_worker_that_stands_still_while_maps_come_goes_on_with_its_values(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(2, memory="32M", heartbeat_ms=500, patches=IMPATIENT, manager_arguments=("--dead-after", "60"))
    first, second = fleet.servers
    second.end()
    fleet.wait_settled("the first has all shards")
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        before, worker = fleet.manager_epoch(), worker_of(first)
        with stopped(worker):
            for _ in range(2):  # each start and each end makes maps of 147 KB; the socket has room for one
                second.start()
                second.end()
            wait_until(lambda: has_epoch(fleet, before + 3), "the maps")
            time.sleep(4 * STALL_S)
        fleet.wait_settled("the first has all shards again")
        assert worker_of(first).pid == worker.pid
        assert hits(client) > KEYS / 4, "the other server took some shards over without their values"
    assert "ending it" not in first.log.read_text()


@pytest.mark.parametrize("stops", [False, True], ids=["while it runs", "while it is stopped"])
def test_a_worker_that_is_cut_off_leaves_its_values_to_a_successor(
    make_fleet: Callable[..., Fleet], stops: bool
) -> None:
    fleet = make_fleet(1, memory="32M", heartbeat_ms=500, patches=(CUTS,), manager_arguments=("--dead-after", "60"))
    (server,) = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        worker = worker_of(server)
        with stopped(worker) if stops else contextlib.nullcontext():
            (server.folder / CUT).touch()
            wait_until(lambda: "ending it" in server.log.read_text(), "its supervisor ends it")
        wait_until(lambda: server.succeeded(worker.pid), "another worker serves")
        fleet.wait_settled()
        assert hits(client) == KEYS


def test_control_a_worker_that_believes_its_supervisor_dead_takes_the_values_along(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet(1, memory="32M", heartbeat_ms=500, patches=(CUTS, BELIEVES))
    (server,) = fleet.servers
    with Client(fleet.manager.address, deadline_s=PATIENT_S) as client:
        fill(client)
        worker = worker_of(server)
        (server.folder / CUT).touch()
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "it ends")
        wait_until(lambda: "cannot recover its arena" in server.log.read_text(), "the server gives up")


def test_a_worker_whose_supervisor_is_killed_leaves_no_arena(make_fleet: Callable[..., Fleet]) -> None:
    """The other side of it: the connection closes moments before the kernel says that the parent has gone."""
    fleet = make_fleet(1, memory="32M")
    (server,) = fleet.servers
    family = server.family()
    server.kill()
    wait_until(lambda: not any(each.is_running() for each in family), "all have ended")
    assert not [name for name in os.listdir("/dev/shm") if f"-{server.name}-" in name]
