"""The whole released vLLM engine with a model, on a CPU: what it computes with SiMM is what it computes without.

Models with random weights generate greedily: a GPT-2, and a small Gemma 3 with two KV cache groups. Tokens and
log-probabilities are compared with those of the engine without any cache; where a prompt's tokens came from is what the
engine itself reports. Nothing of vLLM is replaced. Each engine takes 20 seconds of processor time and more: all of them
are in the long dose (``scripts/test --slow``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines import engine_processes
from tests.engines.engine_processes import Cluster, Engine
from tests.engines.vllm_turns import STOPPED_S, Report, Turn, cached, same, victims_of

#: Whole blocks of 32 tokens in each prompt that the last token does not need; the blocks of both prompts.
STORED, BLOCKS = 384, 25
#: The deadline of engines whose servers run: a busy machine makes no lookup late.
PATIENT_MS = 60_000
#: Two engines that an operator has told, wrongly, that they serve the same model.
SAME = {"model": "said to be one"}
#: What layerwise needs.
PLAIN = {"async_scheduling": False}
CALLS = ["get_digests", "get_digest", "exists_digests", "put_digests", "pin"]

pytestmark = [pytest.mark.engines, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(vllm: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("vllm-whole-cluster"), "128M", servers=2) as running:
        yield running


class Engines:
    """Runs engines, with and without SiMM."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.engine, self.address = engine, address
        self._without: dict[tuple[str, int], Turn] = {}

    def without(self, kind: str = "gpt2", weights: int = 1) -> Turn:
        if (kind, weights) not in self._without:
            report = self.engine.run_vllm(model=kind, weights=weights, simm=None, steps=["generate"])
            (turn,) = report["results"]
            assert [each["cached"] for each in turn] == [0, 0]
            assert len({token for each in turn for token in each["tokens"]}) > 4, "it says more than one word"
            self._without[kind, weights] = turn
        return self._without[kind, weights]

    def stored(self, steps: list[Any], kind: str = "gpt2", weights: int = 1, *, engine: Report | None = None,
               environment: dict[str, str] | None = None, **options: Any) -> list[Any]:  # fmt: skip
        """Run an engine with SiMM; return the results of its steps."""
        report = self.engine.run_vllm(
            model=kind, weights=weights, steps=steps,
            simm={"manager_address": self.address, "deadline_ms": PATIENT_MS, **options},
            engine=engine or {}, environment=environment or {},
        )  # fmt: skip
        self.version, self.took = report["vllm"], report["took"]
        results: list[Any] = report["results"]
        return results


@pytest.fixture(scope="module")
def engines(vllm: Engine, cluster: Cluster) -> Engines:
    return Engines(vllm, cluster.address)


#: What an engine goes through; the places of its outputs, and of what is said of events and counts.
LIFE: list[Any] = [
    "generate", "stored", "forget", "generate", "forget", ["generate", True],  # 3, 5
    ["forget", True], "generate", "stored", ["lose", 2], "forget", "generate", "told",  # 7, 11, 12
    ["fail", CALLS], "forget", "generate", ["mend", CALLS], ["until", STORED], "counts",  # 15, 17, 18
    "forget", "corrupt", "generate",  # 21
]  # fmt: skip


def check_life(results: list[Any], wanted: Turn, groups: int = 1) -> None:
    outputs = {at: result for at, (step, result) in enumerate(zip(LIFE, results)) if isinstance(result, list)}
    damaged = outputs.pop(21)
    for at, turn in outputs.items():
        assert same(turn, wanted), LIFE[at]
    assert cached(outputs[0]) == [0, 0] and results[1] == groups * BLOCKS
    assert cached(outputs[3]) == cached(outputs[5]) == [STORED, STORED], "after a reset of vLLM's own cache"
    assert cached(outputs[7]) == [0, 0], "after a reset of the connector"
    assert cached(outputs[15]) == [0, 0], "each call fails"
    told, counts = results[12], results[18]
    assert told["stored"] >= groups * BLOCKS and told["tokens"] == [32] and told["orphans"] == 0
    assert told["media"] == ["STORAGE"]
    assert counts["blocks_failed"] >= 2 and counts["blocks_loaded"] >= 2 * 2 * 12 and counts["blocks_stored"]
    assert results[20] >= groups * BLOCKS
    assert cached(damaged) == [STORED, STORED] and not same(damaged, wanted), "a value that was stored wrong is noticed"


def test_between_the_steps(engines: Engines, say: Callable[[str], None]) -> None:
    results = engines.stored([*LIFE, "metrics"], namespace="async", engine={"disable_log_stats": False}, **SAME)
    say(f"engines: vLLM {engines.version} as a whole, GPT-2 on a CPU, with simm.connectors.vllm_connector")
    check_life(results, engines.without())
    assert results[12]["removed"] == 2, "an event for each block that was gone"
    metrics = results[-1]
    assert metrics["vllm:simm_blocks_stored"] >= BLOCKS and metrics["vllm:simm_blocks_loaded"] >= 2 * 12
    assert metrics["vllm:simm_tokens_found"] == metrics["vllm:external_prefix_cache_hits"] > 2 * STORED
    assert metrics["from host"] == metrics["vllm:simm_tokens_found"] and metrics["from external_unspecified"] == 0


def test_layer_by_layer(engines: Engines) -> None:
    results = engines.stored(LIFE, namespace="layers", layerwise=True, engine=PLAIN)
    check_life(results, engines.without())


def test_a_model_with_two_groups(engines: Engines) -> None:
    results = engines.stored(LIFE, "gemma", namespace="groups")
    check_life(results, engines.without("gemma"), groups=2)


@pytest.fixture(scope="module")
def writer(engines: Engines) -> list[Turn]:
    """An engine that has stored its prompts, and found them again."""
    results: list[Turn] = engines.stored(["generate", ["until", STORED]], **SAME)
    assert [cached(each) for each in results] == [[0, 0], [STORED, STORED]]
    return results


def test_the_next_engine_finds_all_at_once(engines: Engines, writer: list[Turn]) -> None:
    (turn,) = engines.stored(["generate"], **SAME)
    assert cached(turn) == [STORED, STORED] and same(turn, engines.without())


def test_ranks_have_blocks_of_their_own(engines: Engines, writer: list[Turn]) -> None:
    """Two ranks, in processes of their own, find nothing of an engine with one; then each finds its part."""
    turns = engines.stored(["generate", ["until", STORED]], engine={"tensor_parallel_size": 2}, **SAME)
    assert [cached(each) for each in turns] == [[0, 0], [STORED, STORED]]
    assert all(same(each, engines.without()) for each in turns)


def test_another_model_of_the_same_shape_finds_nothing(engines: Engines, writer: list[Turn]) -> None:
    """And the control: told that it is the same model, it takes the other one's blocks, and its output shows it."""
    own = engines.stored(["generate", ["until", STORED]], weights=2)
    assert [cached(each) for each in own] == [[0, 0], [STORED, STORED]] and same(own[0], own[1])
    (wrong,) = engines.stored(["generate"], weights=2, **SAME)
    assert cached(wrong) == [STORED, STORED] and not same(wrong, own[0])


@pytest.mark.parametrize("layerwise", [False, True], ids=["", "layer by layer"])
def test_servers_that_stop_and_die(
    engines: Engines, vllm: Engine, layerwise: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The output is that of an engine without a cache, and a prompt waits no longer than its deadline."""
    with victims_of(tmp_path_factory.mktemp("vllm-victims")) as victims:
        pids = [each.pid for each in victims.servers]
        steps = [
            "generate", ["until", STORED], ["send", pids, signal.SIGSTOP], "forget", "generate",  # 4
            ["send", pids, signal.SIGCONT], ["until", STORED], ["send", pids, signal.SIGKILL], "forget", "generate",
        ]  # fmt: skip
        there = Engines(vllm, victims.address)
        results = there.stored(
            steps, environment={"SIMM_PATH": "tcp"}, layerwise=layerwise, deadline_ms=400, namespace="victims",
            engine=PLAIN if layerwise else {},
        )  # fmt: skip
    assert all(same(results[at], engines.without()) for at in (0, 1, 4, 6, 9))
    assert cached(results[1]) == cached(results[6]) == [STORED, STORED]
    assert cached(results[9]) == [0, 0] and there.took[4] < STOPPED_S


def test_without_a_manager(vllm: Engine, engines: Engines) -> None:
    results = Engines(vllm, "127.0.0.1:1").stored(["generate", "forget", "generate"])
    assert [cached(results[at]) for at in (0, 2)] == [[0, 0], [0, 0]]
    assert all(same(results[at], engines.without()) for at in (0, 2))
