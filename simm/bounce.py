"""Registered memory for values whose own memory is not: the bounce pool.

A transfer takes a *loan* of blocks once, at its beginning, while it holds no other, and gives it back at its end. So
nobody who waits for blocks has any, and those who have some need no more: no circle. It may get fewer than it asked
for, one at least, and then has less under way at a time.

What can go wrong: *a block is used again while a device still writes into it*. A loan is given back when all its
transfers are done, or after the links they went over were closed, which is the fence; whoever does it is in
``rdmaget.py`` and ``rdmaput.py``, in one ``finally`` each.

The pool grows in steps and never shrinks: ``POOL_BYTES`` are pinned at most, and registering is slow. Its pages are
not inherited by forked children (MADV_DONTFORK): a page that both have would be copied at the parent's next store, and
the device would go on with the old one. The child's copy of the object must never be finalised, though: its addresses
are free there, and somebody else's soon, whose memory that would unmap.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from typing import Final

from .buffers import address_of
from .errors import CorruptionError, TransportError
from .registry import Registration

POOL_BYTES: Final = 64 << 20
BLOCK_BYTES: Final = 1 << 20
_STEP_BLOCKS: Final = 4


class Pages:
    """Zeroed, page-aligned, registered memory of our own: ``memory`` searches and slices, ``view`` can be written.

    Raises TransportError where there is no memory left.
    """

    __slots__ = ("address", "memory", "registration", "size", "view")

    def __init__(self, size: int) -> None:
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise TransportError(f"no memory for {size} bytes of buffers: {exc.strerror or exc}") from exc
        _MAPS.add(self.memory)
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self.memory)
        self.size = size
        self.address = address_of(self.view)
        self.registration = Registration(self.address, size, keep=self.memory)

    def close(self) -> None:
        """Deregister; the memory goes when nobody refers to it."""
        self.registration.close()


class Block:
    """BLOCK_BYTES of the pool."""

    __slots__ = ("address", "registration", "view")

    def __init__(self, pages: Pages, at: int) -> None:
        self.address = pages.address + at
        self.view = pages.view[at : at + BLOCK_BYTES]
        self.registration = pages.registration


class BouncePool:
    """Blocks for all transfers of a client. Any thread may call it."""

    def __init__(self, most_bytes: int = POOL_BYTES) -> None:
        self._most = max(1, most_bytes // BLOCK_BYTES)
        self._changed = threading.Condition(threading.Lock())
        self._free: list[Block] = []
        self._pages: list[Pages] = []
        self._made = 0

    def __repr__(self) -> str:
        return f"<BouncePool {len(self._free)} free of {self._made} blocks>"

    def take(self, wanted: int, until: float) -> list[Block]:
        """Up to ``wanted`` blocks and one at least, waiting for it until ``until`` (monotonic seconds).

        The caller holds none. Raises TransportError when the time is up.
        """
        with self._changed:
            while True:
                while len(self._free) < wanted and self._made < self._most:
                    count = min(_STEP_BLOCKS, self._most - self._made)
                    pages = Pages(count * BLOCK_BYTES)
                    self._pages.append(pages)
                    self._free += [Block(pages, at * BLOCK_BYTES) for at in range(count)]
                    self._made += count
                if self._free:
                    taken = self._free[-wanted:]
                    del self._free[-wanted:]
                    return taken
                left = until - time.monotonic()
                if left <= 0:
                    raise TransportError("deadline passed while waiting for a bounce buffer")
                self._changed.wait(left)

    def give(self, blocks: list[Block]) -> None:
        """Back again: nothing is under way in them any more."""
        if blocks:
            with self._changed:
                self._free += blocks
                self._changed.notify_all()

    def close(self) -> None:
        """Deregister everything. No loan may be out."""
        with self._changed:
            pages, self._pages = self._pages, []
            self._free.clear()
            self._made = 0
        for each in pages:
            with contextlib.suppress(TransportError):
                each.close()

    def check(self) -> None:
        """Raise CorruptionError when a block is free twice, or there are too many."""
        with self._changed:
            addresses = {block.address for block in self._free}
            if len(addresses) != len(self._free) or len(self._free) > self._made or self._made > self._most:
                raise CorruptionError(f"{len(self._free)} free blocks, {len(addresses)} different, {self._made} made")


_MAPS: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()
#: In a forked child: objects of maps that are not there.
_GRAVEYARD: Final[list[mmap.mmap]] = []


def _after_fork_in_child() -> None:
    _GRAVEYARD.extend(_MAPS)
    _MAPS.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
