"""What the tests of the client share: patterns of bytes, waiting, forked children."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

PATHS = ("shm", "tcp")
MIB = 1 << 20
#: A bound for things that hang, seconds.
WAIT_S = 120.0
JOIN_S = 60.0


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes that differ between seeds and positions, cheaply at 64 MiB."""
    return (random.Random(seed).randbytes(min(size, 4096 + 7)) * (size // 4096 + 1))[:size]


def forked(body: Callable[[], bool]) -> int:
    """Return the exit code of a forked child that runs ``body``: 0 if that returns True."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 3
    try:
        signal.alarm(int(JOIN_S))
        code = 0 if body() else 2
    finally:
        os._exit(code)
