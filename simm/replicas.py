"""Two copies of each value, on different nodes: for namespaces whose values are hot or dear.

It is the client's work alone; servers know nothing of it. Copy 0 lies under the key's digest, as ever. The other
one lies under a digest derived from that, in whatever shard this falls into. Its owner must be on another node, or
one death would take both, so there are four candidates: the first whose owner's node differs from the primary
owner's, by the map of the moment, is taken. With one node, or by a chance of (1/n)^4 with n nodes, there is none,
and no second copy.

Derived from the key's digest and not from the key: whoever holds digests only (``simm.kv``, movers) can do it, the
namespace is in it already, and two keys share a derived digest no more probably than any two keys do.

What can go wrong
-----------------
* *The copies differ.* Replicated namespaces are put-once: a key's value never changes (content hashes have this by
  nature). A put of a key that exists stores nothing and says True. Refusing is best effort: two clients that put
  different values at the same moment may leave one in each copy, and then it is chance which is read. Who needs to
  change values must not use replicas.
* *A deleted value comes back.* Delete goes to the primary and to all candidates. A copy on a server that cannot be
  reached then is not deleted, and is read again when the server is back. Known and accepted: delete is for
  housekeeping here; what must not be served any more needs a new key or namespace.
* *A map change moves a copy to another candidate.* Reads look at all candidates in order after the two copies of
  the moment, so the value is still found under the old one. Nothing is copied again: a value that had lost a copy
  has one until it is put anew (that put finds it stored, and so does not help either: delete it first).
* *One copy was stored, the other was not.* The put is good (True), and counted as ``single_copies``.

What it costs
-------------
Twice the memory; a put asks first whether the key is there (1 us a key by shm, a round trip by TCP) and then takes
twice as long; a hit costs what it did, at random at one of both, so that a hot key has two servers; a miss asks up to
five times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final

from .batch import DOWN, MISS, Sink
from .buffers import Span
from .constants import DIGEST_BYTES
from .gets import Gets
from .hashing import shard_of
from .messages import Status
from .puts import Puts
from .routing import Routes
from .target import Target
from .view import View

CANDIDATES: Final = 4

_OK: Final = int(Status.OK)
_NOT_FOUND: Final = int(Status.NOT_FOUND)
_UNAVAILABLE: Final = int(Status.UNAVAILABLE)
_PERSONS: Final = tuple(b"simm copy %d" % number for number in range(1, CANDIDATES + 1))


def candidates(digest: bytes) -> list[bytes]:
    """Where a second copy may lie, in order. 0.5 us each."""
    return [blake2b(digest, digest_size=DIGEST_BYTES, person=person).digest() for person in _PERSONS]


def second(digest: bytes, node_of: Callable[[bytes], str | None]) -> bytes | None:
    """The candidate that holds the second copy; None when there is none.

    ``node_of`` says on which node a digest's owner is, None where nobody is.
    """
    primary = node_of(digest)
    for person in _PERSONS:
        candidate = blake2b(digest, digest_size=DIGEST_BYTES, person=person).digest()
        node = node_of(candidate)
        if node is not None and node != primary:
            return candidate
    return None


class Replicas:
    """Reads and mutations of two copies; any thread may call it."""

    def __init__(
        self, routes: Routes, gets: Gets, puts: Puts, counters: dict[str, int], rng: random.Random | None = None
    ) -> None:
        self._routes = routes
        self._gets = gets
        self._puts = puts
        self.counters = counters
        self._random = (rng or random.Random()).random

    def _node_of(self, digest: bytes) -> str | None:
        owner: Target | None = self._routes.places().owner(shard_of(digest))
        return None if owner is None else owner.info.node

    def second(self, digest: bytes) -> bytes | None:
        """Where the second copy belongs by the map of the moment."""
        return second(digest, self._node_of)

    def order(self, digest: bytes) -> list[bytes]:
        """All digests under which the value may be, in the order in which to look."""
        self._routes.target(digest)  # after a fork: makes the router
        other = self.second(digest)
        all_others = candidates(digest)
        if other is None:
            return [digest, *all_others]
        rest = [each for each in all_others if each != other]
        return [digest, other, *rest] if self._random() < 0.5 else [other, digest, *rest]

    # -- mutations --------------------------------------------------------------------------------------

    def put(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """Store values that are not there yet, twice where there are two nodes; a Status for each."""
        there = self.stored_many(digests)
        statuses = [_OK] * len(digests)
        todo = [position for position, hit in enumerate(there) if not hit]
        # Of a key that comes twice in a batch the later value is stored, as ever.
        last = {digests[position]: position for position in todo}
        todo = [position for position in todo if last[digests[position]] == position]
        if not todo:
            return statuses
        copies = [digests[position] for position in todo]
        values = [sources[position] for position in todo]
        seconds: dict[int, int] = {}
        for at, position in enumerate(todo):
            other = self.second(digests[position])
            if other is not None:
                seconds[at] = len(copies)
                copies.append(other)
                values.append(sources[position])
        stored = self._puts.store(copies, values)
        for at, position in enumerate(todo):
            status = stored[at]
            if at in seconds:
                other_status = stored[seconds[at]]
                if (status == _OK) != (other_status == _OK):
                    self.counters["single_copies"] += 1
                if other_status == _OK:
                    status = _OK
            statuses[position] = status
        for position, hit in enumerate(there):
            if not hit:
                statuses[position] = statuses[last[digests[position]]]
        good = statuses.count(_OK)
        self.counters["puts"] += good
        self.counters["put_failures"] += len(statuses) - good
        return statuses

    def delete(self, digests: Sequence[bytes]) -> list[int]:
        """Drop all copies that can be reached; OK where there was one, else UNAVAILABLE where one may be left."""
        copies = [each for digest in digests for each in (digest, *candidates(digest))]
        answers = self._puts.delete(copies)
        statuses = []
        for at in range(0, len(copies), CANDIDATES + 1):
            mine = answers[at : at + CANDIDATES + 1]
            if _OK in mine:
                statuses.append(_OK)
            else:
                statuses.append(next((status for status in mine if status != _NOT_FOUND), _NOT_FOUND))
        return statuses

    # -- reads ------------------------------------------------------------------------------------------

    def read(self, digests: Sequence[bytes], sinks: Sequence[Sink]) -> list[Any]:
        """Values from whichever copy is there; as :meth:`Gets.read_many`."""
        results: list[Any] = [DOWN] * len(digests)
        looks = [self.order(digest) for digest in digests]
        left = list(range(len(digests)))
        for step in range(CANDIDATES + 1):
            got = self._gets.read_many([looks[position][step] for position in left], [sinks[each] for each in left])
            still = []
            for position, result in zip(left, got):
                if result in (MISS, DOWN):
                    if result == MISS:
                        results[position] = MISS
                    still.append(position)
                else:
                    results[position] = result
            if step < CANDIDATES:
                # A miss is one miss, however many copies were looked for.
                self.counters["misses"] -= sum(result == MISS for result in got)
            left = still
            if not left:
                break
        return results

    def stored_many(self, digests: Sequence[bytes]) -> list[bool]:
        """Which have a copy?"""
        hits = [False] * len(digests)
        looks = [self.order(digest) for digest in digests]
        left = list(range(len(digests)))
        for step in range(CANDIDATES + 1):
            found = self._gets.stored_many([looks[position][step] for position in left])
            for position, hit in zip(left, found):
                hits[position] = hit
            left = [position for position, hit in zip(left, found) if not hit]
            if not left:
                break
        return hits

    def view(self, digest: bytes) -> View | None:
        """A view of whichever copy is there."""
        for step, copy in enumerate(self.order(digest)):
            misses = self.counters["misses"]
            view = self._gets.view(self._routes.target(copy), copy)
            if view is not None:
                return view
            if step < CANDIDATES:
                self.counters["misses"] = misses
        return None
