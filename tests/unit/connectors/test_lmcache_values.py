"""Values of LMCache's objects: bytes and trailer, whole or damaged, over a fake of LMCache's memory objects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simm.connectors import lmcache_values
from simm.connectors.keyspace import options_of
from simm.connectors.lmcache_values import Arena, Layout, head_of, length_of, reachable, taken_apart
from simm.errors import UsageError
from simm.host.buffers import Span
from simm.testing import FakeClient, FakeStore

FORM = SimpleNamespace(name="KV_2LTD")


class Object:
    """A memory object as LMCache makes it: some bytes with a format, data types and shapes."""

    def __init__(self, memory: Any, shape: tuple[int, ...], dtype: str = "bfloat16", form: Any = FORM) -> None:
        self.byte_array = memoryview(memory)
        self.metadata = SimpleNamespace(dtypes=None, shapes=None)
        self._shape, self._dtype, self._form = shape, f"torch.{dtype}", form

    def get_shape(self) -> tuple[int, ...]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def get_memory_format(self) -> Any:
        return self._form

    def get_size(self) -> int:
        return len(self.byte_array)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    with FakeClient(store=FakeStore()) as made:
        yield made


def filled(shape: tuple[int, ...], **named: Any) -> Object:
    data = bytearray(random.Random(str(shape)).randbytes(int(np.prod(shape)) * 2))
    return Object(data, shape, **named)


def room(shape: tuple[int, ...], **named: Any) -> Object:
    return Object(bytearray(int(np.prod(shape)) * 2), shape, **named)


def test_a_value_is_the_bytes_and_what_they_are(client: FakeClient) -> None:
    obj = filled((2, 3, 4, 5))
    assert client.put_digests([client.digest("k")], [Arena(client, None).source(obj)]) == [0]
    value = client.get("k")
    assert value is not None
    parts = taken_apart(value)
    assert parts is not None
    assert bytes(parts[0]) == bytes(obj.byte_array)
    assert parts[1] == Layout("KV_2LTD", (("bfloat16", (2, 3, 4, 5)),))
    assert b"|bfloat16:2,3,4,5" in value


def test_groups_of_layers_are_all_in_the_layout() -> None:
    layout = Layout.of(FORM, ["torch.bfloat16", "torch.uint8", None], [(2, 3), (4,), (7, 0, 0, 0)])
    assert layout.groups == (("bfloat16", (2, 3)), ("uint8", (4,)), ("none", (7, 0, 0, 0)))
    parts = taken_apart(b"x" + layout.trailer())
    assert parts is not None and parts[1] == layout


OTHERS: dict[str, Object] = {
    "dtype": room((2, 3, 4, 5), dtype="float16"), "order": room((2, 3, 5, 4)),
    "form": room((2, 3, 4, 5), form=SimpleNamespace(name="KV_2TD")),
    "shorter": room((2, 3, 3, 5)), "longer": room((2, 3, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_an_object_of_another_layout_is_not_filled(client: FakeClient, name: str) -> None:
    """Those of as many bytes too, which only the trailer tells."""
    arena, digest = Arena(client, None), client.digest("k")
    client.put_digests([digest], [arena.source(filled((2, 3, 4, 5)))])
    slot = arena.slot(OTHERS[name])
    (got,) = client.get_digests([digest], [slot.sink])
    assert not slot.filled(got) and length_of(got) > 0
    same = room((2, 3, 4, 5))
    slot = arena.slot(same)
    (got,) = client.get_digests([digest], [slot.sink])
    assert slot.filled(got) and same.byte_array == filled((2, 3, 4, 5)).byte_array


def test_mutation_without_the_trailer_another_order_would_be_read(client: FakeClient) -> None:
    """A value has the right length, and only the comparison of the trailers refuses it."""
    arena, digest = Arena(client, None), client.digest("k")
    client.put_digests([digest], [arena.source(filled((2, 3, 4, 5)))])
    slot = arena.slot(room((2, 3, 5, 4)))
    (got,) = client.get_digests([digest], [slot.sink])
    assert got == slot.sink.least and not slot.filled(got)
    assert slot._replace(wanted=bytes(slot.found)).filled(got)


def test_truncated_and_damaged_trailers_are_no_objects() -> None:
    value = bytes(100) + Layout("KV_2LTD", (("bfloat16", (2, 5, 5)),)).trailer()
    whole = taken_apart(value)
    assert whole is not None and len(whole[0]) == 100
    for end in range(len(value)):
        assert taken_apart(value[:end]) is None
    dice = random.Random(7)
    for at in range(100, len(value)):
        for bit in range(8):
            damaged = bytearray(value)
            damaged[at] ^= 1 << bit
            parts = taken_apart(bytes(damaged))  # a letter or a digit may become another one
            assert parts is None or parts[1] != whole[1]
    for _ in range(300):
        taken_apart(dice.randbytes(dice.randrange(200)) + value[-8:])
    assert taken_apart(b"") is None and taken_apart(Layout("KV_2LTD", (("uint8", (1,)),)).trailer()) is None


def test_the_text_of_a_trailer_is_bounded() -> None:
    too_many = Layout("KV_2LTD", tuple(("uint8", (1,)) for _ in range(1025)))
    assert taken_apart(b"x" + too_many.trailer()) is None
    assert taken_apart(b"x" + Layout("KV_2LTD", (("uint8", (10**12,)),)).trailer()) is None
    assert taken_apart(b"x" + Layout("KV", (("uint8", (1,) * 9),)).trailer()) is None


def test_memory_of_the_arena_has_its_registration(client: FakeClient) -> None:
    whole = np.zeros(4096, np.uint8)
    arena = Arena(client, whole)
    inside = arena.memory(Object(whole[64:128], (32,)))
    assert isinstance(inside, Span) and inside.registration is not None and inside.size == 64
    outside = arena.memory(Object(bytearray(64), (32,)))
    assert isinstance(outside, Span) and outside.registration is None
    assert isinstance(arena.memory(Object(b"read-only", (9,))), memoryview)
    arena.close()
    arena.close()
    after = arena.memory(Object(whole[64:128], (32,)))
    assert isinstance(after, Span) and after.registration is None


def test_an_object_without_bytes_is_no_value(client: FakeClient) -> None:
    with pytest.raises(UsageError):
        Arena(client, None).source(Object(bytearray(), (0,)))


def test_options() -> None:
    assert options_of({"namespace": "n", "deadline_ms": "250"}) == {"namespace": "n", "deadline_s": 0.25}
    assert options_of({"namespace": "", "deadline_ms": None, "other": 1}) == {}
    with pytest.raises(RuntimeError, match="deadline_ms is a number, not 'soon'"):
        options_of({"deadline_ms": "soon"})


def test_weights_and_salts_have_keys_of_their_own() -> None:
    assert head_of({}) == head_of({"salt": "", "weight_version": None, "namespace": "n"}) == ""
    given: list[dict[str, Any]] = [
        {"salt": "a"}, {"weight_version": "a"}, {"weight_version": "b"}, {"weight_version": 0},
        {"salt": "a", "weight_version": "b"}, {"salt": "b", "weight_version": "a"},
    ]  # fmt: skip
    heads = [head_of(each) for each in given]
    assert len(set(heads)) == len(given) and all(head.endswith("/") for head in heads)
    assert head_of({"weight_version": 2}) == head_of({"weight_version": "2", "deadline_ms": 3}), "a number, or text"


@pytest.mark.parametrize(("stats", "expected"), [
    ({"manager": "connected", "workers": []}, True), ({"manager": "gone", "workers": [{"path": "tcp"}]}, True),
    ({"manager": "gone", "workers": [{"path": "down"}]}, False), ({}, False),
])  # fmt: skip
def test_healthy_is_a_worker_or_a_manager(stats: dict[str, Any], expected: bool) -> None:
    assert reachable(SimpleNamespace(stats=lambda: stats)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [1, 40])
def test_too_large_is_more_than_a_value_may_have_with_the_trailer(groups: int) -> None:
    obj = room((2, 3))
    obj.metadata = SimpleNamespace(dtypes=["torch.uint8"] * groups, shapes=[(7, 8)] * groups)
    limit = lmcache_values.VALUE_BYTES_MAX - len(Layout.of_object(obj).trailer())
    for size, expected in ((1, False), (limit, False), (limit + 1, True), (lmcache_values.VALUE_BYTES_MAX + 1, True)):
        obj.get_size = lambda size=size: size  # type: ignore[method-assign, misc]
        assert lmcache_values.too_large(obj) is expected
