"""Crash an operation at every point, and stop a reader at every step: for the tests and their mutation tests."""

from __future__ import annotations

import random
from collections.abc import Callable

from simm.arena.hashing import shard_of
from simm.arena.reader import Located, Unsettled
from simm.ipc.arena_files import OwnedArena
from simm.wire.shard_set import FROZEN
from tests.models.explorer import schedules
from tests.support.dose import dosed
from tests.support.store_world import ALL_SHARDS, Player, World, digest_of
from tests.support.trace_replay import Clock, Frame, Tape, read_in_time

A, B, C = (digest_of(name) for name in "ABC")
Operation = Callable[[], object]
Scene = Callable[[World], Operation]

#: Torn states looked at for one operation, at most; the states between instructions are all looked at.
TORN_MAX = dosed(60, quick=10)
#: States of one operation from which the recovery's own tape is played.
TWICE_MAX = dosed(6, quick=2)


def chosen(frames: list[Frame], torn_max: int) -> list[Frame]:
    """Return all states between instructions, and at most ``torn_max`` torn ones."""
    torn = [number for number, frame in enumerate(frames) if frame.torn]
    if len(torn) > torn_max:
        torn = random.Random(1).sample(torn, torn_max)
    kept = set(torn)
    return [frame for number, frame in enumerate(frames) if not frame.torn or number in kept]


class Cut:
    """A recorded operation: the reference model before and after it, and each state in between."""

    def __init__(self, world: World, scene: Scene) -> None:
        operation = scene(world)
        world.check()
        self.buf = world.segment.buf
        self.data_offset = world.geometry.data_offset
        self.before = world.model()
        #: The values. No store writes any, but clients do as soon as they hear of a grant.
        self.data = bytes(self.buf[self.data_offset :])
        self.tape = Tape.of(world)
        self.tape.record(operation)
        self.after = world.model()

    def show(self, frame: Frame) -> None:
        """Set the segment as a death at this frame leaves it."""
        self.buf[self.data_offset :] = self.data
        self.tape.show(frame)


def die_everywhere(segment: OwnedArena, scene: Scene, *, twice: bool = True) -> int:
    """Crash a scene's operation at every point, and the recovery too; return the number of deaths."""
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
    """Check that the recovered store works, and that every byte is free in the end."""
    world.set_shards(mine)
    player = world.join()
    for digest in (C, A):
        if world.owns(digest):
            world.put(player, digest, 5000)
    world.check()
    world.wind_up()


def fill(world: World, size: int) -> Player:
    """As many values of a size as the region takes."""
    player = world.join()
    for number in range(500):
        world.put(player, digest_of(f"fill {number}"), size)
        if world.evicted:
            return player
    raise AssertionError("the region does not run full")


# -- readers -----------------------------------------------------------------------------------------


def reuse_of_a_chunk(world: World, end: Callable[[Player], object]) -> tuple[Tape, list[dict[int, bytes]]]:
    """Remove A's value by ``end``; grant its chunk to another client, fill it and publish it under B.

    Return the tape of that, and the chunk's bytes with each of its frames.
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
        part(lambda: got.extend(world.store.sessions.grant(player.session, 4096, 1)))  # noqa: B023
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
    world: World, tape: Tape, contents: list[dict[int, bytes]], allowed: Callable[[object], bool],
    read: Callable[..., object] = read_in_time, steps: int = 8,
) -> dict[str, int]:  # fmt: skip
    """Stop a reader of A at any of its ``steps``, for any time; raise if it returns a wrong value."""
    reader, buf = world.reader, world.segment.buf
    seen = {"hit": 0, "miss": 0, "unsettled": 0}

    def show(number: int) -> None:
        tape.show(tape.frames[number])
        for offset, data in contents[number].items():
            buf[offset : offset + len(data)] = data

    for start, jumps in schedules(len(tape.frames), steps, 1500, seed=5):
        clock = Clock(show, len(tape.frames), start, jumps)

        def copy(found: Located, clock: Clock = clock) -> bytes:
            value = reader.value(found)
            half = len(value) // 2
            first = bytes(value[:half])
            clock.tick()
            return first + bytes(value[half:])

        result = read(reader, A, clock.tick, copy)
        if not allowed(result):
            raise AssertionError(f"a reader stopped at frames {start} {jumps} got a wrong value")
        seen["unsettled" if result is Unsettled else "miss" if result is None else "hit"] += 1
    return seen


def small(tape: Tape, contents: list[dict[int, bytes]], torn: int) -> None:
    """Keep only some of a tape's torn frames, as every pair of frames is tried."""
    kept = set(random.Random(2).sample([n for n, frame in enumerate(tape.frames) if frame.torn], torn))
    keep = [n for n, frame in enumerate(tape.frames) if not frame.torn or n in kept]
    tape.frames, contents[:] = [tape.frames[n] for n in keep], [contents[n] for n in keep]


def read_a_lost_shard(world: World) -> None:
    """Check that no reader that starts after A's shard word is 0 gets A."""
    mine = bytearray(world.mine)
    mine[shard_of(A) >> 3] &= ~(1 << (shard_of(A) & 7))
    world.put(world.join(), A, 4096)
    cut = Cut(world, lambda world: lambda: world.set_shards(bytes(mine)))
    reader = world.reader
    looked = 0
    for frame in cut.tape.frames:
        cut.show(frame)
        if 0 < reader.shard_word(A) < FROZEN:
            continue
        looked += 1
        result = read_in_time(reader, A, lambda: None, lambda found: bytes(reader.value(found)))
        if isinstance(result, bytes) or reader.contains(A):
            raise AssertionError("a value of a shard that was given up was read")
    if looked < 3:
        raise AssertionError("the tape has no state between the shard word and the entry's end")


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


def lose_shards(world: World) -> Operation:
    player = world.join()
    for digest in (A, B, C):
        world.put(player, digest, 4096)
    world.pin(player, B)
    mine = bytearray(ALL_SHARDS)
    for digest in (A, B):
        mine[shard_of(digest) >> 3] &= ~(1 << (shard_of(digest) & 7))
    return lambda: world.set_shards(bytes(mine))
