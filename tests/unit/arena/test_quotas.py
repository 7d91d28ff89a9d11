"""Quotas of namespaces: what is counted is what the slots hold, and what is over it is refused."""

from __future__ import annotations

import random

import pytest

from simm.arena.hashing import shard_of
from simm.arena.quotas import Quotas
from simm.arena.sessions import Session
from simm.arena.store import OVER_QUOTA, Store
from simm.constants import SHARD_COUNT
from simm.slab import chunk_bytes_for
from simm.wire.messages import BOUND, NAMESPACE_SHIFT, Status
from simm.wire.shard_set import bitmap_of
from tests.support.store_world import ALL_SHARDS, digest_of, new_segment, owned, remove_segment

KIB = 1 << 10


def opened(store: Store, namespace: str) -> Session:
    return store.sessions.open(1, 1, namespace)


def put(store: Store, session: Session, key: str, size: int, options: int = 0) -> int:
    """Grant and commit; the status."""
    ((number, _, _),) = store.sessions.grant(session, size, 1)
    (status,) = store.commit(session, [(digest_of(key), number, size, 0, 0, options)])
    store.apply_pending()
    return status


def held(store: Store, namespace: str) -> int:
    """What the slots say."""
    entries = [store.table.entry(slot) for slot in store.table]
    return sum(entry.chunk for entry in entries if store.ledger.names[entry.namespace] == namespace)


def used(store: Store, namespace: str) -> int:
    assert store.quotas is not None
    return store.quotas.stats()[namespace]["used_bytes"]


def test_a_put_over_the_quota_is_refused(store: Store) -> None:
    store.set_quotas({"small": 20 * KIB, "none": 0})
    small, free, none = (opened(store, name) for name in ("small", "free", "none"))
    assert [put(store, small, f"k{n}", 4096) for n in range(6)] == [Status.OK] * 5 + [Status.OVER_QUOTA]
    assert put(store, none, "n", 1) == Status.OVER_QUOTA
    assert store.stats()["put_failures"][OVER_QUOTA] == 2
    assert all(put(store, free, f"f{n}", 4096) == Status.OK for n in range(20)), "others have none"
    assert store.stats()["quotas"] == {
        "none": {"quota_bytes": 0, "used_bytes": 0}, "small": {"quota_bytes": 20 * KIB, "used_bytes": 20 * KIB},
    }  # fmt: skip
    assert not small.grants and not small.granted_bytes, "a refused grant is spent"
    assert put(store, small, "k0", 4096) == Status.OVER_QUOTA, "its old chunk is free only later"
    assert store.table.entry(store.table.lookup(digest_of("k0"))).length == 4096, "the old value stays"
    store.delete([digest_of("k1")])
    assert put(store, small, "k0", 2048) == Status.OK and used(store, "small") == 16 * KIB - 2 * KIB


def test_a_batch_stops_at_the_quota(store: Store) -> None:
    store.set_quotas({"small": 3 * 4096})
    session = opened(store, "small")
    grants = store.sessions.grant(session, 4096, 8)
    entries = [(digest_of(f"k{n % 5}"), number, 4096, 0, 0, 0) for n, (number, _, _) in enumerate(grants)]
    assert store.commit(session, entries) == [Status.OK] * 3 + [Status.OVER_QUOTA] * 5
    store.apply_pending()
    assert used(store, "small") == held(store, "small") == 3 * 4096


def churn(store: Store, seed: int) -> None:
    """Puts, overwrites and deletes of three namespaces, evictions among them."""
    rng = random.Random(seed)
    sessions = [opened(store, name) for name in ("a", "b", "free")]
    for number in range(600):
        session = rng.choice(sessions)
        if rng.random() < 0.2:
            store.delete([digest_of(f"{rng.randrange(150)}")])
        else:  # the same digests in all namespaces: a replaced value counts for its own
            put(store, session, f"{rng.randrange(150)}", rng.choice((100, 4096, 60_000, 200_000)))
        for name, most in (("a", 900_000), ("b", 2_000_000)):
            assert used(store, name) == held(store, name) <= most, f"after {number}"
    assert store.stats()["evictions"] and any(store.stats()["evictions"].values())


@pytest.mark.parametrize("seed", range(2))
def test_what_is_counted_is_what_the_slots_hold(store: Store, seed: int) -> None:
    store.set_quotas({"a": 900_000, "b": 2_000_000})
    churn(store, seed)


def test_a_successor_counts_the_same() -> None:
    segment = new_segment(8 << 20)
    try:
        first = Store.create(segment.mm)
        first.set_shards(1, *owned(ALL_SHARDS, 1))
        first.set_quotas({"a": 900_000, "b": 2_000_000})
        churn(first, 3)
        before = {name: used(first, name) for name in "ab"}
        assert all(before.values())
        first.release()
        again = Store.recover(segment.mm, segment.name)
        again.set_quotas({"a": 1, "b": 2_000_000})
        assert {name: used(again, name) for name in "ab"} == before
        again.set_shards(2, *owned(ALL_SHARDS, 2))
        assert put(again, opened(again, "a"), "more", 1) == Status.OVER_QUOTA
        lost = {shard_of(digest_of(f"{n}")) for n in range(75)}
        again.set_shards(3, *owned(bitmap_of(set(range(SHARD_COUNT)) - lost), 3))
        assert {name: used(again, name) for name in "ab"} == {name: held(again, name) for name in "ab"} != before
        again.set_shards(4, *owned(bitmap_of([]), 4))
        assert used(again, "a") == used(again, "b") == 0
        again.release()
    finally:
        remove_segment(segment)


@pytest.mark.parametrize("broken", ["dropped", "published"])
def test_the_control(store: Store, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Without either half of the books the test above sees a difference."""
    store.set_quotas({"a": 900_000, "b": 2_000_000})
    monkeypatch.setattr(Quotas, broken, lambda *_: None)
    with pytest.raises(AssertionError, match="after"):
        churn(store, 0)


def test_a_stream_commits_for_several_namespaces(store: Store) -> None:
    store.set_quotas({"theirs": 8 * KIB})
    relay, plain = opened(store, "default"), opened(store, "default")
    relay.relays = True
    theirs, others = (store.ledger.namespaces.number(name) for name in ("theirs", "others"))
    options = (theirs + 1) << NAMESPACE_SHIFT
    assert [put(store, relay, f"k{n}", 4096, options) for n in range(3)] == [Status.OK, Status.OK, Status.OVER_QUOTA]
    assert store.table.entry(store.table.lookup(digest_of("k0"))).namespace == theirs
    assert put(store, plain, "k0", 64, options) == Status.BAD_REQUEST, "no client may say that"
    for wrong in (options | 4, options | 1, BOUND, 99 << NAMESPACE_SHIFT):
        assert put(store, relay, "k9", 64, wrong) == Status.BAD_REQUEST
    foreign = ((others + 1) << NAMESPACE_SHIFT) | BOUND
    assert put(store, relay, "k0", 64, foreign) == Status.UNAUTHORIZED, "it replaces no other's value"
    assert put(store, relay, "o", 64, foreign) == Status.OK and put(store, relay, "o", 65, foreign) == Status.OK
    assert put(store, plain, "o", 64) == Status.OK, "one that is not bound replaces it"
    assert used(store, "theirs") == held(store, "theirs") == 2 * chunk_bytes_for(4096)


def test_names_in_use_come_before_others(store: Store) -> None:
    assert not store.ledger.namespaces.keep(["kept"])
    for number in range(255):
        store.ledger.namespaces.number(f"n{number}")
    (note,) = store.ledger.namespaces.keep(["kept", "late"])
    assert store.ledger.namespaces.number("kept") == 0 and "'late'" in note
