"""A worker dies at every point of every operation, and readers look at every point: see ``storm.tape``.

After each death the next worker recovers, and then: every value is the old one or the new one and a committed
one is never neither, holds that stood before and after still stand, ``check()`` is clean, free bytes are exact, and
when everybody has left every byte comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from storm.tape import Clock, Frame, Tape, read_in_time, schedules
from storm.world import ALL_SHARDS, Player, World, digest_of, is_value, new_segment, remove_segment

from simm.constants import SHARD_COUNT
from simm.hashing import shard_of
from simm.reader import Located, Unsettled
from simm.shm import OwnedSegment

MIB = 1 << 20
KIB = 1 << 10
A, B, C = (digest_of(name) for name in "ABC")
Operation = Callable[[], object]
Scene = Callable[[World], Operation]

#: Torn states looked at for one operation, at most; the states between instructions are all looked at.
TORN_MAX = 60
#: States of one operation from which the recovery's own tape is played.
TWICE_MAX = 6


@pytest.fixture(scope="module")
def segment() -> Iterator[OwnedSegment]:
    made = new_segment(8 * MIB)
    yield made
    remove_segment(made)


# -- scenes: each prepares a world and returns the operation to be cut --------------------------------


def grant(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    return lambda: world.grant(player, 4096, 2)


def grant_large(world: World) -> Operation:
    player = world.join()
    return lambda: world.grant(player, 3 * MIB)


def new_commit(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    (number,) = world.grant(player, 4096)
    return lambda: world.commit(player, number, B, 4000)


def overwrite(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    (number,) = world.grant(player, 4096)
    return lambda: world.commit(player, number, A, 3999)


def overwrite_other_class(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    (number,) = world.grant(player, 300 * KIB)
    return lambda: world.commit(player, number, A, 300 * KIB)


def overwrite_pinned(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 70 * KIB)
    world.pin(player, A)
    (number,) = world.grant(player, 70 * KIB)
    return lambda: world.commit(player, number, A, 70 * KIB)


def overwrite_after_overwrite(world: World) -> Operation:
    """The undo record of the one before must not be taken for this one's."""
    player = world.join()
    for _ in range(3):
        world.put(player, A, 4096)
    world.put(player, B, 4096)
    (number,) = world.grant(player, 4096)
    return lambda: world.commit(player, number, A, 4096)


def batch_commit(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    numbers = world.grant(player, 4096, 3)
    return lambda: world.commit_many(player, list(zip(numbers, (A, B, C), (4096, 4095, 4094))))


def refused_commit(world: World) -> Operation:
    player = world.join()
    (number,) = world.grant(player, 4096)
    return lambda: world.commit(player, number, A, 5000)


def delete(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    world.put(player, B, 4096)
    return lambda: world.delete(A)


def delete_pinned(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    world.pin(player, A)
    return lambda: world.delete(A)


def delete_after_overwrite(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    world.put(player, A, 4096)
    return lambda: world.delete(A)


def pin(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    return lambda: world.pin(player, A)


def unpin(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    number = world.pin(player, A)
    return lambda: world.unpin(player, [number])


def unpin_orphan(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    pins = [world.pin(player, A), world.pin(player, A)]
    world.delete(A)
    return lambda: world.unpin(player, pins)


def give_back(world: World) -> Operation:
    player = world.join()
    numbers = world.grant(player, 4096, 3)
    return lambda: world.give_back(player, numbers[:2])


def evicting_grant(world: World) -> Operation:
    player = fill(world, 300 * KIB)
    return lambda: world.grant(player, 300 * KIB)


def evicting_commit(world: World) -> Operation:
    """Both sets full: the coldest of the sixteen makes way."""
    player = world.join()
    for number in range(200):
        if world.store.table.entries == world.geometry.slots:
            break
        if world.store.table.lookup(digest_of(f"full {number}")) < 0:
            world.put(player, digest_of(f"full {number}"), 4096)
    full = next(
        digest
        for digest in (digest_of(f"new {number}") for number in range(500))
        if all(world.store.table.offset(slot) for slot in world.store.table.candidates(digest))
    )
    (number,) = world.grant(player, 4096)
    evicted = world.store.set_evictions

    def operation() -> None:
        world.commit(player, number, full, 4096)
        assert world.store.set_evictions == evicted + 1

    return operation


def slab_reassigned(world: World) -> Operation:
    """A slab of one class is evicted and given to another."""
    player = fill(world, 128 * KIB)
    reassigned = world.evicted

    def operation() -> None:
        assert world.grant(player, 300 * KIB)
        assert world.evicted > reassigned + 1

    return operation


def open_session(world: World) -> Operation:
    world.join()
    return lambda: world.join("a namespace that is new")


def close_session(world: World) -> Operation:
    player = world.join()
    return lambda: world.disconnect(player)


def close_session_with_holds(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    world.pin(player, A)
    world.grant(player, 4096)
    return lambda: world.disconnect(player)


def end_session(world: World) -> Operation:
    player, other = world.join(), world.join()
    world.put(player, A, 4096)
    world.pin(player, A)
    world.pin(other, A)
    world.delete(A)
    world.grant(player, 4096, 2)
    world.grant(other, 4096)
    return lambda: world.exit(player)


def lose_shards(world: World) -> Operation:
    player = world.join()
    for digest in (A, B, C):
        world.put(player, digest, 4096)
    world.pin(player, B)
    mine = bytearray(ALL_SHARDS)
    for digest in (A, B):
        mine[shard_of(digest) >> 3] &= ~(1 << (shard_of(digest) & 7))
    return lambda: world.set_shards(bytes(mine))


def regain_shards(world: World) -> Operation:
    lose_shards(world)()
    return lambda: world.set_shards(ALL_SHARDS)


def fill(world: World, size: int) -> Player:
    """As many values of a size as the region takes."""
    player = world.join()
    for number in range(500):
        world.put(player, digest_of(f"fill {number}"), size)
        if world.evicted:
            return player
    raise AssertionError("the region does not run full")


SCENES: list[Scene] = [
    grant, grant_large, new_commit, overwrite, overwrite_other_class, overwrite_pinned, overwrite_after_overwrite,
    batch_commit, refused_commit, delete, delete_pinned, delete_after_overwrite, pin, unpin, unpin_orphan, give_back,
    evicting_grant, evicting_commit, slab_reassigned, open_session, close_session, close_session_with_holds,
    end_session, lose_shards, regain_shards,
]  # fmt: skip


# -- deaths ------------------------------------------------------------------------------------------


def chosen(frames: list[Frame], torn_max: int) -> list[Frame]:
    """All states between instructions, and torn ones up to a number."""
    torn = [number for number, frame in enumerate(frames) if frame.torn]
    if len(torn) > torn_max:
        torn = random.Random(1).sample(torn, torn_max)
    kept = set(torn)
    return [frame for number, frame in enumerate(frames) if not frame.torn or number in kept]


class Cut:
    """An operation on tape: what the twin knew before and after it, and each state in between to be shown."""

    def __init__(self, world: World, scene: Scene) -> None:
        operation = scene(world)
        world.check()
        self.buf = world.segment.buf
        self.data_offset = world.geometry.data_offset
        self.before = world.twin()
        #: The values. No store writes any, but clients do as soon as they hear of a grant.
        self.data = bytes(self.buf[self.data_offset :])
        self.tape = Tape.of(world)
        self.tape.record(operation)
        self.after = world.twin()

    def show(self, frame: Frame) -> None:
        """The segment as a death there leaves it."""
        self.buf[self.data_offset :] = self.data
        self.tape.show(frame)


def die_everywhere(segment: OwnedSegment, scene: Scene, *, twice: bool = True) -> int:
    """Cut a scene's operation at every point, and the recovery too; how many deaths."""
    world = World(segment, slots=64)
    cut = Cut(world, scene)
    frames = chosen(cut.tape.frames, TORN_MAX)
    deaths = 0
    for number, frame in enumerate(frames):
        cut.show(frame)
        world.recover()
        world.settle_on(cut.before, cut.after)
        world.check()
        if number % 4 == 0 or number == len(frames) - 1:
            live_on(world, cut.after.mine)
        deaths += 1
    if not twice:
        return deaths
    again = Tape.of(world)
    for frame in frames[:: max(1, len(frames) // TWICE_MAX)]:
        cut.show(frame)
        again.record(world.recover)
        for second in chosen(again.frames, 10):
            again.show(second)
            world.recover()
            world.settle_on(cut.before, cut.after)
            world.check()
            deaths += 1
    return deaths


def live_on(world: World, mine: bytes) -> None:
    """The recovered store works, and gives every byte back in the end."""
    world.set_shards(mine)
    player = world.join()
    for digest in (C, A):
        if world.owns(digest):
            world.put(player, digest, 5000)
    world.check()
    world.wind_up()


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_death_at_every_point(segment: OwnedSegment, scene: Scene) -> None:
    assert die_everywhere(segment, scene) >= 2


def test_the_tape_has_every_store(segment: OwnedSegment) -> None:
    """An overwrite stores at least: undo image, undo on, odd, body, even, undo off, grant line."""
    world = World(segment, slots=64)
    operation = overwrite(world)
    tape = Tape.of(world)
    tape.record(operation)
    assert tape.steps >= 7
    slots = slice(world.geometry.slots_offset // 8, world.geometry.visited_offset // 8, 8)
    odd = [any(seq & 1 for seq in memoryview(frame.meta).cast("Q")[slots]) for frame in tape.frames]
    assert odd.count(True) >= 6 and not odd[0] and not odd[-1]
    assert sum(frame.torn for frame in tape.frames) > 20


# -- readers -----------------------------------------------------------------------------------------


def reuse_of_a_chunk(world: World, end: Callable[[Player], object]) -> tuple[Tape, list[dict[int, bytes]]]:
    """A's value goes by ``end``; its chunk is granted to another, filled and published under B.

    The tape of all that, and with each of its frames what the chunk's bytes were.
    """
    player = world.join()
    world.put(player, A, 4096)
    offset = world.store.table.offset(world.store.table.lookup(A))
    contents: list[dict[int, bytes]] = []
    frames: list[Frame] = []
    tape = Tape.of(world)

    def part(operation: Operation) -> None:
        before = bytes(world.data[offset : offset + 4096])
        tape.record(operation)
        frames.extend(tape.frames)
        contents.extend({offset: before} for _ in tape.frames)

    part(lambda: end(player))
    number, at = 0, -1
    while at != offset:
        got: list[tuple[int, int, int]] = []
        part(lambda: got.extend(world.store.grant(player.session, 4096, 1)))  # noqa: B023
        assert got, "the chunk was not reused"
        number, at, _ = got[0]
    half = bytes(world.data[offset : offset + 2048])
    world.data[offset : offset + 2048] = b"T" * 2048  # half of it first: a torn copy is of both
    assert half != b"T" * 2048
    part(lambda: None)
    world.data[offset : offset + 4096] = b"T" * 4096
    part(lambda: None)
    part(lambda: world.store.commit(player.session, [(B, number, 4096, 0, 0, 0)]))
    tape.frames = frames
    return tape, contents


def read_everywhere(
    world: World, tape: Tape, contents: list[dict[int, bytes]], allowed: Callable[[object], bool]
) -> dict[str, int]:
    """Let a reader of A be stopped at any of its steps, for any time; raise where it returns what it must not."""
    reader, buf = world.reader, world.segment.buf
    seen = {"hit": 0, "miss": 0, "unsettled": 0}

    def show(number: int) -> None:
        tape.show(tape.frames[number])
        for offset, data in contents[number].items():
            buf[offset : offset + len(data)] = data

    for start, jumps in schedules(len(tape.frames), 8, 1500, seed=5):
        clock = Clock(show, len(tape.frames), start, jumps)

        def copy(found: Located, clock: Clock = clock) -> bytes:
            value = reader.value(found)
            half = len(value) // 2
            first = bytes(value[:half])
            clock.tick()
            return first + bytes(value[half:])

        result = read_in_time(reader, A, clock.tick, copy)
        if not allowed(result):
            raise AssertionError(f"a reader stopped at frames {start} {jumps} got a wrong value")
        seen["unsettled" if result is Unsettled else "miss" if result is None else "hit"] += 1
    return seen


def small(tape: Tape, contents: list[dict[int, bytes]], torn: int) -> None:
    """Thin a tape's torn frames out: every pair of frames is played."""
    kept = set(random.Random(2).sample([n for n, frame in enumerate(tape.frames) if frame.torn], torn))
    keep = [n for n, frame in enumerate(tape.frames) if not frame.torn or n in kept]
    tape.frames, contents[:] = [tape.frames[n] for n in keep], [contents[n] for n in keep]


ENDS: dict[str, Callable[[World], Callable[[Player], object]]] = {
    "delete": lambda world: lambda player: world.store.delete([A]),
    "overwrite": lambda world: lambda player: world.put(player, A, 4096),
    "lost shard": lambda world: lambda player: world.set_shards(
        bytes(0 if at == shard_of(A) >> 3 else 255 for at in range(SHARD_COUNT // 8))
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_no_reader_ever_mixes(segment: OwnedSegment, how: str) -> None:
    world = World(segment, slots=64)
    tape, contents = reuse_of_a_chunk(world, ENDS[how](world))
    old = contents[0].popitem()
    contents[0].update([old])
    new = world.values.get(A)
    small(tape, contents, 10)

    def allowed(result: object) -> bool:
        if not isinstance(result, bytes):
            return True
        return result == old[1] or (new is not None and is_value(result, new))

    seen = read_everywhere(world, tape, contents, allowed)
    assert seen["hit"] and seen["unsettled"] and bool(seen["miss"]) == (how != "overwrite"), seen


@pytest.mark.parametrize(
    "scene", [overwrite, overwrite_other_class, batch_commit, evicting_commit, slab_reassigned],
    ids=lambda scene: scene.__name__,
)  # fmt: skip
def test_readers_see_old_or_new_at_rest_in_every_state(segment: OwnedSegment, scene: Scene) -> None:
    """No time passes: whatever state a death has left, a reader that looks meanwhile gets no mix."""
    world = World(segment, slots=64)
    cut = Cut(world, scene)
    reader, before, after = world.reader, cut.before.values, cut.after.values
    for frame in chosen(cut.tape.frames, 100):
        cut.show(frame)
        for digest in [*list(before)[:20], *list(after)[-3:]]:
            result = read_in_time(reader, digest, lambda: None, lambda found: bytes(reader.value(found)))
            if isinstance(result, bytes):
                assert any(is_value(result, values[digest]) for values in (before, after) if digest in values)
            elif result is None:
                assert digest not in before or digest not in after
