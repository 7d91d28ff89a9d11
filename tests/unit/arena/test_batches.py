"""Entries that are evicted together: the same as one by one, whoever looks meanwhile, and whenever the worker dies."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import simm.arena.ledger
import simm.arena.space
import simm.table
from simm.arena.eviction import make_policy
from simm.arena.queues import KeyWords
from simm.arena.space import OWN, SPARE_STEPS, Space
from simm.arena.store import Store
from simm.constants import POLICY_NAMES, SLAB_BYTES
from simm.errors import CorruptionError
from simm.ipc.arena_files import OwnedArena
from simm.table import Table
from tests.support.consistency import check
from tests.support.crash import A, B, C, Operation, die_everywhere, read_everywhere, reuse_of_a_chunk, small
from tests.support.dose import dose
from tests.support.store_world import Player, World, digest_of

KIB = 1 << 10
CHUNK = 128 * KIB
#: Of the spaces of twins, which have room for less.
SLOTS = 3000


@pytest.fixture(params=["scalar", "columns"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test with few entries has them one after the other, and by numpy."""
    least = 1 if request.param == "columns" else 1000
    for module in (simm.table, simm.arena.ledger):
        monkeypatch.setattr(module, "COLUMNS_FROM", least)


# -- the same as one by one -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", dose(range(3), quick=1))
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_taking_victims_is_victim_and_remove_in_turns(name: str, seed: int) -> None:
    rng = random.Random(seed)
    slots, groups = 300, 2
    keys = KeyWords([rng.getrandbits(64) for _ in range(slots)], 1, 0)
    seen = [memoryview(bytearray(slots)) for _ in range(2)]
    one, many = (make_policy(name, slots, groups, visited, 2, keys) for visited in seen)
    live: set[int] = set()
    taken = cut = spared = 0
    for _ in range(400):
        for slot in rng.sample(sorted(set(range(slots)) - live), min(slots - len(live), rng.randrange(12))):
            group = rng.randrange(groups)
            one.insert(slot, group)
            many.insert(slot, group)
            live.add(slot)
        for slot in rng.sample(sorted(live), min(len(live), rng.randrange(6))):
            seen[0][slot] = seen[1][slot] = rng.randrange(1, 256)
        group, most = rng.randrange(groups), rng.randrange(1, 14)
        latest = rng.choice((one.clock, one.clock - rng.randrange(200), -1))
        held = frozenset(slot for slot in live if rng.random() < 0.1)
        found = []
        while len(found) < most:
            slot = one.victim(group, held.__contains__)
            if slot < 0 or one.since(slot) > latest:
                cut += slot >= 0
                spared += slot < 0 and any(one.group_of(each) == group for each in live - held)
                break
            one.remove(slot)
            found.append(slot)
        assert many.take_victims(group, held.__contains__, most, latest) == found
        live -= set(found)
        taken += len(found)
        assert seen[0] == seen[1] and one.clock == many.clock
        assert [list(one.slots(each)) for each in range(groups)] == [list(many.slots(each)) for each in range(groups)]
        assert [one.age(slot) for slot in sorted(live)] == [many.age(slot) for slot in sorted(live)]
        check(many)
    assert min(taken, cut, spared) > 0, (taken, cut, spared)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_removing_many_is_remove_in_turns(name: str) -> None:
    rng = random.Random(4)
    one, many = (make_policy(name, 90, 2, memoryview(bytearray(90)), 2) for _ in range(2))
    for slot in range(90):
        for each in (one, many):
            each.insert(slot, slot % 2)
    for _ in range(5):
        assert one.victim(0, lambda _: False) == many.victim(0, lambda _: False)  # which a hand may stay on
        gone = [slot for slot in rng.sample(range(90), 30) if one.group_of(slot) >= 0]
        for slot in gone:
            one.remove(slot)
        many.remove_many(gone)
        assert [list(one.slots(each)) for each in (0, 1)] == [list(many.slots(each)) for each in (0, 1)]
        assert one._hands == many._hands
        check(many)
    with pytest.raises(CorruptionError, match="was not inserted"):
        many.remove_many(gone[:1])


class Twin:
    """A space, and the entries of its table. With ``many`` it is told of many evictions at once."""

    def __init__(self, policy: str, *, many: bool) -> None:
        self.visited = memoryview(bytearray(SLOTS))
        self.batches: list[int] = []
        #: The numbers of batches that are refused once, from 0 on.
        self.refused: set[int] = set()
        self.entries: set[int] = set()
        self.singles = 0
        together = self.on_evict_many if many else None
        self.space = Space(16 * SLAB_BYTES, SLOTS, self.visited, policy, self.on_evict, None, together)

    def on_evict(self, slot: int) -> None:
        self.entries.remove(slot)
        self.singles += 1
        self.space.release(self.space.offset(slot))

    def on_evict_many(self, slots: list[int], offsets: list[int]) -> None:
        assert [self.space.offset(slot) for slot in slots] == offsets
        assert not any(self.space.is_held(offset) for offset in offsets)
        if len(self.batches) in self.refused:
            self.refused.clear()
            raise CorruptionError("refused")
        self.entries -= set(slots)
        self.batches.append(len(slots))


# Asked twice for a victim, FIFO gives the same, and LRU where not all entries of the size are fresh.
@pytest.mark.parametrize(
    ("policy", "sizes"), [("lru", [16 * KIB]), ("fifo", [*[16 * KIB] * 4, 64 * KIB, 300_000])], ids=["lru", "fifo"]
)
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_many_chunks_are_those_that_come_one_by_one(policy: str, sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    one, many = Twin(policy, many=False), Twin(policy, many=True)
    held: list[int] = []
    for turn in range(150):
        size = rng.choice(sizes)
        count = rng.randrange(1, 90 if size < 20_000 else 10)
        singly = [offset for offset in (one.space.allocate(size) for _ in range(count)) if offset >= 0]
        assert many.space.allocate_many(size, count) == singly
        assert one.entries == many.entries
        free = sorted(set(range(SLOTS)) - one.entries)
        for offset, slot in zip(singly, rng.sample(free, len(singly))):
            for each in (one, many):
                each.space.publish(offset, slot)
                each.entries.add(slot)
        for slot in rng.sample(sorted(one.entries), min(4, len(one.entries))):
            one.visited[slot] = many.visited[slot] = 1
        if rng.random() < 0.2:
            held.append(one.space.offset(rng.choice(sorted(one.entries))))
            for each in (one, many):
                each.space.hold(held[-1])
        if len(held) > 3:
            for each in (one, many):
                each.space.unhold(held[0])
            held.pop(0)
        assert one.space.evictions == many.space.evictions
        if turn % 10 == 0:
            check(many.space)
    assert max(many.batches) > 8 and sum(many.batches) > many.space.evictions[OWN] // 3


def filled(many: bool = True, size: int = 16 * KIB) -> Twin:
    """A full space in which nothing is fresh."""
    twin = Twin("lru", many=many)
    for slot, offset in enumerate(twin.space.allocate_many(size, SLOTS)):
        twin.space.publish(offset, slot)
        twin.space._policy.spare_no_more(slot)
        twin.entries.add(slot)
    assert len(twin.entries) == 16 * SLAB_BYTES // size
    return twin


@pytest.mark.parametrize("need", [64 * KIB, 5 * SLAB_BYTES])
def test_the_entries_of_a_slab_go_together(need: int) -> None:
    """A large value takes the place of thousands of small ones: a callback each would stop the worker."""
    twin = filled()
    before = len(twin.entries)
    offset = twin.space.allocate(need)
    slabs = -(-need // SLAB_BYTES)
    assert offset >= 0 and len(twin.entries) == before - slabs * 128
    assert twin.batches == [128] * slabs and twin.singles == 0
    assert sum(twin.space.evictions.values()) == slabs * 128 and sum(twin.space.victims.ages[1:]) == slabs
    check(twin.space)
    singly = filled(many=False)
    assert singly.space.allocate(need) == offset and singly.entries == twin.entries
    assert singly.space.evictions == twin.space.evictions and singly.singles == slabs * 128


def test_the_entries_of_a_slab_go_in_parts_of_what_one_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of events takes no more at once, and all of a part are odd for as long as it takes."""
    monkeypatch.setattr(simm.arena.space, "BATCH_KEYS_MAX", 50)
    twin = filled()
    assert twin.space.allocate(64 * KIB) >= 0
    assert twin.batches == [50, 50, 28] and sum(twin.space.evictions.values()) == 128
    check(twin.space)


def test_a_part_that_is_refused_leaves_those_before_it_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slots may have other entries by the time at which the slab is evicted after all."""
    monkeypatch.setattr(simm.arena.space, "BATCH_KEYS_MAX", 50)
    twin = filled()
    before = set(twin.entries)
    twin.refused.add(2)
    with pytest.raises(CorruptionError, match="refused"):
        twin.space.allocate(64 * KIB)
    gone = sorted(before - twin.entries)
    assert len(gone) == 100 and all(twin.space.offset(slot) < 0 for slot in gone)
    check(twin.space)
    offsets = twin.space.allocate_many(16 * KIB, 100)
    assert len(offsets) == 100 and twin.entries == before - set(gone), "their chunks are free"
    for slot, offset in zip(gone, offsets):
        twin.space.publish(offset, slot)
        twin.entries.add(slot)
    assert twin.space.allocate(64 * KIB) >= 0
    check(twin.space)


@pytest.mark.parametrize(("helps", "of_batch"), [(0, 1), (5, 6), (99, SPARE_STEPS)])
def test_what_nobody_can_read_is_dropped_in_few_steps_for_a_batch(helps: int, of_batch: int) -> None:
    """Each searches thousands of slots, whatever it finds: there is another one only where the last one made room."""
    twin = filled()
    steps: list[int] = []

    def step() -> bool:
        slot = min(twin.entries)
        if len(steps) < helps:
            twin.entries.remove(slot)
            twin.space.release(twin.space.offset(slot))
        steps.append(slot)
        return len(steps) < of_batch + 2

    twin.space.spare = step
    assert len(twin.space.allocate_many(16 * KIB, 512)) == 512 and len(steps) == of_batch
    assert max(twin.batches) > 64, "own victims go together while there is more to drop"
    assert twin.space.allocate(16 * KIB) >= 0 and len(steps) == of_batch + 1
    assert len(twin.space.allocate_many(16 * KIB, 300)) == 300 and len(steps) == of_batch + 2
    assert twin.space.allocate(16 * KIB) >= 0 and len(steps) == of_batch + 2 and twin.space.spare is None
    check(twin.space)


def bounded(monkeypatch: pytest.MonkeyPatch, most: int, part: int = 16) -> tuple[Twin, list[int]]:
    """A full space in which each entry that is evicted leaves 63 orphans; and what else counts as orphans."""
    monkeypatch.setattr(simm.arena.space, "ORPHANS_MAX", most)
    monkeypatch.setattr(simm.arena.space, "PART_WITH_GROUPS", part)
    twin, orphans = filled(), [0]
    before = len(twin.entries)
    twin.space.waiting = lambda: 63 * (before - len(twin.entries)) + orphans[0]
    return twin, orphans


def test_what_nobody_can_read_leaves_no_more_orphans_than_what_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, orphans = bounded(monkeypatch, 1000)
    steps: list[int] = []

    def step() -> bool:
        slot = min(twin.entries)
        orphans[0] += 337 - 63
        twin.entries.remove(slot)
        twin.space.release(twin.space.offset(slot))
        steps.append(slot)
        return True

    twin.space.spare = step
    assert len(twin.space.allocate_many(16 * KIB, 512)) == 3 == len(steps) and twin.space.cut_short
    assert twin.space.allocate(16 * KIB) == -1 and len(steps) == 3 and twin.space.cut_short
    orphans[0] = -10_000
    assert twin.space.allocate(16 * KIB) >= 0 and len(steps) == 4 and not twin.space.cut_short
    check(twin.space)


@pytest.mark.parametrize("held", [False, True])
def test_a_slab_that_was_emptied_in_part_is_emptied_first_by_the_next_request(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """What is put there meanwhile made it a slab of fresh values, and the next request began with another one."""
    twin, orphans = bounded(monkeypatch, 16 * 63)
    bases = {slot: twin.space.offset(slot) & -SLAB_BYTES for slot in twin.entries}
    offset = twin.space.allocate(64 * KIB)
    begun = {bases[slot] for slot in bases.keys() - twin.entries}
    if held:
        twin.space.hold(next(twin.space.offset(slot) for slot in twin.entries if bases[slot] in begun))
    tries = 1
    while offset < 0 and tries < 100:
        assert twin.space.cut_short
        for each in twin.space.allocate_many(16 * KIB, 4):
            slot = min(set(range(2500, SLOTS)) - twin.entries)
            twin.space.publish(each, slot)
            twin.entries.add(slot)
        assert twin.space.waiting is not None
        orphans[0] -= twin.space.waiting()
        offset = twin.space.allocate(64 * KIB)
        tries += 1
    gone = bases.keys() - twin.entries
    assert offset >= 0 and len(gone) == 128 + 16 * held, "one slab, and none but that in part"
    assert held == (offset & -SLAB_BYTES not in begun) and tries == -(-124 // 12) + held
    check(twin.space)


def test_a_request_that_is_cut_short_before_it_evicts_leaves_the_slab_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note of the slab was gone, and the next request emptied a part of another one."""
    twin, orphans = bounded(monkeypatch, 16 * 63)
    bases = {slot: twin.space.offset(slot) & -SLAB_BYTES for slot in twin.entries}
    waiting = twin.space.waiting
    assert waiting is not None and twin.space.allocate(64 * KIB) < 0
    begun = {bases[slot] for slot in bases.keys() - twin.entries}
    for _ in range(100):
        for each in twin.space.allocate_many(16 * KIB, 4):  # else it is the coldest one, which is begun with anyhow
            slot = min(set(range(2500, SLOTS)) - twin.entries)
            twin.space.publish(each, slot)
            twin.entries.add(slot)
        orphans[0] -= waiting()

        def step() -> bool:
            orphans[0] += 16 * 63
            return False

        left = len(twin.entries)
        twin.space.spare = step
        assert twin.space.allocate(64 * KIB) < 0 and twin.space.cut_short and len(twin.entries) == left
        orphans[0] -= waiting()
        if (offset := twin.space.allocate(64 * KIB)) >= 0:
            break
    assert {bases[slot] for slot in bases.keys() - twin.entries} == begun == {offset & -SLAB_BYTES}
    check(twin.space)


def test_a_slab_that_became_one_of_another_class_is_not_emptied_for_the_earlier_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was evicted, with all that is fresh in it, for what had been begun with before."""
    twin, orphans = bounded(monkeypatch, 16 * 63)
    bases = {slot: twin.space.offset(slot) & -SLAB_BYTES for slot in twin.entries}
    waiting = twin.space.waiting
    assert waiting is not None and twin.space.allocate(64 * KIB) < 0
    (begun,) = {bases[slot] for slot in bases.keys() - twin.entries}
    for slot in [slot for slot in twin.entries if bases[slot] == begun]:
        twin.entries.remove(slot)
        twin.space.release(twin.space.offset(slot))
    orphans[0] -= waiting()
    offset = twin.space.allocate(32 * KIB)
    assert offset & -SLAB_BYTES == begun and not twin.space.cut_short
    twin.space.publish(offset, SLOTS - 1)
    twin.entries.add(SLOTS - 1)
    orphans[0] -= waiting()
    twin.space.allocate(64 * KIB)
    assert SLOTS - 1 in twin.entries, "it is fresh"
    check(twin.space)


def test_a_chunk_that_belongs_to_another_is_not_handed_on() -> None:
    twin = Twin("lru", many=True)
    (offset,) = twin.space.allocate_many(4096, 1)
    twin.space.publish(offset, 3)
    for offsets, slots in (([offset], [4]), ([offset + 4096], [3]), ([offset + 1], [3]), ([3 * SLAB_BYTES], [3])):
        with pytest.raises(CorruptionError, match="not owned"):
            twin.space._allocator.disown(offsets, slots)
    check(twin.space)


# -- in the table ---------------------------------------------------------------------------------------


def full(world: World) -> Player:
    """A region full of values that fill a slab by sixteen, some of them overwritten once."""
    player = world.join()
    for number in range(500):
        world.put(player, digest_of(f"fill {number}"), CHUNK)
        if number < 3:
            world.put(player, digest_of(f"fill {number}"), CHUNK)
        if world.store.space.evictions[OWN]:
            return player
    raise AssertionError("the region does not run full")


def evicting_grants(world: World) -> Operation:
    """Three victims go together, and their chunks become grants."""
    player = full(world)
    before = world.store.space.evictions[OWN]

    def operation() -> None:
        assert len(world.grant(player, CHUNK, 3)) == 3
        assert world.store.space.evictions[OWN] == before + 3

    return operation


def evicting_wants(world: World) -> Operation:
    """The same for grants that are made after an answer, of which the client has not heard."""
    player = full(world)
    (number,) = world.grant(player, CHUNK)

    def operation() -> None:
        world.commit(player, number, A, CHUNK)
        world.want(player, CHUNK, 3)

    return operation


def evicting_a_slab(world: World) -> Operation:
    """A large value takes the place of a slab, whose entries go together."""
    player = full(world)
    before = sum(world.store.space.evictions.values())

    def operation() -> None:
        assert len(world.grant(player, 10 * CHUNK)) == 1
        assert sum(world.store.space.evictions.values()) >= before + 16

    return operation


@pytest.mark.usefixtures("columns")
@pytest.mark.parametrize("scene", [evicting_grants, evicting_wants, evicting_a_slab], ids=lambda scene: scene.__name__)
def test_death_at_every_point_of_a_batch(segment: OwnedArena, scene: Callable[[World], Operation]) -> None:
    assert die_everywhere(segment, scene, twice=False) >= 9


@pytest.mark.usefixtures("columns")
def test_entries_that_go_together_go(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(segment, slots=64)
    player = full(world)
    gone: list[int] = []
    real = Table.clear_many
    monkeypatch.setattr(Table, "clear_many", lambda self, slots, at: (gone.extend(slots), real(self, slots, at))[1])
    seqs = {slot: world.store.table._words[slot * 8] for slot in range(64)}
    entries = world.store.table.entries
    world.grant(player, CHUNK, 3)
    assert len(gone) == 3 and world.store.table.entries == entries - 3
    for slot, seq in seqs.items():
        assert world.store.table._words[slot * 8] == seq + 2 * (slot in gone)
    world.check()


@pytest.mark.usefixtures("columns")
def test_a_slot_that_names_another_chunk_stops_the_batch(segment: OwnedArena) -> None:
    world = World(segment, slots=64)
    player = full(world)
    for digest in (A, B, C):
        world.put(player, digest, CHUNK)
    table = world.store.table
    slots = [table.lookup(digest) for digest in (A, B, C)]
    offsets = [table.offset(slot) for slot in slots]
    before = bytes(segment.buf)
    with pytest.raises(CorruptionError, match="other chunks"):
        table.clear_many(slots, [*offsets[:2], offsets[2] + 4096])
    assert bytes(segment.buf) == before


def dropped_together(world: World) -> Callable[[Player], object]:
    """A and B are evicted together, and their chunks are free."""

    def end(player: Player) -> None:
        store = world.store
        world.put(player, B, 4096)
        slots = [store.table.lookup(digest) for digest in (A, B)]
        offsets = [store.space.offset(slot) for slot in slots]
        store._drop_entries(slots, offsets)
        for offset in offsets:
            store.space.release(offset)

    return end


def stopped_reader(segment: OwnedArena) -> dict[str, int]:
    """A reader is stopped at each of its steps while its value goes with another, and its chunk is used again."""
    world = World(segment, slots=64)
    tape, contents = reuse_of_a_chunk(world, dropped_together(world))
    old = contents[0].popitem()
    contents[0].update([old])
    small(tape, contents, 10)
    return read_everywhere(world, tape, contents, lambda result: not isinstance(result, bytes) or result == old[1])


@pytest.mark.usefixtures("columns")
def test_no_reader_mixes_what_went_with_others(segment: OwnedArena) -> None:
    seen = stopped_reader(segment)
    assert min(seen.values()) > 0, seen


def test_a_batch_that_keeps_its_seqs_is_seen(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: without a new seq a reader does not notice that its chunk went."""

    def clear_many(self: Table, slots: list[int], offsets: list[int]) -> None:
        for slot in slots:
            seq = self._words[slot * 8]
            self.clear(slot)
            self._words[slot * 8] = seq

    monkeypatch.setattr(Table, "clear_many", clear_many)
    with pytest.raises(AssertionError, match="wrong value"):
        stopped_reader(segment)


# -- in the store ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("columns")
def test_quotas_and_moves_hear_of_each(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.sessions.open(1, 1, "a")
    store.set_quotas({"a": 1 << 40})
    number = 0
    while not store.space.evictions[OWN]:
        ((grant, *_),) = store.sessions.grant(session, CHUNK, 1)
        store.commit(session, [(digest_of(f"{number}"), grant, CHUNK, 0, 0, 0)])
        number += 1
    store.apply_pending()
    stored = {digest for digest in (digest_of(f"{each}") for each in range(number)) if store.table.lookup(digest) >= 0}
    told: list[bytes] = []
    monkeypatch.setattr(store.shard_words, "moving", 1)
    split = lambda some: [some[at : at + 16] for at in range(0, len(some), 16)]  # noqa: E731
    monkeypatch.setattr(store.shard_words, "note_dropped_many", lambda some: told.extend(split(some)))
    assert len(store.sessions.grant(session, CHUNK, 3)) == 3
    left = {digest for digest in stored if store.table.lookup(digest) >= 0}
    assert set(told) == stored - left and len(told) == 3
    assert store.stats()["quotas"]["a"]["used_bytes"] == len(left) * CHUNK
    monkeypatch.undo()
    check(store)
