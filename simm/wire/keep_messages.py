"""The messages by which clients keep entries from eviction (docs/keep.md), and by which a new owner learns of that."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..rpc import message

#: Bit of the flags of LISTED: the entry has marks.
LISTED_MARKED: Final = 1 << 15


@message(0x32, "B I *16s")
class Keep(NamedTuple):
    """Keep entries for so many seconds from now on, 0 to end it. ``how``: 1 soft, 2 hard. Answer: STATUSES."""

    how: int
    seconds: int
    digests: list[bytes]


@message(0x34, "*16s")
class Marks(NamedTuple):
    """Mover to stream: tell the marks of these entries. Answer: MARKED."""

    digests: list[bytes]


@message(0x35, "*BII")
class Marked(NamedTuple):
    """For each entry: how it is kept (0: not), for how many seconds yet, and its group."""

    entries: list[tuple[int, int, int]]
