"""The hash table in shared memory: one writer, and readers that never ask it.

A reader shares no lock with the writer. It may be stopped between any two instructions for any time, and may be on
another machine, reading by RDMA. The writer may be killed between any two of its stores. Even so, a reader gets the
whole right value or nothing. This module owns the argument for readers on the same host; ``rdma/remote_arena.py`` has
the one for RDMA.

Lookup
------
A 16-byte digest names two candidate sets of eight 64-byte slots (``hashing.sets_of``). ``find`` searches a set's 512
bytes for the digest in one C call. Only a match at a slot's digest position counts, as the same bytes may occur across
other fields. An entry never moves, so a reader that finds nothing in either set has a miss. An entry published
meanwhile counts as published later.

    reader                                          writer (overwrite of a live slot)
    1  s = seq            odd? start over           a  undo record := old slot image, then its valid word
    2  fields             digest differs? start     b  seq := odd
    3  seq == s?          else the fields are torn  c  digest, offset, length, ... := new
    4  copy the value                               d  seq := even, two more than before
    5  shard word == 0?   not owned any more: miss  e  grant line cleared; the old chunk may be reused
    6  seq == s?          else start over

Why the copy is right if 6 holds
--------------------------------
Another value is written to the slot's chunk only after the slot has stopped naming it, which is after (d) of an
overwrite, delete or eviction. The rule: *a freed chunk is reused only after its slot's seq has changed and is even
again*; ``Store`` frees it after these methods return. So if bytes of the copy (4) belong to the chunk's next value,
(b) happened before those were written, and the load (6) returns another seq.

Example: slot 5 holds K with seq 8. A reader loads seq 8 and the fields, copies half the value, and is stopped. The
writer evicts K (seq 9, zeros, 10) and grants the chunk to a client, which fills it. The reader continues, copies the
new bytes, and loads seq 10, not 8. It starts over and misses.

The seq cannot come back to 8 (ABA): the counter has 44 bits, with 20 bits of incarnation above it, and both only grow.
A reader would have to be stopped for 2^43 writes to one slot.

Order of loads and stores
-------------------------
On x86-64, stores become visible in program order, and loads happen in it (TSO). Each word is one aligned 8-byte access.
Each step is a call into C of its own, so no compiler reorders them. ``copy`` may use non-temporal stores for the
*destination*, which no other process reads. On other machines the one-sided path stays off (``reader.ONE_SIDED``) until
a fence is in place and proven.

Death of the writer
-------------------
* Before (a): nothing has happened.
* Between (a) and (d): the slot is odd, so readers retry and then ask the worker. The next worker restores the undo
  record's image under a fresh seq: the old value is back, as its chunk was not freed.
* After (d): the new value is stored. A grant line that still names its chunk is outranked by the slot.

The undo record's valid word is slot + 1. It is zeroed before the image changes, so a half-written image is never used,
and after (d), so that an old image is never used for a later write. One record is enough, as overwrites go one by one.
Slots that are cleared together are odd together, and need none.

Only an overwrite can lose an old value. A first write and a clear use no record: recovery empties a slot left odd
without one. That is the state before the write, or the one that the clear was about to reach (an eviction may always
happen; a delete had no answer yet).

Limitations
-----------
* With both sets full, the coldest of the sixteen entries must go (``Store`` evicts and counts it).
* An entry is found by its digest alone; keys are not stored.
* ``visited`` bytes are hints: the writer's clearing may overwrite a reader's store.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arena.events.ring import EventRing
from .arena.hashing import SHARD_BITS, SHARD_MASK, find_slots, low_words, sets_of, sets_of_words, split
from .arena.layout import (
    ENTRY_EPOCH,
    MARKS_WORD,
    SEQ_BITS,
    SEQ_MASK,
    SLOT,
    SLOT_BODY,
    SLOT_FIELDS,
    SLOT_VALUE,
    SLOT_WORDS,
    UNDO_BYTES,
    Geometry,
)
from .arena.queues import KeyWords
from .arena.rebuild import LiveSlots
from .constants import DIGEST_BYTES, SET_BYTES, SLOT_BYTES, WAYS
from .errors import CorruptionError

ZERO_DIGEST: Final = bytes(DIGEST_BYTES)
_EMPTY_BODY: Final = bytes(SLOT_BODY.size)
#: Lowest free way by the mask of used ones, -1 if all are used.
_FREE_WAY: Final = [next((way for way in range(WAYS) if not mask >> way & 1), -1) for mask in range(256)]
_USED: Final = [mask.bit_count() for mask in range(256)]

_SLOT_MASK: Final = SLOT_BYTES - 1
_WAY_MASK: Final = WAYS - 1
_WAY_BITS: Final = _WAY_MASK.bit_length()
_ODD: Final = np.uint64(1)
_SEQ_MASK: Final = np.uint64(SEQ_MASK)
#: The byte of a digest that is a slot's tag. It is none of those that an epoch takes.
_TAG_BYTE: Final = 7
_TAG_SHIFT: Final = np.uint64(8 * _TAG_BYTE)
_NO_BODY: Final = np.zeros((), f"V{SLOT_BODY.size}")[()]


#: Slots from which on they are cleared by numpy, each word of all of them at once.
COLUMNS_FROM: Final = 24
#: Slots that recovery reads at a time: a few MiB of temporaries.
_BLOCK_SLOTS: Final = 1 << 15
#: Entries that are cleared between two heartbeats: some milliseconds.
CLEARS: Final = 1024


class Entry(NamedTuple):
    """The fields of one slot."""

    digest: bytes
    offset: int
    length: int
    crc: int
    chunk: int
    namespace: int
    flags: int
    stored: int


class Table:
    """The writer's side. All methods are O(1), except for the iteration, ``live`` and ``recover``.

    ``mm`` is the whole segment. The worker's ``incarnation`` enters every seq written. ``undo`` is where the undo
    record lies, if not in the segment.
    """

    def __init__(
        self, mm: mmap.mmap, geometry: Geometry, incarnation: int, undo: memoryview | None = None
    ) -> None:
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
        #: Columns of the same, for numpy: seqs, offsets, and what a slot has after its seq.
        rows = np.frombuffer(self._words, np.uint64).reshape(-1, SLOT_WORDS)
        self._seqs, self._offsets = rows[:, 0], rows[:, 3]
        self._bodies = rows[:, 1:].view(f"V{SLOT_BODY.size}")[:, 0]
        self._high_word = np.uint64(self._high)
        if undo is None:
            undo = whole[geometry.ledger_offset : geometry.ledger_offset + UNDO_BYTES]
        self._undo_words = undo.cast("Q")
        self._undo_image = undo[8 : 8 + SLOT_BYTES]
        self._rows = rows
        #: Where others are told what comes and goes (``arena/events/ring.py``); None: nobody is.
        self._events: EventRing | None = None
        self._pack_body, self._pack_value = SLOT_BODY.pack_into, SLOT_VALUE.pack_into
        #: Mask of used ways by set: private, rebuilt by recover().
        self._used = bytearray(geometry.sets)
        #: A byte of each live slot's digest, and whatever of an empty one: private, rebuilt by recover(). A search for
        #: what is absent looks at 8 bytes of a set instead of 512.
        self._tags = bytearray(geometry.slots)

    # -- lookup -----------------------------------------------------------------------------

    def lookup(self, digest: bytes) -> int:
        """Return the digest's slot, or -1."""
        if digest == ZERO_DIGEST:
            return -1  # any empty slot has it
        base = self._slots_offset
        for which in sets_of(digest, self.geometry.sets):
            start = base + which * SET_BYTES
            at = self._find(digest, start, start + SET_BYTES)
            while at >= 0:
                if (at - base) & _SLOT_MASK == 8:
                    return (at - base) // SLOT_BYTES
                at = self._find(digest, at + 1, start + SET_BYTES)
        return -1

    def rows_of(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.void]]:
        """Return the slots of a batch, -1 without one, and copies of them. ``keys``: the digests' words, two each.

        The row of a key without a slot is another's. O(keys), by numpy.
        """
        words = self._rows.reshape(-1)
        slots = find_slots(words, np.intp(0), np.uint64(self._sets), keys[:, 0], keys[:, 1], low_words(words))
        slots[(keys == 0).all(axis=1)] = -1  # ZERO_DIGEST: any empty slot has it
        return slots, self._rows.take(slots, axis=0).view(SLOT_FIELDS)[:, 0]

    def candidates(self, digest: bytes) -> list[int]:
        """Return the sixteen slots that the digest may occupy."""
        first, second = sets_of(digest, self.geometry.sets)
        return [*range(first * WAYS, first * WAYS + WAYS), *range(second * WAYS, second * WAYS + WAYS)]

    def entry(self, slot: int) -> Entry:
        """Return the fields of a live slot."""
        return Entry(*SLOT.unpack_from(self._slots, slot * SLOT_BYTES)[1:-1])

    def digests(self, slots: list[int]) -> bytes:
        """Return the digests of live slots, one after the other. O(slots), by numpy."""
        return self._rows[np.array(slots), 1:3].tobytes()

    def offset(self, slot: int) -> int:
        """Return the offset of the slot's value in the arena, 0 for an empty slot."""
        word: int = self._words[slot * SLOT_WORDS + 3]
        return word

    def shard(self, slot: int) -> int:
        """Return the shard of the slot's digest, 0 for an empty slot."""
        word: int = self._words[slot * SLOT_WORDS + 1]
        return word & SHARD_MASK

    def stored(self, slot: int) -> int:
        """Return the time at which the slot was written, in ms."""
        word: int = self._words[slot * SLOT_WORDS + 6]
        return word

    def marks(self, slot: int) -> int:
        """Return the slot's marks: until when it is kept in the lower half, its group in the upper one."""
        word: int = self._words[slot * SLOT_WORDS + MARKS_WORD]
        return word

    def set_marks(self, slot: int, marks: int) -> None:
        """Store a live slot's marks. Readers take no notice: they are no part of the value, and the seq stays."""
        self._words[slot * SLOT_WORDS + MARKS_WORD] = marks

    def key_words(self) -> KeyWords:
        """Return where the lower half of each slot's digest is. Others may store there: it is a hint, and no more.

        The upper half ends with an epoch, which all keys of its namespace share.
        """
        return KeyWords(self._words, SLOT_WORDS, 1)

    def __iter__(self) -> Iterator[int]:
        """Yield the live slots in order. O(sets)."""
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

        Return (offset of the replaced value or -1, ``offset``, slot). Return None, with nothing changed, if other
        entries fill both sets, or the digest is ZERO_DIGEST. The replaced chunk may be reused only after the return.
        The letters in the comments are those of the module's table.

        Search and write are one method because the calls are a quarter of a commit's cost (``simm bench``).
        """
        low, high = split(digest)
        sets = self._sets
        first = (low >> SHARD_BITS) % sets
        second = high % sets
        if second == first:
            second = (second + 1) % sets
        used = self._used
        mask, other = used[first], used[second]
        slot = -1
        # A set without the tag has no such entry: a cache line is looked at instead of eight.
        tag, tags, base = digest[_TAG_BYTE], self._tags, self._slots_offset + 8
        if mask and (slot := tags.find(tag, first * WAYS, first * WAYS + WAYS)) >= 0:
            at = base + slot * SLOT_BYTES
            if self._find(digest, at, at + DIGEST_BYTES) < 0:
                slot = self.lookup(digest)  # another one has the tag
        if slot < 0 and other and (slot := tags.find(tag, second * WAYS, second * WAYS + WAYS)) >= 0:
            at = base + slot * SLOT_BYTES
            if self._find(digest, at, at + DIGEST_BYTES) < 0:
                slot = self.lookup(digest)
        words = self._words
        if slot >= 0:
            word = slot * SLOT_WORDS
            old: int = words[word + 3]
            if not old:
                if digest == ZERO_DIGEST:
                    return None  # an empty slot
                raise CorruptionError(f"slot {slot} has a digest and no value")
            self._save(slot)  # (a)
        else:
            if digest == ZERO_DIGEST:
                return None  # not a digest, as any empty slot has it
            if _USED[other] < _USED[mask]:
                first, mask = second, other
            way = _FREE_WAY[mask]
            if way < 0:
                return None
            slot = first * WAYS + way
            word = slot * SLOT_WORDS
            old = -1
        # Odd already where a stray store has hit it: one more then, or it would stay odd.
        odd = words[word] | 1
        words[word] = odd  # (b)
        at = word * 8 + 8
        if old < 0:  # (c)
            self._pack_body(self._slots, at, digest, offset, length, crc, chunk, namespace, flags, stored, 0)
        else:  # the marks are the key's, and stay: an engine that puts a kept page again does not know that it is kept
            at, marks = at + DIGEST_BYTES, words[word + MARKS_WORD]
            self._pack_value(self._slots, at, offset, length, crc, chunk, namespace, flags, stored, marks)
        words[word] = self._high | (odd + 1) & SEQ_MASK  # (d)
        if old >= 0:
            self._undo_words[0] = 0
            if self._events is not None:
                self._events.overwritten.append(slot)
        else:
            used[first] = mask | 1 << way
            self.entries += 1
        tags[slot] = tag  # of an overwritten slot too: its digest may be one that somebody else has put there
        return old, offset, slot

    @property
    def events(self) -> EventRing | None:
        """Where others are told what comes and goes; None: nobody is."""
        return self._events

    @events.setter
    def events(self, ring: EventRing | None) -> None:
        self._events = ring
        if ring is not None:
            ring.begin(self._used, self.tell)

    def tell(self) -> None:
        """Tell others what was published since the last call, as far as it is still there. O(slots), by numpy."""
        if self._events is not None:
            self._events.tell(self._used, self.entries)

    def clear(self, slot: int) -> None:
        """Empty a slot. Its chunk may be reused only after the return."""
        words = self._words
        at = slot * SLOT_WORDS
        odd = words[at] | 1
        start = slot * SLOT_BYTES + 8
        if self._events is not None:
            self._events.removed_one(slot)
        words[at] = odd
        self._slots[start : start + SLOT_BODY.size] = _EMPTY_BODY
        words[at] = self._high | (odd + 1) & SEQ_MASK
        bit = 1 << (slot & _WAY_MASK)
        used = self._used[slot >> _WAY_BITS]
        if used & bit:
            self._used[slot >> _WAY_BITS] = used & ~bit
            self.entries -= 1

    def clear_many(self, slots: list[int], offsets: list[int]) -> None:
        """Empty slots whose values lie at these offsets. Their chunks may be reused only after the return.

        Raise CorruptionError, with nothing changed, if one names another value. Each slot takes the steps of
        :meth:`clear`, but all take one before any takes the next.
        """
        if len(slots) < COLUMNS_FROM:
            words = self._words
            if [words[slot * SLOT_WORDS + 3] for slot in slots] != offsets:
                raise CorruptionError(f"slots {slots} name other chunks than their own")
            for slot in slots:
                self.clear(slot)
            return
        at = np.array(slots)
        if self._offsets[at].tolist() != offsets:
            raise CorruptionError(f"slots {slots} name other chunks than their own")
        if self._events is not None:
            self._events.removed(at)
        odd = self._seqs[at] | _ODD
        self._seqs[at] = odd
        self._bodies[at] = _NO_BODY
        self._seqs[at] = (odd + _ODD) & _SEQ_MASK | self._high_word
        used = self._used
        for slot in slots:
            used[slot >> _WAY_BITS] &= ~(1 << (slot & _WAY_MASK))
        self.entries -= len(slots)

    def _save(self, slot: int) -> None:
        """Store the undo record: valid word off, image, valid word on."""
        start = slot * SLOT_BYTES
        undo = self._undo_words
        undo[0] = 0
        self._undo_image[:] = self._slots[start : start + SLOT_BYTES]
        undo[0] = slot + 1

    # -- recovery ---------------------------------------------------------------------------

    def recover(self, beat: Callable[[], None] = lambda: None) -> list[str]:
        """Repair a slot that a dead writer left odd, and find the live slots. Return notes for the log.

        Entries with impossible fields are dropped: a miss is always allowed. Idempotent, even if killed at any point.
        Calls ``beat`` after each block. O(slots), by numpy.
        """
        geometry = self.geometry
        notes: list[str] = []
        self._used = bytearray(geometry.sets)
        self.entries = 0
        for start in range(0, geometry.slots, _BLOCK_SLOTS):
            stop = min(start + _BLOCK_SLOTS, geometry.slots)
            # A copy, so that what is looked at is what is judged: others may store there.
            fields = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES).copy()
            odd = (fields["seq"] & np.uint64(1)) != 0
            for slot in (np.flatnonzero(odd) + start).tolist():
                if self._undo_words[0] == slot + 1:  # an overwrite: the chunk still has the old value
                    body = bytes(self._undo_image[8:])
                    notes.append(f"slot {slot} restored from the undo record")
                else:
                    body = _EMPTY_BODY
                    notes.append(f"slot {slot} was odd in a first write or a clear: emptied")
                self._restore(slot, body)
            fields[odd] = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)[odd]
            named = fields["offset"] != 0
            sound = self._sound(fields, start)
            sound &= fields["seq"] >> np.uint64(SEQ_BITS) <= np.uint64(self.incarnation)
            strange = (named | (fields["low"] != 0) | (fields["high"] != 0)) & ~sound
            for slot in (np.flatnonzero(strange) + start).tolist():
                notes.append(f"slot {slot} has impossible fields: dropped")
                self._restore(slot, _EMPTY_BODY)
            live = named & sound
            self._tags[start:stop] = (fields["low"] >> _TAG_SHIFT).astype(np.uint8).tobytes()
            self.entries += int(np.count_nonzero(live))
            self._used[start // WAYS : stop // WAYS] = np.packbits(live, bitorder="little").tobytes()
            beat()
        self._undo_words[0] = 0
        return notes

    def _sound(self, fields: NDArray[Any], start: int) -> NDArray[np.bool_]:
        """Return a mask of the slots, from number ``start`` on, whose fields are possible for an entry."""
        geometry = self.geometry
        offset, chunk, length = fields["offset"], fields["chunk"].astype(np.uint64), fields["length"]
        sets = np.arange(start, start + len(fields), dtype=np.uint64) // np.uint64(WAYS)
        first, second = sets_of_words(fields["low"], fields["high"], geometry.sets)
        end = np.uint64(geometry.data_end)
        sound: NDArray[np.bool_] = (
            (offset >= np.uint64(geometry.data_offset))
            & (offset < end)
            & (chunk <= end - offset)  # wraps only where the line above is False
            & (length > 0)
            & (length <= chunk)
            & ((sets == first) | (sets == second))
        )
        return sound

    def wipe(self, beat: Callable[[], None]) -> None:
        """Empty all slots, under fresh seqs. Calls ``beat`` after each block. O(slots), by numpy."""
        self._undo_words[0] = 0
        self._used = bytearray(self.geometry.sets)
        self.entries = 0
        everything = np.frombuffer(self._slots, np.uint64).reshape(-1, SLOT_WORDS)
        for start in range(0, self.geometry.slots, _BLOCK_SLOTS):
            block = everything[start : start + _BLOCK_SLOTS]
            block[:, 0] |= np.uint64(1)
            block[:, 1:] = 0
            block[:, 0] = (block[:, 0] + np.uint64(1)) & np.uint64(SEQ_MASK) | np.uint64(self._high)
            beat()

    def strange(self, start: int, stop: int, offsets: NDArray[np.int64]) -> list[int]:
        """Return those of these slots in which somebody else has stored something, as far as that can be told.

        ``offsets``: of the chunk of each, in the arena; 0 for a slot without one. O(``stop - start``), by numpy.
        """
        fields = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES).copy()
        empty = (fields["offset"] | fields["low"] | fields["high"]) == 0
        tagged = fields["low"] >> _TAG_SHIFT == np.frombuffer(self._tags, np.uint8)[start:stop]
        right = np.where(offsets == 0, empty, self._sound(fields, start) & tagged) & (fields["offset"] == offsets)
        seq = fields["seq"]
        right &= (seq & np.uint64(1) == 0) & (seq >> np.uint64(SEQ_BITS) <= np.uint64(self.incarnation))
        found: list[int] = (np.flatnonzero(~right) + start).tolist()
        return found

    def chunks(self, start: int, stop: int) -> list[int]:
        """Return the bytes of the chunk that each of these slots names."""
        found: list[int] = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)["chunk"].tolist()
        return found

    def empty(self, slot: int) -> None:
        """Empty a slot, of which nothing is believed. Its chunk may be reused only after the return."""
        self.clear(slot)
        self._restore(slot, _EMPTY_BODY)
        if self._events is not None:
            self._events.anew()  # the digest that was there is not known

    def live(self) -> LiveSlots:
        """Return all live slots in order, with the fields that recovery needs. O(slots), by numpy."""
        slots = np.flatnonzero(np.unpackbits(np.frombuffer(self._used, np.uint8), bitorder="little"))
        fields = np.frombuffer(self._slots, SLOT_FIELDS, self.geometry.slots)
        return LiveSlots(
            slots, fields["offset"][slots], fields["chunk"][slots], fields["stored"][slots], fields["namespace"][slots]
        )  # fmt: skip

    def marked(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the live slots that have marks, their digests' lower words, and their marks. O(slots), by numpy."""
        slots = np.flatnonzero(np.unpackbits(np.frombuffer(self._used, np.uint8), bitorder="little"))
        rows = np.frombuffer(self._words, np.uint64).reshape(-1, SLOT_WORDS)
        marks = rows[slots, MARKS_WORD]
        found = np.flatnonzero(marks)
        return slots[found], rows[slots[found], 1], marks[found]

    def of_shards(self, lost: NDArray[np.bool_], start: int) -> tuple[list[int], int]:
        """Return the live slots from ``start`` on whose shards ``lost`` marks, and where the next block starts.

        ``start`` is 0, or what the call before returned. O(slots of a block), by numpy.
        """
        stop = min(start + _BLOCK_SLOTS, self.geometry.slots)
        used = np.frombuffer(self._used, np.uint8)[start // WAYS : stop // WAYS]
        slots = np.flatnonzero(np.unpackbits(used, bitorder="little"))
        low = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)["low"][slots]
        found: list[int] = (slots[lost[low.astype(np.intp) & SHARD_MASK]] + start).tolist()
        return found, stop

    @property
    def slots(self) -> int:
        """Return the number of slots."""
        return self.geometry.slots

    def namespaces_from(self, start: int) -> tuple[NDArray[np.uint16], int]:
        """Return the namespaces of the entries in a block of slots from ``start`` on, and where the next one starts.

        O(slots of a block), by numpy.
        """
        stop = min(start + _BLOCK_SLOTS, self.geometry.slots)
        fields = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)
        return fields["namespace"][fields["offset"] != 0], stop

    def stale_from(self, start: int, tags: Mapping[int, int]) -> tuple[list[int], int]:
        """Return the slots of a block from ``start`` on that have an old epoch, and where the next block starts.

        ``tags``: by namespace, how a digest ends that is not old; -1: none is. O(slots of a block), by numpy.
        """
        stop = min(start + _BLOCK_SLOTS, self.geometry.slots)
        fields = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)
        ends = np.full(1 << 16, -2, np.int64)  # by namespace: those have 16 bits. -2: all of its entries stay
        ends[list(tags)] = list(tags.values())
        wanted = ends[fields["namespace"]]
        at = np.flatnonzero((wanted != -2) & (fields["offset"] != 0))
        old = (fields["high"][at] >> np.uint64(32)).astype(np.int64) != wanted[at]
        old |= fields["flags"][at] & ENTRY_EPOCH == 0
        found: list[int] = (at[old] + start).tolist()
        return found, stop

    def live_from(self, start: int, most: int) -> tuple[NDArray[np.intp], NDArray[np.uint16], int]:
        """Return the live slots among ``most`` from ``start`` on, their namespaces, and where the next ones start.

        Both numbers are multiples of WAYS. O(most), by numpy.
        """
        stop = min(start + most, self.geometry.slots)
        used = np.frombuffer(self._used, np.uint8)[start // WAYS : stop // WAYS]
        slots = np.flatnonzero(np.unpackbits(used, bitorder="little"))
        fields = np.frombuffer(self._slots, SLOT_FIELDS, stop - start, start * SLOT_BYTES)
        return slots + start, fields["namespace"][slots], stop

    def clear_shards(self, lost: NDArray[np.bool_], beat: Callable[[], None]) -> int:
        """Clear all slots of the shards that ``lost`` marks. Return their number.

        Calls ``beat`` after each block, and after each ``CLEARS`` entries that are cleared.
        """
        start = count = 0
        while start < self.geometry.slots:
            slots, start = self.of_shards(lost, start)
            count += len(slots)
            for number, slot in enumerate(slots, 1):
                self.clear(slot)
                if not number % CLEARS:
                    beat()
            beat()
        return count

    def _restore(self, slot: int, body: bytes) -> None:
        """Store a body in a slot under a fresh seq. It is idempotent, so it needs no undo record."""
        words = self._words
        at = slot * SLOT_WORDS
        odd = words[at] | 1
        words[at] = odd
        start = slot * SLOT_BYTES + 8
        self._slots[start : start + len(body)] = body
        words[at] = self._high | (odd + 1) & SEQ_MASK

    def release(self) -> None:
        """Drop every view, so that the segment can be unmapped."""
        del self._seqs, self._offsets, self._bodies, self._rows
        for view in (self._words, self._slots, self._undo_words, self._undo_image, self._buf):
            view.release()
        del self._find


assert _FREE_WAY[-1] == -1
