"""The state machine that all paths of a client share: transitions, attempts, backoff, end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from simm.arena.layout import State
from simm.config.client_options import ClientOptions
from simm.sdk.path import STALE_S, ClientContext, ClientRdma, Heartbeat, Path, PathState, arena_closed
from simm.sdk.rdma_pool import RdmaPath
from simm.sdk.tcp import TcpPath
from tests.support.interrupts import everywhere
from tests.support.waiting import WAIT_S, wait_until


class Connection:
    def __init__(self) -> None:
        self.closed = 0

    def close(self, *_: Any) -> None:
        self.closed += 1


class Paced(Path):
    """A path whose connection attempts end as the test decides."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(ClientContext(ClientOptions(), clock=lambda: clock[0]))
        self.attempts = 0
        self.go_on = threading.Event()
        self.failure: str | None = None

    def _attempt(self) -> None:
        self.attempts += 1
        self.go_on.wait(30.0)
        with self._lock:
            self.connecting = False
            if self.failure is None:
                self._set_up()
            else:
                self._set_down(self.failure)
            self._changed.notify_all()

    def attempt(self, failure: str | None) -> None:
        """Run one attempt from its start to its end."""
        self.failure = failure
        self.go_on.set()
        self.connect_soon()
        wait_until(lambda: not self.connecting, "the attempt ends")


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


def test_no_attempt_begins_while_it_is_up(clock: list[float]) -> None:
    path = Paced(clock)
    path.attempt(None)
    path.connect_soon()
    assert path.attempts == 1 and not path.connecting


def test_up_is_the_only_state_without_a_reason(clock: list[float]) -> None:
    path = Paced(clock)
    assert path.state is PathState.NEW and path.down_reason
    path.attempt("nobody there")
    assert (path.state, path.down_reason) == (PathState.DOWN, "nobody there")
    path.attempt(None)
    assert (path.state, path.down_reason) == (PathState.UP, None)
    path.close()
    assert path.state is PathState.CLOSED and path.down_reason


def test_attempts_are_due_after_a_pause_that_doubles_and_starts_over(clock: list[float]) -> None:
    path = Paced(clock)
    pauses = []
    for _ in range(4):
        path.attempt("nobody there")
        assert not path.wants_connection(clock[0])
        pauses.append(path.backoff.retry_at - clock[0])
        clock[0] = path.backoff.retry_at
        assert path.wants_connection(clock[0])
    assert pauses[3] > 2 * pauses[0]
    path.attempt(None)
    assert not path.wants_connection(clock[0] + 1e6), "a path that is up needs none"
    with path._lock:
        path._set_down("lost")
    assert path.backoff.failures == 1


def test_one_attempt_at_a_time(clock: list[float]) -> None:
    path = Paced(clock)
    for _ in range(5):
        path.connect_soon()
    assert path.connecting and not path.wants_connection(clock[0] + 1e6)
    path.go_on.set()
    wait_until(lambda: not path.connecting, "it ends")
    assert path.attempts == 1


def test_without_a_thread_the_path_is_down(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    path = Paced(clock)
    monkeypatch.setattr(threading.Thread, "start", start)
    path.connect_soon()
    assert path.state is PathState.DOWN and not path.connecting
    assert "can't start new thread" in str(path.down_reason)


@pytest.mark.parametrize("where", ["made", "started", "runs"])
def test_issue_an_interrupt_as_an_attempt_begins_leaves_the_path_to_the_next(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """An attempt counted as in progress that nobody made: the worker was not reached again. None is made twice."""
    path = Paced(clock)
    path.go_on.set()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread, *_: Any, **__: Any) -> None:
        if where == "runs":
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "__init__" if where == "made" else "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            path.connect_soon()
    assert not path.connecting and path.state is PathState.NEW
    path.connect_soon()
    wait_until(lambda: path.state is PathState.UP, "the next one")
    assert path.attempts == 1


@pytest.mark.parametrize("closed", [False, True])
def test_issue_an_attempt_whose_thread_dies_leaves_the_path_to_the_next(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """For want of memory, before its first step. It counted as in progress for good: no other one was made."""
    path = Paced(clock)
    path.go_on.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "run", lambda _: None)
        path.connect_soon()
        wait_until(lambda: not path.connecting, "the thread ends")
    assert path.state is PathState.NEW and not path.attempts
    if closed:
        assert path.gone(time.monotonic() + WAIT_S) and path.over
        return
    path.connect_soon()
    wait_until(lambda: path.state is PathState.UP, "the next one")
    wait_until(lambda: not path.connecting, "it is over")
    assert path.attempts == 1


def test_issue_an_interrupted_look_does_not_end_an_attempt(clock: list[float]) -> None:
    """Before Python 3.13 an interrupted ``is_alive`` marks the thread as ended: another attempt was made beside it."""
    path = Paced(clock)
    path.connect_soon()
    wait_until(lambda: path.attempts, "it has begun")

    def check() -> None:
        assert path.connecting and not path.gone(0.0)

    assert everywhere(lambda: path.connecting, check, ("simm.", "threading"), waits=True) > 0
    path.go_on.set()
    assert path.gone(time.monotonic() + WAIT_S) and path.attempts == 1


def test_issue_in_a_child_no_attempt_is_in_progress(clock: list[float]) -> None:
    """A fork while another thread started one: the child's copy of the path was never over."""
    path = Paced(clock)
    path.connecting = True
    path._after_fork()
    assert not path.connecting and path.over


class Alarm(RuntimeError):
    """What a signal's handler raises."""


def test_issue_an_attempt_that_a_handlers_error_has_not_stopped_is_not_made_twice(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a lack of threads: the error was lost, and two attempts ran at the same time."""
    path = Paced(clock)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise Alarm("by the engine")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Alarm):
            path.connect_soon()
    assert not path.connecting and path.state is PathState.NEW
    path.connect_soon()
    path.go_on.set()
    wait_until(lambda: path.state is PathState.UP, "the next one")
    assert path.attempts == 1


def test_issue_no_attempt_is_waited_for_by_the_thread_that_is_starting_it(clock: list[float]) -> None:
    """A call in a signal's handler, which has interrupted one that has the lock, waited for ever."""
    path = Paced(clock)
    path._context = ClientContext(ClientOptions(deadline_s=0.05))
    with path._lock:
        path.connect_soon()
    assert not path.connecting and path.state is PathState.NEW


def test_absent_is_not_tried_again(clock: list[float]) -> None:
    path = Paced(clock)
    with path._lock:
        path._set_down("no RDMA device", PathState.ABSENT)
        path._set_down("cannot connect")
    assert path.state is PathState.ABSENT
    assert not path.wants_connection(clock[0] + 1e6)


@pytest.mark.parametrize("failure", [None, "nobody there"])
def test_closed_is_final(clock: list[float], failure: str | None) -> None:
    """The result of an attempt in progress does not reopen a closed path."""
    path = Paced(clock)
    path.failure = failure
    path.connect_soon()
    path.close()
    assert not path.over, "an attempt is in progress"
    assert not path.gone(0.0)
    path.go_on.set()
    assert path.gone(time.monotonic() + 30.0)
    assert path.over and path.state is PathState.CLOSED
    path.connect_soon()
    assert not path.connecting and not path.wants_connection(clock[0] + 1e6)


def test_close_ends_idle_connections_once(clock: list[float]) -> None:
    path = Paced(clock)
    idle = [Connection(), Connection()]
    path._idle += idle
    path.close()
    path.close()
    assert all(each.closed == 1 for each in idle) and not path._idle


def test_a_close_that_is_interrupted_ends_the_other_connections_and_the_next_close_that_one(
    clock: list[float],
) -> None:
    path = Paced(clock)
    idle = [Connection(), Connection(), Connection()]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    path._idle += idle
    idle[1].close = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        path.close()
    assert [each.closed for each in idle] == [1, 0, 1] and not path.over
    del idle[1].close
    assert path.close() and path.over
    assert [each.closed for each in idle] == [1, 1, 1]


def pooled(kind: type[Path]) -> Any:
    """Return a path of this kind, without a server."""
    context = ClientContext(ClientOptions())
    return RdmaPath(context, ("host", 1)) if kind is RdmaPath else TcpPath(context, "host", 1)


@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("kind", [TcpPath, RdmaPath])
def test_issue_an_interrupt_leaves_no_connection_open_after_the_next_close(kind: type[Path], how: str) -> None:
    """A list of the interrupted call's alone had them."""
    made: list[tuple[Any, list[Connection]]] = []

    def call() -> None:
        path, idle = pooled(kind), [Connection(), Connection()]
        path._idle += idle
        path._connections = len(idle)
        made.append((path, idle))
        if how == "close":
            path.close()
        elif kind is TcpPath:
            path._drop_idle()
        else:
            path.drop("lost")

    def check() -> None:
        if made:
            path, idle = made.pop()
            assert path.close() and path.over
            assert all(each.closed for each in idle) and not path._leaving and not path._at_end

    assert everywhere(call, check, ("simm.sdk.path", "simm.sdk.tcp", "simm.sdk.rdma_pool")) > 5


@pytest.mark.parametrize("interrupted", [False, True])
def test_issue_a_close_beside_another_one_leaves_its_connection_to_it(clock: list[float], interrupted: bool) -> None:
    """It said that all was closed, so that nobody ended what an interrupt of the other one had spared."""
    path = Paced(clock)
    connection = Connection()
    path._idle.append(connection)
    close, beside = connection.close, []
    main = threading.current_thread()

    def while_another_closes(*_: Any) -> None:
        if threading.current_thread() is not main:  # the ends meet
            return close()
        another = threading.Thread(target=lambda: beside.append(path.close()))
        another.start()
        another.join(30.0)
        if interrupted:
            raise KeyboardInterrupt
        close()

    connection.close = while_another_closes  # type: ignore[method-assign]
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            path.close()
    else:
        assert path.close()
    assert beside == [False]
    del connection.close
    assert path.close() and path.over and connection.closed == 1


def test_a_forked_child_has_closed_paths_and_open_locks_do_not_matter(clock: list[float]) -> None:
    path = Paced(clock)
    path.attempt(None)
    with path._lock:  # held by another thread of the parent
        path._after_fork()
    assert (path.state, path.down_reason) == (PathState.CLOSED, "forked")


def test_closing_waits_for_the_paths_in_use(clock: list[float]) -> None:
    used, unused = Paced(clock), Paced(clock)
    rdma = ClientRdma()
    rdma.add(used)
    rdma.add(unused)
    used.connect_soon()
    assert not rdma.close(0.0)
    assert unused.over and not used.over
    rdma.tidy()
    assert rdma._paths == [used]
    used.go_on.set()
    assert rdma.close(30.0)
    assert not rdma._paths


def test_a_heartbeat_is_stale_once_it_has_stood_still() -> None:
    heartbeat = Heartbeat()
    heartbeat.restart(100.0)
    heartbeat.seen(7, 100.0)
    heartbeat.seen(7, 100.0 + STALE_S)
    assert not heartbeat.stale(100.0 + STALE_S)
    assert heartbeat.stale(100.1 + STALE_S)
    heartbeat.seen(8, 100.1 + STALE_S)
    assert not heartbeat.stale(100.1 + STALE_S)


def test_which_arenas_are_closed_for_good() -> None:
    assert arena_closed(State.CLOSED) and arena_closed(State.SUSPENDED)
    assert not arena_closed(State.OPEN)
