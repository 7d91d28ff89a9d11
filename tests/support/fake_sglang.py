"""What simm.connectors.sglang needs of SGLang, for tests without it: two classes, and a host pool over numpy.

``install`` puts the modules in place; the connector is then imported anew, and gone again with the test.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.fake_modules import imported_over


class PoolName(str, enum.Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: Any = PoolHitPolicy.ALL_PAGES
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class HiCacheStorage:
    pass


@dataclass
class Config:
    """``HiCacheStorageConfig``, with the defaults of one rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    model_name: str | None = "model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None


@dataclass
class Served:
    """What the engine was started with."""

    model_path: str = "/models/model"
    revision: str | None = None
    quantization: str | None = None
    json_model_override_args: str = "{}"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    weight_version: str = "default"
    speculative_algorithm: str | None = None
    #: What SGLang has made of settings that it decides by itself.
    features: types.SimpleNamespace = field(default_factory=types.SimpleNamespace)


class _Tensor:
    """An array with what registration asks of a tensor."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return True

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(type="cpu")


@dataclass
class Pool:
    """A host pool of ``pages`` pages, each in ``parts`` pieces of ``part_bytes`` that lie far from each other."""

    pages: int = 8
    parts: int = 2
    part_bytes: int = 96
    page_size: int = 4
    layout: str = "page_first"
    dtype: str = "bfloat16"
    layer_num: int = 2
    start_layer: int = 0
    end_layer: int = 1
    heads: int | None = 4
    logical: bool = False
    raw: Any = field(init=False)

    def __post_init__(self) -> None:
        self.raw = np.zeros((self.parts, self.pages, self.part_bytes), np.uint8)
        self.kv_buffer = None if self.logical else _Tensor(self.raw)
        if self.heads is not None:
            self.head_num = self.heads

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        base = self.raw.__array_interface__["data"][0]
        rows = [int(index) // self.page_size for index in indices[:: self.page_size]]
        found = [base + (part * self.pages + row) * self.part_bytes for row in rows for part in range(self.parts)]
        return found, [self.part_bytes] * len(found)

    def get_split_heads_page_buffer_meta(self, indices: Any, groups: int) -> tuple[list[int], list[int]]:
        whole, _ = self.get_page_buffer_meta(indices)
        size = self.part_bytes // groups
        pages = [whole[at : at + self.parts] for at in range(0, len(whole), self.parts)]
        found = [part + group * size for page in pages for group in range(groups) for part in page]
        return found, [size] * len(found)

    def indices(self, *rows: int) -> Any:
        """Return the token indices of pages, as SGLang names them."""
        return np.array([row * self.page_size + token for row in rows for token in range(self.page_size)])


@contextmanager
def install(served: Served | None) -> Iterator[Any]:
    """Yield simm.connectors.sglang over the fake; ``served`` None: the engine has published nothing."""
    storage = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    for each in (HiCacheStorage, PoolName, PoolTransferResult):
        setattr(storage, each.__name__, each)
    context = types.ModuleType("sglang.srt.runtime_context")

    def published() -> Served:
        if served is None:
            raise ValueError("not published")
        return served

    context.get_serving = context.get_server_args = published  # type: ignore[attr-defined]
    context.get_exec = published  # type: ignore[attr-defined]
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    modules = {name: types.ModuleType(name) for name in names}
    modules["sglang.srt"].runtime_context = context  # type: ignore[attr-defined]
    modules |= {storage.__name__: storage, context.__name__: context}
    with imported_over("simm.connectors.sglang", modules) as imported:
        yield imported
