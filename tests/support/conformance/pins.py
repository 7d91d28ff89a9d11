"""What a client promises about pinned values: they stay as they are until they are released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from simm.constants import VALUE_BYTES_MAX
from simm.errors import UsageError
from simm.sdk.ops.pins import Pins
from simm.testing import FakeClient
from tests.support.client_values import JOIN_S, forked, pattern
from tests.support.conformance.world import World, apart, breaks, promise

SIZES = (3, 5000, 700_000)


@promise
def pinned_values_stay_as_they_were(world: World) -> None:
    client, other = world.client(), world.client()
    keys = [f"k{size}" for size in SIZES]
    values = [pattern(size, size) for size in SIZES]
    assert client.put_many(keys, values) == [True] * 3
    with client.pin([keys[0], "no", *keys[1:], keys[0]]) as pins:
        assert pins.lengths == [3, None, 5000, 700_000, 3] and len(pins) == 5
        for turn in range(3):
            if turn == 1:  # whatever happens to the keys
                assert other.put_many(keys[:2], [b"new value"] * 2) == [True] * 2
                assert other.delete(keys[2])
            head, tail, whole = bytearray(3), np.zeros(2, np.uint8), bytearray(b"\xee" * 700_009)
            assert pins.get_ranges(3, [(699_998, 2, tail), (0, 700_000, whole)]) == 700_000
            assert pins.get_ranges(keys[0], [(0, 2, head)]) == 3
            assert (tail.tobytes(), whole) == (values[2][-2:], values[2] + b"\xee" * 9)
            assert head == values[0][:2] + b"\0"
            assert pins.get_ranges("no", [(0, 1, head)]) is None and pins.get_ranges(1, [(0, 1, head)]) is None
            one, two, three = bytearray(1), bytearray(2), bytearray(3)
            got = pins.get_ranges_many(
                [2, "no", keys[0], 2], [[(7, 1, one)], [(0, 1, head)], [(0, 3, three)], [(1, 2, two)]]
            )
            assert got == [5000, None, 3, 5000]
            assert (one, two, three) == (values[1][7:8], values[1][1:3], values[0])
        assert client.get(keys[0]) == b"new value" and client.get(keys[2]) is None
    assert client.pin([]).lengths == []
    assert world.client(namespace="elsewhere").pin(keys).lengths == [None] * 3


@breaks(pinned_values_stay_as_they_were)
class PinsKeys(FakeClient):
    """It reads what is stored under the keys by then."""

    def pin(self, keys: Sequence[str]) -> Pins:
        pins = super().pin(keys)

        def get_ranges(key: int | str, ranges: Any) -> int | None:
            return self.get_ranges(key if isinstance(key, str) else keys[key], ranges)

        pins.get_ranges = get_ranges  # type: ignore[method-assign]
        return pins


@promise
def a_layer_of_all_pinned_values_is_one_call(world: World) -> None:
    client = world.client()
    pages, layers = 40, 4
    for layer in (64, 100, 40_000):
        keys = [f"page {layer} {number}" for number in range(pages)]
        values = [pattern(layers * layer, number) for number in range(pages)]
        assert all(client.put_many(keys[1:], values[1:]))
        with client.pin(keys) as pins:
            for at in range(layers):
                rows = np.zeros((pages, layer + 5), np.uint8)  # with a gap behind each row
                wanted = [None] + [layers * layer] * (pages - 1)
                assert pins.read([(at * layer, layer, rows)]) == wanted
                for number in range(1, pages):
                    assert rows[number, :layer].tobytes() == values[number][at * layer : (at + 1) * layer]
                assert not rows[0].any() and not rows[:, layer:].any()
                if at == 0:
                    continue
                with client.pin(keys[:0:-1]) as others:  # all are there, and the rows have no gap: one copy may do
                    rows = np.full((pages + 1, layer), 7, np.uint8)
                    assert others.read([(at * layer - 1, layer, rows[1:-1])]) == [layers * layer] * (pages - 1)
                    wanted_rows = [value[at * layer - 1 :][:layer] for value in values[:0:-1]]
                    assert [row.tobytes() for row in rows[1:-1]] == wanted_rows
                    assert (rows[[0, -1]] == 7).all()
                keys_of, values_of = [bytearray(8) for _ in keys], np.zeros((pages, 3), np.int16)[::-1]
                assert asyncio.run(pins.read_async([(at, 8, keys_of), (at + 9, 5, values_of)])) == wanted
                for number in range(1, pages):
                    assert keys_of[number] == values[number][at : at + 8]
                    assert values_of[number].tobytes() == values[number][at + 9 : at + 14] + b"\0"


@breaks(a_layer_of_all_pinned_values_is_one_call)
class LeavesOutTheLastPage(FakeClient):
    def pin(self, keys: Sequence[str]) -> Pins:
        pins = super().pin(keys)
        if len(keys) > 1:
            pins._holders[-1] = None
        return pins


@promise
def asyncio_reads_pinned_values(world: World) -> None:
    client = world.client()
    assert client.put_many(["a", "b"], [b"one", b"three"])

    async def read() -> list[Any]:
        one, two, many = bytearray(2), bytearray(2), [bytearray(1), bytearray(1)]
        with await client.pin_async(["a", "b"]) as pins:
            got = await asyncio.gather(
                pins.get_ranges_async("a", [(1, 2, one)]), pins.get_ranges_async(1, [(3, 2, two)]),
                pins.get_ranges_many_async([0, 1], [[(0, 1, many[0])], [(0, 1, many[1])]]),
            )  # fmt: skip
        return [*got, one, two, *many]

    assert asyncio.run(read()) == [3, 5, [3, 5], b"ne", b"ee", b"o", b"t"]


@breaks(asyncio_reads_pinned_values)
class NoPinsInTasks(FakeClient):
    async def pin_async(self, keys: Sequence[str]) -> Pins:  # type: ignore[override]
        pins = self.pin(keys)
        pins._holders = [None] * len(keys)
        return pins


@promise
def wrong_reads_of_pinned_values_are_usage_errors(world: World) -> None:
    client = world.client()
    assert client.put_many(["k", "l"], [b"0123456789", b"01234"])
    buffer, other = bytearray(b"\xee" * 20), bytearray(b"\xee" * 20)
    rows = np.full((2, 8), 0xEE, np.uint8)
    locked = np.zeros((2, 8), np.uint8)
    locked.flags.writeable = False
    pins = client.pin(["k", "l", "no"])
    pair = client.pin(["k", "l"])
    bad: list[Any] = [
        [], [(0, 0, buffer)], [(-1, 2, buffer)], [(0, 21, buffer)], [(0, 1, b"x")], [(0, 1)],
        [(VALUE_BYTES_MAX, 1, buffer)],
        [(0, 2, buffer), (5, 2, buffer)], [(0.5, 1, buffer)], [(8, 3, buffer)], [(0, 1, other), (8, 3, buffer)],
    ]  # fmt: skip
    for ranges in bad:
        with pytest.raises(UsageError):
            pins.get_ranges("k", ranges)
        with pytest.raises(UsageError):
            pins.get_ranges_many(["k", 0], [[(0, 1, other)], ranges])
    for key in (3, -1, 0.5, "m", None, True):
        with pytest.raises(UsageError):
            pins.get_ranges(key, [(0, 1, buffer)])  # type: ignore[arg-type]
    for layers in (
        [], [(0, 1, rows[:1])], [(0, 9, rows)], [(0, 1, locked)], [(4, 2, rows)], [(0, 1, [buffer])],
        [(0, 1, [buffer, buffer])],
        [(0, 2, rows), (2, 2, rows)], [(0, 1, [buffer, b"x"])], [(0, 1, buffer)], [(0, 0, rows)], [(0, 1, 5)],
        [(0, 1, np.broadcast_to(np.zeros(8, np.uint8), (2, 8)))], [(0, 1, np.zeros((2, 2), object))],
        [(0, 2, rows), (2, 2, [buffer, rows[1]])],
    ):  # fmt: skip
        with pytest.raises(UsageError):
            pair.read(layers)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        pins.get_ranges_many(["k"], [])
    with pytest.raises(UsageError, match="'l' has 5 bytes, and a range of it ends at byte 6"):
        pair.read([(0, 1, [buffer, other]), (4, 2, rows)])
    with pytest.raises(UsageError, match="'k' has 10 bytes, and a range of it ends at byte 11"):
        pins.get_ranges_many([1, 0], [[(0, 1, other)], [(8, 3, buffer)]])
    assert (buffer, other) == (b"\xee" * 20, b"\xee" * 20) and (rows == 0xEE).all()
    for wrong in ("", "x" * 300, 5):
        with pytest.raises(UsageError):
            client.pin(["k", wrong])  # type: ignore[list-item]
    pins.release()
    pins.release()
    with pair, pytest.raises(UsageError, match="released"):
        pins.get_ranges("k", [(0, 1, buffer)])
    with pytest.raises(UsageError, match="released"):
        pair.read([(0, 1, rows)])
    assert "released" in repr(pair)
    assert client.get("k") == b"0123456789"


@breaks(wrong_reads_of_pinned_values_are_usage_errors)
class ReadsReleasedValues(FakeClient):
    def pin(self, keys: Sequence[str]) -> Pins:
        pins = super().pin(keys)
        pins.release = lambda: None  # type: ignore[method-assign]
        return pins


@promise
def pins_end_with_their_client_and_are_not_inherited(world: World) -> None:
    client = world.client()
    assert client.put("k", b"value")
    pins, buffer = client.pin(["k"]), bytearray(5)
    calls: list[Callable[[], Any]] = [
        lambda: pins.get_ranges(0, [(0, 1, buffer)]), lambda: pins.read([(0, 1, [buffer])]),
        lambda: pins.get_ranges_many([0], [[(0, 1, buffer)]]),
    ]  # fmt: skip

    def in_child() -> bool:
        for call in calls:
            with pytest.raises(UsageError, match="before the fork"):
                call()
        pins.release()
        with client.pin(["k"]) as mine:
            return mine.get_ranges("k", [(0, 5, buffer)]) == 5 and buffer == b"value"

    assert forked(in_child) == 0
    assert pins.get_ranges(0, [(0, 5, buffer)]) == 5 and buffer == b"value"
    client.close()
    for call in (*calls, lambda: client.pin(["k"])):
        with pytest.raises(UsageError, match=r"closed|released"):
            call()
    pins.release()


@breaks(pins_end_with_their_client_and_are_not_inherited)
class PinsOutliveTheClient(FakeClient):
    def close(self) -> None:
        pass


@promise
def threads_read_pinned_values_while_they_are_released(world: World) -> None:
    client = world.client()
    values = [pattern(300_000, seed) for seed in range(8)]
    keys = [f"k{number}" for number in range(8)]
    assert all(client.put_many(keys, values))
    pins = client.pin(keys)
    begun = threading.Semaphore(0)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rows = np.zeros((8, 1000), np.uint8)
        try:
            for turn in range(10_000):
                if turn == 1:
                    begun.release()
                at = (turn * 7919 + seed) % 299_000
                assert None not in pins.read([(at, 1000, rows)])
                wrong.extend(number for number in range(8) if rows[number].tobytes() != values[number][at : at + 1000])
        except UsageError as exc:
            assert "released" in str(exc)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=JOIN_S), "it has read all values"
    assert pins.get_ranges(0, [(0, 5, bytearray(5))]) == 300_000
    pins.release()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    assert not wrong


@breaks(threads_read_pinned_values_while_they_are_released)
class MixesThreads(FakeClient):
    def pin(self, keys: Sequence[str]) -> Pins:
        return super().pin(list(reversed(keys)))


@apart
def what_is_pinned_is_not_evicted(world: World) -> None:
    client = world.client()
    size = 1 << 20
    keys = [f"kept {number}" for number in range(8)]
    values = [pattern(size, number) for number in range(8)]
    assert all(client.put_many(keys, values))
    with client.pin(keys) as pins:
        for number in range(200):  # three times the memory
            client.put(f"scan {number}", pattern(size, 1000 + number))
        assert sum(client.exists_many([f"scan {number}" for number in range(200)])) < 100
        rows = np.zeros((8, size), np.uint8)
        assert pins.read([(0, size, rows)]) == [size] * 8
        assert [row.tobytes() for row in rows] == values


@breaks(what_is_pinned_is_not_evicted)
class ForgetsWhatItPins(FakeClient):
    def pin(self, keys: Sequence[str]) -> Pins:
        pins = super().pin(keys)
        pins._holders = [None] * len(keys)
        return pins


@apart
def reads_of_pinned_values_miss_without_servers_and_hang_nowhere(world: World) -> None:
    client = world.client()
    value = pattern(100_000)
    assert client.put("k", value)
    pins = client.pin(["k", "no"])
    world.down()
    rows = np.zeros((2, 100_000), np.uint8)
    for _ in range(3):
        got = pins.read([(0, 100_000, rows)])
        assert got in ([100_000, None], [None, None])
        assert got[0] is None or rows[0].tobytes() == value
    world.up()
    pins.release()


@breaks(reads_of_pinned_values_miss_without_servers_and_hang_nowhere)
class HitsWithoutReading(FakeClient):
    def pin(self, keys: Sequence[str]) -> Pins:
        pins = super().pin(keys)
        pins.read = lambda ranges: list(pins.lengths)  # type: ignore[method-assign]
        return pins
