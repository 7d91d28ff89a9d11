"""Simulate a client: it reads by the real ``cluster/lookup.py`` and restates how it writes and follows the manager.

Restated are ``sdk/writes.py``, ``sdk/routing.py`` and ``sdk/manager_link.py``: when a mutation is tried again, when the
client asks for the map, the circuit breaker of each server. An operation is a generator that yields what it waits for.
Which epoch its namespace has the client knows by the real ``sdk/ops/epochs.py``.
Some clients run on a server's host: they read the arena directly, even while the server's processes are stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ..arena.hashing import Hasher, shard_of
from ..cluster.lookup import HOPS, Unresolved
from ..cluster.shard_map import ShardMap
from ..config.client_options import ClientOptions
from ..constants import DEFAULT_NAMESPACE, NO_OWNER
from ..sdk.ops.epochs import ClientEpoch
from ..wire.epoch_messages import SUBSCRIBE_EPOCHS, SUBSCRIBE_MAPS, Epochs
from ..wire.messages import MapGet, MapReply, Status, WorkerInfo
from .arena import Arena
from .manager import decoded
from .net import Process
from .worker import Worker, World

AGAIN_S: Final = (0.003, 0.05)
RETRY_S: Final = (0.1, 2.0)
ASK_S: Final = 0.02
#: A connection on which nothing gets through is given up after so long (keepalive, TCP_USER_TIMEOUT, PING).
SILENT_S: Final = 6.0
#: Shortest and longest pause between two probes of a server that failed.
PROBE_S: Final = (0.2, 2.0)
_SUBSCRIBE: Final = SUBSCRIBE_MAPS | SUBSCRIBE_EPOCHS


class Place(NamedTuple):
    """Where the bytes of a value are: what a session holds, or what a read of ranges has found."""

    arena: Arena
    chunk: int
    version: int
    previous: bool
    #: The number of the pin that keeps it, or 0; the life of the stream that has the pin, 0 on the same host.
    pin: int
    life: int


class Ask(NamedTuple):
    """An exchange with a worker or its stream; its result is the answer, or None."""

    info: WorkerInfo
    kind: str
    digest: bytes
    version: int = 0
    #: All digests of a question about several, which are of one shard.
    digests: tuple[bytes, ...] = ()
    namespace: str = DEFAULT_NAMESPACE
    #: What is read in a chunk: see ``sim/pins.py``.
    place: Place | None = None


class Pause(NamedTuple):
    """Wait for a map newer than ``epoch``, at most ``seconds``."""

    seconds: float
    epoch: int


#: Yields exchanges, pauses, and functions that are called with what goes on with the result.
Steps = Generator[Any, Any, Any]

#: The namespace that advances. All other keys are of the default one.
NAMESPACE: Final = "advancing"


class Found(NamedTuple):
    """The result of a look at a server: a version or 0, and the shard's word."""

    version: int
    word: int


class OwnerTable:
    """One map in the form that ``cluster/lookup.py`` reads."""

    def __init__(self, shard_map: ShardMap | None) -> None:
        self.map = shard_map

    def owner(self, shard: int) -> WorkerInfo | None:
        """Return the shard's owner, or None without one."""
        found = self.map
        return None if found is None or found.owners[shard] == NO_OWNER else found.workers[found.owners[shard]]

    def previous(self, shard: int) -> WorkerInfo | None:
        """Return the previous owner, or None if the shard is not moving."""
        found = self.map
        at = None if found is None else found.previous.get(shard)
        return None if found is None or at is None else found.workers[at]

    def since(self, shard: int) -> int:
        """Return the epoch in which the owner got the shard."""
        return 0 if self.map is None else self.map.since[shard]


class Client:
    """One engine's client."""

    def __init__(self, world: World, number: int, host: str) -> None:
        self.world = world
        self.net = world.net
        self.number = number
        self.name = f"client{number}"
        self.host = host
        self.process = Process(self.net, host, self.name)
        self.process.on_push = self._on_map
        self.process.on_epochs = self._on_epochs
        #: The digests of the namespace's keys, as this client knows them.
        self.hasher = Hasher(NAMESPACE)
        self.namespace = ClientEpoch(ClientOptions(namespace=NAMESPACE), self._rehash)
        self.map: ShardMap | None = None
        #: Number of the connection to the manager, or 0.
        self.linked = 0
        self._retry_s = RETRY_S[0]
        self._asked_at = -1.0
        #: Instances that failed -> the pause between two probes.
        self.down: dict[int, float] = {}
        self._awaiting: list[tuple[int, Any]] = []
        self.counts = dict.fromkeys(("gets", "hits", "misses", "puts", "failed", "late"), 0)
        self.slowest_s = 0.0

    def start(self) -> None:
        self.process.start()
        self._connect()

    def _rehash(self, hasher: Hasher) -> None:
        self.hasher = hasher

    @property
    def epoch(self) -> int:
        return 0 if self.map is None else self.map.epoch

    # -- following the manager ------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.linked:
            return
        self.linked = self.world.manager.connect(self.process, self._broken)
        if self.linked:
            self._retry_s = RETRY_S[0]
            self._ask()
            self._ping()
        else:
            self._lost()

    def _broken(self) -> None:
        if self.linked:
            self._lost()

    def _reset(self, link: int) -> None:
        if self.linked == link:
            self._lost()

    def _lost(self) -> None:
        self.linked = 0
        self.process.later(self._retry_s * self.net.random.uniform(0.5, 1.0), self._connect)
        self._retry_s = min(RETRY_S[1], self._retry_s * 2)

    def _ping(self) -> None:
        """Check that the manager answers, with half of ``SILENT_S`` for the answer."""
        if not self.linked:
            return
        manager, link = self.world.manager, self.linked
        state = {"answered": False}

        def pong(epoch: int) -> None:
            state["answered"] = True
            # TCP sends a lost push again, sooner or later.
            if self.linked == link and epoch > self.epoch:
                self._ask()

        def ping() -> None:
            if link in manager.links:
                self.net.send(manager.process, self.process, pong, manager.last_pushed)
            else:  # another life of the manager: its kernel knows no such connection
                self.net.send(manager.process, self.process, self._reset, link)

        def look() -> None:
            if self.linked != link:
                return
            if state["answered"]:
                self.process.later(self.net.random.uniform(2.0, 4.0), self._ping)
            else:
                self.net.send(self.process, manager.process, manager.closed, link)
                self._lost()

        self.net.send(self.process, manager.process, ping)
        self.process.later(SILENT_S / 2, look)

    def _ask(self) -> None:
        manager = self.world.manager
        self._asked_at = self.net.now
        msg = MapGet(self.epoch, _SUBSCRIBE)
        self.net.send(self.process, manager.process, manager.request, self.linked, msg, self._on_map)

    def refresh(self) -> None:
        """Ask for a newer map, unless one was asked for just now."""
        if self.linked and self.net.now - self._asked_at >= ASK_S:
            self._ask()

    def _on_epochs(self, link: int, msg: Epochs) -> bool:
        if link == self.linked:
            self.namespace.take(msg)
        return link == self.linked

    def _on_map(self, msg: Any, _status: int) -> None:
        if not isinstance(msg, MapReply):
            return
        self.world.oracle.told(msg)
        known = self.map
        shard_map = decoded(msg)
        if known is not None and known.cluster == shard_map.cluster and shard_map.epoch < known.epoch:
            return
        another = known is not None and known.cluster != shard_map.cluster
        if another and all(owner == NO_OWNER for owner in shard_map.owners):
            return  # it has just come up with nothing
        self.world.oracle.observed(self.name, shard_map.cluster, shard_map.epoch)
        self.namespace.of_cluster(shard_map.cluster)
        self.map = shard_map
        awaiting, self._awaiting = self._awaiting, []
        for epoch, wake in awaiting:
            if shard_map.epoch != epoch:
                wake(None)
            else:
                self._awaiting.append((epoch, wake))

    # -- operations -----------------------------------------------------------------------------------

    def run(self, steps: Steps, done: Any, deadline_s: float = 0.0) -> None:
        """Run an operation with a deadline; call ``done(result, seconds)``, with None after the deadline."""
        deadline = deadline_s or self.world.options.deadline_s
        began = self.net.now
        state = {"turn": 0, "open": True}

        def end(result: Any) -> None:
            if state["open"]:
                state["open"] = False
                steps.close()
                seconds = self.net.now - began
                self.slowest_s = max(self.slowest_s, seconds)
                done(result, seconds)

        def resume(turn: int, value: Any) -> None:
            if not state["open"] or turn != state["turn"]:
                return
            state["turn"] += 1
            turn = state["turn"]
            try:
                wish = steps.send(value)
            except StopIteration as stop:
                end(stop.value)
                return
            wake = partial(resume, turn)
            if isinstance(wish, Pause):
                self._awaiting.append((wish.epoch, wake))
                self.process.later(wish.seconds, wake, None)
            elif callable(wish):
                wish(wake)
            else:
                self._exchange(wish, wake)

        self.process.later(deadline, end, None)
        resume(0, None)

    def _exchange(self, ask: Ask, wake: Any) -> None:
        """Make an exchange. A dead process refuses at once; a paused or unreachable one never answers."""
        server = self.world.servers.get(ask.info.node)
        if server is None or server.instance != ask.info.instance:
            self.process.later(self.net.latency_s, wake, None)
            return
        worker = server.workers[ask.info.worker]
        if ask.kind in ("look", "look previous"):
            if server.host == self.host and not worker.arena.closed:
                wake(_look(worker.arena, ask.digest, ask.kind == "look previous"))
                return
            target = server.stream
        elif ask.kind in ("find", "piece", "pin", "unpin") and server.host != self.host:
            target = server.stream
        elif ask.kind == "find" and not worker.arena.closed:
            wake(_find(worker, ask, here=True))
            return
        else:
            target = worker.process
        if not target.running:
            if self.net.reaches(self.host, server.host) and self.net.reaches(server.host, self.host):
                self.process.later(2 * self.net.latency_s, wake, None)
            return

        def there() -> None:
            self.net.send(target, self.process, wake, _act(worker, ask))

        self.net.send(self.process, target, there, once=True)

    def _failed(self, info: WorkerInfo) -> None:
        """Note a failure: all exchanges fail at once until the server answers a probe in the background."""
        if info.instance not in self.down:
            self._probe_later(info, PROBE_S[0])

    def _probe_later(self, info: WorkerInfo, pause: float) -> None:
        self.down[info.instance] = pause
        self.process.later(pause * self.net.random.uniform(0.5, 1.0), self._probe, info, pause)

    def _probe(self, info: WorkerInfo, pause: float) -> None:
        server = self.world.servers.get(info.node)
        if server is None or server.instance != info.instance:
            return  # the next map does not name it
        state = {"open": True}

        def answered(value: Any) -> None:
            if state["open"]:
                state["open"] = False
                if value is None:
                    self._probe_later(info, min(PROBE_S[1], 2 * pause))
                else:
                    self.down.pop(info.instance, None)

        self._exchange(Ask(info, "ping", bytes(16)), answered)
        self.process.later(self.world.options.deadline_s, answered, None)

    def ask_at(
        self, info: WorkerInfo, kind: str, digest: bytes, version: int = 0, digests: tuple[bytes, ...] = (),
        namespace: str = DEFAULT_NAMESPACE, place: Place | None = None,
    ) -> Steps:
        """Make an exchange, unless the server failed and has not answered a probe since."""
        if info.instance in self.down:
            return None
        try:
            answer = yield Ask(info, kind, digest, version, digests, namespace, place)
        except GeneratorExit:
            self._failed(info)  # the deadline has passed
            raise
        if answer is None:
            self._failed(info)
        return answer

    def owner(self, shard: int) -> WorkerInfo | None:
        """Return the shard's owner by the newest map, or None without one."""
        return OwnerTable(self.map).owner(shard)

    def _look(self, info: WorkerInfo, digest: bytes, previous: bool) -> Steps:
        return (yield from self.ask_at(info, "look previous" if previous else "look", digest))

    def get(self, digest: bytes, look: Callable[[WorkerInfo, bytes, bool], Steps] | None = None) -> Steps:
        """Read: return (version or 0, the server's name or empty). ``look``: does a look at one server."""
        shard, look = shard_of(digest), look or self._look
        owner = self.owner(shard)
        for hops in range(HOPS, -1, -1):
            if owner is None:
                break
            found = yield from look(owner, digest, False)
            if found is None:
                break
            if found.version:
                return found.version, owner.node
            unresolved = Unresolved()
            unresolved.by_word(0, found.word)
            if unresolved.ask_owner:
                answer = yield from self.ask_at(owner, "resolve", digest)
                if answer is None:
                    break
                unresolved.answered(unresolved.ask_owner[0], *answer)
            table = OwnerTable(self.map)
            named = table.previous(shard)
            if unresolved.not_owner and "ignores_wrong_owner" in self.world.plants and named is not None:
                return (yield from self._get_previous(named, digest, look))
            following = unresolved.next_reads(
                owner, table, lambda _position: shard, hops=hops, connected=bool(self.linked)
            )
            if following.refresh:
                self.refresh()
            for previous in following.at_previous:
                return (yield from self._get_previous(previous, digest, look))
            owner = next(iter(following.start_over), None)
        return 0, ""

    def _get_previous(self, previous: WorkerInfo, digest: bytes, look: Callable[..., Steps]) -> Steps:
        found = yield from look(previous, digest, True)
        return (found.version, previous.node) if found is not None and found.version else (0, "")

    def exists(self, digests: Sequence[bytes]) -> Steps:
        """Return for each whether it is stored. All are of one shard."""
        owner = self.owner(shard_of(digests[0]))
        answers = None
        if owner is not None:
            answers = yield from self.ask_at(owner, "exists", digests[0], 0, tuple(digests))
        if answers is None:
            return [False] * len(digests)
        previous = OwnerTable(self.map).previous(shard_of(digests[0]))
        found = []
        for digest, status in zip(digests, answers):
            there = status == Status.OK
            if status == Status.PREVIOUS and previous is not None:
                there = bool((yield from self._get_previous(previous, digest, self._look))[0])
            found.append(there)
        return found

    def mutate(
        self, kind: str, digest: bytes, version: int, digests: tuple[bytes, ...] = (),
        namespace: str = DEFAULT_NAMESPACE,
    ) -> Steps:  # fmt: skip
        """Put, delete, keep for ``version`` seconds, or make a group of ``digests``.

        Return the status. WRONG_OWNER: nothing was done; None: the outcome is unknown.
        """
        shard = shard_of(digest)
        until = self.net.now + self.world.options.deadline_s
        pause = AGAIN_S[0]
        while True:
            owner = self.owner(shard)
            if owner is None:
                return Status.WRONG_OWNER
            if owner.instance in self.down:
                return Status.UNAVAILABLE
            status = yield from self.ask_at(owner, kind, digest, version, digests, namespace)
            if status is None:
                return None
            if status == Status.OLD_EPOCH:
                self.refresh()
            if status != Status.WRONG_OWNER:
                return status
            if "ignores_wrong_owner" in self.world.plants:
                return Status.OK
            if self.net.now + 2 * AGAIN_S[1] >= until:
                return Status.WRONG_OWNER
            if self.owner(shard) == owner:
                self.refresh()
                yield Pause(pause * self.net.random.uniform(0.5, 1.0), self.epoch)
                pause = min(AGAIN_S[1], pause * 2)


def _look(arena: Arena, digest: bytes, previous: bool) -> Found:
    version = arena.hit(digest, frozen_too=previous)
    return Found(version, arena.words[shard_of(digest)])


def _find(worker: Worker, ask: Ask, *, here: bool) -> tuple[Found, Place | None]:
    """Find a value, and pin it if that is asked for; ``here``: for a client of this host, else by the stream."""
    arena, previous = worker.arena, bool(ask.version)
    found = _look(arena, ask.digest, previous)
    if not found.version:
        return found, None
    life = 0 if here else worker.server.stream.life
    pin = worker.pin(ask.digest, life) if ask.kind != "find" and worker.process.running else 0
    return found, Place(arena, arena.room.at[ask.digest], found.version, previous, pin, life)


def piece(world: World, digest: bytes, place: Place) -> tuple[tuple[bytes, int], bool]:
    """Return what is in a chunk now, and whether all that was read there until now is of the place's version."""
    arena = place.arena
    whole = bool(place.pin) or "no_verdict" in world.plants or (
        arena.hit(digest, frozen_too=place.previous) == place.version and arena.room.at.get(digest) == place.chunk
    )  # fmt: skip
    return arena.room.content[place.chunk], whole


def _at_place(worker: Worker, ask: Ask, place: Place) -> Any:
    """Carry out a request about a place. Those of another life of the stream are unknown."""
    if place.life and place.life != worker.server.stream.life:
        return (b"", 0), False
    if ask.kind == "unpin":
        place.arena.room.unpin(place.pin)
        return Status.OK
    return piece(worker.server.world, ask.digest, place)


def _act(worker: Worker, ask: Ask) -> Any:
    """Carry out a request at the server."""
    if ask.kind in ("find", "pin", "pin here"):
        return _find(worker, ask, here=ask.kind == "pin here")
    if ask.place is not None:
        return _at_place(worker, ask, ask.place)
    if ask.kind.startswith("look"):
        return _look(worker.arena, ask.digest, ask.kind == "look previous")
    if ask.kind == "resolve":
        return worker.resolve(ask.digest)
    if ask.kind == "exists":
        return worker.exists(ask.digests)
    if ask.kind == "group":
        return worker.group(ask.digests)
    if ask.kind == "ping":
        return Status.OK
    if ask.kind == "put":
        return worker.put(ask.digest, ask.version, ask.namespace)
    return {"delete": worker.delete, "keep": worker.keep}[ask.kind](ask.digest, ask.version)
