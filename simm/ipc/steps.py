"""Work for one call that several servers do at the same time.

The work at one server is a generator, :data:`Steps`. It yields just before it would wait for an answer, and names what
it waits for (:class:`Wait`). It is right to resume it at any moment: too early, and it waits by itself. So its errors,
its deadline and its clean-up are its own, and :func:`finish` makes a plain call of it.

A call that touches several servers begins the work at each of them, and then goes on wherever an answer has come
(``Patience.together`` in ``ipc/patience.py``). :func:`first_over` waits for that, in one thread and without polling for
longer than a wake-up takes.

**Lost wake-ups.** A descriptor need not stay ready until its waiter looks. A session is for all threads of a process,
and each takes in whatever has come for any of them. So a thread may sleep on a socket from which another thread has
just read what would have woken it, and nothing else may come there. It would then sleep until its deadline with the
answer at hand. So nobody sleeps without another look for longer than he has waited already, and than ``SLEEP_S``.
A wait without a descriptor is asked again before each sleep: the thread that it relied on need not wake the worker.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

#: Looks at all answers before the thread sleeps, seconds: without and with one that has no descriptor to sleep on.
LOOK_S: Final = (20e-6, 200e-6)
#: Between two looks at an answer without a descriptor, seconds: the first and the longest pause.
BLIND_S: Final = (50e-6, 1e-3)
#: The same where all have descriptors, in case that another thread takes in what would wake this one.
SLEEP_S: Final = (1e-3, 20e-3)


class Wait(Protocol):
    """What a piece of work waits for."""

    @property
    def until(self) -> float:
        """When the wait is over in any case, monotonic seconds."""

    @property
    def last(self) -> bool:
        """Whether the work ends with the answer, as far as it knows. It may then as well wait by itself."""

    @property
    def events(self) -> int:
        """What to poll the descriptor for, of ``select``."""

    def ready(self) -> bool:
        """Return True if the answer has come, or if none can come any more. A matter of a microsecond."""

    def descriptor(self) -> int:
        """Return a descriptor that becomes ready with the answer, and see to it that it does; -1 for none yet."""

    def receive(self) -> None:
        """Take in what made the descriptor ready. Does not wait."""

    def extend(self, until: float) -> None:
        """Let what remains of the exchange last until then, monotonic seconds: other work has held up the thread."""


class Polled:
    """A wait without a descriptor, for ``look()`` to be true."""

    __slots__ = ("ready", "until")

    last = False
    events = 0

    def __init__(self, look: Callable[[], bool], until: float) -> None:
        self.ready = look
        self.until = until

    def descriptor(self) -> int:
        """Return -1."""
        return -1

    def receive(self) -> None:
        """Do nothing."""

    def extend(self, until: float) -> None:
        """Do nothing: what is waited for is there, or is not."""


class Bounded(Protocol):
    """What has a time limit of its own."""

    until: float

    def extend(self, until: float) -> None:
        """Let it last until then, monotonic seconds."""


class PolledFor(Polled):
    """The same for work with a time limit of its own, which is extended with it."""

    __slots__ = ("_work",)

    def __init__(self, look: Callable[[], bool], work: Bounded) -> None:
        super().__init__(look, work.until)
        self._work = work

    def extend(self, until: float) -> None:
        """Let what remains of the work last until then, monotonic seconds."""
        self._work.extend(until)


#: Work in steps, which returns T. What a ``yield`` returns is true if the wait is over for now: the work may then look
#: again without waiting, and yield again. Otherwise it must wait by itself.
Steps = Generator[Wait, bool | None, T]


def finish(steps: Steps[T]) -> T:
    """Carry out work that waits by itself; return its result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


def side_by_side(works: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Do several pieces of work at the same time as one piece, in steps; return their results.

    The first error of one ends it: the others are closed, which ends what they have in flight. Every piece waits for
    something with a descriptor.
    """
    results: list[Any] = [None] * len(works)
    waits: dict[Wait, int] = {}

    def step(number: int, over: bool | None) -> None:
        try:
            waits[works[number].send(over)] = number
        except StopIteration as end:
            results[number] = end.value

    try:
        for number in range(len(works)):
            step(number, None)
        while waits:
            with contextlib.closing(_AnyOf(waits)) as wait:
                over = yield wait
            found = [each for each in waits if each.ready()]
            if not found and over:
                continue  # it was resumed too early
            for each in found or first_over(waits):
                step(waits.pop(each), each.ready())
    finally:
        for work in works:
            work.close()
    return results


class _AnyOf:
    """The wait for any of several answers."""

    events = select.POLLIN

    def __init__(self, waits: Collection[Wait]) -> None:
        self._waits = waits = list(waits)
        self._poller: select.epoll | None = None
        self.until = min(wait.until for wait in waits)
        self.last = len(waits) == 1 and waits[0].last

    def ready(self) -> bool:
        """Return True if one of them is over."""
        return any(wait.ready() for wait in self._waits)

    def descriptor(self) -> int:
        """Return a descriptor that becomes ready with the first; -1 while the process has none left for it."""
        if len(self._waits) == 1 and self._waits[0].events == self.events:
            return self._waits[0].descriptor()
        if self._poller is None:
            try:
                self._poller = select.epoll(len(self._waits))
                for wait in self._waits:
                    self._poller.register(wait.descriptor(), wait.events)
            except OSError:  # no descriptor, or no memory of the kernel's, is left: who waits asks again
                self.close()
                self.receive()  # nothing will tell when it is time for that
                return -1
        return self._poller.fileno()

    def receive(self) -> None:
        """Take in what has come for them."""
        for wait in self._waits:
            wait.receive()

    def extend(self, until: float) -> None:
        """Let each of them last until then."""
        for wait in self._waits:
            wait.extend(until)

    def close(self) -> None:
        """Close the descriptor that was made."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None


def first_over(waits: Collection[Wait]) -> list[Wait]:
    """Wait until some answers have come, or their time is up. Return those waits, at least one.

    O(waits) for each look. Another thread may take in what comes, see the module.
    """
    over = [wait for wait in waits if wait.ready()]
    if over:
        return over
    poller = select.poll()
    at: dict[int, Wait] = {}
    began = time.monotonic()
    until = min(wait.until for wait in waits)
    blind = [wait for wait in waits if not _register(wait, poller, at)]
    looks_end = time.monotonic() + LOOK_S[bool(blind)]
    while True:
        over = [wait for wait in waits if wait.ready()]
        if over:
            return over
        now = time.monotonic()
        if now < looks_end:
            continue
        if now >= until:
            return [wait for wait in waits if wait.until <= now]
        blind = [wait for wait in blind if not _register(wait, poller, at)]
        shortest, longest = BLIND_S if blind else SLEEP_S
        sleeps_s = min(max(shortest, now - began), longest, until - now)
        if blind:
            time.sleep(sleeps_s)
        for number, _ in poller.poll(0 if blind else sleeps_s * 1e3):
            at[number].receive()


def _register(wait: Wait, poller: select.poll, at: dict[int, Wait]) -> bool:
    """Let the poller wake for this wait; return False if it has no descriptor just now."""
    number = wait.descriptor()
    if number >= 0:
        at[number] = wait
        poller.register(number, wait.events)
    return number >= 0
