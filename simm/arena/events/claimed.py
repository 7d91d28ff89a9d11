"""What a follower has claimed of each slot of a table: a digest, and the number of its namespace."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from .listing import PAGE_SLOTS

#: What is claimed of a slot: a digest, as two words, and the number of its namespace. All zeros: nothing is.
CLAIM_FIELDS: Final = np.dtype([("low", "<u8"), ("high", "<u8"), ("namespace", "u2")])
CLAIM_NAMES: Final = "low", "high", "namespace"


class Claimed(Protocol):
    """Claims by slot."""

    @property
    def entries(self) -> int:
        """Slots of which something is claimed."""

    def among(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return of which of these slots something is claimed. O(those)."""

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """Return what is claimed of these slots, as ``CLAIM_FIELDS``. O(those)."""

    def put(self, slots: NDArray[np.int64], claims: NDArray[np.void]) -> None:
        """Claim this of these slots, all different, and nothing else. O(those), amortized."""

    def forget(self, lost: NDArray[np.bool_]) -> None:
        """Forget what is claimed of these namespaces: a mask of their numbers. O(slots) or O(claims)."""


class BySlot:
    """Claims in arrays: 18 bytes for each slot, as far as their pages of memory were ever used.

    Digests choose slots at random. So a small part of the slots in use takes the memory of all.
    """

    def __init__(self, slots: int) -> None:
        self._low, self._high = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        self._namespace = np.zeros(slots, np.uint16)
        self._entries = 0

    @property
    def entries(self) -> int:
        return self._entries

    def among(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        claimed: NDArray[np.bool_] = (self._low[slots] | self._high[slots]) != 0
        return claimed

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        found = np.empty(len(slots), CLAIM_FIELDS)
        found["low"], found["high"], found["namespace"] = self._low[slots], self._high[slots], self._namespace[slots]
        return found

    def put(self, slots: NDArray[np.int64], claims: NDArray[np.void]) -> None:
        before = np.count_nonzero(self.among(slots))
        self._low[slots], self._high[slots], self._namespace[slots] = (claims[each] for each in CLAIM_NAMES)
        self._entries += np.count_nonzero(self.among(slots)) - before

    def forget(self, lost: NDArray[np.bool_]) -> None:
        for start in range(0, len(self._low), PAGE_SLOTS):
            page = slice(start, start + PAGE_SLOTS)
            low, high = self._low[page], self._high[page]
            gone = np.flatnonzero(lost[self._namespace[page]])
            # Slots of which nothing is claimed have no memory yet, and get none by a store of 0.
            gone = gone[(low[gone] | high[gone]) != 0]
            low[gone] = high[gone] = 0
            self._entries -= len(gone)
