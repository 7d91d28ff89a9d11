"""A process that can start no more threads, and calls of a store that last until a test ends them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

from tests.support.waiting import WAIT_S

#: What the start of a thread raises where there is none, or no memory for one.
ERRORS: Final = (RuntimeError, MemoryError)


@contextlib.contextmanager
def no_threads(names: str = "", error: type[Exception] = RuntimeError) -> Iterator[None]:
    """Let no thread start whose name begins so: it raises what CPython raises then."""
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name.startswith(names):
            raise error("can't start new thread")
        real(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = real  # type: ignore[method-assign]


def lose_jobs(pool: Any, count: int) -> None:
    """Let a pool's next jobs end without their calls, as they do where there is no memory."""
    left = [None] * count

    class Lost(pool._new_job):  # type: ignore[name-defined, misc]
        def set_running_or_notify_cancel(self) -> bool:
            if left:
                left.pop()
                raise MemoryError
            return bool(super().set_running_or_notify_cancel())

    pool._new_job = Lost


class Gate:
    """A store's ``latency``: operations in threads whose name begins so wait at it until it is opened."""

    def __init__(self, names: str) -> None:
        self._names = names
        self._open, self._reached = threading.Event(), threading.Event()
        #: The operations that have come here, in their order.
        self.operations: list[str] = []

    def __call__(self, operation: str, keys: int) -> None:
        if threading.current_thread().name.startswith(self._names):
            self.operations.append(operation)
            self._reached.set()
            assert self._open.wait(WAIT_S)

    def reached(self) -> bool:
        """Wait until an operation has come; return whether it has."""
        return self._reached.wait(WAIT_S)

    def open(self) -> None:
        """Let all operations go on."""
        self._open.set()
