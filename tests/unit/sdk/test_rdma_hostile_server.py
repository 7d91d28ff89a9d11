"""Attacks on the RDMA path: schedules, deaths and unexpected answers, one test for each defect that was found."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from simm.arena.layout import SLOT, Geometry
from simm.arena.reader import ArenaReader
from simm.constants import SET_BYTES, VALUE_BYTES_MAX
from simm.errors import RemoteProtocolError
from simm.net.channel import Refused
from simm.rdma.api import Absence, FabricError
from simm.rdma.remote_arena import RegionMap, RemoteArena
from simm.sdk import rdma_get
from simm.sdk.batch import Batch
from simm.sdk.rdma_connection import RdmaConnection
from simm.sdk.tcp import TcpPath
from simm.server.rdma_lease import LeasedGrant, RdmaLease
from simm.wire import rdma_messages as R
from tests.support import fake_queue_pair
from tests.support.consistency import check
from tests.support.endpoint_thread import EndpointThread, connection
from tests.support.fake_fabric import FakeNetwork, FakeQueuePair
from tests.support.fake_rdma_cluster import FakeRdmaCluster, brief_rdma, leave_alone, path_of, until_rdma
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

#: A bound for things that hang, seconds.
WAIT_S = 30.0
KIB = 1 << 10
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("nothing_retired")


# -- forks ---------------------------------------------------------------------------------------------------


def _map_at(address: int, size: int) -> int:
    """Map fresh memory at exactly this free address; return the address of the mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreplace
    return int(libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) or 0)


def test_a_child_that_drops_the_parents_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child does not inherit registered memory and may map other memory there: no code may unmap it."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert client.put("k", bytes(5000))  # a connection with its scratch, and staging blocks
        path = path_of(client)
        scratch = path.acquire(time.monotonic() + 5)
        path.release(scratch)
        ours = [(memory.address, memory.size) for memory in (*path.staging._memory, scratch._scratch)]
        del path, scratch
        child = os.fork()
        if not child:
            code = 1
            try:
                for address, size in ours:
                    if _map_at(address, size) != address:
                        os._exit(2)
                    ctypes.memset(address, 0x5A, size)
                cluster.clients.clear()
                del client
                gc.collect()
                if all(ctypes.string_at(address + size - 8, 8) == b"\x5a" * 8 for address, size in ours):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- ends ----------------------------------------------------------------------------------------------------


def test_a_path_that_is_closed_while_the_background_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection in use by the background thread is closed once, by that thread."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert client.put("k", b"value")
        path = path_of(client)
        maintain, path.maintain = path.maintain, lambda now: None  # type: ignore[method-assign]
        time.sleep(0.25)

        def idle() -> bool:
            if path._watched is not None:
                maintain(time.monotonic())
            return bool(path._idle) and path._watched is None

        wait_until(idle, "a connection is idle")
        cluster.network.hold()
        posted: list[int] = []
        asked = threading.Event()
        connection = path._idle[0]
        ask = connection.request_heartbeat

        def request_heartbeat() -> None:
            ask()
            posted.append(1)
            asked.set()

        connection.request_heartbeat = request_heartbeat  # type: ignore[method-assign]
        looking = threading.Thread(target=maintain, args=(time.monotonic(),))
        looking.start()
        assert asked.wait(5)
        path.close()
        looking.join(5)
        assert not looking.is_alive()
        cluster.network.release()
        wait_until(lambda: not path._connections, "no connection is left")
        assert not connection.links


# -- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["get", "put", "exists"])
def test_a_full_queue_and_nobody_who_answers(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Waiting for room in the send queue ends at the deadline."""
    with FakeRdmaCluster(monkeypatch, depth=32, size=64 * MIB) as cluster:
        keys = [f"k{number}" for number in range(120)]
        values = [bytes(3000)] * len(keys)
        assert all(cluster.client("shm").put_many(keys, values))
        client = cluster.rdma(deadline_s=60.0)
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        assert client.put("warm", bytes(3000))
        sinks = [client.register(bytearray(3000)) for _ in keys]
        cluster.network.hold()
        monkeypatch.setattr(fake_queue_pair, "POST_S", 2 * WAIT_S)
        began = time.monotonic()
        with brief_rdma():
            if what == "get":
                assert client.get_into_many(keys, sinks) == [3000] * len(keys)
            elif what == "put":
                client.put_many(keys, values)
            else:
                assert all(client.exists_many(keys))
        took = time.monotonic() - began
        cluster.network.release()
        assert took < WAIT_S, took  # and not as long as posting may wait
        until_rdma(client)


def test_one_large_value_and_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, depth=16, size=128 * MIB) as cluster:
        client = cluster.rdma(deadline_s=0.8)
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        value = bytes(40 * MIB)
        source = client.register(value)
        path_of(client).deadline_s = 60.0
        assert client.put("k", bytes(10 * MIB))
        path_of(client).deadline_s = 0.8
        cluster.network.hold()
        monkeypatch.setattr(fake_queue_pair, "POST_S", 2 * WAIT_S)
        began = time.monotonic()
        client.put("k2", source)
        took = time.monotonic() - began
        cluster.network.release()
        assert took < WAIT_S, took  # and not as long as posting may wait


# -- what was sent and given up -------------------------------------------------------------------------------


def test_a_commit_that_comes_to_the_worker_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has given up and put a newer value by TCP, so the worker must not execute the late commit."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        assert client.put("k", b"first")
        fence = RdmaLease.fence
        fencing, go_on = threading.Event(), threading.Event()

        def slow(self: RdmaLease, leased_grants: Sequence[LeasedGrant]) -> None:
            fence(self, leased_grants)
            fencing.set()
            assert go_on.wait(4 * WAIT_S)

        monkeypatch.setattr(RdmaLease, "fence", slow)  # a device that takes its time
        with brief_rdma(0.025):  # time enough for all that comes before the fence
            assert not client.put("k", b"second")
            assert fencing.is_set()
            monkeypatch.setattr(RdmaLease, "fence", fence)
            assert client.put("k", b"third")
        go_on.set()
        wait_until(lambda: not cluster.node.endpoint.endpoint.leases, "the connection that was given up is gone")
        assert cluster.client("shm").get("k") == b"third"
        cluster.node.endpoint.call(lambda: check(cluster.node.endpoint.endpoint))
        until_rdma(client)


# -- ends of clients ------------------------------------------------------------------------------------------


def test_a_client_that_is_closed_while_an_old_path_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rails are closed after the last connection of any path, not only of the newest one."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=4.0)
        value = bytes(range(250)) * 400
        assert client.put("k", value)
        path = path_of(client)
        target = next(iter(client._router.targets.values()))  # type: ignore[union-attr]
        sink = client.register(bytearray(len(value)))
        cluster.network.hold(lambda qp, op: op[3] >= len(value))
        got: list[int | None] = []
        reading = threading.Thread(target=lambda: got.append(client.get_into("k", sink)))
        reading.start()
        wait_until(lambda: any(qp.begun for qp in cluster.fabrics[0].fakes[0].queue_pairs), "a READ is under way")
        assert target.tcp is not None
        target.tcp_lost(target.tcp, "for a test")
        until_rdma(client)
        assert path_of(client) is not path
        client.close()  # FakeRdmaCluster's end says whether a queue pair was closed while a thread was in it
        reading.join(10)
        assert not reading.is_alive()
        cluster.network.release()


def test_a_fabric_is_not_opened_for_a_client_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        shared = client._router.context.rdma.shared  # type: ignore[union-attr]
        assert shared is not None
        count = len(cluster.fabrics)
        client.close()
        assert isinstance(shared.get(), Absence)
        assert len(cluster.fabrics) == count


# -- answers of a server that lies ------------------------------------------------------------------------------


def test_regions_beyond_all_memory() -> None:
    geometry = Geometry.plan(16 * MIB, 512)

    def regions(address: int) -> list[R.RdmaRegion]:
        return [R.RdmaRegion(0, R.REGION_WRITABLE, 0, geometry.size, address, 1)]

    region_map = RegionMap(geometry, 0, regions((1 << 64) - geometry.size))
    for bad in ((1 << 64) - geometry.size + 1, (1 << 64) - 1):
        with pytest.raises(RemoteProtocolError):
            RegionMap(geometry, 0, regions(bad))
    assert region_map.keyed(geometry.data_offset, 10, 7)
    for start, length in (
        (geometry.size, 1), (geometry.size - 1, 2), (geometry.data_offset - 1, 2), ((1 << 64) - 1, 4096), (0, 8),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            region_map.keyed(start, length, 7)
        with pytest.raises(RemoteProtocolError):
            region_map.split(start, length, writable=True)


def test_a_length_that_no_value_has() -> None:
    """A false length from the server must not make the client allocate gigabytes."""
    geometry = Geometry.plan(256 * MIB, 512)
    arena = RemoteArena(geometry, 1, [R.RdmaRegion(0, 0, 0, geometry.size, 1 << 30, 1)], 1)
    digest = bytes(range(16))
    for length, fits in ((VALUE_BYTES_MAX, True), (VALUE_BYTES_MAX + 1, False), (geometry.data_bytes, False)):
        image = struct.pack("<Q16sQIIIHHQQ", 2, digest, geometry.data_offset, length, 0, 1 << 31, 1, 0, 0, 0)
        assert len(image) == SLOT.size
        assert (arena.entry(image.ljust(2 * SET_BYTES, b"\0"), 0, digest, 0) is not None) is fits


class Without:
    """A module in which some names are replaced."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def test_no_descriptors_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is out of descriptors or memory sees misses, not errors."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=1.0)
        assert client.put("k", b"value")
        path = path_of(client)
        leave_alone(path)
        taken = [path.acquire(time.monotonic() + WAIT_S) for _ in range(path._connections)]
        with monkeypatch.context() as patch:

            def none(*_arguments: object, **_more: object) -> None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            patch.setattr("simm.net.channel.socket", Without(socket, socket=none))
            assert client.get("k") in (b"value", None)
            assert client.put("k", b"value") in (True, False)
            target = next(iter(client._router.targets.values()))  # type: ignore[union-attr]
            if target.tcp is not None:
                target.tcp._drop_idle()
            assert client.get("k") is None
            assert not client.put("k", b"value")
        for connection in taken:
            path.release(connection)
        until_rdma(client)
        path = path_of(client)
        connection = path.acquire(time.monotonic() + 5)
        with monkeypatch.context() as patch:
            patch.setattr("simm.rdma.staging.mmap", Without(mmap, mmap=none))
            client.get("k")
            client.put("k", b"value")
        path.release(connection)


def test_a_client_that_is_dropped_without_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next clean-up in the process closes the client's queue pairs."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        other = cluster.rdma()
        rail = cluster.fabrics[0].fakes[0]
        wait_until(lambda: len(rail.queue_pairs) == 1, "the other's connection")
        client = cluster.rdma()
        assert client.put("k", b"value" * 1000)
        assert len(rail.queue_pairs) >= 2
        cluster.clients.remove(client)
        del client

        def swept() -> bool:
            gc.collect()
            return len(rail.queue_pairs) == 1

        wait_until(swept, "its queue pairs are closed")
        wait_until(lambda: len(cluster.node.endpoint.endpoint.leases) == 1, "at both ends")
        assert other.get("k") == b"value" * 1000
        shared = other._router.context.rdma.shared  # type: ignore[union-attr]
        shared.users -= 1  # type: ignore[union-attr]  # the dropped one's, for the end of this test


# -- old places ---------------------------------------------------------------------------------------------------


def test_places_of_an_arena_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that still reads the old arena must not add its slot offsets to the cache of the new arena."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert client.put("k", b"value")
        path = path_of(client)
        connection = path.acquire(time.monotonic() + 5)
        old = path.arena
        cluster.node.endpoint.stop()
        cluster.node.endpoint.start()
        path.drop("for a test")
        wait_until(lambda: path.down_reason is None and path.arena is not old, "another registration of the arena")
        digest = client.digest("k")
        reading = rdma_get.Reading(Batch([digest], [None]), client._copier, None)
        reading.path = path
        reading.begin(connection, time.monotonic() + 1)
        sets = connection.arena.sets(digest)
        reader = ArenaReader(cluster.node.worker.segment.name)
        fetched = b"".join(bytes(reader._meta[at : at + SET_BYTES]) for at in sets[:2])
        entry = connection.arena.entry(fetched, 0, digest, connection.arena.find(fetched, 0, digest))
        assert entry is not None
        reading.locations.put(digest, entry)
        assert path.locations.get(digest) is None
        path.lost(connection, "for a test")


# -- grants ---------------------------------------------------------------------------------------------------


def test_grants_are_not_lost_when_the_worker_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants that are in the endpoint's pool by then stay there."""
    with WorkerThread(16 * MIB) as worker, EndpointThread(worker.path, FakeNetwork(1)) as server:
        server.ready()
        with connection(server) as mine:
            mine.grant(4096, 1)
            session = server.endpoint.keeper.session
            assert session is not None
            server.do(lambda: session.ask([(4096, 3)]))
            pool = session.pool.stock(4096)
            assert len(pool) == 3
            ask = session.ask

            def refused(_wants: object) -> None:
                raise Refused(9, "not now")

            session.ask = refused  # type: ignore[method-assign, assignment]
            assert len(mine.grant(4096, 10)) == 0
            assert len(pool) == 3
            session.ask = ask  # type: ignore[method-assign]
            assert len(mine.grant(4096, 5)) == 5


def test_a_worker_that_is_down_costs_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker restarts, reads continue by RDMA and puts do not."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=20.0)
        assert client.put("k", b"value")
        path = path_of(client)
        path.maintain = lambda now: None  # type: ignore[method-assign]  # it takes the connection for a moment
        wait_until(lambda: path._idle or path._watched, "nobody has the connection")
        if path._watched is not None:
            watched, path._watched = path._watched, None
            path.release(watched)
        opened = cluster.node.endpoint.endpoint.counts["connections_opened"]
        cluster.node.worker.die()
        wait_until(lambda: cluster.node.endpoint.endpoint.keeper.session is None, "the endpoint knows")
        for number in range(3):
            assert not client.put(f"other{number}", bytes(70_000))
            assert path.down_reason is None, path.down_reason
        assert client.get("k") == b"value"
        assert client.counters["rdma_gets"] == 1
        assert cluster.node.endpoint.endpoint.counts["connections_opened"] == opened
        cluster.node.worker.start()
        cluster.instruct()


# -- rails that reach only their like -----------------------------------------------------------------------------


@pytest.mark.full
def test_pairs_that_do_not_work_are_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each further connection on separate rails, made during a call, would try the failing pairs again."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d")) as cluster:
        client = cluster.rdma(deadline_s=4.0)
        path = path_of(client)
        mine, theirs = cluster.fabrics[0].fakes, cluster.node.endpoint.fabric.fakes
        cluster.network.sever(mine[0], theirs[1])
        cluster.network.sever(mine[1], theirs[0])
        asked: list[tuple[str, int]] = []
        pair = RdmaConnection._pair

        def counted(self: RdmaConnection, rail: Any, number: int, *more: Any) -> Any:
            asked.append((rail.name, number))
            return pair(self, rail, number, *more)

        monkeypatch.setattr(RdmaConnection, "_pair", counted)
        maintain = path.maintain
        path.maintain = lambda now: None  # type: ignore[method-assign]

        def idle() -> bool:
            if path._watched is not None:
                maintain(time.monotonic())
            return bool(path._idle) and path._watched is None

        wait_until(idle, "a connection is idle")
        first = path.acquire(time.monotonic() + 5)
        for _ in range(6):
            more = path.acquire(time.monotonic() + 5)
            assert sorted(link.rail.name for link in more.links) == ["c", "d"]
            with path._lock:
                path._connections -= 1
            more.close()
        path.release(first)
        assert len([each for each in asked if each in (("c", 1), ("d", 0))]) == 2, asked
        assert client.put("k", b"value")


# -- interrupts while queue pairs are being closed
# ------------------------------------------------------------------------


def test_an_alarm_while_links_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may raise at any time; the call returns only when the device no longer uses the memory."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        value = bytes(range(256)) * 400
        assert client.put("k", value)
        sink = client.register(bytearray(len(value)))
        cluster.network.hold(lambda qp, op: op[3] >= len(value))
        close = FakeQueuePair.close
        alarms = [TimeoutError("an alarm"), KeyboardInterrupt(), None, ValueError("another")]

        def interrupted(self: FakeQueuePair) -> None:
            alarm = alarms.pop() if alarms else None
            if alarm is not None:
                raise alarm
            close(self)

        turns = 0

        def between() -> None:
            nonlocal turns
            turns += 1
            if turns == 300:
                monkeypatch.setattr(FakeQueuePair, "close", interrupted)
                raise KeyboardInterrupt

        cluster.network.between = between
        with pytest.raises((KeyboardInterrupt, TimeoutError, ValueError)):
            client.get_into("k", sink)
        cluster.network.between = None
        assert not alarms
        sink.view()[:] = b"\xee" * len(value)
        cluster.network.release()
        cluster.network.run()
        assert bytes(sink.view()) == b"\xee" * len(value)
        monkeypatch.setattr(FakeQueuePair, "close", close)
        until_rdma(client)
        assert client.get_into("k", sink) == len(value)


def test_a_link_that_cannot_be_destroyed_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call used the link, so none raises, and the path recovers."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=3.0)
        assert client.put("k", b"value")
        path = path_of(client)
        wait_until(lambda: bool(path._idle), "a connection is idle")
        close = FakeQueuePair.close
        refused: list[FakeQueuePair] = []

        def stuck(self: FakeQueuePair) -> None:
            if self.rail is cluster.fabrics[0].fakes[0] and not refused:
                refused.append(self)
                raise FabricError("the device does not want to")
            close(self)

        monkeypatch.setattr(FakeQueuePair, "close", stuck)
        path.drop("for a test")
        wait_until(lambda: bool(refused), "one queue pair was not closed")
        until_rdma(client)
        assert client.get("k") == b"value"
        wait_until(lambda: len(cluster.node.endpoint.endpoint.leases) == path._connections, "its other end was")


# -- forks in the middle of a call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["rdma,tcp", "tcp"])
def test_a_child_does_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A call in flight at a fork gives up. The server must see its connection close, or it would execute it late."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        # A put that waits for a processor for half of this has no time left for RDMA, and asks nothing.
        client = cluster.rdma(deadline_s=6.0) if "rdma" in path else cluster.client("tcp", deadline_s=1.0)
        assert client.put("k", b"value")
        service = cluster.node.endpoint if "rdma" in path else cluster.node.stream
        if "rdma" in path:
            path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        before = set(service.loop.peers)
        assert before
        go_on = threading.Event()
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            go_on.wait(WAIT_S)

        service.loop.call_later(0.0, stop)
        service._near.send(b"") if "rdma" in path else client.exists("k")
        assert stopped.wait(WAIT_S)
        putting = threading.Thread(target=client.put, args=("k", b"other"))
        putting.start()
        wait_until(lambda: select.select([peer.sock for peer in before], [], [], 0)[0], "the put asks")
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            os.close(read)
            putting.join(WAIT_S)
            go_on.set()
            wait_until(lambda: all(peer.closed for peer in before), "the server sees that the client has hung up")
        finally:
            os.close(write)
            os.waitpid(child, 0)


# -- one deadline ----------------------------------------------------------------------------------------------------


def test_one_deadline_for_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time spent on RDMA counts against the deadline."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma(deadline_s=3.0)
        assert client.put("k", b"value")
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        go_on = threading.Event()

        def stop() -> None:
            go_on.wait(20)

        ends: list[tuple[float, float]] = []  # when TCP begins, and the end of its time
        by_tcp = TcpPath.exists

        def exists(path: TcpPath, digests: Sequence[bytes], until: float = 0.0) -> list[int]:
            ends.append((time.monotonic(), until))
            return by_tcp(path, digests, until)

        monkeypatch.setattr(TcpPath, "exists", exists)
        cluster.node.stream.loop.call_later(0.0, stop)
        cluster.network.hold()
        began = time.monotonic()
        assert not client.exists("k")
        go_on.set()
        cluster.network.release()
        ((at, until),) = ends
        # A deadline of its own would be 0.0, or 3 s from its begin.
        assert -0.5 < until - (began + 3.0) < (at - began) / 2, (began, at, until)
