"""Read an arena without its worker: find, copy, check again. Clients and stream processes use it.

``table.py`` has the protocol. All reads use one pair of methods: :meth:`ArenaReader.locate` returns the entry's fields,
read under the seqlock, and :meth:`ArenaReader.confirm` then tells whether the bytes copied in between are the value.

A :class:`Lister` lists the values of frozen shards for a new owner's mover. It reads from maps that it cannot write, so
it costs the worker no time. It copies a page of slots in one piece: the seqs, whole slots, the seqs again (x86 keeps
that order). A slot whose seq was even and the same both times is listed as copied. Any other is left out: nothing is
stored in a frozen shard, so its entry was being dropped. A listed entry may be gone at once; its fetch then misses.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..constants import SET_BYTES, SHARD_COUNT, SLOT_BYTES
from ..errors import SegmentError
from ..host.pages import populate_read
from ..host.users import NOT_TRUSTED, trusts
from ..shm import AttachedSegment, data_name
from ..wire.messages import Listed, NamespaceName
from ..wire.shard_set import FROZEN, shards_in
from .hashing import SHARD_BITS, SHARD_MASK, split
from .layout import (
    ENTRY_BOUND,
    HEADER_BYTES,
    NAMESPACE_LINE_BYTES,
    SLOT_BODY,
    SLOT_FIELDS,
    SLOT_WORDS,
    Geometry,
    State,
    Word,
)
from .namespaces import line_of, name_bytes, names_line

#: The protocol relies on x86's order of loads and stores. On other machines clients use TCP.
ONE_SIDED: Final = platform.machine() in ("x86_64", "AMD64") and sys.byteorder == "little"

#: Attempts of a reader before it asks the worker.
ATTEMPTS: Final = 3
#: From this many keys on, numpy finds a batch's slots faster than one call per key.
VECTOR_KEYS: Final = 16

#: Slots in one page of a listing: 4 MiB.
PAGE_SLOTS: Final = 1 << 16
#: Most entries in one answer: half a frame.
ENTRIES_MAX: Final = 16_384

_POPULATE_STEP_BYTES: Final = 64 << 20
_POPULATE_BYTES_MAX: Final = 64 << 30

_unpack_body = SLOT_BODY.unpack_from
_SET_WORDS: Final = SET_BYTES // 8
#: Positions in a set of the low words of its slots' digests.
_LOW_WORDS: Final = np.arange(1, _SET_WORDS, SLOT_WORDS, dtype=np.intp)


class Located(NamedTuple):
    """The place of a value when ``seq`` was read."""

    slot: int
    seq: int
    offset: int
    length: int
    crc: int
    flags: int


_located: Final = tuple.__new__
#: All cluster ids.
_ALL: Final = range(1 << 64)


class Unsettled(Exception):
    """An entry changed at every attempt, its slot stays odd, or it names no place in the data: ask the worker."""


class ArenaReader:
    """An arena's table, read-only, and its data and visited bytes.

    ``data_fd``: the data's file, as the worker passes it; the reader does not close it. Without one the file is opened
    by its name, which the owner's processes can. ``trusted``: users besides this process's own and root whose files are
    mapped. The owner of a file can truncate it, and an access to a map beyond its end is a SIGBUS.

    Raise SegmentError if a file is missing, foreign, closed, or has another layout or size.
    """

    def __init__(
        self, name: str, *, cluster: int = 0, data_fd: int | None = None, trusted: Container[int] = ()
    ) -> None:
        self.name = name
        #: Cluster ids that the header may have. An arena has 0 before its first map.
        self._clusters: Container[int] = frozenset((0, cluster)) if cluster else _ALL
        with contextlib.ExitStack() as files:
            metadata = files.enter_context(AttachedSegment.open(name))
            if data_fd is None:
                shared = AttachedSegment.open(data_name(name), writable=True)
            else:
                shared = AttachedSegment.from_fd(data_name(name), data_fd)
            files.enter_context(shared)
            if shared.owner_uid != metadata.owner_uid:
                raise SegmentError(f"{name} and its data belong to different users")
            if not trusts(metadata.owner_uid, trusted):
                raise SegmentError(f"{name} belongs to uid {metadata.owner_uid}, {NOT_TRUSTED}")
            head = metadata.map(0, HEADER_BYTES, writable=False)
            words = memoryview(head).cast("Q")
            geometry = Geometry.read(words, metadata.size + shared.size, name)
            if metadata.size != geometry.meta_bytes:
                raise SegmentError(f"{name} has {metadata.size} bytes of metadata, and its header says otherwise")
            self.geometry = geometry
            meta = metadata.map(0, geometry.names_end, writable=False)
            data = shared.map(0, geometry.data_bytes, writable=True)
            visited = shared.map(geometry.data_bytes, geometry.data_file_bytes - geometry.data_bytes, writable=True)
            files.pop_all()
        words.release()
        self._populate: list[tuple[mmap.mmap, int]] = [(data, 0), (visited, 0), (meta, 0)]
        self._meta = memoryview(meta)
        #: All 64-bit words from the arena's start: header, shards, slots, namespaces.
        self.words = self._meta.cast("Q")
        self.visited = memoryview(visited)
        self.data = memoryview(data)
        #: Where the data begins and ends in the arena.
        self.data_offset = geometry.data_offset
        self.data_end = geometry.data_end
        self._find = meta.find
        self._slots_offset = geometry.slots_offset
        self._slot_word = geometry.slots_offset // 8
        self._shard_word = HEADER_BYTES // 8
        self._name_word = geometry.names_offset // 8
        self._sets = geometry.sets
        #: The id of its user's namespace; -1 if it has none.
        self.namespace = -1
        self.data_address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        #: All words of all slots, for batches.
        self._np_slots: NDArray[np.uint64] = np.frombuffer(
            self._meta, dtype=np.uint64, count=geometry.slots * SLOT_WORDS, offset=self._slots_offset
        )
        self._np_visited = np.frombuffer(self.visited, np.uint8)
        # Close the descriptors only. The maps live as long as this object or a view of it: unmapping them while another
        # thread copies would be a segmentation fault.
        metadata.close()
        shared.close()
        if self.state == State.CLOSED:
            raise SegmentError(f"{name} is closed: its data server has stopped")

    # -- state ------------------------------------------------------------------------------

    @property
    def state(self) -> int:
        """Return the STATE word."""
        word: int = self.words[Word.STATE]
        return word

    @property
    def of_cluster(self) -> bool:
        """Return True if the arena has the cluster whose map led here, or none yet.

        Read after an entry was found: the worker stores a new cluster's id before any of its entries.
        """
        return self.words[Word.CLUSTER] in self._clusters

    @property
    def cluster(self) -> int:
        """Return the cluster of the entries, 0 before the first map."""
        word: int = self.words[Word.CLUSTER]
        return word

    @property
    def heartbeat(self) -> int:
        """Return the worker's heartbeat counter."""
        word: int = self.words[Word.HEARTBEAT]
        return word

    @property
    def incarnation(self) -> int:
        word: int = self.words[Word.INCARNATION]
        return word

    def populate_some(self) -> bool:
        """Fault in the next part of the maps. Return False when done, or at the limit.

        The first touch of a page costs a fault, which halves the speed of a first copy. The limit bounds the page
        tables: 8 bytes per 4 KiB.
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
                self._populate.clear()  # the segment was truncated; readers of its state word notice
            return True
        return False

    # -- the protocol -----------------------------------------------------------------------

    def locate(self, digest: bytes) -> Located | None:
        """Do steps 1 to 3: return the entry's fields, consistent; None for a miss. Raise Unsettled."""
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
            if found != digest or not self.data_offset <= offset <= self.data_end - length:
                continue  # replaced between find and seq; or no value, as after a stray write: the worker decides
            return _located(Located, (slot, seq, offset, length, crc, flags))  # half the time of Located(...)
        raise Unsettled

    def _find_slow(self, digest: bytes, first: int, second: int) -> int:
        """Return the position of the digest in either set, -1 for none. Skip matches at other positions of a slot."""
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
        """Do steps 5 and 6: return True if the bytes copied since ``locate`` are the value.

        The seq word is loaded after the shard word. The cluster may be loaded at any time after the entry was found.
        """
        words = self.words
        owned = words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return (
            words[self._slot_word + slot * SLOT_WORDS] == seq
            and 0 < owned < FROZEN
            and words[Word.CLUSTER] in self._clusters
        )

    def confirm_previous(self, digest: bytes, slot: int, seq: int) -> bool:
        """Do :meth:`confirm` for a caller that a new owner sent here: values of a frozen shard count too.

        The new owner does so only for a key that was not mutated there (``arena/shard_words.py``).
        """
        words = self.words
        kept = words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return words[self._slot_word + slot * SLOT_WORDS] == seq and kept != 0 and words[Word.CLUSTER] in self._clusters

    def shard_word(self, digest: bytes) -> int:
        """Return the word of the digest's shard: see ``arena/shard_words.py``."""
        word: int = self.words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return word

    def namespace_of(self, slot: int) -> int:
        """Return the namespace id in a slot. It is the entry's if its seq is the same before and after."""
        number: int = _unpack_body(self._meta, (self._slot_word + slot * SLOT_WORDS) * 8 + 8)[5]
        return number

    def has_namespace(self, number: int) -> bool:
        """Return True if the worker still has a namespace of this number (``arena/namespaces.py``)."""
        return names_line(number, self.words[self._name_word + line_of(number) * NAMESPACE_LINE_BYTES // 8])

    def namespace_name(self, number: int) -> str | None:
        """Return the name of a namespace, None for an unknown one. The worker may change the line at any time."""
        at = self._name_word + line_of(number) * NAMESPACE_LINE_BYTES // 8
        word = self.words[at]
        if not names_line(number, word):
            return None
        raw = bytes(self._meta[at * 8 + 8 : at * 8 + 8 + name_bytes(word)])
        return raw.decode(errors="replace") if self.words[at] == word else None

    def is_own(self, found: Located) -> bool:
        """Return False for an entry that a client bound to another namespace has stored (``ENTRY_BOUND``).

        It may have stored it under any digest. Call it after :meth:`confirm`.
        """
        if not found.flags & ENTRY_BOUND:
            return True
        own = self.namespace_of(found.slot) == self.namespace
        return own and self.words[self._slot_word + found.slot * SLOT_WORDS] == found.seq

    def touch(self, slot: int) -> None:
        """Mark an entry as used for the eviction policy."""
        self.visited[slot] = 1

    def contains(self, digest: bytes) -> bool:
        """Return True if the digest is stored. A slot in an overwrite counts: its old or new value is there."""
        return self._contains(digest, FROZEN)

    def contains_previous(self, digest: bytes) -> bool:
        """Do :meth:`contains` for a caller that a new owner sent here."""
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
        if not 0 < self.words[self._shard_word + (low & SHARD_MASK)] < below or not self.of_cluster:
            return False
        self.visited[(at - base) >> 6] = 1
        return True

    def _find_many(self, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the slots of digests given as columns of their two words, -1 for misses.

        Of a digest's sixteen possible slots, one word each is gathered and compared, then both words of the one that
        fits. Gathering both words of all slots takes more than twice as long, as only plain ``take`` is fast in numpy.
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
        """Return, per digest, the first word of the slot in its set whose low word fits, and whether both words fit."""
        take = self._np_slots.take
        at = sets.astype(np.intp) * _SET_WORDS
        at += (take(at[:, None] + _LOW_WORDS) == low[:, None]).argmax(axis=1) * SLOT_WORDS
        return at, (take(at + 1) == low) & (take(at + 2) == high)

    def slots_of_many(self, digests: Sequence[bytes]) -> list[int]:
        """Return the slots of a batch, -1 for misses: unchecked candidates for :meth:`locate_at`."""
        digest_words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        result: list[int] = self._find_many(digest_words[:, 0], digest_words[:, 1]).tolist()
        return result

    def locate_at(self, digest: bytes, slot: int) -> Located | None:
        """Do :meth:`locate` with a slot from :meth:`slots_of_many`. Search if the slot has changed."""
        word = self._slot_word + slot * SLOT_WORDS
        words = self.words
        seq = words[word]
        if not seq & 1:
            found, offset, length, crc, _chunk, _ns, flags, _stored, _ = _unpack_body(self._meta, word * 8 + 8)
            inside = self.data_offset <= offset <= self.data_end - length
            if words[word] == seq and found == digest and inside:
                return Located(slot, seq, offset, length, crc, flags)
        return self.locate(digest)

    def contains_many(self, digests: Sequence[bytes]) -> list[bool]:
        """Do :meth:`contains` for a batch."""
        if len(digests) < VECTOR_KEYS:
            return [self.contains(digest) for digest in digests]
        digest_words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        low = digest_words[:, 0]
        slots = self._find_many(low, digest_words[:, 1])
        shards = np.frombuffer(self._meta, np.uint64, SHARD_COUNT, HEADER_BYTES)
        words = shards.take((low & np.uint64(SHARD_MASK)).astype(np.intp))
        # 0 < word < FROZEN in one comparison, as 0 - 1 wraps to the greatest word.
        hits = (slots >= 0) & (words - np.uint64(1) < np.uint64(FROZEN - 1))
        if not self.of_cluster:
            hits[:] = False
        self._np_visited[slots[hits]] = 1
        result: list[bool] = hits.tolist()
        return result

    def value(self, found: Located) -> memoryview:
        """Return the bytes of a located value in place. They may change until confirmed."""
        start = found.offset - self.data_offset
        return self.data[start : start + found.length]


class Lister:
    """Lists the values of given shards in one arena."""

    def __init__(self, reader: ArenaReader) -> None:
        self.reader = reader
        #: A number never gets another name.
        self._names: dict[int, str] = {}

    def page(self, shards: bytes, cursor: int, most: int) -> Listed:
        """Return at most ``most`` values of the frozen ones among ``shards``, in slots from ``cursor`` on.

        The answer's cursor is where to continue, 0 at the end. Raise UsageError if ``shards`` is no bitmap.
        O(PAGE_SLOTS).
        """
        reader = self.reader
        slots = reader.geometry.slots
        stop = min(cursor + PAGE_SLOTS, slots)
        if cursor >= stop:
            return Listed(0, [], [])
        most = max(1, min(most, ENTRIES_MAX))
        asked = np.zeros(SHARD_COUNT, np.bool_)
        asked[shards_in(shards)] = True
        asked &= np.frombuffer(reader.words, np.uint64, SHARD_COUNT, HEADER_BYTES) >= np.uint64(FROZEN)
        rows = self._at_rest(cursor, stop)
        found = np.flatnonzero((rows["offset"] != 0) & asked[(rows["low"] & np.uint64(SHARD_MASK)).astype(np.intp)])
        if len(found) > most:
            stop = cursor + int(found[most])
            found = found[:most]
        rows = rows[found]
        digests = np.stack((rows["low"], rows["high"]), axis=1).tobytes()
        names = self.names(np.unique(rows["namespace"]).tolist())
        entries = [
            (digests[at * 16 : at * 16 + 16], length, flags, namespace)
            for at, (length, flags, namespace) in enumerate(
                zip(rows["length"].tolist(), rows["flags"].tolist(), rows["namespace"].tolist())
            )
            if namespace in names
        ]
        return Listed(stop if stop < slots else 0, entries, [NamespaceName(*item) for item in names.items()])

    def _at_rest(self, start: int, stop: int) -> NDArray[np.void]:
        """Return copies of the slots from ``start`` to before ``stop``. A slot in a write is all zeros."""
        reader = self.reader
        live = np.frombuffer(reader.words, SLOT_FIELDS, stop - start, reader.geometry.slots_offset + start * SLOT_BYTES)
        before = live["seq"].copy()
        rows: NDArray[np.void] = live.copy()
        after = live["seq"].copy()
        rows[(before != after) | (before & np.uint64(1) != 0)] = np.zeros(1, SLOT_FIELDS)
        return rows

    def names(self, numbers: list[int]) -> Mapping[int, str]:
        """Return the names of these namespace ids, without unknown ones."""
        for number in numbers:
            if number not in self._names and (name := self.reader.namespace_name(number)) is not None:
                self._names[number] = name
        return {number: self._names[number] for number in numbers if number in self._names}
