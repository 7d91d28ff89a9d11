"""What SiMM's connector for vLLM decides without vLLM: which blocks a prefix needs, and where a block's bytes are.

A *group* is vLLM's KV cache group: layers that share a block table. A block of a group is one value: the bytes of all
of its layers, in the group's order, each layer's as they lie in memory. A group with a sliding window needs only the
last blocks of a prefix, as far as the window of the next token reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..constants import RANGES_MAX, VALUE_BYTES_MAX
from ..errors import UsageError
from ..schemes.groups import first_needed

__all__ = ["Block", "BlockLayout", "Group", "Layer", "Load", "Plan", "Report", "ValueLayout", "block_layout", "supplied", "tainted"]  # fmt: skip  # noqa: E501


class Group(NamedTuple):
    """A KV cache group: its layers, the tokens of a block, and the tokens of its window; 0 for full attention."""

    layers: tuple[str, ...]
    block_tokens: int
    window: int = 0


class Block(NamedTuple):
    """A block of the engine's memory, and what it holds: its group's position, its number, and vLLM's hash."""

    group: int
    number: int
    hash: bytes


@dataclass
class Load:
    """Blocks that a request waits for. ``generation`` None: there is nothing to read any more, and all of it fails."""

    request: str
    generation: str | None
    blocks: list[Block]


@dataclass
class Plan:
    """What the workers do in a step.

    Blocks to store are given by the generation under which they are. ``failures``: how many failed steps the scheduler
    knows of, see ``vllm_worker.py``. ``idle``: the step computes nothing. ``number``: how many plans there were that
    count, with this one; 0 if nobody has counted.
    """

    loads: list[Load] = field(default_factory=list)
    saves: dict[str, list[Block]] = field(default_factory=dict)
    failures: int = 0
    idle: bool = False
    number: int = 0

    @property
    def counts(self) -> bool:
        """Whether anything is lost if no worker begins this step."""
        return bool(self.loads) or not self.idle


@dataclass
class Report:
    """What the workers tell the scheduler: requests whose load failed, steps that failed, blocks stored and gone."""

    failed: set[str] = field(default_factory=set)
    failures: int = 0
    #: (group, hash) of each block, once for each rank that has stored it.
    stored: list[tuple[int, bytes]] = field(default_factory=list)
    gone: list[tuple[int, bytes]] = field(default_factory=list)
    #: A step of the model has failed: what is computed after it may be wrong.
    broken: bool = False

    def __bool__(self) -> bool:
        """Return whether there is anything to tell."""
        return bool(self.failed or self.failures or self.stored or self.gone or self.broken)

    def add(self, other: Report) -> Report:
        """Return this report with that of another rank added."""
        self.failed |= other.failed
        self.failures = max(self.failures, other.failures)
        self.stored += other.stored
        self.gone += other.gone
        self.broken = self.broken or other.broken
        return self


def supplied(
    groups: Sequence[Group], flags: Sequence[Sequence[bool]], computed: int, tokens: int, align: int
) -> list[bool]:  # fmt: skip
    """Return for each ``align`` tokens of a prefix from ``computed`` on if all blocks that are loaded for them are so.

    False where none is, as behind a window. ``flags``: by group of each block from the one at ``computed`` on.
    O(blocks).
    """
    found = []
    for start in range(computed, tokens, align):
        loaded = [
            of_group[block - computed // group.block_tokens]
            for group, of_group in zip(groups, flags)
            for block in range(start // group.block_tokens, (start + align) // group.block_tokens)
            if block >= first_needed(group, tokens)
        ]
        found.append(bool(loaded) and all(loaded))
    return found


def tainted(tables: Iterable[Sequence[int]], bad: Set[int]) -> set[int]:
    """Return the blocks of requests, by their block tables, that are not as computed: the bad ones and all behind them.

    O(blocks). Block 0 is vLLM's empty one.
    """
    found: set[int] = set()
    for table in tables:
        first = next((at for at, block in enumerate(table) if block in bad), len(table))
        found.update(block for block in table[first:] if block)
    return found


# -- where a block's bytes are -----------------------------------------------------------------------------


class BlockLayout(NamedTuple):
    """Where a layer's blocks are: block ``b`` has ``pieces``, (offset, bytes) each, from ``b * stride`` bytes on."""

    stride: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """The bytes of a block."""
        return sum(length for _, length in self.pieces)


class Layer(NamedTuple):
    """A layer's memory: the address of block 0, and the form of all of them."""

    address: int
    layout: BlockLayout

    def pieces(self, block: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of each piece of a block."""
        base = self.address + block * self.layout.stride
        return [(base + offset, length) for offset, length in self.layout.pieces]


def block_layout(shape: Sequence[int], strides: Sequence[int], itemsize: int, blocks: int) -> BlockLayout:
    """Return where the blocks of a tensor are, of its shape and its strides in elements. O(pieces of a block).

    The first dimension counts the blocks, or parts of equal size of which a block has several. The bytes of a block
    are taken in the order of their addresses, whatever the order of the other dimensions.

    Raises UsageError for a tensor of another form, and for one whose blocks overlap or have too many pieces.
    """
    parts, rest = divmod(shape[0], blocks) if shape and blocks > 0 else (0, 0)
    if not parts or rest or len(shape) != len(strides):
        raise UsageError(f"a KV cache of the shape {tuple(shape)} is not {blocks} blocks")
    dims = sorted((stride, count) for stride, count in zip(strides[1:], shape[1:]) if count > 1)
    if any(stride <= 0 for stride in (strides[0], *(stride for stride, _ in dims))):
        raise UsageError(f"a KV cache with the strides {tuple(strides)} repeats its elements")
    run = 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    pieces = parts
    for _, count in dims:
        pieces *= count
    if pieces > RANGES_MAX:
        raise UsageError(f"a block of a KV cache lies in {pieces} pieces of memory, {RANGES_MAX} at most")
    offsets = [0]
    for stride, count in reversed(dims):
        offsets = [offset + number * stride for offset in offsets for number in range(count)]
    offsets = sorted(part * strides[0] + offset for part in range(parts) for offset in offsets)
    merged: list[tuple[int, int]] = []
    for offset in offsets:
        start, length = merged[-1] if merged else (0, 0)
        if merged and offset < start + length:
            raise UsageError(f"a KV cache with the strides {tuple(strides)} has blocks that overlap")
        if merged and offset == start + length:
            merged[-1] = (start, length + run)
        else:
            merged.append((offset, run))
    if blocks > 1 and shape[0] > 1 and merged[-1][0] + merged[-1][1] > parts * strides[0] and len(merged) == 1:
        raise UsageError(f"a KV cache with the strides {tuple(strides)} has blocks that overlap")
    return BlockLayout(
        parts * strides[0] * itemsize, tuple((start * itemsize, length * itemsize) for start, length in merged)
    )


_NO_LAYERS: Final = "a KV cache group without layers"


class ValueLayout:
    """How a group's blocks are values: where in a value each layer begins.

    Raises UsageError if a block is too large for a value, or has too many pieces.
    """

    def __init__(self, layers: Sequence[tuple[str, Layer]]) -> None:
        if not layers:
            raise UsageError(_NO_LAYERS)
        self.layers = dict(layers)
        self.offsets: dict[str, int] = {}
        size = pieces = 0
        for name, layer in layers:
            self.offsets[name] = size
            size += layer.layout.size
            pieces += len(layer.layout.pieces)
        self.size = size
        if size > VALUE_BYTES_MAX or pieces > RANGES_MAX:
            raise UsageError(
                f"a block has {size} bytes in {pieces} pieces, a value {VALUE_BYTES_MAX} in {RANGES_MAX} at most: make "
                "--block-size smaller"
            )

    def of_layer(self, name: str, block: int) -> list[tuple[int, int, int]]:
        """Return (offset in the value, bytes, address) of each piece of a layer's block."""
        at = self.offsets[name]
        found = []
        for address, length in self.layers[name].pieces(block):
            found.append((at, length, address))
            at += length
        return found

    def whole(self, block: int) -> list[tuple[int, int, int]]:
        """Return :meth:`of_layer` of all layers."""
        return [piece for name in self.layers for piece in self.of_layer(name, block)]
