"""The commit ring: frames whole and broken, clients that write what they please, and wake-ups that get lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from simm.arena.hashing import Hasher
from simm.errors import RemoteProtocolError, TransportError
from simm.ipc import commit_ring
from simm.ipc.answer_wait import AnswerWait
from simm.ipc.commit_ring import BRIEF, HEAD, RING_BYTES, SLEEPING, SLOT_BYTES, SLOTS, TAIL, Ring
from simm.ipc.grant_pool import return_idle
from simm.ipc.session import WorkerSession
from simm.ipc.steps import first_over
from simm.net.allowance import at_most
from simm.net.channel import Refused
from simm.rpc import Flag, decode, encode, reply
from simm.wire import messages as M
from simm.wire.hello import client_hello
from simm.wire.messages import Status
from tests.support.client_values import forked
from tests.support.consistency import check
from tests.support.segments import expect_segv
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def pair() -> Iterator[tuple[Ring, Ring]]:
    client, fd = Ring.create()
    server = Ring.attach(fd)
    os.close(fd)
    yield client, server
    client.close()
    server.close()


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


# -- the structure ---------------------------------------------------------------------------------


def test_frames_pass_both_ways_in_order_round_and_round(pair: tuple[Ring, Ring]) -> None:
    client, server = pair
    read = 0
    for number in range(5 * SLOTS):
        assert server.next_request() is None
        for each in range(number % SLOTS + 1):
            client.post(encode(M.Ping(number * 100 + each), each))
        while (frame := server.next_request()) is not None:
            server.answer(reply(M.Pong(decode(frame).cookie), frame.request_id))
        for each in range(number % SLOTS + 1):
            assert client.words[HEAD] > read
            assert decode(client.reply(read)) == M.Pong(number * 100 + each)
            read += 1
    assert client.words[TAIL] == client.words[HEAD] == read


def test_the_largest_frame_fits_and_a_larger_one_is_refused(pair: tuple[Ring, Ring]) -> None:
    client, server = pair
    most = (SLOT_BYTES - len(encode(M.Unpin([])))) // 8
    frame = encode(M.Unpin(list(range(most))))
    assert SLOT_BYTES - 8 < len(frame) <= SLOT_BYTES
    client.post(frame)
    got = server.next_request()
    assert got is not None and decode(got) == M.Unpin(list(range(most)))
    with pytest.raises(RemoteProtocolError, match="does not fit the ring"):
        server.answer(bytes(SLOT_BYTES + 1))
    assert server.done == 0 and client.words[HEAD] == 0


@pytest.mark.parametrize("tail", [SLOTS + 1, 100, (1 << 64) - 1, 1 << 63])
def test_a_tail_that_jumps_is_refused(pair: tuple[Ring, Ring], tail: int) -> None:
    client, server = pair
    client.post(encode(M.Ping(1)))
    client.words[TAIL] = tail
    assert server.next_commit() is None
    with pytest.raises(RemoteProtocolError, match="ring tail"):
        server.next_request()


@pytest.mark.parametrize(
    "frame", [b"", b"x" * 64, encode(M.Ping(1))[:10], encode(M.Ping(1))[:8] + b"\xff" * 40, b"\xff" * SLOT_BYTES]
)
def test_garbage_is_refused(pair: tuple[Ring, Ring], frame: bytes) -> None:
    client, server = pair
    client.post(frame)
    assert server.next_commit() is None
    with pytest.raises(RemoteProtocolError):
        decode(server.next_request())  # type: ignore[arg-type]


def test_a_length_beyond_the_slot_is_refused(pair: tuple[Ring, Ring]) -> None:
    client, server = pair
    frame = bytearray(encode(M.Unpin([1, 2, 3])))
    frame[20:24] = (SLOT_BYTES).to_bytes(4, "little")
    client.post(bytes(frame))
    with pytest.raises(RemoteProtocolError, match=r"ring slot|unknown|body"):
        server.next_request()


def memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("size", "seals", "text"),
    [(RING_BYTES, 0, "not sealed"), (RING_BYTES, fcntl.F_SEAL_GROW, "not sealed"),
     (RING_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "not sealed"),
     (RING_BYTES - 1, SEALS, "bytes"), (RING_BYTES + 4096, SEALS, "bytes"), (0, SEALS, "bytes")],
)  # fmt: skip
def test_a_ring_that_could_be_cut_under_us_is_refused(size: int, seals: int, text: str) -> None:
    fd = memfd(size, seals)
    with contextlib.closing(os.fdopen(fd)), pytest.raises(RemoteProtocolError, match=text):
        Ring.attach(fd)


#: F_SEAL_FUTURE_WRITE, which Python's module does not have before 3.13.
FUTURE_WRITE = 0x10


@pytest.mark.parametrize("how", [FUTURE_WRITE, os.O_RDONLY], ids=["sealed", "read-only"])
def test_issue_a_ring_that_cannot_be_written_is_refused(how: int) -> None:
    """It was an error inside of the worker, with a traceback for each attempt."""
    fd = memfd(RING_BYTES, SEALS if how == os.O_RDONLY else SEALS | how)
    passed = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) if how == os.O_RDONLY else os.dup(fd)
    os.close(fd)
    with contextlib.closing(os.fdopen(passed, "rb")), pytest.raises(RemoteProtocolError, match="cannot be written"):
        Ring.attach(passed)


def test_something_that_is_no_memfd_is_refused() -> None:
    near, far = os.pipe()
    try:
        with pytest.raises(RemoteProtocolError, match="no memfd"):
            Ring.attach(near)
    finally:
        os.close(near)
        os.close(far)


# -- against a real worker -----------------------------------------------------------------------------


def put(session: WorkerSession, key: str, size: int) -> int:
    if session.pool.take(size) is None:
        session.ask([(size, 4)])
    else:
        raise AssertionError("the pool was not empty")
    grant = session.pool.take(size)
    assert grant is not None
    answer = session.exchange(M.Commit([(digest_of(key), grant[0], size, 0, 0, 0)], []))
    status: int = answer.statuses[0]
    return_idle(session)
    return status


def test_commits_go_by_ring_and_by_socket_alike(worker: WorkerThread) -> None:
    for ring in (True, False):
        session = worker.session(ring=ring)
        assert (session.ring is not None) == ring
        for number in range(3 * SLOTS):
            assert put(session, f"{ring} {number}", 4096) == Status.OK
        session.close()
    with worker.frozen() as store:
        assert store.table.entries == 6 * SLOTS
        check(store)
    assert worker.worker.rings.requests >= 6 * SLOTS


def test_a_long_line_of_requests_waits_for_room(worker: WorkerThread) -> None:
    """More requests than slots, none of their answers read in between."""
    session = worker.session()
    session.acquire()
    tickets = [session.submit_locked(M.Exists([digest_of(str(number))])) for number in range(5 * SLOTS)]
    assert all(session.wait_locked(ticket) == M.Statuses([Status.NOT_FOUND]) for ticket in tickets)
    session.lock.release()
    session.close()


def test_a_request_larger_than_a_slot_goes_by_socket(worker: WorkerThread) -> None:
    session = worker.session()
    digests = [digest_of(str(number)) for number in range(4000)]
    assert session.exchange(M.Exists(digests)) == M.Statuses([Status.NOT_FOUND] * 4000)
    assert session.exchange(M.Stats(0))
    session.close()


def test_issue_requests_are_counted_by_whichever_way_they_come(worker: WorkerThread) -> None:
    """Commits of one key by ring, which are most puts, were left out."""
    session = worker.session()
    with worker.frozen():
        before = worker.worker.stats()
    session.ask([(64, 100)])
    for number in range(100):
        grant = session.pool.take(64)
        assert grant is not None
        assert session.commit_one(digest_of(f"{number}"), grant[0], 64, 0, 0, 0, 0) == Status.OK
    with worker.frozen():
        more = {key: count - before[key] for key, count in worker.worker.stats().items() if key.endswith("requests")}
    assert more["requests"] == more["ring_requests"] >= 101
    session.close()


def hostile(worker: WorkerThread) -> tuple[WorkerSession, Ring]:
    """A session whose ring's requests are written by hand."""
    session = worker.session()
    assert session.ring is not None
    return session, session.ring


def ask(session: WorkerSession) -> None:
    """Kick, and find the connection closed."""
    with pytest.raises(TransportError):
        session.channel.call(M.Kick(0))


HOSTILE: dict[str, Callable[[Ring], None]] = {
    "tail ahead": lambda ring: ring.words.__setitem__(TAIL, SLOTS + 1),
    "tail far ahead": lambda ring: ring.words.__setitem__(TAIL, 1 << 40),
    "tail back": lambda ring: ring.words.__setitem__(TAIL, (1 << 64) - 1),
    "garbage": lambda ring: _ignore(ring.post(b"\xff" * 100)),
    "nothing": lambda ring: ring.words.__setitem__(TAIL, 1),
    "a hello": lambda ring: _ignore(ring.post(encode(client_hello(0, namespace="default")))),
    "a kick": lambda ring: _ignore(ring.post(encode(M.Kick(0)))),
    "a map": lambda ring: _ignore(ring.post(encode(M.Shards(9, b"", b"")))),
    "a ring": lambda ring: _ignore(ring.post(encode(M.RingAttach(RING_BYTES)))),
    "an answer too long": lambda ring: _ignore(ring.post(encode(M.Locate(0, [bytes(16)] * 1500)))),
    "too much": lambda ring: _ignore(ring.post(encode(M.Grant([(64, 1 << 31)])))),
}


def _ignore(_: object) -> None: ...


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_client_loses_its_session_and_nobody_else_anything(worker: WorkerThread, what: str) -> None:
    good = worker.session()
    assert put(good, "before", 4096) == Status.OK
    session, ring = hostile(worker)
    HOSTILE[what](ring)
    ask(session)
    assert put(good, "after", 4096) == Status.OK
    with worker.frozen() as store:
        check(store)
        assert worker.loop.handler_errors == 0 and worker.loop.protocol_errors == 1
    good.close()
    session.close()


def test_issue_a_tail_set_back_does_not_replay_old_commits_for_ever(worker: WorkerThread) -> None:
    """The one-key form was parsed without a look at the tail: old frames were served again and again."""
    good = worker.session()
    session, ring = hostile(worker)
    for number in range(SLOTS):
        assert put(session, f"{number}", 4096) == Status.OK
    served = worker.worker.rings.requests
    ring.words[TAIL] = ring.words[HEAD] - 1
    ask(session)
    assert put(good, "after", 4096) == Status.OK
    with worker.frozen() as store:
        assert worker.worker.rings.requests - served < 10
        check(store)
    good.close()


def test_issue_a_kick_serves_what_was_there_and_no_more(worker: WorkerThread) -> None:
    """A client that posts on while its kick is served must not keep the worker from everybody else."""
    session, ring = hostile(worker)
    with worker.frozen():
        frame = encode(M.Ping(1))
        real = worker.worker.rings._serve
        extra = [0]

        def serve(ring_: Ring, peer: object) -> None:
            real(ring_, peer)  # type: ignore[arg-type]
            if extra[0] < 1000:
                extra[0] += 1
                ring.post(frame)

        worker.worker.rings._serve = serve  # type: ignore[method-assign]
        ring.post(frame)
    assert isinstance(session.channel.call(M.Kick(1)), M.Done)
    with worker.frozen():
        assert extra[0] <= SLOTS
        extra[0] = 1000
    session.close(clean=False)


def test_a_kick_without_a_ring_closes(worker: WorkerThread) -> None:
    channel, _ = worker.hello()
    with pytest.raises(TransportError):
        channel.call(M.Kick(0))
    channel.close()


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_ring_comes_with_exactly_one_descriptor(worker: WorkerThread, count: int) -> None:
    channel, _ = worker.hello()
    ring, fd = Ring.create()
    with pytest.raises(TransportError):
        channel.call(M.RingAttach(RING_BYTES), fds=(fd,) * count)
    os.close(fd)
    ring.close()
    channel.close()


def test_descriptors_that_nobody_asked_for_are_closed(worker: WorkerThread) -> None:
    """Else a client could use up the worker's."""
    channel, _ = worker.hello()
    with worker.frozen():
        before = len(os.listdir("/proc/self/fd"))
    near, far = os.pipe()
    with contextlib.suppress(TransportError):
        for number in range(50):
            assert channel.call(M.Ping(number), fds=(near,) * 4) == M.Pong(number)
    os.close(near)
    os.close(far)
    channel.close()
    assert put(worker.session(), "after", 64) == Status.OK
    with worker.frozen():
        assert len(os.listdir("/proc/self/fd")) < before + 12  # a session's own few


def test_without_a_descriptor_to_spare_commits_go_by_socket(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_issue: the OSError went through to the engine."""

    def no_more() -> tuple[Ring, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Ring, "create", staticmethod(no_more))
    session = worker.session()
    assert session.ring is None and put(session, "k", 100) == Status.OK
    session.close()


# -- wake-ups --------------------------------------------------------------------------------------------


def test_a_lost_wake_up_costs_a_kick_and_never_a_hang(worker: WorkerThread) -> None:
    """The client saw the flag down, the worker saw no request, and both went to wait: the client kicks anyway."""
    session = worker.session()
    ring = session.ring
    assert ring is not None
    with worker.frozen():
        assert ring.words[SLEEPING] == 1  # poll_us=0: it always sleeps
        ring.words[SLEEPING] = 0  # what the client read before it posted
    doorbells = session.doorbells
    assert put(session, "k", 4096) == Status.OK
    assert session.doorbells > doorbells
    session.close()


def test_a_worker_that_polls_needs_no_kick_and_one_that_sleeps_gets_one() -> None:
    with WorkerThread(poll_us=2_000_000) as worker:
        if not worker.worker.rings.poll_s:
            pytest.skip("one CPU: a worker never polls")
        session = worker.session()
        ring = session.ring
        assert ring is not None
        assert put(session, "first", 4096) == Status.OK  # wakes it; from now on it polls for two seconds
        assert ring.words[SLEEPING] == 0
        session.acquire()
        ticket = session.submit_locked(M.Ping(5))
        while ring.words[HEAD] <= ticket:
            pass  # no kick is sent here
        assert session.wait_locked(ticket) == M.Pong(5)
        session.lock.release()
        session.close()


def test_what_is_posted_between_the_flag_and_the_last_look_is_served(worker: WorkerThread) -> None:
    session = worker.session()
    ring = session.ring
    assert ring is not None
    with worker.frozen():
        rings = worker.worker.rings
        peer = next(peer for peer in worker.loop.peers if getattr(peer.context, "ring", None) is not None)
        rings.active = [(peer.context.ring, peer)]
        ring.words[SLEEPING] = 0

        class Posting:
            """The client posts at the very moment at which the worker has raised the flag."""

            def __setitem__(self, at: int, value: int) -> None:
                words[at] = value
                if at == SLEEPING and value and words[TAIL] == 0:
                    ring.post(encode(M.Ping(9), 3))

            def __getitem__(self, at: int) -> int:
                word: int = words[at]
                return word

        words = peer.context.ring.words
        peer.context.ring.words = Posting()
        rings._sleep()
        peer.context.ring.words = words
        assert ring.words[HEAD] == 1 and decode(ring.reply(0)) == M.Pong(9)
        assert ring.words[SLEEPING] == 0 and rings.active  # it has work again
        rings.active.clear()
        ring.words[SLEEPING] = 1
        ring.done = 1
    session.close()


def test_two_hellos_and_requests_before_hello_close(worker: WorkerThread) -> None:
    channel, _ = worker.hello()
    with pytest.raises(TransportError):
        channel.call(M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, 0, 0, 0, "default", "", []))
    channel.close()
    for msg in (M.Grant([(1, 1)]), M.Commit([], []), M.Unpin([1]), M.Shards(1, b"", b"")):
        channel = worker.channel()
        with pytest.raises(TransportError):
            channel.call(msg)
        channel.close()
    channel = worker.channel()
    with pytest.raises(Refused, match="protocol"):
        channel.call(M.Hello(M.PROTOCOL_MAX + 1, M.PROTOCOL_MAX + 2, 0, 0, 0, "default", "", []))
    channel.close()


# -- batches for several workers -----------------------------------------------------------------------


def served(worker: WorkerThread, session: WorkerSession, number: int) -> bool:
    """Make an exchange as one worker's part of a batch."""
    ring = session.ring
    assert ring is not None
    with session.brief():
        assert ring.words[BRIEF] == 1
        msg = M.Exists([digest_of(str(number))])
        ticket = session.submit(msg)
        assert session.kick()
        assert first_over([AnswerWait(session, ticket)])
        assert session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND])
    return bool(ring.words[SLEEPING])


@pytest.mark.parametrize("brief", [True, False])
def test_nobody_polls_for_a_client_that_comes_briefly(brief: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, each of many workers would poll for as long as the visits to all others take."""
    if not brief:  # the control
        monkeypatch.setattr(WorkerSession, "brief", lambda _: contextlib.nullcontext())
        monkeypatch.setattr("tests.unit.ipc.test_commit_ring.BRIEF", SLEEPING)
    with WorkerThread(poll_us=60_000_000) as worker:
        if not worker.worker.rings.poll_s:
            pytest.skip("one CPU: a worker never polls")
        session = worker.session()
        ring = session.ring
        assert ring is not None
        assert served(worker, session, 0) == brief
        assert put(session, "polled for", 4096) == Status.OK
        assert ring.words[SLEEPING] == 0
        if brief:
            served(worker, session, 1)
            with session.brief():  # a worker that polls anyway stops when it has nothing left to do
                wait_until(lambda: bool(ring.words[SLEEPING]), "it sleeps")
            assert put(session, "after", 4096) == Status.OK and ring.words[SLEEPING] == 0
        session.close()


def test_a_kick_that_nobody_waits_for_is_answered_once(worker: WorkerThread) -> None:
    session = worker.session()
    ring = session.ring
    assert ring is not None
    msg = M.Exists([digest_of("k")])
    sent: list[object] = []
    submit = session.channel.submit

    def noted(msg: object, *, fds: tuple[int, ...] = ()) -> int:
        sent.append(msg)
        return submit(msg, fds=fds)

    session.channel.submit = noted  # type: ignore[method-assign]
    with worker.frozen():
        first = session.submit(msg)
        assert session.kick() and session.kick(), "the second one would change nothing"
        second = session.submit(msg)
        assert session.kick(), "nor does this one: it is served with the first"
        assert sent == [M.Kick(1)]
    wait_until(lambda: ring.words[HEAD] == 2, "both are served")
    third = session.submit(msg)
    assert session.kick() and sent == [M.Kick(1), M.Kick(3)]
    assert all(session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND]) for ticket in (first, second, third))
    assert not session._kicked and put(session, "k", 100) == Status.OK
    assert not session.channel._early
    session.close()


@pytest.mark.parametrize("how", ["the next kick", "the wait"])
def test_issue_a_kick_is_not_waited_for_once_the_ring_is_served(worker: WorkerThread, how: str) -> None:
    """The worker may be stopped between the ring and the answer to KICK. A short wait for that ended the session."""
    session = worker.session()
    msg = M.Exists([digest_of("k")])
    ticket = session.submit(msg)
    session.kick(always=True)
    wait_until(lambda: session.has_answer(ticket), "it is served")
    session.channel.disown(session._kicked)
    session._kicked = session.channel.next_id()  # of which no answer comes
    with at_most(0.2):
        if how == "the next kick":
            assert session.kick(always=True)
        assert session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND])
    assert not session.broken and put(session, "k", 100) == Status.OK
    session.close()


def test_a_kick_waits_for_no_other_thread(worker: WorkerThread) -> None:
    session = worker.session()
    msg = M.Exists([digest_of("k")])
    with worker.frozen():
        ticket = session.submit(msg)
        session.acquire()
        assert not session.kick()
        assert AnswerWait(session, ticket).descriptor() == -1, "the other one wakes the worker"
        session.lock.release()
    assert session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND])
    session.close()


@pytest.mark.parametrize("ring", [True, False])
def test_pushes_do_not_end_the_wait_for_an_answer(worker: WorkerThread, ring: bool) -> None:
    session = worker.session(ring=ring)
    msg = M.Exists([digest_of("k")])
    with worker.frozen():
        ticket = session.submit(msg)
        wait = AnswerWait(session, ticket)
        wait.descriptor()
        peer = next(peer for peer in worker.loop.peers if peer.context.session is not None)
        peer.sock.send(encode(M.Recall(5), 0, flags=Flag.PUSH))
        wait_until(lambda: bool(session.channel.has_input(0)), "it has come")
        wait.receive()
        assert not wait.ready() and session.pool.recalled == 5
    assert first_over([wait]) == [wait]
    assert session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND])
    session.close()


def test_the_wait_for_a_broken_session_is_over(worker: WorkerThread) -> None:
    session = worker.session()
    msg = M.Exists([digest_of("k")])
    with worker.frozen():
        ticket = session.submit(msg)
        session.channel.broken = "for a test"
    assert AnswerWait(session, ticket).ready()
    with pytest.raises(TransportError):
        session.answer(msg, ticket)
    session.close()


# -- forks -----------------------------------------------------------------------------------------------------


def scribbling_child(client: Ring) -> int:
    """The exit code of a forked child that overwrites all of its parent's ring that it can reach."""

    def overwrite() -> bool:
        expect_segv()
        for word in (TAIL, HEAD, SLEEPING, BRIEF):
            client.words[word] = (1 << 64) - 1
        client._map[:] = b"\xff" * RING_BYTES
        return True

    return forked(overwrite)


def test_a_forked_child_does_not_reach_its_parents_ring(pair: tuple[Ring, Ring]) -> None:
    """Neither by its words nor by its map: the child ends, the parent's next frames pass."""
    client, server = pair
    client.post(encode(M.Ping(1), 1))
    before = bytes(server._map)
    assert scribbling_child(client) == -signal.SIGSEGV
    assert bytes(server._map) == bytes(client._map) == before
    frame = server.next_request()
    assert frame is not None and decode(frame) == M.Ping(1)
    server.answer(reply(M.Pong(1), frame.request_id))
    assert decode(client.reply(0)) == M.Pong(1)


def test_control_a_ring_that_children_inherit_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_ring, "keep_from_forks", lambda _map: 0)
    client, fd = Ring.create()
    server = Ring.attach(fd)
    os.close(fd)
    try:
        client.post(encode(M.Ping(1), 1))
        assert scribbling_child(client) == 0
        with pytest.raises(RemoteProtocolError):
            server.next_request()
    finally:
        client.close()
        server.close()


def test_a_forked_child_does_not_reach_a_session_s_ring(worker: WorkerThread) -> None:
    """The ring that a session makes is one of those."""
    with contextlib.closing(worker.session()) as session:
        assert session.ring is not None
        assert scribbling_child(session.ring) == -signal.SIGSEGV
        session.ask([(64, 1)])
        number, offset, _ = session.pool.take(64) or (0, 0, 0)
        worker.segment.buf[offset : offset + 64] = bytes(64)
        assert session.commit_one(digest_of("k"), number, 64, 0, 0, 64, 0) == Status.OK
