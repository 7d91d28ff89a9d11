"""A ring in shared memory, to which a worker appends what happens to its entries: one writer, which waits for nobody.

What it is for
--------------
A reader that follows the ring knows which entries the arena has, and does not ask the worker: a publisher of KV cache
events, for routers (docs/index.md). A *claim* is an entry that the ring has told as stored and not as gone since. The
ring makes two promises:

1. **No claim is false at the moment in which the ring makes it.** At every instant, after a ``kill -9`` too, the claims
   of all records are a part of what clients of this host can read. So an entry is told as gone *before* it goes, and as
   stored *after* it is there.
2. **All that can be read is claimed soon**: when the worker has told what has come, which it does at each heartbeat,
   and when a reader has looked at the table once; after a gap, in two passes (``follow.py``).

So between the two there may be entries that nobody claims: those are misses, which cost time and are no error.

What is told
------------
    STORED      there is an entry in this slot: told at the next heartbeat, if it is still there. A reader reads it
    REMOVED     the entry in this slot goes: deleted, evicted, dropped
    SHARD       no entry of this shard can be read any more, or only by way of another owner. Its entries are dropped
                later, and told as removed too
    NAMESPACE   the namespace has advanced, or has no epochs any more: no entry that was told can be read
    CLOSED      nothing can be read any more
    ANEW        what was told may be wrong: look at the table again. Told when a worker takes the arena over, before it
                changes anything and after, and when it drops an entry of which it believes nothing

An overwrite is told as stored again. The hooks are in the three places that every change passes: the slot writer
(``simm.table``), the shard words and the lines of namespaces. A caller cannot forget them.

A record names a slot and nothing of the entry. What is in the slot, the reader sees in the arena itself, when it reads
the record: it claims what is there then. It remembers the digest that it has claimed of each slot, so it knows what a
removal means (``follow.py``). So the worker copies no digest, and takes no line of a slot into its caches for this.

**A commit does nothing for the ring.** The table has a byte for each 8 slots that says which are in use, and the worker
has a copy of these bytes: what has been told. A heartbeat compares them by numpy. A slot that is in use and was not
told is told. A removal is told before the slot is cleared. The next heartbeat finds it in the ring, and takes its bit
from the copy. So a slot that was cleared and used again meanwhile is told again. What came before a shard or a
namespace goes is told before that, as a record behind SHARD would be believed.

    record, 8 bytes
    off size field
      0    4 argument   the slot, the shard, or the namespace's number
      4    1 operation
      5    3 number     1 more than the record's sequence number, its lowest 24 bits

The ring
--------
    writer                                           reader
    a  RESERVED := beyond what is written next       1  h = HEAD
    b  the records                                   2  copy the records before h
    c  HEAD := beyond the last one                   3  r = RESERVED; those below r - capacity are not believed

Stores become visible in program order, and loads happen in it (x86-64, as ``simm.table`` has it). A record that was
overwritten during the copy (2) was reserved before (b), so the load (3) sees that. RESERVED goes in steps. With each of
them the writer stores the numbers of all records that it has reserved, and makes them removals of no slot yet. So a
removal is its slot and HEAD. RESERVED never goes back, as a slow reader relies on it.

A reader that was too slow has a *gap*: it looks at the table again. The writer knows of no reader, and never waits.

Death of the writer
-------------------
Only what is before HEAD counts. A record that was cut short lies at or behind it. The successor continues at HEAD, with
ANEW, so readers look at the table. Wherever ``kill -9`` comes:

* Between a commit, or its answer, and the heartbeat: nobody has been told. The entry is not claimed until readers look
  at the table: a miss. What has been told, and what not, dies with the worker, and its successor begins with ANEW.
* Between a removal's record and the removal: what is still there is not claimed. A miss, until readers look.
* Within a heartbeat: the records behind HEAD do not exist.
* In none of these is a removal lost, as it is told first. Nobody can believe in a dead entry because a worker died.

Costs
-----
A commit costs nothing, but for an overwrite, which notes its slot. Evictions of a batch are one copy of their slots. A
heartbeat is some 20 calls of numpy over one bit for each slot, and none if nothing has changed. Nothing is a system
call: the pages are faulted in before. 8 bytes a record: 4 MiB are 524,288 events. docs/performance.md has figures
(``benchmarks/events.py``).

Who may read and write it
-------------------------
The file has the arena's owner, mode and group: the worker writes it, members of the group read it. It has numbers of
slots, shards and namespaces, which those can read in the arena too. A reader believes no number in it: bounds are
checked, and records with a wrong number are a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...constants import BATCH_KEYS_MAX, EVENTS_BYTES_MAX, EVENTS_BYTES_MIN
from ...errors import SegmentError, UsageError

MAGIC: Final = int.from_bytes(b"SiMMring", "little")
VERSION: Final = 2
HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 8
#: ``tail``: the number and the operation, as one word.
RECORD_FIELDS: Final = np.dtype(
    {
        "names": ["argument", "operation", "tail"], "formats": ["<u4", "u1", "<u4"], "offsets": [0, 4, 4],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip
#: Of a record's sequence number, plus 1, this is kept, behind the operation.
NUMBERS: Final = 1 << 24

STORED, REMOVED, SHARD, NAMESPACE, CLOSED, ANEW = range(1, 7)

#: Positions of the header's words. MAGIC is stored last.
_MAGIC, _VERSION, _CAPACITY, _HEAD, _RESERVED = range(5)
#: Records that are reserved at a time, at least.
RESERVE: Final = 4096
#: A worker tells what it is about to remove, so many entries at most, before it removes any of them. So whoever looks
#: at the table applies this many records from before its look too.
LOOKBACK: Final = 1 << 14
assert LOOKBACK > BATCH_KEYS_MAX  # what one request can evict at once
#: A ring has at least room for twice that.
RING_BYTES_MIN: Final = HEADER_BYTES + EVENTS_BYTES_MIN
assert EVENTS_BYTES_MIN >= 2 * LOOKBACK * RECORD_BYTES

assert array("L").itemsize == 8
_SHIFT: Final = 8
_NO_SLOTS: Final = np.zeros(0, np.int64)
#: Bits of a byte of the table's slots in use, and slots of eight such bytes.
_WAYS: Final = 8
_WAY_BITS: Final = 3
_BIT_OF_WAY: Final = np.left_shift(1, np.arange(_WAYS)).astype(np.uint8)
#: Where one word of this many has a bit, or more, all bits are unpacked at once.
_SPARSE: Final = 4

Bits = NDArray[np.uint8]


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
        records = np.frombuffer(buf, RECORD_FIELDS, capacity, HEADER_BYTES)
        self._arguments, self._operations, self._tails = (records[each] for each in ("argument", "operation", "tail"))
        self._halves = buf[HEADER_BYTES : HEADER_BYTES + capacity * RECORD_BYTES].cast("I")
        #: The second halves of removals 0, 1, 2 ...
        self._stamps = np.arange(1, LOOKBACK + 1, dtype=np.uint32) << _SHIFT | REMOVED
        self.head: int = words[_HEAD]
        #: Records before this one have their numbers, and are removals.
        self._ready: int = self.head
        #: What a predecessor had reserved, as it may have stored something there.
        self._reserved_before = min(words[_RESERVED], self.head + LOOKBACK)
        #: Slots that were overwritten, and are to be told again.
        self.overwritten = array("L")
        #: The slots that were told, as the table's bits; the end of the ring and the entries of the table then.
        self._told: Bits = np.zeros(0, np.uint8)
        self._told_at = self.head
        self._entries = -1
        #: Tells what has come since the last heartbeat. The table's.
        self.flush: Callable[[], None] = _nothing

    def anew(self) -> None:
        """Tell readers to look at the table again. What has come they find there."""
        self.append(ANEW)

    def begin(self, used: bytearray, flush: Callable[[], None]) -> None:
        """Begin to compare with these bits of the table: readers look at it first. ``flush`` calls :meth:`tell`."""
        self._told = np.frombuffer(used, np.uint8).copy()
        self._told_at, self._entries, self.flush = self.head, -1, flush
        del self.overwritten[:]

    def append(self, operation: int, argument: int = 0) -> None:
        """Append one record. O(1); for a shard or a namespace that goes, O(slots) if anything has come."""
        if operation in (SHARD, NAMESPACE):
            self.flush()
        head = self.head
        if head >= self._ready:
            self._reserve(1)
        at = head & self._mask
        self._halves[2 * at] = argument
        self._operations[at] = operation
        self.head = self._words[_HEAD] = head + 1
        if operation != REMOVED and self._told_at == head:
            self._told_at = head + 1  # no removal

    def removed_one(self, slot: int) -> None:
        """Tell that the entry in a slot goes. O(1)."""
        head = self.head
        if head >= self._ready:
            self._reserve(1)
        self._halves[2 * (head & self._mask)] = slot
        self.head = self._words[_HEAD] = head + 1

    def removed(self, slots: NDArray[np.int64]) -> None:
        """Tell that the entries in these slots go, no more than ``LOOKBACK``. O(those), by numpy."""
        head, count = self.head, len(slots)
        if head + count > self._ready:
            self._reserve(count)
        at = head & self._mask
        end = at + count
        if end <= self._capacity:
            self._arguments[at:end] = slots
        else:
            first = self._capacity - at
            self._arguments[at:], self._arguments[: count - first] = slots[:first], slots[first:]
        self.head = self._words[_HEAD] = head + count

    def _reserve(self, count: int) -> None:
        """Make the next ``count`` records ready, ``LOOKBACK`` at most, and ``RESERVE`` at least."""
        start, end = self._ready, self.head + max(count, RESERVE)
        self._words[_RESERVED] = max(end, self._reserved_before)
        while start < end:
            at = start & self._mask
            some = min(end - start, self._capacity - at)
            # Modulo 2 ** 32: the numbers have the upper 24 bits.
            np.add(self._stamps[:some], np.uint32(start % NUMBERS << _SHIFT), out=self._tails[at : at + some])
            start += some
        self._ready = end

    def tell(self, used: bytearray, entries: int) -> None:
        """Tell the slots that have come into use since they were told, or were overwritten. O(slots), by numpy.

        Args:
            used: a bit for each slot of the table.
            entries: how many are set.
        """
        if self._told_at == self.head and self._entries == entries and not self.overwritten:
            return  # nothing went, and so nothing came
        now, told = np.frombuffer(used, np.uint8), self._told
        if self.head - self._told_at > self._capacity:
            self.anew()  # removals that nobody has any more
            told[:] = now
        else:
            self._forget(self._gone(), now)
        np.invert(told, out=told)
        told &= now
        come = _slots_of(told)
        told[:] = now
        if self.overwritten:
            come = np.concatenate((come, np.array(self.overwritten).view(np.int64)))
            del self.overwritten[:]
        while len(come):
            head = self.head
            at = head & self._mask
            count = min(len(come), LOOKBACK, self._capacity - at)
            if head + count > self._ready:
                self._reserve(count)
            self._arguments[at : at + count] = come[:count]
            self._operations[at : at + count] = STORED
            self.head = self._words[_HEAD] = head + count
            come = come[count:]
        self._told_at, self._entries = self.head, entries

    def _forget(self, gone: NDArray[np.int64], now: Bits) -> None:
        """Clear the bits of the slots that were told, have gone since and are in use once more.

        The others need none: they are not in ``now``. A slot may come twice. O(those + slots / 8), by numpy.
        """
        sets, bits = gone >> _WAY_BITS, _BIT_OF_WAY.take(gone & (_WAYS - 1))
        again = ((now & self._told).take(sets) & bits).nonzero()[0]
        if len(again):
            np.bitwise_and.at(self._told, sets.take(again), ~bits.take(again))

    def _gone(self) -> NDArray[np.int64]:
        """Return the slots that were told as going since the last heartbeat."""
        start, end = self._told_at & self._mask, self.head & self._mask
        if self._told_at == self.head:
            return _NO_SLOTS
        parts = [slice(start, end)] if start < end else [slice(start, None), slice(0, end)]
        found = []
        for part in parts:
            slots, removals = self._arguments[part].astype(np.int64), self._operations[part] == REMOVED
            found.append(slots if removals.all() else slots[removals])
        slots = found[0] if len(found) == 1 else np.concatenate(found)
        most = len(self._told) * _WAYS
        # Beyond it only if something has stored in the ring astray.
        return slots if slots.max(initial=0) < most else slots[slots < most]

    def stats(self) -> dict[str, int]:
        """Return what was written since the server's start; a reader that was away for a whole turn has a gap."""
        size, turns = self._capacity * RECORD_BYTES, self.head // self._capacity
        return {"events": self.head, "event_bytes": size, "event_turns": turns}

    def release(self) -> None:
        """Drop every view of the memory."""
        del self._arguments, self._operations, self._tails
        self.flush = _nothing
        self._halves.release()
        self._words.release()
        self._buf.release()


def _nothing() -> None:
    """Tell nothing."""


def _slots_of(bits: Bits) -> NDArray[np.int64]:
    """Return the slots whose bits are set, in ascending order. O(bits / 64 + those)."""
    # nonzero() of anything but bools looks at one element after the other.
    if len(bits) % 8 == 0:
        words = (bits.view(np.uint64) != 0).nonzero()[0]
        if len(words) * _SPARSE > len(bits) // 8:
            return np.unpackbits(bits, bitorder="little").view(np.bool_).nonzero()[0]
        some = bits.reshape(-1, 8).take(words, axis=0)
        inside = (some != 0).reshape(-1).nonzero()[0]
        some = some.reshape(-1).take(inside)
        sets = words.take(inside >> 3)
        sets <<= 3
        inside &= 7
        sets += inside
    else:
        sets = (bits != 0).nonzero()[0]
        some = bits.take(sets)
    at = np.unpackbits(some, bitorder="little").view(np.bool_).nonzero()[0]
    slots: NDArray[np.int64] = sets.take(at >> _WAY_BITS)
    slots <<= _WAY_BITS
    at &= _WAYS - 1
    slots += at
    return slots


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
        wanted = (np.arange(1, count + 1, dtype=np.uint32) + np.uint32(start % NUMBERS)) % np.uint32(NUMBERS)
        if start < lost or not np.array_equal(copy["tail"] >> np.uint32(_SHIFT), wanted):
            return self._gap(head)
        return Read(copy, start + count, False)

    def _gap(self, head: int) -> Read:
        return Read(self._records[:0].copy(), head, True)
