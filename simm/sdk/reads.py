"""Read values: find them, copy them, confirm the copy.

A read goes to the shard's owner: by shared memory into its arena on the same host, else by RDMA, else by TCP.
``cluster/lookup.py`` decides what it means that a key is not there, and where to look next; this module carries it out.
An entry that changes during each of several attempts is read from a pin, which the worker gives on request.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..arena.hashing import shard_of, words_of
from ..arena.reader import EACH_ATTEMPT, VECTOR_KEYS, ArenaReader, Unsettled
from ..cluster.lookup import HOPS, PLAIN_BELOW, Unresolved
from ..constants import LOG_GETS, VALUE_BYTES_MAX
from ..errors import DeadlineError, DeviceError, PeerError
from ..host.buffers import RELEASE_BYTES, Copier, Ranges, Span, fits, memmove
from ..host.company import COMPANY
from ..host.parts import HOST_TYPES, scatter
from ..ipc.counts import ABSENT, GET, GET_MANY, HIT_BYTES, MISSES_MASK, SAMPLE_BATCHES, Word, observe
from ..ipc.get import ShmGet
from ..ipc.patience import Patience
from ..ipc.steps import finish
from ..ipc.tally import Tallies
from ..wire import messages as M
from ..wire.messages import Status
from ..wire.shard_set import FROZEN
from .batch import MISS, UNAVAILABLE, Answer, Batch, NoValue, Sink, View, answer_of, is_hit, misfit, view_of_answer
from .ops.owners import COPY_KEYS, Owners, exist_in, holds_in, leave_open
from .remote_reads import Observe, RemoteReads
from .routing import Routes
from .worker_path import Target

log = logging.getLogger("simm.client")

#: Keys in one exchange that carries no values.
CALL_KEYS: Final = 1024
_PLAIN_SINKS: Final = frozenset((Span, memoryview))

_Read = Callable[[Target, Sequence[int], Batch], Unresolved]  # reads the keys at these positions at one target


class Gets(ShmGet):
    """A client's reads. Any thread may call it."""

    remote_kind = RemoteReads

    def __init__(
        self, routes: Routes, copier: Copier, checksum: bool, counters: dict[str, int], observe: Observe | None = None,
        tallies: Tallies | None = None,
    ) -> None:  # fmt: skip
        super().__init__(copier, checksum, counters)
        self._routes = routes
        self._tallies = tallies = tallies or Tallies()
        self._owners = Owners(routes, counters, tallies)
        self._observe: Observe = observe or (lambda *_: None)
        self._batches = 0
        check = ShmGet(copier, True, counters).check if checksum else None  # its own would be a reference cycle
        self._remote = self.remote_kind(routes, copier, check, counters, self._observe, tallies)

    def other_kind(self) -> NoValue:
        """Return what an entry is to a read that wants entries of the other kind."""
        return self._remote.other_kind()

    # -- one key --------------------------------------------------------------------------------------

    def read(self, target: Target | None, digest: bytes, sink: Sink) -> Answer:
        """Read one value from its owner, and count the result. O(1) exchanges."""
        if target is None:
            return self._unanswered(late=False)
        reader = target.reader
        if reader is None:
            if target.fresh:
                return self._first(target, digest, sink)
            return self._one(self._remote_now, target, digest, sink)
        kind = type(sink)
        for free in reader.attempts:
            try:
                found = reader.locate(digest)
            except Unsettled:
                break
            if found is None:
                if 0 < reader.shard_word(digest) < PLAIN_BELOW:
                    misses = reader.counts[ABSENT] = reader.counts[ABSENT] + 1
                    if misses & MISSES_MASK == 1:
                        reader.missed(digest)
                    return MISS
                return self._one_moved(target, reader.counts, digest, sink)
            slot, seq, offset, size, _, flags = found
            got: Answer = size
            odd = flags not in self.plain
            if odd and self.differs(flags):  # before anything is written
                if reader.confirm(digest, slot, seq):
                    return self.other_kind() if self.owns(reader, found) else MISS
                break
            if sink is None:
                got = bytes(reader.value(found))
            elif size != (
                sink.size if kind is Span else len(sink)  # type: ignore[union-attr]
            ) and not fits(size, sink):
                if reader.confirm(digest, slot, seq):
                    if odd and not self.owns(reader, found):
                        return MISS
                    reader.counts[Word.WRONG_SIZE] += 1
                    return misfit(size, sink)
                break  # it is changing: read it from a pin
            # The most frequent cases of copy_out(), without the call.
            elif size < COMPANY.held_bytes and kind is memoryview:
                start = offset - reader.data_offset
                sink[:size] = reader.data[start : start + size]  # type: ignore[index]
            elif size < RELEASE_BYTES and kind is Span:
                memmove(sink.address, reader.data_address + offset - reader.data_offset, size)  # type: ignore[union-attr]
            else:
                self.copy_out(reader, found, sink)
                if isinstance(sink, Ranges):
                    size = sink.total  # which is what counts
            if reader.confirm(digest, slot, seq):
                reader.visited[slot] = 1
                if odd and not self.sound(reader, found, got, sink):
                    reader.counts[Word.UNSOUND] += 1
                    return MISS
                for entry in free:
                    reader.entries[entry] = size
                    return got
                reader.count_more(LOG_GETS, size)
                return got
            self.counters["retries"] += 1
            reader.counts[Word.RETRIES] += 1
            if not 0 < reader.shard_word(digest) < FROZEN:
                return self._one_moved(target, reader.counts, digest, sink)
        if not reader.attempts:
            return self._timed(target, reader, digest, sink)
        self.counters["fallbacks"] += 1
        reader.counts[Word.PINNED] += 1
        with self._routes.patience(time.monotonic()) as patience:
            patience.has_time_for(target)  # else each silent worker would cost a batch a deadline
            view = self._pinned(target, digest, sink=sink, copied=self.checksum)
        if view is None:  # nor is there room for a pin: nobody can say what is stored
            reader.counts[Word.UNREACHABLE] += 1
            return MISS
        return self._out_of(view, sink) if isinstance(view, View) else view

    def _timed(self, target: Target, reader: ArenaReader, digest: bytes, sink: Sink) -> Answer:
        """Do :meth:`read`, and note what it takes. Others that come meanwhile are not timed."""
        reader.resume()
        began = time.perf_counter_ns()
        try:
            return self.read(target, digest, sink)
        finally:
            observe(reader.counts, GET, time.perf_counter_ns() - began)

    def read_ranges(self, target: Target | None, digest: bytes, ranges: Ranges) -> Answer:
        """Do :meth:`read` for ranges of a value. The result is the value's length."""
        if self.checksum:
            return self._read_checked([digest], [ranges], None)[0]  # type: ignore[no-any-return]
        reader = target.reader if target is not None else None
        if reader is not None:  # the most frequent case, without what read() does for all sinks
            try:
                found = reader.locate(digest)
            except Unsettled:
                found = None
            if (
                found is not None and ranges.least <= found.length and found.flags in self.plain
                and ranges.total <= VALUE_BYTES_MAX
            ):  # fmt: skip
                start = found.offset - reader.data_offset
                rows = ranges.rows
                if rows is None or not rows.copy(reader.data, start, self._copier, reader.node):
                    scatter(ranges, reader.data, reader.data_address, start, self._copier, reader)
                if reader.confirm(digest, found.slot, found.seq):
                    reader.visited[found.slot] = 1
                    for entry in reader.logs[LOG_GETS].free:
                        reader.entries[entry] = ranges.total
                        return found.length
                    reader.count_more(LOG_GETS, ranges.total)
                    return found.length
                self.counters["retries"] += 1
                reader.counts[Word.RETRIES] += 1
        return self.read(target, digest, ranges)

    def _first(self, target: Target, digest: bytes, sink: Sink) -> Answer:
        """Do :meth:`read` at a server that no call has been at before."""
        with self._routes.patience(time.monotonic()) as patience:
            if not patience.has_time_for(target):
                return self._unanswered(late=True)
            if target.reader is not None:
                return self.read(target, digest, sink)
            return self._one(self._remote_now, target, digest, sink, patience=patience)

    def _unanswered(self, *, late: bool) -> NoValue:
        """Count a key whose owner is not asked: there is none or, if ``late``, no time for it."""
        self.counters["outages"] += 1
        self._tallies.unanswered(self._tallies.tcp, int(not late), int(late))
        return UNAVAILABLE

    def _remote_now(self, target: Target, positions: Sequence[int], batch: Batch) -> Unresolved:
        return finish(self._remote.read(target, positions, batch))

    def _one(
        self, read: _Read, target: Target, digest: bytes, sink: Sink, counts: memoryview | None = None,
        patience: Patience | None = None,
    ) -> Answer:  # fmt: skip
        """Run the slow cases of :meth:`read` as a batch of one. ``counts``: of the owner's arena."""
        began = time.monotonic()
        batch = Batch([digest], [sink], patience)
        unresolved = read(target, (0,), batch)
        if unresolved:
            self._resolve(target, batch, unresolved, began=began)
        if unresolved or counts is not None:
            self._owners.count_moved(counts, batch, (0,))
        self._owners.count(batch, (0,))
        return batch.results[0]  # type: ignore[no-any-return]

    def _one_moved(self, target: Target, counts: memoryview, digest: bytes, sink: Sink) -> Answer:
        """Do :meth:`_one` for a key that is not at its owner, whose shard may be moving."""
        return self._one(self._by_word, target, digest, sink, counts)

    def _by_word(self, target: Target, positions: Sequence[int], batch: Batch) -> Unresolved:
        """Return keys that are not at their owner, by its shard words."""
        unresolved = Unresolved()
        if (reader := target.reader) is not None:
            for position in positions:
                unresolved.by_word(position, reader.shard_word(batch.digests[position]))
        return unresolved

    def _out_of(self, view: View, sink: Sink) -> Answer:
        """Copy a value out of a pinned view."""
        if not view:
            return answer_of(view)
        with view:
            if sink is None:
                return bytes(view.data)
            length = len(view)
            if not fits(length, sink):
                return misfit(length, sink)
            self.copy_from(view.data, sink)
            return length

    # -- many keys ------------------------------------------------------------------------------------

    def read_many(self, digests: Sequence[bytes], sinks: Sequence[Sink], patience: Patience | None = None) -> list[Any]:
        """Read many values; return an answer for each. ``patience``: of the call that this belongs to."""
        if self.checksum and sinks and isinstance(sinks[0], Ranges):
            return self._read_checked(digests, sinks, patience)
        batch = Batch(digests, sinks, patience)
        self._owners.read(batch, self._read_in, self._remote.read, self._settle)
        return batch.results

    def _read_checked(self, digests: Sequence[bytes], sinks: Sequence[Sink], patience: Patience | None) -> list[Any]:
        """Read ranges out of values whose checksums must be checked: each value as a whole, one at a time."""
        if patience is None:
            with self._routes.patience() as patience:
                return self._read_checked(digests, sinks, patience)
        results: list[Any] = []
        for digest, sink in zip(digests, sinks):
            (got,) = self.read_many([digest], [None], patience)
            try:
                results.append(self._out_of(View(memoryview(got)), sink) if type(got) is bytes else got)
            except DeviceError as exc:
                results.append(self.device_failed(exc))
        return results

    def _settle(self, target: Target, left: Unresolved, batch: Batch) -> None:
        """Read keys that ``target``, their owner by the map, does not have, from other workers, and count them."""
        positions = left.positions()
        self._resolve(target, batch, left)
        if batch.sinks is not None:
            self._owners.count(batch, positions)
            self._owners.count_moved(reader.counts if (reader := target.reader) is not None else None, batch, positions)

    def device_failed(self, exc: DeviceError, count: int = 1) -> NoValue:
        """Count and log the failure of a GPU; return UNAVAILABLE."""
        return self._owners.device_failed(exc, count)

    def _read_in(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch,
        slots: NDArray[np.intp] | None,
    ) -> Unresolved:  # fmt: skip
        """Read values out of one arena, and count all that need no other lookup."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        if type(sinks[positions[0]]) not in HOST_TYPES:
            self._read_into_device(target, reader, positions, batch)
        elif len(positions) < VECTOR_KEYS and slots is None and not self.spreads(positions, sinks):
            for position in positions:
                results[position] = self.read(target, digests[position], sinks[position])
        else:
            self._batches += 1
            began = 0.0 if self._batches % SAMPLE_BATCHES else time.perf_counter()
            left = self._read_arena(target, reader, positions, batch, slots)
            if began:
                seconds = time.perf_counter() - began
                observe(reader.counts, GET_MANY, int(seconds * 1e9))
                if sizes := batch.bytes_read(positions):
                    self._observe("shm", len(sizes), sum(sizes), seconds)
            return left
        return Unresolved()

    def _read_arena(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch,
        slots: NDArray[np.intp] | None,
    ) -> Unresolved:  # fmt: skip
        """Read a large batch out of one arena."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        locate, confirm, visited, copy_out = reader.locate, reader.confirm, reader.visited, self.copy_out
        plain, data, base = self.plain, reader.data, reader.data_offset
        hits, misses, missed = 0, 0, b""
        apart: list[int] = []
        left = positions
        unresolved = Unresolved()
        many = len(positions) >= COPY_KEYS or self.spreads(positions, sinks)
        if many and plain and type(sinks[positions[0]]) in _PLAIN_SINKS:
            mine = digests if len(positions) == len(digests) else [digests[position] for position in positions]
            keys, found_at = reader.candidates(mine) if slots is None else (words_of(mine), slots)
            rest = self.copy_many(reader, positions, keys, found_at, sinks, results)
            hits = len(positions) - len(rest)
            left = [positions[number] for number in rest]
        for position in left:
            digest, sink = digests[position], sinks[position]
            try:
                found = locate(digest)
            except Unsettled:
                pass
            else:
                if found is None:
                    word = reader.shard_word(digest)
                    if 0 < word < PLAIN_BELOW:
                        misses, missed = misses + 1, digest
                    else:
                        unresolved.by_word(position, word)
                    continue
                slot, seq, offset, size, _, flags = found
                if flags in plain and sink is not None and (size == len(sink) or fits(size, sink)):
                    if size < COMPANY.held_bytes and type(sink) is memoryview:  # copy_out(), without the call
                        start = offset - base
                        sink[:size] = data[start : start + size]
                    else:
                        copy_out(reader, found, sink)
                    if confirm(digest, slot, seq):
                        visited[slot] = 1
                        hits += 1
                        results[position] = size
                        continue
            # Everything but plain hits and misses: read() handles all cases, and counts them.
            results[position] = self.read(target, digest, sink)
            apart.append(position)
        self.counters["hits"] += hits
        counts = reader.counts
        counts[Word.BATCH_HITS] += hits
        if hits:
            others = frozenset(apart)
            together = [each for each in positions if each not in others] if apart else positions
            size = batch.size_read(together)  # first: a thread that counts meanwhile would be undone
            counts[HIT_BYTES] += size
        if misses:
            reader.missed(missed)
            counts[ABSENT] += misses
        return unresolved

    def _read_into_device(self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch) -> None:
        """Read a batch out of one arena into GPU memory."""
        sinks: Sequence[Any] = batch.sinks or ()
        rest = self.copy_to_device(reader, positions, batch.digests, sinks, batch.results)
        got = [batch.results[position] for position in set(positions).difference(rest)]
        done, count, size = len(positions) - len(rest), len(got), sum(got)
        self.counters["hits"] += done
        reader.counts[Word.BATCH_HITS] += count
        reader.counts[HIT_BYTES] += size
        for position in rest:
            batch.results[position] = self.read(target, batch.digests[position], sinks[position])

    # -- not at the owner -----------------------------------------------------------------------------

    def _resolve(
        self, target: Target, batch: Batch, unresolved: Unresolved, hops: int = HOPS, began: float | None = None
    ) -> None:
        """Read keys that ``target``, their owner by the map, does not have, from other workers. Not counted.

        ``began``: of a call for one key that has no patience yet.
        """
        if batch.patience is None:
            try:
                with self._routes.patience(began) as batch.patience:
                    self._resolve(target, batch, unresolved, hops)
            finally:
                batch.patience = None  # it has ended, and the batch may go on at another owner
            return
        if unresolved.ask_owner:
            self._ask(target, batch, unresolved)
        routes = self._routes
        digests = batch.digests
        found = unresolved.next_reads(
            target, routes.table(), lambda position: shard_of(digests[position]), hops=hops,
            connected=routes.manager_connected(),
        )  # fmt: skip
        # Also those that nobody else can be asked for: the servers may know a newer map than this client.
        leave_open(unresolved.not_owner + unresolved.at_owner + [at for at, *_ in unresolved.at_previous_owner], batch)
        if found.refresh:
            routes.refresh()
        for previous, positions in self._owners.in_time(found.at_previous, batch):
            self._read_previous(previous, positions, batch)
        for owner, positions in self._owners.in_time(found.start_over, batch):
            self._start_over(owner, positions, batch, hops - 1)

    def _ask(self, target: Target, batch: Batch, unresolved: Unresolved) -> None:
        """Ask the owner what its shard words do not say."""
        asked = unresolved.ask_owner
        leave_open([position for position, _ in asked], batch)
        session = target.session
        if session is None:
            count = len(asked)
            self.counters["outages"] += count
            return
        if batch.patience is not None and not batch.patience.has_time_for(target):
            self._owners.count_unavailable([position for position, _ in asked], batch, late=True)
            return
        entries: list[tuple[int, int, int, int, int, int]] = []
        try:
            for start in range(0, len(asked), CALL_KEYS):
                digests = [batch.digests[position] for position, _ in asked[start : start + CALL_KEYS]]
                entries += session.exchange(M.Locate(0, digests)).entries
        except PeerError as exc:
            if isinstance(exc, DeadlineError):
                batch.late.update(position for position, _ in asked[len(entries) :])
            self._routes.session_failed(target, session, exc)
        for each, (status, _flags, _length, _crc, epoch, _pin) in zip(asked, entries):
            batch.results[each[0]] = MISS
            unresolved.answered(each, status, epoch)

    def _start_over(self, owner: Target, positions: list[int], batch: Batch, hops: int) -> None:
        """Read again at the owner, which is another one or has the value by now. Not counted."""
        reader = owner.arena()
        if reader is None:
            ask = self._remote.read_uncounted if batch.sinks is not None else self._remote.exist
            unresolved = finish(ask(owner, positions, batch))
        elif batch.sinks is None:
            unresolved = self._exist_in(owner, reader, positions, batch, None)
        else:
            unresolved = Unresolved()
            for position in positions:
                batch.results[position] = got = self._copy(reader, batch, position, reader.confirm)
                if got == MISS:
                    unresolved.by_word(position, reader.shard_word(batch.digests[position]))
        if unresolved:
            self._resolve(owner, batch, unresolved, hops)

    def _copy(
        self, reader: ArenaReader, batch: Batch, position: int, confirm: Callable[[bytes, int, int], bool]
    ) -> Answer:
        """Find, copy and confirm a value. Return MISS if that fails. Not counted."""
        digest = batch.digests[position]
        sink = batch.sinks[position] if batch.sinks is not None else None
        for _ in EACH_ATTEMPT:
            try:
                found = reader.locate(digest)
            except Unsettled:
                break
            if found is None:
                break
            if self.differs(found.flags):
                if confirm(digest, found.slot, found.seq):
                    return self.other_kind() if reader.is_own(found) else MISS
                continue
            if sink is None:
                got: Answer = bytes(reader.value(found))
            elif not fits(got := found.length, sink):
                if confirm(digest, found.slot, found.seq):
                    return misfit(got, sink) if reader.is_own(found) else MISS
                continue
            else:
                self.copy_out(reader, found, sink)
            if confirm(digest, found.slot, found.seq):
                if found.flags not in self.plain and not self.sound(reader, found, got, sink):
                    break
                return got
        return MISS

    def _read_previous(self, target: Target, positions: list[int], batch: Batch) -> None:
        """Read at the previous owner, which the owner has named. It knows no more once it has released. Not counted."""
        results, digests = batch.results, batch.digests
        reader = target.arena()
        if reader is not None:
            for position in positions:
                if batch.sinks is None:
                    there = reader.contains_previous(digests[position])
                    results[position] = 1 if there else MISS if reader.shard_word(digests[position]) else UNAVAILABLE
                else:
                    results[position] = self._copy(reader, batch, position, reader.confirm_previous)
        elif batch.sinks is not None:
            finish(self._remote.read_tcp(target, positions, batch, previous=True))
        else:
            finish(self._remote.exist_previous(target, positions, batch))
        moved = sum(is_hit(results[position]) for position in positions)
        self.counters["moved"] += moved

    # -- exists ---------------------------------------------------------------------------------------

    def stored_many(self, digests: Sequence[bytes], patience: Patience | None = None) -> list[bool]:
        """Return for each key whether it is stored. ``patience`` as in :meth:`read_many`."""
        batch = Batch(digests, None, patience)
        if len(digests) < VECTOR_KEYS or not self._owners.find(batch, self._settle):
            self._owners.read(batch, self._exist_in, self._remote.exist, self._settle)
        return batch.results if batch.plain else [got == 1 for got in batch.results]

    def look_many(self, digests: Sequence[bytes], patience: Patience | None = None) -> list[int]:
        """Return for each key 1 if it is stored, MISS, or UNAVAILABLE if nobody knows. Not counted in arenas.

        Servers count it as exists. One exchange with each. ``patience`` as in :meth:`read_many`.
        """
        batch = Batch(digests, None, patience, counted=False)
        batch.results = [UNAVAILABLE] * len(digests)  # of keys whose owner is not asked
        self._owners.read(batch, self._exist_in, self._remote.exist, self._settle)
        return [got if got == UNAVAILABLE else 1 if got == 1 else MISS for got in batch.results]

    def _exist_in(
        self, _target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, _: NDArray[np.intp] | None
    ) -> Unresolved:
        """Find out which keys one arena has."""
        self._batches += 1
        return exist_in(reader, positions, batch, observed=not self._batches % SAMPLE_BATCHES)

    # -- what a put need not store ------------------------------------------------------------------------

    def holds_many(self, digests: Sequence[bytes], lengths: Sequence[int]) -> list[bool]:
        """Return for each key whether a value of this length is stored, as far as ``sdk/ops/if_absent.py`` wants it."""
        batch = Batch(digests, None)
        self._owners.read(batch, functools.partial(holds_in, lengths), self._remote.exist, lambda *_: None)
        return [got == 1 for got in batch.results]

    # -- views ----------------------------------------------------------------------------------------

    def view(self, target: Target | None, digest: bytes) -> View:
        """Return a pinned view, which is false for a miss or an outage, and count the result.

        By TCP, from a previous owner, of a worker that is down, or beyond the share of pins, it is a copy.
        """
        if target is not None and target.fresh:
            with self._routes.patience(time.monotonic()) as patience:
                patience.has_time_for(target)
                return self._view(target, digest)
        return self._view(target, digest)

    def _view(self, target: Target | None, digest: bytes) -> View:
        got: View | Answer | None = None
        if target is not None and target.ready() and target.session is not None:
            got = self._pinned(target, digest)
        return got if isinstance(got, View) else view_of_answer(self.read(target, digest, None) if got is None else got)

    def _pinned(
        self, target: Target, digest: bytes, *, sink: Sink = None, copied: bool = False
    ) -> View | Answer | None:
        """Return a view of a pin that the worker gives, see :meth:`view`; None, not counted, if it has no room for one.

        ``copied``: of a copy, which is checked. Who may write into the arena may do so between a check and a copy.
        ``sink``: what is read of it; None for all of it. That of a value that is elsewhere is read, as by :meth:`read`.
        """
        if (session := target.session) is None:
            self._unanswered(late=False)
            return View.miss()
        try:
            view, status, flags, length, crc = View.of_pin(session, digest)
        except PeerError as exc:
            session.counts[Word.TIMEOUT if isinstance(exc, DeadlineError) else Word.UNREACHABLE] += 1
            self._routes.session_failed(target, session, exc)
            return View.miss()
        counts = session.counts
        if view is None:
            if status == Status.NO_SPACE:
                return None
            if 0 < session.reader.shard_word(digest) < PLAIN_BELOW:
                counts[ABSENT] += 1
                return View.miss()
            return self._one_moved(target, counts, digest, sink)
        if self.differs(flags):
            view.close()
            return view_of_answer(self.other_kind())
        if copied:
            pinned, view = view, View(memoryview(bytes(view)))
            pinned.close()
        if self.checksum and not self.check(flags, crc, view.data):
            counts[Word.UNSOUND] += 1
            view.close()
            return View.miss()
        self.counters["hits"] += 1
        counts[Word.VIEWS] += 1
        size = sink.total if isinstance(sink, Ranges) else length  # no call while counting
        counts[HIT_BYTES] += size
        return view
