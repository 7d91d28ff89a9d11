"""The SDK that engines embed to put, get and view KV-cache blocks.

    from simm.client import Client

    with Client("127.0.0.1:30001") as client:
        client.put("prefix-1f3a", page)              # True when stored
        n = client.get_into("prefix-1f3a", page)     # bytes, or None for a miss
        with client.view("prefix-1f3a") as view:     # pinned, zero-copy, read-only
            if view:                                 # false for a miss
                consume(view.data)

* A key is a ``str`` of 1 to 256 bytes of UTF-8. A value has 1 to 67,088,384 bytes and is any contiguous object with the
  buffer protocol (bytes, numpy), a tensor, or a :class:`~simm.host.buffers.Span`. Tensors, and objects with a
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

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .arena.hashing import SHARD_MASK, Hasher
from .config.client_options import ClientOptions
from .errors import DeviceError, PeerError, UsageError
from .host import fork
from .host.buffers import DEFAULT_COPY_THREADS, Copier, Span
from .sdk.batch import NoValue, Result, View, WrongSize, sink_of, source_of, span_of
from .wire.shard_set import MOVING
from .wire.status import Status

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from .sdk.replicas import Replicas
    from .sdk.routing import Router, Routes

log = logging.getLogger("simm.client")

_T = TypeVar("_T")

_MOVING: Final = MOVING
_TOO_SMALL: Final = NoValue.TOO_SMALL

_ASYNC_THREADS: Final = 8

__all__ = ["Client", "NoValue", "View", "WrongSize", "sink_of", "source_of"]


class Client:
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
        copy_threads: threads for values of 8 MiB and more; 0 for the default. Setting SIMM_COPY_THREADS.
        token: credential for servers that require one; empty for none. Default: from the file that SIMM_TOKEN_FILE
            names, the first client's token, or else the first of another role.
        ring: commit through shared memory; False: by socket.
        replicas: 2 to store each value on two nodes. The namespace is then put-once. Setting SIMM_REPLICAS.
        rdma_devices: RDMA devices to use, as ``"mlx5_0,mlx5_1:2"``; empty for the default. Setting SIMM_RDMA_DEVICES.
        server_uids: users, besides this process's own and root, to whose servers on this host values and memory are
            entrusted. Setting SIMM_SERVER_UID.
        lazy: return at once and connect in the background. Until a manager answers, every call is a miss or fails.
        tls_ca: PEM file of the authorities that sign the servers' certificates; with it every connection by TCP is by
            TLS. Empty for none. Setting SIMM_TLS_CA.
        tls_cert, tls_key: PEM files of this client's own certificate and its key, for servers that take one. Settings
            SIMM_TLS_CERT, SIMM_TLS_KEY.
        tls_name: the name that all servers' certificates have; empty: each has the host of its address. Setting
            SIMM_TLS_NAME.

    Raises TransportError if no manager answers within 5 seconds or if it refuses the token, unless ``lazy``. Raises
    UsageError for a wrong argument, ConfigError for a wrong setting.
    """

    def __init__(
        self, manager: str | None = None, *, namespace: str | None = None, path: str | None = None,
        deadline_s: float | None = None, checksum: bool | None = None, copy_threads: int | None = None,
        token: str | None = None, ring: bool = True, replicas: int | None = None, rdma_devices: str | None = None,
        lazy: bool = False, tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None,
        tls_name: str | None = None, server_uids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        # What talks to servers loads with the first client. Engines and tools import this module when they start, for
        # its names or for a client that they may never make.
        from .ipc.put import ShmPut
        from .sdk.reads import Gets
        from .sdk.writes import Puts

        self._options = options = ClientOptions.resolve(
            manager=manager, namespace=namespace, path=path, deadline_s=deadline_s, checksum=checksum,
            copy_threads=copy_threads, token=token, ring=ring, replicas=replicas, rdma_devices=rdma_devices, lazy=lazy,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_name=tls_name, server_uids=server_uids,
        )  # fmt: skip
        self.namespace = options.namespace
        self.deadline_s = options.deadline_s
        self.checksum = options.checksum
        self._digest = Hasher(options.namespace)
        self._executor: ThreadPoolExecutor | None = None
        self._start_lock = threading.Lock()
        self._closed = False
        self._owned: Any = None
        self.counters: dict[str, int] = dict.fromkeys(
            ("hits", "misses", "puts", "put_failures", "outages", "retries", "fallbacks", "crc_errors", "moved",
             "redirects", "single_copies", "rdma_gets", "rdma_puts", "rdma_retries", "rdma_fallbacks"), 0,
        )  # fmt: skip
        self._routes = self._connect(options)
        self._copier = Copier(options.copy_threads or DEFAULT_COPY_THREADS)
        self._shm = ShmPut(self._copier, options.checksum)
        self._gets = Gets(self._routes, self._copier, options.checksum, self.counters)
        self._puts = Puts(self._routes, self._shm, self._copier, options, self.counters)
        self._replicas: Replicas | None = None
        if options.replicas == 2:
            from .sdk.replicas import Replicas  # few namespaces have two copies

            self._replicas = Replicas(self._routes, self._gets, self._puts, self.counters)
        fork.in_child(self._after_fork)

    @classmethod
    def local(cls, memory: int | str = 1 << 30, **arguments: Any) -> Client:
        """Return a client with its own manager and data server as child processes; they end with it.

        ``memory``: bytes of the arena, or text such as ``"2G"``. Other arguments as for the client.
        """
        from .sdk.local_cluster import LocalCluster  # the SDK must not need the servers' modules

        cluster = LocalCluster(memory=memory)
        arguments.setdefault("token", cluster.token)
        for name in ("tls_ca", "tls_cert", "tls_key"):  # what the environment's cluster wants
            arguments.setdefault(name, "")
        try:
            client = cls(cluster.manager, **arguments)
        except BaseException:
            cluster.close()
            raise
        client._owned = cluster
        return client

    def _connect(self, options: ClientOptions) -> Routes:
        """Return the routes to the servers. Raises TransportError if no manager answers, unless the client is lazy."""
        from .sdk.routing import Router, Routes

        return Routes(functools.partial(Router, options), lazy=options.lazy)

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

    def put(self, key: str, value: Any) -> bool:
        """Store a value, replacing an old one atomically. Return False if it could not be stored.

        ``stats()["last_put_failure"]`` then says why, in words, unless another thread's put has failed since.
        """
        digest = self._digest(key)
        source = source_of(value)
        target = self._routes.target(digest)
        session = target.session if target is not None else None
        if target is None or session is None or session.broken or self._replicas is not None:
            return self.put_digests([digest], [source])[0] == Status.OK
        # The most frequent case, without the lists of a batch.
        began = time.monotonic()
        try:
            status = self._shm.put_one(session, digest, source)
        except PeerError as exc:
            self._routes.session_failed(target, session, exc)
            status = Status.UNAVAILABLE
        if status == Status.WRONG_OWNER:
            status = self._puts.retry(target, digest, source, began)
        if status == Status.OK:
            self.counters["puts"] += 1
            return True
        self._puts.count([digest], [status])
        return False

    def get(self, key: str) -> bytes | None:
        """Return the value as new bytes, or None. ``get_into`` saves the allocation and copies without the GIL."""
        digest = self._digest(key)
        if self._replicas is not None:
            got = self._replicas.read([digest], [None])[0]
        else:
            route = self._routes.route
            owner = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else self._routes.target(digest)
            got = self._gets.read(owner, digest, None)
        return got if type(got) is bytes else None

    def get_into(self, key: str, buffer: Any) -> int | None:
        """Copy the value to the buffer's head; return its length in bytes, or None for a miss.

        Raises UsageError for a read-only buffer, or one that is too small (then nothing is written).
        """
        digest = self._digest(key)
        sink = sink_of(buffer)
        if self._replicas is not None:
            got = self._replicas.read([digest], [sink])[0]
        else:
            route = self._routes.route
            owner = route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else self._routes.target(digest)
            try:
                got = self._gets.read(owner, digest, sink)
            except DeviceError as exc:
                got = self._gets.device_failed(exc)
        if type(got) is int:
            return got
        if got == _TOO_SMALL:
            raise UsageError(f"the value of {key!r} does not fit a buffer of {len(sink)} bytes")
        return None

    def exists(self, key: str) -> bool:
        """Return whether the key is stored; False also if its server cannot be reached."""
        digest = self._digest(key)
        target = self._routes.target(digest)
        reader = target.reader if target is not None else None
        if reader is not None:
            if reader.contains(digest):
                return True
            if self._replicas is None and 0 < reader.shard_word(digest) < _MOVING:
                return False
        return self.exists_digests([digest])[0]

    def delete(self, key: str) -> bool:
        """Drop the key. Return False if it was not stored or its server cannot be reached."""
        return self.delete_digests([self._digest(key)])[0] == Status.OK

    def view(self, key: str) -> View:
        """Return the value without a copy, pinned and read-only. The view of a miss is false, with no bytes.

        Close the view soon: a pinned entry cannot be evicted. By TCP, or if the shard is moving, it is a copy.
        """
        digest = self._digest(key)
        if self._replicas is not None:
            return self._replicas.view(digest)
        return self._gets.view(self._routes.target(digest), digest)

    def register(self, buffer: Any) -> Span:
        """Return the buffer as a :class:`Span` that keeps it alive: pass it, or parts of it, as value or buffer.

        Over RDMA the device itself reads and writes registered memory, GPU memory too if it can (``gpu/direct.py``).
        The first use there pins the memory, until :meth:`deregister` or until nothing refers to the span. Other memory
        goes through staging buffers. The shm and TCP paths need no registration; it saves the lookup of the address.
        """
        from .rdma.registration import registered  # a client that registers nothing has no need of it

        return registered(span_of(buffer))

    def deregister(self, span: Span) -> None:
        """Unpin a span of :meth:`register` that no call uses. It can be used unregistered. Twice is harmless."""
        registration, span.registration = span.registration, None
        if registration is not None:
            registration.close()

    # -- many keys --------------------------------------------------------------------------------

    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """:meth:`put` for many keys. A duplicate key gets the later value."""
        if len(keys) != len(values):
            raise UsageError(f"{len(keys)} keys and {len(values)} values")
        digests = self._digest.many(keys)
        return [status == Status.OK for status in self.put_digests(digests, [source_of(value) for value in values])]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """:meth:`get` for many keys."""
        digests = self._digest.many(keys)
        nowhere: list[memoryview | Span | None] = [None] * len(digests)
        results = (self._gets.read_many if self._replicas is None else self._replicas.read)(digests, nowhere)
        return [got if type(got) is bytes else None for got in results]

    def get_into_many(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        """:meth:`get_into` for many keys. Raises UsageError if a buffer is too small, after all others are filled."""
        if len(keys) != len(buffers):
            raise UsageError(f"{len(keys)} keys and {len(buffers)} buffers")
        digests = self._digest.many(keys)
        sinks = [sink_of(buffer) for buffer in buffers]
        results = self.get_digests(digests, sinks)
        for key, sink, got in zip(keys, sinks, results):
            if got == _TOO_SMALL:
                raise UsageError(f"the value of {key!r} does not fit a buffer of {len(sink)} bytes")
        return [got if got > 0 else None for got in results]

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` for many keys."""
        return self.exists_digests(self._digest.many(keys))

    def delete_many(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`delete` for many keys."""
        return [status == Status.OK for status in self.delete_digests(self._digest.many(keys))]

    # -- by digest, for simm.kv and adapters --------------------------------------------------------

    def digest(self, key: str) -> bytes:
        """Return the key's digest in this namespace. Raises UsageError."""
        return self._digest(key)

    def put_digests(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """Store values; return a Status for each. Sources come from :func:`source_of`."""
        return (self._replicas or self._puts).put(digests, sources)

    def get_digests(self, digests: Sequence[bytes], sinks: Sequence[memoryview | Span]) -> list[Result]:
        """Copy values out; return each value's length, or why there is none. Sinks come from :func:`sink_of`.

        A span may state the ``least`` that it takes. A shorter or longer value then gives a :class:`WrongSize`.
        """
        if self._replicas is not None:
            return self._replicas.read(digests, sinks)
        return self._gets.read_many(digests, sinks)

    def exists_digests(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each whether it is stored."""
        return (self._gets if self._replicas is None else self._replicas).stored_many(digests)

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        """Drop entries; return a Status for each."""
        return (self._replicas or self._puts).delete(digests)

    def delete_sized(self, digests: Sequence[bytes], sizes: Sequence[int]) -> list[int]:
        """Drop entries whose values have these sizes, not others put in their place; return a Status for each."""
        return (self._replicas or self._puts).delete(digests, sizes)

    def owned(self, digest: bytes) -> bool:
        """Return whether the shard map names an owner for the digest, reachable or not."""
        return self._routes.target(digest) is not None

    # -- asyncio ------------------------------------------------------------------------------------

    async def put_async(self, key: str, value: Any) -> bool:
        """:meth:`put`, awaitable."""
        return await self.in_thread(self.put, key, value)

    async def get_async(self, key: str) -> bytes | None:
        """:meth:`get`, awaitable."""
        return await self.in_thread(self.get, key)

    async def get_into_async(self, key: str, buffer: Any) -> int | None:
        """:meth:`get_into`, awaitable."""
        return await self.in_thread(self.get_into, key, buffer)

    async def exists_async(self, key: str) -> bool:
        """:meth:`exists`, awaitable."""
        return await self.in_thread(self.exists, key)

    async def delete_async(self, key: str) -> bool:
        """:meth:`delete`, awaitable."""
        return await self.in_thread(self.delete, key)

    async def put_many_async(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """:meth:`put_many`, awaitable."""
        return await self.in_thread(self.put_many, keys, values)

    async def get_into_many_async(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        """:meth:`get_into_many`, awaitable."""
        return await self.in_thread(self.get_into_many, keys, buffers)

    async def exists_many_async(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists_many`, awaitable."""
        return await self.in_thread(self.exists_many, keys)

    async def in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Run a blocking call in a thread. A cancellation is delivered when the call has ended and no longer uses its
        buffers."""
        import asyncio  # 3 MiB that an engine without it does not need
        from concurrent.futures import ThreadPoolExecutor

        with self._start_lock:
            if self._closed:
                raise UsageError("this client is closed")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_ASYNC_THREADS, thread_name_prefix="simm-async")
            executor = self._executor
        job = executor.submit(call, *arguments)
        waiting = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not job.cancel():
                await _ended(waiting)
            raise
        finally:
            del job, waiting  # they hold the call's exception, which holds this frame, and with it the client

    # -- state --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the counters, why the last failed put failed, and for each worker the path in use and why it is not a
        better one."""
        router = self._router
        stats: dict[str, Any] = {**self.counters, "last_put_failure": self._puts.last_failure}
        if router is not None:
            stats["outages"] += router.context.outages
            stats["epoch"] = router.epoch
            stats["manager"] = router.subscription.down_reason or "connected"
            stats["workers"] = [
                {"node": target.info.node, "worker": target.info.worker, "path": target.path, "why": target.reason}
                for target in router.targets.values()
            ]
        return stats

    def begin(self) -> None:
        """Wait until a lazy client has tried each manager once, and connect to the workers in the background.

        Warns if no manager answers. Raises TransportError if the managers refuse this client for good.
        """
        router = self._router
        if router is not None:
            router.subscription.await_first_round(self.deadline_s * max(1, len(self._options.managers)))
            router.connect_ahead()

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Wait until every shard has an owner that this client reaches. Return False when the time is up."""
        until = time.monotonic() + timeout_s
        while True:
            router = self._router
            if router is not None and None not in router.route:
                targets = list(router.targets.values())
                if targets and all(target.ready() for target in targets) and all(each.settled for each in targets):
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.02)

    def close(self) -> None:
        """Close all connections, and end a local cluster. Twice is harmless."""
        with self._start_lock:
            if self._closed:
                return
            self._closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        self._routes.close()
        self._copier.close()
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def _after_fork(self) -> None:
        """Give up what belongs to the parent process."""
        self._owned = None
        self._executor = None
        self._start_lock = threading.Lock()


async def _ended(waiting: asyncio.Future[Any]) -> None:
    """Wait for a thread's call to end, deferring further cancellations. Its result is not needed."""
    import asyncio

    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((waiting,))
    if not waiting.cancelled():
        waiting.exception()  # retrieved, or asyncio complains; not raised, or it would hold this frame


def _unpickle(options: ClientOptions) -> Client:
    return Client(**asdict(options))
