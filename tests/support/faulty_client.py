"""A client one of whose calls fails, for adapters that must go on without it.

Each call of a client can be the one that fails, and each of the pins that it makes, but those that are ``LOCAL``. So
a call that is added to an adapter fails in its tests, if these make it: ``fault_sites.py`` tells whether they do.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simm.errors import TransportError
from simm.testing import FakeClient, FakeStore

DEADLINE_S = 0.01
#: What asks nobody: it computes a digest, or runs what the adapter gives it in a thread.
LOCAL = frozenset(("digest", "in_thread"))
#: In place of a call's number: no call fails, or each.
NONE, EVERY = -1, -2
FAULTS = ("raises", "breaks", "outage", "hangs", "late")


class Faulty:
    """A client whose call number ``at`` fails, from the moment on that it is armed. ``options`` are a client's."""

    def __init__(self, store: FakeStore, how: str, at: int, **options: Any) -> None:
        self._client = FakeClient(store=store, **options)
        self._store, self._how, self._at, self._made = store, how, at, 0
        self.deadline_s = DEADLINE_S
        self.armed = self.hit = False
        #: Each call while it was armed: its name, and the file and line that made it.
        self.reached: set[tuple[str, str, int]] = set()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name.startswith("_") or name in LOCAL or not callable(found):
            return found
        return lambda *given, **named: self._call(name, found, *given, **named)

    def _call(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        with self._lock:
            if self.armed:
                self.reached.add((name, Path(frame.f_code.co_filename).stem, frame.f_lineno))
            due = self.armed and self._at in (self._made, EVERY)
            self._made += self.armed
            self.hit = self.hit or due
        if due:
            if self._how == "raises":
                raise TransportError("a fault of the test")
            if self._how == "breaks":
                raise ZeroDivisionError("a bug")
            if self._how in ("hangs", "late"):
                time.sleep(1.1 * DEADLINE_S)
            self._store.unavailable = self._how in ("outage", "hangs")
        try:
            got = call(*given, **named)
        finally:
            self._store.unavailable = self._store.unavailable and not due
        return FaultyPins(self, got) if name == "pin" else got


class FaultyPins:
    """Pins of such a client: their calls count among its own."""

    def __init__(self, client: Faulty, pins: Any) -> None:
        self._client, self._pins = client, pins

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pins, name)
        if not callable(found):
            return found
        return lambda *given, **named: self._client._call(name, found, *given, **named)

    def __enter__(self) -> FaultyPins:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
