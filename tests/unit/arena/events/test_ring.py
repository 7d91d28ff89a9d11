"""The ring itself: what is read is what was told, or a gap; memory that is no ring, or is torn, is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.arena.events.follow import Follower
from simm.arena.events.listing import ENTRY_FIELDS
from simm.arena.events.ring import (
    ANEW,
    DIGEST_FIELD,
    HEADER_BYTES,
    LOOKBACK,
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
from tests.support.event_claims import digest_in, new_ring

CAPACITY = capacity_of(RING_BYTES_MIN)


def images(numbers: list[int]) -> np.ndarray:
    """Return slots with these numbers as digests."""
    rows = np.zeros((len(numbers), 8), np.uint64)
    rows[:, 1] = rows[:, 2] = rows[:, 3] = numbers
    rows[:, 4] = 100
    rows[:, 5] = 7 << 32
    return rows


def test_what_is_read_is_what_was_told() -> None:
    """Against a list, around the ring several times; by records, removals of batches, and what was put by."""
    rng = random.Random(1)
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    told: list[tuple[int, int]] = []
    at = seen = 0
    while len(told) < 3 * CAPACITY:
        kind = rng.randrange(4)
        count = rng.choice([1, 30, 3000])
        numbers = [rng.randrange(1, 1 << 62) for _ in range(count)]
        if kind == 0:
            ring.append(SHARD, 5)
            told.append((SHARD, 0))
        elif kind == 1:
            ring.removed_one(memoryview(numbers[0].to_bytes(8, "little") * 2))
            told.append((REMOVED, numbers[0]))
        elif kind == 2:
            ring.removed(images(numbers)[:, 1:3].copy().view(DIGEST_FIELD)[:, 0])
            told += [(REMOVED, number) for number in numbers]
        else:
            table = images(numbers)
            gone = set(rng.sample(range(count), count // 3))
            table[list(gone), 3] = 0
            ring.put_by.extend(range(count))
            ring.tell(table)
            told += [(STORED, number) for number_at, number in enumerate(numbers) if number_at not in gone]
        assert ring.head == len(told)
        if rng.random() < 0.5:
            got = reader.read(at)
            assert not got.gap and got.next == at + len(got.records)
            assert [(int(row["operation"]), int(row["low"])) for row in got.records] == told[at : got.next]
            stored = got.records[got.records["operation"] == STORED]
            assert (stored["size"] == 100).all() and (stored["namespace"] == 7).all()
            removed = got.records[got.records["operation"] == REMOVED]
            assert not removed["size"].any() and not removed["namespace"].any()
            assert (got.records["low"] == got.records["high"]).all()
            seen += len(got.records)
            at = got.next
    assert seen > 2 * CAPACITY


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
    memory[HEADER_BYTES + 8 : HEADER_BYTES + 24] = b"\xff" * 16
    assert not reader.read(0).gap  # the positive control: it would be believed
    words[4] = CAPACITY + 1
    assert reader.read(0).gap


def test_a_successor_goes_on_where_its_predecessor_died() -> None:
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.append(REMOVED, 0, 0, b"a" * 16)
    at = HEADER_BYTES + ring.head * RECORD_BYTES
    memory[at : at + RECORD_BYTES] = b"\x55" * RECORD_BYTES  # half a record, which nobody has been told of
    assert len(reader.read(0).records) == 1
    ring = EventRing(memory)
    ring.anew()
    got = reader.read(0)
    assert got.records["operation"].tolist() == [REMOVED, ANEW] and digest_in(got.records[0]) == b"a" * 16


def test_a_successor_does_not_believe_what_its_predecessor_made_ready() -> None:
    """Records behind the end may be of any kind, and what was reserved for them stays so for slow readers."""
    memory = new_ring()
    ring, reader = EventRing(memory), RingReader(memory)
    ring.put_by.extend(range(5000))
    ring.tell(images(list(range(1, 5001))))
    words = memory[:HEADER_BYTES].cast("Q")
    words[3] -= 4900  # it died before the end of its last telling
    reserved = words[4]
    ring = EventRing(memory)
    ring.anew()
    assert words[4] == reserved
    ring.removed_one(memoryview(b"a" * 16))
    ring.removed(images([7, 8])[:, 1:3].copy().view(DIGEST_FIELD)[:, 0])
    got = reader.read(100)
    assert not got.gap and got.records["operation"].tolist() == [ANEW, REMOVED, REMOVED, REMOVED]
    assert got.records["size"].tolist() == got.records["namespace"].tolist() == [0] * 4
    assert digest_in(got.records[1]) == b"a" * 16 and got.records["low"].tolist()[2:] == [7, 8]
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
    """To just where the records begin that are applied first: there is none of them, and no gap either."""
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
        return read(start, most)

    def look() -> np.ndarray:
        head[3] = 10
        return np.zeros(0, ENTRY_FIELDS)

    reader.read = counted  # type: ignore[method-assign]
    follower = Follower(reader, look)
    assert follower.step().empty and follower.due and follower.gaps == 1
    head[3] = ring.head
    assert follower.step().empty and follower.due, "the same again"


def test_sizes() -> None:
    for size in (0, RING_BYTES_MIN - 1, 1 << 40):
        with pytest.raises(UsageError, match="a ring of events has"):
            capacity_of(size)
    with pytest.raises(SegmentError, match="too short"):
        RingReader(memoryview(bytes(100)))
    assert capacity_of(HEADER_BYTES + (4 << 20)) == 131_072
