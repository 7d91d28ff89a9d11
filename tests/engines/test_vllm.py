"""SiMM's tier in the released vLLM's tiering manager, against a manager and two data servers.

Each engine has a client of its own, and computes from the seed what it must get.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import engine_processes
from tests.engines.engine_processes import Cluster, DriverRun, Engine

SEED = 20_261_126
CHUNKS = 6
FLIP = 4097
#: Bounds a lookup on stopped servers. Its deadline is 0.4 s; what hangs never ends.
STOPPED_S = 20.0

Step = dict[str, Any]


def step(command: str, prompt: str, **case: Any) -> Step:
    return {"command": command, "case": {"prompt": prompt, **case}}


#: Engines that make the same block hashes, and must share nothing.
APART: dict[str, Step] = {
    "models of one shape": {"model": "org/b"}, "data types": {"dtype": "float16"}, "TP widths": {"tp": 2},
    "layers": {"layers": ["layers.0"]}, "weights": {"weight_version": "2"}, "salts": {"salt": "s"},
    "tokens of a block": {"block": 32}, "layouts of one size": {"order": "LBHNC"},
}  # fmt: skip
STEPS = [
    step("write", "plain"),
    step("read", "plain"),
    *(step("read", "plain", **other) for other in APART.values()),
    step("write", "portable", portable=True, tp=2),
    step("read", "portable", portable=True, tp=4),
    {**step("write", "damaged"), "flip": FLIP},
    step("read", "damaged"),
    step("vanished", "vanished"),
    step("failing", "failing"),
    step("reset", "reset", model="org/reset"),
    step("cleared", "cleared", model="org/cleared"),
]

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def cluster(vllm: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("vllm-cluster"), "128M", servers=2) as running:
        yield running


@pytest.fixture(scope="module")
def run(vllm: Engine, cluster: Cluster, say: Any) -> DriverRun:
    stopped = {**step("stopped", "stopped", deadline_ms=400), "servers": [each.pid for each in cluster.servers]}
    ran = vllm.run(cluster.address, SEED, [*STEPS, stopped], driver="vllm_driver.py", as_expected=False)
    say(f"engines: vLLM {ran.report['vllm']} with simm.connectors.vllm")
    for result in ran.report["steps"]:
        assert "error" not in result, f"{result}\n{ran.stderr[-2000:]}\n{cluster.logs()}"
    return ran


def of(run: DriverRun, wanted: Step) -> Step:
    result: Step = run.report["steps"][STEPS.index(wanted)]
    return result


@pytest.mark.parametrize("case", [{}, {"portable": True}], ids=str)
def test_chunks_of_another_engine(run: DriverRun, case: Step) -> None:
    """Those that vLLM calls portable are shared by all TP widths."""
    prompt = "portable" if case else "plain"
    written = of(run, step("write", prompt, **case, **({"tp": 2} if case else {})))
    assert written == {"stored": CHUNKS, "events": [[CHUNKS, False]]}
    read = of(run, step("read", prompt, **case, **({"tp": 4} if case else {})))
    assert read["hits"] == CHUNKS and read["wrong"] == []


@pytest.mark.parametrize("name", APART)
def test_engines_that_share_nothing(run: DriverRun, name: str) -> None:
    assert of(run, step("read", "plain", **APART[name]))["hits"] == 0


def test_mutation_finds_the_bit_that_was_stored_wrong(run: DriverRun) -> None:
    read = of(run, step("read", "damaged"))
    assert read["hits"] == CHUNKS and read["wrong"] == [[1, FLIP]]


def test_chunks_that_go_before_their_load_are_reported(run: DriverRun) -> None:
    result = of(run, step("vanished", "vanished"))
    assert result["hits"] == CHUNKS - 2 and result["wrong"] == [] and result["events"] == [[2, True]]


def test_failing_calls_are_misses(run: DriverRun) -> None:
    result = of(run, step("failing", "failing"))
    assert (result["missed"], result["stored"]) == (0, CHUNKS)
    assert result["after"]["hits"] == CHUNKS and result["after"]["wrong"] == []


def test_a_reset_makes_old_weights_unreadable_for_all(run: DriverRun) -> None:
    result = of(run, step("reset", "reset", model="org/reset"))
    assert result["before"] == CHUNKS
    assert result["after"]["hits"] == CHUNKS and result["after"]["wrong"] == [], "what was stored after the reset"
    assert of(run, step("cleared", "cleared", model="org/cleared"))["hits"] == [0, 0]


def test_stopped_servers_cost_their_deadline(run: DriverRun) -> None:
    result = run.report["steps"][-1]
    assert result["halted"]["hits"] == 0 and result["halted"]["took"] < STOPPED_S
    assert result["back"]["hits"] == CHUNKS and result["back"]["wrong"] == []
