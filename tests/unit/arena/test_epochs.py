"""Entries of namespaces with epochs: who finds which, over advances, leases and deaths of the worker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import TAG_AT, EpochHasher, Hasher, tag_of
from simm.arena.layout import (
    ENTRY_BOUND,
    ENTRY_EPOCH,
    NAMESPACE_LINE_BYTES,
    NAMESPACES,
    NONE_BOUND,
    SOME_BOUND,
    Word,
)
from simm.arena.marks.near import COMMIT_NEAR
from simm.arena.namespaces import STALE_ENTRIES, line_of
from simm.arena.reader import ArenaReader, EpochReader, guard
from simm.arena.sessions import Session
from simm.arena.store import Store
from simm.arena.vault import Vault
from simm.cluster.epochs import FOR_EVER
from simm.constants import DEFAULT_NAMESPACE, OTHERS_NAMESPACE
from simm.errors import CapacityError
from simm.host.processes import boottime_ns
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import ABSENT, BOUND, NAMESPACE_SHIFT, Status
from simm.wire.shard_set import EPOCHS_AHEAD
from tests.support.consistency import check
from tests.support.shards import set_shards
from tests.support.store_world import ALL_SHARDS, new_segment, owned, remove_segment

SLOTS = 1 << 17
NAME = "weights"
KEYS = [f"key {number}" for number in range(300)]


@pytest.fixture
def arena() -> Iterator[OwnedArena]:
    segment = new_segment(64 << 20, SLOTS)
    yield segment
    remove_segment(segment)


class Bench:
    """A store with one session, and a reader of it."""

    def __init__(self, arena: OwnedArena) -> None:
        self.arena = arena
        self.vault = Vault()
        self.store = Store.create(arena.mm, slots=SLOTS, vault=self.vault)
        self._begin()
        self.reader = ArenaReader(arena.name)

    def _begin(self) -> None:
        self.store.ledger.namespaces.clock = boottime_ns
        set_shards(self.store, 1, *owned(ALL_SHARDS, 1))
        self.store.open()
        self.session = self.store.sessions.open(1, 1, NAME)

    def succeed(self) -> None:
        self.store = Store.recover(self.arena.mm, self.arena.name, vault=self.vault)
        self._begin()

    def put(self, digest: bytes, options: int = 0, session: Session | None = None) -> int:
        by = session or self.session
        ((number, _, _),) = self.store.sessions.grant(by, 64, 1)
        (status,) = self.store.commit(by, [(digest, number, 64, 0, 0, options)])
        self.store.apply_pending()
        return status

    def advance(self, epoch: int, name: str = NAME) -> None:
        self.store.stale.take({name: epoch})
        self.store.ledger.namespaces.extend_lease(FOR_EVER)

    def sweep(self) -> None:
        self.store.apply_pending()
        while self.store.stale.due:
            self.store.stale.step()

    def found(self, digest: bytes) -> bool:
        """Whether each way finds a value; they agree."""
        reader, answers = self.reader, set()
        located = reader.locate(digest)
        answers.add(located is not None and reader.confirm(digest, *located[:2]) and reader.is_own(located))
        answers.add(reader.current_many([digest])[0])
        answers.add(self.store.exists([digest])[0] == Status.OK)
        ((status, *_, pin),) = self.store.locate(self.session, [digest])
        answers.add(status == Status.OK)
        self.store.sessions.unpin(self.session, [pin] if pin else [])
        answers.add(self.store.locate(None, [digest])[0][0] == Status.OK)
        guarded = ArenaReader(self.arena.name)
        guard(guarded)
        answers.add(guarded.contains(digest))
        answers.add(guarded.contains_previous(digest))
        answers.add(guarded.contains_many([digest] * 20)[3])
        answers.add(bool(guarded.contain([digest] * 20)[0][3]))
        assert type(guarded) is EpochReader and len(answers) == 1, answers
        return answers.pop()


@pytest.fixture
def bench(arena: OwnedArena) -> Iterator[Bench]:
    made = Bench(arena)
    yield made
    made.store.release()


def digests(epoch: int) -> list[bytes]:
    return (EpochHasher(NAME, epoch) if epoch else Hasher(NAME)).many(KEYS)


def test_digests_end_with_their_epoch() -> None:
    plain, old, new = Hasher(NAME).many(KEYS), digests(7), digests((1 << 40) + 8)
    assert len({*plain, *old, *new}) == 900
    for key, digest in zip(KEYS, old):
        assert EpochHasher(NAME, 7)(key) == digest and digest[TAG_AT:] == tag_of(7) == b"\7\0\0\0"
    assert [each[:TAG_AT] for each in plain] == [each[:TAG_AT] for each in old] == [each[:TAG_AT] for each in new]
    assert tag_of((1 << 40) + 8) == tag_of(8)


def test_an_advance_hides_all_older_values_at_once(bench: Bench) -> None:
    assert bench.put(Hasher("plain")("key")) == Status.OK
    bench.advance(5)
    assert bench.store.stale.first, "there may be values without an epoch"
    bench.sweep()
    first, second = digests(5), digests(6)
    assert [bench.put(each) for each in first] == [Status.OK] * 300 and all(map(bench.found, first[:9]))
    entry = bench.store.table.entry(bench.store.table.lookup(first[0]))
    assert entry.flags & ENTRY_EPOCH
    bench.advance(6)
    assert not bench.store.stale.first, "O(1): nothing must be dropped before"
    assert not any(map(bench.found, first)) and bench.store.table.entries == 300
    assert bench.put(second[0]) == Status.OK and bench.found(second[0])
    bench.sweep()
    assert bench.store.table.entries == 1 and bench.store.stale.dropped == 1 + 299 + 1
    bench.advance(4)
    assert bench.found(second[0]), "an older epoch changes nothing"


def test_late_puts_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, old, new = digests(0)[0], digests(5)[0], digests(6)[0]
    bench.advance(5)
    assert bench.put(plain) == Status.OLD_EPOCH
    bench.advance(6)
    assert bench.put(old) == Status.OLD_EPOCH and bench.put(new) == Status.OK
    assert bench.store.stats()["put_failures"]["old_epoch"] == 2
    monkeypatch.setattr(bench.store.shard_words, "may_copy", lambda *_: True)
    assert bench.put(digests(5)[1], ABSENT) == Status.PRESENT, "a mover has nothing to do about it"
    assert bench.store.commit_failures["old_epoch"] == 2 and not bench.store.copies, "nor is it a failed put, or a copy"
    number = bench.session.namespace
    stream = bench.store.sessions.open(1, 1, DEFAULT_NAMESPACE)
    stream.relays = True
    assert bench.put(old, (number + 1) << NAMESPACE_SHIFT, stream) == Status.OLD_EPOCH
    assert bench.put(digests(6)[1], (number + 1) << NAMESPACE_SHIFT, stream) == Status.OK
    assert bench.put(old, 0, stream) == Status.OK, "another namespace has no epoch"
    assert bench.store.commit_failures["old_epoch"] == 3
    assert bench.store.sessions.granted_bytes == 0


def test_the_first_advance_drops_what_has_no_epoch(bench: Bench) -> None:
    plain = digests(0)
    for each in plain:
        assert bench.put(each) == Status.OK
    other = bench.store.sessions.open(1, 1, "other")
    assert bench.put(Hasher("other")("kept"), session=other) == Status.OK
    bench.advance(5)
    assert bench.put(digests(5)[0]) == Status.OK
    assert bench.reader.locate(plain[1]) is not None, "readers of such values look at nothing"
    bench.sweep()
    assert not bench.store.stale.first and bench.store.table.entries == 2
    assert bench.found(digests(5)[0]) and bench.found(Hasher("other")("kept"))


def test_a_successor_goes_on_with_the_first_advance(bench: Bench) -> None:
    """The line has the epoch already, so nothing else tells that older entries may be left."""
    for each in digests(0):
        bench.put(each)
    bench.advance(5)
    bench.store.stale.step()
    bench.succeed()
    assert bench.store.ledger.namespaces.epochs() == {NAME: 5} and not bench.store.stale.first
    bench.advance(5)
    assert bench.store.stale.first and bench.store.table.entries > 200
    bench.sweep()
    assert bench.store.table.entries == 0
    bench.succeed()
    assert bench.put(digests(5)[0]) == Status.OK and bench.found(digests(5)[0])


def test_a_lease_ends_by_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.advance(5)
    bench.sweep()
    digest = digests(5)[0]
    bench.put(digest)
    now = [boottime_ns()]
    monkeypatch.setattr(ArenaReader, "clock", staticmethod(lambda: now[0]))
    bench.store.ledger.namespaces.clock = lambda: now[0]
    bench.store.ledger.namespaces.extend_lease(now[0] + 10)
    assert bench.found(digest)
    now[0] += 10
    assert not bench.found(digest)
    bench.store.ledger.namespaces.extend_lease(now[0] + 1)
    assert bench.found(digest)
    bench.store.ledger.namespaces.extend_lease(0)
    assert not bench.found(digest)


def test_a_reader_looks_at_the_lease_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped between its looks; meanwhile the epoch and then a new lease come. The other order would read it."""
    bench.advance(5)
    bench.sweep()
    digest = digests(5)[0]
    bench.put(digest)
    found = bench.reader.locate(digest)
    assert found is not None
    bench.store.ledger.namespaces.extend_lease(0)

    def later() -> int:
        bench.advance(6)
        return boottime_ns()

    monkeypatch.setattr(ArenaReader, "clock", staticmethod(later))
    assert not bench.reader.is_current(found)


@pytest.mark.parametrize("broken", ["reader", "worker", "flag", "sweep"])
def test_each_check_is_needed(bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Positive control: without it an old value is found."""
    spaces = bench.store.ledger.namespaces
    if broken == "sweep":
        bench.put(digests(0)[0])
        bench.advance(5)
        monkeypatch.setattr(bench.store.stale, "_drop_many", lambda _slots, _offsets: None)
        bench.sweep()
        assert bench.reader.contains(digests(0)[0])
        return
    bench.advance(5)
    bench.sweep()
    old = digests(5)[0]
    if broken == "flag":
        spaces.tags.clear()
        bench.put(old)
        spaces.tags[bench.session.namespace] = tag_of(5)
    else:
        bench.put(old)
    bench.advance(6)
    if broken == "reader":
        monkeypatch.setattr(ArenaReader, "is_current", lambda *_: True)
    elif broken == "worker":
        monkeypatch.setattr(spaces, "readable", lambda *_: True)
    found: Any = bench.reader.locate(old)
    by_reader = bench.reader.is_own(found)
    by_worker = bench.store.exists([old]) == [Status.OK]
    assert (by_reader, by_worker) == (broken != "worker", broken == "worker")


def test_old_values_go_before_others_when_room_is_needed(bench: Bench) -> None:
    other = bench.store.sessions.open(1, 1, "other")
    kept = Hasher("other").many([f"kept {number}" for number in range(20)])
    for each in kept:
        assert put_large(bench, each, other)
    bench.advance(5)
    bench.sweep()
    number = 0
    while not sum(bench.store.space.evictions.values()):
        assert put_large(bench, EpochHasher(NAME, 5)(f"large {number}"), bench.session)
        number += 1
        assert number < 200
    left = [each for each in kept if bench.found(each)]
    assert left and number > 20
    bench.advance(6)
    before = dict(bench.store.space.evictions)
    for again in range(number - 2):
        assert put_large(bench, EpochHasher(NAME, 6)(f"large {again}"), bench.session)
    assert bench.store.space.evictions == before and all(map(bench.found, left))


@pytest.mark.parametrize("size", [100_000, 1 << 20])
def test_a_grant_of_another_size_drops_few_of_many_old_values(bench: Bench, size: int) -> None:
    """They lie in all slabs, so that no number of them makes room. It was a turn of the worker that took minutes."""
    evictions = bench.store.space.evictions
    while not sum(evictions.values()):
        put_small(bench, 1)
    bench.advance(5)
    stale = bench.store.stale
    before = stale.dropped
    assert len(bench.store.sessions.grant(bench.session, size, 1)) == 1, "there is room all the same"
    assert 0 < stale.dropped - before <= STALE_ENTRIES and stale.due
    live, dropped = dict(evictions), stale.dropped
    for _ in range(20):
        put_small(bench, 5)
    assert evictions == live and stale.dropped > dropped, "those of its own size go before what can be read"


def put_small(bench: Bench, epoch: int, session: Session | None = None) -> None:
    first = bench.store.table.entries
    by = session or bench.session
    grants = bench.store.sessions.grant(by, 4000, 16)
    records = [
        (EpochHasher(NAME, epoch)(f"k{first + at}"), grant, 4000, 0, ENTRY_EPOCH, 0)
        for at, (grant, *_) in enumerate(grants)
    ]
    assert bench.store.commit(by, records) == [Status.OK] * 16
    bench.store.apply_pending()


def test_a_batch_evicts_nothing_readable_while_old_values_make_room(bench: Bench) -> None:
    """Also what is older than they are: a batch drops more of them than one step does."""
    other = bench.store.sessions.open(1, 1, "other")
    bench.advance(5)
    bench.sweep()
    pages = bench.store.space.free_bytes // 4096 // 16
    for number in range(pages):
        put_small(bench, 5, other if number < pages // 2 else None)
    bench.advance(6)
    evictions, stale = bench.store.space.evictions, bench.store.stale
    for drops in (512, 1024):
        grants = bench.store.sessions.grant(bench.session, 4000, 512)
        assert len(grants) == 512 and not sum(evictions.values())
        assert drops - 16 <= stale.dropped <= drops + STALE_ENTRIES
        bench.store.sessions.return_grants(bench.session, [])
    assert stale.due


def test_old_values_go_together_but_for_those_that_are_held(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one they made a batch of grants several times as slow as evictions are."""
    bench.advance(5)
    bench.sweep()
    for _ in range(4):
        put_small(bench, 5)
    stale, store, before = bench.store.stale, bench.store, bench.store.space.free_bytes
    pinned = [row[4:] for row in store.locate(bench.session, [EpochHasher(NAME, 5)(f"k{at}") for at in range(3)])]
    assert all(pin for _, pin in pinned)
    drop, alone = stale._drop, []

    def drop_alone(slot: int) -> None:
        alone.append(slot)
        drop(slot)

    monkeypatch.setattr(stale, "_drop", drop_alone)
    bench.advance(6)
    bench.sweep()
    assert stale.dropped == 64 and len(alone) == 3 and store.table.entries == 0
    assert store.space.free_bytes == before + 61 * 4096, "what a reader has pinned is still his"
    store.sessions.unpin(bench.session, [pin for _, pin in pinned])
    assert store.space.free_bytes == before + 64 * 4096
    check(store)


def test_one_grant_looks_at_one_block_of_slots(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is nothing old in it: a large table is looked at in the background."""
    while not sum(bench.store.space.evictions.values()):
        assert put_large(bench, EpochHasher(NAME, 1)(f"k{bench.store.table.entries}"), bench.session)
    other = bench.store.sessions.open(1, 1, "other")
    bench.advance(5, "other")
    looks: list[int] = []
    stale_from = bench.store.table.stale_from
    monkeypatch.setattr(bench.store.table, "stale_from", lambda at, tags: looks.append(at) or (*stale_from(at, tags),))
    assert bench.store.sessions.grant(other, 1 << 20, 1) and len(looks) <= 1


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of slots that a search for old entries looks at, one a step; few steps drop all of a block's."""
    monkeypatch.setattr("simm.table._BLOCK_SLOTS", SLOTS // 8)
    return 8


def plain_left(bench: Bench, session: Session) -> int:
    """Return how many entries of a namespace have no epoch."""
    entries = map(bench.store.table.entry, bench.store.table)
    return sum(each.namespace == session.namespace and not each.flags & ENTRY_EPOCH for each in entries)


def test_issue_a_first_advance_ends_whatever_else_advances(bench: Bench, blocks: int) -> None:
    """Each advance began the search anew. So the values in the last slots stayed, and no map was acknowledged."""
    other = bench.store.sessions.open(1, 1, "late")
    for number, session in enumerate((bench.session, other) * 100):
        assert bench.put(Hasher("plain")(f"{number}"), session=session) == Status.OK
    assert bench.put(Hasher("stays")("key"), session=bench.store.sessions.open(1, 1, "stays")) == Status.OK
    stale, names = bench.store.stale, {NAME: 5, "a": 5}
    bench.advance(5, "a")
    bench.sweep()
    stale.take(names)
    firsts, epoch = [bench.session], 5
    for step in range(2 * blocks):
        stale.step()
        if step % 3 == 2:
            names["a"] = epoch = epoch + 1
            if step == blocks // 2 + 1:  # in the middle of the first round
                names["late"] = epoch
                firsts.append(other)
            stale.take(names)
            for each in firsts:
                assert each.namespace in stale.first or not plain_left(bench, each), "not before they are gone"
    assert bench.session.namespace not in stale.first and not plain_left(bench, bench.session)
    for _ in range(blocks):
        names["a"] = epoch = epoch + 1
        stale.take(names)
        stale.step()
    assert len(firsts) == 2 and not stale.first and not plain_left(bench, other)
    assert stale.due, "the values of the one that goes on advancing are looked for again"
    bench.sweep()
    assert bench.store.table.entries == 1
    check(bench.store)


@pytest.mark.parametrize("seed", range(3))
def test_old_entries_go_in_any_order_of_advances_puts_and_steps(bench: Bench, blocks: int, seed: int) -> None:
    """Whoever has had its first advance acknowledged has no entry without an epoch. In the end no old one is left."""
    rng = random.Random(seed)
    sessions = {name: bench.store.sessions.open(1, 1, name) for name in ("a", "b", "c", "d")}
    stale, epochs, epoch = bench.store.stale, dict[str, int](), 4
    for number in range(200):
        name, what = rng.choice(list(sessions)), rng.random()
        if what < 0.75:
            hasher = EpochHasher(name, epochs[name]) if name in epochs else Hasher(name)
            assert bench.put(hasher(f"{number}"), session=sessions[name]) == Status.OK
        elif what < 0.9:
            stale.step()
        elif what < 0.93 or name in epochs:
            epochs[name] = epoch = epoch + 1
            stale.take(epochs)
            for each in epochs.keys() - {bench.store.ledger.namespaces.names[first] for first in stale.first}:
                assert not plain_left(bench, sessions[each])
    bench.sweep()
    assert not stale.first and epochs
    tags = bench.store.ledger.namespaces.tags
    for entry in map(bench.store.table.entry, bench.store.table):
        tag = entry.digest[TAG_AT:] if entry.flags & ENTRY_EPOCH else None
        assert tag == tags.get(entry.namespace)
    check(bench.store)


def put_large(bench: Bench, digest: bytes, session: Session) -> bool:
    size = 1 << 20
    grants = bench.store.sessions.grant(session, size, 1)
    statuses = [bench.store.commit(session, [(digest, grant[0], size, 0, 0, 0)])[0] for grant in grants]
    bench.store.apply_pending()
    return statuses == [Status.OK]


def test_lines_with_epochs_are_never_freed_and_outlive_their_names(bench: Bench) -> None:
    spaces = bench.store.ledger.namespaces
    bench.advance(5)
    bench.sweep()
    bench.advance(9, "not yet")
    bench.store.sessions.end(bench.session)
    spaces.begin_sweep([])
    spaces.end_sweep()
    assert spaces.epochs() == {NAME: 5, "not yet": 9}, "each has a line, as streams ask lines whether there are epochs"
    number = spaces.number("not yet")
    begin = bench.store.geometry.names_offset
    words = memoryview(bench.arena.mm)[begin : begin + NAMESPACES * NAMESPACE_LINE_BYTES].cast("Q")
    assert words[line_of(number) * 16 + 15] == 9 and words[line_of(number) * 16 + 14] == FOR_EVER
    words.release()
    spaces.forget_epochs()
    assert not spaces.epochs() and not spaces.tags and not bench.reader.has_epochs


@pytest.mark.parametrize("room", [False, True])
def test_values_of_names_without_a_line_go_with_the_first_epoch(bench: Bench, room: bool) -> None:
    """Their namespace has an epoch from then on, with which no digest ends. So nothing comes there later, either."""
    spaces = bench.store.ledger.namespaces
    spaces.keep([DEFAULT_NAMESPACE])
    default, others = spaces.number(DEFAULT_NAMESPACE), spaces.number(OTHERS_NAMESPACE)
    stream, mover = (bench.store.sessions.open(1, 1, name) for name in (DEFAULT_NAMESPACE, OTHERS_NAMESPACE))
    stream.relays, mover.copies = True, 1
    if not room:
        with pytest.raises(CapacityError):
            for number in range(NAMESPACES):
                spaces.number(f"name {number}")
    old, late, kept = (Hasher(name)("key") for name in ("no room", "late", DEFAULT_NAMESPACE))
    assert bench.put(old, others + 1 << NAMESPACE_SHIFT, stream) == bench.put(kept, session=stream) == Status.OK
    bench.advance(5, "no room")
    bench.sweep()
    assert not bench.found(old) and bench.found(kept)
    assert bench.put(late, others + 1 << NAMESPACE_SHIFT, stream) == Status.OLD_EPOCH
    assert bench.put(late, ABSENT, mover) == Status.PRESENT
    assert bench.reader.has_epochs, "streams store nothing there"
    assert spaces.epochs() == ({"no room": 5} if room else {}), "the supervisor hears of nobody else's"
    bench.store.sessions.end(mover)
    bench.succeed()
    assert bench.put(kept, default + 1 << NAMESPACE_SHIFT, stream_of(bench)) == Status.OK
    assert bench.put(late, others + 1 << NAMESPACE_SHIFT, stream_of(bench)) == Status.OLD_EPOCH
    set_shards(bench.store, 1, *owned(ALL_SHARDS, 1), cluster=7)
    assert bench.put(late, others + 1 << NAMESPACE_SHIFT, stream_of(bench)) == Status.OK, "another cluster has none"


def stream_of(bench: Bench) -> Session:
    stream = bench.store.sessions.open(1, 1, DEFAULT_NAMESPACE)
    stream.relays = True
    return stream


def test_another_cluster_has_other_epochs(bench: Bench) -> None:
    bench.advance(5)
    bench.sweep()
    bench.put(digests(5)[0])
    set_shards(bench.store, 1, *owned(ALL_SHARDS, 1), cluster=7)
    assert not bench.store.ledger.namespaces.epochs() and not bench.store.stale.due
    bench.session = bench.store.sessions.open(1, 1, NAME)
    assert bench.put(digests(0)[0]) == Status.OK and bench.found(digests(0)[0])
    bench.advance(2)
    assert bench.store.stale.first


def test_issue_a_lease_ends_with_its_cluster(bench: Bench) -> None:
    """The line had it when the first epochs of the next cluster came. That one's leases may be shorter."""
    bench.advance(5)
    set_shards(bench.store, 1, *owned(ALL_SHARDS, 1), cluster=7)
    bench.session = bench.store.sessions.open(1, 1, NAME)
    bench.store.stale.take({NAME: 7})
    bench.sweep()
    assert bench.put(digests(7)[0]) == Status.OK and not bench.found(digests(7)[0])
    bench.store.ledger.namespaces.extend_lease(FOR_EVER)
    assert bench.found(digests(7)[0])


def test_issue_an_arena_without_values_takes_its_first_epochs_at_once(bench: Bench) -> None:
    """It looked through its table for values of names without a place, and acknowledged its first map after that."""
    assert not bench.store.ledger.namespaces.keep([])
    bench.advance(5)
    assert not bench.store.stale.first and not bench.store.stale.due
    assert bench.put(digests(0)[0]) == Status.OLD_EPOCH and bench.put(digests(5)[0]) == Status.OK
    assert bench.found(digests(5)[0])
    bench.advance(6)
    assert bench.store.stale.due
    bench.sweep()
    assert bench.store.table.entries == 0


def test_a_successor_shows_the_epoch_that_its_predecessor_had_stored(bench: Bench) -> None:
    """It died between the vault and the arena. It acknowledges the epoch, and readers look at the arena."""
    bench.advance(5)
    bench.sweep()
    old = digests(5)[0]
    assert bench.put(old) == Status.OK
    spaces = bench.store.ledger.namespaces
    shown, spaces._shown = spaces._shown, None
    bench.advance(6)
    spaces._shown = shown
    found = bench.reader.locate(old)
    assert found is not None and bench.reader.is_current(found), "the arena has the epoch before"
    bench.succeed()
    bench.advance(6)
    assert not bench.found(old)


def test_values_without_an_epoch_are_not_looked_at(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.advance(5)
    bench.sweep()
    other = bench.store.sessions.open(1, 1, "other")
    theirs, ours = Hasher("other").many(KEYS[:40]), digests(5)[:3]
    for each in theirs:
        assert bench.put(each, session=other) == Status.OK
    for each in ours:
        assert bench.put(each) == Status.OK
    looked: list[bytes] = []
    has_current = ArenaReader.has_current
    monkeypatch.setattr(ArenaReader, "has_current", lambda self, each: looked.append(each) or has_current(self, each))
    absent = Hasher("other")("absent")
    assert bench.reader.current_many([*theirs, absent, *ours]) == [True] * 40 + [False] + [True] * 3
    assert looked == ours
    bench.store.ledger.namespaces.extend_lease(0)
    assert bench.reader.current_many([*theirs, *ours]) == [True] * 40 + [False] * 3


@pytest.mark.parametrize("count", [1, 40])
def test_an_old_entry_that_gives_way_between_two_looks_is_not_found(
    bench: Bench, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot has the flags of another entry by then, which has no epoch."""
    bench.advance(5)
    old = digests(5)[0]
    assert bench.put(old) == Status.OK
    bench.advance(6)
    table = bench.store.table
    slot = table.lookup(old)
    entry = table.entry(slot)
    other = old[:8] + bytes(each ^ 0xFF for each in old[8:])
    candidates = ArenaReader.candidates

    def then_it_goes(self: ArenaReader, wanted: list[bytes]) -> Any:
        found = candidates(self, wanted)
        if table.lookup(old) >= 0:
            table.clear(slot)
            done = table.publish(other, entry.offset, entry.length, 0, entry.chunk, 0, 0, entry.stored)
            assert done is not None and done[2] == slot
        return found

    monkeypatch.setattr(ArenaReader, "candidates", then_it_goes)
    assert bench.reader.current_many([old] * count) == [False] * count
    assert table.lookup(other) == slot


def test_a_client_says_nothing_that_the_worker_says(bench: Bench) -> None:
    other = bench.store.sessions.open(1, 1, "other")
    every = (1 << 16) - 1
    kept = every & ~(ENTRY_EPOCH | COMMIT_NEAR)  # the latter asks for a copy, and is no flag of an entry
    for copies, left in ((0, kept & ~ENTRY_BOUND), (1, kept)):
        other.copies = copies  # a mover copies what another worker has said
        digest = Hasher("other")(f"key {copies}")
        ((number, _, _),) = bench.store.sessions.grant(other, 64, 1)
        assert bench.store.commit(other, [(digest, number, 64, 0, every, 0)]) == [Status.OK]
        assert bench.store.table.entry(bench.store.table.lookup(digest)).flags == left


def test_an_epoch_whose_digests_end_like_those_of_an_old_one(bench: Bench) -> None:
    """A peer's false claim drives the epoch so far at once."""
    bench.advance(5)
    bench.sweep()
    old = digests(5)[0]
    other = bench.store.sessions.open(1, 1, "other")
    kept = Hasher("other")("kept")
    assert bench.put(old) == bench.put(kept, session=other) == Status.OK
    bench.advance(5 + EPOCHS_AHEAD)
    assert EpochHasher(NAME, 5 + EPOCHS_AHEAD)(KEYS[0]) == old
    assert not bench.found(old) and bench.found(kept)
    assert bench.put(old) == Status.OK and bench.found(old)


def test_what_a_predecessor_left_means_nothing_in_another_cluster(bench: Bench) -> None:
    bench.advance(5)
    bench.store.stale.step()
    bench.succeed()
    set_shards(bench.store, 1, *owned(ALL_SHARDS, 1), cluster=7)
    assert not bench.store.ledger.namespaces.take_epochs({})


def test_the_header_tells_whether_a_bound_client_has_stored_an_entry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then nobody can have found the entry; and for good, as nobody counts them. A successor goes on with it."""
    store = bench.store
    assert bench.put(digests(0)[0]) == Status.OK and store.header[Word.BOUND] == NONE_BOUND
    publish = store.table.publish
    seen: list[int] = []

    def noted(*entry: Any) -> Any:
        seen.append(store.header[Word.BOUND])
        return publish(*entry)

    monkeypatch.setattr(store.table, "publish", noted)
    stream = store.sessions.open(1, 1, NAME)
    stream.relays = True
    options = (store.ledger.namespaces.number(NAME) + 1) << NAMESPACE_SHIFT | BOUND
    assert bench.put(digests(0)[1], options, stream) == Status.OK and seen == [SOME_BOUND]
    bench.succeed()
    assert bench.store.header[Word.BOUND] == SOME_BOUND == bench.reader.words[Word.BOUND]
