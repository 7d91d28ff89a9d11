"""A call that is given to a pool of threads is run once, or never: also where the pool can start no thread."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import pytest

from simm.host import threads as threads_module
from simm.host.threads import Pool
from tests.support.client_values import forked
from tests.support.interrupts import everywhere
from tests.support.scarce_threads import ERRORS, no_threads
from tests.support.waiting import WAIT_S, wait_until

THREADS = 4
#: Where a signal's handler may raise: also in what the standard library does with a job.
WITH_THE_LIBRARY = ("simm.host", "threading", "concurrent.futures")


class Noting(Pool):
    """Some threads, and what they have run. :meth:`occupy` keeps one of them until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__(THREADS, "test-pool")
        self.go, self.busy = threading.Event(), threading.Event()
        self.ran: list[str] = []

    def occupy(self) -> None:
        def wait() -> None:
            self.busy.set()
            assert self.go.wait(WAIT_S)

        assert self.hand_over(wait) is not None and self.busy.wait(WAIT_S)
        self.busy.clear()

    def note(self, what: str) -> str:
        self.ran.append(what)
        return what

    def fail(self, what: str) -> str:
        self.ran.append(what)
        raise ValueError(what)

    def all_at_once(self) -> bool:
        """Return whether as many calls as there may be threads run at the same time."""
        met = threading.Barrier(THREADS)
        jobs = [self.hand_over(met.wait, WAIT_S) for _ in range(THREADS)]
        try:
            return sorted(job.result(WAIT_S) for job in jobs if job is not None) == list(range(THREADS))
        except threading.BrokenBarrierError:
            return False


@pytest.fixture
def pool() -> Iterator[Noting]:
    made = Noting()
    yield made
    made.go.set()
    made.shutdown()


def test_a_job_has_what_its_call_returns_or_raises(pool: Noting) -> None:
    good, bad = pool.hand_over(pool.note, "good"), pool.hand_over(pool.fail, "bad")
    assert good is not None and good.result(WAIT_S) == "good"
    assert bad is not None and isinstance(bad.exception(WAIT_S), ValueError)


@pytest.mark.parametrize("error", ERRORS)
def test_a_call_that_no_thread_is_started_for_is_not_run_by_another_one(pool: Noting, error: type[Exception]) -> None:
    pool.occupy()
    with no_threads("test-pool", error):
        assert pool.hand_over(pool.note, "lost") is None
    pool.go.set()
    pool.shutdown()  # what is queued is taken before
    assert pool.ran == []


@pytest.mark.parametrize("error", ERRORS)
def test_without_any_thread_a_call_is_not_run_by_the_first_one_that_starts(
    pool: Noting, error: type[Exception]
) -> None:
    with no_threads("test-pool", error):
        assert pool.hand_over(pool.note, "lost") is None
    job = pool.hand_over(pool.note, "next")
    assert job is not None and job.result(WAIT_S) == "next" and pool.ran == ["next"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("some", [False, True])
def test_after_a_lack_of_threads_all_of_them_work(pool: Noting, some: bool, error: type[Exception]) -> None:
    """An executor's would count what it has queued as idle threads, and one would do all for good."""
    if some:
        pool.occupy()
    with no_threads("test-pool", error):
        assert [pool.hand_over(pool.note, "lost") for _ in range(2 * THREADS)] == [None] * 2 * THREADS
    pool.go.set()
    assert pool.all_at_once() and pool.all_at_once()
    assert pool.ran == [] and len(pool._threads) == THREADS


def test_an_idle_thread_runs_calls_where_no_other_can_be_started(pool: Noting) -> None:
    first = pool.hand_over(pool.note, "first")
    assert first is not None and first.result(WAIT_S)
    with no_threads("test-pool"):
        second = pool.hand_over(pool.note, "second")
        assert second is not None and second.result(WAIT_S) == "second"


def test_there_are_no_more_threads_than_the_pool_may_have(pool: Noting) -> None:
    for _ in range(THREADS):
        pool.occupy()
    jobs = [pool.hand_over(pool.note, str(number)) for number in range(3 * THREADS)]
    assert pool.ran == [] and len(pool._threads) == THREADS
    pool.go.set()
    assert [job.result(WAIT_S) for job in jobs if job is not None] == [str(number) for number in range(3 * THREADS)]


def test_a_pool_that_is_shut_down_runs_what_it_has_and_nothing_else(pool: Noting) -> None:
    for _ in range(THREADS):
        pool.occupy()
    left = pool.hand_over(pool.note, "left")
    pool.shutdown(wait=False)
    assert pool.hand_over(pool.note, "late") is None
    pool.go.set()
    pool.shutdown()
    assert left is not None and left.done() and pool.ran == ["left"]


def test_an_end_cancels_what_has_not_begun(pool: Noting) -> None:
    for _ in range(THREADS):
        pool.occupy()
    left = pool.hand_over(pool.note, "left")
    pool.shutdown(wait=False, cancel_futures=True)
    pool.go.set()
    pool.shutdown()
    assert left is not None and left.cancelled() and pool.ran == []
    with contextlib.suppress(CancelledError):
        left.result(0)


def test_an_end_that_was_interrupted_cancels_what_is_left(pool: Noting) -> None:
    """And whoever waits for a cancelled job is woken."""
    for _ in range(THREADS):
        pool.occupy()
    jobs = [pool.hand_over(pool.note, str(number)) for number in range(3)]
    first = jobs[1]
    assert first is not None

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    first.add_done_callback(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        pool.shutdown(wait=False, cancel_futures=True)
    pool.shutdown(wait=False, cancel_futures=True)
    assert all(job is not None and job.cancelled() for job in jobs)
    pool.go.set()
    pool.shutdown()
    assert pool.ran == [] and not pool._jobs


@pytest.mark.parametrize("some", [False, True])
def test_an_interrupt_at_any_place_loses_and_repeats_nothing(some: bool) -> None:
    """The call is run once at most, and the next ones are run, in all threads."""
    pools: list[Noting] = []

    def begin() -> None:
        pools.append(Noting())
        if some:
            pools[-1].occupy()

    def end() -> None:
        pool = pools[-1]
        pool.go.set()
        assert pool.all_at_once()
        assert pool.ran in ([], ["given"])
        pool.shutdown()
        assert not pool._jobs and not any(thread.is_alive() for thread in pool._threads)
        begin()

    begin()
    try:
        assert everywhere(lambda: pools[-1].hand_over(pools[-1].note, "given"), end, ("simm.host",)) > 3
    finally:
        for pool in pools:
            pool.go.set()
            pool.shutdown(wait=False)


class Work:
    """A pool of one thread, which runs one job until ``go`` is set. Another one waits for it, and a thread for that."""

    def __init__(self) -> None:
        self.pool, self.go = Pool(1, "test-pool"), threading.Event()
        running, queued = self.pool.hand_over(self.go.wait, WAIT_S), self.pool.hand_over(int)
        assert running is not None and queued is not None
        self.running, self.queued = running, queued
        wait_until(running.running, "it has begun")
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()
        wait_until(lambda: queued._condition._waiters, "it waits")  # type: ignore[attr-defined]

    def _wait(self) -> None:
        with contextlib.suppress(CancelledError):
            self.queued.result()

    def use(self, what: str) -> None:
        if what == "hand_over":
            self.pool.hand_over(int)
        elif what == "shutdown":
            self.pool.shutdown(wait=False, cancel_futures=True)
        elif what == "cancel":
            self.queued.cancel()
        elif what == "done":
            self.running.done()
        else:
            with contextlib.suppress(NotYet):
                getattr(self.running, what)(0.0005)

    def end(self) -> None:
        """Check that all of it ends."""
        self.go.set()
        ending = threading.Thread(target=self.pool.shutdown, daemon=True)
        ending.start()
        ending.join(WAIT_S)
        assert not ending.is_alive(), "a thread of the pool is lost"
        self._waiting.join(WAIT_S)
        assert not self._waiting.is_alive(), "who waits was not told"
        assert self.running.result(0) and self.queued.done() and not self.pool._jobs


@pytest.mark.parametrize("what", ["done", "cancel", "result", "exception", "hand_over", "shutdown"])
def test_issue_no_interrupt_in_what_a_job_offers_costs_a_thread(what: str) -> None:
    """The job's lock stayed with the thread that was interrupted, and the pool's thread waited for it for ever."""
    work = [Work()]

    def check() -> None:
        work[0].end()
        work[0] = Work()

    try:
        assert everywhere(lambda: work[0].use(what), check, WITH_THE_LIBRARY) > 2
    finally:
        work[0].go.set()
        work[0].pool.shutdown(wait=False, cancel_futures=True)


def test_issue_a_pool_that_a_handler_shuts_down_takes_no_call(pool: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was queued behind the end of the threads, and its job never ended."""
    first = pool.hand_over(pool.note, "first")
    assert first is not None and first.result(WAIT_S)
    made = pool._new_job

    def interrupted() -> Future[Any]:
        pool.shutdown()
        return made()

    monkeypatch.setattr(pool, "_new_job", interrupted)
    assert pool.hand_over(pool.note, "given") is None
    assert pool.ran == ["first"] and not pool._jobs


@pytest.mark.parametrize("where", ["set_running_or_notify_cancel", "set_result", "notify_all"])
def test_issue_a_lack_of_memory_in_a_thread_ends_the_job_and_not_the_thread(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was told, and whoever waited for the job did so for ever."""
    monkeypatch.setattr(threads_module, "AGAIN_S", 0.01)
    pool, go = Pool(1, "test-pool"), threading.Event()
    held, job = pool.hand_over(go.wait, WAIT_S), pool.hand_over(int)
    assert held is not None and job is not None
    target: Any = job._condition if where == "notify_all" else job
    real, lacks = getattr(target, where), [True, True]

    def without_memory(*given: Any) -> Any:
        if lacks:
            lacks.pop()
            raise MemoryError
        return real(*given)

    monkeypatch.setattr(target, where, without_memory)
    waiting = threading.Thread(target=job.exception, daemon=True)
    waiting.start()
    wait_until(lambda: job._condition._waiters, "it waits")  # type: ignore[attr-defined]
    go.set()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    # With what the call has returned, if that was noted before.
    assert isinstance(job.exception(0), MemoryError) or job.result(0) == 0
    after = pool.hand_over(str)
    assert after is not None and after.result(WAIT_S) == ""
    pool.shutdown()
    assert not pool._jobs


def test_issue_a_thread_that_dies_as_it_begins_counts_for_nothing(
    pool: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls were left to it."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "run", lambda _: None)
        assert pool.hand_over(pool.note, "lost") is None
    assert not pool._jobs and not pool._threads
    assert pool.all_at_once() and pool.ran == []


@pytest.mark.parametrize("running", [False, True])
def test_issue_a_thread_that_dies_later_is_replaced_and_its_calls_end(
    pool: Noting, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """The call that a thread had taken never ended, and counted as one that needs a thread for good."""
    for _ in range(THREADS):
        pool.occupy()
    threads = list(pool._threads)

    def die(*_: Any) -> None:
        raise MemoryError

    def run(crew: Any, job: Any, *_: Any) -> None:
        if running:
            assert job.set_running_or_notify_cancel()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(threads_module, "AGAIN_S", 0.01)
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(threads_module, "_run", run)
        patch.setattr(threads_module, "_end", die)
        lost = [pool.hand_over(pool.note, "lost") for _ in range(THREADS)]  # one for each
        left = pool.hand_over(pool.note, "left")
        # At first there is no memory for the rescue either.
        for job in lost:
            assert job is not None
            lacks, real = [True], job.set_exception

            def lacking(error: BaseException, lacks: list[bool] = lacks, real: Any = real) -> None:
                if lacks:
                    lacks.pop()
                    raise MemoryError
                real(error)

            patch.setattr(job, "set_exception", lacking)
        pool.go.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
    assert all(job is not None and job.done() and isinstance(job.exception(0), MemoryError) for job in lost)
    assert left is not None and left.cancelled() and not pool._threads
    assert pool.all_at_once() and pool.ran == [] and not pool._jobs


def test_issue_without_a_lock_for_a_job_nothing_runs_the_call(pool: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reached the engine."""

    def fail() -> Future[Any]:
        raise RuntimeError("can't allocate lock")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_new_job", fail)
        assert pool.hand_over(pool.note, "lost") is None
    assert pool.all_at_once() and pool.ran == []


def test_issue_an_end_after_one_that_was_interrupted_waits_for_the_calls() -> None:
    """Before Python 3.13 an interrupted join marks the thread as ended: the next end returned at once."""
    made: list[tuple[Pool, list[str]]] = []

    def begin() -> None:
        ended: list[str] = []

        def call() -> None:
            time.sleep(0.03)
            ended.append("call")

        pool = Pool(1, "test-pool")
        assert pool.hand_over(call) is not None
        made.append((pool, ended))

    def check() -> None:
        pool, ended = made.pop()
        pool.shutdown()
        assert ended == ["call"]
        begin()

    begin()
    try:
        assert everywhere(lambda: made[-1][0].shutdown(), check, WITH_THE_LIBRARY, waits=True) > 5
    finally:
        for pool, _ in made:
            pool.shutdown()


def test_issue_an_end_waits_for_a_thread_that_begins_late() -> None:
    """It takes a call that was queued before the end."""
    slow, busy = threading.Event(), threading.Event()
    order: list[str] = []

    def begin() -> None:
        if threading.current_thread().name.endswith("_1"):
            assert slow.wait(WAIT_S)

    pool = Pool(2, "test-pool", begin)
    first = pool.hand_over(busy.wait, WAIT_S)
    assert first is not None
    early = pool._threads[0]
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        pool.hand_over(int)
    held = threading.Event()
    # It counts as idle in a callback, and takes no call.
    first.add_done_callback(lambda _: held.wait(WAIT_S) and None)
    busy.set()
    wait_until(lambda: not pool._jobs, "the first call ends")

    def call() -> None:
        held.set()
        early.join(WAIT_S)
        time.sleep(0.05)
        order.append("call")

    def end() -> None:
        pool.shutdown()
        order.append("end")

    job = pool.hand_over(call)
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    wait_until(lambda: pool._crew.calls.qsize() == 2, "the end has begun")
    slow.set()
    ending.join(WAIT_S)
    assert job is not None and job.result(WAIT_S) is None
    assert order == ["call", "end"]


def test_issue_a_finalizer_in_a_thread_that_starts_ends_the_pool() -> None:
    """It waited for the lock of one who waited for that thread."""
    pools: list[Pool] = []
    pools.append(Pool(1, "test-pool", lambda: pools[0].shutdown(wait=False)))
    given: list[Any] = []
    giving = threading.Thread(target=lambda: given.append(pools[0].hand_over(int)), daemon=True)
    giving.start()
    giving.join(WAIT_S)
    assert not giving.is_alive()
    pools[0].shutdown()
    assert len(given) == 1 and (given[0] is None or given[0].done()) and not pools[0]._jobs


def test_each_thread_begins_with_what_the_pool_says() -> None:
    begun: list[threading.Thread] = []
    pool = Pool(1, "test-pool", lambda: begun.append(threading.current_thread()))
    for _ in range(2):
        first = pool.hand_over(lambda: list(begun))
        assert first is not None and first.result(WAIT_S) == begun and len(begun) == 1
    pool.grow(2)
    met = threading.Barrier(2)
    both = [pool.hand_over(met.wait, WAIT_S) for _ in range(2)]
    assert sorted(job.result(WAIT_S) for job in both if job is not None) == [0, 1]
    pool.shutdown()
    assert set(begun) == set(pool._threads) and len(begun) == 2


def test_a_handlers_error_is_no_lack_of_threads(pool: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        raise RuntimeError("the engine's alarm")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="alarm"):
        patch.setattr(threading.Thread, "start", start)
        pool.hand_over(pool.note, "given")
    assert pool.all_at_once() and pool.ran == []


def test_what_a_job_cannot_take_ends_no_thread() -> None:
    pool = Pool(1, "test-pool")

    def fail(_: object) -> None:
        raise KeyboardInterrupt

    go = threading.Event()
    bad = pool.hand_over(go.wait, WAIT_S)
    assert bad is not None
    bad.add_done_callback(fail)
    go.set()
    good = pool.hand_over(threading.get_ident)
    assert good is not None and good.result(WAIT_S)
    pool.shutdown()


def test_a_process_ends_though_a_call_hangs() -> None:
    """With what was queued carried out, unless it comes after what hangs."""
    source = (
        "import threading\n"
        "from simm.host import threads\n"
        "threads.EXIT_S = 0.2\n"
        "hung, good = threads.Pool(1, 'hung'), threads.Pool(1, 'good')\n"
        "hung.hand_over(threading.Event().wait)\n"
        "for number in range(3):\n"
        "    good.hand_over(print, number)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["0", "1", "2"] and not done.stderr


def test_issue_a_process_waits_for_calls_of_a_pool_that_nobody_has() -> None:
    """The close of a client in a task that was cancelled was stopped in the middle."""
    source = (
        "import atexit, threading, time\n"
        "from simm.host.threads import Pool\n"
        "go = threading.Event()\n"
        "def close():\n"
        "    go.wait()\n"
        "    time.sleep(0.3)\n"  # so long the interpreter's end takes
        "    print('closed')\n"
        "Pool(1, 'left').hand_over(close)\n"
        "atexit.register(go.set)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["closed"] and not done.stderr


def test_issue_a_process_that_ends_starts_no_thread_for_a_pool() -> None:
    """Before Python 3.12 it waited for ever for the thread, which may not run any more."""
    source = (
        "from simm.host.threads import Pool\n"
        "class Late:\n"
        "    def __init__(self, show=print):\n"
        "        self.pool, self.show = Pool(1, 'late'), show\n"
        "    def __del__(self):\n"
        "        self.show(self.pool.hand_over(self.show, 'ran'))\n"
        "late = Late()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["None"] and not done.stderr


def test_issue_an_interrupt_as_the_lock_is_released_takes_the_call_back() -> None:
    """The caller had no job, and the call ran all the same."""
    pool, go = Pool(1, "taken-back"), threading.Event()
    busy = pool.hand_over(go.wait)
    assert busy is not None

    class Interrupting:
        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            raise KeyboardInterrupt

    ran: list[int] = []
    lock = pool._lock
    pool._lock = Interrupting(lock)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        pool.hand_over(ran.append, 1)
    pool._lock = lock
    last = pool.hand_over(ran.append, 2)
    go.set()
    assert last is not None
    last.result(WAIT_S)
    assert ran == [2] and not pool._jobs
    pool.shutdown()


def test_issue_a_call_that_forks_leaves_the_queued_ones_to_the_parent() -> None:
    """The child's thread went on with its copy of the queue."""
    source = (
        "import os, threading\n"
        "from simm.host.threads import Pool\n"
        "parent, go = os.getpid(), threading.Event()\n"
        "def fork():\n"
        "    go.wait()\n"
        "    if child := os.fork():\n"
        "        os.waitpid(child, 0)\n"
        "def tell():\n"
        "    os.write(1, b'parent ' if os.getpid() == parent else b'child ')\n"
        "    os.getpid() == parent or os._exit(0)\n"
        "pool = Pool(1, 'forks')\n"
        "pool.hand_over(fork), pool.hand_over(tell)\n"
        "go.set()\n"
        "pool.shutdown()\n"
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.split() == ["parent"]


def test_a_job_that_is_cancelled_is_not_run(pool: Noting) -> None:
    for _ in range(THREADS):
        pool.occupy()
    left = pool.hand_over(pool.note, "left")
    assert left is not None and left.cancel()
    pool.go.set()
    pool.shutdown()
    assert pool.ran == []


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_has_threads_of_its_own(pool: Noting) -> None:
    """The parent's lock is held by another thread, one of its threads is idle, and one is in a call."""
    job = pool.hand_over(pool.note, "of the parent")
    assert job is not None and job.result(WAIT_S)
    pool.occupy()
    with pool._lock:
        assert forked(pool.all_at_once) == 0


def test_a_pool_that_nobody_has_ends_its_threads(pool: Noting) -> None:
    left: Pool | None = Pool(1, "test-left")
    assert left is not None
    job = left.hand_over(threading.current_thread)
    assert job is not None
    thread, gone = job.result(WAIT_S), weakref.ref(left)
    left = None
    thread.join(WAIT_S)
    gc.collect()
    assert not thread.is_alive() and gone() is None and thread not in threads_module._WORKING
