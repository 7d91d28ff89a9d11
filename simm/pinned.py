"""Arenas made known to the CUDA driver, so that a GPU copies straight from and to them.

A copy from memory that the driver has not pinned goes through a small buffer of pinned memory, by the CPU: half the
speed or less. So each arena that GPU memory is exchanged with is registered, once for each mapping in this process,
at its first such use. That takes as long as faulting all of it in (seconds for 100 GiB), so it is done in the
background and in pieces, from the start; what is not registered yet, or cannot be, is copied the slow way meanwhile
(``gpu.py``).

What can go wrong, and what stands against it
---------------------------------------------
* *The mapping goes while it is registered.* The driver would keep pages of a dead arena and, should the address be
  mapped anew, copy from the wrong ones. So what is registered holds the mapping, and lets go of it only when that is
  undone. An arena's reader that nobody refers to any more is the sign; it may be found out in any thread, in the
  middle of anything, so all that happens then is a note to the background thread.
* *A copy runs while it is undone.* Who copies holds the reader.
* *A copy across two pieces* may be refused: :meth:`Pinned.direct` ends at each.
* *Registering fails* (limits, a virtual machine, no memory): it is logged once for an arena, and not tried again.
* *A copy of which nobody knows whether it has ended* (the driver has failed): the mapping stays, registered, until
  the process ends.
* *A fork.* The child has no driver. It forgets all this; its mappings were never registered.
* *The process ends* while a piece is being registered: exit waits for that one.

Cost: the arena's pages are pinned as long as it is mapped, which on a host that has no swap they are anyway.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from typing import Final

from .cuda import READ_ONLY_HOST_REGISTER_SUPPORTED, CudaError, Driver
from .errors import CorruptionError
from .reader import ArenaReader

log = logging.getLogger("simm.gpu")

#: Registered at a time: the driver holds its own locks meanwhile, and exit waits so long.
PIECE_BYTES: Final = 256 << 20
#: Interpreter exit waits so long for a piece.
EXIT_S: Final = 5.0


class Pinned:
    """One mapping, registered from its start on as far as :attr:`ready`.

    Args:
        driver: the process's.
        name: for the log.
        data: the mapping; kept until the registration is undone.
        address: where it begins, page-aligned.
        device: whose context registers it. It is good for all.
        writable: False where we may only read it.
        piece: bytes registered at a time, a multiple of the page size.
    """

    __slots__ = ("__weakref__", "_began", "_data", "_device", "_driver", "_pieces", "_writable", "address", "gone",
                 "name", "piece", "ready", "size", "stuck", "why")  # fmt: skip

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
        #: Addresses of registered pieces, in order.
        self._pieces: list[int] = []
        #: Why it goes no further; empty while it does.
        self.why = ""
        #: Nobody copies any more.
        self.gone = False
        #: Nobody knows whether a copy has ended: the mapping stays for ever.
        self.stuck = False
        self._began = 0.0

    def __repr__(self) -> str:
        return f"<Pinned {self.name} {self.ready} of {self.size} bytes{self.why and ': ' + self.why}>"

    def direct(self, address: int, size: int) -> int:
        """How many of these bytes one copy may take from here; 0 where the first is not registered. 0.2 us."""
        at = address - self.address
        left = self.ready - at
        if left <= 0 or at < 0:
            return 0
        return min(size, left, self.piece - at % self.piece)

    def register_some(self) -> bool:
        """Register the next piece; False when there is none, or no more can be."""
        if self.gone or self.why or self.ready >= self.size:
            return False
        driver = self._driver
        self._began = self._began or time.monotonic()
        size = min(self.piece, self.size - self.ready)
        try:
            read_only = not self._writable
            if read_only and not driver.attribute(self._device, READ_ONLY_HOST_REGISTER_SUPPORTED):
                raise CudaError("this device cannot register memory that is mapped read-only")
            driver.push(self._device)
            try:
                driver.host_register(self.address + self.ready, size, read_only=read_only)
            finally:
                driver.pop()
        except CudaError as exc:
            self.why = str(exc)
            log.warning(
                "%s: the CUDA driver has registered %d of %d MiB and no more (%s): copies between the rest and "
                "GPUs go through pinned buffers, which is slower", self.name, self.ready >> 20, self.size >> 20, exc,
            )  # fmt: skip
            return False
        self._pieces.append(self.address + self.ready)
        self.ready += size
        if self.ready < self.size:
            return True
        log.info(
            "%s: %d MiB registered with the CUDA driver in %.1f s: a copy to or from a GPU is one DMA",
            self.name, self.size >> 20, time.monotonic() - self._began,
        )  # fmt: skip
        return False

    def close(self) -> None:
        """Undo it and let go of the mapping; nobody copies any more. Twice is harmless."""
        self.gone = True
        self.ready = 0
        driver = self._driver
        try:
            if self.stuck:
                raise CudaError("a copy from or to it may not have ended")
            while self._pieces and not driver.forked:
                driver.push(self._device)
                try:
                    driver.host_unregister(self._pieces[-1])
                finally:
                    driver.pop()
                self._pieces.pop()
        except CudaError as exc:
            # The driver is done for, and the mapping stays for ever rather than that it be taken from under a DMA.
            if self not in _STUCK:
                log.warning("%s: is not unregistered: %s", self.name, exc)
                _STUCK.append(self)
            return
        self._data = None

    def check(self) -> None:
        """Raise CorruptionError if the account of pieces contradicts itself."""
        expected = [self.address + at for at in range(0, self.ready, self.piece)]
        if not 0 <= self.ready <= self.size or self._pieces != expected or (expected and self._data is None):
            raise CorruptionError(f"{self!r} has pieces at {[hex(piece) for piece in self._pieces]}")


#: Mappings that the driver would not let go of.
_STUCK: Final[list[Pinned]] = []


class Pinner:
    """The background thread that registers mappings, and undoes it."""

    def __init__(self) -> None:
        #: What to look at; None ends the thread. Its put may be called in the middle of anything, finalizers included.
        self._jobs: queue.SimpleQueue[Pinned | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="simm-pin", daemon=True)
        self._thread.start()

    def look_at(self, pinned: Pinned) -> None:
        """Register it, or undo it where it is ``gone``."""
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
                    self._jobs.put(pinned)  # behind the others: whoever is gone need not wait for all of it
            except Exception:
                log.exception("registering %r", pinned)
            del pinned  # while waiting we keep no mapping alive

    def close(self, timeout_s: float = EXIT_S) -> None:
        """End the thread after the piece that it is at."""
        self._jobs.put(None)
        self._thread.join(timeout_s)


_lock = threading.Lock()
_pinner: Pinner | None = None
_pinned: weakref.WeakKeyDictionary[ArenaReader, Pinned] = weakref.WeakKeyDictionary()


def pinned_for(reader: ArenaReader, driver: Driver, device: int) -> Pinned:
    """The registration of a reader's arena, begun in the background at the first call. 0.5 us."""
    pinned = _pinned.get(reader)
    return pinned if pinned is not None else _begin(reader, driver, device)


def _begin(reader: ArenaReader, driver: Driver, device: int) -> Pinned:
    global _pinner
    with _lock:
        pinned = _pinned.get(reader)
        if pinned is not None:
            return pinned
        pinned = Pinned(
            driver, f"arena {reader.name}", reader.data, reader.data_address, device, writable=not reader.data.readonly
        )
        try:
            if _pinner is None:
                _pinner = Pinner()
        except RuntimeError as exc:  # no more threads, or the interpreter is ending
            pinned.why = f"no thread to do it: {exc}"
        else:
            _pinner.look_at(pinned)
        weakref.finalize(reader, _gone, pinned).atexit = False
        _pinned[reader] = pinned
        return pinned


def _gone(pinned: Pinned) -> None:
    """A reader's end. Takes no lock and calls no driver: it may come in the middle of anything."""
    pinned.gone = True
    pinner = _pinner
    if pinner is not None and not pinned._driver.forked:
        pinner.look_at(pinned)


def close_all() -> None:
    """End the thread, undo all registrations: at a test's end. No copy may be under way."""
    global _pinner
    with _lock:
        pinner, _pinner = _pinner, None
        registered = list(_pinned.values())
        _pinned.clear()
    if pinner is not None:
        pinner.close()
    for pinned in registered:
        pinned.close()


def _at_exit() -> None:
    if _pinner is not None:
        _pinner.close()


def _after_fork_in_child() -> None:
    global _lock, _pinner
    _lock = threading.Lock()
    _pinner = None
    _pinned.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
