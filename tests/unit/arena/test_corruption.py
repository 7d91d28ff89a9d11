"""A stray store overwrites a word of a slot: the worker notices and ends, and its successor has no wrong value."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from simm.arena.rebuild import overlapping
from simm.arena.store import Store
from simm.constants import SLOT_BYTES
from simm.errors import CorruptionError
from simm.ipc.arena_files import OwnedArena
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.store_world import Player, World, digest_of, is_value

KEYS = [digest_of(f"c{number}") for number in range(40)]
OFFSET, CHUNK, LENGTH = (24, 8), (40, 4), (32, 4)


def stored(world: World, size: int = 4096) -> Player:
    """All keys, of one size, and a client."""
    player = world.join()
    for digest in KEYS:
        assert world.put(player, digest, size)
    return player


def scribble(world: World, digest: bytes, field: tuple[int, int], value: int) -> None:
    """Overwrite a field, (offset in the slot, bytes), of a digest's slot."""
    at = world.geometry.slots_offset + world.store.table.lookup(digest) * SLOT_BYTES + field[0]
    world.data[at : at + field[1]] = value.to_bytes(field[1], "little")


def recovered(world: World) -> Store:
    """The successor's store, checked: each of the keys has its value or none."""
    world.store = Store.recover(world.segment.mm, world.segment.name)
    world.store.open()
    check(world.store)
    for digest in KEYS:
        slot = world.store.table.lookup(digest)
        if slot >= 0:
            entry = world.store.table.entry(slot)
            assert is_value(world.data[entry.offset : entry.offset + entry.length], world.values[digest])
    return world.store


def offset_of(world: World, digest: bytes) -> int:
    return world.store.table.offset(world.store.table.lookup(digest))


@pytest.mark.parametrize("touch", ["evict", "overwrite", "delete", "pin"])
@pytest.mark.parametrize("bad", ["zero", "another's", "nowhere"])
def test_issue_a_corrupt_offset_ends_the_worker_and_goes(segment: OwnedArena, bad: str, touch: str) -> None:
    world = World(segment, slots=48)
    player = stored(world)
    value = {"zero": 0, "another's": offset_of(world, KEYS[7]), "nowhere": world.geometry.size - 64}[bad]
    scribble(world, KEYS[3], OFFSET, value)
    session = player.session
    with pytest.raises(CorruptionError):
        if touch == "evict":
            for number in range(200):
                ((grant, *_),) = world.store.sessions.grant(session, 4096, 1)
                world.store.commit(session, [(digest_of(f"more {number}"), grant, 4096, 0, 0, 0)])
        elif touch == "overwrite":
            ((grant, *_),) = world.store.sessions.grant(session, 4096, 1)
            world.store.commit(session, [(KEYS[3], grant, 4096, 0, 0, 0)])
            world.store.apply_pending()
        elif touch == "delete":
            world.store.delete([KEYS[3]])
        else:
            world.store.locate(session, [KEYS[3]])
    store = recovered_after(world, touch)
    session = store.sessions.open(1, 1, "a")
    world.set_shards(world.mine)
    ((grant, *_),) = store.sessions.grant(session, 4096, 1)
    assert store.commit(session, [(KEYS[3], grant, 4096, 0, 0, 0)]) == [Status.OK]
    store.apply_pending()
    check(store)


def recovered_after(world: World, touch: str) -> Store:
    """:func:`recovered`; an overwrite has published its value, which no client has filled."""
    entry = world.store.table.entry(world.store.table.lookup(KEYS[3])) if touch == "overwrite" else None
    if entry is not None and entry.offset:
        world.fill(entry.offset, entry.chunk, world.values[KEYS[3]].token)
    return recovered(world)


@pytest.mark.parametrize("field", [LENGTH, CHUNK])
def test_a_corrupt_length_is_not_told_to_a_reader(segment: OwnedArena, field: tuple[int, int]) -> None:
    world = World(segment, slots=48)
    player = stored(world)
    scribble(world, KEYS[3], field, 8192)
    with pytest.raises(CorruptionError):
        world.store.locate(player.session, [KEYS[3]])
    recovered(world)


@pytest.mark.parametrize("seed", range(12))
def test_any_word_of_any_slot(segment: OwnedArena, seed: int) -> None:
    """Whatever a stray store hits, use goes on or ends with CorruptionError, and what is recovered is right.

    The value's own words (checksum, flags, times) are not checked here, nor is the digest: its owner alone knows it.
    """
    rng = random.Random(seed)
    world = World(segment, slots=48)
    player = stored(world, 5000)
    for digest in rng.sample(KEYS, 2):
        field = rng.choice([(0, 8), OFFSET, CHUNK, LENGTH])
        most = (1 << 8 * field[1]) - 1
        value = rng.choice([0, 1, 4096, rng.getrandbits(64), offset_of(world, KEYS[0])])
        scribble(world, digest, field, value & most)
    with contextlib.suppress(CorruptionError):
        for number in range(100):
            kind = rng.randrange(3)
            if kind == 0:
                world.store.delete([rng.choice(KEYS)])
            elif kind == 1:
                world.store.locate(None, [rng.choice(KEYS)])
            elif grants := world.store.sessions.grant(player.session, 5000, 1):
                world.store.commit(player.session, [(digest_of(f"m{number}"), grants[0][0], 5000, 0, 0, 0)])
                world.store.apply_pending()
    slots = [world.store.table.lookup(digest) for digest in KEYS]
    lengths = {digest: world.store.table.entry(slot).length for digest, slot in zip(KEYS, slots) if slot >= 0}
    for digest, length in lengths.items():  # a shorter length is the slot's word against nobody's
        world.values[digest] = world.values[digest]._replace(length=length)
    store = Store.recover(segment.mm, segment.name)
    check(store)
    named: dict[int, bytes] = {}
    for digest in KEYS:
        slot = store.table.lookup(digest)
        if slot >= 0:
            entry = store.table.entry(slot)
            assert 0 < entry.length <= entry.chunk and entry.offset not in named
            named[entry.offset] = digest


def test_two_slots_with_one_chunk_are_both_dropped(segment: OwnedArena) -> None:
    """Whose bytes they are, nobody can tell."""
    world = World(segment, slots=48)
    stored(world)
    scribble(world, KEYS[3], OFFSET, offset_of(world, KEYS[7]))
    store = recovered(world)
    assert [store.table.lookup(digest) for digest in (KEYS[3], KEYS[7])] == [-1, -1]
    assert store.table.entries == len(KEYS) - 2 and len(store.notes) == 2


@pytest.mark.parametrize("seed", range(20))
def test_overlapping_is_what_it_says(seed: int) -> None:
    rng = random.Random(seed)
    chunks = [(rng.randrange(0, 400), rng.randrange(1, 12)) for _ in range(rng.randrange(40))]
    joined = [
        {other for other, (at, size) in enumerate(chunks) if at < start + length and start < at + size}
        for start, length in chunks
    ]  # fmt: skip
    found = overlapping(
        np.array([start for start, _ in chunks], np.uint64), np.array([length for _, length in chunks], np.uint32)
    )
    assert found.tolist() == [len(each) > 1 for each in joined]


def test_issue_bookkeeping_that_fails_is_not_forgotten(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, and its chunks were lost until the worker's end: now the failure ends the worker."""
    world = World(segment, slots=256)
    player = stored(world)
    for count in (1, 3):
        grants = world.store.sessions.grant(player.session, 4096, count)
        entries = [(digest_of(f"new {at} {count}"), grant[0], 4096, 0, 0, 0) for at, grant in enumerate(grants)]
        assert set(world.store.commit(player.session, entries)) == {Status.OK}
        with monkeypatch.context() as patch:
            for name in ("publish", "publish_many"):
                patch.setattr(world.store.space, name, lambda *_: 1 // 0)
            with pytest.raises(CorruptionError, match="bookkeeping"):
                world.store.apply_pending()
        store = recovered(world)
        assert all(store.table.lookup(digest) >= 0 for digest, *_ in entries)
        player = world.join()
        world.set_shards(world.mine)


@pytest.mark.parametrize("size", [0, 5, 57, 1 << 63])
def test_a_damaged_name_of_a_namespace_costs_no_entry(segment: OwnedArena, size: int) -> None:
    """It ended every successor, until the data server gave up with all its values."""
    world = World(segment, slots=48)
    stored(world)
    names = world.store.ledger.namespaces._lines
    names[8:16] = b"\xff" * 8
    names[:8] = size.to_bytes(8, "little")
    store = recovered(world)
    assert store.table.entries == len(KEYS)
    assert any("namespace 0" in note for note in store.notes) == (size > 0)
    opened = store.sessions.open(1, 1, "a")
    assert store.ledger.names[opened.namespace] == "a"
    check(store)
