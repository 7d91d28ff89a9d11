"""What processes that take each other's place have refused or failed at, in all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


class Failures:
    """What processes of one kind, one after the other, have refused or failed at, by their STATS."""

    NAMES: Final = ("protocol_errors", "handler_errors", "unauthorized")

    def __init__(self) -> None:
        self._before = dict.fromkeys(self.NAMES, 0)
        self._newest: Mapping[str, Any] = {}

    def take(self, stats: Mapping[str, Any]) -> None:
        """Take note of a process's STATS."""
        if stats.get("pid") != self._newest.get("pid"):
            self._before = self.totals()
        self._newest = stats

    def totals(self) -> dict[str, int]:
        """Return the sums, by name."""
        return {name: count + self._newest.get(name, 0) for name, count in self._before.items()}
