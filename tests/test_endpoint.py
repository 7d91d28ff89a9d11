"""An endpoint on a network in software: the life of a lane, who may write where and until when, and what breaks."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakefabric import FakeLink, FakeNetwork, FakeRail, all_closed
from lanes import WAIT_S, EndpointThread, Grant, RawLane, lane, refusal
from storm.inproc import StreamThread, WorkerThread

from simm import devices as devices_module
from simm import endpoint as endpoint_module
from simm import messages as M
from simm.arena_regions import Registration, map_meta, pieces
from simm.channel import Refused
from simm.constants import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from simm.errors import CorruptionError, TransportError
from simm.fabric import READ, WRITE, Absence, Fabric, FabricError, Op
from simm.hashing import Hasher
from simm.lane_end import LINKS_MAX, LaneEnd
from simm.layout import MAGIC, State, Word
from simm.loop import STALL_S
from simm.messages import Status
from simm.rpc import encode
from simm.session import WorkerSession

digest_of = Hasher("default")
OK, STALE = int(Status.OK), int(Status.STALE_GRANT)


@pytest.fixture
def network() -> Iterator[FakeNetwork]:
    made = FakeNetwork(random.randrange(1 << 30), background=True)
    yield made
    all_closed(made)


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


@pytest.fixture
def server(worker: WorkerThread, network: FakeNetwork) -> Iterator[EndpointThread]:
    with EndpointThread(worker.path, network) as running:
        yield running.ready()


def stored(worker: WorkerThread, key: str) -> bytes | None:
    """A value, as any process on the server's host reads it."""
    session = worker.session(ring=False)
    try:
        found = session.reader.locate(digest_of(key))
        return bytes(session.reader.value(found)) if found is not None else None
    finally:
        session.close()


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.005)


def granted(worker: WorkerThread) -> int:
    """Bytes that the worker's sessions hold."""
    with worker.frozen() as store:
        return store.granted_bytes


def gone(lane: RawLane) -> None:
    """Its control connection has been closed from over there; by us, where the server's device tells it nothing."""
    if not getattr(lane.server.network, "tells", True):
        lane.hang_up()
        return
    end = time.monotonic() + WAIT_S
    with pytest.raises(TransportError):
        while time.monotonic() < end:
            lane.channel.call(M.Ping(1))
            time.sleep(0.005)


def links_of(server: EndpointThread) -> list[FakeLink]:
    """The server's ends."""
    return [link for fabric in server.fabrics for rail in getattr(fabric, "fakes", ()) for link in rail.links]


# --- the life of a lane ----------------------------------------------------------------------------


def test_the_whole_life_of_a_lane(worker: WorkerThread, network: FakeNetwork) -> None:
    with EndpointThread(worker.path, network, ("s0", "s1")) as server:
        server.ready()
        with lane(server, ((0, 0), (1, 1), (0, 1))) as mine:
            opened = mine.opened
            assert opened.size == worker.segment.size and opened.incarnation == worker.store.incarnation
            assert opened.flags == M.RDMA_WINDOWS
            assert [(rail.name, rail.mtu, rail.reads) for rail in opened.rails] == [("s0", 4096, 16), ("s1", 4096, 16)]
            for link in range(3):
                header = mine.read(0, 8 * len(Word), link)
                assert int.from_bytes(header[:8], "little") == MAGIC and header[8 * Word.STATE] == State.OPEN
            first, second = mine.grant(5000, 2)
            assert len(first.keys) == 3 and len({*first.keys, *second.keys}) == 6 and first.chunk >= 5000
            for link in range(3):
                value = bytes([65 + link]) * 5000
                mine.write(second if link == 2 else first, value, link)
            statuses, fresh = mine.commit((digest_of("a"), first, 5000), (digest_of("b"), second, 4999))
            assert statuses == [OK, OK] and not fresh
            assert stored(worker, "a") == b"B" * 5000 and stored(worker, "b") == b"C" * 4999
            stats = server.stats()
            assert (stats["lanes"], stats["links"], stats["commits"], stats["granted_bytes"]) == (1, 3, 2, 0)
            assert mine.read(first.offset, 5000, 1) == b"B" * 5000, "from where it lies"
            assert mine.channel.call(M.RdmaDisconnect(1)).items == 1
            assert mine.channel.call(M.RdmaDisconnect(1)).items == 0
            assert mine.channel.call(M.RdmaDisconnect(9)).items == 0
            (third,) = mine.grant(100)
            assert third.keys[1] == 0 and third.keys[0] and third.keys[2]
            assert server.stats()["links"] == 2
        stats = server.until(lambda stats: not stats["lanes"], "the lane is closed")
        assert stats["links"] == 0 and stats["granted_bytes"] == 0 and stats["lanes_opened"] == 1
        assert not links_of(server)
        until(lambda: granted(worker) == 0, "the grant that was left goes back")


def test_grants_come_with_the_answer_after_the_one_that_wanted_them(server: EndpointThread) -> None:
    with lane(server) as mine:
        (one,) = mine.grant(4096)
        mine.write(one, b"x" * 4096)
        assert mine.commit((digest_of("k"), one, 4096), wants=[(4096, 2)]) == ([OK], [])
        statuses, fresh = mine.commit()
        assert statuses == [] and len(fresh) == 2
        for grant in fresh:
            mine.write(grant, b"y" * 4096)
        assert mine.commit(*((digest_of(f"k{grant.number}"), grant, 4096) for grant in fresh))[0] == [OK, OK]
        assert len(mine.grant(4096)) == 1, "none is left over"


def test_two_lanes(server: EndpointThread, worker: WorkerThread) -> None:
    with lane(server) as one, lane(server) as two:
        mine, (theirs,) = one.grant(64, 4), two.grant(64)
        assert not {grant.offset for grant in mine} & {theirs.offset}
        two.write(theirs, b"2" * 64)
        for number, grant in enumerate(mine):
            one.write(grant, bytes([number]) * 64)
        one.close()
        server.until(lambda stats: stats["lanes"] == 1, "one is closed")
        assert two.commit((digest_of("two"), theirs, 64))[0] == [OK] and stored(worker, "two") == b"2" * 64


def test_windows_are_younger_than_the_link_that_they_are_bound_to(server: EndpointThread) -> None:
    """A kernel that cleans up after a killed process destroys the youngest first, and waits for a link's windows."""
    network = server.endpoint.devices.registration.rails[0].network  # type: ignore[union-attr, attr-defined]
    for _turn in range(3):  # what the lanes before have left behind is there to be used
        with lane(server) as one, lane(server) as two:
            for mine in (one, two):
                for grant in mine.grant(4096, 4)[:2]:
                    assert mine.commit((digest_of("k"), grant, 4096))[0] == [OK]
                mine.grant(4096, 4)
            with network.lock:
                bound = [window for link in links_of(server) for window in link.rail.windows if window.link is link]
                assert len(bound) == 12
                assert all(window.born > window.link.born for window in bound if window.link is not None)
        server.until(lambda stats: not stats["lanes"], "the lanes are closed")
        assert server.stats()["windows"] == 0, "they go with their link"


def test_a_commit_of_what_is_not_its_own(server: EndpointThread, worker: WorkerThread) -> None:
    with lane(server) as one, lane(server) as two:
        (mine,), (theirs,) = one.grant(64), two.grant(64)
        two.write(theirs, b"t" * 64)
        unknown = Grant(mine.number + 999, 0, 64, [])
        digest = digest_of("x")
        assert one.commit((digest, theirs, 64), (digest, unknown, 64))[0] == [STALE, STALE], "not of this lane"
        assert one.give_back(theirs, unknown) == 0
        one.write(mine, b"m" * 64)
        assert one.commit((digest, mine, 64), (digest_of("y"), mine, 64))[0] == [OK, STALE], "spent by the first"
        assert one.commit((digest, mine, 64))[0] == [STALE], "spent"
        assert one.give_back(mine) == 0
        assert two.commit((digest_of("z"), theirs, 64))[0] == [OK], "and nobody else has spent it"
        assert stored(worker, "x") == b"m" * 64 and stored(worker, "y") is None and stored(worker, "z") == b"t" * 64
        (long,) = one.grant(64)
        assert one.commit((digest, long, 65))[0] == [int(Status.BAD_REQUEST)], "longer than its chunk"
        assert server.stats()["granted_bytes"] == 0
        #: A grant that is prepared and has not been told.
        (spent,) = one.grant(64)
        assert one.commit((digest, spent, 64), wants=[(64, 1)])[1] == []
        (number,) = server.do(lambda: [held.number for peer in server.endpoint.lanes for held in peer.context.prepared])
        assert one.commit((digest, Grant(number, 0, 64, []), 64))[0] == [STALE], "guessed"


def test_returned_grants(server: EndpointThread, worker: WorkerThread) -> None:
    with lane(server) as mine:
        one, two = mine.grant(1000, 2)
        before = granted(worker)
        assert mine.give_back(one, one, one) == 1
        assert granted(worker) == before - one.chunk and server.stats()["granted_bytes"] == two.chunk
        mine.write(two, b"2" * 1000)
        assert mine.commit((digest_of("2"), two, 1000))[0] == [OK]


# --- who may write where ---------------------------------------------------------------------------


def refused(lane: RawLane, op: Op) -> None:
    """The device refuses an operation; the server's end breaks with it."""
    with pytest.raises(FabricError) as caught:
        lane.run(0, op)
    assert caught.value.status == "REM_ACCESS_ERR"


WHERE = ("a byte more", "no grant", "slots", "header", "ledger", "after commit", "returned", "another lane's")


@pytest.mark.parametrize("where", WHERE)
def test_bytes_are_written_only_where_they_were_granted(
    where: str, server: EndpointThread, worker: WorkerThread
) -> None:
    with lane(server) as mine, lane(server) as other:
        geometry = worker.store.geometry
        (grant,), (theirs,) = mine.grant(4096), other.grant(4096)
        mine.write(grant, b"1" * 4096)
        before = bytes(worker.segment.mm)
        length, key = 8, grant.keys[0]
        offset = {
            "slots": geometry.slots_offset, "header": 8 * Word.HEARTBEAT, "ledger": geometry.visited_offset,
            "another lane's": theirs.offset,
        }.get(where, grant.offset)  # fmt: skip
        region = mine.region(0, offset)
        op = mine.op(WRITE, 0, offset, length, key)
        if where == "a byte more":
            op = mine.op(WRITE, 0, grant.offset + grant.chunk - 7, 8, key)
        elif where == "another lane's":
            op = mine.op(WRITE, 0, offset, length, theirs.keys[0])
        elif where in ("slots", "header", "no grant"):
            op = mine.op(WRITE, 0, offset, length, region.rkey)
        elif where == "ledger":  # next to what is writable, and not registered
            op = (*op[:4], region.address + geometry.ledger_offset - region.start, region.rkey)
        elif where == "after commit":
            assert mine.commit((digest_of("k"), grant, 4096))[0] == [OK]
            before = bytes(worker.segment.mm)
        elif where == "returned":
            assert mine.give_back(grant) == 1
            before = bytes(worker.segment.mm)
        refused(mine, op)
        gone(mine)
        after = bytes(worker.segment.mm)
        for part in (slice(geometry.data_offset, None), slice(geometry.slots_offset, geometry.visited_offset)):
            assert after[part] == before[part]
        stats = server.until(lambda stats: stats["lanes"] == 1, "its lane is closed")
        assert stats["lanes_broken"] == getattr(server.network, "tells", True)
        other.write(theirs, b"fine" * 1024)
        assert other.commit((digest_of("other"), theirs, 4096))[0] == [OK], "nobody else has suffered"


def test_marks_of_use_are_written_by_the_regions_own_key(server: EndpointThread, worker: WorkerThread) -> None:
    with lane(server) as mine:
        (grant,) = mine.grant(64)
        mine.write(grant, b"v" * 64)
        assert mine.commit((digest_of("v"), grant, 64))[0] == [OK]
        slot = worker.store.table.lookup(digest_of("v"))
        visited = worker.store.geometry.visited_offset + slot
        worker.segment.mm[visited] = 0
        mine.buffer[0] = b"\x01"
        assert mine.region(0, visited).flags == M.REGION_WRITABLE
        mine.run(0, mine.op(WRITE, 0, visited, 1), mine.op(READ, 0, grant.offset, 8, at=64))
        assert worker.segment.mm[visited] == 1


# --- fences ----------------------------------------------------------------------------------------


def hold_writes(network: FakeNetwork) -> None:
    network.hold(lambda _link, op: op[0] == WRITE)


def test_what_is_committed_is_written_no_more(worker: WorkerThread) -> None:
    """A client that commits while a WRITE of it is still under way: it lands before the publishing, or never."""
    outcomes = set()
    for seed in range(12):
        network = FakeNetwork(seed, background=True)
        with EndpointThread(worker.path, network) as server:
            server.ready()
            mine = RawLane(server)
            (grant,) = mine.grant(4096)
            mine.write(grant, b"a" * 4096)
            hold_writes(network)
            mine.post_write(grant, b"b" * 4096)
            time.sleep(0.002)
            key = f"late{seed}"
            try:
                statuses, _ = mine.commit((digest_of(key), grant, 4096))
                assert statuses == [OK]
            except TransportError:
                statuses = []  # the WRITE was refused, which broke the link, and so the lane: nothing was committed
            seen = stored(worker, key)
            assert (seen is not None) == bool(statuses)
            outcomes.add(seen)
            network.release()
            time.sleep(0.01)
            assert stored(worker, key) == seen, "a published value was written to"
            mine.close()
            server.until(lambda stats: not stats["lanes"], "the lane is closed")
            assert granted(worker) == 0
        all_closed(network)
    assert len(outcomes) > 1, "every seed the same: nothing was under way"


def test_control_without_the_fence_a_published_value_is_written_to(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaneEnd, "fence", lambda self, holds: None)
    monkeypatch.setattr(endpoint_module.Endpoint, "check", lambda self: None)
    with pytest.raises(AssertionError, match="a published value was written to"):
        test_what_is_committed_is_written_no_more(worker)


def late_write(worker: WorkerThread, network: FakeNetwork, hang_up: Callable[[RawLane], object]) -> None:
    """A lane ends with WRITEs under way; its chunk is given to somebody else, who fills it. Then they arrive."""
    with EndpointThread(worker.path, network) as server, lane(server.ready()) as mine:
        (grant,) = mine.grant(300_000)
        mine.write(grant, b"a" * 300_000)
        hold_writes(network)
        mine.post_write(grant, b"b" * 300_000)
        hang_up(mine)
        server.until(lambda stats: not stats["lanes"], "the lane is closed")
        until(lambda: granted(worker) == 0, "its grants are back")
        session = worker.session(ring=False)
        others: list[tuple[int, int, int]] = []
        while grant.offset not in {other[1] for other in others}:
            session.ask([(300_000, 1)])
            other = session.take(300_000)
            assert other is not None, "the chunk is never given again"
            others.append(other)
        number, offset, chunk = others[-1]
        start = offset - session.reader.data_offset
        session.reader.data[start : start + chunk] = b"c" * chunk
        assert session.commit_one(digest_of("c"), number, 300_000, 0, 0, 300_000, 0) == OK
        network.release()
        time.sleep(0.02)
        seen = stored(worker, "c")
        session.close()
        assert seen == b"c" * 300_000, "a late WRITE landed in a chunk that is somebody else's"


ENDS: dict[str, Callable[[RawLane], object]] = {
    "hangs up": lambda lane: lane.hang_up(),
    "nonsense": lambda lane: lane.channel.send_raw(b"nonsense" * 8),
    "link breaks": lambda lane: lane.fabric.network.kill(lane.fabric.fakes[0].links[0]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_lane_that_ends_in_the_middle(end: str, worker: WorkerThread, network: FakeNetwork) -> None:
    late_write(worker, network, ENDS[end])


def test_control_links_that_outlive_their_lane_write_into_others_chunks(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(lane: LaneEnd) -> list[Any]:
        lane.closed, lane.links = True, []
        held = list(lane.holds())
        lane.grants, lane.prepared, lane.granted_bytes = {}, [], 0
        return held

    monkeypatch.setattr(LaneEnd, "close", careless)
    monkeypatch.setattr(endpoint_module.Endpoint, "check", lambda self: None)
    with pytest.raises(AssertionError, match="somebody else's"):
        late_write(worker, network, ENDS["hangs up"])


def test_a_link_that_cannot_be_destroyed_ends_the_endpoint(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EndpointThread(worker.path, network) as server:
        server.ready()
        mine = RawLane(server)
        mine.grant(4096)
        before = granted(worker)
        (link,) = links_of(server)

        def stuck() -> None:
            raise FabricError("device or resource busy")

        with monkeypatch.context() as patch:
            patch.setattr(link, "close", stuck)
            mine.hang_up()
            server.thread.join(WAIT_S)
            assert not server.thread.is_alive() and "busy" in server.endpoint.failed
        assert granted(worker) == before, "the chunk is not reused while the process lives"
        mine.close()
        for fabric in server.fabrics:  # what the kernel does when the process ends
            fabric.close()
        for peer in list(server.loop.peers):
            peer.sock.close()
        server.endpoint.upstream.close()
        server.listener.close()


def worker_dies(worker: WorkerThread, network: FakeNetwork) -> None:
    """A lane holds grants over the worker's death, and writes into them after it."""
    with EndpointThread(worker.path, network) as server, lane(server.ready()) as mine:
        kept, spent, back = mine.grant(50_000, 3)
        held = {grant.offset for grant in (kept, spent, back)}
        mine.write(kept, b"k" * 100)
        worker.die()
        assert mine.read(0, 8) == MAGIC.to_bytes(8, "little"), "reads go on"
        mine.write(kept, b"m" * 100)
        refused_by = mine.channel.call(M.Commit([(digest_of("s"), spent.number, 100, 0, 0, 0)], []))
        assert refused_by.statuses in ([STALE], [int(Status.UNAVAILABLE)])
        worker.start()
        until(lambda: server.do(server.endpoint.upstream.worker) is not None, "a session with the new worker")
        server.do(server.endpoint.upstream.tend)
        session = worker.session(ring=False)
        taken = []
        while True:  # all that the new worker has to give
            session.ask([(50_000, 1)])
            grant = session.take(50_000)
            if grant is None:
                break
            taken.append(grant)
            start = grant[1] - session.reader.data_offset
            session.reader.data[start : start + 100] = b"n" * 100
            assert session.commit_one(digest_of(f"n{len(taken)}"), grant[0], 50_000, 0, 0, 50_000, 0) == OK
            if len(taken) > 200:
                break
        assert taken
        mine.write(kept, b"o" * 100)
        assert not {grant[1] for grant in taken} & held, "the new worker gave away what a lane may write into"
        assert mine.commit((digest_of("k"), kept, 100))[0] == [STALE], "not the new worker's"
        assert mine.give_back(back) == 1
        server.stats()
        until(lambda: granted(worker) == 0, "the old session is released")
        (fresh,) = mine.grant(100)
        mine.write(fresh, b"f" * 100)
        assert mine.commit((digest_of("f"), fresh, 100))[0] == [OK] and stored(worker, "f") == b"f" * 100
        session.close()


def test_a_worker_is_replaced_while_lanes_hold_grants(worker: WorkerThread, network: FakeNetwork) -> None:
    worker_dies(worker, network)


def test_control_grants_that_are_not_counted_are_given_away_by_the_next_worker(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSession, "begin_copy", lambda self: None)
    monkeypatch.setattr(WorkerSession, "end_copy", lambda self: None)
    monkeypatch.setattr(endpoint_module.Endpoint, "check", lambda self: None)
    with pytest.raises(AssertionError, match="may write into"):
        worker_dies(worker, network)


def test_the_endpoint_stops(worker: WorkerThread, network: FakeNetwork) -> None:
    with EndpointThread(worker.path, network) as server:
        server.ready()
        with lane(server) as mine, lane(server) as other:
            mine.grant(4096, 3)
            other.grant(64)
            server.stop()
            assert not links_of(server) and granted(worker) == 0
            gone(mine)
            with pytest.raises(FabricError):
                mine.read(0, 8)


def test_without_windows_all_data_is_writable(worker: WorkerThread) -> None:
    for number, windows in ((1 << 16, False), (0, True)):
        network = FakeNetwork(1, windows=number, background=True)
        with EndpointThread(worker.path, network, windows=windows) as server, lane(server.ready()) as mine:
            assert mine.opened.flags == 0 and not server.stats()["protected"]
            (grant,) = mine.grant(5000)
            assert grant.keys == []
            mine.write(grant, b"w" * 5000)
            assert mine.commit((digest_of("w"), grant, 5000), wants=[(5000, 1)])[0] == [OK]
            assert stored(worker, "w") == b"w" * 5000
            assert mine.region(0, grant.offset).flags == M.REGION_WRITABLE
            assert mine.region(0, 0).flags == 0
        all_closed(network)


# --- registration ----------------------------------------------------------------------------------


def test_pieces(worker: WorkerThread) -> None:
    session = worker.session(ring=False)
    geometry = session.reader.geometry
    for most in (1 << 20, 3 << 20, 1 << 30):
        for windows in (False, True):
            found = pieces(session.reader, map_meta(session.reader), windows=windows, most=most)
            assert all(0 < piece.length <= most for piece in found)
            covered = [0] * (geometry.size >> 12)
            for piece in found:
                assert piece.start % 4096 == 0 == piece.length % 4096
                for page in range(piece.start >> 12, piece.start + piece.length >> 12):
                    covered[page] += 1
            ledger = range(geometry.ledger_offset >> 12, geometry.data_offset >> 12)
            assert [page for page, count in enumerate(covered) if count != 1] == list(ledger), "once, but the ledger"
    session.close()


def test_the_arena_is_registered_in_pieces_between_turns(worker: WorkerThread, network: FakeNetwork) -> None:
    def refuse(what: str, _rail: FakeRail) -> str:
        if what == "register":
            time.sleep(0.02)  # as registering a GiB takes its time
        return ""

    network.refuse = refuse
    with EndpointThread(worker.path, network, piece_bytes=1 << 20) as server:
        channel = server.channel()
        seen = []
        opened = None
        while opened is None:
            try:
                opened = channel.call(M.RdmaOpen(0))
            except Refused as exc:
                assert exc.status == Status.UNAVAILABLE
                seen.append(str(exc))
        channel.close()
        network.refuse = lambda what, rail: ""
        known = [text for text in dict.fromkeys(seen) if text.startswith("registering, ")]
        assert len(known) >= 3 and known == sorted(known, key=lambda text: int(text.split()[1])), "answered in between"
        assert max(region.length for region in opened.regions) == 1 << 20
        with lane(server) as mine:  # across the ends of pieces
            geometry = worker.store.geometry
            start = geometry.data_offset + (1 << 20) - 5000
            worker.segment.mm[start : start + 10_000] = bytes(range(250)) * 40
            assert mine.read(start, 10_000) == bytes(range(250)) * 40
            assert mine.read(geometry.slots_offset, 4096) == bytes(worker.segment.mm[geometry.slots_offset :][:4096])


def test_a_chunk_across_the_end_of_a_piece(network: FakeNetwork) -> None:
    with (
        WorkerThread(64 << 20) as worker,
        EndpointThread(worker.path, network, ("s0", "s1"), piece_bytes=1 << 20) as server,
    ):
        with lane(server.ready(), ((0, 0), (1, 1)), buffer=4 << 20) as mine:
            regions = sum(len(rail.regions) for rail in server.fabrics[0].fakes)
            for number in range(3):
                (grant,) = mine.grant(1_500_000)
                value = bytes([number + 1]) * 1_500_000
                mine.write(grant, value, number % 2)
                assert mine.commit((digest_of(f"v{number}"), grant, 1_500_000))[0] == [OK]
                assert stored(worker, f"v{number}") == value
            assert sum(len(rail.regions) for rail in server.fabrics[0].fakes) == regions, "bridges go with the grants"
            mine.grant(1_500_000)
        server.until(lambda stats: not stats["lanes"], "closed")
        assert sum(len(rail.regions) for rail in server.fabrics[0].fakes) == regions


def test_a_chunk_longer_than_any_region_is_not_granted() -> None:
    network = FakeNetwork(3, region_bytes=1 << 20, background=True)
    with WorkerThread(64 << 20) as worker:
        with EndpointThread(worker.path, network) as server, lane(server.ready()) as mine:
            assert mine.grant(3 << 20) == [] and len(mine.grant(4096)) == 1
            assert server.stats()["lanes"] == 1
            assert granted(worker) == 4096, "the worker has it back"
    all_closed(network)


def test_no_windows_left(worker: WorkerThread) -> None:
    network = FakeNetwork(4, windows=3, background=True)
    with EndpointThread(worker.path, network) as server, lane(server.ready()) as mine:
        kept = mine.grant(64, 2)
        assert len(kept) == 2 and mine.grant(64, 2) == [], "one is left"
        (third,) = mine.grant(64)
        mine.write(third, b"3" * 64)
        assert mine.commit((digest_of("3"), third, 64))[0] == [OK]
        assert mine.give_back(*kept) == 2 and len(mine.grant(64, 3)) == 3, "they are used again"
    all_closed(network)


def test_idle_windows_of_one_link_are_not_kept_from_others(worker: WorkerThread) -> None:
    network = FakeNetwork(4, windows=8, background=True)
    with EndpointThread(worker.path, network) as server, lane(server.ready()) as one, lane(server) as two:
        for mine in (one, two, one):
            grants = mine.grant(64, 6)
            assert len(grants) == 6, "they are not used by anybody now"
            for grant in grants:
                mine.write(grant, b"v" * 64)
            assert mine.commit(*((digest_of(str(grant.number)), grant, 64) for grant in grants))[0] == [OK] * 6
            assert server.stats()["windows"] <= 8
        kept = one.grant(64, 6)
        assert two.grant(64, 3) == [] and len(two.grant(64, 2)) == 2, "those that are used stay where they are"
        assert one.give_back(*kept) == 6
    all_closed(network)


def test_there_is_no_device_and_then_there_is(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "REOPEN_S", 0.05)
    answers: list[Callable[[], Fabric | Absence]] = [
        lambda: Absence("no device", "load its driver"), lambda: Absence("no device", "load its driver"),
    ]  # fmt: skip

    def open_fabric() -> Fabric | Absence:
        return answers.pop(0)() if answers else network.fabric(["s0"])

    network.memlock = 1 << 20
    with EndpointThread(worker.path, network, open_fabric=open_fabric) as server:
        channel = server.channel()
        refused_with = refusal(lambda: channel.call(M.RdmaOpen(0)))
        assert refused_with.status == Status.UNAVAILABLE
        stats = server.until(lambda stats: "locked memory" in stats["why"], "the next try gets further")
        assert not stats["ready"] and stats["opens_failed"] >= 3
        assert "ulimit -l" in str(refusal(lambda: channel.call(M.RdmaOpen(0))))
        network.memlock = 1 << 50
        server.ready()
        assert isinstance(channel.call(M.RdmaOpen(0)), M.RdmaOpened), "on the same connection"
        channel.close()
    for fabric in network.fabrics:
        assert not any(rail.regions for rail in fabric.fakes)


def test_the_device_goes(worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "REOPEN_S", 0.05)
    with EndpointThread(worker.path, network) as server:
        server.ready()
        mine = RawLane(server)
        mine.grant(4096)
        network.gone(server.fabrics[0].rails[0])
        gone(mine)
        server.until(lambda stats: not stats["lanes"], "its lane is closed")
        until(lambda: granted(worker) == 0, "and its grant is back")
        mine.close()
        with contextlib.suppress(TransportError):  # who comes next finds out
            RawLane(server)
        until(lambda: len(server.fabrics) > 1, "the devices are opened again")
        server.ready()
        for fabric in network.fabrics:
            if fabric not in server.fabrics:
                fabric.close()
        with lane(server) as again:
            assert again.read(0, 8) == MAGIC.to_bytes(8, "little")


def test_the_worker_is_not_there_yet(network: FakeNetwork) -> None:
    with WorkerThread() as worker:
        worker.die()
        with EndpointThread(worker.path, network) as server:
            channel = server.channel()
            assert "worker is down" in str(refusal(lambda: channel.call(M.RdmaOpen(0)))) or not server.stats()["ready"]
            worker.start()
            server.ready()
            worker.die()
            assert isinstance(channel.call(M.RdmaOpen(0)), M.RdmaOpened), "what is registered stays"
            refused_with = refusal(lambda: channel.call(M.Grant([(64, 1)])))
            assert refused_with.status == Status.UNAVAILABLE
            channel.close()
            worker.start()


# --- bounds ----------------------------------------------------------------------------------------


def test_grants_are_bounded_for_a_lane_and_for_all(network: FakeNetwork) -> None:
    with WorkerThread(64 << 20) as worker, EndpointThread(worker.path, network) as server:
        server.ready()
        most = worker.store.granted_bytes_max
        total = most * endpoint_module.GRANTED_PERCENT // 100
        lanes = [RawLane(server) for _ in range(6)]
        held = []
        for mine in lanes:
            answer = mine.channel.submit(M.Grant([(64 << 10, 4000)]))
            frame = mine.channel.wait(answer)
            assert frame.status == Status.NO_SPACE
            held.append(mine.take(mine.channel.result(frame)))
            assert held[-1], "a lane that has none gets one at least"
            assert sum(grant.chunk for grant in held[-1]) <= total // endpoint_module.LANE_SHARE
        stats = server.stats()
        assert stats["granted_bytes"] <= total + 2 * (64 << 10) and granted(worker) <= most
        assert sum(map(len, held[:4])) > sum(map(len, held[4:]))
        assert len(lanes[0].grant(64)) == 0, "it holds its share"
        #: Those that have most were asked for some.
        lanes[0].channel.call(M.Ping(1))
        assert any(isinstance(push, M.Recall) and push.bytes > 0 for push in lanes[0].pushes)
        assert lanes[0].give_back(*held[0]) == len(held[0])
        assert len(lanes[5].grant(64 << 10, 3)) == 3, "room again"
        for mine in lanes:
            mine.close()


def test_a_lane_at_its_bound_gets_no_more_for_what_others_do_not_use(network: FakeNetwork) -> None:
    with WorkerThread(64 << 20) as worker, EndpointThread(worker.path, network) as server:
        total = worker.store.granted_bytes_max * endpoint_module.GRANTED_PERCENT // 100
        with lane(server.ready()) as mine, lane(server) as other:
            held = mine.grant(64 << 10, 4000)
            for turn in range(20):
                (one,) = other.grant(4096)
                other.write(one, b"1" * 4096)
                for wants in ([(4096, 4)], []):  # which leaves some in the endpoint's pool
                    other.give_back(*other.commit((digest_of(str(turn)), one, 4096), wants=wants)[1])
                held += mine.grant(64 << 10)
            assert sum(grant.chunk for grant in held) <= total // endpoint_module.LANE_SHARE
            session = server.endpoint.upstream.session
            assert session is not None and any(session.grants.values()), "nor are theirs given back for it"


def test_what_is_prepared_is_told_when_there_is_no_room_for_more(network: FakeNetwork) -> None:
    with WorkerThread(16 << 20) as worker, EndpointThread(worker.path, network) as server, lane(server.ready()) as mine:
        one, *_held = mine.grant(64 << 10, 4)
        mine.write(one, b"1" * 4096)
        assert mine.commit((digest_of("k"), one, 4096), wants=[(64 << 10, 8)])[0] == [OK]
        (prepared,) = server.do(lambda: [len(peer.context.prepared) for peer in server.endpoint.lanes])
        assert prepared > 1
        greedy = worker.session(ring=False)
        before = -1
        while len(greedy.pool(64 << 10)) > before:
            before = len(greedy.pool(64 << 10))
            greedy.ask([(64 << 10, 1)])
        assert len(mine.grant(64 << 10, 8)) == prepared, "and not given back for one of their kind"
        greedy.close()


def test_idle_lanes_are_asked_for_their_grants(server: EndpointThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "IDLE_S", 0.2)
    with lane(server) as mine:
        (one,) = mine.grant(4096)
        mine.write(one, b"1" * 4096)
        mine.commit((digest_of("1"), one, 4096), wants=[(4096, 3)])
        assert server.stats()["granted_bytes"] == 3 * 4096
        server.until(lambda stats: stats["granted_bytes"] == 0, "what the client was not told of is taken back")
        assert not mine.pushes
        (two,) = mine.grant(4096)
        server.until(lambda stats: stats["recalls"] == 1, "it is asked for what it knows of")
        time.sleep(0.4)
        assert server.stats()["recalls"] == 1, "once"
        mine.channel.poll_pushes()
        assert mine.pushes == [M.Recall(4096)]
        assert mine.give_back(two) == 1


def test_what_is_kept_for_clients_goes_back_when_none_asks(
    server: EndpointThread, worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "IDLE_S", 0.2)
    near, far = socket.socketpair()
    server.do(lambda: server.endpoint.adopt_supervisor(far))
    with lane(server) as mine:
        for number in range(3):
            one = mine.grant(4096)[0]
            mine.write(one, b"1" * 4096)
            mine.commit((digest_of(str(number)), one, 4096), wants=[(4096, 5)])
        assert granted(worker) > 5 * 4096, "more than the lane has"

    def asked() -> bool:
        near.sendall(encode(M.Stats(0), 1))  # as a supervisor does all the time
        assert near.recv(1 << 16)
        return granted(worker) == 0

    until(asked, "nobody keeps a grant")
    server.stop()
    near.close()


def test_the_workers_recall_goes_on_to_lanes(server: EndpointThread, worker: WorkerThread) -> None:
    with lane(server) as mine:
        mine.grant(4096, 4)
        with worker.frozen() as store:
            (session,) = [each for each in store.sessions.values() if each.granted_bytes]
            worker.worker._recall(session, 8192)
        server.until(lambda stats: stats["recalls"], "the recall is passed on")
        mine.channel.call(M.Ping(1))
        assert mine.pushes == [M.Recall(8192)]


def test_links_are_bounded(server: EndpointThread) -> None:
    with lane(server) as mine:
        for _ in range(LINKS_MAX - 1):
            answer = mine.connect(0, 0)
            assert mine.channel.call(M.RdmaDisconnect(answer.link)).items == 1
        with pytest.raises(TransportError, match="links"):
            mine.connect(0, 0)


def test_a_client_that_vanishes_is_found(server: EndpointThread) -> None:
    channel = server.channel()
    (peer,) = server.do(lambda: list(server.loop.peers))
    assert peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= STALL_S
    assert peer.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= STALL_S * 1000
    channel.close()


# --- what it is told -------------------------------------------------------------------------------


MALFORMED: dict[str, Any] = {
    "a rail that is not there": M.RdmaConnect(1, 0, bytes(16), 1, 1, 4096, 1),
    "an MTU that is none": M.RdmaConnect(0, 0, bytes(16), 1, 1, 1500, 1),
    "a grant of nothing": M.Grant([(0, 1)]),
    "a grant too large": M.Grant([(VALUE_BYTES_MAX + 1, 1)]),
    "too many grants": M.Grant([(64, BATCH_KEYS_MAX), (64, 1)]),
    "too many wants": M.Commit([], [(64, BATCH_KEYS_MAX + 1)]),
    "a mover's option": M.Commit([(bytes(16), 1, 1, 0, 0, M.ABSENT)], []),
    "too many entries": M.Commit([(bytes(16), 1, 1, 0, 0, 0)] * (BATCH_KEYS_MAX + 1), []),
    "a second HELLO": M.Hello(1, 1, 0, 0, 0, "default", "", []),
    "a FETCH": M.Fetch([]),
    "a DELETE": M.Delete([]),
    "a SHARDS": M.Shards(1, b"", b""),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed(what: str, server: EndpointThread) -> None:
    with lane(server) as mine:
        mine.grant(64)
        with pytest.raises(TransportError):
            mine.channel.call(MALFORMED[what])
        gone(mine)
        stats = server.until(lambda stats: not stats["lanes"], "the lane is closed")
        assert stats["protocol_errors"] == 1 and stats["handler_errors"] == 0 and stats["granted_bytes"] == 0
    with lane(server) as another:
        assert len(another.grant(64)) == 1


EARLY = (M.Grant([(64, 1)]), M.Commit([], []), M.ReturnGrants([1]), M.RdmaConnect(0, 0, bytes(16), 1, 1, 4096, 1))


@pytest.mark.parametrize("msg", EARLY, ids=lambda msg: type(msg).__name__)
def test_too_early(msg: Any, server: EndpointThread) -> None:
    for hello, text in ((False, "HELLO"), (True, "RDMA_OPEN")):
        channel = server.channel(hello=hello)
        assert channel.call(M.Ping(7)).cookie == 7
        with pytest.raises(TransportError, match=text):
            channel.call(msg)
        channel.close()


def test_the_token(worker: WorkerThread, network: FakeNetwork) -> None:
    with EndpointThread(worker.path, network, tokens=("one", "two")) as server:
        server.ready()
        server.channel("one").close()
        server.channel("two").close()
        for wrong in ("", "three", "on"):
            assert refusal(lambda wrong=wrong: server.channel(wrong)).status == Status.UNAUTHORIZED  # type: ignore[misc]


def test_an_end_that_no_device_can_reach(server: EndpointThread) -> None:
    with lane(server) as mine:
        refused_with = refusal(lambda: mine.channel.call(M.RdmaConnect(0, 0, b"\xff" * 16, 1, 1, 4096, 1)))
        assert refused_with.status == Status.UNAVAILABLE
        assert server.stats()["links"] == 1 == len(links_of(server)), "nothing is left of it"
        assert mine.read(0, 8) == MAGIC.to_bytes(8, "little"), "and the lane goes on"


def test_a_worker_that_does_not_answer(
    server: EndpointThread, worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lane(server) as mine:
        one, two = mine.grant(64, 2)
        mine.write(one, b"1" * 64)
        with worker.frozen():
            assert mine.commit((digest_of("1"), one, 64))[0] == [int(Status.UNAVAILABLE)], "an unknown outcome"
            assert mine.read(0, 8) == MAGIC.to_bytes(8, "little")
        assert mine.commit((digest_of("2"), two, 64))[0] == [STALE], "of a session that has ended"
        server.stats()


def test_streams_say_where_the_endpoint_is(worker: WorkerThread) -> None:
    with StreamThread(worker.path) as stream:
        hello = M.Hello(1, 1, M.Role.CLIENT, 0, 0, "default", "", [])
        channel = stream.channel(hello=False)
        assert channel.call(hello)[2:4] == (M.PathBit.TCP, 0)
        channel.close()
        stream.stream.rdma_port = 4711
        for role, paths, port in (
            (M.Role.CLIENT, M.PathBit.TCP | M.PathBit.RDMA, 4711), (M.Role.MOVER, M.PathBit.TCP, 0),
        ):  # fmt: skip
            channel = stream.channel(hello=False)
            assert channel.call(hello._replace(role=role))[2:4] == (paths, port)
            channel.close()


# --- by chance -------------------------------------------------------------------------------------


def test_by_chance_against_a_naive_twin(worker: WorkerThread) -> None:
    """Lanes come, take, write, commit, give back and vanish; what the twin says is stored is, and nothing else."""
    network = FakeNetwork(7, background=True)
    chance = random.Random(8)
    twin: dict[str, bytes] = {}
    with EndpointThread(worker.path, network, ("s0", "s1"), piece_bytes=1 << 20) as server:
        server.ready()
        lanes: list[RawLane] = []
        grants: dict[RawLane, list[Grant]] = {}
        for turn in range(400):
            what = chance.random()
            if len(lanes) < 2 or (what < 0.04 and len(lanes) < 4):
                mine = RawLane(server, chance.choice((((0, 0),), ((0, 0), (0, 1)))))
                lanes.append(mine)
                grants[mine] = []
                continue
            mine = chance.choice(lanes)
            held = grants[mine]
            if what < 0.08:
                lanes.remove(mine)
                mine.close()
            elif what < 0.3 or not held:
                held += mine.grant(chance.choice((64, 1000, 4096, 30_000)), chance.randrange(1, 4))
            elif what < 0.4:
                back = [held.pop(chance.randrange(len(held))) for _ in range(chance.randrange(1, len(held) + 1))]
                assert mine.give_back(*back) == len(back)
            else:
                entries = []
                for _ in range(chance.randrange(1, min(4, len(held)) + 1)):
                    grant = held.pop(chance.randrange(len(held)))
                    length = chance.randrange(1, grant.chunk + 1)
                    value = chance.randbytes(8) * (length // 8 + 1)
                    mine.write(grant, value[:length], chance.choice([n for n, key in enumerate(grant.keys) if key]))
                    entries.append((f"key{chance.randrange(40)}", grant, value[:length]))
                statuses, fresh = mine.commit(
                    *((digest_of(key), grant, len(value)) for key, grant, value in entries),
                    wants=[(chance.choice((64, 4096)), chance.randrange(3))],
                )
                held += fresh
                assert statuses == [OK] * len(entries)
                twin.update({key: value for key, _, value in entries})
            server.stats()
            if turn % 40 == 0:
                for key in [f"key{number}" for number in range(40)]:
                    assert stored(worker, key) == twin.get(key)
        for mine in lanes:
            mine.close()
        server.until(lambda stats: not stats["lanes"], "all are closed")
    assert granted(worker) == 0
    all_closed(network)


def test_checks_find_what_is_wrong(server: EndpointThread) -> None:
    with lane(server) as mine, lane(server) as other:
        mine.grant(64, 2)
        other.grant(64)
        one, two = server.do(lambda: [peer.context for peer in server.endpoint.lanes])
        server.stats()

        def wrong(change: Callable[[], None], undo: Callable[[], None]) -> None:
            def call() -> None:
                change()
                try:
                    with pytest.raises(CorruptionError):
                        server.endpoint.check()
                finally:
                    undo()
                server.endpoint.check()

            server.do(call)

        def add(where: Any, name: str, by: int) -> Callable[[], None]:
            return lambda: setattr(where, name, getattr(where, name) + by)

        wrong(add(one, "granted_bytes", 64), add(one, "granted_bytes", -64))
        wrong(add(server.endpoint, "granted_bytes", 64), add(server.endpoint, "granted_bytes", -64))
        held = next(iter(one.grants.values()))
        wrong(add(held, "offset", 64), add(held, "offset", -64))
        theirs = next(iter(two.grants.values()))
        wrong(lambda: two.grants.update({7: held}), lambda: two.grants.__delitem__(7))
        wrong(held.session.begin_copy, held.session.end_copy)
        cover = held.covers[0]
        wrong(lambda: held.covers.clear(), lambda: held.covers.update({0: cover}))
        link = one.links[0]
        wrong(lambda: one.links.__setitem__(0, None), lambda: one.links.__setitem__(0, link))
        assert theirs.offset != held.offset


def test_too_many_regions_are_refused(worker: WorkerThread, network: FakeNetwork) -> None:
    session = worker.session(ring=False)
    rails = network.fabric(["x"]).rails
    with pytest.raises(FabricError, match="at a time"):
        limits = rails[0].limits
        rails[0].limits = limits._replace(region_bytes=100)
        Registration(session.reader, rails, windows=True)
    rails[0].limits = limits
    assert Registration(session.reader, rails, windows=True, piece_bytes=4096)._most[0] >= 4096
    session.close()
