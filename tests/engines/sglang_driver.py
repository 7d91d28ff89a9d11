"""Runs the released SGLang's SiMM backend over real host pools on a CPU. Started by the tests, as a process.

    python sglang_driver.py REQUEST_JSON

Needs the environment of scripts/engine-env, and the repository and ``shim/`` on PYTHONPATH. A request is
``{"manager": "ip:port", "seed": int, "steps": [{"command": ..., "case": {...}}, ...]}``; for the cases see
``Case``. The only line on stdout is one JSON object that says what was compared; exit 0 if all of it was
right, 1 if not. A step that raises counts as wrong, and the others still run. Anything else (a traceback,
no JSON) means that the run itself broke.

Commands:

- ``write``, ``read``: ``HiCacheSiMM`` itself, built by SGLang's own ``StorageBackendFactory``.
- ``refused``: a prompt whose pages another process stored with other sizes: none of them may come.
- ``controller-write``, ``controller-read``: ``HiCacheController`` with its backup, prefetch, prefetch-io and
  sync threads; the driver stands where the scheduler stands, at the ends of the queues.
- ``shipped-test`` (no case): ``test_single_operation`` out of the wheel's own test_simm.py.

What each page must hold comes from the seed (engine_content.py), never from another process.

What is real here: the wheel (held against the digests in its RECORD), device pools, host pools, backend,
factory, controller, threads, hashes. What is not: ``OnlyPool`` (an allocator that only names its pool) and the
rank numbers, which a launcher would have published. And the host pool leaves no 10 GB of memory to others. No device
copy is made: the host pool is what the storage backend reads and writes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any

from driver_steps import registered
from engine_content import CANARY, Bytes, compare, fill, flip, strayed, tokens

#: Tokens of a page, which a test may change.
PAGE_TOKENS = int(os.environ.get("ENGINE_PAGE_TOKENS", "16"))
HEADS, HEAD_DIM = 2, 64
LORA_RANK, ROPE_DIM = 512, 64
#: Pages in one call of the backend, as SGLang's STORAGE_BATCH_SIZE; held against it below.
BATCH_PAGES = 128
#: Seconds until a queue that stays silent ends the run. Not a speed limit: only a hang is this slow.
QUEUE_S = 120.0

INFINIBAND = Path("/sys/class/infiniband")
HICACHE_SIMM = "sglang.srt.mem_cache.storage.simm.hicache_simm"
WHEEL_FILES = (
    "sglang/srt/mem_cache/storage/simm/hicache_simm.py",
    "sglang/srt/mem_cache/storage/simm/test_simm.py",
    "sglang/srt/mem_cache/storage/backend_factory.py",
    "sglang/srt/mem_cache/hicache_storage.py",
    "sglang/srt/mem_cache/pool_host/base.py",
    "sglang/srt/mem_cache/pool_host/mha.py",
    "sglang/srt/mem_cache/pool_host/mla.py",
    "sglang/srt/managers/cache_controller.py",
)


@dataclass(frozen=True)
class Case:
    """One pool and the prompt it holds.

    ``rank`` is the tensor-parallel rank that runs; ``content_rank`` whose bytes are meant (MLA is the same on
    every rank, and only rank 0 writes it). ``heads`` is what one rank has of them. ``flip`` damages one bit
    of [page, part, byte]: on the way in when writing, after the read when reading. ``namespace`` is what the
    operator set SIMM_NAMESPACE to. ``backend``: SGLang's own ("simm"), its one for Mooncake ("mooncake"), or the one
    that SiMM brings ("dynamic"). ``model``: the model's name. ``failing``: how much of its calls SGLang's failure
    injector turns into failures; what SGLang warns of meanwhile is no fault. ``servers``: the processes of the cluster.
    ``widest``: the TP width by whose groups of heads pages are stored (SGLang's ``tp_lcm_size``); 0: none.
    """

    prompt: str
    pool: str
    layout: str
    pages: int
    rank: int = 0
    ranks: int = 1
    content_rank: int = 0
    layers: int = 3
    heads: int = HEADS
    flip: tuple[int, int, int] | None = None
    namespace: str = ""
    backend: str = "simm"
    model: str = "simm-engine-test"
    failing: float = 0.0
    servers: Sequence[int] = ()
    widest: int = 0


class Problems(logging.Handler):
    """Collects what SGLang only warns about: a failed warm-up, for one, is a warning and nothing more."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


class OnlyPool:
    """All that HiCacheController asks of a device allocator before any device copy: which pool it serves."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def get_kvcache(self) -> Any:
        return self.pool


@dataclass
class Pools:
    """A device pool, the host pool over it, and the host pool's memory as (part, page, byte)."""

    device: Any
    host: Any
    raw: Bytes


def make_pools(case: Case, pages: int) -> Pools:
    """SGLang's own device and host pool for ``case``, with ``pages`` pages, all of it canary."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    # Where several tests run at once 10 GB may not be left over. Without them SGLang makes no pool, however small.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    device: Any
    size, dtype = 2 * PAGE_TOKENS, torch.bfloat16
    geometry = {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": case.layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": size,
        "start_layer": 0,
        "end_layer": case.layers - 1,
        "host_token_capacity": pages * PAGE_TOKENS,
    }
    if case.pool == "mha":
        device = MHATokenToKVPool(
            size, PAGE_TOKENS, dtype, case.heads, HEAD_DIM, case.layers, "cpu", False, enable_alt_stream=False
        )
        host = MHATokenToKVPoolHost(device.get_device_pool_infos()[0].buffer_info, **geometry)
        parts, part_bytes = 2, PAGE_TOKENS * case.layers * case.heads * HEAD_DIM * dtype.itemsize
    else:
        device = MLATokenToKVPool(size, PAGE_TOKENS, dtype, LORA_RANK, ROPE_DIM, case.layers, "cpu", False)
        info = device.get_device_pool_infos()[0].buffer_info
        host = MLATokenToKVPoolHost(info, target_layer_num=case.layers, **geometry)
        parts, part_bytes = 1, PAGE_TOKENS * case.layers * (LORA_RANK + ROPE_DIM) * dtype.itemsize
    if case.layout == "layer_first":  # each layer of a page is a run of bytes of its own
        parts, part_bytes = parts * case.layers, part_bytes // case.layers
    # In all layouts a page's part is one run of bytes, so one shape serves all pools.
    # That it really is one is checked with SGLang's own accessor, in agrees_with_accessor.
    raw: Bytes = host.kv_buffer.view(torch.uint8).reshape(-1).numpy().reshape(parts, pages, part_bytes)
    raw[:] = CANARY
    return Pools(device, host, raw)


def agrees_with_accessor(pools: Pools, row: int) -> bool:
    """Whether our view of a page is the page that SGLang's ``get_data_page`` hands out."""
    import torch

    page = pools.host.get_data_page(row * PAGE_TOKENS, flat=True).contiguous().view(torch.uint8).numpy()
    return bool((page == pools.raw[:, row].reshape(-1)).all())


def scatter(pools: Pools, dice: random.Random) -> None:
    """Free every page in random order, so that the next ``alloc`` gets them scattered over the pool."""
    slots = pools.host.alloc(pools.host.size)
    pages = list(slots.split(PAGE_TOKENS))
    dice.shuffle(pages)
    for page in pages:
        pools.host.free(page)


def rows_of(indices: Any) -> list[int]:
    """Pool pages behind token indices."""
    return [int(i) // PAGE_TOKENS for i in indices[::PAGE_TOKENS].tolist()]


def page_hashes(seed: int, case: Case, pages: int) -> list[str]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    hashes = get_storage_hash_str(tokens(seed, case.prompt, pages * PAGE_TOKENS), None, page_size=PAGE_TOKENS)
    assert isinstance(hashes, list) and len(hashes) == pages
    return hashes


def make_backend(case: Case, pools: Pools, manager: str) -> Any:
    """HiCacheSiMM from SGLang's factory, with the pool registered: what attach_storage_backend does."""
    from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    assert STORAGE_BATCH_SIZE == BATCH_PAGES
    config = HiCacheStorageConfig(
        tp_rank=case.rank,
        tp_size=case.ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=case.pool == "mla",
        enable_storage_metrics=False,
        is_page_first_layout=case.layout == "page_first",
        model_name=case.model,
        tp_lcm_size=case.widest or None,
        should_split_heads=case.widest > case.ranks,
        extra_config=extra_config(case, manager),
    )
    with in_namespace(case.namespace), injected(case.failing):
        backend = StorageBackendFactory.create_backend(case.backend, config, pools.host)
    backend.register_mem_pool_host(pools.host)
    return backend


def extra_config(case: Case, manager: str) -> dict[str, Any]:
    """What follows ``--hicache-storage-backend-extra-config``."""
    if case.backend == "simm":
        return {"manager_address": manager}
    if case.backend == "mooncake":
        return {"master_server_address": manager, "local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    from simm.tools.engine import SGLANG

    return {**SGLANG, "manager_address": manager}


@contextlib.contextmanager
def injected(failing: float) -> Iterator[None]:
    """SGLang's own failure injector around the backends that are made meanwhile; 0: none."""
    name = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"
    if failing:
        os.environ[name] = str(failing)
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """SIMM_NAMESPACE as it would be for the whole of an engine's process; "" leaves it as it is."""
    before = os.environ.get("SIMM_NAMESPACE")
    if name:
        os.environ["SIMM_NAMESPACE"] = name
    try:
        yield
    finally:
        if name:
            del os.environ["SIMM_NAMESPACE"]
        if before is not None:
            os.environ["SIMM_NAMESPACE"] = before


def batches(hashes: Sequence[str], indices: Any) -> Iterator[tuple[list[str], Any]]:
    for i in range(0, len(hashes), BATCH_PAGES):
        part = list(hashes[i : i + BATCH_PAGES])
        yield part, indices[i * PAGE_TOKENS : (i + len(part)) * PAGE_TOKENS]


def write(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Store every page of a prompt, twice, the second time over what is already there."""
    pools = make_pools(case, case.pages + 16)
    scatter(pools, random.Random(f"write/{seed}/{case}"))
    backend = make_backend(case, pools, manager)
    hashes = page_hashes(seed, case, case.pages)
    indices = pools.host.alloc(case.pages * PAGE_TOKENS)
    rows = rows_of(indices)
    fill(pools.raw, rows, seed, case.prompt, case.content_rank)
    accessor = all(agrees_with_accessor(pools, row) for row in rows)
    clean = compare(pools.raw, rows, seed, case.prompt, case.content_rank)
    if case.flip is not None:
        page, part, byte = case.flip
        flip(pools.raw, rows[page], part, byte)
    before = backend.batch_exists(hashes)
    stored = [ok for keys, at in batches(hashes, indices) for ok in backend.batch_set_v1(keys, at)]
    after = backend.batch_exists(hashes)
    again = [ok for keys, at in batches(hashes, indices) for ok in backend.batch_set_v1(keys, at)]
    registered()  # the backend ends with this call
    return {
        "ok": before == 0 and after == case.pages and all_true(stored, case) and all_true(again, case)
        and accessor and not clean.wrong,
        "before": before,
        "stored": stored.count(True),
        "after": after,
        "again": again.count(True),
        "accessor": accessor,
        "bytes": clean.bytes_compared,
    }  # fmt: skip


def all_true(results: list[Any], case: Case) -> bool:
    return len(results) == case.pages and all(r is True for r in results)


def read(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Fetch a prompt that another process stored, into other places, and hold it against the seed."""
    pools = make_pools(case, case.pages + 32)
    scatter(pools, random.Random(f"read/{seed}/{case}"))
    backend = make_backend(case, pools, manager)
    # The prompt goes on for 8 pages that nobody ever stored: the hit must end where the stored part ends.
    hashes = page_hashes(seed, case, case.pages + 8)
    hits = backend.batch_exists(hashes)
    indices = pools.host.alloc(case.pages * PAGE_TOKENS)
    rows = rows_of(indices)
    results = [ok for keys, at in batches(hashes[: case.pages], indices) for ok in backend.batch_get_v1(keys, at)]
    if case.flip is not None:
        page, part, byte = case.flip
        flip(pools.raw, rows[page], part, byte)
    comparison = compare(pools.raw, rows, seed, case.prompt, case.content_rank)
    stray = strayed(pools.raw, rows)
    accessor = all(agrees_with_accessor(pools, row) for row in rows)

    # A page that is not there, between two that are: it alone fails, and its place stays as it was.
    trio = pools.host.alloc(3 * PAGE_TOKENS)
    trio_rows = rows_of(trio)
    hole = backend.batch_get_v1([hashes[0], hashes[case.pages], hashes[1]], trio)
    hole_wrong = compare(pools.raw, [trio_rows[0], trio_rows[2]], seed, case.prompt, case.content_rank).wrong
    hole_stray = strayed(pools.raw, [*rows, trio_rows[0], trio_rows[2]])
    return {
        "ok": hits == case.pages and all_true(results, case) and not comparison.wrong and not stray and accessor
        and hole == [True, False, True] and not hole_wrong and not hole_stray,
        "hits": hits,
        "read": results.count(True),
        **comparison.as_json(),
        "strayed": stray,
        "accessor": accessor,
        "hole": hole,
        "hole_wrong": len(hole_wrong),
        "hole_strayed": hole_stray,
    }  # fmt: skip


def refused(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Fetch a prompt that is stored with pages of another size: the keys are there, and then they are not."""
    pools = make_pools(case, case.pages + 16)
    scatter(pools, random.Random(f"refused/{seed}/{case}"))
    backend = make_backend(case, pools, manager)
    hashes = page_hashes(seed, case, case.pages)
    before = backend.batch_exists(hashes)
    indices = pools.host.alloc(case.pages * PAGE_TOKENS)
    results = [ok for keys, at in batches(hashes, indices) for ok in backend.batch_get_v1(keys, at)]
    written = strayed(pools.raw, [])
    after = [backend.batch_exists([each]) for each in hashes]
    return {
        "ok": before == case.pages and results == [False] * case.pages and not written and not any(after),
        "before": before,
        "read": results.count(True),
        "written": written,
        "after": sum(after),
    }


@contextlib.contextmanager
def controller(case: Case, pools: Pools, manager: str) -> Iterator[Any]:
    """HiCacheController with the SiMM backend attached, detached again at the end."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.runtime_context import get_parallel

    ranks = {"tp_rank": case.rank, "tp_size": case.ranks, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    ranks |= {"pp_rank": 0, "pp_size": 1}
    with get_parallel().override(**ranks), injected(case.failing):
        made = HiCacheController(
            OnlyPool(pools.device),
            pools.host,
            PAGE_TOKENS,
            None,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct" if case.layout == "page_first_direct" else "kernel",
            storage_backend=case.backend,
            model_name=case.model,
            storage_backend_extra_config=extra_config(case, manager),
        )
        try:
            assert made.page_set_func == made._page_set_zero_copy
            assert made.page_get_func == made._page_get_zero_copy
            yield made
        finally:
            made.detach_storage_backend()


def prompts_of(case: Case) -> list[Case]:
    """Three prompts in flight at once for one controller, of unequal lengths."""
    shares = (case.pages // 2, case.pages // 3, case.pages - case.pages // 2 - case.pages // 3)
    return [
        replace(case, prompt=f"{case.prompt}#{i}", pages=share, flip=None)
        for i, share in enumerate(shares)
    ]


def take(queue: Queue[Any]) -> Any:
    return queue.get(timeout=QUEUE_S)


def controller_write(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Back three prompts up through the controller's thread, while it also looks for one nobody stored."""
    pools = make_pools(case, case.pages + 16)
    scatter(pools, random.Random(f"controller-write/{seed}/{case}"))
    parts = prompts_of(case)
    unknown = tokens(seed, f"{case.prompt}#unknown", 64 * PAGE_TOKENS)
    with controller(case, pools, manager) as ctl:
        waiting: dict[int, Case] = {}
        for part in parts:
            indices = pools.host.alloc(part.pages * PAGE_TOKENS)
            fill(pools.raw, rows_of(indices), seed, part.prompt, part.content_rank)
            ids = tokens(seed, part.prompt, part.pages * PAGE_TOKENS)
            waiting[ctl.write_storage(indices, ids, page_hashes(seed, part, part.pages))] = part
            ctl.prefetch(f"unknown-{part.prompt}", unknown)
        done = [take(ctl.ack_backup_queue) for _ in parts]
        hits = [take(ctl.prefetch_hit_queue).storage_hit_count for _ in parts]
        complete = {op.id: op.completed_tokens for op in done}
    # MLA pages are the same on every rank: SGLang lets rank 0 alone write them.
    writes = case.pool == "mha" or case.rank == 0
    wanted = {op: part.pages * PAGE_TOKENS * writes for op, part in waiting.items()}
    return {
        "ok": complete == wanted and hits == [0] * len(parts),
        "stored": sum(complete.values()) // PAGE_TOKENS,
        "unknown_hits": hits,
    }


def controller_read(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Prefetch three prompts at once, each with a tail nobody stored, and hold them against the seed."""
    pools = make_pools(case, case.pages + 32)
    scatter(pools, random.Random(f"controller-read/{seed}/{case}"))
    parts = {part.prompt: part for part in prompts_of(case)}
    hits: dict[str, int] = {}
    done: dict[str, int] = {}
    with controller(case, pools, manager) as ctl:
        for part in parts.values():
            ctl.prefetch(part.prompt, tokens(seed, part.prompt, (part.pages + 5) * PAGE_TOKENS))
        rows: dict[str, list[int]] = {}
        # From here on we are the scheduler: give each hit its pages, send it on, collect the acknowledgements.
        for _ in parts:
            op = take(ctl.prefetch_hit_queue)
            hits[op.request_id] = op.storage_hit_count // PAGE_TOKENS
            op.host_indices = ctl.alloc_prefetch_host_buffers(op, op.storage_hit_count)
            rows[op.request_id] = rows_of(op.host_indices)
            ctl.prefetch_buffer.put(op)
        finished = 0
        while finished < len(parts):
            ack = take(ctl.ack_prefetch_queue)
            if ack.completed_tokens is not None:
                done[ack.rid] = ack.completed_tokens // PAGE_TOKENS
            finished += bool(ack.completed_req)
    if case.flip is not None:
        page, part_no, byte = case.flip
        flip(pools.raw, rows[f"{case.prompt}#0"][page], part_no, byte)
    # What was not read by the end of an operation is not asked for: the pages stay as they were.
    results = {
        name: compare(pools.raw, rows[name][: done.get(name, 0)], seed, name, part.content_rank)
        for name, part in parts.items()
    }
    wrong = [{"prompt": name, **w} for name, c in results.items() for w in c.as_json()["wrong"]]
    stray = strayed(pools.raw, [row for some in rows.values() for row in some])
    wanted = {name: part.pages for name, part in parts.items()}
    return {
        "ok": hits == wanted and done == wanted and not wrong and not stray,
        "hits": sum(hits.values()),
        "read": sum(done.values()),
        "bytes": sum(c.bytes_compared for c in results.values()),
        "wrong": wrong,
        "strayed": stray,
    }


def shipped_test() -> dict[str, Any]:
    """``test_single_operation`` from the wheel, as shipped: it says assert, and returns nothing.

    It imports itself from a package called ``python``, the folder's name in SGLang's source tree; the wheel
    has none, so the test run puts a link of that name to site-packages on the path. Its other test cannot
    run anywhere (it builds a HiCacheStorageConfig without five fields that have no default).
    """
    from python.sglang.srt.mem_cache.storage.simm import test_simm

    if infiniband_way() == "monkeypatch":
        module: Any = sys.modules[test_simm.HiCacheSiMM.__module__]
        module.get_numa_nic_mapping = dict
    test_simm.test_single_operation()
    return {"ok": True, "file": test_simm.__file__}


def infiniband_way() -> str:
    """How /sys/class/infiniband comes to be there for HiCacheSiMM, or that it had to be patched over."""
    if INFINIBAND.is_dir():
        return os.environ.get("SIMM_ENGINE_INFINIBAND", "present")
    return "monkeypatch"


def wheel_is_unmodified() -> dict[str, bool]:
    """Each file that matters here against the digest in the RECORD that came with the wheel."""
    found: dict[str, bool] = {}
    for entry in importlib.metadata.distribution("sglang").files or ():
        if str(entry) in WHEEL_FILES and entry.hash is not None:
            digest = hashlib.new(entry.hash.mode, Path(str(entry.locate())).read_bytes()).digest()
            found[str(entry)] = base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == entry.hash.value
    return {name: found.get(name, False) for name in WHEEL_FILES}


COMMANDS: dict[str, Callable[[Case, str, int], dict[str, Any]]] = {
    "write": write,
    "read": read,
    "refused": refused,
    "controller-write": controller_write,
    "controller-read": controller_read,
}


def run_step(step: dict[str, Any], manager: str, seed: int, problems: Problems) -> dict[str, Any]:
    """One step of a request; what it raises, and what SGLang only logged meanwhile, make it wrong."""
    already = len(problems.lines)
    try:
        if step["command"] == "shipped-test":
            result = shipped_test()
        else:
            fields = dict(step["case"])
            if fields.get("flip") is not None:
                fields["flip"] = tuple(fields["flip"])
            result = COMMANDS[step["command"]](Case(**fields), manager, seed)
    except Exception:
        result = {"ok": False, "error": traceback.format_exc()}
    result["problems"] = problems.lines[already:]
    expected = step.get("case", {}).get("failing") or step.get("warns")
    result["ok"] = result["ok"] and (bool(expected) or not result["problems"])
    return {**step, **result}


def main() -> int:
    request = json.loads(sys.argv[1])
    # The JSON line owns stdout. SGLang and its test print there too; theirs goes to stderr.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    problems = Problems()
    for name in ("sglang.srt.mem_cache.storage", "sglang.srt.managers.cache_controller", "python.sglang"):
        logging.getLogger(name).addHandler(problems)

    import simm.kv

    way = infiniband_way()
    if way == "monkeypatch":
        module: Any = importlib.import_module(HICACHE_SIMM)
        module.get_numa_nic_mapping = dict
    steps = [run_step(step, request["manager"], request["seed"], problems) for step in request["steps"]]
    registered()
    ok = all(step["ok"] for step in steps)
    summary = {
        "ok": ok,
        "pid": os.getpid(),
        "sglang": importlib.metadata.version("sglang"),
        "unmodified": wheel_is_unmodified(),
        "infiniband": way,
        "simm_kv": simm.kv.__file__,
        "steps": steps,
    }
    print(json.dumps(summary), file=report, flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
