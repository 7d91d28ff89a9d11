"""An exception that a signal's handler raises anywhere leaves no lock taken, and no allowance of a call that has ended.

Each place where CPython runs handlers is tried in turn.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from simm.errors import DeadlineError, NotSentError
from simm.ipc.answer_wait import AnswerWait, take
from simm.ipc.patience import Patience
from simm.ipc.session import WorkerSession
from simm.net.allowance import ALLOWANCE, Left, allowed, at_least, at_most, tries_of, tries_within
from simm.sdk.ops.pins import Pins
from tests.support.interrupts import everywhere
from tests.support.waiting import wait_until


class Session:
    """A session whose worker answers at once."""

    acquire, wait_for_lock = WorkerSession.acquire, WorkerSession.wait_for_lock
    exchange, answer, submit = WorkerSession.exchange, WorkerSession.answer, WorkerSession.submit
    commit_one, wake, kick = WorkerSession.commit_one, WorkerSession.wake, WorkerSession.kick
    take_pushes, announce_commit = WorkerSession.take_pushes, WorkerSession.announce_commit
    deadline_s, broken = 0.0, ""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tries = tries_of(self.lock)
        self.frames: dict[int, Any] = {}
        self.ring: Any = SimpleNamespace(
            words=[1] * 64, done=1, post=lambda _: 1, committed_one=lambda _: (0, None), announce=lambda _: None
        )
        self.channel: Any = SimpleNamespace(broken="", submit=lambda _: 1, poll_pushes=lambda: None)
        self._kicked = self._kicked_tail = 0

    def _await(self, ring: Any) -> None:
        ring.done = 1

    def submit_locked(self, _msg: Any) -> int:
        return 1

    def wait_locked(self, _ticket: int, _items: int = 1) -> int:
        return 1

    def checked_locked(self, _msg: Any, answer: Any) -> Any:
        return answer


CALLS: dict[str, Callable[[Any], object]] = {
    "exchange": lambda session: session.exchange("ask"),
    "answer": lambda session: session.answer("ask", 1),
    "submit": lambda session: session.submit("ask"),
    "commit_one": lambda session: session.commit_one(bytes(16), 1, 1, 0, 0, 0, 0),
    "wake": lambda session: session.wake(),
    "kick": lambda session: session.kick(always=True),
    "take_pushes": lambda session: session.take_pushes(),
    "take": lambda session: take(session, 1),
    "receive": lambda session: AnswerWait(session, 1).receive(),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_interrupt_leaves_a_session_locked(call: str) -> None:
    session = Session()

    def check() -> None:
        assert not session.lock.locked()
        session.ring.done, session._kicked = 1, 0

    assert everywhere(lambda: CALLS[call](session), check) > 0


def test_mutation_a_lock_that_is_taken_by_a_call_stays_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Session()

    def acquire(self: Any, _late: Any = None) -> None:
        assert self.lock.acquire(False)

    monkeypatch.setattr(Session, "acquire", acquire)
    taken: list[bool] = []

    def check() -> None:
        taken.append(session.lock.locked())
        if session.lock.locked():
            session.lock.release()

    everywhere(lambda: session.exchange("ask"), check)
    assert any(taken)


def test_an_interrupted_wait_for_another_thread_leaves_a_session_locked_by_that_thread_alone() -> None:
    session: Any = Session()
    session.deadline_s = 60.0

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            session.lock.acquire()
        releasing = threading.Timer(0.001, session.lock.release)
        releasing.start()
        try:
            session.exchange("ask")
        finally:
            releasing.join()

    def check() -> None:
        wait_until(lambda: not session.lock.locked(), "nobody has it")

    assert everywhere(call, check) > 0


@pytest.mark.parametrize("late", [NotSentError, DeadlineError])
def test_control_a_session_that_another_thread_has_is_waited_for_until_the_deadline(late: type[DeadlineError]) -> None:
    session: Any = Session()
    with session.lock:
        with pytest.raises(late):
            session.acquire(late)
        with pytest.raises(NotSentError):
            CALLS["commit_one"](session)
        with pytest.raises(DeadlineError):
            take(session, 1)
        session.wake()
        session.take_pushes()
        assert session.kick(always=True) is False
        assert session.lock.locked(), "each of them leaves it to that thread"
    session.exchange("ask")
    assert not session.lock.locked()


def test_a_lock_is_taken_in_two_ways() -> None:
    lock = threading.Lock()
    tries = tries_of(lock)
    assert next(tries) is True and next(tries) is False
    (got,) = tries_within(lock, -1.0)
    assert got is False
    lock.release()
    (got,) = tries_within(lock, 0.0)
    assert got is True and next(tries) is False


def test_no_interrupt_leaves_pins_locked() -> None:
    pins: Any = Pins.__new__(Pins)
    pins._remote_lock, pins._deadline_s = threading.Lock(), 0.0
    pins._routes = SimpleNamespace(patience=lambda: Patience(1.0))
    everywhere(lambda: pins._together([]), lambda: pins._remote_lock.acquire(False) and pins._remote_lock.release())
    assert pins._remote_lock.acquire(False)
    met: list[int] = []
    pins._together([], lambda: met.append(1))
    assert met and pins._remote_lock.locked(), "another thread has it"


class Server:
    """A server that is connected."""

    path, fresh = "shm", False

    def connect_soon(self) -> None: ...

    def ready(self) -> bool:
        return True


def patience() -> None:
    with Patience(1.0) as mine:
        mine.has_time_for(Server())
        with Patience(0.5) as part:
            part.has_time_for(Server())


def nested() -> None:
    with at_most(0.0), at_least(1.0), at_most(2.0):
        allowed(1.0)


@pytest.mark.parametrize("call", [patience, nested])
def test_no_interrupt_leaves_an_allowance_to_the_next_call(call: Callable[[], None]) -> None:
    def check() -> None:
        assert allowed(math.inf) == math.inf
        assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf

    assert everywhere(call, check) > 0


@pytest.mark.parametrize("call", [patience, nested])
def test_mutation_without_an_owner_it_is_left(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Left, "own", lambda *_: None)
    left: list[bool] = []

    def check() -> None:
        left.append(ALLOWANCE.seconds != math.inf or ALLOWANCE.until != math.inf)
        ALLOWANCE.seconds = ALLOWANCE.until = math.inf

    everywhere(call, check)
    assert any(left)


def test_what_was_left_is_not_the_next_calls() -> None:
    """As of a call that was interrupted when it set its allowance back."""
    left = Patience(3.0)
    left.__enter__()
    ALLOWANCE.seconds, ALLOWANCE.until = 0.0, 0.0
    assert allowed(1.0) <= 0.0, "the control"
    del left
    with Patience(3.0) as mine:
        assert mine.has_time_for(Server()) and ALLOWANCE.seconds > 1.0
    assert ALLOWANCE.seconds == ALLOWANCE.until == math.inf


def test_control_a_part_of_a_call_does_not_outlast_it() -> None:
    with at_most(0.0):
        with Patience(3.0) as part:
            assert not part.has_time_for(Server())
        assert allowed(1.0) <= 0.0, "the call's is there again"
    assert allowed(1.0) == 1.0
