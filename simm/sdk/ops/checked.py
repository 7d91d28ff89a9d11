"""Values with checksums that are read in ranges, again and again: layer by layer.

A checksum is of the whole value. To copy and check all of it for each range would cost as many times as much as a value
has layers. So the first look at a value notes what its CRC-32 has come to at the end of each block. A later read takes
the blocks that its ranges touch to memory of this process, and checks them there: from what the blocks before them have
come to, they must lead to what was noted behind them.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from ...arena.layout import ENTRY_CRC
from ...arena.reader import Located
from ...host.buffers import Ranges

#: Says whether data have a checksum, and counts if they do not: ``ShmGet.check``.
Check = Callable[..., bool]
#: First byte and end of what is looked at.
Run = tuple[int, int]

#: Blocks of a value, at most. Of more, those that a layer touches would have fewer bytes beside it. But each of them
#: lets go of the interpreter once, for which a busy thread makes it wait.
_BLOCKS_MAX: Final = 64
#: Below, the calls cost more than what they check.
_BLOCK_BYTES_MIN: Final = 4 << 10


class Checked:
    """What is known of one value. Any thread may call it.

    Args:
        length: the value's bytes.
        flags, crc: of its entry.
        found: the version that a read confirms, if no pin holds the value.
    """

    __slots__ = ("_block", "_crc", "_flags", "_marks", "found", "length")

    def __init__(self, length: int, flags: int, crc: int, found: Located | None = None) -> None:
        self.length = length
        self.found = found
        self._flags = flags
        self._crc = crc
        self._block = max(_BLOCK_BYTES_MIN, -(-length // _BLOCKS_MAX))
        #: The CRC-32 of all that is before each block, and of the whole; empty: nobody has looked at the value.
        self._marks: Sequence[int] = ()

    @classmethod
    def of(cls, length: int, flags: int, crc: int, found: Located | None = None) -> Checked | None:
        """Return a value of which reads have something to check, None for one that was stored without a checksum."""
        return cls(length, flags, crc, found) if flags & ENTRY_CRC or crc else None

    def runs(self, ranges: Ranges) -> list[Run]:
        """Return which bytes of the value must be looked at to deliver ranges, in order and apart. O(n log n)."""
        length, block = self.length, self._block
        if not self._marks or 2 * ranges.total > length:
            return [(0, length)]
        runs: list[Run] = []
        for offset, size, *_ in sorted(ranges.parts, key=itemgetter(0)):
            first, end = offset - offset % block, min(length, -(-(offset + size) // block) * block)
            if runs and first <= runs[-1][1]:
                first, last = runs.pop()
                end = max(end, last)
            runs.append((first, end))
        return runs

    def holds(self, copy: memoryview, runs: Sequence[Run], check: Check) -> bool:
        """Return whether a copy begins with the value's own bytes of ``runs``, one run after the other. O(bytes)."""
        marks, block, at = self._marks, self._block, 0
        if not marks:
            return self.look(copy[: self.length], check)
        for first, end in runs:
            piece = copy[at : at + end - first]
            if not check(self._flags, marks[-(-end // block)], piece, marks[first // block]):
                return False
            at += end - first
        return True

    def look(self, value: memoryview, check: Check) -> bool:
        """Look at the whole value, each byte once; return whether it has its checksum. O(bytes)."""
        marks = array("I", (0,))
        block, at = self._block, 0
        while at + block < len(value):
            marks.append(zlib.crc32(value[at : at + block], marks[-1]))
            at += block
        if not check(self._flags, self._crc, value[at:], marks[-1]):
            return False
        marks.append(self._crc)
        self._marks = marks
        return True


def bytes_of(runs: Sequence[Run]) -> int:
    """Return how many bytes runs have together."""
    return sum(end - first for first, end in runs)


def packed(ranges: Ranges, runs: Sequence[Run]) -> Ranges:
    """Return ranges, each within a run, as ranges of what the runs make up one after the other. O(n log n)."""
    if runs[-1][0] == 0:  # one run, from the beginning on
        return ranges
    moved: list[int] = []
    at = 0
    for first, end in runs:
        moved.append(first - at)
        at += end - first
    begins = [first for first, _ in runs]
    parts = [
        (offset - moved[bisect_right(begins, offset) - 1], length, address, keeper)
        for offset, length, address, keeper in ranges.parts
    ]
    return Ranges(parts, at, ranges.total)
