"""A large batch by TCP is shared out among connections: each value once, one deadline, a bound on connections."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from simm.client import Client
from simm.errors import TransportError
from simm.ipc.steps import Steps, finish, side_by_side
from simm.net.channel import Channel, ChannelWait
from simm.net.peer import Peer
from simm.sdk import tcp as tcp_module
from simm.sdk.batch import by_bytes
from simm.sdk.path import PathState
from simm.sdk.tcp import POOL_MAX, TcpPath
from simm.server.stream import Stream
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.cluster_clients import WAIT_S
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.waiting import wait_until

STREAMS = 4
#: Of values of three kinds: received together, in one piece, and in several.
SIZES = (1000, 40_000, 70_000, 150_000)
KEYS = [f"k{number}" for number in range(24)]
VALUES = [random.Random(key).randbytes(SIZES[number % len(SIZES)]) for number, key in enumerate(KEYS)]


@pytest.fixture(scope="module")
def world() -> Iterator[FakeCluster]:
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        yield running


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_module, "STREAM_BYTES", 100_000)
    monkeypatch.setattr(tcp_module, "PIECE_BYTES", 64 << 10)


@pytest.fixture
def connected(world: FakeCluster) -> Iterator[Callable[..., tuple[Client, TcpPath]]]:
    """``connected()``: a client that has all the connections it wants, and its path. What it put is stored."""
    with contextlib.ExitStack() as stack:

        def make(streams: int = STREAMS, **more: Any) -> tuple[Client, TcpPath]:
            client = stack.enter_context(contextlib.closing(world.client("tcp", tcp_streams=streams, **more)))
            assert client.wait_ready(WAIT_S)
            path = path_of(client)
            assert client.put_many(KEYS, VALUES) == [True] * len(KEYS)
            wait_until(lambda: idle(path) == streams, "all connections are made")
            return client, path

        yield make


def path_of(client: Client) -> TcpPath:
    assert client._router is not None
    (target,) = client._router.targets.values()
    assert target.tcp is not None
    return target.tcp


def idle(path: TcpPath) -> int:
    """Return how many connections there are, none of which is in use; -1 if some are."""
    return len(path._idle) if path._open == len(path._idle) and not path.connecting else -1


def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Peer, int]]:
    """Return a list of each FETCH and STORE from now on: its connection, and how many keys it names."""
    seen: list[tuple[Peer, int]] = []
    for name in ("_fetch", "_store"):
        real = getattr(Stream, name)

        def noted(self: Stream, peer: Peer, state: Any, number: int, msg: Any, real: Any = real) -> None:
            seen.append((peer, len(msg[0])))
            real(self, peer, state, number, msg)

        monkeypatch.setattr(Stream, name, noted)
    return seen


def get_all(client: Client) -> list[bool]:
    """Return for each key whether its value was read whole, into a buffer of its size."""
    buffers = [bytearray(len(value)) for value in VALUES]
    got = client.get_into_many(KEYS, buffers)
    return [length == len(value) and buffer == value for length, buffer, value in zip(got, buffers, VALUES)]


# -- sharing out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_all_of_it_in_order_and_about_equal(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 4096, rng.randrange(1 << 20), 1 << 24]) for _ in range(rng.randint(1, 40))]
    positions = sorted(rng.sample(range(len(sizes)), rng.randint(1, len(sizes))))
    count = rng.randint(1, 8)
    parts = by_bytes(positions, sizes, count)
    assert [position for part in parts for position in part] == positions
    assert len(parts) <= count and all(parts)
    of_all = [sizes[position] for position in positions]
    fair = sum(of_all) / count + max(of_all)
    assert all(sum(sizes[position] for position in part) <= fair for part in parts)


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_large_batch_goes_by_all_connections(
    connected: Callable[..., tuple[Client, TcpPath]], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = connected()
    seen = requests(monkeypatch)
    if call == "put":
        assert client.put_many(KEYS, VALUES) == [True] * len(KEYS)
    else:
        assert all(get_all(client))
    assert len({peer for peer, _ in seen}) == len(seen) == STREAMS
    assert sum(count for _, count in seen) == len(KEYS)
    assert idle(path) == STREAMS
    assert all(get_all(client))


def test_control_one_stream_is_one_connection(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = connected(1)
    seen = requests(monkeypatch)
    assert all(get_all(client))
    assert len(seen) == 1 and idle(path) == 1


def test_a_small_batch_goes_by_one(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = connected()
    seen = requests(monkeypatch)
    assert client.get_into_many(KEYS[:1] * 8, [bytearray(1000) for _ in range(8)]) == [1000] * 8
    assert len(seen) == 1


def test_one_key_leaves_the_other_connections_alone(connected: Callable[..., tuple[Client, TcpPath]]) -> None:
    """Its length is not known before, and might be worth several."""
    client, path = connected()
    others = path._idle[:-1]
    assert client.get(KEYS[0]) == VALUES[0]
    assert path._idle[:-1] == others and idle(path) == STREAMS


def test_a_batch_that_finds_no_further_connection_takes_what_there_is(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that takes no more connections costs no call anything."""
    client, path = connected()
    first = path._idle[0]
    for each in path._idle[1:]:
        path._end(each)
    path._idle = [first]
    tried: list[None] = []

    def refused(_until: float) -> Channel:
        tried.append(None)
        raise TransportError("no more")

    monkeypatch.setattr(path, "_make", refused)
    seen = requests(monkeypatch)
    assert all(get_all(client))
    wait_until(lambda: not path.connecting, "the attempt is over")
    assert all(get_all(client)) and len(seen) == 2
    assert len(tried) == 1, "the next attempt comes later"
    assert idle(path) == 1


def test_without_threads_the_connections_that_there_are_stay(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = connected()
    first = path._idle[0]
    for each in path._idle[1:]:
        path._end(each)
    path._idle = [first]
    start = threading.Thread.start

    def none_left(self: threading.Thread) -> None:
        if self.name == path.thread_name:
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert all(get_all(client))
    assert path.state is PathState.UP and path.down_reason is None and idle(path) == 1
    assert all(get_all(client)) and idle(path) == 1, "the next attempt comes later"
    path._further_at = 0.0
    assert all(get_all(client))
    wait_until(lambda: idle(path) == STREAMS, "all connections are made")


@pytest.mark.parametrize("released", [True, False])
def test_connections_that_pins_hold_do_not_count(
    connected: Callable[..., tuple[Client, TcpPath]], released: bool
) -> None:
    client, path = connected()
    pins = client.pin(KEYS)
    wait_until(lambda: not path.connecting, "no attempt is in progress")
    assert path._open == STREAMS - 1
    if released:
        pins.release()
        assert idle(path) == STREAMS
        return
    del pins  # as when a caller forgets them
    gc.collect()
    assert all(get_all(client))
    wait_until(lambda: idle(path) == STREAMS, "another one is made for it")


def test_many_threads_open_no_more_than_the_pool_keeps(connected: Callable[..., tuple[Client, TcpPath]]) -> None:
    client, path = connected(8)
    most: list[int] = []
    make = path._make

    def noted(until: float) -> Channel:
        made = make(until)
        most.append(path._open)
        return made

    path._make = noted  # type: ignore[method-assign]
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.extend(all(get_all(client)) for _ in range(5))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == [True] * 20
    # A call makes one where none is idle, and has as many as its batch wants at most. Who is fast has them.
    assert all(count <= POOL_MAX + len(threads) * 8 for count in most)
    wait_until(lambda: idle(path) >= 0, "all are back")
    assert idle(path) <= POOL_MAX


# -- faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 7])
def test_a_value_that_changes_is_requested_again(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Also if it does so several times running, as others may overwrite it."""
    client, _ = connected()
    torn = [client.digest(KEYS[at]) for at in (1, 20)] * times
    left = list(torn)
    judge = Stream._judge

    def once(self: Stream, sending: Any, position: int, digest: bytes, found: Any) -> None:
        if digest in left:
            left.remove(digest)
            sending.verdicts[position] = Status.TORN
        else:
            judge(self, sending, position, digest, found)

    monkeypatch.setattr(Stream, "_judge", once)
    seen = requests(monkeypatch)
    assert all(get_all(client)) and not left
    assert sum(count for _, count in seen) == len(KEYS) + len(torn)


@pytest.mark.parametrize("silent", [0, STREAMS - 1])
@pytest.mark.parametrize("call", ["_fetch", "_store"])
def test_a_silent_connection_costs_one_deadline(
    connected: Callable[..., tuple[Client, TcpPath]], call: str, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers on the others. The call fails as a whole, and leaves no connection in use."""
    client, path = connected(deadline_s=WAIT_S)
    path.deadline_s = 0.3
    mine = list(path._idle)
    for each in mine:
        each.deadline_s = 0.3
    real = getattr(Stream, call)
    peers: list[Peer] = []
    ends: list[float] = []

    def sometimes(self: Stream, peer: Peer, *arguments: Any) -> None:
        peers.append(peer)
        if len(peers) - 1 != silent:
            real(self, peer, *arguments)
        else:
            peer.pause(True)

    begin = Channel.begin

    def noted(self: Channel) -> None:
        begin(self)
        if self in mine:
            ends.append(self.until)

    with monkeypatch.context() as patched:
        patched.setattr(Stream, call, sometimes)
        patched.setattr(Channel, "begin", noted)
        assert not any(get_all(client) if call == "_fetch" else client.put_many(KEYS, VALUES))
    assert len(peers) == STREAMS, "nothing is asked twice"
    assert len(ends) == STREAMS and max(ends) == min(ends), "one deadline for all"
    wait_until(lambda: path._open == 0, "the path is given up, with all its connections")
    wait_until(lambda: client.put_many(KEYS, VALUES) == [True] * len(KEYS), "it is used again")
    assert all(get_all(client))


class _Interrupt(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("at", [1, 9])
def test_an_interrupted_batch_ends_what_it_has_in_flight(
    connected: Callable[..., tuple[Client, TcpPath]], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = connected()
    came: list[None] = []
    receive = Channel.receive_bulk

    def interrupted(self: Channel, target: memoryview) -> None:
        came.append(None)
        if len(came) == at:
            raise _Interrupt
        receive(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "receive_bulk", interrupted)
        with pytest.raises(_Interrupt):
            get_all(client)
    assert path._open == len(path._idle)
    assert all(get_all(client))


def test_connections_that_the_server_has_closed_are_replaced(
    world: FakeCluster, connected: Callable[..., tuple[Client, TcpPath]]
) -> None:
    client, path = connected()
    stale = list(path._idle)
    for each in stale:
        each.sock.shutdown(socket.SHUT_RDWR)
    assert all(get_all(client))
    assert not any(each in path._idle for each in stale)
    assert all(get_all(client)) and path._open == len(path._idle)


# -- a key that comes twice -----------------------------------------------------------------------------------


def twice(client: Client, monkeypatch: pytest.MonkeyPatch) -> bytes | None:
    """Put a key twice in one batch; return its value then. The server takes the first STORE after all others."""
    real = Stream._store
    stores: list[int] = []
    ended: list[int] = []
    answer = Peer.send_message

    def late(self: Stream, peer: Peer, state: Any, number: int, msg: M.Store) -> None:
        stores.append(number)
        mine = len(stores)

        def begin() -> None:
            if mine == 1 and len(ended) < len(stores) - 1:
                self.loop.call_later(0.001, begin)
                return
            real(self, peer, state, number, msg)
            peer.pause(False)

        peer.pause(True)
        self.loop.call_later(0.1 if mine == 1 else 0.0, begin)  # for a moment: all STOREs leave at once

    def answered(self: Peer, msg: Any, number: int = 0, *, status: int = 0) -> None:
        if isinstance(msg, M.Statuses):
            ended.append(number)
        answer(self, msg, number, status=status)

    with monkeypatch.context() as patched:
        patched.setattr(Stream, "_store", late)
        patched.setattr(Peer, "send_message", answered)
        values = [b"a" * 150_000, *VALUES[1:-1], b"b" * 150_000]
        assert all(client.put_many([KEYS[0], *KEYS[1:-1], KEYS[0]], values))
    return client.get(KEYS[0])


def test_of_a_key_that_comes_twice_the_last_value_stays(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = connected()
    assert twice(client, monkeypatch) == b"b" * 150_000


def test_control_shared_out_the_first_may_stay(
    connected: Callable[..., tuple[Client, TcpPath]], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = connected()
    monkeypatch.setattr(tcp_module, "_repeats", lambda _entries: False)
    assert twice(client, monkeypatch) == b"a" * 150_000


# -- several pieces of work as one ------------------------------------------------------------------------------


def read_all(channel: Channel, count: int) -> Steps[bytes]:
    """Read single bytes, in steps."""
    got = b""
    while len(got) < count:
        yield ChannelWait(channel, 0)
        got += channel.sock.recv(1)
    return got


@contextlib.contextmanager
def lines(count: int) -> Iterator[tuple[list[Channel], list[socket.socket]]]:
    pairs = [socket.socketpair() for _ in range(count)]
    channels = [Channel(near, WAIT_S) for near, _ in pairs]
    for channel in channels:
        channel.begin()
    try:
        yield channels, [far for _, far in pairs]
    finally:
        for channel, (_, far) in zip(channels, pairs):
            channel.close()
            far.close()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drive", ["finish", "over", "early"])
def test_works_side_by_side_have_the_results_of_each(seed: int, drive: str) -> None:
    """Whoever drives them: it waits for each, looks first, or resumes them too early."""
    rng = random.Random(seed)
    wanted = [rng.randbytes(rng.randint(0, 12)) for _ in range(rng.randint(1, 6))]
    with lines(len(wanted)) as (channels, fars):
        order = [at for at, data in enumerate(wanted) for _ in data]
        rng.shuffle(order)
        left = [iter(data) for data in wanted]

        def send(numbers: Sequence[int]) -> None:
            for at in numbers:
                fars[at].sendall(bytes([next(left[at])]))

        works = side_by_side([read_all(channel, len(data)) for channel, data in zip(channels, wanted)])
        if drive == "finish":
            sender = threading.Thread(target=send, args=(order,))
            sender.start()
            assert finish(works) == wanted
            sender.join()
            return
        try:
            wait = next(works)
            while True:
                if order and (drive == "over" or rng.random() < 0.3):
                    number = wait.descriptor()
                    send([order.pop()])
                    assert number >= 0 and wait.ready()
                wait = works.send(True)
        except StopIteration as end:
            assert end.value == wanted and not order


def test_the_error_of_one_closes_the_others() -> None:
    with lines(3) as (channels, fars):
        closed: list[int] = []

        def watched(at: int) -> Steps[bytes]:
            try:
                return (yield from read_all(channels[at], 1))
            finally:
                closed.append(at)

        def fails() -> Steps[bytes]:
            yield ChannelWait(channels[2], 0)
            raise TransportError("lost")

        fars[2].sendall(b"x")
        with pytest.raises(TransportError, match="lost"):
            finish(side_by_side([watched(0), watched(1), fails()]))
        assert sorted(closed) == [0, 1]
