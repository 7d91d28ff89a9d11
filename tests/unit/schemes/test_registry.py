"""Registrations of key schemes: the keys of all ranks, page by page, and what is read back out of the store."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest

from simm.errors import UsageError
from simm.schemes import lmcache, registry, sglang, vllm
from simm.schemes.registry import Registered
from simm.schemes.scheme import Request, Scheme
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
    weighted = Scheme("m", "lmcache", 16, ranks=2, options={"dtype": "half", "head": "0a/"})
    assert weighted.keys(TOKENS).keys == [f"0a/{key}" for key in keys]


def test_keys_of_simms_connector_and_tier_for_vllm() -> None:
    """Of all groups and ranks, behind scope and generation; a group with larger blocks has every second hash."""
    options: dict[str, Any] = {
        "scope": "s", "generation": "01", "algorithm": "sha256_cbor", "seed": "0", "hash_tokens": 8,
        "groups": "0:8:0,1:16:9", "identities": "a,b", "loras": json.dumps({"sql": "/sql"}),
    }  # fmt: skip
    scheme = Scheme("m", "vllm-blocks", 16, ranks=2, options=options)
    hashes = vllm.block_hashes(TOKENS, 8, algorithm="sha256_cbor", seed="0")
    full, window = scheme.groups(TOKENS)
    assert (full.block_tokens, full.window, full.per_block, len(full.keys)) == (8, 0, 2, 16)
    assert (window.block_tokens, window.window, window.per_block, len(window.keys)) == (16, 9, 2, 8)
    assert full.range(1, 2) == [f"s/01/{each}/0/{hashes[1].hex()}" for each in "ab"]
    assert window.range(1, 2) == [f"s/01/{each}/1/{hashes[3].hex()}" for each in "ab"]
    assert scheme.groups(TOKENS, generation="02")[0].keys[0].startswith("s/02/a/0/")
    keys, per_page = scheme.keys(TOKENS)
    assert per_page == 6 and keys[:6] == [*full.range(0, 2), *window.range(0, 1)]
    extras = vllm.extra_keys(8, 8, lora=("sql", "/sql"), cache_salt="t")
    salted = vllm.block_hashes(TOKENS, 8, algorithm="sha256_cbor", seed="0", extras=extras)
    asked = scheme.groups(TOKENS, Request(cache_salt="t", lora=("sql", None)))[0].keys
    assert asked[0] == f"s/01/a/0/{salted[0].hex()}"
    assert scheme.groups(TOKENS, Request(cache_salt="t", lora=("sql", "/sql")))[0].keys == asked
    with pytest.raises(UsageError, match="adapter"):
        scheme.groups(TOKENS, Request(lora=("other", None)))
    options = {"scope": "s", "generation": "1", "hash_tokens": 16, "groups": "2:32:0"}
    tier = Scheme("m", "vllm-tier", 32, options=options)
    plain = vllm.block_hashes(TOKENS, 16)
    assert tier.keys(TOKENS).keys == [f"s/1/2/{each.hex()}" for each in plain[1::2]]


def test_keys_of_lmcaches_server_need_its_hash() -> None:
    scheme = Scheme("org/m", "lmcache-server", 16, ranks=2, options={"object_groups": 2})
    with pytest.raises(UsageError, match="blake3"):
        scheme.keys(TOKENS)
    libraries = {"blake3": lambda data: hashlib.sha256(data).digest()}
    keys, per_page = scheme.keys(TOKENS, Request(cache_salt="t"), libraries=libraries)
    hashes = lmcache.server_chunk_hashes(TOKENS, 16, blake3=libraries["blake3"])
    assert per_page == 4 and keys[:4] == [
        f"org/m@{rank}@{group}@{hashes[0].hex()}@t" for group in (0, 1) for rank in ("02000200", "02010201")
    ]
    weighted = Scheme("org/m", "lmcache-server", 16, ranks=2, options={"object_groups": 2, "head": "0a/"})
    assert weighted.keys(TOKENS, Request(cache_salt="t"), libraries=libraries).keys == [f"0a/{key}" for key in keys]
    with pytest.raises(UsageError, match="salt"):
        scheme.keys(TOKENS, Request(cache_salt="a/b"), libraries=libraries)
    plain = Scheme("org/m", "lmcache-server", 16, options={"algorithm": "sha256", "seed": "1"})
    assert plain.keys(TOKENS).keys == lmcache.object_keys(
        lmcache.server_chunk_hashes(TOKENS, 16, algorithm="sha256", seed="1"), "org/m", kv_rank=lmcache.kv_rank(1, 0)
    )


@pytest.mark.parametrize("scheme", ["sglang-simm", "sglang-pages", "lmcache", "lmcache-server"])
def test_what_adapters_do_to_keys_is_not_guessed(scheme: str) -> None:
    with pytest.raises(UsageError, match="adapter"):
        Scheme("m", scheme, 16).keys(TOKENS, Request(lora=("sql", "/sql")))


def test_keys_through_the_face_of_mooncake_are_in_its_scope() -> None:
    scoped = {"scope": "mooncake/default", "generation": "07"}
    for name in ("sglang-mooncake", "vllm-mooncake", "lmcache"):
        plain, behind = Scheme("m", name, 16), Scheme("m", name, 16, options=scoped)
        assert behind.keys(TOKENS).keys == [f"mooncake/default/07/{key}" for key in plain.keys(TOKENS).keys]
    long = Scheme("m", "lmcache", 16, options={**scoped, "model_name": "m" * 500})
    assert {len(key) for key in long.keys(TOKENS).keys} == {len("sha256:") + 64}, "as SiMM stores long keys"


def test_a_prompt_without_a_full_page() -> None:
    assert Scheme("m", "sglang-simm", 128).keys(TOKENS).keys == []


WRONG: list[dict[str, Any]] = [
    {"model": ""}, {"model": 7}, {"model": "m" * 2000}, {"scheme": "unheard"}, {"page": 0}, {"page": 1 << 20},
    {"page": "16"}, {"page": True}, {"ranks": 0}, {"ranks": 1 << 20}, {"stages": -1}, {"epoch": -1}, {"epoch": 1 << 64},
    {"options": {"unheard": 1}}, {"options": {"mla": 1}}, {"options": {"tag": "t" * 2000}}, {"namespace": None},
    {"ranks": 4096, "stages": 4096}, {"pools": ("kv",) * 40_000},
    {"scheme": "sglang-unified", "options": {"heads": 4096, "model_layers": 4096}},
    {"model": "\ud800"}, {"options": {"tag": "\ud800"}},
    *({"scheme": "vllm-blocks", "options": {"groups": groups}} for groups in (
        "0", "0:16", "0:16:0:0", "a:16:0", "0:0:0", "0:7:0", "0:-16:0", "0:32:0", ",", "0:16:0," * 65,
        "0:16:9999999999", "0:\u0661\u0666:0",
    )),
    {"scheme": "vllm-tier", "options": {"hash_tokens": 3}}, {"scheme": "vllm-tier", "options": {"identities": "a"}},
    {"scheme": "vllm-blocks", "options": {"identities": "," * 5000, "groups": ",".join(["0:1:0"] * 64)}},
    {"scheme": "lmcache-server", "options": {"object_groups": 8192}, "ranks": 4096},
    {"scheme": "vllm-blocks", "options": {"loras": "x" * 9000}},
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


def test_of_two_that_register_at_once_none_is_lost() -> None:
    """The second one writes between the first one's read and put: the first one looks, and registers again."""
    client, other = FakeClient(), Scheme("m", "lmcache", 64)
    mine = Scheme("m", "lmcache", 256)

    class Late:
        get_into_many_at_owner = staticmethod(client.get_into_many_at_owner)
        puts = 0

        def put(self, key: str, value: Any) -> bool:
            self.puts += 1
            stored = client.put(key, value)
            if self.puts == 1:
                client.put(key, registry.as_value([Registered(other)]))
            return stored

    late = Late()
    assert registry.register(late, mine) and registry.registered(client, "m") == [other, mine]
    assert registry.register(late, mine) and late.puts == 2, "it is there: nothing is put"

    class Never(Late):
        def put(self, key: str, value: Any) -> bool:
            self.puts = 0
            return super().put(key, value)

    assert not registry.register(Never(), Scheme("m", "lmcache", 128)), "others win each time"


def test_a_registration_with_more_adapters_takes_the_place_of_the_one_before() -> None:
    client = FakeClient()

    def scheme(generation: str = "1", **loras: str) -> Scheme:
        options = {"scope": "s", "generation": generation, "loras": json.dumps(loras)}
        return Scheme("m", "vllm-blocks", 16, options=options)

    for each in (scheme(), scheme(a="/a"), scheme(a="/a", b="/b")):
        registry.register(client, each)
    assert registry.registered(client, "m") == [scheme(a="/a", b="/b")]
    registry.register(client, scheme(c="/c"))
    assert registry.registered(client, "m") == [scheme(a="/a", b="/b"), scheme(c="/c")], "of another engine"
    registry.register(client, scheme("2"))
    assert registry.registered(client, "m") == [scheme("2")], "behind a flush"


def test_issue_what_a_process_registered_before_gives_way() -> None:
    """A restarted engine with another scope: the former keys were counted until their registration was dropped."""
    client = FakeClient()

    def scheme(scope: str) -> Scheme:
        return Scheme("m", "vllm-blocks", 16, options={"scope": scope, "generation": "1"})

    def registered() -> list[str]:
        return [each.scope for each in registry.registered(client, "m")]

    registry.register(client, scheme("nobody's"))
    for by in ("first", "second"):
        assert registry.register(client, scheme("old"), by)
    assert registry.register(client, scheme("new"), "first")
    assert registered() == ["nobody's", "old", "new"], "the second one still has it"
    assert registry.register(client, scheme("new"), "second") and registered() == ["nobody's", "new"]
    assert registry.register(client, scheme("more"), "second", also=[scheme("new"), scheme("more")])
    assert registry.register(client, scheme("third's"), "third", over=lambda by: by == "first")
    assert registered() == ["nobody's", "new", "more", "third's"]
    assert registry.register(client, scheme("last"), "third", over=lambda by: by != "third")
    assert registered() == ["nobody's", "last"], "of processes that have ended, and its own"
    for number in range(3 * registry.OWNERS_MAX):
        registry.register(client, scheme("all"), f"owner {number}")
    (*_, newest) = registry.parse(client.get(registry.value_key("m", "vllm-blocks")) or b"")
    assert len(newest.by) == registry.OWNERS_MAX and newest.by[-1] == f"owner {3 * registry.OWNERS_MAX - 1}"


@pytest.mark.full
def test_issue_names_of_processes_leave_room_for_the_registrations() -> None:
    """A deployment has many processes, whose names are as long as all else: the oldest deployments were dropped."""
    client, key = FakeClient(), registry.value_key("m", "sglang-simm")
    for rank in range(1, registry.DEPLOYMENTS_MAX + 1):
        for at in range(8):
            by = f"{rank}.{at}".ljust(registry.OWNER_MAX)
            assert registry.register(client, Scheme("m", "sglang-simm", 16, ranks=rank), by)
            (*_, newest) = registry.parse(client.get(key) or b"")
            assert newest.by[-1] == by
    assert [each.ranks for each in registry.registered(client, "m")] == list(range(1, registry.DEPLOYMENTS_MAX + 1))
    assert len(client.get(key) or b"") <= registry.VALUE_BYTES_MAX


@pytest.mark.parametrize("by", ["text", 7, {"a": 1}, [7, None], ["x" * 200], [["a"]]])
def test_owners_that_are_none_are_left_out(by: Any) -> None:
    (item,) = json.loads(registry.as_value([Registered(Scheme("m", "lmcache", 64))]))
    assert registry.parse(json.dumps([{**item, "by": by}]).encode()) == [Registered(Scheme("m", "lmcache", 64))]


def test_a_huge_value_is_not_read() -> None:
    """Anybody may put one there; the others' registrations are read all the same."""
    client = FakeClient()
    mine = Scheme("m", "lmcache", 256)
    registry.register(client, mine)
    client.put(registry.value_key("m", "sglang-simm"), bytes(8 << 20))
    client.put(registry.generation_key("s"), bytes(8 << 20))
    assert registry.registered(client, "m") == [mine] and registry.generation_of(client, "s") == ""
    client.put(registry.generation_key("s"), registry.GENERATION.pack(26))
    assert registry.generation_of(client, "s") == "000000000000001a"


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
    options: dict[str, Any] = {"groups": "0:8:0,1:16:9", "hash_tokens": 8, "identities": "a,b", "loras": '{"a": "b"}'}
    plain = Scheme("m", "sglang-simm", 16)
    good = registry.as_value([
        Registered(plain, ("a", "b")), Registered(Scheme("m", "vllm-blocks", 16, options=options)), Registered(plain),
    ])  # fmt: skip
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
            assert all(isinstance(owner, str) for owner in each.by)
            try:
                each.scheme.keys(TOKENS)
            except UsageError:
                pass  # an algorithm that nobody knows
