"""Copies between host and GPU memory.

On the same host a GET is one DMA straight out of the arena and a PUT is one into the granted chunk: the arena is
registered with the CUDA driver (``gpu/pinning.py``). While it is not, and on every other path, values pass in turns
through two small pieces of pinned memory. Over RDMA the device may reach GPU memory itself (``gpu/direct.py``).

What a caller may assume
------------------------
* When a get has returned, the value lies in GPU memory. When a put has returned, it has read all it reads. Nothing is
  in flight then: the caller needs no event of SiMM's, and may free or overwrite the memory at once.
* A copy begins after all that was issued before the call on the device's *legacy default stream* (torch's, unless one
  was chosen), and on the stream that the object names: by ``stream`` of its ``__cuda_array_interface__`` (torch's have
  none), or passed to :func:`~simm.gpu.buffers.device_span`. The caller synchronises work on other streams itself.

What can go wrong
-----------------
* *A value is confirmed before it was copied*, or *a granted chunk goes to another value while the GPU still writes it*.
  :func:`to_device` and :func:`to_host` return when the device is done, whatever happens in between; a Ctrl-C is
  deferred. There is no way to begin a copy that leaves this module. Where the driver itself cannot say that a copy has
  ended, UnfinishedCopy is raised and the chunk is never released.

A batch is one chain of copies on one stream, and one wait. Where the driver can begin many copies in one call (CUDA
13.0), copies of pinned memory are gathered for it: a call for each costs 2.5 us, which is more than a copy of 4 KiB
takes, and gives the GIL to whoever wants it. *Copies of one such call have no order*, so those whose targets overlap
are begun one after the other, as the last one must win there.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ..errors import DeviceError, TransportError, UnfinishedCopy
from ..host import fork
from ..host.buffers import DeviceBuffer, DeviceCopy, address_of, memmove
from ..rdma.staging import StagingBuffer, StagingPool
from . import cuda
from .cuda import CudaError, Driver
from .pinning import Pinned, pin_now

log = logging.getLogger("simm.gpu.copy")

#: A staged copy goes through two pieces of pinned memory, of so many bytes each, for each stream in use.
STAGE_BYTES: Final = 1 << 20
#: Copies that are gathered for one call of the driver, and their bytes: the device starts on these meanwhile.
GATHER_COPIES: Final = 64
GATHER_BYTES: Final = 64 << 20
#: Streams that are kept idle for each device; as many are in use as threads copy at the same time.
IDLE_STREAMS: Final = 8

#: Staging memory of this process's copies to and from GPUs.
staging: Final = StagingPool()


# -- streams --------------------------------------------------------------------------------------------


class _Piece:
    """One of the two pieces of a stream's staging buffer."""

    __slots__ = ("address", "busy", "event", "size", "target")

    def __init__(self, address: int, event: int) -> None:
        self.address = address
        #: Recorded after the copy that uses the piece.
        self.event = event
        self.busy = False
        #: Where its bytes go once they are there; 0 for a copy to the device.
        self.target = 0
        self.size = 0


class _Stream:
    """A stream with what copies in flight need on it. Its device's context is current in all methods."""

    __slots__ = (
        "_at", "_buffer", "_bytes", "_pieces", "_sizes", "_sources", "_targets", "_transfer", "device", "driver",
        "event", "handle",
    )  # fmt: skip

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.handle = driver.stream_create()
        #: To wait for callers' streams.
        self.event = driver.event_create()
        self._buffer: StagingBuffer | None = None
        self._pieces: list[_Piece] = []
        self._at = 0
        #: Copies that wait to be begun together, and the call that begins one of them.
        self._targets: list[int] = []
        self._sources: list[int] = []
        self._sizes: list[int] = []
        self._bytes = 0
        self._transfer: Callable[[int, int, int, int], None] = driver.to_device

    def gather(self, target: int, source: int, size: int, transfer: Callable[[int, int, int, int], None]) -> None:
        """Have a copy of pinned memory begin with the next ones; :meth:`begin_gathered` must follow. Raises CudaError.

        ``transfer`` would begin it alone, and is the same for all that wait.
        """
        self._targets.append(target)
        self._sources.append(source)
        self._sizes.append(size)
        self._bytes += size
        self._transfer = transfer
        if len(self._sizes) >= GATHER_COPIES or self._bytes >= GATHER_BYTES:
            self.begin_gathered()

    def begin_gathered(self) -> None:
        """Begin the copies that wait. Raises CudaError: some may have begun, and none of them waits any more.

        A driver that refuses them together, and takes each alone, is not asked again.
        """
        targets, sources, sizes = self._targets, self._sources, self._sizes
        if not sizes:
            return
        self.drop_gathered()
        refused: CudaError | None = None
        if len(sizes) > 1 and self.driver.batches and not overlap(targets, sizes):
            try:
                self.driver.copy_batch(targets, sources, sizes, self.handle)
                return
            except CudaError as exc:
                refused = exc
        # Those of the batch that have begun copy the same bytes twice.
        for target, source, size in zip(targets, sources, sizes):
            self._transfer(target, source, size, self.handle)
        if refused is not None:
            self.driver.batches = False
            log.warning("copies are begun one by one from now on, as the driver refuses many together: %s", refused)

    def drop_gathered(self) -> None:
        """Forget the copies that wait."""
        self._targets, self._sources, self._sizes, self._bytes = [], [], [], 0

    def follow(self, stream: int) -> None:
        """Order what begins here from now on after all that was issued on the caller's stream."""
        if stream == cuda.STREAM_PER_THREAD:
            # Each thread has another one, and this thread may not be the caller's (the async forms).
            self.driver.context_synchronize()
            return
        self.driver.event_record(self.event, stream)
        self.driver.stream_wait(self.handle, self.event)

    def _next_piece(self) -> _Piece:
        """Return the next piece of staging memory, free."""
        if not self._pieces:
            if self._buffer is None:
                self._buffer = _take_whole(2 * STAGE_BYTES, exact=True)
            # Where that fails the driver has a way of its own around unpinned memory.
            pin_now(self._buffer.memory, self.driver, self.device)
            address = self._buffer.address
            self._pieces = [_Piece(address + at, self.driver.event_create()) for at in (0, STAGE_BYTES)]
        piece = self._pieces[self._at]
        self._at = (self._at + 1) % len(self._pieces)
        if piece.busy:
            self.driver.event_synchronize(piece.event)
            self._free(piece)
        return piece

    @staticmethod
    def _free(piece: _Piece) -> None:
        if piece.target:
            memmove(piece.target, piece.address, piece.size)
        piece.busy = False

    def stage(self, target: int, source: int, size: int, inward: bool) -> int:
        """Begin a copy through staging memory and return its bytes.

        To the device (``inward``), ``source`` is free at the return. From it, the bytes arrive by :meth:`finish`.
        """
        piece = self._next_piece()
        size = min(size, STAGE_BYTES)
        if inward:
            memmove(piece.address, source, size)
            piece.target, piece.busy = 0, True
            self.driver.to_device(target, piece.address, size, self.handle)
        else:
            self.driver.to_host(piece.address, source, size, self.handle)
            piece.target, piece.size, piece.busy = target, size, True
        self.driver.event_record(piece.event, self.handle)
        return size

    def finish(self) -> None:
        """Wait until all that was begun here is done, and forget what has not been."""
        if self._targets:  # which are longer than the other lists if gather() was interrupted
            self.drop_gathered()
        self.driver.stream_synchronize(self.handle)
        for piece in self._pieces:
            if piece.busy:
                self._free(piece)

    def close(self) -> None:
        """Free everything. Nothing is in flight."""
        for event in (self.event, *(piece.event for piece in self._pieces)):
            self.driver.event_destroy(event)
        self.driver.stream_destroy(self.handle)
        self._pieces = []
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            staging.drop(buffer)


def overlap(targets: list[int], sizes: list[int]) -> bool:
    """Return whether two of the pieces of memory share a byte. O(n), if they are in order, else O(n log n)."""
    end = 0
    for target, size in zip(targets, sizes):
        if target < end:
            break
        end = target + size
    else:
        return False
    end = 0
    for target, size in sorted(zip(targets, sizes)):
        if target < end:
            return True
        end = target + size
    return False


#: Idle streams of each device. Adding a list, appending to it and popping from it are atomic.
_idle: dict[int, list[_Stream]] = {}


class InFlightCopies:
    """Copies that are in flight together; for one thread, from the first one to :meth:`wait`."""

    __slots__ = (
        "_before", "_changed", "_current", "_driver", "_followed", "_gathers", "_last", "_pinned", "_streams",
        "_unfinished",
    )  # fmt: skip

    def __init__(self, driver: Driver, *, alone: bool = False) -> None:
        """``alone``: there will be one copy, so that nothing is gathered."""
        self._driver = driver
        self._gathers = driver.batches and not alone
        self._streams: dict[int, _Stream] = {}
        #: (device, stream) of callers that these copies come after already.
        self._followed: set[tuple[int, int]] = set()
        #: The thread's context when the first copy began, -1 until then; and whether another one may be current.
        self._before = -1
        self._changed = False
        #: Device whose context is current; -1 if that is unknown.
        self._current = -1
        #: Memory that copies go straight from or to: mostly one, so a list is cheaper than a set.
        self._pinned: list[Pinned] = []
        #: Device and stream of the caller's of the last copy, and what they were begun on; most copies are alike.
        self._last: tuple[int, int, _Stream] | None = None
        #: Why it is unknown whether all copies are done. Here, as :meth:`wait` may be interrupted and called again.
        self._unfinished: str | None = None

    def _on(self, device: int) -> None:
        """Make the device's context the current one."""
        if self._current != device:
            context = self._driver.primary(device)
            if self._before < 0:
                self._before = self._driver.context()
            self._current = -1
            if self._changed or context != self._before:
                self._changed = True  # before the call: an interruption may come after it
                self._driver.set_context(context)
            self._current = device

    def _stream(self, buffer: DeviceBuffer) -> _Stream:
        device = buffer.device
        self._on(device)
        stream = self._streams.get(device)
        if stream is None:
            try:
                stream = _idle.setdefault(device, []).pop()
            except IndexError:
                stream = _Stream(self._driver, device)
            self._streams[device] = stream
        if buffer.stream and (device, buffer.stream) not in self._followed:
            stream.follow(buffer.stream)
            self._followed.add((device, buffer.stream))
        return stream

    def begin(self, buffer: DeviceBuffer, host: int, size: int, pinned: Pinned | None, inward: bool) -> None:
        """Begin the copy of host memory to the buffer's head, or from there if not ``inward``."""
        last = self._last
        if last is not None and last[0] == buffer.device and last[1] == buffer.stream:
            stream = last[2]
        else:
            stream = self._stream(buffer)
            self._last = buffer.device, buffer.stream, stream
        if pinned is not None and pinned not in self._pinned:
            self._pinned.append(pinned)
        source, target = (host, buffer.address) if inward else (buffer.address, host)
        transfer = self._driver.to_device if inward else self._driver.to_host
        done = 0
        while done < size:
            part = pinned.direct(host + done, size - done) if pinned is not None else 0
            if part and self._gathers:
                stream.gather(target + done, source + done, part, transfer)
            elif part:
                transfer(target + done, source + done, part, stream.handle)
            else:
                stream.begin_gathered()  # to the same memory, perhaps: the later copy must win
                part = stream.stage(target + done, source + done, size - done, inward)
            done += part

    def begin_gathered(self) -> None:
        """Begin what :meth:`begin` has kept back to begin it in one call. Raises CudaError."""
        if not self._gathers:
            return
        for device, stream in self._streams.items():
            self._on(device)
            stream.begin_gathered()

    def wait(self) -> None:
        """Wait until every copy that has begun is done, deferring interruptions, and forget those that have not.

        Raises UnfinishedCopy. Twice is harmless: the second call raises it again.
        """
        interrupted: BaseException | None = None
        self._last = None
        while self._streams:
            device, stream = next(iter(self._streams.items()))
            try:
                self._on(device)
                stream.finish()
            except CudaError as exc:
                self._unfinished = str(exc)
                fork.keep_forever(stream)  # with its staging memory, to the process's end
                for pinned in self._pinned:
                    pinned.stuck = True
                self._streams.pop(device, None)
            except BaseException as exc:
                interrupted = exc
            else:
                # Before it is given away: if an interruption has this called again, two threads would get the stream.
                self._streams.pop(device, None)
                idle = _idle.setdefault(device, [])
                if len(idle) < IDLE_STREAMS:
                    idle.append(stream)
                else:
                    stream.close()
        if self._changed:
            self._current = -1
            self._driver.restore(self._before)
            self._changed = False  # after the call: if an interruption comes first, the next wait makes it once more
        try:
            if self._unfinished is not None:
                raise UnfinishedCopy(f"a copy to or from a GPU cannot be waited for: {self._unfinished}")
            if interrupted is not None:
                raise interrupted
        finally:
            del interrupted  # else exception and frame hold each other, and with them the callers' arena


def to_device(copies: Iterable[DeviceCopy]) -> None:
    """Copy from host to GPU memory; done at the return, also by an exception. Raises CudaError, UnfinishedCopy.

    Each copy begins when the iterable yields it, or with the next ones.
    """
    _carry_out(copies, inward=True)


def to_host(copies: Iterable[DeviceCopy]) -> None:
    """Copy from GPU to host memory; done at the return, also by an exception. Raises CudaError, UnfinishedCopy."""
    _carry_out(copies, inward=False)


def _carry_out(copies: Iterable[DeviceCopy], *, inward: bool) -> None:
    in_flight = InFlightCopies(cuda.load(), alone=type(copies) is list and len(copies) == 1)
    try:
        for buffer, address, size, pinned in copies:
            in_flight.begin(buffer, address, size, pinned, inward)
        in_flight.begin_gathered()
    finally:
        try:
            in_flight.wait()
        except BaseException:
            in_flight.wait()  # the interruption may have come before the wait began
            raise


# -- host memory of any kind ------------------------------------------------------------------------


def copy_in(buffer: DeviceBuffer, data: memoryview) -> None:
    """Copy host bytes to the buffer's head, through staging memory. Raises CudaError."""
    to_device([(buffer, address_of(data), data.nbytes, None)])


def host_copy(buffer: DeviceBuffer, size: int | None = None) -> memoryview:
    """Return the buffer's first ``size`` bytes (or all) as new host memory. Raises CudaError."""
    size = buffer.size if size is None else size
    data = bytearray(size)
    to_host([(buffer, ctypes.addressof(ctypes.c_char.from_buffer(data)), size, None)])
    return memoryview(data)


def _take_whole(size: int, *, exact: bool = False) -> StagingBuffer:
    try:
        return staging.take_whole(size, exact=exact)
    except TransportError as exc:  # which would be taken for a server's
        raise DeviceError(str(exc)) from exc


@contextlib.contextmanager
def staged(size: int, device: int) -> Iterator[tuple[StagingBuffer, Pinned]]:
    """Lend a staging buffer of at least ``size`` bytes that the driver has pinned, for the block.

    Call :meth:`StagingPool.drop` in the block, or leave it by an exception, if a transfer may still use the buffer.
    Raises DeviceError.
    """
    driver = cuda.load()
    buffer = _take_whole(size)
    try:
        yield buffer, pin_now(buffer.memory, driver, device)
    except BaseException:
        staging.drop(buffer)
        raise
    if not buffer.registration.closed:
        staging.release_whole(buffer)


def _after_fork_in_child() -> None:
    _idle.clear()  # the parent's: nothing of them is closed here
    staging.forget()


fork.in_child(_after_fork_in_child)
