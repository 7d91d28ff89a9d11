"""Runs FlexKV's own client of Mooncake's store and its planner, out of a checkout. Started by the tests, as a process.

    python flexkv_own_driver.py REQUEST_JSON

FlexKV as a whole needs its CUDA extension, and so does its package ``flexkv.common``, of which these two files want a
description of the prompt, a logger and a result. They are here. A request is ``{"checkout": folder, "config": file,
"steps": [[command, prompt, blocks], ...]}``. FlexKV finds the cluster by the file. The only line on stdout is a JSON
list with what each step has found.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

FILES = ("mooncake_store_keys", "mooncake_store_utils")
TOKENS = 16
#: Bytes of a block, and of a window; what FlexKV may move at once is less than a prompt.
BLOCK, WINDOW, AT_ONCE = 48_000, 4_000, 150_000
RESULT = ("num_matched_blocks", "kv_matched_blocks", "swa_hit_blocks", "last_node", "last_node_matched_length",
          "physical_blocks", "matched_pos")  # fmt: skip


def loaded(checkout: Path) -> tuple[Any, Any]:
    """Import the two files, over what they import of FlexKV."""
    for name in ("flexkv", "flexkv.common", "flexkv.external"):
        sys.modules[name] = ModuleType(name)
    for name, given in (("block", {"SequenceMeta": SimpleNamespace}), ("debug", {"flexkv_logger": logging.getLogger()}),
                        ("type", {"MatchResultAccel": make_dataclass("MatchResultAccel", RESULT)})):  # fmt: skip
        module = sys.modules[f"flexkv.common.{name}"] = ModuleType(name)
        vars(module).update(given)
    for name in FILES:
        full = f"flexkv.external.{name}"
        spec = importlib.util.spec_from_file_location(full, checkout / "flexkv" / "external" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["flexkv.external.mooncake_store_keys"], sys.modules["flexkv.external.mooncake_store_utils"]


class Prompt:
    """A prompt as FlexKV describes it, with memory for its blocks and windows."""

    def __init__(self, name: str, blocks: int) -> None:
        self.draw = np.random.default_rng([*name.encode()])
        self.num_blocks = blocks
        self.block_hashes = self.draw.integers(0, 2**63, blocks)
        self.wanted = self.draw.integers(0, 256, (blocks, BLOCK + WINDOW), np.uint8)
        self.memory = torch.full((blocks, BLOCK + WINDOW), 0xA5, dtype=torch.uint8)

    def wrong(self) -> int:
        return int((self.memory.numpy() != self.wanted).any(1).sum())


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FlexKV prints
    keys, utils = loaded(Path(request["checkout"]))
    cache = SimpleNamespace(
        tokens_per_block=TOKENS, mooncake_store_config_path=request["config"], swa=SimpleNamespace(enabled=True)
    )
    results: list[Any] = []
    for command, name, blocks in request["steps"]:
        prompt = Prompt(name, blocks)
        if command == "match":
            found = utils.MooncakeStoreCacheEngine(cache).match(prompt)
            results.append([found.kv_matched_blocks, found.swa_hit_blocks])
            continue
        client = utils.MooncakeStoreClient(utils.MooncakeStoreConfig.from_file(cache))
        if command == "clear":
            client.clear()
            results.append([])
            continue
        if command == "write":
            prompt.memory[:] = torch.from_numpy(prompt.wanted)
        client.register_buffer(prompt.memory)
        rows = [each.data_ptr() for each in prompt.memory]
        transfer = client.batch_put if command == "write" else client.batch_get
        done = []
        for kind, skip, size in ((keys.PoolKind.KV, 0, BLOCK), (keys.PoolKind.SWA, BLOCK, WINDOW)):
            names = [keys.build_key(str(each), kind) for each in prompt.block_hashes]
            done.append(sum(transfer(names, [row + skip for row in rows], [size] * blocks)))
        client.unregister_buffer(prompt.memory)
        results.append([*done, prompt.wrong()])
    print(json.dumps(results), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
