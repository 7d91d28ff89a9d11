"""A CUDA driver in software as the process's driver, and objects as engines have them in a GPU's memory.

The fake carries copies out when a caller waits for them and not before, and the CPU cannot touch its GPU memory.
It exists in Python and as a compiled library, which ctypes calls as it would the real one. On a machine with a GPU
:class:`Real` has the same methods.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from simm.client import Client
from simm.gpu import copy, cuda, direct, pinning
from simm.gpu.buffers import DeviceSpan, device_span
from simm.gpu.cuda import Driver
from simm.gpu.pinning import Pinned
from simm.host.buffers import address_of
from tests.support.fake_cuda import FakeCuda
from tests.support.waiting import wait_until

KIB = 1 << 10
MIB = 1 << 20
WAIT_S = 120.0
PAGE = 4096


def all_of(part: Pinned) -> None:
    """Wait until an arena is registered."""
    wait_until(lambda: part.ready == part.size, "all of it is registered")


def reader_of(client: Client) -> Any:
    """Return the reader of the only arena that a client knows; None if it maps none."""
    router = client._router
    assert router is not None
    (target,) = router.targets.values()
    return target.reader


def registered_by(client: Client) -> None:
    """Wait until the client's arena is registered, if it maps one."""
    reader = reader_of(client)
    if reader is not None:
        all_of(pinning.pinned_for(reader, cuda.load(), 0))


@contextlib.contextmanager
def current(driver: Driver, device: int) -> Iterator[None]:
    """Have the device's primary context current in the block, for whom nothing interrupts."""
    driver.push(device)
    try:
        yield
    finally:
        driver.pop()


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# -- the two fakes behind one handle ------------------------------------------------------------------


class InPython:
    """The fake in Python."""

    def __init__(self, library: FakeCuda | None = None) -> None:
        self.library: Any = library or FakeCuda()

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
        assert self.library.violations == [], self.library.violations
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


#: Symbols that :class:`_Watched` counts: what is made is one more, what is ended one less.
_LIVE = {
    "cuStreamCreate": 1, "cuStreamDestroy_v2": -1, "cuEventCreate": 1, "cuEventDestroy_v2": -1,
    "cuCtxPushCurrent_v2": 1, "cuCtxPopCurrent_v2": -1,
}  # fmt: skip


class _Watched:
    """The real driver's functions, which keep account of what is registered, copied and made."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.ranges: dict[int, int] = {}
        self.direct = 0
        self.live = 0

    def __getattr__(self, symbol: str) -> Any:
        function = getattr(self._library, symbol)

        def call(*arguments: Any) -> int:
            code: int = function(*arguments)
            if code == 0:
                self._count(symbol, arguments)
            return code

        return call

    def _count(self, symbol: str, arguments: tuple[Any, ...]) -> None:
        self.live += _LIVE.get(symbol, 0)
        if symbol == "cuMemHostRegister_v2":
            self.ranges[arguments[0]] = arguments[1]
        elif symbol == "cuMemHostUnregister":
            del self.ranges[arguments[0]]
        elif symbol in ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
            self._count_copy([arguments[symbol == "cuMemcpyHtoDAsync_v2"]], arguments[2])
        elif symbol == "cuMemcpyBatchAsync_v2":
            for target, source, size in zip(*arguments[:3]):
                self._count_copy([target, source], size)

    def _count_copy(self, ends: Sequence[int], size: int) -> None:
        """Count a copy if one of its ends is in registered host memory."""
        self.direct += any(
            at <= end and end + size <= at + length for end in ends for at, length in self.ranges.items()
        )


class Real:
    """The machine's driver and its first GPU, which stands for every device."""

    _keeper: Driver | None = None

    def __init__(self) -> None:
        if Real._keeper is None:
            # It sets the types of the functions' parameters, and holds the context as long as the process lives.
            Real._keeper = Driver(ctypes.CDLL(cuda.LIBRARY))
        self._driver = Real._keeper
        self._library = self._driver._library
        self.library = _Watched(self._library)
        self._memory: list[int] = []

    @staticmethod
    def missing() -> str:
        """Return why there is none here, or an empty text."""
        try:
            driver = Driver(ctypes.CDLL(cuda.LIBRARY))
        except (OSError, cuda.CudaError) as exc:
            return f"no GPU: {exc}"
        return "" if driver.devices else "no GPU"

    def alloc(self, device: int, size: int) -> int:
        with current(self._driver, 0):
            address = self._driver.allocate(size)
            self._memory.append(address)
            assert self._library.cuMemsetD8_v2(ctypes.c_uint64(address), 0, ctypes.c_size_t(size)) == 0
        return address

    def peek(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        with current(self._driver, 0):
            assert self._library.cuMemcpyDtoH_v2(data, ctypes.c_uint64(address), ctypes.c_size_t(size)) == 0
        return data.raw

    def poke(self, address: int, data: bytes) -> None:
        with current(self._driver, 0):
            assert self._library.cuMemcpyHtoD_v2(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))) == 0

    def registered(self) -> int:
        return sum(self.library.ranges.values())

    def direct(self) -> int:
        return self.library.direct

    def check(self) -> None:
        assert self.library.live == 0, "streams, events or contexts left"

    def close(self) -> None:
        with current(self._driver, 0):
            for address in self._memory:
                self._driver.free(address)
        self._memory.clear()


def use_driver(driver: Driver | None) -> Driver | None:
    """Make this the process's driver (None: the one that ``cuda.load`` finds) and return the one before."""
    with cuda._lock:
        before, cuda._driver, cuda._why = cuda._driver, driver, ""
        return before


def shut_down() -> None:
    """Undo all registrations, free the streams and the staging memory. No copy may be in flight."""
    driver = cuda._driver
    idle = list(copy._idle.items())
    copy._idle.clear()
    for device, streams in idle:
        for stream in streams:
            if driver is stream.driver and not driver.forked:
                with current(driver, device):
                    stream.close()
    copy.staging.close()
    with pinning._lock:
        pinner, pinning._pinner = pinning._pinner, None
        registered = list(pinning._pinned.values())
        pinning._pinned.clear()
    if pinner is not None:
        pinner.close()
    for pinned in registered:
        pinned.close()


def forget_ways() -> None:
    """Forget what was logged and what is known of devices."""
    direct._said.clear()
    direct._order_of.cache_clear()


def installed(handle: Any) -> Iterator[Any]:
    """Make the handle's library the process's driver; check that nothing of SiMM's is left with it at the end."""
    driver = Driver(handle.library)
    before = use_driver(driver)
    try:
        yield handle
        gc.collect()
        shut_down()
        assert handle.registered() == 0, "host memory is still registered"
        driver.close()
        handle.check()
    finally:
        shut_down()
        use_driver(before)
        handle.close()


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
