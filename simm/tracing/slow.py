"""The log line of an operation that took too long.

    slow: get of 1 key by shm took 31.204 ms: locate 0.004, copy 31.180, confirm 0.001; key 1f3a77c0

Ten lines in ten seconds at most; the next one says how many were left out. All that stands in a line is SiMM's own:
names of segments, numbers, and hexadecimal digits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ..errors import line_about
from ..host import fork
from .spans import Operation

log = logging.getLogger("simm.slow")

LINES_MAX: Final = 10
WINDOW_S: Final = 10.0
#: Segments of one name in a line are added up; so many names.
NAMES_MAX: Final = 12


class SlowLog:
    """Writes lines about slow operations. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._after_fork()
        fork.in_child(self._after_fork)
        self._since = float("-inf")
        self._lines = self._left_out = 0

    def _after_fork(self) -> None:
        """Begin with a lock of this process: in its parent another thread may have held it at the fork.

        It is reentrant, as a signal's handler or a finalizer may make a slow call while its thread holds it.
        """
        self._lock = threading.RLock()

    def allow(self) -> tuple[bool, int]:
        """Return whether there may be another line, and how many were left out before it."""
        with self._lock:
            now = self._clock()
            if now - self._since > WINDOW_S:
                self._since, self._lines = now, 0
            if self._lines >= LINES_MAX:
                self._left_out += 1
                return False, 0
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
            return True, left_out

    def write(self, operation: Operation) -> None:
        """Log an operation of a client, unless there are too many lines."""
        about = operation.about
        keys = about.get("keys", 1)
        path = f" by {about['path']}" if "path" in about else ""
        key = f", key {about['key']}" if "key" in about else ""
        self.line(
            f"{operation.name} of {keys} key{'' if keys == 1 else 's'}{path}", operation.ended - operation.began,
            ((each.name, each.ended - each.began) for each in operation.segments),
            f"; trace {operation.trace_id.hex()}{key}" if operation.kept else key and key.replace(", ", "; ", 1),
            line_about(trace_id=operation.trace_id) if operation.kept else {},
        )  # fmt: skip

    def line(
        self, what: str, ns: int, segments: Iterable[tuple[str, int]], more: str = "",
        about: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Log that ``what`` took ``ns`` nanoseconds, with segments as (name, nanoseconds). ``about``: of line_about."""
        allowed, left_out = self.allow()
        if not allowed:
            return
        took: dict[str, int] = {}
        for name, each in segments:
            if name in took or len(took) < NAMES_MAX:
                took[name] = took.get(name, 0) + each
        parts = ", ".join(f"{name} {each / 1e6:.3f}" for name, each in took.items())
        log.warning(
            "slow: %s took %.3f ms%s%s%s", what, ns / 1e6, parts and f": {parts}", more,
            f"; {left_out} more were left out" if left_out else "", extra=about,
        )  # fmt: skip


#: Of this process: its lines are limited together.
SLOW: Final = SlowLog()
