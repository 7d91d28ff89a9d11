"""pyverbs by a script: a rail for ``simm.verbs.VerbsQueuePair`` whose completion queue says what a test has written.

Nothing is transferred. ``ScriptedRail().queue_pair()`` is connected; ``script`` of its :class:`CompletionQueue` has
what the next polls find: lists of statuses, or an error to raise.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

from simm.rdma.api import Limits
from simm.verbs import VerbsQueuePair


class Error(Exception):
    """Of pyverbs."""

    def __init__(self, text: str, code: int = 5) -> None:
        super().__init__(text)
        self.error_code = code


class Closing:
    """An object that is closed once, as the library notes."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def close(self) -> None:
        """Note it."""
        self.library.closed.append(type(self).__name__)


class CompletionChannel(Closing):
    """Its descriptor is readable after :meth:`ring`, until the event is taken."""

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self.fd, self._bell = os.pipe()
        #: Raised when the event is taken.
        self.error: Error | None = None

    def ring(self) -> None:
        """Raise an event."""
        os.write(self._bell, b"x")

    def get_cq_event(self, _queue: Any) -> None:
        """Take it."""
        os.read(self.fd, 1)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        super().close()
        os.close(self.fd)
        os.close(self._bell)


class CompletionQueue(Closing):
    """Says what ``script`` says, one entry a poll, and nothing when that is at its end."""

    def __init__(self, library: Any, channel: CompletionChannel) -> None:
        super().__init__(library)
        self.channel = channel
        self.script: deque[list[int] | Error] = deque()
        #: Raised when an event is asked for.
        self.error: Error | None = None
        self.polls = 0

    def poll(self, _most: int = 1) -> tuple[int, list[Any]]:
        """Return the number of completions, and the completions."""
        self.polls += 1
        said = self.script.popleft() if self.script else []
        if isinstance(said, Error):
            raise said
        return len(said), [SimpleNamespace(status=status) for status in said]

    def req_notify(self) -> None:
        """Ask for an event. If there is something to say, it comes at once."""
        if self.error is not None:
            raise self.error

    def ack_events(self, _count: int) -> None:
        """Note it."""


class Queues(Closing):
    """The library's queue pair: takes everything, and notes what was posted."""

    qp_num = 77

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self.posted = 0

    def to_rts(self, _attributes: Any) -> None:
        """Connect."""

    def modify(self, _attributes: Any, _mask: Any) -> None:
        """Into the error state, at the end."""
        self.library.closed.append("into the error state")

    def post_send(self, _first: Any) -> None:
        """Take a chain."""
        self.posted += 1


class ScriptedRail:
    """What a queue pair asks of its rail and of pyverbs."""

    def __init__(self, depth: int = 16) -> None:
        self.closed: list[str] = []
        self.name, self.port, self.gid_index, self.lid, self.mtu = "scripted", 1, 0, 0, 4096
        self.gid = bytes(16)
        self.ethernet = False
        self.message_bytes = 1 << 30
        self.limits = Limits(1 << 40, 0, 16, depth)
        self.lock = threading.RLock()
        self.queue_pairs: set[Any] = set()
        self.context = self.pd = None
        self._vectors = itertools.count()
        self.made: list[Any] = []
        self.library = SimpleNamespace(
            Error=Error, CompChannel=lambda _context: self._note(CompletionChannel(self)),
            CQ=lambda _context, _size, _of, channel, _vector: self._note(CompletionQueue(self, channel)),
            QP=lambda _pd, _attributes: self._note(Queues(self)),
            QPCap=SimpleNamespace, QPInitAttr=SimpleNamespace, QPAttr=SimpleNamespace, AHAttr=SimpleNamespace,
            GID=str, GlobalRoute=SimpleNamespace, rc=2, qp_rights=7, error_state=6, state=1,
            SGE=lambda *_: SimpleNamespace(), SendWR=lambda **_: SimpleNamespace(set_wr_rdma=lambda *_: None),
        )  # fmt: skip

    def _note(self, made: Any) -> Any:
        self.made.append(made)
        return made

    def next_vector(self) -> int:
        """Return any number."""
        return next(self._vectors)

    def queue_pair(self) -> VerbsQueuePair:
        """Return a queue pair that is connected to itself."""
        qp = VerbsQueuePair(self)  # type: ignore[arg-type]
        qp.connect(qp.address())
        return qp

    @property
    def queue(self) -> CompletionQueue:
        """The completion queue that was made last."""
        found: CompletionQueue = next(each for each in reversed(self.made) if isinstance(each, CompletionQueue))
        return found
