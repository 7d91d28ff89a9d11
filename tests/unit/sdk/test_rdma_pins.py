"""Pinned values by RDMA, against a real worker, stream and endpoint, on a network in software."""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from simm.arena.hashing import sets_of
from simm.arena.layout import SLOT_WORDS
from simm.client import Client
from simm.constants import NO_SLOT, VALUE_BYTES_MAX, WAYS
from simm.host.buffers import Span
from simm.rdma.remote_arena import CachedEntry
from simm.sdk.ops import remote_pins
from simm.sdk.ops.rdma_ranges import VersionReading
from simm.sdk.path import PathState
from simm.server.stream_get import Lease, Leases
from simm.slab import SLOTS_MAX
from tests.support.client_checks import check_staging
from tests.support.cluster_clients import WAIT_S
from tests.support.dose import dosed
from tests.support.fake_rdma_cluster import FakeRdmaCluster, path_of, until_rdma
from tests.support.invariants import InvariantViolation
from tests.support.rdma_script import KEYS, SIZE, Writer, finds_harm, value_of, version_in
from tests.support.store_world import new_segment, remove_segment
from tests.support.waiting import wait_until

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("nothing_retired")


def held(buffer: Any) -> bytes:
    return bytes(buffer.view() if isinstance(buffer, Span) else buffer)


@pytest.mark.parametrize("rails", [1, 2])
def test_pinned_values_of_all_sizes(monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=names, size=64 * MIB) as cluster:
        client, writer = cluster.rdma(deadline_s=60.0), cluster.client("shm")
        rng = random.Random(rails)
        values = [rng.randbytes(size) for size in (1, 100, 5000, 70_000, 3 * MIB + 5) for _ in range(4)]
        keys = [f"k{number}" for number in range(len(values))]
        assert client.put_many(keys, values) == [True] * len(keys)
        with client.pin([*keys, "no"]) as pins:
            assert pins.lengths == [*map(len, values), None]
            for turn in range(3):
                gets = client.counters["rdma_gets"]
                lists: list[list[tuple[int, int, Any]]] = []
                for value in values:
                    mine = []
                    for _ in range(rng.choice((1, 3))):
                        offset = rng.randrange(len(value))
                        length = rng.randint(1, len(value) - offset)
                        room = bytearray(length) if rng.random() < 0.5 else client.register(np.zeros(length, np.uint8))
                        mine.append((offset, length, room))
                    lists.append(mine)
                got = pins.get_ranges_many([*keys, "no"], [*lists, [(0, 1, bytearray(1))]])
                assert got == pins.lengths
                for value, ranges in zip(values, lists):
                    for offset, length, room in ranges:
                        assert held(room) == value[offset : offset + length]
                replaced = 3 * turn  # by then: those come by TCP
                assert client.counters["rdma_gets"] - gets == len(keys) - replaced
                for key in keys[3 * turn : 3 * turn + 3]:
                    assert writer.put(key, b"another") if turn else writer.delete(key)
            rows = np.zeros((len(keys) + 1, 1), np.uint8)
            assert pins.read([(0, 1, rows)]) == pins.lengths
            assert rows[:-1].tobytes() == bytes(value[0] for value in values)
        check_staging(path_of(client).staging)
        wait_until(lambda: cluster.node.worker.store.stats()["pins"] == 0, "the pins are released")


def storm(monkeypatch: pytest.MonkeyPatch, seed: int, rails: int = 1) -> int:
    """Read pinned values while a writer works between any two steps; return the number of hits."""
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, seed=seed, rails=names, mine=names, pieces=12) as cluster:
        client = cluster.rdma(deadline_s=20.0)
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        writer = Writer(cluster, seed, list(KEYS), 0.03, SIZE)
        sinks = [client.register(bytearray(SIZE)) if seed % 2 else bytearray(SIZE) for _ in KEYS]
        hits = 0
        for _ in range(8):
            cluster.network.between = None
            pins = client.pin(KEYS)
            versions = [writer.version[key] if writer.client.exists(key) else 0 for key in KEYS]
            assert [length or 0 for length in pins.lengths] == [SIZE if version else 0 for version in versions]
            cluster.network.between = writer.between
            for _ in range(4):
                got = pins.read([(SIZE // 2, SIZE - SIZE // 2, [sink_part(sink, SIZE // 2, SIZE) for sink in sinks]),
                                 (0, SIZE // 2, [sink_part(sink, 0, SIZE // 2) for sink in sinks])])  # fmt: skip
                for key, sink, version, size in zip(KEYS, sinks, versions, got):
                    if bool(size) != bool(version):
                        raise InvariantViolation(f"{key}: {size} bytes of version {version}")
                    if size and version_in(key, held(sink)) != version:
                        raise InvariantViolation(f"{key}: not the version that was pinned")
                    hits += bool(size)
            pins.release()
        cluster.network.between = None
        return hits


def sink_part(sink: Any, start: int, end: int) -> Any:
    return sink.part(start, end - start) if isinstance(sink, Span) else memoryview(sink)[start:end]


@pytest.mark.parametrize("rails", [1, 2])
def test_a_writer_between_all_steps(monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    assert sum(storm(monkeypatch, seed, rails) for seed in range(dosed(4, quick=1))) > dosed(100, quick=20)


def test_mutation_any_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VersionReading, "_is_wanted", lambda *_: True)
    finds_harm(storm)


def filled(cluster: FakeRdmaCluster, path: str, **more: Any) -> Client:
    client = cluster.client(path, **more)
    wait_until(lambda: client.put("k", value_of("k", 1, SIZE)), "the client puts")
    return client


def read(pins: Any) -> int | None:
    """Return the version that comes, or None."""
    sink = bytearray(SIZE)
    got = pins.get_ranges("k", [(0, SIZE, sink)])
    return None if got is None else version_in("k", bytes(sink))


def test_by_rdma_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP for values a version is there as long as its slot has it."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client, writer = filled(cluster, "rdma"), cluster.client("shm")
        with client.pin(["k"]) as pins:
            assert read(pins) == 1
            assert writer.put("k", value_of("k", 2, SIZE))
            assert read(pins) is None
            assert client.counters["rdma_gets"] == 1


@pytest.mark.parametrize("quiet", [True, False])
def test_a_lease_that_rdma_reads_alone_does_not_lapse(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    """The stream hears nothing of such reads. It took the client for one that is stopped, a minute after the pin."""
    take = Leases.take
    leases: list[Lease] = []

    def taken(self: Leases, lease: Lease, *arguments: Any, **more: Any) -> list[Any]:
        leases.append(lease)
        return take(self, lease, *arguments, **more)

    monkeypatch.setattr(Leases, "take", taken)
    monkeypatch.setattr(remote_pins, "QUIET_S", -1.0 if quiet else math.inf)
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = filled(cluster, "rdma,tcp")
        until_rdma(client)
        with client.pin(["k"]) as pins:
            (lease,) = leases
            lease.used_at = 0.0
            assert read(pins) == 1 and client.counters["rdma_gets"] == 1
            if quiet:
                wait_until(lambda: lease.used_at > 0.0, "it is told")
            assert (lease.used_at > 0.0) is quiet, "it is told now and then, not with each read"
            assert read(pins) == 1


def test_a_stream_that_does_not_hear_so_takes_nothing_of_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a read waited for its answer, and closed the path with its connections by RDMA when none came."""
    go, release = threading.Event(), Leases.release
    told: list[Sequence[int]] = []

    def released(self: Leases, lease: Lease, numbers: Sequence[int]) -> int:
        told.append(numbers)
        go.wait(WAIT_S)
        return release(self, lease, numbers)

    monkeypatch.setattr(Leases, "release", released)
    monkeypatch.setattr(remote_pins, "QUIET_S", -1.0)
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = filled(cluster, "rdma,tcp", deadline_s=1.0)
        until_rdma(client)
        try:
            with client.pin(["k"]) as pins:
                assert [read(pins) for _ in range(3)] == [1] * 3
                wait_until(lambda: told == [[]], "the stream is told, and answers nothing")
                assert [worker["path"] for worker in client.stats()["workers"]] == ["rdma"]
                go.set()
                wait_until(lambda: len(told) == 3, "the stream goes on")
                path_of(client).close()
                assert read(pins) == 1, "by TCP, beside the answers for which nobody has waited"
        finally:
            go.set()
        assert client.stats()["outages"] == 0


def test_issue_values_without_a_checksum_come_by_rdma_to_clients_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """They came by TCP, as those do that are checked."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        filled(cluster, "shm")
        client = cluster.rdma(checksum=True)
        assert client.put("checked", value_of("checked", 1, SIZE))
        for key, count in (("k", 1), ("checked", 0)):
            before, sink = client.counters["rdma_gets"], bytearray(SIZE)
            with client.pin([key]) as pins:
                assert pins.get_ranges(key, [(0, SIZE, sink)]) == SIZE and version_in(key, bytes(sink)) == 1
            assert client.counters["rdma_gets"] - before == count


def replaced_elsewhere(cluster: FakeRdmaCluster, client: Client, writer: Client) -> None:
    """Store ``k`` anew in its other set, in a slot whose seq is the one that its first slot had."""
    digest, sets = client.digest("k"), cluster.node.worker.store.geometry.sets
    first, second = sets_of(digest, sets)

    def place() -> tuple[int, int]:
        with cluster.node.worker.frozen() as store:
            slot = store.table.lookup(digest)
            return slot, store.table._words[slot * SLOT_WORDS]

    before = place()
    names = (f"n{number}" for number in itertools.count())
    neighbour = next(name for name in names if sets_of(client.digest(name), sets)[0] == first)
    assert writer.delete("k") and writer.put(neighbour, b"in its place")
    assert writer.put("k", value_of("k", 2, SIZE))
    after = place()
    assert before[0] // WAYS == first and after[0] // WAYS == second and before[1] == after[1], "nothing was shown"


@pytest.mark.parametrize(("path", "version"), [("rdma,tcp", 1), ("rdma", None)])
def test_issue_another_slot_with_the_same_seq_has_another_version(
    monkeypatch: pytest.MonkeyPatch, path: str, version: int | None
) -> None:
    """Each slot counts by itself, and the lengths are the same, as are the crcs of clients without checksums."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client, writer = filled(cluster, path), cluster.client("shm")
        until_rdma(client)
        with client.pin(["k"]) as pins:
            assert read(pins) == 1 and client.counters["rdma_gets"] == 1
            replaced_elsewhere(cluster, client, writer)
            assert read(pins) == version and client.counters["rdma_gets"] == 1


def test_mutation_versions_without_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(reading: VersionReading, position: int, entry: CachedEntry) -> bool:
        return (int.from_bytes(entry.image[:8], "little"), entry.length, entry.crc) == reading._versions[position][-3:]

    monkeypatch.setattr(VersionReading, "_is_wanted", same)
    with FakeRdmaCluster(monkeypatch) as cluster:
        client, writer = filled(cluster, "rdma,tcp"), cluster.client("shm")
        until_rdma(client)
        with client.pin(["k"]) as pins:
            replaced_elsewhere(cluster, client, writer)
            assert read(pins) == 2


@pytest.mark.parametrize(("field", "value"), [(2, 0), (2, VALUE_BYTES_MAX + 1), (6, SLOTS_MAX), (6, NO_SLOT)])
def test_what_no_arena_has_ends_the_lease(monkeypatch: pytest.MonkeyPatch, field: int, value: int) -> None:
    take = Leases.take

    def taken(*arguments: Any, **more: Any) -> list[Any]:
        return [(*each[:field], value, *each[field + 1 :]) for each in take(*arguments, **more)]

    with FakeRdmaCluster(monkeypatch) as cluster:
        filled(cluster, "shm")
        client = cluster.client("tcp")
        assert client.exists("k")
        monkeypatch.setattr(Leases, "take", taken)
        with client.pin(["k"]) as pins:
            assert pins.lengths == [None] and client.counters["outages"] == 1
        wait_until(lambda: cluster.node.stream.stream.leases.keys == 0, "the lease has ended")


def test_without_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is gone, and RDMA reads what the slot still has."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        client, writer = cluster.rdma(), filled(cluster, "shm")
        with client.pin(["k"]) as pins:
            path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
            cluster.node.restart_stream()
            assert read(pins) == 1 and client.counters["rdma_gets"] == 1
            assert writer.put("k", value_of("k", 2, SIZE))
            assert read(pins) is None
            assert read(pins) is None


def test_issue_a_path_that_was_made_anew_reads_what_was_pinned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another object stands for the arena from then on, and so no value of a lease came by RDMA any more."""
    with FakeRdmaCluster(monkeypatch) as cluster:
        filled(cluster, "shm")
        client = cluster.rdma()
        until_rdma(client)
        with client.pin(["k"]) as pins:
            assert read(pins) == 1 and client.counters["rdma_gets"] == 1
            before, (target,) = path_of(client), client._router.targets.values()  # type: ignore[union-attr]
            target.tcp_lost(target.tcp, "for a test")  # type: ignore[arg-type]
            until_rdma(client)
            assert path_of(client) is not before and client.get("k") is not None  # it is connected
            gets = client.counters["rdma_gets"]
            assert read(pins) == 1 and client.counters["rdma_gets"] == gets + 1


@pytest.mark.parametrize("sees", [True, False], ids=["", "and RDMA connects anew within the call"])
@pytest.mark.parametrize("late", ["stream", "endpoint"])
def test_issue_another_arena_has_another_version(monkeypatch: pytest.MonkeyPatch, late: str, sees: bool) -> None:
    """The worker has come back with a new one, and one of both is still at the old one.

    The slots of the new one count from the start, so the key has the slot and the seq that it had before.
    """
    if not sees:  # the arena was still that of the pins when the call chose the path
        monkeypatch.setattr(remote_pins.RemotePins, "_is_of", lambda *_: True)
    with FakeRdmaCluster(monkeypatch) as cluster:
        node, writer = cluster.node, filled(cluster, "shm")
        client = cluster.rdma()
        assert client.get("k") == value_of("k", 1, SIZE)
        stream, endpoint, former = node.stream.stream.keeper, node.endpoint.endpoint.keeper, node.worker.segment
        before = stream.reader
        monkeypatch.setattr(stream if late == "stream" else endpoint, "worker", lambda: None)
        node.worker.die()
        node.worker.segment, node.worker.fresh = new_segment(former.size), True
        try:
            node.worker.start()
            cluster.instruct()
            wait_until(lambda: writer.put("k", value_of("k", 2, SIZE)), "the new arena has it")
            if late == "stream":
                node.endpoint.stop()
                node.endpoint.start()
            else:
                wait_until(lambda: stream.reader is not before, "the stream has seen it")
            by_rdma, by_tcp = (2, 1) if late == "stream" else (1, 2)
            wait_until(lambda: client.get("k") == value_of("k", by_rdma, SIZE), "RDMA reads there")
            gets = client.counters["rdma_gets"]
            with client.pin(["k"]) as pins:
                assert read(pins) == by_tcp and client.counters["rdma_gets"] == gets
        finally:
            remove_segment(former)


def test_without_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        filled(cluster, "shm")
        client = cluster.rdma()
        with client.pin(["k"]) as pins:
            path = path_of(client)
            cluster.node.endpoint.stop()
            try:
                wait_until(lambda: read(pins) == 1 and path.state is not PathState.UP, "RDMA is down, and TCP is not")
                assert read(pins) == 1
            finally:
                cluster.node.endpoint.start()


def test_with_checksums_each_read_sees_the_whole_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch) as cluster:
        client = filled(cluster, "rdma,tcp", checksum=True)
        with client.pin(["k"]) as pins:
            assert read(pins) == 1
            with cluster.node.worker.frozen() as store:
                start = store.table.entry(store.table.lookup(client.digest("k"))).offset
                cluster.node.worker.segment.mm[start + SIZE - 1] ^= 1
            assert pins.get_ranges("k", [(0, 8, bytearray(8))]) is None
            assert client.counters["crc_errors"] == 1
