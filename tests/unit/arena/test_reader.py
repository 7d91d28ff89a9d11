"""A reader's forms for batches against those for one key, over tables as they come and as they must not be."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from simm.arena.hashing import SHARD_BITS, Hasher, sets_of
from simm.arena.layout import (
    ENTRY_BOUND,
    ENTRY_CRC,
    ENTRY_LARGE,
    FLAGS_WORD,
    NONE_BOUND,
    SLOT_WORDS,
    SOME_BOUND,
    Word,
)
from simm.arena.lookups.bound import doubtful, is_unbound
from simm.arena.reader import EACH_KEYS, VECTOR_KEYS, ArenaReader, Unsettled, guard, words_of
from simm.arena.store import Store
from simm.sdk.ops.prefix import stored_length, stored_many
from simm.table import Table
from simm.wire.shard_set import FROZEN
from tests.support.store_world import new_segment, remove_segment

SIZE = 16 << 20
digest_of = Hasher("reader")


@pytest.fixture
def arena() -> Iterator[tuple[Store, ArenaReader]]:
    segment = new_segment(SIZE, 2048)
    store = Store.create(segment.mm, slots=2048)
    store.open()
    reader = ArenaReader(segment.name)
    try:
        yield store, reader
    finally:
        del reader
        store.release()
        remove_segment(segment)


def put(table: Table, digest: bytes, offset: int) -> bool:
    return table.publish(digest, offset, 100, 0, 4096, 0, 0, 1) is not None


def agree(reader: ArenaReader, digests: list[bytes]) -> tuple[list[int], list[bool]]:
    """The batch's answers, which are those of single calls, visited bytes included."""
    slots = reader.slots_of_many(digests)
    found = [reader.locate(digest) for digest in digests]
    assert slots == [-1 if each is None else each.slot for each in found]
    reader.visited[:] = bytes(len(reader.visited))
    singly = [reader.contains(digest) for digest in digests]
    seen = bytes(reader.visited)
    reader.visited[:] = bytes(len(reader.visited))
    assert reader.contains_many(digests) == singly
    assert bytes(reader.visited) == seen
    if digests:
        hits, words = reader.contain(digests)
        assert hits.tolist() == singly and words.tolist() == [reader.shard_word(digest) for digest in digests]
    return slots, singly


def test_a_key_that_is_overwritten_is_there_at_every_moment(
    arena: tuple[Store, ArenaReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pack_into`` clears all bytes that it packs, and the kernel may stop the worker then, for a time slice."""
    store, reader = arena
    table, digest = store.table, digest_of("k")
    store.shards[int.from_bytes(digest[:2], "little") & len(store.shards) - 1] = 1
    assert put(table, digest, reader.data_offset) and reader.contains(digest)
    seen: list[str] = []

    def stopped(name: str) -> None:
        pack = getattr(table, name)
        size = pack.__self__.size

        def packed(buffer: memoryview, at: int, *fields: object) -> None:
            buffer[at : at + size] = bytes(size)
            seen.append(name)
            if len(seen) == 1:
                assert reader.contains(digest) and reader.contains_many([digest] * EACH_KEYS) == [True] * EACH_KEYS
                with pytest.raises(Unsettled):
                    reader.locate(digest)
            pack(buffer, at, *fields)

        monkeypatch.setattr(table, name, packed)

    stopped("_pack_body")
    stopped("_pack_value")
    assert put(table, digest, reader.data_offset + 4096) and put(table, digest_of("l"), reader.data_offset + 8192)
    assert seen == ["_pack_value", "_pack_body"]


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_finds_what_single_calls_find(arena: tuple[Store, ArenaReader], seed: int) -> None:
    store, reader = arena
    rng = random.Random(seed)
    table, words = store.table, store.shards
    for shard in range(len(words)):
        words[shard] = rng.choice([0, 1, 7, FROZEN - 1, FROZEN, FROZEN | 7, 5])
    digests = [digest_of(f"{seed}.{number}") for number in range(1700)]  # so full that second sets are used
    inside: list[bytes] = []
    offset = store.geometry.data_offset
    for digest in digests:
        if rng.random() < 0.9 and put(table, digest, offset):
            inside.append(digest)
            offset += 4096
        if inside and rng.random() < 0.1:
            table.clear(table.lookup(inside.pop(rng.randrange(len(inside)))))
    first = [sets_of(digest, table.geometry.sets)[0] for digest in inside]
    assert any(table.lookup(digest) // 8 != which for digest, which in zip(inside, first))
    for _ in range(20):
        batch = rng.choices(digests, k=rng.choice([1, VECTOR_KEYS - 1, VECTOR_KEYS, 128, 500]))
        slots, there = agree(reader, batch)
        assert {digest for digest, slot in zip(batch, slots) if slot >= 0} == set(batch) & set(inside)
        for digest, hit in zip(batch, there):
            word = words[int.from_bytes(digest[:2], "little") & len(words) - 1]
            assert hit == (digest in inside and 0 < word < FROZEN)


def test_a_batch_finds_digests_whose_two_sets_would_be_one(arena: tuple[Store, ArenaReader]) -> None:
    """The second set is the next one then. So many share a set here that half of them lie in it."""
    store, reader = arena
    sets = store.table.geometry.sets
    for shard in range(len(store.shards)):
        store.shards[shard] = 1
    first = sets - 1  # the next one is the table's first
    digests = []
    for number in range(12):
        low = (number * sets + first) << SHARD_BITS | number
        digests.append(low.to_bytes(8, "little") + (number * sets + first).to_bytes(8, "little"))
    for number, digest in enumerate(digests):
        assert sets_of(digest, sets) == (first, 0)
        assert put(store.table, digest, store.geometry.data_offset + 4096 * number)
    others = [digest_of(f"other {number}") for number in range(500)]
    slots, there = agree(reader, digests + others)
    assert there == [True] * 12 + [False] * 500 and {slot // 8 for slot in slots[:12]} == {first, 0}


def lengths(reader: ArenaReader, digests: list[bytes]) -> list[int]:
    """What is stored for certain: the batch's answers, which are those of single calls. Nothing is marked as used."""
    before = bytes(reader.visited)
    found = [stored_length(reader, digest) for digest in digests]
    assert stored_many(reader, digests).tolist() == found
    assert bytes(reader.visited) == before
    return found


@pytest.mark.parametrize("seed", range(4))
def test_what_is_stored_for_certain(arena: tuple[Store, ArenaReader], seed: int) -> None:
    """Entries in a write, of shards that are not owned, and of clients bound to another namespace do not count."""
    store, reader = arena
    rng = random.Random(f"certain {seed}")
    table, words = store.table, store.shards
    for shard in range(len(words)):
        words[shard] = rng.choice([0, 1, FROZEN - 1, FROZEN | 7, 5, 5, 5])
    reader.namespace = 3
    digests = [digest_of(f"certain {seed}.{number}") for number in range(900)]
    expected = {}
    for number, digest in enumerate(digests):
        kind = rng.choice(["absent", "plain", "bound", "own", "writing"])
        word = words[int.from_bytes(digest[:2], "little") & len(words) - 1]
        owned = 0 < word < FROZEN
        length = number % 4096 + 1
        if kind != "absent":
            flags = ENTRY_BOUND if kind in ("bound", "own") else 0
            namespace = 3 if kind == "own" else 4
            offset = store.geometry.data_offset + 4096 * number
            assert table.publish(digest, offset, length, 0, 4096, namespace, flags, 1) is not None
        if kind == "writing":
            table._words[table.lookup(digest) * SLOT_WORDS] |= 1
        expected[digest] = length if owned and kind in ("plain", "own") else 0
    for _ in range(10):
        batch = rng.choices(digests, k=rng.choice([1, VECTOR_KEYS, 400]))
        assert lengths(reader, batch) == [expected[digest] for digest in batch]
    writing = [each for each in digests if table.lookup(each) >= 0 and not expected[each] and reader.contains(each)]
    assert writing, "contains() says of an entry in a write that it is there"
    store.header[Word.CLUSTER] = 9
    reader._clusters, reader._cluster = frozenset((8,)), 8
    assert not any(lengths(reader, digests))


@pytest.mark.parametrize("count", [1, EACH_KEYS - 1, EACH_KEYS, 500])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("said", [SOME_BOUND, 0])
def test_what_another_namespaces_client_has_stored_is_not_contained(
    arena: tuple[Store, ArenaReader], monkeypatch: pytest.MonkeyPatch, guarded: bool, count: int, said: int
) -> None:
    """No get returns it, nor in an arena of an older build, whose header does not say whether there are any.

    A stream finds it, which has clients of all namespaces; and others' flags cost no look.
    """
    store, reader = arena
    store.shards[:] = memoryview(b"\1\0\0\0\0\0\0\0" * len(store.shards)).cast("Q")
    reader.namespace = 3
    if guarded:
        guard(reader)
    digests = [digest_of(f"apart {number}") for number in range(count)]
    kinds = [(0, 3), (0, 4), (ENTRY_BOUND, 3), (ENTRY_BOUND | ENTRY_CRC, 4), (ENTRY_CRC | ENTRY_LARGE, 4), None]
    kinds = kinds[3:4] if count == 1 else kinds * (count // len(kinds) + 1)
    store.header[Word.BOUND] = said
    for number, (digest, kind) in enumerate(zip(digests, kinds)):
        if kind is not None:
            flags, namespace = kind
            offset = store.geometry.data_offset + 4096 * number
            assert store.table.publish(digest, offset, 100, 0, 4096, namespace, flags, 1) is not None
    looked: list[bytes] = []
    has_own = ArenaReader.has_own
    monkeypatch.setattr(ArenaReader, "has_own", lambda self, each: looked.append(each) or has_own(self, each))
    there = [kind is not None and not (kind[0] & ENTRY_BOUND and kind[1] == 4) for kind in kinds[:count]]
    slots, singly = agree(reader, digests)
    assert singly == there == [reader.contains_previous(digest) for digest in digests]
    assert {*looked} == {digest for digest, kind in zip(digests, kinds) if kind and kind[0] & ENTRY_BOUND}
    used = [slot >= 0 and bool(reader.visited[slot]) for slot in slots]
    assert used == there, "who may not read it keeps it from no eviction"
    if not guarded:
        for epochs in (False, True):
            monkeypatch.setattr(ArenaReader, "has_epochs", epochs)
            assert reader.current_many(digests) == there
            asked: list[bytes] = []
            every = [kind is not None for kind in kinds[:count]]
            own = functools.partial(_is_noted, asked)
            assert reader.current_many(digests, own) == every, "a stream says whose they are, and of no others"
            assert {*asked} == {digest for digest, kind in zip(digests, kinds) if kind and kind[0] & ENTRY_BOUND}


def _is_noted(asked: list[bytes], digest: bytes) -> bool:
    asked.append(digest)
    return True


def test_what_is_written_where_there_are_bound_clients_is_not_contained(arena: tuple[Store, ArenaReader]) -> None:
    """Unlike where there are none: nobody can say whose it is."""
    store, reader = arena
    store.shards[:] = memoryview(b"\1\0\0\0\0\0\0\0" * len(store.shards)).cast("Q")
    reader.namespace = 3
    plain, bound = digest_of("plain"), digest_of("bound")
    store.header[Word.BOUND] = SOME_BOUND
    for digest, flags in ((plain, 0), (bound, ENTRY_BOUND)):
        assert store.table.publish(digest, store.geometry.data_offset, 100, 0, 4096, 3, flags, 1) is not None
    assert agree(reader, [plain, bound])[1] == [True, True]
    for digest in (plain, bound):
        store.table._words[store.table.lookup(digest) * SLOT_WORDS] |= 1
    for each in (1, EACH_KEYS):
        assert reader.contains_many([plain, bound] * each) == [False, False] * each
    assert not reader.contains(plain) and not reader.contains(bound)
    store.header[Word.BOUND] = NONE_BOUND
    assert reader.contains(plain) and reader.contains_many([plain] * EACH_KEYS) == [True] * EACH_KEYS


def test_issue_what_a_bound_client_overwrites_is_no_moment_another_namespaces(
    arena: tuple[Store, ArenaReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pack_into`` clears the flags first, and ``exists`` said yes to all others meanwhile. A get returned nothing."""
    store, reader = arena
    store.shards[:] = memoryview(b"\1\0\0\0\0\0\0\0" * len(store.shards)).cast("Q")
    reader.namespace = 3
    store.header[Word.BOUND] = SOME_BOUND
    table, digest = store.table, digest_of("bound")
    entry = digest, reader.data_offset, 100, 0, 4096, 4, ENTRY_BOUND, 1
    assert table.publish(*entry) is not None
    looked: list[bytes] = []
    has_own = ArenaReader.has_own
    monkeypatch.setattr(ArenaReader, "has_own", lambda self, each: looked.append(each) or has_own(self, each))
    real, seen = table._pack_value, []

    def packed(buffer: memoryview, at: int, *fields: object) -> None:
        buffer[at : at + real.__self__.size] = bytes(real.__self__.size)
        seen.append(reader.contains(digest))
        for count in (1, EACH_KEYS):
            seen.extend(reader.contains_many([digest] * count))
        assert len(looked) == len(seen)
        real(buffer, at, *fields)

    monkeypatch.setattr(table, "_pack_value", packed)
    assert table.publish(*entry) is not None
    assert len(seen) == 2 + EACH_KEYS and not any(seen)
    assert not reader.contains(digest)
    reader.namespace = 4
    assert agree(reader, [digest])[1] == [True]


def test_flags_are_believed_of_the_key_alone_that_has_the_slot(arena: tuple[Store, ArenaReader]) -> None:
    """Between the search and the look at the flags another key may have got the slot."""
    store, reader = arena
    digest, other = digest_of("bound"), digest_of("other")
    assert store.table.publish(digest, reader.data_offset, 100, 0, 4096, 4, ENTRY_BOUND, 1) is not None
    slot = store.table.lookup(digest)
    hits, at = np.ones(1, bool), np.array([slot * SLOT_WORDS])
    words = reader._np_slots
    first = reader._slot_word + slot * SLOT_WORDS
    for flags, sure in ((0, True), (ENTRY_BOUND, False)):
        store.table._words[slot * SLOT_WORDS + FLAGS_WORD] = 4 << 32 | flags << 48
        for asked in (digest, other):
            keys = words_of([asked])
            assert is_unbound(reader._meta, reader.words, 8 * first, asked) == (sure and asked == digest)
            assert doubtful(hits, words, at, keys[:, 0], keys[:, 1]) == ([] if sure and asked == digest else [0])
    store.table._words[slot * SLOT_WORDS + FLAGS_WORD] = 4 << 32
    seq = reader.words[first]
    for before, after in ((seq, seq), (seq, seq + 2), (seq, seq + 1), (seq + 1, seq + 1)):
        store.table._words[slot * SLOT_WORDS] = before
        assert is_unbound(reader._meta, cast(memoryview, {first: after}), 8 * first, digest) == (before == after == seq)


def test_issue_a_slot_that_was_made_odd_is_read_again_after_the_next_put(arena: tuple[Store, ArenaReader]) -> None:
    store, reader = arena
    digest = digest_of("odd")
    assert put(store.table, digest, reader.data_offset)
    store.table._words[store.table.lookup(digest) * SLOT_WORDS] |= 1  # a stray store
    with pytest.raises(Unsettled):
        reader.locate(digest)
    assert put(store.table, digest, reader.data_offset + 4096)
    found = reader.locate(digest)
    assert found is not None and found.offset == reader.data_offset + 4096


def test_half_a_digest_is_no_digest(arena: tuple[Store, ArenaReader]) -> None:
    """Entries that share one of the two words, in either set, and words of other fields that look like one."""
    store, reader = arena
    table = store.table
    store.shards[:] = memoryview(b"\1\0\0\0\0\0\0\0" * len(store.shards)).cast("Q")
    offset = store.geometry.data_offset
    asked: list[bytes] = []
    for number in range(VECTOR_KEYS):
        digest = digest_of(f"half {number}")
        other = digest_of(f"other {number}")
        assert put(table, digest, offset + 4096 * number)
        asked += [digest, digest[:8] + other[8:], other[:8] + digest[8:]]
    slots, there = agree(reader, asked)
    assert [slot >= 0 for slot in slots] == there == [True, False, False] * VECTOR_KEYS
    # The low word of one digest as another slot's size or time says nothing.
    slot = slots[0]
    view = memoryview(store.table._slots).cast("Q")
    empty = next(at for at in range(slot // 8 * 8, slot // 8 * 8 + 8) if at != slot)
    view[empty * SLOT_WORDS + 3] = view[slot * SLOT_WORDS + 1]
    assert reader.slots_of_many(asked)[0] == slot
    view.release()


def test_entries_that_share_a_low_word_do_not_hide_each_other(arena: tuple[Store, ArenaReader]) -> None:
    """No two hashes do, but a client that knows one can make up another, which then came before it in its set."""
    store, reader = arena
    table = store.table
    store.shards[:] = memoryview(b"\1\0\0\0\0\0\0\0" * len(store.shards)).cast("Q")
    rng = random.Random(5)
    groups = [[digest_of(f"hidden {number}")] for number in range(40)]
    for group in groups:
        group += [group[0][:8] + rng.randbytes(8) for _ in range(rng.randrange(1, 11))]
        rng.shuffle(group)
    offset = store.geometry.data_offset
    inside = {each for group in groups for each in group if put(table, each, offset)}
    everything = [each for group in groups for each in group]
    absent = [group[0][:8] + rng.randbytes(8) for group in groups]
    for _ in range(5):
        batch = rng.sample(everything + absent, 200)
        slots, there = agree(reader, batch)
        assert [slot >= 0 for slot in slots] == there == [each in inside for each in batch]
    assert len(inside) > 200


def test_a_batch_of_strangers_finds_nothing(arena: tuple[Store, ArenaReader]) -> None:
    _, reader = arena
    strangers = [os.urandom(16) for _ in range(200)]
    assert agree(reader, strangers) == ([-1] * 200, [False] * 200)


def column(reader: ArenaReader, digest: bytes, slot: int) -> tuple[bool, int]:
    """Whether a batch takes this entry for settled, and the length that it copies then."""
    found = reader.locate_many(words_of([digest]), np.array([slot]))
    return bool(found.settled[0]), int(found.lengths[0])


def test_a_slot_that_leads_out_of_the_data_is_no_value(arena: tuple[Store, ArenaReader]) -> None:
    """A process that may write the arena may scribble on its slots. No reader touches memory that is not the data."""
    store, reader = arena
    begin, end = reader.data_offset, reader.data_end
    assert begin < end < reader.geometry.size
    for number, (offset, length, inside) in enumerate([
        (begin, 1, True), (end - 100, 100, True), (begin, end - begin, True),
        (begin - 1, 1, False), (end - 99, 100, False), (end, 1, False), (begin, end - begin + 1, False),
        (begin, (1 << 32) - 1, False), (0, 100, False), (1 << 40, 100, False), ((1 << 64) - 1, 100, False),
    ]):  # fmt: skip
        digest = digest_of(f"scribble {number}")
        assert store.table.publish(digest, offset, length, 0, 4096, 0, 0, 1) is not None
        slot = store.table.lookup(digest)
        if inside:
            found = reader.locate(digest)
            assert found is not None and (found.offset, found.length) == (offset, length)
            assert len(reader.value(found)) == length
            assert column(reader, digest, slot) == (True, length)
        else:
            assert column(reader, digest, slot) == (False, 0), "nor does a batch"
            with pytest.raises(Unsettled):
                reader.locate(digest)
