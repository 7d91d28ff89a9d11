"""A batch of puts that fails at each of its steps in turn: what it says that it has not sent, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.errors import NotSentError, TransportError
from simm.host.buffers import Copier
from simm.ipc.put import NOT_SENT, ShmPut
from simm.ipc.session import WorkerSession
from simm.ipc.steps import finish
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.worker_thread import WorkerThread, nothing_is_lost

#: In the place of a status that the batch has not touched.
OPEN = 99
#: What breaks the session: a request before it is sent, or afterwards; or a copy.
BREAKS = ("before", "after", "copy")
#: What breaks nothing: no request can be sent any more, as another thread has the session until the deadline.
LATE = "late"
#: Neither does an interrupt before a request is sent.
INTERRUPTED = "interrupted"
_COPIES = ("_fill", "_fill_run", "_fill_planned", "_fill_group")


class _Broken:
    """Lets a batch fail at a step, the ``at``th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        self.at = self.steps = 0
        #: Keys of all COMMITs, sent or not.
        self.committed: set[bytes] = set()
        submit = WorkerSession.submit

        def submitted(session: WorkerSession, msg: Any, *more: Any) -> int:
            if how == LATE:
                self.steps += 1
                if 0 < self.at <= self.steps:
                    raise NotSentError("by the test")
            if how == INTERRUPTED:
                self.steps += 1
                if self.at == self.steps:
                    raise KeyboardInterrupt
            if isinstance(msg, M.Commit):
                self.committed.update(entry[0] for entry in msg.entries)
            if how == "before":
                self._step(session)
            ticket = submit(session, msg, *more)
            if how == "after":
                self._step(session)
            return ticket

        monkeypatch.setattr(WorkerSession, "submit", submitted)
        for name in _COPIES if how == "copy" else ():
            self._note(monkeypatch, name, getattr(ShmPut, name))

    def _note(self, monkeypatch: pytest.MonkeyPatch, name: str, copy: Any) -> None:
        def copied(path: ShmPut, session: WorkerSession, *arguments: Any) -> Any:
            self._step(session)
            return copy(path, session, *arguments)

        monkeypatch.setattr(ShmPut, name, copied)

    def begin(self, at: int) -> None:
        """Break it at this step from now on; 0: at none."""
        self.at, self.steps = at, 0
        self.committed.clear()

    def _step(self, session: WorkerSession) -> None:
        self.steps += 1
        if self.steps == self.at:
            session.give_up("by the test")
            raise TransportError("by the test")


def unsent_at_each_failure(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, values: Sequence[Any], *, together: bool, how: str,
    threads: int = 1,
) -> list[int]:  # fmt: skip
    """Put a batch again and again, and let it fail at the first step, the second and so on.

    ``how``: of BREAKS, LATE or INTERRUPTED. ``threads`` copy. Return how many values were said not to be sent at each,
    until none fails. Raises AssertionError if one of them was in a COMMIT, or if a session that lives has lost a grant.
    """
    path = ShmPut(Copier(threads), checksum=False)
    count = len(values)
    digests = [*map(Hasher("default"), map(str, range(count)))]
    broken = _Broken(monkeypatch, how)
    found: list[int] = []
    while True:
        session = worker.session()
        broken.begin(0)
        finish(path.put_steps(session, digests, values, range(count), [OPEN] * count, together=together))
        statuses = [OPEN] * count
        broken.begin(len(found) + 1)
        try:
            finish(path.put_steps(session, digests, values, range(count), statuses, together=together))
        except (TransportError, KeyboardInterrupt):
            unsent = {digest for digest, status in zip(digests, statuses) if status == NOT_SENT}
            assert not unsent & broken.committed, "it was sent, or may have been"
            assert {*statuses} <= {Status.OK, Status.NO_SPACE, NOT_SENT, OPEN}
            found.append(len(unsent))
            if how in (LATE, INTERRUPTED):
                broken.begin(0)
                session.maintain()
                nothing_is_lost(worker, session)
                assert not session.broken and session.pool.unsent == []
            session.close(clean=False)
        else:
            assert statuses == [Status.OK] * count and len(broken.committed) == count
            session.close()
            return found
