"""Completions with errors, receivers that are not ready, and completion queues that overrun, under a client's calls.

The connection is given up, with the status in the log; the call goes on by TCP, or is a miss where RDMA is all there
is; nothing hangs, nothing is written afterwards, and a new connection takes over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from simm.client import Client
from simm.rdma.api import WRITE, Op
from tests.support.client_checks import check_staging
from tests.support.fake_fabric import FakeQueuePair
from tests.support.fake_rdma_cluster import FakeRdmaCluster, path_of, until_rdma
from tests.support.invariants import InvariantViolation
from tests.support.rdma_script import queue_pairs_outlive_failures, value_of, version_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_retired")

KEYS = [f"k{number}" for number in range(12)]
SIZE = 3000
#: Steps of the network after which a call is hit.
STEP = 9
STATUSES = ["RNR_RETRY_EXC_ERR", "RETRY_EXC_ERR", "WR_FLUSH_ERR", "REM_OP_ERR", "GENERAL_ERR"]


def ends(cluster: FakeRdmaCluster, side: str) -> list[FakeQueuePair]:
    """Return the queue pairs of one side that work."""
    fabric = cluster.fabrics[-1] if side == "client" else cluster.node.endpoint.fabric
    return [qp for rail in fabric.fakes for qp in rail.queue_pairs if qp.open and not qp.why]


def break_all(cluster: FakeRdmaCluster, side: str, status: str) -> int:
    """Complete something with an error on all of them; return how many they are."""
    with cluster.network.lock:
        found = ends(cluster, side)
        for qp in found:
            qp.fail("completed with an error", status)
    return len(found)


def overrun_all(cluster: FakeRdmaCluster, side: str, _status: str) -> int:
    """Overrun all their completion queues; return how many they are."""
    found = ends(cluster, side)
    for qp in found:
        cluster.network.overrun(qp)
    return len(found)


class Calls:
    """Each call of a client once, with what it must have done."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.version = dict.fromkeys(KEYS, 0)
        self.sinks = [client.register(bytearray(SIZE)) for _ in KEYS]
        self.sources = [client.register(bytearray(SIZE)) for _ in KEYS]
        wait_until(lambda: (self.put_many(), all(self.version.values()))[1], "all are stored")

    def all(self) -> list[Callable[[], None]]:
        """Return all of them."""
        return [self.get, self.put, self.get_many, self.put_many, self.exists]

    def got(self, key: str, size: int | None, data: bytes) -> None:
        """Check what a get has found; a miss is allowed."""
        if size is not None and (size != SIZE or version_in(key, data) != self.version[key]):
            raise InvariantViolation(f"{key}: {size} bytes of another version than {self.version[key]}")

    def get(self) -> None:
        """Get one."""
        size = self.client.get_into(KEYS[0], self.sinks[0])
        self.got(KEYS[0], size, bytes(self.sinks[0].view()))

    def get_many(self) -> None:
        """Get all."""
        for key, sink, size in zip(KEYS, self.sinks, self.client.get_into_many(KEYS, self.sinks)):
            self.got(key, size, bytes(sink.view()))

    def exists(self) -> None:
        """Ask for all and one more."""
        assert not self.client.exists_many([*KEYS, "none"])[-1]

    def put(self) -> None:
        """Put one."""
        self._put(KEYS[:1])

    def put_many(self) -> None:
        """Put all."""
        self._put(KEYS)

    def _put(self, keys: list[str]) -> None:
        for key, source in zip(keys, self.sources):
            source.view()[:] = value_of(key, self.version[key] + 1, SIZE)
        done = self.client.put_many(keys, self.sources[: len(keys)])
        for source in self.sources[: len(keys)]:
            source.view()[:] = bytes(SIZE)  # it is the caller's again
        for key, stored in zip(keys, done):
            if stored:
                self.version[key] += 1
            else:  # it may be stored or not: look by another way
                found = self.client.get(key)
                self.version[key] = version_in(key, found) if found is not None else self.version[key]

    def untouched(self, cluster: FakeRdmaCluster) -> None:
        """Raise unless the caller's memory stays as it is whatever still arrives."""
        for sink in self.sinks:
            sink.view()[:] = b"\xee" * SIZE
        cluster.network.release()
        cluster.network.run()
        if any(bytes(sink.view()) != b"\xee" * SIZE for sink in self.sinks):
            raise InvariantViolation("memory was written after the call had returned")


def give_up(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[FakeRdmaCluster, str, str], int], side: str, status: str,
    *, path: str = "rdma,tcp", deadline_s: float = 2.0,
) -> list[str]:  # fmt: skip
    """Let ``act`` hit each call in the middle. Return what the client says of the path each time it goes down."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("simm.client")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with FakeRdmaCluster(monkeypatch, pieces=4) as cluster:
            client = cluster.client(path, deadline_s=deadline_s)
            until_rdma(client)
            calls = Calls(client)
            for call in calls.all():
                until_rdma(client)
                count = hit = 0

                def between(cluster: FakeRdmaCluster = cluster) -> None:
                    nonlocal count, hit
                    count += 1
                    if count >= STEP and not hit:
                        hit = act(cluster, side, status)

                cluster.network.between = between
                call()
                cluster.network.between = None
                while not hit:  # the call was over before: then it happens between two calls
                    until_rdma(client)
                    hit = act(cluster, side, status)
                calls.untouched(cluster)
            until_rdma(client)
            fallbacks, gets = client.counters["rdma_fallbacks"], client.counters["rdma_gets"]
            assert fallbacks or path == "rdma"

            def served() -> bool:
                calls.get_many()
                return client.counters["rdma_gets"] >= gets + len(KEYS)

            wait_until(served, lambda: f"values come by RDMA again: {client.stats()}")
            calls.put_many()
            check_staging(path_of(client).staging)
            endpoint = cluster.node.endpoint.endpoint
            wait_until(lambda: len(endpoint.leases) == path_of(client)._connections, "dead connections hold nothing")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [line for line in said if "is down" in line]


@pytest.mark.fault("F09", ci="5 statuses, 5 calls", whole="the same")
@pytest.mark.parametrize("status", STATUSES)
def test_a_completion_with_an_error(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    said = give_up(monkeypatch, break_all, "client", status)
    assert any(f"({status})" in line for line in said), said


def test_the_servers_ends_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's operations are answered by nobody then."""
    assert any("RETRY_EXC_ERR" in line for line in give_up(monkeypatch, break_all, "server", "RNR_RETRY_EXC_ERR"))


@pytest.mark.fault("F09", ci="overruns at both ends, 5 calls", whole="the same")
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_completion_queue_that_overruns(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """What is done is not reported: a client's call ends by its share of the deadline, an endpoint's by QUEUE_S."""
    give_up(monkeypatch, overrun_all, side, "", deadline_s=0.8)


def test_without_tcp_a_broken_connection_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up(monkeypatch, break_all, "client", "RNR_RETRY_EXC_ERR", path="rdma")


def overrun_with_a_read_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The READ is held back until the call has given up. Raise if it then writes the caller's memory."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=0.8)
        calls = Calls(client)
        held: list[Op] = []

        def value(qp: FakeQueuePair, op: Op) -> bool:
            if op[0] == WRITE or op[3] != SIZE:  # also not what tries a new connection, if the background has the other
                return False
            held.append(op)
            cluster.network.overrun(qp)
            return True

        cluster.network.hold(value)
        while not held:  # on a busy machine a get may go by TCP
            until_rdma(client)
            calls.get()
        calls.untouched(cluster)
        until_rdma(client)


def test_an_overrun_with_a_read_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    overrun_with_a_read_in_flight(monkeypatch)


def test_mutation_without_closing_the_queue_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvariantViolation), queue_pairs_outlive_failures(monkeypatch):
        for _ in range(20):  # on a busy machine the READ may come before the call has given up
            overrun_with_a_read_in_flight(monkeypatch)
