"""Two copies of each value, on different nodes, for namespaces whose values are hot or expensive.

Only the client knows of the copies; servers do not. The first copy lies under the key's digest. The second lies under a
digest derived from that one, in the shard that it falls into. Its owner must be on another node, or one death would
take both copies. So there are four candidates, and the client takes the first whose owner is not on the primary owner's
node, by the current map. There is no second copy on a single node, and with n nodes with probability (1/n)^4. The
digest is derived from the key's digest, which contains the namespace, so a caller that has digests only can do it.

What can go wrong
-----------------
* *The copies differ.* Replicated namespaces are put-once: a put of an existing key stores nothing and returns True. The
  check is best effort: if two clients put different values at the same moment, a read returns either. Callers that
  change values must not use replicas, or change them by :meth:`Replicas.replace` only.
* *A value is replaced while a server is away.* It is refused where any copy is found: the server may have another one,
  which a read would return later. Where none is found the value counts as new, as else nothing could be stored. If that
  server has the only copy, its old value comes back with it.
* *A deleted value comes back.* Delete goes to the primary and to all candidates. It misses a copy on a server that
  cannot be reached, and reads find that copy when the server is back. A new key or namespace stops serving a value for
  certain.
* *A map change moves the second copy to another candidate.* Reads try the two current copies and then all other
  candidates. Nothing is copied again: a value that has lost a copy has one until it is deleted and put again.
* *One copy was stored, the other was not.* The put succeeds (True) and is counted as ``single_copies``.

Costs: twice the memory. A put first asks whether the key exists, and then takes twice as long. A hit goes to one of
both copies at random, so a hot key has two servers. A miss asks up to five times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

from ...arena.hashing import TAG_AT, shard_of
from ...constants import DIGEST_BYTES
from ...host.buffers import Span
from ...ipc.counts import Word
from ...ipc.patience import Patience
from ...wire.messages import Status
from ..batch import MISS, UNAVAILABLE, Sink, SplitView, View
from ..reads import Gets
from ..routing import Routes
from ..worker_path import Target
from ..writes import Puts

CANDIDATES: Final = 4

_PERSONS: Final = tuple(b"simm copy %d" % number for number in range(1, CANDIDATES + 1))


def candidates(digest: bytes, *, keep: int = DIGEST_BYTES) -> list[bytes]:
    """Return the digests under which a second copy may lie, in order of preference.

    ``keep``: from where on they end as ``digest`` does, with its epoch.
    """
    made = (blake2b(digest, digest_size=DIGEST_BYTES, person=person).digest() for person in _PERSONS)
    return [each[:keep] + digest[keep:] for each in made]


def second(digest: bytes, node_of: Callable[[bytes], str | None], *, keep: int = DIGEST_BYTES) -> bytes | None:
    """Return the candidate for the second copy, or None if no other node can hold it.

    ``node_of`` returns the node of a digest's owner, or None without an owner. ``keep`` as for :func:`candidates`.
    """
    primary = node_of(digest)
    for candidate in candidates(digest, keep=keep):
        node = node_of(candidate)
        if node is not None and node != primary:
            return candidate
    return None


class Replicas:
    """Read, store and delete two copies. Any thread may call it."""

    def __init__(
        self, routes: Routes, gets: Gets, puts: Puts, counters: dict[str, int], rng: random.Random | None = None
    ) -> None:
        self._routes = routes
        self._gets = gets
        self._puts = puts
        self.counters = counters
        self._random = (rng or random.Random()).random

    def _node_of(self, digest: bytes) -> str | None:
        owner: Target | None = self._routes.table().owner(shard_of(digest))
        return None if owner is None else owner.info.node

    def second(self, digest: bytes) -> bytes | None:
        """Return where the second copy belongs by the current map, or None."""
        return second(digest, self._node_of, keep=self._keep())

    def _keep(self) -> int:
        """Return from where on digests end with an epoch."""
        router = self._routes.router
        epoch = router.context.epoch if router is not None else None
        return TAG_AT if epoch is not None and epoch.epoch else DIGEST_BYTES

    def order(self, digest: bytes) -> list[bytes]:
        """Return all digests under which the value may be, in the order in which to try them."""
        self._routes.target(digest)  # makes the router after a fork
        other = self.second(digest)
        all_others = candidates(digest, keep=self._keep())
        if other is None:
            return [digest, *all_others]
        rest = [each for each in all_others if each != other]
        return [digest, other, *rest] if self._random() < 0.5 else [other, digest, *rest]

    # -- mutations --------------------------------------------------------------------------------------

    def put(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """Store values that do not exist yet, twice if there are two nodes; return a Status for each."""
        with self._routes.patience() as patience:
            return self._put(digests, sources, patience)

    def _put(
        self, digests: Sequence[bytes], sources: Sequence[memoryview | Span], patience: Patience
    ) -> list[int]:
        there = self.stored_many(digests, patience)
        statuses = [Status.OK] * len(digests)
        todo = [position for position, hit in enumerate(there) if not hit]
        # Of a duplicate key in a batch the later value is stored, as without replicas.
        last = {digests[position]: position for position in todo}
        todo = [position for position in todo if last[digests[position]] == position]
        if not todo:
            count = len(statuses)
            self.counters["puts"] += count
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
        stored = self._puts.store(copies, values, patience)
        for at, position in enumerate(todo):
            status = stored[at]
            if at in seconds:
                other_status = stored[seconds[at]]
                if (status == Status.OK) != (other_status == Status.OK):
                    self.counters["single_copies"] += 1
                if other_status == Status.OK or (other_status == Status.UNAVAILABLE and status != Status.OK):
                    status = other_status  # unless one is stored, nobody knows that neither is
            statuses[position] = status
        for position, hit in enumerate(there):
            if not hit:
                statuses[position] = statuses[last[digests[position]]]
        self._puts.count(digests, statuses)
        return statuses

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[int]:
        """Drop all copies that can be reached. Return OK if there was one, else UNAVAILABLE if one may be left.

        ``sizes`` as in :meth:`Puts.delete`.
        """
        copies = self._copies(digests)
        answers = self._puts.delete(
            copies, None if sizes is None else [size for size in sizes for _ in range(CANDIDATES + 1)]
        )
        return self._one_of_each(answers)

    def replace(
        self, digests: Sequence[bytes], sources: Sequence[memoryview | Span], *, refuse: bool = True
    ) -> list[int]:
        """Store values in place of those that are there, twice if there are two nodes; return a Status for each.

        UNAVAILABLE if an old copy may be left, also where the other one is new. Nothing is put where a copy is found
        and another one cannot be asked for, unless ``refuse`` is False: for values of which readers know the newest.
        Copies are put over, not dropped first: so a second attempt finds one, too, and nobody finds none in between. Of
        a duplicate key the later value is stored. One exchange with each server to look, and one to put.
        """
        statuses: list[int] = [Status.UNAVAILABLE] * len(digests)
        if digests:
            self._routes.target(digests[0])  # makes the router after a fork
        copies = self._copies(digests)
        puts: list[bytes] = []
        values: list[memoryview | Span] = []
        puts_of: dict[int, slice] = {}
        left: set[int] = set()
        last = {digest: position for position, digest in enumerate(digests)}
        with self._routes.patience() as patience:
            found = self._gets.look_many(copies, patience)
            for position, digest in enumerate(digests):
                mine = found[self._all_of(position)]
                if UNAVAILABLE in mine and 1 in mine:
                    left.add(position)
                if last[digest] != position or (refuse and position in left):
                    continue
                other, first = self.second(digest), len(puts)
                puts += [digest] if other is None else [digest, other]
                values += [sources[position]] * (len(puts) - first)
                puts_of[position] = slice(first, len(puts))
            stored = self._puts.store(puts, values, patience) if puts else []
            new = {copy for copy, status in zip(puts, stored) if status == Status.OK}
            old: list[bytes] = []
            old_of: list[int] = []
            for position, at in puts_of.items():
                answers = stored[at]
                if Status.OK not in answers:
                    statuses[position] = Status.UNAVAILABLE if Status.UNAVAILABLE in answers else answers[0]
                    continue
                every = self._all_of(position)
                unseen = {copy for copy, got in zip(copies[every], found[every]) if got == UNAVAILABLE}
                statuses[position] = Status.UNAVAILABLE if position in left and unseen - new else Status.OK
                if answers.count(Status.OK) < len(answers):
                    self.counters["single_copies"] += 1
                for copy, got in zip(copies[every], found[every]):
                    if got == 1 and copy not in new:
                        old.append(copy)
                        old_of.append(position)
            for position, status in zip(old_of, self._puts.delete(old) if old else ()):
                if status not in (Status.OK, Status.NOT_FOUND):
                    statuses[position] = Status.UNAVAILABLE
        statuses = [statuses[last[digest]] for digest in digests]
        self._puts.count(digests, statuses)
        return statuses

    def keep(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        """Keep all copies, as :meth:`Puts.keep` does. Return OK if there was one, else why not."""
        return self._one_of_each(self._puts.keep(self._copies(digests), how, seconds))

    def _copies(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return all digests under which the values may be."""
        keep = self._keep()
        return [each for digest in digests for each in (digest, *candidates(digest, keep=keep))]

    @staticmethod
    def _all_of(position: int) -> slice:
        """Return where the copies of one value are in what :meth:`_copies` returns."""
        return slice(position * (CANDIDATES + 1), (position + 1) * (CANDIDATES + 1))

    @staticmethod
    def _one_of_each(answers: Sequence[int]) -> list[int]:
        """Return for each value OK if one of its copies has it, else what is not NOT_FOUND, if there is such."""
        statuses = []
        for at in range(0, len(answers), CANDIDATES + 1):
            mine = answers[at : at + CANDIDATES + 1]
            if Status.OK in mine:
                statuses.append(Status.OK)
            else:
                statuses.append(next((status for status in mine if status != Status.NOT_FOUND), Status.NOT_FOUND))
        return statuses

    # -- reads ------------------------------------------------------------------------------------------

    def read(self, digests: Sequence[bytes], sinks: Sequence[Sink]) -> list[Any]:
        """Read each value from whichever copy exists; results as of :meth:`Gets.read_many`."""
        with self._routes.patience() as patience:
            return self._read(digests, sinks, patience)

    def _read(self, digests: Sequence[bytes], sinks: Sequence[Sink], patience: Patience) -> list[Any]:
        results: list[Any] = [UNAVAILABLE] * len(digests)
        for left, copies, last in self.rounds(digests):
            still = []
            for position, result in zip(
                left, self._gets.read_many(copies, [sinks[each] for each in left], patience)
            ):  # fmt: skip
                absent = result in (MISS, UNAVAILABLE)
                if not absent or result == MISS:
                    results[position] = result
                if absent:
                    still.append(position)
                    if result == MISS and not last:
                        self.counters["misses"] -= 1  # a miss counts once, however many copies were tried
            left[:] = still
        return results

    def read_copies(self, digest: bytes, size: int) -> list[tuple[Any, bytearray]]:
        """Read all copies of a value of ``size`` bytes, the primary first; return for each the answer and the bytes.

        The answers are those of :meth:`Gets.read_many`. What is not there is not read, so no misses are counted, but
        for a copy dropped in between. That one is UNAVAILABLE, as it may also have moved. One exchange with each server
        to look, and one with those that have a copy.
        """
        self._routes.target(digest)  # makes the router after a fork
        copies = self._copies([digest])
        rooms = [bytearray(size) for _ in copies]
        with self._routes.patience() as patience:
            answers: list[Any] = list(self._gets.look_many(copies, patience))
            there = [at for at, got in enumerate(answers) if got == 1]
            if there:
                sinks = [memoryview(rooms[at]) for at in there]
                read = self._gets.read_many([copies[at] for at in there], sinks, patience)
                misses = read.count(MISS)  # dropped in between, or the shard has moved
                self.counters["misses"] -= misses
                for at, got in zip(there, read):
                    answers[at] = UNAVAILABLE if got == MISS else got
        return list(zip(answers, rooms))

    def stored_many(self, digests: Sequence[bytes], patience: Patience | None = None) -> list[bool]:
        """Return for each whether there is a copy."""
        if patience is None:
            with self._routes.patience() as patience:
                return self.stored_many(digests, patience)
        hits = [False] * len(digests)
        for left, copies, _last in self.rounds(digests):
            for position, hit in zip(left, self._gets.stored_many(copies, patience)):
                hits[position] = hit
            left[:] = [position for position in left if not hits[position]]
        return hits

    def rounds(self, digests: Sequence[bytes]) -> Iterator[tuple[list[int], list[bytes], bool]]:
        """Yield, copy by copy, the positions that are left, the digests to try, and whether they are the last.

        The caller takes what it has found out of the list of positions.
        """
        orders = [self.order(digest) for digest in digests]
        left = list(range(len(digests)))
        for step in range(CANDIDATES + 1):
            if left or not step:
                yield left, [orders[position][step] for position in left], step == CANDIDATES

    def view(self, digest: bytes) -> View:
        """Return a view of whichever copy exists; it is false if none does."""
        with self._routes.patience() as patience:
            for step, copy in enumerate(self.order(digest)):
                misses = self.counters["misses"]
                target = self._routes.target(copy)
                reader = target.reader if target is not None else None
                absent = reader.counts[Word.ABSENT] if reader is not None else 0
                if target is not None and not patience.has_time_for(target) and target.reader is None:
                    target = None
                view = self._gets.view(target, copy)
                if view or type(view) is SplitView:
                    return view
                if step < CANDIDATES:
                    self.counters["misses"] = misses
                    if reader is not None:
                        self.counters["misses"] -= reader.counts[Word.ABSENT] - absent
        return View.miss()
