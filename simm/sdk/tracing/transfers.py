"""Stand-ins for a path by RDMA, its connections' endpoints and queue pairs, while an operation is recorded.

A *transfer* is one chain of READs or WRITEs, from its post until this client has seen that it is done. Several are in
flight at a time, also on one queue pair, so each has a lane of its own (``tracing/spans.py``):

    lookup     the sets of the table in which keys may be
    fetch      values, with their slots before and after
    write      values of a put, with the READ that flushes them
    commit     the endpoint's answer to a commit, beside the next values' transfers

A transfer ends when the client looks, so it may have been done before. What its thread did meanwhile is in others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ...constants import SET_BYTES
from ...errors import RemoteProtocolError
from ...rdma.api import WRITE, Op
from ...tracing.spans import Operation
from ...wire import messages as M
from ...wire.trace_messages import Timed, answer_in, named, traced
from .stand_ins import ASKED, StandIn

_ns: Final = time.monotonic_ns
#: What the time until an endpoint's answer is called.
_SEGMENTS: Final[dict[type, str]] = {M.Commit: "commit", M.Grant: "grant", M.Delete: "delete", M.DeleteSized: "delete"}


def _name_of(ops: Sequence[Op], operation: str) -> str:
    """Return what a chain does, for one of ``operation``; empty if nobody waits for it."""
    if operation == "put":
        return "write"
    reads = [op for op in ops if op[0] != WRITE]  # a WRITE of a read marks an entry as visited
    if not reads:
        return ""
    return "lookup" if reads[0][3] == SET_BYTES else "fetch"


class RdmaTarget(StandIn):
    """A worker that is written to by RDMA, with a path that is timed."""

    __slots__ = ("rdma",)

    def __init__(self, real: Any, operation: Operation) -> None:
        super().__init__(real)
        rdma = real.rdma  # once: another thread may lose it
        self.rdma = rdma and TimedPath(rdma, operation)


class TimedPath(StandIn):
    """A path by RDMA. Its connections have timed endpoints and links from when they are acquired until they are back.
    """

    __slots__ = ("_operation",)

    def __init__(self, real: Any, operation: Operation) -> None:
        super().__init__(real)
        self._operation = operation

    def acquired(self, work: Any, hold: Any) -> Any:
        """Acquire a connection, in steps. ``hold`` holds it, and ``work`` has the time limit."""
        connection = yield from self.real.acquired(work, hold)
        connection.channel = TimedEndpoint(connection.channel, self._operation, asks=connection.tells)
        connection.links = [TimedLink(link, self._operation) for link in connection.links]
        return connection

    def give_back(self, hold: Any) -> None:
        """Take what is held back. Twice is harmless."""
        _plain(hold.connection)
        self.real.give_back(hold)

    def lose(self, hold: Any, reason: str) -> None:
        """Close what is held after a failure. Twice is harmless."""
        _plain(hold.connection)
        self.real.lose(hold, reason)


def _plain(connection: Any) -> None:
    """Give a connection back what its stand-ins stand for, as far as it has any; None: there is no connection."""
    if connection is None:
        return
    if isinstance(connection.channel, TimedEndpoint):
        connection.channel = connection.channel.real
    timed = [link for link in connection.links if isinstance(link, TimedLink)]
    for link in timed:
        link.qp.seen(None)
    if timed:
        connection.links = [link.real if isinstance(link, TimedLink) else link for link in connection.links]


class TimedLink(StandIn):
    """A queue pair of a connection, whose chains are timed."""

    __slots__ = ("_operation", "qp")

    def __init__(self, real: Any, operation: Operation) -> None:
        super().__init__(real)
        self._operation = operation
        self.qp = TimedQueuePair(real.qp, operation)

    def post(self, ops: Sequence[Op], until: float) -> int:
        """Post operations; return the last ticket."""
        began = _ns()
        ticket: int = self.real.post(ops, until)
        if name := _name_of(ops, self._operation.name):
            size = 0 if name == "lookup" else sum(op[3] for op in ops if (op[0] == WRITE) == (name == "write"))
            self.qp.posted(ticket, began, name, size)
        return ticket


class TimedQueuePair(StandIn):
    """What a link's chains are waited for by."""

    __slots__ = ("_in_flight", "_operation")

    def __init__(self, real: Any, operation: Operation) -> None:
        super().__init__(real)
        self._operation = operation
        #: Ticket, begin, name, bytes and lane of the chains that are not known to be done.
        self._in_flight: deque[tuple[int, int, str, int, int]] = deque()

    def posted(self, ticket: int, began: int, name: str, size: int) -> None:
        """Take note of a chain."""
        self._in_flight.append((ticket, began, name, size, self._operation.take_lane()))

    def seen(self, ticket: int | None) -> None:
        """Note the chains that are done up to this one; None: all, as nobody will look again."""
        in_flight, operation = self._in_flight, self._operation
        while in_flight and (ticket is None or in_flight[0][0] <= ticket):
            _, began, name, size, lane = in_flight.popleft()
            operation.free_lane(lane)
            operation.segment(name, began, _ns(), lane=lane, size=size)

    def poll(self) -> int:
        """Return the ticket of the last chain that is done."""
        ticket: int = self.real.poll()
        self.seen(ticket)
        return ticket

    def wait(self, ticket: int, until: float) -> None:
        """Wait until a chain is done."""
        self.real.wait(ticket, until)
        self.seen(ticket)


class TimedEndpoint(StandIn):
    """A connection to an endpoint, which is asked what commits and grants took it."""

    __slots__ = ("_asks", "_operation", "_sent")

    def __init__(self, real: Any, operation: Operation, *, asks: bool) -> None:
        super().__init__(real)
        self._operation = operation
        self._asks = asks
        #: Requests whose answers have not been taken: when each was sent, its segment and its lane, by number.
        self._sent: dict[int, tuple[int, str, int]] = {}

    def submit(self, msg: Any) -> int:
        """Send a request."""
        began, wrapped = _ns(), self._wrapped(msg)
        number = int(self.real.submit(wrapped))
        if type(msg) in ASKED:
            self._sent[number] = began, _SEGMENTS[type(msg)], self._operation.take_lane()
        return number

    def call(self, msg: Any) -> Any:
        """Make one exchange."""
        if type(msg) not in ASKED:
            return self.real.call(msg)
        began = _ns()
        return self._taken(self.real.call(self._wrapped(msg)), began, _SEGMENTS[type(msg)], 0)

    def result(self, frame: Any) -> Any:
        """Return the message of a reply."""
        began, name, lane = self._sent.pop(frame.request_id, (0, "", 0))
        if name:
            self._operation.free_lane(lane)
        answer = self.real.result(frame)
        return self._taken(answer, began, name, lane) if name else answer

    def _wrapped(self, msg: Any) -> Any:
        return traced(self._operation.trace_id, msg) if self._asks and type(msg) in ASKED else msg

    def _taken(self, answer: Any, began: int, name: str, lane: int) -> Any:
        """Note a request that has been answered, and what the endpoint says of it."""
        now, span = _ns(), self._operation.new_id()
        self._operation.segment(name, began, now, span_id=span, lane=lane)
        if type(answer) is not Timed:
            return answer
        self._operation.of_server(answer.pid, named(answer.spans), (began, now), span, remote=True)
        try:
            return answer_in(answer)
        except RemoteProtocolError as exc:
            self.real.fail(str(exc))
