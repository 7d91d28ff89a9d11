"""Threads that copy, shared by all clients of a process.

One core does not fill a server's memory bus, so large copies are divided among threads. A process has one pool of them:
several clients, or several threads of an engine that copy at the same time, do not get more threads than the host has
cores for. The caller's thread takes part. It takes whatever part has not begun, so a pool that is busy with other calls
delays nobody: the caller then copies all by itself.

On a host with several NUMA nodes each node has threads of its own, which run on its CPUs: the memory of an arena is one
node's, and a copy from a processor elsewhere shares the link between them. The caller's thread stays where it is.

Nothing is copied after :meth:`CopyPool.run` has returned or raised. Its caller may reuse the memory at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from . import fork

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .threads import Pool

#: More threads than that fill no memory bus.
THREADS_MAX: Final = 8
_NODES: Final = "/sys/devices/system/node"


def default_threads(nodes: str = _NODES) -> int:
    """Return how many threads share a copy: half of the CPUs of a NUMA node that this process may use, at most 8.

    On two CPUs one: the engine or the worker needs the other. Reads a small file for each node.
    """
    allowed = os.sched_getaffinity(0)
    most = 0
    try:
        for name in os.listdir(nodes):
            if name.startswith("node") and name[4:].isdecimal():
                with open(f"{nodes}/{name}/cpulist", encoding="ascii") as file:
                    most = max(most, len(allowed & _cpus(file.read())))
    except (OSError, ValueError):
        most = 0
    return max(1, min(THREADS_MAX, (most or len(allowed)) // 2))


def _cpus(text: str) -> set[int]:
    """Parse the kernel's list format, ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


class CopyPool:
    """Threads that copy, which are made when they are first needed and end with the last user.

    They are those of a :class:`~simm.host.threads.Pool`, as an interrupt of an executor of the standard library stops
    all executors of the process.
    """

    def __init__(self) -> None:
        #: By NUMA node, -1 for threads that run anywhere.
        self._pools: dict[int, Pool] = {}
        self._users = 0
        #: Guards the number of users. No copy takes it.
        self._lock = threading.RLock()  # the collector may end a user in the middle of what follows
        fork.in_child(self._after_fork)

    def join(self) -> None:
        """Count a user."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count a user less. The threads end with the last one.

        A finalizer calls this, in any thread. So it waits for none, and takes no lock whose holder waits for one.
        """
        over: dict[int, Pool] = {}
        with self._lock:
            self._users -= 1
            if self._users <= 0:
                over, self._pools = self._pools, over
        for pool in list(over.values()):
            pool.shutdown(wait=False)

    def run(self, part: Callable[[int], None], count: int, threads: int, node: int = -1) -> None:
        """Call ``part`` with each number below ``count``, in this thread and ``threads`` - 1 others.

        ``node``: the NUMA node whose memory is copied, -1 if it does not matter. When it returns or raises no part runs
        and none will, also after an interruption. It returns only if all parts have ended without an exception, and
        else raises one of theirs.
        """
        numbers = deque(range(count))
        #: An item for each helper that runs; one as soon as no further part may begin; what parts of helpers raised.
        running: list[None] = []
        ended: list[None] = []
        failed: list[BaseException] = []

        def work() -> None:
            while not ended:
                try:
                    number = numbers.popleft()
                except IndexError:
                    return
                part(number)

        def help_out() -> None:
            running.append(None)
            try:
                work()
            except BaseException as exc:
                failed.append(exc)
                ended.append(None)
            finally:
                running.pop()

        helpers = min(threads, count) - 1
        jobs: list[Future[None]] = []
        job: Future[None] | None = None
        try:
            try:
                try:
                    pool = self._helpers(threads - 1, node) if helpers > 0 else None
                except (OSError, ImportError, MemoryError, RuntimeError):  # for the modules of threads; we do it all
                    pool = None
                while pool is not None and len(jobs) < helpers:
                    job = pool.hand_over(help_out)
                    if job is None:  # no thread can be started, or the pool ends just now
                        break
                    jobs.append(job)
                work()
                for job in jobs:
                    if not job.cancel():
                        job.result()
            except BaseException:
                ended += (None,)  # here, as another interrupt may come before a function has begun
                _abandon(running, ended)
                raise
            if len(jobs) < helpers or failed:
                _abandon(running, ended)
            if failed:
                raise failed[0]
        finally:  # else an exception and this frame hold each other, and with them the caller's arena
            failed.clear()
            jobs.clear()
            job = None

    def _helpers(self, count: int, node: int) -> Pool:
        """Return the threads of a node, ``count`` of them if there are so many to spare. Takes no lock."""
        cpus = cpus_of(node)
        node = node if cpus else -1
        pool = self._pools.get(node)
        if pool is None:
            from .threads import Pool  # most processes make no such copy

            made = Pool(count, "simm-copy", functools.partial(_stay_on, cpus) if cpus else None)
            pool = self._pools.setdefault(node, made)  # another thread may just have made them
        pool.grow(count)
        return pool

    def _after_fork(self) -> None:
        """Forget the threads, which only the parent has."""
        self._pools = {}
        self._lock = threading.RLock()


def cpus_of(node: int, nodes: str = _NODES) -> frozenset[int]:
    """Return the CPUs of a NUMA node that this process may use; none if that are all of them, or no such node is known.

    Reads a small file for a node that has not been asked for before.
    """
    known = _cpus_of_node.get((node, nodes))
    if known is None:
        known = frozenset()
        if node >= 0:
            with contextlib.suppress(OSError, ValueError):
                with open(f"{nodes}/node{node}/cpulist", encoding="ascii") as file:
                    known = frozenset(_cpus(file.read()))
        _cpus_of_node[node, nodes] = known
    if not known:
        return known
    allowed = os.sched_getaffinity(0)
    return frozenset() if allowed <= known else known & allowed


_cpus_of_node: Final[dict[tuple[int, str], frozenset[int]]] = {}


def _stay_on(cpus: frozenset[int]) -> None:
    """Let the calling thread run on these CPUs alone, unless there are none or the kernel refuses."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)


def _abandon(running: list[None], ended: list[Any]) -> None:
    """Let no further part of a copy begin, and wait for those that run, deferring KeyboardInterrupt.

    Not by the jobs that are known: a hand-over that was interrupted may have begun one and returned none. A helper
    appends to ``running`` before it reads ``ended``: one of the two sees the other.
    """
    interrupted: BaseException | None = None
    while not ended or running:
        try:
            ended.append(None)
            while running:
                time.sleep(0.0002)
        except BaseException as exc:
            interrupted = exc
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # else the exception and this frame hold each other, and with them the callers' arena


#: All copiers' of this process.
POOL: Final = CopyPool()
