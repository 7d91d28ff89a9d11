"""What simm.connectors.vllm_connector needs of vLLM, for tests without it.

``install`` puts the modules in place; the connector is then imported anew, and gone again with the test.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.fake_modules import imported_over


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    """``KVConnectorBase_V1``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._kv_cache_manager: Any = None
        self._metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


class Plain:
    """A base class without anything."""


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.data


@dataclass
class Results:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class Event:
    block_hashes: list[Any]
    medium: str | None
    token_ids: list[int] | None = None
    parent_block_hash: Any = None
    block_size: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


def extra_keys(request: Any, first: int, end: int, start_of_media: int) -> tuple[tuple[Any, ...] | None, int]:
    """``generate_block_hash_extra_keys``, of salts and images. A request is one of vLLM's, with all its fields."""
    ends = [each.mm_position.offset + each.mm_position.length for each in request.mm_features]
    assert start_of_media == len([each for each in ends if each <= first]), "it looks at these for each block"
    left = [(each.identifier, each.mm_position.offset) for each in request.mm_features[start_of_media:]]
    keys = [("mm", name, at - first) for name, at in left if at < end]
    keys += [("cache_salt", request.cache_salt)] if request.cache_salt and not first else []
    return tuple(keys) or None, 0


def untagged(blocks: Any) -> list[Any] | None:
    """``to_event_extra_keys``."""
    return [keys and tuple(key[1:] if key[0] == "mm" else key[1] for key in keys) for keys in blocks] or None


class Tensor:
    """A KV cache: a block's tokens, heads and elements."""

    def __init__(self, blocks: int, heads: int = 2, tokens: int = 4, size: int = 8, *, turned: bool = False) -> None:
        self.raw = np.zeros((blocks, *((tokens, heads) if turned else (heads, tokens)), size), np.uint16)
        self.view = self.raw.transpose(0, 2, 1, 3) if turned else self.raw
        self.device = SimpleNamespace(type="cpu")
        self.dtype: str = "float16"
        self.shape = self.view.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(each // 2 for each in self.view.strides)

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return int(self.raw.__array_interface__["data"][0])

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: self.raw.nbytes)


@dataclass
class World:
    """How an engine was started, and the rank of this process."""

    model: str = "org/model"
    revision: str | None = None
    dtype: str = "float16"
    cache_dtype: str = "auto"
    quantization: str | None = None
    kind: str = "full_attention"
    kinds: tuple[str, ...] = ()
    tokens: int = 4
    layers: int = 2
    window: int | None = None
    rank: int = 0
    tp: int = 1
    stage: int = 0
    stages: int = 1
    dcp: int = 1
    policy: str = "recompute"
    asynchronous: bool = False
    draft: str | None = None
    turned: bool = False
    heads: int = 2
    hash: str = "sha256"
    extra: dict[str, Any] = field(default_factory=dict)
    #: Further settings of vLLM's configurations, by the name of each.
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    blocks: int = 16

    def config(self) -> Any:
        of_draft = SimpleNamespace(model=self.draft)
        draft = SimpleNamespace(draft_model_config=of_draft) if self.draft else None
        made = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config={"staging_mb": 1, **self.extra}, kv_load_failure_policy=self.policy,
                is_kv_consumer=True, is_kv_producer=True,
            ),
            model_config=SimpleNamespace(
                model=self.model, revision=self.revision, dtype=self.dtype, quantization=self.quantization,
                hf_overrides={}, served_model_name="served",
            ),
            cache_config=SimpleNamespace(cache_dtype=self.cache_dtype, prefix_caching_hash_algo=self.hash),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tp, pipeline_parallel_size=self.stages, world_size=self.tp * self.stages,
                decode_context_parallel_size=self.dcp, prefill_context_parallel_size=1,
            ),
            scheduler_config=SimpleNamespace(async_scheduling=self.asynchronous), speculative_config=draft,
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True), load_config=SimpleNamespace(),
            attention_config=SimpleNamespace(), lora_config=SimpleNamespace(),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )  # fmt: skip
        made.model_config.multimodal_config = SimpleNamespace()
        places = {
            **vars(made), "multimodal_config": made.model_config.multimodal_config, "draft_model_config": of_draft,
            "draft": draft,
        }  # fmt: skip
        for name, settings in self.more.items():
            vars(places[name]).update(settings)
        return made

    def cache(self) -> Any:
        groups = [
            SimpleNamespace(
                layer_names=[f"{number}.{layer}" for layer in range(self.layers)],
                kv_cache_spec=SimpleNamespace(kind=kind, window=self.window, block_size=self.tokens),
            )
            for number, kind in enumerate(self.kinds or (self.kind,))
        ]
        stored = [at for at, each in enumerate(groups) if each.kv_cache_spec.kind != "mamba"]
        return SimpleNamespace(kv_cache_groups=groups, prefix_cacheable_group_ids=stored, num_blocks=self.blocks)

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: Tensor(self.blocks, self.heads, self.tokens, turned=self.turned)
            for group in self.cache().kv_cache_groups for name in group.layer_names
        }  # fmt: skip


@contextmanager
def install(world: World) -> Iterator[Any]:
    """Yield simm.connectors.vllm_connector over the fake; ``world`` may be changed between its connectors."""
    named: dict[str, dict[str, Any]] = {
        "vllm.distributed.kv_events": {"MEDIUM_STORAGE": "STORAGE", "BlockRemoved": Event, "BlockStored": Event},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Base, "KVConnectorHandshakeMetadata": Plain, "KVConnectorMetadata": Plain,
            "KVConnectorRole": Role, "KVConnectorTransferResults": Results, "KVConnectorWorkerMetadata": Plain,
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
            "KVConnectorPromMetrics": Plain, "KVConnectorStats": Stats,
        },
        "vllm.distributed.parallel_state": {
            "get_pp_group": lambda: SimpleNamespace(rank_in_group=world.stage),
            "get_tp_group": lambda: SimpleNamespace(rank_in_group=world.rank),
        },
        "vllm.v1.core.kv_cache_utils": {
            "generate_block_hash_extra_keys": extra_keys, "to_event_extra_keys": untagged,
            "get_none_hash_seed": lambda: "seed of the process",
            "maybe_convert_block_hash": lambda block: int.from_bytes(block[-8:], "big"),
            "resolve_kv_cache_block_sizes": lambda cache, config: (world.tokens, world.tokens),
        },
        "vllm.v1.kv_cache_interface": {
            "get_kv_cache_spec_kind": lambda spec: SimpleNamespace(value=spec.kind),
            "get_kv_cache_spec_sliding_window": lambda spec: spec.window,
        },
        "vllm.v1.metrics.cache_hit_source": {
            "CacheHitSource": SimpleNamespace(HOST="host", EXTERNAL_UNSPECIFIED="external")
        },
    }  # fmt: skip
    modules: dict[str, Any] = {}
    for name, content in named.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(modules[name]).update(content)
    with imported_over("simm.connectors.vllm_connector", modules) as imported:
        yield imported
