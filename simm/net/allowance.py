"""How long the present call of this thread may still wait, whatever it touches: one deadline for several exchanges.

A call that asks several servers sets it at its begin, and sets it back at its end. Each wait within asks for what is
left. It is a thread's own, so that waits need no further argument on their way down.

A signal's handler may raise an exception wherever CPython runs it: as a Python function begins, after a call of C code,
and where a loop turns back (``JUMP_BACKWARD``). Two things must not be left behind then:

* *The allowance of a call that has ended*, as its ``__exit__`` is such a function. So the outermost that sets one owns
  it, and is referred to weakly: when it has gone, there is no allowance.
* *A lock that nobody releases*, as ``acquire`` is such a call. The step of an iterator in a ``for`` is none, nor is
  unpacking. So these take a lock, and no call stands between that and the ``try`` whose ``finally`` releases it::

      for got in tries_of(lock):  # which is made once
          break
      (got,) = tries_within(lock, seconds)
      try: ...
      finally:
          if got:
              lock.release()
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

#: A wait that looks after something else meanwhile does so this often, seconds.
LOOK_S: Final = 0.005


class Allowance(threading.local):
    """What the present call of this thread may still wait. Whoever sets it sets it back at the end of the call."""

    _seconds: float = math.inf
    _until: float = math.inf
    #: The outermost object that has set it; None if that did so without a ``with`` statement.
    _owner: weakref.ref[Any] | None = None
    #: What this thread's calls have spent on waits that were no exchanges, seconds.
    spent: float = 0.0
    #: What the parts of this thread's calls have lost with servers that do not answer, seconds.
    lost: float = 0.0

    @property
    def seconds(self) -> float:
        """What there is for one exchange, seconds."""
        if self._seconds != math.inf and self._owner is not None:
            self._look()
        return self._seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def until(self) -> float:
        """When there is no more in all, monotonic seconds."""
        if self._until != math.inf and self._owner is not None:
            self._look()
        return self._until

    @until.setter
    def until(self, until: float) -> None:
        self._until = until

    def _look(self) -> None:
        """Forget what an owner has set that has gone."""
        if self._owner is not None and self._owner() is None:
            self._seconds = self._until = math.inf
            self._owner = None

    def own(self, owner: object) -> None:
        """Let what is set from now on be this object's, unless a call around it has set some: call it before that."""
        if self.seconds == math.inf and self.until == math.inf:
            self._owner = weakref.ref(owner)

    def disown(self, owner: object) -> None:
        """Note that this object has set back what it had set."""
        if self._owner is not None and self._owner() is owner:
            self._owner = None


ALLOWANCE: Final = Allowance()


def allowed(seconds: float) -> float:
    """Return how long a wait that begins now may last: ``seconds``, or what the call has left."""
    return min(seconds, ALLOWANCE.seconds, ALLOWANCE.until - time.monotonic())


def spend(seconds: float) -> None:
    """Take a wait that was no exchange off what the call has left."""
    ALLOWANCE.seconds -= seconds
    ALLOWANCE.spent += seconds


def at_most(seconds: float) -> AbstractContextManager[None]:
    """Let all that this thread waits for inside the block end within ``seconds``."""
    return _AtMost(seconds)


def at_least(seconds: float) -> AbstractContextManager[None]:
    """Let this thread wait for ``seconds`` inside the block, although its call may have none left: to clean up."""
    return _AtLeast(seconds)


class _AtMost:
    __slots__ = ("__weakref__", "_before", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        ALLOWANCE.own(self)
        self._before = before = ALLOWANCE.until
        ALLOWANCE.until = min(before, time.monotonic() + self._seconds)

    def __exit__(self, *_: object) -> None:
        ALLOWANCE.until = self._before
        ALLOWANCE.disown(self)


class _AtLeast:
    __slots__ = ("__weakref__", "_before", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        ALLOWANCE.own(self)
        self._before = before = ALLOWANCE.seconds
        ALLOWANCE.seconds = max(before, self._seconds)

    def __exit__(self, *_: object) -> None:
        ALLOWANCE.seconds = self._before
        ALLOWANCE.disown(self)


def tries_of(lock: threading.Lock) -> Iterator[bool]:
    """Return an iterator each of whose steps takes a lock if it is free, and says whether it was. See above."""
    return map(lock.acquire, itertools.repeat(False))


def tries_within(lock: threading.Lock, seconds: float) -> Iterator[bool]:
    """Return an iterator whose only step takes a lock within ``seconds``, and says whether it did. See above."""
    return map(lock.acquire, (True,), (max(0.0, seconds),))
