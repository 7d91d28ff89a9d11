"""Moving shards: three stores, a manager, movers and clients that all lag, see ``storm.moves``; and scripted cases.

Also each store of a move as a crash point: the worker dies between any two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from storm.moves import KEYS, SHARDS, Map, Moves, play, shard_at
from storm.tape import Tape
from storm.world import ALL_SHARDS, World, digest_of, new_segment, owned, remove_segment

from simm.constants import SHARD_COUNT
from simm.hashing import shard_of
from simm.messages import ABSENT, LOCATE_PREVIOUS, ShardRole, Status
from simm.shards import FROZEN, MOVING
from simm.shm import OwnedSegment
from simm.store import Store

MIB = 1 << 20
A, B, C = KEYS[0], KEYS[1], KEYS[5]
S = shard_at(A)


@pytest.fixture(scope="module")
def segments() -> Iterator[list[OwnedSegment]]:
    made = [new_segment(8 * MIB) for _ in range(3)]
    yield made
    for segment in made:
        remove_segment(segment)


def run_out(task: Iterator[None]) -> None:
    """To its end."""
    for _ in task:
        pass


@pytest.mark.parametrize("seed", range(16))
def test_nothing_superseded_is_ever_read(segments: list[OwnedSegment], seed: int) -> None:
    play(segments, seed)


@pytest.mark.slow
def test_nothing_superseded_is_ever_read_long(segments: list[OwnedSegment]) -> None:
    for seed in range(1000, 1600):
        play(segments, seed)


def test_runs_come_to_what_they_are_for(segments: list[OwnedSegment]) -> None:
    seen: dict[str, int] = {}
    for seed in range(100, 116):
        for what, count in play(segments, seed, 400).seen.items():
            seen[what] = seen.get(what, 0) + count
    for what in ("hit", "hit behind", "miss behind", "copy OK", "copy PRESENT", "delete behind", "put WRONG_OWNER",
                 "death", "moved", "finished"):  # fmt: skip
        assert seen.get(what, 0) > 3, seen


# -- scripts ---------------------------------------------------------------------------------------


def put(world: Moves, place: int, digest: bytes, *, accepted: bool = True) -> bytes:
    """A client puts there."""
    value = bytes([place + 1, len(world.seen)]) * 2048
    world.count(f"script {len(world.seen)}")
    status = world.places[place].put(world.places[place].session, digest, value)
    assert status == (Status.OK if accepted else Status.WRONG_OWNER)
    if accepted:
        world.now(digest, value)
    return value


def get(world: Moves, digest: bytes, told: Map) -> None:
    """A client reads by that map; Stale when it gets what it must not."""
    world.clients = [told]
    run_out(world.reading(digest))


def script_of(segments: list[OwnedSegment]) -> Moves:
    """A world in which nothing is left to chance."""
    world = Moves(segments, 0)
    world.asking = 1.0
    return world


def late_mover(segments: list[OwnedSegment]) -> None:
    """A mover's shard goes away and comes back from another while it sleeps; then it says what it had to say."""
    world = script_of(segments)
    one, two, three = world.places
    for digest in (A, B):
        put(world, 0, digest)
    world.give(S, 1)
    two.take(world.maps[-1])
    late = world.moving(two)
    next(late)  # it has its map; FREEZE comes next
    quick = world.moving(two)
    run_out(quick)
    world.moved(two)
    put(world, 1, A)
    two.take(world.maps[-1])
    assert one.store.shard_words.words[S] >= FROZEN  # one has not heard that it is released
    world.give(S, 2)
    three.take(world.maps[-1])
    two.take(world.maps[-1])
    run_out(world.moving(three))
    world.moved(three)
    put(world, 2, A)
    put(world, 2, B)
    world.give(S, 1)  # comes back, and waits for its mover
    two.take(world.maps[-1])
    assert not two.store.shard_words.accepts(S)
    run_out(late)  # from one, by the map of then
    put(world, 1, A, accepted=False)  # three has not been frozen
    put(world, 2, A)
    for told in world.maps:
        for digest in (A, B):
            get(world, digest, told)
    world.check()
    run_out(world.moving(two))
    put(world, 1, A)
    for digest in (A, B):
        get(world, digest, world.maps[-1])
    world.wind_up()


def unheard_owner(segments: list[OwnedSegment]) -> None:
    """A server was owner of a shard for a while and never heard of it; what it has is of before that."""
    world = script_of(segments)
    one, two, three = world.places
    put(world, 0, A)
    world.give(S, 1)
    two.take(world.maps[-1])
    run_out(world.moving(two))
    world.replace(two)  # and with it the shard's previous owner is forgotten
    put(world, 1, A)
    world.give(S, 0)
    world.replace(two)
    world.give(S, 2)
    three.take(world.maps[-1])
    run_out(world.moving(three))
    for told in world.maps[-1:]:
        get(world, A, told)
    put(world, 2, B)
    world.wind_up()
    assert one.store.check() is None


def old_map(segments: list[OwnedSegment]) -> None:
    """A client's map names a previous owner that was released long ago, and has not heard of it."""
    world = script_of(segments)
    _, two, three = world.places
    put(world, 0, A)
    world.give(S, 1)
    told = world.maps[-1]
    two.take(told)
    run_out(world.moving(two))
    world.moved(two)
    two.take(world.maps[-1])
    put(world, 1, A)
    world.give(S, 2)
    two.take(world.maps[-1])
    three.take(world.maps[-1])
    run_out(world.moving(three))
    world.moved(three)
    two.take(world.maps[-1])
    get(world, A, told)
    assert two.store.shard_words.words[S] == 0
    world.wind_up()


SCRIPTS = [late_mover, unheard_owner, old_map]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_scripts(segments: list[OwnedSegment], script: Callable[[list[OwnedSegment]], None]) -> None:
    script(segments)


# -- what a store answers while a shard moves ----------------------------------------------------------


def test_the_life_of_a_move_at_both_ends(segments: list[OwnedSegment]) -> None:
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
    assert one.store.unpin(one.session, [pin]) == 1
    run_out(world.moving(two))
    assert two.read(A) == value and two.store.stats()["moving"] == 0 and two.store.copies == 2
    assert two.store.shard_words.finished() == [S]
    world.moved(two)
    one.take(world.maps[-1])
    assert one.read(A, previous=True) is None and one.store.table.entries == 0
    world.wind_up()


def test_put_if_absent(segments: list[OwnedSegment]) -> None:
    world = Moves(segments, 0)
    two = world.places[1]
    world.give(S, 1)
    two.take(world.maps[-1])
    mover, client = two.join(), two.session
    assert two.put(mover, A, bytes(64), ABSENT) == Status.WRONG_OWNER  # not adopted
    assert two.store.adopt(2, [S], [S]) == 1
    free = two.store.free_bytes
    assert two.put(mover, A, bytes(64), ABSENT) == Status.PRESENT  # by no map at all
    assert two.put(client, A, bytes(64), ABSENT) == Status.PRESENT
    assert two.put(client, A, bytes(64), 2) == Status.BAD_REQUEST
    mover.copies = 2
    assert two.put(client, A, b"new" * 30) == Status.OK
    assert two.put(mover, A, b"old" * 30, ABSENT) == Status.PRESENT
    assert two.read(A) == b"new" * 30
    assert two.store.delete([A, B, B]) == [Status.OK, Status.OK, Status.NOT_FOUND]
    assert two.store.free_bytes == free and not two.store.sessions[mover.session].grants
    for digest in (A, B):
        assert two.put(mover, digest, b"old" * 30, ABSENT) == Status.PRESENT
    assert two.store.exists([A, B, KEYS[2]]) == [Status.NOT_FOUND, Status.NOT_FOUND, Status.PREVIOUS]
    assert two.put(mover, KEYS[2], b"old" * 30, ABSENT) == Status.OK
    assert two.store.stats()["dropped"] == 2
    two.store.finish(2, [S])
    assert two.put(mover, KEYS[3], b"old" * 30, ABSENT) == Status.PRESENT
    assert two.store.delete([KEYS[3]]) == [Status.NOT_FOUND]
    two.store.check()


def test_what_was_evicted_while_its_shard_moved_is_not_looked_for_behind(segments: list[OwnedSegment]) -> None:
    world = Moves(segments, 0)
    two = world.places[1]
    for shard in SHARDS:
        world.give(shard, 1)
    two.take(world.maps[-1])
    two.store.adopt(world.epoch, SHARDS, SHARDS)
    for digest in KEYS:  # more than there are slots
        assert two.put(two.session, digest, bytes(4096)) == Status.OK
    gone = [digest for digest in KEYS if not two.store.contains(digest)]
    assert gone and set(two.store.exists(gone)) == {Status.NOT_FOUND}
    assert set(gone) == two.store.shard_words.dropped
    two.store.check()


def test_a_fence_stops_mutations_and_nothing_else(segments: list[OwnedSegment]) -> None:
    world = Moves(segments, 0)
    one = world.places[0]
    value = put(world, 0, A)
    one.store.fence()
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
    one.store.check()


# -- deaths --------------------------------------------------------------------------------------------


def message(epoch: int, parts: dict[int, tuple[ShardRole, int]]) -> tuple[int, bytes, bytes]:
    """A map that differs from "all mine since 1" in a few shards: (role, since)."""
    since = np.frombuffer(owned(ALL_SHARDS, 1)[0], np.uint64).copy()
    roles = np.full(SHARD_COUNT, int(ShardRole.OWNER), np.uint8)
    for shard, (role, at) in parts.items():
        roles[shard], since[shard] = role, at
    return epoch, since.tobytes(), roles.tobytes()


X, Y, Z = (digest_of(name) for name in "XYZ")
PARTS = [shard_of(digest) for digest in (X, Y, Z)]
INCOMING = dict.fromkeys(PARTS, (ShardRole.INCOMING, 5))
OUTGOING = dict.fromkeys(PARTS, (ShardRole.OUTGOING, 5))
OWNER = dict.fromkeys(PARTS, (ShardRole.OWNER, 5))


def waiting(store: Store) -> None:
    """The three shards wait for their mover."""
    store.set_shards(*message(5, INCOMING))


def moving(store: Store) -> None:
    """They are moving in."""
    waiting(store)
    store.adopt(5, PARTS, PARTS)


def taken(store: Store, parts: dict[int, tuple[ShardRole, int]]) -> Callable[[], object]:
    """A map with these roles comes."""
    return lambda: store.set_shards(*message(5, parts))


#: name -> (what is done first, the operation, the words it may leave behind besides those before it)
DEATHS: dict[str, tuple[Callable[[Store], object], Callable[[Store], Callable[[], object]], set[int]]] = {
    "freeze": (lambda _: None, lambda store: lambda: store.freeze(5, PARTS), {FROZEN | 5}),
    "a map: outgoing": (lambda _: None, lambda store: taken(store, OUTGOING), {FROZEN | 5}),
    "a map: incoming": (lambda _: None, lambda store: taken(store, INCOMING), {0}),
    "adopt": (waiting, lambda store: lambda: store.adopt(5, PARTS, PARTS), {5}),  # MOVING ends with its worker
    "adopt alone": (waiting, lambda store: lambda: store.adopt(5, PARTS, []), {5}),
    "finish": (moving, lambda store: lambda: store.finish(5, PARTS), {5}),
    "a map: owner": (moving, lambda store: taken(store, OWNER), {5}),
}  # fmt: skip


@pytest.mark.parametrize("what", DEATHS)
def test_death_at_every_point_of_a_move(segments: list[OwnedSegment], what: str) -> None:
    """Each word is as before or as after, but that nothing is moving any more; done again, it comes to its end."""
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
        store.check()
        assert not store.shard_words.moving and store.shard_words.fenced
        for shard in PARTS:
            assert store.shards[shard] in before | after
        if number % 5 == 0:
            prepare(store)
            begin(store)()
            assert [store.shards[shard] & ~MOVING for shard in PARTS] == [word & ~MOVING for word in final]
            store.check()


def test_the_first_map_after_a_death_ends_nothing_that_was_ours(segments: list[OwnedSegment]) -> None:
    world = World(segments[0], slots=64)
    world.put(world.join(), X, 4096)
    world.die()
    assert world.read(X) is not None and world.put(world.join(), Y, 100)
    world.check()
