"""Which entries are kept: by class, until when, and whose bytes.

A *hard* kept entry is not evicted before its time. It is in a queue of the policy that nobody asks for victims, so it
costs the others nothing. A *soft* one is in a queue of its size class that is asked last. A slab or a large chunk with
a kept entry in it is no part of a window either.

A *near* copy is the opposite: its own queue is asked first, and it is in nobody's way (`simm.arena.marks.near`).

Hard kept bytes are bounded, by namespace and in all, so that others find room. So are the *pieces* that hard kept
entries fence: the aligned 2 MiB of the region in which their chunks lie. One entry of 4 KiB keeps its piece from all
other size classes, so a bound of bytes alone would let a 512th of the region shut them out of all of it. In all there
may be as many pieces as their bytes may be. A namespace, whose entries need not lie together, may fence more than its
bytes may be: by half of what is left.

They are bounded in *slots* too, by the same shares of the table, as values of 64 bytes would take all of it with a
fiftieth of the bytes. And each set of slots has some that are not hard kept: a key whose two sets were full of such
entries could not be stored before their time.

An overwrite keeps an entry's mark. If the new value is larger than what the bounds allow, or fences a piece more than
they do, the entry is soft kept from then on. If it is in parts, it is not kept any more.

All methods are O(1) and O(pieces of the entry), or say otherwise. Times are whole seconds, and each that some entry has
is a set of slots: nothing outdated is left behind in it, and no turn has to clean up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, NamedTuple

from ...constants import KEEP_HARD, KEEP_SHARES, KEEP_SOFT, SLAB_BYTES, WAYS
from ...constants import NEAR as NEAR_CLASS
from ...errors import CorruptionError
from ...slab import FREE, GROUPS, LARGE, Allocator, Span, class_of
from ..queues import Policy, Rejected

SOFT: Final = KEEP_SOFT
HARD: Final = KEEP_HARD
NEAR: Final = NEAR_CLASS
#: By class: in which order entries go that lie in one full set. What is hard kept does not.
HARD_RANK: Final = 3
RANKS: Final = (1, 2, HARD_RANK, 0)
#: Slots of one set that may have hard kept entries: the others are there for all keys, also if one is pinned.
HARD_WAYS_MAX: Final = WAYS - 2
#: Seconds that :meth:`KeptEntries.due` looks at for each entry that it may return: most have no entry.
SECONDS_EACH: Final = 8
#: Of more seconds in a row without a look, those before the first one with an entry are left out.
SECONDS_BEHIND: Final = 1 << 17
#: What may be taken of the region, percent: by hard kept entries in all, by those of one namespace, by near copies.
Shares = tuple[int, int, int]
#: Bits of the time in a slot's word; the class is above them. 2^30 s are 34 years since the host's start.
UNTIL_BITS: Final = 30
UNTIL_MASK: Final = (1 << UNTIL_BITS) - 1
#: The lower half of a slot's marks.
KEPT_MASK: Final = (1 << 32) - 1
#: Near copies that one allocation evicts at most: of large values several make room for one.
NEAR_EVICTED_MAX: Final = 8
#: Allocations in a row that pass copies by.
NEAR_OWED_MAX: Final = 64

#: Groups of the policy: those of the size classes, one for all hard kept entries, those of soft kept ones, of copies.
HARD_GROUP: Final = GROUPS
SOFT_GROUPS: Final = GROUPS + 1
NEAR_GROUPS: Final = 2 * GROUPS + 1
KEPT_GROUPS: Final = 3 * GROUPS + 1


def pack(how: int, until: int) -> int:
    """Return the word of an entry that is kept until a time, seconds of CLOCK_BOOTTIME."""
    return how << UNTIL_BITS | min(until, UNTIL_MASK)


def unpack(word: int) -> tuple[int, int]:
    """Return (class, time) of a slot's word, (0, 0) for one that is not kept."""
    return (word >> UNTIL_BITS & 3, word & UNTIL_MASK) if word & KEPT_MASK else (0, 0)


class KeptEntry(NamedTuple):
    """One kept entry. ``bytes`` and ``offset`` are those of its chunk."""

    how: int
    until: int
    namespace: int
    bytes: int
    offset: int

    @property
    def pieces(self) -> range:
        """Return where the pieces begin in which its chunk lies. That of a chunk in a slab is the slab."""
        return range(self.offset & -SLAB_BYTES, self.offset + self.bytes, SLAB_BYTES)


def pieces_for(share: int) -> int:
    """Return how many pieces may be fenced by what takes at most ``share`` bytes.

    Values that lie together may take all of their share, though they begin within a piece and end within one.
    """
    return 1 - -share // SLAB_BYTES if share else 0


class KeptEntries:
    """The kept entries of one region.

    Args:
        allocator, policy, offsets: the region's; the last is the offset of each slot's chunk, -1 without one.
        in_use: tells whether a slot's entry may not be evicted, as its chunk is in use.
        changed: called when something may be evicted that could not be before.
        shares: bounds of what is hard kept, and of near copies.
    """

    def __init__(
        self, allocator: Allocator, policy: Policy, offsets: Sequence[int], in_use: Rejected,
        changed: Callable[[], None], shares: Shares = KEEP_SHARES,
    ) -> None:  # fmt: skip
        self._in_use = in_use
        self._allocator = allocator
        self._policy = policy
        self._offsets = offsets
        self._changed = changed
        self.hard_max = self.namespace_max = self.near_max = self.hard_bytes = 0
        #: Hard kept entries, in all, by namespace, and by set of slots; and the bounds of the first two.
        self.hard_slots = self.hard_slots_max = self.namespace_slots_max = 0
        self._own_slots: dict[int, int] = {}
        self._set_slots: dict[int, int] = {}
        self.bound_by(shares)
        #: By slot. Others look into it, at every put: a call would cost more than the look.
        self.entries: dict[int, KeptEntry] = {}
        #: Slots by the time at which their keeping ends; no time before the second one is in it.
        self._due: dict[int, dict[int, None]] = {}
        self._due_from = 0
        #: Bytes by (namespace, class).
        self.bytes: dict[tuple[int, int], int] = {}
        self.near_bytes = 0
        #: By group: the number of near copies in each that has some.
        self.near: dict[int, int] = {}
        #: By namespace: the slots of its near copies, in the order in which they were made.
        self._own_near: dict[int, dict[int, None]] = {}
        #: By group: copies that were made in place of others, each of which one allocation is to make good for.
        self.owed: dict[int, int] = {}
        #: By class: the number of kept entries in each piece that has some; and of hard ones by namespace.
        self._pieces: dict[int, dict[int, int]] = {SOFT: {}, HARD: {}, NEAR: {}}
        self._own_pieces: dict[int, dict[int, int]] = {}
        #: False while soft kept entries may be evicted too.
        self.sparing = True
        #: Entries that an overwrite has made soft; and what is called with each of them.
        self.softened = 0
        self.softened_one: Callable[[int, KeptEntry], None] = lambda _slot, _kept: None
        #: Returns True if an overwrite ends the keeping of a slot's entry, which was kept like that.
        self.outdated: Callable[[int, int], bool] = lambda _slot, _how: False

    def bound_by(self, shares: Shares) -> None:
        """Take other bounds. What is beyond them stays until its time, or until copies go first; more is refused."""
        size = self._allocator.size
        self.hard_max, self.namespace_max, self.near_max = (size * share // 100 for share in shares)
        slots = len(self._offsets)
        self.hard_slots_max, self.namespace_slots_max = (slots * share // 100 for share in shares[:2])
        #: What was hard kept then, which may be more.
        self.hard_before = self.hard_bytes

    def __len__(self) -> int:
        """Return the number of kept entries."""
        return len(self.entries)

    def how(self, slot: int) -> int:
        """Return how the entry in a slot is kept, 0 if it is not."""
        kept = self.entries.get(slot)
        return 0 if kept is None else kept.how

    def get(self, slot: int) -> KeptEntry | None:
        """Return what is known of the kept entry in a slot."""
        return self.entries.get(slot)

    def items(self) -> list[tuple[int, KeptEntry]]:
        """Return all kept entries with their slots. O(kept)."""
        return list(self.entries.items())

    # ---- keeping

    def keep(self, slot: int, how: int, until: int, namespace: int) -> bool:
        """Keep a published entry, or keep it otherwise. Return False, with nothing changed, if that is over a quota."""
        size, offset = self._place(slot)
        before = self.entries.get(slot)
        entry = KeptEntry(how, until, namespace, size, offset)
        if how == HARD:
            mine = before is not None and before.how == HARD
            more = size - (before.bytes if before is not None and mine else 0)
            own = size - (before.bytes if before is not None and mine and before.namespace == namespace else 0)
            if not (self._admits_slot(slot, namespace, before) and self._admits(entry, more, own)):
                return False
        if before is not None:
            self._forget(slot, before)
        self._note(slot, entry)
        self._enqueue(slot, how, size)
        if before is not None and before.how == HARD != how:
            self._changed()
        return True

    def end(self, slot: int) -> None:
        """End the keeping of an entry, which is from now on as if it had just been used. Nothing if it is not kept."""
        kept = self.entries.get(slot)
        if kept is not None:
            self._forget(slot, kept)
            self._policy.move(slot, class_of(kept.bytes))
            self._changed()

    def gone(self, slot: int) -> None:
        """Forget an entry that has been removed from the policy."""
        kept = self.entries.get(slot)
        if kept is not None:
            self._forget(slot, kept)

    def gone_many(self, slots: Sequence[int]) -> None:
        """Remove many entries from the policy, and forget them."""
        if self.entries:
            for slot in slots:
                self.gone(slot)
        self._policy.remove_many(slots)
        self._changed()

    def replaced(self, slot: int) -> None:
        """Take in the new chunk of a kept entry, which the policy has in its size class's group."""
        kept = self.entries[slot]
        size, offset = self._place(slot)
        self._forget(slot, kept)
        if self.outdated(slot, kept.how):
            self._changed()
            return
        now = kept._replace(bytes=size, offset=offset)
        if kept.how == HARD and not self._admits_again(kept, now):
            now = now._replace(how=SOFT)
            self.softened += 1
            self.softened_one(slot, now)
        self._note(slot, now)
        self._enqueue(slot, now.how, size)

    def due(self, now: int, most: int) -> list[int]:
        """Return at most ``most`` slots whose time has come, each once: it is still kept, and the caller ends that.

        There may be more while :meth:`is_due`, also if none is found. O(most); O(times) after a long time without one.
        """
        found: list[int] = []
        due = self._due
        if now - self._due_from > SECONDS_BEHIND:
            self._due_from = min(due, default=now)
        for at in range(self._due_from, min(now + 1, self._due_from + SECONDS_EACH * most)):
            self._due_from = at
            if (slots := due.get(at)) is not None:
                while slots and len(found) < most:  # the last ones: a search from the first would pass all that went
                    found.append(slots.popitem()[0])
                if slots:
                    return found
                del due[at]
            self._due_from = at + 1
        return found

    def is_due(self, now: int) -> bool:
        """Return whether there may be entries whose time has come, and that :meth:`due` has not returned."""
        return bool(self._due) and self._due_from <= now

    def _place(self, slot: int) -> tuple[int, int]:
        """Return the bytes of an entry's chunk, and its offset."""
        offset = self._offsets[slot]
        if offset < 0:
            raise CorruptionError(f"slot {slot} is kept, but has no chunk")
        return self._allocator.chunk_bytes(offset), offset

    @property
    def fenced_bytes(self) -> int:
        """Return the bytes of the pieces that hard kept entries fence."""
        return len(self._pieces[HARD]) * SLAB_BYTES

    @property
    def slots_by_namespace(self) -> dict[int, int]:
        """Return how many hard kept entries each namespace has. O(namespaces)."""
        return dict(self._own_slots)

    def _admits_slot(self, slot: int, namespace: int, before: KeptEntry | None) -> bool:
        """Return whether the entry of a slot, which is kept like ``before``, may be hard kept as far as slots go."""
        was = before is not None and before.how == HARD
        if was and before is not None and before.namespace == namespace:
            return True
        full = self.hard_slots >= self.hard_slots_max or self._set_slots.get(slot // WAYS, 0) >= HARD_WAYS_MAX
        return (was or not full) and self._own_slots.get(namespace, 0) < self.namespace_slots_max

    def _admits(self, entry: KeptEntry, more: int, own: int) -> bool:
        """Return whether an entry may be hard kept: so many bytes more, ``own`` of them more of its namespace."""
        used = self.bytes.get((entry.namespace, HARD), 0)
        if self.hard_bytes + more > self.hard_max or used + own > self.namespace_max:
            return False
        return not any(beyond > 0 for beyond in self._beyond(entry))

    def _admits_again(self, before: KeptEntry, now: KeptEntry) -> bool:
        """Return whether an entry that was hard kept, and is forgotten, may be so with its new chunk.

        What is beyond bounds that were cut stays, but takes neither more bytes nor more pieces.
        """
        if now.bytes > before.bytes:
            return self._admits(now, now.bytes, now.bytes)
        return all(beyond <= max(0, was) for beyond, was in zip(self._beyond(now), self._beyond(before)))

    def _beyond(self, entry: KeptEntry) -> tuple[int, int]:
        """Return by how many pieces an entry would exceed the bounds: in all, in its namespace. 0 if it adds none."""
        found: list[int] = []
        own = self._own_pieces.get(entry.namespace, {})
        mean = (self.hard_max + self.namespace_max) // 2 if self.namespace_max else 0
        for pieces, share in ((self._pieces[HARD], self.hard_max), (own, mean)):
            more = sum(base not in pieces for base in entry.pieces)
            found.append(len(pieces) + more - pieces_for(share) if more else 0)
        return found[0], found[1]

    def _enqueue(self, slot: int, how: int, size: int) -> None:
        if how == NEAR:
            self._policy.move(slot, NEAR_GROUPS + class_of(size))
            self._policy.spare_no_more(slot)
            return
        self._policy.move(slot, HARD_GROUP if how == HARD else SOFT_GROUPS + class_of(size))

    def _note(self, slot: int, kept: KeptEntry) -> None:
        self.entries[slot] = kept
        key = kept.namespace, kept.how
        self.bytes[key] = self.bytes.get(key, 0) + kept.bytes
        if kept.how == HARD:
            self.hard_bytes += kept.bytes
            self._count_hard(slot, kept.namespace, 1)
        elif kept.how == NEAR:
            group = class_of(kept.bytes)
            self.near_bytes += kept.bytes
            self.near[group] = self.near.get(group, 0) + 1
            self._own_near.setdefault(kept.namespace, {})[slot] = None
        for pieces in self._pieces_of(kept):
            for base in kept.pieces:
                pieces[base] = pieces.get(base, 0) + 1
        slots = self._due.get(kept.until)
        if slots is None:
            if kept.until < self._due_from or not self._due:
                self._due_from = kept.until
            self._due[kept.until] = {slot: None}
        else:
            slots[slot] = None

    def _forget(self, slot: int, kept: KeptEntry) -> None:
        del self.entries[slot]
        key = kept.namespace, kept.how
        self.bytes[key] -= kept.bytes
        if not self.bytes[key]:
            del self.bytes[key]
        if kept.how == HARD:
            self.hard_bytes -= kept.bytes
            self._count_hard(slot, kept.namespace, -1)
        elif kept.how == NEAR:
            group = class_of(kept.bytes)
            self.near_bytes -= kept.bytes
            self.near[group] -= 1
            if not self.near[group]:
                del self.near[group]
            del self._own_near[kept.namespace][slot]
            if not self._own_near[kept.namespace]:
                del self._own_near[kept.namespace]
        for pieces in self._pieces_of(kept):
            for base in kept.pieces:
                pieces[base] -= 1
                if not pieces[base]:
                    del pieces[base]
        if kept.how == HARD and not self._own_pieces[kept.namespace]:
            del self._own_pieces[kept.namespace]
        if (slots := self._due.get(kept.until)) is not None:
            slots.pop(slot, None)
            if not slots:
                del self._due[kept.until]

    def _count_hard(self, slot: int, namespace: int, more: int) -> None:
        """Count one hard kept entry more, or one less."""
        self.hard_slots += more
        for counts, key in ((self._own_slots, namespace), (self._set_slots, slot // WAYS)):
            if count := counts.get(key, 0) + more:
                counts[key] = count
            else:
                del counts[key]

    def _pieces_of(self, kept: KeptEntry) -> tuple[dict[int, int], ...]:
        """Return the counts by piece to which an entry adds."""
        if kept.how != HARD:
            return (self._pieces[kept.how],)
        return self._pieces[HARD], self._own_pieces.setdefault(kept.namespace, {})

    # ---- making room

    def fences(self, span: Span) -> bool:
        """Return True if a span has a kept entry that may not be evicted now."""
        if not self.entries or span.kind == FREE:
            return False
        if span.kind == LARGE:
            how = self.how(span.detail)
            return how == HARD or (how == SOFT and self.sparing)
        return span.offset in self._pieces[HARD] or (self.sparing and span.offset in self._pieces[SOFT])

    def victim(self, group: int, rejected: Rejected) -> int:
        """Return the near copy or else the soft kept entry of a size class that goes first, -1 without one."""
        if (slot := self._near_victim(group)) >= 0:
            return slot
        return self._policy.victim(SOFT_GROUPS + group, rejected) if self._pieces[SOFT] else -1

    def _near_victim(self, group: int) -> int:
        """Return the near copy of a size class that goes first, -1 without one."""
        return self._policy.victim(NEAR_GROUPS + group, self._in_use) if group in self.near else -1

    def instead_of_near(self, n: int, evict: Callable[[int], None]) -> int:
        """Evict near copies of the size class of ``n`` bytes until there is room. Return its offset, -1 without any."""
        group = class_of(n)
        if self.owed.get(group, 0):
            self.owed[group] -= 1
            return -1
        for _ in range(NEAR_EVICTED_MAX):
            if (slot := self._near_victim(group)) < 0:
                break
            evict(slot)
            if (offset := self._allocator.alloc(n)) >= 0:
                return offset
        return -1

    def owe(self, n: int) -> None:
        """Let one allocation of the size class of ``n`` bytes pass copies by. O(1)."""
        group = class_of(n)
        self.owed[group] = min(self.owed.get(group, 0) + 1, NEAR_OWED_MAX)

    def oldest_near(self) -> int:
        """Return the near copy of all size classes that goes first, -1 without one. O(classes with copies)."""
        slots = [self._near_victim(group) for group in self.near]
        return min((slot for slot in slots if slot >= 0), key=self._policy.since, default=-1)

    def near_for(self, namespace: int, lacking: float, most: int) -> list[int]:
        """Return the near copies of a namespace that free so many bytes together, those made first. None if too few do.

        Copies in use stay. Look at ``most`` copies at most. O(most).
        """
        found: list[int] = []
        if self.bytes.get((namespace, NEAR), 0) < lacking:
            return found
        for slot in islice(self._own_near.get(namespace, ()), most):
            if lacking <= 0:
                break
            if not self._in_use(slot):
                found.append(slot)
                lacking -= self.entries[slot].bytes
        return found if lacking <= 0 else []

    def first_to_go(
        self, slots: Iterable[int], held: Callable[[int], bool], visited: Sequence[int], stored: Callable[[int], int]
    ) -> int:
        """Return that one of some entries that goes first, -1 if all are hard kept or held. O(slots)."""
        best, best_rank = -1, (HARD_RANK, True, 0)
        for slot in slots:
            if (rank := RANKS[self.how(slot)]) == HARD_RANK or held(self._offsets[slot]):
                continue
            full_rank = (rank, visited[slot] > 0, stored(slot))  # readers may write any value to the byte
            if full_rank < best_rank:
                best, best_rank = slot, full_rank
        return best

    @contextmanager
    def soft_too(self) -> Iterator[bool]:
        """Let soft kept entries be evicted as any other, inside the block. Yield whether there are some."""
        self.sparing = False
        try:
            yield any(how == SOFT for _, how in self.bytes)
        finally:
            self.sparing = True
