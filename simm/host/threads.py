"""Threads for what may take long: a heartbeat beside one long call, and the closing of descriptors. And how to wait.

A descriptor that came from another process is closed in a thread of its own. How long ``close`` takes is for the other
process to choose. A TCP socket with SO_LINGER waits for its peer, and a file in user space (FUSE) for the program that
serves it: for hours, in whichever thread closes the last descriptor. It is enough that a message with descriptors lies
unread in a socket that is closed, or is read without room for them: the kernel drops them at once, in the same thread.
So whoever serves others takes all descriptors out of a message, and lets these threads close them, and the socket too.

A thread that waits in ``close`` can do nothing else, so there are ``THREADS_MAX``. They end when nothing is left to do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from . import fork

#: What is raised where the system has no process, descriptor, thread or memory to spare, which may pass.
LACKING: Final = (OSError, MemoryError, RuntimeError)
#: Between two beats, seconds: a tenth of what readers of an arena wait for one.
BEAT_S: Final = 0.05
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
    with contextlib.suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:  # it was started
            thread.join()


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
        except RuntimeError:  # no more threads: those that run go on, and the next call tries again
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
