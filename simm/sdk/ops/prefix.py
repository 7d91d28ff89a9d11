"""How many leading keys of a prompt are stored now, where they are, and how long loading them is expected to take.

Every key that is counted has been found in its arena, in a slot that no write was changing (:func:`stored_many`). So a
hole that eviction has left ends the prefix, wherever it is, and so does a worker's death in the middle of a put:
nothing is counted that was not stored during the call. What happens after the call is another matter, as for any read.

Bisection makes the call cheap where little is stored, and needs no server where all arenas are mapped:

1. Probe the first key of the last page, else of the first page, else bisect. Without holes this ends at the first page
   that is not stored; with holes at some page that is not stored, behind one that is.
2. Make the digests of the keys before that page, and look for all of them at once. The prefix ends at the first one
   that is not there. If there is none, it ends at the page that the probes have not found.

Both ends are looked at, so the answer is the whole prefix, with or without holes. The probes assume nothing that step 2
does not check. ``exact=False`` leaves step 2 out but for the last page. It is right if pages of a prompt are evicted
from its end on, which a single worker does as a rule and several workers do not.

A key that its owner does not have, of a shard that is moving, and keys at workers on other hosts are not decided by an
arena here. Then all keys are asked for, with one exchange for each server, and nothing is bisected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arena.hashing import Hasher
from ...arena.reader import VECTOR_KEYS, ArenaReader, Unsettled
from ...cluster.lookup import PLAIN_BELOW
from ...errors import UsageError
from ..routing import Routes
from ..worker_path import Target
from .load_time import Share, Shares, Speeds
from .owners import Owners

#: Positions of a batch that a probe or a pass can tell nothing of.
_UNKNOWN: Final = -1
#: A worker, and the positions of its keys.
_Place = tuple[Target, NDArray[np.int64]]


def stored_length(reader: ArenaReader, digest: bytes) -> int:
    """Return the length of a value that is stored for certain, else 0. Does not mark it as used.

    An entry in a write counts as absent, unlike in ``contains``: the write may be its first one.
    """
    try:
        found = reader.locate(digest)
    except Unsettled:
        return 0
    if found is None or not reader.confirm(digest, found.slot, found.seq) or not reader.is_own(found):
        return 0
    return found.length


def stored_many(reader: ArenaReader, digests: Sequence[bytes]) -> NDArray[np.int64]:
    """Do :func:`stored_length` for a batch."""
    if len(digests) < VECTOR_KEYS:
        return np.array([stored_length(reader, digest) for digest in digests], np.int64)
    keys, slots = reader.candidates(digests)
    found = reader.locate_many(keys, slots)
    kept = reader.confirm_many(found, touch=False)
    lengths = found.lengths * kept
    for position in np.flatnonzero((slots >= 0) & ~kept).tolist():
        lengths[position] = stored_length(reader, digests[position])  # it has flags, or was in a write
    return lengths


def _sizes_in(reader: ArenaReader, digests: list[bytes]) -> list[int]:
    """Return the sizes of values in one arena: 0 for a miss, _UNKNOWN where the shard moves."""
    return [
        size or (0 if 0 < reader.shard_word(digest) < PLAIN_BELOW else _UNKNOWN)
        for digest, size in zip(digests, stored_many(reader, digests).tolist())
    ]


class Prefix(NamedTuple):
    """The leading keys that are stored.

    Attributes:
        keys: their number, a multiple of the call's ``group``.
        by_host: how many of them each data server has, by its name. Empty without ``exact``, and with two copies. Not
            to be changed.
        here: how many of them are in shared memory of this host; likewise.
        load_ms: what getting all of them with one call is expected to take, milliseconds.
        exact: True if each of them was looked for.
    """

    keys: int
    by_host: dict[str, int]
    here: int
    load_ms: float
    exact: bool


NOTHING: Final = Prefix(0, {}, 0, 0.0, True)


class NotHere(Exception):
    """An arena of this process does not decide it."""


class Prefixes:
    """A client's questions for prefixes. Any thread may call it."""

    def __init__(
        self, routes: Routes, hasher: Hasher, speeds: Speeds, counters: dict[str, int],
        stored: Callable[[Sequence[bytes]], list[bool]], shares: Shares,
    ) -> None:  # fmt: skip
        self._routes = routes
        self._digest = hasher
        self._speeds = speeds
        self._owners = Owners(routes, counters)
        #: Asks whether keys are stored, wherever they are: for those that only several questions decide.
        self._stored = stored
        #: Returns where values are, for those that have two copies.
        self._shares = shares
        self._replicas = shares.replicas

    def rehash(self, hasher: Hasher) -> None:
        """Use other digests from now on."""
        self._digest = hasher

    def find(self, keys: Sequence[str], group: int, exact: bool) -> Prefix:
        """Return the prefix. Raises UsageError. Without any server if all arenas are mapped: O(log keys + prefix)."""
        if isinstance(keys, str):
            raise UsageError(f"keys is a list of keys, not the one text {keys[:40]!r}")
        if type(group) is not int or group < 1:
            raise UsageError(f"group is the number of keys of a page, not {group!r}")
        pages = len(keys) // group
        if not pages:
            self._routes.restart()  # raises if the client is closed
            return NOTHING
        if self._replicas is None:
            try:
                found = self._bisect(keys, group, pages)
                return self._check(keys, group, found) if exact else self._check_last(keys, group, found)
            except NotHere:
                pass
        with self._routes.patience():
            return self._ask(self._digest.many(keys[: pages * group]), group)

    # -- by the arenas of this process ------------------------------------------------------------------

    def _probe(self, key: str) -> int:
        """Return the length of a stored value, 0 for a miss. Raises NotHere."""
        digest = self._digest(key)
        target = self._routes.target(digest)
        reader = target.reader if target is not None else None
        if reader is None:
            raise NotHere
        length = stored_length(reader, digest)
        if not length and not 0 < reader.shard_word(digest) < PLAIN_BELOW:
            raise NotHere
        return length

    def _bisect(self, keys: Sequence[str], group: int, pages: int) -> int:
        """Return the number of a page whose first key is not stored, behind one where it is, or ``pages``."""
        if self._probe(keys[(pages - 1) * group]):
            return pages
        low, high = 0, pages - 1
        if pages > 1 and not self._probe(keys[0]):
            return 0
        while low + 1 < high:
            middle = (low + high) // 2
            if self._probe(keys[middle * group]):
                low = middle
            else:
                high = middle
        return high

    def _check(self, keys: Sequence[str], group: int, pages: int) -> Prefix:
        """Look for all keys of these pages. Return the prefix that is there. Raises NotHere."""
        if not pages:
            return NOTHING
        digests = self._digest.many(keys[: pages * group])
        sizes = np.zeros(len(digests), np.int64)
        places = [
            (target, np.arange(len(digests)) if type(positions) is range else np.array(positions, np.int64))
            for target, positions in self._routes.group(digests) if target is not None
        ]  # fmt: skip
        for target, positions in places:
            reader = target.reader
            if reader is None:
                raise NotHere
            wanted = digests if len(positions) == len(digests) else [digests[position] for position in positions]
            found = stored_many(reader, wanted)
            if not found.all():
                for position in np.flatnonzero(found == 0).tolist():
                    if not 0 < reader.shard_word(wanted[position]) < PLAIN_BELOW:
                        raise NotHere
            sizes[positions] = found
        return self._answer(sizes, group, places)

    def _check_last(self, keys: Sequence[str], group: int, pages: int) -> Prefix:
        """Look for all keys of the last of these pages. Return that as the prefix, if they are there."""
        last = [self._probe(key) for key in keys[(pages - 1) * group : pages * group]] if pages else []
        if not pages or not all(last):
            return self._check(keys, group, pages)
        seconds = self._speeds.expected_s([Share("shm", pages * group, sum(last) * pages)])
        return Prefix(pages * group, {}, 0, 1000.0 * seconds, False)

    # -- by all servers ---------------------------------------------------------------------------------

    def _ask(self, digests: Sequence[bytes], group: int) -> Prefix:
        """Look for all keys, wherever they are."""
        places: list[_Place] = []
        sizes = np.zeros(len(digests), np.int64)
        if self._replicas is None:
            sizes[:] = self._sizes(digests, places)
            open_ = self._open(sizes)
            if open_:
                hits = self._stored([digests[position] for position in open_])
                mean = int(sizes[sizes > 0].mean()) if (sizes > 0).any() else 1
                sizes[open_] = [mean if hit else 0 for hit in hits]
        else:
            sizes[:] = self._replicas.stored_many(digests)
            found = self._answer(sizes, group, ())
            seconds = self._speeds.expected_s(self._shares(digests[: found.keys]))
            return found._replace(load_ms=1000.0 * seconds)
        return self._answer(sizes, group, places)

    @staticmethod
    def _open(sizes: NDArray[np.int64]) -> list[int]:
        """Return the positions that are undecided, before the first that is a miss."""
        misses = np.flatnonzero(sizes == 0)
        end = int(misses[0]) if misses.size else len(sizes)
        found: list[int] = np.flatnonzero(sizes[:end] == _UNKNOWN).tolist()
        return found

    def _sizes(self, digests: Sequence[bytes], places: list[_Place]) -> list[int]:
        """Return the values' sizes: 0 for a miss, _UNKNOWN where the shard moves. One exchange for each server."""
        return self._owners.sizes(
            digests, _sizes_in,
            lambda target, positions, _: places.append((target, np.asarray(positions, np.int64))),
        )  # fmt: skip

    def _answer(self, sizes: NDArray[np.int64], group: int, places: Sequence[_Place]) -> Prefix:
        """Return the prefix by the sizes of all keys that were looked for."""
        misses = np.flatnonzero(sizes <= 0)
        count = (int(misses[0]) if misses.size else len(sizes)) // group * group
        by_host: dict[str, int] = {}
        here = 0
        shares: list[Share] = []
        for target, positions in places:
            mine = positions if count == len(sizes) else positions[positions < count]
            if not mine.size:
                continue
            by_host[target.info.node] = by_host.get(target.info.node, 0) + len(mine)
            path = target.path if target.reader is None else "shm"
            here += len(mine) if path == "shm" else 0
            shares.append(Share(path, len(mine), int(sizes[mine].sum())))
        return Prefix(count, by_host, here, 1000.0 * self._speeds.expected_s(shares), True)

