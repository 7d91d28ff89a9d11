"""Every map that a process was sent, compared: one map for each epoch, and one owner for each ownership."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from simm.cluster.shard_map import ShardMap
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.rpc import Frame, decode
from simm.wire.messages import MapReply

#: Faults that are kept; the first ones tell what is wrong.
_FAULTS_MAX = 10


class SeenMaps:
    """``see`` takes each map of each connection; ``faults`` says what was wrong with them.

    Bytes are compared for every map, contents for one of each epoch, in the order of epochs: a shard's *since* does not
    go back, and while it stays the same the shard has one owner.
    """

    def __init__(self) -> None:
        #: The checksum of the map of each epoch.
        self.sums: dict[int, int] = {}
        self.faults: list[str] = []
        self._epoch = 0
        self._since = np.zeros(SHARD_COUNT, np.uint64)
        self._owners = np.zeros(SHARD_COUNT, np.uint32)

    def see(self, frame: Frame) -> int:
        """Take a frame with a map, and return the map's epoch."""
        epoch, total = int.from_bytes(frame.body[:8], "little"), zlib.crc32(frame.body)
        if self.sums.setdefault(epoch, total) != total:
            self._fault(f"two maps of epoch {epoch}")
        if epoch > self._epoch:
            self._compare(decode(frame))
        return epoch

    def _compare(self, reply: MapReply) -> None:
        shard_map = ShardMap(reply)
        self._epoch = reply.epoch
        # 0 is no owner; indexes of a later map mean other workers, so they become what they name.
        named = [zlib.crc32(f"{info.node}/{info.worker}".encode()) | 1 for info in reply.workers]
        names = np.zeros(NO_OWNER + 1, np.uint32)
        names[: len(named)] = named
        owners = names[np.frombuffer(shard_map.owners, np.uint16)]
        since = np.frombuffer(shard_map.since, np.uint64)
        both = (owners != 0) & (self._owners != 0)
        for text, wrong in (
            ("a later since", since < self._since),
            ("since an epoch to come", since > np.uint64(reply.epoch)),
            ("two owners since one epoch", both & (since == self._since) & (owners != self._owners)),
        ):
            if wrong.any():
                shard = int(np.flatnonzero(wrong)[0])
                self._fault(f"map {reply.epoch}, shard {shard} and {int(wrong.sum()) - 1} more: {text}")
        self._since, self._owners = since.copy(), owners

    def _fault(self, text: str) -> None:
        if len(self.faults) < _FAULTS_MAX:
            self.faults.append(text)


def different(sums: Iterable[Mapping[Any, int]]) -> list[str]:
    """Return the epochs of which processes have seen different maps; ``sums`` of each."""
    first: dict[str, int] = {}
    wrong = []
    for each in sums:
        for epoch, total in each.items():
            if first.setdefault(str(epoch), total) != total:
                wrong.append(str(epoch))
    return wrong
