"""Derive what a shard map means for one data server: the shards of each of its workers, and what must be moved in.

Pure: no I/O, no clock. The supervisor drives it with messages, the simulator with events.

What can go wrong, and what we chose
------------------------------------
* *An old map comes late* (from a second manager address, or in a reply behind a push). Only a map at least as new
  as the newest is taken. The same one again is taken too, as a fenced worker needs it once more.
* *The map is about an earlier life of this server.* A name outlives restarts, an instance number does not. Only workers
  listed with this name *and* this instance count.
* *Another instance has the name by now*, on another host (:attr:`Member.displaced`). An arena names its progress by the
  epoch of its last map, and this one would claim more than it knows: a start on it would keep ``since`` of the other
  instance's ownership period, whose arena may come back, too. So it is not kept for a warm start.
* *The manager does not know this server any more.* :meth:`Member.fence`: until the next map every worker refuses
  mutations. Its words, and with them its values, stay.
* *The manager is of another cluster.* :meth:`Member.abandon`: every worker drops all its values before the server
  joins. Once the map names it, readers come, and must find no value of the other cluster.
* *Both ends are workers of this server.* A shard may move between two of them; each gets its own part.
* *MOVED is lost.* Finished shards are read off the worker's shard words (``arena/shard_words.py``), which are shared
  memory. Nothing is remembered here that a death could lose, and MOVED is repeated until the map agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..constants import NO_OWNER, SHARD_COUNT
from ..errors import RemoteProtocolError, UsageError
from ..wire.epoch_messages import Epochs
from ..wire.messages import MapOffer, Moved, ShardRole, Shards, WorkerInfo
from ..wire.shard_set import EPOCH_MASK, FROZEN, bitmap_of
from .shard_map import ShardMap, pack_since

#: "Take no mutation until the next SHARDS."
FENCE: Final = Shards(0, b"", b"")
#: "Nothing is yours, and you are of no cluster."
DROP_ALL: Final = Shards(1, bytes(8 * SHARD_COUNT), bytes(SHARD_COUNT), 0)

#: A worker's SHARD_COUNT shard words, as bytes or as u64.
Words = bytes | memoryview


def frozen_epoch(words: Words) -> int:
    """Return the highest epoch by which one of a worker's shards is frozen; 0 if none is."""
    held = np.frombuffer(words, np.uint64)
    return int((held[held >= np.uint64(FROZEN)] & np.uint64(EPOCH_MASK)).max(initial=0))


class Member:
    """One data server's view of the cluster.

    Args:
        name: its name in the cluster.
        instance: the random number generated at its start.
        workers: numbers of its workers.
    """

    def __init__(self, name: str, instance: int, workers: Sequence[int]) -> None:
        if len(set(workers)) != len(workers):
            raise UsageError(f"worker numbers are given once each, not {list(workers)}")
        self.name = name
        self.instance = instance
        self.workers = tuple(workers)
        #: The newest map, or None before the first.
        self.map: ShardMap | None = None
        #: The epochs of namespaces that came before it (cluster/epochs.py); None if there are none.
        self.epochs: Epochs | None = None
        #: The manager does not know this server, and no map has come since.
        self.fenced = False
        #: The manager is of another cluster than the last map, and no map has come since.
        self.abandoned = False
        self._since: dict[int, NDArray[np.uint64]] = {}
        self._roles: dict[int, NDArray[np.uint8]] = {}

    def __repr__(self) -> str:
        state = "fenced" if self.fenced else f"epoch={self.epoch}"
        return f"<Member {self.name} {state} workers={len(self.workers)}>"

    @property
    def epoch(self) -> int:
        """The epoch of the newest map; 0 before the first."""
        return 0 if self.map is None else self.map.epoch

    @property
    def cluster(self) -> int:
        """The cluster of the newest map; 0 before the first."""
        return 0 if self.map is None else self.map.cluster

    @property
    def displaced(self) -> bool:
        """By the newest map another instance has this name, so the map is not about these arenas."""
        listed = {info.instance for info in self.map.workers if info.node == self.name} if self.map is not None else ()
        return bool(listed) and self.instance not in listed

    # -- workers ----------------------------------------------------------------------------------

    def add(self, worker: int) -> None:
        """Count another worker as ours. It owns nothing by the map that is known."""
        if worker in self.workers:
            raise UsageError(f"worker {worker} is ours already")
        self.workers += (worker,)
        if self.map is not None:
            self._since[worker] = np.zeros(SHARD_COUNT, np.uint64)
            self._roles[worker] = np.zeros(SHARD_COUNT, np.uint8)

    def remove(self, worker: int) -> None:
        """Undo :meth:`add`, before any map has named the worker."""
        self.workers = tuple(number for number in self.workers if number != worker)
        self._since.pop(worker, None)
        self._roles.pop(worker, None)

    @property
    def listed(self) -> set[int]:
        """The numbers that the newest map lists for this server."""
        workers = self.map.workers if self.map is not None else ()
        return {info.worker for info in workers if (info.node, info.instance) == (self.name, self.instance)}

    @property
    def unlisted(self) -> list[int]:
        """Return our workers that the newest map does not list, although it lists this server."""
        listed = self.listed
        return [number for number in self.workers if number not in listed] if listed else []

    # -- the map ----------------------------------------------------------------------------------

    def take_map(self, shard_map: ShardMap) -> Mapping[int, tuple[bytes, bytes]] | None:
        """Take a map. Return worker -> (since, roles) as SHARDS carries them; None if a newer one is known. O(shards).

        Raises RemoteProtocolError, with nothing changed, for a map with an owner since epoch 0 or since a later epoch.
        """
        if shard_map.epoch < self.epoch:
            return None
        owners = np.frombuffer(shard_map.owners, np.uint16)
        since = np.frombuffer(shard_map.since, np.uint64).copy()
        if bool((since[owners != NO_OWNER] == 0).any()) or bool((since > np.uint64(shard_map.epoch)).any()):
            raise RemoteProtocolError("the map names owners since an epoch that is none of the past")
        mine = {
            position: info.worker
            for position, info in enumerate(shard_map.workers)
            if info.node == self.name and info.instance == self.instance and info.worker in self.workers
        }
        all_since = {worker: np.zeros(SHARD_COUNT, np.uint64) for worker in self.workers}
        all_roles = {worker: np.zeros(SHARD_COUNT, np.uint8) for worker in self.workers}
        previous = shard_map.previous
        moving = np.fromiter(previous.keys(), np.int64, len(previous))
        sources = np.fromiter(previous.values(), np.int64, len(previous))
        for position, worker in mine.items():
            here = owners == position
            all_since[worker][here] = since[here]
            all_roles[worker][here] = ShardRole.OWNER
            all_roles[worker][moving[here[moving]]] = ShardRole.INCOMING
            leaving = moving[sources == position]
            all_roles[worker][leaving] = ShardRole.OUTGOING
            all_since[worker][leaving] = since[leaving]
        self.map, self.fenced, self.abandoned = shard_map, False, False
        self._since, self._roles = all_since, all_roles
        return {worker: (all_since[worker].tobytes(), all_roles[worker].tobytes()) for worker in self.workers}

    def take_if_displaced(self, shard_map: ShardMap) -> bool:
        """Take a map by which another instance has this name, and return True; do nothing with any other one."""
        instances = {info.instance for info in shard_map.workers if info.node == self.name}
        if not instances or self.instance in instances or shard_map.cluster != self.cluster:
            return False
        if self.displaced and not self.fenced and shard_map.epoch == self.epoch:
            return False  # it was taken before
        return self.take_map(shard_map) is not None

    def take_epochs(self, msg: Epochs) -> None:
        """Take the epochs of namespaces, unless newer ones are known. The workers get them with the next map."""
        if self.epochs is None or msg.cluster != self.epochs.cluster or msg.epoch >= self.epochs.epoch:
            self.epochs = msg

    def fence(self) -> None:
        """Let the workers refuse mutations until the next map: the manager does not know this server."""
        self.fenced = True

    def abandon(self) -> None:
        """Drop the map and all values held by it: the manager is of another cluster."""
        self.map, self.fenced, self.abandoned, self.epochs = None, False, True, None
        self._since, self._roles = {}, {}

    def order(self, worker: int) -> Shards:
        """Return the SHARDS for a worker now. Before the first map, and while fenced, it refuses mutations."""
        if self.abandoned:
            return DROP_ALL
        if self.map is None or self.fenced:
            return FENCE
        return Shards(self.epoch, self._since[worker].tobytes(), self._roles[worker].tobytes(), self.cluster)

    def offer(self) -> MapOffer | None:
        """Return the newest map as an offer; None without any."""
        found = self.map
        if found is None:
            return None
        owners = np.frombuffer(found.owners, np.uint16).astype("<u2").tobytes()
        previous = sorted(found.previous.items())
        return MapOffer(found.epoch, found.cluster, list(found.workers), owners, previous, pack_since(found.since))

    def owned(self, worker: int) -> int:
        """Return the number of shards that the newest map gives a worker."""
        if worker not in self._roles:
            return 0
        return int(np.isin(self._roles[worker], (ShardRole.OWNER, ShardRole.INCOMING)).sum())

    # -- moving in --------------------------------------------------------------------------------

    def tasks(self, worker: int) -> list[tuple[WorkerInfo, list[int]]]:
        """Return (previous owner, shards) for the shards that move into a worker, by position in the map."""
        if self.map is None or worker not in self._roles:
            return []
        previous = self.map.previous
        found: dict[int, list[int]] = {}
        for shard in np.flatnonzero(self._roles[worker] == ShardRole.INCOMING).tolist():
            found.setdefault(previous[shard], []).append(shard)
        return [(self.map.workers[position], found[position]) for position in sorted(found)]

    def finished(self, worker: int, words: Words) -> list[int]:
        """Return the shards that move in by the map and are finished by the worker's words."""
        return self._incoming(worker, words, done=True)

    def moving(self, worker: int, words: Words) -> list[int]:
        """Return the shards that still move in."""
        return self._incoming(worker, words, done=False)

    def _incoming(self, worker: int, words: Words, *, done: bool) -> list[int]:
        if worker not in self._roles:
            return []
        array = np.frombuffer(words, np.uint64)
        if len(array) != SHARD_COUNT:
            raise UsageError(f"{SHARD_COUNT} shard words, not {len(array)}")
        here = array == self._since[worker]
        incoming = self._roles[worker] == ShardRole.INCOMING
        found: list[int] = np.flatnonzero(incoming & (here if done else ~here)).tolist()
        return found

    def moved(self, worker: int, words: Words) -> Moved | None:
        """Return the MOVED for a worker, or None. Send it with each heartbeat until the map agrees."""
        shards = self.finished(worker, words)
        if not shards:
            return None
        return Moved(self.instance, self.epoch, self.name, worker, bitmap_of(shards))
