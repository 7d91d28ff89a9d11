"""Who uses the face of Mooncake's store, and what its keys are.

The face is told keys, and not how they were made. So it looks who sets it up: SGLang's backend, vLLM's connector and
LMCache's connector for Mooncake are known by their classes. Of others nothing is registered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from ...errors import UsageError
from ...schemes.scheme import Scheme
from . import of_lmcache, of_sglang, of_vllm
from .callers import caller, local_values
from .registrar import NotYet, under_names

#: Of SGLang, vLLM and LMCache: where the class is that sets the store up, and its name.
_SGLANG: Final = ("sglang.srt.mem_cache.storage.mooncake_store", "MooncakeStore")
_VLLM: Final = ("vllm.distributed.kv_transfer.kv_connector.v1.mooncake", "MooncakeStoreWorker")
_LMCACHE: Final = ("lmcache.v1.storage_backend.connector", "MooncakestoreConnector")

#: Returns the schemes of a user's keys, of options that say in which scope they are. Raises UsageError for none.
Maker = Callable[[dict[str, Any]], list[Scheme]]


def user() -> Maker | None:
    """Return how the keys of the store's user are made: of whoever calls ``setup``. None for one that is not known."""
    backend = caller(*_SGLANG)
    if backend is not None:
        return lambda scope: _sglang(backend(), scope)
    worker, made_with = caller(*_VLLM), local_values(("vllm_config", "kv_cache_config"))
    if worker is not None and made_with is not None:
        config = made_with[0]
        return lambda scope: _vllm(worker(), config, scope)
    connector, made_with = caller(*_LMCACHE), local_values(("local_cpu_backend", "lmcache_config"))
    if connector is not None and made_with is not None:
        cpu = made_with[0]
        return lambda scope: _lmcache(cpu.config, cpu.metadata, scope)
    return None


def _sglang(backend: Any, scope: dict[str, Any]) -> list[Scheme]:
    """Return the keys of SGLang's backend. The first rank tells them of all."""
    config, host = getattr(backend, "storage_config", None), getattr(backend, "mem_pool_host", None)
    if config is None or host is None:
        raise NotYet
    if config.tp_rank or config.pp_rank or getattr(config, "attn_cp_rank", 0) or getattr(config, "dcp_rank", 0):
        return []
    if max(getattr(config, name, 1) or 1 for name in ("attn_cp_size", "dcp_size")) > 1:
        raise UsageError("pages are split by tokens: it is not known what a prefix needs")
    if set(map(str, getattr(backend, "registered_pools", None) or ())) - {"kv"}:
        raise UsageError("it is not known what a prefix needs of a hybrid model's pools")
    extra = dict(config.extra_config or {})
    options: dict[str, Any] = {
        **scope, **of_sglang.paging_of(), "model_name": str(config.model_name or ""), "mla": bool(config.is_mla_model)
    }  # fmt: skip
    if extra.get("extra_backend_tag") is not None:
        options["tag"] = str(extra["extra_backend_tag"])
    if config.should_split_heads:
        options["split"] = int(backend.split_factor)
    name = config.model_name or "default"
    page = max(1, int(getattr(host, "page_size", 1) or 1))
    return [Scheme(str(name), "sglang-mooncake", page, int(config.tp_size), int(config.pp_size), options=options)]


def _vllm(worker: Any, config: Any, scope: dict[str, Any]) -> list[Scheme]:
    """Return the keys of vLLM's connector. The first rank tells them of all."""
    if not hasattr(worker, "token_dbs"):
        raise NotYet
    if worker.tp_rank or worker.pp_rank or worker.pcp_rank or worker.dcp_rank:
        return []
    factors = set(worker._group_tp_replication_factors)
    if worker.pcp_size > 1 or worker.dcp_size > 1 or worker.store_tp_size is not None or len(factors) != 1:
        raise UsageError("of this layout of vLLM's Mooncake connector it is not known what a prefix needs")
    metadata = worker.token_dbs[0].store_layout.metadata
    listed = [
        (at, int(group.kv_cache_spec.block_size), of_vllm.window_of(group.kv_cache_spec))
        for at, group in enumerate(worker._kv_cache_groups)
    ]
    groups = of_vllm.Groups(listed, int(worker.hash_block_size))
    options = {
        **scope, **of_vllm.hashing_of(config).options, **groups.options,
        "model_name": f"{metadata.model_name}{metadata.store_namespace}", "prefix": str(metadata.cache_prefix),
    }  # fmt: skip
    names = of_vllm.names_of(config)
    ranks = int(worker.tp_size) // factors.pop()
    scheme = Scheme("any", "vllm-mooncake", groups.page, ranks, int(worker.pp_size), options=options)
    return under_names(scheme, names)


def _lmcache(config: Any, metadata: Any, scope: dict[str, Any]) -> list[Scheme]:
    """Return the keys of LMCache's connector."""
    dtypes = getattr(sys.modules.get("lmcache.utils"), "TORCH_DTYPE_TO_STR_DTYPE", {})
    return of_lmcache.engine_schemes(config, metadata, dtypes, scope)
