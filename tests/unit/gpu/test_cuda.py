"""The CUDA driver by ctypes, on the driver in software.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from simm.errors import UsageError
from simm.gpu import cuda
from simm.gpu.buffers import device_span
from simm.gpu.cuda import CudaError, Driver
from simm.kv import register_mr
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import (
    PAGE,
    Tensor,
    use_driver,
)
from tests.support.segments import child, expect_segv, status_of

# -- the driver's border ----------------------------------------------------------------------------------


def test_devices_have_names_and_attributes(both: Any) -> None:
    driver = cuda.load()
    assert driver.devices == 2
    assert [driver.device_name(each) for each in (0, 1)] == ["Fake GPU 0", "Fake GPU 1"]
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
    """A prototype with a shorter type truncates them."""
    driver = cuda.load()
    size = 5 << 30
    start = fake_cuda._LIBC.mmap(None, size, 0, fake_cuda._PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
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
        fake_cuda._LIBC.munmap(start, size)


def test_a_machine_without_a_driver_says_so_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libthere-is-none.so.1")
    before = use_driver(None)
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
        use_driver(before)


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


def test_cpu_dies_on_gpu_memory(fake: FakeCuda) -> None:
    """The CPU cannot address the fake driver's memory, just as a GPU's."""
    address = fake.alloc(0, 64)

    def reads() -> None:
        expect_segv()
        ctypes.string_at(address, 1)

    assert status_of(child(reads)) == -signal.SIGSEGV


def test_this_suite_runs_the_compiled_library_where_it_can(shared_library: ctypes.CDLL | str, tmp_path: Path) -> None:
    if isinstance(shared_library, str):
        pytest.skip(shared_library)
    symbols = {symbol for symbol, _ in cuda.FUNCTIONS.values()}
    assert all(hasattr(shared_library, symbol) for symbol in symbols)
