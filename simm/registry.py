"""Memory registered with RDMA devices, and the one fabric of this process.

Registering pins pages and takes milliseconds a MiB, so it is done once, when memory is first used by RDMA and on the
rails that use it, and kept in a *handle*, the :class:`Registration` that a :class:`~simm.buffers.Span` carries. Nothing
is ever looked up by address: an allocator that gives an address to somebody else would make that a wrong answer.

What can go wrong
-----------------
* *Memory is freed, and its address used again, under a registration.* The device goes on using the old pages. Whoever
  registers by address alone must deregister before freeing, as with any RDMA; what is registered as an object is kept
  alive by the registration.
* *A registration is dropped in the middle of the night*, or a whole client: finalizers run anywhere, and deregistering
  is a system call that may wait. They only put regions and links on a list, which the next to register or tend works
  off.
* *Registering fails* (RLIMIT_MEMLOCK, a device's limit): said once, and that memory goes through the bounce pool.
* *A fork*: regions and rails are the parent's. The child forgets them and registers anew at its first use.

One fabric per process and setting of devices: opening a device costs milliseconds, and regions are a rail's, so that
two clients with a fabric each would register everything twice. It is opened at the first need, by whoever comes first
while the others wait, and closed with its last user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from .buffers import Span
from .errors import TransportError
from .fabric import Absence, Access, Fabric, FabricError, Link, Rail, Region

log = logging.getLogger("simm.client")

_LOCAL: Final = Access.LOCAL_WRITE
_READ_ONLY: Final = Access(0)


class Registration:
    """Memory that is registered with each rail at its first use there. Any thread may call it.

    ``keep`` is kept alive until it is closed.
    """

    __slots__ = ("__weakref__", "_failed", "_lock", "_regions", "address", "closed", "keep", "size", "writable")

    def __init__(self, address: int, size: int, *, writable: bool = True, keep: Any = None) -> None:
        self.address = address
        self.size = size
        self.writable = writable
        self.keep = keep
        self.closed = False
        self._lock = threading.Lock()
        #: By the rail's id, with the rail, so that the id stays its own.
        self._regions: dict[int, tuple[Rail, Region]] = {}
        self._failed: set[int] = set()
        _REGISTRATIONS.add(self)

    def holds(self, address: int, size: int) -> bool:
        """Does it cover these bytes?"""
        return self.address <= address and address + size <= self.address + self.size

    def __repr__(self) -> str:
        return f"<Registration {self.address:#x}, {self.size} bytes, {len(self._regions)} rails>"

    def lkey(self, rail: Rail) -> int | None:
        """The local key for this rail, registered if need be; None where that cannot be done."""
        known = self._regions.get(id(rail))
        if known is not None:
            return known[1].lkey
        return self._register(rail)

    def _register(self, rail: Rail) -> int | None:
        sweep()
        with self._lock:
            known = self._regions.get(id(rail))
            if known is not None:
                return known[1].lkey
            if self.closed or id(rail) in self._failed:
                return None
            try:
                region = self._made(rail)
            except FabricError as exc:
                self._failed.add(id(rail))
                self._complain(rail, exc)
                return None
            self._regions[id(rail)] = rail, region
            return region.lkey

    def _made(self, rail: Rail) -> Region:
        """A region of it all. Raises FabricError."""
        return rail.register(self.address, self.size, self.access)

    def _complain(self, rail: Rail, exc: FabricError) -> None:
        """Say that there is none."""
        log.warning("%d bytes are not registered and go through buffers of ours: %s", self.size, exc)

    @property
    def access(self) -> Access:
        """What our own device may do with it."""
        return _LOCAL if self.writable else _READ_ONLY

    def region(self, rail: Rail) -> Region | None:
        """The region on this rail, made if need be; None where that cannot be done."""
        self.lkey(rail)
        known = self._regions.get(id(rail))
        return known[1] if known is not None else None

    def rails(self) -> list[Rail]:
        """Where it is registered by now."""
        with self._lock:
            return [rail for rail, _region in self._regions.values()]

    def close(self) -> None:
        """Deregister. Transfers into or out of it that are under way fail. Twice is harmless."""
        with self._lock:
            self.closed = True
            regions, self._regions = self._regions, {}
        for _rail, region in regions.values():
            with contextlib.suppress(TransportError):
                region.close()
        self.keep = None

    def forget(self, rails: set[int] | None = None) -> None:
        """Regions of these rails (ids), or all of them, are gone: nothing is to be closed here."""
        if rails is None:  # after a fork
            self._lock = threading.Lock()
            self._regions = {}
            self._failed = set()
            return
        with self._lock:
            self._regions = {key: known for key, known in self._regions.items() if key not in rails}
            self._failed -= rails

    def __del__(self) -> None:
        regions = getattr(self, "_regions", None)
        if regions:
            orphan([region for _rail, region in regions.values()], self.keep)


def registered(span: Span) -> Span:
    """The span itself, with a registration of its own if it has none; GPU memory stays without (``gpudirect.py`` has
    the form that knows it)."""
    if type(span) is Span and span.registration is None:
        span.registration = Registration(span.address, span.size, writable=span.writable, keep=span.keep)
    return span


_REGISTRATIONS: weakref.WeakSet[Registration] = weakref.WeakSet()
#: Regions whose registration was dropped, and links, with the process they belong to and what keeps their memory.
_ORPHANS: deque[tuple[int, Sequence[Region | Link], Any]] = deque()


def orphan(dropped: Sequence[Region | Link], keep: Any) -> None:
    """From a finalizer: to be closed by the next :func:`sweep`, and what they use to be kept until then."""
    _ORPHANS.append((os.getpid(), dropped, keep))


def sweep() -> None:
    """Close what was dropped."""
    while _ORPHANS:
        try:
            pid, dropped, _keep = _ORPHANS.popleft()
        except IndexError:
            return
        if pid != os.getpid():
            continue
        for each in dropped:
            with contextlib.suppress(TransportError):
                each.close()


# --- the fabric ----------------------------------------------------------------------------------------


def _open(devices: str) -> Fabric | Absence:
    from . import verbs  # pyverbs is looked for at the first need only

    return verbs.open_fabric(devices or None)


#: What opens a fabric for a setting of devices ("" for the default). Tests put a fabric in software here.
opener: Callable[[str], Fabric | Absence] = _open


class Shared:
    """The fabric of this process for one setting of devices, held by ``users``."""

    def __init__(self, devices: str) -> None:
        self.devices = devices
        self.users = 0
        self.lock = threading.Lock()
        self.fabric: Fabric | Absence | None = None
        #: All have let go: nobody would close it any more.
        self.closed = False

    def get(self) -> Fabric | Absence:
        """The fabric, opened if need be; or why there is none, which is not tried again before all have let go."""
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
    """A share in the process's fabric. Opens nothing yet."""
    with _lock:
        shared = _SHARED.get(devices)
        if shared is None:
            shared = _SHARED[devices] = Shared(devices)
        shared.users += 1
        return shared


def release(shared: Shared) -> None:
    """Give it back; the last one closes the fabric, after the links of all."""
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
    sweep()
    fabric.close()
    for registration in list(_REGISTRATIONS):
        registration.forget(rails)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for shared in list(_SHARED.values()):
        fabric, shared.fabric = shared.fabric, None
        shared.lock = threading.Lock()
        if fabric is not None and not isinstance(fabric, Absence):
            fabric.abandon()
            _GRAVEYARD.append(fabric)
    _SHARED.clear()
    _GRAVEYARD.extend(_ORPHANS)
    _ORPHANS.clear()
    for registration in list(_REGISTRATIONS):
        _GRAVEYARD.append(registration._regions)
        registration.forget()


#: In a forked child: the parent's objects, whose finalizers must never run here.
_GRAVEYARD: list[Any] = []

os.register_at_fork(after_in_child=_after_fork_in_child)
