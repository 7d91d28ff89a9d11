"""What goes is old: a prompt that was just put stays while older entries of other sizes are there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from simm.arena.coldest import LOSS, SAMPLES, YOUNG, Coldest, coarse, typical
from simm.arena.space import OWN, REASSIGNED, Space
from simm.constants import DEFAULT_POLICY, POLICY_NAMES, SLAB_BYTES, SLAB_CHUNK_BYTES_MAX
from simm.errors import CorruptionError
from simm.slab import chunk_bytes_for
from tests.support.consistency import check

MIB = 1 << 20


class Cache:
    """A cache over a Space by key. Keeps the order of storing, and what was evicted, with its age in insertions."""

    def __init__(self, size: int, slots: int, policy: str, kind: type[Space] = Space) -> None:
        self.visited = bytearray(slots)
        self.free = list(range(slots))
        self.where: dict[object, int] = {}
        self.keys: dict[int, object] = {}
        self.evicted: list[tuple[object, int]] = []
        self.space = kind(size, slots, memoryview(self.visited), policy, self.evict)

    def evict(self, slot: int) -> None:
        self.evicted.append((self.keys[slot], self.space._policy.age(slot)))
        del self.where[self.keys.pop(slot)]
        self.free.append(slot)
        self.space.release(self.space._offsets[slot])

    def put(self, key: object, n: int) -> None:
        offset = self.space.allocate(n)
        assert offset >= 0
        slot = self.free.pop()
        self.where[key], self.keys[slot] = slot, key
        self.space.publish(offset, slot)


PROMPTS = [
    # the old values' size, the prompt's pages' size and how many of them, the size of what comes then
    (4096, 65_536, 300, 131_072),
    (4096, 65_536, 300, 4096),
    (16_384, 4096, 5000, MIB),
    (MIB, 4096, 6000, 16_384),
    (300_000, 65_536, 350, 4096),
    (4096, 300_000, 70, 65_536),
    (65_536, 300_000, 70, 65_536),
    (65_536, 200_000, 100, 500_000),
]


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize(("old", "page", "pages", "then"), PROMPTS)
def test_a_prompt_stays_while_older_entries_of_other_sizes_are_there(
    policy: str, old: int, page: int, pages: int, then: int
) -> None:
    cache = Cache(32 * MIB, 20_000, policy)
    count = 0
    while not cache.evicted:
        cache.put(("old", count), old)
        count += 1
    cache.evicted.clear()
    for number in range(pages):
        cache.put(("page", number), page)
    assert [key for key in range(pages) if ("page", key) not in cache.where] == []
    # The last ones of the old slabs are gone, but the prompt is not the room's only content.
    left = [key for key in cache.where if key[0] == "old"]  # type: ignore[index]
    assert left
    count = 0
    while any(("old", key) in cache.where for _, key in left):  # type: ignore[misc]
        cache.put(("then", count), then)
        count += 1
        assert count < 20_000
        lost = [key for key in range(pages) if ("page", key) not in cache.where]
        still = sum(key in cache.where for key in left)
        assert not lost or still * old <= 2 * MIB, f"{len(lost)} pages lost, {still} of {len(left)} old ones there"
    check(cache.space)


class Judged(Cache):
    """A cache whose every eviction is judged by what a naive look at all entries says.

    An entry that goes to make room for its own size class must not be younger than what any other group could have
    given up: the age of the youngest sixteenth of its coldest slab. For classes of which a sample is looked at, the
    bounds are wider. A slab that was pinned counts once the entry is younger than that; see `simm.arena.coldest`.
    """

    def __init__(self, size: int, policy: str, seed: int, kind: type[Space] = Space) -> None:
        super().__init__(size, 40_000, policy, kind)
        self.rng = random.Random(seed)
        self.chunks: dict[int, int] = {}  # offset -> size of the chunk
        self.held: dict[int, int] = {}
        #: When a chunk of a slab or cell was last unpinned, by its base, if one ever was pinned.
        self.fenced: dict[int, int] = {}
        self.clock = 0
        self.gone: dict[tuple[int, int], list[int]] = {}  # (base, class) -> when what was deleted was last used
        #: (base, class) -> until when what was deleted would have been fresh. Few deletions may be unnoticed.
        self.fresh_gone: dict[tuple[int, int], int] = {}
        self.seen = dict(self.space.evictions)
        self.pending = 0
        self.judged = self.compared = 0
        self.worst = 0.0

    def evict(self, slot: int) -> None:
        reasons = [reason for reason, count in self.space.evictions.items() if count != self.seen[reason]]
        self.seen = dict(self.space.evictions)
        offset = self.space._offsets[slot]
        sparing = self.space._policy.sparing  # else all that is older is fenced in by what is fresh
        if sparing and reasons == [OWN] and chunk_bytes_for(self.pending) <= min(self.chunks[offset], SLAB_BYTES):
            self.judge(slot, self.chunks[offset])
        del self.chunks[offset]
        super().evict(slot)

    def judge(self, slot: int, size: int) -> None:
        age = self.space._policy.age(slot)
        self.judged += 1
        for offered in self.offers(size, age):
            self.compared += 1
            self.worst = max(self.worst, offered / (1 + age))
            # A sixteenth: what the bound is coarse by. One: an age of whole insertions.
            assert age + 1 >= offered * 15 / 16, f"an entry of {size} bytes went at age {age}, a slab was {offered}"

    def offers(self, size: int, age: int) -> Iterator[float]:
        """The ages of what other groups could give up, naively, instead of a victim of this age."""
        cells: dict[int, list[tuple[int, int]]] = {}  # by aligned 2 MiB: what lies there
        for offset, chunk in self.chunks.items():
            for base in range(offset - offset % SLAB_BYTES, offset + chunk, SLAB_BYTES):
                cells.setdefault(base, []).append((offset, chunk))
        large: list[tuple[int, float]] = []  # (age of the oldest entry, what the cell could give)
        for base, entries in cells.items():
            chunk = entries[0][1]
            if any(offset in self.held for offset, _ in entries) or chunk == size:
                continue
            owners = np.array([self.space._allocator.owner(offset) for offset, _ in entries])
            policy = self.space._policy
            # Windows that something fresh fences in are looked at again when they are a sixteenth older.
            until = max(policy.fresh_until(owners), self.fresh_gone.get((base, chunk), 0))
            if policy.clock < until + 4 * policy.period:
                continue
            ages = sorted(self.space._policy.age(self.space._allocator.owner(offset)) for offset, _ in entries)
            if chunk > SLAB_CHUNK_BYTES_MAX:
                if size <= SLAB_CHUNK_BYTES_MAX:
                    large.append((ages[-1], ages[0] / 2 if base in self.fenced else ages[0]))
                continue
            sampled = SLAB_BYTES // chunk >= 2 * SAMPLES
            offered = ages[len(ages) // (8 * YOUNG if sampled else YOUNG)]
            if gone := self.gone.get((base, chunk)):
                ages = sorted([*ages, *(self.clock - used for used in gone)])
                offered = min(offered, ages[len(ages) // YOUNG])
            if base not in self.fenced or age < self.clock - self.fenced[base]:
                yield offered
        # A window around one of the oldest large values: the least of those in reach, as the cheapest is taken.
        if large and not self.fenced:
            oldest = max(age for age, _ in large)
            yield min(offered for _, offered in large) if oldest else 0

    def put(self, key: object, n: int) -> None:
        self.pending = n
        offset = self.space.allocate(n)
        self.pending = 0
        if offset < 0:
            return
        self.chunks[offset] = chunk_bytes_for(n)
        self.clock += 1
        if key in self.where:
            slot = self.where[key]
            old = self.space._offsets[slot]
            self.lose(old)
            self.space.replace(old, offset, slot)
            del self.chunks[old]
            return
        slot = self.free.pop()
        self.where[key], self.keys[slot] = slot, key
        self.space.publish(offset, slot)

    def lose(self, offset: int) -> None:
        """The entry at ``offset`` goes, and nobody evicted it. An eighth of a slab may be unnoticed."""
        size = self.chunks[offset]
        place = (offset - offset % SLAB_BYTES, size)
        until = self.space._policy.fresh_until(np.array([self.space._allocator.owner(offset)]))
        self.fresh_gone[place] = max(until, self.fresh_gone.get(place, 0))
        used = self.gone.setdefault(place, [])
        used.append(self.clock - self.space._policy.age(self.space._allocator.owner(offset)))
        del used[: -(SLAB_BYTES // size // LOSS + 1)]

    def delete(self, key: object) -> None:
        slot = self.where[key]
        offset = self.space._offsets[slot]
        if offset in self.held:
            return
        self.lose(offset)
        del self.where[self.keys.pop(slot)], self.chunks[offset]
        self.free.append(slot)
        self.space.release(offset)

    def pin(self, key: object) -> None:
        offset = self.space._offsets[self.where[key]]
        if offset not in self.held:
            self.held[offset] = 1
            self.fenced[offset - offset % SLAB_BYTES] = self.clock
            self.space.hold(offset)

    def unpin(self) -> None:
        offset = self.rng.choice(list(self.held))
        del self.held[offset]
        self.fenced[offset - offset % SLAB_BYTES] = self.clock
        self.space.unhold(offset)

    def play(self, steps: int, sizes: Sequence[int], *, hits: float, deletes: float, pins: float) -> None:
        """Prompts of one size each, read again, deleted and overwritten now and then."""
        prompts: list[list[object]] = []
        for number in range(steps):
            n = self.rng.choice(sizes)
            keys: list[object] = [(number, page) for page in range(self.rng.randint(1, 60))]
            if prompts and self.rng.random() < 0.1:
                keys = self.rng.choice(prompts)  # overwrites, with another size at times
            for key in keys:
                if not (key in self.where and self.space._offsets[self.where[key]] in self.held):
                    self.put(key, n)
            prompts.append(keys)
            if self.rng.random() < hits:
                for key in prompts[-1 - min(len(prompts) - 1, int(self.rng.expovariate(1 / 30)))]:
                    if key in self.where:
                        self.visited[self.where[key]] = 1
            if self.rng.random() < deletes:
                for key in self.rng.choice(prompts[-100:]):
                    if key in self.where:
                        self.delete(key)
            if self.where and self.rng.random() < pins:
                self.pin(self.rng.choice(list(self.where)))
            if self.held and (self.rng.random() < pins or len(self.held) > 6):
                self.unpin()
        check(self.space)


MIXES = [(65_536, 98_304, 131_072), (65_536, 131_072, 300_000, MIB), (4096, 16_384, 65_536, 200_000, 3 * MIB)]
LIVES = [(0.0, 0.0, 0.0), (0.7, 0.0, 0.0), (0.5, 0.2, 0.0), (0.5, 0.1, 0.3)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "sizes"), [*((DEFAULT_POLICY, mix) for mix in MIXES), ("fifo", MIXES[1]), ("sieve", MIXES[0])]
)
@pytest.mark.parametrize(("hits", "deletes", "pins"), LIVES)
def test_what_goes_is_no_younger_than_what_others_can_give(
    policy: str, sizes: tuple[int, ...], hits: float, deletes: float, pins: float
) -> None:
    cache = Judged(24 * MIB, policy, seed=11)
    cache.play(200, sizes, hits=hits, deletes=deletes, pins=pins)
    assert cache.judged > 40 and cache.space.evictions[REASSIGNED] > 100
    if not pins:  # with so many pins, nearly every slab was fenced of late
        assert cache.compared > 80 and cache.worst > 0.2, cache.worst  # the comparison is a close one at times


class _LooksNowAndThen(Space):
    """A positive control: a Space that looks at other groups only at every 16th eviction of its own."""

    turns = 0

    def _evict_coldest(self, group: int, need: int) -> bool:
        self.turns += 1
        if self.turns % 16 and (own := self._policy.victim(group, self._is_held)) >= 0:
            self._evict_slot(own, OWN)
            return True
        return super()._evict_coldest(group, need)


def test_the_judge_sees_a_space_that_compares_only_now_and_then() -> None:
    with pytest.raises(AssertionError, match="went at age"):
        Judged(24 * MIB, DEFAULT_POLICY, seed=11, kind=_LooksNowAndThen).play(200, MIXES[0], hits=0, deletes=0, pins=0)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_class_that_was_read_once_does_not_keep_its_room_forever(policy: str) -> None:
    """Its visited bytes are found out though nobody stores into it any more."""
    cache = Cache(16 * MIB, 1000, policy)
    for number in range(16 * MIB // 65_536):
        cache.put(("idle", number), 65_536)
    cache.visited[:] = b"\1" * len(cache.visited)
    for number in range(4000):
        cache.put(("stream", number), 98_304)
        if not any(key[0] == "idle" for key in cache.where):  # type: ignore[index]
            break
    else:
        raise AssertionError(f"{sum(key[0] == 'idle' for key in cache.where)} are left")  # type: ignore[index]
    check(cache.space)


def test_a_pin_keeps_its_slab_and_no_other() -> None:
    cache = Cache(16 * MIB, 1000, DEFAULT_POLICY)
    for number in range(16 * MIB // 65_536):
        cache.put(("old", number), 65_536)
    held = [cache.space._offsets[cache.where["old", number]] for number in (3, 40)]
    for offset in held:
        cache.space.hold(offset)
    for number in range(6 * 16):
        cache.put(("page", number), 131_072)
    assert all(("page", number) in cache.where for number in range(6 * 16))
    assert {key for _, key in cache.where if ("old", key) in cache.where} == set(range(64))  # type: ignore[misc]
    for offset in held:
        cache.space.unhold(offset)
    for number in range(300):
        cache.put(("more", number), 131_072)
    assert not any(("old", number) in cache.where for number in range(64))
    check(cache.space)


def test_entries_that_are_deleted_make_their_slab_older() -> None:
    """Half of a slab is new. When that half is deleted, the old half goes before what is younger."""
    cache = Cache(8 * MIB, 1000, DEFAULT_POLICY)
    for number in range(32):
        cache.put(("old", number), 65_536)
    for number in range(3 * 16):
        cache.put(("page", number), 131_072)
    for number in range(16, 32):
        slot = cache.where.pop(("old", number))
        del cache.keys[slot]
        cache.free.append(slot)
        cache.space.release(cache.space._offsets[slot])
    for number in range(16):
        cache.put(("new", number), 65_536)
    cache.put(("page", 48), 131_072)  # the oldest page went: the slab of old ones is new by half
    assert ("page", 0) not in cache.where and ("old", 0) in cache.where
    for number in range(16):
        slot = cache.where.pop(("new", number))
        del cache.keys[slot]
        cache.free.append(slot)
        cache.space.release(cache.space._offsets[slot])
    cache.put(("page", 49), 131_072)
    assert ("page", 1) in cache.where and ("old", 0) not in cache.where
    check(cache.space)


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each slab that is looked at from now on is added, by its base."""
    looks: list[int] = []
    real = Coldest.ages_of

    def counted(self: Coldest, base: int) -> list[int]:
        looks.append(base)
        return real(self, base)

    monkeypatch.setattr(Coldest, "ages_of", counted)
    return looks


def test_a_full_space_is_looked_at_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at every eviction is one of two numbers: slabs are looked at for a small part of them."""
    looks = count_looks(monkeypatch)
    cache = Cache(64 * MIB, 20_000, DEFAULT_POLICY)
    rng = random.Random(2)
    for number in range(30_000):
        cache.put(number, rng.choice((4096, 16_384, 65_536)))
        if number > 1000 and number - 1000 * (number % 3) in cache.where:
            cache.visited[cache.where[number - 1000 * (number % 3)]] = 1
    evictions = sum(cache.space.evictions.values())
    assert evictions > 10_000 and 0 < len(looks) < evictions / 10, (len(looks), evictions)


def test_a_fenced_slab_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that keeps a few grants of another size does not make every eviction look at their slabs."""
    cache = Cache(64 * MIB, 20_000, DEFAULT_POLICY)
    for number in range(64 * MIB // 4096):
        cache.put(("old", number), 4096)
    held = [cache.space._offsets[cache.where["old", number]] for number in range(0, 8 * 512, 512)]
    for offset in held:
        cache.space.hold(offset)
    puts = 0
    while len(cache.where) > len(held) * 512 + (64 * MIB // 65_536 - 32 * len(held)):
        cache.put(("page", puts := puts + 1), 65_536)
    looks = count_looks(monkeypatch)
    for number in range(2000):
        cache.put(("more", number), 65_536)
    assert 0 < len(looks) < 2000 / 10, len(looks)  # they were eight at each put
    for offset in held:
        cache.space.unhold(offset)
    for number in range(2 * 64 * MIB // 65_536):
        cache.put(("last", number), 65_536)
    assert not any(key[0] == "old" for key in cache.where)  # type: ignore[index]
    check(cache.space)


def _recovered(cache: Cache) -> Cache:
    """A new space with the same chunks, as after the worker's death."""
    after = Cache(cache.space._allocator.size, len(cache.visited), DEFAULT_POLICY)
    offsets = {key: cache.space._offsets[slot] for key, slot in cache.where.items()}
    for offset in offsets.values():
        after.space.reserve(offset, cache.space._allocator.chunk_bytes(offset))
    for key in sorted(offsets, key=str):
        slot = after.free.pop()
        after.where[key], after.keys[slot] = slot, key
        after.space.publish(offsets[key], slot)
    return after


def test_after_a_recovery_the_older_still_goes_first() -> None:
    cache = Cache(16 * MIB, 5000, DEFAULT_POLICY)
    for number in range(256):
        cache.put(("a old", number), 65_536)
    cache = _recovered(cache)
    check(cache.space)
    for number in range(7 * 16):
        cache.put(("page", number), 131_072)
    assert all(("page", number) in cache.where for number in range(7 * 16))
    check(cache.space)


def _forget_slab(space: Space) -> None:
    space._coldest._bounds.popitem()


def _disorder(space: Space) -> None:
    max(space._coldest._heaps.values(), key=len).reverse()


def _from_the_future(space: Space) -> None:
    (base, group) = next(space._allocator.slabs())
    space._coldest._set(group, base, 1 << 40)


@pytest.mark.parametrize("damage", [_forget_slab, _disorder, _from_the_future])
def test_check_sees_damage_to_the_order_of_slabs(damage: Callable[[Space], None]) -> None:
    cache = Cache(8 * MIB, 1000, DEFAULT_POLICY)
    for number in range(200):
        cache.put(number, 65_536 if number < 100 else 131_072)
    check(cache.space)
    damage(cache.space)
    with pytest.raises(CorruptionError):
        check(cache.space)


def test_typical_is_the_youngest_sixteenth() -> None:
    assert typical([5]) == 5
    assert typical([*range(16, 0, -1)]) == 2
    assert typical([0] * 4 + [100] * 60) == 100 and typical([0] * 5 + [100] * 59) == 0
    assert coarse(100, 100) == 100 and coarse(0, 160) == 10
