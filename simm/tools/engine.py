"""``simm engine``: print the flags with which an engine uses SiMM."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..config.settings import CLIENT, CONFIG_ENV, SETTINGS, Settings, add_arguments, format_value
from .connect import command_settings
from .console import EXIT_OK, Parser

#: How LMCache finds SiMM in an engine's process, behind ``remote_storage_plugin.simm.``; and in its server.
LMCACHE: Final[Mapping[str, str]] = {"module_path": "simm.connectors.lmcache", "class_name": "SimmAdapter"}
LMCACHE_SERVER: Final[Mapping[str, Any]] = {
    "type": "plugin", "module_path": "simm.connectors.lmcache_server", "class_name": "SimmL2Adapter", "shared": True,
}  # fmt: skip
#: What LMCache's server wants to be told of its own memory.
_LMCACHE_L1: Final = (("--l1-size-gb", "8"), ("--eviction-policy", "LRU"))
#: How vLLM finds SiMM's tier, among ``secondary_tiers``.
VLLM: Final[Mapping[str, str]] = {"type": "SimmTier", "module_path": "simm.connectors.vllm"}
#: How vLLM finds SiMM's connector. A block that was evicted is computed, which is not vLLM's default.
VLLM_CONNECTOR: Final[Mapping[str, str]] = {
    "kv_connector": "SimmConnector", "kv_connector_module_path": "simm.connectors.vllm_connector",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
}  # fmt: skip
#: How SGLang finds SiMM's backend, in ``--hicache-storage-backend-extra-config``.
SGLANG: Final[Mapping[str, Any]] = {
    "backend_name": "simm", "module_path": "simm.connectors.sglang", "class_name": "HiCacheSimm", "interface_v1": 1,
}  # fmt: skip
_SGLANG_FLAGS: Final = (("--enable-hierarchical-cache",), ("--hicache-mem-layout", "page_first"))


@dataclass(frozen=True)
class Recipe:
    """How to start an engine: variables of its environment, flags with their values, and what else to know."""

    environment: Mapping[str, str]
    flags: Sequence[tuple[str, ...]]
    notes: Sequence[str]


def _manager(settings: Settings) -> str:
    return ",".join(map(str, settings.manager))


def _managers(settings: Settings) -> dict[str, str]:
    """Return the variable that names the managers to an engine whose own address holds one alone, without a colon.

    Empty if that is enough.
    """
    one = len(settings.manager) == 1 and ":" not in settings.manager[0].host
    return {} if one else {SETTINGS["manager"].env: _manager(settings)}


def _environment(settings: Settings, config: str | None) -> dict[str, str]:
    """Return the settings that flags gave, as variables for the engine; but for those that each recipe has itself.

    ``config``: the file of settings that a flag names.
    """
    found = {} if config is None else {CONFIG_ENV: os.path.abspath(config)}
    for name, setting in SETTINGS.items():
        if CLIENT in setting.roles and settings.origin(name) == setting.flag and name not in ("manager", "namespace"):
            value = getattr(settings, name)
            found[setting.env] = os.path.abspath(value) if isinstance(value, Path) else format_value(value)
    return found


def _extra(values: Mapping[str, Any]) -> tuple[str, str]:
    return "--hicache-storage-backend-extra-config", json.dumps(values)


def _sglang(settings: Settings) -> Recipe:
    """SGLang, with SiMM's own backend"""
    extra = {**SGLANG, "manager_address": _manager(settings)}
    if settings.origin("namespace") != "default":
        extra["namespace"] = settings.namespace
    flags = (*_SGLANG_FLAGS, ("--hicache-storage-backend", "dynamic"), _extra(extra))
    return Recipe({}, flags, ("pip install CHECKOUT (of SiMM) in SGLang's environment",))


def _sglang_builtin(settings: Settings) -> Recipe:
    """SGLang, with the backend of its wheel"""
    environment = _managers(settings)
    extra = _extra({"manager_address": ":" if environment else str(settings.manager[0])})
    flags = (*_SGLANG_FLAGS, ("--hicache-storage-backend", "simm"), extra)
    name = settings.namespace if settings.origin("namespace") != "default" else "MODEL-tp1"
    notes = (
        "pip install CHECKOUT (of SiMM) in SGLang's environment; SGLang 0.5.11 or newer",
        "the namespace is one name for each model, layout and TP width: this backend's keys have none of these",
        "it needs the folder /sys/class/infiniband: see `simm doctor`",
    )
    return Recipe({"SIMM_NAMESPACE": name, **environment}, flags, notes)


def _sglang_mooncake(settings: Settings) -> Recipe:
    """SGLang, with its backend for Mooncake over SiMM"""
    environment = _managers(settings)
    extra = _extra({"master_server_address": str(settings.manager[0]), "local_hostname": "localhost"})
    notes = (
        "pip install CHECKOUT (of SiMM) in SGLang's environment, and start SGLang by:",
        "python -m simm.connectors.mooncake -- python -m sglang.launch_server ...",
        "the namespace is one name for each data type, layout and page size: this backend's keys have none of these",
    )
    environment["SIMM_NAMESPACE"] = settings.namespace if settings.origin("namespace") != "default" else "MODEL"
    return Recipe(environment, (*_SGLANG_FLAGS, ("--hicache-storage-backend", "mooncake"), extra), notes)


def _lmcache_options(settings: Settings) -> dict[str, str]:
    options = {"manager_address": _manager(settings)}
    if settings.origin("namespace") != "default":
        options["namespace"] = settings.namespace
    return options


def _lmcache(settings: Settings) -> Recipe:
    """LMCache in an engine's process"""
    values = {**LMCACHE, **_lmcache_options(settings)}
    environment = {
        "LMCACHE_REMOTE_STORAGE_PLUGINS": "simm",
        "LMCACHE_EXTRA_CONFIG": json.dumps({f"remote_storage_plugin.simm.{name}": values[name] for name in values}),
        # LMCache's own default is Python's hash, for which anybody can make a prompt with the hash of a given one. That
        # takes 2^64 tries with this one, of which LMCache keeps 64 bits; 2^32 where both prompts are one's own.
        "LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256_cbor", "PYTHONHASHSEED": "0",
    }  # fmt: skip
    notes = (
        "pip install CHECKOUT (of SiMM) in the engine's environment; LMCache 0.5.6",
        "variables for vllm serve; or those with LMCACHE_, without it and in small letters, in LMCACHE_CONFIG_FILE",
        "PYTHONHASHSEED stays a variable; it and the algorithm are the same in all engines, else they share nothing",
        "sha256_cbor needs vLLM: without it LMCache has a hash whose collisions anybody can make: use its server",
        "users who put each other's texts at the head of prompts need longer hashes: LMCache's server, or SiMM's tier",
        "for requests without LoRA adapters and prompt embeddings: LMCache's keys have neither, nor vLLM's cache_salt",
    )
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    return Recipe(environment, (("--kv-transfer-config", json.dumps(transfer)),), notes)


def _lmcache_server(settings: Settings) -> Recipe:
    """LMCache's server, by its L2 adapter"""
    adapter = json.dumps({**LMCACHE_SERVER, "adapter_params": _lmcache_options(settings)})
    notes = (
        "pip install CHECKOUT (of SiMM) in the server's environment, and add to lmcache server; LMCache 0.5.6",
        "--l1-size-gb is the server's own memory: it does not start without a size and a policy",
        "for requests without LoRA adapters and prompt embeddings: LMCache's keys have neither",
    )
    return Recipe({}, (*_LMCACHE_L1, ("--l2-adapter", adapter)), notes)


def _vllm(settings: Settings) -> Recipe:
    """vLLM, with a tier of its KV offloading"""
    options = {"manager_address": _manager(settings)}
    if settings.origin("namespace") != "default":
        options["namespace"] = settings.namespace
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 16 << 30, "block_size": 64,
        "secondary_tiers": [{**VLLM, **options}],
    }  # fmt: skip
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    notes = (
        "pip install CHECKOUT (of SiMM) in vLLM's environment; vLLM 0.32",
        "cpu_bytes_to_use: of host memory for vLLM's primary tier; block_size: tokens of a chunk",
    )
    return Recipe({}, (("--kv-transfer-config", json.dumps(transfer)),), notes)


def _vllm_connector(settings: Settings) -> Recipe:
    """vLLM on a CPU, with a KV connector"""
    extra = {"manager_address": _manager(settings)}
    if settings.origin("namespace") != "default":
        extra["namespace"] = settings.namespace
    transfer = {**VLLM_CONNECTOR, "kv_connector_extra_config": extra}
    notes = (
        "pip install CHECKOUT (of SiMM) in vLLM's environment; vLLM 0.32, with its KV cache in host memory",
        "for a GPU take the flags of: simm engine vllm",
    )
    return Recipe({}, (("--kv-transfer-config", json.dumps(transfer)),), notes)


ENGINES: Final[Mapping[str, Callable[[Settings], Recipe]]] = {
    "sglang": _sglang, "sglang-builtin": _sglang_builtin, "sglang-mooncake": _sglang_mooncake, "lmcache": _lmcache,
    "lmcache-server": _lmcache_server, "vllm": _vllm, "vllm-connector": _vllm_connector,
}  # fmt: skip


def main(argv: Sequence[str], prog: str) -> int:
    """Run ``simm engine``; return the exit code."""
    listed = "; ".join(f"{name}: {recipe.__doc__}" for name, recipe in ENGINES.items())
    parser = Parser(prog=prog, description=f"Print the flags with which an engine uses SiMM. {listed}.")
    add_arguments(parser, "client")
    parser.add_argument("engine", choices=list(ENGINES), metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    settings = command_settings("client", arguments)
    recipe = ENGINES[arguments.engine](settings)
    environment = {**_environment(settings, getattr(arguments, "config", None)), **recipe.environment}
    if arguments.json:
        flags = [word for flag in recipe.flags for word in flag]
        print(json.dumps({"environment": environment, "flags": flags, "notes": recipe.notes}, indent=2))
        return EXIT_OK
    for note in recipe.notes:
        print(f"# {note}")
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")
    print(" \\\n".join(map(shlex.join, recipe.flags)))
    return EXIT_OK
