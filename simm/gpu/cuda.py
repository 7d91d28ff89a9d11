"""The CUDA driver's C interface by ctypes, as far as copies between host and GPU memory need it.

It is loaded when a caller first passes GPU memory: other clients never open ``libcuda.so.1``, and SiMM needs neither a
toolkit nor torch. SiMM shares the engine's *primary contexts* (one for each GPU, the runtime's and torch's own), so
pointers of both are valid for both. A context is retained once and kept until the process ends.

* Several functions exist twice. The one without ``_v2`` takes 32-bit sizes; ctypes must name the other.
* The current context belongs to a thread and to the code that set it. :meth:`Driver.within` restores it. That sets
  the one that there was, and pops nothing, so where an interruption leaves open whether it is done, it is done again.
  It is no context manager: an interruption as the ``__exit__`` of one begins would leave nobody to do it.
* Errors are sticky: after a kernel of the engine's has failed, every call fails, by one exception (:class:`CudaError`).
* The driver does not survive a fork. :func:`load`, and each call of a child's :class:`Driver`, refuse there.
* ``ctypes.CDLL`` releases the GIL for each call, so those that wait do not stop the engine.

Constants are those of ``cuda.h``; each has its name there next to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from ..errors import DeviceError
from ..host import fork

log = logging.getLogger("simm.client")

LIBRARY: Final = "libcuda.so.1"

#: CUmemorytype
MEMORY_DEVICE: Final = 2
MEMORY_UNIFIED: Final = 4

#: CUdevice_attribute (docs.nvidia.com/cuda/cuda-driver-api, group CUDA__TYPES).
READ_ONLY_HOST_REGISTER_SUPPORTED: Final = 113
#: By nvidia_p2p_get_pages, which is what nvidia-peermem calls; dma-buf has an attribute of its own.
GPU_DIRECT_RDMA_SUPPORTED: Final = 116
#: A mask of CUflushGPUDirectRDMAWritesOptions.
GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: Final = 117
#: A CUGPUDirectRDMAWritesOrdering: who sees, without a flush, what other devices wrote.
GPU_DIRECT_RDMA_WRITES_ORDERING: Final = 118
DMA_BUF_SUPPORTED: Final = 124

#: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: cuFlushGPUDirectRDMAWrites works on that device.
FLUSH_BY_HOST: Final = 1
#: CUflushGPUDirectRDMAWritesScope, comparable with CUGPUDirectRDMAWritesOrdering (none 0, the owner 100): all GPUs.
ALL_DEVICES: Final = 200
_CURRENT_CONTEXT: Final = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX

#: CUstream values that are no handles: CU_STREAM_LEGACY, CU_STREAM_PER_THREAD.
STREAM_LEGACY: Final = 1
STREAM_PER_THREAD: Final = 2

#: CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts; CU_MEMHOSTREGISTER_READ_ONLY: the device does not write it.
REGISTER_PORTABLE: Final = 1
REGISTER_READ_ONLY: Final = 8

_POINTER_MEMORY_TYPE: Final = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_POINTER_SYNC_MEMOPS: Final = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_POINTER_IS_MANAGED: Final = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED
_POINTER_DEVICE_ORDINAL: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_EVENT_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
_DMA_BUF_FD: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

_SOURCE_IN_STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

_INVALID_VALUE: Final = 1  # CUDA_ERROR_INVALID_VALUE
_NOT_SUPPORTED: Final = 801  # CUDA_ERROR_NOT_SUPPORTED

_int_p: Final = ctypes.POINTER(ctypes.c_int)
_text_p: Final = ctypes.POINTER(ctypes.c_char_p)
_handle_p: Final = ctypes.POINTER(ctypes.c_void_p)
_address: Final = ctypes.c_uint64  # CUdeviceptr
_size: Final = ctypes.c_size_t
_handle: Final = ctypes.c_void_p
_flags: Final = ctypes.c_uint
_int: Final = ctypes.c_int


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", _int), ("id", _int))


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory, which all zeros leave out."""

    _fields_ = (("source_order", _int), ("source_hint", _Location), ("target_hint", _Location), ("flags", _flags))


_addresses_p: Final = ctypes.POINTER(_address)
_sizes_p: Final = ctypes.POINTER(_size)

#: Name here -> (symbol, parameter types). All return a CUresult.
FUNCTIONS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "init": ("cuInit", (_flags,)),
    "error_name": ("cuGetErrorName", (_int, _text_p)),
    "error_text": ("cuGetErrorString", (_int, _text_p)),
    "device_count": ("cuDeviceGetCount", (_int_p,)),
    "device_get": ("cuDeviceGet", (_int_p, _int)),
    "device_name": ("cuDeviceGetName", (ctypes.c_char_p, _int, _int)),
    "device_attribute": ("cuDeviceGetAttribute", (_int_p, _int, _int)),
    "retain": ("cuDevicePrimaryCtxRetain", (_handle_p, _int)),
    "release": ("cuDevicePrimaryCtxRelease_v2", (_int,)),
    "context_get": ("cuCtxGetCurrent", (_handle_p,)),
    "context_set": ("cuCtxSetCurrent", (_handle,)),
    "push": ("cuCtxPushCurrent_v2", (_handle,)),
    "pop": ("cuCtxPopCurrent_v2", (_handle_p,)),
    "context_synchronize": ("cuCtxSynchronize", ()),
    "pointer_attribute": ("cuPointerGetAttribute", (ctypes.c_void_p, _int, _address)),
    "set_pointer_attribute": ("cuPointerSetAttribute", (ctypes.c_void_p, _int, _address)),
    "host_register": ("cuMemHostRegister_v2", (ctypes.c_void_p, _size, _flags)),
    "host_unregister": ("cuMemHostUnregister", (ctypes.c_void_p,)),
    "allocate": ("cuMemAlloc_v2", (ctypes.POINTER(_address), _size)),
    "free": ("cuMemFree_v2", (_address,)),
    "to_device": ("cuMemcpyHtoDAsync_v2", (_address, ctypes.c_void_p, _size, _handle)),
    "to_host": ("cuMemcpyDtoHAsync_v2", (ctypes.c_void_p, _address, _size, _handle)),
    "copy_batch": (
        "cuMemcpyBatchAsync_v2",
        (_addresses_p, _addresses_p, _sizes_p, _size, ctypes.POINTER(CopyAttributes), _sizes_p, _size, _handle),
    ),
    "stream_create": ("cuStreamCreate", (_handle_p, _flags)),
    "stream_destroy": ("cuStreamDestroy_v2", (_handle,)),
    "stream_synchronize": ("cuStreamSynchronize", (_handle,)),
    "stream_wait": ("cuStreamWaitEvent", (_handle, _handle, _flags)),
    "event_create": ("cuEventCreate", (_handle_p, _flags)),
    "event_destroy": ("cuEventDestroy_v2", (_handle,)),
    "event_record": ("cuEventRecord", (_handle, _handle)),
    "event_synchronize": ("cuEventSynchronize", (_handle,)),
    "flush_writes": ("cuFlushGPUDirectRDMAWrites", (_int, _int)),
    "range_handle": ("cuMemGetHandleForAddressRange", (ctypes.c_void_p, _address, _size, _int, ctypes.c_ulonglong)),
}
#: Since CUDA 11.3, 11.7 and 13.0. Methods that use them raise CudaError if they are missing.
_OPTIONAL: Final = {"flush_writes", "range_handle", "copy_batch"}


#: Codes of a call about host memory that is registered already, or is not.
ALREADY_REGISTERED: Final = 712
NOT_REGISTERED: Final = 713


class CudaError(DeviceError):
    """A call of the driver failed, or there is none. ``code`` is its CUresult, 0 where there was none."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Driver:
    """The driver, initialised. Raises CudaError. Any thread may call it.

    Args:
        library: has the functions of :data:`FUNCTIONS`: a ``ctypes.CDLL``, or a fake for tests.

    Sizes and addresses are in bytes. Handles (streams, events, contexts) are ints.
    """

    def __init__(self, library: Any) -> None:
        #: Set in the child after a fork: nothing may be called any more.
        self.forked = False
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        self._calls: dict[str, Callable[..., int]] = {}
        for name, (symbol, parameters) in FUNCTIONS.items():
            try:
                function = getattr(library, symbol)
            except AttributeError:
                if name in _OPTIONAL:
                    continue
                raise CudaError(f"{LIBRARY} has no {symbol}: it is older than CUDA 11.0, or not NVIDIA's") from None
            if isinstance(library, ctypes.CDLL):
                function.argtypes = parameters
                function.restype = ctypes.c_int
            self._calls[name] = function
        self._library = library
        # Bound once: a copy costs one attribute less.
        self._to_device = self._calls["to_device"]
        self._to_host = self._calls["to_host"]
        self._copy_batch = self._calls.get("copy_batch")
        #: Whether this driver has :meth:`copy_batch`.
        self.batches = self._copy_batch is not None
        self._attributes = CopyAttributes(source_order=_SOURCE_IN_STREAM_ORDER)
        self._stream_synchronize = self._calls["stream_synchronize"]
        self._call("init", 0)
        count = ctypes.c_int()
        self._call("device_count", ctypes.byref(count))
        self.devices = count.value

    def __repr__(self) -> str:
        return f"<CUDA driver, {self.devices} devices>"

    # -- calls --------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> None:
        self._own()
        code = self._calls[name](*arguments)
        if code:
            raise self._error(name, code)

    def _own(self) -> None:
        if self.forked:
            raise CudaError("the CUDA driver does not survive a fork: use spawn, or touch GPU memory in one process")

    def _error(self, name: str, code: int) -> CudaError:
        texts = []
        for what in ("error_name", "error_text"):
            text = ctypes.c_char_p()
            known = self._calls[what](code, ctypes.byref(text)) == 0 and text.value
            texts.append(text.value.decode("utf-8", "replace") if known and text.value else "")
        return CudaError(f"{FUNCTIONS[name][0]}: {texts[0] or code}{texts[1] and f' ({texts[1]})'}", code)

    # -- devices and contexts -------------------------------------------------------------------------

    def device_name(self, device: int) -> str:
        """Return the name, as ``nvidia-smi`` shows it."""
        text = ctypes.create_string_buffer(256)
        self._call("device_name", text, len(text), self._device(device))
        return text.value.decode("utf-8", "replace")

    def attribute(self, device: int, attribute: int) -> int:
        """Return a device attribute; 0 if this driver does not know it."""
        value = ctypes.c_int()
        try:
            self._call("device_attribute", ctypes.byref(value), attribute, self._device(device))
        except CudaError as exc:
            if exc.code in (_INVALID_VALUE, _NOT_SUPPORTED):
                return 0
            raise
        return value.value

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("device_get", ctypes.byref(device), ordinal)
        return device.value

    def primary(self, device: int) -> int:
        """Return the device's primary context."""
        context = self._contexts.get(device)
        return context if context is not None else self._retain(device)

    def context(self) -> int:
        """Return this thread's current context, 0 for none."""
        handle = ctypes.c_void_p()
        self._call("context_get", ctypes.byref(handle))
        return handle.value or 0

    def set_context(self, context: int) -> None:
        """Make a context this thread's current one in the place of that which is, or none with 0. Twice is harmless."""
        self._call("context_set", context)

    def restore(self, context: int) -> None:
        """Make ``context`` this thread's current one again, or none if it cannot be. Twice is harmless.

        Raises no CudaError, as what was done in between is done. A context that cannot be set was destroyed: the thread
        could not use it either.
        """
        try:
            self.set_context(context)
        except CudaError as exc:
            log.warning("a thread's CUDA context cannot be set again, so it has none now: %s", exc)
            with contextlib.suppress(CudaError):
                self.set_context(0)

    def push(self, device: int) -> None:
        """Make the device's primary context this thread's current one, and :meth:`pop` it: for benchmarks and tests."""
        self._call("push", self.primary(device))

    def pop(self) -> None:
        """Give the thread back the context that it had."""
        self._call("pop", ctypes.byref(ctypes.c_void_p()))

    def within(self, device: int, work: Callable[[], object]) -> None:
        """Do ``work`` with the device's primary context as this thread's current one. Raises CudaError."""
        before, primary = self.context(), self.primary(device)
        if primary == before:
            work()
            return
        try:
            self.set_context(primary)
            work()
        finally:
            try:
                self.restore(before)
            except BaseException:
                self.restore(before)  # an interruption may have come before the call
                raise

    def _retain(self, device: int) -> int:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                handle = ctypes.c_void_p()
                self._call("retain", ctypes.byref(handle), self._device(device))
                context = self._contexts[device] = handle.value or 0
            return context

    def close(self) -> None:
        """Release the contexts: for tests and tools. Nothing made here may be in use. Twice is harmless."""
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for device in contexts:
            self._call("release", self._device(device))

    # -- memory -----------------------------------------------------------------------------------------

    def memory_at(self, address: int) -> tuple[int, int]:
        """Return (memory type, device) of an address. Raises CudaError for memory that the driver does not know."""
        kind, device = ctypes.c_int(), ctypes.c_int()
        self._call("pointer_attribute", ctypes.byref(kind), _POINTER_MEMORY_TYPE, address)
        self._call("pointer_attribute", ctypes.byref(device), _POINTER_DEVICE_ORDINAL, address)
        return kind.value, device.value

    def managed(self, address: int) -> bool:
        """Return True for managed memory, which the driver moves between host and GPUs."""
        value = ctypes.c_uint()
        self._call("pointer_attribute", ctypes.byref(value), _POINTER_IS_MANAGED, address)
        return bool(value.value)

    def host_register(self, address: int, size: int, *, read_only: bool = False) -> None:
        """Pin host memory for all contexts. Takes the time of faulting it in. A context must be current."""
        flags = REGISTER_PORTABLE | (REGISTER_READ_ONLY if read_only else 0)
        self._call("host_register", address, size, flags)

    def host_unregister(self, address: int) -> None:
        """Undo :meth:`host_register`, before the memory is unmapped."""
        self._call("host_unregister", address)

    def allocate(self, size: int) -> int:
        """Allocate memory of the current context's device: for benchmarks and tests."""
        address = _address()
        self._call("allocate", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Free what :meth:`allocate` gave."""
        self._call("free", address)

    def sync_memops(self, address: int) -> None:
        """Make the driver's synchronous copies from and to this allocation synchronous in fact.

        NVIDIA asks for it where other devices read and write the memory.
        """
        self._call("set_pointer_attribute", ctypes.byref(ctypes.c_uint(1)), _POINTER_SYNC_MEMOPS, address)

    @property
    def flushes(self) -> bool:
        """Whether this driver has :meth:`flush_writes`."""
        return "flush_writes" in self._calls

    def flush_writes(self) -> None:
        """Wait until all GPUs see what other devices have written into memory of the current context's GPU.

        It waits for no stream. Nothing happens if no flush is needed.
        """
        if not self.flushes:
            raise CudaError("this driver is older than CUDA 11.3 and flushes no writes", _NOT_SUPPORTED)
        self._call("flush_writes", _CURRENT_CONTEXT, ALL_DEVICES)

    def dma_buf(self, address: int, size: int) -> int:
        """Return a new dma-buf descriptor of device memory, which the caller closes.

        Address and size are multiples of the host's page size.

        All of it must be of one allocation that the driver exports. Memory of stream-ordered pools, and of reserved
        addresses (cuMemMap) without leave for GPUDirect RDMA, may not be: the driver refuses then.
        """
        if "range_handle" not in self._calls:
            raise CudaError("this driver is older than CUDA 11.7 and exports no dma-buf", _NOT_SUPPORTED)
        fd = ctypes.c_int(-1)
        self._call("range_handle", ctypes.byref(fd), address, size, _DMA_BUF_FD, 0)
        return fd.value

    # -- copies, streams, events; the device's context is current -----------------------------------------

    def to_device(self, target: int, source: int, size: int, stream: int) -> None:
        """Begin a copy from host memory."""
        self._own()
        code = self._to_device(target, source, size, stream)
        if code:
            raise self._error("to_device", code)

    def to_host(self, target: int, source: int, size: int, stream: int) -> None:
        """Begin a copy into host memory."""
        self._own()
        code = self._to_host(target, source, size, stream)
        if code:
            raise self._error("to_host", code)

    def copy_batch(self, targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
        """Begin copies between pinned host memory and the device's, in any directions and in no order.

        They come after what is on the stream, and what is put there later comes after all of them. One call costs less
        than one for each copy, and gives the GIL away once. If it fails, some may have begun. Raises CudaError.
        """
        self._own()
        if self._copy_batch is None:
            raise CudaError("this driver is older than CUDA 13.0 and copies no batches", _NOT_SUPPORTED)
        count = len(sizes)
        addresses = _address * count
        code = self._copy_batch(
            addresses(*targets), addresses(*sources), (_size * count)(*sizes), count,
            ctypes.byref(self._attributes), ctypes.byref(_size(0)), 1, stream,
        )  # fmt: skip
        if code:
            raise self._error("copy_batch", code)

    def stream_create(self) -> int:
        """Return a stream that keeps the order with the device's legacy default stream, unlike a non-blocking one."""
        return self._made("stream_create", 0)

    def stream_destroy(self, stream: int) -> None:
        """End a stream. Work that is on it goes on."""
        self._call("stream_destroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait, without the GIL, until all that was begun on the stream is done."""
        self._own()
        code = self._stream_synchronize(stream)
        if code:
            raise self._error("stream_synchronize", code)

    def stream_wait(self, stream: int, event: int) -> None:
        """Have all that is begun on the stream from now on wait for the event."""
        self._call("stream_wait", stream, event, 0)

    def context_synchronize(self) -> None:
        """Wait until all that was begun in the current context is done."""
        self._call("context_synchronize")

    def event_create(self) -> int:
        """Return an event without timing."""
        return self._made("event_create", _EVENT_DISABLE_TIMING)

    def event_destroy(self, event: int) -> None:
        """Free it."""
        self._call("event_destroy", event)

    def event_record(self, event: int, stream: int) -> None:
        """Have the event done when all that is on the stream now is done."""
        self._call("event_record", event, stream)

    def event_synchronize(self, event: int) -> None:
        """Wait for the event, without the GIL."""
        self._call("event_synchronize", event)

    def _made(self, name: str, flags: int) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), flags)
        return handle.value or 0


_lock = threading.Lock()
_driver: Driver | None = None
_why = ""


def load() -> Driver:
    """Return this process's driver, loaded by the first call. Raises CudaError; there is no second try."""
    global _driver, _why
    driver = _driver
    if driver is not None and not driver.forked:
        return driver
    with _lock:
        if _driver is None and not _why:
            try:
                _driver = Driver(ctypes.CDLL(LIBRARY))
            except OSError as exc:
                _why = f"no CUDA driver: {exc}"
            except CudaError as exc:
                _why = f"the CUDA driver does not start: {exc}"
        if _driver is None:
            raise CudaError(_why)
        _driver._own()
        return _driver


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    if _driver is not None:
        _driver.forked = True


fork.in_child(_after_fork_in_child)
