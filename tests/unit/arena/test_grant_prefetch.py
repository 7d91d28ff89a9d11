"""Grants in numbers, and grants that come with the next answer: against the same done one by one."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

import pytest

from simm.arena.eviction import make_policy
from simm.arena.hashing import Hasher
from simm.arena.layout import Geometry
from simm.arena.ledger import GRANT, PIN, Ledger
from simm.arena.sessions import FAIR, PREPARED_ANSWER_MAX, Session
from simm.arena.space import Space
from simm.arena.store import Store
from simm.constants import POLICY_NAMES
from simm.errors import CorruptionError, UsageError
from simm.ipc.arena_files import OwnedArena
from simm.slab import SLAB_BYTES, Allocator
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.dose import dose
from tests.support.store_world import new_segment, remove_segment

SEGMENT_BYTES = 16 << 20
digest_of = Hasher("prepared")


@pytest.fixture(scope="module")
def segment() -> Iterator[OwnedArena]:
    made = new_segment(SEGMENT_BYTES)
    yield made
    remove_segment(made)


def put(store: Store, session: Session, key: str, grant: int, length: int = 4096) -> int:
    return store.commit(session, [(digest_of(key), grant, length, 0, 0, 0)])[0]


# -- many at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", dose(range(6), quick=1))
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
            check(many)
    assert one.free_bytes == many.free_bytes and one._used == many._used


def test_add_holds_is_add_hold_many_times() -> None:
    geometry = Geometry.plan(SEGMENT_BYTES)
    with mmap.mmap(-1, SEGMENT_BYTES) as one_map, mmap.mmap(-1, SEGMENT_BYTES) as many_map:
        one, many = Ledger(one_map, geometry), Ledger(many_map, geometry)
        rng = random.Random(1)
        lines: list[int] = []
        for step in range(60):
            offsets = [rng.randrange(1 << 30) for _ in range(rng.randrange(12))]
            singly = [one.add_hold(100 * step + n, 5, at, 64, GRANT) for n, at in enumerate(offsets)]
            assert many.add_holds(100 * step, 5, offsets, 64, GRANT) == singly
            lines += singly
            for _ in range(min(len(lines), rng.randrange(8))):
                line = lines.pop(rng.randrange(len(lines)))
                one.end_hold(line)
                many.end_hold(line)
            assert list(one.holds()) == list(many.holds())
        check(many)
        with pytest.raises(IndexError):
            many.add_holds(1, 5, [0] * (many.free_holds + 1), 64, GRANT)
        one.release()
        many.release()


def test_end_holds_is_end_hold_many_times() -> None:
    geometry = Geometry.plan(SEGMENT_BYTES)
    with mmap.mmap(-1, SEGMENT_BYTES) as one_map, mmap.mmap(-1, SEGMENT_BYTES) as many_map:
        one, many = Ledger(one_map, geometry), Ledger(many_map, geometry)
        lines = one.add_holds(1, 5, range(0, 640, 64), 64, GRANT)
        assert many.add_holds(1, 5, range(0, 640, 64), 64, GRANT) == lines
        for line in lines[2:7]:
            one.end_hold(line)
        many.end_holds(lines[2:7])
        assert list(one.holds()) == list(many.holds()) and one.free_holds == many.free_holds
        assert one.add_hold(9, 5, 0, 64, PIN) == many.add_hold(9, 5, 0, 64, PIN)
        check(many)
        one.release()
        many.release()


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_insert_many_is_insert_many_times(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    slots, groups = 200, 3
    seen = [memoryview(bytearray(slots)) for _ in range(2)]
    one, many = (make_policy(policy, slots, groups, visited) for visited in seen)
    inside: set[int] = set()
    for _ in range(200):
        group = rng.randrange(groups)
        outside = sorted(set(range(slots)) - inside)
        fresh = rng.sample(outside, min(len(outside), rng.randrange(9)))
        for slot in fresh:
            one.insert(slot, group)
        many.insert_many(fresh, group)
        inside.update(fresh)
        for slot in rng.sample(sorted(inside), min(len(inside), rng.randrange(9))):
            seen[0][slot] = seen[1][slot] = 1
        for _ in range(rng.randrange(6)):
            group = rng.randrange(groups)
            victim = one.victim(group, lambda slot: slot % 7 == 0)
            assert many.victim(group, lambda slot: slot % 7 == 0) == victim
            if victim >= 0:
                one.remove(victim)
                many.remove(victim)
                inside.remove(victim)
        assert [one.age(slot) for slot in sorted(inside)] == [many.age(slot) for slot in sorted(inside)]
        for group in range(groups):
            assert list(one.slots(group)) == list(many.slots(group))
        check(many)


def test_insert_many_keeps_those_before_a_refused_one() -> None:
    policy = make_policy("sieve", 10, 2, memoryview(bytearray(10)))
    with pytest.raises(CorruptionError, match="inserted twice"):
        policy.insert_many([1, 2, 1, 3], 0)
    with pytest.raises(UsageError, match="no slot"):
        policy.insert_many([4, 10, 5], 1)
    with pytest.raises(UsageError, match="no group"):
        policy.insert_many([6], 2)
    check(policy)
    assert list(policy.slots(0)) == [1, 2] and list(policy.slots(1)) == [4]


def made_space(slots: int = 600) -> Space:
    space: Space

    def evict(slot: int) -> None:
        space.release(space._offsets[slot])

    # FIFO: a victim that is asked for twice changes nothing, so one call for each chunk and one for all agree.
    space = Space(4 * SLAB_BYTES, slots, memoryview(bytearray(slots)), "fifo", evict)
    return space


@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_publish_many_is_publish_many_times(seed: int) -> None:
    rng = random.Random(seed)
    one, many = made_space(), made_space()
    for turn in range(80):
        chunks = []
        for size in rng.choices([4096, 4096, 4096, 64 << 10, 300_000], k=rng.randrange(1, 20)):
            count = rng.randrange(1, 4)
            singly = [offset for offset in (one.allocate(size) for _ in range(count)) if offset >= 0]
            assert many.allocate_many(size, count) == singly
            chunks += singly
        free = [slot for slot in range(600) if one._offsets[slot] < 0]
        pairs = list(zip(chunks, rng.sample(free, min(len(chunks), len(free)))))
        for offset, slot in pairs:
            one.publish(offset, slot)
        many.publish_many(pairs)
        for offset in chunks[len(pairs) :]:
            one.drop(offset)
            many.drop(offset)
        assert [one._offsets[slot] for slot in range(600)] == [many._offsets[slot] for slot in range(600)]
        assert one.evictions == many.evictions
        if turn % 10 == 0:
            check(many)


def test_publish_many_keeps_those_before_a_refused_one() -> None:
    space = made_space()
    offsets = space.allocate_many(4096, 5)
    large = space.allocate(300_000)
    with pytest.raises(CorruptionError, match="has a chunk already"):
        space.publish_many([(offsets[0], 3), (large, 4), (offsets[1], 3), (offsets[2], 5)])
    check(space)
    assert [space._offsets[slot] for slot in (3, 4, 5)] == [offsets[0], large, -1]
    with pytest.raises(CorruptionError, match="owned by 3"):
        space.publish_many([(offsets[3], 6), (offsets[0], 7)])
    check(space)
    assert [space._offsets[slot] for slot in (6, 7)] == [offsets[3], -1]


def test_a_key_twice_in_a_batch_with_others(store: Store) -> None:
    """First writes are settled together, yet a slot's first write before its overwrite."""
    session = store.sessions.open(1, 1, "a")
    grants = [grant[0] for grant in store.sessions.grant(session, 4096, 6)]
    free = store.stats()["free_bytes"]
    keys = ["a", "b", "a", "c", "a", "b"]
    statuses = store.commit(session, [(digest_of(key), grant, 4096, 0, 0, 0) for key, grant in zip(keys, grants)])
    assert statuses == [Status.OK] * 6
    check(store)
    assert (store.puts, store.overwrites, store.table.entries) == (6, 3, 3)
    assert store.stats()["free_bytes"] == free + 3 * 4096


# -- prepared grants ---------------------------------------------------------------------------------


def test_wanted_grants_come_after_settling_and_once(store: Store) -> None:
    session = store.sessions.open(1, 1, "a")
    ((first, *_),) = store.sessions.grant(session, 4096, 1)
    assert put(store, session, "k", first) == Status.OK
    store.sessions.want(session, 4096, 2)
    assert store.sessions.take_prepared(session) == [] and session.prepared == []
    store.apply_pending()
    check(store)
    told = store.sessions.take_prepared(session)
    assert [grant[2] for grant in told] == [4096, 4096] and {grant[0] for grant in told} == set(session.grants)
    assert {hold.offset for _, hold in store.ledger.holds()} == {grant[1] for grant in told}
    assert store.sessions.take_prepared(session) == []
    assert [put(store, session, f"k{n}", grant[0]) for n, grant in enumerate(told)] == [Status.OK] * 2


def test_one_answer_brings_only_so_many(store: Store) -> None:
    session = store.sessions.open(1, 1, "a")
    store.sessions.want(session, 64, PREPARED_ANSWER_MAX + 5)
    store.apply_pending()
    assert [len(store.sessions.take_prepared(session)) for _ in range(3)] == [PREPARED_ANSWER_MAX, 5, 0]


def test_the_end_of_a_session_frees_what_it_was_not_told_of(store: Store) -> None:
    free = store.stats()["free_bytes"]
    session = store.sessions.open(1, 1, "a")
    store.sessions.want(session, 4096, 3)
    store.apply_pending()
    store.sessions.want(session, 4096, 1)
    store.sessions.close(session)  # the last want is not served any more
    assert store.stats()["free_bytes"] == free and session.session not in store.sessions.by_id
    told = store.sessions.open(1, 1, "a")
    store.sessions.grant(told, 4096, 1)
    store.sessions.want(told, 4096, 3)
    store.apply_pending()
    store.sessions.close(told)
    assert len(told.grants) == 1 and told.prepared == []  # the one that it knows is quarantined
    store.sessions.end(told)
    assert store.stats()["free_bytes"] == free


def test_who_is_short_gets_what_others_were_not_told_of_before_they_are_asked(store: Store) -> None:
    asked: list[tuple[Session, int]] = []
    store.sessions.recall = lambda session, size: asked.append((session, size))
    rich, poor = store.sessions.open(1, 1, "a"), store.sessions.open(2, 1, "a")
    many = store.sessions.granted_bytes_max // 4096
    store.sessions.want(rich, 4096, many)
    store.apply_pending()
    left = many - len(rich.prepared)
    assert 0 < left < many / 4
    assert len(store.sessions.grant(poor, 4096, left)) == left  # its share, once the rich one has nothing
    assert len(rich.grants) == 0 and rich.prepared == [] and not asked
    told = store.sessions.grant(poor, 4096, many)
    assert len(told) + left == many * FAIR // (FAIR + 1)
    assert store.sessions.grant(poor, 4096, 1) == [] and not asked  # all are its own: nobody is there to be asked
    assert 0 < len(store.sessions.grant(rich, 4096, many)) < left and asked == [(poor, 8192)]


def test_a_guessed_id_is_not_told(store: Store) -> None:
    """A client that commits a grant it was not told of has spent it; and returned ones are gone too."""
    session = store.sessions.open(1, 1, "a")
    store.sessions.want(session, 4096, 3)
    store.apply_pending()
    spent, returned, left = (grant[0] for grant in session.prepared)
    assert put(store, session, "guess", spent) == Status.OK
    assert store.sessions.return_grants(session, [returned]) == 1
    check(store)
    assert [grant[0] for grant in store.sessions.take_prepared(session)] == [left]


def test_what_a_session_wants_of_a_size_is_made_together(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that entries are evicted together. Who asked first gets first."""
    first, second = (store.sessions.open(number, number, "a") for number in (1, 2))
    asked: list[tuple[int, int, int]] = []
    allocate = store.sessions.allocate

    def noted(session: Session, size: int, count: int) -> list[tuple[int, int, int]]:
        asked.append((session.session, size, count))
        return allocate(session, size, count)

    monkeypatch.setattr(store.sessions, "allocate", noted)
    for session, size, count in ((first, 64, 3), (second, 64, 2), (first, 4096, 1), (first, 64, 4), (second, 64, 1)):
        store.sessions.want(session, size, count)
    store.apply_pending()
    one, two = first.session, second.session
    assert asked == [(one, 64, 7), (two, 64, 3), (one, 4096, 1)]
    assert (len(first.prepared), len(second.prepared)) == (8, 3)
    store.apply_pending()
    assert len(asked) == 3
    check(store)
    for _ in range(3):  # as many as one message may evict at once, and no more
        store.sessions.want(first, 64, 2000)
    store.apply_pending()
    assert [count for _, _, count in asked[3:]] == [4096], "the store has no room for these"


def test_check_sees_a_prepared_grant_that_differs(store: Store) -> None:
    session = store.sessions.open(1, 1, "a")
    store.sessions.want(session, 4096, 1)
    store.apply_pending()
    (right,) = session.prepared
    session.prepared[0] = (right[0], right[1] + 4096, right[2])
    with pytest.raises(CorruptionError, match="prepared grant"):
        check(store)
    session.prepared[0] = right


def test_full_sets_evict_within_a_batch_without_preparing(store: Store) -> None:
    """Commits that evict from their sets while wants wait: the wants stay for the settling after the answer."""
    session = store.sessions.open(1, 1, "a")
    keys = iter(range(10**6))
    store.sessions.want(session, 64, 1)
    while store.set_evictions < 3:
        grants = store.sessions.grant(session, 64, 64)
        store.sessions.want(session, 64, 1)
        store.commit(session, [(digest_of(f"{next(keys)}"), grant[0], 64, 0, 0, 0) for grant in grants])
        assert len(store.sessions.wanted) == 1
        store.sessions.return_grants(session, [grant[0] for grant in store.sessions.take_prepared(session)])
    check(store)


def test_a_digest_of_zeros_is_refused_and_nothing_moves(store: Store) -> None:
    session = store.sessions.open(1, 1, "a")
    for _ in range(2):  # in an empty table, and where the sets of zeros have an entry beside free slots
        ((number, *_),) = store.sessions.grant(session, 64, 1)
        assert store.commit(session, [(bytes(16), number, 64, 0, 0, 0)]) == [Status.BAD_REQUEST]
        assert store.table.lookup(bytes(16)) == -1
        assert store.delete([bytes(16)]) == [Status.NOT_FOUND]
        assert store.locate(session, [bytes(16)])[0][0] == Status.NOT_FOUND
        check(store)
        entries = store.table.entries
        assert entries == store.puts and not session.grants
        digests = (digest_of(f"z{n}") for n in range(10**6))
        near = next(digest for digest in digests if store.table.candidates(digest)[0] // 8 in (0, 1))
        ((number, *_),) = store.sessions.grant(session, 64, 1)
        assert store.commit(session, [(near, number, 64, 0, 0, 0)]) == [Status.OK]
