"""One worker as a client reaches it: by shared memory, by RDMA, by TCP, or not at all for now.

``sdk/path.py`` explains states, attempts and backoff. A :class:`Target` is UP with a shm session or a TCP path. The
first operation on a new target waits for its connection, a deadline at most, and other operations wait with it. An
attempt tries shared memory, then TCP.

Reading from a worker that does not answer
------------------------------------------
Reads over shm need the arena only, not the worker, so they go on while the session is down. The values are valid while
no other worker accepts mutations of these shards, and the map tells that:

* *The worker is dead or stopped, its data server is not.* The next worker takes over the same arena, or the worker
  keeps its shards. Reads go on. If the manager gives the shards to others, the map drops this target.
* *The data server is dead.* The kernel refuses connections to its socket. The client drops the arena once the heartbeat
  has stood still for ``STALE_S``. So its keys are misses before the manager has declared the server dead.
* *The client is cut off from the manager too*, or the manager is down. A map that gives the shards to others would not
  reach this client. So without a manager and without a session, the client drops an arena whose heartbeat has stood
  still for ``STALE_S``. A session that answers, or a heartbeat that moves, proves that the worker lives: a manager that
  is down for hours costs nothing.

RDMA to a worker on another host goes up and down independently of TCP (``sdk/rdma_pool.py``). TCP carries what RDMA
leaves over, and all keys while RDMA is down. If the options allow ``rdma`` and not ``tcp``, the connection carries no
values, only what a miss means and deletes; a target whose RDMA is down then counts as down.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..arena.reader import ONE_SIDED, ArenaReader
from ..errors import PeerError, RemoteProtocolError, SegmentError, TransportError
from ..ipc.session import NotTrusted, WorkerSession
from ..net.allowance import allowed, at_most, free_within, tries_within
from ..net.channel import Refused
from ..wire.messages import PathBit, Status, WorkerInfo
from .path import ClientContext, Heartbeat, Path, PathState, arena_closed

if TYPE_CHECKING:
    from .rdma_pool import RdmaPath
    from .tcp import TcpPath

log = logging.getLogger("simm.client")

#: Period of the client's background thread, seconds.
TICK_S: Final = 0.1
#: A target that is reached by TCP although its worker is on this host is tried by shm again after this long, seconds.
UPGRADE_S: Final = (5.0, 10.0)


class Target(Path):
    """One worker. Any thread may call it; :meth:`maintain` only one.

    Args:
        info: the worker's, as the map has it.
        context: the client's.
        cluster: id in that map. A server of this name may belong to another cluster by now.
    """

    session: WorkerSession | None = None

    def __init__(self, info: WorkerInfo, context: ClientContext, cluster: int = 0) -> None:
        super().__init__(context)
        self.info = info
        self.cluster = cluster
        self.key = (info.node, info.worker, info.instance)
        #: Set while reads may go to the arena. Never closed, only dropped: another thread may be copying from it, and
        #: its reference keeps the mapping alive until then.
        self.reader: ArenaReader | None = None
        self.session = None
        self.tcp: TcpPath | None = None
        #: Next to TCP if the server offers it, up or down.
        self.rdma: RdmaPath | None = None
        #: Whether values may go by TCP.
        self.bulk = context.options.allows("tcp")
        #: Why shm is not in use, while TCP is; why there is no RDMA path.
        self._no_shm = self._no_rdma = ""
        #: Whether no process listens on the worker's socket.
        self._no_listener = False
        #: Whether it was logged that the worker is another user's.
        self._warned = False
        self._upgrade_at = float("inf")
        #: When the present outage began, monotonic seconds; None if there is none.
        self._out_since: float | None = None
        self._heartbeat = Heartbeat()
        #: Closes what is no longer in use, until it has: an interrupt may come in between.
        self._left: list[Callable[[], bool]] = []

    def __repr__(self) -> str:
        return f"<Target {self.info.node}/{self.info.worker} {self.path}>"

    @property
    def path(self) -> str:
        """The path in use: ``shm``, ``rdma``, ``tcp`` or ``down``."""
        tcp = self.tcp  # before the session, which is there before it takes the place of TCP
        if self._has_session():
            return "shm"
        if tcp is None:
            return "down"
        rdma = self.rdma
        if rdma is not None and rdma.down_reason is None:
            return "rdma"
        return "tcp" if self.bulk else "down"

    @property
    def reason(self) -> str:
        """Why the path in use is not a better one; empty for shm."""
        if self.tcp is None:
            return self.down_reason or ""
        rdma = self.rdma
        no_rdma = self._no_rdma if rdma is None else rdma.down_reason
        return "; ".join(filter(None, (self._no_shm, no_rdma and f"RDMA: {no_rdma}")))

    @property
    def summary(self) -> str:
        """The worker, the path in use, and why it is not a better one, for the log."""
        if self.state is PathState.NEW:
            return f"{self.info.node}/{self.info.worker} not used yet"
        reason = self.reason
        return f"{self.info.node}/{self.info.worker} {self.path}{reason and f' ({reason})'}"

    @property
    def settled(self) -> bool:
        """Whether no path is being tried for the first time."""
        rdma = self.rdma
        return self.state is not PathState.NEW and (
            rdma is None or rdma.state is not PathState.NEW or not rdma.connecting
        )

    @property
    def fresh(self) -> bool:
        """Whether no attempt to connect has ended yet, so that :meth:`ready` waits for the first one."""
        return self.state is PathState.NEW

    # -- connecting -------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether operations can be carried out. Waits for the first attempt only, a deadline at most.

        A signal's handler may wait for its own thread, which is starting the attempt, or waits for it with the lock:
        its operation misses after a deadline.
        """
        if self.state is not PathState.NEW:
            return self.path != "down"
        until = time.monotonic() + allowed(self._context.options.deadline_s)
        (got,) = tries_within(self._lock, until - time.monotonic())
        try:
            if got and self.state is PathState.NEW and not self.connecting:
                self._start_locked()
        finally:
            if got:
                self._lock.release()
        if got and not self._changed.wait_for(lambda: self.state is not PathState.NEW, until):
            with self._lock:
                if self.state is PathState.NEW:  # the attempt goes on, and no operation waits for it
                    self._out("deadline passed while connecting")
                    self._changed.notify_all()
        return self.path != "down"

    def arena(self) -> ArenaReader | None:
        """Return the arena to read from, if there is one. Waits as :meth:`ready`."""
        reader = self.reader
        return self.reader if reader is None and self.ready() else reader

    def _has_session(self) -> bool:
        """Return whether there is a session that lives."""
        session = self.session
        return session is not None and not session.broken

    def _needed(self) -> bool:
        return not self._has_session()

    def _attempt(self) -> None:
        session: WorkerSession | None = None
        tcp: TcpPath | None = None
        reason = "internal error, see the log"
        upgrade = False
        rdma: RdmaPath | None = None
        try:
            session, reason, upgrade = self._connect_shm()
            # A worker whose arena is mapped is restarting: it comes back, and reads go on meanwhile.
            if session is None and self.reader is None and (self.bulk or self._context.options.allows("rdma")):
                known = self.tcp
                if known is None:
                    tcp, reason = self._connect_tcp(reason)
                    known = tcp
                if known is not None and self.rdma is None:
                    rdma = self._connect_rdma(known, ask=tcp is None)
        except Exception:
            log.exception("connecting to %s/%d", self.info.node, self.info.worker)
        finally:
            self._connected(session, tcp, reason, upgrade, rdma)

    def _connect_shm(self) -> tuple[WorkerSession | None, str, bool]:
        """Return a session; or None, the reason, and whether to try again although TCP works."""
        options = self._context.options
        if not options.allows("shm"):
            return None, f"path={options.path} was asked for", False
        if not ONE_SIDED:
            return None, "this processor's memory order is not proven for one-sided reads", False
        uds = self.info.uds
        try:
            os.stat(uds)
        except PermissionError:
            return None, f"uid {os.geteuid()} has no permission for {uds} (see --group of the data server)", False
        except (OSError, ValueError):
            self._no_listener = True
            return None, f"{uds} is not on this host", False
        try:
            session = WorkerSession(
                uds, options.namespace, options.deadline_s, ring=options.ring, cluster=self.cluster,
                trusted=options.server_uids,
            )  # fmt: skip
        except Refused as exc:  # room, descriptors and processes come and go
            return None, str(exc), exc.status in (Status.NO_SPACE, Status.UNAVAILABLE)
        except NotTrusted as exc:
            if not self._warned:
                self._warned = True
                log.warning("%s/%d is not reached by shared memory: %s", *self.key[:2], exc)
            return None, str(exc), False
        except (TransportError, SegmentError, RemoteProtocolError) as exc:
            self._no_listener = isinstance(exc.__cause__, (ConnectionRefusedError, FileNotFoundError))
            return None, str(exc), True
        self._no_listener = False
        if session.welcome.instance not in (0, self.info.instance):
            # One of this name that is cut off from the manager, or has just started: its values are not the map's.
            session.close()
            return None, f"{uds} is of another data server of this name", True
        return session, "", False

    def _connect_tcp(self, no_shm: str) -> tuple[TcpPath | None, str]:
        """Return a path and why there is no session; or None and why there is no path."""
        from .tcp import TcpPath  # a client whose workers are all on its host has no need of it

        tcp = TcpPath(
            self._context, self.info.host, self.info.port, cluster=self.cluster, server=self.info.server
        )
        try:
            tcp.connect()
        except PeerError as exc:
            return None, str(exc)
        return tcp, no_shm

    def _connect_rdma(self, tcp: TcpPath, ask: bool) -> RdmaPath | None:
        """Return an RDMA path if the server offers one; ``ask`` it again first.

        The path connects in the background. If values may not go by TCP, this waits for it.
        """
        context = self._context
        if not context.options.allows("rdma"):
            self._no_rdma = ""
            return None
        if ask:
            with contextlib.suppress(PeerError):
                tcp.greet()
        welcome = tcp.welcome
        if welcome is None or not welcome.paths & PathBit.RDMA or not welcome.rdma_port:
            self._no_rdma = "the server offers none"
            return None
        if not context.rdma.open():
            self._no_rdma = "the client has been closed"
            return None
        # Most clients never meet a worker that offers RDMA. The first three spare operations the wait for them.
        from . import rdma_get, rdma_put  # noqa: F401
        from .ops import rdma_ranges  # noqa: F401
        from .rdma_pool import RdmaPath

        rdma = RdmaPath(
            context, (self.info.host, welcome.rdma_port), cluster=self.cluster, server=self.info.server
        )
        context.rdma.add(rdma)
        if not self.bulk:
            rdma.connect(time.monotonic() + context.options.deadline_s)
        return rdma

    def _connected(
        self, session: WorkerSession | None, tcp: TcpPath | None, reason: str, upgrade: bool, rdma: RdmaPath | None
    ) -> None:
        """Take over what an attempt has made, and close what it replaces."""
        now = self._context.clock()
        with contextlib.ExitStack() as unlocked, self._lock:
            self.connecting = False
            unused: list[WorkerSession | Path | None]
            if self.state is PathState.CLOSED or (session is not None and self._has_session()):
                unused = [session, tcp, rdma]  # operations may be using the session that there is
            elif session is not None:
                # The reader first: with a session the target counts as ready, and reads then use the reader.
                if self._context.epoch is not None:
                    self._context.epoch.watch(session.reader)
                session.reader.node = self.info.numa_node
                self.reader = session.reader
                self._context.tallies.add(weakref.ref(session.reader), session.counts)
                self._heartbeat.restart(now)
                if self.session is not None:  # it broke, and no operation has met it since
                    unlocked.callback(self.session.close, clean=False)
                self.session = session
                unused = [self.tcp, self.rdma or rdma]
                self.tcp = self.rdma = None
            else:
                self.tcp = tcp or self.tcp
                unused = [rdma]
                if rdma is not None and self.tcp is not None:
                    self.rdma, unused = rdma, []
                    if rdma.state is PathState.NEW:
                        rdma.connect_soon()
            for each in unused:
                if each is not None:
                    unlocked.callback(each.close)
            if self.state is not PathState.CLOSED:
                # Or the server offers RDMA by then.
                again = upgrade or (self.tcp is not None and self.rdma is None and bool(self._no_rdma))
                self._upgrade_at = now + random.uniform(*UPGRADE_S) if again else float("inf")
                if not self._has_session() and self.tcp is None:
                    self._out(reason)
                else:
                    self._no_shm = reason
                    self._set_up()
                    self._look_at_path()
            self._changed.notify_all()

    def lost(self, reason: str) -> None:
        """Close the session if it is broken. Operations fail at once until the background has reconnected.

        In a signal's handler that has interrupted one who has the lock, this does nothing, after a deadline at most.
        """
        if not self._free():
            return
        try:
            with self._lock:
                if self.session is None or not self.session.broken:
                    return
                self._leave_session(clean=False)
                self._lose(reason)
        finally:
            self._close_left()

    def tcp_lost(self, path: TcpPath, reason: str) -> None:
        """Close a TCP path whose exchange failed, and the RDMA path with it. In a handler as :meth:`lost`."""
        if not self._free():
            return
        try:
            with self._lock:
                if self.tcp is not path:
                    return
                self._leave_paths()
                self._lose(reason)
        finally:
            self._close_left()

    def _free(self) -> bool:
        return free_within(self._lock, self._context.options.deadline_s)  # whatever the call has left: to tell of it

    def _leave_session(self, *, clean: bool) -> None:
        """Have :meth:`_close_left` close the session. The lock is held."""
        if self.session is not None:
            self._left.append(functools.partial(self.session.close, clean=clean))
            self.session = None

    def _leave_paths(self) -> None:
        """Have :meth:`_close_left` close the paths to another host. The lock is held."""
        self._left += [path.close for path in (self.tcp, self.rdma) if path is not None]
        self.tcp = self.rdma = None

    def _close_left(self) -> None:
        """Close what was left. What an interrupt spares is closed by the next call; each may be closed twice."""
        if self._left:
            with contextlib.ExitStack() as all_of_them:
                for close in self._left[:]:
                    all_of_them.callback(self._close_one, close)

    def _close_one(self, close: Callable[[], bool]) -> None:
        if not close():  # another thread is at it, which may be interrupted
            return
        with contextlib.suppress(ValueError):  # another thread has done the same
            self._left.remove(close)

    def _lose(self, reason: str) -> None:
        self._context.outages += 1
        self._out(reason)

    def _out(self, reason: str) -> None:
        """Go down. Warn once for each outage, however many operations and attempts meet it."""
        if self.state is PathState.CLOSED:
            return
        self._set_down(reason)
        self._begin_outage(reason)

    def _begin_outage(self, reason: str) -> None:
        level = logging.WARNING if self._out_since is None else logging.DEBUG
        if self._out_since is None:
            self._out_since = time.monotonic()
        log.log(level, "%s/%d is down, its puts fail and its gets may miss: %s", *self.key[:2], reason)

    def _look_at_path(self) -> None:
        """End the outage of a target that is connected, or begin one while all of its values need RDMA, which is down.

        The lock is held.
        """
        if self.path != "down":
            self._end_outage(f"answers again, by {self.path}")
        elif self._out_since is None:
            self._begin_outage(self.reason)

    def _end_outage(self, how: str) -> None:
        since, self._out_since = self._out_since, None
        if since is not None:
            log.warning("%s/%d %s, after %.1f s", *self.key[:2], how, time.monotonic() - since)

    # -- background -------------------------------------------------------------------------------

    def maintain(self, now: float) -> None:
        """Do periodic work, every ``TICK_S``. Blocks for a deadline at most, and then the session is broken."""
        self._close_left()
        tcp, session = self.tcp, self.session
        if tcp is not None:
            tcp._end_left()
        if session is not None:
            try:
                session.maintain()
            except PeerError as exc:
                self.lost(str(exc))
        self.watch(now)
        self._close_left()
        reader = self.reader
        if reader is not None:
            until = now + TICK_S / 2
            while reader.populate_some() and time.monotonic() < until:
                pass
        rdma = self.rdma
        if rdma is not None:
            if rdma.wants_connection(now):
                rdma.connect_soon()
            else:
                rdma.maintain(now)
        if tcp is not None and not self.bulk:
            with self._lock:
                if self.tcp is tcp:
                    self._look_at_path()

    def wants_connection(self, now: float) -> bool:
        """Return whether it is time for another attempt: to reconnect, or to find a better path."""
        if self.connecting or self.state in (PathState.NEW, PathState.CLOSED):
            return False
        if not self._has_session() and self.tcp is None:
            return self.backoff.due(now)
        return self.session is None and now >= self._upgrade_at

    def watch(self, now: float) -> None:
        """Drop the arena once its worker has closed it or has died. Makes no exchange."""
        reader = self.reader
        if reader is None:
            return
        self._heartbeat.seen(reader.heartbeat, now)
        gone = arena_closed(reader.state)
        if not gone and self.session is None and self._heartbeat.stale(now):
            gone = self._no_listener or not self._context.manager_connected()
        if not gone:
            return
        log.info("%s has gone", reader.name)
        with self._lock:
            if self.reader is reader:
                self.reader = None
                self._leave_session(clean=False)
        self._context.refresh()

    def close(self, *, clean: bool = True) -> bool:
        """Close everything. Operations in flight in other threads end as misses. Returns as :meth:`Path.close`."""
        try:
            with self._lock:
                self._set_closed()
                self.reader = None
                self._leave_paths()
                self._leave_session(clean=clean)
                self._changed.notify_all()
                if not clean:
                    self._end_outage("is no longer in the shard map")
        finally:
            self._close_left()
        return not self._left

    def _after_fork(self) -> None:
        super()._after_fork()
        if self.session is not None:
            with contextlib.suppress(OSError):
                self.session.channel.sock.close()


class Connections:
    """The targets of a router. Its background thread closes them if the router goes without :meth:`Router.close`.

    An arena's grants are its process's until a session returns them, so an engine that drops one client after another
    would come to hold all of them. A finalizer must not do that: it runs wherever the collector does, within locks too.
    """

    __slots__ = ("context", "draining", "targets")

    def __init__(self, context: ClientContext) -> None:
        self.context = context
        self.targets: dict[tuple[str, int, int], Target] = {}
        #: Those that the newest map does not name, and until when they stay open.
        self.draining: list[tuple[float, Target]] = []

    def close(self, patience_s: float, *, clean: bool) -> None:
        """Close every connection, within a deadline, however many workers are stopped.

        ``patience_s``: for calls of other threads that use the RDMA devices.
        """
        until = time.monotonic() + self.context.options.deadline_s

        def end(target: Target, clean: bool) -> None:
            with at_most((until - time.monotonic()) / 2):  # so that something is left for those that answer
                target.close(clean=clean)

        with contextlib.ExitStack() as each:  # from the last to the first, the others too if one is interrupted
            each.callback(self._close_devices, patience_s)
            for _, target in self.draining:
                each.callback(end, target, False)
            for target in self.targets.values():
                each.callback(end, target, clean)

    def _close_devices(self, patience_s: float) -> None:
        close = self.context.rdma.close
        if not close(patience_s):
            log.warning("RDMA devices stay open until the calls of other threads that are still using them have ended")
            with contextlib.suppress(RuntimeError):  # no more threads: they stay open to the process's end
                threading.Thread(target=_close_when_gone, args=(close,), name="simm-rdma-close", daemon=True).start()


def _close_when_gone(close: Callable[[float], bool]) -> None:
    """Body of the thread that waits for calls that are still in flight after their client was closed."""
    while not close(60.0):
        pass
