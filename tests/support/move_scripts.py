"""Scripted moves of a shard, step by step: a late mover, an owner without a map, an old map."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simm.constants import SHARD_COUNT
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import ShardRole, Status
from simm.wire.shard_set import FROZEN
from tests.support.consistency import check
from tests.support.store_moves import KEYS, Map, Moves, shard_at
from tests.support.store_world import ALL_SHARDS, owned

A, B, C = KEYS[0], KEYS[1], KEYS[5]
S = shard_at(A)


def run_out(task: Iterator[None]) -> None:
    """Run a task to its end."""
    for _ in task:
        pass


def put(world: Moves, place: int, digest: bytes, *, accepted: bool = True) -> bytes:
    """Put at a place, as a client does."""
    value = bytes([place + 1, len(world.seen)]) * 2048
    world.count(f"script {len(world.seen)}")
    status = world.places[place].put(world.places[place].session, digest, value)
    assert status == (Status.OK if accepted else Status.WRONG_OWNER)
    if accepted:
        world.now(digest, value)
    return value


def get(world: Moves, digest: bytes, told: Map) -> None:
    """Read by a map, as a client does; raise Stale for a wrong value."""
    world.clients = [told]
    run_out(world.reading(digest))


def script_of(segments: list[OwnedArena]) -> Moves:
    """Return a world without random choices."""
    world = Moves(segments, 0)
    world.asking = 1.0
    return world


def late_mover(segments: list[OwnedArena]) -> None:
    """Let a mover's shard leave and come back from another owner while the mover is stopped; then it goes on."""
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


def unheard_owner(segments: list[OwnedArena]) -> None:
    """Let a server own a shard for a while without taking the map; its values are older than that."""
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
    check(one.store)


def old_map(segments: list[OwnedArena]) -> None:
    """Read by a map that names a previous owner that was released long ago and does not know it."""
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


def message(epoch: int, parts: dict[int, tuple[int, int]]) -> tuple[int, bytes, bytes]:
    """Return a map that differs from "owner of all since 1" in a few shards: (role, since)."""
    since = np.frombuffer(owned(ALL_SHARDS, 1)[0], np.uint64).copy()
    roles = np.full(SHARD_COUNT, ShardRole.OWNER, np.uint8)
    for shard, (role, at) in parts.items():
        roles[shard], since[shard] = role, at
    return epoch, since.tobytes(), roles.tobytes()
