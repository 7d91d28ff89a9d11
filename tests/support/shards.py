"""Shards of a map: set in a store, and counted in a manager's state machine."""

from __future__ import annotations

from simm.arena.store import Store
from simm.cluster.machine import Cluster
from simm.cluster.nodes import Key


def set_shards(store: Store, epoch: int, since: bytes, roles: bytes, cluster: int = 0) -> int:
    """Do `Store.begin_shards`, drop all entries of lost shards, and return the number of shards owned.

    A worker drops them little by little, between requests.
    """
    store.begin_shards(epoch, since, roles, cluster)
    while store.drop_some():
        pass
    return store.shard_words.count


def shards_held(cluster: Cluster) -> dict[Key, int]:
    """Return the number of shards that each worker of the map owns."""
    return cluster._placement.held((info.node, info.worker) for info in cluster.live_workers())
