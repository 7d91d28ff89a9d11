"""How long the present call of this thread may still wait, whatever it touches: one deadline for several exchanges.

A call that asks several servers sets it at its begin, and sets it back at its end. Each wait within asks for what is
left. It is a thread's own, so that waits need no further argument on their way down.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Final

#: A wait that looks after something else meanwhile does so this often, seconds.
LOOK_S: Final = 0.005


class Allowance(threading.local):
    """What the present call of this thread may still wait. Whoever sets it sets it back at the end of the call."""

    #: For one exchange, seconds.
    seconds: float = math.inf
    #: In all, monotonic seconds.
    until: float = math.inf
    #: What this thread's calls have spent on waits that were no exchanges, seconds.
    spent: float = 0.0


ALLOWANCE: Final = Allowance()


def allowed(seconds: float) -> float:
    """Return how long a wait that begins now may last: ``seconds``, or what the call has left."""
    return min(seconds, ALLOWANCE.seconds, ALLOWANCE.until - time.monotonic())


def spend(seconds: float) -> None:
    """Take a wait that was no exchange off what the call has left."""
    ALLOWANCE.seconds -= seconds
    ALLOWANCE.spent += seconds


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Let all that this thread waits for inside the block end within ``seconds``."""
    before = ALLOWANCE.until
    ALLOWANCE.until = min(before, time.monotonic() + seconds)
    try:
        yield
    finally:
        ALLOWANCE.until = before


@contextlib.contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """Let this thread wait for ``seconds`` inside the block, although its call may have none left: to clean up."""
    before = ALLOWANCE.seconds
    ALLOWANCE.seconds = max(before, seconds)
    try:
        yield
    finally:
        ALLOWANCE.seconds = before
