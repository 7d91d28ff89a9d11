"""An endpoint on real verbs: who may write where, and until when.

The checks of ``tests/support/endpoint_checks.py``, which the unit tests run on a network in software, run here on a
kernel's driver: a window's key is good for its own queue pair only, and for nothing after its invalidation. One thing
differs: Linux's soft-RoCE (``rxe``, as of 6.1) compares a WRITE by a window's key with the bounds of the region below
it, not of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from simm.rdma.api import Absence, Fabric, FabricError
from simm.verbs import open_fabric
from simm.wire.messages import Status
from tests.rdma_vm.devices import CLIENT, CLIENT_2, SERVER, SERVER_2
from tests.support import endpoint_checks
from tests.support.endpoint_checks import WHERE, digest_of, granted, stored
from tests.support.endpoint_thread import EndpointThread, connection
from tests.support.worker_thread import WorkerThread

DEVICES = {"s0": SERVER, "s1": SERVER_2, "c0": CLIENT, "c1": CLIENT_2}


class Machine:
    """The machine's devices by the names that the tests give to a network's rails."""

    #: A server's end that has refused something says so only when it is used.
    tells = False

    def fabric(self, names: Sequence[str]) -> Fabric:
        opened = open_fabric(",".join(DEVICES[name] for name in names))
        assert not isinstance(opened, Absence), opened
        return opened


@pytest.fixture
def network() -> Machine:
    return Machine()


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


@pytest.fixture
def server(worker: WorkerThread, network: Any) -> Iterator[EndpointThread]:
    with EndpointThread(worker.path, network) as running:
        yield running.ready()


def test_grants_come_with_the_answer_after_the_one_that_wanted_them(server: EndpointThread) -> None:
    endpoint_checks.prefetched_grants(server)


def test_two_connections(server: EndpointThread, worker: WorkerThread) -> None:
    endpoint_checks.two_connections(server, worker)


def test_a_commit_of_what_is_not_its_own(server: EndpointThread, worker: WorkerThread) -> None:
    endpoint_checks.commit_of_what_is_not_its_own(server, worker)


def test_returned_grants(server: EndpointThread, worker: WorkerThread) -> None:
    endpoint_checks.returned_grants(server, worker)


def test_marks_of_use_are_written_by_the_regions_own_key(server: EndpointThread, worker: WorkerThread) -> None:
    endpoint_checks.marks_of_use(server, worker)


def test_a_worker_is_replaced_while_connections_hold_grants(worker: WorkerThread, network: Any) -> None:
    endpoint_checks.worker_dies(worker, network)


@pytest.mark.parametrize("where", [where for where in WHERE if where != "a byte more"])
def test_where_bytes_are_written(where: str, server: EndpointThread, worker: WorkerThread) -> None:
    endpoint_checks.written_only_where_granted(where, server, worker)


def test_two_rails_and_pieces(worker: WorkerThread, network: Any) -> None:
    with EndpointThread(worker.path, network, ("s0", "s1"), piece_bytes=1 << 20) as server:
        with connection(server.ready(), ((0, 0), (1, 1))) as mine:
            assert len(mine.opened.rails) == 2
            for turn in range(2):
                (grant,) = mine.grant(300_000)
                value = bytes([turn + 1]) * 300_000
                mine.write(grant, value, turn)
                assert mine.commit((digest_of("v"), grant, 300_000))[0] == [Status.OK]
                assert stored(worker, "v") == value == mine.read(grant.offset, 300_000, 1 - turn)
            geometry = worker.store.geometry
            start = geometry.data_offset + (1 << 20) - 5000
            worker.segment.mm[start : start + 10_000] = bytes(range(250)) * 40
            assert mine.read(start, 10_000, 1) == bytes(range(250)) * 40, "across the end of a piece"


def test_nothing_arrives_when_the_endpoint_has_closed_a_connection(
    server: EndpointThread, worker: WorkerThread
) -> None:
    with connection(server) as mine:
        (grant,) = mine.grant(4096)
        mine.write(grant, b"a" * 4096)
        mine.hang_up()
        server.until(lambda stats: not stats["connections"], "closed")
        assert granted(worker) == 0
        before = bytes(worker.segment.mm)
        with pytest.raises(FabricError):
            mine.write(grant, b"b" * 4096)
        geometry = worker.store.geometry
        assert bytes(worker.segment.mm)[geometry.data_offset :] == before[geometry.data_offset :]


def test_without_windows(worker: WorkerThread, network: Any) -> None:
    with EndpointThread(worker.path, network, windows=False) as server, connection(server.ready()) as mine:
        assert mine.opened.flags == 0
        (grant,) = mine.grant(5000)
        mine.write(grant, b"w" * 5000)
        assert mine.commit((digest_of("w"), grant, 5000))[0] == [Status.OK] and stored(worker, "w") == b"w" * 5000
