"""Inject faults into a simulation, generated from a seed, and end them.

Each fault has a beginning and an end, and its end repairs what it broke. :meth:`Plan.heal` ends all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Final, NamedTuple, Protocol

from .client import Client
from .manager import ManagerHost
from .net import Net
from .oracle import Oracle
from .server import Server

#: A data server grows to so many.
WORKERS_MAX: Final = 4


class World(Protocol):
    """The simulation, as faults see it."""

    net: Net
    manager: ManagerHost
    oracle: Oracle
    servers: dict[str, Server]
    clients: list[Client]

    def add_server(self) -> Server: ...
    def resume(self, name: str) -> None: ...


#: What a kind of fault does up to its ``yield``, and what ends it after that. Without a ``yield`` nothing ends it.
Steps = Generator[None, None, None]


class Fault(NamedTuple):
    """A kind of fault."""

    about: str
    begin: Callable[[World], Steps | None]


def _server(world: World) -> Server | None:
    up = [server for server in world.servers.values() if server.up and not server.leaving]
    return world.net.random.choice(up) if up else None


def _crash(world: World) -> Steps:
    server = _server(world)
    if server is None:
        return
    world.oracle.trouble(server.host, True)
    server.crash()
    yield
    world.oracle.trouble(server.host, False)
    if not server.up:
        server.start()


def _stop(world: World, *, warm: bool) -> Steps:
    server = _server(world)
    if server is None or len(world.servers) < 2:
        return
    server.stop(warm=warm)
    world.oracle.trouble(server.host, True)
    yield
    world.oracle.trouble(server.host, False)
    if server.up:
        server.crash()
    server.start(warm=warm)


def _pause(world: World) -> Steps:
    server = _server(world)
    if server is None:
        return
    processes = server.processes()
    if world.net.random.random() < 0.3:
        processes = [world.net.random.choice(processes)]
    world.net.say("paused: " + ", ".join(process.name for process in processes))
    world.oracle.trouble(server.host, True)
    for process in processes:
        process.pause()
    yield
    world.net.say("resumed: " + ", ".join(process.name for process in processes))
    world.oracle.trouble(server.host, False)
    for process in processes:
        process.resume()


def _all_away(world: World) -> Steps:
    """Stop all servers, or cut them off from the manager. They return within a second of each other."""
    rng, net = world.net.random, world.net
    servers = [server for server in world.servers.values() if server.up and not server.leaving]
    if not servers or any(server.supervisor.paused for server in servers):
        return
    stopped = rng.random() < 0.6
    manager = world.manager.HOST
    cuts = {pair for server in servers for pair in ((server.host, manager), (manager, server.host))} - net.cuts
    lives = [(process, process.life) for server in servers for process in server.processes()]
    net.say("all servers " + ("stop" if stopped else "are cut off from the manager"))
    for server in servers:
        world.oracle.trouble(server.host, True)
        if stopped:
            for process in server.processes():
                process.pause()
    if not stopped:
        net.cuts |= cuts
    yield

    def back(server: Server) -> None:
        net.say(f"{server.name} is there again")
        world.oracle.trouble(server.host, False)
        if stopped:
            for process, life in lives:
                if process.host == server.host and process.life == life:
                    process.resume()
        else:
            net.cuts.difference_update({pair for pair in cuts if server.host in pair})

    for server in servers:
        net.at(net.now + rng.uniform(0.0, 1.0), back, server)


def _worker(world: World) -> None:
    server = _server(world)
    if server is not None:
        world.oracle.trouble(server.host, True)
        server.worker_dies(world.net.random.randrange(server.count))
        world.oracle.trouble(server.host, False)


def _stream(world: World) -> None:
    server = _server(world)
    if server is not None and server.stream.running:
        server.net.say(f"{server.stream.name} dies, and is there again")
        server.stream.die()
        server.stream.start()


def _grow(world: World) -> None:
    server = _server(world)
    if server is not None and server.count < WORKERS_MAX:
        server.grow()


def _mover(world: World) -> None:
    moving = [server for server in world.servers.values() if server.movers]
    if moving:
        server = world.net.random.choice(moving)
        server.mover_dies(world.net.random.choice(sorted(server.movers)))


def _all_of_one_cluster(world: World) -> bool:
    """Return whether all arenas with values are of the manager's cluster.

    A manager that loses its state while some are not, as servers were away since it lost it before, may take those for
    the cluster. What was stored since is dropped then, and what those have of it is superseded (docs/architecture.md).
    """
    here = world.manager.cluster.cluster
    return all(
        worker.arena.cluster in (0, here) for server in world.servers.values() for worker in server.workers
    )


def _manager_down(world: World, **disk: bool) -> Steps:
    process = world.manager.process
    if not process.running:
        return
    world.oracle.trouble("*", True)
    world.manager.crash(**disk if _all_of_one_cluster(world) else {})
    yield
    world.oracle.trouble("*", False)
    if not world.manager.process.running:
        world.manager.start()


def _manager_pause(world: World) -> Steps:
    process = world.manager.process
    if not process.running or process.paused:
        return
    world.net.say("manager paused")
    world.oracle.trouble("*", True)
    process.pause()
    yield
    world.net.say("manager resumed")
    world.oracle.trouble("*", False)
    process.resume()


def _hosts(world: World) -> list[str]:
    return list(world.servers) + sorted({client.host for client in world.clients})


def _partition(world: World) -> Steps:
    """Cut a host off from the manager, from another host, or from all; one way or both."""
    rng = world.net.random
    hosts = _hosts(world)
    host = rng.choice(hosts)
    other = rng.choice([world.manager.HOST, "*", rng.choice(hosts)])
    if host == other:
        return
    ways = [[(host, other)], [(other, host)], [(host, other), (other, host)]][min(rng.randrange(5), 2)]
    cuts = set(ways) - world.net.cuts
    if not cuts:
        return
    named = ", ".join(f"{source} to {target}" for source, target in sorted(cuts))
    world.net.say(f"cut: {named}")
    troubled = other in (world.manager.HOST, "*")
    if troubled:
        world.oracle.trouble(host, True)
    world.net.cuts |= cuts
    yield
    world.net.say(f"mended: {named}")
    world.net.cuts -= cuts
    if troubled:
        world.oracle.trouble(host, False)


def _island(world: World) -> Steps:
    """Cut a host off from the manager, with all that runs there."""
    host, manager = world.net.random.choice(_hosts(world)), world.manager.HOST
    cuts = {(host, manager), (manager, host)} - world.net.cuts
    if not cuts:
        return
    world.net.say(f"{host} is cut off from the manager")
    world.oracle.trouble(host, True)
    world.net.cuts |= cuts
    yield
    world.net.say(f"{host} reaches the manager again")
    world.net.cuts -= cuts
    world.oracle.trouble(host, False)


def _client_pause(world: World) -> Steps:
    process = world.net.random.choice(world.clients).process
    if not process.running or process.paused:
        return
    world.net.say(f"{process.name} is stopped")
    process.pause()
    yield
    world.net.say(f"{process.name} goes on")
    process.resume()


def _slow(world: World) -> Steps:
    host = world.net.random.choice([*world.servers, world.manager.HOST])
    world.net.say(f"{host} is slow")
    world.net.slow[host] = world.net.random.uniform(10, 60)
    yield
    world.net.slow.pop(host, None)


def _network(world: World, name: str, most: float) -> Steps:
    setattr(world.net, name, world.net.random.uniform(0.02, most))
    world.net.say(f"{name}: {getattr(world.net, name):.3f}")
    yield
    setattr(world.net, name, 0.0)


def _clock(world: World) -> None:
    jump = world.net.random.choice([3600.0, -3600.0, 30.0, -30.0])
    world.net.say(f"the manager's clock jumps by {jump:g} s")
    world.manager.skew += jump


def _drain(world: World) -> Steps:
    server = _server(world)
    if server is None:
        return
    world.net.say(f"drain {server.name}")
    world.manager.drain(server.name, True)
    yield
    world.resume(server.name)


def _join(world: World) -> None:
    world.add_server().start()


FAULTS: Final[dict[str, Fault]] = {
    "crash": Fault("kill -9 of a data server, back cold", _crash),
    "stop": Fault("a clean stop, back cold", partial(_stop, warm=False)),
    "warm": Fault("a clean stop, back warm", partial(_stop, warm=True)),
    "pause": Fault("SIGSTOP of a data server or of one of its processes", _pause),
    "all-away": Fault("all data servers stop, or are cut off from the manager, and come back together", _all_away),
    "worker": Fault("kill -9 of a worker", _worker),
    "stream": Fault("kill -9 of a stream, which is back at once", _stream),
    "grow": Fault("a data server gets another worker while it serves", _grow),
    "mover": Fault("kill -9 of a mover", _mover),
    "manager": Fault("kill -9 of the manager, back from its state file", _manager_down),
    "forget": Fault("kill -9 of the manager, back without a state file", partial(_manager_down, lose_disk=True)),
    "manager-pause": Fault("SIGSTOP of the manager", _manager_pause),
    "partition": Fault("packets from or to a host are dropped", _partition),
    "island": Fault("a host is cut off from the manager, both ways", _island),
    "client-pause": Fault("SIGSTOP of a client", _client_pause),
    "slow": Fault("a slow host", _slow),
    "loss": Fault("segments are lost and sent again", partial(_network, name="loss", most=0.3)),
    "duplicate": Fault("messages come twice", partial(_network, name="duplicates", most=0.2)),
    "reorder": Fault("messages overtake each other", partial(_network, name="reordering", most=0.3)),
    "clock": Fault("the manager's clock jumps", _clock),
    "drain": Fault("a data server is drained, and taken back", _drain),
    "join": Fault("another data server", _join),
    "old-file": Fault("kill -9 of the manager, back from an old state file", partial(_manager_down, old_disk=True)),
}

#: The default kinds. Restoring an old state file is an operator's mistake. If many lives have begun since the copy was
#: made, a client with a newer map than all servers may wait for epochs to pass its own.
#: Two are for scenarios in which namespaces advance, and most of the others' faults would be of these kinds. The death
#: of a stream is for those with pins, of which it is the end.
DEFAULT: Final = tuple(kind for kind in FAULTS if kind not in ("old-file", "island", "client-pause", "stream"))


class Plan:
    """Begins faults and ends them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open: dict[int, Steps] = {}
        self.counts: dict[str, int] = {}
        self._number = 0

    def begin(self, kind: str, seconds: float) -> None:
        """Begin a fault that lasts so long."""
        steps = FAULTS[kind].begin(self.world)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if steps is not None and next(steps, steps) is None:
            self._number += 1
            self.open[self._number] = steps
            self.world.net.at(self.world.net.now + seconds, self._end, self._number)

    def _end(self, number: int) -> None:
        steps = self.open.pop(number, None)
        if steps is not None:
            next(steps, None)

    def heal(self) -> None:
        """End all faults now."""
        for number in sorted(self.open):
            self._end(number)
