"""The whole released SGLang engine with a model, on a CPU: what it computes with SiMM is what it computes without.

A GPT-2 with random weights generates greedily; an OPT where there are two tensor-parallel ranks. Tokens and
log-probabilities are compared with those of the engine without any cache; where a prompt's tokens came from is what the
engine itself reports. What is replaced of the engine is in ``plugin/``: CUDA's copies and events. Each engine takes a
minute of processor time: those that fail, those that share a store, and other ways to the storage, are in the long dose
(``scripts/test --slow``).
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from simm.tools.engine import SGLANG
from tests.engines.engine_processes import Cluster, Engine

#: Whole pages of 16 tokens in a prompt of 400 that the last token does not need.
STORED = 384
ONE, OTHER = 1, 2
#: Two engines that an operator has told, wrongly, that they serve the same model.
SAME = {"model": "said to be one"}

Report = dict[str, Any]


class Engines:
    """Runs engines, with and without storage."""

    def __init__(self, engine: Engine, packages: str, address: str) -> None:
        self.engine, self.packages, self.address = engine, packages, address

    def without(self, weights: int, ranks: int = 1, **more: Any) -> Report:
        return self._run(weights, {"disable_radix_cache": True}, ranks, **more)

    def stored(
        self, weights: int, storage: int, backend: str = "dynamic", extra: dict[str, Any] | None = None, *,
        layout: str = "page_first", ranks: int = 1, **more: Any,
    ) -> Report:  # fmt: skip
        config = {**SGLANG, "manager_address": self.address} if backend == "dynamic" else {}
        options = {
            "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_mem_layout": layout,
            "hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": "wait_complete",
            "enable_cache_report": True, "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config": json.dumps({**config, **(extra or {})}),
        }  # fmt: skip
        return self._run(weights, options, ranks, storage=storage, **more)

    def built_in(self, namespace: str, weights: int = ONE, storage: int = STORED, **more: Any) -> Report:
        """By SGLang's own backend, whose keys name neither model nor layout nor TP width."""
        if not self.engine.launcher:
            pytest.skip("SGLang's built-in backend needs /sys/class/infiniband, and a mount namespace cannot be made")
        extra = {"manager_address": self.address}
        return self.stored(weights, storage, "simm", extra, as_expected=True, SIMM_NAMESPACE=namespace, **more)

    def _run(self, weights: int, options: dict[str, Any], ranks: int, **more: Any) -> Report:
        """With tensor parallelism each rank is a process, which is bound to a CPU."""
        if ranks > 1:
            cpus = [*sorted(os.sched_getaffinity(0)), *sorted(os.sched_getaffinity(0))]
            options = {**options, "tp_size": ranks}
            more["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cpus[:ranks]))
        return self.engine.run_whole(self.packages, weights, options, **more)


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


@pytest.fixture(scope="module")
def built_in(engines: Engines) -> Report:
    return engines.built_in("whole")


@pytest.mark.engines
@pytest.mark.slow
def test_by_its_built_in_backend(built_in: Report, uncached: Report) -> None:
    assert sources(built_in["last"]) == STORAGE
    assert {each["storage_backend"] for each in built_in["last"]} == {"HiCacheSiMM"}
    same_output(built_in, uncached)


# -- two models, two layouts and two TP widths on one store ------------------------------------------


def other_output(report: Report, uncached: Report) -> None:
    for got, wanted in zip(report["first"], uncached["first"], strict=True):
        assert got["logprobs"] != pytest.approx(wanted["logprobs"], abs=1e-2)


@pytest.mark.engines
@pytest.mark.slow
def test_two_layouts_on_one_store(engines: Engines, writer: Report, uncached: Report) -> None:
    report = engines.stored(ONE, STORED, extra=SAME, layout="page_first_direct")
    assert sources(report["first"]) == NOWHERE and sources(report["last"]) == STORAGE
    same_output(report, uncached)
    again = engines.stored(ONE, STORED, extra=SAME)
    assert sources(again["first"]) == STORAGE, "the first layout's pages are still there"
    same_output(again, uncached)


@pytest.mark.engines
@pytest.mark.slow
def test_two_models_and_two_layouts_by_its_built_in_backend(
    engines: Engines, built_in: Report, uncached: Report
) -> None:
    """In namespaces of their own. And the controls: in the one of others they take these for their own."""
    direct = engines.built_in("whole-direct", layout="page_first_direct")
    assert sources(direct["first"]) == NOWHERE and sources(direct["last"]) == STORAGE
    same_output(direct, uncached)
    mixed = engines.built_in("whole", storage=0, layout="page_first_direct")
    assert sources(mixed["first"]) == STORAGE
    other_output(mixed, uncached)

    own = engines.without(OTHER)
    other = engines.built_in("whole-other", OTHER)
    assert sources(other["first"]) == NOWHERE and sources(other["last"]) == STORAGE
    same_output(other, own)
    wrong = engines.built_in("whole", OTHER, storage=0)
    assert sources(wrong["first"]) == STORAGE
    other_output(wrong, own)


@pytest.mark.engines
@pytest.mark.slow
def test_a_model_with_more_layers_by_its_built_in_backend_in_the_same_namespace(
    engines: Engines, built_in: Report
) -> None:
    """Its pages have another size, so none is taken for its own; and it stores its own instead."""
    own = engines.without(ONE, layers=3)
    deeper = engines.built_in("whole", layers=3)
    assert sources(deeper["first"]) == NOWHERE and sources(deeper["last"]) == STORAGE
    same_output(deeper, own)


@pytest.fixture(scope="module")
def opt(engines: Engines) -> Report:
    return engines.without(ONE, kind="opt")


@pytest.mark.engines
@pytest.mark.slow
def test_two_tp_widths_on_one_store(engines: Engines, opt: Report, say: Any) -> None:
    same_output(engines.without(ONE, 2, kind="opt"), opt)
    wide = engines.stored(ONE, STORED, ranks=2, kind="opt")
    assert sources(wide["first"]) == NOWHERE and sources(wide["last"]) == STORAGE
    narrow = engines.stored(ONE, STORED, kind="opt")
    assert sources(narrow["first"]) == NOWHERE and sources(narrow["last"]) == STORAGE
    again = engines.stored(ONE, STORED, ranks=2, kind="opt")
    assert sources(again["first"]) == STORAGE
    for each in (wide, narrow, again):
        same_output(each, opt)
    say("engines: SGLang as a whole, OPT on a CPU at TP 1 and TP 2, on one store")
