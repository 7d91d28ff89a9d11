"""Ranges and pieces of values by RDMA, against a real worker, stream and endpoint, on a network in software."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.host.buffers import Span
from simm.rdma.api import READ, WRITE
from simm.sdk import rdma_get
from simm.sdk.ops import rdma_ranges
from tests.support.client_checks import check_staging
from tests.support.dose import dosed
from tests.support.fake_rdma_cluster import FakeRdmaCluster, path_of
from tests.support.invariants import InvariantViolation
from tests.support.rdma_script import KEYS, ROOM, finds_harm, reads, reuse_the_chunk, value_of

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("nothing_retired")


def memory_for(client: Client, rng: random.Random, length: int) -> Any:
    """Return a buffer of any kind with room for ``length`` bytes."""
    room = length + rng.choice((0, 0, 5))
    kind = rng.randrange(4)
    if kind == 0:
        return bytearray(room)
    if kind == 1:
        return np.zeros(room, np.uint8)
    pool = client.register(np.zeros(room + 9, np.uint8))
    return pool.part(rng.randrange(9), room) if kind == 2 else pool


def held(buffer: Any) -> bytes:
    return bytes(buffer.view() if isinstance(buffer, Span) else buffer)


def some_ranges(client: Client, rng: random.Random, value: bytes, count: int, most: int) -> list[tuple[int, int, Any]]:
    found = []
    for _ in range(count):
        offset = rng.randrange(len(value))
        length = rng.randint(1, min(len(value) - offset, most))
        found.append((offset, length, memory_for(client, rng, length)))
    return found


def check(value: bytes, ranges: list[tuple[int, int, Any]]) -> None:
    for offset, length, buffer in ranges:
        got = held(buffer)
        assert got[:length] == value[offset : offset + length]
        assert not any(got[length:]), "bytes beyond the range"


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("rails", [1, 2])
def test_ranges_of_all_sizes(monkeypatch: pytest.MonkeyPatch, windows: bool, rails: int) -> None:
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, rails=names, mine=names, size=64 * MIB, windows=windows) as cluster:
        client = cluster.rdma()
        rng = random.Random(rails)
        gets = 0
        for size in (1, 100, 5000, 70_000, 3 * MIB + 5):
            value = rng.randbytes(size)
            cuts = sorted(rng.choices(range(1, size), k=min(size - 1, 5))) if size > 1 else []
            pieces: list[Any] = [value[a:b] for a, b in zip([0, *cuts], [*cuts, size]) if a < b]
            if size % 2 == 0:
                pieces = [client.register(bytearray(piece)) for piece in pieces]
            assert client.put_gather("k", pieces)
            for count, most in ((1, size), (3, 4000), (40, 100), (2, size)):
                for _ in range(2):  # by its sets, then by its place
                    ranges = some_ranges(client, rng, value, count, most)
                    assert client.get_ranges("k", ranges) == size
                    check(value, ranges)
                    gets += 1
            whole = client.register(bytearray(size))
            assert client.get_ranges("k", [(0, size, whole)]) == size
            assert held(whole) == value
            gets += 1
        assert client.counters["rdma_gets"] == gets == client.counters["hits"]
        assert client.counters["rdma_puts"] == 5
        assert client.counters["rdma_fallbacks"] == 0
        check_staging(path_of(client).staging)


def test_a_batch_through_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of more than a block each, and of many keys at once, through two blocks and over two queue pairs."""
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB, piece_bytes=3 * MIB) as cluster:
        client = cluster.rdma(deadline_s=60.0)
        path_of(client).staging._limit = 2
        rng = random.Random(9)
        values = [rng.randbytes(rng.choice((10, 5000, 200_000, 2 * MIB + 1))) for _ in range(40)]
        keys = [f"k{number}" for number in range(40)]
        assert client.put_many(keys, values) == [True] * 40
        for count, most in ((1, 3 * MIB), (5, 1000), (3, MIB)):
            ranges = [some_ranges(client, rng, value, count, most) for value in values]
            got = client.get_ranges_many([*keys, "missing"], [*ranges, [(0, 1, bytearray(1))]])
            assert got == [*map(len, values), None]
            for value, each in zip(values, ranges):
                check(value, each)
        with pytest.raises(UsageError, match=f"has {len(values[0])} bytes"):
            client.get_ranges("k0", [(len(values[0]), 1, bytearray(1))])
        with pytest.raises(UsageError, match="has 10 bytes"):
            small = next(key for key, value in zip(keys, values) if len(value) == 10)
            client.get_ranges_many([small, "k1"], [[(0, 11, bytearray(11))], [(0, 1, bytearray(1))]])
        assert client.counters["rdma_fallbacks"] == 0
        check_staging(path_of(client).staging)


def test_pieces_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRdmaCluster(monkeypatch, rails=("a", "b"), mine=("c", "d"), size=64 * MIB) as cluster:
        client = cluster.rdma(deadline_s=60.0, checksum=True)
        rng = random.Random(4)
        expected: dict[str, bytes] = {}
        batch: list[list[Any]] = []
        for number in range(40):
            parts = [rng.randbytes(rng.choice((1, 100, 9000))) for _ in range(rng.randint(1, 6))]
            if number % 10 == 0:
                parts.append(rng.randbytes(2 * MIB + 3))
            kind = number % 3
            made: list[Any] = [client.register(bytearray(part)) if kind else part for part in parts]
            if kind == 2:
                made[0] = parts[0]  # not all of them are registered
            expected[f"k{number}"] = b"".join(parts)
            batch.append(made)
        assert client.put_gather_many(list(expected), batch) == [True] * 40
        assert client.get_many(list(expected)) == list(expected.values())
        assert client.counters["rdma_puts"] == 40 and client.counters["crc_errors"] == 0
        ranges = [(5, 10, bytearray(10)), (0, 5, bytearray(5))]
        assert client.get_ranges("k0", ranges) == len(expected["k0"])
        check(expected["k0"], ranges)
        check_staging(path_of(client).staging)


# -- a writer between the steps ----------------------------------------------------------------------------


class InRanges:
    """A client whose gets go by ranges: the second half of a value before the first, and its middle apart."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._router = client._router

    @staticmethod
    def ranges(sink: Any) -> list[tuple[int, int, Any]]:
        cuts = ((400, 300), (0, 200), (200, 200))
        if isinstance(sink, Span):
            return [(at, size, sink.part(at, size)) for at, size in cuts]
        return [(at, size, memoryview(sink)[at : at + size]) for at, size in cuts]

    def get_into(self, key: str, sink: Any) -> int | None:
        return self._client.get_ranges(key, self.ranges(sink))

    def get_into_many(self, keys: Any, sinks: Any) -> list[int | None]:
        return self._client.get_ranges_many(keys, [self.ranges(sink) for sink in sinks])


def storm(monkeypatch: pytest.MonkeyPatch, seed: int, rails: int = 1) -> int:
    """Read ranges while a writer works between any two steps; return the number of hits."""
    names = [f"r{number}" for number in range(rails)]
    with FakeRdmaCluster(monkeypatch, seed=seed, rails=names, mine=names, pieces=12) as cluster:
        client = cluster.rdma(deadline_s=20.0)
        sinks = [client.register(bytearray(ROOM)) if seed % 2 else bytearray(ROOM) for _ in KEYS]
        return reads(
            cluster, InRanges(client), seed, sinks,  # type: ignore[arg-type]
            lambda sink, size: held(sink)[:size],
        )  # fmt: skip


@pytest.mark.parametrize("rails", [1, 2])
def test_a_writer_between_all_steps(monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    assert sum(storm(monkeypatch, seed, rails) for seed in range(dosed(4, quick=1))) > dosed(50, quick=10)


def test_mutation_without_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_get, "confirmed", lambda *_: True)
    finds_harm(storm)


def late_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the READ of one range up until its chunk is another's, while all else goes on."""
    with FakeRdmaCluster(monkeypatch, pieces=4) as cluster:
        client, writer = cluster.rdma(deadline_s=20.0), cluster.client("shm")
        path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
        assert writer.put("k", value_of("k", 1, 700))
        sink = client.register(bytearray(700))
        ranges = InRanges.ranges(sink)
        assert client.get_ranges("k", ranges) == 700
        cluster.network.hold(lambda qp, op: op[0] != WRITE and op[3] == 300)
        steps = reuse_the_chunk(cluster, client, writer)
        sink.view()[:] = bytes(700)
        got = client.get_ranges("k", ranges)
        cluster.network.between = None
        assert next(steps) > 201
        if got is not None:
            raise InvariantViolation(f"believed: {bytes(sink.view()[:8])!r} and {bytes(sink.view()[-8:])!r}")


def test_a_range_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    late_range(monkeypatch)


def test_mutation_without_the_fence_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_ranges, "FENCED_READ", READ)
    with pytest.raises(InvariantViolation):
        late_range(monkeypatch)
