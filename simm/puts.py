"""Mutations: put and delete, and what is done about a server that says it is not the owner.

A worker takes a mutation only of a shard that is its own. WRONG_OWNER has changed nothing, so the key is tried again
where the map then says, or at the same worker some milliseconds later (it may be about to take the shard over), until
the deadline, counted from the beginning of the call. A shard that moves, or a server that stops cleanly, so costs a
put milliseconds. So is one tried again whose shard nobody has while there are servers: of two that stop together the
second may have got it from the first, and the third is given it once it has heard of that. A server that has died
fails at once: what became of the mutation is not known, and the caller has a cache to do without.

Of a key that comes twice in a batch only the last value is tried again, or the earlier one could come after it.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from . import gpurdma
from . import messages as M
from .buffers import Span
from .cuda import CudaError
from .errors import RemoteProtocolError, TransportError
from .gets import CALL_KEYS, session_failed
from .gpu import DeviceSpan, host_view, parts
from .layout import EntryFlag
from .messages import Status
from .rdmaput import RdmaPut
from .routing import Again, Routes
from .shmput import ShmPut
from .target import Target
from .tcppath import TcpPath

log = logging.getLogger("simm.client")

_OK: Final = int(Status.OK)
_WRONG_OWNER: Final = int(Status.WRONG_OWNER)
_UNAVAILABLE: Final = int(Status.UNAVAILABLE)
_CRC: Final = int(EntryFlag.CRC)

#: Does what is wanted at one target with the keys at these positions, and fills their statuses in.
_Act = Callable[[Target, Sequence[int]], None]


class Puts:
    """A client's mutations; any thread may call it."""

    def __init__(
        self, routes: Routes, shm: ShmPut, rdma: RdmaPut, checksum: bool, deadline_s: float, counters: dict[str, int]
    ) -> None:
        self._routes = routes
        self._shm = shm
        self._rdma = rdma
        self._checksum = checksum
        self._deadline_s = deadline_s
        self.counters = counters

    def put(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """Store values; a Status for each."""
        statuses = self.store(digests, sources)
        stored = statuses.count(_OK)
        self.counters["puts"] += stored
        self.counters["put_failures"] += len(statuses) - stored
        return statuses

    def store(self, digests: Sequence[bytes], sources: Sequence[memoryview | Span]) -> list[int]:
        """The same, not counted."""
        statuses = [_UNAVAILABLE] * len(digests)

        def act(target: Target, positions: Sequence[int]) -> None:
            self._put_at(target, positions, digests, sources, statuses)

        self._everywhere(digests, statuses, act)
        return statuses

    def delete(self, digests: Sequence[bytes]) -> list[int]:
        """Drop entries; a Status for each."""
        statuses = [_UNAVAILABLE] * len(digests)

        def act(target: Target, positions: Sequence[int]) -> None:
            self._delete_at(target, positions, digests, statuses)

        self._everywhere(digests, statuses, act)
        self.counters["outages"] += statuses.count(_UNAVAILABLE)
        return statuses

    def again(self, target: Target, digest: bytes, source: memoryview | Span) -> int:
        """A put that ``target`` has refused with WRONG_OWNER, as a batch of one: its Status. Not counted."""
        statuses = [_WRONG_OWNER]

        def act(target: Target, positions: Sequence[int]) -> None:
            self._put_at(target, positions, [digest], [source], statuses)

        self._redirect([digest], statuses, act, time.monotonic() + self._deadline_s, {0: target})
        return statuses[0]

    # -- owners ---------------------------------------------------------------------------------------

    def _everywhere(self, digests: Sequence[bytes], statuses: list[int], act: _Act) -> None:
        began = time.monotonic()
        asked: dict[int, Target | None] = {}
        for target, positions in self._routes.group(digests):
            if target is None:
                if self._routes.peopled:
                    asked.update(dict.fromkeys(positions))
                    for position in positions:
                        statuses[position] = _WRONG_OWNER
                continue
            act(target, positions)
            if _WRONG_OWNER in statuses:
                asked.update((position, target) for position in positions if statuses[position] == _WRONG_OWNER)
        if asked:
            self._redirect(digests, statuses, act, began + self._deadline_s, asked)

    def _redirect(
        self, digests: Sequence[bytes], statuses: list[int], act: _Act, until: float, asked: dict[int, Target | None]
    ) -> None:
        """Try again what its target refused."""
        again = Again(self._routes, until)
        refused = list(asked)
        last = {digests[position]: position for position in range(len(digests))}
        while True:
            todo = [
                position for position, target in asked.items()
                if statuses[position] == _WRONG_OWNER and last[digests[position]] == position
            ]  # fmt: skip
            if not todo or not again.wait([(digests[position], asked[position]) for position in todo]):
                break
            self.counters["redirects"] += len(todo)
            asked = {}
            for target, positions in self._routes.group(digests, todo):
                waits = target is None and self._routes.peopled
                for position in positions:
                    statuses[position] = _WRONG_OWNER if waits else _UNAVAILABLE
                    asked[position] = target
                if target is not None:
                    act(target, positions)
        for position, target in asked.items():
            if target is None:  # to the end
                statuses[position] = _UNAVAILABLE
        for position in refused:  # overwritten by a later one of the same batch
            statuses[position] = statuses[last[digests[position]]]

    # -- one target -----------------------------------------------------------------------------------

    def _put_at(
        self, target: Target, positions: Sequence[int], digests: Sequence[bytes],
        sources: Sequence[memoryview | Span], statuses: list[int],
    ) -> None:  # fmt: skip
        session = target.session
        if session is None or session.broken:
            if not target.ready():
                return
            session = target.session
        if session is not None:
            try:
                if len(positions) == 1:
                    position = positions[0]
                    statuses[position] = self._shm.put_one(session, digests[position], sources[position])
                else:
                    self._shm.put_many(session, digests, sources, positions, statuses)
            except (TransportError, RemoteProtocolError) as exc:
                session_failed(self._routes, target, session, exc)
            return
        rdma = target.rdma
        if rdma is None or rdma.why or DeviceSpan not in map(type, map(sources.__getitem__, positions)):
            self._put_by_wire(target, positions, digests, sources, statuses)
            return

        def put_host(part: Sequence[int], hosted: Any, spare: Any) -> bool:
            return self._put_by_wire(target, part, digests, hosted, statuses, spare)

        try:
            # Whoever has to look at values cannot do that in a GPU's memory.
            gpurdma.put(put_host, positions, sources, () if self._checksum else rdma.rails)
        except CudaError as exc:
            log.warning("a put out of GPU memory: %s", exc)

    def _put_by_wire(
        self, target: Target, positions: Sequence[int], digests: Sequence[bytes],
        sources: Sequence[memoryview | Span], statuses: list[int], spare: Sequence[memoryview | Span] | None = None,
    ) -> bool:  # fmt: skip
        """Put by RDMA, and by TCP what that leaves over: was there nothing? ``spare``: the sources for TCP, where they
        are not the same."""
        rdma, tcp, until = target.rdma, target.tcp, 0.0
        if rdma is not None and not rdma.why:
            positions, until = self._rdma.put(rdma, positions, digests, sources, statuses)
            if not positions:
                return True
        if positions and tcp is not None and target.bulk:
            spare = sources if spare is None else spare
            for part in parts(positions, spare):
                self._put_by_tcp(target, tcp, part, digests, spare, statuses, until)
                until = 0.0
        return False

    def _put_by_tcp(
        self, target: Target, tcp: TcpPath, positions: Sequence[int], digests: Sequence[bytes],
        sources: Sequence[memoryview | Span], statuses: list[int], until: float,
    ) -> None:  # fmt: skip
        entries = []
        try:
            for position in positions:
                view = host_view(sources[position])
                crc, flags = (zlib.crc32(view), _CRC) if self._checksum else (0, 0)
                entries.append((digests[position], view, crc, flags))
        except CudaError as exc:  # the path is none the worse for it
            log.warning("a put out of GPU memory: %s", exc)
            return
        try:
            answers = tcp.store(entries, until)
        except (TransportError, RemoteProtocolError) as exc:
            target.tcp_lost(tcp, str(exc))
            self._routes.wake()
            return
        for position, status in zip(positions, answers):
            statuses[position] = status

    def _delete_at(
        self, target: Target, positions: Sequence[int], digests: Sequence[bytes], statuses: list[int]
    ) -> None:
        if not target.ready():
            return
        wanted = [digests[position] for position in positions]
        session, tcp = target.session, target.tcp
        answers: list[int] = []
        try:
            if session is not None:
                for start in range(0, len(wanted), CALL_KEYS):
                    answers += session.exchange(M.Delete(wanted[start : start + CALL_KEYS])).statuses
            elif tcp is not None:
                answers = tcp.delete(wanted)
        except (TransportError, RemoteProtocolError) as exc:
            if session is not None:
                session_failed(self._routes, target, session, exc)
            elif tcp is not None:
                target.tcp_lost(tcp, str(exc))
                self._routes.wake()
        for position, status in zip(positions, answers):
            statuses[position] = status
