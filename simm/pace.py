"""How fast a mover may copy, and how much it may hold at once: a token bucket and a budget, for several threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

#: Shortest wait: the rest of a fraction of a byte would otherwise be waited for again and again.
_NAP_S = 1e-3


class Pace:
    """A token bucket: at most ``rate`` bytes a second (0: no limit), with a tenth of a second's worth at once.

    A taker may overdraw, and the next one waits for it, so a value larger than the bucket passes too.
    """

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.rate = rate
        self.burst = rate / 10
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = self.burst
        self._at = clock()

    def take(self, count: int) -> None:
        """Wait until ``count`` bytes may pass. Negative ones come back."""
        if not self.rate:
            return
        while True:
            with self._lock:
                now = self._clock()
                self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
                self._at = now
                if self._tokens >= 0 or count <= 0:
                    self._tokens -= count
                    return
                wait = -self._tokens / self.rate
            self._sleep(max(wait, _NAP_S))


class Budget:
    """At most so many bytes of chunks are held at once; who wants more than that holds them alone."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Wait for room, and have it inside the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self.used or self.used + count <= self.most)
            self.used += count
        try:
            yield
        finally:
            with self._changed:
                self.used -= count
                self._changed.notify_all()
