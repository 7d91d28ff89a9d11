"""``benchmarks/routing.py``: pods, their store and the routers of the simulation."""

from __future__ import annotations

import importlib
import random
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import simm

pytest.importorskip("xxhash", reason="needs simm-store[index]")
pytest.importorskip("msgspec", reason="needs simm-store[index]")

ROOT = Path(simm.__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with pods and a store that are soon full."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    names = ("routing", "svg")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("routing")
    for name, value in {"GPU_BLOCKS": 200, "STORE_BLOCKS": 400, "GROUPS": 3}.items():
        monkeypatch.setattr(module, name, value)
    yield module
    for name in names:
        sys.modules.pop(name, None)


def test_a_cache_keeps_what_was_used_last(routing: Any) -> None:
    """Against a list, the naive model."""
    rng = random.Random(1)
    cache, model = routing.Cache(8), []
    for _ in range(500):
        keys = rng.sample(range(20), rng.randint(1, 6))
        new, gone = cache.use(keys)
        assert new == [key for key in keys if key not in model]
        model = [key for key in model if key not in keys] + keys
        assert gone == model[:-8]
        model = model[-8:]
        asked = rng.sample(range(20), 5)
        had = [key in model for key in asked]
        assert cache.prefix(asked) == (had + [False]).index(False)


@pytest.mark.parametrize("router", ["random", "load", "approximate", "events", "exact"])
def test_every_request_has_its_first_token(routing: Any, router: str) -> None:
    world = routing.World(router, 4, 0.6, 150, seed=3)
    result = world.run()
    assert len(result.ttft) == 100 and min(result.ttft) > 0
    # What it counted is what the pods did: computed blocks, and loads at one of two rates.
    least = result.computed * routing.PREFILL_S + result.store * min(routing.OWN_S, routing.OTHER_S)
    most = result.computed * routing.PREFILL_S + result.store * max(routing.OWN_S, routing.OTHER_S)
    assert least - 1e-6 <= sum(result.worked) <= most + 1e-6
    again = routing.World(router, 4, 0.6, 150, seed=3).run()
    assert again.ttft == result.ttft, "the same seed, the same run"


def test_what_the_index_says_is_what_the_pods_have(routing: Any) -> None:
    """When all events have come: the router that follows them knows the pods' memory, block by block."""
    world = routing.World("events", 3, 0.6, 90, seed=5)
    world.run()
    world.requests = 0
    while world._todo:  # no new requests: only ends and events
        world.now, _, act, arguments = routing.heapq.heappop(world._todo)
        if act not in (world.ask, world.begin):
            act(*arguments)
    held = {holder.source: keys for holder, keys, _ in world.index.held(10**6)}
    assert len(held) == len(world.pods)
    for pod in world.pods:
        assert sorted(held[pod.source].tolist()) == sorted(pod.gpu._blocks)


def test_knowing_more_is_worth_something(routing: Any) -> None:
    """A router that knows where blocks are makes pods load and compute less than one that does not."""
    found = {name: routing.World(name, 4, 0.7, 240, seed=2).run() for name in ("random", "load", "events", "exact")}
    away = {name: result.store + result.computed for name, result in found.items()}
    assert max(away["events"], away["exact"]) < min(away["random"], away["load"])
    assert found["exact"].quantile(0.5) < found["random"].quantile(0.5)
    assert len(routing.table(found).splitlines()) == 5


def test_the_charts_have_a_line_for_each_router(routing: Any) -> None:
    results = {name: routing.World(name, 2, 0.5, 30, seed=1).run() for name in routing.COLOURS}
    root = ET.fromstring(routing.drawn(2, {0.5: results, 0.7: results}))
    charts = root.findall(f"{SVG}svg")
    assert len(charts) == 3
    for each in charts:
        lines = each.findall(f"{SVG}polyline")
        assert [line.get("stroke") for line in lines] == list(routing.COLOURS.values())
        assert {"0.5", "0.7"} <= {text.text for text in each.findall(f"{SVG}text")}


@pytest.mark.parametrize("pods", [8, 200])
def test_the_page_shows_the_charts_of_all_routers(routing: Any, pods: int) -> None:
    """Time to the first token and load, for five routers, of a few loads each."""
    assert f"(routing-{pods}.svg)" in (ROOT / "docs" / "index.md").read_text()
    charts = ET.parse(ROOT / "docs" / f"routing-{pods}.svg").getroot().findall(f"{SVG}svg")
    titles = [each.findtext(f"{SVG}title", "") for each in charts]
    assert len(titles) == 3 and all(each.startswith(f"{pods} pods") for each in titles)
    for each in charts:
        lines = {line.get("stroke"): line.get("points", "").split() for line in each.findall(f"{SVG}polyline")}
        assert set(lines) == set(routing.COLOURS.values())
        assert all(len(points) >= 3 for points in lines.values())
