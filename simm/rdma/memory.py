"""Registered memory of pyverbs: regions, and the memory windows bound to them.

A device may count a bound window as a user of its queue pair and of its region; then neither can be closed before the
window. So closing a queue pair or a region first frees the windows bound to it. The next bind allocates them again.
docs/rdma.md explains dma-buf regions and windows.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

from ..errors import UsageError
from .api import Access, Binding, FabricError, Limits, Neighbours, Window
from .ports import arp_answered, arp_asked, memlock_bytes
from .work_requests import MW_TYPE_2, Library, Stack, dmabuf_mr

_NO_DMABUF: Final = ": the device's driver takes none (mlx5's does from kernel 5.12 on)"
#: What a refusal of a dma-buf means, by the name of its errno. One number has two names; Python reports either.
_DMABUF_HINTS: Final = {
    "EOPNOTSUPP": _NO_DMABUF,
    "ENOTSUP": _NO_DMABUF,
    "ENOSYS": _NO_DMABUF,
    "EBADF": ": that descriptor is no dma-buf",
    "EINVAL": ": the device does not take this one, or not these rights to it",
    "ENOMEM": ": the device cannot map so much of it (the GPU's BAR, the IOMMU)",
    "EFAULT": ": the GPU's memory cannot be reached from that device",
}
_HINTS: Final = {
    "EFAULT": ": that memory is not mapped, or not writable",
    "EINVAL": ": the device does not take such memory or rights",
}


class Domain:
    """A protection domain with its regions and windows. ``lock`` guards them. It is of the port with this GID."""

    name: str
    gid: bytes
    #: Whether the port's link layer is Ethernet, and its network device there.
    ethernet: bool
    netdev: str
    library: Library
    pd: Any
    limits: Limits
    lock: threading.RLock
    regions: set[VerbsRegion]
    windows: set[VerbsWindow]

    def reaches(self, gid: bytes, *, neighbours: Neighbours | None = None) -> bool:
        """See :class:`simm.rdma.api.Rail`."""
        if not self.ethernet:
            return True
        if neighbours is None:
            return arp_asked(gid, self.gid, self.netdev)
        return arp_answered(gid, neighbours, self.netdev)


class WindowUser(Protocol):
    """What windows are bound to: a queue pair."""

    windows: set[VerbsWindow]


class VerbsRegion:
    """A memory region; see :class:`simm.rdma.api.Region`.

    With ``dmabuf``, the descriptor of a dma-buf, ``address`` is the offset in it.
    """

    def __init__(
        self, rail: Domain, address: int, length: int, access: Access, dmabuf: int | None = None
    ) -> None:
        if length < 1 or address < (1 if dmabuf is None else 0):
            raise FabricError(f"cannot register {length} bytes at {address:#x}", "EINVAL")
        if length > rail.limits.region_bytes:
            raise FabricError(
                f"{rail.name}: a region has at most {rail.limits.region_bytes} bytes: register pieces", "EINVAL"
            )
        if access & (Access.REMOTE_WRITE | Access.WINDOWS) and not access & Access.LOCAL_WRITE:
            raise FabricError("remote writing and windows need LOCAL_WRITE", "EINVAL")
        self.address, self.length, self.access = address, length, access
        self.rail = rail
        library = rail.library
        rights = sum(value for right, value in library.rights if access & right)
        stack = Stack(library)
        try:
            if dmabuf is None:
                self.mr = stack.make("a region", lambda: library.MR(rail.pd, length, rights, address=address))
            else:
                self.mr = stack.make("a region", lambda: dmabuf_mr(library, rail.pd, dmabuf, address, length, rights))
        except FabricError as error:
            what = f"{rail.name}: cannot register {length} bytes"
            if dmabuf is not None:
                hint = _DMABUF_HINTS.get(error.status, "")
                raise FabricError(f"{what} of a dma-buf: {error}{hint}", error.status) from error
            if error.status in ("ENOMEM", "EPERM"):
                limit = memlock_bytes()
                raise FabricError(
                    f"{what}: out of lockable memory, or of the device's regions; the limit is "
                    f"{'unlimited' if limit is None else f'{limit} bytes'}: raise it (ulimit -l unlimited; in a "
                    "systemd unit LimitMEMLOCK=infinity; in a container that runs as root the capability IPC_LOCK)",
                    error.status,
                ) from error
            hint = _HINTS.get(error.status, "")
            raise FabricError(f"{what}: {error}{hint}", error.status) from error
        self._stack = stack
        self.lkey: int = self.mr.lkey
        self.rkey: int = self.mr.rkey
        self.windows: set[VerbsWindow] = set()
        self.open = True

    def close(self) -> None:
        with self.rail.lock:
            if not self.open:
                return
            for window in list(self.windows):
                window.drop()
            self._stack.close()
            self.open = False
            self.rail.regions.discard(self)


class VerbsWindow:
    """A memory window of type 2; see :class:`simm.rdma.api.Window`."""

    def __init__(self, rail: Domain) -> None:
        self.rail = rail
        self.rkey = 0
        self.region: VerbsRegion | None = None
        self.qp: WindowUser | None = None
        self.open = True
        self.mw: Any = None
        #: The word to write new keys to; None if it was not found.
        self.tag: ctypes.c_uint32 | None = None
        self._stack = Stack(rail.library)
        self.ready()

    def ready(self) -> Any:
        """Return the pyverbs object, allocated again if it was freed."""
        if self.mw is None:
            library = self.rail.library
            try:
                self.mw = self._stack.make("a memory window", lambda: library.MW(self.rail.pd, MW_TYPE_2))
            except FabricError as error:
                raise FabricError(f"{self.rail.name}: {error}", error.status) from error
        return self.mw

    def bound(self, qp: WindowUser, region: VerbsRegion, rkey: int) -> None:
        """Record a bind that was posted."""
        self.qp, self.region, self.rkey = qp, region, rkey
        qp.windows.add(self)
        region.windows.add(self)
        if self.tag is not None:
            self.tag.value = rkey

    def unbound(self) -> None:
        """Record that the window allows nothing any more."""
        if self.qp is not None:
            self.qp.windows.discard(self)
        if self.region is not None:
            self.region.windows.discard(self)
        self.qp = self.region = None

    def drop(self) -> None:
        """Free the device's window, bound or not. The next bind allocates it again."""
        self.tag = None
        self._stack.close()
        self.mw = None
        self.unbound()

    def close(self) -> None:
        with self.rail.lock:
            if self.open:
                self.drop()
                self.open = False
                self.rail.windows.discard(self)


def own_window(rail: Domain, window: Window) -> VerbsWindow:
    """Return an open window of this rail. Raises UsageError for any other."""
    if not isinstance(window, VerbsWindow) or window.rail is not rail or not window.open:
        raise UsageError("a window of another rail, or a closed one")
    return window


def check_bindings(rail: Domain, bindings: Sequence[Binding]) -> None:
    """Raise UsageError unless each window is free, named once, and bound within an open region of this rail."""
    taken: set[VerbsWindow] = set()
    for window, region, address, length in bindings:
        own = own_window(rail, window)
        if own in taken or own.qp is not None:
            raise UsageError("a window that is bound already")
        if not isinstance(region, VerbsRegion) or region.rail is not rail or not region.open:
            raise UsageError("a region of another rail, or a closed one")
        if length < 1 or address < region.address or address + length > region.address + region.length:
            raise UsageError(f"{length} bytes at {address:#x} are not within the region")
        taken.add(own)
