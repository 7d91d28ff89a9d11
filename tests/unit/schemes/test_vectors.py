"""Hashes and keys that the released engines made: SGLang 0.5.23, vLLM 0.32.0, LMCache 0.5.6, llm-d's router.

The vectors with ``TOKENS`` come from the engines' own functions, run on a CPU. ``PROSE`` is the beginning of a prompt
for Qwen3-0.6B in llm-d's integration tests, with block hashes that a real vLLM published.
"""

from __future__ import annotations

import pytest

from simm.errors import UsageError
from simm.schemes import llmd, lmcache, sglang, vllm

TOKENS = [(7919 * at * at + 31 * at) % 151_936 for at in range(80)]
PROSE = [
    2082, 1113, 2142, 374, 264, 4948, 19128, 323, 7203, 429, 374, 66351, 938, 315, 11198, 323,
    59415, 678, 90505, 11, 54263, 533, 7586, 315, 28922, 13, 1527, 1113, 2142, 6738, 369, 279,
    75345, 315, 279, 1584, 11, 892, 432, 9982, 311, 387, 25165, 11, 76244, 11, 323, 27756,
]  # fmt: skip
PUBLISHED = [17705339885301241772, 13360521540053240825, 1652464311825922890]


# -- vLLM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "seed", "digest"),
    [
        ("sha256_cbor", "42", "9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780"),
        ("sha256_cbor", None, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"),
        ("sha256", "42", "c0bc02c9fc92a4944335649961b9e55cc41b194bece4801e8c6ef0f0f3f5884a"),
    ],
)
def test_vllm_root(algorithm: str, seed: str | None, digest: str) -> None:
    assert vllm.none_hash(algorithm, seed or vllm.DEFAULT_SEED).hex() == digest


@pytest.mark.parametrize(
    ("algorithm", "seed", "digest"),
    [
        ("sha256_cbor", "42", "7235f837d217eb40003197e4e27040edecc66c7d7fe49f86f5b600d19aef97ac"),
        ("sha256_cbor", None, "4c68754f9d1a735e4fd044aa4edf74a2e4f779bb7d53a7d1bb4b5d656938fe51"),
        ("sha256", None, "e9ef02f174ba300ac8fbaa38adf39098c85a7826bc52640b009f2072363a99d0"),
        ("sha256", "42", "1d8409c66e051c425ac45013d3cd0b81970c74badab7841cfb1ca25c806e5a76"),
    ],
)
def test_vllm_first_block(algorithm: str, seed: str | None, digest: str) -> None:
    hashes = vllm.block_hashes(PROSE, 16, algorithm=algorithm, seed=seed or vllm.DEFAULT_SEED)
    assert len(hashes) == 3 and hashes[0].hex() == digest


def test_vllm_chain_that_was_published() -> None:
    hashes = vllm.block_hashes(PROSE, 16, algorithm="sha256_cbor", seed="42")
    assert [vllm.event_hash(each) for each in hashes] == PUBLISHED


LORA = ("Alice", "org/alice")
IMAGES = [vllm.Image("img1", 10, 20), vllm.Image("img2", 40, 5)]


@pytest.mark.parametrize(
    ("algorithm", "request_", "first", "last"),
    [
        ("sha256", {}, "fc9b6cfd6f34587a", "210b30e133adf841"),
        ("sha256", {"lora": LORA}, "5a66e388e74c75a7", "56441b7465e1b88d"),
        ("sha256", {"cache_salt": "tenant-1"}, "49411287201cf5b6", "bc7f84665fd42d67"),
        ("sha256", {"lora": LORA, "cache_salt": "s", "images": IMAGES}, "0e140a031661f852", "fef29012f46740ce"),
        ("sha256_cbor", {}, "ff809021d977339b", "0650a5ed5a6f29f0"),
        ("sha256_cbor", {"lora": LORA}, "43b028ba307df556", "0845a2d6ce35a439"),
        ("sha256_cbor", {"cache_salt": "tenant-1"}, "4e68f3d6eb6e10c3", "40428c7542fe9320"),
        ("sha256_cbor", {"lora": LORA, "cache_salt": "s", "images": IMAGES}, "ef9504a654fb2cd7", "e6e1d813cdefcb60"),
    ],
)  # fmt: skip
def test_vllm_extra_keys(algorithm: str, request_: dict[str, object], first: str, last: str) -> None:
    extras = vllm.extra_keys(5, 16, **request_)  # type: ignore[arg-type]
    hashes = vllm.block_hashes(TOKENS, 16, algorithm=algorithm, extras=extras)
    assert (hashes[0].hex()[:16], hashes[-1].hex()[:16]) == (first, last)


def test_vllm_keys() -> None:
    (first, second) = vllm.block_hashes(TOKENS[:32], 16)
    assert vllm.mooncake_keys([first], "org/m", tp_rank=1, pp_rank=2, group=3) == [
        f"org/m@tp_rank:1@pcp0@dcp0@pp_rank:2@group:3@{first.hex()}"
    ]
    assert vllm.mooncake_keys([first], "m", prefix="p")[0].startswith("p@m@tp_rank:0@")
    assert vllm.offload_key(first, 258) == first + b"\0\0\1\2"
    assert vllm.merged([first, second], 2) == [second] and vllm.merged([first, second], 1) == [first, second]


def test_algorithms_that_need_a_library() -> None:
    for algorithm in ("xxhash", "xxhash_cbor", ""):
        with pytest.raises(UsageError, match="sha256"):
            vllm.block_hashes(TOKENS, 16, algorithm=algorithm)


# -- SGLang --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "first", "last", "event"),
    [
        ({}, "3e7b9e7d37b721ec", "96cf30a25b8be756", 4502366513129791980),
        ({"cache_salt": "tenant-1"}, "ecfcec2af8c64371", "ddf1eef769b14724", -1369960517320948879),
        ({"extra_key": "lora-a", "cache_salt": ""}, "1665978e0ae7b8ad", "2c8be633eec482dd", 1613862677806299309),
    ],
)
def test_sglang_pages(request_: dict[str, str], first: str, last: str, event: int) -> None:
    hashes = sglang.page_hashes(TOKENS, 16, **request_)
    assert (hashes[0][:16], hashes[-1][:16]) == (first, last)
    assert sglang.event_hash(hashes[0]) == event


def test_sglang_tokens_beyond_32_bits() -> None:
    wide = list(TOKENS)
    wide[20] = 1 << 33
    hashes = sglang.page_hashes(wide, 16)
    assert (hashes[0][:16], hashes[-1][:16]) == ("3e7b9e7d37b721ec", "8bb30cb87dbf99c4")


def test_sglang_bigrams() -> None:
    hashes = sglang.page_hashes(TOKENS, 16, bigram=True)
    assert len(hashes) == 4, "79 pairs"
    assert hashes[0][:16] == "ea88a6859a12e77e" and sglang.event_hash(hashes[0]) == -1546803379255974018
    assert sglang.page_hashes([1], 16, bigram=True) == []


def test_sglang_keys() -> None:
    staged = sglang.Rank(1, 2, 4)
    assert sglang.simm_keys(["h"]) == ["h_0_k", "h_0_v"]
    assert sglang.simm_keys(["h"], staged) == ["h_1_2_k", "h_1_2_v"]
    assert sglang.simm_keys(["h"], mla=True) == ["h__k"]
    assert sglang.simm_keys(["h"], staged, mla=True, tag="t") == ["t_h_2_k"]
    prefix = sglang.mooncake_prefix("org/m", tag="t")
    assert prefix == "t_org-m_" and sglang.mooncake_prefix() == ""
    assert sglang.mooncake_keys(["h"], prefix=prefix, split=2) == [
        "t_org-m_h_0_k", "t_org-m_h_0_v", "t_org-m_h_1_k", "t_org-m_h_1_v",
    ]  # fmt: skip
    assert sglang.mooncake_keys(["h"], staged, pool="mamba", convolutions=2) == [
        "h_1_2_temporal", "h_1_2_conv_0", "h_1_2_conv_1"
    ]
    assert sglang.mooncake_keys(["h"], pool="indexer") == ["h__indexer"]
    assert sglang.mooncake_keys(["h"], staged, pool="indexer") == ["h_2_indexer"]
    assert sglang.mooncake_keys(["h"], pool="swa") == ["h_0_swa_k", "h_0_swa_v"]
    assert sglang.mooncake_keys(["h"], mla=True, pool="swa") == ["h__swa"]
    assert sglang.mooncake_keys(["h"], mla=True, pool="draft") == ["h__draft_k"]
    with pytest.raises(UsageError, match="no pool"):
        sglang.mooncake_keys(["h"], pool="unheard")


def test_sglang_unified_keys() -> None:
    grid = sglang.Grid("org/model", "bfloat16", 16, heads=8, head_group=2, layers=8)
    assert sglang.unified_keys(["h"], grid, (8, 18), (4, 8)) == [
        "h_ukv1-2cee542383f478a5_L8-16_H2", "h_ukv1-2cee542383f478a5_L8-16_H3",
        "h_ukv1-2cee542383f478a5_L16-18_H2", "h_ukv1-2cee542383f478a5_L16-18_H3",
    ]  # fmt: skip
    mla = sglang.Grid("org/model", "bfloat16", 64)
    assert sglang.unified_keys(["h"], mla, (0, 61)) == ["h_ukv1-e6e4fc2fba1ea55c_L0-61"]
    large = sglang.Grid("o" * 300, "fp8_e4m3", 4096, heads=256, head_group=128)
    assert sglang.unified_keys(["h"], large, (0, 61), (0, 128)) == ["h_ukv1-e9762ec884bd9694_L0-61_H0"]


@pytest.mark.parametrize(
    ("grid", "layers", "heads"),
    [
        (sglang.Grid("m", "b", 16, 8, 3), (0, 4), None),
        (sglang.Grid("", "b", 16, 8, 2), (0, 4), None),
        (sglang.Grid("m", "b", 16, 8, 2), (0, 4), (1, 3)),
        (sglang.Grid("m", "b", 16, 8, 2), (0, 4), (0, 10)),
        (sglang.Grid("m", "b", 16, 8, 2, 4), (2, 4), None),
        (sglang.Grid("m", "b", 16, 8, 0), (0, 4), None),
        (sglang.Grid("m", "b", 16, 8, 2), (4, 4), None),
    ],
)
def test_no_unified_objects(grid: sglang.Grid, layers: tuple[int, int], heads: tuple[int, int] | None) -> None:
    with pytest.raises(UsageError):
        sglang.unified_keys(["h"], grid, layers, heads)


# -- LMCache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "hashes"),
    [
        ("sha256_cbor", ["b64af11f005da1e0", "10ddd61ac6caae9a", "d0dcb7959e241ec6", "3a5935975761c786",
                         "bdff379c2a9b1675"]),
        ("sha256", ["c473a449c4280610", "37203dd785e8418", "ecc87d38a6154283", "3825740d09e831ac",
                    "b13d205045a420ea"]),
        ("builtin", ["6d02e997563688b", "56a2de152c8de2f5", "7b47f4acb69a0109", "-47d2bd2d33e16554",
                     "569f4ac6e661dcf3"]),
    ],
)  # fmt: skip
def test_lmcache_in_an_engine(algorithm: str, hashes: list[str]) -> None:
    found = lmcache.chunk_hashes(TOKENS, 16, algorithm=algorithm)
    keys = lmcache.engine_keys(found, "org/model", "bfloat16", world_size=4, worker_id=2)
    assert keys == [f"org/model@4@2@{each}@bfloat16" for each in hashes]


def test_lmcache_keys_of_layers_and_tags() -> None:
    assert lmcache.engine_keys([255], "org/model", "half", world_size=4, worker_id=2, layers=4, tags={"a": "b"})[3] == (
        "org/model@4@2@ff@half@3@a%b"
    )
    tagged = lmcache.engine_keys([0xBDFF379C2A9B1675], "org/model", "bfloat16", worker_id=2, tags={"user": "u1"})
    assert tagged == ["org/model@1@2@bdff379c2a9b1675@bfloat16@user%u1"]


def test_lmcache_server() -> None:
    hashes = lmcache.server_chunk_hashes(TOKENS, 16)
    assert [hashes[0].hex()[:16], hashes[4].hex()[:16]] == ["ff809021d977339b", "0650a5ed5a6f29f0"]
    assert lmcache.object_keys([b"\xab"], "org/m", kv_rank=17, group=31) == ["org/m@00000011@1f@ab"]
    assert lmcache.object_keys([b"\xab"], "m", cache_salt="s") == ["m@00000000@0@ab@s"]
    for model, salt in (("a@b", ""), ("m", "a@b"), ("m", "s" * 129), ("m", "a/b")):
        with pytest.raises(UsageError):
            lmcache.object_keys([b""], model, cache_salt=salt)


def test_lmcache_server_with_blake3() -> None:
    blake3 = pytest.importorskip("blake3", reason="blake3 is not installed")
    hashes = lmcache.server_chunk_hashes(TOKENS, 16, blake3=lambda data: blake3.blake3(data).digest())
    assert [hashes[0].hex()[:16], hashes[4].hex()[:16]] == ["63d889d66d3826ec", "8b8337a30e3df8ae"]


def test_lmcache_server_hashes_what_blake3_would() -> None:
    """The bytes that go into it: the digest before, then big-endian token ids; at first a zero parent and token."""
    seen: list[bytes] = []
    lmcache.server_chunk_hashes(TOKENS[:33], 16, blake3=lambda data: seen.append(data) or bytes((len(seen),)) * 32)
    assert [len(each) for each in seen] == [12, 32 + 64, 32 + 64] and seen[0] == bytes(12)
    assert seen[2] == b"\2" * 32 + b"".join(each.to_bytes(4, "big") for each in TOKENS[16:32])


# -- llm-d ---------------------------------------------------------------------------------------------


def test_llmd_keys() -> None:
    assert llmd.fnv(b"") == 0xCBF29CE484222325 and llmd.fnv(b"42") == 0x07EE7E07B4B19223
    assert llmd.block_keys(PROSE, 16, seed="42") == [
        1232996234064703281, 4081027702767042585, 6770700869230650880,
    ]  # fmt: skip
    assert llmd.block_keys(PROSE, 16, seed="42", model="m") != llmd.block_keys(PROSE, 16, seed="42")


# -- all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 79, 80])
def test_a_page_that_is_not_full_has_no_key(count: int) -> None:
    """And a longer prompt begins with the keys of a shorter one."""
    part = TOKENS[:count]
    assert sglang.page_hashes(part, 16) == sglang.page_hashes(TOKENS, 16)[: count // 16]
    assert vllm.block_hashes(part, 16) == vllm.block_hashes(TOKENS, 16)[: count // 16]
    assert lmcache.chunk_hashes(part, 16) == lmcache.chunk_hashes(TOKENS, 16)[: count // 16]
    assert llmd.block_keys(part, 16) == llmd.block_keys(TOKENS, 16)[: count // 16]


@pytest.mark.parametrize("size", [0, -1, 8193, 1.5, "16"])
def test_no_size_of_a_page(size: int) -> None:
    for hashes in (sglang.page_hashes, vllm.block_hashes, lmcache.chunk_hashes, llmd.block_keys):
        with pytest.raises(UsageError):
            hashes(TOKENS, size)  # type: ignore[operator]


def test_extra_keys_of_too_few_blocks() -> None:
    with pytest.raises(UsageError, match="extra keys of 1 blocks"):
        vllm.block_hashes(TOKENS, 16, extras=[None])
