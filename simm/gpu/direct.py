"""GPU memory over RDMA: RDMA devices reach it directly where they can, and all else is staged in host memory.

*Direct*: READ straight into GPU memory, WRITE straight out of it. A :class:`DeviceRegistration` tries with each rail,
once: the descriptor that the CUDA driver exports (``dma-buf``: NVIDIA's open kernel modules, CUDA 11.7, Linux 5.12),
then the plain registration of the GPU's address (``nvidia-peermem``). *Staged*: through host memory that the RDMA
device knows as a region and the CUDA driver as pinned, with one DMA for each value. Unregistered memory is staged too
(registering costs milliseconds, and each call would pay that), and so is what a get receives by TCP. A batch may have
both kinds, and host memory. One line in the log (``simm.gpu.copy``, INFO) says for each GPU and rail which way it was,
and why not a better one.

docs/architecture.md, "GPU memory", has the order: what a transfer waits for, what is flushed, which calls are staged.

What can go wrong
-----------------
* *The completion arrives before the bytes*, which take another path. What was READ is flushed for all GPUs before the
  call returns, raises, or leaves a key to TCP, whose copy a late write would overwrite; also after a link was closed
  under it, as closing ends only the device's part.
* *The wait for the caller's streams has no bound.* The deadline is counted from after it, and after registering.
* *The CPU touches GPU memory.* While a value is direct, its span has an address for the RDMA device alone and a key
  for the whole call (:class:`Keys`), so no path for memory without a key takes it. TCP has other sources.
* *Managed memory* moves between host and GPU, and a plain registration would pin what it is at that time: staged.
* *A descriptor leaks.* It is closed once registered, or not; a child that is forked in between closes its copy.
* *Staging memory is used again while a transfer still writes it.* It is lent for one exchange and reused only if all
  of that came out well. Otherwise it is deregistered, which ends what may still come, and dropped.

Staging costs up to 128 MiB of pinned memory, and one more copy at the bus's speed. No card has seen any of this: tests
run it on a CUDA driver and a network in software. A GPU has exported torch's memory, and flushed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..constants import VALUE_BYTES_MAX
from ..errors import DeviceError
from ..host import fork
from ..host.buffers import DeviceBuffer, DeviceCopy, Span
from ..host.parts import on_device
from ..rdma.api import FabricError, Rail, Region
from ..rdma.registration import Registration
from . import copy, cuda
from .cuda import CudaError, Driver

log = logging.getLogger("simm.gpu.copy")

#: Values staged in one exchange, bytes; any one value fits.
GROUP_BYTES: Final = 64 << 20

Sources = Mapping[int, memoryview | Span]

#: One of these is there where the kernel lets RDMA devices register a GPU's addresses.
PEERMEM_MODULES: Final = ["/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"]


# -- which way ------------------------------------------------------------------------------------------

#: (rail, GPU, way) that the log has had already, with the call that logged it.
_said: dict[tuple[str, int, str], object] = {}


def announce(rail: str, device: int, way: str, why: str = "") -> None:
    """Log once which way a GPU's memory takes to a rail, and why not a better one."""
    call = object()
    if _said.setdefault((rail, device, way), call) is call:
        log.info("GPU %d over %s: %s%s", device, rail, way, f" ({why})" if why else "")


def _by_dma_buf(driver: Driver, rail: Rail, memory: DeviceRegistration) -> Region:
    if not driver.attribute(memory.device, cuda.DMA_BUF_SUPPORTED):
        raise CudaError("the GPU's driver exports none (it does with NVIDIA's open kernel modules)")
    start = memory.address & -mmap.PAGESIZE
    size = -(-(memory.address + memory.size - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = driver.dma_buf(start, size)
    _exported.add(fd)
    try:
        os.set_inheritable(fd, False)
        return rail.register_dmabuf(fd, memory.address - start, memory.size, memory.access)
    finally:
        # In this order: a child forked in between may keep a copy, and never closes what has the number since then.
        _exported.discard(fd)
        os.close(fd)


def _by_peermem(driver: Driver, rail: Rail, memory: DeviceRegistration) -> Region:
    if not any(os.path.exists(module) for module in PEERMEM_MODULES):
        raise FabricError("that kernel module is not loaded (modprobe nvidia-peermem)")
    if not driver.attribute(memory.device, cuda.GPU_DIRECT_RDMA_SUPPORTED):
        raise CudaError("the GPU does not support it")
    return rail.register(memory.address, memory.size, memory.access)


_WAYS: Final[tuple[tuple[str, Callable[[Driver, Rail, DeviceRegistration], Region]], ...]] = (
    ("dma-buf", _by_dma_buf),
    ("nvidia-peermem", _by_peermem),
)
#: Descriptors that are open now.
_exported: set[int] = set()


class DeviceRegistration(Registration):
    """GPU memory, registered with each rail at its first use there, in the first way that works. See Registration."""

    __slots__ = ("device",)

    #: What keeps it from working is a module that is not there, or the like, and each try would cost a call its time.
    tries_again = False

    def __init__(self, span: DeviceBuffer) -> None:
        super().__init__(span.address, span.size, writable=span.writable, keep=span.keep)
        self.device = span.device

    def _made(self, rail: Rail) -> Region:
        why: list[str] = []
        try:
            driver = cuda.load()
            before, primary = driver.context(), driver.primary(self.device)
        except CudaError as exc:
            raise FabricError(str(exc)) from exc
        try:
            driver.set_context(primary)
            if driver.managed(self.address):
                raise FabricError("managed memory moves between host and GPU")
            for name, attempt in _WAYS:
                try:
                    region = attempt(driver, rail, self)
                except (CudaError, FabricError, OSError) as exc:
                    why.append(f"no {name}: {exc}")
                    continue
                try:
                    driver.sync_memops(self.address)
                except CudaError as exc:
                    region.close()
                    raise FabricError(f"the driver does not wait for its own copies there: {exc}") from exc
                announce(rail.name, self.device, name, "; ".join(why))
                return region
        except CudaError as exc:
            raise FabricError(str(exc)) from exc
        finally:
            try:
                driver.restore(before)
            except BaseException:
                driver.restore(before)  # an interruption may have come before the call
                raise
        raise FabricError("; ".join(why))

    def _complain(self, rail: Rail, exc: FabricError) -> None:
        announce(rail.name, self.device, "staged", str(exc))


# -- one call -------------------------------------------------------------------------------------------


class Keys:
    """One registration's keys for one call. They do not change: a span with this always has a key."""

    __slots__ = ("_keys", "_memory", "shift")

    def __init__(self, memory: DeviceRegistration) -> None:
        self._memory = memory  # and with it the caller's
        self._keys: dict[int, int] = {}
        #: What is added to a GPU's address for operations.
        self.shift = 0

    def lkey(self, rail: Rail, *, again: bool = False) -> int:
        """Return the local key. Raises FabricError, never returns None, which would mean a copy by the CPU."""
        key = self._keys.get(id(rail))
        return key if key is not None else self._add(rail)

    def _add(self, rail: Rail) -> int:
        region = self._memory.region(rail)
        if region is None or not region.lkey:
            raise FabricError(f"{rail.name}: this GPU memory is not registered there")
        shift = region.address - self._memory.address
        if self._keys and shift != self.shift:
            raise FabricError("it would have another address for each rail: let all cards take it the same way")
        self.shift = shift
        self._keys[id(rail)] = region.lkey
        return region.lkey

    @classmethod
    def of(cls, memory: DeviceRegistration, rails: Sequence[Rail]) -> Keys | None:
        """Return keys for these rails; None if not all of them know the memory by one address."""
        if None in [memory.region(rail) for rail in rails]:  # each is asked, as each has a line in the log
            return None
        keys = cls(memory)
        for rail in rails:
            try:
                keys.lkey(rail)
            except FabricError as exc:
                announce(rail.name, memory.device, "staged", str(exc))
                return None
        return keys


def direct(
    positions: Iterable[int], spans: Sequence[Any] | Mapping[int, Any], rails: Sequence[Rail], *, reading: bool
) -> dict[int, Span]:
    """Return the spans, by position, that every given rail can access directly.

    The returned spans hold *device* addresses: pass them to RDMA operations only, never dereference them on the CPU.
    Empty if ``rails`` is empty.
    """
    found: dict[int, Span] = {}
    known: dict[int, Keys | None] = {}
    unknown: set[int] = set()
    for position in positions:
        span = spans[position]
        if not on_device(span) or not rails:
            continue
        memory = span.registration
        if type(memory) is not DeviceRegistration:
            unknown.add(span.device)
            continue
        if id(memory) not in known:
            known[id(memory)] = None if reading and not _readable(span.device) else Keys.of(memory, rails)
        keys = known[id(memory)]
        if keys is not None and memory.holds(span.address, span.size):
            found[position] = _for_devices(span, keys)
    for device in unknown:
        for rail in rails:
            announce(rail.name, device, "staged, as it is not registered", "pass what register() gave")
    return found


def _for_devices(span: DeviceBuffer, keys: Keys) -> Span:
    made = Span(span.address, span.size, writable=span.writable, keep=span.keep, registration=keys)
    made.address += keys.shift  # may be 0, which is no address for a span otherwise
    made.least = span.least
    return made


def read(
    read_host: Callable[[Sequence[int], Mapping[int, Span], dict[int, Any]], list[int]], positions: Sequence[int],
    sinks: Sequence[Any], results: list[Any], rails: Sequence[Rail],
) -> list[int]:  # fmt: skip
    """Read values as :meth:`DeviceBuffer.read_remote` says. Raises CudaError."""
    left: list[int] = []
    spans = direct(positions, sinks, rails, reading=True)
    if spans:
        left += _read_direct(read_host, spans, sinks, results)
        positions = [position for position in positions if position not in spans]

    def most(position: int) -> int:
        return min(len(sinks[position]), VALUE_BYTES_MAX)

    for part, total in _groups(positions, most):
        with copy.staged(total, sinks[part[0]].device) as (buffer, pinned):
            hosts: dict[int, Span] = {}
            at = buffer.address
            for position in part:
                hosts[position] = Span(at, most(position), registration=buffer.registration)
                hosts[position].least = sinks[position].least
                at += _aligned(most(position))
            got: dict[int, Any] = {}
            missed = read_host(part, hosts, got)
            copy.to_device(
                (sinks[position], hosts[position].address, length, pinned)
                for position, length in got.items() if length > 0
            )  # fmt: skip
            for position, result in got.items():
                results[position] = result
            left += missed
            if missed:
                copy.staging.drop(buffer)
    return left


def _read_direct(
    read_host: Callable[[Sequence[int], Mapping[int, Span], dict[int, Any]], list[int]], spans: Mapping[int, Span],
    sinks: Sequence[Any], results: list[Any],
) -> list[int]:  # fmt: skip
    """Read values straight into GPU memory and return the positions that are left over. Raises CudaError."""
    positions = list(spans)
    after_work([sinks[position] for position in positions])
    got: dict[int, Any] = {}
    devices = {sinks[position].device for position in positions}
    try:
        left = read_host(positions, spans, got)
        flush(devices)
    except DeviceError:
        raise
    except BaseException:  # also an interruption that comes just before the flush
        with contextlib.suppress(CudaError):
            flush(devices)
        raise
    for position, result in got.items():
        results[position] = result
    return left


def put(
    put_host: Callable[[Sequence[int], Sources, Sources], bool], positions: Sequence[int],
    sources: Sequence[memoryview | Span], rails: Sequence[Rail],
) -> None:  # fmt: skip
    """Put values as :meth:`DeviceBuffer.put_by_rdma` says. Raises CudaError."""
    spans = direct(positions, sources, rails, reading=False)
    after_work([sources[position] for position in spans])  # type: ignore[misc]

    def is_staged(position: int) -> bool:
        return position not in spans and on_device(sources[position])

    def size_of(position: int) -> int:
        return len(sources[position]) if is_staged(position) else 0

    for part, total in _groups(positions, size_of):
        hosted: dict[int, memoryview | Span] = {position: spans.get(position, sources[position]) for position in part}
        spare: dict[int, memoryview | Span] = {position: sources[position] for position in part}
        through = [source for position in part if is_staged(position) and on_device(source := sources[position])]
        if not through:
            put_host(part, hosted, spare)
            continue
        with copy.staged(total, through[0].device) as (buffer, pinned):
            copies: list[DeviceCopy] = []
            at = buffer.address
            for position in part:
                source = sources[position]
                if on_device(source) and position not in spans:
                    hosted[position] = spare[position] = Span(
                        at, source.size, writable=False, registration=buffer.registration
                    )
                    copies.append((source, at, source.size, pinned))
                    at += _aligned(source.size)
            copy.to_host(copies)
            if not put_host(part, hosted, spare):
                copy.staging.drop(buffer)


def _groups(positions: Sequence[int], size_of: Callable[[int], int]) -> Iterator[tuple[list[int], int]]:
    """Yield positions in runs of at most GROUP_BYTES, with the staging bytes that they take."""
    run: list[int] = []
    total = 0
    for position in positions:
        size = _aligned(size_of(position))
        if run and total + size > GROUP_BYTES:
            yield run, total
            run, total = [], 0
        run.append(position)
        total += size
    if run:
        yield run, total


def _aligned(size: int) -> int:
    return (size + 63) & -64


# -- order ----------------------------------------------------------------------------------------------


def after_work(spans: Iterable[DeviceBuffer]) -> None:
    """Wait for what was issued so far on the streams that transfers of these spans come after. Raises CudaError."""
    streams: dict[int, set[int]] = {}
    for span in spans:
        streams.setdefault(span.device, {cuda.STREAM_LEGACY}).add(span.stream or cuda.STREAM_LEGACY)
    if not streams:
        return
    driver = cuda.load()
    for device, waits in streams.items():
        driver.within(device, functools.partial(_wait, driver, waits))


def _wait(driver: Driver, streams: set[int]) -> None:
    if cuda.STREAM_PER_THREAD in streams:
        driver.context_synchronize()  # each thread has another one, and this may not be the caller's
        return
    for stream in streams:
        driver.stream_synchronize(stream)


@functools.cache
def _order_of(driver: Driver, device: int) -> tuple[bool, bool]:
    """Return whether what other devices write must be flushed before it is read, and whether it can be read at all."""
    flush = driver.attribute(device, cuda.GPU_DIRECT_RDMA_WRITES_ORDERING) < cuda.ALL_DEVICES
    options = driver.attribute(device, cuda.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
    readable = not flush or (bool(options & cuda.FLUSH_BY_HOST) and driver.flushes)
    if not readable:
        log.info(
            "GPU %d: values are read into it through pinned memory, as what other devices write there would have "
            "to be flushed, and its driver offers no way to", device,
        )  # fmt: skip
    return flush, readable


def _readable(device: int) -> bool:
    try:
        return _order_of(cuda.load(), device)[1]
    except CudaError:
        return False


def flush(devices: Iterable[int]) -> None:
    """Make what RDMA devices have written into these GPUs' memory visible to all GPUs. Raises CudaError."""
    failed: CudaError | None = None
    for device in devices:
        try:
            driver = cuda.load()
            if _order_of(driver, device)[0]:
                driver.within(device, driver.flush_writes)
        except CudaError as exc:
            failed = failed or exc
    if failed is not None:
        try:
            raise failed
        finally:
            del failed  # else the exception and this frame hold each other, and with them the callers' buffers


def _after_fork_in_child() -> None:
    for fd in list(_exported):
        with contextlib.suppress(OSError):
            os.close(fd)
    _exported.clear()


fork.in_child(_after_fork_in_child)
