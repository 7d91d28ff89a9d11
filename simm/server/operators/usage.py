"""What the processes of a worker use: processor time, memory, descriptors. Its supervisor reads it of the system.

So a process that hangs is told of as well, and none is asked.

Before Linux 6.2 descriptors are counted by listing them, which takes the supervisor's loop about 8 us for each, 7 ms
for 900. So they are counted anew no sooner than ``COUNT_S`` after the last time, and that takes ``COUNTING_SHARE`` of
the time at most.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ...net.process import Child

#: Seconds between two counts of a process's descriptors, and the part of the time that counting takes at most.
COUNT_S: Final = 15.0
COUNTING_SHARE: Final = 0.01
#: Of processes that have not been asked about for so long nothing is kept, seconds.
_FORGET_S: Final = 600.0


class Usage(NamedTuple):
    """What the processes of one kind use together: seconds of processor time, bytes of memory, of private memory.

    ``descriptors`` and ``descriptors_max``: what one of them has open, and may: the one with the least left in
    proportion. 0, 0: the system does not tell.
    """

    cpu_s: float = 0.0
    resident: int = 0
    private: int = 0
    descriptors: int = 0
    descriptors_max: int = 0


def usage_of(processes: Iterable[tuple[str, Child]], before: Iterable[tuple[str, float]] = ()) -> dict[str, Usage]:
    """Return, by what processes do, what they use. Omits what has ended.

    ``before``: the processor time of predecessors, seconds.
    """
    import psutil  # see metrics.load()

    total: dict[str, Usage] = {}
    for name, spent in before:
        if spent:
            total[name] = Usage(total.get(name, Usage()).cpu_s + spent)
    for name, child in processes:
        try:
            process = psutil.Process(child.pid)
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
        except (psutil.Error, OSError):
            continue
        so_far = total.get(name, Usage())
        descriptors = max(so_far[3:], descriptors_of(child.pid), key=lambda pair: pair[0] / max(pair[1], 1))
        total[name] = Usage(
            so_far.cpu_s + times.user + times.system, so_far.resident + memory.rss,
            so_far.private + memory.rss - memory.shared, *descriptors,
        )  # fmt: skip
    return total


class Counts:
    """How many descriptors processes have open, where that takes a list of them: as many as a moment ago.

    Args:
        listed: returns the names in a folder. Raises OSError.
        clock: returns seconds.
    """

    def __init__(
        self, listed: Callable[[str], list[str]] = os.listdir, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._listed = listed
        self._clock = clock
        #: Process id -> when it is to be counted anew, and its last count.
        self._known: dict[int, tuple[float, int]] = {}

    def of(self, pid: int) -> int:
        """Return how many a process had at the last count, which is at most ``COUNT_S`` ago if counting is cheap.

        Raises OSError for a process that has ended, or is another user's. O(descriptors) where it is counted anew.
        """
        began = self._clock()
        due, count = self._known.get(pid, (began, 0))
        if began >= due:
            try:
                count = len(self._listed(f"/proc/{pid}/fd"))
            except OSError:
                self._known.pop(pid, None)
                raise
            now = self._clock()
            self._known = {each: held for each, held in self._known.items() if now - held[0] < _FORGET_S}
            self._known[pid] = now + max(COUNT_S, (now - began) / COUNTING_SHARE), count
        return count


_COUNTS: Final = Counts()


def descriptors_of(pid: int, counts: Counts = _COUNTS) -> tuple[int, int]:
    """Return how many descriptors a process has open, and how many it may; 0, 0 if the system does not tell.

    From Linux 6.2 on the size of the folder is their number. Before that it may be that of some seconds ago
    (:class:`Counts`).
    """
    try:
        number = os.stat(f"/proc/{pid}/fd").st_size or counts.of(pid)
        return number, resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    except OSError:
        return 0, 0
