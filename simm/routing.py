"""From a digest to the worker that owns it, and keeping that way open.

:class:`Router` holds the shard map, a :class:`Target` per worker and one background thread that does
all that must not cost an operation: it follows the manager, reconnects what broke, hands back
what was recalled, notices servers that have gone.

The circuit breaker
-------------------
A target is *up* with a shm session or a TCP path, or *down*. The first operation on a new target connects,
within the deadline. A failure puts it down; from then on operations on it fail at once, and only the
background thread tries again, after a jittered, doubling pause (50 ms to 1 s). Reads over shm go
on while the session is down, as they need only the mapped arena; they stop when its state word says
closed or its heartbeat stands still while the session cannot be made again.

Forks
-----
A child's copies of the sockets are closed, its maps are not there (``MADV_DONTFORK``), and all locks
are made anew; the first operation in the child starts a router of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, Final

from . import messages as M
from .channel import Channel, Refused
from .constants import NO_OWNER, SHARD_COUNT
from .errors import RemoteProtocolError, SegmentError, TransportError
from .layout import State
from .messages import WorkerInfo
from .reader import ONE_SIDED, ArenaReader
from .session import WorkerSession
from .tcppath import TcpPath

log = logging.getLogger("simm.client")

TICK_S: Final = 0.1
BACKOFF_S: Final = (0.05, 1.0)
#: A worker whose heartbeat stands still for so long, without a session, is taken for gone.
STALE_S: Final = 2.0


class Target:
    """One worker as this client reaches it."""

    def __init__(self, info: WorkerInfo, router: Router) -> None:
        self.info = info
        self.key = (info.node, info.worker, info.instance)
        self._router = router
        self._lock = threading.Lock()
        #: Set while reads may go straight to the arena. Never closed, only dropped: another thread may be in
        #: the middle of a copy out of it, and its own reference keeps the mapping alive as long.
        self.reader: ArenaReader | None = None
        self.session: WorkerSession | None = None
        self.tcp: TcpPath | None = None
        #: Why the path in use is not a better one.
        self.why = "not connected yet"
        self.tried = False
        self.retired = False
        self._retry_at = 0.0
        self._pause_s = BACKOFF_S[0]
        self._beat = (-1, 0.0)

    def __repr__(self) -> str:
        return f"<Target {self.info.node}/{self.info.worker} {self.path}>"

    @property
    def path(self) -> str:
        """``shm``, ``tcp`` or ``down``."""
        if self.session is not None and not self.session.broken:
            return "shm"
        return "tcp" if self.tcp is not None else "down"

    # -- connecting -------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Is the target up? Connects at its first use, within the deadline; later only the background thread does."""
        if self.session is not None and not self.session.broken:
            return True
        if self.tcp is not None:
            return True
        if self.tried:
            return False
        with self._lock:
            if not self.tried:
                try:
                    self._connect()
                finally:
                    # Only now: whoever comes while the first one connects waits for it instead of missing.
                    self.tried = True
        return self.path != "down"

    def _connect(self) -> None:
        router = self._router
        wanted = router.path
        if wanted in ("auto", "shm"):
            if not ONE_SIDED:
                self.why = "this processor's memory order is not proven for one-sided reads"
            elif not os.path.exists(self.info.uds):
                self.why = f"{self.info.uds} is not on this host"
            else:
                try:
                    self._connect_shm()
                    return
                except Refused as exc:
                    self.why = str(exc)
                except (TransportError, SegmentError) as exc:
                    self.why = str(exc)
                    if self.reader is not None:
                        # A worker restarting on its arena: it comes back, and reads go on meanwhile.
                        self._failed(self.why)
                        return
        if wanted in ("auto", "tcp"):
            if wanted == "tcp":
                self.why = "path=tcp was asked for"
            try:
                tcp = TcpPath(self.info.host, self.info.port, router.namespace, router.deadline_s, router.token)
                tcp.connect()
            except TransportError as exc:
                self._failed(str(exc))
                return
            self.tcp = tcp
            self._pause_s = BACKOFF_S[0]
            return
        self._failed(self.why)

    def _connect_shm(self) -> None:
        session = WorkerSession(
            self.info.uds, self._router.namespace, self._router.deadline_s, ring=self._router.ring
        )
        # The reader first: with a session the target counts as ready, and gets look for a reader then.
        self.reader = session.reader
        self.session = session
        self.why = ""
        self._pause_s = BACKOFF_S[0]
        self._beat = (-1, 0.0)

    def _failed(self, reason: str) -> None:
        """Down: operations fail at once until the background thread got through."""
        self._retry_at = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(BACKOFF_S[1], self._pause_s * 2)
        if reason != self.why or self.path == "down":
            self.why = reason
        log.info("%s/%d is down: %s", self.info.node, self.info.worker, reason)

    def lost(self, reason: str) -> None:
        """An exchange failed: close what broke."""
        with self._lock:
            session = self.session
            if session is not None and session.broken:
                self.session = None
                session.close(clean=False)
                self._router.outages += 1
                self._failed(reason)

    def tcp_lost(self, path: TcpPath, reason: str) -> None:
        """The TCP path failed."""
        with self._lock:
            if self.tcp is path:
                self.tcp = None
                path.close()
                self._router.outages += 1
                self._failed(reason)

    # -- background -------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Upkeep, every tick."""
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
        if self.tried and self.path == "down" and now >= self._retry_at and not self.retired:
            with self._lock:
                if self.path == "down":
                    self._connect()

    def _watch_heartbeat(self, reader: ArenaReader, now: float) -> None:
        beat = reader.heartbeat
        if beat != self._beat[0]:
            self._beat = (beat, now)
        gone = reader.state in (State.CLOSED, State.SUSPENDED)
        if gone or (self.session is None and now - self._beat[1] > STALE_S):
            log.info("%s has gone", reader.name)
            with self._lock:
                if self.reader is reader:
                    self.reader = None
                    session, self.session = self.session, None
                    if session is not None:
                        session.close(clean=False)
            self._router.refresh()

    def close(self, *, clean: bool = True) -> None:
        """Close everything. Operations under way in other threads come out as misses."""
        self.retired = True
        with self._lock:
            session, self.session = self.session, None
            self.reader = None
            tcp, self.tcp = self.tcp, None
            self.why = "closed"
            self.tried = True
        if session is not None:
            session.close(clean=clean)
        if tcp is not None:
            tcp.close()

    def abandon(self) -> None:
        """After a fork, in the child: close the sockets' copies, touch no memory."""
        if self.session is not None:
            with contextlib.suppress(OSError):
                self.session.channel.sock.close()
        if self.tcp is not None:
            for channel in self.tcp._idle:
                with contextlib.suppress(OSError):
                    channel.sock.close()


class Router:
    """Shard map, targets and the background thread.

    Raises TransportError when no manager can be reached at the start.
    """

    def __init__(
        self, managers: Sequence[tuple[str, int]], *, namespace: str, path: str, deadline_s: float, token: str = "",
        ring: bool = True, map_timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        self.managers = list(managers)
        self.namespace = namespace
        self.path = path
        self.deadline_s = deadline_s
        self.token = token
        self.ring = ring
        self.outages = 0
        self.epoch = 0
        self.cluster = 0
        #: Owner of each shard; None where nobody is.
        self.route: list[Target | None] = [None] * SHARD_COUNT
        #: The target of all shards where there is but one: batches need no grouping then.
        self.sole: Target | None = None
        self.targets: dict[tuple[str, int, int], Target] = {}
        self.manager: Channel | None = None
        self.manager_why = ""
        self._manager_at = 0
        self._manager_retry = 0.0
        self._refresh = False
        self._wake = threading.Event()
        self._closed = False
        self._map_lock = threading.Lock()
        self._connect_manager(map_timeout_s)
        arguments = (weakref.ref(self), self._wake)
        self._thread = threading.Thread(target=_tend, args=arguments, name="simm-client", daemon=True)
        self._thread.start()

    # -- map ----------------------------------------------------------------------------------------

    def _connect_manager(self, timeout_s: float) -> None:
        """Try all managers for up to ``timeout_s``; the map comes with the connection. Raises TransportError."""
        until = time.monotonic() + timeout_s
        why = []
        while True:
            for _ in self.managers:
                host, port = self.managers[self._manager_at % len(self.managers)]
                try:
                    channel = Channel.tcp(host, port, self.deadline_s, self._on_push)
                    try:
                        if self.token:
                            hello = M.Hello(M.PROTOCOL_MIN, M.PROTOCOL_MAX, M.Role.CLIENT, 0, 0, "", self.token, [])
                            channel.call(hello)
                        self._apply(channel.call(M.MapGet(0, 1)))
                    except TransportError:
                        channel.close()
                        raise
                except TransportError as exc:
                    self._manager_at += 1
                    why.append(f"{host}:{port}: {exc}")
                    continue
                self.manager = channel
                self.manager_why = ""
                return
            if time.monotonic() + 0.1 > until:
                break
            time.sleep(0.1)
        reasons = "; ".join(dict.fromkeys(why))
        raise TransportError(
            f"no manager answers ({reasons}): start one with `python -m simm.manager`, "
            "or name it by manager= or SIMM_MANAGER"
        )

    def _on_push(self, msg: Any) -> None:
        if isinstance(msg, M.MapReply):
            self._apply(msg)

    def _apply(self, msg: Any) -> None:
        """Take over a shard map, keeping the targets that stay."""
        if not isinstance(msg, M.MapReply) or len(msg.owners) != 2 * SHARD_COUNT:
            raise TransportError("the manager answered with something that is no shard map")
        with self._map_lock:
            if msg.epoch < self.epoch and msg.cluster == self.cluster:
                return
            known = self.targets
            targets: dict[tuple[str, int, int], Target] = {}
            by_position: list[Target] = []
            for info in msg.workers:
                key = (info.node, info.worker, info.instance)
                target = known.get(key)
                if target is None or (target.info.host, target.info.port) != (info.host, info.port):
                    target = Target(info, self)
                target.info = info
                targets[key] = target
                by_position.append(target)
            owners = array("H")
            owners.frombytes(msg.owners)
            try:
                self.route[:] = [by_position[owner] if owner != NO_OWNER else None for owner in owners]
            except IndexError:
                raise TransportError("the manager's shard map names a worker that it does not list") from None
            self.targets = targets
            self.sole = by_position[0] if len(by_position) == 1 and NO_OWNER not in owners else None
            self.epoch = msg.epoch
            self.cluster = msg.cluster
            gone = [target for key, target in known.items() if targets.get(key) is not target]
        for target in gone:
            target.close(clean=False)

    def refresh(self) -> None:
        """Ask for a new map soon: someone said that ours is old."""
        self._refresh = True
        self._wake.set()

    def wake(self) -> None:
        """Run the background thread now."""
        self._wake.set()

    # -- background -----------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One round of upkeep; False when closed."""
        if self._closed:
            return False
        now = time.monotonic()
        self._tend_manager(now)
        for target in list(self.targets.values()):
            target.tend(now)
        return not self._closed

    def _tend_manager(self, now: float) -> None:
        manager = self.manager
        try:
            if manager is None:
                if now >= self._manager_retry:
                    self._manager_retry = now + random.uniform(0.3, 0.7)
                    self._connect_manager(0.0)
                return
            manager.poll_pushes()
            if self._refresh:
                self._refresh = False
                self._apply(manager.call(M.MapGet(self.epoch, 1)))
        except (TransportError, RemoteProtocolError) as exc:
            self.manager_why = str(exc)
            if manager is not None:
                manager.close()
                self.manager = None

    # -- end --------------------------------------------------------------------------------------------

    def close(self, *, clean: bool = True) -> None:
        """Stop the thread and close every connection. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=self.deadline_s + 1.0)
        for target in list(self.targets.values()):
            target.close(clean=clean)
        if self.manager is not None:
            self.manager.close()
            self.manager = None

    def abandon(self) -> None:
        """After a fork, in the child."""
        self._closed = True
        for target in self.targets.values():
            target.abandon()
        if self.manager is not None:
            with contextlib.suppress(OSError):
                self.manager.sock.close()


def _tend(reference: weakref.ref[Router], wake: threading.Event) -> None:
    """Body of the background thread; ends with its router."""
    while True:
        wake.wait(TICK_S)
        wake.clear()
        router = reference()
        if router is None:
            return
        try:
            if not router.tick():
                return
        except Exception:
            log.exception("background work failed")
        del router
