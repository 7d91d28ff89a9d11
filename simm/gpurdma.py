"""GPU memory over RDMA: what rails reach themselves goes straight, and all else by way of pinned host memory.

:mod:`simm.gpudirect` says which is which. Here is the way that is always there, and what holds the two together:
*staged*, through host memory that is known to both, to the RDMA device as a region and to the CUDA driver as pinned. A
READ brings values there, and one DMA for each takes them on once they are confirmed; a put goes the other way.

A batch may have both kinds, and host memory. Of a put the order is kept, as a key may come twice in it.

What can go wrong
-----------------
* *Staging memory is used again while a transfer still writes it.* It is lent for one exchange, and goes back only if
  all of that came out well; else it is deregistered, which ends what may still come, and dropped.
* *What RDMA leaves over goes by TCP*, where the processor looks at the bytes: a span for a device's operations must not
  come there. So who puts is given a second set of sources for that.

Cost of staging: up to 128 MiB of pinned memory, made at the first need; a copy more, at the bus's speed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from . import cuda, gpu, gpudirect
from .buffers import Span, address_of
from .constants import VALUE_BYTES_MAX
from .errors import TransportError
from .fabric import Rail
from .gpu import DeviceSpan
from .pinned import Pinned
from .registry import Registration

#: Values staged in one exchange, bytes; any one value fits.
GROUP_BYTES: Final = 64 << 20
_LEAST_BYTES: Final = 1 << 20
_IDLE: Final = 2

_Sources = Mapping[int, memoryview | Span]


class Stage:
    """Host memory that RDMA devices and the CUDA driver both know; for one exchange at a time."""

    __slots__ = ("address", "memory", "pinned", "registration", "size")

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        # Shared: of private memory a fork would leave us copies, and devices the pages that the child has.
        self.memory = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.memory)
        self.registration = Registration(self.address, size, keep=self.memory)
        self.pinned = Pinned(cuda.load(), "staging memory", self.memory, self.address, device)
        while self.pinned.register_some():
            pass

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
    sinks: Sequence[Any], results: list[Any], rails: Sequence[Rail],
) -> list[int]:  # fmt: skip
    """Read values for GPU memory, all of whose sinks are DeviceSpans; the positions that are left over.

    ``read_host`` reads into what the rails reach: it is given positions, their sinks, where their results go, and
    returns what it leaves over, nothing of it being under way any more. ``rails``: those in use; none where values must
    be looked at. Raises CudaError.
    """
    left: list[int] = []
    direct = gpudirect.direct(positions, sinks, rails, reading=True)
    if direct:
        left += gpudirect.read(read_host, direct, sinks, results)
        positions = [position for position in positions if position not in direct]

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
        finally:
            _take_back(stage, clean)
    return left


def put(
    put_host: Callable[[Sequence[int], _Sources, _Sources], bool], positions: Sequence[int],
    sources: Sequence[memoryview | Span], rails: Sequence[Rail],
) -> None:  # fmt: skip
    """Put values of which some are in GPU memory, in order. Raises CudaError.

    ``put_host`` puts what the rails reach: it is given positions, their sources, and the sources for whoever must look
    at the bytes. It returns, with nothing of it under way any more, whether the memory may be used again at once.
    ``rails``: those in use; none where values must be looked at.
    """
    direct = gpudirect.direct(positions, sources, rails, reading=False)
    gpudirect.after_work([sources[position] for position in direct])  # type: ignore[misc]

    def staged(position: int) -> bool:
        return type(sources[position]) is DeviceSpan and position not in direct

    def size_of(position: int) -> int:
        return len(sources[position]) if staged(position) else 0

    for part, total in _groups(positions, size_of):
        first = next((each for each in part if staged(each)), None)
        if first is None:
            put_host(
                part, {position: direct.get(position, sources[position]) for position in part},
                {position: sources[position] for position in part},
            )  # fmt: skip
            continue
        stage = _lend(total, sources[first].device)  # type: ignore[union-attr]
        clean = False
        try:
            hosted: dict[int, memoryview | Span] = {}
            spare: dict[int, memoryview | Span] = {}
            copies: list[gpu.Copy] = []
            at = stage.address
            for position in part:
                source = sources[position]
                hosted[position], spare[position] = direct.get(position, source), source
                if type(source) is DeviceSpan and position not in direct:
                    hosted[position] = spare[position] = Span(
                        at, source.size, writable=False, registration=stage.registration
                    )
                    copies.append((source, at, source.size, stage.pinned))
                    at += _room(source.size)
            gpu.to_host(copies)
            clean = put_host(part, hosted, spare)
        finally:
            _take_back(stage, clean)


# -- the end ----------------------------------------------------------------------------------------------


def shutdown() -> None:
    """Free idle staging memory: at a test's end."""
    with _lock:
        stages = list(_idle)
        _idle.clear()
    for stage in stages:
        stage.close()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
