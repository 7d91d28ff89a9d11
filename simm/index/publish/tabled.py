"""What is claimed of the slots of a large table, in memory that follows the claims and not the slots.

A table has eleven slots for eight times 4 KiB of values. So with values of 1 MiB one slot in 352 is in use.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...arena.events.claimed import CLAIM_FIELDS, CLAIM_NAMES
from ..table import Keys, Owners, Table
from .claims import PASS_SLOTS

#: The owner of all entries in the hash table.
_OWNER: Final = 1


class Tabled:
    """Claims by slot (``arena.events.claimed``) in a hash table: 40 to 48 bytes for each, and a bit for each slot.

    The bits say which slots the hash table has. So the others, most of them, are not searched.
    """

    def __init__(self, slots: int) -> None:
        self._bits = np.zeros(-(-slots // 8), np.uint8)
        self._table = Table(
            {name: CLAIM_FIELDS[name] for name in CLAIM_NAMES}, lambda owners: np.ones(len(owners), np.bool_)
        )

    @property
    def entries(self) -> int:
        return self._table.entries

    def among(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        claimed: NDArray[np.bool_] = self._bits[slots >> 3] & _bit(slots) != 0
        return claimed

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        found = np.zeros(len(slots), CLAIM_FIELDS)
        there = np.flatnonzero(self.among(slots))
        places = self._table.find(*_keys(slots[there]))
        for name, column in self._table.columns.items():
            found[name][there] = column[places]
        return found

    def put(self, slots: NDArray[np.int64], claims: NDArray[np.void]) -> None:
        there = (claims["low"] | claims["high"]) != 0
        gone = slots[~there]
        self._remove(self._table.find(*_keys(gone[self.among(gone)])))
        slots, claims = slots[there], claims[there]
        if slots.size:
            places, _ = self._table.find_or_add(*_keys(slots))
            for name, column in self._table.columns.items():
                column[places] = claims[name]
            np.bitwise_or.at(self._bits, slots >> 3, _bit(slots))

    def forget(self, lost: NDArray[np.bool_]) -> None:
        owners, namespaces = self._table.owners, self._table.columns["namespace"]
        for start in range(0, len(owners), PASS_SLOTS):
            some = slice(start, start + PASS_SLOTS)
            self._remove(start + np.flatnonzero((owners[some] == _OWNER) & lost[namespaces[some]]))

    def _remove(self, places: NDArray[np.int64]) -> None:
        slots = self._table.keys[places].view(np.int64)
        np.bitwise_and.at(self._bits, slots >> 3, ~_bit(slots))
        self._table.remove(places)


def _bit(slots: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return each slot's bit in its byte."""
    bits: NDArray[np.uint8] = np.left_shift(1, slots & 7).astype(np.uint8)
    return bits


def _keys(slots: NDArray[np.int64]) -> tuple[Keys, Owners]:
    """Return the keys and owners of slots in the hash table."""
    return slots.astype(np.uint64), np.full(len(slots), _OWNER, np.uint32)
