"""Memory registered with RDMA devices, and the one fabric of this process.

Registering pins pages and takes milliseconds a MiB. So memory is registered once with each rail, at its first use
there, and the result is kept in a *handle*, the :class:`Registration` that a :class:`~simm.host.buffers.Span` carries.
Nothing is looked up by address: an allocator may give the same address to other memory. A caller that registers by
address must deregister before it frees, as with any RDMA; a registered object is kept alive.

Finalizers run anywhere, and deregistering is a system call that may wait. So they only put regions and queue pairs on a
list, and the next thread that registers or does maintenance closes them. Regions and rails are the parent's after a
fork: the child forgets them and registers anew. Memory that cannot be registered goes through staging buffers, and is
tried again later, as the kernel may only have been short of memory.

A process has one fabric for each setting of devices, as regions belong to a rail. The first user opens it while the
others wait, and the last one closes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import TransportError
from ..host import fork, numa
from ..host.buffers import DeviceBuffer, Span
from .api import Absence, Access, Fabric, FabricError, QueuePair, Rail, Region

log = logging.getLogger("simm.client")

_LOCAL: Final = Access.LOCAL_WRITE
_READ_ONLY: Final = Access(0)
#: Seconds until memory that could not be registered is tried again: the first pause, which doubles, and the longest.
AGAIN_S: Final = (10.0, 600.0)


class Registration:
    """Memory that is registered with each rail at its first use there. Any thread may call it.

    ``keep`` is kept alive until the registration is closed.
    """

    __slots__ = ("__weakref__", "_failed", "_lock", "_regions", "address", "closed", "keep", "size", "writable")

    #: Whether what has failed may work later.
    tries_again = True

    def __init__(self, address: int, size: int, *, writable: bool = True, keep: Any = None) -> None:
        self.address = address
        self.size = size
        self.writable = writable
        self.keep = keep
        self.closed = False
        self._lock = threading.Lock()
        #: By the rail's id; the rail is kept, so that no other object gets the id.
        self._regions: dict[int, tuple[Rail, Region]] = {}
        #: By the rail's id, where it failed: when to try again (monotonic seconds), and the pause before that.
        self._failed: dict[int, tuple[float, float]] = {}
        _REGISTRATIONS.add(weakref.ref(self, _REGISTRATIONS.discard))

    def holds(self, address: int, size: int) -> bool:
        """Return True if it covers these bytes."""
        return self.address <= address and address + size <= self.address + self.size

    def __repr__(self) -> str:
        return f"<Registration {self.address:#x}, {self.size} bytes, {len(self._regions)} rails>"

    def lkey(self, rail: Rail, *, again: bool = False) -> int | None:
        """Return the local key for this rail, registered at the first call; None if that fails.

        That call takes milliseconds a MiB. After a failure the first call with ``again`` after a pause (AGAIN_S) tries
        it once more; all others return None at once.
        """
        known = self._regions.get(id(rail))
        if known is not None:
            return known[1].lkey
        # The lock is held for as long as registering takes: nobody waits for another thread's further try.
        if id(rail) in self._failed and (self._lock.locked() or not self._due(rail, again)):
            return None
        return self._register(rail, again)

    def _due(self, rail: Rail, again: bool) -> bool:
        """Return whether to try: for the first time, or again."""
        failed = self._failed.get(id(rail))
        return failed is None or (again and self.tries_again and time.monotonic() >= failed[0])

    def _register(self, rail: Rail, again: bool) -> int | None:
        close_dropped()
        with self._lock:
            known = self._regions.get(id(rail))
            if known is not None:
                return known[1].lkey
            failed = self._failed.get(id(rail))
            if self.closed or not self._due(rail, again):
                return None
            pause_s = AGAIN_S[0] if failed is None else min(2 * failed[1], AGAIN_S[1])
            if failed is not None:  # before it is tried, so that no other thread finds it due and waits for this one
                self._failed[id(rail)] = time.monotonic() + pause_s, pause_s
            try:
                region = self._made(rail)
            except FabricError as exc:
                self._failed[id(rail)] = time.monotonic() + pause_s, pause_s
                if failed is None:
                    self._complain(rail, exc)
                return None
            self._failed.pop(id(rail), None)
            self._regions[id(rail)] = rail, region
            return region.lkey

    def _made(self, rail: Rail) -> Region:
        """Register all of it. Raises FabricError."""
        return rail.register(self.address, self.size, self.access)

    def _complain(self, rail: Rail, exc: FabricError) -> None:
        """Log that there is no region."""
        log.warning("%d bytes are not registered and go through staging buffers: %s", self.size, exc)

    @property
    def access(self) -> Access:
        """Return what the device may do with it."""
        return _LOCAL if self.writable else _READ_ONLY

    def region(self, rail: Rail) -> Region | None:
        """Return the region on this rail, made at the first call; None if that fails."""
        self.lkey(rail)
        known = self._regions.get(id(rail))
        return known[1] if known is not None else None

    def close(self) -> None:
        """Deregister. Transfers in flight into or out of it fail. Twice is harmless."""
        with self._lock:
            self.closed = True
            regions, self._regions = self._regions, {}
        for _rail, region in regions.values():
            with contextlib.suppress(TransportError):
                region.close()
        self.keep = None

    def forget(self, rails: set[int] | None = None) -> None:
        """Forget regions of these rails (ids), or all, which are closed already."""
        if rails is None:  # after a fork
            self._lock = threading.Lock()
            self._regions = {}
            self._failed = {}
            return
        with self._lock:
            self._regions = {key: known for key, known in self._regions.items() if key not in rails}
            self._failed = {key: failed for key, failed in self._failed.items() if key not in rails}

    def __del__(self) -> None:
        regions = getattr(self, "_regions", None)
        if regions:
            close_later([region for _rail, region in regions.values()], self.keep)


def registered(span: Span) -> Span:
    """Return the span itself, with a registration of its own if it had none. A device buffer makes that itself."""
    if span.registration is None:
        if isinstance(span, DeviceBuffer):
            span.register()
        else:
            span.registration = Registration(span.address, span.size, writable=span.writable, keep=span.keep)
    return span


#: Without a lock, as a signal's handler may close a client while its thread registers: additions, removals and copies
#: of a set are one step each.
_REGISTRATIONS: Final[set[weakref.ref[Registration]]] = set()
#: Regions whose registration was dropped, and queue pairs, with the process they belong to and what keeps their memory.
_DROPPED: deque[tuple[int, Sequence[Region | QueuePair], Any]] = deque()


def close_later(dropped: Sequence[Region | QueuePair], keep: Any) -> None:
    """Have the next :func:`close_dropped` close these, and keep what they use until then. For finalizers."""
    _DROPPED.append((os.getpid(), dropped, keep))


def close_dropped() -> None:
    """Close what finalizers have left."""
    while _DROPPED:
        try:
            pid, dropped, _keep = _DROPPED.popleft()
        except IndexError:
            return
        if pid != os.getpid():
            continue
        for each in dropped:
            with contextlib.suppress(TransportError):
                each.close()


# --- the fabric ----------------------------------------------------------------------------------------


def _open(devices: str) -> Fabric | Absence:
    from .. import verbs  # which loads pyverbs

    return verbs.open_fabric(devices or None, numa=numa.own_node())


#: What opens a fabric for a setting of devices ("" for the default). Tests put a fabric in software here.
opener: Callable[[str], Fabric | Absence] = _open


class Shared:
    """The fabric of this process for one setting of devices, held by ``users``."""

    def __init__(self, devices: str) -> None:
        self.devices = devices
        self.users = 0
        self.lock = threading.Lock()
        self.fabric: Fabric | Absence | None = None
        #: The last user has closed it.
        self.closed = False

    def get(self) -> Fabric | Absence:
        """Return the fabric, opened by the first call; or why there is none. The last user's end allows another try."""
        with self.lock:
            if self.closed:
                return Absence("the client has been closed")
            if self.fabric is None:
                try:
                    self.fabric = opener(self.devices)
                except FabricError as exc:
                    return Absence(str(exc))
            return self.fabric


_SHARED: dict[str, Shared] = {}
_lock = threading.Lock()


def acquire(devices: str) -> Shared:
    """Return a share in the process's fabric. Opens nothing."""
    with _lock:
        shared = _SHARED.get(devices)
        if shared is None:
            shared = _SHARED[devices] = Shared(devices)
        shared.users += 1
        return shared


def release(shared: Shared) -> None:
    """Return a share. The last one closes the fabric, after all queue pairs."""
    with _lock:
        if _SHARED.get(shared.devices) is not shared:
            return  # the parent's
        shared.users -= 1
        if shared.users > 0:
            return
        del _SHARED[shared.devices]
    with shared.lock:
        fabric, shared.fabric = shared.fabric, None
        shared.closed = True
    if fabric is None or isinstance(fabric, Absence):
        return
    rails = {id(rail) for rail in fabric.rails}
    close_dropped()
    fabric.close()
    for registration in _registrations():
        registration.forget(rails)


def _registrations() -> list[Registration]:
    """Return all registrations that there are now."""
    return [made for each in _REGISTRATIONS.copy() if (made := each()) is not None]


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for shared in list(_SHARED.values()):
        fabric, shared.fabric = shared.fabric, None
        shared.lock = threading.Lock()
        if fabric is not None and not isinstance(fabric, Absence):
            fabric.abandon()
            fork.keep_forever(fabric)
    _SHARED.clear()
    for kept in _DROPPED:
        fork.keep_forever(kept)
    _DROPPED.clear()
    for registration in _registrations():
        fork.keep_forever(registration._regions)
        registration.forget()


fork.in_child(_after_fork_in_child)
