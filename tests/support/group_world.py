"""A store with groups, and the naive model of them: sets of keys that leave together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simm.arena.hashing import Hasher
from simm.arena.marks.groups import MARK_BITS, members_of, number_of
from simm.arena.store import Store
from simm.wire.messages import Status
from tests.support.consistency import demand
from tests.support.store_world import Player, World, Wrong

_digest = Hasher("world")


def members(name: object, count: int = 2) -> list[bytes]:
    """Return the digests of a group's keys."""
    return [_digest(f"page{{{name}}}/{number}") for number in range(count)]


def check_groups(store: Store) -> None:
    """Raise CorruptionError unless rings, marks and the count agree. O(slots)."""
    groups, table = store.groups, store.table
    demand(not groups.orphans, "orphans are left after an operation")
    rings = set()
    for slot in range(table.slots):
        ring = groups._ring(slot)
        number = table.marks(slot) >> MARK_BITS
        if len(ring) > 1:
            rings.add(frozenset(ring))
            demand(number > 0 and members_of(number) == len(ring), f"slot {slot} is in a ring of {len(ring)}")
            digests = [table.entry(each).digest for each in ring]
            demand(number_of(digests) == number, f"slot {slot} has another group's number")
        else:
            demand(members_of(number) == 1, f"slot {slot} has the number of a group, and is in none")
    demand(len(rings) == groups.count, f"{groups.count} groups counted, there are {len(rings)}")


class GroupWorld(World):
    """A world whose keys may be grouped. ``together``: what the model says of each member."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.together: dict[bytes, frozenset[bytes]] = {}
        super().__init__(*arguments, **more)

    def count_evicted(self) -> int:
        return super().count_evicted() + self.store.groups.evicted

    def grant(self, player: Player, size: int, count: int = 1) -> list[int]:
        before = self.count_evicted()
        got = super().grant(player, size, count)
        middle = self.count_evicted()
        self.store.apply_pending()  # as the worker does after each message
        self.forget_evicted(middle)
        if self.count_evicted() > before:
            self.follow()
        return got

    def commit_many(self, player: Player, items: list[tuple[int, bytes, int]]) -> list[int]:
        statuses = super().commit_many(player, items)
        self.store.apply_pending()
        self.follow()
        return statuses

    def delete(self, digest: bytes) -> int:
        mates = {each for each in self.together.get(digest, ()) if each != digest and not self.held(each)}
        before = set(self.values)
        evicted = self.store.groups.evicted
        status = super().delete(digest)
        if status == Status.OK:
            if self.store.groups.evicted - evicted != len(mates):
                raise Wrong(f"{len(mates)} entries had to leave with a deleted one")
            for mate in mates:
                del self.values[mate]
            if {each for each in before if self.store.table.lookup(each) < 0} != mates | {digest}:
                raise Wrong("others have left than those of the group")
        self.follow()
        return status

    def held(self, digest: bytes) -> bool:
        """Return True if a stored entry is pinned."""
        slot = self.store.table.lookup(digest)
        return slot >= 0 and self.store.space.is_held(self.store.space.offset(slot))

    def group(self, digests: Sequence[bytes]) -> int:
        """Group entries, and check the answer."""
        self.store.apply_pending()
        (status,) = self.store.groups.mark_many([digests])
        here = all(digest in self.values for digest in digests)
        if (status == Status.OK) != here:
            raise Wrong(f"GROUP answered {status}")
        if here and self.together.get(digests[0]) != frozenset(digests):
            for digest in digests:
                self.ungroup(digest)
            self.together.update(dict.fromkeys(digests, frozenset(digests)))
        return status

    def ungroup(self, digest: bytes) -> None:
        for each in self.together.get(digest, ()):
            self.together.pop(each, None)

    def follow(self) -> None:
        """Take over what has left, and check that nothing of its group is left but what is pinned."""
        for whole in set(self.together.values()):
            left = [digest for digest in whole if digest in self.values]
            if len(left) < len(whole):
                for digest in left:
                    if not self.held(digest):
                        raise Wrong("an entry is left without others of its group")
                for digest in whole:
                    del self.together[digest]

    def wind_up_groups(self) -> None:
        """:meth:`wind_up`, one group after the other."""
        for player in list(self.players):
            self.exit(player)
        for digest in list(self.values):
            if digest in self.values:
                self.delete(digest)
        self.wind_up()

    def check(self) -> None:
        super().check()
        check_groups(self.store)
        table = self.store.table
        for digest, whole in self.together.items():
            if self.store.groups._ring(table.lookup(digest)) != {table.lookup(each) for each in whole}:
                raise Wrong("the store's groups are not the model's")
