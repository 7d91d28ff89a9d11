"""The messages on the control connection of an RDMA client, between it and the server's endpoint.

COMMIT, GRANT and RETURN_GRANTS of ``wire/messages.py`` travel on it too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..rpc import message, structure


@structure("16s H H I s")
class RdmaRail(NamedTuple):
    """One rail of the server: its port's GID and LID (0 on Ethernet), its MTU in bytes, and its name there."""

    gid: bytes
    lid: int
    mtu: int
    reads: int
    name: str


@structure("H H Q Q Q I")
class RdmaRegion(NamedTuple):
    """A registered part of the arena on one rail: segment bytes from ``start`` on lie at ``address``.

    ``rkey`` always allows READs; WRITEs only with :data:`REGION_WRITABLE` in ``flags``.
    """

    rail: int
    flags: int
    start: int
    length: int
    address: int
    rkey: int


#: Keys in one RDMA_GRANTED: those of the grants of one answer, by each link.
RDMA_KEYS_MAX: Final = 1 << 16
#: Regions in one RDMA_OPENED, those of all rails: each has 32 bytes of a frame's MiB.
RDMA_REGIONS_MAX: Final = 1 << 14
#: Bit of RdmaRegion.flags: ``rkey`` allows WRITEs.
REGION_WRITABLE: Final = 1
#: Bit of RdmaOpened.flags: the client writes each chunk with the rkey that came with its grant.
RDMA_WINDOWS: Final = 1


@message(0x50, "I")
class RdmaOpen(NamedTuple):
    """Client to endpoint, after HELLO. Answer: RDMA_OPENED, or ERROR with UNAVAILABLE and the reason."""

    flags: int


@message(0x51, "Q Q I [RdmaRail] [RdmaRegion]", regions=RDMA_REGIONS_MAX)
class RdmaOpened(NamedTuple):
    """The segment's size, its worker's incarnation, the server's rails, and the arena's regions on each."""

    size: int
    incarnation: int
    flags: int
    rails: list[RdmaRail]
    regions: list[RdmaRegion]


@message(0x52, "H H 16s I I H H")
class RdmaConnect(NamedTuple):
    """Connect the server's rail ``rail`` to this queue pair. Answer: RDMA_CONNECTED, or ERROR."""

    rail: int
    lid: int
    gid: bytes
    qpn: int
    psn: int
    mtu: int
    reads: int


@message(0x53, "H H 16s I I H H")
class RdmaConnected(NamedTuple):
    """The server's queue pair of link ``link``, ready for READs and WRITEs."""

    link: int
    lid: int
    gid: bytes
    qpn: int
    psn: int
    mtu: int
    reads: int


@message(0x54, "H")
class RdmaDisconnect(NamedTuple):
    """Destroy the server's end of link ``link``. After the answer, DONE, nothing that it sent can arrive."""

    link: int


@message(0x55, "*B *QQI *I", keys=RDMA_KEYS_MAX)
class RdmaGranted(NamedTuple):
    """Answer to COMMIT and GRANT: as COMMITTED, and with :data:`RDMA_WINDOWS` one rkey per grant and link."""

    statuses: list[int]
    grants: list[tuple[int, int, int]]
    keys: list[int]
