"""GPU memory that RDMA devices read and write themselves, on a CUDA driver and a network in software.

The driver's memory cannot be touched by the CPU, carries work out when somebody waits for it and not before, and shows
what other devices wrote after a flush and not before. Positive controls take one safety away and must see the harm.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fakecuda import LEGACY, FakeCuda
from fakefabric import FakeLink
from rdmascript import KEYS, ROOM, Harm, finds_harm, links_outlive_failures, reads
from rdmatown import RdmaTown, path_of, until_rdma
from test_gpu import InPython, Tensor, installed, noise

from simm import cuda, gpu, gpudirect, gpurdma, rdmaget, registry
from simm import session as session_module
from simm.blocks import BlockView, deregister_mr, register_mr
from simm.buffers import Span
from simm.client import Client
from simm.cuda import CudaError
from simm.errors import TransportError
from simm.fabric import FENCED_READ, READ, WRITE, Access, FabricError
from simm.gpu import DeviceSpan, device_span
from simm.gpudirect import Keys
from simm.remote_arena import Place
from simm.tcppath import TcpPath

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

KIB = 1 << 10
MIB = 1 << 20
PAGE = 4096


def descriptors() -> list[str]:
    """Of dma-bufs, those that are open."""
    names = []
    for each in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:
            continue
    return [name for name in names if "dma-buf" in name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The process's driver; at the end nothing of ours is left with it."""
    session_module._BURIED.clear()
    monkeypatch.setattr(gpudirect, "PEERMEM_MODULES", ["/nowhere"])
    try:
        for handle in installed(InPython()):
            yield handle.library
            gpurdma.shutdown()
            gc.collect()
            registry.sweep()
            assert not descriptors()
    finally:
        gpurdma.shutdown()
        gpudirect.shutdown()
        session_module._BURIED.clear()


def town_with(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, rails: int = 1, way: str = "dma-buf", **more: Any
) -> Any:
    """A town whose rails reach the driver's memory in this way."""
    names = [f"r{number}" for number in range(rails)]
    town = RdmaTown(monkeypatch, rails=names, mine=names, size=64 * MIB, **more)
    town.network.gpu = fake
    fake.dma_buf = way == "dma-buf"
    if way == "nvidia-peermem":
        load_peermem(town, monkeypatch)
    return town


def load_peermem(town: RdmaTown, monkeypatch: pytest.MonkeyPatch) -> None:
    town.network.peermem = True
    monkeypatch.setattr(gpudirect, "PEERMEM_MODULES", ["/nowhere", "/sys"])


def memory(client: Client, fake: FakeCuda, size: int, data: bytes = b"", *, device: int = 0, at: int = 0) -> DeviceSpan:
    """Registered memory of a GPU, from so many bytes into its allocation on."""
    address = fake.alloc(device, at + size + 7) + at
    fake.poke(address, data)
    span = client.register(Tensor(address, size))
    assert type(span) is DeviceSpan
    return span


def ways_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if " over " in record.message]


# -- each way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dma-buf", "nvidia-peermem", "staged"])
@pytest.mark.parametrize("rails", [1, 2])
def test_values_of_all_sizes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str, rails: int
) -> None:
    direct = way != "staged"
    with town_with(fake, monkeypatch, rails, way) as town, caplog.at_level(logging.INFO, "simm.gpu"):
        client = town.rdma()
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
            assert town.client("shm").get_many(keys) == values, "the same bytes for others"
            if turn == 2:
                path_of(client).locations.clear()
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
        assert bool(gpurdma._idle) is not direct
        assert fake.pageable == 0
        assert bool(fake.flushed) is direct
        assert {each.split(" (", 1)[0] for each in ways_said(caplog)} == {
            f"GPU {device} over r{rail}: {way}" for device in (0, 1) for rail in range(rails)
        }
        assert len(ways_said(caplog)) == 2 * rails, "one line each"
        assert len(fake.synchronous) == (len(sources) + len(rooms) + rounds if direct else 0)


@pytest.mark.parametrize("rails", [1, 2])
def test_batches_of_all_kinds(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    """Host memory registered or not, GPU memory registered or not, in one call; and keys that come twice."""
    with town_with(fake, monkeypatch, rails) as town:
        client = town.rdma()
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
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
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
        assert len(town.fabrics[0].fakes[0].lkeys) == len(town.fabrics[0].fakes[0].regions)
        assert deregister_mr(mr)
        assert not any(region.device is not None for region in town.fabrics[0].fakes[0].regions)
        assert client.put("again", BlockView.from_buffer(address, PAGE, mr)._piece), "not registered any more: staged"
        assert fake.dma == [PAGE + 300, 0]


def test_a_span_beyond_its_registration_is_staged(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
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
    """Registers what it shall."""

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
    assert gpudirect.registered(span) is span
    assert gpudirect.registered(span).registration is span.registration
    return span


def lines(fake: FakeCuda, rail: Any, caplog: pytest.LogCaptureFixture) -> tuple[int | None, list[str]]:
    """What a registration comes to, asked for twice, and what the log has of it."""
    caplog.clear()
    gpudirect.shutdown()
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
    """Then it is nvidia-peermem; and without that, or if that is refused too, staged."""
    missing = "no nvidia-peermem: that kernel module is not loaded (modprobe nvidia-peermem)"
    for module, refusal, capable, ending in (
        ("/nowhere", "", 1, f"staged ({why}; {missing})"),
        ("/sys", "", 1, f"nvidia-peermem ({why})"),
        ("/sys", "EFAULT", 1, f"staged ({why}; no nvidia-peermem: EFAULT)"),
        ("/sys", "", 0, f"staged ({why}; no nvidia-peermem: the GPU does not support it)"),
    ):
        monkeypatch.setattr(gpudirect, "PEERMEM_MODULES", ["/nowhere", module])
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
        monkey, fake.failing["cuCtxPushCurrent_v2"] = span, [999]
        assert monkey.registration.lkey(Rail("mlx5_3")) is None
    said = [record.message for record in caplog.records]
    assert [line.split(" (", 1)[0] for line in said] == [f"GPU 1 over mlx5_{number}: staged" for number in range(4)]
    for line, why in zip(said, ("wait for its own copies", "managed memory", "cuPointerGetAttribute", "cuCtxPush")):
        assert why in line
    assert not fake._contexts()


def test_keys_are_never_missing(fake: FakeCuda) -> None:
    """A key that is None, or 0, would have the CPU copy."""
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
    """One address has to do for all of a call's operations."""
    with town_with(fake, monkeypatch, 2) as town, caplog.at_level(logging.INFO, "simm.gpu"):
        load_peermem(town, monkeypatch)
        town.network.refuse = lambda what, rail: "no" if what == "register_dmabuf" and rail.name == "r1" else ""
        client = town.rdma()
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
    with town_with(fake, monkeypatch, 2) as town:
        town.network.refuse = lambda what, rail: "no" if what == "register_dmabuf" and rail.name == "r1" else ""
        client = town.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        assert client.put("key", span)
        assert client.get_into("key", span) == 5000
        assert fake.dma == [0, 0]
        assert client.counters["rdma_fallbacks"] == 0


def test_what_is_not_registered_is_staged(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with town_with(fake, monkeypatch) as town, caplog.at_level(logging.INFO, "simm.gpu"):
        client = town.rdma()
        tensor = Tensor(fake.alloc(0, 5000), 5000)
        for _ in range(2):
            assert client.put("key", tensor)
            assert client.get_into("key", tensor) == 5000
        assert fake.dma == [0, 0]
        assert ways_said(caplog) == ["GPU 0 over r0: staged, as it is not registered (pass what register() gave)"]


def test_values_with_checksums_are_staged(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has to look at them."""
    with town_with(fake, monkeypatch) as town:
        client = town.rdma(checksum=True)
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
        plain = town.rdma()
        assert plain.get_into("key", room) == 70_000
        assert fake.dma == [0, 70_000]


# -- order with the GPU's own work --------------------------------------------------------------------------------


def unordered(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, put: bool, named: bool) -> None:
    """The stream still has work on the memory when the call comes. Raises Harm when that was not waited for."""
    size = 10_000
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        span = memory(client, fake, size, noise(1, size), at=64)
        assert client.put("key", span)
        stream = fake.user_stream(0) if named else LEGACY
        if named:
            span = device_span(span, stream)
        fake.work(stream, 0, span.address, noise(2, size))
        if put:
            assert client.put("key", span)
            if client.get("key") != noise(2, size):
                raise Harm("the value was sent before it had been made")
        else:
            assert client.get_into("key", span) == size
            for context in (1, 2):
                fake._contexts().append(context)
                assert fake.cuCtxSynchronize() == 0
                fake._contexts().pop()
            if fake.peek(span.address, size) != noise(1, size):
                raise Harm("the value was overwritten by what came before the call")
        fake._handles.pop(stream, None)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("put", [False, True])
def test_it_comes_after_what_was_issued_before(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, put: bool, named: bool
) -> None:
    unordered(fake, monkeypatch, put=put, named=named)
    assert fake.dma[0] == 10_000 * (1 + put) and fake.dma[1] == 10_000 * (not put)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("put", [False, True])
def test_control_without_waiting_for_streams(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, put: bool, named: bool
) -> None:
    monkeypatch.setattr(gpudirect, "after_work", lambda spans: None)
    with pytest.raises(Harm):
        try:
            unordered(fake, monkeypatch, put=put, named=named)
        finally:
            for handle in [key for key, each in fake._handles.items() if not getattr(each, "blocking", True)]:
                del fake._handles[handle]


def test_the_streams_that_are_waited_for(fake: FakeCuda) -> None:
    def waited(*spans: tuple[int, int]) -> list[str]:
        fake.calls.clear()
        gpudirect.after_work([DeviceSpan(4096, 1, device=device, stream=stream) for device, stream in spans])
        assert not fake._contexts()
        return [call for call in fake.calls if "Sync" in call]

    mine = fake.user_stream(1)
    assert waited() == []
    assert waited((0, 0), (0, 0)) == ["cuStreamSynchronize"]
    assert waited((0, LEGACY)) == ["cuStreamSynchronize"]
    assert waited((1, mine)) == ["cuStreamSynchronize"] * 2, "the default one too"
    assert waited((1, mine), (1, 0), (0, 0)) == ["cuStreamSynchronize"] * 3
    assert waited((0, cuda.STREAM_PER_THREAD)) == ["cuCtxSynchronize"]
    with pytest.raises(CudaError):
        waited((1, 12345))
    assert not fake._contexts()
    del fake._handles[mine]


def test_a_gpu_that_cannot_be_waited_for(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        assert client.put("key", span)
        fake.failing["cuStreamSynchronize"] = [700]
        assert not client.put("key", span)
        fake.failing["cuStreamSynchronize"] = [700]
        assert client.get_into("key", span) is None
        assert fake.dma == [5000, 0]
        assert client.get_into("key", span) == 5000
        assert fake.dma == [5000, 5000]


# -- when it can be seen ---------------------------------------------------------------------------------------------


def unflushed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    """Raises Harm when a get returns before the GPU sees what was read."""
    with town_with(fake, monkeypatch, 2) as town:
        client = town.rdma()
        sizes = [5000, 2 * MIB]
        spans: list[Any] = [memory(client, fake, size, noise(size, size), device=at) for at, size in enumerate(sizes)]
        assert client.put_many(["a", "b"], spans) == [True, True]
        for span in spans:
            fake.poke(span.address, bytes(span.size))
        for _ in range(2):
            if single:
                assert [client.get_into(key, span) for key, span in zip("ab", spans)] == sizes
            else:
                assert client.get_into_many(["a", "b"], spans) == sizes
            if [fake.peek(span.address, span.size) for span in spans] != [noise(size, size) for size in sizes]:
                raise Harm("the value is not there yet")
            assert not fake.posted
            for span in spans:
                fake.poke(span.address, bytes(span.size))


@pytest.mark.parametrize("ordering", [0, 100, 200])
@pytest.mark.parametrize("single", [False, True])
def test_what_was_read_is_there_at_the_return(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, single: bool, ordering: int
) -> None:
    fake.ordering = ordering
    unflushed(fake, monkeypatch, single)
    assert fake.flushed == (4 if ordering < 200 else 0), "once for each call and GPU"


@pytest.mark.parametrize("single", [False, True])
def test_control_without_the_flush(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setattr(gpudirect, "flush", lambda devices: None)
    with pytest.raises(Harm):
        unflushed(fake, monkeypatch, single)


@pytest.mark.parametrize("missing", ["option", "function"])
def test_a_gpu_whose_writes_cannot_be_flushed_is_not_read_into(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    with town_with(fake, monkeypatch) as town, caplog.at_level(logging.INFO, "simm.gpu"):
        if missing == "option":
            fake.flush_options = 2
        else:
            monkeypatch.delitem(cuda.load()._calls, "flush_writes")
            with pytest.raises(CudaError, match=r"older than CUDA 11\.3"):
                cuda.load().flush_writes()
        client = town.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        for _ in range(2):
            assert client.put("key", span)
            assert client.get_into("key", span) == 5000
        assert fake.peek(span.address, 5000) == noise(1, 5000)
        assert fake.dma == [10_000, 0], "WRITES need no flush"
        said = [record.message for record in caplog.records if "flush" in record.message]
        assert len(said) == 1
        assert "GPU 0: values are read into it through pinned memory" in said[0]
        # Of a GPU that orders them all by itself nobody asks for it.
        gpudirect.shutdown()
        fake.ordering = 200
        assert client.get_into("key", span) == 5000
        assert fake.dma == [10_000, 5000]


def test_a_flush_that_fails(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        spans: list[Any] = [memory(client, fake, 5000, noise(1, 5000), device=device) for device in (0, 1)]
        assert client.put("key", spans[0])
        for calls in (1, 2):
            fake.failing["cuFlushGPUDirectRDMAWrites"] = [999]
            before = fake.flushed
            if calls == 1:
                assert client.get_into("key", spans[0]) is None
            else:
                assert client.get_into_many(["key", "key"], spans) == [None, None]
                assert fake.flushed == before + 1, "the other GPU's all the same"
        fake.land()
        assert client.get_into("key", spans[0]) == 5000
        assert not fake._contexts()
        with pytest.raises(CudaError):
            fake.failing["cuFlushGPUDirectRDMAWrites"] = [999]
            gpudirect.flush([0])


def test_a_ctrl_c_at_the_door_of_the_flush(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        span = memory(client, fake, 5000, noise(1, 5000))
        assert client.put("key", span)
        real, interrupted = gpudirect.flush, []

        def flush(devices: Any) -> None:
            if not interrupted:
                interrupted.append(1)
                raise KeyboardInterrupt
            real(devices)

        monkeypatch.setattr(gpudirect, "flush", flush)
        fake.poke(span.address, bytes(5000))
        with pytest.raises(KeyboardInterrupt):
            client.get_into("key", span)
        assert not fake.posted
        assert fake.peek(span.address, 5000) == noise(1, 5000)

        # One during the READ stays one, though the GPU has failed as well.
        def wait(*_: Any) -> None:
            town.network.run()
            fake.failing["cuFlushGPUDirectRDMAWrites"] = [999]
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FakeLink, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                client.get_into("key", span)
        assert not fake.failing["cuFlushGPUDirectRDMAWrites"]
        fake.land()


# -- a writer between the steps of a READ ------------------------------------------------------------------------------


def storm(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, seed: int, rails: int = 1, way: str = "dma-buf") -> int:
    """Reads into a GPU while a writer works between any two steps; how many were hits. Raises Harm."""
    with town_with(fake, monkeypatch, rails, way, seed=seed, pieces=12) as town:
        client = town.rdma(deadline_s=20.0)
        rooms = [memory(client, fake, ROOM, at=number) for number in range(len(KEYS))]
        hits = reads(town, client, seed, rooms, lambda room, size: fake.peek(room.address, size), rounds=20)
        assert bool(fake.dma[1]) is (way != "staged")
    return hits


@pytest.mark.parametrize("rails", [1, 2])
def test_a_writer_between_all_steps(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    hits = 0
    for seed in range(4):
        with pytest.MonkeyPatch.context() as inner:
            hits += storm(fake, inner, seed, rails)
    assert hits > 50


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dma-buf", "nvidia-peermem", "staged"])
def test_a_writer_between_all_steps_for_longer(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for seed in range(4, 64):
        with pytest.MonkeyPatch.context() as inner:
            fake.dma = [0, 0]
            storm(fake, inner, seed, 1 + seed % 2, way)


def test_control_without_the_second_look(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(place: Place, between: bytes, now: bytes, word: int) -> bool:
        return True

    monkeypatch.setattr(rdmaget, "confirmed", believe)
    finds_harm(partial(storm, fake))


# -- deadlines and ends ------------------------------------------------------------------------------------------------


def late_bytes(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    """A READ into the GPU is under way, or of an old value and done but for its confirmation, when the time is up.

    Raises Harm when the caller's memory is written after the return.
    """
    size = 100 * KIB
    with town_with(fake, monkeypatch) as town:
        client = town.rdma(deadline_s=0.8)
        span = memory(client, fake, size, noise(1, size))
        assert client.put("key", span)
        assert client.get_into("key", span) == size
        if part:
            town.network.hold(lambda link, op: op[0] == FENCED_READ)
        else:
            town.network.hold(lambda link, op: op[0] == READ and op[3] == size)
        old = fake.dma[1]
        assert client.get_into("key", span) == size, "by TCP"
        assert (fake.dma[1] - old == size) is part
        assert client.counters["rdma_fallbacks"] == 1
        until_now = fake.dma[1]
        fake.poke(span.address, b"\xee" * size)  # it is the caller's again
        town.network.release()
        town.network.run()
        fake.land()
        if fake.dma[1] != until_now or fake.peek(span.address, size) != b"\xee" * size:
            raise Harm("the memory was written after the call had returned")
        until_rdma(client)
        assert client.get_into("key", span) == size
        assert fake.peek(span.address, size) == noise(1, size)
        assert client.counters["rdma_fallbacks"] == 1


@pytest.mark.parametrize("part", [False, True])
def test_a_deadline_with_a_read_under_way(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    late_bytes(fake, monkeypatch, part)


def test_control_without_closing_the_links_first(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Harm), links_outlive_failures(monkeypatch):
        late_bytes(fake, monkeypatch, False)


def test_control_a_link_that_was_closed_is_not_flushed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpudirect, "flush", lambda devices: None)
    with pytest.raises(Harm):
        late_bytes(fake, monkeypatch, True)


def test_a_deadline_with_a_write_under_way(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change the memory once put has returned: what is stored is what it was."""
    size = 100 * KIB
    with town_with(fake, monkeypatch) as town:
        client = town.rdma(deadline_s=0.8)
        span = memory(client, fake, size, noise(1, size))
        town.network.hold(lambda link, op: op[0] == WRITE and op[3] >= size)
        assert client.put("key", span), "by TCP"
        before = fake.dma[0]
        fake.poke(span.address, bytes(size))
        town.network.release()
        town.network.run()
        assert fake.dma[0] == before
        assert town.client("shm").get("key") == noise(1, size)
        assert client.counters["rdma_fallbacks"] == 1
        assert client.counters["rdma_puts"] == 0


def test_a_lane_that_breaks_leaves_the_rest_to_tcp(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which copies with the CPU, and so must not get the addresses of devices."""
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        spans: list[Any] = [memory(client, fake, 9000, noise(at, 9000), device=at % 2, at=at) for at in range(6)]
        spans[3] = device_span(Tensor(spans[3].address, 9000))  # staged
        keys = [f"k{at}" for at in range(6)]

        def breaks(*_: Any) -> None:
            raise TransportError("broken")

        for module, name in (("rdmaput.Writing", "put"), ("rdmaget.Reading", "read")):
            with monkeypatch.context() as patch:
                patch.setattr(f"simm.{module}.{name}", breaks)
                if name == "put":
                    assert client.put_many(keys, spans) == [True] * 6
                else:
                    for span in spans:
                        fake.poke(span.address, bytes(9000))
                    assert client.get_into_many(keys, spans) == [9000] * 6
                    assert [fake.peek(span.address, 9000) for span in spans] == [noise(at, 9000) for at in range(6)]
            until_rdma(client)
        assert client.counters["rdma_fallbacks"] == 12
        assert fake.dma == [0, 0]


@pytest.mark.parametrize("first", ["host", "staged", "direct"])
def test_what_is_left_to_tcp_is_copied_to_host_memory_in_parts(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whatever comes first: of a batch of any size that would be as much host memory."""
    monkeypatch.setattr(gpu, "GROUP_BYTES", 20_000)
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        sources: list[Any] = [memory(client, fake, 9000, noise(at, 9000)) for at in range(8)]
        if first == "host":
            sources[0] = noise(0, 9000)
        elif first == "staged":
            sources[0] = Tensor(sources[0].address, 9000)

        def breaks(*_: Any) -> None:
            raise TransportError("broken")

        stored: list[int] = []
        real = TcpPath.store

        def store(self: TcpPath, entries: Any, until: float = 0.0) -> list[int]:
            stored.append(sum(entry[1].nbytes for entry in entries))
            return real(self, entries, until)

        monkeypatch.setattr("simm.rdmaput.Writing.put", breaks)
        monkeypatch.setattr(TcpPath, "store", store)
        keys = [f"k{at}" for at in range(8)]
        assert client.put_many(keys, sources) == [True] * 8
        assert sum(stored) == 72_000 and max(stored) <= 20_000
        assert client.get_many(keys) == [noise(at, 9000) for at in range(8)]


def test_memory_deregistered_under_a_call(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the caller's mistake: the device refuses, and TCP has the rest."""
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        span = memory(client, fake, 9000, noise(1, 9000))
        assert client.put("key", span)
        real = gpudirect.after_work

        def after_work(spans: Any) -> None:
            real(spans)
            client.deregister(span)

        with monkeypatch.context() as patch:
            patch.setattr(gpudirect, "after_work", after_work)
            fake.poke(span.address, bytes(9000))
            assert client.get_into("key", span) == 9000
        assert fake.peek(span.address, 9000) == noise(1, 9000)
        assert client.counters["rdma_fallbacks"] == 1
        assert fake.dma == [9000, 0]


def test_registrations_end_with_their_span_and_with_their_rail(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with town_with(fake, monkeypatch, 2) as town:
        client = town.rdma()
        regions = [rail.regions for rail in town.fabrics[0].fakes] if town.fabrics else []

        def on_gpu() -> int:
            return sum(region.device is not None for each in regions for region in each)

        class Owner(Tensor):
            gone = False

            def __del__(self) -> None:
                Owner.gone = True

        owner = Owner(fake.alloc(0, 5000), 5000)
        span: Any = client.register(owner)
        del owner
        assert client.put("key", span)
        assert on_gpu() == 2
        part = span.part(0, 100)
        del span
        gc.collect()
        assert on_gpu() == 2 and not Owner.gone
        del part
        gc.collect()
        registry.sweep()
        gc.collect()
        assert on_gpu() == 0 and Owner.gone
        span = memory(client, fake, 5000)
        assert client.get_into("key", span) == 5000
        assert sorted(rail.name for rail in span.registration.rails()) == ["r0", "r1"]
        client.deregister(span)
        client.deregister(span)
        assert on_gpu() == 0
        span = client.register(span)
        assert client.get_into("key", span) == 5000
        client.close()
        assert span.registration.rails() == [], "with the rails"
        another = town.rdma()
        fake.poke(span.address, noise(2, 5000))
        assert another.put("key", span), "and again with the next ones"
        assert another.get("key") == noise(2, 5000)
        assert fake.dma[0] == 10_000
        assert not descriptors()


def test_a_fork_in_the_middle_of_registering(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with town_with(fake, monkeypatch) as town:
        client = town.rdma()
        span = memory(client, fake, 4096, noise(1, 4096))
        pids: list[int] = []

        def refuse(what: str, rail: Any) -> str:
            if what == "register_dmabuf" and not pids:
                assert len(descriptors()) == 1
                pid = os.fork()
                if pid == 0:
                    os._exit(len(descriptors()))
                pids.append(pid)
            return ""

        town.network.refuse = refuse
        assert client.put("key", span)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0, "descriptors left in the child"
        assert fake.dma == [4096, 0]
        calls = len(fake.calls)
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                assert span.registration.rails() == []
                assert not client.put("other", span)
                assert client.get_into("key", span) is None
                assert len(fake.calls) == calls, "the driver was called in a forked child"
                span.registration.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get_into("key", span) == 4096
        assert fake.dma == [4096, 4096]


def test_host_memory_goes_its_way_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cuda.use(None)
    try:
        with RdmaTown(monkeypatch) as town:
            client = town.rdma()
            span = client.register(bytearray(b"v" * 100))
            assert client.put("key", span)
            assert client.get_into("key", span) == 100
            assert type(span.registration) is registry.Registration
        assert cuda.loaded() is None
    finally:
        cuda.use(before)
