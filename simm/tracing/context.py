"""The trace that a call belongs to, as W3C Trace Context names it.

    with context("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"):
        client.get_into("prefix-1f3a", page)      # a span of that trace, whatever the client's ratio

The caller decides: its flag *sampled* makes a client that traces record the call, and its absence keeps the call out,
whatever the client's ratio. A client that does not trace looks at none of this.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final, NamedTuple

from ..errors import UsageError

#: The sampled flag of trace-flags; the other bits mean nothing here.
SAMPLED: Final = 1
#: version, trace-id, parent-id, trace-flags, and what a later version adds.
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: A later version may be longer; nobody sends more than this.
_CHARACTERS_MAX: Final = 512


class TraceContext(NamedTuple):
    """A trace, the caller's span in it, and whether the caller records it."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @classmethod
    def parse(cls, text: object) -> TraceContext:
        """Return what a traceparent says. Raises UsageError, which names the part that is wrong. O(1)."""
        if not isinstance(text, str):
            raise UsageError(f"a traceparent is text, not {type(text).__name__}")
        if len(text) > _CHARACTERS_MAX:
            raise UsageError(f"a traceparent of {len(text)} characters: version 00 has 55")
        form = _FORM.fullmatch(text)
        if form is None:
            raise UsageError(
                f"{text!r} is no traceparent: it is VERSION-TRACE-PARENT-FLAGS in 2, 32, 16 and 2 lower-case "
                "hexadecimal digits, as 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
            )
        version, trace, span, flags, more = form.groups()
        if version == "ff":
            raise UsageError("a traceparent of version ff: there is no such version")
        if version == "00" and more is not None:
            raise UsageError("a traceparent of version 00 ends after its flags")
        trace_id, span_id = bytes.fromhex(trace), bytes.fromhex(span)
        if not any(trace_id):
            raise UsageError("the trace id of a traceparent must not be all zeros")
        if not any(span_id):
            raise UsageError("the parent id of a traceparent must not be all zeros")
        return cls(trace_id, span_id, bool(int(flags, 16) & SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.sampled):02x}"


#: The caller's trace in this thread or task; None without one.
CONTEXT: Final[ContextVar[TraceContext | None]] = ContextVar("simm_trace_context", default=None)


@contextlib.contextmanager
def context(traceparent: str) -> Iterator[TraceContext]:
    """Let the calls in the block belong to the caller's trace, in this thread or task. Raises UsageError."""
    parsed = TraceContext.parse(traceparent)
    token = CONTEXT.set(parsed)
    try:
        yield parsed
    finally:
        CONTEXT.reset(token)
