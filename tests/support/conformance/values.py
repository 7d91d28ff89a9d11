"""What a client promises about values, sources, buffers, and callers' mistakes."""

from __future__ import annotations

import array
import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from simm.constants import KEY_BYTES_MAX, LARGE_BYTES_MAX, VALUE_BYTES_MAX
from simm.errors import ConfigError, SimmError, UsageError
from simm.host.buffers import Span, address_of, view_of
from simm.testing import FakeClient
from tests.support.client_values import MIB, pattern
from tests.support.conformance.world import World, breaks, promise

# --- values -----------------------------------------------------------------------------------


@promise
def values_come_back(world: World) -> None:
    client = world.client()
    for size in (1, 63, 4096, 4097, 128 << 10, (128 << 10) + 1, MIB, VALUE_BYTES_MAX):
        value = pattern(size, size)
        assert client.put("k", value) is True
        assert client.exists("k") is True
        got = client.get("k")
        assert type(got) is bytes
        assert got == value
        buffer = bytearray(b"\xee" * (size + 100))
        assert client.get_into("k", buffer) == size
        assert buffer == value + b"\xee" * 100  # nothing beyond the value
        exact = bytearray(size)
        assert client.get_into_many(["k"], [exact]) == [size]
        assert exact == value
        assert client.get_many(["k"]) == [value]
        with client.view("k") as view:
            assert len(view) == size
            assert view.data == value
        assert client.delete("k") is True
        assert client.get("k") is None
        assert client.get_into("k", exact) is None
        assert client.exists("k") is False
        assert not client.view("k")
        assert client.delete("k") is False


@breaks(values_come_back)
class WritesBeyond(FakeClient):
    def get_into(self, key: str, buffer: Any) -> int | None:
        got = super().get_into(key, buffer)
        view_of(buffer)[-1:] = b"\0"
        return got


@breaks(values_come_back)
class OtherBytes(FakeClient):
    def get(self, key: str) -> Any:
        got = super().get(key)
        return None if got is None else bytearray(got)


@promise
def misses_are_none_and_false(world: World) -> None:
    client = world.client()
    buffer = bytearray(8)
    assert client.get("k") is None
    assert client.get_into("k", buffer) is None
    assert client.exists("k") is False
    assert client.delete("k") is False
    assert not client.view("k")
    assert client.get_many(["k", "l"]) == [None, None]
    assert client.get_into_many(["k"], [buffer]) == [None]
    assert client.exists_many(["k"]) == [False]
    assert client.delete_many(["k"]) == [False]
    client.put("k", b"v")
    assert client.delete("k") is True
    assert client.get("k") is None
    assert not client.view("k")


@breaks(misses_are_none_and_false)
class EmptyMiss(FakeClient):
    def get(self, key: str) -> bytes:
        return super().get(key) or b""


SOURCES: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "memoryview of doubles": lambda data: memoryview(data).cast("d"),
    "array": lambda data: array.array("i", data),
    "numpy 2-D": lambda data: np.frombuffer(data, np.float32).reshape(-1, 4),
    "numpy float16": lambda data: np.frombuffer(data, np.float16).copy(),
    "numpy 0-D rows": lambda data: np.frombuffer(data, np.uint8).reshape(1, -1, 1),
    "numpy datetime": lambda data: np.frombuffer(data, "datetime64[s]"),
    "part of an array": lambda data: np.concatenate([np.zeros(7, np.uint8), np.frombuffer(data, np.uint8)])[7:],
    "span": lambda data: Span(address_of(memoryview(data)), len(data), keep=data),
}


@promise
def every_kind_of_source_is_its_bytes(world: World) -> None:
    client = world.client()
    for size in (64, 64 << 10):
        value = pattern(size, 3)
        for kind, make in SOURCES.items():
            assert client.put(kind, make(value))
            assert client.put_many([kind + "2"], [make(value)]) == [True]
            assert client.get_many([kind, kind + "2"]) == [value, value], kind


@breaks(every_kind_of_source_is_its_bytes)
class ZeroesArrays(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        return super().put(key, np.zeros_like(value) if isinstance(value, np.ndarray) else value)


SINKS: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "array": lambda size: array.array("i", bytes(size)),
    "numpy 2-D": lambda size: np.zeros((size // 16, 4), np.float32),
    "part of an array": lambda size: np.zeros(size + 7, np.uint8)[7:],
}


@promise
def every_kind_of_buffer_is_filled(world: World) -> None:
    client = world.client()
    for size in (64, 64 << 10):
        value = pattern(size, 4)
        assert client.put("k", value)
        for kind, make in SINKS.items():
            buffers = [make(size), make(size)]
            assert client.get_into("k", buffers[0]) == size
            assert client.get_into_many(["k"], buffers[1:]) == [size]
            assert [bytes(view_of(buffer)) for buffer in buffers] == [value] * 2, kind


@breaks(every_kind_of_buffer_is_filled)
class FillsACopy(FakeClient):
    def get_into(self, key: str, buffer: Any) -> int | None:
        return super().get_into(key, buffer.copy() if isinstance(buffer, np.ndarray) else buffer)


@promise
def a_registered_buffer_is_source_and_sink(world: World) -> None:
    client = world.client()
    pool = np.frombuffer(pattern(4096), np.uint8).copy()
    span = client.register(pool)
    assert (span.size, span.writable) == (4096, True)
    assert client.register(span) is span
    assert client.put("k", span)
    assert client.put("part", span.part(100, 50))
    wanted = pool.tobytes()
    pool[:] = 0
    assert client.get_into("k", span) == 4096
    assert pool.tobytes() == wanted
    assert client.get("part") == wanted[100:150]
    assert not client.register(b"constant").writable
    with pytest.raises(UsageError, match="read-only"):
        client.get_into("k", client.register(bytes(4096)))
    with pytest.raises(UsageError, match="empty"):
        client.register(b"")
    client.deregister(span)
    client.deregister(span)
    assert client.get_into("k", span) == 4096


@breaks(a_registered_buffer_is_source_and_sink)
class RegistersAnew(FakeClient):
    def register(self, buffer: Any) -> Span:
        span = super().register(buffer)
        return Span(span.address, span.size, writable=span.writable, keep=span)


@promise
def a_value_is_the_stores_own(world: World) -> None:
    """Changes of the source buffer, or of a value that was read, do not change what is stored."""
    client = world.client()
    mine = bytearray(b"value")
    client.put("k", mine)
    client.put_many(["l"], [mine])
    mine[:] = b"other"
    assert client.get_many(["k", "l"]) == [b"value"] * 2
    assert client.get_into("k", mine) == 5
    mine[:] = b"other"
    assert client.get("k") == b"value"


@breaks(a_value_is_the_stores_own)
class Aliases(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        vars(self).setdefault("theirs", {})[key] = value
        return super().put(key, value)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [bytes(vars(self)["theirs"].get(key, b"value")) for key in keys]


@promise
def an_overwrite_leaves_the_last_value(world: World) -> None:
    client = world.client()
    for step, size in enumerate([100, 5000, 1, 300_000, 300_000, 64, 4 * MIB, 10]):
        value = pattern(size, step)
        assert client.put("k", value) is True
        assert client.get("k") == value


@breaks(an_overwrite_leaves_the_last_value)
class FirstStays(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        return self.exists(key) or super().put(key, value)


@promise
def the_largest_value_of_one_entry_comes_back(world: World) -> None:
    client = world.client()
    value = bytearray(VALUE_BYTES_MAX)
    value[-1] = 7
    assert client.put("k", value) is True
    buffer = bytearray(VALUE_BYTES_MAX)
    assert client.get_into("k", buffer) == VALUE_BYTES_MAX
    assert buffer[-1] == 7
    assert client.stats()["large"] == 0 and client.delete("k") is True


@breaks(the_largest_value_of_one_entry_comes_back)
class RefusesTheLargest(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        return len(value) < VALUE_BYTES_MAX and super().put(key, value)


@promise
def a_value_has_at_most_the_named_bytes(world: World) -> None:
    client = world.client()
    for put in (client.put, lambda key, value: client.put_many([key], [value])[0]):
        with pytest.raises(UsageError, match="a value has 1 to"):
            put("k", Span(4096, LARGE_BYTES_MAX + 1))
    assert client.exists("k") is False


@breaks(a_value_has_at_most_the_named_bytes)
class TooLargeIsFalse(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        return len(value) <= LARGE_BYTES_MAX and super().put(key, value)


# --- callers' mistakes ------------------------------------------------------------------------


@promise
def a_bad_key_is_a_usage_error(world: World) -> None:
    client = world.client()
    before = client.stats()
    bad: list[Any] = ["", "x" * (KEY_BYTES_MAX + 1), "é" * (KEY_BYTES_MAX // 2 + 1), "\ud800", b"bytes", 5, None]

    def calls(key: Any) -> list[Callable[[], Any]]:
        return [
            lambda: client.put(key, b"v"), lambda: client.get(key), lambda: client.get_into(key, bytearray(8)),
            lambda: client.exists(key), lambda: client.delete(key), lambda: client.view(key),
            lambda: client.digest(key), lambda: client.put_many(["good", key], [b"v", b"v"]),
            lambda: client.get_many(["good", key]), lambda: client.get_into_many([key], [bytearray(1)]),
            lambda: client.exists_many(["good", key]), lambda: client.delete_many([key]),
            lambda: asyncio.run(client.get_async(key)),
        ]  # fmt: skip

    for key in bad:
        for call in calls(key):
            with pytest.raises(UsageError, match="key"):
                call()
    assert client.stats() == before  # nothing was sent
    assert client.exists("good") is False


@breaks(a_bad_key_is_a_usage_error)
class BadKeysMiss(FakeClient):
    def exists(self, key: str) -> bool:
        with contextlib.suppress(UsageError):
            return super().exists(key)
        return False


@promise
def any_utf8_of_1_to_256_bytes_is_a_key(world: World) -> None:
    client = world.client()
    for key in ("\0", "a\0b", "x" * KEY_BYTES_MAX, "é" * (KEY_BYTES_MAX // 2), "\U0001f600" * 64, " k "):
        assert client.put(key, b"v")
        assert client.get(key) == b"v"
    alike = ["k", "k\0", "k ", " k", "K", "é", "e\u0301"]
    assert client.put_many(alike, [key.encode() for key in alike]) == [True] * len(alike)
    assert client.get_many(alike) == [key.encode() for key in alike]


@breaks(any_utf8_of_1_to_256_bytes_is_a_key)
class StripsKeys(FakeClient):
    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        return super().put_many([key.strip() for key in keys], values)


@promise
def a_bad_value_is_a_usage_error(world: World) -> None:
    client = world.client()
    bad: list[Any] = [
        "text", 5, None, [1], b"", np.zeros((2, 0)), np.zeros((4, 4), np.uint8)[:, ::2], np.zeros(8, np.uint8)[::-1],
        memoryview(bytes(16))[::2], np.zeros((4, 4)).T, np.array([object()]), Span(4096, LARGE_BYTES_MAX + 1),
    ]  # fmt: skip
    for value in bad:
        with pytest.raises(UsageError):
            client.put("k", value)
        with pytest.raises(UsageError):
            client.put_many(["a", "k"], [b"v", value])
        assert client.exists_many(["k", "a"]) == [False, False]


@breaks(a_bad_value_is_a_usage_error)
class TakesStrides(FakeClient):
    def put(self, key: str, value: Any) -> bool:
        return super().put(key, np.ascontiguousarray(value) if isinstance(value, np.ndarray) and value.size else value)


@promise
def a_bad_buffer_is_a_usage_error(world: World) -> None:
    client = world.client()
    client.put("k", b"v" * 8)
    bad: list[Any] = [
        bytes(16), memoryview(bytes(16)), np.frombuffer(bytes(16), np.uint8), "text", 16, None,
        np.zeros((4, 4), np.uint8)[:, ::2],
    ]  # fmt: skip
    for buffer in bad:
        with pytest.raises(UsageError):
            client.get_into("k", buffer)
        good = bytearray(8)
        with pytest.raises(UsageError):
            client.get_into_many(["k", "k"], [good, buffer])
        assert good == bytes(8)


@breaks(a_bad_buffer_is_a_usage_error)
class FillsBeforeItLooks(FakeClient):
    def get_into_many(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        return [self.get_into(key, buffer) for key, buffer in zip(keys, buffers)]


@promise
def a_buffer_too_small_is_a_usage_error_and_untouched(world: World) -> None:
    client = world.client()
    for size in (2, 4097, 2 * MIB):
        client.put("k", pattern(size))
        for room in {1, size // 2, size - 1}:
            buffer = bytearray(b"\xee" * room)
            with pytest.raises(UsageError, match=f"'k' does not fit a buffer of {room} bytes"):
                client.get_into("k", buffer)
            assert buffer == b"\xee" * room
    client.put_many(["a", "b", "c"], [b"A" * 100, b"B" * 100, b"C" * 100])
    buffers = [bytearray(100), bytearray(b"\xee" * 99), bytearray(100)]
    with pytest.raises(UsageError, match="'b' does not fit a buffer of 99 bytes"):
        client.get_into_many(["a", "b", "c"], buffers)
    assert buffers == [b"A" * 100, b"\xee" * 99, b"C" * 100]  # all others are filled first


@breaks(a_buffer_too_small_is_a_usage_error_and_untouched)
class FillsWhatFits(FakeClient):
    def get_into(self, key: str, buffer: Any) -> int | None:
        try:
            return super().get_into(key, buffer)
        except UsageError:
            buffer[:] = (self.get(key) or b"")[: len(buffer)]
            raise


@breaks(a_buffer_too_small_is_a_usage_error_and_untouched)
class StopsAtTheFirst(FakeClient):
    def get_into_many(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        return [self.get_into(key, buffer) for key, buffer in zip(keys, buffers)]


@promise
def batches_of_different_lengths_are_usage_errors(world: World) -> None:
    client = world.client()
    with pytest.raises(UsageError, match="2 keys and 1 values"):
        client.put_many(["a", "b"], [b"v"])
    with pytest.raises(UsageError, match="1 keys and 0 buffers"):
        client.get_into_many(["a"], [])
    assert client.exists("a") is False


@breaks(batches_of_different_lengths_are_usage_errors)
class Zips(FakeClient):
    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        return super().put_many(keys[: len(values)], values)


@promise
def bad_arguments_are_refused(world: World) -> None:
    bad: list[tuple[dict[str, Any], type[SimmError]]] = [
        ({"path": "shm,udp"}, UsageError), ({"deadline_s": 0}, UsageError), ({"deadline_s": float("nan")}, UsageError),
        ({"namespace": ""}, UsageError), ({"namespace": "n" * 65}, UsageError), ({"namespace": 5}, UsageError),
        ({"replicas": 3}, UsageError), ({"manager": "host:port"}, ConfigError), ({"manager": ""}, ConfigError),
    ]  # fmt: skip
    for arguments, error in bad:
        with pytest.raises(error):
            world.client(**arguments)
    with pytest.raises(TypeError, match="no_such"):
        world.client(no_such=1)


@breaks(bad_arguments_are_refused)
class TakesAnyPath(FakeClient):
    def __init__(self, *, path: str = "auto", **arguments: Any) -> None:
        super().__init__(**arguments)
