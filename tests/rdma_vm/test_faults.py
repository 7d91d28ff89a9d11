"""All that can end in the middle of a transfer does, and what may follow is: a miss, or the right bytes, in time.

Each test breaks something under load, and waits until RDMA is back. ``load.under_load`` states what is verified;
``conftest`` that nothing is left on the devices afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from simm.client import Client
from simm.errors import SimmError
from tests.rdma_vm import devices, fault_injection, world
from tests.rdma_vm.devices import CLIENT, SERVER
from tests.rdma_vm.load import VICTIM_KEY, is_victims, under_load, victim
from tests.rdma_vm.world import connected, data, path_of, wait_rdma
from tests.support.child import stopped
from tests.support.fleet import Fleet
from tests.support.load import GET, OK, PUT, LoadThread
from tests.support.measures import measured

#: Short, so that what hangs is seen, and long enough for the emulator to do it by TCP in the other half.
DEADLINE_S = 6.0
#: Clients that are killed one after the other.
ROUNDS = 3 if "SIMM_TEST_SLOW" in os.environ else 1


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


def wait_served(client: Client, thread: LoadThread) -> float:
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


class Toll:
    """What the rounds of one fault have cost a client under load. Reported, as the emulator's times are no bounds.

    *Left*: from the fault until a key goes by TCP instead, or a new connection is made. *Served*: until the next value
    after that was stored or found, by whichever path. *Back*: until values come by RDMA again, once they may.
    """

    def __init__(self, name: str, client: Client, thread: LoadThread) -> None:
        self.name = name
        self.client = client
        self.thread = thread
        self._keys = client.counters["rdma_fallbacks"]
        self._left: list[float] = []
        self._served: list[float] = []
        self._back: list[float] = []

    def _values(self) -> int:
        return self.thread.load.tally[PUT, OK] + self.thread.load.tally[GET, OK]

    def hit(self, break_it: Callable[[], object], felt: Callable[[], bool] | None = None) -> None:
        """Break something, and wait until the client has felt it and goes on; ``felt`` unless it has scars."""
        before = scars(self.client)
        began = time.monotonic()
        break_it()
        world.until(felt or (lambda: scars(self.client) != before), "the client feels it")
        self._left.append(time.monotonic() - began)
        values = self._values()
        world.until(lambda: self._values() > values, "the client has values")
        self._served.append(time.monotonic() - began)

    def back(self) -> None:
        """Wait until RDMA is back."""
        self._back.append(wait_served(self.client, self.thread))

    def report(self) -> None:
        """Say it. What must not happen is asserted by the load."""
        load = self.thread.load
        more = {"rounds": len(self._back), "keys by TCP instead": self.client.counters["rdma_fallbacks"] - self._keys}
        more.update(calls=load.calls, wrong=load.faults["wrong"], **{"buffers written late": load.faults["written"]})
        for what, times in (("left", self._left), ("served", self._served), ("back", self._back)):
            if times:
                worst = f"{max(times):.1f}"
                measured(f"{self.name}: {what}, median", statistics.median(times), "s", worst=worst, **more)


def endpoint(fleet: Fleet, other_than: int = 0) -> psutil.Process:
    """The one that runs, or the next one."""

    def running() -> bool:
        process = world.family(fleet.servers[0]).get("endpoint 0")
        return process is not None and process.pid != other_than and process.status() != psutil.STATUS_ZOMBIE

    world.until(running, "an endpoint runs")
    return world.family(fleet.servers[0])["endpoint 0"]


def wait_worker(fleet: Fleet, other_than: int) -> None:
    """Until another process than that one is the worker."""

    def there() -> bool:
        with contextlib.suppress(OSError, SimmError):  # there is none just now
            return fleet.servers[0].worker_pid() != other_than
        return False

    world.until(there, "another worker runs")


@pytest.mark.fault("F09", ci=1, whole=20)
def test_the_worker_is_killed(fleet: Fleet, amount: int) -> None:
    with loaded(fleet, "worker killed") as (client, thread):
        toll = Toll("worker killed", client, thread)
        before = endpoint(fleet).pid
        for _ in range(amount):
            old = fleet.servers[0].worker_pid()
            os.kill(old, signal.SIGKILL)
            wait_worker(fleet, other_than=old)
            toll.back()
        assert endpoint(fleet).pid == before, "the endpoint outlives the worker"
        toll.report()


@pytest.mark.fault("F09", ci=1, whole=20)
def test_the_endpoint_is_killed(fleet: Fleet, amount: int) -> None:
    with loaded(fleet, "endpoint killed") as (client, thread):
        toll = Toll("endpoint killed", client, thread)
        for _ in range(amount):
            old = endpoint(fleet)
            toll.hit(old.kill)
            endpoint(fleet, other_than=old.pid)
            toll.back()
        toll.report()


@pytest.mark.slow
def test_the_data_server_is_killed(fleet: Fleet) -> None:
    with loaded(fleet, "data server killed") as (client, thread):
        fleet.servers[0].kill()
        thread.wait_calls()
        fleet.servers[0].start()
        print(f"by RDMA again after {wait_served(client, thread):.1f} s")


@pytest.mark.fault("F09", ci=1, whole=20)
@pytest.mark.slow
@pytest.mark.parametrize("device", [SERVER, CLIENT])
def test_a_link_goes_down(fleet: Fleet, device: str, amount: int) -> None:
    with loaded(fleet, f"{device} unplugged") as (client, thread):
        toll = Toll(f"{device} unplugged", client, thread)
        target = world.targets(client)[0]
        for _ in range(amount):
            with contextlib.ExitStack() as stack:
                unplug = partial(stack.enter_context, devices.unplugged(device))
                toll.hit(unplug, lambda: target.path != "rdma")
                thread.wait_calls()
            toll.back()
        toll.report()


@pytest.mark.fault("F09", ci=1, whole=20)
def test_the_servers_queue_pairs_fail(fleet: Fleet, amount: int) -> None:
    with loaded(fleet, "server's QPs killed") as (client, thread):
        toll = Toll("server's queue pairs killed", client, thread)
        for _ in range(amount):
            toll.hit(lambda: endpoint(fleet).send_signal(signal.SIGUSR1))
            toll.back()
        toll.report()


def on_each_queue_pair(client: Client, act: Callable[[Any], None]) -> None:
    """Do it to each of a client's, to one at least."""

    def done() -> int:
        count = 0
        fabric: Any = path_of(client)._context.rdma.fabric
        for rail in fabric().rails:
            for qp in list(rail.queue_pairs):
                with contextlib.suppress(Exception):  # it may be closed by now
                    act(qp)
                    count += 1
        return count

    world.until(done, "the client has queue pairs")


@pytest.mark.fault("F09", ci=1, whole=20)
@pytest.mark.slow
def test_the_clients_queue_pairs_fail(fleet: Fleet, amount: int) -> None:
    with loaded(fleet, "client's QPs killed") as (client, thread):
        toll = Toll("client's queue pairs killed", client, thread)
        for _ in range(amount):
            toll.hit(lambda: on_each_queue_pair(client, fault_injection.kill_queue_pair))
            toll.back()
        toll.report()


@pytest.mark.fault("F09", ci=1, whole=20)
def test_the_servers_memory_is_revoked(fleet: Fleet, amount: int) -> None:
    """All of the data's regions go in the middle of READs and WRITEs. Only a new endpoint has new ones.

    None ends by itself before it is killed.
    """
    log = fleet.servers[0].log
    with loaded(fleet, "server's MRs revoked") as (client, thread):
        toll = Toll("server's memory revoked", client, thread)
        for _ in range(amount):
            old = endpoint(fleet)
            toll.hit(partial(old.send_signal, signal.SIGUSR2))
            thread.wait_calls(20)
            old.kill()
            endpoint(fleet, other_than=old.pid)
            toll.back()
        toll.report()
    ends = re.findall(r"endpoint of worker 0 \(process \d+\) died( [^:]*)?:", log.read_text())
    assert len(ends) >= amount and set(ends) == {" by SIGKILL"}, Counter(ends)


@pytest.mark.fault("F09", ci=1, whole=20)
@pytest.mark.slow
def test_the_clients_memory_is_revoked(fleet: Fleet, amount: int) -> None:
    """A buffer at a time, which is registered again when all have been through that."""
    with loaded(fleet, "client's MRs revoked") as (client, thread):
        toll = Toll("client's memory revoked", client, thread)
        buffers = thread.load.registered
        for number in range(amount):
            buffer = buffers[number % len(buffers)]
            if number >= len(buffers):
                buffer.span = client.register(buffer.data)
                thread.wait_calls(2)
            client.deregister(buffer.span)
            thread.wait_calls(2)
            toll.back()
        toll.report()


@pytest.mark.fault("F09", ci="1 each", whole="1 each")
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
