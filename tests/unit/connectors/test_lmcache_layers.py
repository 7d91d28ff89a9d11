"""LMCache with ``use_layerwise``: a layer's chunk in a form that this engine does not use is a miss, and is dropped.

Engines with and without ``enable_blending`` can have the same keys, and chunks of as many bytes. LMCache's GPU
connector asserts the form, so a wrong one would end the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.testing import FakeClient, FakeStore
from tests.support import fake_lmcache
from tests.support.fake_lmcache import BFLOAT16, CHUNK, FLOAT16, LAYERS, WIDTH, LayerCacheEngineKey, MemoryFormat

#: An engine's settings, and the chunk of a layer as LMCache's engine makes it: its form, and its shape for some tokens.
ENGINES: dict[str, tuple[dict[str, Any], MemoryFormat, Any]] = {
    "plain": ({}, MemoryFormat.KV_T2D, lambda tokens: (tokens, 2, WIDTH)),
    "blending": ({"enable_blending": True}, MemoryFormat.KV_2TD, lambda tokens: (2, tokens, WIDTH)),
    "mla": ({"mla": True}, MemoryFormat.KV_MLA_FMT, lambda tokens: (tokens, WIDTH)),
}
KEYS = [LayerCacheEngineKey(7, layer_id=layer) for layer in range(LAYERS)]


@pytest.fixture
def module() -> Iterator[Any]:
    with fake_lmcache.engine() as made:
        yield made


class Engine:
    """An engine's connector over a store that others use, too."""

    def __init__(self, module: Any, store: FakeStore, name: str) -> None:
        config, self.form, self.shape = ENGINES[name]
        self.client = FakeClient(store=store)
        self.connector = fake_lmcache.connector_of(module, self.client, **config)

    def chunk(self, seed: int, tokens: int = CHUNK, dtype: Any = BFLOAT16, **other: Any) -> Any:
        made = fake_lmcache.MemoryObj([other.get("shape", self.shape(tokens))], [dtype], other.get("form", self.form))
        made.byte_array[:] = random.Random(seed).randbytes(len(made.byte_array))
        return made

    def put(self, keys: list[Any], chunks: list[Any]) -> None:
        asyncio.run(self.connector.batched_put(keys, chunks))

    def get(self, keys: list[Any]) -> list[Any]:
        """Return the chunks that are found; what is no hit holds no memory."""
        found: list[Any] = asyncio.run(self.connector.batched_get(keys))
        assert self.connector._backend.used() == sum(each is not None for each in found)
        for each in filter(None, found):
            assert each.metadata.fmt is self.form, "LMCache asserts it"
            each.ref_count_down()
        return [each and bytes(each.byte_array) for each in found]

    def close(self) -> None:
        asyncio.run(self.connector.close())
        self.client.close()


@pytest.fixture
def made(module: Any) -> Iterator[Any]:
    store, engines = FakeStore(), []

    def make(name: str) -> Engine:
        engines.append(Engine(module, store, name))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_finds_what_its_like_has_stored(made: Any, name: str) -> None:
    """The control: full chunks and a shorter one, by the engine that stored them and by another one."""
    one, other = made(name), made(name)
    chunks = [one.chunk(seed, tokens) for seed, tokens in enumerate((CHUNK, CHUNK, 5))]
    one.put(KEYS, chunks)
    wanted = [bytes(each.byte_array) for each in chunks]
    for _ in range(2):  # the first get learns what a layer's chunk is
        assert one.get(KEYS) == other.get(KEYS) == wanted


@pytest.mark.parametrize("name", ENGINES)
def test_a_short_chunk_that_comes_first_costs_full_ones_nothing(
    made: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each full one was read twice from then on."""
    engine = made(name)
    chunks = [engine.chunk(seed, tokens) for seed, tokens in enumerate((5, CHUNK, CHUNK))]
    engine.put(KEYS, chunks)
    for key in KEYS[:2]:
        assert engine.get([key]) != [None]
    monkeypatch.setattr(engine.client, "get_many", lambda keys: pytest.fail("a second read"))
    assert engine.get(KEYS[1:]) == [bytes(each.byte_array) for each in chunks[1:]]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("writer, reader", [("plain", "blending"), ("blending", "plain"), ("mla", "plain"),
                                            ("plain", "mla"), ("blending", "mla")])  # fmt: skip
def test_a_chunk_of_another_form_is_a_miss_and_makes_room(made: Any, writer: str, reader: str, known: bool) -> None:
    """Also for a reader that knows from chunks of its own how large one is."""
    one, other = made(writer), made(reader)
    own = LayerCacheEngineKey(8)
    if known:
        other.put([own], [other.chunk(1)])
        assert other.get([own]) != [None]
    chunk = one.chunk(2)
    one.put(KEYS, [chunk] * LAYERS)
    assert other.get(KEYS) == [None] * LAYERS
    assert asyncio.run(other.connector.exists(KEYS[0])) is False, "dropped"
    mine = other.chunk(3)
    other.put(KEYS, [mine] * LAYERS)
    assert other.get(KEYS) == [bytes(mine.byte_array)] * LAYERS
    if known:
        assert other.get([own]) != [None], "what fits stays"


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("how", ["no tokens' dimension", "too many tokens", "no keys or values", "width", "data type",
                                 "a whole chunk", "another form", "one dimension more"])  # fmt: skip
def test_what_an_engine_never_makes_is_a_miss(made: Any, name: str, how: str) -> None:
    engine = made(name)
    good = engine.shape(CHUNK)
    whole = MemoryFormat.KV_MLA_FMT if name == "mla" else MemoryFormat.KV_2LTD
    odd = {
        "no tokens' dimension": {"shape": good[:-2] + good[-1:]},
        "too many tokens": {"shape": engine.shape(CHUNK + 1)},
        "no keys or values": {"shape": tuple(1 if size == 2 else size for size in good)},
        "width": {"shape": (*good[:-1], 2 * WIDTH)},
        "data type": {"dtype": FLOAT16},
        "a whole chunk": {"shape": (len(good) - 1, LAYERS, CHUNK, WIDTH), "form": whole},
        "another form": {"form": MemoryFormat.EC_TD},
        "one dimension more": {"shape": (1, *good)},
    }[how]
    if name == "mla" and how == "no keys or values":
        odd = {"shape": (CHUNK, 1, WIDTH)}
    engine.put(KEYS[:1], [engine.chunk(1, **odd)])
    assert engine.get(KEYS[:1]) == [None]
    assert asyncio.run(engine.connector.exists(KEYS[0])) is False, "dropped"
