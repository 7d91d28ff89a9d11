"""Reads and puts of manifests: as of values, but of entries with the flag ENTRY_LARGE.

They are small and rare, so they go the plainest way: one at a time in shared memory, elsewhere by TCP, also where the
client's values must not (``path="rdma"``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...arena.layout import ENTRY_LARGE
from ...arena.reader import ArenaReader, Unsettled
from ...cluster.lookup import Unresolved
from ...host.buffers import Span
from ...ipc.grant_pool import GrantTuple, RoomWait
from ...ipc.put import ShmPut
from ...ipc.session import WorkerSession
from ...ipc.steps import Steps
from ...wire.status import Status
from ..batch import LARGE, MISS, UNAVAILABLE, Batch, PutBatch
from ..reads import Gets
from ..remote_reads import RemoteReads
from ..tcp import TcpPath
from ..worker_path import Target
from ..writes import Puts


class RemoteManifestReads(RemoteReads):
    """Manifests at workers on other hosts. Each is read into host memory."""

    kind = ENTRY_LARGE

    def read(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        return self.read_tcp(target, positions, batch)

    def read_uncounted(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        return self.read_tcp(target, positions, batch)

    def read_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, *, previous: bool = False, until: float = 0.0
    ) -> Steps[Unresolved]:
        unresolved = Unresolved()
        if target.tcp is None:
            count = len(positions)
            self.counters["outages"] += count
            for position in positions:
                batch.results[position] = UNAVAILABLE
            return unresolved
        yield from self._fetch(target, target.tcp, positions, batch, unresolved, previous, until)
        return unresolved


class ManifestGets(Gets):
    """A client's reads of manifests."""

    kind = ENTRY_LARGE
    remote_kind = RemoteManifestReads

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: No entry is delivered without a look at its flags.
        self.plain = frozenset()


class RemoteManifestLooks(RemoteManifestReads):
    """The same for :class:`ManifestLooks`. A server counts only what has a manifest, which alone is read."""

    def read(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        tcp = target.tcp
        if tcp is None:
            return (yield from self.read_tcp(target, positions, batch))
        call = tcp.resolve_misses([batch.digests[position] for position in positions], False)
        answers = yield from self._routes.call_tcp(target, tcp, call, lambda: batch.late.update(positions))
        left: list[int] = []
        for position, (status, flags) in zip(positions, answers or [(int(Status.UNAVAILABLE), 0)] * len(positions)):
            if status == Status.OK and not flags & ENTRY_LARGE:
                batch.results[position] = LARGE
            elif status in (Status.NOT_FOUND, Status.UNAVAILABLE):
                batch.results[position] = MISS if status == Status.NOT_FOUND else UNAVAILABLE
            else:
                left.append(position)
        return (yield from self.read_tcp(target, left, batch)) if left else Unresolved()


class ManifestLooks(ManifestGets):
    """Looks for manifests that nobody has asked a value of: not counted, and no value in an arena is younger for them.

    Make it with counters and tallies of its own.
    """

    remote_kind = RemoteManifestLooks

    def _read_in(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, slots: Any
    ) -> Unresolved:
        unresolved = Unresolved()
        for position in positions:
            digest = batch.digests[position]
            got = self._copy(reader, batch, position, reader.confirm)
            if got == MISS:
                try:
                    changing = reader.locate(digest) is not None
                except Unsettled:
                    changing = True
                if changing:  # it is read from a pin, as a get would
                    got = self.read(target, digest, (batch.sinks or ())[position])
                else:
                    unresolved.by_word(position, reader.shard_word(digest))
            batch.results[position] = got
        return unresolved

    def _settle(self, target: Target, left: Unresolved, batch: Batch) -> None:
        self._resolve(target, batch, left)


class ShmManifestPut(ShmPut):
    """Puts of manifests into arenas on this host."""

    __slots__ = ()

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, after: int = 0
    ) -> tuple[int, int]:
        crc, flags = super()._fill(session, grant, source, length, after)
        return crc, flags | ENTRY_LARGE

    def put_steps(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait | None = None, *, together: bool = False,
    ) -> Steps[None]:  # fmt: skip
        for position in positions:
            statuses[position] = self.put_one(session, digests[position], sources[position])
        yield from ()


class ManifestPuts(Puts):
    """A client's puts of manifests."""

    def _put_remote(
        self, target: Target, positions: Sequence[int], batch: PutBatch, spare: Sequence[memoryview | Span]
    ) -> Steps[bool]:
        if target.tcp is not None:
            yield from self._put_tcp(target, target.tcp, positions, batch, spare, 0.0)
        return False

    def _store_tcp(
        self, target: Target, tcp: TcpPath, entries: Mapping[int, Any], batch: PutBatch, until: float
    ) -> Steps[None]:
        flagged = {
            position: (digest, views, crc, flags | ENTRY_LARGE)
            for position, (digest, views, crc, flags) in entries.items()
        }
        return super()._store_tcp(target, tcp, flagged, batch, until)
