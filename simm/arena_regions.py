"""An arena registered on the rails of its node, piece by piece.

What may be done to it from outside is what its parts' registrations say, whatever a peer believes:

    header, shards, slots   read
    visited                 read and written: a byte a slot, and the worst that it can do is to keep an entry longer
    ledger                  not registered
    data                    read; written by memory windows, or, on devices without, by whoever has a lane

Registering pins pages and holds the interpreter meanwhile, 0.1 to 2 s for a GiB. Hence pieces, one a call of
:meth:`Registration.step`, with the loop's turns in between; and because some devices limit what one region covers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import messages as M
from .constants import PAGE_BYTES
from .errors import SegmentError
from .fabric import Access, FabricError, Rail, Region
from .layout import Word
from .reader import ArenaReader
from .shm import AttachedSegment

PIECE_BYTES: Final = 1 << 30
#: An answer to RDMA_OPEN has 36 bytes for each region, and a frame a MiB.
REGIONS_MAX: Final = 16_384


class Piece(NamedTuple):
    """Bytes ``start`` to ``start + length`` of the segment, mapped here at ``address``."""

    start: int
    length: int
    address: int
    access: Access
    flags: int
    data: bool


def map_meta(arena: ArenaReader) -> NDArray[np.uint64]:
    """Header, shards and slots mapped once more, for stores too, though none is made.

    Up to Linux 6.1 pages of a read-only shared map cannot be pinned, not even for reading (EFAULT): the kernel asks for
    writable ones and forces its way into private maps only. Raises FabricError when the segment is another one now.
    """
    try:
        segment = AttachedSegment.open(arena.name, writable=True)
        try:
            meta = np.frombuffer(segment.map(0, arena.geometry.reader_bytes, writable=True), np.uint64)
        finally:
            segment.close()  # the map stays with its view
    except SegmentError as exc:
        raise FabricError(str(exc)) from exc
    if int(meta[Word.INCARNATION]) != arena.incarnation:
        raise FabricError(f"{arena.name} is another arena now")
    return meta


def pieces(arena: ArenaReader, meta: NDArray[np.uint64], *, windows: bool, most: int) -> list[Piece]:
    """What is registered on one rail, in pieces of at most ``most`` bytes (a multiple of the page size)."""
    geometry = arena.geometry
    data = Access.REMOTE_READ | Access.LOCAL_WRITE | (Access.WINDOWS if windows else Access.REMOTE_WRITE)
    parts = (
        Piece(0, geometry.reader_bytes, meta.ctypes.data, Access.REMOTE_READ, 0, False),
        Piece(
            geometry.visited_offset, geometry.ledger_offset - geometry.visited_offset,
            np.frombuffer(arena.visited, np.uint8).ctypes.data,
            Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE, M.REGION_WRITABLE, False,
        ),
        Piece(
            geometry.data_offset, geometry.data_bytes, arena.data_address, data,
            0 if windows else M.REGION_WRITABLE, True,
        ),
    )  # fmt: skip
    return [
        part._replace(start=part.start + at, length=min(most, part.length - at), address=part.address + at)
        for part in parts
        for at in range(0, part.length, most)
    ]


class Registration:
    """The regions of one arena on all rails. They end with their rails. Raises FabricError when there are too
    many, or the arena is gone.

    Args:
        arena: mapped for writing; kept as long as this lives, as its maps must stay as long as the regions.
        windows: chunks are to be written by memory windows.
        piece_bytes: the most that is registered at a time.
    """

    def __init__(
        self, arena: ArenaReader, rails: Sequence[Rail], *, windows: bool, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.arena = arena
        self._meta = map_meta(arena)
        self.rails = rails
        self.windows = windows
        #: What is registered, as a client is told.
        self.regions: list[M.RdmaRegion] = []
        self.done_bytes = 0
        self._todo: deque[tuple[int, Piece]] = deque()
        #: For each rail: bytes of its pieces, and the regions of the data, in order.
        self._most: list[int] = []
        self._data: list[list[Region]] = []
        for number, rail in enumerate(rails):
            most = min(piece_bytes, rail.limits.region_bytes) // PAGE_BYTES * PAGE_BYTES
            if most <= 0:
                raise FabricError(f"{rail.name} registers no more than {rail.limits.region_bytes} bytes at a time")
            # A device's limit cannot be helped; our own gives way before an arena has too many pieces.
            enough = REGIONS_MAX // (2 * len(rails))
            while arena.geometry.size // most > enough and most * 2 <= rail.limits.region_bytes:
                most *= 2
            self._most.append(most)
            self._data.append([])
            self._todo += [(number, piece) for piece in pieces(arena, self._meta, windows=windows, most=most)]
        if len(self._todo) > REGIONS_MAX:
            raise FabricError(
                f"{len(self._todo)} regions would be needed, {REGIONS_MAX} are possible: the devices register no more "
                f"than {min(self._most)} bytes at a time"
            )
        self.total_bytes = sum(piece.length for _, piece in self._todo)

    def step(self) -> bool:
        """Register the next piece; are there more? Raises FabricError."""
        if not self._todo:
            return False
        number, piece = self._todo[0]
        region = self.rails[number].register(piece.address, piece.length, piece.access)
        self._todo.popleft()
        if piece.data:
            self._data[number].append(region)
        self.regions.append(
            M.RdmaRegion(number, piece.flags, piece.start, piece.length, piece.address, region.rkey)
        )
        self.done_bytes += piece.length
        return bool(self._todo)

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        return f"{self.done_bytes >> 20} of {self.total_bytes >> 20} MiB"

    def address_of(self, offset: int) -> int:
        """Where a byte of the data lies in this process."""
        return self.arena.data_address + offset - self.arena.data_offset

    def region_of(self, rail: int, offset: int, length: int) -> Region | None:
        """The region in which all of these bytes of the data lie; None where they cross the end of a piece."""
        most = self._most[rail]
        at = offset - self.arena.data_offset
        first = at // most
        return self._data[rail][first] if first == (at + length - 1) // most else None
