"""Kept entries against a naive model: what may be evicted, what is counted, and when it ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import ceil

import pytest

from simm.arena.marks import kept as kept_module
from simm.arena.marks.kept import HARD, SOFT, KeptEntries, pack, unpack
from simm.arena.space import Space
from simm.constants import KEEP_S_MAX, NO_SLOT, PAGE_BYTES, POLICY_NAMES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX, WAYS
from simm.errors import CorruptionError
from simm.slab import chunk_bytes_for
from tests.support.consistency import check
from tests.support.dose import dose
from tests.support.space_owner import Chunk, Owner

MIB = 1 << 20


class Keeper(Owner):
    """The model with kept entries: (class, time, namespace) by slot."""

    def __init__(self, size: int, slots: int, policy: str = "lru", kind: type[Space] = Space) -> None:
        super().__init__(size, slots, policy, kind)
        self.free_slots.sort(key=lambda slot: slot % WAYS)  # from set to set, as digests are
        self.kept: dict[int, tuple[int, int, int]] = {}
        self.now = 0
        self.soft_evicted = 0

    def on_evict(self, slot: int) -> None:
        how = self.kept.get(slot, (0, 0, 0))[0]
        assert how != HARD, "a hard kept entry was evicted"
        self.soft_evicted += how == SOFT
        super().on_evict(slot)

    def release(self, slot: int) -> None:
        super().release(slot)
        self.kept.pop(slot, None)

    def possible(self, n: int) -> bool:
        """A hard kept entry is as fixed as one that is held."""
        hard = [self.chunks[self.slots[slot]] for slot, (how, _, _) in self.kept.items() if how == HARD]
        for chunk in hard:
            chunk.holds += 1
        try:
            return super().possible(n)
        finally:
            for chunk in hard:
                chunk.holds -= 1

    def hard_bytes(self, but: int, namespace: int | None = None) -> int:
        return sum(
            self.chunks[self.slots[slot]].size for slot, (how, _, owner) in self.kept.items()
            if how == HARD and slot != but and namespace in (None, owner)
        )  # fmt: skip

    def pieces(self, but: int, namespace: int | None = None) -> set[int]:
        """The numbers of the 2 MiB that hard kept chunks touch."""
        return {
            at // SLAB_BYTES
            for slot, (how, _, owner) in self.kept.items()
            if how == HARD and slot != but and namespace in (None, owner)
            for at in self.pages(self.slots[slot])
        }

    def pages(self, offset: int) -> range:
        return range(offset, offset + self.chunks[offset].size, PAGE_BYTES)

    def fits(self, slot: int, namespace: int, offset: int) -> bool:
        """Whether a chunk is in no more pieces than may be fenced: their bytes, rounded up, and one."""
        new = {at // SLAB_BYTES for at in self.pages(offset)}
        for before, share in ((self.pieces(slot), 0.5), (self.pieces(slot, namespace), 0.375)):
            if new - before and len(before | new) > ceil(self.size * share / SLAB_BYTES) + 1:
                return False
        return True

    def has_slots(self, slot: int, namespace: int) -> bool:
        """Whether an entry may be hard kept in its slot: half of all may be so, a quarter for one namespace."""
        hard = {each: owner for each, (how, _, owner) in self.kept.items() if how == HARD and each != slot}
        slots = len(self.visited)
        mine = sum(owner == namespace for owner in hard.values())
        mates = sum(each // WAYS == slot // WAYS for each in hard)
        return len(hard) < slots // 2 and mine < slots // 4 and mates < WAYS - 2

    def admits(self, slot: int, namespace: int, offset: int) -> bool:
        size = self.chunks[offset].size
        whole, own = self.hard_bytes(slot) + size, self.hard_bytes(slot, namespace) + size
        return whole <= self.size // 2 and own <= self.size // 4 and self.fits(slot, namespace, offset)

    def space_for(self, value: int) -> int:
        """Do `grant` without the model's look at every interval."""
        offset = self.space.allocate(value)
        assert offset >= 0
        self.chunks[offset] = Chunk(chunk_bytes_for(value))
        return offset

    def keep(self, slot: int, how: int, until: int, namespace: int) -> None:
        right = how == SOFT or (self.has_slots(slot, namespace) and self.admits(slot, namespace, self.slots[slot]))
        assert self.space.kept.keep(slot, how, until, namespace) == right
        if right:
            self.kept[slot] = how, until, namespace

    def replace(self, slot: int, new: int) -> None:
        before = self.chunks[self.slots[slot]].size
        super().replace(slot, new)
        if slot in self.kept:
            how, until, namespace = self.kept[slot]
            may = self.admits if self.chunks[new].size > before else self.fits
            if how == HARD and not may(slot, namespace, new):
                self.kept[slot] = SOFT, until, namespace

    def expire(self) -> None:
        due = self.space.kept.due(self.now, 1 << 30)
        assert sorted(due) == sorted(slot for slot, (_, until, _) in self.kept.items() if until <= self.now)
        for slot in due:
            self.space.kept.end(slot)
            del self.kept[slot]

    def compare(self) -> None:
        super().compare()
        found = {slot: (each.how, each.until, each.namespace) for slot, each in self.space.kept.items()}
        assert found == self.kept


def step(rng: random.Random, owner: Keeper, sizes: tuple[int, ...]) -> bool:
    """Do one random thing. Return False if an allocation was refused."""
    action = rng.random()
    slots = list(owner.slots)
    if action < 0.55 or not slots:
        if not owner.free_slots:
            owner.release(rng.choice(slots))
        offset = owner.grant(rng.choice(sizes))
        if offset < 0:
            return False
        if owner.slots and rng.random() < 0.15:
            owner.replace(rng.choice(list(owner.slots)), offset)
        else:
            owner.publish(offset)
    elif action < 0.8:
        owner.keep(rng.choice(slots), rng.choice((SOFT, HARD, HARD)), owner.now + rng.randint(1, 60), rng.randrange(3))
    elif action < 0.85:
        slot = rng.choice(slots)
        owner.space.kept.end(slot)
        owner.kept.pop(slot, None)
    elif action < 0.9:
        owner.release(rng.choice(slots))
    elif action < 0.95:
        owner.visited[rng.choice(slots)] = 1
    else:
        owner.now += rng.randint(0, 9)
        owner.expire()
    return True


SMALL = (65_536, 122_880, SLAB_CHUNK_BYTES_MAX)
MIXED = (*SMALL, 300_000, MIB, 2 * MIB + 1)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_hard_kept_entries_stay_and_all_else_may_go(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    owner = Keeper(8 * MIB, 400, policy)
    refused = sum(not step(rng, owner, rng.choice((SMALL, MIXED))) for _ in range(500))
    owner.compare()
    assert refused > 0 and owner.soft_evicted > 0
    owner.now += 100
    owner.expire()
    assert not owner.kept
    assert owner.grant(owner.size) == 0  # and all comes back


@pytest.mark.parametrize("broken", ["queues", "fences"])
def test_without_a_part_of_it_hard_kept_entries_go(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: entries that stay in the queue of their class; slabs and large chunks that are not fenced."""
    if broken == "queues":
        monkeypatch.setattr(KeptEntries, "_enqueue", lambda *_: None)
    else:
        monkeypatch.setattr(KeptEntries, "fences", lambda *_: False)
    with pytest.raises(AssertionError, match="a hard kept entry was evicted"):
        for seed in range(10):
            rng, owner = random.Random(seed), Keeper(8 * MIB, 400)
            for _ in range(500):
                step(rng, owner, MIXED)


def filled(size: int, value: int, *, how: int) -> tuple[Keeper, list[int]]:
    """A full space, a fifth of which is kept: of hard ones whole slabs, as they may not lie in all of them."""
    owner = Keeper(size, 3 * size // value)
    slots = [owner.publish(owner.space_for(value)) for _ in range(size // chunk_bytes_for(value))]
    some = random.Random(1).sample(slots, len(slots) // 5) if how == SOFT else slots[: len(slots) // 5]
    for slot in some:
        owner.keep(slot, how, 100, 1)
    return owner, some



@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("how", [SOFT, HARD])
def test_a_fifth_survives_a_scan_of_ten_times_the_region(how: int, policy: str) -> None:
    owner, kept = filled(8 * MIB, 65_536, how=how)
    for _ in range(10 * len(owner.slots)):
        owner.publish(owner.space_for(65_536))
    assert owner.kept.keys() == set(kept) and owner.soft_evicted == 0
    owner.evicted.clear()
    owner.now = 101
    owner.expire()
    for _ in range(2 * owner.size // 65_536):
        owner.publish(owner.space_for(65_536))
    assert set(kept) <= set(owner.evicted), "they are not evicted after their time"
    check(owner.space)


def test_soft_ones_go_when_nothing_else_is_left_and_hard_ones_do_not() -> None:
    owner = Keeper(8 * MIB, 400)
    slots = [owner.publish(owner.space_for(65_536)) for _ in range(8 * MIB // 65_536)]
    for at, slot in enumerate(slots):
        owner.keep(slot, HARD if at < len(slots) // 4 else SOFT, 100, 1)
    for _ in range(len(slots)):
        owner.publish(owner.space_for(65_536))
    assert sum(how == HARD for how, _, _ in owner.kept.values()) == len(slots) // 4
    assert owner.soft_evicted > 0


def test_a_value_that_grows_beyond_the_quota_is_soft_kept() -> None:
    owner = Keeper(8 * MIB, 400)
    told: list[int] = []
    owner.space.kept.softened_one = lambda slot, _: told.append(slot)
    slots = [owner.publish(owner.space_for(65_536)) for _ in range(40)]
    for slot in slots:
        owner.keep(slot, HARD, 100, 1)
    hard = [slot for slot, (how, _, _) in owner.kept.items() if how == HARD]
    assert len(hard) == 2 * MIB // 65_536 < len(slots)
    owner.replace(hard[0], owner.space_for(65_536))
    assert not told
    owner.replace(hard[0], owner.space_for(100_000))
    assert told == hard[:1] and owner.space.kept.softened == 1
    owner.compare()


def scattered(size: int, value: int, namespaces: int = 1) -> tuple[Keeper, list[int]]:
    """A full space; one value in each piece is asked to be hard kept. Return those slots by address."""
    owner = Keeper(size, 2 * size // value)
    slots = [owner.publish(owner.space_for(value)) for _ in range(size // chunk_bytes_for(value))]
    first: dict[int, int] = {}
    for slot in slots:
        first.setdefault(owner.slots[slot] // SLAB_BYTES, slot)
    ordered = [first[piece] for piece in sorted(first)]
    for at, slot in enumerate(ordered):
        owner.keep(slot, HARD, 100, at % namespaces)
    return owner, ordered


@pytest.mark.parametrize("value", [16_384, 300_000])
def test_a_few_values_scattered_over_all_of_it_keep_no_others_out(value: int) -> None:
    """By bytes they are far below what may be kept; but what fences a piece more is refused."""
    owner, first = scattered(64 * MIB, value, namespaces=2)
    assert len(first) == 32 and owner.space.kept.hard_bytes < owner.size // 8
    assert sum(slot in owner.kept for slot in first) <= 17 and owner.space.kept.fenced_bytes <= 34 * MIB
    owner.compare()
    room = {n: sum(owner.publish(owner.grant(n)) >= 0 for _ in range(4)) for n in (4096, 8192, 65_536, 2 * MIB)}
    assert room == dict.fromkeys(room, 4)
    owner.compare()


def test_one_namespace_leaves_pieces_to_the_others() -> None:
    owner, first = scattered(64 * MIB, 65_536)
    assert sum(slot in owner.kept for slot in first) == 13  # three eighths of 32, and one
    refused = [slot for slot in first if slot not in owner.kept]
    for slot in refused[:4]:
        owner.keep(slot, HARD, 100, 1)
    assert all(slot in owner.kept for slot in refused[:4])
    assert not owner.space.kept.keep(refused[4], HARD, 100, 2), "17 in all"
    near = next(slot for slot in owner.slots if slot not in owner.kept and owner.slots[slot] // SLAB_BYTES == 0)
    owner.keep(near, HARD, 100, 0)
    assert near in owner.kept, "its piece is fenced already"
    owner.space.kept.end(first[1])
    del owner.kept[first[1]]
    owner.keep(refused[4], HARD, 100, 0)
    assert refused[4] in owner.kept
    owner.compare()


def test_what_an_overwrite_takes_to_a_further_piece_is_soft_kept() -> None:
    owner, first = scattered(64 * MIB, 65_536)
    hard = [slot for slot in first if slot in owner.kept]
    mate = next(slot for slot in owner.slots if slot not in first and owner.slots[slot] // SLAB_BYTES == 0)
    assert owner.slots[hard[0]] // SLAB_BYTES == 0
    owner.keep(mate, HARD, 100, 0)
    owner.release(first[-1])
    owner.replace(mate, owner.space_for(65_536))
    assert owner.slots[mate] // SLAB_BYTES == 31 and owner.kept[mate][0] == SOFT and owner.space.kept.softened == 1
    owner.release(first[-2])
    owner.replace(hard[1], owner.space_for(65_536))
    assert owner.kept[hard[1]][0] == HARD, "it gives one up for it"
    owner.compare()


def test_pieces_that_are_only_counted_do_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the bound a 128th of the region fences all of it, and nothing else finds room."""
    monkeypatch.setattr(Keeper, "fits", lambda *_: True)
    monkeypatch.setattr(KeptEntries, "_beyond", lambda *_: (0, 0))
    owner, first = scattered(64 * MIB, 16_384)
    assert owner.kept.keys() == set(first) and owner.space.kept.fenced_bytes == owner.size
    assert owner.grant(8192) == owner.grant(2 * MIB) == -1


def test_what_is_beyond_a_share_that_was_cut_stays_until_its_time_and_grows_no_more() -> None:
    owner = Keeper(8 * MIB, 400)
    kept, slots = owner.space.kept, [owner.publish(owner.space_for(65_536)) for _ in range(60)]
    for at, slot in enumerate(slots[:50]):
        owner.keep(slot, HARD, 10 + at, at % 2)
    before = kept.hard_bytes
    kept.bound_by((20, 10, 10))
    assert kept.hard_bytes == before > kept.hard_max
    owner.compare()
    check(owner.space)
    for slot in slots:  # not even those that are kept, for longer
        assert not kept.keep(slot, HARD, 200, 0)
    check(owner.space)
    while owner.kept:
        owner.now += 7
        owner.expire()
        owner.compare()
        check(owner.space)
    assert kept.keep(slots[0], HARD, 200, 0)
    kept.bound_by((50, 25, 10))
    check(owner.space)


@pytest.mark.parametrize("looked", [False, True])
def test_what_grows_beyond_a_share_that_was_cut_is_seen(monkeypatch: pytest.MonkeyPatch, looked: bool) -> None:
    """The control: of more than was kept at the cut, and of more than was kept at the last look since."""
    owner = Keeper(8 * MIB, 400)
    kept, slots = owner.space.kept, [owner.publish(owner.space_for(65_536)) for _ in range(60)]
    for at, slot in enumerate(slots[:50]):
        owner.keep(slot, HARD, 100, at % 2)
    kept.bound_by((20, 10, 10))
    if looked:
        kept.end(slots[0])
        check(owner.space)
    monkeypatch.setattr(KeptEntries, "_admits", lambda *_: True)
    assert kept.keep(slots[50], HARD, 100, 0)
    with pytest.raises(CorruptionError, match="bytes are hard kept, of a share of"):
        check(owner.space)


def test_a_put_that_finds_only_hard_kept_victims_fails() -> None:
    owner = Keeper(8 * MIB, 400)
    slots = [owner.publish(owner.space_for(SLAB_CHUNK_BYTES_MAX)) for _ in range(8 * MIB // SLAB_CHUNK_BYTES_MAX)]
    for at, slot in enumerate(slots[: len(slots) // 2]):
        owner.keep(slot, HARD, 100, at % 2)
    for slot in slots[len(slots) // 2 :]:
        owner.hold(owner.slots[slot])
    assert owner.grant(4096) == -1 and owner.grant(SLAB_CHUNK_BYTES_MAX) == -1
    owner.space.kept.end(slots[0])
    owner.kept.pop(slots[0])
    assert owner.grant(SLAB_CHUNK_BYTES_MAX) >= 0


def test_no_time_that_has_changed_is_left_behind() -> None:
    owner = Keeper(8 * MIB, 400)
    kept, slot = owner.space.kept, owner.publish(owner.space_for(65_536))
    for until in range(1, 5000):
        owner.keep(slot, SOFT, until, 1)
    assert len(kept._due) == 1 and kept.due(4998, 1000) == [] and not kept.is_due(4998)
    assert kept.is_due(4999) and kept.due(4999, 10) == [slot]
    owner.keep(slot, SOFT, 70, 1)  # before what was looked at
    assert kept.due(4999, 1000) == [slot]
    owner.keep(slot, SOFT, 10_000_000, 1)
    assert kept.due(9_999_999, 1000) == [] and not kept.is_due(9_999_999)
    kept.end(slot)
    assert not kept._due and not kept.is_due(1 << 30)


def test_one_look_at_the_times_is_bounded() -> None:
    """Whatever lies behind: entries that are due, and seconds without any."""
    owner = Keeper(8 * MIB, 400)
    kept, slots = owner.space.kept, [owner.publish(owner.space_for(65_536)) for _ in range(20)]
    for number, slot in enumerate(slots):
        owner.keep(slot, SOFT, 10 if number < 12 else 50_000, 1)
    found = []
    for most in (5, 5, 5):
        some = kept.due(60_000, most)
        assert len(some) <= most and kept.is_due(60_000)
        found += some
        for slot in some:
            kept.end(slot)
    assert sorted(found) == sorted(slots[:12])
    assert kept._due_from <= 10 + kept_module.SECONDS_EACH * 5
    looks = 0
    while kept.is_due(60_000):
        looks += 1
        for slot in kept.due(60_000, 100):
            kept.end(slot)
    assert looks > 1 and not kept.entries


class Second(dict[int, None]):
    """The entries of one second. A search from the first one on passes all that went: it is quadratic."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it is searched from the first one on")


def test_many_entries_of_one_second_are_not_searched_from_the_first_on() -> None:
    owner = Keeper(8 * MIB, 400)
    kept, slots = owner.space.kept, [owner.publish(owner.space_for(65_536)) for _ in range(20)]
    for slot in slots:
        owner.keep(slot, SOFT, 10, 1)
    kept._due[10] = Second(kept._due[10].items())
    found = []
    while kept.is_due(10):
        some = kept.due(10, 3)
        assert len(some) <= 3
        found += some
        for slot in some:
            kept.end(slot)
    assert sorted(found) == sorted(slots) and not kept._due


def small(slots: int, count: int) -> tuple[Keeper, list[int]]:
    """A table of few slots, and so many small values in it."""
    owner = Keeper(8 * MIB, slots)
    return owner, [owner.publish(owner.space_for(64)) for _ in range(count)]


def test_small_values_are_bounded_by_slots() -> None:
    """By bytes, values of 64 bytes could be hard kept in all slots of a table."""
    owner, slots = small(400, 400)
    for at, slot in enumerate(slots):
        owner.keep(slot, HARD, 100, at % 2 * at % 3)
    by_space = [sum(owner_of == each for _, _, owner_of in owner.kept.values()) for each in range(3)]
    assert max(by_space) == 100 and len(owner.kept) == owner.space.kept.hard_slots == 200
    owner.compare()
    check(owner.space)
    owner.keep(next(iter(owner.kept)), HARD, 200, next(iter(owner.kept.values()))[2])  # again: its slot counts once
    assert owner.space.kept.hard_slots == 200


def test_no_set_is_hard_kept_as_a_whole() -> None:
    """Else a key whose two sets were full of such entries could not be stored before their time."""
    owner, slots = small(400, 400)
    mates = [slot for slot in slots if slot // WAYS == 3]
    for slot in mates:
        owner.keep(slot, HARD, 100, 0)
    assert len(owner.kept) == WAYS - 2
    owner.space.kept.end(mates[0])
    del owner.kept[mates[0]]
    owner.keep(mates[-1], HARD, 100, 0)
    assert mates[-1] in owner.kept
    check(owner.space)


def test_words() -> None:
    for how in (SOFT, HARD):
        assert unpack(pack(how, 12_345)) == (how, 12_345) and pack(how, 1 << 40) < 1 << 32
    assert unpack(7 << 32) == (0, 0), "that is a group"
    assert KEEP_S_MAX < kept_module.UNTIL_MASK and NO_SLOT
