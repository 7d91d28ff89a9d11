"""What tells SGLang's pages apart that neither its pools nor its plain arguments show, and what routers are told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from simm.connectors.hicache import facts
from simm.errors import UsageError
from simm.schemes import registry
from simm.testing import FakeClient, FakeStore
from tests.support import fake_sglang
from tests.support.fake_sglang import Config, Pool, PoolName, Served
from tests.support.waiting import WAIT_S

KEYS = [f"{number:064x}" for number in range(8)]


@pytest.fixture
def served() -> Served:
    return Served()


class Engines:
    """Makes backends as SGLang does, with a main pool each, and other pools of these names."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.client = FakeClient(store=FakeStore())
        self.made: list[Any] = []

    def __call__(self, *others: Any, **config: Any) -> Any:
        backend = self.module.HiCacheSimm(Config(**config), {}, client=self.client)
        self.made.append(backend)
        backend.register_mem_pool_host(Pool())
        for name in others:
            backend.register_mem_host_pool_v2(Pool(), name)
        return backend

    def heads(self, *pools: Any) -> list[list[str]]:
        """Return what the keys of each pool's pages begin with in a new engine."""
        backend = self(*(each for each in pools if each is not PoolName.KV))
        return [backend._pool(name).heads("v") for name in pools]

    def close(self) -> None:
        for each in self.made:
            each.close()
        self.client.close()


@pytest.fixture
def engine(served: Served) -> Iterator[Engines]:
    with fake_sglang.install(served) as module:
        made = Engines(module)
        yield made
        made.close()


@pytest.mark.parametrize("name", [
    "kt_weight_path", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token", "model_loader_extra_config",
    "enable_w4a4_mxfp4_megamoe", "flashinfer_mxfp4_moe_precision", "forward_hooks",
    "enable_precise_embedding_interpolation", "rl_on_policy_target", "enable_deterministic_inference",
    "model_config_parser", "context_length",
])  # fmt: skip
def test_settings_that_decide_weights_and_what_layers_return_keep_engines_apart(
    engine: Engines, served: Served, name: str
) -> None:
    """Both the pages and what a flush covers."""
    own, scope = engine.heads(PoolName.KV), engine()._keyspace.scope
    assert own == engine.heads(PoolName.KV), "the control"
    setattr(served, name, [{"hook_factory": "module:other"}] if name == "forward_hooks" else "other")
    assert own != engine.heads(PoolName.KV) and scope != engine()._keyspace.scope


@pytest.mark.parametrize("name", facts.WEIGHTS_VARIABLES)
def test_variables_that_decide_weights_keep_engines_apart(
    engine: Engines, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Both the pages and what a flush covers. An empty variable is none."""
    own, scope = engine.heads(PoolName.KV), engine()._keyspace.scope
    monkeypatch.setenv(name, "")
    assert own == engine.heads(PoolName.KV), "the control"
    monkeypatch.setenv(name, "1")
    assert own != engine.heads(PoolName.KV) and scope != engine()._keyspace.scope


def test_a_variable_that_names_a_file_is_what_the_file_says(
    engine: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two hosts may have other files under one path."""
    found = []
    for name, text in (("a", '{"bits": 4}'), ("b", '{"bits": 4}'), ("a", '{"bits": 8}')):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", str(tmp_path / name))
        found.append(engine.heads(PoolName.KV))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", facts.NUMBERS_VARIABLES)
def test_variables_that_decide_how_numbers_lie_keep_engines_apart(
    engine: Engines, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Pages are copies of the device's memory, and pools of other layouts have the same form."""
    pools = (PoolName.KV, PoolName.INDEXER)
    own = engine.heads(*pools)
    monkeypatch.setenv(name, "1")
    assert all(one != other for one, other in zip(own, engine.heads(*pools)))


def test_kernels_of_another_maker_share_nothing(engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep an indexer's pages in another order, of as many bytes and of the same type."""
    found = []
    for version in (None, "7.0", None):
        torch: Any = ModuleType("torch")
        torch.version = SimpleNamespace(hip=version)
        monkeypatch.setitem(sys.modules, "torch", torch)
        found.append(engine.heads(PoolName.INDEXER))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("how", ["buffers", "kv_cache_layout", "kv_layout"])
def test_device_pools_of_other_layouts_share_nothing(engine: Engines, how: str) -> None:
    """Whatever has decided the layout."""

    def heads(layout: str) -> list[str]:
        pool: Any = Pool()
        if how == "buffers":
            pool._buffer_infos = (SimpleNamespace(buffers=SimpleNamespace(layout=layout)),)
        else:
            pool.device_pool = SimpleNamespace(**{how: layout})
        backend = engine()
        backend.register_mem_pool_host(pool)
        found: list[str] = backend._pool(PoolName.KV).heads("v")
        return found

    assert heads("nhd") == heads("nhd") != heads("hnd")


def test_how_fast_a_loader_is_costs_no_hits(engine: Engines, served: Served) -> None:
    """Its other settings may name folders with other weights."""
    found = {}
    for text in (
        "", "{}", '{"num_threads": 4, "enable_multithread_load": true}',
        '{"hash_num_threads": 2, "verify_on_load": true}',
        '{"presharded_path": "/other", "num_threads": 4}', '{"presharded_path": "/other"}', "{no JSON",
    ):  # fmt: skip
        served.model_loader_extra_config = text  # type: ignore[attr-defined]
        found[text] = str(engine.heads(PoolName.KV))
    plain, *heads = (found[text] for text in found if text)
    assert heads[:2] == [plain, plain] and heads[2] == heads[3] != plain and heads[4] not in heads[:4]


@pytest.mark.parametrize("text", ['{"token": "secret"}', "{no JSON, secret"])
def test_issue_no_log_has_values_of_a_loaders_settings(
    engine: Engines, served: Served, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be secrets, under any name."""
    caplog.set_level(logging.DEBUG)
    served.model_loader_extra_config = text  # type: ignore[attr-defined]
    assert engine.heads(PoolName.KV)
    assert caplog.text.count("model_loader_extra_config") == 2, "of the scope and of the pool"
    assert "secret" not in caplog.text


def test_a_draft_model_of_random_weights_is_another_one(engine: Engines, served: Served) -> None:
    """Other formats load the same weights."""
    found = {}
    for text in ("auto", "safetensors", "dummy"):
        served.speculative_draft_load_format = text  # type: ignore[attr-defined]
        found[text] = engine.heads(PoolName.KV, PoolName.DRAFT)
    assert found["auto"] == found["safetensors"]
    assert found["auto"][1] != found["dummy"][1]


@pytest.mark.parametrize("module", facts._KERNELS)
def test_gpus_that_encode_fp8_in_other_ways_share_nothing(
    engine: Engines, served: Served, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pools have the same type, one of bytes, and engines are started by the same command."""
    served.kv_cache_dtype = "fp8_e4m3"
    found = []
    for encoding in ("torch.float8_e4m3fn", "torch.float8_e4m3fnuz", "torch.float8_e4m3fn"):
        kernels: Any = ModuleType(module)
        kernels.fp8_dtype = encoding
        monkeypatch.setitem(sys.modules, module, kernels)
        found.append(engine.heads(PoolName.KV))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("name", facts.RESOLVED)
def test_what_sglang_turns_on_by_itself_keeps_engines_apart(engine: Engines, served: Served, name: str) -> None:
    """The argument stays None. Of DeepSeek-V4.1 it decides which tokens' states pages of windows have."""
    pools = (PoolName.KV, PoolName.SWA)
    found = []
    for resolved in (True, False, True):
        setattr(served, name, None)
        setattr(served.features, name, resolved)
        found.append(engine.heads(*pools))
    assert found[0] == found[2]
    assert all(one != other for one, other in zip(found[0], found[1]))


def test_an_sglang_that_resolves_nothing_has_its_arguments(engine: Engines, served: Served) -> None:
    """A release without these settings, or without this place for them."""
    (plain,) = engine.heads(PoolName.KV)
    assert engine.module._served(*facts.RESOLVED) == {f"served_{name}": None for name in facts.RESOLVED}
    del sys.modules["sglang.srt.runtime_context"].get_exec
    assert engine.heads(PoolName.KV) == [plain]
    served.enable_decoder_swa_bounded_replay = True  # type: ignore[attr-defined]
    assert engine.heads(PoolName.KV) != [plain]


@pytest.mark.parametrize("name", [PoolName.MAMBA, PoolName.SWA, PoolName.INDEXER, PoolName.DRAFT])
def test_of_several_pools_routers_are_told_nothing(engine: Engines, name: PoolName) -> None:
    """A prefix of the main pool's pages alone can be loaded by no engine. A plain model is the control."""
    plain, hybrid = engine(model_name="plain"), engine(name, model_name="hybrid")
    assert [each.scheme for each in plain._schemes("v", "1")] == ["sglang-pages"]
    with pytest.raises(UsageError, match="hybrid model's"):
        hybrid._schemes("v", "1")
    for each in (plain, hybrid):
        pool = each._pool(PoolName.KV).host
        assert each.batch_set_v1(KEYS, pool.indices(*range(8))) == [True] * 8
        assert each._registrar.settled(WAIT_S)
    assert [len(registry.registered(engine.client, model)) for model in ("plain", "hybrid")] == [1, 0]
    assert engine(name, model_name="hybrid", tp_rank=1, tp_size=2)._schemes("v", "1") == [], "the first rank says why"


def test_issue_a_name_that_is_no_option_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A mistyped weight_version was ignored, and pages of other weights were found. SGLang has names there, too."""
    plain = {"weight_version": "2", "backend_name": "simm", "interface_v1": 1, "allocator": "shm"}
    # A file of YAML has names that are no texts.
    mistyped: dict[Any, Any] = {"weight-version": "2", True: 1, 7: 1}
    for extra in (plain, mistyped):
        with fake_sglang.install(Served()) as module, FakeClient() as client:
            module.HiCacheSimm(Config(extra_config=extra), client=client).close()
        told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert len(told) == (extra is mistyped) and all("['7', 'True', 'weight-version']" in each for each in told)
