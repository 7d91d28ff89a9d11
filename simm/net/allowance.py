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


class Left:
    """What a thread's present call may still wait."""

    __slots__ = ("least_s", "lost", "owner", "room", "seconds", "spent", "until")

    def __init__(self) -> None:
        #: What there is for one exchange, seconds; and when there is no more in all, monotonic seconds.
        self.seconds = self.until = math.inf
        #: No exchange is refused that has so much, seconds, although it is less than half of a deadline.
        self.least_s = math.inf
        #: What the call may wait for room, a ``RoomWait`` that all its parts share; None: each part has its own.
        self.room: Any = None
        #: The outermost object that has set it; None if that did so without a ``with`` statement.
        self.owner: weakref.ref[Any] | None = None
        #: What this thread's calls have spent on waits that were no exchanges, seconds.
        self.spent = 0.0
        #: What the parts of this thread's calls have lost with servers that do not answer, seconds.
        self.lost = 0.0

    def look(self) -> None:
        """Forget what an owner has set that has gone. To be called before anything but ``spent`` and ``lost``."""
        owner = self.owner
        if owner is not None and owner() is None:
            self.give_back(None, math.inf, math.inf)

    def own(self, owner: object) -> None:
        """Let what is set from now on be this object's, unless a call around it has set some: call it before that."""
        self.look()
        if self.seconds == self.until == math.inf:
            self.owner = weakref.ref(owner)

    def give_back(self, owner: object, seconds: float, until: float) -> None:
        """Set back what an object had set, which owns it no longer."""
        if self.owner is not None and self.owner() is owner:
            self.least_s, self.room, self.owner = math.inf, None, None
        self.seconds, self.until = seconds, until


class Allowance(threading.local):
    """What the present call of this thread may still wait. Whoever sets it sets it back at the end of the call."""

    def __init__(self) -> None:
        #: One look-up of the thread's gets all of it.
        self.mine = Left()

    @property
    def seconds(self) -> float:
        """What there is for one exchange, seconds."""
        mine = self.mine
        if mine.owner is not None:
            mine.look()
        return mine.seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self.mine.seconds = seconds

    @property
    def until(self) -> float:
        """When there is no more in all, monotonic seconds."""
        mine = self.mine
        if mine.owner is not None:
            mine.look()
        return mine.until

    @until.setter
    def until(self, until: float) -> None:
        self.mine.until = until


ALLOWANCE: Final = Allowance()


def allowed(seconds: float) -> float:
    """Return how long a wait that begins now may last: ``seconds``, or what the call has left."""
    mine = ALLOWANCE.mine
    if mine.owner is not None:
        mine.look()
    return min(seconds, mine.seconds, mine.until - time.monotonic())


def spend(seconds: float) -> None:
    """Take a wait that was no exchange off what the call has left."""
    mine = ALLOWANCE.mine
    mine.seconds -= seconds
    mine.spent += seconds


def at_most(seconds: float) -> AbstractContextManager[None]:
    """Let all that this thread waits for inside the block end within ``seconds``."""
    return _AtMost(seconds)


def at_least(seconds: float) -> AbstractContextManager[None]:
    """Let this thread wait for ``seconds`` inside the block, although its call may have none left: to clean up.

    An exchange is begun with half of them then.
    """
    return _AtLeast(seconds)


class _Block:
    """A ``with`` statement about so many seconds; ``_before`` is what it sets back."""

    __slots__ = ("__weakref__", "_before", "_seconds")

    _before: Any

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds


class _AtMost(_Block):
    __slots__ = ()

    def __enter__(self) -> None:
        mine = ALLOWANCE.mine
        mine.own(self)
        self._before = before = mine.until
        mine.until = min(before, time.monotonic() + self._seconds)

    def __exit__(self, *_: object) -> None:
        mine = ALLOWANCE.mine
        mine.give_back(self, mine.seconds, self._before)


class _AtLeast(_Block):
    __slots__ = ()

    def __enter__(self) -> None:
        mine = ALLOWANCE.mine
        mine.own(self)
        self._before = before = mine.seconds, mine.least_s
        mine.seconds, mine.least_s = max(before[0], self._seconds), min(before[1], self._seconds / 2)

    def __exit__(self, *_: object) -> None:
        mine = ALLOWANCE.mine
        seconds, mine.least_s = self._before
        mine.give_back(self, seconds, mine.until)


def tries_of(lock: threading.Lock) -> Iterator[bool]:
    """Return an iterator each of whose steps takes a lock if it is free, and says whether it was. See above."""
    return map(lock.acquire, itertools.repeat(False))


def tries_within(lock: threading.Lock | threading.RLock, seconds: float) -> Iterator[bool]:
    """Return an iterator whose only step takes a lock within ``seconds``, and says whether it did. See above."""
    return map(lock.acquire, (True,), (max(0.0, seconds),))


def free_within(lock: threading.Lock, seconds: float) -> bool:
    """Return whether a lock was free within ``seconds``. To a signal's handler whose own thread has it, it is not.

    A call that may be made in a handler asks this before a ``with`` statement about a lock, and goes on without it.
    """
    (got,) = tries_within(lock, seconds)
    try:
        return got
    finally:
        if got:
            lock.release()
