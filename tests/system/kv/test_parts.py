"""Ranges and pieces of values by ``simm.kv`` on a real server: codes, views, MRs, asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from simm.constants import LARGE_BYTES_MAX
from simm.errors import Code
from simm.kv import Block, BlockView, Store, register_mr
from tests.support.kv_values import content, filled

VALUE = bytes(range(250)) * 300


def view_of(size: int) -> BlockView:
    return Block(size).view()


@pytest.mark.quick
def test_layers_of_a_page_by_rank(store: Store) -> None:
    """A page is put out of two pools, and each rank reads its half of each layer, into registered memory."""
    pool = np.frombuffer(VALUE, np.uint8).copy()
    mr = register_mr(pool)
    half = len(VALUE) // 2
    address = pool.__array_interface__["data"][0]
    views = [BlockView.from_buffer(address, half, mr), BlockView.from_buffer(address + half, half, mr)]
    assert store.put_gather("page", views) == 0
    assert store.mput_gather(["a", "b"], [views[:1], [filled(b"xy"), filled(b"z")]]) == [0, 0]
    room = np.zeros(2000, np.uint8)
    rooms = register_mr(room)
    start = room.__array_interface__["data"][0]
    ranges = [(0, 1000, BlockView.from_buffer(start, 1000, rooms)), (half, 500, BlockView.from_tensor(room[1500:]))]
    assert store.get_ranges("page", ranges) == len(VALUE)
    assert room.tobytes() == VALUE[:1000] + bytes(500) + VALUE[half : half + 500]
    one, two, three = view_of(3), view_of(3), view_of(1)
    assert store.mget_ranges(["b", "no", "a"], [[(0, 3, one)], [(0, 1, view_of(1))], [(1, 2, two), (0, 1, three)]]) == [
        3, Code.GET_FAILED, half
    ]  # fmt: skip
    assert [content(each) for each in (one, two, three)] == [b"xyz", VALUE[1:3] + b"\0", VALUE[:1]]


def test_arrays_of_ranges(store: Store) -> None:
    """They go to one view, one after the other."""
    assert store.put("a", filled(bytes(range(20)))) == 0
    view, offsets = view_of(6), np.array([15, 0, 4])
    for ranges in ((offsets, 2, view), (offsets, np.array([2, 2, 2]), view), store.prepare_ranges((offsets, 2, view))):
        assert store.get_ranges("a", ranges) == 20
        assert content(view) == bytes([15, 16, 0, 1, 4, 5])
    with store.mpin(["a"]) as pins:
        assert pins.get_ranges("a", (offsets - 0, np.array([1, 3, 2]), view)) == 20
    assert content(view) == bytes([15, 0, 1, 2, 4, 5])
    for wrong in ((offsets, 3, view), (offsets - 1, 2, view), (offsets, 2, bytearray(6)), (offsets, 0, view)):
        assert store.get_ranges("a", wrong) == Code.INVALID_ARGUMENT
    assert store.get_ranges("a", (offsets + 4, 2, view)) == Code.GET_FAILED


def test_prepared_ranges(store: Store) -> None:
    """They are read of one value after the other. A mistake is told by each call that meets it, and spoils no other."""
    views = [view_of(4) for _ in range(3)]
    assert store.mput(["a", "b"], [filled(bytes(range(20))), filled(bytes(range(20, 40)))]) == [0, 0]
    ranges = store.prepare_ranges([(at * 5, 4, view) for at, view in enumerate(views)])
    for key, first in (("a", 0), ("b", 20), ("a", 0)):
        assert store.get_ranges(key, ranges) == 20
        assert [content(each) for each in views] == [bytes(range(first + at, first + at + 4)) for at in (0, 5, 10)]
    other = view_of(2)
    assert store.mget_ranges(["a", "a"], [ranges, ranges]) == [20, Code.INVALID_ARGUMENT]  # the same memory
    assert store.mget_ranges(["a", "b"], [[(0, 2, other)], ranges]) == [20, 20]
    assert store.mget_ranges(["b", "a"], [[(0, 2, views[1])], ranges]) == [20, Code.INVALID_ARGUMENT]
    assert asyncio.run(store.get_ranges_async("no", ranges)) == Code.GET_FAILED
    beyond = store.prepare_ranges([(15, 6, view_of(6))])
    assert store.get_ranges("a", beyond) == Code.GET_FAILED
    for wrong in ([], [(0, 5, views[0])], [(0, 1, views[0]), (1, 1, views[0])], [(0, 1)], None, [(-1, 2, views[0])]):
        refused = store.prepare_ranges(wrong)
        assert store.mget_ranges(["a", "b"], [refused, ranges]) == [Code.INVALID_ARGUMENT, 20]
    with store.mpin(["a", "b"]) as pins:
        assert [pins.get_ranges(key, ranges) for key in ("b", "a")] == [20, 20]
        assert pins.mget_ranges(["b", "a"], [ranges, store.prepare_ranges([(0, 2, other)])]) == [20, 20]
    assert content(views[0]) == bytes(range(20, 24)) and content(other) == b"\0\1"


def test_the_asyncio_forms(store: Store) -> None:
    async def run() -> Any:
        room = view_of(2)
        return (
            await store.put_gather_async("k", [filled(b"ab"), filled(b"cd")]),
            await store.mput_gather_async(["l"], [[filled(b"e")]]),
            await store.get_ranges_async("k", [(1, 2, room)]),
            await store.mget_ranges_async(["l", "no"], [[(0, 1, view_of(1))]] * 1 + [[(0, 1, view_of(1))]]),
            content(room),
        )

    assert asyncio.run(run()) == (0, [0], 4, [1, Code.GET_FAILED], b"bc")


def test_only_the_offending_key_fails(store: Store) -> None:
    """No byte of its views is written, and the others are as if it had not been there."""
    assert store.mput(["k", "l"], [filled(b"0123456789"), filled(b"abc")]) == [0, 0]
    shared, room = view_of(10), view_of(10)
    read_only = BlockView.from_tensor(np.frombuffer(b"x", np.uint8))
    nowhere = BlockView.from_buffer(0, 5)
    bad: list[Any] = [
        [], [(0, 0, room)], [(-1, 1, room)], [(0, 11, room)], [(0, 1, read_only)], [(0, 1, nowhere)], [(0, 1)], 5, None,
        [(0, 1, bytearray(1))], [(LARGE_BYTES_MAX, 1, room)], [(0, 2, room), (1, 2, room)], room,
    ]  # fmt: skip
    for ranges in bad:
        good = view_of(2)
        before = store.rejected
        got = store.mget_ranges(["l", "k", "k"], [[(1, 2, good)], ranges, [(0, 5, shared)]])
        assert got == [3, Code.INVALID_ARGUMENT, 10], ranges
        assert store.rejected == before + 1
        assert content(good) == b"bc"
        assert store.get_ranges("k", ranges) == Code.INVALID_ARGUMENT
    assert store.mget_ranges(["k", "", "l"], [[(0, 1, view_of(1))]] * 1 + [[(0, 1, view_of(1))] for _ in range(2)]) == [
        10, Code.INVALID_ARGUMENT, 3
    ]  # fmt: skip
    assert not any(content(room))
    assert store.mget_ranges(["k", "l"], [[(0, 3, shared)], [(0, 3, shared)]]) == [10, Code.INVALID_ARGUMENT]
    assert content(shared)[:3] == b"012"
    assert store.mget_ranges(["k"], []) == [Code.INVALID_ARGUMENT]
    for pieces in ([], [nowhere], [b"x"], 5, None, room):
        assert store.mput_gather(["k", "m"], [pieces, [filled(b"m")]]) == [Code.INVALID_ARGUMENT, 0]  # type: ignore[list-item]
    assert store.get("k", view_of(10)) == 10


def test_a_range_beyond_the_value(store: Store) -> None:
    """A failed get like any other; the value stays, although the view has an MR."""
    assert store.put("k", filled(b"0123456789")) == 0
    room = np.zeros(10, np.uint8)
    view = BlockView.from_tensor(room, register_mr(room))
    assert store.get_ranges("k", [(1, 10, view)]) == Code.GET_FAILED
    assert not room.any()
    assert store.get_ranges("k", [(0, 5, view)]) == 10, "it takes a part of the view too"
    assert store.exists("k") and store.unfit == 0


def test_the_expected_time_of_a_load(store: Store) -> None:
    assert store.mput(["k", "l"], [filled(bytes(1000))] * 2) == [0, 0]
    assert store.load_ms([]) == store.load_ms(["no"]) == 0.0
    assert 0.0 < store.load_ms(["k"]) < store.load_ms(["k", "l", "no"])
    before = store.rejected
    assert store.load_ms(["k", ""]) > 0.0 and store.rejected == before + 1
    assert asyncio.run(store.load_ms_async(["k"])) > 0.0
    store.close()
    assert store.load_ms(["k"]) == Code.INVALID_ARGUMENT


def test_a_prefix(store: Store) -> None:
    keys = [f"p{number}" for number in range(20)]
    assert store.mput(keys, [filled(bytes(1000))] * 20) == [0] * 20
    assert store.prefix(keys) == store.prefix([*keys, "no"]) == 20 and type(store.prefix(keys)) is int
    assert store.delete("p7") == 0 and store.prefix(keys) == 7 and store.prefix(keys, 2) == 6
    assert asyncio.run(store.prefix_async(keys)) == 7
    before = store.rejected
    assert store.prefix(["", "p1"]) == store.prefix(keys, 0) == store.prefix("p1") == 0 and store.rejected > before
    store.close()
    assert store.prefix(keys) == 0


def test_a_closed_store(store: Store) -> None:
    store.close()
    assert store.get_ranges("k", [(0, 1, view_of(1))]) == Code.INVALID_ARGUMENT
    assert store.put_gather("k", [filled(b"x")]) == Code.INVALID_ARGUMENT
