"""A client: where it looks for a value, where it stores one, what it does when it is told no.

Restated here from ``gets.py``, ``puts.py``, ``routing.py`` and ``subscription.py``: the order of questions, when the
map is asked for, the breaker of each server. An operation is a generator that yields what it waits for, so that it
reads like the code it restates. Some clients live on a server's host: their reads look into the arena themselves,
whatever the server's processes do.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..constants import NO_OWNER
from ..hashing import shard_of
from ..messages import MapGet, MapReply, Status, WorkerInfo
from ..shardmap import ShardMap
from ..shards import EPOCH_MASK, FROZEN, MOVING
from .manager import decoded
from .net import Process
from .server import Arena, Worker

if TYPE_CHECKING:
    from .world import World

HOPS: Final = 3
AGAIN_S: Final = (0.003, 0.05)
RETRY_S: Final = (0.1, 2.0)
ASK_S: Final = 0.02
#: A link on which nothing comes through is noticed after so long (keepalive, TCP_USER_TIMEOUT, PING).
SILENT_S: Final = 6.0
#: A breaker's pauses.
PROBE_S: Final = (0.2, 2.0)


class Ask(NamedTuple):
    """An exchange with a worker or its stream; yields its answer, or None."""

    info: WorkerInfo
    kind: str
    digest: bytes
    version: int = 0


class Pause(NamedTuple):
    """Wait so long, or for a newer map than this."""

    seconds: float
    epoch: int


Steps = Generator[Any, Any, Any]


class Found(NamedTuple):
    """What a look at a server yields: a version, or why there is none, and the shard's word."""

    status: Status
    version: int
    word: int


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
        self.map: ShardMap | None = None
        #: Number of the connection with the manager, or 0.
        self.linked = 0
        self._retry_s = RETRY_S[0]
        self._asked_at = -1.0
        #: Instances whose breaker is open -> the pause between two tries.
        self.down: dict[int, float] = {}
        self._awaiting: list[tuple[int, Any]] = []
        self.counts = dict.fromkeys(("gets", "hits", "misses", "puts", "failed", "late"), 0)
        self.slowest_s = 0.0

    def start(self) -> None:
        self.process.start()
        self._connect()

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
        """Is the manager there? Half the time that it may take, so that a silence is noticed in time."""
        if not self.linked:
            return
        manager, link = self.world.manager, self.linked
        state = {"answered": False}

        def pong(epoch: int) -> None:
            state["answered"] = True
            # What was swallowed on its way here TCP sends again, sooner or later.
            if self.linked == link and epoch > self.epoch:
                self._ask()

        def ping() -> None:
            if link in manager.links:
                self.net.send(manager.process, self.process, pong, manager.told)
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
        self.net.send(self.process, manager.process, manager.request, self.linked, MapGet(self.epoch, 1), self._on_map)

    def refresh(self) -> None:
        """Somebody said that our map is old."""
        if self.linked and self.net.now - self._asked_at >= ASK_S:
            self._ask()

    def _on_map(self, msg: Any, _status: Status) -> None:
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
        self.map = shard_map
        awaiting, self._awaiting = self._awaiting, []
        for epoch, wake in awaiting:
            if shard_map.epoch != epoch:
                wake(None)
            else:
                self._awaiting.append((epoch, wake))

    # -- operations -----------------------------------------------------------------------------------

    def run(self, steps: Steps, done: Any) -> None:
        """An operation, with a deadline; ``done(result, seconds)``; None when the time was up."""
        deadline = self.world.options.deadline_s
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
            wake = _waker(resume, turn)
            if isinstance(wish, Pause):
                self._awaiting.append((wish.epoch, wake))
                self.process.later(wish.seconds, wake, None)
            else:
                self._exchange(wish, wake)

        self.process.later(deadline, end, None)
        resume(0, None)

    def _exchange(self, ask: Ask, wake: Any) -> None:
        """Send; no answer comes from who is dead, paused or cut off. A dead process refuses at once."""
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
        else:
            target = worker.process
        if not target.running:
            if self.net.reaches(self.host, server.host) and self.net.reaches(server.host, self.host):
                self.process.later(2 * self.net.latency_s, wake, None)
            return

        def there() -> None:
            self.net.send(target, self.process, wake, _act(worker, ask))

        self.net.send(self.process, target, there, once=True)

    def _available(self, info: WorkerInfo) -> bool:
        return info.instance not in self.down

    def _failed(self, info: WorkerInfo) -> None:
        """The breaker opens: all fails at once until the server answers the one that knocks in the background."""
        if info.instance not in self.down:
            self._knock_later(info, PROBE_S[0])

    def _knock_later(self, info: WorkerInfo, pause: float) -> None:
        self.down[info.instance] = pause
        self.process.later(pause * self.net.random.uniform(0.5, 1.0), self._knock, info, pause)

    def _knock(self, info: WorkerInfo, pause: float) -> None:
        server = self.world.servers.get(info.node)
        if server is None or server.instance != info.instance:
            return  # no map will name it for long
        state = {"open": True}

        def answered(value: Any) -> None:
            if state["open"]:
                state["open"] = False
                if value is None:
                    self._knock_later(info, min(PROBE_S[1], 2 * pause))
                else:
                    self.down.pop(info.instance, None)

        self._exchange(Ask(info, "ping", bytes(16)), answered)
        self.process.later(self.world.options.deadline_s, answered, None)

    def _ask_at(self, info: WorkerInfo, kind: str, digest: bytes, version: int = 0) -> Steps:
        """An exchange behind the breaker."""
        if not self._available(info):
            return None
        try:
            answer = yield Ask(info, kind, digest, version)
        except GeneratorExit:
            self._failed(info)  # it costs somebody the deadline once
            raise
        if answer is None:
            self._failed(info)
        return answer

    def place(self, shard: int) -> tuple[WorkerInfo | None, WorkerInfo | None, int]:
        """Owner, previous owner and since, from one map."""
        found = self.map
        if found is None or found.owners[shard] == NO_OWNER:
            return None, None, 0
        at = found.previous.get(shard)
        previous = found.workers[at] if at is not None else None
        return found.workers[found.owners[shard]], previous, found.since[shard]

    def get(self, digest: bytes) -> Steps:
        """A read: (version or 0, the server's name or empty)."""
        shard = shard_of(digest)
        for _ in range(HOPS + 1):
            owner, previous, since = self.place(shard)
            if owner is None:
                return 0, ""
            found = yield from self._ask_at(owner, "look", digest)
            if found is None:
                return 0, ""
            if found.version:
                return found.version, owner.node
            if 0 < found.word < MOVING:
                return 0, ""
            status, epoch = Status.WRONG_OWNER, 0
            if found.word < FROZEN:
                # Moving in, or not here (yet): the worker knows.
                epoch = found.word & EPOCH_MASK
                status = yield from self._ask_at(owner, "exists", digest)
                if status is None or status == Status.NOT_FOUND:
                    return 0, ""
            if status == Status.OK:
                continue
            if status == Status.PREVIOUS:
                same = epoch == since if epoch else bool(self.linked)
                if previous is not None and same:
                    found = yield from self._ask_at(previous, "look previous", digest)
                    return (found.version, previous.node) if found is not None and found.version else (0, "")
            elif "ignores_wrong_owner" in self.world.plants and previous is not None:
                found = yield from self._ask_at(previous, "look previous", digest)
                return (found.version, previous.node) if found is not None and found.version else (0, "")
            self.refresh()
            now_owner, now_previous, now_since = self.place(shard)
            if (now_owner, now_previous, now_since) == (owner, previous, since):
                return 0, ""
        return 0, ""

    def mutate(self, kind: str, digest: bytes, version: int) -> Steps:
        """A put or a delete: OK; WRONG_OWNER when the time is up with that, so nothing was done; None: nobody knows."""
        shard = shard_of(digest)
        until = self.net.now + self.world.options.deadline_s
        pause = AGAIN_S[0]
        while True:
            owner, _, _ = self.place(shard)
            if owner is None:
                return Status.WRONG_OWNER
            if not self._available(owner):
                return Status.UNAVAILABLE
            status = yield from self._ask_at(owner, kind, digest, version)
            if status is None:
                return None
            if status != Status.WRONG_OWNER:
                return status
            if "ignores_wrong_owner" in self.world.plants:
                return Status.OK
            if self.net.now + 2 * AGAIN_S[1] >= until:
                return Status.WRONG_OWNER
            if self.place(shard)[0] == owner:
                self.refresh()
                yield Pause(pause * self.net.random.uniform(0.5, 1.0), self.epoch)
                pause = min(AGAIN_S[1], pause * 2)


def _waker(resume: Any, turn: int) -> Any:
    return lambda value: resume(turn, value)


def _look(arena: Arena, digest: bytes, previous: bool) -> Found:
    version = arena.hit(digest, frozen_too=previous)
    return Found(Status.OK if version else Status.NOT_FOUND, version, arena.words[shard_of(digest)])


def _act(worker: Worker, ask: Ask) -> Any:
    """What the server does."""
    if ask.kind == "look":
        return _look(worker.arena, ask.digest, False)
    if ask.kind == "look previous":
        return _look(worker.arena, ask.digest, True)
    if ask.kind == "ping":
        return Status.OK
    if ask.kind == "exists":
        return worker.exists(ask.digest)
    if ask.kind == "put":
        return worker.put(ask.digest, ask.version)
    return worker.delete(ask.digest, ask.version)
