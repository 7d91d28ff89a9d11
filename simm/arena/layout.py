"""The layout of an arena, the memory of one worker: two files, one after the other.

    metadata    0           header      4 KiB, 64-bit words, see :class:`Word`
                4 KiB       shards      16,384 words, see arena/shard_words.py: since when it is owned, 0 = not owned
                132 KiB     slots       sets x 8 ways x 64 bytes
                ...         ledger      undo record, namespaces, sessions, holds (grants and pins)
    data        page * n    data        chunks, 2 MiB * m bytes
                ...         visited     a byte per slot; readers store 0x01
                last word   stamp       the header's GENERATION

All offsets count from the start of the metadata, also those in the data's file, which begins at ``data_offset``.

The worker alone writes the metadata. Clients map it read-only, and the data's file writable: they store into ``data``,
where they hold a grant, and into ``visited``. They are two files because the right to write a file cannot be given for
a part of it (``ipc/arena_files.py``). All words are native-endian and aligned: an 8-byte load or store is one
instruction, and never torn.

    slot, 64 bytes              written by the worker alone
    off size field
      0    8 seq        even: stable, odd: being written; incarnation << 44 | counter
      8   16 digest     zeros: no entry
     24    8 offset     of the value, from the arena's start
     32    4 length     of the value, bytes
     36    4 crc32      of the value if flag ENTRY_CRC is set
     40    4 chunk      bytes of its chunk
     44    2 namespace  id in the ledger's table
     46    2 flags      see ENTRY_CRC
     48    8 stored     wall clock, ms
     56    4 kept       until when it is kept, and how (arena/marks); 0: until it is evicted
     60    4 group      what is evicted with it (arena/marks); 0: nothing
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from ..constants import ARENA_BYTES_MIN, PAGE_BYTES, SET_BYTES, SHARD_COUNT, SLAB_BYTES, SLOT_BYTES, WAYS
from ..errors import SegmentError, UsageError

MAGIC: Final = int.from_bytes(b"SiMMaren", "little")
LAYOUT_VERSION: Final = 6

HEADER_BYTES: Final = PAGE_BYTES
SHARDS_BYTES: Final = SHARD_COUNT * 8

SLOT: Final = struct.Struct("@Q16sQIIIHHQQ")
#: ``kept`` and ``group`` are one word here, the slot's marks: a worker stores them together, and alone.
MARKS_WORD: Final = 7
#: The word that has ``flags`` as its upper 16 bits.
FLAGS_WORD: Final = 5
#: The slot after its seq word: the part that is stored while the seq is odd.
SLOT_BODY: Final = struct.Struct("@16sQIIIHHQQ")
#: The body after its digest, which an overwrite leaves alone: ``pack_into`` begins with zeros, and a reader that met
#: them in place of the digest would take the key for absent, and not look at the seq.
SLOT_VALUE: Final = struct.Struct("@QIIIHHQQ")
SLOT_WORDS: Final = SLOT_BYTES // 8
assert SLOT.size == SLOT_BYTES and SLOT_BODY.size == SLOT_BYTES - 8 and SLOT_VALUE.size == SLOT_BODY.size - 16

#: A slot for numpy. The digest is two little-endian words, as ``hashing.split`` takes it.
SLOT_FIELDS: Final = np.dtype(
    [
        ("seq", "u8"), ("low", "<u8"), ("high", "<u8"), ("offset", "u8"), ("length", "u4"), ("crc", "u4"),
        ("chunk", "u4"), ("namespace", "u2"), ("flags", "u2"), ("stored", "u8"), ("kept", "u4"),
        ("group", "u4"),
    ]
)  # fmt: skip
assert SLOT_FIELDS.itemsize == SLOT_BYTES

#: Bits of a sequence number's counter; the incarnation is above them.
SEQ_BITS: Final = 44
SEQ_MASK: Final = (1 << SEQ_BITS) - 1


class Word:
    """Positions of the header words. The geometry is written once, before the magic.

    MAGIC, VERSION, STATE and CLUSTER keep their positions in all versions: a server must find out the cluster of any
    arena.
    """

    MAGIC: Final = 0
    VERSION: Final = 1
    SIZE: Final = 2
    SETS: Final = 3
    SLOTS_OFFSET: Final = 4
    VISITED_OFFSET: Final = 5
    LEDGER_OFFSET: Final = 6
    SESSION_LINES: Final = 7
    HOLD_LINES: Final = 8
    DATA_OFFSET: Final = 9
    DATA_BYTES: Final = 10
    INCARNATION: Final = 11
    STATE: Final = 12
    #: Incremented by the worker about ten times a second. A reader that sees it unchanged re-resolves.
    HEARTBEAT: Final = 13
    # 14 and 15 are reserved: older builds write them.
    #: Highest map epoch the worker has acted on.
    EPOCH: Final = 16
    #: Cluster id of all entries and shard words; 0 before the first map, and in layouts before 3.
    CLUSTER: Final = 17
    #: A random number, not 0, that the data's file repeats as its last word: the two were made together.
    GENERATION: Final = 18
    #: NUMA node + 1 of an arena that was added to a running server; 0 for others.
    GROWN: Final = 19
    #: One more than what near copies may take of the data, percent; 0: the worker does not say.
    NEAR_SHARE: Final = 20
    #: Whether there may be entries with ENTRY_BOUND, so that whoever finds a batch must look at its flags: NONE_BOUND,
    #: or SOME_BOUND from before the first one on. 0, as older builds leave it: the worker does not say.
    BOUND: Final = 21


NONE_BOUND: Final = 1
SOME_BOUND: Final = 2
#: Header words in use.
HEADER_WORDS: Final = Word.BOUND + 1


class State:
    """The header's STATE word."""

    STARTING: Final = 1
    OPEN: Final = 2
    #: Final. A process that still maps the segment must look for its successor.
    CLOSED: Final = 3
    #: After a clean stop with --warm. The next server of the same name may take the segment over.
    SUSPENDED: Final = 4


#: The arena's last word.
STAMP_BYTES: Final = 8

#: Bit of a slot's flags: ``crc`` is the value's CRC-32.
ENTRY_CRC: Final = 1
#: A client stored it that may use one namespace only, and the digest was its word alone. Readers of others miss it.
ENTRY_BOUND: Final = 2
#: Its digest ends with an epoch of its namespace: readers compare it with the namespace's line (cluster/epochs.py).
ENTRY_EPOCH: Final = 4
#: It is no value but the manifest of one that is stored in parts (sdk/large). Only who asks for manifests gets it.
ENTRY_LARGE: Final = 8
# 16 is COMMIT_NEAR of arena/marks/near.py, which no slot has.
#: Entries with other flags are never pinned: a pin outlasts all that a flag may say of who may read a value, and when.
#: What these say is looked at when a value is pinned, by the worker or, without a pin, by who holds its version.
PINNED_FLAGS: Final = ENTRY_CRC | ENTRY_BOUND | ENTRY_EPOCH

# Ledger regions, in this order. Counts are in the header.
UNDO_BYTES: Final = 128
NAMESPACES: Final = 256
NAMESPACE_LINE_BYTES: Final = 128
#: Words of a namespace's line: until when its epoch may be believed (CLOCK_BOOTTIME, ns); its epoch, 0 for none.
LEASE_WORD: Final = 14
EPOCH_WORD: Final = 15
SESSION_LINE_BYTES: Final = 64
HOLD_LINE_BYTES: Final = 32
SESSION_LINES_MAX: Final = 4096
HOLD_LINES_MAX: Final = 65_536
#: More than a quarter of the slots would let a session pin most of a table that is made for few, large values.
HOLD_LINES_MIN: Final = 256


#: Slots for each chunk that fits, as a fraction. Two-choice hashing into sets of 8 has both sets full for 13 of 1,000
#: new keys at 5 / 4, as entries come and go, for 1 of 1,000 at 11 / 8 and for 3 of 100,000 at 3 / 2 (values of 4 KiB in
#: a full arena of 512 MiB). Such a key evicts the coldest of sixteen entries, not of all, and is stored late.
SLOTS_PER_CHUNK: Final = 11, 8
#: Fewest slots that a value's size asks for: sets are even only if they are many.
SLOTS_MIN: Final = 1024


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Geometry(NamedTuple):
    """Sizes and offsets of one arena, in bytes unless noted. The fields are header words from Word.SIZE on."""

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
        """Return the number of slots."""
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
        """Return the size of header, shards and slots, the part of the metadata that a reader needs."""
        return self.ledger_offset

    @property
    def names_offset(self) -> int:
        """Return where the names of namespaces begin."""
        return self.ledger_offset + UNDO_BYTES

    @property
    def names_end(self) -> int:
        """Return where the names of namespaces end."""
        return self.names_offset + NAMESPACES * NAMESPACE_LINE_BYTES

    @property
    def meta_bytes(self) -> int:
        """Return the size of the metadata's file, where the data's begins."""
        return self.data_offset

    @property
    def data_end(self) -> int:
        """Return where the chunks end."""
        return self.data_offset + self.data_bytes

    @property
    def data_file_bytes(self) -> int:
        """Return the size of the data's file."""
        return self.size - self.data_offset

    @classmethod
    def plan(cls, size: int, slots: int = 0) -> Geometry:
        """Return the layout of an arena of ``size`` bytes in all. ``slots`` 0 means those for values of a page.

        So with values of 4 KiB the data region fills first, and the table takes 2.2 % of the memory. Raises UsageError
        for impossible sizes.
        """
        size = size // SLAB_BYTES * SLAB_BYTES
        if size < 4 * SLAB_BYTES:
            raise UsageError(f"an arena has at least {ARENA_BYTES_MIN >> 20} MiB, not {size} bytes")
        if slots < 0:
            raise UsageError(f"slots must be positive, not {slots}")
        wanted = slots or size // PAGE_BYTES * SLOTS_PER_CHUNK[0] // SLOTS_PER_CHUNK[1]
        sets = max(2, _round_up(wanted, WAYS) // WAYS)
        slots_offset = HEADER_BYTES + SHARDS_BYTES
        geometry = cls(
            size=size,
            sets=sets,
            slots_offset=slots_offset,
            visited_offset=0,
            ledger_offset=_round_up(slots_offset + sets * SET_BYTES, PAGE_BYTES),
            session_lines=min(SESSION_LINES_MAX, max(256, sets * WAYS // 8)),
            hold_lines=min(HOLD_LINES_MAX, max(HOLD_LINES_MIN, sets * WAYS // 4)),
            data_offset=0,
            data_bytes=0,
        )
        meta = _round_up(geometry.ledger_offset + geometry.ledger_bytes, PAGE_BYTES)
        visited = _round_up(sets * WAYS + STAMP_BYTES, PAGE_BYTES)
        data = (size - meta - visited) // SLAB_BYTES * SLAB_BYTES
        if data < 2 * SLAB_BYTES:
            raise UsageError(
                f"an arena of {size >> 20} MiB has no room for {sets * WAYS} slots ({meta + visited >> 20} MiB of "
                "tables): give it more memory or fewer slots"
            )
        end = size - visited
        return geometry._replace(data_offset=end - data, data_bytes=data, visited_offset=end)

    def write(self, words: memoryview) -> None:
        """Store the geometry in a fresh header. :func:`publish` stores the magic later."""
        words[Word.VERSION] = LAYOUT_VERSION
        for at, field in enumerate(self, Word.SIZE):
            words[at] = field

    def is_planned(self) -> bool:
        """Return True if a build that writes this layout has chosen these sizes."""
        return self == self.plan(self.size, self.slots)

    @classmethod
    def read(cls, words: memoryview, size: int, name: str) -> Geometry:
        """Return an existing arena's geometry, checked. Raise SegmentError if it is no arena of this layout.

        ``size``: bytes of both files. A file of huge pages has whole ones, see :func:`laid_out`.
        """
        if words[Word.MAGIC] != MAGIC:
            raise SegmentError(f"{name} is no arena (or not ready yet): its header has no SiMM magic")
        if words[Word.VERSION] != LAYOUT_VERSION:
            raise SegmentError(
                f"{name} has arena layout {words[Word.VERSION]}, this build reads {LAYOUT_VERSION}: "
                "run the same SiMM version on both sides"
            )
        found = cls(*words[Word.SIZE : Word.DATA_BYTES + 1])
        ordered = (
            found.sets >= 2
            and found.slots_offset == HEADER_BYTES + SHARDS_BYTES
            and found.slots_offset + found.sets * SET_BYTES <= found.ledger_offset
            and found.ledger_offset + found.ledger_bytes <= found.data_offset
            and found.ledger_offset % PAGE_BYTES == found.data_offset % PAGE_BYTES == 0
            and found.data_bytes % SLAB_BYTES == 0
            and found.data_end == found.visited_offset
            and found.visited_offset + found.slots + STAMP_BYTES <= found.size == size
        )
        if not ordered:
            raise SegmentError(f"{name} has a header that contradicts itself or its size of {size} bytes")
        return found


def laid_out(size: int) -> int:
    """Return the bytes of an arena whose files, or map, have ``size`` bytes.

    A data file in huge pages ends with a whole one, less than a slab beyond the arena's last word.
    """
    return size // SLAB_BYTES * SLAB_BYTES


def slots_for(size: int, chunk: int) -> int:
    """Return the slots of an arena of ``size`` bytes in all that is to be filled with chunks of ``chunk`` bytes.

    ``SLOTS_PER_CHUNK`` for the chunks that fit beside the table.
    """
    slots, chunks = SLOTS_PER_CHUNK
    return max(SLOTS_MIN, size * slots // (chunks * chunk + slots * (SLOT_BYTES + 1)))


def publish(words: memoryview) -> None:
    """Store the magic, the last word of a new arena."""
    words[Word.MAGIC] = MAGIC
