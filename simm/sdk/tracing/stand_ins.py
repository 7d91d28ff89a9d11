"""Stand-ins for a reader, a session and a connection, for the time of one operation that is recorded.

Each passes everything on to the real one, and notes when it was asked what. So a recorded operation runs the very code
of any other: there is no second copy of the protocol that could differ. A stand-in refuses to have an attribute set, as
the real one would not get it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...errors import RemoteProtocolError, TransportError
from ...ipc.commit_ring import let_go_after
from ...rpc import HEADER_BYTES, OPCODES, encode, parse_header
from ...tracing.spans import Operation
from ...wire import messages as M
from ...wire.trace_messages import Timed, Traced, answer_in, named, traced

_ns: Final = time.monotonic_ns
#: Requests whose server is asked what they took.
ASKED: Final = frozenset((M.Commit, M.Grant, M.Delete, M.DeleteSized))
#: And those to a stream, by opcode.
_ASKED_OF_STREAMS: Final = frozenset(
    OPCODES[each]
    for each in (M.Fetch, M.FetchPrevious, M.FetchRanges, M.Store, M.Exists, M.Delete, M.DeleteSized)
)


class StandIn:
    """Stands in for an object that it times in parts; all else goes to that."""

    __slots__ = ("real",)

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __repr__(self) -> str:
        return repr(self.real)


class TimedReader(StandIn):
    """An arena's reader. What lies between finding an entry and confirming it is its copy."""

    __slots__ = ("_found_at", "_operation")

    def __init__(self, real: Any, operation: Operation) -> None:
        super().__init__(real)
        self._operation = operation
        self._found_at = 0

    def _found(self, began: int) -> None:
        self._found_at = now = _ns()
        self._operation.segment("locate", began, now)

    def _copied(self) -> int:
        now = _ns()
        if self._found_at:
            self._operation.segment("copy", self._found_at, now)
            self._found_at = 0
        return now

    def _timed(self, name: str, began: int, call: Callable[..., Any], *arguments: Any) -> Any:
        answer = call(*arguments)
        self._operation.segment(name, began, _ns())
        return answer

    def _finding(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = _ns()
        found = call(*arguments)
        self._found(began)
        return found

    def locate(self, digest: bytes) -> Any:
        """Find an entry."""
        return self._finding(self.real.locate, digest)

    def candidates(self, digests: Sequence[bytes]) -> Any:
        """Find slots of many entries."""
        return self._timed("locate", _ns(), self.real.candidates, digests)

    def locate_many(self, keys: Any, slots: Any) -> Any:
        """Find many entries."""
        return self._finding(self.real.locate_many, keys, slots)

    def contains_many(self, digests: Sequence[bytes]) -> Any:
        """Look for many entries."""
        return self._timed("locate", _ns(), self.real.contains_many, digests)

    def confirm(self, digest: bytes, slot: int, seq: int) -> Any:
        """Confirm a copy."""
        return self._timed("confirm", self._copied(), self.real.confirm, digest, slot, seq)

    def confirm_many(self, found: Any) -> Any:
        """Confirm many copies."""
        return self._timed("confirm", self._copied(), self.real.confirm_many, found)


class TimedTarget:
    """A worker whose arena is read, with a reader that is timed. Only what a read of it asks for."""

    __slots__ = ("fresh", "reader", "real")

    def __init__(self, real: Any, reader: Any, operation: Operation) -> None:
        self.real = real
        self.fresh = False
        self.reader = TimedReader(reader, operation)

    @property
    def path(self) -> str:
        """The path in use, or ``down``."""
        path: str = self.real.path
        return path


class TimedSession(StandIn):
    """A session with a worker on this host, which is asked what commits and grants took it."""

    __slots__ = ("_asks", "_operation", "_sent")

    def __init__(self, real: Any, operation: Operation) -> None:
        super().__init__(real)
        self._operation = operation
        self._asks = bool(real.welcome.paths & M.PathBit.TRACE)
        #: Requests in a trace whose answers have not been taken: when each was sent, by ticket.
        self._sent: dict[int, int] = {}

    def ask(self, wants: Sequence[tuple[int, int]]) -> None:
        """Wait for grants."""
        began, span = _ns(), self._operation.new_id()
        try:
            msg = self._wrapped(M.Grant(list(wants)))
            answer = self.real.exchange(msg, sum(count for _, count in wants))
            if not isinstance(self._opened(answer, began, span), M.Granted):  # what it brings is in the pool
                self.real.channel.fail("the worker answered GRANT with something else")
        finally:
            self._operation.segment("grant", began, _ns(), span_id=span)

    def _wrapped(self, msg: Any) -> Any:
        if not self._asks or type(msg) not in ASKED:
            return msg
        return traced(self._operation.trace_id, msg)

    def _opened(self, answer: Any, sent: int, span: bytes) -> Any:
        """Return the answer in an answer, and note what the worker says of it."""
        if type(answer) is not Timed:
            return answer
        self._operation.of_server(answer.pid, named(answer.spans), (sent, _ns()), span, remote=False)
        try:
            return answer_in(answer)
        except RemoteProtocolError as exc:
            self.real.channel.fail(str(exc))

    def commit_one(self, digest: bytes, grant: int, length: int, crc: int, flags: int, want: int, count: int) -> int:
        """Commit one entry and wait for the answer."""
        began, span = _ns(), self._operation.new_id()
        try:
            if not self._asks:
                status: int = self.real.commit_one(digest, grant, length, crc, flags, want, count)
                return status
            wants = [(want, count)] if count else []
            answer = self._exchange(M.Commit([(digest, grant, length, crc, flags, 0)], wants), began, span)
            if not isinstance(answer, M.Committed) or len(answer.statuses) != 1:
                self.real.channel.fail("the worker answered COMMIT with something else")
            return int(answer.statuses[0])
        finally:
            self._operation.segment("commit", began, _ns(), span_id=span)

    def _exchange(self, msg: Any, began: int, span: bytes) -> Any:
        """Make one exchange under the session's lock, which is waited for as an untraced commit does."""
        session = self.real
        for got in session.tries:  # noqa: B007 -- see net/allowance.py
            break
        if not got:
            session.wait_for_lock()
        ticket: int | None = None
        try:
            if session.channel.broken:
                raise TransportError(session.channel.broken)
            ticket = session.submit_locked(self._wrapped(msg))
            answer = session.wait_locked(ticket)
        except BaseException as exc:
            let_go_after(session, ticket, exc)
            raise
        finally:
            session.lock.release()
        return self._opened(answer, began, span)

    def submit(self, msg: Any, in_flight: Any = (), about: Any = None) -> int:
        """Send a request."""
        began = _ns()
        ticket: int = self.real.submit(self._wrapped(msg), in_flight, about)
        self._operation.segment("post", began, _ns())
        self._sent[ticket] = began
        return ticket

    def frame_locked(self, ticket: int, items: int = 1) -> Any:
        """Wait for an answer."""
        began = _ns()
        try:
            return self.real.frame_locked(ticket, items)
        finally:
            self._operation.segment("answer", began, _ns())

    def result(self, ticket: int) -> Any:
        """Take an answer that has come."""
        answer = self.real.result(ticket)
        return self._opened(answer, self._sent.pop(ticket, _ns()), self._operation.span_id)


class AskedTarget(StandIn):
    """A worker that is asked for mutations without a value, with a session that is timed."""

    __slots__ = ("session",)

    def __init__(self, real: Any, session: TimedSession) -> None:
        super().__init__(real)
        self.session = session


class TimedChannel(StandIn):
    """A connection by TCP. What lies before the first wait for an answer is the sending."""

    __slots__ = ("_asks", "_began", "_operation", "_waited", "number")

    def __init__(self, real: Any, operation: Operation, *, asks: bool) -> None:
        super().__init__(real)
        self._operation = operation
        self._asks = asks
        self._began = _ns()
        self._waited = 0
        #: Of the request whose server says what it took, when it has answered; 0 for none.
        self.number = 0

    def submit(self, msg: Any) -> int:
        """Send a request."""
        if not self._asks or OPCODES[type(msg)] not in _ASKED_OF_STREAMS:
            return int(self.real.submit(msg))
        self.number = int(self.real.submit(traced(self._operation.trace_id, msg)))
        return self.number

    def wrapped(self, frame: bytes) -> bytes:
        """Return a request's frame as it is sent."""
        opcode, _, _, number, _ = parse_header(frame)
        if not self._asks or opcode not in _ASKED_OF_STREAMS:
            return frame
        self.number = number
        return encode(Traced(self._operation.trace_id, opcode, frame[HEADER_BYTES:]), number)

    def take_timed(self) -> None:
        """Take what the server says of the request. Raises TransportError."""
        number, self.number = self.number, 0
        answer = self.real.result(self.real.wait(number))
        if type(answer) is not Timed or answer.body:
            self.real.fail("the server has not said what a traced request took")
        within = self._began, _ns()
        self._operation.of_server(answer.pid, named(answer.spans), within, self._operation.span_id, remote=True)

    def wait(self, number: int, polls: int = 0) -> Any:
        """Wait for an answer."""
        began = _ns()
        if not self._waited:
            self._operation.segment("send", self._began, began)
        self._waited += 1
        try:
            return self.real.wait(number, polls)
        finally:
            self._operation.segment("answer" if self._waited == 1 else "verdict", began, _ns())

    def receive_bulk(self, view: memoryview) -> None:
        """Receive bytes of values."""
        began = _ns()
        self.real.receive_bulk(view)
        self._operation.segment("receive", began, _ns())
