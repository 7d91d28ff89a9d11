"""LMCache's multi-process servers: who is there, what each has told in which order, and what of it may be believed.

A server numbers its batches from 1 in each of its processes, whose own number, the incarnation, only grows. It sends a
batch once, and cannot repeat one. So if a number is missing, all that is known of this server is forgotten. What it
stores since then is true again, but not all that it has (``Source.lost``), until another process of it is heard from
its first batch on. A process that ends takes its memory with it. A server that is silent for ``LEASE_S`` has ended.

A backend that servers share (``shared``) is no server's own. It is a pool here, as a store is. What one server stores
there, another one deletes, and nothing orders the events of two. So after a removal a key counts again only if a server
has stored it in a request behind ``SETTLED`` others since. A server sends one request after the other, so what it tells
in one has happened after the one before the last. Where events of any server may be missing, all pools are forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

from ...errors import UsageError
from ..blocks import Blocks
from ..events import BadEvent, Event, Removed, Stored, Where
from ..sources import CPU, LMCACHE_SERVER, LMCACHE_SHARED, LOGGED, Registration, Source
from .hashes import name_of
from .messages import DELETE, NUMBER_MAX, OTHERS, STORE, TIERS, Batch, Entry, Head, batches, entry, told
from .placements import Place, Placements

log = logging.getLogger("simm.index.lmcache")

#: Seconds of silence after which a server has ended. It sends a heartbeat every 5.
LEASE_S: Final = 30.0
SERVERS_MAX: Final = 1024
POOLS_MAX: Final = 64
#: Names of models, of each server.
MODELS_MAX: Final = 256
#: Parts of chunks in places, of all servers and pools together: 330 bytes each, with the index.
ENTRIES_MAX: Final = 1 << 20
#: Batches whose bytes are remembered, of each server.
DIGESTS_MAX: Final = 64
#: See the module.
SETTLED: Final = 3
REMOVALS_MAX: Final = 1 << 16
ENDED_MAX: Final = 4096

APPLIED: Final = "applied"
DUPLICATE: Final = "duplicates"
STALE: Final = "stale"

_Value = TypeVar("_Value")
#: A backend, and the ranks of the engines that use it.
_PoolName = tuple[str, int]
#: A part's chunk in a shared place.
_Removal = tuple[Place, str, str, int, bytes]


class Server:
    """One server, and what its stream has come to."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.placements = Placements()
        #: Of its process, None before the first batch; and the number of the last batch.
        self.incarnation: int | None = None
        self.seq = 0
        #: Of the last batches, by their numbers, and of the first.
        self.digests: OrderedDict[int, bytes] = OrderedDict()
        self.first = b""
        #: Of a process that seems to be over: its number, the last batch and request, and how many requests.
        self.doubted = (-1, 0, 0, 0)
        #: The times of its last requests, in requests of all servers.
        self.requests: deque[int] = deque(maxlen=SETTLED)
        #: Tokens of a chunk, once it has told any.
        self.size: int | None = None
        self.until = 0.0
        #: Everything since the process began is known.
        self.complete = False
        self.counts: Counter[str] = Counter()


class _Pool:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.placements = Placements()


class Servers:
    """All servers and pools. Any thread may call the methods.

    Args:
        size: tokens of a chunk, for servers that do not tell any.
        clock: monotonic seconds.
    """

    def __init__(self, index: Blocks, *, size: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._size = size
        self._clock = clock
        self._lock = index.lock
        self._servers: dict[str, Server] = {}
        self._pools: dict[_PoolName, _Pool] = {}
        self._requests = 0
        #: Servers that have said that they end, and are not registered again.
        self._ended: OrderedDict[str, None] = OrderedDict()
        #: Of servers that are gone: the process and the last of its numbers that must not be believed again.
        self._past: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._unknown = 0
        #: When a key of a shared place was removed, for the latest of them, and when any other one may have been.
        self._removals: OrderedDict[_Removal, int] = OrderedDict()
        self._floor = 0

    # -- members -----------------------------------------------------------------------------------------

    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take a server in, or renew its lease. Raises UsageError."""
        said = told(body)
        name = said.instance or f"mp-{uuid.uuid4().hex}"
        with self._lock:
            known = self._servers.get(name)
            self._ended.pop(name, None)
            server = known if known is not None else self._open(name)
            server.until = self._clock() + LEASE_S
        log.info("LMCache's server %r at %s:%d %s", name, said.address, said.port,
                 "is there again" if known is not None else "is new")  # fmt: skip
        return {"instance_id": name, "re_registered": known is not None}

    def heartbeat(self, name: str) -> bool:
        """Renew a lease. Return False for a server that is not known."""
        with self._lock:
            server = self._servers.get(name)
            if server is not None:
                server.until = self._clock() + LEASE_S
            return server is not None

    def deregister(self, name: str) -> None:
        """Forget a server that ends, and do not believe what its process says later."""
        with self._lock:
            _keep(self._ended, name, None)
            server = self._servers.get(name)
            if server is not None:
                server.seq = NUMBER_MAX
                self._close(name, server)

    def expire(self) -> None:
        """End the leases that are over."""
        with self._lock:
            now = self._clock()
            for name, server in list(self._servers.items()):
                if server.until <= now:
                    log.info("the lease of LMCache's server %r has ended", name)
                    self._close(name, server)

    def stream(self, source: Source) -> Server | None:
        """Return the server of a source; None for other sources."""
        server = self._servers.get(source.registration.instance)
        return server if server is not None and server.source is source else None

    def _open(self, name: str) -> Server:
        registration = Registration(name, "", LMCACHE_SERVER, rank=None, storage_removals=True)
        if len(self._servers) >= SERVERS_MAX:
            raise UsageError(f"{SERVERS_MAX} servers of LMCache at most")
        if registration.name in self._index.sources:
            raise UsageError(f"{name!r} is registered as another publisher")
        server = self._servers[name] = Server(self._index.register(registration))
        return server

    def _close(self, name: str, server: Server) -> None:
        del self._servers[name]
        try:
            self._index.unregister(server.source.registration.name)
        finally:
            if server.incarnation is not None:
                _keep(self._past, name, (server.incarnation, server.seq))
                self._forget_pools()

    # -- events ------------------------------------------------------------------------------------------

    def events(self, body: bytes) -> dict[str, int]:
        """Take the batches of a request, and return how many were applied, known, or of a process that is over.

        O(bytes). Raises UsageError for a body that cannot be read; nothing of it is applied then.
        """
        found = batches(body)
        results = Counter({APPLIED: 0, DUPLICATE: 0, STALE: 0})
        with self._lock:
            self._requests += 1
            senders = set()
            for batch in found:
                result = self._take(batch)
                results[result] += 1
                if result == APPLIED:
                    senders.add(batch.head.instance_id)
            for name in senders:
                server = self._servers.get(name)
                if server is not None:
                    server.requests.append(self._requests)
        return dict(results)

    def _take(self, batch: Batch) -> str:
        head = batch.head
        server = self._servers.get(head.instance_id)
        if server is None:
            over = head.instance_id in self._ended
        else:
            over = server.incarnation is not None and head.incarnation < server.incarnation
        if server is None or server.incarnation is None:
            past = (head.incarnation, head.seq) <= self._past.get(head.instance_id, (-1, 0))
            if past and server is not None and self._goes_on(server, head):
                del self._past[head.instance_id]
                past = False
            over |= past
        if server is None and not over:
            try:
                server = self._open(head.instance_id)
            except UsageError as exc:
                self._unknown += 1
                if self._unknown in LOGGED:
                    log.warning("a batch of LMCache's server is not taken (%d so far): %s", self._unknown, exc)
        if server is not None and server.incarnation is not None and over:
            # The clock was put back, or two have this name: what is known may be of the wrong one.
            self._complain(server, f"batch {head.seq} of process {head.incarnation}, not {server.incarnation}")
            if server.complete or server.placements.entries:
                self._lose(server)
        if server is None or over:
            if head.shared and head.event_type != STORE:
                self._forget_pools()
            return STALE
        server.until = self._clock() + LEASE_S
        if server.incarnation is None:
            server.incarnation = head.incarnation
        elif head.incarnation > server.incarnation:
            self._begin(server, head.incarnation)
        elif head.seq <= server.seq:
            if batch.digest in (server.digests.get(head.seq), server.first):
                return DUPLICATE
            self._begin(server, head.incarnation)  # two processes that began in the same second
            if head.seq > 1:  # or an old batch of this one
                server.seq = head.seq
                return STALE
        try:
            if head.seq == 1:
                server.complete, server.source.lost = True, False
            elif server.seq:
                if head.seq != server.seq + 1:
                    server.counts["gaps"] += 1
                    self._lose(server)
            else:
                self._forget_pools()  # it was joined late: what it has removed is not known
            server.seq = head.seq
            server.digests[head.seq] = batch.digest
            if head.seq == 1:
                server.first = batch.digest
            if len(server.digests) > DIGESTS_MAX:
                server.digests.popitem(last=False)
            server.counts["messages"] += 1
            self._apply(server, head)
        except BaseException:  # as of a missing number: nobody tells it again
            self._lose(server)
            raise
        return APPLIED

    def _goes_on(self, server: Server, head: Head) -> bool:
        """Note a batch of a process that seems to be over. Return True if it goes on sending, and so is not.

        Another one of its name has said that it ends, or its clock was put back. One that is over has no more requests
        than the last.
        """
        incarnation, seq, request, count = server.doubted
        if incarnation != head.incarnation:
            seq = request = count = 0
        if head.seq > seq:
            server.doubted = head.incarnation, head.seq, self._requests, count + (request != self._requests)
        return server.doubted[3] > SETTLED

    def _begin(self, server: Server, incarnation: int) -> None:
        """Forget a process that is over: another one has its name."""
        server.counts["restarts"] += 1
        self._lose(server)
        server.incarnation, server.seq, server.size = incarnation, 0, None
        server.first = b""
        server.digests.clear()
        server.requests.clear()

    def _lose(self, server: Server) -> None:
        """Forget all that a server has, as it may be wrong."""
        server.complete, server.source.lost = False, True
        try:
            server.placements.clear()
            self._index.clear(server.source)
        finally:
            self._forget_pools()

    def _forget_pools(self) -> None:
        """Forget what servers share: a removal may be missing."""
        self._removals.clear()
        self._floor = self._requests
        for pool in self._pools.values():
            pool.placements.clear()
            self._index.clear(pool.source)

    def _apply(self, server: Server, head: Head) -> None:
        if head.event_type in OTHERS:
            return
        if head.event_type not in (STORE, DELETE) or head.tier not in TIERS or not head.backend:
            self._complain(server, f"{head.event_type!r} of {head.backend!r} in {head.tier!r}")
            self._lose(server)
            return
        entries = []
        unread = False
        for raw in head.entries:
            try:
                found = entry(raw)
            except BadEvent as exc:
                self._complain(server, str(exc))
                unread = True
                continue
            if found is None:
                server.source.ignored["a rank that no engine asks for"] += 1
            else:
                entries.append(found)
        if unread:
            server.complete = False
            if head.event_type == DELETE:
                self._lose(server)  # any may be gone
        server.counts["events"] += len(entries)
        place = head.tier, head.backend
        if head.event_type == STORE:
            self._store(server, head, place, entries)
        else:
            self._delete(server, head, place, entries)

    def _store(self, server: Server, head: Head, place: Place, entries: list[Entry]) -> None:
        self._measure(server, entries)
        size = server.size or self._size
        ignored = server.source.ignored
        pools: dict[int, _Pool | None] = {}
        room = ENTRIES_MAX - self._entries
        for each in entries:
            if size is None or each.tokens not in (0, size):
                ignored["no block size"] += 1
                server.complete = False
                continue
            if len(server.source.models) < MODELS_MAX:
                server.source.models.add(each.model)
            placements = server.placements
            if head.shared:
                if each.world not in pools:
                    pools[each.world] = self._pool(head.backend, each.world, pools.values())
                pool = pools[each.world]
                if pool is None or not self._settled(server, place, each):
                    ignored["a shared backend: too many" if pool is None else "a shared backend: too early"] += 1
                    continue
                placements = pool.placements
            before, forgotten = placements.entries, placements.forgotten
            if room <= 0 or not placements.store(each, size, place):
                ignored["too many blocks" if room <= 0 else "too many backends"] += 1
                server.complete = False
            if placements.forgotten > forgotten:
                ignored["too many salts"] += placements.forgotten - forgotten
                server.complete = False
            room -= placements.entries - before
        missed = server.source.missed
        self._tell(server.source, server.placements)
        if server.source.missed > missed:
            server.complete = False
        for each_pool in pools.values():
            if each_pool is not None:
                self._tell(each_pool.source, each_pool.placements)

    def _delete(self, server: Server, head: Head, place: Place, entries: list[Entry]) -> None:
        if not head.shared:
            for each in entries:
                server.placements.delete(each, place)
            self._tell(server.source, server.placements)
            return
        pools = {}
        for each in entries:
            pool = self._pools.get((head.backend, each.world))
            if pool is not None:
                pools[each.world] = pool
                pool.placements.delete(each, place)
            removal = _removal(place, each)
            self._removals[removal] = self._requests
            self._removals.move_to_end(removal)
            if len(self._removals) > REMOVALS_MAX:
                self._floor = max(self._floor, self._removals.popitem(last=False)[1])
        for pool in pools.values():
            self._tell(pool.source, pool.placements)

    def _measure(self, server: Server, entries: list[Entry]) -> None:
        """Learn how many tokens a chunk has."""
        sizes = {each.tokens for each in entries if each.tokens}
        if not sizes or sizes == {server.size}:
            return
        if len(sizes) > 1 or server.size or (self._size and sizes != {self._size}):
            # A process has one size. What was noted under another one is wrong.
            self._complain(server, f"chunks of {sorted(sizes)[:4]} tokens, and of {server.size or self._size}")
            self._lose(server)
        server.size = min(sizes)

    def _settled(self, server: Server, place: Place, each: Entry) -> bool:
        """Return whether a server has stored a key of a shared place after whoever has removed it."""
        removed = max(self._floor, self._removals.get(_removal(place, each), 0))
        return len(server.requests) == SETTLED and server.requests[0] > removed

    def _pool(self, backend: str, world: int, others: Collection[_Pool | None]) -> _Pool | None:
        """Return a pool, beside ``others`` that are in use; None if there are too many."""
        pool = self._pools.get((backend, world))
        if pool is None and (len(self._pools) < POOLS_MAX or self._drop_empty(others)):
            name = f"lmcache:{backend}"
            registration = Registration(name, "", LMCACHE_SHARED, rank=world, pool=f"{name}:{world}")
            if registration.name not in self._index.sources:
                with contextlib.suppress(UsageError):  # there are too many publishers
                    pool = self._pools[backend, world] = _Pool(self._index.register(registration))
        return pool

    def _drop_empty(self, kept: Collection[_Pool | None]) -> bool:
        """Forget a pool that has nothing: its servers may be gone for ever. Return False if there is none."""
        for name, pool in self._pools.items():
            if pool not in kept and not pool.placements.entries:
                del self._pools[name]
                self._index.unregister(pool.source.registration.name)
                return True
        return False

    @property
    def _entries(self) -> int:
        of_servers = sum(each.placements.entries for each in self._servers.values())
        return of_servers + sum(each.placements.entries for each in self._pools.values())

    def _tell(self, source: Source, placements: Placements) -> None:
        """Put into the index what is whole now, and take out what is not."""
        events: list[Event] = []
        for change in placements.settle():
            family = change.family
            where = Where("cpu" if change.tier == CPU else "storage", family.model, salt=family.salt, rank=family.world)
            if change.added:
                events.append(Stored(_names(change.added), None, None, family.size, where, standard=True))
            if change.removed:
                events.append(Removed(_names(change.removed), where))
        if events:
            self._index.apply(source, events)

    def _complain(self, server: Server, why: str) -> None:
        server.counts["refused"] += 1
        if server.counts["refused"] in LOGGED:
            name = server.source.registration.instance
            log.warning("%r sent what cannot be read (%d so far): %.200r", name, server.counts["refused"], why)


def _keep(kept: OrderedDict[str, _Value], name: str, value: _Value) -> None:
    """Remember a name as the newest, ``ENDED_MAX`` of them at most."""
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > ENDED_MAX:
        kept.popitem(last=False)


def _removal(place: Place, each: Entry) -> _Removal:
    return place, each.model, each.salt, each.world, each.digest


def _names(chunks: list[bytes]) -> array[int]:
    return array("Q", [name_of(each) for each in chunks])


__all__ = ["LEASE_S", "Server", "Servers"]
