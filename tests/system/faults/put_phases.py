"""Clients that stop in a chosen phase of a put: ``python -m tests.system.faults.put_phases SOCKET``.

Each line on stdin is ``{"phase": ..., "key": ..., "size": ..., "pinned": ..., "idle": ...}`` and makes one client, a
process forked from this one with a session of its own. It pins the value under ``pinned``, gets ``idle`` grants more
than it needs, begins to put ``size`` bytes under ``key``, says ``{"pid": ...}`` when it has come to the phase, and
stops (SIGSTOP). After a SIGCONT it answers recalls, completes the put and says ``{"status": ..., "recalled": ...,
"returned": ..., "pinned": ...}``: a Status, or ``broken`` if its connection is; the bytes that it was asked for, and
the idle grants that it has returned; and whether the pinned bytes were the same all along.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

from simm.arena.hashing import Hasher
from simm.constants import DEFAULT_NAMESPACE
from simm.errors import TransportError
from simm.ipc.session import WorkerSession
from simm.wire import messages as M
from tests.support.values import value_of

WAIT_S: Final = 60.0
#: In the order of a put. Posted: the commit lies in the ring, and nobody has rung. Committed: its answer was read.
PHASES: Final = ("granted", "half", "copied", "posted", "committed")


def answer_recalls(session: WorkerSession, result: dict[str, Any]) -> None:
    """Do what a client's own thread does all the time, also in the midst of a put."""
    with contextlib.suppress(TransportError):  # the commit says so
        kept = idle(session)
        result["recalled"] = result.get("recalled", 0) + session.maintain()
        result["returned"] = result.get("returned", 0) + kept - idle(session)


def idle(session: WorkerSession) -> int:
    """Return the number of grants that nobody writes into."""
    return sum(map(len, session.pool.stocks.values()))


def put(
    session: WorkerSession, key: str, size: int, pinned: str, more: int, result: dict[str, Any]
) -> Iterator[str]:
    """Put a value, and yield each phase of that when it is reached."""
    digest = Hasher(DEFAULT_NAMESPACE)
    data, first = session.reader.data, session.reader.data_offset
    session.begin_copy()
    status, _, length, _, offset, _ = session.pin_one(digest(pinned))
    assert status == M.Status.OK
    seen = bytes(data[offset - first : offset - first + length])
    session.ask([(size, 1 + more)])
    grant = session.pool.take(size)
    assert grant is not None and idle(session) == more
    yield "granted"
    answer_recalls(session, result)
    value, start, half = value_of(key, 1, 1, size), grant[1] - first, size // 2
    session.begin_copy()
    data[start : start + half] = value[:half]
    yield "half"
    answer_recalls(session, result)
    data[start + half : start + size] = value[half:]
    session.end_copy()
    yield "copied"
    answer_recalls(session, result)
    entry = (digest(key), grant[0], size, 0, 0, 0)
    try:
        session.acquire()
        ticket = session.submit_locked(M.Commit([entry], []))
        yield "posted"
        result["status"] = session.wait_locked(ticket).statuses[0]
    except TransportError:
        result["status"] = "broken"
    yield "committed"
    result["pinned"] = bytes(data[offset - first : offset - first + length]) == seen


def say(what: dict[str, Any]) -> None:
    """Say a line at once, whole: several clients share the pipe."""
    os.write(1, f"{json.dumps(what)}\n".encode())


def client(uds: str, phase: str, key: str, size: int, pinned: str, idle: int) -> None:
    """Be one client."""
    result: dict[str, Any] = {}
    session = WorkerSession(uds, DEFAULT_NAMESPACE, WAIT_S)
    for reached in put(session, key, size, pinned, idle, result):
        if reached == phase:
            say({"pid": os.getpid()})
            os.kill(os.getpid(), signal.SIGSTOP)
    say(result)


def main() -> int:
    """See the module."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    for line in sys.stdin:
        if os.fork() == 0:
            code = 1
            try:
                client(sys.argv[1], **json.loads(line))
                code = 0
            finally:
                os._exit(code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
