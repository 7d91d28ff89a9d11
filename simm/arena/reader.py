"""Read an arena without its worker: find, copy, check again. Clients and stream processes use it.

``table.py`` has the protocol. All reads use one pair of methods: :meth:`ArenaReader.locate` returns the entry's fields,
read under the seqlock, and :meth:`ArenaReader.confirm` then tells whether the bytes copied in between are the value.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..constants import COUNT_WORDS, KEEP_SHARES, READ_ATTEMPTS, SET_BYTES, SHARD_COUNT, SLOT_BYTES
from ..errors import SegmentError
from ..host.count_log import CallLogs
from ..host.pages import populate_read
from ..host.processes import boottime_ns
from ..host.users import NOT_TRUSTED, trusts
from ..shm import AttachedSegment, data_name
from ..wire.shard_set import FROZEN
from .hashing import SHARD_BITS, SHARD_MASK, find_slots, low_words, split, words_of
from .layout import (
    ENTRY_BOUND,
    ENTRY_CRC,
    ENTRY_EPOCH,
    EPOCH_WORD,
    FLAGS_WORD,
    HEADER_BYTES,
    LEASE_WORD,
    NAMESPACE_LINE_BYTES,
    NAMESPACES,
    NONE_BOUND,
    SHARDS_BYTES,
    SLOT_BODY,
    SLOT_WORDS,
    Geometry,
    State,
    Word,
    laid_out,
)
from .lookups.bound import doubtful, is_unbound
from .namespaces import line_of, name_bytes, names_line

#: The protocol relies on x86's order of loads and stores. On other machines clients use TCP.
ONE_SIDED: Final = platform.machine() in ("x86_64", "AMD64") and sys.byteorder == "little"

#: To count attempts with: making a range takes four times as long as going over this one.
EACH_ATTEMPT: Final = tuple(range(READ_ATTEMPTS))
#: From this many keys on, numpy finds a batch's slots faster than one call per key.
VECTOR_KEYS: Final = 16
#: And than one loop over them, which only asks whether they are there.
EACH_KEYS: Final = 40
#: From this many on, it copies them by column faster than one after the other.
COLUMN_KEYS: Final = 24

_POPULATE_STEP_BYTES: Final = 64 << 20
_POPULATE_BYTES_MAX: Final = 64 << 30

_unpack_body = SLOT_BODY.unpack_from
#: What a look for a value needs of a slot, its seq first: fields are loaded in this order, one after the other.
_SEEN: Final = struct.Struct("@Q16sQII6xH16x")
assert _SEEN.size == SLOT_BYTES
_unpack_seen = _SEEN.unpack_from
#: The word of a slot that has the length in its lower half.
_LENGTH_WORD: Final = 4
_OFFSET_WORD: Final = 3
_LENGTH_BITS: Final = np.uint64(0xFFFF_FFFF)
#: What the word with the flags is below without others than ENTRY_CRC.
_FLAGS_ABOVE: Final = np.uint64((ENTRY_CRC + 1) << 48)
_CLUSTER: Final = Word.CLUSTER
_BOUND: Final = Word.BOUND
_EVEN: Final = np.uint64(~1 & (1 << 64) - 1)
#: The bits of a position within a slot, and where its digest is.
_IN_SLOT: Final = SLOT_BYTES - 1
_DIGEST_AT: Final = 8
Own = Callable[[bytes], bool] | None
assert ENTRY_CRC == 1 and not SLOT_BYTES & _IN_SLOT and not (HEADER_BYTES + SHARDS_BYTES) & _IN_SLOT


class Located(NamedTuple):
    """The place of a value when ``seq`` was read."""

    slot: int
    seq: int
    offset: int
    length: int
    crc: int
    flags: int


class LocatedMany(NamedTuple):
    """The places of a batch's values when their seqs were read, a column each."""

    #: And where the slots' seqs are among the words of all slots.
    slots: NDArray[np.intp]
    at: NDArray[np.intp]
    seqs: NDArray[np.uint64]
    #: False for a key whose place is not known: it is absent, changes, has no value, or is not for everybody.
    settled: NDArray[np.bool_]
    #: From the beginning of the data, of settled keys only; and bytes, 0 of the others.
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    #: The lower halves of the digests.
    low: NDArray[np.intp]

    def head(self, count: int) -> LocatedMany:
        """Return the first ``count`` keys'."""
        slots, at, seqs, settled, starts, lengths, low = self
        return LocatedMany(
            slots[:count], at[:count], seqs[:count], settled[:count], starts[:count], lengths[:count], low[:count]
        )


_located: Final = tuple.__new__
#: All cluster ids.
_ALL: Final = range(1 << 64)


class Unsettled(Exception):
    """An entry changed at every attempt, its slot stays odd, or it names no place in the data: ask the worker."""


class ArenaReader(CallLogs):
    """An arena's table, read-only, and its data and visited bytes.

    ``data_fd``: the data's file, as the worker passes it; the reader does not close it. Without one the file is opened
    by its name, which the owner's processes can. ``trusted``: users besides this process's own and root whose files are
    mapped. The owner of a file can truncate it, and an access to a map beyond its end is a SIGBUS.

    Raise SegmentError if a file is missing, foreign, closed, or has another layout or size.
    """

    #: Returns CLOCK_BOOTTIME in ns, by which leases end.
    clock: Callable[[], int] = staticmethod(boottime_ns)

    def __init__(
        self, name: str, *, cluster: int = 0, data_fd: int | None = None, trusted: Container[int] = ()
    ) -> None:
        self.name = name
        #: Cluster ids that the header may have. An arena has 0 before its first map.
        self._clusters: Container[int] = frozenset((0, cluster)) if cluster else _ALL
        #: The one that it nearly always has: comparing takes less time than looking into a set.
        self._cluster = cluster
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
            geometry = Geometry.read(words, laid_out(metadata.size + shared.size), name)
            if metadata.size != geometry.meta_bytes:
                raise SegmentError(f"{name} has {metadata.size} bytes of metadata, and its header says otherwise")
            self.geometry = geometry
            meta = metadata.map(0, geometry.names_end, writable=False)
            data = shared.map(0, geometry.data_bytes, writable=True)
            visited = shared.map(geometry.data_bytes, shared.size - geometry.data_bytes, writable=True)
            files.pop_all()
        words.release()
        #: Which files it maps.
        self.files = metadata.file, shared.file
        self._populate: list[tuple[mmap.mmap, int]] = [(data, 0), (visited, 0), (meta, 0)]
        self._meta = memoryview(meta)
        #: All 64-bit words from the arena's start: header, shards, slots, namespaces.
        self.words = self._meta.cast("Q")
        # The last one for slot -1 too, as where the table's words are looked at. Behind it lies the arena's stamp.
        self.visited = memoryview(visited)[: geometry.slots]
        self.data = memoryview(data)
        #: Where the data begins and ends in the arena.
        self.data_offset = geometry.data_offset
        self.data_end = geometry.data_end
        self._find = meta.find
        self._slots_offset = geometry.slots_offset
        self._slot_word = geometry.slots_offset // 8
        self._shard_word = HEADER_BYTES // 8
        self._sets = geometry.sets
        #: The id of its user's namespace, and the NUMA node of its memory; -1 if it has none, or it is not known.
        self.namespace = self.node = -1
        self.count_in(memoryview(bytearray(COUNT_WORDS * 8)).cast("Q"))
        self.data_address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        #: All words of all slots, for batches.
        self._np_slots: NDArray[np.uint64] = np.frombuffer(
            self._meta, dtype=np.uint64, count=geometry.slots * SLOT_WORDS, offset=self._slots_offset
        )
        self._np_rows = self._np_slots.reshape(-1, SLOT_WORDS)
        self._np_shards: NDArray[np.uint64] = np.frombuffer(self._meta, np.uint64, SHARD_COUNT, HEADER_BYTES)
        #: Lower halves of the slots' words, visited bytes, and namespaces. In one: an object of more than 30 attributes
        #: has each of them more slowly.
        self._np_more: tuple[NDArray[np.uint64], NDArray[np.uint8], NDArray[np.uint64]] = (
            low_words(self._np_slots), np.frombuffer(self.visited, np.uint8),
            np.frombuffer(self._meta, np.uint64, NAMESPACES * NAMESPACE_LINE_BYTES // 8, geometry.names_offset),
        )  # fmt: skip
        #: Number of sets, and the addresses of slots, shard words and visited bytes, for searches of several arenas.
        self.place = (
            geometry.sets, _address(self._np_slots), _address(self._np_slots) - self._slots_offset + HEADER_BYTES,
            _address(self._np_more[1]),
        )  # fmt: skip
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
    def near_max(self) -> int:
        """Return how many bytes near copies may take."""
        said: int = self.words[Word.NEAR_SHARE]
        return self.geometry.data_bytes * (said - 1 if said else KEEP_SHARES[2]) // 100

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
        for _ in EACH_ATTEMPT:
            start = base + first * SET_BYTES
            at = find(digest, start, start + SET_BYTES)
            if at & _IN_SLOT != _DIGEST_AT:  # as is -1, for none
                at = self._find_slow(digest, at, first, high % sets)
                if at < 0:
                    return None
            seq, found, offset, length, crc, flags = _unpack_seen(self._meta, at - _DIGEST_AT)
            if seq & 1 or words[(at - _DIGEST_AT) >> 3] != seq:
                continue
            if found != digest or not self.data_offset <= offset <= self.data_end - length:
                continue  # replaced between find and seq; or no value, as after a stray write: the worker decides
            # Half the time of Located(...).
            return _located(Located, ((at - base) >> 6, seq, offset, length, crc, flags))
        raise Unsettled

    def _find_slow(self, digest: bytes, at: int, first: int, second: int) -> int:
        """Return the position of the digest in either set, -1 for none. Skip matches at other positions of a slot.

        ``at``: the first match in the first set.
        """
        if second == first:
            second = (second + 1) % self._sets
        start = self._slots_offset + first * SET_BYTES
        while at >= 0:
            if at & _IN_SLOT == _DIGEST_AT:
                return at
            at = self._find(digest, at + 1, start + SET_BYTES)
        start = self._slots_offset + second * SET_BYTES
        at = self._find(digest, start, start + SET_BYTES)
        while at >= 0 and at & _IN_SLOT != _DIGEST_AT:
            at = self._find(digest, at + 1, start + SET_BYTES)
        return at

    def confirm(self, digest: bytes, slot: int, seq: int) -> bool:
        """Do steps 5 and 6: return True if the bytes copied since ``locate`` are the value.

        The seq word is loaded after the shard word. The cluster may be loaded at any time after the entry was found.
        """
        words = self.words
        owned = words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return (
            words[self._slot_word + slot * SLOT_WORDS] == seq
            and 0 < owned < FROZEN
            and (words[_CLUSTER] == self._cluster or self.of_cluster)
        )

    def confirm_previous(self, digest: bytes, slot: int, seq: int) -> bool:
        """Do :meth:`confirm` for a caller that a new owner sent here: values of a frozen shard count too.

        The new owner does so only for a key that was not mutated there (``arena/shard_words.py``).
        """
        words = self.words
        kept = words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return words[self._slot_word + slot * SLOT_WORDS] == seq and kept != 0 and self.of_cluster

    def shard_word(self, digest: bytes) -> int:
        """Return the word of the digest's shard: see ``arena/shard_words.py``."""
        word: int = self.words[self._shard_word + ((digest[0] | digest[1] << 8) & SHARD_MASK)]
        return word

    def namespace_of(self, slot: int) -> int:
        """Return the namespace id in a slot. It is the entry's if its seq is the same before and after."""
        number: int = _unpack_body(self._meta, (self._slot_word + slot * SLOT_WORDS) * 8 + 8)[5]
        return number

    def holds(self, found: Located) -> bool:
        """Return True if an entry is unchanged where it was found, so that what was read of its slot since is its."""
        seq: int = self.words[self._slot_word + found.slot * SLOT_WORDS]
        return seq == found.seq

    def _line_word(self, number: int) -> int:
        return self.geometry.names_offset // 8 + line_of(number) * NAMESPACE_LINE_BYTES // 8

    def has_namespace(self, number: int) -> bool:
        """Return True if the worker still has a namespace of this number (``arena/namespaces.py``)."""
        return names_line(number, self.words[self._line_word(number)])

    def namespace_name(self, number: int) -> str | None:
        """Return the name of a namespace, None for an unknown one. The worker may change the line at any time."""
        at = self._line_word(number)
        word = self.words[at]
        if not names_line(number, word):
            return None
        raw = bytes(self._meta[at * 8 + 8 : at * 8 + 8 + name_bytes(word)])
        return raw.decode(errors="replace") if self.words[at] == word else None

    def is_own(self, found: Located) -> bool:
        """Return False for an entry that a client bound to another namespace has stored (``ENTRY_BOUND``).

        It may have stored it under any digest. Return False for one of an old epoch, too. Call it after
        :meth:`confirm`.
        """
        if not found.flags & (ENTRY_BOUND | ENTRY_EPOCH):
            return True
        own = not found.flags & ENTRY_BOUND or self.namespace_of(found.slot) == self.namespace
        return own and self.is_current(found) and self.holds(found)

    def is_current(self, found: Located) -> bool:
        """Return False for an entry of an old epoch, or if the lease has ended (``cluster/epochs.py`` says why so).

        Call it after the value was copied. One that has changed by then is of no epoch.
        """
        if not found.flags & ENTRY_EPOCH:
            return True
        words = self.words
        number = self.namespace_of(found.slot)
        line = self._line_word(number)
        until = words[line + LEASE_WORD]
        if self.clock() >= until:
            return False
        tag = words[self._slot_word + found.slot * SLOT_WORDS + 2] >> 32
        return words[line + EPOCH_WORD] & 0xFFFF_FFFF == tag and names_line(number, words[line]) and self.holds(found)

    @property
    def has_epochs(self) -> bool:
        """Return True if a namespace of this arena has epochs, or had."""
        return bool(self._np_more[2][EPOCH_WORD :: NAMESPACE_LINE_BYTES // 8].any())

    def current_many(self, digests: Sequence[bytes], own: Own = None) -> list[bool]:
        """Do :meth:`contains_many` without entries of old epochs."""
        if not (digests and self.has_epochs):
            return self.contains_many(digests, own)
        # The flags come first: an entry that has gone by the second look-up is not found at all.
        flags = self._np_slots.take((slots := self.candidates(digests)[1]) * SLOT_WORDS + FLAGS_WORD)
        hits = self.contains_many(digests, own)
        for at in np.flatnonzero((flags & np.uint64(ENTRY_EPOCH << 48) != 0) | (slots < 0)).tolist():
            hits[at] = hits[at] and self.has_current(digests[at])
        return hits

    def has_current(self, digest: bytes) -> bool:
        """Return True if the digest is in the table, and its entry not of an old epoch."""
        with contextlib.suppress(Unsettled):
            return (found := self.locate(digest)) is not None and self.is_current(found) and self.holds(found)
        return False

    def has_own(self, digest: bytes) -> bool:
        """Return True if the digest is in the table, and a get would believe its entry (:meth:`is_own`)."""
        with contextlib.suppress(Unsettled):
            return (found := self.locate(digest)) is not None and self.is_own(found)
        return False

    def touch(self, slot: int) -> None:
        """Mark an entry as used for the eviction policy."""
        self.visited[slot] = 1

    def contains_previous(self, digest: bytes) -> bool:
        """Do :meth:`contains` for a caller that a new owner sent here."""
        return self.contains(digest, 1 << 64)

    def contains(self, digest: bytes, below: int = FROZEN) -> bool:
        """Return True if the digest is stored. A slot in an overwrite counts: its old or new value is there.

        ``below``: what the shard's word must be less than. An entry that no get believes does not count: nobody who
        found it would put the key. So where there may be such ones, one in an overwrite that lasts does not either.
        """
        low, high = split(digest)
        first = (low >> SHARD_BITS) % self._sets
        start = self._slots_offset + first * SET_BYTES
        at = self._find(digest, start, start + SET_BYTES)
        if at & _IN_SLOT != _DIGEST_AT:
            at = self._find_slow(digest, at, first, high % self._sets)
            if at < 0:
                return False
        words = self.words
        if 0 < words[self._shard_word + (low & SHARD_MASK)] < below and (
            words[_CLUSTER] == self._cluster or self.of_cluster
        ) and (
            words[_BOUND] == NONE_BOUND
            or is_unbound(self._meta, words, at - _DIGEST_AT, digest)
            or self.has_own(digest)
        ):  # fmt: skip
            self.visited[(at - self._slots_offset) >> 6] = 1
            return True
        return False

    def candidates(self, digests: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
        """Return the words of a batch's digests, two each, and its slots, -1 for misses; unchecked."""
        keys = words_of(digests)
        low, high = keys[:, 0], keys[:, 1]
        return keys, find_slots(self._np_slots, np.intp(0), np.uint64(self._sets), low, high, self._np_more[0])

    def slots_of_many(self, digests: Sequence[bytes]) -> list[int]:
        """Return the slots of a batch, -1 for misses: unchecked."""
        result: list[int] = self.candidates(digests)[1].tolist()
        return result

    def lengths_of_many(self, digests: Sequence[bytes]) -> list[int]:
        """Return the lengths of a batch's values, 0 for misses. An entry that changes meanwhile may have any length."""
        _, slots = self.candidates(digests)
        words = self._np_slots.take(np.maximum(slots, 0) * SLOT_WORDS + _LENGTH_WORD) & np.uint64(0xFFFF_FFFF)
        result: list[int] = np.where(slots < 0, 0, words).tolist()
        return result

    def locate_many(self, keys: NDArray[np.uint64], slots: NDArray[np.intp]) -> LocatedMany:
        """Do :meth:`locate` for a batch, by column, without searching again for what has changed.

        ``keys`` and ``slots`` are of :meth:`candidates`. The steps are those of one key, each done for all of them: the
        seqs (step 1), whole slots (2), the seqs again (3). x86 keeps the order of these loads, as in
        ``ipc/arena_lister.py``. So each slot whose seq is even and the same both times was copied as it was, and step 6
        compares with that seq.
        """
        words = self._np_slots
        # Of a miss -8 and the table's last slot, which is another key's, or this one's by now.
        at = slots * SLOT_WORDS
        seqs = words.take(at)
        rows = self._np_rows.take(slots, axis=0)
        again = words.take(at)
        offsets = rows[:, _OFFSET_WORD].view(np.int64)
        lengths = (rows[:, _LENGTH_WORD] & _LENGTH_BITS).view(np.int64)
        # An odd seq less one was there before it, and is never there again.
        settled = again == seqs & _EVEN
        settled &= rows[:, 1] == keys[:, 0]
        settled &= rows[:, 2] == keys[:, 1]
        settled &= offsets >= self.data_offset
        settled &= offsets <= self.data_end - lengths
        settled &= rows[:, FLAGS_WORD] < _FLAGS_ABOVE
        lengths *= settled
        return LocatedMany(slots, at, seqs, settled, offsets - self.data_offset, lengths, keys[:, 0].view(np.intp))

    def confirm_many(self, found: LocatedMany, *, touch: bool = True) -> NDArray[np.bool_]:
        """Do :meth:`confirm` once for all values of a batch that were copied: steps 5 and 6. Mark those as used.

        All shard words are loaded before the first seq.
        """
        owned = self._np_shards.take(found.low & SHARD_MASK)
        kept: NDArray[np.bool_] = self._np_slots.take(found.at) == found.seqs
        kept &= found.settled
        # 0 < word < FROZEN in one comparison, as 0 - 1 wraps to the greatest word.
        kept &= owned - np.uint64(1) < np.uint64(FROZEN - 1)
        if not self.of_cluster:
            kept[:] = False
        if touch:
            self._np_more[1][found.slots[kept]] = 1
        return kept

    def contains_many(self, digests: Sequence[bytes], own: Own = None) -> list[bool]:
        """Do :meth:`contains` for a batch. ``own``: asked in place of :meth:`has_own` about doubtful entries."""
        if len(digests) < EACH_KEYS:
            return self._contains_each(digests, own or self.has_own)
        hits: list[bool] = self.contain(digests, own)[0].tolist()
        return hits

    def contain(self, digests: Sequence[bytes], own: Own = None) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        """Do :meth:`contains_many` by column; return with it the words of the digests' shards. O(digests)."""
        keys, slots = self.candidates(digests)
        words = self._np_shards.take(keys[:, 0].view(np.intp) & SHARD_MASK)
        hits = (slots >= 0) & (words - np.uint64(1) < np.uint64(FROZEN - 1))
        hits &= self.of_cluster
        if self.words[_BOUND] != NONE_BOUND:  # after the entries were found
            for at in doubtful(hits, self._np_slots, slots * SLOT_WORDS, keys[:, 0], keys[:, 1]):
                hits[at] = (own or self.has_own)(digests[at])
        self._np_more[1][slots.compress(hits)] = 1
        return hits, words

    def _contains_each(self, digests: Sequence[bytes], own: Callable[[bytes], bool]) -> list[bool]:
        """Do :meth:`contains_many`, a key at a time, without what is the same for all of them."""
        find, base, sets, meta = self._find, self._slots_offset, self._sets, self._meta
        words, visited, shard_word = self.words, self.visited, self._shard_word
        hits, slots = [], []
        for digest, low in zip(digests, memoryview(b"".join(digests)).cast("Q").tolist()[::2]):
            start = base + (low >> SHARD_BITS) % sets * SET_BYTES
            at = find(digest, start, start + SET_BYTES)
            if at & _IN_SLOT != _DIGEST_AT:
                at = self._find_slow(digest, at, (low >> SHARD_BITS) % sets, split(digest)[1] % sets)
            if at >= 0 and 0 < words[shard_word + (low & SHARD_MASK)] < FROZEN and (
                words[_BOUND] == NONE_BOUND or is_unbound(meta, words, at - _DIGEST_AT, digest) or own(digest)
            ):  # fmt: skip
                slots.append((at - base) >> 6)
                hits.append(True)
            else:
                hits.append(False)
        if not self.of_cluster:
            return [False] * len(hits)
        for slot in slots:
            visited[slot] = 1
        return hits

    def value(self, found: Located) -> memoryview:
        """Return the bytes of a located value in place. They may change until confirmed."""
        start = found.offset - self.data_offset
        return self.data[start : start + found.length]


class EpochReader(ArenaReader):
    """An arena as the clients of a namespace with epochs read it: only what is of the present one counts.

    :meth:`guard` makes one of a reader that is in use.
    """

    def contains(self, digest: bytes, below: int = FROZEN) -> bool:
        return super().contains(digest, below) and self.has_current(digest)

    def _contains_each(self, digests: Sequence[bytes], own: Callable[[bytes], bool]) -> list[bool]:
        return [self.contains(digest) for digest in digests]

    def contain(self, digests: Sequence[bytes], own: Own = None) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
        hits, words = super().contain(digests, own)
        for at in np.flatnonzero(hits).tolist():
            hits[at] = self.has_current(digests[at])
        return hits, words


def guard(reader: ArenaReader) -> None:
    """Let a reader in use find nothing of an old epoch from now on. Entries that it copies are always looked at."""
    reader.__class__ = EpochReader


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
