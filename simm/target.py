"""One worker as a client reaches it: by shared memory, by RDMA, by TCP, or not at all for now.

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

RDMA
----
A worker that is not on this host is reached by TCP, and by RDMA beside it where its stream says so and both ends have
rails that reach each other (``rdmapath.py``). That path goes up and down by itself, with retries of its own; TCP
carries what it leaves over, and all keys while it is down. Where the settings name ``rdma`` and not ``tcp``, the
connection is there for words only (what a miss means, deletes), and a target whose RDMA is down counts as down.

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
from dataclasses import dataclass, field
from typing import Final

from .bounce import BouncePool
from .breaker import BACKOFF_S as BACKOFF_S
from .breaker import Breaker as Breaker
from .channel import Refused
from .errors import RemoteProtocolError, SegmentError, TransportError
from .fabric import Absence, Fabric
from .layout import State
from .messages import PathBit, WorkerInfo
from .rdmapath import Paths, RdmaPath
from .reader import ONE_SIDED, ArenaReader
from .session import WorkerSession
from .tcppath import TcpPath

log = logging.getLogger("simm.client")

TICK_S: Final = 0.1
#: See above.
STALE_S: Final = 0.5
#: A target that is reached by TCP though its worker is on this host is tried by shm again so often.
UPGRADE_S: Final = (5.0, 10.0)


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
    #: This process's rails, opened at the first need, and registered memory for values whose own is not.
    fabric: Callable[[], Fabric | Absence] = lambda: Absence("this client has no RDMA")
    bounce: BouncePool | None = None
    #: Those that were given up too, as long as calls use them.
    rdma_paths: Paths = field(default_factory=Paths)
    #: Sessions and paths that broke.
    outages: int = 0

    def allows(self, path: str) -> bool:
        """May this data path be used?"""
        return self.path == "auto" or path in self.path.split(",")


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
        #: Beside TCP where the server offers it, up or down.
        self.rdma: RdmaPath | None = None
        #: May values go by TCP?
        self.bulk = reach.allows("tcp")
        self._why = "not connected yet"
        self._no_rdma = ""
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
        """``shm``, ``rdma``, ``tcp`` or ``down``."""
        session = self.session
        if session is not None and not session.broken:
            return "shm"
        if self.tcp is None:
            return "down"
        rdma = self.rdma
        if rdma is not None and not rdma.why:
            return "rdma"
        return "tcp" if self.bulk else "down"

    @property
    def why(self) -> str:
        """Why the path in use is not a better one."""
        if self.tcp is None:
            return self._why
        rdma = self.rdma
        reason = self._no_rdma if rdma is None else rdma.why
        if not reason:
            return self._why
        return f"{self._why}; RDMA: {reason}" if self._why else f"RDMA: {reason}"

    @property
    def settled(self) -> bool:
        """Is no better path being tried for the first time just now?"""
        rdma = self.rdma
        return self.tried and (rdma is None or not rdma.connecting or rdma.breaker.failures > 0)

    # -- connecting -------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Is the target up? Waits for the first connection, a deadline at most; never for a later one."""
        session = self.session
        if session is not None and not session.broken:
            return True
        if self.tcp is not None and (self.bulk or ((rdma := self.rdma) is not None and not rdma.why)):
            return True
        if self.tried:
            return False
        with self._changed:
            if not self.tried and not self.connecting:
                self._start_locked()
            if not self._changed.wait_for(lambda: self.tried, self._reach.deadline_s):
                self.tried = True  # it goes on in the background; nobody else waits for it
                self._why = "deadline passed while connecting"
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
            self._why = f"cannot connect: {exc}"
            self.breaker.failed(self._reach.clock())

    def _connect(self) -> None:
        """Body of a connecting thread."""
        session: WorkerSession | None = None
        tcp: TcpPath | None = None
        why = "internal error, see the log"
        upgrade = False
        rdma: RdmaPath | None = None
        try:
            session, why, upgrade = self._by_shm()
            # With its arena mapped this is a worker that restarts: it comes back, and reads go on meanwhile.
            if session is None and self.reader is None and (self.bulk or self._reach.allows("rdma")):
                known = self.tcp
                if known is None:
                    tcp, why = self._by_tcp(why)
                    known = tcp
                if known is not None and self.rdma is None:
                    rdma = self._by_rdma(known, fresh=tcp is None)
        except Exception:
            log.exception("connecting to %s/%d", self.info.node, self.info.worker)
        finally:
            self._connected(session, tcp, why, upgrade, rdma)

    def _by_shm(self) -> tuple[WorkerSession | None, str, bool]:
        """A session; or why there is none, and whether to try again though TCP works."""
        reach = self._reach
        if not reach.allows("shm"):
            return None, f"path={reach.path} was asked for", False
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

    def _by_rdma(self, tcp: TcpPath, fresh: bool) -> RdmaPath | None:
        """The RDMA path where the server offers one; ``fresh``: ask it anew. It connects by itself, but where no other
        path is allowed: then we wait for it."""
        reach = self._reach
        if not reach.allows("rdma"):
            self._no_rdma = ""
            return None
        if fresh:
            with contextlib.suppress(TransportError, RemoteProtocolError):
                tcp.greet()
        welcome = tcp.welcome
        if welcome is None or not welcome.paths & PathBit.RDMA or not welcome.rdma_port:
            self._no_rdma = "the server offers none"
            return None
        rdma = RdmaPath(
            reach.fabric, (self.info.host, welcome.rdma_port), reach.namespace, reach.deadline_s, token=reach.token,
            fresh=lambda: reach.fresh(), refresh=lambda: reach.refresh(), bounce=reach.bounce,
        )  # fmt: skip
        reach.rdma_paths.add(rdma)
        if not self.bulk:
            rdma.connect(time.monotonic() + reach.deadline_s)
        return rdma

    def _connected(
        self, session: WorkerSession | None, tcp: TcpPath | None, why: str, upgrade: bool, rdma: RdmaPath | None = None
    ) -> None:
        """Take over what a try has brought."""
        old: TcpPath | None = None
        late: RdmaPath | None = rdma
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
                late, self.rdma = self.rdma or rdma, None
            elif wanted:
                self.tcp = tcp or self.tcp
                if rdma is not None and self.tcp is not None:
                    self.rdma, late = rdma, None
                    if rdma.why and not rdma.breaker.failures:
                        rdma.connect_soon()
            if wanted:
                self._why = why
                # Or it offers RDMA by then.
                again = upgrade or (self.tcp is not None and self.rdma is None and bool(self._no_rdma))
                self._upgrade_at = now + random.uniform(*UPGRADE_S) if again else float("inf")
                if self.session is None and self.tcp is None:
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
        if late is not None:
            late.close()

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
            rdma, self.rdma = self.rdma, None
            self._down(reason)
        path.close()
        if rdma is not None:
            rdma.close()

    def _down(self, reason: str) -> None:
        self._reach.outages += 1
        self._why = reason
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
        rdma = self.rdma
        if rdma is not None:
            if rdma.wants_connection(now):
                rdma.connect_soon()
            else:
                rdma.tend(now)

    def wants_connection(self, now: float) -> bool:
        """Is it time to connect again?"""
        if self.connecting or self.retired or not self.tried:
            return False
        session = self.session
        if (session is None or session.broken) and self.tcp is None:
            return self.breaker.due(now)
        return session is None and now >= self._upgrade_at

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
            rdma, self.rdma = self.rdma, None
            self._why = "closed"
            self._changed.notify_all()
        if session is not None:
            session.close(clean=clean)
        if rdma is not None:
            rdma.close()
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
        if self.rdma is not None:
            self.rdma.abandon()
