"""Callers' memory: what it is, where it lies, and how to copy it.

Operations take a value's memory as one of three types. A ``memoryview`` is memory of a Python object. A :class:`Span`
is host memory by address. A :class:`DeviceBuffer` is memory that the CPU cannot address, a GPU's; its methods copy it.
For a value that is read or put in parts, :class:`Ranges` and :class:`Pieces` list it, and ``host/parts.py`` copies.

Slicing a memoryview is cheapest for small values but holds the GIL. ``memmove`` through ctypes costs a little more and
releases it, so it is used from ``RELEASE_BYTES`` on.

Larger copies can go by libc's ``memmove`` or by numpy's loop for ``+x`` over bytes, which is a plain run of vector
loads and stores and releases the GIL too. Which is faster depends on the processor and libc, by up to a factor of
four. With glibc 2.36 on an EPYC, libc copies up to a MiB by ``rep movsb``. That crawls if the target lies 1 to 31
bytes further into its page than the source, as every large numpy array does relative to an arena's pages. So the first
few copies of each magnitude go by both ways in turns, timed, and the others by the faster way (:class:`_Trial`).
``copy_pool.py`` divides very large copies and batches among threads on machines with more than two cores.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..constants import VALUE_BYTES_MAX
from ..errors import UsageError
from .copy_pool import POOL, default_threads

#: From here on copies release the GIL.
RELEASE_BYTES: Final = 32 << 10
#: From here on a copy is split over threads.
SPLIT_BYTES: Final = 8 << 20
#: A batch from here on is divided among threads, into parts of so many bytes at least: to wake one takes as long as to
#: copy some 100 KiB.
SPREAD_BYTES: Final = 2 << 20
PART_BYTES: Final = 512 << 10
DEFAULT_COPY_THREADS: Final = default_threads()

#: From here on numpy's loop may be faster: it costs more to call.
BLOCK_BYTES: Final = 64 << 10
#: From here on a copy's time is taken, which then says how fast memory is.
OBSERVED_BYTES: Final = 1 << 20
#: How many copies of each magnitude each of the two ways is tried with.
TRIALS: Final = 8
#: memmove wins the trial if it takes less than this share of the other's time: its slow cases are slower.
CLEARLY: Final = 0.95
#: Batches of so many copies are tried by themselves, once in so many: whether by numpy's loop, in turns that favour
#: neither as copies become faster. The first of each only loads its code into the caches.
SAMPLES_FROM: Final = 16
_TURNS: Final = (False, True, False, True, True, False, True, False)
_BATCHES: Final = 8
#: ``rep movsb`` crawls if the target lies up to so many bytes further into its page than the source.
ALIAS_BYTES: Final = 32

memmove: Final = ctypes.memmove
#: Copies some pieces of a batch, from one number up to another.
CopySome = Callable[[int, int], None]

_U8: Final = np.dtype(np.uint8)
_frombuffer: Final = np.frombuffer
_positive: Final = np.positive
#: All of this process's memory as one buffer, which makes an array at an address cheap.
_ALL: Final[Any] = (ctypes.c_ubyte * (1 << 62)).from_address(0)


class OnDevice(UsageError):
    """The memory is a GPU's, which the CPU cannot address. ``gpu/buffers.py`` makes a :class:`DeviceBuffer` of it."""


class Span:
    """A piece of memory by address, as engines name it.

    ``keep`` is kept alive with it. ``registration`` is the handle under which RDMA devices know the memory that the
    span lies in (``rdma/registration.py``), or None. ``least`` is the size of the shortest value that may be read into
    the span: a caller that wants values of exactly ``size`` bytes sets it to that (see :func:`fits`). Parts of the span
    have 0 again.
    """

    __slots__ = ("address", "keep", "least", "registration", "size", "writable")

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
        self.least = 0
        self.registration = registration

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Span({self.address:#x}, {self.size})"

    def holds(self, other: Span) -> bool:
        """Return True if all of ``other`` lies within this span."""
        return self.address <= other.address and other.address + other.size <= self.address + self.size

    def part(self, offset: int, size: int) -> Span:
        """Return ``size`` bytes of it from ``offset`` on, with its registration. Raises UsageError outside of it."""
        if type(offset) is not int or type(size) is not int or not 0 <= offset < offset + size <= self.size:
            raise UsageError(f"a span of {self.size} bytes has no part of {size!r} bytes at {offset!r}")
        return Span(
            self.address + offset, size, writable=self.writable, keep=self.keep, registration=self.registration
        )

    def view(self) -> memoryview:
        """Return the memory as writable bytes, which keep what the span keeps. The caller vouches for the address."""
        memory: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        if self.keep is not None:
            memory.keep = self.keep  # the caller may have made a tensor for this call only
        return memoryview(memory).cast("B")

    def host_view(self, size: int | None = None) -> memoryview:
        """Return the first ``size`` bytes (or all) in host memory: in place where the CPU addresses them."""
        return self.view()[:size]


class HostMapping(Protocol):
    """A mapping in this process that a device can be told of, such as an arena's. Weakly referable."""

    @property
    def name(self) -> str:
        """Return what the log calls it."""

    @property
    def data(self) -> memoryview:
        """Return all of its bytes."""

    @property
    def data_address(self) -> int:
        """Return where they begin, page-aligned."""


#: A copy between a device and host memory: (buffer, host address, bytes, what ``pinned`` gave for that memory or None).
DeviceCopy = tuple["DeviceBuffer", int, int, Any]


class DeviceBuffer(Span, ABC):
    """Memory of a device that the CPU cannot address.

    ``sdk`` and ``ipc`` reach a GPU through these methods alone, so that they load no module of ``gpu/``: an operation
    that is passed such a buffer finds the code with it. ``gpu/buffers.py`` has the implementation. Copies are done
    when a method returns, also by an exception. Methods raise DeviceError; UnfinishedCopy where a copy may go on.
    """

    #: Ordinal of the device, and the handle of the stream whose work copies come after (0: the default stream).
    __slots__ = ("device", "stream")

    def __init__(
        self, address: int, size: int, *, device: int, stream: int = 0, writable: bool = True, keep: Any = None,
        registration: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(address, size, writable=writable, keep=keep, registration=registration)
        self.device = device
        self.stream = stream

    def view(self) -> memoryview:
        """Raise OnDevice."""
        raise OnDevice("GPU memory has no bytes that the CPU could look at")

    @abstractmethod
    def host_view(self, size: int | None = None) -> memoryview:
        """Return the first ``size`` bytes (or all), copied to new host memory."""

    @abstractmethod
    def copy_from(self, data: memoryview) -> None:
        """Copy ``data`` from host memory to the head of the buffer."""

    @abstractmethod
    def piece(self, address: int, size: int, *, writable: bool = True) -> DeviceBuffer:
        """Return memory at another address of the same allocation, which the caller vouches for.

        It has the registration if it lies within that. Raises UsageError.
        """

    @abstractmethod
    def register(self) -> None:
        """Give the buffer a registration for RDMA devices, which registers with each device at its first use."""

    # -- an arena on this host ----------------------------------------------------------------------

    def copy_from_mapping(self, mapping: HostMapping, start: int, size: int) -> None:
        """Copy ``size`` bytes of the mapping from ``start`` on to the head of the buffer."""
        self.copy_to_device([(self, mapping.data_address + start, size, self.pinned(mapping))])

    def copy_to_mapping(self, mapping: HostMapping, start: int, size: int) -> None:
        """Copy the first ``size`` bytes of the buffer to ``start`` of the mapping."""
        self.copy_to_host([(self, mapping.data_address + start, size, self.pinned(mapping))])

    @abstractmethod
    def pinned(self, mapping: HostMapping) -> Any:
        """Return what a :class:`DeviceCopy` names the mapping by. The first call begins to pin it."""

    @staticmethod
    @abstractmethod
    def copy_to_device(copies: Iterable[DeviceCopy]) -> None:
        """Copy from host memory to the heads of buffers. Each copy begins when the iterable yields it."""

    @staticmethod
    @abstractmethod
    def copy_to_host(copies: Iterable[DeviceCopy]) -> None:
        """Copy the heads of buffers to host memory. Each copy begins when the iterable yields it."""

    # -- a network ----------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def read_remote(
        read_host: Callable[[Sequence[int], Mapping[int, Span], dict[int, Any]], list[int]], positions: Sequence[int],
        sinks: Sequence[Any], results: list[Any], rails: Sequence[Any],
    ) -> list[int]:  # fmt: skip
        """Read values whose sinks are all device buffers, and return the positions that are left over.

        ``read_host(positions, sinks, results)`` reads into memory that the rails reach. It returns what it leaves
        over, with nothing of that in flight. ``rails`` are those in use; none where the CPU must see the values.
        """

    @staticmethod
    @abstractmethod
    def put_by_rdma(
        put_host: Callable[[Sequence[int], _Sources, _Sources], bool], positions: Sequence[int],
        sources: Sequence[memoryview | Span], rails: Sequence[Any],
    ) -> None:  # fmt: skip
        """Put values of which some are in device buffers, in order.

        ``put_host(positions, sources, spare)`` puts from memory that the rails reach; ``spare`` are the sources for a
        path on which the CPU sees the bytes. It returns, with nothing in flight, whether the memory is free at once.
        ``rails`` are those in use; none where the CPU must see the values.
        """


_Sources = Mapping[int, memoryview | Span]

#: A range of a value and its memory: (offset in the value, bytes, address, keeper).
Part = tuple[int, int, int, Any]


class Ranges(Span):
    """Ranges of one value, each with the memory that it goes to. As a sink it stands for the head of a value.

    The keeper of a part keeps its memory alive and in its place; it is the span itself if the caller passed one. The
    address is 0 if the keeper is a memoryview of just these bytes (a small part) or a device's buffer. No two parts'
    memory overlaps. The object itself has no address, so code that takes it for one piece of memory fails.
    """

    #: ``total``: the parts' bytes. ``least``: where the last of them ends in the value. ``rows``: parts as HostRows, or
    #: as a HostTable.
    __slots__ = ("parts", "rows", "total")

    #: As of a sink with room for any value. Not set for each object, as that takes a fifth of a small get's time.
    size = VALUE_BYTES_MAX
    writable = True
    keep = None
    registration = None

    def __init__(self, parts: list[Part], least: int, total: int, rows: Any = None) -> None:
        self.parts = parts
        self.least = least
        self.total = total
        self.rows = rows

    def __len__(self) -> int:
        """Return the bytes that a value must have at least."""
        return self.least

    def ends_beyond(self, key: str, length: int) -> str:
        """Return that a value is too short for them."""
        return f"the value of {key!r} has {length} bytes, and a range of it ends at byte {self.least}"

    def __repr__(self) -> str:
        return f"<Ranges: {len(self.parts)}, {self.total} bytes of a value>"

    def view(self) -> memoryview:
        """Raise UsageError."""
        raise UsageError("ranges of a value are not one piece of memory")


class Pieces(Span):
    """The pieces of memory that make up a value, in their order. It has no address either."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[memoryview | Span]) -> None:
        self.parts = parts
        self.size = sum(map(len, parts))
        self.least = 0
        self.writable = False
        self.keep = self.registration = None

    def __repr__(self) -> str:
        return f"<Pieces: {len(self.parts)}, {self.size} bytes>"

    def view(self) -> memoryview:
        """Return all of it as one piece of memory, a copy."""
        return memoryview(b"".join([host_view(part) for part in self.parts]))


def host_view(source: memoryview | Span) -> memoryview:
    """Return the bytes of a put's source in host memory: in place, or copied there from a device."""
    return source if type(source) is memoryview else source.host_view()


def view_of(buffer: Any) -> memoryview:
    """Return the buffer's bytes, flat. Raises UsageError if it has none or is not contiguous.

    The result is a new view, also of a memoryview: a caller that releases its own must not take the memory away from a
    copy in flight.
    """
    if isinstance(buffer, np.ndarray) and buffer.dtype != np.uint8:
        # Types that the buffer protocol has no name for (bfloat16, datetime64, complex) are stored as bytes, too.
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
    """Return the bytes of objects without the buffer protocol: Span, CPU tensors."""
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
    """Return the memory of a torch-like CPU tensor, without importing torch; None for anything else.

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
    """Return where the view's bytes lie. The caller keeps the view as long as it uses the address."""
    if not view.readonly:
        return _addressof(_from_buffer(view))  # a tenth of the time that numpy takes
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


_addressof: Final = ctypes.addressof
_from_buffer: Final = ctypes.c_char.from_buffer


def array_at(address: int, size: int) -> NDArray[np.uint8]:
    """Return memory as an array, which keeps nothing alive. The caller vouches for it."""
    return _frombuffer(_ALL, _U8, size, address)


def block_copy(target: int, source: int, size: int) -> None:
    """Copy by numpy's loop, without the GIL. Source and target may overlap."""
    _positive(_frombuffer(_ALL, _U8, size, source), _frombuffer(_ALL, _U8, size, target))


class _Trial:
    """Finds the faster way for copies of one magnitude: both in turns at first, then the one whose fastest was faster.

    The fastest counts, as all else (page faults, preemption) only makes copies slower. Racing threads cost a turn.
    """

    __slots__ = ("_best", "_left")

    def __init__(self) -> None:
        #: Nanoseconds per byte of the fastest copy so far: by memmove, by block_copy.
        self._best = [float("inf"), float("inf")]
        self._left = 2 * TRIALS

    def copy(self, target: int, source: int, size: int) -> Callable[[int, int, int], Any] | None:
        """Copy in one of the two ways. Return the faster way once it is known."""
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

    #: By the bit length of the size: the way for such copies on this machine, or None while that is on trial.
    _ways: ClassVar[list[Callable[[int, int, int], Any] | None]] = [None] * 64
    _trials: ClassVar[list[_Trial]] = [_Trial() for _ in range(64)]
    #: The same for batches of one size: how many go before the next trial, and whether numpy's loop won the last one.
    _batch_ways: ClassVar[list[tuple[int, bool]]] = [(0, False)] * 64

    def __init__(self, threads: int = DEFAULT_COPY_THREADS) -> None:
        self.threads = max(1, threads)
        #: Takes note of copies of OBSERVED_BYTES and more: bytes, seconds.
        self.observe: Callable[[int, float], None] | None = None
        #: Leaves the pool: at the close, or with a copier that nobody has closed.
        self._leave: Callable[[], Any] | None = None
        if self.threads > 1:
            POOL.join()
            self._leave = leave = weakref.finalize(self, POOL.leave)
            leave.atexit = False

    def copy(self, target: int, source: int, size: int, node: int = -1) -> None:
        """Copy ``size`` bytes without the GIL. Nothing is copied after the return, even an interrupted one.

        ``node``: the NUMA node of the arena that they are in, or come from, for threads that share the copy.
        """
        if size < BLOCK_BYTES:
            if size >= RELEASE_BYTES and 0 < (target - source) & 4095 < ALIAS_BYTES:
                block_copy(target, source, size)
            else:
                memmove(target, source, size)
            return
        if size < OBSERVED_BYTES or self.observe is None:
            self._copy_large(target, source, size, node)
            return
        began = time.perf_counter()
        self._copy_large(target, source, size, node)
        self.observe(size, time.perf_counter() - began)

    def _copy_large(self, target: int, source: int, size: int, node: int) -> None:
        if size < SPLIT_BYTES or self.threads == 1:
            self._copy_block(target, source, size)
        else:
            self._copy_parts([(target, source, size)], size, node)

    def shares(self, total: int) -> bool:
        """Return whether a batch of so many bytes is divided among threads."""
        return self.threads > 1 and total >= SPREAD_BYTES

    def copy_all(self, copies: Sequence[tuple[int, int, int]], node: int = -1) -> None:
        """Do :meth:`copy` for many: (target, source, bytes) each. Large batches are divided among threads by bytes."""
        total = sum(size for _, _, size in copies)
        if not self.shares(total):
            for target, source, size in copies:
                self.copy(target, source, size, node)
            return
        began = time.perf_counter()
        self._copy_parts(copies, total, node)
        if self.observe is not None:
            self.observe(total, time.perf_counter() - began)

    def copy_equal(self, targets: Sequence[int], sources: Sequence[int], size: int, node: int = -1) -> None:
        """Do :meth:`copy_all` for copies of ``size`` bytes each. O(1) before the first byte is copied."""
        count = len(sources)
        if self.shares(count * size) and size > max(PART_BYTES, count * size // (2 * self.threads)):
            self.copy_all([(target, source, size) for target, source in zip(targets, sources)], node)
            return

        def by(copy: Callable[[int, int, int], Any], first: int, last: int) -> None:
            for target, source in zip(targets[first:last], sources[first:last]):
                copy(target, source, size)

        if BLOCK_BYTES <= size < OBSERVED_BYTES and count >= SAMPLES_FROM:
            self.copy_some(count, size, partial(by, memmove), partial(by, block_copy), node)
        else:
            self.copy_some(count, size, partial(by, self.way(size)), None, node)

    def copy_some(self, count: int, size: int, move: CopySome, block: CopySome | None, node: int = -1) -> None:
        """Copy ``count`` pieces of ``size`` bytes by ``move``, or by ``block`` if that is given and is faster now."""
        if not self.shares(count * size):
            self._in_turns(0, count, size, move, block)
            return
        each = max(PART_BYTES, count * size // (2 * self.threads)) // size
        began = time.perf_counter()

        def copy_part(number: int) -> None:
            self._in_turns(number * each, min(count, (number + 1) * each), size, move, block)

        POOL.run(copy_part, -(-count // each), self.threads, node)
        if self.observe is not None:
            self.observe(count * size, time.perf_counter() - began)

    def _in_turns(self, first: int, last: int, size: int, move: CopySome, block: CopySome | None) -> None:
        """Do :meth:`copy_some` for some of the pieces in this thread.

        The faster way depends on the caches, too: of values that were used just now memmove copies, on some machines, a
        fifth faster than the loop, of others a fifth slower. So batches go on trying both.
        """
        if block is not None:
            by_block = self.next_way(size)
            if by_block is None and last - first >= len(_TURNS):
                spent = [0, 0]
                for turn, by_block in enumerate(_TURNS):
                    began = time.perf_counter_ns()
                    (block if by_block else move)(first, first := first + 1)
                    spent[by_block] += (time.perf_counter_ns() - began) * (turn > 1)
                by_block = spent[1] <= spent[0]
                self._batch_ways[size.bit_length()] = _BATCHES - 1, by_block
            if by_block:
                move = block
        move(first, last)

    def next_way(self, size: int) -> bool | None:
        """Return whether numpy's loop is faster for a batch of copies of ``size`` bytes; None: it is time to try."""
        left, by_block = self._batch_ways[magnitude := size.bit_length()]
        self._batch_ways[magnitude] = max(0, left - 1), by_block
        return by_block if left else None

    def _copy_parts(self, copies: Sequence[tuple[int, int, int]], total: int, node: int = -1) -> None:
        """Divide copies among threads: twice as many parts as threads, of whole pages, as some cores are slower."""
        least = max(PART_BYTES, -(-total // (2 * self.threads)) + 4095 & ~4095)
        parts: list[list[tuple[int, int, int]]] = [[]]
        room = least
        for target, source, size in copies:
            while size:
                if not room:
                    parts.append([])
                    room = least
                count = min(size, room)
                parts[-1].append((target, source, count))
                target, source, size, room = target + count, source + count, size - count, room - count

        def copy_part(number: int) -> None:
            for target, source, size in parts[number]:
                if size < BLOCK_BYTES:
                    memmove(target, source, size)
                else:
                    self._copy_block(target, source, size)

        POOL.run(copy_part, len(parts), self.threads, node)

    def way(self, size: int) -> Callable[[int, int, int], Any]:
        """Return a function that does :meth:`copy` for this size, to spare many copies of one size the choice."""
        if BLOCK_BYTES <= size < OBSERVED_BYTES:
            return self._ways[size.bit_length()] or self.copy
        return memmove if size < RELEASE_BYTES else self.copy

    def _copy_block(self, target: int, source: int, size: int) -> None:
        magnitude = size.bit_length()
        way = self._ways[magnitude]
        if way is not None:
            way(target, source, size)
        else:
            self._ways[magnitude] = self._trials[magnitude].copy(target, source, size)

    def close(self) -> None:
        """Use no threads from now on. Twice is harmless."""
        if self._leave is not None:
            self._leave()  # only its first call has an effect
        self.threads = 1


def fits(length: int, sink: memoryview | Span) -> bool:
    """Return True if a value of ``length`` bytes may be read into ``sink``. Every path checks it before it copies.

    A value of exactly the sink's size always may, so the shared-memory path does not call this for it.
    """
    if type(sink) is memoryview:
        return length <= len(sink)
    return sink.least <= length <= sink.size
