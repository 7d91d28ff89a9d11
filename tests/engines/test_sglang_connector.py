"""SiMM's own backend in the released, unmodified SGLang: by its dynamic loading, over its own pools and threads.

A writer ends before the readers start, and they compute from the seed what they must get. No /sys/class/infiniband is
put in place. tests/unit/connectors has the backend without SGLang; test_sglang.py SGLang's own backend for SiMM, with
the control that shows what happens where keys name no model.
"""

from __future__ import annotations

from typing import Any

import pytest

from simm.client import Client
from simm.schemes import registry
from tests.engines import engine_content
from tests.engines.engine_processes import PATIENT_MS, Cluster, DriverRun, Engine

SEED = 20_261_123
#: A full batch of SGLang's 128 pages and a short second one.
PAGES = 140
PAGE_TOKENS = 16
LAYOUTS = ("page_first", "page_first_direct", "layer_first")

Step = dict[str, Any]


def case(command: str, prompt: str, pool: str = "mha", layout: str = "page_first", **more: Any) -> Step:
    fields = {"prompt": prompt, "pool": pool, "layout": layout, "pages": PAGES, "backend": "dynamic", **more}
    return {"command": command, "case": fields}


def all_pools(command: str, kind: str) -> list[Step]:
    return [case(command, f"{kind}/{pool}/{layout}", pool, layout) for pool in ("mha", "mla") for layout in LAYOUTS]


STORED_FLIP, READ_FLIP = [131, 1, 4097], [7, 0, 0]
#: Engines that make the same page hashes, and must share nothing: the writer is the first of each pair.
APART: dict[str, tuple[Step, Step]] = {
    "models of one shape": ({"model": "a"}, {"model": "b"}),
    "layouts": ({"layout": "page_first"}, {"layout": "page_first_direct"}),
    "layer first": ({"layout": "page_first_direct"}, {"layout": "layer_first"}),
    "TP 2 and TP 1": ({"heads": 1, "ranks": 2}, {"heads": 2}),
    "ranks": ({"ranks": 2}, {"ranks": 2, "rank": 1}),
    "numbers of layers": ({"layers": 3}, {"layers": 4}),
}
#: Pools of models of these names, whose keys routers make from what the backend has registered.
REGISTERED = ("mha", "mla")
WRITER = [
    *(case("write", f"registered/{pool}", pool, model=f"registered-{pool}") for pool in REGISTERED),
    *all_pools("write", "direct"),
    *all_pools("controller-write", "controller"),
    *(case("write", name, **one) for name, (one, _) in APART.items()),
    case("write", "large", "mla", layers=12),
    case("write", "damaged", flip=STORED_FLIP),
    case("clear", "clear", pages=20, model="flushed"),
    case("hybrid", "hybrid", pages=12),
    case("hybrid", "hybrid/direct", layout="page_first_direct", pages=12),
    case("widths", "widths", layout="page_head"),
]
READER = [
    *all_pools("read", "direct"),
    *all_pools("controller-read", "controller"),
    *(case("absent", name, **other) for name, (_, other) in APART.items()),
    *(case("read", name, **one) for name, (one, _) in APART.items()),
    case("read", "large", "mla", layers=12),
    # MLA pages belong to no rank: what rank 0 of 1 wrote, rank 3 of 4 reads.
    case("read", "direct/mla/page_first", "mla", rank=3, ranks=4),
    {**case("outage", "outage"), "warns": True},
    {**case("outage", "outage", "mla", "layer_first"), "warns": True},
]
CONTROL = [case("read", "damaged"), case("read", "direct/mha/layer_first", layout="layer_first", flip=READ_FLIP)]
#: SGLang's failure injector fails every call, and then a third of them.
INJECTED = [
    case("controller-read", "controller/mha/page_first", failing=1.0),
    *(case("controller-read", f"controller/{pool}/page_first", pool, failing=0.3) for pool in ("mha", "mla") * 3),
]


def name_of(step: Step) -> str:
    return f"{step['command']}:{step['case']['prompt']}:{step['case']['pool']}:{step['case'].get('rank', 0)}"


def result_of(run: DriverRun, steps: list[Step], step: Step) -> Step:
    return dict(run.report["steps"][steps.index(step)])


class Runs:
    """Driver processes without a launcher, on one cluster."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self.engine, self.cluster = engine, cluster

    def __call__(self, steps: list[Step]) -> DriverRun:
        return self.engine.run(
            self.cluster.address, SEED, steps, driver="connector_driver.py", as_expected=False
        )


@pytest.fixture(scope="module")
def runs(engine: Engine, engine_cluster: Cluster) -> Runs:
    return Runs(engine, engine_cluster)


@pytest.fixture(scope="module")
def writer(runs: Runs, say: Any) -> DriverRun:
    run = runs(WRITER)
    say(f"engines: SGLang {run.report['sglang']} with simm.connectors.sglang")
    return run


@pytest.fixture(scope="module")
def reader(runs: Runs, writer: DriverRun) -> DriverRun:
    return runs(READER)


@pytest.mark.engines
@pytest.mark.parametrize("step", WRITER, ids=name_of)
def test_writer(writer: DriverRun, engine_cluster: Cluster, step: Step) -> None:
    result = result_of(writer, WRITER, step)
    assert result["ok"], f"{result}\n{writer.said}\n{engine_cluster.logs()}"


@pytest.mark.engines
@pytest.mark.parametrize("step", READER, ids=name_of)
def test_reader_in_another_process(reader: DriverRun, engine_cluster: Cluster, step: Step) -> None:
    result = result_of(reader, READER, step)
    assert result["ok"], f"{result}\n{reader.said}\n{engine_cluster.logs()}"
    if "read" in step["command"]:
        assert result["hits"] == result["read"] == PAGES and result["bytes"] > 0
        assert result["wrong"] == [] and result["strayed"] == []


@pytest.mark.engines
def test_mutation_finds_the_bits_that_were_damaged(runs: Runs, reader: DriverRun) -> None:
    run = runs(CONTROL)
    damage = [[[w["page"], w["part"], w["first"], w["count"]] for w in step["wrong"]] for step in run.report["steps"]]
    assert run.status == 1 and damage == [[[*STORED_FLIP, 1]], [[*READ_FLIP, 1]]]


@pytest.mark.engines
def test_injected_failures_leave_pages_right_or_absent(runs: Runs, reader: DriverRun) -> None:
    run = runs(INJECTED)
    all_failing, *some = run.report["steps"]
    assert (all_failing["hits"], all_failing["read"]) == (0, 0)
    for result in (all_failing, *some):
        assert "error" not in result, result
        assert result["wrong"] == []
    assert any(result["read"] < PAGES for result in some)


@pytest.mark.engines
@pytest.mark.parametrize("pool", REGISTERED)
def test_routers_make_the_keys_that_sglang_wrote(writer: DriverRun, engine_cluster: Cluster, pool: str) -> None:
    """By the scheme that the backend has registered itself; pages that nobody wrote are not there."""
    tokens = engine_content.tokens(SEED, f"registered/{pool}", (PAGES + 8) * PAGE_TOKENS)
    with Client(engine_cluster.address, deadline_s=PATIENT_MS / 1000) as client:
        assert client.wait_ready()
        (scheme,) = registry.registered(client, f"registered-{pool}")
        assert (scheme.scheme, scheme.page, scheme.ranks) == ("sglang-pages", PAGE_TOKENS, 1)
        keys, per_page = scheme.keys(tokens)
        assert per_page == 1 and client.exists_many(keys) == [True] * PAGES + [False] * 8
        assert client.prefix(keys).keys == PAGES


@pytest.mark.engines
def test_the_wheel_is_the_released_one(writer: DriverRun) -> None:
    assert len(writer.report["unmodified"]) == 8 and all(writer.report["unmodified"].values())
