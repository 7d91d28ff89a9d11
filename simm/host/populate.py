"""Fault many files in at the same time: several threads on each NUMA node, all nodes at once.

One thread faults in some GiB a second, as the kernel clears each page. So a host with a TiB would take minutes. The
threads of a node run on its CPUs. The pages are then near to those who use them also where the kernel refuses to bind
them (``numa.bind_memory``), as a container's often does.

The caller's thread only waits. It is told how far they are, and may end the work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ..errors import SegmentError
from . import numa
from .mapped_file import MappedFile
from .memory import mib

#: Most threads of one node: more fill no memory bus.
THREADS_MAX: Final = 8
#: What a thread faults in before it takes the next piece: some ten milliseconds.
PIECE_BYTES: Final = 64 << 20
#: Between two looks whether to go on, seconds.
LOOK_S: Final = 0.1


class Wanted(NamedTuple):
    """A file to fault in, and the NUMA node to fault it in on; ``bound``: and to take its pages from."""

    file: MappedFile
    node: int
    bound: bool = False


def threads_of(node: int, sys_root: str = "/") -> int:
    """Return how many threads fault in on a node: as many as it has CPUs that this process may use, up to a limit."""
    allowed = os.sched_getaffinity(0)
    cpus = next((allowed.intersection(each.cpus) for each in numa.nodes(sys_root) if each.id == node), allowed)
    return max(1, min(THREADS_MAX, len(cpus or allowed)))


#: Gets the bytes that are done, those that are new since the last look, and all of them. Returns whether to go on.
Progress = Callable[[int, int, int], bool]


def populate_all(wanted: Sequence[Wanted], *, huge: bool = True, progress: Progress) -> bool:
    """Do :meth:`MappedFile.populate` for all these files. Return False if ``progress`` has ended it.

    That is called in this thread, first with nothing done and then each ``LOOK_S`` seconds. No page is touched any more
    when this returns or raises; those that are there stay. There is no limit of time.

    Raise SegmentError if memory is short, here or on a node.
    """
    _require_room([each for each in wanted if each.bound and each.file.bind(0, each.file.size, each.node)])
    for each in wanted:
        each.file.prepare(0, each.file.size, huge=huge, node=None)
    pieces: dict[int, deque[tuple[MappedFile, int, int]]] = {}
    for file, node, _ in wanted:
        queue = pieces.setdefault(node, deque())
        queue.extend((file, at, min(at + PIECE_BYTES, file.size)) for at in range(0, file.size, PIECE_BYTES))
    work = _Work(sum(each.file.size for each in wanted))
    if not progress(0, 0, work.total):
        return False
    threads = [
        threading.Thread(target=work.run, args=(node, queue), name=f"simm-populate-{node}", daemon=True)
        for node, queue in pieces.items() for _ in range(min(threads_of(node), len(queue)))
    ]  # fmt: skip
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        seen = 0
        for thread in threads:
            while thread.is_alive():
                thread.join(LOOK_S)
                done = work.done
                if not progress(done, done - seen, work.total):
                    work.ended = True
                seen = done
    except RuntimeError as exc:
        raise SegmentError(f"cannot start a thread to fault {mib(work.total)} in: {exc}") from exc
    finally:
        work.ended = True
        for thread in started:
            thread.join()
    if work.error is not None:
        raise work.error
    return work.done == work.total


class _Work:
    """What the threads share. A thread that fails ends the others."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.ended = False
        self.error: BaseException | None = None
        self._done: list[int] = []

    @property
    def done(self) -> int:
        return sum(self._done)

    def run(self, node: int, pieces: deque[tuple[MappedFile, int, int]]) -> None:
        with contextlib.suppress(Exception):  # where they run is a matter of speed
            numa.pin(node)
        try:
            while not self.ended:
                file, start, stop = pieces.popleft()
                file.fault_in(start, stop)
                self._done.append(stop - start)
        except IndexError:
            pass
        except BaseException as exc:
            self.error = exc
            self.ended = True


def _require_room(wanted: Sequence[Wanted]) -> None:
    """Raise SegmentError if bound files need more than their node has, where the kernel would call the OOM killer.

    All of a node's that take pages of one kind together, as they do so at the same time.
    """
    together: dict[tuple[type[MappedFile], int], list[MappedFile]] = {}
    for file, node, _ in wanted:
        together.setdefault((type(file), node), []).append(file)
    for (_, node), files in together.items():
        count = sum(file.missing_bytes for file in files)
        free = files[0].free_on_node(node)
        if free is not None and count > free:
            raise SegmentError(
                f"the arenas need {mib(count)} on NUMA node {node}, which has {mib(free)} left; configure smaller "
                "ones or another node"
            )
