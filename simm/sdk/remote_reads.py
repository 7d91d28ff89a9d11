"""Read values by RDMA and TCP, at workers on other hosts. Counts outages and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster.lookup import Unresolved
from ..constants import VALUE_BYTES_MAX
from ..host.buffers import Copier, Span, fits, host_view, on_device
from ..wire.messages import Status
from .batch import MISS, UNAVAILABLE, Batch, misfit
from .routing import Routes
from .worker_path import Target

if TYPE_CHECKING:
    from .rdma_pool import RdmaPath
    from .tcp import TcpPath, Want


class RemoteReads:
    """A client's reads by RDMA and TCP. Any thread may call it.

    ``check`` returns whether a value has the checksum it was stored with, by flags and crc; None to skip that.
    """

    def __init__(
        self, routes: Routes, copier: Copier, check: Callable[[int, int, Any], bool] | None, counters: dict[str, int]
    ) -> None:
        self._routes = routes
        self._copier = copier
        self._check = check
        self.counters = counters

    def read(self, target: Target, positions: Sequence[int], batch: Batch) -> Unresolved:
        """Read by RDMA, and the keys that RDMA leaves over by TCP."""
        rdma = target.rdma
        if rdma is None or rdma.down_reason is not None:
            return self.read_tcp(target, positions, batch)
        left, until = self._by_rdma(rdma, positions, batch)
        return self.read_tcp(target, left, batch, until=until) if left else Unresolved()

    def read_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, *, previous: bool = False, until: float = 0.0
    ) -> Unresolved:
        """Read by TCP."""
        sinks, results = batch.sinks, batch.results
        assert sinks is not None
        unresolved = Unresolved()
        tcp = target.tcp
        if tcp is None:
            self.counters["outages"] += len(positions)
            for position in positions:
                results[position] = UNAVAILABLE
            return unresolved
        if not target.bulk:
            return self._resolve_misses(target, tcp, positions, batch, previous)
        elsewhere = [position for position in positions if on_device(sinks[position])]
        if elsewhere:
            positions = [position for position in positions if not on_device(sinks[position])]
        if positions:
            self._fetch(target, tcp, positions, batch, unresolved, previous, until)
            until = 0.0
        if elsewhere:

            def read_host(part: Sequence[int], hosts: Any, got: dict[int, Any]) -> list[int]:
                nonlocal until
                staged = Batch(batch.digests, hosts)
                self._fetch(target, tcp, part, staged, unresolved, previous, until)
                until = 0.0
                got.update((position, staged.results[position]) for position in part)
                return []

            sinks[elsewhere[0]].read_remote(read_host, elsewhere, sinks, results, ())  # type: ignore[union-attr]
        return unresolved

    def _fetch(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: Batch, unresolved: Unresolved,
        previous: bool, until: float,
    ) -> None:  # fmt: skip
        """Read into host memory, and add the keys that need another lookup to ``unresolved``."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        wants: list[Want] = []
        news: dict[int, bytearray] = {}
        for position in positions:
            sink = sinks[position]
            if sink is None:
                wants.append((digests[position], VALUE_BYTES_MAX, _room_in(news, position)))
            else:
                wants.append((digests[position], len(sink), _fitting(sink, host_view(sink))))
        fetch = functools.partial(tcp.fetch, previous=previous, until=until)
        answers = self._routes.call_tcp(target, tcp, fetch, wants)
        if not answers:
            for position in positions:
                results[position] = UNAVAILABLE
        for position, (status, length, crc, flags) in zip(positions, answers):
            if status == Status.OK:
                sink = sinks[position]
                if sink is not None and not fits(length, sink):
                    results[position] = misfit(length, sink)
                elif self._check is not None and not self._check(
                    flags, crc, news[position] if sink is None else head_bytes(sink, length)
                ):  # fmt: skip
                    results[position] = MISS
                else:
                    results[position] = bytes(news[position]) if sink is None else length
            elif status == Status.TOO_LARGE:
                results[position] = misfit(length, sinks[position])
            elif previous or not unresolved.by_status(position, status, length | crc << 32):
                results[position] = UNAVAILABLE if status == Status.UNAVAILABLE else MISS

    def _resolve_misses(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: Batch, previous: bool
    ) -> Unresolved:
        """Ask by TCP what misses of RDMA mean, if values must not go by TCP. No value is sent."""
        unresolved = Unresolved()
        digests, results = batch.digests, batch.results
        answers = self._routes.call_tcp(
            target, tcp, functools.partial(tcp.resolve_misses, previous=previous), [digests[each] for each in positions]
        )
        for position, (status, since) in zip(positions, answers or [(Status.UNAVAILABLE, 0)] * len(positions)):
            if previous or not unresolved.by_status(position, status, since):
                results[position] = UNAVAILABLE if status in (Status.OK, Status.UNAVAILABLE) else MISS
        return unresolved

    # -- exists ---------------------------------------------------------------------------------------

    def exist(self, target: Target, positions: Sequence[int], batch: Batch, unresolved: Unresolved) -> None:
        """Find out whether keys are stored; add those that need another lookup to ``unresolved``."""
        rdma, until = target.rdma, 0.0
        if rdma is not None and rdma.down_reason is None:
            positions, until = self._by_rdma(rdma, positions, batch)
        if positions:
            self._exist_tcp(target, positions, batch, unresolved, until)

    def exist_previous(self, target: Target, positions: Sequence[int], batch: Batch) -> None:
        """Find out whether a previous owner has the keys."""
        tcp = target.tcp
        if tcp is not None:
            wanted = [batch.digests[position] for position in positions]
            ask = functools.partial(tcp.resolve_misses, previous=True)
            for position, (status, _) in zip(positions, self._routes.call_tcp(target, tcp, ask, wanted)):
                batch.results[position] = int(status == Status.OK)

    def _exist_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, unresolved: Unresolved, until: float
    ) -> None:
        digests, results = batch.digests, batch.results
        tcp = target.tcp
        if tcp is None:
            self.counters["outages"] += len(positions)
            return
        asking: list[int] = []
        wanted = [digests[position] for position in positions]
        for position, status in zip(
            positions, self._routes.call_tcp(target, tcp, functools.partial(tcp.exists, until=until), wanted)
        ):  # fmt: skip
            results[position] = int(status == Status.OK)
            if status == Status.PREVIOUS:  # only FETCHED says of which move
                asking.append(position)
            else:
                unresolved.by_status(position, status, 0)
        wanted = [digests[position] for position in asking]
        answers = self._routes.call_tcp(target, tcp, tcp.resolve_misses, wanted) if asking else []
        for position, (status, since) in zip(asking, answers):
            results[position] = int(status == Status.OK)
            unresolved.by_status(position, status, since)

    def _by_rdma(self, rdma: RdmaPath, positions: Sequence[int], batch: Batch) -> tuple[list[int], float]:
        from .rdma_get import read  # the path has loaded it

        return read(rdma, positions, batch, self._copier, self._check, self.counters)


def head_bytes(sink: memoryview | Span, length: int) -> memoryview:
    """Return the first bytes of what was read, to check them."""
    return sink[:length] if type(sink) is memoryview else sink.host_view(length)


def _fitting(sink: memoryview | Span, room: memoryview) -> Callable[[int], memoryview]:
    """Return where a value for ``sink`` goes. A value that does not fit is received too, and dropped."""
    return lambda length: room[:length] if fits(length, sink) else memoryview(bytearray(length))


def _room_in(news: dict[int, bytearray], position: int) -> Callable[[int], memoryview]:
    def room(length: int) -> memoryview:
        news[position] = bytearray(length)
        return memoryview(news[position])

    return room
