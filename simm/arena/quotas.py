"""Byte quotas of namespaces: what the values of each hold of one worker's data, and what more may be stored.

A value counts with its whole chunk, from the commit that publishes it until its entry is dropped or replaced. Grants do
not count. A put that would exceed the quota is refused, also one that replaces a value: its old chunk is freed later.

Only namespaces with a quota are counted. A worker without any has no :class:`Quotas`, and its commits and evictions pay
for one comparison. Making one is O(slots), by numpy. All methods are O(1).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..table import LiveSlots


class Quotas:
    """The quotas of one worker.

    Args:
        limits: bytes by the name of a namespace; others have none.
        names: of all namespaces, by id. The ledger's own, which changes. Those with a quota stay.
        slots: of the table.
        found: the values that are there already.
    """

    def __init__(self, limits: Mapping[str, int], names: Mapping[int, str], slots: int, found: LiveSlots) -> None:
        self._limits = dict(limits)
        self._names = names
        #: By namespace id, filled in when a namespace is first met: its quota, infinite for none, and its bytes.
        self._most: dict[int, float] = {}
        self._used: dict[int, int] = {}
        #: By slot: the id, plus 1, of the namespace that it counts for; 0 for none.
        self._of_slot = array("H", bytes(2 * slots))
        for namespace in np.unique(found.namespaces).tolist():
            if self._meet(namespace) != math.inf:
                mine = found.namespaces == namespace
                self._used[namespace] = int(found.chunks[mine].sum(dtype=np.uint64))
                np.frombuffer(self._of_slot, np.uint16)[found.slots[mine]] = namespace + 1

    def admits(self, namespace: int, chunk: int) -> bool:
        """Return True if another value, in a chunk of so many bytes, may be stored."""
        most = self._most.get(namespace)
        if most is None:
            most = self._meet(namespace)
        return most == math.inf or self._used[namespace] + chunk <= most

    def _meet(self, namespace: int) -> float:
        most = self._most[namespace] = self._limits.get(self._names.get(namespace, ""), math.inf)
        if most != math.inf:
            self._used[namespace] = 0
        return most

    def published(self, slot: int, namespace: int, chunk: int, replaced: int) -> None:
        """Count a value that was admitted and published in ``slot``. ``replaced``: bytes of the chunk that it had."""
        self.dropped(slot, replaced)
        if self._most[namespace] != math.inf:
            self._of_slot[slot] = namespace + 1
            self._used[namespace] += chunk

    def dropped(self, slot: int, chunk: int) -> None:
        """Count a slot's value, of a chunk of so many bytes, no longer."""
        number = self._of_slot[slot]
        if number:
            self._of_slot[slot] = 0
            self._used[number - 1] -= chunk

    def stats(self) -> dict[str, dict[str, int]]:
        """Return, by name, the bytes used and the quota of each namespace that has one."""
        numbers = {name: number for number, name in self._names.items()}
        return {
            name: {"used_bytes": self._used.get(numbers.get(name, -1), 0), "quota_bytes": most}
            for name, most in sorted(self._limits.items())
        }
