"""A ring in shared memory, to which a worker appends what happens to its entries: one writer, which waits for nobody.

What it is for
--------------
A reader that follows the ring knows which entries the arena has, and does not ask the worker: a publisher of KV cache
events, for routers (docs/index.md). A *claim* is an entry that the ring has told as stored and not as gone since. The
ring makes two promises:

1. **No claim is false at the moment in which the ring makes it.** At every instant, after a ``kill -9`` too, the claims
   of all records are a part of what clients of this host can read. So an entry is told as gone *before* it goes, and as
   stored *after* it is there.
2. **All that can be read is claimed soon**: when the worker has told what it has put by, which it does at each
   heartbeat, and when a reader has looked at the table once (``follow.py``).

So between the two there may be entries that nobody claims: those are misses, which cost time and are no error.

What is told
------------
    STORED      the entry is there. Put by, and told at the next heartbeat, from what the slot has then: an entry that
                has gone meanwhile is never told
    REMOVED     the entry goes: deleted, evicted, dropped
    SHARD       no entry of this shard can be read any more, or only by way of another owner. Its entries are dropped
                later, and told as removed too
    NAMESPACE   the namespace has advanced, or has no epochs any more: no entry that was told can be read
    CLOSED      nothing can be read any more
    ANEW        what was told may be wrong: look at the table again. Told when a worker takes the arena over, before it
                changes anything and after, and when it drops an entry of which it believes nothing

An overwrite is told as stored again. The hooks are in the three places that every change passes: the slot writer
(``simm.table``), the shard words and the lines of namespaces. A caller cannot forget them.

A record has no key and no hash of an engine's block: the worker knows neither, only the digest of the key. Whoever
knows the key computes the digest, so the first half of the digest is the block's hash for consumers.

    record, 32 bytes
    off size field
      0    8 number     1 more than the record's sequence number
      8   16 digest     zeros but for STORED and REMOVED
     24    4 size       bytes of the value; the shard; the namespace's number
     28    2 namespace  number, as in the slot
     30    1 operation
     31    1  0

The ring
--------
    writer                                           reader
    a  RESERVED := beyond what is written next       1  h = HEAD
    b  the records                                   2  copy the records before h
    c  HEAD := beyond the last one                   3  r = RESERVED; those below r - capacity are not believed

Stores become visible in program order, and loads happen in it (x86-64, as ``simm.table`` has it). A record that was
overwritten during the copy (2) was reserved before (b), so the load (3) sees that. RESERVED goes in steps. With each of
them the writer stores the numbers of all records that it has reserved, and makes them removals without a digest. So a
removal is its digest and HEAD. RESERVED never goes back, as a slow reader relies on it.

A reader that was too slow has a *gap*: it looks at the table again. The writer knows of no reader, and never waits.

Death of the writer
-------------------
Only what is before HEAD counts. A record that was cut short lies at or behind it. The successor continues at HEAD, with
ANEW. What was put by and not told is lost with the worker: those entries are not claimed until readers have looked at
the table again.

Costs
-----
A PUT appends a slot's number to a list; numpy makes the records of a heartbeat together. Evictions of a batch are one
copy of their digests. Nothing is a system call: the pages are faulted in before. 32 bytes a record: 4 MiB are 131,072
events, a second of the fastest storm that was seen. docs/performance.md has figures (``benchmarks/events.py``).

Who may read and write it
-------------------------
The file has the arena's owner, mode and group: the worker writes it, members of the group read it. It has digests,
sizes and numbers of namespaces, which those can read in the arena too. A reader believes no number in it: bounds are
checked, and records with a wrong number are a gap.
"""

from __future__ import annotations

import struct
from array import array
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...constants import BATCH_KEYS_MAX, EVENTS_BYTES_MAX, EVENTS_BYTES_MIN
from ...errors import SegmentError, UsageError

MAGIC: Final = int.from_bytes(b"SiMMring", "little")
VERSION: Final = 1
HEADER_BYTES: Final = 4096
RECORD: Final = struct.Struct("@Q16sIHBB")
RECORD_BYTES: Final = 32
assert RECORD.size == RECORD_BYTES
#: The same for numpy. The digest is two words, as in a slot.
RECORD_FIELDS: Final = np.dtype(
    [
        ("number", "u8"), ("low", "<u8"), ("high", "<u8"), ("size", "u4"), ("namespace", "u2"), ("operation", "u1"),
        ("zero", "u1"),
    ]
)  # fmt: skip
assert RECORD_FIELDS.itemsize == RECORD_BYTES

STORED, REMOVED, SHARD, NAMESPACE, CLOSED, ANEW = range(1, 7)

#: Positions of the header's words. MAGIC is stored last.
_MAGIC, _VERSION, _CAPACITY, _HEAD, _RESERVED = range(5)
#: Records that are reserved at a time, at least.
RESERVE: Final = 1024
#: A worker tells what it is about to remove, so many entries at most, before it removes any of them. So whoever looks
#: at the table applies this many records from before its look too.
LOOKBACK: Final = 1 << 14
assert LOOKBACK > BATCH_KEYS_MAX  # what one request can evict at once
#: A ring has at least room for twice that.
RING_BYTES_MIN: Final = HEADER_BYTES + EVENTS_BYTES_MIN
assert EVENTS_BYTES_MIN >= 2 * LOOKBACK * RECORD_BYTES

_NO_DIGEST: Final = bytes(16)
assert array("L").itemsize == 8
_REMOVED_WORD: Final = np.uint64(REMOVED << 48)
#: A digest for numpy, which copies it as a whole.
DIGEST_FIELD: Final = np.dtype("V16")
_DIGESTS_AT: Final = HEADER_BYTES + 8
#: In a slot: its length in words of four bytes, its namespace in words of two (``simm/arena/layout.py``).
_LENGTH_AT: Final = 8
_NAMESPACE_AT: Final = 22


def capacity_of(size: int) -> int:
    """Return the records of a ring of ``size`` bytes, a power of two. Raise UsageError if they are too few or many."""
    if not EVENTS_BYTES_MIN <= size - HEADER_BYTES <= EVENTS_BYTES_MAX:
        wanted = f"{EVENTS_BYTES_MIN} to {EVENTS_BYTES_MAX}"
        raise UsageError(f"a ring of events has {wanted} bytes, not {size - HEADER_BYTES}")
    return 1 << (((size - HEADER_BYTES) // RECORD_BYTES).bit_length() - 1)


class EventRing:
    """The worker's side. ``buf`` is the whole ring; a fresh one, all zeros, is laid out.

    Raise SegmentError for one that is neither fresh nor a ring of this version and size.
    """

    def __init__(self, buf: memoryview) -> None:
        capacity = capacity_of(len(buf))
        self._buf = buf
        self._words = words = buf[:HEADER_BYTES].cast("Q")
        if words[_MAGIC] == 0:
            words[_VERSION], words[_CAPACITY] = VERSION, capacity
            words[_MAGIC] = MAGIC
        elif (words[_MAGIC], words[_VERSION], words[_CAPACITY]) != (MAGIC, VERSION, capacity):
            raise SegmentError("the ring of events has a header of another version or size")
        self._capacity = capacity
        self._mask = capacity - 1
        rows = np.frombuffer(buf, np.uint64, capacity * 4, HEADER_BYTES).reshape(-1, 4)
        records = np.frombuffer(buf, RECORD_FIELDS, capacity, HEADER_BYTES)
        #: Columns of the records: numbers, digests by halves and whole, and what is behind them, whole and by fields.
        self._numbers, self._low, self._high, self._last = rows.T
        self._digests = rows[:, 1:3].view(DIGEST_FIELD)[:, 0]
        self._sizes, self._namespaces, self._operations = (records[each] for each in ("size", "namespace", "operation"))
        self._counts = np.arange(1, LOOKBACK + 1, dtype=np.uint64)
        self._pack = RECORD.pack_into
        self.head: int = words[_HEAD]
        #: Records before this one have their numbers, and are removals.
        self._ready: int = self.head
        #: What a predecessor had reserved, as it may have stored something there.
        self._reserved_before = min(words[_RESERVED], self.head + LOOKBACK)
        #: Slots of the table whose entries are to be told as stored. "L", as an append of it costs half of one of "q".
        #: It is always the same object: the table appends to it.
        self.put_by = array("L")

    def anew(self) -> None:
        """Tell readers to look at the table again. What was put by they find there."""
        self.append(ANEW)

    def append(self, operation: int, size: int = 0, namespace: int = 0, digest: bytes = _NO_DIGEST) -> None:
        """Append one record. O(1)."""
        head = self.head
        if head >= self._ready:
            self._reserve(1)
        at = HEADER_BYTES + (head & self._mask) * RECORD_BYTES
        self._pack(self._buf, at, head + 1, digest, size, namespace, operation, 0)
        self.head = self._words[_HEAD] = head + 1

    def removed_one(self, digest: memoryview) -> None:
        """Tell that an entry goes. O(1)."""
        head = self.head
        if head >= self._ready:
            self._reserve(1)
        at = _DIGESTS_AT + (head & self._mask) * RECORD_BYTES
        self._buf[at : at + 16] = digest
        self.head = self._words[_HEAD] = head + 1

    def removed(self, digests: NDArray[np.void]) -> None:
        """Tell that these entries go, no more than ``LOOKBACK``. O(those), by numpy."""
        head, count = self.head, len(digests)
        if head + count > self._ready:
            self._reserve(count)
        at = head & self._mask
        end = at + count
        if end <= self._capacity:
            self._digests[at:end] = digests
        else:
            first = self._capacity - at
            self._digests[at:], self._digests[: count - first] = digests[:first], digests[first:]
        self.head = self._words[_HEAD] = head + count

    def _reserve(self, count: int) -> None:
        """Make the next ``count`` records ready, ``LOOKBACK`` at most, and ``RESERVE`` at least."""
        start, end = self._ready, self.head + max(count, RESERVE)
        self._words[_RESERVED] = max(end, self._reserved_before)
        while start < end:
            at = start & self._mask
            some = min(end - start, self._capacity - at)
            np.add(self._counts[:some], start, out=self._numbers[at : at + some])
            self._last[at : at + some] = _REMOVED_WORD
            start += some
        self._ready = end

    def tell(self, rows: NDArray[np.uint64]) -> None:
        """Tell the entries that were put by, from the slots as they are now, rows of eight words each. O(those)."""
        if not self.put_by:
            return
        slots = np.array(self.put_by).view(np.int64)
        del self.put_by[:]
        while len(slots):
            head = self.head
            at = head & self._mask
            count = min(len(slots), LOOKBACK, self._capacity - at)
            images = rows.take(slots[:count], axis=0)
            slots = slots[count:]
            if np.count_nonzero(images[:, 3]) < count:
                images = images[images[:, 3] != 0]
                count = len(images)
            if head + count > self._ready:
                self._reserve(count)
            end = at + count
            self._low[at:end] = images[:, 1]
            self._high[at:end] = images[:, 2]
            self._sizes[at:end] = images.view(np.uint32)[:, _LENGTH_AT]
            self._namespaces[at:end] = images.view(np.uint16)[:, _NAMESPACE_AT]
            self._operations[at:end] = STORED
            self.head = self._words[_HEAD] = head + count

    def stats(self) -> dict[str, int]:
        """Return what was written since the server's start; a reader that was away for a whole turn has a gap."""
        size, turns = self._capacity * RECORD_BYTES, self.head // self._capacity
        return {"events": self.head, "event_bytes": size, "event_turns": turns}

    def release(self) -> None:
        """Drop every view of the memory."""
        del self._numbers, self._low, self._high, self._last
        del self._digests, self._sizes, self._namespaces, self._operations
        self._words.release()
        self._buf.release()


#: Of a worker that tells nobody.
NO_STATS: Final = {"events": 0, "event_bytes": 0, "event_turns": 0}


class Teller(Protocol):
    """What tells a ring: the table, the shard words, the namespaces."""

    events: EventRing | None


def attach(ring: EventRing, *tellers: Teller) -> None:
    """Let these tell the ring from now on what happens. Readers look at the table first."""
    for each in tellers:
        each.events = ring
    ring.anew()


class Read(NamedTuple):
    """What a reader got.

    Attributes:
        records: as ``RECORD_FIELDS``, in order. A copy.
        next: the sequence number behind them.
        gap: records are lost, or ``start`` is beyond the end.
    """

    records: NDArray[np.void]
    next: int
    gap: bool


class RingReader:
    """A reader's side, over a map that it cannot write. ``buf`` is the whole ring.

    Raise SegmentError for what is no ring, or not ready yet.
    """

    def __init__(self, buf: memoryview, name: str = "the ring of events") -> None:
        if len(buf) < HEADER_BYTES:
            raise SegmentError(f"{name} is too short")
        self._words = words = buf[:HEADER_BYTES].cast("Q")
        if words[_MAGIC] != MAGIC or words[_VERSION] != VERSION:
            raise SegmentError(f"{name} is no ring of this version, or not ready yet")
        try:
            capacity = capacity_of(len(buf))
        except UsageError as exc:
            raise SegmentError(f"{name}: {exc}") from None
        if words[_CAPACITY] != capacity:
            raise SegmentError(f"{name} has a header that contradicts its size")
        self.capacity = capacity
        self._records: NDArray[np.void] = np.frombuffer(buf, RECORD_FIELDS, capacity, HEADER_BYTES)

    @property
    def head(self) -> int:
        """The sequence number of the next record."""
        word: int = self._words[_HEAD]
        return word

    def read(self, start: int, most: int = 1 << 16) -> Read:
        """Return at most ``most`` records from ``start`` on; with a gap, where some are lost. O(records).

        With a gap there are no records, and ``next`` is the end of the ring.
        """
        head = self.head
        count = min(head - start, most, self.capacity)
        if count <= 0:
            return Read(self._records[:0].copy(), start, False) if start <= head else self._gap(head)
        at = start & (self.capacity - 1)
        first = min(count, self.capacity - at)
        copy = np.concatenate((self._records[at : at + first], self._records[: count - first]))
        lost = self._words[_RESERVED] - self.capacity
        wanted = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        if start < lost or not np.array_equal(copy["number"], wanted):
            return self._gap(head)
        return Read(copy, start + count, False)

    def _gap(self, head: int) -> Read:
        return Read(self._records[:0].copy(), head, True)
