"""Read values by RDMA and TCP, at workers on other hosts. Counts outages and nothing else."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..arena.layout import ENTRY_LARGE
from ..cluster.lookup import Unresolved
from ..constants import VALUE_BYTES_MAX
from ..host.buffers import Copier, DeviceCopy, Ranges, Span, fits, host_view
from ..host.parts import has_device, in_host_memory, on_device
from ..ipc.counts import GET, GET_MANY, Word, observe
from ..ipc.get import head_bytes
from ..ipc.steps import Steps, finish
from ..ipc.tally import Tallies
from ..wire.messages import Status
from .batch import LARGE, MISS, UNAVAILABLE, Batch, NoValue, misfit
from .routing import Routes
from .worker_path import Target

if TYPE_CHECKING:
    from .rdma_pool import RdmaPath
    from .tcp import TcpPath, Want


#: Values whose ranges go to a device by way of host memory are read in parts of about so many bytes.
STAGED_BYTES: Final = 64 << 20


#: With these a server has found an entry, whose flags it names.
_LOOKED_AT: Final = frozenset((Status.OK, Status.TOO_LARGE, Status.OUT_OF_RANGE))

#: What a status says of a key. By all others nobody knows whether it is there: that is UNAVAILABLE.
_KNOWN: Final[dict[int, int]] = {Status.OK: 1, Status.NOT_FOUND: MISS}

#: Takes note of a get: path, keys, bytes, seconds (``sdk/ops/load_time.py``).
Observe = Callable[[str, int, int, float], None]


class RemoteReads:
    """A client's reads by RDMA and TCP. Any thread may call it.

    ``kind`` as of ``ShmGet``.

    ``check`` returns whether a value has the checksum it was stored with, by flags and crc; None to skip that.
    """

    kind: int = 0

    def __init__(
        self, routes: Routes, copier: Copier, check: Callable[[int, int, Any], bool] | None, counters: dict[str, int],
        observe: Observe, tallies: Tallies,
    ) -> None:  # fmt: skip
        self._routes = routes
        self._copier = copier
        self._check = check
        self.counters = counters
        self._observe = observe
        self._tallies = tallies

    def other_kind(self) -> NoValue:
        """Return LARGE, which is what an entry is to a read that wants entries of the other kind. Count manifests."""
        if not self.kind:
            self.counters["large"] += 1
        return LARGE

    def read(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        """Read by RDMA, and the keys that RDMA leaves over by TCP. Take note of how long it takes."""
        began = time.perf_counter()
        left = yield from self.read_uncounted(target, positions, batch)
        seconds = time.perf_counter() - began
        path = target.path
        sizes = batch.bytes_read(positions)
        if sizes:
            self._observe(path, len(sizes), sum(sizes), seconds)
        counts = self._tallies.rdma if path == "rdma" else self._tallies.tcp
        got = [batch.results[position] for position in positions]
        absent, unanswered = got.count(MISS), got.count(UNAVAILABLE)
        open_ = len(left.positions()) if left else 0  # until the second look
        hits, size, missed = len(sizes), sum(sizes), max(0, absent - open_)
        unfit = len(got) - hits - absent - unanswered - got.count(LARGE)
        counts[Word.BATCH_HITS] += hits
        counts[Word.HIT_BYTES] += size
        counts[Word.ABSENT] += missed
        counts[Word.WRONG_SIZE] += unfit
        if unanswered:
            late = sum(batch.results[position] == UNAVAILABLE for position in batch.late.intersection(positions))
            self._tallies.unanswered(counts, unanswered - late, late)
        observe(counts, GET if len(positions) == 1 else GET_MANY, int(seconds * 1e9))
        return left

    def read_uncounted(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        """Do :meth:`read` for who counts the answers itself, as those of a second look."""
        if _has_devices(positions, batch):
            return (yield from self._read_staged(functools.partial(self.read_uncounted, target), positions, batch))
        rdma = target.rdma
        until = 0.0
        if rdma is not None and rdma.down_reason is None:
            positions, until = yield from self._by_rdma(rdma, positions, batch)
            if not positions:
                return Unresolved()
        return (yield from self.read_tcp(target, positions, batch, until=until))

    def read_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, *, previous: bool = False, until: float = 0.0
    ) -> Steps[Unresolved]:
        """Read by TCP."""
        sinks, results = batch.sinks, batch.results
        assert sinks is not None
        unresolved = Unresolved()
        tcp = target.tcp
        if tcp is None:
            count = len(positions)
            self.counters["outages"] += count
            for position in positions:
                results[position] = UNAVAILABLE
            return unresolved
        if not target.bulk:
            return (yield from self._resolve_misses(target, tcp, positions, batch, previous))
        if isinstance(sinks[positions[0]], Ranges):
            if _has_devices(positions, batch):
                read = functools.partial(self.read_tcp, target, previous=previous)
                return (yield from self._read_staged(read, positions, batch))
            yield from self._fetch_ranges(target, tcp, positions, batch, unresolved, previous, until)
            return unresolved
        elsewhere = [position for position in positions if on_device(sinks[position])]
        if elsewhere:
            positions = [position for position in positions if not on_device(sinks[position])]
        if positions:
            yield from self._fetch(target, tcp, positions, batch, unresolved, previous, until)
            until = 0.0
        if elsewhere:

            def read_host(part: Sequence[int], hosts: Any, got: dict[int, Any]) -> list[int]:
                nonlocal until
                staged = Batch(batch.digests, hosts)
                staged.late = batch.late
                finish(self._fetch(target, tcp, part, staged, unresolved, previous, until))
                until = 0.0
                got.update((position, staged.results[position]) for position in part)
                return []

            sinks[elsewhere[0]].read_remote(read_host, elsewhere, sinks, results, ())  # type: ignore[union-attr]
        return unresolved

    def _fetch(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: Batch, unresolved: Unresolved,
        previous: bool, until: float,
    ) -> Steps[None]:  # fmt: skip
        """Read into host memory, and add the keys that need another lookup to ``unresolved``."""
        digests, sinks, results = batch.digests, batch.sinks, batch.results
        assert sinks is not None
        wants: list[Want] = []
        news: dict[int, bytearray] = {}
        late = functools.partial(batch.late.update, positions)
        unknown = [position for position in positions if sinks[position] is None]
        sizes: dict[int, int] = {}
        if len(unknown) > 1:  # one value of any size would be an exchange of its own
            call = tcp.sizes([digests[position] for position in unknown], previous=previous, until=until)
            asked = yield from self._routes.call_tcp(target, tcp, call, late)
            if not asked:
                for position in positions:
                    results[position] = UNAVAILABLE
                return
            sizes, until = dict(zip(unknown, asked)), 0.0
        for position in positions:
            sink = sinks[position]
            if sink is None:
                most = max(1, sizes.get(position, VALUE_BYTES_MAX))
                wants.append((digests[position], most, _room_in(news, position)))
            else:
                most = min(len(sink), VALUE_BYTES_MAX)  # a buffer for a value in parts has more
                wants.append((digests[position], most, _fitting(sink, host_view(sink))))
        fetched = tcp.fetch(wants, previous=previous, until=until, kind=self.kind)
        answers = yield from self._routes.call_tcp(target, tcp, fetched, late)
        if not answers:
            for position in positions:
                results[position] = UNAVAILABLE
        grown: list[int] = []
        for position, (status, length, crc, flags) in zip(positions, answers):
            if (flags ^ self.kind) & ENTRY_LARGE and status in _LOOKED_AT:
                results[position] = self.other_kind()
            elif status == Status.OK:
                sink = sinks[position]
                if sink is not None and not fits(length, sink):
                    results[position] = misfit(length, sink)
                elif self._check is not None and not self._check(
                    flags, crc, news[position] if sink is None else head_bytes(sink, length)
                ):  # fmt: skip
                    results[position] = MISS
                else:
                    results[position] = bytes(news[position]) if sink is None else length
            elif status == Status.TOO_LARGE and position in sizes:  # it was put meanwhile
                grown.append(position)
            elif status == Status.TOO_LARGE:
                results[position] = misfit(length, sinks[position])
            elif previous or not unresolved.by_status(position, status, length | crc << 32):
                results[position] = UNAVAILABLE if status == Status.UNAVAILABLE else MISS
        for position in grown:
            yield from self._fetch(target, tcp, [position], batch, unresolved, previous, 0.0)

    def _fetch_ranges(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: Batch, unresolved: Unresolved,
        previous: bool, until: float,
    ) -> Steps[None]:  # fmt: skip
        """Do :meth:`_fetch` for ranges of values. There is no checksum to check (``Gets.read_ranges``)."""
        digests, results = batch.digests, batch.results
        sinks: Sequence[Any] = batch.sinks or ()
        wants = [(digests[position], sinks[position]) for position in positions]
        call = tcp.fetch_ranges(wants, previous=previous, until=until)
        answers = yield from self._routes.call_tcp(target, tcp, call, lambda: batch.late.update(positions))
        if not answers:
            for position in positions:
                results[position] = UNAVAILABLE
        for position, (status, length, crc, flags) in zip(positions, answers):
            if flags & ENTRY_LARGE and status in _LOOKED_AT:
                results[position] = self.other_kind()
            elif status == Status.OK:
                results[position] = length
            elif status == Status.OUT_OF_RANGE:
                results[position] = misfit(length, sinks[position])
            elif previous or not unresolved.by_status(position, status, length | crc << 32):
                results[position] = UNAVAILABLE if status == Status.UNAVAILABLE else MISS

    def _read_staged(
        self, read: Callable[[Sequence[int], Batch], Steps[Unresolved]], positions: Sequence[int], batch: Batch
    ) -> Steps[Unresolved]:
        """Read ranges of which some go to a device, by way of host memory: about ``STAGED_BYTES`` of values at a time.

        What is unresolved is read again later, and then from here. Raises DeviceError.
        """
        sinks: Sequence[Any] = batch.sinks or ()
        together = Unresolved()
        left = list(reversed(positions))
        while left:
            part: list[int] = []
            size = 0
            while left and (not part or size < STAGED_BYTES):
                part.append(left.pop())
                size += sinks[part[-1]].total
            hosted = list(sinks)
            wanted: dict[int, list[DeviceCopy]] = {}
            for position in part:
                hosted[position], wanted[position] = in_host_memory(sinks[position])
            inner = Batch(batch.digests, hosted)
            inner.late = batch.late
            together.extend((yield from read(part, inner)))
            copies = [copy for position in part if inner.results[position] > 0 for copy in wanted[position]]
            if copies:
                copies[0][0].copy_to_device(copies)
            for position in part:
                batch.results[position] = inner.results[position]
        return together

    def _resolve_misses(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], batch: Batch, previous: bool
    ) -> Steps[Unresolved]:
        """Ask by TCP what misses of RDMA mean, if values must not go by TCP: none of more than a byte is sent."""
        unresolved = Unresolved()
        digests, results = batch.digests, batch.results
        call = tcp.resolve_misses([digests[each] for each in positions], previous, room=1)
        answers = yield from self._routes.call_tcp(target, tcp, call, lambda: batch.late.update(positions))
        for position, (status, since) in zip(positions, answers or [(Status.UNAVAILABLE, 0)] * len(positions)):
            if status == Status.OK and since & ENTRY_LARGE:
                results[position] = self.other_kind()
            elif previous or not unresolved.by_status(position, status, since):
                results[position] = UNAVAILABLE if status in (Status.OK, Status.UNAVAILABLE) else MISS
        return unresolved

    # -- exists ---------------------------------------------------------------------------------------

    def exist(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        """Find out whether keys are stored."""
        unresolved = Unresolved()
        rdma, until = target.rdma, 0.0
        if rdma is not None and rdma.down_reason is None:
            positions, until = yield from self._by_rdma(rdma, positions, batch)
        if positions:
            yield from self._exist_tcp(target, positions, batch, unresolved, until)
        return unresolved

    def exist_previous(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[None]:
        """Find out whether a previous owner has the keys."""
        tcp = target.tcp
        answers: Sequence[tuple[int, int]] = ()
        if tcp is not None:
            wanted = [batch.digests[position] for position in positions]
            answers = yield from self._routes.call_tcp(target, tcp, tcp.resolve_misses(wanted, True))
        for position, (status, _) in zip(positions, answers or [(Status.UNAVAILABLE, 0)] * len(positions)):
            batch.results[position] = _KNOWN.get(status, UNAVAILABLE)

    def _exist_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, unresolved: Unresolved, until: float
    ) -> Steps[None]:
        digests, results = batch.digests, batch.results
        tcp = target.tcp
        if tcp is None:
            count = len(positions)
            self.counters["outages"] += count
            for position in positions:
                results[position] = UNAVAILABLE
            return
        asking: list[int] = []
        wanted = [digests[position] for position in positions]
        statuses = yield from self._routes.call_tcp(target, tcp, tcp.exists(wanted, until))
        for position, status in zip(positions, statuses or [Status.UNAVAILABLE] * len(positions)):
            results[position] = _KNOWN.get(status, UNAVAILABLE)
            if status == Status.PREVIOUS:  # only FETCHED says of which move
                asking.append(position)
            else:
                unresolved.by_status(position, status, 0)
        wanted = [digests[position] for position in asking]
        answers = (yield from self._routes.call_tcp(target, tcp, tcp.resolve_misses(wanted, False))) if asking else []
        for position, (status, since) in zip(asking, answers or [(Status.UNAVAILABLE, 0)] * len(asking)):
            results[position] = _KNOWN.get(status, UNAVAILABLE)
            unresolved.by_status(position, status, since)

    def _by_rdma(self, rdma: RdmaPath, positions: Sequence[int], batch: Batch) -> Steps[tuple[list[int], float]]:
        if batch.sinks is not None and isinstance(batch.sinks[positions[0]], Ranges):
            from .ops import rdma_ranges  # likewise

            return (yield from rdma_ranges.read(rdma, positions, batch, self._copier, self.counters))
        from .rdma_get import read  # the path has loaded it

        return (yield from read(rdma, positions, batch, self._copier, self._check, self.counters))


def _has_devices(positions: Sequence[int], batch: Batch) -> bool:
    """Return whether a batch reads ranges, some of them into a device's memory. If one sink is ranges, all are."""
    sinks = batch.sinks
    if sinks is None or not isinstance(sinks[positions[0]], Ranges):
        return False
    return any(has_device(part[3] for part in sinks[position].parts) for position in positions)  # type: ignore[union-attr]


def _fitting(sink: memoryview | Span, room: memoryview) -> Callable[[int], memoryview]:
    """Return where a value for ``sink`` goes. A value that does not fit is received too, and dropped."""
    return lambda length: room[:length] if fits(length, sink) else memoryview(bytearray(length))


def _room_in(news: dict[int, bytearray], position: int) -> Callable[[int], memoryview]:
    def room(length: int) -> memoryview:
        news[position] = bytearray(length)
        return memoryview(news[position])

    return room
