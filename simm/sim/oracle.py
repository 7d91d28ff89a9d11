"""What must never happen, looked at while it would.

* *Versions.* Each key has one writer, so its puts and deletes have an order. A read that began after an answered
  mutation, or after a read that saw it, yields that version, a later one, or a miss.
* *Two owners.* Of two workers that accept mutations of a shard by words of one epoch one is wrong; for ever, not only
  while both do. Two by different epochs: the older one is behind, and what it accepts is *split off*.
* *Epochs.* No epoch names two maps. Nobody's epoch goes back.
* *Split off.* The documented exception: a server that is cut off from the manager, and serves clients that are cut off
  with it, may give them a superseded value, and what is stored there is lost. For a read both must have been out of
  touch, for a mutation the server, within the time that a broken link takes to be noticed and mended (``TOUCH_S``). A
  key that was written there is not looked at any more.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ..constants import SHARD_COUNT
from ..hashing import shard_of
from ..messages import MapReply
from ..shards import EPOCH_MASK, FROZEN
from .manager import decoded

if TYPE_CHECKING:
    from .client import Client
    from .server import Worker
    from .world import World

#: Who was cut off counts as out of touch for so long after.
TOUCH_S: Final = 12.0


class SimFailure(AssertionError):
    """Something that must never happen has."""


class Key:
    """One key's history."""

    __slots__ = ("deleted", "digest", "done", "lost", "number", "seen", "started", "writer")

    def __init__(self, number: int, digest: bytes, writer: int) -> None:
        self.number = number
        self.digest = digest
        self.writer = writer
        #: Version of the last mutation that was begun, of the last one answered, and the newest one that a read saw.
        self.started = 0
        self.done = 0
        self.seen = 0
        self.deleted: set[int] = set()
        #: Nobody knows any more what is right: split off.
        self.lost = False

    @property
    def floor(self) -> int:
        """The oldest version that a read beginning now may yield."""
        return max(self.done, self.seen)


class Oracle:
    """See the module's docstring. Raises SimFailure."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_digest: dict[bytes, Key] = {}
        #: By cluster, as epochs of two are not compared: the highest epoch at which each shard was accepted, and where.
        self._accepted: dict[int, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}
        self._maps: dict[tuple[int, int], int] = {}
        self._observed: dict[str, tuple[int, int]] = {}
        self._last: MapReply | None = None
        #: host -> how many troubles cut it off from the manager now; and when the last one ended.
        self._troubles: dict[str, int] = {}
        self._touched: dict[str, float] = {}
        self.exempt_reads = self.split_writes = self.checks = 0

    def fail(self, text: str) -> None:
        """It has happened."""
        self.world.net.say(f"FAILURE: {text}")
        raise SimFailure(text)

    # -- who is in touch with the manager ---------------------------------------------------------------

    def trouble(self, host: str, on: bool) -> None:
        """A host ("*": all) cannot talk with the manager, or one of the two does not run; or that is over."""
        self._troubles[host] = self._troubles.get(host, 0) + (1 if on else -1)
        self._touched[host] = self.world.net.now

    def in_touch(self, host: str) -> bool:
        """Is it, and has it been for a while?"""
        for each in (host, "*"):
            if self._troubles.get(each, 0) or self.world.net.now - self._touched.get(each, -TOUCH_S) < TOUCH_S:
                return False
        return True

    # -- epochs and owners --------------------------------------------------------------------------------

    def told(self, reply: MapReply) -> None:
        """Somebody has got this map."""
        if reply is self._last:
            return
        self._last = reply
        content = zlib.crc32(repr((reply.workers, sorted(reply.previous))).encode() + reply.owners)
        content = zlib.crc32(decoded(reply).since.tobytes(), content)
        known = self._maps.setdefault((reply.cluster, reply.epoch), content)
        self.checks += 1
        if known != content:
            self.fail(f"epoch {reply.epoch} names two maps")

    def observed(self, name: str, cluster: int, epoch: int) -> None:
        """Somebody holds this epoch now."""
        known = self._observed.get(name)
        if known is not None and known[0] == cluster and epoch < known[1]:
            self.fail(f"{name} went from epoch {known[1]} back to {epoch}")
        self._observed[name] = (cluster, epoch)

    def accepting(self, worker: Worker) -> None:
        """A worker's words have changed."""
        self.checks += 1
        words = np.frombuffer(worker.arena.words, np.uint64)
        accepts = words - np.uint64(1) < np.uint64(FROZEN - 1)
        if worker.shards.fenced:
            return
        epochs = words & np.uint64(EPOCH_MASK)
        highest, where = self._tables(worker)
        same = accepts & (epochs == highest) & (where != worker.arena.number)
        if same.any():
            shard = int(np.flatnonzero(same)[0])
            self.fail(
                f"shard {shard} is accepted at epoch {int(epochs[shard])} by {worker.process.name} (arena "
                f"{worker.arena.number}) and by arena {int(where[shard])}"
            )
        newer = accepts & (epochs > highest)
        highest[newer] = epochs[newer]
        where[newer] = worker.arena.number

    def _tables(self, worker: Worker) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Of the cluster whose map its server has."""
        found = worker.server.member.map
        cluster = 0 if found is None else found.cluster
        if cluster not in self._accepted:
            self._accepted[cluster] = np.zeros(SHARD_COUNT, np.uint64), np.full(SHARD_COUNT, -1, np.int64)
        return self._accepted[cluster]

    # -- versions -----------------------------------------------------------------------------------------

    def stored(self, worker: Worker, digest: bytes, _version: int) -> None:
        """A worker has accepted a mutation: is somebody newer accepting them too?"""
        self.checks += 1
        shard = shard_of(digest)
        epoch = worker.arena.words[shard] & EPOCH_MASK
        newest = int(self._tables(worker)[0][shard])
        if newest <= epoch:
            return
        key = self.by_digest.get(digest)
        if key is None or key.lost:
            return
        if self.in_touch(worker.server.host):
            self.fail(
                f"{worker.process.name} took a mutation of key {key.number} at epoch {epoch}, shard {shard} has been "
                f"accepted at {newest}; it was not cut off"
            )
        key.lost = True
        self.split_writes += 1

    def read(self, client: Client, key: Key, floor: int, version: int, node: str) -> None:
        """A read has yielded a version; ``floor``: of the key when it began."""
        self.checks += 1
        if not version or key.lost:
            return
        text = ""
        if version < floor:
            text = f"version {version}, though {floor} was there before it began"
        elif version > key.started or version in key.deleted:
            text = f"version {version}, which nobody put"
        if text:
            if not self.in_touch(client.host) and not self.in_touch(self.world.servers[node].host):
                self.exempt_reads += 1
                return
            self.fail(f"{client.name} read key {key.number} (shard {shard_of(key.digest)}) at {node}: {text}")
        key.seen = max(key.seen, version)
