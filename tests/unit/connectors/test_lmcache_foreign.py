"""LMCache's connector over values that no connector of LMCache has stored. What such a value says of itself is not so.

LMCache evicts other chunks while it makes room for an object, all of them for one that is larger than its memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from simm.connectors.lmcache_values import Layout
from simm.testing import FakeClient, FakeStore
from tests.support import fake_lmcache
from tests.support.fake_lmcache import CHUNK, LAYERS, WIDTH, CacheEngineKey, LayerCacheEngineKey

KEY = CacheEngineKey(7)
#: Bytes of a token of a chunk.
TOKEN = 2 * 2 * LAYERS * WIDTH


@pytest.fixture
def module() -> Iterator[Any]:
    with fake_lmcache.engine() as made:
        yield made


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with FakeClient(store=FakeStore()) as made:
        yield made


def whole(tokens: int, groups: int = 1) -> Layout:
    return Layout("KV_2LTD", (("bfloat16", (2, LAYERS, tokens, WIDTH)),) * groups)


def got(connector: Any, client: FakeClient, key: Any, value: bytes) -> tuple[list[Any], bool, int]:
    """Store a value, and get it; return what is found, whether it is stored then, and how often memory was taken."""
    assert client.put(connector._name(key), value)
    found: list[Any] = asyncio.run(connector.batched_get([key]))
    assert connector._backend.used() == sum(each is not None for each in found)
    return found, asyncio.run(connector.exists(key)), len(connector._backend.made)


def test_a_chunk_of_as_many_bytes_as_it_says_is_found(module: Any, client: FakeClient) -> None:
    """The control."""
    connector = fake_lmcache.connector_of(module, client)
    (found,), stored, _ = got(connector, client, KEY, b"x" * TOKEN + whole(1).trailer())
    assert bytes(found.byte_array) == b"x" * TOKEN and stored


@pytest.mark.parametrize(("size", "layout"), [
    (1, whole(10**12 - 1)), (TOKEN, whole(CHUNK)), (TOKEN, whole(2)), (TOKEN * (CHUNK + 1), whole(CHUNK + 1)),
    (1, whole(0)), (TOKEN, whole(1, groups=2)),
], ids=["1 byte", "too few", "too few of a short one", "too many tokens", "no tokens", "more groups"])  # fmt: skip
def test_a_value_that_is_not_what_it_says_takes_no_memory_and_is_dropped(
    module: Any, client: FakeClient, size: int, layout: Layout
) -> None:
    connector = fake_lmcache.connector_of(module, client)
    assert got(connector, client, KEY, b"x" * size + layout.trailer()) == ([None], False, 1), "that for a full chunk"


def test_a_layers_value_that_is_not_what_it_says_takes_no_memory(module: Any, client: FakeClient) -> None:
    connector = fake_lmcache.connector_of(module, client)
    value = b"x" + Layout("KV_T2D", (("bfloat16", (CHUNK, 2, WIDTH)),)).trailer()
    assert got(connector, client, LayerCacheEngineKey(7), value) == ([None], False, 0)


def test_a_serialized_chunk_is_found(module: Any, client: FakeClient) -> None:
    """The control."""
    connector = fake_lmcache.connector_of(module, client, remote_serde="cachegen")
    value = b"data" + Layout("BINARY_BUFFER", (("none", (4, 0, 0, 0)),)).trailer()
    (found,), stored, _ = got(connector, client, KEY, value)
    assert bytes(found.byte_array) == b"data" and stored


@pytest.mark.parametrize("layout", [
    Layout("BINARY_BUFFER", (("none", (5, 0, 0, 0)),)), Layout("BINARY_BUFFER", (("none", (4, 10**12 - 1)),)),
    Layout("BINARY_BUFFER", (("none", (4, 0, 0, 0)),) * 2), Layout("BINARY_BUFFER", (("other", (4, 0, 0, 0)),)),
    Layout("BINARY", (("none", (4, 0, 0, 0)),)), Layout("BINARY_OTHER", (("none", (4, 0, 0, 0)),)),
], ids=["another size", "a dimension", "two groups", "a data type", "another form", "no form"])  # fmt: skip
def test_a_serialized_value_that_is_not_what_it_says_takes_no_memory(
    module: Any, client: FakeClient, layout: Layout
) -> None:
    connector = fake_lmcache.connector_of(module, client, remote_serde="cachegen")
    assert got(connector, client, KEY, b"data" + layout.trailer()) == ([None], False, 0)
