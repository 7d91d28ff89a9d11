"""The SDK that engines embed to put, get and view KV-cache blocks.

    from simm.client import Client

    with Client("127.0.0.1:30001") as client:
        client.put("prefix-1f3a", page)              # True when stored
        n = client.get_into("prefix-1f3a", page)     # bytes, or None for a miss
        with client.view("prefix-1f3a") as view:     # pinned, zero-copy, read-only
            if view:                                 # false for a miss
                consume(view.data)

* A key is a ``str`` of 1 to 256 bytes of UTF-8. A value has 1 byte to 64 GiB, is stored in parts above 67,088,384
  bytes (``docs/large.md``), and is any contiguous object with the buffer protocol (bytes, numpy), a tensor, or a
  :class:`~simm.host.buffers.Span`. Tensors, and objects with a
  ``__cuda_array_interface__``, may be in an NVIDIA GPU's memory; ``gpu/copy.py`` says which of the caller's work
  precedes a copy. When a call has returned, no copy of it is in flight. The same key in two namespaces is two entries.
* A miss is ``None``, ``False`` or a false :class:`View`. So is an outage: a cache that is down must never raise into
  the engine. :meth:`Client.stats` counts outages. A caller's mistake (wrong type, wrong size, closed client) raises
  :class:`~simm.errors.UsageError` before anything is sent. ``get_into`` raises it too for a buffer that is too small,
  and has then written nothing. After a miss the buffer may hold part of a value that was replaced during the copy. Use
  only the bytes that the result covers.
* Servers that do not answer cost a call ``deadline_s``, one and a half times that at most, however many servers it
  touches. Calls skip a failed server at once until the background thread has reconnected. Reads find values that move
  to another server there or at their previous owner. A put or delete that meets such a move is tried again within
  ``deadline_s``.
* Any thread may call any method. In a forked child the client reconnects at its first use; views are not valid there.
  An unpickled client has the same settings. The ``*_async`` forms run the same code in a few threads. Cancelling one
  waits until its buffer is no longer in use.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .arena.hashing import SHARD_MASK, Hasher
from .config.client_options import ClientOptions
from .constants import COUNT_FOUND, LOG_PUTS, PLAIN_BELOW
from .errors import DeviceError, PeerError, UsageError
from .host import fork
from .host.buffers import DEFAULT_COPY_THREADS, Copier, Span
from .ipc.counts import MISSES_MASK, NOT_FOUND, PUT, Word, observe
from .sdk.batch import (
    UNLOADABLE,
    LargeValue,
    NoValue,
    Result,
    SplitView,
    View,
    WrongSize,
    any_source_of,
    awaitable,
    sink_of,
    source_of,
    span_of,
)
from .sdk.calls.closing import ClientClosing
from .sdk.calls.groups import GroupCalls
from .sdk.calls.keep import KeepCalls, wish_of
from .sdk.calls.large import LargeCalls
from .sdk.calls.parts import PartCalls
from .sdk.calls.prefetch import PrefetchCalls
from .sdk.calls.questions import QuestionCalls
from .sdk.calls.tracing import TraceCalls, follow_operator
from .wire.status import Status

if TYPE_CHECKING:
    from .host.threads import Pool
    from .sdk.near.copies import Near
    from .sdk.ops.replicas import Replicas
    from .sdk.routing import Router, Routes

log = logging.getLogger("simm.client")

_T = TypeVar("_T")

_TOO_SMALL: Final = NoValue.TOO_SMALL
_LARGE: Final = NoValue.LARGE

_ASYNC_THREADS: Final = 8

__all__ = ["Client", "NoValue", "View", "WrongSize", "sink_of", "source_of"]


class Client(
    LargeCalls, PartCalls, GroupCalls, QuestionCalls, KeepCalls, PrefetchCalls, TraceCalls, ClientClosing
):  # fmt: skip
    """A connection to a SiMM cluster.

    An argument that is not given (None) is a setting: ``SIMM_*`` in the environment, else the file that SIMM_CONFIG
    names, else the default, as for the ``simm`` command. ``simm config show client`` shows them.

    Args:
        manager: ``"host:port"``, or several separated by commas. Setting SIMM_MANAGER; default 127.0.0.1:30001.
        namespace: the namespace of all keys. Setting SIMM_NAMESPACE.
        path: data paths to use, of ``shm``, ``rdma`` and ``tcp``, separated by commas. The client takes the first of
            this order that works. ``"auto"``, the default: all of them. Setting SIMM_PATH.
        deadline_s: bound of each exchange with a server, seconds. Setting SIMM_DEADLINE_MS; default 3.
        checksum: store a crc32 with each value and verify it on every get (0.3 ms per MiB). Setting SIMM_CHECKSUM.
        copy_threads: threads for values of 8 MiB and batches of 2 MiB and more; 0 for the default. SIMM_COPY_THREADS.
        token: credential for servers that require one; empty for none. Default: from the file that SIMM_TOKEN_FILE
            names, the first client's token, or else the first of another role.
        ring: commit through shared memory; False: by socket.
        replicas: 2 to store each value on two nodes. The namespace is then put-once. Setting SIMM_REPLICAS.
        put_if_absent: puts leave a stored value alone, as keys are hashes of their values. Setting SIMM_PUT_IF_ABSENT.
        near_copies: read copies on this host of values that other hosts own, and make some; promises that the value of
            a key never changes (``docs/prefetch.md``). Setting SIMM_NEAR_COPIES.
        tcp_streams: connections to a server, 1 to 8, that share a batch of 4 MiB and more by TCP. SIMM_TCP_STREAMS.
        rdma_devices: RDMA devices to use, as ``"mlx5_0,mlx5_1:2"``; empty for the default. Setting SIMM_RDMA_DEVICES.
        server_uids: users, besides this process's own and root, to whose servers on this host values and memory are
            entrusted. Setting SIMM_SERVER_UID.
        lazy: return at once and connect in the background. Until a manager answers, every call is a miss or fails.
        trace: share of the calls to record, 0 to 1, or ``"off"`` (``docs/tracing.md``). Setting SIMM_TRACE.
        slow_ms: log calls that take so long, with their segments; 0 for none. Setting SIMM_SLOW_MS.
        trace_dir: folder for what is recorded. Setting SIMM_TRACE_DIR.
        tls_ca: PEM file of the authorities that sign the servers' certificates; with it every connection by TCP is by
            TLS. Empty for none. Setting SIMM_TLS_CA.
        tls_cert, tls_key: PEM files of this client's own certificate and its key. SIMM_TLS_CERT, SIMM_TLS_KEY.
        tls_name: the name that all servers' certificates have; empty: each has its address's host. SIMM_TLS_NAME.

    Raises TransportError if no manager answers within 5 seconds or if it refuses the token, unless ``lazy``. Raises
    UsageError for a wrong argument, ConfigError for a wrong setting.
    """

    def __init__(
        self, manager: str | None = None, *, namespace: str | None = None, path: str | None = None,
        deadline_s: float | None = None, checksum: bool | None = None, copy_threads: int | None = None,
        token: str | None = None, ring: bool = True, replicas: int | None = None, rdma_devices: str | None = None,
        lazy: bool = False, tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
        tls_name: str | None = None, server_uids: Sequence[int] | None = None, put_if_absent: bool | None = None,
        tcp_streams: int | None = None, near_copies: bool | None = None, trace: float | str | None = None,
        slow_ms: float | None = None, trace_dir: str | None = None,
    ) -> None:  # fmt: skip
        # What talks to servers loads with the first client. Engines and tools import this module when they start, for
        # its names or for a client that they may never make.
        from .ipc.put import ShmPut
        from .sdk.ops import counting, epochs, parts  # noqa: F401 -- counters must not need a descriptor
        from .sdk.ops.load_time import LoadTimes, Shares, Speeds
        from .sdk.ops.pinner import Pinner
        from .sdk.ops.prefix import Prefixes
        from .sdk.reads import Gets
        from .sdk.writes import Puts

        self._options = options = ClientOptions.resolve(
            manager=manager, namespace=namespace, path=path, deadline_s=deadline_s, checksum=checksum,
            copy_threads=copy_threads, token=token, ring=ring, replicas=replicas, rdma_devices=rdma_devices, lazy=lazy,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_name=tls_name, server_uids=server_uids,
            put_if_absent=put_if_absent, tcp_streams=tcp_streams, near_copies=near_copies, trace=trace,
            slow_ms=slow_ms, trace_dir=trace_dir,
        )  # fmt: skip
        self.namespace = options.namespace
        self.deadline_s = options.deadline_s
        self.checksum = options.checksum
        self._hasher = Hasher(options.namespace)
        #: Its digest of one key: a bound method is called in less time than an object.
        self._digest = self._hasher.__call__
        self._ranges_of, self._ranges_of_many = parts.ranges_of, parts.ranges_of_many
        self._pieces_of = parts.pieces_of
        self._executor: Pool | None = None
        self._start_lock = threading.Lock()
        self._closed = self._begun = False
        self._owned: Any = None
        self._counters: dict[str, int] = dict.fromkeys(
            ("hits", "misses", "puts", "put_failures", "outages", "retries", "fallbacks", "crc_errors", "moved",
             "redirects", "single_copies", "present", "large", "rdma_gets", "rdma_puts", "rdma_retries",
             "rdma_fallbacks"), 0,
        )  # fmt: skip
        from .ipc.tally import Tallies
        self._tallies = Tallies()
        self._epoch = epochs.ClientEpoch(options, epochs.hasher_into(self))
        self._routes = self._connect(options)
        self._copier = Copier(options.copy_threads or DEFAULT_COPY_THREADS)
        self._shm = ShmPut(self._copier, options.checksum)
        speeds = Speeds()
        self._copier.observe = speeds.observe_copy
        reads = self._routes, self._copier, options.checksum, self._counters, speeds.observe, self._tallies
        writes = self._routes, self._shm, self._copier, options, self._counters, self._tallies
        self._near: Near | None = None
        if options.near_copies:
            from .sdk.near import copies  # few clients promise that values never change

            self._gets, self._puts, self._near = copies.parts_of(options, reads, writes)
        else:
            self._gets, self._puts = Gets(*reads), Puts(*writes)
        self._replicas: Replicas | None = None
        if options.replicas == 2:
            from .sdk.ops.replicas import Replicas  # few namespaces have two copies

            self._replicas = Replicas(self._routes, self._gets, self._puts, self._counters)
        if options.put_if_absent:
            from .sdk.ops import if_absent  # noqa: F401 -- no put of this client loads it
        self._put_slowly = options.put_if_absent or self._replicas is not None
        shares = Shares(self._routes, self._counters, self._replicas)
        self._load_times = LoadTimes(speeds, shares)
        self._prefixes = Prefixes(self._routes, self._hasher, speeds, self._counters, self._gets.stored_many, shares)
        self._epoch.follow(self._prefixes)
        self._pinner = Pinner(self._routes, self._gets, self._copier, self._counters, self._replicas, self.deadline_s)
        self._begin_tracing()
        fork.in_child(self._after_fork)

    @classmethod
    def local(cls, memory: int | str = 1 << 30, **arguments: Any) -> Client:
        """Return a client with its own manager and data server as child processes; they end with it.

        ``memory``: bytes of the arena, or text such as ``"2G"``. Other arguments as for the client.
        """
        from .sdk.local_cluster import WITHOUT_TLS, LocalCluster  # the SDK must not need the servers' modules
        cluster = LocalCluster(memory=memory)
        try:
            client = cls(cluster.manager, **{"token": cluster.token, **WITHOUT_TLS, **arguments})
        except BaseException:
            cluster.close()
            raise
        client._owned = cluster
        return client

    def _connect(self, options: ClientOptions) -> Routes:
        """Return the routes to the servers. Raises TransportError if no manager answers, unless the client is lazy."""
        from .sdk.routing import Router, Routes

        routed = functools.partial(
            Router, options, tallies=self._tallies, epoch=self._epoch, tick=follow_operator(self)
        )
        return Routes(routed, lazy=options.lazy, deadline_s=options.deadline_s)

    @property
    def _router(self) -> Router | None:
        return self._routes.router

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch={self._router.epoch}" if self._router is not None else "forked"
        return f"<Client {self._options.manager} namespace={self.namespace!r} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._options,)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- single keys ------------------------------------------------------------------------------

    def put(self, key: str, value: Any, *, ttl: float | None = None, keep: str | None = None) -> bool:
        """Store a value, replacing an old one atomically. Return False if it could not be stored.

        ``stats()["last_put_failure"]`` then says why, in words, unless another thread's put has failed since. With
        ``ttl`` the value is kept as by :meth:`keep`; False also for one that is stored, but not kept.
        """
        if ttl is not None or keep is not None:
            return self.put_many([key], [value], ttl=ttl, keep=keep)[0]
        digest = self._digest(key)
        try:
            source = source_of(value)
        except LargeValue as exc:
            return self.put_mixed([digest], [exc.memory])[0] == Status.OK
        return self.put_digest(digest, source) == Status.OK

    def get(self, key: str) -> bytes | None:
        """Return the value as new bytes, or None. ``get_into`` saves the allocation and copies without the GIL."""
        digest = self._digest(key)
        if self._replicas is not None:
            got = self._read_large([digest], [None])[0]
        else:
            route = self._routes.route
            owner = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else self._routes.target(digest)
            got = self._gets.read(owner, digest, None)
        if got is _LARGE:
            got = self._large.read(digest, None)
        return got if type(got) is bytes else None

    def get_into(self, key: str, buffer: Any) -> int | None:
        """Copy the value to the buffer's head; return its length in bytes, or None for a miss.

        Raises UsageError for a read-only buffer, or one that is too small (then nothing is written).
        """
        digest = self._digest(key)
        sink = sink_of(buffer)
        got = self.get_digest(digest, sink)
        if type(got) is int:
            return got
        if got == _TOO_SMALL:
            raise UsageError(f"the value of {key!r} does not fit a buffer of {len(sink)} bytes")
        return None

    def exists(self, key: str) -> bool:
        """Return whether the key is stored; False also if its server cannot be reached."""
        digest = self._digest(key)
        route = self._routes.route
        target = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else None
        reader = target.reader if target is not None else None
        if reader is not None and reader.contains(digest):  # exists_digest(), without the call
            reader.counts[COUNT_FOUND] = reader.founds = reader.founds + 1
            return True
        return self.exists_digest(digest)

    def delete(self, key: str) -> bool:
        """Drop the key. Return False if it was not stored or its server cannot be reached."""
        return self.delete_digests([self._digest(key)])[0] == Status.OK

    def view(self, key: str) -> View:
        """Return the value without a copy, pinned and read-only. The view of a miss is false, with no bytes.

        Close the view soon: a pinned entry cannot be evicted. By TCP, or if the shard is moving, it is a copy;
        so it is if the value is stored in parts.
        """
        digest = self._digest(key)
        if self._replicas is not None:
            view = self._replicas.view(digest)
        else:
            view = self._gets.view(self._routes.target(digest), digest)
        return view if type(view) is not SplitView else self._large.view(digest)

    def register(self, buffer: Any) -> Span:
        """Return the buffer as a :class:`Span` that keeps it alive: pass it, or parts of it, as value or buffer.

        Over RDMA the device itself reads and writes registered memory, GPU memory too if it can (``gpu/direct.py``).
        The first use there pins the memory, until :meth:`deregister` or until nothing refers to the span. Other memory
        goes through staging buffers. The shm and TCP paths need no registration; it saves the lookup of the address.
        """
        span = span_of(buffer)
        try:
            from .rdma.registration import registered  # a client that registers nothing has no need of it
        except UNLOADABLE:  # it can be used unregistered
            return span
        return registered(span)

    def deregister(self, span: Span) -> None:
        """Unpin a span of :meth:`register` that no call uses. It can be used unregistered. Twice is harmless."""
        registration, span.registration = span.registration, None
        if registration is not None:
            registration.close()

    # -- many keys --------------------------------------------------------------------------------

    def put_many(
        self, keys: Sequence[str], values: Sequence[Any], *, if_absent: bool | None = None, ttl: float | None = None,
        keep: str | None = None,
    ) -> list[bool]:  # fmt: skip
        """:meth:`put` for many keys. A duplicate key gets the later value. ``if_absent``: a stored value is
        left alone, on this host if it has the same length; None for ``put_if_absent`` of the client."""
        if len(keys) != len(values):
            raise UsageError(f"{len(keys)} keys and {len(values)} values")
        digests = self._hasher.many(keys)
        wish = None if ttl is None and keep is None else wish_of(ttl, keep)
        try:
            statuses = self.put_digests(digests, list(map(source_of, values)), if_absent)
        except LargeValue:
            statuses = self.put_mixed(digests, list(map(any_source_of, values)), if_absent)
        if wish is not None:
            statuses = self._keep_stored(digests, statuses, wish)
        return [status == Status.OK for status in statuses]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """:meth:`get` for many keys."""
        digests = self._hasher.many(keys)
        nowhere: list[memoryview | Span | None] = [None] * len(digests)
        met = self._counters["large"]
        if met:
            results = self._read_large(digests, nowhere)
        else:
            results = (self._gets.read_many if self._replicas is None else self._replicas.read)(digests, nowhere)
            if self._counters["large"]:
                self._large.resolve(digests, nowhere, results)
        return [got if type(got) is bytes else None for got in results]

    def get_into_many(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        """:meth:`get_into` for many keys. Raises UsageError if a buffer is too small, after all others are filled."""
        if len(keys) != len(buffers):
            raise UsageError(f"{len(keys)} keys and {len(buffers)} buffers")
        digests = self._hasher.many(keys)
        sinks = [sink_of(buffer) for buffer in buffers]
        results = self.get_digests(digests, sinks)
        for key, sink, got in zip(keys, sinks, results):
            if got == _TOO_SMALL:
                raise UsageError(f"the value of {key!r} does not fit a buffer of {len(sink)} bytes")
        return [got if got > 0 else None for got in results]

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` for many keys."""
        return self.exists_digests(self._hasher.many(keys))

    def delete_many(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`delete` for many keys."""
        return [status == Status.OK for status in self.delete_digests(self._hasher.many(keys))]

    # -- by digest, for simm.kv and adapters --------------------------------------------------------

    def digest(self, key: str) -> bytes:
        """Return the key's digest in this namespace. Raises UsageError."""
        return self._digest(key)

    def put_digest(self, digest: bytes, source: memoryview | Span) -> int:
        """Store one value; return a Status. The source comes from :func:`source_of`."""
        target = self._routes.target(digest)
        session = target.session if target is not None else None
        if target is None or session is None or session.broken or self._put_slowly:
            return self.put_digests([digest], [source])[0]
        # The most frequent case, without the lists of a batch.
        began = time.monotonic()
        try:
            status = self._shm.put_one(session, digest, source)
        except PeerError as exc:
            self._routes.session_failed(target, session, exc)
            status = Status.UNAVAILABLE
        if status == Status.WRONG_OWNER:
            status = self._puts.retry(target, digest, source, began)  # which counts where it is put
            self._puts.count([digest], [status])
        elif status == Status.OK:
            for entry in session.reader.logs[LOG_PUTS].free:
                session.reader.entries[entry] = len(source)
                return status
            session.reader.count_more(LOG_PUTS, len(source))
            observe(session.counts, PUT, int((time.monotonic() - began) * 1e9))
        else:
            session.counts[Word.PUT_FAILURES] += 1
            self._puts.count([digest], [status])
        return status

    def get_digest(self, digest: bytes, sink: memoryview | Span) -> Result:
        """Copy one value out; return its length, or why there is none: see :meth:`get_digests`."""
        if self._replicas is not None:
            return self.get_digests([digest], [sink])[0]
        route = self._routes.route
        owner = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else self._routes.target(digest)
        try:
            got = self._gets.read(owner, digest, sink)
        except DeviceError as exc:
            return self._gets.device_failed(exc)
        return got if got is not _LARGE else self._large.read(digest, sink)  # type: ignore[return-value]  # no bytes

    def exists_digest(self, digest: bytes) -> bool:
        """Return whether it is stored; False also if its server cannot be reached."""
        route = self._routes.route
        target = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else self._routes.target(digest)
        reader = target.reader if target is not None else None
        if reader is not None:
            if reader.contains(digest):
                reader.counts[COUNT_FOUND] = reader.founds = reader.founds + 1
                return True
            if self._replicas is None and 0 < reader.shard_word(digest) < PLAIN_BELOW:
                misses = reader.counts[NOT_FOUND] = reader.counts[NOT_FOUND] + 1
                if misses & MISSES_MASK == 1:
                    reader.missed(digest)
                return False
        return self.exists_digests([digest])[0]

    def put_digests(
        self, digests: Sequence[bytes], sources: Sequence[memoryview | Span], if_absent: bool | None = None
    ) -> list[int]:
        """Store values; return a Status for each. Sources are of :func:`source_of`; ``if_absent`` as in put_many."""
        if (self._options.put_if_absent if if_absent is None else if_absent) and self._replicas is None:
            try:
                from .sdk.ops.if_absent import put  # few callers have such keys
            except UNLOADABLE:
                statuses: list[int] = [Status.UNAVAILABLE] * len(digests)
                self._puts.count(digests, statuses)
                return statuses
            return put(self._gets, self._puts, digests, sources, self._counters)
        return (self._replicas or self._puts).put(digests, sources)

    def get_digests(self, digests: Sequence[bytes], sinks: Sequence[memoryview | Span]) -> list[Result]:
        """Copy values out; return each value's length, or why there is none. Sinks come from :func:`sink_of`.

        A span may state the ``least`` that it takes. A shorter or longer value then gives a :class:`WrongSize`.
        """
        met = self._counters["large"]
        if met:
            return self._read_large(digests, sinks)
        results = (self._gets.read_many if self._replicas is None else self._replicas.read)(digests, sinks)
        if self._counters["large"]:
            self._large.resolve(digests, sinks, results)
        return results

    def exists_digests(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each whether it is stored."""
        return (self._gets if self._replicas is None else self._replicas).stored_many(digests)

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        """Drop entries; return a Status for each."""
        if self._counters["large"]:
            return self._large.delete(digests)
        return (self._replicas or self._puts).delete(digests)

    def delete_sized(self, digests: Sequence[bytes], sizes: Sequence[int]) -> list[int]:
        """Drop entries whose values have these sizes, not others put in their place; return a Status for each."""
        if self._counters["large"]:
            return self._large.delete(digests, sizes)
        return (self._replicas or self._puts).delete(digests, sizes)

    def owned(self, digest: bytes) -> bool:
        """Return whether the shard map names an owner for the digest, reachable or not."""
        return self._routes.target(digest) is not None

    def mapped(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each whether its owner's memory is mapped here: a get is a copy within this host. O(digests)."""
        found = [False] * len(digests)
        for target, positions in self._routes.group(digests):
            if target is not None and target.path == "shm":
                for at in positions:
                    found[at] = True
        return found

    # -- asyncio ------------------------------------------------------------------------------------

    put_async = awaitable(put)
    get_async = awaitable(get)
    get_into_async = awaitable(get_into)
    exists_async = awaitable(exists)
    delete_async = awaitable(delete)
    view_async = awaitable(view)
    put_many_async = awaitable(put_many)
    get_many_async = awaitable(get_many)
    get_into_many_async = awaitable(get_into_many)
    exists_many_async = awaitable(exists_many)
    delete_many_async = awaitable(delete_many)

    async def in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Run a blocking call in a thread. A cancellation is delivered when the call has ended and no longer uses its
        buffers. Raises UsageError if the client is closed before the call begins."""
        try:
            import queue  # noqa: F401 -- a pool needs it

            from .host.threads import Pool
            from .sdk.ops.waiting import answer_of  # with asyncio, 3 MiB that an engine without it does not need
        except UNLOADABLE:  # as without a thread: the caller's runs it, which raises for a closed client
            return call(*arguments)
        with self._start_lock:
            if self._closed:
                raise UsageError("this client is closed")
            if self._executor is None:
                self._executor = Pool(_ASYNC_THREADS, "simm-async")
            # Under the lock, as close() ends the executor. Not by a name: the job holds what its call raises.
            answer = answer_of(self._executor, call, arguments)
        return await answer

    # -- state --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters; by path keys, bytes, latencies; the last put failure; each worker's path and reason."""
        from .sdk.ops import counting
        return counting.stats_of(self.counters, self._tallies, self._puts.last_failure, self._router)

    @property
    def counters(self) -> dict[str, int]:
        from .sdk.ops import counting
        return counting.counters_of(self._counters, self._tallies)

    def begin(self) -> None:
        """Wait until a lazy client has tried each manager once, and connect to the workers in the background.

        Warns if no manager answers. Raises TransportError if the managers refuse this client for good. Once is enough.
        """
        if self._router is None and not self._closed:
            self._routes.restart()
        router = self._router
        if router is not None and not self._begun:
            router.subscription.await_first_round(self.deadline_s * max(1, len(self._options.managers)))
            router.connect_ahead()
            self._begun = True

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Wait until every shard has an owner that this client reaches. Return False when the time is up."""
        return self._routes.wait_ready(timeout_s)

    def _after_fork(self) -> None:
        """Give up what belongs to the parent process."""
        self._owned = None
        self._executor = None
        self._begun = False
        self._start_lock = threading.Lock()
        self._closed_in_child()
        self._tallies.after_fork()
        self._epoch.after_fork()
        if self._tracing is not None:
            self._tracing.after_fork()


def _unpickle(options: ClientOptions) -> Client:
    return Client(**asdict(options))
