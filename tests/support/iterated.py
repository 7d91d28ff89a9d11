"""A set that another thread adds to in the middle of an iteration, and the lock that is to prevent it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.support.waiting import WAIT_S, wait_until


class AskedFor:
    """A lock that counts how often it was asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = 0

    def __enter__(self) -> None:
        self.asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class AddedTo(weakref.WeakSet[Any]):
    """A weak set during whose next iteration another thread does ``add``, until that ends or waits for the lock."""

    def __init__(self, items: Iterable[Any], lock: AskedFor, add: Callable[[], object]) -> None:
        super().__init__(items)
        self._lock, self._add = lock, add
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        yield next(items)
        if self._thread is None:
            self._thread = thread = threading.Thread(target=self._add)
            asked = self._lock.asked
            thread.start()
            wait_until(lambda: self._lock.asked > asked or not thread.is_alive(), "it is added, or waits")
        yield from items

    def joined(self) -> bool:
        """Wait until the other thread has ended; return whether there was one."""
        if self._thread is not None:
            self._thread.join(WAIT_S)
        return self._thread is not None and not self._thread.is_alive()
