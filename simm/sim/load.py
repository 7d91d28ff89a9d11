"""Operations on groups and on values in parts, and what the oracle is told of them.

Each client has some of both, which only it writes. A group or a value of which a write has failed may have been stored
or not, now or later: it is still read, and the client has another one from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from ..arena.hashing import Hasher
from ..wire.messages import Status
from .client import Client
from .net import Net
from .oracle import Group, Key, Oracle
from .whole import delete_large, exists_group, get_large, put_group, put_large
from .worker import Options

#: Groups and values of each client.
EACH: Final = 3
#: Members of a group, at least and at most.
MEMBERS: Final = (2, 4)


class World(Protocol):
    """The simulation, as its load sees it."""

    options: Options
    net: Net
    oracle: Oracle
    keys: list[Key]

    def add_key(self, digest: bytes) -> Key: ...
    def in_time(self, client: Client, seconds: float) -> None: ...
    def get(self, client: Client, key: Key) -> None: ...
    def mutate(self, client: Client, key: Key, *, delete: bool = False) -> None: ...


class GroupLoad:
    """Puts groups, asks for them, and reads, deletes and keeps single members."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._mine: dict[int, list[Group]] = {}
        #: Groups of which a put is in flight.
        self._busy: set[Group] = set()
        self._hasher = Hasher("simulated")

    def work(self, client: Client) -> None:
        """Start an operation."""
        rng = self._world.net.random
        mine = self._mine.setdefault(client.number, [])
        while len(mine) < EACH:
            mine.append(self._new())
        group = rng.choice(mine)
        what = rng.random()
        if what < 0.4:
            self._put(client, group)
        elif what < 0.75:
            client.run(exists_group(client, self._hasher, group.names), lambda _, s: self._world.in_time(client, s))
        elif what < 0.9:
            self._world.get(client, rng.choice(group.keys))
        elif what < 0.95 and self._world.options.keeps:
            steps = client.mutate("keep", rng.choice(group.keys).digest, round(self._world.options.keep_s * what))
            client.run(steps, lambda _, seconds: self._world.in_time(client, seconds))
        else:
            key = rng.choice(group.keys)
            self._world.mutate(client, key, delete=True)

    def _new(self) -> Group:
        world = self._world
        number = len(world.oracle.groups)
        count = world.net.random.randint(*MEMBERS)
        names = [f"{world.options.seed}{{{number}}}/{member}" for member in range(count)]
        group = Group(names, [world.add_key(self._hasher(name)) for name in names])
        world.oracle.groups.append(group)
        return group

    def _put(self, client: Client, group: Group) -> None:
        if group in self._busy:
            return
        mine = self._mine[client.number]
        if any(key.started > key.done for key in group.keys):  # a delete of one of them is in flight, or has failed
            mine.remove(group)
            return
        self._busy.add(group)
        versions = []
        for key in group.keys:
            versions.append(key.started + 1)
            key.started += 2  # a put that fails deletes what it has stored
            key.deleted.add(key.started)

        def ended(result: tuple[bool, bool] | None, seconds: float) -> None:
            self._world.in_time(client, seconds)
            self._busy.discard(group)
            done, gone = result if result is not None else (False, False)
            for key, version in zip(group.keys, versions):
                if done:
                    key.started = key.done = version
                    key.deleted.discard(version + 1)
                elif gone:
                    key.done = version + 1
            if not done and not gone:
                mine.remove(group)

        client.run(put_group(client, self._hasher, group.names, versions), ended)


class OwnKeys:
    """The keys of a load: each client has some of its own, which only it writes."""

    def __init__(self, add_key: Callable[[bytes], Key], hasher: Hasher, seed: int) -> None:
        self._add_key = add_key
        self._hasher = hasher
        self._seed = seed
        self._mine: dict[int, list[Key]] = {}
        #: Of all clients, also those that their clients have given up.
        self.all: list[Key] = []

    def of(self, client: Client) -> list[Key]:
        """Return a client's keys, as many as it is to have."""
        mine = self._mine.setdefault(client.number, [])
        while len(mine) < EACH:
            key = self._add_key(self._hasher(f"{self._seed}/{len(self.all)}"))
            mine.append(key)
            self.all.append(key)
        return mine

    def give_up(self, client: Client, key: Key) -> None:
        """Let the client have another one in its place."""
        self._mine[client.number].remove(key)


class LargeLoad:
    """Puts, reads and deletes values in parts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys = OwnKeys(world.add_key, Hasher("simulated, in parts"), world.options.seed)

    def work(self, client: Client) -> None:
        """Start an operation."""
        rng = self._world.net.random
        mine = self._keys.of(client)
        what = rng.random()
        if what < 0.5:
            self._get(client, rng.choice(self._keys.all))
        else:
            self._write(client, rng.choice(mine), delete=what > 0.9)

    def _get(self, client: Client, key: Key) -> None:
        floor, oracle = key.floor, self._world.oracle

        def ended(result: tuple[bytes, str] | None, seconds: float) -> None:
            self._world.in_time(client, seconds)
            value, node = result if result is not None else (b"", "")
            if value:
                oracle.read(client, key, floor, oracle.whole(client, key, value), node)

        client.run(get_large(client, key.digest), ended)

    def _write(self, client: Client, key: Key, *, delete: bool) -> None:
        if key.started > key.done:
            return
        key.started += 1
        version = key.started
        random = self._world.net.random.randbytes(16)
        if delete:
            key.deleted.add(version)

        def ended(status: int | None, seconds: float) -> None:
            self._world.in_time(client, seconds)
            if status == Status.OK:
                key.done = version
            else:
                self._keys.give_up(client, key)

        steps = delete_large(client, key.digest) if delete else put_large(client, key.digest, version, random)
        client.run(steps, ended)
