"""Clients that stop in a chosen phase of a put: ``python -m tests.system.faults.put_phases SOCKET``.

Each line on stdin is ``{"phase": ..., "key": ..., "size": ..., "pinned": ...}`` and makes one client, a process forked
from this one with a session of its own. It pins the value under ``pinned``, begins to put ``size`` bytes under ``key``,
says ``{"pid": ...}`` when it has come to the phase, and stops (SIGSTOP). After a SIGCONT it completes the put and says
``{"status": ...}``: a Status, or ``broken`` if its connection is; and whether the pinned bytes were the same all along.
"""

from __future__ import annotations

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


def put(uds: str, key: str, size: int, pinned: str, result: dict[str, Any]) -> Iterator[str]:
    """Put a value, and yield each phase of that when it is reached."""
    digest = Hasher(DEFAULT_NAMESPACE)
    session = WorkerSession(uds, DEFAULT_NAMESPACE, WAIT_S)
    data, first = session.reader.data, session.reader.data_offset
    session.begin_copy()
    status, _, length, _, offset, _ = session.pin(digest(pinned))
    assert status == M.Status.OK
    seen = bytes(data[offset - first : offset - first + length])
    session.ask([(size, 1)])
    grant = session.pool.take(size)
    assert grant is not None
    yield "granted"
    value, start, half = value_of(key, 1, 1, size), grant[1] - first, size // 2
    session.begin_copy()
    data[start : start + half] = value[:half]
    yield "half"
    data[start + half : start + size] = value[half:]
    session.end_copy()
    yield "copied"
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


def client(uds: str, phase: str, key: str, size: int, pinned: str) -> None:
    """Be one client."""
    result: dict[str, Any] = {}
    for reached in put(uds, key, size, pinned, result):
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
