"""SGLang's backend for Mooncake, released and unmodified, over SiMM: by ``python -m simm.connectors.mooncake``.

No Mooncake is installed there, so a backend that found another ``mooncake.store`` could not start.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.engine_processes import Cluster, DriverRun, Engine

SEED = 20_261_124
PAGES = 140
#: Of a rank, in the driver's pools.
HEADS = 2
#: Pools and layouts that this backend has.
POOLS = [("mha", "page_first"), ("mha", "page_first_direct"), ("mla", "page_first"), ("mla", "layer_first")]

Step = dict[str, Any]


def case(command: str, prompt: str, pool: str = "mha", layout: str = "page_first", **more: Any) -> Step:
    fields = {"prompt": f"mooncake/{prompt}", "pool": pool, "layout": layout, "pages": PAGES, "backend": "mooncake"}
    return {"command": command, "case": {**fields, **more}}


def all_pools(command: str, kind: str) -> list[Step]:
    return [case(command, f"{kind}/{pool}/{layout}", pool, layout) for pool, layout in POOLS]


STORED_FLIP = [131, 1, 4097]
WRITER = [
    *all_pools("write", "direct"),
    *all_pools("controller-write", "controller"),
    case("hybrid", "hybrid", pages=12),
    case("write", "models", model="a"),
    case("write", "damaged", flip=STORED_FLIP),
]
READER = [
    *all_pools("read", "direct"),
    *all_pools("controller-read", "controller"),
    case("absent", "models", model="b"),
    case("read", "models", model="a"),
    case("read", "direct/mla/page_first", "mla", rank=3, ranks=4),
    case("absent", "direct/mha/page_first", namespace="another engine's"),
    case("absent", "direct/mha/page_first", layout="page_first_direct", namespace="another layout's"),
    case("absent", "direct/mha/page_first", ranks=2, heads=HEADS // 2, namespace="another width's"),
    case("read", "damaged"),
]
#: Pages of others that SGLang's keys do not tell apart, in their namespace: of half the heads, and of another layout.
SAME_KEYS = [
    case("absent", "direct/mha/page_first", ranks=2, heads=HEADS // 2),
    case("absent", "direct/mha/page_first", layout="page_first_direct"),
]


def name_of(step: Step) -> str:
    return f"{step['command']}:{step['case']['prompt']}"


@pytest.fixture(scope="module")
def runs(engine: Engine, engine_cluster: Cluster) -> list[DriverRun]:
    """A process that writes and ends, one that reads, and one that must have had a namespace of its own."""
    return [
        engine.run(
            engine_cluster.address, SEED, steps, driver="connector_driver.py", as_expected=False,
            module="simm.connectors.mooncake",
        )
        for steps in (WRITER, READER, SAME_KEYS)
    ]  # fmt: skip


@pytest.mark.engines
@pytest.mark.parametrize("at", range(len(WRITER)), ids=lambda at: name_of(WRITER[at]))
def test_writer(runs: list[DriverRun], engine_cluster: Cluster, at: int) -> None:
    assert runs[0].report["steps"][at]["ok"], f"{runs[0].report['steps'][at]}\n{runs[0].said}\n{engine_cluster.logs()}"


@pytest.mark.engines
@pytest.mark.parametrize("at", range(len(READER) - 1), ids=lambda at: name_of(READER[at]))
def test_reader_in_another_process(runs: list[DriverRun], engine_cluster: Cluster, at: int) -> None:
    result = runs[1].report["steps"][at]
    assert result["ok"], f"{result}\n{runs[1].said}\n{engine_cluster.logs()}"
    if "read" in READER[at]["command"]:
        assert result["hits"] == result["read"] == PAGES and result["wrong"] == [] and result["strayed"] == []


@pytest.mark.engines
def test_mutation_finds_the_bit_that_was_stored_wrong(runs: list[DriverRun]) -> None:
    damage = [[w["page"], w["part"], w["first"], w["count"]] for w in runs[1].report["steps"][-1]["wrong"]]
    assert damage == [[*STORED_FLIP, 1]]


@pytest.mark.engines
def test_control_a_namespace_is_what_tells_layouts_apart(runs: list[DriverRun]) -> None:
    """A page of another size is never read, whatever its key. One of the same size is: docs/engines.md says so."""
    narrow, turned = runs[2].report["steps"]
    assert (narrow["read"], narrow["written"]) == (0, [])
    assert turned["hits"] == turned["read"] == PAGES


@pytest.mark.engines
def test_it_says_what_it_is(runs: list[DriverRun]) -> None:
    for run in runs:
        assert "simm: mooncake.store is SiMM" in run.stderr
