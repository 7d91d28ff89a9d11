"""The hash table against a dictionary, and what check() and recover() say of damage."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest

from simm.arena.hashing import TAG_AT, sets_of, shard_of
from simm.arena.layout import ENTRY_EPOCH, SEQ_BITS, SEQ_MASK, SLOT_FIELDS, SLOT_WORDS, Geometry
from simm.constants import SHARD_COUNT, SLOT_BYTES, WAYS
from simm.errors import CorruptionError
from simm.table import COLUMNS_FROM, Entry, Table
from tests.support.consistency import check
from tests.support.counted_dict import CountedDict
from tests.support.dose import dose, dosed

MIB = 1 << 20
GEOMETRY = Geometry.plan(8 * MIB, 128)
DATA = GEOMETRY.data_offset


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, GEOMETRY.data_offset)


def seq_of(memory: mmap.mmap, slot: int) -> int:
    return int.from_bytes(memory[GEOMETRY.slots_offset + slot * SLOT_BYTES :][:8], "little")


def keys_for_set(number: int, count: int, seed: int = 0) -> list[bytes]:
    """Digests with both candidate sets ``number`` and the next."""
    rng = random.Random(seed)
    found: list[bytes] = []
    while len(found) < count:
        digest = rng.randbytes(16)
        if set(sets_of(digest, GEOMETRY.sets)) == {number, number + 1}:
            found.append(digest)
    return found


def put(table: Table, digest: bytes, rng: random.Random) -> tuple[tuple[int, int, int] | None, Entry]:
    chunk = rng.choice([64, 4096, 1 << 20])
    offset = DATA + rng.randrange((GEOMETRY.data_bytes - chunk) // 64) * 64
    entry = Entry(digest, offset, rng.randint(1, chunk), rng.getrandbits(32), chunk, rng.randrange(256),
                  rng.randrange(2), rng.getrandbits(40))  # fmt: skip
    return table.publish(
        digest, entry.offset, entry.length, entry.crc, entry.chunk, entry.namespace, entry.flags, entry.stored
    ), entry


@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_agrees_with_a_dictionary_over_deaths(memory: mmap.mmap, seed: int) -> None:
    rng = random.Random(seed)
    table = Table(memory, GEOMETRY, 1)
    model: dict[bytes, Entry] = {}
    keys = [rng.randbytes(16) for _ in range(170)]
    full = 0
    for step in range(dosed(3000, quick=1500)):
        digest = rng.choice(keys)
        what = rng.random()
        slot = table.lookup(digest)
        assert (slot >= 0) == (digest in model)
        if what < 0.6:
            seq = seq_of(memory, slot) if slot >= 0 else 0
            done, entry = put(table, digest, rng)
            if done is None:
                full += 1
                assert all(table.offset(each) for each in table.candidates(digest)) and digest not in model
                continue
            old, new, where = done
            assert (old, new) == (model[digest].offset if digest in model else -1, entry.offset)
            assert where in table.candidates(digest) and (slot < 0 or where == slot), "entries never move"
            assert seq_of(memory, where) > seq and not seq_of(memory, where) & 1
            model[digest] = entry
        elif what < 0.95 and slot >= 0:
            seq = seq_of(memory, slot)
            table.clear(slot)
            assert seq_of(memory, slot) > seq and table.lookup(digest) < 0 and table.offset(slot) == 0
            del model[digest]
        elif what < 0.955:
            table = Table(memory, GEOMETRY, table.incarnation + 1)
            assert table.recover() == []
        if step % 100 == 0:
            check(table)
    check(table)
    assert full > 0 and table.entries == len(model) == len(list(table))
    for digest, entry in model.items():
        slot = table.lookup(digest)
        assert table.entry(slot) == entry and table.stored(slot) == entry.stored
    live = table.live()
    assert live.slots.tolist() == list(table)
    assert live.offsets.tolist() == [table.offset(slot) for slot in table]
    assert live.chunks.tolist() == [table.entry(slot).chunk for slot in table]
    assert live.stored.tolist() == [table.stored(slot) for slot in table]
    lost = np.zeros(SHARD_COUNT, bool)
    lost[::3] = True
    found, start = [], 0
    while start < GEOMETRY.slots:
        slots, start = table.of_shards(lost, start)
        found += slots
    assert found == [slot for slot in table if not shard_of(table.entry(slot).digest) % 3]
    assert all(table.shard(slot) == shard_of(table.entry(slot).digest) for slot in table)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_for_old_entries_asks_once_for_each_namespace(memory: mmap.mmap, seed: int) -> None:
    """To ask once for each entry took a block full of them 8 ms, in the middle of a put."""
    rng = random.Random(seed)
    table = Table(memory, GEOMETRY, 1)
    numbers, ends = (0, 7, 300, (1 << 16) - 1), (0, 5, (1 << 32) - 1)
    for place in range(100):
        digest = rng.randbytes(TAG_AT) + rng.choice(ends).to_bytes(4, "little")
        flags = rng.choice([0, ENTRY_EPOCH])
        table.publish(digest, DATA + place * 64, 64, 0, 64, rng.choice(numbers), flags, 0)
    for tags in ({}, {7: 5}, {300: -1}, {0: (1 << 32) - 1, 300: 5, (1 << 16) - 1: -1}):
        expected = []
        for slot in table:
            entry = table.entry(slot)
            tag = int.from_bytes(entry.digest[TAG_AT:], "little")
            if entry.namespace in tags and (tag != tags[entry.namespace] or not entry.flags & ENTRY_EPOCH):
                expected.append(slot)
        counted = CountedDict(tags)
        assert table.stale_from(0, counted) == (expected, GEOMETRY.slots) and bool(expected) == bool(tags)
        assert counted.count <= 3 * len(tags)


def test_both_sets_fill_evenly_and_then_refuse(memory: mmap.mmap) -> None:
    table = Table(memory, GEOMETRY, 1)
    rng = random.Random(1)
    keys = keys_for_set(4, 17)
    for number, digest in enumerate(keys[:16], 1):
        assert put(table, digest, rng)[0] is not None
        used = [sum(slot // WAYS == which for slot in table) for which in (4, 5)]
        assert abs(used[0] - used[1]) <= 1 and sum(used) == number
    assert put(table, keys[16], rng)[0] is None
    check(table)
    table.clear(table.lookup(keys[3]))
    assert put(table, keys[16], rng)[0] is not None
    check(table)


def test_digests_bytes_elsewhere_are_no_hit(memory: mmap.mmap) -> None:
    """The search is for bytes: they may also stand across other fields of a slot, before or behind the entry."""
    table = Table(memory, GEOMETRY, 1)
    digest = keys_for_set(2, 1)[0]
    decoys = keys_for_set(2, 12, seed=5)
    for number, decoy in enumerate(decoys):
        # stored and reserved words are 16 bytes in a row, at 48; crc and chunk words lie before
        table.publish(decoy, DATA + number * 64, 64, 0, 64, 0, 0, int.from_bytes(digest[:8], "little"))
        slot = table.lookup(decoy)
        at = GEOMETRY.slots_offset + slot * SLOT_BYTES + 48
        memory[at : at + 16] = digest
    assert table.lookup(digest) == -1
    assert table.publish(digest, DATA + 4096, 64, 0, 64, 0, 0, 7) is not None
    slot = table.lookup(digest)
    assert table.entry(slot).offset == DATA + 4096
    old = table.publish(digest, DATA + 8192, 64, 0, 64, 0, 0, 7)
    assert old == (DATA + 4096, DATA + 8192, slot)


def test_sequence_numbers_carry_the_incarnation_and_only_grow(memory: mmap.mmap) -> None:
    rng = random.Random(3)
    digest = rng.randbytes(16)
    last = 0
    for incarnation in (1, 2, 7, (1 << 20) - 1):
        table = Table(memory, GEOMETRY, incarnation)
        table.recover()
        for _ in range(3):
            done, _ = put(table, digest, rng)
            assert done is not None
            seq = seq_of(memory, done[2])
            assert seq > last and seq >> SEQ_BITS == incarnation
            last = seq
    check(table)


def test_a_counter_that_runs_over_stays_even(memory: mmap.mmap) -> None:
    table = Table(memory, GEOMETRY, 1)
    rng = random.Random(3)
    digest = rng.randbytes(16)
    done, _ = put(table, digest, rng)
    assert done is not None
    at = GEOMETRY.slots_offset + done[2] * SLOT_BYTES
    memory[at : at + 8] = ((1 << SEQ_BITS) - 2 | 1 << SEQ_BITS).to_bytes(8, "little")
    put(table, digest, rng)
    assert seq_of(memory, done[2]) == 1 << SEQ_BITS
    check(table)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [("seq", 3, "odd"), ("seq", 2 << SEQ_BITS, "later incarnation"), ("offset", 0, "mask"),
     ("low", 1 << 14, "in none of"), ("low", 0, "in none of")],
)  # fmt: skip
def test_check_sees_damage(memory: mmap.mmap, field: str, value: int, text: str) -> None:
    table = Table(memory, GEOMETRY, 1)
    digest = next(d for d in keys_for_set(2, 50) if sets_of(d, GEOMETRY.sets)[0] == 2)
    table.publish(digest, DATA, 64, 0, 64, 0, 0, 1)
    check(table)
    slot = table.lookup(digest)
    at = GEOMETRY.slots_offset + slot * SLOT_BYTES + SLOT_FIELDS.fields[field][1]  # type: ignore[index]
    memory[at : at + 8] = value.to_bytes(8, "little")
    if field == "low":  # and its other half leads elsewhere too
        memory[at + 8 : at + 16] = (10).to_bytes(8, "little")
    with pytest.raises(CorruptionError, match=text):
        check(table)


def test_check_sees_a_digest_twice_and_one_without_a_value(memory: mmap.mmap) -> None:
    table = Table(memory, GEOMETRY, 1)
    digest = keys_for_set(2, 1)[0]
    table.publish(digest, DATA, 64, 0, 64, 0, 0, 1)
    slot = table.lookup(digest)
    other = next(each for each in table.candidates(digest) if each != slot)
    source, target = (GEOMETRY.slots_offset + each * SLOT_BYTES for each in (slot, other))
    memory[target + 8 : target + 24] = digest
    with pytest.raises(CorruptionError, match="has a digest"):
        check(table)
    memory[target : target + SLOT_BYTES] = memory[source : source + SLOT_BYTES]
    table.recover()
    with pytest.raises(CorruptionError, match="twice"):
        check(table)


def test_check_sees_a_wrong_tag_and_what_comes_of_it(memory: mmap.mmap) -> None:
    """The positive control of tags: with a wrong one, the table does not find what it has."""
    table = Table(memory, GEOMETRY, 1)
    digest = keys_for_set(2, 1)[0]
    done = table.publish(digest, DATA, 64, 0, 64, 0, 0, 1)
    assert done is not None
    table._tags[done[2]] ^= 1
    with pytest.raises(CorruptionError, match="another tag"):
        check(table)
    again = table.publish(digest, DATA + 64, 64, 0, 64, 0, 0, 1)
    assert again is not None and again[0] == -1
    with pytest.raises(CorruptionError, match=r"tag|twice"):
        check(table)
    after = Table(memory, GEOMETRY, 2)
    after.recover()
    table._tags[:] = after._tags
    with pytest.raises(CorruptionError, match="twice"):
        check(table)


def test_an_overwrite_gives_the_slot_the_tag_of_its_digest(memory: mmap.mmap) -> None:
    """Somebody else has put the digest there: the slot's tag is another one's until then."""
    table = Table(memory, GEOMETRY, 1)
    first, stray, *others = keys_for_set(2, 2000)
    beside = next(each for each in others if each[7] == stray[7])  # so that the table looks at the digests
    assert first[7] != stray[7]
    for digest in (first, beside):
        assert table.publish(digest, DATA, 64, 0, 64, 0, 0, 1) is not None
    slot = table.lookup(first)
    start = GEOMETRY.slots_offset + slot * SLOT_BYTES + 8
    memory[start : start + 16] = stray
    done = table.publish(stray, DATA + 64, 64, 0, 64, 0, 0, 1)
    assert done is not None and done[2] == slot
    again = table.publish(stray, DATA + 128, 64, 0, 64, 0, 0, 1)
    assert again == (DATA + 64, DATA + 128, slot)
    check(table)


def test_tags_of_a_successor_are_those_of_its_predecessor(memory: mmap.mmap) -> None:
    rng = random.Random(2)
    table = Table(memory, GEOMETRY, 1)
    digests = [rng.randbytes(16) for _ in range(100)]
    for digest in digests:
        put(table, digest, rng)
    for digest in digests[::3]:
        if (slot := table.lookup(digest)) >= 0:
            table.clear(slot)
    after = Table(memory, GEOMETRY, 2)
    assert after.recover() == []
    check(after)
    assert [after._tags[slot] for slot in after] == [table._tags[slot] for slot in table]
    for digest in digests[1::3]:
        if after.lookup(digest) >= 0:
            done, _ = put(after, digest, rng)
            assert done is not None and done[0] >= 0
    check(after)


def test_geometry_bounds_what_recovery_takes(memory: mmap.mmap) -> None:
    """The last chunk that fits is kept, one 64 bytes further is dropped."""
    table = Table(memory, GEOMETRY, 1)
    first, second = keys_for_set(2, 2)
    table.publish(first, GEOMETRY.data_end - 4096, 4096, 0, 4096, 0, 0, 1)
    table.publish(second, GEOMETRY.data_end - 4096 + 64, 4096, 0, 4096, 0, 0, 1)
    again = Table(memory, GEOMETRY, 2)
    assert len(again.recover()) == 1
    assert again.lookup(first) >= 0 and again.lookup(second) < 0
    check(again)


@pytest.mark.parametrize("how", ["overwrite", "clear", "clear many", "first write"])
def test_issue_a_slot_that_a_stray_store_has_made_odd_is_even_after_the_next_write(
    memory: mmap.mmap, how: str
) -> None:
    """It kept its parity, so no reader believed the slot until the worker was restarted."""
    table = Table(memory, GEOMETRY, 1)
    rng = random.Random(how)
    digests = [rng.randbytes(16) for _ in range(COLUMNS_FROM)]
    if how == "first write":
        slots = table.candidates(digests[0])
    else:
        assert all(put(table, digest, rng)[0] is not None for digest in digests)
        slots = [table.lookup(digest) for digest in digests]
    before = [seq_of(memory, slot) | 1 for slot in slots]
    for slot, seq in zip(slots, before):
        table._words[slot * SLOT_WORDS] = seq
    if how == "first write":
        done, _ = put(table, digests[0], rng)
        assert done is not None
        slots, before = [done[2]], [1]
    elif how == "overwrite":
        assert all(put(table, digest, rng)[0] is not None for digest in digests)
    elif how == "clear":
        for slot in slots:
            table.clear(slot)
    else:
        table.clear_many(slots, [table.offset(slot) for slot in slots])
    after = [seq_of(memory, slot) for slot in slots]
    assert not any(seq & 1 for seq in after)
    assert all(seq & SEQ_MASK == (was & SEQ_MASK) + 1 for seq, was in zip(after, before)), "and newer ones"
