"""A worker dies at every point of every operation, and readers look at every point: see ``trace_replay.py``.

After each death the next worker recovers, and then: every value is the old one or the new one and a committed
one is never neither, holds that stood before and after still stand, ``check()`` is clean, free bytes are exact, and
when everybody has left every byte comes back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simm.arena.hashing import shard_of
from simm.constants import SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from tests.support.crash import (
    A,
    B,
    C,
    Cut,
    Operation,
    Scene,
    chosen,
    die_everywhere,
    fill,
    lose_shards,
    new_commit,
    overwrite,
    read_a_lost_shard,
    read_everywhere,
    reuse_of_a_chunk,
    small,
)
from tests.support.dose import dose
from tests.support.store_world import ALL_SHARDS, Player, World, digest_of, is_value
from tests.support.trace_replay import Tape, read_in_time

MIB = 1 << 20
KIB = 1 << 10


# -- scenes: each prepares a world and returns the operation to be cut --------------------------------


def grant(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    return lambda: world.grant(player, 4096, 2)


def grant_large(world: World) -> Operation:
    player = world.join()
    return lambda: world.grant(player, 3 * MIB)


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


def commit_that_wants(world: World) -> Operation:
    """The worker makes the requested grants after its answer, and has not announced them yet."""
    player = world.join()
    (number,) = world.grant(player, 4096)
    world.want(player, 4096, 1, take=False)

    def operation() -> None:
        world.commit(player, number, A, 4096)
        world.want(player, 4096, 2)

    return operation


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


def unpin_detached(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    pins = [world.pin(player, A), world.pin(player, A)]
    world.delete(A)
    return lambda: world.unpin(player, pins)


def return_grants(world: World) -> Operation:
    player = world.join()
    numbers = world.grant(player, 4096, 3)
    return lambda: world.return_grants(player, numbers[:2])


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


def regain_shards(world: World) -> Operation:
    lose_shards(world)()
    return lambda: world.set_shards(ALL_SHARDS)


SCENES: list[Scene] = [
    grant, grant_large, new_commit, overwrite, overwrite_other_class, overwrite_pinned, overwrite_after_overwrite,
    batch_commit, commit_that_wants, refused_commit, delete, delete_pinned, delete_after_overwrite, pin, unpin,
    unpin_detached, return_grants, evicting_grant, evicting_commit, slab_reassigned, open_session, close_session,
    close_session_with_holds, end_session, lose_shards, regain_shards,
]  # fmt: skip


@pytest.mark.fault("F02", ci="each store of a tape", whole="each store of a tape")
@pytest.mark.parametrize("scene", dose(SCENES, quick=10), ids=lambda scene: scene.__name__)
def test_death_at_every_point(segment: OwnedArena, scene: Scene) -> None:
    assert die_everywhere(segment, scene) >= 2


def test_the_tape_has_every_store(segment: OwnedArena) -> None:
    """An overwrite stores at least: undo image, undo on, odd, body, even, undo off, grant line."""
    world = World(segment, slots=64)
    operation = overwrite(world)
    tape = Tape.of(world)
    tape.record(operation)
    assert tape.steps >= 7
    slots = slice(world.geometry.slots_offset // 8, world.geometry.ledger_offset // 8, 8)
    odd = [any(seq & 1 for seq in memoryview(frame.meta).cast("Q")[slots]) for frame in tape.frames]
    assert odd.count(True) >= 6 and not odd[0] and not odd[-1]
    assert sum(frame.torn for frame in tape.frames) > 20


# -- readers -----------------------------------------------------------------------------------------


ENDS: dict[str, Callable[[World], Callable[[Player], object]]] = {
    "delete": lambda world: lambda player: world.store.delete([A]),
    "overwrite": lambda world: lambda player: world.put(player, A, 4096),
    "lost shard": lambda world: lambda player: world.set_shards(
        bytes(0 if at == shard_of(A) >> 3 else 255 for at in range(SHARD_COUNT // 8))
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_no_reader_ever_mixes(segment: OwnedArena, how: str) -> None:
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
def test_readers_see_old_or_new_at_rest_in_every_state(segment: OwnedArena, scene: Scene) -> None:
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


def test_nothing_is_read_from_a_shard_that_was_given_up(segment: OwnedArena) -> None:
    read_a_lost_shard(World(segment, slots=64))
