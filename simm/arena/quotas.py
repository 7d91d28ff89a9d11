"""Byte quotas of namespaces: what the values of each hold of one worker's data, and what more may be stored.

A value counts with its whole chunk, from the commit that publishes it until its entry is dropped or replaced. Grants do
not count. A put that would exceed the quota is refused, also one that replaces a value: its old chunk is freed later.

Only namespaces that have or had a quota are counted. A worker without any has no :class:`Quotas`, and its commits and
evictions pay for one comparison. Making one at the start is O(slots), by numpy. Methods are O(1), or say otherwise.

Quotas change while the worker serves, with the token file. What a namespace holds that has just got its first quota is
counted in turns (:class:`QuotaChanges`). Until then it holds more than is counted, and puts may exceed the quota. Each
slot says for which namespace it counts. So it does not matter what is put, replaced and dropped meanwhile.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .layout import NAMESPACES

if TYPE_CHECKING:
    from ..table import Table
    from .rebuild import LiveSlots

#: Slots that are looked at together while quotas change.
_BLOCK_SLOTS: Final = 4096


class Quotas:
    """The quotas of one worker.

    Args:
        limits: bytes by the name of a namespace; others have none.
        names: of all namespaces, by id. The ledger's own, which changes. Those with a quota stay.
        slots: of the table.
        found: the values that are there already. None to count them later, by :meth:`uncounted` and :meth:`count`.
    """

    def __init__(
        self, limits: Mapping[str, int], names: Mapping[int, str], slots: int, found: LiveSlots | None
    ) -> None:
        self._limits = dict(limits)
        self._names = names
        #: By namespace id, filled in when a namespace is first met: its quota, infinite for none.
        self._most: dict[int, float] = {}
        #: By id: the bytes of those that are counted.
        self._used: dict[int, int] = {}
        #: By slot: the id, plus 1, of the namespace that it counts for; 0 for none.
        self._of_slot = array("H", bytes(2 * slots))
        if found is None:
            return
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

    def lacking(self, namespace: int, chunk: int) -> float:
        """Return how many bytes must go before such a value is admitted; 0 or less if none. O(1)."""
        return 0 if self.admits(namespace, chunk) else self._used[namespace] + chunk - self._most[namespace]

    def limits(self, name: str) -> bool:
        """Return True if a namespace has a quota, also one that has no number here."""
        return name in self._limits

    def _meet(self, namespace: int) -> float:
        most = self._most[namespace] = self._limits.get(self._names.get(namespace, ""), math.inf)
        if most != math.inf:
            self._used[namespace] = 0
        return most

    def published(self, slot: int, namespace: int, chunk: int, replaced: int) -> None:
        """Count a value that was admitted and published in ``slot``. ``replaced``: bytes of the chunk that it had."""
        self.dropped(slot, replaced)
        if namespace in self._used:
            self._of_slot[slot] = namespace + 1
            self._used[namespace] += chunk

    def dropped(self, slot: int, chunk: int) -> None:
        """Count a slot's value, of a chunk of so many bytes, no longer."""
        number = self._of_slot[slot]
        if number:
            self._of_slot[slot] = 0
            self._used[number - 1] -= chunk

    def dropped_many(self, slots: list[int], offsets: list[int], chunk_bytes: Callable[[int], int]) -> None:
        """Do :meth:`dropped` for many slots, whose chunks lie at these offsets."""
        of_slot, used = self._of_slot, self._used
        for slot, offset in zip(slots, offsets):
            if number := of_slot[slot]:
                of_slot[slot] = 0
                used[number - 1] -= chunk_bytes(offset)

    def change(self, limits: Mapping[str, int]) -> bool:
        """Hold namespaces to other limits. Return True if values are there that have yet to be counted. O(namespaces).
        """
        self._limits = dict(limits)
        due = False
        for namespace in list(self._most):
            if namespace not in self._names:  # its number is never used again
                del self._most[namespace]
                self._used.pop(namespace, None)
                continue
            most = self._most[namespace] = limits.get(self._names.get(namespace, ""), math.inf)
            if most != math.inf and namespace not in self._used:
                self._used[namespace] = 0
                due = True
            elif most == math.inf and not self._used.get(namespace, 1):
                del self._used[namespace]  # nothing counts for it
        return due

    def uncounted(self, slots: NDArray[np.intp], namespaces: NDArray[np.uint16]) -> list[tuple[int, int]]:
        """Return those of these live slots that hold a value which must be counted and is not, with its namespace."""
        for namespace in np.unique(namespaces).tolist():
            if namespace not in self._most:
                self._meet(namespace)
        counted = np.isin(namespaces, list(self._used)) & (np.frombuffer(self._of_slot, np.uint16)[slots] == 0)
        return list(zip(slots[counted].tolist(), namespaces[counted].tolist()))

    def count(self, slot: int, namespace: int, chunk: int) -> None:
        """Count such a value."""
        self._of_slot[slot] = namespace + 1
        self._used[namespace] += chunk

    def stats(self) -> dict[str, dict[str, int]]:
        """Return, by name, the bytes used and the quota of each namespace that has one.

        A token file may have more than an arena has places. Of those without a place only as many are shown as there
        are places in all, so that what a worker tells fits a frame.
        """
        numbers = {name: number for number, name in self._names.items()}
        shown = sorted(self._limits, key=lambda name: (name not in numbers, name))[:NAMESPACES]
        return {
            name: {"used_bytes": self._used.get(numbers.get(name, -1), 0), "quota_bytes": self._limits[name]}
            for name in sorted(shown)
        }


class QuotaStore(Protocol):
    """What :class:`QuotaChanges` needs of a store."""

    quotas: Quotas | None
    table: Table
    ledger: Any
    space: Any

    def apply_pending(self) -> None:
        """Settle the books of what was committed."""


class Turns(Protocol):
    """What it needs of the worker's loop."""

    clock: Callable[[], float]

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, ``delay`` seconds from now."""


class QuotaChanges:
    """Changes the quotas of a store that serves, in turns of at most ``turn_s`` seconds of the worker's loop."""

    def __init__(self, store: QuotaStore, turns: Turns, turn_s: float) -> None:
        self._store = store
        self._turns = turns
        self._turn_s = turn_s
        #: The first slot that has not been looked at; None when all are counted.
        self._at: int | None = None

    def change(self, limits: Mapping[str, int]) -> None:
        """Hold namespaces to these limits from now on, and no others. O(namespaces); the first time O(slots)."""
        store = self._store
        store.apply_pending()
        if not limits:
            store.quotas = None
            return
        if store.quotas is None:
            store.quotas = Quotas(limits, store.ledger.names, store.table.slots, None)
        elif not store.quotas.change(limits):
            return
        began, self._at = self._at is None, 0
        if began:
            self._turns.call_later(0.0, self._turn)

    def _turn(self) -> None:
        store, clock = self._store, self._turns.clock
        until = clock() + self._turn_s
        store.apply_pending()
        while store.quotas is not None and self._at is not None and self._at < store.table.slots:
            slots, namespaces, self._at = store.table.live_from(self._at, _BLOCK_SLOTS)
            for slot, namespace in store.quotas.uncounted(slots, namespaces):
                offset = store.space.offset(slot)
                if offset >= 0:  # the chunk that it has, whatever the slot says
                    store.quotas.count(slot, namespace, store.space.chunk_bytes(offset))
            if clock() >= until:
                self._turns.call_later(self._turn_s, self._turn)
                return
        self._at = None
