"""LMCache with KV caches of bytes: keys and values say ``uint8`` of every encoding, and engines tell them apart."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simm.connectors.registration.of_lmcache import vllm_config
from simm.testing import FakeClient, FakeStore
from tests.support import fake_lmcache
from tests.support.fake_lmcache import BFLOAT16, CHUNK, LAYERS, WIDTH, CacheEngineKey, Dtype, MemoryFormat, MemoryObj

UINT8 = Dtype("uint8")
KEYS = [CacheEngineKey(number) for number in range(3)]


@pytest.fixture
def module() -> Iterator[Any]:
    with fake_lmcache.engine() as made:
        made.TORCH_DTYPE_TO_STR_DTYPE[UINT8] = "uint8"
        yield made


class LMCacheConnectorV1Impl:
    """LMCache's part in an engine of vLLM, which makes the storage while it registers KV caches."""

    def __init__(self, cache_dtype: str) -> None:
        self._vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype))

    def register_kv_caches(self, make: Any) -> Any:
        return make()


LMCacheConnectorV1Impl.__module__ = "lmcache.integration.vllm.vllm_v1_adapter"


class Engines:
    """Makes connectors over one store, each with a client of its own; of ``cache_dtype`` None outside of vLLM."""

    def __init__(self, module: Any) -> None:
        self.module, self.store = module, FakeStore()
        self.clients: list[FakeClient] = []
        self.made: list[Any] = []

    def __call__(self, cache_dtype: str | None, dtype: Dtype = UINT8, **options: Any) -> Any:
        extra = {f"remote_storage_plugin.simm.{name}": value for name, value in options.items()}
        config = fake_lmcache.Config(use_layerwise=False, extra_config=extra)
        metadata = fake_lmcache.Metadata(kv_dtype=dtype)
        self.clients.append(FakeClient(store=self.store))

        def make() -> Any:
            return self.module.SimmConnector(
                None, fake_lmcache.Backend(), config, metadata, client=self.clients[-1]
            )  # fmt: skip

        made = make() if cache_dtype is None else LMCacheConnectorV1Impl(cache_dtype).register_kv_caches(make)
        self.made.append(made)
        return made

    def close(self) -> None:
        for each in self.made:
            asyncio.run(each.close())
        for client in self.clients:
            client.close()


@pytest.fixture
def engines(module: Any) -> Iterator[Engines]:
    made = Engines(module)
    yield made
    made.close()


def puts(one: Any, dtype: Dtype = UINT8) -> None:
    """Store a chunk under each key."""
    chunks = []
    for number, _ in enumerate(KEYS):
        chunk = MemoryObj([(2, LAYERS, CHUNK, WIDTH)], [dtype], MemoryFormat.KV_2LTD)
        chunk.byte_array[:] = bytes([number + 1]) * len(chunk.byte_array)
        chunks.append(chunk)
    asyncio.run(one.batched_put(KEYS, chunks))


def finds(one: Any) -> int:
    """Return how many chunks are there by a lookup; as many can be read."""
    count = int(one.batched_contains(KEYS))
    found = asyncio.run(one.batched_get(KEYS))
    assert [each is not None for each in found] == [at < count for at in range(len(KEYS))]
    return count


def test_engines_with_other_encodings_share_nothing(engines: Engines) -> None:
    """Under one model's name, with one type in LMCache's keys, and chunks of one layout."""
    puts(engines("fp8_e4m3"))
    assert finds(engines("fp8_e4m3")) == 3, "the control"
    for other in ("fp8_e5m2", "int4_per_token_head", "nvfp4"):
        assert finds(engines(other)) == 0
    assert finds(engines("fp8_e4m3", weight_version="2")) == 0
    assert engines("fp8_e4m3", weight_version="2")._head != engines("fp8_e5m2", weight_version="2")._head


def test_gpus_that_encode_fp8_in_other_ways_share_nothing(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for encoding in ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz", "torch.float8_e4m3fn"):
        platforms: Any = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(fp8_dtype=lambda encoding=encoding: encoding)
        monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
        one = engines("fp8")
        found.append(finds(one))
        puts(one)
    assert found == [0, 0, 3]


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla", "fp8_e4m3", "auto"])
def test_both_sides_of_an_engine_have_the_same_keys(engines: Engines, name: str) -> None:
    """A worker with sparse attention renames FP8 in its configuration while it loads; the scheduler does not."""
    puts(engines(name))
    assert finds(engines("fp8")) == 3 and finds(engines("fp8_e5m2")) == 0


def test_gpus_with_an_uncommon_fp8_share_nothing_with_others_whatever_the_type(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV cache in bf16 may have an indexer in FP8, of which LMCache's keys say nothing."""
    found = []
    for encoding in ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz", "torch.float8_e4m3fn"):
        platforms: Any = ModuleType("vllm.platforms")
        platforms.current_platform = SimpleNamespace(fp8_dtype=lambda encoding=encoding: encoding)
        monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
        one = engines("auto", BFLOAT16)
        found.append((finds(one), one._head == ""))
        puts(one, BFLOAT16)
    assert found == [(0, True), (0, False), (3, True)]


def test_a_schedulers_connection_that_is_made_anew_has_its_first_keys(module: Any) -> None:
    """From LMCache's own thread: neither a caller nor a worker's connector says which engine it is."""
    metadata, config = fake_lmcache.Metadata(kv_dtype=UINT8), fake_lmcache.Config()

    def make() -> Any:
        with FakeClient() as client:
            made = module.SimmConnector(None, fake_lmcache.Backend(), config, metadata, client=client)
            asyncio.run(made.close())
        return made

    engine = LMCacheConnectorV1Impl("fp8")
    first = engine.register_kv_caches(make)._head
    assert first != "" and make()._head == first
    engine._vllm_config.cache_config.cache_dtype = "fp8_e5m2"
    assert engine.register_kv_caches(make)._head == first, "of one engine"
    remembered = sys.modules["simm.connectors.registration.of_lmcache"]._REMEMBERED
    assert id(metadata) in remembered
    other = fake_lmcache.Metadata(kv_dtype=UINT8)
    del metadata
    metadata = other
    assert make()._head == "", "and of no other one"


def test_what_keys_tell_is_in_no_head(engines: Engines) -> None:
    """Whatever vLLM calls it: ``auto`` and the model's own type are the same."""
    one = engines("auto", BFLOAT16)
    puts(one, BFLOAT16)
    assert one._head == "" and finds(engines("bfloat16", BFLOAT16)) == 3


def test_where_nobody_says_what_the_bytes_are_the_log_advises(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """As in SGLang, or in another vLLM."""
    assert engines(None)._head == "" and caplog.text.count("need a weight_version or a namespace each") == 1
    caplog.clear()
    assert engines(None, weight_version="e4m3")._head != engines(None, weight_version="e5m2")._head
    assert "namespace each" not in caplog.text


def test_a_connection_that_lmcache_makes_anew_has_the_workers_configuration(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread of LMCache's own, with none of the engine's calls around it."""
    own = engines("fp8_e5m2")
    state: Any = ModuleType("vllm.distributed.kv_transfer.kv_transfer_state")
    state._KV_CONNECTOR_AGENT = None
    monkeypatch.setitem(sys.modules, state.__name__, state)
    assert vllm_config() is None
    state._KV_CONNECTOR_AGENT = LMCacheConnectorV1Impl("fp8_e5m2")
    assert engines(None)._head == own._head != ""
