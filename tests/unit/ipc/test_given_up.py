"""What a client has given up is not stored late: somebody may have put a newer value in its place since."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from simm.arena.hashing import Hasher
from simm.errors import TransportError
from simm.ipc.answer_wait import collect
from simm.ipc.commit_ring import ABANDONED, TAIL, Ring
from simm.ipc.grant_pool import GrantTuple, obtain
from simm.ipc.session import WorkerSession
from simm.net.allowance import at_most
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
KEY = digest_of("key")
OLD, NEW = b"old value.", b"new value."
SHORT_S = 0.1


@pytest.fixture(params=[0, 200])
def worker(request: pytest.FixtureRequest) -> Iterator[WorkerThread]:
    with WorkerThread(poll_us=request.param) as running:
        yield running


def filled(session: WorkerSession, value: bytes) -> GrantTuple:
    """A granted chunk with the value."""
    grant = session.pool.take(len(value)) or obtain(session, len(value), 2)
    assert grant is not None
    start = grant[1] - session.reader.data_offset
    session.reader.data[start : start + len(value)] = value
    return grant


def entry(digest: bytes, grant: GrantTuple, value: bytes) -> tuple[bytes, int, int, int, int, int]:
    return digest, grant[0], len(value), 0, 0, 0


def stored(session: WorkerSession) -> bytes | None:
    found = session.reader.locate(KEY)
    return None if found is None else bytes(session.reader.value(found))


def by_commit_one(session: WorkerSession, grant: GrantTuple) -> None:
    session.commit_one(KEY, grant[0], len(OLD), 0, 0, len(OLD), 0)


def by_batch(session: WorkerSession, grant: GrantTuple) -> None:
    collect(session, [(session.submit(M.Commit([entry(KEY, grant, OLD)], [])), [0])], [0])


def by_exchange(session: WorkerSession, grant: GrantTuple) -> None:
    session.exchange(M.Commit([entry(KEY, grant, OLD)], []))


def behind_another_thread(session: WorkerSession, grant: GrantTuple) -> None:
    """Its request is posted; another thread waits for the worker, with the session's lock, for longer."""
    ticket = session.submit(M.Commit([entry(KEY, grant, OLD)], []))
    session.kick(always=True)
    held = threading.Event()

    def other() -> None:
        with session.lock:
            held.set()
            over.wait(WAIT_S)

    over = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert held.wait(WAIT_S)
        collect(session, [(ticket, [0])], [0])
    finally:
        over.set()
        thread.join(WAIT_S)


def when_another_thread_broke_it(session: WorkerSession, grant: GrantTuple) -> None:
    """Its request is posted; then another thread's exchange by socket has come to its deadline."""
    ticket = session.submit(M.Commit([entry(KEY, grant, OLD)], []))
    session.kick(always=True)
    with pytest.raises(TransportError):
        session.channel.call(M.Ping(1))
    session.answer(M.Commit([], []), ticket)


WAYS = [by_commit_one, by_batch, by_exchange, behind_another_thread, when_another_thread_broke_it]


@pytest.mark.parametrize("give_up", WAYS)
def test_issue_a_commit_that_was_given_up_does_not_replace_a_newer_one(worker: WorkerThread, give_up: object) -> None:
    """The session is still open when its caller hears that the put has failed: only the ring says so in time."""
    first, second = worker.session(), worker.session()
    old, other, new = filled(first, OLD), filled(second, NEW), filled(second, NEW)
    with worker.frozen():
        # The doorbell of the second client has rung before that of the first, so its ring is served before.
        tickets = [second.submit(M.Commit([entry(digest_of("other"), other, NEW)], []))]
        second.kick(always=True)
        with at_most(SHORT_S), pytest.raises(TransportError):
            give_up(first, old)  # type: ignore[operator]
        assert first.broken
        tickets.append(second.submit(M.Commit([entry(KEY, new, NEW)], [])))
    statuses = [0, 0]
    collect(second, [(ticket, [at]) for at, ticket in enumerate(tickets)], statuses)
    assert statuses == [Status.OK, Status.OK]
    assert second.exchange(M.Locate(0, [KEY])).entries[0][0] == Status.OK  # whatever the rings had is done
    assert stored(second) == NEW
    first.close(clean=False)
    wait_until(lambda: first.session not in worker.worker.peers, "the first session has ended")
    assert stored(second) == NEW and worker.loop.handler_errors == worker.loop.protocol_errors == 0
    second.close()
    with worker.frozen() as store:
        store.apply_pending()
        check(store)


def test_posting_into_an_abandoned_ring_does_no_harm() -> None:
    """A thread may be in the middle of it. Its number leads to nothing that the worker would carry out."""
    ring, fd = Ring.create()
    worker = Ring.attach(fd)
    try:
        ring.post(b"x" * 24)
        ring.abandon()
        assert worker.abandoned
        ring.post(b"y" * 24)
        assert worker.abandoned and worker.words[TAIL] > ABANDONED and worker.next_commit() is None
    finally:
        os.close(fd)
        ring.close()
        worker.close()
