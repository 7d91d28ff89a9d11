"""The owners of a batch's keys: reads at all of them, several at the same time.

A batch is grouped by owner. Servers elsewhere get their requests first. The arenas that this process maps are read
while those answer, in the caller's thread (``Patience.together``). The slots of all keys in arenas are found in one
pass, whatever the number of arenas (``ipc/arenas.py``). Keys that their owner does not have, and that are not known to
be misses, are left for the end.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...arena.layout import ENTRY_LARGE
from ...arena.reader import COLUMN_KEYS, EACH_KEYS, ArenaReader, Unsettled
from ...cluster.lookup import PLAIN_BELOW, Unresolved
from ...constants import NO_OWNER
from ...errors import DeviceError
from ...ipc.arenas import Arenas, Columns
from ...ipc.counts import EXISTS_MANY, FOUND, HIT_BYTES, NOT_FOUND, SAMPLE_BATCHES, Word, observe
from ...ipc.steps import Steps, finish
from ...ipc.tally import Tallies
from ...net.allowance import ALLOWANCE
from ..batch import LARGE, MISS, UNAVAILABLE, Answer, Batch, NoValue, is_hit
from ..routing import Routes
from ..worker_path import Target

log = logging.getLogger("simm.client")

#: From this many keys of an arena on, one pass over columns copies them faster than a loop, which needs no slots.
COPY_KEYS: Final = 48
#: Positions of a batch by target. They ascend, as those of a second look need not.
_Groups = Collection[tuple[Target | None, Sequence[int]]]
#: Reads the keys at these positions in an arena that is mapped, given their slots if they are known, and counts those
#: that it does not return.
Local = Callable[[Target, ArenaReader, Sequence[int], Batch, NDArray[np.intp] | None], Unresolved]
#: The same at a server elsewhere, and does not count.
Remote = Callable[[Target, Sequence[int], Batch], Steps[Unresolved]]
#: Looks elsewhere for keys that their owner does not have.
Settle = Callable[[Target, Unresolved, Batch], None]


class Owners:
    """The owners of a client's keys. Any thread may call it."""

    def __init__(self, routes: Routes, counters: dict[str, int], tallies: Tallies | None = None) -> None:
        self._routes = routes
        self.counters = counters
        self._tallies = tallies or Tallies()
        self._finds = 0

    def read(self, batch: Batch, local: Local, remote: Remote, settle: Settle) -> None:
        """Read all keys of a batch, and fill in its results."""
        groups = self._routes.group(batch.digests)
        # A part of a call has one of its own in any case, so that the call notes what it loses.
        if batch.patience is None and (_may_wait(groups) or ALLOWANCE.seconds != math.inf):
            try:
                with self._routes.patience() as batch.patience:
                    self._read(groups, batch, local, remote, settle)
            finally:
                batch.patience = None  # it has ended: a second look would have no deadline by it
        else:
            self._read(groups, batch, local, remote, settle)

    def _read(self, groups: _Groups, batch: Batch, local: Local, remote: Remote, settle: Settle) -> None:
        if len(groups) == 1:
            for target, positions in groups:
                if target is None or self.leaves_out(target, batch):
                    self._leave_out(target, positions, batch)
                elif left := finish(self._visit(target, positions, batch, local, remote)):
                    self._settle(settle, target, left, batch)
            return
        unsettled: list[tuple[Target, Unresolved]] = []
        unvisited = dict(groups)

        def visit(target: Target) -> Steps[None]:
            positions = unvisited.pop(target, None)
            if positions is None:
                return  # its arena was mapped after this work was listed, and has been read
            left = yield from self._visit(target, positions, batch, local, remote)
            if left:
                unsettled.append((target, left))

        def visit_arenas() -> None:
            mapped = [
                (target, target.reader, unvisited[target]) for target in unvisited
                if target is not None and target.reader is not None
            ]  # fmt: skip
            for (target, reader, positions), slots in zip(mapped, self._slots_in(mapped, batch)):
                del unvisited[target]
                left = self._visit_arena(target, reader, positions, batch, local, slots)
                if left:
                    unsettled.append((target, left))

        elsewhere = [target for target in unvisited if target is not None and target.reader is None]
        if elsewhere:
            assert batch.patience is not None  # see _may_wait
            batch.patience.together([(target, visit(target)) for target in elsewhere], visit_arenas)
        visit_arenas()  # there is always time to look into them; who asks a worker turns to it by ``has_time_for``
        for target, positions in unvisited.items():
            self._leave_out(target, positions, batch)
        for target, left in unsettled:
            self._settle(settle, target, left, batch)

    def _settle(self, settle: Settle, target: Target, left: Unresolved, batch: Batch) -> None:
        """Look elsewhere for the keys that are left; a GPU that fails meanwhile costs these alone."""
        positions = left.positions()  # before any answer
        try:
            settle(target, left, batch)
        except DeviceError as exc:
            self._failed_for(exc, positions, batch)

    def _visit(
        self, target: Target, positions: Sequence[int], batch: Batch, local: Local, remote: Remote
    ) -> Steps[Unresolved]:
        """Read at one owner; return the keys that need another lookup. All others are counted."""
        reader = target.arena()
        if reader is not None:
            return self._visit_arena(target, reader, positions, batch, local, None)
        try:
            left = yield from remote(target, positions, batch)
        except DeviceError as exc:
            return self._failed_for(exc, positions, batch)
        if batch.sinks is not None:
            open_ = frozenset(left.positions())
            self.count(batch, [position for position in positions if position not in open_] if open_ else positions)
        return left

    def _visit_arena(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, local: Local,
        slots: NDArray[np.intp] | None,
    ) -> Unresolved:  # fmt: skip
        try:
            return local(target, reader, positions, batch, slots)
        except DeviceError as exc:
            return self._failed_for(exc, positions, batch)

    def _failed_for(self, exc: DeviceError, positions: Sequence[int], batch: Batch) -> Unresolved:
        self.device_failed(exc, len(positions))
        for position in positions:
            batch.results[position] = UNAVAILABLE
        return Unresolved()

    def _slots_in(
        self, mapped: Sequence[tuple[Target, ArenaReader, Sequence[int]]], batch: Batch
    ) -> Sequence[NDArray[np.intp] | None]:
        """Return the slots of all keys in each arena, found in one pass, if a read makes use of them."""
        counts = [len(positions) for _, _, positions in mapped]
        if len(mapped) < 2 or max(counts) < COPY_KEYS or batch.sinks is None:
            return [None] * len(mapped)
        keys = Columns([batch.digests[position] for _, _, positions in mapped for position in positions])
        arenas = Arenas([reader for _, reader, _ in mapped], np.repeat(np.arange(len(mapped)), counts))
        slots = arenas.slots_of(keys)
        ends = itertools.accumulate(counts)
        return [slots[end - count : end] for end, count in zip(ends, counts)]

    def find(self, batch: Batch, settle: Settle) -> bool:
        """Find out which keys are stored, if their owners are several and their arenas are all mapped, and count them.

        O(keys). Return False with nothing done otherwise: :meth:`read` does it.
        """
        router = self._routes.router
        if router is None or router.sole is not None:
            return False
        if router.context.epoch is not None and router.context.epoch.epoch:
            return False  # it looks at no entry
        table = router.table
        keys = Columns(batch.digests)
        owners = table.owners.take(keys.shards)
        numbers = sorted(set(owners.tolist()))
        if not numbers or numbers[-1] == NO_OWNER:
            return False
        targets = [table.by_position[number] for number in numbers]
        readers = [reader for target in targets if (reader := target.reader) is not None]
        if len(readers) < len(targets):
            return False
        which = np.searchsorted(np.array(numbers, np.uint16), owners)
        self._finds += 1
        began = 0 if self._finds % SAMPLE_BATCHES else time.perf_counter_ns()
        hits, words = Arenas(readers, which).contain(keys)
        if began:
            observe(readers[0].counts, EXISTS_MANY, time.perf_counter_ns() - began)
        _count_found(readers, which, hits, batch.digests)
        batch.results = hits.tolist()
        open_ = np.flatnonzero(~hits & (words - np.uint64(1) >= np.uint64(PLAIN_BELOW - 1)))
        if open_.size:
            lefts = [Unresolved() for _ in targets]
            for position in open_.tolist():
                lefts[which[position]].by_word(position, int(words[position]))
            before = batch.patience
            try:  # with one deadline for all of them
                with self._routes.patience() if before is None else nullcontext(before) as batch.patience:
                    for target, left in zip(targets, lefts):
                        if left:
                            settle(target, left, batch)
            finally:
                batch.patience = before
        else:
            batch.plain = True
        return True

    # -- results ------------------------------------------------------------------------------------

    def sizes(
        self, digests: Sequence[bytes], here: Callable[[ArenaReader, list[bytes]], list[int]],
        note: Callable[[Target, Sequence[int], list[int]], None],
    ) -> list[int]:  # fmt: skip
        """Return the sizes of values: 0 for a miss, -1 if it is not known. One exchange with each server elsewhere.

        ``here`` returns those in an arena that is mapped. ``note`` is called with each owner that answers, its keys'
        positions, and their sizes.
        """
        batch = Batch(digests, None)
        batch.results[:] = [0] * len(digests)

        def take(target: Target, positions: Sequence[int], sizes: list[int]) -> None:
            for position, size in zip(positions, sizes):
                batch.results[position] = size
            note(target, positions, sizes)

        def local(target: Target, reader: ArenaReader, positions: Sequence[int], *_: object) -> Unresolved:
            take(target, positions, here(reader, [digests[position] for position in positions]))
            return Unresolved()

        def remote(target: Target, positions: Sequence[int], _: Batch) -> Steps[Unresolved]:
            tcp = target.tcp
            if tcp is not None:
                sizes = tcp.sizes([digests[position] for position in positions])
                take(target, positions, (yield from self._routes.call_tcp(target, tcp, sizes)))
            return Unresolved()

        self.read(batch, local, remote, lambda *_: None)
        return batch.results

    def leaves_out(self, target: Target, batch: Batch) -> bool:
        """Return whether the call has no time left for this server. An arena that is mapped costs no wait."""
        return batch.patience is not None and not batch.patience.has_time_for(target) and target.reader is None

    def in_time(self, reads: Mapping[Target, list[int]], batch: Batch) -> Iterator[tuple[Target, list[int]]]:
        """Yield what is read at servers that the call has time for. Count the keys of the others as late."""
        for target, positions in reads.items():
            if self.leaves_out(target, batch):
                self.count_unavailable(positions, batch, late=True)
            else:
                yield target, positions

    def count(self, batch: Batch, positions: Sequence[int]) -> None:
        """Count the hits and the misses among these."""
        hits = misses = 0
        for position in positions:
            got = batch.results[position]
            if got == MISS:
                misses += 1
            elif is_hit(got):
                hits += 1
        self.counters["hits"] += hits
        self.counters["misses"] += misses

    def count_unavailable(self, positions: Sequence[int], batch: Batch, *, late: bool) -> None:
        """Count keys whose owner cannot be asked: there is none or, if ``late``, the call has no time left for it."""
        count = len(positions)
        if batch.sinks is not None:
            for position in positions:
                batch.results[position] = UNAVAILABLE
            if late:
                batch.late.update(positions)
        self.counters["outages"] += count

    def _leave_out(self, target: Target | None, positions: Sequence[int], batch: Batch) -> None:
        """Count keys that have no owner, or for whose owner there is no time, where misses are counted too."""
        self.count_unavailable(positions, batch, late=target is not None)
        if batch.sinks is not None:
            self.count_moved(None, batch, positions)

    def count_moved(self, counts: memoryview | None, batch: Batch, positions: Sequence[int]) -> None:
        """Count the answers of second looks; ``counts``: of the owner's arena, None if the owner is elsewhere."""
        unreachable = late = 0
        for position in positions:
            got, is_late = batch.results[position], position in batch.late
            if counts is not None:
                count_moved(counts, got, sum(batch.bytes_read((position,))), late=is_late)
            elif is_late and got in (MISS, UNAVAILABLE):
                late += 1
            elif got == UNAVAILABLE:
                unreachable += 1
            else:
                count_moved(self._tallies.tcp, got, sum(batch.bytes_read((position,))), late=False)
        self._tallies.unanswered(self._tallies.tcp, unreachable, late)

    def device_failed(self, exc: DeviceError, count: int) -> NoValue:
        """Count and log the failure of a GPU; return UNAVAILABLE."""
        log.warning("reading into GPU memory: %s", str(exc))  # a handler that kept the exception would keep the arena
        self.counters["outages"] += count
        return UNAVAILABLE


def exist_in(reader: ArenaReader, positions: Sequence[int], batch: Batch, *, observed: bool) -> Unresolved:
    """Find out which keys one arena has, and count them, if the batch is counted.

    ``observed``: note how long that takes, too. O(keys).
    """
    unresolved = Unresolved()
    digests = batch.digests
    whole = len(positions) == len(digests)
    wanted = digests if whole else [digests[position] for position in positions]
    began = time.perf_counter_ns() if observed else 0
    open_: list[tuple[int, int]] = []
    if len(wanted) < EACH_KEYS:
        hits = reader.contains_many(wanted)
        found = hits.count(True)
        if found < len(hits):
            open_ = [(at, reader.shard_word(wanted[at])) for at, hit in enumerate(hits) if not hit]
    else:
        there, words = reader.contain(wanted)
        hits = there.tolist()
        found = int(np.count_nonzero(there))
        moving = words - np.uint64(1) >= np.uint64(PLAIN_BELOW - 1)  # 0 - 1 wraps
        if moving.tobytes().count(1):  # faster than numpy's any
            places = np.flatnonzero(~there & moving)
            open_ = list(zip(places.tolist(), words[places].tolist()))
    if batch.counted:
        counts = reader.counts
        if observed:
            observe(counts, EXISTS_MANY, time.perf_counter_ns() - began)
        absent = len(hits) - found  # no call while counting
        if absent:
            gone = [at for at, hit in enumerate(hits) if not hit]
            reader.missed(wanted[gone[len(gone) // 2]])
        counts[FOUND] += found
        counts[NOT_FOUND] += absent
    if whole:
        batch.results = hits
    else:
        for position, hit in zip(positions, hits):
            batch.results[position] = hit
    for at, word in open_:
        if not 0 < word < PLAIN_BELOW:
            unresolved.by_word(at if whole else positions[at], word)  # a second look's need not ascend
    batch.plain = whole and not unresolved
    return unresolved


def _count_found(
    readers: Sequence[ArenaReader], which: NDArray[np.intp], hits: NDArray[np.bool_], digests: Sequence[bytes]
) -> None:
    """Count keys in several arenas as :func:`exist_in` does in one. ``which``: of ``readers`` is each key's."""
    places = np.flatnonzero(~hits)
    missing = which[places]
    absent = np.bincount(missing, minlength=len(readers))
    found = np.bincount(which, minlength=len(readers)) - absent
    one = np.zeros(len(readers), np.intp)
    one[missing] = places  # of several the last
    for reader, more, less, at in zip(readers, found.tolist(), absent.tolist(), one.tolist()):
        counts = reader.counts
        if less:
            reader.missed(digests[at])
        counts[FOUND] += more
        counts[NOT_FOUND] += less


def holds_in(
    lengths: Sequence[int], _target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch,
    _: NDArray[np.intp] | None,
) -> Unresolved:  # fmt: skip
    """Find out which keys one arena has, with values of these lengths. What changes just now counts as absent."""
    digests, results = batch.digests, batch.results
    if len(positions) >= COLUMN_KEYS:
        keys, slots = reader.candidates([digests[position] for position in positions])
        found = reader.locate_many(keys, slots)
        wanted = np.array([lengths[position] for position in positions])
        found.settled[found.lengths != wanted] = False
        kept = reader.confirm_many(found)
        for position, hit in zip(positions, kept.tolist()):
            results[position] = int(hit)
        if kept.all():
            return Unresolved()
        positions = [positions[number] for number in np.flatnonzero(~kept & (slots >= 0)).tolist()]
    for position in positions:
        digest = digests[position]
        try:
            entry = reader.locate(digest)
        except Unsettled:
            continue
        if entry is None or entry.length != lengths[position] or entry.flags & ENTRY_LARGE:
            continue
        if reader.confirm(digest, entry.slot, entry.seq) and reader.is_own(entry):
            reader.visited[entry.slot] = 1
            results[position] = 1
    return Unresolved()


def leave_open(positions: Sequence[int], batch: Batch) -> None:
    """Note keys of which nobody has said yet whether they are stored. To a read they are misses until then."""
    if batch.sinks is None:
        for position in positions:
            batch.results[position] = UNAVAILABLE


def count_moved(counts: memoryview, got: Answer, size: int, *, late: bool) -> None:
    """Count the answer of a second look: ``size`` bytes of a hit. ``late``: a server had not answered in time."""
    if is_hit(got):
        counts[Word.MOVED_HITS] += 1
        counts[HIT_BYTES] += size
    elif late and got in (MISS, UNAVAILABLE):
        counts[Word.TIMEOUT] += 1
    elif got == MISS:
        counts[Word.MOVING] += 1
    elif got == UNAVAILABLE:
        counts[Word.UNREACHABLE] += 1
    elif got is not LARGE:
        counts[Word.WRONG_SIZE] += 1


def _may_wait(groups: _Groups) -> bool:
    """Return whether a call could wait for more than one exchange's deadline at these servers."""
    return len(groups) > 1 or any(target is not None and target.fresh for target, _ in groups)
