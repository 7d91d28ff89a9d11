"""Groups put together from members that arrive in any order, several times, and not all."""

from __future__ import annotations

import random

import pytest

from simm.arena.marks import arrivals as module
from simm.arena.marks.arrivals import Arrivals
from simm.arena.marks.groups import number_of
from tests.support.dose import dose
from tests.support.group_world import members


@pytest.mark.parametrize("seed", dose(range(20), 5))
def test_each_group_is_whole_once_all_its_members_have_come(seed: int) -> None:
    rng = random.Random(seed)
    groups = [members(f"{seed}/{at}", rng.randint(2, 9)) for at in range(40)]
    lost = {rng.choice(digests) for digests in groups if rng.random() < 0.3}
    coming = [(digest, number_of(digests)) for digests in groups for digest in digests if digest not in lost]
    rng.shuffle(coming)
    arrivals = Arrivals()
    found: list[list[bytes]] = []
    while coming:
        page, coming = coming[:7], coming[7:]
        twice = page[: rng.randint(0, 2)]  # as after a page that was listed again
        found += arrivals.add([*page, *twice])
    whole = [sorted(digests) for digests in groups if lost.isdisjoint(digests)]
    assert sorted({tuple(group) for group in found}) == sorted(tuple(group) for group in whole)
    left = [digest for digests in groups if not lost.isdisjoint(digests) for digest in digests if digest not in lost]
    assert set(left) <= set().union(*arrivals._members.values())


def test_numbers_are_not_believed() -> None:
    arrivals = Arrivals()
    pair = members("p")
    number = number_of(pair)
    assert arrivals.add([(pair[0], 0), (pair[1], 0), (pair[0], 1 << 6), (pair[1], 1 << 6)]) == []
    assert arrivals.add([(digest, number ^ 1 << 20) for digest in pair]) == []
    assert arrivals.add([(digest, number) for digest in pair]) == [sorted(pair)]
    assert not arrivals._members and not arrivals._count


def test_what_never_gets_whole_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARRIVING_MAX", 10)
    arrivals = Arrivals()
    for at in range(50):
        triple = members(at, 3)
        assert arrivals.add([(digest, number_of(triple)) for digest in triple[:2]]) == []
        assert arrivals._count == sum(map(len, arrivals._members.values())) <= 10
    last = members(49, 3)
    assert arrivals.add([(last[2], number_of(last))]) == [sorted(last)]
