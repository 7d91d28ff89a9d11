"""One worker as a client reaches it: by shared memory, by TCP, or not at all for now.

The circuit breaker
-------------------
A target is *up* with a shm session or a TCP path, or *down*. The first operation on a new target waits for its
connection, a deadline at most; whoever comes meanwhile waits with it. A failure puts the target down: from then
on operations on it fail at once, and only the client's background tries again, after a jittered, doubling pause
(50 ms to 1 s). So a dead or stopped server costs each operation that was under way its deadline, and those that
come later nothing; all threads of a client share a target, and so what one of them has learnt.

Connections are made in threads of their own. A name server that hangs, a host that drops packets or a worker
that is stopped then holds up neither an operation beyond its deadline nor the upkeep of the other targets; and no
lock is held meanwhile.

Reading from a worker that does not answer
------------------------------------------
Reads over shm need no worker, only the arena, so they go on while the session is down. May they? The values are
right as long as nobody else accepts mutations of these shards, and it is the map that says so:

* *The worker is dead, its data server is not*: the next worker takes over the same arena. Reads go on.
* *The worker is stopped* (SIGSTOP, a debugger, a machine that swaps): its heartbeat stands still, its server goes on
  telling the manager that it lives, the shards stay its own. Reads of its plain shards go on; mutations meet their
  deadline once. If the manager gives the shards to others, the map says so and this target is dropped.
* *The data server is dead*: the kernel refuses connections to its socket. The arena is let go once the heartbeat has
  stood still for ``STALE_S``: before the manager has noticed, its keys are misses.
* *We are cut off from the manager too*, or it is down: a map that gives the shards to others would not reach us. So
  without a manager a heartbeat that stands still for ``STALE_S``, with no session, is enough to let the arena go.
  A session that answers, or a heartbeat that moves, is proof of life: a manager that is down for hours costs nothing.

What it costs: 16 KiB of thread stack touched for each try, and a stopped worker's arena stays mapped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .channel import Refused
from .errors import RemoteProtocolError, SegmentError, TransportError
from .layout import State
from .messages import WorkerInfo
from .reader import ONE_SIDED, ArenaReader
from .session import WorkerSession
from .tcppath import TcpPath

log = logging.getLogger("simm.client")

TICK_S: Final = 0.1
BACKOFF_S: Final = (0.05, 1.0)
#: See above.
STALE_S: Final = 0.5
#: A target that is reached by TCP though its worker is on this host is tried by shm again so often.
UPGRADE_S: Final = (5.0, 10.0)


class Breaker:
    """When to try again what has failed: after a jittered pause that doubles with each failure in a row."""

    __slots__ = ("_pause_s", "_uniform", "failures", "retry_at")

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform
        self._pause_s = BACKOFF_S[0]
        #: Monotonic seconds.
        self.retry_at = 0.0
        #: In a row.
        self.failures = 0

    def failed(self, now: float) -> None:
        """One more failure, at ``now``."""
        self.failures += 1
        self.retry_at = now + self._pause_s * self._uniform(0.5, 1.0)
        self._pause_s = min(BACKOFF_S[1], self._pause_s * 2)

    def worked(self) -> None:
        """It works again: the next failure is a first one."""
        self.failures = 0
        self._pause_s = BACKOFF_S[0]

    def due(self, now: float) -> bool:
        """Is it time to try again?"""
        return now >= self.retry_at


@dataclass
class Reach:
    """What all targets of a client have in common: how they connect, and whom they tell."""

    namespace: str
    path: str
    deadline_s: float
    token: str = ""
    ring: bool = True
    #: Ask for a new map soon.
    refresh: Callable[[], None] = lambda: None
    #: Would a new map reach us?
    fresh: Callable[[], bool] = lambda: True
    clock: Callable[[], float] = time.monotonic
    #: Sessions and paths that broke.
    outages: int = 0


class Target:
    """One worker. Methods may be called from any thread; :meth:`tend` from one."""

    def __init__(self, info: WorkerInfo, reach: Reach) -> None:
        self.info = info
        self.key = (info.node, info.worker, info.instance)
        self._reach = reach
        #: Guards the change between the states below; never held during I/O.
        self._changed = threading.Condition(threading.Lock())
        #: Set while reads may go straight to the arena. Never closed, only dropped: another thread may be in
        #: the middle of a copy out of it, and its own reference keeps the mapping alive as long.
        self.reader: ArenaReader | None = None
        self.session: WorkerSession | None = None
        self.tcp: TcpPath | None = None
        #: Why the path in use is not a better one.
        self.why = "not connected yet"
        #: The first connection was made, has failed, or has cost somebody the deadline.
        self.tried = False
        self.connecting = False
        self.retired = False
        self.breaker = Breaker()
        #: Nobody listens where the worker should be.
        self._nobody = False
        self._upgrade_at = float("inf")
        self._beat = (-1, 0.0)

    def __repr__(self) -> str:
        return f"<Target {self.info.node}/{self.info.worker} {self.path}>"

    @property
    def path(self) -> str:
        """``shm``, ``tcp`` or ``down``."""
        session = self.session
        if session is not None and not session.broken:
            return "shm"
        return "tcp" if self.tcp is not None else "down"

    # -- connecting -------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Is the target up? Waits for the first connection, a deadline at most; never for a later one."""
        session = self.session
        if session is not None and not session.broken:
            return True
        if self.tcp is not None:
            return True
        if self.tried:
            return False
        with self._changed:
            if not self.tried and not self.connecting:
                self._start_locked()
            if not self._changed.wait_for(lambda: self.tried, self._reach.deadline_s):
                self.tried = True  # it goes on in the background; nobody else waits for it
                self.why = "deadline passed while connecting"
                self.breaker.failed(self._reach.clock())
                self._changed.notify_all()
        return self.path != "down"

    def connect_soon(self) -> None:
        """Connect in a thread of its own, if none does so already."""
        with self._changed:
            if not self.connecting and not self.retired:
                self._start_locked()

    def _start_locked(self) -> None:
        self.connecting = True
        thread = threading.Thread(target=self._connect, name="simm-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no more threads, or the interpreter is ending
            self.connecting = False
            self.tried = True
            self.why = f"cannot connect: {exc}"
            self.breaker.failed(self._reach.clock())

    def _connect(self) -> None:
        """Body of a connecting thread."""
        session: WorkerSession | None = None
        tcp: TcpPath | None = None
        why = "internal error, see the log"
        upgrade = False
        try:
            session, why, upgrade = self._by_shm()
            # With its arena mapped this is a worker that restarts: it comes back, and reads go on meanwhile.
            if session is None and self.reader is None and self._reach.path != "shm" and self.tcp is None:
                tcp, why = self._by_tcp(why)
        except Exception:
            log.exception("connecting to %s/%d", self.info.node, self.info.worker)
        finally:
            self._connected(session, tcp, why, upgrade)

    def _by_shm(self) -> tuple[WorkerSession | None, str, bool]:
        """A session; or why there is none, and whether to try again though TCP works."""
        reach = self._reach
        if reach.path == "tcp":
            return None, "path=tcp was asked for", False
        if not ONE_SIDED:
            return None, "this processor's memory order is not proven for one-sided reads", False
        uds = self.info.uds
        if not os.path.exists(uds):
            self._nobody = True
            return None, f"{uds} is not on this host", False
        try:
            session = WorkerSession(uds, reach.namespace, reach.deadline_s, ring=reach.ring)
        except Refused as exc:
            return None, str(exc), False
        except (TransportError, SegmentError, RemoteProtocolError) as exc:
            self._nobody = isinstance(exc.__cause__, (ConnectionRefusedError, FileNotFoundError))
            return None, str(exc), True
        self._nobody = False
        return session, "", False

    def _by_tcp(self, why: str) -> tuple[TcpPath | None, str]:
        reach = self._reach
        tcp = TcpPath(self.info.host, self.info.port, reach.namespace, reach.deadline_s, reach.token)
        try:
            tcp.connect()
        except (TransportError, RemoteProtocolError) as exc:
            return None, str(exc)
        return tcp, why

    def _connected(self, session: WorkerSession | None, tcp: TcpPath | None, why: str, upgrade: bool) -> None:
        """Take over what a try has brought."""
        old: TcpPath | None = None
        now = self._reach.clock()
        with self._changed:
            self.connecting = False
            self.tried = True
            wanted = not self.retired
            if wanted and session is not None:
                # The reader first: with a session the target counts as ready, and gets look for a reader then.
                self.reader = session.reader
                self._beat = (-1, now)
                self.session = session
                old, self.tcp = self.tcp, None
            elif wanted and tcp is not None:
                self.tcp = tcp
            if wanted:
                self.why = why
                self._upgrade_at = now + random.uniform(*UPGRADE_S) if upgrade else float("inf")
                if self.path == "down":
                    self.breaker.failed(now)
                    log.info("%s/%d is down: %s", self.info.node, self.info.worker, why)
                else:
                    self.breaker.worked()
            self._changed.notify_all()
        if not wanted and session is not None:
            session.close()
        if old is not None:
            old.close()
        if not wanted and tcp is not None:
            tcp.close()

    def lost(self, reason: str) -> None:
        """An exchange failed: close what broke. Operations fail at once until the background got through."""
        with self._changed:
            session = self.session
            if session is None or not session.broken:
                return
            self.session = None
            self._down(reason)
        session.close(clean=False)

    def tcp_lost(self, path: TcpPath, reason: str) -> None:
        """The TCP path failed."""
        with self._changed:
            if self.tcp is not path:
                return
            self.tcp = None
            self._down(reason)
        path.close()

    def _down(self, reason: str) -> None:
        self._reach.outages += 1
        self.why = reason
        self.breaker.failed(self._reach.clock())
        log.info("%s/%d is down: %s", self.info.node, self.info.worker, reason)

    # -- background -------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Upkeep, every tick. Blocks for a deadline at most, and then the session is broken."""
        session = self.session
        if session is not None:
            try:
                session.tend()
            except (TransportError, RemoteProtocolError) as exc:
                self.lost(str(exc))
        reader = self.reader
        if reader is not None:
            self._watch_heartbeat(reader, now)
            until = now + TICK_S / 2
            while reader.populate_some() and time.monotonic() < until:
                pass

    def wants_connection(self, now: float) -> bool:
        """Is it time to connect again?"""
        if self.connecting or self.retired or not self.tried:
            return False
        if self.path == "down":
            return self.breaker.due(now)
        return self.session is None and now >= self._upgrade_at

    def _watch_heartbeat(self, reader: ArenaReader, now: float) -> None:
        beat = reader.heartbeat
        if beat != self._beat[0]:
            self._beat = (beat, now)
        gone = reader.state in (State.CLOSED, State.SUSPENDED)
        if not gone and self.session is None and now - self._beat[1] > STALE_S:
            gone = self._nobody or not self._reach.fresh()
        if not gone:
            return
        log.info("%s has gone", reader.name)
        session: WorkerSession | None = None
        with self._changed:
            if self.reader is reader:
                self.reader = None
                session, self.session = self.session, None
        if session is not None:
            session.close(clean=False)
        self._reach.refresh()

    def close(self, *, clean: bool = True) -> None:
        """Close everything. Operations under way in other threads come out as misses."""
        with self._changed:
            self.retired = True
            self.tried = True
            session, self.session = self.session, None
            self.reader = None
            tcp, self.tcp = self.tcp, None
            self.why = "closed"
            self._changed.notify_all()
        if session is not None:
            session.close(clean=clean)
        if tcp is not None:
            tcp.close()

    def abandon(self) -> None:
        """After a fork, in the child: close the sockets' copies, touch no memory, take no lock."""
        self.retired = self.tried = True
        if self.session is not None:
            with contextlib.suppress(OSError):
                self.session.channel.sock.close()
        if self.tcp is not None:
            self.tcp.abandon()
