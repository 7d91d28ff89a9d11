"""How slow the machine is at this moment, so that bounds on times scale with it.

A thread sleeps and computes a little, again and again, beside what is measured. It needs more time than that takes
alone when the whole machine stands still for a while. A scheduler prefers such a thread to those that compute, which
may take many times as long. So it also looks how many want to run on each processor.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from tests.support.background import Background
from tests.support.measures import measured

_SLEEP_S: Final = 0.01
_SPINS: Final = 2000


def running() -> int:
    """Return how many threads of this machine run or want to run, the caller's included."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


class Pace(Background):
    """``with Pace() as pace``: then :meth:`check` compares a time that was measured inside with its bound."""

    def __init__(self) -> None:
        super().__init__("pace")
        #: Seconds that the rounds took, and would have taken on a machine with nothing else to do.
        self._took = self._alone = 0.0
        self._worst = 0.0
        #: Sum of what :func:`running` returned in each of so many rounds.
        self._running = self._rounds = 0

    def run(self) -> None:
        """Measure."""
        while not self.over.is_set():
            began, computed = time.monotonic(), time.thread_time()
            time.sleep(_SLEEP_S)
            for _ in range(_SPINS):
                pass
            self._running += running()
            self._rounds += 1
            alone = _SLEEP_S + time.thread_time() - computed
            took = time.monotonic() - began
            self._took += took
            self._alone += alone
            self._worst = max(self._worst, took - alone)

    @property
    def slowness(self) -> float:
        """How many times as long things take here as on an idle machine; at least 1."""
        if not self._rounds:
            return 1.0
        return max(1.0, self._took / self._alone, self._running / self._rounds / len(os.sched_getaffinity(0)))

    def limit(self, bound_s: float) -> float:
        """Return the time that what may take ``bound_s`` on an idle machine may take on this one, seconds."""
        return bound_s * self.slowness + 4 * self._worst

    def check(self, what: str, took_s: float, bound_s: float, **more: Any) -> None:
        """Report a time, and raise AssertionError if it is beyond its bound here."""
        measured(what, took_s, "s", f"{bound_s:g} s", **more)
        limit = self.limit(bound_s)
        assert took_s <= limit, f"{what}: {took_s:.2f} s, at most {bound_s:g} s, {limit:.2f} s on this machine now"
