"""The whole released SGLang engine with a model, on a CPU: what it computes with SiMM is what it computes without.

A GPT-2 with random weights generates greedily. Tokens and log-probabilities are compared with those of the engine
without any cache; where a prompt's tokens came from is what the engine itself reports. What is replaced of the engine
is in ``plugin/``: CUDA's copies and events. Each engine takes a minute of processor time: those that fail, and other
ways to the storage, are in the long dose (``scripts/test --slow``).
"""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest

from simm.tools.engine import SGLANG
from tests.engines import engine_processes
from tests.engines.engine_processes import Cluster, Engine, Unavailable

#: Whole pages of 16 tokens in a prompt of 400 that the last token does not need.
STORED = 384
ONE, OTHER = 1, 2
#: An engine refuses to start with less available: 10 GB that it leaves to others, its own 2, and some for a run beside.
MEMORY = 14 << 30
#: Two engines that an operator has told, wrongly, that they serve the same model.
SAME = {"model": "said to be one"}

Report = dict[str, Any]


@pytest.fixture(scope="module")
def packages(engine: Engine) -> str:
    if psutil.virtual_memory().available < MEMORY:
        pytest.skip("SGLang's host pool leaves 10 GB of memory alone, and there is hardly more available")
    try:
        return engine_processes.engine_python("--whole")
    except Unavailable as why:
        pytest.skip(f"no whole engine: {why}")


class Engines:
    """Runs engines, with and without storage."""

    def __init__(self, engine: Engine, packages: str, address: str) -> None:
        self.engine, self.packages, self.address = engine, packages, address

    def without(self, weights: int) -> Report:
        return self.engine.run_whole(self.packages, weights, {"disable_radix_cache": True})

    def stored(
        self, weights: int, storage: int, backend: str = "dynamic", extra: dict[str, Any] | None = None, **more: Any
    ) -> Report:
        config = {**SGLANG, "manager_address": self.address} if backend == "dynamic" else {}
        options = {
            "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_mem_layout": "page_first",
            "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
            "enable_cache_report": True, "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config": json.dumps({**config, **(extra or {})}),
        }  # fmt: skip
        return self.engine.run_whole(self.packages, weights, options, storage=storage, **more)


@pytest.fixture(scope="module")
def engines(engine: Engine, packages: str, engine_cluster: Cluster) -> Engines:
    return Engines(engine, packages, engine_cluster.address)


@pytest.fixture(scope="module")
def uncached(engines: Engines) -> Report:
    report = engines.without(ONE)
    assert [each["cached"] for each in report["first"]] == [0, 0]
    assert len({token for each in report["first"] for token in each["tokens"]}) > 4, "it says more than one word"
    return report


@pytest.fixture(scope="module")
def writer(engines: Engines, say: Any) -> Report:
    report = engines.stored(ONE, STORED, extra=SAME)
    say(f"engines: SGLang {report['sglang']} as a whole, GPT-2 on a CPU, with simm.connectors.sglang")
    return report


def same_output(report: Report, uncached: Report) -> None:
    for turn in (report["first"], report["last"]):
        for got, wanted in zip(turn, uncached["first"], strict=True):
            assert got["tokens"] == wanted["tokens"]
            assert got["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)


def sources(turn: list[Report]) -> list[tuple[int, int, int]]:
    """From where the prompts' tokens came: the device, the host's memory, the storage."""
    return [(each.get("device", 0), each.get("host", 0), each.get("storage", 0)) for each in turn]


NOWHERE, STORAGE = [(0, 0, 0)] * 2, [(0, 0, STORED)] * 2


@pytest.mark.engines
def test_after_a_flush_pages_come_from_the_storage(writer: Report, uncached: Report) -> None:
    assert sources(writer["first"]) == NOWHERE and sources(writer["last"]) == STORAGE
    assert {each["storage_backend"] for each in writer["last"]} == {"HiCacheSimm"}
    same_output(writer, uncached)


@pytest.mark.engines
def test_another_engine_finds_them_at_once(engines: Engines, writer: Report, uncached: Report) -> None:
    report = engines.stored(ONE, STORED, extra=SAME)
    assert sources(report["first"]) == STORAGE
    same_output(report, uncached)


@pytest.mark.engines
@pytest.mark.slow
def test_an_engine_whose_every_call_fails_computes_what_it_computes_without(engines: Engines, uncached: Report) -> None:
    failing = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "1.0"}
    report = engines.stored(ONE, 0, **failing)
    assert sources(report["first"]) == sources(report["last"]) == NOWHERE
    same_output(report, uncached)


@pytest.mark.engines
@pytest.mark.slow
def test_an_engine_without_a_manager_computes_what_it_computes_without(engines: Engines, uncached: Report) -> None:
    report = engines.stored(ONE, 0, extra={"manager_address": "127.0.0.1:1"})
    assert sources(report["first"]) == sources(report["last"]) == NOWHERE
    same_output(report, uncached)


@pytest.mark.engines
def test_another_model_of_the_same_shape_finds_nothing(engines: Engines, writer: Report, uncached: Report) -> None:
    """And the control: told that it is the same model, it takes the other one's pages, and its output shows it."""
    own = engines.stored(OTHER, STORED)
    assert sources(own["first"]) == NOWHERE and sources(own["last"]) == STORAGE
    same_output(own, {"first": own["first"]})
    assert [each["tokens"] for each in own["first"]] != [each["tokens"] for each in uncached["first"]]
    wrong = engines.stored(OTHER, STORED, extra=SAME)
    assert sources(wrong["first"]) == STORAGE
    for got, wanted in zip(wrong["first"], own["first"], strict=True):
        assert got["logprobs"] != pytest.approx(wanted["logprobs"], abs=1e-2)


@pytest.mark.engines
@pytest.mark.slow
def test_by_its_mooncake_backend_over_simm(engines: Engines, uncached: Report) -> None:
    extra = {"master_server_address": engines.address, "local_hostname": "localhost"}
    report = engines.stored(ONE, STORED, "mooncake", extra, module="simm.connectors.mooncake")
    assert sources(report["last"]) == STORAGE
    assert {each["storage_backend"] for each in report["last"]} == {"MooncakeStore"}
    same_output(report, uncached)


@pytest.mark.engines
@pytest.mark.slow
def test_by_its_built_in_backend(engines: Engines, uncached: Report) -> None:
    if not engines.engine.launcher:
        pytest.skip("SGLang's built-in backend needs /sys/class/infiniband, and a mount namespace cannot be made")
    report = engines.stored(
        ONE, STORED, "simm", {"manager_address": engines.address}, as_expected=True, SIMM_NAMESPACE="whole"
    )
    assert sources(report["last"]) == STORAGE
    assert {each["storage_backend"] for each in report["last"]} == {"HiCacheSiMM"}
    same_output(report, uncached)
