"""Read values: find them, copy them, confirm the copy.

A read goes to the shard's owner: by shared memory into its arena on the same host, else by RDMA, else by TCP.
``cluster/lookup.py`` decides what it means that a key is not there, and where to look next; this module carries it out.
An entry that changes during each of several attempts is read from a pin, which the worker gives on request.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from ..arena.hashing import shard_of
from ..arena.layout import ENTRY_CRC
from ..arena.reader import ATTEMPTS, VECTOR_KEYS, ArenaReader, Located, Unsettled
from ..cluster.lookup import HOPS, PLAIN_BELOW, Unresolved
from ..errors import DeviceError, PeerError
from ..host.buffers import HOST_TYPES, RELEASE_BYTES, Copier, DeviceCopy, Span, address_of, fits, on_device
from ..wire import messages as M
from ..wire.messages import Status
from ..wire.shard_set import FROZEN
from .batch import MISS, UNAVAILABLE, Answer, Batch, NoValue, Patience, Sink, View, is_hit, misfit
from .remote_reads import RemoteReads, head_bytes
from .routing import Routes
from .worker_path import Target

log = logging.getLogger("simm.client")

#: A batch waits for the device after so many bytes or copies. The longer the time between finding a value and
#: confirming it, the more often it has changed meanwhile (``benchmarks/gpu.py`` measures what a wait costs).
DEVICE_BYTES: Final = 64 << 20
DEVICE_KEYS: Final = 256
#: Keys in one exchange that carries no values.
CALL_KEYS: Final = 1024

_FROZEN: Final = FROZEN

#: Reads the keys at these positions at one target.
_Read = Callable[[Target, Sequence[int], Batch], Unresolved]


class Gets:
    """A client's reads. Any thread may call it."""

    def __init__(self, routes: Routes, copier: Copier, checksum: bool, counters: dict[str, int]) -> None:
        self._routes = routes
        self._copier = copier
        self.checksum = checksum
        #: Flags of entries whose values are delivered as they are; the others' are looked at.
        self._plain = frozenset(() if checksum else (0, ENTRY_CRC))
        self.counters = counters
        self._remote = RemoteReads(routes, copier, self._check if checksum else None, counters)

    # -- one key --------------------------------------------------------------------------------------

    def read(self, target: Target | None, digest: bytes, sink: Sink) -> Answer:
        """Read one value from its owner, and count the result. O(1) exchanges."""
        if target is None:
            self.counters["outages"] += 1
            return UNAVAILABLE
        reader = target.reader
        if reader is None:
            if target.fresh:
                return self._first(target, digest, sink)
            return self._one(self._remote.read, target, digest, sink)
        for _ in range(ATTEMPTS):
            try:
                found = reader.locate(digest)
            except Unsettled:
                break
            if found is None:
                if 0 < reader.shard_word(digest) < PLAIN_BELOW:
                    self.counters["misses"] += 1
                    return MISS
                return self._one(self._by_word, target, digest, sink)
            if sink is None:
                got: Answer = bytes(reader.value(found))
            elif (got := found.length) != len(sink) and not fits(got, sink):
                if reader.confirm(digest, found.slot, found.seq):
                    return misfit(got, sink)
                break  # it is changing: read it from a pin
            elif got < RELEASE_BYTES and type(sink) is memoryview:
                # The most frequent case of _copy_out, without the call.
                start = found.offset - reader.data_offset
                sink[:got] = reader.data[start : start + got]
            else:
                self._copy_out(reader, found, sink)
            if reader.confirm(digest, found.slot, found.seq):
                reader.visited[found.slot] = 1
                if found.flags not in self._plain and not self._sound(reader, found, got, sink):
                    return MISS
                self.counters["hits"] += 1
                return got
            self.counters["retries"] += 1
            if not 0 < reader.shard_word(digest) < _FROZEN:
                return self._one(self._by_word, target, digest, sink)
        self.counters["fallbacks"] += 1
        return self._out_of(self._pinned(target, digest), sink)

    def _first(self, target: Target, digest: bytes, sink: Sink) -> Answer:
        """Do :meth:`read` at a server that no call has been at before."""
        with self._routes.patience(time.monotonic()) as patience:
            if not patience.has_time_for(target):
                self.counters["outages"] += 1
                return UNAVAILABLE
            if target.reader is not None:
                return self.read(target, digest, sink)
            return self._one(self._remote.read, target, digest, sink, patience)

    def _one(
        self, read: _Read, target: Target, digest: bytes, sink: Sink, patience: Patience | None = None
    ) -> Answer:
        """Run the slow cases of :meth:`read` as a batch of one."""
        began = time.monotonic()
        batch = Batch([digest], [sink], patience)
        unresolved = read(target, (0,), batch)
        if unresolved:
            self._resolve(target, batch, unresolved, began=began)
        self._count(batch)
        answer: Answer = batch.results[0]
        return answer

    def _by_word(self, target: Target, positions: Sequence[int], batch: Batch) -> Unresolved:
        """Return keys that are not at their owner, by its shard words."""
        unresolved = Unresolved()
        reader = target.reader
        if reader is not None:
            for position in positions:
                unresolved.by_word(position, reader.shard_word(batch.digests[position]))
        return unresolved

    def _copy_out(self, reader: ArenaReader, found: Located, sink: memoryview | Span) -> None:
        start = found.offset - reader.data_offset
        length = found.length
        if type(sink) is Span:
            self._copier.copy(sink.address, reader.data_address + start, length)
        elif length < RELEASE_BYTES:
            try:
                sink[:length] = reader.data[start : start + length]  # type: ignore[index]
            except TypeError:  # a device buffer: host memory does not pay for a test
                sink.copy_from_mapping(reader, start, length)  # type: ignore[union-attr]
        elif type(sink) is memoryview:
            self._copier.copy(address_of(sink), reader.data_address + start, length)
        else:
            sink.copy_from_mapping(reader, start, length)  # type: ignore[attr-defined]

    def _sound(self, reader: ArenaReader, found: Located, got: Any, sink: Sink) -> bool:
        """Return whether a value is of this client's namespace, and still has the checksum it was stored with."""
        if not reader.is_own(found):
            return False
        if not self.checksum:
            return True
        return self._check(found.flags, found.crc, got if sink is None else head_bytes(sink, found.length))

    def _check(self, flags: int, crc: int, data: Any) -> bool:
        """Return whether a value has the checksum in its entry. Without a checksum that field is 0.

        So an entry that lost its flag to a stray store is not taken for one that never had a checksum.
        """
        if (zlib.crc32(data) == crc and len(data) > 0) if flags & ENTRY_CRC else not crc:
            return True
        self.counters["crc_errors"] += 1
        log.error("a value does not match its checksum: counted as a miss")
        return False

    def _out_of(self, view: View, sink: Sink) -> Answer:
        """Copy a value out of a pinned view."""
        if not view:
            return MISS
        with view:
            if sink is None:
                return bytes(view.data)
            length = len(view)
            if not fits(length, sink):
                return misfit(length, sink)
            if type(sink) is memoryview:
                sink[:length] = view.data
            else:
                sink.copy_from(view.data)
            return length

    # -- many keys ------------------------------------------------------------------------------------

    def read_many(
        self, digests: Sequence[bytes], sinks: Sequence[Sink], patience: Patience | None = None
    ) -> list[Any]:
        """Read many values; return an answer for each. ``patience``: of the call that this belongs to."""
        groups = self._routes.group(digests)
        if patience is None and _may_wait(groups):
            with self._routes.patience() as patience:
                return self._read_groups(groups, Batch(digests, sinks, patience))
        return self._read_groups(groups, Batch(digests, sinks, patience))

    def _read_groups(self, groups: Collection[tuple[Target | None, Sequence[int]]], batch: Batch) -> list[Any]:
        for target, positions in groups:
            if batch.patience is not None and self._leaves_out(target, positions, batch):
                continue
            try:
                self._read_at(target, positions, batch)
            except DeviceError as exc:
                self.device_failed(exc, len(positions))
                for position in positions:
                    batch.results[position] = UNAVAILABLE
        return batch.results

    def _leaves_out(self, target: Target | None, positions: Sequence[int], batch: Batch) -> bool:
        """Return whether the call has no time left for this server. Its keys are then unavailable.

        An arena that is mapped costs no wait.
        """
        if target is None or batch.patience is None or batch.patience.has_time_for(target) or target.reader is not None:
            return False
        if batch.sinks is not None:
            for position in positions:
                batch.results[position] = UNAVAILABLE
        self.counters["outages"] += len(positions)
        return True

    def device_failed(self, exc: DeviceError, count: int = 1) -> NoValue:
        """Count and log the failure of a GPU; return UNAVAILABLE."""
        log.warning("reading into GPU memory: %s", exc)
        self.counters["outages"] += count
        return UNAVAILABLE

    def _read_at(self, target: Target | None, positions: Sequence[int], batch: Batch) -> None:
        """Read values at one owner, and count the results."""
        results = batch.results
        if target is None:
            for position in positions:
                results[position] = UNAVAILABLE
            self.counters["outages"] += len(positions)
            return
        reader = target.arena()
        if reader is None:
            unresolved = self._remote.read(target, positions, batch)
            if unresolved:
                self._resolve(target, batch, unresolved)
            self._count(batch, positions)
            return
        digests, sinks = batch.digests, batch.sinks
        assert sinks is not None
        if type(sinks[positions[0]]) not in HOST_TYPES:
            self._read_into_device(target, reader, positions, batch)
        elif len(positions) < VECTOR_KEYS:
            for position in positions:
                results[position] = self.read(target, digests[position], sinks[position])
        else:
            self._read_arena(target, reader, positions, batch)

    def _read_arena(self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch) -> None:
        """Read a large batch out of one arena."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        slots = reader.slots_of_many([digests[position] for position in positions])
        confirm, visited, copy_out = reader.confirm, reader.visited, self._copy_out
        hits = misses = 0
        unresolved = Unresolved()
        for position, slot in zip(positions, slots):
            digest, sink = digests[position], sinks[position]
            if slot >= 0 and sink is not None:
                try:
                    found = reader.locate_at(digest, slot)
                except Unsettled:
                    found = None
                if (
                    found is not None and (found.length == len(sink) or fits(found.length, sink))
                    and found.flags in self._plain
                ):  # fmt: skip
                    copy_out(reader, found, sink)
                    if confirm(digest, found.slot, found.seq):
                        visited[found.slot] = 1
                        hits += 1
                        results[position] = found.length
                        continue
            elif slot < 0:
                word = reader.shard_word(digest)
                if 0 < word < PLAIN_BELOW:
                    misses += 1
                else:
                    unresolved.by_word(position, word)
                continue
            # Everything but plain hits and misses: read() handles all cases.
            results[position] = self.read(target, digest, sink)
        self.counters["hits"] += hits
        self.counters["misses"] += misses
        if unresolved:
            everything = unresolved.positions()
            self._resolve(target, batch, unresolved)
            self._count(batch, everything)

    def _read_into_device(self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch) -> None:
        """Read a batch out of one arena into GPU memory."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        device = sinks[positions[0]]
        assert on_device(device)
        rest: list[int] = []  # everything but plain hits: read() handles all cases
        left = iter(positions)
        begun: list[tuple[int, Located]] = []
        hits = 0

        def group() -> Iterator[DeviceCopy]:
            base = reader.data_address - reader.data_offset
            total = 0
            for position in left:
                sink = sinks[position]
                found = None
                if on_device(sink):
                    with contextlib.suppress(Unsettled):
                        found = reader.locate(digests[position])
                    if (
                        found is not None and fits(found.length, sink)
                        and found.flags in self._plain
                    ):  # fmt: skip
                        begun.append((position, found))
                        yield sink, base + found.offset, found.length, sink.pinned(reader)
                        total += found.length
                        if total >= DEVICE_BYTES or len(begun) >= DEVICE_KEYS:
                            return
                        continue
                rest.append(position)

        while True:
            begun.clear()
            device.copy_to_device(group())
            if not begun:
                break
            for position, found in begun:
                if reader.confirm(digests[position], found.slot, found.seq):
                    reader.visited[found.slot] = 1
                    results[position] = found.length
                    hits += 1
                else:
                    rest.append(position)
        self.counters["hits"] += hits
        for position in rest:
            results[position] = self.read(target, digests[position], sinks[position])

    def _count(self, batch: Batch, positions: Sequence[int] = (0,)) -> None:
        """Count the results of the slow cases."""
        hits = misses = 0
        for position in positions:
            got = batch.results[position]
            if got == MISS:
                misses += 1
            elif is_hit(got):
                hits += 1
        self.counters["hits"] += hits
        self.counters["misses"] += misses

    # -- not at the owner -----------------------------------------------------------------------------

    def _resolve(
        self, target: Target, batch: Batch, unresolved: Unresolved, hops: int = HOPS, began: float | None = None
    ) -> None:
        """Read keys that ``target``, their owner by the map, does not have, from other workers. Not counted.

        ``began``: of a call for one key that has no patience yet.
        """
        if batch.patience is None:
            with self._routes.patience(began) as batch.patience:
                self._resolve(target, batch, unresolved, hops)
            return
        if unresolved.ask_owner:
            self._ask(target, batch, unresolved)
        routes = self._routes
        digests = batch.digests
        found = unresolved.next_reads(
            target, routes.table(), lambda position: shard_of(digests[position]), hops=hops,
            connected=routes.manager_connected(),
        )  # fmt: skip
        if found.refresh:
            routes.refresh()
        for previous, positions in found.at_previous.items():
            if not self._leaves_out(previous, positions, batch):
                self._read_previous(previous, positions, batch)
        for owner, positions in found.start_over.items():
            if not self._leaves_out(owner, positions, batch):
                self._start_over(owner, positions, batch, hops - 1)

    def _ask(self, target: Target, batch: Batch, unresolved: Unresolved) -> None:
        """Ask the owner what its shard words do not say."""
        asked = unresolved.ask_owner
        session = target.session
        if session is None:
            self.counters["outages"] += len(asked)
            return
        entries: list[tuple[int, int, int, int, int, int]] = []
        try:
            for start in range(0, len(asked), CALL_KEYS):
                digests = [batch.digests[position] for position, _ in asked[start : start + CALL_KEYS]]
                entries += session.exchange(M.Locate(0, digests)).entries
        except PeerError as exc:
            self._routes.session_failed(target, session, exc)
        for each, (status, _flags, _length, _crc, epoch, _pin) in zip(asked, entries):
            unresolved.answered(each, status, epoch)

    def _start_over(self, owner: Target, positions: list[int], batch: Batch, hops: int) -> None:
        """Read again at the owner, which is another one or has the value by now. Not counted."""
        reader = owner.arena()
        if batch.sinks is None:
            unresolved = self._exist_at(owner, positions, batch)
        elif reader is None:
            unresolved = self._remote.read(owner, positions, batch)
        else:
            unresolved = Unresolved()
            for position in positions:
                got = self._copy(reader, batch, position, reader.confirm)
                batch.results[position] = got
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
        for _ in range(ATTEMPTS):
            try:
                found = reader.locate(digest)
            except Unsettled:
                break
            if found is None:
                break
            if sink is None:
                got: Answer = bytes(reader.value(found))
            elif not fits(got := found.length, sink):
                if confirm(digest, found.slot, found.seq):
                    return misfit(got, sink)
                continue
            else:
                self._copy_out(reader, found, sink)
            if confirm(digest, found.slot, found.seq):
                if found.flags not in self._plain and not self._sound(reader, found, got, sink):
                    break
                return got
        return MISS

    def _read_previous(self, target: Target, positions: list[int], batch: Batch) -> None:
        """Read at the previous owner, which the owner has named. Not counted."""
        results, digests = batch.results, batch.digests
        reader = target.arena()
        if reader is not None:
            for position in positions:
                if batch.sinks is None:
                    results[position] = int(reader.contains_previous(digests[position]))
                else:
                    results[position] = self._copy(reader, batch, position, reader.confirm_previous)
        elif batch.sinks is not None:
            self._remote.read_tcp(target, positions, batch, previous=True)
        else:
            self._remote.exist_previous(target, positions, batch)
        self.counters["moved"] += sum(is_hit(results[position]) for position in positions)

    # -- exists ---------------------------------------------------------------------------------------

    def stored_many(self, digests: Sequence[bytes], patience: Patience | None = None) -> list[bool]:
        """Return for each key whether it is stored. ``patience`` as in :meth:`read_many`."""
        groups = self._routes.group(digests)
        if patience is None and _may_wait(groups):
            with self._routes.patience() as patience:
                return self._stored_groups(groups, Batch(digests, None, patience))
        return self._stored_groups(groups, Batch(digests, None, patience))

    def _stored_groups(self, groups: Collection[tuple[Target | None, Sequence[int]]], batch: Batch) -> list[bool]:
        for target, positions in groups:
            if target is None:
                self.counters["outages"] += len(positions)
                continue
            if batch.patience is not None and self._leaves_out(target, positions, batch):
                continue
            unresolved = self._exist_at(target, positions, batch)
            if unresolved:
                self._resolve(target, batch, unresolved)
        return [got == 1 for got in batch.results]

    def _exist_at(self, target: Target, positions: Sequence[int], batch: Batch) -> Unresolved:
        unresolved = Unresolved()
        digests, results = batch.digests, batch.results
        wanted = digests if len(positions) == len(digests) else [digests[position] for position in positions]
        reader = target.arena()
        if reader is not None:
            hits = reader.contains_many(wanted)
            if len(positions) == len(results):
                results[:] = hits
            else:
                for position, hit in zip(positions, hits):
                    results[position] = hit
            if False in hits:
                shard_word = reader.shard_word
                for position, hit in zip(positions, hits):
                    if not hit and not 0 < (word := shard_word(digests[position])) < PLAIN_BELOW:
                        unresolved.by_word(position, word)
        else:
            self._remote.exist(target, positions, batch, unresolved)
        return unresolved

    # -- views ----------------------------------------------------------------------------------------

    def view(self, target: Target | None, digest: bytes) -> View:
        """Return a pinned view, which is false for a miss or an outage, and count the result.

        By TCP, from a previous owner, or of a worker that is down, it is a copy.
        """
        if target is not None and target.fresh:
            with self._routes.patience(time.monotonic()) as patience:
                patience.has_time_for(target)
                return self._view(target, digest)
        return self._view(target, digest)

    def _view(self, target: Target | None, digest: bytes) -> View:
        if target is None or not target.ready() or target.session is None:
            got = self.read(target, digest, None)
            return View(memoryview(got)) if isinstance(got, bytes) else View.miss()
        return self._pinned(target, digest)

    def _pinned(self, target: Target, digest: bytes) -> View:
        """Return a view of a pin that the worker gives; see :meth:`view`."""
        session = target.session
        if session is None:
            self.counters["outages"] += 1
            return View.miss()
        view: View | None = None
        try:
            session.begin_copy()  # until the view ends, so that the session's pins are not released before
            try:
                status, flags, length, crc, offset, pin = session.pin(digest)
                if status == Status.OK:
                    view = View.pinned(session.reader, session, offset, length, pin)
            finally:
                if view is None:
                    session.end_copy()
        except PeerError as exc:
            self._routes.session_failed(target, session, exc)
            return View.miss()
        if view is None:
            if 0 < session.reader.shard_word(digest) < PLAIN_BELOW:
                self.counters["misses"] += 1
                return View.miss()
            got = self._one(self._by_word, target, digest, None)
            return View(memoryview(got)) if isinstance(got, bytes) else View.miss()
        if self.checksum and not self._check(flags, crc, view.data):
            view.close()
            return View.miss()
        self.counters["hits"] += 1
        return view


def _may_wait(groups: Collection[tuple[Target | None, Sequence[int]]]) -> bool:
    """Return whether a call could wait for more than one exchange's deadline at these servers."""
    return len(groups) > 1 or any(target is not None and target.fresh for target, _ in groups)
