"""Memory as ``simm.kv``'s callers name it: registrations, views, and blocks of our own.

A :class:`BlockView` is an address and a size that the caller vouches for. The shm and TCP paths need no registration;
over RDMA, memory that has one is read and written by the device itself, and other memory through buffers of ours. A
view belongs to the MR it was made with, if it lies within it: nothing is looked up by address. Registered twice or
overlapping does no harm. An MR of a bare address must be deregistered before that memory is freed: devices know it by
its pages, and would go on with the old ones. One of an object keeps the object's memory alive.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import operator
import sys
import time
from typing import Any, Final

import numpy as np

from .buffers import OnDevice, Span, tensor_span
from .errors import UsageError
from .gpu import DeviceSpan, device_span
from .gpudirect import registered

log = logging.getLogger("simm.kv")

#: A caller's mistake is logged at most so often, seconds: it tends to come with every page of a prompt.
_COMPLAIN_S: Final = 10.0


_complained_at = -_COMPLAIN_S


def complain(text: str, *arguments: Any) -> None:
    """Log a caller's mistake, now and then."""
    global _complained_at
    now = time.monotonic()
    if now - _complained_at >= _COMPLAIN_S:
        _complained_at = now
        log.warning(text, *arguments)


def complain_no_more() -> None:
    """The process ends: what its threads still do is not their mistake."""
    global _complained_at
    _complained_at = float("inf")


class MrExt:
    """A registered piece of memory. Opaque to engines; made by :func:`register_mr`."""

    __slots__ = ("__weakref__", "_registered", "_span")

    def __init__(self, span: Span) -> None:
        self._span = registered(span)
        self._registered = True

    def __repr__(self) -> str:
        state = "" if self._registered else ", deregistered"
        return f"<MrExt {self._span.address:#x}, {self._span.size} bytes{state}>"

    def read_only_at(self, address: int, size: int) -> bool:
        """Is this piece within memory that was registered as read-only?"""
        span = self._span
        return not span.writable and address < span.address + span.size and span.address < address + size


def register_mr(tensor: Any, size: int | None = None) -> MrExt | None:
    """Register memory: ``register_mr(tensor)`` or ``register_mr(address, size)``.

    A tensor is anything with ``data_ptr()``, ``numel()`` and ``element_size()``, with the buffer protocol or
    with an array interface; contiguous, in host memory or an NVIDIA GPU's (a CUDA tensor, or an object with
    ``__cuda_array_interface__``; a view of a piece of that needs the MR, as an address does not tell). Its memory
    stays alive as long as the MR or a view made with it. None when that memory cannot be registered: the reason is
    logged. Raises TypeError for anything else.
    """
    try:
        if size is None:
            return MrExt(span_of(tensor))
        return MrExt(Span(_integer(tensor, "an address"), _integer(size, "a size")))
    except UsageError as exc:
        log.error("register_mr: %s", exc)
        return None


def deregister_mr(mr: MrExt) -> bool:
    """Let go of a registration; False if it has been already. Views made with it stay good."""
    if not isinstance(mr, MrExt) or not mr._registered:
        return False
    mr._registered = False
    span = mr._span
    registration, span.registration = span.registration, None
    if registration is not None:
        registration.close()
    span.keep = None
    return True


def _integer(value: Any, what: str) -> int:
    """Python's and numpy's integers as int. Raises TypeError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is an int, not {type(value).__name__}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an int, not {type(value).__name__}") from None


def span_of(thing: Any) -> Span:
    """The memory of a tensor, buffer or array. TypeError if it is none, UsageError if it cannot be used."""
    if isinstance(thing, DeviceSpan):
        return thing.piece(thing.address, thing.size)
    if isinstance(thing, Span):
        return Span(
            thing.address, thing.size, writable=thing.writable, keep=thing.keep, registration=thing.registration
        )
    if isinstance(thing, (int, str)):
        raise TypeError(f"memory is a tensor, a buffer or an array, not {type(thing).__name__}")
    try:
        span = tensor_span(thing)
        if span is not None:
            return span
        if hasattr(thing, "__cuda_array_interface__"):
            return device_span(thing)
        array = np.asarray(thing) if hasattr(thing, "__array_interface__") else np.asarray(memoryview(thing))
    except OnDevice:
        return device_span(thing)
    except UsageError:
        raise
    except (TypeError, ValueError, AttributeError) as exc:
        raise TypeError(f"memory is a tensor, a buffer or an array, not {type(thing).__name__}: {exc}") from None
    if array.dtype.hasobject:
        raise TypeError("an array of Python objects holds no values, only addresses of this process")
    if not array.flags.c_contiguous:
        raise UsageError("the array is not contiguous: pass numpy.ascontiguousarray(...) or a contiguous part")
    if not array.nbytes:
        raise UsageError("the array is empty: there is nothing to register")
    address: int = array.__array_interface__["data"][0]
    return Span(address, array.nbytes, writable=bool(array.flags.writeable), keep=(thing, array))


class BlockView:
    """A piece of memory that ``put`` reads and ``get`` writes: never a byte beyond ``size``."""

    __slots__ = ("_piece", "mr", "size")

    def __init__(self, span: Span | None, size: int, mr: MrExt | None) -> None:
        #: None where address or size name no memory; the operations answer INVALID_ARGUMENT then.
        self._piece = span
        self.size = size
        self.mr = mr

    @classmethod
    def from_tensor(cls, tensor: Any, mr: MrExt | None = None) -> BlockView:
        """A view of a whole tensor, buffer or array, as :func:`register_mr` takes it.

        Raises TypeError for anything else, UsageError where it is not contiguous, empty, or on a device that is neither
        the CPU nor a CUDA one.
        """
        span = span_of(tensor)
        if _mr(mr) is not None and span.registration is None and mr._span.holds(span):  # type: ignore[union-attr]
            span.registration = mr._span.registration  # type: ignore[union-attr]
        return cls(span, span.size, mr)

    @classmethod
    def from_buffer(cls, ptr: int, size: int, mr: MrExt | None = None) -> BlockView:
        """A view of ``size`` bytes at an address. Raises TypeError where those are no ints.

        Numbers that name no memory make a view that every operation refuses, so that one bad page does not
        take a batch with it.
        """
        if type(ptr) is not int:
            ptr = _integer(ptr, "an address")
        if type(size) is not int:
            size = _integer(size, "a size")
        if mr is None:
            keep, writable = None, True
        else:
            keep, writable = _mr(mr)._span.keep, not mr.read_only_at(ptr, size)  # type: ignore[union-attr]
        try:
            if mr is not None and type(mr._span) is DeviceSpan:
                return cls(mr._span.piece(ptr, size, writable=writable), size, mr)
            span = Span(ptr, size, writable=writable, keep=keep)
            if mr is not None and mr._span.holds(span):
                span.registration = mr._span.registration
            return cls(span, size, mr)
        except UsageError as exc:
            complain("from_buffer: %s", exc)
            return cls(None, size, mr)

    def as_ref(self) -> Any:
        """The memory itself as a 1-D uint8 torch tensor; a numpy array where torch is not installed, or where
        the memory is read-only, which torch cannot express; an object with ``__cuda_array_interface__`` for a GPU's
        memory without torch. Raises UsageError if the view names no memory."""
        if self._piece is None:
            raise UsageError(f"this view of {self.size} bytes names no memory")
        return _as_ref(self._piece)

    def view(self) -> BlockView:
        """The view itself."""
        return self

    def __len__(self) -> int:
        return max(0, self.size)

    def __repr__(self) -> str:
        return f"<BlockView of {self.size} bytes at {self._piece.address if self._piece is not None else 0:#x}>"


def _mr(mr: Any) -> MrExt | None:
    if mr is not None and not isinstance(mr, MrExt):
        raise TypeError(f"mr is what register_mr() returned, or None, not {type(mr).__name__}")
    return mr


class Block:
    """Zeroed memory of its own, page-aligned; ``Store.allocate`` makes it. It lives as long as anything made of it.

    Raises TypeError, UsageError for a size below 1, MemoryError.
    """

    __slots__ = ("_span", "size")

    def __init__(self, size: int) -> None:
        size = _integer(size, "a size")
        if size <= 0:
            raise UsageError(f"a block has at least 1 byte, not {size}")
        try:
            # Private: a forked child gets a copy, as with any other memory of the process.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as exc:
            raise MemoryError(f"no memory for a block of {size} bytes: {exc}") from None
        array = np.frombuffer(pages, np.uint8)
        self._span = registered(Span(array.__array_interface__["data"][0], size, keep=array))
        self.size = size

    def as_ref(self) -> Any:
        """The block as a writable 1-D uint8 torch tensor; a numpy array where torch is not installed."""
        return _as_ref(self._span)

    def view(self) -> BlockView:
        """A view of the whole block, which keeps the memory alive."""
        return BlockView(self._span, self.size, None)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<Block of {self.size} bytes>"


class _Aliased:
    """Exports a span by the array interface and keeps its owner as long as numpy or torch refer to it."""

    __slots__ = ("__array_interface__", "_keep")

    def __init__(self, span: Span) -> None:
        self._keep = span.keep
        self.__array_interface__ = {
            "version": 3, "shape": (span.size,), "typestr": "|u1", "data": (span.address, not span.writable),
        }  # fmt: skip


class _DeviceAliased:
    """The same for GPU memory."""

    __slots__ = ("__cuda_array_interface__", "_keep")

    def __init__(self, span: DeviceSpan) -> None:
        self._keep = span.keep
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (span.size,), "typestr": "|u1", "data": (span.address, not span.writable),
            "strides": None, "stream": None,
        }  # fmt: skip


def _as_ref(span: Span) -> Any:
    if isinstance(span, DeviceSpan):
        alias = _DeviceAliased(span)
        torch = _torch()
        return alias if torch is None else torch.as_tensor(alias, device=f"cuda:{span.device}")
    array = np.asarray(_Aliased(span))
    torch = _torch() if span.writable else None
    return array if torch is None else torch.frombuffer(array, dtype=torch.uint8)


_NO_TORCH: Any = object()
_torch_module: Any = None


def _torch() -> Any:
    """torch, imported at the first need (seconds); None where it is not installed."""
    global _torch_module
    if _torch_module is None:
        _torch_module = sys.modules.get("torch")
        if _torch_module is None:
            try:
                _torch_module = importlib.import_module("torch")
            except ImportError:
                _torch_module = _NO_TORCH
    return None if _torch_module is _NO_TORCH else _torch_module
