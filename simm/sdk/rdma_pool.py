"""The client's RDMA path to one worker: a pool of connections, the location cache, and a check that the worker lives.

``sdk/path.py`` explains the states. Any failure of a connection takes the path down: idle connections are closed, and
operations use TCP. A call that still has a connection of the time before may see it fail after the path has come back;
that says nothing of the connections since, so the path stays up (``RdmaConnection.era``). A connection counts once each
of its queue pairs has READ the arena's header, so a broken rail drops out, and returns with a later connection. It
costs about 0.1 MiB of pinned memory per queue pair.

What can go wrong
-----------------
* *A value is replaced, or its entry is old, or its shard has moved*: ``rdma/remote_arena.py``.
* *A deadline passes while a device writes into the caller's buffer.* The queue pairs are closed before the call
  returns, which is the fence (``sdk/rdma_connection.py``).
* *A connection breaks during a batch*, also by Ctrl-C. Keys confirmed by then are done; all others go to TCP. Nothing
  tries to find out what could still be used.
* *A PUT's commit was sent and not answered.* Its outcome is unknown: UNAVAILABLE. TCP does not repeat it, as it might
  overwrite a later value. TCP puts what was not committed.
* *A staging block is reused in flight.* Blocks return to the pool when all transfers are done or all queue pairs are
  closed.
* *A fork.* The child touches nothing of its parent: they share device descriptors, and closing here would destroy
  there.
* *The worker is gone but its arena is not.* READs need no worker. So about ten times per second an idle connection
  READs the header's STATE and HEARTBEAT. The rules are those of ``sdk/worker_path.py`` for a mapped arena.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

from ..errors import DeadlineError, PeerError, TransportError
from ..ipc.steps import Bounded, PolledFor, Steps
from ..rdma.api import Absence, FabricError, Rail
from ..rdma.registration import close_dropped
from ..rdma.remote_arena import Locations, RemoteArena
from ..rdma.staging import StagingPool
from .path import ClientContext, Heartbeat, Path, PathState, arena_closed
from .rdma_connection import RdmaConnection

log = logging.getLogger("simm.client")

CONNECTIONS_MAX: Final = 4
LOCATIONS_MAX: Final = 1 << 15
#: Pauses between attempts to reconnect, seconds.
PAUSES_S: Final = (0.1, 5.0)
#: Seconds that one maintenance waits for the header, and after which the path counts as broken.
HEARTBEAT_POLL_S: Final = 0.02
HEARTBEAT_TIMEOUT_S: Final = 1.0


class Hold:
    """What a caller holds of a path: it makes this before, so that it finds there what an interruption made it hold."""

    __slots__ = ("connection", "counted")

    def __init__(self, connection: RdmaConnection | None = None) -> None:
        #: None while there is none, or it is being made, and when the path has it back.
        self.connection = connection
        #: Whether one of the path's CONNECTIONS_MAX is the caller's; changes together with the path's own count.
        self.counted = connection is not None


class RdmaPath(Path):
    """One worker by RDMA. Any thread may call it; :meth:`maintain` from one.

    Args:
        context: the client's.
        address: (host, port) of the worker's endpoint.
        cluster: id in the map that led here; 0 for any.
    """

    thread_name = "simm-rdma-connect"
    _idle: list[RdmaConnection]

    def __init__(self, context: ClientContext, address: tuple[str, int], *, cluster: int = 0, server: str = "") -> None:
        super().__init__(context, PAUSES_S)
        self.server = server
        self.address = address
        self.deadline_s = context.options.deadline_s
        self.cluster = cluster
        self.staging = context.rdma.staging if context.rdma.staging is not None else StagingPool()
        self.locations = Locations(LOCATIONS_MAX)
        self.arena: RemoteArena | None = None
        #: This process's rails that its connections have used.
        self.rails: tuple[Rail, ...] = ()
        #: Guarded by the lock, as all that follows.
        self._connections = 0
        self._turn = 0
        #: How often the path has gone down.
        self._era = 0
        #: Pairs of rails that did not work; see RdmaConnection.
        self._failed: dict[tuple[str, int], float] = {}
        self._heartbeat = Heartbeat()
        self._stale = False
        #: The connection that maintenance uses, and whether maintenance waits for one.
        self._watched: RdmaConnection | None = None
        self._asking = False

    def __repr__(self) -> str:
        host, port = self.address
        return f"<RdmaPath {host}:{port} {self.down_reason or 'up'} connections={self._connections}>"

    # -- connections ------------------------------------------------------------------------------------

    def connect(self, until: float) -> bool:
        """Make the first connection by ``until`` (monotonic seconds); return whether the path is up. Never raises."""
        connection: RdmaConnection | None = None
        failure: str | None = "internal error, see the log"
        try:
            connection = self._open(until)
            self._prove(connection, until)
            failure = None
        except PeerError as exc:
            failure = str(exc)
        except Exception:
            log.exception("connecting to %s:%d by RDMA", *self.address)
        if failure is not None and connection is not None:
            self._end(connection, failure)
            connection = None
        with self._lock:
            self.connecting = False
            if failure is not None:
                self._set_down(failure)
            elif connection is not None and self.state is not PathState.CLOSED:
                self._adopt(connection)
                self._connections += 1
                self._idle.append(connection)
                self._set_up()
                connection = None
            self._changed.notify_all()
        if connection is not None:
            self._end(connection)
        return self.state is PathState.UP

    def _attempt(self) -> None:
        self.connect(time.monotonic() + self.deadline_s)

    def _open(self, until: float) -> RdmaConnection:
        source = self._context.rdma.fabric
        fabric = Absence("this client has no RDMA") if source is None else source()
        if isinstance(fabric, Absence):
            with self._lock:
                self._set_down(str(fabric), PathState.ABSENT)
            raise FabricError(str(fabric))
        with self._lock:
            turn, self._turn = self._turn, self._turn + 1
            known = self.arena
        return RdmaConnection(
            fabric, self.address, self._context.options, until, turn=turn, known=known, failed=self._failed,
            cluster=self.cluster, server=self.server,
        )  # fmt: skip

    def _adopt(self, connection: RdmaConnection) -> None:
        """Make connections to one endpoint share the arena and its cached entries. The lock is held."""
        connection.era = self._era
        self.rails += tuple(link.rail for link in connection.links if link.rail not in self.rails)
        if connection.arena is not self.arena:
            if self.arena is not None and connection.arena.key == self.arena.key:
                connection.arena = self.arena
                for link in connection.links:
                    region_map = self.arena.region_maps[link.region_map.rail]
                    assert region_map is not None
                    link.region_map = region_map
            else:
                self.arena = connection.arena
                # Another one: calls that are still at the old arena go on filling its own.
                self.locations = Locations(LOCATIONS_MAX)
        connection.locations = self.locations

    def _prove(self, connection: RdmaConnection, until: float) -> None:
        """Raise FabricError unless the worker is alive. If its heartbeat stood still before, it must move."""
        before = self._heartbeat.value
        while True:
            connection.request_heartbeat()
            assert connection.watching is not None
            connection.links[0].qp.wait(connection.watching[0], until)
            seen = connection.read_heartbeat()
            if seen is None:
                raise FabricError("a READ that was waited for is not done")
            state, heartbeat = seen
            if arena_closed(state):
                raise FabricError("the worker's arena is closed")
            if not self._stale or heartbeat != before:
                break
            if time.monotonic() + 0.05 > until:
                raise FabricError("the worker's heartbeat stands still, and no manager is followed")
            time.sleep(0.05)
        self._stale = False
        self._heartbeat.restart(self._context.clock(), heartbeat)

    def acquire(self, until: float, hold: Hold | None = None) -> RdmaConnection:
        """Return a connection for this thread: idle, new, or the next that is returned. Raises TransportError."""
        hold = Hold() if hold is None else hold
        if not self._changed.wait_for(lambda: self._reserve(hold), until, late=False):
            raise DeadlineError("deadline passed while all connections were in use")
        return self._held(hold, until)

    def acquired(self, work: Bounded, hold: Hold) -> Steps[RdmaConnection]:
        """Do :meth:`acquire` in steps, for a thread that has connections of other paths meanwhile.

        If it waited by itself, others that want those connections could have the one that it waits for. ``work`` has
        the time limit.
        """
        while True:
            with self._lock:
                found = self._reserve(hold)
            if found:
                return self._held(hold, work.until)
            if not (yield PolledFor(lambda: bool(self._idle) or self._connections < CONNECTIONS_MAX, work)):
                return self.acquire(work.until, hold)

    def _reserve(self, hold: Hold) -> bool:
        """Let the caller hold an idle connection, or room for a new one; return False if there is neither.

        The lock is held. Raises TransportError.
        """
        if self.down_reason is not None:
            raise TransportError(self.down_reason)
        # There is no call from here on: a signal's handler could raise after one, with half of it done.
        if self._idle:
            hold.connection = self._idle[-1]
            hold.counted = True
            del self._idle[-1]
            return True
        if self._connections < CONNECTIONS_MAX:
            self._connections += 1
            hold.counted = True
            return True
        return False

    def _held(self, hold: Hold, until: float) -> RdmaConnection:
        """Return the connection that is held, made now if it is new. Raises TransportError, and none is held then."""
        if hold.connection is not None:
            return hold.connection
        try:
            hold.connection = connection = self._open(until)
        except BaseException as exc:
            alone = self._uncount(hold)
            if not isinstance(exc, PeerError):
                raise
            if alone:  # nothing says that the endpoint is there
                self.drop(str(exc))
            raise TransportError(str(exc)) from exc
        with self._lock:
            if self.state is PathState.UP:
                self._adopt(connection)
                return connection
            reason = self.down_reason or "closed"
        self.lose(hold, reason)
        raise TransportError(reason)

    def _uncount(self, hold: Hold) -> bool:
        """Give up the room of a connection; return whether the path has no other. Twice is harmless."""
        with self._lock:
            if hold.counted:
                self._connections -= 1
                hold.counted = False
            self._changed.notify()
            return not self._connections

    def release(self, connection: RdmaConnection) -> None:
        """Take a connection back that has nothing in flight on it."""
        self.give_back(Hold(connection))

    def give_back(self, hold: Hold) -> None:
        """Take back what is held. Nothing is in flight on it. Twice is harmless."""
        connection = hold.connection
        if connection is None:
            self._uncount(hold)
            return
        with self._lock:
            whole = hold.counted and not connection.broken and connection.arena is self.arena
            if whole and self.down_reason is None:
                if self._asking and self._watched is None:
                    self._asking = False
                    self._watched = connection
                else:
                    self._idle += (connection,)
                hold.connection = None  # another call may have it from now on
                hold.counted = False
                self._changed.notify()
                return
        try:
            self._end(connection)
        except BaseException:
            if not connection.links:  # else it had not begun: whoever holds it does this again
                self._uncount(hold)
            raise
        self._uncount(hold)

    def lost(self, connection: RdmaConnection, reason: str) -> None:
        """Close a connection after a failure. When this returns, it touches no local memory any more.

        Raises FabricError if a queue pair cannot be destroyed.
        """
        self.lose(Hold(connection), reason)

    def lose(self, hold: Hold, reason: str) -> None:
        """Do :meth:`lost` with what is held. Twice is harmless, and ends what an interruption has left."""
        connection = hold.connection
        if connection is None:
            self._uncount(hold)
            return
        try:
            connection.close(reason)
        except FabricError:
            self.drop(reason, connection.era)
            self._uncount(hold)
            raise
        except BaseException:
            if not connection.links:  # else it had not begun: whoever holds it does this again
                self.drop(reason, connection.era)
                self._uncount(hold)
            raise
        self.drop(reason, connection.era)
        self._uncount(hold)

    def drop(self, reason: str, era: int = -1) -> None:
        """Take the path down and close its idle connections; with ``era`` only if it has not gone down since."""
        with self._lock:
            if era not in (-1, self._era):
                return
            left = self._connections - len(self._idle)
            self._leaving, self._idle, self._connections = self._leaving + self._idle, [], left  # see _leave_idle()
            news = self.state is PathState.UP
            if news:
                self._era += 1
                self._set_down(reason)
            self._changed.notify_all()
        if news:
            log.info("RDMA to %s:%d is down: %s", *self.address, reason)
        self._end_left(reason)

    # -- background -------------------------------------------------------------------------------

    def maintain(self, now: float) -> None:
        """Read the worker's heartbeat, and handle what the endpoint has pushed.

        Waits HEARTBEAT_POLL_S at most, plus one exchange if the endpoint has recalled grants.
        """
        close_dropped()
        self._end_left()  # what an interrupt has spared
        with self._lock:
            connection, self._watched = self._watched, None
            if connection is None:
                if self.down_reason is not None:
                    return
                if not self._idle:
                    self._asking = True  # the next that comes back is for the next maintenance
                    return
                self._asking = False
                connection = self._idle.pop(0)
        try:
            done = self._poll(connection, now)
        except PeerError as exc:
            self.lost(connection, str(exc))
            return
        except BaseException:
            self.lost(connection, "interrupted")
            raise
        if not done:
            with self._lock:
                if self.down_reason is None:  # else nobody would close it any more
                    self._watched = connection
                    return
        self.release(connection)

    def _poll(self, connection: RdmaConnection, now: float) -> bool:
        """Return whether the heartbeat was read; drop the path if the worker is gone. Raises TransportError."""
        if connection.watching is None:
            connection.maintain()
            connection.request_heartbeat()
        until = time.monotonic() + HEARTBEAT_POLL_S
        seen = connection.read_heartbeat()
        while seen is None and time.monotonic() < until:
            time.sleep(0.001)
            seen = connection.read_heartbeat()
        if seen is None:
            assert connection.watching is not None
            if time.monotonic() - connection.watching[1] > HEARTBEAT_TIMEOUT_S:
                raise FabricError("the server's memory does not answer")
            return False
        state, heartbeat = seen
        self._heartbeat.seen(heartbeat, now)
        if arena_closed(state):
            self.drop("the worker's arena is closed", connection.era)
            self._context.refresh()
        elif self._heartbeat.stale(now) and not self._context.manager_connected():
            self._stale = True
            self.drop("the worker's heartbeat stands still, and no manager is followed", connection.era)
        return True

    # -- end --------------------------------------------------------------------------------------

    def _leave_idle(self) -> None:
        idle = [*self._idle] if self._watched is None else [*self._idle, self._watched]
        left = self._connections - len(idle)
        # In one, see _reserve().
        self._leaving, self._idle, self._watched, self._connections = self._leaving + idle, [], None, left

    def _in_use(self) -> bool:
        return self._connections > 0 or super()._in_use()

    def _end(self, connection: RdmaConnection, reason: str = "closed") -> None:
        """Close a connection that no call uses. close_dropped() tries a queue pair again that cannot be destroyed."""
        with contextlib.suppress(FabricError):
            connection.close(reason)
