"""What SiMM asks of an RDMA network: the words that the paths use, and no library's.

``verbs.py`` is the implementation by pyverbs, the only one outside of tests; those have one in software that obeys
the same rules and breaks every promise that is not made here (order, atomicity, timing). Whoever stands above
imports this module alone.

The promises
------------
* Operations of one link begin in the order of posting. WRITEs are carried out in that order. What a READ brings may
  have been read at any time between its begin and its completion, each aligned 8-byte word at a time of its own.
* ``FENCED_READ`` begins after all earlier READs of that link have completed. Nothing else orders READs.
* A READ after WRITEs on the same link completes after these are in the peer's memory, visible to its processors.
* A chain is done when its last operation is: what it READ lies in local memory, and what it WROTE may be overwritten
  locally. Chains of a link are done in the order of posting.
* After :meth:`Link.close` nothing of that link touches local memory any more, and operations of the peer's end that
  arrive later are refused. It is the fence for local memory on one side, and for granted chunks on the other.
* An error on a link is for good: all that is under way fails, nothing more can be posted. Close it.
* A key (``rkey``) allows what its region or window does, no byte beyond; a window's ends with its invalidation.

Ownership: rail > region, link, window. Closing one closes what it owns first, twice does no harm. After a fork the
child must not touch any of it: :meth:`Fabric.abandon`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Final, NamedTuple, Protocol

from .errors import TransportError

READ: Final = 0
WRITE: Final = 1
FENCED_READ: Final = 2

#: (READ, WRITE or FENCED_READ, local address, its lkey, length in bytes, remote address, its rkey)
Op = tuple[int, int, int, int, int, int]


class Access(IntFlag):
    """What a region or window may be used for. Local reading is always allowed."""

    LOCAL_WRITE = 1
    REMOTE_READ = 2
    REMOTE_WRITE = 4
    #: Windows may be bound to it.
    WINDOWS = 8


class FabricError(TransportError):
    """A device, link or transfer failed. ``status`` is the completion's name where there was one."""

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.status = status


class Timeout(FabricError):
    """A chain was not done by its deadline. The link is in an unknown state: close it."""


class Limits(NamedTuple):
    """Of a device. ``region_bytes``: the most that one region covers; ``windows``: how many there can be, 0 without."""

    region_bytes: int
    windows: int
    reads: int
    depth: int


class LinkAddress(NamedTuple):
    """One end of a link, as the other end needs it. ``gid`` is 16 bytes, ``mtu`` in bytes.

    ``reads``: how many READs of the peer this end takes at a time.
    """

    gid: bytes
    lid: int
    qpn: int
    psn: int
    mtu: int
    reads: int


class Region(Protocol):
    """Registered memory. Keep it as long as anything may use its keys.

    ``address``: what its first byte is called in operations: where it lies, for host memory; for a dma-buf whatever the
    library could be made to say, which may be any number, 0 too.
    """

    address: int
    length: int
    lkey: int
    rkey: int

    def close(self) -> None:
        """Deregister. Links with operations under way on it fail."""


class Window(Protocol):
    """A memory window of one link: ``rkey`` is good between :meth:`Link.bind` and its invalidation."""

    rkey: int

    def close(self) -> None:
        """Free it."""


class Binding(NamedTuple):
    """What a window shall allow: REMOTE_WRITE to ``length`` bytes at ``address`` within ``region``."""

    window: Window
    region: Region
    address: int
    length: int


class Link(Protocol):
    """A reliable connection between two rails. For one thread at a time."""

    #: Operations that one chain may have, and that may be under way.
    depth: int

    @property
    def broken(self) -> str:
        """Why the link is of no use any more; empty while it is."""

    def address(self) -> LinkAddress:
        """This end, for the peer."""

    def connect(self, peer: LinkAddress) -> None:
        """Both ends must, in either order, before anything is posted. Raises FabricError."""

    def post(self, ops: Sequence[Op]) -> int:
        """Post one chain by one doorbell; its ticket. Raises FabricError, and UsageError for more than ``depth``.

        Waits where the queue has no room for the chain, as :meth:`wait` does with the default deadline.
        """

    def poll(self) -> int:
        """Tickets up to this one are done. Raises FabricError when one failed."""

    def wait(self, ticket: int, until: float) -> None:
        """Wait until the chain is done: by looking for a bounded time, then asleep. ``until``: monotonic seconds.

        Raises Timeout, FabricError.
        """

    def bind(self, bindings: Sequence[Binding]) -> None:
        """Bind windows, and wait for it: their ``rkey`` is a new one then. Raises FabricError."""

    def invalidate(self, windows: Sequence[Window]) -> None:
        """End what they allowed, and wait for it: no WRITE by their keys is begun after the return, and none is
        under way. Raises FabricError."""

    def close(self) -> None:
        """Destroy this end: see the promises."""


class Rail(Protocol):
    """One port of a device, open."""

    name: str
    gid: bytes
    lid: int
    mtu: int
    limits: Limits

    def register(self, address: int, length: int, access: Access) -> Region:
        """Register memory that exists and stays. Raises FabricError with the remedy (memlock, size)."""

    def register_dmabuf(self, fd: int, offset: int, length: int, access: Access) -> Region:
        """Register ``length`` bytes of a dma-buf from ``offset`` on; the region's ``address`` says what they are called
        in operations. The descriptor stays the caller's, who may close it at once. Raises FabricError with the reason.
        """

    def link(self) -> Link:
        """A new, unconnected link."""

    def window(self) -> Window:
        """A memory window. Raises FabricError where there are none."""

    def close(self) -> None:
        """Close everything on it."""


@dataclass(frozen=True)
class Absence:
    """Why there is no RDMA here, and what to do about it."""

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
        """In the child after a fork: forget everything, and see to it that nothing is ever closed from here."""
