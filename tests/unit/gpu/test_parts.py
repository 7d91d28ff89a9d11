"""Ranges and pieces of values in GPU memory, mixed with host memory, by each path, on a driver in software."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.gpu import copy
from simm.ipc import session
from simm.sdk.ops import arena_pins
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_rdma_cluster import FakeRdmaCluster
from tests.support.gpu import MIB, Array, Real, Tensor, noise, registered_by

pytestmark = pytest.mark.usefixtures("nothing_retired")


@pytest.fixture
def nothing_retired() -> Iterator[None]:
    session.RETIRED.clear()
    yield
    copy.staging.close()
    session.RETIRED.clear()


def no_rdma_to(handle: Any, path: str) -> None:
    """The RDMA devices are in software too, and the CPU cannot carry out their transfers of a real GPU's memory."""
    if path == "rdma" and isinstance(handle, Real):
        pytest.skip("RDMA devices in software do not reach a GPU")


def there_and_back(handle: Any, client: Client, size: int, rng: random.Random) -> None:
    value = noise(size, size)
    cuts = sorted({0, size, *(rng.randrange(size) for _ in range(4))})
    pieces: list[Any] = []
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        part = value[start:end]
        if number % 2:
            pieces.append(part)
            continue
        address = handle.alloc(number % 2, len(part))
        handle.poke(address, part)
        pieces.append(Tensor(address, len(part)))
    assert client.put_gather("k", pieces) and client.get("k") == value
    rooms = [handle.alloc(number % 2, size + 8) for number in range(2)]
    host = bytearray(size)
    half = size // 2 or 1
    ranges = [(size - half, half, Array(rooms[0], size + 8)), (0, size, host), (0, half, Tensor(rooms[1], size))]
    assert client.get_ranges("k", ranges) == size
    assert handle.peek(rooms[0], size) == value[-half:] + bytes(size - half)
    assert handle.peek(rooms[1], size) == value[:half] + bytes(size - half)
    assert host == value


@pytest.mark.parametrize("path", ["shm", "tcp", "rdma"])
@pytest.mark.parametrize("checksum", [False, True])
def test_there_and_back(devices: Any, monkeypatch: pytest.MonkeyPatch, path: str, checksum: bool) -> None:
    no_rdma_to(devices, path)
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB) as cluster:
        more = {"checksum": checksum, "deadline_s": 60.0}
        client = cluster.rdma(**more) if path == "rdma" else cluster.client(path, **more)
        for size in (1, 5000, 100_000, 3 * MIB + 5):
            there_and_back(devices, client, size, random.Random(size))
        batch = [[(0, 3, Array(devices.alloc(0, 3), 3)), (1, 1, bytearray(1))] for _ in range(20)]
        assert client.get_ranges_many(["k"] * 20, batch) == [3 * MIB + 5] * 20
        if path == "rdma" and not checksum:
            assert client.counters["rdma_fallbacks"] == 0


@pytest.mark.parametrize("path", ["shm", "tcp", "rdma"])
@pytest.mark.parametrize("checksum", [False, True])
def test_pinned_values_go_to_devices(devices: Any, monkeypatch: pytest.MonkeyPatch, path: str, checksum: bool) -> None:
    no_rdma_to(devices, path)
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB) as cluster:
        more = {"checksum": checksum, "deadline_s": 60.0}
        client = cluster.rdma(**more) if path == "rdma" else cluster.client(path, **more)
        sizes = (1, 5000, 100_000, 3 * MIB + 5)
        keys = [f"k{size}" for size in sizes]
        values = [noise(size, size) for size in sizes]
        assert all(client.put_many(keys, values))
        with client.pin([*keys, "no"]) as pins:
            for size, key, value in zip(sizes, keys, values):
                room, host = devices.alloc(1, size + 8), bytearray(size)
                half = size // 2 or 1
                assert pins.get_ranges(key, [(size - half, half, Array(room, size + 8)), (0, size, host)]) == size
                assert devices.peek(room, size) == value[-half:] + bytes(size - half) and host == value
            rooms = [devices.alloc(0, 8) for _ in range(5)]
            rows: list[Any] = [Tensor(room, 8) for room in rooms]
            rows[2] = bytearray(8)
            assert pins.read([(0, 1, rows)]) == pins.lengths == [*sizes, None]
            assert [devices.peek(rooms[at], 2) for at in (0, 1, 3)] == [values[at][:1] + b"\0" for at in (0, 1, 3)]
            assert rows[2] == values[2][:1] + bytes(7)


def test_a_layer_of_many_pinned_pages_is_one_wait(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.client("shm")
        keys = [f"page {number}" for number in range(30)]
        assert all(client.put_many(keys, [noise(number, 8192) for number in range(30)]))
        rooms = [fake.alloc(0, 4096) for _ in keys]
        registered_by(client)
        with client.pin(keys) as pins:
            fake.calls.clear()
            assert pins.read([(4096, 4096, [Tensor(room, 4096) for room in rooms])]) == [8192] * 30
            assert fake.calls.count("cuMemcpyBatchAsync_v2") == fake.calls.count("cuStreamSynchronize") == 1
            assert not {"cuMemcpyHtoDAsync_v2", "cuEventSynchronize"} & set(fake.calls), "nothing is staged"
        assert [fake.peek(room, 4096) for room in rooms] == [noise(number, 8192)[4096:] for number in range(30)]


def test_issue_a_layer_of_pinned_pages_that_are_checked_is_one_wait(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page waited for the device by itself."""
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.client("shm", checksum=True)
        keys = [f"page {number}" for number in range(30)]
        assert all(client.put_many(keys, [noise(number, 8192) for number in range(30)]))
        rooms = [fake.alloc(0, 4096) for _ in keys]
        with client.pin(keys) as pins:
            fake.calls.clear()
            assert pins.read([(4096, 4096, [Tensor(room, 4096) for room in rooms])]) == [8192] * 30
            assert fake.calls.count("cuStreamSynchronize") == 1
            assert [fake.peek(room, 4096) for room in rooms] == [noise(number, 8192)[4096:] for number in range(30)]
            monkeypatch.setattr(arena_pins, "_DEVICE_BYTES", 10 * 4096)
            fake.calls.clear()
            assert pins.read([(0, 4096, [Tensor(room, 4096) for room in rooms])]) == [8192] * 30
            assert fake.calls.count("cuStreamSynchronize") == 3, "memory for copies is bounded"
        assert [fake.peek(room, 4096) for room in rooms] == [noise(number, 8192)[:4096] for number in range(30)]


@pytest.mark.parametrize("checksum", [False, True])
def test_issue_a_layer_of_pages_from_elsewhere_is_one_wait(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, checksum: bool
) -> None:
    """Each page waited for the device by itself."""
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.client("tcp", checksum=checksum)
        keys = [f"page {number}" for number in range(30)]
        assert all(client.put_many(keys, [noise(number, 65536) for number in range(30)]))
        rooms = [fake.alloc(0, 4000) for _ in keys]
        with client.pin(keys) as pins:
            for at in (0, 30_000):  # the first look at what is checked, and a later one
                fake.calls.clear()
                assert pins.read([(at, 4000, [Tensor(room, 4000) for room in rooms])]) == [65536] * 30
                assert fake.calls.count("cuStreamSynchronize") == 1
                assert [fake.peek(room, 4000) for room in rooms] == [
                    noise(number, 65536)[at : at + 4000] for number in range(30)
                ]


def test_layers_into_devices_beside_misses_and_a_driver_that_fails(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.client("shm")
        keys = [f"page {number}" for number in range(9)]
        stored = [number for number in range(9) if number % 4]
        assert all(client.put_many([keys[number] for number in stored], [noise(number, 8192) for number in stored]))
        rooms = [[fake.alloc(number % 2, 4096) for number in range(9)] for _ in range(2)]
        tensors = [[Tensor(room, 4096) for room in row] for row in rooms]
        with client.pin(keys) as pins:
            layers = [(0, 4096, tensors[0]), (5000, 192, tensors[1])]
            fake.fail_next("cuMemcpyHtoDAsync_v2", [1])
            assert pins.read(layers) == [None] * 9
            assert client.stats()["outages"] == 1
            fake.failing.clear()
            assert pins.read(layers) == pins.lengths == [8192 if number in stored else None for number in range(9)]
            with pytest.raises(UsageError, match="overlap"):
                pins.read([(0, 8, tensors[0]), (8, 8, tensors[0])])
            with pytest.raises(UsageError, match="ends at byte"):
                pins.read([(5000, 4096, tensors[0])])
        for number in range(9):
            value = noise(number, 8192) if number in stored else bytes(8192)
            assert fake.peek(rooms[0][number], 4096) == value[:4096]
            assert fake.peek(rooms[1][number], 4096) == value[5000:5192] + bytes(3904)


@pytest.mark.parametrize("path", ["shm", "tcp", "rdma"])
def test_a_driver_that_fails_is_an_outage(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with FakeRdmaCluster(monkeypatch, size=64 * MIB) as cluster:
        client = cluster.rdma() if path == "rdma" else cluster.client(path)
        assert client.put("k", bytes(5000))
        room = fake.alloc(0, 5000)
        ranges = [(0, 10, bytearray(10)), (5, 4000, Array(room, 5000))]
        assert client.get_ranges("k", ranges) == 5000
        pins = client.pin(["k"])
        for failing in ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
            fake.fail_next(failing, [1] * 20)
        assert client.get_ranges("k", ranges) is None
        assert client.get_ranges_many(["k"], [ranges]) == [None]
        assert pins.get_ranges(0, ranges) is None
        assert client.put_gather("k", [b"x", Array(room, 5000)]) is False
        assert client.stats()["outages"] >= 2
        fake.failing.clear()
        assert pins.get_ranges(0, ranges) == 5000
        assert client.get("k") == bytes(5000)
        assert client.get_ranges("k", ranges) == 5000
        assert client.put_gather("k", [b"x", Array(room, 5000)]) is True
        assert client.stats()["workers"][0]["path"] == path
