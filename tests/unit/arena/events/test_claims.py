"""Claims are never false, and in the end they are what the arena has: the store's model, with a ring beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simm.arena.events import follow as follow_module
from simm.arena.events import ring as ring_module
from simm.arena.events.follow import Follower, MappedTable
from simm.arena.events.ring import EventRing, RingReader
from simm.arena.hashing import EpochHasher, Hasher, shard_of
from simm.arena.layout import Geometry
from simm.arena.reader import ArenaReader
from simm.arena.shard_words import ShardWords
from simm.arena.store import Store
from simm.constants import BATCH_KEYS_MAX, POLICY_NAMES
from simm.ipc.arena_files import OwnedArena
from simm.table import Table
from simm.wire.messages import Status
from tests.support import trace_replay
from tests.support.consistency import check
from tests.support.crash import A, B, C, Operation, fill, lose_shards, new_commit, overwrite
from tests.support.dose import dose, dosed
from tests.support.event_claims import Claims, Watcher, attach_to, digest_in, listed, new_ring, told
from tests.support.group_world import members
from tests.support.shards import set_shards
from tests.support.store_steps import step
from tests.support.store_world import ALL_SHARDS, World, digest_of, divide, owned

MIB = 1 << 20
SEGMENT_BYTES = 16 * MIB
#: States of an operation that are all looked at.
LOOKS = 150
#: So many pages a look has.
PAGED = 4


class Scene:
    """A world whose store tells a ring, and one who watches."""

    def __init__(self, segment: OwnedArena, slots: int = 24, policy: str = "lru") -> None:
        self.memory = new_ring()
        self.world = World(segment, slots=slots, policy=policy, store=told(self.memory))
        self.watcher = Watcher(self.memory, self.world.reader)

    def false_claims(self) -> list[bytes]:
        """Return what is claimed and cannot be read. A slot in an overwrite has its old or its new value."""
        claims, real = self.watcher.catch_up(), listed(self.world.reader)
        return [each for each in claims if each not in real and not self.world.reader.contains(each)]

    def tell(self) -> None:
        """Do what a heartbeat does."""
        self.world.store.apply_pending()
        self.world.store.table.tell()


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(6), quick=1))
def test_random_runs(segment: OwnedArena, seed: int, policy: str) -> None:
    rng, scene = random.Random(seed), Scene(segment, policy=policy)
    seen = 0
    for _ in range(dosed(400, quick=120)):
        step(scene.world, rng)
        assert not scene.false_claims()
        if rng.random() < 0.3:
            scene.tell()
            assert scene.watcher.catch_up() == listed(scene.world.reader)
            assert set(scene.watcher.claims) == set(scene.world.values)
            seen = max(seen, len(scene.watcher.claims))
    scene.tell()
    assert scene.watcher.catch_up() == listed(scene.world.reader) and seen > 5
    assert scene.world.evicted + scene.world.deaths > 0


def test_a_late_watcher_finds_the_same(segment: OwnedArena) -> None:
    rng, scene = random.Random(3), Scene(segment)
    for _ in range(200):
        step(scene.world, rng)
        if rng.random() < 0.1:
            scene.tell()
            assert Watcher(scene.memory, scene.world.reader).catch_up() == listed(scene.world.reader)


def test_a_watcher_that_is_lapped_looks_again(segment: OwnedArena) -> None:
    rng, scene = random.Random(4), Scene(segment)
    scene.watcher.catch_up()
    player, looks = scene.world.join(), scene.watcher.follower.looks
    for _ in range(3):
        for number in range(40):
            scene.world.put(player, digest_of(f"key {number}"), 4096)
        scene.tell()
        for _ in range(scene.watcher.follower._ring.capacity):
            scene.world.store.table.events.append(ring_module.SHARD, 16383)  # type: ignore[union-attr]
        assert not scene.false_claims()
        assert scene.watcher.claims == listed(scene.world.reader)
        step(scene.world, rng)
    assert scene.watcher.follower.gaps == 3 and scene.watcher.follower.looks == looks + 3


# -- at every instruction ------------------------------------------------------------------------------


def evict_one(world: World) -> Operation:
    player = fill(world, 70_000)
    return lambda: world.put(player, A, 70_000)


def evict_many(world: World) -> Operation:
    player = fill(world, 4096 * 16)
    world.store.table.tell()
    return lambda: world.grant(player, 4096 * 16, 30)


def delete(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)
    return lambda: world.delete(A)


def put_and_tell(world: World) -> Operation:
    player = world.join()

    def operation() -> None:
        world.put(player, A, 4096)
        world.store.table.tell()
        world.delete(A)
        world.put(player, B, 5000)
        world.store.table.tell()

    return operation


def die(world: World) -> Operation:
    player = world.join()
    for digest in (A, B, C):
        world.put(player, digest, 4096)
    world.store.table.tell()
    return world.die


def freeze(world: World) -> Operation:
    player = world.join()
    world.put(player, A, 4096)

    def operation() -> None:
        assert world.store.freeze(9, [shard_of(A)]) is not None

    return operation


def put_and_freeze(world: World) -> Operation:
    player = world.join()

    def operation() -> None:
        world.put(player, A, 4096)
        assert world.store.freeze(9, [shard_of(A)]) is not None
        world.store.table.tell()

    return operation


def delete_and_put(world: World) -> Operation:
    """The slot gets an entry again before anybody is told of the one before."""
    player = world.join()
    world.put(player, A, 4096)

    def operation() -> None:
        world.delete(A)
        world.put(player, A, 5000)
        world.delete(A)
        world.store.table.tell()
        world.put(player, A, 4096)
        world.store.table.tell()

    return operation


def take_apart(world: World) -> Operation:
    """One DELETE, and the others of many groups go with it."""
    player = world.join()
    wholes = [members(number, 20) for number in range(3)]
    for whole in wholes:
        for digest in whole:
            world.put(player, digest, 64)
    world.store.apply_pending()
    assert world.store.groups.mark_many(wholes) == [Status.OK] * 3

    def operation() -> None:
        world.store.delete([whole[0] for whole in wholes])
        (last,) = wholes[-1][-1:]
        world.put(player, last, 5000)
        assert listed(world.reader).keys() == {last}
        world.store.table.tell()

    return operation


SCENES = [
    evict_one, evict_many, take_apart, delete, put_and_tell, die, freeze, put_and_freeze, delete_and_put, new_commit,
    overwrite, lose_shards,
]  # fmt: skip


def falsehoods(segment: OwnedArena, prepare: Callable[[World], Operation]) -> tuple[int, int]:
    """Run a scene and look at every state of memory. Return the states, and in how many a claim is false."""
    scene = Scene(segment, slots=512)
    operation = prepare(scene.world)
    scene.tell()
    scene.watcher.catch_up()
    states = wrong = calls = 0
    last = b""
    began: list[Watcher] = []
    paged: list[Watcher] = []
    size = scene.world.geometry.ledger_offset

    def look(*_: object) -> None:
        nonlocal states, wrong, last, calls
        calls += 1
        if states > LOOKS and calls % 9973:  # thousands of shards, one like the other
            return
        now = bytes(scene.world.segment.buf[:size]) + bytes(scene.memory[:64])
        if now == last:
            return
        last = now
        states += 1
        paged.append(Watcher(scene.memory, scene.world.reader))
        for each in paged[-PAGED:]:  # those that look at a page in each state
            each.step()
            wrong += each.follower.looks == 1 and bool(set(each.claims) - known(scene.world.reader))
        began.append(Watcher(scene.memory, scene.world.reader))
        wrong += bool(scene.false_claims()) or bool(set(began[-1].catch_up()) - known(scene.world.reader))

    class Quiet:
        """The look runs code of SiMM itself, which is not to be traced."""

        inside = False

        def __call__(self, *_: object) -> None:
            if not self.inside:
                self.inside = True
                try:
                    look()
                finally:
                    self.inside = False

    with trace_replay._each_instruction(Quiet()):
        operation()
    calls = -1
    look()
    # Those that looked at the table in the middle, and have followed since.
    wrong += sum(bool(set(each.catch_up()) - known(scene.world.reader)) for each in began + paged)
    return states, wrong


def known(reader: ArenaReader) -> set[bytes]:
    """Return the digests that can be read, those in an overwrite too."""
    return {each for each in (A, B, C) if reader.contains(each)} | set(listed(reader))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_no_claim_is_false_at_any_instruction(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, scene: Callable[[World], Operation]
) -> None:
    monkeypatch.setattr(follow_module, "LOOK_SLOTS", 512 // PAGED)
    monkeypatch.setattr(follow_module, "LOOK_WIDER", 1)
    states, wrong = falsehoods(segment, scene)
    assert states > 2 and not wrong


@pytest.mark.parametrize("broken", ["late removals", "late stores", "late shards", "no look back"])
def test_each_order_is_needed(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """What happens without it: some state has a false claim."""
    scene: Callable[[World], Operation] = delete
    if broken == "late removals":

        def clear(self: Table, slot: int, real: Callable[[Table, int], None] = Table.clear) -> None:
            ring, self._events = self._events, None
            real(self, slot)
            self._events = ring
            if ring is not None:
                ring.removed_one(slot)

        monkeypatch.setattr(Table, "clear", clear)
    elif broken == "late stores":  # what came is told behind the loss of its shard
        scene = put_and_freeze
        begin = EventRing.begin
        monkeypatch.setattr(EventRing, "begin", lambda self, used, flush: begin(self, used, lambda: None))
    elif broken == "late shards":
        scene = lose_shards

        def store(self: ShardWords, shard: int, word: int) -> None:
            self.words[shard] = word

        monkeypatch.setattr(ShardWords, "_store", store)
    else:
        scene = evict_many
        monkeypatch.setattr("simm.arena.events.follow.LOOKBACK", 0)
    assert falsehoods(segment, scene)[1] > 0


def test_claims_at_the_end_need_every_hook(segment: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what recovery tells, what a predecessor told and did not do stays unclaimed."""
    scene = Scene(segment)
    player = scene.world.join()
    scene.world.put(player, A, 4096)
    scene.tell()
    assert set(scene.watcher.catch_up()) == {A}
    ring = scene.world.store.table.events
    assert ring is not None
    ring.removed_one(scene.world.store.table.lookup(A))  # and death, before the entry went
    assert not scene.watcher.catch_up()
    scene.world.die()
    assert set(scene.watcher.catch_up()) == {A} == set(Watcher(scene.memory, scene.world.reader).catch_up())
    monkeypatch.setattr(EventRing, "anew", lambda self: None)
    scene.world.store.table.events.removed_one(scene.world.store.table.lookup(A))  # type: ignore[union-attr]
    scene.world.die()
    assert not scene.watcher.catch_up()


@pytest.mark.parametrize("told", ["removed", "shard", "namespace", "closed", "anew", "gap"])
def test_what_goes_while_slots_are_read_is_not_claimed(segment: OwnedArena, told: str) -> None:
    """The ring is read again behind the slots. Without that the claim would be false when it is made."""
    scene = Scene(segment)
    store, player = scene.world.store, scene.world.join()
    scene.watcher.catch_up()
    ring = store.table.events
    assert ring is not None
    scene.world.put(player, A, 4096)
    scene.world.put(player, B, 4096)
    scene.tell()
    follower, table = scene.watcher.follower, scene.watcher.follower._table
    still, seen = follower._still, []

    class Racing:
        """The worker goes on while the slots are read."""

        slots = table.slots

        def page(self, start: int, stop: int) -> Any:
            return table.page(start, stop)

        def some(self, slots: Any) -> Any:
            rows = table.some(slots)
            number = int(store.table.entry(store.table.lookup(A)).namespace)
            {
                "removed": lambda: scene.world.delete(A), "shard": lambda: ring.append(ring_module.SHARD, shard_of(A)),
                "namespace": lambda: ring.append(ring_module.NAMESPACE, number),
                "closed": lambda: ring.append(ring_module.CLOSED), "anew": ring.anew,
                "gap": lambda: [ring.append(ring_module.SHARD, 16383) for _ in range(follower._ring.capacity + 1)],
            }[told]()  # fmt: skip
            seen.append(len(rows))
            return rows

    follower._table = Racing()
    changes = follower.step().records
    stored = {digest_in(row) for row in changes if row["operation"] == ring_module.STORED}
    assert seen == [2] and stored == ({B} if told in ("removed", "shard") else set())
    # The positive control: the rows themselves have it.
    assert len(still(table.some(np.array([store.table.lookup(B)])))) == (told in ("removed", "shard"))


def test_nothing_is_claimed_of_a_closed_arena(segment: OwnedArena) -> None:
    scene = Scene(segment)
    scene.world.put(scene.world.join(), A, 4096)
    scene.tell()
    assert set(scene.watcher.catch_up()) == {A}
    scene.world.store.close()
    assert not scene.watcher.catch_up() and not Watcher(scene.memory, scene.world.reader).catch_up()


def test_a_spoilt_slot(segment: OwnedArena) -> None:
    scene = Scene(segment, slots=64)
    player = scene.world.join()
    for digest in (A, B):
        scene.world.put(player, digest, 4096)
    scene.tell()
    assert set(scene.watcher.catch_up()) == {A, B}
    store = scene.world.store
    slot = store.table.lookup(A)
    at = scene.world.geometry.slots_offset + slot * 64 + 8
    segment.buf[at : at + 16] = C  # a stray store of somebody else
    store.drop_spoilt(slot)
    assert set(scene.watcher.catch_up()) == {B}
    del scene.world.values[A]


# -- epochs -----------------------------------------------------------------------------------------------


def open_store(segment: OwnedArena, slots: int = 512) -> tuple[Store, memoryview]:
    """Return a store that is owner of all shards, and the ring that it tells."""
    memory = new_ring()
    divide(segment, slots)
    tables = Geometry.plan(segment.size, slots).data_offset
    segment.buf[:tables] = bytes(tables)
    store = Store.create(segment.mm, slots=slots)
    attach_to(store, memory)
    set_shards(store, 1, *owned(ALL_SHARDS, 1))
    store.open()
    return store, memory


def test_an_advance_takes_all_claims_of_the_namespace_at_once(segment: OwnedArena) -> None:
    store, memory = open_store(segment)
    watcher = Watcher(memory, ArenaReader(segment.name))
    session = store.sessions.open(1, 1, "weights")
    other = store.sessions.open(1, 1, "other")

    def put(digest: bytes, by: Any = session) -> int:
        ((number, _, _),) = store.sessions.grant(by, 100, 1)
        return store.commit(by, [(digest, number, 100, 0, 0, 0)])[0]

    def tell() -> Claims:
        store.apply_pending()
        store.table.tell()
        return watcher.catch_up()

    keys = [f"key {number}" for number in range(20)]
    plain, of_other = Hasher("weights"), Hasher("other")
    for key in keys:
        assert put(plain(key)) == put(of_other(key), other) == Status.OK
    assert len(tell()) == 40
    kept = {of_other(key) for key in keys}
    for epoch in (7, 8):
        store.stale.take({"weights": epoch})  # nothing is dropped yet
        assert set(watcher.catch_up()) == kept == set(listed(watcher.reader))
        assert set(Watcher(memory, watcher.reader).catch_up()) == kept
        while store.stale.step():
            assert set(watcher.catch_up()) == kept
        hasher = EpochHasher("weights", epoch)
        for key in keys:
            assert put(hasher(key)) == Status.OK
        assert set(tell()) == kept | {hasher(key) for key in keys} == set(listed(watcher.reader))
    store.release()


@pytest.mark.parametrize("late", [False, True])
def test_issue_what_is_stored_again_before_old_values_are_dropped_stays_published(
    segment: OwnedArena, late: bool
) -> None:
    """Digests of two epochs have one first half, which is the name of an entry in what is published.

    The removal of the old entry took the new one with it, for good. ``late``: for one who begins after the advance.
    """
    published = pytest.importorskip("simm.index.publish.claims", reason="simm-store[index] is not installed")
    store, memory = open_store(segment)
    reader = ArenaReader(segment.name)
    store.sessions.open(1, 1, "the first one")
    session = store.sessions.open(1, 1, "weights")
    follower = Follower(RingReader(memory), MappedTable(reader))
    claims = published.Claims(lambda owner, number: f"n{number}")
    names: set[int] = set()

    def poll() -> set[int]:
        store.apply_pending()
        store.table.tell()
        step = follower.step()
        while follower.due or not step.empty:
            for delta in claims.take(1, step):
                (names.update if delta.stored else names.difference_update)(delta.names.tolist())
            step = follower.step()
        return names

    def there() -> set[int]:
        return {int.from_bytes(each[:8], "little") for each in listed(reader)}

    def put(epoch: int) -> None:
        hasher = EpochHasher("weights", epoch) if epoch else Hasher("weights")
        for number in range(200):
            digest = hasher(f"key {number}")
            ((granted, _, _),) = store.sessions.grant(session, 100, 1)
            assert store.commit(session, [(digest, granted, 100, 0, 0, 0)])[0] == Status.OK

    put(0)
    for epoch in (6, 7, 8):
        if not late:
            assert len(poll()) == 200
        store.stale.take({"weights": epoch})
        assert late or not poll()
        put(epoch)
        assert poll() == there() and len(names) == 200
        assert store.stale.due, "the control: old entries lie beside the new ones"
        while store.stale.step():
            assert poll() == there()
        assert poll() == there() and len(names) == 200
        (whole,) = claims.all()
        assert set(whole.names.tolist()) == names
    assert store.delete([EpochHasher("weights", 8)("key 3")]) == [Status.OK]
    assert poll() == there() and len(names) == 199
    store.release()


# -- many at once -----------------------------------------------------------------------------------------


def test_issue_a_slab_of_tiny_values_makes_room_for_another_size(
    segment: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has twice as many entries as the ring takes at once, and no reader finds all of them odd for long."""
    store, memory = open_store(segment, 1 << 17)
    watcher = Watcher(memory, ArenaReader(segment.name))
    session = store.sessions.open(1, 1, "a")
    together: list[int] = []
    real = Table.clear_many
    monkeypatch.setattr(Table, "clear_many", lambda *call: (together.append(len(call[1])), real(*call))[1])

    def put(name: str, size: int, count: int) -> None:
        grants = store.sessions.grant(session, size, count)
        assert len(grants) == count
        puts = [(digest_of(f"{name} {each}"), number, size, 0, 0, 0) for each, (number, _, _) in enumerate(grants)]
        assert set(store.commit(session, puts)) == {Status.OK}
        store.apply_pending()

    def tell() -> Claims:
        store.table.tell()
        return watcher.catch_up()

    for turn in range(9):
        put(f"tiny {turn}", 64, 4000)
    slabs = [store.space._allocator.used_of_slab(base) for base, _ in store.space._allocator.slabs()]
    assert max(slabs) > ring_module.LOOKBACK and tell() == listed(watcher.reader)
    turn = 0
    while max(together, default=0) < 1000:
        put(f"other {turn}", 100_000, 1)
        turn += 1
        assert turn < 200
    assert sum(together) > ring_module.LOOKBACK and max(together) <= BATCH_KEYS_MAX
    assert tell() == listed(watcher.reader)
    check(store)
    store.release()
