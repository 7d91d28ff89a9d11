"""What a client promises about parts of values: ranges that are read, pieces that are put."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from simm.constants import LARGE_BYTES_MAX
from simm.errors import UsageError
from simm.host.buffers import Span
from simm.host.company import COMPANY
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
def prepared_ranges_are_read_of_one_value_after_the_other(world: World) -> None:
    """Of all kinds of memory, many of one size and few of any, whoever else works in this process."""
    client = world.client()
    size = 64 << 10
    values = [pattern(40 * size + 7, seed) for seed in (1, 2)]
    assert client.put_many(["a", "b"], values) == [True, True]
    rows = np.zeros((40, size), np.uint8)
    many = [((at * 7 % 40) * size + at % 7, size, row) for at, row in enumerate(rows)]
    odd: list[Any] = [
        bytearray(40_000), np.zeros((3, 100), np.int16), np.zeros(70_000, np.uint8), client.register(bytearray(5)),
        memoryview(bytearray(9))[2:8], np.zeros(1, np.float64),
    ]  # fmt: skip
    mixed = [(11 * at, memoryview(each).nbytes if type(each) is not Span else 5, each) for at, each in enumerate(odd)]
    small = [(at * 3, 3, bytearray(4)) for at in range(30)]
    table = [((at * 7 % 40) * size + 3, size, row) for at, row in enumerate(rows)]
    for ranges in (many, table, mixed, small, many[:2], small[:1]):
        prepared = client.prepare_ranges(iter(ranges))
        held = COMPANY.held_bytes
        for held_bytes in (held, 0, held):
            COMPANY.held_bytes = held_bytes
            try:
                for key, value in zip("ab", values):
                    assert client.get_ranges(key, prepared) == len(value)
                    check_ranges(value, ranges)
            finally:
                COMPANY.held_bytes = held
        assert client.get_ranges("no", prepared) is None
        assert client.get_ranges_many(["no", "a"], [[(0, 1, bytearray(1))], prepared]) == [None, len(values[0])]
        check_ranges(values[0], ranges)
        assert asyncio.run(client.get_ranges_async("b", prepared)) == len(values[1])
        check_ranges(values[1], ranges)
        assert client.prepare_ranges(prepared) is prepared
        with client.pin(["a", "no", "b"]) as pins:
            assert pins.get_ranges("a", prepared) == len(values[0])
            check_ranges(values[0], ranges)
            assert pins.get_ranges_many([2], [prepared]) == [len(values[1])]
            check_ranges(values[1], ranges)
    beyond = client.prepare_ranges([(len(values[0]) - size, size, rows[0]), (0, size, rows[1])])
    assert client.get_ranges("a", beyond) == len(values[0])
    assert client.put("a", values[0][:-1])
    rows[:] = 0xEE
    with pytest.raises(UsageError, match="a range of it ends at byte"):
        client.get_ranges("a", beyond)
    assert (rows == 0xEE).all()


@promise
def arrays_of_ranges_go_to_one_buffer(world: World) -> None:
    """One after the other: rows of a table in the value, and ranges at any place, of any length."""
    client = world.client()
    size = 64 << 10
    value = pattern(40 * size + 7, 3)
    assert client.put("k", value)
    for offsets, lengths in (
        (np.arange(0, 40, 2) * size + 7, size), (np.arange(30) * 1000 + 1, 500), (np.array([9, 5, 70_000]), 3),
        (np.arange(20) * size, np.arange(20) * 3000 + 1), (np.array([5]), np.array([9])),
    ):  # fmt: skip
        each = np.full(len(offsets), lengths) if isinstance(lengths, int) else lengths
        wanted = b"".join(value[at : at + length] for at, length in zip(offsets.tolist(), each.tolist()))
        room = len(wanted) + 3
        for out in (bytearray(room), np.zeros(room, np.uint8), client.register(bytearray(room))):
            held = out.view() if isinstance(out, Span) else memoryview(out)
            ranges = (offsets, lengths, out)
            with client.pin(["k"]) as pins:
                for read in (
                    lambda given: client.get_ranges("k", given),
                    lambda given: client.get_ranges_many(["k"], [given])[0],
                    lambda given: client.get_ranges("k", client.prepare_ranges(given)),
                    lambda given: pins.get_ranges("k", given), lambda given: pins.get_ranges_many([0], [given])[0],
                ):  # fmt: skip
                    held[:] = bytes(len(held))
                    assert read(ranges) == len(value)
                    assert held == wanted + bytes(3)
        assert client.get_ranges("no", ranges) is None
    short = np.full(16, 0xEE, np.uint8)
    with pytest.raises(UsageError, match="a range of it ends at byte"):
        client.get_ranges("k", (np.array([0, len(value) - 7]), 8, short))
    with pytest.raises(UsageError, match="do not fit"):
        client.get_ranges("k", (np.array([0, 8]), 8, short[1:]))
    assert (short == 0xEE).all()


@breaks(arrays_of_ranges_go_to_one_buffer)
class ReadsInOrder(FakeClient):
    def get_ranges(self, key: str, ranges: Any) -> int | None:
        if isinstance(ranges, tuple):
            ranges = (np.sort(ranges[0]), *ranges[1:])
        return super().get_ranges(key, ranges)


def check_ranges(value: bytes, ranges: Iterable[tuple[int, int, Any]]) -> None:
    """Each buffer has its range at its head; it is cleared then."""
    for offset, length, buffer in ranges:
        view = buffer.view() if type(buffer) is Span else memoryview(buffer).cast("B")
        assert view[:length] == value[offset : offset + length]
        view[:length] = bytes(length)


@breaks(prepared_ranges_are_read_of_one_value_after_the_other)
class RemembersTheFirst(FakeClient):
    _first: int | None = None

    def get_ranges(self, key: str, ranges: Any) -> int | None:
        if self._first is None:
            self._first = super().get_ranges(key, ranges)
        return self._first


@promise
def mistakes_in_ranges_are_told_when_they_are_prepared(world: World) -> None:
    client = world.client()
    size = 64 << 10
    assert client.put("k", pattern(20 * size))
    rows = np.zeros((20, size), np.uint8)
    good = [(at * size, size, row) for at, row in enumerate(rows)]
    locked = rows[3].copy()
    locked.flags.writeable = False
    for wrong in (
        (-1, size, rows[3]), (0, size + 1, rows[3]), (0, size, rows[4]), (0, size, locked), (0, 0, rows[3]),
        (0.0, size, rows[3]), (0, float(size), rows[3]), (True, size, rows[3]), (0, size, rows[3, ::2]),
        (0, size, rows[3].tobytes()), (0, size), (0, size, rows[3], 1), (LARGE_BYTES_MAX, size, rows[3]),
        (0, size, rows[3:5, : size // 2]), (0, size, rows.reshape(-1)[3 * size + 1 :][:size]), (0, size, None),
    ):  # fmt: skip
        ranges: list[Any] = [*good[:3], wrong, *good[4:]]
        for call in (client.prepare_ranges, lambda given: client.get_ranges("k", given)):
            with pytest.raises(UsageError):
                call(ranges)
        assert not rows.any()
    one, two = client.prepare_ranges(good[:10]), client.prepare_ranges(good[9:])
    for lists in ([one, two], [one, one], [one, good[9:]]):
        with pytest.raises(UsageError, match="overlap"):
            client.get_ranges_many(["k", "k"], lists)
    assert not rows.any()
    across = [client.prepare_ranges(good[::2]), client.prepare_ranges(good[1::2])]
    assert client.get_ranges_many(["k", "k"], across) == [20 * size] * 2
    assert rows.tobytes() == pattern(20 * size)
    with pytest.raises(UsageError):
        client.prepare_ranges([])


@breaks(mistakes_in_ranges_are_told_when_they_are_prepared)
class PreparesAnything(FakeClient):
    @staticmethod
    def prepare_ranges(ranges: Any) -> Any:
        return ranges


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
