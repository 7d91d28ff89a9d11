"""Simulate a data server: supervisor, workers and stream, with the real ``Member``.

The session with the manager restates ``server/membership.py``, and what the workers are told ``dataserver.py``. The
lease is the real one (``cluster/epochs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from ..cluster.assignment import FENCE, Member
from ..cluster.epochs import Lease
from ..server.slots.epochs import known_epochs, stored_epoch
from ..wire import epoch_messages as E
from ..wire import messages as M
from .arena import Arena
from .manager import decoded
from .mover import Mover
from .net import Process, ignored
from .worker import Worker, World

#: As in server/membership.py.
RECONNECT_S: Final = 0.5
SILENT_S: Final = 3.0
MOVED_S: Final = 0.25
#: From a worker's death to its successor's start.
REFORK_S: Final = 0.3
#: From the start of an added worker to the JOIN that names it.
GROW_S: Final = 0.3

Answer = Callable[..., object]
_SUBSCRIBE: Final = E.SUBSCRIBE_MAPS | E.SUBSCRIBE_EPOCHS | E.SUBSCRIBE_LEASES


class Orders:
    """What a worker was told last, and the epoch of the newest map that it has taken."""

    __slots__ = ("answered", "epoch", "number", "taken")

    def __init__(self) -> None:
        self.number = self.answered = self.epoch = self.taken = 0

    def skip(self, epoch: int) -> None:
        """Note a map that means nothing new for the worker."""
        self.epoch = epoch
        if self.answered == self.number:
            self.taken = epoch


class Server:
    """One logical node: its host, its processes, and the arenas that survive them."""

    def __init__(self, world: World, name: str, workers: int = 1, capacity: int = 1 << 30) -> None:
        self.world = world
        self.net = world.net
        self.name = name
        self.host = name
        self.capacity = capacity
        self.count = self.first_count = workers
        self.supervisor = Process(self.net, self.host, name)
        self.supervisor.on_push = self._on_map
        self.supervisor.on_epochs = self._on_epochs
        self.stream = Process(self.net, self.host, f"{name}/stream")
        self.instance = 0
        self.member = Member(name, 0, range(workers))
        self.workers: list[Worker] = []
        self.orders: list[Orders] = []
        self.lease = Lease()
        self.movers: dict[int, Mover] = {}
        #: Number of the connection to the manager, or 0.
        self.linked = 0
        self.joined = False
        self.warm = False
        self.leaving = False
        self.heartbeat_s = world.options.heartbeat_s
        self._asked_at = 0.0
        self._waits = 0
        self._moved_at = 0.0

    # -- life ---------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self.supervisor.running

    def start(self, *, warm: bool = False) -> None:
        """Start supervisor, workers and stream; ``warm``: on the arenas of the last life."""
        self.net.say(f"{self.name} starts{' warm' if warm else ''}")
        self.instance = self.net.random.getrandbits(60) | 1
        if warm and self.workers:
            epoch = self.workers[0].arena.epoch
            added = self.workers[self.first_count :]
            self.workers = self.workers[: self.first_count] + [each for each in added if each.arena.epoch == epoch]
        self.count = len(self.workers) if warm and self.workers else self.first_count
        self.member = Member(self.name, self.instance, range(self.count))
        self.linked = 0
        self.joined = self.leaving = False
        self.warm = warm and bool(self.workers)
        self.supervisor.start()
        self.stream.start()
        if not self.warm:
            for worker in self.workers:
                worker.arena.closed = True
            entries = self.world.options.entries
            self.workers = [
                Worker(self, at, Arena(self.world.number(), entries, self._boottime_ns)) for at in range(self.count)
            ]
        self.orders = [Orders() for _ in self.workers]
        self.lease = Lease()
        for worker in self.workers:
            self.world.arena_numbers[self.name, self.instance, worker.number] = worker.arena.number
            worker.start(recover=self.warm)
        self.movers = {}
        self.supervisor.later(0.05, self._connect)
        self._beat()

    def _boottime_ns(self) -> int:
        return int(self.net.now * 1e9)

    def crash(self) -> None:
        """Kill all processes at once."""
        self.net.say(f"{self.name} dies")
        self.world.died.setdefault(self.name, self.net.now)
        self._end()

    def _end(self) -> None:
        linked, self.linked, self.joined = self.linked, 0, False
        for process in self.processes():
            process.die()
        self.movers = {}
        if linked:
            manager = self.world.manager
            if manager.process.running and self.net.reaches(self.host, manager.HOST):
                delay = self.net.delay(self.host, manager.HOST)
                details = (linked, self.name, self.instance)
                self.net.at(self.net.now + delay, manager.process.take, manager.process.life, manager.closed, details)

    def processes(self) -> list[Process]:
        """Return all processes of the server."""
        movers = [mover.process for mover in self.movers.values()]
        return [self.supervisor, self.stream, *(worker.process for worker in self.workers), *movers]

    def stop(self, *, warm: bool) -> None:
        """Stop cleanly. For a warm start the workers end first; else they end when others have taken over."""
        if not self.up or self.supervisor.paused:
            return
        self.net.say(f"{self.name} stops{' warm' if warm else ''}")
        self.leaving = True
        if warm:
            for worker in self.workers:
                worker.process.die()
            self.stream.die()
        if self.joined:
            self._request(M.Leave(self.instance, self.name, int(warm)), ignored)
        self.supervisor.later(0.2 if warm else 0.8, self._end)

    def grow(self) -> None:
        """Add a worker with an arena of its own, as ``server/slots/growth.py`` does."""
        if not self.up or self.supervisor.paused or self.leaving or not self.joined or self.member.map is None:
            return
        self.net.say(f"{self.name} grows")
        worker = Worker(self, self.count, Arena(self.world.number(), self.world.options.entries, self._boottime_ns))
        self.world.arena_numbers[self.name, self.instance, worker.number] = worker.arena.number
        self.workers.append(worker)
        self.orders.append(Orders())
        self.count += 1
        self.member.add(worker.number)
        worker.start(recover=False)
        self._order(worker)
        self.supervisor.later(GROW_S, self._rejoin)

    def _rejoin(self) -> None:
        self.joined = False
        self._join()

    def worker_dies(self, number: int) -> None:
        """Kill a worker; its supervisor forks another."""
        worker = self.workers[number]
        if not self.up or not worker.process.running or self.leaving:
            return
        self.net.say(f"{worker.process.name} dies")
        worker.process.die()
        self._end_mover(number)
        self.supervisor.later(REFORK_S, self._refork, worker)

    def _refork(self, worker: Worker) -> None:
        if self.leaving:
            return
        worker.start(recover=True)
        self.net.say(f"{worker.process.name} is back")
        self._order(worker)

    # -- the manager --------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self.linked or self.leaving:
            return
        self.linked = self.world.manager.connect(self.supervisor, self._broken)
        if self.linked:
            self._asked_at = self.net.now
            self._waits = 0
            self._join()
            self._watch(self.linked)
        else:
            self._lost()

    def _broken(self) -> None:
        """The manager's kernel has closed the connection."""
        if self.linked:
            self._lost()

    def _lost(self) -> None:
        """The connection is lost: serve on, and connect again later."""
        self.linked, self.joined = 0, False
        self._waits = 0
        if not self.leaving:
            self.supervisor.later(RECONNECT_S * self.net.random.uniform(0.7, 1.3), self._connect)

    def _watch(self, link: int) -> None:
        patience = max(SILENT_S, 3 * self.heartbeat_s)
        if self.linked != link:
            return
        if self._waits and self.net.now - self._asked_at > patience:
            manager = self.world.manager
            self.net.send(self.supervisor, manager.process, manager.closed, link, self.name, self.instance)
            self._lost()
            return
        self.supervisor.later(patience / 4, self._watch, link)

    def _request(self, msg: Any, answer: Answer) -> None:
        if not self.linked:
            return
        if not self._waits:
            self._asked_at = self.net.now
        self._waits += 1
        manager, link = self.world.manager, self.linked

        def answered(message: Any, status: int) -> None:
            if self.linked != link:
                return
            self._waits = max(0, self._waits - 1)
            self._asked_at = self.net.now
            answer(message, status)

        self.net.send(self.supervisor, manager.process, manager.request, link, msg, answered)

    def infos(self) -> list[M.WorkerInfo]:
        """Return the workers as the map names them."""
        return [
            M.WorkerInfo(worker.number, 0, 1, self.instance, self.capacity, self.name, "", self.host, 1)
            for worker in self.workers
        ]

    def _join(self) -> None:
        if not self.linked or self.joined or self.leaving:
            return
        warm = int(self.warm and self.member.map is None)
        known = max(self.member.epoch, max((worker.arena.epoch for worker in self.workers), default=0))
        cluster = self.member.cluster or max((worker.arena.cluster for worker in self.workers), default=0)
        self._request(M.Join(self.instance, warm, self.name, self.infos(), known, cluster=cluster), self._on_joined)

    def _on_joined(self, msg: Any, status: int) -> None:
        if isinstance(msg, M.Error):
            if status == M.Status.OTHER_CLUSTER and not self.member.abandoned:
                self.net.say(f"{self.name}: {msg.text}")
                self.warm = False
                self.member.abandon()
                self.lease.end()
                for number in list(self.movers):
                    self._end_mover(number)
                for orders in self.orders:
                    orders.taken = 0
                self._order_all()
                return
            # A taken name is tried again later.
            self.supervisor.later(1.0, self._join)
            return
        if not isinstance(msg, M.Joined) or self.joined:
            return
        cluster = self.member.cluster or max(worker.arena.cluster for worker in self.workers)
        known = known_epochs(self._slots(), self.member.epochs, cluster)
        if known:  # on the wire all that follows comes later
            epochs = E.Epochs(self.member.epoch, cluster, 0, known)
            self._request(epochs, lambda _msg, _status: self._on_reported(msg))
        else:
            self._on_reported(msg)

    def _slots(self) -> Any:
        """Return what the workers have told of themselves."""
        return [
            SimpleNamespace(
                ready=worker.process.running,
                stats={
                    "cluster": worker.arena.cluster, "epochs": worker.namespaces.epochs(),
                    "stored_epoch": worker.stored,
                },
            ) for worker in self.workers
        ]  # fmt: skip

    def _on_reported(self, msg: M.Joined) -> None:
        if self.joined or self.leaving:
            return
        self.joined = True
        if msg.wants_map and (offer := self.member.offer()) is not None:
            self.net.say(f"{self.name} offers its map of epoch {offer.epoch}")
            self._request(offer, ignored)
        self._ask_map()

    def _beat(self) -> None:
        self.supervisor.later(self.heartbeat_s * self.net.random.uniform(0.8, 1.0), self._beat)
        if self.joined and self.member.unlisted and not self.member.fenced:
            self._rejoin()
        if self.joined and not self.leaving:
            loads = [M.WorkerLoad(0, 0, 0, 0)] * self.count
            taken = min(each.taken for each in self.orders)
            number = self.lease.sent(self._boottime_ns(), max(taken, stored_epoch(self._slots(), self.member)))
            self._request(M.Heartbeat(self.instance, taken, self.name, loads), partial(self._on_beat_ack, number))
            self.report()

    def _on_beat_ack(self, number: int, msg: Any, status: int) -> None:
        if isinstance(msg, E.LeaseAck) and self.lease.answered(number, msg.advanced):
            for worker in self.workers:
                self._extend_lease(worker)
        self._on_ack(msg, status)

    def _extend_lease(self, worker: Worker) -> None:
        if self.member.epochs is not None:
            until_ns = self.lease.until(self.member.epochs.lease_ms)
            self.net.send(self.supervisor, worker.process, worker.extend_lease, until_ns)

    def report(self) -> None:
        """Send MOVED for the shards that are finished by the words."""
        if self.joined and self.net.now - self._moved_at >= MOVED_S and self.member.map is not None:
            self._moved_at = self.net.now
            for worker in self.workers:
                if worker.number in self.movers or self.world.moving(self.member):
                    moved = self.member.moved(worker.number, worker.arena.words)
                    if moved is not None:
                        self._request(moved, self._on_ack)

    def _on_ack(self, msg: Any, status: int) -> None:
        if status in (M.Status.UNKNOWN_NODE, M.Status.NAME_TAKEN):
            if not self.joined or self.leaving:
                return
            self.net.say(f"{self.name} is not known (any more): fenced, joins again")
            self.joined = False
            self.member.fence()
            self._order_all()
            self._join()
        elif isinstance(msg, M.HeartbeatAck | E.LeaseAck) and msg.epoch > self.member.epoch:
            self._ask_map()

    def _ask_map(self) -> None:
        self._request(M.MapGet(self.member.epoch, _SUBSCRIBE), self._on_map)

    def _on_epochs(self, link: int, msg: E.Epochs) -> bool:
        if link == self.linked:
            self.member.take_epochs(msg)
        return link == self.linked

    def _on_map(self, msg: Any, _status: int) -> None:
        if not isinstance(msg, M.MapReply) or not self.joined:
            return
        member = self.member
        if msg.epoch == member.epoch and not member.fenced:
            return
        self.world.oracle.told(msg)
        shard_map = decoded(msg)
        in_order = member.map is not None and not member.fenced and msg.epoch > member.epoch
        if in_order and member.epochs is None and not self.world.concerns(self, member.epoch, msg):
            # It does not concern this server: only the epoch changes.
            member.map = shard_map
            for orders in self.orders:
                orders.skip(msg.epoch)
            return
        if member.take_map(shard_map) is not None:
            self._order_all()

    # -- workers --------------------------------------------------------------------------------------

    def _order_all(self) -> None:
        for worker in self.workers:
            self._order(worker)

    def _order(self, worker: Worker) -> None:
        order, orders = self.member.order(worker.number), self.orders[worker.number]
        if order is FENCE and self.member.map is None:
            return
        orders.number += 1
        orders.epoch = self.member.epoch
        done = partial(self._send_taken, worker, orders.number)
        self.net.send(self.supervisor, worker.process, worker.order, order, self.member.epochs, done)
        self._extend_lease(worker)

    def _send_taken(self, worker: Worker, number: int) -> None:
        self.net.send(worker.process, self.supervisor, self._taken, worker, number)

    def _taken(self, worker: Worker, number: int) -> None:
        """A worker has carried an order out."""
        orders = self.orders[worker.number]
        if number != orders.number:
            return
        orders.answered = number
        if self.member.abandoned:
            if all(each.answered == each.number for each in self.orders):
                self._join()
        elif not self.member.fenced:
            orders.taken = orders.epoch

    def ordered(self, number: int) -> None:
        """A worker has taken a map: start a mover if shards move in."""
        mover = self.movers.get(number)
        if mover is None:
            if not self.member.moving(number, self.workers[number].arena.words):
                return
            mover = self.movers[number] = Mover(self, self.workers[number])
        mover.replan()

    def _end_mover(self, number: int) -> None:
        mover = self.movers.pop(number, None)
        if mover is not None:
            mover.process.die()

    def mover_dies(self, number: int) -> None:
        """Kill a mover; its supervisor forks another."""
        if number in self.movers:
            self.net.say(f"{self.name}: mover {number} dies")
            self._end_mover(number)
            self.supervisor.later(REFORK_S, self.ordered, number)
