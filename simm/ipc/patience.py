"""One deadline for a call that touches several servers, and the work that it does at all of them at the same time.

``net/allowance.py`` has what the present call of a thread may still wait, which every exchange within it asks for, and
``ipc/steps.py`` the work at one server as a generator.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from ..net.allowance import ALLOWANCE, allowed, at_most
from .steps import Polled, Steps, Wait, first_over

#: A place in a line ends so long after the wait for which it was taken, seconds: an exchange may be on its way.
PLACE_MORE_S: Final = 1.0


class Server(Protocol):
    """A server as :class:`Patience` sees it: a ``Target``."""

    def connect_soon(self) -> None:
        """Begin to connect in the background, unless that is under way."""

    @property
    def path(self) -> str:
        """The path in use, or ``down``."""

    @property
    def fresh(self) -> bool:
        """Whether :meth:`ready` waits for the first connection."""

    def ready(self) -> bool:
        """Wait for that, and return whether there is a path."""


class Patience:
    """How long a call waits for servers that do not answer: a deadline, however many it touches. A context manager.

    The time that is lost with servers that fail, with first connections and with waits for room is taken off the
    deadline. The exchanges with each further server get what is left. That must be half a deadline at least, as a
    healthy server that is given no time counts as failed: with less, the call turns to no other one. Transfers with
    servers that answer are not counted, as a batch may have any size.

    :meth:`together` does the work at several servers at the same time, so that the waits for silent ones overlap.

    A call that is made of others has one around them: each of those has its own then, which begins with what the others
    have left. What it loses is taken off the call's when it ends.

    ``began``: when the call began, monotonic seconds. All its time counts then, as is right for one key, and for
    another attempt after WRONG_OWNER, whose server gets a quarter of a deadline at least.
    """

    __slots__ = (
        "__weakref__", "_deadline_s", "_gone_before", "_gone_since", "_least_s", "_left_s", "_lost_before", "_outer",
        "_over", "_progress", "_since", "_stepping", "_target", "_until", "_whole_s", "_worked",
    )  # fmt: skip

    def __init__(self, deadline_s: float, began: float | None = None) -> None:
        mine = ALLOWANCE.mine
        if mine.owner is not None:
            mine.look()
        self._whole_s = deadline_s
        #: Of the call that this one is a part of, if any.
        self._outer = mine.seconds, mine.until
        self._deadline_s = self._left_s = min(deadline_s, max(0.0, mine.seconds))
        self._least_s = min(deadline_s / 2, mine.least_s)
        self._until = mine.until
        self._lost_before = mine.lost
        #: What waits that were no exchanges, and parts of this call, had taken from the thread's calls by its begin.
        self._gone_before = mine.spent + mine.lost
        #: The same when it turned to a server, or had the last answer of :meth:`together`.
        self._gone_since = 0.0
        self._target: Server | None = None
        self._since = 0.0
        #: When a server of :meth:`together` has answered last.
        self._progress = 0.0
        #: How much time was no wait for a first connection, seconds: steps without a wait, and what was taken off.
        self._worked = 0.0
        #: It does a step of :meth:`together`.
        self._stepping = False
        #: It has ended. What it allowed then would stay, as nobody would set it back.
        self._over = False
        if began is not None:
            self.count_all(began)

    def __enter__(self) -> Patience:
        mine = ALLOWANCE.mine
        mine.own(self)
        mine.seconds = self._left_s
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        mine = ALLOWANCE.mine
        seconds, until = self._outer
        if seconds != math.inf:
            if self._target is not None:
                self._account(time.monotonic())
            mine.lost += self._deadline_s - self._left_s
            seconds = max(0.0, seconds - (mine.lost - self._lost_before))
        mine.give_back(self, seconds, until)

    def count_all(self, began: float) -> None:
        """Let the call end within a deadline from ``began``, whatever it does until then."""
        self._least_s = min(self._least_s, self._whole_s / 4)
        self._until = min(self._until, began + self._deadline_s)

    def take_off(self, seconds: float) -> None:
        """Take a wait that was no exchange off the deadline, and off that of the call which this one is a part of.

        Call :meth:`settle` before the wait.
        """
        self._left_s -= seconds

    def settle(self) -> None:
        """Account for the server that the call turned to last: what comes now is no time that this one has cost."""
        self._account(time.monotonic())

    @property
    def last_turn(self) -> float:
        """When the call may turn to a server for the last time, monotonic seconds. After :meth:`count_all`."""
        return self._until - self._least_s

    def has_time_for(self, target: Server) -> bool:
        """Return whether the call may wait for this server, which it turns to now. Account for the one before.

        A call that has ended may wait for none. In a step of :meth:`together` that has turned to it already.
        """
        if self._stepping:
            return allowed(math.inf) > 0.0
        now = time.monotonic()
        self._account(now)
        mine = ALLOWANCE.mine
        self._target, self._since, self._gone_since = target, now, mine.spent + mine.lost
        if not self._allow(now):
            return False
        if target.fresh:
            target.ready()
            self._since = time.monotonic()
            self._left_s -= self._since - now
            return self._allow(self._since)
        return True

    def _account(self, now: float) -> None:
        """Take what the server that the call turned to last has cost off the deadline, if it has failed."""
        before, self._target = self._target, None
        if before is not None and before.path == "down":
            self._left_s -= self._cost(now, self._since)

    def _cost(self, now: float, since: float) -> float:
        """Return how much of the time since then nobody has taken off yet, seconds."""
        mine = ALLOWANCE.mine
        return max(0.0, now - since - (mine.spent + mine.lost - self._gone_since))

    def _allow(self, now: float, connecting_s: float = 0.0) -> bool:
        """Give the next exchanges what is left. Return False if that is not enough; sessions then begin none."""
        if self._over:
            return False
        mine = ALLOWANCE.mine
        left_s = self._left_s - (mine.spent + mine.lost - self._gone_before) - connecting_s
        if min(left_s, self._until - now) < self._least_s:
            mine.seconds = 0.0
            return False
        mine.seconds, mine.until = left_s, self._until
        return True

    # -- several servers at the same time ---------------------------------------------------------

    def together(
        self, visits: Iterable[tuple[Server, Steps[None]]], meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Do the work at several servers: each piece up to its first wait, then on from wherever an answer has come.

        ``meanwhile`` is called between the two; before it waits for a server it calls :meth:`has_time_for`. Work that
        there is no time for is not begun. A silent server holds up no other one. It costs the call what remains of its
        exchange when all others have ended. If something is raised, the other pieces are closed, which ends what they
        have in flight.
        """
        self._account(now := time.monotonic())
        self._allow(now)
        every = [_Visit(server, steps) for server, steps in visits]
        waits: dict[Wait, _Visit] = {}
        try:
            self._begin_all(every, waits)
            if meanwhile is not None:
                self._do(meanwhile, waits)
            while waits:
                # When all that is left is to take the answers, each piece may wait by itself, and so may the only one.
                # In the reverse order: when the last one has ended most others have, and there is one wake-up.
                alone = len(waits) == 1 or all(wait.last for wait in waits)
                for wait in list(reversed(waits)) if alone else first_over(waits):
                    self._go_on(waits.pop(wait), wait, waits, alone)
            self._allow(time.monotonic())  # what the last one was allowed is not what is left
        finally:
            for visit in every:
                visit.steps.close()

    def _do(self, work: Callable[[], None], waits: dict[Wait, _Visit]) -> None:
        """Do other work: no wait for anybody, but for what it loses with servers that it turns to itself."""
        mine = ALLOWANCE.mine
        began, left_s, gone = time.monotonic(), self._left_s, mine.spent + mine.lost
        work()
        now = time.monotonic()
        self._account(now)
        self._go_forward(now)
        self._worked += now - began  # what is lost has been taken off: it is not the connecting of another one, too
        self._take_off_others(waits, left_s - self._left_s, gone)

    def _take_off_others(self, waits: dict[Wait, _Visit], lost_s: float, gone: float) -> None:
        """Take what a piece of work has lost off what the others have, which keep half a deadline at least.

        ``gone``: ``spent`` and ``lost`` of the thread by its begin; what they have grown by is taken off here, and not
        once more as the others go on. ``lost_s``: what it has lost besides, seconds.
        """
        mine = ALLOWANCE.mine
        now_gone = mine.spent + mine.lost
        lost_s += now_gone - gone
        if lost_s > 0.0:
            for visit in waits.values():
                have_s = visit.left_s - (gone - visit.gone)  # without what it has spent itself
                visit.left_s, visit.gone = max(min(have_s, self._least_s), have_s - lost_s), now_gone

    def _begin_all(self, every: Sequence[_Visit], waits: dict[Wait, _Visit]) -> None:
        """Begin the work at all servers that are connected, and connect to the others meanwhile."""
        now = time.monotonic()
        self._go_forward(now)
        connected = []
        for visit in every:
            if visit.server.fresh:
                visit.server.connect_soon()
                waits[_Connecting(visit.server, now, now + allowed(self._left_s), self._worked)] = visit
            else:
                connected.append(visit)
        for visit in connected:
            self._begin(visit, 0.0, waits)

    def _begin(self, visit: _Visit, connecting_s: float, waits: dict[Wait, _Visit]) -> None:
        """Begin the work at a server, if there is time for it."""
        if self._allow(time.monotonic(), connecting_s):
            mine = ALLOWANCE.mine
            visit.left_s, visit.gone = mine.seconds, mine.spent + mine.lost
            self._step(visit, waits)

    def _go_on(self, visit: _Visit, wait: Wait, waits: dict[Wait, _Visit], alone: bool) -> None:
        """Go on with the work at one server, whose wait is over, or which may wait by itself (``alone``)."""
        if isinstance(wait, _Connecting) and alone:
            first_over([wait])
        now = time.monotonic()
        ready = wait.ready()
        if isinstance(wait, _Connecting):
            if not ready:  # the attempt goes on, and no operation waits for it
                with at_most(0.0):
                    visit.server.ready()
            # The thread may have copied for other servers meanwhile, for seconds.
            self._begin(visit, now - wait.since - (self._worked - wait.worked), waits)
            if self._progress < now:  # it was not begun
                self._lose(now)
            return
        mine = ALLOWANCE.mine
        mine.seconds = visit.left_s - (mine.spent + mine.lost - visit.gone)
        mine.until = self._until
        silent = False
        if now >= wait.until:
            silent = not ready
            if silent:
                mine.until = min(self._until, visit.since + visit.left_s)
            else:  # work at another server has held up this thread
                wait.extend(now + mine.seconds / 2)
        self._step(visit, waits, silent=silent, over=ready or not (alone or silent))

    def _step(
        self, visit: _Visit, waits: dict[Wait, _Visit], *, silent: bool = False, over: bool = True
    ) -> None:
        """Do the next step of the work at one server, with the allowance that is set.

        ``silent``: the server has not answered in time. ``over``: the work need not wait by itself.
        """
        mine = ALLOWANCE.mine
        began, gone = time.monotonic(), mine.spent + mine.lost
        self._stepping = True
        try:
            wait = visit.go_on(over)
        finally:
            self._stepping = False
        now = time.monotonic()
        failed = wait is None and visit.server.path == "down"
        if over and not failed:
            self._worked += now - began
        # It may have waited by itself then, and the others for it.
        lost_s = max(0.0, now - began - (mine.spent + mine.lost - gone)) if failed else 0.0
        self._take_off_others(waits, lost_s, gone)
        if wait is not None:
            waits[wait] = visit
            if not silent:
                visit.since = now
                self._go_forward(now)
        elif failed:
            self._lose(now)
        else:
            self._go_forward(now)

    def _lose(self, now: float) -> None:
        """Take the time since the last answer off what the call has left."""
        self._left_s -= self._cost(now, self._progress)
        self._worked += now - self._progress  # see _do()
        self._go_forward(now)

    def _go_forward(self, now: float) -> None:
        """Note an answer, or that what was lost by now is taken off."""
        mine = ALLOWANCE.mine
        self._progress, self._gone_since = now, mine.spent + mine.lost


class _Visit:
    """The work at one server of :meth:`Patience.together`."""

    __slots__ = ("gone", "left_s", "server", "since", "steps")

    def __init__(self, server: Server, steps: Steps[None]) -> None:
        self.server = server
        self.steps = steps
        #: What its exchanges were allowed at its begin, seconds, and what was gone by then (``Patience._gone_before``).
        self.left_s = self.gone = 0.0
        #: When its present exchange began; 0 before the first.
        self.since = 0.0

    def go_on(self, over: bool) -> Wait | None:
        """Do the next step; return what it waits for then, or None if that was the last."""
        try:
            return self.steps.send(over if self.since else None)
        except StopIteration:
            return None


class _Connecting(Polled):
    """The wait for the first connection to a server."""

    __slots__ = ("server", "since", "worked")

    def __init__(self, server: Server, since: float, until: float, worked: float) -> None:
        super().__init__(lambda: not server.fresh, until)
        self.server = server
        self.since = since
        #: ``Patience._worked`` by then, seconds.
        self.worked = worked


class Line:
    """Threads that wait for their turn, in the order in which they came.

    A signal's exception may strike anywhere, in :meth:`leave` too, and its thread then leaves a place behind that
    nobody gives up. So a place ends by itself, :data:`PLACE_MORE_S` after what its thread wanted to wait.
    """

    __slots__ = ("_lock", "_places")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: For each thread a lock, locked until it is the first, and when its place ends, monotonic seconds. The first
        #: place is the one whose turn it is.
        self._places: deque[tuple[threading.Lock, float]] = deque()

    def __bool__(self) -> bool:
        """Return True if somebody is in the line."""
        if self._places:
            with self._lock:
                self._end_places()
        return bool(self._places)

    def wait(self, place: threading.Lock, seconds: float) -> bool:
        """Stand at the end of the line with a new lock as the place. Return whether its turn comes within ``seconds``.

        Call :meth:`leave` in any case, after an exception too.
        """
        until = time.monotonic() + max(0.0, seconds)
        with self._lock:
            self._end_places()
            if self._places:
                place.acquire()
            self._places.append((place, until + PLACE_MORE_S))
        while True:
            with self._lock:
                first = self._places[0][1] if self._places else 0.0  # another thread may end it in between
            now = time.monotonic()
            if place.acquire(timeout=max(0.0, min(until, first) - now)):
                return True
            if now >= until:
                return False
            with self._lock:
                self._end_places()
                if self._places and self._places[0][0] is place:  # whoever was before it has called nobody
                    place.acquire(blocking=False)
                    return True

    def leave(self, place: threading.Lock) -> None:
        """Leave the line, from whatever place in it. The next one's turn begins if it was this one's. O(line)."""
        with self._lock:
            for at, (each, _) in enumerate(self._places):
                if each is place:
                    del self._places[at]
                    if not at:
                        self._call_first()
                    break

    def _end_places(self) -> None:
        """Remove the first places while they have ended. Under the lock."""
        now = time.monotonic()
        ended = False
        while self._places and self._places[0][1] < now:
            self._places.popleft()
            ended = True
        if ended:
            self._call_first()

    def _call_first(self) -> None:
        """Let the first one's turn begin."""
        if self._places and self._places[0][0].locked():
            self._places[0][0].release()
