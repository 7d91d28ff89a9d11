"""Dealing shards: against brute force, against a twin from plain lists, step by step under a limit, and its checks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from simm import deal as deal_module
from simm.constants import NO_OWNER
from simm.deal import Standing, Tables, apportion, deal
from simm.errors import CorruptionError

GONE, KEPT, QUIET, READY = Standing.GONE, Standing.KEPT, Standing.QUIET, Standing.READY
NOBODY = NO_OWNER


def tables_of(
    owners: Sequence[int], homes: Sequence[int] | None = None, previous: Sequence[int] | None = None
) -> Tables:
    made = Tables(len(owners))
    made.owners[:] = owners
    made.homes[:] = owners if homes is None else homes
    if previous is not None:
        made.previous[:] = previous
    made.since[:] = 1
    return made


def fewest_moves(held: list[int], weights: list[int], shards: int) -> int:
    """By trying every assignment of floors and ceilings that sums up; ``held`` of those with a share, or 0."""
    total = sum(weights)
    choices = []
    for weight in weights:
        floor, rest = divmod(shards * weight, total)
        choices.append((floor, floor + 1) if rest else (floor,))
    kept = [
        sum(min(have, target) for have, target in zip(held, targets))
        for targets in itertools.product(*choices)
        if sum(targets) == shards
    ]
    return shards - max(kept)


# --- the twin -----------------------------------------------------------------------------------


class Twin:
    """The rules of deal.py's essay in lists and loops: who is short takes, one shard at a time."""

    def __init__(
        self, tables: Tables, weights: list[int], standing: list[Standing], limit: int, heard: list[int]
    ) -> None:
        self.since: list[int] = tables.since.tolist()
        self.heard = heard
        self.owners: list[int] = tables.owners.tolist()
        self.homes: list[int] = tables.homes.tolist()
        self.previous: list[int] = tables.previous.tolist()
        self.standing, self.limit, self.weights = standing, limit, weights
        self.share()

    def share(self) -> None:
        shares = [owner for owner in self.owners if self.stands(owner) in (QUIET, READY)]
        kept = sum(self.stands(owner) is KEPT for owner in self.owners)
        held = [shares.count(worker) for worker in range(len(self.weights))]
        targets = apportion(self.weights, held, len(self.owners) - kept)
        self.short = [target - have for target, have in zip(targets, held)]

    def stands(self, worker: int) -> Standing:
        return GONE if worker == NOBODY else self.standing[worker]

    def fits(self, shard: int, worker: int) -> bool:
        return self.heard[worker] >= self.since[shard]

    def coming(self, worker: int) -> int:
        return sum(o == worker and p != NOBODY for o, p in zip(self.owners, self.previous))

    def may_take(self, shard: int, worker: int) -> bool:
        able = self.stands(worker) is READY and self.short[worker] > 0 and self.fits(shard, worker)
        return able and self.coming(worker) < self.limit

    def run(self) -> Twin:
        shards = range(len(self.owners))
        workers = range(len(self.short))
        orphans = [shard for shard in shards if self.stands(self.owners[shard]) is GONE]
        later = []
        for shard in orphans:
            wish = [self.previous[shard], self.homes[shard]]
            self.owners[shard] = self.previous[shard] = NOBODY
            takers = [w for w in wish if w != NOBODY and self.short[w] > 0 and self.fits(shard, w)]
            if takers:
                self.give(shard, takers[0])
            else:
                later.append(shard)
        picky = sorted(workers, key=lambda worker: self.heard[worker])
        for shard in later:
            takers = [worker for worker in picky if self.short[worker] > 0 and self.fits(shard, worker)]
            if takers:
                self.give(shard, takers[0])
        alike: Counter[int] = Counter()
        left = [shard for shard in later if self.owners[shard] == NOBODY and any(self.weights)]
        for shard in left:
            takers = [worker for worker in workers if self.weights[worker] and self.fits(shard, worker)]
            if takers:
                self.give(shard, takers[alike[self.since[shard]] % len(takers)])
                alike[self.since[shard]] += 1
        if left:
            self.share()
        self.unplaced = sum(self.owners[shard] == NOBODY for shard in left)
        for goes in (self.goes_home, self.is_guest, self.is_resident):
            for shard in shards:
                owner = self.owners[shard]
                movable = self.previous[shard] == NOBODY and self.stands(owner) is READY
                if movable and self.fits(shard, owner) and self.short[owner] < 0 and (to := goes(shard)) is not None:
                    self.short[owner] += 1
                    self.previous[shard] = owner
                    if self.homes[shard] == owner:
                        self.homes[shard] = to
                    self.give(shard, to)
        for shard in shards:
            if self.homes[shard] == NOBODY:
                self.homes[shard] = self.owners[shard]
        return self

    def give(self, shard: int, worker: int) -> None:
        self.owners[shard] = worker
        self.short[worker] -= 1

    def goes_home(self, shard: int) -> int | None:
        home = self.homes[shard]
        return home if home != NOBODY and self.may_take(shard, home) else None

    def is_guest(self, shard: int) -> int | None:
        return self.anyone(shard) if self.homes[shard] != self.owners[shard] else None

    def is_resident(self, shard: int) -> int | None:
        return self.anyone(shard)

    def anyone(self, shard: int) -> int | None:
        return next((worker for worker in range(len(self.short)) if self.may_take(shard, worker)), None)


def picture(rng: random.Random) -> tuple[Tables, list[int], list[Standing], int, list[int]]:
    """Anything that the cluster could ask."""
    count, shards = rng.randint(1, 6), rng.randint(1, 40)
    standing = [rng.choice([GONE, KEPT, QUIET, READY, READY, READY]) for _ in range(count)]
    weights = [rng.choice([0, 1, 1, 2, 3, 7]) if each >= QUIET else 0 for each in standing]
    places = [*range(count), NOBODY]
    owners = [rng.choice(places) for _ in range(shards)]
    homes = [rng.choice(places) if owner == NOBODY else rng.choice(places[:-1]) for owner in owners]
    previous = [
        rng.choice([NOBODY, NOBODY, *(place for place in places if place != owner)]) if owner != NOBODY else NOBODY
        for owner in owners
    ]
    tables = tables_of(owners, homes, previous)
    heard = [rng.randint(1, 5) for _ in range(count)]
    if rng.random() < 0.5:
        tables.since[:] = [rng.randint(1, 4) for _ in range(shards)]
    return tables, weights, standing, rng.choice([1, 2, 5, 100]), heard


@pytest.mark.parametrize("seed", range(400))
def test_deal_like_the_twin(seed: int) -> None:
    tables, weights, standing, limit, heard = picture(random.Random(seed))
    before = tables.owners.tolist()
    twin = Twin(tables, weights, standing, limit, heard).run()
    dealt = deal(tables, weights, standing, limit, heard)
    assert tables.owners.tolist() == twin.owners
    assert tables.previous.tolist() == twin.previous
    assert tables.homes.tolist() == twin.homes
    assert dealt.changed.tolist() == [at for at, old in enumerate(before) if old != twin.owners[at]]
    assert dealt.waiting == sum(-short for short in twin.short if short < 0) + twin.unplaced
    again = tables.copy()
    repeated = deal(again, weights, standing, limit, heard)
    assert not len(repeated.changed) and repeated.waiting == dealt.waiting, "one deal is the whole step"
    assert again.owners.tolist() == twin.owners and again.previous.tolist() == twin.previous


@pytest.mark.parametrize("seed", range(200))
def test_steps_under_a_limit_add_up_to_the_fewest_moves(seed: int) -> None:
    rng = random.Random(seed)
    count, shards, limit = rng.randint(1, 6), rng.randint(1, 60), rng.choice([1, 2, 3, 7])
    weights = [rng.choice([0, 1, 1, 2, 3]) for _ in range(count)]
    weights[rng.randrange(count)] = 1
    tables = tables_of([rng.randrange(count) for _ in range(shards)])
    before = tables.owners.tolist()
    fewest = fewest_moves([before.count(at) if weights[at] else 0 for at in range(count)], weights, shards)
    moves = 0
    while True:
        dealt = deal(tables, weights, [READY] * count, limit)
        moves += len(dealt.changed)
        moving = np.flatnonzero(tables.previous != NOBODY).tolist()
        for at in range(count):
            assert sum(tables.owners[shard] == at for shard in moving) <= limit
        if not moving:
            break
        for shard in rng.sample(moving, rng.randint(1, len(moving))):
            assert tables.previous[shard] == before[shard], "nobody got it in between"
            tables.previous[shard] = NOBODY
    assert moves == fewest == sum(x != y for x, y in zip(before, tables.owners.tolist()))
    assert dealt.waiting == 0
    for at, weight in enumerate(weights):
        assert abs(tables.owners.tolist().count(at) - shards * weight / sum(weights)) < 1


# --- single rules -------------------------------------------------------------------------------


def test_apportion_gives_rest_to_the_largest_remainders() -> None:
    assert apportion([1, 1, 1], [0, 0, 0], 16) == [6, 5, 5]
    assert apportion([1, 1, 1], [0, 0, 6], 16) == [5, 5, 6]
    assert apportion([2, 3, 5], [0, 0, 0], 7) == [1, 2, 4]
    assert apportion([0, 0], [0, 0], 7) == [0, 0]


def test_orphans_know_no_limit_and_have_no_previous_owner() -> None:
    tables = tables_of([0] * 30)
    dealt = deal(tables, [0, 1], [GONE, READY], 1)
    assert tables.owners.tolist() == [1] * 30 and len(dealt.changed) == 30 and dealt.waiting == 0
    assert set(tables.previous.tolist()) == {NOBODY} and set(tables.homes.tolist()) == {0}


def test_a_newcomer_is_filled_by_steps() -> None:
    tables = tables_of([0] * 20)
    assert deal(tables, [1, 1], [READY, READY], 4).waiting == 6
    assert tables.owners.tolist().count(1) == 4 == tables.previous.tolist().count(0)
    tables.previous[:] = [NOBODY, *tables.previous[1:]]
    assert len(deal(tables, [1, 1], [READY, READY], 4).changed) == 1, "one has arrived, so one more may go"


def test_a_moving_shard_stays_until_its_owner_is_gone() -> None:
    # All are on the way from 0 to 1; now 1 is to be emptied.
    tables = tables_of([1] * 8, [1] * 8, [0] * 8)
    dealt = deal(tables, [1, 0], [READY, READY], 100)
    assert not len(dealt.changed) and dealt.waiting == 8
    dealt = deal(tables, [1, 0], [READY, GONE], 100)
    assert len(dealt.changed) == 8 and set(tables.owners.tolist()) == {0} and set(tables.previous.tolist()) == {NOBODY}


def test_an_orphan_goes_to_who_had_it_before() -> None:
    tables = tables_of([2, 2, 0, 1], [2, 2, 0, 1], [1, 0, NOBODY, NOBODY])
    deal(tables, [1, 1, 0], [READY, READY, GONE], 100)
    assert tables.owners.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("quiet", [0, 1])
def test_nothing_moves_from_or_to_who_is_not_heard(quiet: int) -> None:
    tables = tables_of([0] * 10)
    standing = [READY, READY]
    standing[quiet] = QUIET
    assert deal(tables, [1, 1], standing, 100).waiting == 5 and set(tables.owners.tolist()) == {0}
    # But the shards of the dead are dealt to it: somebody must have them.
    tables = tables_of([2] * 10)
    deal(tables, [1, 1, 0], [*standing, GONE], 100)
    assert sorted(tables.owners.tolist()) == [0] * 5 + [1] * 5


def test_who_missed_a_map_neither_gives_nor_takes_what_changed_hands_since() -> None:
    """Its arena may still have a word, and values, from before somebody else's tenure."""
    def recent() -> Tables:
        tables = tables_of([0] * 10)
        tables.since[:5] = 7
        return tables

    tables = recent()
    assert deal(tables, [0, 1], [READY, READY], 100, [7, 6]).waiting == 5, "1 has not heard of the shards of epoch 7"
    assert tables.owners.tolist() == [0] * 5 + [1] * 5
    tables = recent()
    assert deal(tables, [0, 1], [READY, READY], 100, [6, 7]).waiting == 5, "nor can 0 be their previous owner"
    assert tables.owners.tolist() == [0] * 5 + [1] * 5
    tables = recent()
    dealt = deal(tables, [0, 1, 0], [GONE, READY, QUIET], 100, [9, 6, 9])
    assert dealt.waiting == 5 and tables.owners.tolist() == [NOBODY] * 5 + [1] * 5, "an owner's death hurries nobody"
    assert deal(tables, [0, 1, 0], [GONE, READY, QUIET], 100, [9, 7, 9]).waiting == 0
    assert tables.owners.tolist() == [1] * 10


def test_who_is_kept_keeps_and_gets_nothing() -> None:
    tables = tables_of([0] * 6 + [NOBODY] * 4, [0] * 6 + [0] * 4)
    deal(tables, [0, 1], [KEPT, READY], 100)
    assert tables.owners.tolist() == [0] * 6 + [1] * 4


def test_with_nobody_to_take_them_orphans_are_nobodys() -> None:
    tables = tables_of([0] * 5)
    dealt = deal(tables, [0], [GONE], 100)
    assert set(tables.owners.tolist()) == {NOBODY} and len(dealt.changed) == 5
    assert not len(deal(tables, [0], [GONE], 100).changed)
    assert not len(deal(Tables(5), [], [], 100).changed)


def test_guests_go_before_residents_and_residents_change_their_home() -> None:
    tables = tables_of([0] * 6, [0, 0, 1, 1, 1, 0])
    deal(tables, [1, 0, 1], [READY, GONE, READY], 100)
    assert tables.owners.tolist() == [0, 0, 2, 2, 2, 0] and tables.homes.tolist() == [0, 0, 1, 1, 1, 0]
    tables = tables_of([0] * 4)
    deal(tables, [1, 1], [READY, READY], 100)
    assert tables.homes.tolist() == tables.owners.tolist()


# --- what can be lost without being noticed -------------------------------------------------------


def test_tables_check_finds_what_does_not_belong() -> None:
    def spoil(name: str, shard: int, value: int) -> Callable[[Tables], None]:
        def apply(tables: Tables) -> None:
            getattr(tables, name)[shard] = value

        return apply

    for damage in (
        spoil("owners", 0, 2), spoil("homes", 0, 2), spoil("homes", 1, NOBODY), spoil("previous", 0, 2),
        spoil("previous", 0, 0), spoil("owners", 2, NOBODY), spoil("since", 1, 0),
    ):  # fmt: skip
        tables = tables_of([0, 1, 1], None, [NOBODY, NOBODY, 0])
        tables.check(2)
        damage(tables)
        with pytest.raises(CorruptionError):
            tables.check(2)


def test_renumber_forgets() -> None:
    tables = tables_of([0, 1, 2, 2], [1, 1, 2, 0], [NOBODY, NOBODY, 1, NOBODY])
    tables.renumber([1, NOBODY, 0])
    assert tables.owners.tolist() == [1, NOBODY, 0, 0]
    assert tables.homes.tolist() == [1, NOBODY, 0, 1] and set(tables.previous.tolist()) == {NOBODY}
    tables.check(2)


def test_control_a_deal_that_forgets_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit in ``_move``, the step-by-step test must fail."""
    real = deal_module._move

    def greedy(tables: Tables, quota: list[int], spare: list[int], heard: list[int]) -> int:
        return real(tables, [9 if each else 0 for each in quota], spare, heard)

    monkeypatch.setattr(deal_module, "_move", greedy)
    with pytest.raises(AssertionError):
        for seed in range(200):
            test_steps_under_a_limit_add_up_to_the_fewest_moves(seed)
