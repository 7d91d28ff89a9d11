"""What a data server's supervisor knows of one of its workers, over all processes that have been that worker."""

from __future__ import annotations

import socket
from typing import Any, Final

from . import messages as M
from .layout import HEADER_BYTES, SHARDS_BYTES
from .process import Child
from .shm import OwnedSegment

#: Request ids on a worker's socket pair: STATS, and SHARDS from there on.
STATS_ID: Final = 1
SHARDS_ID: Final = 2


class WorkerSlot:
    """One worker's place: what outlives the process."""

    def __init__(self, number: int, node: int, segment: OwnedSegment, uds: str) -> None:
        self.number = number
        self.node = node
        self.segment = segment
        self.uds = uds
        self.listener: socket.socket | None = None
        self.tcp: socket.socket | None = None
        self.child: Child | None = None
        self.streams: list[Child | None] = []
        self.ready = False
        #: When it answered last; of use while it is ready.
        self.heard = 0.0
        #: The worker has taken over a shard map, ever; the newest one.
        self.sharded = False
        self.current = False
        #: Request id of the last SHARDS sent, and the epoch of its map; that of the newest one taken over.
        self.order_id = SHARDS_ID
        self.order_epoch = 0
        self.taken = 0
        self.restarts: list[float] = []
        self.stats: dict[str, Any] = {}
        self.data_bytes = 0
        self.incarnation = 0
        self.mover: Child | None = None
        #: When it was last heard of.
        self.mover_heard = 0.0
        #: What the mover said last, and what its predecessors copied: of this move, and ever.
        self.progress = M.MoveProgress(0, 0, 0, 0, 0)
        self.moving = False
        self.moved_before = 0
        self.moved_ever = {"bytes": 0, "values": 0, "lost": 0}

    def words(self) -> bytes:
        """The arena's shard words, now."""
        whole: bytes = self.segment.mm[HEADER_BYTES : HEADER_BYTES + SHARDS_BYTES]
        return whole

    def load(self, moves_left: int) -> M.WorkerLoad:
        """For a heartbeat."""
        stats = self.stats
        if not stats:
            return M.WorkerLoad(0, 0, 0, 0, moves_left)
        used = stats["data_bytes"] - stats["free_bytes"]
        evictions = sum(stats["evictions"].values()) + stats["set_evictions"]
        moved = self.moved_before + self.progress.bytes
        rate = self.progress.rate if moves_left else 0
        return M.WorkerLoad(used, stats["entries"], stats["puts"], evictions, moves_left, moved, rate)

    def mover_ended(self) -> None:
        """Add up what it did."""
        done = self.progress
        self.moved_before += done.bytes
        for key, count in (("bytes", done.bytes), ("values", done.values), ("lost", done.lost)):
            self.moved_ever[key] += count
        self.progress = M.MoveProgress(0, 0, 0, 0, 0)
