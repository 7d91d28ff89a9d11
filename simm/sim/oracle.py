"""Judge what happens in a simulation by what must never happen.

* *Versions.* Each key has one writer, so its puts and deletes have an order. A read that began after an answered
  mutation, or after a read that saw it, returns that version, a later one, or a miss.
* *Two owners.* If two workers ever accept mutations of a shard by words of one epoch, one of them is wrong. With
  different epochs the older one is behind, and what it accepts is *split off*.
* *Epochs.* No epoch names two maps. No process goes back to an older epoch.
* *Values are kept.* A worker gives up a shard that it accepted only if the manager has made another arena its owner
  since. So a server that was away, and that no other has replaced, finds all its values. Two exceptions: its own cold
  goodbye, and a manager that lost its state or got an old one back, as it cannot know then.
* *Kept.* A worker evicts no key that it has said to be hard kept, before its time; nor does the next owner, once it has
  finished the move. What has left the table there meanwhile, and a move that was given up, end that.
* *Groups.* Once a worker has said that keys are a group, all of them are there or none: with the first one that leaves,
  the others do, but for hard kept ones, and what is left is no group any more. The next owner has the group once it has
  finished the move, if it has all of its members and none of them has left the table there meanwhile.
* *Epochs of namespaces.* No read that began after an advance had returned returns a value whose put had begun before
  that advance was called. For whoever is cut off or stopped, too: there is no exception.
* *Parts.* What a read of a value in parts returns is, whole, what one put has stored. Its version is judged as any.
* *Ranges.* All ranges of one read are of one version, which is judged as any. Those of a session are of the version
  that was pinned, whatever has happened to the key, its worker and its shard since; or it is a miss. It is none on the
  host of the worker, if there was room for a pin.
* *Split off.* The documented exception: a server that is cut off from the manager, and serves clients that are cut off
  with it, may give them a superseded value, and values stored there are lost. A read is exempt if both were cut off,
  a mutation if the server was, within the time that it takes to notice and repair a broken connection (``TOUCH_S``).
  A key that was written there is not judged any more.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import shard_of
from ..constants import NO_OWNER, SHARD_COUNT
from ..wire.messages import MapReply, Status
from ..wire.shard_set import EPOCH_MASK, FROZEN
from .arena import Arena
from .client import Client
from .manager import decoded
from .whole import PART_BYTES, value_bytes
from .worker import Worker, World

#: A host counts as cut off for so long after it was.
TOUCH_S: Final = 12.0


class SimFailure(AssertionError):
    """Something happened that must never happen."""


class Key:
    """One key's history."""

    __slots__ = ("deleted", "digest", "done", "kept_at", "kept_until", "lost", "number", "seen", "started")

    def __init__(self, number: int, digest: bytes) -> None:
        self.number = number
        self.digest = digest
        #: Versions: of the last mutation begun, of the last one answered, and the newest that a read saw.
        self.started = 0
        self.done = 0
        self.seen = 0
        self.deleted: set[int] = set()
        #: Split off: its right version is not known any more.
        self.lost = False
        #: Until when it is hard kept, and in which arena.
        self.kept_until = 0.0
        self.kept_at = 0

    @property
    def floor(self) -> int:
        """The oldest version that a read which begins now may return."""
        return max(self.done, self.seen)


class Group:
    """Keys that one client stores as a group."""

    __slots__ = ("at", "digests", "keys", "names")

    def __init__(self, names: list[str], keys: list[Key]) -> None:
        self.names = names
        self.keys = keys
        self.digests = frozenset(key.digest for key in keys)
        #: In which arena it is one, 0: in none.
        self.at = 0


class Oracle:
    """The judge of one run. Methods raise SimFailure."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.by_digest: dict[bytes, Key] = {}
        self.groups: list[Group] = []
        #: By cluster: the highest epoch at which each shard was accepted, and by which arena.
        self._accepted: dict[int, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}
        #: Each shard's last owner by the map, as an arena, and the epoch in which it followed another.
        self._owner = np.zeros(SHARD_COUNT, np.int64)
        self._another = np.zeros(SHARD_COUNT, np.uint64)
        self._maps: dict[tuple[int, int], int] = {}
        self._observed: dict[str, tuple[int, int]] = {}
        self._last: MapReply | None = None
        #: host -> number of faults that cut it off from the manager now, and when the last change was.
        self._troubles: dict[str, int] = {}
        self._touched: dict[str, float] = {}
        self.exempt_reads = self.split_writes = self.checks = 0
        #: Evictions that were judged while a key was kept elsewhere in the arena, and kept keys that have moved.
        self.spared = self.kept_moved = 0
        #: The number of the moment when the last of the advances was called that have returned.
        self.last_advance = 0
        #: Groups that have left whole, and those that have moved; values in parts that were read whole.
        self.groups_left = self.groups_moved = self.wholes = 0
        #: Reads of ranges, and of those the ones of pinned values: all, and after the worker's death or a move.
        self.ranges_read = self.sessions_read = self.outlived_workers = self.outlived_moves = 0

    def fail(self, text: str) -> None:
        """Fail the run."""
        self.world.net.say(f"FAILURE: {text}")
        raise SimFailure(text)

    # -- who is in touch with the manager ---------------------------------------------------------------

    def trouble(self, host: str, on: bool) -> None:
        """Note that a host ("*": all) is cut off from the manager, or that this is over."""
        self._troubles[host] = self._troubles.get(host, 0) + (1 if on else -1)
        self._touched[host] = self.world.net.now

    def in_touch(self, host: str) -> bool:
        """Return True if a host is not cut off and has not been for a while."""
        for each in (host, "*"):
            if self._troubles.get(each, 0) or self.world.net.now - self._touched.get(each, -TOUCH_S) < TOUCH_S:
                return False
        return True

    # -- epochs and owners --------------------------------------------------------------------------------

    def told(self, reply: MapReply) -> None:
        """A process has got this map."""
        if reply is self._last:
            return
        self._last = reply
        content = zlib.crc32(repr((reply.workers, sorted(reply.previous))).encode() + reply.owners)
        content = zlib.crc32(decoded(reply).since.tobytes(), content)
        known = self._maps.setdefault((reply.cluster, reply.epoch), content)
        self.checks += 1
        if known != content:
            self.fail(f"epoch {reply.epoch} names two maps")

    def made(self, reply: MapReply) -> None:
        """The manager has made this map, sent or not."""
        number = self.world.arena_numbers
        table = np.zeros(NO_OWNER + 1, np.int64)
        for position, info in enumerate(reply.workers):
            table[position] = number.get((info.node, info.instance, info.worker), -1)
        owners = table[np.frombuffer(reply.owners, "<u2")]
        changed = (owners != 0) & (owners != self._owner)
        self._another[changed & (self._owner != 0)] = reply.epoch
        self._owner[changed] = owners[changed]

    def gives_up(self, worker: Worker, before: NDArray[np.uint64]) -> None:
        """A worker has taken a map; ``before``: its words until then."""
        if self.world.manager.forgot or worker.server.leaving:
            return
        self.checks += 1
        words = np.frombuffer(worker.arena.words, np.uint64)
        given_up = (before != 0) & (before < np.uint64(FROZEN)) & ((words ^ before) & np.uint64(EPOCH_MASK) != 0)
        mine = self._owner == worker.arena.number
        bad = given_up & mine & (self._another <= (before & np.uint64(EPOCH_MASK)))
        if bad.any():
            shard = int(np.flatnonzero(bad)[0])
            self.fail(f"{worker.process.name} gives up shard {shard}, which nobody else has owned")

    def observed(self, name: str, cluster: int, epoch: int) -> None:
        """A process holds this epoch now."""
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
        """Return the tables of the cluster whose map the worker's server has."""
        found = worker.server.member.map
        cluster = 0 if found is None else found.cluster
        if cluster not in self._accepted:
            self._accepted[cluster] = np.zeros(SHARD_COUNT, np.uint64), np.full(SHARD_COUNT, -1, np.int64)
        return self._accepted[cluster]

    # -- versions -----------------------------------------------------------------------------------------

    def stored(self, worker: Worker, digest: bytes, _version: int) -> None:
        """A worker has accepted a mutation: fail if a newer owner accepts them too and the worker was not cut off."""
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

    def kept(self, worker: Worker, digest: bytes, until: float) -> None:
        """A worker has said until when a key is kept, 0.0 for not at all."""
        key = self.by_digest[digest]
        key.kept_until, key.kept_at = until, worker.arena.number

    def gone(self, worker: Worker, digest: bytes) -> None:
        """A kept entry has left an arena: by a delete, or with its shard."""
        key = self.by_digest[digest]
        if key.kept_at == worker.arena.number:
            key.kept_until = 0.0

    def evicted(self, worker: Worker, digest: bytes) -> None:
        """A worker is about to evict an entry."""
        key = self.by_digest.get(digest)
        self.spared += bool(worker.arena.kept)
        if key is None or key.kept_at != worker.arena.number or key.kept_until <= self.world.net.now:
            return
        self.fail(f"{worker.process.name} evicts key {key.number}, which is kept until {key.kept_until:.3f}")

    def moved(self, worker: Worker, source: Arena, shards: Sequence[int]) -> None:
        """A worker is about to finish a move of shards, of which it has all that the source had."""
        words, wanted = worker.shards, set(shards)
        for digest in source.kept:
            key = self.by_digest.get(digest)
            if key is None or key.kept_at != source.number or shard_of(digest) not in wanted:
                continue
            if digest in worker.arena.entries and digest not in words.dropped:
                key.kept_at = worker.arena.number
                self.kept_moved += 1
            else:
                key.kept_until = 0.0
        for group in self.groups:
            if group.at == source.number and shard_of(group.keys[0].digest) in wanted:
                whole = all(each in worker.arena.entries and each not in words.dropped for each in group.digests)
                group.at = worker.arena.number if whole else 0
                self.groups_moved += whole

    def grouped(self, worker: Worker, digests: Sequence[bytes]) -> None:
        """A worker has said that keys are a group."""
        for group in self.groups:
            if group.digests == set(digests):
                group.at = worker.arena.number

    def groups_of(self, worker: Worker) -> None:
        """Something may have left a worker's arena: fail if a group has lost some of its members only."""
        entries = worker.arena.entries
        for group in self.groups:
            if group.at != worker.arena.number:
                continue
            self.checks += 1
            left = [key for key in group.keys if key.digest in entries]
            if len(left) == len(group.keys):
                continue
            group.at = 0
            self.groups_left += 1
            for key in left:
                if not worker.is_kept(key.digest):
                    self.fail(f"{worker.process.name} has key {key.number}, though others of its group have left")

    def exists(self, worker: Worker, digests: Sequence[bytes], statuses: Sequence[int]) -> None:
        """A worker answers which of a group's keys it has."""
        self.groups_of(worker)
        for group in self.groups:
            if group.at == worker.arena.number and group.digests == set(digests):
                there = sum(status == Status.OK for status in statuses)
                if 0 < there < len(statuses) and not set(statuses) - {Status.OK, Status.NOT_FOUND}:
                    self.fail(f"{worker.process.name} has {there} of the {len(statuses)} keys of a group")

    def ranges(
        self, client: Client, key: Key, version: int, pieces: tuple[tuple[bytes, int], tuple[bytes, int]]
    ) -> None:
        """Ranges of a value have been read: fail if one of them is not of this version."""
        self.checks += 1
        self.ranges_read += 1
        if {*pieces} != {(key.digest, version)}:
            self.fail(f"{client.name} read ranges of key {key.number}, version {version}, with bytes of another value")

    def pinned(
        self, client: Client, key: Key, version: int, pieces: tuple[tuple[bytes, int], tuple[bytes, int]] | None, *,
        pinned: bool, outlived: tuple[bool, bool],
    ) -> None:  # fmt: skip
        """Ranges of a value of a session have been read. ``pinned``: it is no miss, whatever has happened since."""
        if pieces is not None:
            self.ranges(client, key, version, pieces)
            self.sessions_read += 1
            self.outlived_workers += outlived[0]
            self.outlived_moves += outlived[1]
        elif pinned:
            self.fail(f"{client.name} has lost key {key.number}, which it had pinned on its host")

    def whole(self, client: Client, key: Key, value: bytes) -> int:
        """A read of a value in parts has returned these bytes; return the version of their put."""
        versions = {int.from_bytes(value[at : at + PART_BYTES], "little") for at in range(0, len(value), PART_BYTES)}
        version = min(versions)
        if len(versions) > 1 or len(value) != value_bytes(version):
            self.fail(f"{client.name} read key {key.number}: {len(value)} bytes, of the puts {sorted(versions)}")
        self.wholes += len(value) > PART_BYTES
        return version

    def advanced(self, called: int) -> None:
        """An advance that was called at that moment has returned."""
        self.last_advance = max(self.last_advance, called)

    def of_epoch(self, client: Client, node: str, began: int, advanced: int) -> None:
        """A read has returned a value whose put began at that moment; ``advanced``: the last advance before it."""
        self.checks += 1
        if began < advanced:
            self.fail(f"{client.name} read at {node} what was put before an advance that had returned")

    def read(self, client: Client, key: Key, floor: int, version: int, node: str) -> None:
        """A read has returned a version; ``floor``: the key's when it began."""
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
