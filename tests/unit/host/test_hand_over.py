"""A call that is given to a pool of threads is run once, or never: also where the pool can start no thread."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from simm.host.threads import Pool
from tests.support.client_values import forked
from tests.support.interrupts import everywhere
from tests.support.scarce_threads import ERRORS, no_threads
from tests.support.waiting import WAIT_S

THREADS = 4


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
    assert not thread.is_alive() and gone() is None
