"""What a client promises about parts of values: ranges that are read, pieces that are put."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from simm.constants import LARGE_BYTES_MAX
from simm.errors import UsageError
from simm.testing import FakeClient
from tests.support.client_values import pattern
from tests.support.conformance.world import World, breaks, promise


@promise
def ranges_of_a_value_come_back(world: World) -> None:
    client = world.client()
    for size in (3, 5000, 700_000):
        value = pattern(size, size)
        assert client.put("k", value)
        head, tail, whole = bytearray(3), np.zeros(1, np.uint8), bytearray(b"\xee" * (size + 9))
        ranges = [(size - 1, 1, tail), (0, 2, head), (0, size, whole)]
        assert client.get_ranges("k", ranges) == size
        assert (head, tail.tobytes(), whole) == (value[:2] + b"\0", value[-1:], value + b"\xee" * 9)
        one, two = bytearray(1), bytearray(2)
        assert client.get_ranges_many(["k", "no", "k"], [[(1, 1, one)], [(0, 1, head)], [(0, 2, two)]]) == [
            size, None, size
        ]  # fmt: skip
        assert (one, two) == (value[1:2], value[:2])
        assert asyncio.run(client.get_ranges_async("k", [(size - 2, 2, two)])) == size
        assert asyncio.run(client.get_ranges_many_async(["k"], [[(2, 1, one)]])) == [size]
        assert (one, two) == (value[2:3], value[-2:])
    assert client.get_ranges("no", [(0, 1, bytearray(1))]) is None
    assert client.get_ranges_many([], []) == []


@breaks(ranges_of_a_value_come_back)
class ReadsTheHead(FakeClient):
    def get_ranges(self, key: str, ranges: Iterable[tuple[int, int, Any]]) -> int | None:
        return super().get_ranges(key, [(0, length, buffer) for _, length, buffer in ranges])


@promise
def pieces_make_a_value(world: World) -> None:
    client = world.client()
    held = bytearray(b"later")
    pieces: list[Any] = [b"one", np.arange(3, dtype=np.int16), held, client.register(bytearray(pattern(70_000)))]
    wanted = b"one\0\0\1\0\2\0later" + pattern(70_000)
    assert client.put_gather("k", pieces) is True
    held[:] = b"other"
    assert client.get("k") == wanted
    assert client.put_gather_many(["a", "b", "a"], [[b"x"], [b"y", b"z"], [b"1", b"2"]]) == [True] * 3
    assert client.get_many(["a", "b"]) == [b"12", b"yz"]
    assert asyncio.run(client.put_gather_async("k", (b"u", b"v"))) is True
    assert asyncio.run(client.put_gather_many_async(["l"], [[b"w"]])) == [True]
    assert client.get_many(["k", "l"]) == [b"uv", b"w"]
    assert client.put_gather_many([], []) == []


@breaks(pieces_make_a_value)
class FirstPieceOnly(FakeClient):
    def put_gather(self, key: str, pieces: Iterable[Any]) -> bool:
        return super().put_gather(key, list(pieces)[:1])


@promise
def wrong_parts_are_usage_errors_and_change_nothing(world: World) -> None:
    client = world.client()
    assert client.put("k", b"0123456789")
    before = client.stats()
    buffer, other = bytearray(b"\xee" * 20), bytearray(b"\xee" * 20)
    bad: list[list[Any]] = [
        [], [(0, 0, buffer)], [(-1, 2, buffer)], [(0, 21, buffer)], [(0, 1, b"x")], [(0, 1, "x")], [(0, 1)],
        [(LARGE_BYTES_MAX, 1, buffer)], [(0, 2, buffer), (5, 2, buffer)], [(0.5, 1, buffer)],
        [(0, 1, other), (3, 1, None)],
    ]  # fmt: skip
    for ranges in bad:
        calls: list[Callable[[], Any]] = [
            lambda: client.get_ranges("k", ranges), lambda: client.get_ranges("no", ranges),  # noqa: B023
            lambda: client.get_ranges_many(["k", "k"], [[(0, 1, other)], ranges]),  # noqa: B023
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(UsageError):
                call()
    for pieces in ([], [b""], [b"x", 5], [b"x", None], b"x", 5):
        with pytest.raises(UsageError):
            client.put_gather("k", pieces)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            client.put_gather_many(["l", "k"], [[b"good"], pieces])  # type: ignore[list-item]
    for lists in ([], [[(0, 1, buffer)]] * 2):
        with pytest.raises(UsageError):
            client.get_ranges_many(["k"], lists)
        with pytest.raises(UsageError):
            client.put_gather_many(["k"], lists)
    assert client.stats() == before
    for count in (1, 20):
        with pytest.raises(UsageError, match="has 10 bytes, and a range of it ends at byte 11"):
            client.get_ranges("k", [(0, 5, other), (10, 1, buffer)])
        with pytest.raises(UsageError, match="has 10 bytes"):
            client.get_ranges_many(["k"] * count, [[(9, 2, memoryview(bytearray(2)))] for _ in range(count)])
    assert (buffer, other) == (b"\xee" * 20, b"\xee" * 20)
    assert client.get("k") == b"0123456789" and not client.exists("l")


@breaks(wrong_parts_are_usage_errors_and_change_nothing)
class ReadsWhatIsThere(FakeClient):
    def get_ranges(self, key: str, ranges: Iterable[tuple[int, int, Any]]) -> int | None:
        value = self.get(key) or b""
        return super().get_ranges(key, [each for each in ranges if sum(each[:2]) <= len(value)])
