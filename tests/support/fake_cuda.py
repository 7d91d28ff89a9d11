"""A CUDA driver in software, with the functions that ``simm.gpu.cuda`` calls: as strict as a GPU is lazy.

GPU memory has addresses at which the CPU finds a reserved range that nobody may touch (PROT_NONE): who copies there by
the CPU dies of SIGSEGV. Its bytes lie elsewhere. What is begun on a stream is carried out when somebody waits for
it, and not a moment before, so that whoever forgets to wait sees old bytes. Registered memory is copied straight from
and to; copies from memory that is not pinned are done at once, as the driver's own way round is, and counted.

Other devices reach GPU memory by the descriptor that is exported of it, which has its address inside (``dma_read``,
``dma_write``; ``fake_fabric.py`` is who calls them). What they wrote is not to be seen before a flush, or ``land``,
unless ``ordering`` says that this GPU orders it by itself.

Everything that a real driver would take as reason for undefined behaviour is noted in ``violations``.

``FakeCuda`` is Python; ``compiled()`` builds ``fake_cuda.c``, the same rules behind real C symbols, which proves the
prototypes. Both have the same handles for tests: ``peek``, ``poke``, ``work``, ``registered``, ``violations``, ...
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

OK: Final = 0
INVALID_VALUE: Final = 1
NOT_INITIALIZED: Final = 3
INVALID_DEVICE: Final = 101
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
ILLEGAL_ADDRESS: Final = 700
ALREADY_REGISTERED: Final = 712
NOT_REGISTERED: Final = 713
NOT_SUPPORTED: Final = 801

NAMES: Final = {
    INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY",
    NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED",
    INVALID_CONTEXT: "CUDA_ERROR_INVALID_CONTEXT", ILLEGAL_ADDRESS: "CUDA_ERROR_ILLEGAL_ADDRESS",
    NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED",
}  # fmt: skip

LEGACY: Final = 1
_PAGE: Final = 4096

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000


def mapped_at(address: int) -> str:
    """Return what is mapped there, as the kernel names it: file, inode, offset. Empty for nothing.

    Anonymous memory has no offset: neighbouring mappings merge, and where that begins says nothing. A file that has
    been removed meanwhile is the same file.
    """
    with open("/proc/self/maps") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            first, last = (int(part, 16) for part in fields[0].split("-"))
            if first <= address < last:
                offset = int(fields[2], 16) + address - first if int(fields[4]) else 0
                name = "".join(fields[5:]).strip().removesuffix(" (deleted)")
                return f"{fields[3]} {fields[4]} {offset:#x} {name}".strip()
    return ""


def _plain(argument: Any) -> int:
    value = getattr(argument, "value", argument)
    return value or 0


def _put(reference: Any, value: Any) -> None:
    reference._obj.value = value


class Memory:
    """An allocation on a device."""

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        self.device = device
        self.managed = False
        self.data = bytearray(size)
        self.reserved = -(-size // _PAGE) * _PAGE
        self.address = _LIBC.mmap(None, self.reserved, 0, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)

    def free(self) -> None:
        _LIBC.munmap(self.address, self.reserved)


class Stream:
    """What was begun and not yet carried out, in order."""

    def __init__(self, context: int, blocking: bool) -> None:
        self.context = context
        self.blocking = blocking
        self.queue: list[Callable[[], None]] = []
        #: (host address, bytes) of copies in the queue.
        self.copies: list[tuple[int, int]] = []


class Event:
    """``done`` is made true by a mark in a stream's queue."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.mark: list[bool] = [True]


class FakeCuda:
    """See above. ``devices`` of them; ``dma_buf`` says whether memory can be exported."""

    def __init__(self, devices: int = 2, dma_buf: bool = True, without: frozenset[str] = frozenset()) -> None:
        #: Symbols that this driver is too old to have.
        self.without = without
        self.devices = devices
        self.dma_buf = dma_buf
        self.violations: list[str] = []
        #: start -> (bytes, flags, what was mapped there)
        self.ranges: dict[int, tuple[int, int, str]] = {}
        #: Results that the next calls of a function have instead of doing anything: by symbol.
        self.failing: dict[str, list[int]] = {}
        self.calls: list[str] = []
        self.pageable = 0
        self.direct = 0
        #: Attributes 118 and 117: does the GPU order other devices' writes; can they be flushed.
        self.ordering = 0
        self.flush_options = 1
        self.gpu_direct = 1
        #: What other devices wrote and nobody sees yet, oldest first; how often that was flushed.
        self.posted: list[tuple[int, bytes]] = []
        self.flushed = 0
        #: Bytes that other devices have read and written.
        self.dma = [0, 0]
        #: Where copies are synchronous.
        self.synchronous: set[int] = set()
        #: A failed kernel makes each later call fail.
        self.sticky = 0
        #: Called before each copy that is carried out: (to the device?, host address, bytes).
        self.on_copy: Callable[[bool, int, int], None] | None = None
        self._lock = threading.RLock()
        self._memory: list[Memory] = []
        self._handles: dict[int, Any] = {}
        self._next = 0x1000
        self._local = threading.local()
        self._legacy = [Stream(0, False) for _ in range(devices)]
        self.retained = [0] * devices
        self._ready = False

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value
        if name in self.without:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            with self._lock:
                self.calls.append(name)
                planned = self.failing.get(name)
                if planned:
                    return planned.pop(0)
                if name not in ("cuInit", "cuGetErrorName", "cuGetErrorString"):
                    if not self._ready:
                        return NOT_INITIALIZED
                    if self.sticky:
                        return self.sticky
                result: int = value(*arguments)
                return result

        return call

    # -- for tests ----------------------------------------------------------------------------------

    def fail_next(self, name: str, codes: list[int]) -> None:
        """Have the next calls of a function fail; for a copy those that begin many copies as well."""
        self.failing[name] = codes
        if name in ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"):
            self.failing["cuMemcpyBatchAsync_v2"] = list(codes)

    def peek(self, address: int, size: int) -> bytes:
        """Device memory as it is now, whatever is still to be carried out."""
        memory, at = self._find(address, size)
        return bytes(memory.data[at : at + size])

    def poke(self, address: int, data: bytes) -> None:
        """Change it at once."""
        memory, at = self._find(address, len(data))
        memory.data[at : at + len(data)] = data

    def owns(self, address: int) -> bool:
        """Is it GPU memory?"""
        with self._lock:
            return any(each.address <= address < each.address + each.reserved for each in self._memory)

    def dma_write(self, address: int, data: bytes) -> None:
        """Another device writes."""
        with self._lock:
            self._find(address, len(data))
            self.dma[1] += len(data)
            self.posted.append((address, data))
            if self.ordering >= 200:
                self.land()

    def dma_read(self, address: int, size: int) -> bytes:
        """Another device reads, after what was written by such."""
        with self._lock:
            self.land()
            self.dma[0] += size
            return self.peek(address, size)

    def land(self, device: int = -1) -> None:
        """What was written to this GPU, or to all, comes to be seen."""
        with self._lock:
            posted, self.posted = self.posted, []
            for address, data in posted:
                if device in (-1, self._find(address)[0].device):
                    self.poke(address, data)
                else:
                    self.posted.append((address, data))

    def alloc(self, device: int, size: int) -> int:
        """Memory, without a context."""
        self._memory.append(Memory(size, device))
        return self._memory[-1].address

    def work(self, stream: int, device: int, address: int, data: bytes) -> None:
        """A kernel on a stream (LEGACY for the device's default one) that writes these bytes, when it comes to it."""
        queue = self._legacy[device] if stream == LEGACY else self._handles[stream]
        queue.queue.append(lambda: self.poke(address, data))

    def user_stream(self, device: int, blocking: bool = False) -> int:
        """A stream of the caller's, non-blocking by default."""
        return self._new(Stream(device + 1, blocking))

    def registered(self) -> int:
        """Bytes that are registered now."""
        return sum(size for size, _, _ in self.ranges.values())

    def pending(self) -> int:
        """Operations begun and not carried out on streams that are not the caller's legacy one."""
        return sum(len(each.queue) for each in self._handles.values() if isinstance(each, Stream))

    def live(self) -> int:
        """Streams and events that were not destroyed."""
        return len(self._handles)

    def close(self) -> None:
        """Unmap the addresses."""
        for memory in self._memory:
            memory.free()
        self._memory.clear()

    # -- inside -------------------------------------------------------------------------------------

    def _new(self, thing: Any) -> int:
        self._next += 16
        self._handles[self._next] = thing
        return self._next

    def _find(self, address: int, size: int = 1) -> tuple[Memory, int]:
        for memory in self._memory:
            if memory.address <= address and address + size <= memory.address + memory.size:
                return memory, address - memory.address
        raise KeyError(hex(address))

    def _contexts(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[int] = self._local.stack
        return stack

    def _stream(self, handle: Any) -> Stream | None:
        number = _plain(handle)
        if number in (0, LEGACY):
            stack = self._contexts()
            return self._legacy[stack[-1] - 1] if stack else None
        found = self._handles.get(number)
        return found if isinstance(found, Stream) else None

    def _run(self, stream: Stream) -> None:
        while stream.queue:
            stream.queue.pop(0)()
        stream.copies.clear()

    def _enqueue(self, stream: Stream, operation: Callable[[], None]) -> None:
        if stream.blocking and stream.context:
            legacy = self._legacy[stream.context - 1]
            mark = [False]
            legacy.queue.append(lambda: mark.__setitem__(0, True))
            stream.queue.append(lambda: self._until(legacy, mark))
        stream.queue.append(operation)

    def _until(self, stream: Stream, mark: list[bool]) -> None:
        while not mark[0] and stream.queue:
            stream.queue.pop(0)()

    def _pinned(self, address: int, size: int) -> int:
        """1: in one registration; 0: in none; -1: across borders."""
        touching = [(at, each[0]) for at, each in self.ranges.items() if at < address + size and address < at + each[0]]
        if not touching:
            return 0
        at, length = touching[0]
        return 1 if len(touching) == 1 and at <= address and address + size <= at + length else -1

    # -- the driver's functions -----------------------------------------------------------------------

    def cuInit(self, flags: Any) -> int:
        self._ready = True
        return OK

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        name = NAMES.get(_plain(code))
        if name is None:
            return INVALID_VALUE
        _put(text, name.encode())
        return OK

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        if _plain(code) not in NAMES:
            return INVALID_VALUE
        _put(text, b"as the fake driver says")
        return OK

    def cuDeviceGetCount(self, count: Any) -> int:
        _put(count, self.devices)
        return OK

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        if not 0 <= _plain(ordinal) < self.devices:
            return INVALID_DEVICE
        _put(device, _plain(ordinal))
        return OK

    def cuDeviceGetName(self, text: Any, size: Any, device: Any) -> int:
        text.value = b"Fake GPU %d" % _plain(device)
        return OK

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        if attribute == 124:
            _put(value, int(self.dma_buf))
        elif attribute in (116, 117, 118):
            _put(value, {116: self.gpu_direct, 117: self.flush_options, 118: self.ordering}[attribute])
        elif attribute in (99, 113):
            _put(value, 1)
        else:
            return INVALID_VALUE
        return OK

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.retained[_plain(device)] += 1
        _put(context, _plain(device) + 1)
        return OK

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.retained[_plain(device)] -= 1
        return OK

    def cuCtxGetCurrent(self, context: Any) -> int:
        stack = self._contexts()
        _put(context, stack[-1] if stack else None)
        return OK

    def cuCtxSetCurrent(self, context: Any) -> int:
        """Replace the top of the stack; with no context, pop it."""
        number, stack = _plain(context), self._contexts()
        if number and (not 1 <= number <= self.devices or not self.retained[number - 1]):
            return INVALID_CONTEXT
        stack[-1:] = [number] if number else []
        return OK

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        number = _plain(context)
        if not 1 <= number <= self.devices or not self.retained[number - 1]:
            return INVALID_CONTEXT
        self._contexts().append(number)
        return OK

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        stack = self._contexts()
        if not stack:
            return INVALID_CONTEXT
        _put(context, stack.pop())
        return OK

    def cuCtxSynchronize(self) -> int:
        stack = self._contexts()
        if not stack:
            return INVALID_CONTEXT
        self._run(self._legacy[stack[-1] - 1])
        for each in list(self._handles.values()):
            if isinstance(each, Stream) and each.context == stack[-1]:
                self._run(each)
        return OK

    def cuPointerGetAttribute(self, value: Any, attribute: Any, address: Any) -> int:
        try:
            memory, _ = self._find(_plain(address))
        except KeyError:
            if self._pinned(_plain(address), 1) != 1:
                return INVALID_VALUE
            _put(value, 1 if attribute == 2 else 0)
            return OK
        if attribute not in (2, 8, 9):
            return INVALID_VALUE
        _put(value, {2: 2, 8: int(memory.managed), 9: memory.device}[attribute])
        return OK

    def cuPointerSetAttribute(self, value: Any, attribute: Any, address: Any) -> int:
        if attribute != 6 or not self._contexts():
            return INVALID_VALUE
        self.synchronous.add(self._find(_plain(address))[0].address)
        return OK

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> int:
        if not self._contexts():
            return INVALID_CONTEXT
        if target != 0 or scope not in (100, 200):
            return INVALID_VALUE
        if not self.flush_options & 1:
            return NOT_SUPPORTED
        self.flushed += 1
        self.land(self._contexts()[-1] - 1)
        return OK

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        start, length = _plain(address), _plain(size)
        if not self._contexts():
            return INVALID_CONTEXT
        if start % _PAGE or not length or _plain(flags) & ~0xF:
            return INVALID_VALUE
        if self._pinned(start, length):
            return ALREADY_REGISTERED
        if not mapped_at(start) or not mapped_at(start + length - 1):
            return INVALID_VALUE
        self.ranges[start] = length, _plain(flags), mapped_at(start)
        return OK

    def cuMemHostUnregister(self, address: Any) -> int:
        start = _plain(address)
        found = self.ranges.get(start)
        if found is None:
            return NOT_REGISTERED
        length, _, mapped = found
        if mapped_at(start) != mapped:
            self.violations.append(f"unregistered {start:#x} after its mapping had gone")
        for each in self._handles.values():
            if isinstance(each, Stream) and any(at < start + length and start < at + n for at, n in each.copies):
                self.violations.append(f"unregistered {start:#x} under a copy")
        del self.ranges[start]  # last: tests wait for it without our lock
        return OK

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        stack = self._contexts()
        if not stack:
            return INVALID_CONTEXT
        _put(address, self.alloc(stack[-1] - 1, _plain(size)))
        return OK

    def cuMemFree_v2(self, address: Any) -> int:
        memory, at = self._find(_plain(address))
        self._memory.remove(memory)
        memory.free()
        return OK if not at else INVALID_VALUE

    def _copy(self, into: bool, device_address: int, host: int, size: int, handle: Any) -> int:
        stream = self._stream(handle)
        if stream is None or (stream.context and [stream.context] != self._contexts()[-1:]):
            return INVALID_HANDLE
        try:
            self._find(device_address, size)
        except KeyError:
            return INVALID_VALUE

        def carry_out() -> None:
            if self.on_copy is not None:
                self.on_copy(into, host, size)
            memory, at = self._find(device_address, size)
            where = ctypes.addressof(ctypes.c_char.from_buffer(memory.data, at))
            if into:
                ctypes.memmove(where, host, size)
            else:
                ctypes.memmove(host, where, size)

        kind = self._pinned(host, size)
        if kind < 0:
            return INVALID_VALUE
        if kind == 0:
            self.pageable += 1
            self._enqueue(stream, carry_out)
            self._run(stream)
            return OK
        self.direct += 1

        def later() -> None:
            if self._pinned(host, size) != 1:
                self.violations.append(f"{host:#x} was unregistered before its copy was done")
            carry_out()

        self._enqueue(stream, later)
        stream.copies.append((host, size))
        return OK

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        return self._copy(True, _plain(target), _plain(source), _plain(size), stream)

    def cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        return self._copy(False, _plain(source), _plain(target), _plain(size), stream)

    def cuMemcpyBatchAsync_v2(
        self, targets: Any, sources: Any, sizes: Any, count: Any, attributes: Any, at: Any, kinds: Any, stream: Any
    ) -> int:
        """Carry the copies out in an order that no caller expects, as they have none."""
        found, given = self._stream(stream), attributes._obj
        if found is None or not found.context:  # the legacy default stream takes no batch
            return INVALID_HANDLE
        if _plain(count) < 1 or _plain(kinds) != 1 or at._obj.value != 0:
            return INVALID_VALUE
        if bytes(given) != struct.pack("6i", 1, 0, 0, 0, 0, 0):
            return INVALID_VALUE
        for target, source, size in reversed(list(zip(targets, sources, sizes))):
            into = self._knows(target)
            if into == self._knows(source):
                return INVALID_VALUE
            code = self._copy(into, target if into else source, source if into else target, size, stream)
            if code:
                return code
        return OK

    def _knows(self, address: int) -> bool:
        """Return whether that is memory of a device."""
        try:
            self._find(address, 1)
        except KeyError:
            return False
        return True

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        stack = self._contexts()
        if not stack:
            return INVALID_CONTEXT
        _put(stream, self._new(Stream(stack[-1], not _plain(flags) & 1)))
        return OK

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        return OK if self._handles.pop(_plain(stream), None) is not None else INVALID_HANDLE

    def cuStreamSynchronize(self, stream: Any) -> int:
        found = self._stream(stream)
        if found is None:
            return INVALID_HANDLE
        self._run(found)
        return OK

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> int:
        found, known = self._stream(stream), self._handles.get(_plain(event))
        if found is None or not isinstance(known, Event):
            return INVALID_HANDLE
        source, mark = known.stream, known.mark
        if source is not None:
            found.queue.append(lambda: self._until(source, mark))
        return OK

    def cuEventCreate(self, event: Any, flags: Any) -> int:
        _put(event, self._new(Event()))
        return OK

    def cuEventDestroy_v2(self, event: Any) -> int:
        return OK if self._handles.pop(_plain(event), None) is not None else INVALID_HANDLE

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        known, found = self._handles.get(_plain(event)), self._stream(stream)
        if not isinstance(known, Event) or found is None:
            return INVALID_HANDLE
        known.stream, known.mark = found, [False]
        mark = known.mark
        found.queue.append(lambda: mark.__setitem__(0, True))
        return OK

    def cuEventSynchronize(self, event: Any) -> int:
        known = self._handles.get(_plain(event))
        if not isinstance(known, Event):
            return INVALID_HANDLE
        if known.stream is not None:
            self._until(known.stream, known.mark)
        return OK

    def cuMemGetHandleForAddressRange(self, handle: Any, address: Any, size: Any, kind: Any, flags: Any) -> int:
        if not self.dma_buf:
            return NOT_SUPPORTED
        if _plain(kind) != 1 or _plain(address) % _PAGE or _plain(size) % _PAGE:
            return INVALID_VALUE
        start, length = _plain(address), _plain(size)
        if not any(
            each.address <= start and start + length <= each.address + each.reserved for each in self._memory
        ):  # fmt: skip
            return INVALID_VALUE
        fd = os.memfd_create("fake-dma-buf", 0)
        os.write(fd, struct.pack("QQ", start, length))
        _put(handle, fd)
        return OK


def compiled(folder: Path) -> ctypes.CDLL | str:
    """``fake_cuda.c`` as a shared library; or why there is none."""
    library = built(folder)
    return ctypes.CDLL(str(library)) if library is not None else "there is no C compiler"


def built(folder: Path, name: str = "") -> Path | None:
    """Return the file of ``fake_cuda.c`` as a shared library, None without a compiler.

    A process that loads it finds it again under ``name``, as the one that is loaded.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / f"libfakecuda{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"
    source = Path(__file__).with_name("fake_cuda.c")
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-pthread"]
    options += [f"-Wl,-soname,{name}"] if name else []
    made = subprocess.run(
        [compiler, *options, "-o", library, source], capture_output=True, text=True, check=False
    )  # fmt: skip
    if made.returncode:
        raise AssertionError(made.stderr)
    return library
