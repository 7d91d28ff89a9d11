"""One way to a worker: its state, and how it goes up and down. All paths of a client are built on :class:`Path`.

::

                 attempt failed            connection lost
          NEW ------------------> DOWN <------------------ UP
           |                       |                        ^
           |                       |   attempt succeeded    |
           +-----------------------+------------------------+

    NEW, DOWN -> ABSENT     this process can never have such a path
    any       -> CLOSED     close(), or a fork: a child must not use its parent's connections

* **NEW**: no attempt to connect has ended. The first operation may wait for that, a deadline at most.
* **UP**: there is a connection. ``down_reason`` is None in this state and in no other.
* **DOWN**: the last attempt failed, or the connection was lost. Operations fail at once; none waits.
* **ABSENT**: as DOWN, and no further attempt is made.
* **CLOSED**: final. Connections in use by calls of other threads close when they are returned.

An attempt runs in a thread of its own, one at a time (``connecting``), and holds no lock during I/O. So a name server
that hangs, or a host that drops packets, delays neither an operation beyond its deadline nor the maintenance of other
paths. An attempt that outlasts the deadline goes on in the background, in the state DOWN. An attempt may also look for
a better path while this one is UP. The client's background thread starts the next attempt after a jittered pause that
doubles with each failure in a row, so a dead server costs the operations in flight their deadline, and later ones
nothing.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..arena.layout import State
from ..config.client_options import ClientOptions
from ..host import fork
from ..host.threads import Waiters, lives
from ..ipc.steps import Polled, Steps, first_over
from ..ipc.tally import Tallies
from ..net.allowance import allowed, tries_within
from ..net.channel import BACKOFF_S, Backoff

if TYPE_CHECKING:
    from ..rdma.api import Absence, Fabric
    from ..rdma.registration import Shared
    from ..rdma.staging import StagingPool
    from .ops.epochs import ClientEpoch

#: How long a heartbeat must stand still to count, seconds.
STALE_S: Final = 0.5

_CLOSED_ARENA: Final = frozenset((State.CLOSED, State.SUSPENDED))


class PathState(enum.Enum):
    """See the top of this module."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    ABSENT = "absent"
    CLOSED = "closed"


class Path:
    """A way to a worker with a pool of connections. Any thread may call it.

    Args:
        context: the client's.
        pauses: between attempts, the first and the longest, seconds.

    Subclasses implement :meth:`_attempt`, and :meth:`_end` for a pooled connection.
    """

    #: Name of the connecting thread.
    thread_name = "simm-connect"

    def __init__(self, context: ClientContext, pauses: tuple[float, float] = BACKOFF_S) -> None:
        self._context = context
        self.state = PathState.NEW
        #: Why the path cannot be used; None while it is UP.
        self.down_reason: str | None = "not connected yet"
        self.backoff = Backoff(pauses=pauses)
        #: Whether an attempt has been started that has not told of its end; its thread once that has begun.
        self._connecting = False
        self._connector: threading.Thread | None = None
        #: When the first of the idle connections came, or the last attempt ended without one; monotonic seconds.
        self._ready_at = 0.0
        #: The attempt that has begun last: an object of its own.
        self._latest: object = None
        #: Guards the state and the pool; never held during I/O.
        self._lock = threading.Lock()
        #: Those who wait for a change of them.
        self._changed = Waiters(self._lock)
        self._idle: list[Any] = []
        #: Connections that have left the pool to be ended, until they are; those that a thread is ending.
        self._leaving: list[Any] = []
        self._at_end: list[Any] = []
        fork.in_child(self._after_fork)

    # -- attempts ---------------------------------------------------------------------------------

    @property
    def connecting(self) -> bool:
        """Whether an attempt is in progress. One whose thread has ended early, for want of memory, is not."""
        if not self._connecting:
            return False
        connector = self._connector
        return connector is None or lives(connector)

    @connecting.setter
    def connecting(self, value: bool) -> None:
        if not value:
            self._note_ready()
        self._connecting = value

    def _note_ready(self) -> None:
        """Note that who waits for a connection need not do so any longer, unless that is so already."""
        if not self._idle:
            self._ready_at = time.monotonic()

    def connect_soon(self) -> None:
        """Start an attempt in a thread of its own, unless one is in progress, or none is needed.

        The caller has looked without the lock, and another thread's attempt may have ended since. In a signal's handler
        that has interrupted one who has the lock, this does nothing, after a deadline at most.
        """
        (got,) = tries_within(self._lock, allowed(self._context.options.deadline_s))
        try:
            if got and not self.connecting and self.state is not PathState.CLOSED and self._needed():
                self._start_locked()
        finally:
            if got:
                self._lock.release()

    def _needed(self) -> bool:
        """Return whether an attempt can bring anything. The lock is held."""
        return self.state is not PathState.UP

    def _start_locked(self) -> None:
        thread: threading.Thread | None = None
        try:
            self._connecting, self._connector = True, None
            self._latest = mine = object()
            thread = threading.Thread(target=self._run, args=(mine,), name=self.thread_name, daemon=True)
            thread.start()
            self._connector = thread
        except BaseException as exc:
            # Not the property: an interrupt may come as a function begins.
            self._latest, self._connecting = None, False  # a thread that runs all the same makes no attempt
            # Else a signal's handler has raised it, or there is no memory: the next operation starts another one.
            if not isinstance(exc, RuntimeError) or thread is None or thread.ident is not None:
                raise
            self._no_thread(f"cannot connect: {exc}")  # no more threads, or the interpreter is ending

    def attempt_over(self, until: float) -> Steps[float]:
        """Wait until a connection is idle or no attempt is in progress, or until then, monotonic seconds.

        Return until when the rest may last. That is later if other work has held up the thread after the attempt.
        """
        if self.connecting:
            wait = Polled(lambda: bool(self._idle) or not self.connecting, until)
            if not (yield wait):
                first_over([wait])
            elif wait.ready():
                now = time.monotonic()
                until = min(until + now - self._ready_at, now + allowed(self._context.options.deadline_s))
        return until

    def _run(self, mine: object) -> None:
        """Make an attempt, unless whoever started this thread was interrupted, and counts it as not started."""
        with self._lock:
            if self._latest is not mine:
                return
        self._attempt()

    def _no_thread(self, reason: str) -> None:
        """Note that an attempt could not begin. A path that is up keeps its connection. The lock is held."""
        if self.state is PathState.UP:
            self.backoff.failed(self._context.clock())
        else:
            self._set_down(reason)

    def _attempt(self) -> None:
        """Body of the connecting thread. It ends with ``connecting`` False."""
        raise NotImplementedError

    def wants_connection(self, now: float) -> bool:
        """Return whether it is time for another attempt."""
        return self.state is PathState.DOWN and not self.connecting and self.backoff.due(now)

    # -- transitions; the lock is held --------------------------------------------------------------

    def _set_up(self) -> None:
        if self.state is not PathState.CLOSED:
            self.state = PathState.UP
            self.down_reason = None
            self.backoff.worked()

    def _set_down(self, reason: str, state: PathState = PathState.DOWN) -> None:
        if self.state is not PathState.CLOSED:
            if self.state is not PathState.ABSENT:
                self.state = state
            self.down_reason = reason
            self.backoff.failed(self._context.clock())

    def _set_closed(self, reason: str = "closed") -> None:
        """Close the path. The caller ends the idle connections by :meth:`_end_left`, without the lock."""
        self.state = PathState.CLOSED
        self.down_reason = self.down_reason or reason
        self._leave_idle()

    def _leave_idle(self) -> None:
        """Take the idle connections out of use, for :meth:`_end_left`. No interrupt comes in between."""
        self._leaving, self._idle = self._leaving + self._idle, []

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Close idle connections. Those in use close when they are returned. Twice is harmless.

        A second call ends what was interrupted. Return False if another thread is at it, which may be interrupted.
        """
        try:
            with self._lock:
                self._set_closed()
                self._changed.notify_all()
        finally:
            ended = self._end_left()
        return ended

    def _end_left(self, reason: str = "closed") -> bool:
        """End the connections that were taken out of use. Return False if another thread still ends one."""
        if self._leaving:
            with contextlib.ExitStack() as each:  # the others too if one is interrupted
                for connection in self._leaving[:]:
                    each.callback(self._end_one, connection, reason)
            with self._lock:
                self._changed.notify_all()
        return not self._leaving

    def _end_one(self, connection: Any, reason: str) -> None:
        """End a connection unless another thread is at it: ends of one connection must not meet."""
        mine = False
        try:
            # No call from here to the next: no thread, and no interrupt, comes in between.
            if connection in self._at_end or connection not in self._leaving:
                return
            self._at_end += (connection,)
            mine = True
            self._end(connection, reason)
            self._leaving.remove(connection)
        finally:
            if mine:
                self._at_end.remove(connection)

    def _in_use(self) -> bool:
        """Return whether a call, an attempt, or the end of another thread's, still uses a connection."""
        return self.connecting or bool(self._leaving)

    @property
    def over(self) -> bool:
        """Whether the path is closed, with all its connections."""
        return self.state is PathState.CLOSED and not self._in_use()

    def gone(self, until: float) -> bool:
        """Close the path; return whether it is over. Waits for calls until ``until``, monotonic seconds."""
        self.close()
        return self._changed.wait_for(lambda: not self._in_use(), until)

    def _after_fork(self) -> None:
        """Close the path in the child of a fork. Takes no lock; each channel closes its copy of a socket."""
        self._connecting = False  # the thread, or the one that was starting it, is the parent's
        self.state = PathState.CLOSED
        self.down_reason = "forked"

    def _end(self, connection: Any, reason: str = "closed") -> None:
        """Close a connection that no call uses."""
        connection.close()


class Heartbeat:
    """Whether a worker lives, from the words in its arena's header."""

    __slots__ = ("_changed_at", "value")

    def __init__(self) -> None:
        self.value = -1
        #: When the value was last seen to change.
        self._changed_at = 0.0

    def restart(self, now: float, value: int = -1) -> None:
        """Begin anew: with a new session, or a new connection."""
        self.value, self._changed_at = value, now

    def seen(self, value: int, now: float) -> None:
        """Note the heartbeat word."""
        if value != self.value:
            self.value, self._changed_at = value, now

    def stale(self, now: float) -> bool:
        """Return whether it has stood still for ``STALE_S``."""
        return now - self._changed_at > STALE_S


def arena_closed(state: int) -> bool:
    """Return whether an arena whose header has this STATE word is closed for good."""
    return state in _CLOSED_ARENA


class ClientRdma:
    """What a client's RDMA paths share. The first path opens it; until then no module of RDMA is loaded.

    It lists all paths whose connections may still be open, as the devices must not be closed before the last one. A
    path that was given up long ago may still be in use by another thread's call. Any thread may call it.

    Args:
        devices: the client's option.
        fabric: returns the RDMA devices, or why there are none, instead of the process's own.
        staging: instead of a pool of its own.
    """

    def __init__(
        self, devices: str = "", *, fabric: Callable[[], Fabric | Absence] | None = None,
        staging: StagingPool | None = None,
    ) -> None:  # fmt: skip
        self._devices = devices
        self._lock = threading.Lock()
        self._closed = False
        self._paths: list[Path] = []
        #: This process's share in the devices.
        self.shared: Shared | None = None
        #: Returns the devices, opened at the first need, or why there are none. None before :meth:`open`.
        self.fabric = fabric
        #: Registered memory for values whose own memory is not.
        self.staging = staging
        fork.in_child(self._after_fork)

    def open(self) -> bool:
        """Load RDMA's modules and take a share in the devices. Return False once closed."""
        from ..rdma import registration  # an attempt to connect waits for these; no operation does
        from ..rdma.staging import StagingPool

        with self._lock:
            if self._closed:
                return False
            if self.staging is None:
                self.staging = StagingPool()
            if self.fabric is None:
                self.shared = registration.acquire(self._devices)
                self.fabric = self.shared.get
            return True

    def add(self, path: Path) -> None:
        """Add a path."""
        with self._lock:
            self._paths.append(path)

    def tidy(self) -> None:
        """Forget the paths that are over, with what each knows of an arena: up to 32 MiB."""
        if any(path.over for path in self._paths):
            with self._lock:
                self._paths = [each for each in self._paths if not each.over]

    def close(self, patience_s: float) -> bool:
        """Close all paths, then what they share. Return False if a call uses a path for ``patience_s`` more."""
        until = time.monotonic() + patience_s
        with self._lock:
            self._closed = True
            paths = list(self._paths)
        for path in paths:
            path.close()
        if not all([path.gone(until) for path in paths]):  # noqa: C419 -- each of them waits for something
            return False
        self.tidy()  # each path refers to this object: without the list none waits for the cycle collector
        if self.staging is not None:
            self.staging.close()
        if self.shared is not None:
            from ..rdma import registration  # which open() has loaded

            shared, self.shared = self.shared, None  # no call from here to the next: one could be interrupted
            if shared is not None:  # another thread has not
                registration.release(shared)
        return True

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


@dataclass
class ClientContext:
    """What all paths of a client share: its options, and what they ask of the rest of the client."""

    options: ClientOptions
    #: Asks for a new map soon.
    refresh: Callable[[], None] = lambda: None
    #: Tells whether a manager is connected, so that a new map would reach this client.
    manager_connected: Callable[[], bool] = lambda: True
    clock: Callable[[], float] = time.monotonic
    rdma: ClientRdma = field(default_factory=lambda: ClientRdma())
    #: The epoch of the client's namespace.
    epoch: ClientEpoch | None = None
    #: How many sessions and paths have broken.
    outages: int = 0
    #: Where its operations are counted.
    tallies: Tallies = field(default_factory=Tallies)
