"""Runs SiMM's own backend in the released SGLang. Started by the tests, as a process; sglang_driver.py has the rest.

Commands beside those of sglang_driver.py, of cases with ``"backend": "dynamic"``:

- ``absent``: a prompt that another process stored for another model, layout or TP width. None of it may be there.
- ``outage``: HiCacheController while no manager answers: pages go nowhere, none is found, the pool stays as it is.
- ``clear``: pages that are stored, until the engine flushes its storage.
- ``paused``: all servers pause for some seconds under an engine, which goes on asking, and finds everything then.
- ``widths``: engines of two TP widths that are told to share, and read each other's pages by groups of heads.
- ``hybrid``: a main pool with a Mamba pool and a paged pool, by interface v2, under each hit policy.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import sglang_driver
from engine_content import CANARY, compare, fill, strayed
from sglang_driver import (
    PAGE_TOKENS,
    Case,
    all_true,
    batches,
    controller,
    make_backend,
    make_pools,
    page_hashes,
    prompts_of,
    rows_of,
    scatter,
    take,
    tokens,
)

#: Seconds of a pause, and the bound for all of it.
PAUSE_S, PAUSED_S = 10.0, 240.0


def absent(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Look for a prompt, and get it all the same."""
    pools = make_pools(case, case.pages + 16)
    scatter(pools, random.Random(f"absent/{seed}/{case}"))
    backend = make_backend(case, pools, manager)
    hashes = page_hashes(seed, case, case.pages)
    hits = backend.batch_exists(hashes)
    indices = pools.host.alloc(case.pages * PAGE_TOKENS)
    results = [ok for keys, at in batches(hashes, indices) for ok in backend.batch_get_v1(keys, at)]
    written = strayed(pools.raw, [])
    return {
        "ok": hits == 0 and results == [False] * case.pages and not written,
        "hits": hits, "read": results.count(True), "written": written,
    }  # fmt: skip


def outage(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """What ``controller_write`` and ``controller_read`` do, at an address where nobody listens."""
    pools = make_pools(case, 2 * case.pages + 16)
    scatter(pools, random.Random(f"outage/{seed}/{case}"))
    parts = prompts_of(case)
    rows: dict[str, list[int]] = {}
    with controller(case, pools, "127.0.0.1:1") as ctl:
        for part in parts:
            indices = pools.host.alloc(part.pages * PAGE_TOKENS)
            rows[part.prompt] = rows_of(indices)
            fill(pools.raw, rows[part.prompt], seed, part.prompt, part.content_rank)
            ids = tokens(seed, part.prompt, part.pages * PAGE_TOKENS)
            ctl.write_storage(indices, ids, page_hashes(seed, part, part.pages))
            ctl.prefetch(part.prompt, ids)
        stored = [take(ctl.ack_backup_queue).completed_tokens for _ in parts]
        hits = [take(ctl.prefetch_hit_queue).storage_hit_count for _ in parts]
    wrong = [w for part in parts for w in compare(pools.raw, rows[part.prompt], seed, part.prompt, 0).wrong]
    stray = strayed(pools.raw, [row for some in rows.values() for row in some])
    nothing = [0] * len(parts)
    return {
        "ok": stored == nothing and hits == nothing and not wrong and not stray,
        "stored": stored, "hits": hits, "wrong": len(wrong), "strayed": stray,
    }  # fmt: skip


def clear(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Store pages as two ranks, flush as one of them, and look as each and as a new process of the engine."""
    cases = [replace(case, rank=rank, ranks=2) for rank in range(2)]
    pools = [make_pools(each, case.pages + 1) for each in cases]
    backends = [make_backend(each, pool, manager) for each, pool in zip(cases, pools)]
    hashes = page_hashes(seed, case, case.pages)

    def store() -> bool:
        return all(
            all_true([ok for keys, at in batches(hashes, pool.host.alloc(case.pages * PAGE_TOKENS))
                      for ok in backend.batch_set_v1(keys, at)], case)
            for backend, pool in zip(backends, pools)
        )  # fmt: skip

    def found() -> list[int]:
        new = make_backend(cases[0], make_pools(cases[0], 1), manager)
        return [each.batch_exists(hashes) for each in (*backends, new)]

    stored, before = store(), found()
    backends[0].clear()
    after = found()
    for pool in pools:
        pool.host.clear()
    again, back = store(), found()
    return {
        "ok": stored and again and before == back == [case.pages] * 3 and after == [0] * 3,
        "before": before, "after": after, "back": back,
    }  # fmt: skip


def paused(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Servers that are reached by TCP pause; the engine asks all the time. What it is given is right or absent."""
    family = [each for pid in case.servers for each in (psutil.Process(pid), *psutil.Process(pid).children(True))]
    before = {name: os.environ.get(name) for name in ("SIMM_PATH", "SIMM_DEADLINE_MS")}
    os.environ.update({"SIMM_PATH": "tcp", "SIMM_DEADLINE_MS": "400"})
    try:
        pools = make_pools(case, 2 * case.pages + 1)
        backend = make_backend(case, pools, manager)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({name: value} if value is not None else {})
    hashes = page_hashes(seed, case, case.pages)
    source, target = (pools.host.alloc(case.pages * PAGE_TOKENS) for _ in range(2))
    rows = rows_of(target)
    fill(pools.raw, rows_of(source), seed, case.prompt, 0)

    def stored() -> bool:
        return all_true([ok for keys, at in batches(hashes, source) for ok in backend.batch_set_v1(keys, at)], case)

    def read() -> tuple[int, int]:
        """How many pages were read, and how many of these are wrong."""
        pools.raw[:, rows] = CANARY
        got = [ok for keys, at in batches(hashes, target) for ok in backend.batch_get_v1(keys, at)]
        wrong = sum(
            bool(compare(pools.raw, [row], seed, case.prompt, 0, page).wrong)
            for page, (row, ok) in enumerate(zip(rows, got)) if ok
        )  # fmt: skip
        return got.count(True), wrong

    def go_on() -> None:
        for each in family:
            each.send_signal(signal.SIGCONT)

    until = time.monotonic() + PAUSED_S
    while not stored():  # a busy machine may miss the deadline
        assert time.monotonic() < until
    for each in family:
        each.send_signal(signal.SIGSTOP)
    timer = threading.Timer(PAUSE_S, go_on)
    timer.start()
    try:
        rounds = [read()]
        while (timer.is_alive() or rounds[-1][0] < case.pages) and time.monotonic() < until:
            rounds.append(read())
            if not timer.is_alive():
                stored()
    finally:
        timer.join()
    return {
        "ok": rounds[0][0] == 0 and rounds[-1][0] == case.pages and not any(wrong for _, wrong in rounds),
        "rounds": len(rounds), "first": rounds[0], "last": rounds[-1],
    }  # fmt: skip


def widths(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """TP 1 and TP 2 read what the other one stored, if both are told the widest; without, they find nothing."""
    halves = case.heads // 2
    wide = replace(case, widest=2)
    narrow = [replace(wide, heads=halves, rank=rank, ranks=2) for rank in range(2)]
    down, up = (page_hashes(seed, replace(case, prompt=f"{case.prompt}/{way}"), case.pages) for way in ("down", "up"))

    def opened(each: Case) -> tuple[Any, Any, Any]:
        pools = make_pools(each, case.pages + 1)
        scatter(pools, random.Random(f"widths/{seed}/{each}"))
        return pools, make_backend(each, pools, manager), pools.host.alloc(case.pages * PAGE_TOKENS)

    def written(each: Case, hashes: list[str]) -> tuple[bool, Any]:
        """Whether all pages were stored, and their bytes."""
        pools, backend, indices = opened(each)
        fill(pools.raw, rows_of(indices), seed, case.prompt, each.rank)
        results = [ok for keys, at in batches(hashes, indices) for ok in backend.batch_set_v1(keys, at)]
        return all_true(results, case), pools.raw[:, rows_of(indices)]

    def found(each: Case, hashes: list[str]) -> tuple[int, Any]:
        """How many pages are there, and the bytes of what was read."""
        pools, backend, indices = opened(each)
        hits = backend.batch_exists(hashes)
        got = [ok for keys, at in batches(hashes, indices) for ok in backend.batch_get_v1(keys, at)]
        return (hits if got.count(True) == hits and not strayed(pools.raw, rows_of(indices)) else -1,
                pools.raw[:, rows_of(indices)])  # fmt: skip

    stored, whole = written(wide, down)
    parts = np.split(whole, 2, axis=2)  # the heads of a page's keys, and of its values, lie one behind the other
    read = [found(each, down) for each in narrow]
    apart = [found(replace(each, widest=0), down)[0] for each in (case, *narrow)]
    first = written(narrow[0], up)
    half = found(wide, up)[0]
    second = written(narrow[1], up)
    back, joined = found(wide, up)
    same = [bool((got == part).all()) for (_, got), part in zip(read, parts)]
    same_up = bool((joined == np.concatenate([first[1], second[1]], axis=2)).all())
    return {
        "ok": stored and first[0] and second[0] and [hits for hits, _ in read] == [case.pages] * 2 and all(same)
        and same_up and back == case.pages and apart == [0, 0, 0] and half == 0 and not (parts[0] == parts[1]).all(),
        "hits": [hits for hits, _ in read], "back": back, "half": half, "apart": apart, "same": [*same, same_up],
    }  # fmt: skip


def hybrid(case: Case, manager: str, seed: int) -> dict[str, Any]:
    """Store some pages of three pools and ask what can be restored; then restore it into other pools, and compare."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    side = {PoolName.MAMBA: 1, PoolName.DEEPSEEK_V4_C4: PAGE_TOKENS}
    count = case.pages
    hashes = page_hashes(seed, case, count)
    dice = np.random.default_rng(seed)

    def made() -> tuple[Any, Any, dict[Any, Any]]:
        pools = make_pools(case, count + 1)
        others = {PoolName.MAMBA: mamba_pool(case, count), PoolName.DEEPSEEK_V4_C4: paged_pool(case, count)}
        backend = make_backend(case, pools, manager)
        for name, host in others.items():
            backend.register_mem_host_pool_v2(host, name)
        backend.on_host_pools_registered()
        return pools, backend, others

    def transfer(name: Any, host: Any, rows: list[int], keys: list[str]) -> Any:
        import torch

        tokens_of = side[name]
        at = [row * tokens_of + token for row in rows for token in range(tokens_of)]
        return PoolTransfer(name, host_indices=torch.tensor(at, dtype=torch.int64), keys=keys)

    pools, backend, others = made()
    fill(pools.raw, list(range(count)), seed, case.prompt, 0)
    for host in others.values():
        for each in bytes_of(host):
            each[:] = dice.integers(0, 256, each.shape, np.uint8)
    import torch

    stored = backend.batch_set_v1(hashes[:9], torch.arange(9 * PAGE_TOKENS))
    # The paged pool lacks page 7, the Mamba pool has the states after pages 3, 6 and 8 only.
    paged, states = [0, 1, 2, 3, 4, 5, 6, 8], [2, 5, 7]
    put = backend.batch_set_v2([
        transfer(PoolName.DEEPSEEK_V4_C4, others[PoolName.DEEPSEEK_V4_C4], paged, [hashes[row] for row in paged]),
        transfer(PoolName.MAMBA, others[PoolName.MAMBA], states, [hashes[row] for row in states]),
    ])  # fmt: skip
    wanted = [
        PoolTransfer(PoolName.DEEPSEEK_V4_C4),
        PoolTransfer(PoolName.MAMBA, keys=hashes[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    target, reader, targets = made()
    found = reader.batch_exists_v2(hashes, wanted)
    blocks = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=3, group_pages=1)
    grouped = reader.batch_exists_v2(hashes, [blocks]) if case.backend == "dynamic" else None
    back = list(range(6))[::-1]  # into other places
    indices = torch.cat([torch.arange(row * PAGE_TOKENS, (row + 1) * PAGE_TOKENS) for row in back])
    read = reader.batch_get_v1(hashes[:6], indices)
    got = reader.batch_get_v2([
        transfer(PoolName.DEEPSEEK_V4_C4, targets[PoolName.DEEPSEEK_V4_C4], back, hashes[:6]),
        transfer(PoolName.MAMBA, targets[PoolName.MAMBA], [0], [hashes[5]]),
    ])  # fmt: skip
    wrong = compare(target.raw, back, seed, case.prompt, 0).wrong
    same = all(
        (new[row] == old[page]).all()
        for new, old in zip(bytes_of(targets[PoolName.DEEPSEEK_V4_C4]), bytes_of(others[PoolName.DEEPSEEK_V4_C4]))
        for page, row in enumerate(back)
    )
    pairs = list(zip(bytes_of(targets[PoolName.MAMBA]), bytes_of(others[PoolName.MAMBA])))
    states_same = all((new[0] == old[5]).all() and (new[1] == CANARY).all() for new, old in pairs)
    hits = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
    return {
        "ok": stored == [True] * 9 and all(all(each) for each in put.values())
        and found.kv_hit_pages == 6 and found.restorable_prefix_pages == [3, 6]
        and hits == {"kv": 9, "deepseek_v4_c4": 7, "mamba": 8}
        and (grouped is None or (grouped.kv_hit_pages == 9 and grouped.extra_pool_hit_pages[PoolName.MAMBA] == 6))
        and read == [True] * 6 and all(all(each) for each in got.values()) and not wrong and same and states_same
        and len(pairs) == 3,
        "hits": hits, "restorable": found.restorable_prefix_pages, "wrong": len(wrong), "same": [same, states_same],
        "put": {str(name): flags for name, flags in put.items()},
    }  # fmt: skip


def mamba_pool(case: Case, states: int) -> Any:
    """SGLang's own host pool of Mamba states: one temporal and two convolution buffers, all of it canary."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    layers, slots = 2, states
    info = MambaStateBufferInfo(
        temporal=torch.zeros((layers, slots, 4, 8, 16), dtype=torch.float32),
        conv=tuple(torch.zeros((layers, slots, 3, width), dtype=torch.bfloat16) for width in (32, 24)),
    )
    host = MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=case.layout)
    for each in bytes_of(host):
        each[:] = CANARY
    return host


def paged_pool(case: Case, pages: int) -> Any:
    """SGLang's own host pool of DeepSeek V4's compressed pages, all of it canary."""
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    device = [torch.zeros((pages, 640), dtype=torch.uint8) for _ in range(3)]
    host = DeepSeekV4PagedHostPool("c4", device, 640, pages, PAGE_TOKENS, layout=case.layout, pin_memory=False)
    for each in bytes_of(host):
        each[:] = CANARY
    return host


def bytes_of(host: Any) -> list[Any]:
    """A pool's buffers as (row, byte)."""
    import torch

    return [each.view(torch.uint8).reshape(each.shape[0], -1).numpy() for each in host.get_hybrid_pool_buffer()]


sglang_driver.COMMANDS.update({
    "absent": absent, "outage": outage, "clear": clear, "hybrid": hybrid, "paused": paused, "widths": widths,
})  # fmt: skip

if __name__ == "__main__":
    sys.exit(sglang_driver.main())
