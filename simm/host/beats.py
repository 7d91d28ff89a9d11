"""A heartbeat that goes on while one long call of numpy runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

#: Between two beats, seconds: a tenth of what readers of an arena wait for one.
BEAT_S: Final = 0.05
#: No block takes as long. One that does has hung, and its heartbeat stops.
BEATS_S_MAX: Final = 600.0


@contextlib.contextmanager
def beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call ``beat`` from a thread every ``BEAT_S`` within the block, for ``BEATS_S_MAX`` at most.

    A sort of 10^7 entries is one call of numpy, which takes seconds. It holds no interpreter lock, so a thread beats
    meanwhile. A process that is stopped or has ended does not.
    """
    ended = threading.Event()
    until = time.monotonic() + BEATS_S_MAX

    def run() -> None:
        while not ended.wait(BEAT_S) and time.monotonic() < until:
            beat()

    thread = threading.Thread(target=run, name="simm-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
