"""What vLLM's configuration says of keys: the hash of blocks, the KV cache groups, and the model's names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, Final, NamedTuple

from ...errors import UsageError
from ...schemes import vllm
from ...schemes.scheme import LIST_MAX, as_groups

#: Kinds of groups whose blocks are of their tokens alone, and of which it is known what a prefix needs.
KINDS: Final = frozenset(("full_attention", "mla_attention", "sliding_window", "sliding_window_mla"))


class Hashing(NamedTuple):
    """How an engine hashes blocks."""

    algorithm: str
    seed: str

    @property
    def options(self) -> dict[str, str]:
        """The options of a registration."""
        return {"algorithm": self.algorithm, "seed": self.seed}


def hashing_of(vllm_config: Any) -> Hashing:
    """Return how an engine hashes blocks. Raises UsageError where that cannot be done elsewhere.

    Algorithms that need a library are left out. Of these vLLM also keeps the seed secret.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in vllm.ALGORITHMS:
        raise UsageError(f"blocks are hashed by {algorithm}: use --prefix-caching-hash-algo {vllm.ALGORITHMS[0]}")
    return Hashing(algorithm, seed())


def seed() -> str:
    """Return the seed of this process's hashes. Raises UsageError for a random one, as vLLM before 0.32 has."""
    own = os.environ.get("PYTHONHASHSEED")
    if own is not None:
        return own
    module = sys.modules.get("vllm.v1.core.kv_cache_utils")
    known = getattr(module, "get_none_hash_seed", None)
    if module is not None and known is None:
        raise UsageError("this vLLM hashes with a random seed: set PYTHONHASHSEED")
    return str(known()) if known is not None else vllm.DEFAULT_SEED


def names_of(vllm_config: Any, more: object = None) -> list[str]:
    """Return the names by which requests may call a model, the served one first."""
    model = vllm_config.model_config
    served = getattr(model, "served_model_name", None)
    listed = list(served) if isinstance(served, (list, tuple)) else [served]
    return [str(each) for each in dict.fromkeys((*listed, more, model.model)) if each]


class Groups(NamedTuple):
    """The KV cache groups of a deployment, as an engine's blocks or chunks are stored.

    Attributes:
        listed: of each its number in keys, the tokens of a block, and of its window; 0 for full attention.
        hash_tokens: tokens that a hash covers.
    """

    listed: Sequence[tuple[int, int, int]]
    hash_tokens: int

    @property
    def page(self) -> int:
        """Tokens after which all groups have a full block."""
        return lcm(*(tokens for _, tokens, _ in self.listed))

    @property
    def options(self) -> dict[str, str | int]:
        """The options of a registration."""
        return {"groups": as_groups(self.listed), "hash_tokens": self.hash_tokens}


def window_of(spec: Any) -> int:
    """Return the window of a KV cache group, 0 for full attention. Raises UsageError for another kind of group."""
    interface: Any = sys.modules["vllm.v1.kv_cache_interface"]
    kind = str(interface.get_kv_cache_spec_kind(spec).value)
    window = int(interface.get_kv_cache_spec_sliding_window(spec) or 0)
    if kind not in KINDS or (kind.startswith("sliding_window") and not window):
        raise UsageError(f"it is not known what a prefix needs of layers of the kind {kind}")
    return window


def adapters(paths: Mapping[str, str]) -> dict[str, str]:
    """Return the option of a registration that says where adapters are, as many as fit, the last ones first."""
    kept: dict[str, str] = {}
    for name, path in reversed(list(paths.items())):
        if len(json.dumps({**kept, name: path})) > LIST_MAX:
            break
        kept[name] = path
    return {"loras": json.dumps(kept)} if kept else {}
