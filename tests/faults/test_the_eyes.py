"""What the fault tests look with sees what it must: controls for the watch and for the verifying client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.constants import SHARD_COUNT
from simm.shards import FROZEN, MOVING

from .load import BACK, OK, WRONG, Load, Records, key_of
from .watch import Owners, Watch


def words(**epochs: int) -> np.ndarray[Any, Any]:
    """Shard words, by number: ``words(s3=7)``."""
    made = np.zeros(SHARD_COUNT, np.uint64)
    for name, epoch in epochs.items():
        made[int(name[1:])] = epoch
    return made


def test_two_owners_in_one_epoch_are_seen_at_whatever_times() -> None:
    owners = Owners()
    owners.look("a", words(s3=7, s4=7))
    owners.look("b", words(s3=FROZEN | 7, s5=8))
    owners.look("a", words(s4=7))
    owners.look("b", words(s3=9, s4=10))
    assert not owners.conflicts, "a frozen one, and owners of later epochs, are right"
    owners.look("b", words(s4=MOVING | 7))
    assert len(owners.conflicts) == 1 and "shard 4" in owners.conflicts[0]


def test_an_epoch_that_goes_back_is_seen() -> None:
    watch = Watch(SimpleNamespace(servers=[]))  # type: ignore[arg-type]
    for cluster, epoch in ((1, 5), (1, 6), (2, 1), (2, 2)):
        watch._note(SimpleNamespace(cluster=cluster, epoch=epoch))
    assert not watch.back, "another cluster begins anew"
    watch._note(SimpleNamespace(cluster=2, epoch=1))
    assert watch.back
    with pytest.raises(AssertionError):
        watch.assert_right()


def test_wrong_bytes_and_older_values_are_seen() -> None:
    load = Load.__new__(Load)
    load.number, load.sizes, load.floor, load.said, load.count = 0, (5000,), {}, [], 10
    load.rng = SimpleNamespace(choice=lambda sizes: sizes[0])  # type: ignore[assignment]
    key = key_of(0, 1)
    (_, old), (newer, new) = load.next_value(key), load.next_value(key)
    assert load.judge(key, new) == OK and load.floor[key] == newer
    assert load.judge(key, new) == OK and load.judge(key, old) == BACK
    assert load.judge(key, new[:-1]) == load.judge(key, new[:-1] + b"x") == load.judge(key_of(0, 2), new) == WRONG
    rows = np.zeros(3, [("began", "f8"), ("took", "f8"), ("kind", "u1"), ("outcome", "u1")])
    Records(rows, []).assert_right()
    rows["outcome"][1] = BACK
    with pytest.raises(AssertionError):
        Records(rows, []).assert_right()
