"""Threads for what may take long: a heartbeat beside one long call, and the closing of descriptors. And how to wait,
and a pool of threads.

A descriptor that came from another process is closed in a thread of its own. How long ``close`` takes is for the other
process to choose. A TCP socket with SO_LINGER waits for its peer, and a file in user space (FUSE) for the program that
serves it: for hours, in whichever thread closes the last descriptor. It is enough that a message with descriptors lies
unread in a socket that is closed, or is read without room for them: the kernel drops them at once, in the same thread.
So whoever serves others takes all descriptors out of a message, and lets these threads close them, and the socket too.

A thread that waits in ``close`` can do nothing else, so there are ``THREADS_MAX``. They end when nothing is left to do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import fork

if TYPE_CHECKING:
    from concurrent.futures import Future
    from queue import SimpleQueue

_T = TypeVar("_T")

#: What is raised where the system has no process, descriptor, thread or memory to spare, which may pass.
LACKING: Final = (OSError, MemoryError, RuntimeError)
#: Between two beats, seconds: a tenth of what readers of an arena wait for one.
BEAT_S: Final = 0.05
#: At the end of the process the calls in pools have so long, seconds: more than a client's default deadline.
EXIT_S: Final = 10.0
#: No block takes as long. One that does has hung, and its heartbeat stops.
BEATS_S_MAX: Final = 600.0
THREADS_MAX: Final = 16
#: Beyond so many that are not closed yet, no more of those should be taken who send them.
WAITING_MAX: Final = 64
#: Who waits looks again after so long without a wake-up, seconds: an interrupt may have cost it one.
AGAIN_S: Final = 0.1


@contextlib.contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call ``beat`` from a thread every ``BEAT_S`` within the block, for ``BEATS_S_MAX`` at most.

    A sort of 10^7 entries is one call of numpy, which takes seconds. It holds no interpreter lock, so a thread beats
    meanwhile. A process that is stopped or has ended does not. Where no thread can be started, nothing beats.
    """
    ended = threading.Event()
    until = time.monotonic() + BEATS_S_MAX

    def run() -> None:
        while not ended.wait(BEAT_S) and time.monotonic() < until:
            beat()

    thread = threading.Thread(target=run, name="simm-beat", daemon=True)
    # Without threads to spare nothing beats: what is done in the block matters more.
    with contextlib.suppress(RuntimeError, MemoryError):
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:  # it was started
            thread.join()


class Pool:
    """Threads that run calls, ``threads`` of them at most. A call is run once, or never. Any thread may call it.

    An executor of the standard library queues a call before it starts a thread for it. Where none can be started it
    raises, and a thread that it has runs the call all the same, at any later time. What it has queued then counts as
    an idle thread for good. An interrupt in its semaphore stops all executors of the process. Here a thread is there
    before its call is queued, and threads wait by a queue of C alone.

    Calls are begun in the order in which they came. Threads are started when they are needed and stay. They are
    daemons: a call that hangs keeps no process from its end, which waits ``EXIT_S`` for them. A forked child begins
    without threads, and without the parent's calls. The threads end when nothing refers to the pool.
    """

    def __init__(self, threads: int, name: str) -> None:
        from concurrent.futures import Future  # many processes have no pool
        from queue import SimpleQueue

        self._threads_max, self._name = threads, name
        self._new_job: type[Future[Any]] = Future
        self._new_queue: Callable[[], SimpleQueue[Any]] = SimpleQueue
        self._closed = False
        self._begin()
        fork.in_child(self._begin)
        _POOLS.add(self)

    def _begin(self) -> None:
        #: Reentrant, as a signal's handler may call here while its thread does.
        self._lock = threading.RLock()
        #: (job, call, arguments) each; None at the end.
        self._calls = self._new_queue()
        #: Those that have not ended.
        self._jobs: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._calls.put, None).atexit = False

    def hand_over(self, call: Callable[..., _T], *arguments: Any) -> Future[_T] | None:
        """Give a call to a thread; return its job. None: nothing runs it, now or later. Does not wait for it.

        None if the pool is shut down, or if no thread is idle and a further one cannot be started. O(1). An interrupt
        takes the call back, unless a thread has begun it.
        """
        with self._lock:
            if self._closed:
                return None
            try:
                job: Future[_T] = self._new_job()
            except MemoryError:
                return None
            try:
                self._jobs.add(job)
                if not len(self._jobs) > len(self._threads) < self._threads_max or self._start_one():
                    self._calls.put((job, call, arguments))
                    return job
            except BaseException as exc:
                taken_back = job.cancel()
                self._jobs.discard(job)
                if type(exc) is not MemoryError:
                    raise
                return None if taken_back else job
            self._jobs.discard(job)
            return None

    def _start_one(self) -> bool:
        """Start a further thread; return False if there can be none. Raises what a signal's handler raises."""
        permit = [True]
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(permit, self._calls, self._jobs), name=name, daemon=True)
        try:
            self._threads.append(thread)
            thread.start()
        except BaseException as exc:
            with contextlib.suppress(IndexError):  # it has begun
                permit.pop()
                self._threads[:] = [each for each in self._threads if each is not thread]
                if not self._threads:
                    for job in list(self._jobs):  # of a handler that has relied on this thread
                        job.cancel()
            # Of the start itself: another RuntimeError is a handler's.
            if type(exc) is MemoryError or (isinstance(exc, RuntimeError) and str(exc).startswith("can't")):
                return False
            raise
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. ``wait`` for those that are left, or cancel those that have not begun.

        Again after an interrupt it does what is left. A thread of the pool does not wait for itself.
        """
        with self._lock:
            self._closed = True
        if cancel_futures:
            for job in list(self._jobs):
                job.cancel()
        self._calls.put(None)
        if wait:
            self._join(None)

    def _join(self, until: float | None) -> None:
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                with contextlib.suppress(RuntimeError):  # a handler has interrupted its start
                    thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _work(permit: list[bool], calls: SimpleQueue[Any], jobs: set[Future[Any]]) -> None:
    """Run calls until there are no more. Runs in a thread of a pool, which it does not refer to."""
    try:
        permit.pop()
    except IndexError:  # whoever started this thread was interrupted, and counts on none
        return
    while (given := calls.get()) is not None:
        with contextlib.suppress(BaseException):  # what a job cannot take; the thread goes on
            _run(jobs, *given)
        del given
    calls.put(None)  # for the next thread


def _run(jobs: set[Future[Any]], job: Future[_T], call: Callable[..., _T], arguments: tuple[Any, ...]) -> None:
    """Run a call, unless its job is cancelled. Whoever has the result finds this thread idle."""
    try:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = call(*arguments)
        except BaseException as exc:
            jobs.discard(job)
            job.set_exception(exc)
        else:
            jobs.discard(job)
            job.set_result(result)
    finally:
        jobs.discard(job)
        del job, call, arguments  # the job holds the call's exception, which holds this frame


#: Those of this process.
_POOLS: Final[weakref.WeakSet[Pool]] = weakref.WeakSet()


def _end_pools() -> None:
    """Let the threads of all pools end what they have, for a while: they are stopped in the middle then."""
    until = time.monotonic() + EXIT_S
    pools = list(_POOLS)
    for pool in pools:
        pool.shutdown(wait=False)
    for pool in pools:
        pool._join(until)


atexit.register(_end_pools)


class Waiters:
    """Threads that wait for what a plain lock guards to change. Any thread may call it.

    A ``threading.Condition`` gives the lock back and takes it again in Python functions. What a signal's handler raises
    there leaves the lock taken for good, or makes the ``with`` statement release it while another thread has it. Here
    nobody waits within a ``with``: each waits for a lock of its own, and takes the shared one by another ``with``.

    :meth:`notify` wakes one, as dozens of threads may wait for one thing that was given back. A wake-up that its thread
    does not use goes to the next one. One that an interrupt has cost is made up for after ``AGAIN_S``.
    """

    __slots__ = ("_lock", "_waiting")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        #: A taken lock for each thread that waits. What an interrupted wait has left goes with the next wake-up.
        self._waiting: list[threading.Lock] = []

    def __bool__(self) -> bool:
        """Return whether somebody may be waiting."""
        return bool(self._waiting)

    def notify(self) -> None:
        """Wake who has waited longest. The lock is held. Twice is harmless."""
        waiting = self._waiting
        if waiting:
            if waiting[0].locked():
                waiting[0].release()
            del waiting[0]

    def notify_all(self) -> None:
        """Wake all who wait. The lock is held. A call that was interrupted is to be made again, which is harmless."""
        waiting = self._waiting
        while waiting:
            if waiting[-1].locked():
                waiting[-1].release()
            del waiting[-1]

    def wait_for(self, met: Callable[[], bool], until: float, *, late: bool = True) -> bool:
        """Wait until ``met`` returns True, until ``until`` (monotonic seconds); return whether it has.

        The lock is not held, but is during each call of ``met``. The first call is made whatever the time is. Without
        ``late`` none is made when a wait has ended too late. Raises what ``met`` raises.
        """
        mine: threading.Lock | None = None
        while True:
            with self._lock:
                woken = mine is not None and mine not in self._waiting
                if mine is not None and not woken:
                    self._waiting.remove(mine)
                left = until - time.monotonic()
                if (mine is None or late or left > 0) and met():
                    return True
                if left <= 0:
                    if woken:
                        self.notify()
                    return False
                mine = threading.Lock()
                mine.acquire()
                self._waiting.append(mine)
            mine.acquire(True, min(left, AGAIN_S))


class Closer:
    """See above. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: deque[int] = deque()
        self._threads = 0
        self._closing = 0
        fork.in_child(self._in_child)

    @property
    def waiting(self) -> int:
        """Number of descriptors that are not closed yet."""
        return len(self._left) + self._closing

    def close(self, fds: Iterable[int]) -> None:
        """Close these descriptors soon. Does not wait."""
        with self._lock:
            self._left.extend(fds)
            if not self._left or self._threads >= min(THREADS_MAX, self.waiting):
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="simm-closer", daemon=True).start()
        except (RuntimeError, MemoryError):  # no more threads: those that run go on, and the next call tries again
            with self._lock:
                self._threads -= 1

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    self._threads -= 1
                    return
                fd = self._left.popleft()
                self._closing += 1
            try:
                with contextlib.suppress(OSError):
                    os.close(fd)
            finally:
                with self._lock:
                    self._closing -= 1

    def _in_child(self) -> None:
        """The threads, and perhaps the lock's holder, are the parent's; so are the descriptors that they close."""
        self._lock = threading.Lock()
        self._left.clear()
        self._threads = self._closing = 0


CLOSER: Final = Closer()
