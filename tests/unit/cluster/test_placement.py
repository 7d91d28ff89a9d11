"""Rebalancing: against brute force, against a reference model, step by step under a limit, and its checks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from simm.cluster import placement as placement_module
from simm.cluster.placement import Eligibility, rebalance, target_counts
from simm.cluster.shard_map import Tables
from simm.constants import NO_OWNER
from simm.errors import CorruptionError
from tests.models.explorer import first_failure

DEAD, OVERDUE, RESERVED, SUSPECT, ACTIVE = Eligibility
NOBODY = NO_OWNER


def tables_of(
    owners: Sequence[int], homes: Sequence[int] | None = None, previous: Sequence[int] | None = None
) -> Tables:
    made = Tables(len(owners))
    made.owners[:] = owners
    made.preferred[:] = owners if homes is None else homes
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


# --- the reference model -----------------------------------------------------------------------------------


class ReferenceModel:
    """The rules of ``cluster/placement.py`` in lists and loops: a worker below its target takes one shard at a time."""

    def __init__(
        self, tables: Tables, weights: list[int], standing: list[Eligibility], limit: int, heard: list[int]
    ) -> None:
        self.since: list[int] = tables.since.tolist()
        self.heard = heard
        self.owners: list[int] = tables.owners.tolist()
        self.homes: list[int] = tables.preferred.tolist()
        self.previous: list[int] = tables.previous.tolist()
        self.standing, self.limit, self.weights = standing, limit, weights
        self.given: set[int] = set()
        self.share()

    def share(self) -> None:
        shares = [owner for owner in self.owners if self.stands(owner) in (SUSPECT, ACTIVE)]
        kept = sum(self.stands(owner) is RESERVED for owner in self.owners)
        held = [shares.count(worker) for worker in range(len(self.weights))]
        targets = target_counts(self.weights, held, len(self.owners) - kept)
        self.short = [target - have for target, have in zip(targets, held)]

    def stands(self, worker: int) -> Eligibility:
        return DEAD if worker == NOBODY else self.standing[worker]

    def fits(self, shard: int, worker: int) -> bool:
        return self.heard[worker] >= self.since[shard]

    def coming(self, worker: int) -> int:
        return sum(o == worker and p != NOBODY for o, p in zip(self.owners, self.previous))

    def may_take(self, shard: int, worker: int) -> bool:
        able = self.stands(worker) is ACTIVE and self.short[worker] > 0 and self.fits(shard, worker)
        return able and self.coming(worker) < self.limit

    def run(self) -> ReferenceModel:
        shards = range(len(self.owners))
        workers = range(len(self.short))
        unowned = [shard for shard in shards if self.stands(self.owners[shard]) is DEAD]
        late = [shard for shard in shards if self.stands(self.owners[shard]) is OVERDUE]
        later = []
        for shard in unowned:
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
        if late:
            late = self.relieve(late)
            self.share()
            self.unplaced += len(late) if any(self.weights) else 0
        for goes in (self.goes_home, self.is_guest, self.is_resident):
            for shard in shards:
                owner = self.owners[shard]
                movable = self.previous[shard] == NOBODY and self.stands(owner) is ACTIVE and shard not in self.given
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

    def relieve(self, late: list[int]) -> list[int]:
        """Assign the late shards that active workers lack, and spread the rest; return the shards that stay late."""
        ready = [worker for worker in range(len(self.weights)) if self.standing[worker] is ACTIVE]
        while True:
            self.share()
            begin = len(late)
            for picky in (False, True):
                for shard in list(late):
                    wish = sorted(ready, key=lambda worker: self.heard[worker])
                    if not picky:
                        wish = [worker for worker in (self.previous[shard], self.homes[shard]) if worker in ready]
                    takers = [worker for worker in wish if self.short[worker] > 0 and self.fits(shard, worker)]
                    if takers:
                        self.give(shard, takers[0])
                        self.previous[shard] = NOBODY
                        late.remove(shard)
            others = sum(max(0, more) for worker, more in enumerate(self.short) if worker not in ready)
            alike: Counter[int] = Counter()
            for shard in late[others:]:
                takers = [worker for worker in ready if self.weights[worker] and self.fits(shard, worker)]
                if takers:
                    self.give(shard, takers[alike[self.since[shard]] % len(takers)])
                    self.previous[shard] = NOBODY
                    alike[self.since[shard]] += 1
                    late.remove(shard)
            if len(late) == begin:
                return late

    def give(self, shard: int, worker: int) -> None:
        self.given.add(shard)
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


def picture(rng: random.Random) -> tuple[Tables, list[int], list[Eligibility], int, list[int]]:
    """Anything that the cluster could ask."""
    count, shards = rng.randint(1, 6), rng.randint(1, 40)
    standing = [rng.choice([DEAD, OVERDUE, RESERVED, SUSPECT, ACTIVE, ACTIVE, ACTIVE]) for _ in range(count)]
    weights = [rng.choice([0, 1, 1, 2, 3, 7]) if each >= SUSPECT else 0 for each in standing]
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
def test_deal_like_the_reference_model(seed: int) -> None:
    tables, weights, standing, limit, heard = picture(random.Random(seed))
    before = tables.owners.tolist()
    reference = ReferenceModel(tables, weights, standing, limit, heard).run()
    dealt = rebalance(tables, weights, standing, limit, heard)
    assert tables.owners.tolist() == reference.owners
    assert tables.previous.tolist() == reference.previous
    assert tables.preferred.tolist() == reference.homes
    assert dealt.changed.tolist() == [at for at, old in enumerate(before) if old != reference.owners[at]]
    assert dealt.waiting == sum(-short for short in reference.short if short < 0) + reference.unplaced
    again = tables.copy()
    again.since[dealt.changed] = 99  # as the caller does: nobody has heard of it yet
    repeated = rebalance(again, weights, standing, limit, heard)
    assert not len(repeated.changed) and repeated.waiting == dealt.waiting, "one deal is the whole step"
    assert again.owners.tolist() == reference.owners and again.previous.tolist() == reference.previous


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
        dealt = rebalance(tables, weights, [ACTIVE] * count, limit)
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
    assert target_counts([1, 1, 1], [0, 0, 0], 16) == [6, 5, 5]
    assert target_counts([1, 1, 1], [0, 0, 6], 16) == [5, 5, 6]
    assert target_counts([2, 3, 5], [0, 0, 0], 7) == [1, 2, 4]
    assert target_counts([0, 0], [0, 0], 7) == [0, 0]


def test_unowned_shards_know_no_limit_and_have_no_previous_owner() -> None:
    tables = tables_of([0] * 30)
    dealt = rebalance(tables, [0, 1], [DEAD, ACTIVE], 1)
    assert tables.owners.tolist() == [1] * 30 and len(dealt.changed) == 30 and dealt.waiting == 0
    assert set(tables.previous.tolist()) == {NOBODY} and set(tables.preferred.tolist()) == {0}


def test_a_newcomer_is_filled_by_steps() -> None:
    tables = tables_of([0] * 20)
    assert rebalance(tables, [1, 1], [ACTIVE, ACTIVE], 4).waiting == 6
    assert tables.owners.tolist().count(1) == 4 == tables.previous.tolist().count(0)
    tables.previous[:] = [NOBODY, *tables.previous[1:]]
    assert len(rebalance(tables, [1, 1], [ACTIVE, ACTIVE], 4).changed) == 1, "one has arrived, so one more may go"


def test_a_moving_shard_stays_until_its_owner_is_gone() -> None:
    # All are on the way from 0 to 1; now 1 is to be emptied.
    tables = tables_of([1] * 8, [1] * 8, [0] * 8)
    dealt = rebalance(tables, [1, 0], [ACTIVE, ACTIVE], 100)
    assert not len(dealt.changed) and dealt.waiting == 8
    dealt = rebalance(tables, [1, 0], [ACTIVE, DEAD], 100)
    assert len(dealt.changed) == 8 and set(tables.owners.tolist()) == {0} and set(tables.previous.tolist()) == {NOBODY}


def test_an_unowned_shard_goes_to_its_last_owner() -> None:
    tables = tables_of([2, 2, 0, 1], [2, 2, 0, 1], [1, 0, NOBODY, NOBODY])
    rebalance(tables, [1, 1, 0], [ACTIVE, ACTIVE, DEAD], 100)
    assert tables.owners.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("away", [DEAD, OVERDUE])
def test_an_unowned_shard_does_not_move_on_with_what_its_previous_owner_has(away: Eligibility) -> None:
    """0 has died. 1 was the previous owner of its first shards, which 0 may have put other values into since. 2 has not
    heard of the last ones, so 1 is burdened with them, and has too many."""
    tables = tables_of([0] * 20, None, [1] * 10 + [NOBODY] * 10)
    tables.since[10:] = 7
    dealt = rebalance(tables, [0, 1, 1], [away, ACTIVE, ACTIVE], 100, [9, 9, 6])
    assert set(tables.owners.tolist()) <= {1, 2} and len(dealt.changed) == 20
    assert set(tables.previous.tolist()) == {NOBODY}, "nobody has what 0 had"


@pytest.mark.parametrize("quiet", [0, 1])
def test_nothing_moves_from_or_to_who_is_not_heard(quiet: int) -> None:
    tables = tables_of([0] * 10)
    standing = [ACTIVE, ACTIVE]
    standing[quiet] = SUSPECT
    assert rebalance(tables, [1, 1], standing, 100).waiting == 5 and set(tables.owners.tolist()) == {0}
    # But the shards of the dead are dealt to it: somebody must have them.
    tables = tables_of([2] * 10)
    rebalance(tables, [1, 1, 0], [*standing, DEAD], 100)
    assert sorted(tables.owners.tolist()) == [0] * 5 + [1] * 5


def test_who_missed_a_map_neither_gives_nor_takes_what_changed_hands_since() -> None:
    """Its arena may still have a shard word and values from before another worker owned the shard."""
    def recent() -> Tables:
        tables = tables_of([0] * 10)
        tables.since[:5] = 7
        return tables

    tables = recent()
    assert rebalance(tables, [0, 1], [ACTIVE, ACTIVE], 100, [7, 6]).waiting == 5, "1 has not acked epoch 7"
    assert tables.owners.tolist() == [0] * 5 + [1] * 5
    tables = recent()
    assert rebalance(tables, [0, 1], [ACTIVE, ACTIVE], 100, [6, 7]).waiting == 5, "nor can 0 be their previous owner"
    assert tables.owners.tolist() == [0] * 5 + [1] * 5
    tables = recent()
    dealt = rebalance(tables, [0, 1, 0], [DEAD, ACTIVE, SUSPECT], 100, [9, 6, 9])
    assert dealt.waiting == 5 and tables.owners.tolist() == [NOBODY] * 5 + [1] * 5, "an owner's death hurries nobody"
    assert rebalance(tables, [0, 1, 0], [DEAD, ACTIVE, SUSPECT], 100, [9, 7, 9]).waiting == 0
    assert tables.owners.tolist() == [1] * 10


def test_who_is_kept_keeps_and_gets_nothing() -> None:
    tables = tables_of([0] * 6 + [NOBODY] * 4, [0] * 6 + [0] * 4)
    rebalance(tables, [0, 1], [RESERVED, ACTIVE], 100)
    assert tables.owners.tolist() == [0] * 6 + [1] * 4


def test_without_an_eligible_worker_shards_stay_unowned() -> None:
    tables = tables_of([0] * 5)
    dealt = rebalance(tables, [0], [DEAD], 100)
    assert set(tables.owners.tolist()) == {NOBODY} and len(dealt.changed) == 5
    assert not len(rebalance(tables, [0], [DEAD], 100).changed)
    assert not len(rebalance(Tables(5), [], [], 100).changed)


def test_shards_of_the_overdue_are_its_own_until_somebody_is_heard_from() -> None:
    tables = tables_of([0] * 5, None, [1] * 2 + [NOBODY] * 3)
    for weights, standing in (([0, 0], [OVERDUE, DEAD]), ([0, 0], [OVERDUE, RESERVED]), ([0, 1], [OVERDUE, SUSPECT])):
        dealt = rebalance(tables, weights, standing, 100)
        assert tables.owners.tolist() == [0] * 5 and not len(dealt.changed) and tables.previous.tolist()[:2] == [1, 1]
        assert dealt.waiting == 5 * (SUSPECT in standing)
    # One who is ready takes his part; the other's waits, as it is known in a moment what becomes of that one.
    dealt = rebalance(tables, [0, 2, 3], [OVERDUE, ACTIVE, SUSPECT], 100)
    assert tables.owners.tolist() == [1, 1, 0, 0, 0] and set(tables.previous.tolist()) == {NOBODY}
    assert dealt.waiting == 3 and not len(rebalance(tables, [0, 2, 3], [OVERDUE, ACTIVE, SUSPECT], 100).changed)
    assert rebalance(tables, [0, 2, 3], [OVERDUE, ACTIVE, ACTIVE], 100).waiting == 0
    assert tables.owners.tolist() == [1, 1, 2, 2, 2]


def test_guests_go_before_residents_and_residents_change_their_home() -> None:
    tables = tables_of([0] * 6, [0, 0, 1, 1, 1, 0])
    rebalance(tables, [1, 0, 1], [ACTIVE, DEAD, ACTIVE], 100)
    assert tables.owners.tolist() == [0, 0, 2, 2, 2, 0] and tables.preferred.tolist() == [0, 0, 1, 1, 1, 0]
    tables = tables_of([0] * 4)
    rebalance(tables, [1, 1], [ACTIVE, ACTIVE], 100)
    assert tables.preferred.tolist() == tables.owners.tolist()


# --- what can be lost without being noticed -------------------------------------------------------


def test_tables_check_finds_what_does_not_belong() -> None:
    def spoil(name: str, shard: int, value: int) -> Callable[[Tables], None]:
        def apply(tables: Tables) -> None:
            getattr(tables, name)[shard] = value

        return apply

    for damage in (
        spoil("owners", 0, 2), spoil("preferred", 0, 2), spoil("preferred", 1, NOBODY), spoil("previous", 0, 2),
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
    assert tables.preferred.tolist() == [1, NOBODY, 0, 1] and set(tables.previous.tolist()) == {NOBODY}
    tables.check(2)


def test_mutation_a_deal_that_forgets_the_limit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit in ``_move``, the step-by-step test must fail."""
    real = placement_module._move

    def greedy(tables: Tables, quota: list[int], spare: list[int], *rest: Any) -> int:
        return real(tables, [9 if each else 0 for each in quota], spare, *rest)

    monkeypatch.setattr(placement_module, "_move", greedy)
    first_failure(range(200), test_steps_under_a_limit_add_up_to_the_fewest_moves, AssertionError)
