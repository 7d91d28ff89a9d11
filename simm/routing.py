"""From a digest to the worker that owns it.

:class:`Router` holds the newest shard map as :class:`Places`, a :class:`~simm.target.Target` for each worker in it, the
thread that follows the manager (``subscription.py``) and the one that does all that must not cost an operation:
it reconnects what broke, hands back what was recalled, notices servers that have gone. :class:`Routes` is what
operations hold: it makes a new router in the child of a fork.

Which map holds
---------------
Epochs of one cluster never go back: a map with an older epoch than ours is ignored, whoever sends it, so a manager
that was stopped and has lost its place to another cannot mislead us. A map of another cluster id is taken over
whatever its epoch: the manager's state was lost and everything has been built anew. Only not while it gives no
shard to anyone: such a manager has just come up with nothing, and in a moment the servers, which are all there,
tell it what they have; without an owner every call would fail until then.

An operation that a server refused with WRONG_OWNER has used an old map, or the server has: it asks for a newer one
and is tried again, at once where the map has changed meanwhile, else after some milliseconds or the change,
whichever comes first (:class:`Again`). A shard's owner and its previous owner are always read from one map
together: the owner of an old map and the previous owner of a new one are the same worker, frozen, and its values
superseded.

A target that a new map does not name stays open for a while (``LINGER_S``): operations that chose it just now end
properly, or are told WRONG_OWNER and go elsewhere.

Forks
-----
A child's copies of the sockets are closed, its maps are not there (``MADV_DONTFORK``), and all locks
are made anew; the first operation in the child starts a router of its own.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from . import messages as M
from . import registry
from .bounce import BouncePool
from .constants import NO_OWNER, SHARD_COUNT
from .errors import RemoteProtocolError, TransportError, UsageError
from .hashing import SHARD_MASK
from .shardmap import ShardMap
from .subscription import Subscription
from .target import TICK_S, Reach, Target

log = logging.getLogger("simm.client")

#: A client that is made waits so long for a manager to come up.
MAP_TIMEOUT_S: Final = 5.0
#: Pauses of an operation that is tried again, unless a new map comes earlier.
AGAIN_S: Final = (0.003, 0.05)
#: Connections tried at the same time in the background.
_TRIES_MAX: Final = 8


class Places:
    """One map, with the targets of its workers. Immutable."""

    __slots__ = ("by_position", "map", "moving")

    def __init__(self, shard_map: ShardMap | None, by_position: Sequence[Target]) -> None:
        self.map = shard_map
        self.by_position = by_position
        self.moving: Mapping[int, int] = {} if shard_map is None else shard_map.previous

    def owner(self, shard: int) -> Target | None:
        """Who has the shard."""
        at = NO_OWNER if self.map is None else self.map.owners[shard]
        return None if at == NO_OWNER else self.by_position[at]

    def previous(self, shard: int) -> Target | None:
        """Who had it before and may have what its owner lacks; None when it is not moving."""
        at = self.moving.get(shard)
        return None if at is None else self.by_position[at]

    def since(self, shard: int) -> int:
        """The epoch in which it got its owner; 0 if the map does not say."""
        return 0 if self.map is None else self.map.since[shard]


class Router:
    """Shard map, targets and the background threads.

    Raises TransportError when no manager can be reached at the start.
    """

    def __init__(
        self, managers: Sequence[tuple[str, int]], *, namespace: str, path: str, deadline_s: float, token: str = "",
        ring: bool = True, map_timeout_s: float = MAP_TIMEOUT_S, rdma_devices: str = "",
    ) -> None:  # fmt: skip
        self._rails = registry.acquire(rdma_devices)
        self._bounce = BouncePool()
        self.reach = Reach(
            namespace, path, deadline_s, token, ring, fabric=self._rails.get, bounce=self._bounce
        )
        self.deadline_s = deadline_s
        self.epoch = 0
        self.cluster = 0
        #: Owner of each shard; None where nobody is.
        self.route: list[Target | None] = [None] * SHARD_COUNT
        self.places = Places(None, ())
        #: The target of all shards where there is but one: batches need no grouping then.
        self.sole: Target | None = None
        self.targets: dict[tuple[str, int, int], Target] = {}
        self._lingering: list[tuple[float, Target]] = []
        self._wake = threading.Event()
        self._closed = False
        #: Guards the change to another map, and tells of it.
        self._map_changed = threading.Condition(threading.Lock())
        mine = weakref.ref(self)

        def on_map(msg: M.MapReply) -> bool:
            router = mine()
            return router is not None and router.apply(msg)

        self.subscription = Subscription(managers, deadline_s, token, on_map)
        self._ended = weakref.finalize(self, self.subscription.close)
        self._ended.atexit = False
        self.reach.refresh = self.subscription.refresh
        subscription = self.subscription
        self.reach.fresh = lambda: subscription.linked
        try:
            self.subscription.first(map_timeout_s)
        except BaseException:
            self.subscription.close()
            registry.release(self._rails)
            raise
        self.subscription.start()
        self._thread = threading.Thread(target=_tend, args=(mine, self._wake), name="simm-client", daemon=True)
        self._thread.start()

    @property
    def manager_why(self) -> str:
        """Why no manager is followed; empty while one is."""
        return self.subscription.why

    # -- map ----------------------------------------------------------------------------------------

    def apply(self, msg: M.MapReply) -> bool:
        """Take over a map, keeping the targets that stay; whether it was news. Raises RemoteProtocolError."""
        if msg.cluster == self.cluster and msg.epoch <= self.epoch:
            return False
        shard_map = ShardMap(msg)
        # Decoded here, so that no operation finds it bad.
        if shard_map.previous and len(shard_map.since) != SHARD_COUNT:
            raise RemoteProtocolError("the map's epochs are not one for each shard")
        if self.epoch and msg.cluster != self.cluster and all(owner == NO_OWNER for owner in shard_map.owners):
            return False
        with self._map_changed:
            if self._closed or (msg.cluster == self.cluster and msg.epoch <= self.epoch):
                return False
            known = self.targets
            targets: dict[tuple[str, int, int], Target] = {}
            by_position: list[Target] = []
            for info in msg.workers:
                key = (info.node, info.worker, info.instance)
                target = known.get(key)
                if target is None or (target.info.host, target.info.port) != (info.host, info.port):
                    target = Target(info, self.reach)
                target.info = info
                targets[key] = target
                by_position.append(target)
            places = Places(shard_map, by_position)
            # Who finds the new owner in `route` must find it in `places` too, so that comes first.
            self.places = places
            self.route[:] = [by_position[owner] if owner != NO_OWNER else None for owner in shard_map.owners]
            self.targets = targets
            self.sole = by_position[0] if len(by_position) == 1 and NO_OWNER not in shard_map.owners else None
            self.epoch = msg.epoch
            self.cluster = msg.cluster
            until = time.monotonic() + self.deadline_s
            self._lingering += [(until, old) for key, old in known.items() if targets.get(key) is not old]
            self._map_changed.notify_all()
        log.debug("map of epoch %d, %d workers, %d shards moving", msg.epoch, len(by_position), len(places.moving))
        return True

    def await_map(self, newer_than_epoch: int, until: float) -> bool:
        """Wait for another map than that of ``newer_than_epoch``, until ``until`` (monotonic seconds); is it there?"""
        with self._map_changed:
            return self._map_changed.wait_for(
                lambda: self.epoch != newer_than_epoch or self._closed, max(0.0, until - time.monotonic())
            )

    def refresh(self) -> None:
        """Ask for a new map soon: someone said that ours is old."""
        self.subscription.refresh()

    def wake(self) -> None:
        """Run the background thread now."""
        self._wake.set()

    # -- background -----------------------------------------------------------------------------------

    def tick(self, now: float | None = None) -> bool:
        """One round of upkeep; False when closed."""
        if self._closed:
            return False
        now = time.monotonic() if now is None else now
        targets = list(self.targets.values())
        for target in targets:
            target.tend(now)
        wanting = [target for target in targets if target.wants_connection(now)]
        if wanting:
            random.shuffle(wanting)
            free = _TRIES_MAX - sum(target.connecting for target in targets)
            for target in wanting[: max(0, free)]:
                target.connect_soon()
        if self._lingering:
            with self._map_changed:
                over = [target for until, target in self._lingering if now >= until]
                self._lingering = [(until, target) for until, target in self._lingering if now < until]
            for target in over:
                target.close(clean=False)
        return not self._closed

    # -- end --------------------------------------------------------------------------------------------

    def close(self, *, clean: bool = True) -> None:
        """Stop the threads and close every connection. Twice is harmless."""
        if self._closed:
            return
        with self._map_changed:
            self._closed = True
            self._map_changed.notify_all()
        self._wake.set()
        self.subscription.close()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=self.deadline_s + 1.0)
        for target in list(self.targets.values()):
            target.close(clean=clean)
        for _, target in self._lingering:
            target.close(clean=False)
        self._close_rails()
        self.subscription.join(1.0)

    def _close_rails(self) -> None:
        """The fabric goes with its last user, and after all lanes: those in use by other threads come back first."""
        if self.reach.rdma_paths.gone(time.monotonic() + self.deadline_s):
            self._bounce.close()
            registry.release(self._rails)
        else:
            log.warning("RDMA devices stay open: calls of other threads are still using them")

    def abandon(self) -> None:
        """After a fork, in the child."""
        self._closed = True
        self._ended.detach()
        for target in self.targets.values():
            target.abandon()
        for _, target in self._lingering:
            target.abandon()
        self.subscription.abandon()


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


class Routes:
    """The way to each digest's owner, through forks, until closed.

    ``connect(map_timeout_s)`` makes a router, or raises TransportError.
    """

    def __init__(self, connect: Callable[[float], Router]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self.closed = False
        self.router: Router | None = connect(MAP_TIMEOUT_S)
        #: The router's, which it changes in place; empty without one.
        self.route: list[Target | None] = self.router.route

    def target(self, digest: bytes) -> Target | None:
        """The owner of a digest; None when nobody is. Raises UsageError once closed."""
        try:
            return self.route[(digest[0] | digest[1] << 8) & SHARD_MASK]
        except IndexError:
            route = self.restart()
            return route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else None

    def restart(self) -> list[Target | None]:
        """After a fork: a router of this process. Raises UsageError once closed; [] while no manager answers."""
        with self._lock:
            if self.closed:
                raise UsageError("this client is closed")
            if self.router is None and time.monotonic() >= self._retry_at:
                try:
                    self.router = self._connect(0.0)
                    self.route = self.router.route
                except TransportError as exc:
                    self._retry_at = time.monotonic() + 0.5
                    log.warning("%s", exc)
            return self.route

    def group(
        self, digests: Sequence[bytes], among: Sequence[int] | None = None
    ) -> Iterable[tuple[Target | None, Sequence[int]]]:
        """Positions by target, of all digests or of those ``among``.

        One group without looking at each key where all shards have one owner. Raises UsageError once closed.
        """
        positions = range(len(digests)) if among is None else among
        route = self.route or self.restart()
        if not route:
            return [(None, positions)]
        router = self.router
        if router is not None and router.sole is not None:
            return [(router.sole, positions)] if positions else []
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

    def places(self) -> Places:
        """Owners and previous owners by one map."""
        router = self.router
        return _NOWHERE if router is None else router.places

    @property
    def peopled(self) -> bool:
        """Are there servers, and would a map reach us that gives them the shards which nobody has?"""
        router = self.router
        return router is not None and bool(router.targets) and router.subscription.linked

    def fresh(self) -> bool:
        """Would a new map reach us?"""
        router = self.router
        return router is not None and router.subscription.linked

    def refresh(self) -> None:
        """Ask for a new map soon."""
        router = self.router
        if router is not None:
            router.refresh()

    def wake(self) -> None:
        """Something broke: run the background now."""
        router = self.router
        if router is not None:
            router.wake()

    def close(self) -> bool:
        """Close all connections; False when that has been done before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            router, self.router = self.router, None
            self.route = []
        if router is not None:
            router.close()
        return True

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's is ours."""
        if self.router is not None:
            self.router.abandon()
            _GRAVEYARD.append(self.router)
        self.router = None
        self.route = []
        self._retry_at = 0.0
        self._lock = threading.Lock()


_NOWHERE: Final = Places(None, ())
#: In a forked child: what must never be finalised there, even if the client is dropped. Its maps are not there, and
#: where they were somebody else's may be by now.
_GRAVEYARD: Final[list[Router]] = []


class Again:
    """Between two tries of an operation that met WRONG_OWNER: a newer map, or a jittered pause that doubles.

    ``until``: when the operation must be over, monotonic seconds.
    """

    __slots__ = ("_pause_s", "_routes", "until")

    def __init__(self, routes: Routes, until: float) -> None:
        self._routes = routes
        self._pause_s = AGAIN_S[0]
        self.until = until

    def wait(self, digests: Iterable[tuple[bytes, Target | None]]) -> bool:
        """Wait until another try is worth it; False when the time is up.

        ``digests`` were refused, by the target beside each. Where the map names another one by now, there is nothing
        to wait for.
        """
        routes = self._routes
        router = routes.router
        if router is None or routes.closed or time.monotonic() >= self.until:
            return False
        epoch = router.epoch
        if any(routes.target(digest) is not target for digest, target in digests):
            return True
        router.refresh()
        pause = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(AGAIN_S[1], self._pause_s * 2)
        router.await_map(epoch, min(self.until, time.monotonic() + pause))
        return time.monotonic() < self.until
