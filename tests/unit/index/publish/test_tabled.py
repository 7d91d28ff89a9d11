"""Claims by slot in a hash table are the same as in arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.arena.events.claimed import CLAIM_FIELDS, BySlot
from simm.index.publish import tabled as tabled_module
from simm.index.publish.tabled import Tabled
from tests.support.dose import dose


@pytest.mark.parametrize("seed", dose(range(8), quick=2))
def test_they_are_the_same_as_in_arrays(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(tabled_module, "PASS_SLOTS", 64)
    rng, slots = random.Random(seed), 1001
    ours, theirs = Tabled(slots), BySlot(slots)
    everything = np.arange(slots)
    most = 0
    for _ in range(60):
        chosen = np.array(sorted(rng.sample(range(slots), rng.choice([0, 1, 5, 300]))), np.int64)
        claims = np.zeros(len(chosen), CLAIM_FIELDS)
        for row in claims[: rng.choice([0, len(claims)])]:
            if rng.random() < 0.7:
                row["low"], row["high"] = rng.randrange(2), rng.randrange(1, 1 << 64)
                row["namespace"] = rng.randrange(40)
        lost = np.zeros(1 << 16, np.bool_)
        lost[rng.randrange(60)] = True
        for each in (ours, theirs):
            each.put(chosen, claims)
            each.forget(lost)
        assert ours.entries == theirs.entries == np.count_nonzero(theirs.among(everything))
        assert np.array_equal(ours.among(everything), theirs.among(everything))
        held = np.flatnonzero(theirs.among(everything))
        assert np.array_equal(ours.of(held), theirs.of(held))
        assert not ours.of(chosen)["low"][~ours.among(chosen)].any()
        most = max(most, ours.entries)
    assert most > 300
