"""How long getting values is expected to take, from how long earlier gets by the same path took.

An engine that could compute a prefix anew asks which is sooner (:meth:`~simm.client.Client.load_ms`).

The model: a get of ``keys`` values with ``bytes`` in all takes ``call + keys * key + bytes * byte``. The three numbers
belong to a path. They are fitted to the last 16 observations of small values and the last 16 of large ones, by least
squares of the relative error. What none of these shows is taken from rough figures of the path (``FIRST``).

What is observed
----------------
* Every get by RDMA or TCP, single or in a batch, for each server.
* One in eight batches of 16 keys and more out of an arena on this host.
* Every copy of 1 MiB and more.

A single get of less than 1 MiB on this host is not observed, and costs nothing.

What can go wrong
-----------------
* *The machine is busier than before.* The figures follow within some 30 gets.
* *A stall.* An observation that is off by more than four times weighs accordingly less.
* *Several servers at the same time.* Each is observed for as long as its part took beside the others. So the parts of a
  batch that other hosts send count for the longest of them, and not for their sum.
* *The values are gone, or others, when they are read.* An estimate is no promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arena.reader import ArenaReader
from ...cluster.lookup import PLAIN_BELOW
from ..routing import Routes
from ..worker_path import Target
from .owners import Owners

if TYPE_CHECKING:
    from .replicas import Replicas

#: Seconds for a call, a key and a byte, before anything is observed.
FIRST: Final = {"shm": (3e-6, 3e-6, 1e-10), "rdma": (20e-6, 8e-6, 1e-10), "tcp": (100e-6, 10e-6, 5e-10)}
#: Observations that are kept of each kind.
KEPT: Final = 16
#: From so many bytes a value on, a get is one of large values.
LARGE_BYTES: Final = 64 << 10
#: An observation that is off by more than this weighs less.
OFF: Final = 4.0
#: Weight of the first figures, as a part of the observations'.
FIRST_WEIGHT: Final = 1e-4
#: Fits in a row, each weighing the observations by what the one before expects.
ROUNDS: Final = 4

_Floats = NDArray[np.float64]
#: (calls, keys, bytes, seconds); all zero for none yet.
_Observation = tuple[int, int, int, float]


class Share(NamedTuple):
    """The values of a call that come by one path from one worker."""

    path: str
    keys: int
    bytes: int


class Speed:
    """The three numbers of one path. Any thread may call it."""

    __slots__ = ("_first", "_fitted", "_rings", "_seen")

    def __init__(self, first: tuple[float, float, float]) -> None:
        #: In units of these, the numbers to find are about 1.
        self._first = np.array(first)
        #: Of small values, and of large ones. The oldest is overwritten.
        self._rings: tuple[list[_Observation], list[_Observation]] = ([(0, 0, 0, 0.0)] * KEPT, [(0, 0, 0, 0.0)] * KEPT)
        self._seen = [0, 0]
        #: The numbers, and how many observations there were when they were fitted.
        self._fitted: tuple[_Floats, int] = np.ones(3), 0

    def observe(self, keys: int, size: int, seconds: float, calls: int = 1) -> None:
        """Take note of a get, or with ``calls`` and ``keys`` 0 of a copy. O(1)."""
        if seconds > 0.0 and size > 0:
            large = size >= LARGE_BYTES * max(keys, 1)
            self._rings[large][self._seen[large] % KEPT] = (calls, keys, size, seconds)
            self._seen[large] += 1

    def expected(self, keys: int, size: int) -> float:
        """Return the seconds that a get of ``keys`` values with ``size`` bytes in all is expected to take."""
        numbers, seen = self._fitted
        now = sum(self._seen)
        if seen != now:
            small, large = self._rings
            rows = [row for row in (*small[:], *large[:]) if row[3]]
            numbers = _fit(np.array(rows, np.float64), self._first)
            self._fitted = numbers, now
        return float(np.dot((1, keys, size) * self._first, numbers))


def _fit(rows: _Floats, first: _Floats) -> _Floats:
    """Return the numbers, in units of ``first``, with the least error relative to what they expect; none is negative.

    The first figures take part with a weight, so there is one answer whatever was observed.
    """
    features, seconds = rows[:, :3] * first, rows[:, 3]
    numbers = np.ones(3)
    for _ in range(ROUNDS):
        expected = np.maximum(features @ numbers, seconds * 1e-3)
        off = np.maximum(seconds / expected, expected / seconds)
        weighted = (features.T * (np.minimum(1.0, OFF / off) / (seconds * expected))).T
        products, sums = weighted.T @ features, weighted.T @ seconds
        weight = FIRST_WEIGHT * products.diagonal().max()
        numbers = np.zeros(3)
        free = [0, 1, 2]
        while free:
            found = np.linalg.solve(products[np.ix_(free, free)] + weight * np.eye(len(free)), sums[free] + weight)
            positive = [at for at, value in zip(free, found) if value >= 0.0]
            if len(positive) == len(free):
                numbers[free] = found
                break
            free = positive
    return numbers


class Speeds:
    """What a client has seen of each path."""

    def __init__(self) -> None:
        self.paths = {path: Speed(first) for path, first in FIRST.items()}

    def observe(self, path: str, keys: int, size: int, seconds: float) -> None:
        """Take note of a get of ``keys`` values with ``size`` bytes in all."""
        speed = self.paths.get(path)
        if speed is not None:
            speed.observe(keys, size, seconds)

    def observe_copy(self, size: int, seconds: float) -> None:
        """Take note of a copy on this host, of a get or a put."""
        self.paths["shm"].observe(0, size, seconds, calls=0)

    def expected_s(self, shares: Iterable[Share]) -> float:
        """Return the seconds that one call for these shares is expected to take."""
        here = [share for share in shares if share.path == "shm" and share.keys]
        seconds = 0.0
        if here:
            keys, size = sum(share.keys for share in here), sum(share.bytes for share in here)
            seconds = self.paths["shm"].expected(keys, size)
        elsewhere = [
            self.paths[share.path].expected(share.keys, share.bytes)
            for share in shares if share.path != "shm" and share.path in self.paths and share.keys
        ]  # fmt: skip
        return seconds + max(elsewhere, default=0.0)


class LoadTimes:
    """Estimates of a client. ``shares`` returns where values are, and how many bytes they have."""

    def __init__(self, speeds: Speeds, shares: Callable[[Sequence[bytes]], Sequence[Share]]) -> None:
        self.speeds = speeds
        self._shares = shares

    def ms(self, digests: Sequence[bytes]) -> float:
        """Return the milliseconds that getting those of the values that are stored is expected to take."""
        return 1000.0 * self.speeds.expected_s(self._shares(digests)) if digests else 0.0


class Shares:
    """Finds out where values are, and how many bytes they have: one exchange with each worker on another host.

    A value that its shard's owner does not have because the shard is moving counts with the mean size of the others.
    """

    def __init__(self, routes: Routes, counters: dict[str, int], replicas: Replicas | None) -> None:
        self._routes = routes
        self._owners = Owners(routes, counters)
        self.replicas = replicas

    def __call__(self, digests: Sequence[bytes]) -> list[Share]:
        """Return a share for each worker that has some of the values."""
        shares: dict[Target, list[int]] = {}
        with self._routes.patience():
            if self.replicas is None:
                self._find(digests, shares)
            else:
                for left, copies, _ in self.replicas.rounds(digests):
                    found = self._find(copies, shares)
                    left[:] = [position for position, size in zip(left, found) if not size]
        sizes = [size for each in shares.values() for size in each if size > 0]
        mean = sum(sizes) // len(sizes) if sizes else 0
        return [
            Share(target.path, len(each), sum(size if size > 0 else mean for size in each))
            for target, each in shares.items()
        ]

    def _find(self, digests: Sequence[bytes], shares: dict[Target, list[int]]) -> list[int]:
        """Add the values' sizes to their owners' shares. Return the sizes: 0 for a miss, -1 if it is not known."""
        return self._owners.sizes(
            digests, _sizes_in,
            lambda target, _, sizes: shares.setdefault(target, []).extend(size for size in sizes if size),
        )  # fmt: skip


def _sizes_in(reader: ArenaReader, digests: list[bytes]) -> list[int]:
    words = map(reader.shard_word, digests)
    lengths = zip(reader.lengths_of_many(digests), words)
    return [length or (0 if 0 < word < PLAIN_BELOW else -1) for length, word in lengths]
