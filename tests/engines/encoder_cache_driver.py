"""Runs vLLM's released store for encoder outputs, on a CPU. Started by the tests, as a process, with SiMM as its store.

    python encoder_cache_driver.py REQUEST_JSON

A request is ``{"steps": [...]}``; each step has the name of a function below and its arguments. The only line on stdout
is a JSON object with a result for each. The outputs of the encoder are computed from their names. Nothing of vLLM is
replaced: its backend, its client and its codec are what vLLM's worker makes of ``cross_encoder_cache``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding import backend, data, store_client

#: Bounds a save that never ends. Not a speed limit.
SAVED_S = 120.0
WIDTH = 64


def output(name: str, tokens: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Return what the encoder computes for an image."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    made = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made.to(getattr(torch, dtype))


def spec(tensor: torch.Tensor) -> data.TensorSpec:
    return data.TensorSpec(tuple(tensor.shape), str(tensor.dtype), tensor.nbytes)


class Worker:
    """What an engine's worker has: the backend, and in each step the outputs that it has at hand."""

    def __init__(self, namespace: str, read_buffer: int = 1 << 20) -> None:
        self.client = store_client.create_mooncake_embedding_store_client(read_buffer_bytes=read_buffer)
        self.backend = backend.MooncakeEmbeddingStoreBackend(
            self.client, namespace, max_pending_items=64, max_pending_bytes=1 << 30
        )

    def step(self, images: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Take a batch of images: load what is stored, compute and save the rest. Say what came out of the store."""
        cache: dict[str, torch.Tensor] = {}
        loaded = self.backend.resolve_inputs({name: spec(made) for name, made in images.items()}, cache, "cpu")
        for name, made in images.items():
            if name not in cache:
                cache[name] = made
                self.backend.save_output(name, made)
        until = time.monotonic() + SAVED_S
        while self.backend._pending and time.monotonic() < until:
            self.backend.reap()
            time.sleep(0.01)
        wrong = [name for name, made in images.items() if not torch.equal(cache[name], made)]
        return {"loaded": sorted(loaded), "wrong": wrong, "pending": len(self.backend._pending)}


WORKERS: dict[str, Worker] = {}
FAILING: list[str] = []


def worker(namespace: str) -> Worker:
    if namespace not in WORKERS:
        WORKERS[namespace] = Worker(namespace)
    return WORKERS[namespace]


def step(namespace: str, images: dict[str, Any], dtype: str = "bfloat16") -> dict[str, Any]:
    """One step of an engine; ``images`` are names with numbers of tokens."""
    return worker(namespace).step({name: output(name, tokens, dtype) for name, tokens in images.items()})


def large(namespace: str, name: str, size: int) -> dict[str, Any]:
    """A step with an output of ``size`` bytes, and a small one behind it."""
    small = f"{name}-small"
    made = torch.zeros(size // WIDTH // 2, WIDTH, dtype=torch.bfloat16)
    return worker(namespace).step({name: made, small: output(small, 7)})


def damage(namespace: str, name: str, at: int) -> int:
    """Change a bit of a stored output."""
    store, key = worker(namespace).client.store, data.make_embedding_key(namespace, name)
    value = bytearray(store.get(key))
    value[at] ^= 0x10
    code: int = store.upsert(key, bytes(value))
    return code


def fail(namespace: str, calls: list[str]) -> None:
    """Make these calls of SiMM's client raise from now on, and no others."""
    client = worker(namespace).client.store._client

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("injected")

    while FAILING:
        delattr(client, FAILING.pop())
    for each in calls:
        setattr(client, each, fails)
        FAILING.append(each)


def end(namespace: str) -> None:
    """End an engine, as vLLM does."""
    WORKERS.pop(namespace).backend.shutdown()


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    config = Path(os.environ["TMPDIR"]) / "mooncake.json"
    config.write_text(json.dumps({"master_server_address": request["manager"], "protocol": "tcp"}))
    os.environ["MOONCAKE_CONFIG_PATH"] = str(config)
    import mooncake.store
    import vllm

    results = []
    for name, *arguments in request["steps"]:
        try:
            results.append(globals()[name](*arguments))
        except Exception as exc:
            results.append({"error": repr(exc)})
    for left in list(WORKERS):
        end(left)
    where = inspect.getfile(mooncake.store.MooncakeDistributedStore)
    print(json.dumps({"vllm": vllm.__version__, "store": where, "results": results}), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
