"""A stream's way to its worker: one that does not answer holds up no read, and the loop makes no session itself."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from storm.inproc import WorkerThread

from simm import messages as M
from simm import upstream as upstream_module
from simm.errors import TransportError
from simm.hashing import Hasher
from simm.messages import Status
from simm.session import WorkerSession
from simm.upstream import Upstream

WAIT_S = 20.0
DIGEST = Hasher("default")("key")


def put(worker: WorkerThread, value: bytes) -> None:
    session = worker.session(ring=False)
    session.ask([(len(value), 1)])
    grant = session.take(len(value))
    assert grant is not None
    start = grant[1] - session.reader.data_offset
    session.reader.data[start : start + len(value)] = value
    assert session.commit_one(DIGEST, grant[0], len(value), 0, 0, len(value), 0) == Status.OK
    session.close()


def again(upstream: Upstream) -> WorkerSession:
    """The session that is made in the background."""
    until = time.monotonic() + WAIT_S
    while (session := upstream.worker()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return session


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that made sessions, or tried to."""
    seen: list[str] = []

    def noted(*arguments: Any, **more: Any) -> WorkerSession:
        seen.append(threading.current_thread().name)
        return WorkerSession(*arguments, **more)

    monkeypatch.setattr(upstream_module, "WorkerSession", noted)
    monkeypatch.setattr(upstream_module, "WORKER_DEADLINE_S", 0.1)
    return seen


def test_a_worker_that_does_not_answer_holds_up_no_read(makers: list[str]) -> None:
    with WorkerThread() as worker:
        put(worker, b"value")
        upstream = Upstream(worker.path)
        assert upstream.worker() is not None and makers == [threading.current_thread().name]
        with worker.frozen():
            assert upstream.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE], "one deadline"
            until = time.monotonic() + WAIT_S
            while len(makers) < 3:  # it accepts connections, and answers no HELLO
                upstream.tend()
                assert upstream.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
                reader = upstream.arena()
                assert reader is not None and reader.contains(DIGEST)
                assert upstream.lister().reader is reader
                assert time.monotonic() < until
                time.sleep(0.005)
        assert set(makers[1:]) == {"simm-worker-session"}, "the loop's thread made none"
        session = again(upstream)
        assert upstream.statuses(M.Exists([DIGEST])) == [Status.OK]
        assert upstream.arena() is session.reader and upstream.lister().reader is session.reader
        upstream.close()


def test_over_a_workers_death_reads_go_on(makers: list[str]) -> None:
    with WorkerThread() as worker:
        put(worker, b"value")
        upstream = Upstream(worker.path)
        first = upstream.worker()
        assert first is not None
        worker.die()
        assert upstream.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
        reader = upstream.arena()
        assert reader is first.reader and reader.contains(DIGEST)
        worker.start()
        assert again(upstream) is not first and upstream.statuses(M.Exists([DIGEST])) == [Status.OK]
        upstream.close()


def test_the_first_session_is_waited_for(makers: list[str], tmp_path: Any) -> None:
    upstream = Upstream(str(tmp_path / "nobody.sock"))
    assert upstream.worker() is None and upstream.arena() is None and len(makers) == 1
    assert upstream.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE] and len(makers) == 1, "not at every question"
    upstream.close()


def test_control_the_test_sees_a_session_made_by_the_loop(makers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Inline(threading.Thread):
        def start(self) -> None:
            self.run()

    with monkeypatch.context() as patch:
        patch.setattr(upstream_module, "threading", SimpleNamespace(Thread=Inline))
        with pytest.raises((AssertionError, TransportError)):
            test_a_worker_that_does_not_answer_holds_up_no_read(makers)
