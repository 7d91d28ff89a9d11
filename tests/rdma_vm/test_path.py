"""Put, get, exists and the rest over RDMA, with one or two rails, one or two servers, one or several clients."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from simm.client import Client
from simm.constants import VALUE_BYTES_MAX
from tests.rdma_vm import devices, world
from tests.rdma_vm.devices import CLIENT, CLIENT_2, CLIENT_NODES, SERVER, SERVER_2, SERVER_NODES
from tests.rdma_vm.world import all_by_rdma, connected, data, path_of
from tests.support.child import child_environment
from tests.support.fleet import Fleet

KIB, MIB = 1 << 10, 1 << 20
#: On both sides of all that the path makes a difference of: words, inline sizes, packets, operations, stripes.
SIZES = (
    1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1023, 4095, 4096, 4097, 16 * KIB, 64 * KIB - 1, 64 * KIB, 300_001,
    MIB - 1, MIB, MIB + 1, 4 * MIB + 3,
)  # fmt: skip


@pytest.fixture(scope="module")
def fleet(nothing_is_left: Path) -> Iterator[Fleet]:
    """Two data servers in one process tree, on one rail. With less memory grants may fence one another's slabs in, and
    what finds none goes by TCP."""
    with world.start(nothing_is_left, 2, memory="256M") as fleet:
        yield fleet


def test_values_of_all_sizes(fleet: Fleet) -> None:
    with connected(fleet) as client:
        before = devices.carried(CLIENT)
        for size in SIZES:
            value = data(size)
            with all_by_rdma(client):
                assert client.put(f"size {size}", value)
                assert client.get(f"size {size}") == value
                assert client.exists(f"size {size}")
            # Into memory of the caller's, at an odd address, with bytes behind it that are not to be touched.
            for register in (False, True):
                buffer = np.full(size + 64, 0xA5, np.uint8)
                sink = client.register(buffer[3 : 3 + size]) if register else buffer[3 : 3 + size]
                assert client.get_into(f"size {size}", sink) == size
                assert buffer[3 : 3 + size].tobytes() == value
                assert (buffer[:3] == 0xA5).all() and (buffer[3 + size :] == 0xA5).all()
        assert client.counters["rdma_puts"] == len(SIZES) and client.counters["rdma_gets"] == 3 * len(SIZES)
        assert client.counters["rdma_fallbacks"] == 0 and client.counters["outages"] == 0
        assert devices.carried(CLIENT) - before > sum(SIZES) // 4096


@pytest.mark.slow
def test_the_largest_value(nothing_is_left: Path) -> None:
    value = np.frombuffer(data(VALUE_BYTES_MAX), np.uint8)
    with world.start(nothing_is_left, memory="160M") as fleet, connected(fleet) as client:
        with all_by_rdma(client):
            assert client.put("largest", client.register(value))
            buffer = np.empty(VALUE_BYTES_MAX, np.uint8)
            assert client.get_into("largest", client.register(buffer)) == VALUE_BYTES_MAX
            assert np.array_equal(buffer, value)
            buffer[:] = 0
            assert client.get_into("largest", buffer) == VALUE_BYTES_MAX, "through staging blocks"
            assert np.array_equal(buffer, value)


def test_misses_overwrites_and_deletes(fleet: Fleet) -> None:
    with connected(fleet) as client, all_by_rdma(client):
        assert client.get("never") is None and not client.exists("never")
        for size in (100, 5000, 200_000, 30):
            assert client.put("changes", data(size)) and client.get("changes") == data(size)
        assert client.delete("changes")
        assert client.get("changes") is None and not client.exists("changes")
        assert client.put("changes", b"again") and client.get("changes") == b"again"


def test_batches(fleet: Fleet) -> None:
    rng = random.Random(3)
    keys = [f"batch {number}" for number in range(300)]
    values = [data(rng.choice((10, 500, 4096, 5000, 40_000, 150_000)), key) for key in keys]
    with connected(fleet) as client, all_by_rdma(client):
        assert client.put_many(keys, values) == [True] * len(keys)
        assert client.get_many(keys) == values
        assert client.exists_many([*keys, "none"]) == [True] * len(keys) + [False]
        buffers = [bytearray(len(value)) for value in values]
        assert client.get_into_many(keys, buffers) == [len(value) for value in values]
        assert buffers == values
        # Parts of one registered buffer, and keys that are not there among them.
        pool = np.zeros(sum(map(len, values)), np.uint8)
        whole, at, sinks = client.register(pool), 0, []
        for value in values:
            sinks.append(whole.part(at, len(value)))
            at += len(value)
        wanted = [key if number % 7 else f"absent {number}" for number, key in enumerate(keys)]
        got = client.get_into_many(wanted, sinks)
        at = 0
        for number, (value, length) in enumerate(zip(values, got)):
            assert length == (len(value) if number % 7 else None)
            assert length is None or pool[at : at + len(value)].tobytes() == value
            at += len(value)


def test_views(fleet: Fleet) -> None:
    with connected(fleet) as client:
        for size in (1, 5000, 300_000, 2 * MIB):
            assert client.put("view", data(size))
            with client.view("view") as view:
                assert bytes(view.data) == data(size)
        assert not client.view("no view")


def test_a_value_that_does_not_fit_its_buffer(fleet: Fleet) -> None:
    from simm.errors import UsageError

    with connected(fleet) as client, all_by_rdma(client):
        assert client.put("fits not", data(1000))
        for register in (False, True):
            buffer = bytearray(b"\xa5" * 999)
            with pytest.raises(UsageError, match="does not fit"):
                client.get_into("fits not", client.register(buffer) if register else buffer)
            assert buffer == b"\xa5" * 999


def test_checksums(fleet: Fleet) -> None:
    with connected(fleet, checksum=True) as client, all_by_rdma(client):
        for size in (10, 5000, 3 * MIB):
            assert client.put("sum", data(size)) and client.get("sum") == data(size)
        assert client.counters["crc_errors"] == 0


def test_clients_by_different_paths_see_the_same(fleet: Fleet) -> None:
    with connected(fleet) as client, Client(fleet.manager.address, path="shm") as local, \
            Client(fleet.manager.address, path="tcp") as remote:  # fmt: skip
        assert local.wait_ready(60) and remote.wait_ready(60)
        for number, writer in enumerate((client, local, remote)):
            value = data(100_000, number)
            assert writer.put("shared", value)
            assert [reader.get("shared") for reader in (client, local, remote)] == [value] * 3


def test_locations_are_remembered(fleet: Fleet) -> None:
    """A key that was seen before takes one chain, and one that has changed since is found anew."""
    with connected(fleet) as client:
        for number in range(8):
            assert client.put(f"place {number}", data(2000, number))
        sent = []
        for _ in range(6):  # packets that are sent twice, and signs of life, are counted too
            before = devices.carried(CLIENT)
            with all_by_rdma(client):
                for number in range(8):
                    assert client.get(f"place {number}") == data(2000, number)
            sent.append(devices.carried(CLIENT) - before)
        assert 0 < min(sent[1:]) < sent[0], f"{sent}: a remembered place needs no sets"
        with connected(fleet) as other:
            for number in range(8):
                assert other.put(f"place {number}", data(2000, number + 100))
        with all_by_rdma(client):
            for number in range(8):
                assert client.get(f"place {number}") == data(2000, number + 100)


def test_values_are_striped_over_two_rails(nothing_is_left: Path) -> None:
    with world.start(nothing_is_left, devices=f"{SERVER},{SERVER_2}", memory="128M") as fleet:
        with connected(fleet, f"{CLIENT},{CLIENT_2}") as client:
            for size in (MIB - 1, MIB, 3 * MIB + 5, 8 * MIB):
                value = data(size)
                before = devices.carried(CLIENT), devices.carried(CLIENT_2)
                with all_by_rdma(client):
                    assert client.put(f"stripes {size}", value)
                    assert client.get(f"stripes {size}") == value
                    buffer = np.empty(size, np.uint8)
                    assert client.get_into(f"stripes {size}", client.register(buffer)) == size
                assert buffer.tobytes() == value
                used = devices.carried(CLIENT) - before[0], devices.carried(CLIENT_2) - before[1]
                if size > 2 * MIB:
                    assert min(used) > size // 4096 // 2, f"packets by rail: {used}"


@pytest.mark.slow
def test_a_client_with_one_rail_of_two(nothing_is_left: Path) -> None:
    """Its rail reaches only the second of the server's: the pair that does not work is not used."""
    with world.start(nothing_is_left, devices=f"{SERVER},{SERVER_2}") as fleet, connected(fleet, CLIENT_2) as client:
        before = devices.carried(CLIENT_2)
        with all_by_rdma(client):
            assert client.put("one rail", data(3 * MIB)) and client.get("one rail") == data(3 * MIB)
        assert devices.carried(CLIENT_2) > before


def test_several_clients_and_threads(fleet: Fleet) -> None:
    """They share this process's devices, and a path's connections go from thread to thread."""
    wrong: list[str] = []

    def work(client: Client, name: str) -> None:
        rng = random.Random(name)
        for number in range(12):
            key, value = f"{name} {number % 5}", data(rng.choice((100, 9000, 200_000)), (name, number))
            began = time.monotonic()
            put = client.put(key, value)
            got = client.get(key)
            if not put or got != value:
                seconds = time.monotonic() - began
                what = "misses" if got is None else "is right" if got == value else "is WRONG"
                wrong.append(f"{key}: put {put}, get {what}, {seconds:.1f} s, {client.counters}")

    with connected(fleet) as one, connected(fleet, namespace="another") as two:
        assert path_of(one)._context.rdma.fabric() is path_of(two)._context.rdma.fabric(), "one fabric a process"
        threads = [
            threading.Thread(target=work, args=(client, f"thread {number}"))
            for number in range(3)
            for client in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, "\n".join(wrong)
        assert one.counters["rdma_puts"] + two.counters["rdma_puts"] >= 70, fleet.logs()
        # Six threads on two emulated processors: a connection that is not to be had in time is no fault.
        assert one.counters["rdma_fallbacks"] + two.counters["rdma_fallbacks"] <= 2, [one.stats(), two.stats()]


def test_a_second_client_outlives_the_first(fleet: Fleet) -> None:
    with connected(fleet) as one:
        with connected(fleet) as two:
            assert two.put("outlives", b"1") and one.get("outlives") == b"1"
        with all_by_rdma(one):
            assert one.put("outlives", data(MIB)) and one.get("outlives") == data(MIB)


FORKS = """
import os, sys
import numpy as np
from simm.client import Client
from tests.rdma_vm.world import PATHS, WAIT_S, data, wait_rdma

manager, devices = sys.argv[1:]
client = Client(manager, path=PATHS, rdma_devices=devices, deadline_s=20.0)
assert client.wait_ready(WAIT_S)
wait_rdma(client)
pool = np.zeros(1 << 20, np.uint8)
span = client.register(pool)
assert client.put("before", data(500_000)) and client.get_into("before", span) == 500_000
child = os.fork()
if child == 0:
    code = 1
    try:
        # What was registered is still memory here, and the client connects anew.
        assert pool[:500_000].tobytes() == data(500_000)
        pool[:] = 7
        assert client.put("child", data(300_000)) and client.get("child") == data(300_000)
        assert client.get_into("before", pool) == 500_000 and pool[:500_000].tobytes() == data(500_000)
        client.close()
        code = 0
    finally:
        os._exit(code)
# Meanwhile, and with the child's pages shared until one of us writes: the device must find ours.
for number in range(10):
    value = data(700_000, number)
    pool[:700_000] = np.frombuffer(value, np.uint8)
    assert client.put("parent", span.part(0, 700_000))
    pool[:] = 0
    assert client.get_into("parent", span) == 700_000 and pool[:700_000].tobytes() == value
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed"
assert client.get("child") == data(300_000)
assert client.counters["rdma_fallbacks"] == 0, client.stats()
grandchild = os.fork()
if grandchild == 0:
    sys.exit(0)  # with all destructors: none may reach the parent's devices
assert os.waitpid(grandchild, 0)[1] == 0
assert client.get("child") == data(300_000) and client.counters["rdma_fallbacks"] == 0, client.stats()
client.close()
"""


def test_fork_after_registration(fleet: Fleet) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FORKS, fleet.manager.address, CLIENT], env=child_environment(), timeout=300,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr


def test_processes_are_pinned_and_memory_is_bound_to_nodes(nothing_is_left: Path) -> None:
    """Data servers (two; one in the quick part) with two NUMA nodes: all of a node stays on it, and uses its rail."""
    arguments, count = ("--numa", "0,1"), 2 if "SIMM_TEST_SLOW" in os.environ else 1
    with world.start(nothing_is_left, count, devices=",".join(SERVER_NODES), memory="24M", more=arguments) as fleet:
        cpus = {
            node: Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip() for node in (0, 1)
        }  # fmt: skip
        for server in fleet.servers:
            processes = world.family(server)
            for node in (0, 1):
                worker, endpoint = processes[f"worker {node}"], processes[f"endpoint {node}"]
                segment, _ = world.segments(f"{server.name}-{node}")  # metadata, and the data with a longer name
                # Each process's own page tables are what it shows: that of the one which has faulted it in says most.
                seen = {name: world.segment_pages(each.pid, segment) for name, each in processes.items()}
                assert set().union(*seen.values()) == {node}, seen
                assert max(pages.get(node, 0) for pages in seen.values()) >= 20 * MIB // 4096, seen
                for process in (worker, endpoint):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    allowed = next(line.split()[1] for line in status.splitlines() if "Cpus_allowed_list" in line)
                    assert allowed == cpus[node], f"{process.pid} of node {node} may run on {allowed}"
        with connected(fleet, ",".join(CLIENT_NODES)) as client:
            assert len(world.targets(client)) == 2 * count
            keys = [f"node {number}" for number in range(60)]
            with all_by_rdma(client):
                assert client.put_many(keys, [data(20_000, key) for key in keys]) == [True] * 60
                assert client.get_many(keys) == [data(20_000, key) for key in keys]
            for server in fleet.servers:
                processes = world.family(server)
                for node in (0, 1):
                    assert devices.devices_of(processes[f"endpoint {node}"].pid) == {SERVER_NODES[node]}


def test_this_process_has_no_devices_open() -> None:
    """After all of the above."""
    assert not [line for kind in ("qp", "mr", "pd") for line in devices.owners(kind) if f" {os.getpid()}" in line]
