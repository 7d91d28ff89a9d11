"""Runs LMCache's released multi-process server, with simm index for its coordinator. Started by the test, as a process.

What stores is asked for on stdin, a JSON line each, as no engine with a GPU is here: its store takes the same steps in
LMCache's own code, but that nothing is copied. The rest, as deletions, is asked for by the server's HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey, ipc_key_to_object_keys
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.mp_observability.config import add_observability_args, parse_args_to_observability_config
from lmcache.v1.multiprocess import http_server
from lmcache.v1.multiprocess.config import (
    add_coordinator_args,
    add_http_frontend_args,
    add_mp_server_args,
    add_p2p_args,
    parse_args_to_coordinator_config,
    parse_args_to_http_frontend_config,
    parse_args_to_mp_server_config,
)
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule

#: Bounds the start of a server that never comes up.
START_S = 300.0


def store(engine: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Store a prompt for some ranks: what tokens its chunks have, and then the chunks."""
    context = engine.context
    tokens = tuple(order["tokens"])
    digests = context.token_hasher.compute_chunk_hashes(list(tokens))
    start = order.get("start", 0)
    chunks = digests[start // context.chunk_size :]
    stored: list[ObjectKey] = []
    for rank in order["ranks"]:
        key = IPCCacheServerKey(
            order["model"], order["world"], rank, tokens, start, len(tokens), "request", order.get("salt", "")
        )
        keys = ipc_key_to_object_keys(key, chunks, [0])[0]
        if rank == 0 and order.get("told", True):
            LMCacheDrivenTransferModule._publish_token_bindings(SimpleNamespace(_ctx=context), key, keys)
        layout = MemoryLayoutDesc([torch.Size((2, 1, context.chunk_size, 64))], [torch.bfloat16])
        found = context.storage_manager.reserve_write(keys, layout)
        context.storage_manager.finish_write(list(found))
        stored += found
    return {"stored": len(stored), "keys": [vars(each.to_encoded_object_key()) for each in stored],
            "chunks": [each.hex() for each in digests]}  # fmt: skip


def orders(out: Any) -> None:
    """Carry out what stdin says, and end the process at its end."""
    try:
        until = time.monotonic() + START_S
        while not hasattr(http_server.app.state, "engine") and time.monotonic() < until:
            time.sleep(0.1)
        engine = http_server.app.state.engine
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            try:
                answer = store(engine, json.loads(line))
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=out, flush=True)
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), file=out, flush=True)


def main() -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    for add in (add_http_frontend_args, add_mp_server_args, add_p2p_args, add_storage_manager_args,
                add_observability_args, add_coordinator_args):  # fmt: skip
        add(parser)
    arguments = parser.parse_args(sys.argv[1:])
    threading.Thread(target=orders, args=(out,), daemon=True).start()
    http_server.run_http_server(
        http_config=parse_args_to_http_frontend_config(arguments),
        mp_config=parse_args_to_mp_server_config(arguments),
        storage_manager_config=parse_args_to_config(arguments),
        obs_config=parse_args_to_observability_config(arguments),
        coordinator_config=parse_args_to_coordinator_config(arguments),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
