"""A prompt that was just put is whole: what is fresh goes last, in all mixes of sizes, policies, pins and grants."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from simm.arena.eviction import make_policy
from simm.arena.hashing import EpochHasher, Hasher
from simm.arena.layout import Geometry
from simm.arena.queues import CLEARED_MAX, FRESH_AGAIN, FRESH_PERIODS, KeyWords, Policy
from simm.arena.space import Space
from simm.constants import DEFAULT_POLICY, POLICY_NAMES
from simm.slab import chunk_bytes_for
from simm.table import Table
from tests.support.consistency import check
from tests.support.dose import dose

MIB = 1 << 20
REGION = 48 * MIB


class Prompts:
    """A cache into which prompts of one size each are put, and read again. It looks for those that are not whole."""

    def __init__(self, policy: str, seed: int, kind: type[Space] = Space) -> None:
        slots = 1 << 14
        self.rng = random.Random(seed)
        self.visited = bytearray(slots)
        self.free = list(range(slots))
        self.where: dict[tuple[int, int], int] = {}
        self.keys: dict[int, tuple[int, int]] = {}
        self.words = [0] * slots
        self.held: list[int] = []
        self.granted: list[int] = []
        #: Entries that went although they were fresh, as all that was older was fenced in.
        self.crowded = 0
        self.put_bytes = 0
        keys = KeyWords(self.words, 1, 0)
        self.space = kind(REGION, slots, memoryview(self.visited), policy, self.evict, keys)

    def evict(self, slot: int) -> None:
        self.crowded += self.space._policy.is_fresh(slot)
        del self.where[self.keys.pop(slot)]
        self.free.append(slot)
        self.space.release(self.space.offset(slot))

    def put(self, key: tuple[int, int], n: int) -> None:
        offset = self.space.allocate(n)
        assert offset >= 0
        self.put_bytes += chunk_bytes_for(n)
        if (slot := self.where.get(key)) is not None:
            self.space.replace(self.space.offset(slot), offset, slot)
            return
        slot = self.free.pop()
        self.where[key], self.keys[slot] = slot, key
        self.words[slot] = random.Random(str(key)).getrandbits(64)
        self.space.publish(offset, slot)

    def read(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if key in self.where:
                self.visited[self.where[key]] = 1

    def disturb(self) -> None:
        """Pin an entry for a while, and hold a grant for a while."""
        self.held.append(self.space.offset(self.rng.choice(list(self.where.values()))))
        self.space.hold(self.held[-1])
        self.granted.append(self.space.allocate(self.rng.choice((4096, 100_000, MIB))))
        while len(self.held) > 3:
            self.space.unhold(self.held.pop(0))
            self.space.drop(self.granted.pop(0))

    def play(self, steps: int, sizes: Sequence[int], *, disturb: bool) -> tuple[int, int]:
        """Put so many prompts. Return how often a prompt was looked at, and how often it was not whole."""
        prompts: list[tuple[int, list[tuple[int, int]]]] = []
        looks = broken = crowded = 0
        for number in range(steps):
            n = self.rng.choice(sizes)
            pages = max(1, int(REGION * self.rng.uniform(0.01, 0.48)) // chunk_bytes_for(n))
            keys = [(number, page) for page in range(pages)]
            if prompts and self.rng.random() < 0.2:
                keys = self.rng.choice(prompts)[1]  # again, with another size at times
            began = self.put_bytes
            for key in keys:
                self.put(key, n)
            prompts = [each for each in prompts if each[1] is not keys]
            if self.put_bytes - began < REGION // 2:
                prompts.append((began, keys))
            prompts = [(began, keys) for began, keys in prompts if self.put_bytes - began <= REGION // 2]
            for _, keys in prompts:
                whole = all(key in self.where for key in keys)
                looks += 1
                broken += not whole
                assert whole or self.crowded > crowded, "an entry that was just put went, though older ones could"
            prompts = [(began, keys) for began, keys in prompts if all(key in self.where for key in keys)]
            crowded = self.crowded
            if prompts and self.rng.random() < 0.5:
                self.read(self.rng.choice(prompts)[1])
            if self.rng.random() < 0.5:
                self.read(self.rng.sample(list(self.where), len(self.where) // 10))
            if disturb:
                self.disturb()
        check(self.space)
        return looks, broken


MIXES = [
    (65_536, 98_304, 131_072),
    (65_536, 131_072, 300_000, MIB),
    (16_384, 65_536, 200_000, 3 * MIB),
    (512 << 10, MIB),
]


@pytest.mark.parametrize("disturb", [False, True])
@pytest.mark.parametrize("sizes", MIXES, ids=str)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_just_put_is_whole(policy: str, sizes: tuple[int, ...], disturb: bool) -> None:
    """While it and what was put since are less than half of the region, and older entries are not fenced in."""
    looks, broken = Prompts(policy, seed=5).play(50, sizes, disturb=disturb)
    assert looks > 50
    # A pin, a grant or a fresh entry in each slab fences the older ones in: rarely without pins.
    assert broken <= (0.15 if disturb else 0.05) * looks, f"{broken} of {looks}"


class _SparesNothing(Space):
    """A positive control: a Space that knows nothing of what is fresh."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._policy.sparing = False
        self._crowded_until = 1 << 62

    def _evict_for(self, group: int, need: int) -> bool:
        done = super()._evict_for(group, need)
        self._policy.sparing = False
        return done


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_without_the_rule_prompts_lose_pages(policy: str) -> None:
    broken = sum(Prompts(policy, seed, _SparesNothing).play(50, MIXES[1], disturb=False)[1] for seed in range(3))
    assert broken > (2 if policy == "fifo" else 20), "the test above would see it"


def new_policy(name: str, slots: int, period: int) -> tuple[Policy, bytearray]:
    visited = bytearray(slots)
    return make_policy(name, slots, 2, memoryview(visited), period), visited


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", dose(range(3), quick=1))
def test_fresh_is_what_was_put_in_the_last_periods(policy: str, seed: int) -> None:
    """Against a dictionary of clocks, over several rounds of the 255 numbers that a period has."""
    rng = random.Random(seed)
    slots, period = 400, 50
    queue, _ = new_policy(policy, slots, period)
    put: dict[int, int] = {}
    for _ in range(4000):
        action = rng.random()
        outside = [slot for slot in range(slots) if slot not in put] if action < 0.3 else []
        if outside and action < 0.2:
            slot = rng.choice(outside)
            queue.insert(slot, rng.randrange(2), weight := rng.choice((1, 7, 90)))
            put[slot] = queue.clock
        elif outside:
            some = rng.sample(outside, min(len(outside), 5))
            before, weight = queue.clock, rng.choice((1, 3, 20))
            queue.insert_many(some, 1, weight)
            put.update(dict.fromkeys(some, before))  # all of a run count for the period in which it began
            assert queue.clock == before + weight * len(some)
        elif put and action < 0.4:
            queue.replaced(slot := rng.choice(list(put)), rng.choice((1, 9, 100)))
            put[slot] = queue.clock
        elif put and (len(put) > slots // 2 or action < 0.45):
            queue.remove(slot := rng.choice(list(put)))
            del put[slot]
        now = queue.clock // period
        for slot in rng.sample(sorted(put), min(3, len(put))):
            assert queue.is_fresh(slot) == (now - put[slot] // period <= FRESH_PERIODS)
        some = rng.sample(sorted(put), min(20, len(put)))
        until = max(((put[slot] // period + FRESH_PERIODS + 1) * period for slot in some), default=0)
        assert queue.fresh_until(np.array(some, np.int64)) == (until if until > now * period else 0)
    assert now > 600
    check(queue)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_victim_is_fresh_unless_its_owner_says_so(policy: str) -> None:
    queue, _ = new_policy(policy, 100, 10)
    for slot in range(100):
        queue.insert(slot, 0, 10)
    old = set(range(100 - FRESH_PERIODS - 1))
    gone = set()
    while (slot := queue.victim(0, lambda slot: False)) >= 0:
        gone.add(slot)
        queue.remove(slot)
    assert gone == old
    queue.sparing = False
    assert queue.victim(0, lambda slot: False) >= 0


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_fresh_entries_are_passed_over_once_not_for_each_value(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of many fresh entries: each value that needed room searched 512 of them in vain."""
    slots, period = 4000, 8000
    queue, visited = new_policy(policy, slots, period)
    moved: list[int] = []
    to_head = Policy._to_head

    def counted(self: Policy, slot: int, group: int) -> None:
        moved.append(slot)
        to_head(self, slot, group)

    monkeypatch.setattr(Policy, "_to_head", counted)
    for slot in range(2000):
        queue.insert(slot, 0, 1)
        visited[slot] = 1
        queue.look(slot)  # used, so that neither policy takes the order for that of the puts
    moved.clear()
    searches = 50
    for _ in range(searches):
        assert queue.victim(0, lambda slot: False) < 0, "all are fresh"
    assert len(moved) <= CLEARED_MAX + searches * FRESH_AGAIN
    queue.spare_no_more(at := queue._prev[slots + (0 if policy == "lru" else 1)])
    queue._to_head(at, queue._queue[at])  # the last of 2,000
    found = [queue.victim(0, lambda slot: False) for _ in range(2000 // FRESH_AGAIN + 1)]
    assert at in found, "what may go is found all the same, by and by"
    queue.insert(3000, 1, period)  # a quarter of a period is over
    moved.clear()
    queue.remove(at)
    assert queue.victim(0, lambda slot: False) < 0 and len(moved) == CLEARED_MAX


def test_what_was_fresh_before_a_recovery_is_fresh_after_it() -> None:
    queue, _ = new_policy(DEFAULT_POLICY, 100, 10)
    queue.insert_all(np.arange(100), np.zeros(100, np.int64), np.full(100, 10))
    assert [queue.is_fresh(slot) for slot in range(100)] == [slot >= 100 - FRESH_PERIODS - 1 for slot in range(100)]


def test_a_key_that_comes_back_is_known(seed: int = 4) -> None:
    """Against a set, over keys that are evicted and put again: a tag of 12 bits may be wrong now and then."""
    rng = random.Random(seed)
    slots = 500
    words = [0] * slots
    visited = bytearray(slots)
    queue = make_policy("reuse", slots, 1, memoryview(visited), 0, KeyWords(words, 1, 0))
    where: dict[int, int] = {}
    uses: dict[int, int] = {}
    wrong = again = 0
    for _ in range(20_000):
        key = min(rng.randrange(3000), rng.randrange(3000))
        if key in where:
            continue
        if len(where) == slots:
            victim = queue.victim(0, lambda slot: False)
            queue.remove(victim)
            del where[words[victim] * pow(0x9E37_79B9_7F4A_7C15, -1, 1 << 64) % (1 << 64)]
            slot = victim
        else:
            slot = len(where)
        words[slot] = key * 0x9E37_79B9_7F4A_7C15 % (1 << 64)
        where[key] = slot
        if rng.random() < 0.5:
            queue.insert(slot, 0)
        else:
            queue.insert_many([slot], 0)
        again += key in uses
        wrong += queue._queue[slot] != min(uses.get(key, 0), 7)
        uses[key] = uses.get(key, 0) + 1
    assert again > 5000 and wrong < again / 50, (again, wrong)


@pytest.mark.parametrize("many", [False, True])
def test_issue_a_key_of_a_namespace_with_epochs_comes_back_as_any_other(many: bool, seed: int = 6) -> None:
    """Their digests end alike: keys that were put once were taken for ones that were used before."""
    geometry = Geometry.plan(8 * MIB, 4096)
    slots, back = geometry.slots, []
    for hasher in (Hasher("n"), EpochHasher("n", 5), EpochHasher("n", (1 << 20) + 7)):
        rng = random.Random(seed)
        table = Table(mmap.mmap(-1, geometry.data_offset), geometry, 1)
        queue = make_policy("reuse", slots, 1, memoryview(bytearray(slots)), 0, table.key_words())
        known = 0
        for turn in range(3):
            for slot in range(slots):
                again = turn == 2 and rng.random() < 0.25  # those of the first turn
                table._slots[64 * slot + 8 : 64 * slot + 24] = hasher(f"{0 if again else turn} {slot}")
            queue.insert_many(list(range(slots)), 0) if many else [queue.insert(slot, 0) for slot in range(slots)]
            known += sum(queue._queue[slot] > 0 for slot in range(slots))
            for slot in range(slots):
                queue.remove(slot)
        back.append(known)
    assert back[0] == back[1] == back[2] and 0.2 * slots < back[0] < 0.3 * slots


def _forget(policy: Policy) -> None:
    policy.is_fresh = lambda slot: False  # type: ignore[method-assign]


def _remember_for_ever(policy: Policy) -> None:
    policy._begin_period = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("damage", [_forget, _remember_for_ever])
def test_the_model_sees_freshness_that_is_wrong(
    damage: Callable[[Policy], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = make_policy

    def damaged(*arguments: object) -> Policy:
        policy = real(*arguments)  # type: ignore[arg-type]
        damage(policy)
        return policy

    monkeypatch.setattr(f"{__name__}.make_policy", damaged)
    with pytest.raises(AssertionError):
        test_no_victim_is_fresh_unless_its_owner_says_so("fifo")
