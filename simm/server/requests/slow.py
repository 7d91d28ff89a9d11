"""Slow requests: what a worker or a stream logs of a request that took as long as ``--slow-ms`` says, or longer.

Without the setting nothing is there: a worker's and a stream's functions are their own. With it they are replaced by
others that look at the clock, also at run time (``simm ctl settings set slow_ms 20``). A line has the request's name,
its time, and as fields the session and the trace that it belongs to; nothing else that the peer has sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...errors import line_about
from ...ipc.counts import TIMED
from ...ipc.tally import Served
from ...rpc import CODECS, decode
from ...tracing.slow import SLOW
from ...wire.epoch_messages import ForNamespace
from ...wire.trace_messages import Traced

if TYPE_CHECKING:
    from ...net.peer import Peer
    from ...rpc import Frame
    from ..worker import Worker

_ns: Final = time.perf_counter_ns
_plain: Final = Served._timed


def watch_worker(worker: Worker) -> Callable[[int], None]:
    """Return what lets a worker log requests that take so many milliseconds; 0 for none."""
    plain_handle, plain_commit = worker.handle, worker._commit_one

    def take(slow_ms: int) -> None:
        handle, commit = plain_handle, plain_commit
        if slow_ms:
            handle = _watched(plain_handle, slow_ms, _of_frame)
            commit = _watched(plain_commit, slow_ms, lambda session, _: ("Commit", line_about(session.session)))
            worker.__dict__.update(handle=handle, _commit_one=commit)
        else:
            worker.__dict__.pop("handle", None)
            worker.__dict__.pop("_commit_one", None)
        worker.rings.serve_by(commit, handle)

    return take


def _of_frame(peer: Peer, frame: Frame) -> tuple[str, dict[str, str]]:
    """Return a request's name, and what a line about it is about. One inside another is named as if it came alone."""
    opcode, trace = frame.opcode, b""
    if CODECS[opcode].cls is Traced:
        traced = decode(frame)
        opcode, trace = traced.opcode, traced.trace
    elif CODECS[opcode].cls is ForNamespace:
        opcode = decode(frame).opcode
    return CODECS[opcode].cls.__name__, line_about(peer.session, trace)


def _watched(
    call: Callable[..., Any], slow_ms: int, name: Callable[..., tuple[str, dict[str, str]]]
) -> Callable[..., Any]:
    least = slow_ms * 1_000_000

    def watched(*arguments: Any) -> Any:
        began = _ns()
        try:
            return call(*arguments)
        finally:
            took = _ns() - began
            if took >= least:
                request, about = name(*arguments)
                SLOW.line(f"a worker's {request}", took, (), about=about)

    return watched


def watch_stream(slow_ms: int) -> None:
    """Let the streams of this process log requests that take so many milliseconds; 0 for none."""
    least = slow_ms * 1_000_000

    def timed(self: Served, operation: int, began: int) -> None:
        _plain(self, operation, began)
        took = _ns() - began
        if took >= least:
            SLOW.line(f"a stream's {TIMED[operation]}", took, (), about=line_about(trace_id=self.trace))

    Served._timed = timed if slow_ms else _plain  # type: ignore[method-assign]
