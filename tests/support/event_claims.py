"""Claims of a ring of events, kept naively, and what an arena really has: for the tests of events."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from simm.arena.events.follow import Follower, MappedTable, Step
from simm.arena.events.listing import entries_between
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


def told(memory: memoryview) -> type[Store]:
    """Return a store that tells this ring, as workers and their successors do."""

    class Told(Store):
        @classmethod
        def create(cls, *args: Any, **options: Any) -> Store:
            store = super().create(*args, **options)
            attach_to(store, memory)
            return store

        @classmethod
        def recover(cls, *args: Any, **options: Any) -> Store:
            EventRing(memory).anew()
            store = super().recover(*args, **options)
            attach_to(store, memory)
            return store

    return Told


def digest_in(row: np.void) -> bytes:
    """Return the digest of a record or an entry."""
    return int(row["low"]).to_bytes(8, "little") + int(row["high"]).to_bytes(8, "little")


def listed(reader: ArenaReader) -> Claims:
    """Return what an arena has now."""
    rows = entries_between(reader, 0, reader.geometry.slots)
    return {digest_in(row): (int(row["size"]), int(row["namespace"])) for row in rows}


def apply(claims: Claims, step: Step) -> None:
    """Add a step up, one record after the other; those of shards that are side by side at once, as they are many."""
    for operation, run in itertools.groupby(step.records, key=lambda row: int(row["operation"])):
        if operation == STORED:
            claims.update((digest_in(row), (int(row["size"]), int(row["namespace"]))) for row in run)
        elif operation == REMOVED:
            for row in run:
                claims.pop(digest_in(row), None)
        elif operation in (SHARD, NAMESPACE):
            lost = {int(row["size"]) for row in run}
            for digest, (_, namespace) in list(claims.items()):
                if (int.from_bytes(digest[:2], "little") % 16384 if operation == SHARD else namespace) in lost:
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

    def step(self) -> Step:
        """Apply one step, and return it."""
        step = self.follower.step()
        apply(self.claims, step)
        return step

    def catch_up(self) -> Claims:
        """Apply all there is."""
        for _ in range(100):
            if self.step().empty and not self.follower.due:
                return self.claims
        raise AssertionError("the follower never comes to an end")
