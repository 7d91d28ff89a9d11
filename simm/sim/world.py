"""Put a simulation together: a cluster, its load, its faults, one run and its report.

A *scenario* is a small cluster for half a minute with faults of every kind, generated from a seed. A *simulation* is a
large cluster for hours. There a client stands for many, and a value for ``sampling`` values, as the report says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from ..cluster.assignment import Member
from ..cluster.nodes import NodeState, Timing
from ..constants import NO_OWNER, SHARD_COUNT
from ..wire.messages import MapReply, Status
from ..wire.shard_set import FROZEN
from .client import Client
from .epochs import EpochLoad
from .faults import DEFAULT, Plan
from .load import GroupLoad, LargeLoad
from .manager import ManagerHost, decoded
from .net import Net
from .oracle import Key, Oracle, SimFailure
from .pins import PinLoad
from .server import Server
from .worker import Options
from .worker import Server as AnyServer

#: All shards must be served again so long after the last fault.
HEALED_S: Final = 10.0
#: At most so many clients are simulated; each stands for others.
CLIENTS_MOST: Final = 200


@dataclass
class Report:
    """The outcome of a run. Times are simulated seconds."""

    options: Options
    failure: str = ""
    trace: str = ""
    last: list[tuple[float, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class World:
    """One simulated cluster."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plants = options.plants
        self.net = Net(options.seed, options.latency_s)
        self.net.verbose = options.verbose
        self._numbers = 0
        timing = Timing(heartbeat_s=options.heartbeat_s, restart_grace_s=15.0, moves_at_once=options.moves_at_once)
        self.oracle = Oracle(self)
        self.manager = ManagerHost(self.net, timing, options.lease_s)
        self.manager.plants = options.plants
        self.servers: dict[str, Server] = {}
        self.clients: list[Client] = []
        self.keys: list[Key] = []
        self.mine: dict[int, list[int]] = {}
        self.plan = Plan(self)
        self.manifests: list[bytes] = []
        self._groups = GroupLoad(self)
        self._larges = LargeLoad(self)
        self._pins = PinLoad(self)
        self._epochs = EpochLoad(self)
        self.manager.on_turn = self._turned
        self.manager.on_made = self.oracle.made
        #: (name, instance, worker) -> the number of its arena.
        self.arena_numbers: dict[tuple[str, int, int], int] = {}
        self.moved_bytes = 0
        self.exact = options.nodes <= 64
        self.stopping = False
        #: Chain of maps: epoch -> (the epoch before, instances that it concerns).
        self._chain: dict[int, tuple[int, frozenset[tuple[str, int]]]] = {}
        self._last: tuple[MapReply, Any, Any, Any] | None = None
        self._instances: dict[tuple[str, int, int], int] = {}
        #: When each killed server died, until the manager calls it dead or a successor joins.
        self.died: dict[str, float] = {}
        #: Seconds from each death to its detection.
        self.detected: list[float] = []

    def _turned(self, name: str, state: NodeState) -> None:
        """Note that a node's state has changed at the manager."""
        when = self.died.get(name)
        if when is not None and state in (NodeState.DEAD, NodeState.JOINING):
            del self.died[name]
            if state is NodeState.DEAD:
                self.detected.append(self.net.now - when)

    def number(self) -> int:
        """Return a number that was not returned before."""
        self._numbers += 1
        return self._numbers

    # -- setting up -----------------------------------------------------------------------------------

    def add_server(self) -> Server:
        name = f"node{len(self.servers):04d}"
        server = self.servers[name] = Server(self, name)
        return server

    def build(self) -> None:
        """Make the manager, servers, clients and keys."""
        options, rng = self.options, self.net.random
        self.manager.start()
        for _ in range(options.nodes):
            server = self.add_server()
            self.net.at(rng.uniform(0.0, 0.5), server.start)
        count = min(options.clients, CLIENTS_MOST)
        names = list(self.servers)
        for number in range(count):
            host = names[number % len(names)] if number % 2 else f"engine{number}"
            client = Client(self, number, host)
            self.clients.append(client)
            self.net.at(1.0 + rng.uniform(0.0, 0.5), client.start)
            self.net.at(2.5 + rng.uniform(0.0, 1.0), self._work, client)
            self.mine[number] = []
        for number in range(options.keys):
            self._new_key(number % count)

    def add_key(self, digest: bytes) -> Key:
        """Let the oracle judge a key that no ordinary operation uses."""
        key = self.oracle.by_digest[digest] = Key(10_000 + len(self.oracle.by_digest), digest)
        return key

    def _new_key(self, writer: int) -> Key:
        number = len(self.keys)
        digest = blake2b(b"%d-%d" % (self.options.seed, number), digest_size=16).digest()
        key = Key(number, digest)
        self.keys.append(key)
        self.oracle.by_digest[digest] = key
        self.mine[writer].append(number)
        return key

    # -- maps, for many servers -----------------------------------------------------------------------------

    def moving(self, member: Member) -> bool:
        """Return True if the map moves any shard."""
        return member.map is not None and bool(member.map.previous)

    def concerns(self, server: AnyServer, epoch: int, reply: MapReply) -> bool:
        """Return True if a map after ``epoch``, up to this one, concerns a server; always in a small cluster."""
        if self.exact:
            return True
        self._note(reply)
        at, us = reply.epoch, (server.name, server.instance)
        while at > epoch:
            link = self._chain.get(at)
            if link is None or us in link[1]:
                return True
            at = link[0]
        return at != epoch

    def _note(self, reply: MapReply) -> None:
        """Note which instances a new map concerns, compared with the one before."""
        if self._last is not None and self._last[0].epoch >= reply.epoch:
            return
        found = decoded(reply)
        numbers = self._instances
        table = np.zeros(NO_OWNER + 1, np.int64)
        for position, info in enumerate(found.workers):
            table[position] = numbers.setdefault((info.node, info.instance, info.worker), len(numbers) + 1)
        owners = table[np.frombuffer(found.owners, np.uint16)]
        previous = np.zeros(SHARD_COUNT, np.int64)
        for shard, position in found.previous.items():
            previous[shard] = table[position]
        since = np.frombuffer(found.since, np.uint64)
        if self._last is not None:
            last, old_owners, old_previous, old_since = self._last
            changed = (owners != old_owners) | (previous != old_previous) | (since != old_since)
            touched = {
                *owners[changed].tolist(), *previous[changed].tolist(), *old_owners[changed].tolist(),
                *old_previous[changed].tolist(),
            }  # fmt: skip
            names = list(numbers)
            concerned = frozenset(names[number - 1][:2] for number in touched if number)
            self._chain[reply.epoch] = (last.epoch, concerned)
        self._last = (reply, owners, previous, since)

    # -- load -----------------------------------------------------------------------------------------

    def _work(self, client: Client) -> None:
        """Start one operation, and schedule the next."""
        if self.stopping:
            return
        rng = self.net.random
        if self.options.keeps and self.mine[client.number] and rng.random() < self.options.keeps:
            key = self.keys[rng.choice(self.mine[client.number])]
            seconds = round(self.options.keep_s * rng.random()) if rng.random() < 0.8 else 0
            client.run(client.mutate("keep", key.digest, seconds), lambda *_: None)
        elif self.options.groups and rng.random() < self.options.groups:
            self._groups.work(client)
        elif self.options.large and rng.random() < self.options.large:
            self._larges.work(client)
        elif self.options.pins and rng.random() < self.options.pins:
            self._pins.work(client)
        elif self.options.advances and rng.random() < self.options.advances:
            self._epochs.work(client)
        elif rng.random() < 0.35 and self.mine[client.number]:
            number = rng.choice(self.mine[client.number])
            self.mutate(client, self.keys[number], delete=rng.random() < 0.15)
        else:
            key = self.keys[rng.randrange(len(self.keys))]
            self.get(client, key)
        client.process.later(rng.expovariate(1 / self.options.op_s), self._work, client)

    def get(self, client: Client, key: Key, done: Any = None) -> None:
        """Read a key and judge the result."""
        floor = key.floor

        def ended(result: tuple[int, str] | None, seconds: float) -> None:
            version, node = result if result is not None else (0, "")
            client.counts["gets"] += 1
            client.counts["hits" if version else "misses"] += 1
            client.counts["late"] += result is None
            self.in_time(client, seconds)
            self.oracle.read(client, key, floor, version, node)
            if self.options.verbose:
                self.net.say(f"{client.name} get {key.number}: {version} at {node or '-'}")
            if done is not None:
                done(version)

        client.run(client.get(key.digest), ended)

    def mutate(self, client: Client, key: Key, *, delete: bool = False, done: Any = None) -> None:
        """Put or delete a key by its only writer."""
        if key.started > key.done:  # one of this key is in flight
            return
        key.started += 1
        version = key.started
        if delete:
            key.deleted.add(version)

        def ended(status: int | None, seconds: float) -> None:
            client.counts["puts"] += 1
            self.in_time(client, seconds)
            if status == Status.OK:
                key.done = version
            else:
                client.counts["failed"] += 1
                # It may have been carried out, now or later: the key is still read, but not written any more.
                mine = self.mine[client.number]
                if key.number in mine:
                    mine.remove(key.number)
                    self._new_key(client.number)
            if self.options.verbose:
                what = "delete" if delete else "put"
                self.net.say(f"{client.name} {what} {key.number} v{version}: {getattr(status, 'name', 'no answer')}")
            if done is not None:
                done(status)

        client.run(client.mutate("delete" if delete else "put", key.digest, version), ended)

    def in_time(self, client: Client, seconds: float) -> None:
        """Judge how long an operation has taken."""
        began = self.net.now - seconds
        if seconds > self.options.deadline_s + 0.05 and client.process.running and client.process.resumed_at < began:
            self.oracle.fail(f"{client.name} waited {seconds:.3f} s for an answer")

    # -- faults ---------------------------------------------------------------------------------------

    def resume(self, name: str) -> None:
        """End a drain, as an operator does: again and again, until the manager confirms it."""
        confirmed: list[bool] = []
        if not self.manager.cluster.rebuilding:
            self.manager.drain(name, False, partial(confirmed.append, True))
        self.net.at(self.net.now + 0.5, self._resume_again, name, confirmed)

    def _resume_again(self, name: str, confirmed: list[bool]) -> None:
        if not confirmed:
            self.resume(name)

    def _next_fault(self, until: float) -> None:
        options, rng = self.options, self.net.random
        if self.net.now >= until or not options.faults:
            return
        shortest, longest = options.fault_lasts_s
        seconds = min(shortest + (longest - shortest) * rng.random() ** 2, until - self.net.now)
        self.plan.begin(rng.choice(list(options.faults)), seconds)
        self.net.at(self.net.now + rng.expovariate(1 / options.fault_s), self._next_fault, until)

    # -- a run ------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Run load and faults, heal, check full service; return the report."""
        report = Report(self.options)
        try:
            self.build()
            until = self.options.seconds
            self.net.at(4.0, self._next_fault, until)
            self.net.at(1.0, self._check_invariants)
            self.net.run(until)
            self.net.say("all that is broken is mended")
            self.plan.heal()
            self.net.run(until + HEALED_S)
            self._full_service()
            if self.options.advances:
                self._epochs.full_service()
            self.stopping = True
        except SimFailure as failure:
            report.failure = str(failure)
        except Exception as exc:
            self.net.say(f"FAILURE: {type(exc).__name__}: {exc}")
            report.failure = f"{type(exc).__name__}: {exc}"
            if self.options.verbose:
                raise
        report.trace = self.net.trace
        report.last = list(self.net.said)
        report.figures = self.figures()
        return report

    def _check_invariants(self) -> None:
        """Check the invariants that are too expensive to check at every event."""
        if self.manager.process.running:
            self.manager.cluster.check(settled=False)
        for server in self.servers.values():
            if self.exact:
                for worker in server.workers:
                    worker.shards.check()
        self.net.at(self.net.now + (1.0 if self.exact else 30.0), self._check_invariants)

    def _full_service(self) -> None:
        """Check, after the last fault, that every shard has an accepting owner and every client can put and get."""
        cluster = self.manager.cluster
        if cluster.rebuilding:
            self.oracle.fail(f"the manager still listens for maps {HEALED_S:g} s after the last fault")
        owned = np.zeros(SHARD_COUNT, bool)
        for name, server in self.servers.items():
            node = cluster.nodes.get(name)
            if server.up and not server.leaving and (node is None or node.state is not NodeState.RUNNING):
                state = "unknown" if node is None else node.state.value
                self.oracle.fail(f"{name} is {state} {HEALED_S:g} s after the last fault")
            for worker in server.workers:
                words = np.frombuffer(worker.arena.words, np.uint64)
                if worker.process.running and not worker.shards.fenced:
                    accepts = words - np.uint64(1) < np.uint64(FROZEN - 1)
                    if (owned & accepts).any():
                        shard = int(np.flatnonzero(owned & accepts)[0])
                        self.oracle.fail(f"shard {shard} is accepted twice {HEALED_S:g} s after the last fault")
                    owned |= accepts
        if not owned.all():
            lacking = int((~owned).sum())
            self.oracle.fail(f"{lacking} shards have no owner that accepts {HEALED_S:g} s after the last fault")
        self.stopping = True
        pending = {"left": 0}
        for client in self.clients:
            for _ in range(6 if self.exact else 1):
                pending["left"] += 1
                self._probe(client, self._new_key(client.number), pending)
        self.net.run(self.net.now + 2 * self.options.deadline_s + 0.2)
        if pending["left"]:
            self.oracle.fail(f"{pending['left']} operations had no answer within their deadline")

    def _probe(self, client: Client, key: Key, pending: dict[str, int]) -> None:
        def read(version: int) -> None:
            pending["left"] -= 1
            if version != 1 and self.options.entries > 100:  # else it may have been evicted
                self.oracle.fail(f"{client.name} did not find key {key.number} after it was put, nothing being wrong")

        def put(status: int | None) -> None:
            if status != Status.OK:
                name = getattr(status, "name", "no answer")
                self.oracle.fail(f"{client.name} could not put key {key.number} ({name}), nothing being wrong")
            self.get(client, key, read)

        self.mutate(client, key, done=put)

    # -- figures ----------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return the figures of the report."""
        counts: dict[str, int] = {}
        for client in self.clients:
            for name, value in client.counts.items():
                counts[name] = counts.get(name, 0) + value
        manager = self.manager
        deaths = [when for when, _, state in manager.turns if state is NodeState.DEAD]
        return {
            "simulated_s": round(self.net.now, 3),
            "events": self.net.events,
            "messages": self.net.messages,
            "manager_messages": manager.messages,
            "manager_client_messages": manager.client_messages,
            "manager_node_messages": manager.messages - manager.client_messages,
            "detection_s": [round(seconds, 3) for seconds in self.detected],
            "epochs": len(set(manager.epochs)),
            "epoch": manager.cluster.epoch,
            "map_bytes": manager.map_bytes,
            "moves": manager.moves + manager.cluster.moves,
            "moved_bytes": self.moved_bytes,
            "deaths": len(deaths),
            "slowest_op_s": round(max((client.slowest_s for client in self.clients), default=0.0), 4),
            "checks": self.oracle.checks,
            "exempt_reads": self.oracle.exempt_reads,
            "split_writes": self.oracle.split_writes,
            "spared": self.oracle.spared,
            "kept_moved": self.oracle.kept_moved,
            "groups_left": self.oracle.groups_left,
            "groups_moved": self.oracle.groups_moved,
            "wholes": self.oracle.wholes,
            "ranges_read": self.oracle.ranges_read,
            "sessions_read": self.oracle.sessions_read,
            "outlived_workers": self.oracle.outlived_workers,
            "outlived_moves": self.oracle.outlived_moves,
            "advanced": self._epochs.advanced,
            "unconfirmed": self._epochs.unconfirmed,
            "epoch_hits": self._epochs.hits,
            "faults": dict(sorted(self.plan.counts.items())),
            **counts,
        }


def scenario(seed: int, **changes: Any) -> Options:
    """Return a small cluster generated from a seed."""
    import random

    rng = random.Random(seed * 2654435761 % (1 << 32))
    options = Options(
        nodes=rng.choice([1, 2, 2, 3, 3, 4]), clients=rng.choice([2, 3, 4]), seconds=rng.choice([10.0, 14.0, 20.0]),
        seed=seed, fault_s=rng.choice([0.7, 1.5, 3.0]), entries=rng.choice([12, 40, 400]),
        move_bytes_s=rng.choice([4 << 20, 50 << 20, 1 << 30]), moves_at_once=rng.choice([1024, 4096, 16384, 16384]),
        keys=40, faults=DEFAULT,
    )  # fmt: skip
    kinds = list(DEFAULT)
    if rng.random() < 0.5:
        options.faults = tuple(rng.sample(kinds, rng.randrange(2, 6)))
    return replace(options, **changes)


def run_scenario(seed: int, **changes: Any) -> Report:
    """Run one scenario, from its seed."""
    return World(scenario(seed, **changes)).run()
