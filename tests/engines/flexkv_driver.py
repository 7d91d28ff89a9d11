"""Makes the calls that FlexKV makes of Mooncake's store, as FlexKV itself cannot be installed here (docs/engines.md).

    python flexkv_driver.py REQUEST_JSON

A request is ``{"steps": [...]}``, and a step is ``{"role": "worker" or "planner", "manager": ..., "pages": port,
"prompt": ..., "blocks": how many, "store": bool, "flip": [block, byte] or null, "clear": bool}``. FlexKV's main process
is the planner, which only asks what is stored; its transfer worker has the memory. Calls, their order and what each
result is compared with are those of ``flexkv/external/mooncake_store_utils.py`` and
``flexkv/transfer/workers/remote.py`` of FlexKV's main branch of 2026-11. The only line on stdout is a JSON list with
what each step has found.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
import uuid
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

BLOCK, WINDOW = 48_000, 4_000
#: The pool's start is on no page's border.
SKEW = 64
#: FlexKV's names of its two kinds of blocks.
KV, SWA = "FlexKV", "FlexKV_swa"


def content(prompt: str, block: int, size: int) -> np.ndarray[Any, Any]:
    seed = [*prompt.encode(), block, size]
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def keys(request: dict[str, Any], kind: str) -> list[str]:
    """A block's hash as a decimal number, its kind, and the pipeline's rank if there are several."""
    hashes = np.random.default_rng([*request["prompt"].encode()]).integers(0, 2**63, request["blocks"])
    ranks = request.get("ranks", 1)
    return [f"{each}_{kind}" + (f"_pp_rank_0_of_{ranks}" if ranks > 1 else "") for each in hashes]


def connect(manager: str, planner: bool) -> Any:
    store = MooncakeDistributedStore()
    segment, buffer, protocol = (0, 0, "rpc_only") if planner else (1 << 30, 16 << 20, "tcp")
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, protocol, "", manager)
    assert code == 0, code
    return store


def wait_for_master(port: int) -> str:
    """FlexKV starts once the master's pages give any answer; a client without memory of its own wants text in it."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/get_all_segments", timeout=60) as answer:
            return str(answer.read(), "utf-8")
    except urllib.error.HTTPError as answer:
        return str(answer.read(), "utf-8")


def worker(request: dict[str, Any]) -> dict[str, Any]:
    store = connect(request["manager"], False)
    said = wait_for_master(request["pages"])
    key, value = "flexkv_mooncake_store_warmup_key" + uuid.uuid4().hex, bytes(4096)
    warm = store.put(key, value) == 0 and store.is_exist(key) == 1 and store.get(key) == value

    blocks = request["blocks"]
    whole = np.zeros(SKEW + blocks * (BLOCK + WINDOW), np.uint8)
    pool, windows = np.split(whole[SKEW:], [blocks * BLOCK])
    registered = store.register_buffer(pool.ctypes.data, pool.nbytes), store.register_buffer(
        windows.ctypes.data, windows.nbytes
    )
    counts, wrong = {}, []
    for kind, memory, size in ((KV, pool, BLOCK), (SWA, windows, WINDOW)):
        names = keys(request, kind)
        places, sizes = [memory.ctypes.data + at * size for at in range(blocks)], [size] * blocks
        for at in range(blocks):
            memory[at * size : (at + 1) * size] = content(request["prompt"], at, size)
        if request["flip"] and kind == KV:
            block, byte = request["flip"]
            memory[block * size + byte] ^= 1
        if request["store"]:
            missing = [at for at, there in enumerate(store.batch_is_exist(names)) if there != 1]
            codes = store.batch_put_from(
                [names[at] for at in missing], [places[at] for at in missing], [sizes[at] for at in missing]
            )
            counts[f"stored {kind}"] = sum(code == 0 for code in codes)
        memory[:] = 0
        got = store.batch_get_into(names, places, sizes)
        counts[f"read {kind}"] = sum(length == size for length in got)
        for at, length in enumerate(got):
            page = memory[at * size : (at + 1) * size]
            if length == size and not np.array_equal(page, content(request["prompt"], at, size)):
                wrong.append([kind, at, int(np.argmax(page != content(request["prompt"], at, size)))])
    ended = store.unregister_buffer(pool.ctypes.data), store.unregister_buffer(windows.ctypes.data)
    if request["clear"]:
        store.remove_all()
    return {"warm": warm, "answered": bool(said), "codes": [*registered, *ended], **counts, "wrong": wrong}


def planner(request: dict[str, Any]) -> dict[str, Any]:
    """Ask for all blocks of both kinds at once: the longest prefix, and the last window in it."""
    store = connect(request["manager"], True)
    blocks = request["blocks"]
    there = store.batch_is_exist(keys(request, KV) + keys(request, SWA))
    prefix = next((at for at, each in enumerate(there[:blocks]) if each != 1), blocks)
    window = max((at + 1 for at in range(prefix) if there[blocks + at] == 1), default=0)
    return {"prefix": prefix, "window": window}


def main() -> int:
    request = json.loads(sys.argv[1])
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    roles = {"worker": worker, "planner": planner}
    print(json.dumps([roles[step["role"]](step) for step in request["steps"]]), file=report, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
