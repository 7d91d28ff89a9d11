"""Recovery of all entries at once, against the same done one by one; and a heartbeat that goes on meanwhile."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest

from simm.arena.eviction import make_policy
from simm.arena.layout import Word
from simm.arena.ledger import Ledger
from simm.arena.queues import Policy
from simm.arena.rebuild import LiveSlots, groups_of, whole_slabs
from simm.arena.space import Space
from simm.arena.store import Store
from simm.constants import DEFAULT_POLICY, POLICY_NAMES, SHARD_COUNT
from simm.errors import CorruptionError
from simm.host import threads
from simm.ipc.arena_files import OwnedArena
from simm.slab import SLAB_BYTES, Allocator, class_of
from simm.table import Table
from tests.support.consistency import check
from tests.support.store_world import World, digest_of
from tests.support.waiting import wait_until

REGION = 12 * SLAB_BYTES + 3 * 4096
SIZES = (64, 4096, 4096, 5120, 100_352, 131_072, 135_168, 3 << 20)


def new_space(slots: int = 4000, policy: str = DEFAULT_POLICY) -> Space:
    space: Space

    def evict(slot: int) -> None:
        space.release(space.offset(slot))

    space = Space(REGION, slots, memoryview(bytearray(slots)), policy, evict)
    return space


def filled(rng: random.Random) -> list[tuple[int, int, int]]:
    """Return (slot, offset, chunk bytes) of a space after some use, in a random order of storing."""
    space = new_space()
    rows: dict[int, tuple[int, int]] = {}
    free = list(range(4000))
    rng.shuffle(free)
    for _ in range(rng.randrange(400)):
        size = rng.choice(SIZES)
        if rows and rng.random() < 0.3:
            slot = rng.choice(list(rows))
            space.release(rows.pop(slot)[0])
            free.append(slot)
            continue
        offset = space._allocator.alloc(size)
        if offset >= 0:
            slot = free.pop()
            space.publish(offset, slot)
            rows[slot] = offset, space.chunk_bytes(offset)
    found = [(slot, *row) for slot, row in rows.items()]
    rng.shuffle(found)
    return found


def spoilt(rng: random.Random, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same with impossible offsets and sizes here and there."""
    found = []
    for slot, offset, size in rows:
        if rng.random() < 0.03:
            offset = rng.choice([-4096, offset + 64, offset ^ 4096, REGION - 64, REGION + 64, rng.randrange(REGION)])
        if rng.random() < 0.03:
            size = rng.choice([size - 1, size + 1, 64, 4096, 8192, 1 << 31, SLAB_BYTES])
        found.append((slot, offset, size))
    return found


def one_by_one(rows: list[tuple[int, int, int]], policy: str) -> tuple[Space, set[int]]:
    space, refused = new_space(policy=policy), set()
    for slot, offset, size in rows:
        try:
            space.reserve(offset, size)
        except CorruptionError:
            refused.add(slot)
    for slot, offset, _ in rows:
        if slot not in refused:
            space.publish(offset, slot)
    return space, refused


def at_once(rows: list[tuple[int, int, int]], policy: str) -> tuple[Space, set[int]]:
    space = new_space(policy=policy)
    table = np.array(rows, np.int64).reshape(-1, 3)
    return space, {slot for slot, _ in space.restore(table[:, 0], table[:, 1], table[:, 2])}


def queues(policy: Policy) -> object:
    slots = [slot for group in policy.groups() for slot in policy.slots(group)]
    order = [(group, list(policy.slots(group))) for group in policy.groups()]
    return order, policy.clock, [policy.since(slot) for slot in slots]


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(10))
def test_at_once_is_one_by_one(seed: int, policy: str) -> None:
    rows = filled(random.Random(seed))
    (one, refused), (many, also) = one_by_one(rows, policy), at_once(rows, policy)
    assert refused == also == set()
    for space in (one, many):
        space.hold(rows[0][1]) if rows else None
        space.allocate(4096)
        check(space)
    assert one.free_bytes == many.free_bytes and one._offsets == many._offsets
    assert queues(one._policy) == queues(many._policy)


@pytest.mark.parametrize("seed", range(40))
def test_impossible_rows_are_refused_and_nothing_overlaps(seed: int) -> None:
    """Which one of two that contradict each other is refused may differ: slabs come before other chunks."""
    rng = random.Random(seed)
    rows = spoilt(rng, filled(rng))
    space, refused = at_once(rows, DEFAULT_POLICY)
    space.allocate(64)
    check(space)
    _, also = one_by_one(rows, DEFAULT_POLICY)
    assert bool(refused) == bool(also)
    kept = [(offset, size) for slot, offset, size in rows if slot not in refused]
    assert all(space.chunk_bytes(offset) == size for offset, size in kept)
    ends = sorted((offset, offset + size) for offset, size in kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_issue_only_large_values_and_slabs_with_a_fault_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry was reserved by itself: seconds for some 100,000 of them, in which the worker answered nobody."""
    single: list[int] = []
    real = Allocator.reserve

    def reserve(self: Allocator, offset: int, chunk_bytes: int) -> None:
        single.append(offset)
        real(self, offset, chunk_bytes)

    rows = [(slab * 512 + index, slab * SLAB_BYTES + index * 4096, 4096) for slab in range(3) for index in range(512)]
    large = (3 * 512, 3 * SLAB_BYTES, 3 << 20)
    monkeypatch.setattr(Allocator, "reserve", reserve)
    _, refused = at_once([*rows, large], DEFAULT_POLICY)
    assert not refused and single == [large[1]]
    single.clear()
    slot, offset, size = rows[512]
    _, refused = at_once([*rows[:512], (slot, offset + 64, size), *rows[513:], large], DEFAULT_POLICY)
    assert refused and {each // SLAB_BYTES for each in single} == {1, 3}


@pytest.mark.parametrize(
    "rows",
    [
        [(20 * 102_400, 102_400)],  # over the slab's end: 20.5 of them fit
        [(0, 4095)], [(64, 4096)], [(0, 4096), (0, 4096)], [(0, 4096), (5120, 5120)], [(0, 3 << 20)],
        [(-4096, 4096)], [(REGION // SLAB_BYTES * SLAB_BYTES, 4096)],
    ],
)  # fmt: skip
def test_a_slab_with_one_impossible_row_is_not_whole(rows: list[tuple[int, int]]) -> None:
    """Not the sound one beside it, which would be taken for impossible as well."""
    sound = (SLAB_BYTES, 4096)
    offsets, sizes = np.array([*rows, sound], np.int64).T
    assert [(each.base, each.rows.tolist()) for each in whole_slabs(offsets, sizes, REGION)] == [
        (SLAB_BYTES, [len(rows)])
    ]


def test_groups_are_those_of_class_of() -> None:
    sizes = [*range(1, 5000), *range(5000, 300_000, 97), 1 << 31]
    assert groups_of(np.array(sizes, np.int64)).tolist() == [class_of(size) for size in sizes]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_slot_is_inserted_twice(policy: str) -> None:
    queue = make_policy(policy, 10, 2, memoryview(bytearray(10)))
    queue.insert(3, 1)
    for slots in ([1, 2, 1], [5, 3]):
        with pytest.raises(CorruptionError, match="twice"):
            queue.insert_all(np.array(slots), np.zeros(len(slots), np.int64))
    check(queue)
    assert list(queue.slots(1)) == [3] and not list(queue.slots(0))


def test_issue_the_heartbeat_goes_on(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery, also of entries of shards that are lost: readers must not take the arena for dead."""
    monkeypatch.setattr("simm.table._BLOCK_SLOTS", 64)
    world = World(segment, slots=1000)
    player = world.join()
    for number in range(500):
        world.put(player, digest_of(f"b{number}"), 64)
    blocks = world.geometry.slots // 64
    for lost in (False, True):
        if lost:
            world.store.shards[:] = memoryview(bytes(8 * len(world.store.shards))).cast("Q")
        before = world.store.header[Word.HEARTBEAT]
        store = Store.recover(segment.mm, segment.name)
        assert store.header[Word.HEARTBEAT] >= before + 2 * blocks
        assert store.table.entries == 500 * (not lost)


def test_issue_a_recovered_store_leaves_nothing_to_its_first_request(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It linked the free chunks of all slabs one by one: the first grant or delete took seconds, without a heartbeat.

    Until then the largest free piece had no bytes.
    """
    world = World(segment, slots=1000)
    player = world.join()
    for number in range(40):
        assert world.put(player, digest_of(f"h{number}"), (64, 4096)[number % 2])
    grants = world.grant(player, 4096, 3)
    store = Store.recover(segment.mm, segment.name)
    assert store.table.entries == 40 and store.stats()["room"] > 0
    allocator = store.space._allocator
    assert allocator._masks is None, "the free lists are there"
    assert not allocator.grown and len(store.space._coldest._bounds) == len(list(allocator.slabs())) == 2
    relinked: list[int] = []
    monkeypatch.setattr("simm.slab._Slab.relink", lambda self: relinked.append(self.base))
    (session,) = store.sessions.by_id.values()
    assert len(session.grants) >= len(grants)
    store.sessions.end(session)
    for number in range(2):
        store._drop_entry(store.table.lookup(digest_of(f"h{number}")))
    assert store.space.allocate(64) >= 0 and store.space.allocate(4096) >= 0
    assert not relinked
    check(store)


def entries_of(world: World, count: int) -> None:
    """Publish so many entries of 64 bytes in slots of their own; no chunk is granted for them."""
    table, data = world.store.table, world.geometry.data_offset
    for number in range(count):
        assert table.publish(digest_of(f"e{number}"), data + 64 * number, 60, 0, 64, 0, 0, number + 1) is not None


@pytest.mark.parametrize(
    ("offset", "chunk"), [(None, 0xFFFF_FFFF), (1 << 63, 64), (0, 0xFFFF_FFFF), (None, 0)], ids=repr
)
def test_a_row_that_cannot_be_takes_no_other_with_it(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, offset: int | None, chunk: int
) -> None:
    """A slot may change after it was checked. A chunk over the whole arena would share bytes with all others."""
    world = World(segment, slots=1000)
    player = world.join()
    for number in range(20):
        world.put(player, digest_of(f"i{number}"), 64)
    real = Table.live

    def live(self: Table) -> LiveSlots:
        found = real(self)
        at = int(np.argmin(found.offsets))
        found.chunks[at] = chunk
        found.offsets[at] = found.offsets[at] if offset is None else offset
        return found

    monkeypatch.setattr(Table, "live", live)
    store = Store.recover(segment.mm, segment.name)
    assert store.table.entries == 19, store.notes


@pytest.mark.parametrize("step", ["restore", "entries", "ledger", "free lists"])
def test_issue_the_heartbeat_goes_on_in_each_step_for_all_entries(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A step of numpy that takes all entries at once waits here until the heartbeat has moved. It stood still."""
    world = World(segment, slots=1000)
    entries_of(world, 300)
    holder, name = {
        "restore": (Space, "restore"), "entries": (Table, "live"), "ledger": (Ledger, "recover"),
        "free lists": (Allocator, "end_recovery"),
    }[step]  # fmt: skip
    real = getattr(holder, name)
    moved: list[int] = []

    def slow(self: object, *arguments: object) -> object:
        start = world.store.header[Word.HEARTBEAT]
        wait_until(lambda: world.store.header[Word.HEARTBEAT] - start >= 3, "the heartbeat moves")
        moved.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(holder, name, slow)
    store = Store.recover(segment.mm, segment.name)
    assert moved and store.table.entries == 300
    still = [store.header[Word.HEARTBEAT]]
    assert not [each for each in threading.enumerate() if each.name == "simm-beat"], "it beats no longer"
    assert store.header[Word.HEARTBEAT] == still[0]


def test_a_recovery_that_hangs_stops_beating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "BEATS_S_MAX", 0.0)
    monkeypatch.setattr(threads, "BEAT_S", 0.001)
    counted: list[int] = []
    with threads.beating(lambda: counted.append(1)):
        wait_until(
            lambda: not [each for each in threading.enumerate() if each.name == "simm-beat"], "it has ended"
        )
    assert not counted


def test_entries_of_lost_shards_are_cleared_a_few_at_a_time(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two heartbeats at most ``CLEARS`` entries are cleared, however large a block of slots is."""
    monkeypatch.setattr("simm.table.CLEARS", 20)
    world = World(segment, slots=1000)
    entries_of(world, 300)
    real, cleared, most = Table.clear, [0], [0]

    def clear(self: Table, slot: int) -> None:
        cleared[0] += 1
        most[0] = max(most[0], cleared[0])
        real(self, slot)

    monkeypatch.setattr(Table, "clear", clear)

    def beat() -> None:
        cleared[0] = 0

    count = world.store.table.clear_shards(np.ones(SHARD_COUNT, bool), beat)
    assert count == 300 and 0 < most[0] <= 20
