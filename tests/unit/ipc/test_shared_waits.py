"""A session is for all threads of a process: one may take in what would wake another one, which has its answer then."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from simm.arena.hashing import Hasher
from simm.ipc import answer_wait, steps
from simm.ipc.answer_wait import AnswerWait, until_answered
from simm.ipc.session import WorkerSession
from simm.ipc.steps import first_over
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
#: Longer than a wait that looks again takes on any machine; shorter than the exchange may take.
SOON_S = 15.0


def maintain(session: WorkerSession) -> None:
    """What a client's background thread does ten times a second."""
    session.maintain()


def exchange(session: WorkerSession) -> None:
    """What another caller does."""
    assert session.exchange(M.Exists([digest_of("other")])) == M.Statuses([Status.NOT_FOUND])


def wait_for(session: WorkerSession, ticket: int) -> None:
    """Wait as a batch for several workers does."""
    assert first_over([AnswerWait(session, ticket)])


def wait_for_client(session: WorkerSession, ticket: int) -> None:
    """Wait as a stream does for its client."""
    until_answered(session, ticket, -1, lambda: None)


@pytest.mark.parametrize("wait", [wait_for, wait_for_client])
@pytest.mark.parametrize("takes", [maintain, exchange])
@pytest.mark.parametrize("ring", [True, False])
def test_who_waits_does_not_sleep_on_what_another_thread_has_taken_in(
    wait: Callable[[WorkerSession, int], None], takes: Callable[[WorkerSession], None], ring: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The worst moment: the answer comes, and is taken in, between the last look and the sleep."""
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(WorkerThread())
        session = worker.session(ring=ring)
        held = stack.enter_context(contextlib.ExitStack())
        slept: list[float] = []

        class Poll:
            """A poll object whose first sleep begins when another thread has taken in all that came."""

            def __init__(self) -> None:
                self.real = select.poll()
                self.register = self.real.register
                self.unregister = self.real.unregister

            def poll(self, timeout: float) -> list[tuple[int, int]]:
                if not slept:
                    held.close()
                    wait_until(lambda: session.channel.has_input(0), "the worker has answered")
                    other = threading.Thread(target=takes, args=(session,))
                    other.start()
                    other.join()
                    assert session.has_answer(ticket) and not session.channel.has_input(0)
                slept.append(timeout)
                return self.real.poll(timeout)

        for module in (steps, answer_wait):
            monkeypatch.setattr(module, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
        held.enter_context(worker.frozen())
        msg = M.Exists([digest_of("k")])
        ticket = session.submit(msg)
        began = time.monotonic()
        wait(session, ticket)
        assert slept and time.monotonic() - began < SOON_S
        assert session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND])
        session.close()


def test_who_relies_on_another_thread_to_wake_the_worker_does_it_himself_if_that_does_not() -> None:
    """The one that has the session may only have read what had come, and go away."""
    with WorkerThread() as worker:
        session = worker.session()
        msg = M.Exists([digest_of("k")])
        ticket = session.submit(msg)
        assert session.lock.acquire(False)
        reader = threading.Timer(0.05, session.lock.release)
        reader.start()
        wait = AnswerWait(session, ticket)
        assert first_over([wait]) == [wait] and wait.ready()
        reader.join()
        assert session.answer(msg, ticket) == M.Statuses([Status.NOT_FOUND])
        session.close()
