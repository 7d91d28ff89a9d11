"""SGLang: the hashes of pages, and the keys of its storage backends. As of SGLang 0.5.23.

A page's hash is the SHA-256 of the hash of the page before it and of its token ids, each in 4 little-endian bytes. A
request with an ``extra_key`` or a ``cache_salt`` has a chain of its own, which begins with a hash of the two.

Backend ``simm`` appends ranks and parts: ``{hash}_{tp}_k`` and ``_v``, ``{hash}__k`` for MLA, whose pages are the same
on every rank. Backend ``mooncake`` does the same behind a prefix, has more pools, and splits heads between ranks of
different TP widths. The unified scheme names no rank, but layers and heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .encodings import check_block, packed, short_key, token_array

#: Pools of the backend ``mooncake`` that store one object for a page, the same on every rank.
PACKED_POOLS: Final = frozenset((
    "indexer", "draft_indexer", "deepseek_v4_c1", "deepseek_v4_c1_indexer", "deepseek_v4_c1_indexer_scale",
    "deepseek_v4_c2", "deepseek_v4_c2_indexer", "deepseek_v4_c2_indexer_scale", "deepseek_v4_c4",
    "deepseek_v4_c4_rope", "deepseek_v4_c4_indexer", "deepseek_v4_c4_indexer_scale", "deepseek_v4_c128",
    "deepseek_v4_c128_rope", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state", "deepseek_v4_c128_state",
))  # fmt: skip
UNIFIED_LAYOUT: Final = "page-unified-v1"


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> str | None:
    """Return the hash with which the chain of a request begins; None without both."""
    if extra_key is None and cache_salt is None:
        return None
    seed = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            seed.update(b"\x00")
        else:
            raw = part.encode()
            seed.update(b"\x01" + len(raw).to_bytes(8, "little") + raw)
    return seed.hexdigest()


def page_hashes(
    tokens: Sequence[int] | NDArray[Any], page_size: int, *, extra_key: str | None = None,
    cache_salt: str | None = None, bigram: bool = False,
) -> list[str]:  # fmt: skip
    """Return the hash of each full page. O(tokens).

    ``bigram``: as with EAGLE, whose pages are of pairs of neighbouring tokens.

    Raises UsageError for what is no list of token ids, or no page size.
    """
    check_block(page_size)
    ids = token_array(tokens)
    if bigram:
        ids = np.stack((ids[:-1], ids[1:]), axis=1).reshape(-1) if len(ids) > 1 else ids[:0]
        page_size *= 2
    seed = namespace_seed(extra_key, cache_salt)
    prior = b"" if seed is None else bytes.fromhex(seed)
    pages = len(ids) // page_size
    narrow = ids[: pages * page_size]
    wide = bool(narrow.size) and int(narrow.max()) > 0xFFFF_FFFF
    raw = narrow.astype("<u4").tobytes()
    step = page_size * 4
    sha256 = hashlib.sha256
    hashes = []
    for page in range(pages):
        body = raw[page * step : (page + 1) * step]
        if wide and int((each := narrow[page * page_size : (page + 1) * page_size]).max()) > 0xFFFF_FFFF:
            body = b"\xff" + each.astype("<u8").tobytes()
        digest = sha256(prior + body)
        prior = digest.digest()
        hashes.append(digest.hexdigest())
    return hashes


def event_hash(page_hash: str) -> int:
    """Return the number that SGLang's events give for a page's hash: its first 64 bits, signed."""
    number = int(page_hash[:16], 16)
    return number - (1 << 64) if number >= 1 << 63 else number


class Rank(NamedTuple):
    """A rank of an engine, and how many there are of each kind."""

    tp: int = 0
    pp: int = 0
    pp_size: int = 1


def page_keys(hashes: Sequence[str], heads: Sequence[str], *, scope: str, generation: str) -> list[str]:
    """Return the keys of SiMM's own backend (``simm.connectors.sglang``): for each page one for each of its values.

    ``scope``, ``generation`` and ``heads`` come from the backend, which registers them: they have the identity of the
    model and of its pools. O(hashes x heads).
    """
    start = f"{scope}/{generation}/"
    return [short_key(start + head + page) for page in hashes for head in heads]


def simm_keys(hashes: Sequence[str], rank: Rank = Rank(), *, mla: bool = False, tag: str | None = None) -> list[str]:  # noqa: B008
    """Return the keys of the backend ``simm`` for these pages: two for each, k and v, or with ``mla`` one.

    ``tag``: the setting ``extra_backend_tag``.
    """
    suffixes = _suffixes(rank, mla)
    return _joined(hashes if tag is None else [f"{tag}_{each}" for each in hashes], suffixes)


def _suffixes(rank: Rank, mla: bool, pool: str = "") -> list[str]:
    """Return what follows a page's hash. ``pool`` has its underscore."""
    staged = rank.pp_size > 1
    if mla:
        return [f"_{rank.pp if staged else ''}{pool}_k"]
    mine = f"{rank.tp}_{rank.pp}" if staged else f"{rank.tp}"
    return [f"_{mine}{pool}_k", f"_{mine}{pool}_v"]


def _joined(hashes: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    return [each + suffix for each in hashes for suffix in suffixes]


def mooncake_prefix(model: str = "", *, tag: str | None = None) -> str:
    """Return what the backend ``mooncake`` puts before each hash of a model."""
    parts = ([] if tag is None else [tag]) + ([model.replace("/", "-")] if model else [])
    return "_".join(parts) + "_" if parts else ""


def mooncake_keys(
    hashes: Sequence[str], rank: Rank = Rank(), *, prefix: str = "", mla: bool = False, split: int = 0,  # noqa: B008
    pool: str = "kv", convolutions: int = 0, temporal: bool = True,
) -> list[str]:  # fmt: skip
    """Return the keys of the backend ``mooncake`` for these pages of one pool.

    Args:
        rank: whose keys. A pool that is the same on every rank has none of its TP rank.
        prefix: see :func:`mooncake_prefix`.
        mla: True for a pool of that form, draft pools included.
        split: heads of a TP rank in keys of their own, ``tp_lcm_size // tp_size``; 0 without.
        pool: ``kv``, ``mamba``, ``draft``, ``draft_swa``, ``swa``, or one of ``PACKED_POOLS``.
        convolutions, temporal: the states of a pool ``mamba``.

    Raises UsageError for a pool that this backend does not have.
    """
    staged = f"_{rank.pp}" if rank.pp_size > 1 else ""
    if pool == "kv":
        ranks = [rank] if mla or not split else [rank._replace(tp=rank.tp * split + at) for at in range(split)]
        suffixes = [suffix for each in ranks for suffix in _suffixes(each, mla)]
    elif pool == "mamba":
        mine = f"_{rank.tp}{staged}"
        suffixes = [f"{mine}_temporal"] * temporal + [f"{mine}_conv_{at}" for at in range(convolutions)]
    elif pool in PACKED_POOLS or (mla and pool in ("swa", "draft_swa")):
        suffixes = [f"_{rank.pp if rank.pp_size > 1 else ''}_{pool}"]
    elif pool in ("draft", "swa", "draft_swa"):
        suffixes = _suffixes(rank, mla, f"_{pool}")
    else:
        raise UsageError(f"{pool!r} is no pool of SGLang's backend mooncake")
    return _joined([prefix + each for each in hashes], suffixes)


class Grid(NamedTuple):
    """What all deployments that share pages by the unified scheme agree on.

    ``heads`` and ``head_group``: KV heads of the model, and of an object; both 0 for pools that are the same on every
    rank. ``layers``: of an object; 0 for all that a stage has.
    """

    model: str
    dtype: str
    page_size: int
    heads: int = 0
    head_group: int = 0
    layers: int = 0
    layout: str = UNIFIED_LAYOUT

    @property
    def digest(self) -> str:
        """The part of a key that stands for the grid. Raises UsageError for a grid that cannot be."""
        if not self.model or self.page_size <= 0 or self.layers < 0 or not 0 <= self.head_group <= self.heads:
            raise UsageError(f"{self} is no grid: it needs a model, a page size, and heads in groups")
        if bool(self.heads) != bool(self.head_group) or (self.heads and self.heads % self.head_group):
            raise UsageError(f"{self.head_group} heads of an object do not divide {self.heads}")
        fields: Mapping[str, Any] = {
            "schema_version": 1, "model_id": self.model, "dtype": self.dtype, "page_size": self.page_size,
            "rank_replicated": not self.heads, "total_kv_heads": self.heads, "layer_partition": self.layers,
            "head_group": self.head_group, "object_layout": self.layout,
        }  # fmt: skip
        return "ukv1-" + hashlib.sha256(packed(dict(fields))).hexdigest()[:16]


def unified_keys(
    hashes: Sequence[str], grid: Grid, layers: tuple[int, int], heads: tuple[int, int] | None = None
) -> list[str]:
    """Return the keys of the unified scheme for these pages, of layers and heads from the first to before the second.

    ``heads`` None: all that the model has. A page's keys come by layers, and of each of these by heads.

    Raises UsageError for layers or heads that are not whole objects. The last layers may be fewer.
    """
    first, last = layers
    if not 0 <= first < last or (grid.layers and first % grid.layers):
        raise UsageError(f"layers {first} to {last} are not objects of {grid.layers} layers")
    step = grid.layers or last - first
    ranges = [f"_L{at}-{min(at + step, last)}" for at in range(first, last, step)]
    suffixes = [f"_{grid.digest}{each}" for each in ranges]
    if grid.heads:
        low, high = heads or (0, grid.heads)
        if not 0 <= low < high <= grid.heads or low % grid.head_group or high % grid.head_group:
            raise UsageError(f"heads {low} to {high} are not objects of {grid.head_group} of {grid.heads} heads")
        groups = range(low // grid.head_group, high // grid.head_group)
        suffixes = [f"{suffix}_H{group}" for suffix in suffixes for group in groups]
    return _joined(hashes, suffixes)
