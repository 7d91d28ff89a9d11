"""GPU memory over RDMA: which way its bytes take, and the way that is always there.

There are three, tried in this order, and :func:`way_for` says in one line which it is:

* ``dma-buf``: the CUDA driver exports the memory, and the RDMA device registers that. It needs NVIDIA's open kernel
  modules and a driver of the device that takes it.
* ``nvidia-peermem``: the plain registration of a GPU's address, where that kernel module is loaded.
* ``staged``: host memory that is known to both, to the RDMA device as a region and to the CUDA driver as pinned. A READ
  brings values there, and one DMA for each takes them on once they are confirmed; a put goes the other way.

The first two are looked for and named; values are staged in all cases so far. A device that writes GPU memory itself
has an order of its own with the kernels that read it, which cannot be tested without one, and wrong bytes are not to
be had for speed.

What can go wrong: *staging memory is used again while a transfer still writes it*. It is lent for one exchange, and
goes back only if all of that came out well; else it is deregistered, which ends what may still come, and dropped.

Cost: up to 128 MiB of pinned memory, made at the first need; a copy more than the first two ways, at the bus's speed.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from . import cuda, gpu
from .buffers import Span, address_of
from .constants import PAGE_BYTES, VALUE_BYTES_MAX
from .cuda import DMA_BUF_SUPPORTED, CudaError
from .errors import TransportError
from .fabric import Access, FabricError, Rail
from .gpu import DeviceSpan
from .pinned import Pinned
from .registry import Registration

log = logging.getLogger("simm.gpu")

#: Values staged in one exchange, bytes; any one value fits.
GROUP_BYTES: Final = 64 << 20
_LEAST_BYTES: Final = 1 << 20
_IDLE: Final = 2


class Stage:
    """Host memory that RDMA devices and the CUDA driver both know; for one exchange at a time."""

    __slots__ = ("address", "announced", "memory", "pinned", "registration", "size")

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        # Shared: of private memory a fork would leave us copies, and devices the pages that the child has.
        self.memory = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.memory)
        self.registration = Registration(self.address, size, keep=self.memory)
        self.pinned = Pinned(cuda.load(), "staging memory", self.memory, self.address, device)
        while self.pinned.register_some():
            pass
        self.announced = False

    def announce(self, span: DeviceSpan) -> None:
        """Have the log say which way such memory takes to the rails that are used."""
        if not self.announced:
            self.announced = True
            for rail in self.registration.rails():
                way_for(rail, span)

    def close(self) -> None:
        """Deregister it everywhere; the memory goes when nobody refers to it."""
        with contextlib.suppress(TransportError):
            self.registration.close()
        self.pinned.close()


_idle: list[Stage] = []
_lock = threading.Lock()


def _lend(size: int, device: int) -> Stage:
    with _lock:
        fitting = [stage for stage in _idle if stage.size >= size]
        if fitting:
            stage = min(fitting, key=lambda each: each.size)
            _idle.remove(stage)
            return stage
    return Stage(max(_LEAST_BYTES, 1 << (size - 1).bit_length()), device)


def _take_back(stage: Stage, clean: bool) -> None:
    dropped: Stage | None = stage
    if clean:
        with _lock:
            _idle.append(stage)
            # The largest stay: they fit everything.
            _idle.sort(key=lambda each: -each.size)
            dropped = _idle.pop() if len(_idle) > _IDLE else None
    if dropped is not None:
        dropped.close()


def _groups(positions: Sequence[int], size_of: Callable[[int], int]) -> Iterator[tuple[list[int], int]]:
    """Positions in runs of at most GROUP_BYTES, with the bytes that they take in a stage."""
    run: list[int] = []
    total = 0
    for position in positions:
        size = _room(size_of(position))
        if run and total + size > GROUP_BYTES:
            yield run, total
            run, total = [], 0
        run.append(position)
        total += size
    if run:
        yield run, total


def _room(size: int) -> int:
    return (size + 63) & -64


def read(
    read_host: Callable[[Sequence[int], Mapping[int, Span], dict[int, Any]], list[int]], positions: Sequence[int],
    sinks: Sequence[Any], results: list[Any],
) -> list[int]:  # fmt: skip
    """Read values for GPU memory, all of whose sinks are DeviceSpans; the positions that are left over.

    ``read_host`` reads into host memory: it is given positions, their sinks, where their results go, and returns what
    it leaves over, nothing of it being under way any more. Raises CudaError.
    """
    left: list[int] = []

    def most(position: int) -> int:
        return min(len(sinks[position]), VALUE_BYTES_MAX)

    for part, total in _groups(positions, most):
        stage = _lend(total, sinks[part[0]].device)
        clean = False
        try:
            spans: dict[int, Span] = {}
            at = stage.address
            for position in part:
                spans[position] = Span(at, most(position), registration=stage.registration)
                at += _room(most(position))
            got: dict[int, Any] = {}
            missed = read_host(part, spans, got)
            gpu.to_device(
                (sinks[position], spans[position].address, length, stage.pinned)
                for position, length in got.items() if length > 0
            )  # fmt: skip
            for position, result in got.items():
                results[position] = result
            left += missed
            clean = not missed
            stage.announce(sinks[part[0]])
        finally:
            _take_back(stage, clean)
    return left


def put(
    put_host: Callable[[Sequence[int], Mapping[int, memoryview | Span]], bool], positions: Sequence[int],
    sources: Sequence[memoryview | Span],
) -> None:  # fmt: skip
    """Put values of which some are in GPU memory, in order. Raises CudaError.

    ``put_host`` puts from host memory: it is given positions and their sources. It returns, with nothing of it under
    way any more, whether the memory may be used again at once.
    """

    def size_of(position: int) -> int:
        source = sources[position]
        return len(source) if type(source) is DeviceSpan else 0

    for part, total in _groups(positions, size_of):
        first = next((each for each in part if type(sources[each]) is DeviceSpan), None)
        if first is None:
            put_host(part, {position: sources[position] for position in part})
            continue
        stage = _lend(total, sources[first].device)  # type: ignore[union-attr]
        clean = False
        try:
            hosted: dict[int, memoryview | Span] = {}
            copies: list[gpu.Copy] = []
            at = stage.address
            for position in part:
                source = sources[position]
                hosted[position] = source
                if type(source) is DeviceSpan:
                    hosted[position] = Span(at, source.size, writable=False, registration=stage.registration)
                    copies.append((source, at, source.size, stage.pinned))
                    at += _room(source.size)
            gpu.to_host(copies)
            clean = put_host(part, hosted)
            stage.announce(copies[0][0])
        finally:
            _take_back(stage, clean)


# -- the other ways -------------------------------------------------------------------------------------


class Way:
    """Which way a GPU's memory can take to a rail, and why not a better one."""

    __slots__ = ("name", "why")

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why

    def __repr__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


_ways: dict[tuple[int, str], Way] = {}


def way_for(rail: Rail, span: DeviceSpan) -> Way:
    """Find out, by registering this very memory and letting go of it again, which way there is; logged once for each
    GPU and rail."""
    known = _ways.get((span.device, rail.name))
    if known is not None:
        return known
    why = []
    name = "staged"
    for candidate, attempt in (("dma-buf", _by_dma_buf), ("nvidia-peermem", _by_peermem)):
        try:
            attempt(rail, span)
        except (CudaError, FabricError) as exc:
            why.append(f"no {candidate}: {exc}")
        else:
            name = candidate
            break
    way = _ways[span.device, rail.name] = Way(name, "; ".join(why))
    note = "" if name == "staged" else ", which the device could take; values are staged through pinned memory so far"
    log.info("GPU %d over %s: %r%s", span.device, rail.name, way, note)
    return way


def _by_dma_buf(rail: Rail, span: DeviceSpan) -> None:
    register = getattr(rail, "register_dmabuf", None)
    if register is None:
        raise FabricError("not asked for, as the verbs here have no call for it")
    driver = cuda.load()
    if not driver.attribute(span.device, DMA_BUF_SUPPORTED):
        raise CudaError("the GPU's driver exports none (it does with NVIDIA's open kernel modules)")
    start = span.address & -PAGE_BYTES
    size = -(-(span.address + span.size - start) // PAGE_BYTES) * PAGE_BYTES
    driver.push(span.device)
    try:
        fd = driver.dma_buf(start, size)
    finally:
        driver.pop()
    try:
        register(span.address - start, span.size, span.address, fd, Access.LOCAL_WRITE).close()
    finally:
        os.close(fd)


def _by_peermem(rail: Rail, span: DeviceSpan) -> None:
    rail.register(span.address, span.size, Access.LOCAL_WRITE).close()


# -- the end ----------------------------------------------------------------------------------------------


def shutdown() -> None:
    """Free idle staging memory: at a test's end."""
    with _lock:
        stages = list(_idle)
        _idle.clear()
    for stage in stages:
        stage.close()
    _ways.clear()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
