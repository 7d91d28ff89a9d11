"""Groups of a hybrid model's caches: which of them count, and that all of these must have a prompt's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.index import blocks as blocks_module
from simm.index.blocks import Blocks
from simm.index.sources import Space
from tests.support.index_events import SIZE, SPACE, apply, asked, engine, prompt, removed, stored


def test_a_group_that_keeps_a_window_is_not_counted_and_all_others_must_agree() -> None:
    index = Blocks()
    source = engine(index)
    tokens = prompt(3)
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    apply(index, source, stored([11, 12, 13], tokens, **window))
    assert asked(index, tokens).matches == {}
    apply(index, source, stored([11, 12, 13], tokens, kv_cache_spec_kind="full_attention"), removed([12], group_idx=1))
    assert asked(index, tokens).matches["A"].blocks == 3
    apply(index, source, stored([11, 12], tokens[: 2 * SIZE], group_idx=2, kv_cache_spec_kind="full_attention"))
    assert asked(index, tokens).matches["A"].blocks == 2
    apply(index, source, stored([21, 22], tokens[SIZE:]), stored([31, 32], tokens[SIZE:-1]))
    assert source.ignored["not the tokens of all blocks"] == 1


def test_nothing_counts_where_one_of_several_groups_has_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event was refused, or it was forgotten for other spaces: the other group's blocks counted alone."""
    monkeypatch.setattr(blocks_module, "HOLDERS_MAX", 5)
    index = Blocks()
    source, other = engine(index), engine(index, "B")
    tokens, adapter = prompt(2), SPACE._replace(lora="x")

    def told(group: int, of: Sequence[int] = (21, 22), **more: Any) -> dict[str, Any]:
        return stored(of, tokens, group_idx=group, kv_cache_spec_kind="full_attention", **more)

    def found(space: Space) -> dict[str, int]:
        return {name: each.blocks for name, each in asked(index, tokens, space).matches.items()}

    smaller = {**told(2, [31, 32, 33, 34]), "block_size": SIZE // 2}
    apply(index, source, told(0, [11, 12]), told(1, [11, 12]), smaller)
    assert found(SPACE) == {"A": 2}, "blocks of another size are in another space"
    apply(index, source, told(0, lora_name="x"))
    apply(index, other, told(0, lora_name="x"))
    assert found(adapter) == {"B": 2} and found(SPACE) == {"A": 2}
    apply(index, source, told(1, lora_name="x"))
    assert found(adapter) == {"A": 2, "B": 2}
    apply(index, source, removed([21, 22], group_idx=1))
    assert found(adapter) == {"B": 2}
    apply(index, source, told(0, [41, 42], lora_name="y"))
    assert sum(each == adapter for each, *_ in source.holders) == 1 and found(adapter) == {"B": 2}
    apply(index, source, {"type": "AllBlocksCleared"}, told(0))
    assert not found(SPACE), "it is the same engine"
    apply(index, source, told(1))
    assert found(SPACE) == {"A": 2}


@pytest.mark.parametrize("why", ["refused", "of another size, too"])
def test_a_group_of_which_nothing_counts_yet_is_known(why: str) -> None:
    index = Blocks()
    source, tokens = engine(index), prompt(2)
    first, second = (stored([1, 2], tokens, group_idx=at, kv_cache_spec_kind="full_attention") for at in range(2))
    if why == "refused":
        apply(index, source, first, {**second, "token_ids": tokens[:-1]})
        assert source.ignored["not the tokens of all blocks"] == 1
    else:
        smaller = {**second, "block_hashes": [1, 2, 3, 4], "block_size": SIZE // 2}
        apply(index, source, first, second, smaller, {"type": "AllBlocksCleared"}, first)
    assert not asked(index, tokens).matches
    apply(index, source, second)
    assert asked(index, tokens).matches["A"].blocks == 2


def test_groups_that_are_told_of_without_tokens_may_keep_a_window() -> None:
    """vLLM tells so of a hybrid model's windows and states that it offloads, and names no kind of cache."""
    index = Blocks()
    source, tokens = engine(index), prompt(2)
    offloaded = {**stored([21], [], group_idx=1, medium="CPU"), "block_size": 0}
    apply(index, source, stored([11, 12], tokens, group_idx=0, kv_cache_spec_kind="full_attention"), offloaded)
    assert asked(index, tokens).matches["A"].blocks == 2
    apply(index, source, {"type": "AllBlocksCleared"}, offloaded, stored([11, 12], tokens, group_idx=0))
    assert asked(index, tokens).matches["A"].blocks == 2
    apply(index, source, stored([31, 32], tokens[1:] + [1], group_idx=1, kv_cache_spec_kind="full_attention"))
    assert not asked(index, tokens).matches, "a group with tokens must have them"
