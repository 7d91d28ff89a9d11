"""Which weights each thread of an engine works for.

An engine changes its version of the weights first, and replaces its storage threads later, when it flushes its caches;
or it does not flush at all. Until then a thread may have pages of the old weights in hand, although it makes its first
call only now. So what counts is the version that was in force while a thread was seen to live for the first time, by
whatever call of whatever thread. A watching thread looks, too: short prompts are stored without any call before.

What is left: threads that begin, compute pages and see the next version come, all between two looks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Final

#: How often the watching thread looks, seconds.
LOOK_S: Final = 0.2
#: Attempts to see the same version before and after the threads are listed.
_ATTEMPTS: Final = 4


class WeightVersions:
    """The version of the weights that each living thread began with. Any thread may call it.

    Args:
        now: returns the version that the engine has now. It must not raise.
    """

    def __init__(self, now: Callable[[], str]) -> None:
        self.now = now
        self._lock = threading.Lock()
        self._of: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._stop = threading.Event()
        self._watching = False

    def look(self) -> None:
        """Note the version of now for all threads that are new. O(threads)."""
        for _ in range(_ATTEMPTS):
            before = self.now()
            living = threading.enumerate()
            # A thread that is listed may have begun before a change that comes in between, or after it.
            if self.now() == before:
                with self._lock:
                    for each in living:
                        self._of.setdefault(each, before)
                return

    def of_caller(self) -> str | None:
        """Return the version that the calling thread began with; None if it has not been seen yet."""
        with self._lock:
            return self._of.get(threading.current_thread())

    def watch(self) -> None:
        """Look from now on, every ``LOOK_S``, until :meth:`close` or until nobody has this object any more."""
        with self._lock:
            if self._watching or self._stop.is_set():
                return
            self._watching = True
        self.look()
        arguments = (weakref.ref(self), self._stop)
        threading.Thread(target=_watch, args=arguments, name="simm-weights", daemon=True).start()

    def close(self) -> None:
        """End the watching thread. Idempotent."""
        self._stop.set()


def _watch(versions: weakref.ref[WeightVersions], stop: threading.Event) -> None:
    while not stop.wait(LOOK_S):
        alive = versions()
        if alive is None:
            return
        alive.look()
        del alive
