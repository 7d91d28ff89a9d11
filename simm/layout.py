"""Where everything lies in an arena: one shared-memory segment, owned by one worker.

    0           header      4 KiB, 64-bit words, see :class:`Word`
    4 KiB       shards      16,384 words, see shards.py: since when a shard is mine, 0 = not mine
    132 KiB     slots       sets x 8 ways x 64 bytes
    ...         visited     a byte for each slot; readers store 0x01
    ...         ledger      undo record, namespaces, sessions, holds (grants and pins)
    2 MiB * n   data        chunks

Readers map header, shards and slots read-only, visited and data writable (a client writes into
``data`` only where it holds a grant), the ledger not at all. All words are native-endian and
aligned: an 8-byte load or store of them is one instruction and never torn.

    slot, 64 bytes              who writes: the worker alone
    off size field
      0    8 seq        even: stable, odd: being written; incarnation << 44 | counter
      8   16 digest     zeros: no entry
     24    8 offset     of the value, from the segment's start
     32    4 length     of the value, bytes
     36    4 crc32      of the value where flag CRC is set
     40    4 chunk      bytes of the chunk it lies in
     44    2 namespace  id in the ledger's table
     46    2 flags      see EntryFlag
     48    8 stored     wall clock, ms
     56    8 reserved
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from .constants import (
    PAGE_BYTES,
    SET_BYTES,
    SHARD_COUNT,
    SLAB_BYTES,
    SLOT_BYTES,
    WAYS,
)
from .errors import SegmentError, UsageError

MAGIC: Final = int.from_bytes(b"SiMMaren", "little")
LAYOUT_VERSION: Final = 2

HEADER_BYTES: Final = PAGE_BYTES
SHARDS_BYTES: Final = SHARD_COUNT * 8

SLOT: Final = struct.Struct("@Q16sQIIIHHQQ")
#: The slot behind its seq word: what is stored while the seq is odd.
SLOT_BODY: Final = struct.Struct("@16sQIIIHHQQ")
SLOT_WORDS: Final = SLOT_BYTES // 8
assert SLOT.size == SLOT_BYTES and SLOT_BODY.size == SLOT_BYTES - 8

#: A slot for numpy. The digest is two little-endian words, as ``hashing.split`` takes it.
SLOT_FIELDS: Final = np.dtype(
    [
        ("seq", "u8"), ("low", "<u8"), ("high", "<u8"), ("offset", "u8"), ("length", "u4"), ("crc", "u4"),
        ("chunk", "u4"), ("namespace", "u2"), ("flags", "u2"), ("stored", "u8"), ("reserved", "u8"),
    ]
)  # fmt: skip
assert SLOT_FIELDS.itemsize == SLOT_BYTES

#: Bits of a sequence number that count; the incarnation lies above.
SEQ_BITS: Final = 44
SEQ_MASK: Final = (1 << SEQ_BITS) - 1


class Word(IntEnum):
    """Header words, by position. Geometry is written once, before the magic."""

    MAGIC = 0
    VERSION = 1
    SIZE = 2
    SETS = 3
    SLOTS_OFFSET = 4
    VISITED_OFFSET = 5
    LEDGER_OFFSET = 6
    SESSION_LINES = 7
    HOLD_LINES = 8
    DATA_OFFSET = 9
    DATA_BYTES = 10
    INCARNATION = 11
    STATE = 12
    #: Stored by the worker about ten times a second; a reader that sees it stand still re-resolves.
    HEARTBEAT = 13
    INSTANCE = 14
    WORKER_PID = 15
    #: Highest map epoch the worker has acted on.
    EPOCH = 16


class State(IntEnum):
    """The header's STATE word."""

    STARTING = 1
    OPEN = 2
    #: For good. Whoever still maps the segment must look for its successor.
    CLOSED = 3
    #: After a clean stop with --warm: the next server of that name may take the segment over.
    SUSPENDED = 4


class EntryFlag(IntEnum):
    """Bits of a slot's flags."""

    CRC = 1


# Ledger regions, in this order. Counts are in the header.
UNDO_BYTES: Final = 128
NAMESPACES: Final = 256
NAMESPACE_LINE_BYTES: Final = 128
SESSION_LINE_BYTES: Final = 64
HOLD_LINE_BYTES: Final = 32


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Geometry(NamedTuple):
    """Sizes and offsets of one arena, in bytes where not said otherwise."""

    size: int
    sets: int
    slots_offset: int
    visited_offset: int
    ledger_offset: int
    session_lines: int
    hold_lines: int
    data_offset: int
    data_bytes: int

    @property
    def slots(self) -> int:
        """Entries the table can hold."""
        return self.sets * WAYS

    @property
    def ledger_bytes(self) -> int:
        return (
            UNDO_BYTES
            + NAMESPACES * NAMESPACE_LINE_BYTES
            + self.session_lines * SESSION_LINE_BYTES
            + self.hold_lines * HOLD_LINE_BYTES
        )

    @property
    def reader_bytes(self) -> int:
        """Header, shards and slots: what a reader maps read-only from offset 0."""
        return self.visited_offset

    @classmethod
    def plan(cls, size: int, slots: int = 0) -> Geometry:
        """The layout of a segment of ``size`` bytes; ``slots`` 0: five for every four pages of data.

        Two-choice hashing into sets of 8 fills four fifths without a set overflowing in practice, so
        with values of 4 KiB the data runs out first; the table then costs 2 % of the memory.
        """
        size = size // SLAB_BYTES * SLAB_BYTES
        if size < 4 * SLAB_BYTES:
            raise UsageError(f"an arena has at least {4 * SLAB_BYTES >> 20} MiB, not {size} bytes")
        if slots < 0:
            raise UsageError(f"slots must be positive, not {slots}")
        wanted = slots or size // PAGE_BYTES * 5 // 4
        sets = max(2, _round_up(wanted, WAYS) // WAYS)
        slots_offset = HEADER_BYTES + SHARDS_BYTES
        visited = _round_up(slots_offset + sets * SET_BYTES, PAGE_BYTES)
        ledger = _round_up(visited + sets * WAYS, PAGE_BYTES)
        geometry = cls(
            size=size,
            sets=sets,
            slots_offset=slots_offset,
            visited_offset=visited,
            ledger_offset=ledger,
            session_lines=min(4096, max(256, sets * WAYS // 8)),
            hold_lines=min(65_536, max(1024, sets * WAYS // 4)),
            data_offset=0,
            data_bytes=0,
        )
        data = _round_up(ledger + geometry.ledger_bytes, SLAB_BYTES)
        if data + 2 * SLAB_BYTES > size:
            raise UsageError(
                f"an arena of {size >> 20} MiB has no room for {sets * WAYS} slots ({data >> 20} MiB of tables): "
                "give it more memory or fewer slots"
            )
        return geometry._replace(data_offset=data, data_bytes=size - data)

    def write(self, words: memoryview) -> None:
        """Store the geometry into a fresh header; the magic comes later, by :func:`publish`."""
        words[Word.VERSION] = LAYOUT_VERSION
        words[Word.SIZE] = self.size
        words[Word.SETS] = self.sets
        words[Word.SLOTS_OFFSET] = self.slots_offset
        words[Word.VISITED_OFFSET] = self.visited_offset
        words[Word.LEDGER_OFFSET] = self.ledger_offset
        words[Word.SESSION_LINES] = self.session_lines
        words[Word.HOLD_LINES] = self.hold_lines
        words[Word.DATA_OFFSET] = self.data_offset
        words[Word.DATA_BYTES] = self.data_bytes

    @classmethod
    def read(cls, words: memoryview, size: int, name: str) -> Geometry:
        """The geometry of an existing arena, checked. Raises SegmentError when it is not one of ours."""
        if words[Word.MAGIC] != MAGIC:
            raise SegmentError(f"{name} is no arena (or not ready yet): its header has no SiMM magic")
        if words[Word.VERSION] != LAYOUT_VERSION:
            raise SegmentError(
                f"{name} has arena layout {words[Word.VERSION]}, this build reads {LAYOUT_VERSION}: "
                "run the same SiMM version on both sides"
            )
        found = cls(
            size=words[Word.SIZE],
            sets=words[Word.SETS],
            slots_offset=words[Word.SLOTS_OFFSET],
            visited_offset=words[Word.VISITED_OFFSET],
            ledger_offset=words[Word.LEDGER_OFFSET],
            session_lines=words[Word.SESSION_LINES],
            hold_lines=words[Word.HOLD_LINES],
            data_offset=words[Word.DATA_OFFSET],
            data_bytes=words[Word.DATA_BYTES],
        )
        ordered = (
            found.sets >= 2
            and found.slots_offset == HEADER_BYTES + SHARDS_BYTES
            and found.slots_offset + found.sets * SET_BYTES <= found.visited_offset
            and found.visited_offset + found.slots <= found.ledger_offset
            and found.ledger_offset + found.ledger_bytes <= found.data_offset
            and found.data_offset % SLAB_BYTES == 0
            and found.data_offset + found.data_bytes == found.size == size
        )
        if not ordered:
            raise SegmentError(f"{name} has a header that contradicts itself or its size of {size} bytes")
        return found


def publish(words: memoryview) -> None:
    """Store the magic: the last word of a new arena."""
    words[Word.MAGIC] = MAGIC
