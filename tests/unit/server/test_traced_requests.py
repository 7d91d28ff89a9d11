"""TRACED at a worker and at a stream: what it changes, and what a client that sends garbage in it can do."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.errors import PeerError, RemoteProtocolError
from simm.ipc.commit_ring import SLOT_BYTES
from simm.ipc.session import WorkerSession
from simm.net.channel import Channel, greet
from simm.rpc import CODECS, OPCODES, Connection, Frame, decode, encode
from simm.server.requests import tracing
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.status import Status
from simm.wire.trace_messages import SPANS, SPANS_MAX, Timed, Traced, answer_in, named, request_in, timed, traced
from tests.support.fake_cluster import ALL, FakeCluster
from tests.support.wire_samples import sample
from tests.support.worker_thread import WAIT_S

TRACE = bytes(range(16))
DIGEST = b"d" * 16
VALUE = os.urandom(300_000)
DIGEST_OF_CLIENT = "k"


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(1) as running:
        running.settled({0: ALL})
        client = running.client("shm")
        assert client.put(DIGEST_OF_CLIENT, VALUE)
        yield running


@pytest.fixture
def worker(cluster: FakeCluster) -> Iterator[WorkerSession]:
    session = WorkerSession(cluster.nodes[0].info.uds, "default", WAIT_S)
    yield session
    session.close()


@pytest.fixture
def stream(cluster: FakeCluster) -> Iterator[Channel]:
    info = cluster.nodes[0].info
    with contextlib.closing(Channel.tcp(info.host, info.port, WAIT_S)) as channel:
        welcome = greet(channel, M.Service.STREAM, client_hello(M.Role.CLIENT, namespace="default"), "")
        assert welcome.paths & M.PathBit.TRACE
        yield channel


def still_serves(cluster: FakeCluster) -> bool:
    """Return whether the server goes on as if nothing had been."""
    got = [client.get(DIGEST_OF_CLIENT) for client in (cluster.client("shm"), cluster.client("tcp"))]
    return got == [VALUE] * 2


def digest(cluster: FakeCluster) -> bytes:
    return cluster.clients[0].digest(DIGEST_OF_CLIENT)


def test_a_worker_answers_with_what_it_took(worker: WorkerSession) -> None:
    assert worker.welcome.paths & M.PathBit.TRACE
    plain = worker.exchange(M.Exists([DIGEST]))
    answer = worker.exchange(traced(TRACE, M.Exists([DIGEST])))
    assert type(answer) is Timed and answer.pid == os.getpid() and answer_in(answer) == plain
    assert [SPANS[number] for number, _, _ in answer.spans] == ["decode", "look"]
    assert all(began <= ended for _, began, ended in answer.spans)
    for msg, name in ((M.Delete([DIGEST]), "delete"), (M.DeleteSized([(DIGEST, 5)]), "delete"),
                      (M.Locate(0, [DIGEST]), "look")):  # fmt: skip
        told = worker.exchange(traced(TRACE, msg))
        assert [SPANS[number] for number, _, _ in told.spans] == ["decode", name]
        assert answer_in(told) == worker.exchange(msg)


def test_an_error_comes_alone() -> None:
    refusal = M.Error("no"), Status.BAD_REQUEST
    carry_out = tracing.handler({OPCODES[M.Exists]: lambda *_: refusal})
    session: Any = None
    assert carry_out(session, traced(TRACE, M.Exists([DIGEST]))) == refusal


def test_an_answer_that_fits_the_ring_by_itself_only_comes_alone(
    worker: WorkerSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracing._ANSWER_BYTES_MAX < SLOT_BYTES
    monkeypatch.setattr(tracing, "_ANSWER_BYTES_MAX", 100)
    answer = worker.exchange(traced(TRACE, M.Exists([DIGEST] * 101)))
    assert type(answer) is M.Statuses and len(answer.statuses) == 101


def fetched(channel: Channel, number: int, size: int) -> tuple[Any, bytes, Any]:
    """Return FETCHED, the bytes and VERDICT."""
    head = channel.result(channel.wait(number))
    data = bytearray(size)
    channel.receive_bulk(memoryview(data))
    return head, bytes(data), channel.result(channel.wait(number))


@pytest.mark.parametrize("most", [len(VALUE), 5, 0], ids=["in pieces", "at once", "its size only"])
def test_a_stream_answers_as_without_and_then_says_what_it_took(
    cluster: FakeCluster, stream: Channel, most: int
) -> None:
    """A value that leaves in many pieces, and an answer that is one piece."""
    size = len(VALUE) if most == len(VALUE) else 0
    number = stream.submit(traced(TRACE, M.Fetch([(digest(cluster), most)])))
    head, data, verdict = fetched(stream, number, size)
    assert isinstance(head, M.Fetched) and data == VALUE[:size] and isinstance(verdict, M.Verdict)
    told = stream.result(stream.wait(number))
    assert type(told) is Timed and told.body == b"" and [SPANS[each[0]] for each in told.spans] == ["decode", "read"]
    # And the connection is as before: what follows has no TIMED.
    number = stream.submit(M.Fetch([(digest(cluster), most)]))
    fetched(stream, number, size)
    assert isinstance(stream.call(M.Ping(7)), M.Pong)


def test_a_store_is_answered_before_the_stream_says_what_it_took(stream: Channel) -> None:
    number = stream.next_id()
    frame = encode(traced(TRACE, M.Store([(DIGEST, len(VALUE), 0, 0, 0)])), number)
    stream.sock.sendall(frame + VALUE)
    statuses = stream.result(stream.wait(number))
    assert statuses == M.Statuses([0])
    assert type(stream.result(stream.wait(number))) is Timed
    assert isinstance(stream.call(M.Ping(7)), M.Pong)


def frames_of(channel: Channel, count: int) -> list[Frame]:
    """Return the next frames in the order in which they come."""
    conn, frames = Connection(), []
    while len(frames) < count:
        data = channel.sock.recv(1 << 16)
        assert data, "the stream has closed the connection"
        conn.receive_data(data)
        while len(frames) < count and (frame := conn.next_frame()) is not None:
            frames.append(frame)
    return frames


@pytest.mark.parametrize("size", [10, len(VALUE)], ids=["with its frame", "in pieces"])
@pytest.mark.parametrize("fetches", [False, True], ids=["PING", "FETCH"])
def test_issue_what_a_store_took_is_told_before_anything_else(
    cluster: FakeCluster, stream: Channel, size: int, fetches: bool
) -> None:
    """It came after the answer to a request that was on its way already, or in the middle of a FETCH's bare bytes."""
    msg = M.Fetch([(digest(cluster), len(VALUE))]) if fetches else M.Ping(7)
    one, two = stream.next_id(), stream.next_id()
    store = encode(traced(TRACE, M.Store([(DIGEST, size, 0, 0, 0)])), one)
    stream.sock.sendall(store + VALUE[:size] + encode(msg, two))
    frames = frames_of(stream, 3)
    assert [type(decode(frame)) for frame in frames] == [M.Statuses, Timed, M.Fetched if fetches else M.Pong]
    assert [frame.request_id for frame in frames] == [one, one, two]


def test_a_delete_and_an_exists_are_answered_as_without(stream: Channel) -> None:
    for msg, name in (
        (M.Exists([DIGEST] * 3), "look"), (M.Delete([DIGEST]), "delete"), (M.DeleteSized([(DIGEST, 7)]), "delete"),
    ):
        stream.call(msg)
        plain = stream.call(msg)  # nothing is there to be deleted any more
        number = stream.submit(traced(TRACE, msg))
        assert stream.result(stream.wait(number)) == plain
        told = stream.result(stream.wait(number))
        assert type(told) is Timed and told.body == b"" and [SPANS[each[0]] for each in told.spans] == ["decode", name]
        assert stream.call(msg) == plain and isinstance(stream.call(M.Ping(7)), M.Pong), "what follows has no TIMED"


def test_many_at_once_are_told_apart(cluster: FakeCluster, stream: Channel) -> None:
    numbers = [stream.submit(traced(TRACE, M.Fetch([(digest(cluster), 5)]))) for _ in range(50)]
    for number in numbers:
        fetched(stream, number, 0)
        assert type(stream.result(stream.wait(number))) is Timed


GARBAGE = [
    Traced(TRACE, OPCODES[Traced], encode(traced(TRACE, M.Ping(1)))[24:]), Traced(TRACE, OPCODES[M.Hello], b""),
    Traced(TRACE, 0, b""), Traced(TRACE, 0xFFFF, b"x" * 1000), Traced(bytes(16), OPCODES[M.Fetch], b"\xff" * 100),
    Traced(b"\n\x1b[2J" * 4, OPCODES[M.Commit], b"\xff" * 9), Traced(TRACE, OPCODES[M.Shards], b""),
    Traced(TRACE, OPCODES[M.Kick], b""), Traced(TRACE, OPCODES[M.RingAttach], b"\0" * 8),
]  # fmt: skip


@pytest.mark.parametrize("msg", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_costs_its_sender_the_connection(
    cluster: FakeCluster, worker: WorkerSession, stream: Channel, msg: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PeerError):
        worker.exchange(msg)
    with pytest.raises(PeerError):
        stream.call(msg)
    assert still_serves(cluster)
    assert not [record for record in caplog.records if "\x1b" in record.getMessage() or "\n" in record.getMessage()]


def test_any_message_in_it_is_answered_or_refused(cluster: FakeCluster) -> None:
    info = cluster.nodes[0].info
    rng = random.Random(7)
    for opcode in sorted(CODECS):
        inner = sample(CODECS[opcode].cls, rng)
        with contextlib.closing(Channel.tcp(info.host, info.port, WAIT_S)) as channel:
            greet(channel, M.Service.STREAM, client_hello(M.Role.CLIENT, namespace="default"), "")
            if opcode not in tracing.OF_STREAMS:
                with pytest.raises(PeerError):
                    channel.call(Traced(TRACE, opcode, encode(inner)[24:]))
    assert still_serves(cluster)


def test_mutation_without_the_check_a_request_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the list of requests is what refuses."""
    nested = GARBAGE[0]
    with pytest.raises(RemoteProtocolError, match="cannot be traced here"):
        request_in(nested, tracing.OF_STREAMS, 1)
    assert request_in(nested, {nested.opcode}, 1).opcode == OPCODES[Traced]


def test_a_client_that_goes_in_the_middle_leaves_nothing(cluster: FakeCluster) -> None:
    info = cluster.nodes[0].info
    for msg in (M.Store([(DIGEST, len(VALUE), 0, 0, 0)]), M.Fetch([(digest(cluster), len(VALUE))])):
        channel = Channel.tcp(info.host, info.port, WAIT_S)
        greet(channel, M.Service.STREAM, client_hello(M.Role.CLIENT, namespace="default"), "")
        channel.submit(traced(TRACE, msg))
        channel.close()
    assert still_serves(cluster)
    assert cluster.nodes[0].worker.worker.loop.handler_errors == 0


def test_before_hello_it_is_nothing(cluster: FakeCluster) -> None:
    info = cluster.nodes[0].info
    for channel in (Channel.tcp(info.host, info.port, WAIT_S), Channel.unix(info.uds, WAIT_S)):
        with contextlib.closing(channel), pytest.raises(PeerError):
            channel.call(traced(TRACE, M.Exists([DIGEST])))
    assert still_serves(cluster)


def test_what_is_believed_of_an_answer_is_bounded() -> None:
    answer = timed(1, [(0, 1, 2)] * 1000 + [(200, 1, 2)], M.Done(1))
    assert len(named(answer.spans)) == SPANS_MAX
    assert named([(200, 1, 2)]) == [("other", 1, 2)]
    with pytest.raises(RemoteProtocolError):
        answer_in(answer._replace(body=b""))
