"""Puts that fail half way: what a batch says that it has not sent; and no grant is lost to a session that lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.errors import DeadlineError, NotSentError
from simm.host.buffers import Copier
from simm.ipc import grant_pool, put
from simm.ipc import session as session_module
from simm.ipc.put import NOT_SENT, ShmPut
from simm.ipc.session import WorkerSession
from simm.wire import messages as M
from tests.support.put_failures import BREAKS, INTERRUPTED, LATE, unsent_at_each_failure
from tests.support.worker_thread import WorkerThread, nothing_is_lost

SIZES = {"small": [4096] * 150, "large": [256 << 10] * 50, "mixed": [100, 4096, 70_000] * 20}
VALUES = {name: [memoryview(bytes([at]) * size) for at, size in enumerate(sizes)] for name, sizes in SIZES.items()}


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    session_module.RETIRED.clear()
    with WorkerThread(128 << 20) as running:
        yield running
    session_module.RETIRED.clear()


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(("values", "threads"), [*((name, 1) for name in SIZES), ("large", 2)])
def test_it_fails_at_each_step(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: str, threads: int, together: bool, how: str
) -> None:
    batch = VALUES[values]
    found = unsent_at_each_failure(worker, monkeypatch, batch, together=together, how=how, threads=threads)
    in_hand = put.COMMIT_KEYS_TOGETHER if together else put.COMMIT_KEYS_MOST
    assert found[0] >= len(batch) - in_hand, "all, but for what is to be committed when it ends"
    assert found[-1] < len(batch) // 2, "less towards the end"


@pytest.mark.parametrize(("values", "together"), [("small", False), ("large", True)])
def test_control_all_is_said_to_be_unsent(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: str, together: bool
) -> None:
    """As it would be if what has been committed was not left out."""

    def blind(_positions: Any, statuses: list[int]) -> None:
        statuses[:] = [NOT_SENT] * len(statuses)

    monkeypatch.setattr(put, "_not_sent", blind)
    with pytest.raises(AssertionError, match="it was sent"):
        unsent_at_each_failure(worker, monkeypatch, VALUES[values], together=together, how="after")


@pytest.mark.parametrize("how", [LATE, INTERRUPTED])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(("values", "threads"), [*((name, 1) for name in SIZES), ("large", 2)])
def test_what_cannot_be_committed_loses_no_grant(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: str, threads: int, together: bool, how: str
) -> None:
    found = unsent_at_each_failure(worker, monkeypatch, VALUES[values], together=together, how=how, threads=threads)
    assert len(found) > 1 and (how != LATE or found[0] > found[-1])


@pytest.mark.parametrize("interrupted", [False, True], ids=["in vain", "interrupted"])
@pytest.mark.parametrize("size", [100, 4096, 300_000, 5 << 20])
@pytest.mark.parametrize("empty", [False, True], ids=["with grants", "without"])
def test_a_put_whose_thread_waits_for_the_session(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, size: int, empty: bool, interrupted: bool
) -> None:
    """Another thread has it for as long as the deadline, and its exchange succeeds after all."""
    session = worker.session()
    path = ShmPut(Copier(1), checksum=False)
    digest = Hasher("default")("key")
    value = memoryview(bytes(size))
    for _ in range(3):  # so that there are grants
        assert path.put_one(session, digest, value) == 0
    if empty:
        session.exchange(M.ReturnGrants([grant[0] for grant in session.pool.drain()]))
    fill = ShmPut._fill

    def filled(*arguments: Any) -> Any:
        done = fill(*arguments)
        session.lock.acquire()
        session.deadline_s = 0.001
        return done

    with monkeypatch.context() as patch:
        patch.setattr(ShmPut, "_fill", filled)
        if interrupted:
            patch.setattr(session_module, "allowed", interrupt)
        with pytest.raises(KeyboardInterrupt if interrupted else NotSentError):
            path.put_one(session, digest, value)
    session.lock.release()
    session.deadline_s = 30.0
    assert not session.broken
    session.maintain()
    nothing_is_lost(worker, session)
    assert path.put_one(session, digest, value) == 0
    session.close()


def interrupt(_seconds: float) -> float:
    raise KeyboardInterrupt


def recalled_in_vain(worker: WorkerThread) -> None:
    """Recall idle grants while another thread has the session for longer than the deadline."""
    session = worker.session()
    session.ask([(4096, 20)])
    session.deadline_s = 0.001
    session.pool.recall(1 << 20)
    with session.lock, pytest.raises(DeadlineError):
        session.maintain()
    session.deadline_s = 30.0
    try:
        nothing_is_lost(worker, session)
        session.maintain()
        nothing_is_lost(worker, session)
        assert not session.pool.count(4096)
    finally:
        session.close()


def test_idle_grants_that_cannot_be_returned_are_kept(worker: WorkerThread) -> None:
    recalled_in_vain(worker)


def test_control_they_are_given_up_as_if_they_had_been_sent(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was."""

    def acquire(session: WorkerSession) -> None:
        if not session.lock.acquire(timeout=session.deadline_s):
            raise DeadlineError("deadline passed while another thread waited for the worker")

    monkeypatch.setattr(WorkerSession, "acquire", acquire)
    with pytest.raises(AssertionError):
        recalled_in_vain(worker)


def test_large_grants_that_cannot_be_returned_are_returned_later(worker: WorkerThread) -> None:
    session = worker.session()
    path = ShmPut(Copier(1), checksum=False)
    size = 5 << 20
    session.pool.bytes_max = 1 << 30
    for number in range(3):
        assert path.put_one(session, Hasher("default")(f"k{number}"), memoryview(bytes(size))) == 0
    session.ask([])
    assert session.pool.count(size)
    session.pool._large = (session.pool._large[0], 0.0)  # it is long ago
    session.deadline_s = 0.001
    with session.lock, pytest.raises(NotSentError):
        session.maintain()
    session.deadline_s = 30.0
    assert session.pool.count(size)
    session.maintain()
    assert not session.pool.count(size)
    nothing_is_lost(worker, session)
    session.close()


def test_a_session_that_ends_returns_what_could_not_be_committed(worker: WorkerThread) -> None:
    """It is kept for as long as somebody has a view of a value."""
    session = worker.session()
    session.ask([(4096, 4)])
    session.pool.unsent += [grant[0] for grant in session.pool.drain()]
    session.begin_copy()
    session.close()
    with worker.frozen() as store:
        store.apply_pending()
        left = store.sessions.by_id.get(session.session)
        assert left is None or not left.grants


@pytest.mark.parametrize("values", ["small", "large"])
def test_control_what_is_not_sent_is_lost(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: str) -> None:
    """As it was: nobody knew the grants of a last commit that could not be sent."""
    monkeypatch.setattr(grant_pool, "return_unsent", lambda holder: holder.pool.unsent.clear())
    with pytest.raises(AssertionError):
        unsent_at_each_failure(worker, monkeypatch, VALUES[values], together=False, how=LATE)


@pytest.mark.parametrize("ring", [True, False])
def test_what_was_sent_is_never_said_not_to_be(worker: WorkerThread, ring: bool) -> None:
    """The thread that sends a request and waits for its answer finds the session taken in between."""
    session = worker.session(ring=ring)
    asked = M.Grant([(4096, 3)])
    ticket = session.submit(asked)
    session.deadline_s = 0.001
    with session.lock, pytest.raises(DeadlineError) as caught:
        session.answer(asked, ticket)
    assert type(caught.value) is DeadlineError
    with session.lock, pytest.raises(NotSentError):
        session.submit(asked)
    session.disown(ticket)
    session.deadline_s = 30.0
    session.ask([])  # takes in what has come before
    nothing_is_lost(worker, session)
    assert session.pool.count(4096) == 3
    session.close()


def test_an_answer_is_not_lost_with_the_doorbell_after_it(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream tells the worker on which CPU it runs, when it had to be woken. Just then its socket may be full."""
    session = worker.session(ring=False)
    looks = threading.Event()
    session.outlive_silence(looks.is_set)
    has_room = session.channel.has_room
    wait = session.channel.wait

    def waited(*arguments: Any) -> Any:
        frame = wait(*arguments)
        session.channel.slept += 1
        session._doorbell_at = float("inf")  # the last one was a moment ago
        monkeypatch.setattr(session.channel, "has_room", lambda: False)
        return frame

    monkeypatch.setattr(session.channel, "wait", waited)
    session.ask([(4096, 3)])
    assert session.pool.count(4096) == 3 and session.doorbells
    monkeypatch.setattr(session.channel, "has_room", has_room)
    nothing_is_lost(worker, session)
    session.close()
