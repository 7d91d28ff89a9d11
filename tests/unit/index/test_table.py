"""The table of the event index against a dict, driven by the same seeds, and a table that ends searches too early."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.index import table as table_module
from simm.index.table import BUCKET, EMPTY, GONE, Table
from tests.support.dose import dose


def _table(alive: set[int] | None = None) -> Table:
    return Table(
        {"value": np.uint64},
        lambda owners: np.ones(len(owners), np.bool_) if alive is None else np.isin(owners, list(alive)),
    )


def _arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([key for key, _ in pairs], np.uint64), np.array([owner for _, owner in pairs], np.uint32)


def _check(table: Table, model: dict[tuple[int, int], int]) -> None:
    pairs = list(model)
    absent = [(key ^ 1 << 60, owner) for key, owner in pairs]
    slots = table.find(*_arrays(pairs + absent))
    assert (slots[: len(pairs)] >= 0).all() and (slots[len(pairs) :] < 0).all()
    assert table.columns["value"][slots[: len(pairs)]].tolist() == [model[pair] for pair in pairs]
    for pair, slot in list(zip(pairs + absent, slots.tolist()))[:: max(1, len(pairs) // 10)]:
        assert table.find_one(*pair) == slot
    assert table.entries == len(model)
    assert table.used == int((table.owners != EMPTY).sum())


def _drive(table: Table, seed: int, steps: int) -> dict[tuple[int, int], int]:
    """Do random batches in the table and in a dict. Return the dict."""
    rng = random.Random(seed)
    model: dict[tuple[int, int], int] = {}
    for step in range(steps):
        if rng.random() < 0.6:
            drawn = {(rng.getrandbits(40), rng.randrange(1, 5)) for _ in range(rng.choice((1, 3, 40, 300)))}
            new = [pair for pair in drawn if pair not in model]
            for pair in new:
                model[pair] = rng.getrandbits(64)
            if len(new) < 4:
                for pair in new:
                    slot = table.add_one(*pair)
                    table.columns["value"][slot] = model[pair]
            else:
                known = rng.sample(sorted(model.keys() - set(new)), min(len(new), len(model) - len(new)))
                both = rng.sample(new + known, len(new) + len(known))
                slots, added = table.find_or_add(*_arrays(both))
                assert [pair for pair, is_new in zip(both, added.tolist()) if is_new] == [p for p in both if p in new]
                assert not table.columns["value"][slots[added]].any()
                table.columns["value"][slots] = np.array([model[pair] for pair in both], np.uint64)
        elif model:
            gone = rng.sample(sorted(model), rng.randrange(1, len(model) + 1) if rng.random() < 0.2 else 1)
            table.remove(table.find(*_arrays(gone)))
            for pair in gone:
                del model[pair]
        if step % 10 == 0 and model:
            _check(table, model)
    return model


@pytest.mark.parametrize("seed", range(3))
def test_a_dict_finds_the_same(seed: int) -> None:
    table = _table()
    model = _drive(table, seed, 40)
    assert len(model) > 20
    _check(table, model)


@pytest.mark.parametrize("per_pass", [8, 16, 120])
def test_a_table_that_is_rebuilt_in_passes_loses_nothing(monkeypatch: pytest.MonkeyPatch, per_pass: int) -> None:
    """Entries that lie behind their homes are in a later pass than those, or in the first one."""
    monkeypatch.setattr(table_module, "_PASS", per_pass)
    table = Table({"value": np.uint64}, lambda owners: np.ones(len(owners), np.bool_), 128)
    rng = random.Random(per_pass)
    model = {(rng.getrandbits(40), rng.randrange(1, 5)): rng.getrandbits(64) for _ in range(760)}
    slots, _ = table.find_or_add(*_arrays(list(model)))
    table.columns["value"][slots] = np.array(list(model.values()), np.uint64)
    homes = table._homes(*_arrays(list(model)))
    assert table.slots == 1024 and (slots // BUCKET != homes).any()
    for more in (0, 1000, 0, 0):
        for pair in list(model)[::7]:
            table.remove_one(table.find_one(*pair))
            del model[pair]
        table.rebuild(more)
        assert table.used == table.entries
        _check(table, model)


def test_a_table_that_is_full_to_its_end_goes_on_at_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_PASS", 16)
    table = _table()
    monkeypatch.setattr(table, "_homes", lambda keys, owners: table._buckets - 1 - (keys % np.uint64(2)).view(np.int64))
    monkeypatch.setattr(table, "_home", lambda key, owner: table._buckets - 1 - key % 2)
    keys, owners = np.arange(1, 41, dtype=np.uint64), np.ones(40, np.uint32)
    table.find_or_add(keys, owners)
    assert (table.owners[:BUCKET] != EMPTY).all()
    for more in (0, 500, 0):
        table.rebuild(more)
        assert table.entries == table.used == 40 and (table.keys[table.find(keys, owners)] == keys).all()
        assert (table.find(keys + np.uint64(40), owners) < 0).all()


def test_few_entries_are_placed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all, though those that have no room in the last bucket are in the first pass: their homes are behind all."""
    monkeypatch.setattr(table_module, "_PASS", 128)
    table = Table({"value": np.uint64}, lambda owners: np.ones(len(owners), np.bool_), 128)
    keys = np.arange(1, 1 << 14, dtype=np.uint64)
    homes = table._homes(keys, np.ones(len(keys), np.uint32))
    keys = np.concatenate((keys[homes == 127][:20], keys[homes < 127][:500]))
    table.find_or_add(keys, np.ones(len(keys), np.uint32))
    assert (table.owners[:BUCKET] != EMPTY).all(), "the last ones are here"
    placed = []
    place = table._place
    monkeypatch.setattr(table, "_place", lambda key, owner: (placed.append(key), place(key, owner))[1])
    table.rebuild()
    assert 12 <= len(placed) < 200 and (table.find(keys, np.ones(len(keys), np.uint32)) >= 0).all()


@pytest.mark.parametrize("buckets", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", dose(range(4), quick=2))
def test_new_entries_of_few_homes_share_no_slot(monkeypatch: pytest.MonkeyPatch, seed: int, buckets: int) -> None:
    """Their homes are the last buckets and the first one: a search that goes on at the first meets those that wait."""
    rng = np.random.default_rng(seed)
    table = _table()
    table.reserve(400)
    homes = (-rng.integers(0, buckets, 1 << 16)) % table._buckets
    monkeypatch.setattr(table, "_homes", lambda keys, owners: homes[keys.astype(np.intp)])
    monkeypatch.setattr(table, "_home", lambda key, owner: int(homes[key]))
    keys = rng.permutation(np.arange(1, 381, dtype=np.uint64))
    owners = np.ones(len(keys), np.uint32)
    for part in np.array_split(np.arange(len(keys)), 3):
        slots, new = table.find_or_add(keys[part], owners[part])
        assert new.all() and (table.keys[slots] == keys[part]).all()
    slots, new = table.find_or_add(keys, owners)
    assert not new.any() and len(set(slots.tolist())) == len(keys) and (table.find(keys, owners) == slots).all()
    table.remove(slots[::3])
    assert (table.find(keys, owners)[1::3] == slots[1::3]).all(), "no search ends before it"
    assert (table.find_or_add(keys, owners)[1] == (np.arange(len(keys)) % 3 == 0)).all()


def test_entries_of_owners_that_are_gone_are_dropped() -> None:
    alive = {1, 2}
    table = _table(alive)
    table.find_or_add(np.arange(100, dtype=np.uint64), np.tile(np.array([1, 2], np.uint32), 50))
    alive.discard(2)
    table.rebuild()
    assert table.entries == 50 and set(table.owners.tolist()) == {EMPTY, 1}


def test_an_entry_has_at_most_so_many_bytes() -> None:
    table = _table()
    worst = 0.0
    for number in range(400):
        table.find_or_add(np.arange(number * 100, number * 100 + 100, dtype=np.uint64), np.full(100, 7, np.uint32))
        if table.entries > 4000:
            worst = max(worst, table.nbytes / table.entries)
    assert worst <= (8 + 4 + 8) * 1.61


def test_mutation_a_slot_that_always_becomes_empty_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mark GONE a search ends before what lies behind a full bucket."""

    def remove(table: Table, slots: np.ndarray) -> None:
        table.owners[slots] = EMPTY
        table.entries -= len(slots)

    for broken in (False, True):
        table = _table()
        monkeypatch.setattr(table, "_homes", lambda keys, owners: np.zeros(len(keys), np.int64))
        monkeypatch.setattr(table, "_home", lambda key, owner: 0)
        keys, owners = np.arange(1, BUCKET + 3, dtype=np.uint64), np.ones(BUCKET + 2, np.uint32)
        table.find_or_add(keys, owners)
        first = table.find(keys[:1], owners[:1])
        remove(table, first) if broken else table.remove(first)
        assert (GONE in table.owners) is not broken
        assert (table.find(keys[1:], owners[1:]) < 0).any() == broken


def test_a_keys_homes_are_apart_whatever_the_random_numbers_are() -> None:
    """Many endpoints have a prompt's blocks. With these numbers the owner would not count but for the last shift."""
    table = Table({}, lambda owners: np.ones(len(owners), np.bool_), buckets=1024)
    table._second = pow(table._third, -1, 1 << 64)
    table._of_second = np.uint64(table._second)
    owners = np.arange(1, 65, dtype=np.uint32)
    for key in (1, 0x9E37_79B9_7F4A_7C15, (1 << 64) - 1):
        homes = table._homes(np.full(64, key, np.uint64), owners).tolist()
        assert homes == [table._home(key, owner) for owner in owners.tolist()]
        assert len(set(homes)) > 40


@pytest.mark.parametrize("failing", range(8))
def test_a_table_that_finds_no_memory_to_grow_stays_as_it_was(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arrays were replaced one by one, so that others' entries were not found, or found where others lay."""
    table = _table()
    model = _drive(table, seed=5, steps=20)
    left, zeros = [failing], np.zeros

    def allocate(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return zeros(*arguments)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(table_module.np, "zeros", allocate)
        try:
            table.rebuild(1 << 16)
            assert left[0] >= 0
        except MemoryError:
            assert left[0] < 0
    _check(table, model)
    assert table.entries == len(model)
