"""A worker that cannot tell whether a client lives takes none of its grants for free."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm.arena.layout import Word
from simm.arena.sessions import Session, SessionTable
from simm.arena.store import Store
from simm.host import processes
from simm.net.channel import Refused
from simm.net.listeners import listen_unix
from simm.net.loop import Loop
from simm.server.worker import Worker, WorkerSettings
from simm.wire.messages import Status
from tests.support.consistency import check
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

Fault = Callable[[pytest.MonkeyPatch, int], None]


def no_pidfd(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(_pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", fail)


def no_stat(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(path: str, *_: Any) -> Any:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(processes, "open", fail, raising=False)


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    with WorkerThread() as running:
        yield running


def restarted(worker: WorkerThread) -> tuple[Store, Callable[[], None]]:
    """A recovered store, and what starts a worker on it."""
    store = Store.recover(worker.segment.mm, worker.segment.name)
    listener = listen_unix(worker.path)
    loop = Loop()

    def start() -> None:
        try:
            Worker(store, WorkerSettings(worker.segment.name, worker.segment.data.fd), loop).start(listener)
        finally:
            loop.close()
            listener.close()
            os.unlink(worker.path)

    return store, start


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("fault", [no_pidfd, no_stat])
def test_without_descriptors_a_worker_does_not_start_on_grants_that_a_client_may_write(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, fault: Fault, code: int
) -> None:
    session = worker.session()
    session.ask([(4096, 10)])
    worker.die()
    store, start = restarted(worker)
    fault(monkeypatch, code)
    with pytest.raises(OSError, match=os.strerror(code)):
        start()
    monkeypatch.undo()
    assert len(store.sessions.by_id[session.session].grants) >= 10
    check(store)
    store.release()
    worker.start()
    assert len(worker.store.sessions.by_id[session.session].grants) >= 10
    session.close(clean=False)


@pytest.mark.parametrize("code", [errno.ESRCH, errno.EINVAL, errno.ENOENT])
def test_what_no_process_has_any_longer_is_free(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    session = worker.session()
    session.ask([(4096, 10)])
    worker.die()
    no_pidfd(monkeypatch, code)
    worker.start()
    assert session.session not in worker.store.sessions.by_id
    session.close(clean=False)


@pytest.mark.parametrize("fault", [no_pidfd, no_stat])
def test_without_descriptors_a_client_is_refused_and_told_why(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    fault(monkeypatch, errno.EMFILE)
    with pytest.raises(Refused, match="cannot watch your process") as refused:
        worker.session()
    assert refused.value.status == Status.UNAVAILABLE
    monkeypatch.undo()
    with worker.frozen() as store:
        assert not worker.worker._pidfds and not [s for s in store.sessions.by_id.values() if s.pid == os.getpid()]
    worker.session().close()


def test_issue_the_heartbeat_goes_on_while_dead_clients_sessions_end(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many grants of many sessions take their time, and whoever waits for the heartbeat would start the next worker."""
    session = worker.session()
    session.ask([(4096, 10)])
    worker.die()
    no_pidfd(monkeypatch, errno.ESRCH)
    real = SessionTable.end
    moved: list[int] = []

    def slow(self: SessionTable, ended: Session) -> None:
        header = worker.store.header
        start = header[Word.HEARTBEAT]
        wait_until(lambda: header[Word.HEARTBEAT] - start >= 3, "the heartbeat moves")
        moved.append(ended.session)
        real(self, ended)

    monkeypatch.setattr(SessionTable, "end", slow)
    worker.start()
    assert session.session in moved
    session.close(clean=False)
