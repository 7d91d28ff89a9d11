"""Staging memory: registered host memory for values whose own memory a device cannot reach.

The buffers of a :class:`StagingPool` are known to RDMA devices, and ``gpu/`` makes them known to the CUDA driver as
well. There are two kinds:

* *Blocks* of ``BLOCK_BYTES``. A transfer takes several, once, at its beginning, while it holds none. It may get fewer
  than it asked for, one at least, and releases them at its end. So no transfer that waits for blocks holds any. It
  names the list that they go to, and from which they come back, so that an interruption loses none.
* *Whole buffers* of any size, for as long as an exchange or a stream of copies needs one. They are never waited for.

A buffer is released when all transfers that use it are done, or the links they went over are closed, which is the
fence. A whole buffer of which that is not known is dropped: deregistering ends what may still come.

The memory is not inherited (MADV_DONTFORK): the parent's next store to a shared page would copy it, and the device
would go on with the old one. A child must never finalise its copy of the object, whose addresses are free there and may
belong to other memory soon.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from ..errors import DeadlineError, TransportError
from ..host import fork
from ..host.buffers import address_of
from ..host.threads import Waiters
from .registration import Registration

POOL_BYTES: Final = 64 << 20
BLOCK_BYTES: Final = 1 << 20
#: Whole buffers that are kept while idle.
IDLE_MAX: Final = 2
_STEP_BLOCKS: Final = 4


class StagingMemory:
    """Zeroed, page-aligned, registered memory: ``memory`` searches and slices, ``view`` can be written.

    A :class:`~simm.host.buffers.HostMapping`. Raises TransportError if there is no memory left.
    """

    __slots__ = ("__weakref__", "address", "at_close", "memory", "name", "registration", "size", "view")

    def __init__(self, size: int) -> None:
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise TransportError(f"no memory for {size} bytes of buffers: {exc.strerror or exc}") from exc
        _MAPS.add(self.memory)
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.name = "staging memory"
        self.view = memoryview(self.memory)
        self.size = size
        self.address = address_of(self.view)
        self.registration = Registration(self.address, size, keep=self.memory)
        #: Called by :meth:`close`: ends what other drivers know of it.
        self.at_close: list[Callable[[], object]] = []

    @property
    def data(self) -> memoryview:
        """Return all of it."""
        return self.view

    @property
    def data_address(self) -> int:
        """Return its address."""
        return self.address

    def close(self) -> None:
        """Deregister; the memory goes when nothing refers to it."""
        try:
            self.registration.close()
        finally:
            while self.at_close:
                self.at_close.pop()()


class StagingBuffer:
    """A block, or a whole buffer, of a pool: ``size`` bytes of ``memory`` at ``address``."""

    __slots__ = ("address", "memory", "registration", "size", "view")

    def __init__(self, memory: StagingMemory, at: int, size: int) -> None:
        self.memory = memory
        self.address = memory.address + at
        self.size = size
        self.view = memory.view[at : at + size]
        self.registration = memory.registration


class StagingPool:
    """Staging buffers for many transfers. Any thread may call it."""

    def __init__(self, limit_bytes: int = POOL_BYTES) -> None:
        self._limit = max(1, limit_bytes // BLOCK_BYTES)
        self._lock = threading.Lock()
        self._changed = Waiters(self._lock)
        #: The last ones are taken first.
        self._free: list[StagingBuffer] = []
        #: Memory of blocks.
        self._memory: list[StagingMemory] = []
        self._made = 0
        #: Idle whole buffers, the largest first.
        self._idle: list[StagingBuffer] = []

    def __repr__(self) -> str:
        return f"<StagingPool {len(self._free)} free of {self._made} blocks, {len(self._idle)} idle buffers>"

    # -- blocks -------------------------------------------------------------------------------------

    def take(self, wanted: int, until: float, taken: list[StagingBuffer] | None = None) -> list[StagingBuffer]:
        """Take up to ``wanted`` blocks, one at least, and return the list that they were added to.

        Waits for one until ``until``, monotonic seconds. Raises DeadlineError when the time is up, and TransportError
        if there is no memory left.
        """
        taken = [] if taken is None else taken
        if not self._changed.wait_for(lambda: self._take_locked(wanted, taken), until, late=False):
            raise DeadlineError("deadline passed while waiting for a staging buffer")
        return taken

    def take_free(self, wanted: int, taken: list[StagingBuffer]) -> None:
        """Do :meth:`take` without a wait: add no block if there is none. Raises TransportError."""
        with self._lock:
            self._take_locked(wanted, taken)

    def _take_locked(self, wanted: int, taken: list[StagingBuffer]) -> bool:
        while len(self._free) < wanted and self._made < self._limit:
            count = min(_STEP_BLOCKS, self._limit - self._made)
            memory = StagingMemory(count * BLOCK_BYTES)
            fresh = [StagingBuffer(memory, at * BLOCK_BYTES, BLOCK_BYTES) for at in range(count)]
            # No call from here on: a signal's handler could raise after one, with half of it done.
            self._memory += (memory,)
            self._free += fresh
            self._made += count
        if len(self._free) > wanted:  # what one call has given back may do for the next one who waits, too
            self._changed.notify()
        taken += self._free[-wanted:]
        del self._free[-wanted:]
        return len(taken) > 0

    @property
    def has_blocks(self) -> bool:
        """Whether :meth:`take` waits for nobody just now."""
        return bool(self._free) or self._made < self._limit

    def release(self, blocks: Sequence[StagingBuffer]) -> None:
        """Take blocks back. Nothing is in flight in them."""
        self.give_back(list(blocks))

    def give_back(self, taken: list[StagingBuffer], fit: Sequence[StagingBuffer] | None = None) -> None:
        """Take back all blocks of a list, and empty it. Nothing is in flight in them. Twice is harmless.

        If only some are ``fit`` for use, the others are taken last from now on.
        """
        if not taken:
            if self._changed:  # the call before may have been interrupted before it told them
                with self._lock:
                    self._changed.notify()
            return
        good = taken if fit is None else [block for block in taken if block in fit]
        bad = [] if fit is None else [block for block in taken if block not in fit]
        with self._lock:
            if taken:
                self._free[:] = bad + self._free + good
                taken[:] = ()
            self._changed.notify()

    # -- whole buffers --------------------------------------------------------------------------------

    def take_whole(self, size: int, *, exact: bool = False) -> StagingBuffer:
        """Return a buffer of at least ``size`` bytes, the smallest idle one or a new one.

        Pass ``exact`` to hold it for long: the buffer is new then, and of ``size`` bytes in whole pages. Raises
        TransportError if there is no memory left.
        """
        if exact:
            size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        else:
            with self._lock:
                fitting = [buffer for buffer in self._idle if buffer.size >= size]
                if fitting:
                    self._idle.remove(fitting[-1])
                    return fitting[-1]
            size = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
        return StagingBuffer(StagingMemory(size), 0, size)

    def release_whole(self, buffer: StagingBuffer) -> None:
        """Take a whole buffer back. Nothing is in flight in it."""
        with self._lock:
            # The largest stay: they fit everything.
            self._idle.append(buffer)
            self._idle.sort(key=lambda each: -each.size)
            dropped = self._idle.pop() if len(self._idle) > IDLE_MAX else None
        if dropped is not None:
            self.drop(dropped)

    def drop(self, buffer: StagingBuffer) -> None:
        """Deregister a whole buffer, which a transfer may still be writing, and let go of it."""
        with contextlib.suppress(TransportError):
            buffer.memory.close()

    # -- end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Deregister everything. No block may be taken."""
        with self._lock:
            memory, self._memory = self._memory, []
            memory += [buffer.memory for buffer in self._idle]
            self._idle.clear()
            self._free.clear()
            self._made = 0
        for each in memory:
            with contextlib.suppress(TransportError):
                each.close()

    def forget(self) -> None:
        """Give up all buffers in a forked child: their memory is not there."""
        self._lock = threading.Lock()
        self._changed = Waiters(self._lock)
        self._free, self._memory, self._idle = [], [], []
        self._made = 0


_MAPS: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for mapped in list(_MAPS):
        fork.keep_forever(mapped)
    _MAPS.clear()


fork.in_child(_after_fork_in_child)
