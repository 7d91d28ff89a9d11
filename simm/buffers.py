"""Callers' memory: what it is, where it lies, and how to copy it.

A copy by slicing a memoryview is the cheapest way for small values but holds the GIL; ``memmove``
through ctypes costs 0.25 us more and releases it. From ``RELEASE_BYTES`` on we release it.

Larger copies have two ways to go: libc's ``memmove``, and numpy's loop for ``+x`` over bytes, which is a plain
run of vector loads and stores and releases the GIL too. Which is faster depends on processor and libc, and
by more than anything else that we could do here. On an EPYC with glibc 2.36 libc copies up to a MiB by
``rep movsb``, which takes 1.8 times as long where the target lies 16 bytes further into its page than the source (every
large numpy array does, beside our pages), and 4 times for 1 to 15 bytes; and from a MiB on numpy's loop
takes a sixth less time as well:

    us, arena to a numpy array    64 KiB  256 KiB    1 MiB    4 MiB   16 MiB
    memmove                         10.6     37.9     96.0      343    1,403
    numpy                            6.8     20.7     79.0      298    1,189

Elsewhere it may be the other way round. So the first few copies of each magnitude are done by both in turns, with a
clock beside them, and then by the faster one (:class:`_Trial`); nothing is copied for the sake of measuring.

Very large copies are split over a few threads where the machine has more than two cores: one core
does not fill a server's memory bus.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Final

import numpy as np

from .errors import UsageError

#: From here on copies release the GIL.
RELEASE_BYTES: Final = 32 << 10
#: From here on a copy is split over threads.
SPLIT_BYTES: Final = 8 << 20
#: Two threads on two cores are slower than one here: the other core has the engine or the worker on it.
DEFAULT_COPY_THREADS: Final = max(1, min(4, len(os.sched_getaffinity(0)) // 2))

#: From here on numpy's loop may be the better one: it costs 0.8 us more to call.
BLOCK_BYTES: Final = 64 << 10
#: Copies of each magnitude that each of the two ways is tried with.
TRIALS: Final = 8
#: The trial is won by memmove where it takes less than this share of the other's time: it has the worse bad days.
CLEARLY: Final = 0.95
#: Where the target lies up to so many bytes further into its page than the source, ``rep movsb`` crawls.
ALIAS_BYTES: Final = 32

memmove: Final = ctypes.memmove

_U8: Final = np.dtype(np.uint8)
_frombuffer: Final = np.frombuffer
_positive: Final = np.positive
#: All of this process's memory as one buffer, so that an array at an address costs 0.4 us. Nobody looks at all of it.
_ALL: Final[Any] = (ctypes.c_ubyte * (1 << 62)).from_address(0)


class OnDevice(UsageError):
    """The memory is a GPU's: no CPU can look at it. Where such memory is taken, ``gpu.py`` makes a span of it."""


class Span:
    """A piece of memory by address, as engines name it. ``keep`` is kept alive with it.

    ``registration``: the handle under which RDMA devices know memory that it lies in (``registry.py``), or None.
    """

    __slots__ = ("address", "keep", "registration", "size", "writable")

    def __init__(
        self, address: int, size: int, *, writable: bool = True, keep: Any = None, registration: Any = None
    ) -> None:
        if type(address) is not int or type(size) is not int:
            raise UsageError(f"an address and a size are ints, not {type(address).__name__} and {type(size).__name__}")
        if address <= 0 or size <= 0 or address + size > 1 << 63:
            raise UsageError(f"no memory has address {address:#x} and size {size}")
        self.address = address
        self.size = size
        self.writable = writable
        self.keep = keep
        self.registration = registration

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Span({self.address:#x}, {self.size})"

    def holds(self, other: Span) -> bool:
        """Does all of the other one lie within this?"""
        return self.address <= other.address and other.address + other.size <= self.address + self.size

    def part(self, offset: int, size: int) -> Span:
        """``size`` bytes of it from ``offset`` on, with its registration. Raises UsageError outside of it."""
        if type(offset) is not int or type(size) is not int or not 0 <= offset < offset + size <= self.size:
            raise UsageError(f"a span of {self.size} bytes has no part of {size!r} bytes at {offset!r}")
        return Span(
            self.address + offset, size, writable=self.writable, keep=self.keep, registration=self.registration
        )

    def view(self) -> memoryview:
        """The memory as writable bytes. The caller vouches for the address."""
        return memoryview((ctypes.c_ubyte * self.size).from_address(self.address)).cast("B")


def view_of(buffer: Any) -> memoryview:
    """The buffer's bytes, flat. Raises UsageError when it has none or is not contiguous.

    Always a view of our own, also of a memoryview: whoever releases theirs meanwhile shall not pull the memory from
    under a copy.
    """
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
    if hasattr(buffer, "__cuda_array_interface__"):
        raise OnDevice(f"the memory of this {type(buffer).__name__} is a GPU's")
    raise UsageError(f"a value is bytes-like, an array or a tensor, not {type(buffer).__name__}")


def tensor_span(tensor: Any) -> Span | None:
    """The memory of a torch-like CPU tensor, without importing torch; None for anything else.

    Raises UsageError, OnDevice for a CUDA tensor.
    """
    try:
        pointer, count, item = tensor.data_ptr(), tensor.numel(), tensor.element_size()
    except (AttributeError, TypeError):
        return None
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device == "cuda":
        raise OnDevice("the memory of this tensor is a GPU's")
    if device != "cpu":
        raise UsageError(f"a tensor on {device} cannot be copied: move it to the CPU or to a CUDA device")
    contiguous = getattr(tensor, "is_contiguous", None)
    if contiguous is not None and not contiguous():
        raise UsageError("the tensor is not contiguous: call .contiguous() first")
    return Span(pointer, count * item, keep=tensor)


def address_of(view: memoryview) -> int:
    """Where the view's bytes lie; the view must be kept as long as the address is used."""
    if not view.readonly:
        return _addressof(_from_buffer(view))  # 0.15 us; below it is 1.4
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


_addressof: Final = ctypes.addressof
_from_buffer: Final = ctypes.c_char.from_buffer


def block_copy(target: int, source: int, size: int) -> None:
    """Copy by numpy's loop, the GIL free meanwhile. Bytes that both have in common are copied right, too."""
    _positive(_frombuffer(_ALL, _U8, size, source), _frombuffer(_ALL, _U8, size, target))


class _Trial:
    """Which way is faster for copies of one magnitude: by turns at first, then the one whose fastest was faster.

    The fastest, as everything else that may happen to a copy (pages that fault in, a processor taken away) only makes
    it slower. Threads may run into each other here; the worst is one turn more or less.
    """

    __slots__ = ("_best", "_left")

    def __init__(self) -> None:
        #: Nanoseconds a byte of the fastest copy so far: by memmove, by block_copy.
        self._best = [float("inf"), float("inf")]
        self._left = 2 * TRIALS

    def copy(self, target: int, source: int, size: int) -> Callable[[int, int, int], Any] | None:
        """Copy in one of the two ways; the way to go from now on, once that is known."""
        way = self._left & 1
        start = time.perf_counter_ns()
        (block_copy if way else memmove)(target, source, size)
        spent = (time.perf_counter_ns() - start) / size
        self._best[way] = min(self._best[way], spent)
        self._left -= 1
        if self._left > 0:
            return None
        by_memmove, by_block = self._best
        return memmove if by_memmove < by_block * CLEARLY else block_copy


class Copier:
    """Copies between addresses, large ones over ``threads`` threads."""

    #: By the bit length of the size: how copies of that magnitude are done, or None while that is on trial. It is
    #: the machine's property, hence of all copiers together.
    _ways: ClassVar[list[Callable[[int, int, int], Any] | None]] = [None] * 64
    _trials: ClassVar[list[_Trial]] = [_Trial() for _ in range(64)]

    def __init__(self, threads: int = DEFAULT_COPY_THREADS) -> None:
        self.threads = max(1, threads)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes; the GIL is free meanwhile. Interrupted or not, nothing is copied after the return."""
        if size < BLOCK_BYTES:
            if size >= RELEASE_BYTES and 0 < (target - source) & 4095 < ALIAS_BYTES:
                block_copy(target, source, size)
            else:
                memmove(target, source, size)
            return
        if size < SPLIT_BYTES or self.threads == 1:
            self._copy_block(target, source, size)
            return
        part = -(-size // self.threads) + 4095 & ~4095
        submit = self._executor().submit
        jobs: list[Future[Any]] = []
        copy = self._copy_block
        try:
            for at in range(part, size, part):
                jobs.append(submit(copy, target + at, source + at, min(part, size - at)))  # noqa: PERF401
            copy(target, source, part)
        finally:
            _join(jobs)

    def _copy_block(self, target: int, source: int, size: int) -> None:
        magnitude = size.bit_length()
        way = self._ways[magnitude]
        if way is not None:
            way(target, source, size)
        else:
            self._ways[magnitude] = self._trials[magnitude].copy(target, source, size)

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
