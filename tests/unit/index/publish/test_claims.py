"""Claims of several workers in one table, against sets: what is published adds up to what any of them has."""

from __future__ import annotations

import gc
import itertools
import random
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.arena.events import follow as follow_module
from simm.arena.events.follow import CHANGE_FIELDS, Follower, Step
from simm.arena.events.listing import ENTRY_FIELDS
from simm.arena.events.ring import CLOSED, NAMESPACE, REMOVED, SHARD, STORED, EventRing, RingReader
from simm.index import table as table_module
from simm.index.publish import claims as claims_module
from simm.index.publish.claims import Claims, Delta
from simm.index.publish.tabled import Tabled
from tests.support.dose import dose
from tests.support.event_claims import new_ring

ROOT = Path(__file__).parents[4]

#: Few names in few shards and namespaces, so that everything meets.
NAMES = [shard | number << 14 for shard in (0, 5, 16383) for number in range(1, 9)]


def record(operation: int, name: int = 0, size: int = 1, namespace: int = 0) -> tuple[int, ...]:
    return name, 7, size, namespace, operation


def step_of(records: list[tuple[int, ...]]) -> Step:
    return Step(np.array(records, CHANGE_FIELDS))


def apply(mine: dict[int, int], step: Step) -> None:
    """Do one worker's step, one record at a time. ``mine``: names and the numbers of their namespaces."""
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


def add_up(seen: set[tuple[int, str]], deltas: Iterable[Delta]) -> None:
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
    # As a follower has it: of a run of single entries, those that went come first.
    runs = itertools.groupby(records, key=lambda each: max(REMOVED, each[-1]))
    return step_of([each for _, run in runs for each in sorted(run, key=lambda each: -each[-1])])


@pytest.mark.parametrize("seed", dose(range(20), quick=2))
def test_what_is_published_adds_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "PASS_SLOTS", 8 << seed % 5)  # the table has 64 to 128 slots
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
    whole = [record(STORED, name) for name in NAMES]
    assert sum(len(each.names) for each in claims.take(1, step_of(whole))) == len(NAMES)
    assert claims.take(1, step_of(whole)) == []


def test_an_entry_that_went_from_one_slot_and_came_to_another_is_there() -> None:
    """As when a page of a table is looked at just after the worker has moved it there, in any order."""
    claims = Claims(lambda owner, number: "n")
    claims.take(1, step_of([record(STORED, NAMES[0])]))
    for records in ([STORED, REMOVED], [REMOVED, STORED], [STORED, REMOVED, STORED]):
        assert claims.take(1, step_of([record(each, NAMES[0]) for each in records])) == [] and claims.entries == 1


class SomeTable:
    """A table of which one slot in so many is in use: of all places, as digests choose them."""

    def __init__(self, slots: int, one_in: int) -> None:
        self.slots = slots
        self.entries = np.ones(slots // one_in, ENTRY_FIELDS)
        chosen = np.random.default_rng(1)
        self.entries["low"] = chosen.integers(1, 1 << 64, slots // one_in, np.uint64)
        self.entries["slot"] = np.sort(chosen.choice(slots, slots // one_in, replace=False))

    def page(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self.entries["slot"], [start, stop])
        return self.entries[first:last].copy()

    def some(self, slots: np.ndarray) -> np.ndarray:
        raise AssertionError("the ring tells nothing")


@pytest.mark.parametrize(("slots", "one_in"), [(1 << 15, 1), (1 << 16, 32)], ids=["full", "large values"])
def test_issue_a_look_is_short_steps_and_needs_little_memory(
    monkeypatch: pytest.MonkeyPatch, slots: int, one_in: int
) -> None:
    """It took 255 bytes for each value, the next one 300, and all in one step: the publisher was killed in it.

    Then it took 18 bytes for each slot: of large values thousands for each of them.
    """
    page, values = 1 << 10, slots // one_in
    # What is needed for a page or a pass is to be little beside what is needed for a value.
    monkeypatch.setattr(follow_module, "LOOK_SLOTS", page)
    monkeypatch.setattr(follow_module, "LOOK_WIDER", 1)
    monkeypatch.setattr(claims_module, "PASS_SLOTS", page)
    monkeypatch.setattr(table_module, "_PASS", page)
    memory = new_ring()
    EventRing(memory)
    reader, table = RingReader(memory), SomeTable(slots, one_in)
    follower, claims = Follower(reader, SomeTable(page, 1), Tabled(page)), Claims(lambda owner, number: "n")

    def look() -> int:
        changed = 0
        follower._gap()
        while follower.due:
            step = follower.step()
            assert len(step.records) <= page
            changed += sum(len(each.names) for each in claims.take(1, step))
        return changed

    def everything() -> int:
        return sum(len(each.names) for each in claims.all())

    def end() -> int:
        return sum(len(each.names) for each in claims.drop(1))

    stated = re.search(r"memory: .*# (\d+) bytes for each value", (ROOT / "deploy/helm/simm/values.yaml").read_text())
    assert stated is not None
    assert look() == everything() == end() == page  # what the first calls load is not counted
    gc.collect()
    tracemalloc.start()
    try:
        follower, claims = Follower(reader, table, Tabled(slots)), Claims(lambda owner, number: "n")
        for do, changed in ((look, values), (look, 0), (everything, values), (end, values)):
            tracemalloc.reset_peak()
            assert do() == changed
            assert tracemalloc.get_traced_memory()[1] < values * int(stated[1]) + slots / 8 + 128 * page
    finally:
        tracemalloc.stop()


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
