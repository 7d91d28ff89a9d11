"""Pages of a map: their address, faulting them in, and keeping them from forked children.

**Addresses and the GIL.** ``mmap.madvise`` holds the GIL, for tens of ms per 256 MiB when it populates: a client's
background thread would stall the engine. ctypes releases it. The address comes through the buffer protocol, which
read-only maps have too. The export keeps the map from being closed meanwhile.

**Forks and MADV_DONTFORK.** The engine's children do not inherit a client's map: their views would outlive what
protects them. The trap is that the *address range* is free in the child. malloc or a library may map memory there,
and when the child drops the inherited Python mmap object, its ``munmap`` takes that other memory away. So a fork hook
puts an inaccessible reservation on the range first. If the range is taken already, the object gets an export that is
never released, and so never unmaps. Values that the parent has views of are copied to the reservation
(``fork_copies.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence

from ..constants import PAGE_BYTES
from ..errors import SegmentError, UsageError
from . import fork

#: Bytes that one madvise call populates: enough to be efficient, few enough to end soon on an error.
POPULATE_STEP_BYTES = 256 << 20

#: Ranges of addresses that are tried until one lies on the boundary that is asked for.
RANGE_TRIES = 256

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x10_0000
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_LIBC.mremap.restype = ctypes.c_void_p
_NO_MEMORY = (None, ctypes.c_void_p(-1).value)


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer, the same in 3.10 to 3.13 (and part of the stable ABI since 3.11)."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


_GET_BUFFER = ctypes.pythonapi.PyObject_GetBuffer
_GET_BUFFER.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_RELEASE_BUFFER = ctypes.pythonapi.PyBuffer_Release
_RELEASE_BUFFER.argtypes = (ctypes.POINTER(_PyBuffer),)
_RELEASE_BUFFER.restype = None


@contextlib.contextmanager
def address_of(mm: mmap.mmap) -> Iterator[int]:
    """Yield the address at which a map begins, read-only maps included. The map cannot be closed inside the block.

    Raises UsageError if it is closed already.
    """
    view = _PyBuffer()
    try:
        _GET_BUFFER(mm, ctypes.byref(view), 0)
    except ValueError as error:
        raise UsageError("the map is closed") from error
    try:
        yield int(view.buf or 0)
    finally:
        _RELEASE_BUFFER(ctypes.byref(view))


def _madvise(address: int, length: int, advice: int) -> int:
    """Call madvise(2) without the GIL and return 0 or the errno. Retries EAGAIN and EINTR (kernel short of pages)."""
    for _ in range(3):
        if _LIBC.madvise(address, length, advice) == 0:
            return 0
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    return number


def page_range(offset: int, length: int | None, size: int) -> tuple[int, int]:
    """Return the pages that hold bytes offset .. offset+length of a map, as (start, stop)."""
    end = size if length is None else offset + length
    if offset < 0 or end > size or end < offset:
        raise UsageError(f"bytes {offset} to {end} are not within a segment of {size} bytes")
    return offset // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES


def _steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        length = min(POPULATE_STEP_BYTES - start % POPULATE_STEP_BYTES, stop - start)
        yield start, length
        start += length


def populate_read(mm: mmap.mmap, offset: int = 0, length: int | None = None) -> bool:
    """Fault pages of a map in for reading, without the GIL, so that the first copy runs at full speed.

    ``offset`` and ``length`` are in bytes. Returns False if the kernel has no MADV_POPULATE_READ (before 5.14), which
    costs speed only. Raises SegmentError if there are no pages, where a load would be a SIGBUS.
    """
    with address_of(mm) as base:
        start, stop = page_range(offset, length, len(mm))
        for at, count in _steps(start, stop):
            number = _madvise(base + at, count, _MADV_POPULATE_READ)
            if number == errno.EINVAL:
                return False
            if number:
                raise SegmentError(
                    f"cannot fault in bytes {at} to {at + count} of a map for reading: {os.strerror(number)}; "
                    "the segment was cut short or /dev/shm is full"
                )
    return True


def _address_range(length: int, offset: int, align: int) -> mmap.mmap:
    """Reserve ``length`` bytes of addresses, of which that at ``offset`` is a multiple of ``align``.

    Python's mmap takes no address. The kernel gives out the highest range that is large enough, so this frees one that
    fits in the middle of a larger one, and fills those that lie higher until its turn comes. Raises OSError.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    if align <= PAGE_BYTES:
        return mmap.mmap(-1, length, flags=flags)
    outer = length + align
    at = _LIBC.mmap(0, outer, 0, flags, -1, 0)
    if at in _NO_MEMORY:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    start = at + -(at + offset) % align
    pieces = [(at, start - at), (start + length, at + outer - start - length)]
    _LIBC.munmap(start, length)
    higher: list[mmap.mmap] = []
    try:
        for _ in range(RANGE_TRIES):
            found = mmap.mmap(-1, length, flags=flags)
            with address_of(found) as base:
                if (base + offset) % align == 0:
                    return found
            higher.append(found)
    finally:
        for each in higher:
            each.close()
        for base, count in pieces:
            if count:
                _LIBC.munmap(base, count)
    raise OSError(errno.ENOMEM, f"no {length} bytes of addresses on a boundary of {align} bytes")


def map_side_by_side(files: Sequence[tuple[int, int]], align: int = PAGE_BYTES) -> mmap.mmap:
    """Map files, (descriptor, bytes) each, read-write and one after the other, as one map.

    The sizes are multiples of the page size. ``align``: the last file begins at a multiple of this, a power of 2.
    Raises OSError, or ValueError for a map beyond the address space.
    """
    whole = _address_range(sum(size for _, size in files), sum(size for _, size in files[:-1]), align)
    with address_of(whole) as base:
        for fd, size in files:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            if _LIBC.mmap(base, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != base:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            base += size
    return whole


def ask_for_huge_pages(mm: mmap.mmap, start: int, stop: int) -> bool:
    """Ask for huge pages for bytes start .. stop. Return False if the kernel gives none for shared memory."""
    from .memory import huge_pages_allowed  # with pathlib, which the import of a client must not load

    with address_of(mm) as base:
        return huge_pages_allowed() and _madvise(base + start, stop - start, _MADV_HUGEPAGE) == 0


def populate_write(
    mm: mmap.mmap, start: int, stop: int, instead: Callable[[int, int], int]
) -> tuple[int, int] | None:
    """Fault pages start .. stop in for writing. Return None when all are there, else (errno, at which byte).

    On kernels without MADV_POPULATE_WRITE (before 5.14) ``instead(at, count)`` does it, and returns 0 or the errno.
    """
    with address_of(mm) as base:
        for at, count in _steps(start, stop):
            number = _madvise(base + at, count, _MADV_POPULATE_WRITE)
            if number == errno.EINVAL:
                number = instead(at, count)
            if number:
                return number, at
    return None


#: Maps under MADV_DONTFORK: id -> (map, address, length). The top of this module says why.
_DONTFORK: dict[int, tuple[weakref.ref[mmap.mmap], int, int]] = {}
#: In a child: what its fork hook has reserved of them, from an address to before another.
_RESERVED: list[tuple[int, int]] = []


def _reserve_in_child() -> None:
    """Reserve the address ranges of maps that were not inherited, in the child of a fork."""
    _RESERVED.clear()
    for reference, address, length in list(_DONTFORK.values()):
        mm = reference()
        if mm is None or mm.closed:
            continue
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        got = _LIBC.mmap(address, length, 0, flags, -1, 0)
        if got == address:
            _RESERVED.append((address, address + length))
        else:
            if got not in _NO_MEMORY:  # a kernel before 4.17 took the address for a hint
                _LIBC.munmap(got, length)
            # An export that is never released: neither close() nor deallocation can unmap the range.
            _GET_BUFFER(mm, ctypes.byref(_PyBuffer()), 0)
    _DONTFORK.clear()


fork.in_child(_reserve_in_child)


def keep_from_forks(mm: mmap.mmap) -> int:
    """Keep forked children from inheriting the map: touching it there is a SIGSEGV. Return 0 or the errno."""
    with address_of(mm) as address:
        number = _madvise(address, len(mm), _MADV_DONTFORK)
    if not number:
        key = id(mm)
        _DONTFORK[key] = (weakref.ref(mm, lambda _: _DONTFORK.pop(key, None)), address, len(mm))
    return number


def map_anonymous(length: int) -> int | None:
    """Map private memory of ``length`` bytes and return its address; None if there is none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    got = _LIBC.mmap(0, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return None if got in _NO_MEMORY else int(got)


def unmap(address: int, length: int) -> None:
    """End the map at these pages, or a part of one."""
    _LIBC.munmap(address, length)


def move_to_reserved(address: int, length: int, to: int) -> bool:
    """Move pages of a map to ``to``, in a fork hook of a child. Return False if that range was not reserved."""
    if not any(start <= to and to + length <= stop for start, stop in _RESERVED):
        return False
    got: int | None = _LIBC.mremap(address, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, to)
    return got == to
