"""The wait for a worker's answers: in steps (``ipc/steps.py``), or for those to several commits."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from ..errors import PeerError
from ..net.allowance import allowed, at_least
from ..wire import messages as M
from .session import WorkerSession

#: A batch whose call has no time left may wait for this share of a deadline to take the answers in flight. A worker
#: that is not silent has them ready. Otherwise their grants would be lost as long as the session lives.
LAST_SHARE: Final = 0.1


class AnswerWait:
    """The wait for the answer to a request that ``session`` has sent: ``ticket`` is of :meth:`WorkerSession.submit`.

    ``last``: nothing is left to be done but to take the answer.
    """

    __slots__ = ("_session", "_ticket", "last", "until")

    events = select.POLLIN

    def __init__(self, session: WorkerSession, ticket: int, *, last: bool = False) -> None:
        self._session = session
        self._ticket = ticket
        self.last = last
        self.until = time.monotonic() + allowed(session.deadline_s)

    def ready(self) -> bool:
        """Return True if the answer has come, or the session is broken."""
        return self._session.has_answer(self._ticket)

    def descriptor(self) -> int:
        """Wake the worker if it sleeps, and return the session's socket, which brings at least the answer to that.

        -1 if another thread has the session: it wakes the worker.
        """
        session = self._session
        return session.channel.fileno() if self._ticket < 0 or session.kick(always=True) else -1

    def receive(self) -> None:
        """Take in what has arrived at the socket, unless another thread does."""
        session = self._session
        if session.lock.acquire(blocking=False):
            try:
                session.channel.poll_pushes()
            except PeerError:
                pass  # the wait meets it
            finally:
                session.lock.release()

    def extend(self, until: float) -> None:
        """Let the exchange last until then, monotonic seconds."""
        self._session.channel.until = max(self._session.channel.until, until)


def collect(session: WorkerSession, in_flight: Sequence[tuple[int, list[int]]], statuses: list[int]) -> None:
    """Wait for the answers to all commits in flight."""
    if not in_flight:
        return
    session.acquire_posted()
    try:
        for ticket, positions in in_flight:
            answer = session.wait_locked(ticket, len(positions))
            if not isinstance(answer, M.Committed) or len(answer.statuses) != len(positions):
                session.channel.fail("the worker answered COMMIT with something else")
            session.pool.add(answer.grants)
            for position, status in zip(positions, answer.statuses):
                statuses[position] = status
    finally:
        session.lock.release()


def while_cleaning_up(session: WorkerSession) -> AbstractContextManager[None]:
    """Let a batch that ends take what it has in flight, although its call has no time left."""
    return at_least(session.deadline_s * LAST_SHARE)


def collect_grants(session: WorkerSession, asked: tuple[int, int]) -> None:
    """Wait for grants that were asked for ahead, given a ticket and their number, and add them to the pool.

    Also in a call that has no time left: nobody else takes them.
    """
    with while_cleaning_up(session):
        session.acquire_posted()
        try:
            answer = session.wait_locked(*asked)
            if not isinstance(answer, M.Granted):
                session.channel.fail("the worker answered GRANT with something else")
            session.pool.add(answer.grants)
        finally:
            session.lock.release()
