"""Near copies in a worker's arena: their share, who goes first, their time, their place, and deaths."""

from __future__ import annotations

import random
from functools import partial

import pytest

from simm.arena.hashing import TAG_AT, shard_of
from simm.arena.marks import near as near_module
from simm.arena.marks.kept import NEAR, KeptEntries, unpack
from simm.arena.marks.near import COMMIT_NEAR
from simm.arena.queues import Policy
from simm.arena.reader import ArenaReader
from simm.constants import NEAR_S, POLICY_NAMES
from simm.ipc.arena_files import OwnedArena
from simm.ipc.arena_lister import Lister
from simm.slab import chunk_bytes_for
from simm.wire.messages import NAMESPACE_SHIFT, Status
from simm.wire.shard_set import bitmap_of
from tests.support.crash import A, B, C, Operation, die_everywhere
from tests.support.dose import dose
from tests.support.store_world import ALL_SHARDS, Player, World, digest_of

MIB = 1 << 20
SEGMENT_BYTES = 16 * MIB
SIZE = 60_000
LARGE = 300_000


def copy(world: World, player: Player, digest: bytes, size: int = SIZE) -> int:
    """Store a near copy, and return the status of its commit; NO_SPACE without a grant."""
    numbers = world.grant(player, size)
    return world.commit_many(player, [(numbers[0], digest, size)], COMMIT_NEAR)[0] if numbers else Status.NO_SPACE


def copies(world: World, count: int, size: int = SIZE, name: str = "copy") -> list[bytes]:
    player = world.join()
    digests = [digest_of(f"{name} {number}") for number in range(count)]
    for digest in digests:
        assert copy(world, player, digest, size) == Status.OK
    world.store.apply_pending()
    return digests


def refused(world: World, player: Player, size: int, flags: int = COMMIT_NEAR) -> int:
    """Store a value that the model of a world would take, as it knows no quotas; return the status of its commit."""
    (number,) = world.grant(player, size)
    (status,) = world.store.commit(player.session, [(A, number, size, 0, flags, 0)])
    assert status != Status.OK and player.grants.pop(number)
    return int(status)


def there(world: World, digests: list[bytes]) -> int:
    return world.store.exists(digests).count(Status.OK)


# -- their share --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE, LARGE])
def test_they_take_a_tenth_and_a_new_one_replaces_the_oldest(segment: OwnedArena, size: int) -> None:
    world = World(segment, slots=1024)
    kept = world.store.space.kept
    most = kept.near_max // chunk_bytes_for(size)
    assert kept.near_max == world.geometry.data_bytes // 10 and most > 2
    digests = copies(world, 3 * most, size)
    assert there(world, digests) == there(world, digests[-most:]) == most
    assert kept.near_max - chunk_bytes_for(size) < kept.near_bytes <= kept.near_max
    assert world.store.near.counts == {"made": 3 * most, "refused": 0, "replaced": 2 * most, "expired": 0}
    assert world.store.stats()["kept"]["bytes"]["world"]["near"] == kept.near_bytes
    world.check()


def test_the_share_changes_and_readers_are_told(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    kept, near, size = world.store.space.kept, world.store.near, world.geometry.data_bytes
    reader = ArenaReader(segment.name)
    assert reader.near_max == kept.near_max == size // 10, "a worker that does not say has the default"
    digests = copies(world, kept.near_max // chunk_bytes_for(SIZE))
    for share in (50, 1, 0):
        near.bound_by((40, 20, share))
        assert reader.near_max == kept.near_max == size * share // 100
        assert (kept.hard_max, kept.namespace_max) == (size * 40 // 100, size * 20 // 100)
        assert there(world, digests) == len(digests), "what is there stays until there is need"
    assert copy(world, world.join(), A) == Status.OVER_QUOTA and there(world, [A]) == 0
    near.bound_by((40, 20, 50))
    assert copy(world, world.join(), A) == Status.OK and there(world, [A, *digests]) == len(digests) + 1
    world.check()


def test_a_smaller_share_holds_from_the_next_copy_on(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    chunk = chunk_bytes_for(SIZE)
    digests = copies(world, world.store.space.kept.near_max // chunk)
    half = 100 * (len(digests) // 2) * chunk // world.geometry.data_bytes
    world.store.near.bound_by((50, 25, half))
    assert copy(world, world.join(), A) == Status.OK
    most = world.store.space.kept.near_max
    assert most - chunk < world.store.space.kept.near_bytes <= most, "the oldest have gone"
    assert there(world, [A]) == 1 and there(world, digests) == most // chunk - 1
    world.check()


def test_one_that_was_read_is_replaced_later(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    most = world.store.space.kept.near_max // chunk_bytes_for(SIZE)
    digests = copies(world, most)
    world.store.visited[world.store.table.lookup(digests[0])] = 1
    copies(world, most // 2, name="another")
    assert there(world, digests[:1]) == 1 and there(world, digests[1:3]) == 0


def test_one_that_is_larger_than_the_share_is_refused_and_replaces_none(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    digests = copies(world, 5)
    assert copy(world, world.join(), A, 2 * MIB) == Status.OVER_QUOTA
    assert there(world, digests) == 5 and there(world, [A]) == 0
    assert world.store.near.counts["refused"] == 1 and world.store.stats()["put_failures"]["over_quota"] == 1
    world.check()


def test_pinned_ones_are_not_replaced(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    most = world.store.space.kept.near_max // chunk_bytes_for(SIZE)
    player = world.join()
    digests = copies(world, most)
    for digest in digests:
        assert world.pin(player, digest)
    (number,) = world.grant(player, SIZE)
    entry = (A, number, SIZE, 0, COMMIT_NEAR, 0)
    assert world.store.commit(player.session, [entry]) == [Status.OVER_QUOTA]
    assert there(world, digests) == most


REFUSED = {"its quota": Status.OVER_QUOTA, "its epoch": Status.OLD_EPOCH, "its options": Status.BAD_REQUEST}


@pytest.mark.parametrize("why", REFUSED)
def test_issue_one_that_is_refused_replaces_none(segment: OwnedArena, why: str) -> None:
    """A client at its quota, or of an old epoch, emptied the near copies of all others, one with each try."""
    world = World(segment, slots=1024)
    digests = copies(world, world.store.space.kept.near_max // chunk_bytes_for(SIZE))
    player = world.join("another")
    if why == "its quota":
        world.store.set_quotas({"another": 1})
    elif why == "its epoch":
        world.store.stale.take({"another": 7})
    options = 1 << NAMESPACE_SHIFT if why == "its options" else 0
    for _ in range(3):
        (number,) = world.grant(player, SIZE)
        entry = (A, number, SIZE, 0, COMMIT_NEAR, options)
        assert world.store.commit(player.session, [entry]) == [REFUSED[why]]
    assert there(world, digests) == len(digests) and there(world, [A]) == 0
    assert world.store.near.counts["replaced"] == 0 and world.store.near.counts["made"] == len(digests)


def test_one_for_which_too_few_can_go_is_refused(segment: OwnedArena) -> None:
    """All but one are pinned, and it needs the room of several."""
    world = World(segment, slots=1024)
    kept, player = world.store.space.kept, world.join()
    digests = copies(world, kept.near_max // chunk_bytes_for(SIZE))
    for digest in digests[1:]:
        assert world.pin(player, digest)
    (number,) = world.grant(player, LARGE)
    assert world.store.commit(player.session, [(A, number, LARGE, 0, COMMIT_NEAR, 0)]) == [Status.OVER_QUOTA]
    assert there(world, [A]) == 0 and there(world, digests[1:]) == len(digests) - 1
    assert kept.near_bytes <= kept.near_max and world.store.near.counts["refused"] == 1
    assert world.store.near.counts["replaced"] == 1 and world.store.commit_failures["over_quota"] == 1


def test_issue_what_goes_for_one_that_is_refused_then_is_counted(segment: OwnedArena) -> None:
    """Its own key has had a smaller one, and all others are pinned. Neither the loss nor the failure was counted."""
    world = World(segment, slots=1024)
    kept, player = world.store.space.kept, world.join()
    digests = copies(world, kept.near_max // chunk_bytes_for(SIZE))
    for digest in digests[1:]:
        assert world.pin(player, digest)
    (number,) = world.grant(player, LARGE)
    assert world.store.commit(player.session, [(digests[0], number, LARGE, 0, COMMIT_NEAR, 0)]) == [Status.OVER_QUOTA]
    assert there(world, digests) == len(digests) - 1
    assert world.store.near.counts["refused"] == world.store.near.counts["replaced"] == 1
    assert world.store.stats()["put_failures"]["over_quota"] == 1


@pytest.mark.parametrize("part", [1, 2], ids=["of the share", "of half of it"])
def test_issue_a_namespace_at_its_quota_renews_its_copies(segment: OwnedArena, part: int) -> None:
    """The quota was asked before a copy of the same namespace had gone for the new one."""
    world = World(segment, slots=1024)
    chunk = chunk_bytes_for(SIZE)
    most = world.store.space.kept.near_max // chunk // part
    world.store.set_quotas({"world": most * chunk})
    digests = copies(world, 2 * most)
    assert there(world, digests) == there(world, digests[-most:]) == most
    assert world.store.near.counts == {"made": 2 * most, "refused": 0, "replaced": most, "expired": 0}
    assert refused(world, world.join(), SIZE, 0) == Status.OVER_QUOTA, "for a value of its own none goes"
    assert len(world.store.space.kept) == most
    assert copy(world, world.join(), digests[-1]) == Status.OK and there(world, digests[-1:]) == 1, "one that is there"
    world.check()


@pytest.mark.parametrize("oldest", ["its own", "another's"])
def test_a_namespace_at_its_quota_replaces_no_copy_of_another(segment: OwnedArena, oldest: str) -> None:
    world = World(segment, slots=1024)
    chunk = chunk_bytes_for(SIZE)
    world.store.set_quotas({"small": 2 * chunk})
    player, other = world.join("small"), world.join("another")
    order = (player, player, other) if oldest == "its own" else (other, player, player)
    for number, who in enumerate(order):
        assert copy(world, who, digest_of(f"copy {number}")) == Status.OK
    assert copy(world, player, A) == Status.OK and there(world, [A]) == 1
    there_now = [there(world, [digest_of(f"copy {number}")]) for number in range(3)]
    assert there_now == ([0, 1, 1] if oldest == "its own" else [1, 0, 1]), "its own goes that was made first"
    world.check()


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_a_namespace_at_its_quota_spares_what_is_in_use(segment: OwnedArena, held: int) -> None:
    world = World(segment, slots=1024)
    world.store.set_quotas({"world": 3 * chunk_bytes_for(SIZE)})
    digests, player = copies(world, 3), world.join()
    for digest in digests[:held]:
        assert world.pin(player, digest)
    if held == 3:
        assert refused(world, player, SIZE) == Status.OVER_QUOTA and there(world, digests) == 3
        return
    assert copy(world, player, B) == Status.OK and there(world, [B]) == 1
    assert [there(world, [digest]) for digest in digests] == [int(number != held) for number in range(3)]
    world.check()


def test_issue_a_namespace_at_its_quota_gives_none_up_in_vain(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it may look at are too small: they went, and the copy was refused, again and again."""
    monkeypatch.setattr(near_module, "CEDED_MAX", 4)
    world = World(segment, slots=1024)
    small, large = chunk_bytes_for(4096), chunk_bytes_for(LARGE)
    world.store.set_quotas({"world": 8 * small + large})
    digests = [*copies(world, 8, 4096), *copies(world, 1, LARGE, "large")]
    player = world.join()
    for _ in range(3):
        assert refused(world, player, LARGE) == Status.OVER_QUOTA
    assert there(world, digests) == len(digests) and world.store.near.counts["replaced"] == 0
    assert copy(world, player, B, 4096) == Status.OK and there(world, digests[:2]) == 1, "one of their size has room"
    world.check()


def test_a_namespace_that_is_full_of_its_own_values_drops_no_copy_in_vain(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    world.store.set_quotas({"world": chunk_bytes_for(LARGE) + chunk_bytes_for(4096)})
    player = world.join()
    assert world.put(player, B, LARGE)
    assert copy(world, player, C, 4096) == Status.OK
    assert refused(world, player, SIZE) == Status.OVER_QUOTA
    assert there(world, [C]) == 1 and world.store.near.counts["replaced"] == 0
    assert copy(world, player, A, 4096) == Status.OK and there(world, [A, B, C]) == 2, "one of its size has room"
    world.check()


# -- who goes first -------------------------------------------------------------------------------------------


def scene(segment: OwnedArena, policy: str, size: int, count: int, at_once: int) -> tuple[int, int, int]:
    """Fill an arena that has near copies, put ``count`` values more; return how many copies, new and old ones stay."""
    world = World(segment, slots=1024, policy=policy)
    room = world.geometry.data_bytes // chunk_bytes_for(size)
    near = copies(world, world.store.space.kept.near_max // chunk_bytes_for(size), size)
    player = world.join()
    old: list[bytes] = []
    while not world.evicted:
        old.append(digest_of(f"old {len(old)}"))
        assert world.put(player, old[-1], size)
        assert len(old) <= room
    gone = 1
    while gone < count:
        numbers = world.grant(player, size, min(at_once, count - gone))
        gone += len(numbers)
        world.commit_many(player, [(number, digest_of(f"new {number}"), size) for number in numbers])
    world.check()
    return there(world, near), len(near), len(old) - there(world, old)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("size", "at_once"), [(SIZE, 1), (SIZE, 8), (LARGE, 1)])
def test_they_go_before_all_other_values(segment: OwnedArena, policy: str, size: int, at_once: int) -> None:
    left, had, lost = scene(segment, policy, size, 4, at_once)
    assert had - left == 4 and lost == 0
    left, had, lost = scene(segment, policy, size, 30, at_once)
    assert left == 0 and 0 < lost <= 30 - had + (1 if size == LARGE else 0)


def test_without_the_look_at_copies_others_go_first(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(KeptEntries, "instead_of_near", lambda *_: -1)
    with pytest.raises(AssertionError):
        test_they_go_before_all_other_values(segment, "lru", SIZE, 1)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_one_that_was_just_made_goes_before_a_value_of_long_ago(segment: OwnedArena, policy: str) -> None:
    world = World(segment, slots=1024, policy=policy)
    player = world.join()
    while world.evicted < 3:
        world.put(player, digest_of(f"old {len(world.values)} {world.evicted}"), SIZE)
    near = copies(world, 10)
    assert there(world, near) >= 9, "they are made in place of others"
    world.put(player, B, SIZE)
    left = there(world, near)
    for count in range(1, 6):
        before = len(world.values)
        assert world.put(player, digest_of(f"new {count}"), SIZE) and len(world.values) == before
        assert there(world, near) == left - count


def test_in_a_full_arena_they_take_their_share_too(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    player = world.join()
    while world.evicted < 3:
        world.put(player, digest_of(f"old {len(world.values)} {world.evicted}"), SIZE)
    most = world.store.space.kept.near_max // chunk_bytes_for(SIZE)
    near = copies(world, 3 * most)
    assert there(world, near[-most:]) >= most - 1
    world.check()


def test_without_what_is_owed_there_is_only_one(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(KeptEntries, "owe", lambda *_: None)
    with pytest.raises(AssertionError):
        test_in_a_full_arena_they_take_their_share_too(segment)


def test_without_that_it_is_spared(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Policy, "spare_no_more", lambda *_: None)
    with pytest.raises(AssertionError):
        test_one_that_was_just_made_goes_before_a_value_of_long_ago(segment, "lru")


def test_a_large_value_takes_the_place_of_several(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    near = copies(world, 4, LARGE)
    player = world.join()
    while not world.evicted:
        assert world.put(player, digest_of(f"large {len(world.values)}"), LARGE)
    left = there(world, near)
    assert left == 3
    before = len(world.values)
    assert world.put(player, A, 2 * LARGE) and there(world, near) <= 1
    assert len(world.values) - there(world, near) == before + 1 - left, "no other value went"
    world.check()


def test_a_full_set_evicts_them_first(segment: OwnedArena) -> None:
    world = World(segment, slots=16)
    player = world.join()
    values = [digest_of(f"key {number}") for number in range(12)]
    for digest in values:
        world.put(player, digest, 4096)
    near = copies(world, 4, 4096)
    for digest in near:
        world.store.visited[world.store.table.lookup(digest)] = 1
    for number in range(4):
        world.put(player, digest_of(f"new {number}"), 4096)
    assert there(world, near) == 0 and there(world, values) == 12 and world.store.set_evictions == 4
    world.check()


# -- their time ------------------------------------------------------------------------------------------------


def test_they_are_dropped_after_their_time_used_or_not(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    keeping = world.store.keeping
    keeping.expire(1000)
    first = copies(world, 5)
    keeping.expire(1100)
    second = copies(world, 5, name="second")
    world.store.visited[world.store.table.lookup(first[0])] = 1
    keeping.expire(1000 + NEAR_S - 1)
    assert there(world, first) == 5
    before = world.count_evicted()
    keeping.expire(1000 + NEAR_S)
    world.forget_evicted(before)
    assert there(world, first) == 0 and there(world, second) == 5 and world.store.near.counts["expired"] == 5
    assert copy(world, world.join(), second[0]) == Status.OK  # made again: its time begins anew
    before = world.count_evicted()
    keeping.expire(1100 + NEAR_S)
    world.forget_evicted(before)
    assert there(world, second) == there(world, second[:1]) == 1
    world.check()


@pytest.mark.parametrize("size", [SIZE, LARGE])
def test_a_value_that_is_put_over_one_is_none(segment: OwnedArena, size: int) -> None:
    """It must not go first, nor after the copy's time: whoever has put it was promised neither."""
    world = World(segment, slots=1024)
    store, player = world.store, world.join()
    store.keeping.expire(1000)
    assert copy(world, player, A) == Status.OK
    assert world.put(player, A, size)
    store.apply_pending()
    assert not store.space.kept.near_bytes and not store.space.kept.near
    assert unpack(store.table.marks(store.table.lookup(A))) == (0, 0)
    store.keeping.expire(1000 + 2 * NEAR_S)
    assert there(world, [A]) == 1
    world.check()
    assert copy(world, player, A) == Status.OK  # and the other way round
    store.apply_pending()
    assert store.space.kept.near_bytes == chunk_bytes_for(SIZE)
    world.check()


def test_a_value_that_was_just_put_over_one_stays_when_its_time_comes(segment: OwnedArena) -> None:
    """Before the worker has done the bookkeeping of that put."""
    world = World(segment, slots=1024)
    store, player = world.store, world.join()
    store.keeping.expire(1000)
    assert copy(world, player, A) == Status.OK
    store.apply_pending()
    (number,) = world.grant(player, SIZE)
    assert store.commit(player.session, [(A, number, SIZE, 0, 0, 0)]) == [Status.OK]
    store.keeping.expire(1000 + 2 * NEAR_S)
    assert there(world, [A]) == 1 and not store.space.kept.near_bytes


def test_nobody_keeps_one_for_longer(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    store = world.store
    store.keeping.expire(1000)
    digests = copies(world, 2)
    for how in (1, 2):
        assert store.keep(digests, how, 3600, 1000) == [Status.NOT_FOUND] * 2
    assert store.keep(digests[:1], 1, 0, 1000) == [Status.NOT_FOUND], "nor is it dropped by that"
    assert there(world, digests) == 2
    before = world.count_evicted()
    store.keeping.expire(1000 + NEAR_S)
    world.forget_evicted(before)
    assert there(world, digests) == 0
    world.check()


def test_a_successor_knows_them_and_their_time(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    world.store.keeping.expire(1000)
    digests = copies(world, 5)
    world.die()
    kept = world.store.space.kept
    world.store.keeping.begin(1001)
    assert len(kept) == 5 and kept.near_bytes == 5 * chunk_bytes_for(SIZE)
    assert {unpack(world.store.table.marks(world.store.table.lookup(each))) for each in digests} == {
        (NEAR, 1000 + NEAR_S)
    }
    world.check()
    before = world.count_evicted()
    world.store.keeping.expire(1000 + NEAR_S)
    world.forget_evicted(before)
    assert there(world, digests) == 0
    world.check()


# -- their place -----------------------------------------------------------------------------------------------


def listed(world: World, digests: list[bytes]) -> set[bytes]:
    shards = [shard_of(digest) for digest in digests]
    assert world.store.freeze(99, shards) is not None
    page = Lister(world.reader).page(bitmap_of(shards), 0, 1000)
    return {entry[0] for entry in page.entries}


def test_a_shard_moves_without_them(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    near = copies(world, 4)
    world.put(world.join(), A, SIZE)
    assert listed(world, [A, *near]) == {A}


def test_without_the_mark_it_takes_them_along(segment: OwnedArena) -> None:
    """The control."""
    world = World(segment, slots=1024)
    near = copies(world, 4)
    world.put(world.join(), A, SIZE)
    world.store.table.set_marks(world.store.table.lookup(near[0]), 0)
    assert listed(world, [A, *near]) == {A, near[0]}


def test_one_is_refused_where_the_shard_is_not_owned_and_of_an_old_epoch(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    player = world.join()
    (number,) = world.grant(player, SIZE)
    world.store.stale.take({"world": 7})
    entry = (A, number, SIZE, 0, COMMIT_NEAR, 0)
    assert world.store.commit(player.session, [entry]) == [Status.OLD_EPOCH]
    assert world.store.exists([A]) == [Status.NOT_FOUND] and not world.store.space.kept
    world.set_shards(bytes(len(ALL_SHARDS)))
    player.grants.pop(number)
    assert world.store.commit(player.session, [entry]) == [Status.STALE_GRANT]
    (number,) = world.grant(player, SIZE)
    assert world.commit_many(player, [(number, A, SIZE)], COMMIT_NEAR) == [Status.WRONG_OWNER]


@pytest.mark.parametrize("looks", [True, False])
def test_advance_ends_them_before_they_are_dropped(
    segment: OwnedArena, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the control: without the look at the epoch, their bytes would still be found."""
    world = World(segment, slots=1024)
    store, player = world.store, world.join()
    store.stale.take({"world": 7})
    store.ledger.namespaces.extend_lease(1 << 62)
    digest = A[:TAG_AT] + (7).to_bytes(4, "little")
    assert copy(world, player, digest) == Status.OK
    if not looks:
        monkeypatch.setattr(ArenaReader, "is_current", lambda *_: True)
    found = world.reader.locate(digest)
    assert found is not None and world.reader.confirm(digest, found.slot, found.seq) and world.reader.is_own(found)
    store.stale.take({"world": 8})
    found = world.reader.locate(digest)
    assert found is not None and world.reader.is_own(found) is not looks
    assert store.exists([digest]) == [Status.NOT_FOUND]
    world.values.clear()


# -- deaths, and everything at once -------------------------------------------------------------------------------


def make(world: World) -> Operation:
    player = world.join()
    (number,) = world.grant(player, 4096)
    return lambda: world.commit_many(player, [(number, A, 4096)], COMMIT_NEAR)


def make_again(world: World) -> Operation:
    copy(world, world.join(), A, 5000)
    return make(world)


def delete(world: World) -> Operation:
    copy(world, world.join(), A, 5000)
    return partial(world.delete, A)


def evict(world: World) -> Operation:
    player = world.join()
    world.put(player, B, 4096)
    while not world.evicted:
        copy(world, player, C, 128 << 10)
        world.put(player, digest_of(f"fill {len(world.values)}"), 128 << 10)
    copy(world, player, C, 128 << 10)
    return partial(world.grant, player, 128 << 10)


@pytest.mark.parametrize("operation", [make, make_again, delete, evict], ids=lambda each: each.__name__)
def test_death_at_every_store(segment: OwnedArena, operation: object) -> None:
    assert die_everywhere(segment, operation, twice=False) >= 3  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(8), quick=1))
def test_anything_in_any_order(segment: OwnedArena, policy: str, seed: int) -> None:
    rng = random.Random(seed)
    world = World(segment, slots=512, policy=policy)
    player, now = world.join(), 1000
    store = world.store
    store.keeping.expire(now)
    sizes = (4096, SIZE, 120_000, LARGE, MIB)
    for turn in range(250):
        action, digest = rng.random(), digest_of(f"key {rng.randrange(300)}")
        if action < 0.4:
            copy(world, player, digest, rng.choice(sizes))
        elif action < 0.75:
            world.put(player, digest, rng.choice(sizes))
        elif action < 0.8:
            world.store.keep([digest], rng.choice((1, 2)), rng.randint(0, 50), now)
        elif action < 0.9:
            world.delete(digest)
        elif action < 0.93 and turn:
            slot = world.store.table.lookup(digest)
            if slot >= 0:
                world.store.visited[slot] = 1
        elif action < 0.98:
            now += rng.randint(1, 90)
            before = world.count_evicted()
            world.store.keeping.expire(now)
            world.forget_evicted(before)
        else:
            world.die()
            player = world.join()
            before = world.count_evicted()
            world.store.keeping.begin(now)
            world.forget_evicted(before)
        if turn % 25 == 0:
            world.check()
    world.check()
    assert world.store.space.kept.near_bytes > 0
