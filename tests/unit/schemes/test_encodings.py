"""The encodings that block hashes are made of, against pickle itself and a plain encoder of CBOR."""

from __future__ import annotations

import pickle
import random
import struct
from typing import Any

import numpy as np
import pytest

from simm.errors import UsageError
from simm.schemes import encodings, vllm

SEEDS = range(60)


def plain_cbor(value: Any) -> bytes:
    """Encode by RFC 8949, one item at a time."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        major, number = (0, value) if value >= 0 else (1, -1 - value)
        body = b""
    elif isinstance(value, (bytes, str)):
        body = value if isinstance(value, bytes) else value.encode()
        major, number = (2 if isinstance(value, bytes) else 3), len(body)
    else:
        body = b"".join(plain_cbor(each) for each in value)
        major, number = 4, len(value)
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 24:
            return bytes((major << 5 | number,)) + body
        if number < 1 << size * 8:
            return bytes((major << 5 | code,)) + number.to_bytes(size, "big") + body
    raise AssertionError(number)


def some_block(dice: random.Random, most: int) -> tuple[Any, list[int], Any]:
    """Return a parent, tokens and extra keys."""
    bounds = [24, 256, 1 << 16, most]
    ids = [dice.randrange(dice.choice(bounds)) for _ in range(dice.choice([1, 2, 3, 4, 16, 300]))]
    ids += [each for bound in bounds for each in (bound - 1, min(bound, most - 1))]
    parent = dice.choice([dice.randbytes(32), dice.randrange(1 << 64), dice.randbytes(300)])
    lora = ("lora", f"a{dice.random()}", "ü" * dice.choice([1, 400]))
    extra = dice.choice([None, (), (lora,), (lora, ("mm", "i", -5)), (("mm", "i", 1 << 40), ("cache_salt", "s"))])
    return parent, ids, extra


@pytest.mark.parametrize("seed", SEEDS)
def test_cbor_of_a_block(seed: int) -> None:
    parent, ids, extra = some_block(random.Random(seed), 1 << 62)
    encoded = encodings.cbor_tokens(encodings.token_array(ids))
    parts = vllm.codec("sha256_cbor")
    message = parts.message(parts.item(parent), encoded.slice(0, len(ids)), len(ids), parts.item(extra))
    assert message == plain_cbor((parent, ids, extra))
    assert encoded.slice(1, 3) == b"".join(map(plain_cbor, ids[1:3]))


@pytest.mark.parametrize("seed", SEEDS)
def test_pickle_of_a_block(seed: int) -> None:
    parent, ids, extra = some_block(random.Random(seed), 1 << 31)
    encoded = encodings.pickled_tokens(encodings.token_array(ids))
    parts = vllm.codec("sha256")
    message = parts.message(parts.item(parent), encoded.slice(0, len(ids)), len(ids), parts.item(extra))
    assert message == pickle.dumps((parent, tuple(ids), extra), protocol=5)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_pickle_of_short_tuples(count: int) -> None:
    ids = list(range(250, 250 + count))
    encoded = encodings.pickled_tokens(encodings.token_array(ids)).slice(0, count)
    message = encodings.pickled(b"N", encodings.pickled_tuple(encoded, count), b"N")
    assert message == pickle.dumps((None, tuple(ids), None), protocol=5)


@pytest.mark.parametrize("seed", ["", "42", "vllm-none-hash", "x" * 300])
def test_pickle_of_a_seed(seed: str) -> None:
    assert encodings.pickled(encodings.pickled_item(seed)) == pickle.dumps(seed, protocol=5)


def test_pickle_refuses_what_it_cannot_know() -> None:
    """Two equal texts are one object or two in the engine, and their pickles differ."""
    name = "".join(["al", "ice"])
    other = "".join(["al", "ice"])
    assert pickle.dumps((name, name), protocol=5) != pickle.dumps((name, other), protocol=5)
    with pytest.raises(UsageError, match="twice"):
        encodings.pickled_item((("lora", "alice", "alice"),))
    with pytest.raises(UsageError, match="cannot be part"):
        encodings.pickled_item(1.5)
    with pytest.raises(UsageError, match="2\\*\\*31"):
        encodings.pickled_tokens(encodings.token_array([1 << 31]))


def test_tokens_of_any_integer_type() -> None:
    for kind in (np.int32, np.uint32, np.int64, np.uint16):
        assert encodings.token_array(np.array([1, 2, 3], kind)).tolist() == [1, 2, 3]
    assert encodings.token_array(()).tolist() == []
    assert encodings.token_array(range(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tokens", [[-1], [1.5], ["a"], [[1, 2]], [1 << 64], 7, None, [None], np.array([1 << 63], "u8")]
)
def test_what_is_no_list_of_tokens(tokens: Any) -> None:
    with pytest.raises(UsageError):
        encodings.token_array(tokens)


def test_messagepack() -> None:
    """By the specification: fixmap, fixstr, str 8, str 16, positive fixint, uint 8 to 32, true and false."""
    assert encodings.packed({"a": 1, "b": True}) == b"\x82\xa1a\x01\xa1b\xc3"
    assert encodings.packed(False) == b"\xc2"
    assert [encodings.packed(each)[0] for each in (127, 128, 256, 65_536)] == [127, 0xCC, 0xCD, 0xCE]
    assert encodings.packed(300) == b"\xcd" + struct.pack(">H", 300)
    assert encodings.packed("x" * 31)[:1] == b"\xbf" and encodings.packed("x" * 32)[:2] == b"\xd9\x20"
    assert encodings.packed("x" * 300)[:3] == b"\xda\x01\x2c"
    for wrong in (-1, 1 << 32, 1.0, None, "x" * 70_000, dict.fromkeys(map(str, range(16)), 1)):
        with pytest.raises(UsageError):
            encodings.packed(wrong)
