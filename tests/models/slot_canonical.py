"""One state for each set of states of the slot model that behave alike.

Values are named 1, 2, 3... in the order in which they stand in chunks, writers and readers, and renamed after each step
that changes one. Nothing in the protocol depends on what a value is, so two states that differ in names alone behave
alike, and runs need no bound.

A *reduced* model counts three more sets of states as one. None of them can hide a bug:

* Code compares sequence numbers for equality only, so adding 2 to the slot's and to all readers' at once changes
  nothing: the slot's is kept at 0 or 1. (``SlotModel._next_even`` does this.)
* Readers run the same program and store nothing, so they may change places.
* Bytes of a chunk that is free, and that nobody is reading or writing, become "never written". A writer stores both
  before it commits. A reader that reads them before that reads something that is wrong in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.models.explorer import Batch, Mask, Step
from tests.models.slot_state import FOREIGN

_U64 = np.uint64


class Canonical:
    """Maps states to the ones that stand for them."""

    def __init__(self, readers: Sequence[str], writers: Sequence[str], *, reduced: bool) -> None:
        self.readers = readers
        self.writers = writers
        self.reduced = reduced
        #: The fields that hold values, in the order that names the values.
        self.places = [
            "a0", "a1", "b0", "b1", "current", "x_value", "y_value", *(f"{reader}_value" for reader in readers)
        ]  # fmt: skip

    def ordered(self, step: Step) -> Step:
        """Return a step that puts the readers in order: the one that is further on comes second."""
        if not self.reduced or len(self.readers) < 2:
            return step

        def ordered(s: Batch) -> Batch:
            s = step(s)
            keys = [
                s[r] << _U64(10) | s[f"{r}_seq"] << _U64(7) | s[f"{r}_offset"] << _U64(5) | s[f"{r}_length"] << _U64(3)
                | s[f"{r}_torn"] << _U64(2) | s[f"{r}_writes"]
                for r in self.readers
            ]  # fmt: skip
            swap = keys[0] > keys[1]
            if swap.any():
                for field in ("", "_seq", "_offset", "_length", "_value", "_torn", "_right", "_writes"):
                    one, two = s[f"r0{field}"], s[f"r1{field}"]
                    s[f"r0{field}"], s[f"r1{field}"] = np.where(swap, two, one), np.where(swap, one, two)
                s = self.renamed(s)
            return s

        return ordered

    def _forget(self, s: Batch) -> None:
        """Reduced: bytes of a free chunk that nobody reads or writes are as good as never written."""
        for chunk, cells in ((1, ("a0", "a1")), (2, ("b0", "b1"))):
            used = (s["offset"] == chunk) | (s["old"] == chunk) | ((s["undo"] == 1) & (s["undo_offset"] == chunk))
            for writer in self.writers:
                used |= s[f"{writer}_chunk"] == chunk
            for reader in self.readers:
                used |= s[f"{reader}_offset"] == chunk
            for cell in cells:
                s[cell] = np.where(used, s[cell], _U64(0))

    def renamed(self, s: Batch) -> Batch:
        """Values of K numbered in the order of their places; readers remember nothing of values that are nowhere."""
        if not len(s):
            return s
        if self.reduced:
            self._forget(s)
        old = [s.small(place) for place in self.places]
        new: list[NDArray[np.uint8]] = []
        firsts: list[Mask] = []
        count = np.zeros(len(s), np.uint8)
        for at, value in enumerate(old):
            name = np.where(value == FOREIGN, np.uint8(FOREIGN), np.uint8(0))
            first = (value != 0) & (value != FOREIGN)
            for earlier, given in zip(old[:at], new):
                same = first & (value == earlier)
                name = np.where(same, given, name)
                first &= ~same
            count = count + first
            name = np.where(first, count, name)
            new.append(name)
            firsts.append(first)
        for reader in self.readers:
            right = s[f"{reader}_right"]
            if not right.any():
                continue
            told = np.zeros(len(s), _U64)
            for value, name, first in zip(old, new, firsts):
                bit = (right >> value.astype(_U64)) & first.astype(_U64)
                told |= bit << name.astype(_U64)
            s[f"{reader}_right"] = told
        for place, before, after in zip(self.places, old, new):
            if bool((before != after).any()):
                s[place] = after.astype(_U64)
        return s
