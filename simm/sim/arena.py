"""Simulate an arena: shard words, the lines of namespaces, slots, and a dict of digests with version numbers.

``arena/namespaces.py`` writes the lines, and ``arena/reader.py`` says whether an entry is of the present epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import TAG_AT, shard_of
from ..arena.layout import ENTRY_EPOCH, NAMESPACE_LINE_BYTES, NAMESPACES, SLOT_WORDS
from ..arena.namespaces import line_of
from ..arena.reader import ArenaReader, Located
from ..constants import SHARD_COUNT
from ..table import Entry
from ..wire.shard_set import FROZEN

_LINES_WORDS: Final = NAMESPACES * NAMESPACE_LINE_BYTES // 8
#: Slots in which one turn looks for old epochs. It takes some seconds to look at all, as it does in a large arena.
BLOCK_SLOTS: Final = 8


class Slots:
    """The slots of an arena's entries, with their marks, as the parts of ``arena/`` ask for them."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._by_digest: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}
        self._marks: dict[int, int] = {}
        self._free = list(range(slots))

    @property
    def entries(self) -> int:
        """Return how many slots have entries."""
        return len(self._entries)

    def take(self, digest: bytes, namespace: int = 0, flags: int = 0) -> None:
        """Give an entry a slot, unless it has one."""
        slot = self._by_digest.get(digest, -1)
        if slot < 0:
            slot = self._by_digest[digest] = self._free.pop()
            self._marks[slot] = 0
        self._entries[slot] = Entry(digest, slot + 1, 1, 0, 1, namespace, flags, 0)

    def release(self, slot: int) -> None:
        """Empty a slot."""
        del self._by_digest[self._entries.pop(slot).digest], self._marks[slot]
        self._free.append(slot)

    def lookup(self, digest: bytes) -> int:
        """Return an entry's slot, or -1."""
        return self._by_digest.get(digest, -1)

    def entry(self, slot: int) -> Entry:
        """Return what is in a slot."""
        return self._entries.get(slot) or Entry(bytes(16), 0, 0, 0, 0, 0, 0, 0)

    def marks(self, slot: int) -> int:
        """Return a slot's marks."""
        return self._marks[slot]

    def set_marks(self, slot: int, marks: int) -> None:
        """Replace a slot's marks."""
        self._marks[slot] = marks

    def marked(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the slots that have marks, the low words of their digests, and the marks."""
        slots = sorted(slot for slot, marks in self._marks.items() if marks)
        low = [int.from_bytes(self._entries[slot].digest[:8], "little") for slot in slots]
        marks = [self._marks[slot] for slot in slots]
        return np.array(slots, np.int64), np.array(low, np.uint64), np.array(marks, np.uint64)

    def stale_from(self, start: int, tags: Mapping[int, int]) -> tuple[list[int], int]:
        """Return the slots of a block from ``start`` on that have an old epoch, and where the next block starts."""
        stop = min(start + BLOCK_SLOTS, self.slots)
        found = []
        for slot in range(start, stop):
            entry = self.entry(slot)
            wanted = tags.get(entry.namespace)
            end = int.from_bytes(entry.digest[TAG_AT:], "little")
            if entry.offset and wanted is not None and (end != wanted or not entry.flags & ENTRY_EPOCH):
                found.append(slot)
        return found, stop


class Reader(ArenaReader):
    """A reader of an arena that maps nothing."""

    def __init__(self, arena: Arena, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.words = Words(arena)  # type: ignore[assignment]
        self._slot_word = _LINES_WORDS
        self._arena = arena

    def _line_word(self, number: int) -> int:
        return line_of(number) * NAMESPACE_LINE_BYTES // 8

    def namespace_of(self, slot: int) -> int:
        return self._arena.slots.entry(slot).namespace

    def holds(self, found: Located) -> bool:
        return True  # nothing happens between two looks


class Words:
    """The words of an arena that :meth:`ArenaReader.is_current` looks at: the lines, then the slots."""

    def __init__(self, arena: Arena) -> None:
        self._slots = arena.slots
        self._lines = memoryview(arena.lines).cast("Q")

    def __getitem__(self, at: int) -> int:
        if at < _LINES_WORDS:
            return self._lines[at]
        slot, word = divmod(at - _LINES_WORDS, SLOT_WORDS)
        return int.from_bytes(self._slots.entry(slot).digest[8 * word - 8 : 8 * word], "little")


class Room:
    """The chunks of an arena, and the holds that keep some of them: what ``arena/space.py`` and ``ledger.py`` do.

    A chunk has the bytes of the value that was stored there last: whose it is, and its version. Chunks are used again
    as soon as they may be, the newest first. Holds survive the worker, as they do in shared memory.
    """

    def __init__(self) -> None:
        self.content: list[tuple[bytes, int]] = []
        #: The chunk of each entry.
        self.at: dict[bytes, int] = {}
        self._free: list[int] = []
        #: The number of each pin -> (its chunk, the life of the stream that has it; 0 for a process of the host).
        self.pins: dict[int, tuple[int, int]] = {}
        self._numbers = 0

    def place(self, digest: bytes, version: int) -> None:
        """Store a value in a chunk of its own; its old one is free then."""
        chunk = self._free.pop() if self._free else len(self.content)
        self.content[chunk:chunk] = [(b"", 0)] if chunk == len(self.content) else []
        self.content[chunk] = digest, version
        old = self.at.get(digest)
        self.at[digest] = chunk
        self._release(old)

    def remove(self, digest: bytes) -> None:
        """Free the chunk of an entry that leaves."""
        self._release(self.at.pop(digest))

    def _release(self, chunk: int | None) -> None:
        if chunk is not None and not self._is_pinned(chunk) and chunk not in self.at.values():
            self._free.append(chunk)

    def _is_pinned(self, chunk: int) -> bool:
        return any(each == chunk for each, _ in self.pins.values())

    def is_held(self, digest: bytes) -> bool:
        """Return whether an entry's chunk is pinned."""
        return bool(self.pins) and self._is_pinned(self.at[digest])

    def pin(self, digest: bytes, life: int) -> int:
        """Pin an entry's chunk; return the pin's number."""
        self._numbers += 1
        self.pins[self._numbers] = self.at[digest], life
        return self._numbers

    def unpin(self, number: int) -> None:
        """Release a pin. Ignore an unknown one."""
        if (pin := self.pins.pop(number, None)) is not None:
            self._release(pin[0])

    def end_leases(self, life: int) -> None:
        """Release the pins of all streams but the one with this life."""
        for number in [number for number, (_, each) in self.pins.items() if each not in (0, life)]:
            self.unpin(number)


class Arena:
    """A worker's segment: shard words, namespaces and entries. Survives the worker. ``clock``: CLOCK_BOOTTIME in ns."""

    def __init__(self, number: int, entries: int, clock: Callable[[], int]) -> None:
        self.number = number
        self.slots = Slots(entries + 1)
        self.memory = bytearray(8 * SHARD_COUNT)
        self.words = memoryview(self.memory).cast("Q")
        self.lines = bytearray(NAMESPACES * NAMESPACE_LINE_BYTES)
        #: digest -> version, oldest first. Below 0: a manifest, see :class:`World`.
        self.entries: dict[bytes, int] = {}
        self.room = Room()
        #: digest -> until when it is hard kept.
        self.kept: dict[bytes, float] = {}
        #: Highest epoch acted on, and of which cluster.
        self.epoch = 0
        self.cluster = 0
        self.closed = False
        self.clock = clock
        self._reader = Reader(self, clock)

    def hit(self, digest: bytes, *, frozen_too: bool = False, any_epoch: bool = False) -> int:
        """Return the version that a reader finds, or 0. ``any_epoch``: for a mover."""
        word = self.words[shard_of(digest)]
        if 0 < word < FROZEN or (word and frozen_too):
            version = self.entries.get(digest, 0)
            if version and not any_epoch:
                slot = self.slots.lookup(digest)
                flags = self.slots.entry(slot).flags
                if flags and not self._reader.is_current(Located(slot, 0, 0, 0, 0, flags)):
                    return 0
            return version
        return 0
