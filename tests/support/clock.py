"""A clock for code that is given one."""

from __future__ import annotations


class Clock:
    """Time that stands still until a test moves it, or somebody sleeps."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
