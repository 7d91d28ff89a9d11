"""Operations on a namespace that advances: the product's own code of an advance, and what the oracle is told.

Each client has keys of its own in the namespace, which only it writes, and reads those of all. A digest has the epoch
in it, so the oracle judges the versions of each digest as those of a key. Beside that it knows when the put of each
version began, and when an advance was called that has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from ..errors import PeerError, TransportError
from ..net.channel import Refused
from ..sdk.ops.epochs import GRACE_S, confirmed, request
from ..wire.epoch_messages import Advance, Advanced
from ..wire.messages import Status
from .client import NAMESPACE, Client, Steps
from .net import Net
from .oracle import Key, Oracle
from .whole import Ask, replayed
from .worker import Options

#: Keys of each client.
EACH: Final = 2
#: So many of the operations on the namespace are advances; one is in flight at a time.
ADVANCES: Final = 0.1
#: How long an advance may take beyond the lease, and a client asks for it, seconds.
ADVANCE_S: Final = 3.0


class World(Protocol):
    """The simulation, as this load sees it."""

    options: Options
    net: Net
    oracle: Oracle
    clients: list[Client]

    def add_key(self, digest: bytes) -> Key: ...
    def number(self) -> int: ...
    def in_time(self, client: Client, seconds: float) -> None: ...


def advance(client: Client, timeout_s: float) -> Steps:
    """Advance the namespace; return its epoch, 0 if that is not confirmed."""

    def code(ask: Ask) -> int:
        def call(until: float) -> int:
            left = until - clock()
            answer = ask(lambda: _call(client, request(NAMESPACE, left), max(0.001, left) + GRACE_S))
            if answer is None:
                raise TransportError("no manager answers")
            message, status = answer
            if not isinstance(message, Advanced):
                raise Refused(status, message.text)
            return message.epoch

        def clock() -> float:
            return float(ask(lambda: _now(client)))

        def sleep(seconds: float) -> None:
            ask(lambda: _sleep(client, seconds))

        client.namespace.ask = lambda name, left: confirmed(call, name, left, clock, sleep)
        try:
            return client.namespace.advance(NAMESPACE, timeout_s)
        except PeerError:
            return 0

    return (yield from replayed(code))


def _now(client: Client) -> Steps:
    return (yield lambda wake: wake(client.net.now))


def _sleep(client: Client, seconds: float) -> Steps:
    yield lambda wake: client.process.later(seconds, wake, None)


def _call(client: Client, msg: Advance, deadline_s: float) -> Steps:
    """Make one exchange with the manager by a connection of its own; return (message, status), None if it fails."""

    def exchange(wake: Callable[[Any], None]) -> None:
        manager = client.world.manager
        state = {"open": True}

        def end(result: tuple[Any, int] | None) -> None:
            if state["open"]:
                state["open"] = False
                client.net.send(client.process, manager.process, manager.closed, link)
                wake(result)

        def answered(message: Any, status: int) -> None:
            end((message, status))

        def broken() -> None:
            end(None)

        link = manager.connect(client.process, broken)
        if link:
            client.net.send(client.process, manager.process, manager.request, link, msg, answered)
        client.process.later(deadline_s if link else client.net.latency_s, broken)

    return (yield exchange)


class EpochLoad:
    """Puts, reads and advances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[bytes, Key] = {}
        #: (digest, version) -> the number of the moment when its put began.
        self._began: dict[tuple[bytes, int], int] = {}
        self._advancing = False
        #: Advances that have returned, and that have not been confirmed; reads of a value with an epoch.
        self.advanced = self.unconfirmed = self.hits = 0

    def work(self, client: Client) -> None:
        """Start an operation."""
        rng, clients = self._world.net.random, self._world.clients
        what = rng.random()
        if not self._advancing and what < ADVANCES:
            self.advance(client)
        elif what < 0.6:
            self._get(client, f"{rng.randrange(len(clients))}/{rng.randrange(EACH)}")
        else:
            self._put(client, f"{client.number}/{rng.randrange(EACH)}")

    def advance(self, client: Client, done: Callable[[bool], None] = lambda _done: None) -> None:
        """Advance the namespace."""
        world = self._world
        called = world.number()
        self._advancing = True
        timeout_s = world.options.lease_s + ADVANCE_S

        def ended(epoch: int | None, _seconds: float) -> None:
            self._advancing = False
            if epoch:
                self.advanced += 1
                world.oracle.advanced(called)
                world.net.say(f"{client.name} has advanced to {epoch}")
            else:
                self.unconfirmed += 1
            done(bool(epoch))

        client.run(advance(client, timeout_s), ended, timeout_s + 2 * ADVANCE_S)

    def _key(self, client: Client, name: str) -> Key:
        """Return what a key is called by a client now."""
        digest = client.hasher(name)
        key = self._keys.get(digest)
        if key is None:
            key = self._keys[digest] = self._world.add_key(digest)
        return key

    def _get(self, client: Client, name: str, done: Callable[[int], None] = lambda _version: None) -> None:
        world, oracle, key = self._world, self._world.oracle, self._key(client, name)
        floor, advanced = key.floor, oracle.last_advance

        def ended(result: tuple[int, str] | None, seconds: float) -> None:
            world.in_time(client, seconds)
            version, node = result if result is not None else (0, "")
            oracle.read(client, key, floor, version, node)
            if version:
                oracle.of_epoch(client, node, self._began[key.digest, version], advanced)
                self.hits += client.namespace.epoch > 0
            done(version)

        client.run(client.get(key.digest), ended)

    def _put(self, client: Client, name: str, done: Callable[[int | None], None] = lambda _status: None) -> None:
        world, key = self._world, self._key(client, name)
        if key.started > key.done:  # one is in flight, or has failed: the digest is read only
            return
        key.started += 1
        version = key.started
        self._began[key.digest, version] = world.number()

        def ended(status: int | None, seconds: float) -> None:
            world.in_time(client, seconds)
            if status == Status.OK:
                key.done = version
            done(status)

        client.run(client.mutate("put", key.digest, version, namespace=NAMESPACE), ended)

    def full_service(self) -> None:
        """Check, nothing being wrong, that the namespace advances, and that each client puts and gets in it then."""
        world, left = self._world, {"advance": 1}

        def advanced(done: bool) -> None:
            left["advance"] -= done

        self.advance(world.clients[0], advanced)
        world.net.run(world.net.now + ADVANCE_S)
        if left["advance"]:
            world.oracle.fail(f"an advance has not returned after {ADVANCE_S:g} s, nothing being wrong")
        for client in world.clients:
            left[client.name] = 1
            self._probe(client, left)
        world.net.run(world.net.now + 2 * world.options.deadline_s + 0.2)
        if any(left.values()):
            world.oracle.fail(f"{sum(left.values())} operations had no answer within their deadline")

    def _probe(self, client: Client, left: dict[str, int]) -> None:
        oracle, name = self._world.oracle, f"probe of {client.name}"

        def read(version: int) -> None:
            left[client.name] = 0
            if not version and self._world.options.entries > 100:
                oracle.fail(f"{client.name} did not find what it put after an advance, nothing being wrong")

        def put(status: int | None) -> None:
            if status != Status.OK:
                said = getattr(status, "name", "no answer" if status is None else f"status {status}")
                oracle.fail(f"{client.name} could not put after an advance ({said}), nothing being wrong")
            self._get(client, name, read)

        self._put(client, name, put)
