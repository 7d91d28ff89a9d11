"""What is evicted is counted: by reason and size exactly, and its age for a sample."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator

import pytest

from simm.arena.events.victims import AGE_BUCKETS, AGE_SAMPLE, Ghosts, Victims, age_bound_s, evicted_in
from simm.arena.hashing import EpochHasher, Hasher
from simm.arena.queues import KeyWords
from simm.constants import COUNT_MISSED, GHOST_STEP, SLAB_CHUNK_BYTES_MAX
from simm.host.count_log import CallLogs
from simm.ipc.counts import missed_keys, new_words
from simm.server.operators.pages import Row, metrics
from tests.support.store_world import World, new_segment, remove_segment


def test_ages_fall_into_buckets_by_their_bounds() -> None:
    victims = Victims()
    ages = [-5, 0, 1, 1000, 1001, 2000, 2001, 4000, 4001, 1 << 60]
    victims.age_ms = ages.__getitem__
    for slot in range(len(ages)):
        victims.many([slot], 64)
    assert victims.ages[1:5] == [4, 2, 2, 1] and victims.ages[-1] == 1 and sum(victims.ages[1:]) == len(ages)
    bounds = [age_bound_s(bucket) for bucket in range(AGE_BUCKETS)]
    assert bounds[:4] == [1.0, 2.0, 4.0, 8.0] and bounds == sorted(bounds) and bounds[-1] == math.inf


def test_all_are_counted_and_some_are_looked_at() -> None:
    victims = Victims()
    looked: list[int] = []

    def age(slot: int) -> int:
        looked.append(slot)
        return 5000

    victims.age_ms = age
    for slot in range(10 * AGE_SAMPLE):
        victims.one(slot, "window", SLAB_CHUNK_BYTES_MAX + 1)
    victims.many([1000, 1001, 1002], 4096)
    assert len(looked) == 11 and looked[-1] == 1000
    stats = victims.stats()
    assert stats["evictions"]["window"] == 10 * AGE_SAMPLE and stats["evictions"]["own"] == 3
    assert stats["evictions_by_chunk"] == {"large": 10 * AGE_SAMPLE, "4096": 3}
    assert stats["eviction_ages"][0] == 55_000


@pytest.fixture
def world() -> Iterator[World]:
    segment = new_segment(8 << 20, slots=4096)
    try:
        yield World(segment, slots=4096)
    finally:
        remove_segment(segment)


def test_the_metrics_of_a_store_that_is_full(world: World) -> None:
    store, player, number = world.store, world.join(), 0
    world._clock = itertools.count(1_000_000, 1000)  # a second for each step: a put takes one or two
    while sum(store.space.evictions.values()) < 64:
        assert world.put(player, hashlib.blake2b(b"%d" % number, digest_size=16).digest(), 4096)
        number += 1
    stats = store.stats()
    evicted = sum(stats["evictions"].values())
    assert stats["evictions_by_chunk"] == {"4096": evicted}
    text = metrics("a", [Row(0, 0, stats)], joined=True, fenced=False, epoch=1).text()
    assert f'simm_evictions_for_room_total{{server="a",worker="0",numa="0",chunk="4096"}} {evicted}\n' in text
    ages = stats["eviction_ages"]
    seen = sum(ages[1:])
    assert seen > 0 and f'simm_eviction_age_seconds_count{{server="a",worker="0",numa="0"}} {seen}\n' in text
    # The oldest goes first: it is as many puts old as there is room for values.
    room = number - evicted
    assert room * 0.75 < ages[0] / seen / 1000 < 2 * room
    assert f'simm_largest_free_bytes{{server="a",worker="0",numa="0"}} {stats["room"]}\n' in text


def test_evicted_keys_are_remembered_and_others_are_not() -> None:
    digests = [hashlib.sha256(number.to_bytes(2, "little")).digest() for number in range(600)]
    keys = [int.from_bytes(digest[:8], "little") for digest in digests]
    victims = Victims(Ghosts(1024, KeyWords(keys, 1, 0)))
    for start in range(0, 200, 5):  # an odd number of them each time
        victims.many(range(start, start + 5), 4096)
    for slot in range(200, 400):
        victims.one(slot, "window", 4096)
    noted = [slot for slot in range(400) if victims.evicted(keys[slot])]
    assert 300 / GHOST_STEP < len(noted) <= 400 / GHOST_STEP, "of those at one place the last one is"
    assert {slot % GHOST_STEP for slot in noted} == {0} and noted[-1] >= 390
    assert not any(map(victims.evicted, keys[400:]))
    assert not Victims().evicted(keys[0]), "without a memory nothing is known"


@pytest.mark.parametrize("hasher", [Hasher("n"), EpochHasher("n", 5), EpochHasher("n", (1 << 20) + 7)])
def test_issue_keys_of_a_namespace_with_epochs_are_told_apart(world: World, hasher: Hasher) -> None:
    """Their digests end alike: keys that were never stored were all taken for evicted ones."""
    store = world.store
    digests = [hasher(f"k{number}") for number in range(1000)]
    for number, digest in enumerate(digests):
        assert store.table.publish(digest, world.geometry.data_offset + 64 * number, 1, 0, 64, 0, 0, 1) is not None
    victims = Victims(Ghosts(store.geometry.slots, store.table.key_words()))
    logs = CallLogs()
    logs.count_in(new_words())

    def evicted(digest: bytes) -> bool:
        logs.missed(digest)
        (key,) = missed_keys(logs.counts, logs.counts[COUNT_MISSED] - 1)[1]
        return victims.evicted(key)

    never = [hasher(f"never {number}") for number in range(1000)]
    assert sum(map(evicted, [*digests, *never])) <= 2
    victims.many([store.table.lookup(digest) for digest in digests], 64)
    assert sum(map(evicted, digests)) > 0.8 * len(digests) / GHOST_STEP
    assert sum(map(evicted, never)) <= 2


def test_what_an_earlier_version_tells_is_counted() -> None:
    """`simm top` showed no worker while one of them had not been upgraded."""
    told = {"evictions": {"4096": 3, "large": 1}, "set_evictions": 2}
    assert evicted_in(told) == 6 and evicted_in({**told, "evicted_with_groups": 4}) == 10
