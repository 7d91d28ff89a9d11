"""What a publisher follows of a host's data servers: one that starts again on the same arena tells in another ring."""

from __future__ import annotations

import gc
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.arena.events.follow import CHANGE_FIELDS, Step
from simm.arena.events.ring import RING_BYTES_MIN
from simm.index.publish.host import LOOK_S, Host
from simm.index.publish.tabled import Tabled
from simm.ipc.arena_files import OwnedArena
from simm.ipc.event_files import EventFile, told_by_servers
from simm.ipc.segments import ArenaName
from tests.support.event_claims import attach_to
from tests.support.store_world import World, digest_of, remove_segment

SERVER = f"ring-{os.getpid()}"


@pytest.fixture
def arena() -> Iterator[OwnedArena]:
    name = str(ArenaName(os.geteuid(), SERVER, 0, secrets.randbits(64)))
    made = OwnedArena.create(name, 16 << 20)
    try:
        yield made
    finally:
        made.drop_events()
        remove_segment(made)


def tell(arena: OwnedArena, world: World) -> None:
    """Let a store tell in a new ring, as that of a server that has just started."""
    arena.tell_events(RING_BYTES_MIN, None)
    assert arena.events is not None
    attach_to(world.store, memoryview(mmap.mmap(arena.events.fd, RING_BYTES_MIN)))


def names(host: Host) -> set[int]:
    return {name for delta in host.claims.all() for name in delta.names.tolist()}


def follow(host: Host, now: float) -> set[int]:
    for _ in range(3):
        host.poll(now)
    return names(host)


def test_a_server_that_was_restarted_between_two_looks_is_followed_in_its_new_ring(arena: OwnedArena) -> None:
    """As by a publisher that was stopped, or copied a large table, while the server started warm."""
    world = World(arena, slots=1024)
    tell(arena, world)
    player = world.join()
    digests = [digest_of(f"key {number}") for number in range(20)]
    for digest in digests:
        assert world.put(player, digest, 4096)
    world.store.table.tell()  # as at a heartbeat
    host = Host(SERVER)
    assert follow(host, 0.0) == {int.from_bytes(digest[:8], "little") for digest in digests}
    (name,) = told_by_servers(SERVER)
    file = EventFile(name)
    assert not file.replaced
    (followed,) = map(weakref.ref, host._files.values())
    assert all(isinstance(each.follower._claimed, Tabled) for each in host._files.values()), "memory follows the values"

    arena.drop_events()
    assert file.replaced, "there is none"
    tell(arena, world)
    assert file.replaced, "there is another one"
    for digest in digests[:10]:
        world.delete(digest)
    world.store.table.tell()
    gc.disable()
    try:
        assert follow(host, 2 * LOOK_S) == {int.from_bytes(digest[:8], "little") for digest in digests[10:]}
        assert len(host.workers) == 1
        assert followed() is None, "the maps of the former ring and table are let go"
    finally:
        gc.enable()


def test_one_table_is_looked_at_in_a_turn() -> None:
    """With a page of each of 16 workers in one turn, others waited for all of them."""
    host, stepped = Host(SERVER), []

    def worker(number: int, due: bool) -> Any:
        nothing = Step(np.zeros(0, CHANGE_FIELDS))
        return SimpleNamespace(
            follower=SimpleNamespace(due=due), step=lambda: (stepped.append(number), nothing)[1]
        )  # fmt: skip

    def turn() -> list[int]:
        stepped.clear()
        host.poll(0.0)
        return list(stepped)

    host._files = {number: worker(number, due=number != 2) for number in (1, 2, 3, 7)}
    host._looked = 0.0
    assert [turn() for _ in range(4)] == [[1, 2], [2, 3], [2, 7], [1, 2]], "those that are followed are in each turn"
    host._files[3] = worker(3, due=False)
    assert [turn() for _ in range(2)] == [[2, 3, 7], [1, 2, 3]]
    host._files = {2: host._files[2]}
    assert turn() == [2]
