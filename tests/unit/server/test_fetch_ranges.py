"""FETCH_RANGES at a real stream: the bytes that come back, when they count, and what costs the connection."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.config.tokens import Token, TokenRole
from simm.constants import RANGES_MAX
from simm.errors import TransportError
from simm.net.channel import Channel, greet
from simm.rpc import encode
from simm.server import stream as stream_module
from simm.server.stream import Stream
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import Role, Service, Status
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S, StreamThread, WorkerThread

MIB = 1 << 20
digest_of = Hasher("default")
SMALL, LARGE, GONE = digest_of("small"), digest_of("large"), digest_of("gone")
VALUES = {SMALL: random.Random(1).randbytes(1000), LARGE: random.Random(2).randbytes(3 * MIB)}
FREE = Token("a-token-that-is-not-bound", TokenRole.CLIENT, "free")
TEAM = Token("the-token-of-team-red", TokenRole.CLIENT, "red", {"default": None})


def put(channel: Channel, digest: bytes, value: bytes) -> None:
    number = channel.submit(M.Store([(digest, len(value), 0, 0, 0)]))
    channel.sock.sendall(value)
    assert channel.result(channel.wait(number)).statuses == [Status.OK]


@pytest.fixture(scope="module")
def stream() -> Iterator[StreamThread]:
    with WorkerThread(64 * MIB) as worker, StreamThread(worker.path) as made:
        channel = made.channel()
        for digest, value in VALUES.items():
            put(channel, digest, value)
        channel.close()
        yield made


def received(channel: Channel, number: int, asked: list[tuple[bytes, list[tuple[int, int]]]]) -> Any:
    """Return (status, length, the ranges' bytes) for each key, and the verdict."""
    fetched = channel.result(channel.wait(number))
    got = []
    for (_, ranges), (status, _flags, length, _crc) in zip(asked, fetched.entries, strict=True):
        pieces = [bytearray(size) for _, size in ranges] if status == Status.OK else []
        for piece in pieces:
            channel.receive_bulk(memoryview(piece))
        got.append((status, length, [bytes(piece) for piece in pieces]))
    return got, channel.result(channel.wait(number)).statuses


def message(asked: list[tuple[bytes, list[tuple[int, int]]]]) -> M.FetchRanges:
    return M.FetchRanges(
        0, [(digest, len(ranges)) for digest, ranges in asked], [each for _, ranges in asked for each in ranges]
    )


def wanted(asked: list[tuple[bytes, list[tuple[int, int]]]]) -> list[Any]:
    answers: list[Any] = []
    for digest, ranges in asked:
        value = VALUES.get(digest, b"")
        if not value:
            answers.append((Status.NOT_FOUND, 0, []))
        elif any(offset + size > len(value) for offset, size in ranges):
            answers.append((Status.OUT_OF_RANGE, len(value), []))
        else:
            answers.append((Status.OK, len(value), [value[offset : offset + size] for offset, size in ranges]))
    return answers


ASKED: list[list[tuple[bytes, list[tuple[int, int]]]]] = [
    [(SMALL, [(0, 1)])],
    [(SMALL, [(999, 1), (0, 1000), (5, 5), (5, 5)])],
    [(GONE, [(0, 1)]), (SMALL, [(0, 1000)]), (SMALL, [(1000, 1)]), (SMALL, [(7, 3), (999, 2)]), (SMALL, [(0, 3)])],
    [(LARGE, [(3 * MIB - 1, 1), (0, 3 * MIB)]), (SMALL, [(1, 1)])],
    [(LARGE, [(at * 700, 600) for at in range(RANGES_MAX)])],
    [(LARGE, [(0, 20_000), (9, 10), (20_000, 5), (100, 300_000), (5, 1)]), (LARGE, [(MIB, MIB)]), (GONE, [(0, 9)])],
    [],
]


@pytest.mark.parametrize("asked", ASKED)
def test_what_comes_back(stream: StreamThread, asked: list[tuple[bytes, list[tuple[int, int]]]]) -> None:
    channel = stream.channel()
    got, verdict = received(channel, channel.submit(message(asked)), asked)
    assert got == wanted(asked)
    assert verdict == [Status.OK] * len(asked)
    assert channel.call(M.Ping(7)) == M.Pong(7)
    channel.close()


def test_a_request_that_comes_byte_by_byte_and_several_at_once(stream: StreamThread) -> None:
    channel = stream.channel()
    number = channel.next_id()
    channel.begin()
    for byte in encode(message(ASKED[2]), number):
        channel.sock.sendall(bytes([byte]))
    assert received(channel, number, ASKED[2])[0] == wanted(ASKED[2])
    numbers = [channel.submit(message(asked)) for asked in ASKED]
    for number, asked in zip(numbers, ASKED):
        assert received(channel, number, asked)[0] == wanted(asked)
    channel.close()


@pytest.mark.parametrize(
    "msg",
    [
        M.FetchRanges(0, [(SMALL, 2)], [(0, 1)]),
        M.FetchRanges(0, [(SMALL, 1)], [(0, 0)]), M.FetchRanges(9, [(SMALL, 1)], [(0, 1)]),
        M.FetchRanges(0, [(SMALL, 2)], [(0, 1 << 31)] * 2), M.FetchRanges(0, [(SMALL, 0)], []),
    ],
)  # fmt: skip
def test_what_costs_the_connection(stream: StreamThread, msg: M.FetchRanges) -> None:
    channel = stream.channel()
    errors = stream.stream.stats()["protocol_errors"]
    with pytest.raises(TransportError):
        channel.call(msg)
    channel.close()
    assert stream.stream.stats()["protocol_errors"] == errors + 1


def test_before_hello_it_is_not_taken(stream: StreamThread) -> None:
    channel = stream.channel(hello=False)
    with pytest.raises(TransportError):
        channel.call(message(ASKED[0]))
    channel.close()


# -- values that change ---------------------------------------------------------------------------------

HALF = 12 * MIB


def changed(world: tuple[WorkerThread, StreamThread], token: Token) -> tuple[list[int], set[int], set[int]]:
    """Replace a value while its first range is being sent, and give its chunk to another one.

    Return the verdict, and the bytes of both ranges.
    """
    worker, stream = world
    digest = digest_of("k")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.connect(stream.address)
    other, slow = stream.channel(hello=False), Channel(sock, WAIT_S)
    for channel in (other, slow):
        greet(channel, Service.STREAM, client_hello(Role.CLIENT, namespace="default"), token.secret)
    put(other, digest, b"r" * (2 * HALF))
    asked = [(digest, [(0, HALF), (HALF, HALF)])]
    number = slow.submit(message(asked))
    wait_until(lambda: any(peer.out for peer in stream.loop.peers), "the stream waits for its reader")
    with worker.frozen() as store:
        start = store.table.entry(store.table.lookup(digest)).offset
    assert other.call(M.Delete([digest])).statuses == [Status.OK]
    with worker.frozen():  # as the next tenant of the chunk does
        worker.segment.mm[start : start + 2 * HALF] = b"b" * (2 * HALF)
    (got,), verdict = received(slow, number, asked)
    other.close()
    slow.close()
    return verdict, set(got[2][0]), set(got[2][1])


@pytest.fixture
def world() -> Iterator[tuple[WorkerThread, StreamThread]]:
    with WorkerThread(64 * MIB) as worker, StreamThread(worker.path, tokens=(FREE, TEAM)) as stream:
        yield worker, stream


@pytest.mark.parametrize("token", [FREE, TEAM], ids=["free", "bound"])
def test_ranges_of_a_value_that_changed_are_torn(world: tuple[WorkerThread, StreamThread], token: Token) -> None:
    """A bound client sees nothing of what came later: zeros."""
    verdict, _, second = changed(world, token)
    assert verdict == [Status.TORN]
    assert second == ({0} if token is TEAM else set(b"b"))


def test_mutation_without_the_verdict(
    world: tuple[WorkerThread, StreamThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "_judge", lambda *_: None)
    verdict, first, second = changed(world, FREE)
    assert verdict == [Status.OK] and first | second == set(b"rb"), "parts of two values"


def test_ranges_that_are_sent_in_turns(stream: StreamThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "TURN_S", -1.0)
    channel = stream.channel()
    for asked in ASKED[3:]:
        assert received(channel, channel.submit(message(asked)), asked)[0] == wanted(asked)
    channel.close()
