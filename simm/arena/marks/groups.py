"""Groups: entries that are of no use without each other, as the keys and the values of one page (docs/groups.md).

The members of a group leave together. Whenever one leaves the table, whatever the reason, the others are *orphans*, and
leave with the next :meth:`Groups.drop_orphans`. One that is held or hard kept then stays, in no group.

One request may make 63 orphans of each key that it names, 250,000 in all. They go in the same turn, many at once, as
evictions of a batch do: so nobody sees a part of a group, and whatever counts entries or tells of them is right at any
time. Readers see heartbeats meanwhile.

Room for one value of 64 MiB takes 16,384 values of a page, which may leave a million orphans. So evictions end once
one request has left 65,536, for all that it wants together (`simm.arena.space`). The grants come short then, and the
next request for them goes on.

Each member's slot has the group's *number* in the upper half of its marks. A number has two parts: 26 bits of a hash of
all members' digests, and in its lower six bits how many they are, less one. So it is never 0, and a successor that
finds fewer slots of a shard with one number than the number says knows that the group is not whole:

* The worker died while it marked the group: nobody was told that it is one.
* The worker died before the last orphans had left.

What is marked so is dropped by the recovery. A store of the marks is a single word, and no order of them matters. Two
groups of one shard and number, with a probability of 2^-26 for each pair, are one group after a recovery: they leave
together, and no value is affected.

In the worker's memory a group is a ring: each member's slot has its own number XOR the next one's, and a slot of no
group 0. That takes five bytes a slot from the first group on. They are 0 at first, so the kernel gives each page of
them when it is used, and the first group costs no turn of O(slots). Only a recovery looks at the marks in the arena, so
a stray store there costs some entries at worst.

A group is as young as its youngest member, as far as that is cheap. A policy passes over a member once for each use of
another one (:meth:`Groups.is_used`): as long as that one has its visited byte, and once after a search has cleared it.
``FIFO`` counts no uses. Windows and slabs that are evicted as a whole are compared without regard to groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...constants import BATCH_KEYS_MAX, GROUP_KEYS_MAX
from ...wire.status import Status
from ..hashing import SHARD_BITS, SHARD_MASK, shard_of
from .kept import HARD, KEPT_MASK
from .told import Told

if TYPE_CHECKING:
    from ...table import Entry
    from ..shard_words import ShardWords

#: Members that one search for a victim passes over in a row. A policy gives up after somewhat more (REJECTED_MAX).
PASSED_MAX: Final = 24

#: Orphans from which on they are dropped many at once.
MANY: Final = 24

_COUNT_BITS: Final = (GROUP_KEYS_MAX - 1).bit_length()
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1
#: A slot's marks have its group's number above so many bits.
MARK_BITS: Final = 32
_SHARDS: Final = np.uint64(SHARD_MASK)


def number_of(digests: Sequence[bytes]) -> int:
    """Return the number of the group of these digests: 1 to 2^32 - 1. Their order does not matter."""
    hashed = blake2b(b"".join(sorted(digests)), digest_size=4).digest()
    return int.from_bytes(hashed, "little") & ~_COUNT_MASK | len(digests) - 1


def members_of(number: int) -> int:
    """Return how many members the group of this number has."""
    return (number & _COUNT_MASK) + 1


def is_group(digests: Sequence[bytes]) -> bool:
    """Return True if these digests may be a group: 2 to 64 different ones of one shard."""
    if not 2 <= len(digests) <= GROUP_KEYS_MAX or len(set(digests)) < len(digests):
        return False
    shard = shard_of(digests[0])
    return all(shard_of(digest) == shard for digest in digests)


class Slots(Protocol):
    """What groups ask of a table (``simm/table.py``)."""

    @property
    def slots(self) -> int: ...
    def lookup(self, digest: bytes, /) -> int: ...
    def entry(self, slot: int, /) -> Entry: ...
    def marks(self, slot: int, /) -> int: ...
    def set_marks(self, slot: int, marks: int, /) -> None: ...
    def marked(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]: ...


class Keeps(Protocol):
    """What groups ask of the kept entries."""

    def how(self, slot: int, /) -> int: ...


class Chunks(Protocol):
    """What groups ask of the room for values (``arena/space.py``)."""

    @property
    def kept(self) -> Keeps: ...
    def offset(self, slot: int, /) -> int: ...
    def is_held(self, offset: int, /) -> bool: ...
    waiting: Callable[[], int] | None
    def heed(self, is_used: Callable[[int], bool], on_use: Callable[[int], None], /) -> None: ...


class Groups:
    """The groups of one arena. All methods but :meth:`restore` are O(members of the group).

    Args:
        table: whose slots are marked.
        space: which holds the members' chunks, and asks :meth:`is_used`.
        visited: a byte for each slot.
        words: of the shards: whether the worker takes mutations.
        readable: returns whether an entry's value may be read, by its namespace, digest and flags.
        drop: drops an entry from table and space, after :meth:`leave`.
        drop_many: the same for at most BATCH_KEYS_MAX, of which none is held, and their chunks' offsets.
        beat: shows readers that the worker is there.
        note: remembers the keys in these slots as evicted.
    """

    def __init__(
        self, table: Slots, space: Chunks, visited: memoryview, words: ShardWords,
        readable: Callable[[int, bytes, int], bool], drop: Callable[[int], None],
        drop_many: Callable[[list[int], list[int]], None], beat: Callable[[], None],
        note: Callable[[Sequence[int]], None] = lambda _slots: None,
    ) -> None:  # fmt: skip
        self._table = table
        self._space = space
        self._visited = visited
        self._accepts = words.accepts
        #: Digests that clients have put into groups while their shard moves in.
        self.told = Told(words)
        self._readable = readable
        self._drop, self._drop_many, self._beat, self._note = drop, drop_many, beat, note
        #: By slot: its number XOR that of the next member; empty until the first group.
        self._links = memoryview(b"").cast("I")
        #: Slots whose groups have lost a member, and whether that was evicted. In order, so that runs can be repeated.
        self.orphans: dict[int, bool] = {}
        #: By slot: 1 if another member was used, and this one has not been passed over for that.
        self._owed = memoryview(b"")
        #: Members passed over in a row, and the last one.
        self._passed = 0
        self._asked = -1
        #: False until the first group: :meth:`leave` and :meth:`is_used` need not be called then.
        self.used = False
        #: Groups that are whole.
        self.count = 0
        #: Entries that were dropped as others of their groups had left.
        self.evicted = self.evicted_with = 0

    # -- marking ------------------------------------------------------------------------------

    def mark_many(self, groups: Sequence[Sequence[bytes]], mover: int = 0) -> list[int]:
        """Do :meth:`mark` for many; return a Status for each.

        ``mover``: the epoch of the map by which a mover carries groups here. PRESENT: something newer was said of a
        member, or it has left the table meanwhile, and this group is none any more.
        """
        takes = self.told.takes_mark
        if mover:
            return [
                self.mark(digests) if all(takes(digest, mover) for digest in digests) else Status.PRESENT
                for digests in groups
            ]
        statuses = []
        for digests in groups:
            statuses.append(status := self.mark(digests))
            if status == Status.OK:
                for digest in digests:
                    self.told.note(digest)
        return statuses

    def mark(self, digests: Sequence[bytes]) -> int:
        """Make the entries of these digests a group; return a Status. Nothing is marked unless it is OK.

        NOT_FOUND if one of them is not stored here, BAD_REQUEST unless :func:`is_group`. A member of another group
        leaves that: what is left of it is no group any longer. The caller has nothing pending.
        """
        if not is_group(digests):
            return Status.BAD_REQUEST
        if not self._accepts(shard_of(digests[0])):
            return Status.WRONG_OWNER
        table = self._table
        slots = []
        for digest in digests:
            slot = table.lookup(digest)
            if slot < 0 or slot in self.orphans:
                return Status.NOT_FOUND
            entry = table.entry(slot)
            if not self._readable(entry.namespace, digest, entry.flags):
                return Status.NOT_FOUND
            slots.append(slot)
        if self._ring(slots[0]) != set(slots):
            for slot in slots:
                self.ungroup(slot)
        number = number_of(digests)
        for slot in slots:
            self._set_number(slot, number)
        self._link(slots)
        return Status.OK

    def restore(self) -> list[str]:
        """Take over the marks that a predecessor has left, and drop what is left of groups that are not whole.

        Return notes for the log. O(slots + n log n) for n members, by numpy.
        """
        slots, low, marks = self._table.marked()
        keys = (marks >> np.uint64(MARK_BITS)).astype(np.int64) << SHARD_BITS | (low & _SHARDS).astype(np.int64)
        marked = np.flatnonzero(keys > SHARD_MASK)
        order = marked[np.argsort(keys[marked], kind="stable")]
        keys, slots = keys[order], slots[order]
        if not len(keys):
            return []
        starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        ends = np.append(starts[1:], len(keys))
        sizes = ends - starts
        whole = sizes > (keys[starts] >> SHARD_BITS & _COUNT_MASK)
        follows = np.append(slots[1:], slots[:1])
        follows[ends - 1] = slots[starts]
        rows = np.repeat(whole, sizes)
        self._begin()
        np.frombuffer(self._links, np.uint32)[slots[rows]] = slots[rows] ^ follows[rows]
        self.count = int(np.count_nonzero(whole & (sizes > 1)))
        self.orphans = dict.fromkeys(slots[~rows].tolist(), False)
        notes = [f"{len(self.orphans)} entries of groups that are not whole dropped"] if self.orphans else []
        self.drop_orphans()
        return notes

    def _begin(self) -> None:
        if not self.used:
            self._links = np.zeros(self._table.slots, np.uint32).data
            self.used = True
            self._owed = np.zeros(self._table.slots, np.uint8).data
            self._space.heed(self.is_used, self._on_use)
            self._space.waiting = self.waiting

    def _ring(self, slot: int) -> set[int]:
        """Return the slots of the group of ``slot``, itself included."""
        ring = {slot}
        if self.used:
            links = self._links
            mate = slot ^ links[slot]
            while mate != slot:
                ring.add(mate)
                mate ^= links[mate]
        return ring

    def _link(self, slots: Sequence[int]) -> None:
        """Make a ring of slots that are in none, or in this one."""
        self._begin()
        if not self._links[slots[0]]:
            self.count += 1
        for slot, mate in zip(slots, [*slots[1:], slots[0]]):
            self._links[slot] = slot ^ mate
            self._owed[slot] = 0

    def ungroup(self, slot: int) -> None:
        """Make all members of the group of ``slot`` ordinary entries."""
        ring = self._ring(slot)
        for mate in ring:
            self._set_number(mate, 0)
        if len(ring) > 1:
            self.count -= 1
            for mate in ring:
                self._links[mate] = 0

    def _set_number(self, slot: int, number: int) -> None:
        self._table.set_marks(slot, self._table.marks(slot) & KEPT_MASK | number << MARK_BITS)

    # -- leaving ------------------------------------------------------------------------------

    def leave_many(self, slots: Sequence[int], evicted: bool = False) -> None:
        """Do :meth:`leave` for many."""
        if self.used:
            links, orphans = self._links, self.orphans
            for slot in slots:
                if links[slot]:
                    self.leave(slot, evicted)
                elif orphans:
                    orphans.pop(slot, None)

    def leave(self, slot: int, evicted: bool = False) -> None:
        """Note that an entry is about to leave the table: the others of its group are orphans.

        ``evicted``: to make room, as the others then are.
        """
        self.orphans.pop(slot, None)
        links = self._links
        if link := links[slot]:
            self.count -= 1
            links[slot] = 0
            mate, orphans = slot ^ link, self.orphans
            while mate != slot:
                orphans[mate] = evicted
                link = links[mate]
                links[mate] = 0
                mate ^= link

    def waiting(self) -> int:
        """Return how many orphans there are, and show readers a heartbeat. The room for values asks as it evicts."""
        self._beat()
        return len(self.orphans)

    def drop_orphans(self) -> None:
        """Drop the orphans. Those that are held or hard kept stay, in no group. Nothing is pending. O(orphans)."""
        orphans = self.orphans
        if len(orphans) >= MANY:
            self._drop_all()
        is_held, offset, how = self._space.is_held, self._space.offset, self._space.kept.how
        while orphans:
            slot, evicted = orphans.popitem()
            if is_held(offset(slot)) or how(slot) == HARD:
                self._set_number(slot, 0)
                continue
            if evicted:
                self._note((slot,))
                self.evicted_with += 1
            self._drop(slot)
            self.evicted += 1

    def _drop_all(self) -> None:
        """Do :meth:`drop_orphans` in parts of BATCH_KEYS_MAX, with a heartbeat after each."""
        orphans, space = self.orphans, self._space
        while orphans:
            part = dict(orphans.popitem() for _ in range(min(BATCH_KEYS_MAX, len(orphans))))
            slots = [*part]
            offsets = [*map(space.offset, slots)]
            hows = map(space.kept.how, slots)
            stay = [held or how == HARD for held, how in zip(map(space.is_held, offsets), hows)]
            if True in stay:
                for slot in compress(slots, stay):
                    self._set_number(slot, 0)
                goes = [*map(not_, stay)]
                slots, offsets = [*compress(slots, goes)], [*compress(offsets, goes)]
            if slots:
                gone = [*filter(part.__getitem__, slots)]
                self._note(gone)
                self.evicted_with += len(gone)
                self._drop_many(slots, offsets)
                self.evicted += len(slots)
            self._beat()

    def is_used(self, slot: int) -> bool:
        """Return True if a policy should pass over a member, as another one of its group was used. See the module."""
        if slot == self._asked:  # a batch asks twice
            self._asked = -1
            return True
        if self._passed < PASSED_MAX:
            used, links = self._owed[slot], self._links
            mate = slot ^ links[slot]
            while not used and mate != slot:
                used = self._visited[mate]
                mate ^= links[mate]
            if used:
                self._owed[slot] = 0
                self._asked = slot
                self._passed += 1
                return True
        self._passed, self._asked = 0, -1
        return False

    def _on_use(self, slot: int) -> None:
        """Note that a search for a victim has found a use."""
        links = self._links
        mate = slot ^ links[slot]
        while mate != slot:
            self._owed[mate] = 1
            mate ^= links[mate]

    def stats(self) -> dict[str, int]:
        """Return counters and gauges."""
        return {"groups": self.count, "group_evictions": self.evicted, "evicted_with_groups": self.evicted_with}
