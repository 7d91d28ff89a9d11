"""Host memory made known to the CUDA driver, so that a GPU copies straight from and to it.

A copy from other memory goes through a small pinned buffer, by the CPU: half the speed or less. So each arena that GPU
memory is exchanged with is registered at its first such use. That takes as long as faulting all of it in (seconds for
100 GiB), so a background thread does it in pieces, from the start, and ``gpu/copy.py`` stages what is not registered
yet. Staging memory is small and is registered at once (:func:`pin_now`). The pages are pinned while they are mapped.

What can go wrong
-----------------
* *The mapping goes while it is registered.* The driver would keep pages of a dead arena and, should the address be
  mapped anew, copy from the wrong ones. So a registration holds the mapping until the driver has undone it. It ends
  when nothing refers to the arena's reader any more. That may be found out in any thread, in the middle of anything, so
  the finalizer only leaves a note to the background thread. A thread that copies holds the reader.
* *A copy across two pieces* may be refused: :meth:`Pinned.direct` ends at each.
* *Registering fails* (limits, a virtual machine, no memory): it is logged once for a mapping, and not tried again.
* *The driver cannot say that a copy has ended*: the mapping stays, registered, until the process ends.
* *A fork.* The child has no driver, and forgets all this. *Exit* waits for the piece that is being registered.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from functools import partial
from typing import Final

from ..host import fork
from ..host.buffers import HostMapping
from ..rdma.staging import StagingMemory
from .cuda import ALREADY_REGISTERED, NOT_REGISTERED, READ_ONLY_HOST_REGISTER_SUPPORTED, CudaError, Driver

log = logging.getLogger("simm.gpu.copy")

#: Registered at a time: the driver holds its own locks meanwhile, and exit waits so long.
PIECE_BYTES: Final = 256 << 20
#: Interpreter exit waits so long for a piece.
EXIT_S: Final = 5.0


class Pinned:
    """One mapping, registered from its start on as far as :attr:`ready`.

    Args:
        driver: the process's.
        name: what the log calls it.
        data: the mapping; kept until the registration is undone.
        address: where it begins, page-aligned.
        device: the one whose context registers it. It is good for all.
        writable: False for a mapping that may only be read.
        piece: bytes registered at a time, a multiple of the page size.
    """

    __slots__ = ("__weakref__", "_data", "_device", "_driver", "_pieces", "_writable", "address", "began", "failure",
                 "gone", "name", "piece", "ready", "size", "stuck")  # fmt: skip

    def __init__(
        self, driver: Driver, name: str, data: memoryview, address: int, device: int, *, writable: bool = True,
        piece: int = PIECE_BYTES,
    ) -> None:  # fmt: skip
        self._driver = driver
        self.name = name
        self._data: memoryview | None = data
        self.address = address
        self.size = data.nbytes
        self._device = device
        self._writable = writable
        self.piece = piece
        #: Bytes from the start that the driver has pinned.
        self.ready = 0
        #: Addresses of registered pieces, in order; the last one may be about to be registered.
        self._pieces: list[int] = []
        #: Why no more can be registered; None while it can.
        self.failure: str | None = None
        #: No copy uses it any more.
        self.gone = False
        #: The driver cannot say that a copy has ended: the mapping stays for good.
        self.stuck = False
        self.began = time.monotonic()

    def __repr__(self) -> str:
        return f"<Pinned {self.name} {self.ready} of {self.size} bytes{': ' + self.failure if self.failure else ''}>"

    def direct(self, address: int, size: int) -> int:
        """Return how many of these bytes one copy may take from here; 0 if the first is not registered. O(1)."""
        at = address - self.address
        left = self.ready - at
        if left <= 0 or at < 0:
            return 0
        return min(size, left, self.piece - at % self.piece)

    def register_some(self) -> bool:
        """Register the next piece. Return False if there is none, or no more can be registered."""
        if self.gone or self.failure is not None or self.ready >= self.size:
            return False
        driver = self._driver
        address = self.address + self.ready
        size = min(self.piece, self.size - self.ready)
        again = address in self._pieces[-1:]  # an interruption came before or after the call
        if not again:
            self._pieces.append(address)  # before the call, so that close() knows of it in any case
        try:
            read_only = not self._writable
            if read_only and not driver.attribute(self._device, READ_ONLY_HOST_REGISTER_SUPPORTED):
                raise CudaError("this device cannot register memory that is mapped read-only")
            try:
                driver.within(self._device, partial(driver.host_register, address, size, read_only=read_only))
            except CudaError as exc:
                if not again or exc.code != ALREADY_REGISTERED:
                    raise
        except CudaError as exc:
            self.failure = str(exc)
            self._pieces.pop()
            log.warning(
                "%s: the CUDA driver has registered %d of %d MiB and no more (%s): copies between the rest and "
                "GPUs are slower", self.name, self.ready >> 20, self.size >> 20, exc,
            )  # fmt: skip
            return False
        self.ready += size
        return self.ready < self.size

    @property
    def holds_mapping(self) -> bool:
        """Whether it has not been undone."""
        return self._data is not None

    def close(self) -> None:
        """Undo it and let go of the mapping. No copy uses it any more. Twice is harmless."""
        self.gone = True
        self.ready = 0
        driver = self._driver
        try:
            if self.stuck:
                raise CudaError("a copy from or to it may not have ended")
            while self._pieces and not driver.forked:
                try:
                    driver.within(self._device, partial(driver.host_unregister, self._pieces[-1]))
                except CudaError as exc:
                    if exc.code != NOT_REGISTERED:  # else an interruption came before it was, or when it was not
                        raise
                self._pieces.pop()
        except CudaError as exc:
            # The driver has failed. The mapping stays for good, as a DMA may still use it.
            if fork.keep_forever(self):
                log.warning("%s: is not unregistered: %s", self.name, exc)
            return
        self._data = None


class Pinner:
    """The background thread that registers mappings and undoes it."""

    def __init__(self) -> None:
        #: Mappings to register or to undo; None ends the thread. Finalizers may call ``put`` in the middle of anything.
        self._jobs: queue.SimpleQueue[Pinned | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="simm-pin", daemon=True)
        self._thread.start()

    def submit(self, pinned: Pinned) -> None:
        """Register it, or undo it if it is ``gone``."""
        self._jobs.put(pinned)

    def _run(self) -> None:
        while True:
            pinned = self._jobs.get()
            if pinned is None:
                return
            try:
                if pinned.gone:
                    pinned.close()
                elif pinned.register_some():
                    self._jobs.put(pinned)  # behind the others: a mapping that is gone need not wait for all of it
                elif pinned.ready == pinned.size:
                    log.info(
                        "%s: %d MiB registered with the CUDA driver in %.1f s: a copy to or from a GPU is one DMA",
                        pinned.name, pinned.size >> 20, time.monotonic() - pinned.began,
                    )  # fmt: skip
            except Exception:
                log.exception("registering %r", pinned)
            del pinned  # a waiting thread keeps no mapping alive

    def close(self, timeout_s: float = EXIT_S) -> None:
        """End the thread after the piece that it is registering."""
        self._jobs.put(None)
        self._thread.join(timeout_s)


_lock = threading.Lock()
_pinner: Pinner | None = None
_pinned: weakref.WeakKeyDictionary[HostMapping, Pinned] = weakref.WeakKeyDictionary()
#: Of staging memory that was dropped, not closed: the next :func:`pin_now` undoes it.
_dropped: list[Pinned] = []


def pinned_for(mapping: HostMapping, driver: Driver, device: int) -> Pinned:
    """Return the registration of a mapping, begun in the background at the first call."""
    global _pinner
    pinned = _pinned.get(mapping)
    if pinned is not None:
        return pinned
    with _lock:
        pinned = _pinned.get(mapping)
        if pinned is not None:
            return pinned
        pinned = Pinned(
            driver, f"arena {mapping.name}", mapping.data, mapping.data_address, device,
            writable=not mapping.data.readonly,
        )
        try:
            if _pinner is None:
                _pinner = Pinner()
        except RuntimeError as exc:  # no more threads, or the interpreter is ending
            pinned.failure = f"no thread to do it: {exc}"
        else:
            _pinner.submit(pinned)
        weakref.finalize(mapping, _gone, pinned).atexit = False
        _pinned[mapping] = pinned
        return pinned


def pin_now(memory: StagingMemory, driver: Driver, device: int) -> Pinned:
    """Return the registration of staging memory, made by the first call. It ends when the memory is closed.

    One thread uses the memory at a time. Logs if the driver registers nothing; copies are slower then. Where an
    interruption ends the first call, the next one goes on; and the memory is known here before the driver knows it, so
    that it is never unmapped while the driver does.
    """
    pinned = _pinned.get(memory)
    if pinned is None:
        with _lock:
            for each in list(_dropped):
                each.close()
                _dropped.remove(each)
        pinned = Pinned(driver, memory.name, memory.data, memory.address, device)
        weakref.finalize(memory, _left, pinned).atexit = False
        memory.at_close.append(pinned.close)
        with _lock:
            _pinned[memory] = pinned
    while pinned.register_some():
        pass
    return pinned


def _left(pinned: Pinned) -> None:
    """Finalizer of staging memory that nobody has closed. It calls no driver, as :func:`_gone`."""
    if pinned.holds_mapping and not pinned._driver.forked:
        _dropped.append(pinned)


def _gone(pinned: Pinned) -> None:
    """Finalizer of a mapping's owner. Takes no lock and calls no driver: it may run in the middle of anything."""
    pinned.gone = True
    pinner = _pinner
    if pinner is not None and not pinned._driver.forked:
        pinner.submit(pinned)


def _at_exit() -> None:
    if _pinner is not None:
        _pinner.close()


def _after_fork_in_child() -> None:
    global _lock, _pinner
    _lock = threading.Lock()
    _pinner = None
    _pinned.clear()
    _dropped.clear()


atexit.register(_at_exit)
fork.in_child(_after_fork_in_child)
