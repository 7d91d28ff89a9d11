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
import functools
import math
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


def lives(thread: threading.Thread) -> bool:
    """Return whether a thread was started and has not ended. O(1).

    Before Python 3.13 a thread counts as ended for good once a signal's handler has raised in its ``is_alive`` or
    ``join``, though it runs. Here that changes nothing.
    """
    lock = getattr(thread, "_tstate_lock", None)  # before 3.13: taken while it runs
    return thread.is_alive() if lock is None else bool(lock.locked())


def ended_within(thread: threading.Thread, seconds: float) -> bool:
    """Wait until a thread has ended, for ``seconds`` at most; return whether it has. One that was not started has.

    An interrupt here does not make it count as ended, as one in its ``join`` does.
    """
    until = time.monotonic() + seconds
    while lives(thread):
        if (left := until - time.monotonic()) <= 0:
            return False
        time.sleep(min(left, BEAT_S / 10))
    return True


class _Plain(threading.Condition):
    """A condition whose lock no interrupt leaves taken by a ``with`` statement, which finds functions of C here.

    Those of the base class are Python's: what a signal's handler raises in them leaves the lock taken for good. On
    Python 3.10 that may still be so for a wait with a time limit, whose caller raises within the ``with``. Python 3.14
    may run a handler just behind ``__enter__`` of any lock (CPython issue 148874): nothing here helps there.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a :meth:`notify`, for ``timeout`` seconds at most; return whether it came. The lock is held."""
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]  # it was given back, and not taken again
                self.acquire()
            raise


@functools.cache
def _job_class() -> type[Future[Any]]:
    """Return the class of a pool's jobs. Loads ``concurrent.futures``, which many processes do not need."""
    from concurrent.futures import Future

    class Job(Future[Any]):
        """What becomes of a call. No interrupt in another thread leaves its lock taken, or one who waits untold.

        ``concurrent.futures.wait`` takes the locks of jobs in Python functions, so it is not for a thread that handles
        signals. On Python 3.10 ``result`` and ``exception`` with a time limit are not for one either.
        """

        _done_callbacks: list[Callable[[Future[Any]], object]]

        def __init__(self) -> None:
            super().__init__()
            self._condition = _Plain()

        def cancel(self) -> bool:
            """Cancel the call unless it has begun; return whether it is cancelled. Tells what an interrupt has left."""
            if not super().cancel():
                return False
            self.tell()
            return True

        def set_running_or_notify_cancel(self) -> bool:
            """Return whether the call is to be run. Tells what an interrupt of :meth:`cancel` has left."""
            if super().set_running_or_notify_cancel():
                return True
            self.tell()
            return False

        def tell(self) -> None:
            """Tell all who wait that it has ended. Twice is harmless."""
            with self._condition:
                self._condition.notify_all()
            self._invoke_callbacks()

        def _invoke_callbacks(self) -> None:
            """Call each once, whichever thread comes first."""
            while self._done_callbacks:
                try:
                    callback = self._done_callbacks.pop(0)
                except IndexError:  # another thread has taken it
                    return
                try:
                    callback(self)
                except Exception:
                    import logging

                    logging.getLogger("concurrent.futures").exception("exception calling callback for %r", self)

    return Job


class _Crew:
    """What a pool shares with its threads, which do not refer to the pool."""

    __slots__ = ("begin", "calls", "closed", "jobs", "most", "pid", "threads")

    def __init__(self, calls: SimpleQueue[Any], most: int, begin: Callable[[], object] | None, closed: bool) -> None:
        #: (job, call, arguments) each; None at the end.
        self.calls = calls
        self.most = most
        self.begin = begin
        self.closed = closed
        #: Those that have not ended.
        self.jobs: set[Future[Any]] = set()
        #: Those that work, or have ended after all calls. Each notes itself when it begins to work.
        self.threads: list[_Member] = []
        self.pid = os.getpid()


class _Member(threading.Thread):
    """A thread of a pool. It does not refer to the pool."""

    def __init__(self, crew: _Crew, name: str) -> None:
        super().__init__(target=_work, args=(crew, self), name=name, daemon=True)
        #: Set when it works, or does not.
        self.begun = Wake()
        #: Whether it runs no call any more, and will not. ``ended`` is set then.
        self.over = False
        self.ended = Wake()

    def wait(self, until: float = math.inf) -> None:
        """Wait until it is over, until ``until`` (monotonic seconds). No interrupt makes it count as over."""
        while not self.over:
            left = until - time.monotonic()
            if left <= 0:
                return
            self.ended.wait(min(left, AGAIN_S))
        self.ended.set()  # for the next one who waits
        self.join(AGAIN_S)  # its last steps, which use nothing of a caller's


class Pool:
    """Threads that run calls, ``threads`` of them at most. A call is run once, or never. Any thread may call it.

    An executor of the standard library queues a call before it starts a thread for it. Where none can be started it
    raises, and a thread that it has runs the call all the same, at any later time. What it has queued then counts as
    an idle thread for good. An interrupt in its semaphore stops all executors of the process. Here a thread is there
    before its call is queued, and threads wait by a queue of C alone.

    Calls are begun in the order in which they came. Threads are started when they are needed and stay. They are
    daemons: a call that hangs keeps no process from its end, which waits ``EXIT_S`` for them. A forked child begins
    without threads, and without the parent's calls. The threads end when nothing refers to the pool.

    A job always ends: a call that no thread can run any more is cancelled.

    Args:
        threads: see above.
        name: of the threads, with a number.
        begin: is called in each thread before its first call. It must not refer to the pool.
    """

    def __init__(self, threads: int, name: str, begin: Callable[[], object] | None = None) -> None:
        from queue import SimpleQueue

        self._name = name
        self._new_job = _job_class()
        self._new_queue: Callable[[], SimpleQueue[Any]] = SimpleQueue
        self._begin(_Crew(SimpleQueue(), threads, begin, False))
        fork.in_child(self._in_child)

    def _begin(self, crew: _Crew) -> None:
        #: Reentrant, as a signal's handler may call here while its thread does.
        self._lock = threading.RLock()
        self._crew = crew
        weakref.finalize(self, crew.calls.put, None).atexit = False

    def _in_child(self) -> None:
        """Leave the threads and their calls to the parent."""
        self._begin(_Crew(self._new_queue(), self._crew.most, self._crew.begin, self._crew.closed))

    @property
    def _jobs(self) -> set[Future[Any]]:
        return self._crew.jobs

    @property
    def _threads(self) -> list[_Member]:
        return self._crew.threads

    def grow(self, threads: int) -> None:
        """Let there be so many threads at least. O(1)."""
        if threads > self._crew.most:
            with self._lock:
                self._crew.most = max(self._crew.most, threads)

    def hand_over(self, call: Callable[..., _T], *arguments: Any) -> Future[_T] | None:
        """Give a call to a thread; return its job. None: nothing runs it, now or later. Does not wait for it.

        None if the pool is shut down, or if no thread is idle and a further one cannot be started. O(1). An interrupt
        takes the call back, unless a thread has begun it.
        """
        job: Future[_T] | None = None
        try:
            with self._lock:
                if _exiting or self._crew.closed:
                    return None
                crew = self._crew
                job = self._new_job()
                crew.jobs.add(job)
                if not _short(crew) or self._start_one(crew) or not _short(crew):
                    crew.calls.put((job, call, arguments))
                    # If the pool was shut down meanwhile, its threads may end before this call.
                    if not crew.closed or not job.cancel():
                        return job
                crew.jobs.discard(job)
                return None
        except BaseException as exc:  # also as the lock is released
            taken_back = job is None or job.cancel()
            if taken_back and job is not None:
                self._crew.jobs.discard(job)
            if not _lacking(exc):
                raise
            return None if taken_back else job

    def _start_one(self, crew: _Crew) -> bool:
        """Start a further thread; return whether it works. Raises what a signal's handler raises, and if there is none.

        After an interrupt the thread works all the same, unless there are enough by then.
        """
        thread = _Member(crew, f"{self._name}_{len(crew.threads)}")
        thread.start()
        while not thread.begun.wait(AGAIN_S) and lives(thread):
            pass  # else it has died before, for want of memory
        return thread in crew.threads

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. ``wait`` for those that are left, or cancel those that have not begun.

        Again after an interrupt it does what is left. A thread of the pool does not wait for itself.

        Without ``wait`` it takes no lock, so a finalizer may call it. The collector may run one in a thread that is
        just starting, and whoever starts that has the pool's lock, and waits for it.
        """
        crew = self._crew
        crew.closed = True
        if wait:
            with self._lock:  # from here on no call is queued
                pass
        if cancel_futures:
            for job in list(crew.jobs):
                job.cancel()
        crew.calls.put(None)
        if wait:
            # Again and again: a thread that has begun late runs a call, but notes itself before.
            while (thread := _working(crew)) is not None:
                thread.wait()


def _working(crew: _Crew) -> _Member | None:
    """Return a thread of a pool that is not over, other than the calling one."""
    for thread in list(crew.threads):
        if not thread.over and thread is not threading.current_thread():
            return thread
    return None


def _short(crew: _Crew) -> bool:
    """Return whether a pool lacks a thread for its calls, and may have one more."""
    return len(crew.jobs) > len(crew.threads) < crew.most


def _lacking(exc: BaseException) -> bool:
    """Return whether there is no memory, lock or thread to spare. Another RuntimeError is a signal handler's."""
    return type(exc) is MemoryError or (isinstance(exc, RuntimeError) and str(exc).startswith("can't"))


#: The threads of all pools of this process, until they end. Also of pools that nobody has any more.
_WORKING: Final[dict[_Member, _Crew]] = {}
fork.in_child(_WORKING.clear)
#: Whether this process ends.
_exiting = False


def _work(crew: _Crew, me: _Member) -> None:
    """Run calls until there are no more. Runs in a thread of a pool, which it does not refer to."""
    given: tuple[Any, ...] | None = None
    left = True  # before the end of all calls
    try:
        if crew.begin is not None:
            crew.begin()
        _WORKING[me] = crew
        crew.threads.append(me)
        if crew.threads.index(me) >= crew.most:  # whoever started it was interrupted, and others were started since
            return
        me.begun.set()
        while (given := crew.calls.get()) is not None:
            try:
                _run(crew, *given)
            except BaseException as exc:  # what a job cannot take, or a lack of memory; the thread goes on
                _end(crew, given[0], exc)
            given = None
            if os.getpid() != crew.pid:  # the call has forked: what is queued is the parent's
                return
        left = False
    finally:
        while True:
            try:  # here, and not in a function: there may be no memory for a call
                if given is not None:
                    crew.jobs.discard(given[0])
                    if not given[0].done():
                        given[0].set_exception(MemoryError("no memory for the end of a call"))
                    given[0].tell()
                    given = None
                if not left:
                    crew.calls.put(None)  # for the next thread
                elif os.getpid() == crew.pid:
                    if me in crew.threads:
                        crew.threads.remove(me)
                    if not crew.threads:
                        for job in list(crew.jobs):
                            job.cancel()
                _WORKING.pop(me, None)
                me.over = True
                me.begun.set()
                me.ended.set()
                break
            except BaseException:  # of a callback: each is called once, so this ends
                time.sleep(AGAIN_S)


def _run(crew: _Crew, job: Future[_T], call: Callable[..., _T], arguments: tuple[Any, ...]) -> None:
    """Run a call, unless its job is cancelled. Whoever has the result finds this thread idle."""
    try:
        if not job.set_running_or_notify_cancel():
            return
        try:
            result = call(*arguments)
        except BaseException as exc:
            crew.jobs.discard(job)
            job.set_exception(exc)
        else:
            crew.jobs.discard(job)
            job.set_result(result)
    finally:
        crew.jobs.discard(job)
        del job, call, arguments  # the job holds the call's exception, which holds this frame


def _end(crew: _Crew, job: Any, error: BaseException) -> None:
    """End a job whose thread has failed, and tell all who wait. Goes on while there is no memory for that."""
    crew.jobs.discard(job)
    while True:
        try:
            if not job.done():
                job.set_exception(error.with_traceback(None))  # whose frames hold the job, which holds the error
            job.tell()
            return
        except BaseException:  # of a callback: each is called once, so this ends
            time.sleep(AGAIN_S)


def _end_pools() -> None:
    """Let the threads of all pools end what they have, for a while: they are stopped in the middle then.

    No pool takes a call from now on: before Python 3.12 a thread that is started at the end never says that it runs.
    """
    global _exiting
    _exiting = True
    until = time.monotonic() + EXIT_S
    working = list(_WORKING)  # no other thread comes in between
    for crew in list(_WORKING.values()):
        crew.closed = True
        crew.calls.put(None)
    for thread in working:
        if thread is not threading.current_thread():
            thread.wait(until)


atexit.register(_end_pools)


class Waiters:
    """Threads that wait for what a plain lock guards to change. Any thread may call it.

    A ``threading.Condition`` gives the lock back and takes it again in Python functions. What a signal's handler raises
    there leaves the lock taken for good, or makes the ``with`` statement release it while another thread has it. Here
    nobody waits within a ``with``: each waits for a lock of its own, and takes the shared one by another ``with``.

    :meth:`notify` wakes one, as dozens of threads may wait for one thing that was given back. So those who wait either
    wait for the same, or are told by :meth:`notify_all`. Where several things were given back by one call, whoever
    takes some wakes the next one: what it calls to look does that, as it alone knows what is left. A wake-up that comes
    too late for its thread, or ends in an error, goes to the next one. One whose thread finds nothing left does not.
    One that an interrupt has cost is made up for after ``AGAIN_S``.
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
                try:
                    if (mine is None or late or left > 0) and met():
                        return True
                except BaseException:
                    if woken:
                        self.notify()
                    raise
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


class Wake:
    """What any thread sets and one waits for, by calls of C alone.

    A ``threading.Event`` takes its lock in Python functions. What a signal's handler raises there leaves the lock taken
    for good: whoever waits hangs, and so does every later thread that sets it.
    """

    def __init__(self) -> None:
        #: Taken while it is not set.
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """End the wait, or the next one. O(1). Twice is once."""
        try:
            self._unset.release()
        except RuntimeError as exc:
            if str(exc) != "release unlocked lock":  # else it is set; a handler may raise another one
                raise

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, for ``timeout_s`` seconds; return whether it was. It is not set any more then."""
        return self._unset.acquire(True, timeout_s)
