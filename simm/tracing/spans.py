"""Operations and their segments, the decision to record one, and the memory that keeps them.

    operation "get"                        one call of the client: the root, or the child of the caller's span
      +- segment "locate"                  a stretch of it, in the client
      +- segment "commit"
           +- segment "place"              a stretch of that, in a server, by the server's own account

Times are ``time.monotonic_ns()``, which all processes of a host share. What a server on another host says of itself is
shifted into the segment that waited for it: the middle of what the server reports is laid on the middle of the wait.
So the length of each server segment is exact, and its place is off by half the difference of the two ways at most.

**Bounds.** An operation keeps ``SEGMENTS_MAX`` segments and counts the rest. A recorder keeps ``OPERATIONS_MAX``
operations that are not written yet, with about ``KEPT_SEGMENTS_MAX`` segments, and counts what it leaves out. So a
batch of a million keys costs a few KiB, a disk that hangs some 30 MiB, and no call waits for it.

**Privacy.** A span names no key: its first four bytes of the digest tell two keys apart and lead back to none.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from ..errors import UsageError
from .context import CONTEXT, TraceContext

SEGMENTS_MAX: Final = 64
OPERATIONS_MAX: Final = 16_384
#: Of all operations that a recorder keeps.
KEPT_SEGMENTS_MAX: Final = 65_536
#: Bytes of a digest that a span shows.
DIGEST_BYTES: Final = 4
_NS: Final = time.monotonic_ns


class Segment(NamedTuple):
    """A stretch of an operation. Times are monotonic nanoseconds."""

    name: str
    began: int
    ended: int
    #: The segment's own id, and that of the span it is a part of.
    span_id: bytes
    parent: bytes
    #: The server process that it was in; 0 for the client itself.
    pid: int = 0
    #: Of a server on another host, so that its pid is none of this host.
    remote: bool = False
    #: What goes on while its thread does something else, beside others of its kind; 0 for what the thread does itself.
    lane: int = 0
    #: Bytes that it moved; 0 if it moved none, or is not asked.
    size: int = 0


class Operation:
    """One call of a client, while it runs and until it is written. One thread at a time adds segments."""

    __slots__ = ("_ids", "_lanes", "about", "began", "ended", "kept", "left_out", "name", "parent", "segments",
                 "span_id", "tid", "trace_id")  # fmt: skip

    def __init__(self, name: str, trace_id: bytes, parent: bytes, *, kept: bool) -> None:
        self.name = name
        self.trace_id = trace_id
        self.span_id = os.urandom(8)
        #: The caller's span, empty for a root.
        self.parent = parent
        #: Whether it is recorded, and not only watched for being slow.
        self.kept = kept
        self.segments: list[Segment] = []
        self.left_out = 0
        self.about: dict[str, Any] = {}
        self.tid = threading.get_native_id()
        self._ids = int.from_bytes(self.span_id, "little")
        self._lanes = 0
        self.began = self.ended = _NS()

    def by(self, path: str) -> None:
        """Note the data path that it goes by: ``shm``, ``rdma`` or ``tcp``, or ``mixed`` for several."""
        if self.about.setdefault("path", path) != path:
            self.about["path"] = "mixed"

    def new_id(self) -> bytes:
        """Return an id for a span of this operation. It is never zero, and differs from the operation's own."""
        self._ids = (self._ids + 1) & 0xFFFF_FFFF_FFFF_FFFF or 1
        return self._ids.to_bytes(8, "little")

    def take_lane(self) -> int:
        """Return the first lane that nothing goes on in, to be given to :meth:`free_lane`. Lanes begin with 1."""
        lane = (~self._lanes & self._lanes + 1).bit_length()
        self._lanes |= 1 << lane - 1
        return lane

    def free_lane(self, lane: int) -> None:
        """Let others have a lane."""
        self._lanes &= ~(1 << lane - 1)

    def segment(
        self, name: str, began: int, ended: int, *, parent: bytes = b"", span_id: bytes = b"", lane: int = 0,
        size: int = 0,
    ) -> None:  # fmt: skip
        """Add a stretch of the client. O(1)."""
        if len(self.segments) >= SEGMENTS_MAX:
            self.left_out += 1
            return
        ids = span_id or self.new_id(), parent or self.span_id
        self.segments.append(Segment(name, began, ended, *ids, lane=lane, size=size))

    def of_server(
        self, pid: int, spans: Sequence[tuple[str, int, int]], within: tuple[int, int], parent: bytes, *, remote: bool
    ) -> None:
        """Add what a server says of itself. ``within``: when this client sent the request and had the answer.

        The spans of a server on this host keep their times. Nothing that a server says lies outside of ``within``: what
        does is cut, so a server with a wrong clock spoils its own spans only.
        """
        if not spans:
            return
        sent, received = within
        shift = 0
        first, last = min(each[1] for each in spans), max(each[2] for each in spans)
        if remote and not sent <= first <= last <= received:  # else its clock is this one, or as good
            shift = (sent + received) // 2 - (first + last) // 2
        for name, began, ended in spans:
            if len(self.segments) >= SEGMENTS_MAX:
                self.left_out += 1
                continue
            start = min(max(began + shift, sent), received)
            end = min(max(ended + shift, start), received)
            self.segments.append(Segment(name, start, end, self.new_id(), parent, pid, remote))


#: The operation that this thread or task is in; None without one.
CURRENT: Final[ContextVar[Operation | None]] = ContextVar("simm_operation", default=None)


def ratio_of(text: str) -> float | None:
    """Return the share of operations to record, 0 to 1; None for ``off``. Raises UsageError."""
    if text == "off":
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise UsageError(f"{text!r} is no share of operations to trace: 0 to 1, as 0.01, or off")
    return ratio


class Recorder:
    """Operations that have ended and are not written yet. Any thread may call it."""

    def __init__(self, most: int = OPERATIONS_MAX) -> None:
        #: How many it keeps; 0: none, ever.
        self.most = most
        self._ended: deque[Operation] = deque()
        #: Of those, about: threads add without a lock, and each :meth:`take` begins anew.
        self._segments = 0
        #: Operations that were not kept, as there were too many.
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, operation: Operation) -> None:
        """Keep an operation, or count it if there are too many. O(1), no lock, no I/O."""
        if len(self._ended) >= self.most or self._segments >= KEPT_SEGMENTS_MAX:
            self.left_out += 1
        else:
            count = len(operation.segments)
            self._segments += count
            self._ended.append(operation)

    def take(self) -> list[Operation]:
        """Return what there is, for one thread that writes it."""
        self._segments = 0
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def clear(self) -> None:
        """Forget everything: in a forked child it is the parent's."""
        self._ended.clear()
        self._segments = self.left_out = 0


class Decision:
    """What a client that traces records: a share of its operations, those of callers that record, and slow ones.

    ``ratio``: 0 to 1. ``slow_ns``: an operation that takes as long is slow; 0 for none.
    """

    __slots__ = ("_random", "ratio", "recorder", "slow_ns")

    def __init__(self, ratio: float, recorder: Recorder, slow_ns: int = 0) -> None:
        self.ratio = ratio
        self.slow_ns = slow_ns
        self.recorder = recorder
        self._random = random.random

    def begin(self, name: str) -> Operation | None:
        """Return the operation that begins in this thread, or None for one that nobody looks at."""
        caller: TraceContext | None = CONTEXT.get()
        if caller is not None:
            kept = caller.sampled and self.recorder.most > 0
        else:
            kept = self.ratio > 0.0 and self._random() < self.ratio
        if not kept and not self.slow_ns:
            return None
        if caller is not None:
            return Operation(name, caller.trace_id, caller.span_id, kept=kept)
        return Operation(name, os.urandom(16), b"", kept=kept)

    def end(self, operation: Operation) -> bool:
        """Note that an operation has ended, and keep it. Return whether it was slow."""
        operation.ended = _NS()
        if operation.kept:
            self.recorder.add(operation)
        return 0 < self.slow_ns <= operation.ended - operation.began
