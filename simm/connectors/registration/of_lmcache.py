"""What LMCache's configuration says of its keys, of an engine's process and of its server."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from ...errors import UsageError
from ...schemes import vllm
from ...schemes.scheme import Scheme
from . import of_vllm
from .callers import caller
from .registrar import all_of, under_names

#: LMCache's names for vLLM's algorithms.
_ALGORITHMS: Final = {"sha256": "sha256", "sha256_cbor": "sha256_cbor", "sha256_cbor_64bit": "sha256_cbor"}
_BEGIN: Final = "it is not known how LMCache's hashes begin"
#: LMCache's part in an engine of vLLM: where the class is, which vLLM has a copy of, and its name.
_IN_VLLM: Final = (
    ("lmcache.integration.vllm", "LMCacheConnectorV1Impl"), ("vllm.distributed.kv_transfer", "LMCacheConnectorV1Impl"),
)  # fmt: skip
#: What engines in this process were found to be, by the metadata that LMCache gives each new connection of one.
_REMEMBERED: Final[dict[int, tuple[weakref.ref[Any], str]]] = {}
#: Where vLLM keeps a worker's connector.
_WORKERS: Final = "vllm.distributed.kv_transfer.kv_transfer_state"


def vllm_config() -> Any:
    """Return the configuration of the engine of vLLM that LMCache is in, None where that is not known. Never raises.

    LMCache tells its storage only a part of it. It is that of whoever calls, or of this worker, as LMCache connects
    anew in threads of its own.
    """
    for module, name in _IN_VLLM:
        part = caller(module, name)
        config = getattr(part() if part is not None else None, "_vllm_config", None)
        if config is not None:
            return config
    worker = getattr(sys.modules.get(_WORKERS), "_KV_CONNECTOR_AGENT", None)
    return getattr(worker, "_vllm_config", None)


def remembered(metadata: Any, find: Callable[[], str]) -> str:
    """Return what ``find`` has returned for this engine the first time, or call it. Raises what it raises.

    LMCache connects anew in threads of its own, where a scheduler's configuration cannot be found. The worker's, which
    vLLM changes while it loads a model, may be another one by then. Two sides of one engine must not differ.
    """
    for key, (made, _) in list(_REMEMBERED.items()):
        if made() is None:
            _REMEMBERED.pop(key, None)
    known = _REMEMBERED.get(id(metadata))
    if known is not None and known[0]() is metadata:
        return known[1]
    found = find()
    try:
        _REMEMBERED[id(metadata)] = weakref.ref(metadata), found
    except TypeError:  # another LMCache's, which nobody can refer to so: it is looked for each time
        pass
    return found


def engine_schemes(config: Any, metadata: Any, dtypes: Mapping[Any, str], more: Mapping[str, str]) -> list[Scheme]:
    """Return how LMCache makes its keys in an engine's process, by each name of the model. The first rank tells of all.

    ``dtypes``: what data types are called in keys. ``more``: options of the registration.

    Raises UsageError where nobody else can make them.
    """
    if getattr(metadata, "worker_id", 0) != getattr(metadata, "first_rank", 0):
        return []
    workers, extra = int(metadata.world_size), dict(config.extra_config or {})
    mla = bool(metadata.use_mla)
    options: dict[str, Any] = {
        **_hash_of(str(config.pre_caching_hash_algorithm)), **more, "model_name": str(metadata.model_name),
        "dtype": dtypes[metadata.kv_dtype], "layers": int(metadata.kv_shape[0]) if config.use_layerwise else 0,
    }  # fmt: skip
    if mla and extra.get("save_only_first_rank", True):
        options["mla"] = True
    elif mla and extra.get("remote_enable_mla_worker_id_as0", True):
        options["world"], workers = workers, 1
    if getattr(config, "enable_blending", False):
        raise UsageError("with blending, LMCache hashes pieces of a prompt, whatever is before them")
    scheme = Scheme("any", "lmcache", int(config.chunk_size), workers, options=options)
    return under_names(scheme, (getattr(metadata, "served_model_name", None), metadata.model_name))


def _with_vllm() -> bool:
    """Return whether LMCache finds vLLM's algorithms."""
    return "vllm.utils.hashing" in sys.modules or "vllm.utils" in sys.modules


def hashes_weakly(algorithm: str) -> bool:
    """Return whether it is easy to make a prompt to which LMCache gives the hash of a given one in this process.

    Of vLLM's algorithms it is not for SHA-256, of which LMCache keeps 64 bits: that takes some 2^64 tries. Two prompts
    of one's own with one hash take some 2^32 all the same. Without vLLM LMCache has Python's own hash alone, whatever
    its setting.
    """
    return not (_with_vllm() and algorithm.startswith("sha256"))


def _hash_of(algorithm: str) -> dict[str, str | int]:
    """Return the options that say how LMCache hashes in this process, which has vLLM or not."""
    with_vllm = _with_vllm()
    root = getattr(sys.modules.get("lmcache.v1.token_database"), "NONE_HASH", None)
    if algorithm in _ALGORITHMS and with_vllm:
        name, seed = _ALGORITHMS[algorithm], of_vllm.seed()
        if root != int.from_bytes(vllm.none_hash(name, seed)[:8], "big"):
            raise UsageError(_BEGIN)
        return {"algorithm": name, "seed": seed}
    if algorithm.startswith("xxhash") and with_vllm:
        raise UsageError(f"LMCache hashes by {algorithm}: use pre_caching_hash_algorithm {vllm.ALGORITHMS[1]}")
    if type(root) is not int:
        raise UsageError(_BEGIN)
    return {"algorithm": "builtin", "root": root}


def all_server_schemes(context: Any, told: Iterable[tuple[str, int, int]], head: str = "") -> list[Scheme]:
    """Do :func:`server_schemes` for several models, ranks and object groups. One that cannot be leaves the others be.

    Raises as ``registrar.all_of``.
    """
    return all_of(partial(server_schemes, context, *each, head=head) for each in told)


def server_schemes(context: Any, model: str, workers: int, groups: int, head: str = "") -> list[Scheme]:
    """Return how ``lmcache server`` makes the keys of a model with so many ranks and object groups.

    ``context``: the server's, which hashes. ``head``: what the adapter puts before each key.

    Raises UsageError where nobody else can make them.
    """
    if context is None:
        raise UsageError("the adapter was made by something else than LMCache's server")
    hasher = context.token_hasher
    algorithm = str(hasher.hash_algorithm_name)
    options: dict[str, Any] = {"algorithm": algorithm, "object_groups": groups, **({"head": head} if head else {})}
    if algorithm != "blake3":
        if algorithm not in _ALGORITHMS:
            raise UsageError(f"LMCache's server hashes by {algorithm}: use --hash-algorithm blake3")
        options |= {"algorithm": _ALGORITHMS[algorithm], "seed": of_vllm.seed()}
        if hasher.none_hash != vllm.none_hash(options["algorithm"], options["seed"]):
            raise UsageError(_BEGIN)
    return [Scheme(model, "lmcache-server", int(context.chunk_size), workers, options=options)]
