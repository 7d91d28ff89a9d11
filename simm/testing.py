"""Test doubles for programs that embed SiMM: a client without a cluster, and a cluster in one call.

:class:`FakeClient` is a :class:`~simm.client.Client` that keeps values in this process. Fakes that share a
:class:`FakeStore` see each other's values, as clients of one cluster do; namespaces are separate. Without ``store=``
each fake has its own.

    store = FakeStore()
    with FakeClient(store=store) as one, FakeClient(store=store) as other:
        one.put("k", b"value")
        other.get("k")                    # b"value"

The store fails on request, in the ways in which a cluster does, so nothing raises:

    FakeStore("64M")                      # evicts values when it is full: misses appear
    store.unavailable = True              # gets miss and puts fail until it is False again
    store.fail(3)                         # the third call from now is an outage, the others are not
    store.fail(1, operation="put")        # the next put is an outage
    store.latency = lambda operation, keys: time.sleep(0.01)
    store.clear()                         # as after a restart of the server

:func:`local_cluster` is a real cluster, as child processes that end with the block. With pytest:

    @pytest.fixture(scope="session")
    def simm_cluster():
        with local_cluster() as cluster: yield cluster

A fixture for the fake is just ``return FakeClient()``.

Differences of the fake
-----------------------
It has no arena: a value takes its own length of the capacity, and a value may fit that a real arena is too small for.
The order of eviction is no promise, here or there. A forked child has a copy of the store from then on. A fake can be
pickled only for the process that has its store. Checksums find nothing.

How it works
------------
The fake replaces the paths to the servers and nothing else. The client's own code checks arguments, makes results and
errors, and runs the asyncio forms. ``tests/system/client/test_conformance.py`` runs one suite on both.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from .arena.hashing import Hasher
from .client import Client
from .cluster.lookup import HOPS
from .config.client_options import ClientOptions
from .config.parsers import parse_bytes
from .constants import VALUE_BYTES_MAX
from .errors import DeviceError, SimmError, UsageError
from .host import fork
from .host.buffers import Copier, Span, address_of, host_view
from .host.parts import scatter
from .ipc.patience import Patience
from .ipc.put import ShmPut
from .sdk.batch import MISS, UNAVAILABLE, Answer, Sink, View
from .sdk.ops.epochs import SharedEpochs
from .sdk.ops.load_time import LoadTimes, Share, Shares, Speeds
from .sdk.ops.pinner import Pinner
from .sdk.ops.pins import ArenaPins, Pins, Want
from .sdk.ops.prefix import NotHere, Prefix, Prefixes
from .sdk.reads import Gets
from .sdk.routing import Routes
from .sdk.worker_path import Target
from .sdk.writes import Puts
from .wire.messages import Status

__all__ = ["OPERATIONS", "FakeClient", "FakeStore", "RunningCluster", "local_cluster"]

log = logging.getLogger("simm.client")

#: Names of a store's calls. ``get`` includes ``get_into`` and reads of pinned values. Each includes its ``_many`` and
#: asyncio forms.
OPERATIONS: Final = ("put", "get", "exists", "delete", "view", "pin")
#: Room for many values of an engine's size, and quick to fault in.
CLUSTER_MEMORY: Final = "64M"
READY_S: Final = 60.0

_T = TypeVar("_T")
_Array = np.ndarray[Any, np.dtype[np.uint8]]

#: Guards all stores. One lock, so that a fork can hold it: the child then finds no store half changed.
_lock = threading.RLock()
fork.hold(_lock.acquire, _lock.release)


class _Entry:
    """A value, and the memory of its views while there are any."""

    __slots__ = ("seen", "value")

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.seen: weakref.ref[_Array] | None = None

    @property
    def pinned(self) -> bool:
        """Whether a view of it is alive."""
        return self.seen is not None and self.seen() is not None

    def view(self) -> memoryview:
        """Return the value in place, pinned as long as anything made from it is alive."""
        array = None if self.seen is None else self.seen()
        if array is None:
            array = np.frombuffer(self.value, np.uint8)
            self.seen = weakref.ref(array)
        return array.data


class FakeStore:
    """The memory that fakes share, and the failures to inject. Any thread may change all of it at any time.

    Args:
        capacity: bytes of values, or text such as ``"64M"``; None for no bound. The store evicts the least recently
            used value first, and none that has a view.
        unavailable: begin with an outage.
        latency: called with the operation (one of :data:`OPERATIONS`) and the number of keys before each call is
            carried out, in the caller's thread. It may sleep, wait or record its arguments; no lock is held. The call
            raises what it raises.

    Raises ConfigError for a capacity that is not a size.
    """

    def __init__(
        self, capacity: int | str | None = None, *, unavailable: bool = False,
        latency: Callable[[str, int], object] | None = None,
    ) -> None:  # fmt: skip
        self.capacity = None if capacity is None else parse_bytes(capacity)
        #: While this is true, every get is a miss and every put fails. Values stay stored.
        self.unavailable = unavailable
        self.latency = latency
        #: Number of values evicted.
        self.evictions = 0
        self._used = 0
        #: By digest, least recently used first.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        #: (operation or None for any, calls until the one that fails)
        self._failing: list[tuple[str | None, int]] = []
        self._name = os.urandom(8).hex()
        self._epochs, _stores[self._name] = SharedEpochs(), self

    def __len__(self) -> int:
        """Return the number of values, in all namespaces."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """Return True, also for an empty store."""
        return True

    def __repr__(self) -> str:
        bound = "" if self.capacity is None else f" of {self.capacity}"
        return f"<FakeStore {len(self)} values, {self._used}{bound} bytes{', unavailable' * self.unavailable}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _store_of, (self._name,)

    @property
    def used_bytes(self) -> int:
        """The bytes of all values."""
        return self._used

    def fail(self, *calls: int, operation: str | None = None) -> None:
        """Turn the n-th call from now on into an outage, for each number given; of one operation, or of any.

        The call of a batch fails as a whole. Outages from earlier calls of this method stay pending.
        """
        if operation is not None and operation not in OPERATIONS:
            raise UsageError(f"an operation is one of {', '.join(OPERATIONS)}, not {operation!r}")
        for number in calls:
            if type(number) is not int or number < 1:
                raise UsageError(f"calls are counted from 1, not from {number!r}")
        with _lock:
            self._failing += [(operation, number) for number in calls]

    def clear(self) -> None:
        """Drop all values, as after a restart of a server. Views of them stay valid."""
        with _lock:
            self._entries.clear()
            self._used = 0

    # -- for fakes --------------------------------------------------------------------------------

    def _serves(self, operation: str, keys: int) -> bool:
        """Begin a call; return whether it is carried out."""
        latency = self.latency
        if latency is not None:
            latency(operation, keys)
        with _lock:
            due = False
            left = []
            for wanted, number in self._failing:
                number -= wanted is None or wanted == operation
                if number:
                    left.append((wanted, number))
                else:
                    due = True
            self._failing = left
            return not (due or self.unavailable)

    def _used_now(self, digest: bytes) -> _Entry | None:
        """Return an entry, which is the last one used from now on. The lock is held."""
        entry = self._entries.get(digest)
        if entry is not None:
            self._entries.move_to_end(digest)
        return entry

    def _find(self, digest: bytes) -> bytes | None:
        with _lock:
            entry = self._used_now(digest)
            return None if entry is None else entry.value

    def _view(self, digest: bytes) -> memoryview | None:
        with _lock:
            entry = self._used_now(digest)
            return None if entry is None else entry.view()

    def _has(self, digest: bytes) -> bool:
        return digest in self._entries

    def _keep(self, digest: bytes, value: bytes) -> bool:
        """Store a value, evicting others. Return False, and change nothing, if there is no room for it."""
        with _lock:
            old = self._entries.get(digest)
            more = len(value) - (0 if old is None else len(old.value))
            if not self._make_room(more, digest):
                return False
            self._entries[digest] = _Entry(value)
            self._entries.move_to_end(digest)
            self._used += more
            return True

    def _make_room(self, more: int, but: bytes) -> bool:
        if self.capacity is None:
            return True
        lacks = self._used + more - self.capacity
        victims = []
        for digest, entry in self._entries.items():
            if lacks <= 0:
                break
            if digest != but and not entry.pinned:
                victims.append(digest)
                lacks -= len(entry.value)
        if lacks > 0:
            return False
        for digest in victims:
            self._drop(digest)
        self.evictions += len(victims)
        return True

    def _drop(self, digest: bytes, size: int = -1) -> bool:
        """Drop an entry, with ``size`` only if its value has that many bytes; return whether there was one."""
        with _lock:
            entry = self._entries.get(digest)
            if entry is None or size not in (-1, len(entry.value)):
                return False
            del self._entries[digest]
            self._used -= len(entry.value)
            return True


#: The stores of this process by name: a pickled store refers to itself and is not copied.
_stores: weakref.WeakValueDictionary[str, FakeStore] = weakref.WeakValueDictionary()


def _store_of(name: str) -> FakeStore:
    store = _stores.get(name)
    if store is None:
        raise UsageError("this FakeStore is in another process: use simm.testing.local_cluster between processes")
    return store


# -- the client's paths to its servers, without servers ----------------------------------------------------


class _Routes(Routes):
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


class _Gets(Gets):
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
        self.counters["misses" if data is None else "hits"] += 1
        return View.miss() if data is None else View(data)


class _StorePins(ArenaPins):
    """Pinned values of a store."""

    def __init__(self, gets: _Gets, copier: Copier) -> None:
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

    def end(self) -> None:
        self.views.clear()

    def addresses(self) -> None:
        return None


class _Pinner(Pinner):
    """Pins values of a store."""

    def __init__(self, gets: _Gets, routes: Routes, copier: Copier, counters: dict[str, int]) -> None:
        super().__init__(routes, gets, copier, counters, None, 0.0)
        self._fake = gets
        self._store = gets._store
        self._serves = gets._serves

    def _find(self, pins: Pins, digests: Sequence[bytes]) -> None:
        if not self._serves("pin", len(digests)):
            return
        holder = _StorePins(self._fake, self._copier)
        for number, digest in enumerate(digests):
            value = self._store._view(digest)
            if value is not None:
                holder.views[number] = value
                pins.take(number, holder, len(value))


class _Puts(Puts):
    """Mutations of a store. ``once``: existing values stay unchanged."""

    def __init__(self, store: FakeStore, once: bool, routes: Routes, *more: Any) -> None:
        super().__init__(routes, *more)
        self._fake = store
        self._once = once

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
                kept = digest in there or (value != b"" and self._fake._keep(digest, value))
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


class _Prefixes(Prefixes):
    """Prefixes of what is in a store, as if it were on this host."""

    def __init__(self, gets: _Gets, hasher: Hasher, speeds: Speeds) -> None:
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


class FakeClient(Client):
    """A client whose cluster is a :class:`FakeStore` in this process.

    It takes the client's arguments and checks them, and ``store``; None makes a new one. It opens no connection and
    keeps no thread; the threads of the asyncio forms end when no call is in flight.
    """

    def __init__(
        self, manager: str | None = None, *, namespace: str | None = None, path: str | None = None,
        deadline_s: float | None = None, checksum: bool | None = None, copy_threads: int | None = None,
        token: str | None = None, ring: bool = True, replicas: int | None = None, rdma_devices: str | None = None,
        lazy: bool = False, tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
        tls_name: str | None = None, server_uids: Sequence[int] | None = None, put_if_absent: bool | None = None,
        tcp_streams: int | None = None, store: FakeStore | None = None,
    ) -> None:  # fmt: skip
        if store is not None and not isinstance(store, FakeStore):
            raise UsageError(f"store is a FakeStore, not {type(store).__name__}")
        super().__init__(
            manager, namespace=namespace, path=path, deadline_s=deadline_s, checksum=checksum,
            copy_threads=copy_threads, token=token, ring=ring, replicas=replicas, rdma_devices=rdma_devices, lazy=lazy,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_name=tls_name, server_uids=server_uids,
            put_if_absent=put_if_absent, tcp_streams=tcp_streams,
        )  # fmt: skip
        self.store: Final = FakeStore() if store is None else store
        #: Number of asyncio calls in flight.
        self._in_flight = 0
        routes, counters, shm = self._routes, self._counters, ShmPut(self._copier, self.checksum)
        self._gets = _Gets(self.store, routes, self._copier, self.checksum, counters)
        # A store holds one copy of a value. Namespaces with replicas stay put-once.
        self._puts = _Puts(self.store, self._options.replicas == 2, routes, shm, self._copier, self._options, counters)
        self._replicas = None
        self._load_times = LoadTimes(Speeds(), self._gets.shares)
        self._pinner = _Pinner(self._gets, routes, self._copier, counters)
        self._prefixes = _Prefixes(self._gets, self._digest, Speeds())
        self.store._epochs.join(self._epoch, self._prefixes, _lock)

    @classmethod
    def local(cls, memory: int | str = 1 << 30, **arguments: Any) -> FakeClient:
        """Return a fake with its own store of ``memory`` bytes."""
        return cls(store=FakeStore(memory), **arguments)

    def _connect(self, options: ClientOptions) -> Routes:
        return _Routes()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} namespace={self.namespace!r} {'closed' if self._closed else repr(self.store)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), store=self.store, **asdict(self._options)), ()

    def __enter__(self) -> FakeClient:
        return self

    def owned(self, digest: bytes) -> bool:
        """Return True: a fake has an owner for every digest."""
        self._routes.restart()
        return True

    async def in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Run a blocking call in a thread. A cancellation is delivered when the call has ended and no longer uses its
        buffers."""
        with self._start_lock:
            self._in_flight += 1
        try:
            return await super().in_thread(call, *arguments)
        finally:
            executor: ThreadPoolExecutor | None = None
            with self._start_lock:
                self._in_flight -= 1
                if not self._in_flight:
                    executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown(wait=False)

    def stats(self) -> dict[str, Any]:
        """Return the counters, and one worker that stands for the store."""
        stats = super().stats()
        if not self._closed:
            path = self._options.path.partition(",")[0]
            down = "the FakeStore is unavailable" if self.store.unavailable else ""
            path = "down" if down else "shm" if path == "auto" else path
            stats |= {"epoch": 1, "manager": "connected"}
            stats["workers"] = [{"node": "fake", "worker": 0, "path": path, "reason": down}]
        return stats

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Return whether the store is available. Does not wait."""
        return not (self._closed or self.store.unavailable)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._in_flight = 0


# -- a real cluster -----------------------------------------------------------------------------------------


class RunningCluster(NamedTuple):
    """A cluster of :func:`local_cluster`: the manager's address, for more clients, and a connected client."""

    manager: str
    client: Client


@contextlib.contextmanager
def local_cluster(memory: int | str = CLUSTER_MEMORY, **arguments: Any) -> Iterator[RunningCluster]:
    """Run a manager and a data server as child processes, with a client; nothing is left after the block.

        with local_cluster(namespace="tests") as (manager, client):
            client.put("k", b"value")

    ``memory``: bytes (or ``"2G"``) of the arena. Other arguments are the client's. Takes about a second.

    Raises SimmError, with the server's last message, if it cannot start. The children also end with this process,
    whatever ends it.
    """
    from .sdk.local_cluster import LocalCluster  # the fake does not need the code that starts processes

    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(memory))
        arguments.setdefault("token", cluster.token)
        client = stack.enter_context(Client(cluster.manager, **arguments))
        if not client.wait_ready(READY_S):
            reason = "; ".join(worker["reason"] for worker in client.stats()["workers"]) or "no data server"
            raise SimmError(f"the cluster does not get ready: {reason}")
        yield RunningCluster(cluster.manager, client)
