"""Get sessions of Mooncake's API: values that are pinned by their keys, to be read in ranges, and are ended by them.

Not every session is ended. SGLang's direct linker raises when one key of a start is missing, and ends none of the keys
that were found. Their values would stay pinned while the store is open, and no other session would find room. So a
start also ends the sessions that nobody has used for :data:`IDLE_S`. A read of one that was ended is one of no session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ..host import fork
from .complaints import Complaints

#: How long a session may be unused, seconds. An engine reads a layer many times in it.
IDLE_S: Final = 60.0


class Held:
    """The values that one start has pinned. The lock of :class:`Sessions` guards all but ``pins``."""

    def __init__(self, pins: Any, keys: Iterable[str], now: float) -> None:
        self.pins = pins
        #: Keys whose sessions have not ended.
        self.left = set(keys)
        #: When a call last used it.
        self.used = now
        #: Calls that read it now.
        self.readers = 0


class Sessions:
    """The sessions of a store, by key. Any thread may call it; no method raises.

    Args:
        complain: is told of pins that cannot be released.
        clock: the time in seconds.
    """

    def __init__(self, complain: Complaints, clock: Callable[[], float] = time.monotonic) -> None:
        self._complain = complain
        self._clock = clock
        self._lock = threading.Lock()
        #: For each key who holds its value, and the value's number there.
        self._of: dict[str, tuple[Held, int]] = {}
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        """Take a new lock: another thread, which the child does not have, may hold this one."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of keys that have a session."""
        return len(self._of)

    def begin(self, keys: Sequence[str], pins: Any) -> None:
        """Begin a session for each key whose value is pinned, in place of one that it has."""
        found = {key: at for at, (key, length) in enumerate(zip(keys, pins.lengths)) if length is not None}
        with self._lock:
            held = Held(pins, found, self._clock())
            before = [(key, self._of[key][0]) for key in found if key in self._of]
            self._of.update({key: (held, at) for key, at in found.items()})
            free = self._without(before)
        self._release([*free, *([] if found else [held])])

    def end(self, keys: Iterable[str]) -> None:
        """End the sessions of these keys. Those that have none are left alone."""
        with self._lock:
            free = self._without([(key, self._of.pop(key)[0]) for key in keys if key in self._of])
        self._release(free)

    def end_idle(self) -> None:
        """End the sessions that nobody uses, nor has used for ``IDLE_S``."""
        with self._lock:
            now = self._clock()
            idle = [
                (key, held) for key, (held, _) in self._of.items() if not held.readers and now - held.used >= IDLE_S
            ]
            for key, _ in idle:
                del self._of[key]
            free = self._without(idle)
        self._release(free)

    def end_all(self) -> None:
        """End all sessions."""
        self.end(list(self._of))

    @contextmanager
    def reading(self, keys: Iterable[str]) -> Iterator[list[tuple[Held, int] | None]]:
        """Yield for each key who holds its value and its number there, None without a session, and note the use."""
        with self._lock:
            found = [self._of.get(key) for key in keys]
            held = {each[0] for each in found if each is not None}
            for each in held:
                each.readers += 1
        try:
            yield found
        finally:
            with self._lock:
                for each in held:
                    each.readers -= 1
                    each.used = self._clock()

    @staticmethod
    def _without(ended: Iterable[tuple[str, Held]]) -> list[Held]:
        """Note that sessions have ended; return those who hold values of no other one. The caller has the lock."""
        free = []
        for key, held in ended:
            held.left.discard(key)
            if not held.left:
                free.append(held)
        return free

    def _release(self, free: Iterable[Held]) -> None:
        for held in free:
            with self._complain.ending("a get session"):
                held.pins.release()
