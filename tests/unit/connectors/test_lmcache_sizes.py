"""LMCache's two adapters where a full chunk, with its layout behind it, is more than a value: it alone is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from simm.testing import FakeClient, FakeStore
from tests.support import fake_lmcache
from tests.support.fake_lmcache import BFLOAT16, CHUNK, LAYERS, WIDTH, CacheEngineKey, MemoryFormat, ObjectKey
from tests.support.small_limits import small_limits

#: Bytes of a full chunk.
FULL = 2 * 2 * LAYERS * CHUNK * WIDTH


@pytest.fixture(params=[FULL + 8, FULL - 8], ids=["by its layout", "by its bytes"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    """A client of a store whose values are too small for a full chunk."""
    with small_limits(request.param), FakeClient(store=FakeStore()) as made:
        monkeypatch.setattr("simm.connectors.lmcache_values.VALUE_BYTES_MAX", request.param)
        yield made


def chunk(tokens: int, fill: int) -> Any:
    made = fake_lmcache.MemoryObj([(2, LAYERS, tokens, WIDTH)], [BFLOAT16], MemoryFormat.KV_2LTD)
    made.byte_array[:] = bytes([fill]) * len(made.byte_array)
    return made


def test_a_part_of_a_chunk_is_stored_and_read(client: FakeClient, caplog: pytest.LogCaptureFixture) -> None:
    """The full one cost the other keys of its batch, and each read failed and kept the memory that it had taken."""
    keys = [CacheEngineKey(number) for number in range(4)]
    chunks = [chunk(5, 1), chunk(CHUNK, 2), chunk(CHUNK - 1, 3)]

    async def body(module: Any) -> None:
        connector = fake_lmcache.connector_of(module, client)
        await connector.batched_put(keys[:3], chunks)
        assert connector.batched_contains(keys[:1]) == 1
        assert [await connector.exists(key) for key in keys] == [True, False, True, False]
        found = await connector.batched_get(keys)
        assert [None if each is None else bytes(each.byte_array) for each in found] == [
            bytes(chunks[0].byte_array), None, bytes(chunks[2].byte_array), None
        ]  # fmt: skip
        assert connector._backend.used() == 2, "what is no hit holds no memory"
        assert len(connector._backend.made) == 2, "nor takes any for a moment, which could evict other chunks"
        await connector.close()

    with fake_lmcache.engine() as module:
        asyncio.run(body(module))
    assert caplog.text.count("make chunk_size smaller") == 1 and "failed" not in caplog.text


def test_an_object_of_the_server_that_is_too_large_costs_no_other(client: FakeClient) -> None:
    keys = [ObjectKey(bytes([number]) * 8) for number in range(3)]
    values = [bytes([7]) * 64, bytes([8]) * FULL, bytes([9]) * 64]
    with fake_lmcache.server() as module:
        adapter = module.SimmL2Adapter({"threads": 1}, client=client)
        adapter.submit_store_task(keys, [fake_lmcache.object_of(each) for each in values])
        fake_lmcache.ended(adapter.get_store_event_fd())
        assert client.store.used_bytes > 128
        task = adapter.submit_lookup_and_lock_task(keys, {})
        fake_lmcache.ended(adapter.get_lookup_and_lock_event_fd())
        assert adapter.query_lookup_and_lock_result(task).places() == [0, 2]
        rooms = [fake_lmcache.object_of(bytes(len(each))) for each in values]
        task = adapter.submit_load_task(keys, rooms)
        fake_lmcache.ended(adapter.get_load_event_fd())
        assert adapter.query_load_result(task).places() == [0, 2]
        assert [bytes(rooms[at].byte_array) == values[at] for at in range(3)] == [True, False, True]
        adapter.close()
