"""The wait for a worker's answer, for work in steps (``ipc/steps.py``)."""

from __future__ import annotations

import select
import time

from ..errors import PeerError
from ..net.allowance import allowed
from .session import WorkerSession


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
