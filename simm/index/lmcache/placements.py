"""Which parts of which chunks are where, and so in which tiers a chunk is whole.

A family is a set of chunks that engines of one kind share: model, salt, ranks, tokens of a chunk. Of each chunk every
rank and every group of layers has a part. A chunk counts once all of them are there: of all ranks, and of all groups
that the model was ever seen to have, with any salt. A part may be in several places, and is there until it has left all
of them.

A call looks only at families that it names, or that have changed: a server of many users has one for each salt.

No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..sources import CPU, STORAGE
from .messages import Entry

#: Of one server or pool: families, fewer than ``blocks.HOLDERS_MAX``, and places, which are backends of a tier.
#: Room for a sixteenth of the families is for new ones.
FAMILIES_MAX: Final = 1 << 14
PLACES_MAX: Final = 16
#: So many families, and models with their ranks, are there before those without chunks are looked for.
FAMILIES_MIN: Final = 256


class Family(NamedTuple):
    """See the module. ``size``: tokens of a chunk."""

    model: str
    salt: str
    world: int
    size: int


#: A tier of LMCache and a backend.
Place = tuple[str, str]


class Change(NamedTuple):
    """Chunks of a family that are whole in a tier from now on, or not any more."""

    family: Family
    tier: int
    added: list[bytes]
    removed: list[bytes]


@dataclass(eq=False)
class _Chunks:
    """The chunks of a family.

    ``groups``: of layers, in the order in which they were seen. All families of a model and ranks have the same list.
    """

    groups: list[int]
    #: By place: the parts that are there, as bits.
    parts: dict[Place, dict[bytes, int]] = field(default_factory=dict)
    #: What was told of each chunk, as bits of tiers.
    shown: dict[bytes, int] = field(default_factory=dict)
    changed: set[bytes] = field(default_factory=set)

    def tiers(self, chunk: bytes, world: int) -> int:
        """Return the tiers in which a chunk is whole, as bits. It is in the slower one if it needs parts from there."""
        memory = storage = 0
        for (tier, _), held in self.parts.items():
            mask = held.get(chunk, 0)
            if tier == "l1":
                memory |= mask
            else:
                storage |= mask
        whole = (1 << world * len(self.groups)) - 1
        if memory == whole:
            return 1 << CPU | (1 << STORAGE if storage == whole else 0)
        return 1 << STORAGE if memory | storage == whole else 0


class Placements:
    """What one server holds, or what several have in a backend that they share. Not thread-safe."""

    def __init__(self) -> None:
        #: The one that was stored to longest ago is the first.
        self._families: OrderedDict[Family, _Chunks] = OrderedDict()
        #: Groups of layers, by model and ranks.
        self._groups: dict[tuple[str, int], list[int]] = {}
        #: By model, salt and ranks: an event that removes has no size.
        self._sizes: dict[tuple[str, str, int], list[Family]] = {}
        #: Families that have had a part since the last :meth:`clear`, and those that may have changed since the last
        #: :meth:`settle`.
        self._used: dict[Family, _Chunks] = {}
        self._changed: dict[Family, _Chunks] = {}
        #: At so many families, those without chunks are looked for.
        self._room = min(FAMILIES_MIN, FAMILIES_MAX)
        #: Parts' places, by chunk; and families whose parts were forgotten for others.
        self.entries = 0
        self.forgotten = 0

    def store(self, entry: Entry, size: int, place: Place) -> bool:
        """Note a part. Return False if there is no room for its place. O(1), but for a new group or family."""
        family = Family(entry.model, entry.salt, entry.world, size)
        chunks = self._families.get(family)
        if chunks is None:
            if len(self._families) >= self._room:
                self._make_room()
            groups = self._groups.setdefault((family.model, family.world), [])
            chunks = _Chunks(groups)
            sizes = self._sizes.setdefault(family[:3], [])
            if family not in sizes:  # it is if the next step has failed once
                sizes.append(family)
            self._families[family] = chunks  # the last step: what is there is found by a removal
        self._families.move_to_end(family)  # it is the last one to go, and never out: this needs no memory
        held = chunks.parts.get(place)
        if held is None:
            if len(chunks.parts) >= PLACES_MAX:
                return False
            held = chunks.parts[place] = {}
        if entry.group not in chunks.groups:
            chunks.groups.append(entry.group)
            for other, theirs in self._used.items():
                if theirs.groups is chunks.groups:
                    theirs.changed.update(theirs.shown)
                    self._changed[other] = theirs
        self._used[family] = self._changed[family] = chunks  # before it has the part: :meth:`clear` finds that
        before = held.get(entry.digest, 0)
        self.entries += not before
        held[entry.digest] = before | self._bit(chunks, entry)
        chunks.changed.add(entry.digest)
        return True

    def delete(self, entry: Entry, place: Place) -> None:
        """Forget a part that has left a place. O(sizes of the family's chunks)."""
        for family in self._sizes.get((entry.model, entry.salt, entry.world), ()):
            chunks = self._families.get(family)  # None if there was no memory to add or to drop it
            held = chunks.parts.get(place) if chunks is not None else None
            if chunks is None or held is None or entry.group not in chunks.groups:
                continue
            before = held.get(entry.digest, 0)
            left = before & ~self._bit(chunks, entry)
            if left:
                held[entry.digest] = left
            elif before:
                del held[entry.digest]
                self.entries -= 1
            chunks.changed.add(entry.digest)
            self._changed[family] = chunks

    @staticmethod
    def _bit(chunks: _Chunks, entry: Entry) -> int:
        return 1 << chunks.groups.index(entry.group) * entry.world + entry.rank

    def _make_room(self) -> None:
        """Drop families without chunks, else forget those that were stored to longest ago. O(families), and rarely."""
        for family, chunks in list(self._families.items()):
            if not chunks.shown and not any(chunks.parts.values()):
                for families in (self._families, self._used, self._changed):
                    families.pop(family, None)
                self._sizes[family[:3]].remove(family)
                if not self._sizes[family[:3]]:
                    del self._sizes[family[:3]]
        if len(self._groups) >= FAMILIES_MIN:
            for name in self._groups.keys() - {(each.model, each.world) for each in self._families}:
                del self._groups[name]
        # One that is forgotten is there until it has been told.
        many, few = len(self._families), FAMILIES_MAX // 16 or 1
        full = many > FAMILIES_MAX - few  # else the next one would look again
        for family in list(self._families)[: many + few - FAMILIES_MAX] if full else ():
            chunks = self._families[family]
            self.forgotten += any(chunks.parts.values())
            self.entries -= sum(map(len, chunks.parts.values()))
            chunks.parts.clear()
            chunks.changed.update(chunks.shown)
            self._changed[family] = chunks
        self._room = many + few if full else min(FAMILIES_MAX, max(FAMILIES_MIN, 2 * many))

    def clear(self) -> None:
        """Forget all parts, and that any chunk was told. Which groups a family has is no part of that."""
        self.entries = 0
        for chunks in self._used.values():
            chunks.parts.clear()
            chunks.shown.clear()
            chunks.changed.clear()
        self._used.clear()
        self._changed.clear()

    def settle(self) -> list[Change]:
        """Return what has changed since the last call. O(changed chunks x places)."""
        changes = []
        for family, chunks in self._changed.items():
            by_tier: dict[int, tuple[list[bytes], list[bytes]]] = {CPU: ([], []), STORAGE: ([], [])}
            for chunk in chunks.changed:
                before, now = chunks.shown.get(chunk, 0), chunks.tiers(chunk, family.world)
                for tier, (added, removed) in by_tier.items():
                    if (before ^ now) >> tier & 1:
                        (added if now >> tier & 1 else removed).append(chunk)
                if now:
                    chunks.shown[chunk] = now
                else:
                    chunks.shown.pop(chunk, None)
            chunks.changed.clear()
            changes += [Change(family, tier, *lists) for tier, lists in by_tier.items() if any(lists)]
        self._changed.clear()
        return changes
