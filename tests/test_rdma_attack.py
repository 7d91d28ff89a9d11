"""Attacks on the RDMA path: schedules, deaths and answers that nobody meant, one test for each hole that was found."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from clusters import wait_until
from fakefabric import FakeLink, FakeNetwork
from lanes import EndpointThread, lane
from rdmatown import RdmaTown, path_of, until_rdma
from storm.inproc import WorkerThread

from simm import messages as M
from simm import rdmaget
from simm import session as session_module
from simm.channel import Refused
from simm.constants import SET_BYTES, VALUE_BYTES_MAX
from simm.errors import RemoteProtocolError
from simm.fabric import Absence, FabricError
from simm.lane import Lane
from simm.lane_end import Held, LaneEnd
from simm.layout import SLOT, Geometry
from simm.reader import ArenaReader
from simm.remote_arena import RemoteArena, Side

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_buried() -> Iterator[None]:
    session_module._BURIED.clear()
    yield
    session_module._BURIED.clear()


# -- forks ---------------------------------------------------------------------------------------------------


def _map_at(address: int, size: int) -> int:
    """Map fresh memory at this very place, where nothing must be mapped; where it came to lie."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreplace
    return int(libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) or 0)


def test_a_child_that_drops_the_parents_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered memory is not there in a child, so its addresses may be somebody else's: nobody may unmap them."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", bytes(5000))  # a lane with its scratch, and bounce blocks
        path = path_of(client)
        scratch = path.take(time.monotonic() + 5)
        path.give(scratch)
        ours = [(pages.address, pages.size) for pages in (*path.bounce._pages, scratch._scratch)]
        del path, scratch
        child = os.fork()
        if not child:
            code = 1
            try:
                for address, size in ours:
                    if _map_at(address, size) != address:
                        os._exit(2)
                    ctypes.memset(address, 0x5A, size)
                town.clients.clear()
                del client
                gc.collect()
                if all(ctypes.string_at(address + size - 8, 8) == b"\x5a" * 8 for address, size in ours):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- ends ----------------------------------------------------------------------------------------------------


def test_a_path_that_is_closed_while_the_background_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane in the background's hands is closed as well, once, and by nobody else meanwhile."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", b"value")
        path = path_of(client)
        tend, path.tend = path.tend, lambda now: None  # type: ignore[method-assign]
        time.sleep(0.25)

        def idle() -> bool:
            if path._watched is not None:
                tend(time.monotonic())
            return bool(path._idle) and path._watched is None

        wait_until(idle, "a lane is idle")
        town.network.hold()
        posted: list[int] = []
        asked = threading.Event()
        lane = path._idle[0]
        ask = lane.ask_pulse

        def ask_pulse() -> None:
            ask()
            posted.append(1)
            asked.set()

        lane.ask_pulse = ask_pulse  # type: ignore[method-assign]
        looking = threading.Thread(target=tend, args=(time.monotonic(),))
        looking.start()
        assert asked.wait(5)
        path.close()
        looking.join(5)
        assert not looking.is_alive()
        town.network.release()
        wait_until(lambda: not path._lanes, "no lane is left")
        assert not lane.wires


# -- time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["get", "put", "exists"])
def test_a_full_queue_and_nobody_who_answers(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Posting waits for room, too: not beyond the deadline."""
    with RdmaTown(monkeypatch, depth=32, size=64 * MIB) as town:
        keys = [f"k{number}" for number in range(120)]
        values = [bytes(3000)] * len(keys)
        assert all(town.client("shm").put_many(keys, values))
        client = town.rdma(deadline_s=1.6)
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        assert client.put("warm", bytes(3000))
        sinks = [client.register(bytearray(3000)) for _ in keys]
        town.network.hold()
        began = time.monotonic()
        if what == "get":
            assert client.get_into_many(keys, sinks) == [3000] * len(keys)
        elif what == "put":
            client.put_many(keys, values)
        else:
            assert all(client.exists_many(keys))
        took = time.monotonic() - began
        town.network.release()
        assert took < 1.6 + 2.0, took  # it was 5 s
        until_rdma(client)


def test_one_large_value_and_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch, depth=16, size=128 * MIB) as town:
        client = town.rdma(deadline_s=0.8)
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        value = bytes(40 * MIB)
        source = client.register(value)
        path_of(client).deadline_s = 60.0
        assert client.put("k", bytes(10 * MIB))
        path_of(client).deadline_s = 0.8
        town.network.hold()
        began = time.monotonic()
        client.put("k2", source)
        took = time.monotonic() - began
        town.network.release()
        assert took < 3.5, took  # it was 5 s for the post alone


# -- what was sent and given up -------------------------------------------------------------------------------


def test_a_commit_that_comes_to_the_worker_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has given up and put a newer value by TCP: it must not be carried out on top of that."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=0.8)
        assert client.put("k", b"first")
        fence = LaneEnd.fence
        fencing, go_on = threading.Event(), threading.Event()

        def slow(self: LaneEnd, holds: Sequence[Held]) -> None:
            fence(self, holds)
            fencing.set()
            assert go_on.wait(10)

        monkeypatch.setattr(LaneEnd, "fence", slow)  # a device that takes its time
        assert not client.put("k", b"second")
        assert fencing.is_set()
        monkeypatch.setattr(LaneEnd, "fence", fence)
        assert client.put("k", b"third")
        go_on.set()
        wait_until(lambda: not town.node.endpoint.endpoint.lanes, "the lane that was given up is gone")
        assert town.client("shm").get("k") == b"third"
        town.node.endpoint.call(town.node.endpoint.endpoint.check)
        until_rdma(client)


# -- ends of clients ------------------------------------------------------------------------------------------


def test_a_client_that_is_closed_while_an_old_path_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rails are closed after the last lane, and not only after those of the newest path."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=4.0)
        value = bytes(range(250)) * 400
        assert client.put("k", value)
        path = path_of(client)
        target = next(iter(client._router.targets.values()))  # type: ignore[union-attr]
        sink = client.register(bytearray(len(value)))
        town.network.hold(lambda link, op: op[3] >= len(value))
        got: list[int | None] = []
        reading = threading.Thread(target=lambda: got.append(client.get_into("k", sink)))
        reading.start()
        wait_until(lambda: any(link.begun for link in town.fabrics[0].fakes[0].links), "a READ is under way")
        assert target.tcp is not None
        target.tcp_lost(target.tcp, "for a test")
        until_rdma(client)
        assert path_of(client) is not path
        client.close()  # RdmaTown's end says whether a link was closed while a thread was in it
        reading.join(10)
        assert not reading.is_alive()
        town.network.release()


def test_a_fabric_is_not_opened_for_a_client_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        shared = client._router._rails  # type: ignore[union-attr]
        count = len(town.fabrics)
        client.close()
        assert isinstance(shared.get(), Absence)
        assert len(town.fabrics) == count


# -- answers of a server that lies ------------------------------------------------------------------------------


def test_regions_beyond_all_memory() -> None:
    geometry = Geometry.plan(16 * MIB, 512)

    def regions(address: int) -> list[M.RdmaRegion]:
        return [M.RdmaRegion(0, M.REGION_WRITABLE, 0, geometry.size, address, 1)]

    side = Side(geometry, 0, regions((1 << 64) - geometry.size))
    for bad in ((1 << 64) - geometry.size + 1, (1 << 64) - 1):
        with pytest.raises(RemoteProtocolError):
            Side(geometry, 0, regions(bad))
    assert side.keyed(geometry.data_offset, 10, 7)
    for start, length in (
        (geometry.size, 1), (geometry.size - 1, 2), (geometry.data_offset - 1, 2), ((1 << 64) - 1, 4096), (0, 8),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            side.keyed(start, length, 7)
        with pytest.raises(RemoteProtocolError):
            side.split(start, length, writable=True)


def test_a_length_that_no_value_has() -> None:
    """A server that lies must not make us allocate gigabytes."""
    geometry = Geometry.plan(256 * MIB, 512)
    arena = RemoteArena(geometry, 1, [M.RdmaRegion(0, 0, 0, geometry.size, 1 << 30, 1)], 1)
    digest = bytes(range(16))
    for length, fits in ((VALUE_BYTES_MAX, True), (VALUE_BYTES_MAX + 1, False), (geometry.data_bytes, False)):
        image = struct.pack("<Q16sQIIIHHQQ", 2, digest, geometry.data_offset, length, 0, 1 << 31, 1, 0, 0, 0)
        assert len(image) == SLOT.size
        assert (arena.place(image.ljust(2 * SET_BYTES, b"\0"), 0, digest, 0) is not None) is fits


class Without:
    """A module, but for some of its names."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def test_no_descriptors_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is out of descriptors or memory sees misses, not errors."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=1.0)
        assert client.put("k", b"value")
        path = path_of(client)
        lane = path.take(time.monotonic() + 5)
        with monkeypatch.context() as patch:

            def none(*_arguments: object, **_more: object) -> None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            patch.setattr("simm.channel.socket", Without(socket, socket=none))
            assert client.get("k") in (b"value", None)
            assert client.put("k", b"value") in (True, False)
            target = next(iter(client._router.targets.values()))  # type: ignore[union-attr]
            if target.tcp is not None:
                target.tcp._drop_idle()
            assert client.get("k") is None
            assert not client.put("k", b"value")
        path.give(lane)
        until_rdma(client)
        path = path_of(client)
        lane = path.take(time.monotonic() + 5)
        with monkeypatch.context() as patch:
            patch.setattr("simm.bounce.mmap", Without(mmap, mmap=none))
            client.get("k")
            client.put("k", b"value")
        path.give(lane)


def test_a_client_that_is_dropped_without_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its links do not stay for ever: the next one of the process that tidies up closes them."""
    with RdmaTown(monkeypatch) as town:
        other = town.rdma()
        rail = town.fabrics[0].fakes[0]
        wait_until(lambda: len(rail.links) == 1, "the other's lane")
        client = town.rdma()
        assert client.put("k", b"value" * 1000)
        assert len(rail.links) >= 2
        town.clients.remove(client)
        del client

        def swept() -> bool:
            gc.collect()
            return len(rail.links) == 1

        wait_until(swept, "its links are closed")
        wait_until(lambda: len(town.node.endpoint.endpoint.lanes) == 1, "at both ends")
        assert other.get("k") == b"value" * 1000
        other._router._rails.users -= 1  # type: ignore[union-attr]  # the dropped one's, for the end of this test


# -- old places ---------------------------------------------------------------------------------------------------


def test_places_of_an_arena_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is still reading the old arena must not put its places where those of the new one are kept."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", b"value")
        path = path_of(client)
        lane = path.take(time.monotonic() + 5)
        old = path.arena
        town.node.endpoint.stop()
        town.node.endpoint.start()
        path.drop("for a test")
        wait_until(lambda: path.up and path.arena is not old, "another registration of the arena")
        results: dict[int, object] = {}
        digest = client.digest("k")
        reading = rdmaget.Reading(client._copier, None, [digest], [None], results)  # type: ignore[arg-type]
        reading.begin(path, lane, time.monotonic() + 1)
        sets = lane.arena.sets(digest)
        reader = ArenaReader(town.node.worker.segment.name)
        fetched = b"".join(bytes(reader._meta[at : at + SET_BYTES]) for at in sets[:2])
        place = lane.arena.place(fetched, 0, digest, lane.arena.find(fetched, 0, digest))
        assert place is not None
        reading.locations.put(digest, place)
        assert path.locations.get(digest) is None
        path.lost(lane, "for a test")


# -- grants ---------------------------------------------------------------------------------------------------


def test_grants_are_not_lost_when_the_worker_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were in the endpoint's own pool by then stay there."""
    with WorkerThread(16 * MIB) as worker, EndpointThread(worker.path, FakeNetwork(1)) as server:
        server.ready()
        with lane(server) as mine:
            mine.grant(4096, 1)
            session = server.endpoint.upstream.session
            assert session is not None
            server.do(lambda: session.ask([(4096, 3)]))
            pool = session.pool(4096)
            assert len(pool) == 3
            ask = session.ask

            def refused(_wants: object) -> None:
                raise Refused(9, "not now")

            session.ask = refused  # type: ignore[method-assign, assignment]
            assert len(mine.grant(4096, 10)) == 0
            assert len(pool) == 3
            session.ask = ask  # type: ignore[method-assign]
            assert len(mine.grant(4096, 5)) == 5


def test_a_worker_that_is_down_costs_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads go on by RDMA while a worker restarts, though puts do not."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=2.0)
        assert client.put("k", b"value")
        path = path_of(client)
        opened = town.node.endpoint.endpoint.counts["lanes_opened"]
        town.node.worker.die()
        wait_until(lambda: town.node.endpoint.endpoint.upstream.session is None, "the endpoint knows")
        for number in range(3):
            assert not client.put(f"other{number}", bytes(70_000))
            assert path.up, path.why
        assert client.get("k") == b"value"
        assert client.counters["rdma_gets"] == 1
        assert town.node.endpoint.endpoint.counts["lanes_opened"] == opened
        town.node.worker.start()
        town.instruct()


# -- rails that reach only their like -----------------------------------------------------------------------------


def test_pairs_that_do_not_work_are_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """In networks of separate rails each further lane, made in the middle of a call, would find that out anew."""
    with RdmaTown(monkeypatch, rails=("a", "b"), mine=("c", "d")) as town:
        client = town.rdma(deadline_s=4.0)
        path = path_of(client)
        mine, theirs = town.fabrics[0].fakes, town.node.endpoint.fabric.fakes
        town.network.sever(mine[0], theirs[1])
        town.network.sever(mine[1], theirs[0])
        asked: list[tuple[str, int]] = []
        pair = Lane._pair

        def counted(self: Lane, rail: Any, number: int, *more: Any) -> Any:
            asked.append((rail.name, number))
            return pair(self, rail, number, *more)

        monkeypatch.setattr(Lane, "_pair", counted)
        tend = path.tend
        path.tend = lambda now: None  # type: ignore[method-assign]

        def idle() -> bool:
            if path._watched is not None:
                tend(time.monotonic())
            return bool(path._idle) and path._watched is None

        wait_until(idle, "a lane is idle")
        first = path.take(time.monotonic() + 5)
        for _ in range(6):
            more = path.take(time.monotonic() + 5)
            assert sorted(wire.rail.name for wire in more.wires) == ["c", "d"]
            with path._changed:
                path._lanes -= 1
            more.close()
        path.give(first)
        assert len([each for each in asked if each in (("c", 1), ("d", 0))]) == 2, asked
        assert client.put("k", b"value")


# -- interrupts while links are being closed ------------------------------------------------------------------------


def test_an_alarm_while_links_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a signal's handler raises, and whenever: the call does not return before the device lets go."""
    with RdmaTown(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB) as town:
        client = town.rdma(deadline_s=5.0)
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        value = bytes(range(256)) * 400
        assert client.put("k", value)
        sink = client.register(bytearray(len(value)))
        town.network.hold(lambda link, op: op[3] >= len(value))
        close = FakeLink.close
        alarms = [TimeoutError("an alarm"), KeyboardInterrupt(), None, ValueError("another")]

        def interrupted(self: FakeLink) -> None:
            alarm = alarms.pop() if alarms else None
            if alarm is not None:
                raise alarm
            close(self)

        turns = 0

        def between() -> None:
            nonlocal turns
            turns += 1
            if turns == 300:
                monkeypatch.setattr(FakeLink, "close", interrupted)
                raise KeyboardInterrupt

        town.network.between = between
        with pytest.raises((KeyboardInterrupt, TimeoutError, ValueError)):
            client.get_into("k", sink)
        town.network.between = None
        assert not alarms
        sink.view()[:] = b"\xee" * len(value)
        town.network.release()
        town.network.run()
        assert bytes(sink.view()) == b"\xee" * len(value)
        monkeypatch.setattr(FakeLink, "close", close)
        until_rdma(client)
        assert client.get_into("k", sink) == len(value)


def test_a_link_that_cannot_be_destroyed_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call was on it: none raises, and the path still comes back."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=3.0)
        assert client.put("k", b"value")
        path = path_of(client)
        wait_until(lambda: bool(path._idle), "a lane is idle")
        close = FakeLink.close
        refused: list[FakeLink] = []

        def stuck(self: FakeLink) -> None:
            if self.rail is town.fabrics[0].fakes[0] and not refused:
                refused.append(self)
                raise FabricError("the device does not want to")
            close(self)

        monkeypatch.setattr(FakeLink, "close", stuck)
        path.drop("for a test")
        wait_until(lambda: bool(refused), "one link was not closed")
        until_rdma(client)
        assert client.get("k") == b"value"
        wait_until(lambda: len(town.node.endpoint.endpoint.lanes) == path._lanes, "its other end was")


# -- forks in the middle of a call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["rdma,tcp", "tcp"])
def test_a_child_does_not_keep_a_connection_open(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A call under way gives up after a fork: its server must see that, or it would carry the request out late."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=1.0) if "rdma" in path else town.client("tcp", deadline_s=1.0)
        assert client.put("k", b"value")
        service = town.node.endpoint if "rdma" in path else town.node.stream
        if "rdma" in path:
            path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        before = set(service.loop.peers)
        assert before
        go_on = threading.Event()
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            go_on.wait(20)

        service.loop.call_later(0.0, stop)
        service._near.send(b"") if "rdma" in path else client.exists("k")
        assert stopped.wait(5)
        putting = threading.Thread(target=client.put, args=("k", b"other"))
        putting.start()
        time.sleep(0.2)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        try:
            os.close(read)
            putting.join(10)
            go_on.set()
            wait_until(lambda: all(peer.closed for peer in before), "the server sees that the client has hung up")
        finally:
            os.close(write)
            os.waitpid(child, 0)


# -- one deadline ----------------------------------------------------------------------------------------------------


def test_one_deadline_for_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """What RDMA has used up of it is gone."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=3.0)
        assert client.put("k", b"value")
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        go_on = threading.Event()

        def stop() -> None:
            go_on.wait(20)

        town.node.stream.loop.call_later(0.0, stop)
        town.network.hold()
        time.sleep(0.3)
        began = time.monotonic()
        assert not client.exists("k")
        took = time.monotonic() - began
        go_on.set()
        town.network.release()
        assert took < 3.0 + 1.0, took  # it was 4.5 s
