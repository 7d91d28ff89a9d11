"""Requests in a trace: carried out as if they had come alone, and what that took told to their sender.

A server has no switch for it: it does what the request asks for, and keeps nothing. Nothing of it is on the way of
other requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...ipc.commit_ring import SLOT_BYTES
from ...rpc import OPCODES, decode
from ...wire import messages as M
from ...wire.trace_messages import SPANS, Timed, request_in, timed
from ...wire.trace_messages import Traced as Traced

if TYPE_CHECKING:
    from ...arena.sessions import Session
    from ...ipc.tally import Served
    from ...net.peer import Peer
    from ...rpc import Frame

Handlers = Mapping[int, Callable[["Session", Any], tuple[Any, int]]]
_ns: Final = time.monotonic_ns
_DECODE, _CARRY_OUT = SPANS.index("decode"), SPANS.index("carry out")
#: What carrying a request out is called.
_WORK: Final = {
    OPCODES[M.Commit]: SPANS.index("publish"), OPCODES[M.Grant]: SPANS.index("place"),
    OPCODES[M.Locate]: SPANS.index("look"),
    OPCODES[M.Fetch]: SPANS.index("read"), OPCODES[M.FetchPrevious]: SPANS.index("read"),
    OPCODES[M.FetchRanges]: SPANS.index("read"), OPCODES[M.Store]: SPANS.index("store"),
    OPCODES[M.Exists]: SPANS.index("look"), OPCODES[M.Delete]: SPANS.index("delete"),
    OPCODES[M.DeleteSized]: SPANS.index("delete"),
}  # fmt: skip
#: Requests to a stream that may be in a trace.
OF_STREAMS: Final = frozenset(
    OPCODES[each]
    for each in (M.Fetch, M.FetchPrevious, M.FetchRanges, M.Store, M.Exists, M.Delete, M.DeleteSized)
)
_WORK_OF_STREAMS: Final = {opcode: _WORK[opcode] for opcode in OF_STREAMS}
#: An answer must fit a slot of the ring; one that is nearly as long goes without spans.
_ANSWER_BYTES_MAX: Final = SLOT_BYTES - 512


def handler(handlers: Handlers) -> Callable[[Session, Traced], tuple[Any, int]]:
    """Return what a worker does at TRACED: one of these requests. Raises RemoteProtocolError for another one."""
    requests = handlers.keys() - {OPCODES[Traced]}

    def carry_out(session: Session, msg: Traced) -> tuple[Any, int]:
        began = _ns()
        request = decode(request_in(msg, requests, 0))
        decoded = _ns()
        answer, status = handlers[msg.opcode](session, request)
        spans = [(_DECODE, began, decoded), (_WORK.get(msg.opcode, _CARRY_OUT), decoded, _ns())]
        if isinstance(answer, M.Error):
            return answer, status
        whole = timed(os.getpid(), spans, answer)
        return (whole if len(whole.body) <= _ANSWER_BYTES_MAX else answer), status

    return carry_out


class Watched:
    """In place of a stream's counts while it carries out a request in a trace: it is told when that has ended.

    ``stored`` is counted just before the answer is on its way, the others when it is. The counts know the trace
    meanwhile.
    """

    def __init__(
        self, counts: Served, trace: bytes, on_answered: Callable[[], None], on_stored: Callable[[], None]
    ) -> None:
        self._counts = counts
        self._trace = trace
        self._on_answered = on_answered
        self._on_stored = on_stored

    def looked(self, *arguments: Any) -> None:
        """Count an EXISTS that has been answered."""
        self._in_trace(self._counts.looked, arguments)
        self._on_answered()

    def deleted(self, *arguments: Any) -> None:
        """Count a DELETE that has been answered."""
        self._in_trace(self._counts.deleted, arguments)
        self._on_answered()

    def fetched(self, *arguments: Any) -> None:
        """Count a FETCH that has been answered."""
        self._in_trace(self._counts.fetched, arguments)
        self._on_answered()

    def stored(self, *arguments: Any) -> None:
        """Count a STORE whose last byte is stored."""
        self._in_trace(self._counts.stored, arguments)
        self._on_stored()

    def _in_trace(self, count: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._counts.trace = self._trace
        try:
            count(*arguments)
        finally:
            self._counts.trace = b""


#: Requests to an endpoint that may be in a trace.
OF_ENDPOINTS: Final = frozenset((OPCODES[M.Commit], OPCODES[M.Grant]))


class TellingPeer:
    """In place of an endpoint's peer while a request in a trace is carried out: its answer goes inside of TIMED."""

    def __init__(self, peer: Peer, opcode: int, began: int, decoded: int) -> None:
        self._peer = peer
        self._opcode = opcode
        self._began = began
        self._decoded = decoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peer, name)

    def send_message(self, answer: Any, request_id: int, status: int = 0) -> None:
        """Send the answer with what it took. An error goes by itself."""
        spans = [(_DECODE, self._began, self._decoded), (_WORK[self._opcode], self._decoded, _ns())]
        self._peer.send_message(timed(os.getpid(), spans, answer), request_id, status=status)


def opened(peer: Peer, request_id: int, msg: Traced) -> tuple[Any, Any]:
    """Return the request to an endpoint in a message, and who takes its answer in place of ``peer``.

    Raises RemoteProtocolError for a request that cannot be in a trace.
    """
    began = _ns()
    request = decode(request_in(msg, OF_ENDPOINTS, request_id))
    return request, TellingPeer(peer, msg.opcode, began, _ns())


class TracedService(Protocol):
    """What is needed of a stream."""

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """Carry out a request."""


def serve(stream: TracedService, peer: Peer, request_id: int, msg: Traced) -> None:
    """Let a stream carry out the request in a message, and send TIMED after its answer.

    Raises RemoteProtocolError for a request that cannot be in a trace. One that is refused has no TIMED.
    """
    state = peer.context
    counts = state.counted
    began = _ns()

    def send(ended: int) -> None:
        if not peer.closed:
            decoded = min(state.began, ended)  # perf_counter, which is this clock on Linux
            spans = [(_DECODE, began, decoded), (_WORK_OF_STREAMS[msg.opcode], decoded, ended)]
            peer.send_message(Timed(os.getpid(), spans, 0, b""), request_id)

    def answered() -> None:
        state.counted = counts
        send(_ns())

    def stored() -> None:
        state.counted = counts
        # Called with the answer, not by a timer: the next request may be answered before one is due.
        state.told = partial(send, _ns())

    request = request_in(msg, OF_STREAMS, request_id)
    state.counted = Watched(counts, msg.trace, answered, stored)
    try:
        stream.on_frame(peer, request)
    finally:
        if state.sending is None and state.receiving is None:  # it has ended, or was refused
            state.counted = counts
