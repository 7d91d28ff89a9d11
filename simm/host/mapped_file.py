"""A file of memory that its owner maps whole, faults in, and hands on to its children.

Its kinds are a segment with a name (``shm.py``) and a sealed memfd (``ipc/arena_files.py``).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

from ..constants import PAGE_BYTES
from ..errors import SegmentError
from . import memory, numa
from .memory import mib
from .pages import address_of, ask_for_huge_pages, page_range, populate_write


def _map_all(name: str, fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except (OSError, ValueError) as error:
        raise SegmentError(f"cannot map {mib(size)} of segment {name}: {error}; see ulimit -v") from error


class MappedFile:
    """A file of `size` bytes; `fd` is read-write, `mm` and `buf` map all of it read-write.

    Takes the descriptor over unless it raises (SegmentError, if the file cannot be mapped).
    """

    def __init__(self, name: str, size: int, fd: int) -> None:
        self.mm = _map_all(name, fd, size)
        self.buf = memoryview(self.mm)
        self.name = name
        self.size = size
        self.fd = fd

    def bounds(self) -> list[memory.Bound]:
        """Return every bound on the memory of such a file."""
        return memory.process_bounds()

    def free_on_node(self, node: int) -> int | None:
        """Return the bytes that a NUMA node has left for such a file, None if the kernel does not say."""
        return numa.node_free_bytes(node)

    def populate(
        self, offset: int = 0, length: int | None = None, *, huge: bool = True, node: int | None = None
    ) -> bool:
        """Fault pages in for writing, so that no later store can raise SIGBUS. Their contents stay.

        offset, length in bytes (default: all). huge: request huge pages if the kernel has them on for shared memory.
        node: take the pages from this NUMA node, best effort, as containers often forbid it. Return True if huge pages
        were requested. O(pages); the GIL is released.

        Raise SegmentError if memory is short. Pages faulted in until then stay.
        """
        start, stop = page_range(offset, length, self.size)
        asked = self.prepare(start, stop, huge=huge, node=node)
        self.fault_in(start, stop)
        return asked

    def prepare(self, start: int, stop: int, *, huge: bool, node: int | None) -> bool:
        """Say of what kind and from where pages start .. stop are to be: what `populate` does first."""
        if node is not None and self.bind(start, stop, node):
            self._require_on_node(node, stop - start)
        return huge and ask_for_huge_pages(self.mm, start, stop)

    def bind(self, start: int, stop: int, node: int) -> bool:
        """Have pages start .. stop taken from a NUMA node. Return False if the kernel refuses."""
        with address_of(self.mm) as base:
            return bool(numa.bind_memory(base + start, stop - start, node))

    def fault_in(self, start: int, stop: int) -> None:
        """Fault pages start .. stop in for writing, in any thread. Raise SegmentError as `populate` does."""
        failed = populate_write(self.mm, start, stop, self._populate_by_fallocate)
        if failed is not None:
            number, at = failed
            raise self._short_of_memory(number, self.size - at)

    @property
    def missing_bytes(self) -> int:
        """Return the bytes of the file that have no page yet."""
        return max(0, self.size - os.fstat(self.fd).st_blocks * 512)

    def remap(self, *, huge: bool = True) -> None:
        """Map the segment anew, so that its pages do not count as this process's. Exported views prevent it.

        For an owner that has populated: the OOM killer would take it for a large process. huge: as in `populate`.
        """
        self.buf.release()
        self.mm.close()
        self.mm = _map_all(self.name, self.fd, self.size)
        self.buf = memoryview(self.mm)
        if huge:
            ask_for_huge_pages(self.mm, 0, self.size)

    def _require_on_node(self, node: int, wanted: int) -> None:
        """Raise SegmentError if the node is too full, where MPOL_BIND would call the OOM killer."""
        missing = min(wanted, self.missing_bytes)
        free = self.free_on_node(node)
        if free is not None and missing > free:
            raise SegmentError(
                f"segment {self.name} needs {mib(missing)} on NUMA node {node}, which has {mib(free)} left; "
                "configure a smaller arena or another node"
            )

    def _populate_by_fallocate(self, offset: int, length: int) -> int:
        """Populate before Linux 5.14: reserve the pages in the file, then read one byte of each. Return an errno."""
        try:
            os.posix_fallocate(self.fd, offset, min(length, self.size - offset))
        except OSError as error:
            return error.errno or errno.EIO
        bytes(self.buf[offset : offset + length : PAGE_BYTES])
        return 0

    def _short_of_memory(self, number: int, wanted: int) -> SegmentError:
        missing = min(wanted, self.missing_bytes)
        least, what, remedy = min(self.bounds())
        return SegmentError(
            f"segment {self.name} ({mib(self.size)}) still needs {mib(missing)}, but only {mib(least)} {what} "
            f"({os.strerror(number)}); {remedy}, or configure a smaller arena"
        )

    def close(self) -> None:
        """Close descriptor and mapping; one with exported views stays until they are gone. Twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(BufferError):
            self.buf.release()
            self.mm.close()
