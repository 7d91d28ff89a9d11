"""Claims of several workers in one table, against sets: what is published adds up to what any of them has."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.arena.events.follow import CHANGE_FIELDS, Step
from simm.arena.events.listing import ENTRY_FIELDS
from simm.arena.events.ring import CLOSED, NAMESPACE, REMOVED, SHARD, STORED
from simm.index.publish.claims import Claims, Delta
from tests.support.dose import dose

#: Few names in few shards and namespaces, so that everything meets.
NAMES = [shard | number << 14 for shard in (0, 5, 16383) for number in range(1, 9)]


def record(operation: int, name: int = 0, size: int = 1, namespace: int = 0) -> tuple[int, ...]:
    return name, 7, size, namespace, operation


def step_of(records: list[tuple[int, ...]], whole: dict[int, int] | None = None) -> Step:
    rows = None
    if whole is not None:
        rows = np.array([(name, 7, 1, 0, namespace) for name, namespace in whole.items()], ENTRY_FIELDS)
    return Step(rows, np.array(records, CHANGE_FIELDS))


def apply(mine: dict[int, int], step: Step) -> None:
    """Do one worker's step, one record at a time. ``mine``: names and the numbers of their namespaces."""
    if step.whole is not None:
        mine.clear()
        mine.update((int(row["low"]), int(row["namespace"])) for row in step.whole)
    for row in step.records:
        operation, name, number = int(row["operation"]), int(row["low"]), int(row["size"])
        if operation == STORED:
            mine[name] = int(row["namespace"])
        elif operation == REMOVED:
            if mine.get(name) == int(row["namespace"]):
                del mine[name]
        else:
            for each, namespace in list(mine.items()):
                if operation == CLOSED or number == (each & 16383 if operation == SHARD else namespace):
                    del mine[each]


def add_up(seen: set[tuple[int, str]], deltas: list[Delta]) -> None:
    for delta in deltas:
        for name in delta.names.tolist():
            pair = name, delta.namespace
            assert (pair not in seen) == delta.stored, "published twice, or removed twice"
            (seen.add if delta.stored else seen.remove)(pair)


def random_step(rng: random.Random) -> Step:
    records = []
    for _ in range(rng.choice([0, 1, 3, 20])):
        what = rng.random()
        name, namespace = rng.choice(NAMES), rng.randrange(3)
        if what < 0.6:
            records.append(record(STORED, name, 1, namespace))
        elif what < 0.9:
            records.append(record(REMOVED, name, 0, namespace))
        elif what < 0.96:
            records += [record(SHARD, 0, rng.choice([0, 5, 7])) for _ in range(rng.randint(1, 3))]
        elif what < 0.99:
            records.append(record(NAMESPACE, 0, namespace))
        else:
            records.append(record(CLOSED))
    whole = None
    if rng.random() < 0.1:
        whole = {name: rng.randrange(3) for name in rng.sample(NAMES, rng.randrange(len(NAMES)))}
    # As a follower has it: of a run of single entries, those that went come first.
    runs = itertools.groupby(records, key=lambda each: max(REMOVED, each[-1]))
    return step_of([each for _, run in runs for each in sorted(run, key=lambda each: -each[-1])], whole)


@pytest.mark.parametrize("seed", dose(range(20), quick=2))
def test_what_is_published_adds_up(seed: int) -> None:
    rng = random.Random(seed)
    claims = Claims(lambda owner, number: f"n{number}")
    mine: dict[int, dict[int, int]] = {1: {}, 2: {}, 3: {}}
    seen: set[tuple[int, str]] = set()
    for _ in range(120):
        owner = rng.choice([1, 1, 1, 2, 2, 3])
        if rng.random() < 0.02:
            add_up(seen, claims.drop(owner))
            mine[owner].clear()
        else:
            step = random_step(rng)
            add_up(seen, claims.take(owner, step))
            apply(mine[owner], step)
        assert seen == {(name, f"n{number}") for each in mine.values() for name, number in each.items()}
        assert claims.entries == sum(map(len, mine.values()))
        whole: set[tuple[int, str]] = set()
        add_up(whole, claims.all())
        assert whole == seen


def test_what_two_workers_have_is_published_once() -> None:
    claims = Claims(lambda owner, number: "n")
    assert [len(each.names) for each in claims.take(1, step_of([record(STORED, 1)]))] == [1]
    assert not any(len(each.names) for each in claims.take(2, step_of([record(STORED, 1)])))
    assert not any(len(each.names) for each in claims.take(1, step_of([record(REMOVED, 1)])))
    (gone,) = claims.take(2, step_of([record(REMOVED, 1)]))
    assert not gone.stored and gone.names.tolist() == [1]


def test_a_table_that_is_as_it_was_publishes_nothing() -> None:
    claims = Claims(lambda owner, number: "n")
    whole = dict.fromkeys(NAMES, 0)
    assert sum(len(each.names) for each in claims.take(1, step_of([], whole))) == len(NAMES)
    assert claims.take(1, step_of([], whole)) == []
    del whole[NAMES[3]]
    (gone,) = claims.take(1, step_of([], whole))
    assert (gone.stored, gone.names.tolist()) == (False, [NAMES[3]])


def test_numbers_of_namespaces_that_no_entry_has_are_not_kept() -> None:
    """A ring in which somebody else has stored records that advance what does not exist."""
    asked: list[int] = []

    def name_of(_owner: int, number: int) -> str:
        asked.append(number)
        return f"n{number}"

    claims = Claims(name_of)
    claims.take(1, step_of([record(STORED, NAMES[0], 1, 7)]))
    assert claims.take(1, step_of([record(NAMESPACE, 0, number) for number in range(1000, 5000)])) == []
    assert asked == [7] and claims.entries == 1
    (gone,) = claims.take(1, step_of([record(NAMESPACE, 0, 7)]))
    assert not gone.stored and gone.namespace == "n7" and claims.entries == 0


def test_issue_what_came_to_another_namespace_stays_when_the_older_one_goes() -> None:
    """While there was no room for its name its values were the default's; then it has got its first epoch."""
    claims = Claims(lambda owner, number: f"n{number}")
    claims.take(1, step_of([record(STORED, NAMES[0], 1, 0)]))
    gone, came = claims.take(1, step_of([record(STORED, NAMES[0], 1, 256)]))
    assert (gone.stored, gone.namespace, came.stored, came.namespace) == (False, "n0", True, "n256")
    assert claims.take(1, step_of([record(REMOVED, NAMES[0], 0, 0)])) == [] and claims.entries == 1
    # Both at once, in any order.
    (gone,) = claims.take(1, step_of([record(REMOVED, NAMES[0], 0, 256), record(REMOVED, NAMES[0], 0, 0)]))
    assert (gone.stored, gone.namespace, claims.entries) == (False, "n256", 0)
