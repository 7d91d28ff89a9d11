"""When to try again what has failed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

BACKOFF_S: Final = (0.05, 1.0)


class Breaker:
    """When to try again what has failed: after a jittered pause that doubles with each failure in a row.

    ``pauses``: the first and the longest, seconds.
    """

    __slots__ = ("_pause_s", "_pauses", "_uniform", "failures", "retry_at")

    def __init__(
        self, uniform: Callable[[float, float], float] = random.uniform, pauses: tuple[float, float] = BACKOFF_S
    ) -> None:
        self._uniform = uniform
        self._pauses = pauses
        self._pause_s = pauses[0]
        #: Monotonic seconds.
        self.retry_at = 0.0
        #: In a row.
        self.failures = 0

    def failed(self, now: float) -> None:
        """One more failure, at ``now``."""
        self.failures += 1
        self.retry_at = now + self._pause_s * self._uniform(0.5, 1.0)
        self._pause_s = min(self._pauses[1], self._pause_s * 2)

    def worked(self) -> None:
        """It works again: the next failure is a first one."""
        self.failures = 0
        self._pause_s = self._pauses[0]

    def due(self, now: float) -> bool:
        """Is it time to try again?"""
        return now >= self.retry_at
