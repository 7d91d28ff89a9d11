"""What scripts on the RDMA path share: values that say what they are, a writer between any two steps of a READ, and
what a positive control takes away.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
from rdmatown import RdmaTown, path_of

from simm.client import Client
from simm.lane import Lane

#: Of the values that :class:`Writer` stores for :func:`reads`, and of the room for each, bytes.
SIZE: Final = 700
ROOM: Final = 800
KEYS: Final = ("k0", "k1", "k2", "k3")


class Harm(AssertionError):
    """A script saw wrong bytes, or something else that must never be."""


def value_of(key: str, version: int, size: int) -> bytes:
    """A value that says in every word what it is."""
    word = (hash_of(key) << 32 | version).to_bytes(8, "little")
    return (word * (size // 8 + 1))[:size]


def hash_of(key: str) -> int:
    return sum(key.encode()) & 0xFFFF


def version_in(key: str, got: bytes) -> int:
    """Which version these bytes are. Raises Harm when they are none."""
    words = {got[at : at + 8] for at in range(0, len(got) - 7, 8)}
    if len(words) != 1:
        raise Harm(f"{key}: a mixture of {len(words)} words")
    word = int.from_bytes(words.pop(), "little")
    if word >> 32 != hash_of(key):
        raise Harm(f"{key}: the value of another key")
    return word & 0xFFFF_FFFF


class Writer:
    """Overwrites and deletes by shared memory, whenever the network lets it."""

    def __init__(self, town: RdmaTown, seed: int, keys: list[str], often: float, size: int) -> None:
        self.town, self.rng, self.keys, self.often, self.size = town, random.Random(seed), keys, often, size
        self.client = town.client("shm")
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
        """From now on: what is there now, and what comes."""
        for key in self.keys:
            self.live[key] = {self.version[key]} if self.client.exists(key) else {0}

    def between(self) -> None:
        """What the network calls between two steps."""
        if self.rng.random() < self.often:
            key = self.rng.choice(self.keys)
            if self.rng.random() < 0.15:
                self.delete(key)
            else:
                self.put(key)


def reads(
    town: RdmaTown, client: Client, seed: int, rooms: Sequence[Any], seen: Callable[[Any, int], bytes], rounds: int = 25
) -> int:
    """Reads of KEYS while a writer works between any two steps; how many were hits. Raises Harm.

    ``rooms``: where each key's value goes, ROOM bytes; ``seen`` says which bytes a room begins with.
    """
    path_of(client).tend = lambda now: None  # type: ignore[method-assign]
    writer = Writer(town, seed, list(KEYS), 0.03, SIZE)
    rng, hits, sinks = random.Random(seed), 0, dict(zip(KEYS, rooms))
    town.network.between = writer.between
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
                raise Harm(f"{key}: {size} bytes")
            version = version_in(key, seen(sinks[key], size))
            if version not in writer.live[key]:
                raise Harm(f"{key}: version {version}, there were {sorted(writer.live[key])}")
    town.network.between = None
    return hits


def finds_harm(script: Callable[[pytest.MonkeyPatch, int], Any], seeds: int = 20) -> None:
    """With what was taken away some seed of the script must see it."""
    for seed in range(seeds):
        with pytest.MonkeyPatch.context() as inner:
            try:
                script(inner, seed)
            except Harm:
                return
    pytest.fail(f"{seeds} runs without the check, and nobody noticed")


@contextlib.contextmanager
def links_outlive_failures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lane that failed is given up with its links open, as it must never be; they are closed at the end."""
    closed = Lane.close
    left: list[Lane] = []

    def close(self: Lane, reason: str = "closed") -> None:
        if reason == "closed":
            closed(self)
            return
        self.broken = reason
        left.append(self)

    monkeypatch.setattr(Lane, "close", close)
    try:
        yield
    finally:
        for lane in left:
            closed(lane)
