"""The arena's registration with devices: pieces, windows, devices that come and go."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.layout import MAGIC, Word
from simm.arena.reader import ArenaReader
from simm.errors import TransportError
from simm.net.channel import Refused
from simm.rdma.api import Absence, Fabric, FabricError
from simm.rpc import Connection, decode, encode
from simm.server import rdma_devices as devices_module
from simm.server.rdma_devices import ArenaGone, ArenaRegions, map_meta, pieces
from simm.server.rdma_supervisor import Endpoints, EndpointState
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire.messages import Status
from tests.support.endpoint_checks import OK, digest_of, gone, granted, stored
from tests.support.endpoint_thread import EndpointThread, RawConnection, connection, refusal
from tests.support.fake_fabric import FakeNetwork, FakeRail, all_closed
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

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
                assert piece.start % 4096 == 0
                for page in range(piece.start >> 12, piece.start + piece.length + 4095 >> 12):
                    covered[page] += 1
            ledger = range(geometry.ledger_offset >> 12, geometry.data_offset >> 12)
            assert [page for page, count in enumerate(covered) if count != 1] == list(ledger), "once, but the ledger"
    session.close()


def test_issue_an_arena_that_was_made_anew_by_the_same_name_is_another_one(worker: WorkerThread) -> None:
    """Both have the first incarnation: the new one's entries would have been registered with the old one's data."""
    session = worker.session(ring=False)
    reader = session.reader
    words = {Word.GENERATION: int(reader.words[Word.GENERATION]) ^ 1}
    old = SimpleNamespace(name=reader.name, geometry=reader.geometry, words=words, incarnation=reader.incarnation)
    with pytest.raises(ArenaGone, match="another arena"):
        map_meta(old)  # type: ignore[arg-type]
    session.close()


def test_the_arena_is_registered_in_pieces_between_turns(worker: WorkerThread, network: FakeNetwork) -> None:
    asking = threading.Event()

    def refuse(what: str, _rail: FakeRail) -> str:
        if what == "register":  # which takes time: somebody asks meanwhile, as soon as he has been answered
            asking.wait(1.0)
            time.sleep(0.02)
        return ""

    network.refuse = refuse
    with EndpointThread(worker.path, network, piece_bytes=1 << 20) as server:
        channel = server.channel()
        seen = []
        opened = None
        while opened is None:
            asking.set()
            try:
                opened = channel.call(R.RdmaOpen(0))
            except Refused as exc:
                asking.clear()
                assert exc.status == Status.UNAVAILABLE
                seen.append(str(exc))
        channel.close()
        network.refuse = lambda what, rail: ""
        known = [text for text in dict.fromkeys(seen) if text.startswith("registering, ")]
        assert len(known) >= 3 and known == sorted(known, key=lambda text: int(text.split()[1])), "answered in between"
        assert max(region.length for region in opened.regions) == 1 << 20
        with connection(server) as mine:  # across the ends of pieces
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
        with connection(server.ready(), ((0, 0), (1, 1)), buffer=4 << 20) as mine:
            regions = sum(len(rail.regions) for rail in server.fabrics[0].fakes)
            for number in range(3):
                (grant,) = mine.grant(1_500_000)
                value = bytes([number + 1]) * 1_500_000
                mine.write(grant, value, number % 2)
                assert mine.commit((digest_of(f"v{number}"), grant, 1_500_000))[0] == [OK]
                assert stored(worker, f"v{number}") == value
            assert sum(len(rail.regions) for rail in server.fabrics[0].fakes) == regions, "bridges go with the grants"
            mine.grant(1_500_000)
        server.until(lambda stats: not stats["rdma_connections"], "closed")
        assert sum(len(rail.regions) for rail in server.fabrics[0].fakes) == regions


def test_a_chunk_longer_than_any_region_is_not_granted() -> None:
    network = FakeNetwork(3, region_bytes=1 << 20, background=True)
    with WorkerThread(64 << 20) as worker:
        with EndpointThread(worker.path, network) as server, connection(server.ready()) as mine:
            assert mine.grant(3 << 20) == [] and len(mine.grant(4096)) == 1
            assert server.stats()["rdma_connections"] == 1
            assert granted(worker) == 4096, "the worker has it back"
    all_closed(network)


def test_no_windows_left(worker: WorkerThread) -> None:
    network = FakeNetwork(4, windows=3, background=True)
    with EndpointThread(worker.path, network) as server, connection(server.ready()) as mine:
        kept = mine.grant(64, 2)
        assert len(kept) == 2 and mine.grant(64, 2) == [], "one is left"
        (third,) = mine.grant(64)
        mine.write(third, b"3" * 64)
        assert mine.commit((digest_of("3"), third, 64))[0] == [OK]
        assert mine.return_grants(*kept) == 2 and len(mine.grant(64, 3)) == 3, "they are used again"
    all_closed(network)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside others"])
def test_idle_windows_of_one_link_are_not_kept_from_others(worker: WorkerThread, others: bool) -> None:
    """Other processes may have windows of the device, too: there are fewer left than it has."""

    def refuse(what: str, rail: FakeRail) -> str:
        return "out of memory" if others and what == "window" and len(rail.windows) >= 8 else ""

    network = FakeNetwork(4, windows=16 if others else 8, background=True, refuse=refuse)
    with EndpointThread(worker.path, network) as server, connection(server.ready()) as one, connection(server) as two:
        for mine in (one, two, one):
            grants = mine.grant(64, 6)
            assert len(grants) == 6, "they are not used by anybody now"
            for grant in grants:
                mine.write(grant, b"v" * 64)
            assert mine.commit(*((digest_of(str(grant.number)), grant, 64) for grant in grants))[0] == [OK] * 6
            assert server.stats()["windows"] <= 8
        kept = one.grant(64, 6)
        assert two.grant(64, 3) == [] and len(two.grant(64, 2)) == 2, "those that are used stay where they are"
        assert one.return_grants(*kept) == 6
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
        refused_with = refusal(lambda: channel.call(R.RdmaOpen(0)))
        assert refused_with.status == Status.UNAVAILABLE
        stats = server.until(lambda stats: "locked memory" in stats["reason"], "the next try gets further")
        assert not stats["ready"] and stats["opens_failed"] >= 3
        assert "ulimit -l" in str(refusal(lambda: channel.call(R.RdmaOpen(0))))
        network.memlock = 1 << 50
        server.ready()
        assert isinstance(channel.call(R.RdmaOpen(0)), R.RdmaOpened), "on the same connection"
        channel.close()
    for fabric in network.fabrics:
        assert not any(rail.regions for rail in fabric.fakes)


def test_issue_a_registration_that_fails_again_and_again_says_why(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes minutes, in which the endpoint said no more than that it is registering. Nothing alerted to it."""
    monkeypatch.setattr(devices_module, "REOPEN_S", 0.01)
    seen: list[str | None] = []

    def refuse(what: str, rail: FakeRail) -> str:
        if what == "register":
            seen.append(server.endpoint.devices.down_reason)
            return "too much" if len(rail.regions) == 3 else ""
        return ""

    with EndpointThread(worker.path, network, piece_bytes=1 << 20) as server:
        server.ready()
        network.refuse = refuse
        server.do(lambda: server.endpoint.devices._lost("gone", failed=False))
        server.until(lambda stats: stats["opens_failed"] >= 3, "it has failed")
        network.refuse = lambda what, rail: ""
        assert server.ready().endpoint.devices.down_reason is None
        said = list(dict.fromkeys(seen))
        assert said[0] == "registering" and len(said) == 2, said
        assert said[1] is not None and said[1].startswith("registering again after: ") and "too much" in said[1]


def test_the_device_goes(worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "REOPEN_S", 0.05)
    with EndpointThread(worker.path, network) as server:
        server.ready()
        mine = RawConnection(server)
        mine.grant(4096)
        network.gone(server.fabrics[0].rails[0])
        gone(mine)
        server.until(lambda stats: not stats["rdma_connections"], "its connection is closed")
        wait_until(lambda: granted(worker) == 0, "and its grant is back")
        mine.close()
        with contextlib.suppress(TransportError):  # the next call finds out
            RawConnection(server)
        wait_until(lambda: len(server.fabrics) > 1, "the devices are opened again")
        server.ready()
        for fabric in network.fabrics:
            if fabric not in server.fabrics:
                fabric.close()
        with connection(server) as again:
            assert again.read(0, 8) == MAGIC.to_bytes(8, "little")


def test_the_worker_is_not_there_yet(network: FakeNetwork) -> None:
    with WorkerThread() as worker:
        worker.die()
        with EndpointThread(worker.path, network) as server:
            channel = server.channel()
            assert "worker is down" in str(refusal(lambda: channel.call(R.RdmaOpen(0)))) or not server.stats()["ready"]
            worker.start()
            server.ready()
            worker.die()
            assert isinstance(channel.call(R.RdmaOpen(0)), R.RdmaOpened), "what is registered stays"
            refused_with = refusal(lambda: channel.call(M.Grant([(64, 1)])))
            assert refused_with.status == Status.UNAVAILABLE
            channel.close()
            worker.start()


def replace(worker: WorkerThread, other: WorkerThread) -> None:
    """Have the worker die, and come back with the other one's arena."""
    other.die()
    worker.die()
    other.path = worker.path
    other.start()


def test_issue_another_arena_is_no_failure_of_the_devices(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--rdma on`` the server would end, if it comes while the first one is registered."""
    step, mapped = ArenaRegions.step, devices_module.map_meta
    names: list[str] = []
    begun = threading.Event()

    def stepping(self: ArenaRegions) -> bool:
        """Register nothing of the first arena."""
        if self.arena.name != names[0]:
            return step(self)
        begun.set()
        return True

    def mapping(arena: ArenaReader) -> Any:
        """Map each arena, but the second one at the second try."""
        names.append(arena.name)
        if len(names) == 2:
            raise ArenaGone("its segment has been removed")
        return mapped(arena)

    monkeypatch.setattr(ArenaRegions, "step", stepping)
    monkeypatch.setattr(devices_module, "map_meta", mapping)
    monkeypatch.setattr(devices_module, "REOPEN_S", 0.05)
    gave_up: list[str] = []
    supervisor = Endpoints(
        SimpleNamespace(rdma="on"), None, None, on_ready=lambda: None, give_up=gave_up.append  # type: ignore[arg-type]
    )
    state = EndpointState(0, None)  # type: ignore[arg-type]

    def told(stats: dict[str, Any]) -> bool:
        supervisor._on_message(state, M.StatsReply(json.dumps({**stats, "counted": {}}).encode()), 0)
        return bool(stats["ready"])

    with WorkerThread() as other, EndpointThread(worker.path, network, piece_bytes=1 << 20) as server:
        assert begun.wait(120.0)
        replace(worker, other)
        assert server.until(told, "ready")["opens_failed"] == 0
        assert len(set(names)) == 2 and names[1] == names[2] and not gave_up and state.was_ready


def test_issue_an_arena_of_many_regions_can_be_opened(network: FakeNetwork) -> None:
    """More than a list of a message has unless it says so."""
    with (
        WorkerThread(8 << 20) as worker,
        EndpointThread(worker.path, network, [f"s{number}" for number in range(11)], piece_bytes=16_384) as server,
        contextlib.closing(server.ready().channel()) as channel,
    ):
        opened = channel.call(R.RdmaOpen(0))
        registration = server.endpoint.devices.registration
        assert registration is not None and opened.regions == registration.regions and len(opened.regions) > 4097


def test_an_answer_has_room_for_all_regions() -> None:
    rails = [R.RdmaRail(bytes(16), 0, 4096, 16, "r" * 64)] * 64
    regions = [R.RdmaRegion(0, 0, 1 << 40, 1 << 30, 1 << 47, 7)] * R.RDMA_REGIONS_MAX
    opened = R.RdmaOpened(1 << 44, 1, 0, rails, regions)
    frames = Connection()
    frames.receive_data(encode(opened))
    frame = frames.next_frame()
    assert frame is not None and decode(frame) == opened


def test_issue_the_worker_comes_back_with_another_arena(
    worker: WorkerThread, network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint lets go of the old one, and registers it at once: no device has failed."""
    monkeypatch.setattr(devices_module, "REOPEN_S", 3600.0)
    with WorkerThread() as other, EndpointThread(worker.path, network) as server:
        mine = RawConnection(server.ready())
        mine.grant(4096)
        old = mine.opened.incarnation
        replace(worker, other)
        gone(mine)
        mine.close()
        server.until(lambda stats: stats["ready"] and not stats["granted_bytes"], "the other arena is registered")
        assert not any(rail.regions or rail.windows for rail in server.fabrics[0].fakes), "the old one is not pinned"
        with connection(server) as again:
            assert again.opened.incarnation == other.store.incarnation != old
            (grant,) = again.grant(64)
            again.write(grant, b"n" * 64)
            assert again.commit((digest_of("n"), grant, 64))[0] == [OK] and stored(other, "n") == b"n" * 64
        assert len(server.fabrics) == 2, "and stays open"


@pytest.mark.parametrize("windows", [True, False])
def test_issue_nothing_of_another_arena_is_granted(worker: WorkerThread, network: FakeNetwork, windows: bool) -> None:
    """Before the endpoint's next upkeep: the client would write into the old arena, and commit what it never wrote."""
    with WorkerThread() as other, EndpointThread(worker.path, network, windows=windows) as server:
        devices, keeper = server.ready().endpoint.devices, server.endpoint.keeper
        upkeep = devices.maintain
        devices.maintain = lambda in_use: None  # type: ignore[method-assign]
        mine = RawConnection(server)
        (grant,) = mine.grant(64)
        replace(worker, other)
        wait_until(lambda: server.do(lambda: keeper.worker() and not devices.has(keeper.reader)), "the other one")
        assert mine.grant(64) == [] and granted(other) == 0
        assert mine.commit((digest_of("k"), grant, 64), wants=[(64, 1)]) == ([Status.STALE_GRANT], [])
        assert mine.commit() == ([], []), "none was made ahead"
        channel = server.channel()
        assert "another arena" in str(refusal(lambda: channel.call(R.RdmaOpen(0))))
        devices.maintain = upkeep  # type: ignore[method-assign]
        gone(mine)
        mine.close()
        server.ready()
        assert channel.call(R.RdmaOpen(0)).incarnation == other.store.incarnation
        channel.close()


def test_too_many_regions_are_refused(worker: WorkerThread, network: FakeNetwork) -> None:
    session = worker.session(ring=False)
    rails = network.fabric(["x"]).rails
    with pytest.raises(FabricError, match="at a time"):
        limits = rails[0].limits
        rails[0].limits = limits._replace(region_bytes=100)
        ArenaRegions(session.reader, rails, windows=True)
    rails[0].limits = limits
    assert ArenaRegions(session.reader, rails, windows=True, piece_bytes=4096)._most[0] >= 4096
    session.close()
