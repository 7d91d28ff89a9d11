"""What of a prompt can be restored out of stored blocks: of one KV cache group, or of several of a hybrid model.

A group with a sliding window needs only the last blocks of a prefix, as far as the window of the next token reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Windowed(Protocol):
    """A KV cache group: the tokens of a block, and the tokens of its window; 0 for full attention."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def window(self) -> int: ...


class GroupKeys(NamedTuple):
    """The keys of a prompt's full blocks in one group, ``per_block`` for each: a block is there if all of them are."""

    block_tokens: int
    window: int
    per_block: int
    keys: list[str]

    def range(self, first: int, end: int) -> list[str]:
        """Return the keys of the blocks from ``first`` to before ``end``."""
        return self.keys[first * self.per_block : end * self.per_block]


def first_needed(group: Windowed, tokens: int) -> int:
    """Return the first block of a prefix that the next token attends to. O(1)."""
    return max(0, tokens - group.window + 1) // group.block_tokens if group.window else 0


def restorable(
    groups: Sequence[Windowed], found: Sequence[Sequence[bool]], computed: int, most: int, align: int
) -> int:  # fmt: skip
    """Return how many tokens of a prefix can be had: ``computed``, or more. O(blocks).

    ``found``: for each group whether each block from the one at ``computed`` on is stored. ``computed``: tokens that
    the engine has, a multiple of ``align``, as the result is. ``most``: the result's bound.
    """
    runs: list[list[int]] = []
    for group, there in zip(groups, found):
        first = computed // group.block_tokens
        run = first
        ending = [run]
        for hit in there:
            run = run + 1 if hit else 0
            ending.append(run)
        runs.append(ending)
    for tokens in range(most // align * align, computed, -align):
        for group, ending in zip(groups, runs):
            block, first = tokens // group.block_tokens, computed // group.block_tokens
            if block - first >= len(ending) or ending[block - first] < block - first_needed(group, tokens):
                break
        else:
            return tokens
    return computed
