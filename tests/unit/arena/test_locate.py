"""Batches that are looked up and pinned by column, against one key after the other."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from simm.arena.hashing import EpochHasher, shard_of
from simm.arena.layout import ENTRY_CRC, ENTRY_LARGE, SLOT_FIELDS
from simm.arena.lookups import locate as module
from simm.arena.sessions import FAIR, Session
from simm.arena.store import Store
from simm.errors import CorruptionError
from simm.slab import chunk_bytes_for
from simm.wire.messages import BOUND, NAMESPACE_SHIFT, Status
from simm.wire.shard_set import bitmap_of, shards_in
from tests.support.consistency import check
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, digest_of, owned

BATCH = 4 * module.COLUMNS_FROM


def join(store: Store, name: str = "default") -> Session:
    return store.sessions.open(os.getpid(), 1, name, False)


def put(store: Store, session: Session, digest: bytes, size: int, *, flags: int = 0, options: int = 0) -> None:
    ((grant, *_),) = store.sessions.grant(session, size, 1)
    assert store.commit(session, [(digest, grant, size, 7 * size, flags, options)]) == [Status.OK]
    store.apply_pending()


def one_by_one(store: Store, session: Session | None, digests: list[bytes]) -> list[tuple[int, ...]]:
    return [store.locate(session, [digest])[0] for digest in digests]


def without_pins(answers: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [answer[:5] for answer in answers]


@pytest.fixture
def crowd(store: Store) -> tuple[Store, Session, list[bytes]]:
    """A store with entries of every kind, one of whose shards is another worker's, and keys of all of them."""
    mine, other = join(store), join(store, "another")
    other.relays = True  # as a stream, which stores for clients that are bound to a namespace
    rng = random.Random(5)
    keys = [digest_of(f"k{number}") for number in range(BATCH)]
    gone = shard_of(keys[3])
    set_shards(store, 2, *owned(bitmap_of([shard for shard in shards_in(ALL_SHARDS) if shard != gone]), 2))
    for number, digest in enumerate(keys):
        if shard_of(digest) == gone or number % 7 == 0:
            continue  # not stored
        options = other.namespace + 1 << NAMESPACE_SHIFT | BOUND if number % 11 == 1 else 0
        flags = rng.choice((0, ENTRY_CRC, ENTRY_LARGE))
        put(store, other if options else mine, digest, rng.choice((1, 64, 5000, 70_000)), flags=flags, options=options)
    return store, mine, [*keys, bytes(16), keys[5], keys[5]]


def test_columns_answer_as_one_key_after_the_other(crowd: tuple[Store, Session, list[bytes]]) -> None:
    store, session, keys = crowd
    expected = one_by_one(store, None, keys)
    assert store.locate(None, keys) == expected
    statuses = {status for status, *_ in expected}
    assert statuses == {Status.OK, Status.NOT_FOUND, Status.WRONG_OWNER}, "the control: there is all of it"
    pinned = store.locate(session, keys)
    foreign = [first[0] != second[0] for first, second in zip(expected, pinned)]
    assert any(foreign) and not all(foreign), "the control: what another namespace has stored is not pinned"
    store.sessions.unpin(session, list(session.pins))
    assert without_pins(pinned) == without_pins(one_by_one(store, session, keys))
    check(store)


def test_columns_pin_what_they_answer(crowd: tuple[Store, Session, list[bytes]]) -> None:
    """Each pin is a line of the ledger, keeps its chunk, and ends alone; two pins of one value are two."""
    store, session, keys = crowd
    answers = [answer for answer in store.locate(session, keys) if answer[0] == Status.OK]
    pins = [answer[5] for answer in answers]
    assert len(set(pins)) == len(pins) == len(session.pins) and len(answers) > module.COLUMNS_FROM
    lines = {line.hold: (line.session, line.offset, line.chunk) for _, line in store.ledger.holds()}
    for _, _, length, _, offset, pin in answers:
        assert lines[pin] == (session.session, offset, chunk_bytes_for(length))
        assert store.space.is_held(offset - store.geometry.data_offset)
    total = sum(chunk for _, _, chunk in lines.values())
    assert session.pinned_bytes == store.sessions.pinned_bytes == total
    free = store.space.free_bytes
    store.delete([keys[5]])
    assert store.space.free_bytes == free, "pinned three times"
    check(store)
    assert store.sessions.unpin(session, [*pins, *pins, 12345]) == len(pins)
    assert store.space.free_bytes > free and not session.pins and not store.sessions.pinned_bytes
    check(store)


def test_a_batch_that_does_not_fit_is_pinned_as_far_as_it_does(store: Store) -> None:
    session, late = join(store), join(store, "late")
    size = 30_000
    keys = [digest_of(f"p{number}") for number in range(120)]
    store.sessions.pinned_bytes_max = 100 * chunk_bytes_for(size)
    for digest in keys:
        put(store, session, digest, size)
    got = [status for status, *_ in store.locate(session, keys)]
    fits = 100 * FAIR // (FAIR + 1)
    assert got == [Status.OK] * fits + [Status.NO_SPACE] * (len(keys) - fits)
    assert [status for status, *_ in store.locate(late, keys)].count(Status.OK) == 20 * FAIR // (FAIR + 1)
    check(store)


def test_no_more_lines_are_taken_than_a_session_may_have(store: Store) -> None:
    session = join(store)
    put(store, session, digest_of("k"), 64)
    got: list[int] = []
    while Status.NO_SPACE not in got:
        got += [status for status, *_ in store.locate(session, [digest_of("k")] * BATCH)]
    assert len(session.pins) == got.count(Status.OK)
    left = store.ledger.free_holds
    assert FAIR * left <= len(session.pins) < FAIR * (left + 1) + 1
    check(store)


def test_columns_find_nothing_of_an_old_epoch(store: Store) -> None:
    store.ledger.namespaces.clock = lambda: 10
    store.ledger.namespaces.take_epochs({"rl": 3})
    store.ledger.namespaces.extend_lease(20)
    session = join(store, "rl")
    old = EpochHasher("rl", 3).many([f"k{number}" for number in range(BATCH)])
    for digest in old:
        put(store, session, digest, 100)
    assert {status for status, *_ in store.locate(None, old)} == {Status.OK}
    assert store.locate(None, old) == one_by_one(store, None, old)
    store.ledger.namespaces.clock = lambda: 20
    assert {status for status, *_ in store.locate(session, old)} == {Status.NOT_FOUND}, "the lease has ended"
    store.ledger.namespaces.clock = lambda: 10
    store.ledger.namespaces.take_epochs({"rl": 4})
    assert {status for status, *_ in store.locate(session, old)} == {Status.NOT_FOUND}
    new = EpochHasher("rl", 4).many([f"k{number}" for number in range(BATCH)])
    put(store, session, new[0], 100)
    assert [status for status, *_ in store.locate(session, [*old, *new])].count(Status.OK) == 1
    assert not store.locate(session, old)[0][5]


@pytest.mark.parametrize("word", ["offset", "length", "chunk"])
def test_a_slot_that_names_other_bytes_ends_the_worker(store: Store, word: str) -> None:
    session = join(store)
    keys = [digest_of(f"k{number}") for number in range(BATCH)]
    for digest in keys:
        put(store, session, digest, 500)
    slot = store.table.lookup(keys[BATCH // 2])
    kept = store.table._slots[slot * 64 : slot * 64 + 64].tobytes()
    row = np.frombuffer(store.table._slots, SLOT_FIELDS, 1, slot * 64)
    row[word] += 4096
    with pytest.raises(CorruptionError, match=f"slot {slot} names other bytes"):
        store.locate(session, keys)
    store.table._slots[slot * 64 : slot * 64 + 64] = kept
    del row



