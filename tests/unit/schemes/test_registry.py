"""Registrations of key schemes: the keys of all ranks, page by page, and what is read back out of the store."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from simm.errors import UsageError
from simm.schemes import lmcache, registry, sglang, vllm
from simm.schemes.registry import Request, Scheme
from simm.testing import FakeClient

TOKENS = list(range(1000, 1070))


def test_sglang_keys_of_all_ranks() -> None:
    scheme = Scheme("m", "sglang-simm", 16, ranks=2, stages=2)
    keys, per_page = scheme.keys(TOKENS)
    hashes = sglang.page_hashes(TOKENS, 16)
    assert per_page == 8 and len(keys) == 4 * 8
    assert keys[8:16] == [
        f"{hashes[1]}_{rank}_{stage}_{part}" for stage in (0, 1) for rank in (0, 1) for part in ("k", "v")
    ]
    salted = scheme.keys(TOKENS, Request(cache_salt="s")).keys
    assert not set(salted) & set(keys)
    assert Scheme("m", "sglang-simm", 16, ranks=8, options={"mla": True}).keys(TOKENS).per_page == 1


def test_sglang_keys_of_pools() -> None:
    scheme = Scheme(
        "m", "sglang-mooncake", 16, ranks=2, pools=("kv", "indexer"), options={"model_name": "a/b", "mla": True}
    )
    keys, per_page = scheme.keys(TOKENS)
    assert per_page == 2 and keys[0].startswith("a-b_") and keys[0].endswith("__k") and keys[1].endswith("__indexer")


def test_unified_keys_need_no_rank() -> None:
    options: dict[str, Any] = {"heads": 8, "head_group": 4, "layers": 16, "model_layers": 32}
    scheme = Scheme("m", "sglang-unified", 16, ranks=4, options=options)
    keys, per_page = scheme.keys(TOKENS)
    grid = sglang.Grid("m", "bfloat16", 16, 8, 4, 16)
    assert per_page == 4 and keys == sglang.unified_keys(sglang.page_hashes(TOKENS, 16), grid, (0, 32))


def test_vllm_and_lmcache_keys() -> None:
    scheme = Scheme("m", "vllm-mooncake", 16, ranks=2, options={"algorithm": "sha256_cbor", "seed": "0"})
    keys, per_page = scheme.keys(TOKENS, Request(lora=("a", "b"), cache_salt="s"))
    extras = vllm.extra_keys(4, 16, lora=("a", "b"), cache_salt="s")
    hashes = vllm.block_hashes(TOKENS, 16, algorithm="sha256_cbor", seed="0", extras=extras)
    assert per_page == 2 and keys[2:4] == [vllm.mooncake_keys(hashes, "m", tp_rank=rank)[1] for rank in (0, 1)]
    scheme = Scheme("m", "lmcache", 16, ranks=2, options={"dtype": "half"})
    keys, per_page = scheme.keys(TOKENS)
    assert per_page == 2 and keys[1] == lmcache.engine_keys(
        lmcache.chunk_hashes(TOKENS, 16), "m", "half", world_size=2, worker_id=1
    )[0]  # fmt: skip


def test_a_prompt_without_a_full_page() -> None:
    assert Scheme("m", "sglang-simm", 128).keys(TOKENS).keys == []


WRONG: list[dict[str, Any]] = [
    {"model": ""}, {"model": 7}, {"model": "m" * 2000}, {"scheme": "unheard"}, {"page": 0}, {"page": 1 << 20},
    {"page": "16"}, {"page": True}, {"ranks": 0}, {"ranks": 1 << 20}, {"stages": -1}, {"epoch": -1}, {"epoch": 1 << 64},
    {"options": {"unheard": 1}}, {"options": {"mla": 1}}, {"options": {"tag": "t" * 2000}}, {"namespace": None},
    {"ranks": 4096, "stages": 4096}, {"pools": ("kv",) * 40_000},
    {"scheme": "sglang-unified", "options": {"heads": 4096, "model_layers": 4096}},
    {"scheme": "sglang-mooncake", "options": {"split": -1}}, {"scheme": "lmcache", "options": {"layers": 1 << 40}},
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_no_registration(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Scheme(**{"model": "m", "scheme": "sglang-simm", "page": 16, **fields})


def test_register_and_read() -> None:
    client = FakeClient()
    one = Scheme("org/m", "sglang-simm", 64, ranks=2, namespace="n", epoch=3, options={"tag": "t"})
    two = Scheme("org/m", "lmcache", 256, options={"root": -5})
    three = Scheme("org/m", "sglang-simm", 64, ranks=4)
    for each in (one, two, three, one):
        assert registry.register(client, each)
    assert registry.registered(client, "org/m") == [three, one, two]
    assert registry.registered(client, "other") == []


def test_a_value_keeps_its_bounds() -> None:
    client = FakeClient()
    for rank in range(1, 200):
        registry.register(client, Scheme("m", "sglang-simm", 16, ranks=rank))
    found = registry.registered(client, "m")
    assert len(found) == registry.DEPLOYMENTS_MAX and found[-1].ranks == 199
    for rank in range(1, 100):
        registry.register(client, Scheme("m", "sglang-simm", 16, ranks=rank, options={"tag": "\0" * 1000}))
    assert 1 < len(registry.registered(client, "m")) < registry.DEPLOYMENTS_MAX
    assert len(client.get(registry.value_key("m", "sglang-simm")) or b"") <= registry.VALUE_BYTES_MAX


def test_other_values_under_the_key_are_not_believed() -> None:
    """Cut, damaged and nonsensical values: no exception, and only registrations that can be."""
    good = registry.as_value([Scheme("m", "sglang-simm", 16)] * 3)
    assert len(registry.parse(good)) == 3
    mixed = json.dumps([*json.loads(good), {"model": "m"}, 7, None, {**json.loads(good)[0], "page": -1}]).encode()
    assert len(registry.parse(mixed)) == 3
    for value in (b"", b"{}", b"7", b"[[[", b"[" * 100_000, b"\xff", b"null", good + bytes(registry.VALUE_BYTES_MAX)):
        assert registry.parse(value) == []
    dice = random.Random(7)
    for _ in range(500):
        damaged = bytearray(good[: dice.randrange(len(good) + 1)])
        for _ in range(dice.randrange(4)):
            if damaged:
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        for each in registry.parse(bytes(damaged)):
            each.keys(TOKENS)
