"""What goes wrong when, drawn from a seed; and the end of it all.

Each fault has a beginning and an end. What it breaks it mends at its end, so that after the last one everything could
be as it should: :meth:`Plan.heal` makes sure of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from .server import Server
    from .world import World


class Fault(NamedTuple):
    """``begin`` makes it happen and returns how it ends, or None."""

    about: str
    begin: Callable[[World, float], Callable[[], None] | None]


def _server(world: World) -> Server | None:
    up = [server for server in world.servers.values() if server.up and not server.leaving]
    return world.net.random.choice(up) if up else None


def _crash(world: World, seconds: float) -> Callable[[], None] | None:
    server = _server(world)
    if server is None:
        return None
    world.oracle.trouble(server.host, True)
    server.crash()

    def back() -> None:
        world.oracle.trouble(server.host, False)
        if not server.up:
            server.start()

    return back


def _stop(warm: bool) -> Callable[[World, float], Callable[[], None] | None]:
    def begin(world: World, seconds: float) -> Callable[[], None] | None:
        server = _server(world)
        if server is None or len(world.servers) < 2:
            return None
        server.stop(warm=warm)
        world.oracle.trouble(server.host, True)

        def back() -> None:
            world.oracle.trouble(server.host, False)
            if server.up:
                server.crash()
            server.start(warm=warm)

        return back

    return begin


def _pause(world: World, seconds: float) -> Callable[[], None] | None:
    server = _server(world)
    if server is None:
        return None
    processes = server.processes()
    if world.net.random.random() < 0.3:
        processes = [world.net.random.choice(processes)]
    world.net.say("paused: " + ", ".join(process.name for process in processes))
    world.oracle.trouble(server.host, True)
    for process in processes:
        process.pause()

    def resume() -> None:
        world.net.say("resumed: " + ", ".join(process.name for process in processes))
        world.oracle.trouble(server.host, False)
        for process in processes:
            process.resume()

    return resume


def _worker(world: World, seconds: float) -> None:
    server = _server(world)
    if server is not None:
        world.oracle.trouble(server.host, True)
        server.worker_dies(world.net.random.randrange(server.count))
        world.oracle.trouble(server.host, False)


def _mover(world: World, seconds: float) -> None:
    moving = [server for server in world.servers.values() if server.movers]
    if moving:
        server = world.net.random.choice(moving)
        server.mover_dies(world.net.random.choice(sorted(server.movers)))


def _manager_down(**disk: bool) -> Callable[[World, float], Callable[[], None] | None]:
    def begin(world: World, seconds: float) -> Callable[[], None] | None:
        if not world.manager.process.running:
            return None
        world.oracle.trouble("*", True)
        world.manager.crash(**disk)

        def back() -> None:
            world.oracle.trouble("*", False)
            if not world.manager.process.running:
                world.manager.start()

        return back

    return begin


def _manager_pause(world: World, seconds: float) -> Callable[[], None] | None:
    process = world.manager.process
    if not process.running or process.paused:
        return None
    world.net.say("manager paused")
    world.oracle.trouble("*", True)
    process.pause()

    def resume() -> None:
        world.net.say("manager resumed")
        world.oracle.trouble("*", False)
        process.resume()

    return resume


def _partition(world: World, seconds: float) -> Callable[[], None] | None:
    """A host from the manager, from one other, or from all; both ways or one."""
    rng = world.net.random
    hosts = list(world.servers) + sorted({client.host for client in world.clients})
    host = rng.choice(hosts)
    other = rng.choice([world.manager.HOST, "*", rng.choice(hosts)])
    if host == other:
        return None
    ways = [[(host, other)], [(other, host)], [(host, other), (other, host)]][min(rng.randrange(5), 2)]
    cuts = set(ways) - world.net.cuts
    if not cuts:
        return None
    world.net.say("cut: " + ", ".join(f"{source} to {target}" for source, target in sorted(cuts)))
    manager = world.manager.HOST
    troubled = [host] if other in (manager, "*") else []
    for each in troubled:
        world.oracle.trouble(each, True)
    world.net.cuts |= cuts

    def mend() -> None:
        world.net.say("mended: " + ", ".join(f"{source} to {target}" for source, target in sorted(cuts)))
        world.net.cuts -= cuts
        for each in troubled:
            world.oracle.trouble(each, False)

    return mend


def _slow(world: World, seconds: float) -> Callable[[], None]:
    host = world.net.random.choice([*world.servers, world.manager.HOST])
    world.net.say(f"{host} is slow")
    world.net.slow[host] = world.net.random.uniform(10, 60)

    def quick() -> None:
        world.net.slow.pop(host, None)

    return quick


def _network(name: str, most: float) -> Callable[[World, float], Callable[[], None]]:
    def begin(world: World, seconds: float) -> Callable[[], None]:
        setattr(world.net, name, world.net.random.uniform(0.02, most))
        world.net.say(f"{name}: {getattr(world.net, name):.3f}")
        return lambda: setattr(world.net, name, 0.0)

    return begin


def _clock(world: World, seconds: float) -> None:
    jump = world.net.random.choice([3600.0, -3600.0, 30.0, -30.0])
    world.net.say(f"the manager's clock jumps by {jump:g} s")
    world.manager.skew += jump


def _drain(world: World, seconds: float) -> Callable[[], None] | None:
    server = _server(world)
    if server is None:
        return None
    world.net.say(f"drain {server.name}")
    world.manager.drain(server.name, True)
    return lambda: world.resume(server.name)


def _join(world: World, seconds: float) -> None:
    world.add_server().start()


FAULTS: Final[dict[str, Fault]] = {
    "crash": Fault("kill -9 of a data server, back cold", _crash),
    "stop": Fault("a clean stop, back cold", _stop(False)),
    "warm": Fault("a clean stop, back warm", _stop(True)),
    "pause": Fault("SIGSTOP of a data server or of one of its processes", _pause),
    "worker": Fault("kill -9 of a worker", _worker),
    "mover": Fault("kill -9 of a mover", _mover),
    "manager": Fault("kill -9 of the manager, back from its state file", _manager_down()),
    "forget": Fault("kill -9 of the manager, back without a state file", _manager_down(lose_disk=True)),
    "manager-pause": Fault("SIGSTOP of the manager", _manager_pause),
    "partition": Fault("packets from or to a host are dropped", _partition),
    "slow": Fault("a slow host", _slow),
    "loss": Fault("segments are lost and sent again", _network("loss", 0.3)),
    "duplicate": Fault("messages come twice", _network("duplicates", 0.2)),
    "reorder": Fault("messages overtake each other", _network("reordering", 0.3)),
    "clock": Fault("the manager's clock jumps", _clock),
    "drain": Fault("a data server is drained, and taken back", _drain),
    "join": Fault("another data server", _join),
    "old-file": Fault("kill -9 of the manager, back from an old state file", _manager_down(old_disk=True)),
}

#: What is drawn when nobody says otherwise. Restoring an old state file is an operator's mistake that the protocol does
#: not undo for clients: epochs that were told come again with other maps until a server with a newer one has joined,
#: and a client with a newer map than all servers waits for epochs to pass its own.
DEFAULT: Final = tuple(kind for kind in FAULTS if kind != "old-file")


class Plan:
    """Draws faults and keeps how they end."""

    def __init__(self, world: World, kinds: Sequence[str]) -> None:
        self.world = world
        self.kinds = list(kinds)
        self.open: dict[int, Callable[[], None]] = {}
        self.counts: dict[str, int] = {}
        self._number = 0

    def begin(self, kind: str, seconds: float) -> None:
        """One, for so long."""
        end = FAULTS[kind].begin(self.world, seconds)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if end is not None:
            self._number += 1
            self.open[self._number] = end
            self.world.net.at(self.world.net.now + seconds, self._end, self._number)

    def _end(self, number: int) -> None:
        end = self.open.pop(number, None)
        if end is not None:
            end()

    def heal(self) -> None:
        """All that is broken is mended now."""
        for number in sorted(self.open):
            self._end(number)
