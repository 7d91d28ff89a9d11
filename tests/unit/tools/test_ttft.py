"""``benchmarks/ttft.py`` without torch: its conversations, keys, tables, targets and chart.

tests/engines/test_ttft.py runs its model and all of it.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import simm

ROOT = Path(simm.__file__).parents[1]
NAMES = ("conversations", "multi_turn", "svg", "ttft_pairs", "ttft_report")
LABELS = {"none": "no cache", "in-process": "in-process cache", "simm": "SiMM", "redis": "Redis"}


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a module of benchmarks/ by its name."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


def test_a_conversation_grows(of: Any) -> None:
    talk = of("conversations")
    turns = talk.conversation(7, 0, (512, 1024, 4096), 1000)
    assert [len(turn.prompt) for turn in turns] == [512, 1024, 4096]
    for before, after in itertools.pairwise(turns):
        assert after.prompt[: len(before.prompt)] == before.prompt
    assert all(talk.FRESH[0] <= len(turn.prompt) - turn.history <= talk.FRESH[1] for turn in turns)
    assert {token // 100 for token in turns[-1].prompt} == set(range(10))
    assert turns == talk.conversation(7, 0, (512, 1024, 4096), 1000)
    others = [talk.conversation(8, 0, (512,), 1000), talk.conversation(7, 1, (512,), 1000)]
    assert len({other[0].prompt[:16] for other in [*others, turns]}) == 3


@pytest.mark.parametrize("sizes", [(), (1024, 512), (512, 512), (256,)])
def test_sizes_that_make_no_conversation(of: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        of("conversations").conversation(7, 0, sizes, 1000)


def test_a_key_stands_for_all_tokens_before_its_blocks_end(of: Any) -> None:
    keys = of("conversations").block_keys
    prompt = list(range(40))
    assert len(keys("p", prompt, 8)) == 5 and len(keys("p", prompt[:-1], 8)) == 4 and keys("p", prompt[:7], 8) == []
    for changed in range(40):
        other = [*prompt[:changed], 99, *prompt[changed + 1 :]]
        same = [one == two for one, two in zip(keys("p", prompt, 8), keys("p", other, 8))]
        assert same == [block < changed // 8 for block in range(5)]
    assert all(re.fullmatch(r"p/[0-9a-f]{64}", key) for key in keys("p", prompt, 8))


def sample(report: Any, cache: str, ttft: float, tokens: int = 4096, round: int = 0, **other: Any) -> Any:
    fields = {"load": 0.01, "processor": ttft, "blocks": 30, "expected": 30, "moved": 30 << 20, "equal": True, **other}
    if cache == "none":
        fields |= {"blocks": 0, "expected": 0, "moved": 0}
    return report.Sample(conversation=other.pop("conversation", 0), tokens=tokens, round=round, cache=cache, ttft=ttft,
                         **{name: value for name, value in fields.items() if name != "conversation"})  # fmt: skip


def test_ratios_are_of_samples_of_one_round(of: Any) -> None:
    """The machine was twice as slow in the second round, and ten times in the second conversation."""
    report = of("ttft_report")
    samples = [sample(report, "none", 10.0), sample(report, "none", 100.0, conversation=1)]
    for conversation, slow in [(0, 1), (1, 10)]:
        for round in range(2):
            for name, time in [("in-process", 1.0), ("simm", 1.1), ("redis", 2.2)]:
                samples.append(
                    sample(report, name, time * slow * (1 + round), round=round, conversation=conversation)
                )
    assert report.ratios(samples, 4096, "simm", "in-process") == pytest.approx([1.1] * 4)
    assert report.ratios(samples, 4096, "simm", "redis") == pytest.approx([0.5] * 4)
    assert report.ratios(samples, 4096, "simm", "none") == pytest.approx([0.11, 0.22] * 2)
    assert report.ratios(samples, 8192, "simm", "none") == []
    spread = report.Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert report.Spread.of([]) is None and report.Spread.of([2.0]).high == 2.0


@pytest.mark.parametrize(
    ("simm_s", "none_s", "redis_s", "missed"),
    [(1.1, 10, 2, []), (1.2, 10, 2, ["in-process"]), (1.1, 3, 2, ["no cache"]), (1.1, 10, 1.0, ["Redis"])],
)
def test_targets(of: Any, simm_s: float, none_s: float, redis_s: float, missed: list[str]) -> None:
    report = of("ttft_report")
    samples = [
        sample(report, name, time, tokens)
        for tokens in (1024, 4096)
        for name, time in [("none", none_s), ("in-process", 1.0), ("simm", simm_s), ("redis", redis_s)]
    ]
    lines = report.targets(samples, LABELS)
    assert len(lines) == 3 and all(line.startswith("4,096 tokens: ") for line in lines), "none below 4,096 tokens"
    wrong = [line for line in lines if line.endswith("MISSED")]
    assert len(wrong) == len(missed) and all(name in line for name, line in zip(missed, wrong))


def test_the_table_has_medians_and_bytes(of: Any) -> None:
    report = of("ttft_report")
    samples = [sample(report, "none", 8.0, 1024), sample(report, "redis", 4.0, 1024, moved=3 << 20)]
    samples += [sample(report, "in-process", time, 1024, round=n) for n, time in enumerate([0.05, 0.06, 9.0])]
    lines = report.table(samples, LABELS).splitlines()
    assert lines[2].startswith("| 1,024 | no cache | 8.00 s | - | 8.00 s | - | - | 0 MiB |")
    assert lines[3].startswith("| 1,024 | in-process cache | 60.0 ms | 10.0 ms | 60.0 ms | 0.007 (")
    assert lines[4] == (
        "| 1,024 | Redis | 4.00 s | 10.0 ms | 4.00 s | 0.500 (0.500 to 0.500) | 80.000 (80.000 to 80.000) | 3 MiB |"
    )


def test_the_table_of_loads_compares_within_a_round(of: Any) -> None:
    report = of("ttft_report")
    loads = [
        report.Load(2048, round, name, time * slow, 1 << 30, True)
        for round, slow in enumerate([1, 4, 2])
        for name, time in [("simm", 0.05), ("redis", 0.2)]
    ]
    lines = report.load_table(loads, LABELS).splitlines()
    assert lines[2:] == [
        "| 2,048 | 1,024 MiB | SiMM | 0.10 s (75.0 ms to 0.15 s) | 10.0 | - |",
        "| 2,048 | 1,024 MiB | Redis | 0.40 s (0.30 s to 0.60 s) | 2.5 | 4.00 (4.00 to 4.00) |",
    ]


def pairs(module: Any, differences: list[float], cache: str = "redis", **other: Any) -> list[Any]:
    """Rounds on a machine that is three times as slow in every other one."""
    found = []
    for round, difference in enumerate(differences):
        slow = 1 + 2 * (round % 2)
        fields = {"moved": 105 << 20, "good": True, **other}
        found.append(
            module.Pair(4096, round, cache, 2.0 * slow, 0.05, 2.0 * slow + difference, 0.05 + difference / 2, **fields)
        )
    return found


def test_differences_of_rounds_tell_what_medians_cannot(of: Any) -> None:
    module = of("ttft_pairs")
    noise = [((7 * n) % 11 - 5) / 100 for n in range(33)]  # -50 to 50 ms, the median 0
    for ahead, verdict in [(0.05, "SiMM is ahead"), (-0.05, "SiMM is BEHIND"), (0.0, "not told apart")]:
        found = module.Difference.of([ahead + each for each in noise])
        assert found.median == pytest.approx(ahead) and found.low <= found.median <= found.high
        assert found.verdict == verdict and (found.chance < 0.01) == bool(ahead)
    lines = module.pair_table(pairs(module, [0.02 + each for each in noise]), LABELS).splitlines()
    assert lines[2].startswith("| 4,096 | 105 MiB | Redis | 33 | 2.00 s | 2.5% | ") and "| +20.0 ms | " in lines[2]
    line = module.pair_table(pairs(module, [-0.1, -0.2, -0.3], "in-process"), LABELS).splitlines()[2]
    assert line.endswith("| 1.053 of it |"), "the ratio within a round"


def test_the_sign_test_is_the_binomial_distribution(of: Any) -> None:
    of = of("ttft_pairs").sign_test
    assert of([1.0] * 10) == of([-1.0] * 10) == pytest.approx(2 / 1024)
    assert of([1, -1]) == of([]) == of([0.0, 0.0]) == 1.0
    assert of([1] * 8 + [-1, 0]) == pytest.approx(2 * (1 + 9) / 512)


def test_rounds_alternate_and_are_compared_with_the_history_in_place(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch: caches that keep numbers of blocks, and a model whose logits are what it was given."""
    module, report, conversations = of("ttft_pairs"), of("ttft_report"), of("conversations")

    class Kept:
        def __init__(self, pool: Any, block: int = 128, name: str = "in-process") -> None:
            self.name, self.pool, self.blocks = name, pool, 0

        def clear(self) -> None:
            self.blocks = 0

        def save(self, prompt: Any, start: int, end: int) -> None:
            assert self.blocks == start
            self.blocks = end

    class Pool:
        block = 128

        def copy_from(self, other: Any, start: int, end: int) -> None:
            assert other is source

    monkeypatch.setitem(sys.modules, "ttft_caches", type(sys)("ttft_caches"))
    sys.modules["ttft_caches"].InProcess = Kept  # type: ignore[attr-defined]
    source = Pool()
    turns = conversations.conversation(1, 0, [1024, 2048], 500)
    asked: list[tuple[int, int, str]] = []

    def ask(cache: Any, turn: Any, round: int, expected: Any) -> tuple[Any, Any]:
        assert turn.history == len(turn.prompt) - 96 and (expected == "logits" or cache.pool is source)
        asked.append((len(turn.prompt), round, cache.name))
        equal = cache.name != "wrong"
        return "logits", sample(report, cache.name, 1.0, len(turn.prompt), blocks=cache.blocks, equal=equal)

    caches = [Kept(Pool(), name=name) for name in ("simm", "redis", "wrong")]
    found = list(module.measure(ask, caches, turns, source, 3, begin=3))
    rounds = [2, 3, 4, 5]
    expected = [("simm", "redis"), ("redis", "simm")]  # an even round begins with the other one
    assert asked[:9] == [(1024, 0, "in-process")] + [
        (1024, round, name) for round in rounds for name in expected[1 - round % 2]
    ]
    right = [each for each in found if each.cache == "redis"]
    assert [(each.tokens, each.round, each.good) for each in right] == [
        (size, round, True) for size in (1024, 2048) for round in rounds[1:]
    ], "the first round is not counted"
    wrong = [each for each in found if each.cache == "wrong"]
    assert len(wrong) == 8 and not any(each.good for each in wrong), "but a wrong byte in it is"
    assert len(module.bad(found, LABELS)) == 8


def test_runs_of_one_kind_are_added_up(of: Any, tmp_path: Path) -> None:
    module = of("ttft_pairs")
    file = tmp_path / "pairs.json"
    settings = {"size": "full", "sizes": [4096]}
    assert module.kept(file, settings) == []
    module.written(file, "a machine", {}, settings, pairs(module, [0.1, 0.2]))
    assert module.kept(file, settings) == pairs(module, [0.1, 0.2])
    with pytest.raises(ValueError, match="other settings"):
        module.kept(file, {**settings, "sizes": [8192]})


def test_other_logits_and_lost_blocks_are_told(of: Any) -> None:
    report = of("ttft_report")
    good = [sample(report, "none", 8.0), sample(report, "simm", 1.0)]
    assert report.wrong(good, LABELS) == []
    bad = [sample(report, "simm", 1.0, equal=False), sample(report, "redis", 1.0, blocks=29)]
    assert report.wrong([*good, *bad], LABELS) == [
        "SiMM, conversation 0, 4,096 tokens: the logits differ from those of no cache",
        "Redis, conversation 0, 4,096 tokens: 29 of 30 blocks were found",
    ]


def test_the_chart_is_logarithmic_both_ways(of: Any) -> None:
    report = of("ttft_report")
    samples = [sample(report, "none", time, tokens) for tokens, time in [(1024, 1.0), (2048, 10.0), (4096, 100.0)]]
    samples.append(sample(report, "simm", 3.0, 2048))
    root = ET.fromstring(report.drawn(samples, LABELS, "a title"))
    first, second = (node.get("points", "") for node in root.iter("{http://www.w3.org/2000/svg}polyline"))
    points = [tuple(map(float, point.split(","))) for point in first.split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y0 > y1
    assert len(second.split()) == 1
    ticks = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text") if node.get("text-anchor") == "end"]
    assert ticks == ["1", "2", "5", "10", "20", "50", "100"]


def test_the_page_has_the_chart_and_a_row_of_each_cache(of: Any) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page[page.index("## Time to first token") :]
    section = section[: section.index("\n## ", 1)]
    drawing = (ROOT / "docs" / "ttft.svg").read_text()
    labels = ["no cache", "in-process cache", "SiMM, shared memory", "SiMM, layer by layer", "SiMM, TCP", "Redis"]
    assert "(ttft.svg)" in section and drawing.count("<polyline") == len(of("ttft_report").STYLES) - 1
    for label in (*labels, "Mooncake", "LMCache's server"):
        assert re.search(rf"^\| [\d,]+ \| {re.escape(label)}", section, re.MULTILINE)
        assert f">{label.replace('shared memory', 'shm')}" in drawing


def test_what_an_engine_says_with_a_cache_is_compared(of: Any) -> None:
    module = of("multi_turn")
    row = {"conversation": 0, "tokens": 1024, "history": 768, "ttft": 2.0, "token": 7, "logprob": -1.0, "storage": 0,
           "round": 0}  # fmt: skip
    good = {**row, "ttft": 0.5, "storage": 768, "logprob": -1.0001}
    assert module.differences([row], [good]) == []
    for wrong in ({"token": 8}, {"logprob": -1.1}, {"storage": 704}):
        assert len(module.differences([row], [{**good, **wrong}])) == 1
    assert module.table([row], [good]).endswith("| 1,024 | 2.00 s | 0.50 s | 0.250 | 768 tokens |")
    slower = [{**row, "ttft": 9.0, "round": 1}], [{**good, "ttft": 0.75, "round": 1}]
    assert module.table([row, *slower[0]], [*slower[1], good]) == module.table([row], [good]), "the fastest rounds"
    turn = of("conversations").conversation(1, 0, (512,), 512)[0]
    messages = [module.other_message(1, 0, turn, number) for number in (1, 2)]
    assert all(tuple(each[: turn.history]) == turn.prompt[: turn.history] for each in messages)
    assert len({tuple(each) for each in (*messages, turn.prompt)}) == 3 and {len(each) for each in messages} == {512}


def test_every_style_is_another(of: Any) -> None:
    report = of("ttft_report")
    assert len(set(report.STYLES.values())) == len(report.STYLES)
