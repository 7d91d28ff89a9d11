"""What the connector for vLLM decides without vLLM, against naive models."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simm.connectors.vllm_plan import (
    BlockLayout,
    Group,
    Layer,
    Report,
    ValueLayout,
    block_layout,
    supplied,
    tainted,
)
from simm.constants import RANGES_MAX, VALUE_BYTES_MAX
from simm.errors import UsageError
from simm.schemes.groups import first_needed, restorable
from simm.schemes.vllm import connector_keys


def naive_restorable(groups: list[Group], stored: list[list[bool]], computed: int, most: int, align: int) -> int:
    """Try each length, and look at each token's block that the next token attends to."""
    best = computed
    for tokens in range(computed + align, most + 1, align):
        good = True
        for group, there in zip(groups, stored):
            window = group.window or tokens + 1
            seen = range(max(0, tokens + 1 - window), tokens)
            good &= all(there[token // group.block_tokens] for token in seen if token >= computed)
        best = tokens if good else best
    return best


def test_restorable_is_that_of_the_naive_model() -> None:
    dice = random.Random(20_261_124)
    results = set()
    for _ in range(1500):
        groups = [
            Group(("x",), dice.choice((2, 4)), dice.choice((0, 0, 3, 5, 9, 40))) for _ in range(dice.randrange(1, 4))
        ]
        computed, most = 4 * dice.randrange(4), dice.randrange(60)
        odds = dice.choice((0.5, 0.9, 0.98, 1.0))
        stored = [[dice.random() < odds for _ in range(60 // each.block_tokens + 1)] for each in groups]
        found = [
            each[computed // group.block_tokens : max(computed, most // 4 * 4) // group.block_tokens]
            for group, each in zip(groups, stored)
        ]
        got = restorable(groups, found, computed, most, 4)
        assert got == naive_restorable(groups, stored, computed, most, 4), (groups, stored, computed, most)
        results.add((got > computed, got == most // 4 * 4))
    assert len(results) > 3


def test_a_window_needs_its_last_blocks() -> None:
    assert first_needed(Group((), 4), 100) == 0
    # vLLM skips tokens before number 16 - 9 + 1 = 8 then: get_num_skipped_tokens.
    assert first_needed(Group((), 4, 9), 16) == 2
    assert first_needed(Group((), 4, 10), 16) == 1
    assert first_needed(Group((), 4, 99), 16) == 0


def test_tokens_are_from_here_if_all_that_is_loaded_for_them_is() -> None:
    """Of a window, what lies behind it is not loaded."""
    full, window = Group(("a",), 4), Group(("b",), 8, 9)
    assert supplied([full], [[True, False, True, True]], 0, 16, 4) == [True, False, True, True]
    assert supplied([full], [[False, True, True]], 8, 16, 4) == [False, True]
    both = [[True, True, True, True, False, True], [False, True, True]]
    assert supplied([full, window], both, 0, 24, 8) == [True, True, False], "of the window the last block is loaded"
    both[0][4] = True
    assert supplied([full, window], both, 0, 24, 8) == [True, True, True]
    both[1][2] = False
    assert supplied([full, window], both, 0, 24, 8) == [True, True, False]
    assert supplied([window], [[True, True, True]], 0, 24, 8) == [False, False, True], "nothing is loaded for others"


def test_what_was_computed_on_a_bad_block_is_tainted() -> None:
    tables = [[1, 2, 3, 0, 4], [1, 2, 5], [6, 7], []]
    assert tainted(tables, {3, 7, 99}) == {3, 4, 7}
    assert tainted(tables, {2}) == {2, 3, 4, 5} and tainted(tables, set()) == set()


# -- where the bytes are ----------------------------------------------------------------------------------


def test_blocks_are_where_numpy_has_them() -> None:
    dice = random.Random(7)
    pieces = set()
    for _ in range(300):
        blocks, parts = dice.randrange(1, 5), dice.choice((1, 1, 2))
        dims = [dice.randrange(1, 5) for _ in range(dice.randrange(1, 4))]
        order = dice.sample(range(len(dims)), len(dims))
        gaps = [dice.choice((0, 0, 1)) for _ in dims]
        raw = np.arange(blocks * parts * int(np.prod([d + g for d, g in zip(dims, gaps)])), dtype=np.uint16)
        raw = raw.reshape(blocks * parts, *(d + g for d, g in zip(dims, gaps)))
        view = raw[(slice(None), *(slice(0, d) for d in dims))].transpose(0, *(1 + at for at in order))
        layout = block_layout(view.shape, [each // 2 for each in view.strides], 2, blocks)
        flat = raw.reshape(-1).view(np.uint8)
        layer = Layer(0, layout)
        for block in range(blocks):
            got = b"".join(flat[at : at + length].tobytes() for at, length in layer.pieces(block))
            wanted = np.sort(view[block * parts : (block + 1) * parts].reshape(-1))  # values are positions
            assert got == wanted.tobytes()
            assert layout.size == len(got)
        pieces.add(len(layout.pieces))
    assert pieces >= {1, 2, 3}


@pytest.mark.parametrize(
    ("shape", "strides", "blocks"),
    [
        ((4, 2), (2, 1), 3),  # other blocks
        ((4, 2), (2, 1), 0),
        ((), (), 1),
        ((4, 2), (2,), 4),
        ((4, 3), (2, 1), 4),  # a block reaches into the next
        ((4, 3, 2), (6, 1, 1), 4),
        ((4, 2), (2, 0), 4),  # one element, twice
        ((4, 2), (0, 1), 4),
        ((4, 2), (-2, 1), 4),
        ((2, RANGES_MAX + 1, 2), (3 * RANGES_MAX + 3, 3, 1), 2),
    ],
)
def test_other_tensors_are_refused(shape: tuple[int, ...], strides: tuple[int, ...], blocks: int) -> None:
    with pytest.raises(UsageError):
        block_layout(shape, strides, 2, blocks)


def test_a_value_is_the_layers_one_after_the_other() -> None:
    one, other = BlockLayout(100, ((0, 10), (20, 5))), BlockLayout(50, ((0, 7),))
    value = ValueLayout([("a", Layer(1000, one)), ("b", Layer(5000, other))])
    assert value.size == 22 and value.offsets == {"a": 0, "b": 15}
    assert value.of_layer("b", 2) == [(15, 7, 5100)]
    assert value.whole(1) == [(0, 10, 1100), (10, 5, 1120), (15, 7, 5050)]


@pytest.mark.parametrize(
    "layout", [BlockLayout(1 << 30, ((0, VALUE_BYTES_MAX),)), BlockLayout(1 << 30, ((0, 1),) * RANGES_MAX)]
)
def test_blocks_too_large_for_a_value_are_refused(layout: BlockLayout) -> None:
    ValueLayout([("a", Layer(64, layout))])
    with pytest.raises(UsageError, match="block-size smaller"):
        ValueLayout([("a", Layer(64, layout)), ("b", Layer(64, BlockLayout(8, ((0, 1),))))])
    with pytest.raises(UsageError):
        ValueLayout([])


def test_keys_and_reports() -> None:
    assert connector_keys([b"\x01\xff", b"\x02"], "rank", group=3) == ["rank/3/01ff", "rank/3/02"]
    assert not Report()
    both = Report({"a"}, 1, [(0, b"x")]).add(Report({"b"}, 3, [(0, b"x")], [(1, b"y")]))
    assert both == Report({"a", "b"}, 3, [(0, b"x")] * 2, [(1, b"y")]) and both
