"""From a digest to the worker that owns it.

:class:`Router` has the newest shard map as a :class:`RouteTable`, and a :class:`~simm.sdk.worker_path.Target` for each
worker in it. One thread follows the manager (``sdk/manager_link.py``). Another does the work that must not delay an
operation: it reconnects, returns recalled grants, and finds servers that have died. :class:`Routes` is what operations
use; it makes a new router in a forked child.

Epochs of one cluster never decrease. The router ignores a map with an older epoch than its own from any sender, so a
manager that was stopped and has lost the lead cannot mislead clients. It accepts a map of another cluster id whatever
its epoch: the manager's state was lost and the cluster has been rebuilt. The exception is a map of another cluster in
which no shard has an owner. Such a manager has just started with no state, and the servers will report to it in a
moment.

A shard's owner and its previous owner are always taken from one map. The owner of an old map and the previous owner of
a new one are the same worker, frozen, with superseded values. A target that a new map does not name stays open for one
deadline, so that operations that chose it just before end properly, or meet WRONG_OWNER and go elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import SHARD_MASK
from ..cluster.shard_map import ShardMap
from ..config.client_options import DEFAULT_DEADLINE_S, ClientOptions
from ..constants import NO_OWNER, SHARD_COUNT
from ..errors import DeadlineError, PeerError, RemoteProtocolError, TransportError, UsageError
from ..host import fork
from ..host.company import COMPANY
from ..host.threads import Waiters, Wake
from ..ipc.patience import Patience
from ..ipc.session import WorkerSession
from ..ipc.steps import Steps
from ..ipc.tally import Tallies
from ..net.allowance import allowed, at_most, free_within, tries_within
from ..wire import messages as M
from .manager_link import Subscription
from .path import ClientContext, ClientRdma, PathState
from .worker_path import TICK_S, Connections, Target

if TYPE_CHECKING:
    from .ops.epochs import ClientEpoch
    from .tcp import TcpPath

log = logging.getLogger("simm.client")

#: How long a new client waits for a manager to come up, seconds.
MAP_TIMEOUT_S: Final = 5.0
#: Pauses of an operation between two attempts, unless a new map comes earlier: the first and the longest, seconds.
RETRY_S: Final = (0.003, 0.05)
#: The line about the cluster waits so long for paths that are still being tried, seconds; it names so many workers.
ANNOUNCE_S: Final = 5.0
_ANNOUNCED_MAX: Final = 32
#: Attempts to connect at the same time in the background.
_ATTEMPTS_MAX: Final = 8


_NOBODY: Final[NDArray[np.uint16]] = np.full(SHARD_COUNT, NO_OWNER, np.uint16)


class RouteTable:
    """One map, with the targets of its workers. Immutable."""

    __slots__ = ("by_position", "map", "moving", "owners")

    def __init__(self, shard_map: ShardMap | None, by_position: Sequence[Target]) -> None:
        self.map = shard_map
        self.by_position = by_position
        self.moving: Mapping[int, int] = {} if shard_map is None else shard_map.previous
        #: The position of each shard's owner, or NO_OWNER.
        self.owners: NDArray[np.uint16] = _NOBODY if shard_map is None else np.array(shard_map.owners, np.uint16)

    def owner(self, shard: int) -> Target | None:
        """Return the shard's owner, or None."""
        at = NO_OWNER if self.map is None else self.map.owners[shard]
        return None if at == NO_OWNER else self.by_position[at]

    def previous(self, shard: int) -> Target | None:
        """Return the owner before, which may have values that the owner lacks; None if the shard is not moving."""
        at = self.moving.get(shard)
        return None if at is None else self.by_position[at]

    def since(self, shard: int) -> int:
        """Return the epoch in which the shard got its owner; 0 if the map does not say."""
        return 0 if self.map is None else self.map.since[shard]


class Router:
    """The shard map, the targets and the background threads.

    Raises TransportError if no manager answers within ``map_timeout_s``, and if the process has no descriptor or
    thread left. None: return at once, without a map; the background thread gets it.
    """

    def __init__(
        self, options: ClientOptions, map_timeout_s: float | None = MAP_TIMEOUT_S, *, tallies: Tallies | None = None,
        epoch: ClientEpoch | None = None, tick: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        managers, rdma = options.managers, ClientRdma(options.rdma_devices)
        self.context = ClientContext(options, rdma=rdma, tallies=tallies or Tallies(), epoch=epoch)
        self.deadline_s = options.deadline_s
        self.epoch = self.cluster = 0
        #: The owner of each shard, or None. Changed in place.
        self.route: list[Target | None] = [None] * SHARD_COUNT
        self.table = RouteTable(None, ())
        #: The target of all shards if there is only one: batches then need no grouping.
        self.sole: Target | None = None
        self.targets: dict[tuple[str, int, int], Target] = {}
        self._connections = Connections(self.context)
        self._wake = Wake()
        #: What else the background thread calls, every ``TICK_S`` at least.
        self._tick = tick
        self._closed = False
        #: Whether :meth:`close` has ended.
        self._over = False
        #: Whether :meth:`maintain` connects to workers that no operation has asked for yet.
        self._ahead = False
        #: When the line about the cluster is logged at the latest, monotonic seconds; None once it has been.
        self._announce_by: float | None = float("inf")
        #: Guards the change to another map, and announces it.
        self._map_lock = threading.Lock()
        self._map_changed = Waiters(self._map_lock)
        mine = weakref.ref(self)

        def on_map(msg: M.MapReply) -> bool:
            router = mine()
            return router is not None and router.apply(msg)

        self.subscription = subscription = Subscription(
            managers, options.deadline_s, options.token, on_map, options.namespace, tls=options.tls,
            trusted=options.server_uids, on_epochs=epoch.take if epoch is not None else None,
        )
        self._ended = weakref.finalize(self, self.subscription.close)
        self._ended.atexit = False
        fork.in_child(self._after_fork)
        self.context.refresh = subscription.refresh
        self.context.manager_connected = lambda: subscription.connected
        try:
            if map_timeout_s is not None:
                self.subscription.connect(map_timeout_s)
            self.subscription.start()
            self._thread = threading.Thread(
                target=_maintain, args=(mine, self._wake, self._connections), name="simm-client", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as exc:
                if self._thread.ident is not None:  # a signal's handler has raised it
                    raise
                raise TransportError(f"cannot run in the background: {exc}") from exc
        except BaseException:
            self.subscription.close()
            raise

    # -- map ----------------------------------------------------------------------------------------

    def apply(self, msg: M.MapReply) -> bool:
        """Take over a map and keep the targets that stay; return whether it was news. Raises RemoteProtocolError."""
        if msg.cluster == self.cluster and msg.epoch <= self.epoch:
            return False
        shard_map = ShardMap(msg)
        # Decoded here, so that no operation meets an invalid map.
        if shard_map.previous and len(shard_map.since) != SHARD_COUNT:
            raise RemoteProtocolError("the map's epochs are not one for each shard")
        if self.epoch and msg.cluster != self.cluster and all(owner == NO_OWNER for owner in shard_map.owners):
            return False
        with self._map_lock:
            if self._closed or (msg.cluster == self.cluster and msg.epoch <= self.epoch):
                return False
            if self.context.epoch is not None:
                self.context.epoch.of_cluster(msg.cluster)
                self.context.epoch.heed(msg.epoch)
            # Sessions and mappings belong to the cluster of the map before.
            known, before = self.targets, self.targets
            if msg.cluster != self.cluster:
                known = {}
            targets: dict[tuple[str, int, int], Target] = {}
            by_position: list[Target] = []
            for info in msg.workers:
                key = (info.node, info.worker, info.instance)
                target = known.get(key)
                if target is None or (target.info.host, target.info.port) != (info.host, info.port):
                    target = Target(info, self.context, msg.cluster)
                target.info = info
                targets[key] = target
                by_position.append(target)
            table = RouteTable(shard_map, by_position)
            # An operation that finds the new owner in `route` must find it in `table` too, so that comes first.
            self.table = table
            self.targets = self._connections.targets = targets  # whoever is in `route` is in these
            self.sole = None  # until `route` says the same
            self.route[:] = [by_position[owner] if owner != NO_OWNER else None for owner in shard_map.owners]
            self.sole = by_position[0] if len(by_position) == 1 and NO_OWNER not in shard_map.owners else None
            self.epoch = msg.epoch
            self.cluster = msg.cluster
            until = time.monotonic() + self.deadline_s
            self._connections.draining += [(until, old) for key, old in before.items() if targets.get(key) is not old]
            self._map_changed.notify_all()
        log.debug("map of epoch %d, %d workers, %d shards moving", msg.epoch, len(by_position), len(table.moving))
        return True

    def await_map(self, epoch: int, until: float) -> bool:
        """Wait for a map of another epoch, until ``until`` (monotonic seconds); return whether it came."""
        if not free_within(self._map_lock, until - time.monotonic()):
            return False
        return self._map_changed.wait_for(lambda: self.epoch != epoch or self._closed, until)

    def wake(self) -> None:
        """Run the background thread now."""
        self._wake.set()

    def connect_ahead(self) -> None:
        """Connect to all workers in the background, before the first operation needs them."""
        self._ahead = True
        self._wake.set()

    # -- background -----------------------------------------------------------------------------------

    def maintain(self, now: float | None = None) -> bool:
        """Do periodic work, every ``TICK_S`` or after :meth:`wake`; return False once closed."""
        if self._closed:
            return False
        now = time.monotonic() if now is None else now
        COMPANY.look()
        targets = list(self.targets.values())
        for target in targets:
            self._do(target, target.watch, now)
        for target in targets:
            if target.session is None:
                self._do(target, target.maintain, now)
        # Silent workers on this host cost one deadline together: sessions begin no exchange then, and break by none.
        with Patience(self.deadline_s) as patience:
            for target in targets:
                if target.session is not None:
                    patience.has_time_for(target)
                    self._do(target, target.maintain, now)
        waiting = [target for target in targets if target.wants_connection(now)]
        if self._ahead and targets:
            new = [target for target in targets if target.state is PathState.NEW]
            waiting += [target for target in new if not target.connecting]
            self._ahead = bool(new)
        self._announce(targets, now)
        if waiting:
            random.shuffle(waiting)
            free = _ATTEMPTS_MAX - sum(target.connecting for target in targets)
            for target in waiting[: max(0, free)]:
                target.connect_soon()
        held = self._connections
        if held.draining:
            with self._map_lock:
                over = [target for until, target in held.draining if now >= until]
                held.draining = [(until, target) for until, target in held.draining if now < until]
            with at_most(self.deadline_s / 2):
                for target in over:
                    target.close(clean=False)
        self.context.rdma.tidy()
        self.context.tallies.release_ended()
        self._tick()
        return not self._closed

    def _do(self, target: Target, work: Callable[[float], None], now: float) -> None:
        """Do a target's periodic work. The other targets have arenas to drop, too, whatever it raises."""
        try:
            work(now)
        except Exception:
            log.exception("maintaining %r", target)

    def _announce(self, targets: Sequence[Target], now: float) -> None:
        """Log once which cluster this is, and by which path each worker is reached."""
        by = self._announce_by
        if by is None or not self.epoch:
            return
        if by == float("inf"):
            self._announce_by = by = now + ANNOUNCE_S
        if now < by and not (targets and all(target.settled for target in targets)):
            return
        self._announce_by = None
        options = self.context.options
        paths = [target.summary for target in targets[:_ANNOUNCED_MAX]]
        if len(targets) > _ANNOUNCED_MAX:
            paths.append(f"and {len(targets) - _ANNOUNCED_MAX} more")
        log.info(
            "cluster %016x at %s, namespace %r (SIMM_NAMESPACE; one for each model), map of epoch %d: %s",
            self.cluster, options.manager, options.namespace, self.epoch, "; ".join(paths) or "no data server",
        )  # fmt: skip

    # -- end --------------------------------------------------------------------------------------------

    def close(self, *, clean: bool = True) -> None:
        """Stop the threads and close every connection. Twice is harmless, and ends what was interrupted before."""
        if self._over:
            return
        try:
            with self._map_lock:
                self._closed = True
                self._map_changed.notify_all()
            self._wake.set()
            self.subscription.close()
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=self.deadline_s + 1.0)
        finally:  # also when interrupted: nobody closes them later
            self._connections.close(self.deadline_s, clean=clean)
        self.subscription.join(1.0)
        self._over = True

    def _after_fork(self) -> None:
        """Close for good, without finalizers: in the child, other objects may be where the parent's mappings were."""
        self._closed = self._over = True
        self._ended.detach()
        fork.keep_forever(self)


def _maintain(reference: weakref.ref[Router], wake: Wake, connections: Connections) -> None:
    """Body of the background thread. It ends with its router."""
    while True:
        wake.wait(TICK_S)
        router = reference()
        if router is None:
            connections.close(0.0, clean=True)
            return
        try:
            if not router.maintain():
                return
        except Exception:
            log.exception("background work failed")
        del router


#: Between two attempts to make a router in a forked child, seconds.
RESTART_S: Final = 0.5


class Routes:
    """The routes to the owners of digests, across forks, until closed.

    ``connect(map_timeout_s)`` makes a router, or raises TransportError. For None, which a ``lazy`` client passes, it
    waits for no manager.
    """

    _deadline_s = DEFAULT_DEADLINE_S
    #: What :meth:`close` has taken out of use, until it is closed.
    _leaving: Router | None = None

    def __init__(
        self, connect: Callable[[float | None], Router], *, lazy: bool = False, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> None:  # fmt: skip
        self._connect = connect
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._warned = False
        self.closed = False
        fork.in_child(self._after_fork)
        self.router: Router | None = connect(None if lazy else MAP_TIMEOUT_S)
        #: The router's list; empty without a router.
        self.route: list[Target | None] = self.router.route

    def target(self, digest: bytes) -> Target | None:
        """Return the owner of a digest, or None. Raises UsageError once closed."""
        try:
            return self.route[(digest[0] | digest[1] << 8) & SHARD_MASK]
        except IndexError:
            route = self.restart()
            return route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else None

    def restart(self) -> list[Target | None]:
        """Make a router after a fork; return its route, [] while there can be none. Raises UsageError once closed.

        It waits for the first round through the managers, half a deadline at most. So managers that do not answer cost
        a call no more than it may take, and no more those of other threads, which wait for the same.

        A call in a signal's handler may wait for its own thread, which makes the router: it misses after a deadline.
        """
        (got,) = tries_within(self._lock, allowed(self._deadline_s))
        try:
            if self.closed:
                raise UsageError("this client is closed")
            if got and self.router is None and time.monotonic() >= self._retry_at:
                try:
                    self.router = router = self._connect(None)
                    try:
                        router.subscription.await_first_round(allowed(router.deadline_s / 2))
                    finally:  # not before, as other threads would not wait for the map
                        self.route = [] if self.closed else router.route  # closed by a signal's handler
                except TransportError as exc:
                    self._retry_at = time.monotonic() + RESTART_S
                    log.log(logging.DEBUG if self._warned else logging.WARNING, "%s", exc)  # once for each outage
                    self._warned = True
                else:
                    self._warned = False
            return self.route
        finally:
            if got:
                self._lock.release()

    def group(
        self, digests: Sequence[bytes], among: Sequence[int] | None = None
    ) -> Collection[tuple[Target | None, Sequence[int]]]:
        """Group positions by target: all, or those in ``among``. Raises UsageError once closed.

        O(1) if all shards have one owner, else O(positions).
        """
        positions = range(len(digests)) if among is None else among
        route = self.route or self.restart()
        if not route:
            return [(None, positions)]
        router = self.router
        sole = None if router is None else router.sole  # read once: a new map may come meanwhile
        if sole is not None:
            return [(sole, positions)] if positions else []
        groups: dict[Target | None, list[int]] = {}
        for position in positions:
            digest = digests[position]
            target = route[(digest[0] | digest[1] << 8) & SHARD_MASK]
            group = groups.get(target)
            if group is None:
                groups[target] = [position]
            else:
                group.append(position)
        return groups.items()

    def table(self) -> RouteTable:
        """Return the owners and previous owners of one map, the newest."""
        return _NO_ROUTES if (router := self.router) is None else router.table

    @property
    def has_servers(self) -> bool:
        """Whether there are servers, and a map that gives them shards without an owner would reach this client."""
        return (router := self.router) is not None and bool(router.targets) and router.subscription.connected

    def check_open(self) -> None:
        """Raise UsageError once closed."""
        if self.closed:
            raise UsageError("this client is closed")

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every shard has an owner that this client reaches. Return False when the time is up.

        All first attempts go on at the same time. None counts as failed because this wait for it is short.
        """
        until = time.monotonic() + timeout_s
        while True:
            if self.router is None:
                with contextlib.suppress(UsageError), at_most(until - time.monotonic()):  # it may be closed
                    self.restart()
            router = self.router
            if router is not None and None not in router.route:
                targets = list(router.targets.values())
                for target in targets:
                    if target.fresh:
                        target.connect_soon()
                if targets and all(each.path != "down" and each.settled for each in targets):
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.02)

    def manager_connected(self) -> bool:
        """Return whether a manager is connected, so that a new map would reach this client."""
        return (router := self.router) is not None and router.subscription.connected

    def refresh(self) -> None:
        """Ask for a new map soon."""
        if (router := self.router) is not None:
            router.subscription.refresh()

    def wake(self) -> None:
        """Run the background thread now, after a failure."""
        if (router := self.router) is not None:
            router.wake()

    def patience(self, began: float | None = None) -> Patience:
        """Return the patience of a call that begins, or has begun (:class:`Patience`)."""
        router = self.router
        return Patience(self._deadline_s if router is None else router.deadline_s, began)

    def all_mapped(self) -> bool:
        """Return whether all arenas are mapped here, and no shard is moving by the newest map. O(workers).

        Reads ask no server then, except for keys of shards that have begun to move since that map.
        """
        router = self.router
        if router is None or router.table.moving:
            return False
        for target in router.targets.values():  # noqa: SIM110 -- a generator takes twice the time
            if target.reader is None:
                return False
        return True

    def session_failed(self, target: Target, session: WorkerSession, exc: Exception) -> None:
        """Note that an exchange failed: the target is down if the session broke."""
        log.info("%r: %s", target, exc)
        if session.broken:
            target.lost(str(exc))
            self.wake()

    def call_tcp(
        self, target: Target, tcp: TcpPath, call: Steps[list[Any]], late: Callable[[], object] | None = None
    ) -> Steps[list[Any]]:
        """Carry out an operation of a TCP path; return [] if it failed, which closes the path.

        ``late`` is called if that was by the deadline.
        """
        try:
            return (yield from call)
        except PeerError as exc:
            if late is not None and isinstance(exc, DeadlineError):
                late()
            target.tcp_lost(tcp, str(exc))
            self.wake()
            return []

    def close(self) -> bool:
        """Close all connections, and what an interrupted call has left; return False if they were closed before."""
        with self._lock:
            first = not self.closed
            self.closed = True
            if self.router is not None:
                self._leaving = self.router
                self.router, self.route = None, []
        leaving = self._leaving
        if leaving is not None:
            leaving.close()
            self._leaving = None
        return first

    def _after_fork(self) -> None:
        """Give up the parent's router; :meth:`restart` makes another."""
        self.router = self._leaving = None
        self.route = []
        self._retry_at = 0.0
        self._warned = False
        self._lock = threading.Lock()


_NO_ROUTES: Final = RouteTable(None, ())


class RetryPolicy:
    """The wait of an operation between two attempts: until a newer map comes, or for a jittered pause that doubles.

    ``until``: when the operation must be over, monotonic seconds.
    """

    __slots__ = ("_pause_s", "_routes", "until")

    def __init__(self, routes: Routes, until: float) -> None:
        self._routes = routes
        self._pause_s = RETRY_S[0]
        self.until = until

    def wait(self, digests: Iterable[tuple[bytes, Target | None]]) -> bool:
        """Wait until another attempt makes sense; return False when the time is up.

        ``digests`` were refused, each by the target next to it. Returns at once if the map names another target by now.
        """
        routes = self._routes
        router = routes.router
        if router is None or routes.closed or time.monotonic() >= self.until:
            return False
        epoch = router.epoch
        if any(routes.target(digest) is not target for digest, target in digests):
            return True
        router.subscription.refresh()
        pause = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(RETRY_S[1], self._pause_s * 2)
        router.await_map(epoch, min(self.until, time.monotonic() + pause))
        return time.monotonic() < self.until
