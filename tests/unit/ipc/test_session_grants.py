"""The grants that answers bring: what leads out of the data breaks the session, and none is lost with its waiter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from simm.arena.hashing import Hasher
from simm.errors import TransportError
from simm.ipc import session as session_module
from simm.ipc.session import WorkerSession
from simm.slab import chunk_bytes_for
from simm.wire import messages as M
from simm.wire.trace_messages import traced
from tests.support.worker_thread import WorkerThread

digest_of = Hasher("default")
SIZE = 4096
#: Far behind the end of the arena.
WRONG = (7, 1 << 40, chunk_bytes_for(SIZE))


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    session_module.RETIRED.clear()
    with WorkerThread() as running:
        yield running
    session_module.RETIRED.clear()


def commit(session: WorkerSession, number: int) -> None:
    session.commit_one(digest_of("key"), number, 5, 0, 0, 0, 0)


def ask(session: WorkerSession, _: int) -> None:
    session.ask([(SIZE, 1)])


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(("call", "count"), [(commit, 1), (commit, 2), (ask, 1)])
def test_a_grant_outside_of_the_data_breaks_the_session(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, call: Callable[[WorkerSession, int], None], count: int,
    ring: bool,
) -> None:  # fmt: skip
    """The next put copied its value there, whatever that is in this process."""
    with contextlib.closing(worker.session(ring=ring)) as session:
        session.ask([(SIZE, 1)])
        grant = session.pool.take(SIZE)
        assert grant is not None
        with worker.frozen() as store:
            monkeypatch.setattr(store.sessions, "take_prepared", lambda _: [WRONG] * count)
        with pytest.raises(TransportError, match="outside of the data"):
            call(session, grant[0])
        assert session.pool.take(SIZE) is None and session.broken
        monkeypatch.undo()


@pytest.mark.parametrize("ring", [True, False])
def test_grants_in_a_traced_answer_that_nobody_waits_for_are_not_lost(worker: WorkerThread, ring: bool) -> None:
    """The worker took them for this session's, and the session knew of none, for as long as it lived."""
    with contextlib.closing(worker.session(ring=ring)) as session:
        session.disown(session.submit(traced(bytes(16), M.Grant([(SIZE, 3)]))))
        session.exchange(M.ReturnGrants([]))  # which the worker answers after that
        assert len(session.pool.stock(chunk_bytes_for(SIZE))) == 3
