"""Which keys are copied to a reader's own host: against a naive model, and what that does to the busiest server."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import numpy as np
import pytest

from simm.arena.hashing import TAG_AT, Hasher, shard_of
from simm.constants import SHARD_COUNT
from simm.sdk.near.promotion import QUEUE_MAX, WAYS, WINDOW, Promotion, near_digest
from tests.support.dose import dose

HOSTS = 8
digest_of = Hasher("promotion")


def digests_of(count: int) -> list[bytes]:
    return digest_of.many([f"page {number}" for number in range(count)])


# -- where a copy lies ------------------------------------------------------------------------------------


def test_a_copy_is_in_a_shard_of_the_node_and_of_the_epoch_of_its_original() -> None:
    rng = random.Random(1)
    shards = sorted(rng.sample(range(SHARD_COUNT), 2000))
    found = set()
    for digest in digests_of(2000):
        copy = near_digest(digest, shards)
        assert len(copy) == 16 and shard_of(copy) in shards and copy[TAG_AT:] == digest[TAG_AT:]
        assert copy == near_digest(digest, shards) != digest
        found.add(copy)
    assert len(found) == 2000 and len({shard_of(copy) for copy in found}) > 500


@pytest.mark.parametrize("only", [0, 7, SHARD_COUNT - 1])
def test_a_node_with_one_shard_has_all_copies_in_it(only: int) -> None:
    assert {shard_of(near_digest(digest, [only])) for digest in digests_of(100)} == {only}


def test_keys_of_one_hash_tag_do_not_share_their_copies_shard() -> None:
    keys = [digest_of(f"{{same}} {number}") for number in range(100)]
    assert len({shard_of(key) for key in keys}) == 1
    assert len({shard_of(near_digest(key, range(SHARD_COUNT))) for key in keys}) > 50


def test_few_copies_are_looked_for_elsewhere_when_a_shard_comes_or_goes() -> None:
    rng = random.Random(2)
    shards = sorted(rng.sample(range(SHARD_COUNT), 2048))
    fewer = sorted(set(shards) - set(rng.sample(shards, 20)))
    moved = sum(near_digest(digest, shards) != near_digest(digest, fewer) for digest in digests_of(4000))
    assert 0 < moved < 4000 * 5 * 20 / 2048


# -- what is copied -----------------------------------------------------------------------------------------


class Naive:
    """The same rules without a table: by the set a key falls into, the oldest first, and a plain queue."""

    def __init__(self, window: int, most: int) -> None:
        self.last: dict[int, deque[bytes | None]] = {}
        self.sets = window // WAYS
        self.most = most
        self.queue: deque[bytes] = deque()
        self.dropped = 0

    def hit(self, digest: bytes) -> bool:
        number = int.from_bytes(digest[4:12], "little") // WAYS % self.sets
        last = self.last.setdefault(number, deque(maxlen=WAYS))
        if digest not in last:
            last.append(digest)
            return False
        last[last.index(digest)] = None  # its place is free, and is pushed out in its turn
        return self.add(digest)

    def add(self, digest: bytes) -> bool:
        if digest in self.queue:
            return True
        if len(self.queue) == self.most:
            self.dropped += 1
            return False
        self.queue.append(digest)
        return True


@pytest.mark.parametrize("seed", dose(range(20), quick=4))
def test_it_decides_as_a_naive_model_does(seed: int) -> None:
    rng = random.Random(seed)
    keys = digests_of(rng.choice((5, 60, 400)))
    window, most = rng.choice((4, 64, WINDOW)), rng.choice((1, 8, 100))
    real, naive = Promotion(window, most), Naive(window, most)
    for _ in range(4000):
        action, key = rng.random(), rng.choice(keys)
        if action < 0.8:
            assert real.hit(key) == naive.hit(key)
        elif action < 0.9:
            assert real.add(key) == naive.add(key)
        elif action < 0.97:
            count = rng.randint(0, 10)
            assert real.take(count) == [naive.queue.popleft() for _ in range(min(count, len(naive.queue)))]
        else:
            gone = rng.sample(keys, 3)
            real.forget(gone)
            naive.queue = deque(each for each in naive.queue if each not in gone)
        assert len(real) == len(naive.queue) <= most and real.dropped == naive.dropped
    assert real.take(most + 1) == list(naive.queue)


def test_the_second_hit_and_no_other_asks_for_a_copy() -> None:
    promotion, (key, other) = Promotion(), digests_of(2)
    assert [promotion.hit(key), promotion.hit(other), promotion.hit(key)] == [False, False, True]
    assert promotion.take(10) == [key]
    assert [promotion.hit(key), promotion.hit(key)] == [False, True], "the copy was not made, or has gone"


def test_keys_of_one_set_that_are_read_in_turns_are_copied() -> None:
    """Up to ``WAYS`` of them; one more and they push each other out, which is the control."""
    for count in range(1, WAYS + 2):
        promotion = Promotion(window=WAYS)
        found = [promotion.hit(digest) for _ in range(2) for digest in digests_of(count)]
        assert found == [False] * count + [count <= WAYS] * count


def test_a_scan_copies_nothing() -> None:
    promotion = Promotion()
    assert not any(promotion.hit(digest) for digest in digests_of(3 * WINDOW)) and not len(promotion)


def test_a_full_queue_drops_and_counts() -> None:
    promotion, keys = Promotion(), digests_of(QUEUE_MAX + 50)
    assert sum([promotion.add(key) for key in keys]) == QUEUE_MAX == len(promotion) and promotion.dropped == 50
    assert promotion.add(keys[0]), "it waits already"
    assert promotion.take(1) == keys[:1] and promotion.add(keys[-1])


# -- the busiest server ---------------------------------------------------------------------------------------


def loads(seed: int, *, promote: bool, keys: int = 2000, reads: int = 60_000) -> list[int]:
    """Return what each of eight servers serves, when a client on each host reads keys by Zipf 0.99.

    A copy is there after ten more reads of its host. A host has room for copies of a tenth of the keys that it owns.
    """
    rng = np.random.default_rng(seed)
    digests = digests_of(keys)
    owners = rng.integers(0, HOSTS, keys).tolist()
    chances = 1.0 / np.arange(1, keys + 1) ** 0.99
    drawn = rng.choice(keys, (reads // HOSTS, HOSTS), p=chances / chances.sum()).tolist()
    hosts = [Promotion() for _ in range(HOSTS)]
    copies: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(HOSTS)]
    served = [0] * HOSTS
    for turn, row in enumerate(drawn):
        for host, key in enumerate(row):
            digest, owner = digests[key], owners[key]
            if owner == host or digest in copies[host]:
                served[host] += 1
                if owner != host:
                    copies[host].move_to_end(digest)
                continue
            served[owner] += 1
            if promote:
                hosts[host].hit(digest)
        if turn % 10 == 0:
            for host, promotion in enumerate(hosts):
                for digest in promotion.take(64):
                    served[owners[digests.index(digest)]] += 1  # it is read once more
                    copies[host][digest] = None
                    if len(copies[host]) > keys // HOSTS // 10:
                        copies[host].popitem(last=False)
    return served


def imbalance(served: list[int]) -> float:
    return max(served) * len(served) / sum(served)


def test_with_copies_the_busiest_of_eight_servers_has_at_most_twice_the_mean() -> None:
    with_copies = [imbalance(loads(seed, promote=True)) for seed in range(6)]
    assert max(with_copies) <= 2.0


def test_without_copies_it_has_more() -> None:
    """The control: the bar is not met by chance of the owners."""
    assert max(imbalance(loads(seed, promote=False)) for seed in range(6)) > 2.0
