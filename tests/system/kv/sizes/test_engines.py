"""Sizes of views as engines use them: unregistered views, FlexKV, LMCache, and two models that share keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any

import numpy as np
import pytest

from simm.errors import Code
from simm.kv import Block, BlockView, Store
from simm.sdk import reads
from tests.support.dose import dose
from tests.support.kv_sizes import (
    CANARY,
    FAILED,
    KIB,
    Host,
    filled,
    store_by,
    surrounded,
    value_of,
)

pytestmark = pytest.mark.quick


# --- who else calls it, and how -----------------------------------------------------------------


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_unregistered_views_take_less_than_they_have_room_for(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks (upstream's own tests read into a block of 1000 times the value), and views without an MR."""
    with store_by(path, request, monkeypatch) as store:
        for size in (500, 40_000):
            value = value_of(size, size)
            assert store.put("k", filled(value)) == 0
            room = store.allocate(1000 * 500)
            assert store.get("k", room.view()) == size
            assert bytes(room._span.view()[: size + 1]) == value + b"\0"
            pool = np.full(size + 100, CANARY, np.uint8)
            for view in (BlockView.from_tensor(pool), BlockView.from_buffer(pool.ctypes.data, pool.size, None)):
                pool[:] = CANARY
                assert store.mget(["k"] * 20, [view] * 20) == [size] * 20
                assert pool.tobytes() == surrounded(size + 100, 0, value)
            assert store.get("k", BlockView.from_tensor(pool[: size - 1])) == FAILED
            assert store.exists("k"), "nobody says that it is wrong"
        assert store.stats()["unfit"] == 0


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_as_flexkv_calls_it(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up into a block of 4 KiB, then pages of one flat tensor that is registered by address and size."""
    with store_by(path, request, monkeypatch) as store:
        text = b"flexkv_simm_warmup_key" + b"0" * 32
        assert store.put("short", filled(text)) == 0
        block = store.allocate(4096)
        assert store.get("short", block.view()) == len(text)
        page, count = 12 * KIB, 30
        memory = Host("pointer", count * page + 6)
        memory.pool[:] = np.frombuffer(value_of("pages", memory.pool.size), np.uint8)
        pages = [memory.view(6 + at * page, page) for at in range(count)]
        before = memory.data()
        keys = [str(random.Random(at).getrandbits(64)) for at in range(count)]
        assert store.mexists(keys) == [False] * count
        assert store.mput(keys, pages) == [0] * count
        memory.pool[6:] = 0
        assert store.mexists(keys) == [True] * count
        assert store.mget(keys, pages) == [page] * count
        assert memory.data() == before
        unregistered = [BlockView.from_buffer(memory.pool.ctypes.data + 6, page, None)]  # before it has its MR
        assert store.mget(keys[:1], unregistered) == [page]


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_as_lmcache_calls_it(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor after the other out of a registered arena, each with the shape that was stored; the last is short."""

    async def body(store: Store) -> None:
        memory = Host("tensor", 64 * KIB)
        chunks = {str(hash(("chunk", at))): size for at, size in enumerate([16 * KIB, 16 * KIB, 5000])}
        at, values = 0, {}
        for key, size in chunks.items():
            values[key] = value_of(key, size)
            memory.pool[at : at + size] = np.frombuffer(values[key], np.uint8)
            assert await store.put_async(key, memory.view(at, size)) == 0
            at += size
        for key, size in chunks.items():
            memory.reset()
            assert await store.exists_async(key) is True
            assert await store.get_async(key, memory.view(2000, size)) == size
            assert memory.data() == surrounded(64 * KIB, 2000, values[key])

    with store_by(path, request, monkeypatch) as store:
        asyncio.run(body(store))


# --- two models ---------------------------------------------------------------------------------


class Model:
    """An engine that stores its pages as SGLang does: it asks which exist, puts the others, and gets them later."""

    def __init__(self, store: Store, name: str, page: int, keys: list[str]) -> None:
        self.store, self.name, self.page, self.keys = store, name, page, keys
        self.memory = Host("pointer", page * len(keys))
        self.hits = self.wrong = 0

    def content(self, number: int) -> bytes:
        return value_of((self.name, number), self.page)

    def views(self, numbers: list[int]) -> list[BlockView]:
        return [self.memory.view(number * self.page, self.page) for number in numbers]

    def backup(self, numbers: list[int]) -> None:
        there = self.store.mexists([self.keys[number] for number in numbers])
        todo = [number for number, hit in zip(numbers, there) if not hit]
        for number in todo:
            at = number * self.page
            self.memory.pool[at : at + self.page] = np.frombuffer(self.content(number), np.uint8)
        keys = [self.keys[number] for number in todo]
        assert self.store.mput(keys, self.views(todo)) == [0] * len(todo)

    def prefetch(self, numbers: list[int]) -> None:
        self.memory.reset()
        got = self.store.mget([self.keys[number] for number in numbers], self.views(numbers))
        for number, length in zip(numbers, got):
            at = number * self.page
            there = self.memory.pool[at : at + self.page].tobytes()
            if length > 0:
                self.hits += 1
                self.wrong += there != self.content(number)
            else:
                assert there == bytes([CANARY]) * self.page


def two_models(first: Store, second: Store, sizes: tuple[int, int]) -> tuple[Model, Model]:
    keys = [f"{hashlib.sha256(b'%d' % at).hexdigest()}_0_{half}" for at in range(20) for half in "kv"]
    models = Model(first, "a", sizes[0], keys), Model(second, "b", sizes[1], keys)
    rng = random.Random(5)
    for _ in range(60):
        model = rng.choice(models)
        start = rng.randrange(len(keys))
        numbers = list(range(start, min(len(keys), start + rng.randrange(1, 30))))
        (model.backup if rng.random() < 0.5 else model.prefetch)(numbers)
    return models


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_two_models_that_share_keys_get_misses_and_never_each_others_pages(
    path: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_by(path, request, monkeypatch) as store:
        models = two_models(store, store, (3000, 4096))
        assert [model.wrong for model in models] == [0, 0]
        assert all(model.hits for model in models), "what one of them puts it can use until the other comes"
        assert store.stats()["unfit"] > 20


def test_mutation_two_models_without_the_check(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "fits", lambda length, sink: length <= len(sink))
    assert [model.wrong > 0 for model in two_models(store, store, (3000, 4096))] == [False, True]


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("sizes", [(3000, 4096), (4096, 4096)], ids=["other pages", "pages of one size"])
def test_two_models_with_namespaces_of_their_own_both_hit(
    path: str, sizes: tuple[int, int], request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_by(path, request, monkeypatch) as first:
        monkeypatch.setenv("SIMM_NAMESPACE", namespace + "-b")
        with Store() as second:
            models = two_models(first, second, sizes)
            for model in models:
                everything = list(range(len(model.keys)))
                model.backup(everything)
                model.hits = 0
                model.prefetch(everything)
                assert (model.hits, model.wrong) == (len(everything), 0)
            assert first.stats()["unfit"] == second.stats()["unfit"] == 0


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize("by", dose(["environment", "file"], quick=1))
def test_stores_of_two_namespaces_never_see_each_others_values(
    path: str, by: str, request: pytest.FixtureRequest, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with store_by(path, request, monkeypatch) as first:
        if by == "environment":
            monkeypatch.setenv("SIMM_NAMESPACE", namespace + "-b")
        else:
            (tmp_path / "simm.json").write_text(json.dumps({"client": {"namespace": namespace + "-b"}}))
            monkeypatch.delenv("SIMM_NAMESPACE")
            monkeypatch.setenv("SIMM_CONFIG", str(tmp_path / "simm.json"))
        with Store() as second:
            assert second._client is not first._client
            assert second._client is not None and second._client.namespace == namespace + "-b"
            room = Block(5)
            for one, other, mine in ((first, second, b"first"), (second, first, b"2nd.."), (first, second, b"third")):
                assert one.mput(["k", "l"], [filled(mine)] * 2) == [0, 0]
                assert one.delete("l") == 0
                assert one.get("k", room.view()) == 5
                assert bytes(room._span.view()) == mine
                assert other.get("l", room.view()) == FAILED
                assert other.exists("l") is False
                assert other.delete("l") == Code.KEY_NOT_FOUND
            assert second.get("k", room.view()) == 5
            assert bytes(room._span.view()) == b"2nd.."
            assert second.delete("k") == 0
            assert first.mexists(["k", "l"]) == [True, False]
            with Store() as third:
                assert third._client is second._client
                assert third.exists("k") is False
