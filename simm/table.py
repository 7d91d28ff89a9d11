"""The hash table in shared memory: one writer, any number of readers that never ask.

What is a reader up against?
----------------------------
It shares no lock with the writer, may be stopped between any two of its instructions for any time,
and may sit on another machine, reading by RDMA. The writer may be killed between any two of its
stores. The reader must come out with the whole right value or with nothing.

How does a lookup work?
-----------------------
A 16-byte digest names two candidate sets of eight 64-byte slots (``hashing.sets_of``). ``find`` looks for
the digest's bytes in a set's 512 bytes with one C call; only a match at a slot's digest position counts,
as the same bytes may occur across other fields. An entry never moves, so a reader that finds nothing
in either set has a miss (an entry published while it looked was, for this reader, published later).

    reader                                          writer (overwrite of a live slot)
    1  s = seq            odd? start over           a  undo record := old slot image, then its valid word
    2  fields             digest differs? start     b  seq := odd
    3  seq == s?          else the fields are torn  c  digest, offset, length, ... := new
    4  copy the value                               d  seq := even, two more than before
    5  shard word == 0?   not ours any more: miss   e  grant line cleared; the old chunk may be reused
    6  seq == s?          else start over

Why is the copy right when 6 holds?
-----------------------------------
The chunk named by the slot is written by others only after the slot stopped naming it, that is after (d)
of an overwrite, delete or eviction (rule: *a freed chunk is reused only after its slot's seq has changed
and is even again*; ``Store`` frees it after these methods return). So if bytes of the copy (4) come
from the next tenant, (b) happened before that tenant wrote, and the load (6) sees another seq.

Example: slot 5 holds K with seq 8. A reader loads seq 8, its fields, copies half the value and is
stopped. The writer evicts K (seq 9, zeros, 10), gives the chunk to a client, which fills it. The reader goes
on, copies the other tenant's bytes, loads seq 10, differs from 8: it starts over and misses.

Could the seq come back to 8? (ABA)
-----------------------------------
The counter has 44 bits and the incarnation above it 20; both only grow. A reader would have to be stopped for
2^43 writes to one slot.

What orders these steps?
------------------------
x86-64 does: stores become visible in program order and loads are done in it (TSO), each word is one
aligned 8-byte access, and every step here is a call of its own into C, so no compiler moves them.
``copy`` may use non-temporal stores at the *destination*, which no other process reads. On other
machines the one-sided path stays off (``reader.ONE_SIDED``) until a fence is in place and proven.

What if the writer dies?
------------------------
Before (a): nothing happened. Between (a) and (d): the slot is odd; readers retry and then ask the
worker, and the next worker puts the undo record's image back under a fresh seq: the old value is there
again, its chunk was not freed. After (d): the new value is there; a grant line that still names its chunk is
outranked by the slot. The undo record's valid word holds slot + 1. It is zeroed before the image changes,
so a half-written image is never used, and after (d), so that an old image is never used for a later write.
One record is enough, as only one slot is ever odd.

Only an overwrite has an old value to lose. A first write and a clear go without the record: a slot that
its writer left odd without one is emptied, and that is the state before the write, or the one that
the clear was about to make (an eviction may always happen; a delete was not answered yet).

LIMITATIONS
-----------
* Both sets full: the coldest of the sixteen must go (``Store`` does that and counts it).
* An entry is found by digest alone; keys are not stored.
* ``visited`` bytes are hints: a reader's store may be lost to the writer's clearing.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constants import DIGEST_BYTES, SET_BYTES, SLOT_BYTES, WAYS
from .errors import CorruptionError
from .hashing import SHARD_BITS, SHARD_MASK, sets_of, sets_of_words, split
from .layout import SEQ_BITS, SEQ_MASK, SLOT, SLOT_BODY, SLOT_FIELDS, SLOT_WORDS, Geometry

ZERO_DIGEST: Final = bytes(DIGEST_BYTES)
_EMPTY_BODY: Final = bytes(SLOT_BODY.size)
_ALL_WAYS: Final = (1 << WAYS) - 1
#: Lowest free way by the mask of used ones; -1 when all are.
_FREE_WAY: Final = [next((way for way in range(WAYS) if not mask >> way & 1), -1) for mask in range(256)]
_USED: Final = [mask.bit_count() for mask in range(256)]

_SLOT_MASK: Final = SLOT_BYTES - 1
_WAY_MASK: Final = WAYS - 1
_WAY_BITS: Final = _WAY_MASK.bit_length()


#: Slots that recovery looks at together: a few MiB of temporaries.
_BLOCK_SLOTS: Final = 1 << 15


class LiveSlots(NamedTuple):
    """Columns of :meth:`Table.live`, one row a live slot."""

    slots: NDArray[np.int64]
    offsets: NDArray[np.uint64]
    chunks: NDArray[np.uint32]
    stored: NDArray[np.uint64]
    shards: NDArray[np.uint64]


class Entry(NamedTuple):
    """One slot's fields."""

    digest: bytes
    offset: int
    length: int
    crc: int
    chunk: int
    namespace: int
    flags: int
    stored: int


class Table:
    """The writer's side. All methods are O(1) but the iteration, ``check`` and ``recover``.

    Args:
        mm: the whole segment (``find`` is a method of mmap).
        geometry: where slots and undo record lie.
        incarnation: of the worker, goes into every seq written.
    """

    def __init__(self, mm: mmap.mmap, geometry: Geometry, incarnation: int) -> None:
        self.geometry = geometry
        self.incarnation = incarnation
        self._high = incarnation << SEQ_BITS
        self.entries = 0
        self._find = mm.find
        self._sets = geometry.sets
        self._slots_offset = geometry.slots_offset
        whole = memoryview(mm)
        self._buf = whole
        start, end = geometry.slots_offset, geometry.slots_offset + geometry.sets * SET_BYTES
        #: Seq words and offsets are single stores through this view.
        self._words = whole[start:end].cast("Q")
        self._slots = whole[start:end]
        undo = whole[geometry.ledger_offset : geometry.ledger_offset + 128]
        self._undo_words = undo.cast("Q")
        self._undo_image = undo[8 : 8 + SLOT_BYTES]
        self._pack_body = SLOT_BODY.pack_into
        #: Mask of used ways by set: private, rebuilt by recover().
        self._used = bytearray(geometry.sets)

    # -- lookup -----------------------------------------------------------------------------

    def lookup(self, digest: bytes) -> int:
        """The digest's slot, or -1."""
        if digest == ZERO_DIGEST:
            return -1  # found in any empty slot
        base = self._slots_offset
        for which in sets_of(digest, self.geometry.sets):
            start = base + which * SET_BYTES
            at = self._find(digest, start, start + SET_BYTES)
            while at >= 0:
                if (at - base) & _SLOT_MASK == 8:
                    return (at - base) // SLOT_BYTES
                at = self._find(digest, at + 1, start + SET_BYTES)
        return -1

    def candidates(self, digest: bytes) -> list[int]:
        """The sixteen slots where the digest may live."""
        first, second = sets_of(digest, self.geometry.sets)
        return [*range(first * WAYS, first * WAYS + WAYS), *range(second * WAYS, second * WAYS + WAYS)]

    def entry(self, slot: int) -> Entry:
        """The slot's fields; meaningful for a live slot."""
        return Entry(*SLOT.unpack_from(self._slots, slot * SLOT_BYTES)[1:-1])

    def offset(self, slot: int) -> int:
        """Where the slot's value lies in the segment; 0 for an empty slot."""
        word: int = self._words[slot * SLOT_WORDS + 3]
        return word

    def stored(self, slot: int) -> int:
        """When the slot was written, ms."""
        word: int = self._words[slot * SLOT_WORDS + 6]
        return word

    def __iter__(self) -> Iterator[int]:
        """Live slots in order. O(sets)."""
        for number, mask in enumerate(self._used):
            if mask:
                for way in range(WAYS):
                    if mask >> way & 1:
                        yield number * WAYS + way

    # -- mutation ---------------------------------------------------------------------------

    def publish(
        self, digest: bytes, offset: int, length: int, crc: int, chunk: int, namespace: int, flags: int, stored: int
    ) -> tuple[int, int, int] | None:
        """Publish an entry in the digest's own slot, else in a free one of the emptier of its sets.

        (offset of the value it replaced or -1, ``offset``, slot), or None, with nothing changed, where both sets
        are full of others (or the digest is ZERO_DIGEST). The replaced chunk may be reused afterwards, and not
        before. The letters are those of the table at the top.

        Finding the place and writing it are one method: with the loop over a batch's entries, a commit costs
        1.9 to 2.7 us a key instead of 2.5 to 3.3 (CPython 3.11, EPYC 2.6 GHz).
        """
        low, high = split(digest)
        sets = self._sets
        first = (low >> SHARD_BITS) % sets
        second = high % sets
        if second == first:
            second = (second + 1) % sets
        used = self._used
        mask, other = used[first], used[second]
        base = self._slots_offset
        at = -1
        if mask:  # a look into an empty set costs two cache misses
            start = base + first * SET_BYTES
            at = self._find(digest, start, start + SET_BYTES)
        if at < 0 and other:
            start = base + second * SET_BYTES
            at = self._find(digest, start, start + SET_BYTES)
        at -= base
        if at >= 0 and at & _SLOT_MASK != 8:  # the same bytes across other fields: look at every match
            at = self.lookup(digest) * SLOT_BYTES + 8
        words = self._words
        if at >= 0:
            word = (at - 8) >> 3
            old: int = words[word + 3]
            if not old:
                return None  # see below
            self._save(word >> 3)  # (a)
        else:
            if digest == ZERO_DIGEST:
                return None  # no digest, as it is found in any empty slot
            if _USED[other] < _USED[mask]:
                first, mask = second, other
            way = _FREE_WAY[mask]
            if way < 0:
                return None
            word = (first * WAYS + way) * SLOT_WORDS
            at = word * 8 + 8
            old = -1
        seq = words[word]
        words[word] = seq | 1  # (b)
        self._pack_body(self._slots, at, digest, offset, length, crc, chunk, namespace, flags, stored, 0)  # (c)
        words[word] = self._high | (seq + 2) & SEQ_MASK  # (d)
        if old >= 0:
            self._undo_words[0] = 0
        else:
            used[first] = mask | 1 << way
            self.entries += 1
        return old, offset, word >> 3

    def clear(self, slot: int) -> None:
        """Make a slot empty. Afterwards, and not before, its chunk may be reused."""
        words = self._words
        at = slot * SLOT_WORDS
        seq = words[at]
        words[at] = seq | 1
        start = slot * SLOT_BYTES + 8
        self._slots[start : start + SLOT_BODY.size] = _EMPTY_BODY
        words[at] = self._high | (seq + 2) & SEQ_MASK
        bit = 1 << (slot & _WAY_MASK)
        used = self._used[slot >> _WAY_BITS]
        if used & bit:
            self._used[slot >> _WAY_BITS] = used & ~bit
            self.entries -= 1

    def _save(self, slot: int) -> None:
        """Store the undo record: valid word off, image, valid word on."""
        start = slot * SLOT_BYTES
        undo = self._undo_words
        undo[0] = 0
        self._undo_image[:] = self._slots[start : start + SLOT_BYTES]
        undo[0] = slot + 1

    # -- recovery ---------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Repair a slot left odd by a dead writer and learn which slots are live. What was found, for people.

        Entries whose fields are impossible are dropped: a miss is always allowed. O(slots), by numpy, in
        blocks; a slot in need of repair costs microseconds. Killed at any point and done again, it comes
        to the same.
        """
        geometry = self.geometry
        notes: list[str] = []
        self._used = bytearray(geometry.sets)
        self.entries = 0
        for start in range(0, geometry.slots, _BLOCK_SLOTS):
            stop = min(start + _BLOCK_SLOTS, geometry.slots)
            fields = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)
            for slot in (np.flatnonzero(fields["seq"] & np.uint64(1)) + start).tolist():
                if self._undo_words[0] == slot + 1:  # an overwrite: the old value is still in its chunk
                    body = bytes(self._undo_image[8:])
                    notes.append(f"slot {slot} restored from the undo record")
                else:
                    body = _EMPTY_BODY
                    notes.append(f"slot {slot} was odd in a first write or a clear: emptied")
                self._restore(slot, body)
            named = fields["offset"] != 0
            sound = self._sound(fields, start)
            strange = (named | (fields["low"] != 0) | (fields["high"] != 0)) & ~sound
            for slot in (np.flatnonzero(strange) + start).tolist():
                notes.append(f"slot {slot} has impossible fields: dropped")
                self._restore(slot, _EMPTY_BODY)
            live = named & sound
            self.entries += int(np.count_nonzero(live))
            self._used[start // WAYS : stop // WAYS] = np.packbits(live, bitorder="little").tobytes()
        self._undo_words[0] = 0
        return notes

    def _sound(self, fields: NDArray[Any], start: int) -> NDArray[np.bool_]:
        """Which of these slots, the first being number ``start``, have fields that an entry can have."""
        geometry = self.geometry
        offset, chunk, length = fields["offset"], fields["chunk"].astype(np.uint64), fields["length"]
        sets = np.arange(start, start + len(fields), dtype=np.uint64) // np.uint64(WAYS)
        first, second = sets_of_words(fields["low"], fields["high"], geometry.sets)
        end = np.uint64(geometry.size)
        sound: NDArray[np.bool_] = (
            (offset >= np.uint64(geometry.data_offset))
            & (offset < end)
            & (chunk <= end - offset)  # where the line above holds; else it does not matter
            & (length > 0)
            & (length <= chunk)
            & ((sets == first) | (sets == second))
        )
        return sound

    def live(self) -> LiveSlots:
        """All live slots in order, with what recovery and shard moves ask of them. O(slots), by numpy."""
        slots = np.flatnonzero(np.unpackbits(np.frombuffer(self._used, np.uint8), bitorder="little"))
        fields = np.frombuffer(self._slots, SLOT_FIELDS, self.geometry.slots)
        return LiveSlots(
            slots, fields["offset"][slots], fields["chunk"][slots], fields["stored"][slots],
            fields["low"][slots] & np.uint64(SHARD_MASK),
        )  # fmt: skip

    def _restore(self, slot: int, body: bytes) -> None:
        """Put a body into a slot under a fresh seq. No undo record: done again, it does the same."""
        words = self._words
        at = slot * SLOT_WORDS
        seq = words[at]
        words[at] = seq | 1
        start = slot * SLOT_BYTES + 8
        self._slots[start : start + len(body)] = body
        words[at] = self._high | ((seq | 1) + 1) & SEQ_MASK

    def check(self) -> None:
        """Raise CorruptionError unless every slot is well-formed and counted. O(slots)."""
        words = self._words
        live = 0
        seen: set[bytes] = set()
        for slot in range(self.geometry.slots):
            at = slot * SLOT_WORDS
            seq = words[at]
            used = self._used[slot // WAYS] >> slot % WAYS & 1
            if seq & 1:
                raise CorruptionError(f"slot {slot} is odd ({seq:#x}) while nobody writes")
            if seq >> SEQ_BITS > self.incarnation:
                raise CorruptionError(f"slot {slot} has a seq of a later incarnation")
            if bool(words[at + 3]) != bool(used):
                raise CorruptionError(f"slot {slot} is {'live' if words[at + 3] else 'empty'}, its mask says otherwise")
            if not used:
                if words[at + 1] or words[at + 2]:
                    raise CorruptionError(f"slot {slot} is empty and has a digest")
                continue
            live += 1
            digest = self.entry(slot).digest
            if digest in seen:
                raise CorruptionError(f"digest {digest.hex()} is stored twice")
            seen.add(digest)
            if slot // WAYS not in sets_of(digest, self.geometry.sets):
                raise CorruptionError(f"slot {slot} is in none of its digest's sets")
        if live != self.entries:
            raise CorruptionError(f"{live} live slots, {self.entries} counted")

    def release(self) -> None:
        """Drop every view, so that the segment can be unmapped."""
        for view in (self._words, self._slots, self._undo_words, self._undo_image, self._buf):
            view.release()
        del self._find


assert _FREE_WAY[_ALL_WAYS] == -1
