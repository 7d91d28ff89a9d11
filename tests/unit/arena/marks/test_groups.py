"""Groups in a store: what is marked, what leaves together, by which policy, and what a death leaves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import psutil
import pytest

from simm import table as table_module
from simm.arena import space as space_module
from simm.arena.events.ring import LOOKBACK
from simm.arena.hashing import shard_of
from simm.arena.layout import Word
from simm.arena.marks import groups as groups_module
from simm.arena.marks.groups import Groups, is_group, members_of, number_of
from simm.arena.sessions import SessionTable
from simm.arena.space import Space
from simm.arena.store import Store
from simm.constants import (
    BATCH_KEYS_MAX,
    GHOST_STEP,
    GROUP_KEYS_MAX,
    KEEP_HARD,
    KEEP_SOFT,
    POLICY_NAMES,
    SHARD_COUNT,
)
from simm.errors import CorruptionError
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import Status
from simm.wire.shard_set import MOVING
from tests.support.consistency import check
from tests.support.crash import TORN_MAX, Cut, Operation, chosen
from tests.support.dose import dose
from tests.support.event_claims import listed
from tests.support.group_world import GroupWorld, check_groups, members
from tests.support.store_world import digest_of, new_segment, remove_segment

KIB, MIB = 1 << 10, 1 << 20
SEGMENT_BYTES = 16 * MIB


@pytest.fixture(scope="module")
def small_segment() -> Iterator[OwnedArena]:
    """For deaths at each store: what is not data is copied for each."""
    made = new_segment(8 * MIB, 64)
    yield made
    remove_segment(made)


def test_a_number_says_how_many_there_are() -> None:
    for count in (2, 3, 17, GROUP_KEYS_MAX):
        digests = members("m", count)
        number = number_of(digests)
        assert 0 < number < 1 << 32 and members_of(number) == count
        assert number_of(digests[::-1]) == number != number_of(members("n", count))


def test_what_is_no_group() -> None:
    digests = members("a", GROUP_KEYS_MAX + 1)
    assert is_group(digests[:2]) and is_group(digests[:-1])
    assert not is_group(digests)
    assert not is_group(digests[:1]) and not is_group([])
    assert not is_group([digests[0], digests[1], digests[0]])
    other = next(each for each in map(digest_of, "abc") if shard_of(each) != shard_of(digests[0]))
    assert not is_group([digests[0], other])


def test_the_first_group_of_a_large_table_touches_few_pages(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made within a request, and a turn of seconds is what a table of 36 million slots took for it."""
    world = GroupWorld(segment)
    player, pair = world.join(), members("p")
    for digest in pair:
        world.put(player, digest, 5000)
    groups = world.store.groups
    monkeypatch.setattr(groups, "_table", Large(groups._table))
    process = psutil.Process()
    before = process.memory_info().rss
    assert groups.mark_many([pair]) == [Status.OK] and groups.count == 1
    assert process.memory_info().rss - before < Large.slots, "of five bytes a slot"
    check_groups(world.store)


class Large:
    """A table that says that it has many slots."""

    slots = 40_000_000

    def __init__(self, table: object) -> None:
        self._table = table

    def __getattr__(self, name: str) -> object:
        return getattr(self._table, name)


def test_marking_is_all_or_nothing(segment: OwnedArena) -> None:
    world = GroupWorld(segment)
    player = world.join()
    pair, triple = members("p"), members("t", 3)
    for digest in (*pair, *triple[:2]):
        world.put(player, digest, 5000)
    groups = world.store.groups
    assert groups.mark_many([pair, triple, pair[:1], [*pair, triple[0]]]) == [
        Status.OK, Status.NOT_FOUND, Status.BAD_REQUEST, Status.BAD_REQUEST
    ]  # fmt: skip
    assert groups.count == 1
    check_groups(world.store)
    assert groups.mark_many([pair]) == [Status.OK] and groups.count == 1  # once more
    world.set_shards(bytes(2048))
    assert groups.mark_many([pair]) == [Status.WRONG_OWNER]


def test_marks_of_others_stay(segment: OwnedArena) -> None:
    """The lower half of a slot's marks says until when it is kept."""
    world = GroupWorld(segment)
    player = world.join()
    pair = members("p")
    for digest in pair:
        world.put(player, digest, 5000)
    table = world.store.table
    slots = [table.lookup(digest) for digest in pair]
    table.set_marks(slots[0], 77)
    world.group(pair)
    assert [table.marks(slot) & 0xFFFF_FFFF for slot in slots] == [77, 0]
    world.put(player, pair[0], 6000)  # an overwrite changes nothing
    world.check()
    world.store.groups.ungroup(slots[0])
    assert [table.marks(slot) for slot in slots] == [77, 0]


def test_a_member_of_two_groups_is_in_the_last_one(segment: OwnedArena) -> None:
    world = GroupWorld(segment)
    player = world.join()
    four = members("four", 4)
    for digest in four:
        world.put(player, digest, 5000)
    world.group(four[:3])
    world.group(four[2:])
    world.check()
    world.delete(four[0])  # of no group any longer
    assert set(world.values) == set(four[1:])
    world.delete(four[2])
    assert set(world.values) == {four[1]}


def test_what_is_hard_kept_stays(segment: OwnedArena) -> None:
    world = GroupWorld(segment)
    player = world.join()
    triple = members("t", 3)
    for digest in triple:
        world.put(player, digest, 5000)
    world.group(triple)
    assert world.store.keep([triple[1]], KEEP_HARD, 60, 0) == world.store.keep([triple[2]], KEEP_SOFT, 60, 0) == [0]
    assert world.store.delete([triple[0]]) == [Status.OK]
    assert [world.store.table.lookup(digest) >= 0 for digest in triple] == [False, True, False]
    assert world.store.groups.count == 0 and world.store.keeping.kept.hard_bytes


def test_what_is_pinned_stays_as_an_ordinary_entry(segment: OwnedArena) -> None:
    world = GroupWorld(segment)
    player = world.join()
    triple = members("t", 3)
    for digest in triple:
        world.put(player, digest, 5000)
    world.group(triple)
    pin = world.pin(player, triple[1])
    world.delete(triple[0])
    assert set(world.values) == {triple[1]}
    world.check()
    world.unpin(player, [pin])
    world.die()  # nothing says any longer that it is of a group
    world.check()
    assert set(world.values) == {triple[1]}


def test_a_spoilt_member_takes_the_others_along(segment: OwnedArena) -> None:
    world = GroupWorld(segment)
    player = world.join()
    pair = members("s")
    for digest in pair:
        world.put(player, digest, 5000)
    world.group(pair)
    world.store.drop_spoilt(world.store.table.lookup(pair[0]))
    world.store.apply_pending()
    assert world.store.table.lookup(pair[1]) < 0 and world.store.stats()["group_evictions"] == 1
    check_groups(world.store)


# -- many orphans at once -----------------------------------------------------------------------------


def taken_apart(segment: OwnedArena, seed: int) -> tuple[object, ...]:
    """Delete one member of each of many groups at once. Return what is left, by all who count it."""
    rng, world = random.Random(seed), GroupWorld(segment, slots=1024)
    store, player = world.store, world.join()
    store.set_quotas({"world": 1 << 40})
    wholes = [members(number, rng.choice([2, 5, 12])) for number in range(30)]
    single = [digest_of(f"single {number}") for number in range(10)]
    for digest in itertools.chain(*wholes, single):
        assert world.put(player, digest, rng.choice([64, 5000, 20_000, 90_000]))
    for whole in wholes:
        world.group(whole)
    others = [digest for whole in wholes for digest in whole[1:]]
    chosen_ones = rng.sample(others, 9)
    held, hard, soft = (chosen_ones[at::3] for at in range(3))
    for digest in held:
        world.pin(player, digest)
    for how, digests in ((KEEP_HARD, hard), (KEEP_SOFT, soft)):
        assert store.keep(digests, how, 60, 0) == [Status.OK] * 3
    for digest in rng.sample(others, 40):
        store.visited[store.table.lookup(digest)] = 1
    words = store.shard_words
    for shard in range(0, SHARD_COUNT, 2):
        words.words[shard] |= MOVING
    words._recount()
    beats = store.header[Word.HEARTBEAT]
    assert store.delete([whole[0] for whole in wholes]) == [Status.OK] * 30
    left = {digest for digest in (*others, *single) if store.table.lookup(digest) >= 0}
    assert {*single, *held, *hard} <= left and not left & {*soft}
    assert listed(world.reader).keys() == left
    assert store.exists(sorted({*others} - left)) == [words.status_of_miss(each) for each in sorted({*others} - left)]
    check(store)
    check_groups(store)
    told = (
        left, store.groups.evicted, store.quotas and store.quotas.stats(), store.space.free_bytes, words.dropped,
        store.space.kept.bytes, store.space.kept.hard_slots, store.header[Word.HEARTBEAT] > beats,
    )  # fmt: skip
    world.recover()
    check_groups(world.store)
    assert listed(world.reader).keys() == left
    return told


@pytest.mark.parametrize("seed", dose(range(6), 2))
def test_many_orphans_go_as_one_by_one(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In one turn, though in parts. Some were hidden for seconds, and events, quotas and evictions took no notice."""
    monkeypatch.setattr(groups_module, "MANY", 1 << 30)
    *naive, beaten = taken_apart(segment, seed)
    assert not beaten
    for part in (BATCH_KEYS_MAX, 50, 1):
        monkeypatch.setattr(groups_module, "MANY", 1)
        monkeypatch.setattr(groups_module, "BATCH_KEYS_MAX", part)
        *found, beaten = taken_apart(segment, seed)
        assert found == naive and beaten


def test_one_part_of_many_orphans_is_bounded(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of events takes no more, and there is a heartbeat after each."""
    monkeypatch.setattr(groups_module, "BATCH_KEYS_MAX", 30)
    world = GroupWorld(segment, slots=1024)
    store, player = world.store, world.join()
    wholes = [members(number, 12) for number in range(20)]
    for whole in wholes:
        for digest in whole:
            assert world.put(player, digest, 64)
        world.group(whole)
    parts: list[tuple[int, int]] = []
    drop = store.groups._drop_many

    def counted(slots: list[int], offsets: list[int]) -> None:
        parts.append((len(slots), store.header[Word.HEARTBEAT]))
        drop(slots, offsets)

    store.groups._drop_many = counted
    assert store.delete([whole[0] for whole in wholes]) == [Status.OK] * 20
    assert [count for count, _ in parts] == [30] * 7 + [10] and len({beats for _, beats in parts}) == 8
    assert store.table.entries == 0 and store.space.free_bytes == store.geometry.data_bytes
    assert BATCH_KEYS_MAX < LOOKBACK


def test_the_heartbeat_moves_while_a_delete_takes_groups_apart(segment: OwnedArena) -> None:
    """Readers wait for half a second. It moves before the first part is dropped, too."""
    world = GroupWorld(segment, slots=4096)
    store, player = world.store, world.join()
    wholes = [members(number, 3) for number in range(600)]
    for whole in wholes:
        for digest in whole:
            assert world.put(player, digest, 64)
        world.group(whole)
    left: list[int] = []
    real = store.groups.leave

    def counted(slot: int, evicted: bool) -> None:
        left.append(store.header[Word.HEARTBEAT])
        real(slot, evicted)

    store.groups.leave = counted  # type: ignore[method-assign]
    assert store.delete([whole[0] for whole in wholes]) == [Status.OK] * 600
    assert len(left) >= 600 and len(set(left[:600])) >= 3


def test_a_death_while_many_are_dropped(small_segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "MANY", 1)
    monkeypatch.setattr(table_module, "COLUMNS_FROM", 1)
    test_no_death_leaves_a_part_of_a_group(small_segment, deleting)


def test_a_value_that_is_put_over_an_orphan_stays(segment: OwnedArena) -> None:
    """A grant has evicted the other member, and nothing was settled before the put, which was acknowledged."""
    world = GroupWorld(segment, slots=1024)
    store, player = world.store, world.join()
    pair = members("p")
    for digest in pair:
        world.put(player, digest, 60_000)
    world.group(pair)
    session = player.session
    (own, *_), = store.sessions.grant(session, 60_000, 1)
    while not store.groups.orphans:
        (grant, *_), = store.sessions.grant(session, 60_000, 1)
        if not store.groups.orphans:
            assert store.commit(session, [(digest_of(f"more {grant}"), grant, 60_000, 0, 0, 0)]) == [Status.OK]
    (left,) = [digest for digest in pair if store.table.lookup(digest) >= 0]
    assert store.commit(session, [(left, own, 60_000, 0, 0, 0)]) == [Status.OK]
    store.apply_pending()
    assert store.exists([left]) == [Status.OK]
    world.recover()
    assert world.store.exists([left]) == [Status.OK]


def test_an_orphan_is_not_found_before_it_is_dropped(segment: OwnedArena) -> None:
    world = GroupWorld(segment)
    store, player = world.store, world.join()
    pair = members("p")
    for digest in pair:
        world.put(player, digest, 5000)
    world.group(pair)
    store.drop_spoilt(store.table.lookup(pair[0]))
    assert store.groups.orphans and store.exists(pair) == [Status.NOT_FOUND] * 2


# -- against the model --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(2), 1))
def test_seeded_runs(segment: OwnedArena, seed: int, policy: str) -> None:
    rng = random.Random(seed)
    world = GroupWorld(segment, slots=rng.choice([64, 512]), policy=policy)
    names = [members(number, rng.choice([2, 2, 3, 7])) for number in range(60)]
    world.join()
    for number in range(250):
        players = [player for player in world.players if player.connected]
        player = rng.choice(players) if players else world.join()
        what, digests = rng.random(), rng.choice(names)
        if what < 0.45:
            stored = [world.put(player, digest, rng.choice([5000, 70_000, 300 * KIB, 600 * KIB])) for digest in digests]
            if all(stored) and rng.random() < 0.9:
                world.group(digests)
        elif what < 0.50:
            world.group(rng.sample(digests, 2))
        elif what < 0.60:
            world.put(player, rng.choice(digests), 20_000)
        elif what < 0.65:
            world.put(player, digest_of(f"single {rng.randrange(30)}"), 300 * KIB)
        elif what < 0.73:
            world.delete(rng.choice(digests))
        elif what < 0.80:
            world.pin(player, rng.choice(digests))
        elif what < 0.90 and player.pins:
            world.unpin(player, rng.sample(sorted(player.pins), rng.randint(1, len(player.pins))))
        elif what < 0.98:
            slot = world.store.table.lookup(rng.choice(digests))
            if slot >= 0:
                world.store.visited[slot] = 1
        else:
            world.die()
        if number % 25 == 0:
            world.check()
    world.check()
    assert world.together and world.deaths
    world.wind_up_groups()


# -- eviction -----------------------------------------------------------------------------------------


class Arena:
    """A store with one client that fills no chunk."""

    def __init__(self, segment: OwnedArena, policy: str = "lru") -> None:
        world = GroupWorld(segment, slots=4096, policy=policy)
        self.store, self.session = world.store, world.join().session

    def put_group(self, digests: list[bytes], sizes: tuple[int, ...]) -> None:
        store = self.store
        for digest, size in zip(digests, sizes):
            ((number, _, _),) = store.sessions.grant(self.session, size, 1)
            store.apply_pending()
            assert store.commit(self.session, [(digest, number, size, 0, 0, 0)]) == [Status.OK]
            store.apply_pending()
        assert store.groups.mark_many([digests]) == [Status.OK]

    def gone(self) -> int:
        """Return how many entries have been evicted, or dropped with those."""
        return self.store.groups.evicted + sum(self.store.space.evictions.values())

    def read(self, digest: bytes) -> None:
        """Get a value as a reader does."""
        slot = self.store.table.lookup(digest)
        if slot >= 0:
            self.store.visited[slot] = 1

    def orphaned(self, pairs: list[list[bytes]]) -> float:
        """Return the share of all stored bytes that is of no use, as the other one of the pair is gone."""
        lookup, entry = self.store.table.lookup, self.store.table.entry
        total = lost = 0
        for pair in pairs:
            sizes = [entry(slot).chunk for slot in map(lookup, pair) if slot >= 0]
            total += sum(sizes)
            lost += sum(sizes) if len(sizes) == 1 else 0
        return lost / total


def churn(segment: OwnedArena, policy: str) -> float:
    """Put pairs of two sizes through an arena, of which some are read; return the greatest share of orphaned bytes."""
    rng, arena = random.Random(3), Arena(segment, policy)
    pairs: list[list[bytes]] = []
    worst = 0.0
    for number in range(800):
        pairs.append(members(number))
        arena.put_group(pairs[-1], (60 * KIB, 20 * KIB))
        for pair in rng.sample(pairs[-150:], min(len(pairs), 8)):
            arena.read(pair[0])
        if number % 100 == 99:
            worst = max(worst, arena.orphaned(pairs))
    check_groups(arena.store)
    return worst


@pytest.mark.parametrize(("size", "count"), [(4 * MIB, 1), (4 * KIB, 300)], ids=["a window", "a batch"])
def test_one_request_for_room_leaves_a_bounded_number_of_orphans(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, size: int, count: int
) -> None:
    """The other members lie in all slabs: 64 MiB took a million values in one turn. The next request goes on."""
    most, part = 128, 2
    arena = full_of_scattered_groups(segment, monkeypatch, most, part)
    store, session = arena.store, arena.session
    got = asked = 0
    while got < count:
        before, beats = arena.gone(), store.header[Word.HEARTBEAT]
        got += len(store.sessions.grant(session, size, count - got))
        store.apply_pending()
        gone = arena.gone() - before
        assert gone <= most + (part + 2) * GROUP_KEYS_MAX and store.header[Word.HEARTBEAT] - beats >= gone // most
        check_groups(store)
        asked += 1
        assert asked < 100, got
    assert got == count and asked > 1 and store.sessions.refused == 0
    check(store)


def full_of_scattered_groups(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, most: int, part: int
) -> Arena:
    """Return an arena of which each slab has a member of each group, and where a request leaves few orphans."""
    monkeypatch.setattr(space_module, "ORPHANS_MAX", most)
    monkeypatch.setattr(space_module, "PART_WITH_GROUPS", part)
    arena = Arena(segment)
    store, session = arena.store, arena.session
    count_of_groups = store.space.free_bytes // (4 * KIB * GROUP_KEYS_MAX)
    wholes = [members(number, GROUP_KEYS_MAX) for number in range(count_of_groups)]
    for each in zip(*wholes):
        for digest in each:
            ((number, _, _),) = store.sessions.grant(session, 4 * KIB, 1)
            assert store.commit(session, [(digest, number, 4 * KIB, 0, 0, 0)]) == [Status.OK]
        store.apply_pending()
    assert store.groups.mark_many(wholes).count(Status.OK) > count_of_groups * 3 // 4  # full sets have evicted some
    return arena


def test_all_that_one_request_wants_shares_the_bound(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orphans of one want were dropped before the next one, for which the bound began anew."""
    most, part = 256, 2
    arena = full_of_scattered_groups(segment, monkeypatch, most, part)
    sessions = arena.store.sessions
    pieces = 0
    for _ in range(3):
        before = arena.gone()
        wants = [(900 * KIB >> half, 1) for half in range(7)]  # each is below what the one before was short of
        grants, came = sessions.grant_each(arena.session, [*wants, (4 * KIB, 1)])
        arena.store.apply_pending()
        assert not came and arena.gone() - before <= most + (part + 2) * GROUP_KEYS_MAX
        assert arena.store.space.gone == 0 == sessions.refused, "it was not refused, and the next one begins anew"
        check_groups(arena.store)
        pieces += len(grants)
    assert pieces
    check(arena.store)


def test_one_value_whose_room_is_not_made_at_once_is_sought_once(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked for idle grants: there is room once the session asks again."""
    arena = full_of_scattered_groups(segment, monkeypatch, 128, 2)
    searches: list[int] = []
    search = Space.allocate

    def allocate(space: Space, size: int) -> int:
        searches.append(size)
        return search(space, size)

    monkeypatch.setattr(Space, "allocate", allocate)
    monkeypatch.setattr(SessionTable, "_recall", lambda *_: pytest.fail("others are asked for grants"))
    assert not arena.store.sessions.grant(arena.session, MIB, 1) and arena.store.space.cut_short
    assert searches == [MIB]
    arena.store.apply_pending()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_nothing_is_orphaned_by_churn(segment: OwnedArena, policy: str) -> None:
    assert churn(segment, policy) == 0.0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_control_without_groups_bytes_are_orphaned(
    segment: OwnedArena, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Groups, "drop_orphans", lambda groups: groups.orphans.clear())
    monkeypatch.setattr(f"{__name__}.check_groups", lambda store: None)
    assert churn(segment, policy) > 0.01


def used_pairs_left(segment: OwnedArena, policy: str) -> int:
    """Return how many of 20 pairs stay, of each of which one member is read, while 60 MiB are put."""
    arena = Arena(segment, policy)
    hot = [members(f"hot {number}") for number in range(20)]
    for number in range(500):
        arena.put_group(hot[number] if number < 20 else members(number), (60 * KIB, 60 * KIB))
        for first, _ in hot[: number + 1]:
            arena.read(first)
    lookup = arena.store.table.lookup
    return sum(lookup(first) >= 0 and lookup(second) >= 0 for first, second in hot)


@pytest.mark.parametrize("policy", ["lru", "reuse", "sieve"])
def test_a_use_of_one_member_counts_for_all(
    segment: OwnedArena, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert used_pairs_left(segment, policy) == 20
    monkeypatch.setattr(Groups, "is_used", lambda _groups, _slot: False)
    assert used_pairs_left(segment, policy) < 20


# -- deaths -------------------------------------------------------------------------------------------

TRIPLE = members("triple", 3)
Scene = Callable[[GroupWorld], Operation]


def marking(world: GroupWorld) -> Operation:
    player = world.join()
    for digest in TRIPLE:
        world.put(player, digest, 4096)
    return lambda: world.group(TRIPLE)


def marking_otherwise(world: GroupWorld) -> Operation:
    player = world.join()
    for digest in TRIPLE:
        world.put(player, digest, 4096)
    world.group(TRIPLE[:2])
    return lambda: world.group(TRIPLE)


def deleting(world: GroupWorld) -> Operation:
    operation = marking(world)
    operation()
    return lambda: world.delete(TRIPLE[1])


def evicting(world: GroupWorld) -> Operation:
    """The victim's class gives a chunk, and the others of its group are of other classes."""
    player = world.join()
    for digest, size in zip(TRIPLE, (MIB, 4096, 4096)):
        world.put(player, digest, size)
    world.group(TRIPLE)
    for number in range(3):  # and there is no room for more
        world.put(player, digest_of(f"more {number}"), MIB)
    return lambda: world.grant(player, MIB)


@pytest.mark.parametrize("scene", [marking, marking_otherwise, deleting, evicting])
def test_no_death_leaves_a_part_of_a_group(small_segment: OwnedArena, scene: Scene) -> None:
    """A worker dies at every store. Then the group is whole, or nothing says that there is one."""
    world = GroupWorld(small_segment, slots=64)
    cut = Cut(world, scene)  # type: ignore[arg-type]
    seen = set()
    for frame in chosen(cut.tape.frames, TORN_MAX):
        cut.show(frame)
        world.recover()
        check_groups(world.store)
        here = [world.store.table.lookup(digest) >= 0 for digest in TRIPLE]
        whole = world.store.groups.count == 1 and all(here)
        seen.add((whole, sum(here)))
        if scene in (deleting, evicting):
            assert whole or not any(here)
    if scene is marking:  # before the first mark, after one or two, and after the last one
        assert {(False, 3), (False, 2), (False, 1), (True, 3)} <= seen
    else:
        assert len(seen) > 1 and (scene is marking_otherwise or {(True, 3), (False, 0)} <= seen)


def test_control_a_recovery_that_keeps_parts(small_segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Groups, "restore", lambda groups: [])
    with pytest.raises((AssertionError, CorruptionError)):
        test_no_death_leaves_a_part_of_a_group(small_segment, deleting)


def put_groups(store: Store, groups: Iterator[list[bytes]], size: int, enough: Callable[[], bool]) -> list[bytes]:
    """Store groups until there are enough of them. Return all digests."""
    session, done = store.sessions.open(1, 1, "world"), []
    while not enough():
        digests = next(groups)
        for digest in digests:
            ((number, *_),) = store.sessions.grant(session, size, 1)
            store.now_ms += 1
            assert store.commit(session, [(digest, number, size, 0, 0, 0)]) == [Status.OK]
            store.apply_pending()
        done += digests
        store.groups.mark_many([digests])  # which may have lost a member meanwhile
    return done


def remembered(store: Store, digests: list[bytes]) -> float:
    """Return about which share of digests are remembered as evicted."""
    keys = [int.from_bytes(each[:8], "little") for each in digests]
    return GHOST_STEP * sum(map(store.space.victims.evicted, keys)) / len(keys)


@pytest.mark.parametrize("count", [4, 2 * groups_module.MANY])
def test_what_leaves_with_an_evicted_member_is_remembered_as_evicted(segment: OwnedArena, count: int) -> None:
    """``simm ctl why`` took the misses of all members but one for keys that were never stored."""
    store = GroupWorld(segment).store
    size, names = (2 * MIB // count), itertools.count()
    made = put_groups(store, (members(name, count) for name in names), size, lambda: store.groups.evicted >= 4 * count)
    gone = [each for each in made if store.table.lookup(each) < 0]
    assert len(gone) >= 4 * count and remembered(store, gone) > 0.8
    mates, before = made[-count:], store.groups.evicted_with
    assert before == store.groups.evicted
    assert store.delete(mates[:1]) == [Status.OK] and store.exists(mates) == [Status.NOT_FOUND] * count
    assert remembered(store, mates) == 0 and store.groups.evicted_with == before, "they were dropped as one was deleted"


def test_what_leaves_full_sets_is_remembered_as_evicted(small_segment: OwnedArena) -> None:
    store = GroupWorld(small_segment, slots=64).store
    pairs = map(members, itertools.count())
    made = put_groups(store, pairs, 64, lambda: store.set_evictions >= 40 and store.groups.evicted >= 20)
    assert not sum(store.space.evictions.values())
    gone = [each for each in made if store.table.lookup(each) < 0]
    assert len(gone) >= 60 and remembered(store, gone) > 0.8
