"""``benchmarks/eviction.py``: its tables, and the charts that it writes into ``docs/``."""

from __future__ import annotations

import importlib
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import simm
from simm.traces.generate import KINDS
from simm.traces.simulate import POLICIES, simulate

ROOT = Path(simm.__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def eviction(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for name in ("eviction", "svg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("eviction")
    yield module
    for name in ("eviction", "svg"):
        sys.modules.pop(name, None)


def lines_in(text: str) -> dict[str, list[tuple[float, float]]]:
    """Name -> points of each line of a chart, as they are drawn."""
    root = ET.fromstring(text)
    names = [node.text or "" for node in root.iter(f"{SVG}text") if float(node.get("x", "0")) > 620]
    points = [node.get("points", "") for node in root.iter(f"{SVG}polyline")]
    assert len(names) == len(points)
    return {
        name: [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", line)]
        for name, line in zip(names, points)
    }


def test_a_chart_shows_the_figures(eviction: Any) -> None:
    figures = {"lru": {1000: 0.1, 10_000: 0.2, 100_000: 0.4}, "min & <co>": {1000: 0.4, 10_000: 0.4, 100_000: 0.4}}
    drawn = lines_in(eviction.drawn("a <title>", figures))
    assert set(drawn) == set(figures)
    (x0, y0), (x1, y1), (x2, y2) = drawn["lru"]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2), "x is logarithmic"
    assert y0 - y1 == pytest.approx((y1 - y2) / 2, abs=0.2), "y is linear, upwards"
    assert [y for _, y in drawn["min & <co>"]] == [y2] * 3


def test_a_table_marks_the_best_that_a_server_can_have(eviction: Any) -> None:
    figures = {"lru": {10: 0.1, 20: 0.25}, "arc": {10: 0.2, 20: 0.2}, "min": {10: 0.5, 20: 0.5}}
    assert eviction.table(figures).splitlines() == [
        "| policy | 10 | 20 |", "|---|---|---|", "| lru | 0.100 | **0.250** |", "| arc | **0.200** | 0.200 |",
        "| min | 0.500 | 0.500 |",
    ]  # fmt: skip


def test_the_command_simulates_and_draws(eviction: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--generate", "chat", "--requests", "150", "--shares", "0.1,0.5", "--policies", "lru,simm-lru,min"]
    assert eviction.main([*argv, "--charts", str(tmp_path), "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["chat"]
    assert list(figures) == ["lru", "simm-lru", "min"]
    trace = eviction.generate("chat", 7, 150)
    rooms = [int(share * trace.distinct) for share in (0.1, 0.5)]
    for name, row in figures.items():
        assert list(row.values()) == [next(iter(simulate(trace, room, [name]))).ratio for room in rooms]
    assert set(lines_in((tmp_path / "eviction-chat.svg").read_text())) == set(figures)
    assert "| simm-lru |" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--generate", "web"], ["--generate", "chat", "--policies", "mru"], ["/nowhere"],
                                  ["--generate", "chat", "--shares", "0"]])  # fmt: skip
def test_bad_words_are_told(eviction: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        eviction.main(argv)
    assert caught.value.code == 2 and "error:" in capsys.readouterr().err


def test_every_policy_has_a_style_of_its_own(eviction: Any) -> None:
    assert set(POLICIES) <= set(eviction.STYLES)
    assert len(set(eviction.STYLES.values())) == len(eviction.STYLES)


@pytest.mark.parametrize("name", ["conversation_trace", *KINDS])
def test_the_page_has_a_chart_and_a_table_of_each_trace(name: str) -> None:
    """The charts in docs/ have all policies that there are: run benchmarks/eviction.py again after adding one."""
    page = (ROOT / "docs" / "eviction.md").read_text()
    assert f"(eviction-{name}.svg)" in page
    assert set(lines_in((ROOT / "docs" / f"eviction-{name}.svg").read_text())) == set(POLICIES)
    section = page[page.index(f"(eviction-{name}.svg)") :]
    rows = re.findall(r"^\| ([\w-]+) \|", section[: section.find("\n## ", 1)], re.MULTILINE)
    assert set(POLICIES) <= set(rows)
