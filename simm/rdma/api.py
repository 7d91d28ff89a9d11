"""What SiMM asks of an RDMA network, as protocols that name no library.

``verbs.py`` implements them with pyverbs, ``tests/support/fake_fabric.py`` in software. The latter keeps the promises
below and breaks everything that is not promised: order, atomicity, timing. The paths above import this module only.

Promises
--------
* Operations of one queue pair begin in the order of posting. WRITEs are carried out in that order. The bytes of a READ
  may be read at any time between its begin and its completion, each aligned 8-byte word at its own time.
* ``FENCED_READ`` begins after all earlier READs of its queue pair have completed. Nothing else orders READs.
* A READ that follows WRITEs on the same queue pair completes after these are in the peer's memory and visible to its
  processors.
* A chain is done when its last operation is: its READs have arrived in local memory, and local memory that it WROTE
  from may be overwritten. Chains of a queue pair are done in the order of posting.
* After :meth:`QueuePair.close` no operation of that queue pair touches local memory, and later operations of the peer's
  end are refused. It is the fence for local memory on one side, and for granted chunks on the other.
* An error on a queue pair is final: everything in flight fails, and nothing more can be posted. Close it.
* A key (``rkey``) allows what its region or window allows, and no byte beyond. A window's key ends with its
  invalidation.

A rail owns its regions, queue pairs and windows. Closing an object first closes what it owns; a second close does
nothing. After a fork the child must touch none of it: :meth:`Fabric.abandon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, NamedTuple, Protocol

from ..errors import TransportError

READ: Final = 0
WRITE: Final = 1
FENCED_READ: Final = 2

#: (READ, WRITE or FENCED_READ, local address, its lkey, length in bytes, remote address, its rkey)
Op = tuple[int, int, int, int, int, int]


class Access(IntFlag):
    """The uses that a region or window allows. Local reading is always allowed."""

    LOCAL_WRITE = 1
    REMOTE_READ = 2
    REMOTE_WRITE = 4
    #: Binding windows to it.
    WINDOWS = 8


class FabricError(TransportError):
    """A device, queue pair or transfer failed. ``status`` is the name of the completion status, if there was one."""

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.status = status


class Timeout(FabricError):
    """A chain was not done by its deadline. The queue pair's state is unknown: close it."""


class Limits(NamedTuple):
    """Limits of a device: bytes of one region, number of windows (0: none), READs in flight, operations in a chain."""

    region_bytes: int
    windows: int
    reads: int
    depth: int


class QueuePairAddress(NamedTuple):
    """One end of a connection, as the other end needs it. ``gid`` has 16 bytes, ``mtu`` is in bytes.

    ``reads`` is the number of the peer's READs that this end accepts at a time.
    """

    gid: bytes
    lid: int
    qpn: int
    psn: int
    mtu: int
    reads: int


class Region(Protocol):
    """Registered memory. Keep it as long as anything may use its keys.

    ``address`` names its first byte in operations. For host memory that is the virtual address; for a dma-buf it may be
    any number, including 0.
    """

    address: int
    length: int
    lkey: int
    rkey: int

    def close(self) -> None:
        """Deregister. Queue pairs with operations in flight on it fail."""


class Window(Protocol):
    """A memory window of one queue pair. ``rkey`` is valid from :meth:`QueuePair.bind` until its invalidation."""

    rkey: int

    def close(self) -> None:
        """Free it."""


class Binding(NamedTuple):
    """What a window allows: REMOTE_WRITE to ``length`` bytes at ``address`` within ``region``."""

    window: Window
    region: Region
    address: int
    length: int


class QueuePair(Protocol):
    """One end of a reliable connection between two rails. For one thread at a time."""

    #: The largest number of operations in a chain, and in flight.
    depth: int

    @property
    def broken(self) -> str:
        """Why the queue pair failed; empty while it works."""

    def address(self) -> QueuePairAddress:
        """Return this end's address for the peer."""

    def connect(self, peer: QueuePairAddress) -> None:
        """Connect to the peer. Both ends do so, in either order, before the first post. Raises FabricError."""

    def post(self, ops: Sequence[Op]) -> int:
        """Post one chain with one doorbell and return its ticket. Raises FabricError; UsageError above ``depth``.

        Waits while the queue has no room for the chain, as :meth:`wait` does with the default deadline.
        """

    def poll(self) -> int:
        """Return the ticket of the last chain that is done. Raises FabricError if one failed."""

    def wait(self, ticket: int, until: float) -> None:
        """Wait until the chain is done: poll for a bounded time, then sleep. ``until`` is in monotonic seconds.

        Raises Timeout, FabricError.
        """

    def bind(self, bindings: Sequence[Binding]) -> None:
        """Bind windows and wait until that is done. Their ``rkey`` is a new one then. Raises FabricError."""

    def invalidate(self, windows: Sequence[Window]) -> None:
        """Invalidate windows and wait until that is done. Raises FabricError.

        After the return no WRITE by their keys is in flight, and none begins.
        """

    def close(self) -> None:
        """Destroy this end; see the promises."""


class Neighbours(Protocol):
    """The addresses on our networks that this host knows, at one time."""

    def known(self, address: str, netdev: str) -> bool | None:
        """Return whether its hardware address is known at this network device; None if there is no entry. O(1)."""


class Rail(Protocol):
    """One port of an open device."""

    name: str
    gid: bytes
    lid: int
    mtu: int
    limits: Limits

    def register(self, address: int, length: int, access: Access) -> Region:
        """Register memory that stays mapped. Raises FabricError with the remedy (memlock, size)."""

    def register_dmabuf(self, fd: int, offset: int, length: int, access: Access) -> Region:
        """Register ``length`` bytes of a dma-buf from ``offset`` on. Raises FabricError with the reason.

        The region's ``address`` names them in operations. The caller may close the descriptor at once.
        """

    def reaches(self, gid: bytes, *, neighbours: Neighbours | None = None) -> bool:
        """Return False while nobody answers for a peer's address, so that connecting to it would wait. Never waits.

        The network is asked. To look again for an address that gave False, pass ``neighbours``: nobody is asked then.
        """

    def queue_pair(self) -> QueuePair:
        """Return a new, unconnected queue pair."""

    def window(self) -> Window:
        """Return a new memory window. Raises FabricError if there are none."""

    def close(self) -> None:
        """Close the rail and everything on it."""


@dataclass(frozen=True)
class Absence:
    """Why there is no RDMA here, and the remedy."""

    why: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}" if self.remedy else self.why


class Fabric(Protocol):
    """The rails of this process."""

    rails: Sequence[Rail]

    def close(self) -> None:
        """Close all rails."""

    def abandon(self) -> None:
        """Mark everything unusable in a forked child, so that the child never closes any of it."""
