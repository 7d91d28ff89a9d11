"""A store that keeps entries: requests, expiry, deaths of the worker, full sets, moves and epochs."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from simm.arena.hashing import SHARD_BITS, sets_of, shard_of
from simm.arena.layout import ENTRY_LARGE
from simm.arena.marks import awaited
from simm.arena.marks.kept import HARD, NEAR, SOFT, KeptEntry, unpack
from simm.arena.store import Store
from simm.constants import KEEP_PARTS, KEEP_S_MAX, SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from simm.server.operators.pages import Row, metrics
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import MOVING
from tests.support.crash import A, B, Cut, Operation, chosen, fill
from tests.support.dose import dosed
from tests.support.store_world import ALL_SHARDS, World, digest_of

MIB = 1 << 20
SEGMENT_BYTES = 16 * MIB
SIZE = 60_000


def kept_of(store: Store, digest: bytes) -> KeptEntry | None:
    slot = store.table.lookup(digest)
    return None if slot < 0 else store.space.kept.get(slot)


def word_of(store: Store, digest: bytes) -> tuple[int, int]:
    return unpack(store.table.marks(store.table.lookup(digest)))


def put_some(world: World, count: int, name: str = "key") -> list[bytes]:
    player = world.join()
    digests = [digest_of(f"{name} {number}") for number in range(count)]
    for digest in digests:
        world.put(player, digest, SIZE)
    return digests


@pytest.mark.parametrize("how", [SOFT, HARD])
def test_a_fifth_survives_a_scan_and_a_death_in_the_middle_of_it(segment: OwnedArena, how: int) -> None:
    world = World(segment, slots=1024)
    room = world.geometry.data_bytes // 65_536
    digests = put_some(world, room // 5)
    assert world.store.keep(digests, how, 100, 1000) == [Status.OK] * len(digests)
    dies, turns = dosed((5, 10), quick=(1, 3))
    for turn in range(turns):
        put_some(world, room, f"scan {turn}")
        if turn == dies:
            world.die()
            world.store.keeping.begin(1001)
    assert world.store.exists(digests) == [Status.OK] * len(digests)
    world.check()
    assert not world.store.keeping.expire(1100) and len(world.store.space.kept) == len(digests)
    assert not world.store.keeping.expire(1101) and not world.store.space.kept
    assert {word_of(world.store, digest) for digest in digests} == {(0, 0)}
    put_some(world, 2 * room, "after")
    assert world.store.exists(digests) == [Status.NOT_FOUND] * len(digests)


def test_without_the_marks_a_successor_evicts_them(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the death above."""
    world = World(segment, slots=1024)
    digests = put_some(world, 20)
    world.store.keep(digests, HARD, 100, 1000)
    monkeypatch.setattr("simm.arena.marks.keeping.Keeping.recover", lambda *_: None)
    world.die()
    put_some(world, 2 * world.geometry.data_bytes // 65_536, "scan")
    assert Status.OK not in world.store.exists(digests)


def test_requests(segment: OwnedArena) -> None:
    world = World(segment, slots=256)
    one, two = put_some(world, 2)
    store = world.store
    assert store.keep([one, digest_of("none"), two], HARD, 10, 50) == [Status.OK, Status.NOT_FOUND, Status.OK]
    entry = kept_of(store, one)
    assert entry is not None and (entry.how, entry.until) == (HARD, 61) == word_of(store, one)
    assert store.keep([one], SOFT, 5, 50) == [Status.OK] and word_of(store, one) == (SOFT, 56)
    assert store.keep([one, two], SOFT, 0, 50) == [Status.OK] * 2 and not store.space.kept
    for how, seconds in ((0, 1), (NEAR, 1), (255, 1), (SOFT, KEEP_S_MAX + 1), (HARD, (1 << 32) - 1)):
        assert store.keep([one], how, seconds, 50) == [Status.BAD_REQUEST] and not store.space.kept
    assert store.stats()["kept"]["failures"] == {"bad_request": 5, "wrong_owner": 0, "not_found": 1, "over_quota": 0}


def test_quotas(segment: OwnedArena) -> None:
    """By namespace a quarter of the data, in all half of it; nothing changes for what is refused."""
    world = World(segment, slots=1024)
    store, most = world.store, world.geometry.data_bytes
    players = [world.join(name) for name in "abc"]
    digests: dict[int, list[bytes]] = {}
    for number, player in enumerate(players):
        digests[number] = [digest_of(f"{number} {each}") for each in range(most // 65_536 * 3 // 10)]
        for digest in digests[number]:
            world.put(player, digest, 65_536)
    counts = [store.keep(digests[number], HARD, 10, 0).count(Status.OK) * 65_536 for number in range(3)]
    assert counts[0] == counts[1] == most // 4 // 65_536 * 65_536
    assert sum(counts) == most // 2 // 65_536 * 65_536 == store.space.kept.hard_bytes
    refused = [digest for digest in digests[0] if kept_of(store, digest) is None]
    assert refused and store.keep(refused, SOFT, 10, 0) == [Status.OK] * len(refused)
    assert store.keep(refused[:1], HARD, 20, 0) == [Status.OVER_QUOTA] and word_of(store, refused[0]) == (SOFT, 11)
    again = next(digest for digest in digests[0] if digest not in refused)
    assert store.keep([again], HARD, 20, 0) == [Status.OK], "its own bytes count once"
    assert store.stats()["kept"]["bytes"]["a"] == {"soft": len(refused) * 65_536, "hard": counts[0]}
    world.check()


def test_a_successor_believes_no_impossible_marks(segment: OwnedArena) -> None:
    """What others may have stored in an arena without a vault: times, classes, and more than the quotas allow."""
    world = World(segment, slots=1024)
    digests = put_some(world, 120)
    store = world.store
    for number, digest in enumerate(digests):
        slot = store.table.lookup(digest)
        store.table.set_marks(slot, (64 << 32) | (2 << 30) | 500 if number > 3 else 1)
    store.table.set_marks(store.table.lookup(digests[0]), NEAR << 30 | 500)
    store.table.set_marks(store.table.lookup(digests[1]), 2 << 30 | (1 << 30) - 1)
    store.table.set_marks(store.table.lookup(digests[2]), 1 << 30 | 99)
    world.die()
    store = world.store
    store.keeping.begin(100)
    del world.values[digests[0]]  # marked as a near copy, of a time further ahead than one can have: dropped
    assert [kept_of(store, digest) for digest in digests[:4]] == [None] * 4
    classes = [entry.how for _, entry in store.space.kept.items()]
    assert len(classes) == 116 and 50 < classes.count(HARD) <= store.space.kept.namespace_max // 61_440 < 116
    assert store.table.marks(store.table.lookup(digests[50])) >> 32 == 64, "a group is not ours"
    world.check()


def test_marks_of_others_stay(segment: OwnedArena) -> None:
    world = World(segment, slots=256)
    (digest,) = put_some(world, 1)
    slot = world.store.table.lookup(digest)
    world.store.table.set_marks(slot, 7 << 32)
    world.store.keep([digest], HARD, 10, 0)
    world.put(world.join(), digest, SIZE)
    assert world.store.table.marks(slot) == 7 << 32 | HARD << 30 | 11
    world.store.keep([digest], HARD, 0, 0)
    assert world.store.table.marks(slot) == 7 << 32


def test_deletes_overwrites_and_lost_shards(segment: OwnedArena) -> None:
    world = World(segment, slots=256)
    one, two, three = put_some(world, 3)
    store = world.store
    store.keep([one, two, three], HARD, 10, 0)
    player = world.join()
    for size in (5000, 300_000, 4096, 3 * MIB, SIZE):
        world.put(player, one, size)
        world.check()
        assert word_of(store, one) == (HARD, 11)
    world.delete(two)
    assert len(store.space.kept) == 2
    world.set_shards(bytes(len(ALL_SHARDS)))
    assert not store.space.kept and not store.space.kept.bytes
    assert store.keep([one], HARD, 10, 0) == [Status.WRONG_OWNER]


def test_a_full_set_evicts_none_that_is_hard_kept(segment: OwnedArena) -> None:
    world = World(segment, slots=16)
    digests = put_some(world, 16)
    store = world.store
    assert store.exists(digests) == [Status.OK] * 16
    assert store.keep(digests[:4], HARD, 10, 0) + store.keep(digests[4:15], SOFT, 10, 0) == [Status.OK] * 15
    put_some(world, 1, "new")
    assert store.exists(digests[:15]) == [Status.OK] * 15 and store.exists(digests[15:]) == [Status.NOT_FOUND]
    put_some(world, 20, "newer")
    assert store.exists(digests[:4]) == [Status.OK] * 4 and store.set_evictions > 0
    world.check()


@pytest.mark.parametrize("how", ["advanced", "spoilt"])
def test_an_advanced_epoch_outranks_keeping(segment: OwnedArena, how: str) -> None:
    world = World(segment, slots=256)
    digests = put_some(world, 3)
    store = world.store
    store.keep(digests, HARD, 10, 0)
    if how == "spoilt":  # and so does a slot in which others have stored something
        for digest in digests:
            store.drop_spoilt(store.table.lookup(digest))
    else:
        store.stale.take({"world": 7})
        store.ledger.namespaces.extend_lease(1 << 62)
        assert store.keep(digests, HARD, 10, 0) == [Status.NOT_FOUND] * 3
        while store.stale.due:
            store.stale.step()
    assert not store.space.kept and store.keep(digests, HARD, 10, 0) == [Status.NOT_FOUND] * 3
    world.values.clear()


# -- deaths at every store ----------------------------------------------------------------------------


def keep_first(world: World) -> Operation:
    return lambda: world.store.keep([A], HARD, 10, 0)


def keep_again(world: World) -> Operation:
    world.store.keep([A], HARD, 10, 0)
    return lambda: world.store.keep([A], SOFT, 20, 0)


def end_keeping(world: World) -> Operation:
    world.store.keep([A], HARD, 10, 0)
    return lambda: world.store.keeping.expire(11)


def overwrite_kept(world: World) -> Operation:
    world.store.keep([A], HARD, 10, 0)
    player = world.join()
    (number,) = world.grant(player, 4096)
    return lambda: world.commit(player, number, A, 4096)


def delete_kept(world: World) -> Operation:
    world.store.keep([A], HARD, 10, 0)
    return lambda: world.delete(A)


def evict_around_kept(world: World) -> Operation:
    world.store.keep([A], HARD, 10, 0)
    player = fill(world, 128 << 10)
    return lambda: world.grant(player, 300 << 10)


Scene = Callable[[World], Operation]
SCENES: list[Scene] = [keep_first, keep_again, end_keeping, overwrite_kept, delete_kept, evict_around_kept]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_death_at_every_store(segment: OwnedArena, scene: Scene) -> None:
    """A successor finds it kept as before the operation or as after it."""

    def prepared(world: World) -> Operation:
        player = world.join()
        world.put(player, A, 4096)
        world.put(player, B, 4096)
        return scene(world)

    world = World(segment, slots=128)
    allowed: list[tuple[int, int] | None] = []
    seen = set()

    def state() -> tuple[int, int] | None:
        entry = kept_of(world.store, A)
        if world.store.table.lookup(A) >= 0:
            assert word_of(world.store, A) == ((entry.how, entry.until) if entry else (0, 0))
        return None if entry is None else (entry.how, entry.until)

    def recorded(world: World) -> Operation:
        operation = prepared(world)
        allowed.append(state())
        return operation

    cut = Cut(world, recorded)
    allowed.append(state())
    for frame in chosen(cut.tape.frames, dosed(20, quick=5)):
        cut.show(frame)
        world.recover()
        world.settle_on(cut.before, cut.after)
        world.check()
        assert state() in allowed
        seen.add(state())
    assert seen == set(allowed)


def with_the_sets_of(digest: bytes, number: int, sets: int) -> bytes:
    """Another digest that may lie in the same two sets only. Anybody may make some."""
    first, second = sets_of(digest, sets)
    low = (first + sets * (number + 1)) << SHARD_BITS | number
    made = low.to_bytes(8, "little") + (second + sets * (number + 7)).to_bytes(8, "little")
    assert sets_of(made, sets) == (first, second)
    return made


def test_nobody_keeps_a_key_out_of_its_sets(segment: OwnedArena) -> None:
    """Sixteen digests that were made up for it did, for as long as they were hard kept, with a KiB in all."""
    world = World(segment, slots=256)
    player, victim = world.join(), digest_of("victim")
    others = [with_the_sets_of(victim, number, world.geometry.sets) for number in range(16)]
    for digest in others:
        world.put(player, digest, 64)
    statuses = world.store.keep(others, HARD, 1000, 0)
    assert statuses.count(Status.OVER_QUOTA) == 4 and statuses.count(Status.OK) == 12
    assert world.put(player, victim, 64)
    # A predecessor that knew no such bound, or who has stored into an arena without a vault.
    assert world.store.delete([victim]) == [Status.OK]
    world.values.pop(victim)
    left = [digest for digest in others if world.store.table.lookup(digest) >= 0]
    for digest in left:
        world.store.table.set_marks(world.store.table.lookup(digest), HARD << 30 | 500)
    world.die()
    classes = [entry.how for _, entry in world.store.space.kept.items()]
    assert len(left) == len(classes) == 15 and classes.count(HARD) <= 12
    assert world.put(world.join(), victim, 64)
    world.check()


def test_small_values_take_a_quarter_of_the_slots(segment: OwnedArena) -> None:
    """Of 64 bytes each they could take all of them, and the other namespaces found no slot."""
    world = World(segment, slots=1024)
    player = world.join("a")
    digests = [digest_of(f"s{number}") for number in range(400)]
    for digest in digests:
        world.put(player, digest, 64)
    statuses = world.store.keep(digests, HARD, 1000, 0)
    assert statuses.count(Status.OK) == 256 and statuses.count(Status.OVER_QUOTA) == 144
    world.check()
    shown = exported(world)
    assert shown['simm_kept_slots{namespace="a",class="hard"}'] == 256 == shown["simm_keep_namespace_max_slots"]
    assert shown["simm_keep_max_slots"] == 512 and shown['simm_keep_failures_total{cause="over_quota"}'] == 144
    assert shown['simm_kept_bytes{namespace="a",class="hard"}'] < shown["simm_keep_namespace_max_bytes"] / 50
    other = world.join("b")
    more = [digest_of(f"t{number}") for number in range(300)]
    for digest in more:
        world.put(other, digest, 64)
    world.store.keep(more, HARD, 1000, 0)
    shown = exported(world)
    assert sum(count for name, count in shown.items() if name.startswith("simm_kept_slots")) == 512
    world.store.keep(digests + more, HARD, 0, 0)
    assert not any(name.startswith("simm_kept_slots") for name in exported(world))


def exported(world: World) -> dict[str, float]:
    """What a server's page has of a world, its only worker."""
    text = metrics("s", [Row(0, 0, world.store.stats())], joined=True, fenced=False, epoch=1).text()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    who = re.compile(r'server="s",?(worker="0",numa="0")?,?')
    return {who.sub("", name).removesuffix("{}"): float(value) for name, value in lines}


def test_many_at_once(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    digests = put_some(world, 100)
    world.store.keep(digests, SOFT, 10, 0)
    slots = np.array([world.store.table.lookup(digest) for digest in digests])
    assert {world.store.table.marks(slot) for slot in slots} == {SOFT << 30 | 11}


def put_manifest(world: World, digest: bytes) -> None:
    player = world.join()
    ((number, _, _),) = world.store.sessions.grant(player.session, 64, 1)
    assert world.store.commit(player.session, [(digest, number, 64, 0, ENTRY_LARGE, 0)]) == [Status.OK]
    world.store.apply_pending()


def test_manifests_are_kept_by_who_keeps_the_parts_too(segment: OwnedArena) -> None:
    """A put in parts ends the keeping of what it replaces; an ordinary one leaves it alone. A mover carries all."""
    world = World(segment, slots=256)
    one, two = put_some(world, 2)
    store = world.store
    assert store.keep([one, two], HARD, 10, 50) == [Status.OK] * 2
    put_manifest(world, one)
    assert kept_of(store, one) is None and word_of(store, one) == (0, 0) and kept_of(store, two) is not None
    assert store.space.kept.hard_bytes == store.space.kept.entries[store.table.lookup(two)].bytes
    for seconds in (10, 0):
        assert store.keep([one], HARD, seconds, 50) == [Status.TOO_LARGE] and kept_of(store, one) is None
    assert store.keep([one, two], SOFT | KEEP_PARTS, 10, 50) == [Status.OK] * 2 and word_of(store, one) == (SOFT, 61)
    assert store.keep([one], 3 | KEEP_PARTS, 10, 50) == [Status.BAD_REQUEST]
    world.put(world.join(), one, SIZE)
    assert word_of(store, one) == (SOFT, 61), "an ordinary value is about to be kept as its key is"
    put_manifest(world, two)
    store.shard_words._store(shard_of(two), 1 | MOVING)
    store.shard_words._recount()
    assert store.keep([two], HARD, 10, 50, mover=1) == [Status.OK] and word_of(store, two) == (HARD, 61)


def moving(world: World, *digests: bytes) -> None:
    words = world.store.shard_words
    for digest in digests:
        words._store(shard_of(digest), 1 | MOVING)
    words._recount()


def test_a_mark_waits_for_its_value(segment: OwnedArena) -> None:
    """Until it comes, from the mover or a client. Beyond the quotas it is soft kept, and what was deleted is not."""
    world = World(segment, slots=1024)
    store, player = world.store, world.join()
    digests = [digest_of(f"awaited {number}") for number in range(6)]
    moving(world, *digests)
    assert store.keep(digests, HARD, 10, 50, mover=1) == [Status.PREVIOUS] * 6
    world.put(player, digests[0], SIZE)
    assert word_of(store, digests[0]) == (HARD, 61) and store.stats()["kept"]["entries"] == 1
    store.space.kept.__dict__["namespace_max"] = 0
    world.put(player, digests[1], SIZE)
    assert word_of(store, digests[1]) == (SOFT, 61)
    assert store.delete(digests[2:3]) == [Status.OK]
    world.put(player, digests[2], SIZE)
    assert word_of(store, digests[2]) == (0, 0), "the client has deleted it"
    assert store.keep(digests[3:4], SOFT, 10, 50) == [Status.PREVIOUS], "a client's waits for nothing"
    for digest in digests[3:5]:
        store.shard_words._store(shard_of(digest), 1)
    store.shard_words._recount()
    world.put(player, digests[3], SIZE)
    assert word_of(store, digests[3]) == (0, 0), "the move of its shard has ended"
    for digest in digests:
        store.shard_words._store(shard_of(digest), 1)
    store.shard_words._recount()
    world.put(player, digests[4], SIZE)
    assert word_of(store, digests[4]) == (0, 0) and not store.keeping.awaited.marks, "nothing moves any more"


def test_issue_no_mark_waits_on_in_another_cluster(segment: OwnedArena) -> None:
    """Its mover's epoch may be higher than any of the other cluster's, where nobody has asked to keep the value."""
    world = World(segment, slots=1024)
    store, digest = world.store, digest_of("awaited")
    shard = shard_of(digest)
    for cluster, epoch in ((1, 1000), (2, 5)):
        since, roles = np.zeros(SHARD_COUNT, "<u8"), bytearray(SHARD_COUNT)
        since[shard], roles[shard] = epoch, ShardRole.INCOMING
        store.begin_shards(epoch, since.tobytes(), bytes(roles), cluster)
        while store.drop_some():
            pass
        assert store.shard_words.adopt(epoch, [shard], [shard]) == 1
        if cluster == 1:
            assert store.keep([digest], HARD, 10, 50, mover=epoch) == [Status.PREVIOUS]
    world.put(world.join(), digest, SIZE)
    assert word_of(store, digest) == (0, 0) and not store.keeping.awaited.marks


def test_marks_that_wait_are_bounded(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "AWAITED_MAX", 3)
    world = World(segment, slots=1024)
    digests = [digest_of(f"awaited {number}") for number in range(5)]
    moving(world, *digests)
    assert world.store.keep(digests, SOFT, 10, 50, mover=1) == [Status.PREVIOUS] * 5
    assert list(world.store.keeping.awaited.marks) == digests[2:]


def test_a_successor_with_smaller_shares_keeps_the_rest_softly(segment: OwnedArena) -> None:
    world = World(segment, slots=1024)
    digests = put_some(world, 20)
    assert world.store.keep(digests, HARD, 100, 0) == [Status.OK] * 20
    data = world.geometry.data_bytes
    for shares, hard in (((90, 25), 20), ((90, 2), data * 2 // 100 // 61_440), ((1, 90), data // 100 // 61_440)):
        world.store = Store.recover(segment.mm, segment.name, shares=(*shares, 10))
        kept = [entry.how for _, entry in world.store.space.kept.items()]
        assert len(kept) == 20 and kept.count(HARD) == hard, shares
    world.store = Store.recover(segment.mm, segment.name, shares=(0, 90, 10))
    assert [entry.how for _, entry in world.store.space.kept.items()] == [SOFT] * 20
