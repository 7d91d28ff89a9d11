"""A request whose sender wants to know what it took, and the answer to that (docs/tracing.md).

TRACED has another request in it, which the server carries out as if it had come alone, after the same checks. A worker
answers TIMED, with the answer in it. A stream answers as it does without, and sends a TIMED without an answer after the
last byte. The server keeps nothing of it. What it says is its own process id and times of its monotonic clock, which
nobody but the sender of the request gets.

A server that knows the message says so in WELCOME (``PathBit.TRACE``), so no other one ever gets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from ..errors import RemoteProtocolError
from ..rpc import HEADER_BYTES, OPCODES, Frame, decode, encode, message

#: What a server's span is, by its number. Numbers are never reused.
SPANS: Final = ("decode", "publish", "place", "look", "pack", "read", "store", "carry out", "delete")
#: Spans of one answer.
SPANS_MAX: Final = 16


@message(0x36, "16s H b")
class Traced(NamedTuple):
    """A request in a trace: the trace's id, and the request's opcode and body."""

    trace: bytes
    opcode: int
    body: bytes


@message(0x37, "I *BQQ H b", spans=SPANS_MAX)
class Timed(NamedTuple):
    """The server's process id; (number of :data:`SPANS`, began, ended) in monotonic ns; an answer's opcode and body."""

    pid: int
    spans: list[tuple[int, int, int]]
    opcode: int
    body: bytes


@message(0x78, "I I I")
class AskTrace(NamedTuple):
    """Let all clients of the cluster record ``ratio`` millionths of their calls, and log slow ones, for these seconds.

    0 seconds: no more. Answer: DONE, with the number of clients that are told at once.
    """

    ratio: int
    slow_ms: int
    seconds: int


@message(0x79, "I I I")
class OrderTrace(NamedTuple):
    """Push, manager to client: an admin has asked for this. ``seconds`` are those that are left; 0: no more."""

    ratio: int
    slow_ms: int
    seconds: int


#: Bit of MAP_GET's ``subscribe``: this client takes ORDER_TRACE.
SUBSCRIBE_TRACES: Final = 32
#: ``ratio`` of all calls, and the greatest ``slow_ms``: an hour.
RATIO_ALL: Final = 1_000_000
SLOW_MS_MAX: Final = 3_600_000


def fault_of(msg: AskTrace | OrderTrace, seconds_max: int) -> str:
    """Return what cannot be in such a message; empty if it is right."""
    if msg.ratio > RATIO_ALL or msg.slow_ms > SLOW_MS_MAX or msg.seconds > seconds_max:
        return f"traces are of a share of 1 at most, for {seconds_max} s at most, and slow is {SLOW_MS_MAX} ms at most"
    return ""


def traced(trace: bytes, msg: Any) -> Traced:
    """Return a request in a trace."""
    return Traced(trace, OPCODES[type(msg)], encode(msg)[HEADER_BYTES:])


def timed(pid: int, spans: list[tuple[int, int, int]], answer: Any) -> Timed:
    """Return an answer with what it took."""
    return Timed(pid, spans, OPCODES[type(answer)], encode(answer)[HEADER_BYTES:])


def request_in(msg: Traced, opcodes: Iterable[int], request_id: int) -> Frame:
    """Return the request in a message. Raise RemoteProtocolError if it is none of these."""
    if msg.opcode not in opcodes:
        raise RemoteProtocolError(f"TRACED with message {msg.opcode:#x}, which cannot be traced here")
    return Frame(msg.opcode, 0, 0, request_id, msg.body)


def answer_in(msg: Timed) -> Any:
    """Return the answer in a message. Raise RemoteProtocolError if it is malformed."""
    return decode(Frame(msg.opcode, 0, 0, 0, msg.body))


def named(spans: Sequence[tuple[int, int, int]]) -> list[tuple[str, int, int]]:
    """Return (name, began, ended) of the first spans. A number of a newer server's is called other."""
    return [(SPANS[number] if number < len(SPANS) else "other", *times) for number, *times in spans[:SPANS_MAX]]  # type: ignore[misc]
