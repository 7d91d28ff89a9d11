"""A client one of whose calls fails, for adapters that must go on without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from simm.errors import TransportError
from simm.testing import FakeClient, FakeStore

DEADLINE_S = 0.01
#: What adapters call of a client.
CALLED = frozenset((
    "delete_digests", "delete_sized", "deregister", "exists_digests", "exists_many", "get_digest",
    "get_digests", "get_many", "pin", "put_digest", "put_digests", "register", "stats",
))  # fmt: skip
FAULTS = ("raises", "breaks", "outage", "hangs", "late")


class Faulty:
    """A client whose call number ``at`` fails, from the moment on that it is armed."""

    def __init__(self, store: FakeStore, how: str, at: int) -> None:
        self._client = FakeClient(store=store)
        self._store, self._how, self._left = store, how, at
        self.deadline_s = DEADLINE_S
        self.armed = self.hit = False
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name not in CALLED:
            return found
        return lambda *given, **named: self._call(name, found, *given, **named)

    def _call(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        with self._lock:
            self._left -= self.armed
            due = self._left == -1 and not self.hit
            self.hit = self.hit or due
        if not due:
            return call(*given, **named)
        if self._how == "raises":
            raise TransportError("a fault of the test")
        if self._how == "breaks":
            raise ZeroDivisionError("a bug")
        if self._how in ("hangs", "late"):
            time.sleep(1.1 * DEADLINE_S)
        self._store.unavailable = self._how in ("outage", "hangs")
        try:
            return call(*given, **named)
        finally:
            self._store.unavailable = False
