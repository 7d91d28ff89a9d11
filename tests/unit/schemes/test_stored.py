"""What a store has of a prompt by a scheme, against what an engine could restore of the same values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from simm.errors import UsageError
from simm.schemes import registry
from simm.schemes.groups import first_needed, restorable
from simm.schemes.scheme import Request, Scheme
from simm.schemes.stored import Stored, stored
from simm.testing import FakeClient

TOKENS = list(range(1000, 1070))


def asked(client: Any, scheme: Scheme, tokens: Sequence[int] = TOKENS, **more: Any) -> Stored:
    return stored(client, scheme, tokens, Request(), generations={}, libraries={}, **more)


def put(client: FakeClient, keys: Sequence[str]) -> None:
    assert client.put_many(list(keys), [b"v"] * len(keys)) == [True] * len(keys)


def test_one_group_is_a_prefix_of_whole_pages() -> None:
    client, scheme = FakeClient(), Scheme("m", "sglang-simm", 16, ranks=2)
    keys = scheme.keys(TOKENS).keys
    assert asked(client, scheme).tokens == 0
    put(client, keys[:11])
    found = asked(client, scheme)
    assert found.tokens == 32 and sum(found.by_host.values()) == 8, "of the third page a rank's value is missing"
    assert asked(client, scheme, TOKENS[:15]).tokens == 0 and asked(client, scheme, TOKENS[:31]).tokens == 16
    client.delete(keys[5])
    assert asked(client, scheme).tokens == 16, "a hole"


def test_pages_of_pairs_need_the_token_behind_them() -> None:
    """As SGLang has with EAGLE. One page too few was found always: its last token was cut off the question."""
    client, scheme = FakeClient(), Scheme("m", "sglang-simm", 16, options={"bigram": True})
    keys = scheme.keys(TOKENS)
    assert len(keys.keys) == 4 * keys.per_page
    put(client, keys.keys)
    assert asked(client, scheme).tokens == 64 and asked(client, scheme, TOKENS[:65]).tokens == 64
    assert asked(client, scheme, TOKENS[:64]).tokens == 48 and asked(client, scheme, TOKENS[:16]).tokens == 0
    assert asked(client, scheme, TOKENS[:17]).tokens == 16 and asked(client, scheme, []).tokens == 0
    assert asked(client, scheme, [*TOKENS[:32], 1, 2]).tokens == 16, "another token behind it"
    assert asked(client, scheme, keys_max=2 * scheme.keys_max).tokens == 32
    client.delete(keys.keys[2 * keys.per_page])
    assert asked(client, scheme).tokens == 32


def test_groups_with_windows_as_an_engine_restores_them() -> None:
    """Random blocks of two groups and two ranks: the longest prefix of which all that is needed is there."""
    dice = random.Random(20_261_128)
    lengths = set()
    for _ in range(150):
        client = FakeClient()
        window = dice.choice((0, 5, 9, 17, 40))
        more = dice.choice(("", ",2:8:0", ",2:8:20"))
        options = {"groups": f"0:8:{dice.choice((0, 0, 12))},1:16:{window}{more}", "hash_tokens": 8,
                   "identities": "a,b", "scope": "s", "generation": "01"}  # fmt: skip
        scheme = Scheme("m", "vllm-blocks", 16, options=options)
        groups = scheme.groups(TOKENS)
        chance = dice.choice((0.02, 0.1, 0.5))
        put(client, [key for group in groups for key in group.keys if dice.random() > chance])
        there = [
            [all(client.exists_many(group.range(at, at + 1))) for at in range(len(group.keys) // group.per_block)]
            for group in groups
        ]
        best = restorable(groups, there, 0, 64, 16)
        found = asked(client, scheme)
        assert found.tokens == best
        needed = [key for each in groups for key in each.range(first_needed(each, best), best // each.block_tokens)]
        assert sum(found.by_host.values()) == len(needed)
        lengths.add(best)
    assert lengths == {0, 16, 32, 48, 64}


def test_issue_groups_are_asked_for_together() -> None:
    """One question for all groups without a window, one for all with one, and one for all that is needed."""

    class Counting(FakeClient):
        asked: list[str] = []

        def exists_many(self, keys: Sequence[str]) -> list[bool]:
            self.asked.append("exists")
            return super().exists_many(keys)

        def prefix(self, keys: Sequence[str], **more: Any) -> Any:
            self.asked.append("prefix")
            return super().prefix(keys, **more)

    client = Counting()
    options = {"groups": "0:8:0,1:16:0,2:8:9,3:16:17,4:16:40", "hash_tokens": 8, "identities": "a,b"}
    scheme = Scheme("m", "vllm-blocks", 16, options=options)
    put(client, [key for group in scheme.groups(TOKENS) for key in group.keys])
    assert asked(client, scheme).tokens == 64
    assert client.asked == ["prefix", "exists", "prefix"]
    client.delete(scheme.groups(TOKENS)[1].keys[4])
    assert asked(client, scheme).tokens == 32, "the second group's third block"


def test_the_generation_is_the_one_that_holds_now() -> None:
    """Right after a flush nothing of before counts, and then what is stored anew, though nobody registered again."""
    client = FakeClient()
    scheme = Scheme("m", "vllm-tier", 16, options={"scope": "s", "generation": f"{5:016x}"})
    put(client, scheme.groups(TOKENS)[0].keys)
    assert asked(client, scheme).tokens == 64, "as registered, where the value was evicted"
    client.put(registry.generation_key("s"), registry.GENERATION.pack(5))
    assert asked(client, scheme).tokens == 64
    client.put(registry.generation_key("s"), registry.GENERATION.pack(6))
    assert asked(client, scheme).tokens == 0, "flushed"
    put(client, scheme.groups(TOKENS[:32], generation=f"{6:016x}")[0].keys)
    assert asked(client, scheme).tokens == 32
    client.put(registry.generation_key("s"), registry.GENERATION.pack(4))
    assert asked(client, scheme).tokens == 64, "an older one than the registered one is not believed"
    nameless = Scheme("m", "vllm-tier", 16, options={"scope": "unknown"})
    assert asked(client, nameless).tokens == 0


def test_no_more_keys_are_asked_for_than_allowed() -> None:
    client, scheme = FakeClient(), Scheme("m", "sglang-simm", 16, ranks=2)
    put(client, scheme.keys(TOKENS).keys)
    assert asked(client, scheme).tokens == 64
    assert asked(client, scheme, keys_max=15).tokens == 48 and asked(client, scheme, keys_max=3).tokens == 0
    wide = Scheme("m", "sglang-simm", 1, ranks=256)
    with pytest.raises(AssertionError, match="asked"):
        asked(_Refusing(), wide)
    assert asked(_Refusing(), wide, keys_max=511).tokens == 0, "not even one page: nothing is made, nothing is asked"


class _Refusing:
    """A client that must not be asked."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is asked for")


def test_values_that_go_while_it_is_asked_are_not_claimed() -> None:
    """Between the question of what is there and that for all of it, blocks are evicted: less is claimed, or nothing."""

    class Evicting(FakeClient):
        gone: list[str] = []

        def exists_many(self, keys: Sequence[str]) -> list[bool]:
            found = super().exists_many(keys)
            for key in self.gone[:1]:
                self.delete(key)
            del self.gone[:1]
            return found

    client = Evicting()
    options = {"groups": "0:16:0,1:16:16", "scope": "s", "generation": "01"}
    scheme = Scheme("m", "vllm-blocks", 16, options=options)
    full, window = scheme.groups(TOKENS)
    put(client, [*full.keys, *window.keys])
    assert asked(client, scheme).tokens == 64
    client.gone = [window.keys[3]]
    assert asked(client, scheme).tokens == 48
    put(client, window.keys)
    client.gone = window.keys[::-1]
    assert asked(client, scheme).tokens == 0


def test_issue_a_window_of_one_token_is_refused() -> None:
    """It needs no block, so an empty store had all of every prompt."""
    with pytest.raises(UsageError, match="window"):
        asked(FakeClient(), Scheme("m", "vllm-tier", 16, options={"groups": "0:16:1"}))


def test_issue_hashes_count_as_keys() -> None:
    """A registration of some bytes made a hash for each token of a question, and was taken for one key a page."""
    assert Scheme("m", "vllm-tier", 4096, options={"hash_tokens": 1}).keys_max == 4096
    assert Scheme("m", "vllm-tier", 16).keys_max == 1


def test_a_registration_that_contradicts_itself() -> None:
    with pytest.raises(UsageError):
        asked(FakeClient(), Scheme("m", "vllm-tier", 16, options={"algorithm": "md5"}))
