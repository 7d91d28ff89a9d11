"""Mutations that an exception of a signal's handler ends: it reaches the caller, and nothing is lost or done later."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from simm.errors import PeerError
from simm.host.buffers import Copier
from simm.ipc import put
from simm.ipc.answer_wait import take
from simm.ipc.put import ShmPut
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.sdk.tracing.stand_ins import TimedSession
from simm.sdk.writes import Puts
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.interrupts import Interrupted, everywhere
from tests.support.newer_value import KEY, OLD, digest_of, filled
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread, nothing_is_lost

#: Where the answers are waited for and used.
ANSWERS = ("simm.ipc.answer_wait", "simm.ipc.session", "simm.ipc.commit_ring", "simm.ipc.grant_pool")
VALUE = memoryview(bytes(4096))
SHORT_S = 0.05


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


def interrupt(*_: object, **__: object) -> Any:
    raise Interrupted


# -- the exception reaches the caller ---------------------------------------------------------------------


class OnDevice(bytes):
    """A value in a device's memory, whose copy is nobody's business."""

    size = len(VALUE)

    def pinned(self, _: Any) -> int:
        return 1

    def copy_to_host(self, copies: Any) -> None: ...


def plain(session: WorkerSession) -> None:
    digests = [digest_of(f"{number}") for number in range(150)]
    ShmPut(Copier(1), False).put_many(session, digests, [VALUE] * 150, range(150), [0] * 150)


def together(session: WorkerSession) -> None:
    digests = [digest_of(f"{number}") for number in range(500)]
    finish(ShmPut(Copier(1), False).put_steps(session, digests, [VALUE] * 500, range(500), [0] * 500, together=True))


def from_a_device(session: WorkerSession) -> None:
    digests = [digest_of(f"{number}") for number in range(150)]
    values: list[Any] = [OnDevice(VALUE)] * 150
    ShmPut(Copier(1), False).put_many(session, digests, values, range(150), [0] * 150)


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("batch", [plain, together, from_a_device])
def test_issue_a_batch_raises_what_has_interrupted_its_wait(
    worker: WorkerThread, batch: Callable[[WorkerSession], None], ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raised TransportError, as the session is broken then, and the client took that for an outage."""
    monkeypatch.setattr(put, "on_device", lambda _: True)
    session = worker.session(ring=ring)
    session.ask([(4096, 520)])
    monkeypatch.setattr(session, "_awaited", interrupt)
    monkeypatch.setattr(session.channel, "wait", interrupt)
    gc.disable()
    try:
        try:
            batch(session)
        except Interrupted as exc:
            met = weakref.ref(exc)
        assert session.broken and met() is None, "nor does a frame keep it, and with it the arena"
    finally:
        gc.enable()
    session.close(clean=False)


@pytest.mark.parametrize("ring", [True, False])
def test_issue_a_batch_raises_what_has_interrupted_its_copy(
    worker: WorkerThread, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the worker does not answer what was sent before."""
    session = worker.session(ring=ring)
    session.ask([(4096, 200)])
    fill, fills = ShmPut._fill_run, list[int]()

    def filled_once(*arguments: Any) -> Any:
        fills.append(1)
        return fill(*arguments) if len(fills) == 1 else interrupt()

    monkeypatch.setattr(ShmPut, "_fill_run", filled_once)
    session.deadline_s = session.channel.deadline_s = SHORT_S
    with worker.frozen(), pytest.raises(Interrupted):
        plain(session)
    assert session.broken, "what was sent is given up"
    session.close(clean=False)


def test_control_a_batch_raises_what_its_last_wait_meets(worker: WorkerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    session = worker.session()
    session.deadline_s = session.channel.deadline_s = SHORT_S
    with worker.frozen(), pytest.raises(PeerError):
        plain(session)
    session.close(clean=False)


# -- answers ----------------------------------------------------------------------------------------------


def ask(session: WorkerSession) -> None:
    """For grants of two sizes."""
    session.ask([(4096, 3), (100, 2)])


def traced_ask(session: WorkerSession) -> None:
    traced(session).ask([(4096, 3), (100, 2)])


def one(session: WorkerSession) -> None:
    ShmPut(Copier(1), False).put_one(session, KEY, VALUE)


def traced_one(session: WorkerSession) -> None:
    ShmPut(Copier(1), False).put_one(traced(session), KEY, VALUE)


def some(session: WorkerSession) -> None:
    """As many that grants are asked for ahead, and that answers are taken in the middle."""
    digests = [digest_of(f"{number}") for number in range(12)]
    ShmPut(Copier(1), False).put_many(session, digests, [VALUE] * 12, range(12), [0] * 12)


def traced(session: WorkerSession) -> Any:
    operation = SimpleNamespace(
        segment=lambda *_, **__: None, of_server=lambda *_, **__: None, new_id=lambda: bytes(8), trace_id=bytes(16),
        span_id=bytes(8),
    )  # fmt: skip
    return TimedSession(session, operation)  # type: ignore[arg-type]


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("call", [ask, traced_ask, one, traced_one, some])
def test_issue_no_interrupt_loses_what_an_answer_brings(
    worker: WorkerThread, call: Callable[[WorkerSession], None], ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that was taken in, and not yet used, was lost: KeyError in its place, and its grants were nobody's."""
    monkeypatch.setattr(put, "COMMIT_KEYS", 3)
    monkeypatch.setattr(put, "COMMIT_KEYS_FIRST", 3)

    def fresh() -> WorkerSession:
        session = worker.session(ring=ring)
        session.ask([(4096, 2)])
        return session

    session, whole = fresh(), 0

    def check() -> None:
        nonlocal session, whole
        assert not session.lock.locked()
        if not session.broken:  # else the worker has them back
            session.exchange(M.Exists([KEY]))  # takes in what nobody waits for
            session.maintain()
            nothing_is_lost(worker, session)
            assert not session.forsaken
            whole += 1
        session.close()
        session = fresh()

    assert everywhere(lambda: call(session), check, ANSWERS) > 10
    assert whole > 5
    session.close()


@pytest.mark.parametrize("ring", [True, False])
def test_issue_a_traced_wait_that_is_interrupted_frees_the_session(worker: WorkerThread, ring: bool) -> None:
    """To look up the lock, which is that of the session behind the stand-in, is a call that can be interrupted."""
    session = worker.session(ring=ring)

    def wait() -> None:
        take(traced(session), session.submit(M.Exists([KEY])))

    def check() -> None:
        nonlocal session
        assert not session.lock.locked()
        session.close(clean=False)
        session = worker.session(ring=ring)

    assert everywhere(wait, check, ("simm.ipc.answer_wait", "simm.sdk.tracing.stand_ins")) > 10
    session.close()


@pytest.mark.parametrize("ring", [True, False])
def test_issue_an_answer_that_came_before_its_session_was_closed_is_used(worker: WorkerThread, ring: bool) -> None:
    """Another thread takes it in and closes the session, and then this one has the lock: AttributeError."""
    session = worker.session(ring=ring)
    ticket = session.submit(M.Exists([KEY]))

    def others() -> Iterator[bool]:
        with session.lock:
            session.frame_locked(ticket)
        session.close()
        yield session.lock.acquire()

    session.tries = others()
    assert take(session, ticket).statuses == [Status.NOT_FOUND]


# -- what was sent ----------------------------------------------------------------------------------------


def put_old(session: WorkerSession) -> None:
    session.commit_one(KEY, filled(session, OLD)[0], len(OLD), 0, 0, len(OLD), 0)


def exchange_old(session: WorkerSession) -> None:
    session.exchange(M.Commit([(KEY, filled(session, OLD)[0], len(OLD), 0, 0, 0)], []))


def delete_old(session: WorkerSession) -> None:
    puts = Puts.__new__(Puts)
    puts._routes = SimpleNamespace(session_failed=lambda *_: None)  # type: ignore[assignment]
    target: Any = SimpleNamespace(session=session, tcp=None)
    finish(puts._ask([M.Delete([KEY])], target, False, lambda _: iter(())))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("call", [put_old, exchange_old, delete_old])
def test_issue_what_is_interrupted_once_it_is_sent_is_not_carried_out_later(
    worker: WorkerThread, call: Callable[[WorkerSession], None], ring: bool
) -> None:
    """Between the sending and the wait nobody gave it up: it lay there until somebody woke the worker."""
    other = worker.session()
    is_there = call is delete_old
    if is_there:
        put_old(other)

    def fresh() -> WorkerSession:
        session = worker.session(ring=ring)
        session.ask([(len(OLD), 2)])
        session.deadline_s = session.channel.deadline_s = SHORT_S
        return session

    session = fresh()

    def frozen() -> None:
        with worker.frozen(), contextlib.suppress(PeerError):
            call(session)

    def check() -> None:
        nonlocal session
        if session.broken:
            session.close(clean=False)
            wait_until(lambda: session.session not in worker.worker.peers, "the session has ended")
            session = fresh()
        else:
            session.deadline_s = session.channel.deadline_s = 30.0
            session.exchange(M.Exists([KEY]))  # after all that was sent
            session.deadline_s = session.channel.deadline_s = SHORT_S
            if session.pool.count(len(OLD)) < 2:
                session.close(clean=False)
                session = fresh()
        found = other.exchange(M.Exists([KEY])).statuses
        assert found == [Status.OK if is_there else Status.NOT_FOUND]

    modules = ("simm.ipc", "simm.net.channel", "simm.sdk.writes")
    assert everywhere(frozen, check, modules) > 10
    session.close(clean=False)
    other.close()
