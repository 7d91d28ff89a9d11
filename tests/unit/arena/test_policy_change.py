"""A policy becomes another one in place, slice by slice: nothing is lost, and everything goes on meanwhile."""

from __future__ import annotations

import itertools
import random

import pytest

from simm.arena import eviction
from simm.arena.eviction import change, make_policy
from simm.arena.queues import CLEARED_MAX, KeyWords, Policy
from simm.arena.space import Space
from simm.constants import POLICY_NAMES
from simm.errors import UsageError
from simm.server.operators.admin import SETTLED_AT_ONCE, PolicyChange
from tests.support.consistency import check
from tests.support.space_owner import Owner

SLOTS, GROUPS = 200, 3
PAIRS = [(one, other) for one in POLICY_NAMES for other in POLICY_NAMES if one != other]


class World:
    """A policy, and which slots have an entry in which group."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.visited = bytearray(SLOTS)
        keys = KeyWords([self.rng.getrandbits(64) for _ in range(SLOTS)], 1, 0)
        self.policy = make_policy(name, SLOTS, GROUPS, memoryview(self.visited), 4, keys)
        self.groups: dict[int, int] = {}

    def play(self, steps: int) -> None:
        policy, groups, rng = self.policy, self.groups, self.rng
        for _ in range(steps):
            action, slot, group = rng.randrange(10), rng.randrange(SLOTS), rng.randrange(GROUPS)
            if slot not in groups:
                if action < 6:
                    policy.insert(slot, group)
                    groups[slot] = group
            elif action < 4:
                self.visited[slot] = 1
            elif action == 4:
                policy.replaced(slot)
            elif action == 5:
                policy.move(slot, group)
                groups[slot] = group
            elif action == 6:
                policy.remove(slot)
                del groups[slot]
            elif action == 7:
                policy.look(slot)
            elif action == 8:
                for taken in policy.take_victims(group, lambda _: False, 3, policy.clock):
                    assert groups.pop(taken) == group
            elif (victim := policy.victim(group, lambda _: False)) >= 0:
                assert groups[victim] == group and policy.since(victim) <= policy.clock
                policy.remove(victim)
                del groups[victim]

    def check(self) -> None:
        check(self.policy)
        assert {slot: self.policy.group_of(slot) for slot in self.groups} == self.groups

    def emptied(self) -> bool:
        """Evict all that the policy finds, with nothing spared. Return whether that was all."""
        self.policy.sparing = False
        for group in range(GROUPS):
            while (slot := self.policy.victim(group, lambda _: False)) >= 0:
                assert self.groups.pop(slot) == group
                self.policy.remove(slot)
        return not self.groups


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_policy_becomes_any_other(one: str, other: str) -> None:
    for seed in range(3):
        world = World(one, seed)
        world.play(1500)
        before, arrays = dict(world.groups), (world.policy._prev, world.policy._stamp)
        change(world.policy, other)
        assert (world.policy._prev, world.policy._stamp) == arrays and world.groups == before, "in place"
        world.check()
        while world.policy.settle(7):
            world.check()
            world.play(5)
        assert type(world.policy) is eviction._POLICIES[other] and world.policy.name == other
        world.play(500)
        world.check()
        assert all(queue % Policy.QUEUES < world.policy.USED for queue, size in enumerate(world.policy._sizes) if size)
        assert world.emptied()


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_everything_is_found_before_it_is_settled(one: str, other: str) -> None:
    world = World(one, 3)
    world.play(1500)
    change(world.policy, other)
    assert world.groups and world.emptied(), "what is left in the old queues is evicted too"


def test_control_without_the_settling_form_entries_are_never_evicted() -> None:
    world = World("reuse", 3)
    world.play(1500)
    world.policy.become(eviction._POLICIES["lru"])
    assert not world.emptied()


@pytest.mark.parametrize("one", ["reuse", "sieve"])
def test_what_was_used_again_goes_last(one: str) -> None:
    visited = bytearray(SLOTS)
    policy = make_policy(one, SLOTS, 1, memoryview(visited))
    for slot in range(60):
        policy.insert(slot, 0)
    again = range(0, 60, 4)
    for slot in again:
        visited[slot] = 1
        policy.look(slot)
    change(policy, "lru")
    turns = 1
    while policy.settle(4):
        turns += 1
    assert turns > len(again) // 4, "a slice is bounded"
    order = policy.take_victims(0, lambda _: False, 60, policy.clock)
    assert set(order[:45]).isdisjoint(again) and set(order[45:]) == set(again)
    assert order[:45] == sorted(order[:45]) and order[45:] == sorted(order[45:])


def test_a_policy_changes_again_before_it_is_settled() -> None:
    world = World("reuse", 8)
    world.play(1500)
    for name in ("lru", "sieve", "fifo", "reuse", "fifo", "lru"):
        change(world.policy, name)
        world.policy.settle(2)
        world.play(20)
        world.check()
        assert world.policy.name == name
    while world.policy.settle(50):
        pass
    world.play(500)
    world.check()
    assert world.emptied()


def test_a_group_of_used_entries_is_moved_in_pieces() -> None:
    """A search for a victim moves a bounded number of entries of what is left."""
    slots = 4 * CLEARED_MAX
    visited = bytearray(b"\1" * slots)
    policy = make_policy("reuse", slots, 1, memoryview(visited))
    for slot in range(slots):
        policy.insert(slot, 0)
        visited[slot] = 1
        policy.look(slot)
    change(policy, "lru")
    assert policy.victim(0, lambda _: False) == 0 and policy._sizes[0] < slots // 4
    check(policy)


def test_no_other_name_is_taken() -> None:
    world = World("lru", 1)
    with pytest.raises(UsageError, match="no eviction policy 'best'"):
        change(world.policy, "best")
    assert world.policy.name == "lru"


@pytest.mark.parametrize(("one", "other"), [("lru", "fifo"), ("reuse", "lru"), ("sieve", "reuse"), ("fifo", "sieve")])
def test_a_space_goes_on_with_values_of_all_sizes(one: str, other: str) -> None:
    owner = Owner(8 << 20, 4096, policy=one)
    rng = random.Random(5)

    def puts(count: int) -> None:
        for _ in range(count):
            while not owner.free_slots:
                owner.release(next(iter(owner.slots)))
            if (offset := owner.grant(rng.choice((4096, 65_536, 300_000)))) >= 0:
                owner.publish(offset)
            if owner.slots:
                owner.visited[rng.choice(list(owner.slots))] = 1

    puts(600)
    settle = owner.space.change_policy(other)
    assert owner.space.policy_name == other
    while settle(3):
        puts(1)
    puts(600)
    check(owner.space)
    assert type(owner.space._policy) is eviction._POLICIES[other]


def test_uses_by_way_of_others_count_as_the_policy_says() -> None:
    space = Space(4 << 20, 64, memoryview(bytearray(64)), "fifo", lambda _slot: None)
    asked: list[int] = []
    space.heed(lambda slot: bool(asked.append(slot)), asked.append)
    assert space._is_used is None and space._policy.on_use is None
    space.change_policy("lru")
    assert space._is_used is not None and space._policy.on_use is not None
    space.change_policy("fifo")
    assert space._is_used is None and space._policy.on_use is None


class Turns:
    """The timers of a loop."""

    def __init__(self) -> None:
        self.timers: list[object] = []

    def call_later(self, _delay: float, callback: object) -> None:
        self.timers.append(callback)


def test_a_worker_settles_slice_by_slice() -> None:
    slots = 3 * SETTLED_AT_ONCE
    visited = memoryview(bytearray(slots))
    space, turns = Space(64 << 20, slots, visited, "reuse", lambda _slot: None), Turns()
    for slot in range(slots):
        space.publish(space.allocate(4096), slot)
        visited[slot] = 1
        space._policy.look(slot)
    changes = PolicyChange(space, turns)  # type: ignore[arg-type]
    changes.take("reuse")
    assert not turns.timers, "it is the policy already"
    changes.take("lru")
    queue = space._policy._queue
    left = [sum(queue[slot] % Policy.QUEUES != 0 for slot in range(slots))]
    changes.take("fifo")
    assert len(turns.timers) == 1, "one row of slices, whatever is asked for meanwhile"
    while turns.timers:
        turns.timers.pop()()  # type: ignore[operator]
        left.append(sum(queue[slot] % Policy.QUEUES != 0 for slot in range(slots)))
    assert left[0] and not left[-1] and all(0 <= a - b <= SETTLED_AT_ONCE for a, b in itertools.pairwise(left))
    assert type(space._policy) is eviction._POLICIES["fifo"]
    check(space._policy)
