"""What a client that is bound to a namespace gets of a chunk that changes hands while it is sent: nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from simm.config.tokens import Token, TokenRole
from simm.net.channel import Channel, greet
from simm.server.stream import SMALL_ANSWER_BYTES, TOGETHER_BYTES, Stream
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import Role, Service, Status
from tests.support.store_world import digest_of
from tests.support.waiting import wait_until
from tests.support.worker_thread import WAIT_S, StreamThread, WorkerThread

FREE = Token("a-token-that-is-not-bound", TokenRole.CLIENT, "free")
TEAM = Token("the-token-of-team-red", TokenRole.CLIENT, "red", {"red": None})
MIB = 1 << 20
LARGE = 24 * MIB


@contextlib.contextmanager
def connected(stream: StreamThread, token: Token, *, narrow: bool = False) -> Iterator[Channel]:
    sock = socket.socket()
    if narrow:  # before connect, so that the window stays small
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.connect(stream.address)
    with contextlib.closing(Channel(sock, WAIT_S)) as channel:
        greet(channel, Service.STREAM, client_hello(Role.CLIENT, namespace="red"), token.secret)
        yield channel


@pytest.fixture
def world() -> Iterator[tuple[WorkerThread, StreamThread]]:
    with WorkerThread(64 * MIB) as worker, StreamThread(worker.path, tokens=(FREE, TEAM)) as stream:
        yield worker, stream


def put(channel: Channel, value: bytes) -> None:
    number = channel.submit(M.Store([(digest_of("k"), len(value), 0, 0, 0)]))
    channel.sock.sendall(value)
    assert channel.result(channel.wait(number)).statuses == [Status.OK]


@pytest.mark.quick
@pytest.mark.parametrize("token", [TEAM, FREE], ids=["bound", "control"])
def test_a_slow_reader_sees_no_later_value(world: tuple[WorkerThread, StreamThread], token: Token) -> None:
    """It deletes its own value while that is sent. The control: who may read all namespaces sees what came then."""
    worker, stream = world
    with connected(stream, token) as other, connected(stream, token, narrow=True) as slow:
        put(other, b"r" * LARGE)
        number = slow.submit(M.Fetch([(digest_of("k"), LARGE)]))
        wait_until(lambda: any(peer.out for peer in stream.loop.peers), "the stream waits for its reader")
        with worker.frozen() as store:
            start = store.table.entry(store.table.lookup(digest_of("k"))).offset
        assert other.call(M.Delete([digest_of("k")])).statuses == [Status.OK]
        with worker.frozen() as store:  # as another namespace's put does
            worker.segment.mm[start : start + LARGE] = b"b" * LARGE
        fetched = slow.result(slow.wait(number))
        assert fetched.entries[0][0] == Status.OK
        got = bytearray(LARGE)
        slow.receive_bulk(memoryview(got))
        assert slow.result(slow.wait(number)).statuses == [Status.TORN]
    assert got.count(b"r") > 0
    assert (b"b" in got) is (token is FREE), "bytes of another namespace"


@pytest.mark.quick
@pytest.mark.parametrize("turn_s", [-1.0, 60.0], ids=["one piece a turn", "control"])
def test_a_reader_that_keeps_up_does_not_keep_the_loop(
    world: tuple[WorkerThread, StreamThread], turn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes all at once: the value is sent in turns nevertheless, and whole."""
    _, stream = world
    monkeypatch.setattr("simm.server.stream.TURN_S", turn_s)
    turns: list[object] = []
    pump_on = Stream._pump_on
    monkeypatch.setattr(Stream, "_pump_on", lambda *given: (turns.append(given), pump_on(*given)))
    value = bytes(range(256)) * (MIB // 512)
    with connected(stream, TEAM) as channel:
        put(channel, value)
        number = channel.submit(M.Fetch([(digest_of("k"), len(value))]))
        assert channel.result(channel.wait(number)).entries[0][0] == Status.OK
        got = bytearray(len(value))
        channel.receive_bulk(memoryview(got))
        assert channel.result(channel.wait(number)).statuses == [Status.OK]
    assert got == value
    assert bool(turns) is (turn_s < 0)


@pytest.mark.quick
@pytest.mark.parametrize("token", [TEAM, FREE], ids=["bound", "control"])
def test_a_small_value_that_changed_is_not_sent(
    world: tuple[WorkerThread, StreamThread], token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stream = world
    with connected(stream, token) as channel:
        put(channel, b"r" * 100)
        monkeypatch.setattr(Stream, "_judge", _torn)
        number = channel.submit(M.Fetch([(digest_of("k"), 100)]))
        assert channel.result(channel.wait(number)).entries[0][0] == Status.OK
        got = bytearray(100)
        channel.receive_bulk(memoryview(got))
        assert channel.result(channel.wait(number)).statuses == [Status.TORN]
    assert bytes(got) == (bytes(100) if token is TEAM else b"r" * 100)


@pytest.mark.quick
def test_each_of_many_small_values_has_a_verdict(
    world: tuple[WorkerThread, StreamThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are sent together, but for the large one in the middle; what changed is told of each."""
    sizes = [TOGETHER_BYTES - 1] * (SMALL_ANSWER_BYTES // TOGETHER_BYTES + 2)
    sizes[len(sizes) // 2] = TOGETHER_BYTES
    digests = [digest_of(f"k{number}") for number in range(len(sizes))]
    _, stream = world
    with connected(stream, FREE) as channel:
        for digest, size in zip(digests, sizes):
            number = channel.submit(M.Store([(digest, size, 0, 0, 0)]))
            channel.sock.sendall(bytes(size))
            assert channel.result(channel.wait(number)).statuses == [Status.OK]
        monkeypatch.setattr(Stream, "_judge", _torn)
        number = channel.submit(M.Fetch(list(zip(digests, sizes))))
        assert {entry[0] for entry in channel.result(channel.wait(number)).entries} == {Status.OK}
        channel.receive_bulk(memoryview(bytearray(sum(sizes))))
        assert channel.result(channel.wait(number)).statuses == [Status.TORN] * len(sizes)


def _torn(_self: Stream, sending: object, position: int, *_: object) -> None:
    sending.verdicts[position] = Status.TORN  # type: ignore[attr-defined]
