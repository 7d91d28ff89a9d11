"""Sessions with pinned values, and ranges of values, in the simulation.

Restated are ``sdk/ops/pins.py``, ``sdk/ops/remote_pins.py`` and the stream's part of both. A read of ranges looks twice
into the chunk of a value, some time apart, so that the chunk may become another value's in between. What says that it
has not is the pin, or a last look at the entry.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from ..arena.hashing import Hasher, shard_of
from ..wire.messages import Status, WorkerInfo
from .client import Client, Found, Pause, Place, Steps, piece
from .load import OwnKeys
from .net import Net
from .oracle import Key, Oracle
from .worker import Options
from .worker import World as AnyWorld

SESSION_S: Final = 4.0
BETWEEN_S: Final = 0.3
#: Reads of one session at most, and how often ranges of a value that changes are read again.
READS: Final = 6
AGAIN: Final = 2
#: Sessions take longer than an operation may.
DEADLINE_S: Final = 60.0

#: What two looks at a value have found: whose bytes, and of which version.
Pieces = tuple[tuple[bytes, int], tuple[bytes, int]]


class World(Protocol):
    """The simulation, as these operations see it."""

    options: Options
    net: Net
    oracle: Oracle

    def add_key(self, digest: bytes) -> Key: ...
    def in_time(self, client: Client, seconds: float) -> None: ...
    def mutate(self, client: Client, key: Key, *, delete: bool = False) -> None: ...


def _wait(client: Client, most: float) -> Pause:
    return Pause(client.net.random.uniform(0.0, most), -1)


def _is_here(client: Client, info: WorkerInfo) -> bool:
    server = client.world.servers.get(info.node)
    return server is not None and server.host == client.host


def _piece(client: Client, world: AnyWorld, info: WorkerInfo, digest: bytes, place: Place) -> Steps:
    """Return what is in a value's chunk, and whether it was of one version until now; None: there is no answer."""
    if not place.life and _is_here(client, info):
        return piece(world, digest, place)
    return (yield from client.ask_at(info, "piece", digest, place=place))


def _two(client: Client, info: WorkerInfo, digest: bytes, place: Place) -> Steps:
    """Read two ranges of a value; return the pieces, or None for a miss."""
    first = yield from _piece(client, client.world, info, digest, place)
    yield _wait(client, BETWEEN_S)
    second = yield from _piece(client, client.world, info, digest, place)
    if first is None or second is None or not second[1] or not first[1]:
        return None
    return first[0], second[0]


def get_ranges(client: Client, digest: bytes) -> Steps:
    """Read two ranges of a value; return (version or 0, the server's name or empty, the pieces)."""
    pieces: list[Pieces] = []

    def look(info: WorkerInfo, digest: bytes, previous: bool) -> Steps:
        for _ in range(AGAIN):
            answer = yield from client.ask_at(info, "find", digest, int(previous))
            if answer is None:
                return None
            found, place = answer
            if place is None:
                return found
            got = yield from _two(client, info, digest, place)
            if got is not None:
                pieces.append(got)
                return found
        return Found(0, found.word)

    version, node = yield from client.get(digest, look)
    return version, node, pieces


class Session:
    """A value that a client has pinned."""

    def __init__(self, client: Client, info: WorkerInfo, digest: bytes, place: Place) -> None:
        self._client = client
        self._info = info
        self._digest = digest
        self._place: Place | None = place
        self.version = place.version
        self.life = self._worker_life()
        self.word = place.arena.words[shard_of(digest)]

    def _worker_life(self) -> int:
        server = self._client.world.servers[self._info.node]
        return server.workers[self._info.worker].process.life if server.instance == self._info.instance else -1

    def outlives(self) -> tuple[bool, bool]:
        """Return whether the worker has ended since the value was pinned, and whether its shard has moved."""
        place = self._place
        moved = place is not None and place.arena.words[shard_of(self._digest)] != self.word
        return self._worker_life() != self.life, moved

    @property
    def is_pinned_here(self) -> bool:
        """Return whether a pin of the client's own holds the value: nothing else can end it."""
        return self._place is not None and bool(self._place.pin) and not self._place.life

    def read(self) -> Steps:
        """Read two ranges of the value; return the pieces, or None for a miss."""
        if self._place is None:
            return None
        got = yield from _two(self._client, self._info, self._digest, self._place)
        if got is None:
            self._place = None if self._place.life else self._place
        return got

    def release(self) -> Steps:
        """Release the pin. What is not answered is released with the lease, or with the arena."""
        place, self._place = self._place, None
        if place is not None and place.pin:
            for _ in range(AGAIN):
                if (yield from self._client.ask_at(self._info, "unpin", self._digest, place=place)) is not None:
                    return
                yield _wait(self._client, 1.0)


def pin(client: Client, digest: bytes) -> Steps:
    """Pin a value; return (version or 0, the server's name or empty, its session or None)."""
    sessions: list[Session] = []

    def look(info: WorkerInfo, digest: bytes, previous: bool) -> Steps:
        here = _is_here(client, info)
        answer = yield from client.ask_at(info, "pin here" if here else "pin", digest, int(previous))
        if answer is None and here:  # without its worker a value of this host is held by its version
            answer = yield from client.ask_at(info, "find", digest, int(previous))
        if answer is None:
            return None
        found, place = answer
        if place is not None:
            sessions.append(Session(client, info, digest, place))
        return found

    version, node = yield from client.get(digest, look)
    return version, node, sessions[-1] if version and sessions else None


class PinLoad:
    """Pins values, reads ranges of them and of others, and replaces and deletes them meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys = OwnKeys(world.add_key, Hasher("simulated, pinned"), world.options.seed)

    def work(self, client: Client) -> None:
        """Start an operation."""
        rng = self._world.net.random
        mine = self._keys.of(client)
        what = rng.random()
        if what < 0.25:
            client.run(self._session(client, rng.choice(self._keys.all)), lambda *_: None, DEADLINE_S)
        elif what < 0.5:
            self._ranges(client, rng.choice(self._keys.all))
        else:
            self._world.mutate(client, rng.choice(mine), delete=what > 0.92)

    def _ranges(self, client: Client, key: Key) -> None:
        floor, oracle = key.floor, self._world.oracle

        def ended(result: Any, _seconds: float) -> None:
            version, node, pieces = result if result is not None else (0, "", [])
            if version:
                oracle.ranges(client, key, version, pieces[-1])
                oracle.read(client, key, floor, version, node)

        client.run(get_ranges(client, key.digest), ended, DEADLINE_S)

    def _session(self, client: Client, key: Key) -> Steps:
        floor, oracle, rng = key.floor, self._world.oracle, self._world.net.random
        version, node, session = yield from pin(client, key.digest)
        oracle.read(client, key, floor, version, node)
        if session is None:
            return Status.NOT_FOUND
        for _ in range(rng.randint(1, READS)):
            yield _wait(client, SESSION_S / READS)
            pinned = session.is_pinned_here
            pieces = yield from session.read()
            oracle.pinned(client, key, version, pieces, pinned=pinned, outlived=session.outlives())
        yield from session.release()
        return Status.OK
