"""What a shard map means for one data server: which shards each of its workers gets, and what has to be moved in.

Pure: no I/O, no clock. The supervisor drives it with messages, the simulator with events.

    take_map(map)      ->  what to tell each worker (SHARDS)
    tasks(worker)      ->  what a mover has to fetch, and from whom
    moved(worker, ...) ->  what to tell the manager (MOVED), as long as its map still names a previous owner
    offer()            ->  the newest map, for a manager that has lost its own (MAP_OFFER)

What can go wrong, and what stands against it
---------------------------------------------
* *An old map comes late* (a second manager address, a reply behind a push). Only one at least as new as the newest is
  taken; the same one again is, as a fenced worker needs it once more.
* *The map is about an earlier life of ours.* A name outlives restarts, an instance number does not. Only workers
  listed with our name *and* our instance are ours.
* *The manager does not know us any more.* :meth:`fence`: until the next map every worker is told to take no mutation;
  its words, and with them its values, stay.
* *Both ends are ours.* A shard may move between two workers of one server; each is told its own side.
* *MOVED is lost.* What is finished is read off the worker's shard words (:mod:`simm.shards`), which are
  shared memory: nothing is remembered here that a death could lose, and it is said until the map agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .constants import NO_OWNER, SHARD_COUNT
from .errors import CorruptionError, RemoteProtocolError, UsageError
from .messages import MapOffer, Moved, ShardRole, Shards, WorkerInfo
from .shardmap import ShardMap, pack_since
from .shards import bitmap_of

_NONE: Final = int(ShardRole.NONE)
_OWNER: Final = int(ShardRole.OWNER)
_INCOMING: Final = int(ShardRole.INCOMING)
_OUTGOING: Final = int(ShardRole.OUTGOING)

#: "Take no mutation until the next SHARDS."
FENCE: Final = Shards(0, b"", b"")

#: A worker's SHARD_COUNT shard words, as bytes or as u64.
Words = bytes | memoryview


class Member:
    """One data server's view of the cluster.

    Args:
        name: its name in the cluster.
        instance: the number it drew at its start.
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
        #: The manager has said that it does not know us, and no map has come since.
        self.fenced = False
        self._since: dict[int, NDArray[np.uint64]] = {}
        self._roles: dict[int, NDArray[np.uint8]] = {}

    def __repr__(self) -> str:
        state = "fenced" if self.fenced else f"epoch={self.epoch}"
        return f"<Member {self.name} {state} workers={len(self.workers)}>"

    @property
    def epoch(self) -> int:
        """Of the newest map; 0 before the first."""
        return 0 if self.map is None else self.map.epoch

    # -- the map ----------------------------------------------------------------------------------

    def take_map(self, shard_map: ShardMap) -> Mapping[int, tuple[bytes, bytes]] | None:
        """Take a map: worker -> (since, roles) as SHARDS carries them; None when ours is newer. O(shards).

        Raises RemoteProtocolError, with nothing changed, for a map that gives shards to somebody since no epoch.
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
        for position, worker in mine.items():
            here = owners == position
            all_since[worker][here] = since[here]
            all_roles[worker][here] = _OWNER
        for shard, position in shard_map.previous.items():
            owner = mine.get(int(owners[shard]))
            if owner is not None:
                all_roles[owner][shard] = _INCOMING
            leaving = mine.get(position)
            if leaving is not None:
                all_roles[leaving][shard] = _OUTGOING
                all_since[leaving][shard] = since[shard]
        self.map, self.fenced = shard_map, False
        self._since, self._roles = all_since, all_roles
        return {worker: (all_since[worker].tobytes(), all_roles[worker].tobytes()) for worker in self.workers}

    def fence(self) -> None:
        """The manager does not know us: no mutation until the next map."""
        self.fenced = True

    def order(self, worker: int) -> Shards:
        """What a worker has to be told now. Before the first map, and while fenced: to take no mutation."""
        if self.map is None or self.fenced:
            return FENCE
        return Shards(self.epoch, self._since[worker].tobytes(), self._roles[worker].tobytes())

    def offer(self) -> MapOffer | None:
        """The newest map, for a manager that asks for one; None without any."""
        found = self.map
        if found is None:
            return None
        owners = np.frombuffer(found.owners, np.uint16).astype("<u2").tobytes()
        previous = sorted(found.previous.items())
        return MapOffer(found.epoch, found.cluster, list(found.workers), owners, previous, pack_since(found.since))

    def owned(self, worker: int) -> int:
        """How many shards the newest map gives to a worker."""
        return int(np.isin(self._roles[worker], (_OWNER, _INCOMING)).sum()) if worker in self._roles else 0

    # -- moving in --------------------------------------------------------------------------------

    def tasks(self, worker: int) -> list[tuple[WorkerInfo, list[int]]]:
        """Who has what of the shards that move into a worker: (previous owner, shards), by position in the map."""
        if self.map is None or worker not in self._roles:
            return []
        previous = self.map.previous
        found: dict[int, list[int]] = {}
        for shard in np.flatnonzero(self._roles[worker] == _INCOMING).tolist():
            found.setdefault(previous[shard], []).append(shard)
        return [(self.map.workers[position], found[position]) for position in sorted(found)]

    def finished(self, worker: int, words: Words) -> list[int]:
        """Shards that the map calls moving in and that are wholly here, by the worker's words."""
        return self._incoming(worker, words, done=True)

    def moving(self, worker: int, words: Words) -> list[int]:
        """Shards that still move in."""
        return self._incoming(worker, words, done=False)

    def _incoming(self, worker: int, words: Words, *, done: bool) -> list[int]:
        if worker not in self._roles:
            return []
        array = np.frombuffer(words, np.uint64)
        if len(array) != SHARD_COUNT:
            raise UsageError(f"{SHARD_COUNT} shard words, not {len(array)}")
        here = array == self._since[worker]
        found: list[int] = np.flatnonzero((self._roles[worker] == _INCOMING) & (here if done else ~here)).tolist()
        return found

    def moved(self, worker: int, words: Words) -> Moved | None:
        """What to tell the manager of a worker, or None. Say it again with each heartbeat until the map agrees."""
        shards = self.finished(worker, words)
        if not shards:
            return None
        return Moved(self.instance, self.epoch, self.name, worker, bitmap_of(shards))

    # -- check ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CorruptionError unless what the workers are told follows from the map. O(shards * workers)."""
        found = self.map
        if found is None:
            if self._roles or self._since:
                raise CorruptionError("roles without a map")
            return
        for worker in self.workers:
            positions = {
                at
                for at, info in enumerate(found.workers)
                if (info.node, info.instance, info.worker) == (self.name, self.instance, worker)
            }
            roles, since = self._roles[worker], self._since[worker]
            for shard in range(SHARD_COUNT):
                owns = found.owners[shard] in positions
                had = found.previous.get(shard, NO_OWNER) in positions
                role = (_INCOMING if shard in found.previous else _OWNER) if owns else _OUTGOING if had else _NONE
                if roles[shard] != role:
                    raise CorruptionError(f"worker {worker} has role {roles[shard]} in shard {shard}, not {role}")
                if int(since[shard]) != (found.since[shard] if owns or had else 0):
                    raise CorruptionError(f"worker {worker} has shard {shard} since {since[shard]}")
