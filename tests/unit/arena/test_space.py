"""Making room: against a reference model that knows every interval, and by what must hold when the workload shifts."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from itertools import accumulate

import pytest

from simm.arena import coldest
from simm.arena.coldest import TRIED_MAX
from simm.arena.space import LAST_RESORT, OWN, REASSIGNED, Space
from simm.constants import DEFAULT_POLICY, NO_SLOT, PAGE_BYTES, POLICY_NAMES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.errors import CorruptionError, UsageError
from simm.slab import CHUNK_SIZES, LARGE_GROUP, Span, class_of
from tests.models.explorer import first_failure
from tests.support.consistency import check
from tests.support.counted_dict import CountedDict
from tests.support.dose import dose
from tests.support.space_owner import Chunk, Owner

MIB = 1 << 20


def _size(rng: random.Random, size: int) -> int:
    kind = rng.randrange(20)
    if kind < 2:
        return rng.choice((2048, 4096, 8192))
    if kind < 14:
        return rng.choice((65_536, 122_880, SLAB_CHUNK_BYTES_MAX, SLAB_CHUNK_BYTES_MAX))
    if kind < 19:
        return rng.randint(SLAB_CHUNK_BYTES_MAX, MIB)
    return rng.randint(MIB, size + 2 * PAGE_BYTES)


def _play(rng: random.Random, owner: Owner, steps: int, held: float, granted: float) -> int:
    """Random life of a space; returns how many allocations were refused."""
    refused = 0
    for step in range(steps):
        action = rng.random()
        if action < 0.6:
            if not owner.free_slots:
                owner.release(rng.choice(list(owner.slots)))
            offset = owner.grant(_size(rng, owner.size))
            if offset < 0:
                refused += 1
            elif rng.random() >= granted:
                if owner.slots and rng.random() < 0.1:
                    owner.replace(rng.choice(list(owner.slots)), offset)
                else:
                    owner.publish(offset)
        elif action < 0.7 and owner.slots:
            owner.visited[rng.choice(list(owner.slots))] = 1
        elif action < 0.75 and owner.slots:
            owner.release(rng.choice(list(owner.slots)))
        elif action < 0.85 and owner.chunks and rng.random() < held:
            owner.hold(rng.choice(list(owner.chunks)))
        elif action < 0.93:
            holds = [o for o, c in owner.chunks.items() if c.holds]
            if holds:
                owner.unhold(rng.choice(holds))
        elif grants := owner.granted():
            offset = rng.choice(grants)
            if rng.random() < 0.5 or not owner.free_slots:
                owner.drop(offset)
            else:
                owner.publish(offset)
        if step % 50 == 0:
            owner.compare()
    owner.compare()
    return refused


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(4), quick=1))
def test_room_is_made_exactly_where_a_reference_model_sees_a_way(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    owner = Owner(rng.choice((8 * MIB, 11 * MIB + 3 * PAGE_BYTES)), 3000, policy)
    refused = _play(rng, owner, 500, held=rng.choice((0.3, 1.0)), granted=rng.choice((0.1, 0.3)))
    assert refused > 0 and sum(owner.space.evictions.values()) > 50
    # Once nobody holds or writes anything, everything is possible again.
    for offset, chunk in list(owner.chunks.items()):
        while chunk.holds:
            owner.unhold(offset)
    for offset in owner.granted():
        owner.drop(offset)
    assert owner.grant(owner.size) == 0
    assert not owner.slots
    owner.compare()


@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_with_nothing_held_no_allocation_fails(seed: int) -> None:
    rng = random.Random(seed)
    owner = Owner(9 * MIB, 4000)
    for step in range(700):
        n = rng.choice((1, 4096, 100_000, 700_000, 3 * MIB, 9 * MIB, rng.randint(1, 9 * MIB)))
        if not owner.free_slots:
            owner.release(rng.choice(list(owner.slots)))
        offset = owner.grant(n)
        assert offset >= 0
        owner.publish(offset)
        if step % 100 == 0:
            owner.compare()
    assert owner.grant(9 * MIB + 1) == -1


class Store:
    """A cache over a Space by key, as small as it can be."""

    def __init__(self, size: int, slots: int, policy: str = DEFAULT_POLICY) -> None:
        self.visited = bytearray(slots)
        self.free = list(range(slots))
        self.where: dict[object, int] = {}
        self.keys: dict[int, object] = {}
        self.space = Space(size, slots, memoryview(self.visited), policy, self.evict)

    def evict(self, slot: int) -> None:
        del self.where[self.keys.pop(slot)]
        self.free.append(slot)
        self.space.release(self.space._offsets[slot])

    def get(self, key: object) -> bool:
        slot = self.where.get(key, -1)
        if slot < 0:
            return False
        self.visited[slot] = 1
        return True

    def put(self, key: object, n: int) -> None:
        offset = self.space.allocate(n)
        assert offset >= 0
        slot = self.free.pop()
        self.where[key], self.keys[slot] = slot, key
        self.space.publish(offset, slot)

    def share(self, n: int) -> float:
        """Part of the region in chunks of a value of ``n`` bytes' class."""
        group = class_of(n)
        allocator = self.space._allocator
        used = allocator._extents.large_bytes if group == LARGE_GROUP else allocator._used[group] * CHUNK_SIZES[group]
        return used / allocator.size


def test_no_class_starves_when_the_demand_shifts() -> None:
    store = Store(32 * MIB, 20_000)
    sizes = [4096, MIB, 100_000, 2000, 5 * MIB, 16_384]
    for phase, n in enumerate(sizes):
        # What was written just before is not yet twice as old as one's own; after a few rounds it is.
        for count in range(5 * 32 * MIB // n):
            store.put((phase, count), n)
        check(store.space)
        assert store.share(n) > 0.75, f"{n} bytes after {sizes[:phase]}"
    assert store.space.evictions[REASSIGNED] > 1000


def test_a_class_that_is_read_keeps_its_room() -> None:
    """Half the region is read all the time; a stream of another class takes only the other half."""
    store = Store(32 * MIB, 20_000)
    hot = [("hot", count) for count in range(16 * MIB // 4096)]
    for key in hot:
        store.put(key, 4096)
    rng = random.Random(3)
    for count in range(3000):
        for key in rng.sample(hot, 60):
            store.get(key)
        store.put(("stream", count), 100_000)
    kept = sum(store.get(key) for key in hot) / len(hot)
    assert kept > 0.8
    check(store.space)


def test_two_classes_of_equal_heat_do_not_pass_slabs_to_and_fro() -> None:
    store = Store(32 * MIB, 20_000)
    rng = random.Random(5)
    weights = list(accumulate(1 / (rank + 1) ** 0.8 for rank in range(4000)))
    sizes = (4096, 16_384)
    settled: dict[str, int] = {}
    for count in range(30_000):
        if count == 10_000:
            settled = dict(store.space.evictions)
        for n in sizes:
            key = (n, rng.choices(range(4000), cum_weights=weights)[0])
            if not store.get(key):
                store.put(key, n)
    moved = store.space.evictions[REASSIGNED] - settled[REASSIGNED]
    own = store.space.evictions[OWN] - settled[OWN]
    assert own > 5000
    assert moved < own / 4
    assert min(map(store.share, sizes)) > 0.1


def test_pins_and_grants_that_fence_all_windows() -> None:
    owner = Owner(8 * MIB, 100)
    offsets = [owner.grant(MIB) for _ in range(8)]
    slots = [owner.publish(offset) for offset in offsets]
    for offset in offsets[1::2]:
        owner.hold(offset)
    assert owner.grant(MIB + 1) == -1  # only single gaps
    assert owner.grant(4096) == -1  # no aligned 2 MiB without a held chunk
    again = owner.grant(MIB)
    assert again in offsets[0::2]
    owner.drop(again)
    owner.unhold(offsets[1])
    assert owner.grant(MIB + 1) >= 0  # a size known as full is tried again
    owner.compare()
    assert all(owner.slots[slot] == offset for slot, offset in zip(slots[3::2], offsets[3::2]))
    owner.drop(owner.granted()[0])
    for offset in offsets[3::2]:
        owner.unhold(offset)
    blocker = owner.grant(4096)
    assert owner.grant(6 * MIB) >= 0
    assert owner.grant(8 * MIB) == -1
    assert blocker in owner.chunks


class _GivesUpEarly(Space):
    """A positive control: a Space without its last resort."""

    def _evict_anywhere(self, group: int, need: int) -> bool:
        return False


def _cold_corner(kind: type[Space]) -> Owner:
    """Large values only; each 2 MiB but the newest has a held one, and the oldest values lead to none but those."""
    owner = Owner(80 * MIB, 9000, kind=kind)
    offsets = [owner.grant(MIB) for _ in range(80)]
    assert len(offsets) > TRIED_MAX
    for offset in offsets:
        owner.publish(offset)
    for offset in offsets[1:78:2]:
        owner.hold(offset)
    return owner


def test_what_no_victim_leads_to_is_found_by_the_last_resort() -> None:
    owner = _cold_corner(Space)
    assert owner.grant(100_000) // SLAB_BYTES * SLAB_BYTES == 78 * MIB
    assert owner.space.evictions == {**dict.fromkeys(owner.space.evictions, 0), LAST_RESORT: 2}
    owner.compare()
    with pytest.raises(AssertionError):
        _cold_corner(_GivesUpEarly).grant(100_000)


def _one_in_many(kind: type[Space]) -> tuple[Owner, int]:
    """One slab, all of it held but one chunk far from the victims' end."""
    owner = Owner(2 * MIB, 1000, kind=kind)
    offsets = [owner.grant(4096) for _ in range(512)]
    for offset in offsets:
        owner.publish(offset)
        if offset != offsets[400]:
            owner.hold(offset)
    return owner, offsets[400]


def test_the_last_resort_finds_an_own_entry_behind_many_held_ones() -> None:
    owner, only = _one_in_many(Space)
    assert owner.grant(4096) == only
    assert owner.space.evictions[LAST_RESORT] == 1
    assert owner.grant(4096) == -1
    owner.compare()
    with pytest.raises(AssertionError):
        _one_in_many(_GivesUpEarly)[0].grant(4096)


class _Counts(Space):
    """Counts the spans that are examined."""

    examined = 0

    def _evictable(self, span: Span) -> bool:
        self.examined += 1
        return super()._evictable(span)


def _all_fenced(slabs: int, spared: int = 0) -> tuple[_Counts, Owner]:
    """A full space of 128 KiB chunks with a held one in each slab, but for the first ones."""
    owner = Owner(slabs * SLAB_BYTES, 16 * slabs + 200, kind=_Counts)
    space = owner.space
    assert isinstance(space, _Counts)
    for _ in range(16 * slabs):
        offset = space.allocate(SLAB_CHUNK_BYTES_MAX)
        owner.chunks[offset] = Chunk(SLAB_CHUNK_BYTES_MAX)
        owner.publish(offset)
    for base in range(spared * SLAB_BYTES, owner.size, SLAB_BYTES):
        owner.hold(base + 5 * SLAB_CHUNK_BYTES_MAX)
    return space, owner


def _refused(slabs: int, need: int) -> int:
    """The spans that 100 grants in vain examine, each after a publish and a pin that ends."""
    space, owner = _all_fenced(slabs)
    assert space.allocate(need) == -1
    space.examined = 0
    for at in range(100):
        again = owner.space.allocate(SLAB_CHUNK_BYTES_MAX)
        owner.chunks[again] = Chunk(SLAB_CHUNK_BYTES_MAX)
        owner.publish(again)
        owner.hold(again)
        owner.unhold(again)
        assert space.allocate(need) == -1, at
    return space.examined


@pytest.mark.parametrize("need", [4096, 300_000, 5 * MIB])
def test_a_refused_grant_costs_the_same_in_a_region_of_any_size(need: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 32 * (coldest.SPAN_CHUNKS + 16))
    small, large = _refused(64, need), _refused(512, need)
    assert large < 1.5 * small + 100, "as many as a search may examine"
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 1 << 30)
    assert _refused(512, need) > 4 * large, "the control: searches of all of it"


@pytest.mark.parametrize("need", [4096, MIB, 5 * MIB])
def test_what_a_search_does_not_reach_the_next_ones_find(need: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with something published in between, after which the place where the last one ended is remembered."""
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 8 * (coldest.SPAN_CHUNKS + 16))
    monkeypatch.setattr(Space, "_evict_coldest", lambda *_: False)
    monkeypatch.setattr(Space, "_evict_around_any", lambda *_: False)
    space, owner = _all_fenced(64)
    assert [space.allocate(need) for _ in range(20)] == [-1] * 20
    assert space._known_full[need] >= owner.size
    before = space.examined
    assert space.allocate(need) == -1 and space.examined == before, "nothing has changed"
    for base in range(40 * SLAB_BYTES, 43 * SLAB_BYTES, SLAB_BYTES):
        owner.unhold(base + 5 * SLAB_CHUNK_BYTES_MAX)
    tried = 0
    while (found := space.allocate(need)) < 0:
        tried += 1
        space._known_full.clear()  # as a publish does
        assert tried < 20
    assert tried and 40 * SLAB_BYTES <= found < 43 * SLAB_BYTES


def _mixed(classes: int, gap: range = range(0)) -> tuple[_Counts, Owner]:
    """256 slabs of so many classes, put in random order, none of it fresh. Each sixth one has a held chunk."""
    slabs = 256
    owner = Owner(slabs * SLAB_BYTES, 32 * slabs, kind=_Counts)
    space = owner.space
    assert isinstance(space, _Counts)
    chunks: list[tuple[int, int]] = []
    for slab in range(slabs):
        size = CHUNK_SIZES[-1 - slab % classes]
        chunks += [(offset, size) for offset in space.allocate_many(size, SLAB_BYTES // size)]
    random.Random(3).shuffle(chunks)
    for offset, size in chunks:
        owner.chunks[offset] = Chunk(size)
        space._policy.spare_no_more(owner.publish(offset))
    for slab in range(0, slabs, 6):
        if slab not in gap:
            owner.hold(slab * SLAB_BYTES)
    return space, owner


def test_a_large_value_costs_the_same_with_any_number_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All windows are fenced in, and each class has 64 victims around which one might be."""
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 32 * (coldest.SPAN_CHUNKS + 16))
    for classes in (1, 4, 16):
        space, _ = _mixed(classes)
        for _ in range(10):
            before = space.examined
            assert space.allocate(16 * MIB) == -1
            # Around the anchors, then one part of the region, what is begun is ended; and twice the coldest slabs.
            assert space.examined - before <= 2 * (32 + 16 + coldest.LOOKS_MAX), classes


def _asks(space: Space, need: int, most: int) -> int:
    """How often a value is refused before it finds room."""
    return next((ask for ask in range(most) if space.allocate(need) >= 0), most)


def test_a_search_around_victims_goes_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 32 * (coldest.SPAN_CHUNKS + 16))
    monkeypatch.setattr(Space, "_evict_anywhere", lambda *_: False)
    gap = range(120, 130)
    assert 0 < _asks(_mixed(2, gap)[0], 16 * MIB, 30) < 20
    monkeypatch.setattr(coldest.Windows, "search", lambda *_, **__: (None, 0))
    assert 0 < _asks(_mixed(2, gap)[0], 16 * MIB, 30) < 20
    monkeypatch.setattr(coldest.Fenced, "note", lambda *_: None)
    assert _asks(_mixed(2, gap)[0], 16 * MIB, 30) == 30, "the control: the same anchors each time"


def _large_kept(owner: Owner, puts: int) -> int:
    """Put values of 16 MiB one after the other; return how many of them are still there at the end."""
    put = [owner.publish(owner.grant(16 * MIB)) for _ in range(puts)]
    assert len(set(put)) == puts
    return sum(slot in owner.slots for slot in put)


def test_large_values_do_not_evict_each_other_where_what_is_fresh_fences_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search that spares what is fresh is in vain, and may examine no more. All other entries are older."""
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 32 * (coldest.SPAN_CHUNKS + 16))
    space, owner = _mixed(4, range(256))
    for base in range(0, owner.size, 6 * SLAB_BYTES):
        space._policy._put_in[owner.chunks[base].slot] = space._policy._now
    assert _large_kept(owner, 12) == 12


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_large_values_do_not_evict_each_other_where_pins_fence_much(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows lead to none from most anchors, but there is room for some values that nothing fences."""
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 64 * (coldest.SPAN_CHUNKS + 16))
    _, owner = _mixed(classes, range(40, 100))
    assert _large_kept(owner, 5) == 5


def test_what_was_fenced_in_is_looked_at_again_when_the_clock_has_moved() -> None:
    fenced = coldest.Fenced(100)
    fenced.forget_at(1000)
    fenced.note(64, 128, 5000)
    fenced.note(256, 512, 0)
    assert fenced.has(64, 5000) and fenced.has(127, 9000) and fenced.has(300, 1)
    assert not (fenced.has(63, 9000) or fenced.has(128, 9000) or fenced.has(64, 4999) or fenced.has(512, 1))
    fenced.forget_at(1100)
    assert fenced.has(64, 5000)
    fenced.least = 3
    fenced.forget_at(1101)
    assert not fenced.has(64, 5000) and fenced.least == coldest.NEVER
    fenced.note(64, 128, 5000)
    fenced.keep_for(700)
    fenced.keep_for(50)
    fenced.forget_at(1801)
    assert fenced.has(64, 5000)
    fenced.forget_at(1802)
    fenced.note(64, 128, 5000)
    fenced.forget_at(1903)
    assert not fenced.has(64, 5000), "once for each search that ended early"


@pytest.mark.parametrize("sizes", [(4096, SLAB_CHUNK_BYTES_MAX), (SLAB_CHUNK_BYTES_MAX, 4096)])
@pytest.mark.parametrize("need", [MIB, 5 * MIB])
def test_of_what_is_equally_cold_the_fewest_entries_go(sizes: tuple[int, int], need: int) -> None:
    owner = Owner(32 * MIB, 9000)
    for size in sizes:
        for offset in owner.space.allocate_many(size, 16 * MIB // size):
            owner.chunks[offset] = Chunk(size)
            owner.publish(offset)
    for slot in owner.slots:
        owner.space._policy.spare_no_more(slot)
        owner.space._policy._stamp[slot] = 1
    assert owner.grant(need) >= 0
    assert len(owner.evicted) == 16 * -(-need // SLAB_BYTES)
    owner.compare()


@pytest.mark.parametrize("need", [MIB, 5 * MIB])
def test_what_is_a_little_colder_goes_whatever_the_entries_are(need: int) -> None:
    """Few entries are no reason to evict what is younger: else large values would go for each other, not small ones."""
    owner = Owner(32 * MIB, 9000)
    policy = owner.space._policy
    for size in (4096, SLAB_CHUNK_BYTES_MAX):
        for offset in owner.space.allocate_many(size, 16 * MIB // size):
            owner.chunks[offset] = Chunk(size)
            policy.spare_no_more(owner.publish(offset))
    for slot, offset in owner.slots.items():
        policy._stamp[slot] = 1 if owner.chunks[offset].size == 4096 else 1 + policy.clock // 100
    assert owner.grant(need) >= 0
    assert len(owner.evicted) == 512 * -(-need // SLAB_BYTES)
    owner.compare()


def test_free_room_counts_also_where_all_is_examined_that_one_call_may(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(32 * MIB, 400)
    policy = owner.space._policy
    free = owner.grant(4 * MIB)
    for offset in [owner.grant(SLAB_CHUNK_BYTES_MAX) for _ in range(224)]:
        slot = owner.publish(offset)
        policy.spare_no_more(slot)
        policy._stamp[slot] = 1 + (offset < 28 * MIB)  # the coldest slabs are elsewhere
    owner.drop(free)
    assert free < 20 * MIB
    monkeypatch.setattr(coldest, "SEARCH_CHUNKS_MAX", 1)
    assert owner.grant(5 * MIB) >= 0
    assert len(owner.evicted) == 16, "the rest is free"
    owner.compare()


def _full_of_small_ones(slabs: int) -> Store:
    """Every slab full of 128 KiB values, none of them fresh."""
    store = Store(slabs * SLAB_BYTES, 16 * slabs)
    for key in range(16 * slabs):
        store.put(key, SLAB_CHUNK_BYTES_MAX)
        store.space._policy.spare_no_more(store.where[key])
    return store


def _empty(store: Store, slabs: Iterable[int]) -> None:
    keys = {store.space.offset(slot): slot for slot in store.where.values()}
    for base in [slab * SLAB_BYTES for slab in slabs]:
        for offset in range(base, base + SLAB_BYTES, SLAB_CHUNK_BYTES_MAX):
            store.evict(keys[offset])


def test_issue_empty_slabs_beside_each_other_are_where_a_window_begins() -> None:
    """Those were emptied last. The first ones alone were freed, and eight slabs full of entries went."""
    store = _full_of_small_ones(440)
    _empty(store, [*range(0, 400, 4), *range(420, 427)])
    left = len(store.where)
    store.put("large", 16 * MIB)
    assert left + 1 - len(store.where) == 16, "one slab beside the seven"
    check(store.space)


def test_issue_a_grant_of_large_values_looks_at_each_empty_slab_once() -> None:
    """Each of its values looked at all of them in vain."""
    store = _full_of_small_ones(1000)
    _empty(store, range(0, 1000, 2))
    allocator = store.space._allocator
    allocator._empty = looks = CountedDict(allocator._empty)
    assert len(store.space.allocate_many(4 * MIB, 20)) == 20
    assert looks.count < 2 * 500
    check(store.space)


def test_an_entry_overwritten_while_held_leaves_a_detached_chunk() -> None:
    owner = Owner(4 * MIB, 10)
    old = owner.grant(4096)
    slot = owner.publish(old)
    owner.hold(old)
    owner.hold(old)
    owner.replace(slot, owner.grant(MIB))
    assert owner.space._allocator.owner(old) == NO_SLOT
    for wrong in (owner.space.release, owner.space.drop):
        with pytest.raises(CorruptionError):
            wrong(old)
    with pytest.raises(CorruptionError):
        owner.space.publish(old, 5)
    owner.unhold(old)
    owner.compare()
    assert owner.space._allocator.chunk_bytes(old) == 4096
    owner.unhold(old)
    with pytest.raises(CorruptionError):
        owner.space._allocator.chunk_bytes(old)
    owner.compare()


def test_what_contradicts_is_refused_and_changes_nothing() -> None:
    owner = Owner(8 * MIB, 10)
    space = owner.space
    first, second, grant = owner.grant(4096), owner.grant(MIB), owner.grant(4096)
    slot, other = owner.publish(first), owner.publish(second)
    for call in (
        lambda: space.publish(first, 5),  # owned
        lambda: space.publish(grant, slot),  # the slot has a chunk
        lambda: space.publish(grant, 10),
        lambda: space.publish(grant, -1),
        lambda: space.publish(64, 5),
        lambda: space.replace(first, second, slot),
        lambda: space.replace(first, first, slot),
        lambda: space.replace(second, grant, slot),
        lambda: space.replace(-1, grant, 5),
        lambda: space.replace(first, 64, slot),
        lambda: space.drop(first),
        lambda: space.drop(grant + 4096),
        lambda: space.release(grant + 64),
        lambda: space.release(4 * MIB),
        lambda: space.hold(grant + 64),
        lambda: space.unhold(grant),
    ):
        with pytest.raises(CorruptionError):
            call()
        owner.compare()
    owner = space._allocator.owner
    assert (owner(first), owner(second), owner(grant)) == (slot, other, NO_SLOT)
    with pytest.raises(UsageError):
        space.allocate(0)


def test_an_owner_that_does_not_release_is_found_out() -> None:
    space = Space(2 * MIB, 600, memoryview(bytearray(600)), DEFAULT_POLICY, lambda slot: None)
    for slot in range(512):
        space.publish(space.allocate(4096), slot)
    with pytest.raises(CorruptionError, match="not released"):
        space.allocate(4096)


@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_recovery_restores_the_space(seed: int) -> None:
    rng = random.Random(seed)
    before = Owner(12 * MIB, 2000)
    _play(rng, before, 250, held=0.5, granted=0.2)
    after = Owner(12 * MIB, 2000)
    order = list(before.chunks.items())
    rng.shuffle(order)
    for offset, chunk in order:
        after.space.reserve(offset, chunk.size)
        after.chunks[offset] = model = Chunk(chunk.size)
        if chunk.slot != NO_SLOT:
            after.space.publish(offset, chunk.slot)
            after.free_slots.remove(chunk.slot)
            after.slots[chunk.slot] = offset
            model.slot = chunk.slot
        if chunk.holds:
            after.hold(offset)
    after.compare()
    assert after.space.free_bytes == before.space.free_bytes
    _play(rng, after, 150, held=0.5, granted=0.2)


class _IgnoresHolds(Space):
    """A positive control: a Space that forgets to ask for holds."""

    def _is_held(self, slot: int) -> bool:
        return False


class _FreesHeld(Space):
    def release(self, offset: int) -> None:
        holds, self._holds = self._holds, {}
        super().release(offset)
        self._holds = holds


class _TakesGranted(Space):
    def _evictable(self, span) -> bool:  # type: ignore[no-untyped-def]
        return True


@pytest.mark.parametrize("kind", [_IgnoresHolds, _FreesHeld, _TakesGranted])
def test_the_model_sees_each_kind_of_bug(kind: type[Space]) -> None:
    def play(seed: int) -> None:
        _play(random.Random(seed), Owner(8 * MIB, 3000, kind=kind), 300, held=1.0, granted=0.3)

    first_failure(range(20), play, AssertionError, CorruptionError, KeyError)


def _forget_hold(space: Space) -> None:
    space._allocator.free(next(iter(space._holds)))


def _forget_offset(space: Space) -> None:
    space._offsets[0] = -1


def _forget_queue(space: Space) -> None:
    space._policy.remove(0)


def _wrong_group(space: Space) -> None:
    space._policy.remove(0)
    space._policy.insert(0, 3)


def _free_detached(space: Space) -> None:
    space._detached.add(space.allocate(4096))


def _owned_detached(space: Space) -> None:
    space._detached.add(space._offsets[0])
    space.hold(space._offsets[0])


@pytest.mark.parametrize(
    "damage", [_forget_hold, _forget_offset, _forget_queue, _wrong_group, _free_detached, _owned_detached]
)
def test_check_sees_each_kind_of_damage(damage) -> None:  # type: ignore[no-untyped-def]
    space = Space(4 * MIB, 10, memoryview(bytearray(10)), DEFAULT_POLICY, lambda slot: None)
    for slot in range(3):
        space.publish(space.allocate(4096), slot)
    space.hold(space.allocate(MIB))
    check(space)
    damage(space)
    with pytest.raises(CorruptionError):
        check(space)


def test_a_slot_costs_less_than_fifty_bytes() -> None:
    slots = 32_768
    visited = memoryview(bytearray(slots))
    tracemalloc.start()
    try:
        space = Space(slots * 4096, slots, visited, DEFAULT_POLICY, lambda slot: None)
        for slot in range(slots):
            space.publish(space.allocate(4096), slot)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 36 * slots
