"""Log lines about failures that tend to recur with every page of a prompt."""

from __future__ import annotations

import logging
import time
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
