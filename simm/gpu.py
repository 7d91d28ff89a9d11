"""GPU memory as value and buffer: what it is, and how it is copied.

On the same host a GET is one DMA straight out of the arena and a PUT is one into the granted chunk: the arena is
registered with the CUDA driver (``pinned.py``). While it is not, and on every other path, values pass through two
small pieces of pinned memory in turns: the CPU fills one while the GPU empties the other.

Over RDMA the device may read and write GPU memory itself; ``gpudirect.py`` has that, under the same rules.

Order and completion: what a caller may assume
----------------------------------------------
* When a get has returned, the value lies in GPU memory; when a put has returned, it has read all it reads. Nothing is
  under way then, so the caller needs no event of ours, and may free or overwrite the memory at once.
* A copy begins after all that was issued before the call on

  - the device's *legacy default stream* (torch's, unless one was chosen), as our streams keep the order with it;
  - the stream that the object names, by ``stream`` of its ``__cuda_array_interface__`` (version 3; torch's objects
    have none), or as the caller said with :func:`device_span`.

  Work on other streams (``torch.cuda.Stream``) the caller synchronises with before the call, or names.

What can go wrong, and what stands against it
---------------------------------------------
* *A value is confirmed before it was copied.* The re-check of an entry says that its bytes were the value until now.
  A copy that is only begun has not read them. So :func:`to_device` returns when the device is done, whatever happens
  in between; there is no way to begin a copy that leaves this module.
* *A granted chunk goes to another value while the GPU still writes it.* The same, for :func:`to_host`. Where the driver
  itself cannot say any more that a copy has ended it is :class:`Unfinished`, and the chunk is never given back.
* *A Ctrl-C in the middle.* It is kept until the device is done.
* *The CPU touches GPU memory.* That is a segmentation fault. So a :class:`DeviceSpan` has no view, and is no buffer.
* *The address is not what it is said to be.* The driver is asked once, when the span is made.

A batch is one chain of copies on one stream, and one wait.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from . import cuda
from .buffers import OnDevice, Span, address_of, memmove
from .cuda import CudaError, Driver
from .errors import UsageError
from .layout import EntryFlag
from .pinned import Pinned, close_all, pinned_for
from .reader import ArenaReader, Located, Unsettled

log = logging.getLogger("simm.gpu")

#: Pinned memory that a staged copy goes through: two pieces of so many bytes for each stream in use.
STAGE_BYTES: Final = 1 << 20
#: Streams of ours that are kept for each device; there are as many as threads copy at the same time.
IDLE_STREAMS: Final = 8
#: A batch waits for the device after so many bytes or copies. A wait costs 10 us, these bytes 3 ms; the longer the
#: time between finding a value and confirming it, the more often it has changed meanwhile.
GROUP_BYTES: Final = 64 << 20
GROUP_KEYS: Final = 256

_CRC: Final = int(EntryFlag.CRC)

#: (GPU memory, host address, bytes, what is registered there)
Copy = tuple["DeviceSpan", int, int, Pinned | None]


class Unfinished(CudaError):
    """The driver cannot say that a copy has ended: host memory that it may still write must not be used again."""


class DeviceSpan(Span):
    """A piece of GPU memory by address. ``device`` is its CUDA ordinal; ``stream`` 0, or the handle of the stream
    whose work copies shall come after."""

    __slots__ = ("device", "stream")

    def __init__(
        self, address: int, size: int, *, device: int, stream: int = 0, writable: bool = True, keep: Any = None,
        registration: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(address, size, writable=writable, keep=keep, registration=registration)
        self.device = device
        self.stream = stream

    def __repr__(self) -> str:
        return f"DeviceSpan({self.address:#x}, {self.size}, device={self.device})"

    def view(self) -> memoryview:
        """There is none. Raises OnDevice."""
        raise OnDevice("GPU memory has no bytes that the CPU could look at")

    def part(self, offset: int, size: int) -> DeviceSpan:
        """``size`` bytes of it from ``offset`` on, with its registration. Raises UsageError outside of it."""
        if type(offset) is not int or type(size) is not int or not 0 <= offset < offset + size <= self.size:
            raise UsageError(f"a span of {self.size} bytes has no part of {size!r} bytes at {offset!r}")
        return self.piece(self.address + offset, size)

    def piece(self, address: int, size: int, *, writable: bool = True) -> DeviceSpan:
        """Memory at another address of the same allocation, on the caller's word; with the registration where it lies
        within that. Raises UsageError."""
        made = DeviceSpan(
            address, size, device=self.device, stream=self.stream, writable=writable and self.writable, keep=self.keep
        )
        if self.registration is not None and self.registration.holds(address, size):
            made.registration = self.registration
        return made


# -- what a caller may give us ----------------------------------------------------------------------


def device_span(thing: Any, stream: int | None = None) -> DeviceSpan:
    """The memory of a CUDA tensor (torch-like, by ``data_ptr``) or of an object with ``__cuda_array_interface__``.

    ``stream``: handle of the stream that copies shall come after, instead of the one that the object names.
    Raises UsageError: not contiguous, empty, no memory of a GPU, no driver. 2 us and what the driver takes.
    """
    if isinstance(thing, DeviceSpan):
        return thing if stream is None else _with_stream(thing, stream)
    interface = _interface_of(thing)
    writable = True
    try:
        address, count, item = thing.data_ptr(), thing.numel(), thing.element_size()
        contiguous = getattr(thing, "is_contiguous", None)
        if contiguous is not None and not contiguous():
            raise UsageError("the tensor is not contiguous: call .contiguous() first")
        size = count * item
    except (AttributeError, TypeError):
        if interface is None:
            raise UsageError(f"a {type(thing).__name__} has no GPU memory that SiMM knows how to find") from None
        address, size, writable = _extent_of(interface)
    if not size:
        raise UsageError("the tensor is empty: there is nothing to copy")
    if stream is None:
        stream = _stream_of(interface)
    try:
        kind, device = cuda.load().memory_at(address)
    except CudaError as exc:
        raise UsageError(f"the GPU memory of this {type(thing).__name__} cannot be used: {exc}") from exc
    if kind not in (cuda.MEMORY_DEVICE, cuda.MEMORY_UNIFIED):
        raise UsageError(f"the driver says that {address:#x} is no GPU's memory: pass the host memory itself")
    return DeviceSpan(address, size, device=device, stream=stream, writable=writable, keep=thing)


def _with_stream(span: DeviceSpan, stream: int) -> DeviceSpan:
    made = span.piece(span.address, span.size)
    made.stream = stream
    return made


def _interface_of(thing: Any) -> dict[str, Any] | None:
    try:
        interface = thing.__cuda_array_interface__
    except Exception:  # torch's raises for tensors with a gradient, which have their memory all the same
        return None
    return interface if isinstance(interface, dict) else None


def _extent_of(interface: dict[str, Any]) -> tuple[int, int, bool]:
    """(address, bytes, writable) of a ``__cuda_array_interface__``. Raises UsageError."""
    try:
        shape = [int(each) for each in interface["shape"]]
        item = int(interface["typestr"][2:])
        address, read_only = interface["data"]
        strides = interface.get("strides")
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError(f"a __cuda_array_interface__ that is none: {exc!r}") from None
    if interface.get("mask") is not None:
        raise UsageError("an array with a mask is no plain memory")
    size = item
    dense = []
    for extent in reversed(shape):
        dense.append(size)
        size *= extent
    # An extent of 1 may have any stride.
    if strides is not None and size and any(
        extent > 1 and int(stride) != wanted for extent, stride, wanted in zip(shape, strides, reversed(dense))
    ):  # fmt: skip
        raise UsageError("the array is not contiguous: pass a contiguous copy")
    return int(address or 0), size, not read_only


def _stream_of(interface: dict[str, Any] | None) -> int:
    """The stream that an interface names; 0 for none. Raises UsageError for 0, which the interface forbids."""
    stream = interface.get("stream") if interface is not None else None
    if stream is None:
        return 0
    if type(stream) is not int or stream <= 0:
        raise UsageError(f"stream={stream!r} in a __cuda_array_interface__: it is None, 1, 2 or a stream's handle")
    return stream


# -- streams of ours --------------------------------------------------------------------------------


class _Slot:
    """One piece of a stream's pinned memory."""

    __slots__ = ("address", "busy", "event", "size", "target")

    def __init__(self, address: int, event: int) -> None:
        self.address = address
        #: Recorded after the copy that uses it.
        self.event = event
        self.busy = False
        #: Where its bytes go once they are there; 0 for a copy to the device.
        self.target = 0
        self.size = 0


class _Stream:
    """A stream, with what a flight needs on it. Its device's context is current in all methods."""

    __slots__ = ("_at", "_memory", "_slots", "device", "driver", "event", "handle", "registered")

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.handle = driver.stream_create()
        #: To wait for callers' streams.
        self.event = driver.event_create()
        self._memory: mmap.mmap | None = None
        #: Where the pinned memory begins; 0 where it is none.
        self.registered = 0
        self._slots: list[_Slot] = []
        self._at = 0

    def follow(self, stream: int) -> None:
        """What is begun here from now on comes after all that was issued on the caller's stream."""
        if stream == cuda.STREAM_PER_THREAD:
            # Which one is that? The thread in which we run may not be the caller's (the async forms).
            self.driver.context_synchronize()
            return
        self.driver.event_record(self.event, stream)
        self.driver.stream_wait(self.handle, self.event)

    def _slot(self) -> _Slot:
        """The next piece of pinned memory, free."""
        if not self._slots:
            self._make_slots()
        slot = self._slots[self._at]
        self._at = (self._at + 1) % len(self._slots)
        self._free(slot)
        return slot

    def _make_slots(self) -> None:
        # Shared: of private memory a fork would leave us copies, and the driver the pages that the child has.
        memory = mmap.mmap(-1, 2 * STAGE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            self.driver.host_register(address, 2 * STAGE_BYTES)
            self.registered = address
        except CudaError as exc:  # the driver then has a way of its own round unpinned memory
            log.warning("no pinned memory for copies to and from GPU %d: %s", self.device, exc)
        self._memory = memory
        self._slots = [_Slot(address + at, self.driver.event_create()) for at in (0, STAGE_BYTES)]

    def _free(self, slot: _Slot) -> None:
        if slot.busy:
            self.driver.event_synchronize(slot.event)
            if slot.target:
                memmove(slot.target, slot.address, slot.size)
            slot.busy = False

    def stage_in(self, target: int, source: int, size: int) -> int:
        """Begin a copy to the device through pinned memory; how many bytes. ``source`` is free at the return."""
        slot = self._slot()
        size = min(size, STAGE_BYTES)
        memmove(slot.address, source, size)
        slot.target, slot.busy = 0, True
        self.driver.to_device(target, slot.address, size, self.handle)
        self.driver.event_record(slot.event, self.handle)
        return size

    def stage_out(self, target: int, source: int, size: int) -> int:
        """Begin a copy from the device through pinned memory; how many bytes. They are at ``target`` after
        :meth:`finish`."""
        slot = self._slot()
        size = min(size, STAGE_BYTES)
        self.driver.to_host(slot.address, source, size, self.handle)
        slot.target, slot.size, slot.busy = target, size, True
        self.driver.event_record(slot.event, self.handle)
        return size

    def finish(self) -> None:
        """Wait until all that was begun here is done."""
        self.driver.stream_synchronize(self.handle)
        for slot in self._slots:
            if slot.busy and slot.target:
                memmove(slot.target, slot.address, slot.size)
            slot.busy = False

    def close(self) -> None:
        """Free everything; nothing is under way."""
        for event in (self.event, *(slot.event for slot in self._slots)):
            self.driver.event_destroy(event)
        self.driver.stream_destroy(self.handle)
        if self.registered:
            self.driver.host_unregister(self.registered)
        self.registered = 0
        self._slots = []
        self._memory = None


#: Streams nobody uses, for each device. Ends of a list are atomic.
_idle: dict[int, list[_Stream]] = {}
_idle_lock = threading.Lock()


def _idle_on(device: int) -> list[_Stream]:
    idle = _idle.get(device)
    if idle is None:
        with _idle_lock:
            idle = _idle.setdefault(device, [])
    return idle


class _Flight:
    """Copies that are under way together; for one thread, from the first one to :meth:`settle`."""

    __slots__ = ("_current", "_driver", "_followed", "_pinned", "_streams")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._streams: dict[int, _Stream] = {}
        #: (device, stream) of callers that our copies come after already.
        self._followed: set[tuple[int, int]] = set()
        #: Whose context is pushed; -1 for nobody's.
        self._current = -1
        #: What copies go straight from or to: mostly one, so this costs less than a set.
        self._pinned: list[Pinned] = []

    def _on(self, device: int) -> None:
        """Make the device's context the current one."""
        if self._current != device:
            if self._current >= 0:
                self._driver.pop()
                self._current = -1
            self._driver.push(device)
            self._current = device

    def _stream(self, span: DeviceSpan) -> _Stream:
        device = span.device
        self._on(device)
        stream = self._streams.get(device)
        if stream is None:
            try:
                stream = _idle_on(device).pop()
            except IndexError:
                stream = _Stream(self._driver, device)
            self._streams[device] = stream
        if span.stream and (device, span.stream) not in self._followed:
            stream.follow(span.stream)
            self._followed.add((device, span.stream))
        return stream

    def to_device(self, span: DeviceSpan, source: int, size: int, pinned: Pinned | None) -> None:
        """Begin the copy of a value to the span's head."""
        stream = self._stream(span)
        if pinned is not None and pinned not in self._pinned:
            self._pinned.append(pinned)
        target = span.address
        while size:
            part = pinned.direct(source, size) if pinned is not None else 0
            if part:
                self._driver.to_device(target, source, part, stream.handle)
            else:
                part = stream.stage_in(target, source, size)
            target, source, size = target + part, source + part, size - part

    def to_host(self, span: DeviceSpan, target: int, size: int, pinned: Pinned | None) -> None:
        """Begin the copy of the span's head."""
        stream = self._stream(span)
        if pinned is not None and pinned not in self._pinned:
            self._pinned.append(pinned)
        source = span.address
        while size:
            part = pinned.direct(target, size) if pinned is not None else 0
            if part:
                self._driver.to_host(target, source, part, stream.handle)
            else:
                part = stream.stage_out(target, source, size)
            target, source, size = target + part, source + part, size - part

    def settle(self) -> None:
        """Wait for everything, through interruptions. Raises Unfinished. Twice is harmless."""
        failed: CudaError | None = None
        interrupted: BaseException | None = None
        while self._streams:
            device, stream = next(iter(self._streams.items()))
            try:
                self._on(device)
                stream.finish()
            except CudaError as exc:
                failed = exc  # the stream is of no use any more, and what it has is left to the process's end
                _LOST.append(stream)
                for pinned in self._pinned:
                    pinned.stuck = True
            except BaseException as exc:
                interrupted = exc
                continue
            else:
                idle = _idle_on(device)
                if len(idle) < IDLE_STREAMS:
                    idle.append(stream)
                else:
                    stream.close()
            self._streams.pop(device, None)
        if self._current >= 0:
            self._current = -1
            try:
                self._driver.pop()
            except CudaError as exc:
                failed = failed or exc
        if failed is not None:
            raise Unfinished(f"a copy to or from a GPU cannot be waited for: {failed}", failed.code)
        if interrupted is not None:
            raise interrupted


#: Streams of which the driver cannot say that they are done, with their pinned memory.
_LOST: Final[list[_Stream]] = []


def to_device(copies: Iterable[Copy]) -> None:
    """Copy from host to GPU memory; done at the return, also by an exception. Raises CudaError, Unfinished.

    Copies are begun as the iterable gives them.
    """
    flight = _Flight(cuda.load())
    _carry_out(flight, flight.to_device, copies)


def to_host(copies: Iterable[Copy]) -> None:
    """Copy from GPU to host memory; done at the return, also by an exception. Raises CudaError, Unfinished."""
    flight = _Flight(cuda.load())
    _carry_out(flight, flight.to_host, copies)


def _carry_out(
    flight: _Flight, begin: Callable[[DeviceSpan, int, int, Pinned | None], None], copies: Iterable[Copy]
) -> None:
    try:
        for span, address, size, pinned in copies:
            begin(span, address, size, pinned)
    finally:
        try:
            flight.settle()
        except BaseException:
            flight.settle()  # interrupted at its very door
            raise


# -- host memory of any kind ------------------------------------------------------------------------


def copy_in(span: DeviceSpan, data: memoryview) -> None:
    """Host bytes to the span's head, through pinned memory. Raises CudaError."""
    to_device([(span, address_of(data), data.nbytes, None)])


def host_copy(span: DeviceSpan, size: int | None = None) -> memoryview:
    """The span's first ``size`` bytes (or all) as new host memory. Raises CudaError."""
    size = span.size if size is None else size
    data = bytearray(size)
    to_host([(span, ctypes.addressof(ctypes.c_char.from_buffer(data)), size, None)])
    return memoryview(data)


def host_view(source: memoryview | Span) -> memoryview:
    """The bytes of a put's source, for paths that need them in host memory: in place, or copied there from a GPU."""
    if type(source) is DeviceSpan:
        return host_copy(source)
    return source.view() if isinstance(source, Span) else source


def parts(positions: Sequence[int], sources: Sequence[memoryview | Span]) -> Iterator[Sequence[int]]:
    """The positions, in runs of about ``GROUP_BYTES`` where some sources are in GPU memory, and must be copied to host
    memory before they can go anywhere."""
    if DeviceSpan not in map(type, map(sources.__getitem__, positions)):
        yield positions
        return
    run: list[int] = []
    total = 0
    for position in positions:
        if run and total + len(sources[position]) > GROUP_BYTES:
            yield run
            run, total = [], 0
        run.append(position)
        total += len(sources[position])
    yield run


class Landing:
    """Host memory in which values arrive one at a time, each on its way to GPU memory.

    The next one's arrival, or :meth:`finish`, sends the one before on. Nothing here raises in the middle of an
    exchange with a server, as that would leave the rest of the exchange on the connection.
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._waiting: tuple[DeviceSpan, int] | None = None
        self._error: CudaError | None = None

    def room(self, span: DeviceSpan) -> Callable[[int], memoryview]:
        """Where a value for the span goes, asked for when its length is known."""

        def room(length: int) -> memoryview:
            self._send_on()
            if len(self._memory) < length:
                self._memory = bytearray(length)
            self._waiting = span, length
            return memoryview(self._memory)[:length]

        return room

    def _send_on(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._error is not None:
            return
        span, length = waiting
        try:
            copy_in(span, memoryview(self._memory)[:length])
        except CudaError as exc:
            self._error = exc

    def finish(self) -> None:
        """All that came is in GPU memory. Raises CudaError where some of it is not."""
        self._send_on()
        if self._error is not None:
            raise self._error


# -- arenas on this host ------------------------------------------------------------------------------


def registered(reader: ArenaReader, span: DeviceSpan) -> Pinned:
    """The registration of a reader's arena, begun with this call if there is none."""
    return pinned_for(reader, cuda.load(), span.device)


def copy_out(reader: ArenaReader, start: int, size: int, span: DeviceSpan) -> None:
    """Bytes of the arena's data to the span's head: for one value, to be confirmed after the return."""
    to_device([(span, reader.data_address + start, size, registered(reader, span))])


def fill(reader: ArenaReader, start: int, span: DeviceSpan, size: int) -> None:
    """The span's head into a granted chunk: for one value, to be committed after the return."""
    to_host([(span, reader.data_address + start, size, registered(reader, span))])


def fill_many(reader: ArenaReader, copies: Sequence[tuple[int, DeviceSpan]]) -> None:
    """Whole spans into granted chunks, which begin at these places of the arena's data."""
    address = reader.data_address
    to_host([(span, address + start, span.size, registered(reader, span)) for start, span in copies])


def fetch(
    reader: ArenaReader, digests: Sequence[bytes], sinks: Sequence[Any], positions: Sequence[int], checksum: bool
) -> tuple[list[tuple[int, int]], list[int]]:
    """Plain hits of a batch straight from the arena into GPU memory: (position, length) of each, confirmed.

    And the positions of everything else (misses, what is too large, what has changed meanwhile, sinks in host
    memory, values whose checksum is to be looked at), of which nothing is said. Raises CudaError.
    """
    hits: list[tuple[int, int]] = []
    rest: list[int] = []
    base = reader.data_address - reader.data_offset
    left = iter(positions)
    begun: list[tuple[int, Located]] = []

    def group() -> Iterator[Copy]:
        total = 0
        for position in left:
            sink = sinks[position]
            found = None
            if type(sink) is DeviceSpan:
                try:
                    found = reader.locate(digests[position])
                except Unsettled:
                    found = None
            if found is None or found.length > len(sink) or (checksum and found.flags & _CRC):
                rest.append(position)
                continue
            begun.append((position, found))
            yield sink, base + found.offset, found.length, registered(reader, sink)
            total += found.length
            if total >= GROUP_BYTES or len(begun) >= GROUP_KEYS:
                return

    while True:
        begun.clear()
        to_device(group())
        if not begun:
            return hits, rest
        for position, found in begun:
            if reader.confirm(digests[position], found.slot, found.seq):
                reader.visited[found.slot] = 1
                hits.append((position, found.length))
            else:
                rest.append(position)


# -- the end --------------------------------------------------------------------------------------------


def shutdown() -> None:
    """Undo all registrations and free the streams: at a test's end. No copy may be under way."""
    close_all()
    driver = cuda.loaded()
    idle = list(_idle.items())
    _idle.clear()
    for device, streams in idle:
        for stream in streams:
            if driver is stream.driver and not driver.forked:
                driver.push(device)
                try:
                    stream.close()
                finally:
                    driver.pop()


def _after_fork_in_child() -> None:
    global _idle_lock
    _idle_lock = threading.Lock()
    _idle.clear()  # the parent's: nothing of them is closed here


os.register_at_fork(after_in_child=_after_fork_in_child)
