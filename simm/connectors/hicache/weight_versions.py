"""Which weights each thread of an engine works for.

An engine changes its version of the weights first, and replaces its storage threads later, when it flushes its caches;
or it does not flush at all. Until then a thread may have pages of the old weights in hand, although it makes its first
call only now. So what counts is the version at the first call that any thread made while this one lived.

Nothing looks between calls. A trainer may flush first, while its engine is paused, and then update the weights: the new
threads have no pages then, and are of the version at the first call after that.

What is left: pages that were computed before an update without a flush, when no thread had called anything since the
flush before it. A prompt that is long enough to be looked for is such a call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Final

from ...host import fork

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
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        """Take a new lock: another thread, which the child does not have, may hold this one."""
        self._lock = threading.Lock()

    def of_caller(self) -> str | None:
        """Note the version of now for all threads that are new. Return the one that the calling thread began with.

        None if that is new, and the version changed with each look. O(threads).
        """
        for _ in range(_ATTEMPTS):
            before = self.now()
            living = threading.enumerate()
            # A thread that is listed may have begun before a change that comes in between, or after it.
            if self.now() == before:
                with self._lock:
                    for each in living:
                        self._of.setdefault(each, before)
                break
        with self._lock:
            return self._of.get(threading.current_thread())
