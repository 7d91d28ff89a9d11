"""Pinned values by ``simm.kv`` on a real server: codes, views, MRs, asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from simm.errors import Code
from simm.kv import Block, BlockView, Store, register_mr
from simm.sdk.calls.kv_pins import PinnedKeys
from tests.support.kv_values import content, filled

PAGES, LAYERS, LAYER = 20, 3, 1000
KEYS = [f"page {number}" for number in range(PAGES)]


def page(number: int) -> bytes:
    return bytes((number * 7 + layer) % 256 for layer in range(LAYERS) for _ in range(LAYER))


def view_of(size: int) -> BlockView:
    return Block(size).view()


@pytest.fixture
def pinned(store: Store) -> Any:
    assert store.mput(KEYS, [filled(page(number)) for number in range(PAGES)]) == [0] * PAGES
    with store.mpin([*KEYS, "no"]) as pins:
        yield pins


@pytest.mark.quick
def test_layer_by_layer_into_registered_memory(store: Store, pinned: PinnedKeys) -> None:
    lengths = [LAYERS * LAYER] * PAGES + [Code.GET_FAILED]
    assert pinned.lengths == lengths and len(pinned) == PAGES + 1
    assert store.mput(KEYS[:5], [filled(b"new")] * 5) == [0] * 5  # pinned values stay as they were
    assert store.delete(KEYS[6]) == 0
    pool = np.zeros((PAGES + 1, LAYER), np.uint8)
    mr = register_mr(pool)
    start = pool.__array_interface__["data"][0]
    for layer in range(LAYERS):
        views = [BlockView.from_buffer(start + at * LAYER, LAYER, mr) for at in range(PAGES + 1)]
        got = pinned.read([(layer * LAYER, LAYER, views)])
        assert got == lengths and all(type(each) is int for each in got)
        for number in range(PAGES):
            assert pool[number].tobytes() == page(number)[layer * LAYER : (layer + 1) * LAYER]
        assert not pool[-1].any()
    one, two = view_of(3), view_of(2)
    assert pinned.get_ranges(KEYS[2], [(LAYER - 1, 2, one)]) == LAYERS * LAYER
    assert pinned.mget_ranges([3, "no", 20], [[(0, 2, two)], [(0, 1, view_of(1))], [(0, 1, view_of(1))]]) == [
        LAYERS * LAYER, Code.GET_FAILED, Code.GET_FAILED
    ]  # fmt: skip
    assert content(one) == page(2)[LAYER - 1 : LAYER + 1] + b"\0" and content(two) == page(3)[:2]
    assert store.get(KEYS[0], view_of(3)) == 3


def test_the_asyncio_forms(store: Store) -> None:
    assert store.mput(["a", "b"], [filled(b"one"), filled(b"three")]) == [0, 0]

    async def run() -> Any:
        one, two, rows = view_of(2), view_of(2), [view_of(1), view_of(1)]
        with await store.mpin_async(["a", "b"]) as pins:
            return (
                await pins.get_ranges_async("a", [(1, 2, one)]), await pins.mget_ranges_async([1], [[(3, 2, two)]]),
                await pins.read_async([(0, 1, rows)]), *map(content, (one, two, *rows)),
            )  # fmt: skip

    assert asyncio.run(run()) == (3, [5], [3, 5], b"ne", b"ee", b"o", b"t")


def test_only_the_offending_key_fails(store: Store, pinned: PinnedKeys) -> None:
    good, length = int(Code.INVALID_ARGUMENT), LAYERS * LAYER
    bad = store.mpin([KEYS[0], "", KEYS[1], 5, "x" * 300])  # type: ignore[list-item]
    with bad:
        assert bad.lengths == [length, good, length, good, good]
        views = [view_of(2) for _ in range(5)]
        assert bad.read([(LAYER, 2, views)]) == [length, good, length, good, good]
        assert content(views[2]) == page(1)[LAYER : LAYER + 2]
        assert bad.get_ranges(1, [(0, 1, view_of(1))]) == good
    views = [view_of(4) for _ in range(PAGES + 1)]
    views[3] = BlockView.from_buffer(0, 4)
    views[4] = None  # type: ignore[call-overload]
    views[5] = view_of(1)
    views[8] = views[7]
    got = pinned.read([(0, 2, views)])
    assert [at for at, each in enumerate(got) if each == good] == [3, 4, 5, 8] and got[PAGES] == Code.GET_FAILED
    assert content(views[6])[:2] == page(6)[:2]
    assert pinned.read([(length - 1, 2, views)])[:3] == [Code.GET_FAILED] * 3
    everything: Any
    for everything in ([], [(0, 1, views[:3])], [(0, 1)], 5, [5], [(0, 1, 5)]):
        assert pinned.read(everything) == [good] * (PAGES + 1)
    for key in ("other", 21, -1, None, 0.5):
        assert pinned.get_ranges(key, [(0, 1, view_of(1))]) == good  # type: ignore[arg-type]
    assert pinned.mget_ranges([0, 1], [[(0, 1, view_of(1))]]) == [good] * 2
    assert pinned.mget_ranges([0, 1], [[], [(0, 1, view_of(1))]]) == [good, length]
    assert pinned.mget_ranges([], []) == []


def test_released_and_closed(store: Store, pinned: PinnedKeys) -> None:
    bad = [int(Code.INVALID_ARGUMENT)]
    with store.mpin(KEYS[:1]) as pins:
        assert pins.get_ranges(0, [(0, 1, view_of(1))]) > 0
    assert pins.read([(0, 1, [view_of(1)])]) == bad and pins.mget_ranges([0], [[(0, 1, view_of(1))]]) == bad
    pins.release()
    with Store() as other:
        later = other.mpin(KEYS[:1])
    assert later.lengths == [LAYERS * LAYER]
    assert other.mpin(KEYS[:1]).lengths == bad
    assert asyncio.run(other.mpin_async(["k"])).read([(0, 1, [view_of(1)])]) == bad
    later.release()
    assert store.mpin([]).lengths == [] and "released" in repr(pins)
