"""The default eviction policy, on conversations as an engine reads and stores them; and that it is named once."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from simm.arena.store import Store
from simm.config.settings import load
from simm.constants import DEFAULT_POLICY, POLICY_NAMES
from simm.server.options import DataServerOptions


def _benchmark() -> Any:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "eviction.py"
    found = importlib.util.spec_from_file_location("eviction_benchmark", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["eviction_benchmark"] = module
    found.loader.exec_module(module)
    return module


benchmark = _benchmark()


@pytest.mark.parametrize("share", [0.1, 0.2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_policy_finds_more_of_a_conversation_than_the_default(seed: int, share: float) -> None:
    prompts = benchmark.conversations(seed, 1500)
    ratios = {result.name: result.ratio for result in benchmark.compare(prompts, share, [65_536])}
    assert set(ratios) == {*POLICY_NAMES, "textbook LRU", "textbook FIFO"}
    assert 0.1 < ratios["textbook FIFO"] < ratios["textbook LRU"] < 0.8  # a cache that is too small, but not by far
    assert ratios["fifo"] == ratios["textbook FIFO"]  # the replay and the capacities are right
    for name in POLICY_NAMES:
        assert ratios[DEFAULT_POLICY] >= ratios[name], ratios
    assert ratios[DEFAULT_POLICY] > ratios["textbook LRU"] - 0.02, ratios


def test_conversations_are_those_of_their_seed() -> None:
    assert benchmark.conversations(3, 200) == benchmark.conversations(3, 200) != benchmark.conversations(4, 200)
    prompts = benchmark.conversations(3, 200)
    assert all(len(set(prompt)) == len(prompt) for prompt in prompts)
    returns = [prompt for place, prompt in enumerate(prompts) if any(p == prompt[: len(p)] for p in prompts[:place])]
    assert 50 < len(returns) < 190
    assert len({prompt[0] for prompt in prompts}) == 8


def test_the_default_is_named_once() -> None:
    assert DEFAULT_POLICY in POLICY_NAMES
    assert load("dataserver", {}, {}, None).policy == DEFAULT_POLICY
    fields = {field.name: field.default for field in dataclasses.fields(DataServerOptions)}
    assert fields["policy"] == DEFAULT_POLICY
    for make in (Store.create, Store.recover):
        assert inspect.signature(make).parameters["policy"].default == DEFAULT_POLICY


def test_every_policy_can_be_chosen() -> None:
    for name in POLICY_NAMES:
        assert load("dataserver", {"policy": name}, {}, None).policy == name


def test_the_benchmark_reads_a_trace_in_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [(20, [0, 1, 3]), (0, [0, 1]), (10, [0, 1, 2])]
    text = "\n".join(json.dumps({"timestamp": at, "input_length": 9, "hash_ids": ids}) for at, ids in requests)
    trace.write_text(text + "\n\n")
    assert benchmark.read_trace(trace) == [[0, 1], [0, 1, 2], [0, 1, 3]]
    assert benchmark.main([str(trace), "--shares", "1", "--sizes", "4K,300K"]) == 0
    said = capsys.readouterr().out
    assert "3 requests, 8 blocks, 4 distinct" in said
    assert said.splitlines()[-1].split() == ["1.000", *["0.5000"] * (len(POLICY_NAMES) + 2)]
    trace.write_text('{"timestamp": 1, "hash_ids": [0]}\n{"timestamp": 2}\n')
    with pytest.raises(SystemExit):
        benchmark.main([str(trace)])
    assert "line 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.main([])
