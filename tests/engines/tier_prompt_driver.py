"""Stores prompts by SiMM's tier in the released vLLM's tiering manager, under vLLM's own hashes.

The tests start it as a process. vLLM's connector refuses a CPU, so this drives the manager in its place, as
``vllm_driver.py`` does. The hashes of blocks are those of vLLM's own requests. The tier finds with its callers what
vLLM's connector has there: its configuration, and that of its KV cache.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import engine_content
import torch
from driver_steps import registered, results_of
from vllm import SamplingParams
from vllm.config import CacheConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request
from vllm_driver import CHUNKS, Case, Engine

BLOCK = 16


class Prompt(Engine):
    """A manager whose chunks are those of a prompt."""

    hashes: list[Any]

    def keys(self) -> list[Any]:
        return [make_offload_key(each, 0) for each in self.hashes]


def write(manager: str, seed: int, step: dict[str, Any]) -> dict[str, Any]:
    """Store a prompt; return the digests of its chunks, and how many of them were stored."""
    algorithm = step["algorithm"]
    digest = get_hash_fn_by_name(algorithm)
    init_none_hash(digest)
    tokens = engine_content.tokens(seed, step["prompt"], CHUNKS * BLOCK + 5)
    request = Request(
        "request", tokens, SamplingParams(max_tokens=1), None, cache_salt=step.get("salt"),
        block_hasher=get_request_block_hasher(BLOCK, digest),
    )  # fmt: skip
    cache: Any = CacheConfig(prefix_caching_hash_algo=algorithm)
    vllm_config = SimpleNamespace(
        cache_config=cache, model_config=SimpleNamespace(model=step["model"], served_model_name=step["served"])
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv_cache_config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layers.0", "layers.1"], spec)])
    assert vllm_config and kv_cache_config, "as they are named where vLLM's connector makes its tiers"
    made = Prompt(Case(step["prompt"], model=step["model"]), manager)
    made.hashes = list(request.block_hashes)
    try:
        stored = made.store(seed)
        registered()
        return {"stored": stored, "written": [each.hex() for each in made.tier._digests(made.keys())]}
    finally:
        made.manager.shutdown()


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps = results_of(request["steps"], lambda step: write(request["manager"], request["seed"], step))
    print(json.dumps({"steps": steps}), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
