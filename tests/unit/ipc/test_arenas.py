"""One pass over several arenas against a search of each, over tables as they come and as they must not be."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from simm.arena.hashing import SHARD_MASK, Hasher
from simm.arena.layout import ENTRY_BOUND, ENTRY_CRC, FLAGS_WORD, SLOT_WORDS, SOME_BOUND, Word
from simm.arena.reader import ArenaReader
from simm.arena.store import Store
from simm.ipc.arenas import Arenas, Columns
from simm.wire.shard_set import FROZEN
from tests.support.store_world import new_segment, remove_segment

digest_of = Hasher("arenas")
#: Of each arena. They differ, so a wrong place shows.
SLOTS = (512, 2048, 1024)
#: Of an entry, whose namespace is the reader's or another one.
FLAGS = (0, 0, ENTRY_CRC, ENTRY_BOUND, ENTRY_BOUND | ENTRY_CRC)


@pytest.fixture
def arenas() -> Iterator[list[tuple[Store, ArenaReader]]]:
    segments = [new_segment((16 + 2 * at) << 20, slots) for at, slots in enumerate(SLOTS)]
    stores = [Store.create(segment.mm, slots=slots) for segment, slots in zip(segments, SLOTS)]
    for store in stores:
        store.open()
    made = [(store, ArenaReader(segment.name, cluster=7)) for store, segment in zip(stores, segments)]
    try:
        yield made
    finally:
        made.clear()
        for store, segment in zip(stores, segments):
            store.release()
            remove_segment(segment)


def fill(store: Store, digests: list[bytes], rng: random.Random) -> None:
    """Store the digests, in shards of all kinds, so densely that second sets are used and some find no room."""
    for shard in range(len(store.shards)):
        store.shards[shard] = rng.choice([0, 1, 7, FROZEN - 1, FROZEN, FROZEN | 7, 5])
    store.header[Word.BOUND] = SOME_BOUND
    for number, digest in enumerate(digests):
        offset = store.geometry.data_offset + 4096 * (number % 100)
        store.table.publish(digest, offset, 100, 0, 4096, rng.randrange(2), rng.choice(FLAGS), 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_finds_what_searches_of_each_arena_find(arenas: list[tuple[Store, ArenaReader]], seed: int) -> None:
    rng = random.Random(seed)
    digests = [digest_of(f"{seed}.{number}") for number in range(1500)]
    digests += [digest[:8] + rng.randbytes(8) for digest in digests[:50] * 3]  # as a client may make them up
    for store, _ in arenas:
        fill(store, [digest for digest in digests if rng.random() < 0.6], rng)
    arenas[1][0].header[Word.CLUSTER] = rng.choice([0, 7, 8])  # 8 is another cluster's
    readers = [reader for _, reader in arenas]
    for reader in readers:
        reader.namespace = 1
    for count in (1, 3, 40, 500):
        batch = rng.choices(digests, k=count)
        which = np.array([rng.randrange(len(readers)) for _ in batch])
        keys = Columns(batch)
        found = Arenas(readers, which).slots_of(keys).tolist()
        expected = [readers[at].slots_of_many([digest])[0] for at, digest in zip(which, batch)]
        assert found == expected
        assert count < 40 or (-1 in found and max(found) >= 0)
        for reader in readers:
            reader.visited[:] = bytes(len(reader.visited))
        singly = [readers[at].contains_many([digest])[0] for at, digest in zip(which, batch)]
        seen = [bytes(reader.visited) for reader in readers]
        for reader in readers:
            reader.visited[:] = bytes(len(reader.visited))
        hits, words = Arenas(readers, which).contain(keys)
        asked = [(readers[at], digest) for at, digest in zip(which, batch)]
        foreign = [reader.has_current(digest) and not reader.has_own(digest) for reader, digest in asked]
        assert not any(hits[foreign]) and (count < 500 or any(foreign))
        assert hits.tolist() == singly
        assert [bytes(reader.visited) for reader in readers] == seen
        assert words.tolist() == [
            readers[at].words[4096 // 8 + (int.from_bytes(digest[:2], "little") & SHARD_MASK)]
            for at, digest in zip(which, batch)
        ]


def test_nothing_but_the_arenas_of_the_call_is_kept_mapped(arenas: list[tuple[Store, ArenaReader]]) -> None:
    """An arena that a module or an object keeps has no room for its successor."""
    reader = arenas[0][1]
    before = sys.getrefcount(reader)
    passed = Arenas([reader], np.zeros(20, np.intp))
    passed.contain(Columns([digest_of(str(number)) for number in range(20)]))
    assert sys.getrefcount(reader) > before
    del passed
    assert sys.getrefcount(reader) == before


def test_issue_what_a_bound_client_overwrites_is_no_moment_another_namespaces(
    arenas: list[tuple[Store, ArenaReader]]
) -> None:
    """The worker clears the flags before it stores them again, with an odd seq."""
    digests = [digest_of(f"bound {number}") for number in range(12)]
    which = np.arange(len(digests)) % len(arenas)
    for store, reader in arenas:
        store.shards[:] = memoryview(b"\1\0\0\0\0\0\0\0" * len(store.shards)).cast("Q")
        store.header[Word.BOUND], reader.namespace = SOME_BOUND, 1
        for digest in digests:
            offset = store.geometry.data_offset
            assert store.table.publish(digest, offset, 100, 0, 4096, 2, ENTRY_BOUND, 1) is not None
            at = store.table.lookup(digest) * SLOT_WORDS
            store.table._words[at] |= 1
            store.table._words[at + FLAGS_WORD] = 0
    found = Arenas([reader for _, reader in arenas], which).contain(Columns(digests))[0].tolist()
    assert found == [False] * len(digests)
