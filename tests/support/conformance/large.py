"""What a client promises about values that are stored in parts. The limit is lowered; tests/system has a large one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from simm.client import NoValue
from simm.errors import UsageError
from simm.testing import FakeClient
from tests.support.client_values import pattern
from tests.support.conformance.world import World, breaks, promise
from tests.support.small_limits import MOST, PART, small_limits

#: A byte more than an ordinary value, whole parts, and a last part of a byte.
SIZES = (MOST + 1, 4 * PART, 9 * PART + 1)


@promise
def large_values_come_back(world: World) -> None:
    client = world.client()
    with small_limits():
        for size in SIZES:
            value = pattern(size, size)
            assert client.put("k", value) is True
            assert client.exists("k") is True
            assert client.get("k") == value
            for room in (bytearray(size), bytearray(b"\xee" * (size + 5)), np.zeros(size, np.uint8)):
                assert client.get_into("k", room) == size
                assert bytes(room)[:size] == value
            span = client.register(bytearray(size))
            assert client.get_into("k", span) == size and bytes(span.view()) == value
            with client.view("k") as view:
                assert bytes(view.data) == value
            assert asyncio.run(client.get_async("k")) == value
        small = pattern(MOST)
        assert client.put_many(["a", "b", "c", "b"], [value, small, b"c", value]) == [True] * 4
        assert client.get_many(["a", "b", "no", "c"]) == [value, value, None, b"c"]
        rooms = [bytearray(len(value)), bytearray(len(value)), bytearray(9), bytearray(1)]
        assert client.get_into_many(["a", "b", "no", "c"], rooms) == [len(value), len(value), None, 1]
        assert rooms == [value, value, bytes(9), b"c"]
        assert client.load_ms(["a"]) > 0
    assert client.get("a") == value, "whatever this client's limit is"


@breaks(large_values_come_back)
class ForgetsTheLastPart(FakeClient):
    def get(self, key: str) -> bytes | None:
        got = super().get(key)
        return got[: len(got) // PART * PART] if got is not None and len(got) > MOST else got


@promise
def ranges_and_pieces_of_large_values(world: World) -> None:
    client = world.client()
    size = 9 * PART + 7
    value = pattern(size, 3)
    with small_limits():
        pieces: list[Any] = [value[:10], np.frombuffer(value[10:1500], np.uint8), bytearray(value[1500:])]
        assert client.put_gather("k", pieces) is True
        assert client.put_gather_many(["l", "m"], [pieces, [b"x", b"y"]]) == [True, True]
        assert client.get_many(["k", "l", "m"]) == [value, value, b"xy"]
        for ranges in (
            [(0, 1)], [(size - 1, 1)], [(PART - 1, 2)], [(PART, PART)], [(5, 3 * PART)], [(0, size)],
            [(size - 9, 9), (0, 9), (PART - 4, 2 * PART), (PART - 4, 8)],
        ):  # fmt: skip
            rooms = [bytearray(b"\xee" * (length + 1)) for _, length in ranges]
            wanted = [(offset, length, room) for (offset, length), room in zip(ranges, rooms)]
            assert client.get_ranges("k", wanted) == size
            assert rooms == [value[offset : offset + length] + b"\xee" for offset, length in ranges]
        one, two = bytearray(2), bytearray(1)
        assert client.get_ranges_many(["k", "no", "m"], [[(2000, 2, one)], [(1, 1, bytearray(1))], [(1, 1, two)]]) == [
            size, None, 2
        ]  # fmt: skip
        assert (one, two) == (value[2000:2002], b"y")
        assert client.get_ranges("no", [(2000, 2, one)]) is None


@breaks(ranges_and_pieces_of_large_values)
class ReadsFromTheWrongPart(FakeClient):
    def get_ranges(self, key: str, ranges: Iterable[tuple[int, int, Any]]) -> int | None:
        return super().get_ranges(key, [(offset % PART, length, buffer) for offset, length, buffer in ranges])


@promise
def large_values_are_replaced_and_deleted_with_their_parts(world: World) -> None:
    client = world.client()
    with small_limits():
        for size in (*SIZES, 8):
            assert client.put("k", pattern(size, size))
            assert client.get("k") == pattern(size, size)
        assert client.put("k", pattern(2000)) and client.put("k", b"short")
        assert client.get("k") == b"short"
        assert client.put("k", pattern(3000, 2))
        (manifest,) = client._large.manifests([client.digest("k")])
        assert manifest is not None and client.exists_digests(manifest.digests(client.digest("k"))) == [True] * 12
        assert client.put("k", pattern(3000, 3))
        assert client.exists_digests(manifest.digests(client.digest("k"))) == [False] * 12
        (manifest,) = client._large.manifests([client.digest("k")])
        assert manifest is not None
        assert client.delete("k") is True and client.delete("k") is False
        assert client.exists_digests(manifest.digests(client.digest("k"))) == [False] * 12
        assert client.get("k") is None and client.exists("k") is False
        assert client.put_many(["a", "b"], [pattern(2000), b"b"]) == [True, True]
        assert client.delete_many(["a", "b", "no"]) == [True, True, False]


@breaks(large_values_are_replaced_and_deleted_with_their_parts)
class LeavesTheParts(FakeClient):
    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        return self._puts.delete(digests)


@promise
def a_large_value_that_does_not_fit_is_a_mistake(world: World) -> None:
    client = world.client()
    with small_limits():
        assert client.put("k", pattern(2000)) and client.put("s", bytes(500))
        for size in (8, 64, 1999):  # 64: a manifest has this size
            room = bytearray(b"\xee" * size)
            with pytest.raises(UsageError):
                client.get_into("k", room)
            assert room == b"\xee" * size, "nothing is written"
        for key, ranges in (("k", [(1999, 2)]), ("k", [(5000, 1)]), ("s", [(1500, 1)])):
            rooms = [(offset, length, bytearray(length)) for offset, length in ranges]
            with pytest.raises(UsageError):
                client.get_ranges(key, rooms)
        room = bytearray(600)
        with pytest.raises(UsageError, match="together"):
            client.get_ranges("s", [(0, 400, memoryview(room)[at : at + 400]) for at in (0,)] + [
                (0, 400, bytearray(400)), (0, 400, bytearray(400)),
            ])  # fmt: skip
        with client.pin(["k", "s"]) as pins:
            for key, least in (("k", 1999), ("s", 499)):
                with pytest.raises(UsageError):
                    pins.get_ranges(key, [(least, 2, bytearray(2))])


@promise
def large_values_are_pinned_as_a_whole(world: World) -> None:
    client = world.client()
    size = 9 * PART + 7
    value = pattern(size, 5)
    with small_limits():
        assert client.put_many(["k", "s", "two"], [value, pattern(500), pattern(2 * MOST)]) == [True] * 3
        with client.pin(["k", "no", "s", "two"]) as pins:
            assert pins.lengths == [size, None, 500, 2 * MOST]
            assert client.delete("k") and client.put("two", b"another")
            for offset, length in ((0, size), (PART - 3, 6), (5 * PART, 2 * PART), (size - 1, 1)):
                room = bytearray(length)
                assert pins.get_ranges("k", [(offset, length, room)]) == size
                assert room == value[offset : offset + length]
            head, tail, other = bytearray(9), bytearray(PART + 2), bytearray(PART + 9)
            ranges = [[(0, 9, head), (size - PART - 2, PART + 2, tail)], [(PART - 4, PART + 9, other)]]
            assert pins.get_ranges_many([0, "two"], ranges) == [size, 2 * MOST]
            assert head + tail == value[:9] + value[-PART - 2 :]
            assert other == pattern(2 * MOST)[PART - 4 : 2 * PART + 5]
            rows = np.zeros((4, 300), np.uint8)
            assert pins.read([(100, 300, rows)]) == [size, None, 500, 2 * MOST]
            assert bytes(rows[0]) == value[100:400] and bytes(rows[2]) == pattern(500)[100:400]
            assert bytes(rows[3]) == pattern(2 * MOST)[100:400]
        with pytest.raises(UsageError, match="released"):
            pins.get_ranges("k", [(0, 1, bytearray(1))])
        with client.pin(["k"]) as pins:
            assert pins.lengths == [None]


@breaks(large_values_are_pinned_as_a_whole)
class PinsTheFirstPartTwice(FakeClient):
    def pin(self, keys: Sequence[str]) -> Any:
        pins = super().pin(keys)
        for held in pins._parts.values():
            divide = held.divide
            held.divide = lambda ranges, divide=divide: [(0, sink) for _, sink in divide(ranges)]  # type: ignore[method-assign]
        return pins


@promise
def a_pinned_large_value_without_a_part_is_a_miss(world: World) -> None:
    client = world.client()
    with small_limits():
        assert client.put("k", pattern(2000))
        digest = client.digest("k")
        manifest = client._large.manifest(digest)
        assert manifest is not None and client._puts.delete([manifest.digest(digest, 3)]) == [0]
        with client.pin(["k"]) as pins:
            assert pins.lengths == [None]
            assert pins.get_ranges("k", [(0, 1, bytearray(1))]) is None


@breaks(a_pinned_large_value_without_a_part_is_a_miss)
class TakesTheManifestsWord(FakeClient):
    def pin(self, keys: Sequence[str]) -> Any:
        pins = super().pin(keys)
        pins.lengths = [2000 if number in pins.parted else length for number, length in enumerate(pins.lengths)]
        return pins


@breaks(a_large_value_that_does_not_fit_is_a_mistake)
class WritesTheManifest(FakeClient):
    def get_into(self, key: str, buffer: Any) -> int | None:
        if len(buffer) == 64:
            buffer[:] = bytes(64)
        return super().get_into(key, buffer)


@promise
def a_manifest_is_no_value_and_a_value_no_manifest(world: World) -> None:
    client = world.client()
    with small_limits():
        assert client.put("large", pattern(2000))
        digest = client.digest("large")
        manifest = client._large.manifest(digest)
        assert manifest is not None
        raw = manifest.encode(digest)
        assert client.put("plain", raw)
        assert client.get("plain") == raw
        assert client._large.manifest(client.digest("plain")) is None
        assert client._large.manifests([client.digest("plain")] * 70 + [digest])[-2:] == [None, manifest]
        for count in (1, 2, 70):
            got = client._gets.read_many([digest] * count, [memoryview(bytearray(64)) for _ in range(count)])
            assert [int(each) for each in got] == [-3] * count
        assert client.put("plain", pattern(2000, 9)) and client.put("large", raw)
        assert client.get("large") == raw, "an ordinary value in place of one in parts"
        assert client.get("plain") == pattern(2000, 9)
        assert client.put_many(["plain"], [raw], if_absent=True) == [True]


@breaks(a_manifest_is_no_value_and_a_value_no_manifest)
class TakesValuesForManifests(FakeClient):
    def get(self, key: str) -> bytes | None:
        got = super().get(key)
        return None if got is not None and got.startswith(b"SiMMmany") else got


@promise
def large_values_that_are_there_are_left_alone(world: World) -> None:
    for arguments in ({"put_if_absent": True}, {"replicas": 2}):
        client = world.client(namespace=f"large {[*arguments]}", **arguments)
        with small_limits():
            assert client.put("k", pattern(2000, 1)) is True
            assert client.put("k", pattern(2000, 2)) is True
            assert client.get("k") == pattern(2000, 1)
            assert client.put_many(["k", "l"], [pattern(2000, 2), pattern(1500)]) == [True, True]
            assert client.get_many(["k", "l"]) == [pattern(2000, 1), pattern(1500)]
            with client.view("k") as view:
                assert bytes(view.data) == pattern(2000, 1)
            assert client.delete("k") is True and client.get("k") is None


@breaks(large_values_that_are_there_are_left_alone)
class PutsAgain(FakeClient):
    def put_mixed(self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None) -> list[int]:
        self._large._put_once = False
        return super().put_mixed(digests, sources, False)


@promise
def a_value_in_parts_is_not_put_over_an_ordinary_one(world: World) -> None:
    """By a client that puts once. Its parts would be stored with each put, and nobody would drop them."""
    client = world.client(namespace="large replicas over ordinary", replicas=2)
    assert client.put("k", b"ordinary")
    with small_limits():
        before = client.stats()["present"]
        for seed in (1, 2):
            assert client.put("k", pattern(2000, seed)) is True
        assert client.stats()["present"] - before == 2, "no part was stored"
        assert client.get("k") == b"ordinary"


@breaks(a_value_in_parts_is_not_put_over_an_ordinary_one)
class SeesNothingUnderTheKey(FakeClient):
    def _manifest_paths(self) -> Any:
        gets, puts, replicas = super()._manifest_paths()
        gets.other_kind = lambda: NoValue.MISS  # type: ignore[method-assign]
        return gets, puts, replicas


@promise
def checked_large_values_come_back(world: World) -> None:
    client = world.client(checksum=True)
    value = pattern(5 * PART, 4)
    with small_limits():
        assert client.put("k", value) and client.get("k") == value
        room = bytearray(2 * PART)
        assert client.get_ranges("k", [(PART // 2, 2 * PART, room)]) == len(value)
        assert room == value[PART // 2 : PART // 2 + 2 * PART]


@breaks(checked_large_values_come_back)
class Truncates(FakeClient):
    def get(self, key: str) -> bytes | None:
        got = super().get(key)
        return got and got[:MOST]


