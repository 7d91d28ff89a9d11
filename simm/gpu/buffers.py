"""GPU memory as a value or a buffer: :class:`DeviceSpan`, made of what callers pass.

``gpu/copy.py`` says how it is copied and which of the caller's work a copy comes after; ``gpu/direct.py`` how RDMA
devices reach it. The CPU must never touch the address of such memory, as that is a segmentation fault. So a
:class:`DeviceSpan` is no buffer to Python and has no view. The driver is asked about an address once, when the span is
made.
"""

from __future__ import annotations

from typing import Any

from ..errors import DeviceError, UsageError
from ..host.buffers import DeviceBuffer, HostMapping
from . import copy, cuda, direct
from .pinning import Pinned, pinned_for


class DeviceSpan(DeviceBuffer):
    """A piece of GPU memory by address. ``device`` is its CUDA ordinal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"DeviceSpan({self.address:#x}, {self.size}, device={self.device})"

    def part(self, offset: int, size: int) -> DeviceSpan:
        """Return ``size`` bytes of it from ``offset`` on, with its registration. Raises UsageError outside of it."""
        if type(offset) is not int or type(size) is not int or not 0 <= offset < offset + size <= self.size:
            raise UsageError(f"a span of {self.size} bytes has no part of {size!r} bytes at {offset!r}")
        return self.piece(self.address + offset, size)

    def piece(self, address: int, size: int, *, writable: bool = True) -> DeviceSpan:
        """See :meth:`DeviceBuffer.piece`."""
        made = DeviceSpan(
            address, size, device=self.device, stream=self.stream, writable=writable and self.writable, keep=self.keep
        )
        if self.registration is not None and self.registration.holds(address, size):
            made.registration = self.registration
        return made

    def register(self) -> None:
        """See :meth:`DeviceBuffer.register`."""
        self.registration = direct.DeviceRegistration(self)

    # The methods of DeviceBuffer that other modules implement.
    host_view = copy.host_copy
    copy_from = copy.copy_in
    copy_to_device = staticmethod(copy.to_device)
    copy_to_host = staticmethod(copy.to_host)
    read_remote = staticmethod(direct.read)
    put_by_rdma = staticmethod(direct.put)

    def pinned(self, mapping: HostMapping) -> Pinned:
        """Return the registration of a mapping with the driver, begun with this call if there is none."""
        return pinned_for(mapping, cuda.load(), self.device)


# -- what callers pass --------------------------------------------------------------------------------


def device_span(thing: Any, stream: int | None = None) -> DeviceSpan:
    """Return the memory of a CUDA tensor (torch-like, by ``data_ptr``) or of a ``__cuda_array_interface__``.

    ``stream`` is the handle of the stream that copies come after, instead of the one that the object names.
    Raises UsageError: not contiguous, empty, not a GPU's memory, no driver.
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
    except DeviceError as exc:
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
    """Return (address, bytes, writable) of a ``__cuda_array_interface__``. Raises UsageError."""
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
    """Return the stream that an interface names; 0 for none. Raises UsageError for 0, which the interface forbids."""
    stream = interface.get("stream") if interface is not None else None
    if stream is None:
        return 0
    if type(stream) is not int or stream <= 0:
        raise UsageError(f"stream={stream!r} in a __cuda_array_interface__: it is None, 1, 2 or a stream's handle")
    return stream

