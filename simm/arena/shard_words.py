"""One worker's shard words: which shards it owns, which leave, which move in.

The arena has one word per shard, where readers see it. Only this module stores there. It has no I/O and no clock, so
workers and the simulator run the same code. A worker with a vault (``arena/vault.py``) decides by the words there, and
the arena has a copy of them for readers.

    0                  not owned: readers miss, mutations are refused
    epoch              owned since that epoch of the map
    MOVING | epoch     owned; what is missing here may be at the previous owner
    FROZEN | epoch     owned by another worker since that epoch; the values stay for it until the map forgets this one

How a shard moves from P to N
-----------------------------
    map of epoch e: owner N, previous P
    N's mover -> P    FREEZE         P: word = FROZEN | e. No mutation is accepted there any more
    N's mover -> N    ADOPT          N: word = MOVING | e. From now on mutations are accepted here
    N's mover         copies what P lists, put-if-absent
    N's mover -> N    FINISH         N: word = e
    N -> manager      MOVED          map of a later epoch: no previous
    P                                word = 0, its entries are dropped

Failure modes and mitigations
-----------------------------
* *Two owners accept mutations.* N accepts after P's answer to FREEZE. If P cannot be reached, N accepts without
  fall-back. A worker that was cut off and returns with an old map stays frozen: FROZEN carries the epoch that froze
  it. An older map cannot undo that, and a mover with an older map gets no permission to adopt. FREEZE also marks a
  shard that P does not own: an earlier map, not received yet, may make P its owner without a previous owner (found by
  tests/models/shard_move.py).
* *A superseded value is read at P.* One-sided readers treat a FROZEN word as a miss. Only a reader sent by N reads on,
  and N sends none for a key that was mutated at N. Before N has adopted the shard it sends every reader to P
  (:meth:`ShardWords.status_of_miss`): no other worker can have accepted a mutation since N's map.
* *A reader goes to another P than N meant.* N names the move (:meth:`ShardWords.moved_since`), and the reader follows
  only a map with the same epoch. An older map could lead to an earlier owner that does not know yet that it was
  released, with values older than what N has accepted, passed on and forgotten. For the same reason a reader with
  answer WRONG_OWNER must not go to P by a map that may be old.
* *A deleted key is copied back.* The mover's puts are put-if-absent. N remembers the digests that left its table while
  their shard was moving (deleted, or evicted after an overwrite): they are neither copied nor looked up at P. Digests
  in the table need no memory. Beyond ``DROPPED_MAX`` the fall-back ends: misses, never an old value.
* *A mover outlives its map.* ADOPT, FINISH and put-if-absent carry the epoch of the mover's map. They do not affect a
  shard that arrived by a later one, whose previous owner is another worker and was not frozen.
* *N's worker dies.* The remembered digests are lost, so its successor ends the fall-back (:meth:`ShardWords.recover`).
* *A shard comes back* that others owned meanwhile. The epoch in the word differs from the map's, so its entries are
  dropped before the word is set. If the epochs agree, no other worker has owned it and the values are valid: warm
  starts rely on this.
* *Dropping takes long*: seconds for 10^6 entries, and the worker serves meanwhile. A shard that a map takes away is
  *clearing* until its entries are gone. Its word stays 0, whatever a map, ADOPT or FREEZE says, so that nobody finds an
  old entry under a new word. A FREEZE is remembered and marks the shard afterwards; no mutation is accepted before.
* *A FREEZE comes late*, when a newer map has given the shard back to P, whose word is 0: INCOMING, or clearing. Or it
  is false, or of a former life of the manager, and a map of its epoch or a later one says that the shard is P's. The
  shard's only owner would refuse mutations until some later map, for which nobody asks. So P compares the FREEZE with
  its map too, and refuses it as it does where a word is newer. A FREEZE of a map that P does not have yet is newer than
  all that P's map says. If no such map comes, the manager learns of its epoch and makes a later one.
* *A worker that its manager has given up* (declared dead, or back after a long pause) is *fenced*: it accepts no
  mutation in any shard until the next map. So is every successor of a worker that died, as it cannot know. Mutations
  check :attr:`ShardWords.accepting`, which then refers to zeros instead of the words, so a fence costs nothing.

The manager must cover what a worker cannot see. A worker that missed the time in which another one owned its shard
would take its old values as valid. So the manager names as next or previous owner only a worker that has acknowledged a
map at least as new as the shard's last change of owner.

Each store of a word is one aligned store of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ..constants import DIGEST_BYTES, SHARD_COUNT
from ..errors import CorruptionError, UsageError
from ..wire.messages import ShardRole, Status
from ..wire.shard_set import EPOCH_MASK, FROZEN, MOVING, epoch_limit
from .events.ring import CLOSED, SHARD, EventRing
from .hashing import SHARD_MASK, shard_of

if TYPE_CHECKING:
    from ..table import Table

#: Most digests remembered for all shards that move in: about 30 MB.
DROPPED_MAX: Final = 1 << 18

#: Entries of lost shards that are dropped at a time, as a rule: some hundred microseconds.
DROP_ENTRIES: Final = 64

#: The words that mutations check while the worker is fenced.
_NOTHING: Final = memoryview(bytes(8 * SHARD_COUNT)).cast("Q")


class ShardWords:
    """The shard words of one worker. ``words`` is SHARD_COUNT u64, in place (a memoryview or an array).

    ``shown``: a second place for readers, who do not see ``words`` then. What others store there is not believed.
    """

    def __init__(self, words: memoryview, shown: memoryview | None = None) -> None:
        if len(words) != SHARD_COUNT:
            raise UsageError(f"{SHARD_COUNT} shard words, not {len(words)}")
        self.words = words
        self._shown = shown
        #: The words that mutations check: accepted if ``0 < word < FROZEN``. Zeros while fenced.
        self.accepting = words
        #: The epochs and roles of the last map.
        self.since: NDArray[np.uint64] = np.zeros(SHARD_COUNT, np.uint64)
        self.roles: NDArray[np.uint8] = np.zeros(SHARD_COUNT, np.uint8)
        #: Number of MOVING words. While it is 0, the bookkeeping of moves costs nothing.
        self.moving = 0
        #: How often it has fallen to 0.
        self.moves = 0
        #: Digests that left the table while their shard was moving in.
        self.dropped: set[bytes] = set()
        #: Fall-backs that ended because of DROPPED_MAX.
        self.overflows = 0
        #: Shards taken away whose entries are being dropped: the epoch of the newest FREEZE since then, 0 for none.
        self.clearing: dict[int, int] = {}
        #: What :attr:`awaited` has found; None once the map or ``clearing`` has other shards.
        self._awaited: bool | None = None
        #: The shards that the last :meth:`retire` took away.
        self._gone: list[int] = []
        #: Where others are told which shards can be read no more (``arena/events/ring.py``); None: nobody is.
        self.events: EventRing | None = None

    def _array(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.words, np.uint64)

    def _store(self, shard: int, word: int) -> None:
        if self.events is not None and 0 < self.words[shard] < FROZEN and not 0 < word < FROZEN:
            self.events.append(SHARD, shard)
        self.words[shard] = word
        if self._shown is not None:
            self._shown[shard] = word

    def mend(self) -> int:
        """Show readers the words again where somebody else has stored others. Return how many. O(shards), by numpy."""
        if self._shown is None:
            return 0
        words = self._array()
        spoilt = np.flatnonzero(words != np.frombuffer(self._shown, np.uint64))
        for shard in spoilt.tolist():
            self._shown[shard] = self.words[shard]
        return len(spoilt)

    def clear(self) -> None:
        """Zero all words, before the arena is closed."""
        if self.events is not None:
            self.events.append(CLOSED)
        for shard in range(SHARD_COUNT):
            self._store(shard, 0)

    # -- the map --------------------------------------------------------------------------------

    def retire(self, epoch: int, since: bytes, roles: bytes) -> bool:
        """Apply the first half of the map of ``epoch``: zero the words of the shards that it takes away.

        Freeze those that it moves out, too: whoever notes that the map is known has then nothing readable left that the
        next owner may supersede. Return True if a shard was taken away. The caller then drops its entries before
        :meth:`take`, or calls :meth:`begin_clearing` and drops them later. Raise UsageError, with nothing changed, for
        a malformed map.
        """
        if len(since) != 8 * SHARD_COUNT or len(roles) != SHARD_COUNT:
            raise UsageError("a map's roles and epochs are for all shards")
        if not 0 < epoch <= EPOCH_MASK:
            raise UsageError(f"no map has epoch {epoch}: 0 in a shard's word means not owned")
        epochs = np.frombuffer(since, "<u8").astype(np.uint64)
        parts = np.frombuffer(roles, np.uint8)
        if int(parts.max(initial=0)) > ShardRole.OUTGOING:
            raise UsageError(f"there is no shard role {int(parts.max())}")
        mine = (parts == ShardRole.OWNER) | (parts == ShardRole.INCOMING)
        leaving = parts == ShardRole.OUTGOING
        if bool((epochs[mine | leaving] == 0).any()) or bool((epochs > np.uint64(EPOCH_MASK)).any()):
            raise UsageError("the epoch of an owned shard is positive: 0 in its word means not owned")
        self.since, self.roles, self._awaited = epochs, parts, None
        words = self._array()
        held = words & np.uint64(EPOCH_MASK)
        frozen = words >= np.uint64(FROZEN)
        same = ~frozen & (held == epochs)
        newer = frozen & (held > np.uint64(epoch))  # frozen by a newer map than this
        ended = np.where(frozen, held >= epochs, held < epochs)  # by this move, not an earlier one
        keep = newer | (mine & same) | (leaving & ended)
        self._gone = np.flatnonzero((words != 0) & ~keep).tolist()
        for shard in self._gone:
            self._store(shard, 0)
        self._set_words(leaving_only=True)
        for shard, frozen_at in self.clearing.items():  # the same rules for a FREEZE that is only remembered
            if frozen_at <= epoch and not (leaving[shard] and frozen_at >= epochs[shard]):
                self.clearing[shard] = 0
        self._recount()
        return bool(self._gone)

    def begin_clearing(self) -> list[int]:
        """Note that the entries of the shards that :meth:`retire` took away are dropped later. Return these shards."""
        for shard in self._gone:
            self.clearing[shard] = 0
        self._awaited = None
        return self._gone

    def cleared(self, but: Iterable[int] = ()) -> None:
        """Set the words that waited: the last entry of a shard that was taken away is dropped.

        ``but``: shards of which there may be more. They go on waiting. O(shards).
        """
        clearing = self.clearing
        self.clearing, self._awaited = {shard: clearing.pop(shard) for shard in but}, None
        for shard, epoch in clearing.items():
            if epoch:
                self._store(shard, FROZEN | epoch)
        self._set_words()

    @property
    def awaited(self) -> bool:
        """Return True if the last map gives this worker a shard that is being cleared.

        O(those), by numpy, and O(1) until one of both changes: it is asked for in each turn that drops entries.
        """
        if self._awaited is None:
            parts = self.roles[list(self.clearing)]
            self._awaited = bool(((parts == ShardRole.OWNER) | (parts == ShardRole.INCOMING)).any())
        return self._awaited

    def take(self) -> int:
        """Apply the second half: set the words of owned shards, freeze those that leave. Return the number owned.

        INCOMING shards wait for :meth:`adopt`, those that are being cleared for :meth:`cleared`. A fence ends.
        """
        self._set_words()
        self.accepting = self.words
        return self.count

    def _set_words(self, *, leaving_only: bool = False) -> None:
        """Set the words that the last map gives and that are not set yet; ``leaving_only``: of those that move out."""
        words = self._array()
        wanted = words.copy()
        if not leaving_only:
            owner = (self.roles == ShardRole.OWNER) & (words < np.uint64(FROZEN))
            owner[list(self.clearing)] = False
            wanted[owner] = self.since[owner]
        leaving = (self.roles == ShardRole.OUTGOING) & (words != 0) & (words < np.uint64(FROZEN))
        wanted[leaving] = self.since[leaving] | np.uint64(FROZEN)
        changed = np.flatnonzero(wanted != words)
        for shard, word in zip(changed.tolist(), wanted[changed].tolist()):
            self._store(shard, word)
        self._recount()

    def fence(self) -> None:
        """Refuse all mutations until the next map, as the manager does not know this worker. Readers are unaffected."""
        self.accepting = _NOTHING

    @property
    def fenced(self) -> bool:
        """Return True if all mutations are refused."""
        return self.accepting is _NOTHING

    @property
    def count(self) -> int:
        """Return the number of owned shards, which accept mutations unless fenced."""
        return int((self._array() - np.uint64(1) < np.uint64(FROZEN - 1)).sum())

    @property
    def frozen(self) -> int:
        """Return the number of shards kept for another owner."""
        return int((self._array() >= np.uint64(FROZEN)).sum())

    def stats(self) -> dict[str, int | bool]:
        """Return gauges. O(shards), by numpy."""
        return {
            "shards": self.count, "moving": self.moving, "frozen": self.frozen, "dropped": len(self.dropped),
            "overflows": self.overflows, "fenced": self.fenced,
        }  # fmt: skip

    def recover(self) -> None:
        """End all fall-backs and fence: a predecessor's remembered digests, and whether it was fenced, are lost."""
        self.mend()
        for shard in np.flatnonzero(self._array() & np.uint64(MOVING)).tolist():
            self._store(shard, self.words[shard] & ~MOVING)
        self._recount()
        self.fence()

    # -- moving ---------------------------------------------------------------------------------

    def freeze(self, epoch: int, shards: Iterable[int], known: int = 0) -> list[int] | None:
        """Freeze shards that a new owner takes over by the map of ``epoch``. Return those that have a word here.

        The others are frozen too: an earlier map, not received yet, may make this worker their owner. Return None, with
        nothing changed, if a word is newer, or if the last map here, that of epoch ``known``, is as new as the caller's
        and gives this worker a shard: the caller's map is old. Raise UsageError for an epoch that no map after it can
        have: no later map would ever thaw the shards.
        """
        if not 0 < epoch <= epoch_limit(known):
            raise UsageError(f"no map has epoch {epoch}: the last one here is of epoch {known}")
        asked = list(shards)
        places = np.array(asked, np.intp)
        parts = self.roles[places]
        if epoch <= known and bool(((parts == ShardRole.OWNER) | (parts == ShardRole.INCOMING)).any()):
            return None  # also where the word is 0: until ADOPT, or until the old entries are dropped
        for shard in asked:
            word = self.words[shard]
            held = word & EPOCH_MASK
            if held > epoch or (held == epoch and word < FROZEN) or self.clearing.get(shard, 0) > epoch:
                return None
        here = [shard for shard in asked if self.words[shard]]
        for shard in asked:
            if shard in self.clearing:
                self.clearing[shard] = epoch
            else:
                self._store(shard, FROZEN | epoch)
        self._recount()
        return here

    def adopt(self, epoch: int, shards: Iterable[int], fallback: Iterable[int]) -> int:
        """Take over the incoming ones of ``shards``. Return how many of them are owned now.

        ``epoch`` is that of the mover's map; a shard that arrived by a later one keeps waiting. In ``fallback`` the
        previous owner is frozen and keeps what is missing here. Nothing is adopted while fenced.
        """
        behind = set(fallback)
        count = 0
        for shard in shards:
            since = int(self.since[shard])
            waits = self.roles[shard] == ShardRole.INCOMING and not self.words[shard]
            if waits and since <= epoch and not self.fenced and shard not in self.clearing:
                self._store(shard, since | (MOVING if shard in behind else 0))
            count += self.accepts(shard)
        self._recount()
        return count

    def finish(self, shards: Iterable[int], epoch: int = EPOCH_MASK) -> int:
        """End the moves of shards that arrived by a map of ``epoch`` or earlier. Return how many were moving."""
        ended = 0
        for shard in shards:
            word = self.words[shard]
            if word & MOVING and word < FROZEN and word & EPOCH_MASK <= epoch:
                self._store(shard, word & EPOCH_MASK)
                ended += 1
        self._recount()
        return ended

    def end_fallbacks(self) -> None:
        """End all fall-backs, as a digest that left the table is not known: what was not copied is a miss."""
        if self.moving:
            self.finish(range(SHARD_COUNT))

    def note_dropped(self, digest: bytes) -> None:
        """Remember a digest that left the table, or was deleted without an entry. Call it while ``moving``."""
        word = self.words[shard_of(digest)]
        if not word & MOVING or word >= FROZEN:
            return
        if len(self.dropped) >= DROPPED_MAX and digest not in self.dropped:
            self.overflows += 1
            self.finish(range(SHARD_COUNT))
            return
        self.dropped.add(digest)

    def note_dropped_many(self, digests: bytes) -> None:
        """Do :meth:`note_dropped` for many, which are here one after the other. O(those), by numpy."""
        low = np.frombuffer(digests, "<u8")[::2]
        words = self._array()[(low & np.uint64(SHARD_MASK)).astype(np.intp)]
        moving = np.flatnonzero((words & np.uint64(MOVING) != 0) & (words < np.uint64(FROZEN))).tolist()
        self.dropped.update(digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at in moving)
        if len(self.dropped) > DROPPED_MAX:
            self.overflows += 1
            self.finish(range(SHARD_COUNT))

    # -- queries ----------------------------------------------------------------------------------

    def accepts(self, shard: int) -> bool:
        """Return True if mutations of this shard are accepted."""
        return 0 < self.accepting[shard] < FROZEN

    def may_copy(self, digest: bytes, epoch: int = EPOCH_MASK) -> bool:
        """Return True if a mover with a map of ``epoch`` may store this digest, unless the table has it."""
        word = self.accepting[shard_of(digest)]
        return MOVING < word < FROZEN and word & EPOCH_MASK <= epoch and digest not in self.dropped

    def status_of_miss(self, digest: bytes) -> int:
        """Return the status of an absent digest: NOT_FOUND, PREVIOUS (ask that owner too) or WRONG_OWNER."""
        shard = shard_of(digest)
        word = self.words[shard]
        if not word and self.roles[shard] == ShardRole.INCOMING:
            return Status.PREVIOUS  # not adopted yet: all values are there
        if not 0 < word < FROZEN:
            return Status.WRONG_OWNER
        if word & MOVING and digest not in self.dropped:
            return Status.PREVIOUS
        return Status.NOT_FOUND

    def moved_since(self, digest: bytes) -> int:
        """Return the epoch since which the digest's shard is owned, if :meth:`status_of_miss` is PREVIOUS.

        It identifies the previous owner: the one in a map with the same epoch.
        """
        shard = shard_of(digest)
        return self.words[shard] & EPOCH_MASK or int(self.since[shard])

    def lost(self) -> NDArray[np.bool_]:
        """Return a mask of the shards without a word. O(shards), by numpy."""
        mask: NDArray[np.bool_] = self._array() == 0
        return mask

    def check(self) -> None:
        """Raise CorruptionError unless the invariants hold. O(shards + dropped)."""
        words = self._array()
        frozen, moving = words >= np.uint64(FROZEN), (words & np.uint64(MOVING)) != 0
        if bool((frozen & moving).any()):
            raise CorruptionError(f"shard {int(np.flatnonzero(frozen & moving)[0])} is frozen and moving in at once")
        bare = (words != 0) & (words & np.uint64(EPOCH_MASK) == 0)
        if bool(bare.any()):
            raise CorruptionError(f"shard {int(np.flatnonzero(bare)[0])} has a word without an epoch")
        if any(self.words[shard] for shard in self.clearing):
            raise CorruptionError("a shard has a word while its old entries are being dropped")
        if int(moving.sum()) != self.moving:
            raise CorruptionError(f"{int(moving.sum())} shards are moving, {self.moving} counted")
        if len(self.dropped) > DROPPED_MAX:
            raise CorruptionError(f"{len(self.dropped)} digests are remembered, {DROPPED_MAX} are allowed")
        if any(not self.words[shard_of(digest)] & MOVING for digest in self.dropped):
            raise CorruptionError("a digest is remembered of a shard that is not moving")

    def _recount(self) -> None:
        words = self._array()
        before, self.moving = self.moving, int(((words & np.uint64(MOVING)) != 0).sum())
        self.moves += before > 0 == self.moving
        if self.dropped and self.moving != before:
            self.dropped = {digest for digest in self.dropped if self.words[shard_of(digest)] & MOVING}


class LostEntries:
    """Drops the entries of one table whose shards have no word. ``drop`` removes the entry in a slot.

    It looks through the table in rounds. Shards that are taken away in the middle of one do not begin it anew, but wait
    for the next. Else maps that come faster than a round lasts would keep the words of all others waiting.
    """

    def __init__(self, words: ShardWords, table: Table, drop: Callable[[int], None]) -> None:
        self._words = words
        self._table = table
        self._drop = drop
        #: Slots that have been found, and where to look for more: 0 outside a round.
        self._found: list[int] = []
        self._at = 0
        #: Shards that were taken away in the middle of this round: slots that it has passed may have their entries.
        self._later: set[int] = set()

    def begin(self) -> None:
        """Note that the last map has taken shards away: look at all slots for their entries."""
        gone = self._words.begin_clearing()
        if self._at:
            self._later.update(gone)

    def drop_some(self, most: int) -> bool:
        """Drop at most ``most`` entries. Return True while there may be more. Nothing is pending in the store.

        O(``most`` + a block).
        """
        words, table, found = self._words.words, self._table, self._found
        if not found:
            more, self._at = table.of_shards(self._words.lost(), self._at)
            found += more
        left = max(0, len(found) - most)
        for slot in found[left:]:
            # Since the search it may have been evicted, and taken by an entry of a shard that is owned.
            if table.offset(slot) and not words[table.shard(slot)]:
                self._drop(slot)
        del found[left:]
        if found or self._at < table.slots:
            return True
        later, self._later = self._later, set()
        self._words.cleared(later)
        self._at = 0
        return bool(later)
