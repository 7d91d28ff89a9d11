"""Log lines about failures that tend to recur with every page of a prompt, or that an engine's end must survive."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

#: A failure of one kind is logged at most this often, seconds.
COMPLAIN_S: Final = 10.0


class Complaints:
    """Logs failures of each kind as warnings, at most every ``COMPLAIN_S``. Any thread may call it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: dict[str, float] = {}

    def __call__(self, kind: str, text: str, *arguments: Any, trace: bool = False) -> None:
        now = time.monotonic()
        if now - self._last.get(kind, -COMPLAIN_S) >= COMPLAIN_S:
            self._last[kind] = now
            self._log.warning(text, *arguments, exc_info=trace)

    @contextmanager
    def ending(self, what: str) -> Iterator[None]:
        """Run the block; what it raises is logged, so that whatever else is to end still does."""
        try:
            yield
        except Exception as exc:
            self(what, "%s was not ended: %s", what, str(exc), trace=True)
