"""A client's near copies: reads that look here first, deletes that reach copies, and the thread that makes them.

``promotion.py`` says what near copies are, what can go wrong, and what was chosen.

Reads are hooked in where a key's owner has no arena in this process (:class:`NearReads`). So a value whose owner is on
this host is read by the same code as without near copies, and so is everything of a client that has none. What SiMM's
own adapters store under a key and change later is read at the owner only (:attr:`Near.originals`).

*Here* is one node: of those with an arena that this process maps, the first by name. Its copies may lie in each of its
workers. A client without one copies nothing, and says so once.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...arena.marks.near import COMMIT_NEAR
from ...cluster.lookup import Unresolved
from ...errors import PeerError, SimmError
from ...host import fork
from ...host.buffers import Copier, Span
from ...ipc.counts import HIT_BYTES, Word
from ...ipc.put import ShmPut
from ...ipc.steps import Steps
from ...ipc.tally import Tallies
from ...slab import chunk_bytes_for
from ...wire.messages import Status
from ..batch import DROPPED, HERE, MISS, WAITS, Answer, Batch, NoValue, is_hit
from ..reads import Gets
from ..remote_reads import RemoteReads
from ..routing import Router, Routes, RouteTable
from ..worker_path import Target
from ..writes import Puts
from .promotion import Promotion, near_digest

if TYPE_CHECKING:
    from ...config.client_options import ClientOptions
    from ...ipc.grant_pool import GrantTuple
    from ...ipc.session import WorkerSession

log = logging.getLogger("simm.client")

#: Memory into which values are read that are to be copied, and the most that it takes at a time.
SCRATCH_BYTES: Final = 16 << 20
KEYS_AT_ONCE: Final = 64
#: The first guess of a value's size.
PIECE_BYTES: Final = 256 << 10
#: The thread ends when nothing was to be done for so long, and the next key starts another one.
LINGER_S: Final = 1.0
#: Between two looks for a node on this host, while there is none.
LOOK_S: Final = 0.5

_NOWHERE: Final[tuple[int, ...]] = ()
#: As long as no arena here says what it takes.
_ANY: Final = sys.maxsize


class NearPut(ShmPut):
    """Puts of near copies into arenas on this host."""

    __slots__ = ()

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, after: int = 0
    ) -> tuple[int, int]:
        crc, flags = super()._fill(session, grant, source, length, after)
        return crc, flags | COMMIT_NEAR


class Near:
    """The near copies of one client. Any thread may call it.

    ``copy_of(reader, batch, position)`` reads one value out of an arena, and returns MISS if it is not there.
    """

    #: The client's reads at the owners, for values that may change: no copy is read, and none is made.
    originals: Gets

    def __init__(
        self, routes: Routes, copier: Copier, options: ClientOptions, counters: dict[str, int],
        copy_of: Callable[[Any, Batch, int], Answer],
    ) -> None:  # fmt: skip
        self._routes = routes
        self._copy_of = copy_of
        self.counters = counters
        counters.update(near_hits=0, near_copies=0, near_dropped=0)
        self._deadline_s = options.deadline_s
        # What reads and drops for the thread. Its own counters and tallies: nobody has called for these reads.
        own = dict.fromkeys(counters, 0)
        self._plain = Gets(routes, copier, options.checksum, own, None, Tallies())
        self._put = NearPut(copier, options.checksum)
        self._drops = Puts(routes, self._put, copier, options, own, Tallies())
        self._piece = PIECE_BYTES
        self._said = False
        self._begin()
        fork.in_child(self._begin)

    def _begin(self) -> None:
        """Begin with nothing to do and no thread, also in the child of a fork."""
        self._lock = threading.Lock()
        self._some = threading.Condition(self._lock)
        self._promotion = Promotion()
        self._thread: threading.Thread | None = None
        self._closed = False
        # A child's arenas are not its parent's, which are unmapped there.
        #: The map by which shards were found, those of the node that is here, and until when nobody looks again.
        self._here: tuple[RouteTable | None, Sequence[int], float] = (None, _NOWHERE, 0.0)
        self._nodes: tuple[RouteTable | None, list[Sequence[int]]] = (None, [])
        #: The workers here.
        self._hosts: Sequence[Target] = ()

    # -- where ----------------------------------------------------------------------------------------

    def _shards(self) -> Sequence[int]:
        """Return the shards of the node on this host, ascending; none without one. O(1), or O(shards) with a new map.

        Shards that are moving are left out.
        """
        router = self._routes.router
        if router is None:
            return _NOWHERE
        table, shards, until = self._here
        if table is router.table and (shards or time.monotonic() < until):
            return shards
        return self._find_shards(router)

    def _find_shards(self, router: Router) -> Sequence[int]:
        table = router.table
        node = min((each.info.node for each in table.by_position if each.reader is not None), default="")
        if not node and any(each.fresh for each in table.by_position):
            router.connect_ahead()  # no operation has asked for the servers on this host yet
        shards = _shards_of(table, node) if node else _NOWHERE
        self._hosts = [each for each in table.by_position if each.info.node == node]
        self._here = table, shards, time.monotonic() + LOOK_S
        return shards

    def _is_settled(self) -> bool:
        """Return whether each server has been tried, so that one on this host would be known."""
        router = self._routes.router
        return router is not None and bool(router.epoch) and all(each.settled for each in router.table.by_position)

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "near copies: no data server on this host is reached by shared memory, so nothing is copied: start one "
                "here, or see in stats()['workers'] why it is not reached"
            )

    def _copies_everywhere(self, digests: Sequence[bytes]) -> list[list[bytes]]:
        """Return for each digest those of its copies at all nodes."""
        router = self._routes.router
        if router is None:
            return [[] for _ in digests]
        table, nodes = self._nodes
        if table is not router.table:
            table = router.table
            names = sorted({each.info.node for each in table.by_position})
            nodes = [shards for name in names if (shards := _shards_of(table, name))]
            self._nodes = table, nodes
        return [list(dict.fromkeys([near_digest(digest, shards) for shards in nodes])) for digest in digests]

    # -- reads ------------------------------------------------------------------------------------------

    def look(self, positions: Sequence[int], batch: Batch) -> Sequence[int]:
        """Read copies of values whose owners are elsewhere; return the positions of those that have none here."""
        shards = self._shards()
        if not shards:
            return positions
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        inner = Batch(
            [near_digest(digests[each], shards) for each in positions], [sinks[each] for each in positions]
        )
        left = []
        for at, position in enumerate(positions):
            target = self._routes.target(inner.digests[at])
            reader = target.reader if target is not None else None
            got = MISS if reader is None else self._copy_of(reader, inner, at)
            if got == MISS or reader is None:
                left.append(position)
                continue
            results[position] = inner.results[at] = got
            if is_hit(got):
                self.counters["near_hits"] += 1
                reader.counts[Word.BATCH_HITS] += 1
                (size,) = inner.bytes_read((at,))
                reader.counts[HIT_BYTES] += size
        return left

    def note(self, positions: Sequence[int], batch: Batch) -> None:
        """Take note of values that were read elsewhere: the second time of each it is copied.

        One that is too large for a copy is not: each attempt would fetch it once more for nothing.
        """
        if not self._shards():
            return
        digests, results = batch.digests, batch.results
        with self._lock:
            most = self._largest()
            hits = [digests[each] for each in positions if is_hit(results[each]) and _chunk_of(results[each]) <= most]
            if any([self._promotion.hit(digest) for digest in hits]):  # noqa: C419 -- each of them is noted
                self._wake()

    def _largest(self) -> int:
        """Return the bytes of the largest chunk of which an arena here takes a copy: an operator may change that."""
        return max((reader.near_max for each in self._hosts if (reader := each.reader) is not None), default=_ANY)

    # -- copies wanted ------------------------------------------------------------------------------------

    def prefetch(self, digests: Sequence[bytes]) -> list[int]:
        """Let values be copied here, if their owners are elsewhere; return WAITS, HERE or DROPPED for each."""
        self._routes.group(digests)  # which raises UsageError once closed, and makes a router after a fork
        if not self._shards() and self._is_settled():
            self._say_once()
            return [DROPPED] * len(digests)
        takes = self._largest() > 0
        results = []
        with self._lock:
            for digest in digests:
                owner = self._routes.target(digest)
                if owner is not None and owner.reader is not None:
                    results.append(HERE)
                else:
                    results.append(WAITS if takes and self._promotion.add(digest) else DROPPED)
            if WAITS in results:
                self._wake()
        dropped = results.count(DROPPED)
        self.counters["near_dropped"] += dropped
        return results

    def _wake(self) -> None:
        """Have the thread see to what waits. The lock is held."""
        if self._thread is None and not self._closed:
            thread = threading.Thread(target=self._run, name="simm-near", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # no more threads, or the interpreter is ending
                log.debug("near copies: %s", exc)
                return
            self._thread = thread
        self._some.notify()

    # -- copies gone --------------------------------------------------------------------------------------

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None) -> None:
        """Drop the copies of deleted values, at all nodes."""
        with self._lock:
            self._promotion.forget(digests)
        copies = self._copies_everywhere(digests)
        sized = None if sizes is None else [size for size, each in zip(sizes, copies) for _ in each]
        self._drops.delete([copy for each in copies for copy in each], sized)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve(memoryview(bytearray(SCRATCH_BYTES)))
        except BaseException as exc:  # no memory, as a rule
            with self._lock:  # a later key starts another thread, and what waits now is not copied
                self._thread = None
                dropped = len(self._promotion.take(len(self._promotion)))
            self.counters["near_dropped"] += dropped
            log.warning("near copies: %d values are not copied: %r", dropped, exc)

    def _serve(self, scratch: memoryview) -> None:
        """Make copies until nothing is left to be done."""
        while True:
            with self._lock:
                if not len(self._promotion):
                    self._some.wait(LINGER_S)
                if self._closed or not len(self._promotion):
                    self._thread = None
                    return
                digests = self._promotion.take(max(1, min(KEYS_AT_ONCE, SCRATCH_BYTES // self._piece)))
            made = 0
            try:
                made = self._copy(digests, scratch)
            except SimmError as exc:  # the client was closed meanwhile, as a rule
                log.debug("near copies: %s", exc)
            except Exception:
                log.exception("making near copies")
            dropped = len(digests) - made
            self.counters["near_copies"] += made
            self.counters["near_dropped"] += dropped

    def _copy(self, digests: Sequence[bytes], scratch: memoryview) -> int:
        """Copy values here that are elsewhere; return how many have a copy now, or need none."""
        shards = self._await_shards()
        if not shards:
            self._say_once()
            return 0
        todo: list[tuple[bytes, bytes]] = []
        done = 0
        for digest in digests:
            owner, near = self._routes.target(digest), near_digest(digest, shards)
            target = self._routes.target(near)
            if (owner is not None and owner.reader is not None) or _has(target, near):
                done += 1
            else:
                todo.append((digest, near))
        stored = []
        for (digest, near), value in zip(todo, self._values([digest for digest, _ in todo], scratch), strict=True):
            if value is not None and self._store(near, value):
                stored.append((digest, near))
        # An original that was deleted in the meantime may have been so before its copy was there to be dropped.
        there = self._plain.stored_many([digest for digest, _ in stored])
        gone = [near for (_, near), hit in zip(stored, there) if not hit]
        if gone:
            self._drops.delete(gone)
        return done + len(stored) - len(gone)

    def _await_shards(self) -> Sequence[int]:
        """Return the shards of the node here. Wait for the first attempts to connect, a deadline at most."""
        until = time.monotonic() + self._deadline_s
        while not (shards := self._shards()):
            if self._closed or self._is_settled() or time.monotonic() > until:
                return self._shards()
            time.sleep(0.02)
        return shards

    def _values(self, digests: Sequence[bytes], scratch: memoryview) -> Iterator[memoryview | None]:
        """Yield values in the scratch memory, or in memory of their own if they are longer than expected.

        One value at a time has memory of its own: it is the caller's until the next one is asked for.
        """
        piece = self._piece
        sinks = [scratch[at * piece : (at + 1) * piece] for at in range(len(digests))]
        longest = 0
        for digest, sink, got in zip(digests, sinks, self._plain.read_many(digests, sinks)):
            value: memoryview | None = sink[:got] if got > 0 else None
            if got == NoValue.TOO_SMALL:
                (whole,) = self._plain.read_many([digest], [None])
                value = memoryview(whole) if type(whole) is bytes else None
                del whole
            longest = max(longest, len(value) if value is not None else 0)
            yield value
        if longest > piece or 0 < 4 * longest < piece:
            self._piece = min(SCRATCH_BYTES, max(4096, 1 << (longest - 1).bit_length()))

    def _store(self, near: bytes, value: memoryview) -> bool:
        """Store a copy in its arena on this host; return whether it is there."""
        target = self._routes.target(near)
        session = target.session if target is not None else None
        if target is None or session is None or session.broken:
            return False
        try:
            return self._put.put_one(session, near, value) == Status.OK
        except PeerError as exc:
            self._routes.session_failed(target, session, exc)
            return False

    def close(self) -> None:
        """End the thread, after what it is doing. Twice is harmless."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._some.notify_all()
        if thread is not None:
            thread.join(2 * self._deadline_s)


class NearReads(RemoteReads):
    """Reads at workers on other hosts, after a look at the copies here."""

    near: Near

    def read(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        left = self._look(positions, batch)
        if not left:
            return Unresolved()
        unresolved = yield from super().read(target, left, batch)
        self.near.note(left, batch)
        return unresolved

    def _look(self, positions: Sequence[int], batch: Batch) -> Sequence[int]:
        """Read copies here; return the positions of the values that have none."""
        return self.near.look(positions, batch)


class NearGets(Gets):
    """The reads of a client with near copies."""

    remote_kind = NearReads

    def __init__(self, options: ClientOptions, routes: Routes, copier: Copier, *arguments: Any) -> None:
        super().__init__(routes, copier, *arguments)
        # Weakly: a reference cycle would keep the router, and its arenas, of a client that was dropped.
        mine = weakref.ref(self)

        def copy_of(*arguments: Any) -> Answer:
            gets = mine()
            return MISS if gets is None else gets._near_copy(*arguments)  # while the client traces it is another one

        self.near = Near(routes, copier, options, self.counters, copy_of)
        remote = self._remote
        assert isinstance(remote, NearReads)
        remote.near = self.near

    def _near_copy(self, reader: Any, batch: Batch, position: int) -> Answer:
        def confirm(digest: bytes, slot: int, seq: int) -> bool:
            confirmed: bool = reader.confirm(digest, slot, seq)
            if confirmed:
                reader.touch(slot)
            return confirmed

        return self._copy(reader, batch, position, confirm)


class NearPuts(Puts):
    """The mutations of a client with near copies."""

    near: Near

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[int]:
        """Drop entries as :meth:`Puts.delete`, and then their copies. A copy that is not reached is no outage."""
        with self._routes.patience():  # one for both
            statuses = super().delete(digests, sizes)
            self._delete_near(digests, sizes)
        return statuses

    def _delete_near(self, digests: Sequence[bytes], sizes: Sequence[int] | None) -> None:
        self.near.delete(digests, sizes)


def _chunk_of(got: Answer) -> int:
    """Return the bytes of the chunk of a value that was read, or of which ranges were."""
    return chunk_bytes_for(len(got) if isinstance(got, bytes) else int(got))


def _has(target: Target | None, near: bytes) -> bool:
    """Return whether a copy is in its arena, and one that reads believe."""
    reader = target.reader if target is not None else None
    return reader is not None and reader.has_own(near)


def _shards_of(table: RouteTable, node: str) -> Sequence[int]:
    """Return the shards that a node's workers own, ascending, without those that are moving. O(shards), by numpy."""
    mine = [at for at, target in enumerate(table.by_position) if target.info.node == node]
    shards: list[int] = np.flatnonzero(np.isin(table.owners, mine)).tolist()
    return [shard for shard in shards if shard not in table.moving]


def parts_of(options: ClientOptions, reads: tuple[Any, ...], writes: tuple[Any, ...]) -> tuple[Gets, Puts, Near]:
    """Return the reads and the mutations of a client with near copies, by the arguments of those without, and these."""
    gets, puts = NearGets(options, *reads), NearPuts(*writes)
    puts.near = gets.near
    gets.near.originals = Gets(*reads)
    return gets, puts, gets.near
