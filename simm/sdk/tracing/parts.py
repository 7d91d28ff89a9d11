"""The parts of a client that note segments: subclasses without state, which take the place of the real ones.

Each looks for the operation of its thread. Without one it does what the real part does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ...host.buffers import Span
from ...host.parts import HOST_TYPES
from ...ipc.put import ShmPut
from ...net.channel import ChannelWait
from ...tracing.spans import CURRENT
from ...wire.status import PathBit
from ..reads import Gets
from ..remote_reads import RemoteReads
from ..tcp import TcpPath
from ..writes import Puts
from .stand_ins import AskedTarget, TimedChannel, TimedReader, TimedSession, TimedTarget

if TYPE_CHECKING:
    from ...arena.reader import ArenaReader, Located
    from ...cluster.lookup import Unresolved
    from ...ipc.grant_pool import GrantTuple, RoomWait
    from ...ipc.patience import Patience
    from ...ipc.session import WorkerSession
    from ...ipc.steps import Steps
    from ...net.channel import Channel
    from ..batch import Answer, Batch, PutBatch, Sink, View
    from ..rdma_pool import RdmaPath
    from ..tcp import Got, Want
    from ..worker_path import Target

_T = TypeVar("_T")

_ns: Final = time.monotonic_ns


def _real(thing: Any) -> Any:
    """Return what a stand-in stands for."""
    return thing.real if type(thing) in (TimedReader, TimedTarget, TimedSession) else thing


class TracedGets(Gets):
    """Reads, with their segments."""

    def read(self, target: Target | None, digest: bytes, sink: Sink) -> Answer:
        """Read one value through a timed reader, if it is in an arena."""
        operation = CURRENT.get()
        reader: Any = target.reader if operation is not None and target is not None else None
        if operation is None or reader is None or type(reader) is TimedReader:  # read() has called itself, to time it
            return super().read(target, digest, sink)
        operation.by("shm")
        stand_in: Any = TimedTarget(target, reader, operation)
        return super().read(stand_in, digest, sink)

    def _one_moved(self, target: Target, counts: memoryview, digest: bytes, sink: Sink) -> Answer:
        return noted("elsewhere", super()._one_moved, _real(target), counts, digest, sink)  # type: ignore[no-any-return]

    def _pinned(self, target: Target, digest: bytes, *, sink: Sink = None, copied: bool = False) -> View:
        read = functools.partial(super()._pinned, sink=sink, copied=copied)
        return noted("pin", read, _real(target), digest)  # type: ignore[no-any-return]

    def copy_out(self, reader: ArenaReader, found: Located, sink: memoryview | Span) -> None:
        """Copy out of the real arena: a device keeps what it knows of one by the reader."""
        super().copy_out(_real(reader), found, sink)

    def _read_in(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, slots: Any
    ) -> Unresolved:
        operation = CURRENT.get()
        sinks = batch.sinks
        if operation is None or not sinks or type(sinks[positions[0]]) not in HOST_TYPES:
            return noted("copy", super()._read_in, target, reader, positions, batch, slots)  # type: ignore[no-any-return]
        operation.by("shm")
        stand_in: Any = TimedReader(reader, operation)
        return super()._read_in(target, stand_in, positions, batch, slots)

    def _exist_in(
        self, target: Target, reader: ArenaReader, positions: Sequence[int], batch: Batch, slots: Any
    ) -> Unresolved:
        return noted("locate", super()._exist_in, target, reader, positions, batch, slots)  # type: ignore[no-any-return]


class TracedRemoteReads(RemoteReads):
    """Reads by RDMA and TCP, with their segments."""

    def read_uncounted(self, target: Target, positions: Sequence[int], batch: Batch) -> Steps[Unresolved]:
        operation = CURRENT.get()
        if operation is not None:
            traced_tcp(target)
            operation.by(target.path)
        return (yield from super().read_uncounted(target, positions, batch))

    def _by_rdma(self, rdma: RdmaPath, positions: Sequence[int], batch: Batch) -> Steps[tuple[list[int], float]]:
        operation = CURRENT.get()
        if operation is None:
            return (yield from super()._by_rdma(rdma, positions, batch))
        from .transfers import TimedPath  # a path by RDMA has loaded what that needs

        operation.by("rdma")
        stand_in: Any = TimedPath(rdma, operation)
        began = _ns()
        try:
            return (yield from super()._by_rdma(stand_in, positions, batch))
        finally:
            operation.segment("rdma", began, _ns())

    def _exist_tcp(
        self, target: Target, positions: Sequence[int], batch: Batch, unresolved: Unresolved, until: float
    ) -> Steps[None]:
        operation = CURRENT.get()
        if operation is not None:
            traced_tcp(target)
            operation.by("tcp")
        return (yield from super()._exist_tcp(target, positions, batch, unresolved, until))


class TracedPuts(Puts):
    """Mutations, with their segments."""

    def _ask(
        self, requests: Iterable[Any], target: Target, together: bool, by_tcp: Callable[[TcpPath], Steps[list[int]]]
    ) -> Steps[list[int]]:
        operation = CURRENT.get()
        if operation is None:
            return (yield from super()._ask(requests, target, together, by_tcp))
        session = target.session  # once: another thread may lose it
        if session is None:
            traced_tcp(target)
            operation.by("tcp")
            return (yield from super()._ask(requests, target, together, by_tcp))
        operation.by("shm")
        stand_in: Any = AskedTarget(target, TimedSession(session, operation))
        return (yield from super()._ask(requests, stand_in, together, by_tcp))

    def _put_remote(
        self, target: Target, positions: Sequence[int], batch: PutBatch, spare: Sequence[memoryview | Span]
    ) -> Steps[bool]:
        operation = CURRENT.get()
        if operation is None:
            return (yield from super()._put_remote(target, positions, batch, spare))
        traced_tcp(target)
        operation.by(target.path)
        if target.path != "rdma":
            return (yield from super()._put_remote(target, positions, batch, spare))
        from .transfers import RdmaTarget  # likewise

        stand_in: Any = RdmaTarget(target, operation)
        began = _ns()
        try:
            return (yield from super()._put_remote(stand_in, positions, batch, spare))
        finally:
            operation.segment("rdma", began, _ns())

    def _redirect(
        self, digests: Sequence[bytes], statuses: list[int], act: Any, began: float, asked: dict[int, Target | None],
        patience: Patience, *, values: bool = False,
    ) -> None:  # fmt: skip
        redirect = functools.partial(super()._redirect, values=values)
        noted("redirect", redirect, digests, statuses, act, began, asked, patience)


class TracedShmPut(ShmPut):
    """Puts into arenas on this host, with their segments."""

    __slots__ = ()

    def put_one(self, session: WorkerSession, digest: bytes, source: memoryview | Span) -> int:
        """Put one value through a timed session."""
        return super().put_one(_timed(session), digest, source)

    def put_steps(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span],
        positions: Sequence[int], statuses: list[int], room: RoomWait | None = None, *, together: bool = False,
    ) -> Steps[None]:  # fmt: skip
        """Put many values through a timed session."""
        return super().put_steps(_timed(session), digests, sources, positions, statuses, room, together=together)

    def _fill(
        self, session: WorkerSession, grant: GrantTuple, source: memoryview | Span, length: int, after: int = 0
    ) -> tuple[int, int]:
        return noted("copy", super()._fill, _real(session), grant, source, length, after)  # type: ignore[no-any-return]

    def _fill_run(
        self, session: WorkerSession, grants: Sequence[GrantTuple], run: Sequence[memoryview | Span], length: int
    ) -> Sequence[tuple[int, int]]:
        return noted("copy", super()._fill_run, _real(session), grants, run, length)  # type: ignore[no-any-return]

    def _fill_planned(
        self, session: WorkerSession, digests: Sequence[bytes], planned: Any, entries: Any, mine: list[int], after: int
    ) -> None:
        noted("copy", super()._fill_planned, _real(session), digests, planned, entries, mine, after)

    def _fill_group(
        self, session: WorkerSession, digests: Sequence[bytes], sources: Sequence[memoryview | Span], group: Any,
        size: int,
    ) -> list[tuple[bytes, int, int, int, int, int]]:  # fmt: skip
        filled = noted("copy", super()._fill_group, _real(session), digests, sources, group, size)
        return filled  # type: ignore[no-any-return]


class TracedTcpPath(TcpPath):
    """Exchanges by TCP, with their segments."""

    def _fetch(
        self, channel: Channel, message: Callable[[Any], Any], kind: int, wants: Sequence[Want]
    ) -> Steps[list[Got]]:
        timed = self._timed_channel(channel)
        return (yield from _told(timed, super()._fetch(timed, message, kind, wants)))

    def _fetch_ranges(self, channel: Channel, previous: int, wants: Sequence[Any]) -> Steps[list[Got]]:
        timed = self._timed_channel(channel)
        return (yield from _told(timed, super()._fetch_ranges(timed, previous, wants)))

    def _store(self, channel: Channel, entries: Sequence[Any]) -> Steps[list[int]]:
        timed = self._timed_channel(channel)
        return (yield from _told(timed, super()._store(timed, entries)))

    def _call(self, channel: Channel, msg: Any) -> Steps[Any]:
        timed = self._timed_channel(channel)
        return (yield from _told(timed, super()._call(timed, msg)))

    def _send(self, channel: Channel, number: int, pieces: list[bytes | memoryview]) -> Steps[None]:
        if isinstance(channel, TimedChannel):
            pieces[0] = channel.wrapped(bytes(pieces[0]))
        return super()._send(channel, number, pieces)

    def _timed_channel(self, channel: Channel) -> Any:
        operation, welcome = CURRENT.get(), self.welcome
        if operation is None:
            return channel
        return TimedChannel(channel, operation, asks=welcome is not None and bool(welcome.paths & PathBit.TRACE))


def noted(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Carry out a call, and note it as a segment of this thread's operation."""
    operation = CURRENT.get()
    if operation is None:
        return call(*arguments)
    began = _ns()
    try:
        return call(*arguments)
    finally:
        operation.segment(name, began, _ns())


def _timed(session: Any) -> Any:
    operation = CURRENT.get()
    if operation is None or type(session) is TimedSession:
        return session
    operation.by("shm")
    return TimedSession(session, operation)


def _told(channel: Any, steps: Steps[_T]) -> Steps[_T]:
    """Carry out an exchange, and take what the server says of it."""
    result = yield from steps
    if isinstance(channel, TimedChannel) and channel.number:
        yield ChannelWait(channel.real, channel.number, last=True)
        channel.take_timed()
    return result


def traced_tcp(target: Target) -> None:
    """Let a worker's TCP path note segments, until :func:`plain_tcp`."""
    tcp = target.tcp
    if type(tcp) is TcpPath:
        tcp.__class__ = TracedTcpPath


def plain_tcp(target: Target) -> None:
    """Take :func:`traced_tcp` back."""
    tcp = target.tcp
    if type(tcp) is TracedTcpPath:
        tcp.__class__ = TcpPath  # type: ignore[assignment]
