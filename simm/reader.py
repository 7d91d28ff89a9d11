"""The reader's side of an arena: find, copy, re-check. Used by clients and by stream processes.

``table.py`` explains the protocol. There is one validation routine: :meth:`ArenaReader.locate` takes
the entry's fields under the seqlock, :meth:`ArenaReader.confirm` says afterwards whether what was
copied in between is the value. Single gets, batches and TCP sends all stand on this pair.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .constants import SET_BYTES, SHARD_COUNT
from .errors import SegmentError
from .hashing import SHARD_BITS, SHARD_MASK, split
from .layout import HEADER_BYTES, SLOT_BODY, SLOT_WORDS, Geometry, State, Word
from .pages import populate_read
from .shards import FROZEN
from .shm import AttachedSegment

#: The protocol relies on x86's order of loads and stores; elsewhere clients use TCP.
ONE_SIDED: Final = platform.machine() in ("x86_64", "AMD64") and sys.byteorder == "little"

#: How often a reader starts over before it asks the worker.
ATTEMPTS: Final = 3
#: From this many keys on, numpy finds a batch's slots faster than one call a key (measured; see locate_many).
VECTOR_KEYS: Final = 16

_POPULATE_STEP_BYTES: Final = 64 << 20
_POPULATE_BYTES_MAX: Final = 64 << 30

_unpack_body = SLOT_BODY.unpack_from
_SET_WORDS: Final = SET_BYTES // 8
#: Of the first word of a set: the low words of its slots' digests.
_LOW_WORDS: Final = np.arange(1, _SET_WORDS, SLOT_WORDS, dtype=np.intp)
_FROZEN: Final = FROZEN


class Located(NamedTuple):
    """Where a value was at the time of reading ``seq``."""

    slot: int
    seq: int
    offset: int
    length: int
    crc: int
    flags: int


_located: Final = tuple.__new__


class Unsettled(Exception):
    """An entry changed at every attempt, or its slot stays odd: ask the worker."""


class ArenaReader:
    """Read-only view of an arena's table, and its data.

    Raises SegmentError when the segment is missing, foreign, closed or of another incarnation family.
    """

    def __init__(self, name: str, *, writable: bool = True) -> None:
        self.name = name
        self.segment = AttachedSegment.open(name, writable=writable)
        try:
            head = self.segment.map(0, HEADER_BYTES, writable=False)
            words = memoryview(head).cast("Q")
            geometry = Geometry.read(words, self.segment.size, name)
            self.geometry = geometry
            meta = self.segment.map(0, geometry.reader_bytes, writable=False)
            visited_bytes = geometry.ledger_offset - geometry.visited_offset
            visited = self.segment.map(geometry.visited_offset, visited_bytes, writable=writable)
            data = self.segment.map(geometry.data_offset, geometry.data_bytes, writable=writable)
        except BaseException:
            self.segment.close()
            raise
        words.release()
        self._populate: list[tuple[mmap.mmap, int]] = [(data, 0), (visited, 0), (meta, 0)]
        self._meta = memoryview(meta)
        #: All 64-bit words from the segment's start: header, shards, slots.
        self.words = self._meta.cast("Q")
        self.visited = memoryview(visited)
        self.data = memoryview(data)
        self.data_offset = geometry.data_offset
        self._find = meta.find
        self._slots_offset = geometry.slots_offset
        self._slot_word = geometry.slots_offset // 8
        self._shard_word = HEADER_BYTES // 8
        self._sets = geometry.sets
        self._writable = writable
        self.data_address = (
            ctypes.addressof(ctypes.c_char.from_buffer(data)) if writable else np.frombuffer(data, np.uint8).ctypes.data
        )
        #: All words of all slots, for batches.
        self._np_slots: NDArray[np.uint64] = np.frombuffer(
            self._meta, dtype=np.uint64, count=geometry.slots * SLOT_WORDS, offset=self._slots_offset
        )
        self._np_visited = np.frombuffer(self.visited, np.uint8) if writable else None
        # The descriptor goes now. The maps live as long as something refers to this object or to a view of it:
        # closing them by hand while another thread copies would be a segmentation fault.
        self.segment.close()
        if self.state == State.CLOSED:
            raise SegmentError(f"{name} is closed: its data server has gone")

    # -- state ------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """The STATE word."""
        word: int = self.words[Word.STATE]
        return word

    @property
    def heartbeat(self) -> int:
        """The worker's heartbeat counter."""
        word: int = self.words[Word.HEARTBEAT]
        return word

    @property
    def incarnation(self) -> int:
        word: int = self.words[Word.INCARNATION]
        return word

    def populate_some(self) -> bool:
        """Fault the next part of the maps in; False when all is done (or there is more than is worth it).

        The first touch of a page costs a fault, which halves the speed of a first copy. Done ahead, off the
        hot path, it costs 16 ms for 256 MiB; and 8 bytes of page table for each 4 KiB, hence the limit.
        """
        while self._populate:
            mapped, at = self._populate[-1]
            length = min(_POPULATE_STEP_BYTES, len(mapped) - at)
            if length <= 0 or at >= _POPULATE_BYTES_MAX:
                self._populate.pop()
                continue
            self._populate[-1] = (mapped, at + length)
            try:
                if not populate_read(mapped, at, length):
                    self._populate.clear()
            except SegmentError:
                self._populate.clear()  # the segment has been cut: whoever looks at its state word will know
            return True
        return False

    # -- the protocol -----------------------------------------------------------------------

    def locate(self, digest: bytes) -> Located | None:
        """Steps 1 to 3: the entry's fields, consistent; None for a miss. Raises Unsettled."""
        low, high = split(digest)
        sets = self._sets
        first = (low >> SHARD_BITS) % sets
        base = self._slots_offset
        find = self._find
        words = self.words
        for _ in range(ATTEMPTS):
            start = base + first * SET_BYTES
            at = find(digest, start, start + SET_BYTES)
            if at < 0 or (at - base) & 63 != 8:
                at = self._find_slow(digest, first, high % sets)
                if at < 0:
                    return None
            slot = (at - base) >> 6
            word = (at - 8) >> 3
            seq = words[word]
            if seq & 1:
                continue
            found, offset, length, crc, _chunk, _ns, flags, _stored, _ = _unpack_body(self._meta, at)
            if words[word] != seq:
                continue
            if found != digest:
                continue  # replaced between find and seq: look again
            return _located(Located, (slot, seq, offset, length, crc, flags))  # Located(...) takes 0.2 us more
        raise Unsettled

    def _find_slow(self, digest: bytes, first: int, second: int) -> int:
        """Position of the digest in either set, skipping matches that are no digests; -1 when there is none."""
        if second == first:
            second = (second + 1) % self._sets
        base = self._slots_offset
        for which in (first, second):
            start = base + which * SET_BYTES
            at = self._find(digest, start, start + SET_BYTES)
            while at >= 0:
                if (at - base) & 63 == 8:
                    return at
                at = self._find(digest, at + 1, start + SET_BYTES)
        return -1

    def confirm(self, digest: bytes, slot: int, seq: int) -> bool:
        """Steps 5 and 6: is what was copied since ``locate`` the value? The seq word is loaded last."""
        words = self.words
        owned = words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return words[self._slot_word + slot * SLOT_WORDS] == seq and 0 < owned < _FROZEN

    def confirm_previous(self, digest: bytes, slot: int, seq: int) -> bool:
        """:meth:`confirm` for who was sent here as to a previous owner: a frozen shard's values count too.

        Only the new owner can send somebody, and only for a key that was not mutated there (``shards.py``).
        """
        words = self.words
        kept = words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return words[self._slot_word + slot * SLOT_WORDS] == seq and kept != 0

    def shard_word(self, digest: bytes) -> int:
        """The word of the digest's shard: see ``shards.py``."""
        word: int = self.words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return word

    def owns(self, digest: bytes) -> bool:
        """Is the digest's shard this worker's?"""
        return 0 < self.words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)] < _FROZEN

    def touch(self, slot: int) -> None:
        """Mark an entry as used, for the eviction policy."""
        self.visited[slot] = 1

    def contains(self, digest: bytes) -> bool:
        """Is it stored here? A slot in the middle of an overwrite counts: its old or new value is there."""
        return self._contains(digest, _FROZEN)

    def contains_previous(self, digest: bytes) -> bool:
        """:meth:`contains` for who was sent here as to a previous owner."""
        return self._contains(digest, 1 << 64)

    def _contains(self, digest: bytes, below: int) -> bool:
        low, high = split(digest)
        first = (low >> SHARD_BITS) % self._sets
        base = self._slots_offset
        start = base + first * SET_BYTES
        at = self._find(digest, start, start + SET_BYTES)
        if at < 0 or (at - base) & 63 != 8:
            at = self._find_slow(digest, first, high % self._sets)
            if at < 0:
                return False
        if not 0 < self.words[self._shard_word + (low & SHARD_MASK)] < below:
            return False
        self.visited[(at - base) >> 6] = 1
        return True

    def _find_many(self, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Slots of digests given as columns of their two words, -1 for misses.

        Of the sixteen slots that a digest may have, one word each is gathered and compared, and then both words of
        the one that fits: 0.35 us a key in batches of 128 where half are missing; gathering both words of all of
        them took 0.9, as numpy has a fast way for plain ``take`` only.
        """
        sets = np.uint64(self._sets)
        first = (low >> np.uint64(SHARD_BITS)) % sets
        at, hits = self._find_in(first, low, high)
        missing = np.flatnonzero(~hits)
        if missing.size:
            low, high, first = low[missing], high[missing], first[missing]
            second = high % sets
            second = np.where(second == first, (second + np.uint64(1)) % sets, second)
            at[missing], hits[missing] = self._find_in(second, low, high)
        return np.where(hits, at // SLOT_WORDS, -1)

    def _find_in(
        self, sets: NDArray[np.uint64], low: NDArray[np.uint64], high: NDArray[np.uint64]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """For each digest the first word of the slot in its set whose low word fits, and whether both words do."""
        take = self._np_slots.take
        at = sets.astype(np.intp) * _SET_WORDS
        at += (take(at[:, None] + _LOW_WORDS) == low[:, None]).argmax(axis=1) * SLOT_WORDS
        return at, (take(at + 1) == low) & (take(at + 2) == high)

    def slots_of_many(self, digests: Sequence[bytes]) -> list[int]:
        """Slots of a batch, -1 for misses: candidates for :meth:`locate_at`, proven by nothing yet.

        0.4 us a key at 128 keys, where a call of :meth:`locate` costs 0.7 us.
        """
        digest_words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        result: list[int] = self._find_many(digest_words[:, 0], digest_words[:, 1]).tolist()
        return result

    def locate_at(self, digest: bytes, slot: int) -> Located | None:
        """:meth:`locate` with a slot from :meth:`slots_of_many`; falls back to a search when it moved on."""
        word = self._slot_word + slot * SLOT_WORDS
        words = self.words
        seq = words[word]
        if not seq & 1:
            found, offset, length, crc, _chunk, _ns, flags, _stored, _ = _unpack_body(self._meta, word * 8 + 8)
            if words[word] == seq and found == digest:
                return Located(slot, seq, offset, length, crc, flags)
        return self.locate(digest)

    def contains_many(self, digests: Sequence[bytes]) -> list[bool]:
        """:meth:`contains` for a batch."""
        if len(digests) < VECTOR_KEYS:
            return [self.contains(digest) for digest in digests]
        digest_words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        low = digest_words[:, 0]
        slots = self._find_many(low, digest_words[:, 1])
        shards = np.frombuffer(self._meta, np.uint64, SHARD_COUNT, HEADER_BYTES)
        words = shards.take((low & np.uint64(SHARD_MASK)).astype(np.intp))
        # 0 < word < FROZEN in one comparison, as 0 - 1 is the greatest word of all.
        hits = (slots >= 0) & (words - np.uint64(1) < np.uint64(FROZEN - 1))
        if self._np_visited is not None:
            self._np_visited[slots[hits]] = 1
        result: list[bool] = hits.tolist()
        return result

    def value(self, found: Located) -> memoryview:
        """The bytes of a located value, in place: they may change at any time until confirmed."""
        start = found.offset - self.data_offset
        return self.data[start : start + found.length]
