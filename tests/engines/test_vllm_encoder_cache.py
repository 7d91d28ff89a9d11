"""vLLM's store of encoder outputs, released and unmodified, over SiMM's face of Mooncake, against two data servers.

An engine that has computed the output of an image stores it, and others load it. What they have is compared with what
an engine without a store computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import engine_processes
from tests.engines.engine_processes import Cluster, Engine

SEED = 20_261_127
#: Images, by their tokens.
IMAGES = {"cat": 300, "dog": 17, "dot": 1}
ALL = sorted(IMAGES)
#: More than a value may have.
HUGE = 80 << 20
#: A bit behind the head of 24 bytes.
FLIPPED = 500

CALLS = ["get_digests", "get_many", "put_digests", "exists_digests", "exists_many"]

WRITER: list[list[Any]] = [
    ["step", "model-a", IMAGES], ["step", "model-a", IMAGES], ["large", "model-a", "map", HUGE],
    ["step", "model-a", {"map-small": 7, **IMAGES}],
]  # fmt: skip
READER: list[list[Any]] = [
    ["step", "model-a", IMAGES],
    ["step", "model-b", IMAGES],
    ["step", "model-a", {"cat": 301}],
    ["step", "model-a", {"dog": 17}, "float16"],
    ["fail", "model-a", CALLS], ["step", "model-a", {**IMAGES, "new": 5}],
    ["fail", "model-a", [*CALLS, "register", "deregister"]], ["step", "model-a", {**IMAGES, "new": 5}],
    ["fail", "model-a", []], ["step", "model-a", {**IMAGES, "new": 5}],
    ["damage", "model-a", "dog", FLIPPED], ["step", "model-a", IMAGES],
    ["end", "model-a"],
]  # fmt: skip

pytestmark = [pytest.mark.engines, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(vllm: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("encoder-cache-cluster"), "128M", servers=2) as running:
        yield running


@pytest.fixture(scope="module")
def runs(vllm: Engine, cluster: Cluster, say: Any) -> list[list[Any]]:
    """The results of a process that stores and ends, and of one that loads."""
    reports = [
        vllm.run(
            cluster.address, SEED, steps, driver="encoder_cache_driver.py", as_expected=False,
            module="simm.connectors.mooncake",
        ).report
        for steps in (WRITER, READER)
    ]  # fmt: skip
    assert all(each["store"].endswith("simm/connectors/mooncake.py") for each in reports)
    say(f"engines: vLLM {reports[0]['vllm']}'s encoder-cache store with simm.connectors.mooncake")
    return [each["results"] for each in reports]


def loaded(result: Any, *names: str) -> bool:
    """Whether these came out of the store, all outputs are right, and all that was computed is stored."""
    return bool(result == {"loaded": sorted(names), "wrong": [], "pending": 0})


def test_outputs_are_computed_once(runs: list[list[Any]]) -> None:
    first, second, _, last = runs[0]
    assert loaded(first) and loaded(second, *ALL) and loaded(last, *ALL, "map-small")


def test_one_that_is_too_large_is_computed(runs: list[list[Any]]) -> None:
    """And its engine goes on, and stores the next one."""
    assert loaded(runs[0][2])


def test_another_engine_loads_them(runs: list[list[Any]]) -> None:
    assert loaded(runs[1][0], *ALL)


@pytest.mark.parametrize("at", [1, 2, 3], ids=["another model", "another length", "another data type"])
def test_what_differs_loads_nothing(runs: list[list[Any]], at: int) -> None:
    assert loaded(runs[1][at])


def test_failing_calls_are_misses(runs: list[list[Any]]) -> None:
    """The engine computes all outputs meanwhile. What it could not store then it stores later."""
    assert loaded(runs[1][5]) and loaded(runs[1][7]) and loaded(runs[1][9], *ALL)


def test_control_a_stored_bit_that_is_wrong_is_noticed(runs: list[list[Any]]) -> None:
    assert runs[1][10] == 0 and runs[1][11] == {"loaded": ALL, "wrong": ["dog"], "pending": 0}


def test_it_ends(runs: list[list[Any]]) -> None:
    assert runs[1][-1] is None
