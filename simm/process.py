"""What every long-running SiMM process does to itself: signals, its parent's death, its descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Collection, Sequence
from typing import Final

from .loop import Loop, Peer

_PR_SET_PDEATHSIG: Final = 1
#: Ends of the pairs that signals write into. They stay open for life: a signal may come while a process ends.
_WAKES: Final[list[socket.socket]] = []


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Ask the kernel to send ``signum`` when our parent ends (prctl(2) PR_SET_PDEATHSIG). Best effort."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def stop_on_signals(loop: Loop, *, interrupt: bool = False) -> None:
    """Stop the loop at SIGTERM, and at SIGINT if asked; else SIGINT is left to the parent process."""
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    _WAKES.extend((wake_read, wake_write))
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, (lambda *_: loop.stop()) if interrupt else signal.SIG_IGN)

    def woken(_mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            wake_read.recv(64)

    loop.watch(wake_read, woken)


def raise_file_limit() -> None:
    """Open as many files as the administrator lets us: thousands of connections do not fit the usual soft limit.

    Children inherit it. A session with a commit ring takes a worker two descriptors, and a client's process one more.
    """
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with(loop: Loop, pid: int) -> None:
    """Stop the loop when process ``pid`` has ended, or at once when it has already."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        loop.call_later(0.0, loop.stop)
        return
    loop.watch(fd, lambda _mask: loop.stop())


def close_descriptors_but(keep: Collection[int]) -> None:
    """In a forked child: close every inherited descriptor that is not in ``keep`` (0, 1 and 2 stay).

    The parent's socket objects must stay referenced afterwards: closed again by the collector they would take
    a descriptor with a reused number along.
    """
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


class Child:
    """A forked process and our end of its socket pair."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.peer: Peer | None = None

    def __repr__(self) -> str:
        return f"<Child {self.pid}>"

    def ended(self) -> bool:
        """Has it? Reaps it then."""
        return reaped(self.pid)

    def lost(self) -> None:
        """It has ended: close what led to it."""
        if self.peer is not None:
            self.peer.close("process ended")
        self.sock.close()


def reaped(pid: int) -> bool:
    """Has the child ended? Reaps it then."""
    try:
        done, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return done == pid


def end_children(children: Sequence[Child], seconds: float) -> None:
    """SIGTERM to our own children, then SIGKILL to what is left after ``seconds``; reaped, and their ends closed."""
    left = [child.pid for child in children]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # a stopped process cannot end
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        left = [pid for pid in left if not reaped(pid)]
        if left:
            time.sleep(0.005)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while not reaped(pid):
            time.sleep(0.001)
    for child in children:
        child.lost()
