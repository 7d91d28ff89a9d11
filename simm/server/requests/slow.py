"""Slow requests: what a worker or a stream logs of a request that took as long as ``--slow-ms`` says, or longer.

Without the setting nothing is there: a worker's and a stream's functions are their own. With it they are replaced by
others that look at the clock, also at run time (``simm ctl settings set slow_ms 20``). A line has the request's name
and its time, and nothing that the peer has sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ...ipc.counts import TIMED
from ...ipc.tally import Served
from ...rpc import CODECS
from ...tracing.slow import SLOW

if TYPE_CHECKING:
    from ..worker import Worker

_ns: Final = time.perf_counter_ns
_plain: Final = Served._timed


def watch_worker(worker: Worker) -> Callable[[int], None]:
    """Return what lets a worker log requests that take so many milliseconds; 0 for none."""
    plain_handle, plain_commit = worker.handle, worker._commit_one

    def take(slow_ms: int) -> None:
        handle, commit = plain_handle, plain_commit
        if slow_ms:
            handle = _watched(plain_handle, slow_ms, lambda _, frame: CODECS[frame.opcode].cls.__name__)
            commit = _watched(plain_commit, slow_ms, lambda *_: "Commit")
            worker.__dict__.update(handle=handle, _commit_one=commit)
        else:
            worker.__dict__.pop("handle", None)
            worker.__dict__.pop("_commit_one", None)
        worker.rings.serve_by(commit, handle)

    return take


def _watched(call: Callable[..., Any], slow_ms: int, name: Callable[..., str]) -> Callable[..., Any]:
    least = slow_ms * 1_000_000

    def watched(*arguments: Any) -> Any:
        began = _ns()
        try:
            return call(*arguments)
        finally:
            took = _ns() - began
            if took >= least:
                SLOW.line(f"a worker's {name(*arguments)}", took, ())

    return watched


def watch_stream(slow_ms: int) -> None:
    """Let the streams of this process log requests that take so many milliseconds; 0 for none."""
    least = slow_ms * 1_000_000

    def timed(self: Served, operation: int, began: int) -> None:
        _plain(self, operation, began)
        took = _ns() - began
        if took >= least:
            SLOW.line(f"a stream's {TIMED[operation]}", took, ())

    Served._timed = timed if slow_ms else _plain  # type: ignore[method-assign]
