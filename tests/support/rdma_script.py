"""What scripts on the RDMA path share: values that identify themselves, a writer between any two steps of a READ, and
the removal of checks by mutation tests.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest

from simm.arena.reader import ArenaReader
from simm.client import Client
from simm.sdk.rdma_connection import RdmaConnection
from tests.models.explorer import first_failure
from tests.support.fake_rdma_cluster import FakeRdmaCluster, path_of
from tests.support.invariants import InvariantViolation

#: Of the values that :class:`Writer` stores for :func:`reads`, and of the room for each, bytes.
SIZE: Final = 700
ROOM: Final = 800
KEYS: Final = ("k0", "k1", "k2", "k3")


def value_of(key: str, version: int, size: int) -> bytes:
    """Return a value whose every word identifies it."""
    word = (hash_of(key) << 32 | version).to_bytes(8, "little")
    return (word * (size // 8 + 1))[:size]


def reuse_the_chunk(cluster: FakeRdmaCluster, client: Client, writer: Client) -> Iterator[int]:
    """After 200 steps of the network, put other values until one has the chunk of ``k``; then release what is held.

    The next item of what is returned is the number of steps so far, and one.
    """
    reader = ArenaReader(cluster.node.worker.segment.name)
    found = reader.locate(client.digest("k"))
    assert found is not None
    steps = itertools.count(1)

    def between() -> None:
        if next(steps) != 200:
            return
        assert writer.delete("k")
        for number in range(200):
            assert writer.put(f"other{number}", value_of("other", number, 700))
            if reader.value(found)[:8] == value_of("other", number, 8):
                cluster.network.release()
                return
        pytest.fail("the chunk is never used again, so this shows nothing")

    cluster.network.between = between
    return steps


def hash_of(key: str) -> int:
    return sum(key.encode()) & 0xFFFF


def version_in(key: str, got: bytes) -> int:
    """Return the version of these bytes; raise InvariantViolation if they are not one value."""
    words = {got[at : at + 8] for at in range(0, len(got) - 7, 8)}
    if len(words) != 1:
        raise InvariantViolation(f"{key}: a mixture of {len(words)} words")
    word = int.from_bytes(words.pop(), "little")
    if word >> 32 != hash_of(key):
        raise InvariantViolation(f"{key}: the value of another key")
    return word & 0xFFFF_FFFF


class Writer:
    """Overwrites and deletes by shared memory, between steps of the network."""

    def __init__(self, cluster: FakeRdmaCluster, seed: int, keys: list[str], often: float, size: int) -> None:
        self.cluster, self.rng, self.keys, self.often, self.size = cluster, random.Random(seed), keys, often, size
        self.client = cluster.client("shm")
        #: Of each key: the versions stored so far; and those that were there at some time since `mark`.
        self.version = dict.fromkeys(keys, 0)
        self.live: dict[str, set[int]] = {key: set() for key in keys}
        for key in keys:
            self.put(key)

    def put(self, key: str) -> None:
        version = self.version[key] = self.version[key] + 1
        self.live[key].add(version)
        assert self.client.put(key, value_of(key, version, self.size))

    def delete(self, key: str) -> None:
        self.client.delete(key)
        self.live[key].add(0)

    def mark(self) -> None:
        """Start a new record of live versions: the present ones, and later ones."""
        for key in self.keys:
            self.live[key] = {self.version[key]} if self.client.exists(key) else {0}

    def between(self) -> None:
        """Write at random between two steps of the network."""
        if self.rng.random() < self.often:
            key = self.rng.choice(self.keys)
            if self.rng.random() < 0.15:
                self.delete(key)
            else:
                self.put(key)


def reads(
    cluster: FakeRdmaCluster,
    client: Client,
    seed: int,
    rooms: Sequence[Any],
    seen: Callable[[Any, int], bytes],
    rounds: int = 25,
) -> int:
    """Read KEYS while a writer works between any two steps; return the number of hits.

    ``rooms``: a buffer of ROOM bytes for each key; ``seen`` returns the first bytes of a buffer. A wrong value raises
    InvariantViolation.
    """
    path_of(client).maintain = lambda now: None  # type: ignore[method-assign]
    writer = Writer(cluster, seed, list(KEYS), 0.03, SIZE)
    rng, hits, sinks = random.Random(seed), 0, dict(zip(KEYS, rooms))
    cluster.network.between = writer.between
    for _ in range(rounds):
        writer.mark()
        if rng.random() < 0.5:
            key = rng.choice(KEYS)
            got = {key: client.get_into(key, sinks[key])}
        else:
            got = dict(zip(KEYS, client.get_into_many(KEYS, rooms)))
        for key, size in got.items():
            if size is None:
                continue
            hits += 1
            if size != SIZE:
                raise InvariantViolation(f"{key}: {size} bytes")
            version = version_in(key, seen(sinks[key], size))
            if version not in writer.live[key]:
                raise InvariantViolation(f"{key}: version {version}, there were {sorted(writer.live[key])}")
    cluster.network.between = None
    return hits


def finds_harm(script: Callable[[pytest.MonkeyPatch, int], Any], seeds: int = 20) -> None:
    """Check that the script fails for some seed while a check is removed."""

    def run(seed: int) -> None:
        with pytest.MonkeyPatch.context() as inner:
            script(inner, seed)

    first_failure(range(seeds), run, InvariantViolation)


@contextlib.contextmanager
def queue_pairs_outlive_failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the queue pairs of failed connections open, which is a bug; close them at the end."""
    closed = RdmaConnection.close
    left: list[RdmaConnection] = []

    def close(self: RdmaConnection, reason: str = "closed") -> None:
        if reason == "closed":
            closed(self)
            return
        self.broken = reason
        left.append(self)

    monkeypatch.setattr(RdmaConnection, "close", close)
    try:
        yield
    finally:
        for connection in left:
            closed(connection)
