"""Memory as ``simm.kv``'s callers name it: registrations, views, and blocks.

A :class:`BlockView` is an address and a size that the caller vouches for. A view belongs to the MR it was made with if
it lies within it; nothing is looked up by address. Registrations may overlap. An MR of a bare address must be
deregistered before that memory is freed (``rdma/registration.py``). An MR of an object keeps the object's memory alive.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import mmap
import operator
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from ...constants import LARGE_BYTES_MAX, VALUE_BYTES_MAX
from ...errors import UsageError
from ...host.buffers import DeviceBuffer, OnDevice, Pieces, Ranges, Span, tensor_span
from ...host.parts import on_device
from ...rdma.registration import registered
from ..batch import LargeValue, device_buffer
from .parts import OVERLAP_TEXT, is_wide, overlapping, pieces_of, prepared, ranges_of

log = logging.getLogger("simm.kv")

#: A caller's mistake is logged at most this often, seconds: it tends to recur with every page of a prompt.
_COMPLAIN_S: Final = 10.0


#: What differs between two mistakes of one kind: keys and other quoted text, addresses, and numbers.
_VARYING: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|0x[0-9a-f]+|\d+")
#: Kinds of mistakes that are remembered at most.
_KINDS_MAX: Final = 256
#: When each kind was logged last, so that none keeps another one out of the log.
_complained_at: dict[str, float] = {}
_ending = False


def complain(text: str, *arguments: Any) -> None:
    """Log a caller's mistake, at most every ``_COMPLAIN_S`` for each kind, and that of ``_KINDS_MAX`` kinds."""
    if _ending:
        return
    now = time.monotonic()
    kind = _VARYING.sub("", text % arguments)
    if kind not in _complained_at and len(_complained_at) >= _KINDS_MAX:
        for other, at in list(_complained_at.items()):
            if now - at >= _COMPLAIN_S:
                _complained_at.pop(other, None)
        if len(_complained_at) >= _KINDS_MAX:
            return
    if now - _complained_at.get(kind, -math.inf) >= _COMPLAIN_S:
        _complained_at[kind] = now
        log.warning(text, *arguments)


def complain_no_more() -> None:
    """Stop logging mistakes: the process ends, and its threads may still use a closed store."""
    global _ending
    _ending = True


class MrExt:
    """Registered memory, made by :func:`register_mr`. Opaque to engines."""

    __slots__ = ("__weakref__", "_registered", "_span")

    def __init__(self, span: Span) -> None:
        self._span = registered(span)
        self._registered = True

    def __repr__(self) -> str:
        state = "" if self._registered else ", deregistered"
        return f"<MrExt {self._span.address:#x}, {self._span.size} bytes{state}>"

    def read_only_at(self, address: int, size: int) -> bool:
        """Return whether this range overlaps memory that was registered as read-only."""
        span = self._span
        return not span.writable and address < span.address + span.size and span.address < address + size


def register_mr(tensor: Any, size: int | None = None) -> MrExt | None:
    """Register memory: ``register_mr(tensor)`` or ``register_mr(address, size)``.

    A tensor is anything with ``data_ptr()``, ``numel()`` and ``element_size()``, with the buffer protocol or
    with an array interface; contiguous, in host memory or an NVIDIA GPU's (a CUDA tensor, or an object with
    ``__cuda_array_interface__``; a view of a piece of that needs the MR, as an address does not tell). Its memory
    stays alive as long as the MR or a view made with it. Returns None if that memory cannot be registered, and logs the
    reason. Raises TypeError for anything else.
    """
    try:
        if size is None:
            return MrExt(span_of(tensor))
        return MrExt(Span(_integer(tensor, "an address"), _integer(size, "a size")))
    except UsageError as exc:
        log.error("register_mr: %s", exc)
        return None


def deregister_mr(mr: MrExt) -> bool:
    """Close a registration; return False if it was closed already. Views made with it stay valid."""
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
    """Return a Python or numpy integer as int. Raises TypeError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is an int, not {type(value).__name__}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an int, not {type(value).__name__}") from None


def span_of(thing: Any) -> Span:
    """Return the memory of a tensor, buffer or array. Raises TypeError for anything else, UsageError if unusable."""
    if isinstance(thing, Span) and not isinstance(thing, Ranges | Pieces):
        if isinstance(thing, DeviceBuffer):
            return thing.piece(thing.address, thing.size)
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
            return device_buffer(thing)
        array = np.asarray(thing) if hasattr(thing, "__array_interface__") else np.asarray(memoryview(thing))
    except OnDevice:
        return device_buffer(thing)
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
    """A piece of memory that ``put`` reads and ``get`` writes: never a byte beyond ``size``.

    A view made with an MR takes values of exactly its size. Engines register pools whose pages have one size, so any
    other value under the page's key belongs to another model, layout or TP width. Other views, a block's included, may
    be larger than the value, which then fills their head.
    """

    __slots__ = ("_piece", "mr", "size")

    def __init__(self, span: Span | None, size: int, mr: MrExt | None) -> None:
        #: None if address or size name no memory; operations then return INVALID_ARGUMENT.
        self._piece = span
        if mr is not None and span is not None:
            span.least = size  # the span is this view's own
        self.size = size
        self.mr = mr

    @classmethod
    def from_tensor(cls, tensor: Any, mr: MrExt | None = None) -> BlockView:
        """Return a view of a whole tensor, buffer or array, as :func:`register_mr` takes it.

        Raises TypeError for anything else, UsageError if it is not contiguous, empty, or on a device that is neither
        the CPU nor a CUDA one.
        """
        span = span_of(tensor)
        if _mr(mr) is not None and span.registration is None and mr._span.holds(span):  # type: ignore[union-attr]
            span.registration = mr._span.registration  # type: ignore[union-attr]
        return cls(span, span.size, mr)

    @classmethod
    def from_buffer(cls, ptr: int, size: int, mr: MrExt | None = None) -> BlockView:
        """Return a view of ``size`` bytes at an address. Raises TypeError unless both are ints.

        Numbers that name no memory make a view that every operation refuses, so that one bad page does not fail a
        whole batch.
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
            if mr is not None and on_device(mr._span):
                return cls(mr._span.piece(ptr, size, writable=writable), size, mr)
            span = Span(ptr, size, writable=writable, keep=keep)
            if mr is not None and mr._span.holds(span):
                span.registration = mr._span.registration
            return cls(span, size, mr)
        except UsageError as exc:
            complain("from_buffer: %s", exc)
            return cls(None, size, mr)

    def as_ref(self) -> Any:
        """Return the memory itself as a 1-D uint8 torch tensor.

        A numpy array if torch is not installed, or if the memory is read-only, which torch cannot express. An object
        with ``__cuda_array_interface__`` for GPU memory without torch. Raises UsageError if the view names no memory.
        """
        if self._piece is None:
            raise UsageError(f"this view of {self.size} bytes names no memory")
        return _as_ref(self._piece)

    def view(self) -> BlockView:
        """Return the view itself."""
        return self

    def __len__(self) -> int:
        return max(0, self.size)

    def __repr__(self) -> str:
        return f"<BlockView of {self.size} bytes at {self._piece.address if self._piece is not None else 0:#x}>"


class PartedViews:
    """Views that are parts of one value, or why they cannot be. As a view, to what checks a batch of views.

    ``Store.prepare_ranges`` returns one, with its ranges apart: no call may take them for a view's memory.
    """

    __slots__ = ("_piece", "_prepared", "problem")

    #: What ``prepared`` has made of ranges; None if they are a mistake. Others have none.
    _prepared: Ranges | None

    def __init__(self, make: Callable[[Any], Span], parts: Any, wide: bool = True) -> None:
        self._piece: Span | None = None
        self.problem = ""
        try:
            self._piece = make(parts)
        except LargeValue as exc:
            if wide:
                self._piece = exc.memory
            else:
                self.problem = str(exc)
        except UsageError as exc:
            self.problem = str(exc)

    @classmethod
    def to_get(cls, ranges: Sequence[Any], *, wide: bool = False) -> list[PartedViews]:
        """Return what each key's ranges, (offset, length, view) each, are read into. No two may share memory.

        ``wide``: also those that only a value in parts can have.
        """
        made = [cls(_ranges_of_views if type(each) is not cls else each._again, each, wide) for each in ranges]
        good = [each for each in made if each._piece is not None]
        for position in overlapping([each._piece for each in good]):  # type: ignore[misc]
            good[position]._piece, good[position].problem = None, OVERLAP_TEXT
        return made

    def _again(self, _: Any) -> Ranges:
        """Return prepared ranges for one call. Raises UsageError, LargeValue."""
        if self._prepared is None:
            raise UsageError(self.problem)
        return ranges_of(self._prepared)

    @classmethod
    def prepared(cls, ranges: Any) -> PartedViews:
        """Return ranges, (offset, length, view) each, as ``get_ranges`` and ``mget_ranges`` take them for any key.

        They are checked once, here. A call that reads ranges with a mistake logs it, and returns INVALID_ARGUMENT.
        """
        made = cls(lambda views: prepared(_ranges_of_views(views)), ranges)
        made._prepared, made._piece = cast("Ranges | None", made._piece), None
        return made

    @classmethod
    def to_put(cls, pieces: Sequence[Any]) -> list[PartedViews]:
        """Return the values that each key's views make up."""
        return [cls(_pieces_of_views, each) for each in pieces]


#: Ranges of a value: (offset, length, view) each; or an array of offsets, the length of each or an array of them, and
#: one view that they go to one after the other; or what ``Store.prepare_ranges`` returned.
ViewRanges = Sequence[tuple[int, int, BlockView]] | tuple[NDArray[Any], Any, BlockView] | PartedViews


def _ranges_of_views(ranges: Any) -> Ranges:
    if type(ranges) is tuple and len(ranges) == 3 and isinstance(ranges[0], np.ndarray):
        return ranges_of((ranges[0], ranges[1], _piece_of(ranges[2])))
    try:
        parts = [(offset, length, _piece_of(view)) for offset, length, view in ranges]
    except (TypeError, ValueError) as exc:
        raise exc if isinstance(exc, UsageError) else UsageError("a range is (offset, length, view)") from None
    return ranges_of(parts)


def _pieces_of_views(views: Any) -> Pieces:
    if isinstance(views, BlockView):
        raise UsageError("the views of a value are a list, not one view")
    try:
        parts = [_piece_of(view) for view in views]
    except TypeError:
        raise UsageError(f"the views of a value are a list, not {type(views).__name__}") from None
    return pieces_of(parts)


def _piece_of(view: Any) -> Span:
    """Return a view's memory. Raises UsageError."""
    if not isinstance(view, BlockView):
        raise UsageError(f"memory is a BlockView, not {type(view).__name__}")
    if view._piece is None:
        raise UsageError(f"{view!r} names no memory")
    return view._piece


def _mr(mr: Any) -> MrExt | None:
    if mr is not None and not isinstance(mr, MrExt):
        raise TypeError(f"mr is what register_mr() returned, or None, not {type(mr).__name__}")
    return mr


class Block:
    """Zeroed, page-aligned memory, made by ``Store.allocate``. It lives as long as anything made of it.

    Raises TypeError, UsageError for a size below 1, MemoryError.
    """

    __slots__ = ("_span", "size")

    def __init__(self, size: int) -> None:
        size = _integer(size, "a size")
        if size <= 0:
            raise UsageError(f"a block has at least 1 byte, not {size}")
        try:
            # Private: a forked child gets a copy, as of any other memory of the process.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as exc:
            raise MemoryError(f"no memory for a block of {size} bytes: {exc}") from None
        array = np.frombuffer(pages, np.uint8)
        self._span = registered(Span(array.__array_interface__["data"][0], size, keep=array))
        self.size = size

    def as_ref(self) -> Any:
        """Return the block as a writable 1-D uint8 torch tensor; a numpy array if torch is not installed."""
        return _as_ref(self._span)

    def view(self) -> BlockView:
        """Return a view of the whole block, which keeps the memory alive."""
        return BlockView(self._span, self.size, None)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<Block of {self.size} bytes>"


def _as_ref(span: Span) -> Any:
    """Export a span by the array interface of its memory, keeping its owner while numpy or torch refer to it."""
    interface = {
        "version": 3, "shape": (span.size,), "typestr": "|u1", "data": (span.address, not span.writable),
    }  # fmt: skip
    if on_device(span):
        alias = SimpleNamespace(
            __cuda_array_interface__={**interface, "strides": None, "stream": None}, keep=span.keep
        )
        torch = _torch()
        return alias if torch is None else torch.as_tensor(alias, device=f"cuda:{span.device}")
    array = np.asarray(SimpleNamespace(__array_interface__=interface, keep=span.keep))
    torch = _torch() if span.writable else None
    return array if torch is None else torch.frombuffer(array, dtype=torch.uint8)


@functools.cache
def _torch() -> Any:
    """Return torch, imported at the first need (seconds), or None if it is not installed."""
    if "torch" in sys.modules:
        return sys.modules["torch"]
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


class Mixed(list[Any]):
    """Memory of a batch that was checked key by key: some of it may be for a value in parts."""


def no_wide(spans: Sequence[Span]) -> bool:
    """Return whether all are ranges that any value may have."""
    return all(spans) and not any(map(is_wide, spans))


def all_sources(spans: Sequence[Span]) -> bool:
    """Return whether all can be put as they are. Raises AttributeError for a None."""
    return max([span.size for span in spans], default=0) <= VALUE_BYTES_MAX


def all_sinks(spans: Sequence[Span]) -> bool:
    """Return whether all can be written. Raises AttributeError for a None."""
    return all([span.writable for span in spans])  # noqa: C419 -- a generator costs three times as much


def no_source(block: Any) -> str:
    """Return why a view cannot be put, or an empty string."""
    if not isinstance(block, BlockView):
        return f"put takes a BlockView, not {type(block).__name__}"
    if block._piece is None or block.size > LARGE_BYTES_MAX:
        return f"a value has 1 to {LARGE_BYTES_MAX} bytes and an address, unlike {block!r}"
    return ""


def no_sink(block: Any) -> str:
    """Return why no value can be copied into a view, or an empty string."""
    if not isinstance(block, BlockView):
        return f"get takes a BlockView, not {type(block).__name__}"
    if block._piece is None:
        return f"{block!r} names no memory"
    return "" if block._piece.writable else f"{block!r} is read-only memory"


def problem_of(parts: Any) -> str:
    """Return why these parts cannot be read or put, or an empty string."""
    return parts.problem  # type: ignore[no-any-return]
