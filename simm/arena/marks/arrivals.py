"""Groups whose members arrive one after the other, as a mover copies the entries of a shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..hashing import shard_of
from .groups import is_group, members_of, number_of

#: Members of groups that are not whole yet. Of more, those of the group that began first are forgotten.
ARRIVING_MAX: Final = 1 << 16


class Arrivals:
    """Puts groups together again from their members and the groups' numbers, which are another server's word."""

    def __init__(self) -> None:
        #: By shard and the group's number.
        self._members: dict[tuple[int, int], set[bytes]] = {}
        self._count = 0

    def add(self, marked: Iterable[tuple[bytes, int]]) -> list[list[bytes]]:
        """Take (digest, number of its group) each. Return the groups that are whole now, sorted. O(1) each.

        A digest may come again. A number that the members do not have, as :func:`~.groups.number_of` makes it, makes no
        group.
        """
        whole = []
        for digest, number in marked:
            if members_of(number) < 2:
                continue
            key = shard_of(digest), number
            members = self._members.setdefault(key, set())
            if digest not in members:
                members.add(digest)
                self._count += 1
            if len(members) == members_of(number):
                self._forget(key)
                found = sorted(members)
                if is_group(found) and number_of(found) == number:
                    whole.append(found)
            while self._count > ARRIVING_MAX:
                self._forget(next(iter(self._members)))
        return whole

    def _forget(self, key: tuple[int, int]) -> None:
        self._count -= len(self._members.pop(key))
