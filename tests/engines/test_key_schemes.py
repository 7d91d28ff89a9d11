"""``simm.schemes`` makes the keys that the released SGLang really writes, and the hashes that its functions return."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from simm.client import Client
from simm.schemes import sglang
from simm.schemes.scheme import Scheme
from tests.engines import engine_content
from tests.engines.engine_processes import HERE, PATIENT_MS, Cluster, DriverRun, Engine

SEED = 20_261_123
PAGES = 40
PAGE_TOKENS = 16

#: Prompt -> what the engine is told of pool and rank.
CASES: dict[str, dict[str, Any]] = {
    "schemes/mha": {"pool": "mha", "layout": "page_first"},
    "schemes/mla": {"pool": "mla", "layout": "page_first_direct"},
    "schemes/rank": {"pool": "mha", "layout": "page_first", "rank": 1, "ranks": 2, "content_rank": 1},
}

#: Prints hashes and keys of SGLang's own functions.
ASK = """
import json, random, sys
from sglang.srt.mem_cache.utils import get_storage_hash_str, hash_str_to_int64
from sglang.srt.mem_cache.hicache_key_scheme import plan_unified_kv

class Key(list):
    is_bigram = False
    def __len__(self):
        return list.__len__(self) - self.is_bigram
    @property
    def token_ids(self):
        return list(self)

found = []
for case in json.loads(sys.argv[1]):
    key = Key(case["tokens"])
    key.extra_key, key.cache_salt, key.is_bigram = case["extra_key"], case["cache_salt"], case["bigram"]
    hashes = get_storage_hash_str(key, None, page_size=case["page"])
    found.append([hashes, hash_str_to_int64(hashes[0])])
plans = [plan_unified_kv(**each).suffixes for each in json.loads(sys.argv[2])]
print(json.dumps([found, plans]))
"""


@pytest.fixture(scope="module")
def written(engine: Engine, engine_cluster: Cluster) -> DriverRun:
    steps = [
        {"command": "write", "case": {"prompt": prompt, "pages": PAGES, **case}} for prompt, case in CASES.items()
    ]
    run = engine.run(engine_cluster.address, SEED, steps)
    assert run.report["ok"], f"{run.report}\n{run.said}"
    return run


@pytest.mark.engines
@pytest.mark.parametrize("prompt", CASES)
def test_every_key_that_sglang_wrote(written: DriverRun, engine_cluster: Cluster, prompt: str) -> None:
    """The keys of the prompt's pages are there, and those of eight pages more that nobody wrote are not."""
    case = CASES[prompt]
    tokens = engine_content.tokens(SEED, prompt, (PAGES + 8) * PAGE_TOKENS)
    rank = sglang.Rank(case.get("rank", 0))
    mla = case["pool"] == "mla"
    keys = sglang.simm_keys(sglang.page_hashes(tokens, PAGE_TOKENS), rank, mla=mla)
    stored = PAGES * (1 if mla else 2)
    with Client(engine_cluster.address, deadline_s=PATIENT_MS / 1000) as client:
        assert client.wait_ready()
        assert client.exists_many(keys) == [True] * stored + [False] * (len(keys) - stored)
        scheme = Scheme("m", "sglang-simm", PAGE_TOKENS, options={"mla": mla})
        found = client.exists_many(scheme.keys(tokens).keys)
        assert found.count(True) == (stored if not rank.tp else 0), "of one rank, without the others'"


def unified(**more: Any) -> dict[str, Any]:
    return {
        "model_id": "org/model", "dtype": "bfloat16", "page_size": 64, "rank_replicated": False, "local_kv_heads": 4,
        "attn_tp_rank": 1, "attn_tp_size": 2, "attn_cp_size": 1, "start_layer": 0, "end_layer": 18,
        "is_final_stage": True, **more,
    }  # fmt: skip


@pytest.mark.engines
def test_hashes_of_sglangs_own_functions(engine: Engine) -> None:
    cases = []
    for number, (extra_key, cache_salt, bigram) in enumerate(
        [(None, None, False), ("a", None, False), (None, "b", False), ("", "ü", False), (None, None, True),
         ("a", "b", True)]
    ):  # fmt: skip
        tokens = engine_content.tokens(SEED, f"hashes/{number}", 16 * 20 + bigram)
        if number == 3:
            tokens[50] = (1 << 40) + 5
        cases.append(
            {"tokens": tokens, "extra_key": extra_key, "cache_salt": cache_salt, "bigram": bigram, "page": 16}
        )
    plans = [
        unified(head_group=2, layer_partition=8),
        unified(rank_replicated=True, local_kv_heads=1, end_layer=61),
        unified(dtype="fp8_e5m2", head_group=1, page_size=1, start_layer=6, layer_partition=6),
    ]
    env = {**os.environ, "PYTHONPATH": str(HERE / "shim"), "HOME": str(engine.folder)}
    done = subprocess.run(
        [engine.python, "-c", ASK, json.dumps(cases), json.dumps(plans)], capture_output=True, text=True, env=env,
        check=False, cwd=engine.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found, suffixes = json.loads(done.stdout.splitlines()[-1])
    for case, (hashes, event) in zip(cases, found):
        mine = sglang.page_hashes(
            case["tokens"], 16, extra_key=case["extra_key"], cache_salt=case["cache_salt"], bigram=case["bigram"]
        )
        assert mine == hashes and sglang.event_hash(mine[0]) == event
    grids = [
        (sglang.Grid("org/model", "bfloat16", 64, 8, 2, 8), (0, 18), (4, 8)),
        (sglang.Grid("org/model", "bfloat16", 64), (0, 61), None),
        (sglang.Grid("org/model", "fp8_e5m2", 1, 8, 1, 6), (6, 18), (4, 8)),
    ]
    for (grid, layers, heads), theirs in zip(grids, suffixes):
        assert sglang.unified_keys(["h"], grid, layers, heads) == [f"h_{each}" for each in theirs]
