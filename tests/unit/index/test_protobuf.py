"""The messages of ``indexer.v1``: against the real protobuf package, cut short, damaged, and too large."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")

from simm.errors import UsageError
from simm.index.rpc import protobuf
from simm.index.rpc.protobuf import answer, question
from tests.support.indexer_messages import messages

#: With a list of two parts, and fields that nobody knows, of each wire type.
RAW = (
    b"\x12\x03org" + b"\x1a\x01a\x1a\x02bc" + b"\xc2\x3e\x04\x01\xac\x02\x07" + b"\xc0\x3e\x05" + b"\xc8\x3e\x10"
    + b"\xd2\x3e\x01l" + b"\xf8\xff\x01\x01" + b"\xf9\xff\x01abcdefgh" + b"\xfd\xff\x01abcd" + b"\xfa\xff\x01\x01x"
)  # fmt: skip
BODY = {"model": "org", "pod_identifiers": ["a", "bc"], "token_ids": [1, 300, 7, 5], "block_size": 16, "lora_name": "l"}


def test_a_question_field_by_field() -> None:
    assert question(RAW) == BODY
    assert question(b"") == {"token_ids": []}
    assert question(RAW + b"\x12\x01z")["model"] == "z", "of one that is no list the last counts"
    assert answer([]) == b"" and answer([("a", 1.5)]) == b"\x0a\x0c\x0a\x01a\x11\0\0\0\0\0\0\xf8\x3f"


@pytest.mark.parametrize("packed", [True, False])
def test_what_the_real_package_says_and_hears(packed: bool) -> None:
    pytest.importorskip("google.protobuf", reason="no protobuf")
    request, response = messages(packed)
    rng = random.Random(2)
    for _ in range(200):
        tokens = [rng.randrange(1 << rng.choice((1, 7, 8, 14, 21, 28, 32))) for _ in range(rng.randrange(200))]
        fields: dict[str, Any] = {
            "model_name": "org/модель", "token_ids": tokens, "block_size": rng.randrange(1 << 32),
            "pod_identifiers": [f"pod-{each}" for each in range(rng.randrange(4))],
            "cache_salt": "s" * rng.randrange(300), "of_a_later_version": "x", "also_new": [1.0, 2.0],
        }  # fmt: skip
        body = question(request(**fields).SerializeToString())
        wanted = {"model": "org/модель", "token_ids": tokens, "block_size": fields["block_size"]}
        assert {name: body.get(name, 0 if name == "block_size" else None) for name in wanted} == wanted
        assert body.get("pod_identifiers", []) == fields["pod_identifiers"]
        assert body.get("cache_salt", "") == fields["cache_salt"]
    scores = [("pod-1", 3.8), ("под", 0.0), ("x" * 300, -1e300)]
    heard = response.FromString(answer(scores))
    assert [(each.pod, each.score) for each in heard.scores] == scores


@pytest.mark.parametrize("kind", ["cut short", "damaged"])
def test_what_is_not_whole_is_a_mistake_or_another_question(kind: str) -> None:
    """Never another exception; what the real package refuses is refused."""
    rng = random.Random(7)
    refused = 0
    for turn in range(len(RAW) if kind == "cut short" else 4000):
        raw = bytearray(RAW[:turn] if kind == "cut short" else RAW)
        for _ in range(rng.choice((1, 2)) if kind == "damaged" else 0):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            body = question(bytes(raw))
        except UsageError as exc:
            assert str(exc)
            refused += 1
            continue
        assert all(type(each) is int and 0 <= each < 1 << 32 for each in body["token_ids"])
    assert refused > 10


def test_what_the_real_package_cannot_read_is_refused_too() -> None:
    pytest.importorskip("google.protobuf", reason="no protobuf")
    request, _ = messages()
    rng = random.Random(9)
    theirs = 0
    for _ in range(4000):
        raw = bytearray(RAW)
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            request.FromString(bytes(raw))
        except Exception:
            theirs += 1
            # It may know a type of fields, groups, that is gone from the language: ours is the stricter one.
            with pytest.raises(UsageError):
                question(bytes(raw))
    assert theirs > 100


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"\x0a\x05hello", "has no tokenizer"), (b"\x12\x02\xff\xff", "no text in UTF-8"), (b"\x10\x01", "no text"),
        (b"\xc2\x3e\x05\xff\xff\xff\xff\x7f", "below 2"), (b"\xc2\x3e\x06\x80\x80\x80\x80\x80\x01", "below 2"),
        (b"\xc2\x3e\x02\x01\x80", "cut short"), (b"\xc0\x3e\xff\xff\xff\xff\x7f", "below 2"),
        (b"\x12\x05a", "cut short"),
        (b"\xca\x3e\x01a", "below 2"), (b"\x0b", "wire type 3"), (b"\x00\x01", "number 0"), (b"\x80", "cut short"),
        (b"\xf8\xff\x01" + b"\xff" * 10, "64 bits"), (b"\xf8\xff\x01" + b"\xff" * 9 + b"\x7f", "64 bits"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_sentence(raw: bytes, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        question(raw)


def test_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "TOKENS_MAX", 100)
    monkeypatch.setattr(protobuf, "_FIELDS_MAX", 150)
    assert len(question(b"\xc2\x3e\x64" + b"\x01" * 100)["token_ids"]) == 100
    for raw in (b"\xc2\x3e\x65" + b"\x01" * 101, (b"\xc2\x3e\x3c" + b"\x01" * 60) * 2, b"\xc0\x3e\x01" * 101):
        with pytest.raises(UsageError, match="at most 100"):
            question(raw)
    with pytest.raises(UsageError, match="more than 150 fields"):
        question(b"\xf8\xff\x01\x01" * 151)


def test_many_parts_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of numpy costs as much as a hundred tokens: a message of 4 MiB took minutes."""
    calls, real = [0], protobuf.packed

    def counting(raw: memoryview) -> object:
        calls[0] += 1
        return real(raw)

    monkeypatch.setattr(protobuf, "packed", counting)
    part = b"\xc2\x3e\x03\x01\x80\x02" + b"\xc0\x3e\xac\x02" + b"\xc2\x3e\x00"
    assert question(part * 500)["token_ids"] == [1, 256, 300] * 500 and calls == [1]
    for raw in (b"\xc2\x3e\x01\x81" + b"\xc2\x3e\x01\x01", b"\xc2\x3e\x01\x81" + b"\xc0\x3e\x01"):
        with pytest.raises(UsageError, match="cut short"):
            question(raw)
    assert protobuf._FIELDS_MAX <= 1 << 17, "they take a second"
