"""The shard map as its readers hold it: decoded once, asked often. No I/O.

Clients route by it, data servers learn from it what is theirs, the manager builds it.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from .constants import NO_OWNER, SHARD_COUNT
from .errors import RemoteProtocolError
from .messages import MapOffer, MapReply, WorkerInfo

_SINCE_BYTES: Final = 8 * SHARD_COUNT


def pack_since(since: array[int]) -> bytes:
    """Each shard's epoch, as a map carries it. Few are different, so zlib makes some KiB of 128."""
    return zlib.compress(_swapped(since).tobytes(), 1)


def unpack_since(packed: bytes) -> array[int]:
    """The opposite; nothing packed means zeros. Raises RemoteProtocolError, and never allocates more than a map."""
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
    """One epoch's map.

    Raises RemoteProtocolError for one that contradicts itself.
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
        #: The same for the previous owners of shards that are moving.
        self.previous: Mapping[int, int] = dict(msg.previous)
        count = len(msg.workers)
        table = np.frombuffer(msg.owners, "<u2")
        if bool(((table >= count) & (table != NO_OWNER)).any()):
            raise RemoteProtocolError("the map names an owner that it does not list")
        if len(self.previous) != len(msg.previous):
            raise RemoteProtocolError("the map names two previous owners of one shard")
        if any(shard >= SHARD_COUNT or at >= count for shard, at in self.previous.items()):
            raise RemoteProtocolError("the map names a previous owner or a shard that there is not")
        if any(self.owners[shard] in (NO_OWNER, at) for shard, at in self.previous.items()):
            raise RemoteProtocolError("the map moves a shard from its owner, or to nobody")
        self._since_packed = msg.since
        self._since: array[int] | None = None

    def __repr__(self) -> str:
        return f"<ShardMap epoch={self.epoch} workers={len(self.workers)} moving={len(self.previous)}>"

    @property
    def since(self) -> array[int]:
        """The epoch in which each shard got its owner; decoded at the first use, as clients do not need it."""
        if self._since is None:
            self._since = unpack_since(self._since_packed)
        return self._since


def _swapped(table: array[int]) -> array[int]:
    """Little-endian on the wire, whatever this machine is."""
    if sys.byteorder == "big":
        table = array(table.typecode, table)
        table.byteswap()
    return table
