"""Ranges and pieces of values by a client of real workers and streams: one version of a value, or a miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from simm.arena.layout import ENTRY_CRC
from simm.arena.reader import VECTOR_KEYS, ArenaReader, Unsettled
from simm.client import Client
from simm.errors import UsageError
from simm.ipc import get
from simm.ipc import session as session_module
from simm.ipc.counts import Word
from simm.ipc.tally import Tallies
from simm.sdk import reads
from simm.sdk import tcp as tcp_module
from simm.sdk.batch import Batch
from simm.sdk.ops.owners import Owners
from simm.sdk.ops.parts import ranges_of as ranges_of_value
from simm.server import stream as stream_module
from simm.server.stream import Stream
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.fake_cluster import ALL, FakeCluster

PATHS = ("shm", "tcp")
KIB = 1 << 10
SIZE = 300 * KIB


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    session_module.RETIRED.clear()
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        yield running
    session_module.RETIRED.clear()


def ranges_of(value: bytes, rng: random.Random, count: int) -> list[tuple[int, int, Any]]:
    made = []
    for _ in range(count):
        offset = rng.randrange(len(value))
        length = rng.randint(1, min(len(value) - offset, rng.choice((5, 5000, 70_000))))
        made.append((offset, length, bytearray(length + rng.choice((0, 7)))))
    return made


def check(value: bytes, ranges: list[tuple[int, int, Any]]) -> None:
    for offset, length, buffer in ranges:
        assert buffer == value[offset : offset + length] + bytes(len(buffer) - length)


@pytest.mark.parametrize("more", [{}, {"checksum": True}], ids=["plain", "checksum"])
def test_batches_of_all_sizes(cluster: FakeCluster, path: str, more: dict[str, Any]) -> None:
    """So many that they are found together, and that they take several exchanges by TCP."""
    client = cluster.client(path, **more)
    rng = random.Random(3)
    values = {f"k{number}": rng.randbytes(rng.choice((1, 100, 5000, 60_000, 400_000))) for number in range(30)}
    cuts = {key: [value[: len(value) // 3], value[len(value) // 3 :]] for key, value in values.items()}
    pieces = [[part for part in parts if part] for parts in cuts.values()]
    assert client.put_gather_many(list(values), pieces) == [True] * len(values)
    assert client.get_many(list(values)) == list(values.values())
    for count in (1, 3, 200):
        ranges = [ranges_of(value, rng, count) for value in values.values()]
        got = client.get_ranges_many([*values, "missing"], [*ranges, [(0, 1, bytearray(1))]])
        assert got == [*map(len, values.values()), None]
        for value, each in zip(values.values(), ranges):
            check(value, each)
    assert client.counters["hits"] == 4 * len(values)
    assert client.counters["misses"] == 3
    short = [(0, 1, bytearray(1)), (len(values["k0"]), 1, bytearray(b"\xee"))]
    last = bytearray(1)
    with pytest.raises(UsageError, match=f"of 'k0' has {len(values['k0'])} bytes, and a range of it ends at"):
        client.get_ranges_many(["k0", "k1"], [short, [(0, 1, last)]])
    assert short[0][2] == b"\0" and short[1][2] == b"\xee", "nothing is written of a value that is too short"
    assert last == values["k1"][:1], "the others are read"


@pytest.mark.parametrize("count", [1, 3, VECTOR_KEYS, 60])
def test_issue_the_bytes_that_are_counted_are_the_ranges(cluster: FakeCluster, path: str, count: int) -> None:
    """On this host they were the whole values of most batches."""
    client = cluster.client(path)
    keys = [f"k{number}" for number in range(count)]
    sizes = [4096 if number % 2 else SIZE for number in range(count)]
    assert client.put_many(keys, [bytes(size) for size in sizes]) == [True] * count
    ranges = [[(0, 100, bytearray(100)), (4000, 7 + number, bytearray(99))] for number in range(count)]
    for more in (0, 1):  # a key that is not stored
        before = client.stats()["paths"][path]["bytes_read"]
        wanted = [(1, 50, bytearray(50))]
        got = client.get_ranges_many([*keys, "missing"][: count + more], [*ranges, wanted][: count + more])
        assert got == [*sizes, None][: count + more]
        read = client.stats()["paths"][path]["bytes_read"] - before
        assert read == sum(107 + number for number in range(count))


def test_issue_the_bytes_of_ranges_that_are_read_from_a_pin(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = cluster.client("shm")
    assert client.put("k", bytes(SIZE)) and client.get_ranges("k", [(5, 20, bytearray(20))]) == SIZE
    before = client.stats()["paths"]["shm"]["bytes_read"]

    def changing(*_: Any) -> None:
        raise Unsettled

    monkeypatch.setattr(ArenaReader, "locate", changing)
    assert client.get_ranges("k", [(5, 20, bytearray(20))]) == SIZE
    assert client.counters["fallbacks"] == 1
    assert client.stats()["paths"]["shm"]["bytes_read"] - before == 20


@pytest.mark.parametrize("here", [True, False])
def test_issue_the_bytes_of_ranges_that_a_second_look_has_found(here: bool) -> None:
    tallies = Tallies()
    counters: dict[str, int] = {}
    routes: Any = None
    counts = memoryview(bytearray(8 * 1024)).cast("Q")
    sinks = [ranges_of_value([(0, 10, bytearray(10))]), ranges_of_value([(5, 20, bytearray(20))])]
    batch = Batch([bytes(16)] * 2, sinks)
    batch.results[:] = [4096, 5000]
    Owners(routes, counters, tallies).count_moved(counts if here else None, batch, (0, 1))
    counted = counts if here else tallies.tcp
    assert (counted[Word.MOVED_HITS], counted[Word.HIT_BYTES]) == (2, 30)


def test_checksums_of_values_in_pieces(cluster: FakeCluster, path: str) -> None:
    client = cluster.client(path, checksum=True)
    assert client.put_gather("k", [b"a" * 500, np.arange(500, dtype=np.int16), b"b"])
    whole = bytearray(1501)
    assert client.get_into("k", whole) == 1501
    reader = ArenaReader(cluster.nodes[0].worker.segment.name)
    found = reader.locate(client.digest("k"))
    assert found is not None and found.flags & ENTRY_CRC
    assert client.get_ranges("k", [(1500, 1, bytearray(1))]) == 1501
    reader.data[found.offset - reader.data_offset] ^= 1
    assert client.get_ranges("k", [(1500, 1, bytearray(1))]) is None, "the damage is in another range"
    assert client.counters["crc_errors"] == 1


# -- a writer in the middle -----------------------------------------------------------------------------


def overwriter(cluster: FakeCluster, client: Client) -> Callable[[], None]:
    """Return what replaces the value of "k" and gives its chunk to another one."""
    writer = cluster.client("shm")
    reader = ArenaReader(cluster.nodes[0].worker.segment.name)

    def overwrite() -> None:
        found = reader.locate(client.digest("k"))
        assert found is not None
        assert writer.put("k", b"n" * SIZE)
        start = found.offset - reader.data_offset
        reader.data[start : start + SIZE] = b"x" * SIZE  # as the chunk's next tenant does

    return overwrite


def read_while(cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int | None, list[set[int]]]:
    """Overwrite a value once, between the copies of its two ranges; return the result and what each of them has."""
    client = cluster.client(path)
    assert client.put("k", b"o" * SIZE)
    assert client.get("k") == b"o" * SIZE
    due = [overwriter(cluster, client)]
    half = SIZE // 2

    def between() -> None:
        if due:
            due.pop()()

    if path == "shm":
        scatter = reads.scatter

        def first_one_then_the_others(ranges: Any, *more: Any) -> None:
            parts = ranges.parts
            scatter(type(ranges)(parts[:1], ranges.least, half), *more)
            between()
            scatter(type(ranges)(parts[1:], ranges.least, half), *more)

        for module in (reads, get):
            monkeypatch.setattr(module, "scatter", first_one_then_the_others)
    else:
        pieces = stream_module.pieces

        def with_a_pause(*given: Any) -> Iterator[Any]:
            for number, part in enumerate(pieces(*given)):
                if number == 1:
                    between()
                yield part

        monkeypatch.setattr(stream_module, "pieces", with_a_pause)
    buffers = [bytearray(half), bytearray(half)]
    got = client.get_ranges("k", [(0, half, buffers[0]), (half, half, buffers[1])])
    assert not due, "the value was overwritten"
    return got, [set(buffer) for buffer in buffers]


def test_a_value_that_is_replaced_between_two_ranges(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_while(cluster, path, monkeypatch) == (SIZE, [set(b"n"), set(b"n")])


def test_mutation_without_the_last_check(
    cluster: FakeCluster, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the check of the entry after the last copy, parts of two values come back."""
    if path == "shm":
        monkeypatch.setattr(ArenaReader, "confirm", lambda *_: True)
    else:
        monkeypatch.setattr(Stream, "_judge", lambda *_: None)
    got, seen = read_while(cluster, path, monkeypatch)
    assert got == SIZE and seen[0] != seen[1]


def test_a_value_that_never_settles_is_read_from_a_pin(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt meets another value. What the worker pins cannot change."""
    client, writer = cluster.client("shm"), cluster.client("shm")
    assert client.put("k", bytes(4096))
    scatter, versions = reads.scatter, iter(range(1, 100))

    def late(ranges: Any, data: Any, *more: Any) -> None:
        if len(data) > 4096:  # the arena, not a view
            assert writer.put("k", bytes([next(versions)]) * 4096)
        scatter(ranges, data, *more)

    for module in (reads, get):
        monkeypatch.setattr(module, "scatter", late)
    buffers = [bytearray(100), bytearray(100)]
    assert client.get_ranges("k", [(0, 100, buffers[0]), (3996, 100, buffers[1])]) == 4096
    assert len(set(buffers[0]) | set(buffers[1])) == 1
    assert client.counters["fallbacks"] == 1


# -- a server that answers wrongly -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        M.Fetched([]), M.Fetched([(Status.OK, 0, 99, 0)]), M.Fetched([(Status.OK, 0, 0, 0)]),
        M.Fetched([(Status.OK, 0, 1 << 31, 0)]), M.Fetched([(Status.OK, 0, 100, 0)] * 2), M.Done(1),
        M.Fetched([(Status.OUT_OF_RANGE, 0, 100, 0)]),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_fit_what_was_asked(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """The exchange fails before a byte of it is taken for a value, and the path is given up."""
    client = cluster.client("tcp")
    assert client.put("k", bytes(100))

    def answers(stream: Stream, peer: Any, state: Any, request_id: int, msg: Any) -> None:
        peer.send_message(answer, request_id)

    monkeypatch.setattr(Stream, "_fetch_ranges", answers)
    buffer = bytearray(b"\xee" * 50)
    assert client.get_ranges("k", [(50, 50, buffer)]) is None
    assert buffer == b"\xee" * 50
    assert client.stats()["outages"] > 0


def test_small_ranges_are_received_together(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    client = cluster.client("tcp")
    value = random.Random(5).randbytes(SIZE)
    assert client.put("k", value)
    calls: list[int] = []
    receive = tcp_module.Channel.receive_bulk
    monkeypatch.setattr(
        tcp_module.Channel, "receive_bulk", lambda channel, view: (calls.append(len(view)), receive(channel, view))
    )
    ranges = [(at * 64, 64, bytearray(64)) for at in range(4000)]
    assert client.get_ranges("k", [*ranges, (0, 64 * KIB, bytearray(64 * KIB))]) == SIZE
    check(value, ranges)
    assert calls == [64 * 4000, 64 * KIB]
