"""Claims of a ring of events, kept naively, and what an arena really has: for the tests of events."""

from __future__ import annotations

import numpy as np

from simm.arena.events.follow import Follower, MappedTable, Step
from simm.arena.events.listing import entries
from simm.arena.events.ring import (
    CLOSED,
    NAMESPACE,
    REMOVED,
    RING_BYTES_MIN,
    SHARD,
    STORED,
    EventRing,
    RingReader,
    attach,
)
from simm.arena.reader import ArenaReader
from simm.arena.store import Store

#: Digest -> (bytes, namespace's number).
Claims = dict[bytes, tuple[int, int]]


def new_ring(size: int = RING_BYTES_MIN) -> memoryview:
    """Return memory for a ring, aligned for words."""
    return memoryview(np.zeros(size // 8, np.uint64)).cast("B")


def attach_to(store: Store, memory: memoryview) -> EventRing:
    """Let a store tell what happens to its entries."""
    ring = EventRing(memory)
    attach(ring, store.table, store.shard_words, store.ledger.namespaces)
    return ring


def digest_in(row: np.void) -> bytes:
    """Return the digest of a record or an entry."""
    return int(row["low"]).to_bytes(8, "little") + int(row["high"]).to_bytes(8, "little")


def listed(reader: ArenaReader) -> Claims:
    """Return what an arena has now."""
    return {digest_in(row): (int(row["size"]), int(row["namespace"])) for row in entries(reader)}


def apply(claims: Claims, step: Step) -> None:
    """Add a step up, one record at a time."""
    if step.whole is not None:
        claims.clear()
        claims.update((digest_in(row), (int(row["size"]), int(row["namespace"]))) for row in step.whole)
    for row in step.records:
        operation, size = int(row["operation"]), int(row["size"])
        if operation == STORED:
            claims[digest_in(row)] = size, int(row["namespace"])
        elif operation == REMOVED:
            claims.pop(digest_in(row), None)
        elif operation == SHARD:
            for digest in [each for each in claims if int.from_bytes(each[:2], "little") % 16384 == size]:
                del claims[digest]
        elif operation == NAMESPACE:
            for digest in [each for each, (_, namespace) in claims.items() if namespace == size]:
                del claims[digest]
        elif operation == CLOSED:
            claims.clear()
        else:
            raise AssertionError(f"operation {operation} in a step")


class Watcher:
    """Follows the ring of an arena that the tests' stores use, and keeps the claims."""

    def __init__(self, memory: memoryview, reader: ArenaReader) -> None:
        self.reader = reader
        self.follower = Follower(RingReader(memory), MappedTable(reader))
        self.claims: Claims = {}

    def catch_up(self) -> Claims:
        """Apply all there is."""
        for _ in range(100):
            step = self.follower.step()
            apply(self.claims, step)
            if step.empty and not self.follower.due:
                return self.claims
        raise AssertionError("the follower never comes to an end")
