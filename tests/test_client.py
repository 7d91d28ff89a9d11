"""simm.client against a real cluster: one suite for both data paths, then what only one of them or a crash shows."""

from __future__ import annotations

import array
import asyncio
import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from simm.buffers import Span, address_of, view_of
from simm.client import Client
from simm.constants import KEY_BYTES_MAX, VALUE_BYTES_MAX
from simm.errors import ConfigError, SimmError, TransportError, UsageError
from simm.session import WorkerSession
from simm.tcppath import TcpPath

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

PATHS = ("shm", "tcp")
MIB = 1 << 20
#: A bound for things that hang, seconds.
WAIT_S = 30.0
JOIN_S = 60.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first true value."""
    end = time.monotonic() + WAIT_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(0.02)


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that differ between seeds and positions, cheap at 64 MiB."""
    return (random.Random(seed).randbytes(min(size, 4096 + 7)) * (size // 4096 + 1))[:size]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """The test's own: the cluster is shared."""
    return f"c{zlib.crc32(request.node.nodeid.encode()):08x}"


@pytest.fixture
def client(cluster: Any, path: str, namespace: str) -> Iterator[Client]:
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=10.0) as connected:
        assert connected.wait_ready()
        yield connected
        assert [worker["path"] for worker in connected.stats()["workers"]] == [path]


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 63, 4096, 4097, 128 << 10, (128 << 10) + 1, MIB, VALUE_BYTES_MAX])
def test_a_value_comes_back_by_every_call(client: Client, size: int) -> None:
    value = pattern(size, size)
    assert client.put("k", value) is True
    assert client.exists("k") is True
    got = client.get("k")
    assert got == value
    assert type(got) is bytes
    buffer = bytearray(b"\xee" * (size + 100))
    assert client.get_into("k", buffer) == size
    assert buffer[:size] == value
    assert buffer[size:] == b"\xee" * 100  # nothing beyond the value
    exact = bytearray(size)
    assert client.get_into_many(["k"], [exact]) == [size]
    assert exact == value
    with client.view("k") as view:  # type: ignore[union-attr]
        assert len(view) == size
        assert view.data == value
    assert client.delete("k") is True
    assert (client.get("k"), client.get_into("k", exact), client.exists("k"), client.view("k")) == (
        None, None, False, None,
    )  # fmt: skip
    assert client.delete("k") is False


SOURCES: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "memoryview of doubles": lambda data: memoryview(data).cast("d"),
    "array": lambda data: array.array("i", data),
    "numpy 2-D": lambda data: np.frombuffer(data, np.float32).reshape(-1, 4),
    "numpy float16": lambda data: np.frombuffer(data, np.float16).copy(),
    "numpy 0-D rows": lambda data: np.frombuffer(data, np.uint8).reshape(1, -1, 1),
    "part of an array": lambda data: np.concatenate([np.zeros(7, np.uint8), np.frombuffer(data, np.uint8)])[7:],
    "span": lambda data: Span(address_of(memoryview(data)), len(data), keep=data),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("size", [64, 64 << 10])
def test_every_kind_of_source_is_stored_as_its_bytes(client: Client, kind: str, size: int) -> None:
    value = pattern(size, 3)
    assert client.put("k", SOURCES[kind](value))
    assert client.get("k") == value


SINKS: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "memoryview": lambda size: memoryview(bytearray(size)),
    "array": lambda size: array.array("i", bytes(size)),
    "numpy 2-D": lambda size: np.zeros((size // 16, 4), np.float32),
    "part of an array": lambda size: np.zeros(size + 7, np.uint8)[7:],
}


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("size", [64, 64 << 10])
def test_every_kind_of_buffer_is_filled(client: Client, kind: str, size: int) -> None:
    value = pattern(size, 4)
    buffer = SINKS[kind](size)
    assert client.put("k", value)
    assert client.get_into("k", buffer) == size
    assert bytes(memoryview(buffer).cast("B")) == value


def test_a_registered_buffer_is_source_and_sink(client: Client) -> None:
    pool = np.frombuffer(pattern(4096), np.uint8).copy()
    span = client.register(pool)
    assert (span.size, span.writable) == (4096, True)
    assert client.register(span) is span
    assert client.put("k", span)
    wanted = pool.tobytes()
    pool[:] = 0
    assert client.get_into("k", span) == 4096
    assert pool.tobytes() == wanted
    assert not client.register(b"constant").writable
    with pytest.raises(UsageError, match="read-only"):
        client.get_into("k", client.register(bytes(4096)))


# --- callers' mistakes ------------------------------------------------------------------------

BAD_KEYS = ["", "x" * (KEY_BYTES_MAX + 1), "é" * (KEY_BYTES_MAX // 2 + 1), "\ud800", b"bytes", 5, None]


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_a_bad_key_is_a_usage_error_and_nothing_is_sent(client: Client, key: Any) -> None:
    before = client.stats()
    calls: list[Callable[[], Any]] = [
        lambda: client.put(key, b"v"), lambda: client.get(key), lambda: client.get_into(key, bytearray(8)),
        lambda: client.exists(key), lambda: client.delete(key), lambda: client.view(key),
        lambda: client.put_many(["good", key], [b"v", b"v"]), lambda: client.get_into_many([key], [bytearray(1)]),
        lambda: client.exists_many(["good", key]), lambda: client.delete_many([key]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="key"):
            call()
    assert client.exists("good") is False
    assert client.stats() == before


@pytest.mark.parametrize(
    "key", ["\0", "a\0b", "x" * KEY_BYTES_MAX, "é" * (KEY_BYTES_MAX // 2), "\U0001f600" * 64, " k "], ids=ascii
)
def test_any_utf8_of_1_to_256_bytes_is_a_key(client: Client, key: str) -> None:
    assert client.put(key, b"v")
    assert client.get(key) == b"v"


def test_keys_that_only_look_alike_are_different(client: Client) -> None:
    keys = ["k", "k\0", "k ", " k", "K", "é", "e\u0301"]
    assert client.put_many(keys, [key.encode() for key in keys]) == [True] * len(keys)
    assert client.get_many(keys) == [key.encode() for key in keys]


@pytest.mark.parametrize(
    "value",
    ["text", 5, None, [1], b"", np.zeros((2, 0)), np.zeros((4, 4), np.uint8)[:, ::2], np.zeros(8, np.uint8)[::-1],
     memoryview(bytes(16))[::2], Span(4096, VALUE_BYTES_MAX + 1), np.zeros((4, 4)).T],
    ids=["str", "int", "None", "list", "empty", "empty array", "stride", "reversed", "memoryview stride", "too large",
         "transposed"],
)  # fmt: skip
def test_a_bad_value_is_a_usage_error(client: Client, value: Any) -> None:
    with pytest.raises(UsageError):
        client.put("k", value)
    with pytest.raises(UsageError):
        client.put_many(["a", "k"], [b"v", value])
    assert client.exists_many(["k", "a"]) == [False, False]


@pytest.mark.parametrize(
    "buffer", [bytes(16), memoryview(bytes(16)), np.frombuffer(bytes(16), np.uint8), "text", 16, None,
               np.zeros((4, 4), np.uint8)[:, ::2]],
    ids=["bytes", "memoryview", "read-only array", "str", "int", "None", "stride"],
)  # fmt: skip
def test_a_bad_buffer_is_a_usage_error(client: Client, buffer: Any) -> None:
    client.put("k", b"v" * 8)
    with pytest.raises(UsageError):
        client.get_into("k", buffer)
    good = bytearray(8)
    with pytest.raises(UsageError):
        client.get_into_many(["k", "k"], [good, buffer])
    assert good == bytes(8)


@pytest.mark.parametrize("size", [2, 4097, 2 * MIB])
def test_a_buffer_too_small_is_a_usage_error_and_untouched(client: Client, size: int) -> None:
    client.put("k", pattern(size))
    for room in {1, size // 2, size - 1}:
        buffer = bytearray(b"\xee" * room)
        with pytest.raises(UsageError, match="does not fit"):
            client.get_into("k", buffer)
        assert buffer == b"\xee" * room


def test_in_a_batch_the_other_buffers_are_filled_first(client: Client) -> None:
    client.put_many(["a", "b", "c"], [b"A" * 100, b"B" * 100, b"C" * 100])
    buffers = [bytearray(100), bytearray(b"\xee" * 99), bytearray(100)]
    with pytest.raises(UsageError, match="'b' does not fit a buffer of 99 bytes"):
        client.get_into_many(["a", "b", "c"], buffers)
    assert buffers == [b"A" * 100, b"\xee" * 99, b"C" * 100]


def test_batches_of_different_lengths_are_usage_errors(client: Client) -> None:
    with pytest.raises(UsageError, match="2 keys and 1 values"):
        client.put_many(["a", "b"], [b"v"])
    with pytest.raises(UsageError, match="1 keys and 0 buffers"):
        client.get_into_many(["a"], [])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"path": "shm,udp"}, UsageError), ({"deadline_s": 0}, UsageError), ({"deadline_s": float("nan")}, UsageError),
     ({"namespace": ""}, UsageError), ({"namespace": "n" * 65}, UsageError), ({"namespace": 5}, UsageError),
     ({"manager": "host:port"}, ConfigError), ({"manager": ""}, ConfigError)],
    ids=repr,
)  # fmt: skip
def test_bad_arguments_are_refused(cluster: Any, arguments: dict[str, Any], error: type[SimmError]) -> None:
    with pytest.raises(error):
        Client(**{"manager": cluster.manager, **arguments})


def test_a_closed_client_says_so(client: Client) -> None:
    other = pickle.loads(pickle.dumps(client))
    assert other.put("k", b"v")
    other.close()
    other.close()
    calls: list[Callable[[], Any]] = [
        lambda: other.put("k", b"v"), lambda: other.get("k"), lambda: other.get_into("k", bytearray(8)),
        lambda: other.exists("k"), lambda: other.delete("k"), lambda: other.view("k"),
        lambda: other.exists_many(["a", "b"]), lambda: asyncio.run(other.get_async("k")),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
    assert "closed" in repr(other)
    assert client.get("k") == b"v"


# --- overwrite, namespaces, batches -------------------------------------------------------------


def test_overwrites_of_every_size_leave_the_last_value(client: Client) -> None:
    for step, size in enumerate([100, 5000, 1, 300_000, 300_000, 64, 4 * MIB, 10]):
        value = pattern(size, step)
        assert client.put("k", value)
        assert client.get("k") == value


def test_namespaces_do_not_see_each_other(client: Client, cluster: Any, path: str) -> None:
    with Client(cluster.manager, namespace=client.namespace + "x", path=path, deadline_s=10.0) as other:
        assert client.put("k", b"mine")
        assert other.get("k") is None
        assert other.put("k", b"theirs")
        assert (client.get("k"), other.get("k")) == (b"mine", b"theirs")
        assert other.delete("k")
        assert client.get("k") == b"mine"


def test_a_batch_answers_each_key(client: Client) -> None:
    stored = [f"k{number}" for number in range(0, 300, 2)]
    asked = [f"k{number}" for number in range(300)]
    values = [pattern(1 + number * 37 % 5000, number) for number in range(len(stored))]
    assert client.put_many(stored, values) == [True] * len(stored)
    wanted = dict(zip(stored, values))
    assert client.get_many(asked) == [wanted.get(key) for key in asked]
    assert client.exists_many(asked) == [key in wanted for key in asked]
    buffers = [bytearray(5000) for _ in asked]
    got = client.get_into_many(asked, buffers)
    assert got == [len(wanted[key]) if key in wanted else None for key in asked]
    for key, length, buffer in zip(asked, got, buffers):
        assert length is None or buffer[:length] == wanted[key]
    assert client.delete_many(asked) == [key in wanted for key in asked]
    assert not any(client.exists_many(asked))


def test_empty_batches(client: Client) -> None:
    assert client.put_many([], []) == []
    assert client.get_many([]) == []
    assert client.get_into_many([], []) == []
    assert client.exists_many([]) == []
    assert client.delete_many([]) == []


@pytest.mark.parametrize("count", [5, 40])
def test_a_key_twice_in_a_batch(client: Client, count: int) -> None:
    keys = [f"k{number}" for number in range(count)] + ["k0", "k1", "k0"]
    values = [b"%d" % number for number in range(len(keys))]
    assert client.put_many(keys, values) == [True] * len(keys)
    assert client.get_many(["k0", "k1", "k2"]) == [values[-1], values[-2], values[2]]
    buffers = [bytearray(8), bytearray(8)]
    assert client.get_into_many(["k0", "k0"], buffers) == [len(values[-1])] * 2
    assert buffers[0] == buffers[1]
    assert client.delete_many(["k0", "k0"]) == [True, False]


def test_batches_larger_than_any_exchange(client: Client) -> None:
    """More grants than are kept ahead, more keys than a frame carries, in answers that stay in step."""
    keys = [f"k{number}" for number in range(9000)]
    values = [struct.pack("<Q", number) * 16 for number in range(len(keys))]
    assert all(client.put_many(keys, values))
    buffers = memoryview(bytearray(128 * len(keys)))
    got = client.get_into_many(keys, [buffers[at : at + 128] for at in range(0, len(buffers), 128)])
    assert got == [128] * len(keys)
    assert buffers == b"".join(values)
    hits = client.exists_many([*keys, *(f"absent{number}" for number in range(11_000))])
    assert hits == [True] * 9000 + [False] * 11_000
    assert {type(hit) for hit in hits} == {bool}
    assert all(client.delete_many(keys))


def test_issue_a_pool_overfull_with_grants(cluster: Any, namespace: str) -> None:
    """A first batch of many pages is granted at once more than twice of what is kept ahead; the commit that follows
    asked for a negative count of grants, which cannot be packed."""
    with Client(cluster.manager, namespace=namespace, path="shm") as client:
        keys = [f"k{number}" for number in range(6000)]
        assert all(client.put_many(keys, [bytes(4096)] * len(keys)))
        assert all(client.exists_many(keys))
        assert all(client.delete_many(keys))


# --- views ------------------------------------------------------------------------------------


def test_a_view_is_read_only_and_says_when_it_is_closed(client: Client) -> None:
    client.put("k", b"value")
    view = client.view("k")
    assert view is not None
    assert view.data.readonly
    with pytest.raises(TypeError):
        view.data[0] = 1
    assert "5 bytes" in repr(view)
    view.close()
    view.close()
    assert "closed" in repr(view)
    with pytest.raises(UsageError, match="closed"):
        _ = view.data


def test_a_view_stays_as_it_is_through_overwrite_and_delete(client: Client) -> None:
    value = pattern(100_000, 1)
    client.put("k", value)
    with client.view("k") as view:  # type: ignore[union-attr]
        client.put("k", pattern(100_000, 2))
        client.delete("k")
        for number in range(50):
            client.put(f"other{number}", pattern(100_000, number))
        assert view.data == value


def test_slices_and_arrays_keep_the_pin(cluster: Any, namespace: str) -> None:
    with Client(cluster.manager, namespace=namespace, path="shm") as client:
        client.put("k", pattern(50_000))
        assert cluster.worker_stats()["pins"] == 0
        view = client.view("k")
        assert view is not None
        part = view.data[10:20]
        whole = np.frombuffer(view.data, np.uint8)[100:]
        assert cluster.worker_stats()["pins"] == 1
        view.close()
        del view
        # The background thread gives pins back at every tick; exchanges are in order, so after one
        # more pin has come and gone the first would have gone too, if it could.
        with client.view("k"):  # type: ignore[union-attr]
            assert cluster.worker_stats()["pins"] == 2
        until(lambda: cluster.worker_stats()["pins"] == 1, "the second pin goes")
        assert bytes(part) == pattern(50_000)[10:20]
        del part
        client.delete("k")
        assert whole.tobytes() == pattern(50_000)[100:]
        del whole
        until(lambda: cluster.worker_stats()["pins"] == 0, "the first pin goes")


def test_many_views_at_once(client: Client, cluster: Any) -> None:
    values = [pattern(1000 + number, number) for number in range(100)]
    client.put_many([f"k{number}" for number in range(100)], values)
    views = [client.view(f"k{number}") for number in range(100)]
    assert [bytes(view.data) for view in views if view] == values
    for view in views:
        assert view is not None
        view.close()
    until(lambda: cluster.worker_stats()["pins"] == 0, "all pins go")


def test_a_view_outlives_its_client(cluster: Any, path: str, namespace: str) -> None:
    client = Client(cluster.manager, namespace=namespace, path=path)
    client.put("k", pattern(5000))
    view = client.view("k")
    assert view is not None
    client.close()
    assert view.data == pattern(5000)
    view.close()
    del view
    # The session that held the pin is over; the process's next one with that worker releases it.
    with Client(cluster.manager, namespace=namespace, path=path) as later:
        assert later.get("k") == pattern(5000)
        until(lambda: cluster.worker_stats()["pins"] == 0, "the pin goes")


# --- checksums --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_changed_byte_is_a_miss_for_who_checks(cluster: Any, path: str, namespace: str, size: int) -> None:
    arguments: dict[str, Any] = {"namespace": namespace, "deadline_s": 10.0}
    with (
        Client(cluster.manager, path=path, checksum=True, **arguments) as checks,
        Client(cluster.manager, path="shm", **arguments) as trusts,
    ):
        value = pattern(size)
        assert checks.put("k", value)
        assert checks.get("k") == value
        view = trusts.view("k")
        assert view is not None
        at = address_of(view.data)
        Span(at + size // 2, 1).view()[0] ^= 1  # as a stray write of some process would
        view.close()
        buffer = bytearray(size)
        assert checks.get("k") is None
        assert checks.get_into("k", buffer) is None
        assert checks.get_into_many(["k"] * 20, [buffer] * 20) == [None] * 20
        assert checks.view("k") is None
        assert checks.counters["crc_errors"] == 23
        assert trusts.get("k") != value
        assert len(trusts.get("k") or b"") == size
        assert checks.put("k", value)
        assert checks.get("k") == value


# --- processes and threads --------------------------------------------------------------------


def test_a_pickled_client_has_the_same_settings(client: Client, path: str) -> None:
    client.put("k", b"v")
    with pickle.loads(pickle.dumps(client)) as other:
        assert other.get("k") == b"v"
        assert other.namespace == client.namespace
        assert [worker["path"] for worker in other.stats()["workers"]] == [path]


def forked(body: Callable[[], bool]) -> int:
    """The exit code of a forked child that runs ``body``: 0 if that is true."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 3
    try:
        signal.alarm(int(JOIN_S))
        code = 0 if body() else 2
    finally:
        os._exit(code)


def test_a_forked_child_uses_the_client_and_the_parent_does_not_notice(client: Client, cluster: Any) -> None:
    big = pattern(3 * MIB)
    assert client.put_many(["parent", "big"], [b"from the parent", big]) == [True, True]
    view = client.view("big")
    assert view is not None

    def child() -> bool:
        found = client.get("parent") == b"from the parent" and client.get("big") == big
        stored = client.put("child", b"from the child")
        many = client.put_many([f"c{number}" for number in range(100)], [b"v"] * 100)
        return found and stored and all(many) and asyncio.run(client.get_async("child")) == b"from the child"

    for _ in range(3):
        assert forked(child) == 0
    assert client.get("child") == b"from the child"
    assert all(client.exists_many([f"c{number}" for number in range(100)]))
    assert view.data == big
    assert client.put("parent", b"again")
    assert client.get("parent") == b"again"
    assert client.stats()["outages"] == 0
    view.close()
    del view
    until(lambda: cluster.worker_stats()["pins"] == 0, "the pin goes")


def test_a_grandchild_and_a_child_that_closes(client: Client) -> None:
    client.put("k", b"v")

    def child() -> bool:
        if client.get("k") != b"v":
            return False
        if forked(lambda: client.get("k") == b"v" and client.put("g", b"v")) != 0:
            return False
        client.close()
        with contextlib.suppress(UsageError):
            client.get("k")
            return False
        return True

    assert forked(child) == 0
    assert client.get("k") == b"v"
    assert client.get("g") == b"v"


def test_forks_while_threads_work(client: Client) -> None:
    """A child made while another thread is in the middle of an exchange must find no lock of it."""
    stop = threading.Event()
    failed: list[str] = []

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            if not client.put("busy", b"v" * 5000) or client.get("busy") != b"v" * 5000:
                failed.append(f"at {number}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        codes = [forked(lambda: client.put("child", b"v") and client.get("child") == b"v") for _ in range(8)]
    finally:
        stop.set()
        thread.join(JOIN_S)
    assert codes == [0] * 8
    assert not failed


def _spawned(client: Client, answer: Any) -> None:
    answer.send((client.get("parent"), client.put("child", b"from the child")))
    client.close()


def test_a_spawned_process_gets_a_client_of_its_own(client: Client) -> None:
    client.put("parent", b"v")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_spawned, args=(client, theirs))
    process.start()
    theirs.close()
    assert mine.poll(JOIN_S)
    assert mine.recv() == (b"v", True)
    process.join(JOIN_S)
    assert process.exitcode == 0
    process.close()
    assert client.get("child") == b"from the child"


def test_eight_threads_of_everything(client: Client) -> None:
    """Values carry key, version and a checksum, so that a torn or foreign one is seen."""
    shared = [f"shared{number}" for number in range(10)]
    wrong: list[str] = []

    def make(key: str, version: int, size: int) -> bytes:
        body = struct.pack("<I", version) + key.encode().ljust(16, b"\0") + pattern(size, version)
        return body + struct.pack("<I", zlib.crc32(body))

    def sound(key: str, value: bytes) -> bool:
        body, tail = value[:-4], value[-4:]
        return tail == struct.pack("<I", zlib.crc32(body)) and body[4:20] == key.encode().ljust(16, b"\0")

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            mine: dict[str, bytes] = {}
            buffer = bytearray(300_000)
            for step in range(120):
                own = f"own{seed}-{rng.randrange(5)}"
                other = rng.choice(shared)
                size = rng.choice([10, 4000, 40_000, 200_000])
                kind = rng.randrange(6)
                if kind == 0:
                    mine[own] = make(own, step, size)
                    assert client.put(own, mine[own])
                elif kind == 1:
                    assert client.get(own) == mine.get(own)
                elif kind == 2:
                    assert client.put(other, make(other, step, size))
                elif kind == 3:
                    length = client.get_into(other, buffer)
                    assert length is None or sound(other, bytes(buffer[:length]))
                elif kind == 4:
                    assert client.delete(own) == (mine.pop(own, None) is not None)
                else:
                    got = client.get_many(shared)
                    assert all(value is None or sound(key, value) for key, value in zip(shared, got))
        except BaseException as exc:
            wrong.append(f"thread {seed}: {exc!r}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    assert not wrong
    assert client.stats()["outages"] == 0


def test_a_thread_that_comes_during_the_first_connection_waits_for_it(
    cluster: Any, path: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be told that the server is down."""
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=WAIT_S) as first:
        assert first.put("k", b"v")
    entered, go_on = threading.Event(), threading.Event()

    def held(connect: Any) -> Callable[..., Any]:
        def connecting(*arguments: Any, **more: Any) -> Any:
            entered.set()
            go_on.wait(WAIT_S)
            return connect(*arguments, **more)

        return connecting

    monkeypatch.setattr("simm.target.WorkerSession", held(WorkerSession))
    monkeypatch.setattr(TcpPath, "connect", held(TcpPath.connect))
    with Client(cluster.manager, namespace=namespace, path=path, deadline_s=WAIT_S) as client:
        got: list[bytes | None] = []
        threads = [threading.Thread(target=lambda: got.append(client.get("k"))) for _ in range(4)]
        threads[0].start()
        assert entered.wait(WAIT_S)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(0.05)
        assert got == []
        go_on.set()
        for thread in threads:
            thread.join(JOIN_S)
        assert got == [b"v"] * 4
        assert client.stats()["outages"] == 0


# --- asyncio ----------------------------------------------------------------------------------


def test_the_asyncio_forms_answer_the_same(client: Client) -> None:
    async def body() -> None:
        assert await client.put_async("k", b"value") is True
        assert await client.get_async("k") == b"value"
        buffer = bytearray(8)
        assert await client.get_into_async("k", buffer) == 5
        assert buffer == b"value\0\0\0"
        assert await client.exists_async("k") is True
        keys = [f"k{number}" for number in range(20)]
        assert all(await asyncio.gather(*(client.put_async(key, key.encode()) for key in keys)))
        assert await asyncio.gather(*(client.get_async(key) for key in keys)) == [key.encode() for key in keys]
        assert await client.put_many_async(["a", "b"], [b"1", b"2"]) == [True, True]
        assert await client.exists_many_async(["a", "b", "c"]) == [True, True, False]
        assert await client.get_into_many_async(["a", "c"], [buffer, bytearray(1)]) == [1, None]
        assert await client.delete_async("k") is True
        assert await client.get_async("k") is None
        with pytest.raises(UsageError):
            await client.get_into_async("a", b"read-only")

    asyncio.run(body())


def test_a_cancellation_waits_for_the_call_under_way(client: Client) -> None:
    """Once CancelledError has come out, nobody writes into the buffer any more."""
    buffer = bytearray(1)
    entered, go_on = threading.Event(), threading.Event()

    def call() -> int:
        entered.set()
        go_on.wait(WAIT_S)
        buffer[0] = 1
        return 1

    async def body() -> None:
        task = asyncio.ensure_future(client.in_thread(call))
        while not entered.is_set():
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(100):
            await asyncio.sleep(0)
        task.cancel()  # a second one must not get it out earlier
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert buffer[0] == 1

    asyncio.run(body())


def test_a_cancelled_call_that_waits_for_a_thread_never_runs(client: Client) -> None:
    go_on = threading.Event()
    ran: list[int] = []

    async def body() -> None:
        blockers = [asyncio.ensure_future(client.in_thread(go_on.wait, WAIT_S)) for _ in range(32)]
        await asyncio.sleep(0)
        last = asyncio.ensure_future(client.in_thread(ran.append, 1))
        await asyncio.sleep(0)
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        go_on.set()
        assert all(await asyncio.gather(*blockers))

    asyncio.run(body())
    assert ran == []


def test_a_cancelled_get_of_a_large_value_leaves_the_client_whole(client: Client) -> None:
    value = pattern(16 * MIB)
    assert client.put("big", value)

    async def body() -> None:
        for turns in range(6):
            buffer = bytearray(len(value))
            task = asyncio.ensure_future(client.get_into_async("big", buffer))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            before = zlib.crc32(buffer)
            assert await client.exists_async("big")
            assert zlib.crc32(buffer) == before

    asyncio.run(body())
    assert client.get("big") == value


# --- outages ----------------------------------------------------------------------------------


def test_no_manager_is_a_transport_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simm.routing.MAP_TIMEOUT_S", 0.0)
    with socket.socket() as taken:  # bound but not listening: refused, by nobody else's mistake
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match=r"no manager answers .* start one with"):
            Client(f"127.0.0.1:{taken.getsockname()[1]}")


def test_without_the_manager_everything_goes_on(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, path=path, deadline_s=10.0) as client:
        assert client.put("before", b"v")
        cluster.kill("manager")
        until(lambda: client.stats()["manager"] != "connected", "the client notices")
        assert client.get("before") == b"v"
        assert client.put("after", b"v")
        assert client.exists_many(["before", "after", "never"]) == [True, True, False]
        assert client.delete("before")
        cluster.start_manager()
        until(lambda: client.stats()["manager"] == "connected", "the client finds the manager again")
        assert client.wait_ready()
        assert client.get("after") == b"v"
        assert client.stats()["outages"] == 0


def test_a_killed_server_is_misses_until_there_is_another(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="64M", heartbeat_ms=200)
    with Client(cluster.manager, path=path, deadline_s=2.0) as client:
        assert client.put("k", b"v")
        view = client.view("k")
        assert view is not None
        cluster.kill("dataserver")
        # Nothing raises. The mapped arena may answer until its heartbeat has been still for a while.
        assert client.get("k") in (b"v", None)
        assert client.put("new", b"v") is False
        assert client.delete("k") is False
        until(lambda: client.get("k") is None, "gets miss")
        assert client.get_into("k", bytearray(8)) is None
        assert client.exists("k") is False
        assert client.exists_many(["k"] * 40) == [False] * 40
        assert client.get_into_many(["k"] * 40, [bytearray(8)] * 40) == [None] * 40
        assert client.put_many(["a", "b"], [b"v", b"v"]) == [False, False]
        assert client.view("k") is None
        assert client.stats()["outages"] > 0
        assert bytes(view.data) == b"v"  # what was mapped stays mapped
        view.close()
        cluster.start_server()
        until(lambda: client.put("k", b"w"), "puts are stored again")
        assert client.get("k") == b"w"
        assert client.wait_ready()
        assert client.stats()["workers"][0]["path"] == path


def test_a_killed_worker_comes_back_with_all_values(make_cluster: Any, path: str) -> None:
    cluster = make_cluster(memory="64M")
    keys = [f"k{number}" for number in range(200)]
    with Client(cluster.manager, path=path, deadline_s=10.0) as client:
        assert all(client.put_many(keys, [key.encode() for key in keys]))
        os.kill(cluster.worker_stats()["pid"], signal.SIGKILL)
        until(lambda: client.put("after", b"v"), "puts are stored again")
        until(lambda: client.get_many(keys) == [key.encode() for key in keys], "all values are there")
        assert client.get("after") == b"v"
        with client.view("k7") as view:  # type: ignore[union-attr]
            assert view.data == b"k7"


def test_a_stopped_worker_costs_a_deadline_and_then_nothing(make_cluster: Any) -> None:
    """The breaker: the first put waits for its deadline, those after it fail without waiting."""
    cluster = make_cluster(memory="64M")
    with Client(cluster.manager, path="shm", deadline_s=0.5) as client:
        assert client.put("k", b"v")
        worker = cluster.worker_stats()["pid"]
        os.kill(worker, signal.SIGSTOP)
        try:
            assert client.put("k", b"w") is False
            failures = client.stats()["outages"]
            assert [client.put("k", b"w") for _ in range(1000)] == [False] * 1000
            # A thousand waits would have taken 500 s, and each would have been a failure of its own.
            assert client.stats()["outages"] - failures < 50
            assert client.get("k") in (b"v", b"w", None)
        finally:
            os.kill(worker, signal.SIGCONT)
        until(lambda: client.put("k", b"x"), "puts are stored again")
        assert client.get("k") == b"x"


# --- local clusters ---------------------------------------------------------------------------


def test_a_local_cluster_ends_with_its_client() -> None:
    with Client.local(memory="64M") as client:
        assert client.put("k", b"v")
        assert client.get("k") == b"v"
        pids = client._owned.pids
        folder = client._owned.folder

        def child() -> bool:
            found = client.get("k") == b"v"
            client.close()  # ends nothing of the parent's
            return found

        assert forked(child) == 0
        assert client.get("k") == b"v"
    assert len(pids) == 2
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not os.path.exists(folder)


def test_a_local_cluster_that_cannot_start_says_why() -> None:
    with pytest.raises(SimmError, match="dataserver did not start"):
        Client.local(memory="1M")


@pytest.mark.parametrize("dtype", ["datetime64[s]", "complex128", "float16", "bool", ">u4", "V6"])
def test_arrays_of_any_fixed_type_are_bytes(dtype: str) -> None:
    array = np.frombuffer(os.urandom(4800), np.uint8).view(dtype if dtype != "bool" else np.uint8)
    array = array.astype(bool) if dtype == "bool" else array
    assert bytes(view_of(array)) == array.tobytes()
    assert bytes(view_of(array.reshape(2, -1))) == array.tobytes()
    with pytest.raises(UsageError, match="contiguous"):
        view_of(array[::2])


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(UsageError, match="objects"):
        view_of(np.array([object()]))
