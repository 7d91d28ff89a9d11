"""GPU memory as value and buffer, on a CUDA driver in software (``fakecuda.py``). No GPU has seen any of this.

The fake carries copies out when somebody waits for them and not before, and its GPU memory cannot be touched by the
CPU. The tests of copies run on it in Python and as a compiled library, which ctypes calls as it would the real one.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import json
import logging
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fakecuda
import pytest
from fakecuda import FakeCuda
from rdmatown import RdmaTown, until_rdma

from simm import blocks, cuda, gpu, gpurdma, kv, pinned
from simm import session as session_module
from simm.buffers import OnDevice, Span, address_of
from simm.client import Client
from simm.constants import VALUE_BYTES_MAX
from simm.cuda import CudaError, Driver
from simm.errors import CorruptionError, TransportError, UsageError
from simm.gpu import STAGE_BYTES, DeviceSpan, Landing, Unfinished, device_span
from simm.kv import BlockView, deregister_mr, register_mr
from simm.pinned import Pinned
from simm.rdmaget import Reading
from simm.session import WorkerSession
from simm.shmput import DEVICE_KEYS

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

KIB = 1 << 10
MIB = 1 << 20
WAIT_S = 30.0
PAGE = 4096


class Harm(AssertionError):
    """A script saw wrong bytes, or something else that must never be."""


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.01)


def all_of(part: Pinned) -> None:
    """Wait until an arena is registered."""
    until(lambda: part.ready == part.size, "all of it is registered")


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# -- the two fakes behind one handle ------------------------------------------------------------------


class InPython:
    """The fake in Python."""

    def __init__(self) -> None:
        self.library: Any = FakeCuda()

    def alloc(self, device: int, size: int) -> int:
        address: int = self.library.alloc(device, size)
        return address

    def peek(self, address: int, size: int) -> bytes:
        data: bytes = self.library.peek(address, size)
        return data

    def poke(self, address: int, data: bytes) -> None:
        self.library.poke(address, data)

    def registered(self) -> int:
        count: int = self.library.registered()
        return count

    def direct(self) -> int:
        count: int = self.library.direct
        return count

    def check(self) -> None:
        assert self.library.violations == []
        assert self.library.live() == 0, "streams or events left"
        assert not self.library._contexts()

    def close(self) -> None:
        self.library.close()


class Compiled:
    """The same as a shared library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, result, parameters in (
            ("fake_alloc", ctypes.c_uint64, (ctypes.c_int, ctypes.c_size_t)),
            ("fake_peek", ctypes.c_int, (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)),
            ("fake_poke", ctypes.c_int, (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)),
            ("fake_registered", ctypes.c_size_t, ()),
            ("fake_fail_registering", None, (ctypes.c_int,)),
            ("fake_depth", ctypes.c_int, ()),
            ("fake_reset", None, ()),
            ("fake_count", ctypes.c_long, (ctypes.c_int,)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, parameters
        self._violations = library.fake_count(2)

    def alloc(self, device: int, size: int) -> int:
        address: int = self.library.fake_alloc(device, size)
        return address

    def peek(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        assert self.library.fake_peek(address, data, size) == 0
        return data.raw

    def poke(self, address: int, data: bytes) -> None:
        assert self.library.fake_poke(address, data, len(data)) == 0

    def registered(self) -> int:
        count: int = self.library.fake_registered()
        return count

    def direct(self) -> int:
        count: int = self.library.fake_count(0)
        return count

    def check(self) -> None:
        assert self.library.fake_count(2) == self._violations
        assert self.library.fake_depth() == 0

    def close(self) -> None:
        self.library.fake_reset()


@pytest.fixture(scope="session")
def shared_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | str:
    return fakecuda.compiled(tmp_path_factory.mktemp("fakecuda"))


def installed(handle: Any) -> Iterator[Any]:
    """The handle's library is the process's driver; nothing of ours is left with it at the end."""
    driver = Driver(handle.library)
    before = cuda.use(driver)
    try:
        yield handle
        gc.collect()
        gpu.shutdown()
        assert handle.registered() == 0, "host memory is still registered"
        driver.close()
        handle.check()
    finally:
        gpu.shutdown()
        cuda.use(before)
        handle.close()


@pytest.fixture(params=["python", "compiled"])
def both(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "python":
        yield from installed(InPython())
        return
    library = request.getfixturevalue("shared_library")
    if isinstance(library, str):
        pytest.skip(library)
    yield from installed(Compiled(library))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    for handle in installed(InPython()):
        yield handle.library


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Registrations in pieces of 64 KiB, staged copies by 16 KiB."""
    monkeypatch.setattr(gpu, "STAGE_BYTES", 16 * KIB)
    return 64 * KIB


# -- what engines have ----------------------------------------------------------------------------------


class Tensor:
    """As torch's: a pointer, a device, and an interface without a stream."""

    def __init__(self, address: int, size: int, *, kind: str = "cuda", contiguous: bool = True, item: int = 1) -> None:
        self.device = SimpleNamespace(type=kind, index=0)
        self._address = address
        self._size = size
        self._item = item
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return self._address

    def numel(self) -> int:
        return self._size // self._item

    def element_size(self) -> int:
        return self._item

    def is_contiguous(self) -> bool:
        return self._contiguous

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 2, "shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "strides": None}


class Grad(Tensor):
    """A tensor with a gradient: its interface raises."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


class Array:
    """As CuPy's and Numba's: nothing but the interface."""

    def __init__(self, address: int, size: int, **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "stream": None,
        } | more  # fmt: skip


class Arena:
    """What a registration needs of a reader: a mapping."""

    def __init__(self, size: int, name: str = "arena", *, read_only: bool = False) -> None:
        self.name = name
        fd = os.memfd_create(name)
        os.ftruncate(fd, size)
        self._mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        self.data = memoryview(self._mapped)
        self.data_address = address_of(self.data)


def span_of(handle: Any, device: int, size: int, data: bytes = b"") -> DeviceSpan:
    address = handle.alloc(device, size)
    if data:
        handle.poke(address, data)
    return device_span(Tensor(address, size))


# -- the driver's border ----------------------------------------------------------------------------------


def test_devices_have_names_and_attributes(both: Any) -> None:
    driver = cuda.load()
    assert driver.devices == 2
    assert [driver.device_name(each) for each in (0, 1)] == ["Fake GPU 0", "Fake GPU 1"]
    assert driver.bus_id(1) == "0000:a1:00.0"
    assert driver.attribute(0, cuda.DMA_BUF_SUPPORTED) == 1
    assert driver.attribute(0, 98765) == 0
    assert "2 devices" in repr(driver)


def test_an_error_says_which_call_and_what(both: Any) -> None:
    driver = cuda.load()
    with pytest.raises(CudaError, match=r"cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE \(.+\)") as caught:
        driver.memory_at(4096)
    assert caught.value.code == 1
    with pytest.raises(CudaError, match="cuMemHostUnregister: 713"):
        driver.host_unregister(4096)
    with pytest.raises(CudaError, match="cuDeviceGet: 101"):
        driver.push(7)


def test_addresses_and_sizes_have_64_bits(both: Any) -> None:
    """A prototype that cuts one short shows here."""
    driver = cuda.load()
    size = 5 << 30
    start = fakecuda._LIBC.mmap(None, size, 0, fakecuda._PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    driver.push(0)
    try:
        driver.host_register(start, size, read_only=True)
        assert both.registered() == size
        driver.host_unregister(start)
        assert both.registered() == 0
        address = driver.allocate(3 * PAGE)
        assert address > 1 << 32
        assert driver.memory_at(address + 2 * PAGE) == (cuda.MEMORY_DEVICE, 0)
        driver.sync_memops(address)
        fd = driver.dma_buf(address, 2 * PAGE)
        assert "fake-dma-buf" in os.readlink(f"/proc/self/fd/{fd}")
        os.close(fd)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            driver.dma_buf(address + 1, PAGE)
        assert not driver.managed(address + 2 * PAGE)
        assert driver.flushes
        driver.flush_writes()
        driver.stream_synchronize(cuda.STREAM_LEGACY)
        assert driver.attribute(0, cuda.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & cuda.FLUSH_BY_HOST
        assert driver.attribute(0, cuda.GPU_DIRECT_RDMA_WRITES_ORDERING) < cuda.ALL_DEVICES
        driver.free(address)
        driver.context_synchronize()
    finally:
        driver.pop()
        fakecuda._LIBC.munmap(start, size)


def test_a_machine_without_a_driver_says_so_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libthere-is-none.so.1")
    before = cuda.use(None)
    opened = []
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: opened.append(name) or real(name, *rest))
    try:
        for _ in range(2):
            with pytest.raises(CudaError, match="no CUDA driver: libthere-is-none"):
                cuda.load()
        assert len(opened) == 1
        with pytest.raises(UsageError, match="cannot be used: no CUDA driver"):
            device_span(Tensor(4096, 64))
        assert register_mr(Tensor(4096, 64)) is None
    finally:
        cuda.use(before)


def test_an_old_or_strange_driver() -> None:
    class Old:
        cuInit = None

    with pytest.raises(CudaError, match="has no cu"):
        Driver(Old())
    fake = FakeCuda()
    fake.failing["cuInit"] = [100]
    with pytest.raises(CudaError, match="cuInit: 100"):
        Driver(fake)


def test_without_the_export_of_dma_bufs() -> None:
    fake = FakeCuda()
    real = cuda.FUNCTIONS["range_handle"]
    try:
        cuda.FUNCTIONS["range_handle"] = ("cuThereIsNone", real[1])
        driver = Driver(fake)
    finally:
        cuda.FUNCTIONS["range_handle"] = real
    with pytest.raises(CudaError, match=r"older than CUDA 11\.7"):
        driver.dma_buf(0, PAGE)


def test_contexts_are_retained_once_and_the_callers_comes_back(fake: FakeCuda) -> None:
    driver = cuda.load()
    driver.push(1)
    mine = list(fake._contexts())
    spans = [span_of(fake, device, 64, noise(device, 64)) for device in (0, 1, 0, 1)]
    assert [bytes(gpu.host_copy(span)) for span in spans] == [noise(device, 64) for device in (0, 1, 0, 1)]
    gpu.to_device((span, address_of(memoryview(bytearray(64))), 64, None) for span in spans)
    assert fake._contexts() == mine
    driver.pop()
    assert fake.retained == [1, 1]


# -- spans ------------------------------------------------------------------------------------------------


def test_spans_of_all_kinds(fake: FakeCuda) -> None:
    address = fake.alloc(1, 96)
    for thing in (
        Tensor(address, 96), Tensor(address, 96, item=4), Grad(address, 96), Array(address, 96),
        Array(address, 96, shape=(2, 3, 4), typestr="<f4"),
        Array(address, 96, shape=(8, 1, 3), typestr="<f4", strides=(12, 7, 4)),
    ):  # fmt: skip
        span = device_span(thing)
        assert (span.address, span.size, len(span), span.device, span.stream) == (address, 96, 96, 1, 0)
        assert span.writable
        assert span.keep is thing
    assert not device_span(Array(address, 96, data=(address, True))).writable
    assert device_span(Array(address, 96, stream=1)).stream == 1
    assert device_span(Array(address, 96, stream=1), stream=77).stream == 77
    assert device_span(device_span(Tensor(address, 96)), 5).stream == 5
    assert device_span(span) is span
    assert "device=1" in repr(span)
    part = span.part(32, 8)
    assert (type(part), part.address, part.size, part.device) == (DeviceSpan, address + 32, 8, 1)
    for offset, size in ((-1, 8), (90, 7), (0, 0), (0, 97)):
        with pytest.raises(UsageError, match="has no part"):
            span.part(offset, size)
    piece = span.piece(address + 32, 8)
    assert (piece.address, piece.size, piece.device, piece.keep) == (address + 32, 8, 1, span.keep)


def test_what_is_no_memory_of_a_gpu_is_refused(fake: FakeCuda) -> None:
    address = fake.alloc(0, 96)
    host = bytearray(96)
    wrong: list[tuple[Any, str]] = [
        (Tensor(address, 96, contiguous=False), "not contiguous"),
        (Tensor(address, 0), "empty"),
        (Array(0, 0), "empty"),
        (Array(address, 96, strides=(2,)), "not contiguous"),
        (Array(address, 96, shape=(4, 6), typestr="<f4", strides=(4, 16)), "not contiguous"),
        (Array(address, 96, mask=object()), "mask"),
        (Array(address, 96, stream=0), "stream=0"),
        (Array(address, 96, stream="1"), "stream='1'"),
        (Array(address, 96, typestr="u"), "is none"),
        (Array(address, 96, data=address), "is none"),
        (Tensor(ctypes.addressof(ctypes.c_char.from_buffer(host)), 96), "cannot be used: cuPointerGetAttribute"),
        (object(), "no GPU memory that SiMM knows"),
    ]
    for thing, why in wrong:
        with pytest.raises(UsageError, match=why):
            device_span(thing)


def test_pinned_host_memory_is_not_a_gpus(fake: FakeCuda) -> None:
    arena = Arena(PAGE)
    driver = cuda.load()
    driver.push(0)
    driver.host_register(arena.data_address, PAGE)
    with pytest.raises(UsageError, match="no GPU's memory"):
        device_span(Tensor(arena.data_address, 64))
    driver.host_unregister(arena.data_address)
    driver.pop()


def test_a_span_is_no_buffer(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    with pytest.raises(OnDevice):
        span.view()
    with pytest.raises(TypeError):
        memoryview(span)  # type: ignore[arg-type]


# -- copies -------------------------------------------------------------------------------------------------

SIZES = (1, 4096, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 3 * 16 * KIB + 7, 200 * KIB)


@pytest.mark.parametrize("share", [0, 1, 2, 4])
def test_copies_with_an_arena_registered_in_part(both: Any, small_pieces: int, share: int) -> None:
    """None, some and all of it: each byte where it belongs, and what is registered goes without the CPU."""
    size = 256 * KIB
    arena = Arena(size)
    begun = both.registered()
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    for _ in range(share):
        part.register_some()
    part.check()
    assert both.registered() - begun == share * small_pieces
    for number, length in enumerate(SIZES):
        for start in (0, small_pieces - 5, size - length):
            if start + length > size:
                continue
            value = noise(length + start, length)
            span = span_of(both, number % 2, length + 16, b"." * (length + 16))
            arena.data[start : start + length] = value
            before = both.direct()
            gpu.to_device([(span, arena.data_address + start, length, part)])
            assert both.peek(span.address, length + 16) == value + b"." * 16
            if share == 4:
                assert both.direct() - before == (start + length - 1) // small_pieces - start // small_pieces + 1
            arena.data[start : start + length] = bytes(length)
            gpu.to_host([(span, arena.data_address + start, length, part)])
            assert arena.data[start : start + length] == value
            around = bytes(arena.data[:start]) + bytes(arena.data[start + length :])
            assert not any(around)
            arena.data[:] = bytes(size)
    part.close()
    part.close()
    part.check()


def test_many_copies_are_one_wait(fake: FakeCuda) -> None:
    arena = Arena(MIB)
    whole = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    whole.register_some()
    arena.data[:] = noise(1, MIB)
    spans = [span_of(fake, 0, 4096) for _ in range(100)]
    fake.calls.clear()
    gpu.to_device((span, arena.data_address + 4096 * at, 4096, whole) for at, span in enumerate(spans))
    assert fake.calls.count("cuStreamSynchronize") == 1
    assert fake.calls.count("cuMemcpyHtoDAsync_v2") == 100
    assert b"".join(fake.peek(span.address, 4096) for span in spans) == arena.data[: 100 * 4096]
    whole.close()


def test_threads_have_streams_of_their_own(fake: FakeCuda) -> None:
    spans = [span_of(fake, number % 2, 64 * KIB) for number in range(8)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            data = noise(number * 100 + turn, 64 * KIB)
            gpu.copy_in(spans[number], memoryview(data))
            if gpu.host_copy(spans[number]) != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(map(len, gpu._idle.values())) <= 2 * gpu.IDLE_STREAMS


def test_surplus_streams_are_closed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "IDLE_STREAMS", 0)
    span = span_of(fake, 0, 64, b"x" * 64)
    assert bytes(gpu.host_copy(span)) == b"x" * 64
    assert fake.live() == 0
    assert fake.registered() == 0


# -- whose work a copy comes after -----------------------------------------------------------------------------


def produced(fake: FakeCuda, stream: int, named: int | None, *, version: int = 3) -> bytes:
    """What a put would read of memory that a kernel on ``stream`` writes, where the object names ``named``."""
    address = fake.alloc(0, 64)
    fake.poke(address, b"old" + bytes(61))
    fake.work(stream, 0, address, b"new" + bytes(61))
    thing = Array(address, 64, stream=named, version=version)
    return bytes(gpu.host_copy(device_span(thing)))[:3]


def test_named_streams_are_waited_for(fake: FakeCuda) -> None:
    mine = fake.user_stream(0)
    assert produced(fake, mine, mine) == b"new"
    assert produced(fake, cuda.STREAM_LEGACY, 1) == b"new"
    assert produced(fake, cuda.STREAM_LEGACY, None) == b"new", "the default stream's order is kept without a word"
    assert produced(fake, mine, cuda.STREAM_PER_THREAD) == b"new"
    fake._handles.pop(mine)


def test_a_stream_that_nobody_names_is_the_callers_affair(fake: FakeCuda) -> None:
    """The control of the above: the fake does not carry work out before its time."""
    mine = fake.user_stream(0)
    assert produced(fake, mine, None) == b"old"
    fake._handles.pop(mine)


def test_control_streams_not_followed(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = fake.user_stream(0)
    monkeypatch.setattr(gpu._Stream, "follow", lambda *_: None)
    assert produced(fake, mine, mine) == b"old"
    fake._handles.pop(mine)


def test_control_streams_that_do_not_keep_the_default_streams_order(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "stream_create", lambda self: self._made("stream_create", 1))
    assert produced(fake, cuda.STREAM_LEGACY, None) == b"old"


def test_a_buffer_is_written_after_the_work_that_reads_it(fake: FakeCuda) -> None:
    mine = fake.user_stream(0)
    address = fake.alloc(0, 64)
    fake.work(mine, 0, address, b"earlier work, which must not come out on top")
    gpu.copy_in(device_span(Array(address, 64, stream=mine)), memoryview(b"v" * 64))
    fake._run(fake._handles[mine])
    assert fake.peek(address, 64) == b"v" * 64
    fake._handles.pop(mine)


# -- failures -----------------------------------------------------------------------------------------------


def test_a_copy_that_does_not_begin(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    fake.failing["cuMemcpyHtoDAsync_v2"] = [2]
    with pytest.raises(CudaError, match="cuMemcpyHtoDAsync_v2: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        gpu.copy_in(span, memoryview(b"x" * 64))
    assert not isinstance(caught.value, Unfinished)
    assert not fake._contexts()
    gpu.copy_in(span, memoryview(b"y" * 64))
    assert fake.peek(span.address, 64) == b"y" * 64


def test_a_wait_that_fails_is_said_and_the_stream_is_not_used_again(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    gpu.copy_in(span, memoryview(b"x" * 64))
    (stream,) = gpu._idle[0]
    fake.failing["cuStreamSynchronize"] = [700]
    with pytest.raises(Unfinished, match="ILLEGAL_ADDRESS"):
        gpu.copy_in(span, memoryview(b"y" * 64))
    assert stream in gpu._LOST
    assert stream not in gpu._idle[0]
    gpu.copy_in(span, memoryview(b"z" * 64))
    assert fake.peek(span.address, 64) == b"z" * 64
    gpu._LOST.remove(stream)
    cuda.load().push(0)
    stream.close()  # the fake's is well
    cuda.load().pop()


def test_a_sticky_error_leaves_nothing_half_done(fake: FakeCuda) -> None:
    span = span_of(fake, 0, 64)
    fake.sticky = 700
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        gpu.copy_in(span, memoryview(b"x" * 64))
    fake.sticky = 0
    gpu.copy_in(span, memoryview(b"z" * 64))


def test_an_interruption_waits_for_the_device(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(PAGE)
    whole = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    whole.register_some()
    span = span_of(fake, 0, 64, b"device" + bytes(58))
    real = Driver.stream_synchronize
    struck = []

    def strike(self: Driver, stream: int) -> None:
        if not struck:
            struck.append(stream)
            raise KeyboardInterrupt
        real(self, stream)

    monkeypatch.setattr(Driver, "stream_synchronize", strike)
    with pytest.raises(KeyboardInterrupt):
        gpu.to_host([(span, arena.data_address, 64, whole)])
    assert fake.pending() == 0
    assert arena.data[:6] == b"device"

    def interrupted() -> Iterator[gpu.Copy]:
        yield span, arena.data_address, 64, whole
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu.to_host(interrupted())
    assert fake.pending() == 0
    assert not fake._contexts()
    whole.close()


def test_without_pinned_memory_copies_are_slow_and_right(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    fake.failing["cuMemHostRegister_v2"] = [2]
    span = span_of(fake, 0, 3 * STAGE_BYTES)
    data = noise(5, 3 * STAGE_BYTES)
    with caplog.at_level(logging.WARNING, "simm.gpu"):
        gpu.copy_in(span, memoryview(data))
        assert gpu.host_copy(span) == data
    assert [record.message for record in caplog.records] == [
        "no pinned memory for copies to and from GPU 0: cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY "
        "(as the fake driver says)"
    ]
    assert fake.pageable > 0


# -- registrations ----------------------------------------------------------------------------------------------


def test_an_arena_is_registered_once_in_the_background(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(MIB)
    driver = cuda.load()
    with caplog.at_level(logging.INFO, "simm.gpu"):
        known = pinned.pinned_for(arena, driver, 0)  # type: ignore[arg-type]
        assert pinned.pinned_for(arena, driver, 1) is known  # type: ignore[arg-type]
        all_of(known)
        until(lambda: caplog.records, "and that is said")
    assert "arena arena: 1 MiB registered with the CUDA driver" in caplog.text
    assert fake.registered() == MIB
    assert next(iter(fake.ranges.values()))[1] == cuda.REGISTER_PORTABLE
    known.check()
    # Whoever drops the reader must not wait for the driver, so another thread lets go of the mapping.
    mapped = arena._mapped
    address = arena.data_address
    del arena, known
    gc.collect()
    until(lambda: not fake.registered(), "it is undone")
    del mapped
    gc.collect()
    until(lambda: "arena" not in fakecuda.mapped_at(address), "and the mapping goes")
    assert not fake.violations


def test_a_mapping_that_is_read_only(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    arena = Arena.__new__(Arena)
    arena.name = "ro"
    mapped = mmap.mmap(-1, PAGE)
    arena.data = memoryview(mapped).toreadonly()
    arena.data_address = np.frombuffer(arena.data, np.uint8).ctypes.data
    part = Pinned(cuda.load(), "ro", arena.data, arena.data_address, 0, writable=False)
    part.register_some()
    assert next(iter(fake.ranges.values()))[1] == cuda.REGISTER_PORTABLE | cuda.REGISTER_READ_ONLY
    part.close()
    monkeypatch.setattr(Driver, "attribute", lambda *_: 0)
    part = Pinned(cuda.load(), "ro", arena.data, arena.data_address, 0, writable=False)
    assert not part.register_some()
    assert "read-only" in part.why
    part.close()


def test_registering_that_fails_is_said_once_and_not_tried_again(
    fake: FakeCuda, caplog: pytest.LogCaptureFixture, small_pieces: int
) -> None:
    arena = Arena(256 * KIB)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    assert part.register_some()
    fake.failing["cuMemHostRegister_v2"] = [2, 2]
    with caplog.at_level(logging.WARNING, "simm.gpu"):
        assert not part.register_some()
        assert not part.register_some()
    assert len(caplog.records) == 1
    assert "and no more (cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert part.direct(arena.data_address + small_pieces - 1, 10) == 1
    assert part.direct(arena.data_address + small_pieces, 10) == 0
    assert part.direct(arena.data_address - 1, 10) == 0
    part.check()
    part.close()


def test_check_sees_a_wrong_account(fake: FakeCuda) -> None:
    arena = Arena(PAGE)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    part.register_some()
    part.ready = 2 * PAGE
    with pytest.raises(CorruptionError):
        part.check()
    part.ready = PAGE
    part.close()


def test_a_mapping_that_cannot_be_unregistered_stays(fake: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(PAGE)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0)
    part.register_some()
    fake.failing["cuMemHostUnregister"] = [700]
    part.close()
    assert "is not unregistered" in caplog.text
    assert part._data is not None
    pinned._STUCK.remove(part)
    part.close()


def dies_registered(fake: FakeCuda) -> None:
    """A reader goes while its arena is registered."""
    arena = Arena(64 * KIB, "dies")
    known = pinned.pinned_for(arena, cuda.load(), 0)  # type: ignore[arg-type]
    all_of(known)
    del known, arena
    gc.collect()
    until(lambda: not fake.registered(), "unregistered")
    if fake.violations:
        raise Harm(fake.violations[0])


def test_a_reader_that_dies(fake: FakeCuda) -> None:
    dies_registered(fake)


def test_control_a_mapping_that_goes_before_its_registration(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pinned._gone

    def too_early(part: Pinned) -> None:
        part._data = None
        threading.Timer(0.2, real, (part,)).start()

    monkeypatch.setattr(pinned, "_gone", too_early)
    with pytest.raises(Harm, match="after its mapping had gone"):
        dies_registered(fake)
    fake.violations.clear()


def test_control_copies_across_pieces(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, small_pieces: int) -> None:
    monkeypatch.setattr(Pinned, "direct", lambda self, address, size: size)
    arena = Arena(256 * KIB)
    part = Pinned(cuda.load(), "arena", arena.data, arena.data_address, 0, piece=small_pieces)
    while part.register_some():
        pass
    span = span_of(fake, 0, 128 * KIB)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        gpu.to_device([(span, arena.data_address + 1, 128 * KIB, part)])
    part.close()


# -- end to end ------------------------------------------------------------------------------------------------


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """The test's own: the cluster is shared."""
    return f"gpu-{abs(hash(request.node.name)) % 10**9}"


@pytest.fixture(params=["shm", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def connect(cluster: Any, namespace: str, path: str = "shm", **more: Any) -> Client:
    return Client(cluster.manager, namespace=namespace, path=path, deadline_s=10.0, **more)


def reader_of(client: Client) -> Any:
    router = client._router
    assert router is not None
    (target,) = router.targets.values()
    return target.reader


def registered_by(client: Client) -> None:
    """Wait until the client's arena is registered."""
    reader = reader_of(client)
    if reader is not None:
        known = pinned.pinned_for(reader, cuda.load(), 0)
        all_of(known)


def test_put_and_get(both: Any, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path) as client:
        assert client.put("first", b"x")
        registered_by(client)
        for number, size in enumerate((1, 4096, 40_000, 300_001, 5 * MIB + 3)):
            value = noise(size, size)
            address = both.alloc(number % 2, size)
            both.poke(address, value)
            assert client.put(f"from {size}", Tensor(address, size))
            assert client.get(f"from {size}") == value
            room = both.alloc((number + 1) % 2, size + 8)
            assert client.get_into(f"from {size}", Array(room, size + 8)) == size
            assert both.peek(room, size + 8) == value + bytes(8)
            assert client.put(f"of the host {size}", value)
            both.poke(room, bytes(size))
            assert client.get_into(f"of the host {size}", device_span(Tensor(room, size))) == size
            assert both.peek(room, size) == value
        assert client.get_into("absent", Tensor(both.alloc(0, 64), 64)) is None


def test_batches(both: Any, cluster: Any, path: str, namespace: str) -> None:
    """Batches with misses, host memory and both devices among them."""
    with connect(cluster, namespace, path) as client:
        count = 3 * DEVICE_KEYS // 2
        sizes = [random.Random(at).choice((100, 4096, 20_000, 50_000)) for at in range(count)]
        values = [noise(at, size) for at, size in enumerate(sizes)]
        sources: list[Any] = []
        for at, value in enumerate(values):
            if at % 7 == 3:
                sources.append(value)
                continue
            address = both.alloc(at % 2, sizes[at])
            both.poke(address, value)
            sources.append(Tensor(address, sizes[at]))
        keys = [f"batch {at}" for at in range(count)]
        assert client.put_many(keys, sources) == [True] * count
        assert client.get_many(keys) == values
        wanted = [key if at % 5 else "absent" for at, key in enumerate(keys)]
        rooms: list[Any] = []
        for at, size in enumerate(sizes):
            rooms.append(bytearray(size) if at % 6 == 5 else Tensor(both.alloc((at + 1) % 2, size), size))
        got = client.get_into_many(wanted, rooms)
        assert got == [size if at % 5 else None for at, size in enumerate(sizes)]
        for at, room in enumerate(rooms):
            if at % 5:
                data = bytes(room) if isinstance(room, bytearray) else both.peek(room.data_ptr(), sizes[at])
                assert data == values[at]
        # A first sink or source in host memory: the others are done one by one.
        order = sorted(range(count), key=lambda at: not isinstance(sources[at], bytes))
        assert client.put_many([f"again {at}" for at in order], [sources[at] for at in order]) == [True] * count
        assert client.get_many([f"again {at}" for at in order]) == [values[at] for at in order]
        few = order[:1] + [at for at in order if not isinstance(sources[at], bytes)][:3]
        sinks = [bytearray(sizes[few[0]]), *(Tensor(both.alloc(0, sizes[at]), sizes[at]) for at in few[1:])]
        assert client.get_into_many([f"again {at}" for at in few], sinks) == [sizes[at] for at in few]
        for at, sink in zip(few[1:], sinks[1:]):
            assert both.peek(sink.data_ptr(), sizes[at]) == values[at]


def test_small_buffers_and_wrong_ones(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path) as client:
        client.put("key", b"v" * 100)
        room = fake.alloc(0, 99)
        with pytest.raises(UsageError, match="does not fit a buffer of 99 bytes"):
            client.get_into("key", Tensor(room, 99))
        with pytest.raises(UsageError, match="does not fit a buffer of 99 bytes"):
            client.get_into_many(["key", "key"], [Tensor(room, 99), Tensor(fake.alloc(0, 100), 100)])
        assert not any(fake.peek(room, 99)), "not one byte is written"
        with pytest.raises(UsageError, match="read-only"):
            client.get_into("key", Array(room, 99, data=(room, True)))
        with pytest.raises(UsageError, match="not contiguous"):
            client.put("key", Tensor(room, 99, contiguous=False))
        with pytest.raises(UsageError, match="a tensor on xpu cannot be copied"):
            client.put("key", Tensor(room, 99, kind="xpu"))
        with pytest.raises(UsageError, match=f"1 to {VALUE_BYTES_MAX} bytes"):
            client.put("key", Tensor(fake.alloc(0, 1), VALUE_BYTES_MAX + 1))
        span = client.register(Tensor(room, 99))
        assert type(span) is DeviceSpan
        assert client.register(span) is span
        assert type(client.register(Array(room, 99))) is DeviceSpan
        assert client.put("other", span)


def test_checksums(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path, checksum=True) as client, connect(cluster, namespace) as trusting:
        values = [noise(at, 50_000) for at in range(4)]
        sources = [span_of(fake, 0, 50_000, value) for value in values]
        keys = [f"key {at}" for at in range(4)]
        assert client.put_many(keys, sources) == [True] * 4
        assert client.put("single", sources[0])
        rooms = [span_of(fake, 1, 50_000) for _ in range(4)]
        assert client.get_into_many(keys, rooms) == [50_000] * 4
        assert client.get_into("single", rooms[0]) == 50_000
        assert [fake.peek(room.address, 50_000) for room in rooms] == [values[0], *values[1:]]
        view = trusting.view("key 1")
        assert view is not None
        found = reader_of(trusting).locate(trusting.digest("key 1"))
        reader_of(trusting).data[found.offset - reader_of(trusting).data_offset] ^= 1
        view.close()
        assert client.get_into_many(keys, rooms) == [50_000, None, 50_000, 50_000]
        assert client.counters["crc_errors"] == 1


def test_two_copies(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    with connect(cluster, namespace, path, replicas=2) as client:
        span = span_of(fake, 0, 5000, noise(3, 5000))
        assert client.put("key", span)
        room = span_of(fake, 1, 5000)
        assert client.get_into("key", room) == 5000
        assert fake.peek(room.address, 5000) == noise(3, 5000)


def test_async_and_the_callers_streams(fake: FakeCuda, cluster: Any, path: str, namespace: str) -> None:
    """A put out of memory that is still being computed stores what comes out of it."""
    with connect(cluster, namespace, path) as client:
        client.put("first", b"x")
        registered_by(client)
        mine = fake.user_stream(0)
        for stream, named in ((mine, mine), (cuda.STREAM_LEGACY, None), (mine, cuda.STREAM_PER_THREAD)):
            address = fake.alloc(0, 4096)
            fake.work(stream, 0, address, b"computed" + bytes(4088))
            assert asyncio.run(client.put_async("key", Array(address, 4096, stream=named)))
            assert client.get("key") == b"computed" + bytes(4088)
            room = fake.alloc(0, 4096)
            assert asyncio.run(client.get_into_async("key", Array(room, 4096, stream=named))) == 4096
            assert fake.peek(room, 8) == b"computed"
        fake._handles.pop(mine)


def test_engines_by_kv(fake: FakeCuda, cluster: Any, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", cluster.manager)
    monkeypatch.setenv("SIMM_NAMESPACE", namespace)
    monkeypatch.setattr(kv, "_flags", {})
    monkeypatch.setattr(blocks, "_torch_module", blocks._NO_TORCH)
    size, page = 64 * KIB, 4 * KIB
    pool = fake.alloc(1, size)
    fake.poke(pool, noise(9, size))
    tensor = Tensor(pool, size)
    with kv.Store() as store:
        mr = register_mr(tensor)
        assert mr is not None
        assert "MrExt" in repr(mr)
        views = [BlockView.from_buffer(pool + at, page, mr) for at in range(0, size, page)]
        keys = [f"page {at}" for at in range(len(views))]
        assert store.mput(keys, views) == [0] * len(views)
        out = fake.alloc(0, size)
        other = register_mr(Array(out, size))
        assert other is not None
        rooms = [BlockView.from_buffer(out + at, page, other) for at in range(0, size, page)]
        assert store.mget(keys, rooms) == [page] * len(rooms)
        assert fake.peek(out, size) == noise(9, size)
        whole = BlockView.from_tensor(tensor, mr)
        assert store.put("whole", whole) == 0
        assert store.get("whole", BlockView.from_tensor(Array(out, size))) == size
        assert store.get("whole", rooms[0]) < 0
        assert whole.as_ref().__cuda_array_interface__["data"] == (pool, False)
        read_only = register_mr(Array(out, size, data=(out, True)))
        assert read_only is not None
        assert store.get("whole", BlockView.from_buffer(out, size, read_only)) == -1000
        wrong = BlockView.from_buffer(out + (1 << 40), page, other)
        assert store.put("nowhere", wrong) < 0
        assert store.get(keys[0], wrong) < 0
        assert deregister_mr(mr)
        assert isinstance(mr._span, DeviceSpan)
        assert register_mr(Tensor(pool, size, contiguous=False)) is None


# -- what the confirmation is worth --------------------------------------------------------------------------------


def overwritten_while_copied(fake: FakeCuda, cluster: Any, namespace: str, keys: Sequence[str]) -> None:
    """While a value's DMA is under way its key is overwritten, and its chunk filled with others' values."""
    size = 64 * KIB
    old, new = b"o" * size, b"n" * size
    with connect(cluster, namespace) as client, connect(cluster, namespace) as other:
        for key in keys:
            assert client.put(key, old)
        registered_by(client)
        struck: list[int] = []

        def strike(into: bool, _host: int, length: int) -> None:
            if into and length == size and not struck:
                struck.append(1)
                for key in keys:
                    assert other.put(key, new)
                for at in range(3 * len(keys) + 8):
                    assert other.put(f"others' {at}", b"x" * size)

        fake.on_copy = strike
        rooms = [span_of(fake, 0, size) for _ in keys]
        got = client.get_into_many(keys, rooms) if len(keys) > 1 else [client.get_into(keys[0], rooms[0])]
        data = [fake.peek(room.address, size) for room in rooms]
        fake.on_copy = None
        for length, value in zip(got, data):
            if length is not None and value not in (old, new):
                raise Harm(f"a hit, with {value[:4]!r}")
        if not struck:
            raise Harm("the copy was not carried out before the call returned")
        assert got == [size] * len(keys)
        assert data == [new] * len(keys)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_value_that_changes_under_its_dma(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    overwritten_while_copied(fake, cluster, namespace, [f"key {at}" for at in range(count)])


@pytest.mark.parametrize("count", [1, 40])
def test_control_confirmed_before_it_was_copied(
    fake: FakeCuda, cluster: Any, namespace: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Any] = []

    def begin_only(flight: Any, begin: Any, copies: Any) -> None:
        late.append(flight)
        for span, address, size, part in copies:
            begin(span, address, size, part)

    monkeypatch.setattr(gpu, "_carry_out", begin_only)
    with pytest.raises(Harm):
        overwritten_while_copied(fake, cluster, namespace, [f"key {at}" for at in range(count)])
    for flight in reversed(late):
        flight.settle()


def stored_as_it_was(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    """What a put has stored is what the memory had, also where that changes right after the call."""
    with connect(cluster, namespace) as client:
        client.put("first", b"x")
        registered_by(client)
        spans = [span_of(fake, 0, 8 * KIB, b"v" * 8 * KIB) for _ in range(count)]
        keys = [f"key {at}" for at in range(count)]
        assert client.put_many(keys, spans) == [True] * count
        for span in spans:
            fake.poke(span.address, b"later" * 8)
        if client.get_many(keys) != [b"v" * 8 * KIB] * count:
            raise Harm("a put came back before it had read its memory")


@pytest.mark.parametrize("count", [1, DEVICE_KEYS + 3])
def test_a_put_has_read_when_it_returns(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    stored_as_it_was(fake, cluster, namespace, count)


def test_control_committed_before_it_was_copied(
    fake: FakeCuda, cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Any] = []

    def begin_only(flight: Any, begin: Any, copies: Any) -> None:
        late.append(flight)
        for span, address, size, part in copies:
            begin(span, address, size, part)

    monkeypatch.setattr(gpu, "_carry_out", begin_only)
    with pytest.raises(Harm):
        stored_as_it_was(fake, cluster, namespace, 5)
    monkeypatch.undo()
    for flight in reversed(late):
        flight._driver.push(0)
        flight.settle()
    while fake._contexts():
        cuda.load().pop()


# -- a GPU that fails ------------------------------------------------------------------------------------------------


def session_of(client: Client) -> WorkerSession:
    router = client._router
    assert router is not None
    (target,) = router.targets.values()
    assert target.session is not None
    return target.session


def grants_of(client: Client) -> int:
    return sum(map(len, session_of(client).grants.values()))


@pytest.mark.parametrize("count", [1, 20])
def test_a_failing_gpu_is_an_outage(fake: FakeCuda, cluster: Any, path: str, namespace: str, count: int) -> None:
    with connect(cluster, namespace, path) as client:
        values = [noise(at, 9000) for at in range(count)]
        keys = [f"key {at}" for at in range(count)]
        spans = [span_of(fake, 0, 9000, value) for value in values]
        assert client.put_many(keys, spans) == [True] * count
        before = grants_of(client) if path == "shm" else 0
        for name, wrong in (("cuMemcpyDtoHAsync_v2", 1), ("cuCtxPushCurrent_v2", 700)):
            fake.failing[name] = [wrong]
            assert client.put_many([f"failed {key}" for key in keys], spans) == [False] * count
            assert fake.failing.pop(name) == []
        for name, wrong in (("cuMemcpyHtoDAsync_v2", 1), ("cuCtxPushCurrent_v2", 700)):
            outages = client.counters["outages"]
            fake.failing[name] = [wrong]
            assert client.get_into_many(keys, spans) == [None] * count
            assert client.counters["outages"] - outages == count
            fake.failing.clear()
            fake.failing[name] = [wrong]
            assert client.get_into(keys[0], spans[0]) is None
            fake.failing.clear()
        if path == "shm":
            assert grants_of(client) >= before, "grants of values that were not copied are back in the pool"
            assert not session_of(client).copying
        assert client.put_many(keys, spans) == [True] * count
        assert client.get_into_many(keys, spans) == [9000] * count
        assert client.stats()["workers"][0]["path"] == path, "the path is none the worse for it"
        assert client.get_many(keys) == [fake.peek(span.address, 9000) for span in spans]


def late_writes(fake: FakeCuda, cluster: Any, namespace: str, count: int) -> None:
    """The driver cannot say that a put's copies have ended, and they go on long after."""
    size = 9000
    with connect(cluster, namespace) as client:
        client.put("first", b"x" * size)
        registered_by(client)
        session = session_of(client)
        spans = [span_of(fake, 0, size, b"late" * (size // 4)) for _ in range(count)]
        session.return_idle()
        fake.failing["cuStreamSynchronize"] = [700]
        assert client.put_many([f"failed {at}" for at in range(count)], spans) == [False] * count
        still_there = list(session.copying)
        keys = [f"later {at}" for at in range(4 * count + 8)]
        values = [noise(at, size) for at in range(len(keys))]
        assert client.put_many(keys, values) == [True] * len(keys)
        for each in list(fake._handles.values()):
            if isinstance(each, fakecuda.Stream):
                fake._run(each)
        # A miss is no harm: the cluster's memory may be full of other tests' values.
        found = [(got, value) for got, value in zip(client.get_many(keys), values) if got is not None]
        assert len(found) > 4
        wrong = sum(got != value for got, value in found)
        session.copying.clear()
    for stream in gpu._LOST:
        cuda.load().push(0)
        stream.close()
        cuda.load().pop()
    gpu._LOST.clear()
    for part in [*pinned._pinned.values(), *pinned._STUCK]:
        part.stuck = False
        part.close()
    pinned._STUCK.clear()
    if wrong:
        raise Harm(f"a late write went into {wrong} others' values")
    assert still_there == [None], "the session's grants are kept until the process ends"


@pytest.mark.parametrize("count", [1, 20])
def test_a_chunk_that_may_still_be_written_is_never_given_back(
    fake: FakeCuda, cluster: Any, namespace: str, count: int
) -> None:
    late_writes(fake, cluster, namespace, count)


@pytest.mark.parametrize("count", [1, 20])
def test_control_a_chunk_given_back_too_early(
    fake: FakeCuda, cluster: Any, namespace: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "Unfinished", CudaError)
    with pytest.raises(Harm, match="a late write"):
        late_writes(fake, cluster, namespace, count)


def test_an_error_on_the_way_from_the_network_leaves_the_connection_in_order(fake: FakeCuda) -> None:
    landing = Landing()
    spans = [span_of(fake, 0, 100) for _ in range(3)]
    fake.failing["cuMemcpyHtoDAsync_v2"] = [1]
    for at, span in enumerate(spans):
        room = landing.room(span)(50 + at)
        room[:] = bytes([at]) * (50 + at)
    with pytest.raises(CudaError):
        landing.finish()
    landing = Landing()
    for at, span in enumerate(spans):
        landing.room(span)(50 + at)[:] = bytes([at]) * (50 + at)
    landing.finish()
    assert [fake.peek(span.address, 53) for span in spans] == [
        bytes([at]) * (50 + at) + bytes(3 - at) for at in range(3)
    ]


# -- forks ---------------------------------------------------------------------------------------------------------


def test_a_forked_child_has_no_gpu_and_the_rest_as_ever(fake: FakeCuda, cluster: Any, namespace: str) -> None:
    with connect(cluster, namespace) as client:
        span = span_of(fake, 0, 4096, noise(1, 4096))
        assert client.put("key", span)
        registered_by(client)
        calls = len(fake.calls)
        pid = os.fork()
        if pid == 0:
            status = 99
            try:
                host = bytearray(4096)
                assert client.get_into("key", host) == 4096
                assert host == noise(1, 4096)
                assert client.get_into("key", span) is None
                assert client.put("other", span) is False
                assert client.put_many(["a", "b"], [span, span]) == [False, False]
                try:
                    device_span(Tensor(span.address, 4096))
                except UsageError as exc:
                    assert "does not survive a fork" in str(exc)
                else:
                    raise AssertionError("a span in a forked child")
                gpu.shutdown()
                client.close()
                gc.collect()
                assert len(fake.calls) == calls, "the driver was called in a forked child"
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.get_into("key", span) == 4096


# -- by RDMA, on a network in software ---------------------------------------------------------------------------------


@pytest.fixture
def buried() -> Iterator[None]:
    session_module._BURIED.clear()
    yield
    gpurdma.shutdown()
    session_module._BURIED.clear()


@pytest.mark.parametrize("rails", [1, 2])
def test_by_rdma_values_pass_through_pinned_memory(
    fake: FakeCuda, buried: None, monkeypatch: pytest.MonkeyPatch, rails: int
) -> None:
    """Without one byte by TCP, and without a copy by the CPU."""
    names = [f"r{number}" for number in range(rails)]
    with RdmaTown(monkeypatch, rails=names, mine=names, size=64 * MIB) as town:
        client = town.rdma()
        sizes = [1, 100, 4096, 70_000, MIB + 1, 2 * MIB]
        values = [noise(size, size) for size in sizes]
        sources: list[Any] = [span_of(fake, at % 2, size, values[at]) for at, size in enumerate(sizes)]
        for turn in range(2):
            keys = [f"key {turn} {size}" for size in sizes]
            assert client.put_many(keys, sources) == [True] * len(keys)
            assert client.get_many(keys) == values
            rooms: list[Any] = [span_of(fake, (at + turn) % 2, size + 5) for at, size in enumerate(sizes)]
            assert client.get_into_many([*keys, "absent"], [*rooms, span_of(fake, 0, 64)]) == [*sizes, None]
            assert [fake.peek(room.address, room.size) for room in rooms] == [value + bytes(5) for value in values]
        assert client.put("single", sources[2])
        assert client.get_into("single", rooms[2]) == 4096
        mixed = [values[0], sources[1], values[2], sources[3]]
        assert client.put_many(["twice", "a", "b", "twice"], mixed) == [True] * 4
        assert client.get("twice") == values[3]
        assert client.put_many(["twice", "twice"], [sources[3], values[0]]) == [True] * 2
        assert client.get("twice") == values[0]
        assert client.get_into_many(["a", "b"], [bytearray(100), rooms[2]]) == [100, 4096]
        assert client.get_into_many(["a", "b"], [rooms[1], host := bytearray(4096)]) == [100, 4096]
        assert host == values[2]
        with pytest.raises(UsageError, match="does not fit"):
            client.get_into("b", span_of(fake, 0, 4095))
        assert client.counters["rdma_fallbacks"] == 0
        assert fake.pageable == 0
        assert len(gpurdma._idle) <= 2
        assert fake.dma == [0, 0], "nothing of it was registered, and so none of it direct"
        client.close()


def test_by_rdma_a_lane_that_breaks_leaves_its_staging_memory(
    fake: FakeCuda, buried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RdmaTown(monkeypatch, size=64 * MIB) as town:
        client = town.rdma()
        span = span_of(fake, 0, 70_000, noise(1, 70_000))
        assert client.put("key", span)
        (stage,) = gpurdma._idle
        lost = []

        def breaks(*_: Any) -> None:
            lost.append(1)
            raise TransportError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(Reading, "read", breaks)
            assert client.get_into("key", span_of(fake, 1, 70_000)) == 70_000, "by TCP"
        assert lost
        assert stage not in gpurdma._idle
        assert stage.registration.closed
        until_rdma(client)
        room = span_of(fake, 1, 70_000)
        assert client.get_into("key", room) == 70_000
        assert fake.peek(room.address, 70_000) == noise(1, 70_000)
        fake.failing["cuMemcpyDtoHAsync_v2"] = [1]
        assert not client.put("other", span)
        fake.failing["cuMemcpyHtoDAsync_v2"] = [1]
        assert client.get_into("key", room) is None
        assert client.get_into("key", room) == 70_000
        client.close()


# -- the CPU's part ----------------------------------------------------------------------------------------------------


def test_host_memory_goes_its_way_without_a_driver(cluster: Any, namespace: str) -> None:
    """Nothing of CUDA is touched where nobody brings GPU memory."""
    before = cuda.use(None)
    try:
        with connect(cluster, namespace) as client:
            client.put("key", b"v" * 100)
            buffer = bytearray(100)
            assert client.get_into("key", buffer) == 100
            assert client.get_into("key", client.register(buffer)) == 100
            assert isinstance(client.register(buffer), Span)
        assert cuda.loaded() is None
        assert cuda._why == ""
    finally:
        cuda.use(before)


def benchmark() -> Any:
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.py"
    found = importlib.util.spec_from_file_location("gpu_benchmark", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["gpu_benchmark"] = module
    found.loader.exec_module(module)
    return module


def test_the_benchmark_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libthere-is-none.so.1")
    before = cuda.use(None)
    try:
        assert benchmark().main([]) == 0
    finally:
        cuda.use(before)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert said.startswith("no GPU here (no CUDA driver: libthere-is-none.so.1: ")


def test_the_benchmark_runs(fake: FakeCuda, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the fake, whose figures mean nothing."""
    out = tmp_path / "result.json"
    options = ["--sizes", "4K,300000", "--seconds", "0", "--rounds", "1", "--memory", "512M", "--json", str(out)]
    assert benchmark().main([*options, "--staged"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 24
    assert all(row["GB/s"] > 0 for row in rows)
    assert "Fake GPU 0" in capsys.readouterr().out
    assert benchmark().main(["--device", "7"]) == 0
    assert "no GPU 7 here" in capsys.readouterr().out


def test_control_the_benchmark_sees_wrong_bytes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "fetch", lambda reader, digests, sinks, positions, checksum: (
        [(at, len(sinks[at])) for at in positions], []))  # fmt: skip
    assert benchmark().main(["--sizes", "4K", "--seconds", "0", "--rounds", "1", "--memory", "512M"]) == 1
    assert "WRONG: mget of 4096 bytes" in capsys.readouterr().out


def test_cpu_dies_on_gpu_memory(fake: FakeCuda) -> None:
    """The fake's memory is as far from the CPU as a GPU's."""
    address = fake.alloc(0, 64)
    pid = os.fork()
    if pid == 0:
        import faulthandler
        import resource

        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11


def test_this_suite_runs_the_compiled_library_where_it_can(shared_library: ctypes.CDLL | str, tmp_path: Path) -> None:
    if isinstance(shared_library, str):
        pytest.skip(shared_library)
    symbols = {symbol for symbol, _ in cuda.FUNCTIONS.values()}
    assert all(hasattr(shared_library, symbol) for symbol in symbols)
