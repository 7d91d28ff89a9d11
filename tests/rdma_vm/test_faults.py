"""All that can end in the middle of a transfer does, and what may follow is: a miss, or the right bytes, in time.

Each test breaks something under load, and waits until RDMA is back. ``load.under_load`` states what is verified;
``conftest`` that nothing is left on the devices afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from simm.client import Client
from tests.rdma_vm import devices, fault_injection, world
from tests.rdma_vm.devices import CLIENT, SERVER
from tests.rdma_vm.load import VICTIM_KEY, is_victims, under_load, victim
from tests.rdma_vm.world import connected, data, path_of, wait_rdma
from tests.support.child import stopped
from tests.support.fleet import Fleet
from tests.support.load import LoadThread

#: How often what is over soon is done.
ROUNDS = 3 if "SIMM_TEST_SLOW" in os.environ else 1
#: Short, so that what hangs is seen, and long enough for the emulator to do it by TCP in the other half.
DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """A data server whose endpoint can be broken by signals. Tests leave it whole."""
    patches = ("call=tests.rdma_vm.fault_injection:by_signal",)
    with world.start(nothing_is_left, memory="160M", patches=patches) as fleet:
        yield fleet


@contextlib.contextmanager
def loaded(fleet: Fleet, name: str) -> Iterator[tuple[Client, LoadThread]]:
    """A client under load, by RDMA when it begins; all rules are checked at the end."""
    with connected(fleet, deadline_s=DEADLINE_S) as client, under_load(client, name) as thread:
        thread.wait_calls()
        yield client, thread
        thread.wait_calls()


def wait_served(client: Client, thread: LoadThread, since: int = 0) -> float:
    """Seconds until values come by RDMA again, in both directions."""
    began = time.monotonic()
    wait_rdma(client)
    gets, puts = client.counters["rdma_gets"], client.counters["rdma_puts"]
    world.until(
        lambda: client.counters["rdma_gets"] > gets and client.counters["rdma_puts"] > puts,
        lambda: f"values by RDMA: {client.stats()}",
    )
    thread.wait_calls()
    return time.monotonic() - began


def scars(client: Client) -> tuple[int, int]:
    """Keys that went by TCP instead, and connections made: what breaks between two calls costs only a connection."""
    rdma = world.targets(client)[0].rdma
    return client.counters["rdma_fallbacks"], -1 if rdma is None else rdma._turn


def wait_felt(client: Client, before: tuple[int, int]) -> None:
    """Until there are others than ``before``."""
    world.until(lambda: scars(client) != before, "the client feels it")


def endpoint(fleet: Fleet, other_than: int = 0) -> psutil.Process:
    """The one that runs, or the next one."""

    def running() -> bool:
        process = world.family(fleet.servers[0]).get("endpoint 0")
        return process is not None and process.pid != other_than and process.status() != psutil.STATUS_ZOMBIE

    world.until(running, "an endpoint runs")
    return world.family(fleet.servers[0])["endpoint 0"]


@pytest.mark.fault("F09", ci="1", whole="1")
def test_the_worker_is_killed(fleet: Fleet) -> None:
    with loaded(fleet, "worker killed") as (client, thread):
        before = endpoint(fleet).pid
        os.kill(fleet.servers[0].worker_pid(), signal.SIGKILL)
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")
        assert endpoint(fleet).pid == before, "the endpoint outlives the worker"


@pytest.mark.fault("F09", ci="1", whole="1")
def test_the_endpoint_is_killed(fleet: Fleet) -> None:
    with loaded(fleet, "endpoint killed") as (client, thread):
        old = endpoint(fleet)
        old.kill()
        endpoint(fleet, other_than=old.pid)
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.slow
def test_the_data_server_is_killed(fleet: Fleet) -> None:
    with loaded(fleet, "data server killed") as (client, thread):
        fleet.servers[0].kill()
        thread.wait_calls()
        fleet.servers[0].start()
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", whole="1")
@pytest.mark.parametrize("device", [SERVER, pytest.param(CLIENT, marks=pytest.mark.slow)])
def test_a_link_goes_down(fleet: Fleet, device: str) -> None:
    with loaded(fleet, f"{device} unplugged") as (client, thread):
        with devices.unplugged(device):
            target = world.targets(client)[0]
            world.until(lambda: target.path != "rdma", "the client notices")
            thread.wait_calls()
            print(f"meanwhile: {target.reason}")
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", ci="1", whole="1")
def test_the_servers_queue_pairs_fail(fleet: Fleet) -> None:
    with loaded(fleet, "server's QPs killed") as (client, thread):
        for _ in range(ROUNDS):
            before = scars(client)
            endpoint(fleet).send_signal(signal.SIGUSR1)
            wait_felt(client, before)
            print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", whole="1")
@pytest.mark.slow
def test_the_clients_queue_pairs_fail(fleet: Fleet) -> None:
    with loaded(fleet, "client's QPs killed") as (client, thread):
        for _ in range(ROUNDS):
            before = scars(client)
            fabric = path_of(client)._context.rdma.fabric()
            for rail in fabric.rails:  # type: ignore[union-attr]
                for qp in list(rail.queue_pairs):  # type: ignore[attr-defined]
                    with contextlib.suppress(Exception):  # it may be closed by now
                        fault_injection.kill_queue_pair(qp)
            wait_felt(client, before)
            print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", ci="1", whole="1")
def test_the_servers_memory_is_revoked(fleet: Fleet) -> None:
    """All of the data's regions go in the middle of READs and WRITEs. Only a new endpoint has new ones."""
    with loaded(fleet, "server's MRs revoked") as (client, thread):
        before = scars(client)
        old = endpoint(fleet)
        old.send_signal(signal.SIGUSR2)
        wait_felt(client, before)
        thread.wait_calls(20)
        old.kill()
        endpoint(fleet, other_than=old.pid)
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", whole="1")
@pytest.mark.slow
def test_the_clients_memory_is_revoked(fleet: Fleet) -> None:
    with loaded(fleet, "client's MRs revoked") as (client, thread):
        for span in thread.load.spans:
            client.deregister(span)
            thread.wait_calls(2)
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", whole="1")
@pytest.mark.slow
def test_endpoint_and_worker_stand_still(fleet: Fleet) -> None:
    with loaded(fleet, "endpoint stopped") as (client, thread):
        with stopped(endpoint(fleet)):
            thread.wait_calls(5)
        wait_served(client, thread)
    with loaded(fleet, "worker stopped") as (client, thread):
        with stopped(psutil.Process(fleet.servers[0].worker_pid())):
            thread.wait_calls(5)
        wait_served(client, thread)


def test_clients_are_killed(fleet: Fleet) -> None:
    """In the middle of puts and gets: what they had on the devices, and the room that was granted to them, is free."""
    server = fleet.servers[0]
    before = devices.resources()
    with connected(fleet) as client:
        for pause_s in (0.05, 0.0, 0.2)[:ROUNDS]:
            with victim(fleet.manager.address, CLIENT) as started:
                started.wait_ready()
                time.sleep(pause_s)
            assert is_victims(client.get(VICTIM_KEY)), "whole, or evicted"
    world.until(lambda: devices.resources() == before, lambda: f"{before}, now {devices.resources()}")
    # The stream's and the endpoint's own grants stay; those of connections do not.
    world.until(
        lambda: server.worker_stats()["granted_bytes"] < 8 << 20,
        lambda: f"grants that nobody has: {server.worker_stats()}",
    )
    with connected(fleet) as client:
        assert client.put("victim", data(100)) and client.get("victim") == data(100)
