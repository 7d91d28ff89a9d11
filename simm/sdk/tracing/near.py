"""The parts of a client with near copies that note segments, and its thread that makes copies, with its operations.

    near       in a get: the look at the copies here, with ``locate``, ``copy`` and ``confirm`` of each
               in a delete: the deletes of the copies at all nodes
    promote    an operation of the thread: reads at the owners, puts here, and whether the originals are still there
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ...ipc.put import ShmPut
from ...tracing.spans import CURRENT, Decision
from ..near.copies import Near, NearGets, NearPut, NearPuts, NearReads
from ..reads import Gets
from ..writes import Puts
from .parts import TracedGets, TracedPuts, TracedRemoteReads, TracedShmPut, noted
from .stand_ins import TimedReader

if TYPE_CHECKING:
    from ..batch import Answer, Batch

_ns: Final = time.monotonic_ns


class TracedNearReads(TracedRemoteReads, NearReads):
    """Reads at other hosts after a look here, with their segments."""

    def _look(self, positions: Sequence[int], batch: Batch) -> Sequence[int]:
        left: Sequence[int] = noted("near", super()._look, positions, batch)
        operation = CURRENT.get()
        if operation is not None and len(left) < len(positions):
            operation.by("shm")
        return left


class TracedNearGets(TracedGets, NearGets):
    """The reads of a client with near copies, with their segments."""

    def _near_copy(self, reader: Any, batch: Batch, position: int) -> Answer:
        operation = CURRENT.get()
        return super()._near_copy(reader if operation is None else TimedReader(reader, operation), batch, position)


class TracedNearPuts(TracedPuts, NearPuts):
    """The mutations of a client with near copies, with their segments."""

    def _delete_near(self, digests: Sequence[bytes], sizes: Sequence[int] | None) -> None:
        noted("near", super()._delete_near, digests, sizes)


class TracedNearPut(TracedShmPut, NearPut):
    """Puts of near copies, with their segments."""

    __slots__ = ()


class TracedNear(Near):
    """Near copies whose making is an operation of its own. It has the client's ``Decision`` then."""

    _decision: Decision

    def _copy(self, digests: Sequence[bytes], scratch: memoryview) -> int:
        operation = self._decision.begin("promote")
        if operation is None:
            return super()._copy(digests, scratch)
        token = CURRENT.set(operation)
        operation.about["keys"] = len(digests)
        try:
            operation.about["done"] = made = super()._copy(digests, scratch)
            return made
        finally:
            CURRENT.reset(token)
            self._decision.end(operation)


#: As ``switch.PARTS``.
PARTS: Final[dict[type, type]] = {
    NearGets: TracedNearGets, NearPuts: TracedNearPuts, NearReads: TracedNearReads, NearPut: TracedNearPut,
    Near: TracedNear,
}  # fmt: skip


def parts_of(near: Any) -> list[Any]:
    """Return the parts of a client's near copies: what reads, puts and drops for the thread, and reads at owners.

    Those that a fake lacks are left out.
    """
    plain: Gets | None = getattr(near, "_plain", None)
    put: ShmPut | None = getattr(near, "_put", None)
    drops: Puts | None = getattr(near, "_drops", None)
    originals: Gets = near.originals
    found = [near, plain, plain and plain._remote, put, drops, originals, originals._remote]
    return [part for part in found if part is not None]
