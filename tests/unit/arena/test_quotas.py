"""Quotas of namespaces: what is counted is what the slots hold, and what is over it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from simm.arena import quotas as quotas_module
from simm.arena.hashing import shard_of
from simm.arena.layout import NAMESPACES, Word
from simm.arena.namespaces import Sweep
from simm.arena.quotas import QuotaChanges, Quotas
from simm.arena.rebuild import LiveSlots
from simm.arena.sessions import Session
from simm.arena.store import OVER_QUOTA, Store
from simm.constants import SHARD_COUNT
from simm.slab import chunk_bytes_for
from simm.table import Table
from simm.wire.messages import BOUND, NAMESPACE_SHIFT, Status
from simm.wire.shard_set import bitmap_of
from tests.support.dose import dose
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, digest_of, new_segment, owned, remove_segment
from tests.support.waiting import wait_until

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


def test_issue_as_many_quotas_are_told_of_as_there_are_places(store: Store) -> None:
    """A token file may have 65,536. What a worker tells must fit a frame."""
    opened(store, "zz")
    store.set_quotas({"zz": 7, **{f"n{number}": 1 for number in range(3 * NAMESPACES)}})
    told = store.stats()["quotas"]
    assert len(told) == NAMESPACES and told["zz"] == {"quota_bytes": 7, "used_bytes": 0}


def test_readers_see_a_heartbeat_while_what_is_there_is_counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all slots at once, after the recovery, and stood still: readers took the worker for dead."""
    put(store, opened(store, "a"), "k", 4096)
    real, moved = Table.live, []

    def slow(self: Table) -> LiveSlots:
        start = store.header[Word.HEARTBEAT]
        wait_until(lambda: store.header[Word.HEARTBEAT] - start >= 3, "the heartbeat moves")
        moved.append(1)
        return real(self)

    monkeypatch.setattr(Table, "live", slow)
    store.set_quotas({"a": 8 * KIB})
    assert moved and used(store, "a") == 4096


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


@pytest.mark.parametrize("seed", dose(range(2), quick=1))
def test_what_is_counted_is_what_the_slots_hold(store: Store, seed: int) -> None:
    store.set_quotas({"a": 900_000, "b": 2_000_000})
    churn(store, seed)


def test_a_successor_counts_the_same() -> None:
    segment = new_segment(8 << 20)
    try:
        first = Store.create(segment.mm)
        set_shards(first, 1, *owned(ALL_SHARDS, 1))
        first.set_quotas({"a": 900_000, "b": 2_000_000})
        churn(first, 3)
        before = {name: used(first, name) for name in "ab"}
        assert all(before.values())
        first.release()
        again = Store.recover(segment.mm, segment.name)
        again.set_quotas({"a": 1, "b": 2_000_000})
        assert {name: used(again, name) for name in "ab"} == before
        set_shards(again, 2, *owned(ALL_SHARDS, 2))
        assert put(again, opened(again, "a"), "more", 1) == Status.OVER_QUOTA
        lost = {shard_of(digest_of(f"{n}")) for n in range(75)}
        set_shards(again, 3, *owned(bitmap_of(set(range(SHARD_COUNT)) - lost), 3))
        assert {name: used(again, name) for name in "ab"} == {name: held(again, name) for name in "ab"} != before
        set_shards(again, 4, *owned(bitmap_of([]), 4))
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


# -- quotas that change while the store serves --------------------------------------------------------


class Turns:
    """A loop whose turns a test takes itself. Each is over after one block of slots."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def clock(self) -> float:
        """Stand still."""
        return 0.0

    def call_later(self, _delay: float, callback: Callable[[], None]) -> None:
        """Keep what is due."""
        self.due.append(callback)

    def take(self) -> bool:
        """Take a turn; return False if none is due."""
        if self.due:
            self.due.pop(0)()
        return bool(self.due)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    monkeypatch.setattr(quotas_module, "_BLOCK_SLOTS", 256)
    return Turns()


def test_other_limits_hold_at_once(store: Store, turns: Turns) -> None:
    store.set_quotas({"a": 8 * KIB, "b": 4 * KIB})
    a, b, c = (opened(store, name) for name in "abc")
    changes = QuotaChanges(store, turns, 0.0)
    assert [put(store, a, f"a{n}", 4096) for n in range(3)] == [Status.OK] * 2 + [Status.OVER_QUOTA]
    assert put(store, b, "b", 4096) == Status.OK and put(store, c, "c", 4096) == Status.OK
    changes.change({"a": 16 * KIB, "b": 0})
    assert changes._at is None and not turns.due, "both are counted already"
    assert [put(store, a, f"a{n}", 4096) for n in range(2, 5)] == [Status.OK] * 2 + [Status.OVER_QUOTA]
    assert put(store, b, "b2", 4096) == Status.OVER_QUOTA and used(store, "b") == 4096, "its values stay"
    changes.change({"a": 16 * KIB})
    assert put(store, b, "b2", 4096) == Status.OK, "it has no quota any more"
    changes.change({"a": 16 * KIB, "b": 12 * KIB})
    assert used(store, "b") == held(store, "b") == 8 * KIB, "and was counted all the same"
    changes.change({})
    assert store.quotas is None and put(store, a, "a9", 4096) == Status.OK


def counted_in_turns(store: Store, turns: Turns, seed: int) -> int:
    """Give two namespaces with values a quota while others are put, replaced and dropped. Return the turns taken."""
    rng = random.Random(seed)
    sessions = [opened(store, name) for name in ("a", "b", "free")]

    def work(count: int) -> None:
        for _ in range(count):
            if rng.random() < 0.3:
                store.delete([digest_of(f"{rng.randrange(400)}")])
            else:
                put(store, rng.choice(sessions), f"{rng.randrange(400)}", rng.choice((100, 4096, 60_000)))

    work(500)
    changes = QuotaChanges(store, turns, 0.0)
    for limits in ({"a": 1 << 30}, {"b": 1 << 30, "free": 1 << 40}, {}, {"a": 1 << 30, "b": 1 << 30}):
        changes.change(limits)
        work(rng.randrange(20))
        for _ in range(rng.randrange(4)):  # the next change may come while these are counted
            turns.take()
            work(rng.randrange(5))
    taken = 1
    while turns.take():
        taken += 1
        work(3)
    assert changes._at is None
    for name in "ab":
        assert used(store, name) == held(store, name) > 0
    store.delete([digest_of(f"{n}") for n in range(400)])
    store.apply_pending()
    assert [used(store, name) for name in "ab"] == [0, 0]
    return taken


@pytest.mark.parametrize("seed", range(6))
def test_first_quotas_of_namespaces_with_values(store: Store, turns: Turns, seed: int) -> None:
    assert counted_in_turns(store, turns, seed) > 3


def twice(_: Quotas, slots: Any, namespaces: Any) -> list[tuple[int, int]]:
    """Without a look at what each slot counts for."""
    return list(zip(slots.tolist(), namespaces.tolist()))


@pytest.mark.parametrize("broken", [{"count": lambda *_: None}, {"uncounted": twice}], ids=["not", "twice"])
def test_the_control_of_that(
    store: Store, turns: Turns, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]
) -> None:
    for name, function in broken.items():
        monkeypatch.setattr(Quotas, name, function)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(6):
            counted_in_turns(store, turns, seed)


def test_names_that_are_not_bound_any_more_go(store: Store, turns: Turns) -> None:
    """A token file that names new namespaces again and again must not use up the ledger's lines."""
    namespaces, changes = store.ledger.namespaces, QuotaChanges(store, turns, 0.0)
    for number in range(3 * NAMESPACES):
        assert not namespaces.keep([f"n{number}", "always"])
        changes.change({f"n{number}": 100 * KIB, "always": 100 * KIB})
        while turns.take():
            pass
        session = opened(store, f"n{number}")
        assert put(store, session, "k", 100) == Status.OK and used(store, f"n{number}") == held(store, f"n{number}") > 0
        store.sessions.close(session)
        store.sessions.end(session)
        if namespaces.short:
            sweep = Sweep(namespaces, store.table, [])
            while sweep.step():
                pass
    assert "always" in namespaces.names.values() and "n0" not in namespaces.names.values()
    assert store.quotas is not None and len(store.quotas._most) <= NAMESPACES and len(store.quotas._used) <= NAMESPACES


def test_names_in_use_come_before_others(store: Store) -> None:
    assert not store.ledger.namespaces.keep(["kept"])  # and a line for those without one
    for number in range(254):
        store.ledger.namespaces.number(f"n{number}")
    (note,) = store.ledger.namespaces.keep(["kept", "late"])
    assert store.ledger.namespaces.number("kept") == 1 and "'late'" in note
