"""Trace files: what is read, in which order, and the error for each bad line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from simm.errors import UsageError
from simm.traces.formats import Request, Trace, read_trace
from simm.traces.generate import KINDS, generate
from tests.support.plain_traces import write_plain

GOOD = {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
PLAIN = "# simm-trace 1\n# block-tokens 16\n# model small 1\n# model large 4\n"


def mooncake(*requests: Any) -> str:
    return "".join(json.dumps(request) + "\n" for request in requests)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_mooncakes_format(path: Path) -> None:
    path.write_text(
        mooncake(
            {"timestamp": 27.5, "input_length": 1000, "hash_ids": [7, 9], "more": None}, GOOD,
            {"timestamp": 3, "input_length": 0, "hash_ids": []},
        ).replace("\n", "\n\n")
    )  # fmt: skip
    trace = read_trace(path)
    assert trace.requests == (Request(3.0, 700, (1, 2)), Request(3.0, 0, ()), Request(27.5, 1000, (7, 9)))
    assert (trace.block_tokens, trace.blocks, trace.distinct, trace.units) == (512, 4, 4, {"-": 1})


def test_the_plain_format(path: Path) -> None:
    path.write_text(
        PLAIN + "\n# from our log of Monday\n12.5 40 large ab cd\n0 33 small ab cd ef\n20 5 large\n30 20 large ab é\n"
    )
    trace = read_trace(path)
    # The same word is another block in another model.
    assert trace.requests == (
        Request(0.0, 33, (2, 3, 4), "small"), Request(12.5, 40, (0, 1), "large"), Request(20.0, 5, (), "large"),
        Request(30.0, 20, (0, 5), "large"),
    )  # fmt: skip
    assert (trace.block_tokens, trace.units) == (16, {"small": 1, "large": 4})


def test_without_models_there_is_one(path: Path) -> None:
    path.write_text("# simm-trace 1\n# block-tokens 64\n1 70 - x\n")
    assert read_trace(path) == Trace("trace.jsonl", (Request(1.0, 70, (0,)),), 64, {"-": 1})


def renumbered(trace: Trace) -> list[tuple[Any, ...]]:
    """The requests, with blocks numbered in order of their appearance."""
    ids: dict[int, int] = {}
    return [
        (each.at_ms, each.tokens, each.model, [ids.setdefault(block, len(ids)) for block in each.blocks])
        for each in trace.requests
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str, path: Path) -> None:
    trace = generate(kind, 3, 200)
    write_plain(trace, path)
    again = read_trace(path)
    assert renumbered(again) == renumbered(trace)
    assert (again.block_tokens, again.units) == (trace.block_tokens, trace.units)


BAD_MOONCAKE = {
    "{": "no JSON",
    '{"timestamp": 1}': "'input_length' is missing",
    json.dumps([1]): "no JSON object",
    json.dumps({**GOOD, "timestamp": -1}): "'timestamp' -1 is no number of milliseconds",
    json.dumps({**GOOD, "timestamp": True}): "'timestamp' True",
    '{"timestamp": NaN, "input_length": 1, "hash_ids": []}': "'timestamp' nan",
    '{"timestamp": 1e999, "input_length": 1, "hash_ids": []}': "'timestamp' inf",
    json.dumps({**GOOD, "input_length": 1.5}): "'input_length' 1.5 is no number of tokens",
    json.dumps({**GOOD, "hash_ids": 7}): "'hash_ids' is no list of whole numbers",
    json.dumps({**GOOD, "hash_ids": [1, "2"]}): "'hash_ids' is no list of whole numbers",
    json.dumps({**GOOD, "hash_ids": [1, -2]}): "'hash_ids' is no list of whole numbers",
    json.dumps({**GOOD, "hash_ids": [1, True]}): "'hash_ids' is no list of whole numbers",
    json.dumps({**GOOD, "hash_ids": [5, 6, 5]}): "block 3 of the prompt is one of those before it",
    "[" * 100_000: "no JSON",
}


@pytest.mark.parametrize("line", BAD_MOONCAKE, ids=lambda line: line[:60])
def test_a_bad_line_of_mooncakes_format_is_named(line: str, path: Path) -> None:
    path.write_text(mooncake(GOOD) + "\n" + line + "\n" + mooncake(GOOD))
    with pytest.raises(UsageError, match=r"trace\.jsonl, line 3: ") as caught:
        read_trace(path)
    assert BAD_MOONCAKE[line] in str(caught.value)


BAD_PLAIN = {
    "5": "a request has a time, a number of tokens, a model and its blocks",
    "nan 5 small a": "'nan' is no time in milliseconds",
    "-1 5 small a": "'-1' is no time",
    "soon 5 small a": "'soon' is no time",
    "1 5.5 small a": "'5.5' is no number of tokens",
    "1 ٣ small a": "is no number of tokens",
    "1 5 medium a": "model 'medium' is not declared; write '# model medium UNITS' above",
    "1 5 small a b a": "block 3 of the prompt is one of those before it",
    "# model medium 2": "'model' comes after the first request",
    "# block-tokens 2": "'block-tokens' comes after the first request",
}


@pytest.mark.parametrize("line", BAD_PLAIN)
def test_a_bad_line_of_the_plain_format_is_named(line: str, path: Path) -> None:
    path.write_text(PLAIN + "1 5 small a\n" + line + "\n")
    with pytest.raises(UsageError, match=r"trace\.jsonl, line 6: ") as caught:
        read_trace(path)
    assert BAD_PLAIN[line] in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (PLAIN, "is empty"),
        ("time,tokens\n", "line 1: neither a JSON object nor '# simm-trace 1' begins this file"),
        ("# simm-trace 2\n", "line 1: '# simm-trace 2' is another version"),
        ("# simm-trace 1\n1 5 - a\n", "line 2: '# block-tokens NUMBER' is missing"),
        ("# simm-trace 1\n# block-tokens 0\n", "line 2: '# block-tokens 0' does not say the tokens in a block"),
        ("# simm-trace 1\n# block-tokens\n", "line 2: '# block-tokens' does not say"),
        ("# simm-trace 1\n# model a\n", "line 2: '# model a' does not say the units"),
        ("# simm-trace 1\n# model\n", "line 2: '# model' does not say the units"),
        ("# simm-trace 1\n# model a 1025\n", "line 2: '# model a 1025' does not say the units in a block, 1 to 1024"),
        ("# simm-trace 1\n# model a 1\n# model a 1\n", "line 3: model 'a' is declared twice"),
    ],
)
def test_a_bad_file_is_told(text: str, message: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_are_told(path: Path) -> None:
    path.write_bytes(b"\x1f\x8b\xff\x00")
    with pytest.raises(UsageError, match="is no text file"):
        read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(path.with_name("nothing"))


@pytest.mark.parametrize("seed", range(30))
def test_damaged_files_raise_nothing_else(seed: int, path: Path) -> None:
    draw = random.Random(seed)
    trace = generate("chat", seed, 20)
    if seed % 2:
        write_plain(trace, path)
    else:
        path.write_text(
            mooncake(
                *({"timestamp": each.at_ms, "input_length": each.tokens, "hash_ids": each.blocks}
                  for each in trace.requests)
            )
        )  # fmt: skip
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 20)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data)
    try:
        assert read_trace(path).requests
    except UsageError as exc:
        assert str(path) in str(exc)


def test_unchained_blocks_are_counted() -> None:
    chained = Trace("t", (Request(0, 0, (1, 2, 3)), Request(1, 0, (1, 2, 4))))
    assert chained.unchained() == 0
    assert Trace("t", (*chained.requests, Request(2, 0, (2, 3, 4)))).unchained() == 2


def test_parts() -> None:
    trace = generate("system", 1, 101)
    first, second = trace.parts(0.25)
    assert first.requests + second.requests == trace.requests and len(first.requests) == 25
    assert second.units == trace.units and second.name == "system, seed 1, part 2"
