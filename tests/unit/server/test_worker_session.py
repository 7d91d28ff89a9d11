"""A stream's way to its worker: one that does not answer holds up no read, and the loop makes no session itself."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from simm.arena.hashing import Hasher
from simm.arena.layout import NAMESPACES
from simm.arena.reader import ArenaReader
from simm.errors import TransportError
from simm.ipc.session import WorkerSession
from simm.net.channel import Refused
from simm.server import worker_session
from simm.server.worker_session import WorkerSessionKeeper
from simm.wire import messages as M
from simm.wire.messages import Status
from tests.support.held_files import maps
from tests.support.waiting import wait_until
from tests.support.worker_thread import WorkerThread

WAIT_S = 20.0
DIGEST = Hasher("default")("key")


def put(worker: WorkerThread, value: bytes) -> None:
    session = worker.session(ring=False)
    session.ask([(len(value), 1)])
    grant = session.pool.take(len(value))
    assert grant is not None
    start = grant[1] - session.reader.data_offset
    session.reader.data[start : start + len(value)] = value
    assert session.commit_one(DIGEST, grant[0], len(value), 0, 0, len(value), 0) == Status.OK
    session.close()


def again(keeper: WorkerSessionKeeper) -> WorkerSession:
    """Return the session, as soon as there is one."""
    until = time.monotonic() + WAIT_S
    while (session := keeper.worker()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return session


def statuses_of_a_late_worker() -> tuple[list[int], float]:
    """The worker does nothing for a second, as on a busy machine or while it takes over thousands of shards.

    Also return how long the call took, seconds.
    """
    found: list[int] = []
    with WorkerThread() as worker:
        put(worker, b"value")
        keeper = WorkerSessionKeeper(worker.path)
        again(keeper)  # a busy machine may need more than one attempt
        asking = threading.Thread(target=lambda: found.extend(keeper.statuses(M.Exists([DIGEST]))))
        with worker.frozen():
            began = time.monotonic()
            asking.start()
            time.sleep(1.0)
        asking.join(WAIT_S)
        took = time.monotonic() - began
        keeper.close()
    return found, took


def test_a_worker_that_is_late_by_a_second_fails_no_call() -> None:
    for _ in range(20):
        found, took = statuses_of_a_late_worker()
        if found == [Status.OK]:
            return
        assert took >= worker_session.WORKER_DEADLINE_S, "this machine was not late itself"
    pytest.fail("the machine is late by seconds all the time")


def test_mutation_a_short_deadline_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", 0.5)
    assert statuses_of_a_late_worker()[0] == [Status.UNAVAILABLE]


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that made sessions, or tried to."""
    seen: list[str] = []

    def noted(*arguments: Any, **more: Any) -> WorkerSession:
        seen.append(threading.current_thread().name)
        return WorkerSession(*arguments, **more)

    monkeypatch.setattr(worker_session, "WorkerSession", noted)
    monkeypatch.setattr(worker_session, "WORKER_DEADLINE_S", WAIT_S)  # its worker is a thread of this process
    return seen


def wait_for_answers(session: WorkerSession | None, seconds: float) -> None:
    """Let a session and its channel wait for so long."""
    assert session is not None
    session.deadline_s = session.channel.deadline_s = seconds


def test_a_worker_that_does_not_answer_holds_up_no_read(makers: list[str]) -> None:
    with WorkerThread() as worker:
        put(worker, b"value")
        keeper = WorkerSessionKeeper(worker.path)
        assert keeper.worker() is not None and makers == [threading.current_thread().name]
        wait_for_answers(keeper.worker(), 0.1)
        with worker.frozen(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_session, "WORKER_DEADLINE_S", 0.1)
            assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE], "one deadline"
            until = time.monotonic() + WAIT_S
            while len(makers) < 3:  # it accepts connections, and answers no HELLO
                keeper.maintain()
                assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
                reader = keeper.arena()
                assert reader is not None and reader.contains(DIGEST)
                assert keeper.lister().reader is reader
                assert time.monotonic() < until
                time.sleep(0.005)
        assert set(makers[1:]) == {"simm-worker-session"}, "the loop's thread made none"
        session = again(keeper)
        wait_for_answers(session, WAIT_S)
        assert keeper.statuses(M.Exists([DIGEST])) == [Status.OK]
        assert keeper.arena() is session.reader and keeper.lister().reader is session.reader
        keeper.close()


def test_over_a_workers_death_reads_go_on(makers: list[str]) -> None:
    with WorkerThread() as worker:
        put(worker, b"value")
        keeper = WorkerSessionKeeper(worker.path)
        first = keeper.worker()
        assert first is not None
        worker.die()
        assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
        reader = keeper.arena()
        assert reader is first.reader and reader.contains(DIGEST)
        worker.start()
        assert again(keeper) is not first and keeper.statuses(M.Exists([DIGEST])) == [Status.OK]
        keeper.close()


def test_issue_without_threads_a_keeper_goes_on(makers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first session and reads need none, and another session is made when there are threads again.

    A stream ended, with all connections of its clients.
    """
    start, refused, scarce = threading.Thread.start, [], [True]

    def start_some(self: threading.Thread) -> None:
        if scarce[0] and self.name in ("simm-worker-session", "simm-populate"):
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with WorkerThread() as worker:
        put(worker, b"value")
        keeper = WorkerSessionKeeper(worker.path)
        again(keeper)
        assert refused == ["simm-populate"]
        worker.die()
        wait_until(lambda: keeper.maintain() == 0 and refused.count("simm-worker-session") > 1, "it tries again")
        assert keeper.state is worker_session.State.DOWN and keeper.session is None
        assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
        reader = keeper.arena()
        assert reader is not None and reader.contains(DIGEST)
        scarce[0] = False
        worker.start()
        again(keeper)
        assert keeper.statuses(M.Exists([DIGEST])) == [Status.OK]
        keeper.close()


def maps_after_deaths(times: int) -> list[int]:
    """Return how often this process maps a worker's arena after each death. All sessions and their readers are used."""
    found, sessions = [], []
    with WorkerThread() as worker:
        put(worker, b"value")
        keeper = WorkerSessionKeeper(worker.path)
        for turn in range(times):
            sessions.append((again(keeper), keeper.arena(), keeper.lister()))
            found.append(sum(worker.segment.name in where for where in maps(os.getpid())))
            assert keeper.statuses(M.Exists([DIGEST])) == [Status.OK]
            if turn < times - 1:
                worker.die()
                assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
                worker.start()
        keeper.close()
    return found


def test_over_workers_deaths_the_arena_is_mapped_once(makers: list[str]) -> None:
    """Also where what was made by former sessions is in use: pins, values on their way, registered memory."""
    first, *later = maps_after_deaths(4)
    assert later == [first] * 3


def test_mutation_each_session_maps_it_anew(makers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerSession, "read_by", lambda self, reader: None)
    assert maps_after_deaths(3) in ([at, at + 3, at + 6] for at in range(20))


def test_another_arena_is_mapped_for_itself(makers: list[str]) -> None:
    """As where a worker that could not recover its arena starts cold, perhaps under the same name."""
    with WorkerThread() as worker, WorkerThread() as other:
        put(worker, b"value")
        keeper = WorkerSessionKeeper(worker.path)
        session, lister = again(keeper), keeper.lister()
        keeper.namespace("first")
        worker.die()
        assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE]
        session.reader.name = other.segment.name
        keeper.uds = other.path
        found = again(keeper)
        assert found.reader is keeper.arena() is keeper.lister().reader and found.reader is not session.reader
        assert keeper.lister() is not lister and not keeper._numbers
        assert session.reader.contains(DIGEST) and not found.reader.contains(DIGEST)
        keeper.close()


def test_the_first_session_is_waited_for(makers: list[str], tmp_path: Any) -> None:
    keeper = WorkerSessionKeeper(str(tmp_path / "nobody.sock"))
    assert keeper.worker() is None and keeper.arena() is None and len(makers) == 1
    assert keeper.statuses(M.Exists([DIGEST])) == [Status.UNAVAILABLE] and len(makers) == 1, "not at every question"
    keeper.close()


def test_mutation_the_test_sees_a_session_made_by_the_loop(makers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Inline(threading.Thread):
        def start(self) -> None:
            self.run()

    with monkeypatch.context() as patch:
        patch.setattr(worker_session, "threading", SimpleNamespace(Thread=Inline))
        with pytest.raises((AssertionError, TransportError)):
            test_a_worker_that_does_not_answer_holds_up_no_read(makers)


def test_more_namespaces_than_places_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from streams and from sessions. Those with values keep their numbers; the others' places are used again."""
    with WorkerThread() as worker:
        keeper = WorkerSessionKeeper(worker.path)
        first = keeper.namespace("first")

        def number_of(name: str) -> int:
            until = time.monotonic() + WAIT_S
            while True:
                try:
                    return keeper.namespace(name)
                except Refused as exc:  # the sweep is not due yet, or has not ended
                    assert exc.status == Status.NO_SPACE and time.monotonic() < until
                    time.sleep(0.01)

        kept = WorkerSession(worker.path, "kept", WAIT_S, ring=False)
        kept.ask([(64, 1)])
        grant = kept.pool.take(64)
        assert grant is not None
        assert kept.commit_one(DIGEST, grant[0], 64, 0, 0, 64, 0) == Status.OK
        number = kept.reader.namespace
        kept.close()
        monkeypatch.setattr(worker_session, "NUMBERS_MAX", 2 * NAMESPACES)
        seen = {number_of(f"n{turn}") for turn in range(3 * NAMESPACES)}
        assert len(seen) == 3 * NAMESPACES, "no number twice"
        assert len(keeper._numbers) <= 2 * NAMESPACES, "nor kept for ever"
        with worker.frozen() as store:
            slot = store.table.lookup(DIGEST)
            assert store.table.entry(slot).namespace == number and store.ledger.names[number] == "kept"
            assert worker.worker.stats()["namespaces_freed"] > NAMESPACES
            assert keeper.names() == {name for name in store.ledger.names.values() if name}
        assert number_of("kept") == number
        assert (again_ := number_of("first")) not in {*seen, first}, "what the keeper has kept is asked for again"
        options = keeper.options_of("first", bound=False)
        assert options == again_ + 1 << M.NAMESPACE_SHIFT
        assert (number_of("n0") + 1 << M.NAMESPACE_SHIFT) < 1 << 32
        worker.die()
        worker.start()
        again(keeper)
        assert number_of("first") == again_, "ids outlive workers"
        keeper.close()


def test_mutation_a_keeper_that_does_not_look_keeps_a_dead_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first name, which the rest of the test does not ask for."""
    real = ArenaReader.has_namespace
    numbers: list[int] = []

    def has(reader: ArenaReader, number: int) -> bool:
        numbers.append(number)
        return number == numbers[0] or real(reader, number)

    monkeypatch.setattr(ArenaReader, "has_namespace", has)
    with pytest.raises(AssertionError, match="is asked for again"):
        test_more_namespaces_than_places_come_one_after_the_other(monkeypatch)


def test_an_answer_for_another_number_of_keys_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerThread() as worker:
        keeper = WorkerSessionKeeper(worker.path)
        session = again(keeper)
        monkeypatch.setattr(WorkerSession, "answer", lambda *_: M.Statuses([Status.OK] * 2))
        assert keeper.statuses(M.Delete([DIGEST]), bound_to="red") == [Status.UNAVAILABLE]
        assert session.broken and keeper.session is None
        keeper.close()


def test_the_log_names_what_a_bound_client_has_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise TransportError("no answer")

    with WorkerThread() as worker:
        keeper = WorkerSessionKeeper(worker.path)
        again(keeper)
        monkeypatch.setattr(WorkerSessionKeeper, "mutate", failing)
        assert keeper.statuses(M.Delete([DIGEST]), bound_to="red") == [Status.UNAVAILABLE]
        assert "Delete: no answer" in caplog.messages
        keeper.close()
