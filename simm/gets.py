"""Reading: find a value, copy it, confirm it; and where to look when it is not at its owner.

A read goes to the shard's owner. When the value is not there, the shard's word in the arena (or the stream's answer)
says what that means (``shards.py`` explains the words):

    plain                   a miss
    moving in, or not here  the owner is asked: it has it by now, nobody does, its previous owner may, or the shard
                            is not its own
    frozen                  not its own any more: the map is old. Ask for a new one; a miss meanwhile

What can go wrong, and what stands against it
---------------------------------------------
* *A superseded value is read at the previous owner.* Nobody goes there by the map alone, but only when the owner has
  said that this key was not mutated since its map gave it the shard. Who the previous owner is the map says, and it
  must be the map of that same move: the owner's and the previous owner's names are taken from one map together, and
  the epoch that comes with the owner's answer is compared with the map's, which may be late. An owner that has not
  taken the shard over yet (by TCP it does not say) may be behind itself; its answer counts only while a new map would
  reach us: a client that is cut off from the manager does not follow an old map to an old owner.
* *The map changes under the read.* Then it starts over at the new owner, ``HOPS`` times at most; a miss after that.
* *An entry changes all the time.* After some attempts the worker is asked, which pins it.

Cost: a hit is what it was. A miss compares the shard's word once. In a batch, those that need another look are grouped:
one question to the owner, one read at each previous owner.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import gpu
from . import messages as M
from .batch import DOWN, MISS, SMALL, Astray, Batch, Sink
from .buffers import RELEASE_BYTES, Copier, Span, address_of
from .constants import VALUE_BYTES_MAX
from .cuda import CudaError
from .errors import RemoteProtocolError, TransportError
from .gpu import DeviceSpan
from .hashing import shard_of
from .layout import EntryFlag
from .messages import Status
from .rdmaget import RdmaGet
from .reader import ATTEMPTS, VECTOR_KEYS, ArenaReader, Located, Unsettled
from .routing import Routes
from .session import WorkerSession
from .shards import FROZEN, MOVING
from .target import Target
from .tcppath import TcpPath, Want
from .view import View

log = logging.getLogger("simm.client")

#: How often a read starts over because the map has changed under it.
HOPS: Final = 3
#: Keys in one exchange that carries no values.
CALL_KEYS: Final = 1024

_OK: Final = int(Status.OK)
_TOO_LARGE: Final = int(Status.TOO_LARGE)
_UNAVAILABLE: Final = int(Status.UNAVAILABLE)
_PREVIOUS: Final = int(Status.PREVIOUS)
_CRC: Final = int(EntryFlag.CRC)
_MOVING: Final = MOVING
_FROZEN: Final = FROZEN

#: Looks at one target for the keys at these positions.
_Look = Callable[[Target, Sequence[int], Batch], Astray]


class Gets:
    """A client's reads; any thread may call it."""

    def __init__(self, routes: Routes, copier: Copier, checksum: bool, counters: dict[str, int]) -> None:
        self._routes = routes
        self._copier = copier
        self.checksum = checksum
        self.counters = counters
        self._rdma = RdmaGet(copier, self._check if checksum else None, counters)

    # -- one key --------------------------------------------------------------------------------------

    def read(self, target: Target | None, digest: bytes, sink: Sink, hops: int = HOPS) -> Any:
        """One value from its owner: its length (the bytes, where ``sink`` is None), or MISS, DOWN or SMALL."""
        if target is None:
            self.counters["outages"] += 1
            return DOWN
        reader = target.reader
        if reader is None and target.ready():
            reader = target.reader
        if reader is None:
            return self._one(self._by_wire, target, digest, sink, hops)
        for _ in range(ATTEMPTS):
            try:
                found = reader.locate(digest)
            except Unsettled:
                break
            if found is None:
                if 0 < reader.shard_word(digest) < _MOVING:
                    self.counters["misses"] += 1
                    return MISS
                return self._one(self._by_word, target, digest, sink, hops)
            if sink is None:
                got: Any = bytes(reader.value(found))
            elif (got := found.length) > len(sink):
                return SMALL
            elif got < RELEASE_BYTES and type(sink) is memoryview:
                # _copy_out's commonest case in place: 0.2 us of 5.
                start = found.offset - reader.data_offset
                sink[:got] = reader.data[start : start + got]
            else:
                self._copy_out(reader, found, sink)
            if reader.confirm(digest, found.slot, found.seq):
                reader.visited[found.slot] = 1
                if found.flags & _CRC and self.checksum and not self._sound(found, got, sink):
                    return MISS
                self.counters["hits"] += 1
                return got
            self.counters["retries"] += 1
            if not 0 < reader.shard_word(digest) < _FROZEN:
                return self._one(self._by_word, target, digest, sink, hops)
        self.counters["fallbacks"] += 1
        return self._out_of(self._pinned(target, digest), sink)

    def _one(self, look: _Look, target: Target, digest: bytes, sink: Sink, hops: int) -> Any:
        """The slow ways of :meth:`read`, as a batch of one."""
        batch = Batch([digest], [sink])
        astray = look(target, (0,), batch)
        if astray:
            self._find(target, batch, astray, hops)
        self._count(batch)
        return batch.results[0]

    def _by_word(self, target: Target, positions: Sequence[int], batch: Batch) -> Astray:
        """Not at its owner, whose shard's word says more."""
        astray = Astray()
        reader = target.reader
        if reader is not None:
            for position in positions:
                astray.by_word(position, reader.shard_word(batch.digests[position]))
        return astray

    def _copy_out(self, reader: ArenaReader, found: Located, sink: memoryview | Span) -> None:
        start = found.offset - reader.data_offset
        length = found.length
        if type(sink) is Span:
            self._copier.copy(sink.address, reader.data_address + start, length)
        elif length < RELEASE_BYTES:
            try:
                sink[:length] = reader.data[start : start + length]  # type: ignore[index]
            except TypeError:  # GPU memory; asked in this way, it is a question that others do not pay for
                gpu.copy_out(reader, start, length, sink)  # type: ignore[arg-type]
        elif type(sink) is DeviceSpan:
            gpu.copy_out(reader, start, length, sink)
        else:
            self._copier.copy(address_of(sink), reader.data_address + start, length)  # type: ignore[arg-type]

    def _sound(self, found: Located, got: Any, sink: Sink) -> bool:
        """Is a value that was stored with a checksum what it was?"""
        return self._check(found.crc, got if sink is None else _head_bytes(sink, found.length))

    def _check(self, crc: int, data: Any) -> bool:
        if zlib.crc32(data) == crc:
            return True
        self.counters["crc_errors"] += 1
        log.error("a value does not match its checksum: counted as a miss")
        return False

    def _out_of(self, view: View | None, sink: Sink) -> Any:
        """The slow way round an entry that changes all the time: out of a pinned view."""
        if view is None:
            return MISS
        with view:
            if sink is None:
                return bytes(view.data)
            length = len(view)
            if length > len(sink):
                return SMALL
            if type(sink) is DeviceSpan:
                gpu.copy_in(sink, view.data)
            else:
                _bytes_of(sink)[:length] = view.data
            return length

    # -- many keys ------------------------------------------------------------------------------------

    def read_many(self, digests: Sequence[bytes], sinks: Sequence[Sink]) -> list[Any]:
        """Many values, each as :meth:`read` has it."""
        batch = Batch(digests, sinks)
        for target, positions in self._routes.group(digests):
            try:
                self._read_at(target, positions, batch)
            except CudaError as exc:
                self.device_failed(exc, len(positions))
                for position in positions:
                    batch.results[position] = DOWN
        return batch.results

    def device_failed(self, exc: CudaError, count: int = 1) -> int:
        """A GPU did not do its part: what was wanted comes out as DOWN."""
        log.warning("reading into GPU memory: %s", exc)
        self.counters["outages"] += count
        return DOWN

    def _read_at(self, target: Target | None, positions: Sequence[int], batch: Batch, hops: int = HOPS) -> None:
        """Values of one owner, counted."""
        results = batch.results
        if target is None:
            for position in positions:
                results[position] = DOWN
            self.counters["outages"] += len(positions)
            return
        reader = target.reader
        if reader is None and target.ready():
            reader = target.reader
        if reader is None:
            astray = self._by_wire(target, positions, batch)
            if astray:
                self._find(target, batch, astray, hops)
            self._count(batch, positions)
            return
        digests, sinks = batch.digests, batch.sinks
        assert sinks is not None
        if type(sinks[positions[0]]) is DeviceSpan:
            self._read_into_device(target, reader, positions, batch, hops)
        elif len(positions) < VECTOR_KEYS:
            for position in positions:
                results[position] = self.read(target, digests[position], sinks[position], hops)
        else:
            self._read_arena(target, reader, positions, batch, hops)

    def _read_arena(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, hops: int
    ) -> None:
        """A large batch out of one arena."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        slots = reader.slots_of_many([digests[position] for position in positions])
        confirm, visited, copy_out = reader.confirm, reader.visited, self._copy_out
        hits = misses = 0
        astray = Astray()
        for position, slot in zip(positions, slots):
            digest, sink = digests[position], sinks[position]
            if slot >= 0 and sink is not None:
                try:
                    found = reader.locate_at(digest, slot)
                except Unsettled:
                    found = None
                if found is not None and found.length <= len(sink) and not (found.flags & _CRC and self.checksum):
                    copy_out(reader, found, sink)
                    if confirm(digest, found.slot, found.seq):
                        visited[found.slot] = 1
                        hits += 1
                        results[position] = found.length
                        continue
            elif slot < 0:
                if not astray.by_word(position, reader.shard_word(digest)):
                    misses += 1
                continue
            # Everything but plain hits and misses: the single form knows all cases.
            results[position] = self.read(target, digest, sink, hops)
        self.counters["hits"] += hits
        self.counters["misses"] += misses
        if astray:
            everything = astray.positions()
            self._find(target, batch, astray, hops)
            self._count(batch, everything)

    def _read_into_device(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, hops: int
    ) -> None:
        """A batch out of one arena into GPU memory."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        hits, rest = gpu.fetch(reader, digests, sinks, positions, self.checksum)
        for position, length in hits:
            results[position] = length
        self.counters["hits"] += len(hits)
        for position in rest:
            results[position] = self.read(target, digests[position], sinks[position], hops)

    def _count(self, batch: Batch, positions: Sequence[int] = (0,)) -> None:
        """Count what came out of the slow ways."""
        hits = misses = 0
        for position in positions:
            got = batch.results[position]
            if got == MISS:
                misses += 1
            elif got not in (DOWN, SMALL):
                hits += 1
        self.counters["hits"] += hits
        self.counters["misses"] += misses

    # -- not at its owner -----------------------------------------------------------------------------

    def _find(self, target: Target, batch: Batch, astray: Astray, hops: int) -> None:
        """Look where else the keys may be that ``target``, their owner as we thought, has not."""
        again = self._ask(target, batch, astray) if astray.asking else []
        if astray.wrong:
            self._routes.refresh()
        places = self._routes.places()
        elsewhere: dict[Target, list[int]] = {}
        behind: dict[Target, list[int]] = {}
        for position in astray.wrong:
            owner = places.owner(shard_of(batch.digests[position]))
            if owner is not None and owner is not target:
                elsewhere.setdefault(owner, []).append(position)
        for position, since, taken in astray.behind:
            shard = shard_of(batch.digests[position])
            owner, previous = places.owner(shard), places.previous(shard)
            if owner is not target:
                if owner is not None:
                    elsewhere.setdefault(owner, []).append(position)
            elif previous is not None and self._same_move(since, places.since(shard), taken):
                behind.setdefault(previous, []).append(position)
            else:
                self._routes.refresh()
        for previous, positions in behind.items():
            self._read_previous(previous, positions, batch)
        if hops > 0:
            if again:
                elsewhere.setdefault(target, []).extend(again)
            for owner, positions in elsewhere.items():
                self._start_over(owner, positions, batch, hops - 1)

    def _same_move(self, said: int, since: int, taken: bool) -> bool:
        """Is the owner's answer about the move in our map?"""
        return said == since and (taken or self._routes.fresh())

    def _ask(self, target: Target, batch: Batch, astray: Astray) -> list[int]:
        """Ask the owner what its words do not say: fills ``astray``; those that it has by now."""
        asking = astray.asking
        session = target.session
        here: list[int] = []
        if session is None:
            self.counters["outages"] += len(asking)
            return here
        entries: list[tuple[int, int, int, int, int, int]] = []
        try:
            for start in range(0, len(asking), CALL_KEYS):
                digests = [batch.digests[position] for position, _ in asking[start : start + CALL_KEYS]]
                entries += session.exchange(M.Locate(0, digests)).entries
        except (TransportError, RemoteProtocolError) as exc:
            session_failed(self._routes, target, session, exc)
        for (position, taken), (status, _flags, _length, _crc, since, _pin) in zip(asking, entries):
            if not astray.by_status(position, status, since, taken=taken) and status == _OK:
                here.append(position)
        return here

    def _start_over(self, owner: Target, positions: list[int], batch: Batch, hops: int) -> None:
        """The map has changed, or the owner has it by now: as from the beginning. Not counted."""
        reader = owner.reader
        if reader is None and owner.ready():
            reader = owner.reader
        if batch.sinks is None:
            astray = self._look_at(owner, positions, batch)
        elif reader is None:
            astray = self._by_wire(owner, positions, batch)
        else:
            astray = Astray()
            for position in positions:
                got = self._copy(reader, batch, position, reader.confirm)
                batch.results[position] = got
                if got == MISS:
                    astray.by_word(position, reader.shard_word(batch.digests[position]))
        if astray:
            self._find(owner, batch, astray, hops)

    def _copy(
        self, reader: ArenaReader, batch: Batch, position: int, confirm: Callable[[bytes, int, int], bool]
    ) -> Any:
        """Find, copy and confirm, or MISS, or SMALL. Not counted."""
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
                got: Any = bytes(reader.value(found))
            elif (got := found.length) > len(sink):
                return SMALL
            else:
                self._copy_out(reader, found, sink)
            if confirm(digest, found.slot, found.seq):
                if found.flags & _CRC and self.checksum and not self._sound(found, got, sink):
                    break
                return got
        return MISS

    def _read_previous(self, target: Target, positions: list[int], batch: Batch) -> None:
        """Look at the previous owner, to which the owner has sent us. Not counted."""
        results, digests = batch.results, batch.digests
        reader = target.reader
        if reader is None and target.ready():
            reader = target.reader
        if reader is not None:
            for position in positions:
                if batch.sinks is None:
                    results[position] = int(reader.contains_previous(digests[position]))
                else:
                    results[position] = self._copy(reader, batch, position, reader.confirm_previous)
        elif batch.sinks is not None:
            self._by_tcp(target, positions, batch, previous=True)
        elif (tcp := target.tcp) is not None:
            wanted = [digests[position] for position in positions]
            for position, status in zip(positions, self._tcp(target, tcp, tcp.exists_previous, wanted)):
                results[position] = int(status == _OK)
        self.counters["moved"] += sum(results[position] not in (MISS, DOWN, SMALL) for position in positions)

    # -- by RDMA and TCP ------------------------------------------------------------------------------

    def _by_wire(self, target: Target, positions: Sequence[int], batch: Batch) -> Astray:
        """Read by RDMA, and by TCP what that leaves over. Not counted."""
        rdma = target.rdma
        if rdma is None or rdma.why:
            return self._by_tcp(target, positions, batch)
        assert batch.sinks is not None
        left, until = self._rdma.read(rdma, positions, batch.digests, batch.sinks, batch.results)
        return self._by_tcp(target, left, batch, until=until) if left else Astray()

    def _by_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, *, previous: bool = False, until: float = 0.0
    ) -> Astray:
        """Fetch by TCP. Not counted."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        astray = Astray()
        tcp = target.tcp
        if tcp is None:
            self.counters["outages"] += len(positions)
            for position in positions:
                results[position] = DOWN
            return astray
        if not target.bulk:
            return self._meanings(target, tcp, positions, batch, previous)
        wants: list[Want] = []
        news: dict[int, bytearray] = {}
        landing: gpu.Landing | None = None
        for position in positions:
            sink = sinks[position]
            if sink is None:
                wants.append((digests[position], VALUE_BYTES_MAX, _room_in(news, position)))
            elif type(sink) is DeviceSpan:
                landing = landing or gpu.Landing()
                wants.append((digests[position], len(sink), landing.room(sink)))
            else:
                view = _bytes_of(sink)
                wants.append((digests[position], len(view), _head_of(view)))
        answers = self._tcp(target, tcp, functools.partial(tcp.fetch, previous=previous, until=until), wants)
        if not answers:
            for position in positions:
                results[position] = DOWN
            return astray
        if landing is not None:
            landing.finish()
        for position, (status, length, crc, flags) in zip(positions, answers):
            if status == _OK:
                sink = sinks[position]
                if flags & _CRC and self.checksum and not self._check(
                    crc, news[position] if sink is None else _head_bytes(sink, length)
                ):  # fmt: skip
                    results[position] = MISS
                else:
                    results[position] = bytes(news[position]) if sink is None else length
            elif status == _TOO_LARGE:
                results[position] = SMALL
            elif previous or not astray.by_status(position, status, length | crc << 32):
                results[position] = DOWN if status == _UNAVAILABLE else MISS
        return astray

    def _meanings(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: Batch, previous: bool
    ) -> Astray:
        """What RDMA left over where values shall not go by TCP: what it means is asked, and not one byte is taken."""
        astray = Astray()
        digests, results = batch.digests, batch.results
        answers = self._tcp(
            target, tcp, functools.partial(tcp.meanings, previous=previous), [digests[each] for each in positions]
        )
        for position, (status, since) in zip(positions, answers or [(_UNAVAILABLE, 0)] * len(positions)):
            if previous or not astray.by_status(position, status, since):
                results[position] = DOWN if status in (_OK, _UNAVAILABLE) else MISS
        return astray

    def _tcp(self, target: Target, tcp: TcpPath, call: Callable[[Any], list[Any]], asked: Any) -> list[Any]:
        """One call of a TCP path; nothing when it failed."""
        try:
            return call(asked)
        except (TransportError, RemoteProtocolError) as exc:
            target.tcp_lost(tcp, str(exc))
            self._routes.wake()
            return []

    # -- exists ---------------------------------------------------------------------------------------

    def stored_many(self, digests: Sequence[bytes]) -> list[bool]:
        """Which are stored?"""
        batch = Batch(digests, None)
        for target, positions in self._routes.group(digests):
            if target is None:
                self.counters["outages"] += len(positions)
                continue
            astray = self._look_at(target, positions, batch)
            if astray:
                self._find(target, batch, astray, HOPS)
        return [got == 1 for got in batch.results]

    def _look_at(self, target: Target, positions: Sequence[int], batch: Batch) -> Astray:
        astray = Astray()
        digests, results = batch.digests, batch.results
        wanted = digests if len(positions) == len(digests) else [digests[position] for position in positions]
        reader = target.reader
        if reader is None and target.ready():
            reader = target.reader
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
                    if not hit and not 0 < (word := shard_word(digests[position])) < _MOVING:
                        astray.by_word(position, word)
        else:
            rdma, until = target.rdma, 0.0
            if rdma is not None and not rdma.why:
                positions, until = self._rdma.exists(rdma, positions, digests, results)
            if positions:
                self._exist_by_tcp(target, positions, batch, astray, until)
        return astray

    def _exist_by_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, astray: Astray, until: float
    ) -> None:
        digests, results = batch.digests, batch.results
        tcp = target.tcp
        if tcp is None:
            self.counters["outages"] += len(positions)
            return
        asking: list[int] = []
        wanted = [digests[position] for position in positions]
        for position, status in zip(
            positions, self._tcp(target, tcp, functools.partial(tcp.exists, until=until), wanted)
        ):  # fmt: skip
            results[position] = int(status == _OK)
            if status == _PREVIOUS:  # of which move only a FETCHED says
                asking.append(position)
            else:
                astray.by_status(position, status, 0)
        wanted = [digests[position] for position in asking]
        meanings = self._tcp(target, tcp, tcp.meanings, wanted) if asking else []
        for position, (status, since) in zip(asking, meanings):
            results[position] = int(status == _OK)
            astray.by_status(position, status, since)

    # -- views ----------------------------------------------------------------------------------------

    def view(self, target: Target | None, digest: bytes) -> View | None:
        """A pinned view, or a copy: by TCP, from a previous owner, of a worker that is down; None for a miss or an
        outage. Counts it."""
        if target is None or not target.ready() or target.session is None:
            got = self.read(target, digest, None)
            return View(memoryview(got)) if isinstance(got, bytes) else None
        return self._pinned(target, digest)

    def _pinned(self, target: Target, digest: bytes) -> View | None:
        """The same by the worker's answer."""
        session = target.session
        if session is None:
            self.counters["outages"] += 1
            return None
        view: View | None = None
        try:
            session.begin_copy()  # until the view's end: the session's pins are not released before
            try:
                status, flags, length, crc, offset, pin = session.pin(digest)
                if status == _OK:
                    view = View.pinned(session.reader, session, offset, length, pin)
            finally:
                if view is None:
                    session.end_copy()
        except (TransportError, RemoteProtocolError) as exc:
            session_failed(self._routes, target, session, exc)
            return None
        if view is None:
            if 0 < session.reader.shard_word(digest) < _MOVING:
                self.counters["misses"] += 1
                return None
            got = self._one(self._by_word, target, digest, None, HOPS)
            return View(memoryview(got)) if isinstance(got, bytes) else None
        if flags & _CRC and self.checksum and not self._check(crc, view.data):
            view.close()
            return None
        self.counters["hits"] += 1
        return view


def session_failed(routes: Routes, target: Target, session: WorkerSession, exc: Exception) -> None:
    """An exchange failed: open the breaker if the session broke."""
    log.info("%r: %s", target, exc)
    if session.broken:
        target.lost(str(exc))
        routes.wake()


def _bytes_of(sink: memoryview | Span) -> memoryview:
    return sink.view() if isinstance(sink, Span) else sink


def _head_bytes(sink: memoryview | Span, length: int) -> memoryview:
    """The first bytes of what was read, to look at them."""
    return gpu.host_copy(sink, length) if type(sink) is DeviceSpan else _bytes_of(sink)[:length]


def _head_of(view: memoryview) -> Callable[[int], memoryview]:
    return lambda length: view[:length]


def _room_in(news: dict[int, bytearray], position: int) -> Callable[[int], memoryview]:
    def room(length: int) -> memoryview:
        news[position] = bytearray(length)
        return memoryview(news[position])

    return room
