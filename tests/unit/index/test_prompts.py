"""Questions that are read by what is remembered of others, against a reader that remembers nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm.errors import UsageError
from simm.index import prompts as module
from simm.index.keys import request_keys
from simm.index.libraries import msgspec
from simm.index.prompts import PIECE, Prompt, Prompts
from tests.support.dose import dosed

SEED = 7


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(rng.choice((10, 1000, 150_000, 1 << 32))) for _ in range(count)]


def _plain(body: bytes) -> Any:
    """What a question says, or what kind of mistake it is."""
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            return "no object"
        ids = fields.get("token_ids")
        if isinstance(ids, list):
            fields["token_ids"] = ids, request_keys(ids, 16, seed=SEED), request_keys(ids, 5, seed=SEED)
        return fields
    except (msgspec.MsgspecError, UsageError):
        return "a mistake"


def _by(prompts: Prompts, body: bytes) -> Any:
    try:
        fields = prompts.read(body)
    except msgspec.MsgspecError:
        return "a mistake"
    except UsageError as exc:
        return "no object" if "a JSON object" in str(exc) else "a mistake"
    prompt = fields.get("token_ids")
    if isinstance(prompt, Prompt):
        keys = prompt.keys(16).tolist(), prompt.keys(5).tolist()
        assert len(prompt) == len(prompt.ids)
        fields["token_ids"] = prompt.ids.tolist(), *keys
    return fields


def _bodies(rng: random.Random, shared: list[list[int]]) -> list[bytes]:
    """Questions that begin alike, in every form that has misled a reader or might."""
    ids = [*rng.choice(shared)]
    ids = ids[: rng.choice((len(ids), rng.randrange(1, len(ids))))] + _ids(rng, rng.choice((0, 1, 30, 3000)))
    gap = rng.choice((", ", ",", " ,\n\t"))
    text = "[" + gap.join(map(str, ids)) + rng.choice(("]", " ]"))
    before = rng.choice((
        '"model": "m", ', "", '"tenant_id": "token_ids", "x": [5, 6], ', '"a": {"token_ids": [1, 2]}, ',
        '"b": "\\"token_ids", "c\\u0041": [7], ', '"token_ids": [3, 4], ', '"d": "{", ', '"e": "}\\"",',
    ))  # fmt: skip
    behind = rng.choice((
        "}", ', "block_size": 16}', ', "model": "other"}', ', "token_ids": [9, 9]}', ', "token_\\u0069ds": [9]}',
        ', "f": "token_ids"}', ', "token_ids": null}', ', "g": {"token_ids": [8]}}', "", ",}", ', "x": 1e999}', "} }",
    ))  # fmt: skip
    whole = "{" + before + '"token_ids": ' + text + behind
    cut = whole[: rng.randrange(len(whole))]
    extra = rng.choice(("x", "-", ",", "1.5" + gap, "true" + gap, "]", "0"))
    wrong = whole.replace(gap, gap + extra, rng.choice((1, 900)))
    comma = "{" + before + '"token_ids": ' + text.rstrip("] ") + gap + "]" + behind
    nested = f"[{whole}]"
    return [each.encode() for each in (whole, rng.choice((cut, wrong, comma, nested)), whole)]


def _differences(prompts: Prompts, rounds: int, seed: int) -> int:
    rng = random.Random(seed)
    shared = [_ids(rng, 3000) for _ in range(3)]
    return sum(
        _by(prompts, body) != _plain(body) for _ in range(rounds) for body in _bodies(rng, shared)
    )  # fmt: skip


@pytest.mark.parametrize("bytes_max", [0, 5 * PIECE, module.REMEMBERED_BYTES_MAX])
def test_questions_are_read_as_if_nothing_was_remembered(bytes_max: int) -> None:
    prompts = Prompts(SEED, bytes_max)
    assert _differences(prompts, dosed(60, quick=30), 1) == 0
    assert prompts.nbytes <= bytes_max
    assert prompts.nbytes == sum(piece.nbytes for _, piece in prompts._pieces.values())


@pytest.mark.parametrize("behind", ['1], "token_ids": [9, 9]}', '1], "token_\\u0069ds": [9]}', " ]}"])
def test_what_is_behind_the_pieces_can_change_them(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is named again counts, a comma too many is a mistake. The control is a reader that sees neither."""
    begin = '{"token_ids":  [' + "1234567," * (2 * PIECE // 8 - 2)
    assert len(begin) == 2 * PIECE, "a piece ends behind a comma"
    plain, other = f"{begin}1]}}".encode(), f"{begin}{behind}".encode()
    prompts = Prompts(SEED)
    for _ in range(2):
        assert _by(prompts, plain) == _plain(plain) != _plain(other) == _by(prompts, other)
    monkeypatch.setattr(module, "_rest", lambda body, last: msgspec.json.decode(last.head + body[last.end :]))
    assert _by(prompts, other) != _plain(other)


def test_what_is_known_is_not_read_again() -> None:
    prompts = Prompts(SEED)
    ids = _ids(random.Random(2), 4000)
    first = json.dumps({"model": "m", "token_ids": ids, "block_size": 16}).encode()
    pieces = len(first) // PIECE
    assert len(prompts.read(first)["token_ids"]._pieces) == pieces > 5, "they are remembered"
    longer = json.dumps({"model": "m", "token_ids": [*ids, 1, 2, 3], "block_size": 32}).encode()
    again = prompts.read(longer)
    assert len(again["token_ids"]._tail) < PIECE and again["block_size"] == 32 and again["model"] == "m"
    assert again["token_ids"].keys(16).tolist() == request_keys([*ids, 1, 2, 3], 16, seed=SEED)
    other = json.dumps({"model": "n", "token_ids": ids}).encode()
    assert not prompts._known(other)[1], "another model's question begins otherwise"


def test_keys_of_many_sizes_and_none_that_are_small_are_remembered() -> None:
    prompts = Prompts(SEED)
    ids = _ids(random.Random(3), 3000)
    body = json.dumps({"token_ids": ids}).encode()
    for size in (16, 1, 64, 7, 128, 4096, 16, 1000):
        for _ in range(2):
            assert prompts.read(body)["token_ids"].keys(size).tolist() == request_keys(ids, size, seed=SEED)
    assert {size for _, piece in prompts._pieces.values() for size in piece.keys} == {16, 64}


def test_those_that_were_used_last_stay() -> None:
    rng = random.Random(4)
    bodies = [json.dumps({"token_ids": _ids(rng, 900)}).encode() for _ in range(6)]
    prompts = Prompts(SEED, 40 * PIECE // 4)
    for body in bodies:
        prompts.read(bodies[0])
        prompts.read(body)
    assert prompts._known(bodies[0])[1] and not prompts._known(bodies[1])[1]
