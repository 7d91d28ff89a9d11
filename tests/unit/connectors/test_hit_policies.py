"""How much of a prefix can be restored: each policy next to its definition, written out."""

from __future__ import annotations

import random

import pytest

from simm.connectors.hicache import hit_policies


def naive_trailing(stored: list[bool], pages: int, window: int) -> set[int]:
    prefixes = range(1, min(pages, len(stored)) + 1)
    return {prefix for prefix in prefixes if all(stored[max(0, prefix - window) : prefix])}


def naive_all(stored: list[bool], pages: int) -> set[int]:
    return {prefix for prefix in range(1, min(pages, len(stored)) + 1) if all(stored[:prefix])}


def naive_groups(stored: list[bool], group: int, block_pages: int) -> int:
    covered = 0
    while stored[:group] and len(stored[:group]) == group and all(stored[:group]):
        covered, stored = covered + block_pages, stored[group:]
    return covered


@pytest.mark.parametrize("seed", range(200))
def test_policies_are_what_they_say(seed: int) -> None:
    dice = random.Random(seed)
    stored = [dice.random() < dice.choice((0.5, 0.9)) for _ in range(dice.randrange(0, 24))]
    pages, window = dice.randrange(0, 24), dice.randrange(1, 6)
    assert hit_policies.all_pages(stored, pages) == naive_all(stored, pages)
    assert hit_policies.trailing_pages(stored, pages, window) == naive_trailing(stored, pages, window)
    group, block = dice.randrange(1, 4), dice.randrange(1, 9)
    assert hit_policies.block_groups(stored, group, block) == naive_groups(stored, group, block)
    assert hit_policies.leading(stored) == max(naive_all(stored, len(stored)), default=0)


def test_a_longer_prefix_may_do_where_a_shorter_one_does_not() -> None:
    assert hit_policies.trailing_pages([False, True, True, False, True], 5, 2) == {3}
    assert hit_policies.trailing_pages([False, True, True, False, True], 5, 1) == {2, 3, 5}
    assert hit_policies.trailing_pages([True, True, True], 2, 1) == {1, 2}


def test_groups_lie_at_the_ends_of_whole_blocks() -> None:
    assert hit_policies.block_positions(11, 2, 4) == [2, 3, 6, 7]
    assert hit_policies.block_positions(3, 2, 4) == []
    for group, block in ((0, 4), (5, 4), (1, 0), (-1, -1)):
        assert hit_policies.block_positions(11, group, block) == []
        assert group == 5 or hit_policies.block_groups([True] * 8, group, block) == 0
