"""How slow the machine is at this moment, so that bounds on times scale with it.

A thread sleeps and computes a little, again and again, beside what is measured. It needs more time than that takes
alone when the processors are busy with other things, or when the whole machine stands still.
"""

from __future__ import annotations

import time
from typing import Any, Final

from tests.support.background import Background
from tests.support.measures import measured

_SLEEP_S: Final = 0.01
_SPINS: Final = 2000


class Pace(Background):
    """``with Pace() as pace``: then :meth:`check` compares a time that was measured inside with its bound."""

    def __init__(self) -> None:
        super().__init__("pace")
        #: Seconds that the rounds took, and would have taken on a machine with nothing else to do.
        self._took = self._alone = 0.0
        self._worst = 0.0

    def run(self) -> None:
        """Measure."""
        while not self.over.is_set():
            began, computed = time.monotonic(), time.thread_time()
            time.sleep(_SLEEP_S)
            for _ in range(_SPINS):
                pass
            alone = _SLEEP_S + time.thread_time() - computed
            took = time.monotonic() - began
            self._took += took
            self._alone += alone
            self._worst = max(self._worst, took - alone)

    @property
    def slowness(self) -> float:
        """How many times as long things take here as on an idle machine; at least 1."""
        return max(1.0, self._took / self._alone if self._alone else 1.0)

    def limit(self, bound_s: float) -> float:
        """Return the time that what may take ``bound_s`` on an idle machine may take on this one, seconds."""
        return bound_s * self.slowness + 4 * self._worst

    def check(self, what: str, took_s: float, bound_s: float, **more: Any) -> None:
        """Report a time, and raise AssertionError if it is beyond its bound here."""
        measured(what, took_s, "s", f"{bound_s:g} s", **more)
        limit = self.limit(bound_s)
        assert took_s <= limit, f"{what}: {took_s:.2f} s, at most {bound_s:g} s, {limit:.2f} s on this machine now"
