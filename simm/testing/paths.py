"""A fake's paths to its servers, without servers: reads, puts, pins and prefixes of a store."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

from ..arena.hashing import Hasher
from ..arena.layout import ENTRY_LARGE
from ..cluster.lookup import HOPS
from ..constants import VALUE_BYTES_MAX
from ..errors import DeviceError
from ..host import fork
from ..host.buffers import Copier, Span, address_of, host_view
from ..host.parts import scatter
from ..ipc.patience import Patience
from ..sdk.batch import DROPPED, HERE, MISS, UNAVAILABLE, Answer, Sink, View, view_of_answer
from ..sdk.ops.arena_pins import ArenaPins
from ..sdk.ops.load_time import Share, Shares, Speeds
from ..sdk.ops.pinner import Pinner
from ..sdk.ops.pins import Pins, Want
from ..sdk.ops.prefix import NotHere, Prefix, Prefixes
from ..sdk.reads import Gets
from ..sdk.remote_reads import RemoteReads
from ..sdk.routing import Routes
from ..sdk.worker_path import Target
from ..sdk.writes import Puts
from ..wire.messages import Status
from .store import FakeStore

log = logging.getLogger("simm.client")


class StoreRoutes(Routes):
    """Routes to no server, until closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retry_at = math.inf  # there is no manager
        self.closed = False
        self.router = None
        self.route = []
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._retry_at = math.inf


class StoreGets(Gets):
    """Reads of a store."""

    def __init__(
        self, store: FakeStore, routes: Routes, copier: Copier, checksum: bool, counters: dict[str, int]
    ) -> None:
        super().__init__(routes, copier, checksum, counters)
        self.routes = routes
        self._store = store

    def _serves(self, operation: str, keys: int) -> bool:
        """Return whether the call is carried out, and count an outage. Raises UsageError once closed."""
        self._routes.restart()
        if self._store._serves(operation, keys):
            return True
        self.counters["outages"] += keys
        return False

    def read(self, target: Target | None, digest: bytes, sink: Sink, hops: int = HOPS) -> Answer:
        return self.read_many([digest], [sink])[0]  # type: ignore[no-any-return]

    def read_many(
        self, digests: Sequence[bytes], sinks: Sequence[Sink], patience: Patience | None = None
    ) -> list[Any]:
        if not self._serves("get", len(digests)):
            return [UNAVAILABLE] * len(digests)
        results: list[Any] = []
        for digest, sink in zip(digests, sinks):
            value = self._store._find(digest)
            try:
                if value is not None and self.differs(self._store._flags(digest)):
                    results.append(self.other_kind())
                else:
                    results.append(MISS if value is None else self._out_of(View(memoryview(value)), sink))
            except DeviceError as exc:
                results.append(self.device_failed(exc))
        misses, hits = results.count(MISS), sum(type(got) is bytes or got > 0 for got in results)
        self.counters["misses"] += misses
        self.counters["hits"] += hits
        return results

    def stored_many(self, digests: Sequence[bytes], patience: Patience | None = None) -> list[bool]:
        serves = self._serves("exists", len(digests))
        return [serves and self._store._has(digest) for digest in digests]

    def holds_many(self, digests: Sequence[bytes], lengths: Sequence[int]) -> list[bool]:
        there = self.stored_many(digests)
        there = [hit and not self.differs(self._store._flags(digest)) for digest, hit in zip(digests, there)]
        stored = [self._store._find(digest) if hit else None for digest, hit in zip(digests, there)]
        return [value is not None and len(value) == length for value, length in zip(stored, lengths)]

    def sizes(self, digests: Sequence[bytes]) -> list[int]:
        """Return the sizes of values, 0 for a miss."""
        serves = self._serves("exists", len(digests))
        return [len(self._store._find(digest) or b"") if serves else 0 for digest in digests]

    def shares(self, digests: Sequence[bytes]) -> list[Share]:
        """Return the values that are stored, as if they were on this host."""
        sizes = [size for size in self.sizes(digests) if size]
        return [Share("shm", len(sizes), sum(sizes))]

    def view(self, target: Target | None, digest: bytes) -> View:
        if not self._serves("view", 1):
            return View.miss()
        data = self._store._view(digest)
        if data is not None and self.differs(self._store._flags(digest)):
            return view_of_answer(self.other_kind())
        self.counters["misses" if data is None else "hits"] += 1
        return View.miss() if data is None else View(data)


class _NoManifests(RemoteReads):
    """Reads of manifests from no server. They say what an ordinary entry is to them, as in a real client."""

    kind = ENTRY_LARGE


class StoreManifestGets(StoreGets):
    """Reads of manifests in a store."""

    kind = ENTRY_LARGE
    remote_kind = _NoManifests


class StorePins(ArenaPins):
    """Pinned values of a store."""

    def __init__(self, gets: StoreGets, copier: Copier) -> None:
        self._gets = gets
        self._copier = copier
        #: By number in the call.
        self.views: dict[int, memoryview] = {}

    def read(self, wants: Sequence[Want], results: dict[int, Any]) -> None:
        if self._gets._serves("get", len(wants)):
            for number, ranges in wants:
                value = self.views[number]
                scatter(ranges, value, address_of(value), 0, self._copier)
                results[number] = 1

    def drop(self, positions: Sequence[int]) -> None:
        """Release some values before the others."""
        for position in positions:
            self.views.pop(position, None)

    def end(self) -> None:
        self.views.clear()

    def note_addresses(self, addresses: list[int]) -> bool:
        """Return False: each read goes by way of :meth:`read`."""
        return False


class StorePinner(Pinner):
    """Pins values of a store."""

    def __init__(self, gets: StoreGets, routes: Routes, copier: Copier, counters: dict[str, int]) -> None:
        super().__init__(routes, gets, copier, counters, None, 0.0)
        self._fake = gets
        self._store = gets._store
        self._serves = gets._serves

    def _find(self, pins: Pins, digests: Sequence[bytes]) -> None:
        if not self._serves("pin", len(digests)):
            return
        holder = StorePins(self._fake, self._copier)
        for number, digest in enumerate(digests):
            value = self._store._view(digest)
            if value is not None and self._fake.differs(self._store._flags(digest)):
                pins.parted.add(number)
            elif value is not None:
                holder.views[number] = value
                pins.take(number, holder, len(value))


class StoreNear:
    """Near copies of what is in a store: none, as all of it counts as on this host."""

    def __init__(self, gets: StoreGets) -> None:
        self._fake = self.originals = gets

    def prefetch(self, digests: Sequence[bytes]) -> list[int]:
        return [HERE if self._fake._serves("prefetch", len(digests)) else DROPPED] * len(digests)

    def close(self) -> None:
        """Nothing is open."""


class StorePuts(Puts):
    """Mutations of a store. ``once``: existing values stay unchanged. ``namespace``: whose values are kept."""

    kind: int = 0

    def __init__(self, store: FakeStore, once: bool, namespace: str, routes: Routes, *more: Any) -> None:
        super().__init__(routes, *more)
        self._fake = store
        self._once = once
        self._namespace = namespace

    def store(
        self, digests: Sequence[bytes], sources: Sequence[memoryview | Span], patience: Patience | None = None
    ) -> list[int]:
        self._routes.restart()
        statuses = [Status.UNAVAILABLE] * len(digests)
        if not self._fake._serves("put", len(digests)):
            return statuses
        there = {digest for digest in digests if self._fake._has(digest)} if self._once else frozenset()
        for position, (digest, source) in enumerate(zip(digests, sources)):
            try:
                value = b"" if len(source) > VALUE_BYTES_MAX else bytes(host_view(source))
                kept = digest in there or (value != b"" and self._fake._keep(digest, value, self.kind))
            except DeviceError as exc:
                log.warning("a put out of GPU memory: %s", str(exc))
                continue
            statuses[position] = Status.OK if kept else Status.NO_SPACE
        return statuses

    def _explain(self, digest: bytes, status: int) -> str:
        if status == Status.NO_SPACE:
            return "no room in the FakeStore"
        return "an outage of the FakeStore, or the value could not be read"

    def delete(self, digests: Sequence[bytes], sizes: Sequence[int] | None = None) -> list[int]:
        self._routes.restart()
        keys = len(digests)
        if not self._fake._serves("delete", keys):
            self.counters["outages"] += keys
            return [Status.UNAVAILABLE] * keys
        return [Status.OK if self._fake._drop(*at) else Status.NOT_FOUND for at in zip(digests, sizes or [-1] * keys)]

    def group(self, groups: Sequence[Sequence[bytes]]) -> list[int]:
        self._routes.restart()
        count = len(groups)
        if not self._fake._serves("put", sum(map(len, groups))):
            self.counters["outages"] += count
            return [Status.UNAVAILABLE] * count
        return [Status.OK if self._fake._group(digests) else Status.NOT_FOUND for digests in groups]


    def keep(self, digests: Sequence[bytes], how: int, seconds: int) -> list[int]:
        self._routes.restart()
        if not self._fake._serves("keep", len(digests)):
            return [Status.UNAVAILABLE] * len(digests)
        return [self._fake._keep_for(digest, how, seconds, self._namespace) for digest in digests]


class StoreManifestPuts(StorePuts):
    """Puts of manifests into a store."""

    kind = ENTRY_LARGE


class StorePrefixes(Prefixes):
    """Prefixes of what is in a store, as if it were on this host."""

    def __init__(self, gets: StoreGets, hasher: Hasher, speeds: Speeds) -> None:
        nowhere = Shares(gets.routes, gets.counters, None)
        super().__init__(gets.routes, hasher, speeds, gets.counters, gets.stored_many, nowhere)
        self.gets = gets

    def _bisect(self, keys: Sequence[str], group: int, pages: int) -> int:
        raise NotHere

    def _sizes(self, digests: Sequence[bytes], places: list[Any]) -> list[int]:
        return self.gets.sizes(digests)

    def _answer(self, sizes: Any, group: int, places: Any) -> Prefix:
        found = super()._answer(sizes, group, ())
        shares = [Share("shm", found.keys, int(sizes[: found.keys].sum()))]
        hosts = {"fake": found.keys} if found.keys else {}
        return found._replace(by_host=hosts, here=found.keys, load_ms=1000.0 * self._speeds.expected_s(shares))
