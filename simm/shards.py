"""One worker's shard words: what is its own, what is leaving, what is moving in.

A word per shard lies in the arena, where readers see it; this file is the only one that stores there.
It does no I/O and has no clock, so the same code runs in workers and in the simulator.

    0                  not mine: readers miss, mutations are refused
    epoch              mine since that epoch of the map
    MOVING | epoch     mine, and what I lack may still be at the previous owner
    FROZEN | epoch     another's since that epoch; I keep my values for it until the map forgets me

How a shard moves from P to N
-----------------------------
    map of epoch e: owner N, previous P
    N's mover -> P    FREEZE         P: word = FROZEN | e. No mutation is accepted there any more
    N's mover -> N    ADOPT          N: word = MOVING | e. From now on mutations are accepted here
    N's mover         copies what P lists, put-if-absent
    N's mover -> N    FINISH         N: word = e
    N -> manager      MOVED          map of a later epoch: no previous
    P                                word = 0, its entries are dropped

What can go wrong, and what stands against it
---------------------------------------------
* *Two owners accept mutations.* N accepts after P's answer to FREEZE, or after P could not be reached, and then
  without fall-back. A worker that was cut off and comes back with an old map stays frozen: FROZEN carries
  the epoch that froze it, and an older map cannot undo that, nor can a mover with an older map have the answer
  that it may adopt. FREEZE leaves that mark where P has nothing, too: P may be about to become the owner by a map
  of before, in which its own previous owner was forgotten (found by tests/slotmodel).
* *A superseded value is read at P.* One-sided readers take a FROZEN word for "not here"; only who was sent by N
  reads on, and N sends nobody after a key that was mutated here. Before it has adopted the shard N sends everybody
  to P (:meth:`ShardWords.status_of_miss`): nobody else can have accepted anything since N's map.
* *A reader goes to another P than N meant.* N says which move it speaks of (:meth:`ShardWords.moved_since`), and the
  reader goes only by a map that says the same. By an older map it would come to an owner of long ago, which may not
  know yet that it has been released, and whose values are older than what N has accepted, passed on and forgotten.
  For the same reason nobody who is told WRONG_OWNER may go to P by a map that may be old.
* *A deleted key is copied in again.* The mover's puts are put-if-absent, and N remembers the digests that left its
  table while their shard was moving (deleted, or evicted after an overwrite): they are neither copied
  nor looked for at P. Those still in the table need no memory. If there are more than ``DROPPED_MAX``, the fall-back
  ends: misses, never an old value.
* *A mover that outlives its map.* ADOPT, FINISH and put-if-absent carry the epoch of the mover's map and do nothing to
  a shard that came here by a later one: its previous owner is another, and it has not been frozen.
* *N's worker dies*: that memory is lost, so its successor ends the fall-back (:meth:`ShardWords.recover`).
* *A shard comes back* that others owned meanwhile: the epoch in the word is not the map's, so the entries are
  dropped before the word is set. If the word agrees with the map, nobody else has owned it and the values are good:
  that is what a warm start stands on.
* *A worker that its manager has given up* (declared dead, or back after a long pause) is *fenced*: it takes no mutation
  in any shard until the next map. So is every successor of a worker that died, as it cannot know.
  Mutations look at :attr:`ShardWords.accepting`, which is then not the words but zeros: the fence costs nothing.

What this file cannot see, and the manager must: what a worker has not heard of. One that missed the time in which
another had its shard still takes its old values for good. So the manager may name as the next owner, or as the
previous one, only who has said that it holds a map at least as new as the shard's last change of owner.

Each store of a word is one aligned store of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .constants import SHARD_COUNT
from .errors import CorruptionError, UsageError
from .hashing import shard_of
from .messages import ShardRole, Status

FROZEN: Final = 1 << 63
MOVING: Final = 1 << 62
EPOCH_MASK: Final = MOVING - 1

#: Digests remembered for all shards that are moving in together: about 30 MB.
DROPPED_MAX: Final = 1 << 18
BITMAP_BYTES: Final = SHARD_COUNT // 8

_NONE: Final = int(ShardRole.NONE)
_OWNER: Final = int(ShardRole.OWNER)
_INCOMING: Final = int(ShardRole.INCOMING)
_OUTGOING: Final = int(ShardRole.OUTGOING)


def bitmap_of(shards: Iterable[int]) -> bytes:
    """Shard numbers as a bitmap, one bit each, LSB first."""
    bits = bytearray(BITMAP_BYTES)
    for shard in shards:
        bits[shard >> 3] |= 1 << (shard & 7)
    return bytes(bits)


def shards_in(bitmap: bytes) -> list[int]:
    """The shard numbers of a bitmap, ascending. Raises UsageError when it is no bitmap of all shards."""
    if len(bitmap) != BITMAP_BYTES:
        raise UsageError(f"a shard bitmap has {BITMAP_BYTES} bytes, not {len(bitmap)}")
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


#: What mutations see of a fenced worker: nothing is its own.
_NOTHING: Final = memoryview(bytes(8 * SHARD_COUNT)).cast("Q")


class ShardWords:
    """See the module's docstring. ``words``: SHARD_COUNT u64, in place (a memoryview or an array)."""

    def __init__(self, words: memoryview) -> None:
        if len(words) != SHARD_COUNT:
            raise UsageError(f"{SHARD_COUNT} shard words, not {len(words)}")
        self.words = words
        #: The words as mutations see them: accepted where ``0 < word < FROZEN``. Zeros while fenced.
        self.accepting = words
        #: What the last map says.
        self.since: NDArray[np.uint64] = np.zeros(SHARD_COUNT, np.uint64)
        self.roles: NDArray[np.uint8] = np.zeros(SHARD_COUNT, np.uint8)
        #: How many words are MOVING; while there are none, nothing below costs anything.
        self.moving = 0
        #: Digests that left the table while their shard was moving in.
        self.dropped: set[bytes] = set()
        #: Fall-backs that ended because there were too many of those.
        self.overflows = 0

    def _array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.words, np.uint64)

    # -- the map --------------------------------------------------------------------------------

    def retire(self, epoch: int, since: bytes, roles: bytes) -> bool:
        """First half of taking the map of ``epoch`` over: zero the words of what is not ours as it has it.

        Whether any was; its entries must then be dropped before :meth:`take`. Raises UsageError, with nothing
        changed, for what is no map.
        """
        if len(since) != 8 * SHARD_COUNT or len(roles) != SHARD_COUNT:
            raise UsageError("a map's roles and epochs are for all shards")
        if not 0 < epoch <= EPOCH_MASK:
            raise UsageError(f"no map has epoch {epoch}: 0 in a shard's word means not mine")
        epochs = np.frombuffer(since, "<u8").astype(np.uint64)
        parts = np.frombuffer(roles, np.uint8)
        if int(parts.max(initial=0)) > _OUTGOING:
            raise UsageError(f"there is no shard role {int(parts.max())}")
        mine = (parts == _OWNER) | (parts == _INCOMING)
        leaving = parts == _OUTGOING
        if bool((epochs[mine | leaving] == 0).any()) or bool((epochs > np.uint64(EPOCH_MASK)).any()):
            raise UsageError("a shard is somebody's since an epoch that is positive: 0 in its word means not mine")
        self.since, self.roles = epochs, parts
        words = self._array()
        held = words & np.uint64(EPOCH_MASK)
        frozen = words >= np.uint64(FROZEN)
        same = ~frozen & (held == epochs)
        newer = frozen & (held > np.uint64(epoch))  # frozen by a newer map than this
        ended = np.where(frozen, held >= epochs, held < epochs)  # by this move, and not by one before our last tenure
        keep = newer | (mine & same) | (leaving & ended)
        gone: list[int] = np.flatnonzero((words != 0) & ~keep).tolist()
        for shard in gone:
            self.words[shard] = 0
        self._recount()
        return bool(gone)

    def take(self) -> int:
        """Second half: set the words of what is ours at once, freeze what is leaving; how many shards are ours.

        Those that are INCOMING wait for :meth:`adopt`. Ends a fence.
        """
        words = self._array()
        wanted = words.copy()
        owner = (self.roles == _OWNER) & (words < np.uint64(FROZEN))
        wanted[owner] = self.since[owner]
        leaving = (self.roles == _OUTGOING) & (words != 0) & (words < np.uint64(FROZEN))
        wanted[leaving] = self.since[leaving] | np.uint64(FROZEN)
        changed = np.flatnonzero(wanted != words)
        for shard, word in zip(changed.tolist(), wanted[changed].tolist()):
            self.words[shard] = word
        self._recount()
        self.accepting = self.words
        return self.count

    def fence(self) -> None:
        """The manager does not know us: no mutation is accepted until the next map. Readers read on."""
        self.accepting = _NOTHING

    @property
    def fenced(self) -> bool:
        """Are all mutations refused?"""
        return self.accepting is _NOTHING

    @property
    def count(self) -> int:
        """Shards that are ours: mutations are accepted, but for a fence."""
        return int((self._array() - np.uint64(1) < np.uint64(FROZEN - 1)).sum())

    @property
    def frozen(self) -> int:
        """Shards that are kept for another."""
        return int((self._array() >= np.uint64(FROZEN)).sum())

    def recover(self) -> None:
        """A new worker on this arena: what its predecessor remembered of moving shards is lost, and so is whether it
        was fenced."""
        for shard in np.flatnonzero(self._array() & np.uint64(MOVING)).tolist():
            self.words[shard] &= ~MOVING
        self._recount()
        self.fence()

    # -- moving ---------------------------------------------------------------------------------

    def freeze(self, epoch: int, shards: Iterable[int]) -> list[int] | None:
        """A new owner takes these over by the map of ``epoch``; those that are here, now frozen.

        The others are frozen too: a map of before, which we have not got yet, may make one of them ours.
        None when a word is newer than that: the asker's map is old, and nothing has changed.
        """
        if not 0 < epoch <= EPOCH_MASK:
            raise UsageError(f"no map has epoch {epoch}")
        asked = list(shards)
        for shard in asked:
            word = self.words[shard]
            held = word & EPOCH_MASK
            if held > epoch or (held == epoch and word < FROZEN):
                return None
        here = [shard for shard in asked if self.words[shard]]
        for shard in asked:
            self.words[shard] = FROZEN | epoch
        self._recount()
        return here

    def adopt(self, epoch: int, shards: Iterable[int], fallback: Iterable[int]) -> int:
        """Take over those of ``shards`` that wait for it; how many of them are ours now.

        ``epoch``: of the map by which the mover did its part; a shard that came by a later one goes on waiting.
        ``fallback``: where the previous owner is frozen, and keeps what we lack. Nothing is adopted while fenced.
        """
        behind = set(fallback)
        count = 0
        for shard in shards:
            since = int(self.since[shard])
            waits = self.roles[shard] == _INCOMING and not self.words[shard]
            if waits and since <= epoch and not self.fenced:
                self.words[shard] = since | (MOVING if shard in behind else 0)
            count += self.accepts(shard)
        self._recount()
        return count

    def finish(self, shards: Iterable[int], epoch: int = EPOCH_MASK) -> int:
        """All that the previous owner had of these is here, or given up; how many were moving, of those that came by
        a map of ``epoch`` or before."""
        ended = 0
        for shard in shards:
            word = self.words[shard]
            if word & MOVING and word < FROZEN and word & EPOCH_MASK <= epoch:
                self.words[shard] = word & EPOCH_MASK
                ended += 1
        self._recount()
        return ended

    def note_dropped(self, digest: bytes) -> None:
        """The digest has left the table, or was deleted without being there. Call it while ``moving``."""
        word = self.words[shard_of(digest)]
        if not word & MOVING or word >= FROZEN:
            return
        if len(self.dropped) >= DROPPED_MAX and digest not in self.dropped:
            self.overflows += 1
            self.finish(range(SHARD_COUNT))
            return
        self.dropped.add(digest)

    # -- questions --------------------------------------------------------------------------------

    def accepts(self, shard: int) -> bool:
        """Are mutations of this shard accepted?"""
        return 0 < self.accepting[shard] < FROZEN

    def may_copy(self, digest: bytes, epoch: int = EPOCH_MASK) -> bool:
        """May a mover, by a map of ``epoch``, store this digest if the table has no such entry?"""
        word = self.accepting[shard_of(digest)]
        return MOVING < word < FROZEN and word & EPOCH_MASK <= epoch and digest not in self.dropped

    def status_of_miss(self, digest: bytes) -> Status:
        """What a miss of this digest means: NOT_FOUND, PREVIOUS (look there too) or WRONG_OWNER."""
        shard = shard_of(digest)
        word = self.words[shard]
        if not word and self.roles[shard] == _INCOMING:
            return Status.PREVIOUS  # not adopted yet: all that there is is there
        if not 0 < word < FROZEN:
            return Status.WRONG_OWNER
        if word & MOVING and digest not in self.dropped:
            return Status.PREVIOUS
        return Status.NOT_FOUND

    def moved_since(self, digest: bytes) -> int:
        """Since which epoch the digest's shard is ours, where :meth:`status_of_miss` is PREVIOUS: the previous owner
        that is meant is that of a map which says the same."""
        shard = shard_of(digest)
        return self.words[shard] & EPOCH_MASK or int(self.since[shard])

    def finished(self) -> list[int]:
        """Shards that the map calls moving in and that are wholly here: to be told to the manager."""
        words = self._array()
        done = (self.roles == _INCOMING) & (words == self.since)
        found: list[int] = np.flatnonzero(done).tolist()
        return found

    def check(self) -> None:
        """Raise CorruptionError unless the invariants hold. O(shards + dropped)."""
        words = self._array()
        frozen, moving = words >= np.uint64(FROZEN), (words & np.uint64(MOVING)) != 0
        if bool((frozen & moving).any()):
            raise CorruptionError(f"shard {int(np.flatnonzero(frozen & moving)[0])} is frozen and moving in at once")
        bare = (words != 0) & (words & np.uint64(EPOCH_MASK) == 0)
        if bool(bare.any()):
            raise CorruptionError(f"shard {int(np.flatnonzero(bare)[0])} has a word without an epoch")
        if int(moving.sum()) != self.moving:
            raise CorruptionError(f"{int(moving.sum())} shards are moving, {self.moving} counted")
        if len(self.dropped) > DROPPED_MAX:
            raise CorruptionError(f"{len(self.dropped)} digests are remembered, {DROPPED_MAX} are allowed")
        if any(not self.words[shard_of(digest)] & MOVING for digest in self.dropped):
            raise CorruptionError("a digest is remembered of a shard that is not moving")

    def _recount(self) -> None:
        words = self._array()
        before, self.moving = self.moving, int(((words & np.uint64(MOVING)) != 0).sum())
        if self.dropped and self.moving != before:
            self.dropped = {digest for digest in self.dropped if self.words[shard_of(digest)] & MOVING}
