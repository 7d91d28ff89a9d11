"""The RDMA path of a client end to end, against a real worker, stream and endpoint, on a network in software."""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.arena.reader import ArenaReader
from simm.constants import VALUE_BYTES_MAX
from simm.errors import DeadlineError, TransportError, UsageError
from simm.kv import BlockView, Store, deregister_mr, register_mr, set_flag
from simm.rdma import registration
from simm.rdma.api import Absence, FabricError
from simm.sdk import rdma_connection, worker_path
from simm.sdk.batch import NoValue
from simm.sdk.rdma_connection import RdmaConnection
from simm.sdk.tcp import TcpPath
from simm.server import rdma_lease
from tests.support.client_checks import check_staging
from tests.support.consistency import check
from tests.support.dose import dose, dosed
from tests.support.fake_cluster import ALL
from tests.support.fake_rdma_cluster import FakeRdmaCluster, leave_alone, path_of, until_rdma
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("nothing_retired")


def bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


SIZES = [1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 65_536, MIB - 1, MIB, MIB + 1, 3 * MIB + 5]


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("rails", [1, 2])
def test_all_sizes_there_and_back(monkeypatch: pytest.MonkeyPatch, windows: bool, rails: int) -> None:
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=names, size=64 * MIB, windows=windows) as cluster:
        client = cluster.rdma()
        for size in SIZES:
            value = bytes_of(size, size)
            source = client.register(bytearray(value))
            assert client.put(f"r{size}", source)
            assert client.put(f"u{size}", value)
            sink = client.register(np.zeros(size + 3, np.uint8))
            plain = bytearray(size + 3)
            for key in (f"r{size}", f"u{size}"):
                for _ in range(2):  # by its sets, then by its place
                    assert client.get(key) == value
                    sink.view()[:] = bytes(size + 3)
                    assert client.get_into(key, sink) == size
                    assert bytes(sink.view()) == value + bytes(3)
                    assert client.get_into(key, plain) == size
                    assert plain[:size] == value
        stats = client.stats()
        assert stats["rdma_puts"] == 2 * len(SIZES) == stats["puts"]
        assert stats["rdma_gets"] == 12 * len(SIZES) == stats["hits"]
        assert stats["rdma_fallbacks"] == 0


def test_batches_of_all_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mix registered and other memory, small and large values, hits and misses, a short buffer, and one key twice."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB, piece_bytes=3 * MIB) as cluster:
        client = cluster.rdma()
        rng = random.Random(7)
        sizes = [rng.choice([1, 100, 4096, 70_000, 300_000, 1_200_000]) for _ in range(70)]
        values = [bytes_of(number, size) for number, size in enumerate(sizes)]
        keys = [f"k{number}" for number in range(70)]
        sources = [client.register(bytearray(value)) if number % 2 else value for number, value in enumerate(values)]
        assert client.put_many([*keys, "twice", "twice"], [*sources, b"old", b"new"]) == [True] * 72
        assert client.get("twice") == b"new"
        assert client.put("large", bytes(70_000))
        for _ in range(2):
            assert client.get_many([*keys, "nothing"]) == [*values, None]
            buffers: list[Any] = [
                client.register(bytearray(size)) if number % 3 else bytearray(size) for number, size in enumerate(sizes)
            ]
            got = client.get_into_many([*keys, "nothing"], [*buffers, bytearray(5)])
            assert got == [*sizes, None]
            for value, buffer in zip(values, buffers):
                assert bytes(buffer.view() if not isinstance(buffer, bytearray) else buffer) == value
        assert client.exists_many([*keys, "nothing"]) == [True] * 70 + [False]
        with pytest.raises(UsageError, match="does not fit"):
            client.get_into("large", client.register(bytearray(69_999)))
        small = bytearray(b"\xee" * 50)
        assert client.get_digests([client.digest("large")], [memoryview(small)]) == [NoValue.TOO_SMALL]
        assert small == b"\xee" * 50
        assert client.delete_many([keys[0], "nothing"]) == [True, False]
        assert client.get(keys[0]) is None
        assert not client.exists(keys[0])
        assert client.counters["rdma_fallbacks"] == 0
        view = client.view(keys[1])
        assert view
        assert bytes(view.data) == values[1]


@pytest.mark.full
def test_values_of_any_size_at_once_through_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the largest value, into registered and other memory, over two queue pairs and through two staging blocks."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=256 * MIB, pieces=8) as cluster:
        client = cluster.rdma(deadline_s=600.0)  # RDMA has half of it, for values that a thread copies by pieces
        path_of(client).staging._limit = 2
        value = bytes_of(1, VALUE_BYTES_MAX)
        assert client.put("u", value)
        source = client.register(value)
        assert not source.writable
        assert client.put("r", source)
        sink = client.register(bytearray(VALUE_BYTES_MAX))
        for key in "ur":
            assert client.get(key) == value
            assert client.get_into(key, sink) == VALUE_BYTES_MAX
            assert sink.view() == value
        assert client.counters["rdma_gets"] == 4
        check_staging(path_of(client).staging)


@pytest.mark.parametrize("windows", dose([True, False], quick=1))
def test_more_sizes_than_the_arena_has_slabs(monkeypatch: pytest.MonkeyPatch, windows: bool) -> None:
    """An unused grant occupies a slab and must not prevent a put."""
    with FakeRdmaCluster(monkeypatch, size=16 * MIB, windows=windows) as cluster:
        with cluster.rdma() as client, cluster.rdma() as other:
            for count in dosed((20, 60, 100), quick=(100,)):
                keys = [f"{count} {key}" for key in range(count)]
                values = [bytes_of(key, 1 + 397 * key) for key in range(count)]
                assert all(client.put_many(keys, values))
                assert all([client.put(key, value) for key, value in zip(keys, values)])  # noqa: C419
                assert client.counters["rdma_fallbacks"] == 0
                got = client.get_many(keys)
                assert any(got) and all(each in (None, value) for each, value in zip(got, values))
            # What the other keeps for values to come is asked back, and until then some may find no room.
            other.put_many(keys, values)
            wait_until(lambda: all(other.put_many(keys, values)), "all find room")
            cluster.node.endpoint.call(lambda: check(cluster.node.endpoint.endpoint))


def test_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.rdma(checksum=True)
        for size in (100, 100_000, 3 * MIB):
            value = bytes_of(size, size)
            assert client.put("u", value)
            assert client.put("r", client.register(bytearray(value)))
            sink = client.register(bytearray(size))
            for key in "ur":
                assert client.get(key) == value
                assert client.get_into(key, sink) == size
                reader = ArenaReader(cluster.node.worker.segment.name)
                found = reader.locate(client.digest(key))
                assert found is not None
                reader.value(found)[size // 2] ^= 1
                assert client.get(key) is None
                assert client.get_into(key, sink) is None
                assert client.get_into(key, bytearray(size)) is None
        assert client.counters["crc_errors"] == 18 // 2 * 2


def test_overwritten_deleted_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached slot offset may be stale: the client finds the current value, or a miss."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client, other = cluster.rdma(), cluster.client("shm")
        sink = client.register(bytearray(10_000))
        for number in range(5):
            value = bytes_of(number, 9000 + number)
            assert other.put("k", value)
            assert client.get_into("k", sink) == len(value)
            assert bytes(sink.view()[: len(value)]) == value
            assert client.get("k") == value
        assert client.counters["rdma_retries"] == 4
        assert other.delete("k")
        assert client.get("k") is None
        assert not client.exists("k")
        for number in range(300):  # more than there is room for
            assert client.put(f"e{number}", bytes_of(number, 80_000))
        found = 0
        for number in range(300):
            got = client.get(f"e{number}")
            assert got is None or got == bytes_of(number, 80_000)
            found += got is not None
        assert 50 < found < 300
        assert client.counters["rdma_fallbacks"] == 0


def test_what_is_used_is_marked_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert client.put("k", b"value")
        assert client.put("e", b"value")
        reader = ArenaReader(cluster.node.worker.segment.name)

        def marked(slot: int) -> bool:
            return reader.visited[slot] == 1

        for key, use in (("k", client.get), ("e", client.exists)):
            found = reader.locate(client.digest(key))
            assert found is not None
            slot = found.slot
            for _ in range(2):
                reader.visited[slot] = 0
                assert use(key)
                wait_until(functools.partial(marked, slot), "the visited byte is stored")
                reader.visited[slot] = 0
                assert use(key)
                assert reader.visited[slot] == 0  # at most once a second
                path_of(client).locations.get(client.digest(key)).touched -= 2.0  # type: ignore[union-attr]


def test_a_moving_shard_is_for_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """For shards that are frozen, absent or moving in, the client asks by TCP and finds each value where it is."""
    with FakeRdmaCluster(monkeypatch, 2) as cluster:
        cluster.settled({0: ALL})
        client = cluster.rdma()
        values = {f"k{number}": bytes_of(number, 500) for number in range(40)}
        assert all(client.put(key, value) for key, value in values.items())
        assert client.get_many(list(values)) == list(values.values())
        cluster.own({1: ALL}, previous=0)
        cluster.instruct()
        cluster.nodes[0].freeze(cluster.epoch, ALL)
        assert client.get("k0") in (None, values["k0"])  # it has the old map: a miss is allowed, its place is refuted
        cluster.publish()
        cluster.nodes[1].adopt(cluster.epoch, ALL)
        wait_until(lambda: client.stats()["epoch"] == cluster.epoch, "the map is there")
        until_rdma(client)
        assert client.get_many(list(values)) == list(values.values())
        assert client.exists_many([*values, "nothing"]) == [True] * 40 + [False]
        assert client.counters["moved"] > 0
        assert client.put("k1", b"newer")
        assert client.get("k1") == b"newer"
        cluster.nodes[1].finish(cluster.epoch, ALL)
        cluster.forget_previous()
        cluster.instruct()
        cluster.publish()
        assert client.get("k1") == b"newer"


def test_a_path_that_is_not_named_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.client("rdma")
        assert client.put("k", b"value")
        assert client.get("k") == b"value"
        assert client.stats()["workers"][0]["path"] == "rdma"
        target = next(iter(client._router.targets.values()))  # type: ignore[union-attr]
        monkeypatch.setattr(TcpPath, "store", None)
        target.rdma.drop("for a test")  # type: ignore[union-attr]
        target.rdma.backoff.retry_at = float("inf")  # type: ignore[union-attr]
        assert client.stats()["workers"][0]["path"] == "down"
        assert client.get("k") is None
        assert not client.put("k", b"other")
        assert not client.delete("k")
        assert client.counters["outages"] > 0
        target.rdma.backoff.retry_at = 0.0  # type: ignore[union-attr]
        until_rdma(client)
        assert client.get("k") == b"value"
        assert client.delete("k")
        both = cluster.client("shm,rdma")
        assert both.get("k") is None
        assert both.stats()["workers"][0]["path"] == "shm"
        only = cluster.client("tcp")
        assert only.get("k") is None
        worker = only.stats()["workers"][0]
        assert (worker["path"], worker["reason"]) == ("tcp", "path=tcp was asked for")
        assert [len(fabric.rails) for fabric in cluster.fabrics] == [1]  # opened by the one that needs it


def test_an_outage_of_rdma_is_one_warning_and_its_end_another_where_there_is_no_other_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each put failed without one, and after an outage of the server it was said to answer again, "by down"."""

    def said() -> list[str]:
        messages = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        return [each for each in messages if " is down, its puts fail" in each or " answers again" in each]

    monkeypatch.setattr(worker_path, "UPGRADE_S", (0.0, 0.0))
    with FakeRdmaCluster(monkeypatch) as cluster:
        stream = cluster.node.stream.stream
        stream.rdma_port = 0
        client = cluster.client("rdma")
        assert not client.put("k", b"value")
        target = next(iter(client._router.targets.values()))  # type: ignore[union-attr]
        target.tcp_lost(target.tcp, "for a test")  # type: ignore[arg-type]
        wait_until(lambda: target.tcp is not None, "TCP is back, without RDMA")
        assert ["RDMA: the server offers none" in each for each in said()] == [True], said()
        stream.rdma_port = cluster.node.endpoint.port
        wait_until(lambda: len(said()) == 2, "RDMA is up")
        assert " answers again, by rdma, after " in said()[1] and client.put("k", b"value")
        monkeypatch.setattr(target.rdma, "wants_connection", lambda _now: False)
        target.rdma.drop("for a test")  # type: ignore[union-attr]
        wait_until(lambda: len(said()) == 3, "that is an outage, too")
        assert "RDMA: for a test" in said()[2] and not client.put("k", b"other")
        monkeypatch.delattr(target.rdma, "wants_connection")
        wait_until(lambda: len(said()) == 4, "RDMA is back")
        assert " answers again, by rdma, after " in said()[3]


def test_why_not_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        monkeypatch.setattr(registration, "opener", lambda devices: Absence(f"no device {devices}", "buy one"))
        client = cluster.client("rdma,tcp", rdma_devices="mlx9_9")
        assert client.put("k", b"value")
        assert client.get("k") == b"value"
        wait_until(lambda: "buy one" in client.stats()["workers"][0]["reason"], "the reason is told")
        why = client.stats()["workers"][0]["reason"]
        assert client.stats()["workers"][0]["path"] == "tcp"
        assert "no device mlx9_9: buy one" in why
        cluster.node.stream.stream.rdma_port = 0
        without = cluster.client("rdma,tcp")
        assert without.get("k") == b"value"
        assert "RDMA: the server offers none" in without.stats()["workers"][0]["reason"]


def test_kv_blocks_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        manager = cluster.manager.address
        set_flag("cm_primary_node_ip", manager[0])
        set_flag("cm_primary_node_port", str(manager[1]))
        monkeypatch.setenv("SIMM_PATH", "rdma,tcp")
        monkeypatch.setenv("SIMM_RDMA_DEVICES", "")
        pool = np.zeros(4 * MIB, np.uint8)
        with Store() as store:
            until_rdma(store._client)  # type: ignore[arg-type]
            mr = register_mr(pool)
            assert mr is not None
            address = pool.ctypes.data
            pages = [BlockView.from_buffer(address + at * 65_536, 65_536, mr) for at in range(32)]
            outside = np.zeros(100, np.uint8)
            stranger: Any = BlockView.from_buffer(outside.ctypes.data, 100, mr)._piece
            assert stranger.registration is None
            own: Any = pages[0]._piece
            assert own.registration is mr._span.registration is not None
            pool[:] = np.frombuffer(bytes_of(3, pool.size), np.uint8)
            before = pool.copy()
            keys = [f"p{number}" for number in range(32)]
            cluster.network.posted = []
            assert store.mput(keys, pages) == [0] * 32
            pool[:] = 0
            assert store.mget(keys, pages) == [65_536] * 32
            assert (pool[: 32 * 65_536] == before[: 32 * 65_536]).all()
            locals_ = {op[1] for qp, ops in cluster.network.posted for op in ops if op[3] >= 65_536}
            assert locals_ == {address + at * 65_536 for at in range(32)}, "not one byte went through staging blocks"
            block = store.allocate(1000)
            assert store.get("p0", block.view()) < 0
            big = store.allocate(65_536)
            assert store.get("p0", big.view()) == 65_536
            assert (big.as_ref() == before[:65_536]).all()
            assert deregister_mr(mr)
            assert not deregister_mr(mr)
            pool[:] = 0
            assert store.mget(keys, pages) == [65_536] * 32
            assert (pool[: 32 * 65_536] == before[: 32 * 65_536]).all()
        set_flag("cm_primary_node_ip", "")


def test_memory_that_cannot_be_registered_goes_through_the_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB) as cluster:
        client = cluster.rdma()
        value = bytes_of(1, 3 * MIB)
        assert client.put("warm", bytes(8 * MIB))  # the pool is there from now on, with all rails
        leave_alone(path_of(client))
        cluster.network.refuse = lambda what, rail: "no more memory" if what == "register" else ""
        source, sink = client.register(bytearray(value)), client.register(bytearray(len(value)))
        for key, size in (("large", len(value)), ("small", 5000)):
            assert client.put(key, source.part(0, size))
            for _ in range(2):
                assert client.get_into(key, sink.part(0, size)) == size
                assert bytes(sink.view()[:size]) == value[:size]
                sink.view()[:] = bytes(len(value))
        assert client.counters["rdma_puts"] == 3
        assert client.counters["rdma_gets"] == 4
        assert "no more memory" in caplog.text


def test_dropped_registrations_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = cluster.rdma()
        assert client.put("k", b"x" * 5000)
        path = path_of(client)
        leave_alone(path)
        rail = cluster.fabrics[0].fakes[0]
        before = len(rail.regions)
        sink = client.register(bytearray(5000))
        assert client.get_into("k", sink) == 5000
        assert len(rail.regions) == before + 1
        client.deregister(sink)
        client.deregister(sink)
        assert len(rail.regions) == before
        assert client.get_into("k", sink) == 5000
        assert sink.view() == b"x" * 5000
        sink = client.register(bytearray(5000))
        assert client.get_into("k", sink) == 5000
        del sink, path.maintain
        wait_until(lambda: len(rail.regions) <= before + 4, "what nothing refers to is deregistered")
        wait_until(lambda: all(region.length != 5000 for region in rail.regions), "and by the background")


def test_two_clients_share_one_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        first, second = cluster.rdma(), cluster.rdma()
        span = first.register(bytearray(b"y" * 3000))
        assert first.put("a", span)
        assert second.put("b", span)
        assert len(cluster.fabrics) == 1
        rail = cluster.fabrics[0].fakes[0]
        assert sum(region.length == 3000 for region in rail.regions) == 1
        first.close()
        assert second.get("a") == b"y" * 3000
        assert rail.queue_pairs
        second.close()
        assert not rail.queue_pairs
        assert not rail.regions
        third = cluster.rdma()
        assert len(cluster.fabrics) == 2
        sink = bytearray(3000)
        assert third.get_into("b", sink) == 3000
        assert third.put("c", span)  # registered anew, with the new fabric
        assert third.get("c") == b"y" * 3000


@pytest.mark.parametrize("working", [7, 0])
def test_one_of_many_rails_that_works_is_found(monkeypatch: pytest.MonkeyPatch, working: int) -> None:
    """The endpoint ends a connection that asks for a 65th pair, and the rails in vain could use up twice as many."""
    monkeypatch.setattr(rdma_lease, "ARP_ANSWER_S", 0.0)
    names = [f"s{number}" for number in range(16)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=[f"c{number}" for number in range(8)]) as cluster:
        client = cluster.rdma(deadline_s=30.0)
        path = path_of(client)
        rails = cluster.fabrics[0].fakes
        cluster.network.silent.update(rail.gid for number, rail in enumerate(rails) if number != working)
        path._failed.clear()
        path.drop("again")
        until_rdma(client)
        connection = path.acquire(time.monotonic() + WAIT_S)
        assert [link.rail.name for link in connection.links] == [f"c{working}"]
        assert client.put("k", b"value") and client.get("k") == b"value" and not connection.broken
        path.release(connection)


@pytest.mark.parametrize(
    ("reaches", "vain_s", "most"),
    [({7: range(16)}, 30, 1), ({0: range(16)}, 30, 1), ({0: [2], 7: [5]}, 30, 4), ({6: [3]}, 30, 13),
     ({7: range(16)}, 70, 2)],
)  # fmt: skip
def test_rails_that_reach_nobody_do_not_use_up_the_time_for_opening(
    monkeypatch: pytest.MonkeyPatch, reaches: dict[int, Sequence[int]], vain_s: int, most: int
) -> None:
    """Each pair in vain took 0.3 of 3 s, and at their end a connection that had a link was lost, and all later ones.

    On a clock of its own, by which all takes a hundred times as long.
    """
    names = [f"s{number}" for number in range(16)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=[f"c{number}" for number in range(8)]) as cluster:
        path = path_of(cluster.rdma())
        passed = [0.0]
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
        connect = RdmaConnection._pair

        def pair(self: RdmaConnection, rail: Any, theirs: int, *more: Any) -> Any:
            if theirs in reaches.get(int(rail.name[1:]), ()):
                return connect(self, rail, theirs, *more)
            passed[0] += vain_s
            self._exchange_s = max(self._exchange_s, vain_s)
            if clock.monotonic() >= until:
                self.channel.fail("deadline passed while waiting for a reply", DeadlineError)
            raise FabricError("nobody answers")

        monkeypatch.setattr(rdma_connection, "time", clock)
        monkeypatch.setattr(rdma_connection, "FAILED_S", 6000.0)
        monkeypatch.setattr(RdmaConnection, "_pair", pair)
        path._failed.clear()
        path._turn = 0
        for attempt in range(1, most + 1):
            until = clock.monotonic() + 300.0
            try:
                connection = path._open(until)
                break
            except TransportError:
                assert attempt < most, "all of them were in vain"
        assert {int(link.rail.name[1:]) for link in connection.links} <= reaches.keys()
        assert connection.links and clock.monotonic() < until - 60.0, "time is left for what follows"
        connection.close()


def slowly(monkeypatch: pytest.MonkeyPatch, pair_s: Callable[[int], int]) -> SimpleNamespace:
    """Let each pair take so many seconds, by the number of their rail; negative: and not work. Return the clock.

    It is a clock of its own, by which all takes a hundred times as long. ``until``: the time for opening ends then.
    """
    connect, passed = RdmaConnection._pair, [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], until=0.0)

    def pair(self: RdmaConnection, rail: Any, theirs: int, *more: Any) -> Any:
        took = pair_s(theirs)
        passed[0] += abs(took)
        if clock.monotonic() >= clock.until:
            self.channel.fail("deadline passed while waiting for a reply", DeadlineError)
        if took < 0:
            raise FabricError("nobody answers")
        return connect(self, rail, theirs, *more)

    monkeypatch.setattr(rdma_connection, "time", clock)
    monkeypatch.setattr(RdmaConnection, "_pair", pair)
    return clock


@pytest.mark.parametrize(("pair_s", "left_s", "links"), [(25, 300, 8), (25, 240, 6), (60, 300, 3), (25, 2000, 8)])
def test_a_connection_with_little_time_has_as_many_links_as_that_is_enough_for(
    monkeypatch: pytest.MonkeyPatch, pair_s: int, left_s: int, links: int
) -> None:
    """It got those of half the time, and kept them for its life."""
    names = [f"r{number}" for number in range(8)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=names) as cluster:
        path = path_of(cluster.rdma())
        clock = slowly(monkeypatch, lambda _theirs: pair_s)
        path._failed.clear()
        clock.until = clock.monotonic() + left_s
        connection = path._open(clock.until)
        assert len(connection.links) == links and not path._failed
        connection.close()


def test_a_pair_that_the_time_was_not_enough_for_is_tried_first_by_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It works, and was put last for a minute, as the one before had used up the time."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c",)) as cluster:
        path = path_of(cluster.rdma())
        clock = slowly(monkeypatch, lambda theirs: 130 if theirs else -180)
        monkeypatch.setattr(rdma_connection, "FAILED_S", 6000.0)
        path._failed.clear()
        path._turn = 0
        clock.until = clock.monotonic() + 300.0
        with pytest.raises(TransportError):
            path._open(clock.until)
        assert [theirs for _, theirs in path._failed] == [0]
        path._turn = 0
        clock.until = clock.monotonic() + 300.0
        connection = path._open(clock.until)
        assert [link.region_map.rail for link in connection.links] == [1]
        connection.close()


def test_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB, background=True) as cluster:
        client = cluster.rdma(deadline_s=600.0)
        wrong: list[Any] = []

        def work(number: int) -> None:
            rng = random.Random(number)
            sink = client.register(bytearray(200_000))
            for turn in range(12):
                size = rng.choice([10, 5000, 150_000])
                key, value = f"t{number}-{turn % 5}", bytes_of(number * 1000 + turn, size)
                if not client.put(key, client.register(bytearray(value)) if turn % 2 else value):
                    wrong.append((key, "put"))
                got = client.get_into(key, sink)
                if got != size or bytes(sink.view()[:size]) != value or client.get(key) != value:
                    wrong.append((key, got))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        path = path_of(client)
        assert 1 <= path._connections <= 4
        assert client.counters["rdma_fallbacks"] == 0
        check_staging(path.staging)
