"""A transformer in plain torch, for ``ttft.py``: prefill over a prefix of keys and values that are there already.

The architecture is that of current open models: RMSNorm before each part, rotary embeddings (Su et al., RoFormer,
2021), grouped-query attention (Ainslie et al., 2023), SwiGLU (Shazeer, 2020), embeddings tied to the output. Weights
are drawn from a seed: the time to the first token does not depend on what they are.

Keys and values live in a pool of blocks, as in an engine. Prompts are computed block by block. A block is therefore
computed by the same operations on the same shapes, whether those before it were computed or loaded, and the logits are
equal bit by bit. A wrong byte, or a block that was never loaded, shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6
ROPE_BASE = 500_000.0


class Shape(NamedTuple):
    """The size of a model: layers, widths, heads and vocabulary."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Weights of all matrices and norms; the embedding counts once."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden + self.hidden

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head * itemsize


SIZES = {
    "tiny": Shape(2, 64, 4, 2, 128, 512),
    "small": Shape(8, 512, 8, 2, 1408, 8192),
    "medium": Shape(16, 896, 14, 2, 2432, 32_000),
    "full": Shape(28, 1280, 20, 4, 3456, 32_000),
    # As the open models of 8 billion parameters: 128 KiB of keys and values a token.
    "gpu": Shape(32, 4096, 32, 8, 14_336, 128_256),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Pool:
    """Memory for the keys and values of one sequence, in blocks: (blocks, layers, 2, tokens, KV heads, head size).

    A block's bytes are contiguous: one value of a store. ``memory``: bytes to use, of :meth:`nbytes`. On a GPU they are
    a tensor, else an array of numpy.
    """

    def __init__(
        self, shape: Shape, blocks: int, block: int, dtype: torch.dtype, memory: Any = None, device: str = "cpu"
    ) -> None:
        self.shape = shape
        self.block = block
        self.blocks = blocks
        self.dtype = dtype
        self.layers = shape.layers
        self.device = device
        size = self.nbytes(shape, blocks, block, dtype)
        if device == "cpu":
            self.memory = np.empty(size, dtype=np.uint8) if memory is None else memory
            every = torch.from_numpy(self.memory)
        else:
            self.memory = every = torch.zeros(size, dtype=torch.uint8, device=device)
        self.block_bytes = size // blocks
        self._all = every.view(dtype)
        self._all = self._all.view(blocks, shape.layers, 2, block, shape.kv_heads, shape.head)

    @staticmethod
    def nbytes(shape: Shape, blocks: int, block: int, dtype: torch.dtype) -> int:
        return blocks * block * shape.kv_bytes(dtype.itemsize)

    def twin(self) -> Pool:
        """Return another pool of the same size."""
        return Pool(self.shape, self.blocks, self.block, self.dtype, device=self.device)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer: (blocks, tokens, KV heads, head size)."""
        return self._all[:, number, 0], self._all[:, number, 1]

    def rows(self) -> list[Any]:
        """Return the bytes of each block."""
        return [self.memory[n * self.block_bytes : (n + 1) * self.block_bytes] for n in range(self.blocks)]

    def spoil(self) -> None:
        """Overwrite all with NaN: what is then read without being loaded makes the logits NaN."""
        if self.device == "cpu":
            self.memory.fill(0xFF)
        else:
            self.memory.fill_(0xFF)
            torch.cuda.synchronize()

    def draw(self) -> None:
        """Overwrite all with random bytes, the same ones each time."""
        if self.device == "cpu":
            self.memory[:] = np.frombuffer(np.random.default_rng(1).bytes(self.memory.nbytes), dtype=np.uint8)
        else:
            torch.manual_seed(1)
            self.memory.random_(256)

    def draw_normal(self, seed: int) -> None:
        """Overwrite all with values that a model could have computed: finite ones, around zero, of a seed."""
        self._all.normal_(generator=torch.Generator(device=self.device).manual_seed(seed))

    def copy_from(self, other: Pool, start: int, end: int) -> None:
        """Copy blocks ``start`` to ``end`` of another pool."""
        for layer in range(self.layers):
            for mine, theirs in zip(self.layer(layer), other.layer(layer)):
                mine[start:end] = theirs[start:end]

    def same(self, other: Pool, end: int) -> bool:
        """Return whether the first ``end`` blocks have the bytes of another pool's."""
        bits = torch.int32 if self.dtype.itemsize == 4 else torch.int16  # NaN is not equal to itself
        return all(
            torch.equal(mine[:end].view(bits), theirs[:end].view(bits))
            for layer in range(self.layers)
            for mine, theirs in zip(self.layer(layer), other.layer(layer))
        )


class LayerPool(Pool):
    """The same by layers, as vLLM has it and LMCache wants it: (2, blocks, tokens, KV heads, head size) each."""

    #: LMCache takes block 0 for one that is absent.
    SPARE = 1

    def __init__(self, shape: Shape, blocks: int, block: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.block = block
        self.blocks = blocks
        self.dtype = dtype
        self.layers = shape.layers
        self.block_bytes = self.nbytes(shape, 1, block, dtype)
        size = (2, blocks + self.SPARE, block, shape.kv_heads, shape.head)
        self.tensors = [torch.empty(size, dtype=dtype) for _ in range(shape.layers)]

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tensors[number][0, self.SPARE :], self.tensors[number][1, self.SPARE :]

    def spoil(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(math.nan)


class Model:
    """A transformer of a shape, with weights of a seed, on a device."""

    def __init__(self, shape: Shape, seed: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        draw = torch.Generator(device=device).manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw, device=device).mul_(columns**-0.5).to(dtype)

        wide = shape.head * (shape.heads + 2 * shape.kv_heads)
        self._embedding = matrix(shape.vocabulary, shape.hidden)
        self._layers = [
            (
                torch.ones(shape.hidden, dtype=dtype, device=device), matrix(wide, shape.hidden),
                matrix(shape.hidden, shape.hidden), torch.ones(shape.hidden, dtype=dtype, device=device),
                matrix(2 * shape.inner, shape.hidden), matrix(shape.hidden, shape.inner),
            )
            for _ in range(shape.layers)
        ]  # fmt: skip
        self._norm = torch.ones(shape.hidden, dtype=dtype, device=device)
        steps = torch.arange(0, shape.head, 2, dtype=torch.float32, device=device)
        self._frequencies = ROPE_BASE ** (-steps / shape.head)

    def prefill(
        self, prompt: Sequence[int], pool: Pool, there: int = 0, ready: Callable[[int], None] | None = None
    ) -> Tensor:
        """Return the logits behind the prompt's last token. The pool's first ``there`` blocks are not computed.

        ``ready``: is called with each layer's number before the layer's part of these blocks is read. Writes keys and
        values of all other tokens to the pool. ``there`` blocks must end before the last token.
        """
        if not 0 <= there * pool.block < len(prompt) <= pool.blocks * pool.block:
            room = pool.blocks * pool.block
            raise ValueError(f"{there} blocks of {pool.block} are there, for {len(prompt)} tokens in a pool of {room}")
        tokens = torch.tensor(prompt, dtype=torch.int64, device=self.device)
        hidden = self._embedding
        with torch.inference_mode():
            for number in range(there, -(-len(prompt) // pool.block)):
                hidden = self._block(tokens[number * pool.block : (number + 1) * pool.block], pool, number, ready)
            last = functional.rms_norm(hidden[-1], hidden.shape[1:], self._norm, EPSILON)
            return functional.linear(last, self._embedding).float()

    def _block(
        self, tokens: Tensor, pool: Pool, number: int, ready: Callable[[int], None] | None
    ) -> Tensor:
        """Return the last layer's output for the tokens of one block. The blocks before it must be in the pool."""
        shape, count, start = self.shape, len(tokens), number * pool.block
        end, groups = start + count, shape.heads // shape.kv_heads
        turn = self._turn(start, end)
        # Each token sees itself and all before it. The query heads that share a key are rows of one attention.
        mask = torch.ones(count, end, dtype=torch.bool, device=self.device).tril_(start).repeat(groups, 1)
        x = functional.embedding(tokens, self._embedding)
        for layer, (norm_in, qkv, out, norm_mid, gate_up, down) in enumerate(self._layers):
            mixed = functional.linear(functional.rms_norm(x, x.shape[1:], norm_in, EPSILON), qkv)
            q, k, v = mixed.view(count, -1, shape.head).split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            if ready is not None:
                ready(layer)
            keys, values = pool.layer(layer)
            keys[number, :count], values[number, :count] = rotated(k, turn), v
            seen_k, seen_v = (
                each[: number + 1].reshape(-1, shape.kv_heads, shape.head)[:end].transpose(0, 1)
                for each in (keys, values)
            )
            asked = rotated(q, turn).view(count, shape.kv_heads, groups, shape.head).permute(1, 2, 0, 3)
            found = functional.scaled_dot_product_attention(
                asked.reshape(1, shape.kv_heads, groups * count, shape.head), seen_k[None], seen_v[None], attn_mask=mask
            )
            found = found.view(shape.kv_heads, groups, count, shape.head).permute(2, 0, 1, 3)
            x = x + functional.linear(found.reshape(count, shape.hidden), out)
            gate, up = functional.linear(functional.rms_norm(x, x.shape[1:], norm_mid, EPSILON), gate_up).chunk(2, 1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return x

    def _turn(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(start, end, dtype=torch.float32, device=self.device)[:, None] * self._frequencies
        return angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys (tokens, heads, head size) turned by their positions."""
    cos, sin = turn
    first, second = x.chunk(2, 2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), 2)


def faster_dtype(shape: Shape, rows: int) -> str:
    """Return the data type in which this processor multiplies a block by a layer's largest matrix faster."""
    import time

    spent = {}
    for name, dtype in DTYPES.items():
        left, right = (torch.ones(n, shape.hidden, dtype=dtype) for n in (rows, 2 * shape.inner))
        functional.linear(left, right)
        started = time.perf_counter()
        for _ in range(3):
            functional.linear(left, right)
        spent[name] = time.perf_counter() - started
    return min(spent, key=lambda name: spent[name])
