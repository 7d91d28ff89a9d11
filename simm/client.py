"""The SDK: what engines embed to put, get and look at KV-cache blocks.

    from simm.client import Client

    with Client("127.0.0.1:30001") as client:
        client.put("prefix-1f3a", page)              # True when stored
        n = client.get_into("prefix-1f3a", page)     # bytes, or None for a miss
        with client.view("prefix-1f3a") as data:     # pinned, zero-copy, read-only
            ...

Keys and values
---------------
A key is a ``str`` of 1 to 256 bytes of UTF-8; a value has 1 to 67,088,384 bytes and is anything contiguous
with the buffer protocol (bytes, numpy), a CPU tensor, or a :class:`~simm.buffers.Span`. Keys
live in a namespace (``namespace=``); the same key in two namespaces is two entries.

Misses, outages, mistakes
-------------------------
A miss is ``None`` or ``False``. So is an outage: a cache that is down must never raise into the engine; it
is counted in :meth:`Client.stats`. A caller's own mistake (wrong type, size, closed client)
raises :class:`~simm.errors.UsageError`, before anything was sent. A ``get_into`` with too small a
buffer raises it too and has written nothing. After a miss the buffer may hold a part of a value that was
replaced while it was being copied: use what the result says and nothing else.

Time
----
No call lasts longer than ``deadline_s`` per server it must talk to, plus its own copies. A
server that failed is skipped at once until the background thread has reached it again.

Threads, processes, tasks
-------------------------
All methods may be called from any thread. After a ``fork`` the child's client connects
anew at its first use; views do not cross a fork. Pickling a client gives one with the same settings.
The ``*_async`` forms run the same code in a few threads; cancelling one waits until its
buffer is out of use.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from . import messages as M
from .buffers import DEFAULT_COPY_THREADS, RELEASE_BYTES, Copier, Span, address_of, tensor_span, view_of
from .config import parse_addresses
from .constants import DEFAULT_MANAGER_PORT, DEFAULT_NAMESPACE, VALUE_BYTES_MAX
from .errors import RemoteProtocolError, TransportError, UsageError
from .hashing import SHARD_MASK, Hasher
from .layout import EntryFlag
from .messages import Status
from .reader import ATTEMPTS, VECTOR_KEYS, ArenaReader, Located, Unsettled
from .routing import Router, Target
from .session import WorkerSession
from .shmput import ShmPut
from .tcppath import TcpPath

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("simm.client")

DEFAULT_DEADLINE_S: Final = 2.0
_T = TypeVar("_T")

_OK: Final = int(Status.OK)
_NO_SPACE: Final = int(Status.NO_SPACE)
_WRONG_OWNER: Final = int(Status.WRONG_OWNER)
_TOO_LARGE: Final = int(Status.TOO_LARGE)
_CRC: Final = int(EntryFlag.CRC)

#: Results of reads that are no length.
MISS: Final = 0
DOWN: Final = -1
SMALL: Final = -2

#: Keys in one exchange of other kinds.
_CALL_KEYS: Final = 1024
_ASYNC_THREADS: Final = 8


class View:
    """A value in place: ``data`` is a read-only memoryview, of the arena where that is on this host.

    The pin goes when the view is closed *and* nothing made from ``data`` (slices, numpy arrays) is alive any
    more, so the bytes stay right as long as anyone can see them. Usable as a context manager.
    """

    __slots__ = ("_data", "length")

    def __init__(self, data: memoryview) -> None:
        self._data: memoryview | None = data
        self.length = len(data)

    @classmethod
    def pinned(cls, reader: ArenaReader, session: WorkerSession, offset: int, length: int, pin: int) -> View:
        """A view of the arena that gives ``pin`` back at its end, and ends the copy that its maker has begun."""
        base = (ctypes.c_ubyte * length).from_address(reader.data_address + offset - reader.data_offset)
        weakref.finalize(base, _unpin, session, reader, pin).atexit = False
        return cls(memoryview(base).cast("B").toreadonly())

    @property
    def data(self) -> memoryview:
        """The value. Raises UsageError once closed."""
        if self._data is None:
            raise UsageError("this view is closed; take another with client.view(key)")
        return self._data

    def __len__(self) -> int:
        return self.length

    def close(self) -> None:
        """Give the value back. Twice is harmless."""
        data, self._data = self._data, None
        if data is not None:
            with contextlib.suppress(BufferError):
                data.release()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<View of {self.length} bytes{'' if self._data is not None else ', closed'}>"


def _unpin(session: WorkerSession, _reader: ArenaReader, pin: int) -> None:
    """Finalizer of a view's memory: no lock, no I/O. Holds the reader, and so the mapping, until now."""
    session.unpin_later(pin)
    session.end_copy()


class Client:
    """A connection to a SiMM cluster.

    Args:
        manager: ``"host:port"``, or several separated by commas.
        namespace: keys' namespace.
        path: ``"auto"`` (shm on the same host, else TCP), ``"shm"`` or ``"tcp"``.
        deadline_s: bound of each exchange with a server, seconds.
        checksum: store a crc32 with each value and verify it on every get (0.3 ms per MiB).
        copy_threads: threads for values of 8 MiB and more; 0 for the default.
        token: credential for servers that ask for one.
        ring: commit through shared memory (False: by socket).

    Raises TransportError when no manager answers.
    """

    def __init__(
        self, manager: str = f"127.0.0.1:{DEFAULT_MANAGER_PORT}", *, namespace: str = DEFAULT_NAMESPACE,
        path: str = "auto", deadline_s: float = DEFAULT_DEADLINE_S, checksum: bool = False, copy_threads: int = 0,
        token: str = "", ring: bool = True,
    ) -> None:  # fmt: skip
        if path not in ("auto", "shm", "tcp"):
            raise UsageError(f"path is auto, shm or tcp, not {path!r}")
        if not deadline_s > 0:
            raise UsageError(f"deadline_s is a positive number of seconds, not {deadline_s!r}")
        self._arguments = {
            "manager": manager, "namespace": namespace, "path": path, "deadline_s": deadline_s, "checksum": checksum,
            "copy_threads": copy_threads, "token": token, "ring": ring,
        }  # fmt: skip
        self._managers = [(address.host, address.port) for address in parse_addresses(manager, DEFAULT_MANAGER_PORT)]
        self.namespace = namespace
        self.deadline_s = deadline_s
        self.checksum = checksum
        self._path = path
        self._token = token
        self._ring = ring
        self._digest = Hasher(namespace)
        self._copier = Copier(copy_threads or DEFAULT_COPY_THREADS)
        self._shm = ShmPut(self._copier, checksum)
        self._executor: ThreadPoolExecutor | None = None
        self._start_lock = threading.Lock()
        self._closed = False
        self._owned: Any = None
        #: After a fork: what must not be finalised in the child.
        self._graveyard: list[Any] = []
        self._retry_at = 0.0
        self._router: Router | None = None
        self._route: list[Target | None] = []
        self.counters: dict[str, int] = dict.fromkeys(
            ("hits", "misses", "puts", "put_failures", "outages", "retries", "fallbacks", "crc_errors"), 0
        )
        self._connect()
        _CLIENTS.add(self)

    @classmethod
    def local(cls, memory: int | str = 1 << 30, **arguments: Any) -> Client:
        """A client with a manager and a data server of its own, as child processes; closed with it.

        ``memory``: bytes (or ``"2G"``) of the arena. Other arguments as for the client.
        """
        from .local import LocalCluster  # the SDK must not need the servers' modules

        cluster = LocalCluster(memory=memory)
        try:
            client = cls(cluster.manager, **arguments)
        except BaseException:
            cluster.close()
            raise
        client._owned = cluster
        return client

    def _connect(self, map_timeout_s: float = 5.0) -> None:
        router = Router(
            self._managers, namespace=self.namespace, path=self._path, deadline_s=self.deadline_s, token=self._token,
            ring=self._ring, map_timeout_s=map_timeout_s,
        )  # fmt: skip
        self._router = router
        self._route = router.route

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"epoch={self._router.epoch}" if self._router is not None else "forked"
        return f"<Client {self._arguments['manager']} namespace={self.namespace!r} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._arguments,)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- single keys ------------------------------------------------------------------------------

    def put(self, key: str, value: Any) -> bool:
        """Store a value, replacing one atomically. False when it could not be stored."""
        digest = self._digest(key)
        source = source_of(value)
        target = self._target(digest)
        session = target.session if target is not None else None
        if target is None or session is None or session.broken:
            return self.put_digests([digest], [source])[0] == _OK
        # The commonest case without lists: 1 us of 9.
        try:
            status = self._shm.put_one(session, digest, source)
        except (TransportError, RemoteProtocolError) as exc:
            self._session_failed(target, session, exc)
            status = int(Status.UNAVAILABLE)
        if status == _OK:
            self.counters["puts"] += 1
            return True
        self.counters["put_failures"] += 1
        if status == _WRONG_OWNER:
            self._stale_map()
        return False

    def get(self, key: str) -> bytes | None:
        """The value as new bytes, or None. ``get_into`` saves the allocation and frees the GIL while copying."""
        digest = self._digest(key)
        target = self._target(digest)
        reader = target.reader if target is not None else None
        if reader is None and target is not None and target.ready():
            reader = target.reader
        if reader is not None:
            for _ in range(ATTEMPTS):
                try:
                    found = reader.locate(digest)
                except Unsettled:
                    break
                if found is None:
                    self._missed(reader, digest)
                    return None
                data = bytes(reader.value(found))
                if reader.confirm(digest, found.slot, found.seq):
                    reader.visited[found.slot] = 1
                    return data if self._sound(found.flags, found.crc, data) else None
                self.counters["retries"] += 1
        view = self._view(target, digest)
        if view is None:
            return None
        with view:
            return bytes(view.data)

    def get_into(self, key: str, buffer: Any) -> int | None:
        """Copy the value to the buffer's head; its length in bytes, or None for a miss.

        Raises UsageError for a read-only buffer, or one that is too small (nothing is written then).
        """
        digest = self._digest(key)
        sink = sink_of(buffer)
        got = self._read(self._target(digest), digest, sink)
        if got == SMALL:
            raise UsageError(f"the value of {key!r} does not fit a buffer of {len(sink)} bytes")
        return got if got > 0 else None

    def exists(self, key: str) -> bool:
        """Is the key stored? False too when its server cannot be reached."""
        digest = self._digest(key)
        target = self._target(digest)
        if target is not None:
            reader = target.reader
            if reader is not None:
                return reader.contains(digest) or (self._missed(reader, digest, count=False) and False)
        return self.exists_digests([digest])[0]

    def delete(self, key: str) -> bool:
        """Drop the key; False when it was not there or its server cannot be reached."""
        return self.delete_digests([self._digest(key)])[0] == _OK

    def view(self, key: str) -> View | None:
        """The value without a copy, pinned and read-only, or None for a miss. Close it soon: pinned entries
        cannot be evicted. By TCP it is a copy."""
        digest = self._digest(key)
        return self._view(self._target(digest), digest)

    def register(self, buffer: Any) -> Span:
        """The buffer as a :class:`Span`, kept alive by it: pass it, or parts of it, as value or buffer.

        The shm and TCP paths need no registration; it saves the lookup of the address.
        """
        if isinstance(buffer, Span):
            return buffer
        span = tensor_span(buffer)
        if span is not None:
            return span
        view = view_of(buffer)
        if not view.nbytes:
            raise UsageError("an empty buffer cannot be registered")
        return Span(address_of(view), view.nbytes, writable=not view.readonly, keep=view)

    # -- many keys --------------------------------------------------------------------------------

    def put_many(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """:meth:`put` for many; a key that comes twice gets the later value."""
        if len(keys) != len(values):
            raise UsageError(f"{len(keys)} keys and {len(values)} values")
        digests = [self._digest(key) for key in keys]
        return [status == _OK for status in self.put_digests(digests, [source_of(value) for value in values])]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """:meth:`get` for many."""
        return [self.get(key) for key in keys]

    def get_into_many(self, keys: Sequence[str], buffers: Sequence[Any]) -> list[int | None]:
        """:meth:`get_into` for many. Raises UsageError if a buffer is too small for its value, after all others."""
        if len(keys) != len(buffers):
            raise UsageError(f"{len(keys)} keys and {len(buffers)} buffers")
        digests = [self._digest(key) for key in keys]
        results = self.get_digests(digests, [sink_of(buffer) for buffer in buffers])
        for key, buffer, got in zip(keys, buffers, results):
            if got == SMALL:
                raise UsageError(f"the value of {key!r} does not fit a buffer of {view_of(buffer).nbytes} bytes")
        return [got if got > 0 else None for got in results]

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`exists` for many."""
        digest = self._digest
        return self.exists_digests([digest(key) for key in keys])

    def delete_many(self, keys: Sequence[str]) -> list[bool]:
        """:meth:`delete` for many."""
        return [status == _OK for status in self.delete_digests([self._digest(key) for key in keys])]

    # -- by digest: what simm.kv and adapters stand on ----------------------------------------------

    def digest(self, key: str) -> bytes:
        """The key's digest in this namespace. Raises UsageError."""
        return self._digest(key)

    def put_digests(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """Store values; a Status for each. Sources come from :func:`source_of`."""
        if len(digests) == 1:
            target = self._target(digests[0])
            groups: list[tuple[Target | None, Sequence[int]]] = [(target, (0,))]
        else:
            groups = self._group(digests)
        statuses = [int(Status.UNAVAILABLE)] * len(digests)
        for target, positions in groups:
            if target is None:
                continue
            session = target.session
            if session is None or session.broken:
                if not target.ready():
                    continue
                session = target.session
            if session is not None:
                try:
                    if len(positions) == 1:
                        position = positions[0]
                        statuses[position] = self._shm.put_one(session, digests[position], sources[position])
                    else:
                        self._shm.put_many(session, digests, sources, positions, statuses)
                except (TransportError, RemoteProtocolError) as exc:
                    self._session_failed(target, session, exc)
            elif (tcp := target.tcp) is not None:
                self._put_tcp(target, tcp, positions, digests, sources, statuses)
        stored = statuses.count(_OK)
        counters = self.counters
        counters["puts"] += stored
        if stored != len(statuses):
            counters["put_failures"] += len(statuses) - stored
            if _WRONG_OWNER in statuses:
                self._stale_map()
        return statuses

    def get_digests(self, digests: Sequence[bytes], sinks: Sequence[memoryview | Span]) -> list[int]:
        """Copy values out; for each its length, or MISS, DOWN or SMALL. Sinks come from :func:`sink_of`."""
        results = [MISS] * len(digests)
        for target, positions in self._group(digests):
            if target is None:
                for position in positions:
                    results[position] = DOWN
                self.counters["outages"] += len(positions)
                continue
            reader = target.reader
            if reader is None and target.ready():
                reader = target.reader
            if reader is None:
                self._get_tcp(target, positions, digests, sinks, results)
                continue
            self._get_shm(target, reader, positions, digests, sinks, results)
        return results

    def exists_digests(self, digests: Sequence[bytes]) -> list[bool]:
        """Which are stored?"""
        results = [False] * len(digests)
        for target, positions in self._group(digests):
            if target is None:
                self.counters["outages"] += len(positions)
                continue
            wanted = digests if len(positions) == len(digests) else [digests[position] for position in positions]
            reader = target.reader
            if reader is None and target.ready():
                reader = target.reader
            if reader is not None:
                hits = reader.contains_many(wanted)
            elif (tcp := target.tcp) is not None:
                try:
                    hits = [status == _OK for status in tcp.exists(wanted)]
                except (TransportError, RemoteProtocolError) as exc:
                    target.tcp_lost(tcp, str(exc))
                    continue
            else:
                self.counters["outages"] += len(positions)
                continue
            if wanted is digests:
                return hits
            for position, hit in zip(positions, hits):
                results[position] = hit
        return results

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        """Drop entries; a Status for each."""
        statuses = [int(Status.UNAVAILABLE)] * len(digests)
        for target, positions in self._group(digests):
            if target is None or not target.ready():
                self.counters["outages"] += len(positions)
                continue
            wanted = [digests[position] for position in positions]
            session, tcp = target.session, target.tcp
            answers: list[int] = []
            try:
                if session is not None:
                    for start in range(0, len(wanted), _CALL_KEYS):
                        answers += session.exchange(M.Delete(wanted[start : start + _CALL_KEYS])).statuses
                elif tcp is not None:
                    answers = tcp.delete(wanted)
            except (TransportError, RemoteProtocolError) as exc:
                if session is not None:
                    self._session_failed(target, session, exc)
                elif tcp is not None:
                    target.tcp_lost(tcp, str(exc))
            for position, status in zip(positions, answers):
                statuses[position] = status
        if _WRONG_OWNER in statuses:
            self._stale_map()
        return statuses

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
        """Run a blocking call in a thread. A cancellation is delivered when the call has ended: its buffers are
        then out of use."""
        import asyncio  # 3 MiB that an engine without it need not carry

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

    # -- upkeep -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters, and the path in use for each worker with why it is not a better one."""
        router = self._router
        stats: dict[str, Any] = dict(self.counters)
        if router is not None:
            stats["outages"] += router.outages
            stats["epoch"] = router.epoch
            stats["manager"] = router.manager_why or "connected"
            stats["workers"] = [
                {"node": target.info.node, "worker": target.info.worker, "path": target.path, "why": target.why}
                for target in router.targets.values()
            ]
        return stats

    def wait_ready(self, timeout_s: float = 10.0) -> bool:
        """Wait until every shard has an owner that this client reaches; False when the time is up."""
        until = time.monotonic() + timeout_s
        while True:
            router = self._router
            if router is not None and None not in router.route:
                targets = list(router.targets.values())
                if targets and all(target.ready() for target in targets):
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(0.02)

    def close(self) -> None:
        """Close all connections; a local cluster ends with it. Twice is harmless."""
        with self._start_lock:
            if self._closed:
                return
            self._closed = True
        self._route = []
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
        router, self._router = self._router, None
        if router is not None:
            router.close()
        self._copier.close()
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.close()

    def _after_fork(self) -> None:
        """In a forked child: nothing of the parent's is ours."""
        if self._router is not None:
            self._router.abandon()
            self._graveyard.append(self._router)
        self._router = None
        self._route = []
        self._retry_at = 0.0
        self._owned = None
        self._executor = None
        self._start_lock = threading.Lock()
        self._copier.forget()

    # -- shared pieces ------------------------------------------------------------------------------

    def _target(self, digest: bytes) -> Target | None:
        try:
            return self._route[(digest[0] | digest[1] << 8) & SHARD_MASK]
        except IndexError:
            route = self._restart()
            return route[(digest[0] | digest[1] << 8) & SHARD_MASK] if route else None

    def _restart(self) -> list[Target | None]:
        """After a fork: a router of this process. Raises UsageError on a closed client; [] while no manager answers."""
        with self._start_lock:
            if self._closed:
                raise UsageError("this client is closed")
            if self._router is None and time.monotonic() >= self._retry_at:
                try:
                    self._connect(map_timeout_s=0.0)
                except TransportError as exc:
                    self._retry_at = time.monotonic() + 0.5
                    log.warning("%s", exc)
            return self._route

    def _group(self, digests: Sequence[bytes]) -> list[tuple[Target | None, Sequence[int]]]:
        """Positions by target; one group without looking at each key where all shards have one owner."""
        route = self._route or self._restart()
        if not route:
            return [(None, range(len(digests)))]
        router = self._router
        if router is not None and router.sole is not None:
            return [(router.sole, range(len(digests)))] if digests else []
        groups: dict[Target | None, list[int]] = {}
        for position, digest in enumerate(digests):
            target = route[(digest[0] | digest[1] << 8) & SHARD_MASK]
            group = groups.get(target)
            if group is None:
                groups[target] = [position]
            else:
                group.append(position)
        return list(groups.items())

    def _missed(self, reader: ArenaReader, digest: bytes, *, count: bool = True) -> bool:
        if count:
            self.counters["misses"] += 1
        if not reader.owns(digest):
            self._stale_map()
        return True

    def _stale_map(self) -> None:
        if self._router is not None:
            self._router.refresh()

    def _session_failed(self, target: Target, session: WorkerSession, exc: Exception) -> None:
        log.info("%r: %s", target, exc)
        if session.broken:
            target.lost(str(exc))
            if self._router is not None:
                self._router.wake()

    def _sound(self, flags: int, crc: int, data: bytes | memoryview) -> bool:
        """Count a hit, unless a checksum was stored and asked for and differs."""
        if flags & _CRC and self.checksum and zlib.crc32(data) != crc:
            self.counters["crc_errors"] += 1
            log.error("a value does not match its checksum: counted as a miss")
            return False
        self.counters["hits"] += 1
        return True

    # -- get ------------------------------------------------------------------------------------------

    def _read(self, target: Target | None, digest: bytes, sink: memoryview | Span) -> int:
        """One value: its length, or MISS, DOWN or SMALL."""
        if target is None:
            self.counters["outages"] += 1
            return DOWN
        reader = target.reader
        if reader is None and target.ready():
            reader = target.reader
        if reader is None:
            results = [MISS]
            self._get_tcp(target, (0,), [digest], [sink], results)
            return results[0]
        for _ in range(ATTEMPTS):
            try:
                found = reader.locate(digest)
            except Unsettled:
                break
            if found is None:
                self._missed(reader, digest)
                return MISS
            length = found.length
            if length > len(sink):
                return SMALL
            self._copy_out(reader, found, sink)
            if reader.confirm(digest, found.slot, found.seq):
                reader.visited[found.slot] = 1
                if found.flags & _CRC and self.checksum:
                    view = sink.view() if type(sink) is Span else sink
                    return length if self._sound(found.flags, found.crc, view[:length]) else MISS  # type: ignore[index]
                self.counters["hits"] += 1
                return length
            self.counters["retries"] += 1
        return self._read_pinned(target, digest, sink)

    def _copy_out(self, reader: ArenaReader, found: Located, sink: memoryview | Span) -> None:
        start = found.offset - reader.data_offset
        length = found.length
        if type(sink) is Span:
            self._copier.copy(sink.address, reader.data_address + start, length)
        elif length < RELEASE_BYTES:
            sink[:length] = reader.data[start : start + length]  # type: ignore[index]
        else:
            self._copier.copy(address_of(sink), reader.data_address + start, length)  # type: ignore[arg-type]

    def _get_shm(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], digests: Sequence[bytes],
        sinks: Sequence[memoryview | Span], results: list[int],
    ) -> None:  # fmt: skip
        """A batch out of one arena."""
        if len(positions) < VECTOR_KEYS:
            for position in positions:
                results[position] = self._read(target, digests[position], sinks[position])
            return
        slots = reader.slots_of_many([digests[position] for position in positions])
        confirm, visited, copy_out = reader.confirm, reader.visited, self._copy_out
        hits = 0
        for position, slot in zip(positions, slots):
            digest, sink = digests[position], sinks[position]
            if slot >= 0:
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
            # Everything but the plain hit: the single form knows all cases.
            results[position] = self._read(target, digest, sink)
        self.counters["hits"] += hits

    def _view(self, target: Target | None, digest: bytes) -> View | None:
        """Pin, or fetch by TCP; None for a miss or an outage."""
        if target is None or not target.ready():
            self.counters["outages"] += 1
            return None
        session = target.session
        if session is None:
            return self._view_tcp(target, digest)
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
            self._session_failed(target, session, exc)
            return None
        if view is None:
            self.counters["misses"] += 1
            if status == _WRONG_OWNER:
                self._stale_map()
            return None
        if not self._sound(flags, crc, view.data):
            view.close()
            return None
        return view

    def _read_pinned(self, target: Target, digest: bytes, sink: memoryview | Span) -> int:
        """The slow way round an entry that changes all the time: the worker's answer, with a pin."""
        self.counters["fallbacks"] += 1
        view = self._view(target, digest)
        if view is None:
            return MISS
        with view:
            length = len(view)
            if length > len(sink):
                return SMALL
            into = sink.view() if isinstance(sink, Span) else sink
            into[:length] = view.data
            return length

    # -- TCP --------------------------------------------------------------------------------------------

    def _get_tcp(
        self, target: Target, positions: Sequence[int], digests: Sequence[bytes], sinks: Sequence[memoryview | Span],
        results: list[int],
    ) -> None:  # fmt: skip
        tcp = target.tcp
        if tcp is None:
            self.counters["outages"] += len(positions)
            for position in positions:
                results[position] = DOWN
            return
        mine = [sinks[position] for position in positions]
        views = [sink.view() if isinstance(sink, Span) else sink for sink in mine]
        wants = [(digests[position], len(view), _head_of(view)) for position, view in zip(positions, views)]
        try:
            answers = tcp.fetch(wants)
        except (TransportError, RemoteProtocolError) as exc:
            target.tcp_lost(tcp, str(exc))
            for position in positions:
                results[position] = DOWN
            return
        for position, view, (status, length, crc, flags) in zip(positions, views, answers):
            if status == _OK:
                results[position] = length if self._sound(flags, crc, view[:length]) else MISS
            elif status == _TOO_LARGE:
                results[position] = SMALL
            else:
                self.counters["misses"] += 1
                results[position] = DOWN if status == Status.UNAVAILABLE else MISS
                if status == _WRONG_OWNER:
                    self._stale_map()

    def _view_tcp(self, target: Target, digest: bytes) -> View | None:
        """By TCP a view is a copy in memory of its own."""
        tcp = target.tcp
        if tcp is None:
            self.counters["outages"] += 1
            return None
        values: list[memoryview] = []

        def room(length: int) -> memoryview:
            values[:] = [memoryview(bytearray(length))]
            return values[0]

        try:
            status, _length, crc, flags = tcp.fetch([(digest, VALUE_BYTES_MAX, room)])[0]
        except (TransportError, RemoteProtocolError) as exc:
            target.tcp_lost(tcp, str(exc))
            return None
        if status != _OK or not self._sound(flags, crc, values[0]):
            self.counters["misses"] += status != _OK
            return None
        return View(values[0].toreadonly())

    def _put_tcp(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], digests: Sequence[bytes],
        sources: Sequence[memoryview | Span], statuses: list[int],
    ) -> None:  # fmt: skip
        entries = []
        for position in positions:
            source = sources[position]
            view = source.view() if isinstance(source, Span) else source
            crc, flags = (zlib.crc32(view), _CRC) if self.checksum else (0, 0)
            entries.append((digests[position], view, crc, flags))
        try:
            answers = tcp.store(entries)
        except (TransportError, RemoteProtocolError) as exc:
            target.tcp_lost(tcp, str(exc))
            return
        for position, status in zip(positions, answers):
            statuses[position] = status


def source_of(value: Any) -> memoryview | Span:
    """A value as put takes it. Raises UsageError for a wrong type or size."""
    kind = type(value)
    source: memoryview | Span
    if kind is bytes or kind is bytearray:
        source = memoryview(value)  # 0.1 us; view_of looks at more, 0.3
    else:
        source = value if kind is Span else view_of(value)
    if not 0 < len(source) <= VALUE_BYTES_MAX:
        raise UsageError(f"a value has 1 to {VALUE_BYTES_MAX} bytes, this one {len(source)}")
    return source


def sink_of(buffer: Any) -> memoryview | Span:
    """A buffer as get takes it. Raises UsageError when it is read-only."""
    if type(buffer) is Span:
        if not buffer.writable:
            raise UsageError("the buffer is read-only")
        return buffer
    view = view_of(buffer)
    if view.readonly:
        raise UsageError("the buffer is read-only: pass a bytearray, a writable array or a tensor")
    return view


def _head_of(view: memoryview) -> Callable[[int], memoryview]:
    return lambda length: view[:length]


async def _ended(waiting: asyncio.Future[Any]) -> None:
    """Wait for a thread's call to end, through further cancellations; its result does not matter any more."""
    import asyncio

    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.shield(waiting)
    with contextlib.suppress(asyncio.CancelledError, Exception):
        waiting.result()


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()


def _unpickle(arguments: dict[str, Any]) -> Client:
    return Client(**arguments)


def _after_fork_in_child() -> None:
    for client in list(_CLIENTS):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
