"""Whether other threads of this process want the interpreter, so that a copy lets them have it.

Only one thread of a process runs Python at a time, the one with the GIL. A thread that copies small values in a loop
keeps it for 5 ms at a time, as the interpreter takes it away only then. Another one that works for some microseconds at
a time, a token server's event loop, waits so long for each of them. A copy by ``memmove`` releases the GIL, and takes
half a microsecond more than one by a slice, a tenth of a get of 4 KiB.

The interpreter does not tell who waits. But the kernel tells what each thread has used: if two of them have worked in
the last tenth of a second, one of them may wait for the other. The clients' background threads look at that. A process
with one working thread pays nothing, whatever the number of those that sleep.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from . import fork
from .buffers import RELEASE_BYTES

#: What a thread uses between two looks that counts as work, nanoseconds.
WORK_NS: Final = 200_000
#: Pause between two looks at least, seconds.
LOOK_S: Final = 0.05
#: How many looks a thread that worked counts on.
LOOKS: Final = 10


class Company:
    """What other threads of this process do. Any thread may call it."""

    __slots__ = ("__weakref__", "_left", "_looked_at", "_survivor", "_used", "held_bytes")

    def __init__(self) -> None:
        #: Copies of host memory below this size keep the GIL.
        self.held_bytes = RELEASE_BYTES
        #: Nanoseconds that each thread had used by the last look, by the kernel's number.
        self._used: dict[int, int] = {}
        self._looked_at = 0.0
        self._left = 0
        #: In a child of a fork: its first thread and that thread's number, as Python goes on with the parent's.
        self._survivor: tuple[threading.Thread, int] | None = None
        fork.in_child(self._after_fork)

    def look(self) -> None:
        """Find out which threads have worked since the last look. O(threads), a microsecond each."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        used: dict[int, int] = {}
        working = 0
        for thread in threading.enumerate():
            number = thread.native_id
            if self._survivor is not None and thread is self._survivor[0]:
                number = self._survivor[1]
            if number is None or _is_own(thread.name):
                continue
            try:
                spent = time.clock_gettime_ns(~number << 3 | 6)  # as pthread_getcpuclockid(3) has it
            except OSError:  # it has just ended
                continue
            used[number] = spent
            working += spent - self._used.get(number, spent) >= WORK_NS
        self._used = used
        self._left = LOOKS if working > 1 else max(0, self._left - 1)
        self.held_bytes = 0 if self._left else RELEASE_BYTES

    def _after_fork(self) -> None:
        self._survivor = threading.current_thread(), threading.get_native_id()
        self._used = {}
        self._looked_at = 0.0
        self._left = 0
        self.held_bytes = RELEASE_BYTES


def _is_own(name: str) -> bool:
    """Return whether a thread of this name is SiMM's own, and no caller's: those of asyncio calls are callers'."""
    return name.startswith("simm-") and not name.startswith("simm-async")


#: Of this process.
COMPANY: Final = Company()
