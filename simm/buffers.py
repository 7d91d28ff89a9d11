"""Callers' memory: what it is, where it lies, and how to copy it.

A copy by slicing a memoryview is the cheapest way for small values but holds the GIL; ``memmove``
through ctypes costs 0.25 us more and releases it. From ``RELEASE_BYTES`` on we release it.

Very large copies are split over a few threads where the machine has more than two cores: one core
does not fill a server's memory bus.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from .errors import UsageError

#: From here on copies release the GIL.
RELEASE_BYTES: Final = 32 << 10
#: From here on a copy is split over threads.
SPLIT_BYTES: Final = 8 << 20
#: Two threads on two cores are slower than one here: the other core has the engine or the worker on it.
DEFAULT_COPY_THREADS: Final = max(1, min(4, len(os.sched_getaffinity(0)) // 2))

memmove: Final = ctypes.memmove


class Span:
    """A piece of memory by address, as engines name it. ``keep`` is kept alive with it."""

    __slots__ = ("address", "keep", "size", "writable")

    def __init__(self, address: int, size: int, *, writable: bool = True, keep: Any = None) -> None:
        if type(address) is not int or type(size) is not int:
            raise UsageError(f"an address and a size are ints, not {type(address).__name__} and {type(size).__name__}")
        if address <= 0 or size <= 0 or address + size > 1 << 63:
            raise UsageError(f"no memory has address {address:#x} and size {size}")
        self.address = address
        self.size = size
        self.writable = writable
        self.keep = keep

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Span({self.address:#x}, {self.size})"

    def view(self) -> memoryview:
        """The memory as writable bytes. The caller vouches for the address."""
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.address)).cast("B")


def view_of(buffer: Any) -> memoryview:
    """The buffer's bytes, flat. Raises UsageError when it has none or is not contiguous."""
    if isinstance(buffer, np.ndarray) and buffer.dtype != np.uint8:
        # Types that the buffer protocol has no name for (bfloat16, datetime64, complex) are bytes to us all the same.
        if not buffer.flags.c_contiguous:
            raise UsageError("the array is not contiguous: pass np.ascontiguousarray(array)")
        if buffer.dtype.hasobject:
            raise UsageError("an array of Python objects has no bytes to store")
        buffer = buffer.reshape(-1).view(np.uint8)
    try:
        view = memoryview(buffer)
    except TypeError:
        view = _foreign(buffer)
    except ValueError as exc:
        raise UsageError(f"the memory of this {type(buffer).__name__} cannot be taken as bytes: {exc}") from None
    if view.format != "B" or view.ndim != 1:
        if not view.c_contiguous:
            raise UsageError("the buffer is not contiguous: pass a contiguous copy")
        # A zero in the shape cannot be cast; such a buffer is empty all the same.
        view = view.cast("B") if view.nbytes else memoryview(b"")
    elif not view.contiguous:
        raise UsageError("the buffer is not contiguous: pass a contiguous copy")
    return view


def _foreign(buffer: Any) -> memoryview:
    """Things without the buffer protocol: Span, CPU tensors."""
    if isinstance(buffer, Span):
        view = buffer.view()
        return view if buffer.writable else view.toreadonly()
    span = tensor_span(buffer)
    if span is not None:
        return span.view()
    raise UsageError(f"a value is bytes-like, an array or a CPU tensor, not {type(buffer).__name__}")


def tensor_span(tensor: Any) -> Span | None:
    """The memory of a torch-like CPU tensor, without importing torch; None for anything else. Raises UsageError."""
    try:
        pointer, count, item = tensor.data_ptr(), tensor.numel(), tensor.element_size()
    except (AttributeError, TypeError):
        return None
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise UsageError(f"a tensor on {device} cannot be copied by the CPU: move it, or register it")
    contiguous = getattr(tensor, "is_contiguous", None)
    if contiguous is not None and not contiguous():
        raise UsageError("the tensor is not contiguous: call .contiguous() first")
    return Span(pointer, count * item, keep=tensor)


def address_of(view: memoryview) -> int:
    """Where the view's bytes lie; the view must be kept as long as the address is used."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Copier:
    """Copies between addresses, large ones over ``threads`` threads."""

    def __init__(self, threads: int = DEFAULT_COPY_THREADS) -> None:
        self.threads = max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes; the GIL is free meanwhile. Interrupted or not, nothing is copied after the return."""
        if size < SPLIT_BYTES or self.threads == 1:
            memmove(target, source, size)
            return
        part = -(-size // self.threads) + 4095 & ~4095
        submit = self._executor().submit
        jobs: list[Future[Any]] = []
        try:
            for at in range(part, size, part):
                jobs.append(submit(memmove, target + at, source + at, min(part, size - at)))  # noqa: PERF401
            memmove(target, source, part)
        finally:
            _join(jobs)

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix="simm-copy")
            return self._pool

    def forget(self) -> None:
        """After a fork: the threads are the parent's."""
        self._pool = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def _join(jobs: list[Future[Any]]) -> None:
    """Wait for all, through interruptions: whoever is told of one takes the memory for free."""
    interrupted: BaseException | None = None
    for job in jobs:
        while not job.done():
            try:
                job.exception()
            except BaseException as exc:
                interrupted = exc
    if interrupted is not None:
        raise interrupted
