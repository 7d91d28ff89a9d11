"""What the tests of ``simm/shm.py`` share: names of their own, forked children, interpreters of their own."""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import socket
from collections.abc import Callable
from typing import Any

from simm import shm

MIB = 1 << 20
SIZE = 2 * MIB
PREFIX = f"simmtest-{os.getpid()}-"
_COUNTER = iter(range(1 << 30))


def fresh_name() -> str:
    return f"{PREFIX}{next(_COUNTER)}"


def child(code: Callable[[], Any]) -> int:
    """Fork, run, and return the pid. The child's exit status is what `code` returns, 99 for an exception."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = int(code() or 0)
        finally:
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def expect_segv() -> None:
    """In a child that is about to die of SIGSEGV on purpose: no report, no core file."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Peer:
    """A forked child that runs `code(peer)` and trades single bytes with the test: no sleeping, no polling."""

    def __init__(self, code: Callable[[Peer], Any]) -> None:
        self.link, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 99
            try:
                self.link.close()
                self.link = theirs
                status = int(code(self) or 0)
            finally:
                os._exit(status)
        theirs.close()
        self.link.settimeout(120)

    def tell(self, byte: bytes = b".") -> None:
        self.link.sendall(byte)

    def hear(self) -> bytes:
        return self.link.recv(1)

    def hear_pid(self) -> int:
        """Descriptor of the process (a grandchild) that sent its pid."""
        return os.pidfd_open(int(self.link.recv(20)))

    def end(self, how: int = 0) -> int:
        if how:
            os.kill(self.pid, how)
        else:
            self.tell()
        try:
            return status_of(self.pid)
        finally:
            self.link.close()


def await_end(pidfd: int) -> None:
    """Wait until a process that is not our child is gone, with all its locks (its sockets close before them)."""
    ready, _, _ = select.select([pidfd], [], [], 120)
    os.close(pidfd)
    assert ready


def owner_locked(name: str) -> bool:
    """Return True if a live process holds the segment's owner lock."""
    return shm.is_locked(name, shm._OWNER_BYTE, 1)


def writer_locked(name: str) -> bool:
    """Return True if a live process holds the segment's writer lock."""
    return shm.is_locked(name, shm._WRITER_BYTE, 1)


def lock_owner(segment: shm.OwnedSegment) -> None:
    """Take the owner lock again. No effect while this process has it."""
    if not segment.is_owner:
        segment._drop("_owner_fd")
        segment._owner_fd = segment._locked_fd(shm._OWNER_BYTE, "is owned by another live process")
        segment._owner_pid = os.getpid()
