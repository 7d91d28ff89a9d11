"""Moving shards: three stores, a manager, movers and clients that all lag, see ``store_moves.py``; and scripted cases.

Also each store of a move as a crash point: the worker dies between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simm.arena.hashing import shard_of
from simm.arena.layout import HEADER_BYTES, Word
from simm.arena.store import Store
from simm.constants import SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import ABSENT, LOCATE_PREVIOUS, ShardRole, Status
from simm.wire.shard_set import FROZEN, MOVING
from tests.support.consistency import check, finished
from tests.support.dose import dose, dosed
from tests.support.move_scripts import A, B, S, late_mover, message, old_map, put, run_out, unheard_owner
from tests.support.shards import set_shards
from tests.support.store_moves import KEYS, SHARDS, Moves, play
from tests.support.store_world import World, digest_of
from tests.support.trace_replay import Tape

MIB = 1 << 20


@pytest.mark.parametrize("seed", dose(range(16), quick=1))
def test_nothing_superseded_is_ever_read(segments: list[OwnedArena], seed: int) -> None:
    play(segments, seed)


@pytest.mark.slow
def test_nothing_superseded_is_ever_read_long(segments: list[OwnedArena]) -> None:
    for seed in range(1000, 1600):
        play(segments, seed)


@pytest.mark.full
def test_runs_come_to_what_they_are_for(segments: list[OwnedArena]) -> None:
    seen: dict[str, int] = {}
    for seed in range(100, 116):
        for what, count in play(segments, seed, 400).seen.items():
            seen[what] = seen.get(what, 0) + count
    for what in ("hit", "hit behind", "miss behind", "copy OK", "copy PRESENT", "delete behind", "put WRONG_OWNER",
                 "death", "moved", "finished"):  # fmt: skip
        assert seen.get(what, 0) > 3, seen


# -- scripts ---------------------------------------------------------------------------------------


SCRIPTS = [late_mover, unheard_owner, old_map]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_scripts(segments: list[OwnedArena], script: Callable[[list[OwnedArena]], None]) -> None:
    script(segments)


# -- what a store answers while a shard moves ----------------------------------------------------------


def test_the_life_of_a_move_at_both_ends(segments: list[OwnedArena]) -> None:
    world = Moves(segments, 0)
    one, two, _ = world.places
    value = put(world, 0, A)
    put(world, 0, B)
    world.give(S, 1)
    assert two.store.exists([A]) == [Status.WRONG_OWNER]
    two.take(world.maps[-1])
    assert two.store.exists([A, B]) == [Status.PREVIOUS] * 2  # not adopted: nobody else can have changed them
    put(world, 1, A, accepted=False)
    one.take(world.maps[-1])
    put(world, 0, A, accepted=False)
    assert one.store.exists([A]) == [Status.WRONG_OWNER] and one.read(A) is None
    assert not one.reader.contains(A) and one.reader.contains_many([A] * 20) == [False] * 20
    assert one.reader.contains_previous(A) and one.read(A, previous=True) == value
    assert one.reader.shard_word(A) == FROZEN | 2
    ((status, *_),) = one.store.locate(None, [A])
    assert status == Status.WRONG_OWNER
    ((status, _, length, _, _, pin),) = one.store.locate(one.session, [A], LOCATE_PREVIOUS)
    assert (status, length) == (Status.OK, len(value)) and pin
    assert one.store.sessions.unpin(one.session, [pin]) == 1
    run_out(world.moving(two))
    assert two.read(A) == value and two.store.stats()["moving"] == 0 and two.store.copies == 2
    assert finished(two.store.shard_words) == [S]
    world.moved(two)
    one.take(world.maps[-1])
    assert one.read(A, previous=True) is None and one.store.table.entries == 0
    world.wind_up()


def test_put_if_absent(segments: list[OwnedArena]) -> None:
    world = Moves(segments, 0)
    two = world.places[1]
    world.give(S, 1)
    two.take(world.maps[-1])
    mover, client = two.join(), two.session
    assert two.put(mover, A, bytes(64), ABSENT) == Status.WRONG_OWNER  # not adopted
    assert two.store.shard_words.adopt(2, [S], [S]) == 1
    free = two.store.stats()["free_bytes"]
    assert two.put(mover, A, bytes(64), ABSENT) == Status.PRESENT  # by no map at all
    assert two.put(client, A, bytes(64), ABSENT) == Status.PRESENT
    assert two.put(client, A, bytes(64), 2) == Status.BAD_REQUEST
    mover.copies = 2
    assert two.put(client, A, b"new" * 30) == Status.OK
    assert two.put(mover, A, b"old" * 30, ABSENT) == Status.PRESENT
    assert two.read(A) == b"new" * 30
    assert two.store.delete([A, B, B]) == [Status.OK, Status.OK, Status.NOT_FOUND]
    assert two.store.stats()["free_bytes"] == free and not two.store.sessions.by_id[mover.session].grants
    for digest in (A, B):
        assert two.put(mover, digest, b"old" * 30, ABSENT) == Status.PRESENT
    assert two.store.exists([A, B, KEYS[2]]) == [Status.NOT_FOUND, Status.NOT_FOUND, Status.PREVIOUS]
    assert two.put(mover, KEYS[2], b"old" * 30, ABSENT) == Status.OK
    assert two.store.stats()["dropped"] == 2
    two.store.shard_words.finish([S], 2)
    assert two.put(mover, KEYS[3], b"old" * 30, ABSENT) == Status.PRESENT
    assert two.store.delete([KEYS[3]]) == [Status.NOT_FOUND]
    check(two.store)


def test_deleting_by_size(segments: list[OwnedArena]) -> None:
    """Drop values of that size only, also in a shard that moves in; drop a previous owner's copy at any size."""
    world = Moves(segments, 0)
    two = world.places[1]
    world.give(S, 1)
    two.take(world.maps[-1])
    mover, client = two.join(), two.session
    assert two.store.delete([A], [30]) == [Status.WRONG_OWNER]  # not adopted
    assert two.store.shard_words.adopt(2, [S], [S]) == 1
    mover.copies = 1
    assert two.put(client, A, b"new" * 10) == Status.OK
    deletes = two.store.deletes
    assert two.store.delete([A], [29]) == [Status.NOT_FOUND]
    assert two.read(A) == b"new" * 10
    assert two.store.deletes == deletes
    assert two.store.delete([A, A, B, B], [30, 30, 1, 1]) == [
        Status.OK, Status.NOT_FOUND, Status.OK, Status.NOT_FOUND
    ]  # fmt: skip
    for digest in (A, B):
        assert two.put(mover, digest, b"old" * 30, ABSENT) == Status.PRESENT, "it is gone, behind too"
    assert two.store.exists([A, B, KEYS[2]]) == [Status.NOT_FOUND, Status.NOT_FOUND, Status.PREVIOUS]
    two.store.shard_words.finish([S], 2)
    assert two.put(client, A, b"newer") == Status.OK
    assert two.store.delete([A, KEYS[3]], [4, 4]) == [Status.NOT_FOUND] * 2
    assert two.store.delete([A], [5]) == [Status.OK]
    check(two.store)


def test_what_was_evicted_while_its_shard_moved_is_not_looked_for_behind(segments: list[OwnedArena]) -> None:
    world = Moves(segments, 0)
    two = world.places[1]
    for shard in SHARDS:
        world.give(shard, 1)
    two.take(world.maps[-1])
    two.store.shard_words.adopt(world.epoch, SHARDS, SHARDS)
    for digest in KEYS:  # more than there are slots
        assert two.put(two.session, digest, bytes(4096)) == Status.OK
    gone = [digest for digest in KEYS if two.store.table.lookup(digest) < 0]
    assert gone and set(two.store.exists(gone)) == {Status.NOT_FOUND}
    assert set(gone) == two.store.shard_words.dropped
    check(two.store)


def test_a_fence_stops_mutations_and_nothing_else(segments: list[OwnedArena]) -> None:
    world = Moves(segments, 0)
    one = world.places[0]
    value = put(world, 0, A)
    one.store.shard_words.fence()
    put(world, 0, A, accepted=False)
    assert one.store.delete([A]) == [Status.WRONG_OWNER]
    assert one.read(A) == value and one.store.exists([A]) == [Status.OK]
    assert one.store.stats()["fenced"] is True
    one.take(world.maps[-1])
    put(world, 0, A)
    one.die()  # a successor cannot know
    put(world, 0, A, accepted=False)
    one.take(world.maps[-1])
    put(world, 0, A)
    check(one.store)


# -- deaths --------------------------------------------------------------------------------------------


X, Y, Z = (digest_of(name) for name in "XYZ")
PARTS = [shard_of(digest) for digest in (X, Y, Z)]
INCOMING = dict.fromkeys(PARTS, (ShardRole.INCOMING, 5))
OUTGOING = dict.fromkeys(PARTS, (ShardRole.OUTGOING, 5))
OWNER = dict.fromkeys(PARTS, (ShardRole.OWNER, 5))


def waiting(store: Store) -> None:
    """The three shards wait for their mover."""
    set_shards(store, *message(5, INCOMING))


def moving(store: Store) -> None:
    """They are moving in."""
    waiting(store)
    store.shard_words.adopt(5, PARTS, PARTS)


def taken(store: Store, parts: dict[int, tuple[int, int]]) -> Callable[[], object]:
    """A map with these roles comes."""
    return lambda: set_shards(store, *message(5, parts))


#: name -> (what is done first, the operation, the words it may leave behind besides those before it)
DEATHS: dict[str, tuple[Callable[[Store], object], Callable[[Store], Callable[[], object]], set[int]]] = {
    "freeze": (lambda _: None, lambda store: lambda: store.freeze(5, PARTS), {FROZEN | 5}),
    "a map: outgoing": (lambda _: None, lambda store: taken(store, OUTGOING), {FROZEN | 5}),
    "a map: incoming": (lambda _: None, lambda store: taken(store, INCOMING), {0}),
    # MOVING ends with its worker.
    "adopt": (waiting, lambda store: lambda: store.shard_words.adopt(5, PARTS, PARTS), {5}),
    "adopt alone": (waiting, lambda store: lambda: store.shard_words.adopt(5, PARTS, []), {5}),
    "finish": (moving, lambda store: lambda: store.shard_words.finish(PARTS, 5), {5}),
    "a map: owner": (moving, lambda store: taken(store, OWNER), {5}),
}  # fmt: skip


@pytest.mark.parametrize("what", DEATHS)
def test_death_at_every_point_of_a_move(segments: list[OwnedArena], what: str) -> None:
    """Each word is as before or as after, except that nothing is moving any more; a repeated move completes."""
    prepare, begin, after = DEATHS[what]
    world = World(segments[0], slots=64)
    player = world.join()
    for digest in (X, Y):
        world.put(player, digest, 4096)
    prepare(world.store)
    before = {world.store.shards[shard] & ~MOVING for shard in PARTS}
    tape = Tape.of(world)
    tape.record(begin(world.store))
    final = [world.store.shards[shard] for shard in PARTS]
    assert tape.steps >= 1
    for number, frame in enumerate(tape.frames):
        tape.show(frame)
        store = Store.recover(segments[0].mm, segments[0].name)
        check(store)
        assert not store.shard_words.moving and store.shard_words.fenced
        for shard in PARTS:
            assert store.shards[shard] in before | after
        if number % 5 == 0:
            prepare(store)
            begin(store)()
            assert [store.shards[shard] & ~MOVING for shard in PARTS] == [word & ~MOVING for word in final]
            check(store)


def test_the_first_map_after_a_death_ends_nothing_that_was_ours(segments: list[OwnedArena]) -> None:
    world = World(segments[0], slots=64)
    world.put(world.join(), X, 4096)
    world.die()
    assert world.read(X) is not None and world.put(world.join(), Y, 100)
    world.check()


ZZ = digest_of("ZZ")


@pytest.mark.parametrize("before", dose(["owner", "frozen by a later epoch", "moving in"], quick=1))
def test_death_at_every_point_of_a_change_of_cluster(segments: list[OwnedArena], before: str) -> None:
    """From the moment that the header names the new cluster, no reader finds anything of the old one.

    The new map has the same epochs as the old one, and gives the worker the same shards since then.
    """
    world = World(segments[0], slots=64)
    player = world.join()
    for digest in (X, Y):
        world.put(player, digest, 4096)
    if before == "frozen by a later epoch":
        world.store.freeze(9, PARTS)
    elif before == "moving in":
        moving(world.store)
    words = [world.store.shards[shard] & ~MOVING for shard in range(SHARD_COUNT)]
    same = {shard: (ShardRole.OWNER, words[shard] & 0xFFFF or 1) for shard in range(SHARD_COUNT)}
    tape = Tape.of(world, every=100)  # all states would be gigabytes
    tape.record(lambda: set_shards(world.store, *message(9, same), 99))
    assert tape.steps > SHARD_COUNT
    table = world.store.table
    assert world.store.header[Word.CLUSTER] == 99 and table.lookup(X) < 0 and table.entries == 0
    check(world.store)
    seen = set()
    step = max(1, len(tape.frames) // dosed(150, quick=12))
    for frame in [*tape.frames[::step], tape.frames[-1]]:
        tape.show(frame)
        cluster = memoryview(segments[0].mm)[:HEADER_BYTES].cast("Q")[Word.CLUSTER]
        store = Store.recover(segments[0].mm, segments[0].name)
        check(store)
        seen.add(cluster)
        if cluster == 99:
            assert store.table.entries == 0
        set_shards(store, *message(9, same), 99)
        assert store.table.entries == 0 and store.exists([X, Y, ZZ]) == [Status.NOT_FOUND] * 3
        check(store)
    assert seen == {0, 99}


def test_mutation_the_same_cluster_keeps_them(segments: list[OwnedArena]) -> None:
    world = World(segments[0], slots=64)
    world.put(world.join(), X, 4096)
    since = world.store.shards[shard_of(X)]
    set_shards(world.store, *message(9, dict.fromkeys(range(SHARD_COUNT), (ShardRole.OWNER, since))), 0)
    assert world.store.table.lookup(X) >= 0


def test_a_mover_of_another_cluster_copies_nothing(segments: list[OwnedArena]) -> None:
    """Its epoch is a late one, and in the new cluster epochs are early."""
    world = World(segments[0], slots=64)
    moving(world.store)
    session = world.store.sessions.open(1, 1, "mover")
    session.copies = 500
    set_shards(world.store, *message(5, INCOMING), 99)
    world.store.shard_words.adopt(5, PARTS, PARTS)
    ((number, _, _),) = world.store.sessions.grant(session, 100, 1)
    assert world.store.commit(session, [(X, number, 100, 0, 0, ABSENT)]) == [Status.PRESENT]
