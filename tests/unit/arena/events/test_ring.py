"""The ring itself: what is read is what was told, or a gap; memory that is no ring, or is torn, is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.arena.events.follow import Follower
from simm.arena.events.listing import ENTRY_FIELDS
from simm.arena.events.ring import (
    ANEW,
    HEADER_BYTES,
    LOOKBACK,
    NAMESPACE,
    RECORD_BYTES,
    REMOVED,
    RING_BYTES_MIN,
    SHARD,
    STORED,
    EventRing,
    Read,
    RingReader,
    capacity_of,
)
from simm.errors import SegmentError, UsageError
from tests.support.event_claims import new_ring

CAPACITY = capacity_of(RING_BYTES_MIN)


def bits(slots: set[int], count: int) -> bytearray:
    """Return a table's bits of slots in use."""
    flags = np.zeros(count, np.uint8)
    flags[list(slots)] = 1
    return bytearray(np.packbits(flags, bitorder="little").tobytes())


def tell(ring: EventRing, slots: set[int], count: int) -> None:
    ring.tell(bits(slots, count), len(slots))


def nothing() -> None:
    """Flush what nobody has put by."""


@pytest.mark.parametrize("count", [24, 1 << 10, 1 << 15])
def test_what_is_read_is_what_was_told(count: int) -> None:
    """Against a list, around the ring several times: what comes and goes between two heartbeats, in any order."""
    rng = random.Random(count)
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    used: set[int] = set(rng.sample(range(count), count // 3))
    ring.begin(bits(used, count), nothing)
    pending: set[int] = set()
    told: list[tuple[int, int]] = []
    at = seen = stored = 0
    turns = 0
    while len(told) < 3 * CAPACITY and turns < 4000:
        turns += 1
        kind = rng.randrange(5)
        if kind == 0:
            ring.append(SHARD, 5)
            told.append((SHARD, 5))
        elif kind == 1 and used:
            slot = rng.choice(list(used)[:50])
            ring.removed_one(slot)
            told.append((REMOVED, slot))
            used.discard(slot)
            pending.discard(slot)
        elif kind == 2 and used:
            some = rng.sample(list(used), min(len(used), rng.choice([1, 30, 3000])))
            ring.removed(np.array(some))
            told += [(REMOVED, slot) for slot in some]
            used.difference_update(some)
            pending.difference_update(some)
        elif kind == 3:
            free = rng.sample(range(count), min(count, rng.choice([1, 30, 3000])))
            come = {slot for slot in free if slot not in used}
            used |= come
            pending |= come
        else:
            again = rng.sample(list(used), min(len(used), rng.choice([0, 0, 3])))
            ring.overwritten.extend(again)
            tell(ring, used, count)
            told += [(STORED, slot) for slot in [*sorted(pending), *again]]
            stored += len(pending)
            pending = set()
        assert ring.head == len(told)
        if rng.random() < 0.5:
            got = reader.read(at)
            assert not got.gap and got.next == at + len(got.records)
            records = list(zip(got.records["operation"].tolist(), got.records["argument"].tolist()))
            assert records == told[at : got.next]
            seen += len(records)
            at = got.next
    assert seen > (2 * CAPACITY if count > 1000 else 1000) and stored > 300


def test_a_slot_that_went_and_came_again_is_told_again() -> None:
    """The table's bits are as before. Without the removals in the ring nobody would see a difference."""
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.begin(bits(set(), 64), nothing)
    tell(ring, {3, 4}, 64)
    ring.removed_one(3)
    tell(ring, {3, 4}, 64)
    ring.removed(np.array([3, 4]))
    tell(ring, {3, 4}, 64)
    told = reader.read(0).records
    assert list(zip(told["operation"].tolist(), told["argument"].tolist())) == [
        (STORED, 3), (STORED, 4), (REMOVED, 3), (STORED, 3), (REMOVED, 3), (REMOVED, 4), (STORED, 3), (STORED, 4),
    ]  # fmt: skip
    head = ring.head
    tell(ring, {3, 4}, 64)
    assert ring.head == head, "nothing has changed"


def test_issue_a_slot_that_somebody_else_has_stored_in_the_ring_ends_no_worker() -> None:
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.begin(bits({3, 4}, 64), nothing)
    ring.removed_one(3)
    memory[HEADER_BYTES : HEADER_BYTES + 4] = b"\xff" * 4
    tell(ring, {4, 5}, 64)
    told = reader.read(1).records
    assert (STORED, 5) in zip(told["operation"].tolist(), told["argument"].tolist())


def test_more_removals_than_the_ring_has_room_for() -> None:
    """What went cannot be found in it: readers look at the table."""
    memory = new_ring()
    ring = EventRing(memory)
    used = set(range(64))
    ring.begin(bits(used, 64), nothing)
    for _ in range(CAPACITY + 1):
        ring.removed_one(3)
    tell(ring, used, 64)
    got = RingReader(memory).read(ring.head - 1)
    assert got.records["operation"].tolist() == [ANEW]
    ring.removed_one(5)
    tell(ring, used, 64)
    got = RingReader(memory).read(ring.head - 1)
    assert (got.records["operation"].tolist(), got.records["argument"].tolist()) == ([STORED], [5])


def test_what_came_is_told_before_a_shard_or_a_namespace_goes() -> None:
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    used: set[int] = set()
    ring.begin(bits(used, 64), lambda: tell(ring, used, 64))
    for operation in (SHARD, NAMESPACE):
        used.add(10 + operation)
        ring.append(operation, 1)
    told = reader.read(0).records
    assert told["operation"].tolist() == [STORED, SHARD, STORED, NAMESPACE]


def test_a_reader_that_is_lapped_has_a_gap_and_no_wrong_record() -> None:
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    for _ in range(CAPACITY + 10):
        ring.append(SHARD, 1)
    got = reader.read(5)
    assert got.gap and not len(got.records) and got.next == ring.head
    assert reader.read(ring.head + 1).gap  # beyond the end: it is another ring by now
    assert not reader.read(ring.head).gap


def test_a_record_that_is_written_during_the_copy_is_not_believed() -> None:
    """The writer has reserved the place, and may have stored any part of the new record."""
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    for _ in range(CAPACITY):
        ring.append(SHARD, 1)
    words = memory[:HEADER_BYTES].cast("Q")
    words[4] = CAPACITY + 3  # RESERVED
    assert reader.read(0).gap and reader.read(2).gap
    assert not reader.read(3).gap
    # Without that the number in each record is all there is, and a torn record can have the old one.
    words[4] = CAPACITY
    memory[HEADER_BYTES : HEADER_BYTES + 4] = b"\xff" * 4
    assert not reader.read(0).gap  # the positive control: it would be believed
    words[4] = CAPACITY + 1
    assert reader.read(0).gap


def test_a_successor_goes_on_where_its_predecessor_died() -> None:
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.append(REMOVED, 77)
    at = HEADER_BYTES + ring.head * RECORD_BYTES
    memory[at : at + RECORD_BYTES] = b"\x55" * RECORD_BYTES  # half a record, which nobody has been told of
    assert len(reader.read(0).records) == 1
    ring = EventRing(memory)
    ring.anew()
    got = reader.read(0)
    assert got.records["operation"].tolist() == [REMOVED, ANEW] and got.records["argument"][0] == 77


def test_a_successor_does_not_believe_what_its_predecessor_made_ready() -> None:
    """Records behind the end may be of any kind, and what was reserved for them stays so for slow readers."""
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.begin(bits(set(), 8000), nothing)
    tell(ring, set(range(5000)), 8000)
    words = memory[:HEADER_BYTES].cast("Q")
    words[3] -= 4900  # it died before the end of its last telling
    reserved = words[4]
    ring = EventRing(memory)
    ring.anew()
    assert words[4] == reserved
    ring.removed_one(66)
    ring.removed(np.array([7, 8]))
    got = reader.read(100)
    assert not got.gap and got.records["operation"].tolist() == [ANEW, REMOVED, REMOVED, REMOVED]
    assert got.records["argument"].tolist() == [0, 66, 7, 8]
    words[4] = (1 << 64) - 1  # somebody else's number
    EventRing(memory).anew()
    assert words[4] <= words[3] + LOOKBACK


@pytest.mark.parametrize(("word", "value"), [(0, 0), (0, 1), (1, 99), (2, CAPACITY * 2), (2, 0)])
def test_what_is_no_ring(word: int, value: int) -> None:
    memory = new_ring()
    EventRing(memory)
    memory[:HEADER_BYTES].cast("Q")[word] = value
    with pytest.raises(SegmentError, match="ring of events"):
        RingReader(memory)
    if (word, value) != (0, 0):  # that is a fresh one
        with pytest.raises(SegmentError, match="another version or size"):
            EventRing(memory)


@pytest.mark.parametrize("head", [1 << 63, (1 << 64) - 1, CAPACITY * 3])
def test_a_head_that_somebody_else_has_stored(head: int) -> None:
    """No record has the number that it must have: a gap, and no work without bound."""
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.append(SHARD, 1)
    memory[:HEADER_BYTES].cast("Q")[3] = head
    got = reader.read(0)
    assert got.gap and not len(got.records)
    assert not len(reader.read(head - 5).records)


def test_an_end_that_somebody_else_sets_back_during_a_look_ends_no_reader() -> None:
    """To just where the records begin that are read first: there is none of them, and no gap either."""
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    for _ in range(LOOKBACK + 10):
        ring.append(SHARD, 1)
    head = memory[:HEADER_BYTES].cast("Q")
    reads = 0
    read = reader.read

    def counted(start: int, most: int = 1 << 16) -> Read:
        nonlocal reads
        reads += 1
        assert reads < 100, "it reads for ever"
        head[3] = 10
        return read(start, most)

    class Table:
        slots = 8

        def page(self, start: int, stop: int) -> np.ndarray:
            return np.zeros(0, ENTRY_FIELDS)

        def some(self, slots: np.ndarray) -> np.ndarray:
            return np.zeros(0, ENTRY_FIELDS)

    reader.read = counted  # type: ignore[method-assign]
    follower = Follower(reader, Table())
    assert follower.step().empty and follower.due and follower.gaps == 1
    head[3] = ring.head
    assert follower.step().empty and follower.due and follower.gaps == 2, "the same again"


@pytest.mark.parametrize("looking", [True, False])
def test_issue_what_goes_while_a_large_table_is_copied_is_not_claimed(looking: bool) -> None:
    """More than one read of the ring behind what was copied: it was claimed until the next step, or the one after.

    ``looking``: while its page is copied.
    """
    memory = new_ring(HEADER_BYTES + (4 << 20))
    ring, reader = EventRing(memory), RingReader(memory)
    there = {3, 5}

    class Table:
        slots = 8

        def page(self, start: int, stop: int) -> np.ndarray:
            rows = self.some(np.array(sorted(there)))
            if looking:
                busy()
            return rows

        def some(self, slots: np.ndarray) -> np.ndarray:
            kept = np.array([slot for slot in slots.tolist() if slot in there], np.int64)
            rows = np.zeros(len(kept), ENTRY_FIELDS)
            rows["slot"], rows["low"], rows["size"] = kept, kept + 100, 1
            return rows

    def busy() -> None:
        for _ in range(200):
            ring.removed(np.zeros(1000, np.int64))
        ring.removed_one(3)
        there.discard(3)

    follower = Follower(reader, Table())
    steps = [follower.step()]
    if not looking:
        busy()
        steps.append(follower.step())
    found = [tuple(each) for step in steps for each in step.records[["low", "operation"]].tolist()]
    stored = [(each + 100, STORED) for each in sorted(there if looking else {3, 5})]
    assert found == [*stored, *([] if looking else [(103, REMOVED)])]
    assert follower.at == ring.head and follower.step().empty and not follower.due


def test_sizes() -> None:
    for size in (0, RING_BYTES_MIN - 1, 1 << 40):
        with pytest.raises(UsageError, match="a ring of events has"):
            capacity_of(size)
    with pytest.raises(SegmentError, match="too short"):
        RingReader(memoryview(bytes(100)))
    assert capacity_of(HEADER_BYTES + (4 << 20)) == 524_288
