"""GPU memory that RDMA devices read and write themselves: which way it is registered, and what goes through it.

The driver and the network are in software.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.gpu import copy, cuda
from simm.gpu import direct as gpu_direct
from simm.gpu.buffers import DeviceSpan, device_span
from simm.gpu.direct import Keys
from simm.host.buffers import Span
from simm.rdma import registration
from simm.rdma.api import Access, FabricError
from simm.sdk.ops.kv_memory import BlockView, deregister_mr, register_mr
from tests.support.client_checks import forget
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_rdma_cluster import path_of
from tests.support.gpu import MIB, PAGE, Tensor, forget_ways, noise
from tests.support.gpu_rdma import cluster_with, descriptors, driver_with_rdma, load_peermem, memory, ways_said

#: From 3.12 on CPython warns of every fork next to threads. They are the point of some tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    yield from driver_with_rdma(monkeypatch)


# -- each way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dma-buf", "nvidia-peermem", "staged"])
@pytest.mark.parametrize("rails", [1, 2])
def test_values_of_all_sizes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str, rails: int
) -> None:
    direct = way != "staged"
    with cluster_with(fake, monkeypatch, rails, way) as cluster, caplog.at_level(logging.INFO, "simm.gpu.copy"):
        client = cluster.rdma()
        sizes = [1, 7, 100, 4096, 70_000, MIB + 1, 3 * MIB]
        values = [noise(size, size) for size in sizes]
        sources: list[Any] = [
            memory(client, fake, size, values[at], device=at % 2, at=(0, 8, PAGE + 3)[at % 3])
            for at, size in enumerate(sizes)
        ]
        rooms: list[Any] = [
            memory(client, fake, size + 5, device=at % 2, at=(0, PAGE + 3)[at % 2]) for at, size in enumerate(sizes)
        ]
        rounds = 3
        for turn in range(rounds):
            keys = [f"key {turn} {size}" for size in sizes]
            assert client.put_many(keys, sources) == [True] * len(keys)
            assert cluster.client("shm").get_many(keys) == values, "the same bytes for others"
            if turn == 2:
                forget(path_of(client).locations)
            nothing = memory(client, fake, 64)
            assert client.get_into_many([*keys, "absent"], [*rooms, nothing]) == [*sizes, None]
            assert [fake.peek(room.address, room.size) for room in rooms] == [value + bytes(5) for value in values]
            for room in rooms:
                fake.poke(room.address, bytes(room.size))
        total = sum(sizes) * rounds if direct else 0
        assert fake.dma == [total, total]
        assert client.put("single", sources[2])
        for _ in range(2):  # of an unknown place, and of a known one
            assert client.get_into("single", rooms[3]) == 100
            assert fake.peek(rooms[3].address, 101) == values[2] + bytes(1)
        assert client.counters["rdma_fallbacks"] == 0
        assert bool(copy.staging._idle) is not direct
        assert fake.pageable == 0
        assert bool(fake.flushed) is direct
        assert {each.split(" (", 1)[0] for each in ways_said(caplog)} == {
            f"GPU {device} over r{rail}: {way}" for device in (0, 1) for rail in range(rails)
        }
        assert len(ways_said(caplog)) == 2 * rails, "one line each"
        assert len(fake.synchronous) == (len(sources) + len(rooms) + rounds if direct else 0)


@pytest.mark.parametrize("rails", [1, 2])
def test_batches_of_all_kinds(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    """One call mixes host and GPU memory, registered or not, and repeats keys."""
    with cluster_with(fake, monkeypatch, rails) as cluster:
        client = cluster.rdma()
        size = 30_000
        values = [noise(number, size) for number in range(12)]

        def places(data: list[bytes]) -> list[Any]:
            made: list[Any] = []
            for number, value in enumerate(data):
                if number % 4 == 0:
                    made.append(memory(client, fake, size, value, device=number // 4 % 2, at=number))
                elif number % 4 == 1:
                    made.append(bytearray(value))
                elif number % 4 == 2:
                    address = fake.alloc(number // 4 % 2, size)
                    fake.poke(address, value)
                    made.append(Tensor(address, size))
                else:
                    made.append(client.register(bytearray(value)))
            return made

        def seen(place: Any) -> bytes:
            if isinstance(place, (DeviceSpan, Tensor)):
                return fake.peek(device_span(place).address, size)
            return bytes(place.view() if isinstance(place, Span) else place)

        sources = places(values)
        keys = [f"key {number}" for number in range(12)]
        for turn in range(3):
            assert client.put_many([f"{key} {turn}" for key in keys], sources) == [True] * 12
            rooms = places([bytes(size)] * 12)
            random.Random(turn).shuffle(rooms)
            assert client.get_into_many([f"{key} {turn}" for key in keys], rooms) == [size] * 12
            assert [seen(room) for room in rooms] == values
        # The later value of a key is stored, whatever kinds they are of.
        for first in range(4):
            for second in range(4, 8):
                key = f"twice {first} {second}"
                assert client.put_many([key, "x", key], [sources[first], sources[8], sources[second]]) == [True] * 3
                assert client.get(key) == values[second]
        assert client.counters["rdma_fallbacks"] == 0
        assert fake.dma[0] and fake.dma[1]


def test_parts_and_views_have_the_registration_of_the_whole(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        address = fake.alloc(1, 8 * PAGE)
        fake.poke(address, noise(1, 8 * PAGE))
        mr = register_mr(Tensor(address, 4 * PAGE))
        assert mr is not None
        whole = mr._span
        assert isinstance(whole, DeviceSpan)
        assert whole.part(100, 50).registration is whole.registration
        assert whole.part(100, 50).piece(address, 60).registration is whole.registration
        assert whole.piece(address + PAGE, 4 * PAGE).registration is None, "not all of it is registered"
        assert device_span(whole, stream=5).registration is whole.registration
        view = BlockView.from_buffer(address + 77, PAGE, mr)
        assert client.put("key", view._piece)
        assert fake.dma == [PAGE, 0]
        other = BlockView.from_tensor(Tensor(address + 5, 300), mr)
        assert other._piece is not None
        assert client.put("other", other._piece)
        assert fake.dma == [PAGE + 300, 0]
        assert client.get("key") == fake.peek(address + 77, PAGE)
        assert len(cluster.fabrics[0].fakes[0].lkeys) == len(cluster.fabrics[0].fakes[0].regions)
        assert deregister_mr(mr)
        assert not any(region.device is not None for region in cluster.fabrics[0].fakes[0].regions)
        assert client.put("again", BlockView.from_buffer(address, PAGE, mr)._piece), "not registered any more: staged"
        assert fake.dma == [PAGE + 300, 0]


def test_a_span_beyond_its_registration_is_staged(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma()
        address = fake.alloc(0, 2 * PAGE)
        fake.poke(address, noise(1, 2 * PAGE))
        span = client.register(Tensor(address, PAGE))
        wider = DeviceSpan(address, PAGE + 1, device=0, registration=span.registration)
        assert client.put("key", wider)
        assert client.get("key") == noise(1, 2 * PAGE)[: PAGE + 1]
        assert fake.dma == [0, 0]
        assert client.counters["rdma_fallbacks"] == 0


# -- which way --------------------------------------------------------------------------------------------------


class Rail:
    """A device that registers what the test allows."""

    def __init__(self, name: str = "mlx5_0", *, dmabuf: str = "", plain: str = "", key: int = 7) -> None:
        self.name, self.dmabuf, self.plain, self.key = name, dmabuf, plain, key
        self.asked: list[Any] = []
        self.closed = 0

    def _region(self, address: int) -> Any:
        def close() -> None:
            self.closed += 1

        return SimpleNamespace(address=address, lkey=self.key, rkey=1, close=close)

    def register(self, address: int, length: int, access: Access) -> Any:
        self.asked.append(("plain", address, length, access))
        if self.plain:
            raise FabricError(self.plain)
        return self._region(address)

    def register_dmabuf(self, fd: int, offset: int, length: int, access: Access) -> Any:
        self.asked.append(("dma-buf", offset, length, access))
        assert "fake-dma-buf" in os.readlink(f"/proc/self/fd/{fd}")
        assert not os.get_inheritable(fd)
        if self.dmabuf:
            raise FabricError(self.dmabuf)
        return self._region(offset)


def span_in(fake: FakeCuda, *, writable: bool = True) -> DeviceSpan:
    address = fake.alloc(1, 4 * PAGE) + PAGE + 100
    span = DeviceSpan(address, PAGE, device=1, writable=writable)
    assert registration.registered(span) is span
    assert registration.registered(span).registration is span.registration
    return span


def lines(fake: FakeCuda, rail: Any, caplog: pytest.LogCaptureFixture) -> tuple[int | None, list[str]]:
    """Return the result of a registration that is requested twice, and its log records."""
    caplog.clear()
    forget_ways()
    with caplog.at_level(logging.INFO, "simm"):
        handle = span_in(fake).registration
        keys = {handle.lkey(rail) for _ in range(2)}
        asked = len(rail.asked)
        assert handle.lkey(rail) in keys
        assert len(rail.asked) == asked, "once for each handle"
        found = handle.lkey(rail)
        handle.close()
        handle.close()
        another = span_in(fake).registration
        assert another.lkey(rail) == found
        another.close()
    assert not descriptors()
    assert rail.closed == (2 if found else 0)
    return found, [record.message for record in caplog.records]


def test_dma_buf_comes_first(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    rail = Rail()
    assert lines(fake, rail, caplog) == (7, ["GPU 1 over mlx5_0: dma-buf"])
    assert rail.asked[0] == ("dma-buf", 100, PAGE, Access.LOCAL_WRITE)
    rail = Rail()
    span = span_in(fake, writable=False)
    assert span.registration.lkey(rail) == 7
    assert rail.asked == [("dma-buf", 100, PAGE, Access(0))]
    assert span.address & ~(PAGE - 1) == span.address - 100
    assert len(fake.synchronous) == 3


NO_EXPORT = "no dma-buf: the GPU's driver exports none (it does with NVIDIA's open kernel modules)"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda fake, rail, patch: setattr(fake, "dma_buf", False), NO_EXPORT),
        (
            lambda fake, rail, patch: fake.failing.update(cuMemGetHandleForAddressRange=[801, 801]),
            "no dma-buf: cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED (as the fake driver says)",
        ),
        (lambda fake, rail, patch: setattr(rail, "dmabuf", "mlx5_0: EOPNOTSUPP"), "no dma-buf: mlx5_0: EOPNOTSUPP"),
        (
            lambda fake, rail, patch: patch.delitem(cuda.load()._calls, "range_handle"),
            "no dma-buf: this driver is older than CUDA 11.7 and exports no dma-buf",
        ),
    ],
)
def test_what_stands_against_dma_buf(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: Callable[..., None],
    why: str,
) -> None:  # fmt: skip
    """Without dma-buf memory is registered by nvidia-peermem, and without that it is staged."""
    missing = "no nvidia-peermem: that kernel module is not loaded (modprobe nvidia-peermem)"
    for module, refusal, capable, ending in (
        ("/nowhere", "", 1, f"staged ({why}; {missing})"),
        ("/sys", "", 1, f"nvidia-peermem ({why})"),
        ("/sys", "EFAULT", 1, f"staged ({why}; no nvidia-peermem: EFAULT)"),
        ("/sys", "", 0, f"staged ({why}; no nvidia-peermem: the GPU does not support it)"),
    ):
        monkeypatch.setattr(gpu_direct, "PEERMEM_MODULES", ["/nowhere", module])
        rail = Rail(plain=refusal)
        fake.gpu_direct = capable
        with monkeypatch.context() as patch:
            spoil(fake, rail, patch)
            key, said = lines(fake, rail, caplog)
        assert said == [f"GPU 1 over mlx5_0: {ending}"]
        assert bool(key) is ending.startswith("nvidia")
        if key:
            kind, address, size, access = rail.asked[-1]
            assert (kind, size, access) == ("plain", PAGE, Access.LOCAL_WRITE)
            assert address % PAGE == 100 and address > 1 << 32
        assert not fake._contexts()
        fake.failing.clear()


def test_memory_that_no_way_takes(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "simm"):
        rail = Rail()
        fake.failing["cuPointerSetAttribute"] = [801]
        assert span_in(fake).registration.lkey(rail) is None
        assert rail.closed == 1, "its region was made, and closed again"
        span = span_in(fake)
        fake._find(span.address)[0].managed = True
        assert span.registration.lkey(Rail("mlx5_1")) is None
        fake.failing["cuPointerGetAttribute"] = [999]
        assert span_in(fake).registration.lkey(Rail("mlx5_2")) is None
        span = span_in(fake)
        monkey, fake.failing["cuCtxSetCurrent"] = span, [999]
        assert monkey.registration.lkey(Rail("mlx5_3")) is None
    said = [record.message for record in caplog.records]
    assert [line.split(" (", 1)[0] for line in said] == [f"GPU 1 over mlx5_{number}: staged" for number in range(4)]
    for line, why in zip(said, ("wait for its own copies", "managed memory", "cuPointerGetAttribute", "cuCtxSet")):
        assert why in line
    assert not fake._contexts()


def test_keys_are_never_missing(fake: FakeCuda) -> None:
    """With a key of None or 0 the CPU would copy."""
    span = span_in(fake)
    keys = Keys.of(span.registration, [Rail()])
    assert keys is not None
    assert keys.shift == 100 - span.address
    assert keys.lkey(other := Rail("other")) == 7, "a rail that came later"
    with pytest.raises(FabricError, match="not registered there"):
        keys.lkey(Rail("bad", dmabuf="no"))
    span.registration.close()
    assert keys.lkey(other) == 7, "the device refuses it then"
    with pytest.raises(FabricError, match="not registered there"):
        keys.lkey(Rail("third"))
    assert Keys.of(span_in(fake).registration, [Rail(key=0)]) is None


def test_rails_that_take_it_in_different_ways(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All operations of a call use one address."""
    with cluster_with(fake, monkeypatch, 2) as cluster, caplog.at_level(logging.INFO, "simm.gpu.copy"):
        load_peermem(cluster, monkeypatch)
        cluster.network.refuse = lambda what, rail: "no" if what == "register_dmabuf" and rail.name == "r1" else ""
        client = cluster.rdma()
        span = memory(client, fake, 3 * MIB, noise(1, 3 * MIB))
        assert client.put("key", span)
        fake.poke(span.address, bytes(3 * MIB))
        assert client.get_into("key", span) == 3 * MIB
        assert fake.peek(span.address, 3 * MIB) == noise(1, 3 * MIB)
        assert fake.dma == [0, 0]
        assert client.counters["rdma_fallbacks"] == 0
    assert ways_said(caplog) == [
        "GPU 0 over r0: dma-buf",
        "GPU 0 over r1: nvidia-peermem (no dma-buf: r1: register_dmabuf: no)",
        "GPU 0 over r1: staged (it would have another address for each rail: let all cards take it the same way)",
    ]


def test_a_rail_that_takes_none(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_with(fake, monkeypatch, 2) as cluster:
        cluster.network.refuse = lambda what, rail: "no" if what == "register_dmabuf" and rail.name == "r1" else ""
        client = cluster.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        assert client.put("key", span)
        assert client.get_into("key", span) == 5000
        assert fake.dma == [0, 0]
        assert client.counters["rdma_fallbacks"] == 0


def test_what_is_not_registered_is_staged(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster_with(fake, monkeypatch) as cluster, caplog.at_level(logging.INFO, "simm.gpu.copy"):
        client = cluster.rdma()
        tensor = Tensor(fake.alloc(0, 5000), 5000)
        for _ in range(2):
            assert client.put("key", tensor)
            assert client.get_into("key", tensor) == 5000
        assert fake.dma == [0, 0]
        assert ways_said(caplog) == ["GPU 0 over r0: staged, as it is not registered (pass what register() gave)"]


def test_values_with_checksums_are_staged(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU must read them to verify the checksum."""
    with cluster_with(fake, monkeypatch) as cluster:
        client = cluster.rdma(checksum=True)
        span = memory(client, fake, 70_000, noise(1, 70_000))
        assert client.put("key", span)
        assert client.put_many(["a", "b"], [span, span.part(10, 100)]) == [True, True]
        room = memory(client, fake, 70_000)
        assert client.get_into("key", room) == 70_000
        assert fake.peek(room.address, 70_000) == noise(1, 70_000)
        assert client.get_into_many(["a", "b"], [room, span]) == [70_000, 100]
        assert fake.dma == [0, 0]
        assert client.counters["rdma_fallbacks"] == 0
        # Another client, that has none, reads them directly.
        plain = cluster.rdma()
        assert plain.get_into("key", room) == 70_000
        assert fake.dma == [0, 70_000]
