"""All that can end in the middle of a transfer does, and what may follow is: a miss, or the right bytes, in time.

Each test hammers a data server, breaks something, and waits until RDMA is back. ``hammer.Hammer`` says what is looked
at; ``conftest`` that nothing is left on the devices afterwards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from faults.fleet import Fleet, child_environment, stopped

from simm.client import Client

from . import breaks, rails, world
from .hammer import Hammer
from .rails import CLIENT, SERVER
from .world import connected, data, path_of, wait_rdma

#: How often what is over soon is done.
ROUNDS = 3 if "SIMM_TEST_SLOW" in os.environ else 1
#: Short, so that what hangs is seen, and long enough for the emulator to do it by TCP in the other half.
DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def town(nothing_is_left: Path) -> Iterator[Fleet]:
    """A data server whose endpoint can be broken by signals. Tests leave it whole."""
    with world.start(nothing_is_left, memory="160M", patches=("call=vm.breaks:by_signal",)) as fleet:
        yield fleet


@contextlib.contextmanager
def hammered(fleet: Fleet, name: str) -> Iterator[tuple[Client, Hammer]]:
    """A client under load, by RDMA when it begins; all rules are checked at the end."""
    with connected(fleet, deadline_s=DEADLINE_S) as client:
        with Hammer(client, name) as hammer:
            hammer.wait_calls()
            yield client, hammer
            hammer.wait_calls()
        hammer.check()
        print(f"{name}: {hammer}")


def wait_served(client: Client, hammer: Hammer, since: int = 0) -> float:
    """Seconds until values come by RDMA again, in both directions."""
    began = time.monotonic()
    wait_rdma(client)
    gets, puts = client.counters["rdma_gets"], client.counters["rdma_puts"]
    world.until(
        lambda: client.counters["rdma_gets"] > gets and client.counters["rdma_puts"] > puts,
        lambda: f"values by RDMA: {client.stats()}",
    )
    hammer.wait_calls()
    return time.monotonic() - began


def scars(client: Client) -> tuple[int, int]:
    """Keys that went by TCP instead, and lanes that were made: what breaks between two calls costs a lane only."""
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


def test_the_worker_is_killed(town: Fleet) -> None:
    with hammered(town, "worker killed") as (client, hammer):
        before = endpoint(town).pid
        os.kill(town.servers[0].worker_pid(), signal.SIGKILL)
        print(f"by RDMA again after {wait_served(client, hammer):.1f} s")
        assert endpoint(town).pid == before, "the endpoint outlives the worker"


def test_the_endpoint_is_killed(town: Fleet) -> None:
    with hammered(town, "endpoint killed") as (client, hammer):
        old = endpoint(town)
        old.kill()
        endpoint(town, other_than=old.pid)
        print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


@pytest.mark.slow
def test_the_data_server_is_killed(town: Fleet) -> None:
    with hammered(town, "data server killed") as (client, hammer):
        town.servers[0].kill()
        hammer.wait_calls()
        town.servers[0].start()
        print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


@pytest.mark.parametrize("device", [SERVER, pytest.param(CLIENT, marks=pytest.mark.slow)])
def test_a_link_goes_down(town: Fleet, device: str) -> None:
    with hammered(town, f"{device} unplugged") as (client, hammer):
        with rails.unplugged(device):
            target = world.targets(client)[0]
            world.until(lambda: target.path != "rdma", "the client notices")
            hammer.wait_calls()
            print(f"meanwhile: {target.why}")
        print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


def test_the_servers_queue_pairs_fail(town: Fleet) -> None:
    with hammered(town, "server's QPs killed") as (client, hammer):
        for _ in range(ROUNDS):
            before = scars(client)
            endpoint(town).send_signal(signal.SIGUSR1)
            wait_felt(client, before)
            print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


@pytest.mark.slow
def test_the_clients_queue_pairs_fail(town: Fleet) -> None:
    with hammered(town, "client's QPs killed") as (client, hammer):
        for _ in range(ROUNDS):
            before = scars(client)
            fabric = path_of(client)._fabric()
            for rail in fabric.rails:  # type: ignore[union-attr]
                for link in list(rail.links):  # type: ignore[attr-defined]
                    with contextlib.suppress(Exception):  # it may be closed by now
                        breaks.kill_queue_pair(link)
            wait_felt(client, before)
            print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


def test_the_servers_memory_is_revoked(town: Fleet) -> None:
    """All of the data's regions go in the middle of READs and WRITEs. Only a new endpoint has new ones."""
    with hammered(town, "server's MRs revoked") as (client, hammer):
        before = scars(client)
        old = endpoint(town)
        old.send_signal(signal.SIGUSR2)
        wait_felt(client, before)
        hammer.wait_calls(20)
        old.kill()
        endpoint(town, other_than=old.pid)
        print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


@pytest.mark.slow
def test_the_clients_memory_is_revoked(town: Fleet) -> None:
    with hammered(town, "client's MRs revoked") as (client, hammer):
        for span in hammer._spans.values():
            client.deregister(span)
            hammer.wait_calls(2)
        print(f"by RDMA again after {wait_served(client, hammer):.1f} s")


@pytest.mark.slow
def test_endpoint_and_worker_stand_still(town: Fleet) -> None:
    with hammered(town, "endpoint stopped") as (client, hammer):
        with stopped(endpoint(town)):
            hammer.wait_calls(5)
        wait_served(client, hammer)
    with hammered(town, "worker stopped") as (client, hammer):
        with stopped(psutil.Process(town.servers[0].worker_pid())):
            hammer.wait_calls(5)
        wait_served(client, hammer)


VICTIM = """
import sys
from simm.client import Client
from vm.world import PATHS, WAIT_S, data, wait_rdma

client = Client(sys.argv[1], path=PATHS, rdma_devices=sys.argv[2], deadline_s=20.0)
assert client.wait_ready(WAIT_S)
wait_rdma(client)
value, buffer = data(3_000_000), bytearray(3_000_000)
assert client.put("victim", value)
print("on", flush=True)
while True:
    client.put("victim", value)
    client.get_into("victim", buffer)
"""


def test_clients_are_killed(town: Fleet) -> None:
    """In the middle of puts and gets: what they had on the devices, and the room that was granted to them, is free."""
    server = town.servers[0]
    before = rails.resources()
    with connected(town) as client:
        for pause_s in (0.05, 0.0, 0.2)[:ROUNDS]:
            victim = subprocess.Popen(
                [sys.executable, "-c", VICTIM, town.manager.address, CLIENT], env=child_environment(),
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert victim.stdout is not None and victim.stdout.readline() == "on\n"
            time.sleep(pause_s)
            victim.kill()
            victim.communicate()
            assert client.get("victim") in (None, data(3_000_000)), "whole, or evicted"
    world.until(lambda: rails.resources() == before, lambda: f"{before}, now {rails.resources()}")
    # The stream's and the endpoint's own grants stay; those of lanes do not.
    world.until(
        lambda: server.worker_stats()["granted_bytes"] < 8 << 20,
        lambda: f"grants that nobody has: {server.worker_stats()}",
    )
    with connected(town) as client:
        assert client.put("victim", data(100)) and client.get("victim") == data(100)
