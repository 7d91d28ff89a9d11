"""Grants in numbers, and grants that come with the next answer: against the same done one by one."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import pytest

from simm.errors import CorruptionError
from simm.hashing import Hasher
from simm.layout import Geometry
from simm.ledger import HoldKind, Ledger
from simm.messages import Status
from simm.session import AHEAD_MAX, ahead
from simm.shm import OwnedSegment
from simm.shmput import TOP_UP, wanted
from simm.slab import SLAB_BYTES, Allocator
from simm.store import PREPARED_ANSWER_MAX, Session, Store

SEGMENT_BYTES = 16 << 20
digest_of = Hasher("prepared")


@pytest.fixture(scope="module")
def segment() -> Iterator[OwnedSegment]:
    made = OwnedSegment.create(f"simm-prepared-{os.getpid()}", SEGMENT_BYTES)
    try:
        made.populate()
        yield made
    finally:
        made.unlink()


@pytest.fixture
def store(segment: OwnedSegment) -> Iterator[Store]:
    segment.mm[: Geometry.plan(SEGMENT_BYTES).data_offset] = bytes(Geometry.plan(SEGMENT_BYTES).data_offset)
    made = Store.create(segment.mm)
    made.set_shards(1, b"\xff" * 2048)
    made.open()
    yield made
    made.check()
    made.release()


def put(store: Store, session: Session, key: str, grant: int, length: int = 4096) -> int:
    return store.commit(session, [(digest_of(key), grant, length, 0, 0, 0)])[0]


# -- many at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_alloc_many_is_alloc_many_times(seed: int) -> None:
    rng = random.Random(seed)
    one, many = Allocator(8 * SLAB_BYTES), Allocator(8 * SLAB_BYTES)
    live: list[int] = []
    for turn in range(300):
        if live and rng.random() < 0.45:
            for _ in range(min(len(live), rng.randrange(1, 40))):
                offset = live.pop(rng.randrange(len(live)))
                assert one.free(offset) == many.free(offset)
        else:
            size = rng.choice([64, 3000, 4096, 100_000, 128 << 10, 200_000, 3 << 20])
            count = rng.randrange(0, 60)
            singly = []
            while len(singly) < count and (offset := one.alloc(size)) >= 0:
                singly.append(offset)
            assert many.alloc_many(size, count) == singly
            live += singly
        if turn % 10 == 0:
            many.check()
    assert one.free_bytes == many.free_bytes and one.stats() == many.stats()


def test_add_holds_is_add_hold_many_times() -> None:
    geometry = Geometry.plan(SEGMENT_BYTES)
    with mmap.mmap(-1, SEGMENT_BYTES) as one_map, mmap.mmap(-1, SEGMENT_BYTES) as many_map:
        one, many = Ledger(one_map, geometry), Ledger(many_map, geometry)
        rng = random.Random(1)
        lines: list[int] = []
        for step in range(60):
            offsets = [rng.randrange(1 << 30) for _ in range(rng.randrange(12))]
            singly = [one.add_hold(100 * step + n, 5, at, 64, HoldKind.GRANT) for n, at in enumerate(offsets)]
            assert many.add_holds(100 * step, 5, offsets, 64, HoldKind.GRANT) == singly
            lines += singly
            for _ in range(min(len(lines), rng.randrange(8))):
                line = lines.pop(rng.randrange(len(lines)))
                one.end_hold(line)
                many.end_hold(line)
            assert list(one.holds()) == list(many.holds())
        many.check()
        with pytest.raises(IndexError):
            many.add_holds(1, 5, [0] * (many.free_holds + 1), 64, HoldKind.GRANT)
        one.release()
        many.release()


# -- prepared grants ---------------------------------------------------------------------------------


def test_wanted_grants_come_after_settling_and_once(store: Store) -> None:
    session = store.open_session(1, 1, "a")
    ((first, *_),) = store.grant(session, 4096, 1)
    assert put(store, session, "k", first) == Status.OK
    store.want(session, 4096, 2)
    assert store.take_prepared(session) == [] and session.prepared == []
    store.settle()
    store.check()
    told = store.take_prepared(session)
    assert [grant[2] for grant in told] == [4096, 4096] and {grant[0] for grant in told} == set(session.grants)
    assert {hold.offset for _, hold in store.ledger.holds()} == {grant[1] for grant in told}
    assert store.take_prepared(session) == []
    assert [put(store, session, f"k{n}", grant[0]) for n, grant in enumerate(told)] == [Status.OK] * 2


def test_one_answer_brings_only_so_many(store: Store) -> None:
    session = store.open_session(1, 1, "a")
    store.want(session, 64, PREPARED_ANSWER_MAX + 5)
    store.settle()
    assert [len(store.take_prepared(session)) for _ in range(3)] == [PREPARED_ANSWER_MAX, 5, 0]


def test_the_end_of_a_session_frees_what_it_was_not_told_of(store: Store) -> None:
    free = store.free_bytes
    session = store.open_session(1, 1, "a")
    store.want(session, 4096, 3)
    store.settle()
    store.want(session, 4096, 1)
    store.close_session(session)  # the last want is not served any more
    assert store.free_bytes == free and session.session not in store.sessions
    told = store.open_session(1, 1, "a")
    store.grant(told, 4096, 1)
    store.want(told, 4096, 3)
    store.settle()
    store.close_session(told)
    assert len(told.grants) == 1 and told.prepared == []  # the one that it knows is quarantined
    store.end_session(told)
    assert store.free_bytes == free


def test_who_is_short_gets_what_others_were_not_told_of_before_they_are_asked(store: Store) -> None:
    asked: list[tuple[Session, int]] = []
    store.recall = lambda session, size: asked.append((session, size))
    rich, poor = store.open_session(1, 1, "a"), store.open_session(2, 1, "a")
    many = store.granted_bytes_max // 4096
    store.want(rich, 4096, many)
    store.settle()
    store.grant(poor, 4096, 1)
    assert len(rich.grants) == 0 and rich.prepared == [] and not asked
    told = store.grant(poor, 4096, many - 1)
    assert len(told) == many - 1
    assert store.grant(poor, 4096, 1) == [] and not asked  # all are its own: nobody is there to be asked
    assert len(store.grant(rich, 4096, 1)) == 1 and asked == [(poor, 4096)]


def test_a_guessed_id_is_not_told(store: Store) -> None:
    """A client that commits a grant it was not told of has spent it; and returned ones are gone too."""
    session = store.open_session(1, 1, "a")
    store.want(session, 4096, 3)
    store.settle()
    spent, returned, left = (grant[0] for grant in session.prepared)
    assert put(store, session, "guess", spent) == Status.OK
    assert store.return_grants(session, [returned]) == 1
    store.check()
    assert [grant[0] for grant in store.take_prepared(session)] == [left]


def test_check_sees_a_prepared_grant_that_differs(store: Store) -> None:
    session = store.open_session(1, 1, "a")
    store.want(session, 4096, 1)
    store.settle()
    (right,) = session.prepared
    session.prepared[0] = (right[0], right[1] + 4096, right[2])
    with pytest.raises(CorruptionError, match="prepared grant"):
        store.check()
    session.prepared[0] = right


def test_full_sets_evict_within_a_batch_without_preparing(store: Store) -> None:
    """Commits that evict from their sets while wants wait: the wants stay for the settling after the answer."""
    session = store.open_session(1, 1, "a")
    keys = iter(range(10**6))
    store.want(session, 64, 1)
    while store.set_evictions < 3:
        grants = store.grant(session, 64, 64)
        store.want(session, 64, 1)
        store.commit(session, [(digest_of(f"{next(keys)}"), grant[0], 64, 0, 0, 0) for grant in grants])
        assert len(store._wanted) == 1
        store.return_grants(session, [grant[0] for grant in store.take_prepared(session)])
    store.check()


def test_a_digest_of_zeros_is_refused_and_nothing_moves(store: Store) -> None:
    session = store.open_session(1, 1, "a")
    for _ in range(2):  # in an empty table, and where the sets of zeros have an entry beside free slots
        ((number, *_),) = store.grant(session, 64, 1)
        assert store.commit(session, [(bytes(16), number, 64, 0, 0, 0)]) == [Status.BAD_REQUEST]
        assert store.table.lookup(bytes(16)) == -1
        assert store.delete([bytes(16)]) == [Status.NOT_FOUND]
        assert store.locate(session, [bytes(16)])[0][0] == Status.NOT_FOUND
        store.check()
        entries = store.table.entries
        assert entries == store.puts and not session.grants
        digests = (digest_of(f"z{n}") for n in range(10**6))
        near = next(digest for digest in digests if store.table.candidates(digest)[0] // 8 in (0, 1))
        ((number, *_),) = store.grant(session, 64, 1)
        assert store.commit(session, [(near, number, 64, 0, 0, 0)]) == [Status.OK]


# -- how many a client wants -------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [64, 4096, 64 << 10, 1 << 20, 4 << 20])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_a_pool_finds_its_level_and_stays(chunk: int, batch: int) -> None:
    """Batches of puts, each batch in commits of at most 16, whose wants are answered one commit later."""
    keep = ahead(chunk)
    pool, owed, asks = 0, 0, []
    for turn in range(200):
        left = batch
        while left:
            spent = min(16, left)
            left -= spent
            if pool < spent:
                asks.append(turn)
                pool += max(spent + left - pool, 0)
            pool -= spent
            want = wanted(pool, spent, left, keep)
            pool, owed = pool + owed, want
        assert pool + owed <= 2 * keep + max(TOP_UP, batch) + 16
    assert not [turn for turn in asks if turn > 20] or batch > keep
    assert keep <= AHEAD_MAX
