"""The shard map: as messages carry it, as its readers hold it, and as the manager's tables. No I/O.

Clients route by it, data servers learn from it which shards are theirs, the manager builds it.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..constants import NO_OWNER, SHARD_COUNT
from ..errors import CorruptionError, RemoteProtocolError
from ..wire.messages import MapOffer, MapReply, WorkerInfo
from .nodes import is_word

#: A worker index for each shard, or NO_OWNER.
WorkerIndexes = NDArray[np.uint16]
NONE: Final = np.uint16(NO_OWNER)

_SINCE_BYTES: Final = 8 * SHARD_COUNT


def pack_since(since: array[int]) -> bytes:
    """Pack each shard's epoch as a map carries it. Few epochs differ: zlib makes some KiB of 128."""
    return zlib.compress(_swapped(since).tobytes(), 1)


def unpack_since(packed: bytes) -> array[int]:
    """Undo :func:`pack_since`; b"" means zeros. Raises RemoteProtocolError. Never allocates more than a map."""
    since = array("Q", bytes(_SINCE_BYTES))
    if not packed:
        return since
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, _SINCE_BYTES + 1)
    except zlib.error as exc:
        raise RemoteProtocolError(f"the map's epochs cannot be unpacked: {exc}") from None
    if len(raw) != _SINCE_BYTES or not unpacker.eof or unpacker.unused_data:
        raise RemoteProtocolError("the map's epochs are not one for each shard")
    since = array("Q")
    since.frombytes(raw)
    return _swapped(since)


class ShardMap:
    """One epoch's map, decoded once and read often.

    Raises RemoteProtocolError for an inconsistent one.
    """

    __slots__ = ("_since", "_since_packed", "cluster", "epoch", "owners", "previous", "workers")

    def __init__(self, msg: MapReply | MapOffer) -> None:
        if len(msg.owners) != 2 * SHARD_COUNT:
            raise RemoteProtocolError(f"a map of {len(msg.owners)} bytes instead of {2 * SHARD_COUNT}")
        owners = array("H")
        owners.frombytes(msg.owners)
        self.epoch = msg.epoch
        self.cluster = msg.cluster
        self.workers: Sequence[WorkerInfo] = msg.workers
        #: Position in ``workers`` for each shard, or NO_OWNER.
        self.owners = _swapped(owners)
        #: The same for the previous owners of moving shards.
        self.previous: Mapping[int, int] = dict(msg.previous)
        if not all(is_word(info.node) and is_word(info.host) and info.uds.isprintable() for info in msg.workers):
            raise RemoteProtocolError("the map has a name or an address that cannot be one")
        count = len(msg.workers)
        table = np.frombuffer(msg.owners, "<u2")
        if bool(((table >= count) & (table != NO_OWNER)).any()):
            raise RemoteProtocolError("the map names an owner that it does not list")
        if len(self.previous) != len(msg.previous):
            raise RemoteProtocolError("the map names two previous owners of one shard")
        if any(shard >= SHARD_COUNT or at >= count for shard, at in self.previous.items()):
            raise RemoteProtocolError("the map names a previous owner or a shard that does not exist")
        if any(self.owners[shard] in (NO_OWNER, at) for shard, at in self.previous.items()):
            raise RemoteProtocolError("the map moves a shard from its owner, or to no owner")
        self._since_packed = msg.since
        self._since: array[int] | None = None

    def __repr__(self) -> str:
        return f"<ShardMap epoch={self.epoch} workers={len(self.workers)} moving={len(self.previous)}>"

    @property
    def since(self) -> array[int]:
        """The epoch in which each shard got its owner. Decoded at the first use: most clients never need it."""
        if self._since is None:
            self._since = unpack_since(self._since_packed)
        return self._since


class Tables:
    """The manager's knowledge of each shard: worker indexes and epochs."""

    __slots__ = ("owners", "preferred", "previous", "since")

    def __init__(self, shards: int = SHARD_COUNT) -> None:
        self.owners: WorkerIndexes = np.full(shards, NONE)
        #: The last worker that got the shard by plan.
        self.preferred: WorkerIndexes = np.full(shards, NONE)
        #: The worker that may have values which the owner lacks; NO_OWNER if the shard is not moving.
        self.previous: WorkerIndexes = np.full(shards, NONE)
        #: The epoch of its last change of owner.
        self.since: NDArray[np.uint64] = np.zeros(shards, np.uint64)

    def copy(self) -> Tables:
        """Return an independent copy."""
        made = Tables(0)
        made.owners, made.preferred = self.owners.copy(), self.preferred.copy()
        made.previous, made.since = self.previous.copy(), self.since.copy()
        return made

    def named(self) -> NDArray[np.bool_]:
        """Return, by worker index, whether some shard has it as its owner or previous owner. O(shards)."""
        found = np.zeros(NO_OWNER + 1, np.bool_)
        found[self.owners] = found[self.previous] = True
        return found

    def renumber(self, table: Sequence[int]) -> None:
        """Call worker ``at`` ``table[at]`` from now on; NO_OWNER forgets it, and owners become the preferred ones."""
        names = np.full(NO_OWNER + 1, NONE)
        names[: len(table)] = table
        self.owners = names[self.owners]
        self.previous = np.where(self.owners == NONE, NONE, names[self.previous])
        preferred = names[self.preferred]
        self.preferred = np.where(preferred == NONE, self.owners, preferred)

    def check(self, workers: int) -> None:
        """Raise CorruptionError for inconsistent tables. O(shards)."""
        moving = self.previous != NONE
        for name, bad in (
            ("an unknown owner", (self.owners != NONE) & (self.owners >= workers)),
            ("an unknown preferred owner", (self.preferred != NONE) & (self.preferred >= workers)),
            ("an unknown previous owner", moving & (self.previous >= workers)),
            ("an owner and no preferred owner", (self.owners != NONE) & (self.preferred == NONE)),
            ("a previous owner and no owner", moving & (self.owners == NONE)),
            ("one worker for both owner and previous owner", moving & (self.previous == self.owners)),
            ("an owner since no epoch", (self.owners != NONE) & (self.since == 0)),
        ):
            if bad.any():
                raise CorruptionError(f"shard {int(np.flatnonzero(bad)[0])} has {name}")


def index_bytes(indexes: WorkerIndexes) -> bytes:
    """Pack a table of worker indexes as maps and states hold it: u16, little-endian."""
    return indexes.astype("<u2").tobytes()


def packed_since(tables: Tables) -> bytes:
    """Pack the tables' epochs as maps and states hold them."""
    return pack_since(array("Q", tables.since.tobytes()))


def _swapped(table: array[int]) -> array[int]:
    """Convert between the machine's byte order and little-endian."""
    if sys.byteorder == "big":
        table = array(table.typecode, table)
        table.byteswap()
    return table
