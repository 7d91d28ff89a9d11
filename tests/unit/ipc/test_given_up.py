"""What a client has given up is not stored late: somebody may have put a newer value in its place since."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.errors import DeadlineError, RemoteProtocolError, TransportError
from simm.host.buffers import Copier
from simm.ipc import answer_wait
from simm.ipc.answer_wait import collect, ending, take
from simm.ipc.commit_ring import HEAD, TAIL, Ring
from simm.ipc.grant_pool import GrantTuple
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.net.allowance import at_most
from simm.rpc import encode
from simm.sdk.writes import Puts
from simm.server import rdma_endpoint, worker_session
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.endpoint_thread import EndpointThread, RawConnection
from tests.support.fake_fabric import FakeNetwork
from tests.support.newer_value import KEY, OLD, OTHER, Newer, commit, digest_of, filled
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import StreamThread, WorkerThread

SHORT_S = 0.1


@pytest.fixture(params=[0, 200])
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerThread]:
    with WorkerThread(poll_us=request.param) as running:
        yield running


def held(session: WorkerSession) -> Callable[[], None]:
    """Another thread waits for the worker, with the session's lock, until the result is called."""
    has, over = threading.Event(), threading.Event()

    def hold() -> None:
        with session.lock:
            has.set()
            over.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(WAIT_S)

    def end() -> None:
        over.set()
        thread.join(WAIT_S)

    return end


def wait_all(session: WorkerSession, ticket: int) -> None:
    """As a batch ends."""
    with ending(session, [(ticket, [0])], [], [0]):
        pass


class Interrupted(Exception):
    """Of a signal handler."""


# -- by a ring ----------------------------------------------------------------------------------------


def by_commit_one(session: WorkerSession, grant: GrantTuple) -> None:
    session.commit_one(KEY, grant[0], len(OLD), 0, 0, len(OLD), 0)


def by_batch(session: WorkerSession, grant: GrantTuple) -> None:
    wait_all(session, session.submit(commit(KEY, grant, OLD)))


def by_exchange(session: WorkerSession, grant: GrantTuple) -> None:
    session.exchange(commit(KEY, grant, OLD))


def behind_another_thread(session: WorkerSession, grant: GrantTuple) -> None:
    """Its request is posted; another thread has the session for longer than its call has left."""
    ticket = session.submit(commit(KEY, grant, OLD))
    session.kick(always=True)
    end = held(session)
    try:
        wait_all(session, ticket)
    finally:
        end()


def with_more_to_commit(session: WorkerSession, grant: GrantTuple) -> None:
    """A frame of a batch is posted, another one is copied when another thread takes the session."""
    session.pool.add([grant])
    count = 20
    ends: list[Callable[[], None]] = []
    submit = session.submit

    def held_afterwards(msg: Any, *more: Any) -> int:
        ticket = submit(msg, *more)
        if isinstance(msg, M.Commit) and not ends:
            session.kick(always=True)
            ends.append(held(session))
        return ticket

    session.submit = held_afterwards  # type: ignore[method-assign]
    digests = [KEY, *(digest_of(f"{number}") for number in range(count))]
    statuses = [int(Status.UNAVAILABLE)] * len(digests)
    try:
        ShmPut(Copier(1), False).put_many(session, digests, [memoryview(OLD)] * len(digests), range(21), statuses)
    finally:
        assert ends and statuses[0] == Status.UNAVAILABLE
        ends[0]()


def when_another_thread_broke_it(session: WorkerSession, grant: GrantTuple) -> None:
    ticket = session.submit(commit(KEY, grant, OLD))
    session.kick(always=True)
    with pytest.raises(TransportError):
        session.channel.call(M.Ping(1))
    wait_all(session, ticket)


def when_another_thread_closed_it(session: WorkerSession, grant: GrantTuple) -> None:
    """As the client's close() does, or the first thread that meets a broken session."""
    ticket = session.submit(commit(KEY, grant, OLD))
    session.kick(always=True)
    session.pool.clear()
    closing = threading.Thread(target=session.close, kwargs={"clean": False})
    closing.start()
    closing.join(WAIT_S)
    wait_all(session, ticket)


def interrupted(session: WorkerSession, grant: GrantTuple) -> None:
    """The wait ends with the exception of a signal handler."""

    def raise_it(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, SHORT_S)
    try:
        with at_most(WAIT_S):
            by_commit_one(session, grant)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def steps_that_are_closed(session: WorkerSession, grant: GrantTuple) -> None:
    """A delete of a call to several servers ends while it waits, as something is raised elsewhere in the call."""
    puts = Puts.__new__(Puts)
    target: Any = SimpleNamespace(session=session, tcp=None)
    steps = puts._ask([M.Delete([KEY])], target, True, lambda _: iter(()))  # type: ignore[arg-type,return-value]
    next(steps)
    steps.close()
    raise TransportError("as its caller hears it")


WAYS = [
    by_commit_one, by_batch, by_exchange, behind_another_thread, with_more_to_commit, when_another_thread_broke_it,
    when_another_thread_closed_it, interrupted, steps_that_are_closed,
]  # fmt: skip


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("give_up", WAYS)
def test_issue_what_was_given_up_does_not_replace_a_newer_value(
    worker: WorkerThread, give_up: Callable[[WorkerSession, GrantTuple], None], ring: bool
) -> None:
    """Not through the ring, although the session may still be open when its caller hears that the put has failed."""
    first, newer = worker.session(ring=ring), Newer(worker)
    old = filled(first, OLD)
    with worker.frozen():
        newer.ring()
        with at_most(SHORT_S), pytest.raises((TransportError, Interrupted)):
            give_up(first, old)
        assert first.broken
        newer.put()
    newer.check()
    first.close(clean=False)
    wait_until(lambda: first.session not in worker.worker.peers, "the first session has ended")
    newer.check()
    assert worker.loop.handler_errors == worker.loop.protocol_errors == 0
    newer.session.close()
    with worker.frozen() as store:
        store.apply_pending()
        check(store)


@pytest.mark.parametrize("answered", [True, False])
def test_issue_a_session_is_not_given_up_for_what_the_worker_has_done(worker: WorkerThread, answered: bool) -> None:
    """With many threads one of them may not get the session in time. The worker had answered it long ago."""
    with_others = worker.session()
    grants = [filled(with_others, OLD) for _ in range(2)]
    request = commit(KEY, grants[0], OLD)
    if answered:
        ticket = with_others.submit(request)
        with_others.kick(always=True)
        ring = with_others.ring
        assert ring is not None
        wait_until(lambda: ring.words[HEAD] > ticket, "an answer")
    with worker.frozen():
        if not answered:
            ticket = with_others.submit(request)
        end = held(with_others)
        try:
            with at_most(SHORT_S), pytest.raises(TransportError):
                wait_all(with_others, ticket)
        finally:
            end()
    assert bool(with_others.broken) is not answered
    if answered:
        assert with_others.commit_one(OTHER, grants[1][0], len(OLD), 0, 0, len(OLD), 1) == Status.OK
        assert not with_others.frames and not with_others.forsaken, "what nobody waits for is taken, too"
    with_others.close(clean=answered)


@pytest.mark.parametrize("taken_in", [False, True])
@pytest.mark.parametrize("by_ring", [False, True])
def test_issue_grants_that_nobody_waits_for_are_not_lost(worker: WorkerThread, by_ring: bool, taken_in: bool) -> None:
    """They were held and never used for as long as the session lived: by socket, or taken in by another thread."""
    session = worker.session()
    count = 20 if by_ring else 1100  # more than an answer by ring has room for
    ticket = session.submit(M.Grant([(len(OLD), count)]))
    assert (ticket >= 0) is by_ring
    session.kick(always=True)
    wait_until(lambda: session.has_answer(ticket), "an answer")
    if taken_in:
        session.exchange(M.Exists([KEY]))
        session.maintain()
        assert session.frames or session.channel._early
    if by_ring:
        answer_wait.forsake(session, [ticket])
    else:
        end = held(session)
        try:
            with at_most(SHORT_S), pytest.raises(TransportError):
                answer_wait.collect_grants(session, [(ticket, count)])
        finally:
            end()
    session.exchange(M.Exists([KEY]))
    session.maintain()
    assert session.pool.count(len(OLD)) >= count
    assert not session.frames and not session.channel._early and not session.forsaken and not session.channel._disowned
    session.close()
    with worker.frozen() as store:
        check(store)


def test_an_answer_that_another_thread_has_taken_in_needs_no_lock(worker: WorkerThread) -> None:
    session = worker.session()
    grants = [filled(session, OLD) for _ in range(2)]
    tickets = [session.submit(commit(digest, grant, OLD)) for digest, grant in zip((KEY, OTHER), grants)]
    assert take(session, tickets[1]).statuses == [Status.OK]
    end = held(session)
    try:
        with at_most(WAIT_S):
            assert take(session, tickets[0]).statuses == [Status.OK]
    finally:
        end()
    session.close()


def test_issue_an_answer_is_not_taken_twice(worker: WorkerThread) -> None:
    """A batch that fails after the first of two answers takes what is left, and no KeyError reaches the engine."""
    session = worker.session()
    grants = [filled(session, OLD) for _ in range(2)]
    statuses = [int(Status.UNAVAILABLE)] * 2
    in_flight = [(session.submit(commit(KEY, grants[0], OLD)), [0])]
    session.exchange(M.Locate(0, [KEY]))  # as another thread that takes in the first answer
    with worker.frozen():
        in_flight.append((session.submit(commit(OTHER, grants[1], OLD)), [1]))
        end = held(session)
        try:
            with at_most(SHORT_S), pytest.raises(DeadlineError):
                collect(session, in_flight, statuses)
        finally:
            end()
        assert statuses == [Status.OK, Status.UNAVAILABLE]
    with ending(session, in_flight, [], statuses):
        pass
    assert statuses == [Status.OK, Status.OK] and not session.broken
    session.close()


def test_posting_into_an_abandoned_ring_does_no_harm() -> None:
    """A thread may be in the middle of it: all that lay there is void, whatever it makes of the tail."""
    ring, fd = Ring.create()
    worker = Ring.attach(fd)
    try:
        for number in range(2):
            ring.post(encode(M.Exists([KEY]), number))
        ring.abandon()
        assert worker.abandoned and worker.next_request() is None and worker.next_commit() is None
        with pytest.raises(TransportError):
            ring.post(encode(M.Exists([KEY]), 3))
        ring.words[TAIL] = 3  # as one does that has read it before
        assert worker.next_commit() is None
        with pytest.raises(RemoteProtocolError):
            worker.next_request()
    finally:
        os.close(fd)
        ring.close()
        worker.close()


# -- by others for a client ------------------------------------------------------------------------------


@pytest.mark.parametrize("msg", [M.Delete([KEY]), M.DeleteSized([(KEY, 10)])])
def test_issue_a_stream_does_not_begin_what_its_client_has_given_up(worker: WorkerThread, msg: Any) -> None:
    """It lay in the stream's socket, behind the request of another client that waited for the worker."""
    with StreamThread(worker.path) as stream:
        before, first, newer = stream.channel(), stream.channel(), Newer(worker)
        wait_until(lambda: before.call(msg).statuses == [Status.NOT_FOUND], "a session with the worker")
        session = stream.stream.keeper.session
        assert session is not None
        sent = session.channel._last_id
        with worker.frozen():
            number = before.submit(M.Delete([digest_of("else")]))
            wait_until(lambda: session.channel._last_id > sent, "it has asked the worker")
            first.submit(msg)
            first.close()
            newer.ring()
            newer.put()
        newer.check()
        assert before.result(before.wait(number)).statuses == [Status.NOT_FOUND] and not session.broken
        newer.session.close()


@pytest.mark.parametrize("msg", [M.Delete([KEY]), M.DeleteSized([(KEY, 10)])])
def test_issue_a_stream_gives_up_what_its_client_has_given_up(
    worker: WorkerThread, msg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for two seconds, whatever its client did meanwhile, and the delete met the newer value."""
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    with StreamThread(worker.path) as stream:
        keeper = stream.stream.keeper
        first, newer = stream.channel(), Newer(worker)
        wait_until(lambda: first.call(msg).statuses == [Status.NOT_FOUND], "a session with the worker")
        session = keeper.session
        assert session is not None
        sent = session.channel._last_id
        with worker.frozen():
            newer.ring()
            first.submit(msg)
            wait_until(lambda: session.channel._last_id > sent, "it has asked the worker")
            first.close()
            wait_until(lambda: session.withdrawals.words[0], "the stream has seen that its client has gone")
            newer.put()
        newer.check()
        newer.session.close()


def test_issue_an_endpoint_gives_up_what_its_client_has_given_up(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    network = FakeNetwork(1, background=True)
    with EndpointThread(worker.path, network) as server:
        server.ready()
        first, other, newer = RawConnection(server), RawConnection(server), Newer(worker)
        grant, others = first.grant(len(OLD))[0], other.grant(len(OLD))[0]
        first.write(grant, OLD)
        other.write(others, OLD)
        session = server.endpoint.keeper.session
        assert session is not None and session.ring is not None
        ring = session.ring
        posted = ring.words[TAIL]
        with worker.frozen():
            newer.ring()
            first.channel.submit(M.Commit([(KEY, grant.number, len(OLD), 0, 0, 0)], []))
            wait_until(lambda: ring.words[TAIL] > posted, "it is posted")
            first.channel.close()
            wait_until(lambda: session.forsaken, "the endpoint has seen that its client has gone")
            newer.put()
        newer.check()
        committed = other.channel.call(M.Commit([(digest_of("third"), others.number, len(OLD), 0, 0, 0)], []))
        assert committed.statuses == [Status.OK], "others' grants are of the session, which lives on"
        with worker.frozen() as store:
            held_there = set(store.sessions.by_id[session.session].grants)
        assert grant.number in held_there and not session.forsaken
        assert grant.number in {each[0] for pool in session.pool.stocks.values() for each in pool}, "it is not lost"
        newer.session.close()


@pytest.mark.parametrize("clients", [4, 6])
def test_issue_a_ring_full_of_what_was_given_up(
    worker: WorkerThread, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is posted for a client that hangs up while it waits for room, and nobody else loses anything."""
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    with EndpointThread(worker.path, FakeNetwork(1, background=True)) as server:
        server.ready()
        gone = [RawConnection(server) for _ in range(clients)]
        other = RawConnection(server)
        grants = [each.grant(len(OLD))[0] for each in (*gone, other)]
        session = server.endpoint.keeper.session
        assert session is not None and session.ring is not None
        with worker.frozen():
            for client, grant in zip(gone, grants):
                client.channel.submit(M.Commit([(KEY, grant.number, len(OLD), 0, 0, 0)], []))
                client.channel.close()
            wait_until(lambda: session.ring.is_full, "it is full")
            asked = other.channel.submit(M.Commit([(OTHER, grants[-1].number, len(OLD), 0, 0, 0)], []))
        assert other.channel.result(other.channel.wait(asked)).statuses == [Status.OK]
        assert server.endpoint.keeper.session is session and not session.broken
        assert session.reader.locate(KEY) is None
        server.until(lambda stats: stats["rdma_connections"] == 1, "the others are closed")


def test_issue_who_hangs_up_holds_nobody_up_for_long(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hang-up ended the wait for a worker that is stopped, and the next client's wait began anew.

    What was withdrawn counts, so that the worker is found silent although nobody waits for it to the end.
    """
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    monkeypatch.setattr(rdma_endpoint, "IDLE_S", 4 * WAIT_S)
    with EndpointThread(worker.path, FakeNetwork(1, background=True)) as server:
        server.ready()
        gone = RawConnection(server)
        grant = gone.grant(len(OLD))[0]
        keeper = server.endpoint.keeper
        session = keeper.session
        assert session is not None
        with worker.frozen():
            session.deadline_s = session.channel.deadline_s = 0.5
            monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", 0.5)
            gone.channel.submit(M.Commit([(KEY, grant.number, len(OLD), 0, 0, 0)], []))
            time.sleep(SHORT_S)
            gone.channel.close()
            wait_until(lambda: keeper.session is not session, "the session is down")
            assert session.broken


def test_control_the_wait_for_a_client_looks_at_it(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that look the stream goes on waiting."""
    until_answered = answer_wait.until_answered
    looks: list[bool] = []

    def deaf(session: WorkerSession, ticket: int, client: int, gave_up: Callable[[], bool]) -> None:
        def look() -> bool:
            looks.append(client >= 0)
            return gave_up()

        until_answered(session, ticket, -1, look)

    monkeypatch.setattr(worker_session, "until_answered", deaf)
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)
    with StreamThread(worker.path) as stream:
        first = stream.channel()
        wait_until(lambda: first.call(M.Delete([KEY])).statuses == [Status.NOT_FOUND], "a session with the worker")
        session = stream.stream.keeper.session
        looks.clear()
        with worker.frozen():
            first.submit(M.Delete([KEY]))
            wait_until(lambda: looks != [], "it waits for the worker")
            first.close()
            seen = len(looks)
            wait_until(lambda: len(looks) > seen + 5, "it has had the time to see it")
            assert all(looks) and session is not None and not session.broken
