"""Keep entries at their owner: by request, until their time comes, and across the deaths of workers.

The private state decides, and the slot's word is for a successor. Of what a successor finds there it believes no time
further ahead than a request may ask for, and no more hard kept bytes, pieces and slots than the bounds allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...constants import KEEP_PARTS, KEEP_S_MAX, NEAR_S
from ...wire.messages import Status
from ..hashing import shard_of
from ..layout import ENTRY_LARGE
from .awaited import Awaited, AwaitedMarks
from .kept import HARD, KEPT_MASK, NEAR, SOFT, KeptEntries, pack, unpack
from .told import Told

if TYPE_CHECKING:
    from ...table import Table
    from ..namespaces import NamespaceTable
    from ..shard_words import ShardWords

#: Entries whose keeping ends in one step: about a millisecond.
EXPIRE_ENTRIES: Final = 128
_NAMES: Final = {SOFT: "soft", HARD: "hard"}
_SHOWN: Final = {**_NAMES, NEAR: "near"}


class Keeping:
    """The requests to keep the entries of a table."""

    def __init__(self, kept: KeptEntries, table: Table, words: ShardWords, namespaces: NamespaceTable) -> None:
        self.kept = kept
        self._table = table
        self._words = words
        self._namespaces = namespaces
        self.told = Told(words)
        #: Marks of values that a mover is about to copy.
        self.awaited = AwaitedMarks(words, self.told)
        #: Entries that were not kept, by cause.
        self.failures = {"bad_request": 0, "wrong_owner": 0, "not_found": 0, "over_quota": 0}
        #: The last time that was told, seconds of CLOCK_BOOTTIME; and what drops a near copy.
        self.now = 0
        self.drop_near: Callable[[int], None] = lambda _slot: None
        kept.softened_one = lambda slot, entry: self._note(slot, pack(entry.how, entry.until))
        kept.outdated = self._outdated

    def keep(self, digests: Sequence[bytes], how: int, seconds: int, now: int, mover: int = 0) -> list[int]:
        """Keep entries for at least so many seconds from now on, 0 to end their keeping. Return the statuses.

        OVER_QUOTA: nothing has changed for this one. PREVIOUS: only the previous owner may have the value. Nothing may
        be pending. O(log kept) each.

        ``mover``: the epoch of the map by which a mover carries marks here. PRESENT: something newer was said of this
        one (:class:`~.told.Told`), and its mark does not count. PREVIOUS: it will count once the value has come.

        TOO_LARGE: it is the manifest of a value in parts, and ``how`` has not KEEP_PARTS. Nothing of it is kept then:
        its parts are entries of their own, on other servers.
        """
        parts, how = bool(how & KEEP_PARTS), how & ~KEEP_PARTS
        if how not in _NAMES or not 0 <= seconds <= KEEP_S_MAX:
            self.failures["bad_request"] += len(digests)
            return [Status.BAD_REQUEST] * len(digests)
        until = now + seconds + 1  # `now` has been rounded down
        if not mover:
            return [self._keep(digest, how, until if seconds else 0, parts) for digest in digests]
        return [
            self._carry(digest, Awaited(how, until, mover))
            if seconds and self.told.takes_mark(digest, mover)
            else Status.PRESENT
            for digest in digests
        ]

    def _carry(self, digest: bytes, mark: Awaited) -> int:
        """Let a mover's mark count now, or when its value comes."""
        status = self._set(digest, mark.how, int(mark.until), parts=True)
        if status == Status.PREVIOUS:
            self.awaited.add(digest, mark)
        return status

    def arrived(self, slots: Iterable[int]) -> None:
        """Keep those of the entries in these slots whose marks have come before them. O(log kept) each.

        The hard ones are soft kept where the bounds have no room for them.
        """
        for slot in slots:
            digest = self._table.entry(slot).digest
            mark = self.awaited.take(digest)
            if mark is not None and self._set(digest, mark.how, int(mark.until), parts=True) == Status.OVER_QUOTA:
                self._set(digest, SOFT, int(mark.until), parts=True)

    def _keep(self, digest: bytes, how: int, until: int, parts: bool) -> int:
        """Do what a client says, which is newer than what a mover brings from now on."""
        status = self._set(digest, how, until, parts)
        if status == Status.OK:
            self.told.note(digest)
        return status

    def _set(self, digest: bytes, how: int, until: int, parts: bool) -> int:
        if not self._words.accepts(shard_of(digest)):
            self.failures["wrong_owner"] += 1
            return Status.WRONG_OWNER
        slot = self._table.lookup(digest)
        if slot >= 0 and self.kept.how(slot) != NEAR:  # a near copy has its own time, which nobody extends
            entry = self._table.entry(slot)
            if entry.flags & ENTRY_LARGE and not parts:
                return Status.TOO_LARGE
            if self._namespaces.readable(entry.namespace, digest, entry.flags):
                if not until:
                    self.end(slot)
                elif self.kept.keep(slot, how, until, entry.namespace):
                    self._note(slot, pack(how, until))
                else:
                    self.failures["over_quota"] += 1
                    return Status.OVER_QUOTA
                return Status.OK
        elif self._words.moving and self._words.status_of_miss(digest) == Status.PREVIOUS:
            return Status.PREVIOUS
        self.failures["not_found"] += 1
        return Status.NOT_FOUND

    def take_near(self, slot: int) -> None:
        """Let a published entry be a near copy, which is dropped after NEAR_S. O(log kept)."""
        until = self.now + NEAR_S
        self.kept.keep(slot, NEAR, until, self._table.entry(slot).namespace)
        self._note(slot, pack(NEAR, until))

    def end(self, slot: int) -> None:
        """End the keeping of an entry, of a near copy by dropping it. Nothing if it is not kept."""
        if self.kept.how(slot) == NEAR:
            self.drop_near(slot)
        elif slot in self.kept.entries:
            self.kept.end(slot)
            self._note(slot, 0)

    def _outdated(self, slot: int, how: int) -> bool:
        """Return True if a new value is none that its slot's mark is about.

        It is in parts, which nobody keeps yet; or the mark is of the near copy before it. A copy gets one anew.
        """
        if how != NEAR and not self._table.entry(slot).flags & ENTRY_LARGE:
            return False
        self._note(slot, 0)
        return True

    def expire(self, now: int) -> bool:
        """End the keeping of EXPIRE_ENTRIES entries at most whose time has come. Return whether there may be more.

        O(EXPIRE_ENTRIES), but see :meth:`KeptEntries.due`.
        """
        self.now = now
        for slot in self.kept.due(now, EXPIRE_ENTRIES):
            self.end(slot)
        return self.kept.is_due(now)

    def recover(self, slots: Sequence[int], marks: Iterable[int]) -> None:
        """Take over what a dead worker has kept: slots of published entries, and their marks. :meth:`begin` follows.

        What would exceed the bounds of what is hard kept is soft kept.
        """
        for slot, mark in zip(slots, marks):
            how, until = unpack(mark)
            if how not in _SHOWN:
                continue
            namespace = self._table.entry(slot).namespace
            if not self.kept.keep(slot, how, until, namespace) and self.kept.keep(slot, SOFT, until, namespace):
                self._note(slot, pack(SOFT, until))

    def begin(self, now: int) -> None:
        """End the keeping of recovered entries whose time has come, or is further ahead than it can be. O(kept)."""
        self.now = now
        for slot, entry in self.kept.items():
            if not now < entry.until <= now + (NEAR_S if entry.how == NEAR else KEEP_S_MAX + 1):
                self.end(slot)

    def _note(self, slot: int, word: int) -> None:
        """Store the word of a slot, for a successor."""
        self._table.set_marks(slot, self._table.marks(slot) & ~KEPT_MASK | word)

    def stats(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return kept bytes and slots by namespace and class, their bounds, and failures by cause. O(namespaces).

        Soft kept entries and near copies have no bound of slots, and are not counted by it.
        """
        found: dict[str, dict[str, int]] = {}
        for (namespace, how), count in self.kept.bytes.items():
            sizes = found.setdefault(names.get(namespace, ""), dict.fromkeys(_NAMES.values(), 0))
            sizes[_SHOWN[how]] = sizes.get(_SHOWN[how], 0) + count
        kept = self.kept
        slots: dict[str, dict[str, int]] = {}
        for namespace, count in kept.slots_by_namespace.items():
            mine = slots.setdefault(names.get(namespace, ""), {_NAMES[HARD]: 0})
            mine[_NAMES[HARD]] += count
        return {
            "slots": slots, "slots_max": kept.hard_slots_max, "namespace_slots_max": kept.namespace_slots_max,
            "bytes": found, "hard_max": kept.hard_max, "namespace_max": kept.namespace_max, "near_max": kept.near_max,
            "hard_fenced": kept.fenced_bytes, "entries": len(kept), "softened": kept.softened,
            "failures": self.failures,
        }  # fmt: skip
