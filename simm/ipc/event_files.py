"""The rings of events of this host's data servers, and the tables beside them, read in place.

Nothing here is mapped writable, and no data is mapped at all: a reader of events needs no values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container

from .. import shm
from ..arena.events.claimed import BySlot, Claimed
from ..arena.events.follow import Follower, MappedTable, Step
from ..arena.events.ring import RingReader
from ..arena.layout import HEADER_BYTES, NAMESPACE_LINE_BYTES, NAMESPACES, Geometry, State, Word
from ..arena.namespaces import line_of, name_bytes, names_line
from ..errors import SegmentError
from ..host.users import NOT_TRUSTED, trusts
from ..shm import AttachedSegment, events_name
from .segments import ArenaName, running

_LINE_WORDS = NAMESPACE_LINE_BYTES // 8


class TableView:
    """An arena's header, shard words, slots and namespaces, mapped read-only. Raise SegmentError, as for a reader."""

    def __init__(self, name: str, trusted: Container[int] = ()) -> None:
        with AttachedSegment.open(name) as segment:
            if not trusts(segment.owner_uid, trusted):
                raise SegmentError(f"{name} belongs to uid {segment.owner_uid}, {NOT_TRUSTED}")
            head = memoryview(segment.map(0, HEADER_BYTES, writable=False)).cast("Q")
            self.geometry = Geometry.read(head, head[Word.SIZE], name)
            if segment.size != self.geometry.meta_bytes:
                raise SegmentError(f"{name} has {segment.size} bytes of metadata, and its header says otherwise")
            #: All 64-bit words from the arena's start. A view keeps the map.
            self.words = memoryview(segment.map(0, self.geometry.names_end, writable=False)).cast("Q")

    @property
    def closed(self) -> bool:
        """True if nothing in the arena counts any more."""
        return bool(self.words[Word.STATE] == State.CLOSED)

    @property
    def heartbeat(self) -> int:
        """The worker's heartbeat counter."""
        word: int = self.words[Word.HEARTBEAT]
        return word

    def namespace_name(self, number: int) -> str | None:
        """Return the name of a namespace's number, None if it has none now."""
        at = self.geometry.names_offset // 8 + line_of(number) % NAMESPACES * _LINE_WORDS
        word = self.words[at]
        if not names_line(number, word):
            return None
        raw = self.words[at + 1 : at + _LINE_WORDS].tobytes()[: name_bytes(word)]
        return raw.decode(errors="replace") if self.words[at] == word else None


class EventFile:
    """One worker's events. Raise SegmentError if its server tells none, or they cannot be read.

    ``claimed``: returns what keeps the claims of so many slots.
    """

    def __init__(
        self, name: str, trusted: Container[int] = (), claimed: Callable[[int], Claimed] = BySlot
    ) -> None:  # fmt: skip
        self.name = name
        self.parts = ArenaName.parse(name)
        self.table = TableView(name, trusted)
        with AttachedSegment.open(events_name(name)) as segment:
            if not trusts(segment.owner_uid, trusted):
                raise SegmentError(f"{segment.name} belongs to uid {segment.owner_uid}, {NOT_TRUSTED}")
            ring = memoryview(segment.map(0, segment.size, writable=False))
            self._ring_is = _identity(os.fstat(segment.fd))
        self.ring = RingReader(ring, events_name(name))
        table = MappedTable(self.table)  # no cycle: it would keep the maps
        self.follower = Follower(self.ring, table, claimed(table.slots))

    def step(self) -> Step:
        """Return what has happened: see :class:`Follower`."""
        return self.follower.step()

    @property
    def replaced(self) -> bool:
        """True if nothing is told here any more: a server that started warm tells in another ring of the same name."""
        try:
            return _identity(os.stat(f"{shm.SHM_DIR}/{events_name(self.name)}")) != self._ring_is
        except OSError:
            return True


def _identity(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def told_by_servers(server: str = "") -> list[str]:
    """Return the names of the arenas on this host whose servers run and tell events. O(entries of /dev/shm).

    ``server``: only that data server's.
    """
    found = []
    for name in running():
        parts = ArenaName.parse(name)
        wanted = parts is not None and server in ("", parts.server)
        if wanted and os.path.exists(f"{shm.SHM_DIR}/{events_name(name)}"):
            found.append(name)
    return found
