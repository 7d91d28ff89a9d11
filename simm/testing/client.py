"""A client whose cluster is a store in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

from ..client import Client
from ..config.client_options import ClientOptions
from ..errors import UsageError
from ..host.threads import Pool
from ..ipc.put import ShmPut
from ..sdk.ops.load_time import LoadTimes, Speeds
from ..sdk.reads import Gets
from ..sdk.routing import Routes
from ..sdk.writes import Puts
from .paths import (
    StoreGets,
    StoreManifestGets,
    StoreManifestPuts,
    StoreNear,
    StorePinner,
    StorePrefixes,
    StorePuts,
    StoreRoutes,
)
from .store import LOCK, FakeStore

_T = TypeVar("_T")


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
        tcp_streams: int | None = None, near_copies: bool | None = None, trace: float | str | None = None,
        slow_ms: float | None = None, trace_dir: str | None = None, store: FakeStore | None = None,
    ) -> None:  # fmt: skip
        if store is not None and not isinstance(store, FakeStore):
            raise UsageError(f"store is a FakeStore, not {type(store).__name__}")
        super().__init__(
            manager, namespace=namespace, path=path, deadline_s=deadline_s, checksum=checksum,
            copy_threads=copy_threads, token=token, ring=ring, replicas=replicas, rdma_devices=rdma_devices, lazy=lazy,
            tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_name=tls_name, server_uids=server_uids,
            put_if_absent=put_if_absent, tcp_streams=tcp_streams, near_copies=near_copies, trace=trace,
            slow_ms=slow_ms, trace_dir=trace_dir,
        )  # fmt: skip
        self.store: Final = FakeStore() if store is None else store
        #: Number of asyncio calls in flight.
        self._in_flight = 0
        routes, counters, shm = self._routes, self._counters, ShmPut(self._copier, self.checksum)
        self._gets = StoreGets(self.store, routes, self._copier, self.checksum, counters)
        # A store holds one copy of a value. Namespaces with replicas stay put-once.
        once = self._options.replicas == 2
        self._puts = StorePuts(self.store, once, self.namespace, routes, shm, self._copier, self._options, counters)
        self._replicas = None
        near: Any = StoreNear(self._gets) if self._options.near_copies else None
        self._near = near
        self._load_times = LoadTimes(Speeds(), self._gets.shares)
        self._pinner = StorePinner(self._gets, routes, self._copier, counters)
        self._prefixes = StorePrefixes(self._gets, self._hasher, Speeds())
        self.store._epochs.join(self._epoch, self._prefixes, LOCK)

    def _manifest_look(self, puts: Puts) -> None:
        """Return that there is nothing else to look with."""

    def _manifest_paths(self) -> tuple[Gets, Puts, None]:
        routes, shm = self._routes, ShmPut(self._copier, self.checksum)
        gets = StoreManifestGets(self.store, routes, self._copier, self.checksum, self._counters)
        once = self._options.replicas == 2
        more = (routes, shm, self._copier, self._options, self._counters)
        return gets, StoreManifestPuts(self.store, once, self.namespace, *more), None

    @classmethod
    def local(cls, memory: int | str = 1 << 30, **arguments: Any) -> FakeClient:
        """Return a fake with its own store of ``memory`` bytes."""
        return cls(store=FakeStore(memory), **arguments)

    def _connect(self, options: ClientOptions) -> Routes:
        return StoreRoutes()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} namespace={self.namespace!r} {'closed' if self._closed else repr(self.store)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # While it traces, its class is one that no other process can import.
        return functools.partial(getattr(self, "_plain", type(self)), store=self.store, **asdict(self._options)), ()

    def __enter__(self) -> FakeClient:
        return self

    def owned(self, digest: bytes) -> bool:
        """Return True: a fake has an owner for every digest."""
        self._routes.restart()
        return True

    def mapped(self, digests: Sequence[bytes]) -> list[bool]:
        """Return whether the path allows shared memory: a fake's store is in this process."""
        self._routes.restart()
        here = self._options.path.partition(",")[0] in ("auto", "shm") and not self.store.unavailable
        return [here] * len(digests)

    async def in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Run a blocking call in a thread. A cancellation is delivered when the call has ended and no longer uses its
        buffers."""
        with self._start_lock:
            self._in_flight += 1
        try:
            return await super().in_thread(call, *arguments)
        finally:
            executor: Pool | None = None
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
