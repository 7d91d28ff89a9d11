"""How much of a prompt each owner has, against a loop over blocks: with holes, with units of several owners."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.index import prefixes
from simm.index.prefixes import leading
from simm.index.table import Table
from tests.support.dose import dosed


def _world(rng: random.Random, length: int, owners: int) -> tuple[Table, dict[tuple[int, int], int], list[int]]:
    """A prompt, and owners that have some of it: all, a beginning, a beginning with holes, none."""
    table = Table({"counts": np.uint32}, lambda owners: np.ones(len(owners), np.bool_))
    keys = [rng.getrandbits(64) for _ in range(length)]
    model = {}
    for owner in range(1, owners + 1):
        end = rng.choice((0, 1, rng.randrange(length + 1), length))
        holes = {rng.randrange(length) for _ in range(rng.choice((0, 0, 1, 3)))}
        for at in range(end):
            if at not in holes:
                slot = table.add_one(keys[at], owner)
                model[keys[at], owner] = table.columns["counts"][slot] = rng.randrange(1, 1 << 20)
    for _ in range(rng.randrange(300)):  # others, and some that are gone
        slot = table.add_one(rng.choice(keys), rng.randrange(1000, 2000) + len(model) * 2000)
        if rng.random() < 0.5:
            table.remove_one(slot)
    return table, model, keys


def _expected(model: dict[tuple[int, int], int], unit: list[int], keys: list[int]) -> list[list[int]]:
    run = 0
    while run < len(keys) and any((keys[run], owner) in model for owner in unit):
        run += 1
    return [[model.get((key, owner), 0) for key in keys[:run]] for owner in unit]


@pytest.mark.parametrize("probes", [1, 50, 1 << 17])
def test_prefixes_are_those_of_a_loop(probes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_PROBES", probes if probes > 16 else 16)
    rng = random.Random(probes)
    for _ in range(dosed(40, quick=12)):
        length, owners = rng.choice((1, 7, 120)), rng.choice((1, 5, 20))
        table, model, keys = _world(rng, length, owners)
        units: list[list[int]] = []
        for owner in rng.sample(range(1, owners + 1), owners):
            if units and rng.random() < 0.3:
                units[-1].append(owner)
            else:
                units.append([owner])
        found = leading(table, units, np.array(keys, np.uint64))
        assert [[counts.tolist() for counts, _ in unit] for unit in found] == [_expected(model, u, keys) for u in units]


def test_nobody_has_nothing() -> None:
    table, _, keys = _world(random.Random(1), 5, 2)
    assert leading(table, [], np.array(keys, np.uint64)) == []
    assert [len(unit[0][0]) for unit in leading(table, [[1], [2]], np.zeros(0, np.uint64))] == [0, 0]


def test_a_first_search_that_says_too_little_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test before: its worlds have prefixes that end everywhere."""
    found = prefixes._limits
    monkeypatch.setattr(prefixes, "_limits", lambda *told: [max(0, each - 1) for each in found(*told)])
    with pytest.raises(AssertionError):
        test_prefixes_are_those_of_a_loop(1 << 17, monkeypatch)
