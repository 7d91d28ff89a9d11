"""GPU memory that RDMA devices read and write themselves: READ straight into it, WRITE straight out of it.

``register()`` gives GPU memory a handle as it does host memory (:class:`DeviceRegistration`). With each rail that is
used the handle tries, once:

* ``dma-buf``: the CUDA driver exports the memory as a descriptor, and the RDMA device registers that. It needs
  NVIDIA's open kernel modules and CUDA 11.7, a kernel of 5.12 and a driver of the RDMA device that takes it.
* ``nvidia-peermem``: the plain registration of a GPU's address, where that kernel module (or ``nv_peer_mem``) is
  loaded.
* ``staged``: neither; values pass through pinned host memory (``gpurdma.py``). So does what was not registered, as
  registering costs milliseconds and a call would pay that each time.

One line in the log (``simm.gpu``, INFO) says for each GPU and rail which it was, and why not a better one.

What can go wrong, and what stands against it
---------------------------------------------
* *A device knows no streams.* A kernel that makes the value may not have run yet when it is WRITTEN, and one that still
  uses the buffer when it is READ into. So before anything is posted we wait, on the processor, for what was issued
  before the call: on the device's legacy default stream and on the one that the span names, as ``gpu.py`` promises. As
  there, that wait has no bound; the deadline is counted from after it (and from after registering, at the first use).
  It costs what those streams still have to do: a staged copy waits for the same, but its READ goes on meanwhile.
* *The completion is here before the bytes are.* It goes to host memory and the value to the GPU's, by ways of different
  length. So a READ is flushed (``cuFlushGPUDirectRDMAWrites``, for all GPUs) where the GPU does not order such writes
  by itself, before the call returns, raises, or leaves a key to TCP, whose copy a late write would overwrite: also
  when a link was closed under it, as that ends the device's part only. A GPU that needs it and cannot do it is not READ
  into; WRITEs need none.
* *The value was replaced under its READ.* The slot is READ once more behind it, into host memory, as for any other
  buffer (``rdmaget.py``); what was not confirmed is not a hit, whatever the buffer has.
* *The processor touches it.* It must not, so whatever has to look at bytes is staged: values with checksums.
  While a value is direct its span has an address for the RDMA device alone, and a key that is there for the whole
  call (:class:`Keys`), so that none of the ways for memory without one is ever taken.
* *Managed memory* moves between host and GPU, and a plain registration would pin what it is at that time: staged.
* *The memory is freed under its registration.* As with host memory: what is registered as an object is kept alive;
  what is registered by address must be deregistered first. Nothing is looked up by address.
* *A descriptor leaks.* It is closed once registered, or not; a child that is forked in between closes its copy.

The address in an operation is not the GPU's for a dma-buf (``verbs.py`` says why): ``Region.address`` tells. A call may
use several rails, and its operations have one address for all; where that differs (one rail by dma-buf, the other by
nvidia-peermem) the call is staged, and says so.

No GPU has seen any of this: tests run it on a CUDA driver and a network in software.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from . import cuda, registry
from .buffers import Span
from .cuda import CudaError, Driver
from .fabric import FabricError, Rail, Region
from .gpu import DeviceSpan
from .registry import Registration

log = logging.getLogger("simm.gpu")

#: One of these is there where the kernel lets RDMA devices register a GPU's addresses.
PEERMEM_MODULES: Final = ["/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"]


# -- which way ------------------------------------------------------------------------------------------

#: (rail, GPU, way) that the log has had.
_said: set[tuple[str, int, str]] = set()
_said_lock = threading.Lock()


def announce(rail: str, device: int, way: str, why: str = "") -> None:
    """Say which way a GPU's memory takes to a rail, and why not a better one; once."""
    with _said_lock:
        if (rail, device, way) in _said:
            return
        _said.add((rail, device, way))
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
        # In this order: a child forked in between may keep a copy, and never closes what has got the number since.
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
    """GPU memory, registered with each rail at its first use there in whichever way goes. See Registration."""

    __slots__ = ("device",)

    def __init__(self, span: DeviceSpan) -> None:
        super().__init__(span.address, span.size, writable=span.writable, keep=span.keep)
        self.device = span.device

    def _made(self, rail: Rail) -> Region:
        why: list[str] = []
        try:
            driver = cuda.load()
            driver.push(self.device)
        except CudaError as exc:
            raise FabricError(str(exc)) from exc
        try:
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
            with contextlib.suppress(CudaError):
                driver.pop()
        raise FabricError("; ".join(why))

    def _complain(self, rail: Rail, exc: FabricError) -> None:
        announce(rail.name, self.device, "staged", str(exc))


def registered(span: Span) -> Span:
    """The span itself, with a registration of its own if it has none; host memory or a GPU's."""
    if type(span) is DeviceSpan:
        if span.registration is None:
            span.registration = DeviceRegistration(span)
        return span
    return registry.registered(span)


# -- one call -------------------------------------------------------------------------------------------


class Keys:
    """One registration's keys for one call, which stay as they are: a span with this is never without a key."""

    __slots__ = ("_keys", "_memory", "shift")

    def __init__(self, memory: DeviceRegistration) -> None:
        self._memory = memory  # and with it the caller's
        self._keys: dict[int, int] = {}
        #: What is added to a GPU's address for operations.
        self.shift = 0

    def lkey(self, rail: Rail) -> int:
        """The local key. Raises FabricError: never None, as that would be a copy by the CPU."""
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
        """Keys for these rails; None where not all of them know the memory by one address."""
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
    """Of what lies in registered GPU memory at these positions that which the rails can reach, as spans for their
    operations alone: *their addresses are no addresses for the CPU*. Empty without rails."""
    found: dict[int, Span] = {}
    known: dict[int, Keys | None] = {}
    unknown: set[int] = set()
    for position in positions:
        span = spans[position]
        if type(span) is not DeviceSpan or not rails:
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


def _for_devices(span: DeviceSpan, keys: Keys) -> Span:
    made = Span(span.address, span.size, writable=span.writable, keep=span.keep, registration=keys)
    made.address += keys.shift  # may be 0, which is no address for a span otherwise
    return made


def read(
    read_host: Callable[[Sequence[int], Mapping[int, Span], dict[int, Any]], list[int]], spans: Mapping[int, Span],
    sinks: Sequence[Any], results: list[Any],
) -> list[int]:  # fmt: skip
    """Read values straight into GPU memory; the positions that are left over. ``spans`` are :func:`direct`'s.

    ``read_host`` is that of :func:`simm.gpurdma.read`. Raises CudaError.
    """
    positions = list(spans)
    after_work([sinks[position] for position in positions])
    got: dict[int, Any] = {}
    devices = {sinks[position].device for position in positions}
    try:
        left = read_host(positions, spans, got)
        flush(devices)
    except CudaError:
        raise
    except BaseException:  # also when interrupted at the flush's very door
        with contextlib.suppress(CudaError):
            flush(devices)
        raise
    for position, result in got.items():
        results[position] = result
    return left


# -- order ----------------------------------------------------------------------------------------------


def after_work(spans: Iterable[DeviceSpan]) -> None:
    """Wait for what was issued before on the streams that these spans' transfers come after. Raises CudaError."""
    streams: dict[int, set[int]] = {}
    for span in spans:
        streams.setdefault(span.device, {cuda.STREAM_LEGACY}).add(span.stream or cuda.STREAM_LEGACY)
    if not streams:
        return
    driver = cuda.load()
    for device, waits in streams.items():
        driver.push(device)
        try:
            if cuda.STREAM_PER_THREAD in waits:
                driver.context_synchronize()  # which one is that? The thread in which we run may not be the caller's
                continue
            for stream in waits:
                driver.stream_synchronize(stream)
        finally:
            driver.pop()


class _Order:
    """What a GPU does about the writes of other devices."""

    __slots__ = ("driver", "flush", "readable")

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        ordering = driver.attribute(device, cuda.GPU_DIRECT_RDMA_WRITES_ORDERING)
        options = driver.attribute(device, cuda.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
        #: Must they be flushed before anybody may look?
        self.flush = ordering < cuda.ALL_DEVICES
        self.readable = not self.flush or (bool(options & cuda.FLUSH_BY_HOST) and driver.flushes)


#: By driver, as tests have several.
_orders: dict[tuple[int, int], _Order] = {}


def _order_of(device: int) -> _Order:
    driver = cuda.load()
    order = _orders.get((id(driver), device))
    if order is None:
        order = _orders[id(driver), device] = _Order(driver, device)
        if not order.readable:
            log.info(
                "GPU %d: values are read into it through pinned memory, as what other devices write there would have "
                "to be flushed, and its driver offers no way to", device,
            )  # fmt: skip
    return order


def _readable(device: int) -> bool:
    try:
        return _order_of(device).readable
    except CudaError:
        return False


def flush(devices: Iterable[int]) -> None:
    """What RDMA devices have written into these GPUs' memory is there for all GPUs at the return. Raises CudaError."""
    failed: CudaError | None = None
    for device in devices:
        try:
            order = _order_of(device)
            if order.flush:
                order.driver.push(device)
                try:
                    order.driver.flush_writes()
                finally:
                    order.driver.pop()
        except CudaError as exc:
            failed = failed or exc
    if failed is not None:
        raise failed


# -- the end ----------------------------------------------------------------------------------------------


def shutdown() -> None:
    """Forget what was said and found out: at a test's end."""
    _said.clear()
    _orders.clear()


def _after_fork_in_child() -> None:
    global _said_lock
    _said_lock = threading.Lock()
    for fd in list(_exported):
        with contextlib.suppress(OSError):
            os.close(fd)
    _exported.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
